"""barrier: what a gang asks of the shared file system while half of it waits, and how soon the last end frees all.

The executor's own Gang, Barrier and Timer, a set for each rank, on a virtual clock in one process: the counts are
those of N nodes, however busy this machine is. Counted is every call of `os` on a shared file, close(2) too.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple
from unittest import mock

from benchmarks.measure import median
from benchmarks.place import SKYPILOT, Place, Session
from benchmarks.report import Limit
from benchmarks.skypilot import MODULE, PeerError, SkyPilot
from executor import protocol
from executor.gang import Gang
from executor.identity import Identity
from executor.loop import Timer
from executor.member import ORDER_FIRST_S, ORDER_LONGEST_S
from executor.options import Options

SIZES = (8, 64, 512, 1024, 4096)
TARGET_SIZE = 1024
SHARE_OF_SKYPILOT = Limit(1)
LAG_S = Limit(2)
CALLS = ("open", "read", "write", "ftruncate", "close", "stat", "lstat", "unlink", "rename", "listdir")
BEGUN_S, HALF_S, SETTLED_S, WINDOW_S = 10.0, 20.0, 60.0, 60.0  # ranks begin and end at random times, never in step
SKYPILOT_POLL_S = 0.5
SAMPLED_RANKS = 8  # all that wait do the same
FEW_RELEASES, RELEASES, MANY_RANKS = 5, 20, 2000
SEED = 7
# The peer's own barrier, two sweeps of a few ranks: prints the calls of the second. Run by the peer's Python.
THEIR_SWEEP = """
import importlib, os, sys, time
barrier = importlib.import_module(sys.argv[1])._wait_for_all_ranks
directory, num_ranks, ranks = sys.argv[2], int(sys.argv[3]), [int(word) for word in sys.argv[4:]]
calls, sweeps = 0, 0
class Enough(BaseException): pass
def counted(call):
    def count(*args, **how):
        global calls
        calls += sweeps
        return call(*args, **how)
    return count
def sleep(seconds):
    global sweeps
    if sweeps or seconds != %r: raise Enough
    sweeps = 1
for name in ("open", "close", "stat"): setattr(os, name, counted(getattr(os, name)))
time.sleep = sleep
for rank in ranks:
    sweeps = 0
    try: barrier(directory, rank, num_ranks)
    except Enough: pass
print(calls / len(ranks))
""" % (SKYPILOT_POLL_S,)


class Cost(NamedTuple):
    """Calls a second on the shared file system."""

    mean: float
    busiest: float
    opens: float


def run(session: Session) -> None:
    for num_ranks in SIZES:
        _compare(session, num_ranks)


def _compare(session: Session, num_ranks: int) -> None:
    report, place, peer = session.report, session.place, session.peer
    is_target = num_ranks == TARGET_SIZE
    report.heading("barrier: %d ranks, half of them done, calls on the shared file system" % num_ranks)
    ours = _ours(place, num_ranks)
    restated = _restated(place, num_ranks)
    theirs = _theirs(place, num_ranks, peer) if peer else None
    report.row("gangrun", ours.mean, "calls/s", (SKYPILOT, theirs or restated))
    report.row("gangrun, busiest second", ours.busiest, "calls/s")
    report.row("gangrun, open(2) alone", ours.opens, "calls/s")
    report.row("SkyPilot, its algorithm restated", restated, "calls/s")
    report.row("SkyPilot, its own code", theirs, "calls/s")
    share = 100 * ours.mean / (theirs or restated)
    report.row("gangrun / SkyPilot", share, "%", limit=SHARE_OF_SKYPILOT if is_target else None)
    chance, count = random.Random(SEED), FEW_RELEASES if num_ranks > MANY_RANKS else RELEASES
    lags = [_release(place, num_ranks, chance, chance.randrange(num_ranks))[0] for _ in range(count)]
    report.row("the last end to the last release, median", median(lags), "s")
    their_lag_s = _their_lag(num_ranks)
    limit = LAG_S if is_target else None
    report.row("the worst of %d" % len(lags), max(lags), "s", (SKYPILOT, their_lag_s), limit=limit)
    report.row("SkyPilot", their_lag_s, "s")
    # Rank 0 stops at the first rank that is still open: when that one ends, it reads all others in one go.
    last_look = _release(place, num_ranks, random.Random(SEED), last=1)[1]
    report.row("rank 0 opens for its last look if rank 1 ends last", last_look, "files")


class Calls(collections.Counter[str]):
    """Calls of `os` by name, while `counting` lasts."""

    @property
    def all(self) -> int:
        return sum(self.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        counted: dict[str, Any] = {name: self._counted(name) for name in CALLS}
        with mock.patch.multiple(os, **counted):
            yield

    def _counted(self, name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def count(*args: Any, **how: Any) -> Any:
            self[name] += 1
            return call(*args, **how)

        return count


class Clock:
    """Calls timers of the executor back in the order in which they are due; stands for time.monotonic meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled: set[Timer] = set()

    def add(self, timer: Timer) -> Timer:
        heapq.heappush(self._queue, (timer.due, next(self._numbers), timer))
        return timer

    def at(self, moment: float, callback: Callable[[], None]) -> None:
        """Call back once."""

        def once() -> None:
            self.cancel(timer)
            callback()

        timer = Timer(once, 0.0, 0.0)
        timer.due = moment
        self.add(timer)

    def cancel(self, timer: Timer) -> None:
        self._cancelled.add(timer)

    def run_until(self, moment: float) -> None:
        with mock.patch.object(time, "monotonic", lambda: self.now):
            while self._queue and self._queue[0][0] <= moment:
                due, _, timer = heapq.heappop(self._queue)
                if timer in self._cancelled:
                    self._cancelled.discard(timer)
                    continue
                self.now = max(self.now, due)
                timer.fire()
                self.add(timer)
        self.now = moment


class Rank:
    """What a Member does with its gang once its script runs, without the script."""

    def __init__(self, clock: Clock, launch: protocol.Launch, rank: int, num_ranks: int) -> None:
        self._clock = clock
        self._num_ranks = num_ranks
        self.released: float | None = None
        me = Identity(rank, num_ranks, rank, protocol.local_address(rank), "n%d" % rank, ())
        options = Options(launch_dir=launch.directory)
        self.gang = Gang(me, launch, options)
        self._longest_beat_s = min(protocol.BEAT_LONGEST_S, options.liveness_timeout_s / 4)

    def begin(self) -> None:
        self.gang.join()
        self._beat = self._clock.add(Timer(self.gang.beat, protocol.BEAT_FIRST_S, self._longest_beat_s))
        self._ear = self._clock.add(Timer(self._listen, ORDER_FIRST_S, ORDER_LONGEST_S))

    def _listen(self) -> None:
        self.gang.order()

    def end(self) -> None:
        self._clock.cancel(self._ear)
        self.gang.end(protocol.RANK_DONE, 0)
        self._barrier = self.gang.barrier()
        self._poll = Timer(self._look, protocol.POLL_FIRST_S, self._barrier.interval_s())
        self._poll.due = self._clock.now
        self._clock.add(self._poll)

    def _look(self) -> None:
        self._poll.longest_s = self._barrier.interval_s()
        if self._barrier.is_over():
            self.released = self._clock.now
            self._clock.cancel(self._poll)
            self._clock.cancel(self._beat)


@contextmanager
def _gang(place: Place, num_ranks: int, chance: random.Random) -> Iterator[tuple[Clock, list[Rank]]]:
    """All ranks, begun at random times."""
    clock, launch = Clock(), place.launch(num_ranks)
    try:
        ranks = [Rank(clock, launch, rank, num_ranks) for rank in range(num_ranks)]
        for rank in ranks:
            clock.at(chance.uniform(0, BEGUN_S), rank.begin)
        yield clock, ranks
    finally:
        shutil.rmtree(launch.directory)


def _ours(place: Place, num_ranks: int) -> Cost:
    chance, calls = random.Random(SEED), Calls()
    with _gang(place, num_ranks, chance) as (clock, ranks):
        for rank in (ranks[0], *chance.sample(ranks[1:], num_ranks // 2 - 1)):
            clock.at(chance.uniform(BEGUN_S, HALF_S), rank.end)
        clock.run_until(SETTLED_S)
        seconds: list[int] = []
        with calls.counting():
            for second in range(int(WINDOW_S)):
                before = calls.all
                clock.run_until(SETTLED_S + second + 1)
                seconds.append(calls.all - before)
    return Cost(calls.all / WINDOW_S, max(seconds), calls["open"] / WINDOW_S)


def _release(place: Place, num_ranks: int, chance: random.Random, last: int) -> tuple[float, int]:
    """All ranks end, `last` some time after the others. Seconds until all are free; records that rank 0 read then."""
    last_end_s = HALF_S + chance.uniform(10, 15)
    with _gang(place, num_ranks, chance) as (clock, ranks):
        for rank in ranks:
            clock.at(last_end_s if rank is ranks[last] else chance.uniform(BEGUN_S, HALF_S), rank.end)
        clock.run_until(last_end_s)
        with mock.patch.object(ranks[0].gang, "peer", side_effect=ranks[0].gang.peer) as peer:
            while any(rank.released is None for rank in ranks):
                clock.run_until(clock.now + 1)
        return max(rank.released or 0.0 for rank in ranks) - last_end_s, peer.call_count


def _restated(place: Place, num_ranks: int) -> float:
    directory, sampled = _half_done(place, num_ranks)
    calls = Calls()
    for rank in sampled:
        pending = set(range(num_ranks)) - {rank}
        _sweep(directory, pending)
        with calls.counting():
            _sweep(directory, pending)
    shutil.rmtree(directory)
    return calls.all / len(sampled) * (num_ranks // 2) / SKYPILOT_POLL_S


def _sweep(directory: str, pending: set[int]) -> None:
    """SkyPilot's `_wait_for_all_ranks` between two sleeps of half a second."""
    for peer in sorted(pending):
        try:
            os.close(os.open(os.path.join(directory, str(peer)), os.O_RDONLY))
            pending.discard(peer)
        except FileNotFoundError:
            pass
    if pending:
        os.path.isdir(directory)


def _theirs(place: Place, num_ranks: int, peer: SkyPilot) -> float:
    directory, sampled = _half_done(place, num_ranks)
    argv = [peer.python, "-c", THEIR_SWEEP, MODULE, directory, str(num_ranks), *map(str, sampled)]
    done = subprocess.run(argv, text=True, capture_output=True, env=place.environ(), check=False)
    shutil.rmtree(directory)
    if done.returncode:
        raise PeerError("SkyPilot's barrier cannot be counted: " + "".join(done.stderr.strip().splitlines()[-1:]))
    return float(json.loads(done.stdout)) * (num_ranks // 2) / SKYPILOT_POLL_S


def _half_done(place: Place, num_ranks: int) -> tuple[str, list[int]]:
    """Its directory when a random half of the ranks has written a file, and some of those that wait."""
    directory, chance = place.new("run-done"), random.Random(SEED)
    done = chance.sample(range(num_ranks), num_ranks // 2)
    for rank in done:
        open(os.path.join(directory, str(rank)), "w").close()
    return directory, done[:SAMPLED_RANKS]


def _their_lag(num_ranks: int) -> float:
    """Each rank sweeps once in half a second, at a time of its own: the last one frees the gang."""
    chance = random.Random(SEED)
    return max(chance.uniform(0, SKYPILOT_POLL_S) for _ in range(num_ranks - 1))
