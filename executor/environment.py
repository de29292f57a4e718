"""What the script finds in its environment: the job's view of Slurm, never the step's."""

from __future__ import annotations

from executor import protocol
from executor.protocol import UsageError

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# What describes one step or one task. A nested srun would take these for its own options and be
# confined to the executor's step (https://slurm.schedmd.com/srun.html#SECTION_INPUT-ENVIRONMENT-VARIABLES).
STEP_PREFIXES = (
    "SRUN_",
    "SLURM_STEP",
    "SLURM_SRUN_",
    "SLURM_CPU_BIND",
    "SLURM_MEM_BIND",
    "SLURM_GPU_BIND",
    "SLURM_JOB_CPUS_PER_NODE_PACK",
)
STEP_NAMES = frozenset(
    "SLURM_" + name
    for name in (
        "PROCID LOCALID NODEID GTIDS TASK_PID NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE CPUS_PER_TASK TRES_PER_TASK "
        "CPUS_ON_NODE GPUS_ON_NODE DISTRIBUTION LAUNCH_NODE_IPADDR UMASK PRIO_PROCESS OVERLAP EXACT EXCLUSIVE "
        "KILL_BAD_EXIT LABELIO UNBUFFEREDIO WAIT MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NTASKS_PER_CORE NTASKS_PER_GPU "
        "NTASKS_PER_SOCKET OOM_KILL_STEP HOSTFILE IMMEDIATE WORKING_DIR JOB_NAME DEBUG STDINMODE STDOUTMODE STDERRMODE"
    ).split()
)
JOB_SCOPED_COPIES = (
    (protocol.SLURM_NODELIST, protocol.SLURM_JOB_NODELIST),
    (protocol.SLURM_NNODES, protocol.SLURM_JOB_NUM_NODES),
)


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment as the batch script would see it: nothing of a step, all of the job."""
    kept = {name: value for name, value in environ.items() if not _is_step_level(name)}
    for copy, original in JOB_SCOPED_COPIES:
        if original in kept:
            kept[copy] = kept[original]
    return kept


def _is_step_level(name: str) -> bool:
    return name in STEP_NAMES or name.startswith(STEP_PREFIXES) or name in protocol.BETWEEN_DRIVERS


def checked(values: Mapping[str, object], source: str) -> dict[str, str]:
    """User variables as strings. Raises UsageError that names the variable and what is allowed."""
    for name, value in values.items():
        problem = protocol.variable_problem(name, value)
        if problem:
            raise UsageError(f"{source}: {name!r}{problem}")
    return {name: str(value) for name, value in values.items()}


# The executor's own step holds all that the job has: a nested srun that does not share would wait for ever
# (open-mpi/ompi#8378, psnc-qcg/QCG-PilotJob#49).
DEFAULTS = {"PYTHONUNBUFFERED": "1", "SLURM_OVERLAP": "1"}


def of_rank(rank: int, ips: Sequence[str], gpus: str, attempt: str, is_setup: bool) -> dict[str, str]:
    """What tells a rank of the run, or of setup, who it is: a layer for its script. `ips` are in the order of ranks."""
    values = str(rank), "\n".join(ips), gpus, attempt
    if is_setup:
        return dict(zip(protocol.SETUP_VARIABLES, values))
    return {**dict(zip(protocol.RUN_VARIABLES, values)), protocol.ENV_NUM_NODES: str(len(ips))}


def for_script(environ: Mapping[str, str], layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The script's whole environment: later layers win."""
    result = {**DEFAULTS, **without_step(environ)}
    for layer in layers:
        result.update(layer)
    return result
