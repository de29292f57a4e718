"""What this machine knows of its runs, in SQLite. Losing it loses nothing: each run describes itself on its cluster."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from executor import protocol
from executor.protocol import GangrunError

SUBMITTING = "SUBMITTING"  # the intent is recorded before the cluster is asked
BUSY_TIMEOUT_S = 30.0
ELSEWHERE = "move it away: `gangrun queue --adopt` finds the runs"
JSON_FIELDS = ("meta", "evidence", "tasks")
TABLES = ("runs", "hosts", "thens")
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, name TEXT NOT NULL, host TEXT NOT NULL, root TEXT NOT NULL, job TEXT, cluster TEXT,
    state TEXT NOT NULL, is_final INTEGER NOT NULL, exit_code INTEGER, reason TEXT NOT NULL, detail TEXT NOT NULL,
    attempt INTEGER NOT NULL, progress TEXT NOT NULL, estimate REAL, submitted REAL NOT NULL, started REAL, ended REAL,
    seen REAL, absent_s REAL NOT NULL, cancel_asked INTEGER NOT NULL, num_nodes INTEGER NOT NULL, meta TEXT NOT NULL,
    evidence TEXT NOT NULL, tasks TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS hosts (host TEXT PRIMARY KEY, polled REAL NOT NULL, error TEXT);
CREATE TABLE IF NOT EXISTS thens (
    run TEXT, command TEXT, pid INTEGER, started REAL, PRIMARY KEY (run, command));
"""


class Run(NamedTuple):
    """One run as last seen. Times are in seconds since 1970, on the clock of the host."""

    run: str
    name: str
    host: str
    root: str
    job: str | None = None
    cluster: str | None = None
    state: str = SUBMITTING
    is_final: bool = False
    exit_code: int | None = None
    reason: str = ""
    detail: str = ""
    attempt: int = 0
    progress: str = ""
    estimate: float | None = None
    submitted: float = 0.0
    started: float | None = None
    ended: float | None = None
    seen: float | None = None
    absent_s: float = 0.0
    cancel_asked: bool = False
    num_nodes: int = 1
    meta: Mapping[str, Any] = {}
    evidence: Mapping[str, Any] = {}  # what squeue and sacct last said, for the next look
    tasks: Sequence[Mapping[str, Any]] = ()  # of a group, as its driver tells them

    @property
    def job_name(self) -> str:
        """The id as people type it."""
        return (self.job or "?") + (f";{self.cluster}" if self.cluster else "")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "evidence"}


def refuse_selector(name: str) -> None:
    """Raises UsageError for what would be taken for something else where a job is named: `last`, `all`, or a job id."""
    if name in ("last", "all") or name.replace(";", "").isdigit():
        raise protocol.UsageError(f"name={name!r}: is how commands name other jobs; use another")


class Poll(NamedTuple):
    """When a host was asked last, and what was wrong if it did not answer."""

    polled: float = 0.0
    error: str | None = None


class Busy(protocol.UsageError):
    """A run of this name is in flight."""


class Records:
    """The table of runs of this user on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            self._database.executescript(SCHEMA)
            is_ours = _columns(self._database) == _columns(_new())
        except (OSError, sqlite3.Error) as error:
            raise self._trouble(error) from error
        if not is_ours:
            self.close()
            raise GangrunError(f"{path}: another version of gangrun keeps its records there; {ELSEWHERE}")
        with contextlib.suppress(OSError):
            path.chmod(0o600)

    @classmethod
    def of_user(cls) -> Records:
        return cls(state_directory() / "runs.db")

    def close(self) -> None:
        self._database.close()

    def _trouble(self, error: Exception) -> GangrunError:
        ways = f"free the disk or make it writable; if it is damaged, {ELSEWHERE}"
        return GangrunError(f"{self.path}: cannot keep records: {error}; {ways}")

    def _execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(sql, values)
        except sqlite3.Error as error:
            raise self._trouble(error) from error

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has ended the transaction already
                self._database.execute("ROLLBACK")
            raise
        self._execute("COMMIT")

    # --- runs

    def add(self, run: Run, force: bool = False) -> None:
        """Record the intent. Raises Busy if a run of this name is in flight on the host."""
        with self._exclusive():
            if not force:
                self.refuse_twin(run.host, run.name)
            self._put(run)

    def refuse_twin(self, host: str, name: str) -> None:
        """Raises Busy if a run of this name is in flight on the host."""
        busy = self._one("host = ? AND name = ? AND NOT is_final", host, name)
        if busy:
            ways = f"`gangrun wait {busy.run}`, `gangrun cancel {busy.run}`, or --force for a second one"
            raise Busy(f"name={name!r}: run {busy.run} (job {busy.job_name}) is {busy.state}; use {ways}")

    def put(self, run: Run) -> None:
        with self._exclusive():
            self._put(run)

    def _put(self, run: Run) -> None:
        row = {**run._asdict(), **{name: json.dumps(getattr(run, name)) for name in JSON_FIELDS}}
        self._execute(
            "INSERT OR REPLACE INTO runs ({}) VALUES ({})".format(",".join(row), ",".join("?" * len(row))),
            tuple(row.values()),
        )

    def change(self, run: str, **fields: Any) -> None:
        """Change some fields of one run, and no others: another process may have changed those."""
        fields = {name: json.dumps(value) if name in JSON_FIELDS else value for name, value in fields.items()}
        names = ", ".join(f"{name} = ?" for name in fields)
        self._execute(f"UPDATE runs SET {names} WHERE run = ?", (*fields.values(), run))

    def forget(self, run: str) -> None:
        self._execute("DELETE FROM runs WHERE run = ?", (run,))

    def get(self, run: str) -> Run | None:
        return self._one("run = ?", run)

    def in_flight(self, host: str | None = None) -> list[Run]:
        return self.all(host, "NOT is_final")

    def all(self, host: str | None = None, condition: str = "1") -> list[Run]:
        """Newest first."""
        where, values = (f"host = ? AND {condition}", [host]) if host else (condition, [])
        return self._select(where, *values)

    def find(self, word: str, host: str | None = None) -> list[Run]:
        """The runs that a selector names: `all` (in flight), `last`, a run id, a job id, or a name (its newest run)."""
        if word == "all":
            return self.in_flight(host)
        runs = self.all(host)
        if word == "last":
            return runs[:1]
        exact = [run for run in runs if word in (run.run, run.job, run.job_name)]
        return exact[:1] or [run for run in runs if run.name == word][:1]

    def _one(self, where: str, *values: Any) -> Run | None:
        return next(iter(self._select(where, *values)), None)

    def _select(self, where: str, *values: Any) -> list[Run]:
        fields = ",".join(Run._fields)
        query = f"SELECT {fields} FROM runs WHERE {where} ORDER BY submitted DESC, rowid DESC"
        return [_run(row) for row in self._execute(query, values)]

    # --- hosts

    def poll_of(self, host: str) -> Poll:
        row = self._execute("SELECT polled, error FROM hosts WHERE host = ?", (host,)).fetchone()
        return Poll(*row) if row else Poll()

    def polled(self, host: str, poll: Poll) -> None:
        self._execute("INSERT OR REPLACE INTO hosts VALUES (?, ?, ?)", (host, *poll))

    # --- commands to run after a wait

    def claim_then(self, run: str, command: str) -> bool:
        """Whether this process is the one to run the command: once per run, unless its runner died before it began."""
        with self._exclusive():
            row = self._execute(
                "SELECT pid, started FROM thens WHERE run = ? AND command = ?", (run, command)
            ).fetchone()
            if row and (row[1] is not None or _lives(row[0])):
                return False
            self._execute("INSERT OR REPLACE INTO thens VALUES (?, ?, ?, NULL)", (run, command, os.getpid()))
            return True

    def then_started(self, run: str, command: str) -> None:
        self._execute("UPDATE thens SET started = ? WHERE run = ? AND command = ?", (time.time(), run, command))


def _new() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    return database


def _columns(database: sqlite3.Connection) -> dict[str, list[str]]:
    return {table: [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")] for table in TABLES}


def state_directory() -> Path:
    """$XDG_STATE_HOME/gangrun (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    home = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".local" / "state"
    return home / "gangrun"


def _run(row: tuple[Any, ...]) -> Run:
    values = dict(zip(Run._fields, row))
    values.update(
        is_final=bool(values["is_final"]),
        cancel_asked=bool(values["cancel_asked"]),
        **{name: json.loads(values[name]) for name in JSON_FIELDS},
    )
    return Run(**values)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
