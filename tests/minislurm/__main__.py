"""`python -m tests.minislurm`: a Slurm cluster on this machine, to try things out by hand."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.errors import BadInput, BedError, Unsupported
from tests.minislurm.options import CONTROLLER, LAPTOP, Options
from tests.minislurm.rootfs import SUITE, debootstrap

PROGRAM = "python -m tests.minislurm"
DEFAULT_ROOT = "/tmp/minislurm"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other bad input."""
        self.exit(2, f"minislurm: {message} (see {PROGRAM} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 1 if the cluster failed, 2 if what was asked for cannot be done, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        preflight.demand(getattr(arguments, "rootfs", None), slurm=arguments.action is up)
        return int(arguments.action(arguments) or 0)
    except (BadInput, Unsupported) as error:
        print(f"minislurm: {error}", file=sys.stderr)
        return 2
    except BedError as error:
        print(f"minislurm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: object, text: str) -> Parser:
        one: Parser = commands.add_parser(name, help=text, description=text)
        one.set_defaults(action=action)
        if name != "debootstrap":
            one.add_argument("--root", default=DEFAULT_ROOT, metavar="DIR", help="the cluster's folder (%(default)s)")
        return one

    _add_options(command("up", up, "boot a cluster; it stays until `down`"))
    shell_command = command("shell", shell, "a shell, or a command, in a node")
    shell_command.add_argument("--user", help="run as this user instead of root")
    shell_command.add_argument("node", help=f"{CONTROLLER}, n1, n2, ...")
    shell_command.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD", help="instead of a shell")
    command("login", login, "start an sshd, and a laptop to come from")
    command("status", status, "what is up")
    command("down", down, "take the cluster away; nothing of it is left")
    root_command = command("debootstrap", build, "build a Debian root with another Slurm, for `up --rootfs`")
    root_command.add_argument("folder", metavar="DIR")
    root_command.add_argument("--suite", default=SUITE, help="Debian release (%(default)s)")
    return parser


def _add_options(parser: Parser) -> None:
    defaults = Options()
    parser.add_argument("-n", "--nodes", type=int, default=4, help="compute nodes (%(default)s)")
    parser.add_argument("--name", default=defaults.name, help="cluster name (%(default)s)")
    parser.add_argument("--cpus", type=int, default=defaults.cpus, help="per node (%(default)s)")
    parser.add_argument("--mem-mb", type=int, default=defaults.mem_mb, help="per node (%(default)s)")
    parser.add_argument("--gpus", type=int, default=defaults.gpus, help="fake ones per node (%(default)s)")
    parser.add_argument("--gres-type", metavar="TYPE", help="a100 makes gpu:a100")
    parser.add_argument("--proctrack", choices=["cgroup", "linuxproc", "pgid"], default=defaults.proctrack)
    parser.add_argument(
        "--constrain", action="append", default=[], choices=["cores", "devices", "ram"], help="may be repeated"
    )
    parser.add_argument(
        "--private-dir", action="append", default=[], dest="private_dirs", metavar="DIR", help="one for each node"
    )
    parser.add_argument("--accounting", action="store_true", help="slurmdbd with its database, for sacct")
    parser.add_argument("--extra-conf", default="", metavar="TEXT", help="more lines for slurm.conf")
    parser.add_argument("--rootfs", metavar="DIR", help="boot the nodes from this root (see debootstrap)")


def up(arguments: argparse.Namespace) -> None:
    root = Path(arguments.root)
    if Cluster.is_up(root):
        raise BadInput(f"a cluster is up at {root} already; take it away with: {PROGRAM} down{_root(arguments)}")
    names = set(Options.__dataclass_fields__) & set(vars(arguments))
    cluster = Cluster.boot(root, Options(**{name: getattr(arguments, name) for name in names}))
    for note in cluster.notes:
        print(f"note: {note}")
    print(f"Slurm {cluster.slurm_version} is up: {CONTROLLER} and {len(cluster.nodes)} nodes. Next:")
    print(f"  {PROGRAM} shell{_root(arguments)} {CONTROLLER} sinfo")
    print(f"  {PROGRAM} shell{_root(arguments)} {cluster.nodes[0]}")
    print(f"  {PROGRAM} down{_root(arguments)}")


def shell(arguments: argparse.Namespace) -> NoReturn:
    """Becomes the command."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    argv = Cluster.attach(arguments.root).argv_in(arguments.node, words or ["bash"], user=arguments.user)
    os.execvp(argv[0], argv)


def login(arguments: argparse.Namespace) -> None:
    ready = Cluster.attach(arguments.root).login()
    print("sshd is up. Next:")
    for alias in ready.aliases:
        ssh = f"ssh -F {ready.config} {alias}"
        print(f"  {PROGRAM} shell{_root(arguments)} {LAPTOP} {ssh}")


def status(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.root)
    states = cluster.node_states()
    print(f"Slurm {cluster.slurm_version} at {cluster.root}, SLURM_CONF={cluster.slurm_conf}")
    for node, address in cluster.addresses.items():
        power = "on" if cluster.is_on(node) else "off"
        print(f"{node:<10} {address:<15} {power:<4} {states.get(node, '')}".rstrip())
    for note in cluster.notes:
        print(f"note: {note}")


def down(arguments: argparse.Namespace) -> None:
    cluster = Cluster.attach(arguments.root)
    cluster.down()
    print(f"the cluster at {cluster.root} is gone")


def build(arguments: argparse.Namespace) -> None:
    debootstrap(Path(arguments.folder).resolve(), arguments.suite)
    print(f"done; boot from it with: {PROGRAM} up --rootfs {arguments.folder}")


def _root(arguments: argparse.Namespace) -> str:
    return "" if arguments.root == DEFAULT_ROOT else f" --root {arguments.root}"


if __name__ == "__main__":
    sys.exit(main())
