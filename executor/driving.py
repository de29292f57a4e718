"""What drivers do alike, whatever engine starts their ranks."""

from __future__ import annotations

import json

from executor import environment, protocol
from executor.job import Job
from executor.protocol import UsageError
from executor.shared import remove_quietly
from executor.verdict import Verdict


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


def failure_of_the_driver(error: BaseException) -> Verdict:
    """The verdict where the driver itself failed, in one line."""
    code = getattr(error, "exit_code", protocol.EXIT_INFRASTRUCTURE)
    kind = "" if isinstance(error, protocol.GangrunError) else type(error).__name__ + ": "
    reason = "the driver failed: %s%s" % (kind, " ".join(str(error).split()))
    return Verdict(protocol.FAILED_DRIVER, code, [], None, reason)


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
