"""Jobs of a real Ray cluster, as somebody launches, follows and ends them from a machine without Ray."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from gangrun import states
from tests.bench import CHECKOUT, eventually
from tests.client_bench import without_colour
from tests.miniray import HEAD, RayBed
from tests.miniray.bed import missing
from tests.miniray.fixtures import BootRay
from tests.minislurm.fixtures import Session
from tests.ray_desk import URL, Desk

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
WHOLE = {"resources": {"cpus": 4}, "num_nodes": 2}
SAVES = """
trap 'echo saving; sleep 5; echo saved; exit 0' TERM
echo ready; sleep 300 & wait
"""
DEAF = """
trap 'echo no' TERM
echo ready; while true; do sleep 0.2; done
"""


@pytest.fixture(scope="module")
def bed(pytestconfig: pytest.Config) -> Iterator[RayBed]:
    """Two nodes with four CPUs and two fake GPUs each; the home of who runs Ray is not ours."""
    with tempfile.TemporaryDirectory(prefix="gangrun-ray-home-") as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        with RayBed.boot(Session.of(pytestconfig).own_root(), nodes=2, gpus=2, dashboard=True) as bed:
            yield bed


@pytest.fixture
def desk(bed: RayBed) -> Iterator[Desk]:
    desk = Desk(bed)
    yield desk
    desk.close()


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


# --- the whole way


def test_the_task_runs_on_its_nodes_with_its_committed_files_variables_and_gpus(desk: Desk) -> None:
    tree = desk.home / "code"
    tree.mkdir()
    (tree / "data.txt").write_text("committed\n")
    (tree / "run.sh").write_text("#!/bin/sh\ncat data.txt\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("data.txt")
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "one")
    (tree / "data.txt").write_text("edited\n")
    run = """
        ./run.sh; cat link; printf 'no text: \\xff\\xfe\\n'
        echo "rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES <$A>"
        echo "gpus $SKYPILOT_NUM_GPUS_PER_NODE $CUDA_VISIBLE_DEVICES"
    """
    task = desk.write_task(
        run, setup="echo set up", num_nodes=2, envs={"A": "x 'y\" {z}"}, workdir=str(tree),
        resources={"cpus": 2, "accelerators": "GPU:2"},
    )  # fmt: skip
    done = desk.gangrun("launch", task, "--ray", URL)
    assert done.returncode == 0, done.stderr
    run_id = done.stderr.partition("run ")[2].split()[0]
    assert f"{run_id} (job {run_id}) SUCCEEDED (exit code 0)" in done.stderr and "uncommitted" in done.stderr
    one = desk.gangrun("logs", run_id, "--rank", "1")
    assert one.stdout == ("committed\ncommitted\nno text: \ufffd\ufffd\nrank 1 of 2 <x 'y\" {z}>\ngpus 2 0,1\n"), (
        one.stdout + one.stderr
    )
    assert one.returncode == 0
    assert "(worker1, rank=1" in done.stdout and "set up" in done.stdout
    seen = desk.seen(run_id)
    assert (seen["state"], seen["exit_code"], seen["num_nodes"]) == (protocol.SUCCEEDED, 0, 2)
    assert [rank["exit_code"] for rank in seen["record"]["ranks"]] == [0, 0]
    assert desk.gangrun("explain", run_id).stdout.startswith(f"{run_id} (job {run_id}): ")
    assert desk.held() == []


@pytest.mark.slow
def test_the_same_tree_travels_once(desk: Desk) -> None:
    tree = desk.home / "code"
    tree.mkdir()
    (tree / "noise").write_bytes(os.urandom(300_000))
    task = desk.write_task("sleep 300", workdir=str(tree))
    first = desk.gangrun("launch", task, "--ray", URL, "-d")
    second = desk.gangrun("launch", task, "--ray", URL, "-d", "--force")
    desk.runs += [run["run"] for run in desk.json("queue")]
    assert "uploading 0.3 MB" in first.stderr and "uploading 0.3 MB" not in second.stderr


@pytest.mark.slow
def test_no_run_finds_what_another_wrote_into_the_same_tree(desk: Desk) -> None:
    """Ray unpacks equal packages once, and its own jobs share the directory."""
    tree = desk.home / "code"
    (tree / ".venv").mkdir(parents=True)
    (tree / ".venv" / "kept").touch()
    (tree / "data.txt").write_text("first\n")
    (tree / ".gitignore").write_text("*.txt\n")
    run = "ls -d left data.txt .venv; cat data.txt; echo more >> data.txt; touch left"
    task = desk.write_task(run, workdir=str(tree))
    for _ in range(2):
        assert desk.gangrun("launch", task, "--ray", URL).returncode == 0
        printed = desk.gangrun("logs", "--rank", "0", "last").stdout
        assert printed.splitlines()[1:] == [".venv", "data.txt", "first"], printed
    kept = desk.bed.run(HEAD, ["bash", "-c", "ls /tmp/ray/session_latest/gangrun-trees"]).stdout.split()
    assert len(kept) <= 2, kept  # the last one's, and its lock


def test_a_failure_has_its_code_its_reason_and_the_end_of_its_log(desk: Desk) -> None:
    run = desk.launch('[ "$SKYPILOT_NODE_RANK" = 0 ] || { echo ModuleNotFound; exit 7; }; sleep 300', num_nodes=2)
    waited = desk.gangrun("wait", run)
    assert (waited.returncode, waited.stderr) == (states.EXIT_FAILED, "")
    assert f"{run} (job {run}) FAILED (exit code 7): rank 1 on worker1" in waited.stdout
    assert desk.gangrun("logs", run, "-n", "2").returncode == states.EXIT_FAILED
    assert desk.gangrun("status", run).returncode == states.EXIT_FAILED
    assert "ModuleNotFound" in desk.gangrun("explain", run).stdout
    broken = desk.launch("true", setup="exit 3")
    assert (desk.gangrun("wait", broken).returncode, desk.seen(broken)["state"]) == (100, protocol.FAILED_SETUP)


@pytest.mark.slow
def test_a_report_is_made_on_the_head_node_by_the_command_that_the_refusal_tells(desk: Desk) -> None:
    run = desk.launch("sleep 1; exit $SKYPILOT_NODE_RANK", num_nodes=2)
    assert desk.gangrun("wait", run).returncode == states.EXIT_FAILED
    for verb, why in (("report", "its driver's records lie on the head node"), ("top", "does not tell when a rank")):
        done = desk.gangrun(verb, run)
        assert done.returncode == protocol.EXIT_USAGE and why in done.stderr and done.stderr.count("\n") == 1
    told = re.findall("`(.*)`", desk.gangrun("report", run).stderr)[0]
    command = f"{shlex.quote(sys.executable)} -m {told}"
    shown = desk.bed.run(HEAD, ["sh", "-c", command], env={"HOME": os.environ["HOME"], "PYTHONPATH": str(CHECKOUT)})
    assert f"{run} FAILED, exit code 1: 2 nodes, 1 attempt" in shown.stdout
    assert "Rank 1 on n2 failed first, 1." in shown.stdout, shown.stdout


def test_what_no_node_can_ever_hold_is_told_at_once(desk: Desk) -> None:
    done = desk.gangrun("launch", desk.write_task("true", resources={"accelerators": "H100:64"}), "--ray", URL)
    assert done.returncode == states.EXIT_FAILED
    assert "FAILED_DRIVER" in done.stderr and "can ever hold" in done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_it_running_and_says_how_to_come_back(desk: Desk) -> None:
    typed = desk.popen(
        "launch", desk.write_task("echo up; while [ ! -e go ]; do sleep 0.1; done; echo down"), "--ray", URL
    )
    typed.until_out("up", 60)
    typed.interrupt()
    assert typed.wait(10) == states.EXIT_UNFINISHED
    run = desk.json("queue")[0]["run"]
    desk.runs.append(run)
    assert f"gangrun logs {run} --host {URL} -f" in typed.err
    desk.until(run, protocol.RUNNING)
    assert desk.gangrun("logs", run).returncode == states.EXIT_UNFINISHED


def test_from_python_as_on_slurm(desk: Desk) -> None:
    code = """
        import json, sys
        from gangrun import RayCluster, Task, wait
        cluster = RayCluster(sys.argv[1])
        first = cluster.launch(Task(name="first", run="echo hello; exit 4"))
        second = cluster.launch(Task(name="second", run="echo begin; sleep 300", num_nodes=2))
        ended = first.wait(timeout_s=60)
        pieces = second.logs(follow=True)
        while b"begin" not in next(pieces): pass
        before = second.status().state
        after = second.cancel(grace_s=1)
        print(json.dumps([ended.state, ended.exit_code, b"hello" in b"".join(first.logs()), before, after.state,
                          [job.run_id for job in cluster.jobs()], cluster.job("first").run_id == first.run_id]))
    """
    assert desk.python(code, URL) == ["FAILED", 4, True, "RUNNING", "CANCELLED", [], True]


# --- cancel


@pytest.mark.slow
def test_a_cancelled_job_has_all_of_its_grace(desk: Desk) -> None:
    """Ray's own is three seconds."""
    run = desk.launch(SAVES, slurm={"grace": "20s"}, **WHOLE)
    desk.until_output(run, "rank=1")
    began = time.monotonic()
    done = desk.gangrun("cancel", run)
    assert (done.returncode, time.monotonic() - began > 5) == (0, True), done.stderr
    assert desk.seen(run)["state"] == protocol.CANCELLED  # although its programs ended with 0
    assert desk.gangrun("logs", run, "--rank", "0").stdout.endswith("saving\nsaved\n")
    assert desk.gangrun("wait", run).returncode == states.EXIT_CANCELLED
    assert desk.held() == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--grace", "1s"]], ids=["its own grace", "a shorter one"])
def test_programs_that_will_not_end_are_ended(desk: Desk, flags: list[str]) -> None:
    run = desk.launch(DEAF, slurm={"grace": "3s" if not flags else "60s"}, num_nodes=2)
    desk.until_output(run, "ready")
    began = time.monotonic()
    assert desk.gangrun("cancel", *flags, run).returncode == 0
    took_s = time.monotonic() - began
    assert desk.seen(run)["state"] == protocol.CANCELLED
    assert 1 < took_s < 20, took_s
    eventually(lambda: desk.processes(run) == [], 10, "the end of its processes")
    assert desk.held() == []


@pytest.mark.slow
def test_jobs_queue_for_nodes_and_one_that_waits_is_cancelled(desk: Desk) -> None:
    first = desk.launch("echo ready; sleep 300", **WHOLE)
    desk.until_output(first, "ready")
    second = desk.launch("echo never", **WHOLE)
    desk.until_output(second, "waiting for 2 nodes")
    seen = desk.seen(second)
    assert (seen["state"], seen["reason"]) == (protocol.PENDING, "waits for its nodes")
    assert "waiting for 2 nodes with CPU 4 each" in desk.gangrun("explain", second).stdout
    assert {run["run"]: run["state"] for run in desk.json("queue")} == {first: "RUNNING", second: "PENDING"}
    third = desk.launch("echo third", **WHOLE)
    assert desk.gangrun("cancel", second, timeout_s=60).returncode == 0
    assert desk.seen(second)["state"] == protocol.CANCELLED
    assert desk.seen(first)["state"] == protocol.RUNNING
    assert desk.gangrun("cancel", first).returncode == 0
    assert desk.gangrun("wait", third).returncode == 0  # the nodes were given back


@pytest.mark.slow
def test_a_job_that_ray_prepares_still_is_cancelled(desk: Desk) -> None:
    run = desk.launch("echo never; sleep 300")
    done = desk.gangrun("cancel", run)
    assert (done.returncode, desk.seen(run)["state"]) == (0, protocol.CANCELLED), done.stderr
    time.sleep(3)
    assert desk.processes(run) == [] and desk.held() == []


# --- what gets lost


@pytest.mark.slow
def test_a_driver_that_was_killed_is_told_and_leaves_nothing(desk: Desk) -> None:
    run = desk.launch("echo ready; sleep 300", num_nodes=2)
    desk.until_output(run, "ready")
    desk.bed.run(HEAD, ["kill", "-9", str(desk.seen(run)["record"]["driver"]["pid"])])
    assert desk.gangrun("wait", run).returncode == states.EXIT_FAILED
    explained = desk.gangrun("explain", run).stdout
    assert "FAILED_DRIVER" in explained and "killed by signal 9" in explained and "| " in explained
    assert "Slurm" not in explained
    eventually(lambda: desk.processes(run) == [] and desk.held() == [], 30, "the end of what it had started")


def test_many_bytes_and_hostile_names_come_through(desk: Desk) -> None:
    path = desk.home / "task.yaml"
    run = "head -c 3000000 /dev/zero | tr '\\0' x | fold -w 99; printf '\\xff{}\\n'"
    path.write_text(json.dumps({"name": "my {task} 'x' $(id) é", "run": run}))
    done = desk.gangrun("launch", str(path), "--ray", URL)
    assert done.returncode == 0, done.stderr
    assert desk.gangrun("logs", "last").stdout == done.stdout
    for follow in ([], ["-f"]):
        last = desk.gangrun("logs", *follow, "-n", "3", "last").stdout
        assert last == "".join(done.stdout.splitlines(keepends=True)[-3:])
    log = desk.gangrun("logs", "--rank", "0", "last").stdout
    assert log == ("x" * 99 + "\n") * (3000000 // 99) + "x" * (3000000 % 99) + "\ufffd{}\n"
    folder = desk.home / "logs"
    assert desk.gangrun("logs", "--download", str(folder), "last").returncode == 0
    assert sorted(path.name for path in folder.iterdir())[1] == "output"
    unknown = desk.gangrun("logs", "last", "--rank", "7")
    assert unknown.returncode == states.EXIT_NOT_FOUND and "there are: 0-" in unknown.stderr


@pytest.mark.slow
def test_a_lost_answer_makes_no_second_job(desk: Desk) -> None:
    with desk.proxy("lose-submit") as url:
        done = desk.gangrun("launch", desk.write_task("echo once"), "--ray", url)
        assert done.returncode == 0, done.stderr
        run = desk.json("queue", "-a")[0]["run"]
    assert len(desk.submissions(run)) == 1


@pytest.mark.slow
def test_following_survives_cut_connections_without_losing_or_doubling_a_byte(desk: Desk) -> None:
    run = "for i in $(seq 1 3000); do echo line $i; [ $((i % 300)) != 0 ] || sleep 0.3; done; printf 'the end'"
    with desk.proxy("cut", "1.2") as url:
        done = desk.gangrun("launch", desk.write_task(run), "--ray", url, timeout_s=180)
        one = desk.gangrun("logs", "-f", "--rank", "0", "last", timeout_s=180)
    lines = [line.partition(") ")[2] for line in without_colour(done.stdout).splitlines() if "rank=0" in line]
    assert lines == [*(f"line {i}" for i in range(1, 3001)), "the end"], done.stderr
    assert one.stdout.split("\n") == [*(f"line {i}" for i in range(1, 3001)), "the end"], one.stderr[-500:]


def test_a_cluster_that_does_not_answer_says_nothing_about_the_job(desk: Desk) -> None:
    with desk.proxy("plain") as url:
        run = desk.json("launch", desk.write_task("sleep 300"), "--ray", url)["run"]
        desk.runs.append(run)
        desk.json("queue")
    # Who asks again within a second is told what was seen last.
    seen: Any = eventually(lambda: one if (one := desk.gangrun("queue")).stderr else None, 20)
    assert "cannot be asked" in seen.stderr and run in seen.stdout and "LOST" not in seen.stdout
    assert len(seen.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_is_not_recorded_here_is_found_on_the_cluster(desk: Desk) -> None:
    run = desk.launch("echo hello; sleep 300", envs={"A": "1"})
    desk.until(run, protocol.RUNNING)
    desk.env["XDG_STATE_HOME"] = str(desk.home / "new")
    assert desk.gangrun("status", run).returncode == states.EXIT_NOT_FOUND
    found = desk.json("queue", "--adopt", "--host", URL)
    assert [(one["run"], one["state"], one["num_nodes"]) for one in found if one["run"] == run] == [(run, "RUNNING", 1)]


# --- secrets


def test_a_secret_reaches_the_script_and_nothing_that_can_be_read(desk: Desk) -> None:
    value = "s3cret-" + os.urandom(6).hex()
    task = desk.write_task('echo "has ${#TOKEN}"; ls -A; exit 3')
    shown = desk.gangrun("launch", task, "--ray", URL, "--secret", "TOKEN", "--dry-run", env={"TOKEN": value})
    assert shown.returncode == 0 and value not in shown.stdout + shown.stderr
    done = desk.gangrun("launch", task, "--ray", URL, "--secret", "TOKEN", env={"TOKEN": value})
    assert f"has {len(value)}" in done.stdout, done.stderr
    run = desk.json("queue", "-a")[0]["run"]
    assert value not in done.stdout + done.stderr + str(desk.api("/api/jobs/")) + str(desk.seen(run))
    for folder in ("/tmp/ray", os.environ["HOME"], str(desk.home / "state")):
        found = desk.bed.run(HEAD, ["grep", "-rlaF", value, folder], check=False).stdout
        assert found == "", found


@pytest.mark.slow
def test_a_secret_does_not_go_through_a_network_in_plain_text(bed: RayBed) -> None:
    desk = Desk(bed, bed.dashboard_url, "n2")
    try:
        task = desk.write_task("echo hello from afar")
        refused = desk.gangrun("launch", task, "--ray", bed.dashboard_url, "--secret", "TOKEN", env={"TOKEN": "x"})
        assert refused.returncode == protocol.EXIT_USAGE and "ssh -L" in refused.stderr
        done = desk.gangrun("launch", task, "--ray", bed.dashboard_url)
        assert done.returncode == 0 and "hello from afar" in done.stdout
    finally:
        desk.close()


# --- what is said


def test_check_tells_what_is_there(desk: Desk) -> None:
    done = desk.gangrun("check", "--host", URL)
    assert done.returncode == 0 and "4 CPU, 2 GPU" in done.stdout and "ok      Ray: 2." in done.stdout


@pytest.mark.slow
def test_what_a_job_does_and_that_its_output_is_gone_are_told(desk: Desk) -> None:
    run = desk.launch("echo never", setup="echo setting up; sleep 300")
    desk.until_output(run, "setting up\n")
    explained = desk.gangrun("explain", run).stdout
    assert "it is SETTING_UP\n" in explained and desk.seen(run)["state"] == protocol.SETTING_UP
    assert desk.gangrun("cancel", run).returncode == 0
    code = "import sys, urllib.request as r; r.urlopen(r.Request(sys.argv[1], method='DELETE'))"
    desk.bed.run(HEAD, [sys.executable, "-c", code, f"{URL}/api/jobs/{run}"])
    desk.runs.remove(run)
    for follow in ([], ["-f"]):
        done = desk.gangrun("logs", *follow, run)
        assert "its output is gone" in done.stderr and done.returncode == (103 if follow else 125)


@pytest.mark.slow
def test_verbs_that_mean_nothing_on_ray_say_so_in_one_line(desk: Desk) -> None:
    run = desk.launch("true")
    assert desk.gangrun("wait", run).returncode == 0
    for words in (["gc", "--host", URL], ["report", run], ["top", run], ["cancel", run, "--task", "x"]):
        done = desk.gangrun(*words)
        assert done.returncode == protocol.EXIT_USAGE and len(done.stderr.splitlines()) == 1, (words, done.stderr)


@pytest.mark.slow
def test_a_job_is_lost_with_the_head_and_not_failed_by_anybody(
    own_ray_bed: BootRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    desk = Desk(own_ray_bed(nodes=1, dashboard=True))
    run = desk.launch("echo ready; sleep 300")
    desk.until_output(run, "ready")
    desk.until(run, protocol.RUNNING)
    reader = desk.popen("logs", "-f", run)
    reader.until_out("ready")
    desk.bed.stop(HEAD)
    down = desk.gangrun("status", run)
    assert down.returncode == protocol.EXIT_INFRASTRUCTURE and "cannot be asked" in down.stderr
    assert desk.json("queue")[0]["state"] == protocol.RUNNING
    desk.bed.join(HEAD)
    eventually(lambda: desk.gangrun("check", "--host", URL).returncode == 0, 60)
    seen: Any = eventually(lambda: one if (one := desk.gangrun("status", run)).returncode != 125 else None, 60)
    assert "LOST" in seen.stdout and "Ray's head was started anew" in seen.stdout
    assert desk.gangrun("wait", run).returncode == states.EXIT_FAILED
    assert desk.gangrun("logs", run).returncode == protocol.EXIT_INFRASTRUCTURE
    assert reader.wait(120) == states.EXIT_FAILED and "LOST" in reader.err
    followed = desk.gangrun("logs", "-f", run)
    assert followed.returncode == states.EXIT_FAILED and "its output is gone" in followed.stderr
    desk.runs.remove(run)
    desk.close()
