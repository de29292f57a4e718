"""Where a report's facts come from: the cluster in one remote call, or a directory that is here. Then all is pure."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from codegen.spec import SpecError
from executor import protocol
from gangrun import agent, states
from gangrun.cluster import Job
from gangrun.records import Run
from gangrun.remote import NAMES, Unreachable
from gangrun.report import tasks
from gangrun.report.goodput import Goodput, Mark, Pieces, marks_in, measure, pieces_of, read_marks, together
from gangrun.report.model import Event, Part, Timeline, build, nodes_of, read_events, read_status

RUN_PARTS = ("name", "status", "events", "checkpoints", "now", "tails", "marked")


class Chapter(NamedTuple):
    """A job of one task, or one task of a group: what it did and what that came to."""

    label: str  # the task's name in its group; empty for a job that is alone
    timeline: Timeline
    marks: Sequence[Mark]
    pieces: Sequence[Pieces]
    goodput: Goodput
    tails: Mapping[str, str]
    skipped: int  # lines that could not be read
    has_records: bool = True  # of its own; or only its group's tell of it


class Report(NamedTuple):
    """A run: its chapters, and what holds for it as a whole."""

    name: str
    job: str
    state: str
    exit_code: int | None
    reason: str
    has_ended: bool
    num_nodes: int
    chapters: Sequence[Chapter]
    goodput: Goodput
    begin: float
    end: float
    clock: str
    skipped: int
    waits_s: float | None = None  # how long it has been in the queue again, if it is

    @property
    def has_begun(self) -> bool:
        return any(chapter.timeline.attempts for chapter in self.chapters)

    @property
    def is_group(self) -> bool:
        return bool(self.chapters) and bool(self.chapters[0].label)


def of_job(job: Job, pattern: re.Pattern[str] | None) -> Report:
    """What the cluster knows of a run. Raises RemoteError."""
    run = job.run
    try:
        answer = job.cluster.host.call("report", root=run.root, run=run.run, pattern=pattern and pattern.pattern)
    except Unreachable as error:
        if pattern is None:
            raise
        raise Unreachable(f"{error}; --checkpoint-pattern may take too long there: try without it") from error
    parts = json.loads(zlib.decompress(base64.b64decode(answer["parts"])))
    if not parts:
        raise NotBegun(_not_begun(run, float(answer["now"])))
    queued_until = None if run.is_final else float(answer["now"])
    found = compose(
        [part_of(part) for part in parts], pattern, float(answer["utc_offset_s"]), run.submitted, queued_until
    )
    if run.is_final and not found.has_ended:  # its drivers did not live to tell
        return found._replace(state=run.state, exit_code=run.exit_code, reason=run.reason, has_ended=True)
    return found


class NotBegun(protocol.GangrunError):
    """There is nothing to report: no driver has been at work."""


def _not_begun(run: Run, now: float) -> str:
    since = f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(run.submitted))}"
    where = f"it waits in the queue {since}" if not run.is_final else f"it is {run.state} and has never started"
    return f"{run.run}: nothing to report: {where}; `gangrun explain {run.run}` says why"


def of_path(path: str, pattern: re.Pattern[str] | None) -> Report:
    """What lies in a job's directory, in the directory of a launched run, or in an events file alone.

    Raises SpecError where there is nothing of that kind.
    """
    agent.NAMES.update(NAMES)
    if os.path.isfile(path):
        parts = [
            Part(name=os.path.basename(os.path.abspath(path)), events=agent.read_end(path, agent.MOST_EVENT_BYTES))
        ]
    else:
        parts = [part_of(part) for part in agent.report_parts(_job_directory(path), pattern and pattern.pattern)]
    report = compose(parts, pattern, float(time.localtime().tm_gmtoff), None) if parts else None
    if report is None or not report.has_begun:
        _refuse_unreadable(path)
        ways = f"use the directory of a job, which holds {protocol.EVENTS_NAME}, or such a file"
        raise SpecError(f"job={path!r}: no events are there; {ways}")
    return report


def _refuse_unreadable(path: str) -> None:
    for place in (path, os.path.join(_job_directory(path), protocol.EVENTS_NAME)):
        try:
            os.close(os.open(place, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError as error:
            raise SpecError(f"job={path!r}: cannot read {place}: {error.strerror}; ask its owner") from error
        except OSError:
            pass


def _job_directory(path: str) -> str:
    """Of a launched run's directory the one in which its drivers write; else the path itself."""
    path = os.path.abspath(path)
    home, job = os.path.dirname(os.path.dirname(path)), agent.known_job(path)
    found = os.path.join(home, job[0], os.path.basename(path)) if job else path
    return found if os.path.isdir(found) else path


def part_of(told: Mapping[str, Any]) -> Part:
    return Part(**{name: told[name] for name in RUN_PARTS})


def compose(
    parts: Sequence[Part],
    pattern: re.Pattern[str] | None,
    utc_offset_s: float,
    submitted: float | None,
    queued_until: float | None = None,
) -> Report:
    """The whole report from the parts: the job's own, then those of a group's tasks. `queued_until`: see `build`."""
    whole = build(parts[0], submitted, queued_until=queued_until)
    status, (events, _) = read_status(parts[0].status), read_events(parts[0].events)
    members = [part for part in parts[1:] if part.name.startswith(parts[0].name + ".")]
    told = tasks.named(status, events)
    if members or told:
        if not nodes_of(status):
            whole = dataclasses.replace(whole, num_nodes=tasks.width(events) or whole.num_nodes)
        until = None if _waits_s(whole) is None else queued_until
        chapters = [_member(part, whole, told, pattern, utc_offset_s, until) for part in members]
        present = {chapter.label for chapter in chapters}
        chapters += [_told_of(name, told[name], events, whole) for name in told if name not in present]
        order = {name: index for index, name in enumerate(told)}
        chapters.sort(key=lambda chapter: order.get(chapter.label, len(order)))
    else:
        chapters = [_chapter("", parts[0], whole, pattern, utc_offset_s, False)]
    timelines = [whole, *(chapter.timeline for chapter in chapters)]
    return Report(
        name=whole.name, job=whole.job, state=whole.state, exit_code=whole.exit_code, reason=whole.reason,
        has_ended=whole.has_ended, num_nodes=whole.num_nodes, chapters=chapters,
        goodput=_whole_goodput(whole, chapters) if members or told else chapters[0].goodput,
        begin=min((one.begin for one in timelines if one.attempts), default=0.0),
        end=max(one.end for one in timelines), clock=whole.clock,
        skipped=sum(chapter.skipped for chapter in chapters) + (whole.skipped if members or told else 0),
        waits_s=_waits_s(whole),
    )  # fmt: skip


def _waits_s(whole: Timeline) -> float | None:
    last = whole.attempts[-1] if len(whole.attempts) > 1 else None
    is_queued = last is not None and not last.has_ended and last.state == protocol.PENDING and last.machine_s == 0
    return last.queue_s if last is not None and is_queued else None


def _told_of(name: str, told: Mapping[str, Any], events: Sequence[Event], whole: Timeline) -> Chapter:
    """A task that has no records: it waits, or they are not here."""
    timeline = tasks.timeline_of(name, told, events, whole)
    is_done = whole.state == protocol.SUCCEEDED and timeline.state == protocol.CANCELLED
    return Chapter(
        name, timeline, [], pieces_of(timeline, [], is_done), measure(timeline, [], is_done), {}, 0, has_records=False
    )


def _member(
    part: Part,
    whole: Timeline,
    told: Mapping[str, Mapping[str, Any]],
    pattern: re.Pattern[str] | None,
    utc_offset_s: float,
    queued_until: float | None,
) -> Chapter:
    """A task of a group: it was queued with its group, and ended as was meant if its group ended it."""
    label = part.name[len(whole.name) + 1 :]
    allocations = [attempt.granted for attempt in whole.attempts]
    timeline = build(part, whole.begin if whole.attempts else None, allocations, queued_until)
    timeline = tasks.turn_of(told.get(label, {}), whole, timeline)
    is_done = whole.state == protocol.SUCCEEDED and timeline.state == protocol.CANCELLED
    return _chapter(label, part, timeline, pattern, utc_offset_s, is_done)


def _chapter(
    label: str, part: Part, timeline: Timeline, pattern: re.Pattern[str] | None, utc_offset_s: float, is_done: bool
) -> Chapter:
    marks, damaged = read_marks(part.checkpoints)
    if pattern is not None:
        marks, damaged = marks_in(part.marked, pattern, utc_offset_s), 0
    return Chapter(
        label, timeline, marks, pieces_of(timeline, marks, is_done), measure(timeline, marks, is_done), part.tails,
        timeline.skipped + damaged,
    )  # fmt: skip


def _whole_goodput(whole: Timeline, chapters: Sequence[Chapter]) -> Goodput:
    """Of a group: per node of its allocation, which it holds from the first task's begin to the last one's end."""
    sums = together([chapter.goodput for chapter in chapters], whole.num_nodes)
    held_s = sum(attempt.machine_s for attempt in whole.attempts)
    return sums._replace(
        machine_s=max(held_s, sums.machine_s),  # tasks that share nodes hold more than there is
        queue_s=sum(attempt.queue_s for attempt in whole.attempts),
        attempts=len(whole.attempts),
        interruptions=sum(attempt.was_interrupted for attempt in whole.attempts),
    )


def only(report: Report, task: str) -> Report:
    """The report of one task of a group. One that did not live to tell how it ended is lost with its group."""
    chapter = next(chapter for chapter in report.chapters if chapter.label == task)
    one, is_cut = chapter.timeline, report.has_ended and not chapter.timeline.has_ended
    return report._replace(
        name=one.name, state=states.LOST if is_cut else one.state, exit_code=one.exit_code, reason=one.reason,
        has_ended=one.has_ended or is_cut,
        num_nodes=one.num_nodes, chapters=[chapter._replace(label="")], goodput=chapter.goodput, begin=one.begin,
        end=one.end, clock=one.clock, skipped=chapter.skipped,
    )  # fmt: skip
