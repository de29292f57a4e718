"""The drivers of a job group: one for each task, and one over them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from codegen.archive import executor_archive
from codegen.render import render
from codegen.slurm import render_driver, sbatch_options
from codegen.spec import Job, Resources, SpecError
from executor import protocol
from executor.group_pack import Need, Nodes, Room, most_on_a_node, pack, ports_of, require_own_ports

TEMPLATE = "group_driver.py.j2"
# --gres=gpu:2, --gres=gpu:h100:2, --mem=1024M
COUNTED = re.compile(r"(?P<name>--gres=gpu|--mem)(?::(?P<kind>[^:=]+))?(?P<sign>[:=])(?P<count>\d+)(?P<unit>M?)")
# What is said once for a heterogeneous job. All else is of each component: sbatch forgets a partition, `--exclusive`
# and more where the next component begins (measured).
OF_THE_WHOLE = (
    "--job-name --comment --chdir --output --error --input --open-mode --export --requeue --no-requeue --signal "
    "--dependency --begin --deadline --hold --nice --priority --mail-type --mail-user --licenses --nodelist --clusters "
    "--cluster --wckey"
).split()


@dataclass(frozen=True)
class GroupTask:
    """A task's job, and its place in the group. `component` is its index in a heterogeneous Slurm job."""

    name: str
    job: Job
    is_primary: bool = True
    component: int | None = None
    after: tuple[str, ...] = ()
    ready: Mapping[str, Any] | None = None
    max_restarts: int = 0
    memory_mb: int = 0

    @property
    def need(self) -> Need:
        """Of each of its nodes; `ports` are all that it is known to listen on."""
        resources, ports = self.job.resources, ports_of(self.job.ports, self.ready)
        return Need(self.name, self.num_nodes, resources.cpus, resources.gpus, self.memory_mb, ports)

    @property
    def driver(self) -> str:
        return protocol.member_driver_name(self.name)

    @property
    def num_nodes(self) -> int:
        return self.job.num_nodes

    @property
    def grace_s(self) -> float:
        return self.job.grace_s


@dataclass(frozen=True)
class JobGroup:
    """What the group's driver must know; every value has been checked where it was read.

    `room` is what tasks that share nodes may take of one. `spare_nodes` are besides those of the tasks.
    """

    job_id: str
    name: str
    tasks: tuple[GroupTask, ...]
    cluster_home: str | None = None
    stops_on_primary_failure: bool = True
    is_parallel: bool = True
    is_shared: bool = False
    inter_connection: bool | None = None
    python: str | None = None
    room: Room = Room()
    spare_nodes: int = 0

    @property
    def nodes(self) -> Nodes:
        """Of each task, the places of its nodes in the allocation. Raises SpecError for tasks that cannot be there."""
        counts = [task.num_nodes for task in self.tasks]
        if not self.is_parallel:
            return [range(count) for count in counts]
        if not self.is_shared:
            return [range(sum(counts[:index]), sum(counts[: index + 1])) for index in range(len(counts))]
        needs = [task.need for task in self.tasks]
        try:
            nodes = pack(needs, self.room)
            require_own_ports(needs, nodes)
        except protocol.UsageError as error:
            raise SpecError(str(error)) from error
        return nodes

    @property
    def num_nodes(self) -> int:
        return 1 + max(node for nodes in self.nodes for node in nodes) + self.spare_nodes


class GroupBundle(NamedTuple):
    """The files of a group as they lie on the shared home."""

    group: JobGroup

    def files(self) -> dict[str, bytes]:
        """Names and contents, the group's driver last: where it is found, all is."""
        files = {protocol.ARCHIVE_NAME: executor_archive()}
        for task in self.group.tasks:
            secrets_name = protocol.member_secrets_name(task.name)
            if task.job.secrets:
                files[secrets_name] = json.dumps(dict(task.job.secrets)).encode()
            files[task.driver] = _bytes(render_driver(task.job, secrets_name))
        files[protocol.DRIVER_NAME] = _bytes(render_group_driver(self.group))
        return files


def render_group_driver(group: JobGroup) -> str:
    """The text of the driver over the tasks' drivers, which must lie beside it."""
    return render(TEMPLATE, group=group, protocol=protocol)


def group_sbatch_options(group: JobGroup, output: str, extra: Sequence[str], own: Sequence[Sequence[str]]) -> list[str]:
    """sbatch's options: one set, or for a heterogeneous job one per component with `:` between them.

    `extra` belongs to the whole, `own` to each task. Raises SpecError for tasks that cannot be on one node.
    """
    if group.tasks[0].component is None:
        return sbatch_options(_as_one(group), output, [*extra, *_own_as_one(group, own)])
    sets = [sbatch_options(task.job, output, [*extra, *mine]) for task, mine in zip(group.tasks, own)]
    first, *rest = sets
    for options in rest:
        first += [":", *(option for option in options if option.partition("=")[0] not in OF_THE_WHOLE)]
    return first


def _as_one(group: JobGroup) -> Job:
    """One job whose nodes hold all that meets on them."""
    needs = [task.job.resources for task in group.tasks]
    return dataclasses.replace(
        group.tasks[0].job,
        num_nodes=group.num_nodes,
        resources=Resources(
            cpus=_together(group, [need.cpus for need in needs]),
            gpus=_together(group, [need.gpus for need in needs]),
        ),
    )


def _together(group: JobGroup, amounts: Sequence[int]) -> int:
    """What a node needs of what its tasks need: all of it if they share it; the most where they take turns, and where
    each has nodes of its own, which are all alike."""
    return most_on_a_node(group.nodes, amounts) if group.is_shared else max(amounts)


def _own_as_one(group: JobGroup, own: Sequence[Sequence[str]]) -> list[str]:
    said = [option for mine in own for option in mine]
    others = dict.fromkeys(option for option in said if not COUNTED.fullmatch(option))
    constraints = [option for option in others if option.startswith("--constraint=")]
    if len(constraints) > 1:
        raise SpecError(f"tasks on the same nodes must agree on these: {', '.join(constraints)}")
    return [*others, *(_one(group, name, own) for name in ("--gres=gpu", "--mem") if _counted(name, said))]


def _one(group: JobGroup, name: str, own: Sequence[Sequence[str]]) -> str:
    """`--gres=gpu:h100:3` of `--gres=gpu:h100:2` and `--gres=gpu:1`: any kind will do for the latter."""
    by_task = [_counted(name, mine) for mine in own]
    first, *others = [match for matches in by_task for match in matches]
    kinds = sorted({match["kind"] for match in (first, *others) if match["kind"]})
    if len(kinds) > 1:
        raise SpecError(f"tasks on the same nodes ask for GPUs of different kinds: {', '.join(kinds)}")
    kind = f":{kinds[0]}" if kinds else ""
    count = _together(group, [sum(int(match["count"]) for match in matches) for matches in by_task])
    return f"{name}{kind}{first['sign']}{count}{first['unit']}"


def _counted(name: str, options: Sequence[str]) -> list[re.Match[str]]:
    return [match for match in map(COUNTED.fullmatch, options) if match and match["name"] == name]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
