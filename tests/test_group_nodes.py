"""A task that loses its node in a job that outlives it (--no-kill): on what is left of the group, or told clearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from codegen.group import GroupTask
from executor import protocol
from executor.group_facts import Group, Placement, Task
from executor.group_pack import Room
from executor.protocol import UsageError
from tests.bench import CHECKOUT, Bench, eventually
from tests.group_bench import GroupBench, GroupOutcome, RunningGroup, components
from tests.minislurm import preflight
from tests.minislurm.fixtures import BootCluster

NEEDS_SLURM = pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))
FOREVER = "echo up on $(hostname); exec sleep 4731"
DETECTION_S = 90.0


class TestWhatIsLeft:
    @pytest.fixture
    def place(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Placement]:
        def placement(nodes: str, rooms: dict[str, Room] | None = None, **fields: bool) -> Placement:
            monkeypatch.setenv(protocol.SLURM_JOB_NODELIST, nodes)
            found = Placement(Group("1", "g", "rl", "/g", [], **fields))  # type: ignore[arg-type]
            found._rooms = rooms or {}
            return found

        return placement

    def task(self, name: str = "a", nodes: int = 1, **needs: int | Sequence[int]) -> Task:
        return Task(name, "driver", nodes, **needs)  # type: ignore[arg-type]

    def test_a_node_that_no_task_needs_takes_the_place_of_a_lost_one(self, place: Callable[..., Placement]) -> None:
        others = [(self.task("b"), ["n3"])]
        assert place("n[1-4]").instead(self.task(nodes=2), ["n1", "n2"], ["n1"], others) == ["n4", "n2"]

    def test_where_none_is_left_the_task_and_the_node_are_named(self, place: Callable[..., Placement]) -> None:
        with pytest.raises(UsageError, match=r"lost n\[1-2\], 2 nodes of task a; the group has none left"):
            place("n[1-3]").instead(self.task(nodes=2), ["n1", "n2"], ["n1", "n2"], [])

    def test_a_node_that_was_lost_is_not_taken_for_a_free_one(self, place: Callable[..., Placement]) -> None:
        left = place("n[1-3]")
        assert left.instead(self.task(), ["n1"], ["n1"], []) == ["n2"]
        with pytest.raises(UsageError):
            left.instead(self.task("b"), ["n3"], ["n3"], [(self.task(), ["n2"])])

    def test_a_shared_node_must_have_the_gpus_and_the_port_free(self, place: Callable[..., Placement]) -> None:
        rooms = dict.fromkeys(["n1", "n2", "n3", "n4"], Room(8, 4))
        others = [(self.task("b", gpus=3), ["n2"]), (self.task("c", ports=[80]), ["n3"])]
        left = place("n[1-4]", rooms, is_shared=True)
        assert left.instead(self.task(gpus=2, ports=[80]), ["n1"], ["n1"], others) == ["n4"]
        assert left.instead(self.task(gpus=1), ["n1"], ["n1"], others) == ["n2"]

    def test_tasks_of_a_pipeline_have_all_nodes(self, place: Callable[..., Placement]) -> None:
        others = [(self.task("b"), ["n2"])]
        assert place("n[1-2]", is_parallel=False).instead(self.task(), ["n1"], ["n1"], others) == ["n2"]


@pytest.fixture
def four_nodes(own_cluster: BootCluster, shared_dir: Path) -> GroupBench:
    # With 5 s, 24.11 gives up nodes that answer together with the lost one: "Nodes n[1-2] not responding".
    return GroupBench(Bench(own_cluster(nodes=4, gpus=0, slurmd_timeout_s=20), shared_dir))


def lose(group: RunningGroup, task: str) -> str:
    """Power off a task's only node; returns its name."""
    (node,) = group.tasks()[task]["nodes"]
    group.bench.cluster.power_off(node)
    return str(node)


def moved(group: RunningGroup, task: str, lost: str) -> str:
    """The node that the task has got instead."""
    eventually(lambda: group.tasks()[task]["nodes"] != [lost], DETECTION_S, "another node")
    group.until_state(task, protocol.RUNNING, timeout_s=40)
    (node,) = group.tasks()[task]["nodes"]
    return str(node)


def ended(group: RunningGroup) -> GroupOutcome:
    return GroupOutcome(group, group.wait(90))


@NEEDS_SLURM
@pytest.mark.slow
class TestLostNode:
    @pytest.mark.parametrize("where", ["spare", "ended", "shared"])
    def test_a_task_is_started_again_on_a_free_node_and_its_peers_find_it_there(
        self, four_nodes: GroupBench, where: str
    ) -> None:
        groups = four_nodes
        look = "getent ahostsv4 server-0.rl | head -1 | cut -d' ' -f1"
        watch = f"old=$({look}); echo up $old; while [ $({look}) = $old ]; do sleep 0.2; done; echo new $({look})\n"
        tasks = [
            groups.task("trainer", watch + groups.waits_for("go"), cpus=2),
            groups.aux("server", FOREVER, cpus=2, max_restarts=1),
        ]
        if where == "ended":
            tasks.append(groups.aux("prepare", "true", cpus=2))
        fields = {"is_shared": True, "room": Room(cpus=2)} if where == "shared" else {}
        group = groups.submit(*tasks, sbatch="--no-kill", spare_nodes=0 if where == "ended" else 1, **fields)
        group.until_up("trainer", "server")
        group.until_state("server", protocol.RUNNING)
        if where == "ended":
            group.until_state("prepare", protocol.SUCCEEDED)
        lost = lose(group, "server")
        new = moved(group, "server", lost)
        addresses = groups.bench.cluster.addresses
        eventually(lambda: f"new {addresses[new]}\n" in group.rank_log("trainer"), 40, "the new address")
        assert f"up on {new}\n" in group.rank_log("server")
        groups.touch("go")
        end = ended(group)
        assert (end.state, end.code) == (protocol.SUCCEEDED, 0), end.output
        assert f"gangrun: server has lost {lost}; it gets {new}\n" in end.output
        assert end.tasks["server"]["restarts"] == 1 and new in end.status["nodes"]

    @pytest.mark.parametrize("is_primary", [True, False], ids=["primary", "auxiliary"])
    def test_where_no_node_is_left_it_is_told_with_task_and_node(
        self, four_nodes: GroupBench, is_primary: bool
    ) -> None:
        groups = four_nodes
        tasks = [
            groups.task("trainer", groups.waits_for("go")),
            groups.task("server", FOREVER, max_restarts=3, is_primary=is_primary),
        ]
        group = groups.submit(*tasks, sbatch="--no-kill")
        group.until_up("server")
        group.until_state("server", protocol.RUNNING)
        lost = lose(group, "server")
        group.until_state("server", protocol.FAILED_DRIVER, timeout_s=DETECTION_S)
        groups.touch("go")
        end = ended(group)
        assert f"lost {lost}, 1 node of task server; the group has none left" in end.tasks["server"]["reason"]
        assert end.tasks["server"]["restarts"] == 0
        if is_primary:
            assert (end.state, end.code) == (protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE), end.output
            assert lost in end.reason and "server" in end.reason
        else:
            assert (end.state, end.code) == (protocol.SUCCEEDED, 0), end.output

    def test_a_task_that_has_not_begun_gets_another_node_than_the_lost_one(self, four_nodes: GroupBench) -> None:
        groups = four_nodes
        file = groups.bench.directory / "ready"
        tasks: list[GroupTask] = [
            groups.aux("server", FOREVER, ready={"command": f"[ -e {file} ]"}),
            groups.task("client", "hostname", after=("server",)),
        ]
        group = groups.submit(*tasks, sbatch="--no-kill", spare_nodes=1)
        group.until_up("server")
        group.until_state("server", protocol.RUNNING)
        lost = lose(group, "client")
        eventually(lambda: groups.bench.cluster.node_states()[lost].startswith("down"), DETECTION_S)
        groups.touch("ready")
        end = ended(group)
        assert (end.state, end.code) == (protocol.SUCCEEDED, 0), end.output
        (new,) = end.tasks["client"]["nodes"]
        assert new != lost and end.log("client") == f"{new}\n"

    def test_a_job_that_dies_with_its_node_starts_nothing_again(self, four_nodes: GroupBench) -> None:
        groups = four_nodes
        tasks = [groups.task("trainer", FOREVER), groups.aux("server", FOREVER, max_restarts=3)]
        group = groups.submit(*tasks, sbatch="--no-requeue", spare_nodes=1)
        group.until_up("trainer", "server")
        group.until_state("server", protocol.RUNNING)
        lost = lose(group, "server")
        group.wait(DETECTION_S)  # the job's code is Slurm's own
        eventually(lambda: group.status()["state"] in protocol.TERMINAL_STATES, 30)
        status = group.status()
        assert (status["state"], status["exit_code"]) == (protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE), status
        assert status["reason"].startswith(f"lost {lost}, of server"), status
        assert group.tasks()["server"]["restarts"] == 0, group.output()


@NEEDS_SLURM
def test_a_task_of_a_later_component_has_lost_no_node(bench: Bench) -> None:
    """Slurm tells of all components of a job one after the other: the nodes of the first are not all that it has."""
    groups = GroupBench(bench)
    words = (
        "from executor.slurm_commands import lost_nodes as lost; print(lost('$SLURM_JOB_ID', ['$(hostname)', 'n9']))"
    )
    tasks = components(
        groups.task("a", "true", cpus=2), groups.task("b", f'cd {CHECKOUT}; {bench.python} -c "{words}"')
    )
    end = groups.run(*tasks)
    assert end.log("b") == "['n9']\n", end.output
