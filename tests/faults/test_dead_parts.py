"""Parts that die or get stuck."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from tests.bench import Bench, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.phases import End, begin, find_srun, finish, no_step_is_left, render, run_in_node, until_up
from tests.faults.rows import kill
from tests.minislurm.fixtures import BootCluster

KIND = "Dead and stuck parts"
UNTIL_END = "echo up; until [ -e end ]; do sleep 0.1; done"
NODE_LOSS_S = 90.0  # Slurm's ping cycle takes up to 28 s
A_DEAD_DRIVERS_FILES = "the attempt's directory, readable by its owner only"

# State, words and code of a job; what breaks, in which phase, on which node by which command.
SUCCEEDED = ("SUCCEEDED", "", 0)
SRUN_LOST = ("FAILED_DRIVER", "srun was killed by signal 9", 125)
CANCELLED = ("CANCELLED", "", 143)  # in slurmstepd's or in srun's words, whichever comes
BY_SIGNAL = ("CANCELLED", "cancelled by signal 15", 143)
LOST = [("FAILED", f"rank {rank} on {protocol.node_name(rank)} was killed", 137) for rank in range(3)]
BROKEN = [
    ("the srun of the run step is killed with -9", "waiting", "n1: kill -9 {srun run}", SRUN_LOST),
    ("the srun of the run step is killed with -9", "setup", "n1: kill -9 {srun run}", SRUN_LOST),
    ("the srun of the setup step is killed with -9", "setup", "n1: kill -9 {srun setup}", SRUN_LOST),
    ("the srun of the run step is killed with -9", "running", "n1: kill -9 {srun run}", SRUN_LOST),
    ("the srun of the run step is killed with -9", "barrier", "n1: kill -9 {srun run}", SRUN_LOST),
    ("the srun of the run step gets TERM", "running", "n1: kill -TERM {srun run}", ("CANCELLED", "", 143)),
    ("the executor of rank 0 is killed with -9", "running", "n1: kill -9 {run 0}", LOST[0]),
    ("the executor of rank 1 is killed with -9", "running", "n2: kill -9 {run 1}", LOST[1]),
    ("the executor of rank 2, which waits, is killed with -9", "setup", "n3: kill -9 {run 2}", LOST[2]),
    ("setup's executor of rank 0 is killed with -9", "setup", "n1: kill -9 {setup 0}", ("FAILED_SETUP", *LOST[0][1:])),
    ("the executor of rank 1, whose script is done, is killed with -9", "barrier", "n2: kill -9 {run 1}", LOST[1]),
    (
        "a script's program is killed with -9",
        "running",
        "n2: pkill -9 -xf {m}",
        ("FAILED", "worker1 failed first", 137),
    ),
    ("scancel JOB.0, the run step", "running", "ctl: scancel {job}.0", CANCELLED),
    ("scancel JOB.0, the run step", "setup", "ctl: scancel {job}.0", CANCELLED),
    ("scancel JOB.1, the setup step", "setup", "ctl: scancel {job}.1", ("FAILED_SETUP", *CANCELLED[1:])),
    ("TERM to the batch script only (scancel --batch)", "running", "ctl: scancel -b -s TERM {job}", BY_SIGNAL),
    ("scancel JOB before the run step has begun", "waiting", "ctl: scancel {job}", BY_SIGNAL),
]
OUTAGES = [
    ("slurmd of a worker is killed with -9, and started again", ("stop_slurmd", "n2", 9), ("start_slurmd", "n2")),
    ("the network link of a worker is cut, and mended", ("cut_link", "n2"), ("mend_link", "n2")),
    ("the controller is stopped, and started again", ("stop_controller",), ("start_controller",)),
]
STUCK = [("setup", "the setup step ignores TERM"), ("running", "the script of a rank is stopped (SIGSTOP)")]
LOSSES = [
    ("a worker loses its power", "n2", "power_off"),
    ("the head loses its power, the driver with it", "n1", "power_off"),
    ("a worker is cut off for ever", "n2", "cut_link"),
]


@pytest.mark.parametrize("words, phase, command, end", BROKEN)
def test_a_part_dies(bench: Bench, fault: Fault, words: str, phase: str, command: str, end: End) -> None:
    row = fault(f"{words}; phase: {phase}")
    job = begin(bench, phase, "sleep 4401")
    row.injected()
    run_in_node(command, job, "sleep 4401")
    finish(row, job, "sleep 4401", end)


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
    held = bench.batch("srun --exclusive --mem=0 -c1 sleep 8; sleep 120" if phase == "waiting" else "sleep 120")
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
    output_path = bench.directory / "by-hand.out"
    eventually(lambda: "the driver has not been heard of for" in output_path.read_text(), 90)
    eventually(lambda: all("batch" in step for step in bench.cluster.step_ids(held)), 60, "its steps have ended")
    lines = output_path.read_text().splitlines()
    row.saw(next((line.split("): ")[-1] for line in lines if "driver" in line), ""), driver.returncode)
    row.left = A_DEAD_DRIVERS_FILES
    assert not bench.left_behind("sleep 4404")
    assert "the driver has not been heard of for" in row.seen, lines
    bench.cluster.run("ctl", shlex.split(render(bench, "true")), **how)
    assert job.status()["state"] == "SUCCEEDED"
    bench.cluster.run("ctl", ["scancel", str(held)])


@pytest.mark.parametrize("phase, what", STUCK)
@pytest.mark.parametrize("how", ["ctl: scancel {job}", "n1: kill -TERM {driver}"])
def test_what_is_stuck_is_cancelled(bench: Bench, fault: Fault, phase: str, what: str, how: str) -> None:
    row = fault(f"{what}; then {'scancel JOB' if 'scancel' in how else 'TERM to the driver'}")
    job = begin(bench, phase, "sleep 4406", stubborn="trap '' TERM; " if phase == "setup" else "")
    if phase == "running":
        run_in_node("n2: pkill -STOP -xf {m}", job, "sleep 4406")
    row.injected()
    run_in_node(how, job, "sleep 4406")
    finish(row, job, "sleep 4406", BY_SIGNAL)


def test_the_driver_is_stopped_for_a_while(bench: Bench, fault: Fault) -> None:
    row = fault("the driver is stopped for 3 s (SIGSTOP, SIGCONT)")
    job = begin(bench, "running", "", run=UNTIL_END)
    row.injected()
    kill(job, "driver", "STOP")
    time.sleep(3)
    (bench.directory / "end").touch()
    kill(job, "driver", "CONT")
    finish(row, job, "", SUCCEEDED)


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
        run_in_node("n2: kill -STOP {run 1}", job, "")
    row.injected()
    (bench.directory / "end").touch()
    outcome = finish(row, job, "sleep 4407", ("FAILED", "has not been heard of for", 137), bound_s=60)
    assert "rank 1 " in outcome.status["reason"]


class TestOnAClusterOfItsOwn:
    @pytest.fixture
    def bench(self, own_cluster: BootCluster, shared_dir: Path) -> Bench:
        return Bench(own_cluster(slurmd_timeout_s=5), shared_dir)

    @pytest.mark.parametrize("words, break_it, mend_it", OUTAGES)
    def test_an_outage_of_3_s(self, bench: Bench, fault: Fault, words: str, break_it: Any, mend_it: Any) -> None:
        row = fault(f"{words} 3 s later")
        job = begin(bench, "running", "", run=UNTIL_END)
        row.injected()
        getattr(bench.cluster, break_it[0])(*break_it[1:])
        time.sleep(3)
        getattr(bench.cluster, mend_it[0])(*mend_it[1:])
        (bench.directory / "end").touch()
        finish(row, job, "", SUCCEEDED, bound_s=60)

    def test_slurmstepd_is_killed(self, bench: Bench, fault: Fault) -> None:
        row = fault("slurmstepd of the run step is killed with -9 on one node")
        job = begin(bench, "running", "sleep 4410")
        row.injected()
        run_in_node(r"n2: pkill -KILL -f slurmstepd:.\[{job}\.0\]", job, "")
        finish(row, job, "sleep 4410", ("FAILED_DRIVER", "rank 1 on worker1", 125), bound_s=60)

    @pytest.mark.slow
    @pytest.mark.parametrize("words, node, what", LOSSES)
    def test_a_node_is_lost(self, bench: Bench, fault: Fault, words: str, node: str, what: str) -> None:
        row = fault(f"{words}; job without --requeue")
        job = begin(bench, "running", "sleep 4411", sbatch="--no-requeue", liveness_timeout_s=20.0)
        row.injected()
        getattr(bench.cluster, what)(node)
        end = bench.cluster.wait_job(job.job_id, NODE_LOSS_S)
        if node == "n1":
            row.saw(f"Slurm: {end.state}; status.json keeps {job.status()['state']}", f"0:{end.signal}")
            row.left = A_DEAD_DRIVERS_FILES
            assert (end.state, job.status()["state"]) == ("NODE_FAIL", "RUNNING")
        else:
            job.wait_state(*protocol.TERMINAL_STATES)  # Slurm calls the job over before its driver has ended
            row.ended(job.wait(), bench)
            assert row.seen.startswith("FAILED_DRIVER: ") and row.code == "125", row.seen
            assert "Node failure on n2" in row.seen or "DUE TO NODE FAILURE" in row.seen
        if what == "cut_link":
            eventually(lambda: not bench.left_behind("sleep 4411"), 60, "the node that is cut off goes on")
        bench.cluster.mend_link(node) if what == "cut_link" else bench.cluster.power_on(node)
        bench.cluster.wait_idle()
        assert not bench.left_behind("sleep 4411")
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
    @pytest.mark.parametrize("phase, end", [("setup", BY_SIGNAL), ("running", BY_SIGNAL), ("running", SUCCEEDED)])
    def test_the_controller_is_down_at_the_end(self, bench: Bench, fault: Fault, phase: str, end: End) -> None:
        is_cancel = end == BY_SIGNAL
        what = "the driver gets TERM" if is_cancel else "the scripts and then the driver end"
        row = fault(f"the controller is down when {what}; phase: {phase}")
        job = begin(bench, phase, "sleep 4415", **({} if is_cancel else {"run": UNTIL_END}))
        bench.cluster.stop_controller()
        row.injected()
        kill(job, "driver", "TERM") if is_cancel else (bench.directory / "end").touch()
        eventually((job.job_directory / protocol.EXIT_CODE_NAME).exists, 90)
        eventually(lambda: not bench.left_behind("sleep 4415"), 20)
        bench.cluster.start_controller()
        finish(row, job, "sleep 4415", end, bound_s=120)

    @pytest.mark.slow
    @pytest.mark.parametrize("step, option", [("run", "--exclusive"), ("setup", "--overlap")])
    @pytest.mark.parametrize("is_back", [True, False])
    def test_no_controller_for_a_step(self, bench: Bench, fault: Fault, step: str, option: str, is_back: bool) -> None:
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
            job.wait_state(*protocol.TERMINAL_STATES, timeout_s=400)
        bench.cluster.start_controller()
        no_controller = ("FAILED_DRIVER", "Unable to contact slurm controller", 125)
        finish(row, job, "", SUCCEEDED if is_back else no_controller, bound_s=420)

    @pytest.mark.slow
    def test_the_time_limit(self, bench: Bench, fault: Fault) -> None:
        row = fault("the job's time limit is reached")
        job = begin(bench, "running", "sleep 4416", sbatch="--time=1")
        row.injected()
        finish(row, job, "sleep 4416", ("CANCELLED", "TIME LIMIT", 143), bound_s=120)
