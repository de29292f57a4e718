"""The job description, and everything that can be wrong with it, found before anything is written or started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from executor import protocol

LONGEST_NAME = 200
RESOURCE = re.compile(r"[A-Za-z][\w.-]*")
RAY_ACTIVATE_ALLOWED = "a bash script such as 'source ~/venv/bin/activate'"
RAY_ARGS_ALLOWED = "a list of options of `ray start`, such as --object-store-memory=8000000000"
# What must fit the job: where the cluster is, which other clusters share the node, when it ends.
RAY_OPTIONS_OF_OURS = ("--head", "--address", "--port", "--node-ip-address", "--temp-dir", "--block")


class SpecError(protocol.UsageError, ValueError):
    """A field of a job description has a value that is not allowed. The text names the field, the value, what is."""


@dataclass(frozen=True)
class Ray:
    """A Ray cluster over the task's nodes, for the time that its script runs, once, on rank 0.

    `activate` is bash that makes `ray` and the script's Python known, on every node before Ray starts; without it they
    are what the environment has. `start_args` are further options of `ray start`, the same on every node.
    """

    activate: str | None = None
    start_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.activate is None or _is_text(self.activate), "ray.activate", self.activate, RAY_ACTIVATE_ALLOWED)
        are_options = isinstance(self.start_args, (list, tuple)) and all(map(_is_option, self.start_args))
        _require(are_options, "ray.start_args", self.start_args, RAY_ARGS_ALLOWED)
        object.__setattr__(self, "start_args", tuple(self.start_args))
        for option in self.start_args:
            if option.partition("=")[0] in RAY_OPTIONS_OF_OURS:
                raise SpecError(f"ray.start_args: {option!r} is decided by gangrun: leave it out")

    @classmethod
    def of(cls, value: Any) -> Ray | None:
        """`true`, `false`, or a mapping such as {"activate": "source ~/venv/bin/activate"}. Raises SpecError."""
        if value is None or isinstance(value, (Ray, bool)):
            return cls() if value is True else value or None
        if not isinstance(value, Mapping) or not set(value) <= set(cls.__dataclass_fields__):
            raise SpecError(f"ray={value!r}: use true, or a mapping of {', '.join(cls.__dataclass_fields__)}")
        return cls(**value)


@dataclass(frozen=True)
class Resources:
    """What one node of the task needs. `gpu_type` is the user's name for it; Slurm's own is found at run time."""

    cpus: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    ray: Ray | None = None

    def __post_init__(self) -> None:
        _require(self.cpus >= 1, "cpus", self.cpus, "1 or more")
        _require(self.gpus >= 0, "gpus", self.gpus, "0 or more")
        object.__setattr__(self, "ray", Ray.of(self.ray))

    @classmethod
    def from_dict(cls, resources: Mapping[str, float]) -> Resources:
        """`{"CPU": 3.5, "H100": 8}`: fractions of CPUs and GPUs are rounded up to whole ones.

        Raises SpecError for more than one accelerator type and for counts that are no numbers.
        """
        if not isinstance(resources, Mapping):
            raise SpecError(f"resources={resources!r}: use a mapping such as {{'CPU': 4, 'H100': 8}}")
        counts = {_resource(name): _count(name, value) for name, value in resources.items()}
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
    `local` for a machine without Slurm. `warn_signal` (`USR1@120`) reaches every program that many seconds before the
    time limit of a job submitted with `render_sbatch`, and `requeue` says whether Slurm may run that job again after a
    preemption or the loss of a node. `ports` are what the script listens on: one that is taken on a node is told. A
    `one_shot` driver removes itself, its archive and its secrets at the end.
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
    warn_signal: str | None = None
    requeue: bool = True
    ports: tuple[int, ...] = ()
    launcher: str = "srun"
    one_shot: bool = False

    def __post_init__(self) -> None:
        for name, holds, allowed in RULES:
            value = getattr(self, name)
            _require(holds(value), name, value, allowed)
        nodes = len(self.cluster_ips)
        fits = not nodes or self.num_nodes <= nodes
        _require(fits, "num_nodes", self.num_nodes, f"1 to {nodes}, the nodes in cluster_ips")
        for name in ("env_vars", "setup_env_vars", "secrets"):
            object.__setattr__(self, name, checked_variables(getattr(self, name), name))

    @property
    def setup_script(self) -> str | None:
        return _script(self.setup)

    @property
    def run_script(self) -> str | None:
        return _script(self.run)


def checked_variables(variables: Mapping[str, Any], where: str) -> dict[str, str]:
    """Variables as strings, each one fit for execve(2). Raises SpecError."""
    if not isinstance(variables, Mapping):
        raise SpecError(f"{where}={type(variables).__name__!r}: use a mapping of names to values")
    return {name: checked_variable(name, value, f"{where}[{name!r}]") for name, value in variables.items()}


def checked_variable(name: Any, value: Any, where: str) -> str:
    """The value as a string. Raises SpecError, which never shows the value: it may be a secret."""
    problem = protocol.variable_problem(name, value)
    if problem:
        raise SpecError(where + problem)
    return str(value)


def _script(text: str | None) -> str | None:
    return text if text is not None and text.strip() else None


def _resource(name: Any) -> str:
    if not isinstance(name, str) or RESOURCE.fullmatch(name) is None:
        raise SpecError(f"resources: name {name!r} is not allowed: use CPU or an accelerator such as H100")
    return name


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


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise SpecError(f"{name}={value!r}: use {allowed}")


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _is_option(value: object) -> bool:
    return _is_text(value) and str(value).startswith("-")


def _is_path(value: object) -> bool:
    return value is None or (_is_text(value) and value != "")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def is_task_name(value: object) -> bool:
    """It stands in prefixes and in sbatch's --job-name."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _are_nodes(value: object) -> bool:
    entries = value if isinstance(value, tuple) else ()
    return entries == value and len(set(entries)) == len(entries) and all(_is_node(entry) for entry in entries)


def _is_node(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not any(c.isspace() or c in ",\0" for c in value)


def are_ports(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(port, int) and not isinstance(port, bool) and 0 < port <= protocol.LAST_PORT for port in value
    )


PORTS_ALLOWED = f"ports, 1 to {protocol.LAST_PORT}"
WARN_SIGNAL = re.compile(r"USR[12]@[1-9][0-9]{0,4}")
TASK_NAME_ALLOWED = f"1 to {LONGEST_NAME} printable characters"
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("slurm_job_id", lambda value: value is None or _is_file_name(value), "a job id such as '4711'"),
    ("job_id", _is_file_name, "letters, digits and . _ - + only"),
    ("num_nodes", _is_whole, "a whole number of 1 or more"),
    ("cluster_ips", _are_nodes, "addresses or host names, each node once"),
    ("log_dir", lambda value: value is not None and _is_path(value), "a directory"),
    ("run", lambda value: value is None or _is_text(value), "a bash script of Unicode text without NUL"),
    ("setup", lambda value: value is None or _is_text(value), "a bash script of Unicode text without NUL"),
    ("task_name", is_task_name, TASK_NAME_ALLOWED),
    ("container_name", _is_path, "a container's name"),
    ("cluster_home", _is_path, "a directory"),
    ("workdir", _is_path, "a directory"),
    ("python", _is_path, "a Python interpreter"),
    ("grace_s", _is_seconds, "a number of seconds, 0 or more"),
    ("liveness_timeout_s", lambda value: _is_seconds(value) and value > 0, "a number of seconds above 0"),
    (
        "warn_signal",
        lambda value: value is None or WARN_SIGNAL.fullmatch(str(value)) is not None,
        "USR1@120 or USR2@120",
    ),
    ("requeue", lambda value: isinstance(value, bool), "true or false"),
    ("ports", are_ports, PORTS_ALLOWED),
    ("one_shot", lambda value: isinstance(value, bool), "true or false"),
    ("launcher", lambda value: value in ("srun", "local"), "'srun' or 'local'"),
)
