"""The text of slurm.conf, cgroup.conf, gres.conf and the hosts file. Pure functions."""

from __future__ import annotations

from tests.minislurm.layout import Layout
from tests.minislurm.options import CONTROLLER, Options

SLURMDBD_PORT = 6819
DATABASE, DATABASE_ADDRESS, DATABASE_PORT = "slurm", "127.0.0.1", 3306  # of `ctl`: no other node gets there
CONSTRAINTS = {"cores": "ConstrainCores", "devices": "ConstrainDevices", "ram": "ConstrainRAMSpace"}


def hosts(options: Options) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    return "\n".join(lines + [f"{ip} {name}" for name, ip in options.addresses.items()]) + "\n"


def slurm_conf(options: Options, layout: Layout, proctrack: str) -> str:
    """One cluster on ordinary ports: every node has a network of its own, so ports never clash."""
    return f"""\
ClusterName={options.name}
SlurmctldHost={CONTROLLER}({options.addresses[CONTROLLER]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={layout.munge_socket},cred_expire={options.cred_expire_s}
StateSaveLocation={layout.state}
SlurmdSpoolDir={layout.spool("%n")}
SlurmctldPidFile={layout.runs}/slurmctld.pid
SlurmdPidFile={layout.runs}/slurmd.%n.pid
SlurmctldLogFile={layout.log("slurmctld")}
SlurmdLogFile={layout.log("slurmd-%n")}
SlurmctldPort=6817
SlurmdPort=6818
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{"cgroup" if options.constrain else "none"}
JobAcctGatherType=jobacct_gather/{"linux" if options.accounting else "none"}
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
DefMemPerCPU=500
SlurmctldTimeout=30
SlurmdTimeout={options.slurmd_timeout_s}
SlurmdParameters=config_overrides
KillWait={options.kill_wait_s}
MinJobAge={options.min_job_age_s}
PropagateResourceLimits=NONE
{_accounting(options, layout)}
{_nodes(options)}
{options.partitions or "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"}
{options.extra_conf}
"""


def _accounting(options: Options, layout: Layout) -> str:
    if not options.accounting:
        return ""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={CONTROLLER}
AccountingStoragePort={SLURMDBD_PORT}
AccountingStoragePass={layout.munge_socket}
""" + ("AccountingStorageTRES=gres/gpu" if options.gpus else "")


def slurmdbd_conf(layout: Layout) -> str:
    """Slurm looks for it beside slurm.conf, and its database asks nobody for a password."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={CONTROLLER}
DbdPort={SLURMDBD_PORT}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost={DATABASE_ADDRESS}
StoragePort={DATABASE_PORT}
StorageUser=root
StorageLoc={DATABASE}
LogFile={layout.log("slurmdbd")}
PidFile={layout.runs}/slurmdbd.pid
"""


def _nodes(options: Options) -> str:
    words = [f"NodeName={','.join(options.names)}", f"CPUs={options.cpus}", f"RealMemory={options.mem_mb}"]
    gres = [f"Gres={_gres(options)}"] if options.gpus else []
    types = ["GresTypes=gpu"] if options.gpus else []
    return "\n".join([*types, " ".join([*words, *gres, "State=UNKNOWN"])])


def _gres(options: Options) -> str:
    return ":".join(["gpu", *([options.gres_type] if options.gres_type else []), str(options.gpus)])


def gres_conf(options: Options, layout: Layout) -> str:
    if not options.gpus:
        return ""
    kind = f" Type={options.gres_type}" if options.gres_type else ""
    files = f"{layout.root}/gpu[0-{options.gpus - 1}]" if options.gpus > 1 else str(layout.gpu(0))
    return f"NodeName={','.join(options.names)} Name=gpu{kind} File={files}\n"


def cgroup_conf(options: Options, plugin: str) -> str:
    lines = [f"CgroupPlugin={plugin}"]
    lines += ["IgnoreSystemd=yes"] if plugin == "cgroup/v2" else []
    lines += [f"{key}={'yes' if word in options.constrain else 'no'}" for word, key in CONSTRAINTS.items()]
    return "\n".join(lines) + "\n"
