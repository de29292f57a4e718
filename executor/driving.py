"""What drivers do alike, whatever engine starts their ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from executor import environment, protocol
from executor.job import Job, cluster_home
from executor.launchdir import JobDirectory
from executor.loop import Arrival, Loop
from executor.output import tell
from executor.protocol import GangrunError, UsageError
from executor.shared import remove_quietly
from executor.verdict import Verdict

HEARTBEAT_S = 5.0
WAITING_WORDS_S = 5.0  # until a job says what it waits for


class Ended(Exception):
    """The job is over with this verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class Cancelled(Exception):
    """Somebody told the driver to stop."""

    def __init__(self, number: int) -> None:
        super().__init__("signal %d" % number)
        self.number = number


class Attempt:
    """A context that owns one attempt of one job: its loop, its directory, its state."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = Loop(self._on_signal)
        self._is_cancelling = False
        self.exit_code = protocol.EXIT_INFRASTRUCTURE

    def __enter__(self) -> Attempt:
        job = self._job
        self._loop.take_signals()
        self._directory = JobDirectory(protocol.job_directory(cluster_home(job), job.slurm_job_id, job.job_id), job)
        try:
            self.launch = self._directory.new_attempt(self._end_what_a_dead_driver_left)
            self._arm()
        except OSError as error:
            self._directory.clean()
            raise GangrunError(f"cannot write the job's directory {self._directory.path}: {error.strerror}") from error
        self._directory.beat()
        self._loop.every(HEARTBEAT_S, HEARTBEAT_S, self._directory.beat)
        self._directory.enter(protocol.PENDING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        verdict = Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [])
        self._is_cancelling = True  # whatever arrives now comes too late to change the verdict
        try:
            verdict = self._verdict_of(error)
            self._give_back()
            verdict = self._unless_requeued(verdict)
            self._finish(verdict)
        except OSError as trouble:
            self.exit_code = verdict.exit_code or protocol.EXIT_INFRASTRUCTURE
            tell(1, f"gangrun: cannot record how the job ended ({verdict.state}): {trouble}\n")
        finally:
            self._directory.clean()
            for path in self._own_files(verdict):
                remove_quietly(path)
        return kind is None or issubclass(kind, Exception)

    def _verdict_of(self, error: BaseException | None) -> Verdict:
        if isinstance(error, Ended):
            return error.verdict
        if isinstance(error, Cancelled):
            self._directory.note("cancel", signal=error.number)
            return self._cancel(error.number)
        return Verdict(protocol.SUCCEEDED, 0, []) if error is None else self._fail(error)

    def _fail(self, error: BaseException) -> Verdict:
        """The verdict where the driver itself failed, in one line."""
        code = getattr(error, "exit_code", protocol.EXIT_INFRASTRUCTURE)
        kind = "" if isinstance(error, GangrunError) else type(error).__name__ + ": "
        reason = "the driver failed: %s%s" % (kind, " ".join(str(error).split()))
        return Verdict(protocol.FAILED_DRIVER, code, [], None, reason)

    def _own_files(self, verdict: Verdict) -> list[str]:
        """What ends with the driver."""
        return [*([self._job.secrets_file] if self._job.secrets_file else []), *self._job.remove_at_end]

    def _on_stop(self, number: int) -> None:
        if self._is_cancelling:
            self._loop.stop()
            return
        self._is_cancelling = True
        raise Cancelled(number)

    # --- what an engine does in its own way

    def _end_what_a_dead_driver_left(self) -> None:
        """It held the lock before us, and left its attempt."""

    def _arm(self) -> None:
        """Make what the ranks must find."""

    def _on_signal(self, arrival: Arrival) -> None:
        raise NotImplementedError

    def _cancel(self, number: int) -> Verdict:
        """End every program, with its grace; a failure that came before the cancel stands."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Hold nothing any more."""
        raise NotImplementedError

    def _unless_requeued(self, verdict: Verdict) -> Verdict:
        """An end that came from outside may be the beginning of the next attempt."""
        return verdict

    def _finish(self, verdict: Verdict) -> None:
        """Record and tell how it ended."""
        raise NotImplementedError


def run_driver(driver: Callable[[Job], Attempt], body: Any, job: Job) -> int:
    """Run a driver's body; every error ends in one line and an exit code."""
    try:
        with driver(job) as attempt:
            body(attempt)
    except GangrunError as error:
        print(f"gangrun: {error}", file=sys.stderr)
        return error.exit_code
    return attempt.exit_code


def setup_verdict(verdict: Verdict) -> Verdict:
    """How the job ends whose setup has ended so."""
    state = protocol.FAILED_SETUP if verdict.state in (protocol.FAILED, protocol.CANCELLED) else verdict.state
    return verdict._replace(state=state, reason=verdict.reason or "the setup step was stopped")


def read_secrets(job: Job) -> dict[str, str]:
    """The job's secrets; a one-shot driver reads them once. Raises UsageError that names the file."""
    path = job.secrets_file
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            secrets = environment.checked(json.load(file), path)
    except (OSError, ValueError) as error:
        raise UsageError(f"secrets file {path}: {error}") from error
    if job.remove_at_end:
        remove_quietly(path)
    return secrets
