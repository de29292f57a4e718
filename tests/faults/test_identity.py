"""Nodes whose names and addresses do not say plainly who they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from codegen import SpecError
from tests.bench import Bench, Outcome
from tests.faults.conftest import Fault
from tests.faults.rows import Row
from tests.minislurm.fixtures import BootCluster

KIND = "Identity"
LOGS = ("0-head.log", "1-worker1.log", "2-worker2.log")
WHO = "echo $SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES $SLURMD_NODENAME $SKYPILOT_NODE_IPS"


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the test's own cluster; a test may parametrize it."""
    return {}


@pytest.fixture
def bench(own_cluster: BootCluster, shared_dir: Path, options: dict[str, Any]) -> Bench:
    """On a cluster of its own: names and addresses of nodes are changed."""
    return Bench(own_cluster(**{"nodes": 3, "gpus": 0, **options}), shared_dir)


def on_every_node(bench: Bench, command: str, nodes: Sequence[str] = ()) -> None:
    """Run a shell command in each node; NODE in it is the node's name, NUMBER its place from 1."""
    for number, node in enumerate(bench.cluster.nodes, 1):
        if node in (nodes or bench.cluster.nodes):
            text = command.replace("NODE", node).replace("NUMBER", str(number))
            bench.cluster.run(node, ["sh", "-ec", "export PATH=$PATH:/usr/sbin:/sbin\n" + text], cwd="/")


def known_as(bench: Bench, hosts: str) -> None:
    """Give each node a hosts file of its own; NODE in it is the node's name."""
    for node in bench.cluster.nodes:
        path = bench.directory / f"hosts-{node}"
        path.write_text(hosts.replace("NODE", node))
        bench.cluster.run(node, ["mount", "--bind", path, "/etc/hosts"], cwd="/")


def addresses(bench: Bench) -> list[str]:
    return [bench.cluster.addresses[node] for node in bench.cluster.nodes]


def check_ranks(outcome: Outcome, nodes: Sequence[str], ips: Sequence[str]) -> None:
    """Every node has its own rank and log, and all agree on the addresses, in rank order."""
    assert outcome.code == 0, outcome.output
    for rank, node in enumerate(nodes):
        assert outcome.log(LOGS[rank]) == f"{rank}/{len(nodes)} {node} {' '.join(ips)}\n"


def check(row: Row, bench: Bench, ips: Sequence[str] = (), **fields: Any) -> Outcome:
    """A job with setup and script is as usual: the row says so."""
    outcome = bench.drive(run=WHO, setup="true", **fields)
    check_ranks(outcome, bench.cluster.nodes, ips or addresses(bench))
    row.ended(outcome, bench)
    row.saw("SUCCEEDED: each node its own rank, the same addresses on all", outcome.code)
    return outcome


@pytest.mark.parametrize("name", ["docker0", "virbr0", "tun0"])
@pytest.mark.parametrize("listed", ["names", "addresses"])
def test_a_device_with_one_address_on_all_nodes(bench: Bench, fault: Fault, name: str, listed: str) -> None:
    row = fault(f"{name} with the same address on all nodes; the cluster's list holds {listed}")
    command = f"ip link add {name} type bridge && ip addr add 172.17.0.1/16 dev {name} && ip link set {name} up"
    try:
        on_every_node(bench, command)
    except Exception as why:
        pytest.skip(f"no such device here: {why}")
    check(row, bench, **({"cluster_ips": tuple(addresses(bench))} if listed == "addresses" else {}))


@pytest.mark.parametrize("listed", ["names", "addresses"])
def test_the_host_name_is_loopback(bench: Bench, fault: Fault, listed: str) -> None:
    row = fault(f"127.0.1.1 for the own host name in /etc/hosts, as Debian does; the cluster's list holds {listed}")
    lines = [f"{bench.cluster.addresses[node]} {node}" for node in ("ctl", *bench.cluster.nodes)]
    known_as(bench, "127.0.0.1 localhost\n127.0.1.1 NODE\n" + "\n".join(lines) + "\n")
    check(row, bench, **({"cluster_ips": tuple(addresses(bench))} if listed == "addresses" else {}))


@pytest.mark.parametrize("listed", ["short", "full"])
def test_full_and_short_names(bench: Bench, fault: Fault, listed: str) -> None:
    row = fault(f"two hosts call themselves NODE.cluster.local, one NODE; the cluster's list holds {listed} names")
    on_every_node(bench, "hostname NODE.cluster.local", ["n1", "n2"])
    lines = [f"{ip} {node}.cluster.local {node}" for node, ip in bench.cluster.addresses.items()]
    known_as(bench, "127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    names = tuple(node + (".cluster.local" if listed == "full" else "") for node in bench.cluster.nodes)
    check(row, bench, cluster_ips=names)


def test_slurms_name_is_not_the_hosts(bench: Bench, fault: Fault) -> None:
    row = fault("hosts call themselves otherwise than Slurm does (NodeName), by names that resolve nowhere")
    on_every_node(bench, "hostname compute-NUMBER-x")
    check(row, bench)


def test_hosts_with_swapped_names(bench: Bench, fault: Fault) -> None:
    row = fault("two hosts call themselves by each other's Slurm name")
    on_every_node(bench, "hostname n2", ["n1"])
    on_every_node(bench, "hostname n1", ["n2"])
    check(row, bench)


@pytest.mark.parametrize("nodes", [1, 3])
def test_addresses_of_another_subnet(bench: Bench, fault: Fault, nodes: int) -> None:
    row = fault(f"the cluster's list holds addresses that no node has ({nodes} of {nodes})")
    foreign = tuple(f"10.244.9.{number}" for number in range(1, nodes + 1))
    outcome = bench.drive(run=WHO, setup="true", nodes=nodes, cluster_ips=foreign)
    if nodes == 3:
        check_ranks(outcome, bench.cluster.nodes, foreign)
    warnings = [
        line for line in outcome.plain.splitlines() if "no address of this host is in the cluster's list" in line
    ]
    assert outcome.code == 0 and len(warnings) == 2 * nodes, outcome.output
    row.ended(outcome, bench)
    row.saw("SUCCEEDED; " + warnings[0].replace("gangrun: ", ""), 0)


def test_addresses_that_only_the_head_has(bench: Bench, fault: Fault) -> None:
    """skypilot-org/skypilot#10333: addresses noted when the cluster was made are not those that its nodes see."""
    row = fault("the cluster's list holds addresses of another subnet, of which only the head has its own")
    on_every_node(bench, "ip addr add 10.244.9.1/24 dev eth0", ["n1"])
    foreign = tuple(f"10.244.9.{number}" for number in (1, 2, 3))
    outcome = bench.drive(run=WHO, setup="true", cluster_ips=foreign)
    check_ranks(outcome, bench.cluster.nodes, foreign)
    warnings = [line for line in outcome.plain.splitlines() if "no address of this host is in the cluster's" in line]
    assert len(warnings) == 2 * 2, outcome.output
    row.ended(outcome, bench)
    row.saw("SUCCEEDED; " + warnings[0].replace("gangrun: ", ""), 0)


def test_names_of_another_network(bench: Bench, fault: Fault) -> None:
    """skypilot-org/skypilot#8337: NodeAddr is a name of its own, and addresses were compared with names."""
    row = fault("the cluster's list holds NodeAddr names, which resolve to addresses of another network")
    on_every_node(bench, "ip addr add 10.66.0.NUMBER/24 dev eth0")
    lines = [f"{ip} {node}" for node, ip in bench.cluster.addresses.items()]
    lines += [f"10.66.0.{number} n{number}-mgmt" for number in (1, 2, 3)]
    known_as(bench, "127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    outcome = bench.drive(run=WHO, setup="true", cluster_ips=("n1-mgmt", "n2-mgmt", "n3-mgmt"))
    check_ranks(outcome, bench.cluster.nodes, [f"10.66.0.{number}" for number in (1, 2, 3)])
    row.ended(outcome, bench)


def test_one_wrong_address(bench: Bench, fault: Fault) -> None:
    row = fault("one of the three addresses in the cluster's list is wrong")
    first, _, last = addresses(bench)
    outcome = bench.drive(run=WHO, cluster_ips=(first, "10.244.9.9", last))
    check_ranks(outcome, bench.cluster.nodes, (first, "10.244.9.9", last))
    warnings = [line for line in outcome.plain.splitlines() if "took entry 1 (10.244.9.9), the place of n2" in line]
    assert len(warnings) == 1
    row.ended(outcome, bench)
    row.saw("SUCCEEDED; " + warnings[0].replace("gangrun: ", ""), 0)


def test_names_that_resolve_at_the_controller_only(bench: Bench, fault: Fault) -> None:
    row = fault("the cluster's list holds NodeAddr names that no node can resolve")
    outcome = bench.drive(run=WHO, cluster_ips=("n1-mgmt", "n2-mgmt", "n3-mgmt"))
    check_ranks(outcome, bench.cluster.nodes, addresses(bench))
    row.ended(outcome, bench)


def test_the_cluster_is_larger_than_the_job(bench: Bench, fault: Fault) -> None:
    row = fault("a job on n2 and n3 only; the cluster's list holds all three")
    outcome = bench.drive(run=WHO, nodes=2, cluster_ips=tuple(addresses(bench)), sbatch="--nodelist=n2,n3")
    ips = " ".join(addresses(bench)[1:])
    assert outcome.code == 0 and outcome.log("0-worker1.log") == f"0/2 n2 {ips}\n", outcome.output
    assert outcome.log("1-worker2.log") == f"1/2 n3 {ips}\n"
    row.ended(outcome, bench)


def test_a_node_that_is_in_no_list(bench: Bench, fault: Fault) -> None:
    row = fault("a job on n2 and n3; the cluster's list holds n1 and n2")
    outcome = bench.drive(run="touch started; sleep 4541", nodes=2, cluster_ips=("n1", "n2"), sbatch="--nodelist=n2,n3")
    assert outcome.code == 125 and outcome.status["state"] == "FAILED_DRIVER", outcome.output
    assert "this node is not in --cluster-ips=n1,n2; tried: host name n3" in outcome.plain
    assert "n3" in outcome.status["reason"] and "not in --cluster-ips" in outcome.status["reason"]
    row.ended(outcome, bench, "sleep 4541")


def test_a_node_listed_twice(bench: Bench, fault: Fault) -> None:
    row = fault("the cluster's list names a node twice")
    with pytest.raises(SpecError, match="each node once"):
        bench.submit(run="true", cluster_ips=("n1", "n2", "n2"))
    command = bench.executor("touch started", srun="--nodes=3")
    command = command.replace("$(scontrol show hostnames | paste -sd,)", "n1,n2,n2")
    outcome = bench.run_batch(command)
    assert outcome.code == 2 and not (bench.directory / "started").exists()
    line = next(line for line in outcome.output.splitlines() if "names a node twice" in line)
    row.saw(line, outcome.code)
    row.check_nothing_left(bench)


def test_ipv6(bench: Bench, fault: Fault) -> None:
    row = fault("the cluster's list holds IPv6 addresses, written in another way than the kernel writes them")
    try:
        on_every_node(bench, "ip -6 addr add fd00::1:NUMBER/64 dev eth0 nodad")
    except Exception as why:
        pytest.skip(f"no IPv6 here: {why}")
    listed = tuple(f"FD00:0:0::1:{number}" for number in (1, 2, 3))
    outcome = bench.drive(run=WHO, cluster_ips=listed, setup="true")
    assert outcome.code == 0 and "no address of this host" not in outcome.output, outcome.output
    lines = [outcome.log(name).split() for name in LOGS]
    assert [line[:2] for line in lines] == [["0/3", "n1"], ["1/3", "n2"], ["2/3", "n3"]]
    assert lines[0][2:] == lines[1][2:] == lines[2][2:] == [f"fd00::1:{number}" for number in (1, 2, 3)]
    row.ended(outcome, bench)


@pytest.mark.parametrize("options", [{"extra_conf": "CommunicationParameters=EnableIPv6"}], ids=[""])
def test_ipv6_names_only(bench: Bench, fault: Fault) -> None:
    row = fault("node names resolve to IPv6 addresses only")
    try:
        on_every_node(bench, "ip -6 addr add fd00::1:NUMBER/64 dev eth0 nodad")
    except Exception as why:
        pytest.skip(f"no IPv6 here: {why}")
    lines = [f"fd00::1:{number} n{number}" for number in (1, 2, 3)]
    known_as(bench, f"127.0.0.1 localhost\n{bench.cluster.addresses['ctl']} ctl\n" + "\n".join(lines) + "\n")
    command = bench.executor(WHO, f"--cluster-home-dir={bench.directory}")
    outcome = bench.run_batch(command)
    check_ranks(outcome, bench.cluster.nodes, [f"fd00::1:{number}" for number in (1, 2, 3)])
    row.saw("exit code 0, the IPv6 addresses in rank order", 0)
    row.check_nothing_left(bench)


@pytest.mark.parametrize(
    "options",
    [
        {"node_names": ("n1", "n10", "n100")},
        {"node_names": ("ml-16-node-001", "ml-16-node-002", "ml-16-node-004")},
        {"node_names": ("a-1", "a1", "n")},
        {"node_names": ("rack0n09", "rack0n10", "rack1n09")},
    ],
    ids=lambda options: ", ".join(options["node_names"]),
)
def test_names_that_are_alike(bench: Bench, fault: Fault, options: dict[str, Any]) -> None:
    row = fault("nodes are called " + ", ".join(options["node_names"]))
    check(row, bench)


def test_slurms_commands_are_absent(bench: Bench, fault: Fault) -> None:
    row = fault("no Slurm command in PATH inside the step")
    bin_directory = bench.directory / "bin"
    bin_directory.mkdir()
    for program in ("bash", "sleep"):
        (bin_directory / program).symlink_to(f"/bin/{program}")
    inside = f"env PATH={bin_directory} {sys.executable} -m executor.slurm"
    command = bench.executor("type srun scontrol; " + WHO).replace(f"{sys.executable} -m executor.slurm", inside)
    outcome = bench.run_batch(command)
    ips = " ".join(addresses(bench))
    assert outcome.code == 0 and outcome.log(LOGS[2]).endswith(f"\n2/3 n3 {ips}\n"), outcome.output
    assert outcome.log(LOGS[2]).count("not found") == 2
    row.saw("exit code 0: Slurm's variables and the host's own addresses are enough", 0)
    row.check_nothing_left(bench)


def test_several_tasks_on_a_node(bench: Bench, fault: Fault) -> None:
    row = fault("`srun --ntasks-per-node=2`")
    command = bench.executor("touch started", srun="--nodes=3").replace("--ntasks-per-node=1", "--ntasks-per-node=2")
    outcome = bench.run_batch(command, sbatch="--ntasks-per-node=2")
    line = next((line for line in outcome.output.splitlines() if "gangrun: " in line), outcome.output)
    assert outcome.code == 2 and "gangrun runs one task per node" in line and not (bench.directory / "started").exists()
    row.saw(line, outcome.code)
    row.check_nothing_left(bench)


def test_a_step_started_from_outside_of_the_allocation(bench: Bench, fault: Fault) -> None:
    row = fault("the step is started on the login node (`srun --jobid=`), which is not in the allocation")
    job_id = bench.batch("sleep 60")
    bench.cluster.wait_state(job_id, "RUNNING")
    command = bench.executor(WHO, f"--cluster-home-dir={bench.directory}", srun=f"--jobid={job_id} --nodes=3 --overlap")
    command = command.replace("$SLURM_JOB_NUM_NODES", "3").replace(
        "$(scontrol show hostnames | paste -sd,)", "n1,n2,n3"
    )
    environ = {"PYTHONPATH": bench.environ["PYTHONPATH"], "HOME": str(bench.directory)}
    bench.cluster.run("ctl", ["bash", "-c", command], cwd=bench.directory, env=environ)
    for rank, node in enumerate(bench.cluster.nodes):
        log = (bench.directory / "logs" / LOGS[rank]).read_text()
        assert log == f"{rank}/3 {node} {' '.join(addresses(bench))}\n"
    bench.cluster.run("ctl", ["scancel", str(job_id)])
    bench.cluster.wait_job(job_id)
    row.saw("exit code 0, rank 0 is the first node of the step", 0)
    row.check_nothing_left(bench)


def test_the_same_ranks_every_time(bench: Bench, fault: Fault) -> None:
    row = fault("the same job five times: are its ranks on the same nodes?")
    command = bench.executor(WHO)
    outcome = bench.run_batch(f"for i in 1 2 3 4 5; do {command}; done")
    for rank, node in enumerate(bench.cluster.nodes):
        assert outcome.log(LOGS[rank]).splitlines().count(f"{rank}/3 {node} {' '.join(addresses(bench))}") == 5
    row.saw("the same map each time, rank 0 on the head", outcome.code)
    row.check_nothing_left(bench)
