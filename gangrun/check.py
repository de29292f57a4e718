"""What a host has, what it lacks, and what that costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from executor import protocol
from gangrun import requests
from gangrun.cluster import Cluster
from gangrun.remote import RemoteError
from gangrun.task import Slurm, Task

COMMANDS = {
    "version": ["sinfo", "--version"],
    "partitions": ["sinfo", "--noheader", "--format=%P|%a|%l|%D|%G"],
    "config": ["scontrol", "show", "config"],
    "accounting": ["sacct", "-X", "-n", "-P", "--starttime=now-1hours", "-o", "JobID"],
    "tar": ["tar", "--version"],
}
DEEP_TIME_S = 300
DEEP_WAIT_S = 600.0
DEEP_WORD = "gangrun sees its home"
LOW_SPACE = 1e9
LOSES_ORPHANS = "a killed job may leave processes behind; proctrack/cgroup does not"


class Finding(NamedTuple):
    what: str
    is_fine: bool
    words: str
    is_needed: bool = False


def check(cluster: Cluster, deep: bool, say: Callable[[str], None]) -> list[Finding]:
    """Everything a launch needs or gains from, in the order in which it is needed."""
    try:
        found = cluster.host.call(
            "prepare", root=cluster.root, digests=[], commands=COMMANDS, python=cluster.host_settings.python
        )
    except RemoteError as error:
        return [Finding("connection", False, str(error), is_needed=True)]
    answers = found["answers"]
    findings = [
        Finding("connection", True, f"{cluster.name} is {found['host']}"),
        _slurm(found["missing"], answers["version"]),
        _python(found["python"]),
        _space(found),
        _tar(answers["tar"]),
        *_partitions(answers["partitions"]),
        _accounting(answers["accounting"]),
        _proctrack(answers["config"]),
    ]
    if deep and not any(finding.is_needed and not finding.is_fine for finding in findings):
        findings.append(_home_on_nodes(cluster, say))
    return findings


def _slurm(missing: list[str], version: Mapping[str, Any]) -> Finding:
    if missing:
        return Finding("Slurm", False, "no {} on PATH: nothing can be submitted".format(", ".join(missing)), True)
    return Finding("Slurm", version["rc"] == 0, (version["stdout"] or version["stderr"]).strip(), is_needed=True)


def _python(path: str | None) -> Finding:
    oldest = "%d.%d" % protocol.OLDEST_PYTHON
    words = path or f"no {oldest} or newer on PATH; set `python:` for this host to one that the nodes have too"
    return Finding("python", path is not None, words, is_needed=True)


def _space(found: Mapping[str, Any]) -> Finding:
    free = float(found["free_bytes"])
    return Finding("space", free > LOW_SPACE, f"{free / 1e9:.1f} GB free in {found['home']} (quotas are not seen)")


def _tar(answer: Mapping[str, Any]) -> Finding:
    words = "present" if answer["rc"] == 0 else "not there; gangrun does without, you may miss it"
    return Finding("tar", answer["rc"] == 0, words)


def _partitions(answer: Mapping[str, Any]) -> list[Finding]:
    if answer["rc"] != 0:
        return [Finding("partitions", False, "the controller does not answer: " + answer["stderr"].strip(), True)]
    rows = [line.strip().split("|") for line in answer["stdout"].splitlines() if line.count("|") == 4]
    words = [f"{name} ({state}, limit {limit}, {nodes} nodes, {gres})" for name, state, limit, nodes, gres in rows]
    gpus = any("gpu" in row[4] for row in rows)
    return [
        Finding("partitions", bool(rows), "; ".join(words) or "none that you may use", is_needed=True),
        Finding("GPUs", gpus, "see the partitions" if gpus else "none: --gpus cannot be asked for here"),
    ]


def _accounting(answer: Mapping[str, Any]) -> Finding:
    if answer["rc"] == 0:
        return Finding("accounting", True, "sacct answers")
    cost = "the end of a job whose driver was killed is told late and without Slurm's reason"
    return Finding("accounting", False, f"{answer['stderr'].strip() or 'sacct fails'}; {cost}")


def _proctrack(answer: Mapping[str, Any]) -> Finding:
    named = [
        line.split("=", 1)[1].strip() for line in answer["stdout"].splitlines() if line.startswith("ProctrackType")
    ]
    kind = named[0] if named else "not known"
    is_fine = kind == "proctrack/cgroup"
    return Finding("process tracking", is_fine, kind if is_fine else f"{kind}: {LOSES_ORPHANS}")


def _home_on_nodes(cluster: Cluster, say: Callable[[str], None]) -> Finding:
    """A short job that the driver itself fails if the compute node does not see the run's directory."""
    say("submitting a short job to look at a compute node")
    task = Task(name="gangrun-check", run=f"echo {DEEP_WORD}", slurm=Slurm(time=DEEP_TIME_S, requeue=False))
    begun = time.monotonic()
    job = cluster.launch(task, force=True, say=say)
    try:
        run = job.wait(DEEP_WAIT_S)
    except TimeoutError:
        run = job.cancel(0.0)
        return Finding(
            "shared home", False, f"the job has not started in {requests.words(int(DEEP_WAIT_S))}: {run.reason}"
        )
    said = b"".join(job.logs()).decode("utf-8", "replace")
    took = requests.words(max(1, round(time.monotonic() - begun)))
    if run.state == protocol.SUCCEEDED and DEEP_WORD in said:
        return Finding("shared home", True, f"a compute node sees {cluster.root} (the job took {took})", is_needed=True)
    return Finding("shared home", False, f"the job ended as {run.state}: {run.reason or said[-300:]}", is_needed=True)
