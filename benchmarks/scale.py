"""scale: 32 real slurmd nodes on this machine, one rank on each, from srun's start to its exit."""

from benchmarks.bed import Bed, Step, booted, missing
from benchmarks.drivers import render_ours, run_drivers
from benchmarks.measure import interleaved, median
from benchmarks.place import STAMP, Session
from benchmarks.report import Limit

NODES = 32
GANGRUN, PLAIN = "gangrun", "srun date"
WHOLE_S = Limit(5)
ROUNDS = 5


def run(session: Session) -> None:
    reason = missing()
    if reason:
        session.report.skip("scale", reason)
        return
    with booted(session.place, NODES) as bed:
        _steps(session, bed)
        _driver(session, bed)


def _steps(session: Session, bed: Bed) -> None:
    rounds = min(session.rounds, ROUNDS)
    with bed.allocation() as job:

        def ours() -> Step:
            return bed.step(job, bed.ours())

        def plain() -> Step:
            return bed.step(job, STAMP.split())

        steps = interleaved({GANGRUN: ours, PLAIN: plain}, rounds)
    report = session.report
    report.heading(
        "scale: %d ranks on %d slurmd nodes, srun's start to its exit, median of %d" % (NODES, NODES, rounds)
    )
    whole = {name: median([step.whole_s for step in found]) for name, found in steps.items()}
    first = {name: median([step.first_s for step in found]) for name, found in steps.items()}
    tail = {name: median([step.tail_s for step in found]) for name, found in steps.items()}
    report.row(GANGRUN, whole[GANGRUN], "s", (PLAIN, whole[PLAIN]), limit=WHOLE_S)
    report.row("gangrun, to the last rank's first line", first[GANGRUN], "s", (PLAIN, first[PLAIN]))
    report.row("gangrun, last line to exit", tail[GANGRUN], "s", (PLAIN, tail[PLAIN]))
    report.row(PLAIN, whole[PLAIN], "s")


def _driver(session: Session, bed: Bed) -> None:
    seconds = run_drivers(bed, lambda job: [(GANGRUN, render_ours(bed, job, "scale", "true", "true"))])
    session.report.heading("scale: a trivial setup and run on %d nodes through the driver" % NODES)
    session.report.row(GANGRUN, seconds[GANGRUN][0], "s")
