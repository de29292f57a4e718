"""What keeps a cluster usable from a laptop: check, gc, render."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.bench import eventually
from tests.client_bench import Laptop
from tests.minislurm import Cluster, preflight
from tests.minislurm.fixtures import BootCluster

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]


@pytest.fixture
def laptop(cluster: Cluster) -> Iterator[Laptop]:
    laptop = Laptop(cluster)
    yield laptop
    laptop.close()


def test_check_says_what_is_there_and_what_its_lack_costs(laptop: Laptop) -> None:
    findings = {one["what"]: one for one in laptop.json("check", "--host", laptop.host, "--deep")}
    assert findings["Slurm"]["is_fine"] and "slurm" in findings["Slurm"]["words"].lower()
    assert "main" in findings["partitions"]["words"] and findings["GPUs"]["is_fine"]
    assert not findings["accounting"]["is_fine"] and "told late" in findings["accounting"]["words"]
    assert findings["process tracking"]["words"] == "proctrack/cgroup"
    assert findings["shared home"]["is_fine"], findings["shared home"]


def test_check_of_a_host_that_is_not_there_is_one_line(laptop: Laptop) -> None:
    done = laptop.gangrun("check", "--host", "nowhere")
    assert done.returncode == 125 and done.stdout.startswith("MISSING connection: nowhere: ")
    assert "Traceback" not in done.stdout + done.stderr


def test_gc_removes_what_is_over_and_leaves_what_runs(own_cluster: BootCluster) -> None:
    laptop = Laptop(own_cluster(nodes=2, gpus=0))
    try:
        over, runs = laptop.launch("true"), laptop.launch("sleep 4801")
        assert laptop.gangrun("wait", over.run).returncode == 0
        old = ("gc", "--host", laptop.host, "--older-than", "1s")
        listed = eventually(lambda: laptop.json(*old), what="the run is a second old")
        assert [(one["kind"], one["name"]) for one in listed] == [("runs", over.run)]
        kept = laptop.gangrun(*old)
        assert "nothing was removed" in kept.stderr and over.run in kept.stdout and over.directory.exists()
        assert "removed 1" in laptop.gangrun(*old, "--yes").stderr
        assert not over.directory.exists() and not over.status_path.parent.exists() and runs.directory.exists()
        assert "nothing" in laptop.gangrun(*old, "--yes").stderr
    finally:
        laptop.close()


def test_render_writes_what_can_be_submitted_by_hand(laptop: Laptop) -> None:
    task = laptop.home / "by-hand.yaml"
    task.write_text("name: by-hand\nnum_nodes: 2\nresources: {cpus: 2}\nrun: echo rank $SKYPILOT_NODE_RANK\n")
    shown = laptop.gangrun("render", str(task))
    assert shown.returncode == 0 and "#SBATCH --nodes=2" in shown.stdout and "exec python3" in shown.stdout
    folder = laptop.home / "written"
    assert laptop.gangrun("render", str(task), "-o", str(folder)).returncode == 0
    job = int(laptop.cluster.run("ctl", ["sbatch", "--parsable", str(folder / "job.sbatch")], cwd="/").stdout)
    assert laptop.cluster.wait_job(job).state == "COMPLETED"
    logs = sorted((folder / "logs").iterdir())
    assert [log.read_text() for log in logs] == ["rank 0\n", "rank 1\n"]
    assert json.loads((folder / "meta.json").read_text())["name"] == "by-hand"
