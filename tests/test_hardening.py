"""Surroundings that are not as one would like: old Pythons, slow readers, failing disks, ignored signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import CHECKOUT, eventually, run_local
from tests.solo import Solo
from tests.test_local_launcher import start, write_driver

# A Python built against an old glibc, as conda's is, has neither of these.
OLD_GLIBC = """
import os, sys
del os.memfd_create
real = os.posix_spawnp
def posix_spawnp(*args, **kwargs):
    raise NotImplementedError("setsid")
os.posix_spawnp = posix_spawnp
from executor import slurm
slurm.run_as_program()
"""


def test_a_python_without_memfd_and_posix_spawn_setsid_runs_scripts_all_the_same(solo: Solo) -> None:
    argv = solo.argv("echo hello; ps -o sid= -p $$; read line || exit 7")
    done = run_local([sys.executable, "-c", OLD_GLIBC, *argv[3:]], env=solo.environ(), cwd=solo.directory)
    assert done.returncode == 7, done.stderr
    assert b"hello" in solo.log() and b"[gangrun" not in solo.log()


def test_a_failing_rank_keeps_the_end_of_its_log_though_nobody_reads_its_stream(solo: Solo) -> None:
    process = solo.start("head -c 1200000 /dev/zero | tr '\\0' x; echo; echo the true reason >&2; exit 7")
    time.sleep(1.0)
    assert process.wait(timeout=20) == 7
    log = solo.log()
    assert log.endswith(b"the true reason\n") and len(log) > 1_200_000


def test_a_shared_file_system_that_fails_for_long_does_not_end_a_running_script(tmp_path: Path) -> None:
    code = "from executor import protocol; protocol.FILE_SYSTEM_PATIENCE_S = 0.2\n"
    code += "import executor.gang as gang; gang.Patience.__init__.__defaults__ = (0.2,)\n"
    code += "from executor import slurm; slurm.run_as_program()"
    gang = Solo(tmp_path, num_ranks=2)
    argv = gang.argv("echo up > up; sleep 3; exit 0")
    environ = gang.environ(0)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv[3:]], env=environ, cwd=tmp_path, stderr=subprocess.PIPE
    )
    eventually((tmp_path / "up").exists)
    signal_file = next((tmp_path / ".gangrun").rglob("gang"))
    signal_file.unlink()
    signal_file.mkdir()  # open(2) gives EISDIR from now on
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors.count(b"the shared file system fails") == 1


@pytest.mark.parametrize("trouble", ["missing bash", "too much environment"])
def test_a_rank_that_cannot_start_its_script_ends_its_peers(tmp_path: Path, trouble: str) -> None:
    gang = Solo(tmp_path, num_ranks=2)
    peer = gang.start("sleep 60", rank=0)
    eventually(lambda: list((tmp_path / ".gangrun").rglob("ranks/0")))
    variables = {f"FILL{number}": "x" * 120_000 for number in range(60)}
    (tmp_path / "variables").write_text(json.dumps(variables if trouble == "too much environment" else {}))
    environ = {"PATH": "/nonexistent"} if trouble == "missing bash" else {}
    done = gang.run("true", f"--env-file={tmp_path}/variables", rank=1, env=environ)
    code, errors = done.returncode, done.stderr
    assert code == 125 and errors.count(b"\n") == 1 and b"cannot start bash" in errors
    peer.communicate(timeout=20)
    assert peer.returncode == 143


def test_nohup_means_that_hup_is_not_for_us(solo: Solo) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = solo.start("trap 'exit 9' HUP; touch up; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; exit 0")
    finally:
        signal.signal(signal.SIGHUP, previous)
    eventually((solo.directory / "up").exists)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_an_inherited_ignored_sigchld_does_not_hang_us(solo: Solo) -> None:
    previous = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = solo.start("exit 4")
    finally:
        signal.signal(signal.SIGCHLD, previous)
    process.communicate(timeout=20)
    assert process.returncode == 4


def test_a_driver_whose_output_nobody_reads_runs_its_job(tmp_path: Path) -> None:
    driver = write_driver(tmp_path, run="for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done; touch end; exit 0")
    command = f"HOME={tmp_path} {sys.executable} {driver} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    done = run_local(["bash", "-c", command], cwd=tmp_path)
    assert done.stdout == "0\n", done
    assert (tmp_path / "end").exists()


def test_records_that_cannot_be_written_are_told_once_and_change_nothing(tmp_path: Path) -> None:
    driver = write_driver(tmp_path, run="touch end; exit 3")
    job_directory = tmp_path / ".gangrun" / "local" / "job"
    job_directory.mkdir(parents=True)
    (job_directory / "events.jsonl").symlink_to("/dev/full")
    process = start(tmp_path, driver)
    assert process.wait(30) == 3 and (tmp_path / "end").exists()
    assert (tmp_path / "output").read_text().count("cannot write in") == 1


def test_a_gang_of_the_local_launcher_reads_no_terminal_and_survives_a_closed_stdout(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("run: 'for i in 1 2 3 4; do echo $i; sleep 0.1; done; touch end'\n")
    command = f"{sys.executable} -m gangrun run --local task.yaml 2>&1 | head -2"
    environ = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    done = run_local(["bash", "-c", command], cwd=tmp_path, env=environ)
    assert "Traceback" not in done.stdout + done.stderr
    eventually((tmp_path / "end").exists)
