"""Every group in examples/ does what it says, sent from a laptop to a real cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from tests.bench import CHECKOUT, Bench
from tests.client_bench import Laptop, without_colour
from tests.minislurm import Cluster, preflight
from tests.minislurm.fixtures import BootCluster
from tests.minislurm.options import CONTROLLER

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]
EXAMPLES = CHECKOUT / "examples"


class Examples(Laptop):
    """A laptop with a copy of the examples."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        shutil.copytree(EXAMPLES, self.home / "examples")

    def launch_and_follow(self, example: str, *flags: str, timeout_s: float = 60) -> Outcome:
        """To its end; its names are this test's own."""
        name = self.unique(Path(example).stem.replace("_", "-")[:12])
        argv = ["launch", f"examples/{example}", "--host", self.host, "--name", name, "--time", "5m", *flags]
        done = self.gangrun(*argv, timeout_s=timeout_s)
        return Outcome(self, name, done)

    def replace(self, example: str, old: str, new: str) -> None:
        path = self.home / "examples" / example
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    def close(self) -> None:
        self.gangrun("cancel", "--all", "--grace", "1s")
        super().close()


class Outcome:
    """A group that was followed to its end."""

    def __init__(self, laptop: Laptop, name: str, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.said = done.returncode, without_colour(done.stdout + done.stderr)
        runs = laptop.json("queue", "-a", "--host", laptop.host)
        self.run: dict[str, Any] = next(run for run in runs if run["name"] == name)

    @property
    def states(self) -> dict[str, str]:
        return {task["name"]: task["state"] for task in self.run["tasks"]}

    def lines(self, task: str) -> list[str]:
        """What the scripts of a task printed, without its prefixes."""
        return re.findall(rf"^\[{task}\] \([^)]*\) (.*)$", self.said, re.MULTILINE)


def laptops(cluster: Cluster) -> Iterator[Examples]:
    examples = Examples(cluster)
    yield examples
    examples.close()


@pytest.fixture
def examples(cluster: Cluster) -> Iterator[Examples]:
    yield from laptops(cluster)


@pytest.fixture
def five_nodes(own_cluster: BootCluster) -> Iterator[Examples]:
    yield from laptops(own_cluster(nodes=5, gpus=0))


SUCCEEDED, CANCELLED = protocol.SUCCEEDED, protocol.CANCELLED


def test_clients_share_the_servers_work_and_the_server_ends_with_them(examples: Examples) -> None:
    outcome = examples.launch_and_follow("server_client.yaml")
    assert outcome.code == 0, outcome.said
    found = [re.fullmatch(r"client (\d): (\d+) pieces, sum (\d+)", line) for line in outcome.lines("client")]
    ranks, pieces, sums = zip(*(map(int, one.groups()) for one in found if one))
    assert sorted(ranks) == [0, 1] and all(pieces)
    assert (sum(pieces), sum(sums)) == (100, sum(n * n for n in range(1, 101)))
    assert outcome.states == {"server": CANCELLED, "client": SUCCEEDED}


def test_an_evaluator_scores_the_last_checkpoint_although_the_trainer_has_ended(examples: Examples) -> None:
    outcome = examples.launch_and_follow("train_eval.yaml")
    assert outcome.code == 0, outcome.said
    scored = [line.split(": loss ") for line in outcome.lines("evaluator") if ": loss " in line]
    assert [step for step, _ in scored] == [f"step-{n}00" for n in range(1, 6)]
    assert float(scored[-1][1]) < 1e-3
    assert outcome.lines("evaluator")[-1] == "evaluated 5 checkpoints"
    assert outcome.states["trainer"] == SUCCEEDED


def test_a_pipeline_runs_its_tasks_one_after_the_other(examples: Examples) -> None:
    outcome = examples.launch_and_follow("pipeline.yaml")
    assert outcome.code == 0, outcome.said
    assert sorted(outcome.lines("sum")) == ["2500", "2550"]
    assert outcome.lines("report") == ["total 5050"]
    times = [(task["started"], task["ended"]) for task in outcome.run["tasks"]]
    assert all(ended <= started for (_, ended), (started, _) in zip(times, times[1:]))


def test_a_pipeline_stops_at_the_first_failure(examples: Examples) -> None:
    examples.replace("pipeline.yaml", "tee sum-$SKYPILOT_NODE_RANK", "tee sum-$SKYPILOT_NODE_RANK; exit 9")
    outcome = examples.launch_and_follow("pipeline.yaml")
    assert outcome.code != 0 and outcome.run["exit_code"] == 9, outcome.said
    assert outcome.lines("report") == [] and outcome.states["report"] == protocol.CANCELLED


def test_a_group_from_python_says_how_each_task_ended(examples: Examples) -> None:
    typed = examples.start("python", "examples/group_sdk.py", examples.host)
    assert typed.wait(60) == 0, typed.err
    said = without_colour(typed.out)
    assert re.search(r"^group group-sdk-\w+: SUCCEEDED, exit code 0$", said, re.MULTILINE), said
    assert "  server: CANCELLED on 1 node(s)\n  client: SUCCEEDED on 2 node(s)\n" in said
    assert said.count("the server says 200") == 2


def test_two_tasks_from_python_one_of_them_cancelled(examples: Examples) -> None:
    typed = examples.start("python", "examples/sdk.py", examples.host)
    assert typed.wait(60) == 0, typed.err
    assert re.fullmatch(r"sdk-quick-\w+ SUCCEEDED 0\nrank 1 of 2\nCANCELLED\n", without_colour(typed.out)), typed.out


@pytest.mark.slow
def test_rollout_and_training_take_turns_on_all_gpus(own_cluster: BootCluster, shared_dir: Path) -> None:
    cluster = own_cluster(nodes=4, gpus=4, cpus=8)
    bench = Bench(cluster, shared_dir)
    argv = ["gangrun", "launch", str(EXAMPLES / "rlhf_elastic.yaml"), "--host", "local"]
    said = cluster.run(CONTROLLER, argv, cwd=bench.directory, env=bench.environ, timeout_s=120).stdout
    units = [float(text) for text in re.findall(r"round \d: ([0-9.]+) units a round", said)]
    assert len(units) == 2 and 15 <= units[-1] < 30, said  # 30 is what a pool split in halves needs


def test_each_checkpoint_is_scored_by_a_task_that_joins_the_running_group(bench: Bench) -> None:
    """On the login node itself: there gangrun is installed where the nodes see it."""
    shutil.copytree(EXAMPLES, bench.directory / "examples")

    def gangrun(*args: str) -> str:
        done = bench.cluster.run(CONTROLLER, ["gangrun", *args], cwd=bench.directory, env=bench.environ, timeout_s=90)
        return without_colour(done.stdout)

    said = gangrun("launch", "examples/eval_watcher.yaml", "--host", "local", "--time", "5m")
    losses = re.findall(r"^\[eval-(\d00)\] \([^)]*\) step \1: loss ([0-9.]+)$", said, re.MULTILINE)
    assert [step for step, _ in losses] == ["100", "200", "300"], said
    assert all(f") {loss}\n" in said for _, loss in losses), "the watcher shows them"
    run = json.loads(gangrun("queue", "-a", "--json"))[0]
    names = ["trainer", "watcher", "eval-100", "eval-200", "eval-300"]
    assert [(task["name"], task["state"]) for task in run["tasks"]] == [(name, SUCCEEDED) for name in names]
    assert "loss " + losses[1][1] in gangrun("logs", "last", "eval-200")


def learned(outcome: Outcome) -> dict[str, int]:
    """What the answers of the rollout server were in the end."""
    line = next(line for line in outcome.lines("trainer") if line.startswith("learned with"))
    return {prompt: int(answer) for prompt, answer in re.findall(r"(\d\+\d)=(\d)", line)}


class TestReinforcementLearning:
    """Five tasks, each on a node of its own."""

    def test_the_rollout_server_learns_what_only_the_reward_server_knows(self, five_nodes: Examples) -> None:
        outcome = five_nodes.launch_and_follow("rl_post_training.yaml", "--env", "OFFSET=4")
        assert outcome.code == 0, outcome.said
        assert learned(outcome) == {f"{a}+{b}": a + b + 4 for a in range(3) for b in range(3)}
        assert outcome.states.pop("trainer") == SUCCEEDED
        assert len({node for task in outcome.run["tasks"] for node in task["nodes"]}) == 5
        assert re.fullmatch(r"saved \d+ samples", outcome.lines("replay-buffer")[-1]), "its delay is for saving"
        five_nodes.gangrun("logs", outcome.run["run"], "--download", "taken")
        for task in outcome.states:
            log = five_nodes.home / "taken" / task / protocol.SINGLE_LOG_NAME
            assert log.read_text().splitlines() == outcome.lines(task)

    @pytest.mark.parametrize(
        "file, old, new",
        [
            ("rollout_server.py", "policy.load()", "pass"),  # the weights do not come back
            ("reward_server.py", "rewards = score(", "rewards = [0] * len(samples) or score("),
            ("trainer.py", "policy.learn(prompt, answer, reward - mean)", "pass"),
        ],
    )
    @pytest.mark.slow
    def test_nothing_is_learned_where_the_circle_is_cut(
        self, five_nodes: Examples, file: str, old: str, new: str
    ) -> None:
        five_nodes.replace("rl/trainer.py", "MOST_STEPS = 64, 400", "MOST_STEPS = 64, 60")
        five_nodes.replace(f"rl/{file}", old, new)
        outcome = five_nodes.launch_and_follow("rl_post_training.yaml")
        assert outcome.run["exit_code"] == 1, outcome.said
        assert "nothing learned in 60 steps" in outcome.lines("trainer")
