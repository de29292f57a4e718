"""Why a job waits, in its owner's terms, from what Slurm says now; `ended` has why one ended. Pure.

`COMMANDS` is what is to be run on the login node. What did not answer is named as unknown, and nothing is concluded
from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from gangrun.explain import reasons
from gangrun.explain.ended import why_ended
from gangrun.explain.nodes import Job, moment, number, parse_jobs, parse_nodes, parse_partitions, parse_reservations
from gangrun.explain.phrases import clock, counted, some, when_words
from gangrun.explain.reasons import Explanation, Reason, one_line
from gangrun.explain.room import View, Waiting, lacking, not_allowed, own_problems, turn

__all__ = ["COMMANDS", "CommandResult", "Explanation", "commands", "why_ended", "why_waiting"]

# `-a` shows hidden partitions and their nodes, `-d` the GPUs in use where accounting does not count them.
COMMANDS: Mapping[str, Sequence[str]] = {
    "now": ("date", "+%Y-%m-%dT%H:%M:%S"),
    "job": ("scontrol", "show", "job", "-o", "{job}"),
    "nodes": ("scontrol", "show", "node", "-a", "-d", "-o"),
    "partitions": ("scontrol", "show", "partition", "-a", "-o"),
    "reservations": ("scontrol", "show", "reservation", "-o"),
    "start": ("squeue", "-h", "--start", "-j", "{job}", "-o", "%i|%S"),
    "line": ("squeue", "-h", "-a", "-t", "PD", "-p", "{partition}", "-o", "%i|%Q|%u|%D|%S|%r"),
    "mine": ("squeue", "-h", "-a", "-t", "all", "-u", "{user}", "-o", "%i|%T|%D|%r"),
    "licenses": ("scontrol", "show", "licenses", "-o"),
    "limits": ("sacctmgr", "-n", "-P", "show", "assoc", "where", "user={user}",
               "format=Account,GrpTRES,GrpJobs,MaxTRES,MaxJobs,MaxWall"),
    "qos": ("sacctmgr", "-n", "-P", "show", "qos", "format=Name,GrpTRES,GrpJobs,MaxTRES,MaxTRESPU,MaxJobsPU,MaxWall"),
}  # fmt: skip
ASKED_OF = {  # what stays unknown without an answer; many sites have no licenses and no accounting
    "now": "the time there",
    "nodes": "what the nodes hold",
    "partitions": "what the partitions allow",
    "reservations": "whether reservations stand against it",
    "start": "when Slurm thinks that it starts",
    "line": "its place in the line",
    "mine": "how your other jobs are doing",
}
# https://slurm.schedmd.com/job_state_codes.html
WAITING_STATES = "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split()
FAILED_STATES = "BOOT_FAIL CANCELLED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT".split()
RUNNING_STATES = "RUNNING SIGNALING RESIZING UPDATE_DB".split()
NOT_WAITING = {
    **dict.fromkeys(RUNNING_STATES, "it runs"),
    "CONFIGURING": "it has its nodes; they are booting or being prepared",
    "POWER_UP_NODE": "it has its nodes; they are booting",
    "COMPLETING": "it is over; its nodes are being cleaned up",
    "STAGE_OUT": "it is over; its files are being copied out of the burst buffer",
    "SUSPENDED": "it has its nodes, and is suspended",
    "STOPPED": "it has its nodes, and is stopped",
}
DEPENDENCY = re.compile(r"(\w+)(?::([\d_*+\[\]-]+))?\((\w+)\)")
DEPENDENCIES = {
    "after": "to start",
    "afterok": "to end well",
    "afterany": "to end",
    "afternotok": "to fail",
    "aftercorr": "to end well, task by task",
    "singleton": "to end",
}


class CommandResult(NamedTuple):
    """What a command on the login node did; `rc` is None where it did not come to an end."""

    rc: int | None
    stdout: str
    stderr: str = ""


def commands(job: str, partition: str, user: str) -> dict[str, list[str]]:
    """COMMANDS for one job; `partition` may be a list with commas, as squeue prints it."""
    values = {"job": job, "partition": partition, "user": user}
    return {name: [word.format(**values) for word in argv] for name, argv in COMMANDS.items()}


def why_waiting(answers: Mapping[str, CommandResult]) -> Explanation:
    """Why the job waits, what that is concluded from, and what would make it start sooner."""
    jobs = parse_jobs(_said(answers, "job") or "")
    if not jobs:
        return Explanation("why the job waits is unknown: Slurm told nothing about it", (_failure(answers, "job"),))
    job = next((job for job in jobs if job.state in WAITING_STATES), jobs[0])
    if job.state not in WAITING_STATES:
        return _not_waiting(job)
    view = _view(job, answers)
    return _with_common(view, _explain(view))


# --- reading the answers


def _said(answers: Mapping[str, CommandResult], name: str) -> str | None:
    answer = answers.get(name)
    return answer.stdout if answer is not None and answer.rc == 0 else None


def _failure(answers: Mapping[str, CommandResult], name: str) -> str:
    answer, command = answers.get(name), " ".join(COMMANDS[name])
    if answer is None:
        return f"`{command}` was not run"
    words = one_line((answer.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    return f"`{command}` did not help: {words}"


def _view(job: Job, answers: Mapping[str, CommandResult]) -> View:
    said = {name: _said(answers, name) for name in COMMANDS}
    nodes = parse_nodes(said["nodes"] or "") or None
    partitions = parse_partitions(said["partitions"] or "") or None
    missing = [name for name in ASKED_OF if said[name] is None]
    missing += [name for name, found in (("nodes", nodes), ("partitions", partitions)) if not found and said[name]]
    return View(
        job=job,
        now=moment(said["now"] or ""),
        nodes=nodes,
        partitions=partitions,
        reservations=None if said["reservations"] is None else parse_reservations(said["reservations"], nodes or ()),
        start=_estimate(said["start"] or "", job),
        is_start_told=said["start"] is not None,
        line=None if said["line"] is None else _line(said["line"]),
        mine=None if said["mine"] is None else _mine(said["mine"]),
        licenses=said["licenses"] or "",
        limits=said["limits"] or "",
        qos=said["qos"] or "",
        unknown=tuple(f"unknown: {ASKED_OF[name]}; {_failure(answers, name)}" for name in missing),
    )


def _rows(text: str, columns: int) -> list[list[str]]:
    rows = (line.strip().split("|", columns - 1) for line in text.splitlines())
    return [row for row in rows if len(row) == columns]


def _estimate(text: str, job: Job) -> datetime | None:
    starts = [moment(row[1]) for row in _rows(text, 2) if number(row[0]) == number(job.id)]
    return min((start for start in starts if start), default=None)


def _line(text: str) -> list[Waiting]:
    found = [Waiting(number(row[0]), number(row[1]), row[2], row[3], moment(row[4]), row[5]) for row in _rows(text, 6)]
    return sorted(found, key=lambda one: (-one.priority, one.id))


def _mine(text: str) -> dict[int, tuple[str, str]]:
    """State and reason by job; of an array's tasks the one that is listed first."""
    found: dict[int, tuple[str, str]] = {}
    for name, state, _, reason in _rows(text, 4):
        found.setdefault(number(name), (state, reason))
    return found


# --- which explanation


def _not_waiting(job: Job) -> Explanation:
    words = NOT_WAITING.get(job.state, f"it has ended ({job.state})")
    told = (f"Slurm's reason: {job.reason}",) if job.reason else ()
    since = (f"it started at {clock(job.start)}",) if job.start and job.state in NOT_WAITING else ()
    return Explanation(f"job {job.id} does not wait: {words}", (*since, *told))


def _explain(view: View) -> Explanation:
    job = view.job
    reason = reasons.of(job.reason)
    if reason is None:
        found = turn(view)
        return found._replace(headline=f"Slurm says {job.reason!r}, which we cannot explain; {found.headline}")
    special = SPECIAL.get(reasons.normal(job.reason).split(",")[0])
    if special is not None:
        return special(view, reason)
    if reason.kind == reasons.TURN:
        return turn(view)
    return _plain(view, reason)


def _plain(view: View, reason: Reason) -> Explanation:
    verb = {reasons.HELD: "is held", reasons.NEVER: "will not start as it is"}.get(reason.kind, "waits")
    facts = _own_use(view) if reason.kind == reasons.LIMIT else []
    advice = (reason.advice.format(job=view.job.id),) if reason.advice else ()
    return Explanation(f"job {view.job.id} {verb}: {reason.words}", tuple(facts), advice)


def _own_use(view: View) -> list[str]:
    """What counts against a limit, as far as it is seen."""
    running = [job for job, (state, _) in (view.mine or {}).items() if state in RUNNING_STATES]
    facts = [f"you have {counted(len(running), 'running job')}: {some(map(str, running))}"] if running else []
    facts += [f"limits set for you in account {row}" for row in _limits(view.limits, "limits", view.job.account)]
    return facts + [f"limits of QOS {row}" for row in _limits(view.qos, "qos", view.job.qos)]


def _limits(text: str, command: str, name: str) -> list[str]:
    """`small: MaxTRES=gres/gpu=1, MaxJobsPU=1`, if it has any."""
    columns = COMMANDS[command][-1].partition("=")[2].split(",")
    own = [zip(columns[1:], row[1:]) for row in _rows(text, len(columns)) if row[0] == name]
    told = [", ".join(f"{column}={value}" for column, value in pairs if value) for pairs in own]
    return [f"{name}: {words}" for words in told if words]


def _with_common(view: View, found: Explanation) -> Explanation:
    """What is worth saying of every job that waits."""
    reason = reasons.of(view.job.reason)
    page = reason.page if reason else reasons.CODES_URL
    facts = [*found.facts, f"Slurm's reason: {view.job.reason or 'None'} ({page})", *_start_facts(view)]
    facts += view.unknown
    return Explanation(one_line(found.headline), tuple(map(one_line, facts)), tuple(map(one_line, found.advice)))


def _start_facts(view: View) -> list[str]:
    reason, facts = reasons.of(view.job.reason), []
    may_start = reason is None or reason.kind not in (reasons.HELD, reasons.NEVER)
    if view.start is not None and may_start and view.job.reason != "BeginTime":
        moves = "it moves as jobs end early or come before it"
        facts.append(f"Slurm's estimate of its start: {when_words(view.now, view.start)}; {moves}")
    elif reason is not None and reason.kind == reasons.TURN and view.is_start_told:
        facts.append("Slurm has no estimate of its start")
    if view.job.deadline is not None:
        facts.append(f"its deadline: {when_words(view.now, view.job.deadline)}")
    return facts


# --- reasons that need more than their words


def _begin_time(view: View, reason: Reason) -> Explanation:
    when = view.job.eligible or view.job.start
    headline = f"job {view.job.id} starts {when_words(view.now, when)} at the earliest" if when else reason.words
    if view.job.restarts:
        restarts = counted(view.job.restarts, "restart")
        return Explanation(headline, (f"it was requeued ({restarts}); Slurm lets a while pass before it runs again",))
    return Explanation(headline, (), (f"sooner: scontrol update jobid={view.job.id} starttime=now",))


def _dependency(view: View, reason: Reason) -> Explanation:
    parts = DEPENDENCY.findall(view.job.dependency)
    told = [_dependency_words(view, *part) for part in parts]
    never = reason.kind == reasons.NEVER or any(is_never for _, is_never in told)
    words = "; ".join(words for words, _ in told) or view.job.dependency or "which jobs is unknown"
    release = [job for _, job, _ in parts if (view.mine or {}).get(number(job), ("", ""))[1].startswith("JobHeld")]
    if never:
        headline = f"job {view.job.id} never starts: it waits for {words}"
        return Explanation(headline, (), (f"without the dependency: scontrol update jobid={view.job.id} dependency=",))
    return Explanation(f"job {view.job.id} waits for {words}", (), tuple(f"scontrol release {job}" for job in release))


def _dependency_words(view: View, kind: str, job: str, status: str) -> tuple[str, bool]:
    """`job 13 to end well (now PENDING, JobHeldUser)`, and whether that can no longer be."""
    wanted = DEPENDENCIES.get(kind, f"({kind})")
    if not job:
        return f"your other jobs of the same name {wanted}", False
    unseen = "its state is unknown" if view.mine is None else "no longer in the queue, or not yours"
    state, reason = (view.mine or {}).get(number(job), ("", ""))
    now = f"now {state}{f', {reason}' if reason not in ('', 'None') else ''}" if state else unseen
    has_failed = kind in ("afterok", "aftercorr") and state in FAILED_STATES
    return f"job {job} {wanted} ({now})", status == "failed" or has_failed


def _licenses(view: View, reason: Reason) -> Explanation:
    asked = view.job.licenses
    names = [part.split(":")[0].split("@")[0] for part in re.split(r"[,;|]", asked) if part]
    rows = re.findall(r"LicenseName=(\S+) Total=(\d+) Used=(\d+) Free=(\d+)", view.licenses)
    told = [
        f"license {name}: {free} of {total} free, {used} in use"
        for name, total, used, free in rows
        if name.split("@")[0] in names
    ]
    return Explanation(f"job {view.job.id} waits for licenses: it asks for {asked}", tuple(told))


def _array_limit(view: View, reason: Reason) -> Explanation:
    throttle = view.job.array_throttle
    words = f": at most {throttle} of its tasks may run at a time" if throttle else ""
    advice = reason.advice.format(job=view.job.id)
    return Explanation(f"array {view.job.id} waits for its own limit{words}", (), (advice,))


def _partition_says_no(view: View, reason: Reason) -> Explanation:
    problems = own_problems(view)
    if problems:
        return not_allowed(view, problems)
    return lacking(view) or _plain(view, reason)  # too few nodes in service have this reason, too


def _reservation(view: View, reason: Reason) -> Explanation:
    own = view.own_reservation
    if own is None or own.start is None or view.now is None or own.start <= view.now:
        return turn(view)
    headline = f"job {view.job.id} waits for its reservation {own.name}, which begins {when_words(view.now, own.start)}"
    return Explanation(headline, (), ("to run outside of it, leave --reservation out",))


SPECIAL: Mapping[str, Callable[[View, Reason], Explanation]] = {
    "BeginTime": _begin_time,
    "Dependency": _dependency,
    "DependencyNeverSatisfied": _dependency,
    "Licenses": _licenses,
    "JobArrayTaskLimit": _array_limit,
    "PartitionDown": _partition_says_no,
    "PartitionInactive": _partition_says_no,
    "PartitionNodeLimit": _partition_says_no,
    "PartitionTimeLimit": _partition_says_no,
    "PartitionConfig": _partition_says_no,
    "AccountNotAllowed": _partition_says_no,
    "Reservation": _reservation,
}
