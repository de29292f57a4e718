"""What tests on the real Ray cluster share: run a driver on its head node, and look at what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen import Bundle, Job, render_ray_driver
from executor import protocol
from tests.bench import CHECKOUT, Outcome, Recorded, eventually
from tests.miniray import HEAD, RayBed
from tests.minislurm.room import NodePopen

LEFT = """
import json, ray
from ray.util import placement_group_table, state
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
free, total = ray.available_resources(), ray.cluster_resources()
print(json.dumps([groups, free.get("CPU") == total.get("CPU"), free.get("GPU") == total.get("GPU")]))
"""

NOTHING: Mapping[str, str] = {}


class RayRun(Recorded):
    """A driver that was started on the cluster's head node."""

    def __init__(self, bench: RayBench, job: Job, driver: str, environ: Mapping[str, str]) -> None:
        self.bench, self.job = bench, job
        self.output = bench.directory / f"{job.job_id}.out"
        with open(self.output, "ab") as file:
            argv = [sys.executable, driver]
            self.process: NodePopen = bench.bed.popen(
                HEAD, argv, stdout=file, stderr=file, cwd=str(bench.directory), env=environ
            )

    @property
    def job_directory(self) -> Path:
        return Path(protocol.job_directory(str(self.bench.directory), protocol.ENGINE_RAY, self.job.job_id))

    @property
    def text(self) -> str:
        return self.output.read_bytes().decode("utf-8", "replace")

    def wait_running(self, ranks: int = 3, timeout_s: float = 60) -> None:
        """Until so many scripts run. A raylet that has just started needs long for its first worker under load."""
        try:
            eventually(lambda: self.status().get("progress", {}).get("ranks", {}).get("running") == ranks, timeout_s)
        except AssertionError:
            pytest.fail(f"{ranks} scripts do not run after {timeout_s} s; {self.status()}\n{self.text}")

    def wait_text(self, words: str, timeout_s: float = 30) -> str:
        return eventually(lambda: self.text if words in self.text else None, timeout_s)

    def wait(self, timeout_s: float = 60) -> Outcome:
        """The outcome, once the driver has ended."""
        code = self.process.wait(timeout_s)
        return self.outcome(code, self.output.read_bytes(), self.bench.directory)


class RayBench:
    """A place that all nodes see, and the Ray cluster to run things on."""

    def __init__(self, bed: RayBed, directory: Path) -> None:
        self.bed = bed
        self.directory = directory
        self.runs: list[RayRun] = []
        self.environ = {"HOME": str(directory), "PYTHONPATH": str(CHECKOUT), "NO_COLOR": "1"}

    def job(self, **fields: Any) -> Job:
        """A job over all nodes, with this place's logs."""
        fixed = {"job_id": "job", "num_nodes": 3, "log_dir": str(self.directory / "logs"), "grace_s": 5.0}
        values: dict[str, Any] = {**fixed, **fields}
        return Job(**values)

    def start(
        self,
        run: str | None = None,
        setup: str | None = None,
        *,
        nodes: int = 3,
        environ: Mapping[str, str] = NOTHING,
        **fields: Any,
    ) -> RayRun:
        """Render a driver and start it on the head node."""
        job = self.job(run=run, setup=setup, **{"num_nodes": nodes, **fields})
        driver = Bundle(job, render_ray_driver(job)).write(str(self.directory / f"driver-{job.job_id}"))
        return self.run(job, driver, environ)

    def run(self, job: Job, driver: str, environ: Mapping[str, str] = NOTHING) -> RayRun:
        """Start a job's driver on the head node."""
        self.runs.append(RayRun(self, job, driver, {**self.environ, **environ}))
        return self.runs[-1]

    def close(self) -> None:
        """End the drivers that a test has left."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()

    def drive(
        self, run: str | None = None, setup: str | None = None, *, timeout_s: float = 60, **fields: Any
    ) -> Outcome:
        """`start` and wait."""
        return self.start(run, setup, **fields).wait(timeout_s)

    def left_behind(self, marker: str) -> list[str]:
        """Processes on any node whose command line holds the marker, but for the tests' own."""
        every = [(node, process) for node in self.bed.nodes for process in self.bed.processes(node)]
        return [f"{node}: {process.cmdline}" for node, process in every if marker in process.cmdline]

    def held(self) -> list[str]:
        """What the cluster's jobs hold: placement groups, CPUs, GPUs. Empty where it is free."""
        done = self.bed.run(HEAD, [sys.executable, "-c", LEFT], timeout_s=30)
        groups, cpus_are_free, gpus_are_free = json.loads(done.stdout.splitlines()[-1])
        return [*groups, *([] if cpus_are_free else ["CPUs"]), *([] if gpus_are_free else ["GPUs"])]

    def is_free(self) -> bool:
        """Whether no job holds anything, and no relay and no rank is left."""
        return not self.held() and not self.left_behind("ray::Relay") and not self.left_behind("ray-rank")
