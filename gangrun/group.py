"""A group of tasks that live and end together: its file, in SkyPilot's form, and the same from Python.

    Group("rl", tasks=[trainer, server], primary=["trainer"], termination_delay="30s",
          ready={"server": Ready(port=8000)}, after={"trainer": ["server"]})

The file's first document is the header, which says what goes for the whole; each further document is a task. What a
file says goes through the same checks as what a program says: a program's complaint names the argument, a file's the
file, line and key.

A group is one Slurm job, so what is asked of Slurm stands in the header's `slurm:`, in a task's form. A task of a group
says only what may differ between tasks: `constraint` (its nodes) and `grace` (its programs). The header's are for the
tasks that say none.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, Union

from codegen.spec import SpecError
from codegen.yamlfile import YamlMapping, read_all
from executor.group_pack import UNKNOWN, Room
from executor.protocol import LAST_PORT
from gangrun import requests
from gangrun.task import KEYS, MOST_NODES, Slurm, Task, slurm_of, sources_of

MOST_TASKS = 100
LONGEST_LABEL = 63  # https://www.rfc-editor.org/rfc/rfc1123#page-13
LABEL = re.compile(r"(?![0-9]+$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
LABEL_ALLOWED = "letters, digits and hyphens, no hyphen first or last, not digits alone (it is a part of host names)"
QUOTED = "a text, in quotes where YAML takes it for something else"
LOOPBACK = "localhost"  # https://www.rfc-editor.org/rfc/rfc6761#section-6.3: all names below it are this machine

PARALLEL, SERIAL = "parallel", "serial"
STOP, CONTINUE = "stop", "continue"
SEPARATE, SHARED = "separate", "shared"
DEFAULT = "default"

HEADER_KEYS = (
    "name", "execution", "primary_tasks", "termination_delay", "inter_connection", "on_primary_failure", "placement",
    "node", "spare_nodes", "slurm",
)  # fmt: skip
NODE_KEYS = ("cpus", "gpus", "memory")
TASK_KEYS = ("ready", "after", "max_restarts")
READY_KEYS = ("port", "http", "log", "command", "timeout")
ARGUMENTS = {
    "primary_tasks": "primary",
    "timeout": "timeout_s",
    "memory": "memory_gb",
}  # a program's words where they are not the file's
FILE_KEYS = {"primary": "primary_tasks", "ready.timeout_s": "ready.timeout", "node.memory_gb": "node.memory"}
OWN_SLURM = ("constraint", "grace")
PARALLEL_ONLY: Mapping[str, Any] = {  # what says nothing of a serial group
    "primary": ((), []), "termination_delay": (None,), "inter_connection": (None,),
    "on_primary_failure": (STOP,), "placement": (SEPARATE,), "node": (None,),
}  # fmt: skip

DELAY = re.compile(r"([0-9]{1,12})([smhdw]?)")
DELAY_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
DELAY_FORMS = "a number of seconds, or 30s, 5m, 1h, 1d"
URL = re.compile(r"(?:http://[A-Za-z0-9._-]+)?:([0-9]{1,5})(?:/[!-~]*)?")

Delay = Union[int, str]
Nested = TypeVar("Nested")  # what a mapping of the file becomes


class GroupError(SpecError):
    """What is wrong with a group: `key` of it, or of its task number `index`."""

    def __init__(self, key: str, said: str, index: int | None = None, task: str = "") -> None:
        super().__init__(("" if index is None else f"task {task!r}: ") + key + said)
        self.key, self.said, self.index = key, said, index

    def at(self, document: YamlMapping) -> NoReturn:
        """The same with file and line; `slurm.time` is the key `time` in the section `slurm`."""
        key = FILE_KEYS.get(self.key, self.key)
        section, _, inner = key.partition(".")
        nested = document.nested.get(section)
        if nested is not None and inner in nested.lines:
            nested.fail(inner, key + self.said)
        document.fail(section, key + self.said)


@dataclass(frozen=True)
class Ready:
    """How to tell that a task is ready: exactly one of port, http, log and command.

    `http` is ":8000/health" or "http://host:8000/health"; `log` a regular expression for the task's output; `command` a
    bash script that ends with exit code 0. A task that is not ready after `timeout_s` has failed; a program may write
    "10m", too. Raises SpecError.
    """

    port: int | None = None
    http: str | None = None
    log: str | None = None
    command: str | None = None
    timeout_s: int = 600

    def __post_init__(self) -> None:
        given = [name for name in PROBES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise GroupError("ready", f": use exactly one of {', '.join(PROBES)}; found {found}")
        name, value = self.probe
        allowed = PROBES[name](value)
        if allowed:
            raise GroupError(f"ready.{name}", f"={value!r}: use {allowed}")
        timeout_s = _seconds(self.timeout_s)
        if not timeout_s:
            raise GroupError("ready.timeout_s", f"={self.timeout_s!r}: use {DELAY_FORMS}, more than 0")
        object.__setattr__(self, "timeout_s", timeout_s)

    @property
    def probe(self) -> tuple[str, Any]:
        """Its kind and its value: ("port", 8000)."""
        return next((name, getattr(self, name)) for name in PROBES if getattr(self, name) is not None)

    def to_dict(self) -> dict[str, Any]:
        """What is said, and nothing else: {"port": 8000, "timeout_s": 600}."""
        name, value = self.probe
        return {name: value, "timeout_s": self.timeout_s}


@dataclass(frozen=True)
class Node:
    """What tasks that share nodes may take of one, at most; None is all there is. Raises SpecError."""

    cpus: int | None = None
    gpus: int | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        _check_size("cpus", self.cpus, _is_count(self.cpus) and self.cpus != 0, "a whole number, 1 or more")
        _check_size("gpus", self.gpus, _is_count(self.gpus), "a whole number, 0 or more")
        _check_size("memory_gb", self.memory_gb, _is_amount(self.memory_gb), "a number of gigabytes")

    @property
    def room(self) -> Room:
        sizes = self.cpus, self.gpus, None if self.memory_gb is None else self.memory_gb * 1024
        return Room(*(UNKNOWN if size is None else size for size in sizes))


@dataclass(frozen=True)
class Member:
    """A task in its group. The task's `slurm` is complete: it holds what the header asks for, too.

    `termination_delay_s` is the time from TERM to KILL. None where the group says none: then it is the task's grace, as
    for any task that is told to end.
    """

    task: Task
    is_primary: bool = True
    termination_delay_s: int | None = None
    ready: Ready | None = None
    after: tuple[str, ...] = ()
    max_restarts: int = 0

    @property
    def name(self) -> str:
        return self.task.name


@dataclass(frozen=True)
class Group:
    """Tasks that start together (`execution` parallel) or one after the other (serial), as one Slurm job.

    The group ends when its last primary ends; without `primary` all tasks are. Then the others are told to end and have
    their `termination_delay` for it: one for all, or {"default": "30s", "replay-buffer": "1m"}; a primary has one only
    if it is named there. `on_primary_failure` is stop or continue. With `inter_connection` True there are host names or
    no start; None takes what can be had. With `placement` shared, tasks share nodes, of which they take at most
    `node`. `spare_nodes` are asked for besides, for tasks that join and in place of lost ones, which the group then
    outlives. `ready`, `after` and `max_restarts` go by task name; a task starts when all that it is `after` are ready.

    `members` is what comes of it, in the order of `tasks`. Raises SpecError for what does not fit together.
    """

    name: str
    tasks: Sequence[Task]
    primary: Sequence[str] = ()
    termination_delay: Delay | Mapping[str, Delay] | None = None
    execution: str = PARALLEL
    inter_connection: bool | None = None
    on_primary_failure: str = STOP
    placement: str = SEPARATE
    node: Node | None = None
    spare_nodes: int = 0
    slurm: Slurm = field(default_factory=Slurm)
    ready: Mapping[str, Ready] = field(default_factory=dict)
    after: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    max_restarts: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    members: tuple[Member, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for check in CHECKS:
            check(self)
        for name in ("tasks", "primary"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "members", tuple(_member(self, task) for task in self.tasks))
        _check_spare(self)

    @classmethod
    def from_file(cls, path: str, overrides: Mapping[str, str] | None = None) -> Group:
        """Read a group's file; `overrides` replace or add `envs` of every task. Raises SpecError with file and line."""
        header, *documents = _documents(path)
        try:
            return cls(**_of_header(header), **_of_tasks(documents, overrides or {}))
        except GroupError as error:
            error.at(header if error.index is None else documents[error.index])

    @property
    def is_parallel(self) -> bool:
        return self.execution == PARALLEL

    @property
    def stops_on_primary_failure(self) -> bool:
        return self.on_primary_failure == STOP

    @property
    def num_nodes(self) -> int:
        """The nodes of all tasks, or of the widest one, where they take turns or may share them; and spare ones."""
        counts = [task.num_nodes for task in self.tasks]
        return self.spare_nodes + (sum if self.is_parallel and self.placement == SEPARATE else max)(counts)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all tasks ask for the same kind of node: equal resources, memory and constraint."""
        first, *others = [_needs(member.task) for member in self.members]
        return all(needs == first for needs in others)

    @property
    def is_heterogeneous(self) -> bool:
        """Whether each task's nodes are a component of their own."""
        return self.is_parallel and self.placement == SEPARATE and not self.is_homogeneous

    def member(self, which: str | int) -> Member:
        """By name or by index; "0" is an index, as no task has such a name. Raises SpecError that shows the tasks."""
        for index, member in enumerate(self.members):
            if str(which) in (member.name, str(index)):
                return member
        shown = ", ".join(f"{index} {member.name}" for index, member in enumerate(self.members))
        raise SpecError(f"no task {str(which)!r} in group {self.name}; its tasks are {shown}")


def is_group_file(path: str) -> bool:
    """Whether a file holds more than one YAML document. Reads lines, not YAML; False for what cannot be read."""
    has_begun = False
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            for line in file:
                is_marker = line.startswith("---") and not line[3:4].strip()  # in no text can it stand in column 0
                if is_marker and has_begun:
                    return True
                has_begun = has_begun or is_marker or not (line.isspace() or line.lstrip().startswith(("#", "%")))
    except OSError:
        pass  # who reads it as a task says why
    return False


def _member(group: Group, task: Task) -> Member:
    name, is_primary = task.name, not group.primary or task.name in group.primary
    return Member(
        task=_complete(group, task),
        is_primary=is_primary,
        termination_delay_s=_seconds(_delays(group).get(name, None if is_primary else _delays(group).get(DEFAULT))),
        ready=group.ready.get(name),
        after=tuple(dict.fromkeys(_names(group.after.get(name, ())))),
        max_restarts=group.max_restarts.get(name, 0),
    )


def _complete(group: Group, task: Task) -> Task:
    own = {key: getattr(task.slurm, key) for key in OWN_SLURM if getattr(task.slurm, key) is not None}
    slurm = dataclasses.replace(group.slurm, **own)
    return dataclasses.replace(task, slurm=slurm, sources={**group.sources, **task.sources})


def _delays(group: Group) -> Mapping[str, Delay]:
    said = group.termination_delay
    if said is None or isinstance(said, Mapping):
        return said or {}
    return {DEFAULT: said}


def _seconds(value: object) -> int | None:
    """SkyPilot's times (30, '30s', '1W') and ours (1m30s), 0 included. None for anything else."""
    match = DELAY.fullmatch(value.lower()) if isinstance(value, str) else None
    if match:
        value = int(match.group(1)) * DELAY_UNITS[match.group(2)]
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value <= requests.LONGEST_S else None
    try:
        return requests.parse_duration(value, "")
    except SpecError:
        return None


def _names(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _needs(task: Task) -> tuple[object, ...]:
    return task.resources, task.memory_gb, task.slurm.constraint


# --- the file


def _documents(path: str) -> list[YamlMapping]:
    """The header and the tasks, each with keys of its own kind and with a name."""
    documents = read_all(path, "group's header", "task")
    if not documents:
        raise SpecError(f"{path}:1: the file is empty; a group is a header and its tasks, with --- between them")
    header, *tasks = documents
    _check_header(header)
    for task in tasks:
        _check_task(task, header.line)
    return documents


def _check_header(header: YamlMapping) -> None:
    for key in header.values:
        if key in (*KEYS, *TASK_KEYS) and key not in HEADER_KEYS:
            allowed = ", ".join(HEADER_KEYS)
            header.fail(key, f"{key} belongs to a task; a group's file begins with a header, which has {allowed}")
    header.allow(HEADER_KEYS)
    if header.values.get("name") is None:
        header.fail("name", "a group's header needs a name")


def _check_task(task: YamlMapping, header_line: int) -> None:
    for key in task.values:
        if key in HEADER_KEYS and key not in KEYS:
            task.fail(key, f"{key} belongs to the header, the first document (line {header_line}); this one is a task")
    if task.values.get("name") is None:
        task.fail("name", "a task of a group needs a name")


def _of_header(header: YamlMapping) -> dict[str, Any]:
    said = {ARGUMENTS.get(key, key): value for key, value in header.values.items() if value is not None}
    said["node"] = _node(header)
    return {"execution": SERIAL, **said, "slurm": slurm_of(header), "sources": sources_of(header)}


def _of_tasks(documents: Sequence[YamlMapping], overrides: Mapping[str, str]) -> dict[str, Any]:
    tasks = [Task.from_mapping(document, overrides, TASK_KEYS) for document in documents]
    said: dict[str, dict[str, Any]] = {key: {} for key in TASK_KEYS}
    for task, document in zip(tasks, documents):
        for key in TASK_KEYS:
            if document.values.get(key) is not None:
                said[key][task.name] = _ready(document) if key == "ready" else document.values[key]
    return {"tasks": tasks, **said}


def _node(header: YamlMapping) -> Node | None:
    if header.values.get("node") is None:
        return None
    return _from_mapping(header, "node", Node, NODE_KEYS, "{cpus: 64, gpus: 8}")


def _ready(document: YamlMapping) -> Ready:
    return _from_mapping(document, "ready", Ready, READY_KEYS, "{port: 8000}")


def _from_mapping(document: YamlMapping, key: str, kind: type[Nested], keys: Sequence[str], example: str) -> Nested:
    nested = document.nested.get(key)
    if nested is None:
        document.fail(key, f"{key}={document.values[key]!r}: use a mapping such as {example}")
    nested.allow(keys)
    try:
        return kind(**{ARGUMENTS.get(name, name): value for name, value in nested.values.items() if value is not None})
    except GroupError as error:
        error.at(document)


# --- what has to hold, whoever says it


def _check_words(group: Group) -> None:
    for key, allowed in WORDS.items():
        value = getattr(group, key)
        if not isinstance(value, str) or value not in allowed:
            raise GroupError(key, f"={value!r}: use {' or '.join(allowed)}")
    if not isinstance(group.inter_connection, (bool, type(None))):
        raise GroupError("inter_connection", f"={group.inter_connection!r}: use true or false")


def _check_node(group: Group) -> None:
    if not isinstance(group.node, (Node, type(None))):
        raise GroupError("node", f"={group.node!r}: use a Node")
    if group.node and group.placement != SHARED:
        raise GroupError("node", ": only tasks that share nodes are packed; use placement: shared, or leave this out")


def _check_tasks(group: Group) -> None:
    tasks = group.tasks
    if not isinstance(tasks, (list, tuple)) or not all(isinstance(task, Task) for task in tasks):
        raise GroupError("tasks", ": use a list of tasks")  # not their text: it holds secrets
    if not 1 <= len(tasks) <= MOST_TASKS:
        raise GroupError("tasks", f": a group has 1 to {MOST_TASKS} tasks, found {len(tasks)}")


def _check_names(group: Group) -> None:
    problem = _label_problem(group.name, LONGEST_LABEL)
    if problem or group.name.lower() == LOOPBACK:
        raise GroupError("name", f"={group.name!r}: " + (problem or "all host names in it would be this machine's own"))
    seen: dict[str, str] = {}
    for index, task in enumerate(group.tasks):
        longest = LONGEST_LABEL - len(f"-{task.num_nodes - 1}")
        problem = _label_problem(task.name, longest) or _taken(task.name, seen.get(task.name.lower()))
        if problem:
            _fail(group, index, "name", f"={task.name!r}: {problem}")
        seen[task.name.lower()] = task.name


def _label_problem(name: object, longest: int) -> str:
    if not isinstance(name, str):
        return f"use {QUOTED}: {LABEL_ALLOWED}"
    if not LABEL.fullmatch(name):
        return f"use {LABEL_ALLOWED}"
    return f"use at most {longest} characters (it is a part of host names)" if len(name) > longest else ""


def _taken(name: str, by: str | None) -> str:
    if by is None:
        return ""
    return "two tasks have this name" if by == name else f"{by} is the same in host names, which have no capitals"


def _check_serial(group: Group) -> None:
    if group.is_parallel:
        return
    said = ": execution is serial, as without it, so tasks run one after the other; use parallel, or leave this out"
    for key, nothing in PARALLEL_ONLY.items():
        if getattr(group, key) not in nothing:
            raise GroupError(key, said)
    for index, task in enumerate(group.tasks):
        for key in ("ready", "after"):
            if task.name in getattr(group, key):
                _fail(group, index, key, said)


def _check_primary(group: Group) -> None:
    value = group.primary
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise GroupError("primary", f"={value!r}: use a list of task names")
    _check_known(group, "primary", value)


def _check_delays(group: Group) -> None:
    delays, is_one = _delays(group), not isinstance(group.termination_delay, Mapping)
    for name, value in delays.items():
        key = "termination_delay" if is_one else f"termination_delay.{name}"
        if _seconds(value) is None:
            raise GroupError(key, f"={value!r}: use {DELAY_FORMS}")
        if name != DEFAULT:
            _check_known(group, key, [name], f", or {DEFAULT} for all others")
    if not is_one and DEFAULT in delays and DEFAULT in _indices(group):
        raise GroupError(f"termination_delay.{DEFAULT}", ": a task is called so, too; give it another name")


def _check_slurm(group: Group) -> None:
    nothing = Slurm()
    if not isinstance(group.slurm, Slurm):
        raise GroupError("slurm", f"={group.slurm!r}: use a Slurm")
    for index, task in enumerate(group.tasks):
        for key in requests.CHECKS:
            is_said = getattr(task.slurm, key) != getattr(nothing, key) or key in task.sources
            if is_said and key not in OWN_SLURM:
                said = ": a group is one Slurm job; say it in the group's own slurm (of a file: the header's)"
                _fail(group, index, f"slurm.{key}", said)


def _check_by_task(group: Group) -> None:
    for key, (holds, allowed) in BY_TASK.items():
        said = getattr(group, key)
        if not isinstance(said, Mapping):
            raise GroupError(key, f"={said!r}: use a mapping of task names")
        _check_known(group, key, said)
        for name, value in said.items():
            if not holds(value):
                _fail(group, _indices(group)[name], key, f"={value!r}: use {allowed}")


def _check_spare(group: Group) -> None:
    if not _is_count(group.spare_nodes):
        raise GroupError("spare_nodes", f"={group.spare_nodes!r}: use a whole number, 0 or more")
    if group.spare_nodes > MOST_NODES:
        raise GroupError("spare_nodes", f"={group.spare_nodes}: no Slurm has more than {MOST_NODES} nodes")
    if group.spare_nodes and group.is_heterogeneous:
        raise GroupError(
            "spare_nodes",
            f"={group.spare_nodes}: would be one task's, as all need different nodes; use placement: shared",
        )


def _check_after(group: Group) -> None:
    for name, index in _indices(group).items():
        for other in _names(group.after.get(name, ())):
            _check_known(group, "after", [other], index=index)
            if other == name:
                _fail(group, index, "after", f": {name} cannot wait for itself")
            if other not in group.ready:
                _fail(group, index, "after", f": {other} does not say when it is ready; give it `ready`, {READY_SUCH}")
    circle = _circle({name: _names(group.after.get(name, ())) for name in _indices(group)})
    if circle:
        said = f": {' -> '.join(circle)} is a circle; none of them could start"
        _fail(group, _indices(group)[circle[0]], "after", said)


def _circle(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Tasks that wait for one another, the first one again at the end; none if all can start."""
    waiting = dict(after)
    while True:
        free = [name for name, others in waiting.items() if not any(other in waiting for other in others)]
        if not free:
            break
        for name in free:
            del waiting[name]
    path = list(waiting)[:1]
    while path and path[-1] not in path[:-1]:
        path.append(next(other for other in waiting[path[-1]] if other in waiting))
    return path[path.index(path[-1]) :] if path else []


def _indices(group: Group) -> dict[str, int]:
    return {task.name: index for index, task in enumerate(group.tasks)}


def _check_known(group: Group, key: str, names: Any, others: str = "", index: int | None = None) -> None:
    known = _indices(group)
    for name in names:
        if name not in known:
            task = "" if index is None else group.tasks[index].name
            raise GroupError(key, f": there is no task {name!r}; use {', '.join(known)}{others}", index, task)


def _fail(group: Group, index: int, key: str, said: str) -> NoReturn:
    raise GroupError(key, said, index, group.tasks[index].name)


def _are_names(value: object) -> bool:
    return isinstance(value, (str, list, tuple)) and all(isinstance(name, str) for name in value)


def _check_size(name: str, value: object, is_right: bool, allowed: str) -> None:
    if value is not None and not is_right:
        raise GroupError(f"node.{name}", f"={value!r}: use {allowed}")


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < UNKNOWN


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# --- probes: what would be right, or nothing


def _port(value: object) -> str:
    is_port = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LAST_PORT
    return "" if is_port else f"a port, 1 to {LAST_PORT}"


def _http(value: object) -> str:
    match = URL.fullmatch(value) if isinstance(value, str) and "#" not in value else None
    is_url = match is not None and not _port(int(match.group(1)))
    return "" if is_url else "':8000/health' or 'http://host:8000/health'"


def _log(value: object) -> str:
    try:  # as what it is looked for in: bytes
        return "" if isinstance(value, str) and value and re.compile(os.fsencode(value)) else "a regular expression"
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        return f"a regular expression ({error})"


def _command(value: object) -> str:
    is_script = isinstance(value, str) and value.strip() and "\0" not in value
    return "" if is_script else "a bash script"


PROBES: Mapping[str, Callable[[object], str]] = {"port": _port, "http": _http, "log": _log, "command": _command}
READY_SUCH = "such as {port: 8000}"
WORDS: Mapping[str, tuple[str, ...]] = {
    "execution": (PARALLEL, SERIAL),
    "on_primary_failure": (STOP, CONTINUE),
    "placement": (SEPARATE, SHARED),
}
BY_TASK: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "ready": (lambda value: isinstance(value, Ready), "a Ready"),
    "after": (_are_names, "a list of task names"),
    "max_restarts": (_is_count, "a whole number, 0 or more"),
}
CHECKS: tuple[Callable[[Group], None], ...] = (
    _check_words, _check_tasks, _check_names, _check_slurm, _check_serial, _check_node, _check_primary, _check_delays,
    _check_by_task, _check_after,
)  # fmt: skip
