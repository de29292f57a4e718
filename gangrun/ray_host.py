"""A Ray cluster as a host: answers the questions that the agent of a login node answers, by Ray's dashboard alone."""

from __future__ import annotations

import base64
import contextlib
import io
import posixpath
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from executor import protocol
from gangrun import agent, ray_states, states
from gangrun.ray_api import WHOLE_LOG, Dashboard, Refused
from gangrun.ray_states import Info, parse_info
from gangrun.remote import Forgotten, Host, RemoteError, Unreachable

LOG_FOLDER = "gangrun"  # of our runs, in the log directory of Ray's session; ray_entry makes it
META_KEY = "gangrun"  # in the metadata of a job: what the run says of itself
PIECE_TIMEOUT_S = 30.0
WHOLE_LOG_S = 600.0  # some are large
ALIVE_S = 1.0  # between two looks at a job whose log is silent
CHECK_S = 20.0  # a log that is silent for so long is compared with what Ray has of it: a connection may die unseen
TAIL_BYTES = 2048
UNKNOWN_SIZE = 1 << 62  # of a log: its end is where no more comes
TAIL_LINES = 50
ASKED_AT_ONCE = 16
SECOND_STOP, LAST_STOP = "TERM", "KILL"
# Only if that pid is the driver of this run still. A job of its own, since Ray has no other way to reach a process.
SIGNAL_COMMAND = "grep -qaF -- {run} /proc/{pid}/cmdline && kill -s {signal} {pid}"
HELPER_S = 30.0
NOT_ON_RAY = {
    "sizes": "nothing to remove here: Ray removes packages that no job needs, and logs go with its session",
    "ask": "groups of tasks run on Slurm only",
    "report": "reports are made of runs on Slurm only",
}


class RayHost(Host):
    """What `remote.Host` is for a login node."""

    def __init__(self, address: str, python: str | None = None) -> None:
        super().__init__(python)
        self.dashboard = Dashboard(address)
        self.name = self.dashboard.address
        self._logs: dict[tuple[str, str], _Log] = {}

    def call(self, op: str, *, timeout_s: float = 0.0, payload: Any = None, **request: Any) -> Any:
        """What the agent's operation of this name returns. Raises RemoteError and kinds."""
        self.calls += 1
        operation: Callable[..., Any] | None = getattr(self, f"op_{op}", None)
        if operation is None:
            raise Refused(f"{self.name}: {NOT_ON_RAY.get(op, f'not on Ray ({op})')}")
        request.pop("root", None)
        return operation(**request)

    # --- what a run says of itself

    def op_poll(self, runs: Sequence[Mapping[str, Any]], **_: Any) -> Mapping[str, Any]:
        """What Ray's list says of these runs: one call, however many they are."""
        found = {job.get("submission_id"): job for job in self.dashboard.jobs()}
        return {"now": time.time(), "jobs": {run["run"]: found.get(run["run"]) for run in runs}}

    def op_commands(self, commands: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        """There are no commands of Slurm's."""
        return {name: {"rc": 127, "stdout": "", "stderr": ""} for name in commands}

    def op_describe(self, run: str) -> Mapping[str, Any]:
        return {"record": self.record(run, parse_info(self.dashboard.job(run)))}

    def op_runs(self) -> Mapping[str, Any]:
        """Ours among the jobs that the cluster knows."""
        found = [(job, (job.get("metadata") or {}).get(META_KEY)) for job in self.dashboard.jobs()]
        runs = [
            {"run": job["submission_id"], "job": [job["submission_id"], None], "meta": meta}
            for job, meta in found
            if meta and job.get("submission_id")
        ]
        return {"runs": runs}

    def record(self, run: str, info: Info | None) -> str | None:
        """The driver's status file; None if there is none, or no way to read it now."""
        if info is None or info.node is None:
            return None
        try:
            text = self.dashboard.log(info.node, _in_folder(run, protocol.STATUS_NAME))
        except RemoteError:
            return None
        return None if text is None else text.decode("utf-8", "replace")

    # --- logs

    def op_read(
        self, run: str, job: str | None, name: str, inode: int | None, offset: int, size: int, wait_s: float,
        before: str | None,
    ) -> Mapping[str, Any]:  # fmt: skip
        """As agent.op_read: bytes from an offset on, as soon as there are some, or the job is not as before."""
        log = self._logs.get((run, name))
        if log is None or log.offset != offset or log.follows != (wait_s > 0):
            log = self._open(run, name, offset, wait_s > 0)
        if log is None:
            return self._nothing(run, offset, wait_s, before)
        try:
            data, state = log.read(wait_s, before, lambda: self._state(run))
        except RemoteError:
            self._close(run, name)
            raise
        return {
            "inode": 1, "offset": log.offset, "size": UNKNOWN_SIZE, "is_new": False, "is_there": True,
            "data": base64.b64encode(data).decode(), "record": state,
        }  # fmt: skip

    def _nothing(self, run: str, offset: int, wait_s: float, before: str | None) -> Mapping[str, Any]:
        deadline = time.monotonic() + wait_s
        state = self._state(run)
        while state == before and time.monotonic() < deadline:
            time.sleep(min(ALIVE_S, max(0.0, deadline - time.monotonic())))
            if self._place(run, agent.OUTPUT) is not None:
                break
            state = self._state(run)
        nothing = {"inode": None, "offset": offset, "size": 0, "data": "", "is_new": False, "is_there": False}
        return {**nothing, "record": state}

    def _open(self, run: str, name: str, offset: int, follow: bool) -> _Log | None:
        self._close(run, name)
        place = self._place(run, name)
        if place is None:
            return None
        self._logs[run, name] = log = _Log(self.dashboard, *place, offset, follow)
        return log

    def _close(self, run: str, name: str) -> None:
        log = self._logs.pop((run, name), None)
        if log is not None:
            log.close()

    def _place(self, run: str, name: str) -> tuple[str, str] | None:
        """The node that has a log, and its name there; None: nobody has it yet."""
        info = parse_info(self.dashboard.job(run))
        if info is None:
            raise Forgotten(f"{self.name}: Ray does not know {run}; its output is gone")
        if info.node is None:
            return None
        if name == agent.OUTPUT:
            return info.node, f"job-driver-{run}.log"
        base = posixpath.basename(name)
        node = next((node for node, names in self._found(run, base).items() if names), None)
        return (node, _in_folder(run, base)) if node else None

    def _places(self, run: str) -> Mapping[str, tuple[str, str]]:
        """Of all logs of a run: each node is asked once, however many there are."""
        output = self._place(run, agent.OUTPUT)
        found = {
            f"{agent.LOGS}/{posixpath.basename(name)}": (node, _in_folder(run, posixpath.basename(name)))
            for node, names in self._found(run, "*.log").items()
            for name in names
        }
        return {**found, **({agent.OUTPUT: output} if output else {})}

    def _found(self, run: str, pattern: str) -> Mapping[str, list[str]]:
        """The logs of a run by node. A node that is gone has none any more."""
        nodes = [str(node.get("node_id")) for node in self.dashboard.nodes()]
        if not nodes:
            return {}
        with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(nodes))) as pool:
            return dict(zip(nodes, pool.map(lambda node: self._logs_of(node, _in_folder(run, pattern)), nodes)))

    def _logs_of(self, node: str, pattern: str) -> list[str]:
        try:
            return self.dashboard.logs(node, pattern)
        except RemoteError:
            return []

    def _state(self, run: str) -> str | None:
        """How the job is, in the form of a driver's record: what whoever follows a log looks at."""
        info = parse_info(self.dashboard.job(run))
        return None if info is None else ray_states.as_record(info, run)

    def op_list_logs(self, run: str) -> Mapping[str, Any]:
        return {"logs": dict.fromkeys(self._places(run), 0)}

    def op_tar(self, run: str, logs: Sequence[str]) -> Mapping[str, Any]:
        places = self._places(run)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name in logs:
                place = places.get(name)
                content = (self.dashboard.log(*place, limit_s=WHOLE_LOG_S) if place else None) or b""
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(content), int(time.time())
                tar.addfile(member, io.BytesIO(content))
        return {"archive": base64.b64encode(buffer.getvalue()).decode()}

    # --- cancel

    def op_cancel(self, runs: Sequence[Mapping[str, Any]], how: str) -> Mapping[str, Any]:
        """`soft`: TERM to the driver, which has the time that the job's environment says. `force`: a second one, at
        which it stops waiting. `hard` and `kill`: KILL to the driver; Ray ends what it had started."""
        answers = {}
        for run in runs:
            try:
                self._stop(str(run["run"]), how)
                answers[run["run"]] = {"rc": 0, "stderr": ""}
            except Unreachable as error:
                answers[run["run"]] = {"rc": 1, "stderr": str(error)}
        return {"answers": answers}

    def _stop(self, run: str, how: str) -> None:
        self.dashboard.stop(run)
        if how != "soft":
            self._signal(run, SECOND_STOP if how == "force" else LAST_STOP)

    def _signal(self, run: str, signal: str) -> None:
        record = states.mapping_of(self.record(run, parse_info(self.dashboard.job(run))))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            pid = int(record["driver"]["pid"])
            self._help(
                f"{run}-{signal.lower()}-{int(time.time())}", SIGNAL_COMMAND.format(run=run, pid=pid, signal=signal)
            )

    def _help(self, name: str, command: str) -> None:
        """A job that is forgotten when it has ended."""
        self.dashboard.submit({"submission_id": name, "entrypoint": command, "metadata": {"gangrun_helper": "1"}})
        deadline = time.monotonic() + HELPER_S
        while time.monotonic() < deadline:
            info = parse_info(self.dashboard.job(name))
            if info is None or info.is_over:
                break
            time.sleep(0.5)
        with contextlib.suppress(RemoteError):
            self.dashboard.delete(name)


class _Log:
    """A log that is being read: where the reading has come to, and the stream that it comes from."""

    def __init__(self, dashboard: Dashboard, node: str, name: str, offset: int, follow: bool) -> None:
        self._dashboard, self._node, self._name, self.follows = dashboard, node, name, follow
        self._tail = b""
        self._lines = -offset if offset < 0 else WHOLE_LOG
        if self._lines > 0 and follow:
            offset, self._lines = self._begin_of_last(self._lines), WHOLE_LOG
        self.offset = max(0, offset)
        self._is_complete = False
        self._looked = 0.0
        self._open(follow)

    def _open(self, follow: bool) -> None:
        """Ray has no way to begin in the middle: what has been read comes again, and is skipped."""
        self._is_open_ended = follow
        self._skip, self._checked = self.offset, time.monotonic()
        self._stream = self._dashboard.open_log(self._node, self._name, self._lines, follow=follow)

    def _begin_of_last(self, count: int) -> int:
        content = self._dashboard.log(self._node, self._name, limit_s=WHOLE_LOG_S) or b""
        at = len(content) - (1 if content.endswith(b"\n") else 0)
        for _ in range(count):
            at = content.rfind(b"\n", 0, max(at, 0))
            if at < 0:
                return 0
        return at + 1

    def close(self) -> None:
        self._stream.close()

    def read(self, wait_s: float, before: str | None, state_now: Callable[[], str | None]) -> tuple[bytes, str | None]:
        """The next bytes and the job's state; no bytes where there were none in time, or the state has changed."""
        deadline, state = time.monotonic() + wait_s, before
        while not self._is_complete:
            left_s = max(0.0, deadline - time.monotonic())
            data = self._stream.read(min(left_s, ALIVE_S) if self._is_open_ended else PIECE_TIMEOUT_S)
            if data is None:
                self._on_end()
            elif data:
                if new := self._taken(data):
                    return new, state
            elif self._is_open_ended:
                state = self._look(state, state_now, is_late=left_s <= 0)
                if state != before or left_s <= 0:
                    break
            else:
                raise Unreachable(f"{self._dashboard.address}: no more of {self._name} within {PIECE_TIMEOUT_S:.0f} s")
        if self._is_complete and wait_s > 0:
            time.sleep(min(wait_s, ALIVE_S))
        return b"", state

    def _on_end(self) -> None:
        if self._is_open_ended:  # Ray's agent was restarted, or something between us ended the connection
            raise Unreachable(f"{self._dashboard.address}: the log broke off")
        self._is_complete = True

    def _taken(self, data: bytes) -> bytes:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._checked = time.monotonic()
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        self.offset += len(data) - skipped
        return data[skipped:]

    def _look(self, state: str | None, state_now: Callable[[], str | None], is_late: bool) -> str | None:
        """The log is silent: how is the job, and is that all there is?"""
        now = time.monotonic()
        is_due = is_late or now - self._looked >= ALIVE_S
        if is_due:
            self._looked, state = now, state_now()
        is_over = state is not None and ray_states.is_terminal(state)
        if (is_due and is_over) or now - self._checked > CHECK_S:
            self._checked = now
            if not self._has_all():
                self.close()
                self._open(follow=not is_over)
        return state

    def _has_all(self) -> bool:
        """Whether the end of the log has come through: a connection may die unseen."""
        end = self._dashboard.log(self._node, self._name, TAIL_LINES)
        if end is None or not self._tail:
            return not end
        return end.endswith(self._tail) or self._tail.endswith(end)


def _in_folder(run: str, name: str) -> str:
    return f"{LOG_FOLDER}/{run}/{name}"
