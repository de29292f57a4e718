"""elastic: 16 GPUs for rollout (160 GPU-units a round) and training (80), split 8 + 8 or taking turns on all 16.

Split, a round takes 160/8 + 80/8 = 30 units and half of the pool is idle; taking turns it takes 160/16 + 80/16 = 15 and
the time that two steps need to start. The GPUs are fake, so work is sleep; starting and ending steps is real.
The benchmark `ray` has the same turns with Ray's placement groups beside it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

from benchmarks.place import Session
from benchmarks.report import Limit
from gangrun.estimate import Measured
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster

NODES, GPUS = 4, 4
ROLLOUT, TRAIN = 160, 80
ROUNDS, UNIT_S = 3, 0.4
LEAST = (ROLLOUT + TRAIN) / (NODES * GPUS)
SPLIT = (ROLLOUT + TRAIN) / (NODES * GPUS / 2)
UNITS = re.compile(r"round \d+: ([0-9.]+) units a round")
# Both halves in files of the shared directory: who waits for whom is the same as in any loop of this kind.
SPLIT_GROUP = """\
name: split
execution: parallel
---
name: rollout
num_nodes: {half}
resources: {{cpus: 1, accelerators: "gpu:{gpus}"}}
run: |
  [ $SKYPILOT_NODE_RANK = 0 ] || exit 0
  begun=$(date +%s.%N)
  for round in $(seq 0 {last}); do
    sleep {rollout_s}; touch $DIR/samples-$round
    until [ -e $DIR/weights-$round ]; do sleep 0.02; done
    echo "round $round: $(echo "($(date +%s.%N) - $begun) / {unit_s} / ($round + 1)" | bc -l) units a round"
  done
envs: {{DIR: {directory}}}
---
name: train
num_nodes: {half}
resources: {{cpus: 1, accelerators: "gpu:{gpus}"}}
run: |
  [ $SKYPILOT_NODE_RANK = 0 ] || exit 0
  for round in $(seq 0 {last}); do
    until [ -e $DIR/samples-$round ]; do sleep 0.02; done
    sleep {train_s}; touch $DIR/weights-$round
  done
envs: {{DIR: {directory}}}
"""


def run(session: Session) -> None:
    reason = preflight.missing()
    if reason:
        session.report.skip("elastic", reason)
        return
    with _booted(session) as cluster:
        split = _measure(session, cluster, _split_file(session), "split")
        turns = _measure(session, cluster, _elastic_file(session), "rlhf-elastic")
    report = session.report
    report.kept[Measured.NAME] = _kept(split, turns).to_json()
    report.heading("elastic: %d GPUs, %d rounds of %d + %d GPU-units" % (NODES * GPUS, ROUNDS, ROLLOUT, TRAIN))
    for name, units, best in (("split 8 + 8", split, SPLIT), ("taking turns on all 16", turns, LEAST)):
        report.row(name, units, "units", ("its floor of %g" % best, best), limit=Limit(best * 1.25))
        report.row(name + ", used", 100 * LEAST / units, "%")
    report.row("turns over split", split / turns, "x", limit=Limit(1.6, at_least=True))


def turns_units(session: Session) -> float:
    """Units a round of phases that take turns, on a cluster of their own."""
    with _booted(session) as cluster:
        return _measure(session, cluster, _elastic_file(session), "rlhf-elastic")


def _booted(session: Session) -> Cluster:
    return Cluster.boot(Path(session.place.directory) / "elastic", nodes=NODES, gpus=GPUS, cpus=8)


def _kept(split: float, turns: float) -> Measured:
    return Measured(
        when=time.strftime("%Y-%m-%d"), where=f"Slurm on one machine with {os.cpu_count()} CPUs, fake GPUs",
        pool=NODES * GPUS, phases={"rollout": ROLLOUT, "train": TRAIN}, iterations=ROUNDS, unit_s=UNIT_S,
        split_units=round(split, 2), turns_units=round(turns, 2),
    )  # fmt: skip


def _split_file(session: Session) -> str:
    half = NODES // 2
    text = SPLIT_GROUP.format(
        half=half, gpus=GPUS, last=ROUNDS - 1, unit_s=UNIT_S, directory=json.dumps(session.place.new("split")),
        rollout_s=ROLLOUT * UNIT_S / (half * GPUS), train_s=TRAIN * UNIT_S / (half * GPUS),
    )  # fmt: skip
    return _written(session, "split.yaml", text)


def _elastic_file(session: Session) -> str:
    path = Path(__file__).resolve().parent.parent / "examples" / "rlhf_elastic.yaml"
    return _written(session, "elastic.yaml", path.read_text().replace("python3 -", sys.executable + " -"))


def _written(session: Session, name: str, text: str) -> str:
    path = os.path.join(session.place.new("file"), name)
    Path(path).write_text(text)
    return path


def _measure(session: Session, cluster: Cluster, path: str, name: str) -> float:
    """Units a round, over all rounds, as the loop itself measured them."""
    environ = {"HOME": session.place.home, "PATH": os.environ["PATH"]}
    checkout = str(Path(__file__).resolve().parent.parent)
    values = {"ROUNDS": ROUNDS, "UNIT_S": UNIT_S, "PYTHONPATH": checkout}
    flags = [word for key, value in values.items() for word in ("--env", f"{key}={value}")]
    argv = [sys.executable, "-m", "gangrun", "launch", path, "--host", "local", *flags]
    done = cluster.run("ctl", argv, cwd=checkout, env=environ, timeout_s=300, check=False)
    found = UNITS.findall(done.stdout)
    if done.returncode or len(found) != ROUNDS:
        raise RuntimeError(f"{name} ended with code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    return float(found[-1])
