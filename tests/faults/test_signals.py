"""Who is told to stop, when, how often, and by whom: the program gets one TERM, its grace, and never a success."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import kill
from tests.minislurm.fixtures import BootCluster
from tests.test_gang_on_slurm import TRAP

KIND = "Signals and grace"
ORPHANS = "bash -c '(setsid sleep 4424 </dev/null >/dev/null 2>&1 &)'; (sleep 4425 </dev/null >/dev/null 2>&1 &)"
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


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["setup", "the scripts"])
def test_slurms_own_warning(bench: Bench, fault: Fault, phase: str) -> None:
    """martius-lab/cluster_utils#64, VectorInstitute/FL4Health#155: USR1 reached, or ended, the batch shell only."""
    row = fault(f"`sbatch --time=2 --signal=B:USR1@60`; it comes while {phase} run")
    trap = "trap 'echo warned; exit 0' USR1; echo up; while :; do sleep 0.1; done"
    quiet = "trap 'echo warned' USR1; for i in $(seq 450); do sleep 0.2; done"
    fields = {"run": trap} if phase != "setup" else {"run": "echo mine", "setup": quiet}
    job = bench.submit(nodes=2, sbatch="--time=2 --signal=B:USR1@60", **fields)
    row.injected()
    outcome = job.wait(150)
    assert outcome.code == 0 and outcome.status["state"] == "SUCCEEDED", outcome.output
    last = [outcome.log(name).splitlines()[-1] for name in ("0-head.log", "1-worker1.log")]
    assert last == (["mine"] * 2 if phase == "setup" else ["warned"] * 2)
    row.ended(outcome, bench)


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_warning_to_a_program_under_a_script_without_a_trap(bench: Bench, fault: Fault, name: str) -> None:
    """martius-lab/cluster_utils#64, #84: the shell got the signal, and died of it; its Python program never knew."""
    row = fault(f"{name} to the batch script; the script traps nothing, its Python program, not exec'ed, handles it")
    program = f"""python3 -u - <<'END'
import signal, time
got = []
signal.signal(signal.SIG{name}, lambda *_: got.append(1))
print("up")
while not got: time.sleep(0.05)
time.sleep(1)
print("saved")
END
echo after"""
    job = bench.submit(run=program, nodes=2)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    row.injected()
    bench.cluster.run("ctl", ["scancel", "--batch", f"--signal={name}", str(job.job_id)])
    outcome = job.wait()
    row.ended(outcome, bench)
    assert outcome.code == 0 and outcome.log("1-worker1.log") == "up\nsaved\nafter\n", outcome.output


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


@pytest.mark.parametrize("proctrack", ["cgroup", "linuxproc", "pgid"])
def test_what_hides_from_its_parents_ends_with_the_job(
    own_cluster: BootCluster, shared_dir: Path, fault: Fault, proctrack: str
) -> None:
    """GaTech-RL2/EgoVerse#682, sgl-project/sglang#23627, PrimeIntellect-ai/prime-rl#2331: orphans keep the GPUs."""
    row = fault(f"children in sessions of their own, re-parented, with no output; proctrack/{proctrack}; scancel JOB")
    bench = Bench(own_cluster(nodes=2, gpus=0, proctrack=proctrack), shared_dir)
    assert bench.drive(run=f"{ORPHANS}; sleep 0.3", nodes=2, job_id="first").code == 0
    eventually(lambda: not bench.left_behind("sleep 442"), 5, "after a normal end")
    job = bench.submit(run=f"{ORPHANS}; echo up; exec sleep 4426", nodes=2)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    eventually(lambda: len(bench.left_behind("sleep 442")) >= 6, 10, "all of them are there")
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    outcome = job.wait()
    cancelled(outcome)
    row.ended(outcome, bench, "sleep 442")


@pytest.mark.parametrize("proctrack", ["cgroup", "linuxproc", "pgid"])
def test_a_stubborn_program_ends_with_the_job(
    own_cluster: BootCluster, shared_dir: Path, fault: Fault, proctrack: str
) -> None:
    """skypilot-org/skypilot#3898, #233: cancelled, they said, and the process was still there."""
    row = fault(f"the program ignores TERM, its grace is longer than KillWait; proctrack/{proctrack}; scancel JOB")
    bench = Bench(own_cluster(nodes=2, gpus=0, proctrack=proctrack), shared_dir)
    stubborn = "trap '' TERM; (setsid sleep 4428 &); echo up; while [ -d . ]; do sleep 0.2; done # 4428"
    job = bench.submit(run=f"exec bash -c {shlex.quote(stubborn)}", nodes=2)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    outcome = job.wait()
    cancelled(outcome)
    row.ended(outcome, bench, "4428")


def test_the_peers_of_a_failed_rank_have_their_time(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """open-mpi/ompi#3359, #3360: one agent's abort took away its peers' cleanup."""
    row = fault("rank 1 exits with 3; its peers need 2 s to clean up after TERM (KillWait of 30 s, Slurm's default)")
    bench = Bench(own_cluster(nodes=3, gpus=0, kill_wait_s=30), shared_dir)
    clean = "trap 'sleep 2; touch cleaned-$SKYPILOT_NODE_RANK; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    wait = "until [ -e go ]; do sleep 0.1; done"
    job = bench.submit(run=f"[ $SKYPILOT_NODE_RANK = 1 ] && {{ {wait}; exit 3; }}; {clean}")
    eventually(lambda: started(job, "0-head.log", "2-worker2.log"))
    row.injected()
    (bench.directory / "go").touch()
    outcome = job.wait()
    assert (outcome.code, outcome.status["state"]) == (3, "FAILED"), outcome.output
    assert sorted(path.name for path in bench.directory.glob("cleaned-*")) == ["cleaned-0", "cleaned-2"]
    row.ended(outcome, bench)


def test_one_rank_stays_open(bench: Bench, fault: Fault) -> None:
    """pytorch/pytorch#76287, meta-pytorch/torchx#479: some ranks end well, others hang."""
    row = fault("rank 0 ends with 0, rank 1 hangs; a person cancels the job")
    job = bench.submit(run="echo up; [ $SKYPILOT_NODE_RANK = 0 ] || exec sleep 4427", nodes=2)
    eventually(lambda: started(job, "0-head.log", "1-worker1.log"))
    time.sleep(2)
    assert job.status()["state"] == "RUNNING"
    row.injected()
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    outcome = job.wait()
    cancelled(outcome)
    assert [(rank["state"], rank["exit_code"]) for rank in outcome.status["ranks"]] == [("done", 0), ("stopped", 143)]
    assert "exit codes by rank: [0, 143]" in outcome.plain
    row.ended(outcome, bench, "sleep 4427")
