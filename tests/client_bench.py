"""Somebody on the laptop with a home of their own, who types gangrun's verbs: what the client's tests share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from executor import protocol
from tests.bench import CHECKOUT, eventually
from tests.minislurm.cluster import Cluster
from tests.minislurm.login import Login
from tests.minislurm.room import NodePopen

LAPTOP = "laptop"
NOTHING_TO_SAY = {"stdin": subprocess.DEVNULL}


class Typed:
    """A command that runs on the laptop; all that it has printed so far can be read. Bytes are kept as they are."""

    def __init__(self, laptop: Laptop, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="typed-", dir=laptop.home))
        self._out, self._err = folder / "out", folder / "err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            pipes: Any = {**NOTHING_TO_SAY, "stdout": out, "stderr": err}
            self.process: NodePopen = laptop.cluster.popen(LAPTOP, list(argv), env=dict(env), cwd=cwd, **pipes)

    @property
    def out_bytes(self) -> bytes:
        return self._out.read_bytes()

    @property
    def out(self) -> str:
        return self.out_bytes.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self._err.read_bytes().decode("utf-8", "replace")

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code. Fails the test, with what was said, if it takes longer."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"no end after {timeout_s} s; it said {self.out[-2000:]!r} {self.err[-2000:]!r}"
            ) from None

    def until_out(self, words: str, timeout_s: float = 30) -> None:
        eventually(lambda: words in self.out or self._fail_if_over(words), timeout_s, f"{words!r}; {self.err[-500:]!r}")

    def until_err(self, words: str, timeout_s: float = 30) -> None:
        eventually(lambda: words in self.err or self._fail_if_over(words), timeout_s, f"{words!r}; {self.out[-500:]!r}")

    def _fail_if_over(self, words: str) -> None:
        if self.process.poll() is not None and words not in self.out and words not in self.err:
            raise AssertionError(f"it ended without {words!r}: {self.out[-2000:]!r} {self.err[-2000:]!r}")

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """As when the lid is closed and the battery is empty."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)


class Laptop:
    """One person: home, records, settings, ssh's shared connections. `host` is where they work."""

    def __init__(self, cluster: Cluster, host: str = "head", home: Path | None = None) -> None:
        self.cluster, self.host = cluster, host
        self.login: Login = cluster.login()
        self.home = home or Path(tempfile.mkdtemp(prefix="gangrun-laptop-", dir="/tmp"))
        self.sockets = self.home / "run"
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        self.env = {**self.login.environ(self.home), "XDG_RUNTIME_DIR": str(self.sockets), "PYTHONPATH": str(CHECKOUT)}
        self._started: list[Typed] = []
        self._launched: list[Launched] = []

    # --- what is typed

    def popen(self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Typed:
        """gangrun with these arguments, running. It is ended with the test."""
        return self.start("gangrun", *args, env=env, cwd=cwd)

    def start(self, *argv: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Typed:
        """Any command of the laptop."""
        typed = Typed(self, argv, {**self.env, **(env or {})}, cwd or self.home)
        self._started.append(typed)
        return typed

    def gangrun(
        self, *args: str, timeout_s: float = 60, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """gangrun to its end; whatever its code."""
        typed = self.popen(*args, env=env, cwd=cwd)
        code = typed.wait(timeout_s)
        return subprocess.CompletedProcess(args, code, typed.out, typed.err)

    def json(self, *args: str, **how: Any) -> Any:
        """What a verb says with --json. It must say nothing else on standard output."""
        done = self.gangrun(*args, "--json", **how)
        assert done.stdout, f"{args}: no output, code {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def python(self, code: str, *args: str, timeout_s: float = 60, **how: Any) -> Any:
        """A program that uses gangrun as a library; what it prints at last, as JSON."""
        typed = self.start("python", "-c", textwrap.dedent(code), *args, **how)
        assert typed.wait(timeout_s) == 0, typed.err
        return json.loads(typed.out.strip().splitlines()[-1])

    # --- tasks

    def unique(self, word: str) -> str:
        """A name that no other test uses: they share the accounts."""
        return f"{word}-{secrets.token_hex(3)}"

    def write_task(self, name: str, run: str, **fields: Any) -> Path:
        """A task file in a folder of its own. `fields` are its other keys."""
        folder = self.home / name
        folder.mkdir(exist_ok=True)
        path = folder / "task.yaml"
        path.write_text(json.dumps({"name": name, "run": textwrap.dedent(run), **fields}))  # JSON is YAML
        return path

    def launch(self, run: str, *flags: str, word: str = "t", timeout_s: float = 60, **fields: Any) -> Launched:
        """A task on the host, submitted; nobody follows it."""
        path = self.write_task(self.unique(word), run, **fields)
        run_ = self.json("launch", str(path), "--host", self.host, *flags, timeout_s=timeout_s)
        self._launched.append(Launched(self, run_["run"], run_["job"], run_["name"]))
        return self._launched[-1]

    # --- its other end

    @property
    def user(self) -> str:
        return self.login.user(self.host)

    @property
    def remote_home(self) -> Path:
        return self.login.home(self.host)

    def remote(self, *argv: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """A command on the login node as this person, without ssh."""
        return self.cluster.run("ctl", argv, user=self.user, cwd="/", **how)

    def shim(self, name: str, body: str) -> None:
        """Put a script before one of Slurm's commands for this account; `$REAL` is the real one. See `unshimmed`."""
        real = shutil.which(name)
        folder = self.remote_home / "bin"
        folder.mkdir(exist_ok=True)
        home = self.remote_home.stat()
        os.chown(folder, home.st_uid, home.st_gid)
        new = folder / f".{name}"
        new.write_text(f"#!/bin/sh\nREAL={real}\nHERE={folder}\n{textwrap.dedent(body)}\n")
        new.chmod(0o755)
        new.rename(folder / name)
        (self.remote_home / ".bashrc").write_text(f"export PATH={folder}:$PATH\n")

    def unshimmed(self) -> None:
        shutil.rmtree(self.remote_home / "bin", ignore_errors=True)

    # --- its end

    def masters(self) -> list[Path]:
        return [path for path in self.sockets.glob("gangrun-*/*") if path.is_socket()]

    def disconnect(self) -> None:
        """End the shared connections, as `ssh -O exit` does."""
        for path in self.masters():
            argv = ["ssh", "-S", str(path), "-O", "exit", self.host]
            self.cluster.run(LAPTOP, argv, env=self.env, cwd="/", check=False, timeout_s=20)

    def close(self) -> None:
        """End everything of this person; cancel what still runs. No process is left."""
        for typed in self._started:
            if typed.process.poll() is None:
                typed.kill()
        if self._launched:
            jobs = [job.job for job in self._launched]
            self.cluster.run("ctl", ["scancel", *jobs], cwd="/", check=False)
        with contextlib.suppress(Exception):
            self.disconnect()
        for process in self._leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)

    def _leftovers(self) -> list[int]:
        return [one.pid for one in self.cluster.processes(LAPTOP) if str(self.home) in one.cmdline]


class Launched:
    """A run as its launcher knows it, and its files on the cluster."""

    def __init__(self, laptop: Laptop, run: str, job: str, name: str) -> None:
        self.laptop, self.run, self.job, self.name = laptop, run, job, name

    @property
    def directory(self) -> Path:
        return self.laptop.remote_home / protocol.HOME_DIRECTORY / "runs" / self.run

    @property
    def status_path(self) -> Path:
        return self.laptop.remote_home / protocol.HOME_DIRECTORY / self.job / self.run / protocol.STATUS_NAME

    def record(self) -> dict[str, Any]:
        """What the driver has recorded, read where it lies."""
        try:
            status: dict[str, Any] = json.loads(self.status_path.read_text())
        except (OSError, ValueError):
            return {}
        return status

    def until(self, *states: str, timeout_s: float = 30) -> None:
        """By the driver's own record."""
        eventually(lambda: self.record().get("state") in states, timeout_s, f"{states}, it is {self.record()}")

    def until_output(self, words: str, timeout_s: float = 30) -> None:
        path = self.directory / "output"
        eventually(lambda: path.exists() and words in path.read_text(errors="replace"), timeout_s, words)

    def seen(self) -> dict[str, Any]:
        """As `queue -a --json` sees it."""
        runs = self.laptop.json("queue", "-a", "--host", self.laptop.host)
        found: dict[str, Any] = next(run for run in runs if run["run"] == self.run)
        return found

    def until_state_in_slurm(self, *states: str) -> None:
        self.laptop.cluster.wait_state(int(self.job), *states)

    def processes(self) -> list[str]:
        """What still runs of it on any node."""
        nodes = self.laptop.cluster.nodes
        return [p.cmdline for node in nodes for p in self.laptop.cluster.processes(node) if self.run in p.cmdline]

    def scancel(self, *flags: str) -> None:
        self.laptop.cluster.run("ctl", ["scancel", *flags, self.job], cwd="/", check=False)


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
