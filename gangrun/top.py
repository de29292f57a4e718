"""What `top` sees: runs, ranks, and how long each has been silent. Pure, but for `Watcher`, which asks the host.

Ages are differences of times on the cluster's clock; this machine's has no part in them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from executor import protocol
from gangrun import show, states
from gangrun.cluster import Cluster
from gangrun.records import Run

LOOK_FIRST_S = 2.0
LOOK_LONGEST_S = 30.0
LOOK_GROWTH = 1.3
WORK_SHARE = 10  # a look that took a second is not made again for ten
SILENT_S = 60.0  # a rank that says nothing for this long is told
BAD_STATES = (protocol.RANK_FAILED, protocol.RANK_BROKEN, protocol.RANK_LOST)
AT_WORK = (protocol.RANK_RUNNING, protocol.RANK_STOPPING)
# Sequences that terminals obey: CSI, OSC and its kin to their end, and two-character ones (ECMA-48).
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]")


class Log(NamedTuple):
    """The end of a log; `changed` is when it grew last, in seconds since 1970 on the cluster's clock."""

    bytes: int
    changed: float
    line: str


class Part(NamedTuple):
    """A task of a group, or all of a single task (its name is empty): its record, its ranks' and their logs."""

    task: str
    record: states.Record | None
    ranks: Mapping[str, Mapping[int, Mapping[str, Any]]]
    logs: Mapping[str, Log]  # of many, the newest
    bytes: int  # of all logs


class Look(NamedTuple):
    """What the host said at one moment `now` of its own."""

    now: float
    runs: Mapping[str, Sequence[Part]]

    def parts(self, run: str, task: str | None = None) -> list[Part]:
        """Those of one task, or all."""
        return [part for part in self.runs.get(run, ()) if task in (None, part.task)]


class Voice(NamedTuple):
    """How much is said, and when it was last. `rate` is in bytes per second."""

    bytes: int = 0
    silent_s: float | None = None
    rate: float | None = None
    line: str = ""


class Rank(NamedTuple):
    """One rank's row."""

    task: str
    rank: int
    node: str
    phase: str
    state: str
    exit_code: int | None
    voice: Voice

    @property
    def is_at_work(self) -> bool:
        return self.state in AT_WORK

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in self._asdict().items() if name != "voice"}
        return {**own, **self.voice._asdict()}


def request(runs: Sequence[Run], every: bool) -> dict[str, Any]:
    """What the host is asked besides its queue; `every`: rank by rank."""
    launch, steps = protocol.Launch(""), (protocol.STEP_RUN, protocol.STEP_SETUP)
    names = {step: os.path.basename(launch.records(step == protocol.STEP_SETUP)) for step in steps}
    jobs = {run.run: run.job for run in runs}
    return {"runs": jobs, "every": every, "attempt": protocol.attempt_name(""), "steps": names}


def parse(answer: Mapping[str, Any]) -> Look:
    """The host's answer."""
    runs = json.loads(zlib.decompress(base64.b64decode(answer["runs"])))
    return Look(float(answer["now"]), {run: [_part(*item) for item in parts.items()] for run, parts in runs.items()})


def _part(task: str, found: Mapping[str, Any]) -> Part:
    ranks = {
        step: {int(rank): states.mapping_of(text) for rank, text in records.items()}
        for step, records in found.get("ranks", {}).items()
    }
    logs = {name: Log(end["bytes"], end["changed"], plain(end["line"])) for name, end in found["logs"].items()}
    return Part(task, states.parse_record(found.get("status")), ranks, logs, found["bytes"])


def plain(text: str) -> str:
    """A line as it can be shown: nothing in it moves the cursor, colours, or turns the writing's direction."""
    shown = "".join(sign if sign.isprintable() else " " for sign in ESCAPES.sub("", text))
    return " ".join(shown.split())


# --- one job's ranks


def ranks(look: Look, before: Look | None, run: Run) -> list[Rank]:
    """Every rank, the worst first: failed, then at work by the time of their silence, waiting, done."""
    is_group = bool(run.meta.get("tasks"))
    parts = [part for part in look.parts(run.run) if bool(part.task) == is_group]
    found = [rank for part in parts for rank in _ranks(part, look, before, run)]
    return sorted(found, key=_badness)


def _badness(rank: Rank) -> tuple[int, float, str, int]:
    is_waiting = rank.state == protocol.RANK_WAITING
    kind = 0 if rank.state in BAD_STATES else 1 if rank.is_at_work else 2 if is_waiting else 3
    return kind, -(rank.voice.silent_s or 0.0), rank.task, rank.rank


def _ranks(part: Part, look: Look, before: Look | None, run: Run) -> list[Rank]:
    record = part.record
    if record is None or protocol.PENDING in (record.state, run.state):  # a requeued job's is of the attempt before
        return []
    is_setup = record.state in (protocol.SETTING_UP, protocol.FAILED_SETUP)
    is_over = record.is_terminal or run.is_final
    step = protocol.STEP_SETUP if is_setup else protocol.STEP_RUN
    told = _told(part, record, step)
    phase = "" if is_over else step
    found = []
    for number in range(record.num_nodes or len(told)):
        own = told.get(number, {})
        log = _log_name(part, number, own, record.num_nodes or 1, is_setup)
        voice = _voice(log, part, look, before, run, own.get("started"))
        code = own.get("exit_code") if record.is_terminal else own.get("code")
        node = plain(str(own.get("host") or own.get("node") or ""))
        found.append(Rank(part.task, number, node, phase, _state(own, is_over), code, voice))
    return found


def _state(own: Mapping[str, Any], is_over: bool) -> str:
    state = str(own.get("state") or protocol.RANK_WAITING)
    return protocol.RANK_LOST if is_over and state not in protocol.RANK_ENDED_STATES else state


def _told(part: Part, record: states.Record, step: str) -> Mapping[int, Mapping[str, Any]]:
    """What ranks have recorded; when all is over, what the driver made of it."""
    if record.is_terminal:
        return {rank["rank"]: rank for rank in record.ranks if isinstance(rank.get("rank"), int)}
    return part.ranks.get(step, {})


def _log_name(part: Part, rank: int, own: Mapping[str, Any], num_nodes: int, is_setup: bool) -> str:
    index = own.get("node_index")
    name = str(own.get("log") or protocol.log_name(rank, rank if index is None else int(index), num_nodes, is_setup))
    others = (log for log in part.logs if log.startswith(f"{rank}-") and not is_setup)
    return name if name in part.logs else next(others, name)


def _voice(name: str, part: Part, look: Look, before: Look | None, run: Run, started: Any) -> Voice:
    log = part.logs.get(name)
    since = float(started) if isinstance(started, (int, float)) else None
    if log is None:
        return Voice(silent_s=None if since is None else max(0.0, look.now - since))
    earlier = next((old.logs.get(name) for old in before.parts(run.run, part.task)), None) if before else None
    first = None if _began(run, part.task) is None else since
    rate = _rate(log.bytes, earlier and earlier.bytes, look, before, first)
    return Voice(log.bytes, max(0.0, look.now - log.changed), rate, log.line)


def _rate(size: int, earlier: int | None, look: Look, before: Look | None, since: float | None) -> float | None:
    """Since the last look; at the first one `since` it began. None where that says nothing."""
    begun, small = (since, 0) if before is None or earlier is None else (before.now, earlier)
    if begun is None or look.now <= begun or size < small:
        return None
    return (size - small) / (look.now - begun)


def _began(run: Run, task: str) -> float | None:
    """When what is in its logs began; None where they tell of more than one attempt, or all is over."""
    own = next((one for one in run.tasks if one["name"] == task), {})
    if run.is_final or run.attempt or own.get("restarts"):
        return None
    return own.get("started") or run.started


def silence(found: Sequence[Rank]) -> str:
    """The first sign of a hang, in a sentence; nothing while all talk."""
    ages = {rank: rank.voice.silent_s for rank in found if rank.is_at_work and rank.voice.silent_s is not None}
    silent = [rank for rank, age in ages.items() if age >= SILENT_S]
    if not silent:
        return ""
    worst = max(silent, key=lambda rank: ages[rank])
    who = f"{worst.task + ': ' if worst.task else ''}rank {worst.rank} on {worst.node}"
    others = [age for age in ages.values() if age < SILENT_S]
    spoken = f"; the other {len(others)} spoke within {show.age(max(1.0, *others))}" if others else ""
    if len(silent) == 1:
        return f"{who} has been silent for {show.age(ages[worst])}{spoken}"
    if not others:
        return f"all {len(silent)} ranks at work have been silent for {show.age(min(ages.values()))} or longer"
    longest = f"{who} for {show.age(ages[worst])}"
    return f"{len(silent)} ranks have been silent for {show.age(SILENT_S)} or longer, {longest}{spoken}"


def rest(found: Sequence[Rank]) -> str:
    """The ranks that are not shown, in a line."""
    counts = Counter(rank.state for rank in found)
    ages = [rank.voice.silent_s for rank in found if rank.is_at_work and rank.voice.silent_s is not None]
    spoken = [f"silent for at most {show.age(max(ages))}"] if ages else []
    parts = [f"{count} {state}" for state, count in counts.most_common()] + spoken
    return f"and {len(found)} more: " + ", ".join(parts)


# --- a host's jobs


def voice_of(look: Look, before: Look | None, run: Run, task: str | None = None) -> Voice:
    """Of a whole run, or of one task of a group: the newest word, and all that is said."""
    parts = look.parts(run.run, task)
    logs = [log for part in parts for log in part.logs.values()]
    if not logs:
        return Voice()
    newest, size = max(logs, key=lambda log: log.changed), sum(part.bytes for part in parts)
    earlier = [part.bytes for part in before.parts(run.run, task)] if before else []
    rate = _rate(size, sum(earlier) if earlier else None, look, before, _began(run, task or ""))
    return Voice(size, max(0.0, look.now - newest.changed), rate, newest.line)


def to_json(look: Look | None, host: str, runs: Sequence[Run], every: bool) -> dict[str, Any]:
    """All of it, for programs."""
    found = []
    for run in runs:
        voice = voice_of(look, None, run) if look else Voice()
        own = {"ranks": [rank.to_json() for rank in ranks(look, None, run)]} if every and look else {}
        found.append({**run.to_json(), **voice._asdict(), **own})
    return {"host": host, "now": look and look.now, "runs": found}


# --- asking


class Watcher:
    """Asks the host about its jobs, or about one job's ranks: a call a look, and none too soon."""

    def __init__(self, cluster: Cluster, run_id: str | None) -> None:
        self.cluster = cluster
        self.run_id = run_id
        self.before: Look | None = None
        self.look: Look | None = None
        self._interval_s = LOOK_FIRST_S
        self._seen: object = None

    @property
    def runs(self) -> list[Run]:
        """As last seen: those in flight, or the one."""
        if self.run_id is None:
            return self.cluster.records.in_flight(self.cluster.name)
        found = self.cluster.records.get(self.run_id)
        return [found] if found else []

    def ask(self) -> bool:
        """One look; False if the host was asked a moment ago by somebody else. Raises RemoteError."""
        runs = self.runs
        asked = request(runs, every=self.run_id is not None)
        if self.run_id is not None and runs and runs[0].is_final:
            answers = [self.cluster.host.call("watch", root=runs[0].root, **asked)]
        else:
            answers = self.cluster.refresh(watch=asked)
        looks = [parse(answer) for answer in answers if answer]
        if looks:
            merged = {run: parts for look in looks for run, parts in look.runs.items() if parts}
            self.before, self.look = self.look, Look(max(look.now for look in looks), merged)
        return bool(answers) or not runs

    def pause_s(self, took_s: float) -> float:
        """How long until the next look: longer and longer while nothing changes, and after looks that took long."""
        seen = [(run.run, run.state, run.progress) for run in self.runs], self._sizes()
        self._interval_s = min(self._interval_s * LOOK_GROWTH, LOOK_LONGEST_S) if seen == self._seen else LOOK_FIRST_S
        self._seen = seen
        return max(self._interval_s, self.cluster.least_interval_s, WORK_SHARE * took_s)

    def _sizes(self) -> list[int]:
        runs = self.look.runs if self.look else {}
        return [log.bytes for parts in runs.values() for part in parts for log in part.logs.values()]
