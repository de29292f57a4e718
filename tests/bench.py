"""What tests on the real cluster share: run a driver or the executor in an allocation, and look at what came of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple, TypeVar

from codegen import Bundle, Job, Resources, render_driver
from executor import protocol
from tests.minislurm.cluster import Cluster

CHECKOUT = Path(__file__).resolve().parent.parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")
Answer = TypeVar("Answer")


class Outcome(NamedTuple):
    """What a driver or a step left: its exit code, what it printed, the status, the node logs."""

    code: int
    output: str
    status: dict[str, Any]
    events: list[dict[str, Any]]
    directory: Path

    @property
    def states(self) -> list[str]:
        return [event["state"] for event in self.events if event["event"] == "state"]

    @property
    def codes(self) -> list[int]:
        return [rank["exit_code"] for rank in self.status["ranks"]]

    @property
    def plain(self) -> str:
        return ANSI.sub("", self.output)

    def log(self, name: str) -> str:
        return (self.directory / "logs" / name).read_text()


class Recorded:
    """A job of which its driver, wherever that runs, keeps records."""

    @property
    def job_directory(self) -> Path:
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.job_directory / protocol.STATUS_NAME).read_text())
        except (OSError, ValueError):
            return {}
        return status

    def wait_state(self, *states: str, timeout_s: float = 30) -> dict[str, Any]:
        return eventually(lambda: self.status() if self.status().get("state") in states else None, timeout_s)

    def outcome(self, code: int, output: bytes, directory: Path) -> Outcome:
        """What is left of it now."""
        events = self.job_directory / protocol.EVENTS_NAME
        lines = events.read_text().splitlines() if events.exists() else []
        text = output.decode("utf-8", "replace")
        return Outcome(code, text, self.status(), [json.loads(line) for line in lines], directory)


@dataclass(frozen=True)
class Running(Recorded):
    """A job that was submitted; its driver is, or soon will be, at work."""

    bench: Bench
    job_id: int
    name: str

    @property
    def job_directory(self) -> Path:
        return Path(protocol.job_directory(str(self.bench.directory), str(self.job_id), self.name))

    def log(self, name: str) -> str:
        path = self.bench.directory / "logs" / name
        return path.read_text() if path.exists() else ""

    def wait(self, timeout_s: float = 60) -> Outcome:
        """The outcome, once Slurm says that the job has ended."""
        end = self.bench.cluster.wait_job(self.job_id, timeout_s=timeout_s)
        output = (self.bench.directory / ("job-%d.out" % self.job_id)).read_bytes()
        return self.outcome(end.exit_code or (128 + end.signal if end.signal else 0), output, self.bench.directory)


class Bench:
    """A place on the shared file system, and the cluster to run things on."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.python = sys.executable
        self.environ = {**os.environ, "HOME": str(directory), "PATH": python_path(), "PYTHONPATH": str(CHECKOUT)}

    def submit(
        self, run: str | None = None, setup: str | None = None, *, nodes: int = 3, sbatch: str = "", **fields: Any
    ) -> Running:
        """Render a driver, submit it as the batch script of an allocation, and do not wait."""
        job = self.job(run=run, setup=setup, **{"num_nodes": nodes, **fields})
        command = f"exec {self.python} {shlex.quote(self.write(job))}"
        return Running(self, self.batch(command, nodes, sbatch, job.resources), job.job_id)

    def job(self, **fields: Any) -> Job:
        """A job with this place's logs and interpreter."""
        fixed = {"job_id": "job", "log_dir": str(self.directory / "logs"), "grace_s": 10.0, "python": self.python}
        values: dict[str, Any] = {**fixed, **fields}
        return Job(**values)

    def write(self, job: Job, name: str = "driver") -> str:
        """Write a job's driver where all nodes see it; returns its path."""
        return Bundle(job, render_driver(job)).write(str(self.directory / name))

    def drive(
        self, run: str | None = None, setup: str | None = None, *, timeout_s: float = 60, **fields: Any
    ) -> Outcome:
        """`submit` and wait."""
        return self.submit(run, setup, **fields).wait(timeout_s)

    def batch(self, body: str, nodes: int = 3, sbatch: str = "", resources: Resources | None = None) -> int:
        """Submit a batch script's body; returns the job id."""
        resources = resources or Resources()
        options = ["--nodes=%d" % nodes, "--ntasks-per-node=1", "--cpus-per-task=%d" % resources.cpus]
        options += ["--output={}/job-%j.out".format(str(self.directory).replace("%", "%%")), *shlex.split(sbatch)]
        options += ["--gpus-per-node=%d" % resources.gpus] if resources.gpus and "gpus" not in sbatch else []
        first = ",".join(self.cluster.nodes[:nodes])  # always the same ones: tests name them
        options += [] if "--nodelist" in sbatch else ["--nodelist=" + first]
        return self.cluster.sbatch(f"#!/bin/bash\n{body}\n", *options, cwd=self.directory, env=self.environ)

    def run_batch(self, body: str, nodes: int = 3, sbatch: str = "", timeout_s: float = 60) -> Outcome:
        """Submit a batch script's body and wait for its end."""
        return Running(self, self.batch(body, nodes, sbatch), "none").wait(timeout_s)

    def executor(self, script: str, *flags: str, srun: str = "--nodes=3 --kill-on-bad-exit=1") -> str:
        """The command line that a person would type inside an allocation."""
        return " ".join(
            [
                f"srun --ntasks-per-node=1 {srun} {sys.executable} -m executor.slurm",
                "--script=" + shlex.quote(script),
                f"--log-dir={shlex.quote(str(self.directory))}/logs --cluster-num-nodes=$SLURM_JOB_NUM_NODES",
                "--cluster-ips=$(scontrol show hostnames | paste -sd,) --no-color",
                *flags,
            ]
        )

    def left_behind(self, marker: str) -> list[str]:
        """Processes on any node whose command line holds the marker."""
        return [p.cmdline for node in self.cluster.nodes for p in self.cluster.processes(node) if marker in p.cmdline]

    def files(self, pattern: str = "**/*") -> list[str]:
        found = (self.directory / ".gangrun").glob(pattern)
        return sorted(str(path.relative_to(self.directory)) for path in found if path.is_file())


def eventually(look: Callable[[], Answer | None], timeout_s: float = 10, what: str = "") -> Answer:
    """The first answer that is true. Fails the test if none comes in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < deadline, "nothing after {} s{}".format(timeout_s, what and ": " + what)
        time.sleep(0.02)


def python_path() -> str:
    """PATH with this interpreter's programs first: examples say `python` and `gangrun`."""
    return "{}:{}".format(os.path.dirname(sys.executable), os.environ["PATH"])


def run_local(argv: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on this machine, text in and out."""
    return subprocess.run(argv, text=True, capture_output=True, timeout=60, **how)
