"""The sruns of a driver: their processes, what they say, and how they are made to end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from executor import protocol, slurm_commands
from executor.loop import Loop
from executor.output import tell
from executor.process import exit_code, reap, spawn
from executor.verdict import SRUN_KILLED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

WORDS_BYTES = 16384
POLL_LONGEST_S = 0.2
SEEN_STOPPING_S = 0.3  # `scancel JOB` tells the ranks and the driver at the same moment
CANCEL_MARGIN_S = 3.0
KILL_PATIENCE_S = 10.0
STRAGGLERS_S = 5.0
# The driver's summary says these better.
NOISE = re.compile(
    rb"^(?:srun|slurmstepd\S*|local): .*(?:tasks? \S+: (?:Exited with exit code|Terminated|Killed|running)"
    rb"|step creation (?:temporarily|still) disabled|Step created for|launch/slurm|Force Terminated"
    rb"|Job step aborted: Waiting|forcing job termination|Terminating StepId|interrupt"
    rb"|\*\*\* STEP \S+ ON \S+ CANCELLED AT)"
)


class Step:
    """srun in a session of its own: a signal to the driver's group must not make it kill the tasks at once."""

    def __init__(
        self, argv: Sequence[str], pid: int, stderr: int, loop: Loop, records: Callable[[], list[Record | None]]
    ) -> None:
        self.argv = argv
        self.pid = pid
        self.records = records  # what its ranks have written by now
        self.id: str | None = None  # JOB.STEP, known once the step has started
        self.code: int | None = None
        self._stderr = stderr
        self._loop = loop
        self._words = b""
        self._unfinished = b""

    @property
    def words(self) -> str:
        """The end of what srun and the executors said on standard error."""
        return self._words.decode("utf-8", "replace")

    @property
    def last_words(self) -> str:
        lines = self.words.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def all_are_stopping(self) -> bool:
        states = [record.get("state") for record in self.records() if record]
        return bool(states) and all(s == protocol.RANK_STOPPING or s in protocol.RANK_ENDED_STATES for s in states)

    @property
    def all_have_ended(self) -> bool:
        """By the records of the ranks that have begun."""
        return all(record.get("state") in protocol.RANK_ENDED_STATES for record in self.records() if record)

    def find_id(self) -> str | None:
        """JOB.STEP, from the driver's allocation file or from a rank's record; None while no rank has begun."""
        if self.id is None:
            told = (str(record["step"]) for record in self.records() if record and record.get("step"))
            self.id = next(told, None)
        return self.id

    def on_end(self, status: int) -> None:
        self.on_words()
        self.code = exit_code(status)
        if os.WIFSIGNALED(status):
            self._words += ("%s %d\n" % (SRUN_KILLED, os.WTERMSIG(status))).encode()
        self._loop.forget(self._stderr)

    def _is_for_the_summary(self, line: bytes) -> bool:
        """Why a step could not start is said once, at the end."""
        return self.id is None and line.startswith(b"srun: error:")

    def terminate(self) -> None:
        """TERM to srun: a waiting request is taken back, a running step is killed at once."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def on_words(self) -> None:
        try:
            chunk = os.read(self._stderr, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.forget(self._stderr)
        self._words = (self._words + chunk)[-WORDS_BYTES:]
        lines: list[bytes] = (self._unfinished + chunk).split(b"\n")
        self._unfinished = lines.pop()
        shown = [line + b"\n" for line in lines if not NOISE.search(line) and not self._is_for_the_summary(line)]
        if shown:
            tell(2, b"".join(shown))


class Steps:
    """All steps of one driver. The only owner of their processes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._steps: dict[int, Step] = {}

    def start(
        self, argv: Sequence[str], environ: Mapping[str, str], records: Callable[[], list[Record | None]]
    ) -> Step:
        """Start an srun; raises GangrunError if there is none."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            pid = spawn(list(argv), environ, stderr=write_end)
        finally:
            os.close(write_end)
        step = self._steps[pid] = Step(argv, pid, read_end, self._loop, records)
        self._loop.watch(read_end, step.on_words)
        return step

    def on_child_end(self) -> None:
        for pid, status in reap():
            if pid in self._steps:
                self._steps[pid].on_end(status)
                self._loop.stop()

    def wait_for(self, step: Step, patience_s: float) -> bool:
        """Until srun has ended; False if that took longer."""
        deadline = time.monotonic() + patience_s
        while step.is_running and time.monotonic() < deadline:
            self._loop.run_for(POLL_LONGEST_S)
        return not step.is_running

    def pass_on(self, number: int, step: Step | None) -> None:
        """srun hands USR1 and USR2 to all its tasks."""
        if step is not None and step.is_running and step.id is not None:
            step.send(number)

    def cancel(self, grace_s: float, tell_by_file: Callable[[], None]) -> None:
        """TERM to every program, once, and its grace period. `tell_by_file` serves where scancel does not work."""
        if not self._running():
            return
        self._loop.run_for(SEEN_STOPPING_S)
        for step in self._running():
            if step.all_are_stopping:
                continue
            if step.find_id() is None:
                step.terminate()  # not started yet: srun takes its request back
            elif not slurm_commands.scancel(str(step.id), "TERM"):
                tell_by_file()
        deadline = time.monotonic() + grace_s + CANCEL_MARGIN_S
        for step in self._running():
            self.wait_for(step, deadline - time.monotonic())

    def end_all(self, tell_by_file: Callable[[], None]) -> None:
        """Nothing of ours may go on holding nodes: KILL, and escalate until every srun and every rank is gone."""
        for step in self._steps.values():
            if not step.is_running and step.all_have_ended:
                continue
            is_scancelled = step.find_id() is not None and slurm_commands.scancel(str(step.id))
            if is_scancelled:
                self.wait_for(step, KILL_PATIENCE_S)
            for escalate in (step.terminate, step.kill):
                if step.is_running:
                    escalate()
                    self.wait_for(step, KILL_PATIENCE_S)
            if not is_scancelled and not step.all_have_ended:  # srun was killed, and scancel does not work
                tell_by_file()
                self._wait_for_stragglers(step)

    def _wait_for_stragglers(self, step: Step) -> None:
        deadline = time.monotonic() + STRAGGLERS_S
        while not step.all_have_ended and time.monotonic() < deadline:
            self._loop.run_for(POLL_LONGEST_S)

    def _running(self) -> list[Step]:
        return [step for step in self._steps.values() if step.is_running]


def end_orphaned_sruns(slurm_job_id: str, names: Sequence[str]) -> None:
    """TERM to sruns of these steps on this host: one that still waits for its nodes is in no list of Slurm's."""
    wanted = {b"--job-name=" + os.fsencode(name) for name in names}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if os.fsencode("--jobid=" + slurm_job_id) in words and wanted & set(words) and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGTERM)
        except OSError:
            continue
