"""A task as the files of a run on the cluster and sbatch's options; and its submission, once, whatever gets lost."""

from __future__ import annotations

import base64
import dataclasses
import getpass
import json
import os
import re
import secrets
import shlex
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from codegen import Bundle, Job, SpecError, recompile, render_driver
from codegen.bundle import write_files
from codegen.slurm import render_batch, sbatch_options
from codegen.spec import Resources
from executor import protocol
from gangrun import agent, requests
from gangrun.records import Run
from gangrun.remote import Host, RemoteError, Unreachable
from gangrun.settings import Request
from gangrun.snapshot import Snapshot
from gangrun.task import Task

Answer = TypeVar("Answer")
LONGEST_NAME = 40
RUN_ID_BYTES = 5
SCRIPT_NAME = "job.sbatch"
RETRY_S = (1.0, 3.0, 8.0, 20.0)
SUBMIT_TIMEOUT_S = 240.0
NODE_GRES = ("sinfo", "--all", "--noheader", "--format=%G")


class Place(NamedTuple):
    """Where a run goes, and what its cluster has."""

    root: str | None  # the work directory on the shared home; None: the home
    directory: str  # the run's own
    workdir: str  # where the scripts run
    python: str | None
    gres: Sequence[str]  # of the nodes, in sinfo's words; none: not known
    sizes: Sequence[str] = ()  # of the nodes, as group_room.SINFO tells them


class Found(NamedTuple):
    """What the host said before anything was sent there."""

    home: str  # <work directory>/.gangrun
    snapshots: Sequence[str]  # of those asked about
    python: str
    gres: Sequence[str]
    sizes: Sequence[str] = ()

    def place(self, run: str) -> Place:
        directory = os.path.join(self.home, agent.RUNS, run)
        work = os.path.join(directory, agent.WORK)
        return Place(os.path.dirname(self.home), directory, work, self.python, self.gres, self.sizes)


class Plan(NamedTuple):
    """Everything of one launch, before it is sent: what --dry-run shows and `gangrun render` writes."""

    run: str
    files: Mapping[str, bytes]  # of the run's directory
    script: str
    sbatch: Sequence[str]
    meta: Mapping[str, Any]
    trees: Mapping[str, str | None]  # the directories that scripts start in, with the snapshots they hold
    python: str | None
    shared: Sequence[Sequence[str]] = ()  # of a group that shares nodes: the tasks on each

    def asks_for(self, name: str) -> bool:
        """Whether a value of the request means something where it goes."""
        return True

    def to_json(self) -> dict[str, Any]:
        shared = {"nodes": [list(names) for names in self.shared]} if self.shared else {}
        return {"sbatch": list(self.sbatch), "script": self.script, **shared}

    def words(self) -> str:
        nodes = "".join(f"node {number}: {', '.join(names)}\n" for number, names in enumerate(self.shared, 1))
        return shlex.join(["sbatch", *self.sbatch]) + "\n\n" + self.script + ("\n" + nodes if nodes else "")


def new_run_id(name: str) -> str:
    """`<name>-<8 letters and digits>`: a directory's name, Slurm's job name, and not to be met twice."""
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:LONGEST_NAME] or "task"
    return "%s-%s" % (slug, base64.b32encode(secrets.token_bytes(RUN_ID_BYTES)).decode().lower())


def plan(task: Task, run: str, place: Place, request: Request, taken: Snapshot | None) -> Plan:
    """Pure. Raises SpecError for what cannot be asked of this cluster."""
    job = job_of(task, run, place, request)
    output = os.path.join(place.directory, agent.OUTPUT)
    options = sbatch_options(job, output, [*whole_options(run, place, request), *own_options(place, request)])
    files = Bundle(job, render_driver(job)).files()
    meta = metadata(task, run, taken, request)
    return planned(run, place, files, options, meta, {agent.WORK: taken and taken.digest})


def planned(
    run: str,
    place: Place,
    files: Mapping[str, bytes],
    options: Sequence[str],
    meta: Mapping[str, Any],
    trees: Mapping[str, str | None],
) -> Plan:
    """A plan from its drivers and sbatch's options."""
    driver = os.path.join(place.directory, protocol.DRIVER_NAME)
    script = render_batch(options, place.python, driver, os.path.join(place.directory, agent.TOMBSTONE))
    own = {SCRIPT_NAME: _bytes(script), agent.META: json.dumps(meta, indent=1).encode()}
    sbatch = [*options, os.path.join(place.directory, SCRIPT_NAME)]
    return Plan(run, {**files, **own}, script, sbatch, meta, trees, place.python)


def job_of(task: Task, run: str, place: Place, request: Request) -> Job:
    return task.job(
        job_id=run,
        log_dir=os.path.join(place.directory, agent.LOGS),
        resources=resources_of(task, request),
        cluster_home=place.root,
        workdir=place.workdir,
        python=place.python,
        grace_s=request.grace_s.value,
        warn_signal=request.warn_signal.value,
        requeue=request.requeue.value,
    )


def resources_of(task: Task, request: Request) -> Resources:
    """Of each node, with the GPUs that the request ends up with."""
    gpus = request.gpus.value
    count, kind = (gpus.count, gpus.kind) if gpus else (0, None)
    return dataclasses.replace(task.resources, gpus=count, gpu_type=kind)


def whole_options(run: str, place: Place, request: Request) -> list[str]:
    """What is asked of sbatch for the job as a whole; the user's own options come last."""
    options = ["--job-name=" + run, "--comment=gangrun:" + run, "--chdir=" + place.directory]
    for name in ("partition", "account", "qos"):
        chosen = getattr(request, name).value
        options += [f"--{name}={chosen}"] if chosen else []
    if request.time.value:
        options.append("--time=" + requests.slurm_time(request.time.value))
    return [*options, *(request.sbatch_args.value or ())]


def own_options(place: Place, request: Request) -> list[str]:
    """What is asked for the nodes of one task, where the user's own options do not name it."""
    options = ["--constraint=" + request.constraint.value] if request.constraint.value else []
    if request.gpus.value and not request.twin("gpus"):
        options.append(requests.gres_option(request.gpus.value, place.gres))
    if request.memory_gb.value and not request.twin("memory_gb"):
        options.append("--mem=%dM" % round(request.memory_gb.value * 1024))
    return options


def look(
    host: Host,
    root: str,
    digests: Sequence[str],
    python: str | None,
    needs_gres: bool,
    sizes: Sequence[str] = (),
) -> Found:
    """The first remote call of a launch. Raises SpecError where the host lacks what a job needs."""
    commands = {"gres": list(NODE_GRES)} if needs_gres else {}
    commands.update({"sizes": list(sizes)} if sizes else {})
    found = host.call("prepare", root=root, digests=list(digests), commands=commands, python=python)
    if found["missing"]:
        raise SpecError(
            "{}: no {} there; is this a login node of a Slurm cluster?".format(host.name, ", ".join(found["missing"]))
        )
    if found["python"] is None:
        oldest = "%d.%d" % protocol.OLDEST_PYTHON
        raise SpecError(
            f"{host.name}: no Python {oldest} or newer on PATH; name one with `python:` in the host's settings"
        )
    answers = [_lines(found["answers"].get(name)) for name in ("gres", "sizes")]
    return Found(found["home"], found["snapshots"], found["python"], *answers)


def _lines(answer: Mapping[str, Any] | None) -> list[str]:
    """What a command printed; nothing if it failed."""
    text = answer["stdout"] if answer and answer["rc"] == 0 else ""
    return [line.strip() for line in text.split("\n") if line.strip()]


def upload(host: Host, root: str, snapshot: Snapshot) -> None:
    with open(snapshot.path, "rb") as payload:
        host.call("upload", root=root, digest=snapshot.digest, size=snapshot.size, payload=payload)


def submit(host: Host, root: str, plan: Plan, say: Callable[[str], None]) -> tuple[str, str | None]:
    """The job's id and cluster."""
    files = {name: base64.b64encode(zlib.compress(content)).decode() for name, content in plan.files.items()}
    request: dict[str, Any] = {
        "root": root, "run": plan.run, "files": files, "trees": dict(plan.trees), "prepare": _renewal(plan),
        "sbatch": list(plan.sbatch), "cluster": cluster_of(plan.sbatch),
    }  # fmt: skip

    def ask() -> Any:
        try:
            return host.call("submit", timeout_s=SUBMIT_TIMEOUT_S, **request)
        except RemoteError as error:
            if agent.UNKNOWN in str(error):
                raise Unreachable(str(error).replace(agent.UNKNOWN, "")) from error
            raise

    answer = surely(ask, say)
    return answer["job"], answer["cluster"]


def surely(ask: Callable[[], Answer], say: Callable[[str], None]) -> Answer:
    """What `ask` returns: it is called again where an answer got lost, and must submit once however often it is."""
    for wait_s in RETRY_S:
        try:
            return ask()
        except Unreachable as error:
            say(f"{error}; asking again in {wait_s:.0f} s (this cannot make a second job)")
            time.sleep(wait_s)
    return ask()


def _renewal(plan: Plan) -> list[str]:
    """The archive holds code compiled by this machine's Python; where the nodes' is another, each start would pay."""
    archive = os.path.join(os.path.dirname(plan.sbatch[-1]), protocol.ARCHIVE_NAME)
    return [plan.python or sys.executable, "-I", "-S", "-c", recompile.CODE, archive]


def cluster_of(options: Sequence[str]) -> str | None:
    """The cluster that the user's own options name (sbatch(1), --clusters)."""
    named = [option.split("=", 1)[1] for option in options if option.startswith(("--clusters=", "--cluster=", "-M="))]
    return named[-1] if named else None


def metadata(task: Task, run: str, snapshot: Snapshot | None, request: Request) -> dict[str, Any]:
    """What the run says of itself on the cluster. No values of variables: they may be secrets in all but name."""
    return {
        **identity(run, task.name, task.num_nodes, request),
        "envs": sorted(task.envs),
        "secrets": sorted(task.secrets),
        "workdir": os.path.abspath(task.workdir) if task.workdir else None,
        **origin([snapshot] if snapshot else []),
    }


def identity(run: str, name: str, num_nodes: int, request: Request) -> dict[str, Any]:
    return {
        "version": protocol.VERSION,
        "run": run,
        "name": name,
        "num_nodes": num_nodes,
        "submitted": round(time.time(), 3),
        "by": f"{getpass.getuser()}@{socket.gethostname()}",
        "grace_s": request.grace_s.value,
        "request": {name: value for name, value, _ in request.explain()},
    }


def origin(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Which code it is. Of several trees the first says the commit."""
    first = snapshots[0] if snapshots else None
    return {
        "digests": [snapshot.digest for snapshot in snapshots],
        "commit": first.commit if first else None,
        "branch": first.branch if first else None,
        "is_dirty": any(snapshot.is_dirty for snapshot in snapshots),
        "diff": "".join(snapshot.diff for snapshot in snapshots),
    }


def write(plan: Plan, directory: str) -> None:
    """The files of a launch on this machine. Raises SpecError."""
    write_files(directory, plan.files)
    os.makedirs(os.path.join(directory, agent.LOGS), exist_ok=True)


def record_of(meta: Mapping[str, Any], host: str, root: str) -> Run:
    kept = {key: value for key, value in meta.items() if key != "diff"}
    nodes, submitted = kept["num_nodes"], kept["submitted"]
    return Run(kept["run"], kept["name"], host, root, num_nodes=nodes, submitted=submitted, meta=kept)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
