"""A gang on a real Slurm: what a user sees from the first line to the exit code."""

import json
import time
from pathlib import Path

import pytest

from codegen import Resources
from executor import protocol
from tests.bench import Bench, eventually
from tests.minislurm.cluster import Cluster

TRAP = """
python3 -u - <<'PY'
import os, signal, sys, time
name = "mark-%s" % os.environ["SKYPILOT_NODE_RANK"]
got = []
def handler(number, frame):
    got.append(number)
    with open(name, "a") as file: file.write("TERM\\n")
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
while not got: time.sleep(0.05)
time.sleep(1)
with open(name, "a") as file: file.write("checkpoint\\n")
sys.exit(EXIT)
PY
"""


def test_setup_runs_on_the_run_steps_nodes_before_any_script(bench: Bench) -> None:
    outcome = bench.drive(run="date +%s.%N; hostname", setup="sleep 0.2; date +%s.%N; hostname")
    assert outcome.code == 0
    assert outcome.states == ["PENDING", "SETTING_UP", "RUNNING", "SUCCEEDED"]
    runs = [outcome.log(name).split() for name in ("0-head.log", "1-worker1.log", "2-worker2.log")]
    setups = [outcome.log(f"setup-{node}.log").split() for node in ("head", "worker1", "worker2")]
    assert [host for _, host in runs] == [host for _, host in setups] == ["n1", "n2", "n3"]
    assert max(float(at) for at, _ in setups) < min(float(at) for at, _ in runs)


def test_one_node_of_three_gets_setup_and_run_on_the_same_node(bench: Bench) -> None:
    outcome = bench.drive(run="test -e prepared-$(hostname)", setup="touch prepared-$(hostname)", num_nodes=1)
    assert outcome.code == 0, outcome.output


def test_prefixes_and_addresses_in_rank_order(bench: Bench) -> None:
    outcome = bench.drive(run="echo $SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES: $SKYPILOT_NODE_IPS", setup="echo set up")
    address = bench.cluster.addresses
    ips = " ".join(address[node] for node in ("n1", "n2", "n3"))
    for rank, node, where in (
        (0, "head", ""),
        (1, "worker1", ", ip=" + address["n2"]),
        (2, "worker2", ", ip=" + address["n3"]),
    ):
        assert outcome.log("%d-%s.log" % (rank, node)) == "%d/3: %s\n" % (rank, ips)
        line = next(line for line in outcome.plain.splitlines() if " %d/3: " % rank in line)
        pid = line.split("pid=")[1].split(",")[0].split(")")[0]
        assert line == "(%s, rank=%d, pid=%s%s) %d/3: %s" % (node, rank, pid, where, rank, ips)
        assert "(setup pid=" in outcome.plain and f"{where}) set up" in outcome.plain
    assert "\x1b[36m(head, rank=0" in outcome.output


@pytest.mark.parametrize("nodes", ["n2,n3"])
def test_a_step_on_some_nodes_of_the_job_knows_its_own(bench: Bench, nodes: str) -> None:
    address = bench.cluster.addresses
    command = bench.executor(
        "echo $SKYPILOT_NODE_RANK $SKYPILOT_NUM_NODES $SKYPILOT_NODE_IPS", srun="-N2 -n2 -w " + nodes
    )
    outcome = bench.run_batch(command, sbatch="--nodelist=n1,n2,n3")
    assert outcome.log("0-worker1.log") == "0 2 {} {}\n".format(address["n2"], address["n3"])
    assert outcome.log("1-worker2.log") == "1 2 {} {}\n".format(address["n2"], address["n3"])


def test_ranks_in_an_arbitrary_distribution_know_their_peers(bench: Bench) -> None:
    (bench.directory / "hosts").write_text("n3\nn1\nn2\n")
    address = bench.cluster.addresses
    command = bench.executor("echo $SKYPILOT_NODE_IPS", srun="--distribution=arbitrary -n3")
    outcome = bench.run_batch("export SLURM_HOSTFILE=hosts\n" + command, sbatch="--nodelist=n1,n2,n3")
    ips = " ".join(address[node] for node in ("n3", "n1", "n2"))
    assert outcome.log("0-worker2.log") == outcome.log("1-head.log") == outcome.log("2-worker1.log") == ips + "\n"


def test_the_first_failing_rank_ends_the_gang_and_is_named(bench: Bench) -> None:
    outcome = bench.drive(run="sleep 0.3; [ $SKYPILOT_NODE_RANK = 1 ] && { echo broken >&2; exit 7; }; sleep 60")
    assert (outcome.code, outcome.status["state"]) == (7, "FAILED")
    assert outcome.codes == [143, 7, 143]
    assert "rank 1 on worker1 failed first (exit code 7)" in outcome.plain
    assert outcome.status["first_failure"]["rank"] == 1
    assert outcome.status["ranks"][0]["why"] == "stopped because rank 1 failed"
    assert "    | broken" in outcome.plain


def test_what_an_early_rank_leaves_running_lives_until_the_last_is_done(bench: Bench) -> None:
    server = "sleep 4321 & echo $! > server; exit 0"
    outcome = bench.submit(
        run=f"[ $SKYPILOT_NODE_RANK = 1 ] && {{ {server}; }}; until [ -e server ]; do sleep 0.1; done; sleep 1.5"
    )
    eventually(lambda: (bench.directory / "server").exists())
    time.sleep(1.0)
    assert bench.left_behind("sleep 4321")
    begun = time.monotonic()
    assert outcome.wait().code == 0
    assert time.monotonic() - begun < 3
    assert not bench.left_behind("sleep 4321")


@pytest.mark.parametrize("nodes, victim", [(3, 1), (1, 0)])
def test_a_rank_killed_with_its_executor_ends_the_gang(bench: Bench, nodes: int, victim: int) -> None:
    run = "sleep 0.3; [ $SKYPILOT_NODE_RANK = %d ] && kill -9 $PPID; sleep 4324" % victim
    outcome = bench.drive(run=run, grace_s=1.0, nodes=nodes)
    assert outcome.status["state"] == "FAILED"
    assert outcome.status["first_failure"]["rank"] == victim
    assert outcome.code == outcome.codes[victim] == 137
    assert not bench.left_behind("sleep 4324")


def test_a_step_cancelled_by_somebody_else_is_cancelled(bench: Bench) -> None:
    job = bench.submit(run="echo up; sleep 4325")
    eventually(lambda: job.log("2-worker2.log"))
    bench.cluster.run("ctl", ["scancel", "%d.0" % job.job_id])
    outcome = job.wait()
    assert (outcome.code, outcome.status["state"]) == (143, "CANCELLED")
    assert not bench.left_behind("sleep 4325")


def test_a_script_killed_with_9_is_told_as_such(bench: Bench) -> None:
    outcome = bench.drive(run="[ $SKYPILOT_NODE_RANK = 2 ] && kill -9 $$; sleep 60")
    assert (outcome.code, outcome.codes[2]) == (137, 137)
    assert "rank 2 on worker2 failed first (exit code 137, signal 9)" in outcome.plain


def test_a_failing_rank_does_not_wait_for_its_peers_and_ends_them_without_kill_on_bad_exit(bench: Bench) -> None:
    begun = time.monotonic()
    bench.run_batch(bench.executor("[ $SKYPILOT_NODE_RANK = 1 ] && exit 5; sleep 60", srun="-N3 --kill-on-bad-exit=0"))
    assert time.monotonic() - begun < 15
    assert not bench.left_behind("sleep 60")


def test_a_nested_srun_sees_the_whole_allocation(bench: Bench) -> None:
    nested = "[ $SKYPILOT_NODE_RANK = 0 ] || exit 0; srun --overlap -N3 --ntasks-per-node=1 bash -c 'hostname; nproc'"
    outcome = bench.drive(run=nested, num_nodes=2, resources=Resources(cpus=2))
    assert outcome.code == 0, outcome.output
    assert sorted(outcome.log("0-head.log").split())[-3:] == ["n1", "n2", "n3"]


def test_the_script_sees_the_jobs_variables_and_no_steps(bench: Bench) -> None:
    batch = "env | grep ^SLURM | sort > batch.env\n"
    driver = bench.executor("env | grep -E '^(SLURM|SRUN)' | sort > script-$SKYPILOT_NODE_RANK.env")
    bench.run_batch(batch + driver, sbatch="--cpus-per-task=2 --gpus-per-node=1")
    before = dict(line.split("=", 1) for line in (bench.directory / "batch.env").read_text().splitlines())
    after = dict(line.split("=", 1) for line in (bench.directory / "script-1.env").read_text().splitlines())
    foreign = {name: value for name, value in after.items() if before.get(name) != value}
    assert foreign.pop("SLURM_OVERLAP") == "1"  # ours: a plain srun in the script shares the nodes
    assert foreign.keys() <= {"SLURMD_NODENAME", "SLURM_JOB_GPUS", "SLURM_TOPOLOGY_ADDR", "SLURMD_DEBUG"}, foreign
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_CONF", "SLURM_NNODES"):
        assert after[name] == before[name]


def test_a_failed_setup_starts_no_script_and_gives_its_code(bench: Bench) -> None:
    job = bench.submit(run="touch started", setup="[ $SKYPILOT_SETUP_NODE_RANK = 1 ] && exit 3; sleep 30")
    job.wait_state("FAILED_SETUP")
    eventually(lambda: not [step for step in bench.cluster.step_ids(job.job_id) if "batch" not in step], 2)
    outcome = job.wait()
    assert (outcome.code, outcome.codes[1]) == (3, 3)
    assert not (bench.directory / "started").exists()
    assert outcome.states == ["PENDING", "SETTING_UP", "FAILED_SETUP"]


@pytest.mark.parametrize("how", ["scancel the job", "TERM to the driver"])
@pytest.mark.parametrize("program_exits", [0, 9])
def test_a_cancelled_job_lets_every_program_save_its_checkpoint(bench: Bench, how: str, program_exits: int) -> None:
    job = bench.submit(run=TRAP.replace("EXIT", str(program_exits)))
    eventually(lambda: all(job.log(name) for name in ("0-head.log", "1-worker1.log", "2-worker2.log")))
    if how == "scancel the job":
        bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    else:
        driver = job.status()["driver"]
        bench.cluster.run(driver["host"], ["kill", "-TERM", str(driver["pid"])])
    outcome = job.wait()
    assert outcome.status["state"] == "CANCELLED"
    assert outcome.code == outcome.status["exit_code"] == 143 or how == "scancel the job"
    for rank in range(3):
        assert (bench.directory / ("mark-%d" % rank)).read_text() == "TERM\ncheckpoint\n"


def test_a_cancel_during_setup_ends_both_steps(bench: Bench) -> None:
    job = bench.submit(run="touch started", setup="echo begun; sleep 4322")
    eventually(lambda: job.log("setup-head.log"))
    driver = job.status()["driver"]
    bench.cluster.run(driver["host"], ["kill", "-TERM", str(driver["pid"])])
    outcome = job.wait()
    assert (outcome.code, outcome.status["state"]) == (143, "CANCELLED")
    assert not (bench.directory / "started").exists() and not bench.left_behind("sleep 4322")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"resources": Resources(gpus=3), "sbatch": "--gpus-per-node=2"}, "generic resource"),
        ({"resources": Resources(cpus=65), "sbatch": "--cpus-per-task=1"}, "More processors requested than permitted"),
    ],
)
def test_a_step_that_cannot_start_is_a_launch_failure_in_sruns_words(bench: Bench, fields: dict, words: str) -> None:  # type: ignore[type-arg]
    outcome = bench.drive(run="touch started", setup="touch set-up", **fields)
    assert (outcome.code, outcome.states) == (125, ["PENDING", "FAILED_DRIVER"])
    assert "the run step could not start: " in outcome.status["reason"] and words in outcome.status["reason"]
    assert not (bench.directory / "set-up").exists()


def test_more_nodes_than_the_allocation_has_is_a_launch_failure(bench: Bench) -> None:
    outcome = bench.drive(run="true", nodes=2, num_nodes=3)
    assert outcome.code == 125 and "could not start" in outcome.status["reason"]


def test_a_job_without_setup_and_script_succeeds_without_srun(bench: Bench) -> None:
    outcome = bench.drive(run=" \n", setup=None, nodes=1)
    assert (outcome.code, outcome.states) == (0, ["PENDING", "SUCCEEDED"])
    assert not [event for event in outcome.events if event["event"] == "step_started"]


def test_setup_without_a_script_runs_setup_only(bench: Bench) -> None:
    outcome = bench.drive(setup="echo prepared")
    assert (outcome.code, outcome.states) == (0, ["PENDING", "SETTING_UP", "SUCCEEDED"])
    assert outcome.log("setup-worker2.log") == "prepared\n"


@pytest.mark.parametrize("script, setup", [("true", "true"), ("exit 3", None), ("true", "exit 4")])
def test_nothing_is_left_behind(bench: Bench, script: str, setup: str) -> None:
    outcome = bench.drive(run=script, setup=setup, secrets={"TOKEN": "s3cr3t"})
    job = ".gangrun/{}/job/".format(outcome.status["slurm_job_id"])
    assert bench.files() == [job + name for name in ("events.jsonl", "exit_code", "lock", "status.json")]
    files = [path for path in bench.directory.rglob("*") if path.is_file()]
    assert not [path for path in files if "s3cr3t" in path.read_text(errors="replace")]


def test_secrets_reach_the_script_and_no_command_line(bench: Bench) -> None:
    job = bench.submit(
        run="echo $TOKEN | rev; touch up; sleep 1.5", env_vars={"PLAIN": "p1a1n"}, secrets={"TOKEN": "s3cr3t"}
    )
    eventually(lambda: (bench.directory / "up").exists())
    assert not bench.left_behind("s3cr3t") and not bench.left_behind("p1a1n")
    assert job.wait().log("0-head.log") == "t3rc3s\n"


def test_a_typed_gres_works_for_setup_and_run(own_cluster, shared_dir) -> None:  # type: ignore[no-untyped-def]
    cluster: Cluster = own_cluster(nodes=2, gres_type="h100")
    bench = Bench(cluster, shared_dir)
    run = "echo $SKYPILOT_NUM_GPUS_PER_NODE $CUDA_VISIBLE_DEVICES"
    outcome = bench.drive(
        run=run,
        setup="true",
        nodes=2,
        resources=Resources(gpus=2, gpu_type="H100"),
        sbatch="--gres=gpu:h100:2 --gpus-per-node=h100:2",
    )
    assert outcome.code == 0, outcome.output
    assert outcome.log("1-worker1.log") == "2 0,1\n"


def test_a_task_without_gpus_sees_none(bench: Bench) -> None:
    outcome = bench.drive(
        run="echo $SKYPILOT_NUM_GPUS_PER_NODE [$CUDA_VISIBLE_DEVICES]", nodes=1, sbatch="--gpus-per-node=2"
    )
    assert outcome.log("run.log").startswith("0 [") and "0,1" not in outcome.log("run.log")


def test_a_script_of_a_megabyte_runs_on_every_node(bench: Bench) -> None:
    script = "# %s\n" % ("x" * 70) * 15000 + "echo the end"
    outcome = bench.drive(run=script, setup=script)
    assert outcome.log("2-worker2.log") == outcome.log("setup-worker2.log") == "the end\n"


def test_two_drivers_never_run_one_job(bench: Bench) -> None:
    job = bench.submit(run="sleep 3", nodes=1)
    job.wait_state("RUNNING")
    second = bench.cluster.run(
        "n1",
        [
            "env",
            "SLURM_JOB_ID=%d" % job.job_id,
            "SLURM_JOB_NODELIST=n1",
            f"HOME={bench.directory}",
            "python3",
            bench.directory / "driver" / "driver.py",
        ],
        check=False,
    )
    assert second.returncode == 125 and "another driver of this job is running" in second.stderr
    assert job.wait().code == 0


def test_status_is_whole_at_every_moment(bench: Bench) -> None:
    job = bench.submit(run="sleep 0.5", nodes=1)
    path = job.job_directory / protocol.STATUS_NAME
    seen = set()
    while "SUCCEEDED" not in seen:
        if path.exists():
            seen.add(json.loads(path.read_text())["state"])
    assert (job.job_directory / protocol.EXIT_CODE_NAME).exists() or eventually(
        (job.job_directory / protocol.EXIT_CODE_NAME).exists
    )
    job.wait()


def test_a_requeued_job_runs_again_in_a_directory_of_its_own_and_keeps_its_secrets(bench: Bench) -> None:
    script = "echo attempt $GANGRUN_ATTEMPT $TOKEN; [ $GANGRUN_ATTEMPT = 0 ] && exec sleep 4326; exit 0"
    job = bench.submit(run=script, setup="true", secrets={"TOKEN": "s3cr3t"}, sbatch="--requeue", nodes=2)
    eventually(lambda: job.log("0-head.log") and job.log("1-worker1.log"))
    bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])
    eventually(lambda: job.status().get("state") == "PENDING")
    assert not (job.job_directory / protocol.EXIT_CODE_NAME).exists()
    bench.cluster.wait_state(job.job_id, "PENDING")
    outcome = job.wait()
    assert (outcome.code, outcome.status["attempt"]) == (0, 1)
    assert outcome.states == ["PENDING", "SETTING_UP", "RUNNING", "PENDING"] + [
        "PENDING",
        "SETTING_UP",
        "RUNNING",
        "SUCCEEDED",
    ]
    first, banner, second = outcome.log("1-worker1.log").splitlines()
    assert (first, second) == ("attempt 0 s3cr3t", "attempt 1 s3cr3t") and "attempt 1 begins here" in banner
    assert not bench.left_behind("sleep 4326")


def test_with_linuxproc_a_cancel_is_one_term_and_leaves_no_orphan(own_cluster, shared_dir) -> None:  # type: ignore[no-untyped-def]
    bench = Bench(own_cluster(nodes=2, proctrack="linuxproc"), shared_dir)
    job = bench.submit(run="(setsid sleep 4327 &) ; sleep 0.3;" + TRAP.replace("EXIT", "0"), nodes=2)
    eventually(lambda: "ready" in job.log("0-head.log") and "ready" in job.log("1-worker1.log"))
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    outcome = job.wait()
    assert outcome.status["state"] == "CANCELLED"
    assert [(bench.directory / name).read_text() for name in ("mark-0", "mark-1")] == ["TERM\ncheckpoint\n"] * 2
    eventually(lambda: not bench.left_behind("sleep 4327"))


def test_a_cancel_works_where_scancel_does_not(bench: Bench) -> None:
    bench.environ["PATH"] = no_scancel(bench.directory, bench.environ["PATH"])
    job = bench.submit(run=TRAP.replace("EXIT", "0"))
    eventually(lambda: all("ready" in job.log(name) for name in ("0-head.log", "1-worker1.log", "2-worker2.log")))
    driver = job.status()["driver"]
    bench.cluster.run(driver["host"], ["kill", "-TERM", str(driver["pid"])])
    outcome = job.wait()
    assert (outcome.code, outcome.status["state"]) == (143, "CANCELLED")
    assert [(bench.directory / f"mark-{rank}").read_text() for rank in range(3)] == ["TERM\ncheckpoint\n"] * 3


def no_scancel(directory: Path, path: str) -> str:
    """A PATH whose scancel always fails."""
    (directory / "bin").mkdir()
    (directory / "bin" / "scancel").write_text("#!/bin/sh\nexit 1\n")
    (directory / "bin" / "scancel").chmod(0o755)
    return f"{directory}/bin:{path}"


def test_a_warning_signal_to_the_batch_script_reaches_every_program(bench: Bench) -> None:
    trap = "trap 'touch warned-$SKYPILOT_NODE_RANK; exit 0' USR1; echo ready; while :; do sleep 0.1; done"
    job = bench.submit(run=trap)
    eventually(lambda: all(job.log(name) for name in ("0-head.log", "1-worker1.log", "2-worker2.log")))
    bench.cluster.run("ctl", ["scancel", "--batch", "--signal=USR1", str(job.job_id)])
    assert job.wait().code == 0
    assert sorted(path.name for path in bench.directory.glob("warned-*")) == ["warned-0", "warned-1", "warned-2"]
