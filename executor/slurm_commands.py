"""The Slurm commands a driver calls, each bounded in time: a controller that is down makes them hang."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from executor import protocol

COMMAND_TIMEOUT_S = 10.0
UNLIMITED_S = 364 * 86400
TIME_FORMAT = "SLURM_TIME_FORMAT"  # a user's taste in dates; what we read is Slurm's own
OVER_WORDS = ("Invalid job id specified", "already completing or completed", "has expired")  # 22.05 and 24.11
CONFIGURATION_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
PROCTRACK = re.compile(r"^\s*ProctrackType\s*=\s*(?:proctrack/)?(\w+)", re.IGNORECASE | re.MULTILINE)
END_TIME = re.compile(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
QUEUE_TIMES = {
    key: re.compile(rf"\b{name}=(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)")
    for key, name in (("submitted", "SubmitTime"), ("eligible", "EligibleTime"), ("granted", "StartTime"))
}
PREEMPTED = re.compile(r"\bPreemptTime=\d")
NODE_LIST = re.compile(r"^\s*NodeList=(\S+)", re.MULTILINE)
AT_WORK = re.compile(r"\bJobState=RUNNING\b")
KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d+)", re.MULTILINE)
DEFAULT_KILL_WAIT_S = 30.0
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
            env={name: value for name, value in os.environ.items() if name != TIME_FORMAT},
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


def kill_wait_s() -> float:
    """Seconds from Slurm's TERM to its KILL, slurm.conf(5): 30 where nobody says."""
    found = KILL_WAIT.search(output_of(["scontrol", "show", "config"]) or "")
    return float(found.group(1)) if found else DEFAULT_KILL_WAIT_S


def gpu_request(slurm_job_id: str, count: int) -> str:
    """`0`, which is said too, or a step would see all GPUs of the job; `2`; `h100:2` where the job holds typed GPUs.

    Slurm 23.02 refuses an untyped step in a typed job.
    """
    if count == 0:
        return "0"
    found = TYPED_GPU.search(output_of(["scontrol", "show", "job", component(slurm_job_id)]) or "")
    return "%s:%d" % (found.group(1), count) if found else str(count)


def end_time(slurm_job_id: str) -> int | None:
    """When Slurm will end the job, in seconds since 1970; None without a limit, or where nobody says."""
    told = os.environ.get(protocol.SLURM_JOB_END_TIME, "")  # Slurm 23.02 and newer
    if told.isdigit():
        return _within_a_year(int(told))
    found = END_TIME.search(output_of(["scontrol", "show", "job", slurm_job_id]) or "")
    return _within_a_year(_seconds(found.group(1))) if found else None


def queue_times(slurm_job_id: str) -> dict[str, float]:
    """When this run of the job was submitted and got its nodes, in seconds since 1970 on the controller's clock.

    A requeue counts as a submission. Nothing where nobody says.
    """
    if not slurm_job_id.isdigit():
        return {}
    text = output_of(["scontrol", "show", "job", slurm_job_id]) or ""
    found = {key: pattern.search(text) for key, pattern in QUEUE_TIMES.items()}
    return {key: _seconds(match.group(1)) for key, match in found.items() if match}


def _seconds(date: str) -> int:
    return int(time.mktime(time.strptime(date, "%Y-%m-%dT%H:%M:%S")))


def _within_a_year(end: int) -> int | None:
    """Slurm gives a job without a limit a year (measured)."""
    return end if end - time.time() < UNLIMITED_S else None


def lost_nodes(slurm_job_id: str, wanted: Sequence[str]) -> list[str]:
    """The nodes that the job does not hold any more: with --no-kill it outlives the loss of some (sbatch(1))."""
    if not wanted:
        return []
    held = NODE_LIST.findall(output_of(["scontrol", "show", "job", slurm_job_id]) or "")  # of each component
    held = [nodes for nodes in held if nodes != "(null)"]
    names = output_of(["scontrol", "show", "hostnames", ",".join(held)]) if held else None
    return [] if names is None else [node for node in wanted if node not in names.split()]


def is_ending(slurm_job_id: str) -> bool:
    """Whether Slurm ends the job, or is about to run it again (squeue(1), JOB STATE CODES)."""
    text = output_of(["scontrol", "show", "job", slurm_job_id])
    return text is not None and AT_WORK.search(text) is None


def down_nodes(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes that Slurm has given up (sinfo(1), NODE STATE CODES; `*` stands for: does not answer)."""
    argv = ["sinfo", "--noheader", "--Node", "--nodes=" + ",".join(nodes), "--format=%N %t"]
    rows = [line.split() for line in (output_of(argv) or "").splitlines()]
    return sorted({row[0] for row in rows if len(row) == 2 and row[1].startswith("down")})


class Fate(NamedTuple):
    """What Slurm is about to do with a job whose run is being ended."""

    is_requeued: bool = False  # counted when the TERM is sent
    is_preempted: bool = (
        False  # the steps have got TERM, the batch script will, at the end of the partition's GraceTime
    )


def fate(slurm_job_id: str) -> Fate:
    text = output_of(["scontrol", "show", "job", slurm_job_id]) or ""
    restarts = RESTARTS.search(text)
    attempt = int(os.environ.get(protocol.SLURM_RESTART_COUNT) or 0)
    return Fate(restarts is not None and int(restarts.group(1)) > attempt, PREEMPTED.search(text) is not None)


def component(slurm_job_id: str) -> str:
    """Slurm knows the steps of a component by the component's own id; its tasks see that of the whole (measured)."""
    group = os.environ.get(protocol.ENV_HET_GROUP)
    return os.environ.get(protocol.SLURM_JOB_ID_HET_GROUP % group, slurm_job_id) if group else slurm_job_id


def steps_named(slurm_job_id: str, names: Sequence[str]) -> list[str]:
    """The running steps of a job that have one of these names."""
    jobs = "--jobs=" + component(slurm_job_id)
    listing = output_of(["squeue", "--steps", "--noheader", jobs, "--format=%i %j"]) or ""
    return [line.split()[0] for line in listing.splitlines() if line.split()[1:] and line.split()[1] in names]


def scancel(step: str, signal_name: str | None = None) -> bool:
    """Signal or end one step; True if done, or if the step is over. Plain `scancel JOB.STEP` is an instant KILL."""
    job, _, number = step.partition(".")
    step = f"{component(job)}.{number}"
    done = _run(["scancel", *(["--signal=" + signal_name] if signal_name else []), step])
    return done is not None and (done.returncode == 0 or any(words in done.stderr for words in OVER_WORDS))


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
