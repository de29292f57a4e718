"""Output that is long, fast, broken, cut in two, or has no place to go."""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.bench import ANSI, Bench, eventually
from tests.faults.conftest import Fault

KIND = "Output"
LOGS = ("0-head.log", "1-worker1.log", "2-worker2.log")
STREAM_LINE_BYTES = 1000
# What tqdm 4 writes for `for _ in tqdm(range(COUNT)): sleep(0.1)` on a stream that is no terminal.
LIKE_TQDM = """
import sys, time
for i in range(COUNT + 1):
    bar = "█" * (i * 10 // COUNT)
    sys.stderr.write("\\r%3d%%|%-10s| %d/%d [00:%02d<00:00,  9.9it/s]" % (100 * i // COUNT, bar, i, COUNT, i // 10))
    sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\\n")
"""
TQDM = """
import sys, time
sys.path.append(WHERE)
from tqdm import tqdm
for _ in tqdm(range(COUNT), mininterval=0.1): time.sleep(0.1)
"""
# Lines that say who wrote them, which they are, and how long; every 500th is longer than any pipe or message.
BUSY = """
import os, random, sys
rank, count, longest = int(os.environ["SKYPILOT_NODE_RANK"]), int(sys.argv[1]), int(sys.argv[2])
rng, out = random.Random(rank), []
for number in range(count):
    size = rng.choice((1000, 1100, 3000, 20_000, 200_000)) if longest > 900 and number % 500 == 499 else 0
    size = size or rng.choice((100, 100, 200, 500, 900))
    head = b"%d:%d:%d:" % (rank, number, size)
    out.append(head + (b"%x" % rank) * (size - len(head) - 1) + b"\\n")
    if len(out) == 20:
        os.write(1, b"".join(out)); out = []
os.write(1, b"".join(out))
"""


def python(code: str, *arguments: object) -> str:
    """A script that runs this Python program."""
    return f"{sys.executable} - {' '.join(map(str, arguments))} <<'END_OF_PROGRAM'\n{code}\nEND_OF_PROGRAM\n"


def stream(bench: Bench, job_id: int) -> bytes:
    return ANSI.sub("", (bench.directory / f"job-{job_id}.out").read_bytes().decode("utf-8", "replace")).encode()


def said(output: str, rank: int) -> list[str]:
    """What the merged stream holds of one rank, without its prefix."""
    prefix = re.compile(r"^\(\w+, rank=%d, pid=\d+(?:, ip=[\d.]+)?\) (.*)$" % rank)
    return [found.group(1) for line in output.split("\n") if (found := prefix.match(line))]


def test_a_progress_bar_is_seen_while_it_runs(bench: Bench, fault: Fault) -> None:
    real = importlib.util.find_spec("tqdm")
    row = fault("a progress bar of tqdm without any newline")
    where = repr(str(Path(real.origin).parent.parent)) if real and real.origin else ""
    bar = TQDM.replace("WHERE", where) if where else LIKE_TQDM
    job = bench.submit(run=python(bar.replace("COUNT", "60")), nodes=1)
    eventually(lambda: "10/60" in job.log("run.log"), 20)
    row.injected()
    eventually(lambda: b"/60 [" in stream(bench, job.job_id), 3)
    assert "60/60" not in job.log("run.log"), "it runs on"
    outcome = job.wait()
    lines = [line for line in outcome.plain.splitlines() if "/60" in line]
    assert outcome.code == 0 and all(line.startswith("(task, pid=") for line in lines)
    assert "60/60" in lines[-1] and 5 <= len(lines) < 30 and all("\ufffd" not in line for line in lines)
    assert (bench.directory / "logs" / "run.log").read_bytes().count(b"\r") >= 55
    row.ended(outcome, bench)
    row.saw(f"every update in the log, {len(lines)} lines of the stream while it runs", 0)


def check_busy(bench: Bench, count: int, longest: int) -> tuple[int, int, int]:
    """Run three busy ranks; returns (lines, lines of up to 900 bytes that were cut, longer lines)."""
    (bench.directory / "busy.py").write_text(BUSY)
    outcome = bench.drive(run=f"exec {sys.executable} busy.py {count} {longest}", timeout_s=300)
    assert outcome.code == 0
    raw = ANSI.sub("", (next(bench.directory.glob("job-*.out"))).read_bytes().decode())
    lines = [line for line in raw.split("\n")[:-1] if not line.startswith("gangrun: ")]
    assert all(len(line) < STREAM_LINE_BYTES for line in lines)
    strange = [line for line in lines if not re.match(r"\((head|worker\d), rank=\d, pid=\d+", line)]
    assert not strange, strange[:3]
    total = cut = long = 0
    for rank, name in enumerate(LOGS):
        log = outcome.log(name).split("\n")[:-1]
        assert [line.split(":")[:2] for line in log] == [[str(rank), str(number)] for number in range(count)]
        assert all(len(line) + 1 == int(line.split(":")[2]) for line in log), "the log is exact"
        short = collections.Counter(line for line in log if len(line) < 900)
        pieces = said(raw, rank)
        cut += sum((short - collections.Counter(pieces)).values())
        assert "".join(pieces) == "".join(log), f"every byte of rank {rank}, in order"
        total, long = total + len(log), long + len(log) - sum(short.values())
    return total, cut, long


def test_busy_ranks_with_lines_of_up_to_200_kb(bench: Bench, fault: Fault) -> None:
    row = fault("three busy ranks print 90,000 lines of 100 B to 200 kB at once")
    total, cut, long = check_busy(bench, 30_000, 200_000)
    assert (total, cut) == (90_000, 0) and long > 100
    row.saw(f"logs exact, every piece with its own rank's prefix, 0 of {total - long} lines <= 900 B cut", 0)
    row.check_nothing_left(bench, "busy.py")


@pytest.mark.slow
def test_a_million_lines_of_busy_ranks(bench: Bench, fault: Fault) -> None:
    row = fault("three busy ranks print 1,050,000 lines of 100 to 900 B at once")
    total, cut, _ = check_busy(bench, 350_000, 900)
    assert (total, cut) == (1_050_000, 0)
    row.saw(f"logs exact, 0 of {total} lines cut", 0)
    row.check_nothing_left(bench, "busy.py")


def test_the_last_line_has_no_newline(bench: Bench, fault: Fault) -> None:
    row = fault("the last line has no newline")
    outcome = bench.drive(run="printf 'first\\nlast without end'")
    for rank, name in enumerate(LOGS):
        assert outcome.log(name) == "first\nlast without end"
        assert said(outcome.plain, rank) == ["first", "last without end"]
    row.ended(outcome, bench)
    row.saw("the log as it is; in the stream a line of its own", outcome.code)


def test_characters_are_cut_by_the_pipe(bench: Bench, fault: Fault) -> None:
    row = fault("UTF-8 written byte by byte with pauses, and 300 kB of 3-byte characters without a newline")
    code = 'import os, time\nfor byte in "né 漢字 😀".encode(): os.write(1, bytes([byte])); time.sleep(0.11)\n'
    code += 'print(); os.write(1, "漢".encode() * 100_000)\n'
    outcome = bench.drive(run=python(code), nodes=2)
    assert outcome.code == 0 and "\ufffd" not in outcome.output
    assert outcome.log("1-worker1.log") == "né 漢字 😀\n" + "漢" * 100_000
    for rank in (0, 1):
        assert "".join(said(outcome.plain, rank)) == "né 漢字 😀" + "漢" * 100_000
    row.ended(outcome, bench)
    row.saw("no replacement character in log or stream", outcome.code)


def test_bytes_that_are_no_text(bench: Bench, fault: Fault) -> None:
    row = fault("bytes that are no UTF-8, NUL among them, then 2 MB more")
    run = r"printf '\x80\xff latin \xe9 nul \x00 end\n'; yes 0123456789 | head -c 2200000; echo last; exit 0"
    outcome = bench.drive(run=run, nodes=2)
    first = b"\x80\xff latin \xe9 nul \x00 end\n"
    log = (bench.directory / "logs" / LOGS[1]).read_bytes()
    assert outcome.code == 0 and log.startswith(first) and log.endswith(b"last\n") and len(log) == len(first) + 2200005
    raw = next(bench.directory.glob("job-*.out")).read_bytes()
    assert raw.count(first) == 2 and raw.count(b"last\n") == 2
    row.ended(outcome, bench)
    row.saw("the same bytes in log and stream, all that follows is there", outcome.code)


@pytest.mark.parametrize("code", [0, 3])
def test_ten_thousand_lines_and_gone(bench: Bench, fault: Fault, code: int) -> None:
    row = fault(f"10,000 lines and an immediate exit {code} on the only node")
    outcome = bench.drive(run=f"seq 10000; exit {code}", nodes=1)
    seen = [line.split(") ")[1] for line in outcome.plain.splitlines() if line.startswith("(task")]
    assert outcome.code == code and seen == outcome.log("run.log").split() == [str(n) for n in range(1, 10001)]
    row.ended(outcome, bench)


def test_a_failing_ranks_last_lines(bench: Bench, fault: Fault) -> None:
    row = fault("a rank prints 10,000 lines and fails at once; its peers print on")
    outcome = bench.drive(
        run="[ $SKYPILOT_NODE_RANK = 1 ] && { seq 10000; exit 9; }; while echo on; do sleep 0.1; done"
    )
    assert (outcome.code, outcome.status["first_failure"]["rank"]) == (9, 1)
    assert outcome.log(LOGS[1]).split() == said(outcome.plain, 1) == [str(n) for n in range(1, 10001)]
    row.ended(outcome, bench)


@pytest.mark.parametrize("freed", [True, False], ids=["freed", "full"])
def test_the_disk_of_the_logs_fills(bench: Bench, fault: Fault, freed: bool) -> None:
    row = fault("the disk of one node's logs (tmpfs of 1 MB) fills" + (" and is freed again" if freed else ""))
    (bench.directory / "logs").mkdir()
    bench.cluster.run("n2", ["mount", "-t", "tmpfs", "-o", "size=1m", "t", bench.directory / "logs"], cwd="/")
    try:
        run = "yes 0123456789 | head -c 3300000; until [ -e go ]; do sleep 0.1; done; echo after"
        job = bench.submit(run=run)
        raw = bench.directory / f"job-{job.job_id}.out"
        eventually(lambda: raw.exists() and raw.read_bytes().count(b"0123456789") == 900_000, 60)
        row.injected()
        if freed:  # as a log rotation or a person does
            bench.cluster.run("n2", ["truncate", "-s", "0", bench.directory / "logs" / LOGS[1]], cwd="/")
        (bench.directory / "go").touch()
        outcome = job.wait()
        log = bench.cluster.run("n2", ["cat", bench.directory / "logs" / LOGS[1]], cwd="/").stdout
    finally:
        bench.cluster.run("n2", ["umount", "-l", bench.directory / "logs"], cwd="/")
    told = [line for line in outcome.plain.splitlines() if "cannot write the log" in line]
    assert outcome.code == 0 and len(told) == 1 and "No space left on device; the job goes on" in told[0]
    assert said(outcome.plain, 1)[-1] == "after" and len(said(outcome.plain, 1)) == 300_001, "the stream has it all"
    assert all(outcome.log(name).endswith("after\n") for name in (LOGS[0], LOGS[2]))
    if freed:
        assert re.fullmatch(r"\n\[gangrun: \d+ bytes could not be written here\]\nafter\n", log), log[-200:]
    row.ended(outcome, bench)
    row.saw("SUCCEEDED; " + told[0].replace(str(bench.directory), ""), 0)


def test_somebody_removes_and_remakes_the_logs(bench: Bench, fault: Fault) -> None:
    row = fault("the log directory is removed and made again while the scripts run")
    job = bench.submit(run="echo up; until [ -e go ]; do sleep 0.1; done; echo bye")
    eventually(lambda: all(job.log(name) for name in LOGS), 30)
    shutil.rmtree(bench.directory / "logs")
    (bench.directory / "logs").mkdir()
    row.injected()
    (bench.directory / "go").touch()
    outcome = job.wait()
    assert outcome.code == 0 and outcome.plain.count("bye") == 3
    assert all(outcome.log(name).endswith("bye\n") for name in LOGS)
    row.ended(outcome, bench)


@pytest.mark.parametrize("how", ["sleep 4521 &", "setsid sleep 4521 &", "setsid nohup sleep 4521 &"])
def test_a_background_child_holds_the_pipe(bench: Bench, fault: Fault, how: str) -> None:
    row = fault(f"`{how}` keeps the output pipe open")
    row.injected()
    begun = time.monotonic()
    outcome = bench.drive(run=f"{how} echo done", nodes=2)
    assert outcome.code == 0 and time.monotonic() - begun < 20
    assert outcome.log("1-worker1.log") == "done\n"
    row.ended(outcome, bench, "sleep 4521")


def test_what_a_child_prints_during_the_barrier(bench: Bench, fault: Fault) -> None:
    row = fault("a child left in the background prints while its rank waits for the others")
    run = "[ $SKYPILOT_NODE_RANK = 1 ] && { (sleep 1; echo late; sleep 4522) & exit 0; }; sleep 3"
    outcome = bench.drive(run=run, nodes=2)
    assert outcome.code == 0 and outcome.log("1-worker1.log") == "late\n" and said(outcome.plain, 1) == ["late"]
    row.ended(outcome, bench, "sleep 4522")


def test_the_reader_of_the_stream_goes_away(bench: Bench, fault: Fault) -> None:
    row = fault("the reader of the driver's output goes away (`| head -3`)")
    job = bench.submit(run="for i in $(seq 50); do echo line $i; sleep 0.05; done; touch end-$(hostname)")
    assert job.wait().code == 0
    driver = bench.directory / "driver" / "driver.py"
    for name in LOGS:
        (bench.directory / "logs" / name).unlink()
    outcome = bench.run_batch(f"{sys.executable} {driver} 2>&1 | head -3; echo code ${{PIPESTATUS[0]}}")
    assert "code 0" in outcome.output and all(outcome.log(name).endswith("line 50\n") for name in LOGS)
    row.saw("all in the logs, the job's own exit code", 0)
    row.check_nothing_left(bench)


def test_a_program_that_does_not_flush(bench: Bench, fault: Fault) -> None:
    row = fault("a Python program that prints every second and never flushes")
    job = bench.submit(run=python("import time\nfor i in range(8): print('tick', i); time.sleep(1)"), nodes=1)
    eventually(lambda: "tick 0" in job.log("run.log"), 20)
    eventually(lambda: b"tick 1" in stream(bench, job.job_id), 3)
    assert "tick 7" not in job.log("run.log"), "it runs on"
    outcome = job.wait()
    assert outcome.code == 0
    row.ended(outcome, bench)
    row.saw("each line within a second or two (PYTHONUNBUFFERED)", 0)


def test_noise_of_shells_and_srun(bench: Bench, fault: Fault) -> None:
    row = fault("a noisy .bashrc and .profile, and SLURM_CPU_BIND=verbose")
    for name in (".bashrc", ".profile", ".bash_profile"):
        (bench.directory / name).write_text("echo noise of $BASH_SOURCE\n")
    bench.environ["SLURM_CPU_BIND"] = "verbose"
    bench.environ["SRUN_DEBUG"] = "4"
    outcome = bench.drive(run="echo mine", setup="echo set up")
    assert outcome.code == 0 and all(outcome.log(name) == "mine\n" for name in LOGS)
    assert outcome.log("setup-worker1.log") == "set up\n" and "noise" not in outcome.output
    row.ended(outcome, bench)
    row.saw("nothing of it in the user's logs", 0)
