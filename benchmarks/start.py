"""start: from exec to the script's first line, and what the executor costs until then and beside the script."""

import sys
import time
from typing import Callable

from benchmarks import child, trace
from benchmarks.child import Child
from benchmarks.measure import interleaved, median
from benchmarks.place import SKYPILOT, STAMP, Session
from benchmarks.report import Limit

ARCHIVE, MODULE = "gangrun, archive", "gangrun, python -m executor.slurm"
BARE, PLAIN, BASH = "python -I -S -c pass (whole)", "python -c pass (whole)", "bash -c date"
FIRST_LINE_MS = Limit(35)
MODULE_MS = Limit(60)
RSS_MB = Limit(20)
PATH_OPERATIONS = Limit(350)
SHARED_OPERATIONS = Limit(40)
BESIDE = Limit(0)
LONGER_SCRIPT = STAMP + "; sleep 0.4"
SETTLED_S = 0.2


def run(session: Session) -> None:
    times = _times(session)
    _resident(session)
    _traced(session)
    _beside(session)
    _module(session, times)


def _times(session: Session) -> dict[str, float]:
    place, report = session.place, session.report
    environ = place.rank_environ()
    first: dict[str, Callable[[], float]] = {
        ARCHIVE: lambda: _first_line_ms(place.executor(STAMP), environ),
        MODULE: lambda: _first_line_ms(place.module(STAMP), environ),
        BASH: lambda: _first_line_ms(["bash", "-c", STAMP], environ),
        BARE: lambda: _whole_ms([sys.executable, "-I", "-S", "-c", "pass"], environ),
        PLAIN: lambda: _whole_ms([sys.executable, "-c", "pass"], environ),
    }
    peer = session.peer
    if peer is not None:
        first[SKYPILOT] = lambda: _first_line_ms(peer.executor(STAMP, place.new("sky"), place.home), environ)
    answers = interleaved(first, session.rounds, session.few)
    ms = {name: median(values) for name, values in answers.items()}
    report.heading("start: exec to the script's first line, median of %d" % session.rounds)
    floors = ((BARE, ms[BARE]), (BASH, ms[BASH]), (SKYPILOT, ms.get(SKYPILOT)))
    report.row(ARCHIVE, ms[ARCHIVE], "ms", *floors, limit=FIRST_LINE_MS)
    report.row(ARCHIVE + ", best", min(answers[ARCHIVE]), "ms", (BARE, min(answers[BARE])))
    report.row(SKYPILOT, ms.get(SKYPILOT), "ms")
    for name in (BARE, BASH):
        report.row(name, ms[name], "ms")
    return ms


def _module(session: Session, ms: dict[str, float]) -> None:
    session.report.heading("start: by hand, over the same interpreter's -c pass")
    session.report.row(MODULE, ms[MODULE], "ms")
    session.report.row(PLAIN, ms[PLAIN], "ms")
    session.report.row("the difference", ms[MODULE] - ms[PLAIN], "ms", (SKYPILOT, ms.get(SKYPILOT)), limit=MODULE_MS)


def _first_line_ms(argv: list[str], environ: dict[str, str]) -> float:
    ended = child.run(argv, environ)
    return (stamps(ended.output)[0] - ended.started) * 1000


def _whole_ms(argv: list[str], environ: dict[str, str]) -> float:
    ended = child.run(argv, environ)
    return (ended.ended - ended.started) * 1000


def stamps(output: bytes) -> list[float]:
    """The times that a script printed with `date`, whatever stands before them."""
    found = []
    for line in output.decode("utf-8", "replace").splitlines():
        word = line.split()[-1] if line.split() else ""
        if len(word.partition(".")[2]) == 9 and word.replace(".", "").isdigit():
            found.append(float(word))
    return found


def _resident(session: Session) -> None:
    place, peer = session.place, session.peer
    environ = place.rank_environ()
    session.report.heading("start: largest resident memory of the process alone")
    ours = child.run(place.executor(LONGER_SCRIPT), environ).peak_rss_mb
    bare = child.run([sys.executable, "-I", "-S", "-c", "import time; time.sleep(0.2)"], environ).peak_rss_mb
    theirs = None
    if peer is not None:
        theirs = child.run(peer.executor(LONGER_SCRIPT, place.new("sky"), place.home), environ).peak_rss_mb
    session.report.row(ARCHIVE, ours, "MB", ("python -I -S", bare), (SKYPILOT, theirs), limit=RSS_MB)
    session.report.row("python -I -S", bare, "MB")
    session.report.row(SKYPILOT, theirs, "MB")


def _traced(session: Session) -> None:
    place, peer, report = session.place, session.peer, session.report
    report.heading("start: path operations of the executor up to the script's exec")
    reason = trace.missing()
    if reason:
        report.skip("path operations", reason)
        return
    environ = place.rank_environ()
    bare = trace.path_operations([sys.executable, "-I", "-S", "-c", "pass"], environ, place.shared).total
    ours = trace.path_operations(place.executor("true"), environ, place.shared, until="bash")
    theirs = None
    if peer is not None:
        argv = peer.executor("true", place.new("sky"), place.home)
        theirs = trace.path_operations(argv, environ, place.shared, until="bash").total
    report.row(ARCHIVE, ours.total, "calls", ("python -I -S", bare), (SKYPILOT, theirs), limit=PATH_OPERATIONS)
    report.row("of these on the shared file system", ours.shared, "calls", limit=SHARED_OPERATIONS)
    report.row("python -I -S -c pass", bare, "calls")
    report.row(SKYPILOT, theirs, "calls")


def _beside(session: Session) -> None:
    place, peer = session.place, session.peer
    session.report.heading("start: processes beside the executor and its script, 0.2 s after the script's first line")
    names = _others(place.executor("echo $$; " + LONGER_SCRIPT), place.rank_environ())
    session.report.row(ARCHIVE, len(names), "", limit=BESIDE, note=", ".join(names))
    if peer is not None:
        argv = peer.executor("echo $$; " + LONGER_SCRIPT, place.new("sky"), place.home)
        names = _others(argv, place.rank_environ())
        session.report.row(SKYPILOT, len(names), "", note=", ".join(sorted(name[:60] for name in names)))
    else:
        session.report.row(SKYPILOT, None, "")


def _others(argv: list[str], environ: dict[str, str]) -> list[str]:
    """Command lines of what is neither the executor nor the script nor a child of the script."""
    names: list[str] = []
    seen = bytearray()
    with Child(argv, environ) as process:

        def look(chunk: bytes) -> None:
            seen.extend(chunk)
            if stamps(chunk):
                time.sleep(SETTLED_S)
                names.extend(_beside_of(process, bytes(seen)))

        process.wait(look)
    return names


def _beside_of(process: Child, output: bytes) -> list[str]:
    script = {int(word) for word in output.split() if word.isdigit()}
    others = process.others()
    tree = child.parents(others)
    ours = {pid for pid, parent in tree.items() if pid in script or parent in script}
    return [child.command_of(pid) for pid in others if pid not in ours]
