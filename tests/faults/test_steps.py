"""Steps that want what others hold, and variables of other steps that confine a nested srun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from codegen import Resources
from tests.bench import Bench, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.test_environment import told
from tests.minislurm.fixtures import BootCluster

KIND = "Steps and resources"
LOGS = ("0-head.log", "1-worker1.log", "2-worker2.log")
REAL_SRUN = "/usr/bin/srun"
# What srun 24.11 says where both variables are set and differ.
ONE_WORD_FOR_CPUS = f"""#!/bin/bash
if [ -n "$SLURM_CPUS_PER_TASK" ] && [ -n "$SLURM_TRES_PER_TASK" ]; then
  echo "srun: fatal: SLURM_CPUS_PER_TASK set by two different environment variables" >&2
  exit 1
fi
exec {REAL_SRUN} "$@"
"""
# What a site's shell, or the step of another tool around us, may have left in the environment.
FOREIGN_BINDING = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x8000000000000000",
    "SLURM_CPU_BIND_LIST": "0x8000000000000000",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_VERBOSE": "verbose",
}


def on_rank_0(command: str) -> str:
    return f"[ $SKYPILOT_NODE_RANK = 0 ] || exit 0\n{command}"


def put_srun(bench: Bench, text: str) -> None:
    """The first srun in the driver's PATH is this one."""
    shim = bench.directory / "bin" / "srun"
    shim.parent.mkdir()
    shim.write_text(text)
    shim.chmod(0o755)
    bench.environ["PATH"] = f"{shim.parent}:{bench.environ['PATH']}"


# --- a nested srun


def test_a_nested_srun_without_any_count_of_nodes(bench: Bench, fault: Fault) -> None:
    """skypilot-org/skypilot#10309: it was confined to the executor's own step of one task."""
    row = fault("rank 0 calls `srun --overlap -l hostname` and `srun --overlap -n6 true`, no nodes named")
    nested = "srun --overlap -l hostname; srun --overlap -n6 true && echo six; echo $SLURM_JOB_ID $SLURM_JOB_NUM_NODES"
    outcome = bench.drive(run=on_rank_0(nested), resources=Resources(cpus=2))
    lines = outcome.log(LOGS[0]).splitlines()
    assert outcome.code == 0 and sorted(lines[:3]) == ["0: n1", "1: n2", "2: n3"], outcome.output
    assert lines[3:] == ["six", f"{outcome.status['slurm_job_id']} 3"]
    row.ended(outcome, bench)
    row.saw("SUCCEEDED: the nested steps have the whole allocation", outcome.code)


def test_a_nested_srun_without_overlap(bench: Bench, fault: Fault) -> None:
    """open-mpi/ompi#8378, llnl/smith#688, psnc-qcg/QCG-PilotJob#49: it waits for ever for what our own step holds."""
    row = fault("rank 0 calls `srun hostname` without --overlap")
    outcome = bench.drive(run=on_rank_0("timeout 20 srun hostname; echo code $?"))
    log = outcome.log(LOGS[0])
    row.ended(outcome, bench)
    row.saw(log.splitlines()[-1], outcome.code)
    assert "code 124" not in log, log


def test_a_foreign_cpu_binding(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """huggingface/datatrove#248, chapel-lang/chapel#26788: "CPU binding outside of job step allocation"."""
    bench = Bench(own_cluster(nodes=3, gpus=0, cpus=os.cpu_count(), extra_conf="TaskPlugin=task/affinity"), shared_dir)
    row = fault("SLURM_CPU_BIND and its relatives of another step in the environment, with TaskPlugin=task/affinity")
    bench.environ.update(FOREIGN_BINDING)
    nested = "nproc; srun --overlap -N3 --ntasks-per-node=1 hostname"
    outcome = bench.drive(run=on_rank_0(nested), setup="echo set up")
    assert outcome.code == 0, outcome.output
    assert sorted(outcome.log(LOGS[0]).split()) == ["1", "n1", "n2", "n3"], (
        "one CPU as asked for, and no word of srun's"
    )
    assert outcome.log("setup-worker1.log") == "set up\n" and "cpu-bind" not in outcome.output.lower()
    row.ended(outcome, bench)


@pytest.mark.parametrize("cpus", [1, 2])
def test_the_cpus_that_were_asked_for(own_cluster: BootCluster, shared_dir: Path, fault: Fault, cpus: int) -> None:
    """scalableminds/webknossos-libs#1483, FairRootGroup/DDS#490: sbatch's -c no longer reaches srun since 22.05."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU here")
    bench = Bench(own_cluster(nodes=2, gpus=0, cpus=os.cpu_count(), extra_conf="TaskPlugin=task/affinity"), shared_dir)
    row = fault(f"`sbatch -c{cpus}`; srun itself asks for one CPU a task unless told")
    outcome = bench.drive(run="nproc", setup="nproc", nodes=2, resources=Resources(cpus=cpus))
    assert outcome.code == 0, outcome.output
    assert outcome.log(LOGS[1]) == outcome.log("setup-worker1.log") == f"{cpus}\n"
    row.ended(outcome, bench)
    row.saw(f"SUCCEEDED: setup and script have {cpus}", outcome.code)


def test_the_cpus_by_two_variables(bench: Bench, fault: Fault) -> None:
    """snakemake/snakemake-executor-plugin-slurm#373, BLAST-WarpX/warpx#5340."""
    row = fault("SLURM_CPUS_PER_TASK and SLURM_TRES_PER_TASK both set, and an srun that refuses that (24.11's words)")
    put_srun(bench, ONE_WORD_FOR_CPUS)
    bench.environ.update(SLURM_CPUS_PER_TASK="4", SLURM_TRES_PER_TASK="cpu=2")
    outcome = bench.drive(run=on_rank_0("srun --overlap -N3 --ntasks-per-node=1 hostname"), setup="true")
    assert outcome.code == 0 and sorted(outcome.log(LOGS[0]).split()) == ["n1", "n2", "n3"], outcome.output
    row.ended(outcome, bench)


def test_two_variables_for_memory(bench: Bench, fault: Fault) -> None:
    """snakemake/snakemake#2230, mehta-lab/recOrder#482: "SLURM_MEM_PER_CPU and _PER_NODE are mutually exclusive"."""
    row = fault("`sbatch --mem-per-cpu` with SLURM_MEM_PER_NODE and _PER_GPU in the environment; nested `srun --mem`")
    bench.environ.update(SLURM_MEM_PER_NODE="100", SLURM_MEM_PER_GPU="100")
    nested = "srun --overlap --mem=50 -N3 --ntasks-per-node=1 hostname"
    outcome = bench.drive(run=on_rank_0(nested), setup="true", sbatch="--mem-per-cpu=200")
    assert outcome.code == 0 and sorted(outcome.log(LOGS[0]).split()) == ["n1", "n2", "n3"], outcome.output
    row.ended(outcome, bench)


# --- what others hold


@pytest.mark.parametrize("what, holder", [("the CPUs", "--mem=0"), ("the memory, but not all CPUs", "--mem=500")])
def test_another_step_holds_what_the_run_step_wants(bench: Bench, fault: Fault, what: str, holder: str) -> None:
    """eth-cscs/DLA-Future#337, trilinos/Trilinos#3942: "step creation temporarily disabled, retrying" for ever."""
    row = fault(f"another step of the allocation holds {what} for 8 s")
    holds_cpus = what == "the CPUs"
    driver = bench.write(bench.job(run="echo mine", setup="echo set up", num_nodes=2))
    row.injected()
    hold = (
        f"srun --exclusive {holder} -c1 -N2 -n2 bash -c 'touch held; sleep 8' & until [ -e held ]; do sleep 0.1; done"
    )
    sbatch = f"--mem=500 --cpus-per-task={1 if holds_cpus else 2}"
    outcome = bench.run_batch(f"{hold}\n{bench.python} {driver}", 2, sbatch)
    assert outcome.code == 0, outcome.output
    assert [outcome.log(name) for name in (*LOGS[:2], "setup-head.log")] == ["mine\n", "mine\n", "set up\n"]
    words = told(outcome, "waiting for the run step to start") + "; then " if holds_cpus else ""
    row.saw(words + "SUCCEEDED", outcome.code)
    row.check_nothing_left(bench)


def lose_n3(bench: Bench, **fields: Any) -> Running:
    """A job with --no-kill loses n3; then its batch script becomes a driver."""
    driver = bench.write(bench.job(**fields))
    body = f"touch up; until [ -e go ]; do sleep 0.2; done; exec {bench.python} {driver}"
    job = Running(bench, bench.batch(body, 3, "--no-kill"), "job")
    eventually((bench.directory / "up").exists, 20)
    bench.cluster.power_off("n3")
    eventually(lambda: bench.cluster.node_states()["n3"].startswith("down"), 90)
    (bench.directory / "go").touch()
    return job


@pytest.mark.slow
def test_a_driver_that_wants_a_lost_node(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """nebius/soperator#854, flux-framework/flux-core#3959: later steps hang, and nobody names the bad node."""
    bench = Bench(own_cluster(nodes=3, gpus=0, slurmd_timeout_s=5), shared_dir)
    row = fault("a node is lost in an allocation with --no-kill; then a driver that wants all three nodes")
    job = lose_n3(bench, run="touch started", num_nodes=3)
    row.injected()
    outcome = job.wait(60)
    row.ended(outcome, bench)
    assert outcome.code == 125 and "n3" in outcome.status["reason"], outcome.output
    assert not (bench.directory / "started").exists()


@pytest.mark.slow
def test_a_driver_for_the_nodes_that_are_left(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """nebius/soperator#854."""
    bench = Bench(own_cluster(nodes=3, gpus=0, slurmd_timeout_s=5), shared_dir)
    row = fault("a node is lost in an allocation with --no-kill; then a driver that wants two nodes")
    job = lose_n3(bench, run="hostname", setup="true", num_nodes=2)
    row.injected()
    outcome = job.wait()
    assert outcome.code == 0 and [outcome.log(name) for name in LOGS[:2]] == ["n1\n", "n2\n"], outcome.output
    row.ended(outcome, bench)


# --- what a node lacks


def test_the_interpreter_is_missing_on_one_node(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """NVIDIA/NVFlare#5094: a launcher that failed before user code was told as a failure of the code."""
    bench = Bench(own_cluster(nodes=3, gpus=0), shared_dir)
    row = fault("the interpreter for the nodes is missing on one of them")
    python = bench.directory / "private" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    bench.cluster.run("n2", ["mount", "-t", "tmpfs", "empty", python.parent], cwd="/")
    row.injected()
    outcome = bench.drive(run="touch started-$SLURMD_NODENAME; exec sleep 4551", python=str(python))
    row.ended(outcome, bench, "sleep 4551")
    assert (outcome.code, outcome.status["state"]) == (125, "FAILED_DRIVER"), outcome.output
    assert str(python) in outcome.status["reason"] and "n2" in outcome.status["reason"]
    row.seen = row.seen.replace(str(bench.directory), "~")


def fill_spool(bench: Bench, node: str) -> None:
    """The directory of a node's slurmd is on a disk of its own, which is full."""
    spool = bench.cluster.layout.spool(node)
    bench.cluster.stop_slurmd(node)
    bench.cluster.run(node, ["mount", "-t", "tmpfs", "-o", "size=4m", "spool", spool], cwd="/")
    bench.cluster.start_slurmd(node)
    bench.cluster.wait_idle()
    bench.cluster.run(node, ["dd", "if=/dev/zero", f"of={spool}/fill", "bs=64k"], cwd="/", check=False)


def test_slurmds_disk_is_full_on_a_worker(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """nextflow-io/nextflow#981."""
    bench = Bench(own_cluster(nodes=2, gpus=0), shared_dir)
    row = fault("the disk of slurmd's own directory is full on a worker")
    fill_spool(bench, "n2")
    row.injected()
    outcome = bench.drive(run="echo here", setup="true", nodes=2)
    assert outcome.code == 0 and outcome.log(LOGS[1]) == "here\n", outcome.output
    row.ended(outcome, bench)


def test_slurmds_disk_is_full_on_the_head(own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
    """burrmill/burrmill#15: Slurm holds a job that its node could not launch, and tells nobody."""
    bench = Bench(own_cluster(nodes=2, gpus=0), shared_dir)
    row = fault("the disk of slurmd's own directory is full on the head")
    fill_spool(bench, "n1")
    job = bench.submit(run="touch started", nodes=2, sbatch="--requeue")
    row.injected()
    eventually(lambda: bench.cluster.job(job.job_id).reason == "launch_failed_requeued_held", 30)
    row.saw("Slurm: PENDING (launch_failed_requeued_held); nothing of ours has begun")
    bench.cluster.run("ctl", ["scancel", str(job.job_id)])
    assert bench.cluster.wait_job(job.job_id).state == "CANCELLED"
    assert not job.job_directory.exists() and not (bench.directory / "started").exists()
    row.check_nothing_left(bench)
