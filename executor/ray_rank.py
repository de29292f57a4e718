"""`python gangrun-executor.pyz ray`: one rank of a gang on a Ray cluster, started by the relay of its node.

What Slurm tells a rank in its variables comes as one line of JSON on standard input; after it, one number a line, come
the signals. When standard input ends, the relay is gone, and the script is ended with its grace period. What another
rank writes into its record file, this one writes into the descriptor `records`, a line each time.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from executor import environment, protocol, slurm
from executor.gang import Gang, Leave
from executor.identity import Identity
from executor.loop import WATCHED, Arrival
from executor.member import Member
from executor.options import Options
from executor.output import write_all
from executor.protocol import GangrunError
from executor.ray_relay import SCRIPT_PID

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

ORDERS = 0  # standard input
TAIL = "tail"  # in the record: the end of a log that the driver cannot read
READ_BYTES = 1 << 16
GONE = "the Ray worker that started this rank is gone"


class RayGang(Gang):
    """A gang whose members are told of each other by the driver: no file is shared, no barrier is needed."""

    def __init__(self, me: Identity, options: Options, records: int) -> None:
        super().__init__(me, None, options)
        self._records = records

    def tell(self, **changes: Any) -> None:
        super().tell(**changes)
        try:
            write_all(self._records, json.dumps(self.record).encode() + b"\n")
        except OSError:
            pass  # the relay is gone: nobody is left to be told


class RayMember(Member):
    """Takes orders from standard input, and the end of it for the end of whoever watches over this rank.

    A TERM that comes after the script's end lets the rank go: all others have ended too.
    """

    _unread = b""

    def _verdict(self, code: int) -> str:
        state = super()._verdict(code)
        if state == protocol.RANK_FAILED and self._log is not None:
            from executor.report import log_tail

            self._gang.record[TAIL] = log_tail(self._log.path)
        return state

    def _prefix(self, pid: int) -> bytes:
        self._gang.tell(**{SCRIPT_PID: pid})
        return super()._prefix(pid)

    def listen(self) -> None:
        longest_s = protocol.beat_interval_s(self._options.liveness_timeout_s)
        self._loop.every(protocol.BEAT_FIRST_S, longest_s, self._gang.beat)
        self._loop.watch(ORDERS, self._on_order)
        self._take_orders(b"")

    def wait_in_barrier(self) -> None:
        """What the script left running, a server perhaps, lives until the last rank is done."""
        if not (self._options.is_setup or self._me.num_ranks == 1 or self._lost):
            self._is_in_barrier = True
            self._loop.run()

    def _on_order(self) -> None:
        chunk = os.read(ORDERS, READ_BYTES)
        if not chunk:
            self._loop.forget(ORDERS)
            if self._is_in_barrier:
                self._loop.stop()
            else:
                self._lose(GONE)
        self._take_orders(chunk)

    def _take_orders(self, chunk: bytes) -> None:
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            self._on_signal(Arrival(int(line), 0))

    def _what_is_lost(self) -> str:
        return ""  # standard input says so, sooner


def main() -> int:
    """Run one rank; returns the script's exit code."""
    description = json.loads(_first_line())
    os.set_inheritable(description["records"], False)
    _be_as_nice_as(description["niceness"])
    me, options = Identity(**description["identity"]), _options(description["options"])
    gang = RayGang(me, options, description["records"])
    try:
        return _live(description, options, gang)
    except Leave as leave:
        gang.end(leave.state, leave.code, leave.reason)
        return leave.code
    except (GangrunError, OSError) as error:
        return gang.give_up(error)


def _be_as_nice_as(niceness: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except OSError:
        pass  # only root may become less nice: setpriority(2), RLIMIT_NICE


def _options(values: dict[str, Any]) -> Options:
    """Paths that begin with ~ are in the home of this node."""
    found = Options(**values)
    found.log_dir = os.path.expanduser(found.log_dir)
    found.workdir = os.path.expanduser(found.workdir) if found.workdir else None
    return found


def _live(description: dict[str, Any], options: Options, gang: RayGang) -> int:
    member = RayMember(options, gang.me, gang)
    gang.tell()
    member.listen()
    try:
        if options.workdir:
            slurm.enter_directory(options.workdir)
        slurm.tell_taken_ports(options, gang.me)
        script = description["script"].encode("utf-8", "surrogateescape")
        code = member.run_script(script, _variables(description, options, gang.me.rank))
        if code == 0 and not member.is_stopping:
            member.wait_in_barrier()
        return code
    finally:
        member.end_what_is_left()


def _variables(description: dict[str, Any], options: Options, rank: int) -> dict[str, str]:
    own = description["variables"]
    gpus = own.get(protocol.ENV_NUM_GPUS_PER_NODE, "0")
    told = environment.of_rank(rank, description["ips"], gpus, str(description["attempt"]), options.is_setup)
    return environment.for_script(os.environ, (own, told))


def _first_line() -> bytes:
    """The description; orders that came with it wait in RayMember._unread."""
    text = b""
    while b"\n" not in text:
        chunk = os.read(ORDERS, READ_BYTES)
        if not chunk:
            raise GangrunError(GONE)
        text += chunk
    line, _, RayMember._unread = text.partition(b"\n")
    return line


def _let_go() -> None:
    """Become nobody's child: Ray ends a worker's children with KILL."""
    if os.fork():
        os._exit(0)
    for number in WATCHED:
        signal.signal(number, signal.SIG_DFL)  # not what the worker ignored


def run_as_program() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # what comes before the loop runs is kept for it
    _let_go()
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_as_program()
