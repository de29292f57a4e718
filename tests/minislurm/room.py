"""The machine room: nodes as namespaces, the switch between them, and how to run something in a node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Union

from tests.minislurm import accounts
from tests.minislurm.cgroups import Cgroups
from tests.minislurm.errors import BadInput, BedError, tail
from tests.minislurm.layout import Layout
from tests.minislurm.options import CONTROLLER, LAPTOP, SWITCH, Options
from tests.minislurm.preflight import SYSTEM_PATH
from tests.minislurm.proc import Pid, children, kill_all
from tests.minislurm.scripts import node_script, switch_batch

Arg = Union[str, "os.PathLike[str]"]
UP_TIMEOUT_S = 30.0
POLL_S = 0.004


class NodePopen(subprocess.Popen[str]):
    """A process started in a node. Signals go to the program itself, not to the nsenter around it."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is not None:
            return
        for pid in children(self.pid) or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


class Room:
    """All nodes of one cluster, as bare machines without any Slurm."""

    def __init__(self, options: Options, layout: Layout, cgroups: Cgroups) -> None:
        self.options, self.layout, self.cgroups = options, layout, cgroups

    # -- power

    def power_on(self, nodes: Sequence[str]) -> None:
        """Start nodes side by side and plug them in; returns when all are up."""
        switch_pid = 0 if SWITCH in nodes else self.init(SWITCH).pid
        for node in nodes:
            if self.is_on(node):
                raise BadInput(f"node {node} is on already")
            for record in (self.layout.init(node), self.layout.holder(node)):
                record.unlink(missing_ok=True)
            text = node_script(self.options, self.layout, self.cgroups, node, switch_pid)
            self.layout.script(node).write_text(text)
        # orphans on purpose: a node outlives whoever booted it
        launch = 'for script; do setsid sh "$script" </dev/null & done'
        scripts = [str(self.layout.script(node)) for node in nodes]
        subprocess.run(["sh", "-c", launch, "sh", *scripts], cwd="/", check=True)
        self._wait_up(nodes)
        if plugged := [node for node in nodes if node != SWITCH]:
            self._switch(switch_batch(self.options, plugged))

    def _wait_up(self, nodes: Sequence[str]) -> None:
        """Until every node's init is there. Slow machines get time as long as nodes keep coming up."""
        waiting, deadline = list(nodes), time.monotonic() + UP_TIMEOUT_S
        while left := [node for node in waiting if not self.layout.init(node).exists()]:
            if len(left) < len(waiting):
                waiting, deadline = left, time.monotonic() + UP_TIMEOUT_S
            holder = Pid.read(self.layout.holder(left[0]))
            if time.monotonic() > deadline or (holder and not holder.alive()):
                raise BedError(f"node {left[0]} did not start:\n{tail(self.layout.log(left[0]))}")
            time.sleep(POLL_S)

    def power_off(self, nodes: Sequence[str]) -> None:
        """Pull the plug: every process of the nodes dies at once, and so do their cables."""
        records = [record(node) for node in nodes for record in (self.layout.init, self.layout.holder)]
        if left := kill_all(pid for record in records if (pid := Pid.read(record))):
            raise BedError(f"these processes did not die of SIGKILL: {[p.pid for p in left]}")
        for record in records:
            record.unlink(missing_ok=True)
        for node in nodes:
            self.cgroups.remove(node)
        if self.is_on(SWITCH):
            for node in set(nodes) - {SWITCH}:
                self._switch(f"link del {self.options.port_of(node)}\n", check=False)

    def is_on(self, node: str) -> bool:
        init = Pid.read(self.layout.init(node))
        return init is not None and init.alive()

    def init(self, node: str) -> Pid:
        """Pid 1 of a node that is on."""
        if node not in (CONTROLLER, SWITCH, LAPTOP, *self.options.names):
            raise BadInput(f"no node {node!r}; there are {CONTROLLER} and {', '.join(self.options.names)}")
        init = Pid.read(self.layout.init(node))
        if init is None or not init.alive():
            raise BedError(f"node {node} is off" + (": it is there after login()" if node == LAPTOP else ""))
        return init

    @property
    def nodes_on(self) -> list[str]:
        """All that have power and see the cluster's files, the switch included."""
        return [node for node in (SWITCH, CONTROLLER, *self.options.names) if self.is_on(node)]

    # -- the network

    def link(self, node: str, *, up: bool) -> None:
        """Pull a node's network cable or put it back."""
        self._switch(f"link set {self.options.port_of(node)} {'up' if up else 'down'}\n")

    def _switch(self, batch: str, *, check: bool = True) -> None:
        argv = ["nsenter", "-t", str(self.init(SWITCH).pid), "-n", "ip", "-batch", "-"]
        done = subprocess.run(argv, input=batch, text=True, capture_output=True, check=False)
        if check and done.returncode:
            raise BedError(f"the switch refused {batch!r}: {done.stderr.strip()}")

    # -- programs in a node

    def argv_in(
        self,
        node: str,
        argv: Sequence[Arg],
        *,
        user: str | None = None,
        cwd: Arg | None = None,
        env: dict[str, str] | None = None,
    ) -> list[str]:
        """The command that runs `argv` in a node; it dies when the wrapper is killed."""
        who = accounts.find(user, self.layout) if user else None
        ours = {"PATH": SYSTEM_PATH} if node == LAPTOP else {"SLURM_CONF": str(self.layout.slurm_conf)}
        variables = {**ours, **(env or {})}
        if who:
            variables = {"HOME": who.pw_dir, "USER": who.pw_name, "LOGNAME": who.pw_name, **variables}
        enter = ["nsenter", "-t", str(self.init(node).pid), *["-n", "-u", "-m", "-i", "-p"]]
        if self.cgroups.version == 2 and node in self.options.names:
            enter += ["-C"]
        identity = ["--reuid", str(who.pw_uid), "--regid", str(who.pw_gid), "--init-groups"] if who else []
        return [
            *enter,
            *("env", *(["-i"] if node == LAPTOP else []), "-C", os.fspath(cwd or os.getcwd())),
            *(f"{key}={value}" for key, value in variables.items()),
            *("setpriv", "--pdeathsig", "KILL", *identity, "--"),
            *(os.fspath(arg) for arg in argv),
        ]

    def popen(
        self,
        node: str,
        argv: Sequence[Arg],
        *,
        user: str | None = None,
        cwd: Arg | None = None,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        **io: Any,
    ) -> NodePopen:
        """Start a program in a node. `env` comes on top of ours, without any SLURM_ variable of ours.
        `prefix` goes before the whole command: it runs outside the node."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SRUN_", "SBATCH_"))}
        command = [*prefix, *self.argv_in(node, argv, user=user, cwd=cwd, env=env)]
        return NodePopen(command, env=clean, text=True, errors="replace", **io)

    def run(
        self,
        node: str,
        argv: Sequence[Arg],
        *,
        check: bool = True,
        timeout_s: float = 60,
        input: str | None = None,
        **how: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a node to its end. A failure or a time-out is a BedError with its output."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        pipe = subprocess.PIPE
        process = self.popen(node, argv, stdin=stdin, stdout=pipe, stderr=pipe, **how)
        words = " ".join(os.fspath(arg) for arg in argv)
        with process:
            try:
                out, err = process.communicate(input, timeout=timeout_s)
            except subprocess.TimeoutExpired as late:
                process.kill()
                said = "\n".join(_text(part) for part in (late.stdout, late.stderr) if part)
                raise BedError(f"{node}: {words}: no end after {timeout_s} s\n{said}".rstrip()) from None
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise BedError(f"{node}: {words}: exit code {process.returncode}\n{out}{err}".rstrip())
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _text(output: bytes | str) -> str:
    return output if isinstance(output, str) else output.decode(errors="replace")
