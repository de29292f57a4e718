"""Who is told to stop, when, how often, and by whom: the program gets one TERM, its grace, and never a success."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import kill
from tests.test_gang_on_slurm import TRAP

KIND = "Signals and grace"
Moment = tuple[dict[str, object], Callable[[Running], object]]


def started(job: Running, *logs: str) -> bool:
    return all(job.log(name) for name in logs)


MOMENTS: dict[str, Moment] = {
    "while setup runs": ({"run": "true", "setup": "echo up; sleep 4421"}, lambda job: job.log("setup-head.log")),
    "while the scripts run": ({"run": "echo up; sleep 4421"}, lambda job: started(job, "0-head.log", "1-worker1.log")),
    "while a rank is in the barrier": (
        {"run": "echo up; [ $SKYPILOT_NODE_RANK = 0 ] || sleep 4421"},
        lambda job: started(job, "0-head.log", "1-worker1.log") and time.sleep(0.3) is None,
    ),
    "as soon as the driver runs": (
        {"run": "sleep 4421", "setup": "sleep 4421"},
        lambda job: job.status().get("driver"),
    ),
}


def cancelled(outcome: Outcome) -> None:
    assert outcome.status["state"] == "CANCELLED", outcome.output
    assert outcome.status["exit_code"] in (129, 130, 131, 143)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("signal_name", ["TERM", "INT", "HUP"])
def test_a_signal_to_the_driver_ends_the_job_softly(bench: Bench, fault: Fault, moment: str, signal_name: str) -> None:
    row = fault(f"{signal_name} to the driver {moment}")
    fields, is_there = MOMENTS[moment]
    job = bench.submit(nodes=2, **fields)  # type: ignore[arg-type]
    eventually(lambda: is_there(job))
    row.injected()
    kill(job, "driver", signal_name)
    outcome = job.wait()
    cancelled(outcome)
    row.ended(outcome, bench, "sleep 4421")


def test_a_job_cancelled_twice_is_one_term_to_the_program(bench: Bench, fault: Fault) -> None:
    row = fault("scancel JOB twice within a second")
    job = bench.submit(run=TRAP.replace("EXIT", "0"), nodes=2)
    eventually(lambda: "ready" in job.log("0-head.log") and "ready" in job.log("1-worker1.log"))
    row.injected()
    for _ in range(2):
        bench.cluster.run("ctl", ["scancel", str(job.job_id)])
        time.sleep(0.3)
    outcome = job.wait()
    cancelled(outcome)
    assert (bench.directory / "mark-1").read_text() == "TERM\ncheckpoint\n"
    row.ended(outcome, bench)


@pytest.mark.parametrize("whom", ["step", "driver"])
def test_a_program_that_ignores_term_is_killed_when_its_grace_is_over(bench: Bench, fault: Fault, whom: str) -> None:
    row = fault(f"the program ignores TERM; TERM to the {whom}, grace 1 s")
    job = bench.submit(run="trap '' TERM; echo up; while :; do sleep 0.2; done # 4422", nodes=2, grace_s=1.0)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    row.injected()
    if whom == "driver":
        kill(job, "driver", "TERM")
    else:
        bench.cluster.run("ctl", ["scancel", "--signal=TERM", f"{job.job_id}.0"])
    outcome = job.wait()
    cancelled(outcome)
    assert outcome.codes == [137, 137]
    row.ended(outcome, bench)


def test_a_step_stopped_by_somebody_else_is_never_a_success(bench: Bench, fault: Fault) -> None:
    row = fault("scancel --signal=TERM JOB.STEP by somebody else; every program exits with 0")
    job = bench.submit(run=TRAP.replace("EXIT", "0"), nodes=2)
    eventually(lambda: "ready" in job.log("0-head.log") and "ready" in job.log("1-worker1.log"))
    row.injected()
    bench.cluster.run("ctl", ["scancel", "--signal=TERM", f"{job.job_id}.0"])
    outcome = job.wait()
    cancelled(outcome)
    row.ended(outcome, bench)


def test_a_failure_before_the_cancel_keeps_its_code(bench: Bench, fault: Fault) -> None:
    row = fault("rank 1 exits 5; the job is cancelled while its peers still save")
    slow = "trap 'sleep 1.5; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    job = bench.submit(run=f"[ $SKYPILOT_NODE_RANK = 1 ] && {{ sleep 0.5; exit 5; }}; {slow}", nodes=2)
    eventually(lambda: started(job, "0-head.log"))
    time.sleep(0.9)
    row.injected()
    kill(job, "driver", "TERM")
    outcome = job.wait()
    assert (outcome.status["state"], outcome.status["exit_code"]) == ("FAILED", 5), outcome.output
    row.ended(outcome, bench)


@pytest.mark.parametrize("how", ["to the batch script", "to the steps"])
def test_a_warning_reaches_every_program(bench: Bench, fault: Fault, how: str) -> None:
    row = fault(f"USR1 {how}, as sbatch --signal sends it before the time limit")
    trap = "trap 'echo warned, deadline $GANGRUN_DEADLINE; exit 0' USR1; echo up; while :; do sleep 0.1; done"
    job = bench.submit(run=trap, nodes=2, sbatch="--time=10")
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    row.injected()
    flag = ["--batch"] if how == "to the batch script" else []
    bench.cluster.run("ctl", ["scancel", *flag, "--signal=USR1", str(job.job_id)])
    outcome = job.wait()
    for name in ("0-head.log", "1-worker1.log"):
        warned = next(line for line in outcome.log(name).splitlines() if line.startswith("warned"))
        assert 0 < int(warned.split()[-1]) - time.time() < 700
    row.ended(outcome, bench)


@pytest.mark.parametrize("name", ["CONT", "USR2"])
def test_other_signals_harm_nobody(bench: Bench, fault: Fault, name: str) -> None:
    row = fault(f"{name} to the batch script and to the steps")
    job = bench.submit(run="trap : USR2; echo up; for i in $(seq 15); do sleep 0.1; done", nodes=2)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    row.injected()
    for flag in ([], ["--batch"]):
        bench.cluster.run("ctl", ["scancel", *flag, f"--signal={name}", str(job.job_id)])
    outcome = job.wait()
    assert outcome.status["state"] == "SUCCEEDED", outcome.output
    row.ended(outcome, bench)


@pytest.mark.slow
def test_a_time_limit_is_a_cancel_with_its_reason(bench: Bench, fault: Fault) -> None:
    row = fault("the job's time limit; every program saves and exits with 0")
    job = bench.submit(run=TRAP.replace("EXIT", "0"), nodes=2, sbatch="--time=1")
    row.injected()
    outcome = job.wait(timeout_s=150)
    cancelled(outcome)
    assert "DUE TO TIME LIMIT" in outcome.status["reason"]
    assert (bench.directory / "mark-0").read_text() == "TERM\ncheckpoint\n"
    row.ended(outcome, bench)


def test_a_cancel_while_the_run_step_waits_for_its_nodes(bench: Bench, fault: Fault) -> None:
    row = fault("the driver is told to stop while its run step waits for busy nodes")
    first = bench.write(bench.job(run="sleep 4423", job_id="first", num_nodes=2), "first")
    second = bench.write(bench.job(run="echo never", job_id="second", num_nodes=2), "second")
    body = (
        f"{bench.python} {first} & f=$!; sleep 1.5; {bench.python} {second} & s=$!; sleep 1.5; kill -TERM $s; wait $s\n"
    )
    body += "echo second ended with $?; kill -TERM $f; wait $f; echo first ended with $?"
    row.injected()
    outcome = bench.run_batch(body, 2)
    assert "second ended with 143" in outcome.plain and "first ended with 143" in outcome.plain, outcome.plain
    row.saw("CANCELLED: cancelled by signal 15", 143)
    row.check_nothing_left(bench, "sleep 4423")
