"""A rank's side of its Ray: the directory that it keeps, the script that starts it, what is left when it has ended.

The rank's own process owns the directory, because it outlives whatever Ray and the script do to one another.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
import time

from executor import protocol
from executor.gang import Gang, poll_interval_s, say
from executor.options import Options
from executor.process import prepared
from executor.protocol import GangrunError, UsageError
from executor.shared import SignalFile, known_record, read_record, write_record

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Any

# A socket's path has at most 107 bytes (unix(7)), and Ray's goes on: /session_<time>_<pid>/sockets/plasma_store.1
LONGEST_ROOM = 107 - len("/session_2026-11-29_19-58-57_438132_1234567/sockets/plasma_store.1")
BASES = ("RAY_TMPDIR", "TMPDIR")
LAST_BASE = "/tmp"
SESSION, LOGS, KEPT_LOGS, START_OUTPUT = "session_latest", "logs", "ray", "ray-start.out"
KEPT_BYTES_A_FILE, KEPT_BYTES = 1 << 20, 64 << 20
FAREWELL_S, FAREWELL_LOOK_S = 10.0, 0.1


class Room:
    """A directory of this rank's Ray on the node's own disk. Whoever finds its lock free removes it."""

    def __init__(self, options: Options, gang: Gang) -> None:
        assert gang.launch is not None and options.ray is not None
        self._gang, self._launch, self._me = gang, gang.launch, gang.me
        self._ray = _description(options.ray)
        self._kept = os.path.join(options.log_dir, KEPT_LOGS, gang.me.node)
        self._grace_s = options.grace_s
        self._base = _base(self._name)
        self.path, self._lock = "", -1

    @property
    def _name(self) -> str:
        """The same on every node: an older Ray takes the head's path for all (ray-project/ray#57735)."""
        import zlib

        job = os.environ.get(protocol.SLURM_JOB_ID, "0")
        return "%s%s.%08x" % (protocol.RAY_ROOM, job, zlib.crc32(os.fsencode(self._launch.directory)))

    def open(self) -> None:
        """Make it, and remove those of ranks that were killed. Raises GangrunError."""
        try:
            _sweep(self._base)
            common = os.path.join(self._base, self._name)
            # Where nodes share the base, as process groups of one machine do, each rank has its own.
            for path in (common, "%s.%d" % (common, self._me.rank)):
                self._lock = _claimed(path)
                if self._lock != -1:
                    self.path = path
                    return
        except OSError as error:
            raise GangrunError(f"no directory for Ray in {self._base} on {self._me.host}: {error.strerror}") from error
        raise GangrunError(f"no directory for Ray on {self._me.host}: {path} is in use")

    def script(self, text: bytes) -> bytes:
        """The bash that becomes this rank's part of the cluster; behind it lies what rank 0 will run."""
        options, body = prepared(text)
        body = body if self._me.rank == 0 else b""
        described = {
            "rank": self._me.rank,
            "num_ranks": self._me.num_ranks,
            "node": self._me.node,
            "host": self._me.host,
            "address": self._me.address,
            "launch_dir": self._launch.directory,
            "room": self.path,
            "start_args": self._ray["start_args"],
            "grace_s": self._grace_s,
            "bash_options": options,
            "script_bytes": len(body),
        }
        archive = sys.path[0] if os.path.isfile(sys.path[0]) else None
        words = [sys.executable, *protocol.python_arguments(archive, protocol.RAY_NODE), json.dumps(described)]
        activate = str(self._ray.get("activate") or "")
        return os.fsencode(f'{activate}\nexec {shlex.join(words)} "$0"\n') + body

    def trouble(self, code: int) -> str:
        """Why Ray, and not the script, ended with this code; empty if it was the script."""
        if code != protocol.EXIT_INFRASTRUCTURE:
            return ""
        record = known_record(self._launch.ray_record(self._me.rank))
        return str((record or {}).get("why") or "")

    def close(self) -> None:
        """Remove it. Ray's own logs are kept in the log directory, unless the script has succeeded."""
        try:
            if not self._has_succeeded():
                _keep(self.path, self._kept)
        except OSError as error:
            say(self._me, f"cannot keep Ray's logs in {self._kept}: {error.strerror}")
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._leave()

    def _has_succeeded(self) -> bool:
        return SignalFile(self._launch.ray).read() == (protocol.GANG_DONE, "0")

    def _leave(self) -> None:
        """Rank 0 goes last: srun kills the others soon after the first that ends with another code than 0."""
        deadline = time.monotonic() + FAREWELL_S
        try:
            write_record(self._launch.ray_record(self._me.rank), {"state": protocol.RANK_DONE})
            if self._me.rank == 0 and not self._has_succeeded():
                ranks = range(1, self._me.num_ranks)
                while time.monotonic() < deadline and not all(map(self._has_left, ranks)):
                    time.sleep(max(FAREWELL_LOOK_S, poll_interval_s(self._me.num_ranks)))
        except OSError:
            pass

    def _has_left(self, rank: int) -> bool:
        record = read_record(self._launch.ray_record(rank))
        if record is not None:
            return record.get("state") == protocol.RANK_DONE
        return (self._gang.peer(rank) or {}).get("state") in protocol.RANK_ENDED_STATES  # it ended before its Ray began


def _description(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(arg, str) for arg in found["start_args"]):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f'--ray={text!r}: use JSON such as {{"activate": "", "start_args": ["--num-cpus=4"]}}')


def _base(name: str) -> str:
    """Where temporary files of this node go, if Ray's sockets have room below it."""
    found = (os.environ.get(variable, "") for variable in BASES)
    fits = (base for base in found if os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK))
    return next((base for base in fits if len(os.fsencode(f"{base}/{name}.0")) <= LONGEST_ROOM), LAST_BASE)


def _claimed(path: str) -> int:
    """The lock of a new directory, or -1 if a living process has it."""
    while True:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return -1
        try:
            lock = os.open(os.path.join(path, protocol.LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock), os.stat(os.path.join(path, protocol.LOCK_NAME))):
                return lock
            os.close(lock)
        except FileNotFoundError:
            pass  # somebody who swept found it before we had its lock


def _sweep(base: str) -> None:
    """Remove rooms of ours whose owners were killed."""
    for name in os.listdir(base):
        if name.startswith(protocol.RAY_ROOM):
            _remove_if_dead(os.path.join(base, name))


def _remove_if_dead(path: str) -> None:
    try:
        if os.lstat(path).st_uid != os.getuid() or os.path.islink(path):
            return
        lock = os.open(os.path.join(path, protocol.LOCK_NAME), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # it is being made, or removed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)


def _keep(room: str, target: str) -> None:
    """Copy the ends of what Ray wrote. Raises OSError."""
    logs, left = os.path.join(room, SESSION, LOGS), KEPT_BYTES
    names = sorted(os.listdir(logs)) if os.path.isdir(logs) else []
    for path in (os.path.join(room, START_OUTPUT), *(os.path.join(logs, name) for name in names)):
        text = _end_of(path)
        left -= len(text)
        if text and left > 0:
            os.makedirs(target, exist_ok=True)
            with open(os.path.join(target, os.path.basename(path)), "wb") as file:
                file.write(text)


def _end_of(path: str) -> bytes:
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        file.seek(-min(KEPT_BYTES_A_FILE, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read(KEPT_BYTES_A_FILE)
