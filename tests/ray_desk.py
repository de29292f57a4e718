"""Somebody at a desk from which a Ray cluster's dashboard can be reached, and where there is no Ray."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import CHECKOUT, eventually
from tests.client_bench import Typed
from tests.miniray import HEAD, RayBed

URL = "http://127.0.0.1:8265"  # on the head
WITHOUT_RAY = "import sys; sys.modules['ray'] = None; sys.argv[0] = 'gangrun'; from gangrun.cli import main; main()"
PROXY = Path(__file__).with_name("ray_proxy.py")
FREE = """
import json, ray
from ray.util import placement_group_table
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
print(json.dumps([groups, ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU")]))
"""


class _At:
    """What `client_bench.Typed` wants of a laptop: a place to run commands in."""

    def __init__(self, bed: RayBed, node: str) -> None:
        self._bed, self._node = bed, node

    def popen(self, _: str, argv: Sequence[str], **how: Any) -> Any:
        return self._bed.popen(self._node, argv, **how)


class Desk:
    """A home, records and settings of their own. What is typed runs in a node of the test bed, the head by default."""

    def __init__(self, bed: RayBed, url: str = URL, node: str = HEAD) -> None:
        self.bed, self.url, self.node = bed, url, node
        self.cluster: Any = _At(bed, node)
        self.home = Path(tempfile.mkdtemp(prefix="gangrun-desk-", dir="/tmp"))
        self.env = {
            "HOME": str(self.home), "XDG_STATE_HOME": str(self.home / "state"), "PYTHONPATH": str(CHECKOUT),
            "XDG_CONFIG_HOME": str(self.home / "config"), "NO_COLOR": "1",
        }  # fmt: skip
        self._started: list[Typed] = []
        self.runs: list[str] = []

    # --- what is typed

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> Typed:
        laptop: Any = self
        typed = Typed(laptop, argv, {**self.env, **(env or {})}, self.home)
        self._started.append(typed)
        return typed

    def popen(self, *words: str, env: Mapping[str, str] | None = None) -> Typed:
        """gangrun with these arguments, running."""
        return self.start(sys.executable, "-c", WITHOUT_RAY, *words, env=env)

    def gangrun(self, *words: str, timeout_s: float = 90, **how: Any) -> subprocess.CompletedProcess[str]:
        """gangrun to its end; whatever its code."""
        typed = self.popen(*words, **how)
        code = typed.wait(timeout_s)
        return subprocess.CompletedProcess(words, code, typed.out, typed.err)

    def json(self, *words: str, **how: Any) -> Any:
        done = self.gangrun(*words, "--json", **how)
        assert done.stdout, f"{words}: no output, code {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)

    def python(self, code: str, *args: str, timeout_s: float = 90) -> Any:
        """A program that uses gangrun as a library; what it prints at last, as JSON."""
        typed = self.start(
            sys.executable, "-c", "import sys; sys.modules['ray'] = None\n" + textwrap.dedent(code), *args
        )
        assert typed.wait(timeout_s) == 0, typed.err
        return json.loads(typed.out.strip().splitlines()[-1])

    # --- tasks

    def write_task(self, run: str, name: str = "t", **fields: Any) -> str:
        """A task file in a folder of its own; its name is met nowhere else."""
        name = f"{name}-{secrets.token_hex(3)}"
        folder = self.home / name
        folder.mkdir()
        (folder / "task.yaml").write_text(json.dumps({"name": name, "run": textwrap.dedent(run), **fields}))
        return str(folder / "task.yaml")

    def launch(self, run: str, *flags: str, env: Mapping[str, str] | None = None, **fields: Any) -> str:
        """A run on the cluster; nobody follows it."""
        found = self.json("launch", self.write_task(run, **fields), "--ray", self.url, *flags, env=env)
        self.runs.append(found["run"])
        return str(found["run"])

    def seen(self, run: str) -> dict[str, Any]:
        """As `status --json` tells it."""
        found: dict[str, Any] = self.json("status", run)[0]
        return found

    def until(self, run: str, *wanted: str, timeout_s: float = 60) -> dict[str, Any]:
        return eventually(
            lambda: (one := self.seen(run))["state"] in wanted and one, timeout_s, f"{run} to be {wanted}"
        )

    def until_output(self, run: str, words: str, timeout_s: float = 60) -> str:
        def look() -> str:
            text = self.gangrun("logs", run).stdout
            return text if words in text else ""

        return eventually(look, timeout_s, words)

    # --- the cluster

    def api(self, path: str) -> Any:
        """What the dashboard says, past gangrun."""
        code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
        return json.loads(self.bed.run(HEAD, [sys.executable, "-c", code, URL + path]).stdout)

    def submissions(self, run: str) -> list[dict[str, Any]]:
        return [job for job in self.api("/api/jobs/") if job["submission_id"] == run]

    def held(self) -> list[Any]:
        done = self.bed.run(HEAD, [sys.executable, "-c", FREE], timeout_s=60)
        groups, is_free = json.loads(done.stdout.splitlines()[-1])
        return [*groups, *([] if is_free else ["CPUs"])]

    def processes(self, marker: str) -> list[str]:
        return [p.cmdline for node in self.bed.nodes for p in self.bed.processes(node) if marker in p.cmdline]

    @contextmanager
    def proxy(self, *words: str) -> Iterator[str]:
        """Something between here and the dashboard that is not what it should be; its address."""
        port_file = self.home / f"port-{secrets.token_hex(3)}"
        typed = self.start(sys.executable, str(PROXY), str(port_file), *words)
        port = eventually(lambda: port_file.exists() and port_file.read_text(), 20)
        yield f"http://127.0.0.1:{port}"
        typed.kill()

    def close(self) -> None:
        """End everything that was begun here."""
        for typed in self._started:
            if typed.process.poll() is None:
                typed.kill()
        going = [run for run in self.runs if not self._is_over(run)]
        if going:
            self.gangrun("cancel", "--grace", "0", *going, timeout_s=180)
        for process in (p for p in self.bed.processes(self.node) if str(self.home) in p.cmdline):
            os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)

    def _is_over(self, run: str) -> bool:
        return all(job["status"] in ("STOPPED", "SUCCEEDED", "FAILED") for job in self.submissions(run))
