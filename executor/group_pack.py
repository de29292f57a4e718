"""Which nodes tasks share: each task's ranks on nodes of their own, on as few nodes as hold them all. Pure.

The same rule plans a launch, by what a node of the cluster has, and divides the allocation, by what its nodes have:
where these are what was asked for, the outcome is the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from executor.protocol import UsageError

UNKNOWN = float("inf")
PORT = re.compile(r":(\d+)")


class Need(NamedTuple):
    """What a task needs on each of its nodes. `ports` are those that it listens on."""

    name: str
    num_nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    memory_mb: int = 0
    ports: Sequence[int] = ()

    @property
    def size(self) -> tuple[int, int, int]:
        """GPUs first: they are what is scarce."""
        return self.gpus, self.cpus, self.memory_mb


class Room(NamedTuple):
    """What tasks may take of a node. What is not known has no end."""

    cpus: float = UNKNOWN
    gpus: float = UNKNOWN
    memory_mb: float = UNKNOWN

    def __str__(self) -> str:
        said = zip(self, (counted(self.cpus, "CPU"), counted(self.gpus, "GPU"), f"{self.memory_mb:g} MB"))
        return ", ".join(words for value, words in said if value != UNKNOWN) or "as much as it takes"


class Load:
    """What is taken of a node by now."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.gpus = self.cpus = self.memory_mb = 0

    @property
    def size(self) -> tuple[int, int, int]:
        return self.gpus, self.cpus, self.memory_mb

    def has_room_for(self, need: Need) -> bool:
        return (
            self.cpus + need.cpus <= self.room.cpus
            and self.gpus + need.gpus <= self.room.gpus
            and self.memory_mb + need.memory_mb <= self.room.memory_mb
        )

    def take(self, need: Need) -> None:
        self.gpus += need.gpus
        self.cpus += need.cpus
        self.memory_mb += need.memory_mb


Nodes = Sequence[Sequence[int]]  # of each task, the places of its nodes in the allocation


def pack(needs: Sequence[Need], room: Room) -> Nodes:
    """On as few nodes as first-fit-decreasing takes, and there as evenly as it goes. Raises UsageError."""
    for need in needs:
        if not Load(room).has_room_for(need):
            raise UsageError(f"task {need.name} needs {_asked(need)} of a node, and a node has {room}")
    most = sum(need.num_nodes for need in needs)  # each task on nodes of its own
    first_fit = _placed(needs, [Load(room) for _ in range(most)], is_even=False)
    assert first_fit is not None
    count = 1 + max(node for nodes in first_fit for node in nodes)
    return _placed(needs, [Load(room) for _ in range(count)], is_even=True) or first_fit


def divide(needs: Sequence[Need], rooms: Sequence[Room]) -> Nodes:
    """On these nodes: as if all were as the smallest, as was planned; else by what each has. Raises UsageError."""
    smallest = Room(*(min(sizes) for sizes in zip(*rooms)))
    for sizes, is_even in itertools.product(([smallest] * len(rooms), rooms), (True, False)):
        found = _placed(needs, [Load(room) for room in sizes], is_even)
        if found is not None:
            return found
    tasks = "; ".join(f"{need.name} {_asked(need)} on {counted(need.num_nodes, 'node')}" for need in needs)
    shown = "; ".join(f"{counted(rooms.count(room), 'node')} with {room}" for room in dict.fromkeys(rooms))
    raise UsageError(f"placement=shared: the tasks do not fit on the allocation's nodes ({shown}): {tasks}")


def _placed(needs: Sequence[Need], loads: Sequence[Load], is_even: bool) -> Nodes | None:
    """The largest task first, those alike in the order of the file; None if one finds no room."""
    found: list[Sequence[int]] = [()] * len(needs)
    for index in sorted(range(len(needs)), key=lambda index: (needs[index].size, needs[index].num_nodes), reverse=True):
        need = needs[index]
        free = [node for node, load in enumerate(loads) if load.has_room_for(need)]
        if is_even:
            free.sort(key=lambda node: loads[node].size)
        if len(free) < need.num_nodes:
            return None
        found[index] = sorted(free[: need.num_nodes])
        for node in found[index]:
            loads[node].take(need)
    return found


def most_on_a_node(nodes: Nodes, amounts: Sequence[int]) -> int:
    """The largest sum that meets on a node; `amounts` are the tasks', in the order of `nodes`."""
    sums: dict[int, int] = {}
    for own, amount in zip(nodes, amounts):
        for node in own:
            sums[node] = sums.get(node, 0) + amount
    return max(sums.values(), default=0)


def require_own_ports(needs: Sequence[Need], nodes: Nodes) -> None:
    """Two tasks with one port on one node would be taken for each other. Raises UsageError that names both."""
    seen: dict[tuple[int, int], str] = {}
    for need, own in zip(needs, nodes):
        for place in ((port, node) for port in dict.fromkeys(need.ports) for node in own):
            other = seen.setdefault(place, need.name)
            if other != need.name:
                raise UsageError(f"task {need.name}: port {place[0]}: {other} has it on the same node; use another")


def names_of(nodes: Iterable[str]) -> str:
    """`n[1-2],m1`, as Slurm writes it."""
    import hostlist

    return str(hostlist.collect_hostlist(list(nodes)))


def counted(number: float, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def _asked(need: Need) -> str:
    memory = [f"{need.memory_mb} MB"] if need.memory_mb else []
    return ", ".join([counted(need.cpus, "CPU"), counted(need.gpus, "GPU"), *memory])


def ports_of(ports: Sequence[int], ready: object) -> tuple[int, ...]:
    """What a task listens on: the ports it says, and the one it is asked at when it is to be ready."""
    wanted = ready if isinstance(ready, dict) else {}
    probed = PORT.search(f":{wanted.get('port') or ''} {wanted.get('http') or ''}")
    return tuple(dict.fromkeys([*ports, *([int(probed.group(1))] if probed else [])]))
