"""A Ray cluster inside a Slurm job: real Ray on the nodes of a real Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, TypeVar

import pytest

from codegen import Bundle, Job, Ray, Resources, SpecError, render_driver
from executor import memory, protocol, ray_room
from executor.gang import Gang
from executor.identity import Identity
from executor.options import parse
from executor.protocol import UsageError
from executor.ray_node import own_options
from tests.bench import ANSI, CHECKOUT, Bench, Running, eventually, python_path, run_local
from tests.group_bench import GroupBench
from tests.minislurm.fixtures import BootCluster
from tests.test_task_file import complaint, task

STORE = "--object-store-memory=80000000"
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[default]'"
)
Test = TypeVar("Test", bound=Callable[..., None])
WITH_RAY = Resources(cpus=2, ray=Ray(start_args=(STORE,)))
# Prints one line of JSON: who is in the cluster, and who ran tasks.
LOOK = """
import json, os, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    return os.environ["SKYPILOT_NODE_RANK"]
nodes = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
strategy = lambda node: ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
ranks = sorted(ray.get([where.options(scheduling_strategy=strategy(node)).remote() for node in ray.nodes()]))
have = ray.cluster_resources()
print("SEEN", json.dumps({"nodes": nodes, "ranks": ranks, "cpus": have.get("CPU"), "gpus": have.get("GPU"),
                          "memory": have.get("memory"), "store": have.get("object_store_memory")}))
"""
UP = "Ray runs on"


def on_slurm(test: Test) -> Test:
    """With real Ray, which takes its time."""
    return pytest.mark.ray(pytest.mark.slow(NEEDS_RAY(test)))


def python(code: str) -> str:
    """A line of bash that runs a program."""
    return "python -c " + shlex.quote(textwrap.dedent(code)) + "\n"


def seen(output: str) -> dict[str, Any]:
    """What LOOK printed."""
    line = next(line for line in ANSI.sub("", output).splitlines() if " SEEN " in line)
    found: dict[str, Any] = json.loads(line.partition(" SEEN ")[2])
    return found


def left(bench: Bench, job_id: int) -> list[str]:
    """What a job has left: processes of its Ray, its directories, shared memory."""
    room = f"{protocol.RAY_ROOM}{job_id}."
    return [
        *bench.left_behind(room),
        *(name for name in os.listdir("/tmp") if name.startswith(room)),
        *(line for node in bench.cluster.nodes for line in shared_memory(bench, node)),
    ]


def shared_memory(bench: Bench, node: str) -> list[str]:
    return [line for line in bench.cluster.run(node, ["ls", "/dev/shm"], cwd="/").stdout.split() if "plasma" in line]


def raylet(bench: Bench, job_id: int, node: str, program: str = "raylet") -> int:
    """The pid of a job's raylet on a node."""
    room = f"{protocol.RAY_ROOM}{job_id}."

    def look() -> int | None:
        found = [p for p in bench.cluster.processes(node) if room in p.cmdline]
        return next((p.pid for p in found if os.path.basename(p.cmdline.split()[0]) == program), None)

    return eventually(look, 30, f"{program} on {node}")


def until_up(running: Running, words: str = UP) -> None:
    eventually(lambda: words in running.log("0-head.log"), 60, f"{words!r} in {running.log('0-head.log')!r}")


# --- what a task may say


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", Ray()),
        ("false", None),
        ("", None),
        ("{activate: source ~/v/bin/activate}", Ray(activate="source ~/v/bin/activate")),
        (f"{{start_args: [{STORE}]}}", Ray(start_args=(STORE,))),
    ],
)
def test_a_task_file_says_how_ray_starts(tmp_path: Path, text: str, expected: Ray | None) -> None:
    found = task(tmp_path, f"resources:\n  cpus: 4\n  ray: {text}\nrun: echo")
    assert found.resources == Resources(cpus=4, ray=expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yes please", "3: ray='yes please': use true, or a mapping of activate, start_args"),
        ("{head: 1}", "3: ray={'head': 1}: use true, or a mapping of activate, start_args"),
        ("{activate: 5}", "3: ray.activate=5: use a bash script such as 'source ~/venv/bin/activate'"),
        ("{start_args: --x}", "3: ray.start_args='--x': use a list of options of `ray start`, such as "),
        ("{start_args: [x]}", "3: ray.start_args=['x']: use a list of options of `ray start`, such as "),
        ("{start_args: [--port=1]}", "3: ray.start_args: '--port=1' is decided by gangrun: leave it out"),
    ],
)
def test_what_is_wrong_with_ray_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, f"resources:\n  cpus: 1\n  ray: {text}\nrun: echo").startswith(said)


def test_the_typed_description_is_as_strict() -> None:
    with pytest.raises(SpecError, match="ray=7: use true, or a mapping"):
        Resources(ray=7)  # type: ignore[arg-type]


def test_a_driver_shows_what_ray_is_started_with() -> None:
    needs = Resources(cpus=4, gpus=2, ray=Ray(activate="module load ray", start_args=(STORE,)))
    driver = render_driver(Job(job_id="j", num_nodes=2, log_dir="/l", run="echo it's mine", resources=needs))
    names: dict[str, Any] = {}
    text = driver[driver.index("RAY = ") : driver.index("def body")]
    exec(text, names)
    expected = {"activate": "module load ray", "start_args": ["--num-cpus=4", "--num-gpus=2", STORE]}
    assert names["RAY"] == expected and "ray=RAY)" in driver


def test_a_driver_without_ray_knows_nothing_of_it() -> None:
    driver = render_driver(Job(job_id="j", num_nodes=2, log_dir="/l", run="true"))
    assert "ray" not in driver.lower().replace("array", "")


def test_the_executor_starts_ray_for_a_driver_only() -> None:
    with pytest.raises(UsageError, match="--ray needs --launch-dir"):
        parse(["--script=x", "--log-dir=/l", "--cluster-num-nodes=1", "--cluster-ips=a", "--ray={}"])


def test_what_only_a_head_may_be_told_is_told_to_no_other_node() -> None:
    given = ["--include-dashboard=true", STORE]
    assert own_options(given, is_head=True) == given and own_options(given, is_head=False) == [STORE]


# --- the directory on the node


def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path | None = None, ray: str = "") -> ray_room.Room:
    monkeypatch.setenv("TMPDIR", str(base or tmp_path))
    monkeypatch.setenv(protocol.SLURM_JOB_ID, "4711")
    flags = ["--script=x", f"--log-dir={tmp_path}/logs", "--cluster-num-nodes=1", "--cluster-ips=a"]
    options = parse([*flags, f"--launch-dir={tmp_path}", "--ray=" + (ray or '{"start_args": []}')])
    return ray_room.Room(
        options, Gang(Identity(0, 1, 0, "10.0.0.1", "n1", ("n1",)), protocol.Launch(str(tmp_path)), options)
    )


@pytest.fixture
def short(shared_dir: Path) -> Path:
    """A base that leaves room for sockets."""
    short = Path("/tmp") / f"r{os.getpid() % 10000}"
    short.mkdir()
    return short


def test_what_a_killed_rank_left_is_removed_by_the_next_and_a_living_ones_stays(
    tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = short / (protocol.RAY_ROOM + "1.dead")
    dead.mkdir()
    (dead / protocol.LOCK_NAME).touch()
    (dead / "session_latest").symlink_to("nowhere")
    foreign = short / "gangrun-other"
    foreign.mkdir()
    first, second = room(tmp_path, monkeypatch, short), room(tmp_path, monkeypatch, short)
    first.open()
    assert not dead.exists() and foreign.exists()
    second.open()
    assert os.path.isdir(first.path) and second.path == first.path + ".0"
    for one in (first, second):
        one.close()
    assert [path.name for path in short.iterdir()] == ["gangrun-other"]
    foreign.rmdir()
    short.rmdir()


def test_sockets_fit_below_it_wherever_temporary_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    one = room(tmp_path, monkeypatch, long)
    one.open()
    try:
        assert one.path.startswith("/tmp/" + protocol.RAY_ROOM + "4711.")
        assert len(one.path + "/session_2026-11-29_19-58-57_438132_1234567/sockets/plasma_store") <= 107
    finally:
        one.close()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"start_args": [1]}', '{"start_args": 5}'])
def test_a_description_that_is_none_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(UsageError, match="--ray="):
        room(tmp_path, monkeypatch, ray=text)


# --- the memory that Ray may use


V1 = """\
256 255 0:99 / /sys/fs/cgroup rw,relatime - tmpfs cgroup rw
258 256 0:32 /box /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
"""
V2 = "30 25 0:27 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ("4:memory:/box/job_1/step_0\n0::/\n", V1, ["memory/job_1/step_0", "memory/job_1", "memory"]),
        ("4:memory:/elsewhere\n", V1, ["memory/elsewhere", "memory"]),
        ("5:cpuset:/box/job_1\n", V1, []),
        ("0::/job_1/step_0\n", V2, ["job_1/step_0", "job_1", ""]),
        ("0::/\n", V2, [""]),
        ("", V2, []),
    ],
)
def test_limits_are_looked_for_from_the_own_cgroup_up(own: str, mounts: str, expected: list[str]) -> None:
    found = [folder for folder, _ in memory._folders(memory._own_paths(own), mounts)]
    assert found == [f"/sys/fs/cgroup/{name}".rstrip("/") for name in expected]


# --- without Slurm, and what needs no Ray


def here(tmp_path: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`gangrun run --local` in a network of its own."""
    (tmp_path / "task.yaml").write_text(textwrap.dedent(text))
    command = "ip link set lo up; exec gangrun run --local task.yaml"
    env = {**os.environ, "PATH": python_path(), "HOME": str(tmp_path), "NO_COLOR": "1", **environ}
    return run_local(["unshare", "--net", "sh", "-c", command], cwd=tmp_path, env=env)


def fake_ray(tmp_path: Path, body: str) -> str:
    """Bash that puts a `ray` of ours first in PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text("#!/bin/bash\n" + textwrap.dedent(body))
    (tmp_path / "bin" / "ray").chmod(0o755)
    return f"PATH={tmp_path}/bin:$PATH"


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")


@NEEDS_ROOT
def test_a_node_without_ray_is_one_line(tmp_path: Path) -> None:
    job = Job(
        job_id="j", num_nodes=1, log_dir=str(tmp_path / "logs"), run="echo ran", launcher="local", slurm_job_id="local",
        cluster_ips=("127.0.0.1",), cluster_home=str(tmp_path), python="/usr/bin/python3",
        resources=Resources(ray=Ray()),
    )  # fmt: skip
    driver = Bundle(job, render_driver(job)).write(str(tmp_path / "driver"))
    done = run_local([sys.executable, driver], env={**os.environ, "PATH": "/usr/bin:/bin"})
    status = json.loads((tmp_path / ".gangrun/local/j" / protocol.STATUS_NAME).read_text())
    assert (done.returncode, status["state"]) == (125, protocol.FAILED_DRIVER)
    assert "no program `ray` in PATH on" in status["reason"] and "ran" not in (tmp_path / "logs/run.log").read_text()
    assert "Traceback" not in done.stdout + done.stderr


@NEEDS_ROOT
def test_the_words_of_a_ray_that_does_not_start_are_the_reason(tmp_path: Path) -> None:
    activate = fake_ray(tmp_path, "echo begins; echo 'ValueError: the disk'; echo 'is on fire' >&2; exit 3\n")
    text = f"num_nodes: 2\nresources: {{ray: {{activate: '{activate}'}}}}\nrun: echo ran\n"
    done = here(tmp_path, text)
    assert done.returncode == 125, done.stdout
    why = "`ray start` ended with exit code 3: ValueError: the disk is on fire"
    reason = f"rank 0 on head could not run the script to its end: {why}"
    assert reason in done.stdout and "(head, rank=0" in done.stdout and "begins" in done.stdout
    logs = next((tmp_path / ".gangrun").rglob("logs/ray/head/ray-start.out"))
    assert "the disk" in logs.read_text()


@NEEDS_ROOT
def test_what_nodes_wait_for_exists_before_any_of_them_starts(tmp_path: Path) -> None:
    body = "cd ~/.gangrun/*/*/attempt-0 && echo files: $(cat ray) $(ls ray-ranks); exit 3\n"
    text = f"num_nodes: 2\nresources: {{ray: {{activate: '{fake_ray(tmp_path, body)}'}}}}\nrun: echo ran\n"
    assert "files: armed 0 1" in here(tmp_path, text).stdout


def node_alone(
    tmp_path: Path, body: str, run: str = "echo ran\n", num_ranks: int = 3, **limits: float
) -> subprocess.CompletedProcess[str]:
    """Rank 0 of some, without anybody around it, with a `ray` of ours and shorter limits."""
    room, script = tmp_path / "room", tmp_path / "script"
    room.mkdir()
    script.write_text(run)
    description = {
        **{"rank": 0, "num_ranks": num_ranks, "node": "head", "host": "n1", "address": "127.0.0.1", "room": str(room)},
        **{"launch_dir": str(tmp_path), "start_args": [], "grace_s": 1, "bash_options": [], "script_bytes": len(run)},
    }
    program = "from executor import ray_node; vars(ray_node).update(%r); ray_node.run_as_program()" % limits
    argv = [sys.executable, "-c", program, json.dumps(description), str(script)]
    command = f"{fake_ray(tmp_path, body)} exec {shlex.join(argv)}"
    return run_local(["bash", "-c", command], cwd=CHECKOUT)


def test_a_ray_that_hangs_at_its_start_is_given_up(tmp_path: Path) -> None:
    done = node_alone(tmp_path, "echo 'waiting for a disk'; sleep 3141\n", START_TIMEOUT_S=1)
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert "`ray start` has not ended within 1 s: waiting for a disk" in done.stdout
    assert run_local(["pgrep", "-f", "^sleep 3141"]).stdout == ""


STARTS = """
echo 127.0.0.1:6000 > {directory}/room/ray_current_cluster
(echo raylet > /proc/$BASHPID/comm; {raylet}) &
until [ "$(cat /proc/$!/comm)" = raylet ]; do sleep 0.01; done
"""


def test_a_slow_start_that_failed_is_tried_once_more(tmp_path: Path) -> None:
    once = "[ ! -e {directory}/tried ] && touch {directory}/tried {directory}/room/old && sleep 1.2 && exit 1\n"
    body = once + "ls {directory}/room > {directory}/seen\n" + STARTS
    done = node_alone(
        tmp_path, body.format(directory=tmp_path, raylet="sleep 60; exit 0"), SLOW_START_S=1, JOIN_TIMEOUT_S=0.5
    )
    assert "`ray start` ended with exit code 1: it said nothing; trying once more" in done.stdout
    assert "2 of 3 nodes have not joined" in done.stdout, "it has started"
    assert (tmp_path / "seen").read_text() == "ray-start.out\n"


def test_a_raylet_that_was_asked_to_stop_is_told_as_that(tmp_path: Path) -> None:
    done = node_alone(tmp_path, STARTS.format(directory=tmp_path, raylet="sleep 1; exit 0"))
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert "Ray has ended on head (n1): raylet, exit code 0 (somebody ran `ray stop`)" in done.stdout


@pytest.mark.parametrize(("run", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0), ("exit 125", 125)])
def test_the_scripts_own_code_is_the_nodes(tmp_path: Path, run: str, code: int) -> None:
    starts = STARTS.format(directory=tmp_path, raylet="while :; do sleep 0.1; done")
    done = node_alone(tmp_path, starts, run="echo at $RAY_ADDRESS\n" + run, num_ranks=1)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "at 127.0.0.1:6000")


def test_nodes_that_never_join_are_named(tmp_path: Path) -> None:
    done = node_alone(
        tmp_path, STARTS.format(directory=tmp_path, raylet="while :; do sleep 0.1; done"), JOIN_TIMEOUT_S=0.5
    )
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert "2 of 3 nodes have not joined Ray in time: ranks 1, 2" in done.stdout and "ran\n" not in done.stdout


# --- on Slurm


@on_slurm
def test_the_script_runs_once_with_all_nodes_and_everything_ends_with_it(bench: Bench) -> None:
    needs = Resources(cpus=2, gpus=1, ray=Ray(start_args=(STORE, '--resources={"special": 1}')))
    run = "#!/bin/bash -e\necho script of rank $SKYPILOT_NODE_RANK\n" + python(LOOK) + "sleep 300 & \nexit 7\n"
    running = bench.submit(run, resources=needs, task_name="it's {a} task")
    outcome = running.wait(90)
    assert (outcome.code, outcome.status["state"], outcome.codes[0]) == (7, protocol.FAILED, 7), outcome.output
    assert outcome.log("0-head.log").count("script of rank") == 1 and "rank 0 on head failed first" in outcome.plain
    addresses = [bench.cluster.addresses[node] for node in bench.cluster.nodes[:3]]
    found = seen(outcome.output)
    assert (found["nodes"], found["ranks"], found["cpus"], found["gpus"]) == (sorted(addresses), ["0", "1", "2"], 6, 3)
    assert (outcome.directory / "logs/ray/worker2/raylet.out").exists()
    assert left(bench, running.job_id) == []


@on_slurm
def test_two_jobs_share_their_nodes_and_do_not_see_each_other(bench: Bench) -> None:
    both_are_up = "touch {own}; while [ ! -e {other} ]; do sleep 0.1; done\n"
    places = [bench.directory / name for name in ("a", "b")]
    jobs = []
    for own, other in (places, places[::-1]):
        own.mkdir()
        run = both_are_up.format(own=own / "up", other=other / "up") + python(LOOK)
        jobs.append(Bench(bench.cluster, own).submit(run, nodes=2, resources=WITH_RAY))
    for running in jobs:
        outcome = running.wait(120)
        assert outcome.code == 0, outcome.output
        assert (len(seen(outcome.output)["nodes"]), seen(outcome.output)["cpus"]) == (2, 4)
        assert left(bench, running.job_id) == []
        assert not (outcome.directory / "logs" / "ray").exists(), "logs of Ray are kept after a success"


@on_slurm
def test_a_node_with_another_version_fails_the_job_in_rays_own_words(bench: Bench) -> None:
    folder = bench.directory / "older"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.9.0'\n")
    activate = f'[ "$SKYPILOT_NODE_RANK" != 2 ] || export PYTHONPATH={folder}'
    needs = Resources(ray=Ray(activate=activate, start_args=(STORE,)))
    outcome = bench.drive("echo ran", resources=needs, timeout_s=90)
    assert (outcome.code, outcome.status["state"]) == (125, protocol.FAILED_DRIVER), outcome.output
    reason = outcome.status["reason"]
    assert reason.startswith(
        "rank 2 on worker2 could not run the script to its end: `ray start` ended with exit code 1: Runtime"
    )
    assert "ersion mismatch" in reason and "Ray: 2.9.0" in outcome.plain, outcome.plain
    assert "echo ran" not in outcome.log("0-head.log") and "Traceback" not in outcome.plain.split("worker2, rank=2")[0]


@on_slurm
def test_a_cancelled_script_saves_with_rays_help_before_ray_ends(bench: Bench) -> None:
    saves = """
    import os, ray, signal, time
    ray.init(log_to_driver=False)
    @ray.remote(num_cpus=1)
    def rank():
        time.sleep(1)
        return os.environ["SKYPILOT_NODE_RANK"]
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    print("ready", flush=True)
    while not told:
        time.sleep(0.1)
    ranks = [rank.options(scheduling_strategy="SPREAD").remote() for _ in range(4)]
    print("saved by", sorted(ray.get(ranks)), flush=True)
    """
    running = bench.submit("exec " + python(saves), nodes=2, resources=WITH_RAY)
    until_up(running, "ready")
    driver = running.status()["driver"]
    bench.cluster.run(driver["host"], ["kill", str(driver["pid"])])
    outcome = running.wait(60)
    assert (outcome.status["state"], outcome.code) == (protocol.CANCELLED, 143), outcome.output
    assert "saved by ['0', '0', '1', '1']" in outcome.log("0-head.log")
    assert left(bench, running.job_id) == []


@on_slurm
@pytest.mark.parametrize(
    ("node", "program", "who"),
    [
        (1, "raylet", "rank 1 on worker1"),
        (0, "raylet", "rank 0 on head"),
        (0, "gcs_server", "rank 0 on head"),
    ],
)
def test_a_part_of_ray_that_dies_ends_the_job_with_its_name(bench: Bench, node: int, program: str, who: str) -> None:
    script = "trap 'echo got TERM; exit 0' TERM; echo begun; while :; do sleep 0.1; done"
    running = bench.submit(script, nodes=2, resources=WITH_RAY)
    until_up(running, "begun")
    name = bench.cluster.nodes[node]
    os.kill(raylet(bench, running.job_id, name, program), signal.SIGKILL)
    outcome = running.wait(60)
    assert (outcome.code, outcome.status["state"]) == (125, protocol.FAILED_DRIVER), outcome.output
    place = f"Ray has ended on {protocol.node_name(node)} ({name}): {program}, exit code 137, signal 9"
    assert outcome.status["reason"] == f"{who} could not run the script to its end: {place}"
    assert "got TERM" in outcome.log("0-head.log")
    assert left(bench, running.job_id) == []


@on_slurm
def test_a_requeued_job_gets_a_ray_of_its_own(bench: Bench) -> None:
    run = 'echo "attempt $GANGRUN_ATTEMPT at $RAY_ADDRESS"; [ $GANGRUN_ATTEMPT = 1 ] || sleep 60\n' + python(LOOK)
    running = bench.submit(run, nodes=2, resources=WITH_RAY, sbatch="--requeue")
    until_up(running, "attempt 0")
    bench.cluster.run("ctl", ["scontrol", "requeue", str(running.job_id)], cwd="/")
    eventually(lambda: "attempt 1 at" in running.log("0-head.log"), 60)
    outcome = running.wait(60)
    assert (outcome.code, outcome.status["attempt"]) == (0, 1), outcome.output
    assert len(seen(outcome.output)["nodes"]) == 2
    assert left(bench, running.job_id) == []


@on_slurm
def test_a_driver_killed_at_once_leaves_nothing(bench: Bench) -> None:
    running = bench.submit("sleep 300", nodes=2, resources=WITH_RAY)
    until_up(running)
    driver = running.status()["driver"]
    bench.cluster.run(driver["host"], ["kill", "-9", str(driver["pid"])])
    running.wait(60)
    eventually(lambda: not bench.left_behind(f"{protocol.RAY_ROOM}{running.job_id}."), 20)
    # Slurm gives the ranks no time; the next task with Ray removes their directories.
    assert bench.drive("true", nodes=2, resources=WITH_RAY, job_id="next").code == 0
    assert left(bench, running.job_id) == []


@on_slurm
def test_who_does_not_know_the_jobs_token_is_refused(bench: Bench) -> None:
    running = bench.submit('echo "at $RAY_ADDRESS"; sleep 60', nodes=1, resources=WITH_RAY)
    eventually(lambda: "at 10." in running.log("run.log"), 60)
    address = running.log("run.log").partition("at 10.")[2].split()[0]
    intruder = f"import ray; ray.init('10.{address}', log_to_driver=False)"
    done = bench.cluster.run(
        bench.cluster.nodes[0], [sys.executable, "-c", intruder], check=False, env={"RAY_AUTH_MODE": "token"}
    )
    bench.cluster.run("ctl", ["scancel", str(running.job_id)], cwd="/")
    running.wait(60)
    assert done.returncode != 0 and "oken" in done.stderr, done.stderr


@on_slurm
def test_memory_is_what_the_job_may_use(own_cluster: BootCluster, shared_dir: Path) -> None:
    bench = Bench(own_cluster(nodes=1, constrain=("ram",)), shared_dir)
    outcome = bench.drive(python(LOOK), nodes=1, sbatch="--mem=2000", resources=Resources(cpus=2, ray=Ray()))
    assert outcome.code == 0, outcome.output
    found = seen(outcome.output)
    assert found["store"] <= 256e6 and 1500e6 < found["memory"] + found["store"] <= 2000 * 2**20, found


@on_slurm
def test_a_node_that_loses_power_ends_the_job_and_its_ray(own_cluster: BootCluster, shared_dir: Path) -> None:
    bench = Bench(own_cluster(nodes=2, slurmd_timeout_s=5), shared_dir)
    running = bench.submit("echo begun; sleep 300", nodes=2, resources=WITH_RAY, sbatch="--no-requeue")
    until_up(running, "begun")
    bench.cluster.power_off("n2")
    bench.cluster.wait_job(running.job_id, timeout_s=90)
    room = f"{protocol.RAY_ROOM}{running.job_id}."
    eventually(lambda: not [p for p in bench.cluster.processes("n1") if room in p.cmdline], 20)
    assert running.status()["state"] == protocol.FAILED_DRIVER, running.status()


@on_slurm
def test_a_task_of_a_group_has_a_ray_of_its_own(bench: Bench) -> None:
    groups = GroupBench(bench)
    learner = groups.task("learner", python(LOOK) + "getent hosts actor-0.rl\n", nodes=2)
    job = learner.job.__class__(**{**learner.job.__dict__, "resources": WITH_RAY})
    learner = learner.__class__(**{**learner.__dict__, "job": job})
    outcome = groups.submit(learner, groups.aux("actor", "sleep 300")).end(120)
    assert (outcome.state, outcome.codes["learner"]) == (protocol.SUCCEEDED, 0), outcome.output
    assert len(seen(outcome.output.replace("SEEN", " SEEN "))["nodes"]) == 2


@on_slurm
def test_a_launched_task_has_its_ray(bench: Bench) -> None:
    needs = {"cpus": 2, "ray": {"start_args": [STORE]}}
    text = json.dumps({"name": "launched", "num_nodes": 2, "resources": needs, "run": python(LOOK)})
    (bench.directory / "task.yaml").write_text(text)
    argv = [sys.executable, "-m", "gangrun", "launch", "task.yaml", "--host", "local"]
    done = bench.cluster.run("ctl", argv, cwd=bench.directory, env=bench.environ, check=False, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(seen(done.stdout)["nodes"]) == 2


@on_slurm
def test_the_example_runs_in_an_allocation(bench: Bench) -> None:
    example = CHECKOUT / "examples" / "ray_on_slurm.yaml"
    outcome = bench.run_batch(f"exec gangrun run {example}", nodes=2, sbatch="--cpus-per-task=2", timeout_s=90)
    assert outcome.code == 0, outcome.output
    assert "squares: [0, 1, 4, 9, 16, 25, 36, 49] by ranks ['0', '1']" in outcome.plain
