"""Job groups on a real Slurm: one gang start, one life, one verdict."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from codegen.group import JobGroup, group_sbatch_options
from codegen.spec import SpecError
from executor import protocol
from tests.bench import Bench, eventually
from tests.group_bench import GroupBench, GroupOutcome, components, trap
from tests.minislurm import preflight
from tests.minislurm.fixtures import BootCluster
from tests.test_hostnames import FORBIDDEN, LIBRARIES

pytestmark = pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))
SUCCEEDED, FAILED, CANCELLED = protocol.SUCCEEDED, protocol.FAILED, protocol.CANCELLED
FOREVER = "echo up; exec sleep 4700"
SERVE = "echo starting; sleep {after}; exec python -u -m http.server --bind 0.0.0.0 {port}"
ASK = "python -c 'import urllib.request as u; print(u.urlopen(\"{url}\", timeout=20).status)'"


@pytest.fixture
def groups(bench: Bench) -> GroupBench:
    return GroupBench(bench)


def succeeded(end: GroupOutcome) -> None:
    assert (end.state, end.code) == (SUCCEEDED, 0), (end.reason, end.output)


class TestGangStart:
    def test_equal_tasks_share_one_job_whose_nodes_are_divided_in_the_order_of_the_file(
        self, groups: GroupBench
    ) -> None:
        run = "hostname; echo $SLURM_JOB_ID $SKYPILOT_NUM_NODES $SKYPILOT_NODE_RANK"
        end = groups.run(groups.task("trainer", run, nodes=1), groups.task("server", run, nodes=2))
        succeeded(end)
        hosts, facts = zip(*(end.log(*rank).split("\n")[:2] for rank in (("trainer",), ("server", 0), ("server", 1))))
        job = end.group.job_id
        assert facts == (f"{job} 1 0", f"{job} 2 0", f"{job} 2 1")
        assert [*hosts] == [*end.tasks["trainer"]["nodes"], *end.tasks["server"]["nodes"]]
        assert len(set(hosts)) == 3

    def test_tasks_with_different_needs_are_components_of_one_heterogeneous_job(self, groups: GroupBench) -> None:
        run = "echo cpus $SLURM_JOB_CPUS_PER_NODE gpus $CUDA_VISIBLE_DEVICES; hostname\n" + groups.waits_for("seen")
        both = components(groups.task("trainer", run, cpus=2), groups.task("server", run, cpus=1, nodes=2))
        group = groups.submit(*both)
        eventually(lambda: "cpus" in group.rank_log("trainer") and "cpus" in group.rank_log("server", 1), 40)
        listed = groups.bench.cluster.run("ctl", ["squeue", "-h", "-o", "%i %D"]).stdout.split("\n")
        groups.touch("seen")
        assert {f"{group.job_id}+0 1", f"{group.job_id}+1 2"} <= set(listed)
        end = group.end()
        succeeded(end)
        assert "cpus 2 " in end.log("trainer")
        assert "cpus 1" in end.log("server", 0) and "cpus 1" in end.log("server", 1)
        nodes = [*end.tasks["trainer"]["nodes"], *end.tasks["server"]["nodes"]]
        assert len(set(nodes)) == 3, "no node belongs to two components"

    def test_components_get_the_gpus_of_their_own_task_and_one_without_gpus_none(self, groups: GroupBench) -> None:
        # Which of a node's GPUs is free depends on the jobs beside this one: their number counts.
        run = "IFS=,; set -- $CUDA_VISIBLE_DEVICES; echo gpus=$# $SKYPILOT_NUM_GPUS_PER_NODE"
        end = groups.run(
            *components(
                groups.task("trainer", run, gpus=2), groups.task("reward", run, gpus=1), groups.task("buffer", run)
            )
        )
        succeeded(end)
        assert [end.log(name) for name in ("trainer", "reward", "buffer")] == [
            "gpus=2 2\n",
            "gpus=1 1\n",
            "gpus=0 0\n",
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("is_het", [False, True], ids=["homogeneous", "heterogeneous"])
    def test_all_start_together_or_none_does(self, own_cluster: BootCluster, is_het: bool, shared_dir: Path) -> None:
        cluster = own_cluster(nodes=2, gpus=0)
        groups = GroupBench(Bench(cluster, shared_dir))
        holder = groups.bench.batch("exec sleep 4701", nodes=1, sbatch="--exclusive")
        cluster.wait_state(holder, "RUNNING")
        tasks = [groups.task("trainer", "echo ran", cpus=2), groups.task("server", "echo ran", cpus=1 if is_het else 2)]
        group = groups.submit(*(components(*tasks) if is_het else tasks))
        time.sleep(3)  # Slurm looks every second
        assert (cluster.job_state(group.job_id), group.status()) == ("PENDING", {})
        cluster.run("ctl", ["scancel", str(holder)])
        end = group.end()
        succeeded(end)
        assert (end.log("trainer"), end.log("server")) == ("ran\n", "ran\n")
        # The one node that was free was not enough for both: two tasks never share a node unless they say so.
        assert end.tasks["trainer"]["nodes"] != end.tasks["server"]["nodes"]

    @pytest.mark.slow
    def test_what_is_asked_for_the_job_is_asked_for_every_component(
        self, own_cluster: BootCluster, shared_dir: Path
    ) -> None:
        """sbatch forgets a partition where the next component begins."""
        lines = ("PartitionName=main Default=YES", "PartitionName=other")
        cluster = own_cluster(nodes=2, gpus=0, partitions="\n".join(f"{line} Nodes=ALL State=UP" for line in lines))
        groups = GroupBench(Bench(cluster, shared_dir))
        tasks = components(
            groups.task("a", groups.waits_for("seen"), cpus=2), groups.task("b", groups.waits_for("seen"))
        )
        group = groups.submit(*tasks, sbatch="--partition=other --time=5 --exclusive --comment=once")
        cluster.wait_state(group.job_id, "RUNNING")
        listed = cluster.run("ctl", ["squeue", "-h", "-o", "%i %P %l %C %k"]).stdout
        groups.touch("seen")
        succeeded(group.end())
        assert sorted(listed.splitlines()) == [f"{group.job_id}+{i} other 5:00 64 once" for i in (0, 1)]


class TestSharedPlacement:
    def options(self, groups: GroupBench, *own: list[str], **fields: object) -> list[str]:
        tasks = tuple(groups.task(f"t{i}", "true", nodes=i + 1, cpus=i + 1, gpus=1) for i in range(len(own)))
        group = JobGroup("g", "rl", tasks, **fields)  # type: ignore[arg-type]
        return group_sbatch_options(group, "/out", [], own)

    def test_a_node_is_asked_for_the_sum_of_what_meets_on_it(self, groups: GroupBench) -> None:
        mine = ["--gres=gpu:1", "--mem=1024M"], ["--gres=gpu:h100:2", "--mem=512M"], ["--constraint=fast"]
        options = self.options(groups, *mine, is_shared=True)
        # Three nodes as of the widest; what is left on its third is for the smallest.
        assert {"--nodes=3", "--cpus-per-task=5", "--gres=gpu:h100:2", "--mem=1024M", "--constraint=fast"} <= {*options}
        assert [option for option in options if "gpus-per-node" in option] == []
        assert "--gpus-per-node=2" in self.options(groups, [], [], [], is_shared=True)

    def test_a_pipeline_asks_for_the_most_that_a_task_of_it_needs(self, groups: GroupBench) -> None:
        options = self.options(groups, ["--gres=gpu:1", "--mem=1024M"], ["--gres=gpu:2"], is_parallel=False)
        assert {"--nodes=2", "--cpus-per-task=2", "--gres=gpu:2", "--mem=1024M"} <= {*options}

    @pytest.mark.parametrize("own", [["--gres=gpu:a:1", "--gres=gpu:b:1"], ["--constraint=a", "--constraint=b"]])
    def test_tasks_that_cannot_be_on_one_node_are_refused(self, groups: GroupBench, own: list[str]) -> None:
        with pytest.raises(SpecError, match="same nodes"):
            self.options(groups, *([one] for one in own), is_shared=True)

    def test_tasks_of_less_than_a_node_run_at_once_with_gpus_of_their_own(self, groups: GroupBench) -> None:
        run = "echo $CUDA_VISIBLE_DEVICES; hostname\n" + groups.waits_for("seen")
        tasks = [
            groups.task("trainer", run, cpus=2, gpus=1, setup="echo set up"),
            groups.task("server", run, cpus=1, gpus=1, nodes=2),
            groups.task("buffer", run),
        ]
        group = groups.submit(*tasks, is_shared=True)
        group.until_up("trainer", "server", "buffer", word="\n")
        eventually(lambda: group.rank_log("server", 1).count("\n") == 2)
        shown = groups.bench.cluster.run("ctl", ["scontrol", "show", "job", str(group.job_id)]).stdout
        groups.touch("seen")
        end = group.end()
        succeeded(end)
        assert "NumNodes=2 " in shown and re.search(r"CPUs/Task=3\b", shown), shown
        said = {name: end.log(name).split("\n")[:2] for name in ("trainer", "server", "buffer")}
        assert said["trainer"][1] == said["server"][1] != said["buffer"][1], (
            "two on one node, and the third where room is"
        )
        assert {said["trainer"][0], said["server"][0]} == {"0", "1"} and said["buffer"][0] == ""
        assert end.log("server", 1).split("\n")[1] == said["buffer"][1]

    @pytest.mark.slow
    @pytest.mark.parametrize("gres_type", [None, "a100"])
    def test_many_tasks_on_one_node_of_eight_gpus_have_all_of_them_once(
        self, own_cluster: BootCluster, shared_dir: Path, gres_type: str | None
    ) -> None:
        groups = GroupBench(Bench(own_cluster(nodes=1, gpus=8, gres_type=gres_type), shared_dir))
        run = "echo $CUDA_VISIBLE_DEVICES\n" + groups.waits_for("seen")
        counts = {"trainer": 4, "server": 2, "reward": 1, "data": 1, "buffer": 0}
        tasks = [groups.task(name, run, gpus=count, cpus=count or 1) for name, count in counts.items()]
        kind = f"{gres_type}:" if gres_type else ""
        own = [[f"--gres=gpu:{kind}{count}"] if count else [] for count in counts.values()]
        group = groups.submit(*tasks, is_shared=True, own=own)
        group.until_up(*counts, word="\n")
        groups.touch("seen")
        end = group.end()
        succeeded(end)
        found = {name: [gpu for gpu in end.log(name).strip().split(",") if gpu] for name in counts}
        assert {name: len(gpus) for name, gpus in found.items()} == counts
        assert sorted(gpu for gpus in found.values() for gpu in gpus) == [*"01234567"]


class TestLife:
    def test_the_last_primary_ends_the_group_and_an_auxiliary_that_is_done_early_ends_the_wait(
        self, groups: GroupBench
    ) -> None:
        group = groups.submit(
            groups.task("trainer", groups.waits_for("go")),
            groups.task("eval", groups.waits_for("last")),
            groups.aux("buffer", trap("sleep 0.3; echo flushed; exit 0"), grace_s=60),
        )
        group.until_up("buffer")
        groups.touch("go")
        group.until_state("trainer", SUCCEEDED)
        time.sleep(0.5)
        assert (group.state("eval"), group.state("buffer")) == (protocol.RUNNING, protocol.RUNNING)
        groups.touch("last")
        end = group.end()
        succeeded(end)
        assert end.log("buffer") == "up\ngot TERM\nflushed\n", "told once, at once, with time to flush"
        assert end.time_of("task_ended", "buffer") - end.time_of("task_ended", "eval") < 20, "the delay is 60 s"

    def test_each_auxiliary_has_its_own_delay_and_its_own_verdict(self, groups: GroupBench) -> None:
        """NVIDIA-NeMo/Run#24, hashicorp/nomad#8165, NVIDIA/cloudai#880: a server stops when its client is done."""
        group = groups.submit(
            groups.task("client", groups.waits_for("go")),
            groups.aux("deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done", grace_s=1),
            groups.aux("buffer", trap("sleep 2.5; echo flushed; exit 0"), grace_s=60),
        )
        group.until_up("deaf", "buffer")
        groups.touch("go")
        group.until_state("deaf", CANCELLED)
        assert group.state("buffer") == protocol.RUNNING, "the end of one is not the end of another"
        end = group.end()
        succeeded(end)
        assert end.log("buffer").endswith("got TERM\nflushed\n")
        deaf_s = end.time_of("task_ended", "deaf") - end.time_of("task_ended", "client")
        assert 1.0 <= deaf_s < 8, deaf_s

    def test_a_failed_primary_stops_the_others_and_gives_its_state_and_code(self, groups: GroupBench) -> None:
        """PrimeIntellect-ai/prime-rl#2574, #2577: one part crashed and the rest kept the allocation."""
        group = groups.submit(
            groups.task("trainer", groups.waits_for("go") + "exit 7"),
            groups.task("eval", trap("exit 0")),
            groups.aux("server", trap("exit 3")),
        )
        group.until_up("eval", "server")
        groups.touch("go")
        end = group.end()
        assert (end.state, end.code) == (FAILED, 7), end.output
        assert end.reason.startswith("trainer: ")
        assert (end.log("eval"), end.log("server")) == ("up\ngot TERM\n", "up\ngot TERM\n")
        assert end.states == {"trainer": FAILED, "eval": CANCELLED, "server": CANCELLED}

    def test_with_continue_the_other_primaries_go_on_and_the_first_failure_by_time_is_the_verdict(
        self, groups: GroupBench
    ) -> None:
        group = groups.submit(
            groups.task("a", groups.waits_for("later") + "exit 9"),
            groups.task("b", groups.waits_for("go") + "exit 4"),
            groups.task("c", groups.waits_for("last") + "echo done"),
            groups.aux("server", trap("exit 0")),
            stops_on_primary_failure=False,
        )
        group.until_up("server")
        groups.touch("go")
        group.until_state("b", FAILED)
        group.until_state("c", protocol.RUNNING)
        assert (group.status()["state"], group.state("c")) == (protocol.RUNNING, protocol.RUNNING)
        groups.touch("later")
        group.until_state("a", FAILED)
        groups.touch("last")
        end = group.end()
        assert (end.state, end.code, end.reason[:2]) == (FAILED, 4, "b:"), end.output
        assert (end.states["c"], end.log("c")) == (SUCCEEDED, "done\n")

    @pytest.mark.parametrize("crash, code", [("exit 5", 5), ("kill -9 $$", 137)])
    def test_a_crash_of_an_auxiliary_is_told_at_once_and_changes_nothing(
        self, groups: GroupBench, crash: str, code: int
    ) -> None:
        """PrimeIntellect-ai/prime-rl#2574: nobody noticed."""
        group = groups.submit(groups.task("trainer", groups.waits_for("go")), groups.aux("server", crash))
        group.until_state("server", FAILED)
        eventually(lambda: f"gangrun: task server is FAILED, exit code {code}" in group.output(), 1)
        assert group.status()["state"] == protocol.RUNNING
        groups.touch("go")
        end = group.end()
        succeeded(end)
        assert (end.states["server"], end.codes["server"]) == (FAILED, code)

    def test_a_task_is_started_again_as_often_as_it_says(self, groups: GroupBench) -> None:
        count = "echo start >>{0}; [ $(wc -l <{0}) -gt {1} ] || exit 6\n"
        file = str(groups.bench.directory / "starts-%s")
        group = groups.submit(
            groups.task("trainer", count.format(file % "trainer", 1) + groups.waits_for("go"), max_restarts=1),
            groups.aux("server", count.format(file % "server", 2) + trap("exit 0"), max_restarts=5),
            groups.aux("hopeless", "exit 8", max_restarts=1),
        )
        group.until_up("server")
        group.until_state("hopeless", FAILED)
        eventually(lambda: group.tasks()["hopeless"]["restarts"] == 1)
        group.until_state("trainer", protocol.RUNNING)
        groups.touch("go")
        end = group.end()
        succeeded(end)
        assert {name: task["restarts"] for name, task in end.tasks.items()} == {
            "trainer": 1, "server": 2, "hopeless": 1,
        }  # fmt: skip
        assert "task server is FAILED, exit code 6; starting it again" in end.output
        assert "task hopeless is FAILED, exit code 8\n" in end.output

    def test_secrets_are_there_when_a_task_is_started_again_and_gone_with_the_group(self, groups: GroupBench) -> None:
        mark = groups.bench.directory / "second"
        run = f"echo ${{#TOKEN}}; [ -e {mark} ] || {{ touch {mark}; exit 1; }}"
        end = groups.run(
            groups.task("trainer", run, secrets={"TOKEN": "s3cr3t"}, max_restarts=1), groups.aux("a", "true")
        )
        succeeded(end)
        assert end.log("trainer").endswith("6\n")
        left = [path for path in groups.bench.directory.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
        assert left == []

    def test_an_auxiliary_that_ends_just_before_its_primary_changes_nothing(self, groups: GroupBench) -> None:
        """E3SM-Project/E3SM#10: cleaning up after a member that was gone already killed the driver."""
        for round_ in range(3):
            name = f"go{round_}"
            end = groups.run(
                groups.task("trainer", f"sleep 0.{round_}\n" + groups.waits_for(name)),
                groups.aux("aux", f"touch {groups.bench.directory / name}; exit {round_}"),
                run=f"g{round_}",
            )
            succeeded(end)

    @pytest.mark.parametrize("code", [0, 9])
    def test_a_group_of_one_is_as_a_plain_task(self, groups: GroupBench, code: int) -> None:
        run = f"echo $SKYPILOT_NUM_NODES $SKYPILOT_NODE_RANK; sleep 1; exit {code}"
        end = groups.run(groups.task("only", run, nodes=2))
        alone = groups.bench.drive(run, nodes=2)
        assert (end.state, end.code, end.outcome.code) == (alone.status["state"], code, alone.code)
        assert end.log("only", 1) == alone.log("1-worker1.log") == "2 1\n"

    def test_a_failed_setup_of_a_primary_is_the_groups_verdict(self, groups: GroupBench) -> None:
        end = groups.run(groups.task("trainer", "true", setup="exit 3"), groups.aux("server", trap("exit 0")))
        assert (end.state, end.code) == (protocol.FAILED_SETUP, 3), end.output


class TestNames:
    def test_every_name_resolves_in_every_task_on_every_node_before_a_script_starts(self, groups: GroupBench) -> None:
        """NVIDIA-NeMo/Skills#336: members found each other by variables that depended on their order."""
        names = ["trainer-0.rl", "trainer-1.rl", "server-0.rl"]
        run = (
            f"for name in {' '.join(names)}; do getent ahostsv4 $name | head -1; done; env | grep GANGRUN_ADDR_ | sort"
        )
        run += "; echo $SKYPILOT_JOBGROUP_NAME; id -u"
        end = groups.run(
            groups.task("trainer", run, nodes=2), groups.task("server", run), groups.task("replay-buffer", run)
        )
        succeeded(end)
        address = {node: groups.bench.cluster.addresses[node] for task in end.tasks.values() for node in task["nodes"]}
        nodes = [*end.tasks["trainer"]["nodes"], *end.tasks["server"]["nodes"]]
        buffer = address[end.tasks["replay-buffer"]["nodes"][0]]
        wanted = [address[node] for node in nodes]
        for log in (end.log("trainer"), end.log("trainer", 1), end.log("server"), end.log("replay-buffer")):
            lines = log.split("\n")
            assert [line.split()[0] for line in lines[:3]] == wanted, log
            assert lines[3:6] == [
                f"GANGRUN_ADDR_REPLAY_BUFFER={buffer}",
                f"GANGRUN_ADDR_SERVER={wanted[2]}",
                f"GANGRUN_ADDR_TRAINER={wanted[0]}",
            ]
            assert lines[6:] == ["rl", "0", ""]
        assert re.search(r"gangrun: host names <task>-<index>.rl by (namespace|nss_wrapper)\n", end.output)

    def test_names_resolve_in_setup_and_for_a_program_that_reads_etc_hosts_itself(self, groups: GroupBench) -> None:
        look = "grep -c server-0.rl /etc/hosts || getent hosts server-0.rl | wc -l"
        both = look + "; echo $SKYPILOT_JOBGROUP_NAME"
        end = groups.run(groups.task("trainer", both, setup=both), groups.task("server", "true"))
        succeeded(end)
        assert end.log("trainer") == "1\nrl\n"
        assert (end.group.folder / "logs/trainer/setup-head.log").read_text() == "1\nrl\n"

    def test_two_groups_of_one_name_on_the_same_nodes_see_their_own(self, groups: GroupBench) -> None:
        run = "getent ahostsv4 b-0.rl | head -1 | cut -d' ' -f1; echo up\n" + groups.waits_for("both")
        nodes = groups.bench.cluster.nodes
        pairs = {"g1": nodes[:2], "g2": nodes[1:3]}
        running = [
            groups.submit(*(groups.task(n, run) for n in "ab"), run=name, sbatch="--nodelist=" + ",".join(pair))
            for name, pair in pairs.items()
        ]
        for group in running:
            group.until_up("a", "b")
        groups.touch("both")
        for group, pair in zip(running, pairs.values()):
            end = group.end()
            succeeded(end)
            expected = groups.bench.cluster.addresses[pair[1]]
            assert [end.log(name).split("\n")[0] for name in "ab"] == [expected, expected]
        for node in nodes:
            assert "b-0.rl" not in groups.bench.cluster.run(node, ["cat", "/etc/hosts"]).stdout

    def test_without_inter_connection_there_are_no_names(self, groups: GroupBench) -> None:
        run = "getent hosts b-0.rl || echo none; echo $GANGRUN_ADDR_B"
        end = groups.run(groups.task("a", run), groups.task("b", run), inter_connection=False)
        succeeded(end)
        address = groups.bench.cluster.addresses[end.tasks["b"]["nodes"][0]]
        assert end.log("a") == f"none\n{address}\n"

    def test_required_names_are_there(self, groups: GroupBench) -> None:
        tasks = [groups.task(name, "getent hosts b-0.rl >/dev/null && echo found") for name in "ab"]
        end = groups.run(*tasks, inter_connection=True)
        succeeded(end)
        assert end.log("a") == end.log("b") == "found\n"

    @pytest.mark.parametrize("wish", [True, None], ids=["required", "unset"])
    def test_where_there_can_be_no_names_a_group_that_needs_them_does_not_start(
        self, groups: GroupBench, wish: bool | None
    ) -> None:
        """Others are warned, and have the addresses."""
        wrapper = groups.bench.directory / "python"
        root = groups.bench.cluster.options.rootfs or ""
        hidden = [path for path in LIBRARIES if Path(root + path).exists()]
        forbidden = shlex.join(FORBIDDEN).replace("HIDDEN", " ".join(hidden))
        wrapper.write_text(f'#!/bin/sh\nexec {forbidden} {groups.bench.python} "$@"\n')
        wrapper.chmod(0o755)
        end = groups.run(
            groups.task("a", "echo ran $GANGRUN_ADDR_B"), groups.task("b", "true"), inter_connection=wish,
            interpreter=str(wrapper),
        )  # fmt: skip
        if wish:
            assert (end.state, end.code) == (protocol.FAILED_DRIVER, protocol.EXIT_USAGE), end.output
            assert "inter_connection=True: host names need" in end.output and "Traceback" not in end.output
            assert end.log("a") == "" and not groups.bench.files("*/*/attempt-*/*")
        else:
            succeeded(end)
            assert "gangrun: warning: host names need" in end.output
            assert end.log("a") == f"ran {groups.bench.cluster.addresses[end.tasks['b']['nodes'][0]]}\n"


class TestReady:
    def test_a_task_starts_when_what_it_is_after_is_ready(self, groups: GroupBench) -> None:
        """By port, by http, by a line of its log and by a command: each starts the next one."""
        file = groups.bench.directory / "ready-file"
        end = groups.run(
            groups.aux("port", SERVE.format(after=1, port=18123), ready={"port": 18123}),
            groups.aux("http", SERVE.format(after=1, port=18124), ready={"http": ":18124/"}, after=("port",)),
            groups.aux(
                "log", f"echo one; sleep 1; echo now listening; {FOREVER}", ready={"log": "listening$"}, after=("http",)
            ),
            groups.task(
                "client", ASK.format(url="http://port-0.rl:18123") + "\n" + ASK.format(url="http://http-0.rl:18124"),
                after=("log", "http"),
            ),
        )  # fmt: skip
        succeeded(end)
        assert end.log("client") == "200\n200\n"
        order = [(e["event"], e["task"]) for e in end.events if e["event"] in ("task_started", "task_ready")]
        assert order == [
            ("task_started", "port"), ("task_ready", "port"), ("task_started", "http"), ("task_ready", "http"),
            ("task_started", "log"), ("task_ready", "log"), ("task_started", "client"),
        ]  # fmt: skip
        assert not file.exists()

    def test_a_command_tells_when_a_task_is_ready(self, groups: GroupBench) -> None:
        file = groups.bench.directory / "ready-file"
        end = groups.run(
            groups.aux("server", f"sleep 1; touch {file}; {FOREVER}", ready={"command": f"[ -e {file} ]"}),
            groups.task("client", f"ls {file} | wc -l", after=("server",)),
        )
        succeeded(end)
        assert end.log("client") == "1\n"

    def test_a_task_that_does_not_become_ready_fails_the_group_with_its_probe_and_its_last_words(
        self, groups: GroupBench
    ) -> None:
        end = groups.run(
            groups.aux("server", "echo cannot bind to port; exec sleep 4702", ready={"port": 18125, "timeout_s": 2}),
            groups.task("client", "echo never", after=("server",)),
        )
        assert (end.state, end.code) == (protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE), end.output
        assert "server was not ready after 2 s: port 18125 of server: connection refused" in end.reason
        assert "    | (server, pid=" in end.output and "cannot bind to port\n" in end.output
        assert end.log("client") == "" and "client [P]: never started" in end.output

    def test_a_task_that_ends_before_it_is_ready_fails_the_group(self, groups: GroupBench) -> None:
        begun = time.monotonic()
        end = groups.run(
            groups.aux("server", "echo no license; exit 6", ready={"port": 18126, "timeout_s": 300}),
            groups.task("client", "echo never", after=("server",)),
        )
        assert (end.state, end.log("client")) == (protocol.FAILED_DRIVER, ""), end.output
        assert "server" in end.reason and "exit code 6" in end.reason and "no license" in end.output
        assert time.monotonic() - begun < 60

    def test_a_task_that_was_started_again_is_asked_again(self, groups: GroupBench) -> None:
        mark = groups.bench.directory / "second"
        serve = f"[ -e {mark} ] || {{ touch {mark}; echo listening; exit 1; }}; sleep 1; echo listening; {FOREVER}"
        end = groups.run(
            groups.aux("server", serve, ready={"log": "^listening"}, max_restarts=1),
            groups.task("client", "echo ran", after=("server",)),
        )
        succeeded(end)
        assert end.log("client") == "ran\n"


class TestPipeline:
    def test_tasks_run_one_after_the_other_on_the_same_nodes(self, groups: GroupBench) -> None:
        file = groups.bench.directory / "order"
        end = groups.run(
            groups.task("prepare", f"echo prepare >>{file}; sleep 0.5; echo prepared >>{file}", nodes=1),
            groups.task("train", f"[ $SKYPILOT_NODE_RANK != 0 ] || echo train >>{file}", nodes=2, cpus=2),
            groups.task("eval", f"echo eval >>{file}"),
            is_parallel=False,
        )
        succeeded(end)
        assert file.read_text().split() == ["prepare", "prepared", "train", "eval"]
        assert end.tasks["prepare"]["nodes"] == end.tasks["eval"]["nodes"] == end.tasks["train"]["nodes"][:1]

    def test_the_first_failure_stops_it(self, groups: GroupBench) -> None:
        end = groups.run(
            groups.task("prepare", "echo ok"), groups.task("train", "exit 4"), groups.task("eval", "echo never"),
            is_parallel=False,
        )  # fmt: skip
        assert (end.state, end.code, end.log("eval")) == (FAILED, 4, ""), end.output
        assert end.reason.startswith("train: ")
        assert "eval: never started" in end.output

    def test_a_task_that_somebody_cancels_stops_it(self, groups: GroupBench) -> None:
        group = groups.submit(groups.task("train", FOREVER), groups.task("eval", "echo never"), is_parallel=False)
        group.until_up("train")
        groups.bench.cluster.run("ctl", ["scancel", f"{group.job_id}.0"])
        end = group.end(40)
        assert (end.state, end.code, end.log("eval")) == (CANCELLED, 143, ""), end.output


class TestOutput:
    def test_the_groups_output_holds_the_lines_of_all_tasks_each_with_its_task(self, groups: GroupBench) -> None:
        run = "for i in 1 2 3; do echo line $i; sleep 0.2; done"
        end = groups.run(groups.task("a", run, nodes=2), groups.task("b", run))
        succeeded(end)
        lines = [line for line in end.output.split("\n") if " line " in line]
        assert len(lines) == 9
        assert all(
            re.match(r"\[a\] \((head|worker1), rank=\d, pid=\d+.*\) line \d$|\[b\] \(b, pid=\d+\) line \d$", line)
            for line in lines
        ), lines
        assert end.output.index("[b] ") < end.output.rindex("[a] (") and end.output.index("[a] ") < end.output.rindex(
            "[b] ("
        )
        assert end.group.task_log("b").count(" line ") == 3 and "[b]" not in end.group.task_log("b")


class TestCancel:
    @pytest.mark.parametrize("is_het", [False, True], ids=["homogeneous", "heterogeneous"])
    def test_every_program_of_every_task_is_told_once_and_is_gone(self, groups: GroupBench, is_het: bool) -> None:
        tasks = [
            groups.task("trainer", trap("sleep 0.5; echo saved; exit 0"), nodes=2, cpus=2 if is_het else 1),
            groups.aux("server", trap("sleep 0.5; echo saved; exit 0")),
        ]
        group = groups.submit(*(components(*tasks) if is_het else tasks))
        group.until_up("trainer", "server")
        eventually(lambda: "up" in group.rank_log("trainer", 1))
        groups.scancel(group, "--batch", "--signal=TERM")
        end = group.end()
        assert (end.state, end.code) == (CANCELLED, 143), end.output
        for log in (end.log("trainer"), end.log("trainer", 1), end.log("server")):
            assert log == "up\ngot TERM\nsaved\n"
        assert end.states == {"trainer": CANCELLED, "server": CANCELLED}

    def test_scancel_ends_all_with_one_term_each(self, groups: GroupBench) -> None:
        group = groups.submit(groups.task("trainer", trap("exit 0")), groups.aux("server", trap("exit 0")))
        group.until_up("trainer", "server")
        groups.scancel(group)
        end = group.end()
        assert (end.state, end.code) == (CANCELLED, 143), end.output
        assert (end.log("trainer"), end.log("server")) == ("up\ngot TERM\n", "up\ngot TERM\n")

    @pytest.mark.parametrize("how", [(), ("--batch", "--signal=TERM")], ids=["scancel", "TERM to the driver"])
    def test_a_cancel_that_meets_the_drivers_of_the_tasks_as_they_begin(
        self, groups: GroupBench, how: tuple[str, ...]
    ) -> None:
        group = groups.submit(*(groups.task(name, FOREVER) for name in "abcd"))
        events = group.job_directory / protocol.EVENTS_NAME
        eventually(lambda: events.exists() and "task_started" in events.read_text(), 20)
        groups.scancel(group, *how)
        end = group.end()
        assert {*end.states.values()} <= {CANCELLED, protocol.PENDING}, end.output
        assert (end.state, end.code) == (CANCELLED, 143), end.output

    def test_a_primary_that_failed_before_the_cancel_stays_the_verdict(self, groups: GroupBench) -> None:
        group = groups.submit(
            groups.task("trainer", "exit 7"), groups.aux("server", trap("sleep 2; exit 0"), grace_s=20)
        )
        group.until_state("trainer", FAILED)
        groups.scancel(group, "--batch", "--signal=TERM")
        end = group.end()
        assert (end.state, end.code) == (FAILED, 7), end.output

    def test_a_group_whose_primaries_are_done_stays_a_success_when_its_last_flush_is_cancelled(
        self, groups: GroupBench
    ) -> None:
        group = groups.submit(
            groups.task("trainer", groups.waits_for("go")), groups.aux("buffer", trap("sleep 2; echo flushed; exit 0"))
        )
        group.until_up("buffer")
        groups.touch("go")
        group.until_up("buffer", word="got TERM")
        groups.scancel(group, "--batch", "--signal=TERM")
        end = group.end()
        succeeded(end)
        assert end.log("buffer") == "up\ngot TERM\nflushed\n"

    def test_a_warning_signal_reaches_every_program(self, groups: GroupBench) -> None:
        run = "trap 'echo warned; exit 0' USR1; echo up; while :; do sleep 0.1; done"
        group = groups.submit(groups.task("a", run, nodes=2), groups.task("b", run))
        group.until_up("a", "b")
        eventually(lambda: "up" in group.rank_log("a", 1))
        groups.scancel(group, "--batch", "--signal=USR1")
        end = group.end()
        succeeded(end)
        assert [end.log("a"), end.log("a", 1), end.log("b")] == ["up\nwarned\n"] * 3


class TestRequeue:
    @pytest.mark.slow
    @pytest.mark.parametrize("is_het", [False, True], ids=["homogeneous", "heterogeneous"])
    def test_a_requeued_group_runs_all_its_tasks_again(self, groups: GroupBench, is_het: bool) -> None:
        run = "echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 1 ] || exec sleep 4703"
        tasks = [groups.task("trainer", run, cpus=2 if is_het else 1), groups.aux("server", run)]
        group = groups.submit(*(components(*tasks) if is_het else tasks), sbatch="--requeue")
        group.until_up("trainer", "server", word="attempt 0")
        groups.bench.cluster.run("ctl", ["scontrol", "requeue", str(group.job_id)])
        eventually(lambda: "attempt 1" in group.rank_log("trainer"), 90)
        end = group.end()
        succeeded(end)
        assert end.status["attempt"] == 1
        first = [one["state"] for one in end.events if one["event"] == "state" and one["attempt"] == 0]
        assert not {*first} & {*protocol.TERMINAL_STATES}, "its end was not the group's"
        assert "attempt 1" in end.log("server")
        assert end.states["trainer"] == SUCCEEDED
