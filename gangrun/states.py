"""What is known of a run, and the one pure function that says what state it is in. Runs in the client.

Slurm's words are named here and nowhere else in the client. Nothing is concluded from a controller that did not answer.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union

from executor import protocol
from gangrun.explain import reasons

LOST = "LOST"  # nobody recorded how it ended; opened again if a record appears after all
LIVE_STATES = (protocol.PENDING, protocol.SETTING_UP, protocol.RUNNING)
FINAL_STATES = (*protocol.TERMINAL_STATES, LOST)

EXIT_SUCCEEDED = 0
EXIT_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NOT_FOUND = 102
EXIT_CANCELLED = 103

SETTLE_S = 60.0  # the driver's last record may reach us this late: NFS clients keep a directory for up to 60 s
REQUEUE_S = 300.0  # a preempted job may be gone from the queue before Slurm runs it again
SKEW_S = 5.0  # of two nodes' clocks; a requeued job starts 6 s after the end of its last attempt at the earliest


class Kind(enum.Enum):
    """What a word of Slurm's means for a run."""

    WAITING = "waiting"
    LIVE = "live"
    ENDING = "ending"
    MAYBE_REQUEUED = "maybe requeued"  # no end while the job is in the queue: the same id may run again
    OVER_BADLY = "over badly"
    OVER_WELL = "over well"


OVER = (Kind.OVER_BADLY, Kind.OVER_WELL)
ENDED = (*OVER, Kind.MAYBE_REQUEUED)
# Of a heterogeneous job, whose components may differ, the first of these is the answer for the whole.
PRECEDENCE = (Kind.LIVE, Kind.WAITING, Kind.ENDING, Kind.MAYBE_REQUEUED, Kind.OVER_BADLY, Kind.OVER_WELL)

COMPLETED, OUT_OF_MEMORY, RESIZING, REVOKED = "COMPLETED", "OUT_OF_MEMORY", "RESIZING", "REVOKED"
# https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES, https://slurm.schedmd.com/job_state_codes.html
WORDS = {
    Kind.WAITING: "PENDING CONFIGURING POWER_UP_NODE EXPEDITING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT"
    " RESV_DEL_HOLD",
    Kind.LIVE: "RUNNING SUSPENDED STOPPED SIGNALING RESIZING UPDATE_DB",
    Kind.ENDING: "COMPLETING STAGE_OUT",
    Kind.MAYBE_REQUEUED: "PREEMPTED NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL REVOKED",
    Kind.OVER_BADLY: "FAILED CANCELLED TIMEOUT DEADLINE OUT_OF_MEMORY",
    Kind.OVER_WELL: "COMPLETED",
}
KINDS = {word: kind for kind, words in WORDS.items() for word in words.split()}

# Ends that Slurm knows the cause of; the run FAILED.
CAUSES = {
    "TIMEOUT": "time limit",
    "DEADLINE": "its deadline could not be met",
    OUT_OF_MEMORY: "out of memory",
    "NODE_FAIL": "a node failed, and Slurm did not run the job again",
    "BOOT_FAIL": "its nodes did not boot",
    "PREEMPTED": "preempted, and Slurm did not run the job again",
    "LAUNCH_FAILED": "Slurm could not launch it on its nodes",
    "RECONFIG_FAIL": "its nodes could not be configured",
}
TIME_LIMIT_WORDS = "DUE TO TIME LIMIT"  # slurmstepd's; a driver that they reach records a cancel

RESV_DEL_HOLD = "RESV_DEL_HOLD"
HELD_WORDS = ("REQUEUE_HOLD", "SPECIAL_EXIT", RESV_DEL_HOLD)
NEW_RESERVATION = "its reservation is gone: scontrol update jobid={job} reservationname=OTHER, then " + reasons.RELEASE
BAD_CONSTRAINTS = "BadConstraints"
NO_REASONS = ("", "None", "(null)")
NOT_STARTING = ": it will not start by itself"


# --- what Slurm's commands print

JOB_ID = re.compile(r"\d+(?:\+\d+|_\d+|_\[[^\]|]*\])?")
WORD = re.compile(r"[A-Z][A-Z_]+")
# %D says 1K for 1024 nodes.
COUNT = re.compile(r"(\d+)(K?)")
EXIT_CODE = re.compile(r"(\d+):(\d+)")


class QueueRow(NamedTuple):
    """One row of squeue. Times are seconds since 1970; `start` and `end` of what is not there yet are estimates."""

    job: str
    state: str
    reason: str
    start: float | None
    end: float | None
    submitted: float | None
    nodes: str
    num_nodes: int | None
    used: str
    limit: str
    partition: str
    name: str


# For SLURM_TIME_FORMAT=%s. A name may hold any character: it comes last.
SQUEUE_FORMAT = "%i|%T|%S|%e|%V|%D|%M|%l|%P|%N|%r|%j"
SQUEUE_COLUMNS = SQUEUE_FORMAT.count("|")


def parse_squeue(text: str) -> list[QueueRow]:
    """The rows among whatever a site prints around them."""
    return [_queue_row(*fields) for fields in _rows(text, SQUEUE_COLUMNS)]


def _rows(text: str, columns: int) -> Iterable[list[str]]:
    for line in text.splitlines():
        fields = line.strip().split("|", columns)
        if len(fields) == columns + 1 and JOB_ID.fullmatch(fields[0]) and WORD.match(fields[1]):
            yield fields


def _queue_row(
    job: str,
    state: str,
    start: str,
    end: str,
    submitted: str,
    count: str,
    used: str,
    limit: str,
    partition: str,
    nodes: str,
    reason: str,
    name: str,
) -> QueueRow:
    num_nodes, times = _count(count), (_time(start), _time(end), _time(submitted))
    return QueueRow(job, _word(state), reason, *times, nodes, num_nodes, used, limit, partition, name)


class AccountRow(NamedTuple):
    """One attempt in sacct's list. `words` is its state as printed, such as `CANCELLED by 1000`."""

    job: str
    name: str
    state: str
    exit_code: int | None
    signal: int | None
    submitted: float | None
    start: float | None
    end: float | None
    reason: str
    words: str = ""


# For `sacct -X -P -n -D -o` and SLURM_TIME_FORMAT=%s. A name may hold any character: it comes last.
SACCT_FIELDS = "JobID,State,ExitCode,Submit,Start,End,Reason,JobName"
SACCT_COLUMNS = SACCT_FIELDS.count(",")


def parse_sacct(text: str) -> list[AccountRow]:
    """The rows among whatever a site prints around them; steps are none."""
    return [_account_row(*fields) for fields in _rows(text, SACCT_COLUMNS)]


def _account_row(
    job: str, state: str, code: str, submitted: str, start: str, end: str, reason: str, name: str
) -> AccountRow:
    numbers = EXIT_CODE.fullmatch(code)
    exit_code, signal = (int(numbers.group(1)), int(numbers.group(2))) if numbers else (None, None)
    times = (_time(submitted), _time(start), _time(end))
    return AccountRow(job, name, _word(state), exit_code, signal, *times, reason, state)


def _word(state: str) -> str:
    """`CANCELLED+` and `CANCELLED by 1000` are CANCELLED."""
    found = WORD.match(state)
    return found.group() if found else state


def _time(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and int(text) else None


def _count(text: str) -> int | None:
    found = COUNT.fullmatch(text)
    return int(found.group(1)) * (1024 if found.group(2) else 1) if found else None


_Row = TypeVar("_Row", QueueRow, AccountRow)


def base_of(job: str) -> str:
    """The id that sbatch printed, of a component `9+1` or a task `7_3`."""
    return re.split(r"[+_]", job)[0]


def own_rows(rows: Sequence[_Row], job: str | None, run: str) -> tuple[_Row, ...]:
    """squeue's or sacct's rows of this run. Ids are used again: another name is somebody else's job."""
    mine = [row for row in rows if job is None or base_of(row.job) == job]
    bases = {base_of(row.job) for row in mine if row.name == run}  # a component may have a name of its own
    return tuple(row for row in mine if row.name == run or ("+" in row.job and base_of(row.job) in bases))


# --- what the driver records


class Record(NamedTuple):
    """The driver's own record of an attempt. `counts` says how many ranks of its `step` are in which state."""

    state: str
    attempt: int
    exit_code: int | None = None
    reason: str = ""
    started: float | None = None
    ended: float | None = None
    first_failure: Mapping[str, Any] | None = None
    ranks: tuple[Mapping[str, Any], ...] = ()
    num_nodes: int | None = None
    times: Mapping[str, float] = {}
    job: str = ""
    step: str = ""
    counts: Mapping[str, int] = {}

    @property
    def is_terminal(self) -> bool:
        return self.state in protocol.TERMINAL_STATES


def parse_record(text: str | None) -> Record | None:
    """The driver's status file; None if there is none, it is half there, or somebody else's."""
    return record_of(mapping_of(text))


def mapping_of(text: str | None) -> dict[str, Any]:
    """What a file of JSON says; empty while there is none, it is half there, or somebody else's."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def record_of(status: Mapping[str, Any]) -> Record | None:
    attempt = _integer(status.get("attempt"))
    if attempt is None or status.get("state") not in (*LIVE_STATES, *protocol.TERMINAL_STATES):
        return None
    ranks = tuple(rank for rank in _of_kind(status.get("ranks"), list) if isinstance(rank, dict))
    progress = _of_kind(status.get("progress"), dict)
    counts = _of_kind(progress.get("ranks"), dict).items()
    return Record(
        state=status["state"],
        attempt=attempt,
        exit_code=_integer(status.get("exit_code")),
        reason=_of_kind(status.get("reason"), str),
        started=_number(status.get("started")),
        ended=_number(status.get("ended")),
        first_failure=_of_kind(status.get("first_failure"), dict) or None,
        ranks=ranks,
        num_nodes=_integer(status.get("num_nodes")),
        times=_of_kind(status.get("times"), dict),
        job=str(status.get("slurm_job_id") or ""),
        step=_of_kind(progress.get("step"), str),
        counts={state: count for state, count in counts if _integer(count) is not None},
    )


def _of_kind(value: Any, kind: type[Any]) -> Any:
    return value if isinstance(value, kind) else kind()


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def progress(record: Record | None) -> str:
    """`setup 3/4 nodes`, `2/4 ranks done, 1 failed`; where the record has no numbers, what runs where."""
    if record is None or not record.num_nodes or record.state == protocol.PENDING:
        return ""
    is_setup = record.state in (protocol.SETTING_UP, protocol.FAILED_SETUP)
    counts = _counts(record, is_setup)
    if not counts:
        nodes = "1 node" if record.num_nodes == 1 else "%d nodes" % record.num_nodes
        return "" if record.is_terminal else "{} on {}".format("setup" if is_setup else "running", nodes)
    done = "%d/%d" % (counts.get(protocol.RANK_DONE, 0), record.num_nodes)
    failed = counts.get(protocol.RANK_FAILED, 0) + counts.get(protocol.RANK_BROKEN, 0)
    return (f"setup {done} nodes" if is_setup else f"{done} ranks done") + (f", {failed} failed" if failed else "")


def _counts(record: Record, is_setup: bool) -> Mapping[str, int]:
    """Of the step at hand: when the run begins, the record still tells of setup."""
    if record.ranks:
        return Counter(str(rank.get("state")) for rank in record.ranks)
    return record.counts if (record.step == protocol.STEP_SETUP) == is_setup else {}


# --- the verdict


class Evidence(NamedTuple):
    """Everything that is known of a run at one moment. All times are the cluster's."""

    run: str  # the run's id, which is its job's name
    job: str | None  # the id that sbatch printed, without the cluster
    record: Record | None
    rows: tuple[QueueRow, ...]  # squeue's, of this job
    is_absent: bool  # squeue answered and has no row of this job
    account: tuple[AccountRow, ...]  # what sacct last said of the id
    accounting: bool | None  # sacct has answered; False: there is no accounting; None: not asked, or no answer yet
    absent_s: float  # how long it has been absent; time without an answering controller is not counted
    cancel_asked: bool  # a cancel was asked for before the run was known to have ended
    age_s: float  # since it was submitted
    last_rows: tuple[QueueRow, ...] = ()  # the last rows of this job that squeue ever showed
    may_requeue: bool = True  # False: Slurm was asked never to run it again
    now: float | None = None  # the cluster's clock; without it, an end in the queue counts once the row is gone


class Verdict(NamedTuple):
    """What a run's state is. `detail` holds Slurm's own words; `exit_code` is None where nobody knows it."""

    state: str
    is_final: bool
    exit_code: int | None = None
    reason: str = ""
    attempt: int = 0
    detail: str = ""


def exit_code_of(verdict: Any) -> int:
    if not verdict.is_final:
        return EXIT_UNFINISHED
    return {protocol.SUCCEEDED: EXIT_SUCCEEDED, protocol.CANCELLED: EXIT_CANCELLED}.get(verdict.state, EXIT_FAILED)


class _Case(NamedTuple):
    """Evidence in order: the row that counts of each source, and the record if it is of the latest attempt."""

    evidence: Evidence
    record: Record | None
    row: QueueRow | None
    last: QueueRow | None
    account: AccountRow | None
    attempt: int

    @property
    def is_absent(self) -> bool:
        return self.row is None and (self.evidence.is_absent or bool(self.evidence.rows))


_AnyRow = Union[QueueRow, AccountRow]


def judge(evidence: Evidence) -> Verdict:
    """The record of the current attempt is the best witness, then squeue, then sacct.

    No bad end without a controller that answered: the record may be of an attempt before a requeue.
    """
    case = _case(evidence)
    if case.record is not None and case.record.is_terminal and _is_confirmed(case):
        return _recorded(case, case.record)
    if case.row is not None:
        return _in_queue(case, case.row)
    return _gone(case) if case.is_absent else _unanswered(case)


def kind_of(word: str) -> Kind:
    """An unknown word is no end."""
    return KINDS.get(word, Kind.LIVE)


def _case(evidence: Evidence) -> _Case:
    accounts = own_rows(evidence.account, evidence.job, evidence.run)
    attempts = _attempts(accounts)
    account = _first([rows[-1] for rows in attempts.values()])
    count = max(map(_count_of, attempts.values()), default=0)
    rows, last_rows = (own_rows(rows, evidence.job, evidence.run) for rows in (evidence.rows, evidence.last_rows))
    row, last, record = _first(rows), _first(last_rows), evidence.record
    if account is not None and last is not None and _is_behind(account, last):
        account = None
    if record is None:
        return _Case(evidence, None, row, last, account, max(0, count - 1))
    is_old = record.is_terminal and (
        any(_is_newer(row, record) for row in rows)
        or any(_was_newer(row, record) for row in last_rows)
        or (account is not None and count > record.attempt + 1 and _is_later(account.start, record.ended))
    )
    if is_old:
        return _Case(evidence, None, row, last, account, record.attempt + 1)
    return _Case(evidence, record, row, last, account, record.attempt)


def _attempts(accounts: Sequence[AccountRow]) -> dict[str, list[AccountRow]]:
    """The rows of each component from its first attempt to its latest."""
    found: dict[str, list[AccountRow]] = {}
    for row in sorted(accounts, key=lambda row: (row.submitted or 0, row.start or 0)):
        found.setdefault(row.job, []).append(row)
    return found


def _count_of(rows: Sequence[AccountRow]) -> int:
    """How many attempts these are: a job that changed its size has a row more."""
    return sum(row.state != RESIZING for row in rows)


def _is_behind(account: AccountRow, last: QueueRow) -> bool:
    """sacct tells of an attempt before the one that squeue has shown."""
    return kind_of(last.state) is not Kind.WAITING and _is_later(last.start, account.start)


def _first(rows: Sequence[Any]) -> Any:
    return min(rows, key=lambda row: PRECEDENCE.index(kind_of(row.state)), default=None)


def _is_newer(row: QueueRow, record: Record) -> bool:
    """The job waits or runs again since this record was made."""
    kind = kind_of(row.state)
    slack_s = 0 if kind is Kind.LIVE else SKEW_S  # a job that is about to leave the queue must not wait for a clock
    return kind is Kind.WAITING or _is_later(row.start, record.ended, slack_s)


def _was_newer(row: QueueRow, record: Record) -> bool:
    """The same for a row of an earlier look: what waited then may have run since."""
    if kind_of(row.state) is Kind.WAITING:
        return _is_later(row.submitted, record.ended, -SKEW_S)  # a requeue counts as a submission
    return _is_later(row.start, record.ended, SKEW_S)


def _is_later(time: float | None, ended: float | None, slack_s: float = 0.0) -> bool:
    return time is not None and ended is not None and time > ended + slack_s


def _is_confirmed(case: _Case) -> bool:
    if case.record is not None and case.record.state == protocol.SUCCEEDED:
        return True
    is_over_in_account = case.account is not None and kind_of(case.account.state) in OVER
    return case.row is not None or case.is_absent or is_over_in_account


def _recorded(case: _Case, record: Record) -> Verdict:
    state, reason = record.state, record.reason
    if state == protocol.CANCELLED and TIME_LIMIT_WORDS in reason:
        state, reason = protocol.FAILED, CAUSES["TIMEOUT"]
    is_completing = case.row is not None and kind_of(case.row.state) is Kind.ENDING
    detail = "completing" if is_completing else _words(case.row or _end(case))
    reason = _with_memory(case, reason, is_warning=state == protocol.SUCCEEDED)
    return Verdict(state, True, record.exit_code, reason, record.attempt, detail)


def _with_memory(case: _Case, reason: str, is_warning: bool) -> str:
    """Slurm says so of any process of a job, and of jobs that were fine; the script's own end counts."""
    said = [row for row in (case.account, case.row, case.last) if row is not None and row.state == OUT_OF_MEMORY]
    if not said or "out of memory" in reason:
        return reason
    words = f"Slurm says {_words(said[0])}: a process ran out of memory"
    return "; ".join(filter(None, [reason, "warning: " + words if is_warning else words]))


def _in_queue(case: _Case, row: QueueRow) -> Verdict:
    kind = kind_of(row.state)
    if kind is Kind.WAITING:
        return _open(case, protocol.PENDING, _why_waiting(row), _waiting_words(row))
    if kind in ENDED:
        return _ended_in_queue(case, row, kind)
    reason = case.record.reason if case.record else ""
    return _open(case, _live_state(case, protocol.RUNNING), reason, _words(row))


def _ended_in_queue(case: _Case, row: QueueRow, kind: Kind) -> Verdict:
    never_ran = kind in OVER and case.record is None and not row.nodes
    if never_ran or _since_s(case, row) >= _patience_s(case, row):
        account = case.account
        return _ended(case, account if account and account.state == row.state else row)  # it has the numbers
    if kind is Kind.MAYBE_REQUEUED:
        return _open(case, protocol.PENDING, f"Slurm says {row.state} and may run it again", _words(row))
    return _open(case, _live_state(case, protocol.RUNNING), "it has ended; its record is awaited", _words(row))


def _since_s(case: _Case, row: _AnyRow) -> float:
    now = case.evidence.now
    return 0.0 if now is None or row.end is None else now - row.end


def _why_waiting(row: QueueRow) -> str:
    """Slurm's reason; for a job that is held also what lets it go."""
    known = reasons.of(row.reason)
    advice = known.advice if known is not None and known.kind == reasons.HELD else ""
    told = row.state if row.reason in NO_REASONS else row.reason
    if not advice and row.state not in HELD_WORDS and "held" not in row.reason.lower():
        return "" if told == row.state else told
    advice = NEW_RESERVATION if row.state == RESV_DEL_HOLD else advice or reasons.RELEASE
    return f"held ({told}): {advice.format(job=base_of(row.job))}"


def _waiting_words(row: QueueRow) -> str:
    known = reasons.of(row.reason)
    is_hopeless = row.reason == BAD_CONSTRAINTS or (known is not None and known.kind == reasons.NEVER)
    return _words(row) + (NOT_STARTING if is_hopeless else "")


def _gone(case: _Case) -> Verdict:
    """Not in the queue: it may come back, and its record may be on its way."""
    evidence, end = case.evidence, _end(case)
    gone_s = min(evidence.absent_s, evidence.age_s)
    last = case.last
    if end and last and kind_of(last.state) in ENDED and end.start == last.start:
        gone_s = max(gone_s, _since_s(case, last))
    if gone_s >= _patience_s(case, end):
        return _ended(case, end)
    return _open(case, _last_state(case), "not in the queue; its record is awaited", _words(end))


def _end(case: _Case) -> _AnyRow | None:
    """What sacct or, before, squeue said last: the later attempt, and an end rather than none."""
    told: list[_AnyRow] = [row for row in (case.last, case.account) if row is not None]
    ends = [row for row in told if kind_of(row.state) in ENDED]
    return max(enumerate(ends), key=lambda pair: (pair[1].start or 0, pair[0]))[1] if ends else case.account


def _patience_s(case: _Case, end: _AnyRow | None) -> float:
    if case.evidence.cancel_asked:
        return SETTLE_S
    if end is None:
        return SETTLE_S if case.evidence.accounting is False else REQUEUE_S
    is_final = kind_of(end.state) in (OVER if case.evidence.may_requeue else ENDED)
    return SETTLE_S if is_final else REQUEUE_S


def _unanswered(case: _Case) -> Verdict:
    record = case.record
    if record is not None and record.is_terminal:
        said = f"its record says {record.state}" + (f" ({record.reason})" if record.reason else "")
        return _open(case, protocol.RUNNING, said + "; Slurm's controller has not answered yet", "")
    return _open(case, _last_state(case), "Slurm's controller has not answered yet", "")


def _last_state(case: _Case) -> str:
    """Of a job of which squeue says nothing now."""
    seen = case.last or case.account
    is_waiting = seen is None or kind_of(seen.state) in (Kind.WAITING, Kind.MAYBE_REQUEUED)
    return _live_state(case, protocol.PENDING if is_waiting else protocol.RUNNING)


def _live_state(case: _Case, default: str) -> str:
    return case.record.state if case.record is not None and not case.record.is_terminal else default


def _open(case: _Case, state: str, reason: str, detail: str) -> Verdict:
    return Verdict(state, False, None, reason, case.attempt, detail)


def _ended(case: _Case, end: _AnyRow | None) -> Verdict:
    """The end of a run whose driver did not record it."""
    state = _end_state(case, end.state if end else "")
    return Verdict(state, True, _exit_code(end), _end_words(case, state, end), case.attempt, _words(end))


def _end_state(case: _Case, word: str) -> str:
    if case.evidence.cancel_asked or word == protocol.CANCELLED:
        return protocol.CANCELLED
    if word in CAUSES:
        return protocol.FAILED
    nobody_knows_more = word == COMPLETED or (not word and case.evidence.accounting is not None)
    if word == protocol.FAILED or (_was_killed(case) and nobody_knows_more):
        return protocol.FAILED_DRIVER
    return LOST


def _was_killed(case: _Case) -> bool:
    """The driver had begun and left no end; one that expects another attempt has recorded its own."""
    return case.record is not None and not case.record.is_terminal and case.record.ended is None


def _end_words(case: _Case, state: str, end: _AnyRow | None) -> str:
    killed = "the driver was killed before it could record the end" if _was_killed(case) else ""
    said = f"Slurm says {_words(end)}" if end else ""
    if state == protocol.CANCELLED:
        return _cancel_words(case)
    if end is not None and state == protocol.FAILED:
        memory = f" ({said})" if end.state == OUT_OF_MEMORY else ""
        return "; ".join(filter(None, [CAUSES[end.state] + memory, killed]))
    silence = killed or "it left no record of how it ended"
    return "; ".join(filter(None, [said or "it is gone from the queue", silence]))


def _cancel_words(case: _Case) -> str:
    if case.record is None:
        return "cancelled before it left a record"
    return "cancelled" if _was_killed(case) else "cancelled before it ran again"


def _exit_code(end: _AnyRow | None) -> int | None:
    """Slurm's, where it says more than 0: a job that left no record did not succeed."""
    if not isinstance(end, AccountRow):
        return None
    if end.signal and end.signal <= protocol.LAST_SIGNAL:
        return protocol.exit_code_of_signal(end.signal)
    return end.exit_code or None


def _words(row: _AnyRow | None) -> str:
    """`PENDING (Priority)`, `OUT_OF_MEMORY (0:125)`; an unknown word is told to be one."""
    if row is None:
        return ""
    known = "" if row.state in KINDS else ": this is no word that gangrun knows"
    if isinstance(row, AccountRow):
        numbers = "" if row.exit_code is None else f" ({row.exit_code}:{row.signal})"
        return (row.words or row.state) + numbers + known
    return row.state + ("" if row.reason in NO_REASONS else f" ({row.reason})") + known
