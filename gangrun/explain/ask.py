"""Asks a cluster what `explain` needs to know about one job."""

from __future__ import annotations

import os
from typing import Any

from executor import protocol
from gangrun import states
from gangrun.cluster import Job
from gangrun.explain import waiting
from gangrun.explain.ended import why_ended
from gangrun.explain.reasons import Explanation
from gangrun.records import Run
from gangrun.show import one_line

TAIL_LINES = 30
TAIL_BYTES = 1 << 16
ACCOUNT_FIELDS = (
    "JobID",
    "JobName",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "Reason",
    "Elapsed",
    "Timelimit",
    "NodeList",
)
LOOK_TIMEOUT_S = 60.0
FAILED_STATES = (protocol.FAILED, protocol.FAILED_SETUP, protocol.FAILED_DRIVER)


def explain_job(job: Job, run: Run) -> Explanation:
    """Why it waits, how it runs, or why it ended."""
    if run.is_final:
        return _ended(job, run)
    if run.state != protocol.PENDING or run.job is None:
        return Explanation(f"it is {run.state}", tuple(filter(None, (run.progress, run.reason, *_of_tasks(run)))))
    return _waiting(job, run)


def _of_tasks(run: Run) -> list[str]:
    """What tasks of a running group wait for, and why others are not at work any more."""
    how = {protocol.PENDING: "{name} {reason}", **dict.fromkeys(FAILED_STATES, "{name} is {state}: {reason}")}
    told = [task for task in run.tasks if task["state"] in how and task.get("reason")]
    return ["task " + how[task["state"]].format(**{**task, "reason": one_line(task["reason"])}) for task in told]


def _waiting(job: Job, run: Run) -> Explanation:
    where = ["--clusters=" + run.cluster] if run.cluster else []
    asked = {"whose": ["squeue", *where, "--noheader", "--jobs=" + str(run.job), "--format=%P|%u"]}
    line = (_commands(job, asked)["whose"].stdout.strip().splitlines() or ["|"])[-1]
    partition, _, user = line.partition("|")
    return waiting.why_waiting(_commands(job, waiting.commands(str(run.job), partition, user)))


def _commands(job: Job, commands: dict[str, list[str]]) -> dict[str, waiting.CommandResult]:
    answers = job.cluster.host.call("commands", commands=commands, limit_s=LOOK_TIMEOUT_S / 4, timeout_s=LOOK_TIMEOUT_S)
    return {name: waiting.CommandResult(one["rc"], one["stdout"], one["stderr"]) for name, one in answers.items()}


def _ended(job: Job, run: Run) -> Explanation:
    found = job.cluster.host.call("describe", root=run.root, run=run.run)
    record = states.mapping_of(found["record"]) or None
    found = why_ended(record, _account(job, run), _tails(job, run, record or {}))
    is_told = record is not None and record.get("state") in protocol.TERMINAL_STATES
    return found if is_told else found._replace(facts=tuple(filter(None, (run.reason, *found.facts))))


def _account(job: Job, run: Run) -> list[dict[str, str]]:
    if run.job is None:
        return []
    fields = ",".join(ACCOUNT_FIELDS)
    days = 2 + int((run.ended or run.submitted) - run.submitted) // 86400
    asked = {"sacct": ["sacct", "-n", "-P", "-D", f"--starttime=now-{days}days", "--jobs=" + run.job, "-o", fields]}
    rows = [line.split("|") for line in _commands(job, asked)["sacct"].stdout.splitlines()]
    named = [dict(zip(ACCOUNT_FIELDS, row)) for row in rows if len(row) == len(ACCOUNT_FIELDS)]
    return [row for row in named if "." in row["JobID"] or row["JobName"] == run.run]


def _tails(job: Job, run: Run, record: dict[str, Any]) -> dict[int, str]:
    """The end of the log of the rank that failed first; of a group, of the task that did."""
    first = (record.get("first_failure") or {}).get("rank", 0)
    names = job.cluster.host.call("list_logs", root=run.root, run=run.run)["logs"]
    own = next((name for name in names if _is_wanted(name, first, record)), None)
    return {first: b"".join(job.logs(own, lines=TAIL_LINES)).decode("utf-8", "replace")} if own else {}


def _is_wanted(name: str, rank: int, record: dict[str, Any]) -> bool:
    if record.get("tasks"):
        return name == protocol.task_output(_failed_task(record))
    is_setup = record.get("state") == protocol.FAILED_SETUP
    wanted = f"setup-{protocol.node_name(rank)}." if is_setup else f"{rank}-"
    return os.path.basename(name).startswith((wanted, protocol.SINGLE_LOG_NAME))


def _failed_task(record: dict[str, Any]) -> str:
    """The primary that failed first, by time."""
    failed = [task for task in record["tasks"] if task["is_primary"] and task["state"] in FAILED_STATES]
    return str(min(failed, key=lambda task: task["ended"] or 0)["name"]) if failed else ""
