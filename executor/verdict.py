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
OUT_OF_MEMORY = re.compile(r"Out Of Memory|oom[-_]kill event")
TASK_OUT_OF_MEMORY = re.compile(r"tasks? (\S+): Out Of Memory")
# Only a step that somebody ended has these; CANCELLED AT also stands where srun ended it because a rank was killed.
ABORT_WORDS = ("Job step aborted: Waiting up to", "forcing job termination")
NO_EXECUTOR = re.compile(r"slurmstepd-(\S+): error: execve\(\): (.*)")  # https://slurm.schedmd.com/srun.html
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
    records: Sequence[Record | None],
    srun_words: str,
    was_cancelled: bool,
    srun_code: int | None = None,
    loss: str = "",
) -> Verdict:
    """`loss` is who was lost, where not srun's words say so.

    srun's own code is no evidence of failure: with --kill-on-bad-exit it is never the failing rank's (measured).

    But where it is 0, nobody was told to stop and nothing was lost, a rank without a last word could only not write it.
    """
    loss = loss or _line_with(srun_words, LOSS_WORDS)
    return _with_memory(_judge(records, srun_words, was_cancelled, srun_code, loss), records, srun_words)


def _judge(
    records: Sequence[Record | None], srun_words: str, was_cancelled: bool, srun_code: int | None, loss: str
) -> Verdict:
    failed = _ranks(records, protocol.RANK_FAILED, protocol.RANK_BROKEN)
    codes = [rank_code(record, was_stopped=bool(failed) or was_cancelled) for record in records]
    if failed:
        return _failed(records, codes, min(failed, key=lambda rank: _ended(records[rank])))
    if loss:
        return Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, codes, None, loss)
    if was_cancelled or _line_with(srun_words, LIMIT_WORDS):
        return _cancelled(codes, _line_with(srun_words, LIMIT_WORDS + CANCEL_WORDS))
    told_to_stop = _ranks(records, protocol.RANK_STOPPED, protocol.RANK_STOPPING)
    silent = [rank for rank, record in enumerate(records) if not has_ended(record) and rank not in told_to_stop]
    was_aborted = bool(_line_with(srun_words, ABORT_WORDS))
    missing = NO_EXECUTOR.search(srun_words)
    if missing:
        why = f"the executor could not start on {missing.group(1)}: {missing.group(2)}"
        return Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, codes, None, why)
    if srun_code == 0 and not told_to_stop and not was_aborted:
        return Verdict(protocol.SUCCEEDED, 0, [0 if rank in silent else codes[rank] for rank in range(len(codes))])
    own_words = _own_words(srun_words, silent)
    if own_words:
        rank, why = own_words
        code = protocol.EXIT_INFRASTRUCTURE
        return Verdict(
            protocol.FAILED_DRIVER, code, _with(codes, rank, code), rank, f"rank {rank} could not run: {why}"
        )
    killed = None if was_aborted else _killed(srun_words, silent, told_to_stop, len(records))
    if killed is not None:
        return _killed_verdict(records, codes, killed)
    if silent or told_to_stop or was_aborted:
        words = _line_with(srun_words, CANCEL_WORDS) or _line_with(srun_words, ABORT_WORDS)
        return _cancelled(codes, words or "the step was stopped from outside")
    return Verdict(protocol.SUCCEEDED, 0, codes)


def _killed(words: str, silent: Sequence[int], told_to_stop: Sequence[int], num_ranks: int) -> int | None:
    """The rank that was killed by itself: srun names it; else one that left no word."""
    for name in TASK_KILLED.findall(words):
        if int(name) < num_ranks and int(name) not in told_to_stop:
            return int(name)
    return silent[0] if silent else None


def _killed_verdict(records: Sequence[Record | None], codes: Sequence[int], rank: int) -> Verdict:
    was_waiting = _state(records[rank]) == protocol.RANK_DONE
    moment = "while it waited for the others" if was_waiting else "before it could say why"
    why = f"{describe(records, rank)} was killed {moment}"
    return Verdict(protocol.FAILED, protocol.EXIT_KILLED, _with(codes, rank, protocol.EXIT_KILLED), rank, why)


def _with_memory(verdict: Verdict, records: Sequence[Record | None], words: str) -> Verdict:
    """Slurm tells of processes that were killed for want of memory, though the script may have gone on."""
    if OUT_OF_MEMORY.search(words) is None:
        return verdict
    named = [rank for text in TASK_OUT_OF_MEMORY.findall(words) for rank in _expanded(text) if rank < len(records)]
    who = ", ".join(describe(records, rank) for rank in named) or "the step"
    if verdict.state == protocol.SUCCEEDED:
        return verdict._replace(reason=f"warning: a process of {who} was killed, out of memory")
    return verdict._replace(reason=f"{verdict.reason}; a process of {who} was killed, out of memory")


def _expanded(text: str) -> list[int]:
    """`1-2,5` -> 1, 2, 5, as srun folds task numbers."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            ranks += range(int(first), int(last or first) + 1)
    return ranks


def _own_words(words: str, silent: Sequence[int]) -> tuple[int, str] | None:
    """What a rank that could not even write its record said on standard error."""
    for line in words.splitlines():
        found = RANK_GAVE_UP.match(line)
        if found and int(found.group(1)) in silent:
            return int(found.group(1)), found.group(2)
    return None


def _with(codes: Sequence[int], rank: int, code: int) -> list[int]:
    return [code if index == rank else other for index, other in enumerate(codes)]


def lost_rank(records: Sequence[Record | None], rank: int, words: str) -> Verdict:
    """The verdict where a rank fell silent while srun still waits for it."""
    codes = [rank_code(record, was_stopped=True) for record in records]
    why = f"{describe(records, rank)} {words}"
    return Verdict(protocol.FAILED, protocol.EXIT_KILLED, _with(codes, rank, protocol.EXIT_KILLED), rank, why)


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
        record = records[rank] or {}
        end = " to its end" if record.get("started") else ""
        return Verdict(
            protocol.FAILED_DRIVER,
            codes[rank] or protocol.EXIT_INFRASTRUCTURE,
            codes,
            rank,
            f"{who} could not run the script{end}: {record.get('why', '')}",
        )
    return Verdict(
        protocol.FAILED, codes[rank], codes, rank, f"{who} failed first ({protocol.describe_code(codes[rank])})"
    )


def _ranks(records: Sequence[Record | None], *states: str) -> list[int]:
    return [rank for rank, record in enumerate(records) if _state(record) in states]


def _state(record: Record | None) -> str:
    return str(record.get("state", "")) if record else ""


def has_ended(record: Record | None) -> bool:
    return _state(record) in protocol.RANK_ENDED_STATES


def _ended(record: Record | None) -> float:
    return float((record or {}).get("ended") or 0)


def _line_with(text: str, words: Sequence[str]) -> str:
    for line in text.splitlines():
        if any(word in line for word in words):
            return line.strip()
    return ""
