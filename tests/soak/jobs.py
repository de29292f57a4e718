"""Runs jobs, kills parts of them, and judges what came of it."""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.child import peak_rss_mb
from codegen import Bundle, Job, render_driver
from executor import protocol
from tests.bench import Bench, Running
from tests.minislurm.cluster import Cluster
from tests.minislurm.errors import BedError
from tests.minislurm.jobs import ENDED
from tests.minislurm.options import CONTROLLER
from tests.soak.plan import DONE, SCRIPTS, Plan, judge
from tests.soak.processes import Processes

GRACE_S, LIVENESS_S, JOB_TIMEOUT_S, GONE_S = 1.0, 20.0, 120.0, 15.0
KEPT_NAMES = {protocol.STATUS_NAME, protocol.EVENTS_NAME, protocol.EXIT_CODE_NAME, "lock"}


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
            self.violate("%s\n    in %s" % (problem, plan))

    def violate(self, problem: str) -> None:
        self.violations.append(problem)
        print("soak: VIOLATION: " + problem, flush=True)

    def _job(self, plan: Plan) -> list[str]:
        directory = self.folder / ("job-%d" % plan.number)
        directory.mkdir()
        run = SCRIPTS[plan.script] % plan.seconds
        running = Bench(self.cluster, directory).submit(
            run, plan.setup, nodes=plan.nodes, grace_s=GRACE_S, liveness_timeout_s=LIVENESS_S,
            env_vars={"SOAK_DIR": str(directory), "SOAK_CYCLE": "0"},
        )  # fmt: skip
        self.cluster.wait_state(running.job_id, "RUNNING", "COMPLETING", *ENDED)
        time.sleep(plan.after_s)
        hit = self._kill(plan, running, random.Random(plan.number))
        outcome = running.wait(JOB_TIMEOUT_S)
        ends = len(list(directory.glob("end-*")))
        verdict = outcome.status.get("state"), outcome.status.get("exit_code")
        self.seen[plan.kill if hit else "nothing", "%s %s" % verdict] += 1
        problems = judge(plan, outcome, ends == plan.nodes, hit) + self._left(directory, hit and plan.kill == "driver")
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
        """scancel's own code says nothing: it may complain and cancel all the same."""
        self.cluster.run(CONTROLLER, ["scancel", what], cwd="/", check=False)
        return True

    def signal(self, kill: str, mark: str, chance: random.Random) -> float | None:
        """The time just before a part of a job was killed; None if there is none."""
        part, _, is_term = kill.partition(" ")
        processes = Processes(mark)
        for driver in processes.find("driver"):
            self.driver_mb = max(self.driver_mb, peak_rss_mb(driver.pid.pid))
        victims = processes.find(part)
        if not victims:
            return None
        before = time.time()
        chance.choice(victims).pid.signal(15 if is_term else 9)
        return before

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
        try:
            self._long_job(cycles)
        except (BedError, AssertionError, OSError, ValueError) as error:
            self.violate("the long job: %s: %s" % (type(error).__name__, error))

    def _long_job(self, cycles: int) -> None:
        """Setup and run by the driver again and again in one allocation, with something killed every few seconds."""
        directory, chance = self.folder / "cycles", random.Random("%d cycles" % self.seed)
        directory.mkdir()
        running = self._start_cycles(directory, cycles)
        kills: list[tuple[float, float, str]] = []
        while not self.cluster.job(running.job_id).ended and time.monotonic() < self.deadline:
            time.sleep(chance.uniform(0.5, 6))
            kill = chance.choice(2 * ["srun", "executor", "script", "driver TERM"] + ["driver"])
            at = self.signal(kill, str(directory), chance)
            kills += [(at, time.time(), kill)] if at else []
        if time.monotonic() > self.deadline:
            self._scancel(str(running.job_id))
            kills.append((time.time(), time.time(), "scancel job"))
        running.wait(JOB_TIMEOUT_S)
        self._judge_cycles((directory / "codes").read_text(), kills)
        for problem in self._left(directory, any(kill == "driver" for *_, kill in kills)):
            self.violate(problem)

    def _start_cycles(self, directory: Path, cycles: int) -> Running:
        job = Job(
            job_id="cycles", num_nodes=2, log_dir=str(directory / "logs"), setup="sleep 0.05",
            run="sleep 0.1" + DONE, grace_s=GRACE_S, liveness_timeout_s=LIVENESS_S, python=sys.executable,
            env_vars={"SOAK_DIR": str(directory)},
        )  # fmt: skip
        driver = Bundle(job, render_driver(job)).write(str(directory / "driver"))
        state = r"""s=$(sed -n 's/^ "state": "\(.*\)",$/\1/p' .gangrun/*/cycles/status.json)"""
        body = (
            f"cd {directory}; export LC_ALL=C; for ((i = 1; i <= {cycles}; i++)); do export SOAK_CYCLE=$i; "
            "rm -f .gangrun/*/cycles/status.json; "  # else one that is killed at once seems to have ended as the last
            f"a=$EPOCHREALTIME; {sys.executable} {driver} >out-$i 2>&1; c=$?; b=$EPOCHREALTIME; "
            f"{state}; echo $i $a $b $c ${{s:-none}} $(ls end-$i-* 2>/dev/null | wc -l) >>codes; rm -f end-$i-*; "
            "[ $c != 0 ] || rm out-$i; done"
        )
        bench = Bench(self.cluster, directory)
        return Running(bench, bench.batch(body, nodes=2), "cycles")

    def _judge_cycles(self, text: str, kills: list[tuple[float, float, str]]) -> None:
        """A kill was on its way from the first of its times to the second: it may have hit any cycle of these."""
        for number, begin, end, code, state, ends in (line.split() for line in text.splitlines()):
            hits = [kill for before, after, kill in kills if float(begin) <= after and before <= float(end) + 0.05]
            self.cycles["%s: %s %s" % (", ".join(hits) or "nothing", state, code)] += 1
            succeeded = state == protocol.SUCCEEDED and code == "0" and ends == "2"
            failed = code != "0" and hits and (state != protocol.SUCCEEDED or "driver" in hits)
            if not succeeded and not failed:
                what = number, state, code, ends, hits or "no kill"
                self.violate("cycle %s: %s %s with %s ends after %s" % what)
