"""What the test bed promises about its own life: it leaves nothing, it survives aborted runs, sessions do not meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.minislurm import BadInput, Cluster, preflight
from tests.minislurm.fixtures import BootCluster, Session
from tests.minislurm.options import CHECKOUT

BOOT = "import sys, time; from tests.minislurm import Cluster; Cluster.boot(sys.argv[1], nodes=3); time.sleep(1000)"
SUITE = """
import time, pathlib, pytest
@pytest.mark.parametrize("i", range(4))
def test_it(cluster, i):
    assert len(cluster.run("ctl", ["srun", "-N4", "hostname"]).stdout.split()) == 4
    pathlib.Path("root").write_text(str(cluster.root))
    assert not pathlib.Path("stay").exists() or time.sleep(1000)
"""

pytestmark = pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))


@pytest.fixture
def root(pytestconfig: pytest.Config) -> Iterator[Path]:
    """A folder for a cluster, taken away whatever happens."""
    path = Session.of(pytestconfig).own_root()
    yield path
    Cluster.clean_leftovers(path)


def remains(root: Path, prefix: str) -> list[str]:
    """Everything on this machine that belongs to the cluster at `root`."""
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{prefix}-*")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(root) in line]
    return cgroups + mounts + processes_about(root) + ([str(root)] if root.exists() else [])


def processes_about(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and str(os.getpid()) != entry.parent.name:
            found.append(words)
    return found


def prefix_of(root: Path) -> str:
    return str(json.loads((root / "cluster.json").read_text())["cgroups"]["prefix"])


def boot_elsewhere(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BOOT, str(root)], cwd=CHECKOUT)


class TestLife:
    def test_down_leaves_nothing(self, root: Path) -> None:
        interfaces = os.listdir("/sys/class/net")
        cluster = Cluster.boot(root, nodes=2)
        cluster.run("ctl", ["srun", "-N2", "true"])
        running = cluster.popen("n1", ["sleep", "1000"])
        prefix = prefix_of(root)
        assert remains(root, prefix)
        cluster.down()
        assert running.wait(5)
        assert remains(root, prefix) == [] and os.listdir("/sys/class/net") == interfaces

    @pytest.mark.parametrize(
        "when", ["run/switch.holder", "run/n1.holder", "slurm.conf", "run/n3.init", "run/slurmd.n1.pid"]
    )
    def test_a_boot_cleans_up_after_one_that_was_killed(self, root: Path, when: str) -> None:
        with boot_elsewhere(root) as aborted:
            while not (root / when).exists():
                assert aborted.poll() is None
                time.sleep(0.001)
            aborted.kill()
        with Cluster.boot(root, nodes=2) as cluster:
            assert cluster.run("ctl", ["srun", "-N2", "hostname"]).stdout.count("n") == 2
            prefix = prefix_of(root)
        assert remains(root, prefix) == []

    def test_a_cluster_whose_owner_lives_is_not_a_leftover(self, root: Path) -> None:
        with boot_elsewhere(root) as owner:
            while not (root / "cluster.json").exists():
                time.sleep(0.01)
            with pytest.raises(BadInput, match=f"process {owner.pid}"):
                Cluster.boot(root, nodes=1)
            owner.kill()

    def test_another_process_attaches_and_takes_it_down(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1)
        other = Cluster.attach(cluster.root)
        assert (other.nodes, other.addresses, other.slurm_conf) == (["n1"], cluster.addresses, cluster.slurm_conf)
        assert other.run("ctl", ["srun", "hostname"]).stdout == "n1\n"
        other.down()
        assert not cluster.root.exists()
        cluster.down()  # twice is fine

    def test_a_boot_that_fails_shows_the_log_and_leaves_nothing(self, root: Path) -> None:
        with pytest.raises(Exception, match="Nonsense"):
            Cluster.boot(root, nodes=1, extra_conf="Nonsense=1")
        assert not root.exists() and processes_about(root) == []


class TestCommand:
    def test_up_shell_status_down(self, root: Path) -> None:
        def command(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "tests.minislurm", words[0], "--root", str(root), *words[1:]]
            return subprocess.run(argv, cwd=CHECKOUT, text=True, capture_output=True, check=False, timeout=60)

        assert "2 nodes" in command("up", "-n", "2").stdout
        assert "down" in command("up").stderr, "a second one says how to get rid of the first"
        done = command("shell", "n2", "--", "sh", "-c", "hostname; pwd; exit 7")
        assert (done.stdout, done.returncode) == (f"n2\n{CHECKOUT}\n", 7)
        assert "10.77.0.12      on   idle" in command("status").stdout
        assert command("down").returncode == 0 and not root.exists()


class TestOddMachines:
    """The command on a machine made odd in a mount namespace of its own."""

    def up_srun_down(self, spoil: str, root: Path, *options: str) -> str:
        bed = f"{sys.executable} -m tests.minislurm"
        words = f"{bed} up -n 1 --root {root} {' '.join(options)} && {bed} shell --root {root} ctl srun -G1"
        script = f"{spoil} && {words} sh -c 'hostname; cat {root}/gpu0'; {bed} down --root {root}"
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        done = subprocess.run(argv, cwd=CHECKOUT, text=True, capture_output=True, check=False, timeout=60)
        assert "\nn1\n" in done.stdout, done.stdout + done.stderr
        return done.stdout + done.stderr

    def test_without_cgroups_a_note_says_what_is_used_instead(self, root: Path) -> None:
        said = self.up_srun_down("umount -R -l /sys/fs/cgroup", root)
        assert "note: no cgroup hierarchy" in said or "note: control groups are not usable" in said

    def test_gpus_work_where_device_files_do_not(self, root: Path) -> None:
        said = self.up_srun_down("mount -t tmpfs -o nodev tmpfs /mnt", Path("/mnt") / root.name)
        assert "gpu0: No such device or address" in said, "not: permission denied"


class TestSessions:
    """Whole pytest sessions, in a checkout of their own."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        (tmp_path / "test_it.py").write_text(SUITE)
        (tmp_path / "pytest.ini").touch()
        return tmp_path

    def pytest_in(self, folder: Path, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.minislurm.fixtures", *words]
        env = {**os.environ, "PYTHONPATH": CHECKOUT}
        return subprocess.Popen(argv, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def test_workers_share_one_cluster_and_leave_nothing(self, checkout: Path) -> None:
        first, second = self.pytest_in(checkout, "-n2"), self.pytest_in(checkout, "-n2")
        for session in (first, second):  # at the same time, in the same checkout
            said = session.communicate(timeout=60)[0]
            assert "4 passed" in said, said
        folder = Path((checkout / "root").read_text()).parent
        assert not folder.exists() and processes_about(folder) == []

    def test_a_killed_session_is_cleaned_by_the_next(self, checkout: Path) -> None:
        (checkout / "stay").touch()
        with self.pytest_in(checkout) as killed:
            while not (checkout / "root").exists() or not (checkout / "root").read_text():
                time.sleep(0.05)
            killed.send_signal(signal.SIGKILL)
        root = Path((checkout / "root").read_text())
        assert processes_about(root)
        (checkout / "stay").unlink()
        with self.pytest_in(checkout) as session:
            assert "4 passed" in session.communicate(timeout=60)[0]
        assert (checkout / "root").read_text() == str(root), "the same folder was used again"
        assert processes_about(root) == []
