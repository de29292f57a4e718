"""Asking a group for one more task: what is refused, and the names that are given. No Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import SpecError
from executor import protocol
from executor.group_facts import Requests, dynamic_task
from gangrun.cli import cli
from gangrun.inside import join
from gangrun.task import Slurm, Task


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a group that runs, with one task of its file."""
    directory = tmp_path / protocol.HOME_DIRECTORY / "runs" / "rl-abc"
    directory.mkdir(parents=True)
    (directory / protocol.member_driver_name("trainer")).touch()
    monkeypatch.setenv(protocol.ENV_GROUP_DIRECTORY, str(directory))
    monkeypatch.setenv(protocol.SLURM_JOB_ID, "7")
    monkeypatch.chdir(tmp_path)
    Requests(str(directory)).open()
    return directory


def test_each_task_gets_a_name_of_its_own_and_the_group_hears_of_it(group: Path) -> None:
    names = [join(Task(name=name, run="true")).name for name in ("eval", "eval", "trainer")]
    assert names == ["eval", "eval-2", "trainer-2"]
    requests = Requests(str(group))
    asked = [dynamic_task(said) for said in requests.new()]
    assert [(task.name, task.is_primary, task.is_dynamic) for task in asked] == [(name, False, True) for name in names]
    assert requests.new() == [] and all((group / task.driver).exists() for task in asked)


def test_a_requeued_groups_tasks_have_their_names_again(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert join(Task(name="eval", run="true")).name == "eval"
    monkeypatch.setenv(protocol.SLURM_RESTART_COUNT, "1")
    assert join(Task(name="eval", run="true")).name == "eval"


def test_a_group_that_is_over_is_not_joined(group: Path) -> None:
    Requests(str(group)).close()
    with pytest.raises(SpecError, match="the group does not run any more"):
        join(Task(name="eval", run="true"))


def test_outside_of_a_group_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(protocol.ENV_GROUP_DIRECTORY, raising=False)
    with pytest.raises(SpecError, match="not a part of a job group"):
        join(Task(name="eval", run="true"))


def test_nothing_is_asked_of_slurm_for_a_task_that_joins(group: Path) -> None:
    with pytest.raises(SpecError, match="only grace counts"):
        join(Task(name="eval", run="true", slurm=Slurm(time=60)))
    join(Task(name="eval", run="true", slurm=Slurm(grace=5)))


def test_one_that_never_got_a_driver_ends_with_what_its_group_says(group: Path) -> None:
    member = join(Task(name="eval", run="true"))
    home = Path(protocol.job_directory(str(group.parents[2]), "7", "rl-abc"))
    home.mkdir(parents=True)
    task = {"name": "eval", "state": protocol.CANCELLED, "reason": "never started", "exit_code": None}
    (home / protocol.STATUS_NAME).write_text(json.dumps({"tasks": [task]}))
    record = member.wait()
    assert (record.state, record.reason) == (protocol.CANCELLED, "never started")


def test_a_line_that_is_not_whole_yet_is_left_for_the_next_look(group: Path) -> None:
    requests = Requests(str(group))
    with (group / protocol.REQUESTS_NAME).open("a") as file:
        file.write('{"cancel": "a"}\n{"can')
        file.flush()
        assert requests.new() == [{"cancel": "a"}]
        file.write('cel": "b"}\nno json\n')
        file.flush()
        assert requests.new() == [{"cancel": "b"}]


def test_what_a_task_that_joins_cannot_have_is_refused_as_it_was_typed(group: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text("name: eval\nrun: 'true'\n")
    flags = ["--no-requeue", "--sbatch-arg=--exclude=n1", "--dirty"]
    refused = str(CliRunner().invoke(cli, ["launch", "eval.yaml", *flags]).exception).partition(":")[0]
    assert sorted(refused.split(", ")) == ["--dirty", "--no-requeue", "--sbatch-arg"]
