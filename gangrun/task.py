"""A task file, in SkyPilot's form: read, checked, with the file and line of whatever is wrong."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen.spec import TASK_NAME_ALLOWED, Job, Resources, SpecError, checked_variable, is_task_name
from codegen.yamlfile import YamlMapping, read
from executor.protocol import LAST_PORT
from gangrun import requests

KEYS = ("name", "num_nodes", "resources", "envs", "secrets", "workdir", "setup", "run", "ports", "slurm")
SECONDS = ("time", "grace")
MOST_NODES = 65536  # that sbatch takes 4294967297 for 1 without a word has been measured
RESOURCE_KEYS = ("cpus", "memory", "accelerators", "infra", "ports", "ray")
INFRA = "slurm"  # SkyPilot's word for where a task runs
ACCELERATORS = re.compile(r"([A-Za-z][\w.-]*)(?::(\d+))?")
ACCELERATOR = re.compile(r"[A-Za-z][\w.-]*")
RESERVED = ("CPU", "memory", "mem")
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\+?")
PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
PORTS_ALLOWED = f"a port or a list of ports, 1 to {LAST_PORT}; 8000-8003 are four"
MEMORY = re.compile(r"(\d+(?:\.\d+)?)(?:[gG][bB]?)?\+?")


@dataclass(frozen=True)
class Slurm:
    """What a task asks of Slurm beyond its resources; what is None is left to the host's settings and the cluster.

    `time` and `grace` are seconds. Raises SpecError for what sbatch would not take, or not as meant.
    """

    time: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch_args: tuple[str, ...] = ()
    requeue: bool = True
    warn_signal: str | None = None
    grace: int | None = None

    def __post_init__(self) -> None:
        for name, check in {**requests.CHECKS, **dict.fromkeys(SECONDS, requests.checked_seconds)}.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(value, f"slurm.{name}"))


@dataclass(frozen=True)
class Task:
    """One program on `num_nodes` nodes: what a task file says. `memory_gb` is per node.

    `ports` are what its scripts listen on: one that is taken on a node is told when they start.
    `sources` tells where the file asks for what: {"time": "task.yaml:4"}.
    """

    name: str = "task"
    num_nodes: int = 1
    resources: Resources = field(default_factory=Resources)
    memory_gb: float | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    setup: str | None = None
    run: str | None = None
    ports: tuple[int, ...] = ()
    slurm: Slurm = field(default_factory=Slurm)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_file(cls, path: str, overrides: Mapping[str, str] | None = None) -> Task:
        """Read a task file; `overrides` replace or add `envs`. Raises SpecError with file, line and key."""
        return cls.from_mapping(read(path, "task"), overrides)

    @classmethod
    def from_mapping(
        cls, mapping: YamlMapping, overrides: Mapping[str, str] | None = None, others: Sequence[str] = ()
    ) -> Task:
        """What a task file or a document of a group says; `others` are keys that somebody else reads."""
        mapping.allow((*KEYS, *others))
        nodes = mapping.get("num_nodes", int, "a whole number of 1 or more", 1)
        if nodes < 1:
            mapping.fail("num_nodes", "num_nodes=%d: use a whole number of 1 or more" % nodes)
        if nodes > MOST_NODES:
            mapping.fail("num_nodes", f"num_nodes={nodes}: no Slurm has more than {MOST_NODES} nodes")
        return cls(
            name=_name(mapping),
            num_nodes=nodes,
            resources=_resources(mapping),
            memory_gb=_memory_gb(mapping),
            envs=_variables(mapping, "envs", overrides or {}),
            secrets=_variables(mapping, "secrets", {}),
            workdir=mapping.get("workdir", str, "a directory"),
            setup=mapping.get("setup", str, "a bash script"),
            run=mapping.get("run", str, "a bash script"),
            ports=_ports(mapping),
            slurm=slurm_of(mapping),
            sources=sources_of(mapping),
        )

    def job(self, **own: Any) -> Job:
        """What a driver is made of; `own` is what the place says, in Job's words. Raises SpecError."""
        said = {
            "num_nodes": self.num_nodes, "run": self.run, "setup": self.setup, "task_name": self.name,
            "resources": self.resources, "env_vars": self.envs, "setup_env_vars": self.envs, "secrets": self.secrets,
            "ports": self.ports,
        }  # fmt: skip
        return Job(**{**said, **own})

    def workdir_here(self) -> str:
        """Its work directory on this machine. Raises SpecError if it is none."""
        path = os.path.abspath(os.path.expanduser(self.workdir or "."))
        if not os.path.isdir(path):
            raise SpecError(f"workdir={self.workdir!r}: {path} is not a directory")
        return path


def _name(mapping: YamlMapping) -> str:
    name = str(mapping.get("name", (str, int), "a text", "task"))
    if not is_task_name(name):
        mapping.fail("name", f"name={name!r}: use {TASK_NAME_ALLOWED}")
    return name


def _resources(mapping: YamlMapping) -> Resources:
    nested = _nested(mapping, "resources")
    if nested is None:
        return Resources()
    nested.allow(RESOURCE_KEYS)
    infra = nested.get("infra", str, INFRA)
    if infra not in (None, INFRA):
        nested.fail("infra", f"infra={infra!r}: gangrun runs tasks on Slurm; use {INFRA}, or leave it out")
    counts: dict[str, float] = {"CPU": _amount(nested, "cpus", AMOUNT, "a number such as 4 or '4+'") or 1}
    counts.update(_accelerators(nested))
    key = "accelerators"
    try:
        needs = Resources.from_dict(counts)
        key = "ray"
        return dataclasses.replace(needs, ray=nested.values.get(key))
    except SpecError as error:
        nested.fail(key, str(error))


def _accelerators(nested: YamlMapping) -> Mapping[str, float]:
    value = nested.values.get("accelerators")
    if value is None:
        return {}
    if isinstance(value, dict):
        if not all(ACCELERATOR.fullmatch(str(name)) and str(name) not in RESERVED for name in value):
            nested.fail("accelerators", f"accelerators={value!r}: use one name and a count such as {{H100: 8}}")
        return value
    match = ACCELERATORS.fullmatch(str(value))
    if match is None:
        nested.fail("accelerators", f"accelerators={value!r}: use a name and a count such as H100:8")
    return {match.group(1): int(match.group(2) or 1)}


def slurm_of(mapping: YamlMapping) -> Slurm:
    """Its `slurm` section. Raises SpecError with file, line and key."""
    nested = _nested(mapping, "slurm")
    if nested is None:
        return Slurm()
    nested.allow(tuple(requests.CHECKS))
    return Slurm(**requests.checked_values(nested, requests.CHECKS))


def sources_of(mapping: YamlMapping) -> Mapping[str, str]:
    """Where it asks for what: {"time": "task.yaml:4"}."""
    sections = [mapping.nested[key] for key in ("resources", "slurm") if key in mapping.nested]
    return {key: f"{mapping.path}:{line}" for section in sections for key, line in section.lines.items()}


def _memory_gb(mapping: YamlMapping) -> float | None:
    nested = _nested(mapping, "resources")
    return None if nested is None else _amount(nested, "memory", MEMORY, "gigabytes such as 32, '32+' or 32GB")


def _ports(mapping: YamlMapping) -> tuple[int, ...]:
    """Of the task, or in SkyPilot's place, its resources."""
    nested = _nested(mapping, "resources")
    said = [(one, one.values["ports"]) for one in (mapping, nested) if one and one.values.get("ports") is not None]
    ranges = [_port_range(one, part) for one, value in said for part in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(port for ports in ranges for port in ports))


def _port_range(mapping: YamlMapping, value: object) -> range:
    is_text = isinstance(value, (int, str)) and not isinstance(value, bool)
    match = PORTS.fullmatch(str(value)) if is_text else None
    first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 0 < first <= last <= LAST_PORT:
        mapping.fail("ports", f"ports={value!r}: use {PORTS_ALLOWED}")
    return range(first, last + 1)


def _amount(nested: YamlMapping, key: str, form: re.Pattern[str], allowed: str) -> float | None:
    value = nested.get(key, (str, int, float), allowed)
    if value is None:
        return None
    match = form.fullmatch(str(value))
    if match is None or float(match.group(1)) <= 0:
        nested.fail(key, f"{key}={value!r}: use {allowed}")
    return float(match.group(1))


def _variables(mapping: YamlMapping, key: str, overrides: Mapping[str, str]) -> Mapping[str, str]:
    nested = _nested(mapping, key)
    own = {name: value for name, value in (nested.values if nested else {}).items() if name not in overrides}
    result = {name: _variable(nested or mapping, key, name, value) for name, value in own.items()}
    for name, value in overrides.items():
        result[name] = checked_variable(name, value, f"--env {name!r}")
    return result


def _variable(nested: YamlMapping, key: str, name: str, value: Any) -> str:
    if value is None and key == "secrets":
        value = os.environ.get(name)  # the way that shows it to nobody
    if value is None:
        where = "in gangrun's own environment" if key == "secrets" else f"with --env {name}=VALUE"
        nested.fail(name, f"{key}: {name} has no value; give one here or {where}")
    try:
        return checked_variable(name, value, f"{key}[{name!r}]")
    except SpecError as error:
        nested.fail(name, str(error))


def _nested(mapping: YamlMapping, key: str) -> YamlMapping | None:
    if mapping.values.get(key) is None:
        return None
    if key not in mapping.nested:
        shown = "" if key == "secrets" else f"={mapping.values[key]!r}"
        mapping.fail(key, f"{key}{shown}: use a mapping")
    return mapping.nested[key]
