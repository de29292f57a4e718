"""How many files a program looks for: path operations of one process, counted by strace."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks import child

CALLS = "open,openat,stat,lstat,newfstatat,statx,access,faccessat,faccessat2,readlink,readlinkat"
LINE = re.compile(r"(\d+) +(\w+(?=\()|<\.\.\. \w+ resumed)(.*)")


class PathOperations(NamedTuple):
    """Calls of the first process up to the first exec of `until`; the shared ones name a file below `shared`.

    fstat(2) of an open file counts too: it is the same call, newfstatat, and a request on many file systems.
    """

    total: int
    shared: int
    lines: list[str]


def missing() -> str | None:
    """Why nothing can be traced here, or None."""
    return None if shutil.which("strace") else "strace is not installed"


def path_operations(
    argv: Sequence[str], environ: Mapping[str, str], shared: str, until: str | None = None
) -> PathOperations:
    with tempfile.TemporaryDirectory(prefix="gangrun-trace-") as folder:
        output = os.path.join(folder, "trace")
        strace = ["strace", "-f", "-y", "-o", output, "-e", "signal=none", "-e", "trace=execve," + CALLS]
        child.run([*strace, *argv], environ)
        with open(output, encoding="utf-8", errors="replace") as file:
            return count(file, shared, until)


def count(trace: Iterable[str], shared: str, until: str | None) -> PathOperations:
    """Count the lines of `strace -f -y`. A call that another interrupted is one line with its name and one without."""
    lines: list[str] = []
    first = ""
    attempts: dict[str, int] = {}  # an exec of `until` by pid: how much had been counted when it began
    for line in trace:
        match = LINE.match(line)
        if match is None:
            continue
        pid, call, rest = match.groups()
        first = first or pid
        if "execve" in call:
            if until and call == "execve" and re.match(r'\("[^"]*/%s"' % until, rest):
                attempts[pid] = len(lines)
            if pid in attempts and rest.rstrip().endswith(" = 0"):
                del lines[attempts[pid] :]
                break
        elif pid == first and "resumed" not in call:
            lines.append(line)
    return PathOperations(len(lines), sum(shared + "/" in line for line in lines), lines)
