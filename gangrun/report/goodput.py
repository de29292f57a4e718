"""How much of the machine's time was of use: what runs, checkpoints and interruptions cost. Pure.

Definitions, for a gang of N nodes. All are times per node, in seconds: sums over its ranks divided by N.

    machine   from the moment an attempt has its nodes to its end, summed over all attempts. The queue is no part of it.
    checkpoint   what marks tell as their cost, while scripts ran
    recomputed   running time whose result was thrown away: from the last mark of an attempt that was interrupted or did
              not succeed to its end; and work up to a step that a mark had told before
    useful    the other time in which scripts ran
    share     useful / machine. The same as `work / machine time` of `gangrun estimate`, whose machine time is that
              work, its checkpoints, what is computed again, and the restarts.

The rest of machine is start-up (waiting and setup), the barrier, and ranks that were lost:
machine = useful + recomputed + checkpoint + start-up + barrier + lost + idle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from codegen.spec import SpecError
from executor import protocol
from gangrun.report.model import BARRIER, LOST, SETUP, WAITING, Attempt, Span, Timeline

MARK_TOLERANCE_S = 5.0  # a script's clock may be that far from the driver's
PATTERN_EXAMPLE = r"(?P<time>\S+ \S+) saved step (?P<step>\d+)"
DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?")


class Mark(NamedTuple):
    """A checkpoint that was complete at `time`: what was computed up to `step` is safe. `cost_s`: how long it took."""

    time: float
    step: float
    cost_s: float = 0.0
    attempt: int | None = None


class Pieces(NamedTuple):
    """The running time of one attempt, by what became of it."""

    useful: Sequence[Span]
    recomputed: Sequence[Span]
    checkpoint: Sequence[Span]
    unsaved_s: float = 0.0  # the part of useful that no mark covers yet, of an attempt that goes on


class Goodput(NamedTuple):
    """The sums; see the module for what they mean. Seconds per node, but `queue_s`, which is the clock's."""

    machine_s: float
    useful_s: float
    recomputed_s: float
    checkpoint_s: float
    setup_s: float
    waiting_s: float
    barrier_s: float
    lost_s: float
    queue_s: float
    unsaved_s: float
    num_nodes: int
    attempts: int
    interruptions: int
    marks: int
    has_marks: bool  # or nobody knows what is safe: then all that was interrupted counts as recomputed
    restarts: int = 0  # of tasks that failed, by their group

    @property
    def share(self) -> float | None:
        """Useful machine time, from 0 to 1; the least that it can be where there are no marks. None before a start."""
        return self.useful_s / self.machine_s if self.machine_s > 0 else None

    @property
    def most_share(self) -> float | None:
        """The share if nothing was lost."""
        return (self.useful_s + self.recomputed_s) / self.machine_s if self.machine_s > 0 else None

    @property
    def is_range(self) -> bool:
        return not self.has_marks and self.recomputed_s > 0

    @property
    def idle_s(self) -> float:
        """Nodes that were held while nothing of this ran there: before a task and after it, while programs end."""
        known = self.useful_s + self.recomputed_s + self.checkpoint_s
        return max(0.0, self.machine_s - known - self.setup_s - self.waiting_s - self.barrier_s - self.lost_s)


# --- marks


def read_marks(text: str) -> tuple[list[Mark], int]:
    """The marks of a file of lines `TIME STEP [COST_S [ATTEMPT [RANK]]]`, by time, and how many lines are none."""
    lines = [line for line in text.split("\n") if line.strip("\0 \t\r")]
    marks = [mark for mark in map(_mark, lines) if mark is not None]
    return sorted(marks, key=lambda mark: mark.time), len(lines) - len(marks)


def _mark(line: str) -> Mark | None:
    words = line.split()
    numbers = [_number(word) for word in words[:4]]
    if len(words) < 2 or any(number is None or number < 0 for number in numbers):
        return None
    time, step, cost, attempt = (numbers + [None, None])[:4]
    assert time is not None and step is not None
    return Mark(time, step, cost or 0.0, None if attempt is None else int(attempt))


def _number(word: str) -> float | None:
    try:
        number = float(word.replace(",", "."))  # bash writes EPOCHREALTIME with the locale's sign
    except ValueError:
        return None
    return number if math.isfinite(number) and abs(number) < 1e15 else None


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern for marks in a log. Raises SpecError for one without the groups `time` and `step`."""
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SpecError(f"--checkpoint-pattern={pattern!r}: {error}; use a regular expression") from error
    missing = [name for name in ("time", "step") if name not in found.groupindex]
    if missing:
        ways = f"name its groups, as in '{PATTERN_EXAMPLE}'"
        raise SpecError(f"--checkpoint-pattern={pattern!r}: has no group {' and no group '.join(missing)}; {ways}")
    return found


def marks_in(lines: Iterable[str], pattern: re.Pattern[str], utc_offset_s: float) -> list[Mark]:
    """The marks of a log. Times are seconds since 1970 or dates, those without a zone in that of `utc_offset_s`.

    Raises SpecError where the pattern matches what is no time or no number.
    """
    found = []
    for line in lines:
        match = pattern.search(line)
        if match is None or match["time"] is None or match["step"] is None:
            continue
        time, step = _moment(match["time"], utc_offset_s), _number(match["step"])
        if time is None or step is None:
            name, word = ("time", match["time"]) if time is None else ("step", match["step"])
            raise SpecError(
                f"--checkpoint-pattern: its group {name} matches {word[:60]!r}; it must be "
                + ("seconds since 1970 or a date as 2026-01-31 12:00:00" if name == "time" else "a number")
            )
        cost = _number(match["cost"] or "") if "cost" in pattern.groupindex else None
        found.append(Mark(time, step, max(cost or 0.0, 0.0)))
    return sorted(found, key=lambda mark: mark.time)


def _moment(word: str, utc_offset_s: float) -> float | None:
    date = DATE.search(word)
    if date is None:
        return _number(word.strip())
    *parts, fraction, zone = date.groups()
    year, month, day, hour, minute, second = (int(part) for part in parts)
    try:
        moment = datetime(year, month, day, hour, minute, second, tzinfo=_zone(zone, utc_offset_s))
        return moment.timestamp() + float("0." + (fraction or "0"))
    except (ValueError, OverflowError):
        return None


def _zone(word: str | None, utc_offset_s: float) -> timezone:
    if word is None:
        return timezone(timedelta(seconds=utc_offset_s))
    if word == "Z":
        return timezone.utc
    minutes = int(word[1:3]) * 60 + int(word[-2:])
    return timezone(timedelta(minutes=-minutes if word[0] == "-" else minutes))


# --- what became of the time


def pieces_of(timeline: Timeline, marks: Sequence[Mark], is_done: bool = False) -> list[Pieces]:
    """What became of each attempt's running time. `is_done`: its last end was meant, whatever its state."""
    found, best = [], -math.inf
    for attempt in timeline.attempts:
        own = [mark for mark in marks if _is_of(mark, attempt, timeline.attempts)]
        pieces, best = _pieces(attempt, own, best, is_done and attempt is timeline.attempts[-1])
        found.append(pieces)
    return found


def _is_of(mark: Mark, attempt: Attempt, attempts: Sequence[Attempt]) -> bool:
    """A mark belongs to the attempt that it names, if there is one life of it; else to the last that had begun."""
    if mark.attempt is not None:
        attempts = [one for one in attempts if one.number == mark.attempt] or attempts
    begun = [one for one in attempts if one.begun <= mark.time + MARK_TOLERANCE_S and one.begun <= mark.time]
    return (begun[-1] if begun else attempts[0]) is attempt


def _pieces(attempt: Attempt, marks: Sequence[Mark], best: float, is_done: bool) -> tuple[Pieces, float]:
    run = attempt.run
    if run is None:
        return Pieces([], [], []), best
    useful: list[Span] = []
    recomputed: list[Span] = []
    checkpoint: list[Span] = []
    at, at_step = run.begin, best
    for mark in marks:
        end = min(max(mark.time, at), run.end)
        begin = max(at, end - mark.cost_s)
        again, new = _split(Span("", at, begin), at_step, mark.step, best)
        recomputed.append(again)
        useful.append(new)
        checkpoint.append(Span("", begin, end))
        at, at_step, best = end, mark.step, max(best, mark.step)
    tail = Span("", at, run.end)
    goes_on = not attempt.has_ended and not attempt.was_lost
    is_safe = goes_on or is_done or attempt.state == protocol.SUCCEEDED
    (useful if is_safe else recomputed).append(tail)
    unsaved_s = tail.length_s if goes_on else 0.0
    return Pieces(_filled(useful), _filled(recomputed), _filled(checkpoint), unsaved_s), best


def _split(work: Span, begin_step: float, end_step: float, best: float) -> tuple[Span, Span]:
    """The work between two marks: what was known before, and what is new. Steps take equally long."""
    if end_step < best:
        return work, Span("", work.end, work.end)
    if begin_step >= best or not math.isfinite(begin_step):
        return Span("", work.begin, work.begin), work
    middle = work.begin + work.length_s * (best - begin_step) / (end_step - begin_step)
    return Span("", work.begin, middle), Span("", middle, work.end)


def _filled(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.length_s > 0]


def measure(timeline: Timeline, marks: Sequence[Mark], is_done: bool = False) -> Goodput:
    """The sums over all attempts of a job."""
    pieces = pieces_of(timeline, marks, is_done)
    nodes = max(1, timeline.num_nodes)

    def ran(kind: str) -> float:
        both = zip(timeline.attempts, pieces)
        return sum(_overlap(attempt, getattr(piece, kind)) for attempt, piece in both) / nodes

    def did(*phases: str) -> float:
        return sum(_did(attempt, phases) for attempt in timeline.attempts) / nodes

    return Goodput(
        machine_s=sum(attempt.machine_s for attempt in timeline.attempts),
        useful_s=ran("useful"), recomputed_s=ran("recomputed"), checkpoint_s=ran("checkpoint"),
        setup_s=did(SETUP), waiting_s=did(WAITING), barrier_s=did(BARRIER), lost_s=did(LOST),
        queue_s=sum(attempt.queue_s for attempt in timeline.attempts),
        unsaved_s=sum(piece.unsaved_s for piece in pieces), num_nodes=timeline.num_nodes,
        attempts=sum(not attempt.restart for attempt in timeline.attempts),
        interruptions=sum(attempt.was_interrupted for attempt in timeline.attempts),
        marks=len(marks), has_marks=bool(marks), restarts=sum(bool(one.restart) for one in timeline.attempts),
    )  # fmt: skip


def _did(attempt: Attempt, phases: Sequence[str]) -> float:
    """While it held its nodes: a group's task may wait for its turn without any."""
    spans = [span for stay in attempt.stays for span in stay.spans if span.phase in phases]
    return sum(max(0.0, span.end - max(span.begin, attempt.granted)) for span in spans)


def _overlap(attempt: Attempt, spans: Sequence[Span]) -> float:
    runs = [stay.run for stay in attempt.stays if stay.run]
    return sum(max(0.0, min(run.end, span.end) - max(run.begin, span.begin)) for run in runs for span in spans)


def together(parts: Sequence[Goodput], num_nodes: int) -> Goodput:
    """The sums of several tasks, per node of `num_nodes`."""
    names = [name for name in Goodput._fields if name.endswith("_s")]
    sums = {name: float(sum(getattr(part, name) * part.num_nodes for part in parts)) for name in names}
    return Goodput(
        **{name: value / max(1, num_nodes) for name, value in sums.items()},
        num_nodes=num_nodes,
        attempts=max((part.attempts for part in parts), default=0),
        interruptions=max((part.interruptions for part in parts), default=0),
        marks=sum(part.marks for part in parts),
        has_marks=any(part.has_marks for part in parts),
        restarts=sum(part.restarts for part in parts),
    )
