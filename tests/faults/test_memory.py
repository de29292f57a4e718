"""The kernel ends a program because its step's cgroup has no memory left (ConstrainRAMSpace)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import Bench, Outcome, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import Row
from tests.minislurm.fixtures import BootCluster

KIND = "Memory"
BOUND_S = 30.0
EATS = "python3 -c 'a = bytearray(600 << 20); a[:] = bytes(600 << 20)'"
ONLY_RANK_1 = "[ $SKYPILOT_NODE_RANK = 1 ] || exec sleep 4501\n"


@pytest.fixture
def bench(own_cluster: BootCluster, shared_dir: Path) -> Bench:
    return Bench(own_cluster(nodes=2, constrain=("ram",)), shared_dir)


def out_of_memory(bench: Bench, row: Row, sbatch: str = "--mem=100", **fields: Any) -> Outcome:
    """Run a job on two nodes of which each may use 100 MB, to its end; nothing of it may be left."""
    row.injected()
    outcome = bench.drive(nodes=2, sbatch=sbatch, grace_s=2.0, **fields)
    row.ended(outcome, bench, "sleep 4501")
    assert row.seconds is not None and row.seconds < BOUND_S
    eventually(lambda: not bench.cluster.step_ids(int(outcome.status["slurm_job_id"])), 20)
    following = bench.drive(run="echo next", nodes=2, job_id="next")
    assert following.code == 0, following.output
    return outcome


@pytest.mark.parametrize("shell", ["exec ", ""])
def test_the_program_of_a_rank_is_killed(bench: Bench, fault: Fault, shell: str) -> None:
    row = fault(f"out of memory: the {'script' if shell else 'last program of the script'} of one rank is killed")
    outcome = out_of_memory(bench, row, run=ONLY_RANK_1 + shell + EATS)
    assert (outcome.code, outcome.status["state"], outcome.codes) == (137, "FAILED", [143, 137])
    assert "rank 1 on worker1" in row.seen and "out of memory" in row.seen.lower()
    assert "out of memory" in outcome.plain.split("gangrun: job", 1)[1].lower()


def test_a_child_is_killed_and_the_script_ends_with_0(bench: Bench, fault: Fault) -> None:
    row = fault("out of memory: a child of the script is killed, the script ends with 0")
    outcome = out_of_memory(bench, row, run=f"[ $SKYPILOT_NODE_RANK = 0 ] || {EATS} & wait; exit 0")
    assert (outcome.code, outcome.status["state"], outcome.codes) == (0, "SUCCEEDED", [0, 0])
    assert "rank 1 on worker1" in row.seen and "out of memory" in row.seen.lower()
    assert "out of memory" in outcome.plain.split("gangrun: job", 1)[1].lower()


def test_a_child_is_killed_and_the_script_fails_of_it(bench: Bench, fault: Fault) -> None:
    row = fault("out of memory: a child of the script is killed, the script ends with 3")
    outcome = out_of_memory(bench, row, run=f"{ONLY_RANK_1}{EATS} || exit 3")
    assert (outcome.code, outcome.status["state"], outcome.codes) == (3, "FAILED", [143, 3])
    assert "rank 1 on worker1" in row.seen and "out of memory" in row.seen.lower()


def test_setup_is_killed(bench: Bench, fault: Fault) -> None:
    row = fault("out of memory: the program of the setup step is killed on one node")
    setup = f"[ $SKYPILOT_SETUP_NODE_RANK = 0 ] || exec {EATS}"
    outcome = out_of_memory(bench, row, run="touch begun", setup=setup)
    assert (outcome.code, outcome.status["state"], outcome.codes) == (137, "FAILED_SETUP", [0, 137])
    assert "rank 1 on worker1" in row.seen and "out of memory" in row.seen.lower()
    assert not (bench.directory / "begun").exists()
