"""Jobs brought to a phase of their life, broken there, and looked at when they have ended."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from codegen import Bundle, Job, render_driver
from executor import protocol
from executor.shared import read_record
from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.rows import Row

End = tuple[str, str, int]  # state, words and code of a job


def begin(bench: Bench, phase: str, marker: str, stubborn: str = "", **fields: Any) -> Running:
    """A job of three nodes that has come to `waiting` (for its nodes), `setup`, `running` or `barrier` (rank 1)."""
    fields = {"grace_s": 2.0, "run": f"echo up; exec {marker}", **fields}
    if phase == "waiting":
        holder = "srun -N3 -n3 --exclusive --mem=0 -c1 bash -c 'touch held; exec sleep 4499' & "
        driver = render(bench, **fields)
        job = Running(bench, bench.batch(holder + f"until [ -e held ]; do sleep 0.1; done; exec {driver}"), "job")
        find_srun(job, "run")
        return job
    if phase == "setup":
        fields["setup"] = f"{stubborn}echo up; exec {marker}"
    if phase == "barrier":
        fields["run"] = f"echo up; [ $SKYPILOT_NODE_RANK = 1 ] || exec {marker}"
    job = bench.submit(**fields)
    until_up(job, phase)
    return job


def until_up(job: Running, phase: str = "running") -> None:
    names = [protocol.log_name(rank, rank, 3, phase == "setup") for rank in range(3)]
    eventually(lambda: all("up" in job.log(name) for name in names), 40, "the scripts have begun")
    if phase == "barrier":
        eventually(lambda: record(job, "run", 1).get("state") == protocol.RANK_DONE, 20)


def record(job: Running, step: str, rank: int) -> dict[str, Any]:
    return read_record(protocol.Launch(f"{job.job_directory}/attempt-0").record(rank, step == "setup")) or {}


def render(bench: Bench, run: str, setup: str | None = None, **fields: Any) -> str:
    """The command that runs a driver."""
    values = {"job_id": "job", "num_nodes": 3, "log_dir": str(bench.directory / "logs"), "python": sys.executable}
    job = Job(**{**values, **fields}, run=run, setup=setup)
    return f"{sys.executable} " + shlex.quote(Bundle(job, render_driver(job)).write(str(bench.directory / "driver")))


def find_srun(job: Running, step: str) -> str:
    """The pid, on the driver's node, of the srun of `run` or `setup`."""

    def look() -> str | None:
        path = job.job_directory / protocol.EVENTS_NAME
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return next((str(event["pid"]) for event in events if event.get("step") == step), None)

    return eventually(look, 30, f"the srun of the {step} step")


def run_in_node(command: str, job: Running, marker: str) -> None:
    """`NODE: command`, with the pids and names that it asks for in braces."""
    for step in ("run", "setup"):
        if f"srun {step}" in command:
            command = command.replace("{srun %s}" % step, find_srun(job, step))
        for rank in (rank for rank in range(3) if "{%s %d}" % (step, rank) in command):
            eventually(lambda: record(job, step, rank))  # noqa: B023
            command = command.replace("{%s %d}" % (step, rank), str(record(job, step, rank)["pid"]))
    driver = job.status().get("driver", {}).get("pid")
    node, *words = command.replace("{job}", str(job.job_id)).replace("{driver}", str(driver)).split()
    job.bench.cluster.run(node.rstrip(":"), [word.replace("{m}", marker) for word in words])


def finish(row: Row, job: Running, marker: str, end: End, bound_s: float = 30) -> Outcome:
    """The job ends like this, in time; nothing is left; the next one finds its nodes."""
    state, words, code = end
    outcome = job.wait(bound_s + 60)
    row.ended(outcome, job.bench, marker)
    assert (outcome.status["state"], words in row.seen) == (state, True), row.seen
    assert outcome.status["exit_code"] == code, row.seen
    assert row.seconds is None or row.seconds < bound_s
    no_step_is_left(job)
    return outcome


def no_step_is_left(job: Running) -> None:
    eventually(lambda: not job.bench.cluster.step_ids(job.job_id), 20, "steps are left")
    following = job.bench.drive(run="echo next", job_id="next", timeout_s=120)
    assert (following.code, following.status["state"]) == (0, "SUCCEEDED"), following.output
