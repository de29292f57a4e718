"""docs/faults.md as text: made from rows, and read back, so that some of its rows can be provoked anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.faults.not_tested import NOT_TESTED

HEAD = """# What happens when things break

Written by `python -m tests.faults`, which provoked each fault on a real Slurm (versions below) and checked that nothing
was left behind: no process on any node, no step, no file of the attempt. Times are from the fault to the end of the
job, on one machine of two cores; Slurm's own periods (ping cycle, KillWait of 2 s here) are part of them.
"""
COLUMNS = ("fault", "seen", "code", "left")
TITLES = "| fault | what a user sees | code | left behind |"
SECONDS_ON = "s on "
UNTESTED = "Not tested here"

Record = dict[str, Any]


def render(rows: Sequence[Record]) -> str:
    """A section per kind, a row per fault, the versions side by side."""
    versions = sorted({str(row["slurm"]) for row in rows})
    text = HEAD + f"\nSlurm {' and '.join(versions)}.\n"
    for kind in sorted({str(row["kind"]) for row in rows}):
        times = " | ".join(SECONDS_ON + version for version in versions)
        text += f"\n## {kind}\n\n{TITLES} {times} |\n"
        text += "| --- | --- | --- | --- |" + " --- |" * len(versions) + "\n"
        own = [row for row in rows if row["kind"] == kind]
        for fault in sorted({str(row["fault"]) for row in own}):
            text += _line([row for row in own if row["fault"] == fault], versions)
    text += f"\n## {UNTESTED}\n\n| fault | why |\n| --- | --- |\n"
    return text + "".join(f"| {fault} | {why} |\n" for fault, why in NOT_TESTED)


def read(text: str) -> list[Record]:
    """The rows that `render` made this text of, one for each version."""
    rows: list[Record] = []
    kind, versions = "", list[str]()
    for line in text.partition(f"## {UNTESTED}")[0].splitlines():
        if line.startswith("## "):
            kind = line[3:]
        elif line.startswith(TITLES):
            versions = [cell.replace(SECONDS_ON, "") for cell in _cells(line)[len(COLUMNS) :]]
        elif line.startswith("| ") and not line.startswith("| --- "):
            rows += _records(kind, _cells(line), versions)
    return rows


def merged(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """What was provoked now, and what was not. The words are the new ones on all versions."""
    now = [{**row, "fault": _plain(row["fault"])} for row in new]
    provoked = {_key(row) for row in now}
    return [*now, *(row for row in old if _key(row) not in provoked)]


def _key(row: Record) -> tuple[str, ...]:
    return row["kind"], row["fault"], row["slurm"]


def _records(kind: str, cells: Sequence[str], versions: Sequence[str]) -> list[Record]:
    words = dict(zip(COLUMNS, cells))
    seconds = cells[len(COLUMNS) :]
    return [{"kind": kind, **words, "slurm": on, "seconds": s or None} for on, s in zip(versions, seconds)]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _line(rows: Sequence[Record], versions: Sequence[str]) -> str:
    by_version = {str(row["slurm"]): row for row in rows}
    seconds = [by_version.get(version, {}).get("seconds") for version in versions]
    times = " | ".join("" if value is None else f"{float(value):.1f}" for value in seconds)
    cells = (_plain(rows[0][key]).replace("|", "\\|") for key in COLUMNS)
    return f"| {' | '.join(cells)} | {times} |\n"


def _plain(cell: object) -> str:
    return str(cell).replace("\n", " ")
