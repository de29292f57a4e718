"""One rank's part in its gang: its record, its ear for the others, the barrier at the end.

The shared file system sees O(N) operations per interval: each rank rewrites its own small record and reads one
file, `gang`; rank 0 alone looks at records, and only at the first that is still open, but for a slow sweep.
"""

from __future__ import annotations

import os
import time
from collections import deque

from executor import protocol
from executor.identity import Identity
from executor.options import Options
from executor.output import tell
from executor.shared import SignalFile, Watch, read_record, write_record

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Any, Callable


OPEN_RECORDS_A_LOOK = 8
RANK_0_LONGEST_S = 0.25
UNSEEN_S = 75.0  # every rank writes its record when it begins, and no NFS client hides it for longer than 60 s


class Leave(Exception):
    """This rank has to go, with this exit code; `state` is what its record says."""

    def __init__(self, code: int, state: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.state = state
        self.reason = reason


def say(me: Identity | None, text: str) -> None:
    """One plain line for a person. It goes to standard error, never into the user's log."""
    who = "" if me is None else f"rank {me.rank} on {me.node} ({me.host}): "
    tell(2, f"gangrun: {who}{text}\n")


class Patience:
    """Lets a file system fail for a while. Raises the last error after `limit_s` of nothing but errors."""

    def __init__(self, limit_s: float = protocol.FILE_SYSTEM_PATIENCE_S) -> None:
        self.limit_s = limit_s
        self._failing_since: float | None = None

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer, or None while the file system fails."""
        try:
            answer = question()
        except OSError:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > self.limit_s:
                raise
            return None
        self._failing_since = None
        return answer


def poll_interval_s(num_ranks: int) -> float:
    """How often a waiting rank looks: soon for a few, seldom for a thousand, so that the server is asked no more."""
    return min(protocol.POLL_LONGEST_S, max(protocol.POLL_STEADY_S, num_ranks / protocol.POLLS_PER_S))


class Gang:
    """The files of one attempt, seen from one rank. Without a directory it is a gang of strangers: no barrier."""

    def __init__(self, me: Identity, launch: protocol.Launch | None, options: Options) -> None:
        self.me = me
        self.launch = launch
        self.liveness_timeout_s = options.liveness_timeout_s
        self._was_told = False
        self._absences = 0
        self.has_driver = options.launch_dir is not None
        self._is_setup = options.is_setup
        self._signal = SignalFile(launch.gang) if launch else None
        self._patience = Patience()
        job, step = os.environ.get(protocol.SLURM_JOB_ID, ""), os.environ.get(protocol.SLURM_STEP_ID, "")
        self.record: dict[str, Any] = {
            "state": protocol.RANK_WAITING,
            "node": me.node,
            "node_index": me.node_index,
            "host": me.host,
            "address": me.address,
            "pid": os.getpid(),
            "step": f"{job}.{step}",
            "beat": 0,
            "joined": round(time.time(), 3),
            "code": None,
            "started": None,
            "ended": None,
            "why": "",
        }

    def join(self) -> None:
        """Publish the first record. Raises OSError if the shared directory cannot be written."""
        if self.launch is None:
            return
        if not self.has_driver:  # it has made them all
            self._prepare()
        write_record(self._own_path(), self.record)

    def _prepare(self) -> None:
        assert self.launch is not None
        os.makedirs(self.launch.records(self._is_setup), mode=0o700, exist_ok=True)
        os.close(os.open(self.launch.gang, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if self.me.rank == 0:
            prepare_records(self.launch, self.me.num_ranks, self._is_setup)

    def tell(self, **changes: Any) -> None:
        """Change the record. Trouble with the file system is not the user's trouble."""
        self.record.update(changes)
        if self.launch is not None:
            try:
                write_record(self._own_path(), self.record)
            except OSError as error:
                if not self._was_told:
                    self._was_told = True
                    say(self.me, f"cannot write its record {self._own_path()}: {error.strerror}; the job goes on")

    def beat(self) -> None:
        self.tell(beat=self.record["beat"] + 1)

    def end(self, state: str, code: int, why: str = "") -> None:
        self.tell(state=state, code=code, ended=round(time.time(), 3), why=why[:160])
        if state in (protocol.RANK_FAILED, protocol.RANK_BROKEN) and not self._is_setup:
            self.fire(protocol.GANG_FAILED, "%d on %s" % (self.me.rank, self.me.node))

    def give_up(self, error: Exception) -> int:
        """This rank's script cannot run, or not be watched; returns the exit code."""
        code = int(getattr(error, "exit_code", protocol.EXIT_INFRASTRUCTURE))
        say(self.me, str(error))
        self.end(protocol.RANK_BROKEN, code, str(error))
        return code

    def order(self) -> tuple[str, str] | None:
        """What was said to all: done, failed <rank> <node>, stop <reason>."""
        if self._signal is None:
            return None
        said: tuple[str, str] | None = self._patience.ask(self._signal.read)
        return (
            said
            if said is not None and said[0] in (protocol.GANG_DONE, protocol.GANG_FAILED, protocol.GANG_STOP)
            else None
        )

    def addresses(self) -> list[str] | None:
        """The address of each rank by its own word, or None while one has not spoken."""
        found = [self.peer(rank) for rank in range(self.me.num_ranks)]
        return [str(record["address"]) for record in found if record] if all(found) else None

    def barrier(self) -> Barrier:
        return Barrier(self)

    def directory_is_there(self) -> bool:
        """False only if the file system says, twice in a row, that there is no such directory."""
        try:
            if self.launch is not None:
                os.stat(self.launch.records(self._is_setup))
        except FileNotFoundError:
            self._absences += 1
        except OSError:
            pass
        else:
            self._absences = 0
        return self._absences < 2

    def leave_no_files(self) -> None:
        """Without a driver the last one to leave removes the directory: rmdir(2) only works for it."""
        if self.launch is None:
            return
        try:
            os.unlink(self._own_path())
            os.rmdir(self.launch.records(False))
            os.unlink(self.launch.gang)
            directory = self.launch.directory
            while os.path.basename(directory) != protocol.HOME_DIRECTORY:
                os.rmdir(directory)
                directory = os.path.dirname(directory)
        except OSError:
            pass

    def fire(self, word: str, detail: str = "") -> None:
        if self._signal is None:
            return
        try:
            self._signal.fire(word, detail)
        except OSError as error:
            say(self.me, f"cannot tell the others '{word}': {error}")

    def _own_path(self) -> str:
        assert self.launch is not None
        return self.launch.record(self.me.rank, self._is_setup)

    def peer(self, rank: int) -> dict[str, Any] | None:
        assert self.launch is not None
        path = self.launch.record(rank, self._is_setup)
        answer: dict[str, Any] | None = self._patience.ask(lambda: read_record(path))
        return answer


class Barrier:
    """Ends when all are done, when one failed, or when waiting has lost its point. Never raises."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._me = gang.me
        self._open = deque(range(1, gang.me.num_ranks) if gang.me.rank == 0 else ())
        self._begun = time.monotonic()
        self._watches: dict[int, Watch] = {}
        self._next_sweep = time.monotonic()

    def interval_s(self) -> float:
        """When to look again: soon at first, seldom after a long wait; rank 0 not too seldom, as all wait for it."""
        waited_s = time.monotonic() - self._begun
        most_s = RANK_0_LONGEST_S if self._me.rank == 0 else protocol.POLL_LONGEST_S
        return min(most_s, max(poll_interval_s(self._me.num_ranks), waited_s / 50))

    def is_over(self) -> bool:
        try:
            order = self._gang.order()
            if order is not None and order[0] == protocol.GANG_FAILED and not self._gang.has_driver:
                say(self._me, f"rank {order[1]} failed; leaving")
            return order is not None or self._all_done() or self._a_peer_is_silent()
        except OSError as error:
            limit_s = protocol.FILE_SYSTEM_PATIENCE_S
            say(
                self._me,
                f"the shared file system failed for {limit_s:.0f} s ({error}); not waiting for the other ranks",
            )
            return True

    def _all_done(self) -> bool:
        """Looks at a few open records at a time, in turn: never at a thousand in one go when the last rank ends."""
        if self._me.rank != 0:
            return False
        still_open = 0
        while self._open and still_open < OPEN_RECORDS_A_LOOK:
            rank = self._open.popleft()
            record = self._gang.peer(rank)
            if record is None or record["state"] not in protocol.RANK_ENDED_STATES:
                self._open.append(rank)
                still_open += 1
                if still_open >= len(self._open):
                    break
        if self._open:
            return False
        self._gang.fire(protocol.GANG_DONE)
        return True

    def _a_peer_is_silent(self) -> bool:
        now = time.monotonic()
        if now < self._next_sweep:
            return False
        limit_s = self._gang.liveness_timeout_s
        self._next_sweep = now + protocol.beat_interval_s(limit_s)
        if not self._gang.directory_is_there():
            say(self._me, "the directory that the ranks share is gone; not waiting for the others")
            return True
        for rank in self._open if self._me.rank == 0 else [0]:
            record = self._gang.peer(rank)
            watch = self._watches.setdefault(rank, Watch(limit_s))
            if record is None and not self._gang.has_driver and now - self._begun > UNSEEN_S:
                where = self._gang.launch.directory if self._gang.launch else ""
                say(self._me, f"rank {rank} has left no word in {where}: do all nodes share it? Not waiting for it")
                return True
            is_open = self._me.rank != 0 or record is None or record["state"] not in protocol.RANK_ENDED_STATES
            if is_open and watch.is_silent(record and record["beat"]):
                say(self._me, "rank %d has not been heard of for %.0f s; not waiting for it" % (rank, watch.silent_s))
                if self._me.rank == 0:
                    self._gang.fire(protocol.GANG_DONE)
                return True
        return False


def prepare_records(launch: protocol.Launch, num_ranks: int, is_setup: bool) -> None:
    """Make every record before anybody looks for it: a name once not found may stay not found for a minute."""
    make_records(launch.records(is_setup), num_ranks)


def make_records(directory: str, num_ranks: int) -> None:
    """A record for each rank, in its full size; what has been written there already stays."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    for rank in range(num_ranks):
        fd = os.open("%s/%d" % (directory, rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, max(protocol.RECORD_BYTES, os.fstat(fd).st_size))
        os.close(fd)
