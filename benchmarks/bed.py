"""Steps on the test bed: a real Slurm, a job that holds its nodes, and what a step costs from start to exit of srun."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import start
from benchmarks.place import STAMP, Place
from codegen import Job
from codegen.slurm import step_options
from executor import protocol
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster

STEP_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 300.0
# $EPOCHREALTIME costs no process; LC_ALL=C so that it has a point.
AROUND = (
    'export LC_ALL=C; a=$EPOCHREALTIME; "$@"; c=$?; b=$EPOCHREALTIME; printf "%s000 begin\\n%s000 end %d\\n" $a $b $c'
)


class Step(NamedTuple):
    """Seconds from srun's start to the last rank's first line, from the last line to srun's exit, and in all."""

    first_s: float
    tail_s: float
    whole_s: float


def missing() -> str | None:
    """Why there is no test bed here, or None."""
    return preflight.missing()


class Bed:
    """A booted cluster, with one job that holds all its nodes for our steps."""

    def __init__(self, cluster: Cluster, place: Place) -> None:
        self.cluster = cluster
        self.place = place
        self.ips = [cluster.addresses[node] for node in cluster.nodes]
        path = "%s:%s" % (os.environ.get("PATH", ""), preflight.SYSTEM_PATH)
        self.environ: dict[str, str] = {"HOME": place.home, "PATH": path}

    def batch(self, body: str, log: str, *options: str) -> int:
        """Submit a batch script over all nodes that prints into `log`."""
        count = "--nodes=%d" % len(self.ips)
        script = "#!/bin/bash\n%s\n" % body
        output = "--output=" + log
        argv = (count, "--ntasks-per-node=1", output, *options)
        return self.cluster.sbatch(script, *argv, cwd=self.place.shared, env=self.environ)

    @contextmanager
    def allocation(self) -> Iterator[str]:
        """The id of a job that holds all nodes while the context lasts."""
        job = self.batch("exec sleep 86400", os.devnull)
        try:
            self.cluster.wait_state(job, "RUNNING")
            yield str(job)
        finally:
            self.cluster.run("ctl", ["scancel", str(job)], cwd="/", check=False)

    def step(self, job: str, command: Sequence[str]) -> Step:
        """Run a command on all nodes with the options of a driver's run step. Every rank must print a stamp."""
        srun = ["srun", "--jobid=" + job, *step_options(self._job(), is_setup=False), "--gpus-per-node=0", *command]
        argv = ["bash", "-c", AROUND, "-", *srun]
        answer = self.cluster.run(
            self.cluster.nodes[0], argv, cwd=self.place.shared, env=self.environ, timeout_s=STEP_TIMEOUT_S
        )
        return parse_step(answer.stdout + answer.stderr, len(self.ips))

    def _job(self) -> Job:
        return Job(job_id="bench", num_nodes=len(self.ips), log_dir=self.place.shared)

    def ours(self) -> list[str]:
        """A rank of the gang that prints a stamp, its launch freshly prepared."""
        return self.place.executor(STAMP, self.place.launch(len(self.ips)), self.ips)


def parse_step(text: str, ranks: int) -> Step:
    """Read what AROUND and the ranks printed. Raises RuntimeError that shows it if a rank is missing."""
    lines = text.splitlines()
    begin = next((float(line.split()[0]) for line in lines if line.endswith(" begin")), None)
    end = next((float(line.split()[0]) for line in lines if line.endswith(" end 0")), None)
    ran = start.stamps("\n".join(line for line in lines if " begin" not in line and " end " not in line).encode())
    if begin is None or end is None or len(ran) != ranks:
        raise RuntimeError("the step did not print %d stamps and end with 0:\n%s" % (ranks, text))
    return Step(max(ran) - begin, end - max(ran), end - begin)


@contextmanager
def booted(place: Place, nodes: int, **choices: Any) -> Iterator[Bed]:
    """A cluster that is taken away at the end of the context, whatever happens."""
    root = Path(place.directory) / ("slurm%d" % nodes)
    with Cluster.boot(root, nodes=nodes, name="bench", **choices) as cluster:
        yield Bed(cluster, place)


def quoted(argv: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in argv)


def state_times(job_directory: str) -> dict[str, float]:
    """When a driver entered each state, by its status file."""
    with open("%s/%s" % (job_directory, protocol.STATUS_NAME), encoding="utf-8") as file:
        times: dict[str, float] = json.load(file)["times"]
    return times
