"""A group as the files of a run on the cluster and sbatch's options: one Slurm job for all its tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from codegen.group import GroupBundle, GroupTask, JobGroup, group_sbatch_options
from codegen.spec import SpecError
from executor import protocol
from gangrun import agent, launch, settings
from gangrun.group import SHARED, Group, Member
from gangrun.launch import Place, Plan
from gangrun.settings import Request, Settings
from gangrun.snapshot import Snapshot
from gangrun.task import Task

OF_TASKS = ("gpus",)  # flags that would have to say which task they mean


def header_task(group: Group) -> Task:
    """The group's own wishes in the form of a task's, for what is asked of the job as a whole."""
    return Task(name=group.name, num_nodes=group.num_nodes, slurm=group.slurm)


def whole_request(flags: Mapping[str, Any], group: Group, host: str, config: Settings) -> Request:
    """What is asked for the job as a whole. Raises SpecError for a flag that can only be meant for one task."""
    for name in OF_TASKS:
        if flags.get(name) is not None:
            raise SpecError(f"--{name}={flags[name]!r}: {group.name} is a group; say it in the task's `resources`")
    return settings.resolve(flags, header_task(group), host, config)


def own_request(member: Member, host: str, config: Settings) -> Request:
    """What is asked for the nodes of one task."""
    return settings.resolve({}, member.task, host, config)


def plan_group(
    group: Group,
    run: str,
    place: Place,
    request: Request,
    own: Sequence[Request],
    snapshots: Mapping[str, Snapshot],
) -> Plan:
    """Pure. `own` are the tasks' requests, `snapshots` are by work directory."""
    _require_own_ports(group)
    trees = {tree_of(member.task, snapshots): digest_of(member.task, snapshots) for member in group.members}
    tasks = tuple(_task(group, index, run, place, own_request_, snapshots) for index, own_request_ in enumerate(own))
    spec = JobGroup(
        job_id=run,
        name=group.name,
        tasks=tasks,
        cluster_home=place.root,
        stops_on_primary_failure=group.stops_on_primary_failure,
        is_parallel=group.is_parallel,
        is_shared=group.placement == SHARED,
        inter_connection=group.inter_connection,
        python=place.python,
    )
    output = os.path.join(place.directory, agent.OUTPUT)
    extra = launch.whole_options(run, place, request)
    options = group_sbatch_options(spec, output, extra, [launch.own_options(place, one) for one in own])
    files = GroupBundle(spec).files()
    longest_s = max(task.job.grace_s for task in tasks)
    meta = {**_metadata(group, run, request, snapshots), "grace_s": longest_s}  # what a cancel waits for
    return launch.planned(run, place, files, options, meta, trees)


def _require_own_ports(group: Group) -> None:
    """Tasks on shared nodes would be taken for each other."""
    seen: dict[int, str] = {}
    for member in group.members if group.placement == SHARED else ():
        port = member.ready.port if member.ready else None
        if port is not None and port in seen:
            raise SpecError(
                f"task {member.name}: ready.port={port}: {seen[port]} has it on the same nodes; use another"
            )
        if port is not None:
            seen[port] = member.name


def _task(
    group: Group, index: int, run: str, place: Place, request: Request, snapshots: Mapping[str, Snapshot]
) -> GroupTask:
    member = group.members[index]
    task = member.task
    workdir = os.path.join(place.directory, tree_of(task, snapshots))
    job = launch.job_of(task, protocol.member_job_id(run, task.name), place._replace(workdir=workdir), request)
    grace_s = job.grace_s if member.termination_delay_s is None else float(member.termination_delay_s)
    job = dataclasses.replace(job, log_dir=os.path.join(place.directory, agent.LOGS, task.name), grace_s=grace_s)
    return GroupTask(
        name=task.name,
        job=job,
        is_primary=member.is_primary,
        component=index if group.is_parallel and group.placement != SHARED and not group.is_homogeneous else None,
        after=member.after,
        ready=member.ready.to_dict() if member.ready else None,
        max_restarts=member.max_restarts,
    )


def tree_of(task: Task, snapshots: Mapping[str, Snapshot]) -> str:
    """Tasks with equal trees share one directory, as the nodes of a task do; one without has its own."""
    digest = digest_of(task, snapshots)
    return f"{agent.WORK}-{digest[:12] if digest else task.name}"


def digest_of(task: Task, snapshots: Mapping[str, Snapshot]) -> str | None:
    return snapshots[task.workdir].digest if task.workdir is not None else None


def _metadata(group: Group, run: str, request: Request, snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    names = [member.task.name for member in group.members]
    found = {snapshot.digest: snapshot for snapshot in snapshots.values()}
    return {
        **launch.identity(run, group.name, group.num_nodes, request),
        "tasks": names,
        "task_nodes": {member.task.name: member.task.num_nodes for member in group.members},
        "primary": [member.task.name for member in group.members if member.is_primary],
        **launch.origin(list(found.values())),
    }
