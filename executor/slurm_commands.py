"""The Slurm commands a driver calls, each bounded in time: a controller that is down makes them hang."""

from __future__ import annotations

import os
import re
import subprocess

from executor import protocol

COMMAND_TIMEOUT_S = 10.0
OVER_WORDS = ("Invalid job id specified", "already completing or completed")  # 22.05 and 24.11
CONFIGURATION_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
PROCTRACK = re.compile(r"^\s*ProctrackType\s*=\s*(?:proctrack/)?(\w+)", re.IGNORECASE | re.MULTILINE)
RESTARTS = re.compile(r"\bRestarts=(\d+)")
TYPED_GPU = re.compile(r"gres[:/]gpu:([A-Za-z][\w.-]*)", re.IGNORECASE)


def output_of(argv: list[str]) -> str | None:
    """What a command prints, or None if it is missing, fails or does not answer in time."""
    done = _run(argv)
    return done.stdout if done is not None and done.returncode == 0 else None


def _run(argv: list[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def proctrack_type() -> str:
    """`cgroup`, `linuxproc`, `pgid`, or `unknown`: from slurm.conf, which costs nothing, else from scontrol."""
    for path in (os.environ.get(protocol.SLURM_CONF), *CONFIGURATION_FILES):
        found = PROCTRACK.search(_content(path)) if path else None
        if found:
            return found.group(1).lower()
    found = PROCTRACK.search(output_of(["scontrol", "show", "config"]) or "")
    return found.group(1).lower() if found else protocol.UNSPECIFIED_PROCTRACK


def gpu_request(slurm_job_id: str, count: int) -> str:
    """`2`, or `h100:2` where the job holds typed GPUs: Slurm 23.02 refuses an untyped step in a typed job."""
    if count == 0:
        return "0"
    found = TYPED_GPU.search(output_of(["scontrol", "show", "job", slurm_job_id]) or "")
    return "%s:%d" % (found.group(1), count) if found else str(count)


def is_requeued(slurm_job_id: str) -> bool:
    """Is this run of the job being ended to be run again? Slurm counts the restart when it sends the TERM."""
    found = RESTARTS.search(output_of(["scontrol", "show", "job", slurm_job_id]) or "")
    return found is not None and int(found.group(1)) > int(os.environ.get(protocol.SLURM_RESTART_COUNT) or 0)


def scancel(step: str, signal_name: str | None = None) -> bool:
    """Signal or end one step; True if done, or if the step is over. Plain `scancel JOB.STEP` is an instant KILL."""
    done = _run(["scancel", *(["--signal=" + signal_name] if signal_name else []), step])
    return done is not None and (done.returncode == 0 or any(words in done.stderr for words in OVER_WORDS))


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
