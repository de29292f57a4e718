"""The peer: SkyPilot's executor and driver, in a Python of their own. Nothing of ours is imported there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

REQUIREMENT = "skypilot-nightly==1.0.0.dev20261027"
MODULE = "sky.skylet.executor.slurm"
VARIABLE = "GANGRUN_BENCH_SKYPILOT"
INSTALL_TIMEOUT_S = 1800
# Prints the driver of one more job. Run by the peer's Python with HOME being the cluster's home.
RENDER = """
import sys, time
from sky.skylet import job_lib
from sky.backends.task_codegen import SlurmCodeGen
slurm_job_id, log_dir, *ips = sys.argv[1:]
job_id = job_lib.add_job("bench", "root", "sky-%d" % time.time_ns(), "1x")[0]
code = SlurmCodeGen(slurm_job_id, None)
code.add_prologue(job_id)
code.add_setup(len(ips), {"CPU": 1}, ips, {}, log_dir, "true")
code.add_task(len(ips), "true", "bench", {"CPU": 1}, log_dir, {})
code.add_epilogue()
print(code.build())
"""


class PeerError(Exception):
    """The peer cannot be used; the text says why and what to do."""


class SkyPilot:
    """SkyPilot installed for `python`. Raises PeerError if it is not."""

    def __init__(self, python: str) -> None:
        found = shutil.which(python)
        if found is None:
            raise PeerError("%s: no such program; make one with: python -m benchmarks skypilot-venv DIR" % python)
        self.python = os.path.abspath(found)
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(%r) is None)" % MODULE
        if subprocess.run([self.python, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode:
            raise PeerError("%s has no %s; make one with: python -m benchmarks skypilot-venv DIR" % (python, MODULE))

    def executor(self, script: str, log_dir: str, home: str, ips: Sequence[str] = ()) -> list[str]:
        """The command line of a rank; by default of the only one, on this machine."""
        ips = ips or [socket.gethostbyname(socket.gethostname())]
        return [
            *(self.python, "-m", MODULE),
            "--script=" + script,
            "--log-dir=" + log_dir,
            "--cluster-num-nodes=%d" % len(ips),
            "--cluster-ips=" + ",".join(ips),
            "--cluster-home-dir=" + home,
            "--task-name=bench",
        ]

    def prepare_home(self, home: str) -> None:
        """What SkyPilot's provisioner leaves on a cluster."""
        os.makedirs(home + "/.sky", exist_ok=True)
        os.makedirs(home + "/sky_workdir", exist_ok=True)
        with open(home + "/.sky/python_path", "w", encoding="utf-8") as file:
            file.write(self.python + "\n")

    def driver(self, slurm_job_id: str, log_dir: str, ips: Sequence[str], environ: Mapping[str, str]) -> str:
        """The text of a driver for a trivial setup and run."""
        argv = [self.python, "-c", RENDER, slurm_job_id, log_dir, *ips]
        quiet: dict[str, str] = {**environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        done = subprocess.run(argv, env=quiet, text=True, capture_output=True, check=False)
        if done.returncode:
            raise PeerError("SkyPilot's driver cannot be rendered: " + "".join(done.stderr.strip().splitlines()[-1:]))
        return done.stdout


def find(python: str | None) -> SkyPilot | None:
    """The peer the user named, by option or variable; None if none was named. Raises PeerError."""
    python = python or os.environ.get(VARIABLE)
    return SkyPilot(python) if python else None


def make_venv(directory: str) -> str:
    """Install the peer into a new virtual environment; returns its Python. Raises PeerError."""
    if os.path.exists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise PeerError("%s is not an empty directory: give a new one" % directory)
    python = os.path.join(directory, "bin", "python")
    steps = ([sys.executable, "-m", "venv", directory], [python, "-m", "pip", "install", "-q", REQUIREMENT])
    for argv in steps:
        try:
            code = subprocess.run(argv, check=False, timeout=INSTALL_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            raise PeerError("no end after %d s: %s" % (INSTALL_TIMEOUT_S, " ".join(argv))) from None
        if code:
            raise PeerError("exit code %d: %s" % (code, " ".join(argv)))
    return SkyPilot(python).python
