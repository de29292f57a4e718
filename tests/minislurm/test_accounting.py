"""What the test bed promises about accounting: a real slurmdbd and its database, which can be out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.minislurm import BedError, Cluster, preflight
from tests.minislurm.accounting import ACCOUNT
from tests.minislurm.fixtures import Session
from tests.minislurm.test_sessions import prefix_of, remains
from tests.test_minislurm import until

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_accounting() is not None, reason=str(preflight.missing_accounting())),
]


@pytest.fixture(scope="module")
def booted(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    session = Session.of(pytestconfig)
    if session.rootfs and (why := preflight.missing_accounting(session.rootfs)):
        pytest.skip(why)
    enforce = "AccountingStorageEnforce=associations"
    with Cluster.boot(session.own_root(), nodes=2, accounting=True, rootfs=session.rootfs, extra_conf=enforce) as one:
        yield one


@pytest.fixture
def cluster(booted: Cluster) -> Cluster:
    """With accounting; the tests here share it."""
    return booted


def sacct(cluster: Cluster, job_id: int, **how: Any) -> list[str]:
    """State and exit code of the job and its steps."""
    argv = ["sacct", "-nP", "-j", str(job_id), "-o", "JobID,State,ExitCode"]
    return cluster.run("ctl", argv, cwd="/", **how).stdout.split()


def run_job(cluster: Cluster, folder: Path, script: str, *options: str) -> int:
    job_id = cluster.sbatch(f"#!/bin/sh\n{script}\n", "-N1", *options, cwd=folder)
    cluster.wait_job(job_id)
    return job_id


class TestRecords:
    def test_sacct_tells_how_a_job_and_its_steps_ended(self, cluster: Cluster, tmp_path: Path) -> None:
        job_id = run_job(cluster, tmp_path, "srun sh -c 'exit 3'; exit 7")
        ends = [f"{job_id}|FAILED|7:0", f"{job_id}.batch|FAILED|7:0", f"{job_id}.0|FAILED|3:0"]
        until(lambda: sacct(cluster, job_id) == ends)

    def test_the_cluster_the_account_and_its_users_are_registered(self, cluster: Cluster) -> None:
        argv = ["sacctmgr", "-nP", "list", "assoc", "format=cluster,account,user"]
        rows = cluster.run("ctl", argv, cwd="/").stdout.split()
        users = ["root", *(cluster.login().user(alias) for alias in cluster.login().aliases)]
        assert {f"ms|{ACCOUNT}|{user}" for user in users} <= set(rows)

    def test_limits_are_enforced_where_the_configuration_says_so(self, cluster: Cluster, tmp_path: Path) -> None:
        assert cluster.wait_job(run_job(cluster, tmp_path, "true", "-A", ACCOUNT)).state == "COMPLETED"
        with pytest.raises(BedError, match="Invalid account"):
            run_job(cluster, tmp_path, "true", "-A", "nobodys")

    def test_a_user_who_comes_over_ssh_has_records(self, cluster: Cluster, tmp_path: Path) -> None:
        login = cluster.login()
        text = "id=$(sbatch --parsable -W --wrap true); sacct -nP -X -j $id -o User,Account,State"
        argv = ["ssh", "head", text]
        said = cluster.run("laptop", argv, env=login.environ(tmp_path), cwd="/").stdout.split()
        assert said[-1].startswith(f"{login.user('head')}|{ACCOUNT}|")


class TestOutage:
    def test_without_slurmdbd_sacct_fails_until_it_is_back(self, cluster: Cluster, tmp_path: Path) -> None:
        job_id = run_job(cluster, tmp_path, "exit 3")
        until(lambda: f"{job_id}|FAILED|3:0" in sacct(cluster, job_id))
        cluster.stop_database()
        with pytest.raises(BedError, match="sacct"):
            sacct(cluster, job_id)
        cluster.start_database()
        assert f"{job_id}|FAILED|3:0" in sacct(cluster, job_id)

    @pytest.mark.slow
    def test_what_happens_meanwhile_is_recorded_later(self, cluster: Cluster, tmp_path: Path) -> None:
        cluster.stop_database()
        job_id = run_job(cluster, tmp_path, "exit 4")
        cluster.start_database()
        until(lambda: f"{job_id}|FAILED|4:0" in sacct(cluster, job_id), 30)

    def test_the_records_survive_a_power_cut(self, cluster: Cluster, tmp_path: Path) -> None:
        job_id = run_job(cluster, tmp_path, "exit 5")
        until(lambda: f"{job_id}|FAILED|5:0" in sacct(cluster, job_id))
        cluster.power_off("ctl")
        cluster.power_on("ctl")
        assert f"{job_id}|FAILED|5:0" in sacct(cluster, job_id)
        cluster.wait_idle()


class TestLife:
    def test_its_daemons_are_nobodys_program(self, cluster: Cluster) -> None:
        until(lambda: cluster.processes("ctl") == [])

    def test_down_leaves_nothing(self, pytestconfig: pytest.Config, tmp_path: Path) -> None:
        root = Session.of(pytestconfig).own_root()
        with Cluster.boot(root, nodes=1, accounting=True) as cluster:
            prefix = prefix_of(root)
            run_job(cluster, tmp_path, "true")
        assert remains(root, prefix) == []
        assert not Path("/run/mysqld/mysqld.sock").exists()
