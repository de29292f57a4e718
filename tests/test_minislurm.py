from __future__ import annotations

from tests.minislurm import Cluster


def test_shared_a(cluster: Cluster) -> None:
    assert sorted(cluster.run("ctl", ["srun", "-N4", "hostname"]).stdout.split()) == cluster.nodes


def test_shared_b(cluster: Cluster) -> None:
    assert sorted(cluster.run("ctl", ["srun", "-N4", "hostname"]).stdout.split()) == cluster.nodes


def test_own(own_cluster) -> None:
    c = own_cluster(nodes=2)
    assert sorted(c.run("ctl", ["srun", "-N2", "hostname"]).stdout.split()) == c.nodes


def test_own2(own_cluster) -> None:
    c = own_cluster(nodes=2)
    assert sorted(c.run("ctl", ["srun", "-N2", "hostname"]).stdout.split()) == c.nodes
