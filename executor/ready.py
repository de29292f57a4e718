"""Is a task of a group ready? Asked again and again by the group's driver, whose one loop must not wait for an answer.

Every kind of probe takes up where its last look ended: a connection that is being made, a server that has not answered
yet, a log that has grown, a command that still runs. A look takes some tenths of a second at most.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Protocol

from executor import protocol
from executor.process import spawn
from executor.protocol import UsageError

DEFAULT_TIMEOUT_S = 600.0
KINDS = ("port", "http", "log", "command")
ANSWER_S = 5.0  # a connection or an answer that takes longer is asked for anew
WAIT_S = 0.1  # of one look for all its servers; a connection in a cluster is made in a thousandth of it
ANSWER_BYTES = 4096
LOG_BYTES = 1 << 20  # read at once,
LOOK_BYTES = 8 << 20  # and in one look
LINE_BYTES = 1 << 16  # of an unfinished line that are kept
TAIL_BYTES = 1 << 14
COMMAND_S = 30.0
PAUSE_S = 0.5  # between two runs of a command
FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.05, 1.0, 1.2  # between two questions to a server
WORDS_BYTES = 4096
URL = re.compile(r"(?:http://[^/:]*)?:?(?P<port>\d+)(?P<path>/[^\s#]*)?\Z")
# What the stream puts before a rank's line; the pattern is for what the task printed.
PREFIX = re.compile(
    rb"^(?:\x1b\[36m)?\((?:setup|[A-Za-z0-9-]+,(?: rank=\d+,)?) pid=\d+(?:, ip=[^)\n]*)?\)(?:\x1b\[0m)? ", re.MULTILINE
)
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})")
# Its own standard output tells how the command ended, whoever reaps it; what the command prints goes to the other pipe.
RUN_AND_TELL = 'bash -c "$1" >&2; echo $?'


class Probe:
    """One task's readiness. `look` until it is true, or until `is_late`; then `close`.

    `ready` names one of port, http, log and command, and perhaps timeout_s. Every one of `addresses` has to answer; a
    host name among them may keep a look waiting for the name server.
    `started` is the task's start by `time.monotonic`. Of `output`, what is before `log_from` is an earlier start's.
    """

    def __init__(
        self,
        ready: Mapping[str, Any],
        task: str,
        addresses: Sequence[str],
        output: str,
        started: float | None = None,
        log_from: int = 0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        kinds = [kind for kind in KINDS if kind in ready]
        if len(kinds) != 1:
            raise UsageError(f"ready of {task}: give one of {', '.join(KINDS)}, not {', '.join(kinds) or 'none'}")
        if not addresses and kinds[0] in ("port", "http"):
            raise UsageError(f"ready of {task}: {kinds[0]} needs the address of a node")
        self.task, self.output = task, output
        self.timeout_s = float(ready.get("timeout_s") or DEFAULT_TIMEOUT_S)
        self._started = time.monotonic() if started is None else started
        self._kind, self._wanted = kinds[0], ready[kinds[0]]
        checks = self._made(addresses, log_from, os.environ if environ is None else environ)
        self._open = list(zip([f"{address}: " for address in addresses] if len(checks) > 1 else [""], checks))

    def _made(self, addresses: Sequence[str], log_from: int, environ: Mapping[str, str]) -> Sequence[Check]:
        try:
            if self._kind == "port":
                return [Server(address, _port(self._wanted)) for address in addresses]
            if self._kind == "http":
                port, path = _port_and_path(str(self._wanted))
                return [Server(address, port, path) for address in addresses]
            if self._kind == "log":
                return [Words(self.output, str(self._wanted), log_from)]
            return [Command(str(self._wanted), environ)]
        except ValueError as error:
            raise UsageError(f"ready of {self.task}: {self._kind}={self._wanted!r} {error}") from error

    def look(self) -> bool:
        """Whether the task is ready now. A server that answered once is not asked again."""
        deadline = time.monotonic() + WAIT_S
        self._open = [each for each in self._open if not each[1].look(max(0.0, deadline - time.monotonic()))]
        return not self._open

    @property
    def last_problem(self) -> str:
        """Why it is not ready: `connection refused`, `HTTP 503`, ... Empty when it is."""
        return "".join((self._open[0][0], self._open[0][1].problem)) if self._open else ""

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._started > self.timeout_s

    def describe(self) -> str:
        """What is waited for: `port 8000 of server`."""
        wanted = " ".join(str(self._wanted).split())
        return (
            f"{wanted!r} in the log of {self.task}" if self._kind == "log" else f"{self._kind} {wanted} of {self.task}"
        )

    def failure(self) -> str:
        """Why the wait is over, in one line."""
        return f"{self.task} was not ready after {self.timeout_s:g} s: {self.describe()}: {self.last_problem}"

    def last_lines(self, count: int = 10) -> list[str]:
        """The end of the task's output."""
        return last_lines(self.output, count)

    def close(self) -> None:
        """End what a probe still has at work."""
        for _, check in self._open:
            check.close()


class Check(Protocol):
    """One thing to look at; `problem` says what is missing."""

    problem: str

    def look(self, wait_s: float) -> bool: ...

    def close(self) -> None: ...


class Server:
    """Does an address take a connection; with `path`, does it answer GET with 2xx or 3xx?"""

    def __init__(self, address: str, port: int, path: str | None = None) -> None:
        self._address, self._port = address, port
        host = f"[{address}]" if ":" in address else address
        text = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nUser-Agent: gangrun\r\nAccept: */*\r\n\r\n"
        self._request = b"" if path is None else text.encode()
        self._socket: socket.socket | None = None
        self._is_connected = False
        self._answer = b""
        self._deadline = self._again = 0.0
        self._pause_s = FIRST_PAUSE_S
        self.problem = "not asked yet"

    def look(self, wait_s: float) -> bool:
        if self._socket is None and time.monotonic() < self._again:
            return False
        try:
            if self._socket is None:
                self._connect()
            is_ready = self._advance(wait_s)
        except OSError as error:
            self.problem = (error.strerror or str(error)).lower()
            self.close()
            is_ready = False
        if not is_ready and self._socket is None:  # asked, and not ready: seldom, or its log is full of us
            self._pause_s = min(self._pause_s * PAUSE_GROWTH, LONGEST_PAUSE_S)
            self._again = time.monotonic() + self._pause_s
        return is_ready

    def _connect(self) -> None:
        family, _, _, _, where = socket.getaddrinfo(self._address, self._port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._is_connected, self._answer, self._deadline = False, b"", time.monotonic() + ANSWER_S
        number = self._socket.connect_ex(where)
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))

    def _advance(self, wait_s: float) -> bool:
        """As far as it goes now."""
        if not self._is_connected:
            if not self._has_come(select.POLLOUT, wait_s, "no connection"):
                return False
            self._finish_connection()
        if not self._request:
            self.close()
            return True
        while self._has_come(select.POLLIN, wait_s, "no answer"):
            if self._has_answered():
                self.close()
                return not self.problem
            wait_s = 0.0  # for a server that sends a letter at a time
        return False

    def _finish_connection(self) -> None:
        assert self._socket is not None
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        self._is_connected = True
        self._socket.send(self._request)  # it fits into the buffer of a new connection

    def _has_come(self, event: int, wait_s: float, problem: str) -> bool:
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, event)
        if poll.poll(int(wait_s * 1000)):
            return True
        self.problem = problem + " yet"
        if time.monotonic() > self._deadline:
            self.problem = f"{problem} in {ANSWER_S:.0f} s"
            self.close()
        return False

    def _has_answered(self) -> bool:
        """Reads on; true if the first line is whole, and `problem` is then what is wrong with it."""
        assert self._socket is not None
        chunk = self._socket.recv(ANSWER_BYTES)
        self._answer += chunk
        if chunk and b"\n" not in self._answer and len(self._answer) < ANSWER_BYTES:
            return False
        found = STATUS_LINE.match(self._answer)
        status = found and int(found[1])
        self.problem = f"HTTP {status}" if status else "the answer is not HTTP" if self._answer else "no answer at all"
        if status and 200 <= status < 400:
            self.problem = ""
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Words:
    """Does a growing file hold a match of a regular expression? Lines are looked at once; memory is constant."""

    def __init__(self, path: str, pattern: str, position: int) -> None:
        self._path, self._position = path, position
        self._unfinished = b""
        self.problem = "nothing printed yet"
        try:
            self._pattern = re.compile(os.fsencode(pattern), re.MULTILINE)
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from error

    def look(self, wait_s: float) -> bool:
        try:
            with open(self._path, "rb", buffering=0) as file:
                return self._search(file.read, file.seek, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.problem = f"cannot read {self._path}: {error.strerror}"
            return False

    def _search(self, read: Callable[[int], bytes | None], seek: Callable[[int], int], size: int) -> bool:
        if size < self._position:  # begun anew
            self._position, self._unfinished = 0, b""
        seek(self._position)
        before = self._position
        while self._position - before < LOOK_BYTES:
            chunk = read(LOG_BYTES)
            if not chunk:
                break
            self._position += len(chunk)
            self.problem = "not printed yet"
            if self._is_in_lines(chunk):
                return True
        # A line that nobody has finished between two looks is a prompt: it counts as it stands.
        return before == self._position and bool(self._unfinished and self._is_in(self._unfinished))

    def _is_in_lines(self, chunk: bytes) -> bool:
        lines, newline, rest = (self._unfinished + chunk).rpartition(b"\n")
        self._unfinished = rest[-LINE_BYTES:]
        if len(rest) > LINE_BYTES and self._is_in(rest):
            return True
        return bool(newline and self._is_in(lines))

    def _is_in(self, text: bytes) -> bool:
        return self._pattern.search(PREFIX.sub(b"", text)) is not None

    def close(self) -> None: ...


class Command:
    """Does a bash command succeed? It runs beside the loop, again and again."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._argv = ["bash", "-c", RUN_AND_TELL, "ready", command]
        self._environ = dict(environ)
        self._pid: int | None = None
        self._code = self._words = -1
        self._said = self._printed = b""
        self._deadline = self._again = 0.0
        self.problem = "not run yet"

    def look(self, wait_s: float) -> bool:
        if self._pid is None:
            if time.monotonic() < self._again:
                return False
            self._start()
        select.select([self._code], [], [], wait_s)
        has_ended = self._read()
        if not has_ended and time.monotonic() < self._deadline:
            return False
        code = self._said.strip().decode("ascii", "replace")
        self.close()
        if has_ended and code == "0":
            return True
        self._again = time.monotonic() + PAUSE_S
        how = (f"exit code {code}" if code else "killed") if has_ended else f"not ended in {COMMAND_S:.0f} s"
        last = self._printed.decode("utf-8", "replace").split("\n")
        self.problem = ": ".join(
            filter(None, (how, next((line.strip() for line in reversed(last) if line.strip()), "")))
        )
        return False

    def _start(self) -> None:
        self._code, code = os.pipe()
        self._words, words = os.pipe()
        self._said = self._printed = b""
        self._deadline = time.monotonic() + COMMAND_S
        for fd in (self._code, self._words):
            os.set_blocking(fd, False)
        try:
            self._pid = spawn(self._argv, self._environ, stdout=code, stderr=words)
        finally:
            os.close(code)
            os.close(words)

    def _read(self) -> bool:
        """Takes what there is; true if the command has ended."""
        is_over, said = _taken(self._code)  # first: what it printed before its end is in the other pipe by then
        self._said += said
        self._printed = (self._printed + _taken(self._words)[1])[-WORDS_BYTES:]
        return is_over or self._said.endswith(b"\n")

    def close(self) -> None:
        if self._pid is None:
            return
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        _reap(self._pid)
        os.close(self._code)
        os.close(self._words)
        self._pid = None


def _reap(pid: int) -> None:
    """A process that was killed; the loop may be quicker, and one that hangs in a dead file system is left to it."""
    deadline = time.monotonic() + WAIT_S
    try:
        while os.waitpid(pid, os.WNOHANG)[0] != pid and time.monotonic() < deadline:
            time.sleep(0.001)
    except ChildProcessError:
        pass


def _taken(fd: int) -> tuple[bool, bytes]:
    """(whether its writers are gone, what was in the pipe), with a limit for those who never stop writing."""
    taken = b""
    while len(taken) < LOG_BYTES:
        try:
            chunk = os.read(fd, WORDS_BYTES)
        except BlockingIOError:
            return False, taken
        if not chunk:
            return True, taken
        taken += chunk
    return False, taken


def _port(value: object) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= protocol.LAST_PORT):
        raise ValueError(f"is not a port: use 1 to {protocol.LAST_PORT}")
    return int(text)


def _port_and_path(text: str) -> tuple[int, str]:
    found = URL.match(text)
    if found is None:
        raise ValueError("is not of the form :PORT/PATH")
    return _port(found["port"]), found["path"] or "/"


def last_lines(path: str, count: int) -> list[str]:
    """The last lines of a file, however large it is; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return lines[1 if size > TAIL_BYTES else 0 :][-count:]
