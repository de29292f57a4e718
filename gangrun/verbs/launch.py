"""`gangrun launch` and `gangrun render`."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

import click

from codegen.spec import SpecError, checked_variable, is_task_name
from executor import protocol
from gangrun import settings, show, states
from gangrun.agent import OUTPUT
from gangrun.cli import assignments
from gangrun.cluster import Cluster, Intent, open_cluster
from gangrun.group import Group, is_group_file
from gangrun.show import say
from gangrun.task import Task
from gangrun.verbs.common import next_commands
from gangrun.verbs.logs import follow_job


def launch(
    path: str,
    host: str | None,
    as_json: bool,
    *,
    dry_run: bool,
    force: bool,
    detach: bool,
    dirty: bool,
    ray: str | None,
    job_group: str | None,
    no_job_group: bool,
    **how: Any,
) -> int:
    work, flags = _work(path, how)
    if not no_job_group and _joins(job_group):
        switches = {"dry_run": dry_run, "force": force, "dirty": dirty}
        _refuse_for_members({"host": host, "ray": ray, **{name: on or None for name, on in switches.items()}, **flags})
        return _join(work, detach, as_json)
    cluster = _cluster(host, ray)
    if dry_run:
        return _show_intent(work, cluster.plan(work, dirty=dirty, say=say, **flags), as_json)
    job = cluster.launch(work, dirty=dirty, force=force, say=say, **flags)
    run = job.run
    if as_json:
        show.print_json(run.to_json())
        return 0
    say(f"run {run.run} is job {run.job_name} on {run.host}")
    if detach:
        next_commands(run)
        return 0
    return follow_job(job, OUTPUT, None)


def _cluster(host: str | None, ray: str | None) -> Cluster:
    if ray is None:
        return open_cluster(host)
    if host is not None:
        raise SpecError(f"--ray={ray!r}: --host={host!r} names another cluster; leave one of them out")
    from gangrun.ray_api import checked_address

    return open_cluster(checked_address(ray, "--ray"))


def _joins(wanted: str | None) -> bool:
    """Whether this process is a part of a group, and of the one that was named. Raises SpecError if of another."""
    from gangrun.inside import group_directory

    directory = group_directory()
    known = () if directory is None else (os.path.basename(directory), os.environ.get(protocol.ENV_GROUP_NAME))
    ids = (*known, os.environ.get(protocol.SLURM_JOB_ID)) if known else ()
    if wanted is not None and wanted not in ids:
        where = f"this is a task of {known[0]}" if known else "this is no task of a group"
        raise SpecError(f"--job-group={wanted!r}: a group is joined from inside; {where}")
    return directory is not None


def _refuse_for_members(flags: Mapping[str, Any]) -> None:
    """A task that joins a group gets what is free in its allocation: nothing is asked of Slurm."""
    if given := settings.options_in(flags):
        raise SpecError(f"{given}: not for a task that joins its group; --no-job-group launches a job")


def _join(work: Task | Group, detach: bool, as_json: bool) -> int:
    from gangrun.inside import join

    if isinstance(work, Group):
        raise SpecError(f"{work.name} is a group: only a task can join one; --no-job-group launches it by itself")
    member = join(work)
    if as_json:
        show.print_json({"task": member.name, "group": os.environ.get(protocol.ENV_GROUP_NAME)})
    else:
        say(f"task {member.name} joins group {os.environ.get(protocol.ENV_GROUP_NAME)}")
    if detach or as_json:
        return 0
    record = member.wait()  # its output is in the group's already
    say(f"task {member.name} is {record.state}" + (f": {record.reason}" if record.reason else ""))
    return {protocol.SUCCEEDED: 0, protocol.CANCELLED: states.EXIT_CANCELLED}.get(record.state, states.EXIT_FAILED)


def _work(path: str, how: dict[str, Any]) -> tuple[Task | Group, dict[str, Any]]:
    """The task or group as the flags change it, and the flags that are for the request."""
    envs, name, secrets = assignments(how.pop("envs")), how.pop("name"), how.pop("secrets")
    given = {secret: _secret(secret) for secret in secrets}
    if is_group_file(path):
        group = Group.from_file(path, envs)
        tasks = [dataclasses.replace(task, secrets={**task.secrets, **given}) for task in group.tasks]
        return dataclasses.replace(group, tasks=tasks, name=group.name if name is None else name), how
    task = Task.from_file(path, envs)
    if name is not None and not is_task_name(name):
        raise SpecError(f"--name={name!r}: use 1 to 200 printable characters")
    return dataclasses.replace(task, name=name or task.name, secrets={**task.secrets, **given}), how


def _secret(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise SpecError(f"--secret={name!r}: there is no such variable in gangrun's own environment")
    return checked_variable(name, value, f"--secret {name!r}")


def _show_intent(work: Task | Group, intent: Intent, as_json: bool) -> int:
    plan = intent.plan
    rows = [row for row in intent.request.explain() if plan.asks_for(row[0])]
    if as_json:
        request = [{"name": name, "value": value, "source": source} for name, value, source in rows]
        show.print_json({"run": plan.run, "request": request, **plan.to_json()})
        return 0
    show.table(("WHAT", "VALUE", "FROM"), rows)
    click.echo("\n" + plan.words())
    for line in show.work_lines(work):
        click.echo(line)
    for taken in {one.digest: one for one in intent.snapshots.values()}.values():
        state = "to be uploaded" if taken in intent.missing else "on the host already"
        click.echo(f"snapshot {taken.digest[:12]}: {taken.files} files, {show.size(taken.size)}, {state}")
    return 0


def render(path: str, output: str | None, **how: Any) -> int:
    from gangrun import launch as launches

    work, flags = _work(path, how)
    if isinstance(work, Group):
        raise SpecError(f"{path}: is a group; `gangrun launch {path} --dry-run` shows what would be sent")
    config = settings.load(os.environ)
    request = settings.resolve(flags, work, config.default_host, config)
    run = launches.new_run_id(work.name)
    directory = os.path.abspath(output or run)
    workdir = os.path.abspath(os.path.expanduser(work.workdir or "."))
    place = launches.Place(None, directory, workdir, request.python.value, ())
    plan = launches.plan(work, run, place, request, None)
    if output is None:
        driver = plan.files[protocol.DRIVER_NAME].decode("utf-8", "surrogateescape")
        click.echo(driver + "\n# ---- the batch script\n\n" + plan.script, nl=False)
        return 0
    launches.write(plan, directory)
    say(f"submit it with: sbatch {shlex.quote(os.path.join(directory, launches.SCRIPT_NAME))}")
    return 0
