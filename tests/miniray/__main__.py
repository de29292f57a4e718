"""`python -m tests.miniray`: a Ray cluster on this machine, to try things out by hand."""

from __future__ import annotations

import argparse
import os
import sys

from tests.miniray.bed import RayBed, missing
from tests.minislurm.errors import BedError

DEFAULT_ROOT = "/tmp/miniray"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 1 if the cluster failed, 2 if there can be none here."""
    arguments = _parser().parse_args(argv)
    if why := missing():
        print(f"miniray: {why}", file=sys.stderr)
        return 2
    try:
        return _do(arguments)
    except BedError as error:
        print(f"miniray: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.miniray", description=__doc__)
    parser.add_argument("--root", default=DEFAULT_ROOT, help="the cluster's folder (%(default)s)")
    commands = parser.add_subparsers(required=True, dest="action", metavar="COMMAND")
    up = commands.add_parser("up", help="boot a cluster; it stays until `down`")
    up.add_argument("-n", "--nodes", type=int, default=3)
    up.add_argument("--gpus", type=int, default=2, help="fake ones per node (%(default)s)")
    run = commands.add_parser("run", help="run a command in a node")
    run.add_argument("node", help="n1 (the head), n2, ...")
    run.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="take the cluster away")
    return parser


def _do(arguments: argparse.Namespace) -> int:
    if arguments.action == "up":
        bed = RayBed.boot(arguments.root, arguments.nodes, gpus=arguments.gpus, dashboard=True)
        print(f"Ray is up: {bed.gcs_address}, dashboard {bed.dashboard_url}; nodes {', '.join(bed.nodes)}")
    elif arguments.action == "down":
        RayBed.attach(arguments.root).down()
    else:
        command = RayBed.attach(arguments.root).argv_in(arguments.node, arguments.words or ["bash"])
        os.execvp(command[0], command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
