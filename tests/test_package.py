"""The distribution: what pip installs is all that is needed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.bench import CHECKOUT, run_local


@pytest.mark.slow
def test_an_installed_wheel_renders_and_runs_a_driver_from_anywhere(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, CHECKOUT], check=True)
    wheel = next(tmp_path.glob("gangrun-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "codegen",
        "driver_templates",
        "executor",
        "gangrun",
    }
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    job = "job_id: '1'\nnum_nodes: 2\nlog_dir: logs\nrun: echo hello\nlauncher: local\nslurm_job_id: local\n"
    (tmp_path / "job.yaml").write_text(job + "cluster_ips: [127.0.0.1, 127.0.0.2]\n")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    rendered = run_local([sys.executable, "-m", "codegen", "job.yaml", "-o", "launch"], cwd=tmp_path, env=environ)
    assert rendered.returncode == 0, rendered.stderr
    done = run_local([sys.executable, rendered.stdout.strip()], cwd=tmp_path, env={**environ, "PYTHONPATH": ""})
    assert done.returncode == 0 and done.stdout.count("hello") == 2, done
