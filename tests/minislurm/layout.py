"""Where every file of a cluster is. Nothing else in the package builds a path below the root."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tests.minislurm.errors import BadInput

SOCKET_PATH_MAX = 100  # a unix socket's address holds 107 bytes; munge adds some


class Layout(NamedTuple):
    """The folder of one cluster. It belongs to the cluster: `down` removes it."""

    root: Path

    @property
    def record(self) -> Path:
        """Options and notes of the cluster. Written first, so that whatever follows can be cleaned up."""
        return self.root / "cluster.json"

    @property
    def new_record(self) -> Path:
        """The record while it is written."""
        return self.root / "cluster.json.new"

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def cgroup_conf(self) -> Path:
        return self.root / "cgroup.conf"

    @property
    def gres_conf(self) -> Path:
        return self.root / "gres.conf"

    @property
    def hosts(self) -> Path:
        return self.root / "hosts"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "munge.sock"

    @property
    def passwd(self) -> Path:
        """The users as the nodes see them, once there are accounts of ours."""
        return self.root / "accounts" / "passwd"

    @property
    def group(self) -> Path:
        return self.passwd.with_name("group")

    @property
    def homes(self) -> Path:
        """Home folders of our accounts; the laptop does not see them."""
        return self.root / "home"

    @property
    def login(self) -> Path:
        """Keys and settings of the sshd and of its clients."""
        return self.root / "login"

    @property
    def sshd_config(self) -> Path:
        return self.login / "sshd_config"

    @property
    def login_lock(self) -> Path:
        return self.root / "login.lock"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.root / "slurmdbd.conf"

    @property
    def database(self) -> Path:
        """MariaDB's files."""
        return self.root / "database"

    @property
    def database_socket(self) -> Path:
        return self.root / "database.sock"

    @property
    def tools(self) -> Path:
        """Programs that run inside the nodes."""
        return self.root / "tools"

    @property
    def runs(self) -> Path:
        """Process records and start-up scripts of the nodes."""
        return self.root / "run"

    @property
    def freezer(self) -> Path:
        """Mount point of a private cgroup v1 freezer, on machines that have no usable one."""
        return self.root / "freezer"

    @property
    def nodev(self) -> bool:
        """Whether device files do not work where the root is."""
        return bool(os.statvfs(self.root).f_flag & os.ST_NODEV)

    def gpu(self, index: int) -> Path:
        return self.root / f"gpu{index}"

    def holder(self, node: str) -> Path:
        """Record of the process that holds the node's namespaces until its init is there."""
        return self.runs / f"{node}.holder"

    def init(self, node: str) -> Path:
        """Record of the node's init (pid 1). It exists once the node is up."""
        return self.runs / f"{node}.init"

    def script(self, node: str) -> Path:
        """The shell script that makes the node."""
        return self.runs / f"{node}.sh"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def spool(self, node: str) -> Path:
        return self.root / "spool" / node

    def own(self, node: str) -> Path:
        """Things that only this node has: private folders, mount points."""
        return self.root / "own" / node

    def make_root(self) -> None:
        """Create the root. It is open to all users: jobs need not be root's."""
        if not re.fullmatch(r"[\w./+-]+", str(self.root)):
            raise BadInput(f"{self.root}: slurm.conf takes no such characters in a path; choose another root")
        if len(str(self.munge_socket)) > SOCKET_PATH_MAX:
            raise BadInput(f"{self.root}: the path is too long for a socket below it; choose a shorter root")
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)

    def make(self) -> None:
        """Create the folders in the root."""
        for folder in (self.logs, self.state, self.munge, self.tools, self.runs):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
