"""Processes of this machine, told apart by pid *and* start time, so that a recycled pid is never touched."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

GONE_POLL_S = 0.004
END_POLL_S = 0.02


class Pid(NamedTuple):
    """One process, for ever."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Pid | None:
        """The process that has this pid now, if it is alive (a zombie is not)."""
        state_and_start = _stat(pid)
        if state_and_start is None or state_and_start[0] in "ZX":
            return None
        return cls(pid, state_and_start[1])

    @classmethod
    def read(cls, record: Path) -> Pid | None:
        """A process from a record file "PID START"; None if there is none."""
        try:
            pid, start = record.read_text().split()
            return cls(int(pid), int(start))
        except (OSError, ValueError):
            return None

    def alive(self) -> bool:
        """True until the process is dead. Zombies are dead: some machines' pid 1 reaps late."""
        return Pid.of(self.pid) == self

    def signal(self, signum: int) -> None:
        """Send a signal if the process still lives."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])


def kill_all(pids: Iterable[Pid], timeout_s: float = 10) -> list[Pid]:
    """SIGKILL all of them and wait until they are dead; returns those that would not die."""
    left = list(pids)
    for one in left:
        one.signal(signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while left := [one for one in left if one.alive()]:
        if time.monotonic() > deadline:
            break
        time.sleep(GONE_POLL_S)
    return left


def end_all(pids: Iterable[Pid], signum: int, timeout_s: float = 10) -> None:
    """Send a signal and wait until all are dead; KILL those that do not obey."""
    left = list(pids)
    for pid in left:
        pid.signal(signum)
    deadline = time.monotonic() + timeout_s
    while any(pid.alive() for pid in left) and time.monotonic() < deadline:
        time.sleep(END_POLL_S)
    kill_all(left)


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class NodeProcess(NamedTuple):
    """A process inside a node."""

    pid: int  # as the machine sees it: what os.kill takes
    inner_pid: int  # as the node sees it: what $$ says there
    cmdline: str


def processes_of(init: Pid) -> list[NodeProcess]:
    """All living processes in the pid namespace of a node, the init included."""
    namespace = _namespace(init.pid)
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    found = (_describe(pid) for pid in pids if namespace and _namespace(pid) == namespace)
    return [one for one in found if one is not None]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _describe(pid: int) -> NodeProcess | None:
    try:
        cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    words = cmdline.decode(errors="replace").replace("\0", " ").strip()
    if not words:  # a zombie, or on its way to be one
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return NodeProcess(pid, int(fields["NSpid"].split()[-1]), words)
