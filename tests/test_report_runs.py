"""Reports of real runs: requeues of the example, a job that runs, a group, from the laptop and from a directory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import protocol
from gangrun import states
from gangrun.report.goodput import compiled
from gangrun.report.sentences import sentences
from gangrun.report.source import Report, of_path
from tests import browser, picture
from tests.bench import CHECKOUT, Bench, Outcome, Running, eventually
from tests.client_bench import Laptop
from tests.group_bench import GroupBench, trap
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.login import Login

STEP_S = 0.1  # of the example
EXAMPLE = CHECKOUT / "examples" / "resume.yaml"
ON_TERM = "  signal.signal(signal.SIGTERM, stop)\n"


def run_example(bench: Bench, text: str) -> Running:
    """The example, as its first line says, with a requeue allowed."""
    (bench.directory / "resume.yaml").write_text(text)
    job = bench.batch("exec gangrun run --log-dir=logs resume.yaml", 2, "--requeue")
    return Running(bench, job, "run-1")


def requeue_after(job: Running, step: int, then_s: float) -> None:
    """So long after the checkpoint of that step is noted."""
    marks = job.job_directory / protocol.CHECKPOINTS_NAME
    eventually(lambda: marks.exists() and f" {step}\n" in marks.read_text(), 40)
    time.sleep(then_s)
    job.bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])


def steps_of(outcome: Outcome) -> list[tuple[str, int]]:
    """What rank 0 printed of its steps: where each attempt began, where it stopped."""
    return [(verb, int(step)) for verb, step in re.findall(r"(from|saved) step (\d+)", outcome.log("0-head.log"))]


def adds_up(report: Report) -> None:
    found = report.goodput
    parts = (found.useful_s, found.recomputed_s, found.checkpoint_s, found.setup_s, found.waiting_s)
    assert sum(parts) + found.barrier_s + found.lost_s + found.idle_s == pytest.approx(found.machine_s, abs=0.05)


@pytest.mark.slow
def test_a_requeued_run_that_saves_on_term_loses_next_to_nothing(bench: Bench) -> None:
    job = run_example(bench, EXAMPLE.read_text())
    requeue_after(job, 20, 0.5)
    outcome = job.wait(90)
    assert outcome.code == 0, outcome.output
    (_, zero), (_, saved), (_, resumed) = steps_of(outcome)
    assert zero == 0 and 20 <= saved == resumed
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    found = report.goodput
    assert (report.state, found.attempts, found.interruptions) == ("SUCCEEDED", 2, 1)
    assert 60 * STEP_S <= found.useful_s < 60 * STEP_S + 4
    assert found.recomputed_s < 0.5 < found.queue_s
    assert found.share == pytest.approx(found.useful_s / found.machine_s)


@pytest.mark.slow
def test_a_requeued_run_that_does_not_computes_again_what_came_after_its_checkpoint(bench: Bench) -> None:
    text = EXAMPLE.read_text()
    assert ON_TERM in text
    job = run_example(bench, text.replace(ON_TERM, ""))
    requeue_after(job, 20, 1.0)
    outcome = job.wait(90)
    assert outcome.code == 0, outcome.output
    assert steps_of(outcome) == [("from", 0), ("from", 20)]
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    assert 0.9 < report.goodput.recomputed_s < 3
    assert 60 * STEP_S <= report.goodput.useful_s < 60 * STEP_S + 4
    assert [mark.step for mark in report.chapters[0].marks] == [20, 40, 60, 60]


@pytest.mark.slow
def test_setup_and_a_second_attempt_stand_in_the_events_of_a_driver(bench: Bench) -> None:
    """One rank sets up slowly, the other runs longer."""
    setup = "[ $SKYPILOT_SETUP_NODE_RANK = 0 ] || sleep 2"
    job = bench.submit(run="[ $SKYPILOT_NODE_RANK = 1 ] || sleep 2", setup=setup, nodes=2)
    assert job.wait().code == 0
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    one, two = report.chapters[0].timeline.attempts[0].stays
    assert two.setup and one.setup and two.setup.length_s > one.setup.length_s + 1.5
    assert one.run and two.run and one.run.length_s > two.run.length_s + 1.5
    assert (one.run.begin, two.run.begin) == pytest.approx((two.setup.end,) * 2, abs=1.5)
    barrier = [span.length_s for span in two.spans if span.phase == "barrier"]
    assert barrier and barrier[0] > 1.5 and {stay.state for stay in (one, two)} == {protocol.RANK_DONE}
    assert report.skipped == 0


@pytest.mark.slow
def test_checkpoints_are_noted_by_the_command_and_found_by_a_pattern(bench: Bench) -> None:
    script = (
        "sleep 1; gangrun checkpoint 100 --cost-s 0.5; printf 'saved %s %(%s)T\\n' 100 -1; sleep 1;"
        'echo "$EPOCHREALTIME 200" >>"$GANGRUN_CHECKPOINTS"; sleep 0.5'
    )
    job = bench.submit(run=script, nodes=1)
    assert job.wait().code == 0
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    assert [(mark.step, mark.cost_s) for mark in report.chapters[0].marks] == [(100, 0.5), (200, 0)]
    assert report.goodput.checkpoint_s == pytest.approx(0.5)
    by_log = of_path(str(job.job_directory), compiled(r"saved (?P<step>\d+) (?P<time>\d+)"))
    assert [mark.step for mark in by_log.chapters[0].marks] == [100]


@pytest.mark.slow
def test_a_rank_that_fails_is_told_with_the_end_of_its_log(bench: Bench) -> None:
    job = bench.submit(run="[ $SKYPILOT_NODE_RANK = 1 ] || exec sleep 4831; sleep 1; echo out of luck; exit 7", nodes=2)
    assert job.wait().code == 7
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    assert sentences(report)[0].startswith("Rank 1 on n2 failed first, 1.") and "(exit code 7)" in sentences(report)[0]
    assert report.chapters[0].tails == {"1-worker1.log": "out of luck\n"}


@pytest.mark.slow
def test_a_group_is_reported_by_its_tasks(bench: Bench) -> None:
    groups = GroupBench(bench)
    group = groups.submit(groups.task("client", "sleep 2"), groups.aux("server", trap("sys.exit(0)"), nodes=2))
    assert group.end().state == protocol.SUCCEEDED
    report = of_path(str(group.job_directory), None)
    adds_up(report)
    assert [chapter.label for chapter in report.chapters] == ["client", "server"]
    assert (report.num_nodes, report.goodput.num_nodes) == (3, 3)
    assert report.goodput.recomputed_s == 0  # that the group ended the server was meant


@pytest.mark.slow
def test_a_driver_that_was_killed_ends_its_attempt_where_it_was_heard_of_last(bench: Bench) -> None:
    run = "[ $GANGRUN_ATTEMPT = 0 ] && exec sleep 4833; sleep 1"
    job = bench.submit(run=run, nodes=2, sbatch="--requeue", job_id="killed")
    job.wait_state(protocol.RUNNING)
    (driver,) = [one for one in bench.cluster.processes("n1") if one.cmdline.endswith("/driver/driver.py")]
    killed = time.time()
    os.kill(driver.pid, signal.SIGKILL)
    bench.cluster.wait_state(job.job_id, "FAILED")
    bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])
    bench.cluster.wait_state(job.job_id, "PENDING", "RUNNING")
    assert job.wait().code == 0
    report = of_path(str(job.job_directory), None)
    adds_up(report)
    first, second = report.chapters[0].timeline.attempts
    assert first.was_lost and first.ended <= killed + 1 and second.submitted == first.ended
    assert sentences(report)[0] == "The head node was lost in attempt 0: its driver left no word."


@pytest.mark.slow
def test_a_group_that_was_requeued_is_told_over_both_attempts(bench: Bench) -> None:
    """The client starts when the server is ready: until then it waits, in no queue."""
    groups = GroupBench(bench)
    client = groups.task("client", "[ $GANGRUN_ATTEMPT = 0 ] && exec sleep 4834; sleep 1", after=("server",))
    group = groups.submit(
        groups.aux("server", "sleep 2; echo up; exec sleep 4835", ready={"log": "up"}), client, sbatch="--requeue"
    )
    group.until_state("client", protocol.RUNNING)
    bench.cluster.run("ctl", ["scontrol", "requeue", str(group.job_id)])
    bench.cluster.wait_state(group.job_id, "PENDING")
    assert group.end().state == protocol.SUCCEEDED
    report = of_path(str(group.job_directory), None)
    adds_up(report)
    assert (report.goodput.attempts, report.goodput.interruptions) == (2, 1)
    tasks = {chapter.label: chapter.timeline for chapter in report.chapters}
    for first, second in zip(tasks["server"].attempts, tasks["client"].attempts):
        assert second.begun > first.begun + 1.5 and second.queue_s == pytest.approx(first.queue_s, abs=1.5)
        assert second.granted - second.allocated > 1.5


@pytest.fixture
def laptop(cluster: Cluster, login: Login) -> Iterator[Laptop]:
    laptop = Laptop(cluster)
    yield laptop
    laptop.close()


@pytest.mark.slow
@pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login()))
def test_from_a_laptop_a_run_is_reported_while_it_waits_runs_and_after(laptop: Laptop) -> None:
    held = laptop.launch("exec sleep 4832", "--sbatch-arg=--hold", num_nodes=1)
    done = laptop.gangrun("report", held.run)
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE and "it waits in the queue since" in done.stderr
    script = "echo up; until [ -e ~/go-$SLURM_JOB_ID ]; do sleep 0.2; done; echo down; exit $SKYPILOT_NODE_RANK"
    job = laptop.launch(script, num_nodes=2)
    eventually(lambda: "up" in laptop.gangrun("logs", job.run).stdout, 60)
    found = laptop.json("report", job.run)
    assert (found["state"], found["has_ended"], len(found["tasks"][0]["attempts"][0]["ranks"])) == ("RUNNING", False, 2)
    assert found["begin"] < found["end"] and found["skipped_lines"] == 0
    (laptop.remote_home / f"go-{job.job}").touch()
    assert laptop.gangrun("wait", job.run).returncode == states.EXIT_FAILED
    page = laptop.home / "page.html"
    done = laptop.gangrun("report", job.run, "--html", str(page))
    assert (done.returncode, done.stdout) == (0, "")
    assert "1-worker1.log" in page.read_text() and "<pre>up\ndown</pre>" in page.read_text()
    done = laptop.gangrun("report", job.name)
    assert f"{job.run} (job {job.job}) FAILED, exit code 1: 2 nodes, 1 attempt" in done.stdout, done.stderr


GROUP = """\
name: {name}
execution: parallel
primary_tasks: [client]
termination_delay: 2s
---
name: server
ready: {{log: "up"}}
run: until [ -e ~/up-$SLURM_JOB_ID ]; do sleep 0.2; done; echo up; exec sleep 4836
---
name: client
num_nodes: 2
after: [server]
max_restarts: 1
run: |
  [ $GANGRUN_ATTEMPT = 0 ] || exit 0
  echo "begin $GANGRUN_RESTARTS"; sleep 1; [ $GANGRUN_RESTARTS = 1 ] || exit 3; exec sleep 4837
"""


@pytest.mark.slow
@pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login()))
def test_from_a_laptop_a_group_is_reported_while_it_waits_runs_is_requeued_and_after(laptop: Laptop) -> None:
    """One remote call each. Its second task has to wait for the first, fails once and is started again."""
    name = laptop.unique("web")
    (laptop.home / "group.yaml").write_text(GROUP.format(name=name))
    run = laptop.json("launch", "group.yaml", "--host", "head", "-d")
    report = lambda *args: laptop.json("report", run["run"], *args)  # noqa: E731
    go = laptop.remote_home / f"up-{run['job']}"
    try:
        eventually(lambda: laptop.gangrun("report", run["run"]).returncode == 0, 60)
        eventually(lambda: report("server")["state"] == protocol.RUNNING, 60)
        waiting = report()["tasks"][1]
        assert (waiting["task"], waiting["state"], waiting["num_nodes"]) == ("client", protocol.PENDING, 2)
        assert [rank["spans"][-1]["phase"] for rank in waiting["attempts"][0]["ranks"]] == ["waiting"] * 2
        go.touch()
        eventually(lambda: "begin 1" in laptop.gangrun("logs", run["run"]).stdout, 60)
        shown = laptop.gangrun("report", run["run"], "1")
        assert f"{run['run']}.client (job {run['job']}) RUNNING: 2 nodes, 1 attempt, 1 restart" in shown.stdout
        assert "* It failed once (exit code 3) and was started again" in shown.stdout, shown.stderr
        page = laptop.home / "group.html"
        assert laptop.gangrun("report", run["run"], "--html", str(page)).returncode == 0
        for words in ("server 0", "client 0", "client 0, restart 1"):
            assert f"<td>{words}</td>" in page.read_text()
        laptop.cluster.run("ctl", ["scontrol", "requeuehold", run["job"]])
        laptop.cluster.wait_state(int(run["job"]), "PENDING")
        eventually(lambda: "It waits in the queue again" in laptop.gangrun("report", run["run"]).stdout, 30)
        laptop.cluster.run("ctl", ["scontrol", "release", run["job"]])
        assert laptop.gangrun("wait", run["run"], timeout_s=120).returncode == 0
        found = report()
        assert (found["state"], found["goodput"]["attempts"], found["goodput"]["restarts"]) == ("SUCCEEDED", 2, 1)
        client = [(one["number"], one["restart"], one["state"]) for one in report("client")["tasks"][0]["attempts"]]
        assert client == [(0, 0, "FAILED"), (0, 1, "PENDING"), (1, 0, "SUCCEEDED")]
    finally:
        go.unlink(missing_ok=True)
        laptop.cluster.run("ctl", ["scancel", run["job"]], check=False)


# --- the picture in the README


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() != "", reason=browser.missing())
def test_the_picture_shows_a_real_run_that_was_requeued(bench: Bench, tmp_path: Path) -> None:
    directory = picture.run_job(bench, power=-1)
    found = of_path(str(directory), None)
    adds_up(found)
    assert (found.state, found.goodput.attempts, found.goodput.interruptions) == ("SUCCEEDED", 2, 1)
    assert found.goodput.checkpoint_s > 0 and found.goodput.recomputed_s > 0
    light, dark = (path.read_bytes() for path in picture.draw(directory, tmp_path))
    for shot in (light, dark):
        assert shot.startswith(b"\x89PNG") and int.from_bytes(shot[16:20], "big") == picture.WIDTH * picture.SCALE
    assert light != dark and len(list(tmp_path.iterdir())) == 2


def test_the_readme_shows_the_pictures_that_the_command_makes() -> None:
    readme = (CHECKOUT / "README.md").read_text()
    for scheme in picture.SCHEMES:
        assert f"docs/timeline-{scheme}.png" in readme and (CHECKOUT / "docs" / f"timeline-{scheme}.png").exists()
