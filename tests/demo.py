"""`make demo`: a gang of three nodes on a real Slurm on this machine; without root on the embedded local launcher."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster

TASK = "examples/setup_and_run.yaml"
CHECKOUT = Path(__file__).resolve().parent.parent


def main() -> int:
    reason = preflight.missing()
    if reason:
        print(f"demo: no real Slurm here ({reason}); the embedded local launcher stands in for it\n", flush=True)
        return subprocess.call([sys.executable, "-m", "gangrun", "run", "--local", TASK], cwd=CHECKOUT)

    with tempfile.TemporaryDirectory(prefix="gangrun-demo-", dir="/tmp") as folder:
        begun = time.monotonic()
        with Cluster.boot(Path(folder) / "slurm", nodes=3, name="demo") as cluster:
            print(f"demo: Slurm {cluster.slurm_version} with 3 nodes is up after {time.monotonic() - begun:.1f} s")
            return _run(cluster, Path(folder))


def _run(cluster: Cluster, folder: Path) -> int:
    output = folder / "job.out"
    output.touch()
    print(f"demo: sbatch --nodes=3 gangrun run {TASK}\n", flush=True)
    env = {**os.environ, "HOME": str(folder)}
    script = f"#!/bin/bash\nexec {sys.executable} -m gangrun run {TASK}\n"
    job = cluster.sbatch(script, "--nodes=3", "--ntasks-per-node=1", f"--output={output}", cwd=CHECKOUT, env=env)
    follower = subprocess.Popen(["tail", "-n", "+1", "-F", "-s", "0.1", str(output)], stderr=subprocess.DEVNULL)
    try:
        end = cluster.wait_job(job, timeout_s=120)
        time.sleep(0.5)
    finally:
        follower.terminate()
        follower.wait()
    print(f"\ndemo: Slurm says job {job} is {end.state}, exit code {end.exit_code}")
    return 0 if end.state == "COMPLETED" else 1


if __name__ == "__main__":
    sys.exit(main())
