"""`gangrun`: the command line. Each verb imports what it needs when it is called; what it does is in `verbs`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from executor import protocol
from executor.protocol import GangrunError

Command = TypeVar("Command", bound=Callable[..., Any])
HOST_HELP = (
    "An alias of ~/.ssh/config, `local`, or a Ray dashboard's URL (default: default_host of the settings, else this "
    "machine)."
)


class Verb(click.Command):
    """A verb whose examples stand in a line each, however long they are: they are made to be copied."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole, self.help = self.help, (self.help or "").replace("Example:", "\b\n    Example:")
        super().format_help_text(ctx, formatter)
        self.help = whole


class Verbs(click.Group):
    command_class = Verb


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(protocol.VERSION, prog_name="gangrun")
def cli() -> None:
    """Start one gang of processes, one per node, on a Slurm cluster.

    JOB is an id, a name, `last`, or `all`. Exit codes of wait, logs and status: 0 succeeded, 100 failed,
    101 not finished, 102 not found, 103 cancelled; 2 usage; 125 the cluster could not be asked.
    """


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


task_file = click.argument("task_file", metavar="TASK.yaml", type=click.Path(exists=True, dir_okay=False))
env_option = click.option(
    "--env", "envs", multiple=True, metavar="NAME=VALUE", help="Set or replace one of the task's envs."
)


def one_spelling(context: click.Context, parameter: click.Parameter, host: str | None) -> str | None:
    """Of a Ray dashboard's URL: runs are recorded under it."""
    if host is None or "://" not in host:
        return host
    from gangrun.ray_api import checked_address

    return checked_address(host, "--host")


host_option = click.option("--host", metavar="ALIAS", help=HOST_HELP, callback=one_spelling)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
one_job = click.argument("word", metavar="JOB")
some_jobs = click.argument("words", metavar="JOB...", nargs=-1)
request_options = options(
    click.option("-n", "--name", metavar="NAME", help="Instead of the task's name."),
    env_option,
    click.option(
        "--secret", "secrets", multiple=True, metavar="NAME", help="A variable of your environment, as a secret."
    ),
    click.option("--gpus", metavar="SPEC", help="GPUs per node: gpu, 2, h100, h100:2, gpu:a100:4."),
    click.option("--time", metavar="DURATION", help="Time limit: 90s, 30m, 4h, 1d, 1-02:00:00."),
    click.option("--partition", metavar="NAME", help="sbatch's --partition."),
    click.option("--account", metavar="NAME", help="sbatch's --account."),
    click.option("--qos", metavar="NAME", help="sbatch's --qos."),
    click.option("--constraint", metavar="FEATURES", help="sbatch's --constraint."),
    click.option("--sbatch-arg", "sbatch_args", multiple=True, metavar="--OPTION=VALUE", help="Any option of sbatch."),
    click.option(
        "--warn-signal", metavar="USR1@SECONDS", help="Reaches every program that long before the time limit."
    ),
    click.option("--grace", metavar="DURATION", help="From TERM to KILL when the job is stopped (default 30s)."),
    click.option("--requeue/--no-requeue", default=None, help="Whether Slurm may run it again (default: yes)."),
)


@cli.command()
@task_file
@host_option
@click.option("--ray", metavar="URL", help="A Ray cluster, by its dashboard: http://127.0.0.1:8265.")
@request_options
@click.option("--dirty", is_flag=True, help="The working tree as it is, not the last commit.")
@click.option("--force", is_flag=True, help="Although a run of this name is in flight.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent, and where each value comes from.")
@click.option("-d", "--detach", is_flag=True, help="Do not follow the log.")
@click.option("--job-group", metavar="ID|NAME", help="Join this group (default inside one: the group itself).")
@click.option("--no-job-group", is_flag=True, help="Inside a group: a job of its own all the same.")
@json_option
def launch(task_file: str, host: str | None, as_json: bool, **how: Any) -> NoReturn:
    """Send a task or a group to a cluster, and follow its output.

    Inside a task of a running group it joins the group instead, on free nodes of the same allocation.

    The last commit of its workdir travels; what you edit afterwards never reaches the job. Ctrl-C leaves it running.
    With --ray it is a job of a Ray cluster.

    Example:  gangrun launch train.yaml --host lab --gpus h100:8 --time 4h
    """
    from gangrun.verbs import launch as verbs

    sys.exit(verbs.launch(task_file, host, as_json, **how))


@cli.command()
@task_file
@env_option
@click.option("--log-dir", metavar="DIR", help="Where the logs go (default: in the run's own directory).")
@click.option(
    "--grace-s",
    type=click.FloatRange(min=0),
    default=protocol.DEFAULT_GRACE_S,
    show_default=True,
    help="Seconds from TERM to KILL.",
)
@click.option("--local", "is_local", is_flag=True, help="Use process groups on this machine, even where Slurm is.")
def run(task_file: str, envs: tuple[str, ...], log_dir: str | None, grace_s: float, is_local: bool) -> NoReturn:
    """Run a task now, on the nodes of this allocation.

    Streams its output and exits with its code. Without Slurm on this machine the nodes are process groups here.

    Example:  salloc -N2 gangrun run examples/hello.yaml
    """
    from gangrun import here
    from gangrun.task import Task

    here.run(Task.from_file(task_file, assignments(envs)), log_dir, grace_s, is_local)


@cli.command()
@host_option
@click.option("-a", "--all", "include_ended", is_flag=True, help="Also those that have ended.")
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option("--adopt", is_flag=True, help="First find the runs on the cluster that are not recorded here.")
@json_option
def queue(host: str | None, include_ended: bool, watch: bool, adopt: bool, as_json: bool) -> NoReturn:
    """List runs: state, nodes, attempt, age, progress, and why those wait that wait.

    Without --host: of all hosts that have runs.

    Example:  gangrun queue --watch
    """
    from gangrun.verbs import watch as verbs

    sys.exit(verbs.queue(host, include_ended, watch, adopt, as_json))


@cli.command()
@click.argument("word", metavar="[JOB]", required=False)
@host_option
@click.option("--once", is_flag=True, help="Print it once, as where there is no terminal.")
@click.option("--rows", type=click.IntRange(min=1), help="At most so many (default: what fits; 20 without a terminal).")
@json_option
def top(word: str | None, host: str | None, once: bool, rows: int | None, as_json: bool) -> NoReturn:
    """Watch a host's jobs, or a job's ranks: state, last line, and for how long each has been silent. q ends.

    Example:  gangrun top last
    """
    from gangrun.verbs import top as verbs

    sys.exit(verbs.top(word, host, once=once, rows=rows, as_json=as_json))


@cli.command()
@one_job
@host_option
@json_option
def status(word: str, host: str | None, as_json: bool) -> NoReturn:
    """Tell how a job is doing, rank by rank.

    Example:  gangrun status last
    """
    from gangrun.verbs import watch as verbs

    sys.exit(verbs.status(word, host, as_json))


@cli.command()
@one_job
@click.argument("task", metavar="[TASK]", required=False)
@host_option
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's log.")
@click.option("--node", metavar="NAME", help="Only this node's log: head, worker1, or the node's own name.")
@click.option("--setup", is_flag=True, help="The logs of setup.")
@click.option("--driver", is_flag=True, help="Only what the driver and Slurm say.")
@click.option("-f", "--follow", is_flag=True, help="Until the job has ended.")
@click.option("-n", "--lines", type=click.IntRange(min=1), help="Only the last N lines.")
@click.option("--download", metavar="DIR", help="Copy all logs into DIR.")
@json_option
def logs(word: str, host: str | None, **how: Any) -> NoReturn:
    """Print a job's output: all ranks with prefixes, or one rank's as it wrote it.

    TASK is one of a group's, by name or number.

    Example:  gangrun logs last --rank 3 -f
    """
    from gangrun.verbs import logs as verbs

    sys.exit(verbs.logs(word, host, **how))


@cli.command()
@some_jobs
@host_option
@click.option("--all", "every", is_flag=True, help="All runs in flight.")
@click.option("--grace", metavar="DURATION", help="From asking to forcing (default and most: the task's).")
@click.option("--task", metavar="TASK", help="Only this task of a group, by name or number; it must have joined later.")
@json_option
def cancel(
    words: tuple[str, ...], host: str | None, every: bool, grace: str | None, task: str | None, as_json: bool
) -> NoReturn:
    """End jobs, softly first, and see that they have ended.

    Example:  gangrun cancel train-abcd2345
    """
    from gangrun.verbs import watch as verbs

    sys.exit(verbs.cancel((*words, "all") if every else words, host, grace, task, as_json))


@cli.command()
@some_jobs
@host_option
@click.option("--any", "any_of_them", is_flag=True, help="Return when the first has ended.")
@click.option("--timeout", metavar="DURATION", help="Exit code 101 after this.")
@click.option(
    "--then", "command", metavar="CMD", help="Run once at the end of each, with GANGRUN_STATE and others set."
)
@json_option
def wait(words: tuple[str, ...], host: str | None, **how: Any) -> NoReturn:
    """Wait until jobs have ended. It can be stopped and started again at any time.

    Example:  gangrun wait last --then 'notify-send "$GANGRUN_RUN: $GANGRUN_STATE"'
    """
    from gangrun.verbs import watch as verbs

    sys.exit(verbs.wait(words, host, **how))


@cli.command()
@click.argument("word", metavar="JOB|DIR")
@click.argument("task", metavar="[TASK]", required=False)
@host_option
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write one self-contained page; - is stdout."
)
@click.option(
    "--checkpoint-pattern",
    "pattern",
    metavar="REGEX",
    help="Checkpoints by rank 0's log: a regular expression with groups `time` and `step`.",
)
@json_option
def report(word: str, task: str | None, host: str | None, **how: Any) -> NoReturn:
    """Show where a run's time went: a timeline, what interruptions cost, and what stands out.

    Also of a job's directory that is here, or of its events file alone.

    Example:  gangrun report last --html report.html
    """
    from gangrun.verbs import report as verbs

    sys.exit(verbs.report(word, task, host, **how))


@cli.command()
@click.argument("step", metavar="STEP")
@click.option("--cost-s", metavar="SECONDS", help="How long the checkpoint took.")
def checkpoint(step: str, cost_s: str | None) -> NoReturn:
    """Note, inside a job's script, that a checkpoint is complete: what was computed up to STEP, a number, is safe.

    `gangrun report` tells from it what interruptions cost. One rank is enough.

    Example:  gangrun checkpoint $step --cost-s 12.5
    """
    from gangrun import checkpoint as verb

    verb.note(step, cost_s)
    sys.exit(0)


@cli.command()
@one_job
@host_option
@json_option
def explain(word: str, host: str | None, as_json: bool) -> NoReturn:
    """Say why a job waits, or why it failed, and what would help.

    Example:  gangrun explain last
    """
    from gangrun.verbs import upkeep as verbs

    sys.exit(verbs.explain(word, host, as_json))


@cli.command()
@host_option
@click.option("--deep", is_flag=True, help="Also submit a short job that looks at a compute node.")
@json_option
def check(host: str | None, deep: bool, as_json: bool) -> NoReturn:
    """Say what a host has and lacks, and what that costs.

    Example:  gangrun check --host lab --deep
    """
    from gangrun.verbs import upkeep as verbs

    sys.exit(verbs.check(host, deep, as_json))


@cli.command()
@task_file
@request_options
@click.option("-o", "--output", metavar="DIR", help="Write the files into DIR instead of printing them.")
def render(task_file: str, output: str | None, **how: Any) -> NoReturn:
    """Print the driver and the batch script of a task, or write them to be submitted by hand. Nothing is sent anywhere.

    Example:  gangrun render train.yaml -o my-run && sbatch my-run/job.sbatch
    """
    from gangrun.verbs import launch as verbs

    sys.exit(verbs.render(task_file, output, **how))


@cli.command()
@host_option
@click.option("--older-than", default="14d", show_default=True, metavar="DURATION", help="Only what is older.")
@click.option("--yes", is_flag=True, help="Remove without asking.")
@json_option
def gc(host: str | None, older_than: str, yes: bool, as_json: bool) -> NoReturn:
    """List old runs and snapshots on a cluster with ages and sizes, and remove them.

    Example:  gangrun gc --older-than 30d
    """
    from gangrun.verbs import upkeep as verbs

    sys.exit(verbs.gc(host, older_than, yes, as_json))


@cli.command()
@click.option("--work", metavar="DURATION", help="How long the run takes when nothing interrupts it.")
@click.option("--checkpoint-every", metavar="DURATION", help="Work between two checkpoints (default: none are made).")
@click.option("--checkpoint-cost", metavar="DURATION", help="What one takes.")
@click.option("--preemptions", type=int, metavar="N", help="How often the run is interrupted.")
@click.option("--mtbp", metavar="DURATION", help="Instead: mean machine time between preemptions.")
@click.option("--requeue-wait", metavar="DURATION", help="In the queue after each.")
@click.option("--restart-cost", metavar="DURATION", help="On the nodes after each, before work goes on.")
@click.option("--pool", type=int, metavar="GPUS", help="GPUs that phases share.")
@click.option("--phase", multiple=True, metavar="NAME=WORK", help="GPU-minutes of a phase in an iteration, or 2h40m.")
@click.option("--turn-cost", metavar="DURATION", help="To begin a phase on all GPUs.")
@click.option("--measured", metavar="FILE", help="What `python -m benchmarks elastic --save FILE` measured, beside it.")
@json_option
def estimate(as_json: bool, **options: Any) -> NoReturn:
    """Compute what preemptions and checkpoints cost, or what a pool of GPUs yields. Nothing is asked or sent.

    Example:  gangrun estimate --work 8h --checkpoint-every 30m --checkpoint-cost 2m --preemptions 3 --requeue-wait 40m

    Example:  gangrun estimate --pool 16 --phase rollout=160 --phase train=80
    """
    from gangrun.verbs import estimate as verbs

    sys.exit(verbs.estimate(as_json, **options))


def assignments(envs: tuple[str, ...]) -> dict[str, str]:
    for text in envs:
        if "=" not in text:
            raise click.BadParameter(f"{text!r}: use NAME=VALUE", param_hint="--env")
    return dict(text.split("=", 1) for text in envs)


def main() -> NoReturn:
    """The one place where errors become one line and an exit code."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _leave(protocol.exit_code_of_signal(protocol.SIGPIPE))
    except OSError as error:  # a full disk behind standard output, for one
        _say(f"{error.strerror or error}")
        _leave(protocol.EXIT_INFRASTRUCTURE)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    if sys.stdout is None:  # closed by who called us
        sys.stdout = open(os.devnull, "w")
    try:
        cli(arguments, prog_name="gangrun", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else protocol.EXIT_USAGE if end.code else 0
    except click.ClickException as error:
        return _fail(error.format_message().rstrip("."), protocol.EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", protocol.exit_code_of_signal(protocol.SIGINT))
    except GangrunError as error:
        return _fail(str(error), error.exit_code)
    return 0


def _leave(code: int) -> NoReturn:
    """At once: the interpreter would try to write what is left, and complain."""
    os._exit(code)


def _fail(message: str, code: int) -> int:
    _say(message)
    return code


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        click.echo("gangrun: {}".format(" ".join(message.split())), err=True)
