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
from tests.faults.not_tested import NOT_TESTED
from tests.faults.rows import REPORT

SOME_FAILED = 1  # pytest's exit code
TABLE = CHECKOUT / "docs" / "faults.md"
HEAD = """# What happens when things break

Written by `python -m tests.faults`, which provoked each fault on a real Slurm (versions below) and checked that nothing
was left behind: no process on any node, no step, no file of the attempt. Times are from the fault to the end of the
job, on one machine of two cores; Slurm's own periods (ping cycle, KillWait of 2 s here) are part of them.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rootfs", action="append", default=[], metavar="DIR", help="a Debian root with another Slurm")
    parser.add_argument("--jobs", default="3", metavar="N", help="tests at a time (default 3)")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, such as -k WORD")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.jsonl"
        codes = [_run(rootfs, report, arguments) for rootfs in ["", *arguments.rootfs]]
        rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if not arguments.pytest:
        TABLE.write_text(render(rows))
        print(f"{len({row['fault'] for row in rows})} faults in {TABLE}")
    return max(codes)


def _run(rootfs: str, report: Path, arguments: argparse.Namespace) -> int:
    """Every fault; what did not come out as expected beside others is provoked once more, with little beside it."""
    cache = f"cache_dir={report.parent / 'cache'}{rootfs.replace('/', '-')}"
    argv = [sys.executable, "-m", "pytest", "-q", "-o", cache, "tests/faults", *arguments.pytest]
    environ = {**os.environ, REPORT: str(report)}
    if rootfs:
        environ["MINISLURM_ROOTFS"] = rootfs
    code = subprocess.call([*argv, "-n", arguments.jobs], cwd=CHECKOUT, env=environ)
    again = ["-n", "2", "--last-failed", "--last-failed-no-failures", "none"]
    return subprocess.call([*argv, *again], cwd=CHECKOUT, env=environ) if code == SOME_FAILED else code


def render(rows: list[dict[str, object]]) -> str:
    """The table: a section per kind, a row per fault, the versions side by side."""
    versions = sorted({str(row["slurm"]) for row in rows})
    text = HEAD + f"\nSlurm {' and '.join(versions)}.\n"
    for kind in sorted({str(row["kind"]) for row in rows}):
        times = " | ".join(f"s on {version}" for version in versions)
        text += f"\n## {kind}\n\n| fault | what a user sees | code | left behind | {times} |\n"
        text += "| --- | --- | --- | --- |" + " --- |" * len(versions) + "\n"
        own = [row for row in rows if row["kind"] == kind]
        for fault in sorted({str(row["fault"]) for row in own}):
            text += _line([row for row in own if row["fault"] == fault], versions)
    text += "\n## Not tested here\n\n| fault | why |\n| --- | --- |\n"
    return text + "".join(f"| {fault} | {why} |\n" for fault, why in NOT_TESTED)


def _line(rows: list[dict[str, object]], versions: list[str]) -> str:
    by_version = {str(row["slurm"]): row for row in rows}
    first = rows[0]
    seconds = [by_version.get(version, {}).get("seconds") for version in versions]
    times = " | ".join("" if value is None else f"{float(str(value)):.1f}" for value in seconds)
    cells = (str(first[key]).replace("|", "\\|").replace("\n", " ") for key in ("fault", "seen", "code", "left"))
    return f"| {' | '.join(cells)} | {times} |\n"


if __name__ == "__main__":
    sys.exit(main())
