"""`srun python -m executor.slurm --script=... --log-dir=...`: one rank of a gang, from its first to its last breath.

Run once per node by srun. It promises the script's own exit code, its output in the node's log and in the stream,
every signal passed on once, and that it leaves only when the gang can spare it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from executor import environment, identity, protocol
from executor.gang import Gang, Leave, say
from executor.loop import WATCHED
from executor.member import Member
from executor.options import USAGE, Options, parse
from executor.process import end_with_parent
from executor.protocol import GangrunError, UsageError
from executor.shared import SignalFile, read_bytes, read_text, write_record

TYPE_CHECKING = False  # what type checkers take for true: `typing` costs every node 4 ms
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import NoReturn

    from executor.hostnames import Hosts


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the script's exit code, 2 for a usage error, 125 for trouble of our own."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    options = None
    try:
        options = parse(words)
        return run(options)
    except GangrunError as error:
        return _give_up(options, str(error), error.exit_code)
    except Exception as error:
        return _give_up(
            options, "%s: %s" % (type(error).__name__, " ".join(str(error).split())), protocol.EXIT_INFRASTRUCTURE
        )


def _give_up(options: Options | None, reason: str, code: int) -> int:
    rank = os.environ.get(protocol.SLURM_PROCID, "")
    say(None, f"rank {rank} gives up: {reason}" if options and options.launch_dir and rank.isdigit() else reason)
    _leave_word(options, reason, code)
    return code


def run(options: Options) -> int:
    """A rank's life in eight steps: parse the flags (done), find out who it is, and the six of `_live`."""
    _live_with_local_launcher()
    if options.launch_dir and not os.path.isdir(options.launch_dir):
        where = (
            f"the driver's directory {options.launch_dir} is not there on {os.environ.get(protocol.SLURMD_NODENAME)}"
        )
        raise GangrunError(f"{where}: is it on a file system that all nodes share?")
    script, own_variables, lookup = options.script_text(), _job_variables(options), _lookup(options)
    me = identity.resolve(dict(os.environ), options.cluster_ips, lookup)
    if me.warning:
        say(me, me.warning)
    gang = _join(options, me)
    member = Member(options, me, gang)
    try:
        ips = _node_ips(options, me, member, lookup)
        return _live(
            options,
            member,
            gang,
            script,
            (_visible_gpus(options, me), own_variables, _identity_variables(options, me, ips, own_variables)),
        )
    except Leave as leave:
        if leave.state == protocol.RANK_BROKEN or not options.launch_dir:
            say(me, leave.reason)  # the driver has told the rest itself
        gang.end(leave.state, leave.code, leave.reason)
        return leave.code
    except (GangrunError, OSError) as error:
        return gang.give_up(error)
    finally:
        member.end_what_is_left()


def _live(options: Options, member: Member, gang: Gang, script: bytes, variables: Iterable[Mapping[str, str]]) -> int:
    """Say that the step has started, wait for setup, run the script, wait for the others; returns the script's code."""
    member.hosts = _hosts(options, gang.me)
    _fire_alloc(options, gang)
    if options.setup_done_signal_file:
        member.wait_for_go(SignalFile(options.setup_done_signal_file))
    _enter_workdir(options)
    tell_taken_ports(options, gang.me)
    environ = environment.for_script(os.environ, variables)
    code = _run_in_ray(options, member, gang, script, environ) if options.ray else member.run_script(script, environ)
    if code == 0 and not member.is_stopping:
        member.wait_in_barrier()
        if not options.launch_dir:
            gang.leave_no_files()
    return code


def _visible_gpus(options: Options, me: identity.Identity) -> dict[str, str]:
    if not (options.shares_gpus and options.is_setup and options.launch_dir):
        return {}
    from executor import sharing

    own = sharing.own_gpus(os.environ, options.launch_dir, me.num_ranks, me.rank, me.host)
    if own is None:
        say(me, "the run step does not tell which GPUs it has here; setup sees none")
    return sharing.no_gpus(os.environ) if own is None else own


def tell_taken_ports(options: Options, me: identity.Identity) -> None:
    """Warn of ports of the script that somebody on this node listens on already."""
    if not options.ports:
        return
    from executor import sharing

    for port in sharing.taken_ports(options.ports):
        say(me, f"warning: port {port} of {options.task_name} is taken on {me.host} already")


def _run_in_ray(options: Options, member: Member, gang: Gang, script: bytes, environ: dict[str, str]) -> int:
    """Run this node's part of a Ray cluster, and on rank 0 the script. All of it has ended on return."""
    from executor.ray_room import Room

    room = Room(options, gang)
    room.open()
    try:
        return member.run_script(room.script(script), environ, room.trouble)
    finally:
        member.end_what_is_left()
        room.close()


def _lookup(options: Options) -> identity.Resolver:
    """Names to addresses. The driver has looked them up once: a thousand ranks with a thousand names are a storm."""
    known: dict[str, str] = {}
    if options.launch_dir:
        known = json.loads(read_text(protocol.Launch(options.launch_dir).addresses) or "{}")
    return lambda name: known.get(name) or identity.address_of(name)


def _live_with_local_launcher() -> None:
    launcher = os.environ.get(protocol.ENV_LOCAL_LAUNCHER)
    if launcher and (not end_with_parent() or str(os.getppid()) != launcher):
        raise GangrunError("the local launcher is gone")


def _join(options: Options, me: identity.Identity) -> Gang:
    launch = _launch(options, me)
    gang = Gang(me, launch, options)
    if options.shares_gpus:  # for the setup on this node
        gang.record["gpus"] = os.environ.get(protocol.SLURM_STEP_GPUS, "")
    try:
        gang.join()
    except OSError as error:
        if options.launch_dir:
            what = f"the driver's directory {options.launch_dir} cannot be written on {me.host}"
            raise GangrunError(f"{what} ({error.strerror}): is it on a file system that all nodes share?") from error
        say(
            me,
            f"cannot write {launch and launch.directory} ({error.strerror}): the ranks will not wait for each other",
        )
        gang = Gang(me, None, options)
    return gang


def _launch(options: Options, me: identity.Identity) -> protocol.Launch | None:
    """The driver's directory; by hand one that only this run of this step uses."""
    if options.launch_dir:
        return protocol.Launch(options.launch_dir)
    if me.num_ranks == 1 or options.is_setup:
        return None
    home = options.cluster_home_dir or os.path.expanduser("~")
    if not os.path.isabs(home) or not os.path.isdir(home):
        say(me, f"no home directory ({home}); give --cluster-home-dir, or the ranks will not wait for each other")
        return None
    environ = os.environ
    # A requeued job has the same job id and step id; srun's port tells even a recycled job id apart.
    step = "step-{}-{}".format(environ.get(protocol.SLURM_STEP_ID, ""), environ.get(protocol.SLURM_SRUN_COMM_PORT, ""))
    return protocol.Launch(
        protocol.job_directory(home, environ.get(protocol.SLURM_JOB_ID, ""), step)
        + "/"
        + protocol.attempt_name(_attempt())
    )


def _hosts(options: Options, me: identity.Identity) -> Hosts | None:
    if not options.hosts_file:
        return None
    from executor.hostnames import choose

    return choose(options.hosts_file, options.hosts_means, lambda text: say(me, text))


def _fire_alloc(options: Options, gang: Gang) -> None:
    me = gang.me
    if not options.alloc_signal_file or me.rank != 0:
        return
    nodes = os.environ.get(protocol.SLURM_STEP_NODELIST, ",".join(me.hosts))
    detail = {"nodes": nodes, "step": gang.record["step"], "attempt": _attempt()}
    try:
        SignalFile(options.alloc_signal_file).fire(protocol.GO, json.dumps(detail))
    except OSError as error:
        raise UsageError(f"--alloc-signal-file={options.alloc_signal_file}: {error.strerror}") from error


def _job_variables(options: Options) -> dict[str, str]:
    variables = _json_object(options.env_vars, "--env-vars")
    if options.env_file:
        try:
            text = read_bytes(options.env_file).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--env-file={options.env_file}: {getattr(error, 'strerror', None) or error}") from error
        variables.update(_json_object(text, "--env-file"))
    return variables


def _json_object(text: str, flag: str) -> dict[str, str]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f'{flag} is a JSON {type(values).__name__}; give an object such as {{"NAME": "value"}}')
    return environment.checked(values, flag)


def _identity_variables(
    options: Options, me: identity.Identity, ips: list[str], job_variables: Mapping[str, str]
) -> dict[str, str]:
    gpus = os.environ.get(protocol.ENV_NUM_GPUS_PER_NODE) or os.environ.get(protocol.SLURM_GPUS_ON_NODE) or "0"
    gpus = job_variables.get(protocol.ENV_NUM_GPUS_PER_NODE, gpus)
    return environment.of_rank(me.rank, ips, gpus, _attempt(), options.is_setup)


def _node_ips(options: Options, me: identity.Identity, member: Member, lookup: identity.Resolver) -> list[str]:
    if me.ranks_are_shuffled and member.can_gather:
        return member.gather_addresses()
    return identity.node_ips(me, options.cluster_ips, me.hosts, lookup)


def _attempt() -> str:
    return os.environ.get(protocol.SLURM_RESTART_COUNT) or "0"


def _enter_workdir(options: Options) -> None:
    # slurmstepd goes to /tmp, with only a warning, when the work directory is missing on a node.
    wanted = options.workdir or (os.environ.get("PWD") if os.getcwd() == "/tmp" else None)
    if wanted is not None:
        enter_directory(wanted)


def enter_directory(path: str) -> None:
    """Let the script start there. Raises UsageError that names it."""
    try:
        os.chdir(path)
    except OSError as error:
        raise UsageError(f"work directory {path}: {error.strerror}") from error
    os.environ["PWD"] = path


def _leave_word(options: Options | None, reason: str, code: int) -> None:
    """A rank that could not even say who it is still leaves a record for the driver."""
    rank = os.environ.get(protocol.SLURM_PROCID, "")
    if options is None or not options.launch_dir or not rank.isdigit():
        return
    record = {
        "state": protocol.RANK_BROKEN,
        "host": os.environ.get(protocol.SLURMD_NODENAME, ""),
        "code": code,
        "why": reason[:160],
    }
    try:
        write_record(protocol.Launch(options.launch_dir).record(int(rank), options.is_setup), record)
    except OSError:
        pass


def run_as_program() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # what comes before the loop runs is kept for it
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # nothing left to tidy up; the interpreter's own farewell costs milliseconds


if __name__ == "__main__":
    run_as_program()
