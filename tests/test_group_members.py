"""Tasks that join a running group from inside: on free resources, in order, in its queue, and without a say in its end.

On the login node itself: there gangrun is installed where the nodes see it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from executor import protocol
from gangrun import states
from tests.bench import Bench, eventually
from tests.client_bench import without_colour
from tests.group_bench import trap
from tests.minislurm import preflight
from tests.minislurm.options import CONTROLLER

pytestmark = pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing()))
SUCCEEDED, FAILED, CANCELLED = protocol.SUCCEEDED, protocol.FAILED, protocol.CANCELLED
RUNNING, PENDING = protocol.RUNNING, protocol.PENDING
TRAP = trap("exit 0")


class Pool:
    """A group with a shell in it: what is typed there runs inside its first task."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.directory = bench, bench.directory
        self._typed = 0
        self.run = ""

    def gangrun(self, *args: str) -> subprocess.CompletedProcess[str]:
        """On the login node."""
        argv = ["gangrun", *args]
        return self.bench.cluster.run(
            CONTROLLER, argv, cwd=self.directory, env=self.bench.environ, timeout_s=60, check=False
        )

    def launch(self, *others: dict[str, Any], sbatch: str = "--cpus-per-task=2", **header: Any) -> Pool:
        """The group `pool`: its first task, `shell`, obeys `inside`; one CPU of its node is free."""
        obey = (
            f"cd {shlex.quote(str(self.directory))}; number=1\n"
            "while :; do\n"
            "  if [ -e type-$number ]; then\n"
            '    bash ./type-$number >typed.part 2>&1; echo "code $?" >>typed.part\n'
            "    mv typed.part typed-$number; number=$((number + 1))\n"
            "  fi\n"
            "  [ ! -e over ] || exit 0; sleep 0.05\n"
            "done\n"
        )
        slurm = {"time": "5m", "sbatch_args": shlex.split(sbatch)}
        head = {"name": "pool", "execution": "parallel", "primary_tasks": ["shell"], "slurm": slurm, **header}
        documents = [head, {"name": "shell", "run": obey}, *others]
        (self.directory / "pool.yaml").write_text("\n---\n".join(map(json.dumps, documents)))
        done = self.gangrun("launch", "pool.yaml", "--host", "local", "--json")
        assert done.returncode == 0, done.stderr
        self.run = json.loads(done.stdout)["run"]
        eventually(lambda: self.state("shell") == RUNNING, 40, "the shell")
        return self

    def inside(self, text: str, code: int | None = 0) -> str:
        """Type this into the group's shell; what it printed, at its end."""
        self._typed += 1
        part = self.directory / "type.part"
        part.write_text(text)
        part.rename(self.directory / f"type-{self._typed}")
        typed = self.directory / f"typed-{self._typed}"
        said, _, ended = eventually(lambda: typed.exists() and typed.read_text(), 40, text).rpartition("code ")
        assert code is None or int(ended) == code, said
        return without_colour(said)

    def joins(self, name: str, run: str, flags: str = "-d", **fields: Any) -> str:
        (self.directory / f"{name}.yaml").write_text(json.dumps({"name": name, "run": run, **fields}))
        return self.inside(f"gangrun launch {name}.yaml {flags}")

    def tasks(self) -> dict[str, dict[str, Any]]:
        """As the group's record has them, in its order."""
        for path in self.directory.glob(f".gangrun/[0-9]*/{self.run}/{protocol.STATUS_NAME}"):
            return {task["name"]: task for task in json.loads(path.read_text()).get("tasks") or ()}
        return {}

    def state(self, name: str) -> str:
        return str(self.tasks().get(name, {}).get("state"))

    def until(self, name: str, state: str) -> None:
        eventually(lambda: self.state(name) == state, 30, f"{name} {state}")

    def log(self, name: str) -> str:
        folder = self.directory / ".gangrun" / "runs" / self.run / "logs" / name
        logs = [path for path in folder.glob("*.log") if not path.name.startswith("setup-")]
        return "".join(path.read_text() for path in logs)

    def output(self) -> str:
        return without_colour((self.directory / ".gangrun" / "runs" / self.run / "output").read_text(errors="replace"))

    def waits_for(self, name: str) -> str:
        return f"until [ -e {shlex.quote(str(self.directory / name))} ]; do sleep 0.05; done\n"

    def touch(self, name: str) -> None:
        (self.directory / name).touch()

    def end(self) -> dict[str, Any]:
        """Its only primary ends; the group as the queue shows it then."""
        self.touch("over")
        self.gangrun("wait", self.run)
        return dict(json.loads(self.gangrun("status", self.run, "--json").stdout)[0])


@pytest.fixture
def pool(bench: Bench) -> Iterator[Pool]:
    pool = Pool(bench)
    yield pool
    if pool.run:
        pool.gangrun("cancel", pool.run, "--grace", "1s")


def test_one_that_finds_room_begins_within_a_second(pool: Pool) -> None:
    """The best of three: what others do on this machine is not ours."""
    pool.launch()
    took = []
    for number in range(3):
        name = f"quick-{number}"
        join = f"import gangrun, time; gangrun.join(gangrun.Task(name='{name}', run='date +%s.%N')); print(time.time())"
        asked = float(pool.inside(f'{pool.bench.python} -c "{join}"'))
        pool.until(name, SUCCEEDED)
        took.append(float(pool.log(name)) - asked)
    assert min(took) < 1.0, took


def test_those_that_find_none_wait_and_begin_in_the_order_of_arrival(pool: Pool) -> None:
    pool.launch()
    pool.joins("first", "echo up\n" + pool.waits_for("go"))
    pool.until("first", RUNNING)
    for name in ("second", "third"):
        pool.joins(name, f"echo {name} >>{pool.directory}/order; sleep 0.3")
    time.sleep(1.5)
    assert [pool.state(name) for name in ("first", "second", "third")] == [RUNNING, PENDING, PENDING]
    assert pool.log("second") == pool.log("third") == ""
    pool.touch("go")
    pool.until("third", SUCCEEDED)
    assert (pool.directory / "order").read_text().split() == ["second", "third"]


def test_it_has_a_row_a_number_and_a_log_below_the_groups_declared_tasks(pool: Pool) -> None:
    pool.launch({"name": "server", "run": TRAP})
    said = pool.joins("eval", "echo up; exec sleep 4741", "-d -n eval-100")
    assert "task eval-100 joins group pool" in said
    pool.until("eval-100", RUNNING)
    rows = pool.gangrun("queue", "--host", "local").stdout.splitlines()
    assert [row.split()[1] for row in rows if row.startswith(" ↳")] == ["shell", "server", "eval-100"], rows
    assert pool.gangrun("logs", pool.run, "2", "--rank", "0").stdout == "up\n"
    assert pool.inside("gangrun launch eval.yaml -d -n eval-100 --json") != ""
    eventually(lambda: [*pool.tasks()][3:] == ["eval-100-2"], 10, "no two have one name")


def test_it_is_cancelled_alone_and_a_declared_one_is_not(pool: Pool) -> None:
    pool.launch({"name": "server", "run": TRAP})
    pool.joins("eval", TRAP)
    eventually(lambda: pool.log("eval") == "up\n", 30)
    pool.joins("waiting", "echo never", num_nodes=2)
    pool.until("waiting", protocol.PENDING)
    assert pool.tasks()["waiting"]["reason"] == "waits for free CPUs, GPUs and nodes of its group"
    refused = pool.gangrun("cancel", pool.run, "--task", "server")
    assert refused.returncode == protocol.EXIT_USAGE and "only tasks that joined later" in refused.stderr
    for number in ("3", "2"):  # one that has not begun, and one that has
        cancelled = pool.gangrun("cancel", pool.run, "--task", number)
        assert cancelled.returncode == 0 and CANCELLED in cancelled.stdout, cancelled.stderr
    assert (pool.log("eval"), pool.log("waiting")) == ("up\ngot TERM\n", "")
    assert [pool.state(name) for name in ("shell", "server", "eval", "waiting")] == [
        RUNNING, RUNNING, CANCELLED, CANCELLED,
    ]  # fmt: skip
    assert pool.gangrun("cancel", pool.run).returncode == 0
    cancelled = pool.gangrun("cancel", pool.run, "--task", "eval")
    assert (cancelled.returncode, CANCELLED in cancelled.stdout) == (0, True), "as a run that has ended"


def test_it_changes_nothing_in_the_group_and_ends_with_it_in_its_own_time(pool: Pool) -> None:
    pool.launch(sbatch="--cpus-per-task=3")
    pool.joins("bad", "exit 5")
    pool.until("bad", FAILED)
    pool.joins("good", "true")
    pool.until("good", SUCCEEDED)
    assert pool.state("shell") == RUNNING
    pool.joins("slow", trap("sleep 1; echo saved; exit 0"))
    pool.joins("deaf", "trap '' TERM; echo up; while :; do sleep 0.1; done", slurm={"grace": "1s"})
    eventually(lambda: pool.log("slow") == pool.log("deaf") == "up\n", 30)
    end = pool.end()
    assert (end["state"], end["exit_code"]) == (SUCCEEDED, 0)
    found = {task["name"]: task["state"] for task in end["tasks"]}
    assert found == {"shell": SUCCEEDED, "bad": FAILED, "good": SUCCEEDED, "slow": CANCELLED, "deaf": CANCELLED}
    assert pool.log("slow") == "up\ngot TERM\nsaved\n"


def test_spare_nodes_are_room_for_it(pool: Pool) -> None:
    pool.launch(spare_nodes=1, sbatch="")
    pool.joins("eval", "hostname", "")
    (own,) = pool.tasks()["shell"]["nodes"]
    assert pool.log("eval").strip() in {*pool.bench.cluster.nodes} - {own}


def test_it_sees_the_groups_names_and_has_none(pool: Pool) -> None:
    pool.launch({"name": "server", "run": TRAP})
    look = "getent ahostsv4 server-0.pool | head -1 | cut -d' ' -f1; getent hosts eval-0.pool || echo none"
    pool.joins("eval", look, "")
    address = pool.bench.cluster.addresses[pool.tasks()["server"]["nodes"][0]]
    assert pool.log("eval") == f"{address}\nnone\n"


def test_who_waits_for_it_gets_its_result(pool: Pool) -> None:
    pool.launch()
    assert "task good is SUCCEEDED" in pool.joins("good", "echo fine", "")
    (pool.directory / "bad.yaml").write_text("name: bad\nrun: exit 5\n")
    assert "task bad is FAILED" in pool.inside("gangrun launch bad.yaml", code=states.EXIT_FAILED)
    assert re.search(r"^\[good\] .*fine$", pool.output(), re.MULTILINE)


def test_it_joins_without_any_network(pool: Pool) -> None:
    pool.launch()
    (pool.directory / "eval.yaml").write_text("name: eval\nrun: echo ran\n")
    said = pool.inside("unshare --net bash -c 'tail -n +3 /proc/net/dev; gangrun launch eval.yaml'")
    assert re.findall(r"(\w+): +\d", said) == ["lo"] and "task eval is SUCCEEDED" in said, said
    assert pool.log("eval") == "ran\n"


def test_the_group_is_named_or_left_by_a_flag(pool: Pool) -> None:
    pool.launch()
    job = pool.inside("echo $SLURM_JOB_ID").strip()
    for number, name in enumerate(("pool", job, pool.run)):
        pool.joins(f"named-{number}", "true", f"--job-group {name}")
    refused = pool.inside("gangrun launch named-0.yaml --job-group other", code=protocol.EXIT_USAGE)
    assert f"--job-group='other': a group is joined from inside; this is a task of {pool.run}" in refused
    asked = pool.inside("gangrun launch named-0.yaml --gpus 2", code=protocol.EXIT_USAGE)
    assert "--gpus: not for a task that joins its group; --no-job-group launches a job" in asked
    pool.joins("alone", "echo $SLURM_JOB_ID", "--no-job-group --host local --time 1m")
    assert "alone" not in pool.tasks()
    logs = [*pool.directory.glob(".gangrun/runs/alone-*/logs/" + protocol.SINGLE_LOG_NAME)]
    assert len(logs) == 1 and logs[0].read_text().strip() not in ("", job)


def test_a_port_that_a_task_of_the_group_has_is_told(pool: Pool) -> None:
    pool.launch({"name": "server", "run": "exec python3 -m http.server 18141", "ready": {"port": 18141}},
                placement="shared", sbatch="--cpus-per-task=4")  # fmt: skip
    (node,) = pool.tasks()["server"]["nodes"]
    port = f":{18141:04X} "
    eventually(lambda: port in pool.bench.cluster.run(node, ["cat", "/proc/net/tcp"]).stdout, 20)
    pool.joins("eval", "true", "", ports=[18141])
    assert f"warning: port 18141 of eval is taken on {node} already" in pool.output()


def test_setup_sees_no_gpu_of_another_that_joined(pool: Pool) -> None:
    pool.launch(sbatch="--cpus-per-task=3 --gres=gpu:2")
    gpu = {"accelerators": "GPU:1"}
    pool.joins("first", "echo $CUDA_VISIBLE_DEVICES\n" + pool.waits_for("go"), resources=gpu)
    eventually(lambda: pool.log("first"), 30)
    pool.joins("second", "echo $CUDA_VISIBLE_DEVICES", "", resources=gpu, setup="echo $CUDA_VISIBLE_DEVICES")
    folder = pool.directory / ".gangrun" / "runs" / pool.run / "logs" / "second"
    (setup,) = [path.read_text() for path in folder.glob("setup-*.log")]
    assert sorted([pool.log("first"), setup]) == ["0\n", "1\n"] and pool.log("second") == setup


@pytest.mark.slow
def test_one_that_waits_for_long_in_a_later_component_keeps_its_place(pool: Pool) -> None:
    """What Slurm says first of a heterogeneous job are the nodes of its first component."""
    other = {"name": "other", "resources": {"cpus": 3}, "run": "echo up\n" + TRAP}
    pool.launch(other, sbatch="")
    (pool.directory / "late.yaml").write_text("name: late\nrun: hostname\nresources: {cpus: 3}\n")
    pool.inside("GANGRUN_COMPONENT=1 gangrun launch late.yaml -d")
    time.sleep(12)
    assert pool.state("late") == PENDING, pool.output()
    assert "waiting for the run step to start" in pool.output() and "lost" not in pool.output()
    pool.end()
