"""Another task for the group that this process is a part of: no network, no login node, only the shared directory."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import sys
import time

from codegen import Job, SpecError, render_driver
from codegen.bundle import write_files
from executor import protocol
from gangrun import agent, states
from gangrun.group import LABEL, LONGEST_LABEL
from gangrun.task import Slurm, Task

CLAIMS = "members"
MOST_OF_A_NAME = 10000
POLL_S = 0.05


def group_directory() -> str | None:
    """Of the group that this process runs in; None outside."""
    return os.environ.get(protocol.ENV_GROUP_DIRECTORY) or None


def join(task: Task, name: str | None = None) -> Joined:
    """Ask the group for this task as a member; it starts when its nodes are free. Raises SpecError outside a group."""
    directory = group_directory()
    if directory is None:
        raise SpecError(f"{protocol.ENV_GROUP_DIRECTORY} is not set: this process is not a part of a job group")
    if task.slurm != Slurm(grace=task.slurm.grace):
        raise SpecError(f"slurm: of a task that joins a group only grace counts; {task.name} gets what is free there")
    label = _free_name(directory, name or task.name)
    job = _job(task, directory, label)
    secrets_name = protocol.member_secrets_name(label)
    files = {secrets_name: json.dumps(dict(task.secrets)).encode()} if task.secrets else {}
    files[protocol.member_driver_name(label)] = render_driver(job, secrets_name).encode("utf-8", "surrogateescape")
    write_files(directory, files)
    _ask(directory, _request(job, label))
    return Joined(label, job)


class Joined:
    """A member of this process's group that was asked for."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self._home, self._job_id = os.path.expanduser(job.cluster_home or "~"), job.job_id

    def __repr__(self) -> str:
        return f"Joined({self.name!r})"

    def record(self) -> states.Record | None:
        """What its driver recorded, or, where it never had one, what the group's says of it."""
        own = states.parse_record(self._read(self._job_id))
        if own is not None and own.is_terminal:
            return own
        group = states.mapping_of(self._read(self._job_id.rpartition(".")[0]))
        told = next((task for task in group.get("tasks") or () if task["name"] == self.name), None)
        return states.record_of({**told, "attempt": 0}) if told else own

    def _read(self, job_id: str) -> str | None:
        directory = protocol.job_directory(self._home, os.environ.get(protocol.SLURM_JOB_ID, ""), job_id)
        try:
            with open(os.path.join(directory, protocol.STATUS_NAME), encoding="utf-8") as file:
                return file.read()
        except OSError:
            return None

    def wait(self) -> states.Record:
        """Until it has ended."""
        while True:
            record = self.record()
            if record is not None and record.is_terminal:
                return record
            time.sleep(POLL_S)


def _free_name(directory: str, wanted: str) -> str:
    """The name, or with the first number that makes it this group's only one: mkdir(2) gives each to one caller."""
    if not LABEL.fullmatch(wanted) or len(wanted) > LONGEST_LABEL:
        raise SpecError(f"name={wanted!r}: use letters, digits and hyphens, as for any task of a group")
    claims = os.path.join(directory, CLAIMS, os.environ.get(protocol.SLURM_RESTART_COUNT) or "0")
    try:
        os.makedirs(claims, mode=0o700, exist_ok=True)
        for number in range(1, MOST_OF_A_NAME):
            label = wanted if number == 1 else f"{wanted}-{number}"
            if _is_declared(directory, label):
                continue
            try:
                os.mkdir(os.path.join(claims, label))
            except FileExistsError:
                continue
            return label
    except OSError as error:
        raise SpecError(f"cannot write the group's directory {directory}: {error.strerror}") from error
    raise SpecError(f"name={wanted!r}: {MOST_OF_A_NAME} tasks of this group have this name")


def _is_declared(directory: str, label: str) -> bool:
    """A task of the group's file: it has a driver, and nobody has claimed its name, in no attempt."""
    if not os.path.exists(os.path.join(directory, protocol.member_driver_name(label))):
        return False
    return not glob.glob(os.path.join(glob.escape(os.path.join(directory, CLAIMS)), "*", label))


def _job(task: Task, directory: str, label: str) -> Job:
    run = os.path.basename(directory)
    return task.job(
        job_id=protocol.member_job_id(run, label),
        log_dir=os.path.join(directory, agent.LOGS, label),
        task_name=label,
        cluster_home=_cluster_home(directory),
        workdir=task.workdir_here(),
        grace_s=float(task.slurm.grace or protocol.DEFAULT_GRACE_S),
    )


def _cluster_home(directory: str) -> str | None:
    """A launched group lies in <cluster home>/.gangrun/runs/<run>."""
    home = os.path.dirname(os.path.dirname(directory))
    return os.path.dirname(home) if os.path.basename(home) == protocol.HOME_DIRECTORY else None


def _request(job: Job, label: str) -> dict[str, object]:
    component = os.environ.get(protocol.ENV_COMPONENT)
    return {
        "name": label,
        "driver": protocol.member_driver_name(label),
        "num_nodes": job.num_nodes,
        "grace_s": job.grace_s,
        "component": int(component) if component else None,
        "gpus": job.resources.gpus,
    }


def _ask(directory: str, said: dict[str, object]) -> None:
    """One line at the end of the file, under a lock: over NFS an append alone is not enough (open(2), O_APPEND)."""
    path = os.path.join(directory, protocol.REQUESTS_NAME)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        raise SpecError(f"the group does not run any more: {path}: {error.strerror}") from error
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)
        except OSError as error:
            print(f"gangrun: {path} cannot be locked ({error.strerror}); going on", file=sys.stderr)
        os.write(fd, json.dumps(said).encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
