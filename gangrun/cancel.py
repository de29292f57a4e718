"""Cancel: marked, asked for, escalated, and seen to be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from executor import protocol
from gangrun.records import Run

if TYPE_CHECKING:
    from gangrun.cluster import Job

SITE_KILL_WAIT_S = 30.0  # slurm.conf(5), KillWait, its default
MARGIN_S = 20.0
STUCK_S = 60.0
LOOK_S = 1.0


def cancel(
    jobs: Sequence[Job],
    grace_s: float | None,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Run]:
    """The runs after the cancel, all ended unless Slurm itself could not do it. What has ended before stays as it is.

    A job that needs longer than Slurm's KillWait to save its work gets TERM through its driver (`scancel --batch`); the
    others get scancel. Then, after the grace, scancel; and a KILL to everything.
    """
    open_jobs = [job for job in jobs if not job.status().is_final]
    steps = _steps(open_jobs, grace_s)
    for how, patience_s in steps:
        open_jobs = [job for job in open_jobs if not job.run.is_final]
        if not open_jobs:
            break
        _ask(open_jobs, how)
        _watch(open_jobs, patience_s, sleep, clock)
    for job in open_jobs:
        run = job.run
        if not run.is_final:
            say(f"{run.run}: Slurm has not ended job {run.job_name} ({run.detail or run.state}); a node may hang")
    return [job.run for job in jobs]


def _steps(jobs: Sequence[Job], grace_s: float | None) -> list[tuple[str, float]]:
    wished = max([_grace_s(job) if grace_s is None else grace_s for job in jobs], default=0.0)
    soft = [("soft", wished + MARGIN_S)] if wished > SITE_KILL_WAIT_S else []
    return [*soft, ("hard", max(wished, SITE_KILL_WAIT_S) + MARGIN_S), ("kill", STUCK_S)]


def _grace_s(job: Job) -> float:
    return float(job.run.meta.get("grace_s", protocol.DEFAULT_GRACE_S))


def _ask(jobs: Sequence[Job], how: str) -> None:
    by_place: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        job.cluster.records.change(job.run_id, cancel_asked=True)
        has_driver = job.run.state in (protocol.SETTING_UP, protocol.RUNNING)  # only scancel ends a job without one
        way = "hard" if how == "soft" and not has_driver else how
        by_place.setdefault((job.cluster.name, job.run.root, way), []).append(job)
    for (_, root, way), group in by_place.items():
        runs = [{"run": job.run_id, "job": job.run.job, "cluster": job.run.cluster} for job in group]
        group[0].cluster.host.call("cancel", root=root, runs=runs, how=way)


def _watch(jobs: Sequence[Job], patience_s: float, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    deadline, interval_s = clock() + patience_s, LOOK_S / 4
    while clock() < deadline and not all(job.status().is_final for job in jobs):
        sleep(interval_s)
        interval_s = min(interval_s * 2, 4 * LOOK_S)
