"""A gang on a machine without Slurm: the same driver and the same executor, each node a process group."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from codegen import Bundle, Job, render_driver
from executor import local, protocol
from executor.protocol import UsageError
from tests.bench import Outcome, eventually

CHECKPOINT = """
import os, pathlib, signal, sys, time
name = pathlib.Path("mark-" + os.environ["SKYPILOT_NODE_RANK"])
def save(number, frame):
    with name.open("a") as file:
        file.write("TERM ")
    time.sleep(0.3)
    with name.open("a") as file:
        file.write("checkpoint ")
    sys.exit(EXIT)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def write_driver(directory: Path, **fields: Any) -> str:
    """A driver for three local nodes whose logs go to `directory`/logs; returns its path."""
    nodes = fields.pop("num_nodes", 3)
    values: dict[str, Any] = {
        "job_id": "job",
        "num_nodes": nodes,
        "cluster_ips": tuple(protocol.local_address(index) for index in range(nodes)),
        "slurm_job_id": "local",
        "log_dir": str(directory / "logs"),
        "launcher": "local",
        **fields,
    }
    job = Job(**values)
    return Bundle(job, render_driver(job)).write(str(directory / "driver"))


def start(directory: Path, driver: str, **environ: str) -> subprocess.Popen[bytes]:
    """Run a driver in `directory`, which is its home, too; what it prints goes to `directory`/output."""
    with open(directory / "output", "wb") as output:
        return subprocess.Popen(
            [sys.executable, driver],
            cwd=directory,
            env={**os.environ, "HOME": str(directory), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def outcome(directory: Path, driver: subprocess.Popen[bytes]) -> Outcome:
    """What came of a driver, once it has ended. Nothing of it may be left."""
    code = driver.wait(30)
    place = next((directory / ".gangrun").glob("*/job"))
    status = json.loads((place / protocol.STATUS_NAME).read_text())
    events = [json.loads(line) for line in (place / protocol.EVENTS_NAME).read_text().splitlines()]
    assert left_in(directory) == {}
    output = (directory / "output").read_bytes().decode("utf-8", "replace")
    return Outcome(code, output, status, events, directory)


def drive(directory: Path, **fields: Any) -> Outcome:
    return outcome(directory, start(directory, write_driver(directory, **fields)))


def left_in(directory: Path) -> dict[int, str]:
    """The processes that work in `directory` or name it: process id and command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            where = os.readlink(process / "cwd")
        except OSError:
            continue
        if command and int(process.name) != os.getpid() and (str(directory) in command or where == str(directory)):
            found[int(process.name)] = command
    return found


def assert_nothing_left_in(directory: Path) -> None:
    """No process may be left; if one is, it is ended, so that it disturbs no other test."""
    left = left_in(directory)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory of which nothing may be left running."""
    yield tmp_path
    assert_nothing_left_in(tmp_path)


def test_three_ranks_know_who_they_are(place: Path) -> None:
    job = drive(place, run="echo $SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES $SKYPILOT_NODE_IPS", setup="echo set up")
    assert (job.code, job.states) == (0, ["PENDING", "SETTING_UP", "RUNNING", "SUCCEEDED"])
    assert job.codes == [0, 0, 0]
    for rank, name in enumerate(("0-head.log", "1-worker1.log", "2-worker2.log")):
        assert job.log(name) == "%d/3 127.0.0.1 127.0.0.2 127.0.0.3\n" % rank
    assert sorted(os.listdir(place / "logs"))[3:] == ["setup-head.log", "setup-worker1.log", "setup-worker2.log"]


def test_lines_carry_their_ranks_prefix_in_cyan(place: Path) -> None:
    job = drive(place, run="echo run; echo error >&2", setup="echo prepared")
    said = re.sub(r"pid=\d+", "pid=P", job.output).splitlines()
    cyan = "\x1b[36m%s\x1b[0m %s"
    for prefix, text in (
        ("(setup pid=P)", "prepared"),
        ("(setup pid=P, ip=127.0.0.2)", "prepared"),
        ("(head, rank=0, pid=P)", "run"),
        ("(head, rank=0, pid=P)", "error"),
        ("(worker1, rank=1, pid=P, ip=127.0.0.2)", "run"),
        ("(worker2, rank=2, pid=P, ip=127.0.0.3)", "error"),
    ):
        assert said.count(cyan % (prefix, text)) == 1


def test_one_node_has_one_log_and_the_tasks_name(place: Path) -> None:
    driver = write_driver(place, run="echo run", setup="echo prepared", num_nodes=1, task_name="train (é) {x} 100%")
    job = outcome(place, start(place, driver, NO_COLOR="1"))
    assert sorted(os.listdir(place / "logs")) == ["run.log", "setup-head.log"]
    assert re.search(r"^\(train \(é\) {x} 100%, pid=\d+\) run$", job.output, re.MULTILINE)
    assert re.search(r"^\(setup pid=\d+\) prepared$", job.output, re.MULTILINE) and "\x1b" not in job.output


def test_the_first_failing_rank_ends_the_gang_with_its_code(place: Path) -> None:
    begun = time.monotonic()
    job = drive(place, run="[ $SKYPILOT_NODE_RANK = 1 ] && { sleep 0.2; echo broken; exit 7; }; sleep 60; true")
    assert (job.code, job.status["state"], job.codes) == (7, "FAILED", [143, 7, 143])
    assert "rank 1 on worker1 failed first (exit code 7)" in job.plain and "    | broken" in job.plain
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize("program_exits", [0, 9])
def test_a_cancelled_gang_saves_its_checkpoints(place: Path, program_exits: int) -> None:
    (place / "train.py").write_text(CHECKPOINT.replace("EXIT", str(program_exits)))
    driver = start(place, write_driver(place, run="%s train.py" % sys.executable, grace_s=10.0))
    logs = [place / "logs" / name for name in ("0-head.log", "1-worker1.log", "2-worker2.log")]
    eventually(lambda: all(log.exists() and log.read_text() for log in logs))
    driver.send_signal(signal.SIGTERM)
    job = outcome(place, driver)
    assert (job.code, job.status["state"]) == (143, "CANCELLED")
    assert [(place / ("mark-%d" % rank)).read_text() for rank in range(3)] == ["TERM checkpoint "] * 3


def test_a_program_that_ignores_term_is_killed_after_its_grace(place: Path) -> None:
    driver = start(place, write_driver(place, run="trap '' TERM; touch up-$SKYPILOT_NODE_RANK; sleep 60", grace_s=0.5))
    eventually(lambda: len(list(place.glob("up-*"))) == 3)
    begun = time.monotonic()
    driver.send_signal(signal.SIGTERM)
    job = outcome(place, driver)
    assert (job.code, job.status["state"]) == (143, "CANCELLED")
    assert time.monotonic() - begun < 5


def test_what_a_script_leaves_behind_is_gone_with_the_gang(place: Path) -> None:
    job = drive(place, run="setsid sleep 60 & (sleep 60 &) ; sleep 60 & echo done")
    assert job.code == 0 and job.log("0-head.log") == "done\n"


@pytest.mark.parametrize("script, setup", [("true", "true"), ("exit 3", None), ("true", "exit 4"), (None, None)])
def test_only_the_outcome_is_kept(place: Path, script: str | None, setup: str | None) -> None:
    drive(place, run=script, setup=setup, env_vars={"TOKEN": "s3cr3t"}, one_shot=True)
    kept = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    job = ".gangrun/local/job/"
    wanted = [job + name for name in ("events.jsonl", "exit_code", "lock", "status.json")]
    assert [name for name in kept if not name.startswith("logs/")] == [*wanted, "output"]
    assert not [path for path in place.rglob("*") if path.is_file() and "s3cr3t" in path.read_text()]


def test_a_killed_launcher_leaves_no_rank_behind_g8(place: Path) -> None:
    driver = start(place, write_driver(place, run="touch up-$SKYPILOT_NODE_RANK; sleep 60", grace_s=1.0))
    eventually(lambda: len(list(place.glob("up-*"))) == 3)
    children = Path("/proc/%d/task/%d/children" % (driver.pid, driver.pid)).read_text().split()
    assert len(children) == 1
    os.kill(int(children[0]), signal.SIGKILL)
    assert driver.wait(20) != 0
    eventually(lambda: not left_in(place), 5, "processes are left")
    status = outcome(place, driver).status
    assert (status["state"], status["reason"]) == ("FAILED_DRIVER", "srun was killed by signal 9")


def test_a_killed_driver_leaves_no_rank_behind(place: Path) -> None:
    driver = start(place, write_driver(place, run="touch up-$SKYPILOT_NODE_RANK; sleep 60", grace_s=1.0))
    eventually(lambda: len(list(place.glob("up-*"))) == 3)
    driver.kill()
    driver.wait()
    eventually(lambda: not left_in(place), 5, "processes are left")


def test_a_second_driver_of_a_job_is_refused(place: Path) -> None:
    path = write_driver(place, run="touch up; until [ -e stop ]; do sleep 0.05; done", num_nodes=1)
    first = start(place, path)
    eventually((place / "up").exists)
    second = subprocess.run([sys.executable, path], env={**os.environ, "HOME": str(place)}, capture_output=True)
    (place / "stop").touch()
    assert second.returncode == protocol.EXIT_INFRASTRUCTURE
    assert b"another driver of this job is running (pid %d" % first.pid in second.stderr
    assert outcome(place, first).code == 0


# --- the launcher by itself, as srun


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "executor.local", *words], capture_output=True, text=True, timeout=30)


def test_the_launcher_tells_each_task_its_rank() -> None:
    said = launch("--nodes=3", "--exclusive", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME $SLURM_STEP_NODELIST")
    nodes = "127.0.0.1,127.0.0.2,127.0.0.3"
    assert said.returncode == 0
    assert sorted(said.stdout.splitlines()) == ["%d 127.0.0.%d %s" % (rank, rank + 1, nodes) for rank in range(3)]


def test_the_launcher_gives_the_highest_code() -> None:
    done = launch("--nodes=3", "sh", "-c", "exit $((SLURM_PROCID * 4))")
    assert done.returncode == 8
    assert sorted(done.stderr.splitlines()) == [
        "local: error: 127.0.0.%d: task %d: Exited with exit code %d" % (rank + 1, rank, rank * 4) for rank in (1, 2)
    ]


def test_the_launcher_gives_out_the_last_line_without_its_newline() -> None:
    assert launch("printf", "no end").stdout == "no end"


@pytest.mark.parametrize("words", [["--nodes=0", "true"], ["--nodes=x", "true"], ["--nodes=2"], []])
def test_the_launcher_refuses_what_it_cannot_do(words: list[str]) -> None:
    with pytest.raises(UsageError):
        local.parse(words)
    done = launch(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
