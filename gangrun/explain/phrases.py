"""Numbers, times and requests in the words of an explanation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from gangrun.explain.nodes import Request

LISTED = 5


def asked_words(request: Request) -> str:
    """`2 nodes with 8 GPUs each`."""
    nodes = counted(request.nodes, "whole node" if request.is_exclusive else "node")
    if request.total_gpus:
        return f"{gpus_words(request.total_gpus, request.gpu_type)} on {nodes}"
    told = [gpus_words(request.gpus, request.gpu_type)] if request.gpus else []
    told += [f"{request.cpus} CPUs"] if request.cpus > 1 else []
    told += [memory_words(request.memory_mb)] if request.memory_mb >= 1024 else []
    return f"{nodes} with {', '.join(told)}{' each' if request.nodes > 1 else ''}" if told else nodes


def gpu_nodes_words(request: Request) -> str:
    """`4 nodes with 2 GPUs each`: the rest as it was."""
    return asked_words(Request(nodes=request.nodes, gpus=request.gpus, gpu_type=request.gpu_type))


def gpus_words(count: int, kind: str) -> str:
    return counted(count, f"{kind} GPU" if kind else "GPU")


def memory_words(mb: int) -> str:
    return f"{mb / 1024:.3g} GB of memory" if mb >= 1024 else f"{mb} MB of memory"


def sum_words(counts: Sequence[int]) -> str:
    """`3+2+2+1`; of many nodes how often each count comes: `8 x 3, 7 x 1`."""
    if len(counts) <= 8:
        return "+".join(map(str, counts))
    return ", ".join(f"{nodes} x {count}" for count, nodes in Counter(counts).items())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    return ", ".join(listed[:LISTED]) + more


def clock(when: datetime | None) -> str:
    return when.strftime("%Y-%m-%d %H:%M") if when else "an unknown time"


def when_words(now: datetime | None, when: datetime | None) -> str:
    """`at 2026-11-29 18:06 (in 57 min)`."""
    if when is None or now is None or when <= now:
        return f"at {clock(when)}"
    return f"at {clock(when)} (in {span(int((when - now).total_seconds()))})"


def span(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
