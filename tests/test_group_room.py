"""What tasks that share nodes may take of one: what the group says, what is asked of Slurm, what the cluster has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen.spec import SpecError
from executor.group_pack import UNKNOWN, Need, Room
from gangrun import group_plan, settings
from gangrun.group import Group
from gangrun.group_room import Kind, Wish, best, kinds_of
from gangrun.launch import Place, Plan

# sinfo --all --exact --noheader --format=%P|%c|%m|%G|%f|%t|%D
SINFO = """\
main*|32|128000|(null)|(null)|idle|10
main*|64|256000|gpu:4|fast|mix|6
gpu|64|512000|gpu:h100:8(S:0-1)|fast,ib|alloc|4
gpu|64|512000|gpu:a100:4(S:0-1)|ib|idle|30
gpu|128|999000|gpu:h100:16|fast|drain*|1
"""
LINES = tuple(SINFO.splitlines())
SMALL, FOUR = Room(32, 0, 128000), Room(64, 4, 256000)


@pytest.mark.parametrize(
    "wish, rooms",
    [
        (Wish(), [SMALL, FOUR]),
        (Wish("gpu"), [Room(64, 8, 512000), Room(64, 4, 512000)]),
        (Wish("gpu,main"), [SMALL, FOUR, Room(64, 8, 512000), Room(64, 4, 512000)]),
        (Wish("gpu", gpus="A100"), [Room(64, 0, 512000), Room(64, 4, 512000)]),
        (Wish(constraint="fast"), [FOUR]),
        (Wish("gpu", "fast&ib"), [Room(64, 8, 512000)]),
        (Wish("gpu", "fast|ib"), []),
        (Wish("none"), []),
    ],
)
def test_the_nodes_that_will_do(wish: Wish, rooms: list[Room]) -> None:
    assert [kind.room for kind in kinds_of(LINES, wish)] == rooms


def test_what_is_no_line_of_sinfo_tells_nothing() -> None:
    assert kinds_of(["sinfo: error: x|y", "", "a|b|c|d|e|f|g"], Wish("main")) == []


@pytest.mark.parametrize(
    "gpus, kinds, gpus_of_best",
    [
        ([4, 4], [(4, 9), (8, 9)], 8),  # one node
        ([4, 4], [(4, 9), (8, 0)], 4),
        ([2, 2], [(8, 9), (4, 9)], 4),  # one node of either: the smaller
        ([16], [(4, 9), (8, 9)], 8),  # none is large enough
        ([4, 4, 4], [(4, 2)], 4),  # too few, but Slurm has more to say
    ],
)
def test_the_kind_that_takes_the_fewest_nodes_counts(
    gpus: list[int], kinds: list[tuple[int, int]], gpus_of_best: int
) -> None:
    needs = [Need(f"t{index}", gpus=count) for index, count in enumerate(gpus)]
    assert best(needs, [Kind(Room(64, count, 999), number) for count, number in kinds]).gpus == gpus_of_best


def plan(tmp_path: Path, tasks: Mapping[str, Any], sizes: tuple[str, ...] = LINES, **header: Any) -> Plan:
    documents = [{"name": "g", "execution": "parallel", "placement": "shared", **header}]
    documents += [{"name": name, **fields} for name, fields in tasks.items()]
    path = tmp_path / "group.yaml"
    path.write_text("\n---\n".join(map(json.dumps, documents)))
    group = Group.from_file(str(path))
    config = settings.Settings()
    whole = group_plan.whole_request({}, group, "lab", config)
    own = [group_plan.own_request(member, "lab", config) for member in group.members]
    place = Place("/home/me", "/home/me/.gangrun/runs/g-1", "/work", None, ["gpu:4"], sizes)
    return group_plan.plan_group(group, "g-1", place, whole, own, {})


def gpus(count: int, **fields: Any) -> dict[str, Any]:
    return {"resources": {"cpus": 2, "accelerators": f"GPU:{count}", **fields}}


def test_tasks_are_packed_on_the_clusters_nodes_and_the_plan_tells_where(tmp_path: Path) -> None:
    tasks = {"reward": gpus(1), "trainer": {"num_nodes": 2, **gpus(3)}, "eval": gpus(1), "data": {}}
    found = plan(tmp_path, tasks)
    assert found.shared == [["reward", "trainer", "data"], ["trainer", "eval"]]
    assert {"--nodes=2", "--gres=gpu:4", "--cpus-per-task=5"} <= {*found.sbatch}
    assert found.meta["num_nodes"] == 2
    assert found.to_json()["nodes"] == found.shared
    assert found.words().endswith("\nnode 1: reward, trainer, data\nnode 2: trainer, eval\n")


def test_a_group_says_how_much_of_a_node_it_takes(tmp_path: Path) -> None:
    tasks = {name: gpus(1, memory=8) for name in "abcd"}
    assert len(plan(tmp_path, tasks).shared) == 1
    for node, nodes in (({"gpus": 2}, 2), ({"cpus": 4}, 2), ({"memory": 9}, 4), ({"gpus": 99}, 1)):
        found = plan(tmp_path, tasks, node=node)
        assert (len(found.shared), found.meta["num_nodes"]) == (nodes, nodes)
    assert "--mem=16384M" in plan(tmp_path, tasks, node={"gpus": 2}).sbatch


@pytest.mark.parametrize(
    "option, nodes",
    [
        ("--gpus-per-node=2", 2),
        ("--gres=gpu:x:2", 2),
        ("--cpus-per-task=2", 4),
        ("--mem=0", 1),
        ("--gpus=4", 1),
        ("--exclusive", 1),
    ],
)
def test_what_the_users_own_options_ask_of_a_node_is_what_is_filled(tmp_path: Path, option: str, nodes: int) -> None:
    found = plan(tmp_path, {name: gpus(1, memory=8) for name in "abcd"}, slurm={"sbatch_args": [option]})
    assert option in found.sbatch and len(found.shared) == nodes


def test_a_cluster_that_does_not_tell_gets_as_many_nodes_as_the_widest_task(tmp_path: Path) -> None:
    tasks = {"wide": {"num_nodes": 2, **gpus(4)}, "a": gpus(4), "b": gpus(4)}
    found = plan(tmp_path, tasks, sizes=())
    assert found.shared == [["wide", "a"], ["wide", "b"]] and "--gres=gpu:8" in found.sbatch


def test_a_task_that_is_larger_than_any_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match="task b needs 2 CPUs, 5 GPUs of a node, and a node has 64 CPUs, 4 GPUs, 256000"
    ):
        plan(tmp_path, {"a": gpus(1), "b": gpus(5)})


@pytest.mark.parametrize("place", ["ports", "resources"])
def test_two_tasks_with_one_port_on_a_node_are_refused(tmp_path: Path, place: str) -> None:
    said = {"ports": [8000, "9000-9002"]}
    first = said if place == "ports" else {"resources": said}
    with pytest.raises(SpecError, match="task b: port 9001: a has it on the same node; use another"):
        plan(tmp_path, {"a": first, "b": {"ready": {"http": ":9001/"}}})
    plan(tmp_path, {"a": first, "b": {"ready": {"port": 9003}}})
    plan(tmp_path, {"a": first, "b": {"ready": {"port": 9001}}}, placement="separate")


def test_a_rank_learns_the_ports_that_its_task_and_its_probe_name(tmp_path: Path) -> None:
    found = plan(tmp_path, {"a": {"ports": 9000, "ready": {"port": 8000}}})
    assert "    ports=[\n        9000,\n        8000,\n    ],\n" in found.files["driver-a.py"].decode()


def test_nothing_is_asked_of_the_cluster_for_tasks_on_nodes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "group.yaml"
    path.write_text("name: g\nexecution: parallel\n---\nname: a\n")
    assert group_plan.sizes_command(Group.from_file(str(path))) == ()


@pytest.mark.parametrize("placement, nodes", [("shared", 3), ("separate", 4)])
def test_spare_nodes_are_asked_for_besides_and_the_job_outlives_a_lost_one(
    tmp_path: Path, placement: str, nodes: int
) -> None:
    found = plan(tmp_path, {"a": gpus(3), "b": gpus(3)}, placement=placement, spare_nodes=nodes - 2)
    assert {f"--nodes={nodes}", "--no-kill", "--gres=gpu:3"} <= {*found.sbatch}
    assert found.meta["num_nodes"] == nodes and f"    spare_nodes={nodes - 2},\n" in found.files["driver.py"].decode()
    assert "--no-kill" not in plan(tmp_path, {"a": gpus(3), "b": gpus(3)}, placement=placement).sbatch


@pytest.mark.parametrize(
    "spare, said", [(1, "=1: would be one task's"), (-1, "=-1: use a whole"), (True, "=True: use")]
)
def test_what_are_no_spare_nodes(tmp_path: Path, spare: Any, said: str) -> None:
    with pytest.raises(SpecError, match=r"group.yaml:1: spare_nodes" + said):
        plan(tmp_path, {"a": gpus(3), "b": gpus(1)}, placement="separate", spare_nodes=spare)


def test_an_unknown_size_has_no_end() -> None:
    assert Room() == (UNKNOWN, UNKNOWN, UNKNOWN) and str(Room()) == "as much as it takes"
