"""gang: three nodes of a real Slurm, from srun to the last rank's first line, and from the last line to srun's exit."""

from typing import Callable

from benchmarks.bed import Bed, Step, booted, missing
from benchmarks.drivers import render_ours, run_drivers
from benchmarks.measure import interleaved, median
from benchmarks.place import SKYPILOT, STAMP, Session
from benchmarks.report import Limit

NODES = 3
GANGRUN, DATE, BASH = "gangrun", "srun date", "srun bash -c date"
OVER_FIRST_MS = Limit(90)
OVER_TAIL_MS = Limit(100)
DRIVER_S = Limit(1)
DRIVERS = 5


def run(session: Session) -> None:
    reason = missing()
    if reason:
        session.report.skip("gang", reason)
        return
    with booted(session.place, NODES) as bed:
        _steps(session, bed)
        _drivers(session, bed)


def _steps(session: Session, bed: Bed) -> None:
    with bed.allocation() as job:
        candidates: dict[str, Callable[[], Step]] = {
            GANGRUN: lambda: bed.step(job, bed.ours()),
            DATE: lambda: bed.step(job, STAMP.split()),
            BASH: lambda: bed.step(job, ["bash", "-c", STAMP]),
        }
        peer, place = session.peer, session.place
        if peer is not None:
            theirs = peer
            candidates[SKYPILOT] = lambda: bed.step(job, theirs.executor(STAMP, place.new("sky"), place.home, bed.ips))
        steps = interleaved(candidates, session.rounds, session.few)
    _print(session, "srun to the last rank's first line", steps, 0, OVER_FIRST_MS)
    _print(session, "last line to srun's exit", steps, 1, OVER_TAIL_MS)


def _print(session: Session, title: str, steps: dict[str, list[Step]], part: int, limit: Limit) -> None:
    report = session.report
    report.heading("gang: %d nodes, %s, median of %d" % (NODES, title, session.rounds))
    ms = {name: median([step[part] for step in found]) * 1000 for name, found in steps.items()}
    report.row(GANGRUN, ms[GANGRUN], "ms", (DATE, ms[DATE]), (SKYPILOT, ms.get(SKYPILOT)))
    for name in (DATE, BASH, SKYPILOT):
        report.row(name, ms.get(name), "ms")
    over = [(ours[part] - plain[part]) * 1000 for ours, plain in zip(steps[GANGRUN], steps[DATE])]
    report.row("gangrun over srun date, median of the rounds", median(over), "ms", limit=limit)


def _drivers(session: Session, bed: Bed) -> None:
    rounds = min(session.rounds, DRIVERS)
    peer, place = session.peer, session.place

    def make(job: str) -> list[tuple[str, list[str]]]:
        runs: list[tuple[str, list[str]]] = []
        for number in range(rounds + 1):
            name = "warm-up" if number == 0 else GANGRUN
            runs.append((name, render_ours(bed, job, "bench-%d" % number, "true", "true")))
            if peer is not None and number in (1, 2):
                path = place.new("sky") + "/driver.py"
                with open(path, "w", encoding="utf-8") as file:
                    file.write(peer.driver(job, path + ".logs", bed.ips, place.environ()))
                runs.append((SKYPILOT, [peer.python, "-u", path]))
        return runs

    seconds = {name: median(found) for name, found in run_drivers(bed, make).items()}
    session.report.heading(
        "gang: a trivial setup and run on %d nodes through the driver, median of %d" % (NODES, rounds)
    )
    theirs = seconds.get(SKYPILOT)
    session.report.row(GANGRUN, seconds[GANGRUN], "s", (SKYPILOT, theirs), limit=DRIVER_S)
    session.report.row(SKYPILOT, theirs, "s")
