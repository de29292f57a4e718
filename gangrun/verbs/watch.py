"""`gangrun queue`, `status`, `wait` and `cancel`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import click

from codegen.spec import SpecError
from executor import protocol
from gangrun import show, states
from gangrun.cluster import Job, as_they_end, open_cluster
from gangrun.records import Records, Run
from gangrun.remote import RemoteError
from gangrun.requests import parse_duration
from gangrun.show import say
from gangrun.verbs.common import jobs_named, record_of

WATCH_S = 5.0


def queue(host: str | None, include_ended: bool, watch: bool, adopt: bool, as_json: bool) -> int:
    if adopt:
        found = open_cluster(host).adopt()
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
            open_cluster(name, records=records).refresh()
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
    jobs = jobs_named([word], host)
    answers = []
    for job in jobs:
        run = job.status()
        record = record_of(job)
        answers.append({**run.to_json(), "record": record})
        if not as_json:
            for line in show.status_lines(run, record, time.time()):
                click.echo(line)
    if as_json:
        show.print_json(answers)
    return max((states.exit_code_of(job.run) for job in jobs), default=0)


def cancel(words: Sequence[str], host: str | None, grace: str | None, task: str | None, as_json: bool) -> int:
    from gangrun.cancel import cancel as cancel_all

    if task is not None:
        return _cancel_task(jobs_named(words, host), task, as_json)
    grace_s = None if grace is None else float(parse_duration(grace, "--grace")) if grace != "0" else 0.0
    jobs = jobs_named(words, host)
    if not jobs:
        say("no runs in flight")
    runs = cancel_all(jobs, grace_s, say, lambda run: None if as_json else click.echo(show.verdict(run)))
    if as_json:
        show.print_json([run.to_json() for run in runs])
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
    jobs = jobs_named(words, host)
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
    codes = {states.exit_code_of(run) for run in runs}
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
