"""Small files that several nodes read and write on a shared file system.

An NFS client may keep saying "no such file" for up to a minute after another client made it, while open(2) of a
file that exists always asks the server (close-to-open consistency, nfs(5)). So a signal is a file that exists
beforehand ("armed") and is fired by rewriting its content in place; a record is rewritten in place too.
Every read opens the file anew. Nothing here ever deletes a file that a peer may have just written.
"""

from __future__ import annotations

import errno
import json
import os
import time

from executor import protocol

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]


ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class SignalFile:
    """A file that says one thing once. It has not fired while it is absent or armed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen_before: str | None = None

    def arm(self) -> None:
        write_in_place(self.path, _padded(protocol.ARMED, protocol.SIGNAL_BYTES))

    def fire(self, word: str, detail: str = "") -> None:
        write_in_place(self.path, _padded(" ".join((word + " " + detail).split()), protocol.SIGNAL_BYTES))

    def read(self) -> tuple[str, str] | None:
        """(word, detail) once fired, else None. A file that somebody touched counts as GO.

        Raises OSError when the file system fails; absence is no failure.
        """
        text = read_text(self.path)
        if text is None:
            return None
        if not text.endswith("\n") and text != self._seen_before:
            self._seen_before = text  # perhaps half written: it must be the same at the next look
            return None
        word, _, detail = text.strip().partition(" ")
        return None if word == protocol.ARMED else (word or protocol.GO, detail)


def write_record(path: str, record: Record) -> None:
    """Rewrite a record in place; a reader sees the old one or the new one."""
    write_in_place(path, _padded(json.dumps(record, separators=(",", ":")), protocol.RECORD_BYTES))


def read_record(path: str) -> Record | None:
    """The record, or None while there is none or it is being written. Raises OSError as `SignalFile.read` does."""
    text = read_text(path)
    if not text or not text.endswith("\n"):
        return None  # not written yet, or made in its full size beforehand
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def known_record(path: str) -> Record | None:
    """The record, or None where there is none or the file system fails: for those who will look again."""
    try:
        return read_record(path)
    except OSError:
        return None


def write_in_place(path: str, content: bytes) -> None:
    """One write(2) over the old content, so that no reader meets an empty file; then cut what is left of it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def read_text(path: str) -> str | None:
    """What a signal or record says, or None where there is none. Raises OSError as `SignalFile.read` does."""
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def read_bytes(path: str) -> bytes:
    """A whole file; open(2) and read(2) only, where Python's own files also ask for sizes and positions."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks: list[bytes] = []
        while not chunks or chunks[-1]:
            chunks.append(os.read(fd, 1 << 20))
        return b"".join(chunks)
    finally:
        os.close(fd)


def append(path: str, lines: bytes) -> None:
    """One write(2) at the end of a file, so that two writers' lines stay whole."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, lines)
    finally:
        os.close(fd)


def write_private(path: str, content: bytes) -> None:
    """A new file that only its owner can read, whatever the umask. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def write_atomic(path: str, content: bytes) -> None:
    """Replace a file: a reader sees the old one or the new one, never an empty or a mixed one."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        remove_quietly(temporary)
        raise


def remove_quietly(path: str) -> None:
    """Unlink a file, if it is there and can be."""
    try:
        os.unlink(path)
    except OSError:
        pass


def _padded(text: str, size: int) -> bytes:
    return text.encode("utf-8", "backslashreplace").ljust(size - 1) + b"\n"


class Watch:
    """Has a peer's counter changed lately? Judged on our own clock; two nodes' clocks are never compared."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._last: object = None
        self._changed = self._looked = time.monotonic()

    def is_silent(self, counter: object) -> bool:
        now = time.monotonic()
        gap_s = now - self._looked
        if gap_s > self.limit_s / 2:
            self._changed += gap_s  # we were suspended, or the file system hung: so were the peers
        self._looked = now
        if counter != self._last:
            self._last, self._changed = counter, now
        return now - self._changed > self.limit_s

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._changed
