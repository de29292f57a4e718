"""What the test bed promises: a real Slurm whose nodes behave like machines of their own."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Callable, TypeVar

import pytest

from tests.minislurm import BedError, Cluster, Unsupported
from tests.minislurm.fixtures import BootCluster

T = TypeVar("T")
LEAVES_A_CHILD = "setsid sleep 1000 >/dev/null 2>&1 & sleep 0.2"


def until(truth: Callable[[], T], timeout_s: float = 10) -> T:
    """The first true value; fails after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not (value := truth()):
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.02)
    return value


def or_skip(mount: Callable[[], T]) -> T:
    try:
        return mount()
    except Unsupported as why:
        pytest.skip(str(why))


def reaches_controller(cluster: Cluster, node: str) -> bool:
    address = f"/dev/tcp/{cluster.addresses['ctl']}/6817"
    return cluster.run(node, ["timeout", "0.5", "bash", "-c", f"< {address}"], check=False).returncode == 0


class TestNodes:
    def test_every_node_of_eight_runs_a_task_under_its_own_name(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=8)
        names = cluster.run("ctl", ["srun", "-N8", "hostname"]).stdout.split()
        assert sorted(names) == cluster.nodes == [f"n{i}" for i in range(1, 9)]

    @pytest.mark.slow
    def test_sixty_four_nodes_are_no_problem(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=64)
        assert len(set(cluster.run("ctl", ["srun", "-N64", "hostname"]).stdout.split())) == 64

    def test_a_node_finds_itself_and_its_peers_at_their_addresses(self, cluster: Cluster) -> None:
        program = "import socket as s; print(s.gethostbyname(s.gethostname()), s.gethostbyname('n3'))"
        said = cluster.run("n2", ["python3", "-c", program]).stdout.split()
        assert said == [cluster.addresses["n2"], cluster.addresses["n3"]]

    def test_a_node_sees_only_its_own_processes_network_and_shared_memory(self, cluster: Cluster) -> None:
        cluster.run("n1", ["touch", "/dev/shm/only-n1"])
        assert "only-n1" not in cluster.run("n2", ["ls", "/dev/shm"]).stdout
        assert cluster.run("n1", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        cmdlines = cluster.run("n1", ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout
        assert "slurmd" in cmdlines and "slurmctld" not in cmdlines

    def test_private_folders_and_chosen_names(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(node_names=("gpu-a", "gpu-b"), private_dirs=[str(tmp_path)], gpus=0)
        cluster.run("ctl", ["srun", "-N2", "-D/", "sh", "-c", f"hostname > {tmp_path}/me"])
        for node in ("gpu-a", "gpu-b"):
            assert cluster.run(node, ["cat", f"{tmp_path}/me"], cwd="/").stdout.strip() == node
        assert not (tmp_path / "me").exists()

    def test_orphans_are_reaped(self, cluster: Cluster) -> None:
        cluster.run("n1", ["sh", "-c", "setsid sh -c 'sleep 0.05 & true' &"])
        time.sleep(0.2)
        states = cluster.run("n1", ["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null; true"]).stdout
        assert ") Z 1 " not in states

    def test_two_clusters_on_one_subnet_do_not_meet(self, cluster: Cluster, own_cluster: BootCluster) -> None:
        other = own_cluster(nodes=1, name="other", subnet=cluster.options.subnet)
        assert other.run("ctl", ["srun", "-N1", "hostname"]).stdout == "n1\n"
        assert "other" not in cluster.run("ctl", ["scontrol", "show", "config"]).stdout


class TestPrograms:
    def test_folder_environment_and_output_are_ours(self, cluster: Cluster, tmp_path: Path) -> None:
        argv = ["sh", "-c", 'pwd; echo "$X"; cat; echo err >&2; exit 3']
        done = cluster.run("n1", argv, cwd=tmp_path, env={"X": "a b\nc"}, input="in", check=False)
        assert (done.stdout, done.stderr, done.returncode) == (f"{tmp_path}\na b\nc\nin", "err\n", 3)

    def test_a_failure_and_a_time_out_show_the_output(self, cluster: Cluster) -> None:
        with pytest.raises(BedError, match=r"exit code 3\nlost"):
            cluster.run("n1", ["sh", "-c", "echo lost; exit 3"])
        with pytest.raises(BedError, match=r"no end after 0.3 s\nwaiting"):
            cluster.run("n1", ["sh", "-c", "echo waiting; exec sleep 1000"], timeout_s=0.3)
        until(lambda: not any("sleep 1000" in p.cmdline for p in cluster.processes("n1")))

    def test_a_signal_reaches_the_program_itself(self, cluster: Cluster) -> None:
        program = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"
        with cluster.popen("n1", ["sh", "-c", program], stdout=-1) as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            process.terminate()
            assert process.wait(5) == 5

    def test_another_user_runs_programs_and_steps(self, cluster: Cluster) -> None:
        for argv in (["id", "-un"], ["srun", "id", "-un"]):
            assert cluster.run("ctl", argv, user="nobody", cwd="/").stdout == "nobody\n"


class TestJobs:
    def test_the_end_of_a_job_is_told_whatever_its_name(self, cluster: Cluster, tmp_path: Path) -> None:
        job_id = cluster.sbatch(
            "#!/bin/sh\npwd\nexit 7\n", "-N1", "-J", "x JobState=RUNNING ExitCode=0:0", cwd=tmp_path
        )
        end = cluster.wait_job(job_id)
        assert (end.state, end.exit_code, end.signal, end.reason) == ("FAILED", 7, 0, "NonZeroExitCode")
        assert (tmp_path / f"slurm-{job_id}.out").read_text() == f"{tmp_path}\n"

    def test_steps_of_a_running_job_are_listed(self, cluster: Cluster, tmp_path: Path) -> None:
        job_id = cluster.sbatch("#!/bin/sh\nsrun sleep 1000\n", "-N1", cwd=tmp_path)
        until(lambda: f"{job_id}.0" in cluster.step_ids(job_id))
        assert cluster.job_state(job_id) == "RUNNING"
        cluster.run("ctl", ["scancel", str(job_id)])
        assert cluster.wait_job(job_id).state == "CANCELLED"

    def test_gpus_are_devices_and_numbered_for_the_job(self, cluster: Cluster) -> None:
        assert stat.S_ISCHR(os.stat(cluster.root / "gpu1").st_mode)
        said = cluster.run("ctl", ["srun", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"]).stdout
        assert said == "0,1\n"

    def test_devices_and_memory_can_be_confined(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1, constrain=["devices", "ram"], gres_type="a100", gpus=2, mem_mb=1000)
        if cluster.notes:
            pytest.skip("; ".join(cluster.notes))
        tries = f"for i in 0 1; do cat {cluster.root}/gpu$i; done 2>&1 | sed 's/.*: //'"
        said = cluster.run("ctl", ["srun", "--gres=gpu:a100:1", "--mem=50", "sh", "-c", tries]).stdout
        assert said.splitlines() == ["No such device or address", "Operation not permitted"]
        eat = cluster.run("ctl", ["srun", "--mem=50", "python3", "-c", "'x' * 10**8"], check=False)
        assert eat.returncode != 0


class TestProctrack:
    def test_cgroup_kills_what_a_task_left_behind(self, cluster: Cluster) -> None:
        if cluster.notes:
            pytest.skip("; ".join(cluster.notes))
        cluster.run("ctl", ["srun", "-wn1", "sh", "-c", LEAVES_A_CHILD])
        until(lambda: cluster.processes("n1") == [])

    def test_pgid_does_not(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1, proctrack="pgid")
        cluster.run("ctl", ["srun", "sh", "-c", LEAVES_A_CHILD])
        cluster.wait_idle()
        assert [p.cmdline for p in cluster.processes("n1")] == ["sleep 1000"]


class TestFaults:
    @pytest.mark.slow
    def test_a_node_without_power_goes_down_and_comes_back(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=2, slurmd_timeout_s=5)
        job_id = cluster.sbatch("#!/bin/sh\nsleep 1000\n", "-wn2", "--no-requeue", cwd=tmp_path)
        cluster.wait_state(job_id, "RUNNING")
        cluster.power_off("n2")
        with pytest.raises(BedError, match="n2 is off"):
            cluster.run("n2", ["true"])
        assert cluster.wait_job(job_id, timeout_s=60).state == "NODE_FAIL"
        assert cluster.node_states()["n2"] == "down*"
        cluster.power_on("n2")
        cluster.wait_idle()
        assert cluster.run("ctl", ["srun", "-wn2", "hostname"]).stdout == "n2\n"

    def test_a_node_that_is_off_for_a_moment_has_the_same_address(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=1)
        assert reaches_controller(cluster, "n1")
        cluster.power_off("n1")
        cluster.power_on("n1")
        assert reaches_controller(cluster, "n1")

    def test_a_cut_link_stops_traffic_but_not_programs(self, own_cluster: BootCluster) -> None:
        cluster = own_cluster(nodes=2)
        with cluster.popen("n2", ["sleep", "1000"]) as survivor:
            cluster.cut_link("n2")
            assert not reaches_controller(cluster, "n2") and reaches_controller(cluster, "n1")
            cluster.mend_link("n2")
            until(lambda: reaches_controller(cluster, "n2"))
            assert survivor.poll() is None
            survivor.kill()

    def test_a_job_outlives_its_controller(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=1)
        job_id = cluster.sbatch("#!/bin/sh\nwhile ! test -e go; do sleep 0.05; done\n", cwd=tmp_path)
        cluster.wait_state(job_id, "RUNNING")
        cluster.stop_controller()
        assert cluster.node_states() == {}
        cluster.start_controller()
        assert until(lambda: cluster.job_state(job_id)) == "RUNNING"
        (tmp_path / "go").touch()
        assert cluster.wait_job(job_id).state == "COMPLETED"

    def test_a_step_outlives_its_slurmd(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=1)
        job_id = cluster.sbatch("#!/bin/sh\nwhile ! test -e go; do sleep 0.05; done\n", cwd=tmp_path)
        cluster.wait_state(job_id, "RUNNING")
        until(lambda: cluster.processes("n1"))
        cluster.stop_slurmd("n1", signum=9)
        assert cluster.processes("n1")
        cluster.start_slurmd("n1")
        (tmp_path / "go").touch()
        assert cluster.wait_job(job_id).state == "COMPLETED"


class TestFileSystems:
    def test_over_the_nfs_like_mount_a_new_file_is_seen_late(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=2)
        or_skip(lambda: cluster.mount_nfs_like("n1", tmp_path, tmp_path, cache_s=2))
        look = ["test", "-e", str(tmp_path / "news")]
        assert cluster.run("n1", look, check=False, cwd="/").returncode
        (tmp_path / "news").write_text("hello")
        assert cluster.run("n1", look, check=False, cwd="/").returncode, "the negative answer is cached"
        assert not cluster.run("n2", look, check=False, cwd="/").returncode, "a node without the mount sees it"
        until(lambda: not cluster.run("n1", look, check=False, cwd="/").returncode)
        (tmp_path / "news").write_text("hello again")
        said = cluster.run("n1", ["cat", str(tmp_path / "news")], cwd="/").stdout
        assert said.startswith("hello"), "opening a file asks the server"
        assert cluster.processes("n1") == []

    def test_a_hung_server_makes_readers_wait(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=1)
        mount = or_skip(lambda: cluster.mount_nfs_like("n1", tmp_path, tmp_path, cache_s=0))
        mount.hang()
        with cluster.popen("n1", ["ls", str(tmp_path)], cwd="/") as reader:
            time.sleep(0.3)
            assert reader.poll() is None
            mount.resume()
            assert reader.wait(5) == 0
        mount.unmount()

    def test_the_faulty_mount_fails_what_it_is_told_to(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=1)
        mount = or_skip(lambda: cluster.mount_faulty("n1", tmp_path, tmp_path))
        write = ["bash", "-c", f"echo x >> {tmp_path}/a.log"]
        cluster.run("n1", write, cwd="/")
        mount.fail("write", r"\.log$", "ENOSPC")
        failed = cluster.run("n1", write, cwd="/", check=False)
        assert failed.returncode and "No space left" in failed.stderr
        cluster.run("n1", ["sh", "-c", f"echo x > {tmp_path}/b.txt"], cwd="/")
        mount.clear()
        cluster.run("n1", write, cwd="/")
        assert (tmp_path / "a.log").read_text() == "x\nx\n"
        assert cluster.processes("n1") == []

    def test_the_faulty_mount_stalls_until_cleared(self, own_cluster: BootCluster, tmp_path: Path) -> None:
        cluster = own_cluster(nodes=1)
        mount = or_skip(lambda: cluster.mount_faulty("n1", tmp_path, tmp_path))
        mount.stall("create", "slow")
        with cluster.popen("n1", ["touch", str(tmp_path / "slow")], cwd="/") as process:
            time.sleep(0.3)
            assert process.poll() is None
            mount.clear()
            assert process.wait(5) == 0
        mount.delay("getattr", "slow", 0.3)
        began = time.monotonic()
        cluster.run("n1", ["stat", str(tmp_path / "slow")], cwd="/")
        assert time.monotonic() - began >= 0.3
