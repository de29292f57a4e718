"""What a Ray cluster has, what a job wants of it, and which node is which: few calls of Ray, else pure words."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from executor.identity import address_of, is_address, normal
from executor.protocol import GangrunError

HEAD_RESOURCE = "node:__internal_head__"
ACCELERATOR_TYPE = (
    "accelerator_type:"  # of which Ray's nodes have 1, https://docs.ray.io/en/latest/ray-core/accelerator-types.html
)
A_LITTLE = 0.001
PACKAGE = "ray[default]"
LISTED_NODES = 8
PULSE_S = 10.0
# Ray ends a driver that has not heard of the head for 60 s, on the spot; ours says before how the job has ended.
OWN_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "120"}
Amounts = Mapping[str, float]


class Node(NamedTuple):
    """One node that is alive."""

    node_id: str
    address: str
    host: str
    total: Amounts


def load() -> Any:
    """The module `ray`. Raises GangrunError, in one line, where there is none."""
    try:
        import ray
    except ImportError as error:
        words = f"Ray is not installed in {sys.executable} ({error}): pip install '{PACKAGE}'"
        raise GangrunError(words) from error
    return ray


def join(namespace: str) -> None:
    """Become a driver of the cluster that runs here. Raises what Ray raises."""
    import ray

    sys.stdout = open(os.devnull, "w")  # Ray prints there what the summary says better; ours goes to the descriptor
    os.environ.update(OWN_PATIENCE)
    with _without_words():
        ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)


def no_cluster(why: str) -> str:
    """What a driver says that has found none."""
    where = os.environ.get("RAY_ADDRESS")
    what = f"no Ray cluster answers at RAY_ADDRESS={where}" if where else "no Ray cluster is running here"
    return f"{what}; this runs on its head node, after `ray start --head`: {why}"


@contextlib.contextmanager
def _without_words() -> Iterator[None]:
    """Ray's C++ part prints a warning each second while nobody answers, whatever its log level; the error says it."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class Pulse:
    """For how long the cluster's head has not answered. It is asked seldom: of a thousand nodes that is a megabyte."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        import ray

        while True:
            try:
                ray.nodes()
                self._answered = time.monotonic()
            except Exception:  # whatever it says, it is no answer
                pass
            time.sleep(self._interval_s)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered


def leave(patience_s: float) -> None:
    """Say farewell to the cluster, unless that takes too long: it notices all the same."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        is_done_within(patience_s, ray.shutdown)


def is_done_within(patience_s: float, action: Callable[[], object]) -> bool:
    """Ray's calls wait long for a head that is gone."""
    thread = threading.Thread(target=quiet(action), daemon=True)
    thread.start()
    thread.join(patience_s)
    return not thread.is_alive()


def quiet(action: Callable[[], object]) -> Callable[[], None]:
    """The same without errors, for what nobody waits for."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    return run


def has_job_directory() -> bool:
    """Whether the workers of this Ray job start in a work directory that came with it."""
    import ray

    return bool(ray.get_runtime_context().runtime_env.get("working_dir"))


def alive_nodes() -> list[Node]:
    """The head first, the others by address: the order does not depend on who joined when."""
    import ray

    found = [_node(entry) for entry in ray.nodes() if entry["Alive"]]
    return sorted(found, key=lambda node: (HEAD_RESOURCE not in node.total, _order(node.address)))


def _node(entry: Mapping[str, Any]) -> Node:
    address, host = str(entry["NodeManagerAddress"]), str(entry["NodeManagerHostname"])
    return Node(str(entry["NodeID"]), address, host, entry["Resources"])


def _order(address: str) -> tuple[list[int], str]:
    return [int(part) for part in address.split(".") if part.isdigit()], address


def free_amounts() -> Mapping[str, Amounts]:
    """What is free, by node id; empty where this Ray does not tell."""
    try:
        from ray._private import state

        own = state.state  # Ray 2.9 has no function for it
        ask = getattr(state, "available_resources_per_node", None) or own._available_resources_per_node
        found: Mapping[str, Amounts] = ask()
        return found
    except (ImportError, AttributeError):
        return {}


# --- what a node must have


def needs(wish: Amounts, nodes: Sequence[Node]) -> dict[str, float]:
    """The bundle of one node, of `{"CPU": 4, "H100": 8}`. An accelerator is what nodes call it: a resource of its own,
    with as many GPUs where such nodes have GPUs; or GPUs of that type."""
    bundle: dict[str, float] = {}
    for name, count in wish.items():
        if count:
            bundle.update({name: count} if name in ("CPU", "GPU") else _accelerator(name, count, nodes))
    return bundle


def _accelerator(name: str, count: float, nodes: Sequence[Node]) -> dict[str, float]:
    owners = [node for node in nodes if node.total.get(name)]
    if owners:
        return {name: count, "GPU": count} if any(node.total.get("GPU") for node in owners) else {name: count}
    kinds = {resource for node in nodes for resource in node.total if resource.startswith(ACCELERATOR_TYPE)}
    for kind in sorted(kinds):
        if kind[len(ACCELERATOR_TYPE) :].lower() == name.lower():
            return {"GPU": count, kind: A_LITTLE}
    return {name: count}


def refuse_impossible(bundle: Amounts, nodes: Sequence[Node]) -> None:
    """Raises GangrunError where no node is large enough, however long one waits."""
    if any(_holds(node.total, bundle) for node in nodes):
        return
    has = (f"{node.address} has {amounts(node.total, bundle)}" for node in nodes)
    raise GangrunError(f"no node of the Ray cluster can ever hold {amounts(bundle, bundle)}: {listed(has)}")


def waiting_words(bundle: Amounts, num_nodes: int, nodes: Sequence[Node], free: Mapping[str, Amounts]) -> str:
    """What a job waits for, and which nodes lack what."""
    wanted = f"waiting for {num_nodes} nodes with {amounts(bundle, bundle)} each"
    lacking = [node for node in nodes if not _holds(free.get(node.node_id, node.total), bundle)]
    lacks = [f"{node.address} has {amounts(free.get(node.node_id, node.total), bundle)} free" for node in lacking]
    few = [f"{len(nodes)} nodes are alive"] if len(nodes) < num_nodes else []
    return f"{wanted}: {listed([*few, *lacks])}" if few or lacks else wanted


def _holds(has: Amounts, bundle: Amounts) -> bool:
    return all(has.get(name, 0) >= count for name, count in bundle.items())


def amounts(of: Amounts, named: Iterable[str]) -> str:
    """`CPU 4, GPU 2`: the amounts of the named resources."""
    return ", ".join(f"{name} {of.get(name, 0):g}" for name in named)


def listed(parts: Iterable[str]) -> str:
    every = list(parts)
    more = [f"and {len(every) - LISTED_NODES} more"] if len(every) > LISTED_NODES else []
    return "; ".join([*every[:LISTED_NODES], *more])


# --- which node is which


def places(nodes: Sequence[Node], cluster_ips: Sequence[str], more: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The place of each node in the job's list, by node id; nodes that are not in it are missing here.

    `more` are further addresses of nodes, by node id. Raises GangrunError where two nodes answer to one entry.
    """
    entries = [{normal(entry), entry if is_address(entry) else address_of(entry) or entry} for entry in cluster_ips]
    found: dict[str, int] = {}
    for node in nodes:
        names = {node.address, node.host, *(normal(name) for name in more.get(node.node_id, ()))}
        place = next((place for place, entry in enumerate(entries) if entry & names), None)
        if place is None:
            continue
        if place in found.values():
            raise GangrunError(
                f"two nodes answer to {cluster_ips[place]!r} of cluster_ips; {node.address} is one of them"
            )
        found[node.node_id] = place
    return found


def one_line(error: BaseException) -> str:
    """Ray's words, which take many lines, in one."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("class_name:", "actor_id:", "namespace:")))[
        :400
    ]
