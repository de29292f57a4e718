"""`python -m tests.soak`: hundreds of short jobs and one long one on a real Slurm, with parts killed at random moments.

Every verdict must be one that the kill allows: SUCCEEDED and 0 only if each rank's script came to its end. At the end
nothing may be left: processes, files, cgroups, memory. The seed decides about every job; exit code 1: a promise broke.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple

from benchmarks.child import peak_rss_mb
from codegen import Bundle, Job, render_driver
from executor import protocol
from tests.bench import Bench, Outcome, Running
from tests.minislurm.cgroups import Cgroups
from tests.minislurm.cluster import Cluster
from tests.minislurm.errors import BedError
from tests.minislurm.options import CONTROLLER
from tests.minislurm.proc import Pid, processes_of

NODES, SLOTS, GRACE_S, LIVENESS_S, JOB_TIMEOUT_S, GONE_S = 4, 4, 1.0, 20.0, 120.0, 15.0
MEMORY_MB = 30.0  # what slurmctld may grow by: it remembers ended jobs for a while
KEPT_NAMES = {protocol.STATUS_NAME, protocol.EVENTS_NAME, protocol.EXIT_CODE_NAME, "lock"}
DONE = "; echo end >$SOAK_DIR/end-$SOAK_CYCLE-$SKYPILOT_NODE_RANK"
SCRIPTS = {
    "plain": "sleep %g" + DONE,
    "rank 0 fails": "sleep %g; [ $SKYPILOT_NODE_RANK != 0 ] || exit 3" + DONE,
    "leaves with 0 on TERM": "trap 'exit 0' TERM INT; sleep %g & wait $!" + DONE,
    "ignores TERM": "trap '' TERM INT; sleep %g" + DONE,
    "leaves daemons": "setsid sleep 600 & nohup sleep 600 & sleep %g" + DONE,
}
SETUPS = {None: 3, "sleep 0.1": 6, "sleep 0.2; exit 4": 1}
# Where SIGKILL or TERM may hit, and what a job may say then beside what it says by itself.
KILLED, TERMED, BROKEN = protocol.EXIT_KILLED, protocol.EXIT_TERMINATED, protocol.EXIT_INFRASTRUCTURE
CANCELLED = {(protocol.CANCELLED, TERMED), (None, TERMED)}  # None: before the driver could handle a signal
DIED = {(protocol.FAILED, KILLED), (protocol.FAILED_SETUP, KILLED)}
UNDECIDED = {(state, None) for state in (None, protocol.PENDING, protocol.SETTING_UP, protocol.RUNNING)}
KILLS: dict[str, set[tuple[Any, Any]]] = {
    "nothing": set(),
    "driver": UNDECIDED,
    "driver TERM": CANCELLED,
    "srun": {(protocol.FAILED_DRIVER, BROKEN)},
    "executor": {*DIED, (protocol.FAILED_DRIVER, BROKEN)},
    "script": DIED,
    "scancel job": CANCELLED,
    "scancel step": {(protocol.CANCELLED, TERMED), (protocol.FAILED_SETUP, TERMED)},
}


class Plan(NamedTuple):
    """One short job, decided by the seed and its number alone."""

    number: int
    nodes: int
    setup: str | None
    script: str
    seconds: float
    kill: str
    after_s: float

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        chance = random.Random("%d %d" % (seed, number))
        setup = chance.choices(list(SETUPS), list(SETUPS.values()))[0]
        script, kill = chance.choice(list(SCRIPTS)), chance.choice(list(KILLS))
        return cls(number, chance.randint(1, 3), setup, script, chance.uniform(0, 1), kill, chance.uniform(0, 2.5))

    @property
    def own_verdict(self) -> tuple[Any, Any]:
        if self.setup and "exit 4" in self.setup:
            return protocol.FAILED_SETUP, 4
        return (protocol.FAILED, 3) if self.script == "rank 0 fails" else (protocol.SUCCEEDED, 0)


class Process(NamedTuple):
    pid: Pid
    parent: int
    argv: list[str]
    is_of_job: bool


class Processes:
    """All processes of one job, wherever they run: `mark`, its directory, is in their environment."""

    def __init__(self, mark: str) -> None:
        self.all = [found for name in os.listdir("/proc") if name.isdigit() and (found := _process(int(name), mark))]
        self.all = [process for process in self.all if process.is_of_job]

    def find(self, part: str) -> list[Process]:
        is_part: dict[str, Callable[[Process], bool]] = {
            "driver": lambda p: len(p.argv) == 2 and p.argv[1].endswith("/driver/" + protocol.DRIVER_NAME),
            "executor": lambda p: "-I" in p.argv[1:2] and any(word.startswith("--launch-dir=") for word in p.argv),
            "srun": lambda p: p.argv[0] == "srun" and p.parent in parents["driver"],
            "script": lambda p: p.argv[0] == "bash" and p.parent in parents["executor"],
        }
        parents = {name: [p.pid.pid for p in self.all if is_part[name](p)] for name in ("driver", "executor")}
        return [process for process in self.all if is_part[part](process)]


def _process(pid: int, mark: str) -> Process | None:
    one, folder = Pid.of(pid), Path("/proc/%d" % pid)
    try:
        argv = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
        parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        environ = (folder / "environ").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    return Process(one, parent, argv, b"HOME=" + os.fsencode(mark) in environ) if one and argv else None


class Soak:
    """The cluster, what went wrong so far, and how often what was seen."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, deadline: float) -> None:
        self.cluster, self.folder, self.seed, self.deadline = cluster, folder, seed, deadline
        self.violations: list[str] = []
        self.seen: Counter[tuple[str, str]] = Counter()
        self.cycles: Counter[str] = Counter()
        self.driver_mb = 0.0
        self.left_by_killed_drivers = 0

    # --- short jobs

    def job(self, number: int) -> None:
        if time.monotonic() > self.deadline:
            return
        plan = Plan.of(self.seed, number)
        try:
            problems = self._job(plan)
        except (BedError, AssertionError, OSError) as error:
            problems = ["%s: %s" % (type(error).__name__, error)]
        for problem in problems:
            self.violations.append("%s\n    in %s" % (problem, plan))
            print("soak: VIOLATION: " + self.violations[-1], flush=True)

    def _job(self, plan: Plan) -> list[str]:
        directory = self.folder / ("job-%d" % plan.number)
        directory.mkdir()
        run = SCRIPTS[plan.script] % plan.seconds
        running = Bench(self.cluster, directory).submit(
            run, plan.setup, nodes=plan.nodes, grace_s=GRACE_S, liveness_timeout_s=LIVENESS_S,
            env_vars={"SOAK_DIR": str(directory), "SOAK_CYCLE": "0"},
        )  # fmt: skip
        self.cluster.wait_state(running.job_id, "RUNNING", "COMPLETING", *protocol.TERMINAL_STATES, "COMPLETED")
        time.sleep(plan.after_s)
        hit = self._kill(plan, running, random.Random(plan.number))
        outcome = running.wait(JOB_TIMEOUT_S)
        ends = len(list(directory.glob("end-*")))
        verdict = outcome.status.get("state"), outcome.status.get("exit_code")
        self.seen[plan.kill if hit else "nothing", "%s %s" % verdict] += 1
        problems = _judge(plan, outcome, ends == plan.nodes, hit) + self._left(directory, hit and plan.kill == "driver")
        if not problems:
            shutil.rmtree(directory)
        return ["%s\n%s" % (text, outcome.plain[-1500:]) for text in problems]

    def _kill(self, plan: Plan, running: Running, chance: random.Random) -> bool:
        """Whether something was there to be killed."""
        kill, job = plan.kill, str(running.job_id)
        if kill == "scancel job":
            return self._scancel(job)
        if kill == "scancel step":
            steps = [step for step in self.cluster.step_ids(running.job_id) if step.rpartition(".")[2].isdigit()]
            return bool(steps) and self._scancel(chance.choice(steps))
        return kill != "nothing" and self.signal(kill, str(running.bench.directory), chance) is not None

    def _scancel(self, what: str) -> bool:
        return self.cluster.run(CONTROLLER, ["scancel", what], cwd="/", check=False).returncode == 0

    def signal(self, kill: str, mark: str, chance: random.Random) -> float | None:
        """When a part of a job was killed; None if there is none."""
        part, _, is_term = kill.partition(" ")
        processes = Processes(mark)
        for driver in processes.find("driver"):
            self.driver_mb = max(self.driver_mb, peak_rss_mb(driver.pid.pid))
        victims = processes.find(part)
        if not victims:
            return None
        chance.choice(victims).pid.signal(15 if is_term else 9)
        return time.time()

    def _left(self, directory: Path, driver_was_killed: bool) -> list[str]:
        """What is left of a job that has ended. A driver that dies of KILL cannot take its files away."""
        deadline = time.monotonic() + GONE_S
        while (left := Processes(str(directory)).all) and time.monotonic() < deadline:
            time.sleep(0.1)
        problems = ["processes left: %s" % [" ".join(p.argv)[:200] for p in left]] if left else []
        files = [p for p in (directory / protocol.HOME_DIRECTORY).glob("*/*/*") if p.name not in KEPT_NAMES]
        if files and driver_was_killed:
            self.left_by_killed_drivers += 1
        elif files:
            problems.append("files left: %s" % [str(path.relative_to(directory)) for path in files])
        return problems

    # --- one long job

    def long_job(self, cycles: int) -> None:
        """Setup and run by the driver again and again in one allocation, with something killed every few seconds."""
        directory, chance = self.folder / "cycles", random.Random("%d cycles" % self.seed)
        directory.mkdir()
        running = self._start_cycles(directory, cycles)
        kills: list[tuple[float, str]] = []
        while not self.cluster.job(running.job_id).ended and time.monotonic() < self.deadline:
            time.sleep(chance.uniform(0.5, 6))
            kill = chance.choice(("srun", "executor", "script", "driver TERM", "driver"))
            at = self.signal(kill, str(directory), chance)
            kills += [(at, kill)] if at else []
        if time.monotonic() > self.deadline:
            self._scancel(str(running.job_id))
        running.wait(JOB_TIMEOUT_S)
        self._judge_cycles((directory / "codes").read_text(), kills)
        self.violations += self._left(directory, any(kill == "driver" for _, kill in kills))

    def _start_cycles(self, directory: Path, cycles: int) -> Running:
        job = Job(
            job_id="cycles", num_nodes=2, log_dir=str(directory / "logs"), setup="sleep 0.05",
            run="sleep 0.1" + DONE, grace_s=GRACE_S, liveness_timeout_s=LIVENESS_S, python=sys.executable,
            env_vars={"SOAK_DIR": str(directory)},
        )  # fmt: skip
        driver = Bundle(job, render_driver(job)).write(str(directory / "driver"))
        state = r"""$(sed -n 's/^ "state": "\(.*\)",$/\1/p' .gangrun/*/cycles/status.json)"""
        body = (
            f"cd {directory}; export LC_ALL=C; for ((i = 1; i <= {cycles}; i++)); do export SOAK_CYCLE=$i; "
            f"a=$EPOCHREALTIME; {sys.executable} {driver} >out-$i 2>&1; c=$?; b=$EPOCHREALTIME; "
            f"echo $i $a $b $c {state} $(ls end-$i-* 2>/dev/null | wc -l) >>codes; rm -f end-$i-*; "
            "[ $c != 0 ] || rm out-$i; done"
        )
        bench = Bench(self.cluster, directory)
        return Running(bench, bench.batch(body, nodes=2), "cycles")

    def _judge_cycles(self, text: str, kills: list[tuple[float, str]]) -> None:
        for number, begin, end, code, state, ends in (line.split() for line in text.splitlines()):
            hits = [kill for at, kill in kills if float(begin) <= at <= float(end) + 0.05]
            self.cycles["%s: %s %s" % (", ".join(hits) or "nothing", state, code)] += 1
            succeeded = state == protocol.SUCCEEDED and code == "0" and ends == "2"
            failed = code != "0" and hits and (state != protocol.SUCCEEDED or "driver" in hits)
            if not succeeded and not failed:
                problem = "cycle %s: %s %s with %s ends after %s" % (number, state, code, ends, hits or "no kill")
                self.violations.append(problem)
                print("soak: VIOLATION: " + problem, flush=True)


def _judge(plan: Plan, outcome: Outcome, all_ended: bool, hit: bool) -> list[str]:
    state, code = outcome.status.get("state"), outcome.status.get("exit_code")
    allowed = set(KILLS[plan.kill]) if hit else {plan.own_verdict}
    if all_ended or plan.own_verdict[1]:  # the kill came too late, or after the script had failed by itself
        allowed.add(plan.own_verdict)
    problems = []
    if (state, code) not in allowed and not (state is None and (None, outcome.code) in allowed):
        problems.append("%s %s after %s%s" % (state, code, plan.kill, "" if hit else " that hit nothing"))
    if (state == protocol.SUCCEEDED or outcome.code == 0) and not all_ended:
        problems.append("%s, exit code %d, but not all scripts came to their end" % (state, outcome.code))
    if outcome.code != code and not (hit and plan.kill in ("driver", "driver TERM", "scancel job")):
        problems.append("the status says %s, Slurm says %d" % (code, outcome.code))
    return problems


class Held(NamedTuple):
    """What the cluster holds on to, apart from jobs: to be compared before and after."""

    slurmctld_mb: float
    slurmctld_fds: int
    job_cgroups: int
    processes: list[str]

    @classmethod
    def now(cls, cluster: Cluster) -> Held:
        ctl = Pid.read(cluster.layout.init(CONTROLLER))
        pid = next(p.pid for p in processes_of(ctl) if "slurmctld" in p.cmdline.split()[0]) if ctl else 0
        status = dict(line.split(":", 1) for line in Path("/proc/%d/status" % pid).read_text().splitlines())
        cgroups = Cgroups.from_json(json.loads(cluster.layout.record.read_text())["cgroups"])
        tops = [cgroups.folder(name, node) for name in cgroups.hierarchies for node in cluster.nodes]
        inits = {node: Pid.read(cluster.layout.init(node)) for node in cluster.nodes}
        stepds = [p.cmdline for one in inits.values() if one for p in processes_of(one) if "stepd: [" in p.cmdline]
        rest = [p.cmdline[:120] for node in cluster.nodes for p in cluster.processes(node)]
        jobs = sum(len(list(top.glob("**/job_*"))) for top in tops)
        fds = len(os.listdir("/proc/%d/fd" % pid))
        return cls(int(status["VmRSS"].split()[0]) / 1024, fds, jobs, stepds + rest)
