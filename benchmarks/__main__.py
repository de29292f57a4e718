"""`python -m benchmarks [NAME ...]`: ratios against a peer or a floor, all measured in this run.

Every target is printed with its limit and `ok` or `MISSED`. Exit code 0: none was missed, 1: some were, 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from typing import Callable, NoReturn

from benchmarks import barrier, client, elastic, gang, nodes, output, ray, scale, setup_done, skypilot, start
from benchmarks.place import Place, Session
from benchmarks.report import Report
from benchmarks.skypilot import PeerError
from tests.minislurm.errors import BedError

BENCHMARKS: dict[str, Callable[[Session], None]] = {
    "start": start.run,
    "gang": gang.run,
    "output": output.run,
    "setup": setup_done.run,
    "scale": scale.run,
    "client": client.run,
    "elastic": elastic.run,
}
BY_NAME_ONLY: dict[str, Callable[[Session], None]] = {  # they take minutes
    "barrier": barrier.run,
    "nodes": nodes.run,
    "ray": ray.run,
}
NAMES = "of %s (default: all); or of %s" % (" ".join(BENCHMARKS), " ".join(BY_NAME_ONLY))
MAKE_VENV = "skypilot-venv"
# Short, because sockets lie below it, and seen by all nodes of the test bed.
ROOT = "/tmp"
EXIT_MISSED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == [MAKE_VENV]:
            return _make_venv(words[1:])
        arguments = _parse(words)
        peer = skypilot.find(arguments.skypilot)
        return _run(arguments.names or list(BENCHMARKS), arguments.rounds, peer, arguments.save)
    except PeerError as error:
        print("benchmarks: %s" % error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PeerError(message)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="`python -m benchmarks %s DIR` installs the peer." % MAKE_VENV,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=NAMES)
    parser.add_argument("--skypilot", metavar="PYTHON", help="a Python that has SkyPilot (or $%s)" % skypilot.VARIABLE)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="measurements of each candidate (15)")
    parser.add_argument("--save", metavar="FILE", help="what `gangrun estimate --measured FILE` reads (elastic)")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in {**BENCHMARKS, **BY_NAME_ONLY}]
    if unknown:
        known = " ".join([*BENCHMARKS, *BY_NAME_ONLY])
        parser.error("no benchmark %r; there are %s, and %s DIR" % (unknown[0], known, MAKE_VENV))
    if arguments.rounds < 1:
        parser.error("--rounds=%d: use 1 or more" % arguments.rounds)
    return arguments


def _run(names: list[str], rounds: int, peer: skypilot.SkyPilot | None, save: str | None) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as tidily as after Ctrl-C
    report = Report()
    report.heading(
        "%d CPUs, load average %.1f; Python %s" % (os.cpu_count() or 1, os.getloadavg()[0], sys.version.split()[0])
    )
    with tempfile.TemporaryDirectory(prefix="gangrun-bench-", dir=ROOT) as folder:
        place = Place(folder)
        if peer is not None:
            peer.prepare_home(place.home)
        session = Session(report, place, rounds, peer)
        for name in dict.fromkeys(names):
            try:
                {**BENCHMARKS, **BY_NAME_ONLY}[name](session)
            except (BedError, PeerError, OSError, RuntimeError) as error:
                report.failed(name, str(error))
    if save is not None:
        _save(save, report)
    report.summary()
    return EXIT_MISSED if report.missed else 0


def _save(path: str, report: Report) -> None:
    try:
        with open(path, "w") as file:
            file.write(json.dumps(report.kept, indent=1) + "\n")
    except OSError as error:
        report.failed("--save=%r" % path, str(error.strerror))


def _make_venv(words: list[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        raise PeerError("usage: python -m benchmarks %s DIR" % MAKE_VENV)
    print("now: python -m benchmarks --skypilot %s" % skypilot.make_venv(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
