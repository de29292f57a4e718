"""The user's script: which ones run, under what rules, and that nothing of them stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import protocol
from executor.process import prepared
from executor.protocol import UsageError
from tests.bench import eventually
from tests.solo import Solo
from tests.test_local_launcher import assert_nothing_left_in

CHECKOUT = Path(__file__).resolve().parent.parent
STANDARD_SIGNALS = (1 << 31) - 1  # glibc keeps the two above them for itself
BOM = b"\xef\xbb\xbf"
# conda's own functions, as its `conda.sh` defines them, in miniature.
CONDA_SH = 'conda() { if [ "$1" = activate ]; then export ACTIVE="$2"; else echo "conda $*"; fi; }\n'


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Solo]:
    solo = Solo(tmp_path)
    yield solo
    solo.close()
    assert_nothing_left_in(tmp_path)


def run(solo: Solo, script: bytes, **environ: str) -> tuple[int, bytes]:
    """The script's exit code and what it printed."""
    path = solo.directory / "script"
    path.write_bytes(script)
    command = [word for word in solo.argv("") if not word.startswith("--script=")]
    done = subprocess.run(
        [*command, "--script-path=%s" % path], env=solo.environ(0, **environ), cwd=solo.directory, capture_output=True
    )
    log = solo.directory / "logs" / "run.log"
    return done.returncode, log.read_bytes() if log.exists() else done.stderr


# --- which scripts run


@pytest.mark.parametrize(
    "script, code, output",
    [
        pytest.param(b"mkdir sub\r\ncd sub\r\npwd\r\nexit 3\r\n", 3, b"DIR/sub\n", id="J1 cd"),
        pytest.param(b"if true; then\r\n  echo yes\r\nelse\r\n  echo no\r\nfi\r\n", 0, b"yes\n", id="J1 if"),
        pytest.param(b"cat <<END\r\ntext\r\nEND\r\n", 0, b"text\n", id="J1 here document"),
        pytest.param(b"#!/bin/bash -e\r\nfalse\r\necho on\r\n", 1, b"", id="J1 shebang"),
        pytest.param(b"false || \\\r\n  exit 3", 3, b"", id="J1 continued"),
        pytest.param(BOM + b"echo text\n", 0, b"text\n", id="J2 BOM"),
        pytest.param(BOM + b"#!/bin/bash\nexit 4\n", 4, b"", id="J2 BOM and shebang"),
        pytest.param(b"echo ${BASH_VERSION:+bash}", 0, b"bash\n", id="J2 no shebang"),
        pytest.param(b"#!/bin/sh\necho ${BASH_VERSION:+bash}", 0, b"bash\n", id="J2 sh"),
        pytest.param(b"#!/bin/bash -eu\necho $nothing\necho on", 1, None, id="J2 options"),
        pytest.param(b"#! /usr/bin/env bash\nfalse\necho on", 0, b"on\n", id="J2 env"),
        pytest.param(b"#!/usr/bin/env -S bash -e\nfalse\necho on", 1, b"", id="J2 env -S"),
        pytest.param(b"#!/bin/bash", 0, b"", id="only a shebang"),
        pytest.param(b"# a comment", 0, b"", id="only a comment"),
        pytest.param(b"echo \xff\xe9", 0, b"\xff\xe9\n", id="F2 bytes"),
        pytest.param(b"false | cat", 0, b"", id="H10 pipe"),
        pytest.param(b"set -o pipefail; false | cat", 1, b"", id="H10 pipefail"),
        pytest.param(b"exec sh -c 'exit 5'", 5, b"", id="exec"),
    ],
)
def test_a_script_means_what_it_says(solo: Solo, script: bytes, code: int, output: bytes | None) -> None:
    found = run(solo, script)
    assert found[0] == code
    assert output is None or found[1] == output.replace(b"DIR", os.fsencode(solo.directory))


@pytest.mark.parametrize(
    "script, words",
    [
        (b"#!/usr/bin/env python3\nprint()\n", "'#!/usr/bin/env python3'"),
        (BOM + b"#!/usr/bin/python3\r\nprint()\r\n", "'#!/usr/bin/python3'"),
        (b"#!/bin/zsh\n", "'#!/bin/zsh'"),
        (b"#!\ntrue\n", "'#!'"),
        (b"\x7fELF\0\0", "NUL bytes"),
        ("echo ü".encode("utf-16"), "NUL bytes"),
    ],
    ids=["J2 python", "J2 BOM python", "J2 zsh", "empty shebang", "binary", "UTF-16"],
)
def test_what_is_no_bash_script_is_refused_in_one_line(solo: Solo, script: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        prepared(script)
    code, said = run(solo, script)
    assert code == protocol.EXIT_USAGE and said.count(b"\n") == 1 and words.encode() in said


def test_line_numbers_in_bashs_messages_are_the_scripts(solo: Solo) -> None:
    _, said = run(solo, b"#!/bin/bash\ntrue\nnosuchcommand\n")
    assert b"line 3: nosuchcommand: command not found" in said


# --- under what rules


def test_the_script_is_the_leader_of_a_session_without_input_and_with_all_signals(solo: Solo) -> None:
    code, said = run(
        solo, b"ps -o sid= -p $$; echo $$; grep -E 'Sig(Blk|Ign)' /proc/self/status; cat; readlink /proc/self/fd/0"
    )
    session, pid, blocked, ignored, stdin = said.decode().split("\n")[:5]
    assert (code, session.strip(), stdin) == (0, pid, "/dev/null")
    assert (int(blocked.split()[1], 16), int(ignored.split()[1], 16) & STANDARD_SIGNALS) == (0, 0)


def test_a_closed_pipe_ends_a_program_quietly(solo: Solo) -> None:
    assert run(solo, b"yes | head -n1; echo ${PIPESTATUS[0]}") == (0, b"y\n141\n")


def test_the_script_inherits_no_open_file_of_ours(solo: Solo) -> None:
    assert run(solo, b"exec ls /proc/self/fd") == (0, b"0\n1\n2\n3\n")  # 3 is the directory that ls reads


# --- conda and module (J3, J15)


@pytest.fixture
def conda(solo: Solo) -> dict[str, str]:
    """A home with a miniconda3 in it that no rc file has set up."""
    place = solo.directory / "miniconda3" / "etc" / "profile.d"
    place.mkdir(parents=True)
    (place / "conda.sh").write_text(CONDA_SH)
    return {"PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize("options", ["", "set -e", "set -u", "set -euo pipefail"])
def test_conda_activate_works_without_any_rc_file_j3(solo: Solo, conda: dict[str, str], options: str) -> None:
    assert run(solo, b"%s\nconda activate mine\necho $ACTIVE" % options.encode(), **conda) == (0, b"mine\n")


def test_conda_is_found_beside_the_program_on_the_path_j3(solo: Solo) -> None:
    place = solo.directory / "my conda"
    for name, text in (("bin/conda", "#!/bin/sh\necho program\n"), ("etc/profile.d/conda.sh", CONDA_SH)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    path = "%s/bin:/usr/bin:/bin" % place
    assert run(solo, b"set -eu; conda activate mine; echo $ACTIVE", PATH=path) == (0, b"mine\n")


def test_the_sites_own_functions_are_left_alone_j15(solo: Solo) -> None:
    site = {"BASH_FUNC_%s%%%%" % name: "() { echo site %s $*; }" % name for name in ("module", "conda")}
    said = run(solo, b"module load cuda; conda activate x; bash -c 'module list'", **site)
    assert said == (0, b"site module load cuda\nsite conda activate x\nsite module list\n")


@pytest.mark.parametrize("name", ["conda", "module"])
@pytest.mark.parametrize("options", ["", "set -e", "set -u", "set -euo pipefail"])
def test_what_is_not_there_is_not_found_in_bashs_own_words_j3(solo: Solo, name: str, options: str) -> None:
    script = "%s\n%s load x || echo code $?" % (options, name)
    code, said = run(solo, script.encode(), PATH="/usr/bin:/bin")
    assert code == 0 and said.endswith(b"%s: command not found\ncode 127\n" % name.encode())


@pytest.mark.parametrize("name", ["conda", "module"])
def test_a_script_that_goes_without_what_is_not_there_j3(solo: Solo, name: str) -> None:
    script = "if command -v %s >/dev/null; then echo found; else echo without; fi" % name
    assert run(solo, script.encode(), PATH="/usr/bin:/bin") == (0, b"without\n")


@pytest.mark.parametrize("name", ["conda", "module"])
def test_a_script_that_dies_of_what_is_not_there_says_why_j3(solo: Solo, name: str) -> None:
    code, said = run(solo, b"set -e\n%s load x\necho on" % name.encode(), PATH="/usr/bin:/bin")
    assert code == 127 and said.endswith(b"%s: command not found\n" % name.encode())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for an /etc/profile.d of its own")
@pytest.mark.parametrize("file", ["modules.sh", "lmod.sh", "z00_lmod.sh"])
def test_module_is_loaded_from_where_sites_keep_it_j15(solo: Solo, file: str) -> None:
    (solo.directory / "profile.d").mkdir()
    (solo.directory / "profile.d" / file).write_text('module() { echo "loaded $*"; }\n')
    (solo.directory / "script").write_text("set -eu; module load cuda; module list")
    shell = 'mount --bind profile.d /etc/profile.d && exec "$@"'
    flags = [word for word in solo.argv("") if not word.startswith("--script=")]
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", *flags, "--script-path=script"]
    done = subprocess.run(command, env=solo.environ(), cwd=solo.directory, capture_output=True)
    assert (done.returncode, solo.log()) == (0, b"loaded load cuda\nloaded list\n"), done.stderr


# --- that nothing stays


@pytest.mark.parametrize(
    "leave",
    ["sleep 60 &", "setsid sleep 60 &", "(sleep 60 &)", "(setsid sleep 60 &)", "(trap '' TERM HUP; sleep 60) &"]
    + ["setsid bash -c '(setsid sleep 60 >/dev/null 2>&1 &)' &"],
)
def test_what_the_script_leaves_behind_ends_with_it_g3(solo: Solo, leave: str) -> None:
    assert run(solo, b"%s\nsleep 0.2; echo done; exit 3" % leave.encode()) == (3, b"done\n")


def test_even_what_an_instant_script_leaves_behind_ends_with_it_g3(solo: Solo) -> None:
    assert run(solo, b"(setsid sleep 60 &); exit 3")[0] == 3


def test_ending_what_is_left_is_bounded_in_time() -> None:
    """It takes every child there is, whatever they start while they are being ended."""
    code = """if True:
        import os, subprocess, time
        from executor import process
        process.adopt_orphans()
        bomb = "for i in 1 2 3 4 5 6 7 8; do (setsid sleep 61.5 &); setsid sleep 61.5 & done; wait"
        bash = process.spawn(["bash", "-c", bomb], os.environ)
        time.sleep(0.3)
        begun = time.monotonic()
        process.end_descendants()
        print(time.monotonic() - begun < 2, process.children())
    """
    said = subprocess.check_output([sys.executable, "-c", code], cwd=CHECKOUT, text=True)
    assert said == "True []\n"


def test_a_script_killed_with_its_executor_is_not_left_alone(solo: Solo) -> None:
    executor = solo.start("sleep 60 & echo $$ > pid; wait")
    eventually(lambda: (solo.directory / "pid").exists() and (solo.directory / "pid").read_text().strip())
    executor.terminate()
    executor.communicate(timeout=20)
    assert executor.returncode == 143
