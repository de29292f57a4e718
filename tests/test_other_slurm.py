"""The tests of the gang and of groups once more, on the Slurm version that this machine does not have.

On Debian 12 (Slurm 22.05) that is Debian 13's 24.11, and the other way round, in a root made by debootstrap once and
kept in /var/tmp.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.bench import CHECKOUT
from tests.minislurm import preflight
from tests.minislurm.errors import BedError
from tests.minislurm.rootfs import prepare

OTHER_SUITE = {"bookworm": "trixie", "trixie": "bookworm"}
FILES = (
    *("tests/test_gang_on_slurm.py", "tests/test_examples.py", "tests/test_groups.py", "tests/test_group_sharing.py"),
    *("tests/test_group_members.py", "tests/test_group_nodes.py"),
)


def other_suite() -> str:
    release = Path("/etc/os-release").read_text()
    return next((other for name, other in OTHER_SUITE.items() if f"VERSION_CODENAME={name}" in release), "trixie")


@pytest.mark.slow
@pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))
@pytest.mark.skipif("MINISLURM_ROOTFS" in os.environ, reason="already on the other one")
def test_a_gang_behaves_alike_on_the_other_slurm() -> None:
    root = Path("/var/tmp/gangrun-%s" % other_suite())
    with FileLock(f"{root}.lock"):
        try:
            prepare(root, other_suite())
        except BedError as error:
            pytest.skip(str(error))
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-m", "not slow", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        argv, cwd=CHECKOUT, env={**os.environ, "MINISLURM_ROOTFS": str(root)}, text=True, capture_output=True
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0
