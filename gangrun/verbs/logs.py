"""`gangrun logs`, and following a log until the job has ended."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from codegen.spec import SpecError
from executor import protocol
from gangrun import show, states
from gangrun.agent import LOGS, OUTPUT
from gangrun.cluster import Job, NotFound, task_named, task_names
from gangrun.records import Run
from gangrun.show import say
from gangrun.verbs.common import jobs_named, next_commands, record_of

TASK_PREFIX = re.compile(r"^\[[A-Za-z0-9-]+\] ")  # of a group's output


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
    job = next(iter(jobs_named([word], host)), None)
    if job is None:
        raise NotFound("no run is in flight")
    if download:
        return _download(job, _task_name(job, task), download, as_json)
    names = _log_names(job, _task_name(job, task), rank, node, setup, follow)
    if names == [OUTPUT] and not as_json:
        _tell_tasks(job)
    if follow and len(names) > 1:
        raise SpecError("-f follows one log, and there are {}; choose with --rank".format(", ".join(names)))
    if follow:
        return follow_job(job, names[0], lines, driver, as_json)
    for name in names:
        _print_log(job, name, lines, driver, as_json, len(names) > 1)
    return states.exit_code_of(job.status(max_age_s=5.0))


def follow_job(job: Job, name: str, lines: int | None, driver: bool = False, as_json: bool = False) -> int:
    try:
        pieces = job.logs(name, follow=True, lines=lines, say=say)
        for piece in _shown(pieces, name, driver, as_json):
            write(piece)
        run = job.wait(say=say)
    except KeyboardInterrupt:
        say(f"you stopped watching; {job.run_id} goes on. To come back or to end it:")
        next_commands(job.run)
        return states.EXIT_UNFINISHED
    say(show.verdict(run))
    if run.state != protocol.SUCCEEDED:
        say(f"  gangrun explain {run.run}")
    return states.exit_code_of(run)


def write(piece: bytes) -> None:
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _tell_tasks(job: Job) -> None:
    names = task_names(job.run)
    if names:
        has = ", ".join(f"{index} {name}" for index, name in enumerate(names))
        show.say(f"all tasks together ({has}); one alone: gangrun logs {job.run_id} TASK")


def _task_name(job: Job, word: str | None) -> str | None:
    return None if word is None else task_named(word, task_names(job.status(max_age_s=5.0)), job.run_id)


def _log_names(job: Job, task: str | None, rank: int | None, node: str | None, setup: bool, follow: bool) -> list[str]:
    """The logs that the flags choose; `output` if they choose none. One may follow a log that is not there yet.
    Raises NotFound, naming those there are."""
    if rank is None and node is None and not setup:
        return [OUTPUT if task is None else protocol.task_output(task)]
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
        has = ", ".join(os.path.relpath(name, LOGS) for name in there if name.startswith(LOGS + "/")) or "none yet"
        hint = " (of a group: gangrun logs JOB TASK)" if task is None and run.meta.get("tasks") else ""
        raise NotFound(f"{run.run}: no such log; there are: {has}{hint}")
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
    record = record_of(job)
    nodes = record.get("nodes") or []
    return protocol.node_name(nodes.index(node)) if node in nodes else node


def _print_log(job: Job, name: str, lines: int | None, driver: bool, as_json: bool, with_title: bool) -> None:
    if with_title and not as_json:
        say(name)
    for piece in _shown(job.logs(name, lines=lines), name, driver, as_json):
        write(piece)


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


def _is_of_task(name: str, task: str | None) -> bool:
    return task is None or name == protocol.task_output(task) or name.startswith(f"{LOGS}/{task}/")


def _download(job: Job, task: str | None, directory: str, as_json: bool) -> int:
    import base64
    import io
    import tarfile

    run = job.run
    there = job.cluster.host.call("list_logs", root=run.root, run=run.run)["logs"]
    names = sorted(name for name in there if _is_of_task(name, task))
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
