"""Tasks that share nodes: never more than a node has, on as few nodes as it takes, the same each time."""

from __future__ import annotations

import random

import pytest

from executor.group_pack import Need, Nodes, Room, divide, most_on_a_node, pack, ports_of, require_own_ports
from executor.protocol import UsageError

ROOM = Room(cpus=16, gpus=8, memory_mb=1000)


def some_needs(seed: int, room: Room = ROOM) -> list[Need]:
    dice = random.Random(seed)
    return [
        Need(
            f"t{index}",
            dice.choice([1, 1, 1, 2, 5]),
            dice.randint(1, int(room.cpus)),
            dice.randint(0, int(room.gpus)),
            dice.choice([0, dice.randint(1, int(room.memory_mb))]),
        )
        for index in range(dice.randint(1, 12))
    ]


def most(needs: list[Need], nodes: Nodes) -> Room:
    amounts = ([need[field] for need in needs] for field in (2, 3, 4))
    return Room(*(most_on_a_node(nodes, list(amount)) for amount in amounts))


def count(nodes: Nodes) -> int:
    return len({node for own in nodes for node in own})


@pytest.mark.parametrize("seed", range(200))
def test_no_node_is_overfull_and_no_task_is_twice_on_one(seed: int) -> None:
    needs = some_needs(seed)
    nodes = pack(needs, ROOM)
    assert all(taken <= room for taken, room in zip(most(needs, nodes), ROOM))
    for need, own in zip(needs, nodes):
        assert len({*own}) == len(own) == need.num_nodes and [*own] == sorted(own)
    assert {node for own in nodes for node in own} == {*range(count(nodes))}, "no node is left out"
    assert max(need.num_nodes for need in needs) <= count(nodes) <= sum(need.num_nodes for need in needs)
    assert pack(list(needs), ROOM) == nodes


@pytest.mark.parametrize("seed", range(200))
def test_an_allocation_of_just_what_was_asked_for_is_divided_as_planned(seed: int) -> None:
    needs = some_needs(seed)
    nodes = pack(needs, ROOM)
    assert divide(needs, [most(needs, nodes)] * count(nodes)) == nodes


@pytest.mark.parametrize("seed", range(100))
def test_nodes_larger_than_asked_for_hold_all_and_none_is_overfull(seed: int) -> None:
    needs, dice = some_needs(seed), random.Random(seed)
    nodes = pack(needs, ROOM)
    asked = most(needs, nodes)
    rooms = [Room(*(size * dice.choice([1, 2, 4]) for size in asked)) for _ in range(count(nodes))]
    divided = divide(needs, rooms)
    for node, room in enumerate(rooms):
        taken = [need for need, own in zip(needs, divided) if node in own]
        assert sum(need.gpus for need in taken) <= room.gpus and sum(need.cpus for need in taken) <= room.cpus


def test_where_the_smallest_node_is_too_small_each_counts_as_what_it_has() -> None:
    """As where somebody asks for GPUs by their sum."""
    needs = [Need("small", gpus=1), Need("large", gpus=3)]
    assert divide(needs, [Room(gpus=1), Room(gpus=3)]) == [[0], [1]]


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ([1, 2, 1], [[0], [0], [0]]),
        ([2, 3, 1, 2], [[1], [0], [0], [1]]),
        ([4, 1, 4], [[0], [2], [1]]),
        ([1, 1, 1, 1, 1], [[0], [1], [0], [1], [0]]),  # two nodes of 3 and 2, not of 4 and 1
    ],
)
def test_the_largest_tasks_come_first_and_the_nodes_are_filled_evenly(gpus: list[int], expected: Nodes) -> None:
    needs = [Need(f"t{index}", gpus=number) for index, number in enumerate(gpus)]
    assert pack(needs, Room(gpus=4)) == expected


def test_a_gang_takes_nodes_of_its_own_and_leaves_room_on_them() -> None:
    needs = [Need("reward", gpus=2), Need("trainer", num_nodes=2, gpus=6), Need("buffer", cpus=4)]
    assert pack(needs, Room(gpus=8, cpus=8)) == [[0], [0, 1], [1]]


def test_where_a_nodes_size_is_not_known_the_widest_task_says_how_many_there_are() -> None:
    needs = [Need("wide", num_nodes=3, cpus=3), Need("two", num_nodes=2, cpus=2), Need("one", cpus=1)]
    nodes = pack(needs, Room())
    assert (count(nodes), most(needs, nodes).cpus) == (3, 5)


def test_a_task_larger_than_a_node_is_named_with_both_sizes() -> None:
    with pytest.raises(UsageError, match="task big needs 1 CPU, 9 GPUs of a node, and a node has 16 CPUs, 8 GPUs"):
        pack([Need("small"), Need("big", gpus=9)], ROOM)


def test_an_allocation_that_is_too_small_is_told_with_all_sizes() -> None:
    said = (
        r"the tasks do not fit on the allocation's nodes \(2 nodes with 2 CPUs, 1 GPU\): "
        "a 1 CPU, 2 GPUs on 1 node; b 1 CPU, 0 GPUs on 2 nodes"
    )
    with pytest.raises(UsageError, match=said):
        divide([Need("a", gpus=2), Need("b", num_nodes=2)], [Room(cpus=2, gpus=1)] * 2)


def test_two_tasks_with_one_port_on_one_node_are_refused_by_name() -> None:
    needs = [Need("a", ports=(8000, 8000)), Need("b", 2, ports=(9000, 8000)), Need("c", ports=(8000,))]
    require_own_ports(needs[:2], [[0], [1, 2]])
    with pytest.raises(UsageError, match="task c: port 8000: b has it on the same node; use another"):
        require_own_ports(needs, [[0], [1, 2], [2]])


def test_the_port_of_a_probe_is_a_port_of_the_task() -> None:
    assert ports_of((9000,), {"port": 8000, "timeout_s": 5}) == (9000, 8000)
    assert ports_of((), {"http": ":8000/health"}) == ports_of((), {"http": "http://localhost:8000"}) == (8000,)
    assert ports_of((8000,), {"port": 8000}) == (8000,) and ports_of((), {"log": "up"}) == ports_of((), None) == ()


def test_a_thousand_nodes_and_a_hundred_tasks_are_packed_at_once() -> None:
    needs = [Need(f"t{index}", num_nodes=1000 if index < 3 else 20, gpus=1) for index in range(100)]
    assert count(pack(needs, Room(gpus=8))) == 1000
