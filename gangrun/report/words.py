"""Times, counts and names in the words of a report. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# What a terminal would obey and a page need not show: CSI, OSC and two-byte escapes (ECMA-48).
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -~])")
STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600,
           43200, 86400, 172800, 604800)  # fmt: skip


def duration(seconds: float) -> str:
    """`0.24 s`, `41 s`, `3m 20s`, `2h 5m`, `1d 3h`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, small, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if whole >= size:
            rest = whole % size // {"h": 3600, "m": 60, "s": 1}[small]
            return f"{whole // size}{large} {rest}{small}" if rest else f"{whole // size}{large}"
    return f"{whole} s"


def percent(share: float) -> str:
    """`0.4 %`, `86 %`; 100 % only for all of it."""
    if 0 < share < 0.1 or 0.99 < share < 1:
        return f"{min(share * 100, 99.9):.1f} %"
    return f"{share * 100:.0f} %"


def numbers(ranks: Sequence[int]) -> str:
    """`0-3,7`, as Slurm folds numbers."""
    folded: list[list[int]] = []
    for rank in sorted(ranks):
        if folded and rank == folded[-1][1] + 1:
            folded[-1][1] = rank
        else:
            folded.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in folded)


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def printable(text: str) -> str:
    """A name or a reason in one line, without anything that a terminal would obey or that hides what follows."""
    plain = ESCAPES.sub("", text)
    return " ".join("".join(" " if _is_control(sign) else sign for sign in plain).split())


def plain_lines(text: str) -> list[str]:
    """A log's lines as text: of a line that was rewritten (progress bars) what was last to be seen."""
    lines = ESCAPES.sub("", text).rstrip("\n").split("\n")
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    return ["".join("·" if _is_control(sign) and sign != "\t" else sign for sign in line) for line in shown]


def _is_control(sign: str) -> bool:
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def ticks(length_s: float, most: int) -> list[float]:
    """Round times from 0 on, at most so many."""
    if length_s <= 0 or most < 1:
        return [0.0]
    step = next((step for step in STEPS_S if length_s / step < most), None)
    if step is None:
        step = STEPS_S[-1] * -(-length_s // (STEPS_S[-1] * most))
    return [index * step for index in range(int(length_s / step) + 1)]
