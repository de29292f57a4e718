"""What is worth saying about a run: findings with their weight, of which the heaviest are said. Pure.

A failure is said first. All else weighs what it cost: seconds of one node, summed over the nodes that paid.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from executor import protocol
from gangrun.explain.phrases import counted
from gangrun.report.model import Attempt, Stay, Timeline
from gangrun.report.source import Chapter, Report
from gangrun.report.words import duration, numbers, percent, printable

MOST_SENTENCES = 3
MOST_NAMES = 3
LEAST_S = 1.0  # what costs less than this and than the share below is not worth a sentence
LEAST_SHARE = 0.02
SLOW = 1.5  # times the median
CLOCK_S = 2.0
MUCH_UNSAVED_S = 60.0
MUCH_START, MUCH_CHECKPOINT = 0.1, 0.05
QUEUE_WEIGHT = START_WEIGHT = 0.25  # the totals tell these, too; and no node is held in the queue
FAILURE, TROUBLE = 2, 1


class Finding(NamedTuple):
    """One sentence, and its place: a greater `rank` first, then a greater `cost_s` (node-seconds)."""

    rank: int
    cost_s: float
    text: str
    kind: str = ""


def sentences(report: Report, most: int = MOST_SENTENCES) -> list[str]:
    """The most useful sentences about a run, the weightiest first, and no two of a kind."""
    found = sorted(findings(report), key=lambda finding: (finding.rank, finding.cost_s))
    heaviest = {finding.kind: finding for finding in found}
    chosen = sorted(heaviest.values(), key=lambda finding: (-finding.rank, -finding.cost_s))
    return [finding.text for finding in chosen[:most]] or [_all_well(report)]


def findings(report: Report) -> list[Finding]:
    """All that is worth a sentence, in no order."""
    least_s = max(LEAST_S, LEAST_SHARE * report.goodput.machine_s) * max(1, report.num_nodes)
    found = [
        finding._replace(kind=look.__name__)
        for look in (_cancelled, _queue, _queued_again, _start, _idle, _damage, _left_out)
        for finding in look(report)
    ]
    for chapter in report.chapters:
        name = f"{printable(chapter.label)}: " if chapter.label else ""
        for look in LOOKS:
            found += [finding._replace(text=name + finding.text, kind=look.__name__) for finding in look(chapter)]
    return [finding for finding in found if finding.rank or finding.cost_s >= least_s]


def _all_well(report: Report) -> str:
    share = report.goodput.share
    if share is None or not any(_ran(chapter) for chapter in report.chapters):
        return "No script has begun" + (f": it is {report.state}." if report.has_ended else " yet.")
    goodput = report.goodput
    ran_s = goodput.useful_s + goodput.recomputed_s + goodput.checkpoint_s
    return f"Nothing stands out: the scripts had {percent(ran_s / goodput.machine_s)} of the machine time."


# --- of the run as a whole


def _queue(report: Report) -> Iterator[Finding]:
    goodput, life_s = report.goodput, report.end - report.begin
    if goodput.queue_s > LEAST_S and life_s > 0:
        after = f", {_times(goodput.interruptions)} after an interruption" if goodput.interruptions else ""
        share = percent(goodput.queue_s / life_s)
        text = f"It waited {duration(goodput.queue_s)} in the queue{after}: {share} of its time."
        yield Finding(0, goodput.queue_s * max(1, report.num_nodes) * QUEUE_WEIGHT, text)


def _cancelled(report: Report) -> Iterator[Finding]:
    """By a person, or as its time limit was over: the reason tells."""
    if report.state == protocol.CANCELLED and report.reason:
        yield Finding(FAILURE, 0.0, f"It is {report.state}: {printable(report.reason)}.")


def _queued_again(report: Report) -> Iterator[Finding]:
    if report.waits_s is not None:
        text = f"It waits in the queue again, for {duration(report.waits_s)} now; `gangrun explain` says why."
        yield Finding(TROUBLE, math.inf, text)


def _start(report: Report) -> Iterator[Finding]:
    goodput = report.goodput
    start_s = goodput.setup_s + goodput.waiting_s
    if goodput.machine_s > 0 and start_s / goodput.machine_s > MUCH_START:
        starts = goodput.attempts + goodput.restarts
        times = f"{counted(starts, 'start')}, " if starts > 1 else ""
        share = percent(start_s / goodput.machine_s)
        text = f"Starting up took {share} of the machine time ({times}{duration(start_s)} on each node in all)."
        yield Finding(0, start_s * max(1, report.num_nodes) * START_WEIGHT, text)


def _idle(report: Report) -> Iterator[Finding]:
    """Nodes of a group's allocation on which nothing of it ran."""
    goodput = report.goodput
    if not report.is_group or goodput.machine_s <= 0 or goodput.idle_s / goodput.machine_s <= MUCH_START:
        return
    nodes = [max(1, chapter.timeline.num_nodes) for chapter in report.chapters]
    unused_s = [(goodput.machine_s - chapter.goodput.machine_s) * own for chapter, own in zip(report.chapters, nodes)]
    label = report.chapters[unused_s.index(max(unused_s))].label
    has_own = sum(nodes) == report.num_nodes  # or nodes serve several tasks, and are nobody's
    most = f", most of it on those of {printable(label)}" if has_own else ""
    text = f"For {percent(goodput.idle_s / goodput.machine_s)} of the machine time nothing ran on the nodes{most}."
    yield Finding(0, goodput.idle_s * max(1, report.num_nodes) * START_WEIGHT, text)


def _damage(report: Report) -> Iterator[Finding]:
    if report.skipped:
        text = f"{counted(report.skipped, 'line')} of the records could not be read; what is told here lacks them."
        yield Finding(TROUBLE, 0.0, text)


def _left_out(report: Report) -> Iterator[Finding]:
    """Tasks that have run, and whose own records somebody has left behind."""
    missing = [printable(one.label) for one in report.chapters if not one.has_records and _ran(one)]
    if missing:
        names = ", ".join(missing[:MOST_NAMES]) + (
            f" and {len(missing) - MOST_NAMES} more" * (len(missing) > MOST_NAMES)
        )
        text = f"The records of {names}, in directories of their own, are not here: all their time counts as running."
        yield Finding(TROUBLE, 0.0, text)


def _ran(chapter: Chapter) -> bool:
    return any(attempt.run for attempt in chapter.timeline.attempts)


# --- of a task


def _failure(chapter: Chapter) -> Iterator[Finding]:
    timeline = chapter.timeline
    if not timeline.attempts or timeline.state in (protocol.SUCCEEDED, protocol.CANCELLED, protocol.PENDING):
        return
    attempt = timeline.attempts[-1]
    failed = [stay for stay in attempt.stays if stay.state in (protocol.RANK_FAILED, protocol.RANK_BROKEN)]
    first = min(failed, key=_script_end, default=None)
    if first is None:
        if attempt.has_ended and attempt.reason:
            yield Finding(FAILURE, 0.0, f"It is {attempt.state}: {printable(attempt.reason)}.")
        return
    script = first.run or first.setup
    after = f" {duration(script.length_s)} after its {'script' if first.run else 'setup'} began" if script else ""
    stopped = sum(stay.state == protocol.RANK_STOPPED for stay in attempt.stays)
    others = f"; {_verb(stopped, 'other rank', 'was', 'were')} stopped for it" if stopped else ""
    code = f" ({protocol.describe_code(first.exit_code)})" if first.exit_code is not None else ""
    yield Finding(FAILURE, math.inf, f"{_who(first)} failed first,{after}{code}{others}.".replace(",  ", ", "))


def _script_end(stay: Stay) -> float:
    script = stay.run or stay.setup
    return script.end if script else math.inf


def _lost(chapter: Chapter) -> Iterator[Finding]:
    for attempt in chapter.timeline.attempts:
        name = _in_attempt(chapter.timeline, attempt)
        if attempt.was_lost:
            text = f"The head node was lost{name}: its driver left no word."
            yield Finding(TROUBLE, attempt.machine_s * len(attempt.stays), text)
            continue
        lost = [stay for stay in attempt.stays if stay.state == protocol.RANK_LOST]
        if lost and not attempt.was_interrupted or 0 < len(lost) < len(attempt.stays):
            heard = min((stay.run.end for stay in lost if stay.run), default=attempt.ended)
            who = _who(lost[0]) if len(lost) == 1 else f"Ranks {numbers([stay.rank for stay in lost])}"
            silent_s = attempt.ended - heard
            text = f"{who} left no word{name}: last heard of {duration(silent_s)} before the end."
            yield Finding(TROUBLE, silent_s * len(attempt.stays), text)


def _slow_setup(chapter: Chapter) -> Iterator[Finding]:
    """All wait for the slowest. Told of the attempt that it cost most; weighed by all."""
    found = [one for attempt in chapter.timeline.attempts for one in _slow_setups(chapter.timeline, attempt)]
    if found:
        worst = max(found, key=lambda finding: finding.cost_s)
        yield worst._replace(cost_s=sum(finding.cost_s for finding in found))


def _slow_setups(timeline: Timeline, attempt: Attempt) -> Iterator[Finding]:
    setups = [(stay, stay.setup) for stay in attempt.stays if stay.setup]
    if len(setups) < 2:
        return
    slowest, setup = max(setups, key=lambda pair: pair[1].length_s)
    usual_s = statistics.median_low([one.length_s for _, one in setups])
    held_s = setup.end - statistics.median_low([one.end for _, one in setups])
    if usual_s <= 0 or setup.length_s < SLOW * usual_s or held_s < LEAST_S:
        return
    slow = sum(one.length_s >= SLOW * usual_s for _, one in setups)
    more = f"; {_verb(slow - 1, 'other', 'was', 'were')} slow too" if slow > 1 else ""
    held = f"{_who(slowest)} held the others up for {duration(held_s)}{_in_attempt(timeline, attempt)}"
    ratio = f"its setup took {setup.length_s / usual_s:.1f} times the median"
    text = f"{held}: {ratio} ({duration(setup.length_s)}, not {duration(usual_s)}){more}."
    yield Finding(0, held_s * (len(setups) - slow), text)


def _late_start(chapter: Chapter) -> Iterator[Finding]:
    for attempt in chapter.timeline.attempts:
        runs = [(stay, stay.run) for stay in attempt.stays if stay.run]
        if len(runs) < 2:
            continue
        latest, run = max(runs, key=lambda pair: pair[1].begin)
        late_s = run.begin - statistics.median_low([one.begin for stay, one in runs if stay is not latest])
        if late_s >= LEAST_S:
            name = _in_attempt(chapter.timeline, attempt)
            yield Finding(0, late_s * len(runs), f"{_who(latest)} started {duration(late_s)} after the others{name}.")


def _barrier(chapter: Chapter) -> Iterator[Finding]:
    """Who is done waits for the last one."""
    for attempt in chapter.timeline.attempts:
        done = [(stay, stay.run) for stay in attempt.stays if stay.run and stay.state == protocol.RANK_DONE]
        if len(done) < 2 or len(done) < len(attempt.stays):
            continue
        last, run = max(done, key=lambda pair: pair[1].end)
        idle_s = sum(run.end - one.end for _, one in done)
        middle_s = run.end - statistics.median(one.end for _, one in done)
        if middle_s < LEAST_S:
            continue
        name = _in_attempt(chapter.timeline, attempt)
        text = (
            f"{_who(last)} was the last to end{name}: half of the ranks waited for it {duration(middle_s)} or longer."
        )
        yield Finding(0, idle_s, text)


def _restarts(chapter: Chapter) -> Iterator[Finding]:
    """A task that failed, and that its group started again."""
    attempts, goodput = chapter.timeline.attempts, chapter.goodput
    failed = [one for one, following in zip(attempts, attempts[1:]) if following.restart]
    if not failed:
        return
    code = failed[-1].exit_code
    last = (
        f" ({'the last time with ' if len(failed) > 1 else ''}{protocol.describe_code(code)})"
        if code is not None
        else ""
    )
    words = f"It failed {_times(len(failed))}{last} and was started again"
    if goodput.recomputed_s > 0 and not goodput.interruptions:
        most = "" if goodput.has_marks else "at most "
        words += f": {most}{duration(goodput.recomputed_s)} of work was lost"
    yield Finding(TROUBLE, goodput.recomputed_s * max(1, goodput.num_nodes), words + ".")


def _interruptions(chapter: Chapter) -> Iterator[Finding]:
    goodput = chapter.goodput
    if not goodput.interruptions:
        return
    nodes = max(1, goodput.num_nodes)
    times = _times(goodput.interruptions)
    if not goodput.has_marks:
        text = (
            f"It was interrupted {times}, and nobody knows how much of {duration(goodput.recomputed_s)} of work was "
            "lost: let the script note its checkpoints (`gangrun checkpoint STEP`)."
        )
        yield Finding(0, goodput.recomputed_s * nodes, text)
    elif goodput.recomputed_s > 0:
        lost = f"{duration(goodput.recomputed_s)} of work"
        text = f"It was interrupted {times}: {lost} came after the last checkpoint and was lost."
        yield Finding(0, goodput.recomputed_s * nodes, text)


def _unfinished(chapter: Chapter) -> Iterator[Finding]:
    """Work of a run that failed or was cancelled. Where it was interrupted or started again, that is told instead."""
    goodput = chapter.goodput
    if not chapter.timeline.has_ended or goodput.interruptions or goodput.restarts:
        return
    lost = duration(goodput.recomputed_s)
    cost_s = goodput.recomputed_s * max(1, goodput.num_nodes)
    if goodput.has_marks and goodput.recomputed_s > 0:
        yield Finding(0, cost_s, f"{lost} of work came after the last checkpoint and was lost.")
    elif goodput.recomputed_s >= MUCH_UNSAVED_S:
        way = "let the script note its checkpoints (`gangrun checkpoint STEP`)"
        yield Finding(0, cost_s, f"Nobody knows how much of {lost} of work was saved: {way}.")


def _checkpoints(chapter: Chapter) -> Iterator[Finding]:
    goodput = chapter.goodput
    ran_s = goodput.useful_s + goodput.recomputed_s + goodput.checkpoint_s
    if goodput.marks and goodput.checkpoint_s > MUCH_CHECKPOINT * ran_s:
        each_s = sum(mark.cost_s for mark in chapter.marks) / goodput.marks
        text = (
            f"{counted(goodput.marks, 'checkpoint')} took {percent(goodput.checkpoint_s / ran_s)} of the running time, "
            f"{duration(each_s)} each; `gangrun estimate` finds the best interval."
        )
        yield Finding(0, goodput.checkpoint_s * max(1, goodput.num_nodes), text)


def _unsaved(chapter: Chapter) -> Iterator[Finding]:
    goodput = chapter.goodput
    if goodput.has_marks and goodput.unsaved_s > 0:
        text = f"{duration(goodput.unsaved_s)} of work is not in a checkpoint yet."
        yield Finding(0, goodput.unsaved_s * max(1, goodput.num_nodes), text)


def _clocks(chapter: Chapter) -> Iterator[Finding]:
    """Cheap to mend, and wrong clocks break more than reports."""
    off = {stay.host: stay.clock_s for attempt in chapter.timeline.attempts for stay in attempt.stays}
    off = {host: error for host, error in off.items() if abs(error) >= CLOCK_S}
    if not off:
        return
    host, error = max(off.items(), key=lambda pair: abs(pair[1]))
    more = f"; {counted(len(off) - 1, 'other clock')} differ too" if len(off) > 1 else ""
    way = "behind" if error > 0 else "ahead of"
    head = chapter.timeline.clock or "the head node"
    text = f"The clock of {printable(host)} is {duration(abs(error))} {way} that of {printable(head)}{more}"
    yield Finding(TROUBLE, 0.0, text + "; its times were moved.")


LOOKS: Sequence[Callable[[Chapter], Iterator[Finding]]] = (
    _failure, _lost, _slow_setup, _late_start, _barrier, _restarts, _interruptions, _unfinished, _checkpoints,
    _unsaved, _clocks,
)  # fmt: skip


# --- words


def _who(stay: Stay) -> str:
    return f"Rank {stay.rank} on {printable(stay.host) or 'an unknown node'}"


def _in_attempt(timeline: Timeline, attempt: Attempt) -> str:
    return f" in attempt {attempt.label}" if len(timeline.attempts) > 1 else ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _verb(count: int, noun: str, one: str, many: str) -> str:
    return f"{counted(count, noun)} {one if count == 1 else many}"
