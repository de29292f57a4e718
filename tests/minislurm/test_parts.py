"""The test bed's own parts, without any cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.minislurm import config, leftovers, preflight
from tests.minislurm.__main__ import main
from tests.minislurm.cgroups import NO_CGROUPS
from tests.minislurm.errors import BadInput
from tests.minislurm.jobs import parse_job, parse_job_id, parse_nodes
from tests.minislurm.layout import Layout
from tests.minislurm.options import Options
from tests.minislurm.proc import Pid, kill_all
from tests.minislurm.rootfs import DEFAULT_MIRROR, find_mirror

LAYOUT = Layout(Path("/tmp/bed"))
JOB = """\
JobId=5 JobName=x JobState=RUNNING ExitCode=1:1
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=7:0
   ReqNodeList=n9 ExcNodeList=(null)
   NodeList=n[1-2]
"""


class TestOptions:
    def test_they_survive_the_record(self) -> None:
        options = Options(node_names=("a", "b"), constrain=["ram"], gres_type="a100")
        again = Options.from_json(options.to_json())
        assert (again.names, again.addresses, tuple(again.constrain)) == (("a", "b"), options.addresses, ("ram",))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"nodes": 0},
            {"nodes": 201},
            {"node_names": ("a", "a")},
            {"node_names": ("ctl",)},
            {"node_names": ("laptop",)},
        ],
    )
    def test_impossible_clusters_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(BadInput):
            Options(**wrong)  # type: ignore[arg-type]

    def test_two_hundred_nodes_have_addresses_of_their_own(self) -> None:
        addresses = Options(nodes=200).addresses
        assert len(set(addresses.values())) == 201 and addresses["n200"] == "10.77.0.210"


class TestConfiguration:
    def test_gpus_have_types_and_files(self) -> None:
        options = Options(nodes=2, gpus=1, gres_type="a100")
        assert "Gres=gpu:a100:1 " in config.slurm_conf(options, LAYOUT, "cgroup")
        assert config.gres_conf(options, LAYOUT) == "NodeName=n1,n2 Name=gpu Type=a100 File=/tmp/bed/gpu0\n"
        assert config.gres_conf(Options(gpus=0), LAYOUT) == ""

    def test_accounting_is_off_unless_asked_for(self) -> None:
        assert "AccountingStorage" not in config.slurm_conf(Options(), LAYOUT, "cgroup")
        text = config.slurm_conf(Options(accounting=True), LAYOUT, "cgroup")
        assert "\nAccountingStorageTRES=gres/gpu\n" in text and "Enforce" not in text
        assert "StoragePort=3306\n" in config.slurmdbd_conf(LAYOUT)

    def test_extra_lines_come_last_so_that_they_win(self) -> None:
        text = config.slurm_conf(Options(extra_conf="KillWait=9"), LAYOUT, "pgid")
        assert text.rstrip().endswith("\nKillWait=9") and "\nKillWait=2\n" in text

    @pytest.mark.parametrize("path", ["/tmp/a b", "/tmp/a'b", "/tmp/" + 90 * "x"])
    def test_a_root_slurm_could_not_use_is_refused(self, path: str) -> None:
        with pytest.raises(BadInput, match="choose"):
            Layout(Path(path)).make_root()
        assert not os.path.exists(path)


class TestSlurmsWords:
    def test_a_job_is_read_past_its_misleading_name(self) -> None:
        job = parse_job(JOB)
        assert job and job.ended
        assert job == (5, "FAILED", 7, 0, "NonZeroExitCode", 2, "n[1-2]")

    def test_no_job(self) -> None:
        assert parse_job("slurm_load_jobs error: Invalid job id specified") is None

    def test_job_ids_and_nodes(self) -> None:
        assert parse_job_id("some plugin's chatter\n12;ms\n") == 12
        assert parse_nodes("n1 idle\nn1 idle\nn2 down*\n\n") == {"n1": "idle", "n2": "down*"}


class TestProcesses:
    def test_a_recycled_pid_is_never_killed(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "1000"]) as stranger:
            layout = Layout(tmp_path / "bed")
            layout.make_root()
            layout.make()
            layout.record.write_text('{"cgroups": {"version": 0, "hierarchies": {}, "prefix": ""}}')
            layout.init("n1").write_text(f"{stranger.pid} 1\n")
            leftovers.clean(layout)
            assert stranger.poll() is None and not layout.root.exists()
            stranger.kill()

    def test_a_zombie_is_dead(self) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        pid = Pid.of(child.pid)
        assert pid and pid.alive()
        assert kill_all([pid]) == [] and not pid.alive()
        child.wait()

    def test_folders_that_are_no_clusters_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(BadInput, match=r"thesis\.tex"):
            leftovers.clean(Layout(tmp_path))
        assert (tmp_path / "thesis.tex").exists()


class TestBadInput:
    @pytest.mark.parametrize(
        "words", ["", "fly", "up -n x", "up -n 0", "up --constrain x", "status", "down", "shell n1", "up --rootfs /nix"]
    )
    def test_one_clear_line_and_code_2(self, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = words.split()
        if argv[:1] in (["status"], ["down"], ["shell"]):
            argv[1:1] = ["--root", str(tmp_path)]
        try:
            code: object = main(argv)
        except SystemExit as end:
            code = end.code
        assert code == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("minislurm: ")

    def test_without_root_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "needs root" in (preflight.missing() or "")

    def test_missing_packages_are_named_with_the_command(self, tmp_path: Path) -> None:
        if os.geteuid():
            pytest.skip("needs root")
        wanted = "apt-get install slurmctld slurmd slurm-client munge iproute2"
        assert wanted in (preflight.missing(str(tmp_path)) or "")


def test_the_mirror_is_the_first_archive_of_apts_sources() -> None:
    assert find_mirror("Types: deb\nURIs: http://m.example/debian\nSuites: x\n") == "http://m.example/debian"
    one_line = "# deb http://no.example\ndeb http://security.example/debian-security x main\n"
    assert find_mirror(one_line + "deb [signed-by=/k] http://m.example/d x main") == "http://m.example/d"
    assert find_mirror("") == DEFAULT_MIRROR


def test_without_cgroups_slurm_still_loads_a_plugin() -> None:
    assert NO_CGROUPS.plugin == "cgroup/v1"
