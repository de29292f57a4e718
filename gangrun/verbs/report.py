"""`gangrun report`: where a run's time went, for a terminal, as JSON, or as one page."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys

import click

from codegen.spec import SpecError
from executor import protocol
from gangrun import agent
from gangrun.cluster import NotFound, is_ray, task_named
from gangrun.records import Records
from gangrun.report import goodput, source, text
from gangrun.report.source import Report
from gangrun.show import print_json
from gangrun.verbs.common import jobs_named

WIDTH_ELSEWHERE = 100
STDOUT = "-"


def report(word: str, task: str | None, host: str | None, html: str | None, pattern: str | None, as_json: bool) -> int:
    compiled = None if pattern is None else goodput.compiled(pattern)
    if html == STDOUT and as_json:
        raise SpecError("--html='-': is standard output, where --json writes; use one of them, or a file")
    found = _found(word, host, compiled)
    if pattern is not None and not any(chapter.marks for chapter in found.chapters):
        click.echo(f"gangrun: --checkpoint-pattern={pattern!r}: no line of rank 0's log matches", err=True)
    if task is not None:
        labels = [chapter.label for chapter in found.chapters if chapter.label]
        found = source.only(found, task_named(task, labels, found.name))
    if html is not None:
        _write_page(found, html)
    if as_json:
        from gangrun.report.data import to_json

        print_json(to_json(found))
    elif html is None:
        for line in text.lines(found, _look()):
            click.echo(line)
    return 0


def _found(word: str, host: str | None, pattern: re.Pattern[str] | None) -> Report:
    """Of a recorded run, or of a path that is here."""
    is_path = os.sep in word or (os.path.exists(word) and not (host or Records.of_user().find(word)))
    if is_path:
        if not os.path.exists(word):
            raise NotFound(f"job={word!r}: no such file or directory; use a job, or the directory of one")
        return source.of_path(word, pattern)
    try:
        jobs = jobs_named([word], host)
    except NotFound as error:
        raise NotFound(f"{error}; of any other job give its directory") from error
    if len(jobs) != 1:
        raise SpecError(f"job={word!r}: names {len(jobs)} runs; a report is about one")
    if is_ray(jobs[0].cluster.name):
        there = f"gangrun report ~/{protocol.HOME_DIRECTORY}/{protocol.ENGINE_RAY}/{jobs[0].run_id}"
        raise SpecError(f"job={word!r}: is on Ray, and its driver's records lie on the head node; use `{there}` there")
    return source.of_job(jobs[0], pattern)


def _write_page(found: Report, path: str) -> None:
    from gangrun.report.page import page

    content = page(found)
    if path == STDOUT:
        click.echo(content, nl=False)
        return
    try:
        _write(path, content.encode())
    except OSError as error:
        raise SpecError(f"--html={path!r}: {error.strerror}; use a file that can be written") from error


def _write(path: str, content: bytes) -> None:
    """All of it, or what was there before: a disk may be full. Not so for pipes, and where no new file may be made."""
    if os.path.isfile(path) or not os.path.lexists(path):
        try:
            return agent.write_private(os.path.realpath(path), content, _mode(path))
        except PermissionError:
            pass
    with open(path, "wb") as file:
        file.write(content)


def _mode(path: str) -> int:
    """That of the file which is there, or that of any new one."""
    if os.path.exists(path):
        return stat.S_IMODE(os.stat(path).st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _look() -> text.Look:
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns
    if is_terminal and not os.environ.get("NO_COLOR"):
        return text.Look(width, _is_ascii(), lambda words, colour: click.style(words, fg=colour), wraps=True)
    return text.Look(width, _is_ascii(), wraps=is_terminal)


def _is_ascii() -> bool:
    """Whether standard output cannot carry the better signs."""
    try:
        "".join((*text.GLYPHS.values(), text.CHECKPOINT)).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
