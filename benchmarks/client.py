"""client: what a launch and a poll cost the login node, and how long the command line takes to start.

The laptop, the sshd and the Slurm are the test bed's own; jobs are held, so that nothing runs beside the measurements.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

from benchmarks import child
from benchmarks.measure import interleaved, median
from benchmarks.place import SKYPILOT, Session
from benchmarks.report import Limit
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster

JOBS = 100
LAUNCH_CALLS = Limit(2)
POLL_CALLS = Limit(1)
LAPTOP, LOGIN = "laptop", "head"
HELP, QUEUE, SUBMITIT = "gangrun --help", "gangrun queue", "import submitit"
SUBMITIT_PYTHON = "SUBMITIT_PYTHON"  # a Python that has submitit, for comparison
PROGRAM = """
import json, sys, time
from gangrun import Cluster, Slurm, Task

cluster = Cluster(sys.argv[1])
held = Slurm(sbatch_args=("--hold",))
cluster.host.connect()
calls, seconds = [], []
for number in range(int(sys.argv[2])):
    before, begun = cluster.host.calls, time.monotonic()
    cluster.launch(Task(name="bench-%d" % number, run="true", slurm=held))
    calls.append(cluster.host.calls - before)
    seconds.append(time.monotonic() - begun)
time.sleep(1.1)
before, begun = cluster.host.calls, time.monotonic()
cluster.refresh()
print(json.dumps({
    "launch_calls": max(calls), "launch_s": seconds, "poll_calls": cluster.host.calls - before,
    "poll_s": time.monotonic() - begun, "states": sorted({job.run.state for job in cluster.jobs()}),
    "jobs": len(cluster.jobs()), "logins": cluster.host.logins,
}))
cluster.host.disconnect()
"""
FLOOR = """
import subprocess, sys, time
for _ in range(15):
    begun = time.monotonic()
    subprocess.run(sys.argv[1:], check=True)
    print(time.monotonic() - begun)
"""


def run(session: Session) -> None:
    _starts(session)
    reason = preflight.missing()
    if reason:
        session.report.skip("client", reason)
        return
    os.chmod(session.place.directory, 0o755)  # other accounts have their homes below
    root = Path(session.place.directory) / "login"
    cluster = Cluster.boot(root, nodes=2)
    try:
        _calls(session, cluster)
    finally:
        cluster.down()


def _starts(session: Session) -> None:
    place, report = session.place, session.report
    environ = {**place.environ(), "XDG_STATE_HOME": place.new("state")}
    candidates: dict[str, Callable[[], float]] = {
        HELP: lambda: _ms([sys.executable, "-m", "gangrun", "--help"], environ),
        QUEUE: lambda: _ms([sys.executable, "-m", "gangrun", "queue"], environ),
    }
    peer, submitit = session.peer, os.environ.get(SUBMITIT_PYTHON)
    if peer is not None:
        theirs = os.path.join(os.path.dirname(peer.python), "sky")
        candidates[SKYPILOT] = lambda: _ms([theirs, "--version"], environ)
    if submitit:
        candidates[SUBMITIT] = lambda: _ms([submitit, "-c", SUBMITIT], environ)
    ms = {name: median(found) for name, found in interleaved(candidates, session.rounds, session.few).items()}
    report.heading("client: start of the command line, median of %d" % session.rounds)
    for name in (HELP, QUEUE):
        report.row(name, ms[name], "ms", ("sky --version", ms.get(SKYPILOT)), (SUBMITIT, ms.get(SUBMITIT)))
    report.row("sky --version", ms.get(SKYPILOT), "ms")
    report.row(SUBMITIT, ms.get(SUBMITIT), "ms")


def _ms(argv: list[str], environ: dict[str, str]) -> float:
    ended = child.run(argv, environ)
    return (ended.ended - ended.started) * 1000


def _calls(session: Session, cluster: Cluster) -> None:
    login, home = cluster.login(), Path(session.place.new("laptop"))
    environ = login.environ(home)
    done = cluster.run(LAPTOP, [sys.executable, "-c", PROGRAM, LOGIN, str(JOBS)], env=environ, timeout_s=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["jobs"] != JOBS or found["states"] != ["PENDING"]:
        raise RuntimeError("%d jobs are %s" % (found["jobs"], found["states"]))
    floor_ms = _floor_ms(session, cluster, environ)
    report = session.report
    report.heading("client: %d launches and a poll of them all over one shared connection" % JOBS)
    report.row("remote calls of a launch", found["launch_calls"], "", limit=LAUNCH_CALLS)
    report.row("remote calls of a poll of %d jobs" % JOBS, found["poll_calls"], "", limit=POLL_CALLS)
    report.row("logins in all", found["logins"], "", limit=Limit(1))
    plain = ("ssh %s true" % LOGIN, floor_ms)
    report.row("a launch, median", median(found["launch_s"]) * 1000, "ms", plain)
    report.row("the poll", found["poll_s"] * 1000, "ms", plain)
    report.row("ssh %s true, shared connection, median" % LOGIN, floor_ms, "ms")


def _floor_ms(session: Session, cluster: Cluster, environ: dict[str, str]) -> float:
    socket = session.place.new("ssh") + "/socket"
    shared = ["ssh", "-S", socket, "-o", "ControlMaster=auto", "-o", "ControlPersist=60", LOGIN]
    cluster.run(LAPTOP, ["sh", "-c", " ".join([*shared, "true", "2>/dev/null"])], env=environ)
    done = cluster.run(LAPTOP, [sys.executable, "-c", FLOOR, *shared, "true"], env=environ)
    cluster.run(LAPTOP, [*shared[:3], "-O", "exit", LOGIN], env=environ, check=False)
    return median([float(line) for line in done.stdout.split()]) * 1000
