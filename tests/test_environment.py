"""What the script finds in its environment: all of the job, nothing of the step, every value byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from executor import environment, protocol
from executor.protocol import UsageError
from tests.solo import Solo
from tests.test_local_launcher import drive, place, start, write_driver

__all__ = ["place"]  # a fixture
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_JOB_CPUS_PER_NODE": "4(x3)",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CONF_SERVER": "ctl:6817",
    "SLURM_SUBMIT_DIR": "/home/ada",
    "SLURM_RESTART_COUNT": "1",
    "SLURMD_NODENAME": "n1",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
    "PATH": "/bin",
}
HOSTILE = {
    "QUOTES": """it's "all" '''three''' \"\"\"kinds\"\"\" `and` $(more)""",
    "BRACES": "{{ job }} {% raw %} {0} %s %d %j %% ${X} {",
    "LINES": "one\ntwo\r\n\n three\t\x0b\x0c\x1c\u2028four\\n",
    "BACKSLASHES": "\\ \\\\ \\x00 \\",
    "UNICODE": "né 漢字 😀 \u202e \x7f \x85",
    "BYTES": os.fsdecode(b"\xff\xfe latin \xe9"),
    "COMMAS": "0,1,2",
    "BLANKS": "  ",
    "NOTHING": "",
}


def seen(solo: Solo, *flags: str, **environ: str) -> dict[bytes, bytes]:
    """The environment of a script that the executor runs."""
    done = solo.run("cat /proc/$$/environ >seen", *flags, env=environ)
    assert done.returncode == 0, done.stderr
    return dict(pair.split(b"=", 1) for pair in (solo.directory / "seen").read_bytes().split(b"\0")[:-1])


# --- Slurm's variables


def test_the_jobs_variables_are_kept_c1() -> None:
    assert environment.without_step(JOB) == JOB


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NODELIST SLURM_STEP_NUM_TASKS SLURM_PROCID", id="C1 step"),
        pytest.param("SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE", id="C1 tasks"),
        pytest.param(
            "SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_UMASK SLURM_PRIO_PROCESS", id="C1 me"
        ),
        pytest.param("SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SRUN_DEBUG SLURM_LAUNCH_NODE_IPADDR", id="C1 srun"),
        pytest.param("SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE", id="C3 CPUs"),
        pytest.param("SLURM_MEM_BIND SLURM_MEM_BIND_TYPE SLURM_GPU_BIND SLURM_GPUS_ON_NODE", id="C3 others"),
        pytest.param("SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE", id="C4"),
        pytest.param("SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU SLURM_CPUS_ON_NODE", id="C5"),
        pytest.param("SLURM_DISTRIBUTION SLURM_OVERLAP SLURM_EXACT SLURM_EXCLUSIVE SLURM_KILL_BAD_EXIT", id="options"),
        pytest.param("SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0", id="C9"),
    ],
)
def test_a_nested_srun_is_not_confined_to_the_executors_step(step: str) -> None:
    assert environment.without_step({**JOB, **dict.fromkeys(step.split(), "1")}) == JOB


def test_a_step_on_some_nodes_gives_the_script_all_of_the_jobs_c1() -> None:
    step = {"SLURM_NODELIST": "n2", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1"}
    assert environment.without_step({**JOB, **step}) == JOB


def test_the_script_itself_sees_no_step(solo: Solo) -> None:
    job = {name: text for name, text in JOB.items() if name != protocol.SLURMD_NODENAME}
    found = seen(solo, **job, SLURM_CPU_BIND="verbose", SLURM_MEM_PER_NODE="50", SRUN_DEBUG="3")
    slurms = {os.fsdecode(name) for name in found if name.startswith((b"SLURM", b"SRUN"))}
    assert slurms == {"SLURM_OVERLAP", *(name for name in JOB if name.startswith("SLURM"))}
    assert found[b"CUDA_VISIBLE_DEVICES"] == b"0,1,2"


# --- the job's own variables


def test_later_layers_win_and_output_is_not_buffered_f7() -> None:
    layers = [{"A": "job", "B": "job"}, {"B": "identity"}]
    assert environment.for_script({"A": "site"}, layers) == {**environment.DEFAULTS, "A": "job", "B": "identity"}
    assert environment.DEFAULTS["PYTHONUNBUFFERED"] == "1"
    assert environment.for_script({"PYTHONUNBUFFERED": ""}, [])["PYTHONUNBUFFERED"] == ""
    assert environment.for_script({}, [{"PYTHONUNBUFFERED": "0"}])["PYTHONUNBUFFERED"] == "0"


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B", "é", "A\n", "A\0", "BASH_FUNC_x%%", "$(id)"])
def test_a_name_that_no_shell_can_use_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--env-vars: .* is not allowed") as error:
        environment.checked({name: "x"}, "--env-vars")
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("value", [None, [], {}, "a\0b", "x" * protocol.LONGEST_ENV_BYTES, "é" * 65535])
def test_a_value_that_no_environment_can_carry_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="--env-vars: .*NAME") as error:
        environment.checked({"NAME": value}, "--env-vars")
    assert len(str(error.value)) < 300


def test_the_longest_value_that_the_kernel_takes_arrives(solo: Solo) -> None:
    value = "x" * (protocol.LONGEST_ENV_BYTES - len("LONG=") - 1)
    (solo.directory / "vars.json").write_text(json.dumps({"LONG": value}))
    assert seen(solo, "--env-file=%s" % (solo.directory / "vars.json"))[b"LONG"] == value.encode()


def test_more_variables_than_the_kernel_takes_are_told_in_one_line(solo: Solo) -> None:
    (solo.directory / "vars.json").write_text(json.dumps({"V%d" % number: "x" * 100000 for number in range(30)}))
    done = solo.run("true", "--env-file=%s" % (solo.directory / "vars.json"))
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert done.stderr.count(b"\n") == 1 and b"Argument list too long" in done.stderr


def test_numbers_are_texts(solo: Solo) -> None:
    found = seen(solo, '--env-vars={"ONE": 1, "HALF": 0.5}')
    assert (found[b"ONE"], found[b"HALF"]) == (b"1", b"0.5")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env-vars={"], "--env-vars is not JSON"),
        (["--env-vars=[1]"], "--env-vars is a JSON list; give an object"),
        (["--env-vars="], "--env-vars is not JSON"),
        (['--env-vars={"A": null}'], "'A'='NoneType': use a string or a number"),
        (["--env-file=/nonexistent/vars"], "--env-file=/nonexistent/vars: No such file or directory"),
        (["--env-file=/dev/null"], "--env-file is not JSON"),
    ],
)
def test_variables_that_cannot_be_read_are_a_usage_error(solo: Solo, flags: list[str], words: str) -> None:
    done = solo.run("touch started", *flags)
    assert done.returncode == protocol.EXIT_USAGE and not (solo.directory / "started").exists()
    assert done.stderr.count(b"\n") == 1 and words in done.stderr.decode()


def test_a_file_of_variables_that_is_no_text_is_a_usage_error(solo: Solo) -> None:
    (solo.directory / "vars").write_bytes(b'{"A": "\xff"}')
    done = solo.run("true", "--env-file=%s" % (solo.directory / "vars"))
    assert done.returncode == protocol.EXIT_USAGE and done.stderr.count(b"\n") == 1


# --- byte for byte


@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C", "LANG": ""}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}],
    ids=["J11 C", "J11 utf8=0", "J11 POSIX"],
)
def test_values_keep_their_bytes_in_any_locale(solo: Solo, locale: dict[str, str]) -> None:
    values = {name: value for name, value in HOSTILE.items() if name != "BYTES"}
    found = seen(solo, "--env-vars=" + json.dumps(values), SITE=os.fsdecode(b"latin \xe9 \xff"), **locale)
    assert {name: found[name.encode()] for name in values} == {name: text.encode() for name, text in values.items()}
    assert found[b"SITE"] == b"latin \xe9 \xff"


def test_a_name_that_is_no_text_passes_from_the_site_to_the_script(solo: Solo) -> None:
    assert seen(solo, **{os.fsdecode(b"N\xe9"): "1"})[b"N\xe9"] == b"1"


def test_hostile_values_reach_the_script_byte_for_byte_j12(place: Path) -> None:
    shown = "".join("printf '%%s\\0' \"$%s\"\n" % name for name in HOSTILE)
    directory = place / "my dir (é) 100%j 'q' \"d\" {x} $HOME\nline"
    directory.mkdir()
    job = drive(
        directory,
        run=shown + "pwd\n: '\"\"\"' \"'''\" '{{ }} {% %}' \\\n\necho \"né 漢 😀\"",
        setup=shown,
        env_vars=HOSTILE,
        setup_env_vars=HOSTILE,
        task_name='it\'s {{ a }} "task" 100% né',
        workdir=str(directory),
    )
    assert job.code == 0, job.output
    values = b"".join(os.fsencode(value) + b"\0" for value in HOSTILE.values())
    tail = os.fsencode(directory) + "\nné 漢 😀\n".encode()
    assert (directory / "logs" / "1-worker1.log").read_bytes() == values + tail
    assert (directory / "logs" / "setup-worker2.log").read_bytes() == values


def test_a_hostile_pythonpath_reaches_the_script_and_neither_driver_nor_rank(place: Path) -> None:
    hostile = place / "hostile"
    (hostile / "executor").mkdir(parents=True)
    for module in "executor/__init__ signal socket json select hostlist colorama sitecustomize".split():
        (hostile / (module + ".py")).write_text("raise SystemExit('shadowed by ' + __file__)\n")
    (hostile / "sitecustomize.py").unlink()  # the interpreter itself would end of it, before our first line
    driver = start(place, write_driver(place, run="echo $PYTHONPATH", workdir=str(hostile)), PYTHONPATH=str(hostile))
    assert driver.wait(30) == 0, (place / "output").read_text()
    assert (place / "logs" / "2-worker2.log").read_text() == f"{hostile}\n"


# --- a home, a TMPDIR, a directory that are not what they should be


@pytest.mark.parametrize("home", [None, "/nonexistent", ""], ids=["J17 unset", "J17 missing", "J17 empty"])
def test_one_rank_needs_no_home(solo: Solo, home: str | None) -> None:
    environ = {**solo.environ(), "TMPDIR": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}
    environ.pop("HOME")
    if home is not None:
        environ["HOME"] = home
    done = subprocess.run(solo.argv("echo here"), env=environ, cwd=solo.directory, capture_output=True)
    assert (done.returncode, done.stderr, solo.log()) == (0, b"", b"here\n")


def test_a_directory_that_was_removed_under_the_executor_is_told_in_one_line_e7(solo: Solo) -> None:
    (solo.directory / "gone").mkdir()
    command = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *solo.argv("pwd; true")]
    done = subprocess.run(command, env=solo.environ(), cwd=solo.directory, capture_output=True)
    assert b"Traceback" not in done.stderr and done.stderr.count(b"\n") <= 1
