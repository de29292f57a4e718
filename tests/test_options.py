"""The flags of `python -m executor.slurm`: what is taken, and one clear line for what is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from executor import protocol, slurm
from executor.options import FLAGS, USAGE, Options, parse
from executor.protocol import UsageError

CHECKOUT = Path(__file__).resolve().parent.parent
NEEDED = ["--log-dir=/l", "--cluster-num-nodes=2", "--cluster-ips=10.0.0.1,10.0.0.2"]
SCRIPT = "--script=true"


def options(*flags: str) -> Options:
    return parse([*NEEDED, SCRIPT, *flags])


# --- what is taken


def test_four_flags_are_enough() -> None:
    found = options()
    assert (found.script, found.log_dir, found.cluster_num_nodes) == ("true", "/l", 2)
    assert found.cluster_ips == ("10.0.0.1", "10.0.0.2")
    assert (found.grace_s, found.liveness_timeout_s) == (30.0, 600.0)
    assert (found.is_setup, found.no_color, found.env_vars, found.workdir) == (False, False, "{}", None)


def test_a_value_may_follow_its_flag_or_an_equals_sign() -> None:
    words = ["--log-dir", "/l", "--cluster-num-nodes", "1", "--cluster-ips", "n1", "--script", "--not-a-flag=1 -x"]
    same = ["--log-dir=/l", "--cluster-num-nodes=1", "--cluster-ips=n1", "--script=--not-a-flag=1 -x"]
    assert vars(parse(words)) == vars(parse(same))


def test_switches_take_no_value() -> None:
    found = options("--is-setup", "--no-color")
    assert (found.is_setup, found.no_color) == (True, True)


@pytest.mark.parametrize(
    "text", ["", "a=b", 'it\'s "all"\nof it\n', "{} %s $X \\", "né 漢", os.fsdecode(b"\xff")], ids=repr
)
def test_a_script_is_taken_byte_for_byte(text: str) -> None:
    assert parse([*NEEDED, "--script=" + text]).script_text() == os.fsencode(text)


def test_a_scripts_file_is_read_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"echo \xff\n")
    assert parse([*NEEDED, "--script-path=%s" % (tmp_path / "run.sh")]).script_text() == b"echo \xff\n"


@pytest.mark.parametrize("text", ["n1,n2", " n1 , n2 ", "fd00::1,n2.cluster.local"])
def test_names_and_addresses_are_taken(text: str) -> None:
    words = ["--log-dir=/l", "--cluster-num-nodes=2", "--cluster-ips=" + text, SCRIPT]
    assert parse(words).cluster_ips == tuple(entry.strip() for entry in text.split(","))


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert options("--log-dir=~/logs", "--workdir=~").log_dir == "/home/ada/logs"
    assert options("--workdir=~").workdir == "/home/ada"


@pytest.mark.parametrize("text, seconds", [("0", 0.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_seconds_may_be_fractions(text: str, seconds: float) -> None:
    assert options("--grace-s=" + text).grace_s == seconds


# --- what is not


@pytest.mark.parametrize(
    "words, complaint",
    [
        (NEEDED, "give one of --script and --script-path, not neither"),
        ([*NEEDED, SCRIPT, "--script-path=/s"], "give one of --script and --script-path, not both"),
        ([*NEEDED[1:], SCRIPT], "--log-dir is required"),
        ([*NEEDED[1:], SCRIPT, "--log-dir="], "--log-dir is required"),
        ([NEEDED[0], NEEDED[2], SCRIPT], "--cluster-num-nodes is required"),
        ([*NEEDED[:2], SCRIPT], "--cluster-ips is required"),
        ([*NEEDED, SCRIPT, "--log-dir"], "--log-dir needs a value"),
        ([*NEEDED, SCRIPT, "--is-setup=1"], "--is-setup takes no value"),
        ([*NEEDED, SCRIPT, "--logdir=/l"], "unknown argument '--logdir'; allowed are --log-dir"),
        ([*NEEDED, SCRIPT, "word"], "unknown argument 'word'"),
        ([*NEEDED, SCRIPT, "-v"], "unknown argument '-v'"),
        ([*NEEDED, SCRIPT, "--cluster-num-nodes=0"], "--cluster-num-nodes='0' is not a whole number of 1 or more"),
        ([*NEEDED, SCRIPT, "--cluster-num-nodes=two"], "--cluster-num-nodes='two' is not a whole number"),
        ([*NEEDED, SCRIPT, "--cluster-num-nodes=٢"], "is not a whole number"),
        ([*NEEDED, SCRIPT, "--cluster-num-nodes=3"], "--cluster-ips has 2 entries, but --cluster-num-nodes is 3"),
        ([*NEEDED, SCRIPT, "--cluster-ips=n1,"], "--cluster-ips='n1,' has an empty entry"),
        ([*NEEDED, SCRIPT, "--cluster-ips=n1,n1"], "--cluster-ips='n1,n1' names a node twice"),
        ([*NEEDED, SCRIPT, "--grace-s=soon"], "--grace-s='soon' is not a number of seconds"),
        ([*NEEDED, SCRIPT, "--grace-s=-1"], "--grace-s='-1' is not a number of seconds"),
        ([*NEEDED, SCRIPT, "--liveness-timeout-s=inf"], "--liveness-timeout-s='inf' is not a number of seconds"),
        ([*NEEDED, SCRIPT, "--liveness-timeout-s=nan"], "--liveness-timeout-s='nan' is not a number of seconds"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        parse(words)
    assert slurm.main(words) == protocol.EXIT_USAGE
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("gangrun: ") and complaint in said.err


def test_a_line_break_in_what_was_given_makes_no_second_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert slurm.main([*NEEDED, SCRIPT, "--two\nlines"]) == protocol.EXIT_USAGE
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name, reason", [("nothing", "No such file or directory"), (".", "Is a directory")])
def test_a_script_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    assert slurm.main([*NEEDED, "--script-path=%s" % path]) == protocol.EXIT_USAGE
    assert capfd.readouterr().err == "gangrun: --script-path=%s: %s\n" % (path, reason)


def test_outside_of_a_step_it_says_how_to_start_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert slurm.main([*NEEDED, SCRIPT]) == protocol.EXIT_USAGE
    assert re.fullmatch(r"gangrun: \w+ is not set: start this under srun\n", capfd.readouterr().err)


# --- help


def test_help_tells_every_flag_and_no_other() -> None:
    assert set(re.findall(r"^  (--[\w-]+)", USAGE, re.MULTILINE)) == set(FLAGS)
    assert max(len(line) for line in USAGE.splitlines()) <= 100


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_goes_to_standard_output(flag: str) -> None:
    done = subprocess.run([sys.executable, "-m", "executor.slurm", flag], cwd=CHECKOUT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, USAGE, "")
