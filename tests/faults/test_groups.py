"""Groups of tasks whose parts die, end in every order, or are told to stop at any moment."""

from __future__ import annotations

import itertools
import json
import random
import shlex
import sys
import time
from pathlib import Path

import pytest

from executor import protocol
from tests.bench import Bench, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import Row
from tests.group_bench import GroupBench, GroupOutcome, RunningGroup, components, trap
from tests.minislurm.cluster import Cluster
from tests.minislurm.fixtures import BootCluster

KIND = "Job groups"
MARKER = "sleep 4711"
FOREVER = f"echo up; exec {MARKER}"
DETECTION_S = 90.0  # Slurm's ping cycle takes up to 28 s
SUCCEEDED, FAILED, CANCELLED, FAILED_DRIVER = (
    protocol.SUCCEEDED, protocol.FAILED, protocol.CANCELLED, protocol.FAILED_DRIVER,
)  # fmt: skip


@pytest.fixture
def groups(bench: Bench) -> GroupBench:
    return GroupBench(bench)


def finish(row: Row, end: GroupOutcome) -> None:
    row.ended(end.outcome, end.group.bench, MARKER)
    eventually(lambda: not end.group.bench.cluster.step_ids(end.group.job_id), 20, "steps are left")


def driver_of(group: RunningGroup, task: str) -> tuple[str, str]:
    """Node and pid of a task's own driver."""
    name = protocol.member_job_id(group.name, task)
    path = group.job_directory.parent / name / protocol.STATUS_NAME
    driver = json.loads(path.read_text())["driver"]
    return str(driver["host"]), str(driver["pid"])


def kill_driver(group: RunningGroup, task: str | None = None) -> None:
    own = group.status()["driver"]
    node, pid = driver_of(group, task) if task else (str(own["host"]), str(own["pid"]))
    group.bench.cluster.run(node, ["kill", "-9", pid])


class TestDeadParts:
    @pytest.mark.parametrize("is_het", [False, True], ids=["homogeneous", "heterogeneous"])
    def test_the_groups_driver_is_killed(self, groups: GroupBench, fault: Fault, is_het: bool) -> None:
        row = fault("the group's driver is killed with -9" + ("; heterogeneous job" if is_het else ""))
        tasks = [groups.task("trainer", FOREVER, cpus=2 if is_het else 1), groups.aux("server", FOREVER)]
        group = groups.submit(*(components(*tasks) if is_het else tasks))
        group.until_up("trainer", "server")
        row.injected()
        kill_driver(group)
        outcome = group.wait()
        row.saw(f"Slurm: FAILED, signal 9; status.json keeps {outcome.status['state']}", outcome.code)
        row.left, row.version = (
            "the attempts' directories, readable by their owner only",
            groups.bench.cluster.slurm_version,
        )
        assert outcome.code == 137 and outcome.status["state"] == protocol.RUNNING
        eventually(lambda: not groups.bench.left_behind(MARKER), 10)
        eventually(lambda: not groups.bench.left_behind(str(groups.bench.directory)), 10)

    def test_the_driver_of_a_primary_is_killed(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("the driver of a group's primary is killed with -9")
        group = groups.submit(groups.task("trainer", FOREVER), groups.aux("server", trap("exit 0")))
        group.until_up("trainer", "server")
        row.injected()
        kill_driver(group, "trainer")
        end = group.end()
        assert (end.state, end.code) == (FAILED_DRIVER, 137), end.output
        assert end.log("server") == "up\ngot TERM\n"
        row.left = "the attempt's directory of that task, readable by its owner only"
        row.saw(f"{end.state}: {end.reason}", str(end.code))
        row.version = groups.bench.cluster.slurm_version

    def test_the_driver_of_an_auxiliary_is_killed(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("the driver of a group's auxiliary is killed with -9; it says max_restarts: 1")
        group = groups.submit(
            groups.task("trainer", groups.waits_for("go")), groups.aux("server", FOREVER, max_restarts=1)
        )
        group.until_up("server")
        old = driver_of(group, "server")
        row.injected()
        kill_driver(group, "server")
        eventually(lambda: "starting it again" in group.output(), 20)
        eventually(lambda: driver_of(group, "server") != old and group.state("server") == protocol.RUNNING, 40)
        eventually(lambda: len(groups.bench.left_behind(MARKER)) == 1, 20, "the old one is gone, the new one there")
        groups.touch("go")
        end = group.end()
        assert (end.state, end.tasks["server"]["restarts"]) == (SUCCEEDED, 1), end.output
        finish(row, end)

    def test_the_step_of_a_task_is_cancelled_by_hand(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("scancel JOB.STEP of a group's primary")
        group = groups.submit(groups.task("trainer", FOREVER), groups.aux("server", trap("exit 0")))
        group.until_up("trainer", "server")
        # Which of the steps is the trainer's is in the name.
        listing = groups.bench.cluster.run("ctl", ["squeue", "-s", "-h", "-j", str(group.job_id), "-o", "%i %j"]).stdout
        step = next(line.split()[0] for line in listing.splitlines() if line.endswith(".trainer"))
        row.injected()
        groups.bench.cluster.run("ctl", ["scancel", step])
        end = group.end()
        assert (end.state, end.code) == (CANCELLED, 143), end.output
        assert end.log("server") == "up\ngot TERM\n"
        finish(row, end)

    @pytest.mark.slow
    @pytest.mark.parametrize("whose", ["trainer", "server"])
    def test_a_tasks_node_loses_its_power(
        self, own_cluster: BootCluster, shared_dir: Path, fault: Fault, whose: str
    ) -> None:
        kind = "an auxiliary's" if whose == "server" else "a primary's"
        row = fault(f"{kind} node loses its power; job without --requeue")
        groups = GroupBench(Bench(own_cluster(nodes=3, gpus=0, slurmd_timeout_s=5), shared_dir))
        # The first node is the group's head.
        tasks = [groups.aux("buffer", FOREVER), groups.task("trainer", FOREVER), groups.aux("server", FOREVER)]
        group = groups.submit(*tasks, sbatch="--no-requeue")
        group.until_up("buffer", "trainer", "server")
        lost = group.tasks()[whose]["nodes"][0]
        row.injected()
        groups.bench.cluster.power_off(lost)
        outcome = group.wait(DETECTION_S)
        eventually(lambda: group.status()["state"] in protocol.TERMINAL_STATES, 30)
        status = group.status()
        row.saw(f"{status['state']}: {status['reason']}", status["exit_code"])
        row.version = groups.bench.cluster.slurm_version
        assert (status["state"], status["exit_code"]) == (FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE), outcome.output
        assert status["reason"].startswith(f"lost {lost}, of {whose} (")
        survivors = [node for node in groups.bench.cluster.nodes if node != lost]
        eventually(lambda: not _running(groups.bench.cluster, survivors, MARKER), 20)

    @pytest.mark.slow
    def test_a_group_with_requeue_runs_again_as_a_whole_when_a_node_is_lost(
        self, own_cluster: BootCluster, shared_dir: Path, fault: Fault
    ) -> None:
        row = fault("an auxiliary's node loses its power, job with --requeue; a node more is there")
        groups = GroupBench(Bench(own_cluster(nodes=4, gpus=0, slurmd_timeout_s=5), shared_dir))
        run = f"echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 1 ] || exec {MARKER}"
        group = groups.submit(
            groups.aux("buffer", run), groups.task("trainer", run), groups.aux("server", run), sbatch="--requeue"
        )
        group.until_up("buffer", "trainer", "server", word="attempt 0")
        lost = group.tasks()["server"]["nodes"][0]
        row.injected()
        groups.bench.cluster.power_off(lost)
        eventually(lambda: "attempt 1" in group.rank_log("trainer"), DETECTION_S + 60)
        outcome = group.wait(60)
        assert (outcome.status["state"], outcome.status["attempt"]) == (SUCCEEDED, 1), outcome.output
        assert lost not in [node for task in outcome.status["tasks"] for node in task["nodes"]]
        row.saw("SUCCEEDED in attempt 1", 0)
        row.version = groups.bench.cluster.slurm_version

    @pytest.mark.slow
    def test_a_task_goes_on_without_its_node(self, own_cluster: BootCluster, shared_dir: Path, fault: Fault) -> None:
        row = fault("an auxiliary's node loses its power, job with --no-kill; it says max_restarts: 1; a node more")
        # With 5 s, 24.11 gives up a node that answers together with the lost one: "Nodes n[1-2] not responding".
        groups = GroupBench(Bench(own_cluster(nodes=3, gpus=0, slurmd_timeout_s=20), shared_dir))
        tasks = [groups.task("trainer", groups.waits_for("go")), groups.aux("server", FOREVER, max_restarts=1)]
        group = groups.submit(*tasks, sbatch="--no-kill", spare_nodes=1)
        group.until_up("server")
        group.until_state("server", protocol.RUNNING)
        (lost,) = group.tasks()["server"]["nodes"]
        row.injected()
        groups.bench.cluster.power_off(lost)
        eventually(lambda: group.tasks()["server"]["restarts"] == 1, DETECTION_S)
        group.until_state("server", protocol.RUNNING)
        (new,) = group.tasks()["server"]["nodes"]
        row.saw(f"server has lost {lost}; it gets {new}: RUNNING again, and the group SUCCEEDED", 0)
        groups.touch("go")
        outcome = group.wait()
        assert (outcome.status["state"], outcome.code) == (SUCCEEDED, 0), outcome.output
        assert f"gangrun: server has lost {lost}; it gets {new}\n" in outcome.output
        row.check_nothing_left(groups.bench)


def _running(cluster: Cluster, nodes: list[str], marker: str) -> list[str]:
    return [p.cmdline for node in nodes for p in cluster.processes(node) if marker in p.cmdline]


class TestOrdersOfEnds:
    def test_primary_and_auxiliary_end_in_the_same_second(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("primary and auxiliary end at the same moment, with codes 0, 3 and 5; eight groups")
        pairs = [(primary, aux) for primary in (0, 3) for aux in (0, 5)] * 2
        wait = groups.waits_for("now")
        running = []
        for number, codes in enumerate(pairs):
            primary, aux = (f"echo up\n{wait}exit {code}" for code in codes)
            running.append(groups.submit(groups.task("p", primary), groups.aux("a", aux), run=f"g{number}"))
        for group in running:
            group.until_up("p", "a", timeout_s=90)
        row.injected()
        groups.touch("now")
        for group, (code, other) in zip(running, pairs):
            end = group.end()
            assert (end.state, end.code) == ((FAILED, code) if code else (SUCCEEDED, 0)), end.output
            # By its own end, or told to end when it had not yet.
            assert end.states["a"] in ((FAILED if other else SUCCEEDED), CANCELLED)
        finish(row, end)

    @pytest.mark.slow
    def test_the_first_failure_of_a_primary_is_the_verdict_in_every_order_of_ends(
        self, groups: GroupBench, fault: Fault
    ) -> None:
        row = fault(
            "three primaries (codes 0, 3, 4) and an auxiliary (5) end in all 24 orders; on_primary_failure: continue"
        )
        codes = {"a": 0, "b": 3, "c": 4, "aux": 5}
        for number, order in enumerate(itertools.permutations(codes)):
            moment = {name: groups.waits_for(f"{number}-{place}") for place, name in enumerate(order)}
            run = {name: f"echo up\n{moment[name]}exit {code}" for name, code in codes.items()}
            tasks = [groups.task(name, run[name], is_primary=name != "aux") for name in codes]
            group = groups.submit(*tasks, run=f"g{number}", stops_on_primary_failure=False)
            group.until_up(*codes)
            for place, name in enumerate(order):
                groups.touch(f"{number}-{place}")
                if set(order[: place + 1]) >= {"a", "b", "c"}:
                    break
                group.until_state(name, SUCCEEDED, FAILED)
            end = group.end()
            first = next(name for name in order if name in "bc")
            assert (end.state, end.code, end.reason[:2]) == (FAILED, codes[first], f"{first}:"), (order, end.output)
        row.injected()
        finish(row, end)
        row.saw("that of the primary that failed first by time, in each", "3 or 4")

    @pytest.mark.parametrize("first", ["a", "b"])
    def test_the_first_of_two_failures_stops_the_group(self, groups: GroupBench, fault: Fault, first: str) -> None:
        row = fault(f"two primaries would fail with codes 3 and 4; {first} does first")
        run = {"a": "exit 3", "b": "exit 4"}
        group = groups.submit(*(groups.task(name, f"echo up\n{groups.waits_for(name)}{run[name]}") for name in "ab"))
        group.until_up("a", "b")
        row.injected()
        groups.touch(first)
        end = group.end()
        assert (end.state, end.code, end.reason[:2]) == (FAILED, int(run[first][-1]), f"{first}:"), end.output
        assert sorted(end.states.values()) == [CANCELLED, FAILED]
        finish(row, end)


class TestCancel:
    @pytest.mark.slow
    def test_cancelled_at_random_moments(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("a group is cancelled (scancel) at 20 moments from its submission to 4 s later")
        chance = random.Random(5)
        for number in range(20):
            setup = "sleep 0.5" if number % 2 else None
            tasks = [
                groups.task("trainer", FOREVER, setup=setup),
                groups.aux("server", FOREVER, ready={"log": "up"}),
                groups.task("client", FOREVER, after=("server",)),
            ]
            group = groups.submit(*tasks, run=f"g{number}")
            time.sleep(chance.uniform(0, 4))
            row.injected()
            groups.scancel(group)
            groups.bench.cluster.wait_job(group.job_id, timeout_s=60)
            # A driver that Slurm told before it listened leaves no word, and Slurm's own says what happened.
            states = (CANCELLED, protocol.PENDING, None)
            eventually(lambda: group.status().get("state") in states, 20, f"{group.output()}")  # noqa: B023
            eventually(lambda: not groups.bench.left_behind(MARKER), 20)
            eventually(lambda: not groups.bench.left_behind(str(groups.bench.directory)), 20)
        row.saw("CANCELLED: cancelled by signal 15", 143)
        row.version = groups.bench.cluster.slurm_version

    def test_each_task_is_killed_when_its_own_delay_is_over(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("the tasks of a group ignore TERM; termination delays of 1 s and 3 s")
        deaf = f"trap '' TERM; echo up; while :; do {MARKER} & wait; done"
        group = groups.submit(groups.task("a", deaf, grace_s=1.0), groups.aux("b", deaf, grace_s=3.0))
        group.until_up("a", "b")
        row.injected()
        groups.scancel(group, "--batch", "--signal=TERM")
        end = group.end()
        assert (end.state, end.code) == (CANCELLED, 143), end.output
        assert end.time_of("task_ended", "b") - end.time_of("task_ended", "a") > 1
        finish(row, end)


ASKS_FOR_200 = """
from gangrun import Task, join
members = [join(Task(name=f"more-{n}", run="exit %d" % (0 if n % 10 else 1))) for n in range(200)]
ends = [member.wait().state for member in members]
assert ends == ["SUCCEEDED" if n % 10 else "FAILED" for n in range(200)], ends
"""


class TestSizes:
    def test_a_group_of_one(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("a group of one task fails")
        group = groups.submit(groups.task("only", groups.waits_for("now") + "exit 3"))
        row.injected()
        groups.touch("now")
        end = group.end()
        assert (end.state, end.code, end.outcome.code) == (FAILED, 3, 3), end.output
        finish(row, end)

    @pytest.mark.slow
    @pytest.mark.parametrize("is_het", [False, True], ids=["homogeneous", "heterogeneous"])
    def test_twenty_tasks(self, own_cluster: BootCluster, shared_dir: Path, fault: Fault, is_het: bool) -> None:
        row = fault("one of 20 tasks fails" + ("; 20 components of a heterogeneous job" if is_het else ""))
        groups = GroupBench(Bench(own_cluster(nodes=20, gpus=0, cpus=4), shared_dir))
        names = [f"t{number}" for number in range(20)]
        look = "for i in $(seq 0 19); do getent hosts t$i-0.rl >/dev/null || echo no t$i; done\n"
        run = f"{look}echo up\n"
        tasks = [
            groups.task(name, run + FOREVER, cpus=1 + (number % 2 if is_het else 0))
            for number, name in enumerate(names)
        ]
        tasks[13] = groups.task("t13", run + groups.waits_for("now") + "exit 9")
        group = groups.submit(*(components(*tasks) if is_het else tasks))
        group.until_up(*names, timeout_s=120)
        row.injected()
        groups.touch("now")
        end = group.end(120)
        assert (end.state, end.code, end.reason[:4]) == (FAILED, 9, "t13:"), end.output
        assert [end.log(name).split("\n")[0] for name in names] == ["up"] * 20
        assert sorted(end.states.values()) == [CANCELLED] * 19 + [FAILED]
        assert len({node for task in end.tasks.values() for node in task["nodes"]}) == 20
        finish(row, end)

    @pytest.mark.slow
    def test_two_hundred_tasks_join(self, groups: GroupBench, fault: Fault) -> None:
        row = fault("200 tasks join a running group, one of ten fails, and the loop that asked for them goes on")
        loop = f"[ $SKYPILOT_NODE_RANK = 0 ] || exit 0\n{sys.executable} -c {shlex.quote(ASKS_FOR_200)}"
        group = groups.submit(groups.task("loop", loop, nodes=3, cpus=1), sbatch="--cpus-per-task=4")
        row.injected()
        end = group.end(300)
        assert (end.state, end.code) == (SUCCEEDED, 0), end.output
        joined = {name: state for name, state in end.states.items() if name != "loop"}
        assert len(joined) == 200
        assert [joined[f"more-{number}"] for number in range(20)] == [
            SUCCEEDED if n % 10 else FAILED for n in range(20)
        ]
        finish(row, end)
