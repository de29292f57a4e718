"""The program at the other end of a connection, without one: files, ids, and the oldest Python it must run on."""

from __future__ import annotations

import ast
import base64
import glob
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gangrun import agent
from gangrun.follow import whole_characters
from gangrun.remote import NAMES, Host, RemoteError, Unreachable
from tests.bench import CHECKOUT

OLD_PYTHONS = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.[6-8]*/bin/python")))
HOST = Host(sys.executable)


def tree(directory: Path) -> tuple[Path, str]:
    """An archive of one file, and its digest."""
    path = directory / "tree.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("hello.txt")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"hi\n"))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def upload(root: Path, path: Path, digest: str) -> Any:
    with path.open("rb") as payload:
        return HOST.call("upload", root=str(root), digest=digest, size=path.stat().st_size, payload=payload)


def test_it_is_written_for_the_python_of_old_login_nodes() -> None:
    ast.parse((CHECKOUT / "gangrun" / "agent.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("python", OLD_PYTHONS or [pytest.param("", marks=pytest.mark.skip("no old Python here"))])
def test_an_old_python_answers(python: str, tmp_path: Path) -> None:
    commands = {"hello": ["echo", "hello"], "slow": ["sleep", "0"], "none": ["/nonexistent"]}
    found = Host(python).call("prepare", root=str(tmp_path), digests=[], commands=commands, python=None)
    answers = {name: (answer["rc"], answer["stdout"]) for name, answer in found["answers"].items()}
    assert answers == {"hello": (0, "hello\n"), "slow": (0, ""), "none": (127, "")}
    path, digest = tree(tmp_path)
    with path.open("rb") as payload:
        size = path.stat().st_size
        Host(python).call("upload", root=str(tmp_path), digest=digest, size=size, payload=payload)
    assert (tmp_path / NAMES["home"] / agent.SNAPSHOTS / f"{digest}.tar").read_bytes() == path.read_bytes()


def test_a_host_without_python_is_told_in_one_line() -> None:
    with pytest.raises(RemoteError, match="no python found .*name one with `python:`"):
        Host("no-such-python").call("prepare", root="~", digests=[], commands={}, python=None)


def test_a_call_ends_within_its_time(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="no answer within 1 s"):
        HOST.call("commands", commands={"sleep": ["sleep", "33"]}, limit_s=30.0, timeout_s=1.0)


def test_a_missing_work_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="work directory '.*/nowhere' is not a directory on this host"):
        HOST.call("runs", root=str(tmp_path / "nowhere"))


def test_an_upload_is_kept_only_if_it_is_whole(tmp_path: Path) -> None:
    path, digest = tree(tmp_path)
    with pytest.raises(RemoteError, match="damaged or cut short"):
        upload(tmp_path, path, "0" * 64)
    assert not any((tmp_path / NAMES["home"] / agent.SNAPSHOTS).iterdir())
    upload(tmp_path, path, digest)
    assert [one.name for one in (tmp_path / NAMES["home"] / agent.SNAPSHOTS).iterdir()] == [f"{digest}.tar"]


def test_a_damaged_snapshot_counts_as_missing(tmp_path: Path) -> None:
    path, digest = tree(tmp_path)
    upload(tmp_path, path, digest)
    prepare = {"root": str(tmp_path), "digests": [digest], "commands": {}, "python": None}
    assert HOST.call("prepare", **prepare)["snapshots"] == [digest]
    with (tmp_path / NAMES["home"] / agent.SNAPSHOTS / f"{digest}.tar").open("ab") as file:
        file.write(b"x")
    assert HOST.call("prepare", **prepare)["snapshots"] == []


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("4711\n", ("4711", None)),
        ("70001;alpha\n", ("70001", "alpha")),
        ("Welcome to TACC\n--> Verifying valid submit host\n4711\n\n", ("4711", None)),
        ("Submitted batch job 12 on cluster beta\n", ("12", "beta")),
        ("Submitted batch job 12\n", ("12", None)),
        ("sbatch: lua: job 99 accepted\n", None),
        ("", None),
    ],
)
def test_a_job_id_is_found_in_whatever_a_site_prints_around_it(text: str, job: tuple[str, str | None] | None) -> None:
    """sampsyo/clusterfutures#24, snakemake/snakemake-executor-plugin-slurm#121, radical.saga#183."""
    assert agent.parse_job_id(text) == job


@pytest.mark.parametrize("seed", range(20))
def test_the_last_lines_are_those_of_tail(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    lines = [bytes(chance.choices(b"ab", k=chance.randrange(8))) for _ in range(chance.randrange(30))]
    content = b"\n".join(lines) + (b"\n" if chance.random() < 0.5 and lines else b"")
    path = tmp_path / "log"
    path.write_bytes(content)
    monkeypatch.setattr(agent, "CHUNK", chance.choice([1, 2, 3, 7, 1000]))
    for count in (1, 2, 5, 40):
        expected = subprocess.check_output(["tail", "-n", str(count), str(path)])
        assert base64.b64decode(agent.read_part(str(path), None, -count, 10_000)["data"]) == expected, (content, count)


def test_a_log_that_shrank_or_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    first = agent.read_part(str(path), None, 0, 100)
    path.write_bytes(b"new\n")
    shrunk = agent.read_part(str(path), first["inode"], first["offset"], 100)
    assert (shrunk["is_new"], base64.b64decode(shrunk["data"])) == (True, b"new\n")
    (tmp_path / "other").write_bytes(b"another file, and longer\n")
    (tmp_path / "other").replace(path)
    replaced = agent.read_part(str(path), shrunk["inode"], shrunk["offset"], 100)
    assert (replaced["is_new"], base64.b64decode(replaced["data"])) == (True, b"another file, and longer\n")


def test_no_piece_of_a_log_cuts_a_character() -> None:
    text = "aé€𝄞z".encode()
    for junk in (text, b"\x80\x80\x80\x80\x80", b"\xff\xfe", b"a\xff", text + b"\xf0\x9d"):
        pieces = list(whole_characters(junk[at : at + 1] for at in range(len(junk))))
        assert b"".join(pieces) == junk and b"" not in pieces
    for cut in range(len(text) + 1):
        shown = list(whole_characters([text[:cut], text[cut:]]))
        assert b"".join(shown) == text
        assert all(piece.decode() for piece in shown)
