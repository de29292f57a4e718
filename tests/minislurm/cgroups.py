"""Control groups: what this machine offers, and the folders a cluster has in it.

Every node gets a folder of its own in every hierarchy and sees that folder as the whole hierarchy, as on a
machine of its own. `remove` takes the folders away again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.minislurm.errors import BadInput, Unsupported
from tests.minislurm.layout import Layout
from tests.minislurm.options import Options

HOST_MOUNT = Path("/sys/fs/cgroup")
V1_CONTROLLERS = ["freezer", "memory", "cpuset", "devices", "cpuacct"]
UNIFIED = "unified"  # our word for the one hierarchy of v2
PROCS = "cgroup.procs"
SLURMD_CGROUP = "system.slice/slurmd.service"  # v2: where slurmd lives in its node
REMOVE_TIMEOUT_S = 5.0


class Cgroups(NamedTuple):
    """What the nodes of one cluster use."""

    version: int  # 1, 2 or 0 for none
    hierarchies: dict[str, str]  # v1: controller -> folder; v2: UNIFIED -> folder
    prefix: str  # of our folders in them

    @property
    def plugin(self) -> str:
        """Slurm's CgroupPlugin. It loads one even if it uses none, and v1 needs nothing to be loaded."""
        return "cgroup/v2" if self.version == 2 else "cgroup/v1"

    def folder(self, controller: str, node: str) -> Path:
        return Path(self.hierarchies[controller]) / f"{self.prefix}-{node}"

    def enter(self, node: str) -> list[str]:
        """Start of a command line that must run in the node's cgroup, not in ours (v2 only: v1 mounts do it).
        It moves before it enters the node's namespaces; from inside the kernel forbids it."""
        if self.version != 2:
            return []
        return [
            "sh",
            "-c",
            'echo 0 > "$0"; exec "$@"',
            str(self.folder(UNIFIED, node) / SLURMD_CGROUP / PROCS),
        ]

    def to_json(self) -> dict[str, Any]:
        return dict(self._asdict())

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cgroups:
        return cls(**data)

    def remove(self, node: str = "*") -> list[Path]:
        """Remove the folders of a node, or of all; their processes must be dead. Returns what stayed."""
        ours = [d for h in self.hierarchies.values() for d in Path(h).glob(f"{self.prefix}-{node}")]
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while left := [d for d in ours if not _remove_tree(d)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left


NO_CGROUPS = Cgroups(0, {}, "")


def _remove_tree(top: Path) -> bool:
    """Remove a cgroup with all below it; True if it is gone."""
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return not top.exists()


def choose(options: Options, layout: Layout, notes: list[str]) -> Cgroups:
    """The best this machine can do for the wish; appends a note where it is less than the wish."""
    if options.proctrack != "cgroup" and not options.constrain:
        return NO_CGROUPS
    if "cores" in options.constrain and options.cpus > (os.cpu_count() or 1):
        raise BadInput(f"cores cannot be confined: a node has {options.cpus} cpus, this machine {os.cpu_count()}")
    chosen = _find(options, layout)
    if chosen.version == 0:
        notes.append("control groups are not usable here: proctrack/linuxproc is used instead of proctrack/cgroup")
    elif str(layout.freezer) in chosen.hierarchies.values():
        notes.append("no cgroup hierarchy is writable here: a private cgroup v1 freezer is used")
    wanted = _v1_controllers(options) if options.constrain else []
    if chosen.version < 2 and (lost := [name for name in wanted if name not in chosen.hierarchies]):
        raise Unsupported(f"{', '.join(options.constrain)} cannot be confined here: no cgroup {', '.join(lost)}")
    return chosen


def _find(options: Options, layout: Layout) -> Cgroups:
    prefix = "minislurm-" + hashlib.sha256(str(layout.root).encode()).hexdigest()[:8]
    mounts = _cgroup_mounts()
    v1 = {name: mounts[name] for name in _v1_controllers(options) if name in mounts}
    if "freezer" in v1 and _writable(v1["freezer"]):
        return Cgroups(1, v1, prefix)
    if mounts.get(UNIFIED) == str(HOST_MOUNT) and _writable(str(HOST_MOUNT)):
        return Cgroups(2, {UNIFIED: str(HOST_MOUNT)}, prefix)
    if _mount_freezer(layout.freezer):
        return Cgroups(1, {"freezer": str(layout.freezer)}, prefix)
    return NO_CGROUPS


def _v1_controllers(options: Options) -> list[str]:
    """What the nodes need; each one costs every node's boot some time."""
    if "cgroup" in options.extra_conf:
        return V1_CONTROLLERS
    wanted = {"ram": "memory", "cores": "cpuset", "devices": "devices"}
    return ["freezer", *(wanted[word] for word in options.constrain)]


def _cgroup_mounts() -> dict[str, str]:
    """Controller (or UNIFIED for v2) -> mount point."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, flags = line.split()[:4]
        words = [UNIFIED] if kind == "cgroup2" else flags.split(",") if kind == "cgroup" else []
        for word in words:
            found.setdefault(word, point)
    return found


def _writable(folder: str) -> bool:
    probe = Path(folder) / f"minislurm-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _mount_freezer(point: Path) -> bool:
    point.mkdir(exist_ok=True)
    argv = ["mount", "-t", "cgroup", "-o", "freezer", "minislurm", str(point)]
    return subprocess.run(argv, check=False, capture_output=True).returncode == 0
