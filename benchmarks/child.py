"""A measured process: its output, its memory, its CPU time, and what it leaves beside itself."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Callable, NamedTuple

MARK = "GANGRUN_BENCH_MARK"
READ_BYTES = 1 << 18
LOOK_S = 0.02
LONGEST_S = 300.0


class Ended(NamedTuple):
    """How a child ended, by this process's clock."""

    code: int
    started: float  # time.time()
    last_output: float
    ended: float
    cpu_s: float  # of the child and of everything it waited for
    peak_rss_mb: float  # of the child alone
    output: bytes  # its first and last part if it is long


class Child:
    """Starts a command in a session of its own; leaving the context ends that session, whatever happened."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], cwd: str | None = None) -> None:
        self._argv, self._environ, self._cwd = list(argv), dict(environ), cwd
        self.mark = "%d-%d" % (os.getpid(), time.monotonic_ns())
        self._environ[MARK] = self.mark
        self.peak_rss_mb = 0.0
        self._next_look = 0.0
        self._buffer = bytearray(READ_BYTES)  # one for all: a fresh one for each read halves the speed
        self._view = memoryview(self._buffer)

    def __enter__(self) -> Child:
        self.started = time.time()
        self.process = subprocess.Popen(
            self._argv,
            env=self._environ,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout.fileno()
        self.pid = self.process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (self.pid, *self.others()):
            if pid != self.pid or self.process.returncode is None:
                _kill(pid)
        if self.process.returncode is None:
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def others(self) -> list[int]:
        """Every living process but the child itself that has inherited its environment."""
        return [pid for pid in marked(self.mark) if pid != self.pid]

    def wait(self, on_chunk: Callable[[bytes], None] | None = None) -> Ended:
        """Read its output until it exits. Output that is held open by what it left behind is not waited for."""
        kept = Kept()
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            chunk = self._read()
            if chunk:
                kept.add(chunk)
                if on_chunk is not None:
                    on_chunk(bytes(chunk))
                continue
            ended = self._reap(kept)
            if ended is not None:
                return ended
        raise TimeoutError("no end after %.0f s: %s" % (LONGEST_S, " ".join(self._argv)))

    def _read(self) -> memoryview:
        self._look_at_memory()
        ready, _, _ = select.select([self._pipe], [], [], LOOK_S)
        size = os.readv(self._pipe, [self._buffer]) if ready else 0
        if ready and not size:
            time.sleep(0.0002)  # end of file: the exit follows at once
        return self._view[:size]

    def _reap(self, kept: Kept) -> Ended | None:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            return None
        ended = time.time()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        return Ended(self.process.returncode, self.started, kept.last, ended, cpu_s, self.peak_rss_mb, kept.output)

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        self.peak_rss_mb = max(self.peak_rss_mb, peak_rss_mb(self.pid))


class Kept:
    """The beginning and the end of an output of any length, and when the last of it came."""

    HEAD_BYTES = 1 << 16
    TAIL_BYTES = 1 << 12

    def __init__(self) -> None:
        self._head, self._tail, self.last = bytearray(), b"", 0.0

    def add(self, chunk: memoryview) -> None:
        self.last = time.time()
        if len(self._head) < self.HEAD_BYTES:
            self._head += chunk
        else:
            self._tail = bytes(chunk[-self.TAIL_BYTES :])

    @property
    def output(self) -> bytes:
        return bytes(self._head) + self._tail


def run(argv: Sequence[str], environ: Mapping[str, str], cwd: str | None = None) -> Ended:
    """Run a command to its end. Raises RuntimeError with its output if it failed."""
    with Child(argv, environ, cwd) as child:
        ended = child.wait()
    if ended.code:
        raise RuntimeError("%s: exit code %d\n%s" % (argv[0], ended.code, ended.output.decode("utf-8", "replace")))
    return ended


def marked(mark: str) -> list[int]:
    """The living processes whose environment holds this mark."""
    wanted = ("%s=%s" % (MARK, mark)).encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and wanted in _proc(name, "environ")]


def peak_rss_mb(pid: int) -> float:
    """VmHWM of one process; 0 when it has ended."""
    for line in _proc(str(pid), "status").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def command_of(pid: int) -> str:
    return _proc(str(pid), "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()


def parents(pids: Sequence[int]) -> dict[int, int]:
    """pid -> parent pid of those that still live."""
    stats = {pid: _proc(str(pid), "stat").rpartition(b")")[2].split() for pid in pids}
    return {pid: int(fields[1]) for pid, fields in stats.items() if fields}


def _proc(pid: str, name: str) -> bytes:
    try:
        with open("/proc/%s/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
