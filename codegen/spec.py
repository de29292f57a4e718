"""The job description, and everything that can be wrong with it, found before anything is written or started."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executor import protocol

LONGEST_NAME = 200


class SpecError(protocol.UsageError, ValueError):
    """A field of a job description has a value that is not allowed. The text names the field, the value, what is."""


@dataclass(frozen=True)
class Resources:
    """What one node of the task needs. `gpu_type` is the user's name for it; Slurm's own is found at run time."""

    cpus: int = 1
    gpus: int = 0
    gpu_type: str | None = None

    def __post_init__(self) -> None:
        _require(self.cpus >= 1, "cpus", self.cpus, "1 or more")
        _require(self.gpus >= 0, "gpus", self.gpus, "0 or more")

    @classmethod
    def from_dict(cls, resources: Mapping[str, float]) -> Resources:
        """`{"CPU": 3.5, "H100": 8}`: fractions of CPUs and GPUs are rounded up to whole ones.

        Raises SpecError for more than one accelerator type and for counts that are no numbers.
        """
        counts = {name: _count(name, value) for name, value in resources.items()}
        accelerators = {name: count for name, count in counts.items() if name not in ("CPU", "memory", "mem")}
        if len(accelerators) > 1:
            raise SpecError(f"resources: at most one accelerator type is allowed, found {sorted(accelerators)}")
        kind, count = next(iter(accelerators.items()), (None, 0))
        return cls(cpus=max(1, counts.get("CPU", 1)), gpus=count, gpu_type=kind)


@dataclass(frozen=True)
class Job:
    """One job: a setup and a script for each of `num_nodes` nodes of a Slurm allocation.

    `slurm_job_id` None and empty `cluster_ips` are filled in where the driver runs, from the allocation it finds
    itself in; given, the latter are the addresses or host names of all nodes of the cluster, head first. `grace_s` is
    the time from TERM to KILL. `secrets` are variables that are written to a 0600 file only. `launcher` is `srun`, or
    `local` for a machine without Slurm. A `one_shot` driver removes itself, its archive and its secrets at the end.
    """

    job_id: str
    num_nodes: int
    log_dir: str
    slurm_job_id: str | None = None
    cluster_ips: tuple[str, ...] = ()
    run: str | None = None
    setup: str | None = None
    task_name: str = "task"
    resources: Resources = field(default_factory=Resources)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    setup_env_vars: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    container_name: str | None = None
    cluster_home: str | None = None
    workdir: str | None = None
    python: str | None = None
    grace_s: float = protocol.DEFAULT_GRACE_S
    liveness_timeout_s: float = protocol.DEFAULT_LIVENESS_TIMEOUT_S
    launcher: str = "srun"
    one_shot: bool = False

    def __post_init__(self) -> None:
        known = self.slurm_job_id is None or _is_file_name(self.slurm_job_id)
        _require(known, "slurm_job_id", self.slurm_job_id, "a job id such as '4711'")
        _require(_is_file_name(self.job_id), "job_id", self.job_id, "letters, digits and . _ - only")
        _require(len(self.cluster_ips) == len(set(self.cluster_ips)), "cluster_ips", self.cluster_ips, "each node once")
        _require(
            all(ip and "," not in ip for ip in self.cluster_ips),
            "cluster_ips",
            self.cluster_ips,
            "addresses or host names",
        )
        most = len(self.cluster_ips) or self.num_nodes
        allowed = "1 to %d, the nodes in cluster_ips" % most if self.cluster_ips else "1 or more"
        _require(1 <= self.num_nodes <= most, "num_nodes", self.num_nodes, allowed)
        _require(bool(self.log_dir) and "\0" not in self.log_dir, "log_dir", self.log_dir, "a directory")
        _require(
            0 < len(self.task_name) <= LONGEST_NAME and self.task_name.isprintable(),
            "task_name",
            self.task_name,
            "1 to 200 printable characters",
        )
        _require(self.launcher in ("srun", "local"), "launcher", self.launcher, "'srun' or 'local'")
        _require(0 <= self.grace_s < math.inf, "grace_s", self.grace_s, "a number of seconds, 0 or more")
        _require(
            0 < self.liveness_timeout_s < math.inf,
            "liveness_timeout_s",
            self.liveness_timeout_s,
            "a number of seconds above 0",
        )
        for name in ("env_vars", "setup_env_vars", "secrets"):
            object.__setattr__(self, name, checked_variables(getattr(self, name), name))

    @property
    def setup_script(self) -> str | None:
        return _script(self.setup)

    @property
    def run_script(self) -> str | None:
        return _script(self.run)


def checked_variables(variables: Mapping[str, Any], field_name: str) -> dict[str, str]:
    """Variables as strings, each one fit for execve(2). Raises SpecError."""
    for name, value in variables.items():
        where = f"{field_name}[{name!r}]"
        _require(
            isinstance(name, str) and name.isascii() and name.isidentifier(),
            where,
            value,
            "a name of letters, digits and _, not starting with a digit",
            show=False,
        )
        _require(isinstance(value, (str, int, float)), where, type(value).__name__, "a string or a number")
        size = len(os.fsencode(f"{name}={value}")) + 1
        _require(
            size <= protocol.LONGEST_ENV_BYTES,
            where,
            "%d bytes" % size,
            "at most %d bytes, the kernel's limit" % protocol.LONGEST_ENV_BYTES,
        )
        _require("\0" not in str(value), where, "a NUL byte", "text without NUL")
    return {name: str(value) for name, value in variables.items()}


def _script(text: str | None) -> str | None:
    return text if text is not None and text.strip() else None


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SpecError(f"resources[{name!r}]={value!r}: use a number, 0 or more")
    return math.ceil(value)


def _is_file_name(text: object) -> bool:
    return (
        isinstance(text, str)
        and bool(text)
        and text[0] != "."
        and all(c.isascii() and (c.isalnum() or c in "._-+") for c in text)
    )


def _require(holds: bool, field_name: str, value: object, allowed: str, show: bool = True) -> None:
    if not holds:
        raise SpecError("{}{}: use {}".format(field_name, f"={value!r}" if show else " is not allowed", allowed))
