"""From the ranks' records and srun's words to a state, one exit code and the rank to blame."""

from __future__ import annotations

import os
from typing import Any

import pytest

from executor import protocol
from executor.process import exit_code
from executor.verdict import judge

QUIET = ""
WORKERS = ("head", "worker1", "worker2", "worker3")


def rank(number: int, state: str, code: int | None = None, ended: float | None = None, why: str = "") -> dict[str, Any]:
    return {"state": state, "node": WORKERS[number], "host": "n%d" % number, "code": code, "ended": ended, "why": why}


def done(number: int) -> dict[str, Any]:
    return rank(number, protocol.RANK_DONE, 0, 10.0)


def failed(number: int, code: int, at: float) -> dict[str, Any]:
    return rank(number, protocol.RANK_FAILED, code, at)


def stopped(number: int, code: int = 143) -> dict[str, Any]:
    return rank(number, protocol.RANK_STOPPED, code, 11.0)


def running(number: int) -> dict[str, Any]:
    return rank(number, protocol.RANK_RUNNING)


# --- success


def test_a_gang_whose_ranks_are_all_done_succeeded() -> None:
    verdict = judge([done(0), done(1)], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.codes, verdict.first_failed) == ("SUCCEEDED", 0, [0, 0], None)


# --- failure


def test_the_earliest_failure_is_the_headline_and_gives_its_code() -> None:
    verdict = judge([stopped(0), failed(1, 7, at=5.0), failed(2, 3, at=4.9)], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.codes) == ("FAILED", 3, [143, 7, 3])
    assert (verdict.first_failed, verdict.reason) == (2, "rank 2 on worker2 failed first (exit code 3)")


def test_a_failure_stands_though_peers_succeeded_h4() -> None:
    verdict = judge([done(0), failed(1, 1, at=1.0), done(2)], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.codes) == ("FAILED", 1, [0, 1, 0])


def test_a_failure_that_came_before_a_cancel_stands() -> None:
    verdict = judge([stopped(0), failed(1, 7, at=1.0)], "srun: CANCELLED AT 12:00", was_cancelled=True)
    assert (verdict.state, verdict.exit_code, verdict.first_failed) == ("FAILED", 7, 1)


def test_a_rank_killed_without_a_word_failed_h4() -> None:
    verdict = judge([stopped(0), running(1), stopped(2)], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.codes[1], verdict.first_failed) == ("FAILED", 137, 137, 1)
    assert "rank 1 on worker1 was killed before it could say why" in verdict.reason


def test_a_rank_that_could_not_run_the_script_is_the_launchers_failure_h12() -> None:
    broken = rank(1, protocol.RANK_BROKEN, 125, 1.0, why="work directory /w: No such file or directory")
    verdict = judge([stopped(0), broken], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.first_failed) == ("FAILED_DRIVER", 125, 1)
    assert verdict.reason == "rank 1 on worker1 could not run the script: work directory /w: No such file or directory"


def test_a_rank_that_could_not_go_on_with_the_script_is_told_as_that() -> None:
    broken = {**rank(1, protocol.RANK_BROKEN, 125, 1.0, why="slurmstepd is gone"), "started": 0.5}
    verdict = judge([stopped(0), broken], QUIET, was_cancelled=False)
    assert verdict.reason == "rank 1 on worker1 could not run the script to its end: slurmstepd is gone"


def test_a_rank_that_left_no_record_at_all_is_named_by_its_number() -> None:
    verdict = judge([done(0), None], QUIET, was_cancelled=False)
    assert verdict.state == "FAILED" and "rank 1 on" in verdict.reason


@pytest.mark.parametrize("words", ["srun: error: Node failure on n3", "srun: error: *** STEP 7.0 DUE TO NODE FAILURE"])
def test_a_node_that_died_is_no_failure_of_the_script_i7(words: str) -> None:
    verdict = judge([stopped(0), running(1)], "some line\n%s\nlast line\n" % words, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.reason) == ("FAILED_DRIVER", 125, words)


# --- cancel


@pytest.mark.parametrize("codes", [(143, 143), (0, 0), (9, 143), (137, 137)])
def test_a_cancelled_gang_is_cancelled_whatever_its_programs_return_l17(codes: tuple[int, int]) -> None:
    records = [stopped(number, code) for number, code in enumerate(codes)]
    verdict = judge(records, QUIET, was_cancelled=True)
    assert (verdict.state, verdict.exit_code, verdict.codes) == ("CANCELLED", 143, list(codes))


@pytest.mark.parametrize(
    "words",
    [
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
    ],
)
def test_a_step_that_slurm_ended_is_cancelled_in_slurms_words(words: str) -> None:
    verdict = judge([stopped(0), stopped(1)], "before\n%s\n" % words, was_cancelled=False)
    assert (verdict.state, verdict.exit_code, verdict.reason) == ("CANCELLED", 143, words)


def test_ranks_stopped_from_outside_without_a_word_are_cancelled() -> None:
    verdict = judge([stopped(0), stopped(1)], QUIET, was_cancelled=False)
    assert (verdict.state, verdict.exit_code) == ("CANCELLED", 143) and verdict.reason


def test_a_rank_that_had_not_begun_died_of_the_term_and_one_in_its_grace_of_the_kill() -> None:
    waiting, stopping = rank(1, protocol.RANK_WAITING), rank(2, protocol.RANK_STOPPING)
    assert judge([failed(0, 7, at=1.0), waiting, stopping, None], QUIET, False).codes == [7, 143, 137, 143]


def test_one_open_rank_beside_a_done_one_is_no_success_when_cancelled_h5() -> None:
    verdict = judge([done(0), rank(1, protocol.RANK_STOPPING)], QUIET, was_cancelled=True)
    assert (verdict.state, verdict.codes) == ("CANCELLED", [0, 137])


# --- numbers


@pytest.mark.parametrize("code", [1, 2, 125, 126, 127, 128, 193, 200, 255])
def test_a_code_that_means_no_signal_is_told_as_it_is_h11(code: int) -> None:
    assert protocol.describe_code(code) == "exit code %d" % code


@pytest.mark.parametrize("code, signal", [(129, 1), (130, 2), (137, 9), (143, 15), (192, 64)])
def test_a_code_that_may_mean_a_signal_names_it_h11(code: int, signal: int) -> None:
    assert protocol.describe_code(code) == "exit code %d, signal %d" % (code, signal)


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 128, 137, 200, 255])
def test_a_programs_own_code_is_kept_h11(code: int) -> None:
    assert exit_code(os.system("exit %d" % code)) == code


@pytest.mark.parametrize("signal", [1, 2, 9, 11, 15])
def test_a_program_ended_by_a_signal_gives_128_and_its_number_h11(signal: int) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "ulimit -c 0; kill -%d $$" % signal], os.environ)
    assert exit_code(os.waitpid(pid, 0)[1]) == 128 + signal
