"""The command line of gangrun, and the Python client.

    from gangrun import Cluster, Task

    job = Cluster("login").launch(Task(name="hello", num_nodes=2, run="hostname"))
    print(job.wait().state)

`examples/sdk.py` shows more. What is imported here is loaded when it is used: the command line starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen.spec import Ray, Resources
    from gangrun.cluster import Cluster, Job, wait
    from gangrun.group import Group, Node, Ready
    from gangrun.inside import join
    from gangrun.ray_cluster import RayCluster
    from gangrun.records import Run
    from gangrun.task import Slurm, Task

__all__ = [
    "Cluster",
    "Group",
    "Job",
    "Node",
    "Ray",
    "RayCluster",
    "Ready",
    "Resources",
    "Run",
    "Slurm",
    "Task",
    "join",
    "wait",
]
HOMES = {
    "Cluster": "gangrun.cluster",
    "Group": "gangrun.group",
    "Job": "gangrun.cluster",
    "Ray": "codegen.spec",
    "RayCluster": "gangrun.ray_cluster",
    "Node": "gangrun.group",
    "Ready": "gangrun.group",
    "join": "gangrun.inside",
    "wait": "gangrun.cluster",
    "Resources": "codegen.spec",
    "Run": "gangrun.records",
    "Slurm": "gangrun.task",
    "Task": "gangrun.task",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'gangrun' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(HOMES[name]), name)
