"""What the verbs share: the jobs that were named, what is recorded of them, and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from codegen.spec import SpecError
from gangrun import states
from gangrun.cluster import Cluster, Job, NotFound, open_cluster
from gangrun.records import Records, Run
from gangrun.settings import LOCAL


def jobs_named(words: Sequence[str], host: str | None) -> list[Job]:
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
                clusters[run.host] = open_cluster(run.host, records=records)
            found[run.run] = Job(clusters[run.host], run.run)
    return list(found.values())


def record_of(job: Job) -> dict[str, Any]:
    """What the driver wrote, all of it; empty while there is nothing, or half of it."""
    run = job.run
    return states.mapping_of(job.cluster.host.call("describe", root=run.root, run=run.run)["record"])


def next_commands(run: Run) -> None:
    host = "" if run.host == LOCAL else f" --host {shlex.quote(run.host)}"
    for verb in ("logs -f", "explain", "wait", "cancel"):
        name, _, option = verb.partition(" ")
        click.echo(f"  gangrun {name} {run.run}{host} {option}".rstrip(), err=True)
