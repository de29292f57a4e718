"""pytest fixtures `cluster` and `own_cluster`: load with `pytest_plugins = ["tests.minislurm.fixtures"]`.

Under pytest-xdist all workers share one `cluster`: the first that needs it boots it, and the controlling
process takes it away at the end. Each pytest session holds a lock on a folder of its own, so sessions do not
meet, and what a killed session left is found and cleaned by the next one. MINISLURM_ROOTFS=DIR makes the
whole suite run on the Slurm in that Debian root (see `python -m tests.minislurm debootstrap`).
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from filelock import FileLock

from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.leftovers import clean_all
from tests.minislurm.login import Login

SHARED_NODES = 4
TEMP = Path("/tmp")  # short, and visible to all users: sockets and jobs live below


class BootCluster(Protocol):
    """What `own_cluster` gives: boots a cluster that lives until the end of the test."""

    def __call__(self, **options: Any) -> Cluster: ...


class Session:
    """The folder of one pytest session, held by the process that the user started."""

    def __init__(self, folder: Path, lock: int | None = None) -> None:
        self.folder, self._lock = folder, lock
        self.rootfs = os.environ.get("MINISLURM_ROOTFS") or None

    @classmethod
    def claim(cls, checkout: Path) -> Session:
        """The first folder of this checkout that no living session holds, cleaned."""
        name = hashlib.sha256(f"{os.getuid()} {checkout}".encode()).hexdigest()[:8]
        folders = (TEMP / f"minislurm-{name}-{i}" for i in itertools.count(1))
        session = next(cls(folder, lock) for folder in folders if (lock := _try_lock(_lock_file(folder))))
        session.clean()
        return session

    @classmethod
    def of(cls, config: pytest.Config) -> Session:
        """The session this pytest process belongs to."""
        return config.stash[SESSION]

    @property
    def cluster_root(self) -> Path:
        return self.folder / "shared"

    def clean(self) -> None:
        """Take away every cluster below the folder, and the folder."""
        if os.geteuid() == 0:
            clean_all(self.folder)

    def close(self) -> None:
        self.clean()
        if self._lock is not None:
            _lock_file(self.folder).unlink()
            os.close(self._lock)

    def shared_cluster(self) -> Cluster:
        """The cluster of the session, booted by whoever comes first."""
        self.folder.mkdir(exist_ok=True)
        with FileLock(str(self.folder / "boot.lock")):
            if (self.cluster_root / "booted").exists():
                return Cluster.attach(self.cluster_root)
            cluster = Cluster.boot(self.cluster_root, nodes=SHARED_NODES, rootfs=self.rootfs)
            (self.cluster_root / "booted").touch()
            return cluster

    def own_root(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="own-", dir=self.folder))


def _lock_file(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _try_lock(path: Path) -> int | None:
    """Lock a file that its holder deletes in the end; None if it is taken. The lock ends with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):  # else the holder deleted it just now
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


SESSION = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[SESSION] = Session(Path(worker["minislurm_folder"]))
    else:
        config.stash[SESSION] = Session.claim(config.rootpath)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist: tell a worker which session it belongs to."""
    node.workerinput["minislurm_folder"] = str(Session.of(node.config).folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        Session.of(config).close()


def _skip_if_unsupported(session: Session) -> None:
    if why := preflight.missing(session.rootfs):
        pytest.skip(why)


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """The 4-node Slurm cluster all tests share. Leave it as you found it: no jobs, all nodes on."""
    session = Session.of(pytestconfig)
    _skip_if_unsupported(session)
    return session.shared_cluster()


@pytest.fixture
def login(cluster: Cluster) -> Login:
    """The way into the shared cluster over ssh. Others use it too: leave it listening, and count on your own one."""
    if why := preflight.missing_login(cluster.options.rootfs):
        pytest.skip(why)
    return cluster.login()


@pytest.fixture
def own_cluster(pytestconfig: pytest.Config) -> Iterator[BootCluster]:
    """Boot a cluster for this test alone: `own_cluster(nodes=2, gpus=0, ...)` with the fields of Options."""
    session = Session.of(pytestconfig)
    _skip_if_unsupported(session)
    booted: list[Cluster] = []

    def boot(**options: Any) -> Cluster:
        options = {"rootfs": session.rootfs, **options}
        if options.get("accounting") and (why := preflight.missing_accounting(options["rootfs"])):
            pytest.skip(why)
        booted.append(Cluster.boot(session.own_root(), **options))
        return booted[-1]

    yield boot
    for one in booted:
        one.down()
