"""setup: from the moment setup is said to be done to the start of the waiting scripts."""

import time
from contextlib import ExitStack

from benchmarks import bed, start
from benchmarks.child import Child
from benchmarks.drivers import render_ours, run_drivers
from benchmarks.measure import median, percentile
from benchmarks.place import SKYPILOT, STAMP, Session
from benchmarks.report import Limit
from executor import protocol
from executor.shared import SignalFile

GANGRUN = "gangrun"
MEDIAN_MS = Limit(30)
WAITS_S = (0.5, 2.0, 6.0)  # how long setup took: polling that backs off gets slower with it
RANKS = 12
APART_S = 0.21
SKYPILOT_WAITS_S = 10.0  # its start takes seconds
NODES = 3
ROUNDS = 3
CLUSTER_SETUP_S = 3


def run(session: Session) -> None:
    for wait_s in WAITS_S:
        _on_this_machine(session, wait_s)
    reason = bed.missing()
    if reason:
        session.report.skip("setup on the test bed", reason)
        return
    with bed.booted(session.place, NODES) as nodes:
        _through_drivers(session, nodes)


def _on_this_machine(session: Session, wait_s: float) -> None:
    report = session.report
    report.heading("setup: fired to the script's start, after a setup of about %g s, %d executors" % (wait_s, RANKS))
    ours = _ours(session, wait_s)
    theirs = _theirs(session) if wait_s == WAITS_S[0] else []
    their_median = median(theirs) if theirs else None
    report.row("gangrun, median", median(ours), "ms", (SKYPILOT, their_median), limit=MEDIAN_MS)
    report.row("gangrun, best", min(ours), "ms")
    report.row("gangrun, p90", percentile(ours, 0.9), "ms")
    if wait_s == WAITS_S[0]:
        report.row("SkyPilot (polls every 100 ms)", their_median, "ms")


def _ours(session: Session, wait_s: float) -> list[float]:
    place = session.place
    pairs: list[tuple[list[str], str]] = []
    for _ in range(RANKS):
        launch = place.launch()
        pairs.append((place.executor(STAMP, launch, waits=True), launch.setup_done))
    return _lags_ms(pairs, place.rank_environ(), wait_s)


def _theirs(session: Session) -> list[float]:
    peer, place = session.peer, session.place
    if peer is None:
        return []
    pairs: list[tuple[list[str], str]] = []
    for _ in range(RANKS // 3):
        folder = place.new("sky")
        signal = folder + "/setup_done"
        pairs.append((peer.executor(STAMP, folder, place.home) + ["--setup-done-signal-file=" + signal], signal))
    return _lags_ms(pairs, place.rank_environ(), SKYPILOT_WAITS_S)


def _lags_ms(pairs: list[tuple[list[str], str]], environ: dict[str, str], wait_s: float) -> list[float]:
    """Start them one after the other and fire each after its wait; the waits differ, so that no phase is preferred."""
    events = [(APART_S * number, number, False) for number in range(len(pairs))]
    spread = [wait_s * (0.75 + 0.5 * number / len(pairs)) for number in range(len(pairs))]
    events += [(APART_S * number + wait, number, True) for number, wait in enumerate(spread)]
    fired, waiting = [0.0] * len(pairs), {}
    begun = time.monotonic()
    with ExitStack() as stack:
        for due, number, is_fire in sorted(events):
            time.sleep(max(0.0, begun + due - time.monotonic()))
            argv, signal = pairs[number]
            if is_fire:
                fired[number] = time.time()
                SignalFile(signal).fire(protocol.GO)
            else:
                waiting[number] = stack.enter_context(Child(argv, environ))
        ended = {number: process.wait() for number, process in waiting.items()}
    return [(start.stamps(ended[number].output)[0] - fired[number]) * 1000 for number in ended]


def _through_drivers(session: Session, nodes: bed.Bed) -> None:
    """The driver's own word that setup has ended, against the last rank's first line."""
    folders: list[tuple[str, str]] = []

    def make(job: str) -> list[tuple[str, list[str]]]:
        runs = []
        for number in range(min(session.rounds, ROUNDS)):
            stamp = nodes.place.new("stamps")
            script = "%s >%s/$SKYPILOT_NODE_RANK" % (STAMP, stamp)
            name = "setup-%d" % number
            runs.append((GANGRUN, render_ours(nodes, job, name, "sleep %d" % CLUSTER_SETUP_S, script)))
            folders.append((protocol.job_directory(nodes.place.home, job, name), stamp))
        return runs

    run_drivers(nodes, make)
    lags = [_last_stamp(stamp) - bed.state_times(directory)[protocol.RUNNING] for directory, stamp in folders]
    title = "setup: through the driver, %d nodes, setup takes %d s, RUNNING to the last rank's start, median of %d"
    session.report.heading(title % (NODES, CLUSTER_SETUP_S, len(lags)))
    session.report.row(GANGRUN, median(lags) * 1000, "ms")


def _last_stamp(folder: str) -> float:
    found = []
    for rank in range(NODES):
        with open("%s/%d" % (folder, rank), "rb") as file:
            found += start.stamps(file.read())
    return max(found)
