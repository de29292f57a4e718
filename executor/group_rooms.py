"""What a job has of each of its nodes, in Slurm's words: the only ones that know all of them, of whatever size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from executor import slurm_commands
from executor.group_pack import UNKNOWN, Room
from executor.identity import expand_hosts

# https://slurm.schedmd.com/scontrol.html#OPT_details: Nodes=n[1-2] CPU_IDs=60-63 Mem=2000 GRES=gpu:h100:3(IDX:0-2)
LINE = re.compile(r"^\s*Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?", re.MULTILINE)
GPUS = re.compile(r"(?:^|,)gpu(?::[^:(,]+)?:(\d+)\(")


def rooms_of(slurm_job_id: str) -> dict[str, Room]:
    """By node; empty where Slurm does not say."""
    text = slurm_commands.output_of(["scontrol", "show", "job", "--details", slurm_job_id]) or ""
    return {node: room for line in LINE.findall(text) for node, room in _read(*line)}


def least_gpus(rooms: dict[str, Room], nodes: Sequence[str]) -> int:
    """The GPUs that the job has on each of these nodes, of all if none is named."""
    known = [rooms[node] for node in nodes or rooms if node in rooms]
    return int(min((room.gpus for room in known), default=0))


def _read(nodes: str, cpu_ids: str, memory_mb: str, gres: str) -> Iterator[tuple[str, Room]]:
    gpus = sum(int(count) for count in GPUS.findall(gres))
    room = Room(_count(cpu_ids), gpus, float(memory_mb) or UNKNOWN)  # 0: the site does not count memory
    return ((node, room) for node in expand_hosts(nodes))


def _count(ranges: str) -> int:
    """`0-3,60` -> 5."""
    ends = [part.partition("-") for part in ranges.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
