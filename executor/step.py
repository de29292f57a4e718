"""One srun of the driver: its process, what it says, and the step it carries."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence

from executor.loop import Loop
from executor.process import spawn

WORDS_BYTES = 16384
# The driver's summary says these better.
NOISE = re.compile(
    rb"tasks? \S+: (Exited with exit code|Terminated|Killed|running)|step creation (temporarily|still) disabled"
    rb"|Step created for|launch/slurm|Force Terminated|\*\*\* STEP \S+ ON \S+ CANCELLED AT"
)


class Step:
    """srun in a session of its own: a signal to the driver's group must not make it kill the tasks at once."""

    def __init__(self, name: str, pid: int, stderr: int, loop: Loop) -> None:
        self.name = name
        self.pid = pid
        self.id: str | None = None  # JOB.STEP, known once the step has started
        self.code: int | None = None
        self._stderr = stderr
        self._loop = loop
        self._words = b""
        self._unfinished = b""

    @classmethod
    def start(cls, name: str, argv: Sequence[str], environ: Mapping[str, str], loop: Loop) -> Step:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            pid = spawn(list(argv), environ, stderr=write_end)
        finally:
            os.close(write_end)
        step = cls(name, pid, read_end, loop)
        loop.watch(read_end, step._on_words)
        return step

    @property
    def words(self) -> str:
        """The end of what srun and the executors said on standard error."""
        return self._words.decode("utf-8", "replace")

    @property
    def last_words(self) -> str:
        lines = self.words.strip().splitlines()
        return lines[-1] if lines else ""

    def on_end(self, code: int) -> None:
        self._on_words()
        self.code = code
        self._loop.forget(self._stderr)

    def terminate(self) -> None:
        """TERM to srun: a waiting request is taken back, a running step is killed at once."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def _on_words(self) -> None:
        try:
            chunk = os.read(self._stderr, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.forget(self._stderr)
        self._words = (self._words + chunk)[-WORDS_BYTES:]
        lines: list[bytes] = (self._unfinished + chunk).split(b"\n")
        self._unfinished = lines.pop()
        shown = [line + b"\n" for line in lines if not NOISE.search(line)]
        if shown:
            os.write(2, b"".join(shown))
