"""Small files between nodes: a reader sees what was or what is, never a half, and nothing that nobody said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor import protocol
from executor.gang import Patience
from executor.shared import (
    SignalFile,
    Watch,
    read_record,
    read_text,
    write_atomic,
    write_in_place,
    write_private,
    write_record,
)

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture
def signal(tmp_path: Path) -> SignalFile:
    return SignalFile(str(tmp_path / "a signal"))


@contextmanager
def in_a_tight_loop(action: Callable[[int], Any]) -> Iterator[None]:
    """Call `action` with 0, 1, 2, ... beside the test."""
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.is_set():
            action(number)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- signals


def test_a_signal_says_nothing_until_it_is_fired(signal: SignalFile) -> None:
    assert signal.read() is None
    signal.arm()
    assert signal.read() is None
    assert os.path.getsize(signal.path) == protocol.SIGNAL_BYTES
    signal.fire(protocol.GO)
    assert signal.read() == (protocol.GO, "")
    assert signal.read() == (protocol.GO, ""), "it says so every time"


@pytest.mark.parametrize("was_armed", [True, False])
@pytest.mark.parametrize("detail", ["", "setup failed: rank 1 on worker1 failed first (exit code 3)", "é" * 500])
def test_a_signal_carries_its_reason(signal: SignalFile, was_armed: bool, detail: str) -> None:
    if was_armed:
        signal.arm()
    signal.fire(protocol.ABORT, detail)
    assert signal.read() == (protocol.ABORT, detail)


def test_a_reason_of_several_lines_becomes_one(signal: SignalFile) -> None:
    signal.fire(protocol.ABORT, "one\n  two\n")
    assert signal.read() == (protocol.ABORT, "one two")


def test_the_nodes_of_a_large_step_fit_into_a_signal(signal: SignalFile) -> None:
    signal.arm()
    nodes = ",".join("rack%dnode%d" % (number % 97, number) for number in range(4000))
    signal.fire(protocol.GO, json.dumps({"nodes": nodes}))
    word, detail = signal.read() or ("", "")
    assert word == protocol.GO and json.loads(detail) == {"nodes": nodes}


@pytest.mark.parametrize("text", ["", "\n", "go", "go\n", " go \n"])
def test_a_person_can_fire_a_signal(signal: SignalFile, text: str) -> None:
    """By touch(1), or with any editor or echo."""
    Path(signal.path).write_text(text)
    said = signal.read() or signal.read()  # what has no newline may be half written: it must be there twice
    assert said == (protocol.GO, "")


def test_a_half_written_signal_is_not_taken_for_a_whole_one(signal: SignalFile) -> None:
    Path(signal.path).write_text("abo")
    assert signal.read() is None
    Path(signal.path).write_text("abort disk")
    assert signal.read() is None
    Path(signal.path).write_text("abort disk full\n")
    assert signal.read() == (protocol.ABORT, "disk full")


def test_a_signal_in_a_directory_that_is_not_there_has_not_fired(tmp_path: Path) -> None:
    assert SignalFile(str(tmp_path / "no" / "signal")).read() is None
    (tmp_path / "file").touch()
    assert SignalFile(str(tmp_path / "file" / "signal")).read() is None


def test_trouble_that_is_no_absence_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error:
        SignalFile(str(tmp_path)).read()
    assert error.value.errno == errno.EISDIR


def test_a_reader_meets_armed_or_fired_and_nothing_between(signal: SignalFile) -> None:
    signal.arm()

    def rewrite(number: int) -> None:
        if number % 2:
            signal.arm()
        else:
            signal.fire(protocol.ABORT, "a reason")

    with in_a_tight_loop(rewrite):
        assert {SignalFile(signal.path).read() for _ in range(3000)} <= {None, (protocol.ABORT, "a reason")}


# --- records


def test_a_record_is_private_and_comes_back(tmp_path: Path) -> None:
    record = {"state": protocol.RANK_RUNNING, "code": None, "why": 'it\'s "é"\n'}
    write_record(str(tmp_path / "0"), record)
    assert read_record(str(tmp_path / "0")) == record
    assert (tmp_path / "0").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b'{"state": "done"}', b"[]\n", b"\xff\n", b'{"a": 1}\n{"b": 2}\n'])
def test_what_is_no_whole_record_is_none_yet_e9(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0").write_bytes(content)
    assert read_record(str(tmp_path / "0")) is None
    assert read_record(str(tmp_path / "1")) is None


def test_a_reader_meets_a_whole_record_e9(tmp_path: Path) -> None:
    """Long and short ones in turn: nothing of the longer one's tail is ever taken for the shorter's."""
    path = str(tmp_path / "0")
    whys = ["", "a reason", "é" * 160]
    write_record(path, {"why": "", "beat": 0})

    with in_a_tight_loop(lambda number: write_record(path, {"why": whys[number % 3], "beat": number % 3})):
        seen = [read_record(path) for _ in range(3000)]
    found = [record for record in seen if record is not None]
    assert len(found) > 1000
    assert all(record["why"] == whys[record["beat"]] for record in found)


def test_rewriting_leaves_nothing_of_what_was_longer(tmp_path: Path) -> None:
    write_in_place(str(tmp_path / "file"), b"a long text\n")
    write_in_place(str(tmp_path / "file"), b"short\n")
    assert (tmp_path / "file").read_bytes() == b"short\n"


def test_absence_is_none_and_bytes_that_are_no_text_are_no_trouble(tmp_path: Path) -> None:
    assert read_text(str(tmp_path / "nothing")) is None
    (tmp_path / "file").write_bytes(b"\xff")
    assert read_text(str(tmp_path / "file")) == "\N{REPLACEMENT CHARACTER}"


# --- files that others follow


def test_a_file_is_replaced_as_a_whole_e9(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = [b"{}", b"x" * 10000]
    write_atomic(str(path), texts[0])
    with in_a_tight_loop(lambda number: write_atomic(str(path), texts[number % 2])):
        assert {path.read_bytes() for _ in range(1000)} <= set(texts)
    assert os.listdir(tmp_path) == [path.name]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file_e9(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    code = "import sys; from executor.shared import write_atomic\nwhile True: write_atomic(sys.argv[1], b'x' * 100000)"
    for delay_s in (0.1, 0.15, 0.2):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=CHECKOUT)
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(delay_s)
        writer.kill()
        writer.wait()
        assert not path.exists() or path.read_bytes() == b"x" * 100000


def test_a_file_that_cannot_be_replaced_leaves_no_other_behind(tmp_path: Path) -> None:
    (tmp_path / "status.json" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomic(str(tmp_path / "status.json"), b"x")
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_secret_is_its_owners_alone_and_overwrites_nothing(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_private(str(tmp_path / "secret"), b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "trap").symlink_to(tmp_path / "elsewhere")
    for name in ("secret", "trap"):
        with pytest.raises(FileExistsError):
            write_private(str(tmp_path / name), b"y")
    assert (tmp_path / "secret").read_bytes() == b"x" and not (tmp_path / "elsewhere").exists()


# --- time


def test_a_peer_is_silent_when_its_counter_stands_still() -> None:
    watch = Watch(limit_s=0.05)
    assert not watch.is_silent(1)
    assert look_until_silent(watch, 1) and watch.silent_s > 0.05
    assert not watch.is_silent(2) and not watch.is_silent(2)
    assert look_until_silent(watch, 2)
    assert not watch.is_silent(None), "any change is a sign of life"


def look_until_silent(watch: Watch, counter: int) -> bool:
    for _ in range(50):
        threading.Event().wait(0.005)
        if watch.is_silent(counter):
            return True
    return False


def test_nobody_is_silent_after_we_stood_still_ourselves() -> None:
    watch = Watch(limit_s=0.05)
    assert not watch.is_silent(1)
    threading.Event().wait(0.2)  # suspended, or in a hung file system
    assert not watch.is_silent(1)


def test_a_file_system_may_fail_for_a_while() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    patience = Patience(limit_s=0.05)
    assert patience.ask(lambda: "answer") == "answer"
    assert patience.ask(fail) is None
    threading.Event().wait(0.1)
    assert patience.ask(lambda: "answer") == "answer"
    assert patience.ask(fail) is None, "an answer between two failures begins the count anew"
    threading.Event().wait(0.1)
    with pytest.raises(OSError, match="Input/output error"):
        patience.ask(fail)
