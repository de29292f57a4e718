"""What a cluster looks like: one frozen record, kept as JSON beside the cluster so that others can attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.minislurm.errors import BadInput

CONTROLLER = "ctl"  # the node of slurmctld: where people log in and submit
LAPTOP = "laptop"  # where a person sits, without any Slurm; `Cluster.login` plugs it in
LAPTOP_NUMBER = 2  # the last part of its address
SWITCH = "switch"  # the bridge all nodes are plugged into, and the home of munged
MAX_NODES = 200
CHECKOUT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Options:
    """Everything that can be chosen when a cluster is booted."""

    nodes: int = 3
    node_names: Sequence[str] = ()  # instead of n1..nN
    name: str = "ms"
    subnet: str = "10.77.0"  # the bridge is in a namespace of its own, so clusters may share it
    cpus: int = 64
    mem_mb: int = 64000
    gpus: int = 2
    gres_type: str | None = None  # "a100" makes gpu:a100:2
    proctrack: str = "cgroup"  # or linuxproc, pgid
    constrain: Sequence[str] = ()  # of "cores", "devices", "ram": what task/cgroup confines
    partitions: str | None = None  # lines for slurm.conf instead of the partition "main"
    extra_conf: str = ""  # more lines for slurm.conf; they win over ours
    slurmd_timeout_s: int = 30
    kill_wait_s: int = 2
    cred_expire_s: int = 5  # a requeued job waits this long; Slurm's own default is 120
    min_job_age_s: int = 300
    accounting: bool = False  # slurmdbd and its MariaDB in `ctl`
    private_dirs: Sequence[str] = ()  # folders of which every node sees its own
    shm_mb: int = 256
    rootfs: str | None = None  # boot the nodes from this Debian root instead of the machine's
    binds: Sequence[str] = ("/tmp", "/root", "/home", CHECKOUT)  # what is seen of the machine in a rootfs

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) <= MAX_NODES:
            raise BadInput(f"a cluster has 1 to {MAX_NODES} nodes, not {len(self.names)}")
        if len({*self.names, CONTROLLER, SWITCH, LAPTOP}) != len(self.names) + 3:
            raise BadInput(f"node names must differ from each other, {CONTROLLER!r}, {SWITCH!r} and {LAPTOP!r}")
        if unknown := set(self.constrain) - {"cores", "devices", "ram"}:
            raise BadInput(f"constrain knows cores, devices and ram, not {', '.join(sorted(unknown))}")

    @property
    def names(self) -> tuple[str, ...]:
        """The compute nodes in order."""
        return tuple(self.node_names) or tuple(f"n{i}" for i in range(1, self.nodes + 1))

    @property
    def addresses(self) -> dict[str, str]:
        """Every node's address; the controller is .10, the compute nodes follow."""
        return {name: f"{self.subnet}.{10 + i}" for i, name in enumerate((CONTROLLER, *self.names))}

    def address_of(self, node: str) -> str:
        """A node's or the laptop's address."""
        return f"{self.subnet}.{LAPTOP_NUMBER}" if node == LAPTOP else self.addresses[node]

    def port_of(self, node: str) -> str:
        """The name of the bridge port a node is plugged into."""
        if node == LAPTOP:
            return f"port-{LAPTOP}"
        return f"port{[CONTROLLER, *self.names].index(node)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**{k: v for k, v in values.items() if k in known})
