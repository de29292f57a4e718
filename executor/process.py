"""Starts the user's script in a session of its own, signals it, and sees to it that nothing of it stays."""

from __future__ import annotations

import os
import signal
import time

from executor import protocol
from executor.lazyshell import shell_functions
from executor.output import enlarge, write_all
from executor.protocol import GangrunError, UsageError
from executor.shared import read_bytes

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Callable

    from executor.hostnames import Hosts


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
BOM = b"\xef\xbb\xbf"
SHELLS = ("bash", "sh")
NO_MORE = 0
INHERITED_SCRIPT = 200  # its descriptor; a script's own are small numbers, and bash keeps 255 for itself
# By Python; and by a rank's Ray, which leaves these to the script.
NOT_TO_INHERIT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1, signal.SIGUSR2)


def exit_code(wait_status: int) -> int:
    """As a shell tells it: the process's own code, or 128 + the signal's number."""
    if os.WIFSIGNALED(wait_status):
        return protocol.exit_code_of_signal(os.WTERMSIG(wait_status))
    return os.WEXITSTATUS(wait_status)


def read_script(path: str) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UsageError(f"--script-path={path}: {error.strerror}") from error


def prepared(script: bytes) -> tuple[list[str], bytes]:
    """bash's options and the text it runs. Raises UsageError for a script that is not for a shell."""
    script = script[len(BOM) :] if script.startswith(BOM) else script
    if b"\r\n" in script:
        script = script.replace(b"\r\n", b"\n")  # bash would take the \r for a part of each last word
    if b"\0" in script:
        raise UsageError("the script holds NUL bytes: it is a program, not a bash script; call it from one")
    first = script.split(b"\n", 1)[0]
    return (_shebang_options(os.fsdecode(first)) if first.startswith(b"#!") else []), script


def _shebang_options(line: str) -> list[str]:
    words = line[2:].split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
    if not words or os.path.basename(words[0]) not in SHELLS:
        raise UsageError(
            f"the script begins with {line!r}, but scripts run under bash: call the program from a bash script"
        )
    if any("s" in word or "c" in word for word in words[1:] if word[:1] == "-" and word[:2] != "--"):
        raise UsageError(f"the script begins with {line!r}: bash would not read the script with -c or -s")
    return words[1:]


def spawn(
    argv: list[str],
    environ: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    enter: Callable[[], None] | None = None,
    is_apart: bool = True,
) -> int:
    """Start a program, in a session of its own if it `is_apart`, with no input and no signal blocked; returns its pid.

    `enter` is called in the new process before the program: only fork(2) leaves room for that.
    """
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]  # type: ignore[list-item]
    actions += [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in ((1, stdout), (2, stderr)) if fd is not None]
    variables = {_bytes(name): _bytes(value) for name, value in environ.items()}
    if enter is not None:
        return _fork(argv, variables, stdout, stderr, enter, is_apart)
    how = {"file_actions": actions, "setsid": is_apart, "setsigmask": [], "setsigdef": NOT_TO_INHERIT}
    try:
        return os.posix_spawnp(argv[0], argv, variables, **how)  # type: ignore[arg-type]
    except NotImplementedError:  # a Python built against an old glibc, as conda's is
        return _fork(argv, variables, stdout, stderr, None, is_apart)
    except OSError as error:
        raise GangrunError(f"cannot start {argv[0]}: {error.strerror}") from error


def _fork(
    argv: list[str],
    variables: Mapping[bytes, bytes],
    stdout: int | None,
    stderr: int | None,
    enter: Callable[[], None] | None,
    is_apart: bool,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if is_apart:
            os.setsid()
        for number in NOT_TO_INHERIT:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
            if fd is not None:
                os.dup2(fd, target)
        if enter is not None:
            enter()
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        os.write(2, f"gangrun: cannot start {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(protocol.EXIT_INFRASTRUCTURE)


def _bytes(text: str) -> bytes:
    """What came from our own environment as it was; what a locale that is not UTF-8 cannot say, in UTF-8."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")


class Script:
    """A running script. Its output comes through `pipe`, standard output and error in their order."""

    def __init__(self, text: bytes, environ: dict[str, str], hosts: Hosts | None = None) -> None:
        options, body = prepared(text)
        environ = {**shell_functions(body, environ), **environ}
        environ = environ if hosts is None else hosts.environ(environ)
        # The script lives in memory: no file to leave behind, no full disk, nothing to edit under bash's feet.
        self._memory = memory_file("script")
        write_all(self._memory, body)
        self.pipe, write_end = os.pipe()
        os.set_blocking(self.pipe, False)
        enlarge(self.pipe)
        enter = None if hosts is None or hosts.enter is None else self._entering(hosts.enter)
        script = (
            "/proc/%d/fd/%d" % (os.getpid(), self._memory) if enter is None else f"/proc/self/fd/{INHERITED_SCRIPT}"
        )
        try:
            self.pid = spawn(["bash", *options, script], environ, stdout=write_end, stderr=write_end, enter=enter)
        finally:
            os.close(write_end)

    def _entering(self, enter: Callable[[], None]) -> Callable[[], None]:
        """A process in a user namespace of its own may not open what is in ours: it inherits the script."""

        def inherit_and_enter() -> None:
            os.dup2(os.open("/proc/self/fd/%d" % self._memory, os.O_RDONLY | os.O_CLOEXEC), INHERITED_SCRIPT)
            enter()

        return inherit_and_enter

    def send(self, number: int) -> None:
        """Signal every process of the script's group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def pass_on(self, number: int) -> bool:
        """Signal those of the script's group that have a use for it; False while there is none. bash dies of a USR1
        that it does not trap, and with it the program that it runs (martius-lab/cluster_utils#64)."""
        takers = [pid for pid in _group(self.pid) if _handles(pid, number)]
        for pid in takers:
            try:
                os.kill(pid, number)
            except OSError:
                pass
        return bool(takers)

    @property
    def group_is_gone(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def _group(leader: int) -> list[int]:
    """The processes of a process group."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _read("/proc/%s/stat" % name).rpartition(b")")[2].split()
            if len(fields) > 2 and int(fields[2]) == leader:
                found.append(int(name))
    return found


def _handles(pid: int, number: int) -> bool:
    """Whether a process catches a signal, or blocks it to take it from sigwait(3); see proc(5), SigCgt and SigBlk."""
    for line in _read("/proc/%d/status" % pid).splitlines():
        name, _, mask = line.partition(b":")
        if name in (b"SigCgt", b"SigBlk") and int(mask, 16) >> (number - 1) & 1:
            return True
    return False


def _read(path: str) -> bytes:
    try:
        return read_bytes(path)
    except OSError:
        return b""


def reap() -> list[tuple[int, int]]:
    """(pid, wait status) of every child that has ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == NO_MORE:
            return ended
        ended.append((pid, status))


def adopt_orphans() -> bool:
    """Become the parent of what the script leaves behind (prctl(2)), so that it can be ended with it."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> bool:
    """Be told by TERM when the parent ends (prctl(2)): a local launcher that was killed leaves nothing running."""
    return _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, argument: int) -> bool:
    try:
        import _ctypes  # `ctypes` on top of it costs every node 3 to 13 ms

        function = _ctypes.dlsym(_ctypes.dlopen("", os.RTLD_NOW), "prctl")
        return bool(_ctypes.call_function(function, (option, argument, 0, 0, 0)) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def end_descendants(patience_s: float = 1.0) -> None:
    """KILL what is left. Any process left in a step's cgroup costs srun a second at its end (measured)."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        left = children()
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.001)
        reap()


def children() -> list[int]:
    try:
        with open("/proc/self/task/%d/children" % os.getpid(), "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except (OSError, ValueError):
        return []


def memory_file(name: str) -> int:
    """A file without a name: in memory, or where a Python built against an old glibc cannot have that, in tmpfs."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    for directory in ("/dev/shm", "/tmp"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
    raise GangrunError(f"no place for the {name}: neither memfd_create(2) nor O_TMPFILE works here")
