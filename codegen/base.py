"""The calls that every code generator takes, and the order it takes them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.bundle import Bundle
from codegen.spec import Job, Resources

PROLOGUE, SETUP, TASK, EPILOGUE, BUILD = "add_prologue()", "add_setup()", "add_task()", "add_epilogue()", "build()"
ORDER = (PROLOGUE, SETUP, TASK, EPILOGUE)


class CallOrderError(RuntimeError):
    """A call came twice, or before the one it needs."""


class TaskCodeGen:
    """Collects a job call by call: add_prologue, add_setup, add_task, add_epilogue, then build.

    The interface is SkyPilot's, so that orchestrators written for it fit.
    """

    def __init__(self) -> None:
        self._called: list[str] = []
        self._fields: dict[str, Any] = {}

    def add_prologue(self, job_id: int) -> None:
        """Begin the job `job_id`."""
        self._enter(PROLOGUE)
        self._fields["job_id"] = str(job_id) if isinstance(job_id, int) else job_id

    def add_setup(
        self,
        num_nodes: int,
        resources: Mapping[str, float],
        cluster_ips: Sequence[str],
        env_vars: Mapping[str, str],
        log_dir: str,
        setup_cmd: str | None = None,
    ) -> None:
        """What runs once on each node before any script. `cluster_ips` are all nodes' addresses, head first."""
        self._enter(SETUP)
        self._fields.update(
            num_nodes=num_nodes,
            cluster_ips=tuple(cluster_ips) if isinstance(cluster_ips, (list, tuple)) else cluster_ips,
            setup_env_vars=env_vars,
            log_dir=log_dir,
            setup=setup_cmd,
        )
        self._set_resources(resources)

    def add_task(
        self,
        num_nodes: int,
        bash_script: str | None,
        task_name: str | None,
        resources: Mapping[str, float],
        log_dir: str,
        env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """The script that runs on each node. None or blank: setup only."""
        self._enter(TASK)
        self._fields.update(
            num_nodes=num_nodes,
            run=bash_script,
            task_name=task_name or "task",
            env_vars={} if env_vars is None else env_vars,
            log_dir=log_dir,
        )
        self._set_resources(resources)

    def add_epilogue(self) -> None:
        """The job is complete."""
        self._enter(EPILOGUE)

    def build(self) -> str:
        """The driver's text, to lie beside the archive of `bundle()`. Raises SpecError for a job that cannot be."""
        return self._render(self.job())

    def bundle(self) -> Bundle:
        """The driver and the files it needs beside it."""
        return Bundle(self.job(), self.build())

    def job(self) -> Job:
        """The typed description behind the calls."""
        self._require_calls(ORDER, BUILD)
        return Job(**self._fields)

    def _render(self, job: Job) -> str:
        raise NotImplementedError

    def _set_resources(self, resources: Mapping[str, float]) -> None:
        self._fields["resources"] = Resources.from_dict(resources)

    def _enter(self, call: str) -> None:
        if call in self._called:
            raise CallOrderError(f"{call} was called twice")
        self._require_calls(ORDER[: ORDER.index(call)], call)
        self._called.append(call)

    def _require_calls(self, needed: Sequence[str], call: str) -> None:
        for earlier in needed:
            if earlier not in self._called:
                raise CallOrderError(f"{earlier} must be called before {call}")
