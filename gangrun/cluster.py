"""`Cluster` and `Job`: what Python code uses. The verbs of the command line are thin over them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from filelock import FileLock, Timeout

from codegen.spec import SpecError
from executor import protocol
from gangrun import group_plan, launch, settings, snapshot, states
from gangrun.agent import OUTPUT
from gangrun.group import Group
from gangrun.launch import Plan
from gangrun.news import Seen, adopted, news_of, poll_request
from gangrun.records import Poll, Records, Run, refuse_selector, state_directory
from gangrun.remote import Host, LoginNeeded, RemoteError, Unreachable, open_host
from gangrun.task import Task

if TYPE_CHECKING:
    from gangrun.check import Finding
    from gangrun.explain.reasons import Explanation
    from gangrun.ray_launch import Plan as RayPlan

LEAST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
INTERVAL_GROWTH = 1.3
REOPENED_S = 86400.0  # for this long a lost run is asked about again: its record may come late
POLL_LOCK_TIMEOUT_S = 120.0


class Intent(NamedTuple):
    """A launch before it is sent. `snapshots` are by work directory, `missing` those that the host lacks."""

    plan: Plan | RayPlan
    request: settings.Request
    snapshots: Mapping[str, snapshot.Snapshot]
    missing: Sequence[snapshot.Snapshot]


class Cluster:
    """A Slurm cluster, reached through its login node `host`: an alias of ~/.ssh/config, or `local` for this machine.

    Without a host, that of the settings (`default_host`), else this machine if it has sbatch. Raises SpecError where
    none of these is.
    """

    scheduler = "Slurm"

    def __init__(
        self, host: str | None = None, *, config: settings.Settings | None = None, records: Records | None = None
    ) -> None:
        self.settings = config or settings.load(os.environ)
        self.name = host or _usual_host(self.settings) or _refuse_no_host(self.settings)
        self.host_settings = self.settings.host(self.name)
        self.host: Host = self._open()
        self.records = records or Records.of_user()
        self.root = self.host_settings.workdir or settings.DEFAULT_WORKDIR

    def _open(self) -> Host:
        if is_ray(self.name):
            raise SpecError(f"host={self.name!r}: is a Ray cluster; use gangrun.RayCluster")
        return open_host(self.name, self.host_settings.python)

    # --- launching

    def plan(
        self, work: Task | Group, *, dirty: bool = False, say: Callable[[str], None] = lambda words: None, **flags: Any
    ) -> Intent:
        """Everything that a launch would send, after one remote call. `flags`: see `settings.resolve`."""
        refuse_selector(work.name)
        tasks = [member.task for member in work.members] if isinstance(work, Group) else [work]
        request, own = self._requests(work, flags)
        snapshots = {path: self._snapshot(path, dirty, say) for path in _workdirs(tasks)}
        found = launch.look(
            self.host,
            request.workdir.value,
            sorted({taken.digest for taken in snapshots.values()}),
            request.python.value,
            any(one.gpus.value is not None for one in own),
            group_plan.sizes_command(work),
        )
        run = launch.new_run_id(work.name)
        place = found.place(run)
        if isinstance(work, Group):
            plan = group_plan.plan_group(work, run, place, request, own, snapshots)
        else:
            plan = launch.plan(work, run, place, request, next(iter(snapshots.values()), None))
        by_digest = {taken.digest: taken for taken in snapshots.values()}
        missing = [taken for digest, taken in by_digest.items() if digest not in found.snapshots]
        return Intent(plan, request, snapshots, missing)

    def _requests(
        self, work: Task | Group, flags: Mapping[str, Any]
    ) -> tuple[settings.Request, list[settings.Request]]:
        """What is asked for the job as a whole, and for the nodes of each task."""
        if isinstance(work, Group):
            whole = group_plan.whole_request(flags, work, self.name, self.settings)
            return whole, [group_plan.own_request(member, self.name, self.settings) for member in work.members]
        request = settings.resolve(flags, work, self.name, self.settings)
        return request, [request]

    def launch(
        self,
        work: Task | Group,
        *,
        dirty: bool = False,
        force: bool = False,
        say: Callable[[str], None] = lambda words: None,
        **flags: Any,
    ) -> Job:
        """Snapshot, upload, submit. `say` is told what a person may want to read.

        Raises Busy if a run of this name is in flight and not `force`, SpecError for what cannot be, RemoteError.
        """
        if not force and any(run.name == work.name for run in self.records.in_flight(self.name)):
            self.refresh()
            self.records.refuse_twin(self.name, work.name)
        intent = self.plan(work, dirty=dirty, say=say, **flags)
        run, root = intent.plan.run, intent.request.workdir.value
        self.records.add(launch.record_of(intent.plan.meta, self.name, root), force)
        try:
            self._upload(intent, root, say)
        except BaseException:
            self.records.forget(run)
            raise
        self.records.change(run, submitted=time.time())  # an upload may have taken long
        self._submit(intent, root, say)
        return Job(self, run)

    def _upload(self, intent: Intent, root: str, say: Callable[[str], None]) -> None:
        for taken in intent.missing:
            say(f"uploading {taken.files} files, {taken.size / 1e6:.1f} MB, as snapshot {taken.digest[:12]}")
            launch.upload(self.host, root, taken)

    def _submit(self, intent: Intent, root: str, say: Callable[[str], None]) -> None:
        """The run is forgotten only where the host said no: in all other cases its job may be in the queue."""
        run = intent.plan.run
        words = f"it is not known whether run {run} was submitted; `gangrun queue` finds out"
        try:
            job, cluster = self._send(root, intent.plan, say)
        except (Unreachable, LoginNeeded) as error:
            raise type(error)(f"{error}; {words}") from error
        except RemoteError:
            self.records.forget(run)
            raise
        except KeyboardInterrupt:
            say(words)
            raise
        # Who looked meanwhile may have given the run up.
        fresh = {"state": protocol.PENDING, "is_final": False, "reason": "", "ended": None}
        self.records.change(run, job=job, cluster=cluster, **fresh)

    def _send(self, root: str, plan: Any, say: Callable[[str], None]) -> tuple[str, str | None]:
        return launch.submit(self.host, root, plan, say)

    def _snapshot(self, workdir: str, dirty: bool, say: Callable[[str], None]) -> snapshot.Snapshot:
        taken = snapshot.take(os.path.expanduser(workdir), str(state_directory() / "snapshots"), dirty=dirty)
        for note in taken.notes:
            say(note)
        return taken

    # --- following

    def jobs(self, include_ended: bool = False) -> list[Job]:
        """Newest first, as last seen; `refresh` asks the cluster."""
        runs = self.records.all(self.name) if include_ended else self.records.in_flight(self.name)
        return [Job(self, run.run) for run in runs]

    def job(self, word: str) -> Job:
        """The job that an id or a name stands for. Raises NotFound."""
        found = self.records.find(word, self.name)
        if not found:
            raise NotFound(f"job={word!r}: no run of that id or name on {self.name}; `gangrun queue -a` lists them")
        return Job(self, found[0].run)

    def refresh(self, max_age_s: float = 0.0, watch: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
        """Ask the cluster about all runs in flight, in one call for all processes of this user here.

        A host is never asked more often than its `poll_interval`. `watch`: a request of `top`, which goes with the same
        call; returns its answers, none if the host was asked a moment ago. Raises Unreachable, LoginNeeded.
        """
        with contextlib.suppress(Timeout), FileLock(str(self._lock_path()), timeout=POLL_LOCK_TIMEOUT_S):
            before = self.records.poll_of(self.name)
            if abs(time.time() - before.polled) < max(max_age_s, self.least_interval_s):
                if before.error:
                    raise Unreachable(before.error)
                return []
            return self._poll({} if watch is None else {"watch": watch})
        return []

    @property
    def least_interval_s(self) -> float:
        """The host is not asked again before that."""
        return max(self.host_settings.poll_interval or 0.0, LEAST_INTERVAL_S)

    def _lock_path(self) -> Path:
        return self.records.path.parent / f"poll-{hashlib.sha256(self.name.encode()).hexdigest()[:12]}.lock"

    def _poll(self, besides: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        recent = time.time() - REOPENED_S
        is_open = f"(NOT is_final OR (state = '{states.LOST}' AND ended > {recent}))"
        by_root: dict[str, list[Run]] = {}
        for run in self.records.all(self.name, is_open):
            by_root.setdefault(run.root, []).append(run)
        watched = []
        try:
            for root, runs in by_root.items():
                answer = self.host.call("poll", **poll_request(root, runs), **besides)
                self._take_in(runs, answer)
                watched.append(answer.get("watched", {}))
        except RemoteError as error:
            self.records.polled(self.name, Poll(time.time(), str(error)))
            raise
        self.records.polled(self.name, Poll(time.time()))
        return watched

    def _take_in(self, runs: Sequence[Run], answer: Mapping[str, Any]) -> None:
        seen = Seen.of(answer)
        killed = []
        for run in runs:
            news = news_of(run, seen)
            self.records.change(run.run, **news)
            if news.get("is_final") and run.meta.get("secrets") != [] and not seen.has_ended_by_itself(run):
                killed.append(run.run)
        if killed:
            self.host.call("tidy", root=runs[0].root, runs=killed)

    def adopt(self) -> list[Job]:
        """Find the runs that lie on the cluster and are not recorded here."""
        found = self.host.call("runs", root=self.root)["runs"]
        new = [run for run in (adopted(one, self.name, self.root) for one in found) if run]
        new = [run for run in new if self.records.get(run.run) is None]
        for run in new:
            self.records.put(run)
        if new:
            self.records.polled(self.name, Poll())  # the next look asks the cluster about them
        return [Job(self, run.run) for run in new]

    # --- why, and what is there

    def explain(self, job: Job, run: Run) -> Explanation:
        """Why a run waits, how it runs, or why it ended."""
        from gangrun.explain.ask import explain_job

        return explain_job(job, run)

    def check(self, deep: bool, say: Callable[[str], None]) -> list[Finding]:
        """What the host has and lacks, and what that costs."""
        from gangrun.check import check

        return check(self, deep, say)


def is_ray(name: str) -> bool:
    """Whether the name of a host is the address of a Ray cluster."""
    return "://" in name


def open_cluster(host: str | None = None, *, records: Records | None = None) -> Cluster:
    """Slurm's or Ray's, whichever the name means; without one, that of the settings or this machine."""
    config = settings.load(os.environ)
    name = host or config.default_host
    if name is not None and is_ray(name):
        from gangrun.ray_cluster import RayCluster

        return RayCluster(name, config=config, records=records)
    return Cluster(name, config=config, records=records)


class Job:
    """One run of a task. All it knows is in the records and on the cluster: it can be made again at any time."""

    def __init__(self, cluster: Cluster, run_id: str) -> None:
        self.cluster = cluster
        self.run_id = run_id

    def __repr__(self) -> str:
        return f"Job({self.cluster.name!r}, {self.run_id!r})"

    @property
    def run(self) -> Run:
        """As last seen."""
        found = self.cluster.records.get(self.run_id)
        if found is None:
            raise NotFound(f"run={self.run_id!r} is not recorded here any more; `gangrun queue --adopt` may find it")
        return found

    def status(self, max_age_s: float = 0.0) -> Run:
        """As the cluster says now, or said less than `max_age_s` seconds ago. Raises Unreachable."""
        run = self.run
        if not run.is_final or run.state == states.LOST:
            self.cluster.refresh(max_age_s)
        return self.run

    def wait(self, timeout_s: float | None = None, say: Callable[[str], None] = lambda words: None) -> Run:
        """Until the job has ended. Raises TimeoutError. A host that does not answer is asked again and again."""
        return next(iter(wait([self], timeout_s, say)))

    def logs(
        self,
        name: str = OUTPUT,
        *,
        follow: bool = False,
        lines: int | None = None,
        say: Callable[[str], None] = lambda words: None,
    ) -> Iterator[bytes]:
        """The bytes of one log (`output`, `logs/0-head.log`, ...), in pieces that never cut a character."""
        from gangrun.follow import follow_log

        return follow_log(self, name, follow, lines, say)

    def cancel(self, grace_s: float | None = None, say: Callable[[str], None] = lambda words: None) -> Run:
        """End the job and see that it has ended: softly, and by force after `grace_s` seconds (default: the task's)."""
        from gangrun.cancel import cancel

        return cancel([self], grace_s, say)[0]


class NotFound(protocol.UsageError):
    """There is no such job."""

    exit_code = states.EXIT_NOT_FOUND


def wait(
    jobs: Sequence[Job],
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda words: None,
    *,
    any_of_them: bool = False,
) -> list[Run]:
    """The runs that have ended: all of them, or the first. Raises TimeoutError if none, or not all, did in time."""
    endings = as_they_end(jobs, timeout_s, say)
    return [next(endings)] if any_of_them and jobs else list(endings)


def as_they_end(jobs: Sequence[Job], timeout_s: float | None, say: Callable[[str], None]) -> Iterator[Run]:
    """Each run when it has ended. Raises TimeoutError when nothing more has ended in time."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    interval_s, told, waiting = LEAST_INTERVAL_S, "", list(jobs)
    while waiting:
        told = refresh_all(waiting, say, told)
        seen = [(job, job.run) for job in waiting]
        yield from (run for _, run in seen if run.is_final)
        waiting = [job for job, run in seen if not run.is_final]
        left_s = None if deadline is None else deadline - time.monotonic()
        if waiting and left_s is not None and left_s <= 0:
            raise TimeoutError(
                "nothing has changed: {}".format(", ".join(f"{job.run_id} is {job.run.state}" for job in waiting))
            )
        if waiting:
            time.sleep(interval_s if left_s is None else min(interval_s, left_s))
            interval_s = min(interval_s * INTERVAL_GROWTH, LONGEST_INTERVAL_S)


def refresh_all(jobs: Sequence[Job], say: Callable[[str], None], told: str = "") -> str:
    """Ask each cluster once; trouble is told when it is new. Returns what was told last."""
    words = ""
    for cluster in {job.cluster.name: job.cluster for job in jobs if not job.run.is_final}.values():
        try:
            cluster.refresh()
        except LoginNeeded as error:
            words = f"{error}. The jobs are not affected; waiting for the login"
            cluster.host.wait_for_login()
        except RemoteError as error:
            words = f"{error}. The jobs are not affected; asking again"
    if words and words != told:
        say(words)
    if told and not words:
        say("the host answers again")
    return words


def task_names(run: Run) -> list[str]:
    """Of a group: those that were declared, then those that joined, in their order."""
    declared = [str(name) for name in run.meta.get("tasks") or ()]
    return [*declared, *(str(task["name"]) for task in run.tasks if task["name"] not in declared)]


def task_named(word: str, names: Sequence[str], of: str) -> str:
    """Of a group's tasks the one of this name or number. Raises NotFound that shows them."""
    for index, name in enumerate(names):
        if word in (name, str(index)):
            return name
    has = "its tasks are " + ", ".join(f"{index} {name}" for index, name in enumerate(names))
    raise NotFound(f"task={word!r}: no such task in {of}; {has if names else 'it is not a group'}")


def _workdirs(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(task.workdir for task in tasks if task.workdir is not None))


def usual_host() -> str | None:
    """What is meant where no host is named: that of the settings, or this machine if it has sbatch."""
    return _usual_host(settings.load(os.environ))


def _usual_host(config: settings.Settings) -> str | None:
    return config.default_host or (settings.LOCAL if shutil.which("sbatch") else None)


def _refuse_no_host(config: settings.Settings) -> NoReturn:
    raise SpecError(
        f"host: none given, no default_host in {config.path}, and no sbatch on this machine; use --host ALIAS"
    )
