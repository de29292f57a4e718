"""output: how long a single line takes from the script's write to the reader of the stream."""

import re
import shlex
import sys
import time
from typing import Callable

from benchmarks.child import Child
from benchmarks.measure import median, percentile
from benchmarks.place import SKYPILOT, Session
from benchmarks.report import Limit

LINES = 300
STREAM_MS = Limit(5)
ROUNDS = 3
GANGRUN, TEE, CAT = "gangrun", "tee", "cat"
EMITTER = """
import os, time
for _ in range(%d):
    os.write(1, b"%%d\\n" %% time.time_ns())
    time.sleep(0.0067)
"""
STAMPED = re.compile(rb"\b(\d{19})\r?\n")


def run(session: Session, commands: Callable[[str], dict[str, Callable[[], list[str]]]]) -> None:
    """p50 and p99 of LINES lines at 150 a second, in ROUNDS turns."""
    script = "%s -I -S -c %s" % (sys.executable, shlex.quote(EMITTER % LINES))
    found = commands(script)
    found[CAT] = lambda: ["bash", "-c", "%s | cat" % script]
    delays: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, argv in found.items():
            delays[name] += _delays_ms(argv(), session.place.rank_environ())
    report = session.report
    report.heading("output: a line from write to stream, %d lines at 150 a second" % (LINES * ROUNDS))
    for what, of in (("median", median), ("p99", lambda values: percentile(values, 0.99))):
        ms = {name: of(values) for name, values in delays.items()}
        report.row("gangrun, " + what, ms[GANGRUN], "ms", (CAT, ms[CAT]), (SKYPILOT, ms.get(SKYPILOT)), limit=STREAM_MS)
        for name in (CAT, TEE, SKYPILOT):
            report.row("%s, %s" % (name, what), ms.get(name), "ms")


def _delays_ms(argv: list[str], environ: dict[str, str]) -> list[float]:
    delays: list[float] = []

    def look(chunk: bytes) -> None:
        now = time.time_ns()
        delays.extend((now - int(stamp)) / 1e6 for stamp in STAMPED.findall(chunk))

    with Child(argv, environ) as process:
        process.wait(look)
    return delays
