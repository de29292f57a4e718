"""What follows a launch, from a laptop over ssh: logs, queue, status, wait, cancel, explain."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from gangrun import states
from gangrun.records import Records
from tests.bench import eventually
from tests.client_bench import Laptop, Launched, without_colour
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.fixtures import BootCluster, Session
from tests.minislurm.login import Login
from tests.test_minislurm import or_skip

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]
# Says when it is ready, and what it gets.
TRAP = """
exec python3 -u -c '
import signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
print("ready")
while True:
    time.sleep(0.05)
    if got:
        got.clear(); print("got TERM"); {on_term}
'
"""
NUMBERS = "for i in $(seq 1 {count}); do echo line $i; sleep {pause}; done"


@pytest.fixture
def laptop(cluster: Cluster, login: Login) -> Iterator[Laptop]:
    """On the shared cluster: no harm to others."""
    laptop = Laptop(cluster)
    yield laptop
    laptop.close()


@pytest.fixture(scope="module")
def lone_cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A cluster of this file's own, whose daemons may be stopped and whose connections may be cut."""
    session = Session.of(pytestconfig)
    with Cluster.boot(session.own_root(), nodes=2, kill_wait_s=30, rootfs=session.rootfs) as cluster:
        yield cluster


@pytest.fixture
def lone(lone_cluster: Cluster) -> Iterator[Laptop]:
    """The only person there; afterwards all is as before."""
    laptop = Laptop(lone_cluster)
    yield laptop
    laptop.login.start()
    laptop.unshimmed()
    for how in ([], ["--full", "--signal=KILL"]):
        lone_cluster.run("ctl", ["scancel", *how, "--user", laptop.user], cwd="/", check=False)
    laptop.close()
    lone_cluster.wait_idle(timeout_s=120)  # a controller that was away hears of ends late


def numbers(count: int) -> list[str]:
    return ["line %d" % i for i in range(1, count + 1)]


def ended(laptop: Laptop, name: str) -> int:
    return laptop.gangrun("wait", name).returncode


class TestLogs:
    def test_following_ends_with_the_last_line_even_without_a_newline_and_with_the_jobs_code(
        self, laptop: Laptop
    ) -> None:
        job = laptop.launch("echo first; sleep 1; printf 'the end'")
        followed = laptop.gangrun("logs", "-f", "--rank", "0", job.name)
        assert (followed.returncode, followed.stdout) == (0, "first\nthe end")
        assert f"{job.run} (job {job.job}) SUCCEEDED" in followed.stderr
        whole = laptop.gangrun("logs", job.job)
        assert whole.returncode == 0
        assert re.search(r"\(.*pid=\d+\) first\n.*\) the end\n", without_colour(whole.stdout))

    def test_the_exit_code_is_the_jobs_state(self, laptop: Laptop) -> None:
        failing, running = laptop.launch("exit 3"), laptop.launch("sleep 300")
        running.until(protocol.RUNNING)
        assert laptop.gangrun("logs", "-f", failing.run).returncode == states.EXIT_FAILED
        assert laptop.gangrun("logs", running.run).returncode == states.EXIT_UNFINISHED
        assert laptop.gangrun("cancel", running.run).returncode == 0
        assert laptop.gangrun("logs", running.run).returncode == states.EXIT_CANCELLED
        assert laptop.gangrun("status", failing.run).returncode == states.EXIT_FAILED
        for verb in ("logs", "wait"):
            unknown = laptop.gangrun(verb, "nobody-knows-it")
            assert (unknown.returncode, unknown.stdout) == (states.EXIT_NOT_FOUND, "")
            assert "nobody-knows-it" in unknown.stderr and len(unknown.stderr.splitlines()) == 1

    def test_a_reader_that_was_interrupted_leaves_the_job_alone_and_is_told_how_to_come_back(
        self, laptop: Laptop
    ) -> None:
        job = laptop.launch("echo up; while [ ! -e go ]; do sleep 0.1; done; echo down")
        reader = laptop.popen("logs", "-f", job.run)
        reader.until_out("up")
        time.sleep(0.5)  # it waits for the host to say something
        reader.interrupt()
        assert reader.wait(5) == states.EXIT_UNFINISHED, reader.err
        assert f"gangrun logs {job.run} --host head -f" in reader.err
        assert f"gangrun cancel {job.run} --host head" in reader.err
        assert "Traceback" not in reader.err
        assert job.record()["state"] == protocol.RUNNING
        back = laptop.popen("logs", job.run, "--host", "head", "-f")
        back.until_out("up")
        back.kill()  # and again, without a word
        laptop.remote("touch", str(job.directory / "work" / "go"))
        again = laptop.gangrun("logs", "-f", "--rank", "0", job.run)
        assert (again.returncode, again.stdout) == (0, "up\ndown\n")

    # swiss-ai/model-launch#45, NousResearch/hermes-agent#11558
    def test_a_character_is_never_shown_in_two_parts(self, laptop: Laptop) -> None:
        job = laptop.launch(r"printf '\342\202'; sleep 1.5; printf '\254 x\360\237'; sleep 1.5; printf '\230\200'")
        reader, seen = laptop.popen("logs", "-f", "--rank", "0", job.run), set()
        while reader.process.poll() is None:
            seen.add(reader.out_bytes.decode("utf-8"))  # raises in the middle of a character
            time.sleep(0.05)
        assert reader.wait() == 0
        assert reader.out == "€ x😀" and {"", "€ x"} <= seen

    # OpenJobDescription/openjd-sessions-for-python#343, hail-is/hail#12614
    def test_bytes_that_are_no_text_arrive_as_they_are(self, laptop: Laptop) -> None:
        every = bytes(range(256)) * 3 + b"\xe2\x82"
        job = laptop.launch("python3 -c 'import os; os.write(1, bytes(range(256)) * 3 + bytes([0xe2, 0x82]))'")
        for flags in (["-f"], []):
            reader = laptop.popen("logs", *flags, "--rank", "0", job.run)
            assert reader.wait() == 0
            assert reader.out_bytes == every, flags

    def test_ten_megabytes_arrive_whole(self, laptop: Laptop) -> None:
        job = laptop.launch("head -c 7500000 /dev/urandom | base64; echo the last line")
        reader = laptop.popen("logs", "-f", "--rank", "0", job.run)
        assert reader.wait() == 0
        written = (job.directory / "logs" / protocol.SINGLE_LOG_NAME).read_bytes()
        assert len(written) > 10_000_000 and written.endswith(b"the last line\n")
        assert hashlib.sha256(reader.out_bytes).hexdigest() == hashlib.sha256(written).hexdigest()

    # skypilot-org/skypilot#6719
    def test_the_last_ten_thousand_of_fifteen_thousand_lines_are_these(self, laptop: Laptop) -> None:
        job = laptop.launch("seq 1 14999; printf 15000")
        last = [str(i) for i in range(5001, 15001)]
        assert laptop.gangrun("wait", job.run).returncode == 0  # else -n counts from what there is when -f begins
        followed = laptop.gangrun("logs", "-f", "--rank", "0", "-n", "10000", job.run)
        assert (followed.returncode, followed.stdout.split("\n")) == (0, last)
        for count, first in ((10000, 5001), (1, 15000), (20000, 1)):
            read = laptop.gangrun("logs", "--rank", "0", "-n", str(count), job.run)
            assert read.stdout.split("\n") == [str(i) for i in range(first, 15001)], count

    def test_each_flag_chooses_its_log(self, laptop: Laptop) -> None:
        job = laptop.launch(
            "echo run $SKYPILOT_NODE_RANK on $(hostname)", num_nodes=2, setup="echo setup $SKYPILOT_SETUP_NODE_RANK"
        )
        assert laptop.gangrun("logs", "-f", "--rank", "1", job.run).stdout.startswith("run 1 on ")
        ranks = [laptop.gangrun("logs", "--rank", str(rank), job.run).stdout for rank in (0, 1)]
        assert [line.split()[:2] for line in ranks] == [["run", "0"], ["run", "1"]]
        assert laptop.gangrun("logs", "--node", "worker1", job.run).stdout == ranks[1]
        assert laptop.gangrun("logs", "--node", ranks[0].split()[-1], job.run).stdout == ranks[0]
        assert laptop.gangrun("logs", "--setup", job.run).stdout == "setup 0\nsetup 1\n"
        assert laptop.gangrun("logs", "--setup", "--rank", "1", job.run).stdout == "setup 1\n"
        driver = laptop.gangrun("logs", "--driver", job.run).stdout
        assert "SUCCEEDED" in driver and "run 0" not in driver and "setup 0" not in driver
        lines = [
            json.loads(line)
            for line in laptop.gangrun("logs", "--rank", "1", "--json", job.run).stdout.split("\n")[:-1]
        ]
        assert lines == [{"log": "logs/1-worker1.log", "line": ranks[1].rstrip()}]
        missing = laptop.gangrun("logs", "--rank", "2", job.run)
        assert missing.returncode == states.EXIT_NOT_FOUND and "0-head.log" in missing.stderr

    def test_all_logs_can_be_taken_home(self, laptop: Laptop) -> None:
        job = laptop.launch("echo $SKYPILOT_NODE_RANK", num_nodes=2, setup="echo set up")
        assert ended(laptop, job.run) == 0
        taken = laptop.home / "taken"
        said = laptop.json("logs", "--download", str(taken), job.run)
        assert said["directory"] == str(taken)
        names = {"output", "0-head.log", "1-worker1.log", "setup-head.log", "setup-worker1.log"}
        assert set(os.listdir(taken)) == names
        assert (taken / "1-worker1.log").read_text() == "1\n"
        assert (taken / "output").read_bytes() == (job.directory / "output").read_bytes()

    def test_a_job_that_waits_can_be_followed_from_before_its_first_line(self, laptop: Laptop) -> None:
        job = laptop.launch("echo run $SKYPILOT_NODE_RANK", "--sbatch-arg=--hold", num_nodes=2)
        readers = [laptop.popen("logs", "-f", *flags, job.run) for flags in ([], ["--rank", "1"], ["--node", "head"])]
        readers[0].until_err("PENDING")
        laptop.cluster.run("ctl", ["scontrol", "release", job.job], cwd="/")
        assert [reader.wait() for reader in readers] == [0, 0, 0]
        assert "run 1" in readers[0].out
        assert [reader.out for reader in readers[1:]] == ["run 1\n", "run 0\n"]

    def test_following_several_logs_at_once_is_refused_and_not_cut_short(self, laptop: Laptop) -> None:
        job = laptop.launch("sleep 100", num_nodes=2, setup="echo $SKYPILOT_SETUP_NODE_RANK")
        refused = laptop.gangrun("logs", "-f", "--setup", job.run)
        assert refused.returncode == protocol.EXIT_USAGE and "setup-worker1.log" in refused.stderr
        assert "--rank" in refused.stderr

    def test_a_log_that_was_truncated_or_replaced_is_read_from_its_start(self, laptop: Laptop) -> None:
        job = laptop.launch("echo before; while [ ! -e go ]; do sleep 0.1; done; printf end")
        path = job.directory / "logs" / protocol.SINGLE_LOG_NAME
        reader = laptop.popen("logs", "-f", "--rank", "0", job.run)
        reader.until_out("before\n")
        os.truncate(path, 0)
        reader.until_err("truncated or replaced")
        with open(path, "a") as file:
            file.write("after\n")
        reader.until_out("before\nafter\n")
        new = path.with_name("new")
        new.write_text("another file\n")
        new.replace(path)
        reader.until_out("before\nafter\nanother file\n")
        laptop.remote("touch", str(job.directory / "work" / "go"))
        assert reader.wait() == 0
        assert reader.out == "before\nafter\nanother file\n"


@pytest.mark.slow
class TestLateFiles:
    """The login node's view of the home is seconds old, as over NFS."""

    # quokka-astro/quokka#1057, nextflow-io/nextflow#2695, #5454, nextflow-io/nextflow#1045, labsyspharm/mcmicro#169
    def test_logs_and_verdict_are_right_in_the_end(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1)
        laptop = Laptop(cluster)
        try:
            job = laptop.launch(NUMBERS.format(count=30, pause=0.1), "--sbatch-arg=--hold")
            or_skip(lambda: cluster.mount_nfs_like("ctl", laptop.remote_home, laptop.remote_home, cache_s=4))
            assert job.seen()["state"] == protocol.PENDING
            reader, waiter = laptop.popen("logs", "-f", "--rank", "0", job.run), laptop.popen("wait", job.run)
            reader.until_err("PENDING")
            cluster.run("ctl", ["scontrol", "release", job.job], cwd="/")
            assert (reader.wait(), waiter.wait()) == (0, 0)
            assert reader.out.splitlines() == numbers(30)
            eventually(lambda: laptop.gangrun("logs", "--rank", "0", job.run).stdout.splitlines() == numbers(30))
        finally:
            laptop.close()


class TestLostConnections:
    # AgnostiqHQ/covalent-slurm-plugin#64, dstackai/dstack#2627
    def test_a_followed_log_survives_cut_connections_without_a_line_lost_or_repeated(self, lone: Laptop) -> None:
        job = lone.launch(NUMBERS.format(count=120, pause=0.05))
        reader = lone.popen("logs", "-f", "--rank", "0", job.run)
        for line in ("line 20\n", "line 60\n"):
            reader.until_out(line)
            lone.login.cut()
        assert reader.wait() == 0
        assert reader.out.splitlines() == numbers(120)

    @pytest.mark.slow
    def test_a_followed_log_survives_seconds_without_any_sshd(self, lone: Laptop) -> None:
        job = lone.launch(NUMBERS.format(count=120, pause=0.1))
        reader = lone.popen("logs", "-f", "--rank", "0", job.run)
        reader.until_out("line 20\n")
        lone.login.stop()
        lone.login.cut()
        reader.until_err("The job is not affected")
        time.sleep(5)
        lone.login.start()
        assert reader.wait(90) == 0
        assert reader.out.splitlines() == numbers(120)

    # ascii-supply-networks/dagster-slurm#187
    def test_a_dead_shared_connection_costs_one_login_however_often_it_is_used(self, lone: Laptop) -> None:
        job = lone.launch("sleep 300")
        before = lone.login.sessions()
        looks = """
            import json, sys
            from gangrun import Cluster
            cluster = Cluster("head")
            for _ in range(8):
                cluster.host.call("describe", root="~", run=sys.argv[1])
            print(json.dumps([cluster.host.calls, cluster.host.logins]))
        """
        assert lone.python(looks, job.run) == [8, 0]
        assert lone.login.sessions() == before
        lone.disconnect()
        assert lone.python(looks, job.run) == [8, 1]
        lone.login.cut()
        assert lone.python(looks, job.run) == [8, 1]
        assert lone.login.sessions() == before + 2

    @pytest.mark.slow
    def test_waiting_survives_a_stopped_controller_and_a_stopped_sshd(self, lone: Laptop) -> None:
        """fls-bioinformatics-core/genomics#245, mlr-org/batchtools#201, DataBiosphere/toil#4853"""
        short, endless = lone.launch("sleep 12; exit 4"), lone.launch("sleep 3000")
        endless.until(protocol.RUNNING)
        waits = [lone.popen("wait", job.run) for job in (short, endless)]
        lone.cluster.stop_controller()
        try:
            time.sleep(2)
            seen = lone.json("queue", "--host", "head", timeout_s=90)
            assert {run["state"] for run in seen} == {protocol.RUNNING}
            time.sleep(18)
            assert [wait.process.poll() for wait in waits] == [None, None], "nothing is concluded from silence"
        finally:
            lone.cluster.start_controller()
        assert waits[0].wait(90) == states.EXIT_FAILED
        lone.login.stop()
        lone.login.cut()
        waits[1].until_err("not affected")
        offline = lone.gangrun("queue", "--host", "head")
        assert offline.returncode == 0 and endless.run in offline.stdout and "seen last" in offline.stderr
        time.sleep(10)
        assert waits[1].process.poll() is None
        lone.login.start()
        assert endless.seen()["state"] == protocol.RUNNING
        endless.scancel()
        assert waits[1].wait(90) == states.EXIT_CANCELLED


class TestQueue:
    def test_it_lists_what_is_in_flight_and_with_a_what_has_ended(self, laptop: Laptop) -> None:
        empty = laptop.gangrun("queue")
        assert empty.returncode == 0 and "no runs in flight" in empty.stdout
        done, running = laptop.launch("true"), laptop.launch("sleep 300", num_nodes=2)
        assert ended(laptop, done.run) == 0
        eventually(lambda: running.seen()["state"] == protocol.RUNNING)
        lines = laptop.gangrun("queue").stdout.splitlines()
        assert lines[0].split() == "RUN JOB HOST STATE NODES ATTEMPT AGE WHAT".split()
        assert [line.split()[:6] for line in lines[1:]] == [[running.run, running.job, "head", "RUNNING", "2", "0"]]
        listed = {run["run"]: run for run in laptop.json("queue", "-a")}
        assert {run: row["state"] for run, row in listed.items()} == {
            done.run: protocol.SUCCEEDED,
            running.run: protocol.RUNNING,
        }
        assert listed[done.run]["exit_code"] == 0 and listed[running.run]["exit_code"] is None

    def test_all_hosts_are_asked(self, laptop: Laptop) -> None:
        if "head-noisy" not in laptop.login.aliases:
            pytest.skip("no such account")
        one = laptop.launch("sleep 300")
        laptop.host = "head-noisy"
        two = laptop.launch("sleep 300")
        for job in (one, two):
            job.until_state_in_slurm("RUNNING")
        rows = {run["run"]: (run["host"], run["state"]) for run in laptop.json("queue")}
        assert rows == {one.run: ("head", "RUNNING"), two.run: ("head-noisy", "RUNNING")}
        assert [run["run"] for run in laptop.json("queue", "--host", "head")] == [one.run]
        assert laptop.gangrun("cancel", "--all").returncode == 0
        assert laptop.json("queue") == []

    def test_watching_goes_on_until_ctrl_c(self, laptop: Laptop) -> None:
        job = laptop.launch("sleep 300")
        watch = laptop.popen("queue", "--watch")
        eventually(lambda: watch.out.count(job.run) >= 2, 20)
        watch.interrupt()
        watch.wait()
        assert watch.err.strip() in ("", "gangrun: interrupted")

    @pytest.mark.slow
    # pytorch/pytorch#76287, meta-pytorch/torchx#479
    def test_progress_is_told_by_phase_and_a_rank_that_goes_on_is_named(self, laptop: Laptop) -> None:
        wait_for = "[ $%s = 0 ] || while [ ! -e %s ]; do sleep 0.1; done"
        job = laptop.launch(
            wait_for % ("SKYPILOT_NODE_RANK", "go-run"),
            num_nodes=2,
            setup=wait_for % ("SKYPILOT_SETUP_NODE_RANK", "go-setup"),
        )
        eventually(lambda: job.seen()["progress"] == "setup 1/2 nodes", 30)
        assert job.seen()["state"] == protocol.SETTING_UP
        laptop.remote("touch", str(job.directory / "work" / "go-setup"))
        eventually(lambda: job.seen()["progress"] == "1/2 ranks done", 30)
        assert "1/2 ranks done" in laptop.gangrun("queue").stdout
        shown = laptop.gangrun("status", job.run)
        assert shown.returncode == states.EXIT_UNFINISHED and "1/2 ranks done" in shown.stdout
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout

    # alphaXiv/OpenResearch#316
    def test_a_waiting_job_is_listed_with_its_reason_and_slurms_estimate_and_explained(self, lone: Laptop) -> None:
        holder = lone.launch("sleep 300", "--time", "1h", "--gpus", "2", num_nodes=2)
        holder.until(protocol.RUNNING)
        waiting = lone.launch("true", "--time", "10m", "--gpus", "1")
        found = eventually(lambda: (run := waiting.seen())["estimate"] and run["reason"] and run, 30)
        assert found["state"] == protocol.PENDING and found["reason"] in ("Resources", "Priority")
        assert re.search(r"starts in \d+m", lone.gangrun("queue").stdout)
        explained = lone.gangrun("explain", waiting.run)
        assert explained.returncode == 0 and "no GPU of partition main is free" in explained.stdout
        assert "Slurm's estimate of its start: " in explained.stdout
        assert lone.json("explain", waiting.run)[0]["state"] == protocol.PENDING

    def test_another_machine_finds_all_runs_again_and_their_results(self, laptop: Laptop) -> None:
        good, bad = laptop.launch("echo kept"), laptop.launch("exit 7")
        running, cancelled = laptop.launch("sleep 300", num_nodes=2), laptop.launch("true", "--sbatch-arg=--hold")
        assert laptop.gangrun("cancel", cancelled.run).returncode == 0
        running.until(protocol.RUNNING)
        assert ended(laptop, good.run) == 0 and ended(laptop, bad.run) == states.EXIT_FAILED
        other = Laptop(laptop.cluster)
        try:
            assert other.json("queue", "-a") == []
            found = {run["run"]: run for run in other.json("queue", "-a", "--adopt", "--host", "head")}
            states_found = {job: found[job.run]["state"] for job in (good, bad, running, cancelled)}
            assert states_found == {
                good: protocol.SUCCEEDED,
                bad: protocol.FAILED,
                running: protocol.RUNNING,
                cancelled: protocol.CANCELLED,
            }
            assert (found[bad.run]["exit_code"], found[running.run]["num_nodes"]) == (7, 2)
            assert found[good.run]["job"] == good.job and found[good.run]["name"] == good.name
            assert other.gangrun("logs", "--rank", "0", good.name).stdout == "kept\n"
            assert other.gangrun("cancel", running.name).returncode == 0
        finally:
            other.close()

    def test_a_hundred_jobs_are_one_remote_call_and_one_squeue(self, lone: Laptop) -> None:
        hundred = submitted_by_hand(lone, 100)
        lone.json("queue", "--adopt", "--host", "head")
        lone.shim("squeue", 'echo "$@" >> $HERE/squeue.log; exec $REAL "$@"')
        look = """
            import json, time
            from gangrun import Cluster
            cluster = Cluster("head")
            time.sleep(1.1)
            cluster.refresh()
            states = sorted({job.run.state for job in cluster.jobs()})
            print(json.dumps([len(cluster.jobs()), states, cluster.host.calls, cluster.host.logins]))
        """
        assert lone.python(look) == [100, [protocol.PENDING], 1, 0]
        log = lone.remote_home / "bin" / "squeue.log"
        assert len(log.read_text().splitlines()) == 1
        waits = [lone.popen("wait", run, "--timeout", "3s") for run in hundred[:3]]
        assert {wait.wait() for wait in waits} == {states.EXIT_UNFINISHED}
        asked = len(log.read_text().splitlines()) - 1
        assert asked <= 6, f"three who wait for 3 s share what they ask; squeue ran {asked} times"


def submitted_by_hand(laptop: Laptop, count: int) -> list[str]:
    """Held jobs of this person as a launch leaves them, in one go."""
    runs = ["many-%08d" % i for i in range(count)]
    meta = {"num_nodes": 1, "submitted": time.time()}
    metas = [json.dumps({**meta, "run": run, "name": run}) for run in runs]
    text = f"""
        set -e; cd; mkdir -p {protocol.HOME_DIRECTORY}/runs; cd {protocol.HOME_DIRECTORY}/runs
        while read -r run meta; do
            mkdir $run; echo "$meta" > $run/meta.json
            sbatch --parsable --hold --job-name=$run --output=/dev/null --wrap=true > $run/job
        done
    """
    laptop.remote("sh", "-c", text, input="".join(f"{run} {meta}\n" for run, meta in zip(runs, metas)))
    return runs


class TestEndings:
    """Moments at which Slurm's word is not the run's."""

    # oumi-ai/oumi#2662, michellab/a3fe#14, ArjunaCluster/ArjunaUsers#7, aws/aws-parallelcluster#1110
    def test_a_run_whose_node_is_still_cleaning_up_has_ended(self, own_cluster: BootCluster, shared_dir: Path) -> None:
        epilog = script(shared_dir / "epilog", "[ -e %s/over ] || sleep 30" % shared_dir)
        cluster = own_cluster(nodes=1, extra_conf=f"Epilog={epilog}")
        laptop = Laptop(cluster)
        try:
            job = laptop.launch("echo done")
            waited = laptop.json("wait", job.run, timeout_s=15)
            assert cluster.job_state(int(job.job)) == "COMPLETING"
            assert waited[0]["state"] == protocol.SUCCEEDED
            assert waited[0]["detail"] in ("completing", "RUNNING")  # the record may be quicker than the controller
            assert laptop.gangrun("logs", "--rank", "0", job.run).stdout == "done\n"
            assert "SUCCEEDED" in laptop.gangrun("cancel", job.run).stdout
        finally:
            laptop.close()

    # burrmill/burrmill#15
    def test_a_run_that_slurm_could_not_start_and_holds_says_so_and_what_lets_it_go(
        self, own_cluster: BootCluster, shared_dir: Path
    ) -> None:
        cluster = own_cluster(nodes=1, extra_conf=f"Prolog={script(shared_dir / 'prolog', 'exit 1')}")
        laptop = Laptop(cluster)
        try:
            job = laptop.launch("true")
            found = eventually(lambda: (run := job.seen())["reason"].startswith("held") and run, 20)
            assert found["state"] == protocol.PENDING and f"scontrol release {job.job}" in found["reason"]
            assert "held" in laptop.gangrun("queue").stdout and "held" in laptop.gangrun("explain", job.run).stdout
            assert "CANCELLED" in laptop.gangrun("cancel", job.run).stdout
        finally:
            laptop.close()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    path.parent.chmod(0o755)
    return path


class TestWait:
    def test_it_returns_when_all_have_ended_with_the_worst_code(self, laptop: Laptop) -> None:
        good, bad = laptop.launch("sleep 1"), laptop.launch("exit 3")
        waited = laptop.gangrun("wait", good.run, bad.run)
        assert waited.returncode == states.EXIT_FAILED
        assert {line.split()[0]: line.split()[3] for line in waited.stdout.splitlines()} == {
            good.run: "SUCCEEDED",
            bad.run: "FAILED",
        }
        assert "exit code 3" in waited.stdout

    def test_with_any_the_first_end_is_told(self, laptop: Laptop) -> None:
        slow, quick = laptop.launch("sleep 300"), laptop.launch("true")
        waited = laptop.json("wait", "--any", slow.run, quick.run)
        assert [(run["run"], run["state"]) for run in waited] == [(quick.run, protocol.SUCCEEDED)]

    def test_a_timeout_has_a_code_of_its_own_and_says_that_nothing_has_changed(self, laptop: Laptop) -> None:
        job = laptop.launch("sleep 300")
        begun = time.monotonic()
        waited = laptop.gangrun("wait", job.run, "--timeout", "2s")
        assert waited.returncode == states.EXIT_UNFINISHED and "nothing has changed" in waited.stderr
        assert f"{job.run} is" in waited.stderr and time.monotonic() - begun < 10

    def test_the_command_runs_once_with_the_verdict_though_several_wait(self, laptop: Laptop) -> None:
        job = laptop.launch("while [ ! -e go ]; do sleep 0.1; done; exit 9")
        told = laptop.home / "told"
        words = "$GANGRUN_RUN $GANGRUN_NAME $GANGRUN_JOB $GANGRUN_HOST $GANGRUN_STATE $GANGRUN_EXIT_CODE"
        command = f'echo "{words}" >> {told}'
        killed = laptop.popen("wait", job.run, "--then", command)
        time.sleep(1.5)
        killed.kill()
        waits = [laptop.popen("wait", job.run, "--then", command) for _ in range(3)]
        laptop.remote("touch", str(job.directory / "work" / "go"))
        assert [wait.wait() for wait in waits] == [states.EXIT_FAILED] * 3
        again = laptop.gangrun("wait", job.run, "--then", command)
        assert again.returncode == states.EXIT_FAILED and "has run before" in again.stderr
        assert told.read_text() == f"{job.run} {job.name} {job.job} head FAILED 9\n"

    def test_a_waiter_killed_before_its_command_began_is_replaced(self, laptop: Laptop) -> None:
        """It had claimed the command and died; nobody knows of a second one that lives."""
        job = laptop.launch("true")
        assert ended(laptop, job.run) == 0
        told = laptop.home / "told"
        records = Records(laptop.home / ".local/state/gangrun/runs.db")
        dead = laptop.start("true")
        dead.wait()
        assert records.claim_then(job.run, f"echo x >> {told}")
        records._database.execute("UPDATE thens SET pid = ?", (2**22 - 1,))  # above pid_max here: nobody
        records.close()
        assert laptop.gangrun("wait", job.run, "--then", f"echo x >> {told}").returncode == 0
        assert told.read_text() == "x\n"

    def test_a_job_that_has_been_over_for_long_is_told_at_once(self, laptop: Laptop) -> None:
        job = laptop.launch("true")
        assert ended(laptop, job.run) == 0
        laptop.disconnect()
        assert laptop.gangrun("wait", job.name).returncode == 0
        # Other tests log in to the same cluster: what counts is that this laptop has opened no connection.
        assert not laptop.masters(), "what is known needs no connection"


class TestCancel:
    # OSC/ondemand#2404, radical-cybertools/radical.saga#236
    def test_a_pending_job_is_cancelled_and_again_and_after_the_end(self, laptop: Laptop) -> None:
        job = laptop.launch("echo ran", "--sbatch-arg=--hold")
        waiter = laptop.popen("wait", job.run)
        for _ in range(2):
            cancelled = laptop.gangrun("cancel", job.run)
            assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout
        assert waiter.wait() == states.EXIT_CANCELLED
        done = laptop.launch("true")
        assert ended(laptop, done.run) == 0
        late = laptop.gangrun("cancel", done.run)
        assert late.returncode == 0 and "SUCCEEDED" in late.stdout, "it had ended before"

    def test_a_running_program_gets_one_term_and_its_time(self, laptop: Laptop) -> None:
        """Its work takes 6 s to save, and this site's KillWait is 2 s."""
        save = 'time.sleep(6); print("saved"); sys.exit(0)'
        job = laptop.launch(TRAP.format(on_term=save), "--grace", "20s", num_nodes=2)
        job.until_output("ready")
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout
        for rank in (0, 1):
            log = laptop.gangrun("logs", "--rank", str(rank), job.run)
            assert log.stdout == "ready\ngot TERM\nsaved\n"
            assert log.returncode == states.EXIT_CANCELLED, "its 0 came after the cancel"

    def test_a_program_that_ignores_term_ends_by_force_when_its_grace_is_over(self, laptop: Laptop) -> None:
        job = laptop.launch(TRAP.format(on_term="pass"), "--grace", "1s")
        job.until_output("ready")
        begun = time.monotonic()
        cancelled = laptop.gangrun("cancel", job.run)
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout
        assert time.monotonic() - begun < 12
        assert not job.processes()

    def test_a_shorter_grace_can_be_given_with_the_cancel(self, lone: Laptop) -> None:
        """And than the site's KillWait, which is half a minute there as almost everywhere."""
        job = lone.launch(TRAP.format(on_term="pass"), "--grace", "10m")
        job.until_output("ready")
        begun = time.monotonic()
        cancelled = lone.gangrun("cancel", job.run, "--grace", "2s")
        assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout
        assert 2 < time.monotonic() - begun < 15
        assert job.record()["state"] == protocol.CANCELLED, "the driver could say so itself"
        assert lone.gangrun("logs", "--rank", "0", job.run).stdout.count("got TERM") == 1

    def test_a_cancel_by_another_tool_ends_the_waiting(self, laptop: Laptop) -> None:
        job = laptop.launch("echo ready; sleep 300", num_nodes=2)
        waiter = laptop.popen("wait", job.run)
        job.until_output("ready")
        job.scancel()
        assert waiter.wait() == states.EXIT_CANCELLED
        assert "CANCELLED" in waiter.out

    @pytest.mark.slow
    # fls-bioinformatics-core/auto_process_ngs#1182
    def test_a_controller_that_is_away_gets_it_later(self, lone: Laptop) -> None:
        job = lone.launch("echo ready; sleep 3000")
        job.until_output("ready")
        lone.cluster.stop_controller()
        try:
            cancel = lone.popen("cancel", job.run)
            cancel.until_err("asking again", 100)
        finally:
            lone.cluster.start_controller()
        assert cancel.wait(120) == 0
        assert "CANCELLED" in cancel.out and not job.processes()

    # ExaWorks/psij-python#470
    def test_a_zero_after_the_cancel_is_no_success(self, laptop: Laptop) -> None:
        job = laptop.launch(TRAP.format(on_term="sys.exit(0)"))
        job.until_output("ready")
        assert "CANCELLED" in laptop.gangrun("cancel", job.run).stdout
        assert laptop.gangrun("wait", job.run).returncode == states.EXIT_CANCELLED

    def test_all_are_cancelled_at_once(self, laptop: Laptop) -> None:
        jobs = [laptop.launch("echo ready; sleep 300"), laptop.launch("true", "--sbatch-arg=--hold")]
        jobs[0].until_output("ready")
        cancelled = laptop.json("cancel", "--all")
        assert {run["run"]: run["state"] for run in cancelled} == {job.run: protocol.CANCELLED for job in jobs}
        nothing = laptop.gangrun("cancel", "--all")
        assert nothing.returncode == 0 and "Traceback" not in nothing.stderr

    def test_a_run_that_was_cancelled_before_it_could_start_never_runs(self, laptop: Laptop) -> None:
        """scancel gets lost, as when the controller is away for a moment; the job sees the mark and leaves."""
        job = laptop.launch("touch it-ran", "--sbatch-arg=--hold")
        mark = """
            import json, sys
            from gangrun import Cluster
            lost = {"run": sys.argv[1], "job": "0", "cluster": None, "has_driver": False, "grace_s": 30}
            Cluster("head").host.call("cancel", root="~", runs=[lost], how="hard")
            print(json.dumps(1))
        """
        laptop.python(mark, job.run)
        laptop.cluster.run("ctl", ["scontrol", "release", job.job], cwd="/")
        laptop.cluster.wait_state(int(job.job), "FAILED", "COMPLETED", "CANCELLED")
        assert not (job.directory / "work" / "it-ran").exists() and not job.status_path.exists()

    def test_two_who_cancel_agree(self, laptop: Laptop) -> None:
        job = laptop.launch(TRAP.format(on_term="time.sleep(1); sys.exit(0)"))
        job.until_output("ready")
        cancels = [laptop.popen("cancel", job.run) for _ in range(2)]
        assert [cancel.wait() for cancel in cancels] == [0, 0]
        assert all("CANCELLED" in cancel.out for cancel in cancels)
        assert laptop.gangrun("logs", "--rank", "0", job.run).stdout == "ready\ngot TERM\n"


class TestOtherSlurms:
    """squeue and sacct that cannot do what ours can, or lie for a moment."""

    # skypilot-org/skypilot#8907, #10307
    def test_options_that_an_old_squeue_does_not_know_are_not_needed(self, lone: Laptop) -> None:
        lone.shim(
            "squeue",
            """
            for word; do case $word in --json*|--me|--only-job-state|--Format*|--yaml*)
                echo "squeue: unrecognized option '$word'" >&2; exit 1;; esac; done
            exec $REAL "$@"
            """,
        )
        job = lone.launch("sleep 0.5")
        assert ended(lone, job.run) == 0

    # BSC-ES/autosubmit#657
    def test_a_sacct_that_prints_help_instead_of_rows_proves_nothing(self, lone: Laptop) -> None:
        lone.shim(
            "sacct", "echo '+----------+'; echo '| use sacct -j ID, one at a time |'; echo '+----------+'; exit 0"
        )
        good, running = lone.launch("sleep 0.5"), lone.launch("sleep 300")
        assert ended(lone, good.run) == 0
        assert running.seen()["state"] in (protocol.PENDING, protocol.RUNNING)

    def test_a_squeue_that_fails_once_ends_nothing(self, lone: Laptop) -> None:
        job = lone.launch("sleep 300")
        job.until(protocol.RUNNING)
        lone.shim(
            "squeue",
            """
            [ -e $HERE/failed ] && exec $REAL "$@"
            touch $HERE/failed; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1
            """,
        )
        waiter = lone.popen("wait", job.run)
        eventually((lone.remote_home / "bin" / "failed").exists, 20)
        time.sleep(2)
        assert waiter.process.poll() is None and job.seen()["state"] == protocol.RUNNING

    # skypilot-org/skypilot#10458, nextflow-io/nextflow#1045
    def test_a_squeue_that_misses_a_live_job_ends_nothing(self, lone: Laptop) -> None:
        pending, running = lone.launch("true", "--sbatch-arg=--hold"), lone.launch("sleep 300")
        running.until(protocol.RUNNING)
        lone.shim("squeue", '[ -e $HERE/mended ] || exit 0; exec $REAL "$@"')
        for _ in range(3):
            assert {job.seen()["is_final"] for job in (pending, running)} == {False}
            time.sleep(1.1)
        lone.remote("touch", str(lone.remote_home / "bin" / "mended"))
        eventually(lambda: pending.seen()["state"] == protocol.PENDING, 20)
        assert running.seen()["state"] == protocol.RUNNING

    # Parsl/parsl#2293, llnl/maestrowf#431
    def test_variables_that_change_slurms_output_have_no_effect(self, lone: Laptop) -> None:
        (lone.remote_home / ".bashrc").write_text(
            "export SQUEUE_FORMAT=%i SACCT_FORMAT=jobid SLURM_TIME_FORMAT=relative SQUEUE_STATES=PENDING"
            " SQUEUE_USERS=root SQUEUE_PARTITION=none SQUEUE_SORT=i SLURM_CLUSTERS=other SQUEUE_ALL=1 SQUEUE_ARRAY=1\n"
        )
        try:
            job, running = lone.launch("exit 3"), lone.launch("sleep 300")
            running.until(protocol.RUNNING)
            assert ended(lone, job.run) == states.EXIT_FAILED
            assert running.seen()["state"] == protocol.RUNNING
        finally:
            (lone.remote_home / ".bashrc").unlink()

    # MFlowCode/MFC#1311, reframe-hpc/reframe#3608: sacct keeps the attempt that was preempted
    def test_the_latest_attempt_decides(self, lone: Laptop) -> None:
        lone.shim(
            "sacct",
            """
            for word; do case $word in --jobs=*) job=${word#--jobs=};; esac; done
            now=$(date +%s)
            name=$(cat $HERE/run)
            echo "$job|PREEMPTED|0:0|$((now-100))|$((now-90))|$((now-50))|None|$name"
            echo "$job|COMPLETED|0:0|$((now-50))|$((now-40))|$((now-10))|None|$name"
            """,
        )
        lone.shim("squeue", "exit 0")  # it has forgotten the job
        job = lone.launch("echo fine", "--force")
        (lone.remote_home / "bin" / "run").write_text(job.run)
        assert ended(lone, job.run) == 0

    # desihub/desispec#2744, martius-lab/cluster_utils#87: Slurm says COMPLETED though the step failed
    def test_the_runs_own_record_wins_over_slurms_word(self, lone: Laptop) -> None:
        lone.shim(
            "sacct",
            "for word; do case $word in --jobs=*) job=${word#--jobs=};; esac; done\n"
            'echo "$job|COMPLETED|0:0|1|2|3|None|$(cat $HERE/run)"',
        )
        lone.shim("squeue", "exit 0")
        job = lone.launch("exit 1", "--force")
        (lone.remote_home / "bin" / "run").write_text(job.run)
        waited = lone.json("wait", job.run)
        assert (waited[0]["state"], waited[0]["exit_code"]) == (protocol.FAILED, 1)


class TestExplain:
    def test_a_failed_run_is_explained_by_the_rank_that_failed_first_and_its_last_words(self, laptop: Laptop) -> None:
        job = laptop.launch(
            "[ $SKYPILOT_NODE_RANK = 1 ] && { echo 'the disk is full' >&2; exit 4; }; sleep 300", num_nodes=2
        )
        assert ended(laptop, job.run) == states.EXIT_FAILED
        explained = laptop.gangrun("explain", job.run)
        assert explained.returncode == 0
        assert "rank 1" in explained.stdout and "the disk is full" in explained.stdout and "4" in explained.stdout
        status = laptop.gangrun("status", job.run)
        assert status.returncode == states.EXIT_FAILED and re.search("rank 1 on n.: failed, exit code 4", status.stdout)
        record = laptop.json("status", job.run)[0]
        assert record["record"]["first_failure"]["rank"] == 1 and record["state"] == protocol.FAILED


class TestRequeue:
    @pytest.mark.slow
    # wlandau/crew.cluster#19
    def test_a_requeue_is_followed_and_the_first_attempts_lines_stay(self, laptop: Laptop) -> None:
        job = laptop.launch("echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 1 ] || sleep 300", num_nodes=2)
        reader, waiter = laptop.popen("logs", "-f", job.run), laptop.popen("wait", job.run)
        reader.until_out("attempt 0")
        laptop.cluster.run("ctl", ["scontrol", "requeue", job.job], cwd="/")
        assert reader.wait(120) == 0 and waiter.wait(60) == 0
        text = without_colour(reader.out)
        assert text.count("attempt 0") == text.count("attempt 1") == 2
        assert text.index("attempt 0") < text.index("attempt 1") < text.index("SUCCEEDED")
        assert job.seen()["attempt"] == 1

    @pytest.mark.slow
    def test_a_requeue_by_hand_after_the_end_is_another_attempt(self, laptop: Laptop) -> None:
        job = laptop.launch("[ $GANGRUN_ATTEMPT = 1 ] || exit 3; echo better")
        job.until_state_in_slurm("FAILED")
        laptop.cluster.run("ctl", ["scontrol", "requeue", job.job], cwd="/")
        first = job.seen()
        assert (first["state"], first["attempt"]) == (protocol.PENDING, 1), "the old record is not of this attempt"
        assert laptop.gangrun("wait", job.run).returncode == 0
        assert laptop.gangrun("logs", "--rank", "0", job.run).stdout.splitlines()[-1] == "better"

    @pytest.mark.slow
    def test_a_preempted_run_goes_on_waiting_and_succeeds_in_the_end(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(
            nodes=1,
            partitions="PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE\n"
            "PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF",
            extra_conf="PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE",
        )
        laptop = Laptop(cluster)
        try:
            low = laptop.launch("echo attempt $GANGRUN_ATTEMPT; [ $GANGRUN_ATTEMPT = 1 ] || sleep 300")
            low.until_output("attempt 0")
            waiter = laptop.popen("wait", low.run)
            high = laptop.launch("sleep 8", "--partition", "high", "--sbatch-arg=--exclusive")
            high.until(protocol.RUNNING, timeout_s=60)
            eventually(lambda: low.seen()["state"] == protocol.PENDING)
            assert waiter.wait(120) == 0
            assert low.seen()["attempt"] == 1
        finally:
            laptop.close()


@pytest.mark.slow
class TestEndsWithoutARecord:
    """Drivers that could not say how it ended: the client finds out, with accounting and without."""

    @pytest.mark.parametrize("accounting", [False, True], ids=["no-accounting", "accounting"])
    def test_each_has_its_cause(self, own_cluster: BootCluster, accounting: bool) -> None:
        cluster = own_cluster(nodes=3, accounting=accounting, constrain=("ram",), slurmd_timeout_s=10)
        laptop = Laptop(cluster)
        try:
            limited = laptop.launch("sleep 3000", "--time", "60s")
            killed = laptop.launch("echo ready; sleep 3000", num_nodes=2)
            eater = "x = bytearray(400 << 20); print(len(x))"
            hungry = laptop.launch(f"python3 -c '{eater}'", "--sbatch-arg=--mem=200M")
            lost = laptop.launch(
                "echo ready; sleep 3000", "--no-requeue", "--sbatch-arg=--nodelist=n3", "--sbatch-arg=--exclusive"
            )
            for job in (killed, lost):
                job.until_output("ready")
            kill_driver(killed)
            cluster.power_off("n3")
            found = {job: one(laptop.json("wait", job.run, timeout_s=400)) for job in (killed, lost, hungry, limited)}
            assert found[killed]["state"] == protocol.FAILED_DRIVER and "killed" in found[killed]["reason"]
            assert found[lost]["state"] == protocol.FAILED and "node" in found[lost]["reason"]
            assert found[limited]["state"] == protocol.FAILED and "time limit" in found[limited]["reason"]
            assert found[hungry]["state"] == protocol.FAILED
            assert "memory" in laptop.gangrun("explain", hungry.run).stdout + found[hungry]["reason"]
        finally:
            laptop.close()

    # nipy/nipype#1853, ExaWorks/psij-python#486, MikeDacre/fyrd#16, princeton-ddss/blackfish#484
    def test_what_slurm_has_forgotten_is_known_by_the_runs_own_record(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1, min_job_age_s=2, extra_conf="FirstJobId=10\nMaxJobId=13")
        laptop = Laptop(cluster)
        try:
            good, bad, killed = laptop.launch("true"), laptop.launch("exit 5"), laptop.launch("echo ready; sleep 3000")
            killed.until_output("ready")
            kill_driver(killed)
            eventually(lambda: not known(cluster, good.job) and not known(cluster, killed.job), 150)
            stranger = [
                laptop.remote("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1000").stdout.strip()
                for _ in range(3)
            ]
            assert {good.job, killed.job} & set(stranger), f"no id was used again: {stranger}"
            assert laptop.gangrun("wait", good.run).returncode == 0
            assert one(laptop.json("wait", bad.run))["exit_code"] == 5
            assert one(laptop.json("wait", killed.run, timeout_s=500))["state"] in (protocol.FAILED_DRIVER, states.LOST)
        finally:
            laptop.close()

    def test_a_database_that_is_away_changes_nothing(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1, accounting=True)
        laptop = Laptop(cluster)
        try:
            cluster.stop_database()
            good, bad, running = laptop.launch("true"), laptop.launch("exit 5"), laptop.launch("sleep 300")
            assert laptop.gangrun("wait", good.run).returncode == 0
            assert laptop.gangrun("wait", bad.run).returncode == states.EXIT_FAILED
            assert running.seen()["state"] == protocol.RUNNING
            cluster.start_database()
            running.scancel()
            assert laptop.gangrun("wait", running.run).returncode == states.EXIT_CANCELLED
        finally:
            laptop.close()


def one(runs: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(runs) == 1
    return runs[0]


def kill_driver(job: Launched) -> None:
    """With SIGKILL, on whichever node it is."""
    cluster, path = job.laptop.cluster, str(job.directory / protocol.DRIVER_NAME)
    found = [one.pid for node in cluster.nodes for one in cluster.processes(node) if path in one.cmdline.split()]
    assert len(found) == 1, found
    os.kill(found[0], signal.SIGKILL)


def known(cluster: Cluster, job: str) -> bool:
    return cluster.run("ctl", ["scontrol", "show", "job", job], cwd="/", check=False).returncode == 0
