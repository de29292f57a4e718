"""Job groups from a laptop over ssh: launch, queue, logs, cancel."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from gangrun import show, states
from gangrun.records import Run
from tests.bench import eventually
from tests.client_bench import Laptop, Launched, without_colour
from tests.group_bench import trap
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.login import Login

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]
KINDS = [pytest.param(False, id="homogeneous"), pytest.param(True, id="heterogeneous", marks=pytest.mark.slow)]
FOREVER = "echo up; exec sleep 4721"


@pytest.fixture
def laptop(cluster: Cluster, login: Login) -> Iterator[Laptop]:
    laptop = Laptop(cluster)
    yield laptop
    laptop.close()


def write(laptop: Laptop, *tasks: dict[str, Any], **header: Any) -> Path:
    """A group's file; each document is JSON, which is YAML."""
    name = laptop.unique("rl")
    documents = [{"name": name, "execution": "parallel", **header}, *tasks]
    path = laptop.home / f"{name}.yaml"
    path.write_text("\n---\n".join(map(json.dumps, documents)) + "\n")
    return path


def launch(laptop: Laptop, *tasks: dict[str, Any], flags: Sequence[str] = (), **header: Any) -> Launched:
    run = laptop.json("launch", str(write(laptop, *tasks, **header)), "--host", laptop.host, *flags)
    laptop._launched.append(Launched(laptop, run["run"], run["job"], run["name"]))
    return laptop._launched[-1]


def task(name: str, run: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "run": run, **fields}


def tasks_of(job: Launched) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in job.record().get("tasks") or ()}


def until_up(job: Launched, *names: str) -> None:
    paths = [job.directory / "tasks" / f"{name}.out" for name in names]
    eventually(lambda: all(path.exists() and re.search(r"\bup\n", path.read_text()) for path in paths), 40)


class TestLaunch:
    def test_a_group_is_followed_to_its_end_with_the_lines_of_all_tasks_and_its_code(self, laptop: Laptop) -> None:
        path = write(
            laptop, task("trainer", "echo trained; exit 7"), task("server", trap("exit 0")), primary_tasks=["trainer"]
        )
        followed = laptop.gangrun("launch", str(path), "--host", "head")
        assert (followed.returncode, "exit code 7" in followed.stderr) == (states.EXIT_FAILED, True), followed.stderr
        assert re.search(r"^\[trainer\] .*trained$", followed.stdout, re.M)
        assert "trainer" in followed.stderr, "the verdict names the task"

    def test_tasks_find_each_other_by_name_and_start_when_the_other_is_ready(self, laptop: Laptop) -> None:
        ask = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://{}\").status)'"
        path = write(
            laptop,
            task("server", "sleep 1; exec python3 -m http.server 18321", ready={"port": 18321, "timeout": "60s"}),
            task("client", "true", after=["server"]),
            primary_tasks=["client"],
            termination_delay="5s",
        )
        name = path.stem
        path.write_text(path.read_text().replace('"true"', json.dumps(ask.format(f"server-0.{name}:18321"))))
        followed = laptop.gangrun("launch", str(path), "--host", "head")
        assert followed.returncode == 0, followed.stdout + followed.stderr
        assert re.search(r"^\[client\] .*200$", followed.stdout, re.M)

    @pytest.mark.parametrize("placement", ["shared", "separate"])
    def test_tasks_get_what_they_asked_for(self, laptop: Laptop, placement: str) -> None:
        """One after the other in the file, and by kind: a shared node's GPUs are divided, components have their own."""
        run = "echo gpus=$CUDA_VISIBLE_DEVICES; hostname; sleep 1"
        job = launch(
            laptop,
            task("a", run, resources={"accelerators": "GPU:1", "cpus": 2, "memory": 1}),
            task("b", run, resources={"accelerators": "GPU:1", "cpus": 1, "memory": 1}),
            task("c", run),
            placement=placement,
        )
        assert laptop.gangrun("wait", job.run).returncode == 0
        said = {name: laptop.gangrun("logs", job.run, name, "--rank", "0").stdout.split() for name in "abc"}
        hosts = {words[1] for words in said.values()}
        gpus = [said[name][0] for name in "abc"]
        if placement == "shared":
            assert (len(hosts), sorted(gpus)) == (1, ["gpus=", "gpus=0", "gpus=1"])
        else:
            assert (len(hosts), gpus) == (3, ["gpus=0", "gpus=0", "gpus="])

    def test_tasks_are_packed_on_the_nodes_that_the_cluster_has(self, laptop: Laptop) -> None:
        """Its nodes have two GPUs; the plan tells beforehand where each task will be, and the output where it is."""
        run = "echo gpus=$CUDA_VISIBLE_DEVICES; sleep 2"
        tasks = [task(name, run, resources={"accelerators": "GPU:1"}) for name in ("trainer", "reward", "data")]
        shared = {"placement": "shared"}
        planned = laptop.json("launch", str(write(laptop, *tasks, **shared)), "--host", "head", "--dry-run")
        assert planned["nodes"] == [["trainer", "data"], ["reward"]] and "--nodes=2" in planned["sbatch"]
        followed = laptop.gangrun("launch", str(write(laptop, *tasks, **shared)), "--host", "head")
        assert followed.returncode == 0, followed.stdout + followed.stderr
        where = re.search(r"^gangrun: trainer on (n\d), reward on (n\d), data on (n\d)$", followed.stdout, re.M)
        assert where and where.group(1) == where.group(3) != where.group(2), followed.stdout
        gpus = dict(re.findall(r"\[(\w+)\] .*gpus=(\d)", without_colour(followed.stdout)))
        assert len(gpus) == 3 and gpus["trainer"] != gpus["data"], gpus

    def test_a_pipeline_stops_at_its_first_failure(self, laptop: Laptop) -> None:
        job = launch(laptop, task("a", "echo one"), task("b", "exit 4"), task("c", "echo three"), execution="serial")
        assert laptop.gangrun("wait", job.run).returncode == states.EXIT_FAILED
        seen = laptop.json("status", job.run)[0]
        assert (seen["state"], seen["exit_code"]) == (protocol.FAILED, 4) and seen["reason"].startswith("b:")
        assert [one["state"] for one in seen["tasks"]] == [protocol.SUCCEEDED, protocol.FAILED, protocol.CANCELLED]

    def test_a_group_from_python(self, laptop: Laptop) -> None:
        answer = laptop.python(
            """
            import json, gangrun
            group = gangrun.Group(
                "rl", tasks=[gangrun.Task(name="trainer", run="exit 3"), gangrun.Task(name="server", run="sleep 4722")],
                primary=["trainer"], termination_delay="5s",
            )
            job = gangrun.Cluster("head").launch(group)
            end = job.wait(60)
            print(json.dumps([end.state, end.exit_code, [one["state"] for one in end.tasks]]))
            """
        )
        assert answer == [protocol.FAILED, 3, [protocol.FAILED, protocol.CANCELLED]]


class TestQueue:
    def test_one_row_for_the_group_and_one_below_it_for_each_task(self, laptop: Laptop) -> None:
        job = launch(laptop, task("trainer", FOREVER, num_nodes=2), task("server", FOREVER), primary_tasks=["trainer"])
        until_up(job, "trainer", "server")

        def lines() -> list[str]:
            listed = laptop.gangrun("queue", "--host", "head").stdout.split("\n")
            first = next(number for number, line in enumerate(listed) if line.startswith(job.run))
            return listed[first : first + 3]

        eventually(lambda: all(protocol.RUNNING in line for line in lines()), 20)
        group, trainer, server = lines()
        assert re.match(rf"{job.run} +{job.job} +head +RUNNING +3 +0 ", group)
        assert re.match(r" ↳ trainer \[P\] +RUNNING +2 +0 +\d+s", trainer)
        assert re.match(r" ↳ server  +RUNNING +1 +0 +\d+s", server)
        seen = job.seen()
        assert [(one["name"], one["is_primary"], one["state"]) for one in seen["tasks"]] == [
            ("trainer", True, protocol.RUNNING),
            ("server", False, protocol.RUNNING),
        ]

    def test_the_end_of_one_task_shows_while_the_group_goes_on(self, laptop: Laptop) -> None:
        """No row says FAILED for the group while its tasks still run, and one rule gives state and code."""
        job = launch(
            laptop, task("a", "exit 3"), task("b", FOREVER), task("c", "exit 5"), primary_tasks=["a", "b"],
            on_primary_failure="continue",
        )  # fmt: skip
        until_up(job, "b")
        eventually(lambda: {one["state"] for one in tasks_of(job).values()} == {protocol.FAILED, protocol.RUNNING}, 20)
        assert job.seen()["state"] == protocol.RUNNING
        by_name = {one["name"]: one for one in job.seen()["tasks"]}
        assert (by_name["a"]["exit_code"], by_name["c"]["exit_code"]) == (3, 5)
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0
        seen = job.seen()
        assert (seen["state"], seen["exit_code"]) == (protocol.FAILED, 3), "it failed before the cancel"
        assert laptop.gangrun("wait", job.run).returncode == states.EXIT_FAILED

    def test_tasks_of_a_requeued_group_wait_as_it_does(self, laptop: Laptop) -> None:
        """Not CANCELLED, or still RUNNING, as the attempt before has left them."""
        job = launch(laptop, task("a", FOREVER), task("b", FOREVER))
        until_up(job, "a", "b")
        laptop.cluster.run("ctl", ["scontrol", "requeue", job.job])
        eventually(lambda: job.seen()["state"] == protocol.PENDING, 20)
        tasks = job.seen()["tasks"]
        assert [(one["state"], one["reason"], one["ended"]) for one in tasks] == [(protocol.PENDING, "", None)] * 2

    def test_explain_tells_which_tasks_wait_for_what_and_which_have_failed(self, laptop: Laptop) -> None:
        job = launch(
            laptop,
            task("server", FOREVER, ready={"command": "echo no model yet; false"}),
            task("client", "true", after=["server"]),
            task("logger", "exit 5"),
            primary_tasks=["client"],
        )
        until_up(job, "server")
        eventually(lambda: {one["state"] for one in tasks_of(job).values()} >= {protocol.FAILED, protocol.RUNNING}, 20)
        said = laptop.gangrun("explain", job.run).stdout
        assert re.search(r"^ +task client waits for command .*of server: ", said, re.M), said
        assert re.search(r"^ +task logger is FAILED: rank 0 on \w+ failed first \(exit code 5\)$", said, re.M), said


def test_words_of_srun_with_several_lines_stay_in_the_line_of_their_task() -> None:
    reason = "srun: error: no GPU\nsrun: error: no step"
    one = {"name": "a", "is_primary": True, "state": protocol.FAILED, "nodes": [], "reason": reason}
    run = Run("g-1", "g", "lab", "~", "7", state=protocol.FAILED, is_final=True, reason=reason, tasks=[one])
    lines = show.status_lines(run, {}, 0.0)
    assert lines[0].endswith(": srun: error: no GPU srun: error: no step")
    assert lines[-1] == "  task a: FAILED; srun: error: no GPU srun: error: no step"
    assert "\n" not in "".join(lines)


class TestLogs:
    def test_all_tasks_together_and_one_by_name_or_number(self, laptop: Laptop) -> None:
        count = "for i in 1 2 3; do echo line $i of {}; sleep 0.2; done"
        job = launch(
            laptop, task("trainer", count.format("trainer"), num_nodes=2), task("server", count.format("server"))
        )
        assert laptop.gangrun("wait", job.run).returncode == 0
        everything = laptop.gangrun("logs", job.run)
        lines = [line for line in everything.stdout.split("\n") if " line " in line]
        assert sum(line.startswith("[trainer] ") and line.endswith("of trainer") for line in lines) == 6
        assert sum(line.startswith("[server] ") and line.endswith("of server") for line in lines) == 3
        assert f"0 trainer, 1 server); one alone: gangrun logs {job.run} TASK" in everything.stderr
        for word in ("server", "1"):
            one = laptop.gangrun("logs", job.run, word)
            assert one.returncode == 0
            assert [
                line.rpartition(") ")[2] for line in without_colour(one.stdout).split("\n") if " line " in line
            ] == [f"line {number} of server" for number in (1, 2, 3)]
            assert "trainer" not in one.stdout
        rank = laptop.gangrun("logs", job.run, "trainer", "--rank", "1")
        assert rank.stdout == "".join(f"line {number} of trainer\n" for number in (1, 2, 3))

    def test_a_task_that_is_not_there_is_answered_with_those_that_are(self, laptop: Laptop) -> None:
        job = launch(laptop, task("trainer", "true"), task("server", "true"))
        for word in ("evaluator", "2"):
            asked = laptop.gangrun("logs", job.run, word)
            assert asked.returncode not in (0, 1)
            assert "0 trainer, 1 server" in asked.stderr and "Traceback" not in asked.stderr

    def test_a_rank_of_a_task_can_be_followed_before_it_has_begun(self, laptop: Laptop) -> None:
        job = launch(
            laptop,
            task("server", "sleep 3; echo served", ready={"log": "served"}),
            task("trainer", "echo trained", num_nodes=2, after=["server"]),
        )
        typed = [
            laptop.popen("logs", "-f", job.run, *which) for which in (("trainer", "--rank", "1"), ("0", "--rank", "0"))
        ]
        assert [(one.wait(), one.out) for one in typed] == [(0, "trained\n"), (0, "served\n")]

    def test_following_one_task_ends_with_the_group(self, laptop: Laptop) -> None:
        job = launch(
            laptop, task("trainer", "echo up; sleep 2; echo over"), task("server", FOREVER), primary_tasks=["trainer"]
        )
        followed = laptop.gangrun("logs", "-f", job.run, "trainer")
        assert followed.returncode == 0
        assert "over\n" in followed.stdout and "[server]" not in followed.stdout


class TestCancel:
    @pytest.mark.parametrize("is_het", KINDS)
    def test_every_program_gets_one_term_and_its_own_delay_and_is_gone(self, laptop: Laptop, is_het: bool) -> None:
        """The site's KillWait is 2 s, and the longest of the delays is what the cancel waits for."""
        job = launch(
            laptop,
            task("trainer", trap("sleep 1; echo saved; exit 0"), num_nodes=2, resources={"cpus": 2 if is_het else 1}),
            task("buffer", trap("sleep 2; echo flushed; exit 0"), resources={"cpus": 1}),
            primary_tasks=["trainer"],
            termination_delay={"default": "1s", "buffer": "40s"},
            slurm={"grace": "5s"},
        )
        until_up(job, "trainer", "buffer")
        assert json.loads((job.directory / "meta.json").read_text())["grace_s"] == 40
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout, cancelled.stderr
        assert laptop.gangrun("logs", job.run, "trainer", "--rank", "1").stdout == "up\ngot TERM\nsaved\n"
        assert laptop.gangrun("logs", job.run, "buffer", "--rank", "0").stdout == "up\ngot TERM\nflushed\n"
        assert not job.processes()
        assert laptop.gangrun("wait", job.run).returncode == states.EXIT_CANCELLED

    @pytest.mark.parametrize("is_het", KINDS)
    def test_a_shorter_grace_ends_all_tasks_by_force(self, laptop: Laptop, is_het: bool) -> None:
        deaf = "trap '' TERM; echo up; while :; do sleep 0.2; done"
        job = launch(
            laptop,
            task("trainer", deaf, resources={"cpus": 2 if is_het else 1}),
            task("server", deaf, resources={"cpus": 1}),
            slurm={"grace": "10m"},
        )
        until_up(job, "trainer", "server")
        begun = time.monotonic()
        cancelled = laptop.gangrun("cancel", job.run, "--grace", "1s")
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout, cancelled.stderr
        assert time.monotonic() - begun < 25
        eventually(lambda: not job.processes(), 5)

    def test_a_group_that_waits_for_its_nodes(self, laptop: Laptop) -> None:
        job = launch(laptop, task("a", "true"), task("b", "true"), flags=["--sbatch-arg=--hold"])
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout
