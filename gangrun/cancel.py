"""Cancel: marked, asked for, escalated, and seen to be done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codegen.spec import SpecError
from executor import protocol
from gangrun.cluster import Job, task_names
from gangrun.records import Run

SITE_KILL_WAIT_S = 30.0  # slurm.conf(5), KillWait, its default
MARGIN_S = 20.0
STUCK_S = 60.0
TASK_PATIENCE_S = 120.0
LOOK_S = 1.0
ASK_AGAIN_S = (2.0, 4.0, 8.0, 16.0, 30.0)


def cancel(
    jobs: Sequence[Job],
    grace_s: float | None,
    say: Callable[[str], None],
    on_end: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """The runs after the cancel, all ended unless Slurm itself could not do it. What has ended before stays as it is.

    The driver is told, or Slurm, whoever leaves the programs their grace (agent.op_cancel). A `grace_s` shorter than
    the task's ends with a KILL to the programs. What is left then gets scancel, and a KILL to everything. `on_end` is
    told of each run as it ends.
    """
    tell = _Teller(on_end)
    open_jobs = tell.of(jobs)
    steps = _steps(open_jobs, grace_s)
    for how, patience_s in steps:
        if not open_jobs:
            break
        _ask(open_jobs, how, grace_s, say)
        open_jobs = _watch(open_jobs, patience_s, tell)
    for job in open_jobs:
        run = job.run
        if not run.is_final:
            how_it_is = run.detail or run.state
            say(f"{run.run}: {job.cluster.scheduler} has not ended job {run.job_name} ({how_it_is}); a node may hang")
    return [job.run for job in jobs]


def _steps(jobs: Sequence[Job], grace_s: float | None) -> list[tuple[str, float]]:
    own_s = max(map(_grace_s, jobs), default=0.0)
    soft = [("soft", own_s + MARGIN_S)]
    if grace_s is not None and grace_s < own_s:
        soft = [("soft", grace_s), ("force", MARGIN_S)]
    return [*soft, ("hard", SITE_KILL_WAIT_S + MARGIN_S), ("kill", STUCK_S)]


def _grace_s(job: Job) -> float:
    return float(job.run.meta.get("grace_s", protocol.DEFAULT_GRACE_S))


def _ask(jobs: Sequence[Job], how: str, grace_s: float | None, say: Callable[[str], None]) -> None:
    """Until Slurm has heard it: a controller that is away for a while is not worth a KILL."""
    for again_s in (*ASK_AGAIN_S, None):
        refusals = _refusals(jobs, how, grace_s)
        jobs = [job for job in jobs if job.run_id in refusals and not job.status().is_final]
        if not jobs or again_s is None:
            return
        say(f"{jobs[0].run_id}: {jobs[0].cluster.scheduler} says {refusals[jobs[0].run_id]}; asking again")
        time.sleep(again_s)


def _refusals(jobs: Sequence[Job], how: str, grace_s: float | None) -> dict[str, str]:
    """What scancel said of the runs that it did not take, by run."""
    by_place: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        job.cluster.records.change(job.run_id, cancel_asked=True)
        by_place.setdefault((job.cluster.name, job.run.root), []).append(job)
    found: dict[str, str] = {}
    for (_, root), group in by_place.items():
        runs = [_request(job, grace_s) for job in group]
        answers = group[0].cluster.host.call("cancel", root=root, runs=runs, how=how)["answers"]
        found.update({run: answer["stderr"].strip() for run, answer in answers.items() if answer["rc"]})
    return found


def _request(job: Job, grace_s: float | None) -> dict[str, Any]:
    run, own_s = job.run, _grace_s(job)
    return {
        "run": run.run, "job": run.job, "cluster": run.cluster,
        "has_driver": run.state in (protocol.SETTING_UP, protocol.RUNNING),
        "grace_s": None if grace_s is not None and grace_s < own_s else own_s,
    }  # fmt: skip


class _Teller:
    """Tells of each run's end once."""

    def __init__(self, on_end: Callable[[Run], None]) -> None:
        self._on_end = on_end
        self._told: set[str] = set()

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that go on."""
        for job in jobs:
            run = job.status()
            if run.is_final and run.run not in self._told:
                self._told.add(run.run)
                self._on_end(run)
        return [job for job in jobs if job.run_id not in self._told]


def _watch(jobs: list[Job], patience_s: float, tell: _Teller) -> list[Job]:
    """Those that have not ended in time."""
    deadline, interval_s = time.monotonic() + patience_s, LOOK_S / 4
    jobs = tell.of(jobs)
    while jobs and time.monotonic() < deadline:
        time.sleep(interval_s)
        interval_s = min(interval_s * 2, 4 * LOOK_S)
        jobs = tell.of(jobs)
    return jobs


def cancel_task(job: Job, word: str) -> Mapping[str, Any]:
    """End one task that joined a group while it ran; returns how it stands. Raises SpecError for any other."""
    run = job.status()
    tasks = {str(task["name"]): task for task in run.tasks}
    name = next((name for index, name in enumerate(task_names(run)) if word in (name, str(index))), word)
    if name not in task_names(run):
        has = ", ".join(task_names(run)) or "none"
        raise SpecError(f"--task={word!r}: no such task in {run.run}; its tasks are {has}")
    if name not in tasks or not tasks[name]["is_dynamic"]:
        joined = ", ".join(one for one, task in tasks.items() if task["is_dynamic"]) or "none"
        raise SpecError(
            f"--task={word!r}: only tasks that joined later end alone ({joined}); the others with {run.run}"
        )
    if run.is_final or tasks[name]["state"] in protocol.TERMINAL_STATES:
        return tasks[name]
    job.cluster.host.call("ask", root=run.root, run=run.run, line=json.dumps({"cancel": name}))
    for _ in range(round(TASK_PATIENCE_S / LOOK_S)):
        found = next((task for task in job.status().tasks if task["name"] == name), tasks[name])
        if found["state"] in protocol.TERMINAL_STATES or job.run.is_final:
            break
        time.sleep(LOOK_S)
    return found
