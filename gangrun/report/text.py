"""A report for a terminal: a bar for each rank or task, the totals, the sentences. Pure words."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from executor import protocol
from gangrun.explain.phrases import counted
from gangrun.report.goodput import Goodput
from gangrun.report.model import BARRIER, LOST, QUEUED, RUN, SETUP, WAITING, Attempt, Span
from gangrun.report.sentences import sentences
from gangrun.report.source import Chapter, Report
from gangrun.report.words import duration, percent, printable, short, ticks

REDONE = "work lost"  # running time whose result was thrown away
SHOWN = (QUEUED, WAITING, SETUP, RUN, BARRIER, LOST, REDONE)
GLYPHS = dict(zip(SHOWN, "·░▒█─×▚"))
ASCII = dict(zip(SHOWN, ".-s#=x%"))
COLOURS = dict(zip(SHOWN, ("bright_black", "yellow", "blue", "green", "cyan", "red", "magenta")))
CHECKPOINT, CHECKPOINT_ASCII = "▲", "^"
MOST_RANKS = 16  # a bar each; more are put together
MOST_BARS = 12
LEAST_ODD = 0.02  # of the whole time: two columns or so
LONGEST_LABEL = 28
LEAST_BAR = 20
TICK_COLUMNS = 12
LEAST_FILLED = 0.25  # of a column, or it stays empty

Paint = Callable[[str, str], str]


class Look(NamedTuple):
    """What a terminal can show. `paint` takes a text and a colour."""

    width: int
    is_ascii: bool = False
    paint: Paint = lambda text, colour: text
    wraps: bool = False  # sentences at its width; elsewhere each is a line

    @property
    def glyphs(self) -> Mapping[str, str]:
        return ASCII if self.is_ascii else GLYPHS


class Bar(NamedTuple):
    """One line of the timeline: what some ranks did, each as its spans."""

    label: str
    rows: Sequence[Sequence[Span]]


def lines(report: Report, look: Look) -> list[str]:
    """The whole report."""
    bars = bars_of(report)
    return [
        *_wrapped(_title(report), look),
        "",
        *_chart(report, bars, look),
        "",
        *_totals(report.goodput),
        "",
        *(line for sentence in sentences(report) for line in _wrapped(f"* {sentence}", look)),
        *(line for note in _footnotes(report) for line in _wrapped(note, look)),
    ]


def _wrapped(words: str, look: Look) -> list[str]:
    if not look.wraps or len(words) <= look.width:
        return [words]
    after = "  " if words.startswith("* ") else ""
    width = max(LEAST_BAR, look.width)
    return textwrap.wrap(words, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def _title(report: Report) -> str:
    job = f" (job {printable(report.job)})" if report.job else ""
    code = f", {protocol.describe_code(report.exit_code)}" if report.has_ended and report.exit_code else ""
    tasks = f"{counted(len(report.chapters), 'task')}, " if report.is_group else ""
    so_far = "" if report.has_ended else " so far"
    what = f"{tasks}{counted(report.num_nodes, 'node')}, {starts(report.goodput)}"
    what += f", {duration(report.end - report.begin)}{so_far}"
    return f"{printable(report.name)}{job} {report.state}{code}: {what}"


def starts(goodput: Goodput) -> str:
    """`2 attempts, 1 restart`."""
    restarts = f", {counted(goodput.restarts, 'restart')}" if goodput.restarts else ""
    return counted(goodput.attempts, "attempt") + restarts


def _footnotes(report: Report) -> list[str]:
    notes = [f"Times are on the clock of {printable(report.clock)}, the head node."] if report.clock else []
    if report.is_group:
        notes.append("`gangrun report JOB TASK` shows a task's ranks.")
    return ["", *notes] if notes else []


# --- the timeline


def bars_of(report: Report) -> list[Bar]:
    """A bar for each task of a group; else for each rank, or for those that are alike, the worst first."""
    if report.is_group:
        return [Bar(printable(one.label), _all_spans(one)) for one in report.chapters]
    chapter = report.chapters[0]
    ranks = chapter.timeline.ranks
    if len(ranks) <= MOST_RANKS:
        return [Bar(_rank_label(chapter, rank), [shown_spans(chapter, rank)]) for rank in ranks]
    alone = worst_first(chapter, report)[: MOST_BARS - 1]
    others = [rank for rank in ranks if rank not in alone]
    bars = [Bar(_rank_label(chapter, rank), [shown_spans(chapter, rank)]) for rank in alone]
    return [*bars, Bar(f"{len(others)} other ranks", [shown_spans(chapter, rank) for rank in others])]


def _all_spans(chapter: Chapter) -> list[list[Span]]:
    return [shown_spans(chapter, rank) for rank in chapter.timeline.ranks]


def _rank_label(chapter: Chapter, rank: int) -> str:
    """`5 n6`; `5 n2,n6` if another attempt was elsewhere; `5! n6` if it failed, `5? n6` if it was lost."""
    hosts = dict.fromkeys(stay.host for stay in chapter.timeline.stays_of(rank) if stay.host)
    marks = {protocol.RANK_FAILED: "!", protocol.RANK_BROKEN: "!", protocol.RANK_LOST: "?"}
    state = chapter.timeline.stays_of(rank)[-1].state  # it may have been started again
    return f"{rank}{marks.get(state, '')} {printable(','.join(hosts))}"


def shown_spans(chapter: Chapter, rank: int) -> list[Span]:
    """A rank's spans; running time whose result was lost is told apart."""
    has_marks = chapter.goodput.has_marks  # or nobody knows what was lost
    lost = [span for pieces in chapter.pieces for span in pieces.recomputed] if has_marks else []
    found: list[Span] = []
    for span in chapter.timeline.spans_of(rank):
        found += _told_apart(span, lost) if span.phase == RUN and lost else [span]
    return found


def _told_apart(run: Span, lost: Sequence[Span]) -> list[Span]:
    found, at = [], run.begin
    for span in lost:
        begin, end = max(span.begin, at), min(span.end, run.end)
        if end > begin:
            found += [Span(RUN, at, begin), Span(REDONE, begin, end)]
            at = end
    return [span for span in (*found, Span(RUN, at, run.end)) if span.length_s > 0]


def worst_first(chapter: Chapter, report: Report) -> list[int]:
    """The ranks that failed, those that were lost, then those that differ from the median as much as can be seen."""
    least_s = max(1.0, LEAST_ODD * (report.end - report.begin))
    harm: dict[int, int] = {}
    odd_s: dict[int, float] = {}
    for attempt in chapter.timeline.attempts:
        for stay in attempt.stays:
            harm[stay.rank] = max(harm.get(stay.rank, 0), HARM.get(stay.state, 0))
        for rank, seconds in [*_oddness(attempt, SETUP), *_oddness(attempt, RUN)]:
            odd_s[rank] = max(odd_s.get(rank, 0.0), seconds)
    found = [rank for rank in harm if harm[rank] or odd_s.get(rank, 0.0) >= least_s]
    return sorted(found, key=lambda rank: (-harm[rank], -odd_s.get(rank, 0.0), rank))


def _oddness(attempt: Attempt, phase: str) -> list[tuple[int, float]]:
    """How much longer or shorter than the median each rank's script took."""
    scripts = [(stay.rank, stay.setup if phase == SETUP else stay.run) for stay in attempt.stays]
    lengths = [(rank, span.length_s) for rank, span in scripts if span]
    middle = statistics.median([length for _, length in lengths]) if lengths else 0.0
    return [(rank, abs(length - middle)) for rank, length in lengths]


HARM = {protocol.RANK_FAILED: 3, protocol.RANK_BROKEN: 3, protocol.RANK_LOST: 2}


def _chart(report: Report, bars: Sequence[Bar], look: Look) -> list[str]:
    room = max(len(bar.label) for bar in bars) if bars else 0
    room = min(room, LONGEST_LABEL, max(4, look.width // 3))
    width = max(LEAST_BAR, look.width - room - 2)
    begin, end = report.begin, max(report.end, report.begin + 1e-3)
    found = [" " * (room + 2) + _axis(end - begin, width)]
    used: set[str] = set()
    for bar in bars:
        phases = cells(bar.rows, begin, end, width)
        used.update(filter(None, phases))
        found.append(f"{short(bar.label, room):<{room}}  {_painted(phases, look)}".rstrip())
    marks = [mark.time for chapter in report.chapters for mark in chapter.marks]
    found += [f"{'':<{room}}  {_mark_line(marks, begin, end, width, look)}"] if marks else []
    return [*found, *(" " * (room + 2) + line for line in _legend(used, bool(marks), look, width))]


def cells(rows: Sequence[Sequence[Span]], begin: float, end: float, width: int) -> list[str | None]:
    """What the ranks did most of the time of each column; None where they did nothing."""
    sums: list[dict[str, float]] = [{} for _ in range(width)]
    scale = width / (end - begin)
    for spans in rows:
        for span in spans:
            first, last = (span.begin - begin) * scale, (span.end - begin) * scale
            for column in range(max(0, int(first)), min(width, int(last) + 1)):
                part = min(last, column + 1) - max(first, column)
                if part > 0:
                    sums[column][span.phase] = sums[column].get(span.phase, 0.0) + part
    least = len(rows) * LEAST_FILLED
    return [max(one, key=lambda phase: one[phase]) if sum(one.values()) > least else None for one in sums]


def _painted(phases: Sequence[str | None], look: Look) -> str:
    pieces: list[str] = []
    at = 0
    while at < len(phases):
        phase, end = phases[at], at
        while end < len(phases) and phases[end] == phase:
            end += 1
        pieces.append(look.paint(look.glyphs[phase] * (end - at), COLOURS[phase]) if phase else " " * (end - at))
        at = end
    return "".join(pieces)


def _axis(length_s: float, width: int) -> str:
    line = [" "] * (width + TICK_COLUMNS)
    for tick in ticks(length_s, max(1, width // TICK_COLUMNS)):
        text = "|" + (duration(tick) if tick else "0")
        at = round(tick / length_s * width) if length_s else 0
        if at + len(text) <= width:
            line[at : at + len(text)] = text
    return "".join(line[:width]).rstrip()


def _mark_line(times: Sequence[float], begin: float, end: float, width: int, look: Look) -> str:
    line = [" "] * width
    for time in times:
        if begin <= time <= end:
            line[min(width - 1, int((time - begin) / (end - begin) * width))] = (
                CHECKPOINT_ASCII if look.is_ascii else CHECKPOINT
            )
    return "".join(line).rstrip()


def _legend(used: set[str], has_marks: bool, look: Look, width: int) -> list[str]:
    """In as many lines as it takes."""
    told = [(phase, look.paint(look.glyphs[phase], COLOURS[phase])) for phase in SHOWN if phase in used]
    told += [("checkpoint", CHECKPOINT_ASCII if look.is_ascii else CHECKPOINT)] if has_marks else []
    found, room = [""], width
    for name, sign in told:
        if len(name) + 2 > room and found[-1]:
            found, room = [*found, ""], width
        found[-1] += f"{'  ' if found[-1] else ''}{sign} {name}"
        room -= len(name) + 4
    return found


# --- the totals


def _totals(goodput: Goodput) -> list[str]:
    if goodput.share is None or goodput.most_share is None:
        return ["machine time  none yet"]
    share = percent(goodput.share)
    if goodput.is_range:
        share = f"{percent(goodput.share)} to {percent(goodput.most_share)}"
    found = [f"machine time  {duration(goodput.machine_s)} on {each_node(goodput)}, useful {share}"]
    width = max(len(name) for name, _ in total_rows(goodput))
    for name, seconds in total_rows(goodput):
        part = "" if name == QUEUE_ROW else percent(seconds / goodput.machine_s)
        found.append(f"  {name:<{width}}  {duration(seconds):>8}  {part:>6}".rstrip())
    return found


def each_node(goodput: Goodput) -> str:
    nodes = counted(goodput.num_nodes, "node")
    return nodes if goodput.num_nodes == 1 else f"each of {nodes}"


QUEUE_ROW = "in the queue"


def total_rows(goodput: Goodput) -> list[tuple[str, float]]:
    """What the machine time went into, and, beside it, the queue. Rows that are empty are left off."""
    lost = f"{REDONE}, if nothing was saved" if goodput.is_range else REDONE
    rows = [
        ("useful", goodput.useful_s), (lost, goodput.recomputed_s), ("checkpoints", goodput.checkpoint_s),
        ("setup", goodput.setup_s), ("waiting to start", goodput.waiting_s), ("barrier", goodput.barrier_s),
        ("lost", goodput.lost_s), ("idle", goodput.idle_s), (QUEUE_ROW, goodput.queue_s),
    ]  # fmt: skip
    return [(name, seconds) for name, seconds in rows if name == "useful" or seconds >= 0.005]
