"""A stand-in for srun on a machine without Slurm: N "nodes" as N process groups, each with an address of its own.

`python -m executor.local --nodes=3 COMMAND...` gives each copy of the command the variables that srun would, with
127.0.0.1, 127.0.0.2, ... as node names and addresses. srun's other options are accepted and mean nothing here. All
ends with the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from executor import environment, protocol
from executor.loop import Arrival, Loop
from executor.output import tell
from executor.process import adopt_orphans, end_descendants, end_with_parent, exit_code, reap, spawn
from executor.protocol import GangrunError, UsageError

READ_BYTES = 1 << 16
KILL_WAIT_S = 30.0  # Slurm's own default


class Local:
    """One local step: starts the tasks, merges their output by whole lines, ends all when one fails."""

    def __init__(self, num_nodes: int, command: list[str], kill_on_bad_exit: bool) -> None:
        self._num_nodes = num_nodes
        self._command = command
        self._kill_on_bad_exit = kill_on_bad_exit
        self._tasks: dict[int, int] = {}
        self._pipes: dict[int, bytes] = {}
        self._code = 0
        self._is_stopping = False
        self._loop = Loop(self._on_signal)

    def run(self) -> int:
        """The highest exit code of the tasks, as srun gives it."""
        self._loop.take_signals()
        adopt_orphans()
        end_with_parent()
        for rank in range(self._num_nodes):
            self._start(rank)
        self._loop.run()
        for pipe in list(self._pipes):
            self._pass_on(pipe)
        end_descendants()
        return self._code

    def _start(self, rank: int) -> None:
        pipe, write_end = os.pipe()
        os.set_blocking(pipe, False)
        try:
            self._tasks[spawn(self._command, self._environ(rank), stdout=write_end)] = rank
        finally:
            os.close(write_end)
        self._pipes[pipe] = b""
        self._loop.watch(pipe, lambda: self._pass_on(pipe))

    def _environ(self, rank: int) -> dict[str, str]:
        hosts = ",".join(protocol.local_address(index) for index in range(self._num_nodes))
        return {
            **environment.without_step(os.environ),
            protocol.ENV_LOCAL_LAUNCHER: str(os.getpid()),
            protocol.SLURM_JOB_ID: os.environ.get(protocol.SLURM_JOB_ID, "local"),
            protocol.SLURM_STEP_ID: str(os.getpid()),
            protocol.SLURM_PROCID: str(rank),
            protocol.SLURM_STEP_NUM_TASKS: str(self._num_nodes),
            protocol.SLURM_STEP_NODELIST: hosts,
            protocol.SLURM_JOB_NODELIST: hosts,
            protocol.SLURMD_NODENAME: protocol.local_address(rank),
        }

    def _pass_on(self, pipe: int) -> None:
        try:
            chunk = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return
        text = self._pipes[pipe] + chunk
        end = text.rfind(b"\n") + 1 if chunk else len(text)
        self._pipes[pipe] = text[end:]
        tell(1, text[:end])
        if not chunk:
            self._loop.forget(pipe)
            os.close(pipe)
            del self._pipes[pipe]
            self._stop_if_over()

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number == signal.SIGCHLD:
            for pid, status in reap():
                if pid in self._tasks:
                    self._on_task_end(pid, exit_code(status))
        elif arrival.number in (signal.SIGTERM, signal.SIGINT):
            self._end_all()
        else:
            self._send_all(arrival.number)

    def _on_task_end(self, pid: int, code: int) -> None:
        rank = self._tasks.pop(pid)
        _kill_group(pid, signal.SIGKILL)
        self._code = max(self._code, code)
        if code:
            tell(2, f"local: error: {protocol.local_address(rank)}: task {rank}: Exited with exit code {code}\n")
            if self._kill_on_bad_exit:
                self._end_all()
        self._stop_if_over()

    def _end_all(self) -> None:
        """TERM, and KILL to what is there after Slurm's KillWait: softer than srun, which kills at once."""
        self._send_all(signal.SIGTERM)
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.after(KILL_WAIT_S, lambda: self._send_all(signal.SIGKILL))

    def _send_all(self, number: int) -> None:
        for pid in self._tasks:
            _kill_group(pid, number)

    def _stop_if_over(self) -> None:
        if not self._tasks:
            self._loop.stop()


def parse(argv: list[str]) -> tuple[int, list[str], bool]:
    """(nodes, command, kill on bad exit). Raises UsageError."""
    nodes, kills, words = "1", False, list(argv)
    while words and words[0].startswith("-"):
        flag, _, value = words.pop(0).partition("=")
        nodes = value if flag == "--nodes" else nodes
        kills = value != "0" if flag == "--kill-on-bad-exit" else kills
    if not nodes.isdigit() or int(nodes) < 1:
        raise UsageError(f"--nodes={nodes!r} is not a whole number of 1 or more")
    if not words:
        raise UsageError("usage: python -m executor.local --nodes=N COMMAND [ARG ...]")
    return int(nodes), words, kills


def main(argv: list[str] | None = None) -> int:
    try:
        return Local(*parse(sys.argv[1:] if argv is None else argv)).run()
    except GangrunError as error:
        tell(2, f"local: {error}\n")
        return error.exit_code


def run_as_program() -> NoReturn:
    os._exit(main())


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    run_as_program()
