"""`python -m tests.faults`: provoke every fault on each Slurm version there is, and write docs/faults.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench import CHECKOUT
from tests.faults import table
from tests.faults.rows import REPORT

SOME_FAILED = 1  # pytest's exit code
TABLE = CHECKOUT / "docs" / "faults.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rootfs", action="append", default=[], metavar="DIR", help="a Debian root with another Slurm")
    parser.add_argument("--jobs", default="3", metavar="N", help="tests at a time (default 3)")
    parser.add_argument(
        "--only", metavar="WORDS", help="the tests that pytest's -k WORDS chooses; the other rows are kept"
    )
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, such as -x; no table is written")
    arguments = parser.parse_args()
    if arguments.only and arguments.pytest:
        parser.error("--only writes the table, and arguments for pytest do not: give one of them")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.jsonl"
        codes = [_run(rootfs, report, arguments) for rootfs in ["", *arguments.rootfs]]
        rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if not arguments.pytest:
        _write(rows, is_part=bool(arguments.only))
    return max(codes)


def _write(rows: list[table.Record], is_part: bool) -> None:
    """A fault that did not come out as expected has no row; in a part, it keeps that of an earlier run."""
    kept = table.read(TABLE.read_text()) if is_part else []
    TABLE.write_text(table.render(table.merged(kept, rows)))
    print(f"{len({row['fault'] for row in rows})} faults provoked for {TABLE}")


def _run(rootfs: str, report: Path, arguments: argparse.Namespace) -> int:
    """Every fault; what did not come out as expected beside others is provoked once more, with little beside it."""
    cache = f"cache_dir={report.parent / 'cache'}{rootfs.replace('/', '-')}"
    argv = [sys.executable, "-m", "pytest", "-q", "-o", cache, "tests/faults", *arguments.pytest]
    argv += ["-k", arguments.only] if arguments.only else []
    environ = {**os.environ, REPORT: str(report)}
    if rootfs:
        environ["MINISLURM_ROOTFS"] = rootfs
    code = subprocess.call([*argv, "-n", arguments.jobs], cwd=CHECKOUT, env=environ)
    again = ["-n", "2", "--last-failed", "--last-failed-no-failures", "none"]
    return subprocess.call([*argv, *again], cwd=CHECKOUT, env=environ) if code == SOME_FAILED else code


if __name__ == "__main__":
    sys.exit(main())
