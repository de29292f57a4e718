"""A group as the files of a run on the cluster and sbatch's options: one Slurm job for all its tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from codegen.group import COUNTED, GroupBundle, GroupTask, JobGroup, group_sbatch_options
from codegen.spec import SpecError
from executor import protocol
from executor.group_pack import Room, ports_of
from gangrun import agent, group_room, launch, settings
from gangrun.group import SHARED, Group, Member
from gangrun.launch import Place, Plan
from gangrun.settings import Request, Settings
from gangrun.snapshot import Snapshot
from gangrun.task import Task

OF_TASKS = ("gpus",)  # flags that would have to say which task they mean


def whole_request(flags: Mapping[str, Any], group: Group, host: str, config: Settings) -> Request:
    """What is asked for the job as a whole. Raises SpecError for a flag that can only be meant for one task."""
    for name in OF_TASKS:
        if flags.get(name) is not None:
            raise SpecError(f"--{name}={flags[name]!r}: {group.name} is a group; say it in the task's `resources`")
    header = Task(name=group.name, num_nodes=group.num_nodes, slurm=group.slurm)
    return settings.resolve(flags, header, host, config)


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
    trees = {tree_of(member.task, snapshots): digest_of(member.task, snapshots) for member in group.members}
    options = [launch.own_options(place, one) for one in own]
    tasks = tuple(_task(group, index, run, place, one, snapshots) for index, one in enumerate(own))
    spec = JobGroup(
        job_id=run,
        name=group.name,
        tasks=tasks,
        cluster_home=place.root,
        stops_on_primary_failure=group.stops_on_primary_failure,
        is_parallel=group.is_parallel,
        is_shared=group.placement == SHARED,
        spare_nodes=group.spare_nodes,
        inter_connection=group.inter_connection,
        python=place.python,
        room=_room(group, tasks, place, request, options) if group.placement == SHARED else Room(),
    )
    output = os.path.join(place.directory, agent.OUTPUT)
    extra = [*(["--no-kill"] if group.spare_nodes else []), *launch.whole_options(run, place, request)]
    sbatch = group_sbatch_options(spec, output, extra, options)
    files = GroupBundle(spec).files()
    longest_s = max(task.job.grace_s for task in tasks)
    meta = {**_metadata(group, spec, request, snapshots), "grace_s": longest_s}  # what a cancel waits for
    plan = launch.planned(run, place, files, sbatch, meta, trees)
    return plan._replace(shared=_by_node(spec)) if spec.is_shared else plan


def sizes_command(work: Task | Group) -> Sequence[str]:
    """What a launch asks the cluster, so that tasks can be packed on its nodes; nothing where they are not."""
    return group_room.SINFO if isinstance(work, Group) and work.placement == SHARED else ()


def _room(
    group: Group, tasks: Sequence[GroupTask], place: Place, request: Request, options: Sequence[Sequence[str]]
) -> Room:
    """What the tasks may take of one node."""
    said = [option for own in options for option in own]
    kinds = [match["kind"] for match in map(COUNTED.fullmatch, said) if match and match["kind"]]
    constraints = [option.partition("=")[2] for option in said if option.startswith("--constraint=")]
    wish = group_room.Wish(request.partition.value, next(iter(constraints), None), next(iter(kinds), None))
    limit = group.node.room if group.node else Room()
    return group_room.room_of(limit, [task.need for task in tasks], request, wish, place.sizes)


def _by_node(spec: JobGroup) -> list[list[str]]:
    """The names of the tasks on each node."""
    placed = list(zip(spec.tasks, spec.nodes))
    return [[task.name for task, own in placed if node in own] for node in range(spec.num_nodes)]


def _task(
    group: Group, index: int, run: str, place: Place, request: Request, snapshots: Mapping[str, Snapshot]
) -> GroupTask:
    member = group.members[index]
    task = member.task
    workdir = os.path.join(place.directory, tree_of(task, snapshots))
    job = launch.job_of(task, protocol.member_job_id(run, task.name), place._replace(workdir=workdir), request)
    grace_s = job.grace_s if member.termination_delay_s is None else float(member.termination_delay_s)
    ready = member.ready.to_dict() if member.ready else None
    job = dataclasses.replace(
        job,
        log_dir=os.path.join(place.directory, agent.LOGS, task.name),
        grace_s=grace_s,
        ports=ports_of(task.ports, ready),
    )
    return GroupTask(
        name=task.name,
        job=job,
        is_primary=member.is_primary,
        component=index if group.is_heterogeneous else None,
        after=member.after,
        ready=ready,
        max_restarts=member.max_restarts,
        memory_mb=0 if request.twin("memory_gb") else round((request.memory_gb.value or 0) * 1024),
    )


def tree_of(task: Task, snapshots: Mapping[str, Snapshot]) -> str:
    """Tasks with equal trees share one directory, as the nodes of a task do; one without has its own."""
    digest = digest_of(task, snapshots)
    return f"{agent.WORK}-{digest[:12] if digest else task.name}"


def digest_of(task: Task, snapshots: Mapping[str, Snapshot]) -> str | None:
    return snapshots[task.workdir].digest if task.workdir is not None else None


def _metadata(group: Group, spec: JobGroup, request: Request, snapshots: Mapping[str, Snapshot]) -> dict[str, Any]:
    names = [member.task.name for member in group.members]
    found = {snapshot.digest: snapshot for snapshot in snapshots.values()}
    return {
        **launch.identity(spec.job_id, group.name, spec.num_nodes, request),
        "tasks": names,
        "task_nodes": {member.task.name: member.task.num_nodes for member in group.members},
        "primary": [member.task.name for member in group.members if member.is_primary],
        **launch.origin(list(found.values())),
    }
