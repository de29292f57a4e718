"""Every file in examples/ does what it says, on the real cluster."""

import importlib.util
import shutil
import sys

import pytest

from tests.bench import CHECKOUT, Bench, Outcome

EXAMPLES = CHECKOUT / "examples"


@pytest.fixture
def examples(bench: Bench) -> Bench:
    shutil.copytree(EXAMPLES, bench.directory / "examples")
    return bench


def gangrun(bench: Bench, example: str, nodes: int) -> Outcome:
    return bench.run_batch(f"exec gangrun run --log-dir=logs examples/{example}", nodes)


def test_hello_prints_from_every_rank(examples: Bench) -> None:
    outcome = gangrun(examples, "hello.yaml", 2)
    assert outcome.code == 0, outcome.output
    assert "(worker1, rank=1, pid=" in outcome.plain and "hello from rank 1 of 2 on n" in outcome.plain


def test_setup_installs_what_run_uses(examples: Bench) -> None:
    outcome = gangrun(examples, "setup_and_run.yaml", 3)
    assert outcome.code == 0, outcome.output
    assert [outcome.log(name) for name in ("0-head.log", "2-worker2.log")] == [
        "greetings from rank 0\n",
        "greetings from rank 2\n",
    ]


def test_a_script_starts_steps_over_the_whole_allocation(examples: Bench) -> None:
    outcome = gangrun(examples, "nested_srun.yaml", 3)
    assert outcome.code == 0, outcome.output
    hosts = examples.cluster.job(int(outcome_id(outcome))).node_list
    assert outcome.output.count("step task on n") == 3, hosts


def outcome_id(outcome: Outcome) -> str:
    return next(path.name for path in (outcome.directory / ".gangrun").iterdir())


def test_the_executor_runs_by_hand_without_driver_or_client(examples: Bench) -> None:
    job = examples.cluster.sbatch(EXAMPLES / "manual_srun.sbatch", cwd=examples.directory, env=examples.environ)
    end = examples.cluster.wait_job(job)
    logs = examples.directory / f"manual_srun-logs-{job}"
    assert end.state == "COMPLETED", (examples.directory / f"manual_srun-{job}.out").read_text()
    assert sorted(path.name for path in logs.iterdir()) == ["0-head.log", "1-worker1.log"]
    assert (logs / "1-worker1.log").read_text().startswith("rank 1 of 2, head is 10.")


def test_an_orchestrator_renders_submits_and_reads_the_result(examples: Bench) -> None:
    argv = [sys.executable, str(EXAMPLES / "orchestrator.py"), str(examples.directory / "run")]
    done = examples.cluster.run("ctl", argv, cwd=examples.directory, env=examples.environ)
    assert "SUCCEEDED, exit codes [0, 0]" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
def test_torchrun_finds_its_peers_through_the_injected_variables(examples: Bench) -> None:
    outcome = examples.run_batch("exec gangrun run --log-dir=logs examples/torch_ddp.yaml", 2, timeout_s=120)
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("weight 3.0") == 2 or outcome.output.count("weight 2.9") == 2
