"""What a rendered driver calls, on the head node of the allocation: `python3 driver.py`.

It starts the run step, learns its nodes, runs setup on exactly these, lets the scripts begin, and says how it ended:
in status.json, events.jsonl, exit_code, and its own exit code. Whatever way it ends, it takes its steps and its
files with it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from executor import environment, protocol, sharing, slurm_commands
from executor.attendance import Attendance
from executor.driving import HEARTBEAT_S, WAITING_WORDS_S, Attempt, Ended, read_secrets, run_driver, setup_verdict
from executor.gang import Patience, make_records, prepare_records
from executor.job import (
    Job,
    addresses_of_this_job,
    cluster_home,
    executor_command,
    local_launcher,
    member_options,
    nodes_of_this_job,
    this_slurm_job,
)
from executor.loop import WARNINGS, Arrival
from executor.output import tell
from executor.process import end_with_parent
from executor.report import rank_reports, summary
from executor.shared import SignalFile, known_record, remove_quietly, write_private
from executor.slurm_commands import gpu_request
from executor.step import SEEN_STOPPING_S, Step, Steps, end_orphaned_sruns
from executor.verdict import CANCEL_WORDS, Verdict, judge

__all__ = [
    "Driver",
    "Job",
    "gpu_request",
    "local_launcher",
    "main",
    "member_options",
    "nodes_of_this_job",
    "this_slurm_job",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

SMALL_GANG = 100  # its records can be read twice a second
CONTROLLER_PATIENCE_S = 180.0
CONTROLLER_IS_AWAY = "Unable to contact slurm controller"
PRIVATE_FILES_S = 0.5
ASKED = ("--nodes=", "--cpus-per-task=", "--gpus-per-node=")
PREEMPTION_PATIENCE_S = 120.0  # slurmctld looks at grace periods every 30 s or so
ALLOC_POLL_S = 0.2
NOT_EXECUTED = "Exited with exit code 2"  # srun's code for a program that is not there
FEW_FILES, MANY_NODES = 1024, 4
NODES_LOOK = 6  # times as long between two looks at the nodes that a waiting job still has


class Driver(Attempt):
    """One attempt of one job, and its steps."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._steps = Steps(self._loop)
        self._run: Step | None = None
        self._setup: Step | None = None
        self._allocation: dict[str, str] = {}
        self._run_command: tuple[Sequence[str], Sequence[str]] = ((), ())
        self._controller_deadline = time.monotonic() + CONTROLLER_PATIENCE_S
        self._has_told_of_controller = False
        self._private_files: list[str] = []
        self._known_secrets: dict[str, str] | None = None
        self._proctrack = slurm_commands.proctrack_type()
        self._grace_s = job.grace_s
        if self._proctrack == protocol.PROCTRACK_PGID:  # its KILL finds the executor only, not the script
            self._grace_s = min(job.grace_s, max(1.0, slurm_commands.kill_wait_s() - 1))
        self._end_time = slurm_commands.end_time(job.slurm_job_id)
        self._was_terminated = False

    def _end_what_a_dead_driver_left(self) -> None:
        """Its sruns live on, and hold the nodes that we need."""
        names = [protocol.step_name(self._job.job_id, is_setup) for is_setup in (False, True)]
        for step in slurm_commands.steps_named(self._job.slurm_job_id, names):
            slurm_commands.scancel(step)
        end_orphaned_sruns(self._job.slurm_job_id, names)

    # --- the calls of a driver, in their order

    def start_run(self, srun: Sequence[str], script: str, has_setup: bool, ray: object = None) -> None:
        """Start the run step in the background; its ranks wait for `go`. With `ray` the script runs on rank 0 only."""
        flags = [
            "--script-path=" + self._private(self.launch.run_script, script),
            "--env-file=" + self._private(self.launch.run_env, json.dumps(self._variables(self._job.env_vars))),
            "--alloc-signal-file=" + self.launch.alloc,
        ]
        flags += ["--setup-done-signal-file=" + self.launch.setup_done] if has_setup else []
        if ray:
            SignalFile(self.launch.ray).arm()
            make_records(self.launch.ray_records, self._job.num_nodes)
            flags.append("--ray=" + json.dumps(ray))
        self._run_command = srun, flags
        self._run = self._start(protocol.STEP_RUN, srun, flags, is_setup=False)
        if protocol.ENV_GROUP_DRIVER not in os.environ:
            self._directory.tell_queue(slurm_commands.queue_times(self._job.slurm_job_id))

    def wait_for_allocation(self) -> None:
        """Until the run step has started. Ends the job as a launch failure, in srun's words, if it cannot."""
        run, alloc, begun = self._current_run(), SignalFile(self.launch.alloc), time.monotonic()
        told, patience = 0, Patience()
        while True:
            said = patience.ask(alloc.read)
            if said is not None:
                self._allocation = json.loads(said[1]) if said[1] else {}
                run.id = self._allocation.get("step")
                return
            if run.code is not None and self._may_try_again(run):
                run = self._run = self._start(protocol.STEP_RUN, *self._run_command, is_setup=False)
            elif run.code is not None:
                self._launch_failed(run)
            if time.monotonic() - begun > WAITING_WORDS_S * (1 + told * NODES_LOOK):
                self._refuse_lost_nodes()
                if not told:
                    tell(1, "gangrun: waiting for the run step to start: %s\n" % (run.last_words or _why_busy()))
                told += 1
            self._wait_a_little(begun)

    def run_setup(self, srun: Sequence[str], script: str) -> None:
        """Run setup on the nodes of the run step; the job ends as FAILED_SETUP if it fails."""
        self._directory.enter(protocol.SETTING_UP)
        prepare_records(self.launch, self._job.num_nodes, is_setup=True)
        nodes = ["--nodelist=" + self._allocation["nodes"]] if self._allocation.get("nodes") else []
        flags = [
            "--script-path=" + self._private(self.launch.setup_script, script),
            "--env-file=" + self._private(self.launch.setup_env, json.dumps(self._variables(self._job.setup_env_vars))),
        ]
        srun = sharing.whole_node(srun, os.environ.get(protocol.ENV_NODE_GPUS, ""))
        while True:
            setup = self._setup = self._start(protocol.STEP_SETUP, [*srun, *nodes], flags, is_setup=True)
            self._wait_for_setup(setup)
            if any(self._records(is_setup=True)) or not self._may_try_again(setup):
                break
        verdict = judge(self._records(is_setup=True), setup.words, was_cancelled=False, srun_code=setup.code)
        if verdict.state == protocol.SUCCEEDED:
            return
        if self._run is not None:
            SignalFile(self.launch.setup_done).fire(protocol.ABORT, "setup failed: " + verdict.reason)
            self._steps.wait_for(self._run, self._grace_s)
        if not any(self._records(is_setup=True)) and verdict.state == protocol.FAILED:
            words = "the setup step could not start: " + setup.words.strip()
            verdict = Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [], None, words)
        raise Ended(setup_verdict(verdict))

    def let_go(self) -> None:
        """Setup is done: the scripts begin."""
        self._directory.enter(protocol.RUNNING)
        if self._setup is not None:
            SignalFile(self.launch.setup_done).fire(protocol.GO)

    def wait_for_run(self) -> None:
        """Until the run step has ended, by itself or otherwise."""
        run, attendance = self._current_run(), Attendance(self._job.liveness_timeout_s)
        while run.is_running:
            is_small = self._job.num_nodes <= SMALL_GANG
            look_s = protocol.beat_interval_s(self._job.liveness_timeout_s, HEARTBEAT_S)
            self._loop.run_for(PRIVATE_FILES_S if self._private_files and is_small else look_s)
            records = self._records(is_setup=False)
            self._remove_what_was_read(records)
            self._directory.progress(protocol.STEP_RUN, records)
            stuck = attendance.verdict_if_stuck(records, run) if run.is_running else None
            if stuck:
                raise Ended(stuck)
        self._directory.note(protocol.EVENT_STEP_ENDED, step=protocol.STEP_RUN, code=run.code)
        raise Ended(judge(self._records(is_setup=False), run.words, was_cancelled=False, srun_code=run.code))

    # --- the end

    def _give_back(self) -> None:
        self._steps.end_all(self._tell_to_stop)

    def _own_files(self, verdict: Verdict) -> list[str]:
        """What ends with the job; a requeued job will want its secrets again, but not those of a one-shot driver.

        So will a task that its group starts again: a group's secrets end with the group.
        """
        is_member = protocol.ENV_GROUP_DRIVER in os.environ
        is_over = (verdict.state in protocol.TERMINAL_STATES and not is_member) or self._job.remove_at_end
        return super()._own_files(verdict) if is_over else []

    def _unless_requeued(self, verdict: Verdict) -> Verdict:
        by_itself = (protocol.SUCCEEDED, protocol.FAILED, protocol.FAILED_SETUP)
        deadline = time.monotonic() + PREEMPTION_PATIENCE_S
        while verdict.state not in by_itself:
            fate = slurm_commands.fate(self._job.slurm_job_id)
            if fate.is_requeued:
                return verdict._replace(state=protocol.PENDING, reason="Slurm runs the job again")
            # To end now would end the job; Slurm requeues it only if it still runs when its grace is over.
            if not fate.is_preempted or self._was_terminated or time.monotonic() > deadline:
                break
            self._loop.run_for(1.0)
        return verdict

    def _cancel(self, number: int) -> Verdict:
        """Nothing that ends after the cancel is a success."""
        self._steps.cancel(self._grace_s, self._tell_to_stop)
        code = protocol.exit_code_of_signal(number)
        if self._run is None or self._run.id is None:
            return Verdict(protocol.CANCELLED, code, [], None, "cancelled by signal %d" % number)
        verdict = judge(self._records(is_setup=False), self._run.words, was_cancelled=True)
        if verdict.state == protocol.CANCELLED:
            words = f" ({verdict.reason})" if verdict.reason else ""
            return verdict._replace(exit_code=code, reason=f"cancelled by signal {number}{words}")
        return verdict

    def _finish(self, verdict: Verdict) -> None:
        self.exit_code = verdict.exit_code
        is_setup = self._run is None or verdict.state == protocol.FAILED_SETUP
        records = self._records(is_setup) if self._run or self._setup else []
        ranks = rank_reports(records, verdict, len(self._job.cluster_ips))
        self._directory.end(verdict, ranks, protocol.STEP_SETUP if is_setup else protocol.STEP_RUN)
        is_expected = verdict.state in (protocol.SUCCEEDED, protocol.CANCELLED)
        if not (is_expected and os.environ.get(protocol.ENV_GROUP_DRIVER)):  # the group's own summary says it
            tell(1, summary(self._job.job_id, verdict, ranks, self._job.log_dir, self._directory.age_s))

    # --- steps

    def _start(self, name: str, srun: Sequence[str], flags: Sequence[str], is_setup: bool) -> Step:
        job = self._job
        argv = [
            *srun, *executor_command(job), *flags,
            "--log-dir=" + os.path.abspath(os.path.expanduser(job.log_dir)),
            "--launch-dir=" + self.launch.directory,
            "--cluster-num-nodes=%d" % len(job.cluster_ips),
            "--cluster-ips=" + ",".join(job.cluster_ips),
            "--cluster-home-dir=" + cluster_home(job),
            "--task-name=" + job.task_name,
            "--proctrack=" + self._proctrack,
            f"--grace-s={self._grace_s:g}",
            f"--liveness-timeout-s={job.liveness_timeout_s:g}",
            *(["--workdir=" + job.workdir] if job.workdir else []),
            *_hosts_flags(),
            *(["--ports=" + ",".join(map(str, job.ports))] if job.ports and not is_setup else []),
            *(["--shares-gpus"] if os.environ.get(protocol.ENV_NODE_GPUS) else []),
            *(["--is-setup"] if is_setup else []),
        ]  # fmt: skip
        step = self._steps.start(argv, environment.without_step(os.environ), lambda: self._records(is_setup))
        self._directory.note(protocol.EVENT_STEP_STARTED, step=name, pid=step.pid)
        return step

    def _current_run(self) -> Step:
        assert self._run is not None, "start_run comes first"
        return self._run

    def _wait_for_setup(self, setup: Step) -> None:
        """Until setup has ended; the job ends with the run step if that is lost meanwhile."""
        while setup.code is None:
            if self._run is not None and self._run.code is not None:
                raise Ended(judge(self._records(is_setup=False), self._run.words, was_cancelled=False))
            self._loop.run_for(HEARTBEAT_S)
            self._directory.progress(protocol.STEP_SETUP, self._records(is_setup=True))
        self._directory.note(protocol.EVENT_STEP_ENDED, step=protocol.STEP_SETUP, code=setup.code)

    def _wait_a_little(self, since: float) -> None:
        self._loop.run_for(min(ALLOC_POLL_S, max(0.005, (time.monotonic() - since) / 10)))

    def _may_try_again(self, step: Step) -> bool:
        """A controller that is away is nobody's fault and often back soon (srun itself gives up after 9 s)."""
        # Just back, it may refuse a step that it would have granted before (seen: memory not available).
        is_away = CONTROLLER_IS_AWAY in step.words or self._has_told_of_controller
        if not is_away or time.monotonic() > self._controller_deadline:
            return False
        if not self._has_told_of_controller:
            self._has_told_of_controller = True
            tell(1, f"gangrun: {CONTROLLER_IS_AWAY}; trying again for {CONTROLLER_PATIENCE_S:.0f} s\n")
        self._loop.run_for(HEARTBEAT_S)
        return True

    def _remove_what_was_read(self, records: Sequence[Record | None]) -> None:
        """Scripts and variables are needed until every rank has begun; a driver that dies later leaves no secret."""
        if self._private_files and all(record and record.get("state") != protocol.RANK_WAITING for record in records):
            for path in self._private_files:
                remove_quietly(path)
            self._private_files = []

    def _launch_failed(self, run: Step) -> NoReturn:
        records = self._records(is_setup=False)
        if any(records):  # the step did start, and a rank ended it before rank 0 could say so
            self._directory.enter(protocol.RUNNING)
            raise Ended(judge(records, run.words, was_cancelled=False))
        self._loop.run_for(SEEN_STOPPING_S)  # srun may have ended of the same cancel that we are about to hear of
        if any(word in run.words for word in CANCEL_WORDS):
            raise Ended(judge(records, run.words, was_cancelled=False, srun_code=run.code))
        if any(word in run.words for word in slurm_commands.OVER_WORDS):
            raise Ended(Verdict(protocol.CANCELLED, protocol.EXIT_TERMINATED, [], None, run.last_words))
        asked = " ".join(word for word in run.argv if word.startswith(ASKED))
        words = run.words.strip() or f"srun ended with code {run.code} and said nothing"
        # slurmstepd's own words, "execve(): PATH: No such file", may get lost on their way (24.11).
        hint = f"; is {executor_command(self._job)[0]} there on every node?" if NOT_EXECUTED in words else ""
        reason = f"the run step could not start: {words} (asked for {asked}){hint}"
        raise Ended(Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [], None, reason))

    def _refuse_lost_nodes(self) -> None:
        """A step that wants more nodes than the job has left waits for ever."""
        own = nodes_of_this_job() if os.environ.get(protocol.SLURM_JOB_NODELIST) else []
        lost = slurm_commands.lost_nodes(self._job.slurm_job_id, own)
        if lost and len(own) - len(lost) < self._job.num_nodes:
            words = "the job has lost {}; {} of {} nodes are left, {} are needed".format(
                ", ".join(lost), len(own) - len(lost), len(own), self._job.num_nodes
            )
            raise Ended(Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [], None, words))

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number == signal.SIGCHLD:
            self._steps.on_child_end()
        elif arrival.number in WARNINGS:
            self._steps.pass_on(arrival.number, self._run)
        elif arrival.number != signal.SIGCONT:
            self._on_stop(arrival.number)

    def _on_stop(self, number: int) -> None:
        self._was_terminated = True
        super()._on_stop(number)

    # --- shared files

    def _arm(self) -> None:
        for path in (self.launch.alloc, self.launch.setup_done, self.launch.gang):
            SignalFile(path).arm()
        prepare_records(self.launch, self._job.num_nodes, is_setup=False)
        self._private(self.launch.addresses, json.dumps(addresses_of_this_job()))
        _tell_limits(self._job.num_nodes)

    def _tell_to_stop(self) -> None:
        SignalFile(self.launch.gang).fire(protocol.GANG_STOP, "cancelled")

    def _records(self, is_setup: bool) -> list[Record | None]:
        return [known_record(self.launch.record(rank, is_setup)) for rank in range(self._job.num_nodes)]

    def _variables(self, own: dict[str, str]) -> dict[str, str]:
        # srun gives its step's name to SLURM_JOB_NAME; a script wants the job's.
        told = {name: os.environ[name] for name in (protocol.SLURM_JOB_NAME,) if name in os.environ}
        told[protocol.ENV_CHECKPOINTS] = self._directory.checkpoints
        if self._end_time is not None:
            told[protocol.ENV_DEADLINE] = str(self._end_time)
        member = json.loads(os.environ.get(protocol.ENV_MEMBER_ENV) or "{}")
        return {**own, **member, **self._secrets(), **told}

    def _secrets(self) -> dict[str, str]:
        if self._known_secrets is None:
            self._known_secrets = read_secrets(self._job)
        return self._known_secrets

    def _private(self, path: str, text: str) -> str:
        write_private(path, text.encode("utf-8", "surrogateescape"))
        self._private_files.append(path)
        return path


def main(body: Any, job: Job) -> int:
    """Run a driver's body; every error ends in one line and an exit code."""
    if os.environ.get(protocol.ENV_GROUP_DRIVER) == str(os.getppid()):
        end_with_parent()
    return run_driver(Driver, body, job)


def _hosts_flags() -> list[str]:
    """Of a task of a group: where its ranks find the names of its peers."""
    file, means = os.environ.get(protocol.ENV_HOSTS_FILE), os.environ.get(protocol.ENV_HOSTS_MEANS)
    return [f"--hosts-file={file}", f"--hosts-means={means}"] if file and means else []


def _tell_limits(num_nodes: int) -> None:
    """Slurm carries the login node's soft limit over; NCCL needs more from four nodes on (goodfire-ai/spd#957)."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard and (soft < FEW_FILES or (soft == FEW_FILES and num_nodes >= MANY_NODES)):
        words = f"{soft} open files are allowed here (hard limit {hard})"
        tell(1, f"gangrun: {words}; `ulimit -n $(ulimit -Hn)` in the script raises it\n")


def _why_busy() -> str:
    outer = os.environ.get(protocol.ENV_INTERNAL_JOB_ID)
    return "its nodes are busy" + (f"; this runs inside job {outer}, whose own step holds some" if outer else "")
