"""One rank, without Slurm: output, exit codes, signals, waiting. Real processes throughout."""

import functools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from executor.shared import SignalFile
from tests.bench import eventually
from tests.solo import Solo

PIECE = 1000
PROGRAM = """
python3 -u - <<'PY'
import signal, sys, time
def stop(number, frame):
    print("got", number, flush=True); time.sleep(0.3); print("saved", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, frame: print("heard", number, flush=True))
print("ready", flush=True)
while True: time.sleep(0.1)
PY
"""


def peak_kb(pid: int) -> int:
    with open("/proc/%d/status" % pid) as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def log_has(solo: Solo, size: int) -> bool:
    return solo_size(solo) >= size


@pytest.mark.parametrize("code", [0, 1, 7, 126, 127, 128, 130, 137, 143, 192, 200, 255])
def test_the_scripts_exit_code_is_the_executors(solo: Solo, code: int) -> None:
    assert solo.run("exit %d" % code).returncode == code


@pytest.mark.parametrize("name", ["KILL", "SEGV", "TERM"])
def test_a_script_killed_by_a_signal_gives_128_and_its_number(solo: Solo, name: str) -> None:
    assert solo.run(f"kill -{name} $$").returncode == 128 + signal.Signals["SIG" + name]


def test_binary_output_arrives_byte_for_byte(solo: Solo) -> None:
    data = bytes(range(256)) * 4000
    (solo.directory / "data").write_bytes(data)
    done = solo.run("cat data")
    assert done.returncode == 0
    assert solo.log() == data
    assert all(
        line.startswith(b"(task, pid=") and len(line) < PIECE
        for line in done.stdout.splitlines(keepends=False)
        if line.strip(b"\r")
    )


def test_a_line_of_200_mb_arrives_whole_in_constant_memory(solo: Solo) -> None:
    process = solo.start("head -c 200000000 /dev/zero | tr '\\0' x; echo; echo end; sleep 0.3", stderr=None)
    assert process.stdout is not None
    longest, total, peak = 0, 0, 0
    for line in process.stdout:
        longest, total = max(longest, len(line)), total + line.count(b"x")
        peak = peak_kb(process.pid) if line.endswith(b"end\n") else peak
    assert process.wait() == 0
    assert longest <= PIECE and total == 200_000_000 and 0 < peak < 40_000
    log = solo.log()
    assert len(log) == 200_000_005 and log.endswith(b"x\nend\n")


@pytest.mark.slow
def test_a_gigabyte_of_lines_takes_no_more_memory_than_a_megabyte(solo: Solo) -> None:
    peaks = []
    for megabytes in (1, 1000):
        script = "yes 0123456789012345678901234567890123456789 | head -c %d; sleep 0.5" % (megabytes * 1_000_000)
        process = solo.start(script, stdout=subprocess.DEVNULL)
        eventually(functools.partial(log_has, solo, megabytes * 1_000_000), 60)
        peaks.append(peak_kb(process.pid))
        assert process.wait() == 0
        (solo.directory / "logs" / "run.log").unlink()
    assert peaks[1] < peaks[0] + 3000


def solo_size(solo: Solo) -> int:
    path = solo.directory / "logs" / "run.log"
    return path.stat().st_size if path.exists() else 0


def test_output_order_of_stdout_and_stderr_is_kept(solo: Solo) -> None:
    done = solo.run("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done")
    assert [line.split(b") ")[1] for line in done.stdout.splitlines()] == solo.log().splitlines()
    assert solo.log().splitlines()[:2] == [b"out 1", b"err 1"]


def test_ten_thousand_lines_and_an_immediate_exit_are_all_there(solo: Solo) -> None:
    done = solo.run("seq 10000; exit 3")
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 10000 == len(solo.log().splitlines())


def test_a_prompt_without_newline_is_shown_while_it_waits(solo: Solo) -> None:
    process = solo.start("printf 'loading... '; sleep 3; echo done")
    assert process.stdout is not None
    begun = time.monotonic()
    assert process.stdout.readline().endswith(b") loading... \n") and time.monotonic() - begun < 2.5
    assert process.stdout.readline().endswith(b") done\n")
    process.wait()
    assert solo.log() == b"loading... done\n"


def test_a_progress_bar_is_thinned_in_the_stream_and_whole_in_the_log(solo: Solo) -> None:
    done = solo.run("for i in $(seq 1 300); do printf '\\r%d/300' $i; done; echo")
    assert solo.log().count(b"\r") == 300
    lines = done.stdout.splitlines()
    assert len(lines) < 20 and lines[-1].endswith(b") 300/300")


@pytest.mark.parametrize("how", ["sleep 60 &", "setsid sleep 60 &"])
def test_a_background_child_that_holds_the_pipe_does_not_keep_the_job(solo: Solo, how: str) -> None:
    begun = time.monotonic()
    done = solo.run(how + " echo $! > child; echo done; exit 4")
    assert done.returncode == 4 and time.monotonic() - begun < 5
    child = int((solo.directory / "child").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_program_once_and_it_may_save(solo: Solo, number: int) -> None:
    process = solo.start(PROGRAM)
    eventually(lambda: b"ready" in (solo.log() if solo_size(solo) else b""))
    process.send_signal(number)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out.count(b"got %d" % number) == 1 and b"saved" in out
    # bash itself dies of TERM, and its program is waited for; of INT it dies only with its program.
    assert process.returncode == (143 if number == signal.SIGTERM else 0)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_other_signals_are_passed_on_and_change_nothing(solo: Solo, number: int) -> None:
    process = solo.start("trap : USR1 USR2 HUP; " + PROGRAM)
    eventually(lambda: b"ready" in (solo.log() if solo_size(solo) else b""))
    process.send_signal(number)
    eventually(lambda: b"heard %d" % number in solo.log())
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=20)


def test_a_program_that_ignores_term_is_killed_after_its_grace(solo: Solo) -> None:
    process = solo.start("trap '' TERM; echo ready; sleep 60 & wait; sleep 60", "--grace-s=0.5")
    eventually(lambda: solo_size(solo))
    begun = time.monotonic()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 137 and 0.4 < time.monotonic() - begun < 5


def test_a_signal_before_the_script_ends_the_wait(solo: Solo) -> None:
    armed = SignalFile(str(solo.directory / "setup_done"))
    armed.arm()
    process = solo.start("touch started", "--setup-done-signal-file=" + armed.path)
    time.sleep(0.5)
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 143 and not (solo.directory / "started").exists()


@pytest.mark.parametrize("fire", ["go", "touch"])
def test_the_script_waits_until_setup_is_done(solo: Solo, fire: str) -> None:
    done = SignalFile(str(solo.directory / "setup_done"))
    if fire == "go":
        done.arm()
    process = solo.start("touch started", "--setup-done-signal-file=" + done.path)
    time.sleep(0.6)
    assert not (solo.directory / "started").exists()
    if fire == "go":
        done.fire("go")
    else:
        Path(done.path).touch()
    process.communicate(timeout=10)
    assert process.returncode == 0 and (solo.directory / "started").exists()


def test_a_setup_that_failed_ends_the_wait_with_its_reason(solo: Solo) -> None:
    done = SignalFile(str(solo.directory / "setup_done"))
    done.fire("abort", "setup failed: rank 1 has no disk")
    result = solo.run("touch started", "--setup-done-signal-file=" + done.path)
    assert result.returncode == 143 and b"rank 1 has no disk" in result.stderr
    assert not (solo.directory / "started").exists()


def test_a_driver_that_fell_silent_ends_the_wait(solo: Solo) -> None:
    launch = solo.directory / "launch"
    (launch / "ranks").mkdir(parents=True)
    (launch / "heartbeat").write_text("1\n")
    flags = (
        f"--launch-dir={launch}",
        "--setup-done-signal-file=%s" % (launch / "setup_done"),
        "--liveness-timeout-s=1",
    )
    result = solo.run("touch started", *flags)
    assert result.returncode == 125 and b"the driver has not been heard of for" in result.stderr
    assert solo.record()["state"] == "broken"


def test_rank_0_tells_the_steps_nodes_when_it_has_started(solo: Solo) -> None:
    alloc = SignalFile(str(solo.directory / "alloc"))
    alloc.arm()
    solo.run("true", "--alloc-signal-file=" + alloc.path)
    said = alloc.read()
    assert said is not None and said[0] == "go" and '"nodes": "127.0.0.1"' in said[1] and '"step": "1.0"' in said[1]


@pytest.mark.parametrize("trouble", ["full disk", "no directory"])
def test_a_log_that_cannot_be_written_is_told_once_and_the_job_goes_on(solo: Solo, trouble: str) -> None:
    if trouble == "full disk":
        (solo.directory / "logs").mkdir()
        (solo.directory / "logs" / "run.log").symlink_to("/dev/full")
    else:
        (solo.directory / "logs").write_text("a file where a directory should be")
    done = solo.run("for i in 1 2 3; do echo line $i; sleep 0.1; done; exit 5")
    assert done.returncode == 5 and done.stdout.count(b"line") == 3
    assert done.stderr.count(b"cannot write the log") == 1


def test_a_reader_that_goes_away_does_not_hurt_the_job(solo: Solo) -> None:
    process = solo.start("seq 100000; echo last > last; exit 6")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 6 and (solo.directory / "last").exists()
    assert solo.log().count(b"\n") == 100000


def test_a_reader_that_stops_reading_does_not_keep_signals_out(solo: Solo) -> None:
    process = solo.start("trap 'echo bye > bye; exit 9' TERM; seq 1000000 & wait; sleep 60 & wait")
    time.sleep(1.0)
    process.terminate()
    eventually(lambda: (solo.directory / "bye").exists())
    process.communicate(timeout=20)
    assert process.returncode == 9


def test_a_missing_work_directory_is_an_error(solo: Solo) -> None:
    result = solo.run("touch started", "--workdir=/nonexistent/place")
    assert result.returncode == 2 and b"work directory /nonexistent/place: No such file" in result.stderr


def test_standard_input_is_empty(solo: Solo) -> None:
    assert solo.run("cat; read line || exit 8").returncode == 8


@pytest.mark.parametrize(
    "value",
    ["two words", "a'b\"c", "line\nline", "$HOME `id` \\", "a,b=c", "é漢字", " ", ""],
    ids=lambda value: repr(value),
)
def test_values_arrive_byte_for_byte(solo: Solo, value: str) -> None:
    import json

    solo.run('printf %s "$VALUE" > value', "--env-vars=" + json.dumps({"VALUE": value}))
    assert (solo.directory / "value").read_text() == value


@pytest.mark.parametrize(
    "environ",
    [{"LC_ALL": "C", "LANG": ""}, {"PYTHONUTF8": "0", "LC_ALL": "POSIX"}, {"TMPDIR": "/nonexistent"}],
    ids=str,
)
def test_odd_surroundings_change_nothing(solo: Solo, environ: dict[str, str]) -> None:
    done = solo.run("echo é漢字", "--task-name=é漢", env=environ)
    assert done.returncode == 0 and solo.log().decode() == "é漢字\n" and "(é漢, pid=" in done.stdout.decode()


def test_every_rank_waits_for_the_last_and_leaves_no_file(tmp_path: Path) -> None:
    gang = Solo(tmp_path, num_ranks=3)
    begun = time.monotonic()
    ranks = [gang.start("sleep %s" % (1.2 if rank == 2 else 0), rank=rank) for rank in range(3)]
    time.sleep(0.7)
    assert [rank.poll() for rank in ranks] == [None, None, None]
    for rank in ranks:
        rank.communicate(timeout=20)
    assert [rank.returncode for rank in ranks] == [0, 0, 0] and time.monotonic() - begun < 5
    assert not list((tmp_path / ".gangrun").rglob("*"))


def test_a_silent_peer_is_given_up_in_one_plain_line(tmp_path: Path) -> None:
    gang = Solo(tmp_path, num_ranks=3)
    ranks = [gang.start("true", "--liveness-timeout-s=1", rank=rank) for rank in (0, 1)]
    errors = [rank.communicate(timeout=20)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert b"rank 2 has not been heard of" in errors[0] and errors[0].count(b"\n") == 1


def test_a_home_that_cannot_be_written_only_costs_the_barrier(tmp_path: Path) -> None:
    gang = Solo(tmp_path, num_ranks=2)
    (tmp_path / ".gangrun").write_text("in the way")
    done = gang.run("exit 0")
    assert done.returncode == 0 and b"the ranks will not wait for each other" in done.stderr


def test_several_tasks_on_a_node_are_refused_in_one_line(solo: Solo) -> None:
    done = solo.run("true", env={"SLURM_STEP_NUM_TASKS": "4"})
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"one task per node" in done.stderr
