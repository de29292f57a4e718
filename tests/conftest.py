"""Fixtures of the whole suite."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import Bench
from tests.minislurm.cluster import Cluster
from tests.solo import Solo

pytest_plugins = ["tests.minislurm.fixtures", "tests.miniray.fixtures"]
# Tests on real Slurm start processes of other users and long paths break sockets: keep it short and open.
SHARED = Path("/tmp")


def pytest_configure() -> None:
    """Who starts the suite in the background of a script, or under nohup, leaves it signals that are ignored; so would
    be all that it starts."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory that every node sees."""
    name = tempfile.mkdtemp(prefix="gangrun-test-", dir=SHARED)
    yield Path(name)
    shutil.rmtree(name, ignore_errors=True)


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Solo]:
    """One rank without Slurm; what a test leaves running is ended."""
    solo = Solo(tmp_path)
    yield solo
    solo.close()


@pytest.fixture
def bench(cluster: Cluster, shared_dir: Path) -> Bench:
    """Runs drivers and executors on the session's cluster."""
    return Bench(cluster, shared_dir)


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite may itself run in an allocation; its variables are not the tests'."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH_", "SRUN_", "SKYPILOT_"))]:
        monkeypatch.delenv(name)
