"""The arithmetic before a run: what interruptions and checkpoints cost, and what a pool of GPUs yields. Pure functions.

Times are in seconds. Machine time is the time on nodes; the wait in the queue is none. "Useful" is the share of machine
time in which work is done that lasts. What cannot be represented (more than e^709 times a mean) is `inf`.

Young 1974: J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM
17(9), 530-531, doi:10.1145/361147.361115.
Daly 2006: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
Computer Systems 22(3), 303-312, doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from codegen.spec import SpecError

BISECTIONS = 200  # halves an interval until doubles have no more digits
ROUNDING = 1e-9  # a shorter rest of a stretch is none: a third of the work fits three times into it
AROUND_BEST = (0.25, 0.5, 1.0, 2.0, 4.0)
MOST_GPUS = 100_000


# --- interruptions and checkpoints


@dataclass(frozen=True)
class Plan:
    """A run before it runs.

    A checkpoint is made after every `every_s` of work and at the end, and takes `cost_s`; None: none is ever made.
    After an interruption the job waits `wait_s` in the queue, then needs `restart_s` on its nodes before work goes on.
    """

    work_s: float
    every_s: float | None = None
    cost_s: float = 0.0
    wait_s: float = 0.0
    restart_s: float = 0.0

    @property
    def checkpoints(self) -> int:
        return 0 if self.every_s is None else sum(count for count, _ in self.stretches())

    @property
    def checkpoint_s(self) -> float:
        return self.checkpoints * self.cost_s

    def stretches(self) -> list[tuple[int, float]]:
        """The work between two checkpoints as (how often, seconds): all alike, but the last may be shorter."""
        if self.every_s is None:
            return [(1, self.work_s)]
        whole, rest = divmod(self.work_s, self.every_s)
        is_rounding = rest < ROUNDING * self.every_s
        return [(int(whole), self.every_s), *([] if is_rounding else [(1, rest)])]

    def without_checkpoints(self) -> Plan:
        return Plan(self.work_s, None, 0.0, self.wait_s, self.restart_s)


class Outcome(NamedTuple):
    """What a plan comes to. `lost_s` is machine time for work done again and for restarts; `wait_s` is in the queue."""

    plan: Plan
    interruptions: float
    lost_s: float
    wait_s: float

    @property
    def machine_s(self) -> float:
        return self.plan.work_s + self.plan.checkpoint_s + self.lost_s

    @property
    def total_s(self) -> float:
        return self.machine_s + self.wait_s

    @property
    def slowdown(self) -> float:
        """The time in all, as a multiple of the work."""
        return self.total_s / self.plan.work_s

    @property
    def useful(self) -> float:
        """The share of machine time that is work which lasts, 0 to 1."""
        return self.plan.work_s / self.machine_s

    def to_json(self) -> dict[str, Any]:
        """Numbers that are not finite are null: JSON has none."""
        numbers = {
            "every_s": self.plan.every_s, "checkpoints": self.plan.checkpoints, "checkpoint_s": self.plan.checkpoint_s,
            "interruptions": self.interruptions, "lost_s": self.lost_s, "wait_s": self.wait_s,
            "machine_s": self.machine_s, "total_s": self.total_s, "slowdown": self.slowdown, "useful": self.useful,
        }  # fmt: skip
        return {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}


def lost_each_s(plan: Plan) -> float:
    """Work that an interruption takes, on average, in seconds: half of the stretch between two checkpoints.

    Model: it strikes at a moment of the work that is uniformly distributed over it, in a stretch of length L with
    probability L/W, and takes L/2 on average: sum(L^2) / 2W. Those that would strike within a checkpoint are left out;
    counting them too adds less than the cost of one checkpoint each.
    """
    return sum(count * length**2 for count, length in plan.stretches()) / (2 * plan.work_s)


def with_count(plan: Plan, interruptions: float) -> Outcome:
    """So many interruptions, whatever happens: the first-order arithmetic of Young 1974.

    total = work + checkpoints * cost + interruptions * (lost_each + restart + wait)
    """
    lost_s = interruptions * (lost_each_s(plan) + plan.restart_s)
    return Outcome(plan, interruptions, lost_s, interruptions * plan.wait_s)


def with_rate(plan: Plan, mtbp_s: float) -> Outcome:
    """Interruptions come at random, one in `mtbp_s` of machine time on average; expected values, exact.

    Model: times between interruptions are exponential with mean M. A stretch of L seconds (its work and its
    checkpoint) has to pass without one; what began it is lost otherwise, and restarts (R) can be interrupted, too. By
    renewal a stretch takes M * e^(R/M) * (e^(L/M) - 1) of machine time (Daly 2006, its complete cost function), so in
    machine time T there are T/M interruptions, each of which waits in the queue. The first start is not counted.
    """
    cost_s = plan.cost_s if plan.every_s is not None else 0.0
    tries = sum(count * _expm1((length + cost_s) / mtbp_s) for count, length in plan.stretches())
    interruptions = tries * (1 + _expm1(plan.restart_s / mtbp_s))
    machine_s = max(mtbp_s * interruptions, plan.work_s + plan.checkpoint_s)  # rounding must not gain time
    wait_s = interruptions * plan.wait_s if plan.wait_s else 0.0
    return Outcome(plan, interruptions, machine_s - plan.work_s - plan.checkpoint_s, wait_s)


def rate_of(outcome: Outcome) -> float | None:
    """The mean machine time between interruptions that a count stands for, in seconds; None without any."""
    return outcome.machine_s / outcome.interruptions if outcome.interruptions else None


def _expm1(exponent: float) -> float:
    try:
        return math.expm1(exponent)
    except OverflowError:
        return math.inf


# --- the best interval


def young_s(cost_s: float, mtbp_s: float) -> float:
    """The best work between two checkpoints, in seconds, for cost << M: sqrt(2 * cost * M) (Young 1974)."""
    return math.sqrt(2 * cost_s * mtbp_s)


def daly_s(cost_s: float, mtbp_s: float) -> float:
    """The same to a higher order (Daly 2006): with x = cost / 2M,
    sqrt(2 * cost * M) * (1 + sqrt(x) / 3 + x / 9) - cost for cost < 2M, else M."""
    if cost_s >= 2 * mtbp_s:
        return mtbp_s
    ratio = cost_s / (2 * mtbp_s)
    return young_s(cost_s, mtbp_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def best_s(cost_s: float, mtbp_s: float) -> float:
    """The work between two checkpoints, in seconds, that `with_rate` has to be least for endless work.

    Where the derivative of (e^((t + cost)/M) - 1) / t is zero: t/M = 1 - e^(-(t + cost)/M), which has one solution
    between 0 and M. The wait in the queue and the restart are factors, which do not move it.
    """
    low, high = 0.0, mtbp_s
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        is_below = middle / mtbp_s < -math.expm1(-(middle + cost_s) / mtbp_s)
        low, high = (middle, high) if is_below else (low, middle)
    return low


def best_plan(plan: Plan, mtbp_s: float) -> Plan:
    """This work in equal stretches, as many as take least."""
    pieces = plan.work_s / best_s(plan.cost_s, mtbp_s)
    choices = [_cut(plan, count) for count in (max(1, math.floor(pieces)), math.ceil(pieces))]
    return min(choices, key=lambda choice: with_rate(choice, mtbp_s).total_s)


def _cut(plan: Plan, pieces: int) -> Plan:
    return every(plan, plan.work_s / pieces)


def every(plan: Plan, every_s: float) -> Plan:
    """The same plan with another interval."""
    return Plan(plan.work_s, every_s, plan.cost_s, plan.wait_s, plan.restart_s)


def around(plan: Plan, mtbp_s: float) -> list[Outcome]:
    """The best interval, some shorter and longer ones, the plan's own, and no checkpoints, from short to long."""
    best = best_plan(plan, mtbp_s).every_s or plan.work_s
    lengths = {factor * best for factor in AROUND_BEST if plan.cost_s < factor * best <= plan.work_s}
    plans = [every(plan, length) for length in sorted(lengths | ({plan.every_s} if plan.every_s else set()))]
    return [with_rate(one, mtbp_s) for one in (*plans, plan.without_checkpoints())]


# --- a pool of GPUs


class Use(NamedTuple):
    """One way to use a pool: the GPUs of each phase, and the time of an iteration. `used` is the share of the pool's
    time in which a GPU works, 0 to 1."""

    gpus: tuple[int, ...]
    iteration_s: float
    used: float


@dataclass(frozen=True)
class Pool:
    """`gpus` GPUs for phases that come one after the other in every iteration.

    `phases` are GPU-seconds of each in an iteration: a phase on n GPUs takes 1/n of them. `turn_s` is what it takes to
    begin a phase on other GPUs than those of the one before it. Raises SpecError for what is no pool.
    """

    gpus: int
    phases: Mapping[str, float]
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.gpus <= MOST_GPUS:
            raise SpecError(f"--pool={self.gpus}: use 1 to {MOST_GPUS} GPUs")
        if len(self.phases) < 2:
            raise SpecError(f"--phase: there are {len(self.phases)}; use at least two, such as --phase rollout=160")
        if self.gpus < len(self.phases):
            raise SpecError(f"--pool={self.gpus}: {len(self.phases)} phases cannot split it; use a GPU for each")

    @property
    def work(self) -> list[float]:
        return list(self.phases.values())

    def split(self, gpus: Sequence[int]) -> Use:
        """Each phase keeps its GPUs, which are idle while the others work."""
        return self._use(gpus, math.fsum(work / count for work, count in zip(self.work, gpus)))

    def even_split(self) -> Use:
        share, rest = divmod(self.gpus, len(self.phases))
        return self.split([share + (index < rest) for index in range(len(self.phases))])

    def best_split(self) -> Use:
        """The split with the shortest iteration. GPU by GPU to the phase that gains most: the gains only fall."""
        return self.split(self._dealt(lambda work, count: work / count - work / (count + 1)))

    def overlapped(self) -> Use:
        """Split, and no phase waits for another one of its iteration: the longest of them sets the pace."""
        gpus = self._dealt(lambda work, count: work / count)
        return self._use(gpus, max(work / count for work, count in zip(self.work, gpus)))

    def turns(self, turn_s: float | None = None) -> Use:
        """One phase after the other on all GPUs, each after `turn_s` (default: the pool's) of beginning."""
        begin_s = len(self.phases) * (self.turn_s if turn_s is None else turn_s)
        return self._use([self.gpus], math.fsum(self.work) / self.gpus + begin_s)

    def break_even_s(self) -> float:
        """What a turn may cost, in seconds, until the best split is as fast."""
        return max(0.0, self.best_split().iteration_s - self.turns(0.0).iteration_s) / len(self.phases)

    def _dealt(self, gain: Any) -> list[int]:
        gpus = [1] * len(self.phases)
        gains = [(-gain(work, 1), index) for index, work in enumerate(self.work)]
        heapq.heapify(gains)
        for _ in range(self.gpus - len(gpus)):
            index = gains[0][1]
            gpus[index] += 1
            heapq.heapreplace(gains, (-gain(self.work[index], gpus[index]), index))
        return gpus

    def _use(self, gpus: Sequence[int], iteration_s: float) -> Use:
        return Use(tuple(gpus), iteration_s, math.fsum(self.work) / (self.gpus * iteration_s))


@dataclass(frozen=True)
class Measured:
    """What `python -m benchmarks elastic` measured: iterations of a pool that is split evenly, and that takes turns.

    Iterations and phases are in the benchmark's units; `unit_s` is how long one of them took.
    """

    when: str
    where: str
    pool: int
    phases: Mapping[str, float]
    iterations: int
    unit_s: float
    split_units: float
    turns_units: float

    NAME = "elastic"  # its key in the benchmarks' file

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def turn_s(self) -> float:
        """What a turn took to begin, in seconds."""
        least = math.fsum(self.phases.values()) / self.pool
        return max(0.0, self.turns_units - least) * self.unit_s / len(self.phases)


def read_measured(path: str) -> Measured:
    """A file that `python -m benchmarks elastic --save FILE` wrote. Raises SpecError for another one."""
    try:
        with open(path, encoding="utf-8") as file:
            measured = Measured(**json.load(file)[Measured.NAME])
        return _checked(measured)
    except OSError as error:
        raise SpecError(f"--measured={path!r}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        ways = "python -m benchmarks elastic --save FILE"
        raise SpecError(f"--measured={path!r}: use a file that `{ways}` wrote") from None


def _checked(measured: Measured) -> Measured:
    """Raises ValueError, TypeError or AttributeError for what is no measurement."""
    numbers = [measured.pool, measured.iterations, measured.unit_s, measured.split_units, measured.turns_units]
    numbers += measured.phases.values()
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError
    if not (measured.when.isprintable() and measured.where.isprintable()):
        raise ValueError
    return measured
