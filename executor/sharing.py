"""What a rank minds on a node that it shares with others: whose GPUs its setup sees, and which ports are taken."""

from __future__ import annotations

import time

from executor import protocol
from executor.shared import known_record

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# https://slurm.schedmd.com/gres.html#GPU_Management; one of them per maker, all with the same list
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
PATIENCE_S, PAUSE_S = 60.0, 0.1  # the run step has started; its ranks tell of themselves one by one
SOCKETS = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENS = "0A"  # https://www.kernel.org/doc/Documentation/networking/proc_net_tcp.txt, TCP_LISTEN


def whole_node(srun: Sequence[str], node_gpus: str) -> list[str]:
    """The same step with all GPUs that the job has on a node: which of them the script sees is for `own_gpus` to say.

    With fewer, Slurm gives a step that overlaps the first ones, which may be a peer's (22.05, 24.11).
    """
    return [_whole(option, node_gpus) for option in srun] if node_gpus else list(srun)


def _whole(option: str, node_gpus: str) -> str:
    name, _, value = option.partition("=")
    kind, _, count = value.rpartition(":")
    if name != "--gpus-per-node" or count == "0":
        return option
    return f"{name}={kind}:{node_gpus}" if kind else f"{name}={node_gpus}"


def own_gpus(
    environ: Mapping[str, str], launch_dir: str, num_ranks: int, rank: int, host: str, patience_s: float = PATIENCE_S
) -> dict[str, str] | None:
    """What a setup script shall see: the GPUs of the run step on this node. None if that step does not tell.

    Where Slurm hides devices, they are numbered anew in each step; SLURM_STEP_GPUS names them alike in all.
    """
    given = environ.get(protocol.SLURM_STEP_GPUS, "").split(",")
    wanted = _gpus_of_run(launch_dir, num_ranks, rank, host, patience_s) if given != [""] else ""
    if wanted is None:
        return None
    result = {}
    for name in VISIBLE:
        if name in environ:
            numbers = dict(zip(given, environ[name].split(",")))
            result[name] = ",".join(numbers[gpu] for gpu in wanted.split(",") if gpu in numbers)
    return result


def _gpus_of_run(launch_dir: str, num_ranks: int, rank: int, host: str, patience_s: float) -> str | None:
    launch, deadline = protocol.Launch(launch_dir), time.monotonic() + patience_s
    while True:
        for other in (rank, *range(num_ranks)):  # as good as always the same
            record = known_record(launch.record(other))
            if record and record.get("host") == host:
                return str(record.get("gpus", ""))
            if record is None and other == rank:
                break
        if time.monotonic() > deadline:
            return None
        time.sleep(PAUSE_S)


def taken_ports(ports: Sequence[int]) -> list[int]:
    """Those that somebody on this node listens on already, at whatever address."""
    listening = {port for path in SOCKETS for port in _listening(path)}
    return [port for port in ports if port in listening]


def _listening(path: str) -> list[int]:
    try:
        with open(path, encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    return [int(row[1].rpartition(":")[2], 16) for row in rows[1:] if row[3] == LISTENS]


def no_gpus(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: "" for name in VISIBLE if name in environ}
