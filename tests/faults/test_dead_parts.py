"""Parts that die or get stuck."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from codegen import Bundle, Job, render_driver
from executor import protocol
from executor.shared import read_record
from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import Row, kill
from tests.minislurm.fixtures import BootCluster

KIND = "Dead and stuck parts"
UNTIL_END = "echo up; until [ -e end ]; do sleep 0.1; done"
NODE_LOSS_S = 90.0  # Slurm's ping cycle takes up to 28 s
A_DEAD_DRIVERS_FILES = "the attempt's directory, readable by its owner only"

# What breaks, in which phase, and on which node by which command; then state, words and code of the job.
SRUN_LOST = ("FAILED_DRIVER", "srun was killed by signal 9", 125)
RANK_LOST = "was killed before it could say why"
CANCELLED = ("CANCELLED", "CANCELLED AT", 143)
BY_SIGNAL = ("CANCELLED", "cancelled by signal 15", 143)
BROKEN = [
    ("the srun of the run step is killed with -9", "waiting", "n1", "kill -9 {srun run}", *SRUN_LOST),
    ("the srun of the run step is killed with -9", "setup", "n1", "kill -9 {srun run}", *SRUN_LOST),
    ("the srun of the setup step is killed with -9", "setup", "n1", "kill -9 {srun setup}", *SRUN_LOST),
    ("the srun of the run step is killed with -9", "running", "n1", "kill -9 {srun run}", *SRUN_LOST),
    ("the srun of the run step is killed with -9", "barrier", "n1", "kill -9 {srun run}", *SRUN_LOST),
    ("the srun of the run step gets TERM", "running", "n1", "kill -TERM {srun run}", *CANCELLED),
    ("the executor of rank 0 is killed with -9", "running", "n1", "kill -9 {run 0}", "FAILED", "0 on head " + RANK_LOST, 137),
    ("the executor of rank 1 is killed with -9", "running", "n2", "kill -9 {run 1}", "FAILED", "1 on worker1 " + RANK_LOST, 137),
    ("the executor of rank 2 is killed with -9", "setup", "n3", "kill -9 {run 2}", "FAILED", "2 on worker2 " + RANK_LOST, 137),
    ("setup's executor of rank 0 is killed with -9", "setup", "n1", "kill -9 {setup 0}", "FAILED_SETUP", "0 on head " + RANK_LOST, 137),
    ("the executor of rank 1, whose script is done, is killed with -9", "barrier", "n2", "kill -9 {run 1}", "FAILED", "rank 1 on worker1 was killed", 137),
    ("the script of rank 1 is killed with -9", "running", "n2", "pkill -9 -x -f {marker}", "FAILED", "rank 1 on worker1 failed first (exit code 137, signal 9)", 137),
    ("scancel JOB.0, the run step", "running", "ctl", "scancel {job}.0", *CANCELLED),
    ("scancel JOB.0, the run step", "setup", "ctl", "scancel {job}.0", *CANCELLED),
    ("scancel JOB.1, the setup step", "setup", "ctl", "scancel {job}.1", "FAILED_SETUP", "CANCELLED AT", 143),
    ("scancel --batch --signal=TERM JOB: only the driver hears it", "running", "ctl", "scancel -b -s TERM {job}", *BY_SIGNAL),
    ("scancel JOB before the run step has begun", "waiting", "ctl", "scancel {job}", *BY_SIGNAL),
]  # fmt: skip


def begin(bench: Bench, phase: str, marker: str, **fields: Any) -> Running:
    """A job of three nodes that has come to `waiting` (for its nodes), `setup`, `running` or `barrier` (rank 1)."""
    fields = {"grace_s": 2.0, "run": f"echo up; exec {marker}", **fields}
    if phase == "waiting":
        holder = "srun -N3 -n3 --exclusive --mem=0 -c1 bash -c 'touch held; exec sleep 4499' & "
        driver = render(bench, **fields)
        job = Running(bench, bench.batch(holder + f"until [ -e held ]; do sleep 0.1; done; exec {driver}"), "job")
        find_srun(job, "run")
        return job
    if phase == "setup":
        fields["setup"] = f"echo up; exec {marker}"
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


def filled(command: str, job: Running, marker: str) -> list[str]:
    """The command with the pids and names that it asks for."""
    for step in ("run", "setup"):
        if f"srun {step}" in command:
            command = command.replace("{srun %s}" % step, find_srun(job, step))
        for rank in (rank for rank in range(3) if "{%s %d}" % (step, rank) in command):
            pid = eventually(lambda: record(job, step, rank).get("pid"))  # noqa: B023
            command = command.replace("{%s %d}" % (step, rank), str(pid))
    return [word.replace("{job}", str(job.job_id)).replace("{marker}", marker) for word in command.split()]


def finish(row: Row, job: Running, marker: str, state: str, words: str, code: int, bound_s: float = 30) -> Outcome:
    """The job ends in time with the state, the words and the code; nothing is left; the next one finds its nodes."""
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


@pytest.mark.parametrize("words, phase, node, command, state, reason, code", BROKEN)
def test_a_part_dies(
    bench: Bench, fault: Fault, words: str, phase: str, node: str, command: str, state: str, reason: str, code: int
) -> None:
    row = fault(f"{words}; phase: {phase}")
    job = begin(bench, phase, "sleep 4401")
    argv = filled(command, job, "sleep 4401")
    row.injected()
    bench.cluster.run(node, argv)
    finish(row, job, "sleep 4401", state, reason, code)


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
    row = fault(f"the driver, started by hand from the login node, is killed with -9; phase: {phase}")
    held = bench.batch("srun --exclusive --mem=0 -c1 sleep 8; sleep 300" if phase == "waiting" else "sleep 300")
    setup = "echo up; exec sleep 4404" if phase == "setup" else None
    script = render(bench, "echo up; exec sleep 4404", setup, grace_s=2.0, liveness_timeout_s=12.0)
    job = Running(bench, held, "job")
    bench.cluster.wait_state(held, "RUNNING")
    if phase == "waiting":
        eventually(lambda: any("batch" not in step for step in bench.cluster.step_ids(held)))
    environ = {"SLURM_JOB_ID": str(held), "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_JOB_NUM_NODES": "3"}
    with (bench.directory / "by-hand.out").open("w") as output:
        how: dict[str, Any] = {"cwd": bench.directory, "env": {**environ, "HOME": str(bench.directory)}}
        driver = bench.cluster.popen("ctl", shlex.split(script), stdout=output, stderr=output, **how)
    find_srun(job, "run") if phase == "waiting" else until_up(job, phase)
    row.injected()
    kill(job, "driver")
    driver.wait()
    eventually(lambda: all("batch" in step for step in bench.cluster.step_ids(held)), 60, "its steps have ended")
    lines = (bench.directory / "by-hand.out").read_text().splitlines()
    row.saw(next((line.split("): ")[-1] for line in lines if "driver" in line), ""), driver.returncode)
    row.left = A_DEAD_DRIVERS_FILES
    assert not bench.left_behind("sleep 4404")
    assert "the driver has not been heard of for" in row.seen, lines
    bench.cluster.run("ctl", shlex.split(render(bench, "true")), **how)
    assert job.status()["state"] == "SUCCEEDED"
    bench.cluster.run("ctl", ["scancel", str(held)])


@pytest.mark.parametrize("what", ["its setup ignores TERM", "a script is stopped (SIGSTOP)"])
@pytest.mark.parametrize("how", ["scancel JOB", "TERM to the driver"])
def test_what_is_stuck_is_cancelled(bench: Bench, fault: Fault, what: str, how: str) -> None:
    row = fault(f"a job is stuck, {what}; then {how}")
    if "setup" in what:
        job = begin(bench, "setup", "sleep 4406", setup="trap '' TERM; echo up; exec sleep 4406")
    else:
        job = begin(bench, "running", "sleep 4406")
        bench.cluster.run("n2", ["pkill", "-STOP", "-x", "-f", "sleep 4406"])
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)]) if how == "scancel JOB" else kill(job, "driver", "TERM")
    finish(row, job, "sleep 4406", *BY_SIGNAL)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["its executor is stopped (SIGSTOP)", "its interpreter hangs at the start"])
def test_a_rank_never_reports(bench: Bench, fault: Fault, what: str) -> None:
    row = fault(f"a rank never reports: {what}; the others are done")
    fields: dict[str, Any] = {"run": UNTIL_END, "grace_s": 2.0, "liveness_timeout_s": 8.0}
    if "interpreter" in what:
        hanging = bench.directory / "python"
        hanging.write_text(f'#!/bin/bash\n[ $(hostname) = n2 ] && exec sleep 4407\nexec {sys.executable} "$@"\n')
        hanging.chmod(0o755)
        job = bench.submit(python=str(hanging), **fields)
    else:
        job = bench.submit(**fields)
        until_up(job)
        bench.cluster.run("n2", filled("kill -STOP {run 1}", job, ""))
    row.injected()
    (bench.directory / "end").touch()
    outcome = finish(row, job, "sleep 4407", "FAILED", "has not been heard of for", 137, bound_s=60)
    assert "rank 1 " in outcome.status["reason"]


HARMLESS = [
    ("slurmd of a worker is killed with -9 and started again 2 s later", "slurmd"),
    ("the network link of a worker is cut for 3 s", "link"),
    ("the driver is stopped for 3 s (SIGSTOP, SIGCONT)", "driver"),
    ("the controller is down for 3 s while the scripts run", "controller"),
]


class TestOnAClusterOfItsOwn:
    @pytest.fixture
    def bench(self, own_cluster: BootCluster, shared_dir: Path) -> Bench:
        return Bench(own_cluster(slurmd_timeout_s=5), shared_dir)

    @pytest.mark.parametrize("words, part", HARMLESS)
    def test_a_short_outage_does_no_harm(self, bench: Bench, fault: Fault, words: str, part: str) -> None:
        row, cluster = fault(words), bench.cluster
        job = begin(bench, "running", "", run=UNTIL_END)
        row.injected()
        break_it = {
            "slurmd": lambda: cluster.stop_slurmd("n2", signal.SIGKILL),
            "link": lambda: cluster.cut_link("n2"),
            "driver": lambda: kill(job, "driver", "STOP"),
            "controller": lambda: cluster.stop_controller(signal.SIGKILL),
        }
        mend_it = {
            "slurmd": lambda: cluster.start_slurmd("n2"),
            "link": lambda: cluster.mend_link("n2"),
            "driver": lambda: kill(job, "driver", "CONT"),
            "controller": lambda: cluster.start_controller(),
        }
        break_it[part]()
        time.sleep(3)
        mend_it[part]()
        (bench.directory / "end").touch()
        finish(row, job, "", "SUCCEEDED", "", 0, bound_s=60)

    def test_slurmstepd_is_killed(self, bench: Bench, fault: Fault) -> None:
        row = fault("slurmstepd of the run step is killed with -9 on one node")
        job = begin(bench, "running", "sleep 4410")
        row.injected()
        bench.cluster.run("n2", ["pkill", "-KILL", "-f", rf"slurmstepd: \[{job.job_id}\.0\]"])
        finish(row, job, "sleep 4410", "FAILED_DRIVER", "n2", 125, bound_s=60)

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["power_off", "cut_link"])
    def test_a_worker_is_lost(self, bench: Bench, fault: Fault, what: str) -> None:
        is_off = what == "power_off"
        row = fault(f"a worker {'loses its power' if is_off else 'is cut off for ever'}; job without --requeue")
        job = begin(bench, "running", "sleep 4411", sbatch="--no-requeue", liveness_timeout_s=20.0)
        row.injected()
        getattr(bench.cluster, what)("n2")
        outcome = job.wait(NODE_LOSS_S)
        row.ended(outcome, bench)
        assert (outcome.status["state"], outcome.status["exit_code"]) == ("FAILED_DRIVER", 125), row.seen
        assert "n2" in row.seen or "DUE TO NODE FAILURE" in row.seen
        eventually(lambda: not left_on(bench, "sleep 4411"), 60, "the node that is cut off runs on")
        bench.cluster.power_on("n2") if is_off else bench.cluster.mend_link("n2")
        bench.cluster.wait_idle()
        no_step_is_left(job)

    @pytest.mark.slow
    def test_the_head_is_lost(self, bench: Bench, fault: Fault) -> None:
        row = fault("the head node loses its power, the driver with it; job without --requeue")
        job = begin(bench, "running", "sleep 4412", sbatch="--no-requeue")
        row.injected()
        bench.cluster.power_off("n1")
        end = bench.cluster.wait_job(job.job_id, NODE_LOSS_S)
        row.saw(f"Slurm: {end.state}; status.json keeps {job.status()['state']}")
        row.left = A_DEAD_DRIVERS_FILES
        assert (end.state, job.status()["state"]) == ("NODE_FAIL", "RUNNING")
        bench.cluster.power_on("n1")
        bench.cluster.wait_idle()
        assert not bench.left_behind("sleep 4412")
        no_step_is_left(job)

    @pytest.mark.slow
    @pytest.mark.parametrize("node, role", [("n1", "the head"), ("n2", "a worker")])
    def test_a_node_is_lost_and_the_job_requeued(self, bench: Bench, fault: Fault, node: str, role: str) -> None:
        row, cluster = fault(f"{role} loses its power, job with --requeue; the node comes back"), bench.cluster
        run = "echo up; [ $GANGRUN_ATTEMPT = 0 ] || exit 0; exec sleep 4413"
        job = begin(bench, "running", "sleep 4413", run=run, sbatch="--requeue")
        row.injected()
        cluster.power_off(node)
        eventually(lambda: cluster.job(job.job_id).restarts == 1, NODE_LOSS_S, "the restart")
        eventually(lambda: cluster.node_states()[node].startswith("down"), NODE_LOSS_S)
        assert not (job.job_directory / protocol.EXIT_CODE_NAME).exists()
        cluster.power_on(node)
        outcome = job.wait(120)
        row.saw(f"{outcome.status['state']} in attempt {outcome.status['attempt']}", outcome.code)
        assert (outcome.status["state"], outcome.status["attempt"], outcome.code) == ("SUCCEEDED", 1, 0)
        assert not bench.left_behind("sleep 4413")
        no_step_is_left(job)

    @pytest.mark.slow
    @pytest.mark.parametrize("phase", ["setup", "running"])
    def test_the_controller_is_down_at_a_cancel(self, bench: Bench, fault: Fault, phase: str) -> None:
        row = fault(f"the controller is down when the driver gets TERM; phase: {phase}")
        job = begin(bench, phase, "sleep 4415")
        bench.cluster.stop_controller()
        row.injected()
        kill(job, "driver", "TERM")
        job.wait_state("CANCELLED", timeout_s=90)
        eventually(lambda: not bench.left_behind("sleep 4415"), 20)
        bench.cluster.start_controller()
        finish(row, job, "sleep 4415", *BY_SIGNAL, bound_s=120)

    @pytest.mark.slow
    def test_the_controller_is_down_at_the_end(self, bench: Bench, fault: Fault) -> None:
        row = fault("the controller is down from before the scripts' end to after the driver's")
        job = begin(bench, "running", "", run=UNTIL_END)
        bench.cluster.stop_controller()
        row.injected()
        (bench.directory / "end").touch()
        eventually((job.job_directory / protocol.EXIT_CODE_NAME).exists, 60)
        bench.cluster.start_controller()
        finish(row, job, "", "SUCCEEDED", "", 0, bound_s=120)

    @pytest.mark.slow
    @pytest.mark.parametrize("step, option", [("run", "--exclusive"), ("setup", "--overlap")])
    @pytest.mark.parametrize("is_back", [True, False])
    def test_the_controller_is_down_when_a_step_is_created(
        self, bench: Bench, fault: Fault, step: str, option: str, is_back: bool
    ) -> None:
        row = fault(f"the controller is down when the {step} step is created, {'for 15 s' if is_back else 'for ever'}")
        shim = bench.directory / "srun"
        wait = "touch asked; until [ -e go ]; do sleep 0.1; done"
        shim.write_text(f'#!/bin/bash\ncase "$*" in *" {option} "*) {wait};; esac\nexec /usr/bin/srun "$@"\n')
        shim.chmod(0o755)
        bench.environ["PATH"] = f"{bench.directory}:{bench.environ['PATH']}"
        job = bench.submit(run="echo up", setup="echo up", grace_s=2.0)
        eventually((bench.directory / "asked").exists, 30)
        bench.cluster.stop_controller()
        row.injected()
        (bench.directory / "go").touch()
        if is_back:
            time.sleep(15)
        else:
            job.wait_state("FAILED_DRIVER", timeout_s=400)
        bench.cluster.start_controller()
        end = ("SUCCEEDED", "", 0) if is_back else ("FAILED_DRIVER", "Unable to contact slurm controller", 125)
        finish(row, job, "", *end, bound_s=420)

    @pytest.mark.slow
    def test_the_time_limit(self, bench: Bench, fault: Fault) -> None:
        row = fault("the job's time limit is reached")
        job = begin(bench, "running", "sleep 4416", sbatch="--time=1")
        row.injected()
        finish(row, job, "sleep 4416", "CANCELLED", "TIME LIMIT", 143, bound_s=120)


def left_on(bench: Bench, marker: str) -> list[str]:
    """As `left_behind`, of the nodes that are on."""
    on = [node for node in bench.cluster.nodes if bench.cluster.is_on(node)]
    return [p.cmdline for node in on for p in bench.cluster.processes(node) if marker in p.cmdline]
