"""What a rank of a task with `ray` runs in the script's place: its part of a Ray cluster, and on rank 0 the script.

It starts Ray, waits until every node has joined, runs the script once, and ends Ray with it. It is the parent of all
that Ray starts (prctl(2), subreaper), so it sees a raylet die, and nothing of Ray outlives it. `ray stop` is not used:
it ends every Ray of this user on the node, other jobs' too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time

from executor import memory, protocol
from executor.gang import Patience, poll_interval_s
from executor.lazyshell import shell_functions
from executor.loop import STOP_SIGNALS, WARNINGS, Arrival, Loop, Timer
from executor.output import tell, write_all
from executor.process import adopt_orphans, children, end_descendants, exit_code, memory_file, reap, spawn
from executor.protocol import GangrunError
from executor.ray_room import START_OUTPUT
from executor.shared import SignalFile, read_bytes, read_record, read_text, write_record

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable, NoReturn

START_TIMEOUT_S = 300.0  # a cold import of Ray from a busy file server takes minutes
# Ray itself gives a raylet 30 s and its agents 15 s to start: what has failed so late may have been slow, not wrong.
SLOW_START_S = 12.0
JOIN_TIMEOUT_S = START_TIMEOUT_S + 60
LOOK_S, PAUSE_S = 0.5, 0.05
LAST_WORDS = 20
RAYLET_PATIENCE_S = 3.0
KILL_PATIENCE_S = 5.0
MOST_NAMED = 5
ADDRESS_FILE = "ray_current_cluster"
RAYLET, GCS = "raylet", "gcs_server"
ESSENTIAL = (RAYLET, GCS)
OBJECT_STORE_SHARE = 0.3  # of the memory, as Ray's own default is
SHARED_MEMORY, SHARED_MEMORY_SHARE = "/dev/shm", 0.95
HEAD_ONLY = ("--include-dashboard", "--redis-shard-ports")  # an error on other nodes
ADDRESS, USAGE = "RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED"
AUTH_MODE, AUTH_TOKEN, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "token"


class Broken(Exception):
    """Ray does not run here, or no more; the text says why."""


class Stopped(Exception):
    """Somebody told this rank to stop."""


class RayNode:
    """One node's part of the cluster, from its start to its end. One method per phase."""

    def __init__(self, description: Mapping[str, Any], script: bytes) -> None:
        self._rank, self._num_ranks = int(description["rank"]), int(description["num_ranks"])
        self._description, self._script = description, script
        self._launch = protocol.Launch(description["launch_dir"])
        self._signal = SignalFile(self._launch.ray)
        self._parent = os.getppid()
        self._codes: dict[int, int] = {}  # of `ray start` and of the script, when they have ended
        self._essential: dict[int, str] = {}
        self._lost = ""
        self._stopped_by = 0
        self._look: Timer | None = None
        self._patience = Patience()
        self._environ = _environ()
        for number in WARNINGS:  # the script's: they reach its process group, which is ours
            signal.signal(number, signal.SIG_IGN)
        self._loop = Loop(self._on_signal)
        self._loop.take_signals()

    def run(self) -> int:
        """The exit code: the script's on rank 0, 0 on the others; 125 where Ray failed."""
        code = protocol.EXIT_INFRASTRUCTURE
        try:
            if not adopt_orphans():
                raise Broken("prctl(2) does not work with this Python: it needs ctypes")
            self._start()
            self._say({"state": protocol.RANK_RUNNING})
            code = self._lead() if self._rank == 0 else self._follow()
        except Stopped:
            code = protocol.exit_code_of_signal(self._stopped_by)
        except (Broken, GangrunError, OSError) as error:
            self._complain(" ".join(str(error).split()))
        finally:
            self._end_ray(code)
        return code

    # --- the start

    def _start(self) -> None:
        """Start Ray here and see it run. Raises Broken with the words of `ray start`."""
        program = _ray_program(self._environ.get("PATH", ""), str(self._description["host"]))
        if self._rank == 0:
            self._environ = _with_token(self._environ, os.urandom(16).hex())
            place = ["--head", "--port=0", *_head_options(str(self._description["address"]))]
        else:
            address, token = self._wait_until(self._heads_word)
            self._environ = _with_token({**self._environ, ADDRESS: address}, token)
            place = ["--address=" + address]
        self._run_start([program, "start", *place, *self._options()])
        if self._rank == 0:
            address = read_text(os.path.join(self._description["room"], ADDRESS_FILE)) or ""
            if not address:
                raise Broken(f"`ray start` has left no {ADDRESS_FILE} in its --temp-dir: is this Ray older than 2.9?")
            self._environ[ADDRESS] = address
            self._signal.fire(protocol.GO, "{} {}".format(address, self._environ.get(AUTH_TOKEN, "")))

    def _options(self) -> list[str]:
        given = own_options(self._description["start_args"], is_head=self._rank == 0)
        ours = [
            "--node-ip-address=" + self._description["address"],
            "--temp-dir=" + self._description["room"],
            "--min-worker-port=0",  # any that is free; an older Ray has a range that two jobs would share
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--log-style=record",
            "--log-color=false",
            *_memory_options(),
        ]
        names = {option.partition("=")[0] for option in given}
        return [*(option for option in ours if option.partition("=")[0] not in names), *given]

    def _run_start(self, argv: Sequence[str]) -> None:
        begun = time.monotonic()
        try:
            self._try_start(argv, begun + START_TIMEOUT_S)
        except Broken as failure:
            if self._lost or not SLOW_START_S < time.monotonic() - begun < START_TIMEOUT_S:
                raise
            tell(1, f"gangrun: {failure}; trying once more\n")
            end_descendants(KILL_PATIENCE_S)
            self._clear_room()
            self._try_start(argv, begun + START_TIMEOUT_S)

    def _clear_room(self) -> None:
        with os.scandir(self._description["room"]) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name != protocol.LOCK_NAME:
                    os.unlink(entry.path)

    def _try_start(self, argv: Sequence[str], late: float) -> None:
        output = os.path.join(self._description["room"], START_OUTPUT)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        environ = {name: value for name, value in self._environ.items() if name != ADDRESS}
        pid = spawn(list(argv), environ, stdout=fd, stderr=fd)
        os.close(fd)

        def look() -> bool | None:
            if pid in self._codes:
                return True
            if time.monotonic() > late:
                raise Broken(f"`ray start` has not ended within {START_TIMEOUT_S:.0f} s: {_essence(output)}")
            return None

        self._wait_until(look)
        if self._codes[pid] != 0:
            tell(1, _last_lines(output))
            raise Broken(f"`ray start` ended with {protocol.describe_code(self._codes[pid])}: {_essence(output)}")
        names = {child: (read_text(f"/proc/{child}/comm") or "").strip() for child in children()}
        self._essential = {child: name for child, name in names.items() if name in ESSENTIAL}
        if RAYLET not in self._essential.values():
            raise Broken("`ray start` ended well, but no raylet runs: " + _essence(output))

    def _heads_word(self) -> tuple[str, str] | None:
        said = self._patience.ask(self._signal.read)
        if said is None or said[0] != protocol.GO:
            return None
        address, _, token = said[1].partition(" ")
        return address, token

    # --- the run

    def _lead(self) -> int:
        """On rank 0: wait for all, run the script; returns its code."""
        self._wait_for_all()
        nodes = "node" if self._num_ranks == 1 else "nodes"
        tell(1, f"gangrun: Ray runs on {self._num_ranks} {nodes}, {ADDRESS}={self._environ[ADDRESS]}\n")
        pid = self._spawn_script()
        self._wait_for(lambda: self._codes.get(pid), heeds_stop=False)
        if self._lost and pid not in self._codes:
            self._signal.fire(protocol.GANG_DONE, str(protocol.EXIT_INFRASTRUCTURE))
            self._end_script(pid)
            raise Broken(self._lost)
        return self._codes[pid]

    def _wait_for_all(self) -> None:
        late = time.monotonic() + JOIN_TIMEOUT_S
        missing = list(range(1, self._num_ranks))

        def look() -> bool | None:
            while missing and self._has_joined(missing[-1]):
                missing.pop()
            if time.monotonic() > late:
                named = ", ".join(str(rank) for rank in sorted(missing)[:MOST_NAMED])
                raise Broken(f"{len(missing)} of {self._num_ranks} nodes have not joined Ray in time: ranks {named}")
            return None if missing else True

        self._wait_until(look)

    def _has_joined(self, rank: int) -> bool:
        record = self._patience.ask(lambda: read_record(self._launch.ray_record(rank)))
        return bool(record) and record.get("state") == protocol.RANK_RUNNING

    def _spawn_script(self) -> int:
        environ = {**shell_functions(self._script, self._environ), **self._environ}
        file = memory_file("script")
        write_all(file, self._script)
        words = ["bash", *self._description["bash_options"], "/proc/%d/fd/%d" % (os.getpid(), file)]
        return spawn(words, environ, is_apart=False)

    def _follow(self) -> int:
        """On the other ranks: until the script has ended; it needs this node while it saves what it has."""
        self._wait_for(self._is_done, heeds_stop=False)
        if self._lost and not self._is_done():
            raise Broken(self._lost)
        if self._stopped_by:
            raise Stopped
        return 0

    def _is_done(self) -> bool | None:
        said = self._patience.ask(self._signal.read)
        return True if said is not None and said[0] == protocol.GANG_DONE else None

    # --- waiting

    def _wait_until(self, look: Callable[[], Any]) -> Any:
        """The first answer that is not None. Raises Stopped, and Broken if Ray has died meanwhile."""
        answer = self._wait_for(look, heeds_stop=True)
        if self._lost:
            raise Broken(self._lost)
        if answer is None:
            raise Stopped
        return answer

    def _wait_for(self, look: Callable[[], Any], heeds_stop: bool) -> Any:
        """The first answer that is not None; None if Ray has died, or if this rank was told to stop and heeds it."""

        def poll() -> None:
            if os.getppid() != self._parent:
                self._lost = self._lost or "the rank's own process is gone"
            answer = None if self._lost else look()
            if answer is not None or self._lost or (self._stopped_by and heeds_stop):
                self._loop.stop(answer)

        timer = self._look = self._loop.every(
            protocol.POLL_FIRST_S, max(LOOK_S, poll_interval_s(self._num_ranks)), poll
        )
        timer.due = 0.0
        try:
            return self._loop.run()
        finally:
            self._look = None
            self._loop.cancel(timer)

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number == signal.SIGCHLD:
            self._on_child_end()
        elif arrival.number in STOP_SIGNALS:
            self._stopped_by = self._stopped_by or arrival.number
        if self._look is not None:
            self._look.due = 0.0

    def _on_child_end(self) -> None:
        for pid, status in reap():
            name = self._essential.pop(pid, None)
            if name is None:
                self._codes[pid] = exit_code(status)
            else:
                self._lost = self._lost or self._end_of(name, exit_code(status))

    def _end_of(self, name: str, code: int) -> str:
        asked = " (somebody ran `ray stop`)" if code == 0 else ""
        where = "{} ({})".format(self._description["node"], self._description["host"])
        return f"Ray has ended on {where}: {name}, {protocol.describe_code(code)}{asked}"

    # --- the end

    def _end_script(self, pid: int) -> None:
        """TERM to its group, which is ours; its grace; the rank ends what is left."""
        tell(1, f"gangrun: {self._lost}; ending the script\n")
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + float(self._description["grace_s"])
        while pid not in self._codes and time.monotonic() < deadline:
            self._loop.run_for(PAUSE_S)

    def _end_ray(self, code: int) -> None:
        """A raylet is asked, as it ends its workers; all else is killed."""
        if self._rank == 0:
            self._quietly(lambda: self._signal.fire(protocol.GANG_DONE, str(code)))
        raylets = [pid for pid, name in self._essential.items() if name == RAYLET]
        for pid in raylets:
            os.kill(pid, signal.SIGTERM)  # not reaped yet: it is there
        deadline = time.monotonic() + RAYLET_PATIENCE_S
        while set(raylets) & set(self._essential) and time.monotonic() < deadline:
            self._loop.run_for(PAUSE_S)
        end_descendants(KILL_PATIENCE_S)

    def _complain(self, why: str) -> None:
        tell(1, f"gangrun: {why}\n")
        self._say({"state": protocol.RANK_BROKEN, "why": why[:300]})

    def _say(self, record: dict[str, Any]) -> None:
        self._quietly(lambda: write_record(self._launch.ray_record(self._rank), record))

    def _quietly(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError:
            pass


def own_options(start_args: Sequence[str], is_head: bool) -> list[str]:
    """Those of the task's options that `ray start` takes here."""
    return [option for option in start_args if is_head or option.partition("=")[0] not in HEAD_ONLY]


def _environ() -> dict[str, str]:
    environ = {USAGE: "0", **os.environ}
    environ.pop(ADDRESS, None)  # of a cluster around this one
    return environ


def _with_token(environ: Mapping[str, str], token: str) -> dict[str, str]:
    """Who reaches Ray's ports can run code as this user: let them need the job's own token, where Ray knows tokens."""
    if not token or environ.get(AUTH_MODE, TOKEN) != TOKEN or AUTH_TOKEN in environ:
        return dict(environ)
    return {**environ, AUTH_MODE: TOKEN, AUTH_TOKEN: token}


def _ray_program(path: str, host: str) -> str:
    """`ray` as a shell would find it, else that of this Python. Raises Broken."""
    for directory in (*path.split(os.pathsep), os.path.dirname(sys.executable)):
        candidate = os.path.join(directory, "ray")
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    raise Broken(
        f"no program `ray` in PATH on {host}: pip install 'ray[default]' in the environment of the script, and name "
        "that in the task as resources: {ray: {activate: source ~/venv/bin/activate}}"
    )


def _head_options(address: str) -> list[str]:
    ports = _free_ports(address, 2)
    return [
        "--include-dashboard=false",
        "--ray-client-server-port=%d" % ports[0],
        "--dashboard-port=%d" % ports[1],
    ]


def _free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody has now; all else in Ray takes port 0 and tells what it got."""
    import _socket as socket

    sockets = [socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) for _ in range(count)]
    try:
        for one in sockets:
            one.bind((address, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _memory_options() -> list[str]:
    """What the job may use, where Slurm limits it; Ray by itself takes its shares of the whole machine."""
    limit = memory.limit_bytes()
    if limit is None:
        return []
    shared = os.statvfs(SHARED_MEMORY)
    store = int(min(limit * OBJECT_STORE_SHARE, shared.f_bavail * shared.f_frsize * SHARED_MEMORY_SHARE))
    return ["--object-store-memory=%d" % store, "--memory=%d" % (limit - store)]


def _essence(output: str) -> str:
    """The error of a Python program among its words: the last line that no blank begins, and what follows it."""
    lines = _text(output).splitlines()
    first = next((n for n in range(len(lines) - 1, -1, -1) if _is_error(lines[n])), max(0, len(lines) - 1))
    return " ".join(" ".join(lines[first:]).split()) or "it said nothing"


def _is_error(line: str) -> bool:
    name, colon, _ = line.partition(":")
    return bool(colon) and name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception"))


def _last_lines(output: str) -> str:
    return "\n".join(_text(output).splitlines()[-LAST_WORDS:]) + "\n"


def _text(path: str) -> str:
    try:
        return read_text(path) or ""
    except OSError:
        return ""


def main() -> int:
    description = json.loads(sys.argv[1])
    size = int(description["script_bytes"])
    script = read_bytes(sys.argv[2])[-size:] if size else b""
    return RayNode(description, script).run()


def run_as_program() -> NoReturn:
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_as_program()
