"""What people reported of launchers like this one, and what ours does instead. Each test names the public thread."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from codegen import Bundle, Job, render_driver, render_sbatch
from executor import protocol
from executor.identity import expand_hosts
from tests.bench import Bench, Running, eventually
from tests.minislurm.fixtures import BootCluster
from tests.solo import Solo
from tests.test_codegen import DRIVERS, FULL
from tests.test_local_launcher import place, start, write_driver

__all__ = ["place"]  # a fixture
HOST_LISTS = (
    "ml-16-node-[001-002,004],ml-17-node-[1-3]",
    "n[009-011]",
    "nodeA,nodeB[001,003],nodeC",
    "foo003,foo0[10-20],foo[103-104],foo-m11-16",
    "host[001,003-004,006]",
    "rack[0-1]n[0-1]",
    "n",
    "a-1,a1,n",
    "n[3,1]",
)
PIPE = re.compile(r"(?<!\|)\|(?!\|)")
RUNS = 20
RUN_ENDS_AFTER_S = 0.05


# --- lists of hosts


@pytest.mark.parametrize("text", HOST_LISTS)
def test_a_host_list_is_what_scontrol_says(bench: Bench, text: str) -> None:
    """skypilot-org/skypilot#8891, facebookincubator/submitit#4, NVIDIA-NeMo/Megatron-Bridge#3830, hpc/pavilion2#526,
    soravux/scoop#30, pmodels/mpich#2786."""
    said = bench.cluster.run("ctl", ["scontrol", "show", "hostnames", text], cwd="/").stdout.split()
    assert expand_hosts(text) == said


def test_places_in_a_list_of_racks_are_slurms_ranks(own_cluster: BootCluster, shared_dir: Path) -> None:
    """python-hostlist orders nested ranges; the place of a name must be the rank of its task."""
    names = ("rack0n0", "rack0n1", "rack1n0", "rack1n1")
    bench = Bench(own_cluster(gpus=0, node_names=names), shared_dir)
    tell = "echo $SLURM_PROCID $SLURMD_NODENAME; [ $SLURM_PROCID != 0 ] || echo list $SLURM_STEP_NODELIST"
    outcome = bench.run_batch(f"srun --ntasks-per-node=1 bash -c '{tell}'", 4)
    lines = [line.split() for line in outcome.output.splitlines()]
    listed = next(line[1] for line in lines if line[0] == "list")
    ranks = {int(rank): host for rank, host in lines if rank != "list"}
    assert [ranks[rank] for rank in range(4)] == expand_hosts(listed), listed


# --- variables


def test_a_value_with_commas_reaches_every_rank(bench: Bench) -> None:
    """CrayLabs/SmartSim#104, ExaWorks/psij-python#445: --export cuts a value at its commas."""
    outcome = bench.drive(run="echo $CUDA_VISIBLE_DEVICES", env_vars={"CUDA_VISIBLE_DEVICES": "0,1,2"})
    assert [outcome.log(name) for name in ("0-head.log", "1-worker1.log", "2-worker2.log")] == ["0,1,2\n"] * 3


# --- exit codes


@pytest.mark.parametrize("name", DRIVERS)
def test_no_command_of_ours_is_a_pipe(name: str) -> None:
    """nextflow-io/nextflow#3522, HKU-BAL/Clair3#368: the code of `command | tee` is tee's."""
    batch = render_sbatch(FULL, "driver.py", output="out")
    text = render_driver(DRIVERS[name]).replace(repr(FULL.run), "")
    assert not PIPE.search(batch + text) and "shell=True" not in text


def test_a_script_needs_no_permission_to_be_executed(solo: Solo) -> None:
    """NVIDIA/NVFlare#5094: "permission denied" of the launcher was told as a failure of the program."""
    script = solo.directory / "script"
    script.write_text("echo ran; exit 4")
    script.chmod(0o400)
    argv = [word for word in solo.argv("") if not word.startswith("--script=")]
    done = subprocess.run([*argv, f"--script-path={script}"], env=solo.environ(), cwd=solo.directory)
    assert (done.returncode, solo.log()) == (4, b"ran\n")


# --- records


@contextmanager
def read_on_and_on(directory: Path, seen: dict[str, set[bytes]]) -> Iterator[None]:
    """Read what the jobs below a directory publish, as often as can be, until the end of the block."""
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            for name in (protocol.STATUS_NAME, protocol.EXIT_CODE_NAME):
                for path in directory.glob(f"run*/.gangrun/*/*/{name}"):
                    seen[name].add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def test_a_reader_of_many_short_jobs_meets_no_half_record(place: Path) -> None:
    """GEECS-BELLA/GEECS-Plugins#320, escoffier-labs/brigade#161, snakemake/snakemake#1342, hpc/pavilion2#129."""
    seen: dict[str, set[bytes]] = {protocol.STATUS_NAME: set(), protocol.EXIT_CODE_NAME: set()}
    with read_on_and_on(place, seen):
        for number in range(RUNS):
            directory = place / f"run{number}"
            directory.mkdir()
            driver = start(directory, write_driver(directory, num_nodes=1, run=f"exit {number}"))
            if number % 4 == 3:  # killed, each time a little later
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(RUN_ENDS_AFTER_S * number / 4)
                driver.kill()
            driver.wait(30)
    states = {json.loads(text)["state"] for text in seen[protocol.STATUS_NAME]}
    assert {"PENDING", "RUNNING", "SUCCEEDED", "FAILED"} <= states
    assert seen[protocol.EXIT_CODE_NAME] <= {b"%d\n" % number for number in range(RUNS)}
    assert len(seen[protocol.EXIT_CODE_NAME]) >= RUNS // 2


# --- requeue and the end


def submit_rendered(bench: Bench, *extra: str, **fields: object) -> Running:
    """A job by the batch script that is rendered for it."""
    job = Job(job_id="job", num_nodes=2, log_dir=str(bench.directory / "logs"), python=sys.executable, **fields)  # type: ignore[arg-type]
    driver = Bundle(job, render_driver(job)).write(str(bench.directory / "driver"))
    options = (f"--output={bench.directory}/job-%j.out", "--nodelist=n1,n2", *extra)
    text = render_sbatch(job, driver, "out", options)
    return Running(bench, bench.cluster.sbatch(text, cwd=bench.directory, env=bench.environ), "job")


def test_a_requeue_keeps_what_the_first_attempt_printed(bench: Bench) -> None:
    """wlandau/crew.cluster#19: the output was truncated with every launch."""
    run = "echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 0 ] && exec sleep 4561; exit 0"
    job = submit_rendered(bench, "--requeue", run=run)
    eventually(lambda: all(job.log(name) for name in ("0-head.log", "1-worker1.log")), 20)
    bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])
    outcome = job.wait()
    assert outcome.code == 0
    assert all("rank=0, pid=" in outcome.plain and f"attempt {number}" in outcome.plain for number in (0, 1))
    assert "attempt 0" in job.log("1-worker1.log") and "attempt 1" in job.log("1-worker1.log")


def test_whether_a_job_may_run_twice_is_said_and_not_left_to_the_site() -> None:
    """nextflow-io/nextflow#226: a job was requeued that nobody had asked to run again."""
    lines = render_sbatch(FULL, "driver.py", output="out").splitlines()
    assert len([line for line in lines if line in ("#SBATCH --requeue", "#SBATCH --no-requeue")]) == 1


def test_the_end_is_recorded_though_the_sites_epilog_hangs(own_cluster: BootCluster, shared_dir: Path) -> None:
    """ArjunaCluster/ArjunaUsers#7, aws/aws-parallelcluster#1110: jobs stay COMPLETING for long."""
    epilog = shared_dir / "epilog"
    epilog.write_text(f"#!/bin/sh\nuntil [ -e {shared_dir}/go ]; do sleep 0.2; done\n")
    epilog.chmod(0o755)
    bench = Bench(own_cluster(nodes=2, gpus=0, extra_conf=f"Epilog={epilog}"), shared_dir)
    job = bench.submit(run="exit 3", nodes=2)
    eventually((job.job_directory / protocol.EXIT_CODE_NAME).exists, 30)
    bench.cluster.wait_state(job.job_id, "COMPLETING", timeout_s=20)
    assert (job.job_directory / protocol.EXIT_CODE_NAME).read_text() == "3\n"
    assert job.status()["state"] == "FAILED"
    (shared_dir / "go").touch()
    assert job.wait().code == 3
