"""A home that lags, fails, fills up, hangs, or is not shared at all."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor import protocol
from tests.bench import Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import Row
from tests.minislurm.fixtures import BootCluster
from tests.minislurm.mounts import FaultyMount, NfsLikeMount
from tests.test_minislurm import or_skip

KIND = "Shared file system"
CACHE_S = 20
LOGS = ("0-head.log", "1-worker1.log", "2-worker2.log")
UNTIL_GO = "echo up; until [ -e go ]; do sleep 0.1; done; echo bye"
POLL = '[ -e "$1" ] || echo absent; until [ -e "$1" ]; do sleep 0.02; done; date +%s.%N'
# Runs the executor with time.time() ten minutes behind on n2; its arguments are `-I -S -X utf8 ARCHIVE FLAGS...`.
SLOW_CLOCK = """#!/bin/bash
[ "$SLURMD_NODENAME" = n2 ] || exec PYTHON "$@"
exec PYTHON "${@:1:4}" -c '
import runpy, sys, time
real = time.time
time.time = lambda: real() - 600
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")' "${@:5}"
"""


@pytest.fixture
def bench(own_cluster: BootCluster, shared_dir: Path) -> Bench:
    """On a cluster of its own: mounts stay in a node until it goes."""
    return Bench(own_cluster(nodes=3, gpus=0), shared_dir)


@pytest.fixture
def faulty(bench: Bench) -> FaultyMount:
    """The view that n2, the node of rank 1, has of the shared home."""
    return failing(bench, "n2")


def failing(bench: Bench, node: str) -> FaultyMount:
    return or_skip(lambda: bench.cluster.mount_faulty(node, bench.directory, bench.directory))


def lagging(bench: Bench, node: str, cache_s: float) -> NfsLikeMount:
    return or_skip(lambda: bench.cluster.mount_nfs_like(node, bench.directory, bench.directory, cache_s=cache_s))


def started(bench: Bench, **fields: object) -> Running:
    """A job whose three scripts wait for the file `go`."""
    job = bench.submit(**{"run": UNTIL_GO, "liveness_timeout_s": 5.0, **fields})  # type: ignore[arg-type]
    eventually(lambda: all(job.log(name) for name in LOGS), 30)
    return job


def go_on(row: Row, bench: Bench) -> None:
    """The fault is there: let the scripts end."""
    row.injected()
    (bench.directory / "go").touch()


def ends_well(row: Row, job: Running, timeout_s: float = 60) -> Outcome:
    outcome = job.wait(timeout_s)
    assert (outcome.code, outcome.status["state"]) == (0, "SUCCEEDED"), outcome.output
    row.ended(outcome, job.bench)
    return outcome


def lines_with(text: str, words: str) -> list[str]:
    return [line for line in text.splitlines() if words in line and not line.startswith(("(", "    |"))]


@pytest.mark.slow
def test_caches_do_not_delay_a_signal(bench: Bench, fault: Fault) -> None:
    row = fault(f"caches of {CACHE_S} s on all nodes: late names, old attributes and listings")
    for node in bench.cluster.nodes:
        lagging(bench, node, CACHE_S)
    late = bench.directory / "late"
    with bench.cluster.popen("n2", ["bash", "-c", POLL, "-", late], cwd="/", stdout=subprocess.PIPE) as poller:
        assert poller.stdout and poller.stdout.readline() == "absent\n"
        bench.cluster.run("n1", ["touch", late], cwd="/")
        made = time.time()
        job = bench.submit(run="date +%s.%N", setup="sleep 0.3; date +%s.%N")
        plain_s = float(poller.stdout.readline()) - made
    outcome = ends_well(row, job, timeout_s=120)
    delays_s = [float(outcome.log(name)) - outcome.status["times"]["RUNNING"] for name in LOGS]
    assert max(delays_s) < 2 < CACHE_S / 2 < plain_s
    row.saw(f"SUCCEEDED; `go` seen after {max(delays_s):.2f} s; a new file, polled with exists(), {plain_s:.1f} s", 0)


@pytest.mark.parametrize(
    "operation, error",
    [("write", "ENOSPC"), ("write", "EDQUOT"), ("open|create", "EIO"), ("open|create", "EROFS"), ("open", "ESTALE")],
)
def test_a_rank_cannot_record_its_end(
    bench: Bench, faulty: FaultyMount, fault: Fault, operation: str, error: str
) -> None:
    row = fault(f"{error} on the record of one rank from the script's start to the end")
    job = started(bench)
    faulty.fail(operation, "/ranks/1$", error)
    go_on(row, bench)
    outcome = ends_well(row, job)
    assert len(lines_with(outcome.plain, "cannot write its record")) == 1, outcome.plain
    assert outcome.log(LOGS[1]) == "up\nbye\n"


def test_a_failed_rank_cannot_record_its_code(bench: Bench, faulty: FaultyMount, fault: Fault) -> None:
    row = fault("ENOSPC on the record of a rank that fails")
    job = started(bench, run=UNTIL_GO + "; [ $SKYPILOT_NODE_RANK = 1 ] && exit 7; sleep 4511")
    faulty.fail("write", "/ranks/1$", "ENOSPC")
    go_on(row, bench)
    outcome = job.wait()
    assert outcome.status["state"] == "FAILED" and outcome.code != 0
    assert outcome.status["first_failure"]["rank"] == 1
    row.ended(outcome, bench, "sleep 4511")


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_the_attempts_files_fail_for_a_while(bench: Bench, faulty: FaultyMount, fault: Fault, error: str) -> None:
    row = fault(f"{error} on all of the attempt's files on one node for 3 s, while the ranks end")
    job = started(bench, liveness_timeout_s=30.0)
    faulty.fail("open|create|write|getattr", "/attempt-0", error)
    go_on(row, bench)
    time.sleep(3)
    faulty.clear()
    assert ends_well(row, job).codes == [0, 0, 0]


def test_a_rank_never_hears_that_all_are_done(bench: Bench, faulty: FaultyMount, fault: Fault) -> None:
    row = fault("ESTALE for ever on the gang's signal file on one node")
    job = started(bench)
    faulty.fail("open", "/gang$", "ESTALE")
    go_on(row, bench)
    ends_well(row, job, timeout_s=90)


def test_somebody_removes_the_attempts_directory(bench: Bench, fault: Fault) -> None:
    row = fault("the attempt's directory is removed while the scripts run")
    job = started(bench)
    shutil.rmtree(job.job_directory / "attempt-0")
    go_on(row, bench)
    ends_well(row, job)


@pytest.mark.parametrize("error", ["EDQUOT", "ESTALE", "EIO"])
def test_a_log_fails_for_a_while(bench: Bench, faulty: FaultyMount, fault: Fault, error: str) -> None:
    row = fault(f"{error} on one node's log for a second")
    job = started(bench, run=UNTIL_GO + "; until [ -e on ]; do sleep 0.1; done; echo after")
    faulty.fail("write", r"\.log$", error)
    go_on(row, bench)
    eventually(lambda: job.log(LOGS[2]).endswith("bye\n"))
    time.sleep(0.5)
    faulty.clear()
    (bench.directory / "on").touch()
    outcome = ends_well(row, job)
    told = lines_with(outcome.plain, "cannot write the log")
    assert len(told) == 1 and LOGS[1] in told[0]
    assert outcome.log(LOGS[1]) == "up\n\n[gangrun: 4 bytes could not be written here]\nafter\n"
    row.saw("SUCCEEDED; " + told[0].replace(str(bench.directory), ""), 0)


@pytest.mark.parametrize("error", ["EROFS", "ENOSPC", "EDQUOT", "EIO"])
def test_the_driver_cannot_make_its_directory(bench: Bench, fault: Fault, error: str) -> None:
    row = fault(f"{error} where the driver makes the attempt's directory")
    failing(bench, "n1").fail("mkdir|create", r"^/\.gangrun", error)
    row.injected()
    outcome = bench.drive(run="touch started")
    told = lines_with(outcome.plain, "cannot write the job's directory")
    assert outcome.code == 125 and len(told) == 1 and f"{bench.directory}/.gangrun" in told[0]
    assert not (bench.directory / "started").exists() and "Traceback" not in outcome.plain
    row.saw(told[0].replace(str(bench.directory), "~"), outcome.code)
    row.check_nothing_left(bench)


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_the_disk_fills_under_the_drivers_records(bench: Bench, fault: Fault, error: str) -> None:
    row = fault(f"{error} for every new file of the job, from the script's start on")
    mount = failing(bench, "n1")
    job = started(bench)
    mount.fail("create", r"^/\.gangrun", error)
    go_on(row, bench)
    outcome = ends_well(row, job)
    assert outcome.status["exit_code"] == 0 and len(lines_with(outcome.plain, "cannot ")) == 1, outcome.plain


@pytest.mark.parametrize("error", ["EIO", "EDQUOT"])
def test_nothing_of_the_end_can_be_recorded(bench: Bench, fault: Fault, error: str) -> None:
    """qiita-spots/qiita#2965: over quota, and yet a success with missing data."""
    row = fault(f"{error} for status.json, events.jsonl and exit_code at the end")
    mount = failing(bench, "n1")
    job = started(bench)
    mount.fail("open|create|write|rename", r"(status\.json|events\.jsonl|exit_code)", error)
    go_on(row, bench)
    outcome = job.wait()
    told = lines_with(outcome.plain, "cannot record how the job ended (SUCCEEDED)")
    assert outcome.code == 125 and len(told) == 1, outcome.output
    row.saw(told[0].replace(str(bench.directory), "~"), outcome.code)
    row.check_nothing_left(bench)


def test_a_node_cannot_write_the_attempts_directory(bench: Bench, faulty: FaultyMount, fault: Fault) -> None:
    row = fault("the home is mounted read-only on one node")
    faulty.fail("open|create|write|mkdir", r"^/\.gangrun/.*/ranks", "EROFS")
    row.injected()
    outcome = bench.drive(run="touch started; sleep 4512", setup=None)
    assert (outcome.code, outcome.status["state"]) == (125, "FAILED_DRIVER"), outcome.output
    assert "attempt-0 cannot be written on n2" in outcome.status["reason"] and "rank 1" in outcome.status["reason"]
    row.ended(outcome, bench, "sleep 4512")
    row.seen = row.seen.replace(str(bench.directory), "~")


def test_the_home_is_not_shared(bench: Bench, fault: Fault) -> None:
    row = fault("the home is not shared: every node has its own")
    home = bench.directory / "home"
    home.mkdir()
    for node in bench.cluster.nodes:
        bench.cluster.run(node, ["mount", "-t", "tmpfs", "home", home], cwd="/")
    row.injected()
    outcome = bench.drive(run="touch started; sleep 4513", setup="touch set-up", cluster_home=str(home), timeout_s=30)
    assert outcome.code == 125 and "Traceback" not in outcome.plain
    assert not (bench.directory / "started").exists() and not (bench.directory / "set-up").exists()
    told = [line for line in lines_with(outcome.plain, f"{home}/.gangrun") if "share" in line]
    assert told, outcome.plain
    row.saw(told[-1].replace(str(home), "~"), outcome.code)
    row.check_nothing_left(bench, "sleep 4513")


@pytest.mark.slow
def test_no_driver_and_a_home_that_is_not_shared(bench: Bench, fault: Fault) -> None:
    """skypilot-org/skypilot#8880, #8382: every rank waits for the others in a directory of its own."""
    row = fault("the home is not shared: every node has its own; the step is started by hand")
    home = bench.directory / "home"
    home.mkdir()
    for node in bench.cluster.nodes:
        bench.cluster.run(node, ["mount", "-t", "tmpfs", "home", home], cwd="/")
    row.injected()
    outcome = bench.run_batch(bench.executor("echo here", f"--cluster-home-dir={home}"), timeout_s=120)
    told = [line for line in lines_with(outcome.plain, str(home)) if "share" in line]
    assert outcome.code == 0 and outcome.output.count("here") == 3 and told, outcome.plain
    row.saw(told[-1].replace(str(home), "~"), outcome.code)


@pytest.mark.slow
def test_no_driver_and_a_node_that_sees_late(bench: Bench, fault: Fault) -> None:
    """skypilot-org/skypilot#10321, pytorch/pytorch#69520: rank 0 takes the directory away while others still look."""
    row = fault("caches of 10 s on the node of rank 2, no driver; the ranks end at different times")
    lagging(bench, "n3", 10)
    row.injected()
    run = "case $SKYPILOT_NODE_RANK in 0) sleep 2;; 1) sleep 3;; esac; echo done"
    outcome = bench.run_batch(bench.executor(run, f"--cluster-home-dir={bench.directory}"), timeout_s=120)
    assert outcome.code == 0 and "gangrun: " not in outcome.plain, outcome.plain
    assert all(outcome.log(name) == "done\n" for name in LOGS)
    row.saw("exit code 0", outcome.code)
    eventually(lambda: not list(bench.directory.glob(".gangrun/*")), 20, "the ranks' files are gone")


def test_the_work_directory_is_removed_and_made_again(bench: Bench, fault: Fault) -> None:
    """SIMEXP/psom#36, NVIDIA/pyxis#18: what the driver stands in is a stale directory."""
    row = fault("the driver's work directory is removed and made again while its setup runs")
    place = bench.directory / "work"
    place.mkdir()
    setup = f"echo up; until [ -e {bench.directory}/go ]; do sleep 0.1; done"
    driver = bench.write(bench.job(run="pwd", setup=setup, num_nodes=3, workdir=str(place), log_dir="logs"))
    job = Running(bench, bench.batch(f"cd work; exec {bench.python} {driver}"), "job")
    eventually(lambda: (place / "logs" / "setup-worker2.log").exists(), 30)
    shutil.rmtree(place)
    place.mkdir()
    go_on(row, bench)
    ends_well(row, job)
    assert (place / "logs" / LOGS[2]).read_text() == f"{place}\n"


def test_the_driver_begins_in_a_directory_that_is_gone(bench: Bench, fault: Fault) -> None:
    """SIMEXP/psom#36."""
    row = fault("the directory that the driver begins in has been removed")
    driver = bench.write(bench.job(run="pwd", num_nodes=3, workdir=str(bench.directory)))
    outcome = bench.run_batch(f"mkdir gone; cd gone; rmdir ../gone; {bench.python} {driver}; echo code $?")
    told = lines_with(outcome.plain, "could not start: srun: error: getcwd failed: No such file or directory")
    assert "code 125" in outcome.plain and len(told) == 1 and "Traceback" not in outcome.plain, outcome.plain
    row.saw(told[0].replace("gangrun: ", ""), 125)
    row.check_nothing_left(bench)


@pytest.mark.parametrize("error", ["ESTALE", "EACCES"])
def test_the_work_directory_cannot_be_entered(bench: Bench, faulty: FaultyMount, fault: Fault, error: str) -> None:
    """NVIDIA/pyxis#18."""
    row = fault(f"{error} on the work directory on one node")
    work = bench.directory / "work"
    work.mkdir()
    faulty.fail("getattr|opendir|access", "^/work", error)
    row.injected()
    outcome = bench.drive(run="touch started; sleep 4515", workdir=str(work))
    assert (outcome.code, outcome.status["state"]) == (2, "FAILED_DRIVER"), outcome.output
    assert f"rank 1 on worker1 could not run the script: work directory {work}: " in outcome.status["reason"]
    row.ended(outcome, bench, "sleep 4515")
    row.seen = row.seen.replace(str(bench.directory), "~")


@pytest.mark.parametrize("node, whose", [("n1", "the driver's node"), ("n2", "a worker's node")])
def test_the_file_server_hangs(bench: Bench, fault: Fault, node: str, whose: str) -> None:
    row = fault(f"the file server hangs for 4 s, seen from {whose}, while the scripts end")
    mount = lagging(bench, node, 3)
    when = str(int(time.time()) + 7)  # the script itself must not touch the hung home
    run = "echo up; while [ $(date +%s) -lt $WHEN ]; do sleep 0.1; done"
    job = bench.submit(run=run, env_vars={"WHEN": when}, workdir="/")
    eventually(lambda: all(job.log(name) for name in LOGS), 30)
    mount.hang()
    row.injected()
    try:
        time.sleep(4)
    finally:
        mount.resume()
    assert ends_well(row, job).codes == [0, 0, 0]


def test_the_clock_of_a_node_is_behind(bench: Bench, fault: Fault) -> None:
    row = fault("the clock of one node is ten minutes behind, and another node's rank fails")
    python = bench.directory / "python"
    python.write_text(SLOW_CLOCK.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    run = UNTIL_GO + "; [ $SKYPILOT_NODE_RANK = 2 ] && exit 7; sleep 4514"
    job = started(bench, run=run, setup="echo set up", python=str(python))
    go_on(row, bench)
    outcome = job.wait()
    started_at = [rank["started"] for rank in outcome.status["ranks"]]
    assert started_at[0] - started_at[1] > 500, "the clock is behind"
    assert (outcome.code, outcome.status["state"]) == (7, "FAILED")
    assert outcome.status["first_failure"]["rank"] == 2
    row.ended(outcome, bench, "sleep 4514")


def test_a_file_that_the_client_keeps_until_it_is_closed(bench: Bench, fault: Fault) -> None:
    row = fault("a .nfs file in the attempt's directory that cannot be removed (EBUSY)")
    mount = failing(bench, "n1")
    job = started(bench)
    kept = job.job_directory / protocol.attempt_name(0) / ".nfs0001"
    kept.touch()
    mount.fail("unlink", r"/\.nfs", "EBUSY")
    go_on(row, bench)
    assert job.wait().code == 0 and job.status()["state"] == "SUCCEEDED"
    assert [str(path.name) for path in kept.parent.rglob("*")] == [".nfs0001"]
    row.saw("SUCCEEDED", 0)
    row.left = "the .nfs file, which its holder's client removes"


def test_the_job_directory_is_on_a_full_disk_that_is_freed(bench: Bench, fault: Fault) -> None:
    row = fault("a tmpfs of 1 MB under the job's directory fills up and is freed again")
    home = bench.directory / "small"
    home.mkdir()
    bench.cluster.run("n1", ["mount", "-t", "tmpfs", "-o", "size=1m", "small", home], cwd="/")
    job = bench.submit(run=UNTIL_GO, nodes=1, cluster_home=str(home))
    eventually(lambda: job.log("run.log"), 30)
    bench.cluster.run("n1", ["dd", "if=/dev/zero", f"of={home}/fill", "bs=4k"], cwd="/", check=False)
    go_on(row, bench)
    eventually(lambda: job.log("run.log").endswith("bye\n"))
    outcome = job.wait()
    status = bench.cluster.run("n1", ["sh", "-c", f"cat {home}/.gangrun/*/job/status.json"], cwd="/").stdout
    assert outcome.code == 0 and '"state": "SUCCEEDED"' in status, outcome.output
    bench.cluster.run("n1", ["rm", f"{home}/fill"], cwd="/")
    assert bench.drive(run="true", nodes=1, cluster_home=str(home)).code == 0
    row.saw("SUCCEEDED; the next job is as usual", 0)
    left = bench.cluster.run("n1", ["sh", "-c", f"ls -d {home}/.gangrun/*/*/attempt-* | wc -l"], cwd="/").stdout
    assert left.strip() == "0"
