"""One row of docs/faults.md: what was injected, what a user saw, the code, the time to the end, what was left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.bench import Bench, Outcome, Running, eventually

REPORT = "GANGRUN_FAULTS_REPORT"  # the file that rows are appended to, if set
NOTHING = "nothing"


class Row:
    """Filled by a test: `injected` when the fault is there, `ended` or `saw` when it is over."""

    def __init__(self, kind: str, fault: str) -> None:
        self.kind = kind
        self.fault = fault
        self.seen = ""
        self.code = ""
        self.left = NOTHING
        self.version = ""
        self._at: float | None = None
        self.seconds: float | None = None

    def injected(self) -> None:
        """The fault is there: the time to the end counts from now."""
        self._at = time.monotonic()

    def saw(self, words: str, code: int | str = "") -> None:
        """What a person reads, in the product's own words, and the exit code."""
        self.seen, self.code = words, str(code)
        if self._at is not None and self.seconds is None:
            self.seconds = time.monotonic() - self._at

    def ended(self, outcome: Outcome, bench: Bench, marker: str = "") -> None:
        """`saw` for a driver's job: state and reason; then nothing of it may be left on any node or on the disk."""
        status = outcome.status
        self.saw(
            ": ".join(filter(None, (status.get("state"), status.get("reason")))), status.get("exit_code", outcome.code)
        )
        self.check_nothing_left(bench, marker)

    def check_nothing_left(self, bench: Bench, marker: str = "") -> None:
        """Fails the test if a process with the marker or an attempt's directory is left after five seconds."""
        self.version = bench.cluster.slurm_version
        if marker:
            eventually(lambda: not bench.left_behind(marker), 5, f"processes with {marker!r} are left")
        # Slurm calls a job over that has lost a node, while its driver still cleans up.
        eventually(lambda: not _attempts(bench), 5, f"left: {_attempts(bench)}")

    def as_record(self, test: str) -> dict[str, Any]:
        keys = ("kind", "fault", "seen", "code", "left", "seconds")
        return {"test": test, **{key: getattr(self, key) for key in keys}}


def publish(row: Row, test: str, version: str) -> None:
    """Append the row to the report, if one is being made."""
    path = os.environ.get(REPORT)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row.as_record(test), "slurm": version}) + "\n")


def kill(running: Running, pid_of: str, signal_name: str = "KILL") -> None:
    """Signal a process of a job on its driver's node: `driver`, or `srun` (all of the driver's)."""
    driver = running.status()["driver"]
    node, pid = driver["host"], str(driver["pid"])
    argv = (
        ["kill", f"-{signal_name}", pid]
        if pid_of == "driver"
        else ["pkill", f"-{signal_name}", "-P", pid, "-x", "srun"]
    )
    running.bench.cluster.run(node, argv)


def _attempts(bench: Bench) -> list[str]:
    return [str(path) for path in (bench.directory / ".gangrun").glob("*/*/attempt-*")]
