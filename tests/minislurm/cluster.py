"""A real Slurm cluster on this one machine: the object tests and people hold."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from filelock import FileLock

from tests.minislurm import accounts, cgroups, config, leftovers, preflight
from tests.minislurm.accounting import Accounting
from tests.minislurm.cgroups import NO_CGROUPS, Cgroups
from tests.minislurm.daemons import Daemons
from tests.minislurm.errors import BadInput, BedError
from tests.minislurm.jobs import JobEnd, parse_job, parse_job_id, parse_steps
from tests.minislurm.layout import Layout
from tests.minislurm.login import Login
from tests.minislurm.mounts import PROGRAMS as MOUNT_PROGRAMS
from tests.minislurm.mounts import FaultyMount, NfsLikeMount
from tests.minislurm.options import CONTROLLER, LAPTOP, SWITCH, Options
from tests.minislurm.proc import NodeProcess, processes_of
from tests.minislurm.room import Arg, NodePopen, Room

# what runs in a node without being anybody's program
INFRASTRUCTURE = {
    *("slurmd", "slurmstepd", "slurmctld", "slurmdbd", "munged", "mariadbd"),
    *("sshd", "sshd-session", "sshd-auth", *MOUNT_PROGRAMS),
}
JOB_POLL_S = 0.05
NVIDIA_MAJOR = 195
BOOT_TIMEOUT_S = 120.0


class Cluster:
    """N nodes `n1`..`nN` with slurmd and a controller node `ctl`, each with its own network, host name, pids,
    mounts and /dev/shm. The file system is shared, except for what Options.private_dirs names."""

    def __init__(self, options: Options, layout: Layout, chosen: Cgroups, notes: Sequence[str]) -> None:
        self.options, self.layout = options, layout
        self.notes = list(notes)  # what this machine could not do as asked
        self._room = Room(options, layout, chosen)
        self._daemons = Daemons(self._room)
        self._accounting = Accounting(self._daemons)

    # -- life

    @classmethod
    def boot(cls, root: Arg, options: Options | None = None, **choices: Any) -> Cluster:
        """Boot a cluster in the folder `root` and return when all nodes are idle. `choices` are fields of
        Options. What an aborted run left in the same folder is cleaned up first."""
        options = dataclasses.replace(options or Options(), **choices)
        preflight.demand(options.rootfs, accounting=options.accounting)
        layout = Layout(Path(root).resolve())
        leftovers.clean(layout)
        layout.make_root()
        cluster = cls(options, layout, NO_CGROUPS, [])
        try:
            cluster._boot()
        except BaseException:
            cluster.down()
            raise
        return cluster

    def _boot(self) -> None:
        self._write_record()
        self.layout.make()
        self._room.cgroups = cgroups.choose(self.options, self.layout, self.notes)
        self._write_record()
        self._write_config()
        if self.options.accounting:  # before the nodes: they are to know the users from the start
            accounts.create(self.layout, self.options.rootfs)
        self._room.power_on([SWITCH])
        self._room.power_on([CONTROLLER, *self.nodes])
        self._daemons.start_munged()
        if self.options.accounting:
            self._accounting.create(["root", *(one.name for one in accounts.present(self.options.rootfs))])
        self._daemons.start_slurmctld()
        self._daemons.start_slurmd(self.nodes)
        self.wait_idle(timeout_s=BOOT_TIMEOUT_S)

    @classmethod
    def attach(cls, root: Arg) -> Cluster:
        """The cluster another process booted in `root`."""
        layout = Layout(Path(root).resolve())
        try:
            record = json.loads(layout.record.read_text())
        except (OSError, ValueError):
            raise BadInput(f"no cluster at {layout.root}; boot one with: python -m tests.minislurm up") from None
        options = Options.from_json(record["options"])
        return cls(options, layout, Cgroups.from_json(record["cgroups"]), record["notes"])

    @classmethod
    def is_up(cls, root: Arg) -> bool:
        """Whether a cluster at `root` has any node that is on."""
        try:
            cluster = cls.attach(root)
        except BadInput:
            return False
        return any(cluster.is_on(node) for node in (CONTROLLER, *cluster.nodes))

    @staticmethod
    def clean_leftovers(root: Arg) -> None:
        """Remove whatever is left of a cluster at `root`: processes, mounts, cgroups, files."""
        leftovers.clean(Layout(Path(root).resolve()))

    def down(self) -> None:
        """Take everything away, the folder included. Nothing of the cluster is left on the machine."""
        leftovers.clean(self.layout, by_owner=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _write_record(self) -> None:
        record = {
            "options": self.options.to_json(),
            "cgroups": self._room.cgroups.to_json(),
            "notes": self.notes,
            "owner": leftovers.owner_now(),
        }
        self.layout.new_record.write_text(json.dumps(record, indent=1))
        self.layout.new_record.replace(self.layout.record)

    def _write_config(self) -> None:
        chosen = self._room.cgroups
        usable = self.options.proctrack != "cgroup" or chosen.version
        proctrack = self.options.proctrack if usable else "linuxproc"
        self.layout.hosts.write_text(config.hosts(self.options))
        self.layout.slurm_conf.write_text(config.slurm_conf(self.options, self.layout, proctrack))
        self.layout.gres_conf.write_text(config.gres_conf(self.options, self.layout))
        self.layout.cgroup_conf.write_text(config.cgroup_conf(self.options, chosen.plugin))
        for i in range(self.options.gpus):  # Slurm numbers gpus for jobs only if they are character devices
            os.mknod(self.layout.gpu(i), 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, i))

    # -- what it is

    @property
    def root(self) -> Path:
        return self.layout.root

    @property
    def nodes(self) -> list[str]:
        """The compute nodes; the node `ctl` is not among them."""
        return list(self.options.names)

    @property
    def addresses(self) -> dict[str, str]:
        """Address of every node, `ctl` included."""
        return self.options.addresses

    @property
    def slurm_conf(self) -> Path:
        return self.layout.slurm_conf

    @property
    def slurm_version(self) -> str:
        """For example 22.05.8."""
        return self.run(CONTROLLER, ["sinfo", "--version"], cwd="/").stdout.split()[-1]

    def is_on(self, node: str) -> bool:
        """Whether the node has power."""
        return self._room.is_on(node)

    def node_states(self) -> dict[str, str]:
        """Slurm's word for every compute node: idle, mixed, down*, ... Empty if the controller does not run."""
        return self._daemons.node_states()

    # -- programs

    def argv_in(self, node: str, argv: Sequence[Arg], **how: Any) -> list[str]:
        """The command line that runs `argv` in a node: in the same folder (or `cwd=`), with SLURM_CONF set
        (and `env=`), as root (or `user=`)."""
        return self._room.argv_in(node, argv, **how)

    def run(self, node: str, argv: Sequence[Arg], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in a node to its end: check=True, timeout_s=60, input, cwd, env, user.
        A non-zero code (with check) or a time-out is a BedError that shows the output."""
        return self._room.run(node, argv, **how)

    def popen(self, node: str, argv: Sequence[Arg], **how: Any) -> NodePopen:
        """Start a program in a node: cwd, env, user and what subprocess.Popen takes. Signals sent through the
        returned object reach the program itself."""
        return self._room.popen(node, argv, **how)

    def processes(self, node: str) -> list[NodeProcess]:
        """What runs in a node apart from init, Slurm's daemons and our mounts."""
        found = processes_of(self._room.init(node))
        return [p for p in found if not _is_infrastructure(p, self.layout.tools)]

    def login(self) -> Login:
        """The cluster's sshd with its accounts, and the node `laptop` to come from; started by whoever is first."""
        with FileLock(str(self.layout.login_lock)):
            return Login.open(self._room, self._daemons)

    # -- jobs

    def sbatch(self, script: Arg, *args: Arg, **how: Any) -> int:
        """Submit from `ctl` and return the job id. `script` is a path, or the text itself if it begins with
        `#!`. Without --output the output goes to slurm-JOBID.out in `cwd`."""
        text = os.fspath(script)
        given: list[Arg] = [] if text.startswith("#!") else [text]
        how = {"input": None if given else text, **how}
        return parse_job_id(self.run(CONTROLLER, ["sbatch", "--parsable", *args, *given], **how).stdout)

    def job(self, job_id: int) -> JobEnd:
        """How the job is doing. A job that Slurm does not know is a BedError."""
        argv = ["scontrol", "show", "job", str(job_id)]
        job = parse_job(self.run(CONTROLLER, argv, cwd="/").stdout)
        if job is None:
            raise BedError(f"scontrol said nothing about job {job_id}")
        return job

    def job_state(self, job_id: int) -> str:
        """Slurm's word for the state: PENDING, RUNNING, COMPLETING, COMPLETED, ..."""
        return self.job(job_id).state

    def wait_job(self, job_id: int, timeout_s: float = 60) -> JobEnd:
        """Wait until the job has ended."""
        return self._wait_job(job_id, lambda job: job.ended, "its end", timeout_s)

    def wait_state(self, job_id: int, *states: str, timeout_s: float = 60) -> JobEnd:
        """Wait until the job is in one of the states."""
        return self._wait_job(job_id, lambda job: job.state in states, " or ".join(states), timeout_s)

    def _wait_job(self, job_id: int, good: Callable[[JobEnd], bool], wish: str, timeout_s: float) -> JobEnd:
        deadline = time.monotonic() + timeout_s
        while not good(job := self.job(job_id)):
            if time.monotonic() > deadline:
                raise BedError(f"job {job_id}: waited {timeout_s} s for {wish}, it is {job.state} ({job.reason})")
            time.sleep(JOB_POLL_S)
        return job

    def step_ids(self, job_id: int) -> list[str]:
        """Running steps of a job, as squeue names them: 12.0, 12.batch."""
        argv = ["squeue", "-s", "-h", "-j", str(job_id), "-o", "%i"]
        return parse_steps(self.run(CONTROLLER, argv, cwd="/").stdout)

    def wait_idle(self, nodes: Sequence[str] | None = None, timeout_s: float = 30) -> None:
        """Wait until the nodes (all, unless named) are idle."""
        self._daemons.wait_idle(self.nodes if nodes is None else nodes, timeout_s)

    # -- faults

    def power_off(self, node: str) -> None:
        """Pull the plug: all processes of the node die at once. Slurm notices after SlurmdTimeout."""
        self._room.power_off([node])

    def power_on(self, node: str) -> None:
        """Boot a node that was off, with its daemon. Let Slurm notice before that it was off (DOWN): its boot
        time is the machine's, so jobs of its earlier life would stay RUNNING."""
        self._room.power_on([node])
        if node == CONTROLLER:
            self._start_head()
        elif node != LAPTOP:
            self.start_slurmd(node)

    def _start_head(self) -> None:
        if self.options.accounting:
            self._accounting.start_mariadb()
            self._accounting.start()
        self.start_controller()
        if self.layout.sshd_config.exists():
            self.login().start()

    def cut_link(self, node: str) -> None:
        """Pull the network cable of a node. What runs there runs on."""
        self._room.link(node, up=False)

    def mend_link(self, node: str) -> None:
        self._room.link(node, up=True)

    def stop_controller(self, signum: int = signal.SIGTERM) -> None:
        """Stop slurmctld and wait until it is dead. Slurm's commands hang meanwhile."""
        self._daemons.stop(CONTROLLER, "slurmctld", signum)

    def start_controller(self) -> None:
        """Start slurmctld; jobs and steps go on. A step asked for in the first 6 s may have to wait 62 s."""
        self._daemons.start_slurmctld()

    def stop_slurmd(self, node: str, signum: int = signal.SIGTERM) -> None:
        """Stop slurmd; tasks of running steps live on."""
        self._daemons.stop(node, "slurmd", signum)

    def start_slurmd(self, node: str) -> None:
        """Start slurmd; it takes running steps over again."""
        self._daemons.start_slurmd([node])

    def stop_database(self, signum: int = signal.SIGTERM) -> None:
        """Stop slurmdbd: sacct fails, and slurmctld keeps what it has to say."""
        self._accounting.stop(signum)

    def start_database(self) -> None:
        """Start slurmdbd; returns when it answers. It learns what happened meanwhile."""
        self._accounting.start()

    # -- file systems of single nodes

    def mount_nfs_like(self, node: str, source: Arg, mountpoint: Arg, *, cache_s: float = 3) -> NfsLikeMount:
        """Mount a folder of the machine in one node so that news arrive late, as over NFS (0 = at once)."""
        return NfsLikeMount(self._room, node, source, mountpoint, cache_s)

    def mount_faulty(self, node: str, source: Arg, mountpoint: Arg) -> FaultyMount:
        """Mount a folder of the machine in one node with errors, stalls and delays on demand."""
        return FaultyMount(self._room, node, source, mountpoint)


def _is_infrastructure(process: NodeProcess, tools: Path) -> bool:
    name = os.path.basename(process.cmdline.split()[0]).rstrip(":")
    return process.inner_pid == 1 or name in INFRASTRUCTURE or f" {tools}/" in process.cmdline
