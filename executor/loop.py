"""One poll(2) over descriptors, timers and signals. Only this loop calls back; nothing runs behind it.

Signals are blocked in every thread and taken by one small thread with sigwaitinfo(2), the only way to learn
who sent one. It does nothing but write what it saw into a pipe that the loop reads.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import time

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from typing import Any, Callable


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
FORWARDED = (*STOP_SIGNALS, *WARNINGS, signal.SIGHUP, signal.SIGCONT)
ARRIVAL_BYTES = 16
WATCHED: frozenset[int] = frozenset((*FORWARDED, signal.SIGCHLD))


class Arrival:
    """A signal and the process that sent it (0 for the kernel and for other pid namespaces)."""

    def __init__(self, number: int, sender: int) -> None:
        self.number = number
        self.sender = sender


class Timer:
    """Calls back after `first_s`, then after twice as long each time, up to `longest_s`."""

    def __init__(self, callback: Callable[[], None], first_s: float, longest_s: float) -> None:
        self.callback = callback
        self.first_s = first_s
        self.longest_s = longest_s
        self.restart()

    def restart(self, delay_s: float | None = None) -> None:
        self.interval_s = self.first_s if delay_s is None else delay_s
        self.due = time.monotonic() + self.interval_s

    def fire(self) -> None:
        self.interval_s = min(self.interval_s * 2, self.longest_s)
        self.due = time.monotonic() + self.interval_s
        self.callback()


class Loop:
    """Runs callbacks until one of them calls `stop`."""

    def __init__(self, on_signal: Callable[[Arrival], None]) -> None:
        self.on_signal = on_signal
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._timers: list[Timer] = []
        self._result: Any = None
        self._stopped = False

    def take_signals(self) -> None:
        """Block the signals of WATCHED and start taking them. Call once, before anything is started."""
        read_end, write_end = os.pipe()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a daemon that ignores it would hide our children's ends
        # A blocked signal arrives even if it is ignored: nohup(1) means that HUP is not for us.
        wanted = frozenset(number for number in WATCHED if signal.getsignal(number) != signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        _thread.start_new_thread(_collect, (write_end, wanted))
        self.watch(read_end, lambda: self._deliver(read_end))

    def watch(self, fd: int, callback: Callable[[], None], events: int = select.POLLIN) -> None:
        self._callbacks[fd] = callback
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def every(self, first_s: float, longest_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback, first_s, longest_s)
        self._timers.append(timer)
        return timer

    def after(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once."""

        def once() -> None:
            self.cancel(timer)
            callback()

        timer = self.every(delay_s, delay_s, once)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        if timer in self._timers:
            self._timers.remove(timer)

    def stop(self, result: Any = None) -> None:
        self._result = result
        self._stopped = True

    def run(self) -> Any:
        """Poll and call back until `stop(result)`; returns that result."""
        self._stopped = False
        while not self._stopped:
            self._one_round()
        return self._result

    def run_for(self, seconds: float | None) -> Any:
        """`run`, but for so long at most: then the result is None."""
        timer = None if seconds is None else self.after(seconds, self.stop)
        try:
            return self.run()
        finally:
            self.cancel(timer)

    def _one_round(self) -> None:
        for fd, _ in self._poll.poll(self._wait_ms()):
            callback = self._callbacks.get(fd)  # an earlier callback of this round may have taken it away
            if callback is not None:
                callback()
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer.due <= now]:
            if timer in self._timers:
                timer.fire()

    def _wait_ms(self) -> int | None:
        if not self._timers:
            return None
        wait_s = min(timer.due for timer in self._timers) - time.monotonic()
        return max(0, int(wait_s * 1000) + 1)

    def _deliver(self, fd: int) -> None:
        """One arrival a call: a callback may raise, and the next must not be lost with it."""
        number, sender = os.read(fd, ARRIVAL_BYTES).split()
        self.on_signal(Arrival(int(number), int(sender)))


def _collect(write_end: int, wanted: frozenset[int]) -> None:
    while True:
        info = signal.sigwaitinfo(wanted)
        os.write(write_end, (b"%d %d" % (info.si_signo, info.si_pid)).ljust(ARRIVAL_BYTES))
