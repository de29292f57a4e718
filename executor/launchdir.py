"""A job's directory on the shared home: its lock, its attempts, its status, its events."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from executor import protocol
from executor.job import Job
from executor.output import tell
from executor.protocol import GangrunError
from executor.rank_events import RankEvents
from executor.shared import append, remove_quietly, write_atomic, write_in_place
from executor.verdict import Verdict


class JobDirectory:
    """<cluster_home>/.gangrun/<slurm_job_id>/<job_id>/. One driver at a time; an attempt's end is never overwritten."""

    def __init__(self, path: str, job: Job) -> None:
        self.path = path
        self._begun = time.monotonic()
        self._lock = -1
        self._was_told = False
        self._errno = errno.EIO
        self._is_published = False
        self._launch: protocol.Launch | None = None
        self._ranks = RankEvents()
        self._beats = 0
        self._is_on_ray = job.slurm_job_id == protocol.ENGINE_RAY  # every driver of a job there is one more attempt
        self._status: dict[str, Any] = {
            "version": protocol.VERSION,
            "job_id": job.job_id,
            "engine" if self._is_on_ray else "slurm_job_id": job.slurm_job_id,
            "task_name": job.task_name,
            "num_nodes": job.num_nodes,
            "nodes": list(job.cluster_ips[: job.num_nodes]),
            "log_dir": job.log_dir,
            "attempt": 0 if self._is_on_ray else int(os.environ.get(protocol.SLURM_RESTART_COUNT) or 0),
            "driver": {"host": socket.gethostname(), "pid": os.getpid()},
            "state": None,
            "started": round(time.time(), 3),
        }

    @property
    def attempt(self) -> int:
        """0, then one more for every time that the job was started again."""
        return int(self._status["attempt"])

    @property
    def checkpoints(self) -> str:
        """Where the job's scripts note their checkpoints, in all attempts."""
        return os.path.join(self.path, protocol.CHECKPOINTS_NAME)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._begun

    def new_attempt(self, end_old_steps: Callable[[], None]) -> protocol.Launch:
        """Lock the job and make a directory that nobody uses. What lies there under our lock is a dead driver's: its
        steps are ended first, then its files go. Raises OSError, and GangrunError if another driver lives."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        self._take_lock()
        if self._is_on_ray:
            self._status["attempt"] = self._attempts_before()
        remove_quietly(os.path.join(self.path, protocol.EXIT_CODE_NAME))
        old = [name for name in os.listdir(self.path) if name.startswith(protocol.attempt_name(""))]
        if old:
            self._tell_lost_driver(old)
            end_old_steps()
        for name in old:
            remove_tree(os.path.join(self.path, name))
        self._launch = protocol.Launch(self._unused_directory())
        return self._launch

    def beat(self) -> None:
        """Tell the ranks that the driver lives."""
        self._beats += 1
        if self._launch is not None:
            with contextlib.suppress(OSError):
                write_in_place(self._launch.heartbeat, b"%19d\n" % self._beats)

    def _attempts_before(self) -> int:
        try:
            with open(os.path.join(self.path, protocol.STATUS_NAME), "rb") as file:
                return int(json.load(file)["attempt"]) + 1
        except (OSError, ValueError, TypeError, KeyError):
            return 0

    def _tell_lost_driver(self, attempts: Sequence[str]) -> None:
        """A driver that could tell nothing of its end beat to the last."""
        beats = [os.path.join(self.path, name, protocol.HEARTBEAT_NAME) for name in attempts]
        seen = [os.stat(path).st_mtime for path in beats if os.path.exists(path)]
        if seen:
            self.note(protocol.EVENT_DRIVER_LOST, seen=round(max(seen), 3))

    def enter(self, state: str, **details: Any) -> None:
        """Change the state, unless the job has ended. `details` are for the event."""
        if self._status["state"] in protocol.TERMINAL_STATES:
            return
        self._status["state"] = state
        self._status.setdefault("times", {})[state] = round(time.time(), 3)
        self._publish()
        self.note(protocol.EVENT_STATE, state=state, **details)

    def end(self, verdict: Verdict, ranks: list[dict[str, Any]], step: str = protocol.STEP_RUN) -> None:
        """Enter the last state of this attempt, with all that is known; `ranks` are those of this step."""
        first = None if verdict.first_failed is None else ranks[verdict.first_failed]
        self._status.update(
            exit_code=verdict.exit_code,
            reason=verdict.reason,
            ranks=ranks,
            first_failure=first,
            ended=round(time.time(), 3),
        )
        self._append([self._rank_ended(report, step) for report in ranks])
        self.enter(verdict.state, exit_code=verdict.exit_code, reason=verdict.reason)
        if verdict.state in protocol.TERMINAL_STATES:
            path = os.path.join(self.path, protocol.EXIT_CODE_NAME)
            self._try(lambda: write_atomic(path, b"%d\n" % verdict.exit_code))
        if not self._is_published:
            raise OSError(self._errno, f"{protocol.STATUS_NAME} could not be written: {os.strerror(self._errno)}")

    def progress(self, step: str, records: Sequence[dict[str, Any] | None]) -> None:
        """How many ranks of a step are in which state, for those who only read; written when it changes."""
        counts: dict[str, int] = {}
        for record in records:
            state = record.get("state") if record else protocol.RANK_WAITING
            counts[str(state)] = counts.get(str(state), 0) + 1
        self._append([self._event(event, fields) for event, fields in self._ranks.news(step, records)])
        found = {"step": step, "ranks": counts}
        if found != self._status.get("progress"):
            self._status["progress"] = found
            self._publish()

    def tell_nodes(self, nodes: Sequence[str]) -> None:
        """The nodes of the ranks, where these are known late."""
        self._status["nodes"] = list(nodes)
        self._publish()

    def tell_tasks(self, tasks: list[dict[str, Any]]) -> None:
        """How the tasks of a group stand."""
        self._status["tasks"] = tasks
        self._publish()

    def tell_queue(self, times: dict[str, float]) -> None:
        """How long the job waited for its nodes."""
        if times:
            self.note(protocol.EVENT_QUEUED, **times)

    def note(self, event: str, **fields: Any) -> None:
        """One line in events.jsonl, the source of every report."""
        self._append([self._event(event, fields)])

    def _event(self, event: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"time": round(time.time(), 3), "attempt": self._status["attempt"], "event": event, **fields}

    def _rank_ended(self, report: dict[str, Any], step: str) -> dict[str, Any]:
        is_lost = report["state"] == protocol.RANK_LOST
        heard = {"heard": self._ranks.heard(report["rank"])} if is_lost else {}
        return self._event(protocol.EVENT_RANK_ENDED, {"step": step, **report, **heard})

    def _append(self, events: Sequence[dict[str, Any]]) -> None:
        if not events:
            return
        lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        path = os.path.join(self.path, protocol.EVENTS_NAME)
        self._try(lambda: append(path, lines))

    def _publish(self) -> None:
        path, text = os.path.join(self.path, protocol.STATUS_NAME), json.dumps(self._status, indent=1).encode() + b"\n"
        # A full disk may still take what lies there already.
        self._is_published = self._try(lambda: write_atomic(path, text)) or self._try(
            lambda: write_in_place(path, text)
        )

    def _try(self, action: Callable[[], None]) -> bool:
        """Trouble with our own records is told once; it never changes what the user's job does."""
        try:
            action()
        except OSError as error:
            self._errno = error.errno or errno.EIO
            if not self._was_told:
                self._was_told = True
                tell(2, f"gangrun: cannot write in {self.path}: {error.strerror}; the job goes on\n")
            return False
        return True

    def clean(self) -> None:
        """Take away what only this attempt needed: signals, records, scripts, variables."""
        if self._launch is None:
            return
        remove_tree(self._launch.directory)
        os.close(self._lock)

    def _take_lock(self) -> None:
        path = os.path.join(self.path, protocol.LOCK_NAME)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 200).decode("utf-8", "replace").strip()
            raise GangrunError(
                f"another driver of this job is running ({holder}); its directory is {self.path}"
            ) from None
        except OSError:
            pass  # a file system without locks: attempts have directories of their own all the same
        os.ftruncate(self._lock, 0)
        os.write(self._lock, ("pid %d on %s\n" % (os.getpid(), socket.gethostname())).encode())

    def _unused_directory(self) -> str:
        base = os.path.join(self.path, protocol.attempt_name(self._status["attempt"]))
        for suffix in ("", *("-%d" % number for number in range(1, 1000))):
            try:
                os.mkdir(base + suffix, 0o700)
            except FileExistsError:
                continue
            return base + suffix
        raise GangrunError(f"{base} has been used a thousand times")


def remove_tree(path: str) -> None:
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            remove_quietly(os.path.join(directory, name))
        try:
            os.rmdir(directory)
        except OSError:
            pass
