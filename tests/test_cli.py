"""`gangrun` as a person meets it on a machine without Slurm: what it prints, and the code it ends with."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor import protocol
from gangrun import cli
from tests.test_local_launcher import assert_nothing_left_in

CHECKOUT = Path(__file__).resolve().parent.parent
TOOLS = "bash sh env cat sleep touch seq head".split()
TASK = """
name: hello
num_nodes: 2
envs: {WHO: world}
run: |
  echo "rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES says hello $WHO in $PWD"
"""


class Desk:
    """A directory with a PATH of its own, on which there is no srun."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or "/nonexistent")
        self.environ = {**os.environ, "PATH": str(self.bin), "HOME": str(directory), "PYTHONPATH": str(CHECKOUT)}

    def run(self, *words: str, module: str = "gangrun", **environ: str) -> subprocess.CompletedProcess[str]:
        """What is typed into a shell in this directory."""
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.directory,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=30,
        )

    def task(self, text: str = TASK, name: str = "task.yaml") -> str:
        (self.directory / name).write_text(text)
        return name

    def shim(self, name: str, text: str) -> None:
        (self.bin / name).write_text("#!/bin/sh\n" + text)
        (self.bin / name).chmod(0o755)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path)
    assert_nothing_left_in(tmp_path)


# --- gangrun run


def test_a_task_runs_on_local_nodes_and_says_so_in_one_line(desk: Desk) -> None:
    done = desk.run("run", desk.task())
    assert done.returncode == 0
    assert done.stderr == (
        "gangrun: no srun here, so the embedded local launcher runs 2 node(s) as process groups on this machine\n"
    )
    for rank in (0, 1):
        assert f"rank {rank} of 2 says hello world in {desk.directory}\n" in done.stdout
    assert "gangrun: job run-1 SUCCEEDED" in done.stdout


def test_the_jobs_code_is_the_commands(desk: Desk) -> None:
    done = desk.run("run", desk.task("num_nodes: 2\nrun: '[ $SKYPILOT_NODE_RANK = 0 ] || exit 7; sleep 30'"))
    assert done.returncode == 7 and "rank 1 on worker1 failed first (exit code 7)" in done.stdout


def test_a_failed_setup_gives_its_code_and_starts_no_script(desk: Desk) -> None:
    done = desk.run("run", desk.task("setup: exit 3\nrun: touch started"))
    assert done.returncode == 3 and "FAILED_SETUP" in done.stdout
    assert not (desk.directory / "started").exists()


@pytest.mark.parametrize("value", ["you", "a=b", "", 'it\'s "all" {x} $HOME', "line\nline"])
def test_env_replaces_and_adds(desk: Desk, value: str) -> None:
    task = desk.task("envs: {WHO: world}\nrun: printf '%s' \"$WHO/$MORE\" >said")
    done = desk.run("run", task, "--env", "WHO=" + value, "--env=MORE=é")
    assert done.returncode == 0 and (desk.directory / "said").read_text() == value + "/é"


def test_logs_go_where_they_are_wanted(desk: Desk) -> None:
    assert desk.run("run", desk.task(), "--log-dir", "my logs (é) 100%j").returncode == 0
    assert sorted(os.listdir(desk.directory / "my logs (é) 100%j")) == ["0-head.log", "1-worker1.log"]


def test_each_run_has_a_directory_of_its_own_and_no_secret_stays(desk: Desk) -> None:
    task = desk.task("secrets: {TOKEN: s3cr3t}\nrun: '[ $TOKEN = s3cr3t ]'")
    assert [desk.run("run", task).returncode for _ in range(2)] == [0, 0]
    runs = desk.directory / ".gangrun" / "local"
    assert sorted(os.listdir(runs)) == ["run-1", "run-2"]
    kept = [path for path in runs.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if "s3cr3t" in path.read_text()]


def test_a_work_directory_is_entered(desk: Desk) -> None:
    (desk.directory / "my work").mkdir()
    assert desk.run("run", desk.task("workdir: my work\nrun: touch here")).returncode == 0
    assert (desk.directory / "my work" / "here").exists()


def test_an_allocation_is_used_with_srun(desk: Desk) -> None:
    """`srun` here stands in for Slurm's: it passes its command to the local launcher."""
    desk.shim("srun", f'exec {sys.executable} -m executor.local "$@"\n')
    allocation = {
        protocol.SLURM_JOB_ID: "77",
        protocol.SLURM_JOB_NODELIST: "127.0.0.[1-2]",
        protocol.SLURM_JOB_NUM_NODES: "2",
    }
    done = desk.run("run", desk.task(), **allocation)
    assert (done.returncode, done.stderr) == (0, "") and "rank 1 of 2" in done.stdout
    assert (desk.directory / ".gangrun" / "77" / "run-1" / protocol.STATUS_NAME).exists()
    too_many = desk.run("run", desk.task("num_nodes: 3\nrun: x"), **allocation)
    assert (too_many.returncode, too_many.stderr) == (2, "gangrun: num_nodes=3: use at most 2, the nodes of job 77\n")


# --- what is wrong


@pytest.mark.parametrize(
    "words, said",
    [
        (["run"], "Missing argument 'TASK.yaml'"),
        (["run", "nothing.yaml"], "nothing.yaml"),
        (["run", "."], "is a directory"),
        (["run", "task.yaml", "more"], "more"),
        (["run", "task.yaml", "--env", "WHO"], "'WHO': use NAME=VALUE"),
        (["run", "task.yaml", "--env", "1A=x"], "1A"),
        (["run", "task.yaml", "--grace-s=soon"], "soon"),
        (["run", "task.yaml", "--grace-s=-1"], "-1"),
        (["run", "task.yaml", "--nosuch"], "--nosuch"),
        (["walk"], "No such command 'walk'"),
        (["--nosuch"], "--nosuch"),
        (["run", "bad.yaml"], "bad.yaml:2: unknown key 'runs' in task; allowed are name, num_nodes"),
        (["run", "tag.yaml"], "tag.yaml:1: "),
        (["run", "nowhere.yaml"], "workdir='/nonexistent/place': /nonexistent/place is not a directory"),
    ],
)
def test_a_usage_error_is_one_line_and_code_2(desk: Desk, words: list[str], said: str) -> None:
    desk.task()
    desk.task("name: x\nruns: y\n", "bad.yaml")
    desk.task("run: !include other\n", "tag.yaml")
    desk.task("run: x\nworkdir: /nonexistent/place\n", "nowhere.yaml")
    done = desk.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gangrun: ") and done.stderr.count("\n") == 1 and said in done.stderr


def test_a_login_node_is_no_place_for_a_task(desk: Desk) -> None:
    desk.shim("srun", "exit 9\n")
    done = desk.run("run", desk.task())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "run this inside salloc or sbatch" in done.stderr


def test_a_home_that_cannot_be_written_is_named(desk: Desk) -> None:
    (desk.directory / ".gangrun").write_text("in the way")
    done = desk.run("run", desk.task())
    assert done.returncode in (2, 125) and done.stderr.splitlines()[-1].startswith(
        "gangrun: cannot make a directory in"
    )
    assert str(desk.directory / ".gangrun") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text, said",
    [
        ("num_nodes: 1\nlog_dir: /l\n", "job_id is required"),
        ("job_id: 1\nlog_dir: /l\nnodes: 2\n", "job.yaml:3: unknown key 'nodes' in job; allowed are job_id, num_nodes"),
        ("job_id: 1\nnum_nodes: two\nlog_dir: /l\n", "job.yaml:2: num_nodes='two': use a whole number"),
        ("job_id: 1\nnum_nodes: 1\nlog_dir: /l\nresources: {gpu: 1}\n", "job.yaml:4: unknown key 'gpu' in resources"),
        ("job_id: 1\nnum_nodes: 1\nlog_dir: /l\nresources: {cpus: 0}\n", "cpus=0: use 1 or more"),
        ("job_id: 1\nnum_nodes: 1\nlog_dir: /l\nenv_vars: 7\n", "env_vars"),
        ("job_id: 1\nnum_nodes: 1\nlog_dir: /l\ngrace_s: soon\n", "grace_s"),
    ],
)
def test_a_bad_job_description_is_one_line_and_code_2(desk: Desk, text: str, said: str) -> None:
    done = desk.run(desk.task(text, "job.yaml"), module="codegen")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("codegen: job.yaml") and done.stderr.count("\n") == 1 and said in done.stderr


def test_codegen_prints_a_driver_or_writes_it_with_its_archive(desk: Desk) -> None:
    job = "job_id: 7\nnum_nodes: 1\nlog_dir: logs\nslurm_job_id: local\nlauncher: local\nrun: echo x\n"
    job += "cluster_ips: [127.0.0.1]\n"
    printed = desk.run(desk.task(job, "job.yaml"), module="codegen")
    written = desk.run("job.yaml", "-o", "out put", module="codegen")
    assert (printed.returncode, written.returncode) == (0, 0)
    driver = desk.directory / written.stdout.rstrip("\n")
    assert driver.read_text() == printed.stdout
    assert subprocess.run([sys.executable, str(driver)], cwd=desk.directory, env=desk.environ).returncode == 0
    assert (desk.directory / "logs" / "run.log").read_text() == "x\n"


# --- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_the_verbs(desk: Desk, words: list[str]) -> None:
    done = desk.run(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: gangrun") and "Run a task now" in done.stdout


def test_a_verbs_help_has_an_example(desk: Desk) -> None:
    done = desk.run("run", "--help")
    assert done.returncode == 0 and "Example:" in done.stdout and "--env NAME=VALUE" in done.stdout


@pytest.mark.parametrize("verb", sorted(cli.cli.commands))
def test_a_verbs_examples_stand_in_one_line_each(verb: str) -> None:
    """On a terminal of 80 columns a long one would be wrapped, and not run when it is copied."""
    written = re.findall(r"Example: +(.*)", cli.cli.commands[verb].help or "")
    shown = CliRunner().invoke(cli.cli, [verb, "--help"], terminal_width=80).output
    assert written and [example for example in written if f"  Example:  {example}\n" not in shown] == []


def test_the_version_is_told(desk: Desk) -> None:
    assert desk.run("--version").stdout == f"gangrun, version {protocol.VERSION}\n"


def test_a_later_run_takes_away_the_secrets_of_one_that_was_killed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    dead = home / ".gangrun" / "local" / "run-1"
    (dead / "attempt-0").mkdir(parents=True)
    for path in (dead / "secrets.json", dead / "attempt-0" / "run.env.json"):
        path.write_text('{"TOKEN": "s3cr3t"}')
    (dead / "lock").touch()
    task = tmp_path / "task.yaml"
    task.write_text("run: 'true'\n")
    argv = [sys.executable, "-m", "gangrun", "run", "--local", str(task)]
    done = subprocess.run(argv, env={**os.environ, "HOME": str(home)}, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in dead.iterdir()) == ["lock"]


@pytest.mark.parametrize("verb", [["--help"], ["queue", "-a"]])
def test_a_full_disk_behind_the_output_is_told_in_one_line(verb: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gangrun", *verb], stdout=full, stderr=subprocess.PIPE, text=True, cwd=CHECKOUT,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (125, "gangrun: No space left on device\n")


def test_a_group_is_not_run_as_a_task(tmp_path: Path) -> None:
    group = tmp_path / "group.yaml"
    group.write_text("name: g\nexecution: parallel\n---\nname: a\nrun: 'true'\n")
    argv = [sys.executable, "-m", "gangrun", "run", "--local", str(group)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT)
    assert done.returncode == 2 and "a job group, which only `gangrun launch` takes" in done.stderr


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["gangrun", "queue"]
runpy.run_module("gangrun", run_name="__main__")
"""


def test_ctrl_c_while_python_still_loads_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], cwd=CHECKOUT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("column", ["", ", weather TEXT"])
def test_records_of_another_version_are_told_as_that_and_left_alone(desk: Desk, column: str) -> None:
    path = desk.directory / ".local" / "state" / "gangrun" / "runs.db"
    path.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE hosts (host TEXT PRIMARY KEY{column})")
    done = desk.run("queue", XDG_STATE_HOME="")
    assert (done.returncode, done.stderr.count("\n")) == (125, 1)
    assert f"{path}: another version of gangrun keeps its records there; move it away" in done.stderr
