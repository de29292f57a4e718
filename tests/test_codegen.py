"""From the calls of an orchestrator to a driver that runs: order, complaints, command lines, the very text."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codegen import Bundle, CallOrderError, Job, Resources, SlurmCodeGen, SpecError, render_driver, render_sbatch
from codegen.render import python_literal
from codegen.slurm import sbatch_options, step_options
from executor import protocol
from tests.test_local_launcher import place, start

__all__ = ["place"]  # a fixture
GOLDEN = Path(__file__).parent / "golden"
MINIMAL: dict[str, Any] = {"job_id": "7", "num_nodes": 2, "log_dir": "logs"}
# Relative paths and no names of a cluster: these drivers run as they are, in any directory.
FULL = Job(
    job_id="7",
    num_nodes=3,
    log_dir="logs",
    cluster_ips=("127.0.0.1", "127.0.0.2", "127.0.0.3"),
    slurm_job_id="4711",
    task_name="train it",
    setup='echo "set up $SKYPILOT_SETUP_NODE_RANK"\n',
    run='# "quotes" and {braces}\necho "rank $SKYPILOT_NODE_RANK says $GREETING"\n',
    env_vars={"GREETING": 'it\'s "fine"'},
    setup_env_vars={"MODE": "fast"},
    secrets={"TOKEN": "s3cr3t"},
    resources=Resources(cpus=2),
    grace_s=10.0,
)
DRIVERS = {"full.py": FULL, "minimal.py": Job(**MINIMAL, launcher="local", run="echo hello")}
QUOTES = """it's "all" '''three''' \"\"\"kinds\"\"\" `and` $(more)"""
LINES = "one\ntwo\r\n\n three\t\x0b\x0c\x1c\u2028four\\n"
TEXTS = [
    QUOTES,
    LINES,
    "{{ job }} {% raw %} {0} %s %% ${X} {",
    "\\ \\\\ \\x00 \\",
    "né 漢 😀 \u202e \x7f \x85 \udcff",
    "  ",
    "",
]


def calls(gen: SlurmCodeGen, *names: str, **changes: Any) -> SlurmCodeGen:
    """Make the named calls on a generator, with usual arguments."""
    setup = {"num_nodes": 2, "resources": {"CPU": 1}, "cluster_ips": ["10.0.0.1", "10.0.0.2"], "env_vars": {}}
    task = {"num_nodes": 2, "bash_script": "true", "task_name": "train", "resources": {"CPU": 1}, "log_dir": "/l"}
    arguments: dict[str, dict[str, Any]] = {
        "add_prologue": {"job_id": 7},
        "add_setup": {**setup, "log_dir": "/l", "setup_cmd": "true"},
        "add_task": task,
        "add_epilogue": {},
    }
    for name in names:
        known = {key: value for key, value in changes.items() if key in arguments[name]}
        getattr(gen, name)(**{**arguments[name], **known})
    return gen


ALL = ("add_prologue", "add_setup", "add_task", "add_epilogue")


# --- the calls


def test_four_calls_make_a_driver() -> None:
    driver = calls(SlurmCodeGen("4711"), *ALL).build()
    assert driver.startswith("#!/usr/bin/env python3\n") and "slurm_job_id='4711'" in driver


@pytest.mark.parametrize("missing", ALL)
def test_a_missing_call_is_named(missing: str) -> None:
    with pytest.raises(CallOrderError, match=r"%s\(\) must be called before" % missing):
        calls(SlurmCodeGen("1"), *[name for name in ALL if name != missing]).build()


@pytest.mark.parametrize("repeated", ALL)
def test_a_repeated_call_is_named(repeated: str) -> None:
    with pytest.raises(CallOrderError, match=r"%s\(\) was called twice" % repeated):
        calls(SlurmCodeGen("1"), *ALL, repeated)


@pytest.mark.parametrize(
    "resources, cpus, gpus",
    [({}, 1, 0), ({"CPU": 0.5}, 1, 0), ({"CPU": 3.1, "H100": 8}, 4, 8), ({"CPU": 2, "memory": 64, "A100": 0.5}, 2, 1)],
)
def test_fractions_are_rounded_up(resources: dict[str, float], cpus: int, gpus: int) -> None:
    job = calls(SlurmCodeGen("1"), *ALL, resources=resources).job()
    assert (job.resources.cpus, job.resources.gpus) == (cpus, gpus)


def test_a_driver_is_the_same_every_time_and_build_can_be_repeated() -> None:
    gen = calls(SlurmCodeGen("1"), *ALL)
    assert gen.build() == gen.build() == calls(SlurmCodeGen("1"), *ALL).build() == gen.bundle().driver


# --- complaints


BAD: dict[str, list[Any]] = {
    "job_id": ["", "a/b", "..", ".hidden", "a b", "a\n", "é", 7],
    "slurm_job_id": ["", "1/2", "$(id)"],
    "num_nodes": [0, -1, 2.5, "2", True, None],
    "log_dir": ["", "a\0b", None],
    "task_name": ["", "a\nb", "x" * 201, "\x1b[2J"],
    "cluster_ips": [("a", "a"), ("", "b"), ("a,b", "c")],
    "env_vars": [{name: "x"} for name in ("", "1A", "A B", "A=B", "é", "A-B")],
    "env_vars['A']": [None, [], {}, "a\0b", "x" * protocol.LONGEST_ENV_BYTES],
    "setup_env_vars": [{"A": "a\0b"}],
    "secrets": [{"A": "x" * 131070}],
    "run": [7, "a\0b"],
    "setup": ["a\0b"],
    **dict.fromkeys(("workdir", "cluster_home", "python", "container_name"), ["a\0b"]),
    "launcher": ["mpirun"],
    **dict.fromkeys(("grace_s", "liveness_timeout_s"), [-1.0, math.nan, math.inf, "30"]),
}


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in BAD.items() for value in values],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_field_is_named_before_anything_starts(field: str, value: object) -> None:
    given = {"env_vars": {"A": value}} if field == "env_vars['A']" else {field: value}
    with pytest.raises(SpecError, match=r"^%s[\[=:]" % re.escape(field)) as error:
        Job(**{**MINIMAL, **given})
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "resources",
    [{"H100": 1, "A100": 1}, {"CPU": "many"}, {"CPU": -1}, {"CPU": math.nan}, {"H100": math.inf}, {"H100": True}],
)
def test_bad_resources_are_named(resources: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="^resources"):
        calls(SlurmCodeGen("1"), *ALL, resources=resources)


def test_more_nodes_than_addresses_is_an_error() -> None:
    with pytest.raises(SpecError, match="num_nodes=3: use 1 to 2, the nodes in cluster_ips"):
        calls(SlurmCodeGen("1"), *ALL, num_nodes=3).build()


# --- command lines


def facts(driver: str, directory: Path) -> dict[str, Any]:
    """What a driver knows before it runs."""
    path = directory / "driver.py"
    path.write_bytes(driver.encode("utf-8", "surrogateescape"))
    return runpy.run_path(str(path))


def test_the_run_step_takes_the_nodes_and_setup_shares_them(tmp_path: Path) -> None:
    known = facts(render_driver(FULL), tmp_path)
    common = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0", "--mem=0"]
    for srun, own in ((known["RUN_SRUN"], "--exclusive"), (known["SETUP_SRUN"], "--overlap")):
        assert srun[:2] == ["srun", "--jobid=4711"]
        assert {*common, own, "--cpus-per-task=2", "--gpus-per-node=0"} <= set(srun)
        assert len({"--exclusive", "--overlap"} & set(srun)) == 1 and "--unbuffered" not in srun
        assert all(word.startswith("-") for word in srun[1:])


def test_a_container_is_entered_by_every_step() -> None:
    gen = calls(SlurmCodeGen("4711", container_name="sky"), *ALL)
    for options in (step_options(gen.job(), is_setup) for is_setup in (False, True)):
        assert "--container-name=sky:exec" in options and "--container-remap-root" in options
    assert not [option for option in step_options(FULL, is_setup=False) if "container" in option]


@pytest.mark.parametrize(
    "gres, request_", [("gres/gpu:h100=8", "h100:2"), ("gres/gpu=8", "2"), ("", "2")], ids=["typed", "untyped", "none"]
)
def test_gpus_are_asked_for_by_the_type_that_the_job_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gres: str, request_: str
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'JobId=4711 JobName=x\n TresPerNode=%s'\n" % gres)
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (tmp_path, os.environ["PATH"]))
    job = Job(**MINIMAL, slurm_job_id="4711", cluster_ips=("a", "b"), run="true", resources=Resources(gpus=2))
    assert "--gpus-per-node=" + request_ in facts(render_driver(job), tmp_path)["RUN_SRUN"]


@pytest.mark.parametrize("run, setup", [(None, None), ("", " \n\t"), ("true", None), (None, "true"), ("true", "true")])
def test_only_what_is_asked_for_is_started(tmp_path: Path, run: str | None, setup: str | None) -> None:
    known = facts(
        render_driver(Job(**MINIMAL, launcher="local", slurm_job_id="1", cluster_ips=("a", "b"), run=run, setup=setup)),
        tmp_path,
    )
    assert ("RUN_SRUN" in known, "SETUP_SRUN" in known) == (run == "true", setup == "true")


def test_a_batch_script_becomes_the_driver(tmp_path: Path) -> None:
    driver = str(tmp_path / "my dir's (é) 100%j" / "driver.py")
    script = render_sbatch(FULL, driver, output="/l/100%/out put", extra=["--comment=it's"])
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --cpus-per-task=2\n" in script
    assert '#SBATCH --job-name="train it"\n' in script and '#SBATCH --output="/l/100%%/out put"\n' in script
    last = script.splitlines()[-1]
    assert (
        subprocess.check_output(["bash", "-c", last.replace("exec python3 -I -X utf8", "printf %s")]).decode() == driver
    )
    with pytest.raises(SpecError, match="line break"):
        render_sbatch(FULL, driver, output="a\nb")


# --- literals


@pytest.mark.parametrize("value", [*TEXTS, TEXTS, dict.fromkeys(TEXTS, QUOTES), None, 1.5, 2, [], {}, ()])
@pytest.mark.parametrize("indent", [0, 4])
def test_a_literal_means_its_value(value: object, indent: int) -> None:
    found = ast.literal_eval(python_literal(value, indent))
    assert found == (list(value) if value and isinstance(value, tuple) else value)


# --- the files


def test_a_bundles_files_are_its_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Bundle(FULL, render_driver(FULL)).write(str(tmp_path / "new" / "place"))
    finally:
        os.umask(old)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "place").iterdir()}
    names = (protocol.DRIVER_NAME, protocol.ARCHIVE_NAME, protocol.SECRETS_NAME)
    assert files == dict.fromkeys(names, 0o600)
    assert (tmp_path / "new" / "place").stat().st_mode & 0o777 == 0o700
    assert "s3cr3t" not in (tmp_path / "new" / "place" / protocol.DRIVER_NAME).read_text()


# --- the very text


@pytest.mark.parametrize("name", DRIVERS)
def test_the_drivers_text_is_as_it_was(name: str) -> None:
    assert render_driver(DRIVERS[name]) == (GOLDEN / name).read_text(), "run: python -m tests.test_codegen"


def test_the_full_golden_driver_runs(place: Path) -> None:
    """`srun` is a stand-in here: its own options are rendered as they are for the real one."""
    driver = Path(Bundle(FULL, (GOLDEN / "full.py").read_text()).write(str(place / "driver")))
    (place / "bin").mkdir()
    srun = place / "bin" / "srun"
    srun.write_text(
        "#!/bin/sh\nexec %s -I -S '%s/%s' local \"$@\"\n" % (sys.executable, driver.parent, protocol.ARCHIVE_NAME)
    )
    srun.chmod(0o755)
    assert start(place, str(driver), PATH="%s:%s" % (srun.parent, os.environ["PATH"])).wait(30) == 0
    assert (place / "logs" / "2-worker2.log").read_text() == 'rank 2 says it\'s "fine"\n'
    assert (place / "logs" / "setup-worker1.log").read_text() == "set up 1\n"
    status = json.loads((place / ".gangrun" / "4711" / "7" / protocol.STATUS_NAME).read_text())
    assert (status["state"], status["exit_code"], status["task_name"]) == ("SUCCEEDED", 0, "train it")


def test_the_minimal_golden_driver_runs(place: Path) -> None:
    driver = Bundle(DRIVERS["minimal.py"], (GOLDEN / "minimal.py").read_text()).write(str(place / "driver"))
    rank = {protocol.SLURM_JOB_ID: "1", protocol.SLURM_JOB_NODELIST: "127.0.0.[1-2]"}
    assert start(place, driver, **rank).wait(30) == 0
    assert (place / "logs" / "1-worker1.log").read_text() == "hello\n"


def test_a_driver_outside_of_an_allocation_says_so(place: Path) -> None:
    driver = Bundle(DRIVERS["minimal.py"], (GOLDEN / "minimal.py").read_text()).write(str(place / "driver"))
    done = subprocess.run([sys.executable, driver], capture_output=True, text=True)
    assert done.returncode != 0 and re.fullmatch(r"gangrun: SLURM_JOB_ID is not set: .*\n", done.stderr)


if __name__ == "__main__":
    for name, job in DRIVERS.items():
        (GOLDEN / name).write_text(render_driver(job))


def test_a_number_that_slurm_would_take_for_another_is_refused() -> None:
    """sbatch --cpus-per-task=4294967297 asks for one."""
    job = Job(job_id="1", num_nodes=1, log_dir="/logs", run="true", resources=Resources(cpus=2**32 + 1))
    with pytest.raises(SpecError, match="cpus=4294967297"):
        sbatch_options(job, "/out")
