"""`Cluster` and `Job`: what Python code uses. The verbs of the command line are thin over them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from codegen.spec import SpecError
from executor import protocol
from gangrun import group_plan, launch, settings, snapshot, states
from gangrun.agent import OUTPUT
from gangrun.group import Group
from gangrun.records import SUBMITTING, Poll, Records, Run, state_directory
from gangrun.remote import LOCAL, Host, LoginNeeded, RemoteError, Unreachable, open_host
from gangrun.task import Task

LEAST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
INTERVAL_GROWTH = 1.3
LONGEST_GAP_S = 120.0  # a longer silence between two answers says nothing about what was between them
REOPENED_S = 86400.0  # for this long a lost run is asked about again: its record may come late
SUBMIT_PATIENCE_S = 120.0  # a run without a job for this long was never submitted
POLL_LOCK_TIMEOUT_S = 120.0


class Intent(NamedTuple):
    """A launch before it is sent. `snapshots` are by work directory, `missing` those that the host lacks."""

    plan: launch.Plan
    request: settings.Request
    snapshots: Mapping[str, snapshot.Snapshot]
    missing: Sequence[snapshot.Snapshot]


class Cluster:
    """A Slurm cluster, reached through its login node `host`: an alias of ~/.ssh/config, or `local` for this machine.

    Without a host, that of the settings (`default_host`), else this machine if it has sbatch. Raises SpecError where
    none of these is.
    """

    def __init__(
        self, host: str | None = None, *, config: settings.Settings | None = None, records: Records | None = None
    ) -> None:
        self.settings = config or settings.load(os.environ)
        self.name = host or self.settings.default_host or _this_machine(self.settings)
        self.host_settings = self.settings.hosts.get(self.name, settings.HostSettings())
        self.host: Host = open_host(self.name, self.host_settings.python)
        self.records = records or Records.of_user()
        self.root = self.host_settings.workdir or settings.DEFAULT_WORKDIR

    # --- launching

    def plan(
        self, work: Task | Group, *, dirty: bool = False, say: Callable[[str], None] = lambda words: None, **flags: Any
    ) -> Intent:
        """Everything that a launch would send, after one remote call. `flags`: see `settings.resolve`."""
        tasks = [member.task for member in work.members] if isinstance(work, Group) else [work]
        request, own = self._requests(work, flags)
        snapshots = {path: self._snapshot(path, dirty, say) for path in _workdirs(tasks)}
        found = launch.look(
            self.host,
            request.workdir.value,
            sorted({taken.digest for taken in snapshots.values()}),
            request.python.value,
            any(one.gpus.value is not None for one in own),
        )
        run = launch.new_run_id(work.name)
        place = found.place(run)
        if isinstance(work, Group):
            plan = group_plan.plan_group(work, run, place, request, own, snapshots)
        else:
            taken = next(iter(snapshots.values()), None)
            plan = launch.plan(work, run, place, request, launch.metadata(work, run, taken, request))
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
        self.records.add(launch.record_of(intent.plan, self.name, root), force)
        try:
            for taken in intent.missing:
                say(f"uploading {taken.files} files, {taken.size / 1e6:.1f} MB, as snapshot {taken.digest[:12]}")
                launch.upload(self.host, root, taken)
        except BaseException:
            self.records.forget(run)
            raise
        self.records.change(run, submitted=time.time())  # an upload may have taken long
        self._submit(intent, root, say)
        return Job(self, run)

    def _submit(self, intent: Intent, root: str, say: Callable[[str], None]) -> None:
        """The run is forgotten only where the host said no: in all other cases its job may be in the queue."""
        run = intent.plan.run
        words = f"it is not known whether run {run} was submitted; `gangrun queue` finds out"
        try:
            job, cluster = launch.submit(self.host, root, intent.plan, say)
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

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Ask the cluster about all runs in flight, in one call for all processes of this user here.

        A host is never asked more often than its `poll_interval`. Raises Unreachable, LoginNeeded.
        """
        least_s = max(max_age_s, self.host_settings.poll_interval or 0.0, LEAST_INTERVAL_S)
        with contextlib.suppress(Timeout), FileLock(str(self._lock_path()), timeout=POLL_LOCK_TIMEOUT_S):
            before = self.records.poll_of(self.name)
            if abs(time.time() - before.polled) < least_s:
                if before.error:
                    raise Unreachable(before.error)
                return
            self._poll(before)

    def _lock_path(self) -> Path:
        return self.records.path.parent / f"poll-{hashlib.sha256(self.name.encode()).hexdigest()[:12]}.lock"

    def _poll(self, before: Poll) -> None:
        recent = time.time() - REOPENED_S
        is_open = f"(NOT is_final OR (state = '{states.LOST}' AND ended > {recent}))"
        by_root: dict[str, list[Run]] = {}
        for run in self.records.all(self.name, is_open):
            by_root.setdefault(run.root, []).append(run)
        try:
            for root, runs in by_root.items():
                self._take_in(runs, self.host.call("poll", **_poll_request(root, runs)))
        except RemoteError as error:
            self.records.polled(self.name, Poll(time.time(), before.failures + 1, str(error)))
            raise
        self.records.polled(self.name, Poll(time.time()))

    def _take_in(self, runs: Sequence[Run], answer: Mapping[str, Any]) -> None:
        seen = Seen.of(answer)
        for run in runs:
            self.records.change(run.run, **_news(run, seen))

    def adopt(self) -> list[Job]:
        """Find the runs that lie on the cluster and are not recorded here."""
        found = self.host.call("runs", root=self.root)["runs"]
        new = [run for run in (_adopted(one, self.name, self.root) for one in found) if run]
        new = [run for run in new if self.records.get(run.run) is None]
        for run in new:
            self.records.put(run)
        return [Job(self, run.run) for run in new]


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


def as_they_end(
    jobs: Sequence[Job],
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda words: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Run]:
    """Each run when it has ended. Raises TimeoutError when nothing more has ended in time."""
    deadline = None if timeout_s is None else clock() + timeout_s
    interval_s, told, waiting = LEAST_INTERVAL_S, "", list(jobs)
    while waiting:
        told = refresh_all(waiting, say, told)
        seen = [(job, job.run) for job in waiting]
        yield from (run for _, run in seen if run.is_final)
        waiting = [job for job, run in seen if not run.is_final]
        left_s = None if deadline is None else deadline - clock()
        if waiting and left_s is not None and left_s <= 0:
            raise TimeoutError(
                "nothing has changed: {}".format(", ".join(f"{job.run_id} is {job.run.state}" for job in waiting))
            )
        if waiting:
            sleep(interval_s if left_s is None else min(interval_s, left_s))
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


def _workdirs(tasks: Sequence[Task]) -> list[str]:
    return list(dict.fromkeys(task.workdir for task in tasks if task.workdir is not None))


def _this_machine(config: settings.Settings) -> str:
    if shutil.which("sbatch"):
        return LOCAL
    raise SpecError(
        f"host: none given, no default_host in {config.path}, and no sbatch on this machine; use --host ALIAS"
    )


def _poll_request(root: str, runs: Sequence[Run]) -> dict[str, Any]:
    asked = [{"run": run.run, "job": run.job, "cluster": run.cluster} for run in runs]
    # By the cluster's own clock: "today" and a client's date have both been wrong (reframe-hpc/reframe#1083).
    days = 2 + int((time.time() - min(run.submitted for run in runs)) // 86400)
    return {
        "root": root,
        "runs": asked,
        "squeue": ["--noheader", "--array", "--states=all", "--format=" + states.SQUEUE_FORMAT],
        "sacct": ["-X", "-P", "-n", "-D", "--starttime=now-%ddays" % days, "--format=" + states.SACCT_FIELDS],
        "accounting": True,
    }


class Seen(NamedTuple):
    """One answer of a host, parsed once for all its runs; rows by the id of their job."""

    now: float
    answer: Mapping[str, Any]
    rows: Mapping[str, list[states.QueueRow]]
    accounts: Mapping[str, list[states.AccountRow]]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Seen:
        rows: dict[str, list[states.QueueRow]] = {}
        accounts: dict[str, list[states.AccountRow]] = {}
        for one in answer["squeue"].values():
            for row in states.parse_squeue(one["stdout"]):
                rows.setdefault(states.base_of(row.job), []).append(row)
        for one in (part for parts in answer["sacct"].values() for part in parts):
            for account in states.parse_sacct(one["stdout"]):
                accounts.setdefault(states.base_of(account.job), []).append(account)
        return cls(float(answer["now"]), answer, rows, accounts)

    def evidence(self, run: Run, job: str, cluster: str | None) -> states.Evidence:
        """With what squeue and sacct last said of the run, where they say nothing now."""
        rows = states.own_rows(self.rows.get(job, ()), job, run.run)
        has_answered = self.has_answered(cluster)
        is_absent = has_answered and not rows
        before = [states.AccountRow(*fields) for fields in run.evidence.get("account", ())]
        return states.Evidence(
            run=run.run,
            job=job,
            record=states.parse_record(self.answer["records"].get(run.run)),
            rows=rows,
            is_absent=is_absent,
            account=states.own_rows(self.accounts.get(job, ()), job, run.run) or tuple(before),
            accounting=_accounting(self.answer["sacct"].get(cluster or "", []), bool(before)),
            absent_s=_absent_s(run, self.now) if is_absent else 0.0 if has_answered else run.absent_s,
            cancel_asked=run.cancel_asked or run.run in self.answer["cancelled"],
            age_s=self.now - run.submitted,
            last_rows=rows or tuple(states.QueueRow(*fields) for fields in run.evidence.get("rows", ())),
            may_requeue=run.meta.get("request", {}).get("requeue") != "false",
            now=self.now,
        )

    def tasks(self, run: Run) -> Sequence[Mapping[str, Any]]:
        """Of a group, as its driver tells them now, or told them last."""
        try:
            record = json.loads(self.answer["records"].get(run.run) or "{}")
        except ValueError:
            return run.tasks
        return record.get("tasks") or run.tasks

    def job_of(self, run: Run) -> tuple[str | None, str | None]:
        """The job of a run whose launch was interrupted: as the host noted it, or by its name in the queue."""
        noted: tuple[str, str | None] | None = self.answer["jobs"].get(run.run)
        queued = [job for job, rows in self.rows.items() if any(row.name == run.run for row in rows)]
        return noted or ((min(queued, key=int), run.cluster) if queued else (None, None))

    def has_answered(self, cluster: str | None) -> bool:
        queue = self.answer["squeue"].get(cluster or "")
        return queue is not None and queue["rc"] == 0


def _news(run: Run, seen: Seen) -> dict[str, Any]:
    """What one answer says about one run, as fields to change."""
    job, cluster = (run.job, run.cluster) if run.job else seen.job_of(run)
    if job is None:
        return _never_submitted(run, seen)
    evidence = seen.evidence(run, job, cluster)
    verdict, record = states.judge(evidence), evidence.record
    waits_until = evidence.rows[0].start if evidence.rows and verdict.state == protocol.PENDING else None
    return {
        "job": job,
        "cluster": cluster,
        "state": verdict.state,
        "is_final": verdict.is_final,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "attempt": verdict.attempt,
        "progress": "" if verdict.is_final else states.progress(record),
        "estimate": waits_until,
        "started": record.started if record else run.started,
        "ended": (record.ended if record else None) or (run.ended or seen.now if verdict.is_final else None),
        "absent_s": evidence.absent_s,
        "seen": seen.now if seen.has_answered(cluster) else run.seen,
        "tasks": seen.tasks(run),
        "evidence": {"rows": evidence.last_rows, "account": evidence.account},
    }


def _absent_s(run: Run, now: float) -> float:
    """Only the time between two answers that both lacked the job counts."""
    if run.absent_s == 0.0 or run.seen is None:
        return 1e-3
    return run.absent_s + min(max(now - run.seen, 0.0), LONGEST_GAP_S)


def _accounting(answers: Sequence[Mapping[str, Any]], has_answered: bool) -> bool | None:
    if any("isabled" in one["stderr"] for one in answers):
        return False
    return True if has_answered or (answers and all(one["rc"] == 0 for one in answers)) else None


def _never_submitted(run: Run, seen: Seen) -> dict[str, Any]:
    is_recent = time.time() - run.submitted < SUBMIT_PATIENCE_S  # both on this machine's clock
    if seen.answer["submitting"].get(run.run) or is_recent:
        return {"state": SUBMITTING}
    words = "it never reached Slurm: the launch was interrupted"
    return {"state": protocol.FAILED_DRIVER, "is_final": True, "reason": words, "ended": seen.now}


def _adopted(found: Mapping[str, Any], host: str, root: str) -> Run | None:
    try:
        meta = json.loads(found["meta"])
        job, cluster = found["job"] or (None, None)
        meta.pop("diff", None)
        return Run(
            found["run"], meta["name"], host, root, job, cluster,
            submitted=meta["submitted"], num_nodes=meta["num_nodes"], meta=meta,
        )  # fmt: skip
    except (TypeError, ValueError, KeyError):
        return None
