"""From what the ranks recorded to the job's state, its exit code and the rank that failed first. Pure words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from executor import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

# What srun says when a step did not end by itself (measured on 22.05 and 24.11).
SRUN_KILLED = "srun was killed by signal"  # this one is ours
LOSS_WORDS = ("Node failure on", "DUE TO NODE FAILURE", SRUN_KILLED)
TASK_KILLED = re.compile(r"task (\d+): Killed")
RANK_GAVE_UP = re.compile(r"gangrun: rank (\d+) gives up: (.*)")
LIMIT_WORDS = ("DUE TO TIME LIMIT", "DUE TO PREEMPTION")
CANCEL_WORDS = ("CANCELLED AT",)


class Verdict(NamedTuple):
    """How a step ended. `first_failed` is the rank whose failure made the others stop."""

    state: str
    exit_code: int
    codes: list[int]
    first_failed: int | None = None
    reason: str = ""


def judge(
    records: Sequence[Record | None], srun_words: str, was_cancelled: bool, srun_code: int | None = None
) -> Verdict:
    """srun's own code is no evidence of failure: with --kill-on-bad-exit it is never the failing rank's (measured).

    But where it is 0, nobody was told to stop and nothing was lost, a rank without a last word could only not write it.
    """
    failed = _ranks(records, protocol.RANK_FAILED, protocol.RANK_BROKEN)
    codes = [rank_code(record, was_stopped=bool(failed) or was_cancelled) for record in records]
    if failed:
        return _failed(records, codes, min(failed, key=lambda rank: _ended(records[rank])))
    if _line_with(srun_words, LOSS_WORDS):
        return Verdict(
            protocol.FAILED_DRIVER,
            protocol.EXIT_INFRASTRUCTURE,
            codes,
            None,
            _line_with(srun_words, LOSS_WORDS),
        )
    if was_cancelled or _line_with(srun_words, LIMIT_WORDS):
        return _cancelled(codes, _line_with(srun_words, LIMIT_WORDS + CANCEL_WORDS))
    told_to_stop = _ranks(records, protocol.RANK_STOPPED, protocol.RANK_STOPPING)
    silent = [rank for rank, record in enumerate(records) if not _has_ended(record) and rank not in told_to_stop]
    if srun_code == 0 and not told_to_stop and not _line_with(srun_words, CANCEL_WORDS):
        return Verdict(protocol.SUCCEEDED, 0, [0 if rank in silent else codes[rank] for rank in range(len(codes))])
    own_words = _own_words(srun_words, silent)
    if own_words:
        rank, why = own_words
        code = protocol.EXIT_INFRASTRUCTURE
        return Verdict(
            protocol.FAILED_DRIVER, code, _with(codes, rank, code), rank, f"rank {rank} could not run: {why}"
        )
    # srun says CANCELLED AT for a step that somebody cancelled, and for one that it ended because a rank was killed;
    # only then it has said before that a task was killed (measured on 22.05).
    killed = _killed_before_cancel(srun_words, silent)
    if silent and (told_to_stop or killed is not None or not _line_with(srun_words, CANCEL_WORDS)):
        rank = silent[0] if killed is None else killed
        why = f"{describe(records, rank)} was killed before it could say why"
        return Verdict(protocol.FAILED, codes[rank], codes, rank, why)
    if silent or told_to_stop:
        return _cancelled(codes, _line_with(srun_words, CANCEL_WORDS) or "the step was stopped from outside")
    return Verdict(protocol.SUCCEEDED, 0, codes)


def _own_words(words: str, silent: Sequence[int]) -> tuple[int, str] | None:
    """What a rank that could not even write its record said on standard error."""
    for line in words.splitlines():
        found = RANK_GAVE_UP.match(line)
        if found and int(found.group(1)) in silent:
            return int(found.group(1)), found.group(2)
    return None


def _with(codes: Sequence[int], rank: int, code: int) -> list[int]:
    return [code if index == rank else other for index, other in enumerate(codes)]


def _killed_before_cancel(srun_words: str, silent: Sequence[int]) -> int | None:
    for line in srun_words.splitlines():
        if any(word in line for word in CANCEL_WORDS):
            return None
        found = TASK_KILLED.search(line)
        if found and int(found.group(1)) in silent:
            return int(found.group(1))
    return None


def _cancelled(codes: list[int], reason: str) -> Verdict:
    return Verdict(protocol.CANCELLED, protocol.EXIT_TERMINATED, codes, None, reason)


def rank_code(record: Record | None, was_stopped: bool) -> int:
    """A rank that left no code was killed; one that had not begun when all were stopped died of that TERM."""
    code = record.get("code") if record else None
    if isinstance(code, int):
        return code
    had_begun = _state(record) in (protocol.RANK_RUNNING, protocol.RANK_STOPPING)
    return protocol.EXIT_TERMINATED if was_stopped and not had_begun else protocol.EXIT_KILLED


def describe(records: Sequence[Record | None], rank: int) -> str:
    record = records[rank] or {}
    return "rank %d on %s" % (rank, record.get("node") or record.get("host") or "an unknown node")


def _failed(records: Sequence[Record | None], codes: list[int], rank: int) -> Verdict:
    who = describe(records, rank)
    if _state(records[rank]) == protocol.RANK_BROKEN:
        why = (records[rank] or {}).get("why", "")
        return Verdict(
            protocol.FAILED_DRIVER,
            codes[rank] or protocol.EXIT_INFRASTRUCTURE,
            codes,
            rank,
            f"{who} could not run the script: {why}",
        )
    return Verdict(
        protocol.FAILED, codes[rank], codes, rank, f"{who} failed first ({protocol.describe_code(codes[rank])})"
    )


def _ranks(records: Sequence[Record | None], *states: str) -> list[int]:
    return [rank for rank, record in enumerate(records) if _state(record) in states]


def _state(record: Record | None) -> str:
    return str(record.get("state", "")) if record else ""


def _has_ended(record: Record | None) -> bool:
    return _state(record) in protocol.RANK_ENDED_STATES


def _ended(record: Record | None) -> float:
    return float((record or {}).get("ended") or 0)


def _line_with(text: str, words: Sequence[str]) -> str:
    for line in text.splitlines():
        if any(word in line for word in words):
            return line.strip()
    return ""
