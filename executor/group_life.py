"""How a group stands and what it is called in the end. Pure: one rule, used everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from executor import protocol
from executor.verdict import LOSS_WORDS, Verdict

NODE_LOSS = LOSS_WORDS[:2]  # "on NODE" before those that name nobody
FAILED_STATES = (protocol.FAILED, protocol.FAILED_SETUP, protocol.FAILED_DRIVER)


class Ended(NamedTuple):
    """How a task ended; `time` is in seconds since 1970."""

    state: str
    exit_code: int
    time: float
    reason: str = ""


class Standing(NamedTuple):
    """A task as it stands; `ended` is None while it goes on, or has not begun."""

    name: str
    is_primary: bool
    ended: Ended | None = None


def first_failure(tasks: Sequence[Standing]) -> Standing | None:
    """The primary that failed first, by time; one that was stopped because of it did not fail."""
    failed = [task for task in tasks if task.is_primary and task.ended and task.ended.state in FAILED_STATES]
    return min(failed, key=lambda task: task.ended.time if task.ended else 0.0, default=None)


def is_over(tasks: Sequence[Standing], stops_on_primary_failure: bool) -> bool:
    """The group ends when its last primary has; a failed primary ends it, unless the others are to go on."""
    if stops_on_primary_failure and first_failure(tasks):
        return True
    return all(task.ended for task in tasks if task.is_primary)


def verdict_of(tasks: Sequence[Standing], was_cancelled: bool, signal_number: int = 15) -> Verdict:
    """The state and code of the whole. A failure that came before a cancel stands; nothing after it is a success."""
    failed = first_failure(tasks)
    if failed and failed.ended:
        why = _why(_with_lost_node(tasks) or failed if failed.ended.state == protocol.FAILED_DRIVER else failed)
        return Verdict(failed.ended.state, failed.ended.exit_code or protocol.EXIT_INFRASTRUCTURE, [], None, why)
    primaries = [task for task in tasks if task.is_primary]
    if not was_cancelled and all(task.ended and task.ended.state == protocol.SUCCEEDED for task in primaries):
        return Verdict(protocol.SUCCEEDED, 0, [])
    lost = _with_lost_node(tasks)
    if lost:  # it is Slurm that stopped the others
        return Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [], None, _why(lost))
    stopped = next((task for task in primaries if task.ended and task.ended.state != protocol.SUCCEEDED), None)
    why = "cancelled by signal %d" % signal_number if was_cancelled else ""
    if stopped and stopped.ended and not was_cancelled:
        why = f"{stopped.name}: {stopped.ended.reason}"
    return Verdict(protocol.CANCELLED, protocol.exit_code_of_signal(signal_number), [], None, why)


def _with_lost_node(tasks: Sequence[Standing]) -> Standing | None:
    """Slurm ends all tasks when one loses its node; the one that says whose it was comes first."""
    fell = [task for task in tasks if task.ended and task.ended.state == protocol.FAILED_DRIVER]
    lost = (task for words in NODE_LOSS for task in fell if task.ended and words in task.ended.reason)
    return next(lost, None)


def _why(task: Standing) -> str:
    assert task.ended is not None
    return f"{task.name}: {task.ended.reason or protocol.describe_code(task.ended.exit_code)}"
