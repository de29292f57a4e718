"""What tests of job groups share: a group from its tasks, submitted as it would be, and what came of it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codegen import Resources
from codegen.group import GroupBundle, GroupTask, JobGroup, group_sbatch_options
from codegen.slurm import render_batch
from executor import protocol
from tests.bench import Bench, Outcome, Running, eventually

# Says when it is up, and what it gets; `{on_term}` is what it does then. Bash would tell of the end of its sleep, too.
TRAP = "exec 2>/dev/null; trap 'echo got TERM; {on_term}' TERM; echo up; while :; do sleep 0.1; done"


def trap(on_term: str) -> str:
    return TRAP.format(on_term=on_term)


class RunningGroup(Running):
    """A group that was submitted."""

    @property
    def folder(self) -> Path:
        return self.bench.directory / self.name

    def tasks(self) -> dict[str, dict[str, Any]]:
        return {task["name"]: task for task in self.status().get("tasks") or ()}

    def state(self, task: str) -> str | None:
        return self.tasks().get(task, {}).get("state")

    def rank_log(self, task: str, rank: int = 0) -> str:
        """What a rank's script printed."""
        folder = self.folder / "logs" / task
        found = [folder / protocol.SINGLE_LOG_NAME, *folder.glob(f"{rank}-*.log")]
        return "".join(path.read_text(errors="replace") for path in found if path.exists())

    def task_log(self, task: str) -> str:
        """A task's own output, its driver's words included."""
        path = self.folder / protocol.TASKS_NAME / f"{task}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def output(self) -> str:
        path = self.bench.directory / ("job-%d.out" % self.job_id)
        return path.read_text(errors="replace") if path.exists() else ""

    def until_up(self, *tasks: str, word: str = "up", timeout_s: float = 40) -> None:
        """Each of the tasks has printed it."""
        eventually(lambda: all(word in self.rank_log(task) for task in tasks), timeout_s, f"{word!r} of {tasks}")

    def until_state(self, task: str, *states: str, timeout_s: float = 30) -> None:
        eventually(lambda: self.state(task) in states, timeout_s, f"{task} {states}, it is {self.state(task)}")

    def end(self, timeout_s: float = 90) -> GroupOutcome:
        """How it ended; no process of it is left on any node."""
        outcome = GroupOutcome(self, self.wait(timeout_s))
        # The group's folder is in the command line of its drivers and of every rank's executor.
        eventually(lambda: not self.bench.left_behind(str(self.bench.directory)), 10, "processes are left")
        return outcome


class GroupOutcome:
    """A group that has ended."""

    def __init__(self, group: RunningGroup, outcome: Outcome) -> None:
        self.group, self.outcome, self.status, self.events = group, outcome, outcome.status, outcome.events
        self.state, self.code = str(outcome.status.get("state")), outcome.status.get("exit_code")
        self.reason, self.output, self.tasks = str(outcome.status.get("reason")), outcome.plain, group.tasks()
        assert outcome.status.get("state") is None or outcome.code == self.code, (outcome.code, self.code, self.output)

    @property
    def states(self) -> dict[str, str]:
        return {name: task["state"] for name, task in self.tasks.items()}

    @property
    def codes(self) -> dict[str, int]:
        return {name: task["exit_code"] for name, task in self.tasks.items()}

    def log(self, task: str, rank: int = 0) -> str:
        return self.group.rank_log(task, rank)

    def time_of(self, event: str, task: str) -> float:
        """Of the first event of this kind."""
        return next(float(one["time"]) for one in self.events if one["event"] == event and one.get("task") == task)


class GroupBench:
    """Groups on a cluster, without the client."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def task(
        self,
        name: str,
        run: str,
        *,
        nodes: int = 1,
        cpus: int = 1,
        gpus: int = 0,
        grace_s: float = 10.0,
        setup: str | None = None,
        secrets: Mapping[str, str] | None = None,
        ports: Sequence[int] = (),
        **place: Any,
    ) -> GroupTask:
        """`place` are fields of GroupTask: is_primary, after, ready, max_restarts, component."""
        job = self.bench.job(
            job_id=name, task_name=name, run=run, setup=setup, num_nodes=nodes, grace_s=grace_s,
            resources=Resources(cpus=cpus, gpus=gpus), cluster_home=str(self.bench.directory),
            secrets=secrets or {}, ports=tuple(ports),
        )  # fmt: skip
        return GroupTask(name=name, job=job, **place)

    def aux(self, name: str, run: str, **fields: Any) -> GroupTask:
        return self.task(name, run, is_primary=False, **fields)

    def submit(
        self,
        *tasks: GroupTask,
        run: str = "g",
        sbatch: str = "",
        own: Sequence[Sequence[str]] = (),
        interpreter: str | None = None,
        **fields: Any,
    ) -> RunningGroup:
        """Write the files, submit the script, do not wait. `fields` are those of JobGroup; `interpreter` is for the
        group's driver alone."""
        folder = self.bench.directory / run
        group = JobGroup(
            job_id=run, tasks=tuple(_placed(task, run, folder, fields) for task in tasks),
            cluster_home=str(self.bench.directory), python=self.bench.python, **{"name": "rl", **fields},
        )  # fmt: skip
        folder.mkdir()
        for name, content in GroupBundle(group).files().items():
            (folder / name).write_bytes(content)
        output = "{}/job-%j.out".format(str(self.bench.directory).replace("%", "%%"))
        extra = ["--output=" + output, *shlex.split(sbatch)]
        options = group_sbatch_options(group, output, extra, own or [[] for _ in tasks])
        script = render_batch(options, interpreter or self.bench.python, str(folder / protocol.DRIVER_NAME))
        job = self.bench.cluster.sbatch(script, cwd=self.bench.directory, env=self.bench.environ)
        return RunningGroup(self.bench, job, run)

    def run(self, *tasks: GroupTask, timeout_s: float = 90, **fields: Any) -> GroupOutcome:
        return self.submit(*tasks, **fields).end(timeout_s)

    def touch(self, name: str) -> None:
        """A file that scripts wait for: `until [ -e NAME ]`, see `waits_for`."""
        (self.bench.directory / name).touch()

    def waits_for(self, name: str) -> str:
        """A line of a script."""
        return f"until [ -e {shlex.quote(str(self.bench.directory / name))} ]; do sleep 0.05; done\n"

    def scancel(self, group: RunningGroup, *flags: str) -> None:
        self.bench.cluster.run("ctl", ["scancel", *flags, str(group.job_id)])


def _placed(task: GroupTask, run: str, folder: Path, fields: dict[str, Any]) -> GroupTask:
    """The task's job as the client would make it."""
    job = dataclasses.replace(
        task.job, job_id=protocol.member_job_id(run, task.name), log_dir=str(folder / "logs" / task.name)
    )
    return dataclasses.replace(task, job=job)


def components(*tasks: GroupTask) -> list[GroupTask]:
    """Each of them a component of a heterogeneous job."""
    return [dataclasses.replace(task, component=index) for index, task in enumerate(tasks)]
