"""Tasks of a group of which no record is there: what the group's own events tell. Pure.

A task has none before it starts. Nor has one whose directory, or whose events, somebody has left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executor import protocol
from gangrun.report.model import QUEUED, RUN, WAITING, Attempt, Event, Span, Stay, Timeline, nodes_of


def named(status: Mapping[str, Any], events: Sequence[Event]) -> dict[str, Mapping[str, Any]]:
    """What the group tells of each task, by name, in the order of its file. Empty for what is no group."""
    told = status.get("tasks")
    tasks = [task for task in told if isinstance(task, dict)] if isinstance(told, list) else []
    found: dict[str, Mapping[str, Any]] = {str(task.get("name")): task for task in tasks}
    for event in events:
        if event["event"] == protocol.EVENT_TASK_STARTED and isinstance(event.get("task"), str):
            found.setdefault(event["task"], {})
    return found


def width(events: Sequence[Event]) -> int:
    """On how many nodes tasks have been."""
    return len({node for event in events for node in _nodes(event)})


def timeline_of(name: str, told: Mapping[str, Any], events: Sequence[Event], whole: Timeline) -> Timeline:
    """The task's starts and ends. What it did in between is not known, and counts as running."""
    own = [event for event in events if event.get("task") == name]
    num_nodes = nodes_of(told) or max((len(_nodes(event)) for event in own), default=0) or 1
    attempts: list[Attempt] = []
    for index, attempt in enumerate(whole.attempts):
        until = whole.attempts[index + 1].begun if index + 1 < len(whole.attempts) else float("inf")
        within = [event for event in own if attempt.begun <= event["time"] < until]
        for one in _lives(within, attempt, num_nodes):
            attempts.append(one._replace(life=len(attempts)))
    if attempts:
        attempts[-1] = _settled(attempts[-1], told)
    return Timeline(f"{whole.name}.{name}", name, whole.job, num_nodes, attempts, clock=whole.clock)


def turn_of(told: Mapping[str, Any], whole: Timeline, timeline: Timeline) -> Timeline:
    """The same, and that it has not begun yet in the group's last attempt, where that is so."""
    last = whole.attempts[-1] if whole.attempts else None
    if last is None or not timeline.attempts or timeline.attempts[-1].number >= last.number:
        return timeline
    waits = _life(None, None, last.ended, last.submitted, last, timeline.num_nodes)
    waits = _settled(waits, told)._replace(life=len(timeline.attempts))
    return dataclasses.replace(timeline, attempts=[*timeline.attempts, waits])


def _settled(attempt: Attempt, told: Mapping[str, Any]) -> Attempt:
    """With the end that the group's record tells, if its events did not live to."""
    state, code = told.get("state"), told.get("exit_code")
    if attempt.has_ended and attempt.state not in protocol.TERMINAL_STATES and state in protocol.TERMINAL_STATES:
        attempt = attempt._replace(state=str(state), exit_code=code if isinstance(code, int) else None)
    reason = told.get("reason")
    return attempt._replace(reason=reason) if isinstance(reason, str) else attempt


def _lives(events: Sequence[Event], attempt: Attempt, num_nodes: int) -> Iterator[Attempt]:
    """One for each start in this attempt of the group; one that waits where there is none."""
    starts = [event for event in events if event["event"] == protocol.EVENT_TASK_STARTED]
    ends = [event for event in events if event["event"] == protocol.EVENT_TASK_ENDED]
    since = attempt.submitted
    for number, start in enumerate(starts):
        limit = starts[number + 1]["time"] if number + 1 < len(starts) else attempt.ended
        end = next((one for one in ends if start["time"] <= one["time"] <= limit), None)
        life = _life(start, end, limit, since, attempt)
        yield life._replace(restart=number)
        since = life.ended
    if not starts:
        yield _life(None, None, attempt.ended, since, attempt, num_nodes)


def _life(
    start: Event | None, end: Event | None, limit: float, since: float, attempt: Attempt, num_nodes: int = 0
) -> Attempt:
    ended = max(since, end["time"] if end else limit)
    begun = min(ended, max(since, start["time"] if start else ended))
    allocated = min(begun, max(since, attempt.granted))
    spans = [Span(QUEUED, since, allocated), Span(WAITING, allocated, begun), Span(RUN, begun, ended)]
    spans = [span for span in spans if span.length_s > 0]
    run = Span(RUN, begun, ended) if start else None
    hosts = _nodes(start) if start else [""] * num_nodes
    unknown = protocol.RUNNING if not attempt.has_ended else attempt.state
    code = (end or {}).get("exit_code")
    return Attempt(
        number=attempt.number, life=0, submitted=since, allocated=allocated, granted=begun, begun=begun, ended=ended,
        state=str((end or {}).get("state") or (unknown if start else protocol.PENDING)),
        exit_code=code if isinstance(code, int) else None, reason="", has_ended=end is not None or attempt.has_ended,
        was_lost=attempt.was_lost and end is None,
        stays=[Stay(rank, host, spans, run=run) for rank, host in enumerate(hosts)],
    )  # fmt: skip


def _nodes(event: Event) -> list[str]:
    nodes = event.get("nodes")
    return [str(node) for node in nodes] if isinstance(nodes, list) else []
