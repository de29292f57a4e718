"""A real Ray cluster on this one machine: the object tests and people hold."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from tests.minislurm import config, leftovers, preflight
from tests.minislurm.cgroups import NO_CGROUPS
from tests.minislurm.errors import BadInput, BedError, tail
from tests.minislurm.layout import Layout
from tests.minislurm.options import CONTROLLER, SWITCH, Options
from tests.minislurm.proc import NodeProcess, Pid, end_all, processes_of
from tests.minislurm.room import Arg, NodePopen, Room

HEAD = "n1"
PORT = 6379
DASHBOARD_PORT = 8265
# Ray's own default: only there does address="auto" look without being told. Every node has its own.
TEMP_DIRECTORY = Path("/tmp/ray")
STORE_BYTES = 80_000_000  # Ray takes no less than 75 MiB
SHM_MB = 256
BOOT_TIMEOUT_S = 120.0
POLL_S = 0.1
# two cores: no worker starts before it is wanted, and a dead node is known dead soon
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",
}
ALIVE = """
import json, sys
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
state, where = GlobalState(), sys.argv[1]
if hasattr(GcsClientOptions, "create"):
    options = GcsClientOptions.create(where, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
else:  # Ray 2.9
    options = GcsClientOptions.from_gcs_address(where)
state._initialize_global_state(options)
print(json.dumps(sorted(node["NodeManagerAddress"] for node in state.node_table() if node["Alive"])))
"""


def missing() -> str | None:
    """Why no Ray cluster can be booted here, as one line; None if it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: make ray (or pip install 'ray[default]')"
    return preflight.missing(slurm=False)


class RayBed:
    """Nodes `n1`..`nN`, each a namespace with its own address, pids, /dev/shm and /tmp/ray; the first is Ray's head.
    The file system is shared, except for `private_dirs`."""

    def __init__(self, layout: Layout, record: dict[str, Any]) -> None:
        self.layout = layout
        self._record = record
        self.options = Options.from_json(record["options"])
        self._room = Room(self.options, layout, NO_CGROUPS)

    # -- life

    @classmethod
    def boot(
        cls,
        root: Arg,
        nodes: int = 3,
        *,
        cpus: int = 4,
        gpus: int = 0,
        dashboard: bool = False,
        only: int | None = None,
        private_dirs: Sequence[str] = (),
        resources: dict[str, dict[str, float]] | None = None,
    ) -> RayBed:
        """Boot a cluster in the folder `root`; returns when all its nodes are alive. `only` of the nodes join at
        first, the rest by `join`. `resources` are custom ones by node."""
        options = Options(
            nodes=nodes, cpus=cpus, gpus=gpus, shm_mb=SHM_MB, private_dirs=(str(TEMP_DIRECTORY), *private_dirs)
        )
        layout = Layout(Path(root).resolve())
        leftovers.clean(layout)
        layout.make_root()
        record = {
            "options": options.to_json(),
            "cgroups": NO_CGROUPS.to_json(),
            "notes": [],
            "owner": leftovers.owner_now(),
            "ray": {"dashboard": dashboard, "resources": resources or {}},
        }
        layout.record.write_text(json.dumps(record, indent=1))
        bed = cls(layout, record)
        try:
            bed._boot(only or nodes)
        except BaseException:
            bed.down()
            raise
        return bed

    def _boot(self, joining: int) -> None:
        self.layout.make()
        self.layout.hosts.write_text(config.hosts(self.options))
        self._room.power_on([SWITCH])
        self._room.power_on(self.nodes)
        self.join(*self.nodes[:joining])

    @classmethod
    def attach(cls, root: Arg) -> RayBed:
        """The cluster another process booted in `root`."""
        layout = Layout(Path(root).resolve())
        try:
            return cls(layout, json.loads(layout.record.read_text()))
        except (OSError, ValueError):
            raise BadInput(f"no Ray cluster at {layout.root}; boot one with: python -m tests.miniray up") from None

    def down(self) -> None:
        """Take everything away, the folder included. The machine's own /tmp/ray, empty, stays: to remove a directory
        takes away what other clusters have mounted on it, rmdir(2)."""
        leftovers.clean(self.layout, by_owner=True)

    def __enter__(self) -> RayBed:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- what it is

    @property
    def root(self) -> Path:
        return self.layout.root

    @property
    def nodes(self) -> list[str]:
        return list(self.options.names)

    @property
    def addresses(self) -> dict[str, str]:
        """Address of every node."""
        return {node: address for node, address in self.options.addresses.items() if node != CONTROLLER}

    @property
    def gcs_address(self) -> str:
        return f"{self.addresses[HEAD]}:{PORT}"

    @property
    def dashboard_url(self) -> str:
        """Where Ray's job server listens, as the nodes see it; on the head also http://127.0.0.1:8265."""
        return f"http://{self.addresses[HEAD]}:{DASHBOARD_PORT}"

    # -- programs

    def argv_in(self, node: str, argv: Sequence[Arg], **how: Any) -> list[str]:
        """The command line that runs `argv` in a node."""
        return self._room.argv_in(node, argv, **_with_environment(how))

    def run(self, node: str, argv: Sequence[Arg], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in a node to its end: check=True, timeout_s=60, input, cwd, env. A failure is a BedError."""
        return self._room.run(node, argv, **_with_environment(how))

    def popen(self, node: str, argv: Sequence[Arg], **how: Any) -> NodePopen:
        """Start a program in a node: cwd, env and what subprocess.Popen takes. Signals reach the program itself."""
        return self._room.popen(node, argv, **_with_environment(how))

    def processes(self, node: str) -> list[NodeProcess]:
        """All that runs in a node, Ray's own included."""
        return processes_of(self._room.init(node))

    # -- Ray

    def join(self, *nodes: str) -> None:
        """Start Ray on these nodes (the head first, if it is among them) and wait until they are alive."""
        for part in ([node for node in nodes if node == HEAD], [node for node in nodes if node != HEAD]):
            starting = [(node, self._start(node)) for node in part]
            for node, process in starting:
                if process.wait(BOOT_TIMEOUT_S):
                    raise BedError(f"ray start on {node} ended with {process.returncode}:\n{tail(self._log(node))}")
        self.wait_alive(*nodes)

    def kill_raylet(self, node: str, *, wait: bool = True) -> None:
        """SIGKILL a node's raylet, as a crash would; its workers follow. With `wait`: until Ray knows."""
        self._end(node, "raylet", signal.SIGKILL)
        if wait:
            self._wait_lost(node)

    def stop(self, node: str) -> None:
        """End all of Ray on a node."""
        ours = [p.pid for p in self.processes(node) if "/ray/" in p.cmdline or p.cmdline.startswith("ray::")]
        end_all([pid for one in ours if (pid := Pid.of(one))], signal.SIGKILL)

    def cut_link(self, node: str) -> None:
        """Pull the network cable of a node. What runs there runs on."""
        self._room.link(node, up=False)

    def mend_link(self, node: str) -> None:
        self._room.link(node, up=True)

    def heal(self) -> None:
        """Let nodes that are not alive join again."""
        for node in self.nodes:  # of a raylet that was just killed Ray may not know yet
            if node != HEAD and not self._pids(node, "raylet"):
                self._wait_lost(node)
        alive = self.alive()
        lost = [node for node in self.nodes if self.addresses[node] not in alive]
        for node in lost:
            self._room.link(node, up=True)
            self.stop(node)
        if lost:
            self.join(*lost)

    def alive(self) -> list[str]:
        """The addresses of the nodes that Ray takes for alive."""
        done = self.run(HEAD, [sys.executable, "-c", ALIVE, self.gcs_address], timeout_s=30)
        return [str(address) for address in json.loads(done.stdout.splitlines()[-1])]

    def wait_alive(self, *nodes: str) -> None:
        """Until Ray takes these nodes for alive."""
        wanted = {self.addresses[node] for node in nodes}
        self._wait(lambda: wanted <= set(self.alive()), f"{', '.join(nodes)} to be alive")

    def _wait_lost(self, node: str) -> None:
        self._wait(lambda: self.addresses[node] not in self.alive(), f"the end of {node}")

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise BedError(f"Ray at {self.root}: waited {BOOT_TIMEOUT_S:.0f} s for {what}")
            time.sleep(POLL_S)

    def _start(self, node: str) -> NodePopen:
        wishes = self._record["ray"]
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        argv += [f"--node-ip-address={self.addresses[node]}", f"--object-store-memory={STORE_BYTES}"]
        argv += [f"--num-cpus={self.options.cpus}", f"--num-gpus={self.options.gpus}"]
        argv += [f"--resources={json.dumps(wishes['resources'].get(node, {}))}"]
        if node == HEAD:
            board = [f"--dashboard-port={DASHBOARD_PORT}", "--dashboard-host=0.0.0.0"]
            argv += ["--head", f"--port={PORT}", f"--include-dashboard={wishes['dashboard']}", *board]
        else:
            argv += [f"--address={self.gcs_address}"]
        with open(self._log(node), "a") as log:
            return self.popen(node, ["setsid", *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")

    def _log(self, node: str) -> Path:
        return self.layout.log(f"ray-{node}.start")

    def _pids(self, node: str, name: str) -> list[int]:
        return [p.pid for p in self.processes(node) if os.path.basename(p.cmdline.partition(" ")[0]) == name]

    def _end(self, node: str, name: str, signum: int) -> None:
        found = self._pids(node, name)
        if not found:
            raise BadInput(f"no {name} runs on {node}")
        end_all([pid for one in found if (pid := Pid.of(one))], signum)


def _with_environment(how: dict[str, Any]) -> dict[str, Any]:
    return {**how, "env": {**ENVIRONMENT, **(how.get("env") or {})}}
