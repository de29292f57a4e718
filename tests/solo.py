"""Run the executor as one rank without Slurm: its variables set by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from executor import protocol

ADDRESS = "127.0.0.1"


class Solo:
    """Ranks of a step that exists only in the environment."""

    def __init__(self, directory: Path, num_ranks: int = 1) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self.hosts = [protocol.local_address(rank) for rank in range(num_ranks)]

    def environ(self, rank: int = 0, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "HOME": str(self.directory),
            "PYTHONPATH": str(Path(protocol.__file__).parent.parent),
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(len(self.hosts)),
            "SLURM_STEP_NODELIST": ",".join(self.hosts),
            "SLURMD_NODENAME": self.hosts[rank],
            **more,
        }

    def argv(self, script: str, *flags: str) -> list[str]:
        ips = ",".join(self.hosts)
        fixed = [
            "--log-dir=%s" % (self.directory / "logs"),
            "--cluster-ips=" + ips,
            "--cluster-num-nodes=%d" % len(self.hosts),
        ]
        return [sys.executable, "-m", "executor.slurm", "--script=" + script, *fixed, "--no-color", *flags]

    def start(
        self, script: str, *flags: str, rank: int = 0, env: dict[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[bytes]:
        how.setdefault("stdout", subprocess.PIPE)
        how.setdefault("stderr", subprocess.PIPE)
        environ = self.environ(rank, **(env or {}))
        process = subprocess.Popen(self.argv(script, *flags), env=environ, cwd=self.directory, **how)
        self._started.append(process)
        return process

    def close(self) -> None:
        """End what a test left running."""
        for process in self._started:
            process.kill()
            process.communicate(timeout=20)

    def run(
        self, script: str, *flags: str, rank: int = 0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        process = self.start(script, *flags, rank=rank, env=env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def log(self, name: str = "run.log") -> bytes:
        return (self.directory / "logs" / name).read_bytes()

    def record(self, rank: int = 0) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.directory / "launch" / "ranks" / str(rank)).read_text())
        return record
