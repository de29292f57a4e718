"""How things are measured on a busy machine: the candidates take turns, and the median of each speaks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Callable, TypeVar

Answer = TypeVar("Answer")


def interleaved(
    candidates: Mapping[str, Callable[[], Answer]], rounds: int, fewer: Mapping[str, int] = {}
) -> dict[str, list[Answer]]:
    """`rounds` answers of each candidate after one warm-up, in turns; those in `fewer` stop after their number."""
    for measure in candidates.values():
        measure()
    answers: dict[str, list[Answer]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, measure in candidates.items():
            if number < fewer.get(name, rounds):
                answers[name].append(measure())
    return answers


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
