"""The flags of `python -m executor.slurm`. argparse would cost every node 8 ms and 70 file operations."""

from __future__ import annotations

import os

from executor import protocol
from executor.protocol import UsageError

USAGE = """\
usage: srun --ntasks-per-node=1 python -m executor.slurm --script=TEXT --log-dir=DIR
            --cluster-num-nodes=N --cluster-ips=ADDR,... [options]

Runs one bash script as this node's part of a gang: one process per node of a Slurm step.

  --script=TEXT               the script itself (one of these two)
  --script-path=FILE          a file that holds it
  --log-dir=DIR               where this node's log goes
  --cluster-num-nodes=N       nodes of the cluster, or of the allocation
  --cluster-ips=A,B,...       their addresses or host names; a node's place here is its index
  --env-vars=JSON             object of variables for the script
  --env-file=FILE             the same in a file (mode 0600 for secrets)
  --task-name=NAME            shown in the prefix on a one-node cluster (default: task)
  --is-setup                  this is the setup: other log names, no barrier
  --workdir=DIR               directory the script starts in (default: this process's own)
  --cluster-home-dir=DIR      a directory that all nodes share (default: ~)
  --alloc-signal-file=FILE    rank 0 fires it when the step has started
  --setup-done-signal-file=FILE  wait for it before the script; `abort REASON` in it ends the wait
  --launch-dir=DIR            where the driver keeps this attempt's shared files
  --hosts-file=FILE           host names the script sees besides the node's own, as they are now
  --hosts-means=MEANS         namespace or nss_wrapper; auto: what works, if any (default);
                              required: what works, or the script does not run; none: not at all
  --ports=P,Q,...             ports the script listens on: one that is taken on this node is told
  --shares-gpus               others have GPUs of this node: setup sees those of the run step only
  --ray=JSON                  the ranks are a Ray cluster, the script runs on rank 0 only:
                              {"activate": BASH, "start_args": [OPTION OF `ray start`, ...]}
  --proctrack=TYPE            Slurm's ProctrackType (default: unknown, taken for cgroup)
  --grace-s=SECONDS           from TERM or INT to KILL (default: 30)
  --liveness-timeout-s=SECONDS  a peer or driver silent for so long is given up (default: 600)
  --no-color                  plain prefix (NO_COLOR in the environment does the same)
"""
HOSTS_MEANS = ("auto", "required", "namespace", "nss_wrapper", "none")
SWITCHES = ("--is-setup", "--no-color", "--shares-gpus", "--help")


class Options:
    """The parsed flags; one attribute each, with its default."""

    log_dir: str
    cluster_num_nodes: int
    cluster_ips: tuple[str, ...]
    script: str | None = None
    script_path: str | None = None
    env_vars: str = "{}"
    env_file: str | None = None
    task_name: str = "task"
    is_setup: bool = False
    workdir: str | None = None
    cluster_home_dir: str | None = None
    alloc_signal_file: str | None = None
    setup_done_signal_file: str | None = None
    launch_dir: str | None = None
    hosts_file: str | None = None
    hosts_means: str = HOSTS_MEANS[0]
    ports: tuple[int, ...] = ()
    shares_gpus: bool = False
    ray: str | None = None
    proctrack: str = protocol.UNSPECIFIED_PROCTRACK
    grace_s: float = protocol.DEFAULT_GRACE_S
    liveness_timeout_s: float = protocol.DEFAULT_LIVENESS_TIMEOUT_S
    no_color: bool = False

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def script_text(self) -> bytes:
        if self.script is not None:
            return os.fsencode(self.script)
        from executor.process import read_script

        return read_script(self.script_path or "")


FLAGS = tuple("--" + name.replace("_", "-") for name in Options.__annotations__)
PATHS = (
    "log_dir",
    "script_path",
    "env_file",
    "workdir",
    "cluster_home_dir",
    "alloc_signal_file",
    "setup_done_signal_file",
    "launch_dir",
    "hosts_file",
)


def parse(argv: list[str]) -> Options:
    """The options of a command line. Raises UsageError that names the flag, the value and what is allowed."""
    raw = _raw(argv)
    for flag in ("--log-dir", "--cluster-num-nodes", "--cluster-ips"):
        if not raw.get(flag):
            raise UsageError(f"{flag} is required")
    if ("--script" in raw) == ("--script-path" in raw):
        raise UsageError(
            "give one of --script and --script-path, not %s" % ("both" if "--script" in raw else "neither")
        )
    values: dict[str, object] = {flag[2:].replace("-", "_"): value for flag, value in raw.items()}
    for name in PATHS:
        if name in values:
            values[name] = _path(str(values[name]))
    for flag in SWITCHES[:-1]:
        values[flag[2:].replace("-", "_")] = flag in raw
    values["cluster_num_nodes"] = _whole(raw, "--cluster-num-nodes")
    values["cluster_ips"] = _list(raw["--cluster-ips"], _whole(raw, "--cluster-num-nodes"))
    if raw.get("--hosts-means", HOSTS_MEANS[0]) not in HOSTS_MEANS:
        raise UsageError("--hosts-means={!r} is none of {}".format(raw["--hosts-means"], ", ".join(HOSTS_MEANS)))
    values["ports"] = _ports(raw.get("--ports", ""))
    if "--ray" in raw and "--launch-dir" not in raw:
        raise UsageError("--ray needs --launch-dir: only a driver starts Ray clusters")
    for flag in ("--grace-s", "--liveness-timeout-s"):
        if flag in raw:
            values[flag[2:].replace("-", "_")] = _seconds(raw, flag)
    return Options(**values)


def _path(text: str) -> str:
    """Absolute: the script's work directory becomes ours later."""
    try:
        return os.path.abspath(os.path.expanduser(text))
    except OSError as error:
        raise UsageError(f"{text!r} is relative, and the current directory is gone: {error.strerror}") from error


def _raw(argv: list[str]) -> dict[str, str]:
    raw: dict[str, str] = {}
    words = list(argv)
    while words:
        flag, separator, value = words.pop(0).partition("=")
        if flag not in FLAGS:
            raise UsageError("unknown argument {!r}; allowed are {}".format(flag, " ".join(FLAGS)))
        if flag in SWITCHES:
            if separator:
                raise UsageError(f"{flag} takes no value")
        elif not separator:
            if not words:
                raise UsageError(f"{flag} needs a value")
            value = words.pop(0)
        raw[flag] = value
    return raw


def _whole(raw: dict[str, str], flag: str) -> int:
    if not (raw[flag].isascii() and raw[flag].isdigit() and int(raw[flag]) > 0):
        raise UsageError(f"{flag}={raw[flag]!r} is not a whole number of 1 or more")
    return int(raw[flag])


def _seconds(raw: dict[str, str], flag: str) -> float:
    try:
        seconds = float(raw[flag])
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and flag != "--grace-s"):
        allowed = "0 or more" if flag == "--grace-s" else "above 0"
        raise UsageError(f"{flag}={raw[flag]!r} is not a number of seconds ({allowed})")
    return seconds


def _ports(text: str) -> tuple[int, ...]:
    words = text.split(",") if text else []
    for word in words:
        if not (word.isascii() and word.isdigit() and 0 < int(word) <= protocol.LAST_PORT):
            raise UsageError(f"--ports={text!r}: {word!r} is no port: use 1 to {protocol.LAST_PORT}, with commas")
    return tuple(int(word) for word in words)


def _list(text: str, expected: int) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(","))
    if "" in entries:
        raise UsageError(f"--cluster-ips={text!r} has an empty entry")
    if len(set(entries)) != len(entries):
        raise UsageError(f"--cluster-ips={text!r} names a node twice")
    if len(entries) != expected:
        raise UsageError("--cluster-ips has %d entries, but --cluster-num-nodes is %d" % (len(entries), expected))
    return entries
