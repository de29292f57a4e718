"""The group's host names for one rank's script: the node's /etc/hosts and the group's lines, in one file of its own.

Run by an executor that was given --hosts-file, and by nobody else. Without root, two means serve. A user and mount
namespace puts the file over /etc/hosts for the script alone, so that programs that read /etc/hosts themselves (Go,
static ones) see it; in it the user is who they were, but nothing gains rights by being setuid. libnss_wrapper serves
what asks the C library. When the group's file changes, what the running script sees changes too.
"""

from __future__ import annotations

import os
import select
import signal
import time

from executor.options import HOSTS_MEANS
from executor.output import tell
from executor.process import memory_file, spawn
from executor.protocol import GangrunError
from executor.shared import read_bytes, remove_quietly

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Callable


AUTO, REQUIRED, NAMESPACE, NSS_WRAPPER, NONE = HOSTS_MEANS
SYSTEM_HOSTS = "/etc/hosts"
LIBRARY = "libnss_wrapper.so"
LD_PRELOAD, NSS_WRAPPER_HOSTS = "LD_PRELOAD", "NSS_WRAPPER_HOSTS"
NSCD_SOCKET = "/var/run/nscd/socket"
PLACES = ("/dev/shm", "/tmp", "/var/tmp")
PROBE_PATIENCE_S = 5.0
REASON_BYTES = 4096
# unshare(2), mount(2)
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000


def means(hosts_file: str) -> str:
    """What works on this machine, best first: `namespace`, `nss_wrapper`, or `none`. Takes some milliseconds."""
    return _best(hosts_file)[0]


def choose(hosts_file: str, asked: str, say: Callable[[str], None]) -> Hosts | None:
    """The names by the means that was asked for, or None and one line that says why there are none.

    Raises GangrunError where the means, or any at all, is required and does not work.
    """
    if asked == NONE:
        return None
    found, reason = _best(hosts_file) if asked in (AUTO, REQUIRED) else (asked, _problem(hosts_file, asked))
    if found == NONE or reason:
        text = f"the group's host names do not resolve here: {reason}"
        if asked != AUTO:
            raise GangrunError(text)
        say(text + "; use the addresses instead")
        return None
    return Hosts(hosts_file, found, is_required=asked != AUTO)


def _best(hosts_file: str) -> tuple[str, str]:
    """(means, "") of the best that works, or (NONE, why not)."""
    reasons = []
    for candidate in (NAMESPACE, NSS_WRAPPER):
        reason = _problem(hosts_file, candidate)
        if not reason:
            return candidate, ""
        reasons.append(reason)
    return NONE, "; ".join(reasons)


def _problem(hosts_file: str, candidate: str) -> str:
    """Why a means does not work here; empty if it does."""
    hosts = Hosts(hosts_file, candidate, is_required=True)
    try:
        hosts.open()
        return hosts.problem()
    except OSError as error:
        return f"{candidate}: {error.strerror}"
    finally:
        hosts.close()


class Hosts:
    """The file that one script sees, and the way it comes to see it."""

    def __init__(self, hosts_file: str, means: str, is_required: bool = False) -> None:
        self.means = means
        self._source = hosts_file
        self._is_required = is_required
        self._names = b""
        self._size = 0
        self._path, self._fd = "", -1

    def open(self) -> None:
        """Make the file. Raises OSError."""
        self._path, self._fd = _named_file() if self.means == NAMESPACE else _unnamed_file()
        self._write()
        self.refresh()

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The script's environment with what the means needs in it."""
        if self.means != NSS_WRAPPER:
            return dict(environ)
        preload = ":".join(filter(None, (environ.get(LD_PRELOAD), LIBRARY)))
        return {**environ, LD_PRELOAD: preload, NSS_WRAPPER_HOSTS: self._path}

    @property
    def enter(self) -> Callable[[], None] | None:
        """What the new process does between fork(2) and exec(2), if anything. It raises OSError and nothing else."""
        if self.means != NAMESPACE:
            return None
        call = _libc()  # loaded here, once: a forked process had better not
        return lambda: self._enter(call)

    def refresh(self) -> None:
        """Bring news to the running script. A file system that fails, or a file that is gone, leaves it as it is."""
        try:
            names = read_bytes(self._source)
            if names and names != self._names:
                self._write(names)
                self._names = names
        except OSError:
            pass

    def problem(self) -> str:
        """Try it with a program that does nothing; why it does not work, or an empty text."""
        if self.means == NAMESPACE:
            said = _said_by(["true"], os.environ, self.enter)
            return said.rpartition("cannot start true: ")[2]
        # The loader's complaint goes to standard error; the program it starts does not mind.
        said = _said_by(["sh", "-c", f"grep -q {LIBRARY} /proc/self/maps || echo not loaded"], self.environ(os.environ))
        return said and f"{LIBRARY} is not installed"

    def close(self) -> None:
        if self._fd == -1:
            return
        if self.means == NAMESPACE:
            remove_quietly(self._path)
        os.close(self._fd)
        self._fd = -1

    def _write(self, names: bytes = b"") -> None:
        """One write over the old content, and its rest cut off after: a reader meets no half of a line."""
        content = _own_lines() + names
        os.pwrite(self._fd, content.ljust(self._size, b"\n"), 0)
        os.ftruncate(self._fd, len(content))
        self._size = len(content)

    def _enter(self, call: Callable[..., None]) -> None:
        try:
            self._cover(call)
        except OSError as error:
            if self._is_required:
                raise
            tell(2, f"gangrun: the group's host names do not resolve here: {error.strerror}\n")

    def _cover(self, call: Callable[..., None]) -> None:
        """Put our file over the system's, for this process and those it starts."""
        _new_namespace(call)
        call("mount", os.fsencode(self._path), SYSTEM_HOSTS.encode(), None, MS_BIND, None)
        remove_quietly(self._path)  # it lives on as /etc/hosts, and goes with the last process that sees it
        if os.path.exists(NSCD_SOCKET):  # the daemon would answer from the node's own file
            call("mount", b"/dev/null", NSCD_SOCKET.encode(), None, MS_BIND, None)


def _new_namespace(call: Callable[..., None]) -> None:
    """For root a mount namespace; for others in a user namespace in which they are who they were."""
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", CLONE_NEWNS)
        # As it is in a user namespace anyway: what the node mounts later is seen here, and what we mount is not there.
        return call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)
    except PermissionError:
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    # https://man7.org/linux/man-pages/man7/user_namespaces.7.html: setgroups(2) first, or gid_map may not be written
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        fd = os.open("/proc/self/" + name, os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def _libc() -> Callable[..., None]:
    """Calls a function of the C library that returns 0; OSError says which one did not."""
    try:
        import ctypes
    except ImportError as error:
        raise OSError(0, f"this Python has no ctypes ({error})") from error
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"{name}(2) is not allowed: {os.strerror(number)}")

    return call


def _own_lines() -> bytes:
    """The node's own /etc/hosts, with a newline at its end."""
    try:
        own = read_bytes(SYSTEM_HOSTS)
    except OSError:
        return b""
    return own if own.endswith(b"\n") or not own else own + b"\n"


def _named_file() -> tuple[str, int]:
    """A new file that can be mounted, in memory if possible."""
    for place in PLACES:
        path = "%s/gangrun-hosts-%d-%d" % (place, os.getpid(), time.monotonic_ns())
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            problem = OSError(error.errno, f"no file can be made in {place}: {error.strerror}")
            continue
        os.fchmod(fd, 0o644)  # as /etc/hosts is, whatever the umask
        return path, fd
    raise problem


def _unnamed_file() -> tuple[str, int]:
    fd = memory_file("hosts")
    return "/proc/%d/fd/%d" % (os.getpid(), fd), fd


def _said_by(argv: list[str], environ: Mapping[str, str], enter: Callable[[], None] | None = None) -> str:
    """What a short program printed; one that takes too long is ended."""
    read_end, write_end = os.pipe()
    try:
        pid = spawn(argv, environ, stdout=write_end, stderr=write_end, enter=enter)
        os.close(write_end)
        said = _read_to_end(read_end)
        if said is None:
            os.kill(pid, signal.SIGKILL)
        try:
            status = os.waitpid(pid, 0)[1]
        except ChildProcessError:  # somebody else has reaped it
            status = 0
    finally:
        os.close(read_end)
    if said is None:
        return f"no answer in {PROBE_PATIENCE_S:.0f} s"
    text = " ".join(said.decode("utf-8", "replace").split())
    return text or ("" if status == 0 else f"{argv[0]} failed")


def _read_to_end(fd: int) -> bytes | None:
    deadline = time.monotonic() + PROBE_PATIENCE_S
    said = b""
    while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(fd, REASON_BYTES)
        if not chunk:
            return said
        said = (said + chunk)[-REASON_BYTES:]
    return None
