"""Who runs for a job, and what the cluster holds on to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Callable, NamedTuple

from executor import protocol
from tests.minislurm.cgroups import Cgroups
from tests.minislurm.cluster import Cluster
from tests.minislurm.options import CONTROLLER
from tests.minislurm.proc import Pid, processes_of


class Process(NamedTuple):
    pid: Pid
    parent: int
    argv: list[str]
    is_of_job: bool


class Processes:
    """All processes of one job, wherever they run: `mark`, its directory, is in their environment."""

    def __init__(self, mark: str) -> None:
        self.all = [found for name in os.listdir("/proc") if name.isdigit() and (found := _process(int(name), mark))]
        self.all = [process for process in self.all if process.is_of_job]

    def find(self, part: str) -> list[Process]:
        is_part: dict[str, Callable[[Process], bool]] = {
            "driver": lambda p: len(p.argv) == 2 and p.argv[1].endswith("/driver/" + protocol.DRIVER_NAME),
            "executor": lambda p: "-I" in p.argv[1:2] and any(word.startswith("--launch-dir=") for word in p.argv),
            "srun": lambda p: p.argv[0] == "srun" and p.parent in parents["driver"],
            "script": lambda p: p.argv[0] == "bash" and p.parent in parents["executor"],
        }
        parents = {name: [p.pid.pid for p in self.all if is_part[name](p)] for name in ("driver", "executor")}
        return [process for process in self.all if is_part[part](process)]


def _process(pid: int, mark: str) -> Process | None:
    one, folder = Pid.of(pid), Path("/proc/%d" % pid)
    try:
        argv = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
        parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        environ = (folder / "environ").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    return Process(one, parent, argv, b"HOME=" + os.fsencode(mark) in environ) if one and argv else None


class Held(NamedTuple):
    """What the cluster holds on to, apart from jobs: to be compared before and after."""

    slurmctld_mb: float
    slurmctld_fds: int
    job_cgroups: int
    processes: list[str]

    @classmethod
    def now(cls, cluster: Cluster) -> Held:
        ctl = Pid.read(cluster.layout.init(CONTROLLER))
        pid = next(p.pid for p in processes_of(ctl) if "slurmctld" in p.cmdline.split()[0]) if ctl else 0
        status = dict(line.split(":", 1) for line in Path("/proc/%d/status" % pid).read_text().splitlines())
        cgroups = Cgroups.from_json(json.loads(cluster.layout.record.read_text())["cgroups"])
        tops = [cgroups.folder(name, node) for name in cgroups.hierarchies for node in cluster.nodes]
        inits = {node: Pid.read(cluster.layout.init(node)) for node in cluster.nodes}
        stepds = [p.cmdline for one in inits.values() if one for p in processes_of(one) if "stepd: [" in p.cmdline]
        rest = [p.cmdline[:120] for node in cluster.nodes for p in cluster.processes(node)]
        jobs = sum(len(list(top.glob("**/job_*"))) for top in tops)
        fds = len(os.listdir("/proc/%d/fd" % pid))
        return cls(int(status["VmRSS"].split()[0]) / 1024, fds, jobs, stepds + rest)
