"""config.yaml, and where each value of a launch comes from: flag, task, host, default, in this order."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from codegen.slurm import TWINS
from codegen.spec import Resources, SpecError
from codegen.yamlfile import YamlMapping, read
from executor import protocol
from gangrun import requests
from gangrun.requests import Gpus
from gangrun.task import Slurm, Task

LOCAL = "local"  # the host that is this machine, without ssh
FILE_NAME = "config.yaml"
KEYS = ("default_host", "hosts")
GPU_OPTIONS = TWINS["gpus"]
HOST = re.compile(r"[^\s-]\S*")
DEFAULT_WORKDIR = "~"
SECRET = re.compile(r"token|passw|passphrase|secret|credential|api_?key|private_?key", re.IGNORECASE)
NO_SECRETS = "settings hold no secrets; give it to a job with --secret NAME, from gangrun's own environment"
MEND = "mend that line, or move the file away: every setting is optional"


@dataclass(frozen=True)
class HostSettings:
    """What goes for one host unless a task or a flag says otherwise. All times are seconds."""

    time: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    workdir: str | None = None  # an absolute path on the cluster
    python: str | None = None
    sbatch_args: tuple[str, ...] = ()
    poll_interval: int | None = None  # never ask this host more often
    grace: int | None = None


@dataclass(frozen=True)
class Settings:
    """What config.yaml says; `path` is where it is, or would be."""

    path: str = FILE_NAME
    default_host: str | None = None
    hosts: Mapping[str, HostSettings] = field(default_factory=dict)

    def host(self, name: str | None) -> HostSettings:
        """A host's own settings; None is this machine."""
        return self.hosts.get(name or LOCAL, HostSettings())


class Chosen(NamedTuple):
    """A value and who said so: `--time`, `task.yaml:4`, `config.yaml: hosts.lab.time`, `default`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Request:
    """Everything a launch asks for. `time` and `grace_s` are seconds, `gpus` is a Gpus or None."""

    time: Chosen
    partition: Chosen
    account: Chosen
    qos: Chosen
    constraint: Chosen
    gpus: Chosen
    cpus: Chosen
    memory_gb: Chosen
    sbatch_args: Chosen
    python: Chosen
    workdir: Chosen
    grace_s: Chosen
    requeue: Chosen
    warn_signal: Chosen

    def explain(self) -> list[tuple[str, str, str]]:
        """Name, value and source of everything, as people read them; `-` is what is left to the cluster."""
        return [self._row(entry.name) for entry in fields(self)]

    def twin(self, name: str) -> str | None:
        """The sbatch argument that stands in for `gpus`, `cpus` or `memory_gb`, so that no second one must be given."""
        return requests.named_option(self.sbatch_args.value, *TWINS[name])

    def _row(self, name: str) -> tuple[str, str, str]:
        value, source = getattr(self, name)
        twin = self.twin(name) if name in TWINS else None
        return (name, twin, self.sbatch_args.source) if twin else (name, _shown(name, value), source)


# --- the file


def load(environ: Mapping[str, str]) -> Settings:
    """The settings; a file that is not there says nothing. Raises SpecError with file, line and what to do."""
    path = _path(environ)
    try:
        if _says_nothing(path):
            return Settings(path)
        mapping = read(path, "settings")
    except (FileNotFoundError, NotADirectoryError):
        return Settings(path)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; make it readable for you, or move it away") from error
    except SpecError as error:
        raise SpecError(f"{error}; {MEND}") from error
    _allow(mapping, KEYS)
    default_host = requests.checked_values(mapping, {"default_host": _checked_host}).get("default_host")
    return Settings(path, default_host, _hosts(mapping))


def _path(environ: Mapping[str, str]) -> str:
    """A relative XDG_CONFIG_HOME counts as none, says the XDG Base Directory Specification."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(base if os.path.isabs(base) else os.path.join(home, ".config"), "gangrun", FILE_NAME)


def _says_nothing(path: str) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:
        return all(not line.strip() or line.lstrip().startswith("#") for line in file)


def _hosts(mapping: YamlMapping) -> Mapping[str, HostSettings]:
    nested = _section(mapping, "hosts", "hosts")
    for name in nested.values:
        _checked_name(nested, name)
    return {name: _host(_section(nested, name, f"hosts.{name}")) for name in nested.values}


def _host(nested: YamlMapping) -> HostSettings:
    _allow(nested, tuple(HOST_CHECKS))
    return HostSettings(**requests.checked_values(nested, HOST_CHECKS))


def _section(mapping: YamlMapping, key: str, name: str) -> YamlMapping:
    """A mapping of its own; one that is missing or null is empty. A wrong one is not shown: it may be a secret."""
    if mapping.values.get(key) is None:
        return YamlMapping(mapping.path, name, {}, {}, {})
    if key not in mapping.nested:
        mapping.fail(key, f"{name}: use a mapping of names to values")
    return mapping.nested[key]._replace(name=name)


def _allow(mapping: YamlMapping, keys: tuple[str, ...]) -> None:
    for key in mapping.values:
        if SECRET.search(key):
            mapping.fail(key, f"{key!r} looks like a secret: {NO_SECRETS}")
    mapping.allow(keys)


def _checked_name(hosts: YamlMapping, name: str) -> None:
    try:
        _checked_host(name, "host")
    except SpecError as error:
        hosts.fail(name, str(error))


def _checked_host(value: object, where: str) -> str:
    """Nothing that ssh could take for an option."""
    if not isinstance(value, str) or HOST.fullmatch(value) is None or not value.isprintable():
        raise SpecError(f"{where}={value!r}: use a Host of ~/.ssh/config, or {LOCAL} for this machine")
    return value


def _checked_directory(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise SpecError(f"{where}={value!r}: use the absolute path of a directory on the cluster")
    return value


def _checked_python(value: object, where: str) -> str:
    if not isinstance(value, str) or value[:1] in ("", "-", " ") or not value.isprintable():
        raise SpecError(f"{where}={value!r}: use a Python interpreter of the cluster, such as /usr/bin/python3.11")
    return value


HOST_CHECKS: Mapping[str, Callable[[object, str], Any]] = {
    **{
        key: requests.CHECKS[key]
        for key in ("partition", "account", "qos", "constraint", "time", "sbatch_args", "grace")
    },
    "workdir": _checked_directory,
    "python": _checked_python,
    "poll_interval": requests.parse_duration,
}


# --- the choice


def choose(*candidates: tuple[Any, str], default: Any = None) -> Chosen:
    """The first that is not None."""
    return next(
        (Chosen(*candidate) for candidate in candidates if candidate[0] is not None), Chosen(default, "default")
    )


def resolve(flags: Mapping[str, Any], task: Task, host: str | None, settings: Settings) -> Request:
    """What a launch asks for. `flags` are those of the command line by name, as typed; None was not given.

    Raises SpecError that names the flag.
    """
    unknown = [name for name in flags if name not in FLAG_CHECKS]
    if unknown:
        raise SpecError(f"unknown option {unknown[0]!r}; allowed are {', '.join(sorted(FLAG_CHECKS))}")
    sources = _Sources(flags, task, host, settings)
    request = Request(
        **{name: sources.choose(name) for name in ("time", "partition", "account", "qos", "constraint")},
        gpus=choose(sources.flag("gpus"), sources.of_resources("accelerators", _task_gpus(task))),
        cpus=choose(sources.of_resources("cpus", task.resources.cpus)),
        memory_gb=choose(sources.of_resources("memory", task.memory_gb)),
        sbatch_args=_sbatch_args(sources),
        python=choose(sources.of_host("python")),
        workdir=choose(sources.of_host("workdir"), default=DEFAULT_WORKDIR),
        grace_s=sources.choose("grace", protocol.DEFAULT_GRACE_S),
        requeue=_requeue(sources),
        warn_signal=choose(sources.flag("warn_signal"), sources.of_task("warn_signal")),
    )
    _check_gpus(request)
    return request


class _Sources(NamedTuple):
    """All who have a say in a launch."""

    flags: Mapping[str, Any]
    task: Task
    host: str | None
    settings: Settings

    def choose(self, name: str, default: Any = None) -> Chosen:
        return choose(self.flag(name), self.of_task(name), self.of_host(name), default=default)

    def flag(self, name: str) -> tuple[Any, str]:
        value, option = self.flags.get(name), _option(name, self.flags.get(name))
        return (None if value is None else FLAG_CHECKS[name](value, option)), option

    def of_task(self, name: str) -> tuple[Any, str]:
        return getattr(self.task.slurm, name), self.task.sources.get(name, "task")

    def of_host(self, name: str) -> tuple[Any, str]:
        place = f"{os.path.basename(self.settings.path)}: hosts.{self.host or LOCAL}.{name}"
        return getattr(self.settings.host(self.host), name), place

    def of_resources(self, name: str, value: Any) -> tuple[Any, str]:
        own = "default" if name == "cpus" and value == Resources.cpus else "task"
        return value, self.task.sources.get(name, own)


def options_in(flags: Mapping[str, Any], but: Sequence[str] = ()) -> str:
    """Those that were given, as typed, in a line."""
    given = {name: value for name, value in flags.items() if value not in (None, ()) and name not in but}
    return ", ".join(_option(name, value) for name, value in given.items())


def _option(name: str, value: Any) -> str:
    if name == "sbatch_args":
        return "--sbatch-arg"
    return "--no-requeue" if name == "requeue" and value is False else "--" + name.replace("_", "-")


def _sbatch_args(sources: _Sources) -> Chosen:
    """Those of the host, the task and the flags, in this order: sbatch goes by the last of a kind."""
    levels = [sources.of_host("sbatch_args"), sources.of_task("sbatch_args"), sources.flag("sbatch_args")]
    said = [source for args, source in levels if args]
    return Chosen(requests.joined(*(args or () for args, _ in levels)), ", ".join(said) or "default")


def _requeue(sources: _Sources) -> Chosen:
    value, source = sources.of_task("requeue")
    is_said = "requeue" in sources.task.sources or value is False
    return choose(sources.flag("requeue"), (value if is_said else None, source), default=Slurm.requeue)


def _task_gpus(task: Task) -> Gpus | None:
    wanted = task.resources
    where = task.sources.get("accelerators", "task") + ": accelerators"
    return requests.parse_gpus(f"{wanted.gpu_type or 'gpu'}:{wanted.gpus}", where) if wanted.gpus else None


def _check_gpus(request: Request) -> None:
    """sbatch arguments stand in for the GPUs asked for elsewhere; they must ask for some, and not against a flag."""
    gpus, args, twin = request.gpus, request.sbatch_args, request.twin("gpus")
    if gpus.value is None or twin is None:
        return
    if gpus.source == "--gpus":
        raise SpecError(f"--gpus={str(gpus.value)!r}: {twin} stands in {args.source}; leave one of them out")
    last = {argument.partition("=")[0]: argument for argument in args.value}
    if not any("gpu" in last[name] for name in GPU_OPTIONS if name in last):
        remedy = f"write gpu:{gpus.value} there too"
        raise SpecError(f"sbatch_args: {twin} ({args.source}) would replace {gpus.value} of {gpus.source}; {remedy}")


def _flag_gpus(value: object, where: str) -> Gpus:
    return value if isinstance(value, Gpus) else requests.parse_gpus(value, where)


FLAG_CHECKS: Mapping[str, Callable[[object, str], Any]] = {
    **requests.CHECKS,
    "time": requests.checked_seconds,
    "grace": requests.checked_seconds,
    "gpus": _flag_gpus,
}


def _shown(name: str, value: Any) -> str:
    if value is None or value == ():
        return "-"
    if name == "time":
        return requests.slurm_time(value)
    if name == "grace_s":
        return f"{value:g}s"
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.join(value) if name == "sbatch_args" else str(value)
