"""What a person reads: tables where rich and a terminal are, plain columns elsewhere. Pure words, and one printer."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from executor import protocol
from gangrun import states
from gangrun.group import Group
from gangrun.records import Run
from gangrun.requests import words as duration
from gangrun.task import Task

COLUMNS = ("RUN", "JOB", "HOST", "STATE", "NODES", "ATTEMPT", "AGE", "WHAT")
COLOURS = {protocol.SUCCEEDED: "green", protocol.RUNNING: "cyan", protocol.CANCELLED: "yellow"}
MB, GB = 1e6, 1e9
LEAST_WIDTH = 20


def say(words: str) -> None:
    """One line about what goes on; output is for what was asked for."""
    click.echo("gangrun: " + " ".join(words.split()), err=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    for line in plain_table(columns, rows):
        click.echo(line)


def paragraph(words: str) -> None:
    """Words that may be longer than a terminal is wide, where one is; elsewhere as they are."""
    if sys.stdout.isatty():
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
        words = "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))
    click.echo(words)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in (columns, *rows)]
    return [line.rstrip() for line in lines]


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        shown.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    Console().print(shown)


def queue_row(run: Run, now: float) -> tuple[str, ...]:
    ended = run.ended if run.is_final and run.ended else now
    what_now = what(run, now)
    return (
        run.run, run.job_name, run.host, run.state, str(run.num_nodes), str(run.attempt), age(ended - run.submitted),
        what_now,
    )  # fmt: skip


def queue_rows(run: Run, now: float) -> list[tuple[str, ...]]:
    """A run, and below it the tasks of a group; [P] marks the primaries where there are others."""
    names = run.meta.get("primary") or ()
    has_others = len(names) < len(run.meta.get("tasks") or ())
    return [queue_row(run, now), *(_task_row(_settled(task, run), has_others, now) for task in run.tasks)]


def _settled(task: Mapping[str, Any], run: Run) -> Mapping[str, Any]:
    """A task whose group has ended without telling of it."""
    if not run.is_final or task["state"] in protocol.TERMINAL_STATES:
        return task
    return {**task, "state": states.LOST, "ended": run.ended}


def _task_row(task: Mapping[str, Any], has_others: bool, now: float) -> tuple[str, ...]:
    name = f" ↳ {task['name']}" + (" [P]" if task["is_primary"] and has_others else "")
    started = task.get("started")
    since = "" if started is None else age((task.get("ended") or now) - started)
    record = states.record_of({**task, "attempt": 0})
    what_now = "; ".join(filter(None, (states.progress(record), one_line(task.get("reason")))))
    nodes = str(task.get("num_nodes") or len(task["nodes"]))
    return (name, "", "", str(task["state"]), nodes, str(task["restarts"]), since, what_now)


def _task_words(task: Mapping[str, Any]) -> list[str]:
    nodes = ", ".join(task["nodes"])
    return [str(task["state"]), f"on {nodes}" if nodes else "", one_line(task.get("reason"))]


def one_line(reason: object) -> str:
    """What srun says may have several lines."""
    return " ".join(str(reason or "").split())


def what(run: Run, now: float) -> str:
    """The one thing worth knowing about a run now."""
    detail = "" if run.detail in (run.state, "COMPLETED") else run.detail
    parts = [run.progress, one_line(run.reason) or detail]
    if run.state == protocol.PENDING and run.estimate and run.estimate > now:
        parts.append(f"starts in {duration(round(run.estimate - now))} (Slurm's estimate)")
    return "; ".join(part for part in parts if part)


def verdict(run: Run) -> str:
    code = "" if run.exit_code is None else f" ({protocol.describe_code(run.exit_code)})"
    return f"{run.run} (job {run.job_name}) {run.state}{code}" + (f": {one_line(run.reason)}" if run.reason else "")


def status_lines(run: Run, record: Mapping[str, Any], now: float) -> list[str]:
    """A run in full, rank by rank."""
    lines = [verdict(run), f"  host {run.host}, {run.num_nodes} node(s), attempt {run.attempt}"]
    lines.append("  submitted " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.submitted)))
    commit = run.meta.get("commit")
    if commit:
        lines.append("  commit " + commit[:12] + (" with uncommitted changes" if run.meta.get("is_dirty") else ""))
    if not run.is_final and (words := what(run, now)):
        lines.append("  " + words)
    for task in run.tasks:
        lines.append("  task {}: {}".format(task["name"], "; ".join(filter(None, _task_words(task)))))
    for rank in record.get("ranks") or []:
        lines.append("  " + rank_line(rank))
    return lines


def rank_line(rank: Mapping[str, Any]) -> str:
    code = "" if rank.get("exit_code") is None else ", " + protocol.describe_code(int(rank["exit_code"]))
    return "rank {} on {}: {}{}".format(rank.get("rank"), rank.get("host") or rank.get("node"), rank.get("state"), code)


def age(seconds: float) -> str:
    return duration(max(0, round(seconds)))


def size(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / MB:.1f} MB"


def work_lines(work: Task | Group) -> list[str]:
    """What would run: the scripts and the names of the variables, never their values."""
    if isinstance(work, Task):
        return _task_lines(work, "task " + work.name)
    lines = []
    for member in work.members:
        told = ["primary" if member.is_primary else "auxiliary"]
        told += ["after " + ", ".join(member.after)] if member.after else []
        told += ["ready: {} {}".format(*member.ready.probe)] if member.ready else []
        lines += _task_lines(member.task, f"task {member.name} ({'; '.join(told)})")
    return lines


def _task_lines(task: Task, title: str) -> list[str]:
    lines = [f"{title}: {task.num_nodes} node(s)"]
    lines += ["  variables: " + ", ".join(sorted([*task.envs, *task.secrets]))] if task.envs or task.secrets else []
    for name in ("setup", "run"):
        script = getattr(task, name)
        lines += [f"  {name}:", *(f"    {line}" for line in script.rstrip().splitlines())] if script else []
    return lines
