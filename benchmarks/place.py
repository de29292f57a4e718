"""A folder that stands for the shared file system: archive, launches, logs. Runs the executor as the driver does."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.report import Report
from benchmarks.skypilot import SkyPilot
from codegen.archive import executor_archive
from executor import interfaces, protocol
from executor.gang import prepare_records
from executor.shared import SignalFile, write_private

STAMP = "date +%s.%N"
FOREIGN = ("SLURM", "SRUN_", "SBATCH_", "SKYPILOT_", "PYTHON")


class Place:
    """Everything of one run of the benchmarks lies below `directory`, what nodes share in `shared`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.shared = directory + "/shared"
        self.home = self.shared + "/home"
        os.makedirs(self.home)
        self.archive = "%s/%s" % (self.shared, protocol.ARCHIVE_NAME)
        with open(self.archive, "wb") as file:
            file.write(executor_archive())
        self._numbers = itertools.count(1)

    def new(self, name: str) -> str:
        """A fresh directory that the nodes share."""
        path = "%s/%s-%d" % (self.shared, name, next(self._numbers))
        os.mkdir(path)
        return path

    def environ(self) -> dict[str, str]:
        """This process's environment without Slurm's, Python's and our own names."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "HOME": self.home}

    def rank_environ(self) -> dict[str, str]:
        """What srun would give to the only rank of a one-node step on this machine."""
        host = socket.gethostname()
        return {
            **self.environ(),
            protocol.SLURM_JOB_ID: "1",
            protocol.SLURM_STEP_ID: "0",
            protocol.SLURM_PROCID: "0",
            protocol.SLURM_NNODES: "1",
            protocol.SLURM_STEP_NUM_TASKS: "1",
            protocol.SLURM_STEP_NODELIST: host,
            protocol.SLURM_JOB_NODELIST: host,
            protocol.SLURMD_NODENAME: host,
        }

    def launch(self, num_ranks: int = 1) -> protocol.Launch:
        """A launch directory as a driver prepares it: armed signals, empty records, a heartbeat."""
        launch = protocol.Launch(self.new("launch"))
        for path in (launch.alloc, launch.setup_done, launch.gang, launch.heartbeat):
            SignalFile(path).arm()
        prepare_records(launch, num_ranks, is_setup=False)
        write_private(launch.run_env, b"{}")
        return launch

    def executor(
        self, script: str, launch: protocol.Launch | None = None, ips: Sequence[str] = (), waits: bool = False
    ) -> list[str]:
        """The command line of a rank as the driver writes it; by default of the only one, on this machine."""
        ips = ips or [own_address()]
        launch = launch or self.launch(len(ips))
        write_private(launch.run_script, script.encode())
        return [
            *(sys.executable, "-I", "-S", self.archive),
            "--script-path=" + launch.run_script,
            "--env-file=" + launch.run_env,
            "--alloc-signal-file=" + launch.alloc,
            *(["--setup-done-signal-file=" + launch.setup_done] if waits else []),
            "--log-dir=%s/logs" % launch.directory,
            "--launch-dir=" + launch.directory,
            "--cluster-num-nodes=%d" % len(ips),
            "--cluster-ips=" + ",".join(ips),
            "--cluster-home-dir=" + self.home,
            "--task-name=bench",
            "--proctrack=cgroup",
        ]

    def module(self, script: str) -> list[str]:
        """The same by hand: `python -m executor.slurm`."""
        flags = self.executor(script)[4:]
        return [sys.executable, "-m", "executor.slurm", *flags]


class Session(NamedTuple):
    """What every benchmark gets."""

    report: Report
    place: Place
    rounds: int
    peer: SkyPilot | None

    @property
    def few(self) -> dict[str, int]:
        """Rounds of the slow peer."""
        return {SKYPILOT: max(1, self.rounds // 3)}


SKYPILOT = "SkyPilot"


def own_address() -> str:
    """This machine's address, the way a cluster's list would have it."""
    return next(iter(interfaces.addresses()), "127.0.0.1")
