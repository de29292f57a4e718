"""munged, slurmctld and slurmd: start, stop, and wait until they answer."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Callable

from tests.minislurm.errors import BedError, tail
from tests.minislurm.jobs import parse_nodes
from tests.minislurm.options import CONTROLLER, SWITCH
from tests.minislurm.preflight import program
from tests.minislurm.proc import Pid, end_all, processes_of
from tests.minislurm.room import Room

POLL_S = 0.02
LOOK_S = 2.0  # how often to look whether what we wait for still lives


class Daemons:
    """The daemons of one cluster, in its machine room."""

    def __init__(self, room: Room) -> None:
        self.room, self.layout = room, room.layout

    def start_munged(self) -> None:
        """munged as root, on a socket of our own; it lives in the switch, whose files all nodes share."""
        folder, key = self.layout.munge, self.layout.munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        self.start(SWITCH, "munged", "--force", f"--socket={self.layout.munge_socket}", *files)

    def start_slurmctld(self) -> None:
        """Returns when the daemon has gone to the background; state of an earlier life is kept."""
        self.start(CONTROLLER, "slurmctld", "-f", str(self.layout.slurm_conf))

    def start_slurmd(self, nodes: Sequence[str]) -> None:
        """Side by side on all nodes."""
        for node in nodes:
            self.layout.spool(node).mkdir(parents=True, exist_ok=True)
        starting = [(node, self._spawn(node, "slurmd", "-f", str(self.layout.slurm_conf))) for node in nodes]
        for node, process in starting:
            self._finish(node, "slurmd", process)

    def start(self, node: str, name: str, *args: str) -> None:
        """Returns when the daemon has gone to the background."""
        self._finish(node, name, self._spawn(node, name, *args))

    def _spawn(self, node: str, name: str, *args: str) -> subprocess.Popen[str]:
        path = program(name, self.room.options.rootfs) or name
        prefix = self.room.cgroups.enter(node) if name == "slurmd" else []
        io: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.layout.log(f"{name}-{node}.start"), "w") as log:
            return self.room.popen(node, [path, *args], cwd="/", prefix=prefix, stdout=log, **io)

    def _finish(self, node: str, name: str, process: subprocess.Popen[str]) -> None:
        if code := process.wait():
            said = tail(self.layout.log(f"{name}-{node}.start"))
            raise BedError(f"{name} on {node} ended with code {code}:\n{said}\n{self.log_tail(node, name)}")

    def log_tail(self, node: str, daemon: str) -> str:
        name = daemon if node == CONTROLLER else f"{daemon}-{node}"
        return f"end of {self.layout.log(name)}:\n{tail(self.layout.log(name))}"

    def _pids(self, node: str, name: str) -> list[Pid]:
        found = processes_of(self.room.init(node))
        ours = [p.pid for p in found if os.path.basename(p.cmdline.split()[0]) == name]
        return [pid for one in ours if (pid := Pid.of(one))]

    def stop(self, node: str, name: str, signum: int = signal.SIGTERM, timeout_s: float = 10) -> None:
        """Stop a daemon and wait until it is dead; KILL if it does not obey."""
        end_all(self._pids(node, name), signum, timeout_s)

    def wait_idle(self, nodes: Sequence[str], timeout_s: float) -> None:
        """Until Slurm calls every one of the nodes idle. Gives up when a daemon it waits for is dead."""
        deadline = time.monotonic() + timeout_s
        look = time.monotonic() + LOOK_S
        while busy := self._not_idle(nodes, timeout_s):
            time.sleep(POLL_S)
            if time.monotonic() > look:
                self._check_alive(CONTROLLER, "slurmctld")
                self._check_alive(busy[0], "slurmd")
                look += LOOK_S
            if time.monotonic() > deadline:
                logs = self.log_tail(CONTROLLER, "slurmctld") + "\n" + self.log_tail(busy[0], "slurmd")
                raise BedError(f"not idle after {timeout_s} s: {', '.join(busy)}\n{logs}")

    def node_states(self) -> dict[str, str]:
        """Slurm's word for every node; empty if there is no controller to ask."""
        up = self.room.is_on(CONTROLLER) and self._pids(CONTROLLER, "slurmctld")
        return self._sinfo(timeout_s=10) if up else {}

    def _not_idle(self, nodes: Sequence[str], timeout_s: float) -> list[str]:
        states = self._sinfo(timeout_s)
        return [node for node in nodes if states.get(node) != "idle"]

    def _sinfo(self, timeout_s: float) -> dict[str, str]:
        argv = ["sinfo", "-h", "-N", "-o", "%N %T"]
        return parse_nodes(self.room.run(CONTROLLER, argv, check=False, cwd="/", timeout_s=timeout_s).stdout)

    def wait(self, name: str, ready: Callable[[], bool], timeout_s: float = 30) -> None:
        """Until a daemon on `ctl` is ready for work."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                raise BedError(f"{name} is not ready after {timeout_s} s\n{self.log_tail(CONTROLLER, name)}")
            time.sleep(POLL_S)

    def _check_alive(self, node: str, name: str) -> None:
        if not self._pids(node, name):
            raise BedError(f"{name} on {node} does not run\n{self.log_tail(node, name)}")
