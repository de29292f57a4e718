"""The drivers of a job group: one for each task, and one over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from codegen.archive import executor_archive
from codegen.render import render
from codegen.slurm import render_driver, sbatch_options
from codegen.spec import Job
from executor import protocol

TEMPLATE = "group_driver.py.j2"


@dataclass(frozen=True)
class GroupTask:
    """A task's job, and its place in the group. `component` is its index in a heterogeneous Slurm job."""

    name: str
    job: Job
    is_primary: bool = True
    component: int | None = None
    after: tuple[str, ...] = ()
    ready: Mapping[str, Any] | None = None
    max_restarts: int = 0

    @property
    def driver(self) -> str:
        return protocol.member_driver_name(self.name)

    @property
    def num_nodes(self) -> int:
        return self.job.num_nodes

    @property
    def grace_s(self) -> float:
        return self.job.grace_s


@dataclass(frozen=True)
class JobGroup:
    """What the group's driver must know; every value has been checked where it was read."""

    job_id: str
    name: str
    tasks: tuple[GroupTask, ...]
    cluster_home: str | None = None
    stops_on_primary_failure: bool = True
    is_parallel: bool = True
    is_shared: bool = False
    inter_connection: bool | None = None
    python: str | None = None


class GroupBundle(NamedTuple):
    """The files of a group as they lie on the shared home."""

    group: JobGroup

    def files(self) -> dict[str, bytes]:
        """Names and contents, the group's driver last: where it is found, all is."""
        files = {protocol.ARCHIVE_NAME: executor_archive()}
        for task in self.group.tasks:
            secrets_name = protocol.member_secrets_name(task.name)
            if task.job.secrets:
                files[secrets_name] = json.dumps(dict(task.job.secrets)).encode()
            files[task.driver] = _bytes(render_driver(task.job, secrets_name))
        files[protocol.DRIVER_NAME] = _bytes(render_group_driver(self.group))
        return files


def render_group_driver(group: JobGroup) -> str:
    """The text of the driver over the tasks' drivers, which must lie beside it."""
    return render(TEMPLATE, group=group, protocol=protocol)


def group_sbatch_options(group: JobGroup, output: str, extra: Sequence[str], own: Sequence[Sequence[str]]) -> list[str]:
    """sbatch's options: one set, or for a heterogeneous job one per component with `:` between them.

    `extra` belongs to the whole, `own` to each task.
    """
    whole = group.tasks[0].job
    sets = [sbatch_options(task.job, output, [*extra, *mine]) for task, mine in zip(group.tasks, own)]
    if group.tasks[0].component is None:
        return _with_nodes(sets[0], group)
    first, *rest = sets
    shared = {option.partition("=")[0] for option in _whole_options(whole, output, extra)}
    for options in rest:
        first += [":", *(option for option in options if option.partition("=")[0] not in shared)]
    return first


def _with_nodes(options: list[str], group: JobGroup) -> list[str]:
    counts = [task.num_nodes for task in group.tasks]
    nodes = max(counts) if group.is_shared or not group.is_parallel else sum(counts)
    return ["--nodes=%d" % nodes if option.startswith("--nodes=") else option for option in options]


def _whole_options(job: Job, output: str, extra: Sequence[str]) -> list[str]:
    return [option for option in sbatch_options(job, output, extra) if option.partition("=")[0] not in PER_COMPONENT]


PER_COMPONENT = {
    "--nodes",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--gpus-per-node",
    "--gres",
    "--mem",
    "--constraint",
}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
