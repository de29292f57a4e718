"""Who a rank is and where its peers are, whatever a site's names and addresses look like."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from executor import identity, protocol
from executor.identity import Identity, expand_hosts
from executor.protocol import GangrunError, UsageError

CHECKOUT = Path(__file__).resolve().parent.parent
DNS = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
NAMES = tuple(DNS)
IPS = tuple(DNS.values())


def variables(rank: int, nodes: Sequence[str] = NAMES, **more: str) -> dict[str, str]:
    """What srun tells the task `rank` of a step with one task on each of `nodes`."""
    return {
        protocol.SLURM_PROCID: str(rank),
        protocol.SLURM_STEP_NUM_TASKS: str(len(nodes)),
        protocol.SLURM_STEP_NODELIST: ",".join(nodes),
        protocol.SLURM_JOB_NODELIST: ",".join(nodes),
        protocol.SLURMD_NODENAME: nodes[rank],
        **more,
    }


def resolve(
    rank: int,
    cluster: Sequence[str],
    own: Sequence[str] = (),
    dns: Mapping[str, str] = DNS,
    nodes: Sequence[str] = NAMES,
    **more: str,
) -> Identity:
    return identity.resolve(variables(rank, nodes, **more), cluster, resolver(dns), lambda: list(own))


def resolver(dns: Mapping[str, str]) -> identity.Resolver:
    return lambda name: identity.normal(name) if identity.is_address(name) else dns.get(name)


def whole_gang(
    cluster: Sequence[str], own: Mapping[str, Sequence[str]], dns: Mapping[str, str] = DNS, nodes: Sequence[str] = NAMES
) -> tuple[list[Identity], list[str]]:
    """Every rank's identity, and the addresses, which must be the same on each of them."""
    ranks = [resolve(rank, cluster, own.get(node, ()), dns, nodes) for rank, node in enumerate(nodes)]
    seen = {tuple(identity.node_ips(me, cluster, me.hosts, resolver(dns))) for me in ranks}
    assert len(seen) == 1, f"the ranks do not agree on the addresses: {sorted(seen)}"
    return ranks, list(seen.pop())


# --- host lists


@pytest.mark.parametrize(
    "text, hosts",
    [
        pytest.param("linux[1,2]", "linux1 linux2", id="B1"),
        pytest.param(
            "ml-16-node-[001-002,004],ml-17-node-[1-3]",
            "ml-16-node-001 ml-16-node-002 ml-16-node-004 ml-17-node-1 ml-17-node-2 ml-17-node-3",
            id="B1 two racks",
        ),
        pytest.param("n[001-003]", "n001 n002 n003", id="B2"),
        pytest.param("n[009-011]", "n009 n010 n011", id="B2 over a ten"),
        pytest.param("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC", id="B4"),
        pytest.param("n", "n", id="B5 no digits"),
        pytest.param("gpu-a-7.cluster.local", "gpu-a-7.cluster.local", id="B5 domain"),
        pytest.param("host[001,003-004,006]", "host001 host003 host004 host006", id="B5 mixed"),
        pytest.param(
            "foo003,foo0[10-12],foo[103-104],foo-m11-16",
            "foo003 foo010 foo011 foo012 foo103 foo104 foo-m11-16",
            id="B5 dashes",
        ),
        pytest.param("rack[0-1]n[0-1]", "rack0n0 rack0n1 rack1n0 rack1n1", id="B7"),
        pytest.param("n[3,1]", "n3 n1", id="B7 order kept"),
    ],
)
def test_a_host_list_means_what_slurm_means(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    ["", " ", "n[", "n]", "n[1-3", "n[3-1]", "n[1-70000]", "n[1-50000][1-50000]", "n[1-99999999999]", "n[1,,2]"]
    + ["n1,", ",n1", "n1,,n2", " n1", "n1, n2", "n1 n2", "n1\n", "n[a-b]", "n[1-]", "n[]", "n[[1-2]]", "n(1)", "{n1}"],
)
def test_what_is_no_host_list_is_quoted_in_the_error_b8(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST=") as error:
        expand_hosts(text, protocol.SLURM_STEP_NODELIST)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_a_host_named_twice_is_refused_b7() -> None:
    with pytest.raises(UsageError, match="names a host twice"):
        expand_hosts("n[1-3],n2")


def test_the_steps_nodes_come_before_the_jobs() -> None:
    environ = variables(0, ["n2", "n3"], **{protocol.SLURM_JOB_NODELIST: "n[1-3]", protocol.SLURM_NODELIST: "n[1-3]"})
    assert identity.step_hosts(environ) == ["n2", "n3"]
    del environ[protocol.SLURM_STEP_NODELIST]
    assert identity.step_hosts(environ) == ["n1", "n2", "n3"]


# --- the place in the cluster


@pytest.mark.parametrize("rank, node", [(0, "head"), (1, "worker1"), (2, "worker2")])
def test_a_node_finds_itself_by_an_address_of_its_own(rank: int, node: str) -> None:
    me = resolve(rank, IPS, own=[IPS[rank]])
    assert (me.rank, me.num_ranks, me.node, me.address, me.warning) == (rank, 3, node, IPS[rank], "")


def test_a_step_on_the_last_nodes_counts_ranks_from_0_and_nodes_from_the_cluster() -> None:
    me = resolve(0, IPS, own=["10.0.0.2"], nodes=["n2", "n3"])
    assert (me.rank, me.num_ranks, me.node) == (0, 2, "worker1")
    assert identity.node_ips(me, IPS, me.hosts, resolver(DNS)) == ["10.0.0.2", "10.0.0.3"]


def test_ranks_and_addresses_follow_the_step_not_the_cluster_a9() -> None:
    nodes = ["n3", "n1", "n2"]
    ranks, addresses = whole_gang(IPS, {name: [ip] for name, ip in DNS.items()}, nodes=nodes)
    assert [me.node for me in ranks] == ["worker2", "head", "worker1"]
    assert addresses == ["10.0.0.3", "10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize(
    "cluster, own, dns, address",
    [
        pytest.param(IPS, ["172.17.0.1", "192.168.122.1", "10.0.0.2"], DNS, "10.0.0.2", id="A1 other addresses first"),
        pytest.param(("m1", "m2", "m3"), ["10.0.0.2"], {"m2": "10.0.0.2"}, "10.0.0.2", id="A4 names of another net"),
        pytest.param(NAMES, ["10.0.0.2"], {}, "10.0.0.2", id="A4 names that do not resolve"),
        pytest.param(NAMES, ["10.0.0.2"], {**DNS, "n2": "127.0.1.1"}, "10.0.0.2", id="own name on loopback"),
        pytest.param(("fd00:0::1", "FD00::2", "fd00::3"), ["fd00::2"], {}, "fd00::2", id="A12"),
        pytest.param(("n1.c.local", "n2.c.local", "n3.c.local"), ["10.0.0.2"], DNS, "10.0.0.2", id="A13 long list"),
        pytest.param(IPS, [], {"n2": "10.0.0.2"}, "10.0.0.2", id="A14 only the node's name resolves"),
    ],
)
def test_a_node_is_found(cluster: Sequence[str], own: Sequence[str], dns: Mapping[str, str], address: str) -> None:
    me = resolve(1, cluster, own, dns)
    assert (me.node, me.address, me.warning) == ("worker1", address, "")


def test_a_long_node_name_matches_a_short_entry_a13() -> None:
    nodes = ["n1.c.local", "n2.c.local"]
    assert resolve(1, ("n1", "n2"), nodes=nodes, dns={}, own=["10.0.0.2"]).node == "worker1"


def test_slurms_node_name_counts_not_the_hosts_a14() -> None:
    nodes = ["gpu1", "gpu2", "gpu3"]
    assert [resolve(rank, nodes, nodes=nodes).node for rank in range(3)] == ["head", "worker1", "worker2"]


def test_two_names_of_which_one_is_the_others_beginning_are_two_nodes() -> None:
    nodes = ["n1", "n10", "n1.b"]
    assert [resolve(rank, nodes, nodes=nodes, dns={}).node_index for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("cluster", [("10.9.9.1", "10.9.9.2"), ("10.0.0.1",)])
def test_a_node_that_is_nowhere_in_the_list_is_never_the_head_a14(cluster: Sequence[str]) -> None:
    with pytest.raises(GangrunError) as error:
        resolve(2, cluster, own=["10.7.7.7", "10.8.8.8"])
    for tried in (*cluster, "10.7.7.7", "10.8.8.8", "n3", "10.0.0.3", "host name", protocol.SLURMD_NODENAME):
        assert tried in str(error.value)
    assert "\n" not in str(error.value)


# --- lists that disagree with what the nodes see


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_foreign_list_gives_places_in_the_jobs_order_a2(nodes: int) -> None:
    cluster = ["10.244.0.%d" % (index + 1) for index in range(nodes)]
    own = {name: [ip] for name, ip in DNS.items()}
    ranks, addresses = whole_gang(cluster, own, nodes=NAMES[:nodes])
    assert [me.node_index for me in ranks] == list(range(nodes))
    assert [me.address for me in ranks] == cluster == addresses
    assert all("no address of this host is in the cluster's list" in me.warning for me in ranks)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("wrong", ["first", "last", "all"])
def test_wrong_entries_never_permute_ranks_a8(nodes: int, wrong: str) -> None:
    cluster = list(IPS[:nodes])
    for index in {"first": [0], "last": [nodes - 1], "all": range(nodes)}[wrong]:
        cluster[index] = "10.9.9.%d" % (index + 1)
    ranks, addresses = whole_gang(cluster, {name: [ip] for name, ip in DNS.items()}, nodes=NAMES[:nodes])
    assert [me.node_index for me in ranks] == list(range(nodes))
    assert addresses[0] == ranks[0].address


@pytest.mark.parametrize(
    "cluster, dns",
    [
        pytest.param(("fd00:0::1", "FD00::2", "fd00:0:0::3"), {}, id="A12"),
        pytest.param(NAMES, DNS, id="A4"),
        pytest.param(("n1.c.local", "n2.c.local", "n3.c.local"), DNS, id="A13"),
    ],
)
def test_all_ranks_agree_on_the_addresses(cluster: Sequence[str], dns: Mapping[str, str]) -> None:
    own = {name: [ip] for name, ip in DNS.items()}
    if not dns:
        dns = {name: "fd00::%d" % (index + 1) for index, name in enumerate(NAMES)}
        own = {name: [ip] for name, ip in dns.items()}
    _, addresses = whole_gang(cluster, own, dns)
    assert [identity.normal(address) for address in addresses] == list(dns.values())


def test_a_peer_without_an_address_is_named() -> None:
    me = resolve(0, IPS, own=["10.0.0.1"], nodes=["n1", "n9"])
    with pytest.raises(GangrunError, match="no address for host 'n9'"):
        identity.node_ips(me, IPS, me.hosts, resolver(DNS))


# --- what Slurm says


@pytest.mark.parametrize(
    "changes, words",
    [
        ({protocol.SLURM_PROCID: None}, "SLURM_PROCID='' is not a number: start this under srun"),
        ({protocol.SLURM_PROCID: "one"}, "SLURM_PROCID='one' is not a number"),
        ({protocol.SLURM_PROCID: "3"}, "SLURM_PROCID=3 but the step has 3 tasks"),
        ({protocol.SLURM_STEP_NUM_TASKS: "6"}, "one task per node; give srun --ntasks-per-node=1"),
        (
            {protocol.SLURM_STEP_NODELIST: None, protocol.SLURM_JOB_NODELIST: None},
            "SLURM_STEP_NODELIST is not set: start this under srun",
        ),
    ],
    ids=["no rank", "rank is no number", "rank too high", "A10 two tasks on a node", "not under srun"],
)
def test_what_slurm_did_not_say_is_told(changes: Mapping[str, str | None], words: str) -> None:
    environ = {**variables(0), **{name: text for name, text in changes.items() if text is not None}}
    for name in [name for name, text in changes.items() if text is None]:
        del environ[name]
    with pytest.raises(GangrunError) as error:
        identity.resolve(environ, IPS, resolver(DNS), lambda: ["10.0.0.1"])
    assert words in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
@pytest.mark.parametrize("bridge", ["docker0", "virbr0", "br-1234", "cni0"])
def test_a_bridge_that_every_node_has_is_no_address_a1(bridge: str) -> None:
    script = """
        ip link set lo up; ip link add {0} type bridge; ip address add 172.17.0.1/16 dev {0}; ip link set {0} up
        ip link add eth0 type veth peer name eth1; ip link set eth1 up; ip link set eth0 up
        ip address add 10.0.0.1/24 dev eth0; ip address add fd00::1/64 dev eth0 nodad
        exec {1} -c 'from executor import interfaces; print(*interfaces.addresses())'
    """
    command = ["unshare", "--net", "sh", "-ec", script.format(bridge, sys.executable)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode and "ermitted" in done.stderr:
        pytest.skip("no network of its own here: " + done.stderr)
    assert (done.stdout, done.stderr) == ("10.0.0.1 fd00::1\n", "")
