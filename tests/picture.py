"""`python -m tests.picture` makes the README's picture: a real run on a real Slurm on this machine, requeued once, and
its report in a headless Chromium, light and dark."""

from __future__ import annotations

import base64
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from executor import protocol
from gangrun.report.page import page
from gangrun.report.source import of_path
from tests import browser
from tests.bench import CHECKOUT, Bench, eventually
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

NODES = 4
SCHEMES = ("light", "dark")
WIDTH, SCALE = 1060, 1.5
# Rank 2 sets up slowly, rank 3 works longer than the others. Times are in units of ten to the power of {power} seconds.
SETUP = "sleep $((SKYPILOT_SETUP_NODE_RANK == 2 ? 9 : 3 + SKYPILOT_SETUP_NODE_RANK))e{power}"
RUN = """
saved="$HOME/saved"
step=$(cat "$saved" 2>/dev/null || echo 0)
until [ "$step" -ge 24 ]; do
  sleep 1e{power}
  step=$((step + 1))
  if [ $((step % 5)) = 0 ]; then
    sleep 5e{less}
    [ "$SKYPILOT_NODE_RANK" != 0 ] || { echo $step >"$saved"; gangrun checkpoint $step --cost-s 5e{less}; }
  fi
done
sleep $((SKYPILOT_NODE_RANK == 3 ? 4 : 0))e{power}
"""
REQUEUED_AFTER = 4.2  # units after the second checkpoint


def run_job(bench: Bench, power: int = 0) -> Path:
    """A run with a requeue; returns its directory. A unit of time is 10 to the `power` seconds."""
    setup, run = (text.replace("{power}", str(power)).replace("{less}", str(power - 1)) for text in (SETUP, RUN))
    job = bench.submit(run=run, setup=setup, nodes=NODES, job_id="train", sbatch="--requeue")
    marks = job.job_directory / protocol.CHECKPOINTS_NAME
    eventually(lambda: marks.exists() and len(marks.read_text().splitlines()) == 2, 60)
    time.sleep(REQUEUED_AFTER * 10**power)
    bench.cluster.run("ctl", ["scontrol", "requeue", str(job.job_id)])
    outcome = job.wait(120)
    assert outcome.code == 0, outcome.output
    return job.job_directory


def draw(job_directory: Path, folder: Path) -> list[Path]:
    """The page of the run's report, photographed in each scheme."""
    html = folder / "timeline.html"
    html.write_text(page(of_path(str(job_directory), None)), encoding="utf-8")
    with browser.chromium(WIDTH, 1000) as chrome:
        shots = [_shoot(chrome, html, scheme, folder / f"timeline-{scheme}.png") for scheme in SCHEMES]
    html.unlink()
    return shots


def _shoot(chrome: Chrome, html: Path, scheme: str, path: Path) -> Path:
    browser.prefer(chrome, scheme)
    chrome.get(html.as_uri())
    height = chrome.execute_script("return document.querySelector('footer').getBoundingClientRect().top")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": SCALE}
    shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(shot["data"]))
    return path


def main() -> int:
    reason = preflight.missing() or browser.missing()
    if reason:
        print(f"picture: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="gangrun-picture-", dir="/tmp") as folder:
        with Cluster.boot(Path(folder) / "slurm", nodes=NODES, name="lab") as cluster:
            job_directory = run_job(Bench(cluster, Path(folder)))
        for path in draw(job_directory, CHECKOUT / "docs"):
            print(path.relative_to(CHECKOUT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
