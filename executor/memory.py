"""How much memory this process may use, by its cgroups (cgroups(7), versions 1 and 2)."""

from __future__ import annotations

import os

from executor.shared import read_bytes, read_text

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Iterator

V2, V1_CONTROLLER = "", "memory"
LIMIT_FILES = {V2: "memory.max", V1_CONTROLLER: "memory.limit_in_bytes"}


def limit_bytes() -> int | None:
    """The lowest limit from this process's own cgroup up, or None if there is none below the machine's memory."""
    own = _own_paths(read_text("/proc/self/cgroup") or "")
    mounts = read_text("/proc/self/mountinfo") or ""
    limits = [limit for folder, name in _folders(own, mounts) for limit in _limits(folder, name)]
    limit, machine = min(limits, default=None), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return limit if limit is not None and limit < machine else None


def _own_paths(text: str) -> dict[str, str]:
    """By controller, `` in version 2: lines such as `4:memory:/slurm/job_1`, `0::/user.slice`."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _folders(own: dict[str, str], mounts: str) -> Iterator[tuple[str, str]]:
    """Each folder that may hold a limit, the innermost first, and the name of its file; see proc(5), mountinfo.

    A container has a part of the tree mounted, while its path may be told from the tree's own root.
    """
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        controller = V2 if kind == "cgroup2" else V1_CONTROLLER
        if controller not in own or kind not in ("cgroup", "cgroup2"):
            continue
        if kind == "cgroup" and V1_CONTROLLER not in options.split(","):
            continue
        root, point = left.split(" ")[3:5]
        root, path = root.rstrip("/"), own[controller]
        inside = path[len(root) :] if (path + "/").startswith(root + "/") else path
        while inside.strip("/"):
            yield point + inside, LIMIT_FILES[controller]
            inside = os.path.dirname(inside)
        yield point, LIMIT_FILES[controller]


def _limits(folder: str, name: str) -> list[int]:
    try:
        return [int(read_bytes(os.path.join(folder, name)))]
    except (OSError, ValueError):  # none here, or `max`
        return []
