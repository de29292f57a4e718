"""`python -m tests.soak`: hundreds of short jobs and one long one on a real Slurm, with parts killed at random moments.

Every verdict must be one that the kill allows: SUCCEEDED and 0 only if each rank's script came to its end. At the end
nothing may be left: processes, files, cgroups, memory. The seed decides about every job; exit code 1: a promise broke.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.options import Options
from tests.soak.jobs import GONE_S, Soak
from tests.soak.processes import Held

NODES, SLOTS, KILL_WAIT_S, REMEMBERED_S = 4, 4, 15, 30
GROWTH_MB, GROWTH_FDS = 30.0, 5  # of slurmctld, which remembers ended jobs for a while
WARM_UP_SHARE = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=500, metavar="N", help="short jobs (500)")
    parser.add_argument("--cycles", type=int, default=2000, metavar="N", help="setup/run cycles of the long job (2000)")
    parser.add_argument("--minutes", type=float, default=600, metavar="M", help="start nothing more after so long")
    parser.add_argument("--slots", type=int, default=SLOTS, metavar="N", help="short jobs side by side (%d)" % SLOTS)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first job, to repeat one")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), metavar="N")
    arguments = parser.parse_args()
    if reason := preflight.missing():
        print("soak: not here: " + reason, file=sys.stderr)
        return 2
    print("soak: seed %d" % arguments.seed, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="gangrun-soak-", dir="/tmp"))
    options = Options(nodes=NODES, name="soak", kill_wait_s=KILL_WAIT_S, min_job_age_s=REMEMBERED_S)
    with Cluster.boot(folder / "slurm", options) as cluster:
        soak = Soak(cluster, folder, arguments.seed, time.monotonic() + arguments.minutes * 60)
        _run(soak, arguments)
    if not soak.violations:
        shutil.rmtree(folder)
    print("soak: seed %d: %d violations%s" % (arguments.seed, len(soak.violations), _where(soak, folder)))
    return 1 if soak.violations else 0


def _where(soak: Soak, folder: Path) -> str:
    return "; see %s" % folder if soak.violations else ""


def _run(soak: Soak, arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    long_job = threading.Thread(target=soak.long_job, args=[arguments.cycles])
    if arguments.cycles:
        long_job.start()
    warm_up = arguments.first + max(1, arguments.jobs // WARM_UP_SHARE)
    _jobs(soak, range(arguments.first, warm_up), arguments.slots)
    before = Held.now(soak.cluster)
    _jobs(soak, range(warm_up, arguments.first + arguments.jobs), arguments.slots)
    if arguments.cycles:
        long_job.join()
    after = _when_quiet(soak.cluster)
    soak.violations += _grown(before, after)
    _summarise(soak, before, after, time.monotonic() - begun)


def _jobs(soak: Soak, numbers: range, slots: int) -> None:
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(soak.job, numbers))


def _when_quiet(cluster: Cluster) -> Held:
    deadline = time.monotonic() + GONE_S
    while ((held := Held.now(cluster)).processes or held.job_cgroups) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def _grown(before: Held, after: Held) -> list[str]:
    found = ["processes left on the nodes: %s" % after.processes] if after.processes else []
    found += ["%d cgroups of jobs are left" % after.job_cgroups] if after.job_cgroups else []
    if after.slurmctld_mb - before.slurmctld_mb > GROWTH_MB:
        found.append("slurmctld grew from %.1f to %.1f MB" % (before.slurmctld_mb, after.slurmctld_mb))
    if after.slurmctld_fds - before.slurmctld_fds > GROWTH_FDS:
        found.append("slurmctld's descriptors grew from %d to %d" % (before.slurmctld_fds, after.slurmctld_fds))
    for problem in found:
        print("soak: VIOLATION: " + problem, flush=True)
    return found


def _summarise(soak: Soak, before: Held, after: Held, seconds: float) -> None:
    jobs, cycles = sum(soak.seen.values()), sum(soak.cycles.values())
    print("\nsoak: %d jobs and %d cycles in %.0f s" % (jobs, cycles, seconds))
    for (kill, verdict), count in sorted(soak.seen.items()):
        print("  job, killed: %-14s %-22s %5d" % (kill, verdict, count))
    for what, count in sorted(soak.cycles.items()):
        print("  cycle, killed: %-40s %5d" % (what, count))
    print("  slurmctld: %.1f -> %.1f MB" % (before.slurmctld_mb, after.slurmctld_mb), end="")
    print(", %d -> %d descriptors" % (before.slurmctld_fds, after.slurmctld_fds))
    print("  largest driver: %.1f MB" % soak.driver_mb)
    print("  cgroups of jobs left: %d, processes left: %d" % (after.job_cgroups, len(after.processes)))
    print("  attempts that a driver killed with KILL left: %d" % soak.left_by_killed_drivers)


if __name__ == "__main__":
    sys.exit(main())
