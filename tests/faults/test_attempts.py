"""Requeues, preemption, and whatever else makes a job run more than once."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from codegen import Job
from executor import protocol
from executor.shared import SignalFile, write_record
from tests.bench import CHECKOUT, Bench, Running, eventually
from tests.faults.conftest import Fault
from tests.minislurm.fixtures import BootCluster

KIND = "Requeue and attempts"
TWICE = "echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 0 ] && exec sleep %d; exit 0"
PREEMPTION = {
    "partitions": "PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=2\n"
    "PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
    "extra_conf": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE",
}


def requeue(job: Running) -> None:
    job.bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])
    eventually(lambda: job.status().get("state") == "PENDING", 20)


@pytest.mark.parametrize("moment", ["in setup", "while the scripts run"])
def test_a_requeue_runs_the_job_again_from_a_clean_start(bench: Bench, fault: Fault, moment: str) -> None:
    row = fault(f"scontrol requeue {moment}")
    setup = "[ $GANGRUN_ATTEMPT = 0 ] && { touch in-setup; exec sleep 4411; }; exit 0" if moment == "in setup" else None
    job = bench.submit(run=TWICE % 4411, setup=setup, sbatch="--requeue", nodes=2)
    eventually(lambda: (bench.directory / "in-setup").exists() or job.log("1-worker1.log"))
    row.injected()
    requeue(job)
    outcome = job.wait()
    assert (outcome.code, outcome.status["attempt"]) == (0, 1)
    assert outcome.log("1-worker1.log").endswith("attempt 1\n")
    row.ended(outcome, bench, "sleep 4411")


def test_an_attempt_believes_no_file_of_an_earlier_one(bench: Bench, fault: Fault) -> None:
    row = fault("signals, records, status and exit code of an earlier attempt of the same job and step ids lie there")
    job_id = bench.batch("sleep 0.1", 1)  # the next job gets the next id
    stale = protocol.Launch(protocol.job_directory(str(bench.directory), str(job_id + 1), "job") + "/attempt-0")
    for directory in (stale.records(False), stale.records(True)):
        os.makedirs(directory)
    for path, word in ((stale.alloc, "go"), (stale.setup_done, "go"), (stale.gang, "done")):
        SignalFile(path).fire(word, json.dumps({"nodes": "n4", "step": "1.0"}))
    write_record(stale.record(0), {"state": "done", "code": 0})
    job = bench.submit(run="test -e set-up && echo in order", setup="sleep 0.5; touch set-up")
    if job.job_id != job_id + 1:
        pytest.skip("another test took the job id")
    row.injected()
    outcome = job.wait()
    assert outcome.code == 0 and outcome.log("2-worker2.log") == "in order\n"
    row.saw("SUCCEEDED: nothing of it is believed; the old directory is taken away", outcome.code)
    row.check_nothing_left(bench)


def test_preemption_gives_a_term_its_grace_and_another_attempt(
    own_cluster: BootCluster, shared_dir, fault: Fault
) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(own_cluster(nodes=2, **PREEMPTION), shared_dir)
    row = fault("preemption with PreemptMode=REQUEUE and GraceTime=2 by a job of higher priority")
    shutil.copytree(CHECKOUT / "examples", bench.directory / "examples")
    job = bench.batch("exec gangrun run --log-dir=logs examples/resume.yaml", 2, "--requeue --exclusive")
    run = Running(bench, job, "run-1")
    eventually(lambda: all("from step 0" in run.log(name) for name in ("0-head.log", "1-worker1.log")), 20)
    row.injected()
    bench.cluster.run("ctl", ["srun", "--partition=high", "--nodes=2", "--exclusive", "true"], cwd="/")
    bench.cluster.wait_state(job, "COMPLETED", timeout_s=90)
    log = run.log("0-head.log")
    assert log.count("saved step") == 1 and "attempt 1: from step" in log and "result " in log
    status = json.loads(next((bench.directory / ".gangrun").glob("*/run-1/status.json")).read_text())
    row.saw(
        f"{status['state']}: attempt 1 goes on from the checkpoint that attempt 0 wrote on TERM", status["exit_code"]
    )
    row.check_nothing_left(bench)


def result_of(bench: Bench, requeues: int) -> str:
    shutil.copytree(CHECKOUT / "examples", bench.directory / "examples", dirs_exist_ok=True)
    job = bench.batch(f"exec gangrun run --log-dir=logs-{requeues} examples/resume.yaml", 2, "--requeue")
    log = bench.directory / f"logs-{requeues}" / "0-head.log"
    for attempt in range(requeues):
        eventually(lambda at=attempt: f"attempt {at}: from step" in (log.read_text() if log.exists() else ""), 30)
        time.sleep(1.5)
        bench.cluster.run("ctl", ["scontrol", "requeue", str(job)])
    bench.cluster.wait_state(job, "COMPLETED", timeout_s=90)
    return log.read_text()


@pytest.mark.slow
def test_a_training_loop_survives_two_requeues_with_the_same_result(bench: Bench, fault: Fault) -> None:
    row = fault("examples/resume.yaml requeued twice in the middle of its loop")
    undisturbed = result_of(bench, 0)
    row.injected()
    disturbed = result_of(bench, 2)
    assert disturbed.count("saved step") == 2 and "attempt 2: from step" in disturbed
    assert disturbed.splitlines()[-1] == undisturbed.splitlines()[-1]
    row.saw("SUCCEEDED: the same result as an undisturbed run", 0)
    row.check_nothing_left(bench)


def test_a_step_by_hand_does_not_deadlock_after_a_requeue(bench: Bench, fault: Fault) -> None:
    row = fault("a batch script with the executor by hand is requeued; its step has the same ids again")
    script = "[ $SKYPILOT_NODE_RANK = 0 ] && sleep 1; echo done $GANGRUN_ATTEMPT"
    body = f'{bench.executor(script, srun="-N2")}\n[ -n "$SLURM_RESTART_COUNT" ] || {{ touch once; sleep 4412; }}'
    job = bench.batch(body, 2, "--requeue")
    eventually((bench.directory / "once").exists)
    row.injected()
    bench.cluster.run("ctl", ["scontrol", "requeue", str(job)])
    bench.cluster.wait_state(job, "COMPLETED", timeout_s=60)
    logs = [(bench.directory / "logs" / name).read_text() for name in ("0-head.log", "1-worker1.log")]
    assert all(log.startswith("done 0\n") and log.endswith("done 1\n") for log in logs)
    row.saw("both attempts' logs in full; the step ends with code 0", 0)
    row.check_nothing_left(bench, "sleep 4412")


def test_a_driver_run_twice_in_one_allocation_starts_afresh(bench: Bench, fault: Fault) -> None:
    row = fault("the same driver run twice by hand in one allocation, the first time failing")
    job = Job(
        job_id="job",
        num_nodes=2,
        log_dir=str(bench.directory / "logs"),
        run="[ -e second ] && exit 0; exit 7",
        setup="true",
        python=bench.python,
    )
    driver = bench.write(job)
    row.injected()
    outcome = bench.run_batch(f"{bench.python} {driver}; echo first $?; touch second; exec {bench.python} {driver}", 2)
    assert "first 7" in outcome.plain and outcome.code == 0
    row.saw("FAILED with 7, then SUCCEEDED; each run in a directory of its own", outcome.code)
    row.check_nothing_left(bench)
