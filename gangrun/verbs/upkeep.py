"""`gangrun explain`, `check` and `gc`."""

from __future__ import annotations

import sys

import click

from executor import protocol
from gangrun import show
from gangrun.cluster import open_cluster
from gangrun.requests import parse_duration
from gangrun.show import say
from gangrun.verbs.common import jobs_named


def explain(word: str, host: str | None, as_json: bool) -> int:
    answers = []
    for job in jobs_named([word], host):
        run = job.status()
        found = job.cluster.explain(job, run)
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


def check(host: str | None, deep: bool, as_json: bool) -> int:
    findings = open_cluster(host).check(deep, say)
    if as_json:
        show.print_json([finding._asdict() for finding in findings])
    for finding in findings if not as_json else []:
        mark = "ok     " if finding.is_fine else "MISSING" if finding.is_needed else "without"
        click.echo(f"{mark} {finding.what}: {finding.words}")
    return protocol.EXIT_INFRASTRUCTURE if any(f.is_needed and not f.is_fine for f in findings) else 0


def gc(host: str | None, older_than: str, yes: bool, as_json: bool) -> int:
    from gangrun.gc import collect, remove

    cluster = open_cluster(host)
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
