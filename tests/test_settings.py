"""config.yaml, and who has the last word: flag, task, host, default."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from codegen import Resources, SpecError
from gangrun import settings
from gangrun.requests import Gpus
from gangrun.settings import Chosen, HostSettings, Settings, choose, load, resolve
from gangrun.task import Slurm, Task

FULL = """\
default_host: lab
hosts:
  lab:
    partition: gpu
    account: team
    qos: normal
    constraint: h100&ib
    time: 4h
    workdir: /scratch/me
    python: /usr/bin/python3.11
    sbatch_args: [--mem-per-cpu=4G, --exclusive]
    poll_interval: 30s
    grace: 1m
  local:
    time: 1h
  bare:
"""
LAB = HostSettings(
    partition="gpu",
    account="team",
    qos="normal",
    constraint="h100&ib",
    time=4 * 3600,
    workdir="/scratch/me",
    python="/usr/bin/python3.11",
    sbatch_args=("--mem-per-cpu=4G", "--exclusive"),
    poll_interval=30,
    grace=60,
)
HOSTS = Settings("/home/me/.config/gangrun/config.yaml", "lab", {"lab": LAB, "local": HostSettings(time=3600)})
TASK = """\
name: train
resources:
  cpus: 4
  memory: 32
  accelerators: H100:8
slurm:
  time: 2h
  partition: big
  account: mine
  qos: high
  constraint: ib
  sbatch_args: [--nice=5]
  requeue: false
  warn_signal: USR1@120
  grace: 10s
run: echo
"""


def place(directory: Path, text: str) -> Path:
    (directory / "gangrun").mkdir()
    (directory / "gangrun" / "config.yaml").write_text(text)
    return directory / "gangrun" / "config.yaml"


def loaded(directory: Path, text: str) -> Settings:
    place(directory, text)
    return load({"XDG_CONFIG_HOME": str(directory)})


def complaint(directory: Path, text: str) -> str:
    """What is said about the settings, after the file's name: one line."""
    path = place(directory, text)
    with pytest.raises(SpecError) as error:
        load({"XDG_CONFIG_HOME": str(directory)})
    said = str(error.value)
    assert said.startswith(f"{path}:") and "\n" not in said
    return said[len(f"{path}:") :]


# --- the file


def test_all_that_a_file_can_say_is_read(tmp_path: Path) -> None:
    found = loaded(tmp_path, FULL)
    assert found.path == str(tmp_path / "gangrun" / "config.yaml")
    assert found.default_host == "lab"
    assert found.hosts == {"lab": LAB, "local": HostSettings(time=3600), "bare": HostSettings()}


def test_a_host_without_settings_has_none_and_no_host_is_this_machine() -> None:
    assert HOSTS.host("elsewhere") == HostSettings()
    assert HOSTS.host(None) == HOSTS.host("local") == HostSettings(time=3600)


@pytest.mark.parametrize("text", ["", "\n\n", "# hosts:\n  # lab:\n", "hosts:", "default_host:\nhosts: {}"])
def test_everything_is_optional(tmp_path: Path, text: str) -> None:
    assert (loaded(tmp_path, text).default_host, load({"XDG_CONFIG_HOME": str(tmp_path)}).hosts) == (None, {})


@pytest.mark.parametrize(
    "made", [None, "gangrun", ".config"], ids=["nothing", "a file gangrun", "HOME is no directory"]
)
def test_a_file_that_is_not_there_says_nothing(tmp_path: Path, made: str | None) -> None:
    home = tmp_path
    if made == "gangrun":
        (tmp_path / ".config").mkdir()
        (tmp_path / ".config" / "gangrun").write_text("")
    if made == ".config":
        home = tmp_path / "null"
        home.write_text("")
    assert load({"HOME": str(home)}) == Settings(str(home / ".config" / "gangrun" / "config.yaml"))


@pytest.mark.parametrize("xdg", [None, "", "relative/config"])
def test_without_a_usable_xdg_config_home_the_file_is_in_the_home(tmp_path: Path, xdg: str | None) -> None:
    (tmp_path / ".config").mkdir()
    place(tmp_path / ".config", FULL)
    environ = {"HOME": str(tmp_path)} if xdg is None else {"HOME": str(tmp_path), "XDG_CONFIG_HOME": xdg}
    assert load(environ).default_host == "lab"


def test_xdg_config_home_wins_over_the_home(tmp_path: Path) -> None:
    place(tmp_path, "default_host: there")
    assert load({"HOME": "/nonexistent", "XDG_CONFIG_HOME": str(tmp_path)}).default_host == "there"


READ_AS_NOBODY = """
import os, sys
from codegen import SpecError
from gangrun.settings import load
if os.getuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
try:
    load({"XDG_CONFIG_HOME": sys.argv[1]})
except SpecError as error:
    print(error)
"""


@pytest.mark.parametrize("closed", ["gangrun/config.yaml", "gangrun"])
def test_a_file_that_cannot_be_read_is_an_error_and_not_a_missing_one(closed: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # tmp_path is for its owner alone
        os.chmod(directory, 0o755)
        path = place(Path(directory), FULL)
        (Path(directory) / closed).chmod(0)
        command = [sys.executable, "-c", READ_AS_NOBODY, directory]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        (Path(directory) / closed).chmod(0o700)
    assert done.stdout == f"{path}: Permission denied; make it readable for you, or move it away\n"


def test_a_directory_in_its_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "gangrun" / "config.yaml").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"config\.yaml: Is a directory; .* move it away"):
        load({"XDG_CONFIG_HOME": str(tmp_path)})


HOST_KEYS = "partition, account, qos, constraint, time, sbatch_args, grace, workdir, python, poll_interval"
FORMS = "use 90s, 30m, 4h, 1d, 1h30m, 02:00:00 or 1-02:00:00"
NAMES = "use letters, digits and _ . , @ / + -, with a letter or a digit first"


@pytest.mark.parametrize(
    "text, said",
    [
        ("default_host: a\nhost: b", "2: unknown key 'host' in settings; allowed are default_host, hosts"),
        ("hosts:\n  lab:\n    partitions: x", f"3: unknown key 'partitions' in hosts.lab; allowed are {HOST_KEYS}"),
        ("hosts:\n  lab:\n    requeue: true", f"3: unknown key 'requeue' in hosts.lab; allowed are {HOST_KEYS}"),
        ("hosts: lab", "1: hosts: use a mapping of names to values"),
        ("hosts:\n  lab: gpu", "2: hosts.lab: use a mapping of names to values"),
        ("hosts:\n  lab: {}\n  lab: {}", "3: key 'lab' stands here again (first in line 2); " + settings.MEND),
        ("hosts:\n  lab:\n    time: soon", f"3: time='soon': {FORMS}"),
        ("hosts:\n  lab:\n    time: 90", "3: time=90: a number has no unit; use 90s or 90m"),
        ("hosts:\n  lab:\n    poll_interval: 0s", "3: poll_interval='0s': use a time of 1s to 3650d"),
        ("hosts:\n  lab:\n    grace: -1", f"3: grace=-1: {FORMS}"),
        ("hosts:\n  lab:\n    partition: a b", f"3: partition='a b': {NAMES}"),
        ("hosts:\n  lab:\n    qos: '--x'", f"3: qos='--x': {NAMES}"),
        ('hosts:\n  lab:\n    partition: "a\\n#SBATCH --x"', f"3: partition='a\\n#SBATCH --x': {NAMES}"),
        ("hosts:\n  lab:\n    workdir: scratch", "3: workdir='scratch': use the absolute path of a directory on the"),
        ("hosts:\n  lab:\n    workdir: ~/runs", "3: workdir='~/runs': use the absolute path of a directory on the"),
        ('hosts:\n  lab:\n    workdir: "/a\\nb"', "3: workdir='/a\\nb': use the absolute path of a directory on the"),
        ("hosts:\n  lab:\n    python: -c", "3: python='-c': use a Python interpreter of the cluster, such as /usr/"),
        ("hosts:\n  lab:\n    python: 3.11", "3: python=3.11: use a Python interpreter of the cluster, such as /usr/"),
        ("hosts:\n  lab:\n    sbatch_args: --mem=4G", "3: sbatch_args='--mem=4G': use a list of sbatch's long options"),
        ("hosts:\n  lab:\n    sbatch_args: [--wrap=id]", "3: sbatch_args='--wrap=id': not allowed here: gangrun sets"),
        ("hosts:\n  -oProxyCommand=id: {}", "2: host='-oProxyCommand=id': use a Host of ~/.ssh/config, or local for"),
        ("default_host: a b", "1: default_host='a b': use a Host of ~/.ssh/config, or local for this machine"),
        ("default_host: -V", "1: default_host='-V': use a Host of ~/.ssh/config, or local for this machine"),
        ("default_host: [a]", "1: default_host=['a']: use a Host of ~/.ssh/config, or local for this machine"),
        ("default_host: a\nhosts: [", "2: not valid YAML: "),
        ("- lab", "1: a settings file is a mapping of keys to values; " + settings.MEND),
    ],
)
def test_each_complaint_names_line_key_value_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, text).startswith(said)


def test_broken_yaml_is_told_with_its_line_and_how_to_mend_it(tmp_path: Path) -> None:
    said = complaint(tmp_path, "default_host: lab\nhosts:\n\tlab: {}\n")
    start = "3: not valid YAML: found character '\\t' that cannot start any token"
    assert said == f"{start}; mend that line, or move the file away: every setting is optional"


@pytest.mark.parametrize(
    "text, line",
    [
        ("default_host: lab\napi_token: s3cr3t", 2),
        ("secrets: {HF: s3cr3t}", 1),
        ("hosts:\n  lab:\n    time: 4h\n    Password: s3cr3t", 4),
        ("hosts:\n  lab:\n    WANDB_API_KEY: s3cr3t", 3),
    ],
)
def test_a_secret_is_refused_with_the_place_for_secrets_and_never_shown(tmp_path: Path, text: str, line: int) -> None:
    said = complaint(tmp_path, text)
    assert said.startswith(f"{line}: ") and "looks like a secret" in said and "--secret NAME" in said
    assert "s3cr3t" not in said


@pytest.mark.parametrize("text", ["hosts: s3cr3t", "hosts:\n  token: s3cr3t", "hosts:\n  lab: [s3cr3t]"])
def test_a_value_in_the_place_of_a_mapping_is_not_shown(tmp_path: Path, text: str) -> None:
    assert "s3cr3t" not in complaint(tmp_path, text)


def test_a_host_may_be_named_like_a_secret(tmp_path: Path) -> None:
    assert loaded(tmp_path, "hosts:\n  secretlab: {time: 1h}").hosts == {"secretlab": HostSettings(time=3600)}


# --- who has the last word


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    (tmp_path / "task.yaml").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return Task.from_file("task.yaml")


def test_the_first_that_says_something_is_chosen() -> None:
    assert choose((None, "a"), (0, "b"), (1, "c"), default=2) == Chosen(0, "b")
    assert choose((None, "a"), default=2) == Chosen(2, "default")


FLAGS: list[tuple[str, str, Any, Any, str]] = [  # key, field, as typed, as meant, option
    ("time", "time", "30m", 1800, "--time"),
    ("partition", "partition", "debug", "debug", "--partition"),
    ("account", "account", "other", "other", "--account"),
    ("qos", "qos", "low", "low", "--qos"),
    ("constraint", "constraint", "a100", "a100", "--constraint"),
    ("gpus", "gpus", "a100:2", Gpus("a100", 2), "--gpus"),
    ("gpus", "gpus", Gpus(None, 2), Gpus(None, 2), "--gpus"),
    ("grace", "grace_s", "5s", 5, "--grace"),
    ("grace", "grace_s", 7, 7, "--grace"),
    ("warn_signal", "warn_signal", "USR2@60", "USR2@60", "--warn-signal"),
    ("requeue", "requeue", True, True, "--requeue"),
    ("requeue", "requeue", False, False, "--no-requeue"),
]


@pytest.mark.parametrize("key, name, typed, meant, option", FLAGS)
def test_a_flag_wins_over_everything(task: Task, key: str, name: str, typed: Any, meant: Any, option: str) -> None:
    assert getattr(resolve({key: typed}, task, "lab", HOSTS), name) == Chosen(meant, option)


@pytest.mark.parametrize(
    "name, value, line",
    [
        ("cpus", 4, 3),
        ("memory_gb", 32.0, 4),
        ("gpus", Gpus("H100", 8), 5),
        ("time", 7200, 7),
        ("partition", "big", 8),
        ("account", "mine", 9),
        ("qos", "high", 10),
        ("constraint", "ib", 11),
        ("requeue", False, 13),
        ("warn_signal", "USR1@120", 14),
        ("grace_s", 10, 15),
    ],
)
def test_a_task_wins_over_the_host_and_its_line_is_told(task: Task, name: str, value: Any, line: int) -> None:
    none_given = dict.fromkeys(settings.FLAG_CHECKS)
    assert getattr(resolve(none_given, task, "lab", HOSTS), name) == Chosen(value, f"task.yaml:{line}")


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("time", "time", 14400),
        ("partition", "partition", "gpu"),
        ("account", "account", "team"),
        ("qos", "qos", "normal"),
        ("constraint", "constraint", "h100&ib"),
        ("sbatch_args", "sbatch_args", ("--mem-per-cpu=4G", "--exclusive")),
        ("python", "python", "/usr/bin/python3.11"),
        ("workdir", "workdir", "/scratch/me"),
        ("grace_s", "grace", 60),
    ],
)
def test_a_host_wins_over_the_default(name: str, key: str, value: Any) -> None:
    found = getattr(resolve({}, Task(), "lab", HOSTS), name)
    assert found == Chosen(value, f"config.yaml: hosts.lab.{key}")


def test_what_nobody_says_is_left_to_the_cluster_or_has_a_default() -> None:
    found = resolve({}, Task(), "elsewhere", HOSTS)
    said = {"cpus": "1", "workdir": "~", "grace_s": "30s", "requeue": "true"}
    assert found.explain() == [(name, said.get(name, "-"), "default") for name, _, _ in found.explain()]
    assert found.grace_s.value == 30.0 and found.sbatch_args.value == ()


def test_a_requeue_that_is_the_default_but_said_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("slurm:\n  requeue: true\n")
    task = Task.from_file(str(tmp_path / "task.yaml"))
    assert resolve({}, task, None, Settings()).requeue == Chosen(True, f"{tmp_path}/task.yaml:2")
    assert resolve({}, Task(), None, Settings()).requeue == Chosen(True, "default")


def test_no_host_is_this_machine() -> None:
    assert resolve({}, Task(), None, HOSTS).time == Chosen(3600, "config.yaml: hosts.local.time")


def test_sbatch_arguments_are_joined_and_the_last_word_comes_last(task: Task) -> None:
    found = resolve({"sbatch_args": ("--nice=1", "--mem=64G")}, task, "lab", HOSTS).sbatch_args
    assert found.value == (
        "--exclusive",
        "--nice=5",
        "--nice=1",
        "--mem=64G",
    )  # sbatch refuses two --mem... in one call
    assert found.source == "config.yaml: hosts.lab.sbatch_args, task.yaml:12, --sbatch-arg"
    assert resolve({"sbatch_args": ()}, Task(), "lab", HOSTS).sbatch_args.value == LAB.sbatch_args


def test_what_is_shown_tells_each_value_and_its_source(task: Task) -> None:
    assert resolve({"time": "26h", "sbatch_args": ("--comment=a b",)}, task, "lab", HOSTS).explain() == [
        ("time", "1-02:00:00", "--time"),
        ("partition", "big", "task.yaml:8"),
        ("account", "mine", "task.yaml:9"),
        ("qos", "high", "task.yaml:10"),
        ("constraint", "ib", "task.yaml:11"),
        ("gpus", "H100:8", "task.yaml:5"),
        ("cpus", "4", "task.yaml:3"),
        ("memory_gb", "--mem-per-cpu=4G", "config.yaml: hosts.lab.sbatch_args, task.yaml:12, --sbatch-arg"),
        (
            "sbatch_args",
            "--mem-per-cpu=4G --exclusive --nice=5 '--comment=a b'",
            "config.yaml: hosts.lab.sbatch_args, task.yaml:12, --sbatch-arg",
        ),
        ("python", "/usr/bin/python3.11", "config.yaml: hosts.lab.python"),
        ("workdir", "/scratch/me", "config.yaml: hosts.lab.workdir"),
        ("grace_s", "10s", "task.yaml:15"),
        ("requeue", "false", "task.yaml:13"),
        ("warn_signal", "USR1@120", "task.yaml:14"),
    ]


def test_a_task_made_by_a_program_is_its_own_source() -> None:
    made = Task(resources=Resources(cpus=2, gpus=4), memory_gb=1.0, slurm=Slurm(time=60, requeue=False))
    found = resolve({}, made, "lab", HOSTS)
    assert (found.time, found.requeue) == (Chosen(60, "task"), Chosen(False, "task"))
    assert (found.cpus, found.memory_gb) == (Chosen(2, "task"), Chosen(1.0, "task"))
    assert found.gpus == Chosen(Gpus(None, 4), "task")


@pytest.mark.parametrize("kind, meant", [("gpu", None), ("GPU", None), ("H100", "H100"), (None, None)])
def test_gpus_of_any_kind_have_no_kind(kind: str | None, meant: str | None) -> None:
    task = Task(resources=Resources(gpus=2, gpu_type=kind))
    assert resolve({}, task, None, Settings()).gpus.value == Gpus(meant, 2)


def test_no_gpus_are_no_request() -> None:
    assert resolve({}, Task(resources=Resources(gpus=0, gpu_type="H100")), None, Settings()).gpus.value is None


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"time": "90"}, "--time='90': a number has no unit; use 90s or 90m"),
        ({"partition": "a b"}, f"--partition='a b': {NAMES}"),
        ({"partition": ""}, f"--partition='': {NAMES}"),
        ({"constraint": "a;b"}, "--constraint='a;b': use letters"),
        ({"gpus": "cpu"}, "--gpus='cpu': leave it out for a job without GPUs"),
        ({"grace": "0s"}, "--grace='0s': use a time of 1s to 3650d"),
        ({"warn_signal": "TERM@1"}, "--warn-signal='TERM@1': use USR1@120 or USR2@120"),
        ({"sbatch_args": ("--array=1",)}, "--sbatch-arg='--array=1': not allowed here: arrays are not supported"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        resolve(flags, Task(), "lab", HOSTS)
    assert str(error.value).startswith(said)


def test_sbatch_arguments_that_ask_for_gpus_stand_for_those_of_the_task(task: Task) -> None:
    found = resolve({"sbatch_args": ("--gres=gpu:h100:4",)}, task, "elsewhere", HOSTS)
    assert found.twin("gpus") == "--gres=gpu:h100:4" and found.twin("memory_gb") is None
    assert ("gpus", "--gres=gpu:h100:4", "task.yaml:12, --sbatch-arg") in found.explain()


@pytest.mark.parametrize("args", [("--gres=nvme:1",), ("--gres=gpu:2", "--gres=nvme:1")])
def test_a_gres_without_gpus_cannot_take_the_tasks_gpus_away(task: Task, args: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as error:
        resolve({"sbatch_args": args}, task, "elsewhere", HOSTS)
    source = "(task.yaml:12, --sbatch-arg)"
    assert str(error.value) == (
        f"sbatch_args: --gres=nvme:1 {source} would replace H100:8 of task.yaml:5; write gpu:H100:8 there too"
    )
    assert resolve({"sbatch_args": ("--gres=nvme:1",)}, Task(), "elsewhere", HOSTS).gpus.value is None


def test_gpus_asked_for_twice_on_the_command_line_are_a_contradiction() -> None:
    with pytest.raises(SpecError, match=r"--gpus='2': --gpus-per-node=1 stands in --sbatch-arg; leave one of them out"):
        resolve({"gpus": "2", "sbatch_args": ("--gpus-per-node=1",)}, Task(), None, Settings())
