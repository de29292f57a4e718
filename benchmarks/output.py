"""output: the log file written and the stream prefixed into a pipe, beside `tee`, which does half of it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from typing import Callable, NamedTuple

from benchmarks import child, latency
from benchmarks.measure import interleaved, median
from benchmarks.place import SKYPILOT, STAMP, Session
from benchmarks.report import Limit

GANGRUN, TEE = "gangrun", "tee"
SEQ_LINES = 1_000_000
DATA_BYTES = 200_000_000
MEMORY = "/dev/shm"
ROOM_BYTES = 3_000_000_000
FILES_OF_A_GB = 5
ROUNDS = 7
TIMES_SKYPILOT_LINES = Limit(40, at_least=True)
SHARE_OF_TEE = Limit(0.6, at_least=True)
RSS_MB = Limit(20)
PUBLISHED_SKYPILOT_LINES = 0.24e6  # a second of wall time, as published by gangrun for 1.0.0.dev20261027
# Writes updates as tqdm does: many carriage returns, a newline every hundred.
PROGRESS = """
import os, sys
bar = b"".join(b"\\r%3d%%|%s| %d/100 [00:01<00:10, 8.2it/s, loss=0.123]" % (i, b"#" * 60, i) for i in range(100))
data = memoryview((bar + b"\\n") * (int(sys.argv[1]) // len(bar)))
while data: data = data[os.write(1, data):]
"""


class Pumped(NamedTuple):
    """One run: seconds from the script's begin to the last byte in the pipe, CPU seconds of all but the script."""

    wall_s: float
    cpu_s: float
    rss_mb: float


def run(session: Session) -> None:
    with tempfile.TemporaryDirectory(prefix="gangrun-output-", dir=_roomy()) as folder:
        bench = Output(session, folder)
        bench.lines()
        bench.bytes("1 KB lines", "cat " + _file(folder, "lines", b"x" * 1023 + b"\n"), SHARE_OF_TEE)
        bench.memory()
        os.unlink(folder + "/lines")
        bench.bytes("one line of 200 MB", "cat " + _file(folder, "line", b"x" * 1000), SHARE_OF_TEE)
        bench.bytes(
            "tqdm-like updates", "%s -I -S -c %s %d" % (sys.executable, shlex.quote(PROGRESS), DATA_BYTES), None
        )
        latency.run(session, bench.commands)


class Output:
    """Runs scripts under each candidate and compares. Logs lie in `folder`: in memory, not on a disk, if it can be."""

    def __init__(self, session: Session, folder: str) -> None:
        self._session = session
        self._folder = folder
        self._rounds = min(session.rounds, ROUNDS)
        self._few = {SKYPILOT: 2}

    def commands(self, script: str) -> dict[str, Callable[[], list[str]]]:
        """Fresh command lines that run a script and log it, by candidate."""
        place, peer = self._session.place, self._session.peer
        log = shlex.quote(self._folder + "/log")
        found = {
            GANGRUN: lambda: _with_log_dir(place.executor(script), self._folder + "/logs"),
            TEE: lambda: ["bash", "-c", "{ %s\n} | tee %s" % (script, log)],
        }
        if peer is not None:
            found[SKYPILOT] = lambda: peer.executor(script, self._folder + "/sky-logs", place.home)
        return found

    def lines(self) -> None:
        """Lines per CPU second of `seq`, start-up subtracted."""
        report = self._session.report
        report.heading("output: seq 1 %d, lines per CPU second (start-up subtracted)" % SEQ_LINES)
        idle, busy = self._measure("true"), self._measure("seq 1 %d" % SEQ_LINES)
        rate: dict[str, float | None] = {SKYPILOT: None}
        for name, runs in busy.items():
            cpu_s = median([r.cpu_s for r in runs]) - median([r.cpu_s for r in idle[name]])
            rate[name] = SEQ_LINES / max(cpu_s, 0.001) / 1e6
        wall = {name: SEQ_LINES / median([r.wall_s for r in runs]) / 1e6 for name, runs in busy.items()}
        theirs = rate[SKYPILOT]
        report.row(GANGRUN, rate[GANGRUN], "M/s", (TEE, rate[TEE]), (SKYPILOT, theirs))
        report.row(TEE, rate[TEE], "M/s")
        report.row(SKYPILOT, theirs, "M/s")
        report.row("gangrun, lines per second of wall time", wall[GANGRUN], "M/s", (SKYPILOT, wall.get(SKYPILOT)))
        if theirs:
            ours = rate[GANGRUN] or 0.0
            report.row("gangrun / SkyPilot, per CPU second", ours / theirs, "x", limit=TIMES_SKYPILOT_LINES)
        else:
            published = wall[GANGRUN] * 1e6 / PUBLISHED_SKYPILOT_LINES
            report.row("gangrun / SkyPilot as published, wall time", published, "x", note="not measured here")

    def bytes(self, title: str, script: str, limit: Limit | None) -> None:
        """MB a second of wall time for DATA_BYTES of output."""
        report = self._session.report
        runs = self._measure(script)
        rate: dict[str, float | None] = {SKYPILOT: None}
        rate.update({name: DATA_BYTES / 1e6 / median([r.wall_s for r in found]) for name, found in runs.items()})
        report.heading("output: %s, 200 MB, MB a second of wall time" % title)
        for name in (GANGRUN, TEE, SKYPILOT):
            report.row(name, rate[name], "MB/s", *([(SKYPILOT, rate[SKYPILOT])] if name == GANGRUN else []))
        pairs = zip(runs[GANGRUN], runs[TEE])
        ratio = median([beside.wall_s / ours.wall_s for ours, beside in pairs])
        report.row("gangrun / tee, median of the rounds", ratio, "x", limit=limit)
        cpu = {name: median([r.cpu_s for r in found]) * 1000 for name, found in runs.items()}
        report.row("gangrun, CPU time", cpu[GANGRUN], "ms", (TEE, cpu[TEE]), (SKYPILOT, cpu.get(SKYPILOT)))
        if SKYPILOT in runs:
            report.row("SkyPilot, memory", max(r.rss_mb for r in runs[SKYPILOT]), "MB")

    def memory(self) -> None:
        """The largest memory of the executor alone after 1 GB of 1 KB lines."""
        script = "cat" + FILES_OF_A_GB * (" %s/lines" % self._folder) + "; sleep 0.1"
        pumped = self._pump(self.commands(script)[GANGRUN](), script)
        self._session.report.heading("output: memory after 1 GB")
        self._session.report.row(GANGRUN, pumped.rss_mb, "MB", limit=RSS_MB)

    def _measure(self, body: str) -> dict[str, list[Pumped]]:
        script = "%s >%s/begin; %s; times >%s/times" % (STAMP, self._folder, body, self._folder)
        candidates = {name: self._one(argv, script) for name, argv in self.commands(script).items()}
        return interleaved(candidates, self._rounds, self._few)

    def _one(self, argv: Callable[[], list[str]], script: str) -> Callable[[], Pumped]:
        return lambda: self._pump(argv(), script)

    def _pump(self, argv: list[str], script: str) -> Pumped:
        for name in ("logs", "sky-logs"):
            shutil.rmtree("%s/%s" % (self._folder, name), ignore_errors=True)
        ended = child.run(argv, self._session.place.rank_environ())
        begin, of_script = ended.started, 0.0
        if "/times" in script:
            begin = float(_read(self._folder + "/begin"))
            of_script = sum(_seconds(word) for word in _read(self._folder + "/times").split())
        return Pumped((ended.last_output or ended.ended) - begin, ended.cpu_s - of_script, ended.peak_rss_mb)


def _roomy() -> str | None:
    """A file system in memory with room for the largest log; else where temporary files go."""
    try:
        info = os.statvfs(MEMORY)
    except OSError:
        return None
    return MEMORY if info.f_bavail * info.f_frsize > ROOM_BYTES and os.access(MEMORY, os.W_OK) else None


def _file(folder: str, name: str, part: bytes) -> str:
    path = "%s/%s" % (folder, name)
    with open(path, "wb") as file:
        for _ in range(DATA_BYTES // (len(part) * 1000)):
            file.write(part * 1000)
    return path


def _with_log_dir(argv: list[str], log_dir: str) -> list[str]:
    return ["--log-dir=" + log_dir if word.startswith("--log-dir=") else word for word in argv]


def _seconds(word: str) -> float:
    """`0m1.234s`, as bash's `times` has it."""
    minutes, _, seconds = word.rstrip("s").partition("m")
    return int(minutes) * 60 + float(seconds)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
