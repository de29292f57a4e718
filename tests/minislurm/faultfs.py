"""A FUSE file system that shows a folder as it is, and fails, stalls or delays where a rules file says so.

    python3 faultfs.py SOURCE MOUNTPOINT RULES      (goes to the background once mounted)

Runs inside a node with the system's python3 and Debian's python3-fusepy; imports nothing of this package.
RULES is JSON: [{"op": REGEX, "path": REGEX, "action": "ENOSPC" | "stall" | "delay", "seconds": 0.5}, ...].
`op` must match the whole name of a method below, `path` any part of the path below the mount point. A change
of the file counts from the next operation on; a stalled one goes on when its rule is gone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from typing import Any

try:
    from fusepy import FUSE, FuseOSError, Operations, fuse_get_context  # type: ignore[import-not-found]
except ImportError:  # its name outside Debian
    from fuse import FUSE, FuseOSError, Operations, fuse_get_context  # type: ignore[import-not-found]

STALL_POLL_S = 0.02
STAT_FIELDS = (
    *("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks"),
    *("st_atime", "st_mtime", "st_ctime"),
)
STATVFS_FIELDS = (
    *("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"),
    *("f_flag", "f_namemax"),
)


class Rules:
    """The rules file, read again whenever it was replaced."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._seen = (0, 0)
        self._rules: list[dict[str, Any]] = []

    def obey(self, op: str, path: str) -> None:
        """Do what the rules demand before an operation: return, wait, or raise."""
        while rule := self._match(op, path):
            if rule["action"] == "delay":
                return time.sleep(rule["seconds"])
            if rule["action"] != "stall":
                raise FuseOSError(getattr(errno, rule["action"]))
            time.sleep(STALL_POLL_S)

    def _match(self, op: str, path: str) -> dict[str, Any] | None:
        stat = os.stat(self.file)
        if (stat.st_ino, stat.st_mtime_ns) != self._seen:
            with open(self.file) as file:
                self._rules = json.load(file)
            self._seen = (stat.st_ino, stat.st_mtime_ns)
        hits = (r for r in self._rules if re.fullmatch(r["op"], op) and re.search(r["path"], path))
        return next(hits, None)


class FaultFs(Operations):  # type: ignore[misc]
    """Passes every operation on to the source folder, unless a rule says otherwise."""

    def __init__(self, source: str, rules: Rules) -> None:
        self.source, self.rules = source, rules

    def __call__(self, op: str, path: str, *args: Any) -> Any:
        self.rules.obey(op, path or "")
        return getattr(self, op)(self._real(path), *args)

    def _real(self, path: str) -> str:
        return self.source + path if path else path

    def _give_to_caller(self, path: str) -> None:
        uid, gid, _ = fuse_get_context()
        os.lchown(path, uid, gid)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        stat = os.lstat(path) if fh is None else os.fstat(fh)
        return {name: getattr(stat, name) for name in STAT_FIELDS}

    def statfs(self, path: str) -> dict[str, Any]:
        stat = os.statvfs(path)
        return {name: getattr(stat, name) for name in STATVFS_FIELDS}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(path)]

    def readlink(self, path: str) -> str:
        return os.readlink(path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        self._give_to_caller(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def symlink(self, path: str, target: str) -> None:
        os.symlink(target, path)
        self._give_to_caller(path)

    def rename(self, path: str, new: str) -> None:
        os.rename(path, self._real(new))

    def link(self, path: str, existing: str) -> None:
        os.link(self._real(existing), path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(path, times, follow_symlinks=False)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags & ~os.O_APPEND)  # the kernel tells us the offsets

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        fh = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        self._give_to_caller(path)
        return fh

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(path if fh is None else fh, length)

    def flush(self, path: str, fh: int) -> None:
        return None

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


if __name__ == "__main__":
    source, mountpoint, rules = sys.argv[1:]
    os.umask(0)  # the caller's umask is in the mode already
    FUSE(
        FaultFs(source, Rules(rules)),
        mountpoint,
        foreground=False,
        allow_other=True,
        default_permissions=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        big_writes=True,
    )
