"""What tasks that share nodes may take of one node: what the group says, what the user asks of Slurm, what is there.

Of the kinds of nodes that the cluster has, the one that takes the fewest for the group counts. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from executor.group_pack import UNKNOWN, Need, Room, pack
from executor.protocol import UsageError
from gangrun.settings import Request

# https://slurm.schedmd.com/sinfo.html#OPT_format: partition, CPUs, megabytes, generic resources, features, state, nodes
SINFO = ("sinfo", "--all", "--exact", "--noheader", "--format=%P|%c|%m|%G|%f|%t|%D")
OUT_OF_SERVICE = ("down", "drain", "drng", "fail", "inval", "unk", "futr", "err")
PLAIN_CONSTRAINT = re.compile(r"[\w.-]+(&[\w.-]+)*")
PER_NODE = re.compile(r"--(?:gres=gpu|gpus-per-node|cpus-per-task|mem)(?:[:=][A-Za-z][\w.-]*)?[:=](\d+)([MGT]?)")
MEGABYTES = {"": 1, "M": 1, "G": 1024, "T": 1024**2}
SIZES = ("cpus", "gpus", "memory_gb")


class Kind(NamedTuple):
    """Nodes that are alike, and how many there are."""

    room: Room
    number: int


class Wish(NamedTuple):
    """Which nodes will do."""

    partition: str | None = None  # several with commas; None is the cluster's default
    constraint: str | None = None
    gpus: str | None = None  # their type, in Slurm's spelling


def room_of(limit: Room, needs: Sequence[Need], asked: Request, wish: Wish, lines: Sequence[str]) -> Room:
    """Of one node; what nobody says has no end. `limit` is the group's own word, `lines` are `SINFO`'s."""
    kinds = [kind._replace(room=_usable(kind.room, limit, asked)) for kind in kinds_of(lines, wish)]
    return best(needs, kinds) if kinds else _usable(Room(), limit, asked)


def best(needs: Sequence[Need], kinds: Sequence[Kind]) -> Room:
    """That of the kind that takes the fewest nodes, if there are so many of it; the largest where none will do."""
    found = [(count > kind.number, count, kind.room) for kind in kinds for count in _nodes(needs, kind.room)]
    return min(found)[-1] if found else max(kind.room for kind in kinds)


def _nodes(needs: Sequence[Need], room: Room) -> Iterator[int]:
    """How many it takes; nothing if a task is larger than a node."""
    try:
        yield 1 + max(node for nodes in pack(needs, room) for node in nodes)
    except UsageError:
        return


def _usable(room: Room, limit: Room, asked: Request) -> Room:
    sizes = [_said(asked.twin(name), size) for name, size in zip(SIZES, room)]
    return Room(*map(min, sizes, limit))


def _said(option: str | None, size: float) -> float:
    """What the user's own sbatch option asks of each node instead; where it asks in another way, nobody knows."""
    if option is None:
        return size
    match = PER_NODE.fullmatch(option)
    if match is None:
        return UNKNOWN
    return int(match.group(1)) * MEGABYTES[match.group(2)] or size  # --mem=0 is all there is


def kinds_of(lines: Sequence[str], wish: Wish) -> list[Kind]:
    """The nodes that will do; none where it cannot be told, as for a constraint of the harder kind."""
    if wish.constraint and not PLAIN_CONSTRAINT.fullmatch(wish.constraint):
        return []
    return [kind for line in lines for kind in _kind(line.strip().split("|"), wish)]


def _kind(words: Sequence[str], wish: Wish) -> Iterator[Kind]:
    from gangrun.explain.nodes import gpus_in, number

    if len(words) != 7:
        return
    partition, cpus, memory_mb, gres, features, state, count = words
    is_meant = partition.rstrip("*") in wish.partition.split(",") if wish.partition else partition.endswith("*")
    has_all = {*(wish.constraint or "").split("&")} - {""} <= {*features.split(",")}
    if is_meant and has_all and not state.startswith(OUT_OF_SERVICE):
        gpus = gpus_in(gres)
        count_of_kind = gpus.get(wish.gpus.lower(), 0) if wish.gpus else sum(gpus.values())
        yield Kind(Room(number(cpus), count_of_kind, number(memory_mb)), number(count))
