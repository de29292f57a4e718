"""`gangrun`: the command line. Each verb imports what it needs when it is called."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from executor import protocol
from executor.protocol import GangrunError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(protocol.VERSION, prog_name="gangrun")
def cli() -> None:
    """Start one gang of processes, one per node, on a Slurm cluster."""


@cli.command()
@click.argument("task_file", metavar="TASK.yaml", type=click.Path(exists=True, dir_okay=False))
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="Set or replace one of the task's envs.")
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

    here.run(Task.from_file(task_file, _assignments(envs)), log_dir, grace_s, is_local)


def _assignments(envs: tuple[str, ...]) -> dict[str, str]:
    for text in envs:
        if "=" not in text:
            raise click.BadParameter(f"{text!r}: use NAME=VALUE", param_hint="--env")
    return dict(text.split("=", 1) for text in envs)


def main() -> NoReturn:
    """The one place where errors become one line and an exit code."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        sys.exit(cli(arguments, prog_name="gangrun", standalone_mode=False))
    except click.ClickException as error:
        _fail(error.format_message().rstrip("."), protocol.EXIT_USAGE)
    except click.Abort:
        _fail("interrupted", protocol.exit_code_of_signal(protocol.SIGINT))
    except GangrunError as error:
        _fail(str(error), error.exit_code)


def _fail(message: str, code: int) -> NoReturn:
    click.echo("gangrun: {}".format(" ".join(message.split())), err=True)
    sys.exit(code)
