"""What a rank does over time: waits, runs its script, pumps its output, passes signals on, waits for its peers."""

from __future__ import annotations

import os
import signal
import time

from executor import protocol
from executor.gang import Gang, Leave, Patience, poll_interval_s, say
from executor.identity import Identity
from executor.loop import STOP_SIGNALS, WARNINGS, Arrival, Loop, Timer
from executor.options import Options
from executor.output import PIPE_BYTES, Framer, Log, Stream, tell
from executor.process import Script, adopt_orphans, end_descendants, exit_code, reap
from executor.shared import SignalFile, Watch, read_text

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Callable

    from executor.hostnames import Hosts


READ_BYTES = 1 << 18
HEAP_BYTES = 1 << 20  # freed once, it keeps glibc from giving the heap back after every chunk: half the CPU time
HOLD_S = 0.5  # an unfinished line (a prompt, a progress bar) is shown after this
DRIVER_TIMEOUT_S = 120.0  # its heart beats every 5 s, and it never waits longer than 10 s for a command
GROUP_POLL_S = 0.01
KILL_PATIENCE_S = 5.0
ORDER_FIRST_S = 0.5
ORDER_LONGEST_S = 2.0
WARN_AGAIN_S = 0.25
CODES_OF_STOP = tuple(protocol.exit_code_of_signal(number) for number in STOP_SIGNALS)
TOLD_LATE_S = 0.2  # proctrack/linuxproc signals the script itself, perhaps before it signals us


class Member:
    """Owns the loop, the script and its state. One method per phase, called in order by executor.slurm."""

    def __init__(self, options: Options, me: Identity, gang: Gang) -> None:
        self._options = options
        self._me = me
        self._gang = gang
        self._script: Script | None = None
        self._log: Log | None = None
        bytes(HEAP_BYTES)
        self._stream = Stream()
        self._framer = Framer(b"")
        self._hold: Timer | None = None
        self._ear: Timer | None = None
        self._adopts = False
        self._parent = os.getppid()
        self._lost = ""
        self._driver = Watch(options.liveness_timeout_s)
        self._is_in_barrier = False
        self.is_stopping = False
        self.hosts: Hosts | None = None  # of the group, for the script
        self._loop = Loop(self._on_signal)
        self._loop.take_signals()
        if gang.launch is not None:
            self._loop.every(protocol.BEAT_FIRST_S, protocol.beat_interval_s(options.liveness_timeout_s), gang.beat)

    # --- waiting

    def wait_for_go(self, setup_done: SignalFile) -> None:
        """Until setup has ended well. Raises Leave if it has not, or if nobody is left to say so."""
        patience, driver = Patience(), Watch(min(DRIVER_TIMEOUT_S, self._options.liveness_timeout_s))

        def look() -> bool | None:
            said = patience.ask(setup_done.read)
            if said is None:
                self._leave_on_order()
                self._leave_without_driver(driver)
                return None
            if said[0] == protocol.ABORT:
                raise Leave(protocol.EXIT_TERMINATED, protocol.RANK_STOPPED, said[1] or "setup failed")
            return True

        try:
            self._wait_until(look)
        except OSError as error:
            raise Leave(
                protocol.EXIT_INFRASTRUCTURE,
                protocol.RANK_BROKEN,
                f"cannot read {setup_done.path}: {error.strerror}",
            ) from error

    @property
    def can_gather(self) -> bool:
        return self._gang.launch is not None

    def gather_addresses(self) -> list[str]:
        """Each rank's address by its own word: an arbitrary distribution leaves no other way to know."""
        deadline = time.monotonic() + self._options.liveness_timeout_s

        def look() -> list[str] | None:
            self._leave_on_order()
            if time.monotonic() > deadline:
                raise Leave(protocol.EXIT_INFRASTRUCTURE, protocol.RANK_BROKEN, "a peer has not told its address")
            return self._gang.addresses()

        addresses: list[str] = self._wait_until(look)
        return addresses

    def wait_in_barrier(self) -> None:
        """Until all ranks are done; a rank that left early would have its servers killed by Slurm."""
        if self._gang.launch is None or self._options.is_setup or self._me.num_ranks == 1:
            return
        self._is_in_barrier = True
        barrier = self._gang.barrier()
        self._wait_until(lambda: barrier.is_over() or None, barrier.interval_s)

    def _wait_until(self, look: Callable[[], Any], interval_s: Callable[[], float] | None = None) -> Any:
        def poll() -> None:
            timer.longest_s = interval_s() if interval_s else steady_s
            answer = look()
            if answer is not None:
                self._loop.stop(answer)

        steady_s = poll_interval_s(self._me.num_ranks)
        timer = self._loop.every(protocol.POLL_FIRST_S, steady_s, poll)
        timer.due = 0.0
        try:
            return self._loop.run()
        finally:
            self._loop.cancel(timer)

    def _leave_on_order(self) -> None:
        said = self._gang.order()
        if said is not None and said[0] != protocol.GANG_DONE:
            raise Leave(protocol.EXIT_TERMINATED, protocol.RANK_STOPPED, "stopped while waiting: {} {}".format(*said))

    def _leave_without_driver(self, driver: Watch) -> None:
        if self._options.launch_dir and driver.is_silent(self._heartbeat()):
            reason = f"the driver has not been heard of for {driver.silent_s:.0f} s; leaving"
            raise Leave(protocol.EXIT_INFRASTRUCTURE, protocol.RANK_BROKEN, reason)

    def _heartbeat(self) -> str | None:
        assert self._gang.launch is not None
        try:
            return read_text(self._gang.launch.heartbeat)
        except OSError:
            return None

    # --- the script

    def run_script(self, text: bytes, environ: dict[str, str], trouble: Callable[[int], str] | None = None) -> int:
        """Run it to its end; returns its exit code. Its process group has ended by then if it was stopped.

        `trouble` says, of a code, what else failed in the script's place; an empty text if it was the script.
        """
        self._adopts = adopt_orphans()
        if self.hosts is not None:
            self.hosts.open()
        script = self._script = Script(text, environ, self.hosts)
        self._loop.watch(script.pipe, self._on_output)
        self._gang.tell(state=protocol.RANK_RUNNING, started=round(time.time(), 3))
        self._framer = Framer(self._prefix(script.pid))
        log_name = protocol.log_name(
            self._me.rank, self._me.node_index, self._options.cluster_num_nodes, self._options.is_setup
        )
        self._log = Log(os.path.join(self._options.log_dir, log_name), lambda text: say(self._me, text))
        self._log.begin(_attempt(environ))
        self._ear = self._loop.every(ORDER_FIRST_S, ORDER_LONGEST_S, self._obey)
        code: int = self._loop.run()
        self._loop.cancel(self._ear)
        self._drain()
        if trouble is not None and not self._lost and not self.is_stopping:
            self._lost = trouble(code)
        code = protocol.EXIT_INFRASTRUCTURE if self._lost else code
        self._gang.end(self._verdict(code), code, self._lost)
        return code

    def end_what_is_left(self) -> None:
        """End what the script left behind and give out the last of its output."""
        if self._script is not None and not self._adopts:
            self._script.send(signal.SIGKILL)
        end_descendants()
        if self.hosts is not None:
            self.hosts.close()
        if self._script is not None and self._log is not None:
            self._drain()
            self._log.close()

    def _verdict(self, code: int) -> str:
        if self._lost:
            return protocol.RANK_BROKEN
        if self.is_stopping:
            return protocol.RANK_STOPPED
        return protocol.RANK_DONE if code == 0 else protocol.RANK_FAILED

    def _prefix(self, pid: int) -> bytes:
        me, options = self._me, self._options
        where = "" if me.node_index == 0 else f", ip={me.address}"
        if options.is_setup:
            text = "(setup pid=%d%s)" % (pid, where)
        elif options.cluster_num_nodes == 1:
            text = "(%s, pid=%d)" % (options.task_name, pid)
        else:
            text = "(%s, rank=%d, pid=%d%s)" % (me.node, me.rank, pid, where)
        if not options.no_color and not os.environ.get("NO_COLOR"):
            from colorama import Fore, Style

            text = Fore.CYAN + text + Style.RESET_ALL
        return os.fsencode(text) + b" "

    # --- output

    def _on_output(self) -> None:
        assert self._script is not None
        try:
            chunk = os.read(self._script.pipe, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.forget(self._script.pipe)
        self._give_out(chunk)

    def _give_out(self, chunk: bytes) -> None:
        assert self._script is not None and self._log is not None
        self._log.write(chunk)
        pieces = self._framer.feed(chunk) if chunk else self._framer.flush()
        self._stream.write(pieces)
        if pieces and self._hold is not None:  # what is held now is younger than the timer
            self._loop.cancel(self._hold)
            self._hold = None
        if self._framer.is_holding and self._hold is None:
            self._hold = self._loop.after(HOLD_S, self._show_held)
        if self._stream.is_backed_up:
            # Do not read what cannot be passed on: the pipe fills and the script waits, as it would without us.
            self._loop.forget(self._script.pipe)
            pipe = self._script.pipe
            self._stream.wait_for_room(self._loop, lambda: self._loop.watch(pipe, self._on_output))

    def _show_held(self) -> None:
        self._hold = None
        if not self._stream.is_backed_up:
            self._stream.write(self._framer.flush(is_end=False))

    def _drain(self) -> None:
        """What is in the pipe at the end. Bounded: a child that goes on printing does not keep us."""
        assert self._script is not None
        for chunk in self._left_in_pipe():
            self._stream.push_out()
            if self._stream.is_backed_up:  # nobody reads it any more; the log has it all
                assert self._log is not None
                self._log.write(chunk)
            else:
                self._give_out(chunk)
        self._stream.write(self._framer.flush())
        self._stream.push_out()

    def _left_in_pipe(self) -> Iterator[bytes]:
        assert self._script is not None
        left = PIPE_BYTES + READ_BYTES
        while left > 0:
            try:
                chunk = os.read(self._script.pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                return
            left -= len(chunk)
            yield chunk

    # --- signals and orders

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number == signal.SIGCHLD:
            self._on_child_end()
        elif self._script is None or self._is_in_barrier:
            self._on_signal_while_waiting(arrival.number)
        elif arrival.number in STOP_SIGNALS:
            self._stop(arrival.number, self._was_delivered_by_slurm(arrival))
        elif self._was_delivered_by_slurm(arrival):
            pass
        elif arrival.number in WARNINGS:
            self._warn(arrival.number)
        else:
            self._script.send(arrival.number)

    def _on_signal_while_waiting(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if self._is_in_barrier:
            self._loop.stop(True)  # the script has ended; its code stands
            return
        raise Leave(
            protocol.exit_code_of_signal(number),
            protocol.RANK_STOPPED,
            "stopped by signal %d before the script began" % number,
        )

    def _warn(self, number: int) -> None:
        """A program that is still starting gets the signal when it is ready for it."""
        assert self._script is not None
        script = self._script

        def again() -> None:
            if script.pass_on(number):
                self._loop.cancel(timer)

        if not script.pass_on(number):
            timer = self._loop.every(WARN_AGAIN_S, WARN_AGAIN_S * 4, again)

    def _was_delivered_by_slurm(self, arrival: Arrival) -> bool:
        """With proctrack/linuxproc slurmstepd, our parent, has signalled every descendant itself."""
        return self._options.proctrack == protocol.PROCTRACK_LINUXPROC and arrival.sender == os.getppid()

    def _obey(self) -> None:
        if self.hosts is not None:
            self.hosts.refresh()
        lost = self._what_is_lost()
        if lost and not self.is_stopping:
            self._lose(lost)
            return
        try:
            said = self._gang.order()
        except OSError as error:
            say(self._me, f"the shared file system fails ({error}); the others will not be heard")
            self._loop.cancel(self._ear)
            return
        if said is not None and said[0] != protocol.GANG_DONE:
            self._stop(signal.SIGTERM, was_delivered=False)

    def _lose(self, lost: str) -> None:
        """Go without whoever watched over this rank."""
        if self._script is None:
            raise Leave(protocol.EXIT_INFRASTRUCTURE, protocol.RANK_BROKEN, lost)
        if not self.is_stopping:
            tell(1, f"gangrun: rank {self._me.rank} on {self._me.node}: {lost}; ending the script\n")
            self._lost = lost
            self._stop(signal.SIGTERM, was_delivered=False)

    def _what_is_lost(self) -> str:
        """Who should watch over this rank and does no more. Standard error may be the dead driver's pipe: not there."""
        if os.getppid() != self._parent:
            return "the process that started this one (slurmstepd) is gone"
        if self._options.launch_dir and self._driver.is_silent(self._heartbeat()):
            return f"the driver has not been heard of for {self._driver.silent_s:.0f} s"
        return ""

    def _stop(self, number: int, was_delivered: bool) -> None:
        """Ask the script to end, once; KILL its group when the grace period is over."""
        if self.is_stopping:
            return
        assert self._script is not None
        self.is_stopping = True
        if not was_delivered:
            self._script.send(number)
        self._gang.tell(state=protocol.RANK_STOPPING)
        self._loop.after(self._options.grace_s, self._kill)

    def _kill(self) -> None:
        assert self._script is not None
        self._script.send(signal.SIGKILL)

    def _on_child_end(self) -> None:
        for pid, status in reap():
            if self._script is not None and pid == self._script.pid:
                self._on_script_end(exit_code(status))

    def _on_script_end(self, code: int) -> None:
        if self._options.proctrack == protocol.PROCTRACK_LINUXPROC and code in CODES_OF_STOP:
            self._loop.after(TOLD_LATE_S, lambda: self._finish(code))
        else:
            self._finish(code)

    def _finish(self, code: int) -> None:
        """The script's exit is what counts; but bash dies of a TERM at once, while its program saves a checkpoint."""
        if not self.is_stopping:
            self._loop.stop(code)
            return
        self._loop.every(GROUP_POLL_S, GROUP_POLL_S * 10, lambda: self._stop_if_group_is_gone(code)).due = 0.0
        # Even KILL does not end a process that hangs in a dead file system.
        self._loop.after(self._options.grace_s + KILL_PATIENCE_S, lambda: self._loop.stop(code))

    def _stop_if_group_is_gone(self, code: int) -> None:
        assert self._script is not None
        reap()
        if self._script.group_is_gone:
            self._loop.stop(code)


def _attempt(environ: Mapping[str, str]) -> str:
    """`2`, or `0, restart 1` for a task that its group has started again."""
    restarts = environ.get(protocol.ENV_RESTARTS, "0")
    return environ.get(protocol.ENV_ATTEMPT, "0") + (f", restart {restarts}" if restarts != "0" else "")
