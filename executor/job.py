"""The facts of one job, as a rendered driver states them, and what it asks the machine to complete them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from executor import protocol
from executor.identity import address_of, expand_hosts, is_usable
from executor.protocol import UsageError


class Job(NamedTuple):
    """The facts of one job."""

    slurm_job_id: str
    job_id: str
    task_name: str
    num_nodes: int
    cluster_ips: Sequence[str]
    log_dir: str
    env_vars: dict[str, str] = {}
    setup_env_vars: dict[str, str] = {}
    cluster_home: str | None = None
    workdir: str | None = None
    secrets_file: str | None = None
    grace_s: float = protocol.DEFAULT_GRACE_S
    liveness_timeout_s: float = protocol.DEFAULT_LIVENESS_TIMEOUT_S
    python: str | None = None  # on the nodes; default: the interpreter that runs the driver
    archive: str | None = None
    remove_at_end: Sequence[str] = ()
    ports: Sequence[int] = ()  # that its scripts are to listen on


def this_slurm_job() -> str:
    """The job that this process runs in. Exits where there is none."""
    job_id = os.environ.get(protocol.SLURM_JOB_ID)
    return job_id or _refuse(f"{protocol.SLURM_JOB_ID} is not set: run this driver in an allocation (sbatch, salloc)")


def nodes_of_this_job() -> list[str]:
    """The names of the allocation's nodes, in Slurm's order: the first is the head. Of a task of a group, its own."""
    try:
        own = os.environ.get(protocol.ENV_MEMBER_NODES)
        if own:
            return own.split(",")
        return expand_hosts(os.environ.get(protocol.SLURM_JOB_NODELIST, ""), protocol.SLURM_JOB_NODELIST)
    except UsageError as error:
        _refuse(str(error))


def addresses_of_this_job() -> dict[str, str]:
    """The address of each of the allocation's nodes that has one here, other than loopback (Debian's 127.0.1.1)."""
    if not (os.environ.get(protocol.SLURM_JOB_NODELIST) or os.environ.get(protocol.ENV_MEMBER_NODES)):
        return {}
    return addresses_of(nodes_of_this_job())


def addresses_of(nodes: Sequence[str]) -> dict[str, str]:
    """The address of each of these nodes that has one here, other than loopback."""
    found = {host: address_of(host) for host in nodes}
    return {host: address for host, address in found.items() if address and is_usable(address)}


def member_options() -> list[str]:
    """srun's options for a task of a group: its nodes, or its component; none for a job that is alone."""
    component, nodes = os.environ.get(protocol.ENV_HET_GROUP), os.environ.get(protocol.ENV_MEMBER_NODES)
    if component:
        return ["--het-group=" + component]
    return ["--nodelist=" + nodes] if nodes else []


def _refuse(text: str) -> NoReturn:
    print("gangrun: " + text, file=sys.stderr)
    sys.exit(protocol.EXIT_USAGE)


def local_launcher(archive: str) -> list[str]:
    """The stand-in for srun on a machine without Slurm."""
    found = archive if os.path.exists(archive) else None
    return [sys.executable, *protocol.python_arguments(found, protocol.LOCAL)]


def cluster_home(job: Job) -> str:
    """The directory that all nodes share. Raises UsageError where nothing says what it is."""
    home = os.path.expanduser(job.cluster_home or "~")
    if not os.path.isabs(home):
        raise UsageError(
            f"cluster_home={job.cluster_home!r}: no absolute path, and neither HOME nor a passwd entry says more"
        )
    if not os.path.isdir(home):
        raise UsageError(f"cluster_home={home!r} is not a directory: use one that all nodes share")
    return home


def executor_command(job: Job) -> list[str]:
    python = job.python or sys.executable or "python3"
    found = job.archive if job.archive is not None and os.path.exists(job.archive) else None
    return [python, *protocol.python_arguments(found)]
