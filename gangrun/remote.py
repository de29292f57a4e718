"""One shared connection per host, and the agent at its other end.

The OpenSSH client does everything that has to do with hosts, keys and passwords. A call rides on the shared connection
(ssh_config(5), ControlMaster) and has no way of its own to the network: where there is no connection it fails, never
asks for a password, and never counts as one more login (sites block accounts for those).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Any, NoReturn

from filelock import FileLock, Timeout

from codegen.spec import SpecError
from executor import protocol
from executor.protocol import GangrunError
from gangrun.settings import LOCAL

REJECTED = "sbatch refused the job"
CALL_TIMEOUT_S = 90.0
UPLOAD_BYTES_PER_S = 50_000.0  # slower than this is taken for a dead connection
CONNECT_TIMEOUT_S = 15
LOGIN_TIMEOUT_S = 300.0  # a person types a password and looks for a telephone
PERSIST_S = 600
NAMES = {
    "home": protocol.HOME_DIRECTORY,
    "status": protocol.STATUS_NAME,
    "conf": protocol.SLURM_CONF,
    "requests": protocol.REQUESTS_NAME,
    "tasks": protocol.TASKS_NAME,
    "events": protocol.EVENTS_NAME,
    "checkpoints": protocol.CHECKPOINTS_NAME,
    "heartbeat": protocol.HEARTBEAT_NAME,
    "log": protocol.SINGLE_LOG_NAME,
}
LOGIN_LOOK_S = 2.0
END_S = 0.5  # for the last words of a program that was killed
SSH_FAILED = 255
# Shorter than a socket's longest name: 104 bytes on some systems, and ssh adds 17 for a temporary one.
LONGEST_SOCKET = 80
# ssh_config(5): whatever happens to the shared connection, no other one is opened.
ONLY_SHARED = ("-o", "ControlMaster=no", "-o", "ProxyCommand=false")
CONTROL_PATH = re.compile(r"^controlpath (?!none$)(.+)$", re.MULTILINE)  # of `ssh -G`, with all its tokens expanded
NEEDS_LOGIN = ("Permission denied", "Too many authentication failures", "keyboard-interactive", "Host key verification")
# The interpreter reads its program from standard input, then the request, then what is uploaded. No shell of the user's
# reads more than these plain words (tcsh, fish); single quotes mean the same to all of them.
BOOT = (
    "exec /bin/sh -c 'for p in {pythons}; do command -v $p >/dev/null 2>&1 && "
    'exec $p -I -S -c "import sys; r = sys.stdin.buffer; exec(r.read(int(r.readline())))"; done; '
    "echo {mark}NO_PYTHON{mark}'"
)


class RemoteError(GangrunError):
    """The host answered, and said no; or its answer made no sense."""


class Rejected(RemoteError):
    """sbatch said no to what was asked for."""

    exit_code = protocol.EXIT_USAGE


class Unreachable(RemoteError):
    """Nobody answered. It may be worth trying again."""


class Forgotten(RemoteError):
    """The host answered: it knows nothing of this, and asking again will not help."""


class LoginNeeded(RemoteError):
    """The host asks for a login that only a person can give. Trying again by itself would lock the account."""


def open_host(alias: str, python: str | None = None) -> Host:
    """The host of this alias; `local` is the machine itself."""
    return Host(python) if alias == LOCAL else SshHost(alias, python)


class Host:
    """The machine itself, as a login node: what a call does, without ssh."""

    name = LOCAL

    def __init__(self, python: str | None = None) -> None:
        self._pythons = [python] if python else ["python3", "/usr/bin/python3", "/usr/libexec/platform-python"]
        self.calls = 0

    def call(
        self, op: str, *, timeout_s: float = CALL_TIMEOUT_S, payload: IO[bytes] | None = None, **request: Any
    ) -> Any:
        """What the agent's operation returns, within `timeout_s` and an upload's time. Raises RemoteError and kinds."""
        mark = f"gangrun-{secrets.token_hex(8)}-"
        size = os.fstat(payload.fileno()).st_size if payload else 0
        limit_s = timeout_s + size / UPLOAD_BYTES_PER_S
        request.update(op=op, mark=mark, timeout_s=limit_s, has_payload=payload is not None, names=NAMES)
        agent = _agent()
        head = b"%d\n%s%s\n" % (len(agent), agent, json.dumps(request).encode())
        self.calls += 1
        return self._exchange(self._command(mark), head, payload, limit_s, mark)

    def wait_for_login(self) -> None:
        """Until a person has opened the connection again; nothing is sent meanwhile."""

    def _command(self, mark: str) -> str:
        return BOOT.format(pythons=" ".join(map(_plain, self._pythons)), mark=mark)

    def _argv(self, command: str) -> list[str]:
        return ["/bin/sh", "-c", command]

    def _exchange(self, command: str, head: bytes, payload: IO[bytes] | None, limit_s: float, mark: str) -> Any:
        code, out, err = run(self._argv(command), head, payload, limit_s)
        parts = out.decode("utf-8", "replace").split(mark)
        if len(parts) >= 3:
            return self._result(parts[1])
        self._no_answer(code, err.decode("utf-8", "replace").strip(), limit_s)

    def _result(self, text: str) -> Any:
        if text == "NO_PYTHON":
            tried = ", ".join(self._pythons)
            raise RemoteError(f"{self.name}: no python found ({tried}); name one with `python:` in the host's settings")
        answer = json.loads(text)
        if "result" in answer:
            return answer["result"]
        words = str(answer.get("refused") or answer.get("failed"))
        raise (Rejected if words.startswith(REJECTED) else RemoteError)(f"{self.name}: {words}")

    def _no_answer(self, code: int | None, err: str, limit_s: float) -> NoReturn:
        if code is None:
            raise Unreachable(f"{self.name}: no answer within {limit_s:.0f} s")
        raise Unreachable(f"{self.name}: the command ended with code {code} and without an answer: {_tail(err)}")


class SshHost(Host):
    """A host of ~/.ssh/config."""

    def __init__(self, alias: str, python: str | None = None) -> None:
        super().__init__(python)
        if not alias or alias.startswith("-") or any(c.isspace() or not c.isprintable() for c in alias):
            raise SpecError(f"host={alias!r}: use an alias of ~/.ssh/config")
        self.name = alias
        self.logins = 0
        self._socket: str | None = None
        self._places: tuple[str | None, str] | None = None

    def _argv(self, command: str) -> list[str]:
        return [*self._ssh(), "-T", *ONLY_SHARED, "--", self.name, command]

    def _ssh(self) -> list[str]:
        own = _at(self._socket) if self._socket else []
        return ["ssh", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", *own]

    def _exchange(self, command: str, head: bytes, payload: IO[bytes] | None, limit_s: float, mark: str) -> Any:
        self.connect()
        try:
            return super()._exchange(command, head, payload, limit_s, mark)
        except _Gone:
            self.connect()  # the shared connection ended just now: one more, no matter how many calls saw it
            if payload:
                payload.seek(0)
        try:
            return super()._exchange(command, head, payload, limit_s, mark)
        except _Gone as error:
            raise Unreachable(str(error)) from error

    def _no_answer(self, code: int | None, err: str, limit_s: float) -> NoReturn:
        if code == SSH_FAILED:
            raise _Gone(f"{self.name}: the connection was lost: {_tail(err)}")
        super()._no_answer(code, err, limit_s)

    # --- the shared connection

    def connect(self) -> None:
        """Find or open the shared connection: the user's own, if there is one. Raises Unreachable, LoginNeeded."""
        theirs, ours = self._places = self._places or self._find_places()
        if theirs is not None and self._socket in (None, theirs) and self._is_alive(theirs):
            self._socket = theirs
            return
        self._socket = ours
        if self._is_alive(ours):
            return
        try:
            with FileLock(ours + ".lock", timeout=LOGIN_TIMEOUT_S):
                if not self._is_alive(ours):
                    with contextlib.suppress(OSError):  # a dead one in its place, and ssh goes on without sharing
                        os.unlink(ours)
                    self._login()
        except Timeout as error:
            raise Unreachable(f"{self.name}: another process has been logging in for too long") from error

    def _find_places(self) -> tuple[str | None, str]:
        """Where the user's own shared connection would be, if they have one, and where ours would be."""
        route = self._route()
        theirs = CONTROL_PATH.search(route)
        return theirs and theirs.group(1), str(control_directory() / _short(self.name + route))

    def _route(self) -> str:
        """What ssh makes of the alias now: another user, port, jump host or key is another connection."""
        code, said, err = run(["ssh", "-G", "--", self.name], b"", None, CONNECT_TIMEOUT_S)
        if code != 0:
            raise SpecError(f"host={self.name!r}: ssh does not take it: {_tail(err.decode('utf-8', 'replace'))}")
        return said.decode("utf-8", "replace")

    def wait_for_login(self) -> None:
        while self._socket is not None and not self._is_alive(self._socket):
            time.sleep(LOGIN_LOOK_S)

    def disconnect(self) -> None:
        """End our own shared connection; a later call opens another one."""
        if self._places and self._socket == self._places[1]:
            self._control(self._socket, "exit")

    def _is_alive(self, socket: str) -> bool:
        return os.path.exists(socket) and self._control(socket, "check")

    def _control(self, socket: str, word: str) -> bool:
        # A connection that ends just then takes this request and does not answer, and ssh goes on and logs in.
        argv = ["ssh", "-o", "BatchMode=yes", *_at(socket), *ONLY_SHARED, "-O", word, "--", self.name]
        code, _, _ = run(argv, b"", None, CONNECT_TIMEOUT_S)
        return code == 0

    def _login(self) -> None:
        """The only place that opens a connection. On a terminal a person may be asked; else nobody is."""
        person = sys.stdin.isatty() and sys.stderr.isatty()
        argv = [
            *self._ssh(), "-f", "-N",
            "-o", "ControlMaster=yes", "-o", "ControlPersist=%d" % PERSIST_S,
            "-o", "ConnectTimeout=%d" % CONNECT_TIMEOUT_S,
            "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3",
            "--", self.name,
        ]  # fmt: skip
        self.logins += 1
        if person:
            argv[argv.index("BatchMode=yes")] = "BatchMode=no"
        code, words = _quietly(argv, LOGIN_TIMEOUT_S if person else 3.0 * CONNECT_TIMEOUT_S)
        if code == 0:
            return
        if any(word in words for word in NEEDS_LOGIN):
            again = shlex.join(
                ["ssh", "-S", str(self._socket), "-fNM", "-o", "ControlPersist=%d" % PERSIST_S, self.name]
            )
            raise LoginNeeded(f"{self.name}: the host wants a login: {_tail(words)}. Log in once with: {again}")
        raise Unreachable(f"{self.name}: cannot connect: {_tail(words) or 'no answer'}")


class _Gone(RemoteError):
    """The shared connection ended under a call."""


def control_directory() -> Path:
    """A directory of this user's alone with a short name: sockets live there."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        path = Path(parent or "/nonexistent") / f"gangrun-{os.getuid()}"
        if len(str(path)) > LONGEST_SOCKET - 20:
            continue
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        state = path.lstat()
        if state.st_uid == os.getuid() and not path.is_symlink() and not state.st_mode & 0o077:
            return path
    raise GangrunError(f"no private directory for ssh's sockets: /tmp/gangrun-{os.getuid()} is not ours alone")


def run(argv: Sequence[str], head: bytes, payload: IO[bytes] | None, limit_s: float) -> tuple[int | None, bytes, bytes]:
    """A command's code (None: it did not end in time), output and errors. What it reads is `head`, then the payload."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise RemoteError(f"cannot run {argv[0]}: {error.strerror}") from error
    stdin, process.stdin = process.stdin, None
    assert stdin is not None
    threading.Thread(target=_feed, args=(stdin, head, payload), daemon=True).start()
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, *_end(process)
    except BaseException:
        _end(process)
        raise
    return process.returncode, out, err


def _feed(stdin: IO[bytes], head: bytes, payload: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError), stdin:  # a reader that left says so itself
        stdin.write(head)
        if payload:
            shutil.copyfileobj(payload, stdin, 1 << 20)


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    with contextlib.suppress(ProcessLookupError):  # it may have ended this moment
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:  # ssh is gone, but its shared connection holds the pipes until the host is done
        return b"", b""


def _quietly(argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """For a program that goes to the background: it would keep a pipe open, so its words go to a file."""
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        except OSError as error:
            raise RemoteError(f"cannot run {argv[0]}: {error.strerror}") from error
        words.seek(0)
        return code, words.read().decode("utf-8", "replace")


def _agent() -> bytes:
    return resources.files("gangrun").joinpath("agent.py").read_bytes()


def _plain(python: str) -> str:
    if not all(c.isalnum() or c in "/._-+" for c in python):
        raise SpecError(f"python={python!r}: use the path of an interpreter, of letters, digits and / . _ - + only")
    return python


def _at(socket: str) -> list[str]:
    return ["-S", socket.replace("%", "%%")]


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _tail(text: str) -> str:
    """The last words of what a program said: what comes before may be a banner."""
    return " ".join(text.split())[-400:]
