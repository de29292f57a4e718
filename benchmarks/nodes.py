"""nodes: 64 real slurmd nodes on this machine: how a step begins and ends, and what the driver costs under output."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks import child
from benchmarks.bed import JOB_TIMEOUT_S, Bed, Step, booted, missing, quoted
from benchmarks.measure import interleaved, median
from benchmarks.place import STAMP, Session
from codegen import Bundle, Job, render_driver
from tests.minislurm.proc import children

NODES = 64
ROUNDS = 3
GANGRUN, PLAIN = "gangrun", "srun hostname"
LINES_PER_S, SECONDS, TICKS_PER_S = 1000, 10, 10
LINE = "0123456789 twenty more bytes of nothing 0123456789"
LOOK_S = 0.2
# A rank's share, by bash alone: a block of lines ten times a second, by the clock and not by sleeping so long each
# time. Says at the end how long it took: longer than asked for where the machine cannot take it.
PRINT = """\
export LC_ALL=C; exec {never}<> <(:); block=; for ((i = 0; i < %d; i++)); do block+=$'%s\\n'; done
begun=${EPOCHREALTIME/./}
for ((tick = 1; tick <= %d; tick++)); do
  printf %%s "$block"
  left=$(( begun + tick * %d - ${EPOCHREALTIME/./} ))
  (( left <= 0 )) || { printf -v left %%07d $left; read -r -t ${left:0:-6}.${left: -6} -u $never || :; }
done
echo "printed in $(( ${EPOCHREALTIME/./} - begun )) us"
""" % (LINES_PER_S // TICKS_PER_S, LINE, SECONDS * TICKS_PER_S, 1000000 // TICKS_PER_S)
WHOLE = re.compile(r"[^()]*\(\w+, rank=\d+, pid=\d+(?:, ip=\S+)?\)\S* " + LINE + "$")
ENDED = re.compile(r"printed in (\d+) us")


class Used(NamedTuple):
    """What a process had used when it was last seen."""

    peak_mb: float
    cpu_s: float


def run(session: Session) -> None:
    reason = missing()
    if reason:
        session.report.skip("nodes", reason)
        return
    begun = time.monotonic()
    with booted(session.place, NODES) as bed:
        session.report.heading("nodes: %d slurmd nodes up after %.1f s" % (NODES, time.monotonic() - begun))
        _steps(session, bed)
        _busy(session, bed)


def _steps(session: Session, bed: Bed) -> None:
    rounds, report = min(session.rounds, ROUNDS), session.report
    with bed.allocation() as job:

        def ours() -> Step:
            return bed.step(job, bed.ours())

        def plain() -> Step:
            return bed.step(job, ["sh", "-c", "hostname; " + STAMP])

        steps = interleaved({GANGRUN: ours, PLAIN: plain}, rounds)
    report.heading("nodes: one rank on each of %d nodes, median of %d" % (NODES, rounds))
    for part, title in enumerate(("launch to the last rank's first line", "last line to srun's exit", "in all")):
        seconds = {name: median([step[part] for step in found]) for name, found in steps.items()}
        report.row("%s: %s" % (GANGRUN, title), seconds[GANGRUN], "s", (PLAIN, seconds[PLAIN]))
        report.row("%s: %s" % (PLAIN, title), seconds[PLAIN], "s")


# --- a driver while all ranks print


def _busy(session: Session, bed: Bed) -> None:
    report, log = session.report, bed.place.new("busy") + "/log"
    report.heading("nodes: %d ranks print %d lines a second each for %d s" % (NODES, LINES_PER_S, SECONDS))
    driver = _driver(bed)
    begun = time.monotonic()
    job = bed.batch("exec %s" % quoted(driver), log)
    used = _watch(bed, job, driver)
    wall_s = time.monotonic() - begun
    with open(log, encoding="utf-8", errors="replace") as file:
        printed = Printed.of(file)
    if printed.ranks != NODES:
        raise RuntimeError(
            "%d of %d ranks came to the end of their output; see the driver's log:\n%s"
            % (printed.ranks, NODES, printed.others)
        )
    wanted = NODES * LINES_PER_S * SECONDS
    report.row("whole lines in the driver's output", printed.whole, "lines", note="of %d" % wanted)
    report.row("cut into one another or lost", wanted - printed.whole, "lines", note=printed.example)
    report.row("the slowest rank had printed after", printed.longest_s, "s", note="%d s asked for" % SECONDS)
    rate = printed.whole / printed.longest_s
    report.row("so this machine delivered", rate, "lines/s", note="%d asked for" % (wanted / SECONDS))
    for name in sorted(used):
        report.row(name + ", peak memory (VmHWM)", used[name].peak_mb, "MB")
        report.row(name + ", CPU time", used[name].cpu_s, "s", note="of %.1f s from sbatch to the end" % wall_s)


class Printed(NamedTuple):
    """What came through to the driver's output."""

    whole: int
    ranks: int
    longest_s: float
    others: str

    @property
    def example(self) -> str:
        broken = [line for line in self.others.splitlines() if LINE[:10] in line]
        return "as in %r" % broken[0][:160] if broken else ""

    @classmethod
    def of(cls, lines: Iterable[str]) -> Printed:
        whole, others, seconds = 0, [], []
        for line in lines:
            if WHOLE.match(line):
                whole += 1
            elif found := ENDED.search(line):
                seconds.append(int(found[1]) / 1e6)
            else:
                others.append(line)
        return cls(whole, len(seconds), max(seconds, default=0.0), "".join(others[-20:]))


def _driver(bed: Bed) -> list[str]:
    directory = bed.place.new("driver")
    job = Job(
        job_id="busy",
        num_nodes=NODES,
        log_dir=directory + "/logs",
        cluster_ips=tuple(bed.ips),
        setup="true",
        run=PRINT,
        python=sys.executable,
    )
    return [sys.executable, Bundle(job, render_driver(job)).write(directory)]


def _watch(bed: Bed, job: int, driver: Sequence[str]) -> dict[str, Used]:
    """What the driver and its largest srun had used when they were last seen, once the job has ended."""
    used: dict[str, Used] = {}
    deadline = time.monotonic() + JOB_TIMEOUT_S
    head = bed.cluster.nodes[0]
    pid = 0
    while not bed.cluster.job(job).ended:
        if time.monotonic() > deadline:
            raise RuntimeError("job %d has not ended after %.0f s" % (job, JOB_TIMEOUT_S))
        if not pid:
            found = [p.pid for p in bed.cluster.processes(head) if p.cmdline == " ".join(driver)]
            pid = found[0] if found else 0
        for name, one in (
            [("driver", pid), *(("srun", one) for one in children(pid) if child.command_of(one).startswith("srun "))]
            if pid
            else []
        ):
            now = _used(one)
            before = used.get(name, now)
            used[name] = Used(max(now.peak_mb, before.peak_mb), max(now.cpu_s, before.cpu_s))
        time.sleep(LOOK_S)
    return used


def _used(pid: int) -> Used:
    """Zeros if it has ended."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return Used(0.0, 0.0)
    ticks = int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
    return Used(child.peak_rss_mb(pid), ticks / os.sysconf("SC_CLK_TCK"))
