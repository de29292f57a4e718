"""A task as a job of a Ray cluster: its packages, its description, and its submission, once, whatever gets lost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from codegen import Bundle
from codegen.ray import render_ray_driver
from codegen.spec import SpecError
from executor import protocol
from gangrun import agent, launch, settings
from gangrun.group import Group
from gangrun.ray_api import Dashboard, Refused, is_private
from gangrun.ray_host import LOG_FOLDER, META_KEY
from gangrun.ray_package import Package, entrypoint, launch_package, tree_package
from gangrun.remote import Unreachable
from gangrun.settings import Request, Settings
from gangrun.snapshot import Snapshot
from gangrun.task import Slurm, Task

PYTHON = "python3"
LOGS_MARK = "/gangrun-logs-of-this-run"  # ray_entry puts the directory in its place: nobody else knows Ray's
NAMES_NAME = "names.json"
# https://docs.ray.io/en/latest/cluster/running-applications/job-submission/jobs-package-ref.html: from TERM to KILL
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
STOP_MARGIN_S = 15  # for the driver to tell how it ended, after its programs have
KNOWN_ALREADY = b"already exists"
FLAGS = ("gpus", "grace")  # those of the command line that mean something on Ray
SHOWN = ("gpus", "cpus", "python", "grace_s")
NOT_FOR_RAY = "Slurm's, and Ray has nothing like it"


class Plan(NamedTuple):
    """Everything of one launch, before it is sent."""

    run: str
    driver: str
    tree: Package
    own: Package  # the driver's
    body: Mapping[str, Any]  # what Ray's job API is sent
    meta: Mapping[str, Any]

    def asks_for(self, name: str) -> bool:
        """Whether a value of the request means something on Ray."""
        return name in SHOWN

    def to_json(self) -> dict[str, Any]:
        return {"body": self.body, "tree": self.tree.name}

    def words(self) -> str:
        return "POST /api/jobs/\n\n" + json.dumps(self.body, indent=1) + "\n"


def checked_request(flags: Mapping[str, Any], work: Task | Group, host: str, config: Settings) -> Request:
    """What is asked for. Raises SpecError that names what Ray has nothing like."""
    if isinstance(work, Group):
        raise SpecError(f"{work.name} is a group of tasks: those run on Slurm; on Ray launch its tasks one by one")
    if refused := settings.options_in(flags, FLAGS):
        raise SpecError(f"{refused}: {NOT_FOR_RAY}; leave it out")
    if work.memory_gb is not None:
        where = work.sources.get("memory", "task")
        raise SpecError(f"{where}: memory={work.memory_gb:g}: {NOT_FOR_RAY}: its nodes share theirs; leave it out")
    return settings.resolve(flags, plain(work), host, config)


def plain(task: Task) -> Task:
    """Without what it asks of Slurm."""
    return dataclasses.replace(task, slurm=Slurm(grace=task.slurm.grace))


def ignored(task: Task) -> list[str]:
    """What of the task does not count here."""
    default = Slurm()
    names = [field.name for field in dataclasses.fields(Slurm) if field.name != "grace"]
    return [f"slurm.{name}" for name in names if getattr(task.slurm, name) != getattr(default, name)]


def check_secrets(task: Task, address: str) -> None:
    """Raises SpecError where somebody on the way could read them."""
    if task.secrets and not is_private(address):
        ways = "an ssh tunnel (ssh -L 8265:127.0.0.1:8265 HOST, then http://127.0.0.1:8265) or https"
        names = ", ".join(sorted(task.secrets))
        raise SpecError(f"secrets ({names}): {address} would carry them through the network in plain text; use {ways}")


def plan(task: Task, run: str, taken: Snapshot | None, request: Request) -> Plan:
    """Pure, but for reading the snapshot. Raises SpecError for what cannot be."""
    resources, grace_s = launch.resources_of(task, request), request.grace_s.value
    job = task.job(job_id=run, log_dir=LOGS_MARK, resources=resources, grace_s=grace_s, one_shot=True)
    driver = render_ray_driver(job)
    status = protocol.job_directory("", protocol.ENGINE_RAY, run).lstrip("/")
    names = {
        "home": protocol.HOME_DIRECTORY, "runs": agent.RUNS, "driver": protocol.DRIVER_NAME, "mark": LOGS_MARK,
        "logs": LOG_FOLDER, "status": protocol.STATUS_NAME, "job": status,
    }  # fmt: skip
    own = launch_package({**Bundle(job, driver).files(), NAMES_NAME: json.dumps(names).encode()})
    meta = {**launch.metadata(task, run, taken, request), "engine": protocol.ENGINE_RAY}
    meta["request"] = {name: value for name, value in meta["request"].items() if name in SHOWN}
    tree = tree_package(taken)
    return Plan(run, driver, tree, own, _body(run, tree, own, meta, request), meta)


def _body(run: str, tree: Package, own: Package, meta: Mapping[str, Any], request: Request) -> dict[str, Any]:
    kept = {key: value for key, value in meta.items() if key != "diff"}
    stop_wait_s = math.ceil(request.grace_s.value) + STOP_MARGIN_S
    return {
        "submission_id": run,
        "entrypoint": entrypoint(own, request.python.value or PYTHON, run),
        "runtime_env": {
            "working_dir": tree.uri,
            "py_modules": [own.uri],
            "env_vars": {STOP_WAIT_VARIABLE: str(stop_wait_s)},  # the default is 3 seconds
        },
        "metadata": {META_KEY: json.dumps(kept)},
    }


def upload(dashboard: Dashboard, plan: Plan, say: Callable[[str], None]) -> None:
    """What the cluster has not, or not any more."""
    for package in (plan.tree, plan.own):
        if not dashboard.has_package(package.name):
            say(f"uploading {len(package.content) / 1e6:.1f} MB as {package.name}")
            dashboard.put_package(package.name, package.content)


def submit(dashboard: Dashboard, plan: Plan, say: Callable[[str], None]) -> None:
    """Ask once. Where the answer is lost, or makes no sense, Ray is asked whether it knows the run; it takes an id
    once, so asking again cannot make a second job. Raises Unreachable where that is not known, Refused."""
    try:
        upload(dashboard, plan, say)
        answer = dashboard.submit(plan.body)
    except Unreachable:
        if dashboard.job(plan.run) is not None:
            return
        raise
    if answer.status == 200 or KNOWN_ALREADY in answer.body or dashboard.job(plan.run) is not None:
        return
    if answer.status >= 500 and b"400" not in answer.body:
        raise Unreachable(f"{dashboard.address}: Ray did not take the job: {answer.words}")
    raise Refused(f"{dashboard.address}: Ray refused the job: {answer.words}")
