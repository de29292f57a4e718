"""What the verbs do: each takes what was typed and returns an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from codegen.spec import SpecError, checked_variable, is_task_name
from executor import protocol
from gangrun import show, states
from gangrun.agent import LOGS, OUTPUT
from gangrun.cli import assignments
from gangrun.cluster import Cluster, Intent, Job, NotFound, as_they_end, task_names
from gangrun.group import Group, is_group_file
from gangrun.records import Records, Run
from gangrun.remote import RemoteError
from gangrun.requests import parse_duration
from gangrun.show import say
from gangrun.task import Task

WATCH_S = 5.0
TASK_PREFIX = re.compile(r"^\[[A-Za-z0-9-]+\] ")  # of a group's output


def launch(
    path: str,
    host: str | None,
    as_json: bool,
    *,
    dry_run: bool,
    force: bool,
    detach: bool,
    dirty: bool,
    job_group: str | None,
    no_job_group: bool,
    **how: Any,
) -> int:
    work, flags = _work(path, how)
    if not no_job_group and _joins(job_group):
        _refuse_for_members({"host": host, "dry_run": dry_run, "force": force, "dirty": dirty, **flags})
        return _join(work, detach, as_json)
    cluster = Cluster(host)
    if dry_run:
        return _show_intent(cluster.plan(work, dirty=dirty, say=say, **flags), as_json)
    job = cluster.launch(work, dirty=dirty, force=force, say=say, **flags)
    run = job.run
    if as_json:
        show.print_json(run.to_json())
        return 0
    say(f"run {run.run} is job {run.job_name} on {run.host}")
    if detach:
        _next_commands(run)
        return 0
    return _follow(job, OUTPUT, None)


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
    given = ["--" + name.replace("_", "-") for name, value in flags.items() if value not in (None, False, ())]
    if given:
        raise SpecError(f"{', '.join(given)}: not for a task that joins its group; --no-job-group launches a job")


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


def _show_intent(intent: Intent, as_json: bool) -> int:
    plan = intent.plan
    rows = intent.request.explain()
    if as_json:
        request = [{"name": name, "value": value, "source": source} for name, value, source in rows]
        show.print_json({"run": plan.run, "sbatch": list(plan.sbatch), "request": request, "script": plan.script})
        return 0
    show.table(("WHAT", "VALUE", "FROM"), rows)
    click.echo("\n" + shlex.join(["sbatch", *plan.sbatch]) + "\n\n" + plan.script)
    for taken in {one.digest: one for one in intent.snapshots.values()}.values():
        state = "to be uploaded" if taken in intent.missing else "on the host already"
        click.echo(f"snapshot {taken.digest[:12]}: {taken.files} files, {show.size(taken.size)}, {state}")
    return 0


def _next_commands(run: Run) -> None:
    host = "" if run.host == "local" else f" --host {shlex.quote(run.host)}"
    for verb in ("logs -f", "explain", "wait", "cancel"):
        name, _, option = verb.partition(" ")
        click.echo(f"  gangrun {name} {run.run}{host} {option}".rstrip(), err=True)


def _follow(job: Job, name: str, lines: int | None, driver: bool = False, as_json: bool = False) -> int:
    try:
        pieces = job.logs(name, follow=True, lines=lines, say=say)
        for piece in _shown(pieces, name, driver, as_json):
            _write(piece)
        run = job.wait(say=say)
    except KeyboardInterrupt:
        say(f"you stopped watching; {job.run_id} goes on. To come back or to end it:")
        _next_commands(job.run)
        return states.EXIT_UNFINISHED
    say(show.verdict(run))
    if run.state != protocol.SUCCEEDED:
        say(f"  gangrun explain {run.run}")
    return _code(run)


def _write(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _code(run: Run) -> int:
    return states.exit_code_of(run)


# --- queue and status


def queue(host: str | None, include_ended: bool, watch: bool, adopt: bool, as_json: bool) -> int:
    if adopt:
        found = Cluster(host).adopt()
        say(f"{len(found)} run(s) found that were not recorded here")
    while True:
        runs = _queued(host, include_ended)
        if watch and sys.stdout.isatty():
            click.clear()
        _show_queue(runs, as_json)
        if not watch:
            return 0
        time.sleep(WATCH_S)


def _queued(host: str | None, include_ended: bool) -> list[Run]:
    records = Records.of_user()
    names = [host] if host else sorted({run.host for run in records.in_flight()})
    for name in names:
        try:
            Cluster(name, records=records).refresh()
        except RemoteError as error:
            say(f"{error}. What follows is what was seen last")
    return records.all(host) if include_ended else records.in_flight(host)


def _show_queue(runs: Sequence[Run], as_json: bool) -> None:
    if as_json:
        show.print_json([run.to_json() for run in runs])
    elif runs:
        show.table(show.COLUMNS, [row for run in runs for row in show.queue_rows(run, time.time())])
    else:
        click.echo("no runs in flight; `gangrun queue -a` shows those that have ended")


def status(word: str, host: str | None, as_json: bool) -> int:
    jobs = _jobs([word], host)
    answers = []
    for job in jobs:
        run = job.status()
        record = _record(job)
        answers.append({**run.to_json(), "record": record})
        if not as_json:
            for line in show.status_lines(run, record, time.time()):
                click.echo(line)
    if as_json:
        show.print_json(answers)
    return max((_code(job.run) for job in jobs), default=0)


def _describe(job: Job) -> Mapping[str, Any]:
    run = job.run
    answer: Mapping[str, Any] = job.cluster.host.call("describe", root=run.root, run=run.run)
    return answer


def _record(job: Job) -> dict[str, Any]:
    """What the driver wrote, all of it; empty while there is nothing, or half of it."""
    try:
        record = json.loads(_describe(job)["record"] or "{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _jobs(words: Sequence[str], host: str | None) -> list[Job]:
    """The jobs that were named, each once. Raises NotFound."""
    if not words:
        raise SpecError("JOB: none given; use an id, a name, `last` or `all`")
    records, found = Records.of_user(), {}
    clusters: dict[str, Cluster] = {}
    for word in words:
        runs = records.find(word, host)
        if not runs and word != "all":
            raise NotFound(f"job={word!r}: no run of that id or name is recorded here; `gangrun queue -a` lists them")
        for run in runs:
            if run.host not in clusters:
                clusters[run.host] = Cluster(run.host, records=records)
            found[run.run] = Job(clusters[run.host], run.run)
    return list(found.values())


# --- logs


def logs(
    word: str,
    host: str | None,
    *,
    task: str | None,
    rank: int | None,
    node: str | None,
    setup: bool,
    driver: bool,
    follow: bool,
    lines: int | None,
    download: str | None,
    as_json: bool,
) -> int:
    job = next(iter(_jobs([word], host)), None)
    if job is None:
        raise NotFound("no run is in flight")
    if download:
        return _download(job, download, as_json)
    names = _log_names(job, _task_name(job, task), rank, node, setup, follow)
    if names == [OUTPUT] and not as_json:
        _tell_tasks(job)
    if follow and len(names) > 1:
        raise SpecError("-f follows one log, and there are {}; choose with --rank".format(", ".join(names)))
    if follow:
        return _follow(job, names[0], lines, driver, as_json)
    for name in names:
        _print_log(job, name, lines, driver, as_json, len(names) > 1)
    run = job.status(max_age_s=5.0)
    return _code(run)


def _tell_tasks(job: Job) -> None:
    names = task_names(job.run)
    if names:
        has = ", ".join(f"{index} {name}" for index, name in enumerate(names))
        show.say(f"all tasks together ({has}); one alone: gangrun logs {job.run_id} TASK")


def _task_name(job: Job, word: str | None) -> str | None:
    """A group's task by name or number. Raises NotFound that shows the tasks."""
    if word is None:
        return None
    names = task_names(job.status(max_age_s=5.0))
    found = [name for index, name in enumerate(names) if word in (name, str(index))]
    if not found:
        has = "its tasks are " + ", ".join(f"{index} {name}" for index, name in enumerate(names))
        raise NotFound(f"task={word!r}: no such task in {job.run_id}; {has if names else 'it is not a group'}")
    return found[0]


def _log_names(job: Job, task: str | None, rank: int | None, node: str | None, setup: bool, follow: bool) -> list[str]:
    """The logs that the flags choose; `output` if they choose none. One may follow a log that is not there yet.
    Raises NotFound, naming those there are."""
    if rank is None and node is None and not setup:
        return [OUTPUT if task is None else f"{protocol.TASKS_NAME}/{task}.out"]
    run = job.run
    there = sorted(job.cluster.host.call("list_logs", root=run.root, run=run.run)["logs"])
    places = [_place(job, node)] if node is not None else []
    folder = LOGS if task is None else os.path.join(LOGS, task)
    own = [name for name in there if os.path.dirname(name) == folder]
    found = [name for name in own if _is_chosen(os.path.basename(name), rank, places, setup)]
    if not found:
        awaited = [os.path.join(folder, name) for name in _awaited(_num_nodes(run, task), rank, places, setup)]
        found = awaited if (follow and not run.is_final) or _is_there(job, awaited[:1]) else []
    if not found:
        has = ", ".join(os.path.basename(name) for name in there if name != OUTPUT) or "none yet"
        raise NotFound(f"{run.run}: no such log; there are: {has}")
    return found


def _num_nodes(run: Run, task: str | None) -> int:
    if task is None:
        return run.num_nodes
    joined = {str(one["name"]): int(one.get("num_nodes") or 1) for one in run.tasks}
    return joined.get(task) or int(run.meta.get("task_nodes", {}).get(task, 1))


def _awaited(num_nodes: int, rank: int | None, places: Sequence[str], setup: bool) -> list[str]:
    """The logs that the flags choose, by the names that they will have."""
    ranks = [one for one in range(num_nodes) if rank in (None, one)]
    wanted = [one for one in ranks if not places or protocol.node_name(one) in places]
    return [protocol.log_name(one, one, num_nodes, setup) for one in wanted]


def _is_there(job: Job, names: Sequence[str]) -> bool:
    """Opening asks the server; a listing may be a minute old."""
    run = job.run
    ask: dict[str, Any] = {"inode": None, "offset": 0, "size": 0, "wait_s": 0.0, "before": None}
    call = job.cluster.host.call
    return any(call("read", root=run.root, run=run.run, job=run.job, name=name, **ask)["is_there"] for name in names)


def _is_chosen(name: str, rank: int | None, places: Sequence[str], setup: bool) -> bool:
    if name == OUTPUT or name.startswith("setup-") != setup:
        return False
    place = name.rsplit(".", 1)[0].split("-", 1)[-1]
    if name == protocol.SINGLE_LOG_NAME:
        return rank in (None, 0) and (not places or "head" in places)
    if setup and rank is not None:
        return place == protocol.node_name(rank)
    return (rank is None or name.startswith(f"{rank}-")) and (not places or place in places)


def _place(job: Job, node: str) -> str:
    """`head` or `worker<i>` for a node's own name."""
    record = _record(job)
    nodes = record.get("nodes") or []
    return protocol.node_name(nodes.index(node)) if node in nodes else node


def _print_log(job: Job, name: str, lines: int | None, driver: bool, as_json: bool, with_title: bool) -> None:
    if with_title and not as_json:
        say(name)
    for piece in _shown(job.logs(name, lines=lines), name, driver, as_json):
        _write(piece)


def _shown(pieces: Iterator[bytes], name: str, driver: bool, as_json: bool) -> Iterator[bytes]:
    if not driver and not as_json:
        yield from pieces
        return
    for line in _lines(pieces):
        if not driver or not _is_of_a_rank(line):
            text = json.dumps({"log": name, "line": line}) if as_json else line
            yield text.encode("utf-8", "replace") + b"\n"


def _lines(pieces: Iterator[bytes]) -> Iterator[str]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    if rest:
        yield rest.decode("utf-8", "replace")


def _is_of_a_rank(line: str) -> bool:
    plain = TASK_PREFIX.sub("", click.unstyle(line))
    return plain.startswith("(") and "pid=" in plain.partition(")")[0]


def _download(job: Job, directory: str, as_json: bool) -> int:
    import base64
    import io
    import tarfile

    run = job.run
    names = sorted(job.cluster.host.call("list_logs", root=run.root, run=run.run)["logs"])
    answer = job.cluster.host.call("tar", root=run.root, run=run.run, logs=names, timeout_s=600.0)
    try:
        os.makedirs(directory, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(answer["archive"]))) as tar:
            for member in tar:
                _save(tar, member, directory)
    except OSError as error:
        raise SpecError(f"--download={directory!r}: {error.strerror}") from error
    if as_json:
        show.print_json({"directory": os.path.abspath(directory), "logs": names})
    else:
        say(f"{len(names)} logs in {directory}")
    return 0


def _save(tar: Any, member: Any, directory: str) -> None:
    """Those of a group's ranks in a folder for each task: their names are the same in all."""
    *folders, name = [part for part in member.name.split("/") if part not in ("", ".", "..")]
    folder = os.path.join(directory, *folders[1:])
    source = tar.extractfile(member)
    if source is not None:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), "wb") as file:
            file.write(source.read())


# --- cancel and wait


def cancel(words: Sequence[str], host: str | None, grace: str | None, task: str | None, as_json: bool) -> int:
    from gangrun.cancel import cancel as cancel_all

    if task is not None:
        return _cancel_task(_jobs(words, host), task, as_json)
    grace_s = None if grace is None else float(parse_duration(grace, "--grace")) if grace != "0" else 0.0
    runs = cancel_all(_jobs(words, host), grace_s, say)
    if as_json:
        show.print_json([run.to_json() for run in runs])
    for run in runs if not as_json else []:
        click.echo(show.verdict(run))
    return 0 if all(run.is_final for run in runs) else states.EXIT_UNFINISHED


def _cancel_task(jobs: Sequence[Job], word: str, as_json: bool) -> int:
    from gangrun.cancel import cancel_task

    if len(jobs) != 1:
        raise SpecError(f"--task={word!r}: name one group, not {len(jobs)}")
    found = cancel_task(jobs[0], word)
    if as_json:
        show.print_json(found)
    else:
        click.echo("{} of {} is {}".format(found["name"], jobs[0].run_id, found["state"]))
    return 0 if found["state"] in protocol.TERMINAL_STATES else states.EXIT_UNFINISHED


def wait(
    words: Sequence[str],
    host: str | None,
    *,
    any_of_them: bool,
    timeout: str | None,
    command: str | None,
    as_json: bool,
) -> int:
    jobs = _jobs(words, host)
    if not jobs:
        say("no runs in flight")
    ended: list[Run] = []
    timeout_s = None if timeout is None else float(parse_duration(timeout, "--timeout"))
    try:
        for run in as_they_end(jobs, timeout_s, say):
            ended.append(run)
            _tell_end(jobs[0].cluster.records, run, command, as_json)
            if any_of_them:
                break
    except TimeoutError as error:
        say(str(error))
        return states.EXIT_UNFINISHED
    finally:
        if as_json:
            show.print_json([run.to_json() for run in ended])
    return _worst(ended)


def _tell_end(records: Records, run: Run, command: str | None, as_json: bool) -> None:
    if not as_json:
        click.echo(show.verdict(run))
    if command is not None:
        _run_then(records, run, command)


def _worst(runs: Sequence[Run]) -> int:
    codes = {_code(run) for run in runs}
    return next((code for code in (states.EXIT_FAILED, states.EXIT_CANCELLED) if code in codes), 0)


def _run_then(records: Records, run: Run, command: str) -> None:
    if not records.claim_then(run.run, command):
        say(f"{run.run}: the command of --then has run before")
        return
    told = {
        "RUN": run.run, "NAME": run.name, "JOB": run.job or "", "HOST": run.host, "STATE": run.state,
        "EXIT_CODE": "" if run.exit_code is None else str(run.exit_code), "REASON": run.reason,
    }  # fmt: skip
    environ = {**os.environ, **{f"GANGRUN_{name}": value for name, value in told.items()}}
    records.then_started(run.run, command)
    code = subprocess.call(command, shell=True, env=environ)
    if code:
        say(f"{run.run}: the command of --then ended with code {code}")


# --- render


def render(path: str, output: str | None, *, dirty: bool, **how: Any) -> int:
    from gangrun import launch as launches
    from gangrun import settings

    work, flags = _work(path, how)
    if isinstance(work, Group):
        raise SpecError(f"{path}: is a group; `gangrun launch {path} --dry-run` shows what would be sent")
    config = settings.load(os.environ)
    request = settings.resolve(flags, work, config.default_host, config)
    run = launches.new_run_id(work.name)
    directory = os.path.abspath(output or run)
    workdir = os.path.abspath(os.path.expanduser(work.workdir or "."))
    place = launches.Place(None, directory, workdir, request.python.value, ())
    plan = launches.plan(work, run, place, request, launches.metadata(work, run, None, request))
    if output is None:
        driver = plan.files[protocol.DRIVER_NAME].decode("utf-8", "surrogateescape")
        click.echo(driver + "\n# ---- the batch script\n\n" + plan.script, nl=False)
        return 0
    launches.write(plan, directory)
    say(f"submit it with: sbatch {shlex.quote(os.path.join(directory, launches.SCRIPT_NAME))}")
    return 0


# --- explain


def explain(word: str, host: str | None, as_json: bool) -> int:
    from gangrun.explain.ask import explain_job

    answers = []
    for job in _jobs([word], host):
        run = job.status()
        found = explain_job(job, run)
        answers.append({"run": run.run, "state": run.state, **found.to_json()})
        if as_json:
            continue
        click.echo(f"{run.run} (job {run.job_name}): {found.headline}")
        for fact in found.facts:
            click.echo("  " + fact)
        for advice in found.advice:
            click.echo("  -> " + advice)
    if as_json:
        show.print_json(answers)
    return 0


# --- check and gc


def check(host: str | None, deep: bool, as_json: bool) -> int:
    from gangrun.check import check as look

    findings = look(Cluster(host), deep, say)
    if as_json:
        show.print_json([finding._asdict() for finding in findings])
    for finding in findings if not as_json else []:
        mark = "ok     " if finding.is_fine else "MISSING" if finding.is_needed else "without"
        click.echo(f"{mark} {finding.what}: {finding.words}")
    return protocol.EXIT_INFRASTRUCTURE if any(f.is_needed and not f.is_fine for f in findings) else 0


def gc(host: str | None, older_than: str, yes: bool, as_json: bool) -> int:
    from gangrun.gc import collect, remove

    cluster = Cluster(host)
    entries = collect(cluster, float(parse_duration(older_than, "--older-than")))
    if as_json:
        show.print_json([entry._asdict() for entry in entries])
    elif entries:
        rows = [(entry.kind, entry.name, show.age(entry.age_s), show.size(entry.bytes)) for entry in entries]
        show.table(("KIND", "NAME", "AGE", "SIZE"), rows)
    if not entries:
        say(f"nothing on {cluster.name} is older than {older_than} and unused")
        return 0
    total = show.size(sum(entry.bytes for entry in entries))
    if yes or (
        not as_json and sys.stdin.isatty() and click.confirm(f"Remove these {len(entries)} ({total})?", err=True)
    ):
        remove(cluster, entries)
        say(f"removed {len(entries)}, {total}")
    elif not as_json:
        say(f"nothing was removed; --yes removes these {len(entries)} ({total})")
    return 0
