"""From the events of a job's drivers to a timeline. Pure.

All times are in seconds since 1970 on one clock, the head node's, where the driver runs. Times that other nodes and the
controller tell are moved to it by as little as makes their order possible; what cannot be is cut off, so no span is
ever negative.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from executor import protocol

# What a rank does, in the order in which it does it.
QUEUED, WAITING, SETUP, RUN, BARRIER, LOST = PHASES = ("queued", "waiting", "setup", "run", "barrier", "lost")
CLOCK_TOLERANCE_S = 0.5
LONGEST_CLOCK_ERROR_S = 366 * 86400.0
MOST_NODES = 100_000  # a file that tells of more is damaged

Event = Mapping[str, Any]


class Part(NamedTuple):
    """What lies in one job directory. `now` is the last moment of which it tells anything: the present, if it runs."""

    name: str
    status: str = ""
    events: str = ""
    checkpoints: str = ""
    now: float = 0.0
    tails: Mapping[str, str] = {}  # the ends of the failed ranks' logs, by name
    marked: Sequence[str] = ()  # lines of rank 0's log that match the pattern


class Span(NamedTuple):
    """What a rank did from `begin` to `end`."""

    phase: str
    begin: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.begin


class Stay(NamedTuple):
    """One rank in one attempt. `setup` and `run` are the begin and end of its scripts, None where there was none.

    `clock_s` is what was added to the times of its node: how far its clock was behind the head node's, at least.
    """

    rank: int
    host: str
    spans: Sequence[Span]
    state: str = ""
    exit_code: int | None = None
    log: str | None = None
    setup: Span | None = None
    run: Span | None = None
    clock_s: float = 0.0
    why: str = ""


class Attempt(NamedTuple):
    """One life of a driver: from the submission, or the end of the life before, to its end."""

    number: int
    life: int  # counted from 0, over all attempts
    submitted: float
    allocated: float  # its queue's end: of a group's task the group's, which may start it much later
    granted: float  # from now on it holds its nodes
    begun: float
    ended: float
    state: str  # the job's, when it ended; that of now if it has not
    exit_code: int | None
    reason: str
    has_ended: bool
    was_lost: bool  # its driver could not say how it ended
    stays: Sequence[Stay]
    restart: int = 0  # how often its group had started the task again in this attempt of the job

    @property
    def label(self) -> str:
        """`1`; `1, restart 2`, as the logs have it. No two of a task are alike."""
        return f"{self.number}, restart {self.restart}" if self.restart else str(self.number)

    @property
    def was_interrupted(self) -> bool:
        """Another attempt was to follow."""
        return self.was_lost or (self.has_ended and self.state == protocol.PENDING)

    @property
    def queue_s(self) -> float:
        return self.allocated - self.submitted

    @property
    def machine_s(self) -> float:
        """How long it held its nodes, each of them."""
        return self.ended - self.granted

    @property
    def run(self) -> Span | None:
        """From the first script's begin to the last one's end."""
        runs = [stay.run for stay in self.stays if stay.run]
        return Span(RUN, min(one.begin for one in runs), max(one.end for one in runs)) if runs else None


@dataclass(frozen=True)
class Timeline:
    """A job of one task, over all its attempts. `skipped` lines of its events could not be read."""

    name: str
    task: str
    job: str
    num_nodes: int
    attempts: Sequence[Attempt]
    skipped: int = 0
    clock: str = ""  # the host on whose clock its times are

    @property
    def begin(self) -> float:
        return self.attempts[0].submitted if self.attempts else 0.0

    @property
    def end(self) -> float:
        return max((attempt.ended for attempt in self.attempts), default=0.0)

    @property
    def state(self) -> str:
        return self.attempts[-1].state if self.attempts else protocol.PENDING

    @property
    def exit_code(self) -> int | None:
        return self.attempts[-1].exit_code if self.attempts else None

    @property
    def reason(self) -> str:
        return self.attempts[-1].reason if self.attempts else ""

    @property
    def has_ended(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].has_ended and self.state in protocol.TERMINAL_STATES

    @cached_property
    def _by_rank(self) -> dict[int, list[Stay]]:
        found: dict[int, list[Stay]] = {}
        for attempt in self.attempts:
            for stay in attempt.stays:
                found.setdefault(stay.rank, []).append(stay)
        return found

    @property
    def ranks(self) -> list[int]:
        return sorted(self._by_rank)

    def stays_of(self, rank: int) -> list[Stay]:
        return self._by_rank[rank]

    def spans_of(self, rank: int) -> list[Span]:
        return [span for stay in self.stays_of(rank) for span in stay.spans]


# --- reading


def read_events(text: str) -> tuple[list[Event], int]:
    """The events, in the order in which they were written, and how many lines are none: cut, damaged, or foreign."""
    lines = [line for line in text.split("\n") if line.strip("\0 \t\r")]
    events = [event for event in map(_event, lines) if event is not None]
    return events, len(lines) - len(events)


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    has_place = _time(event.get("time")) is not None and _whole(event.get("attempt")) is not None
    is_of_rank = event["event"].startswith("rank_")
    return event if has_place and (not is_of_rank or _whole(event.get("rank")) is not None) else None


def read_status(text: str) -> dict[str, Any]:
    """What status.json says; empty where it says nothing that can be read."""
    try:
        status = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return status if isinstance(status, dict) else {}


def _time(value: object) -> float | None:
    """A time, or None for what is none: a hostile file may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and 0 <= number < 1e11 else None


def _whole(value: object) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
    return int(value) if is_whole else None  # type: ignore[call-overload]


# --- building


def build(
    part: Part, submitted: float | None = None, allocations: Sequence[float] = (), queued_until: float | None = None
) -> Timeline:
    """The timeline of one job directory. `submitted` is used where Slurm has not told when that was; `allocations` are
    the moments at which its group got nodes, if it is a task of one. `queued_until`: if it was interrupted, it waits
    in the queue since, and did so at that moment."""
    events, skipped = read_events(part.events)
    status = read_status(part.status)
    lives = list(_lives(events))
    begins = [life[0]["time"] for life in lives]
    attempts: list[Attempt] = []
    for index, life in enumerate(lives):
        following = begins[index + 1] if index + 1 < len(lives) else None
        since = attempts[-1].ended if attempts else _submission(life, submitted)
        allocated = max((moment for moment in allocations if moment <= begins[index]), default=None)
        one = _attempt(index, life, since, allocated, following, part.now, nodes_of(status))
        attempts.append(one._replace(restart=sum(before.number == one.number for before in attempts)))
    if attempts and queued_until is not None and attempts[-1].was_interrupted:
        attempts.append(_queued_again(attempts[-1], queued_until))
    ranks = [stay.rank for attempt in attempts for stay in attempt.stays]
    driver = status.get("driver")
    return Timeline(
        name=part.name,
        task=str(status.get("task_name") or part.name),
        job=str(status.get("slurm_job_id") or ""),
        num_nodes=nodes_of(status) or max(ranks, default=0) + 1,
        attempts=attempts,
        skipped=skipped,
        clock=str(driver.get("host") or "") if isinstance(driver, dict) else "",
    )


def nodes_of(status: Mapping[str, Any]) -> int:
    """How many nodes a record tells of; 0 where it does not."""
    told = _whole(status.get("num_nodes")) or 0
    return told if told <= MOST_NODES else 0


def _queued_again(before: Attempt, now: float) -> Attempt:
    """The attempt that is to follow, as long as it waits for its nodes."""
    now = max(now, before.ended)
    spans = _in_order([Span(QUEUED, before.ended, now)], before.ended, now)
    return Attempt(
        number=before.number + 1, life=before.life + 1, submitted=before.ended, allocated=now, granted=now, begun=now,
        ended=now, state=protocol.PENDING, exit_code=None, reason="", has_ended=False, was_lost=False,
        stays=[Stay(stay.rank, "", spans) for stay in before.stays],
    )  # fmt: skip


def _submission(life: Sequence[Event], otherwise: float | None) -> float | None:
    told = _time((_last(life, protocol.EVENT_QUEUED) or {}).get("submitted"))
    return otherwise if told is None else told


def _lives(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events of each driver's life. One begins when its driver enters PENDING, and ends with a code."""
    life: list[Event] = []
    for event in events:
        if _is_begin(event) and life:
            yield life
            life = []
        life.append(event)
    if life:
        yield life


def _is_begin(event: Event) -> bool:
    is_pending = event["event"] == protocol.EVENT_STATE and event.get("state") == protocol.PENDING
    return is_pending and "exit_code" not in event


def _attempt(
    index: int,
    life: Sequence[Event],
    since: float | None,
    allocated: float | None,
    following: float | None,
    now: float,
    num_nodes: int,
) -> Attempt:
    begun = life[0]["time"]
    end = next((event for event in reversed(life) if _is_end(event)), None)
    lost = _last(life, protocol.EVENT_DRIVER_LOST)
    newest = max(event["time"] for event in life if event["event"] != protocol.EVENT_DRIVER_LOST)
    if end is not None:
        ended = end["time"]
    elif following is not None:
        ended = min(following, max(newest, _time((lost or {}).get("seen")) or newest))
    else:
        ended = max(newest, now)
    queued = _last(life, protocol.EVENT_QUEUED) or {}
    granted = _between(_time(queued.get("granted")), since, begun)
    is_open = end is None and following is None
    frame = _Frame(
        _between(since, None, granted), _between(allocated, since, granted), granted, begun, max(begun, ended), life
    )
    states = [event for event in life if event["event"] == protocol.EVENT_STATE]
    return Attempt(
        number=life[0]["attempt"], life=index, submitted=frame.submitted, allocated=frame.allocated, granted=granted,
        begun=begun, ended=frame.ended, state=str(states[-1].get("state") if states else protocol.PENDING),
        exit_code=_code(end), reason=_text((end or {}).get("reason")), has_ended=end is not None,
        was_lost=end is None and not is_open, stays=_stays(frame, num_nodes),
    )  # fmt: skip


def _is_end(event: Event) -> bool:
    return event["event"] == protocol.EVENT_STATE and (
        "exit_code" in event or event.get("state") in protocol.TERMINAL_STATES
    )


def _last(life: Sequence[Event], name: str) -> Event | None:
    return next((event for event in reversed(life) if event["event"] == name), None)


def _between(value: float | None, least: float | None, most: float) -> float:
    """The value, not before `least` and not after `most`; `most` where there is none."""
    if value is None:
        return most
    return min(most, value if least is None else max(least, value))


def _code(event: Event | None) -> int | None:
    return _whole((event or {}).get("exit_code"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Frame(NamedTuple):
    """The moments of an attempt that hold for all its ranks."""

    submitted: float
    allocated: float
    granted: float
    begun: float
    ended: float
    life: Sequence[Event]

    def entered(self, state: str) -> float | None:
        found = [event["time"] for event in self.life if _is_state(event, state)]
        return found[0] if found else None

    def step(self, event: str, step: str) -> float | None:
        found = [one["time"] for one in self.life if one["event"] == event and one.get("step") == step]
        return found[-1] if found else None


def _is_state(event: Event, state: str) -> bool:
    return event["event"] == protocol.EVENT_STATE and event.get("state") == state


def _stays(frame: _Frame, num_nodes: int) -> list[Stay]:
    told: dict[int, dict[str, dict[str, Any]]] = {}
    for event in frame.life:
        if event["event"].startswith("rank_"):
            steps = told.setdefault(event["rank"], {})
            steps.setdefault(str(event.get("step") or protocol.STEP_RUN), {}).update(event)
    limits = _limits(frame)
    ranks = sorted({*told, *range(num_nodes)})
    return [_stay(rank, told.get(rank, {}), frame, limits) for rank in ranks]


def _limits(frame: _Frame) -> dict[str, tuple[float, float]]:
    """Between which moments, on the driver's clock, a rank can have begun and ended each step. What the driver did not
    live to see has no end."""
    running = frame.entered(protocol.RUNNING)
    setup = frame.step(protocol.EVENT_STEP_STARTED, protocol.STEP_SETUP) or frame.begun
    has_end = any(_is_end(event) for event in frame.life)
    ended = frame.ended if has_end else math.inf
    setup_end = frame.step(protocol.EVENT_STEP_ENDED, protocol.STEP_SETUP) or running or ended
    run_end = frame.step(protocol.EVENT_STEP_ENDED, protocol.STEP_RUN) or ended
    has_setup = frame.entered(protocol.SETTING_UP) is not None
    run = running if has_setup and running is not None else frame.begun
    return {protocol.STEP_SETUP: (setup, setup_end), protocol.STEP_RUN: (run, run_end)}


def _stay(
    rank: int,
    told: Mapping[str, Event],
    frame: _Frame,
    limits: Mapping[str, tuple[float, float]],
) -> Stay:
    clock_s = _clock_error(told, limits)
    windows = {step: (begin, min(end, frame.ended)) for step, (begin, end) in limits.items()}
    setup = _script(told.get(protocol.STEP_SETUP), windows[protocol.STEP_SETUP], clock_s, SETUP)
    run = _script(told.get(protocol.STEP_RUN), windows[protocol.STEP_RUN], clock_s, RUN)
    last = told.get(protocol.STEP_RUN) or told.get(protocol.STEP_SETUP) or {}
    spans = [Span(QUEUED, frame.submitted, frame.allocated)]
    at = frame.allocated
    for script in filter(None, (setup, run)):
        spans += [Span(WAITING, at, script.begin), script]
        at = max(at, script.end)
    spans += _after(run or setup, last, at, windows[protocol.STEP_RUN][1], frame.ended)
    return Stay(
        rank=rank,
        host=_text(last.get("host")) or _text(last.get("node")),
        spans=_in_order(spans, frame.submitted, frame.ended),
        state=_text(last.get("state")),
        exit_code=_code(last),
        log=_text(last.get("log")) or None,
        setup=setup,
        run=run,
        clock_s=clock_s,
        why=_text(last.get("why")),
    )


def _after(script: Span | None, last: Event, at: float, gang_end: float, ended: float) -> Iterable[Span]:
    """What a rank did after its last script: it waited for the others, or nobody knows."""
    if script is None or script.phase == SETUP:
        return [Span(WAITING, at, ended)]
    if last.get("state") == protocol.RANK_DONE:
        return [Span(BARRIER, at, gang_end)]
    if last.get("state") == protocol.RANK_LOST:
        return [Span(LOST, at, ended)]
    return []


def _script(told: Event | None, limits: tuple[float, float], clock_s: float, phase: str) -> Span | None:
    """The time of a script. One that left no word ran until its rank was heard of last."""
    begin = _time((told or {}).get("started"))
    if told is None or begin is None:
        return None
    least, most = limits
    end = _time(told.get("ended"))
    if end is None:
        heard = _time(told.get("heard"))
        last = most if heard is None else min(heard, most)
    else:
        last = end + clock_s
    begin = min(max(begin + clock_s, least), most)
    return Span(phase, begin, max(begin, min(last, most)))


def _clock_error(told: Mapping[str, Event], limits: Mapping[str, tuple[float, float]]) -> float:
    """The least that must be added to a rank's times so that they fit between what the driver saw; 0 if they do."""
    least, most = -math.inf, math.inf
    for step, event in told.items():
        begin, end = limits.get(step, (-math.inf, math.inf))
        times = [time for time in (_time(event.get("started")), _time(event.get("ended"))) if time is not None]
        least = max([least, *(begin - time for time in times)])
        most = min([most, *(end - time for time in times)])
    error = max(least, 0.0) if least > 0 else min(most, 0.0)
    return error if CLOCK_TOLERANCE_S < abs(error) < LONGEST_CLOCK_ERROR_S else 0.0


def _in_order(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """One after the other, within the attempt, and none that is empty or negative."""
    kept: list[Span] = []
    at = begin
    for span in spans:
        first, last = max(span.begin, at), min(span.end, end)
        if last > first:
            kept.append(Span(span.phase, first, last))
            at = last
    return kept
