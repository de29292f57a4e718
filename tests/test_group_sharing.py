"""Tasks that share nodes: packed by CPUs and GPUs, and none of them sees or takes what is another's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen.group import GroupTask, JobGroup, group_sbatch_options
from codegen.spec import SpecError
from executor import protocol
from executor.group_pack import Room
from tests.bench import Bench, eventually
from tests.group_bench import GroupBench, GroupOutcome
from tests.minislurm import preflight
from tests.minislurm.fixtures import BootCluster

pytestmark = pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))
SHOW = "echo $(hostname) gpus=$CUDA_VISIBLE_DEVICES"


@pytest.fixture
def groups(bench: Bench) -> GroupBench:
    return GroupBench(bench)


@pytest.fixture
def four_gpus(own_cluster: BootCluster, shared_dir: Path) -> Iterator[GroupBench]:
    """Two nodes of four GPUs."""
    yield GroupBench(Bench(own_cluster(nodes=2, gpus=4), shared_dir))


def ended_well(end: GroupOutcome) -> None:
    assert (end.state, end.code) == (protocol.SUCCEEDED, 0), (end.reason, end.output)


def all_at_once(groups: GroupBench, tasks: list[GroupTask], **fields: object) -> tuple[GroupOutcome, str]:
    """Every rank has said where it is before any of them ends; and what Slurm says of the job meanwhile."""
    group = groups.submit(*tasks, is_shared=True, **fields)  # type: ignore[arg-type]
    ranks = [(task.name, rank) for task in tasks for rank in range(task.num_nodes)]
    eventually(lambda: all("gpus=" in group.rank_log(*rank) for rank in ranks), 60, "gpus= of every rank")
    shown = groups.bench.cluster.run("ctl", ["scontrol", "show", "job", str(group.job_id)]).stdout
    groups.touch("seen")
    end = group.end()
    ended_well(end)
    return end, shown


def gpus_by_node(end: GroupOutcome) -> dict[str, list[str]]:
    """What the ranks of all tasks see, by node."""
    found: dict[str, list[str]] = {}
    for name, task in end.tasks.items():
        for rank in range(task["num_nodes"]):
            said = re.search(r"^(\S+) gpus=(\S*)$", end.log(name, rank), re.M)
            assert said, end.log(name, rank)
            assert said.group(1) == task["nodes"][rank]
            found.setdefault(said.group(1), []).extend(gpu for gpu in said.group(2).split(",") if gpu)
    return found


class TestPacking:
    def options(self, groups: GroupBench, *gpus: int, own: object = None, **fields: object) -> list[str]:
        tasks = tuple(groups.task(f"t{i}", "true", cpus=count + 1, gpus=count) for i, count in enumerate(gpus))
        group = JobGroup("g", "rl", tasks, is_shared=True, **fields)  # type: ignore[arg-type]
        return group_sbatch_options(group, "/out", [], own or [[] for _ in tasks])  # type: ignore[call-overload]

    def test_the_fewest_nodes_are_asked_for_and_of_each_what_is_packed_there(self, groups: GroupBench) -> None:
        assert {"--nodes=1", "--cpus-per-task=8", "--gpus-per-node=4"} <= {*self.options(groups, 1, 2, 1, 0)}
        room = Room(gpus=4)
        assert {"--nodes=2", "--cpus-per-task=5", "--gpus-per-node=3"} <= {*self.options(groups, 3, 1, 2, room=room)}

    def test_gpus_of_a_kind_and_memory_are_asked_for_where_they_are_packed(self, groups: GroupBench) -> None:
        own = [["--gres=gpu:h100:3", "--mem=100M"], ["--gres=gpu:1", "--mem=50M"], ["--gres=gpu:2"]]
        options = self.options(groups, 3, 1, 2, own=own, room=Room(gpus=4))
        assert {"--nodes=2", "--gres=gpu:h100:3", "--mem=100M"} <= {*options}

    def test_a_task_that_is_larger_than_a_node_is_refused(self, groups: GroupBench) -> None:
        with pytest.raises(SpecError, match="task t1 needs 6 CPUs, 5 GPUs of a node, and a node has 4 GPUs"):
            self.options(groups, 1, 5, room=Room(gpus=4))

    def test_one_two_and_one_gpus_fill_a_node_of_four(self, four_gpus: GroupBench) -> None:
        run = SHOW + "\n" + four_gpus.waits_for("seen")
        tasks = [four_gpus.task(f"t{i}", run, gpus=count) for i, count in enumerate((1, 2, 1))]
        end, shown = all_at_once(four_gpus, tasks)
        assert "NumNodes=1 " in shown
        (gpus,) = gpus_by_node(end).values()
        assert sorted(gpus) == [*"0123"]

    def test_five_tasks_are_packed_on_two_nodes_and_see_gpus_of_their_own(self, four_gpus: GroupBench) -> None:
        run = SHOW + "\n" + four_gpus.waits_for("seen")
        sizes = {"buffer": (1, 0), "reward": (1, 1), "trainer": (2, 2), "eval": (1, 2), "data": (1, 1)}
        tasks = [four_gpus.task(name, run, nodes=nodes, gpus=gpus) for name, (nodes, gpus) in sizes.items()]
        end, shown = all_at_once(four_gpus, tasks, room=Room(cpus=64, gpus=4))
        assert "NumNodes=2 " in shown and re.search(r"CPUs/Task=\d\b", shown), shown
        assert {node: sorted(gpus) for node, gpus in gpus_by_node(end).items()} == {"n1": [*"0123"], "n2": [*"0123"]}
        assert end.tasks["trainer"]["nodes"] == ["n1", "n2"]
        first = end.output.splitlines()[0]
        assert re.fullmatch(
            r"gangrun: buffer on n\d, reward on n\d, trainer on n\[1-2\], eval on n1, data on n2", first
        ), first

    def test_nodes_larger_than_asked_for_are_used_as_they_are(self, four_gpus: GroupBench) -> None:
        """The user's own options ask for less than the tasks do; --exclusive gives all CPUs."""
        run = SHOW + "\n" + four_gpus.waits_for("seen")
        tasks = [four_gpus.task(name, run, cpus=5, gpus=1) for name in "ab"]
        end, _ = all_at_once(four_gpus, tasks, sbatch="--exclusive --cpus-per-task=1")
        assert end.tasks["a"]["nodes"] == end.tasks["b"]["nodes"]

    def test_an_allocation_that_is_too_small_is_refused_before_anything_starts(self, groups: GroupBench) -> None:
        group = groups.submit(
            *(groups.task(name, "echo ran", cpus=2) for name in "ab"), is_shared=True, sbatch="--cpus-per-task=2"
        )
        eventually(lambda: "do not fit" in group.output(), 40, group.output)
        assert "(1 node with 2 CPUs" in group.output() and "a 2 CPUs, 0 GPUs on 1 node; b 2 CPUs" in group.output()
        assert "Traceback" not in group.output() and group.rank_log("a") == ""


class TestSetup:
    @pytest.mark.parametrize("hides", [(), ("devices",)], ids=["all devices open", "devices of the step only"])
    def test_setup_sees_the_gpus_that_its_script_will_have(
        self, own_cluster: BootCluster, shared_dir: Path, hides: tuple[str, ...]
    ) -> None:
        """Slurm gives an overlapping step the first ones of the job, whoever has them."""
        groups = GroupBench(Bench(own_cluster(nodes=2, gpus=4, constrain=hides), shared_dir))
        sizes = {"a": (1, 1), "b": (2, 2), "c": (1, 1), "d": (1, 2), "none": (1, 0)}
        run = SHOW + "\n" + groups.waits_for("seen")
        tasks = [groups.task(n, run, nodes=k, gpus=g, setup=SHOW) for n, (k, g) in sizes.items()]
        end, _ = all_at_once(groups, tasks, room=Room(gpus=4))
        seen: dict[str, list[str]] = {}
        for name, (nodes, _) in sizes.items():
            for rank in range(nodes):
                log = end.group.folder / "logs" / name / f"setup-{protocol.node_name(rank)}.log"
                host, _, gpus = log.read_text().strip().partition(" gpus=")
                seen.setdefault(host, []).extend(filter(None, gpus.split(",")))
                # Where Slurm hides devices, 24.11 numbers those of each step from 0.
                assert hides or f"{host} gpus={gpus}\n" == end.log(name, rank)
        assert {host: sorted(gpus) for host, gpus in seen.items()} == {"n1": [*"0123"], "n2": [*"0123"]}


class TestNestedSteps:
    NESTED = """
    show() { echo "$1=$CUDA_VISIBLE_DEVICES"; }; export -f show
    show own; for ask in "" --gpus-per-node=1; do srun -n1 -N1 -w $(hostname) $ask bash -c "show 'nested $ask'"; done
    """

    def said(self, end: GroupOutcome, task: str) -> dict[str, int]:
        """The number of GPUs that each program sees."""
        rows = re.findall(r"^(own|nested.*)=(\S*)$", end.log(task), re.M)
        return {name.strip(): len([gpu for gpu in gpus.split(",") if gpu]) for name, gpus in rows}

    def test_a_nested_step_sees_no_gpu_of_a_peer_unless_it_asks_for_one(self, four_gpus: GroupBench) -> None:
        """Slurm shows it all of the job's. A task with all of a node's GPUs has nobody to mind."""
        run = self.NESTED + SHOW + "\n" + four_gpus.waits_for("seen")
        sizes = {"one": 1, "all": 4, "none": 0}
        tasks = [four_gpus.task(name, run, gpus=gpus) for name, gpus in sizes.items()]
        end, _ = all_at_once(four_gpus, tasks, room=Room(gpus=4))
        asked = "nested --gpus-per-node"
        assert {name: self.said(end, name) for name in sizes} == {
            "one": {"own": 1, "nested": 0, f"{asked}=1": 1},
            "all": {"own": 4, "nested": 4, f"{asked}=1": 1},
            "none": {"own": 0, "nested": 0, f"{asked}=1": 1},
        }


class TestPorts:
    def test_two_tasks_with_one_port_are_refused_where_they_share_a_node_only(self, groups: GroupBench) -> None:
        tasks = [groups.task("a", "true", ready={"port": 8000}), groups.task("b", "true", ready={"http": ":8000/"})]
        with pytest.raises(SpecError, match="task b: port 8000: a has it on the same node"):
            groups.submit(*tasks, is_shared=True)
        ended_well(groups.run(*tasks, run="separate"))
        assert JobGroup("g", "rl", tuple(tasks), is_shared=True, room=Room(cpus=1)).nodes == [[0], [1]]

    def test_a_port_that_somebody_else_has_is_told_with_task_and_node(self, groups: GroupBench) -> None:
        node = groups.bench.cluster.nodes[0]
        with groups.bench.cluster.popen(node, ["python3", "-m", "http.server", "18131"]) as server:
            sockets = ["cat", "/proc/net/tcp"]
            eventually(lambda: f":{18131:04X} " in groups.bench.cluster.run(node, sockets).stdout)
            tasks = [
                groups.task("server", "echo ran", ports=(18131, 18132)),
                groups.task("other", "echo ran", ports=(18133,)),
            ]
            end = groups.run(*tasks, is_shared=True, sbatch=f"--nodelist={node}")
            server.kill()
        ended_well(end)
        assert re.findall(r"warning: .*", end.output) == [f"warning: port 18131 of server is taken on {node} already"]
