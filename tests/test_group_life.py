"""How a group stands and what it is called: every order of ends, by one rule."""

from __future__ import annotations

import itertools

import pytest

from executor import protocol
from executor.group_life import Ended, Standing, first_failure, is_over, verdict_of

OK, BAD = protocol.SUCCEEDED, protocol.FAILED


def task(name: str, ended: Ended | None = None, primary: bool = True) -> Standing:
    return Standing(name, primary, ended)


def test_the_primary_that_failed_first_by_time_gives_state_and_code() -> None:
    tasks = [
        task("a", Ended(BAD, 7, 20.0, "rank 1 failed first")),
        task("b", Ended(protocol.FAILED_SETUP, 3, 10.0)),
        task("c", Ended(OK, 0, 5.0)),
        task("aux", Ended(BAD, 9, 1.0), primary=False),
    ]
    for order in itertools.permutations(tasks):
        verdict = verdict_of(order, was_cancelled=False)
        assert (verdict.state, verdict.exit_code) == (protocol.FAILED_SETUP, 3)
        assert verdict.reason == "b: exit code 3"


@pytest.mark.parametrize("code", [0, 9, 137, 143])
def test_an_auxiliarys_end_does_not_fail_the_group(code: int) -> None:
    tasks = [task("a", Ended(OK, 0, 5.0)), task("aux", Ended(BAD if code else OK, code, 1.0), primary=False)]
    assert verdict_of(tasks, was_cancelled=False).state == OK


def test_a_group_is_over_with_its_last_primary() -> None:
    done, going, aux = task("a", Ended(OK, 0, 1.0)), task("b"), task("aux", primary=False)
    assert not is_over([done, going, aux], True)
    assert is_over([done, aux], True)
    assert not is_over([task("a"), task("aux", Ended(BAD, 1, 1.0), primary=False)], True)


def test_a_failed_primary_ends_the_group_unless_the_others_are_to_go_on() -> None:
    tasks = [task("a", Ended(BAD, 1, 1.0)), task("b")]
    assert is_over(tasks, stops_on_primary_failure=True)
    assert not is_over(tasks, stops_on_primary_failure=False)


def test_who_was_stopped_because_of_a_failure_did_not_fail() -> None:
    tasks = [task("a", Ended(protocol.CANCELLED, 143, 1.0)), task("b", Ended(BAD, 4, 2.0))]
    failed = first_failure(tasks)
    assert failed and failed.name == "b"
    assert verdict_of(tasks, was_cancelled=False).exit_code == 4


def test_nothing_that_ends_after_a_cancel_is_a_success() -> None:
    tasks = [task("a", Ended(OK, 0, 1.0)), task("b", Ended(OK, 0, 2.0))]
    assert verdict_of(tasks, was_cancelled=True).state == protocol.CANCELLED
    assert verdict_of(tasks, was_cancelled=True, signal_number=2).exit_code == 130
    failed = [task("a", Ended(BAD, 5, 1.0)), task("b", Ended(protocol.CANCELLED, 143, 2.0))]
    assert verdict_of(failed, was_cancelled=True)[:2] == (BAD, 5)


def test_a_failure_without_a_code_is_not_called_0() -> None:
    assert verdict_of([task("a", Ended(protocol.FAILED_DRIVER, 0, 1.0))], was_cancelled=False).exit_code == 125
