"""What is known of a run on Ray, and the one pure function that says what state it is in.

Ray's words are named here and nowhere else in the client. Nothing is concluded from a server that did not answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from executor import protocol
from gangrun.news import SUBMIT_PATIENCE_S
from gangrun.records import SUBMITTING
from gangrun.states import LOST, Record, Verdict, parse_record

# https://docs.ray.io/en/latest/cluster/running-applications/job-submission/doc/ray.job_submission.JobStatus.html
RAY_PENDING, RAY_RUNNING, RAY_STOPPED, RAY_SUCCEEDED, RAY_FAILED = "PENDING RUNNING STOPPED SUCCEEDED FAILED".split()
ENDED = (RAY_STOPPED, RAY_SUCCEEDED, RAY_FAILED)
BY_ITS_CODE = ("JOB_ENTRYPOINT_COMMAND_ERROR", None)  # error types of a driver that ran to an end of its own
PLACED_GROUPS = ("CREATED", "REMOVED")  # it has its nodes, or had them
LONGEST_REASON = 300
OWN_CODES = (protocol.EXIT_INFRASTRUCTURE, protocol.EXIT_USAGE)
# What stands before our driver's reason, and after it, in its last words
STATE_LINE = re.compile(r"gangrun: job (\S+) ([A-Z_]+)(?:, exit code \d+)? after [\d.]+ s")
NO_REASON = re.compile(r"gangrun: (?:exit codes by rank|the end of|logs are in)")


class Info(NamedTuple):
    """What Ray's job API tells of a job. Times are seconds since 1970."""

    status: str
    message: str = ""
    error_type: str | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    node: str | None = None  # Ray's id of the node that the driver runs on

    @property
    def is_over(self) -> bool:
        return self.status in ENDED


class Evidence(NamedTuple):
    """Everything that is known of a run at one moment."""

    run: str
    info: Info | None  # None: the cluster answered, and does not know the run
    was_known: bool = True  # it knew the run before
    record: Record | None = None  # what the driver wrote
    group: str | None = None  # the state of its placement group; None: there is none, or it is not known
    has_begun: bool = False  # its script ran before: its record is not read again
    cancel_asked: bool = False
    age_s: float = 0.0
    is_new_cluster: bool = False  # it was started anew since the run was submitted


def parse_info(found: Mapping[str, Any] | None) -> Info | None:
    if found is None:
        return None
    code = found.get("driver_exit_code")
    return Info(
        status=str(found.get("status")),
        message=str(found.get("message") or ""),
        error_type=found.get("error_type") or None,
        exit_code=code if isinstance(code, int) else None,
        started=_seconds(found.get("start_time")),
        ended=_seconds(found.get("end_time")),
        node=found.get("driver_node_id") or None,
    )


def _seconds(milliseconds: Any) -> float | None:
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds else None


def judge(evidence: Evidence) -> Verdict:
    """Ray's word on whether it runs, the driver's own on how it went. An unknown word is no end."""
    info = evidence.info
    if info is None:
        return _unknown(evidence)
    if info.status == RAY_STOPPED:
        return _stopped(evidence)
    if info.status == RAY_SUCCEEDED:
        return Verdict(protocol.SUCCEEDED, True, 0, "", 0, info.status)
    if info.status == RAY_FAILED:
        return _failed(evidence, info)
    return _open(evidence, info)


def _unknown(evidence: Evidence) -> Verdict:
    if not evidence.was_known:
        return _never_submitted(evidence)
    why = "Ray's head was started anew" if evidence.is_new_cluster else "its record was deleted there"
    if evidence.cancel_asked:
        return Verdict(protocol.CANCELLED, True, None, f"cancelled; the cluster does not know it any more: {why}")
    return Verdict(LOST, True, None, f"the cluster does not know it any more: {why}")


def _never_submitted(evidence: Evidence) -> Verdict:
    if evidence.age_s < SUBMIT_PATIENCE_S:
        return Verdict(SUBMITTING, False)
    if evidence.cancel_asked:
        return Verdict(protocol.CANCELLED, True, None, "cancelled before it reached Ray")
    return Verdict(protocol.FAILED_DRIVER, True, None, "it never reached Ray: the launch was interrupted")


def _open(evidence: Evidence, info: Info) -> Verdict:
    record = evidence.record
    if info.status == RAY_PENDING:
        return Verdict(protocol.PENDING, False, None, "Ray prepares its environment", 0, info.status)
    has_begun = record.state != protocol.PENDING if record else evidence.has_begun or evidence.group in PLACED_GROUPS
    if info.status == RAY_RUNNING and not has_begun:
        reason = "waits for its nodes" if evidence.group else "its driver starts"
        return Verdict(protocol.PENDING, False, None, reason, 0, info.status)
    if record is not None and not record.is_terminal:
        return Verdict(record.state, False, None, record.reason, record.attempt, info.status)
    known = info.status == RAY_RUNNING
    detail = info.status if known else f"{info.status}: this is no word that gangrun knows"
    return Verdict(protocol.RUNNING, False, None, "", 0, detail)


def _stopped(evidence: Evidence) -> Verdict:
    """Whatever the programs' codes were: somebody stopped it before it had ended."""
    record = evidence.record
    is_told = record is not None and record.state == protocol.CANCELLED
    code = record.exit_code if record is not None and is_told else protocol.EXIT_TERMINATED
    reason = record.reason if record is not None and is_told else "cancelled"
    if record is not None and not record.is_terminal:
        reason = "cancelled; the driver was killed before it could record the end"
    return Verdict(protocol.CANCELLED, True, code, reason, 0, RAY_STOPPED)


def _failed(evidence: Evidence, info: Info) -> Verdict:
    if info.error_type not in BY_ITS_CODE:
        return _broken(evidence, info)
    record = evidence.record
    if record is not None and record.is_terminal and record.state != protocol.SUCCEEDED:
        return Verdict(record.state, True, record.exit_code, record.reason, record.attempt, info.status)
    state, reason = last_words(info.message, evidence.run)
    code = info.exit_code
    if state is not None:
        return Verdict(state, True, code, reason, 0, info.status)
    if code is None or code < 0:
        words = "the driver was killed" + (f" by signal {-code}" if code else "")
        state = protocol.CANCELLED if evidence.cancel_asked else protocol.FAILED_DRIVER
        return Verdict(
            state, True, None if code is None else protocol.exit_code_of_signal(-code), words, 0, info.status
        )
    if evidence.cancel_asked and code == protocol.EXIT_TERMINATED:
        return Verdict(protocol.CANCELLED, True, code, "cancelled", 0, info.status)
    state = protocol.FAILED_DRIVER if code in OWN_CODES or code > protocol.EXIT_INFRASTRUCTURE else protocol.FAILED
    return Verdict(state, True, code, f"the driver left no record; it said: {_last_line(info.message)}", 0, info.status)


def _broken(evidence: Evidence, info: Info) -> Verdict:
    """Ray itself could not start the driver, or lost it."""
    if evidence.cancel_asked:
        return Verdict(protocol.CANCELLED, True, None, "cancelled", 0, str(info.error_type))
    words = " ".join(info.message.split()) or "Ray does not say why"
    reason = f"Ray could not run its driver: {words[:LONGEST_REASON]}"
    return Verdict(protocol.FAILED_DRIVER, True, protocol.EXIT_INFRASTRUCTURE, reason, 0, str(info.error_type))


def as_record(info: Info, run: str) -> str:
    """How the job is, in the form of a driver's record: what whoever follows a log looks at."""
    state = judge(Evidence(run, info)).state if info.is_over else protocol.RUNNING
    return json.dumps({"state": state, "attempt": 0})


def is_terminal(record: str) -> bool:
    found = parse_record(record)
    return found is not None and found.is_terminal


def last_words(text: str, run: str) -> tuple[str | None, str]:
    """The state and the reason that our driver printed at its end. Lines of ranks have a prefix."""
    lines = text.splitlines()
    for at in reversed(range(len(lines))):
        match = STATE_LINE.fullmatch(lines[at])
        if match and match.group(1) == run and match.group(2) in protocol.TERMINAL_STATES:
            after = lines[at + 1] if at + 1 < len(lines) else ""
            is_reason = after.startswith("gangrun: ") and not NO_REASON.match(after)
            return match.group(2), after[len("gangrun: ") :] if is_reason else ""
    return None, ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "nothing")[:LONGEST_REASON]
