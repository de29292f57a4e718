"""What a benchmark prints: one line per measurement, beside its peers, with the verdict on its limit."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Optional, TextIO

WIDTH = 52
Peer = tuple[str, Optional[float]]


class Limit(NamedTuple):
    """The value a target allows at most, or asks for at least."""

    bound: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


class Report:
    """Prints as it goes, and counts the targets that were met and missed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self.met = 0
        self.missed: list[str] = []
        self.skipped: list[str] = []
        self.kept: dict[str, Any] = {}  # what other programs read, by benchmark
        self._heading = ""

    def heading(self, text: str) -> None:
        self._heading = text
        self._print("\n%s" % text)

    def row(
        self, what: str, value: float | None, unit: str, *peers: Peer, limit: Limit | None = None, note: str = ""
    ) -> None:
        """One measurement. `value` None: the peer is not installed. Peers without a value are left out."""
        if value is None:
            self._print("  %-*s  not installed" % (WIDTH, what))
            return
        parts = ["%10s %-7s" % (_number(value), unit)]
        parts += [_ratio(value, peer) for peer in peers if peer[1]]
        parts += [note] if note else []
        parts += [self._verdict(what, value, unit, limit)] if limit else []
        self._print("  %-*s%s" % (WIDTH, what, " · ".join(parts)))

    def skip(self, what: str, reason: str) -> None:
        self.skipped.append(what)
        self._print("  %-*s  skipped: %s" % (WIDTH, what, reason))

    def failed(self, what: str, reason: str) -> None:
        """A benchmark that broke off counts as missed."""
        self.missed.append("%s broke off" % what)
        self._print("  %-*s  FAILED: %s" % (WIDTH, what, reason))

    def summary(self) -> None:
        self._print("\n%d targets ok, %d missed%s" % (self.met, len(self.missed), ":" if self.missed else ""))
        for text in self.missed:
            self._print("  MISSED  " + text)
        if self.skipped:
            self._print("  skipped: " + ", ".join(self.skipped))

    def _verdict(self, what: str, value: float, unit: str, limit: Limit) -> str:
        wish = ("%s %g %s" % (">=" if limit.at_least else "<=", limit.bound, unit)).rstrip()
        if limit.holds(value):
            self.met += 1
            return "limit %s: ok" % wish
        self.missed.append("%s: %s: %s %s, limit %s" % (self._heading, what, _number(value), unit, wish))
        return "limit %s: MISSED" % wish

    def _print(self, text: str) -> None:
        print(text.rstrip(), file=self._stream, flush=True)


def _number(value: float) -> str:
    return "%.2f" % value if abs(value) < 10 and value != int(value) else "%.1f" % value if value % 1 else "%d" % value


def _ratio(value: float, peer: Peer) -> str:
    name, other = peer
    assert other
    if value <= 0:
        return "less than %s" % name
    ratio = value / other
    return "1/%.0f of %s" % (1 / ratio, name) if ratio < 0.1 else "%.2f x %s" % (ratio, name)
