"""RayCodeGen's drivers on a real Ray cluster of three nodes: what a user sees, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen import Bundle, RayCodeGen, Resources
from executor import protocol
from tests.bench import eventually
from tests.miniray import HEAD, RayBed
from tests.miniray.fixtures import BootRay
from tests.ray_bench import RayBench
from tests.test_ray_codegen import GOLDEN, RAY_FULL

TRAPS = 'trap "sleep 0.5; echo saved > $SAVED/$SKYPILOT_NODE_RANK; exit 0" TERM; echo ready; sleep 300 & wait'


@pytest.fixture
def bench(ray_bed: RayBed, shared_dir: Path) -> Iterator[RayBench]:
    """Runs drivers on the session's Ray cluster."""
    bench = RayBench(ray_bed, shared_dir)
    yield bench
    bench.close()


def addresses(bench: RayBench, *nodes: str) -> tuple[str, ...]:
    return tuple(bench.bed.addresses[node] for node in nodes)


# --- setup and run


def test_setup_runs_on_every_node_and_then_the_script_as_on_slurm(bench: RayBench) -> None:
    env = {"GREETING": 'it\'s "two"\n lines; $HOME', "EMPTY": ""}
    run = """
        echo "rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES:" $SKYPILOT_NODE_IPS "gpus $SKYPILOT_NUM_GPUS_PER_NODE"
        echo "job $SKYPILOT_INTERNAL_JOB_ID attempt $GANGRUN_ATTEMPT visible $CUDA_VISIBLE_DEVICES nice $(nice)"
        echo "<$GREETING><${EMPTY-unset}>"; env | grep -E '^(RAY_RAYLET_PID|RAY_JOB_ID|OMP_NUM_THREADS)='
        printf 'no UTF-8: \\xff\\xfe\\n'; echo to stderr >&2; printf 'no newline'
    """
    setup = """
        echo "setup $SKYPILOT_SETUP_NODE_RANK of $SKYPILOT_NUM_NODES in $PWD: $MODE"
        sleep 0.2; touch set.$SKYPILOT_SETUP_NODE_RANK
    """
    ips = addresses(bench, "n1", "n3", "n2")
    resources = Resources(cpus=2, gpus=2)
    done = bench.drive(
        "ls set.0 set.1 set.2 >/dev/null || exit 9\n" + run, setup, cluster_ips=ips, resources=resources,
        env_vars=env, setup_env_vars={"MODE": "fast"},
    )  # fmt: skip
    assert (done.code, done.codes, done.states[:3]) == (0, [0, 0, 0], ["PENDING", "SETTING_UP", "RUNNING"]), done.output
    assert done.status["nodes"] == list(ips) and done.status["engine"] == "ray" and done.status["exit_code"] == 0
    for rank, name in enumerate(("0-head.log", "1-worker1.log", "2-worker2.log")):
        lines = (done.directory / "logs" / name).read_bytes().split(b"\n")
        assert lines == [
            f"rank {rank} of 3: {' '.join(ips)} gpus 2".encode(),
            f"job job attempt 0 visible 0,1 nice {os.nice(0)}".encode(),
            b"<it's \"two\"", b" lines; $HOME><>", b"no UTF-8: \xff\xfe", b"to stderr", b"no newline",
        ]  # fmt: skip
    assert done.log("setup-worker1.log") == f"setup 1 of 3 in {bench.directory}: fast\n"
    assert re.search(rf"^\(worker1, rank=1, pid=\d+, ip={ips[1]}\) rank 1 of 3", done.output, re.MULTILINE)
    assert re.search(r"^\(head, rank=0, pid=\d+\) no newline\n", done.output, re.MULTILINE)
    assert re.search(rf"^\(setup pid=\d+, ip={ips[2]}\) setup 2 of 3", done.output, re.MULTILINE)
    assert {event["rank"] for event in done.events if event["event"] == protocol.EVENT_RANK_STARTED} == {0, 1, 2}


def test_the_golden_driver_runs_and_its_secrets_go_with_it(bench: RayBench) -> None:
    driver = Bundle(RAY_FULL, (GOLDEN / "ray.py").read_text()).write(str(bench.directory / "driver-7"))
    done = bench.run(RAY_FULL, driver).wait()
    assert done.code == 0 and done.log("2-worker2.log") == 'rank 2 says it\'s "fine"\n', done.output
    assert done.log("setup-worker1.log") == "set up 1\n" and not Path(driver).with_name(protocol.SECRETS_NAME).exists()


def test_the_four_calls_reach_the_cluster_and_an_empty_list_of_addresses_is_all_of_it(bench: RayBench) -> None:
    gen = RayCodeGen()
    gen.add_prologue(5)
    gen.add_setup(2, {"CPU": 1}, [], {}, str(bench.directory / "logs"), "echo set")
    gen.add_task(2, 'echo "<${CUDA_VISIBLE_DEVICES-all}>"', None, {"CPU": 1}, str(bench.directory / "logs"), {})
    gen.add_epilogue()
    driver = gen.bundle().write(str(bench.directory / "driver-5"))
    done = bench.run(gen.job(), driver).wait()
    assert done.code == 0 and done.status["num_nodes"] == 2, done.output
    assert all((done.directory / "logs" / f"setup-{name}.log").exists() for name in ("head", "worker1", "worker2"))
    ranks = [rank["address"] for rank in done.status["ranks"]]
    every = addresses(bench, *bench.bed.nodes)
    assert len(ranks) == 2 and ranks == [address for address in every if address in ranks]
    assert done.output.count(") <>\n") == 2, "who asks for no GPU sees none"


def test_a_script_can_use_ray_itself(bench: RayBench) -> None:
    count = 'print(sum(node["Alive"] for node in ray.nodes()), "alive")'
    python = f'import ray; ray.init(address="auto", log_to_driver=False); {count}'
    done = bench.drive(f"{sys.executable} -W ignore -c '{python}' 2>/dev/null", nodes=1)
    assert done.code == 0 and re.search(r"^3 alive$", done.log(done.status["ranks"][0]["log"])), done.output


def test_setup_alone_holds_nothing_and_runs_where_the_cluster_is_full(bench: RayBench) -> None:
    full = bench.start("sleep 300", job_id="full", resources=Resources(cpus=4))
    full.wait_running()
    done = bench.drive(None, "hostname", job_id="setup", num_nodes=3)
    full.process.send_signal(signal.SIGTERM)
    assert done.code == 0 and done.log("setup-worker2.log").strip(), done.output
    assert full.wait().status["state"] == protocol.CANCELLED


def test_what_an_early_rank_leaves_running_lives_until_the_last_is_done(bench: RayBench) -> None:
    (bench.directory / "hello").touch()
    script = """
        if [ $SKYPILOT_NODE_RANK = 0 ]; then python3 -m http.server 18765 & exit 0; fi
        sleep 1; exec python3 -c "
import os, urllib.request as r
print(r.urlopen('http://%s:18765/' % os.environ['SKYPILOT_NODE_IPS'].split()[0]).status)"
    """
    done = bench.drive(script, cluster_ips=addresses(bench, "n1", "n2", "n3"), ports=(6379,))
    assert done.code == 0 and done.log("2-worker2.log") == "200\n", done.output
    assert done.output.count("warning: port 6379 of task is taken on n1 already") == 1, "Ray's own"
    assert not bench.left_behind("http.server 18765")


# --- who is which rank


@pytest.mark.slow
def test_ranks_are_the_same_in_five_runs_whoever_joined_first(bench: RayBench) -> None:
    ips = addresses(bench, "n3", "n1", "n2")
    for attempt in range(5):
        if attempt in (2, 4):
            bench.bed.kill_raylet("n2" if attempt == 2 else "n3")
            bench.bed.heal()
        done = bench.drive("echo $SKYPILOT_NODE_RANK $SKYPILOT_NODE_IPS; hostname", cluster_ips=ips)
        assert [rank["address"] for rank in done.status["ranks"]] == list(ips), done.output
        assert [rank["host"] for rank in done.status["ranks"]] == ["n3", "n1", "n2"]
        assert done.status["attempt"] == attempt


@pytest.mark.slow
def test_a_node_may_have_several_addresses_and_one_that_is_not_listed_is_named(bench: RayBench) -> None:
    ips = addresses(bench, "n1", "n2", "n3")
    second = "10.99.0.2"
    bench.bed.run("n2", ["ip", "address", "replace", f"{second}/32", "dev", "eth0"])
    done = bench.drive("echo $SKYPILOT_NODE_IPS", cluster_ips=(ips[0], second, ips[2]))
    assert done.code == 0 and [rank["address"] for rank in done.status["ranks"]] == [ips[0], second, ips[2]], (
        done.output
    )
    done = bench.drive("echo never", job_id="stranger", cluster_ips=(ips[0], "10.9.9.9", ips[2]))
    assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER) and "never" not in done.output
    known = f"{ips[0]}, 10.9.9.9, {ips[2]}"
    assert f"Ray chose the node {ips[1]} (n2), which is not in cluster_ips: {known}\n" in done.output
    assert bench.is_free()


# --- failures


def test_the_first_failing_rank_ends_the_gang_and_each_gets_its_grace(bench: RayBench) -> None:
    fails = '[ $SKYPILOT_NODE_RANK = 1 ] && { sleep 1; echo "loss is NaN"; exit 7; }'
    script = f"{fails}; export SAVED={bench.directory}; {TRAPS}"
    done = bench.drive(script)
    assert (done.code, done.status["state"], done.codes) == (7, protocol.FAILED, [0, 7, 0])
    assert done.status["first_failure"]["rank"] == 1 and done.status["ranks"][2]["state"] == protocol.RANK_STOPPED
    assert "rank 1 on worker1 failed first (exit code 7)" in done.output and "    | loss is NaN" in done.output
    assert (bench.directory / "0").exists() and (bench.directory / "2").exists()
    assert bench.is_free()


@pytest.mark.parametrize(
    "run, setup, state",
    [
        ("[ $SKYPILOT_NODE_RANK = 2 ] && kill -9 $$; sleep 300", None, "FAILED"),
        ("echo never", "[ $SKYPILOT_SETUP_NODE_RANK = 2 ] && exit 137; sleep 300", "FAILED_SETUP"),
    ],
    ids=["killed", "setup"],
)
def test_137_is_a_failure_like_any_other(bench: RayBench, run: str, setup: str | None, state: str) -> None:
    done = bench.drive(run, setup, grace_s=1.0)
    assert (done.code, done.status["state"], done.codes) == (137, state, [143, 143, 137]), done.output
    assert done.status["first_failure"]["rank"] == 2 and "never" not in done.output


def test_a_raylet_that_dies_ends_the_job_soon_and_is_named(bench: RayBench) -> None:
    marker = "sleep 4711"
    running = bench.start(marker, grace_s=1.0, cluster_ips=addresses(bench, "n1", "n2", "n3"))
    running.wait_running()
    begun = time.monotonic()
    bench.bed.kill_raylet("n3", wait=False)
    done = running.wait()
    assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER) and time.monotonic() - begun < 30
    lost = done.status["ranks"][2]
    assert (lost["state"], lost["node"]) == (protocol.RANK_LOST, "worker2")
    assert re.search(r"gangrun: rank 2 on n3 \(10\.\S+\) was lost: .+\n", done.output), done.output
    eventually(lambda: not bench.left_behind(marker), 20, "end of the scripts")


def test_a_relay_or_a_rank_that_is_killed_leaves_no_script(bench: RayBench) -> None:
    script = f"export SAVED={bench.directory}; {TRAPS}"
    for victim, words in (("ray::Relay", "was lost:"), ("ray-rank", "was lost: the rank's process was killed")):
        running = bench.start(script, job_id=victim.replace(":", "-"), cluster_ips=addresses(bench, "n1", "n2", "n3"))
        running.wait_running()
        running.wait_text("rank=1")
        for process in bench.bed.processes("n2"):
            if victim in process.cmdline:
                os.kill(process.pid, signal.SIGKILL)
        done = running.wait()
        assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER), done.output
        assert f"rank 1 on n2 ({addresses(bench, 'n2')[0]}) {words}" in done.output
        eventually(bench.is_free, 20)
        assert (bench.directory / "0").exists(), "the others have their grace"
    assert (bench.directory / "1").exists(), "a script whose relay was killed has its grace"


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_given_up(bench: RayBench) -> None:
    running = bench.start("sleep 4713", grace_s=0.5, liveness_timeout_s=6.0, nodes=2)
    running.wait_running(2)
    ranks = [
        process for node in bench.bed.nodes for process in bench.bed.processes(node) if "ray-rank" in process.cmdline
    ]
    os.kill(ranks[0].pid, signal.SIGSTOP)
    try:
        done = running.wait(40)
    finally:
        os.kill(ranks[0].pid, signal.SIGCONT)
    assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER)
    assert re.search(r"rank \d on n\d \(\S+\) was lost: it has not been heard of for \d s\n", done.output), done.output
    eventually(lambda: not bench.left_behind("sleep 4713"), 10)


def test_a_driver_killed_with_9_leaves_nothing_and_the_next_is_one_more_attempt(bench: RayBench) -> None:
    script = f"export SAVED={bench.directory}; {TRAPS}"
    running = bench.start(script, resources=Resources(cpus=4))
    running.wait_running()
    twin = bench.start(script)
    assert twin.process.wait(30) == 125 and "another driver of this job is running" in twin.text
    bench.bed.run(HEAD, ["kill", "-9", str(running.status()["driver"]["pid"])])
    begun = time.monotonic()
    done = bench.drive("echo again $GANGRUN_ATTEMPT", resources=Resources(cpus=4))
    assert done.code == 0 and done.log("0-head.log").endswith("again 1\n"), done.output
    assert time.monotonic() - begun < 30 and done.status["attempt"] == 1
    assert {path.name for path in bench.directory.glob("[012]")} == {"0", "1", "2"}, "all had their grace"
    assert protocol.EVENT_DRIVER_LOST in [event["event"] for event in done.events]
    eventually(bench.is_free, 20)


# --- waiting


def test_two_jobs_queue_for_one_cluster_and_the_second_says_what_for(bench: RayBench) -> None:
    resources = Resources(cpus=3, gpus=1)
    first = bench.start(
        "touch $PWD/began; until [ -e $PWD/go ]; do sleep 0.1; done", job_id="first", resources=resources
    )
    first.wait_running()
    second = bench.start("echo second", job_id="second", resources=resources)
    words = second.wait_text("waiting for")
    assert "gangrun: waiting for 3 nodes with CPU 3, GPU 1 each: " in words
    assert f"{bench.bed.addresses['n2']} has CPU 1, GPU 1 free" in words
    (bench.directory / "go").touch()
    ended = first.wait().status["ended"]
    done = second.wait()
    assert done.code == 0 and 0 < done.status["times"]["RUNNING"] - ended < 10 and done.output.count("waiting for") == 1


@pytest.mark.slow
def test_a_job_that_waits_can_be_cancelled(bench: RayBench) -> None:
    waiting = bench.start("echo never", nodes=4)
    waiting.wait_text("waiting for 4 nodes with CPU 1 each: 3 nodes are alive\n")
    waiting.process.send_signal(signal.SIGINT)
    done = waiting.wait(20)
    assert (done.code, done.status["state"]) == (130, protocol.CANCELLED), done.output
    assert bench.is_free()


def test_what_can_never_fit_is_told_at_once_with_what_the_nodes_have(bench: RayBench) -> None:
    done = bench.drive("echo never", resources=Resources(cpus=2, gpus=3))
    assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER)
    one = f"{bench.bed.addresses['n1']} has CPU 4, GPU 2"
    assert f"no node of the Ray cluster can ever hold CPU 2, GPU 3: {one}; " in done.output, done.output


def test_a_rank_that_cannot_start_is_told_as_such(bench: RayBench) -> None:
    done = bench.drive("echo never", python="/no/such/python", cluster_ips=addresses(bench, "n1", "n2", "n3"))
    assert (done.code, done.status["state"], done.codes) == (125, protocol.FAILED_DRIVER, [125] * 3)
    words = r"rank \d on \w+ could not run the script: cannot start /no/such/python: No such file or directory\n"
    assert re.search(words, done.output), done.output


@pytest.mark.slow
def test_a_head_that_dies_ends_the_job_and_every_script_has_its_grace(own_ray_bed: BootRay, shared_dir: Path) -> None:
    bench = RayBench(own_ray_bed(nodes=2), shared_dir)
    running = bench.start(f"export SAVED={shared_dir}; {TRAPS}", nodes=2, liveness_timeout_s=8.0)
    running.wait_running(2)
    gcs = next(process for process in bench.bed.processes(HEAD) if "gcs_server" in process.cmdline.split()[0])
    os.kill(gcs.pid, signal.SIGKILL)
    done = running.wait(60)
    assert (done.code, done.status["state"]) == (125, protocol.FAILED_DRIVER), done.output
    assert "the head of the Ray cluster (gcs_server) has not answered for " in done.status["reason"]
    assert {path.name for path in shared_dir.glob("[01]")} == {"0", "1"}
    assert not bench.left_behind("ray-rank")


# --- signals


def test_a_cancelled_job_lets_every_program_save_its_checkpoint(bench: RayBench) -> None:
    script = f"trap 'echo warned' USR1; export SAVED={bench.directory}; {TRAPS.replace('& wait', '& wait; wait')}"
    running = bench.start(script)
    running.wait_running()
    eventually(lambda: running.text.count("ready") == 3, 10)
    running.process.send_signal(signal.SIGUSR1)
    eventually(lambda: running.text.count("warned") == 3, 10)
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    assert (done.code, done.status["state"], done.codes) == (143, protocol.CANCELLED, [0, 0, 0]), done.output
    assert "cancelled by signal 15" in done.output
    assert {path.name for path in bench.directory.glob("[012]")} == {"0", "1", "2"}
    assert bench.is_free()


def test_who_cancels_again_does_not_wait(bench: RayBench) -> None:
    running = bench.start("trap '' TERM; echo ready; sleep 4716", grace_s=100.0)
    eventually(lambda: running.text.count("ready") == 3, 30)
    running.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    running.process.send_signal(signal.SIGINT)
    done = running.wait(15)
    assert (done.code, done.status["state"], done.codes) == (130, protocol.CANCELLED, [137] * 3), done.output
    assert not bench.left_behind("sleep 4716")


def test_a_program_that_ignores_term_is_killed_after_its_grace(bench: RayBench) -> None:
    marker = "sleep 4712"
    running = bench.start(f"trap '' TERM; setsid {marker} & {marker}", grace_s=1.0)
    running.wait_running()
    begun = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    done = running.wait()
    assert (done.code, done.codes) == (143, [137, 137, 137]) and time.monotonic() - begun < 10, done.output
    assert not bench.left_behind(marker)


# --- output


def test_100_megabytes_pass_whole_and_what_nobody_reads_is_held_back(bench: RayBench) -> None:
    line, count = b"x" * 99, 350_000
    os.mkfifo(bench.directory / "job.out")
    reader = os.open(bench.directory / "job.out", os.O_RDONLY | os.O_NONBLOCK)
    running = bench.start(f"yes {line.decode()} | head -n {count}; grep VmHWM /proc/$PPID/status")
    running.wait_state("RUNNING")
    pids = [process.pid for process in bench.bed.processes(HEAD) if protocol.DRIVER_NAME in process.cmdline]
    eventually(lambda: _stands_still(bench), 30)
    assert _logged(bench) < 30e6, "the scripts wait for the reader"
    begun_mb, peak_mb, parts = max(map(_peak_mb, pids)), 0.0, []
    os.set_blocking(reader, True)
    while chunk := os.read(reader, 1 << 20):
        parts.append(chunk)
        peak_mb = max(peak_mb, *map(_peak_mb, pids))
    os.close(reader)
    assert running.process.wait(30) == 0
    told = [text.partition(b") ")[2] for text in b"".join(parts).split(b"\n") if text.startswith(b"(")]
    assert told.count(line) == 3 * count and len(told) == 3 * count + 3
    assert peak_mb - begun_mb < 40, "the driver holds little"
    assert all(int(text.split()[1]) < 60_000 for text in told if text.startswith(b"VmHWM")), "a rank holds nothing"


def test_a_cancelled_job_ends_although_nobody_reads_what_it_prints(bench: RayBench) -> None:
    os.mkfifo(bench.directory / "job.out")
    reader = os.open(bench.directory / "job.out", os.O_RDONLY | os.O_NONBLOCK)
    running = bench.start("yes", grace_s=1.0)
    running.wait_state("RUNNING")
    eventually(lambda: _stands_still(bench), 30)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(20) == 143 and running.status()["state"] == protocol.CANCELLED
    os.close(reader)


def _logged(bench: RayBench) -> int:
    return sum(path.stat().st_size for path in (bench.directory / "logs").glob("*"))


def _stands_still(bench: RayBench) -> bool:
    before = _logged(bench)
    time.sleep(1)
    return 0 < before == _logged(bench)


def _peak_mb(pid: int) -> float:
    """The most memory that a process has had, in MB; 0 if it has ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) / 1024 if found else 0
