"""`gangrun run`: a task on this machine's allocation, or on this machine alone."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import json
import os
import shutil
import sys
import time
from typing import NamedTuple, NoReturn

from codegen import Bundle, Job, SpecError, render_driver
from executor import protocol
from gangrun.task import Task

LOCAL_JOB = "local"
MOST_LOCAL_NODES = 256
STARTING_S = 60.0
BATCH_SCRIPT = "slurm_script"  # the name under which slurmstepd starts every batch script


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
                raise SpecError(f"num_nodes={num_nodes}: use at most {nodes}, the nodes of job {job_id}")
            return cls(job_id, "srun")
        if has_slurm:
            ways = "run this inside salloc or sbatch, or with --local"
            raise SpecError(f"Slurm is here, but {protocol.SLURM_JOB_ID} is not set: {ways}")
        if num_nodes > MOST_LOCAL_NODES:
            raise SpecError(f"num_nodes={num_nodes}: use at most {MOST_LOCAL_NODES} with the local launcher")
        return cls(LOCAL_JOB, "local", tuple(protocol.local_address(index) for index in range(num_nodes)))


def run(task: Task, log_dir: str | None, grace_s: float, is_local: bool) -> NoReturn:
    """Become the driver of this task; the process ends with the job's exit code. Raises SpecError."""
    place = Place.find(task.num_nodes, is_local)
    job = _job(task, place, log_dir, grace_s)
    directory = _directory(place, task)
    logs = job.log_dir if log_dir else os.path.join(directory, "logs")
    job = dataclasses.replace(job, job_id=os.path.basename(directory), log_dir=logs)
    driver = Bundle(job, render_driver(job)).write(directory)
    for words in _words(place, task, is_local):
        with contextlib.suppress(OSError):  # nobody listens: no reason not to run
            print("gangrun: " + words, file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", driver])


def _job(task: Task, place: Place, log_dir: str | None, grace_s: float) -> Job:
    """The whole description, checked before anything is made; its directory is filled in later."""
    return task.job(
        slurm_job_id=place.slurm_job_id,
        job_id="run",
        cluster_ips=place.cluster_ips,
        log_dir=_log_directory(log_dir) if log_dir else "logs",
        workdir=task.workdir_here(),
        grace_s=grace_s,
        launcher=place.launcher,
        one_shot=True,
    )


def _words(place: Place, task: Task, is_local: bool) -> list[str]:
    if place.launcher == "local":
        why = "you said --local" if is_local else "no srun here"
        nodes = f"{task.num_nodes} node(s) as process groups on this machine"
        return [f"{why}, so the embedded local launcher runs {nodes}"]
    if _is_child_of_batch_script():
        return ["say `exec gangrun run` in a batch script: Slurm signals its shell, and with the shell we die"]
    return []


def _is_child_of_batch_script() -> bool:
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            return any(os.path.basename(word) == BATCH_SCRIPT for word in os.fsdecode(file.read()).split("\0"))
    except OSError:
        return False


def _log_directory(text: str) -> str:
    path = os.path.abspath(os.path.expanduser(text))
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--log-dir={text!r}: {error.strerror}") from error
    return path


def _directory(place: Place, task: Task) -> str:
    """That of the run that a requeue interrupted, else run-1, run-2, ...: mkdir(2) gives each to one caller."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home) or not os.path.isdir(home):
        raise SpecError(f"HOME={home!r}: use the absolute path of a directory")
    parent = os.path.dirname(protocol.job_directory(home, place.slurm_job_id, "run"))
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        for name in os.listdir(parent):
            _forget_the_dead(os.path.join(parent, name))
        return _interrupted(parent, task) or _new_directory(parent)
    except OSError as error:
        raise SpecError(f"cannot make a directory in {parent}: {error.strerror}") from error


def _forget_the_dead(path: str) -> None:
    """A run that was killed with -9 could not take its secrets away, and no later driver comes for them."""
    private = [
        os.path.join(path, protocol.SECRETS_NAME),
        *glob.glob(os.path.join(glob.escape(path), protocol.attempt_name("*"))),
    ]
    left = [one for one in private if os.path.exists(one)]
    if not left or _is_alive(path):
        return
    for one in left:
        shutil.rmtree(one, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(one)


def _is_alive(path: str) -> bool:
    """A driver holds its lock; one that is only just being started has none yet."""
    try:
        fd = os.open(os.path.join(path, protocol.LOCK_NAME), os.O_RDWR)
    except OSError:
        return time.time() - os.stat(path).st_mtime < STARTING_S
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def _interrupted(parent: str, task: Task) -> str | None:
    if not os.environ.get(protocol.SLURM_RESTART_COUNT):
        return None
    for name in sorted(os.listdir(parent)):
        try:
            with open(os.path.join(parent, name, protocol.STATUS_NAME), encoding="utf-8") as file:
                status = json.load(file)
        except (OSError, ValueError):
            continue
        if status.get("state") == protocol.PENDING and status.get("task_name") == task.name:
            return os.path.join(parent, name)
    return None


def _new_directory(parent: str) -> str:
    number = 1
    while True:
        path = os.path.join(parent, f"run-{number}")
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            number += 1
            continue
        return path
