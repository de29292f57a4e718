"""Slurm's words about jobs -> our records. Pure functions."""

from __future__ import annotations

import re
from typing import NamedTuple

# https://slurm.schedmd.com/job_state_codes.html: the base states a job does not leave by itself
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class JobEnd(NamedTuple):
    """How a job is doing or how it ended, from `scontrol show job`."""

    job_id: int
    state: str
    exit_code: int
    signal: int
    reason: str
    restarts: int
    node_list: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def parse_job(text: str) -> JobEnd | None:
    """The first job of `scontrol show job`. Line starts are anchored: a job may be named State=FAILED."""

    def field(pattern: str, default: str = "") -> str:
        found = re.search(rf"^\s+(?:.* )?{pattern}", text, re.MULTILINE)
        return found[1] if found else default

    job_id = re.search(r"^JobId=(\d+)", text, re.MULTILINE)
    if not job_id:
        return None
    code, signum = field(r"ExitCode=(\d+:\d+)", "0:0").split(":")
    return JobEnd(
        job_id=int(job_id[1]),
        state=field(r"JobState=(\S+)"),
        exit_code=int(code),
        signal=int(signum),
        reason=field(r"Reason=(.*?) Dependency="),
        restarts=int(field(r"Restarts=(\d+)", "0")),
        node_list=field(r"(?<!Req)(?<!Exc)NodeList=(\S*)"),
    )


def parse_job_id(text: str) -> int:
    """The answer of `sbatch --parsable`: JOBID or JOBID;CLUSTER on the last line."""
    return int(text.strip().splitlines()[-1].split(";")[0])


def parse_steps(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def parse_nodes(text: str) -> dict[str, str]:
    """Node -> state, from `sinfo -h -N -o '%N %T'` (a node is listed once for each of its partitions)."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2)
