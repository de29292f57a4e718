"""File systems for single nodes: one that lags like NFS, one that fails on demand.

Both live in one node's mount namespace and die with the node. Both show a folder of the machine, which may
even be the mount point itself: then the node sees its own, lagging or failing, version of it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

from tests.minislurm.errors import BadInput, Unsupported
from tests.minislurm.room import Arg, Room

SFTP_SERVER = "/usr/lib/openssh/sftp-server"
PYTHON = "/usr/bin/python3"  # the one that sees Debian's python3-fusepy
PROGRAMS = ("sshfs", "sftp-server")  # what runs in a node for a mount, besides our own tools


class Mount:
    """One mounted file system in one node."""

    def __init__(self, room: Room, node: str, source: Arg, mountpoint: Arg) -> None:
        self.room, self.node = room, node
        self.mountpoint = Path(mountpoint).resolve()
        own = room.layout.own(node)
        own.mkdir(parents=True, exist_ok=True)
        number = 1 + sum(1 for _ in own.glob("mount*"))
        self.folder = own / f"mount{number}"  # our files about it
        self.export = self.folder / "export"  # the source, reachable even if it is mounted over
        self.export.mkdir(parents=True)
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self._run("mount", "--bind", os.path.realpath(source), self.export)

    def _run(self, *argv: Arg) -> str:
        return self.room.run(self.node, argv, cwd="/").stdout

    def unmount(self) -> None:
        """The node sees the bare mount point again."""
        self._run("umount", "-l", self.mountpoint)
        self._run("umount", "-l", self.export)


class NfsLikeMount(Mount):
    """sshfs over a pipe to a private sftp-server, with caches as an NFS client has them: for `cache_s`
    seconds a new file may be unseen and a size may be old, but opening a file asks the server."""

    def __init__(self, room: Room, node: str, source: Arg, mountpoint: Arg, cache_s: float) -> None:
        _demand(room, node, "sshfs openssh-sftp-server", "/usr/bin/sshfs", SFTP_SERVER, "/dev/fuse")
        super().__init__(room, node, source, mountpoint)
        server = self.folder / "server"
        server.write_text(f"#!/bin/sh\necho $$ > {self.folder}/server.pid\nexec {SFTP_SERVER}\n")
        server.chmod(0o755)
        options = f"ssh_command={server},allow_other,{_cache_options(cache_s)}"
        self._run("sshfs", "-o", options, f"server:{self.export}", self.mountpoint)

    def hang(self) -> None:
        """The server stops answering: whoever touches the mount waits, and not even SIGKILL ends the wait."""
        self._signal_server("STOP")

    def resume(self) -> None:
        """The server answers again."""
        self._signal_server("CONT")

    def _signal_server(self, name: str) -> None:
        self._run("sh", "-c", f"kill -{name} $(cat {self.folder}/server.pid)")


def _cache_options(cache_s: float) -> str:
    if not cache_s:
        return "dir_cache=no,entry_timeout=0,attr_timeout=0,negative_timeout=0,direct_io"
    timeouts = ["dcache_timeout", "dcache_stat_timeout", "entry_timeout", "attr_timeout", "negative_timeout"]
    return ",".join([*(f"{name}={cache_s:g}" for name in timeouts), f"dcache_dir_timeout={3 * cache_s:g}"])


class FaultyMount(Mount):
    """Shows the source as it is until told to fail. `op` is a regular expression for the whole name of an
    operation (open, create, read, write, rename, getattr, ...), `path` one for a part of the path in it."""

    def __init__(self, room: Room, node: str, source: Arg, mountpoint: Arg) -> None:
        _demand(room, node, "python3-fusepy libfuse2", PYTHON, "/dev/fuse")
        if room.run(node, [PYTHON, "-c", "import fusepy"], cwd="/", check=False).returncode:
            raise Unsupported(f"missing in node {node}: apt-get install python3-fusepy libfuse2")
        super().__init__(room, node, source, mountpoint)
        self._rules_file = self.folder / "rules.json"
        self.clear()
        tool = room.layout.tools / "faultfs.py"
        shutil.copyfile(Path(__file__).with_name("faultfs.py"), tool)
        self._run(PYTHON, "-I", tool, self.export, self.mountpoint, self._rules_file)

    def fail(self, op: str, path: str, error: str) -> None:
        """From now on these operations fail with an errno name such as ENOSPC."""
        if error not in errno.errorcode.values():
            raise BadInput(f"{error} is no errno name")
        self._add({"op": op, "path": path, "action": error})

    def stall(self, op: str, path: str) -> None:
        """From now on these operations hang until `clear`."""
        self._add({"op": op, "path": path, "action": "stall"})

    def delay(self, op: str, path: str, seconds: float) -> None:
        """From now on these operations take longer."""
        self._add({"op": op, "path": path, "action": "delay", "seconds": seconds})

    def clear(self) -> None:
        """Forget all faults; what stalls goes on."""
        self._rules: list[dict[str, object]] = []
        self._publish()

    def _add(self, rule: dict[str, object]) -> None:
        self._rules.append(rule)
        self._publish()

    def _publish(self) -> None:
        new = self._rules_file.with_suffix(".new")
        new.write_text(json.dumps(self._rules))
        new.replace(self._rules_file)


def _demand(room: Room, node: str, packages: str, *files: str) -> None:
    test = " && ".join(f"test -e {file}" for file in files)
    if room.run(node, ["sh", "-c", test], cwd="/", check=False).returncode:
        raise Unsupported(f"missing in node {node}: apt-get install {packages} (and /dev/fuse)")
