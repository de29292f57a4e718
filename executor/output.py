"""The script's output: raw bytes into the node's log at once, prefixed whole lines into the stream.

srun carries lines of up to 1,024 bytes whole and cuts longer ones into one another, so the stream gets
pieces of at most STREAM_PIECE_BYTES, each with its prefix and a newline. The log keeps every line as it was.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import time

from executor import protocol

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Callable

    from executor.loop import Loop


PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ is there from Python 3.10 on
DRAIN_S = 1.0
CONTINUATION_BYTES = 3  # a UTF-8 character has at most this many after its first byte


class Framer:
    """Turns chunks of bytes into prefixed pieces. Constant memory: it holds at most one unfinished piece."""

    def __init__(self, prefix: bytes, piece_bytes: int = protocol.STREAM_PIECE_BYTES) -> None:
        self.prefix = prefix
        self._text_bytes = max(piece_bytes - len(prefix) - 1, 80)
        self._held = b""
        self._inside_line = False  # part of this line was already given out by `flush`

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, chunk: bytes) -> bytes:
        """The pieces that are complete with this chunk."""
        data = self._held + chunk
        if b"\r" in data:
            data = _latest_updates(data)
        if self._inside_line and data:
            data = data[1:] if data[:1] == b"\n" else data
            self._inside_line = False
        pieces, used = self._cut(data)
        self._held = data[used:]
        return self._prefixed(b"".join(pieces))

    def flush(self, is_end: bool = True) -> bytes:
        """What is held, as a piece of its own: a prompt, a progress bar, the last line without newline.

        Before the end the first bytes of a character wait for the rest of it.
        """
        cut = len(self._held) if is_end else _whole_characters(self._held)
        text, self._held = self._held[:cut].rstrip(b"\r"), self._held[cut:]
        if not text:
            return b""
        self._inside_line = True
        return self._prefixed(text + b"\n")

    def _cut(self, data: bytes) -> tuple[list[bytes], int]:
        pieces: list[bytes] = []
        start, end, limit = 0, len(data), self._text_bytes
        while start < end:
            cut = data.rfind(b"\n", start, start + limit + 1) + 1
            if cut:
                pieces.append(data[start:cut])
            elif end - start > limit:
                cut = _character_boundary(data, start + limit)
                pieces += (data[start:cut], b"\n")
            else:
                break
            start = cut
        return pieces, start

    def _prefixed(self, text: bytes) -> bytes:
        if not text:
            return b""
        return self.prefix + text[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"


def _character_boundary(data: bytes, position: int) -> int:
    for back in range(CONTINUATION_BYTES + 1):
        if data[position - back] & 0xC0 != 0x80:
            return position - back
    return position  # no UTF-8: any place is as good


def _whole_characters(data: bytes) -> int:
    """Where the last character that is whole, or no UTF-8, ends."""
    for back in range(1, min(CONTINUATION_BYTES, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            size = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 1
            return len(data) - back if size > back else len(data)
    return len(data)


def _latest_updates(data: bytes) -> bytes:
    """Of several updates of one line (each begins or ends with a carriage return) only the latest."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join([_latest_update(line) if b"\r" in line else line for line in lines])


def _latest_update(line: bytes) -> bytes:
    # A trailing \r is kept: it may be the first half of \r\n, or another update may follow.
    body = line.rstrip(b"\r")
    return body[body.rfind(b"\r") + 1 :] + (b"\r" if body != line else b"")


class Stream:
    """Standard output, without ever blocking the loop: a slow reader must not keep signals from us."""

    def __init__(self, fd: int = 1) -> None:
        self.fd = _own_description(fd)
        self._pending = b""
        self._is_broken = False

    @property
    def is_backed_up(self) -> bool:
        return bool(self._pending)

    def write(self, data: bytes) -> None:
        self._pending += data
        self.push()

    def wait_for_room(self, loop: Loop, go_on: Callable[[], None]) -> None:
        """Call `go_on` once the reader has all."""

        def on_room() -> None:
            self.push()
            if not self.is_backed_up:
                loop.forget(self.fd)
                go_on()

        loop.watch(self.fd, on_room, select.POLLOUT)

    def push_out(self) -> None:
        """Until the reader has it all, or takes nothing more for a while."""
        while self.is_backed_up and select.select([], [self.fd], [], DRAIN_S)[1]:
            self.push()

    def push(self) -> None:
        """Write what the reader takes now."""
        while self._pending and not self._is_broken:
            try:
                self._pending = self._pending[os.write(self.fd, self._pending) :]
            except BlockingIOError:
                return
            except OSError:
                self._is_broken = True  # the reader is gone; the log goes on
        self._pending = b"" if self._is_broken else self._pending


def _own_description(fd: int) -> int:
    """A non-blocking description of a pipe or terminal that leaves the one we share with others as it is."""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            own = os.open("/proc/self/fd/%d" % fd, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            enlarge(own)
            return own
    except OSError:
        pass
    return fd


class Log:
    """The node's log file. Trouble with it is told once and never stops the job; writing is tried again."""

    def __init__(self, path: str, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self._fd: int | None = None
        self._lost_bytes = 0
        self._was_told = False
        self._try(self._open)

    def begin(self, attempt: str) -> None:
        """Where the log already holds an earlier run's lines, say where this one's begin."""
        end = self._last_byte()
        if end:
            words = time.strftime("[gangrun: attempt %%s begins here, %Y-%m-%d %H:%M:%S]\n") % attempt
            self.write((b"" if end == b"\n" else b"\n") + words.encode())

    def _last_byte(self) -> bytes:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(fd, 1, max(0, os.lseek(fd, 0, os.SEEK_END) - 1))
            finally:
                os.close(fd)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        self._lost_bytes += len(data)  # until it is written
        self._try(lambda: self._write_all(data))

    def close(self) -> None:
        """On NFS a full disk may be told only now."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._try(lambda: os.close(fd))

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.close()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _write_all(self, data: bytes) -> None:
        if self._fd is None or os.fstat(self._fd).st_nlink == 0:  # somebody removed the file, or its directory
            self._open()
        gap = self._lost_bytes - len(data)
        if gap:
            self._write_whole(b"\n[gangrun: %d bytes could not be written here]\n" % gap)
            self._lost_bytes = len(data)
        while data:
            written = os.write(self._fd or 0, data)
            data = data[written:]
            self._lost_bytes -= written

    def _write_whole(self, text: bytes) -> None:
        """A note is written whole or not at all: half of it would be taken for the script's."""
        if os.write(self._fd or 0, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except OSError as error:
            if error.errno == errno.ESTALE:
                self.close()
            if not self._was_told:
                self._was_told = True
                self._report(f"cannot write the log {self.path}: {error.strerror}; the job goes on")
            return False
        return True


def enlarge(pipe: int) -> None:
    """Fewer wake-ups for the same bytes."""
    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # over the user's limit for pipes: only slower


def write_all(fd: int, data: bytes) -> None:
    """All of it. Raises OSError."""
    while data:
        data = data[os.write(fd, data) :]


def tell(fd: int, text: str | bytes) -> None:
    """Words for a person, if somebody listens: a closed pipe or a full disk is no reason to end a job."""
    try:
        write_all(fd, text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
    except OSError:
        pass
