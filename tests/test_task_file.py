"""A task file: what it may say, and where exactly it is wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from codegen import Resources, SpecError
from gangrun.task import Slurm, Task

FULL = """
name: train
num_nodes: 2
resources:
  cpus: 4+
  memory: 32
  accelerators: H100:8
envs:
  EPOCHS: 3
  RATE: 0.5
  NAME: "it's {a} %s\\nname"
secrets:
  TOKEN: s3cr3t
workdir: ~/work
setup: |
  pip install .
run: |
  echo "$NAME"
"""


def task(directory: Path, text: str, **overrides: str) -> Task:
    (directory / "task.yaml").write_text(textwrap.dedent(text))
    return Task.from_file(str(directory / "task.yaml"), overrides)


def complaint(directory: Path, text: str, **overrides: str) -> str:
    """What is said about a task file, after the file's name."""
    with pytest.raises(SpecError) as error:
        task(directory, text, **overrides)
    path, said = str(directory / "task.yaml:"), str(error.value)
    assert said.startswith(path) and "\n" not in said
    return said[len(path) :]


# --- what it may say


def test_a_full_task_is_read(tmp_path: Path) -> None:
    found = task(tmp_path, FULL)
    assert (found.name, found.num_nodes, found.workdir, found.memory_gb) == ("train", 2, "~/work", 32.0)
    assert found.resources == Resources(cpus=4, gpus=8, gpu_type="H100")
    assert found.envs == {"EPOCHS": "3", "RATE": "0.5", "NAME": "it's {a} %s\nname"}
    assert found.secrets == {"TOKEN": "s3cr3t"}
    assert (found.setup, found.run) == ("pip install .\n", 'echo "$NAME"\n')


@pytest.mark.parametrize("text", ["run: true x", "setup: echo", "name: x", "resources:\nrun: echo"])
def test_everything_has_a_default(tmp_path: Path, text: str) -> None:
    found = task(tmp_path, text)
    assert (found.num_nodes, found.resources, found.envs, found.workdir) == (1, Resources(), {}, None)


@pytest.mark.parametrize(
    "text, gpus, kind",
    [("H100:8", 8, "H100"), ("A100-80GB:2", 2, "A100-80GB"), ("H100", 1, "H100"), ("{V100: 4}", 4, "V100")],
)
def test_accelerators_are_a_name_and_a_count(tmp_path: Path, text: str, gpus: int, kind: str) -> None:
    found = task(tmp_path, "resources:\n  accelerators: %s\n" % text)
    assert (found.resources.gpus, found.resources.gpu_type) == (gpus, kind)


@pytest.mark.parametrize("text, cpus", [("4", 4), ("4+", 4), ("0.5", 1), ("2.1", 3)])
def test_cpus_are_rounded_up(tmp_path: Path, text: str, cpus: int) -> None:
    assert task(tmp_path, "resources: {cpus: %s}" % text).resources.cpus == cpus


@pytest.mark.parametrize("text", ["32", "32+", "32GB", "32gb", "32G"])
def test_memory_is_in_gigabytes(tmp_path: Path, text: str) -> None:
    assert task(tmp_path, "resources: {memory: %s}" % text).memory_gb == 32.0


def test_a_task_for_skypilots_slurm_is_one_for_ours(tmp_path: Path) -> None:
    assert task(tmp_path, "resources: {cpus: 2, infra: slurm}") == task(tmp_path, "resources: {cpus: 2}")


def test_variables_given_with_the_command_win_and_add(tmp_path: Path) -> None:
    found = task(tmp_path, "envs:\n  A: file\n  B:\n", B="given", C="more")
    assert found.envs == {"A": "file", "B": "given", "C": "more"}


SLURM = """
resources:
  accelerators: H100:8
slurm:
  time: 1-02:00:00
  partition: gpu,long
  account: team
  qos: high
  constraint: h100&ib
  sbatch_args: [--mem-per-cpu=4G, --exclude=n1]
  requeue: false
  warn_signal: USR1@120
  grace: 1m30s
"""


def test_a_full_slurm_section_is_read(tmp_path: Path) -> None:
    assert task(tmp_path, SLURM).slurm == Slurm(
        time=26 * 3600,
        partition="gpu,long",
        account="team",
        qos="high",
        constraint="h100&ib",
        sbatch_args=("--mem-per-cpu=4G", "--exclude=n1"),
        requeue=False,
        warn_signal="USR1@120",
        grace=90,
    )


@pytest.mark.parametrize("text", ["run: a", "slurm:", "slurm: {}", "slurm: {time: , sbatch_args: , requeue: }"])
def test_nothing_of_a_slurm_section_is_needed(tmp_path: Path, text: str) -> None:
    assert task(tmp_path, text).slurm == Slurm()
    assert Slurm().requeue and Slurm().sbatch_args == () and Slurm().time is None


def test_a_task_knows_the_lines_of_what_it_asks_for(tmp_path: Path) -> None:
    found, path = task(tmp_path, SLURM), str(tmp_path / "task.yaml")
    assert (found.sources["accelerators"], found.sources["time"]) == (f"{path}:3", f"{path}:5")
    assert task(tmp_path, "run: a").sources == {}


def test_where_a_task_was_read_makes_no_other_task(tmp_path: Path) -> None:
    assert task(tmp_path, "slurm: {qos: a}") == task(tmp_path, "\n\nslurm:\n  qos: a")


# --- where it is wrong: line, key, value, what is allowed


@pytest.mark.parametrize(
    "text, said",
    [
        ("run: a\nnum_node: 2", "2: unknown key 'num_node' in task; allowed are name, num_nodes, resources, envs, "),
        (
            "resources:\n  cpus: 1\n  gpus: 2",
            "3: unknown key 'gpus' in resources; allowed are cpus, memory, accelerators",
        ),
        ("run: a\nname: b\nrun: c", "3: key 'run' stands here again (first in line 1)"),
        ("resources:\n  cpus: 1\n  cpus: 2", "3: key 'cpus' stands here again (first in line 2)"),
        ("\nnum_nodes: 0", "2: num_nodes=0: use a whole number of 1 or more"),
        ("num_nodes: 4294967297", "1: num_nodes=4294967297: no Slurm has more than 65536 nodes"),
        ("num_nodes: two", "1: num_nodes='two': use a whole number of 1 or more"),
        ("num_nodes: 2.5", "1: num_nodes=2.5: use a whole number of 1 or more"),
        ("num_nodes: true", "1: num_nodes=True: use a whole number of 1 or more"),
        ("name: [a]", "1: name=['a']: use a text"),
        ("run: a\nsetup: [pip, install]", "2: setup=['pip', 'install']: use a bash script"),
        ("run: 7", "1: run=7: use a bash script"),
        ("workdir: 7", "1: workdir=7: use a directory"),
        ("resources: 4", "1: resources=4: use a mapping"),
        ("envs: [A=1]", "1: envs=['A=1']: use a mapping"),
        ("resources:\n  cpus: many", "2: cpus='many': use a number such as 4 or '4+'"),
        ("resources:\n  cpus: 0", "2: cpus=0: use a number"),
        ("resources:\n  cpus: -1", "2: cpus=-1: use a number"),
        ("resources:\n  memory: 32TB", "2: memory='32TB': use gigabytes such as 32, '32+' or 32GB"),
        ("resources:\n  accelerators: 8", "2: accelerators=8: use a name and a count such as H100:8"),
        ("resources:\n  accelerators: H100:many", "2: accelerators='H100:many': use a name and a count such as H100:8"),
        ("resources:\n  accelerators: [H100]", "2: accelerators=['H100']: use a name and a count such as H100:8"),
        (
            "resources:\n  accelerators: {H100: 1, A100: 1}",
            "2: resources: at most one accelerator type is allowed, found ['A100', 'H100']",
        ),
        ("resources:\n  accelerators: {H100: x}", "2: resources['H100']='x': use a number, 0 or more"),
        (
            "resources:\n  cpus: 1\n  infra: kubernetes",
            "3: infra='kubernetes': gangrun runs tasks on Slurm; use slurm, or leave it out",
        ),
        ("run: a\nenvs:\n  A: 1\n  B:\n", "4: envs: B has no value; give one here or with --env B=VALUE"),
        ("run: a\nenvs:\n  A: 1\n  1B: x\n", "4: envs['1B']"),
        ("envs:\n  A: 1\n  B: [1]\n", "3: envs['B']='list': use a string or a number"),
        ("secrets:\n  A: 1\n  B C: x\n", "3: secrets['B C']"),
        ("secrets:\n  TOKEN:\n", "2: secrets: TOKEN has no value"),
        ("run: a\nslurm: gpu", "2: slurm='gpu': use a mapping"),
        (
            "slurm:\n  qos: a\n  walltime: 4h",
            "3: unknown key 'walltime' in slurm; allowed are time, partition, account, qos, constraint, sbatch_args, "
            "requeue, warn_signal, grace",
        ),
        ("slurm:\n  time: 4x", "2: time='4x': use 90s, 30m, 4h, 1d, 1h30m, 02:00:00 or 1-02:00:00"),
        ("slurm:\n  time: 90", "2: time=90: a number has no unit; use 90s or 90m"),
        ("slurm:\n  time: 12:00:00", "2: time=43200: a number has no unit; use 43200s or 43200m (for 12:00:00 write "),
        ("slurm:\n  qos: a\n  grace: 0s", "3: grace='0s': use a time of 1s to 3650d"),
        ("slurm:\n  partition: a b", "2: partition='a b': use letters, digits and _ . , @ / + -, with a letter or "),
        ("slurm:\n  account: 0123", "2: account=83: use a text, in quotes where YAML takes it for something else: "),
        ("slurm:\n  qos: no", "2: qos=False: use a text, in quotes where YAML takes it for something else: "),
        ("slurm:\n  constraint: a b", "2: constraint='a b': use letters, digits, _ . , @ / + - and & | ( ) [ ] * :, "),
        ("slurm:\n  requeue: maybe", "2: requeue='maybe': use true or false"),
        ("slurm:\n  warn_signal: TERM@60", "2: warn_signal='TERM@60': use USR1@120 or USR2@120"),
        ("slurm:\n  sbatch_args: --mem=4G", "2: sbatch_args='--mem=4G': use a list of sbatch's long options, such as"),
        ("slurm:\n  sbatch_args: [-p, gpu]", "2: sbatch_args='-p': use sbatch's long options with their values, such"),
        ("slurm:\n  sbatch_args: [--array=1-4]", "2: sbatch_args='--array=1-4': not allowed here: arrays are not supp"),
        ("run: a\na: [", "2: not valid YAML"),
        ("run: a\n\tname: b", "2: not valid YAML: found character '\\t'"),
        ("- run", "1: a task file is a mapping of keys to values"),
        ("", "1: a task file is a mapping of keys to values"),
        ("just text", "1: a task file is a mapping of keys to values"),
    ],
)
def test_each_complaint_names_line_key_value_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, text).startswith(said)


def test_a_secrets_value_is_in_no_complaint(tmp_path: Path) -> None:
    for text in ("secrets:\n  A B: s3cr3t\n", "secrets: s3cr3t\n", "secrets:\n  A: [s3cr3t]\n"):
        assert "s3cr3t" not in complaint(tmp_path, text)


@pytest.mark.parametrize("text", ["name: ''", "name: '%s'" % ("x" * 201), 'name: "a\\nb"'])
def test_a_name_that_no_job_can_have_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    assert complaint(tmp_path, text).startswith("1: ")


def test_a_bad_variable_given_with_the_command_is_not_the_files_fault(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'1A'") as error:
        task(tmp_path, "run: a\nenvs:\n  A: 1\n", **{"1A": "x"})
    assert "task.yaml" not in str(error.value)


@pytest.mark.parametrize("content", [b"run: \xff\n", b"\x00\x01"])
def test_a_file_that_is_no_text_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "task.yaml").write_bytes(content)
    with pytest.raises(SpecError) as error:
        Task.from_file(str(tmp_path / "task.yaml"))
    assert str(tmp_path / "task.yaml") in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing.yaml: No such file or directory"):
        Task.from_file(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize(
    "text", ["run: !!python/name:os.system x", "run: !include x", "name: 2026-13-01", "? [a]\n: b"]
)
def test_yaml_that_no_task_can_mean_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    assert complaint(tmp_path, text).startswith("1: ")


# --- tasks made by a program


def test_a_program_may_give_times_as_seconds_or_as_text() -> None:
    assert Slurm(time="4h", grace=90) == Slurm(time=4 * 3600, grace="1m30s")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values, said",
    [
        ({"partition": "a\n#SBATCH --x"}, "slurm.partition='a\\n#SBATCH --x': use letters"),
        ({"time": 0}, "slurm.time=0: use a time of 1s to 3650d"),
        ({"time": True}, "slurm.time=True: use 90s"),
        ({"requeue": 1}, "slurm.requeue=1: use true or false"),
        ({"sbatch_args": ["--wrap=id"]}, "slurm.sbatch_args='--wrap=id': not allowed here: gangrun sets it itself"),
    ],
)
def test_what_a_program_asks_of_slurm_is_checked_too(values: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError) as error:
        Slurm(**values)  # type: ignore[arg-type]
    assert str(error.value).startswith(said)
