"""Values, scripts, paths, homes and limits that are not what one would wish for."""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from codegen import Bundle, Job, SpecError, render_driver
from codegen.archive import executor_archive
from codegen.slurm import render_sbatch
from tests.bench import CHECKOUT, Bench, Outcome, Running, eventually
from tests.faults.conftest import Fault
from tests.minislurm.fixtures import BootCluster
from tests.test_environment import HOSTILE

KIND = "Environment and input"
LOGS = ("0-head.log", "1-worker1.log", "2-worker2.log")
HOSTILE_NAME = "my dir (é) 100%j 'q' \"d\" {x} {{ y }} $HOME\nline"
NAME = 'it\'s {{ a }} "task" 100%j'
NO_PASSWD = "setpriv --reuid=54321 --regid=54321 --clear-groups"
MODULES = "signal socket json select hostlist colorama os typing".split()


def told(outcome: Outcome, words: str) -> str:
    """The one line of ours that holds these words."""
    found = [line for line in outcome.plain.splitlines() if words in line]
    assert len(found) >= 1 and "Traceback" not in outcome.plain, outcome.plain
    return found[0]


def by_sbatch(bench: Bench, **fields: Any) -> Outcome:
    """Two nodes run a job by the batch script that we render for it."""
    values = {"log_dir": str(bench.directory / "logs"), "python": sys.executable, **fields}
    job = Job(job_id="job", num_nodes=2, **values)
    driver = Bundle(job, render_driver(job)).write(str(bench.directory / "driver"))
    extra = (f"--output={bench.directory}/job-%j.out", "--nodelist=n1,n2")
    text = render_sbatch(job, driver, "out", extra)
    return Running(bench, bench.cluster.sbatch(text, cwd=bench.directory, env=bench.environ), "job").wait()


# --- values


def test_hostile_values(bench: Bench, fault: Fault) -> None:
    row = fault("values with quotes, newlines, `$`, backslashes, backticks, commas, braces, bytes that are no UTF-8")
    shown = "".join("printf '%%s\\0' \"$%s\"\n" % name for name in HOSTILE)
    outcome = bench.drive(run=shown, setup=shown, env_vars=HOSTILE, setup_env_vars=HOSTILE, secrets={"S": "a'b\n$c"})
    values = b"".join(os.fsencode(value) + b"\0" for value in HOSTILE.values())
    assert outcome.code == 0, outcome.output
    assert all((bench.directory / "logs" / name).read_bytes() == values for name in (*LOGS, "setup-worker2.log"))
    row.ended(outcome, bench)
    row.saw("byte for byte on all nodes, in setup and script", outcome.code)


def test_hostile_values_of_the_site(bench: Bench, fault: Fault) -> None:
    row = fault("the same values in the environment of sbatch")
    bench.environ.update({name: value for name, value in HOSTILE.items() if name != "BYTES"})
    outcome = bench.drive(run="cat /proc/$$/environ > seen-$SKYPILOT_NODE_RANK")
    for rank in range(3):
        seen = (bench.directory / f"seen-{rank}").read_bytes().split(b"\0")
        assert all(f"{n}={bench.environ[n]}".encode() in seen for n in HOSTILE if n != "BYTES")
    row.ended(outcome, bench)
    row.saw("byte for byte on all nodes", outcome.code)


def test_exported_functions(bench: Bench, fault: Fault) -> None:
    row = fault("functions exported by the batch script (`export -f`), with quotes and newlines in them")
    body = 'greet() {\n  echo "it\'s $1"\n}\nexport -f greet\n'
    assert bench.run_batch(body + bench.executor("greet fine")).code == 0
    assert all((bench.directory / "logs" / name).read_text() == "it's fine\n" for name in LOGS)
    row.saw("the script can call them on every node", 0)


def test_a_value_of_120_kb(bench: Bench, fault: Fault) -> None:
    row = fault("a value of 120 kB")
    outcome = bench.drive(run='printf %s "$LONG" | cksum', env_vars={"LONG": "é" * 60_000}, setup="echo ${#LONG}")
    assert outcome.code == 0 and len({outcome.log(name) for name in LOGS}) == 1
    assert outcome.log(LOGS[0]).split()[1] == "120000"
    row.ended(outcome, bench)
    row.saw("whole on every node", 0)


def test_a_value_of_200_kb(bench: Bench, fault: Fault) -> None:
    row = fault("a value of 200 kB: more than the kernel's limit for one variable")
    with pytest.raises(SpecError, match="use at most 131071 bytes") as error:
        bench.submit(run="true", env_vars={"LONG": "x" * 200_000})
    row.saw(str(error.value), 2)


def test_names_that_are_no_identifiers(bench: Bench, fault: Fault) -> None:
    row = fault("a variable named A-B")
    with pytest.raises(SpecError, match="is not allowed"):
        bench.submit(run="true", env_vars={"A-B": "1"})
    outcome = bench.run_batch(bench.executor("touch started", "--env-vars='{\"A-B\": 1}'", srun="--nodes=3"))
    line = told(outcome, "'A-B' is not allowed")
    assert outcome.code == 2 and not (bench.directory / "started").exists()
    row.saw(line, outcome.code)


# --- scripts


@pytest.mark.parametrize(
    "words, script, code, log",
    [
        ("a script with CRLF line ends", "mkdir -p sub\r\ncd sub\r\nif true; then\r\nexit 3\r\nfi\r\n", 3, ""),
        ("a script with a byte order mark and a shebang", "\ufeff#!/bin/bash -eu\necho marked\n", 0, "marked\n"),
        ("a script without a newline at its end", "echo first\necho no end", 0, "first\nno end\n"),
        ("`#!/bin/bash -e` and a command that fails", "#!/bin/bash -e\necho on\nfalse\necho off\n", 1, "on\n"),
    ],
)  # fmt: skip
def test_odd_scripts(bench: Bench, fault: Fault, words: str, script: str, code: int, log: str) -> None:
    row = fault(words)
    outcome = bench.drive(run=script, setup=script if code == 0 else None, nodes=1)
    assert outcome.code == code and outcome.log("run.log") == log, outcome.output
    row.ended(outcome, bench)


def test_a_script_for_another_interpreter(bench: Bench, fault: Fault) -> None:
    row = fault("`#!/usr/bin/env python3` as the script's first line")
    outcome = bench.drive(run="#!/usr/bin/env python3\nopen('started', 'w')\n")
    assert (outcome.code, outcome.status["state"]) == (2, "FAILED_DRIVER")
    assert "scripts run under bash" in outcome.status["reason"] and not (bench.directory / "started").exists()
    row.ended(outcome, bench)


# --- names, paths, locale


@pytest.mark.parametrize("coerced", [True, False], ids=["coerced", "ASCII"])
def test_hostile_names_in_the_c_locale(bench: Bench, fault: Fault, coerced: bool) -> None:
    words = "LC_ALL=C" + ("" if coerced else " with PYTHONUTF8=0 and PYTHONCOERCECLOCALE=0")
    row = fault(words + "; spaces, quotes, `%j`, braces, unicode, a newline in all paths and names")
    bench.environ.update(LC_ALL="C", LANG="", **({} if coerced else {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}))
    place = bench.directory / HOSTILE_NAME
    place.mkdir()
    fields = {"log_dir": str(place / "logs"), "cluster_home": str(place), "workdir": str(place)}
    outcome = by_sbatch(bench, run="pwd; echo é漢", setup="echo é", task_name="it's 100%j {{ é }}", **fields)
    assert outcome.code == 0, outcome.output
    assert (place / "logs" / LOGS[1]).read_bytes() == f"{place}\né漢\n".encode()
    job = next(place.glob(".gangrun/*/job"))
    assert json.loads((job / "status.json").read_text())["state"] == "SUCCEEDED"
    assert not list(job.glob("attempt-*"))
    row.saw("SUCCEEDED; logs and records under these names", outcome.code)


def test_hostile_names_of_job_and_task(bench: Bench, fault: Fault) -> None:
    row = fault("names of job and task with spaces, quotes, braces, `%j`, `$(...)`, unicode")
    name = NAME + " $(touch gotcha) né"
    run = 'printf %s "$SLURM_JOB_NAME"'
    outcome = bench.drive(run=run, nodes=1, task_name=name, sbatch="-J " + shlex.quote(name))
    assert outcome.code == 0 and not (bench.directory / "gotcha").exists()
    assert outcome.log("run.log") == name and f"({name}, pid=" in outcome.plain
    row.ended(outcome, bench)
    row.saw("SUCCEEDED: the script's SLURM_JOB_NAME, and the prefix in the stream", outcome.code)


# --- homes and users


@pytest.mark.parametrize("home", ["-u HOME", "HOME=/nonexistent", "HOME="], ids=["unset", "missing", "empty"])
def test_without_a_home(bench: Bench, fault: Fault, home: str) -> None:
    row = fault(f"`env {home}`, an XDG_RUNTIME_DIR and a TMPDIR that do not exist; --cluster-home-dir given")
    command = bench.executor("echo here", f"--cluster-home-dir={bench.directory}")
    # slurmstepd makes a TMPDIR that is not there: it must not be a place that other tests want to miss.
    variables = f"TMPDIR={bench.directory}/tmp XDG_RUNTIME_DIR=/nonexistent"
    outcome = bench.run_batch(command.replace("srun", f"env {home} {variables} srun", 1))
    assert outcome.code == 0 and outcome.output.count("here") == 3 and "gangrun: " not in outcome.output
    row.saw("the job is as usual", 0)
    row.check_nothing_left(bench)


def test_a_home_that_cannot_be_written(bench: Bench, fault: Fault) -> None:
    row = fault("HOME is read-only, step started by hand")
    outcome = bench.run_batch("export HOME=/proc/sys\n" + bench.executor("echo here"))
    assert outcome.code == 0 and outcome.output.count("here") == 3
    row.saw(told(outcome, "the ranks will not wait for each other"), 0)
    row.check_nothing_left(bench)


def test_a_driver_without_a_usable_home(bench: Bench, fault: Fault) -> None:
    row = fault("HOME is read-only, with a driver")
    bench.environ["HOME"] = "/proc/sys"
    outcome = bench.drive(run="touch started")
    assert outcome.code == 125 and not (bench.directory / "started").exists()
    row.saw(told(outcome, "cannot write the job's directory /proc/sys/.gangrun"), 125)


@pytest.mark.parametrize("has_home", [True, False], ids=["home given", "no home"])
def test_a_user_without_a_passwd_entry(bench: Bench, fault: Fault, has_home: bool) -> None:
    row = fault("no HOME and a uid without a passwd entry" + ("; --cluster-home-dir given" if has_home else ""))
    archive = bench.directory / "gangrun.pyz"
    archive.write_bytes(executor_archive())
    bench.directory.chmod(0o777)
    flags = [f"--cluster-home-dir={bench.directory}"] if has_home else []
    program = f"{NO_PASSWD} env -u HOME -u USER -u LOGNAME /usr/bin/python3 -I -S {archive}"
    command = bench.executor("id -u; whoami || :", *flags).replace(f"{sys.executable} -m executor.slurm", program)
    outcome = bench.run_batch(command)
    assert outcome.code == 0 and outcome.log(LOGS[2]).startswith("54321\n"), outcome.output
    words = "" if has_home else told(outcome, "give --cluster-home-dir")
    row.saw(words or "the job is as usual", 0)
    row.check_nothing_left(bench)


# --- the user's Python


def test_a_work_directory_full_of_our_modules(bench: Bench, fault: Fault) -> None:
    row = fault("a work directory and a PYTHONPATH with its own executor/, signal.py, socket.py, json.py")
    place = bench.directory / "shadow"
    (place / "executor").mkdir(parents=True)
    for module in [*MODULES, "executor/__init__", "executor/slurm"]:
        (place / f"{module}.py").write_text("raise SystemExit('shadowed by ' + __file__)\n")
    bench.environ["PYTHONPATH"] = str(place)
    outcome = bench.drive(run="echo $PYTHONPATH; pwd", setup="echo set up", workdir=str(place))
    assert outcome.code == 0, outcome.output
    assert outcome.log(LOGS[1]) == f"{place}\n{place}\n"
    row.ended(outcome, bench)


@pytest.mark.parametrize(
    "variable", ["PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONOPTIMIZE"]
)
def test_the_users_python_variables(bench: Bench, fault: Fault, variable: str) -> None:
    row = fault(f"{variable} of the user, set to nonsense, in the environment of sbatch")
    value = {"PYTHONINSPECT": "1", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}.get(variable, "/nonexistent")
    bench.environ[variable] = value
    outcome = by_sbatch(bench, run=f"echo ${variable}", setup="true")
    assert outcome.code == 0 and outcome.log(LOGS[1]) == value + "\n", outcome.output
    row.ended(outcome, bench)


def test_another_python3_first_in_path(bench: Bench, fault: Fault) -> None:
    row = fault("the first python3 in PATH is another one, which only fails")
    (bench.directory / "bin").mkdir()
    (bench.directory / "bin" / "python3").write_text("#!/bin/sh\nexit 77\n")
    (bench.directory / "bin" / "python3").chmod(0o755)
    bench.environ["PATH"] = f"{bench.directory}/bin:{bench.environ['PATH']}"
    outcome = bench.drive(run="python3; [ $? = 77 ]", setup="true", nodes=2)
    assert outcome.code == 0, outcome.output
    row.ended(outcome, bench)
    row.saw("SUCCEEDED: nodes use the driver's interpreter, the script finds its own", 0)


# --- input, limits, directories


def test_the_driver_swallows_no_input(bench: Bench, fault: Fault) -> None:
    row = fault("a batch script with a here-document loop around the driver")
    assert bench.drive(run="cat; echo ran", nodes=2).code == 0
    driver = f"{sys.executable} {bench.directory}/driver/driver.py"
    outcome = bench.run_batch(f"while read name; do echo [$name]; {driver}; done <<END\na\nb\nc\nEND", nodes=2)
    assert outcome.code == 0 and all(word in outcome.output for word in ("[a]", "[b]", "[c]"))
    assert outcome.log(LOGS[1]).splitlines().count("ran") == 4
    row.saw("three rounds of three; the scripts read an empty input", 0)
    row.check_nothing_left(bench)


def test_srun_by_hand_swallows_no_input_when_told(bench: Bench, fault: Fault) -> None:
    row = fault("a here-document loop around `srun --input=none ... executor` typed by hand")
    command = bench.executor("cat; echo ran", srun="--nodes=2 --input=none")
    outcome = bench.run_batch(f"while read name; do echo [$name]; {command}; done <<END\na\nb\nc\nEND", nodes=2)
    assert outcome.code == 0 and "[c]" in outcome.output and outcome.log(LOGS[1]).splitlines().count("ran") == 3
    row.saw("three rounds of three (without --input=none srun itself takes the rest of the input)", 0)


def test_limits_of_the_login_node(bench: Bench, own_cluster: BootCluster, fault: Fault) -> None:
    row = fault("`ulimit -n 256` on the login node, carried over by Slurm (PropagateResourceLimits)")
    bench = Bench(own_cluster(nodes=2, gpus=0, extra_conf="PropagateResourceLimits=NOFILE"), bench.directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        job = bench.submit(run="ulimit -Sn; ulimit -n $(ulimit -Hn); ulimit -Sn", setup="true", nodes=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    outcome = job.wait()
    assert outcome.code == 0 and outcome.log(LOGS[1]).split() == ["256", str(hard)], outcome.output
    row.ended(outcome, bench)
    assert "gangrun: 256 open files are allowed here" in outcome.plain
    row.saw("256 open files are allowed here; `ulimit -n $(ulimit -Hn)` in the script raises it", 0)


def give_private_tmp(bench: Bench, node: str, size: str) -> None:
    """A /tmp of its own for a node; what it needs of the old one stays where it is."""
    kept = " ".join(str(path) for path in (bench.directory, bench.cluster.root, CHECKOUT) if path.parts[1] == "tmp")
    script = "mount -t tmpfs old /mnt; mkdir /mnt/tmp; mount --bind /tmp /mnt/tmp; "
    script += f"mount -t tmpfs -o size={size},mode=1777 tmp /tmp; "
    script += f"for path in {kept}; do mkdir -p $path; mount --rbind /mnt$path $path; done"
    bench.cluster.run(node, ["sh", "-ec", script], cwd="/")


def left_in_tmp(bench: Bench, node: str) -> list[str]:
    found = bench.cluster.run(node, ["find", "/tmp", "-xdev", "-type", "f"], cwd="/").stdout.split()
    return [path for path in found if Path(path).name != "fill"]


def test_every_node_has_its_own_tmp(bench: Bench, own_cluster: BootCluster, fault: Fault) -> None:
    """IDEALLab/EngiBench#173, DataBiosphere/toil#4395: what nodes share was put where each sees its own."""
    row = fault("every node has its own /tmp; XDG_RUNTIME_DIR points nowhere")
    bench = Bench(own_cluster(nodes=3, gpus=0), bench.directory)
    for node in bench.cluster.nodes:
        give_private_tmp(bench, node, "1m")
    bench.environ["XDG_RUNTIME_DIR"] = "/run/user/nobody"
    job = bench.submit(run="echo up; until [ -e go ]; do sleep 0.1; done", setup="true", secrets={"S": "s"})
    eventually(lambda: all(job.log(name) for name in LOGS), 30)
    assert [left_in_tmp(bench, node) for node in bench.cluster.nodes] == [[], [], []]
    (bench.directory / "go").touch()
    outcome = job.wait()
    assert outcome.code == 0, outcome.output
    row.ended(outcome, bench)
    row.saw("SUCCEEDED: nothing of ours is in /tmp while it runs", outcome.code)


def test_a_full_tmp(bench: Bench, own_cluster: BootCluster, fault: Fault) -> None:
    """TUM-DAML/seml#94, nf-core/scdownstream#58."""
    row = fault("/tmp is full on the head and on a worker, and TMPDIR of the login node does not exist there")
    bench = Bench(own_cluster(nodes=3, gpus=0), bench.directory)
    for node in ("n1", "n2"):
        give_private_tmp(bench, node, "64k")
        bench.cluster.run(node, ["dd", "if=/dev/zero", "of=/tmp/fill", "bs=4k"], cwd="/", check=False)
    bench.environ["TMPDIR"] = "/proc/nowhere"
    outcome = bench.drive(run="echo here", setup="echo set up", secrets={"S": "s"})
    assert outcome.code == 0 and all(outcome.log(name) == "here\n" for name in LOGS), outcome.output
    row.ended(outcome, bench)


def test_a_work_directory_that_one_node_lacks(bench: Bench, fault: Fault) -> None:
    row = fault("the work directory is missing on one node")
    work = bench.directory / "private" / "work"
    work.mkdir(parents=True)
    bench.cluster.run("n2", ["mount", "-t", "tmpfs", "empty", work.parent], cwd="/")
    outcome = bench.drive(run="pwd; sleep 4531", workdir=str(work))
    bench.cluster.run("n2", ["umount", "-l", work.parent], cwd="/")
    assert (outcome.code, outcome.status["state"]) == (2, "FAILED_DRIVER"), outcome.output
    assert f"rank 1 on worker1 could not run the script: work directory {work}" in outcome.status["reason"]
    row.ended(outcome, bench, "sleep 4531")
    row.seen = row.seen.replace(str(bench.directory), "~")
