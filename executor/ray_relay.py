"""The Ray actor of one node: starts the executor's rank process there, and passes on what it says.

Ray carries this class to the nodes by value: nothing of ours is installed there. So it is a relay and no more; whatever
a rank means is in the archive that it starts. The rank is nobody's child and in a session of its own, since Ray ends a
worker and its children with KILL; it learns from its standard input that the relay is gone, and ends the script well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from executor.interfaces import addresses as own_addresses
from executor.protocol import EXIT_INFRASTRUCTURE, RANK_BROKEN, RAY_RANK, python_arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Said = tuple[str, Any]

CHUNK_BYTES = 64 << 10  # below 100 KB, what Ray sends with its answer and keeps out of the object store
OUTPUT, WORDS, RECORD, LOST = "output", "words", "record", "lost"
SCRIPT_PID = "script_pid"
# What Ray tells its worker; a script with these would take itself for one.
OF_THE_WORKER = (
    "RAY_RAYLET_PID RAY_JOB_ID RAY_CLIENT_MODE RAY_LD_PRELOAD_ON_WORKERS RAY_JOB_CONFIG_JSON_ENV_VAR SPT_NOENV "
    "PYTHONBREAKPOINT"
).split()
RAYLET = "RAY_RAYLET_PID"
THREADS = "OMP_NUM_THREADS"  # Ray sets it to the number of CPUs it was asked for
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class Relay:
    """One node's end of the gang: `run` streams (kind, content), `signal` passes a signal on meanwhile."""

    def __init__(self, archive: bytes | None) -> None:
        self._archive = archive
        self._lock = threading.Lock()
        self._orders: int | None = None
        self._early: list[bytes] = []

    def addresses(self) -> list[str]:
        """All of this node, and its names."""
        return [*own_addresses(), socket.gethostname(), socket.getfqdn()]

    def signal(self, number: int) -> None:
        """Pass a signal on to the rank; one that comes before it starts is kept for it."""
        order = b"%d\n" % number
        with self._lock:
            if self._orders is None:
                self._early.append(order)
                return
            try:
                os.write(self._orders, order)
            except OSError:
                pass  # it has ended

    def run(self, description: dict[str, Any]) -> Iterator[Said]:
        """Run one script; the last record tells how it ended. Ends when rank and script have."""
        here = _node_id()
        if here != description["node_id"]:
            yield LOST, f"Ray moved this rank's bundle from node {description['node_id']} to {here}"
            return
        try:
            pipes = self._start(description)
        except OSError as error:
            why = f"cannot start {_python(description)}: {error.strerror}"
            yield RECORD, {"state": RANK_BROKEN, "code": EXIT_INFRASTRUCTURE, "why": why, "ended": time.time()}
            return
        script, has_ended = 0, False
        for kind, content in _said(pipes):
            if kind == RECORD:
                script = content.get(SCRIPT_PID) or script
                has_ended = content.get("code") is not None
            yield kind, content
        with self._lock:
            os.close(self._orders or 0)
            self._orders = None
        if not has_ended:
            _end_group(script)
            yield LOST, "the rank's process was killed"

    def _start(self, description: dict[str, Any]) -> dict[int, str]:
        """Start the rank; returns the pipes it speaks through."""
        (out, out_end), (err, err_end), (records, records_end), (orders_end, orders) = (os.pipe() for _ in range(4))
        program = self._program()
        told = {**description["rank"], "records": records_end, "niceness": _niceness(os.environ.get(RAYLET, ""))}
        fds = [records_end] if program is None else [records_end, program]
        archive = None if program is None else f"/proc/self/fd/{program}"
        try:
            process = subprocess.Popen(
                [_python(description), *python_arguments(archive, RAY_RANK)],
                stdin=orders_end, stdout=out_end, stderr=err_end, pass_fds=fds, start_new_session=True,
                env=_environment(description), cwd=_directory(description),
            )  # fmt: skip
        finally:
            for fd in (orders_end, out_end, err_end, *fds):
                os.close(fd)
        with self._lock:  # an order must not overtake the description
            _write_all(orders, json.dumps(told).encode() + b"\n")
            for order in self._early:
                os.write(orders, order)
            self._early, self._orders = [], orders
        process.wait()  # it has let its child go
        return {out: OUTPUT, err: WORDS, records: RECORD}

    def _program(self) -> int | None:
        """The archive in memory: no file to leave behind on the node."""
        if self._archive is None:
            return None
        fd = os.memfd_create("gangrun")
        _write_all(fd, self._archive)
        return fd


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _python(description: dict[str, Any]) -> str:
    return description["python"] or sys.executable


def _environment(description: dict[str, Any]) -> dict[str, str]:
    """The worker's, as if Ray had not made it a worker."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_THE_WORKER}
    if THREADS not in _environ_of(os.environ.get(RAYLET, "")):
        kept.pop(THREADS, None)
    if description["sees_all_gpus"]:
        kept.pop(VISIBLE_GPUS, None)
    elif not description["has_gpus"]:  # Ray leaves it to such a worker to take what is others'
        kept[VISIBLE_GPUS] = ""
    return {**kept, "PWD": _directory(description) or os.getcwd()}


def _niceness(pid: str) -> int:
    """Ray's own: its workers are at 15, which is not meant for a script that has the node to itself."""
    return os.getpriority(os.PRIO_PROCESS, int(pid)) if pid.isdigit() else 0


def _environ_of(pid: str) -> set[str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return {os.fsdecode(entry.partition(b"=")[0]) for entry in file.read().split(b"\0")}
    except OSError:
        return set()


def _directory(description: dict[str, Any]) -> str | None:
    """Where the script starts: the driver's directory if it is there; a Ray job's own comes with its worker."""
    wanted = description["directory"]
    return next((path for path in (wanted, os.path.expanduser("~")) if os.path.isdir(path)), None) if wanted else None


def _said(pipes: dict[int, str]) -> Iterator[Said]:
    """What comes through the pipes until all are closed: output in whole lines, records one by one."""
    poll, held = select.poll(), dict.fromkeys(pipes, b"")
    for fd in pipes:
        poll.register(fd, select.POLLIN)
    while held:
        for fd, _ in poll.poll():
            chunk = os.read(fd, CHUNK_BYTES)
            data = held[fd] + chunk
            is_last = not chunk and pipes[fd] != RECORD  # half a record is none: its rank was killed
            cut = len(data) if is_last else data.rfind(b"\n") + 1
            held[fd] = data[cut:]
            if pipes[fd] == RECORD:
                for line in data[:cut].splitlines():
                    yield RECORD, json.loads(line)
            elif cut:
                yield pipes[fd], data[:cut]
            if not chunk:
                poll.unregister(fd)
                os.close(fd)
                del held[fd]


def _end_group(pid: int) -> None:
    """A rank that was killed could not end its script."""
    try:
        if pid:
            os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
