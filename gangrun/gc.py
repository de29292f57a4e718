"""Old runs and snapshots on a cluster: what nobody needs any more, and its removal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gangrun.agent import RUNS, SNAPSHOTS
from gangrun.cluster import Cluster

LISTING_TIMEOUT_S = 300.0


class Entry(NamedTuple):
    kind: str
    name: str
    bytes: int
    age_s: float


def collect(cluster: Cluster, older_than_s: float) -> list[Entry]:
    """Runs that ended and were last written to that long ago, and snapshots that no other run came from."""
    cluster.refresh()
    found = cluster.host.call("sizes", root=cluster.root, timeout_s=LISTING_TIMEOUT_S)
    entries = [Entry(one["kind"], one["name"], one["bytes"], one["age_s"]) for one in found["entries"]]
    old = [entry for entry in entries if entry.age_s >= older_than_s]
    in_flight = {run.run for run in cluster.records.in_flight(cluster.name)} | set(found["live"])
    runs = [entry for entry in old if entry.kind == RUNS and entry.name not in in_flight]
    gone = {entry.name for entry in runs}
    needed = {digest for run, digests in found["used"].items() if run not in gone for digest in digests}
    snapshots = [entry for entry in old if entry.kind == SNAPSHOTS and entry.name.partition(".")[0] not in needed]
    return [*runs, *snapshots]


def remove(cluster: Cluster, entries: Sequence[Entry]) -> None:
    runs = [{"run": entry.name, "job": None} for entry in entries if entry.kind == RUNS]
    snapshots = [entry.name for entry in entries if entry.kind == SNAPSHOTS]
    cluster.host.call("remove", root=cluster.root, runs=runs, snapshots=snapshots, timeout_s=LISTING_TIMEOUT_S)
    for entry in entries:
        if entry.kind == RUNS:
            cluster.records.forget(entry.name)
