"""Parts that die or get stuck."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from typing import Any

import pytest

from codegen import Bundle, Job, render_driver
from executor import protocol
from executor.shared import read_record
from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import Row, kill
from tests.minislurm.room import NodePopen

KIND = "Dead and stuck parts"
NODES = ("n1", "n2", "n3")
RANK_1_IS_DONE = "echo up; [ $SKYPILOT_NODE_RANK = 1 ] || exec "
FAST_DETECTION = {"slurmd_timeout_s": 5}
NODE_LOSS_S = 60.0  # Slurm's ping cycle takes up to 28 s
A_DEAD_DRIVERS_FILES = "the attempt's directory, readable by its owner only"


def begin(bench: Bench, phase: str, marker: str, **fields: Any) -> Running:
    """A job of three nodes that has come to `waiting` (for its nodes), `setup`, `running` or `barrier` (rank 1)."""
    fields = {"grace_s": 2.0, "run": f"echo up; exec {marker}", **fields}
    if phase == "waiting":
        holder = "srun -N3 -n3 --exclusive --mem=0 -c1 bash -c 'touch held; exec sleep 4499' & "
        driver = render(bench, **fields)
        job = Running(bench, bench.batch(holder + f"until [ -e held ]; do sleep 0.1; done; exec {driver}"), "job")
        srun_of(job, "run")
        return job
    if phase == "setup":
        fields["setup"] = f"echo up; exec {marker}"
    if phase == "barrier":
        fields["run"] = RANK_1_IS_DONE + marker
    job = bench.submit(**fields)
    until_up(job, phase)
    return job


def until_up(job: Running, phase: str = "running") -> None:
    names = [protocol.log_name(rank, rank, 3, phase == "setup") for rank in range(3)]
    eventually(lambda: all("up" in job.log(name) for name in names), 40, "the scripts have begun")
    if phase == "barrier":
        record = protocol.Launch(f"{job.job_directory}/attempt-0").record(1)
        eventually(lambda: (read_record(record) or {}).get("state") == protocol.RANK_DONE, 20)


def render(bench: Bench, run: str, setup: str | None = None, **fields: Any) -> str:
    """The command that runs a driver."""
    values = {"job_id": "job", "num_nodes": 3, "log_dir": str(bench.directory / "logs"), "python": sys.executable}
    job = Job(**{**values, **fields}, run=run, setup=setup)
    return f"{sys.executable} " + shlex.quote(Bundle(job, render_driver(job)).write(str(bench.directory / "driver")))


def by_hand(bench: Bench, job_id: int, driver: str) -> NodePopen:
    """Run a driver on the login node in an allocation that is held elsewhere: Slurm does not know of it."""
    environ = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": ",".join(NODES), "SLURM_JOB_NUM_NODES": "3"}
    with (bench.directory / "by-hand.out").open("a") as output:
        how: dict[str, Any] = {"cwd": bench.directory, "env": {**environ, "HOME": str(bench.directory)}}
        return bench.cluster.popen("ctl", shlex.split(driver), stdout=output, stderr=output, **how)


def finish(row: Row, job: Running, marker: str, state: str, words: str, code: int, bound_s: float = 30) -> Outcome:
    """The job ends in time with the state, the words and the code; nothing is left; the next one finds its nodes."""
    outcome = job.wait(bound_s + 60)
    row.ended(outcome, job.bench, marker)
    assert row.seconds is None or row.seconds < bound_s
    assert (outcome.status["state"], words in row.seen) == (state, True), row.seen
    assert outcome.status["exit_code"] == code, row.seen
    no_step_is_left(job)
    return outcome


def no_step_is_left(job: Running, nodes: int = 3) -> None:
    eventually(lambda: not job.bench.cluster.step_ids(job.job_id), 20, "steps are left")
    following = job.bench.drive(run="echo next", job_id="next", nodes=nodes)
    assert (following.code, following.status["state"]) == (0, "SUCCEEDED"), following.output


def srun_of(job: Running, step: str) -> str:
    """The pid, on the driver's node, of the srun of `run` or `setup`."""

    def look() -> str | None:
        path = job.job_directory / protocol.EVENTS_NAME
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return next((str(event["pid"]) for event in events if event.get("step") == step), None)

    return eventually(look, 30, f"the srun of the {step} step")


def signal_executor(job: Running, node: str, number: int, step: str = "run") -> None:
    """Signal the executor of a step on a node, and nothing else."""

    def look() -> list[int]:
        found = [p for p in job.bench.cluster.processes(node) if f"--launch-dir={job.job_directory}/" in p.cmdline]
        programs = [p for p in found if not p.cmdline.startswith("srun")]
        return [p.pid for p in programs if ("--is-setup" in p.cmdline.split()) == (step == "setup")]

    for pid in eventually(look, 20):
        os.kill(pid, number)


@pytest.mark.parametrize(
    "step, phase", [("run", "waiting"), ("run", "setup"), ("setup", "setup"), ("run", "running"), ("run", "barrier")]
)
def test_an_srun_is_killed(bench: Bench, fault: Fault, step: str, phase: str) -> None:
    row = fault(f"the srun of the {step} step is killed with -9; phase: {phase}")
    job = begin(bench, phase, "sleep 4401")
    row.injected()
    bench.cluster.run(job.status()["driver"]["host"], ["kill", "-KILL", srun_of(job, step)])
    finish(row, job, "sleep 4401", "FAILED_DRIVER", "srun was killed by signal 9", 125)


def test_srun_is_terminated(bench: Bench, fault: Fault) -> None:
    row = fault("the srun of the run step gets TERM from somebody")
    job = begin(bench, "running", "sleep 4402")
    row.injected()
    bench.cluster.run(job.status()["driver"]["host"], ["kill", "-TERM", srun_of(job, "run")])
    finish(row, job, "sleep 4402", "CANCELLED", "CANCELLED AT", 143)


@pytest.mark.parametrize("phase", ["waiting", "setup", "running", "barrier"])
def test_the_driver_is_killed_as_a_batch_script(bench: Bench, fault: Fault, phase: str) -> None:
    row = fault(f"the driver, a batch script, is killed with -9; phase: {phase}")
    job = begin(bench, phase, "sleep 4403", secrets={"TOKEN": "s3cr3t"})
    row.injected()
    kill(job, "driver")
    outcome = job.wait()
    row.saw(f"Slurm: FAILED, signal 9; status.json keeps {outcome.status['state']}", outcome.code)
    row.left = A_DEAD_DRIVERS_FILES
    assert outcome.code == 137 and outcome.status["state"] not in protocol.TERMINAL_STATES
    assert not (job.job_directory / protocol.EXIT_CODE_NAME).exists()
    eventually(lambda: not bench.left_behind("sleep 4403"), 5)
    secrets = [path for path in job.job_directory.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]
    assert not [path for path in secrets if path.stat().st_mode & 0o077]
    no_step_is_left(job)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["waiting", "setup", "running"])
def test_the_driver_is_killed_where_slurm_does_not_notice(bench: Bench, fault: Fault, phase: str) -> None:
    row = fault(f"the driver, started by hand in an allocation, is killed with -9; phase: {phase}")
    held = bench.batch("srun --exclusive --mem=0 -c1 sleep 8; sleep 300" if phase == "waiting" else "sleep 300")
    setup = "echo up; exec sleep 4404" if phase == "setup" else None
    script = render(bench, "echo up; exec sleep 4404", setup, grace_s=2.0, liveness_timeout_s=12.0)
    job = Running(bench, held, "job")
    bench.cluster.wait_state(held, "RUNNING")
    if phase == "waiting":
        eventually(lambda: any("batch" not in step for step in bench.cluster.step_ids(held)))
    driver = by_hand(bench, held, script)
    srun_of(job, "run") if phase == "waiting" else until_up(job, phase)
    row.injected()
    kill(job, "driver")
    driver.wait()
    eventually(lambda: all("batch" in step for step in bench.cluster.step_ids(held)), 60, "its steps have ended")
    said = (bench.directory / "by-hand.out").read_text()
    words = next((line for line in said.splitlines() if "driver has not been heard of" in line), "")
    row.saw(words.split("): ")[-1], driver.returncode)
    row.left = A_DEAD_DRIVERS_FILES
    assert words and not bench.left_behind("sleep 4404")
    assert by_hand(bench, held, render(bench, "true")).wait(60) == 0
    assert job.status()["state"] == "SUCCEEDED"
    bench.cluster.run("ctl", ["scancel", str(held)])


def test_the_driver_is_stopped_for_a_while(bench: Bench, fault: Fault) -> None:
    row = fault("the driver is stopped for 3 s (SIGSTOP, SIGCONT)")
    job = bench.submit(run="echo up; until [ -e end ]; do sleep 0.1; done")
    until_up(job)
    kill(job, "driver", "STOP")
    row.injected()
    time.sleep(3)
    kill(job, "driver", "CONT")
    (bench.directory / "end").touch()
    finish(row, job, "", "SUCCEEDED", "", 0)


@pytest.mark.parametrize(
    "rank, step, phase, state",
    [
        (0, "run", "running", "FAILED"),
        (1, "run", "running", "FAILED"),
        (2, "run", "setup", "FAILED"),
        (0, "setup", "setup", "FAILED_SETUP"),
        (1, "run", "barrier", "FAILED"),
    ],
)
def test_an_executor_is_killed(bench: Bench, fault: Fault, rank: int, step: str, phase: str, state: str) -> None:
    row = fault(f"the executor of rank {rank} of the {step} step is killed with -9; phase: {phase}")
    job = begin(bench, phase, "sleep 4405")
    row.injected()
    signal_executor(job, NODES[rank], signal.SIGKILL, step)
    name = protocol.node_name(rank)
    finish(row, job, "sleep 4405", state, f"rank {rank} on {name} was killed before it could say why", 137)


@pytest.mark.parametrize("how", ["scancel JOB", "TERM to the driver"])
def test_a_stopped_script_is_cancelled(bench: Bench, fault: Fault, how: str) -> None:
    row = fault(f"the script of one rank is stopped (SIGSTOP), then {how}")
    job = begin(bench, "running", "sleep 4406")
    for process in bench.cluster.processes("n2"):
        if process.cmdline == "sleep 4406":
            os.kill(process.pid, signal.SIGSTOP)
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)]) if how == "scancel JOB" else kill(job, "driver", "TERM")
    finish(row, job, "sleep 4406", "CANCELLED", "cancelled by signal 15", 143)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["its executor is stopped (SIGSTOP)", "its interpreter hangs at the start"])
def test_a_rank_never_reports(bench: Bench, fault: Fault, what: str) -> None:
    row = fault(f"a rank never reports: {what}; the others are done")
    fields: dict[str, Any] = {"grace_s": 2.0, "liveness_timeout_s": 8.0}
    if "interpreter" in what:
        hanging = bench.directory / "python"
        hanging.write_text(f'#!/bin/bash\n[ $(hostname) = n2 ] && exec sleep 4407\nexec {sys.executable} "$@"\n')
        hanging.chmod(0o755)
        row.injected()
        job = bench.submit(run="echo up", python=str(hanging), **fields)
    else:
        job = bench.submit(run="echo up; until [ -e end ]; do sleep 0.1; done", **fields)
        until_up(job)
        signal_executor(job, "n2", signal.SIGSTOP)
        row.injected()
        (bench.directory / "end").touch()
    outcome = finish(row, job, "sleep 4407", "FAILED", "has not been heard of for", 137, bound_s=60)
    assert "rank 1 " in outcome.status["reason"]


def test_a_stuck_setup_is_cancelled(bench: Bench, fault: Fault) -> None:
    row = fault("the setup step is stuck and ignores TERM, then scancel JOB")
    job = bench.submit(run="touch begun", setup="trap '' TERM; echo up; exec sleep 4408", grace_s=1.0)
    until_up(job, "setup")
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    finish(row, job, "sleep 4408", "CANCELLED", "cancelled by signal 15", 143)
    assert not (bench.directory / "begun").exists()


@pytest.mark.parametrize(
    "what, phase, state, words, code",
    [
        ("JOB.0, the run step", "running", "CANCELLED", "CANCELLED AT", 143),
        ("JOB.1, the setup step", "setup", "FAILED_SETUP", "CANCELLED AT", 143),
        ("JOB.0, the run step", "setup", "CANCELLED", "CANCELLED AT", 143),
        ("--batch --signal=TERM JOB", "running", "CANCELLED", "cancelled by signal 15", 143),
    ],
)
def test_a_part_is_cancelled(
    bench: Bench, fault: Fault, what: str, phase: str, state: str, words: str, code: int
) -> None:
    row = fault(f"scancel {what}; phase: {phase}")
    job = begin(bench, phase, "sleep 4409")
    row.injected()
    bench.cluster.run("ctl", ["scancel", *what.replace("JOB", str(job.job_id)).split(",")[0].split()])
    finish(row, job, "sleep 4409", state, words, code)
