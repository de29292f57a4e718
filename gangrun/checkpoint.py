"""`gangrun checkpoint`: one line at the end of a file on the shared home. Cheap: a script waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Mapping

from executor import protocol
from executor.protocol import GangrunError, UsageError


def note(step: str, cost_s: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Note that the checkpoint of `step` is complete, now. Without network: the file is all it needs.

    A line is `TIME STEP COST_S ATTEMPT RANK`; a script may append the first two words itself. Raises UsageError outside
    of a job and for what is no number, GangrunError where the file cannot be written.
    """
    words = [_number(step, "STEP"), _number(cost_s or "0", "--cost-s")]
    path = environ.get(protocol.ENV_CHECKPOINTS)
    if not path:
        raise UsageError(f"{protocol.ENV_CHECKPOINTS} is not set: this is no part of a job that gangrun runs on Slurm")
    attempt, rank = environ.get(protocol.ENV_ATTEMPT) or "0", environ.get(protocol.ENV_NODE_RANK) or "0"
    line = " ".join([f"{time.time():.3f}", *words, attempt, rank]) + "\n"
    try:
        _append(path, line.encode())
    except OSError as error:
        raise GangrunError(f"cannot note the checkpoint in {path}: {error.strerror}") from error


def _number(text: str, where: str) -> str:
    """As it is written, so that large steps keep their digits."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (text.isascii() and 0 <= number < 1e15 and "_" not in text):
        raise UsageError(f"{where}={text!r}: use a number from 0 to 10^15")
    return text.strip()


def _append(path: str, line: bytes) -> None:
    """One write(2). Over NFS an append alone is not enough for two writers (open(2), O_APPEND), hence the lock."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(fd, fcntl.LOCK_EX)
        while line:  # what a full disk did not take is an error of the next write
            line = line[os.write(fd, line) :]
    finally:
        os.close(fd)
