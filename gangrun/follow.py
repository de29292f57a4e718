"""Reads a log on the cluster by byte offset: through truncation, requeue and lost connections, to its last line."""

from __future__ import annotations

import base64
import codecs
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from executor import protocol
from gangrun import states
from gangrun.remote import Forgotten, LoginNeeded, RemoteError

if TYPE_CHECKING:
    from gangrun.cluster import Job

CHUNK_BYTES = 1 << 20
ANY_BYTES = "surrogateescape"
LONG_POLL_S = 15.0  # the host answers at once when there is something, and after this in any case
CALL_MARGIN_S = 30.0
LOOK_FIRST_S = 2.0  # how often Slurm is asked about a job whose driver says nothing new
LOOK_LONGEST_S = 20.0
END_FIRST_S = 0.3  # how long to wait for more once the driver has recorded the end: another attempt may follow
SETTLED_LOOKS = 2  # empty answers after the end: over NFS a last line may come late
LATE_LOOKS = 12  # about a minute: for so long an NFS client may keep saying that a new file is not there
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 30.0


def follow_log(job: Job, name: str, follow: bool, lines: int | None, say: Callable[[str], None]) -> Iterator[bytes]:
    """Pieces of a log. With `follow` until the job has ended and everything has been read. A lost connection is told
    with `say` and mended; nothing is lost or repeated."""
    pieces = _pieces(Reader(job, name, lines, say), follow)
    return whole_characters(_until_forgotten(pieces, say) if follow else pieces)


def _until_forgotten(pieces: Iterator[bytes], say: Callable[[str], None]) -> Iterator[bytes]:
    """A log that went away with its cluster has no more pieces; how the job ended is another question."""
    try:
        yield from pieces
    except Forgotten as error:
        say(str(error))


def _pieces(reader: Reader, follow: bool) -> Iterator[bytes]:
    while True:
        piece = reader.read(LONG_POLL_S if follow else 0.0)
        yield piece
        if not follow and reader.has_all_there_was:
            return
        if not piece and (not follow or reader.is_over()):
            return


def whole_characters(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that cut no character."""
    decoder = codecs.getincrementaldecoder("utf-8")(ANY_BYTES)
    for piece in pieces:
        whole = decoder.decode(piece).encode("utf-8", ANY_BYTES)
        if whole:
            yield whole
    rest = decoder.decode(b"", final=True).encode("utf-8", ANY_BYTES)
    if rest:
        yield rest


class Reader:
    """Where one reading of one log has come to."""

    def __init__(self, job: Job, name: str, lines: int | None, say: Callable[[str], None]) -> None:
        self._job, self._name, self._say = job, name, say
        self._inode: int | None = None
        self._offset = -lines if lines else 0
        self._record: str | None = None
        self._looked, self._look_s, self._end_s = 0.0, LOOK_FIRST_S, END_FIRST_S
        self._told = ""
        self._first_size: int | None = None
        self._empty_after_end, self._is_there = 0, False

    def read(self, wait_s: float) -> bytes:
        """The next bytes; empty if there were none within `wait_s` seconds, or if only the job's state changed."""
        answer = self._ask(wait_s)
        if answer["is_new"]:
            self._say(f"{self._name} was truncated or replaced; reading it from its start")
        self._inode, self._offset, self._record = answer["inode"], answer["offset"], answer["record"]
        self._end_s = END_FIRST_S if answer["data"] else self._end_s
        self._is_there = answer["is_there"]
        if self._first_size is None and self._is_there:
            self._first_size = answer["size"]
        return base64.b64decode(answer["data"])

    @property
    def has_all_there_was(self) -> bool:
        """Everything that the log held when it was first looked at: a job may print faster than we read."""
        return self._first_size is not None and self._offset >= self._first_size

    def _ask(self, wait_s: float) -> Any:
        run, retry_s = self._job.run, RETRY_FIRST_S
        request: dict[str, Any] = {
            "root": run.root, "run": run.run, "job": run.job, "name": self._name, "inode": self._inode,
            "offset": self._offset, "size": CHUNK_BYTES, "wait_s": self._patience_s(wait_s), "before": self._record,
        }  # fmt: skip
        while True:
            try:
                return self._job.cluster.host.call("read", timeout_s=wait_s + CALL_MARGIN_S, **request)
            except LoginNeeded as error:
                self._say(f"{error}. The job is not affected")
                self._job.cluster.host.wait_for_login()
            except Forgotten:
                raise
            except RemoteError as error:
                if wait_s == 0:
                    raise
                self._say(f"{error}. The job is not affected; asking again in {retry_s:.0f} s")
                time.sleep(retry_s)
                retry_s = min(retry_s * 2, RETRY_LONGEST_S)

    def _patience_s(self, wait_s: float) -> float:
        is_first = self._looked == 0.0  # a job that waits is told at once
        return min(wait_s, self._end_s) if is_first or self._says_over() else wait_s

    def _says_over(self) -> bool:
        record = states.parse_record(self._record)
        return self._job.run.is_final or (record is not None and record.is_terminal)

    def is_over(self) -> bool:
        """The job has ended, and the log has been read to its end more than once since."""
        if not self._says_over() and time.monotonic() - self._looked > self._look_s:
            self._looked = time.monotonic()
            self._look_s = min(self._look_s * 1.5, LOOK_LONGEST_S)
            self._refresh()
        if not self._says_over():
            return False
        if not self._job.run.is_final:  # the driver says so; Slurm may run it again
            self._refresh()
        self._end_s *= 1.5
        self._empty_after_end += 1
        looks = LATE_LOOKS if self._is_late() else SETTLED_LOOKS
        return self._job.run.is_final and self._empty_after_end >= looks

    def _is_late(self) -> bool:
        """The record tells of a log that cannot be seen yet."""
        record = states.parse_record(self._record)
        begun = [rank for rank in record.ranks if rank.get("started")] if record else []
        return not self._is_there and os.path.basename(self._name) in [rank.get("log") for rank in begun]

    def _refresh(self) -> None:
        try:
            run = self._job.status()
        except RemoteError as error:
            self._say(f"{error}. The job is not affected")
            return
        words = f"{run.run} is {run.state}" + (f" ({run.reason})" if run.reason else "")
        if run.state == protocol.PENDING and words != self._told:
            self._told = words
            self._say(words)
