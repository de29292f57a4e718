"""Why a job waits and why one ended: from what Slurm 22.05 and 24.11 really printed, and once from a live cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from executor.report import rank_reports
from executor.verdict import judge
from gangrun.explain import reasons
from gangrun.explain import waiting as explain
from gangrun.explain.nodes import gpus_in, has_features, parse_jobs, parse_nodes, seconds, states_in
from gangrun.explain.waiting import COMMANDS, CommandResult, Explanation, commands, why_ended, why_waiting
from tests.bench import Bench
from tests.minislurm.cluster import Cluster
from tests.minislurm.fixtures import BootCluster
from tests.minislurm.options import CONTROLLER
from tests.test_other_slurm import other_suite

# --- recorded: one line of each kind, of each version; what differs between the tests is put in by replacement

JOB_22 = (
    "JobId=5 JobName=frag UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=4294901755 Nice=0 Account=(null) "
    "QOS=(null) JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:00 TimeLimit=02:00:00 TimeMin=N/A SubmitTime=2026-11-29T17:06:29 "
    "EligibleTime=2026-11-29T17:06:29 AccrueTime=2026-11-29T17:06:29 StartTime=2026-11-29T18:06:27 "
    "EndTime=2026-11-29T20:06:27 Deadline=N/A SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-29T17:06:34 "
    "Scheduler=Main Partition=main AllocNode:Sid=0.0.0.0:0 ReqNodeList=(null) ExcNodeList=(null) NodeList= "
    "SchedNodeList=n[1-2] NumNodes=2-2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=2,mem=1000M,node=2,billing=2 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* MinCPUsNode=1 "
    "MinMemoryCPU=500M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
    "Licenses=(null) Network=(null) Command=(null) WorkDir=/tmp StdErr=/tmp/slurm-5.out StdIn=/dev/null "
    "StdOut=/tmp/slurm-5.out Power= TresPerNode=gres:gpu:8 "
)
JOB_24 = JOB_22.replace(
    "TRES=cpu=2,mem=1000M,node=2,billing=2", "ReqTRES=cpu=2,mem=1000M,node=2,billing=2 AllocTRES=(null)"
)
JOB_24 = JOB_24.replace("Power= TresPerNode=gres:gpu:8", "TresPerNode=gres/gpu:8").replace("=Main", "=Backfill:*")
NODE_22 = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=4 CPUEfctv=64 CPUTot=64 CPULoad=1.25 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=gpu:h100:8 GresDrain=N/A GresUsed=gpu:h100:5(IDX:0-4) NodeAddr=n1 NodeHostName=n1 "
    "Version=22.05.8 OS=Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=512000 AllocMem=1000 FreeMem=21630 "
    "Sockets=64 Boards=1 State=MIXED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main,short "
    "BootTime=2026-11-29T16:57:10 SlurmdStartTime=2026-11-29T17:05:34 LastBusyTime=2026-11-29T17:05:34 "
    "CfgTRES=cpu=64,mem=500G,billing=64 AllocTRES=cpu=4,mem=1000M CapWatts=n/a CurrentWatts=0 AveWatts=0 "
    "ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)
NODE_24 = (
    NODE_22.replace("22.05.8", "24.11.5").partition(" CapWatts")[0].replace(" CfgTRES", " ResumeAfterTime=None CfgTRES")
)
NODE_24 += " CurrentWatts=0 AveWatts=0 "
PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
    "OverSubscribe=NO OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=256,mem=2000G,node=4,billing=256"
)
SHORT = PARTITION.replace("=main", "=short").replace(
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED", "MaxNodes=2 MaxTime=00:10:00"
)
RESERVATION = (
    "ReservationName=maint1 StartTime=2026-11-29T17:36:29 EndTime=2026-11-29T19:36:29 Duration=02:00:00 Nodes=n[1-4] "
    "NodeCnt=4 CoreCnt=256 Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=256 "
    "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) MaxStartDelay=(null)"
)
LINE = "5|4294901755|ann|2|2026-11-29T18:06:27|Resources"
NOW = "2026-11-29T17:06:40"
BOTH = pytest.mark.parametrize("job, node", ((JOB_22, NODE_22), (JOB_24, NODE_24)), ids=("22.05", "24.11"))


def node(name: str, line: str = NODE_22, used: int = 0, **changes: str) -> str:
    """A node with so many of its 8 GPUs in use."""
    line = line.replace("n1", name).replace(
        "gpu:h100:5(IDX:0-4)", f"gpu:h100:{used}({f'IDX:0-{used}' if used else 'IDX:N/A'})"
    )
    changes = {"CPUAlloc": "0", "AllocMem": "0", **changes} if not used else changes
    return changed(line, **changes)


def changed(line: str, **changes: str) -> str:
    words = [word for word in line.split(" ") if word.partition("=")[0] not in changes]
    return " ".join([*words, *(f"{key}={value}" for key, value in changes.items())])


def nodes_with(*used: int, line: str = NODE_22) -> list[str]:
    return [node(f"n{number}", line, gpus) for number, gpus in enumerate(used, start=1)]


def answers(job: str, nodes: list[str], **texts: str | None) -> dict[str, CommandResult]:
    """None stands for a command that fails."""
    said: dict[str, str | None] = {
        "now": NOW,
        "job": job,
        "nodes": "\n".join(nodes),
        "partitions": f"{PARTITION}\n{SHORT}",
        "reservations": "No reservations in the system",
        "start": "",
        "line": LINE,
        "mine": "",
        **texts,
    }
    failed = CommandResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    return {name: failed if text is None else CommandResult(0, text, "") for name, text in said.items()}


def explained(job: str, nodes: list[str], **texts: str | None) -> Explanation:
    found = why_waiting(answers(job, nodes, **texts))
    assert all("\n" not in line for line in (found.headline, *found.facts, *found.advice))
    return found


def has(lines: tuple[str, ...], *words: str) -> bool:
    return any(all(word in line for word in words) for line in lines)


# --- what the nodes hold


@BOTH
def test_free_gpus_that_are_scattered_are_told_node_by_node(job: str, node: str) -> None:
    found = explained(job, nodes_with(5, 6, 6, 7, line=node), start="5|2026-11-29T18:06:27")
    asked = "you asked for 2 nodes with 8 each: no node qualifies"
    assert found.headline == f"8 GPUs are free, on 4 nodes (3+2+2+1); {asked}"
    assert has(found.facts, "Slurm's estimate", "2026-11-29 18:06 (in 59 min)")
    assert found.advice == ("2 nodes with 2 GPUs each would find room now",)


def test_enough_gpus_on_too_many_nodes_are_offered_as_more_nodes_with_fewer() -> None:
    found = explained(JOB_22, nodes_with(4, 4, 4, 3))
    assert found.headline.startswith("17 GPUs are free, but on 4 nodes (5+4+4+4); you asked for 2 nodes with 8 each")
    assert found.advice == ("4 nodes with 4 GPUs each (16 as before) would find room now",)


def test_a_partition_of_a_thousand_nodes_takes_well_under_a_second_and_short_words() -> None:
    many = [node(f"n{number}", used=1 + number % 7) for number in range(1, 1001)]
    begun = time.perf_counter()
    found = explained(
        JOB_22,
        many,
        partitions=PARTITION.replace("TotalNodes=4", "TotalNodes=1000"),
        reservations="\n".join(50 * [RESERVATION]),
    )
    assert time.perf_counter() - begun < 0.8
    assert found.headline == (
        "3997 GPUs are free, but on 1000 nodes (142 x 7, 143 x 6, 143 x 5, 143 x 4, 143 x 3, 143 x 2, 143 x 1); "
        "you asked for 2 nodes with 8 each: no node qualifies"
    )


def test_one_node_too_few_is_told_as_such() -> None:
    assert explained(JOB_22, nodes_with(0, 1, 1, 1)).headline.endswith("2 nodes with 8 each: only 1 node qualifies")


def test_gpus_that_slurm_may_spread_are_counted_together() -> None:
    job = changed(JOB_22, TresPerNode="", TresPerJob="gres:gpu:12")
    assert explained(job, nodes_with(3, 3, 4, 4)).headline.endswith(
        "you asked for 12 on 2 nodes: 2 nodes have at most 10 free"
    )
    assert "about to start" in explained(job, nodes_with(0, 4, 6, 6)).headline


def test_gpus_that_accounting_counts_are_read_where_scontrol_gives_no_details() -> None:
    plain = [line.replace("GresDrain=N/A ", "").replace("GresUsed=", "Ignored=") for line in nodes_with(5, 6, 6, 7)]
    tres = "CfgTRES=cpu=64,gres/gpu=8,gres/gpu:h100=8 AllocTRES=cpu=2,mem=1000M,gres/gpu=3,gres/gpu:h100=3"
    counted = [line.replace("CfgTRES=cpu=64,mem=500G,billing=64 AllocTRES=cpu=4,mem=1000M", tres) for line in plain]
    assert explained(JOB_22, counted).headline.startswith("20 GPUs are free, but on 4 nodes (5+5+5+5)")
    assert has(explained(JOB_22, plain).facts, "unknown: how many GPUs are in use")


def test_what_no_node_has_is_said_with_the_most_there_is() -> None:
    found = explained(changed(JOB_22, TresPerNode="gres:gpu:16"), nodes_with(0, 0, 0, 0))
    assert found.headline == (
        "no node of partition main has 16 GPUs: the most is 8 h100 GPUs; you asked for 2 nodes with 16 GPUs each"
    )
    typed = explained(changed(JOB_22, TresPerNode="gres/gpu:a100:2"), nodes_with(0, 0, 0, 0))
    assert typed.headline.startswith("no node of partition main has 2 a100 GPUs: the most is 8 h100 GPUs")
    assert "with GPUs of any type instead of a100 it would find room now" in typed.advice


def test_more_nodes_than_could_ever_hold_it_are_no_matter_of_waiting() -> None:
    job = changed(JOB_22, MinCPUsNode="65")
    assert explained(job, nodes_with(0, 0, 0, 0)).headline.startswith(
        "no node of partition main could hold it, even if idle"
    )
    one = [*nodes_with(0, 0, 0), node("n4", CPUEfctv="128")]
    assert explained(job, one).headline.startswith("only 1 node of partition main could hold it, even if idle")


def test_nodes_out_of_service_are_named_with_what_was_written_there() -> None:
    sick = [
        node(f"n{number}", State="MIXED+DRAIN") + " Reason=bad DIMM A=3 [root@2026-11-29T17:06:29]" for number in (2, 3)
    ]
    found = explained(JOB_22, [node("n1"), *sick, node("n4", State="IDLE+NOT_RESPONDING")])
    assert found.headline == (
        "you asked for 2 nodes with 8 GPUs each: 4 nodes could hold it, but only 1 can be had now (n2 is mixed+drain: "
        "bad DIMM A=3 (root, 2026-11-29 17:06); n3 is mixed+drain: bad DIMM A=3 (root, 2026-11-29 17:06); and 1 more)"
    )
    assert has(found.facts, "not to be had: n2, n3, mixed+drain: bad DIMM A=3")


@pytest.mark.parametrize(
    "state",
    (
        "DOWN*",
        "DRAINED",
        "IDLE+DRAIN",
        "MIXED+DRAIN",
        "down*",
        "drng",
        "FAIL",
        "IDLE+MAINTENANCE+RESERVED",
        "maint",
        "IDLE+NOT_RESPONDING",
    ),
)
def test_no_node_in_such_a_state_is_offered(state: str) -> None:
    assert "none can be had now" in explained(JOB_22, [node(f"n{i}", State=state) for i in range(1, 5)]).headline


@pytest.mark.parametrize(
    "state", ("IDLE", "MIXED", "IDLE+PLANNED", "IDLE~", "IDLE+CLOUD+POWERED_DOWN", "IDLE+DYNAMIC_NORM")
)
def test_a_node_in_such_a_state_can_be_had(state: str) -> None:
    assert "about to start" in explained(JOB_22, [node(f"n{i}", State=state) for i in range(1, 5)]).headline


def test_cpus_and_memory_are_counted_node_by_node_and_together() -> None:
    job = changed(JOB_22, TresPerNode="", MinCPUsNode="62", NumCPUs="124", MinMemoryNode="400G")
    nodes = [node("n1", CPUAlloc="4"), node("n2", AllocMem="200000"), node("n3"), node("n4", CPUAlloc="3")]
    assert explained(job, nodes).headline == (
        "of 4 nodes of partition main that could hold it, with 62 CPUs free: 2, with 400 GB of memory free: 3, "
        "with all of that: 1; you asked for 2 nodes with 62 CPUs, 400 GB of memory each"
    )


def test_a_job_that_wants_nodes_for_itself_is_told_how_many_are_empty() -> None:
    job = changed(JOB_22, TresPerNode="", OverSubscribe="NO")
    found = explained(job, [*nodes_with(1, 1, 1), node("n4")])
    assert found.headline == "of 4 nodes of partition main that could hold it, empty: 1; you asked for 2 whole nodes"
    assert "without --exclusive it would find room now" in found.advice


def test_a_constraint_that_stands_in_the_way_is_named_and_dropped() -> None:
    found = explained(changed(JOB_22, Features="nvl&ib"), nodes_with(0, 0, 0, 0))
    assert found.headline == "no node of partition main that could hold it has the features 'nvl&ib' (--constraint)"
    assert found.advice == ("without --constraint=nvl&ib it would find room now",)


@pytest.mark.parametrize(
    "expression, holds",
    (
        ("a&b", True),
        ("a&c", False),
        ("c|b", True),
        ("(c|a)&b", True),
        ("(c|d)&b", False),
        ("", True),
        ("[a*2&b*1]", None),
    ),
)
def test_features_are_matched_as_slurm_does(expression: str, holds: bool | None) -> None:
    assert has_features(expression, ("a", "b")) is holds


# --- the line, other partitions, reservations


def test_a_job_with_room_is_told_who_stands_before_it_and_when_it_could_slip_in() -> None:
    before = "3|900|bob|4|2026-11-29T17:36:40|Resources\n4|900|eve|1|N/A|JobHeldUser"
    line = f"6|9|ann|1|N/A|Priority\n{before}\n5|100|ann|2|N/A|Priority"
    found = explained(changed(JOB_22, Reason="Priority"), nodes_with(0, 0, 8, 8), line=line)
    assert found.headline == (
        "job 5 is number 2 of 3 in the line of partition main: 1 job with more priority stands before it"
    )
    assert has(found.facts, "before it: job 3 (bob, 4 nodes)")
    assert found.advice == (
        "--time=00:29:00 or less would be over before they begin, by Slurm's estimate: it may go first",
    )


def test_of_equal_priorities_the_older_job_comes_first() -> None:
    line = "5|1|ann|2|N/A|Priority\n26_[1-4%1]|1|bob|1|N/A|Resources\n4|1|bob|1|N/A|Resources"
    assert has(
        explained(JOB_24, nodes_with(8, 8, 8, 8), line=line).facts, "job 5 is number 2 of 3", "before it: job 4 (bob"
    )


def test_another_partition_is_offered_only_if_it_allows_the_job_and_has_room() -> None:
    other = [node(f"x{number}", Partitions="big,closed,vips,tiny") for number in (1, 2)]
    names = {"big": {}, "closed": {"State": "DOWN"}, "vips": {"AllowGroups": "vips"}, "tiny": {"MaxTime": "00:10:00"}}
    partitions = [changed(PARTITION, PartitionName=name, TotalNodes="2", **more) for name, more in names.items()]
    text = "\n".join(line.replace("PartitionName", "x", 0) for line in [PARTITION, *map(first_the_name, partitions)])
    found = explained(JOB_22, [*nodes_with(8, 8, 8, 8), *other], partitions=text)
    assert [line for line in found.advice if "--partition" in line] == ["--partition=big has room for it now"]


def first_the_name(line: str) -> str:
    return " ".join(sorted(line.split(" "), key=lambda word: not word.startswith("PartitionName=")))


def test_maintenance_before_the_job_would_be_over_is_told_with_the_time_that_is_left() -> None:
    job = changed(JOB_22, Reason="ReqNodeNotAvail,_Reserved_for_maintenance")
    found = explained(job, nodes_with(0, 0, 0, 0), reservations=RESERVATION)
    assert found.headline == (
        "maintenance maint1 begins at 2026-11-29 17:36 (in 29 min) on n1, n2, n3, n4, before its 02:00:00 are over; "
        "without that 4 nodes could take it; you asked for 2 nodes with 8 GPUs each"
    )
    assert "--time=00:28:00 or less would be over before maint1 begins" in found.advice
    now = explained(job, nodes_with(0, 0, 0, 0), reservations=RESERVATION, now="2026-11-29T18:00:00")
    assert now.headline.startswith("maintenance maint1 has n1, n2, n3, n4 until 2026-11-29 19:36")


def test_a_reservation_of_a_few_cores_or_of_the_job_itself_is_not_in_its_way() -> None:
    few = RESERVATION.replace("TRES=cpu=256", "TRES=cpu=4")
    assert "about to start" in explained(JOB_22, nodes_with(0, 0, 0, 0), reservations=few).headline
    job = JOB_22.replace("OverSubscribe", "Reservation=maint1 OverSubscribe").replace(
        "Reason=Resources", "Reason=Reservation"
    )
    waits = explained(job, nodes_with(0, 0, 0, 0), reservations=RESERVATION)
    assert waits.headline == "job 5 waits for its reservation maint1, which begins at 2026-11-29 17:36 (in 29 min)"


@pytest.mark.parametrize(
    "changes, words",
    (
        ({"TimeLimit": "01:00:00"}, "you asked for 01:00:00 in partition short, which allows 00:10:00"),
        (
            {"TimeLimit": "00:05:00", "NumNodes": "3-3"},
            "you asked for 3 nodes in partition short, which allows a job 2",
        ),
    ),
)
def test_what_a_partition_does_not_allow_is_said_beside_what_it_does(changes: dict[str, str], words: str) -> None:
    job = changed(JOB_22, Partition="short", Reason="PartitionTimeLimit", **changes)
    found = explained(job, nodes_with(0, 0, 0, 0))
    assert found.headline == words
    assert "--partition=main has room for it now" in found.advice


def test_a_partition_that_is_down_and_an_account_that_is_not_allowed_are_said() -> None:
    down = changed(JOB_22, Reason="PartitionDown")
    assert explained(down, nodes_with(0), partitions=PARTITION.replace("State=UP", "State=DOWN")).headline == (
        "partition main is DOWN: it starts no jobs"
    )
    closed = PARTITION.replace("AllowAccounts=ALL", "AllowAccounts=vips")
    job = changed(JOB_22, Reason="AccountNotAllowed", Account="ml")
    assert (
        explained(job, nodes_with(0), partitions=closed).headline == "partition main is not for account ml but for vips"
    )
    words = "Job's_account_not_permitted_to_use_this_partition_(vip_allows_vips_not_ml)"
    assert explained(changed(JOB_22, Reason=words), nodes_with(0)).headline.endswith("(vip allows vips not ml)")


# --- reasons that have nothing to do with nodes


@pytest.mark.parametrize(
    "reason, words, advice",
    (
        ("JobHeldUser", "job 5 is held: its owner holds it", "scontrol release 5"),
        ("JobHeldAdmin", "job 5 is held: an administrator holds it", "ask them to run `scontrol release 5`"),
        ("launch_failed_requeued_held", "job 5 is held: Slurm could not start it on a node", "scontrol release 5"),
        ("job_requeued_in_held_state", "job 5 is held: it was requeued to be held", "scontrol release 5"),
        ("JobArrayTaskLimit", "array 5 waits for its own limit", "arraytaskthrottle=N"),
        ("AssocGrpGRES", "all jobs of your account together have reached its limit of GPUs", "other jobs end"),
        ("QOSMaxJobsPerUserLimit", "limit of running jobs that the QOS sets for one user", "other jobs end"),
        (
            "QOSMaxWallDurationPerJobLimit",
            "will not start as it is: it asks for more time than the QOS allows",
            "ask for less",
        ),
        ("MaxCpuPerAccount", "the jobs of your account have reached the limit of CPUs", "other jobs end"),
    ),
)
def test_a_reason_is_told_in_plain_words_with_what_to_do(reason: str, words: str, advice: str) -> None:
    found = explained(changed(JOB_22, Reason=reason), nodes_with(0, 0, 0, 0))
    assert words in found.headline
    assert has(found.advice, advice)
    assert has(found.facts, reason.replace("_", " "), "https://slurm.schedmd.com/")


# All of libslurm's, 22.05 and 24.11; the limits are made of parts: every part is here once with every sort.
AGGREGATES = """CpuLimit CPUMinutesLimit CPURunMinutesLimit MemLimit MemMinutes MemoryRunMinutes NodeLimit GRES
    GRESMinutes License BB Billing Energy JobsLimit SubmitJobsLimit WallLimit Unknown""".split()
OTHERS = """AssocMaxJobsLimit AssocMaxSubmitJobLimit AssocMaxWallDurationPerJobLimit AssocMaxCpuMinutesPerJobLimit
    AssocMaxCpuPerNode QOSMaxCpuPerUserLimit QOSMaxGRESPerUser QOSMaxMemoryPerNode QOSMaxSubmitJobPerUserLimit
    QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory MaxGRESPerAccount MaxSubmitJobsPerAccount MaxMemPerLimit
    MaxCpuRunMinsPerUser MaxLicenseRunMinsPerAccount AccountingPolicy InvalidQOS SystemFailure NodeDown""".split()


def test_every_documented_limit_has_words() -> None:
    names = [owner + part for owner in ("AssocGrp", "QOSGrp") for part in AGGREGATES] + OTHERS
    assert [name for name in names if reasons.of(name) is None] == []
    assert reasons.of("SomethingNew") is None


def test_a_reason_in_no_manual_is_quoted_and_the_nodes_are_looked_at_all_the_same() -> None:
    headline = explained(changed(JOB_22, Reason="SomethingNew"), nodes_with(8, 8, 8, 8)).headline
    assert headline.startswith("Slurm says 'SomethingNew', which we cannot explain; no GPU of partition main is free")


def test_a_limit_is_told_with_what_is_set_and_what_runs() -> None:
    job = changed(JOB_22, Reason="QOSMaxJobsPerUserLimit", Account="ml", QOS="small")
    texts = {
        "mine": "88|RUNNING|1|None\n5|PENDING|1|x",
        "limits": "bio|||||\nml||||3|",
        "qos": "normal||||||\nsmall|||gres/gpu=1||1|",
    }
    found = explained(job, [], **texts)
    assert has(found.facts, "you have 1 running job: 88")
    assert has(found.facts, "limits set for you in account ml: MaxJobs=3")
    assert has(found.facts, "limits of QOS small: MaxTRES=gres/gpu=1, MaxJobsPU=1")


def test_a_dependency_is_told_with_the_other_job_s_state() -> None:
    job = changed(JOB_22, Reason="Dependency", Dependency="afterok:13(unfulfilled),afterany:14_*(unfulfilled)")
    found = explained(job, [], mine="13|PENDING|1|JobHeldUser\n14_1|RUNNING|1|None")
    assert (
        found.headline == "job 5 waits for job 13 to end well (now PENDING, JobHeldUser); job 14_* to end (now RUNNING)"
    )
    assert found.advice == ("scontrol release 13",)
    assert "its state is unknown" in explained(job, [], mine=None).headline
    assert "no longer in the queue, or not yours" in explained(job, []).headline


@pytest.mark.parametrize(
    "reason, status, mine", (("DependencyNeverSatisfied", "failed", ""), ("Dependency", "unfulfilled", "17|FAILED|1|x"))
)
def test_a_dependency_that_cannot_come_true_is_said_to_be_so(reason: str, status: str, mine: str) -> None:
    job = changed(JOB_22, Reason=reason, Dependency=f"afterok:17({status})")
    found = explained(job, [], mine=mine)
    assert found.headline.startswith("job 5 never starts: it waits for job 17 to end well")
    assert found.advice == ("without the dependency: scontrol update jobid=5 dependency=",)


def test_a_begin_time_and_a_requeue_are_told_with_the_time() -> None:
    job = changed(JOB_22, Reason="BeginTime", EligibleTime="2026-11-29T18:06:40")
    assert explained(job, []).headline == "job 5 starts at 2026-11-29 18:06 (in 60 min) at the earliest"
    assert has(explained(changed(job, Restarts="1"), []).facts, "it was requeued (1 restart)")


def test_licenses_are_told_with_how_many_are_free() -> None:
    job = changed(JOB_22, Reason="Licenses", Licenses="matlab:2")
    found = explained(job, [], licenses="LicenseName=matlab Total=2 Used=1 Free=1 Reserved=0 Remote=no")
    assert found.headline == "job 5 waits for licenses: it asks for matlab:2"
    assert has(found.facts, "license matlab: 1 of 2 free, 1 in use")


def test_a_job_that_does_not_wait_is_said_not_to() -> None:
    assert explained(changed(JOB_22, JobState="RUNNING", Reason="None"), []).headline == "job 5 does not wait: it runs"
    assert (
        "it has ended (FAILED)" in explained(changed(JOB_22, JobState="FAILED", Reason="NonZeroExitCode"), []).headline
    )


# --- what is not known


@pytest.mark.parametrize("missing", ("now", "nodes", "partitions", "reservations", "start", "line", "mine"))
def test_what_did_not_answer_is_named_as_unknown_and_nothing_is_concluded_from_it(missing: str) -> None:
    failed = CommandResult(1, "", "slurm_load: error: Unable to contact slurm controller (connect failure)\n")
    found = why_waiting({**answers(JOB_22, nodes_with(0, 0, 0, 0)), missing: failed})
    assert has(found.facts, "unknown:", " ".join(COMMANDS[missing]), "Unable to contact slurm controller")
    if missing in ("now", "nodes", "reservations", "line"):
        assert found.headline == "job 5 waits: what it asks for is not free"


def test_a_controller_that_is_down_leaves_one_clear_line() -> None:
    failed = CommandResult(None, "", "Unable to contact slurm controller (connect failure)")
    found = why_waiting(dict.fromkeys(COMMANDS, failed))
    assert found.headline == "why the job waits is unknown: Slurm told nothing about it"
    assert has(found.facts, "Unable to contact slurm controller")
    assert why_waiting({}).facts == ("`scontrol show job -o {job}` was not run",)


def test_nodes_that_are_hidden_are_not_taken_for_missing_ones() -> None:
    found = explained(JOB_22, nodes_with(8, 8), partitions=PARTITION)
    assert found.headline == "job 5 waits: what it asks for is not free"
    assert has(found.facts, "unknown: what 2 of the 4 nodes of partition main hold; you cannot see them")


def test_a_constraint_with_counts_is_not_guessed_at() -> None:
    found = explained(changed(JOB_22, Features="[a*1&b*1]"), nodes_with(0, 0, 0, 0))
    assert found.headline == "job 5 waits: what it asks for is not free"
    assert has(found.facts, "unknown: which nodes together are '[a*1&b*1]'")


def test_a_job_s_name_cannot_pretend_to_be_slurm_s_words() -> None:
    job = JOB_22.replace("JobName=frag", "JobName=x JobState=RUNNING Reason=None UserId=eve(1) NumNodes=9 Y=1")
    assert [(one.state, one.reason, one.user, one.request.nodes) for one in parse_jobs(job)] == [
        ("PENDING", "Resources", "ann", 2)
    ]


def test_an_explanation_is_json_too() -> None:
    found = explained(JOB_22, nodes_with(5, 6, 6, 7)).to_json()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"headline", "facts", "advice"}


def test_commands_are_plain_lists_of_words() -> None:
    words = commands("5", "main,short", "ann")
    assert words["job"] == ["scontrol", "show", "job", "-o", "5"]
    assert words["line"][5:7] == ["-p", "main,short"]
    assert not any("{" in word for argv in words.values() for word in argv)


@pytest.mark.parametrize(
    "text, counts",
    (
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:8", {"": 8}),
        ("gpu:2080ti:4,shard:8", {"2080ti": 4}),
        ("gpu:h100:2(IDX:0-1),gpu:a100:1(IDX:3)", {"h100": 2, "a100": 1}),
        ("cpu=4,gres/gpu=3,gres/gpu:h100=3", {"h100": 3}),
        ("cpu=2,gres/gpu=1", {"": 1}),
        ("gres:gpu", {"": 1}),
        ("gres/gpu:h100", {"h100": 1}),
        ("(null)", {}),
    ),
)
def test_gpus_are_read_in_every_form(text: str, counts: dict[str, int]) -> None:
    assert gpus_in(text) == counts


def test_states_and_times_are_read_in_every_form() -> None:
    assert states_in("drained*") == {"DRAINED", "NOT_RESPONDING"}
    assert states_in("IDLE+CLOUD+POWERED_DOWN") == {"IDLE", "CLOUD", "POWERED_DOWN"}
    assert [seconds(text) for text in ("1-02:00:00", "00:10:00", "10:00", "UNLIMITED")] == [93600, 600, 600, None]
    assert parse_nodes("slurm_load_node: nothing\n" + NODE_24)[0].name == "n1"


# --- why it ended


def status(
    records: list[dict[str, Any] | None], words: str = "", state: str = "", was_cancelled: bool = False
) -> dict[str, Any]:
    """As the driver writes it, from the records of the ranks and the words of srun."""
    verdict = judge(records, words, was_cancelled)
    verdict = verdict._replace(state=state) if state else verdict
    ranks = rank_reports(records, verdict, len(records))
    first = None if verdict.first_failed is None else ranks[verdict.first_failed]
    told = {"state": verdict.state, "exit_code": verdict.exit_code, "reason": verdict.reason, "first_failure": first}
    return {
        "slurm_job_id": "5",
        "job_id": "train-x",
        "attempt": 0,
        "started": 100.0,
        "ended": 190.0,
        "ranks": ranks,
        **told,
    }


def rank(number: int, state: str, code: int | None = None, ended: float | None = None) -> dict[str, Any]:
    name = protocol.node_name(number)
    return {"state": state, "node": name, "host": f"n{number + 1}", "node_index": number, "code": code, "ended": ended}


def failed(code: int) -> list[dict[str, Any] | None]:
    return [rank(0, "stopped", 143, 11.0), rank(1, "failed", code, 10.0), rank(2, "failed", 1, 10.5)]


def test_the_first_rank_that_failed_is_named_with_node_code_and_the_end_of_its_log() -> None:
    tails = {
        0: "fine\n",
        1: "step 1\r step 2\n\x1b[31mTraceback\x1b[0m\n\nModuleNotFoundError: No module named 'apex'\n",
    }
    found = why_ended(status(failed(1)), (), tails)
    assert found.headline == "rank 1 on worker1 (n2) failed first: exit code 1"
    assert has(found.facts, "it ended after 90.0 s")
    assert has(found.facts, "the other ranks: 1 stopped, 1 failed")
    assert has(found.facts, "failed after it: rank 2 on worker2 (n3) (exit code 1)")
    end = found.facts.index("the end of 1-worker1.log:")
    assert found.facts[end + 1 :] == ("| step 2", "| Traceback", "| ModuleNotFoundError: No module named 'apex'")
    assert found.advice[0].startswith("a Python package is missing (apex)")


def test_a_failure_in_setup_is_called_one() -> None:
    found = why_ended(status(failed(127), state=protocol.FAILED_SETUP), (), {1: "sh: line 3: nvcc: command not found"})
    assert found.headline == "rank 1 on worker1 (n2) setup failed: exit code 127"
    assert has(found.facts, "the end of setup-worker1.log:")
    assert found.advice == ("the shell does not find nvcc: load its module or environment in the script",)


@pytest.mark.parametrize(
    "code, tail, advice",
    (
        (137, "", "memory ran out"),
        (137, "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0", "more memory per node"),
        (1, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "the GPU's memory is full"),
        (1, "RuntimeError: CUDA error: out of memory", "the GPU's memory is full"),
        (127, "", "a command was not found"),
        (126, "", "could be found but not executed"),
        (1, "OSError: [Errno 122] Disk quota exceeded: '/home/ann/x'", "your disk quota is used up"),
        (1, "OSError: [Errno 28] No space left on device", "a disk is full"),
        (
            1,
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
            "a collective did not end in time",
        ),
        (
            1,
            "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1, unhandled system error",
            "NCCL failed",
        ),
        (1, "bash: ./run.sh: Permission denied", "a file may not be read, written or executed"),
        (1, "OSError: [Errno 98] Address already in use", "a port is taken"),
        (
            1,
            "./a.out: error while loading shared libraries: libfoo.so.1: cannot open shared object file",
            "libfoo.so.1 is not found",
        ),
        (139, "", "segmentation fault"),
        (1, "ValueError: loss is nan", ""),
    ),
)
def test_what_the_log_or_the_code_says_becomes_advice(code: int, tail: str, advice: str) -> None:
    found = why_ended(status(failed(code)), (), {1: tail})
    assert has(found.advice, advice) if advice else found.advice == ()


def test_slurm_s_word_of_memory_reaches_the_advice_though_no_log_says_so() -> None:
    found = why_ended(status(failed(137), words="slurmstepd: error: Detected 1 oom_kill event in StepId=5.0"))
    assert found.headline.startswith("rank 1 on worker1 (n2) failed first: exit code 137, signal 9")
    assert has(found.facts, "killed, out of memory")
    assert has(found.advice, "more memory per node")
    assert has(
        why_ended(status(failed(137)), [{"JobID": "5", "State": "OUT_OF_MEMORY"}]).advice, "more memory per node"
    )


RUNNING: dict[str, Any] = {"slurm_job_id": "5", "state": "RUNNING", "started": 100.0}


@pytest.mark.parametrize(
    "record, row, headline, advice",
    (
        (RUNNING, {"State": "TIMEOUT", "Timelimit": "01:00:00"}, "job 5 reached its time limit of 01:00:00", "--time"),
        (RUNNING, {"State": "NODE_FAIL"}, "job 5 lost a node", "--exclude=NODE"),
        (RUNNING, {"State": "CANCELLED by 1000"}, "job 5 was cancelled by user 1000", ""),
        (
            RUNNING,
            {"State": "OUT_OF_ME+", "ReqMem": "4G"},
            "job 5 ran out of memory (it had asked for 4G)",
            "more memory",
        ),
        (RUNNING, {"JobState": "PREEMPTED"}, "job 5 had to make room", "--requeue"),
        (
            RUNNING,
            {"State": "FAILED", "ExitCode": "137:0"},
            "job 5 is FAILED for Slurm, exit code 137:0; its driver left",
            "memory",
        ),
        (
            None,
            {"JobID": "5", "State": "FAILED", "ExitCode": "0:53"},
            "job 5 is FAILED for Slurm",
            "the directory of its output",
        ),
        (RUNNING, {}, "job 5 has no verdict: its driver wrote RUNNING last", ""),
    ),
)
def test_what_slurm_did_to_the_job_is_told_where_no_rank_is_to_blame(
    record: dict[str, Any] | None, row: Mapping[str, str], headline: str, advice: str
) -> None:
    found = why_ended(record, [row, {"JobID": "5.batch", "State": "CANCELLED"}] if row else [])
    assert found.headline.startswith(headline)
    assert has(found.advice, advice) if advice else found.advice == ()


def test_without_accounting_the_words_of_srun_serve() -> None:
    words = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-29T17:30:00 DUE TO TIME LIMIT ***"
    assert why_ended(status([rank(0, "stopped", 143, 11.0)], words)).headline == "job 5 reached its time limit"
    found = why_ended(status([rank(0, "running")], "srun: error: Node failure on n1"))
    assert found.headline == "job 5 lost a node"
    cancelled = why_ended(status([rank(0, "stopped", 143, 11.0)], was_cancelled=True))
    assert cancelled.headline == "job 5 was cancelled"


def test_a_success_is_not_explained_away_and_nothing_known_is_said_plainly() -> None:
    assert why_ended(status([rank(0, "done", 0, 11.0)])).headline == "job 5 succeeded"
    assert why_ended(None).headline.startswith("why the job ended is unknown")


# --- on a real cluster


def asked(cluster: Cluster, job: int) -> Explanation:
    def run(argv: list[str]) -> CommandResult:
        done = cluster.run(CONTROLLER, argv, cwd="/", check=False)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    one = parse_jobs(run(["scontrol", "show", "job", "-o", str(job)]).stdout)[0]
    return why_waiting(
        {name: run(argv) for name, argv in commands(str(job), ",".join(one.partitions), one.user).items()}
    )


def eventually(cluster: Cluster, job: int, words: str, fact: str = "") -> Explanation:
    """The controller looks at a job every second; until then it has no reason and no estimate."""
    deadline = time.monotonic() + 30
    while True:
        found = asked(cluster, job)
        if words in found.headline and has(found.facts, fact):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def check_everything_on(cluster: Cluster) -> None:
    sleep = "#!/bin/sh\nsleep 600\n"

    def submit(*options: str) -> int:
        return cluster.sbatch(sleep, "--output=/dev/null", *options, cwd="/")

    for name, gpus in (("n1", 1), ("n2", 2), ("n3", 2)):
        cluster.wait_state(submit("-w", name, f"--gres=gpu:{gpus}", "-t", "60"), "RUNNING")
    cluster.run(CONTROLLER, ["scontrol", "update", "node=n4", "state=drain", "reason=bad DIMM"], cwd="/")
    scattered = submit("-N2", "--gpus-per-node=4", "-t", "60")
    words = "7 GPUs are free, on 3 nodes (3+2+2); you asked for 2 nodes with 4 each: no node qualifies"
    found = eventually(cluster, scattered, words, "Slurm's estimate of its start")
    assert has(found.facts, "not to be had: n4", "bad DIMM (root, ")
    assert "2 nodes with 2 GPUs each would find room now" in found.advice
    assert has(eventually(cluster, submit("-N4", "-c", "2", "-t", "60"), "only 3 can be had now").facts, "bad DIMM")
    eventually(
        cluster, submit("-p", "short", "-t", "60"), "you asked for 01:00:00 in partition short, which allows 00:10:00"
    )
    held = submit("-H")
    eventually(cluster, held, "its owner holds it")
    eventually(cluster, submit(f"--dependency=afterok:{held}"), f"job {held} to end well (now PENDING, JobHeldUser)")
    eventually(cluster, submit("--begin=now+1hour"), "at the earliest")
    reserve = (
        "scontrol create reservation ReservationName=upkeep StartTime=now+30minutes Duration=60 Nodes=ALL Users=root"
    )
    cluster.run(CONTROLLER, [*reserve.split(), "Flags=MAINT,IGNORE_JOBS"], cwd="/")
    found = eventually(cluster, submit("-N1", "-t", "2:00:00", "--nice=10"), "maintenance upkeep begins")
    assert has(found.advice, "--time=00:2", "or less would be over before upkeep begins")


PARTITIONS = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE\nPartitionName=short Nodes=ALL MaxTime=00:10:00"


OTHER_ROOT = Path("/var/tmp/gangrun-%s" % other_suite())
ROOTS = (None, pytest.param(str(OTHER_ROOT), marks=pytest.mark.slow))


@pytest.mark.parametrize("rootfs", ROOTS, ids=("this Slurm", "the other Slurm"))
def test_what_a_live_cluster_says_is_explained(own_cluster: BootCluster, rootfs: str | None) -> None:
    if rootfs and not (OTHER_ROOT / "complete").exists():
        pytest.skip(f"{OTHER_ROOT} is made by the tests of the other Slurm")
    root = {"rootfs": rootfs} if rootfs else {}
    conf = "EnforcePartLimits=NO"
    check_everything_on(own_cluster(nodes=4, gpus=4, gres_type="h100", partitions=PARTITIONS, extra_conf=conf, **root))


def test_a_real_failure_is_explained_from_its_record(bench: Bench) -> None:
    outcome = bench.drive(num_nodes=2, run="[ $SKYPILOT_NODE_RANK = 0 ] && exec sleep 60; echo working; nosuchprogram")
    tails = {1: outcome.log("1-worker1.log")}
    found = why_ended(outcome.status, (), tails)
    assert found.headline.startswith("rank 1 on worker1 (") and found.headline.endswith("failed first: exit code 127")
    assert has(found.facts, "| ", "nosuchprogram: command not found")
    assert found.advice == ("the shell does not find nosuchprogram: load its module or environment in the script",)


def test_nothing_here_asks_the_machine() -> None:
    assert not {"subprocess", "os"} & set(vars(explain))
