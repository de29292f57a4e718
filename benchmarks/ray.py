"""ray: a step of Slurm's beside a task of Ray's, a gang of nodes, a pool that takes turns; and Ray inside a Slurm job.

Ray's tasks run on a cluster that is up already, as Slurm's steps do; one cluster after the other.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import elastic
from benchmarks.bed import Bed, Step, booted, missing
from benchmarks.drivers import render_ours, run_drivers
from benchmarks.measure import interleaved, median
from benchmarks.place import STAMP, Session
from benchmarks.report import Limit
from codegen import Ray, Resources
from tests.miniray import bed as miniray

NODES = 4
GANGRUN, DATE = "gangrun step", "srun date"
WARM, NEW = "Ray task, idle process", "Ray task with a GPU, new process"
CHECKOUT = str(Path(__file__).resolve().parent.parent)
STORE = "--object-store-memory=%d" % miniray.STORE_BYTES
SYMMETRIC = "ray symmetric-run"
INSIDE_NODES = 2
PORT = 6379
RAY_TIMEOUT_S = 300.0
INSIDE = Limit(1)
TURNS = Limit(elastic.LEAST * 1.25)


def run(session: Session) -> None:
    reason = missing() or miniray.missing()
    if reason:
        session.report.skip("ray", reason)
        return
    one, gang = _steps(session, 1), _steps(session, NODES)
    inside = _inside(session)
    turns = elastic.turns_units(session)
    ray = _ray(session)
    _print_starts(session, "one node", one, ray["task, warm"], ray["task, new"])
    _print_starts(session, "a gang of %d nodes" % NODES, gang, ray["gang, warm"], ray["gang, new"])
    _print_turns(session, turns, ray["turns, new"], ray["turns, kept"])
    _print_inside(session, inside)


def _steps(session: Session, nodes: int) -> dict[str, list[Step]]:
    with booted(session.place, nodes) as bed, bed.allocation() as job:
        candidates = {GANGRUN: lambda: bed.step(job, bed.ours()), DATE: lambda: bed.step(job, STAMP.split())}
        return interleaved(candidates, session.rounds)


def _inside(session: Session) -> dict[str, list[float]]:
    """Seconds of a script that does nothing, with a Ray cluster around it."""
    with booted(session.place, INSIDE_NODES, private_dirs=(str(miniray.TEMP_DIRECTORY),)) as bed:
        return run_drivers(bed, lambda job: [("ours", _ours(bed, job)), ("theirs", _theirs(bed))])


def _ours(bed: Bed, job: str) -> list[str]:
    return render_ours(bed, job, "ray", None, "true", Resources(ray=Ray(start_args=(STORE,))))


def _theirs(bed: Bed) -> list[str]:
    path = "PATH=%s:%s" % (os.path.dirname(sys.executable), bed.environ["PATH"])
    srun = ["srun", "--nodes=%d" % len(bed.ips), "--ntasks-per-node=1", "env", path]
    address = "--address=%s:%d" % (bed.ips[0], PORT)
    return [*srun, *SYMMETRIC.split(), address, "--min-nodes=%d" % len(bed.ips), "--num-cpus=1", STORE, "--", "true"]


def _ray(session: Session) -> dict[str, Any]:
    """What ray_work found on a cluster of its own."""
    wish = {
        "nodes": NODES,
        "gpus": elastic.GPUS,
        "rounds": session.rounds,
        "phases": [elastic.ROLLOUT, elastic.TRAIN],
        "iterations": elastic.ROUNDS,
        "unit_s": elastic.UNIT_S,
    }
    root = Path(session.place.directory) / "ray"
    with miniray.RayBed.boot(root, NODES, gpus=elastic.GPUS) as bed:
        argv = [sys.executable, "-m", "benchmarks.ray_work", json.dumps(wish)]
        done = bed.run(miniray.HEAD, argv, cwd=CHECKOUT, timeout_s=RAY_TIMEOUT_S)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print_starts(
    session: Session, where: str, steps: dict[str, list[Step]], warm: list[float], new: list[float]
) -> None:
    report = session.report
    report.heading("ray: from the request to the last first line, %s, median of %d" % (where, session.rounds))
    ms = {name: median([step.first_s for step in found]) * 1000 for name, found in steps.items()}
    ms.update({WARM: median(warm) * 1000, NEW: median(new) * 1000})
    report.row(GANGRUN, ms[GANGRUN], "ms", (DATE, ms[DATE]), (WARM, ms[WARM]), (NEW, ms[NEW]))
    for name in (DATE, WARM, NEW):
        report.row(name, ms[name], "ms")


def _print_turns(session: Session, slurm: float, new: float, kept: float) -> None:
    report, floor = session.report, ("the floor of %g" % elastic.LEAST, elastic.LEAST)
    report.heading("ray: %d GPUs that take turns, %d rounds" % (NODES * elastic.GPUS, elastic.ROUNDS))
    report.row("tasks that join a group on Slurm", slurm, "units", floor, limit=TURNS)
    report.row("placement groups on Ray", new, "units", floor)
    report.row("the same, processes keep their GPUs (max_calls=0)", kept, "units", floor)


def _print_inside(session: Session, seconds: dict[str, list[float]]) -> None:
    report = session.report
    report.heading("ray: a Ray cluster of %d nodes in a Slurm job, for a script that does nothing" % INSIDE_NODES)
    ours, theirs = median(seconds["ours"]), median(seconds["theirs"])
    report.row("gangrun, resources: {ray: true}", ours, "s", (SYMMETRIC, theirs))
    report.row(SYMMETRIC, theirs, "s")
    report.row("ours over theirs", ours / theirs, "x", limit=INSIDE)
