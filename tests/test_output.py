"""The script's output: every byte in the log, whole prefixed lines in the stream, nothing held up or hoarded."""

import os
import random
import resource
import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from executor import protocol
from executor.output import Framer, Log, Stream
from executor.ray_relay import OUTPUT, RECORD, _said

CHECKOUT = Path(__file__).resolve().parent.parent
PREFIX = b"\x1b[36m(worker1, rank=1, pid=4711, ip=10.0.0.2)\x1b[0m "
LONG_PREFIX = b"(%s, pid=4711) " % ("\N{SNOWMAN}" * 200).encode()


def frame(chunks: Iterable[bytes], prefix: bytes = PREFIX) -> bytes:
    framer = Framer(prefix)
    return b"".join([framer.feed(chunk) for chunk in chunks]) + framer.flush()


def texts(stream: bytes, prefix: bytes = PREFIX) -> list[bytes]:
    """What each line of the stream says. Every line begins with the prefix, once, and fits into srun's message."""
    assert stream == b"" or stream.endswith(b"\n")
    lines = stream.split(b"\n")[:-1]
    assert all(line.startswith(prefix) and line.count(prefix.strip() or b"\n") <= 1 for line in lines)
    assert all(len(line) < 1024 for line in lines)
    return [line[len(prefix) :] for line in lines]


def at_random(data: bytes, seed: int) -> list[bytes]:
    """The same bytes in pieces as a pipe may give them."""
    rng, chunks = random.Random(seed), []
    while data:
        size = rng.choice((1, 2, 3, 80, 999, 65536))
        chunks.append(data[:size])
        data = data[size:]
    return chunks


# --- the stream's lines


def test_each_line_gets_the_prefix_once() -> None:
    assert frame([b"one\ntwo\n"]) == PREFIX + b"one\n" + PREFIX + b"two\n"
    assert frame([b"on", b"e\n", b"", b"\n", b"tw", b"o"]) == b"".join(PREFIX + t for t in (b"one\n", b"\n", b"two\n"))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("prefix", [b"", PREFIX, LONG_PREFIX], ids=["none", "usual", "long"])
def test_lines_stay_whole_however_the_pipe_cuts_them(seed: int, prefix: bytes) -> None:
    rng = random.Random(seed)
    room = protocol.STREAM_PIECE_BYTES - len(prefix) - 1
    lines = [b"x" * rng.choice((0, 1, 30, room - 1, room)) for _ in range(200)]
    assert texts(frame(at_random(b"\n".join(lines) + b"\n", seed), prefix), prefix) == lines


@pytest.mark.parametrize("excess", [1, 2, 1000, 5 << 20])
def test_a_line_longer_than_sruns_message_comes_in_pieces_f4(excess: int) -> None:
    line = b"{" + b'"k": 1, ' * ((protocol.STREAM_PIECE_BYTES + excess) // 8) + b"}"
    said = texts(frame(at_random(line + b"\ndone\n", excess)))
    assert (b"".join(said[:-1]), said[-1]) == (line, b"done")
    assert len(said) - 1 <= len(line) // 900 + 1


@pytest.mark.parametrize("character", ["é", "漢", "😀"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 65536])
def test_no_character_is_cut_in_two_f3(character: str, chunk: int) -> None:
    text = ("a" + character * 3000).encode()
    said = texts(frame([text[start : start + chunk] for start in range(0, len(text), chunk)]))
    assert "".join(piece.decode() for piece in said) == text.decode()


@pytest.mark.parametrize("byte", [b"\x80", b"\xff", b"\xe9", b"\0", b"\x1b"])
def test_bytes_that_are_no_text_pass_unharmed_f2(byte: bytes) -> None:
    data = byte * 5000 + b"\nlater\n"
    said = texts(frame(at_random(data, 1)))
    assert b"".join(said[:-1]) + b"\n" + said[-1] + b"\n" == data


def test_a_prompt_is_shown_when_flushed_and_its_line_goes_on_after_it() -> None:
    framer = Framer(b"> ")
    assert framer.feed(b"name? ") == b"" and framer.is_holding
    assert framer.flush() == b"> name? \n" and not framer.is_holding
    assert framer.feed(b"ada\n") == b"> ada\n"
    assert framer.feed(b"again? ") + framer.flush() == b"> again? \n"
    assert framer.feed(b"\nnext\n") == b"> next\n"  # the newline that the flush gave out early is not given twice
    assert framer.flush() == b""


# --- progress bars


def test_a_progress_bar_is_thinned_to_its_latest_update() -> None:
    framer = Framer(b"> ")
    assert framer.feed(b"10%\r20%\r30%\r") == b""
    assert framer.flush() == b"> 30%\n"
    assert framer.feed(b"\r40%\r50%") == b""
    assert framer.flush() == b"> 50%\n"
    assert framer.feed(b"\r100%\ndone\n") == b"> 100%\n> done\n"


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_windows_line_ends_are_line_ends(chunk: int) -> None:
    data = b"one\r\ntwo\r\n\r\nthree"
    said = texts(frame([data[start : start + chunk] for start in range(0, len(data), chunk)], b"> "), b"> ")
    assert said == [b"one", b"two", b"", b"three"]


def test_a_progress_bar_without_an_end_takes_no_memory() -> None:
    framer = Framer(PREFIX)
    assert b"".join(framer.feed(b"\r%7d/1000000" % number) for number in range(100000)) == b""
    assert framer.flush() == PREFIX + b"  99999/1000000\n"


def test_a_line_larger_than_memory_passes_f4() -> None:
    code = """if True:
        import resource, sys
        from executor.output import Framer
        resource.setrlimit(resource.RLIMIT_AS, (64 << 20, 64 << 20))
        framer, chunk, total = Framer(b"> "), b"x" * 65536, 0
        for _ in range(1600):
            total += framer.feed(chunk).count(b"x")
        print(total + framer.flush().count(b"x"))
    """
    assert int(subprocess.check_output([sys.executable, "-c", code], cwd=CHECKOUT)) == 1600 * 65536


# --- the stream's reader


def test_a_slow_reader_never_blocks_the_writer() -> None:
    read_end, write_end = os.pipe()
    stream = Stream(write_end)
    stream.write(b"x" * (1 << 22))
    assert stream.is_backed_up
    assert os.get_blocking(write_end)  # the description that others share is as it was
    got = 0
    while stream.is_backed_up or select.select([read_end], [], [], 0)[0]:
        got += len(os.read(read_end, 1 << 16))
        stream.push()
    assert got == 1 << 22
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_went_away_is_no_trouble() -> None:
    read_end, write_end = os.pipe()
    stream = Stream(write_end)
    os.close(read_end)
    stream.write(b"to nobody\n")
    stream.write(b"to nobody\n")
    assert not stream.is_backed_up
    os.close(write_end)


def test_a_full_disk_under_the_stream_is_no_trouble() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    stream = Stream(fd)
    stream.write(b"to nowhere\n")
    assert not stream.is_backed_up
    os.close(fd)


# --- the log


def test_the_log_holds_the_raw_bytes_at_once(tmp_path: Path) -> None:
    reports: list[str] = []
    log = Log(str(tmp_path / "new" / "my dir (é) 100%j\n" / "0-head.log"), reports.append)
    log.write(b"half a line \xff\0\r")
    assert Path(log.path).read_bytes() == b"half a line \xff\0\r"
    log.write(b"\xe2\x98")
    log.write(b"\x83\n")
    assert Path(log.path).read_bytes() == b"half a line \xff\0\r\xe2\x98\x83\n" and reports == []


def test_an_earlier_attempts_log_is_kept_i9(tmp_path: Path) -> None:
    for attempt in (b"first\n", b"second\n"):
        Log(str(tmp_path / "run.log"), pytest.fail).write(attempt)
    assert (tmp_path / "run.log").read_bytes() == b"first\nsecond\n"


def test_a_full_disk_is_told_once_and_stops_nothing() -> None:
    reports: list[str] = []
    log = Log("/dev/full", reports.append)
    for _ in range(3):
        log.write(b"lost\n")
    assert reports == ["cannot write the log /dev/full: No space left on device; the job goes on"]


def test_a_log_that_can_be_written_again_says_what_it_lacks(tmp_path: Path) -> None:
    reports: list[str] = []
    (tmp_path / "logs").write_text("a file where the directory should be")
    log = Log(str(tmp_path / "logs" / "run.log"), reports.append)
    log.write(b"12345\n")
    log.write(b"67890\n")
    (tmp_path / "logs").unlink()
    log.write(b"after\n")
    log.write(b"more\n")
    assert Path(log.path).read_bytes() == b"\n[gangrun: 12 bytes could not be written here]\nafter\nmore\n"
    assert len(reports) == 1 and str(log.path) in reports[0]


def test_only_what_is_lost_is_counted(tmp_path: Path) -> None:
    """A quota may cut a write in two: its first half is in the log."""
    code = """if True:
        import resource, sys
        from executor.output import Log
        log = Log(sys.argv[1], lambda text: None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, resource.RLIM_INFINITY))
        log.write(b"0123456789")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.write(b"after")
    """
    subprocess.check_call([sys.executable, "-c", code, str(tmp_path / "run.log")], cwd=CHECKOUT)
    assert (tmp_path / "run.log").read_bytes() == b"012345\n[gangrun: 4 bytes could not be written here]\nafter"


def test_the_log_survives_a_low_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    log = Log(str(tmp_path / "run.log"), pytest.fail)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        log.write(b"written\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "run.log").read_bytes() == b"written\n"


def test_a_rank_on_ray_that_is_killed_amid_a_record_has_told_what_came_before() -> None:
    for kind, told in ((RECORD, [(RECORD, {})]), (OUTPUT, [(OUTPUT, b"{}\n"), (OUTPUT, b'{"state')])):
        read_end, write_end = os.pipe()
        os.write(write_end, b'{}\n{"state')
        os.close(write_end)
        assert list(_said({read_end: kind})) == told
