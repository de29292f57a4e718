"""The facts of a job group, as its rendered driver states them; which nodes each task gets; who asks for more tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from executor import protocol
from executor.group_pack import Load, Need, Room, counted, divide, names_of, require_own_ports
from executor.group_rooms import least_gpus, rooms_of
from executor.identity import expand_hosts
from executor.protocol import UsageError
from executor.shared import remove_quietly, write_in_place


class Task(NamedTuple):
    """One task of a group, as the rendered driver states it. `component` is its place in a heterogeneous job."""

    name: str
    driver: str  # the file name of its driver, beside ours
    num_nodes: int
    is_primary: bool = True
    grace_s: float = protocol.DEFAULT_GRACE_S  # from being told to end to being ended
    component: int | None = None
    after: Sequence[str] = ()
    ready: dict[str, Any] | None = None
    max_restarts: int = 0
    is_dynamic: bool = False  # asked for by a task of the group
    cpus: int = 1  # of each node, as gpus and memory_mb
    gpus: int = 0
    memory_mb: int = 0
    ports: Sequence[int] = ()

    @property
    def need(self) -> Need:
        return Need(self.name, self.num_nodes, self.cpus, self.gpus, self.memory_mb, self.ports)


class Group(NamedTuple):
    """The facts of one group."""

    slurm_job_id: str
    job_id: str
    name: str
    directory: str
    tasks: Sequence[Task]
    cluster_home: str | None = None
    stops_on_primary_failure: bool = True
    is_parallel: bool = True
    is_shared: bool = False
    spare_nodes: int = 0  # the last ones of the allocation
    inter_connection: bool | None = None
    python: str | None = None


Others = Sequence[tuple[Task, Sequence[str]]]  # with their nodes


class Placement:
    """The nodes of each task: its component's, its part of the allocation, or those it shares."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._all = expand_hosts(os.environ.get(protocol.SLURM_JOB_NODELIST, ""), protocol.SLURM_JOB_NODELIST)
        self._used = 0
        self._lost: set[str] = set()
        self._has_guests = False
        self._rooms: dict[str, Room] | None = None

    def nodes(self) -> list[list[str]]:
        """Of each task. Raises UsageError if there are not enough, or two tasks would meet at one port."""
        tasks = self._group.tasks
        if not (self._group.is_shared and self._group.is_parallel):
            return [self._own(task) for task in tasks]
        needs = [task.need for task in tasks]
        planned = self._all[: len(self._all) - self._group.spare_nodes]
        places = divide(needs, [self._known_rooms().get(node, Room()) for node in planned])
        require_own_ports(needs, places)
        return [[self._all[place] for place in own] for own in places]

    def _own(self, task: Task) -> list[str]:
        own = self._component(task)
        if own is None and not self._group.is_parallel:
            own = self._all[: task.num_nodes]
        elif own is None:
            own = self._all[self._used : self._used + task.num_nodes]
            self._used += task.num_nodes
        if len(own) < task.num_nodes:
            raise UsageError(f"task {task.name} needs {task.num_nodes} nodes, and {len(own)} are left for it")
        return own

    def instead(self, task: Task, nodes: Sequence[str], lost: Sequence[str], others: Others) -> list[str]:
        """These nodes with free ones in place of those that are lost; `others` are the tasks that need theirs.

        Raises UsageError if there are too few.
        """
        known = {*nodes, *self._lost, *lost}
        self._lost.update(lost)
        free = iter([node for node in self._free(task, others) if node not in known])
        found = [next(free, "") if node in lost else node for node in nodes]
        if "" in found:
            count = f"{counted(len(lost), 'node')} of task {task.name}"
            raise UsageError(f"lost {names_of(lost)}, {count}; the group has none left in its place")
        return found

    def _free(self, task: Task, others: Others) -> list[str]:
        if not self._group.is_parallel:
            return self._all
        if self._group.is_shared:
            return [node for node in self._all if self._has_room(node, task, others)]
        busy = {node for _, nodes in others for node in nodes}
        return [node for node in self._component(task) or self._all if node not in busy]

    def _has_room(self, node: str, task: Task, others: Others) -> bool:
        load = Load(self._known_rooms().get(node, Room()))
        there = [other.need for other, nodes in others if node in nodes]
        for need in there:
            load.take(need)
        return load.has_room_for(task.need) and not any({*task.ports} & {*need.ports} for need in there)

    def nodes_for_more(self, task: Task) -> list[str]:
        """Of a heterogeneous job the nodes of the component it belongs to; else none: Slurm chooses free ones."""
        self._has_guests = True
        return self._component(task) or []

    def node_gpus(self, task: Task, nodes: Sequence[str]) -> int:
        """The GPUs that the job has on each node of a task that is not alone there; 0 if it is, or nobody says."""
        return least_gpus(self._known_rooms(), nodes) if self._has_peers else 0

    def sees_others(self, task: Task, nodes: Sequence[str]) -> bool:
        """Whether a step of the task that asks for no number of GPUs would see some of another's."""
        rooms = self._known_rooms() if self._has_peers else {}
        return any(rooms[node].gpus > task.gpus for node in nodes or rooms if node in rooms)

    @property
    def _has_peers(self) -> bool:
        """Whether a task may have another on its nodes."""
        return self._group.is_shared or self._has_guests

    def _known_rooms(self) -> dict[str, Room]:
        if self._rooms is None:
            self._rooms = rooms_of(self._group.slurm_job_id)
        return self._rooms

    def _component(self, task: Task) -> list[str] | None:
        name = protocol.SLURM_JOB_NODELIST_HET_GROUP % task.component
        text = os.environ.get(name) if task.component is not None else None
        return expand_hosts(text, name) if text else None


class Requests:
    """The file in which tasks ask for more tasks. It is there beforehand and grows: each open(2) asks the server."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, protocol.REQUESTS_NAME)
        self._read = 0

    def open(self) -> None:
        """Begin with an empty file: what an earlier attempt was asked for is over."""
        write_in_place(self._path, b"")

    def close(self) -> None:
        """Who asks from now on is told that nobody listens."""
        remove_quietly(self._path)

    def new(self) -> list[dict[str, Any]]:
        """What was asked for since the last look. A line that is not whole yet is left for the next."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [said for said in map(_parsed, whole.splitlines()) if said]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def dynamic_task(said: dict[str, Any]) -> Task:
    """Raises ValueError, KeyError, TypeError for what is no request."""
    return Task(
        name=str(said["name"]),
        driver=str(said["driver"]),
        num_nodes=int(said["num_nodes"]),
        is_primary=False,
        grace_s=float(said["grace_s"]),
        component=said["component"],
        is_dynamic=True,
        gpus=int(said.get("gpus") or 0),
    )
