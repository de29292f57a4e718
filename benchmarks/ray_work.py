"""What `python -m benchmarks ray` runs on the head of a Ray cluster: prints one JSON object of seconds and units."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PATIENCE_S = 120.0


@ray.remote(num_cpus=1)
def stamp() -> float:
    return time.time()


@ray.remote(num_cpus=1, num_gpus=1)
def stamp_with_gpu() -> float:
    """Ray ends a process that has had a GPU after its task: the next one starts a new process."""
    return time.time()


@ray.remote(num_cpus=1, num_gpus=1)
def work(seconds: float) -> None:
    time.sleep(seconds)


@ray.remote(num_cpus=1, num_gpus=1, max_calls=0)
def work_and_stay(seconds: float) -> None:
    """The process keeps what it has on its GPUs for the next phase: the program must know."""
    time.sleep(seconds)


def main() -> None:
    wish = json.loads(sys.argv[1])
    ray.init(address="auto", log_to_driver=False)
    nodes, gpus, rounds = wish["nodes"], wish["gpus"], wish["rounds"]
    found: dict[str, Any] = {}
    for name, task in (("turns, new", work), ("turns, kept", work_and_stay)):
        found[name] = _taking_turns(task, nodes, gpus, wish["phases"], wish["iterations"], wish["unit_s"])
    for name, task, own in (("warm", stamp, 0), ("new", stamp_with_gpu, 1)):
        found["task, " + name] = _rounds(rounds, partial(_one, task))
        found["gang, " + name] = _rounds(rounds, partial(_gang, task, nodes, own))
    print(json.dumps(found))


def _rounds(count: int, measure: Callable[[], float]) -> list[float]:
    """After one that warms up."""
    return [measure() for _ in range(count + 1)][1:]


def _one(task: Any) -> float:
    """From the call to the task's first line."""
    begun = time.time()
    return float(ray.get(task.remote())) - begun


def _gang(task: Any, nodes: int, gpus: int) -> float:
    """From the request for one bundle on each node to the last task's first line."""
    begun = time.time()
    with _reserved(nodes, gpus) as strategies:
        return float(max(ray.get([task.options(scheduling_strategy=one).remote() for one in strategies]))) - begun


def _taking_turns(task: Any, nodes: int, gpus: int, phases: Sequence[float], iterations: int, unit_s: float) -> float:
    """Units a round: each phase reserves all GPUs of all nodes, works on them, and gives them back."""
    begun = time.monotonic()
    for _ in range(iterations):
        for units in phases:
            with _reserved(nodes, gpus) as strategies:
                seconds = units * unit_s / (nodes * gpus)
                ray.get([task.options(num_gpus=gpus, scheduling_strategy=one).remote(seconds) for one in strategies])
    return (time.monotonic() - begun) / unit_s / iterations


@contextmanager
def _reserved(nodes: int, gpus: int) -> Iterator[list[Any]]:
    """One bundle on each node, as the strategies of tasks that run in them."""
    bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    if not group.wait(PATIENCE_S):
        raise RuntimeError("no placement group within %g s" % PATIENCE_S)
    try:
        yield [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            for index in range(nodes)
        ]
    finally:
        remove_placement_group(group)


if __name__ == "__main__":
    main()
