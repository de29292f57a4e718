"""`gangrun run`: a task on this machine's allocation, or on this machine alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import NamedTuple, NoReturn

from codegen import Bundle, Job, SpecError, render_driver
from executor import protocol
from gangrun.task import Task

LOCAL_JOB = "local"


class Place(NamedTuple):
    """Where a task can run now: the nodes of this allocation, or this machine."""

    slurm_job_id: str
    launcher: str
    cluster_ips: tuple[str, ...] = ()  # none: the allocation's own, found by the driver

    @classmethod
    def find(cls, num_nodes: int, is_local: bool) -> Place:
        """Raises SpecError where there is Slurm but no allocation: a login node is no place for a job."""
        job_id, nodes = os.environ.get(protocol.SLURM_JOB_ID), os.environ.get(protocol.SLURM_JOB_NUM_NODES, "1")
        has_slurm = not is_local and shutil.which("srun") is not None
        if job_id and has_slurm:
            if nodes.isdigit() and num_nodes > int(nodes):
                raise SpecError("num_nodes=%d: this allocation (job %s) has %s" % (num_nodes, job_id, nodes))
            return cls(job_id, "srun")
        if has_slurm:
            ways = "run this inside salloc or sbatch, or with --local"
            raise SpecError(f"Slurm is here, but {protocol.SLURM_JOB_ID} is not set: {ways}")
        return cls(LOCAL_JOB, "local", tuple(protocol.local_address(index) for index in range(num_nodes)))


def run(task: Task, log_dir: str | None, grace_s: float, is_local: bool) -> NoReturn:
    """Become the driver of this task; the process ends with the job's exit code. Raises SpecError."""
    place = Place.find(task.num_nodes, is_local)
    workdir = _workdir(task)
    directory = _new_directory(place)
    job = Job(
        slurm_job_id=place.slurm_job_id,
        job_id=os.path.basename(directory),
        num_nodes=task.num_nodes,
        cluster_ips=place.cluster_ips,
        log_dir=os.path.abspath(os.path.expanduser(log_dir)) if log_dir else os.path.join(directory, "logs"),
        run=task.run,
        setup=task.setup,
        task_name=task.name,
        resources=task.resources,
        env_vars=task.envs,
        setup_env_vars=task.envs,
        secrets=task.secrets,
        workdir=workdir,
        grace_s=grace_s,
        launcher=place.launcher,
        one_shot=True,
    )
    driver = Bundle(job, render_driver(job)).write(directory)
    if place.launcher == "local":
        why = "you said --local" if is_local else "no srun here"
        nodes = f"{task.num_nodes} node(s) as process groups on this machine"
        with contextlib.suppress(OSError):  # nobody listens: no reason not to run
            print(f"gangrun: {why}, so the embedded local launcher runs {nodes}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, driver])


def _workdir(task: Task) -> str:
    workdir = os.path.abspath(os.path.expanduser(task.workdir or "."))
    if not os.path.isdir(workdir):
        raise SpecError(f"workdir={task.workdir!r}: {workdir} is not a directory")
    return workdir


def _new_directory(place: Place) -> str:
    """run-1, run-2, ...: mkdir(2) gives each number to one caller only."""
    parent = os.path.dirname(protocol.job_directory(os.path.expanduser("~"), place.slurm_job_id, "run"))
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        number = 1
        while True:
            try:
                os.mkdir(os.path.join(parent, "run-%d" % number), 0o700)
            except FileExistsError:
                number += 1
                continue
            return os.path.join(parent, "run-%d" % number)
    except OSError as error:
        raise SpecError(f"cannot make a directory in {parent}: {error.strerror}") from error
