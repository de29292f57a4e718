"""Whole drivers on the test bed: a batch job that runs them one after the other, timed from start to exit."""

from __future__ import annotations

import sys
from typing import Callable

from benchmarks.bed import JOB_TIMEOUT_S, Bed, quoted
from codegen import Bundle, Job, Resources, render_driver

# In a job's log: NAME BEGIN END CODE; the drivers' own output goes to files of their own.
ROUND = 'a=$EPOCHREALTIME; %s >%s 2>&1; c=$?; echo "DRIVER %s $a $EPOCHREALTIME $c"'


def render_ours(
    bed: Bed, slurm_job_id: str, name: str, setup: str | None, run: str, resources: Resources | None = None
) -> list[str]:
    """Write a driver beside its archive; returns its command line."""
    directory = bed.place.new("driver")
    job = Job(
        job_id=name,
        num_nodes=len(bed.ips),
        log_dir=directory + "/logs",
        slurm_job_id=slurm_job_id,
        cluster_ips=tuple(bed.ips),
        setup=setup,
        run=run,
        resources=resources or Resources(),
        python=sys.executable,
    )
    return [sys.executable, Bundle(job, render_driver(job)).write(directory)]


def run_drivers(bed: Bed, make: Callable[[str], list[tuple[str, list[str]]]]) -> dict[str, list[float]]:
    """Seconds of each named driver. `make` gets the Slurm job's id and says what to run, in order."""
    log = bed.place.new("drivers") + "/log"
    gate, script = log + ".go", log + ".sh"
    job = bed.batch("export LC_ALL=C; until [ -e %s ]; do sleep 0.05; done; . %s" % (gate, script), log)
    rounds = [
        ROUND % (quoted(argv), "%s.%d" % (log, number), name) for number, (name, argv) in enumerate(make(str(job)))
    ]
    with open(script, "w", encoding="utf-8") as file:
        file.write("\n".join(rounds) + "\n")
    open(gate, "w", encoding="utf-8").close()
    bed.cluster.wait_job(job, timeout_s=JOB_TIMEOUT_S)
    return _parse(log)


def _parse(log: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.split() for line in file if line.startswith("DRIVER ")]
    for number, (_, name, begin, end, code) in enumerate(lines):
        if code != "0":
            with open("%s.%d" % (log, number), encoding="utf-8", errors="replace") as file:
                raise RuntimeError("%s's driver ended with code %s:\n%s" % (name, code, file.read()[-2000:]))
        seconds.setdefault(name, []).append(float(end) - float(begin))
    return seconds
