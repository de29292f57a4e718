"""`gangrun report`: from events to spans, sums, sentences and lines, without a cluster; and `gangrun checkpoint`."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from codegen.spec import SpecError
from executor import protocol
from executor.protocol import GangrunError, UsageError
from executor.rank_events import RankEvents
from gangrun import checkpoint, cli, estimate
from gangrun.cluster import NotFound
from gangrun.records import Records, Run
from gangrun.report import goodput, model, text
from gangrun.report.data import to_json
from gangrun.report.model import Part, Span, Stay
from gangrun.report.page import page
from gangrun.report.sentences import MOST_SENTENCES, sentences
from gangrun.report.source import Report, compose, of_path, only
from gangrun.report.words import duration, percent, printable
from tests.report_cases import HOSTILE, T0, Story, failed, report_of, two_attempts

LOOK = text.Look(100)
SUMS = ("useful_s", "recomputed_s", "checkpoint_s", "setup_s", "waiting_s", "barrier_s", "lost_s", "idle_s")
ESCAPE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")


def shown(report: Report, look: text.Look = LOOK) -> str:
    return "\n".join(text.lines(report, look))


def phases(stay: Stay) -> list[tuple[str, float, float]]:
    """With times after T0."""
    return [(span.phase, round(span.begin - T0, 3), round(span.end - T0, 3)) for span in stay.spans]


def is_sound(report: Report) -> None:
    """What holds for every report, whatever it was made from."""
    for chapter in report.chapters:
        for attempt in chapter.timeline.attempts:
            assert attempt.submitted <= attempt.allocated <= attempt.granted <= attempt.begun <= attempt.ended
            for stay in attempt.stays:
                moments = [attempt.submitted, *(at for span in stay.spans for at in span[1:]), attempt.ended]
                assert moments == sorted(moments), stay
                assert all(span.length_s > 0 for span in stay.spans)
        sums = chapter.goodput
        whole = sum(getattr(sums, name) for name in SUMS)
        assert whole == pytest.approx(sums.machine_s, abs=1e-3) or sums.idle_s == 0 and whole >= sums.machine_s - 1e-3
        assert min(getattr(sums, name) for name in SUMS) >= 0
        assert sums.share is None or 0 <= sums.share <= (sums.most_share or 0) + 1e-9


# --- the timeline


class TestTimeline:
    def test_each_ranks_time_is_told_from_the_submission_to_the_end(self) -> None:
        story = Story(2)
        story.begin(40, queued_since=0)
        at = story.setup(42, {0: 10, 1: 30}) + 0.5
        story.go(at)
        story.end(at + 100.5, protocol.SUCCEEDED, 0, ends={0: at + 90, 1: at + 100}, begun=at)
        one, two = story.report().chapters[0].timeline.attempts[0].stays
        queued, waits = ("queued", 0.0, 40.0), ("waiting", 40.0, 42.0)
        assert phases(one) == [
            queued, waits, ("setup", 42.0, 52.0), ("waiting", 52.0, 72.5), ("run", 72.5, 162.5),
            ("barrier", 162.5, 173.0),
        ]  # fmt: skip
        assert phases(two) == [
            queued, waits, ("setup", 42.0, 72.0), ("waiting", 72.0, 72.5), ("run", 72.5, 172.5),
            ("barrier", 172.5, 173.0),
        ]  # fmt: skip

    @pytest.mark.parametrize("nodes", [1, 3, 64])
    def test_a_second_attempt_is_queued_from_the_end_of_the_first(self, nodes: int) -> None:
        report = two_attempts(nodes).report()
        is_sound(report)
        first, second = report.chapters[0].timeline.attempts
        assert (second.submitted, second.granted) == (first.ended, T0 + 900)
        assert (first.was_interrupted, second.was_interrupted) == (True, False)
        assert (report.state, report.has_ended, report.goodput.queue_s) == ("SUCCEEDED", True, 40 + 260)

    def test_a_job_that_runs_is_told_until_now(self) -> None:
        story = Story(2)
        story.begin(5, queued_since=0)
        story.go(6)
        report = story.report(now=66)
        is_sound(report)
        assert [phases(stay)[-1] for stay in report.chapters[0].timeline.attempts[0].stays] == [("run", 6.0, 66.0)] * 2
        assert not report.has_ended and "so far" in shown(report)

    def test_a_head_node_that_was_lost_ends_its_attempt_where_it_was_heard_of_last(self) -> None:
        story = Story(2)
        story.begin(5, queued_since=0)
        story.go(6)
        story.attempt = 1
        story.say(400, protocol.EVENT_DRIVER_LOST, seen=T0 + 90)
        story.begin(400, queued_since=0)
        story.go(401)
        story.end(500, protocol.SUCCEEDED, 0, begun=401)
        report = story.report()
        is_sound(report)
        first = report.chapters[0].timeline.attempts[0]
        assert (first.was_lost, first.ended) == (True, T0 + 90)
        assert any("The head node was lost in attempt 0" in sentence for sentence in sentences(report))

    def test_a_rank_that_left_no_word_ran_until_it_was_heard_of_last(self) -> None:
        story = Story(2)
        story.begin(5, queued_since=0)
        story.go(6)
        ends, states = {0: 100.0, 1: 60.0}, {1: (protocol.RANK_LOST, 125)}
        story.end(100, protocol.FAILED, 125, ends=ends, begun=6, states=states, reason="a node was lost")
        stay = story.report().chapters[0].timeline.attempts[0].stays[1]
        assert phases(stay)[-2:] == [("run", 6.0, 60.0), ("lost", 60.0, 100.0)]

    @pytest.mark.parametrize("skew_s", [-3000.0, -40.0, 40.0, 3000.0])
    def test_a_clock_that_differs_makes_no_span_negative_and_is_told(self, skew_s: float) -> None:
        story = Story(3)
        story.begin(5, queued_since=0)
        story.go(6, skew={1: skew_s})
        told = [json.loads(line) for line in story.lines]
        story.end(106, protocol.SUCCEEDED, 0, begun=6)
        story.lines[len(told) :] = [moved(line, 1, skew_s) for line in story.lines[len(told) :]]
        report = story.report()
        is_sound(report)
        stay = report.chapters[0].timeline.attempts[0].stays[1]
        assert stay.run and stay.run.length_s == pytest.approx(100, abs=1)
        assert stay.clock_s == pytest.approx(-skew_s, abs=1)  # what the order of the events demands, and no more
        way = "ahead of" if skew_s > 0 else "behind"
        assert any(f"The clock of n2 is {duration(abs(stay.clock_s))} {way}" in one for one in sentences(report))

    def test_where_slurm_has_not_told_the_client_knows_when_it_was_submitted(self) -> None:
        story = Story(1)
        story.begin(50)
        story.go(51)
        attempt = model.build(story.part(now=60), T0 + 10).attempts[0]
        assert (attempt.submitted, attempt.granted) == (T0 + 10, T0 + 50)


def moved(line: str, rank: int, skew_s: float) -> str:
    """An event as a node tells it whose clock differs."""
    event = json.loads(line)
    if event.get("rank") == rank:
        event.update(started=T0 + 6 + skew_s, ended=event["ended"] + skew_s)
    return json.dumps(event)


class TestDamagedEvents:
    LINES = (
        "{", '{"time": 1', "[]", "null", '"state"', "\x00\x00\x00", "\ufffd\ufffd", "1" * 5000, "[" * 100000,
        '{"time": NaN, "attempt": 0, "event": "state"}', '{"time": 1e400, "attempt": 0, "event": "state"}',
        '{"time": -5, "attempt": 0, "event": "state"}', '{"time": 1, "attempt": "0", "event": "state"}',
        '{"time": 1, "attempt": 0, "event": 7}', '{"time": 1, "attempt": 0, "event": "rank_ended", "rank": -1}',
        '{"time": 1, "attempt": 0, "event": "rank_ended", "rank": 1e9}', '{"attempt": 0, "event": "state"}',
    )  # fmt: skip

    @pytest.mark.parametrize("line", LINES, ids=lambda line: line[:20])
    def test_a_line_that_is_none_is_skipped_and_counted(self, line: str) -> None:
        story = two_attempts(2)
        good = shown(story.report())
        story.lines.insert(7, line)
        report = story.report()
        is_empty = not line.strip("\x00")
        assert report.skipped == (0 if is_empty else 1)
        assert report.goodput == two_attempts(2).report().goodput
        assert is_empty or "1 line of the records could not be read" in shown(report) != good

    def test_a_file_that_is_cut_anywhere_still_makes_a_report(self) -> None:
        part = two_attempts(2).part()
        for size in range(1, len(part.events), 97):
            report = report_of([part._replace(events=part.events[-size:])])
            is_sound(report)
            report = report_of([part._replace(events=part.events[:size])])
            is_sound(report)
            assert shown(report)

    @pytest.mark.parametrize("seed", range(60))
    def test_whatever_an_event_says_a_report_is_made(self, seed: int) -> None:
        rng = random.Random(seed)
        part = rng.choice([two_attempts(3), failed(3, 1, HOSTILE)]).part(now=2000)
        lines = [spoilt(line, rng) for line in part.events.splitlines() for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))]
        rng.shuffle(lines) if seed % 5 == 0 else None
        marks = "".join(
            rng.choice(("x y z\n", f"{T0 + rng.uniform(-99, 2000)} {rng.randrange(900)} 5\n")) for _ in "1234"
        )
        status = json.dumps(rng.choice([{}, [], {"num_nodes": "3", "driver": 7, "tasks": 8}, {"num_nodes": 2}]))
        found = part._replace(events="\n".join(lines), checkpoints=marks, status=status)
        report = report_of([found])
        is_sound(report)
        assert shown(report) and page(report) and json.dumps(to_json(report), allow_nan=False)


def spoilt(line: str, rng: random.Random) -> str:
    """An event of which now and then a value is of another kind."""
    event = json.loads(line)
    values = ["", "n9", -1, 0, 3.5, T0 + 5e8, 1e300, 10**400, None, [], {}, True, HOSTILE, [[1]], T0 + 700]
    for key in event:
        if rng.random() < 0.03:
            event[key] = rng.choice(values)
    return json.dumps(event)[: rng.choice((None,) * 20 + (30,))]


# --- goodput


class TestGoodput:
    def test_a_requeue_costs_what_came_after_the_last_checkpoint(self) -> None:
        story = Story(2)
        story.begin(10, queued_since=0)
        story.go(10)
        story.mark(40, 100, cost_s=5)
        story.end(60, protocol.PENDING, 143, begun=10)
        story.attempt = 1
        story.begin(100, queued_since=60)
        story.go(110)
        story.end(150, protocol.SUCCEEDED, 0, begun=110)
        found = story.report().goodput
        assert (found.machine_s, found.queue_s, found.waiting_s) == (50 + 50, 10 + 40, 10)
        assert (found.useful_s, found.checkpoint_s, found.recomputed_s) == (25 + 40, 5, 20)
        assert (found.share, found.interruptions, found.is_range) == (0.65, 1, False)

    def test_steps_that_a_mark_had_told_before_are_computed_again(self) -> None:
        """The checkpoint at step 200 was of no use: the second attempt went on from step 100."""
        story = Story(1)
        story.begin(0)
        story.go(0)
        for at, step in ((100, 100), (200, 200)):
            story.mark(at, step)
        story.end(250, protocol.PENDING, 143)
        story.attempt = 1
        story.begin(300)
        story.go(300)
        story.mark(300, 100)
        for at, step in ((400, 200), (500, 300)):
            story.mark(at, step)
        story.end(500, protocol.SUCCEEDED, 0, begun=300)
        found = story.report().goodput
        assert (found.useful_s, found.recomputed_s) == (200 + 100, 50 + 100)

    def test_marks_of_all_ranks_are_as_good_as_those_of_one(self) -> None:
        """Each notes its part of the same checkpoint, one after the other."""
        story = two_attempts(4)
        expected = story.report().goodput
        words = [mark.split() for mark in story.marks]
        story.marks += [f"{float(at) + late} {step}" for at, step, _ in words for late in (1, 2, 3)]
        found = story.report().goodput
        assert found.recomputed_s == pytest.approx(expected.recomputed_s - 3)  # the last part of the last one counts
        assert found.useful_s == pytest.approx(expected.useful_s + 3) and found.checkpoint_s == expected.checkpoint_s

    def test_the_share_is_that_of_gangrun_estimate(self) -> None:
        """Eight hours, a checkpoint each half hour that takes two minutes, three preemptions amid an interval."""
        plan = estimate.Plan(8 * 3600.0, 1800.0, 120.0, 2400.0)
        story, at, done = Story(4), 0.0, 0
        for attempt, until in enumerate((4, 9, 13, 16)):
            story.attempt = attempt
            story.begin(at, queued_since=at)
            story.go(at)
            begun = at
            for _ in range(until - done):
                at += 1800 + 120
                done += 1
                story.mark(at, done, 120)
            at += 900 if done < 16 else 0
            story.end(at, protocol.PENDING if done < 16 else protocol.SUCCEEDED, 0, begun=begun)
            at += 2400 if done < 16 else 0
        found, expected = story.report().goodput, estimate.with_count(plan, 3)
        assert (found.machine_s, found.queue_s) == (expected.machine_s, expected.wait_s)
        assert found.share == pytest.approx(expected.useful)

    def test_without_marks_nobody_knows_and_a_range_is_told(self) -> None:
        story = two_attempts(2)
        story.marks = []
        report = story.report()
        is_sound(report)
        assert report.goodput.is_range and (report.goodput.share or 0) < (report.goodput.most_share or 0)
        assert re.search(r"useful \d+ % to \d+ %", shown(report)) and "nobody knows how much" in shown(report)

    def test_a_clean_run_without_marks_is_no_range(self) -> None:
        story = Story(1)
        story.begin(0)
        story.go(10)
        story.end(100, protocol.SUCCEEDED, 0, begun=10)
        found = story.report().goodput
        assert (found.useful_s, found.share, found.is_range) == (90, 0.9, False)

    def test_lines_that_are_no_marks_are_skipped_and_counted(self) -> None:
        told = f"{T0 + 1} 5\nnonsense\n{T0 + 2}\n{T0 + 3} nan\n{T0 + 4} 9 1.5 0 3\n{T0 + 5} -3\n\n{T0:.0f},5 1\n"
        marks, skipped = goodput.read_marks(told)
        assert ([mark.step for mark in marks], skipped) == ([1, 5, 9], 4)
        story = two_attempts(1)
        story.marks.insert(1, "17986 torn")
        assert story.report().skipped == 1

    @pytest.mark.parametrize(
        "line, offset_s",
        [
            (f"{T0 + 60:.1f} saved step 40", 0.0),
            ("2027-01-15 08:01:00 INFO saved step 40", 0.0),
            ("2027-01-15 10:01:00,000 saved step 40", 7200.0),
            ("2027-01-15T08:01:00.000Z saved step 40", 7200.0),
            ("2027-01-15T03:01:00-05:00 saved step 40", 7200.0),
        ],
    )
    def test_a_log_tells_marks_by_seconds_or_by_dates(self, line: str, offset_s: float) -> None:
        pattern = goodput.compiled(r"^(?P<time>\S+( \d\S+)?).* saved step (?P<step>\d+)")
        assert goodput.marks_in(["noise", line], pattern, offset_s) == [goodput.Mark(T0 + 60, 40)]

    @pytest.mark.parametrize(
        "pattern, words",
        [("(", "use a regular expression"), ("saved", "no group time and no group step"), (r"(?P<time>\S+)", "step")],
    )
    def test_a_pattern_that_cannot_be_used_is_refused(self, pattern: str, words: str) -> None:
        with pytest.raises(SpecError, match=f"^--checkpoint-pattern=.*{words}"):
            goodput.compiled(pattern)

    def test_a_pattern_that_meets_no_time_is_refused(self) -> None:
        with pytest.raises(SpecError, match="its group time matches 'soon'"):
            goodput.marks_in(["soon: step 4"], goodput.compiled(r"(?P<time>\w+): step (?P<step>\d+)"), 0.0)

    def test_a_group_holds_its_allocation_while_its_tasks_come_and_go(self) -> None:
        report = group()
        is_sound(report)
        assert [chapter.label for chapter in report.chapters] == ["server", "client"]
        assert (report.goodput.machine_s, report.goodput.num_nodes) == (200, 3)
        assert report.goodput.useful_s == pytest.approx((190 * 1 + 90 * 2) / 3)
        assert report.goodput.idle_s == pytest.approx((10 + 2 * 110) / 3)

    def test_a_task_that_waits_for_its_turn_is_in_no_queue(self) -> None:
        """It started twice in the allocation: after another task, and again when it had failed."""
        whole, task = Story(1, "web-abcd2345"), Story(1, "web-abcd2345.train")
        whole.begin(60, queued_since=0)
        whole.state(60, protocol.RUNNING)
        whole.state(300, protocol.SUCCEEDED, exit_code=0, reason="")
        for begin, end, how in ((100, 150, protocol.FAILED), (160, 290, protocol.SUCCEEDED)):
            task.begin(begin)
            task.go(begin)
            task.end(end, how, 0, begun=begin)
        report = report_of([whole.part(), task.part()])
        is_sound(report)
        one, two = (attempt.stays[0] for attempt in report.chapters[0].timeline.attempts)
        assert phases(one) == [("queued", 0.0, 60.0), ("waiting", 60.0, 100.0), ("run", 100.0, 150.0)]
        assert phases(two) == [("waiting", 150.0, 160.0), ("run", 160.0, 290.0)]
        alone = report.chapters[0].goodput
        assert (alone.queue_s, alone.waiting_s, alone.machine_s) == (60, 0, 180)
        assert (report.goodput.machine_s, report.goodput.idle_s, report.goodput.queue_s) == (240, 60, 60)


class TestRestarts:
    """A task of a group that failed twice, and was started again in the same attempt of the job; then a requeue."""

    def test_no_two_attempts_have_one_name(self) -> None:
        task = restarted().chapters[0].timeline
        assert [one.label for one in task.attempts] == ["0", "0, restart 1", "0, restart 2", "1"]
        assert len({one.life for one in task.attempts}) == 4

    def test_restarts_are_counted_apart_from_attempts(self) -> None:
        report = restarted()
        is_sound(report)
        assert (report.goodput.attempts, report.goodput.restarts, report.goodput.interruptions) == (2, 2, 1)
        alone = only(report, "flaky")
        assert (alone.goodput.attempts, alone.goodput.restarts) == (2, 2)
        assert "1 task, 1 node, 2 attempts, 2 restarts" in shown(report)

    def test_a_rank_that_is_at_work_again_is_not_marked_as_failed(self) -> None:
        alone = only(restarted(), "flaky")
        assert "\n0 n1 " in shown(alone) and "0! n1" not in shown(alone)

    def test_the_failures_are_told_though_all_ended_well(self) -> None:
        (said,) = [one for one in sentences(restarted()) if "started again" in one]
        assert said == "flaky: It failed twice (the last time with exit code 3) and was started again."

    def test_the_page_names_each_of_them(self) -> None:
        text = page(restarted())
        for label in ("flaky 0", "flaky 0, restart 1", "flaky 0, restart 2", "flaky 1"):
            assert text.count(f"<td>{label}</td>") == 1
        data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        assert {span[3] for span in data["rows"][0]["spans"]} == {0, "0, restart 1", "0, restart 2", 1}

    def test_json_numbers_them(self) -> None:
        attempts = to_json(restarted())["tasks"][0]["attempts"]
        assert [(one["number"], one["restart"], one["life"]) for one in attempts] == [
            (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 3),
        ]  # fmt: skip


def restarted() -> Report:
    whole, task = Story(1, "web-abcd2345"), Story(1, "web-abcd2345.flaky")
    for attempt, begin in ((0, 0), (1, 200)):
        whole.attempt = attempt
        whole.begin(begin, queued_since=begin)
        whole.state(begin, protocol.RUNNING)
        end = protocol.SUCCEEDED if attempt else protocol.PENDING
        whole.state(begin + 150, end, exit_code=0, reason="")
    lives = (
        (0, 10, 40, 3, "FAILED"),
        (0, 41, 70, 3, "FAILED"),
        (0, 71, 150, 143, "PENDING"),
        (1, 210, 340, 0, "SUCCEEDED"),
    )
    for attempt, begin, end, code, how in lives:
        task.attempt = attempt
        task.begin(begin)
        task.go(begin + 1)
        failed_rank = {0: (protocol.RANK_FAILED, code)} if how == protocol.FAILED else None
        task.end(end, how, code, begun=begin + 1, states=failed_rank)
    return report_of([whole.part(tasks=[{"name": "flaky"}]), task.part()])


class TestTasksWithoutRecords:
    """Of a group's task that has not begun there are none; or somebody sent the group's own alone."""

    def test_a_task_that_waits_for_its_turn_is_told(self) -> None:
        whole, server = Story(3, "web-abcd2345"), Story(1, "web-abcd2345.server")
        whole.begin(0)
        whole.say(1, protocol.EVENT_TASK_STARTED, task="server", nodes=["n1"], restarts=0)
        whole.state(1, protocol.RUNNING)
        server.begin(1)
        server.go(2)
        tasks = [{"name": "server", "num_nodes": 1}, {"name": "client", "num_nodes": 2, "state": "PENDING"}]
        report = report_of([whole.part(now=50, tasks=tasks), server.part(now=50)])
        is_sound(report)
        assert [(one.label, one.timeline.state) for one in report.chapters] == [
            ("server", "RUNNING"),
            ("client", "PENDING"),
        ]
        waits = report.chapters[1].timeline.attempts[0].stays
        assert [phases(stay) for stay in waits] == [[("waiting", 0.0, 50.0)]] * 2
        assert "RUNNING: 2 tasks, 3 nodes" in shown(report) and "are not here" not in shown(report)

    @pytest.mark.parametrize("ended, state", [(None, "PENDING"), (300, "CANCELLED")])
    def test_a_task_that_has_begun_before_the_requeue_only_is_told(self, ended: float | None, state: str) -> None:
        whole, client = Story(1, "web-abcd2345"), Story(1, "web-abcd2345.client")
        whole.begin(0)
        whole.state(0, protocol.RUNNING)
        whole.state(100, protocol.PENDING, exit_code=143, reason="")
        client.begin(10)
        client.go(10)
        client.end(100, protocol.PENDING, 143, begun=10)
        whole.attempt = 1
        whole.begin(200, queued_since=100)
        whole.state(200, protocol.RUNNING)
        if ended:
            whole.state(ended, protocol.CANCELLED, exit_code=143, reason="")
        told = {"name": "client", "num_nodes": 1, "state": state, "exit_code": None}
        report = report_of([whole.part(now=300, tasks=[told]), client.part()])
        is_sound(report)
        task = report.chapters[0].timeline
        assert [(one.number, one.state) for one in task.attempts] == [(0, "PENDING"), (1, state)]
        assert phases(task.attempts[1].stays[0]) == [("queued", 100.0, 200.0), ("waiting", 200.0, 300.0)]
        assert only(report, "client").has_ended == bool(ended)

    @pytest.mark.parametrize("has_status", [True, False])
    def test_a_group_whose_tasks_were_left_behind_is_told_by_its_own_events(self, has_status: bool) -> None:
        whole = Story(3, "web-abcd2345")
        whole.begin(0)
        whole.state(0, protocol.RUNNING)
        starts = (
            (5, 100, "server", ["n1"], 0),
            (10, 30, "client", ["n2", "n3"], 0),
            (40, 99, "client", ["n2", "n3"], 1),
        )
        for begin, end, name, nodes, restart in starts:
            whole.say(begin, protocol.EVENT_TASK_STARTED, task=name, nodes=nodes, restarts=restart)
            how = (
                {"state": protocol.FAILED, "exit_code": 3}
                if restart == 0 and name == "client"
                else {"state": "SUCCEEDED"}
            )
            whole.say(end, protocol.EVENT_TASK_ENDED, task=name, **how)
        whole.state(100, protocol.SUCCEEDED, exit_code=0, reason="")
        part = whole.part(tasks=[{"name": "server"}, {"name": "client"}])
        report = report_of([part if has_status else part._replace(status="")])
        is_sound(report)
        assert (report.num_nodes, [one.label for one in report.chapters]) == (3, ["server", "client"])
        server, client = (one.timeline.attempts for one in report.chapters)
        assert phases(server[0].stays[0]) == [("waiting", 0.0, 5.0), ("run", 5.0, 100.0)]
        assert [one.label for one in client] == ["0", "0, restart 1"] and client[0].exit_code == 3
        assert any("The records of server, client, in directories" in one for one in sentences(report))

    def test_a_size_that_no_cluster_has_is_not_believed(self) -> None:
        tasks = [{"name": "a", "num_nodes": 1 << 30}, {"name": "b", "num_nodes": "x"}, {"name": None}, 7]
        story = two_attempts(2)
        assert shown(report_of([story.part(num_nodes=1 << 30)])) and shown(report_of([story.part(tasks=tasks)]))


class TestQueuedAgain:
    def test_a_requeued_run_waits_until_now(self) -> None:
        story = two_attempts(2)
        del story.lines[story.lines.index(next(line for line in story.lines if '"attempt": 1' in line)) :]
        report = compose([story.part()], None, 0.0, None, queued_until=T0 + 1000)
        is_sound(report)
        assert (report.state, report.waits_s, report.end - T0) == (protocol.PENDING, 360.0, 1000.0)
        assert phases(report.chapters[0].timeline.attempts[1].stays[0]) == [("queued", 640.0, 1000.0)]
        assert report.goodput.queue_s == 40 + 360
        assert sentences(report)[0] == "It waits in the queue again, for 6m now; `gangrun explain` says why."

    def test_so_does_a_task_of_a_group(self) -> None:
        whole, task = (Story(1, "web-abcd2345" + name) for name in ("", ".train"))
        for story in (whole, task):
            story.begin(10, queued_since=0)
            story.go(10)
            story.end(100, protocol.PENDING, 143, begun=10)
        parts = [whole.part(tasks=[{"name": "train"}]), task.part()]
        report = compose(parts, None, 0.0, None, queued_until=T0 + 150)
        is_sound(report)
        assert phases(report.chapters[0].timeline.attempts[1].stays[0]) == [("queued", 100.0, 150.0)]
        assert (report.waits_s, report.goodput.queue_s) == (50, 60)
        ended = only(report._replace(state="CANCELLED", has_ended=True), "train")
        assert (ended.state, ended.has_ended) == ("LOST", True)

    def test_where_nobody_knows_it_is_not_claimed(self) -> None:
        story = two_attempts(2)
        del story.lines[story.lines.index(next(line for line in story.lines if '"attempt": 1' in line)) :]
        assert (story.report().waits_s, len(story.report().chapters[0].timeline.attempts)) == (None, 1)

    def test_one_that_has_ended_waits_for_nothing(self) -> None:
        report = compose([two_attempts(2).part()], None, 0.0, None, queued_until=T0 + 9000)
        assert (report.waits_s, report.goodput.attempts) == (None, 2)


def group(server: str = "server", state: str = protocol.SUCCEEDED) -> Report:
    """A server on one node for 190 s of 200 s, a client on two for 90 s."""
    whole = Story(3, "web-abcd2345")
    whole.begin(0)
    whole.state(0, protocol.RUNNING)
    whole.state(200, state, exit_code=0, reason="")
    parts = [whole.part(tasks=[{"name": server}, {"name": "client"}])]
    for name, nodes, begin, end, how in ((server, 1, 5, 195, "CANCELLED"), ("client", 2, 50, 140, "SUCCEEDED")):
        story = Story(nodes, f"web-abcd2345.{name}")
        story.begin(begin)
        story.go(begin)
        story.end(end, how, 0, begun=begin)
        parts.append(story.part())
    return report_of(parts)


# --- sentences


class TestSentences:
    def test_the_rank_with_the_slow_setup_is_named(self) -> None:
        said = sentences(two_attempts(64, slow=5).report())
        held = "Rank 5 on n6 held the others up for 41 s in attempt 0"
        assert f"{held}: its setup took 2.8 times the median (1m 4s, not 23 s)." in said

    def test_a_rank_that_started_late_is_named(self) -> None:
        story = Story(4)
        story.begin(0)
        story.go(2, skew={3: 41.0})
        story.end(400, protocol.SUCCEEDED, 0, begun=2)
        story.lines = [line.replace(f'"started": {T0 + 2}', f'"started": {T0 + 43}') if '"rank": 3' in line else line
                       for line in story.lines]  # fmt: skip
        assert sentences(story.report())[0] == "Rank 3 on n4 started 41 s after the others."

    def test_who_failed_first_comes_first(self) -> None:
        said = sentences(failed(4, 2).report())
        assert said[0] == (
            "Rank 2 on n3 failed first, 5m after its script began (exit code 7); 3 other ranks were stopped for it."
        )

    def test_the_last_rank_at_the_barrier_is_named(self) -> None:
        story = Story(4)
        story.begin(0)
        story.go(1)
        story.end(500, protocol.SUCCEEDED, 0, ends={0: 499, 1: 300, 2: 301, 3: 302}, begun=1)
        assert sentences(story.report())[0].startswith("Rank 0 on n1 was the last to end: half of the ranks waited")

    def test_nodes_of_a_group_on_which_nothing_ran_are_told(self) -> None:
        said = sentences(group())
        assert "For 38 % of the machine time nothing ran on the nodes, most of it on those of client." in said

    def test_costly_checkpoints_are_told(self) -> None:
        story = Story(2)
        story.begin(0)
        story.go(0)
        for number in range(1, 10):
            story.mark(number * 100, number, 30)
        story.end(910, protocol.SUCCEEDED, 0)
        assert "9 checkpoints took 30 % of the running time, 30 s each" in sentences(story.report())[0]

    def test_work_that_is_not_saved_yet_is_told(self) -> None:
        story = Story(2)
        story.begin(0)
        story.go(0)
        story.mark(100, 5)
        assert "1m 40s of work is not in a checkpoint yet." in sentences(story.report(now=200))

    def test_a_run_without_trouble_says_so(self) -> None:
        story = Story(2)
        story.begin(0)
        story.go(1)
        story.end(500, protocol.SUCCEEDED, 0, begun=1)
        assert sentences(story.report()) == ["Nothing stands out: the scripts had 99.8 % of the machine time."]

    def test_a_cancelled_run_says_why_it_ended_and_what_is_unsafe(self) -> None:
        story = Story(2)
        story.begin(0, queued_since=0)
        story.go(0)
        story.end(200, protocol.CANCELLED, 143, reason="cancelled by signal 15 (DUE TO TIME LIMIT)")
        assert sentences(story.report()) == [
            "It is CANCELLED: cancelled by signal 15 (DUE TO TIME LIMIT).",
            "Nobody knows how much of 3m 20s of work was saved: let the script note its checkpoints "
            "(`gangrun checkpoint STEP`).",
        ]
        story.mark(50, 1)
        assert sentences(story.report())[1] == "2m 30s of work came after the last checkpoint and was lost."

    def test_scripts_that_ran_had_the_machine_time_though_what_they_did_may_be_lost(self) -> None:
        story = Story(2)
        story.begin(0, queued_since=0)
        story.go(0)
        story.end(50, protocol.CANCELLED, 143)
        assert sentences(story.report()) == ["Nothing stands out: the scripts had 100 % of the machine time."]

    def test_a_heavier_finding_comes_before_a_lighter_one(self) -> None:
        """One rank is slow in setup, another at the end: whoever cost more is named first."""

        def said(setup_s: float, end_s: float) -> list[str]:
            story = Story(4)
            story.begin(0)
            at = story.setup(0, {0: 10, 1: 10, 2: 10 + setup_s, 3: 10})
            story.go(at)
            story.end(at + 900 + end_s, protocol.SUCCEEDED, 0, ends={0: at + 900 + end_s}, begun=at)
            ends = {0: at + 900 + end_s, **dict.fromkeys((1, 2, 3), at + 900.0)}
            story.lines = story.lines[: -2 - 4]
            story.end(at + 900 + end_s, protocol.SUCCEEDED, 0, ends=ends, begun=at)
            return sentences(story.report())[:2]

        assert said(200, 50)[0].startswith("Rank 2 on n3 held the others up")
        assert said(50, 200)[0].startswith("Rank 0 on n1 was the last to end")

    @pytest.mark.parametrize("nodes", [1, 64, 1000])
    def test_there_are_at_most_three(self, nodes: int) -> None:
        assert 1 <= len(sentences(two_attempts(nodes).report())) <= MOST_SENTENCES


# --- lines for a terminal


class TestText:
    @pytest.mark.parametrize("nodes", [1, 16, 64, 1000])
    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_a_timeline_fits_its_terminal(self, nodes: int, width: int) -> None:
        chart = chart_of(two_attempts(nodes, slow=nodes // 2).report(), text.Look(width))
        assert all(len(line) <= max(width, 50) for line in chart[:-1]) and len(chart) < 22

    def test_many_ranks_are_put_together_and_the_odd_ones_stand_alone(self) -> None:
        chart = chart_of(two_attempts(1000, slow=700).report())
        assert [line.split("  ")[0] for line in chart[1:3]] == ["700 n701", "999 other ranks"]

    def test_of_many_ranks_the_one_that_failed_is_first(self) -> None:
        assert chart_of(failed(1000, 321).report())[1].startswith("321! n322")

    def test_each_column_shows_what_was_done_in_most_of_it(self) -> None:
        rows = [[Span("setup", 0, 30), Span("run", 30, 100)], [Span("setup", 0, 20), Span("run", 20, 100)]]
        assert text.cells(rows, 0, 100, 10) == ["setup"] * 3 + ["run"] * 7
        assert text.cells([[Span("run", 50, 100)]], 0, 100, 4) == [None, None, "run", "run"]

    def test_lost_work_is_told_apart_where_checkpoints_are_known(self) -> None:
        story = two_attempts(2)
        assert "▚" in chart_of(story.report())[1]
        story.marks = []
        assert "▚" not in shown(story.report())

    @pytest.mark.parametrize("width", [30, 40, 60, 80])
    def test_on_a_terminal_no_word_is_cut_and_no_sign_stands_alone(self, width: int) -> None:
        report = two_attempts(3, slow=1).report()
        wrapped = text.lines(report, text.Look(width, wraps=True))
        totals = [line for line in wrapped if line.startswith(("machine", "  "))]
        assert all(len(line) <= width for line in wrapped if line not in totals), wrapped
        whole = text.lines(report, text.Look(width))
        assert " ".join(" ".join(wrapped).split()) == " ".join(" ".join(whole).split())
        for name in ("run", "work lost", "checkpoint"):
            assert any(re.search(rf"\S {name}\b", line) for line in wrapped)

    def test_a_plain_terminal_gets_plain_signs(self) -> None:
        for report in (two_attempts(3).report(), failed(20, 3).report(), group()):
            assert "\n".join(text.lines(report, text.Look(90, is_ascii=True))).isascii()

    def test_colours_add_nothing_but_colours(self) -> None:
        report = two_attempts(3).report()
        painted = text.lines(report, text.Look(90, paint=lambda words, colour: f"\x1b[1m{words}\x1b[0m"))
        assert re.sub(r"\x1b\[\dm", "", "\n".join(painted)) == shown(report, text.Look(90))

    def test_a_hostile_name_neither_moves_the_cursor_nor_turns_the_line(self) -> None:
        story = failed(3, 1, HOSTILE, name="x\x1b]0;gotcha\x07y\n\rz")
        report = story.report()
        assert not ESCAPE.search(shown(report)) and "alert(1)" in shown(report)
        assert not ESCAPE.search(shown(group("a\x1b[2Jb\u202e")))

    def test_a_group_has_a_bar_for_each_task(self) -> None:
        chart = chart_of(group())
        assert [line.split()[0] for line in chart[1:3]] == ["server", "client"]
        assert "2 tasks, 3 nodes, 1 attempt" in shown(group())

    def test_a_thousand_ranks_take_a_moment(self) -> None:
        began = time.process_time()
        report = two_attempts(1000).report()
        assert shown(report) and page(report)
        assert time.process_time() - began < 5

    @pytest.mark.parametrize(
        "seconds, words",
        [
            (0, "0.00 s"), (0.994, "0.99 s"), (9.94, "9.9 s"), (41, "41 s"), (200, "3m 20s"), (7500, "2h 5m"),
            (97200, "1d 3h"),
        ],
    )  # fmt: skip
    def test_durations_are_short(self, seconds: float, words: str) -> None:
        assert duration(seconds) == words

    def test_all_is_only_all(self) -> None:
        assert [percent(share) for share in (1.0, 0.9999, 0.86, 0.004)] == ["100 %", "99.9 %", "86 %", "0.4 %"]

    def test_what_is_printable_keeps_its_words(self) -> None:
        assert printable("a\x1b[31mb\x1b[0m\tc\u202ed  é") == "ab c d é"


def chart_of(report: Report, look: text.Look = LOOK) -> list[str]:
    """The lines between the title and the totals: the axis first, the legend last."""
    lines = text.lines(report, look)
    return lines[2 : lines.index("", 2)]


# --- the verb, on files that are here


def gangrun(*args: str) -> Any:
    return CliRunner().invoke(cli.cli, args, standalone_mode=False)


@pytest.fixture(autouse=True)
def _no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have records of runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def job_directory(tmp_path: Path) -> Path:
    return write_job(two_attempts(3, slow=1).part(), tmp_path / "4711" / "train")


def write_job(part: Part, directory: Path) -> Path:
    directory.mkdir(parents=True)
    names = {protocol.STATUS_NAME: part.status, protocol.EVENTS_NAME: part.events}
    for name, content in {**names, protocol.CHECKPOINTS_NAME: part.checkpoints}.items():
        (directory / name).write_text(content)
    return directory


class TestVerb:
    def test_a_directory_is_reported(self, job_directory: Path) -> None:
        done = gangrun("report", str(job_directory))
        assert done.exit_code == 0 and "train (job 4711) SUCCEEDED: 3 nodes, 2 attempts, 24m 46s" in done.output

    def test_an_events_file_alone_is_reported(self, job_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(job_directory)
        done = gangrun("report", protocol.EVENTS_NAME)
        assert done.exit_code == 0 and "SUCCEEDED: 3 nodes, 2 attempts, 24m 46s" in done.output

    def test_json_has_all_of_it_and_nothing_else_is_printed(self, job_directory: Path) -> None:
        found = json.loads(gangrun("report", str(job_directory), "--json").output)
        assert (found["state"], found["goodput"]["interruptions"], len(found["tasks"][0]["checkpoints"])) == (
            "SUCCEEDED", 1, 8,
        )  # fmt: skip
        ranks = found["tasks"][0]["attempts"][0]["ranks"]
        assert ranks[1]["spans"][0] == {"phase": "queued", "begin": T0, "end": T0 + 40}

    def test_a_page_is_written(self, job_directory: Path, tmp_path: Path) -> None:
        done = gangrun("report", str(job_directory), "--html", str(tmp_path / "page.html"))
        assert (done.exit_code, done.output) == (0, "")
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
        (tmp_path / "page.html").chmod(0o640)
        (tmp_path / "link.html").symlink_to("page.html")
        assert gangrun("report", str(job_directory), "--html", str(tmp_path / "link.html")).exit_code == 0
        assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640

    def test_checkpoints_are_found_in_rank_0s_log(self, job_directory: Path, tmp_path: Path) -> None:
        (job_directory / protocol.CHECKPOINTS_NAME).unlink()
        status = json.loads((job_directory / protocol.STATUS_NAME).read_text())
        logs = tmp_path / "my [logs]"
        logs.mkdir()
        (logs / "0-head.log").write_text(f"hello\n{T0 + 300:.0f} saved 7\n{T0 + 400:.0f} saved 9\n")
        ranks = [{"log": "0-head.log", "state": "done"}]
        (job_directory / protocol.STATUS_NAME).write_text(json.dumps({**status, "log_dir": str(logs), "ranks": ranks}))
        pattern = r"(?P<time>\S+) saved (?P<step>\d+)"
        found = json.loads(gangrun("report", str(job_directory), "--json", "--checkpoint-pattern", pattern).output)
        assert [mark["step"] for mark in found["tasks"][0]["checkpoints"]] == [7, 9]

    def test_a_log_without_lines_is_searched_in_pieces(self, tmp_path: Path) -> None:
        path = tmp_path / "run.log"
        with open(path, "wb") as file:
            file.write(b"\n7 saved 1\n")
            file.truncate(400 << 20)  # zeros, and no disk
        code = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20));"
            "from gangrun import agent; print(agent.matching(sys.argv[1], 'saved'))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
        assert done.stdout == "['7 saved 1']\n", done.stderr[-500:]

    def test_a_pattern_that_matches_nothing_is_told(self, job_directory: Path) -> None:
        pattern = "(?P<time>x)(?P<step>y)"
        done = gangrun("report", str(job_directory), "--checkpoint-pattern", pattern)
        assert done.exit_code == 0 and "no line of rank 0's log matches" in done.stderr

    @pytest.mark.parametrize(
        "make, words",
        [
            (lambda path: "no/such/file", "no such file or directory"),
            (lambda path: "nobody", "is recorded here.*of any other job give its directory"),
            (lambda path: str(path), "no events are there"),
            (lambda path: str(empty_file(path)), "no events are there"),
            (lambda path: "/etc/passwd", "no events are there"),
        ],
    )
    def test_a_path_without_events_is_refused(self, make: Callable[[Path], str], words: str, tmp_path: Path) -> None:
        done = gangrun("report", make(tmp_path))
        assert isinstance(done.exception, GangrunError) and re.search(words, str(done.exception))
        assert done.exception.exit_code in (protocol.EXIT_USAGE, NotFound.exit_code)

    def test_a_page_on_standard_output(
        self, job_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = gangrun("report", str(job_directory), "--html", "-")
        assert done.output.startswith("<!doctype html>") and not Path("-").exists()
        done = gangrun("report", str(job_directory), "--html", "-", "--json")
        assert isinstance(done.exception, SpecError) and "--html='-'" in str(done.exception)

    def test_a_full_disk_leaves_the_page_that_was_there(
        self, job_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "page.html"
        path.write_text("as it was")
        limit = "ulimit -f 4; trap '' XFSZ; exec "  # blocks of 512 or 1024 bytes: less than a page
        words = [sys.executable, "-m", "gangrun", "report", str(job_directory), "--html", str(path)]
        done = subprocess.run(["sh", "-c", limit + shlex.join(words)], capture_output=True, text=True, timeout=30)
        assert done.returncode == protocol.EXIT_USAGE and "File too large" in done.stderr
        assert path.read_text() == "as it was" and [one.name for one in tmp_path.glob("page*")] == ["page.html"]

    def test_a_pipe_gets_the_page(self, job_directory: Path) -> None:
        words = [sys.executable, "-m", "gangrun", "report", str(job_directory), "--html", "/dev/stdout"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert done.stdout.startswith("<!doctype html>"), done.stderr

    @pytest.mark.parametrize("name", [protocol.EVENTS_NAME, protocol.STATUS_NAME, protocol.CHECKPOINTS_NAME])
    def test_a_pipe_among_the_records_is_waited_for_by_nobody(self, name: str, job_directory: Path) -> None:
        (job_directory / name).unlink()
        os.mkfifo(job_directory / name)
        words = [sys.executable, "-m", "gangrun", "report", str(job_directory)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        assert done.returncode == (protocol.EXIT_USAGE if name == protocol.EVENTS_NAME else 0), done.stderr

    def test_of_a_run_on_ray_it_says_where_a_report_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        run = Run("train-aaaa2222", "train", host="http://127.0.0.1:8265", root="~", job="train-aaaa2222", num_nodes=1)
        Records.of_user().put(run)
        done = gangrun("report", "train")
        assert isinstance(done.exception, SpecError)
        assert "lie on the head node; use `gangrun report ~/.gangrun/ray/train-aaaa2222` there" in str(done.exception)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
    def test_what_may_not_be_read_is_not_called_empty(self) -> None:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.chmod(folder, 0o755)
            job = write_job(two_attempts(1).part(), Path(folder) / "job")
            (job / protocol.EVENTS_NAME).chmod(0o600)
            os.seteuid(65534)
            try:
                with pytest.raises(SpecError, match=f"cannot read .*{protocol.EVENTS_NAME}: Permission denied"):
                    of_path(str(job), None)
            finally:
                os.seteuid(0)

    def test_a_page_that_cannot_be_written_is_told(self, job_directory: Path) -> None:
        done = gangrun("report", str(job_directory), "--html", "/no/such/place.html")
        assert isinstance(done.exception, SpecError) and "--html=" in str(done.exception)

    def test_a_task_of_a_job_that_is_no_group_is_refused(self, job_directory: Path) -> None:
        done = gangrun("report", str(job_directory), "server")
        assert "it is not a group" in str(done.exception)

    def test_logs_of_failed_ranks_are_read_from_names_that_are_logs_only(self, tmp_path: Path) -> None:
        story = failed(2, 1)
        logs = tmp_path / "logs"
        logs.mkdir()
        (logs / "1-worker1.log").write_text("x\n" * 5000 + "boom\n")
        (tmp_path / "secret").write_text("s3cr3t")
        ranks = [{"log": "1-worker1.log", "state": "failed"}, {"log": "../secret", "state": "failed"}]
        write_job(story.part(log_dir=str(logs), ranks=ranks), tmp_path / "job")
        found = of_path(str(tmp_path / "job"), None)
        assert list(found.chapters[0].tails) == ["1-worker1.log"]
        assert found.chapters[0].tails["1-worker1.log"].endswith("boom\n")


def empty_file(folder: Path) -> Path:
    path = folder / "events"
    path.write_text("\n")
    return path


# --- gangrun checkpoint


class TestCheckpoint:
    ENVIRON = {protocol.ENV_ATTEMPT: "2", protocol.ENV_NODE_RANK: "3"}

    def environ(self, path: Path) -> dict[str, str]:
        return {**self.ENVIRON, protocol.ENV_CHECKPOINTS: str(path)}

    def test_a_mark_is_one_line_that_the_report_reads(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoints"
        checkpoint.note("1200", "12.5", self.environ(path))
        checkpoint.note("1300", None, self.environ(path))
        (one, two), skipped = goodput.read_marks(path.read_text())
        assert (one.step, one.cost_s, one.attempt, two.step, two.cost_s, skipped) == (1200, 12.5, 2, 1300, 0, 0)
        assert abs(one.time - time.time()) < 5 and path.read_text().split()[4] == "3"

    @pytest.mark.parametrize(
        "step, cost", [("x", None), ("-1", None), ("nan", None), ("1e16", None), ("1", "soon"), ("1_0", "1")]
    )
    def test_what_is_no_number_is_refused(self, step: str, cost: str | None, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="use a number"):
            checkpoint.note(step, cost, self.environ(tmp_path / "file"))
        assert not (tmp_path / "file").exists()

    def test_outside_of_a_job_it_says_so(self) -> None:
        with pytest.raises(UsageError, match="this is no part of a job"):
            checkpoint.note("1", None, {})

    def test_a_line_that_was_cut_by_a_full_disk_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        environ = {protocol.ENV_CHECKPOINTS: str(tmp_path / "marks")}
        answers = iter([lambda fd, data: len(data) - 3, lambda fd, data: (_ for _ in ()).throw(OSError(28, "full"))])
        monkeypatch.setattr(checkpoint.os, "write", lambda fd, data: next(answers)(fd, data))
        with pytest.raises(GangrunError, match="full"):
            checkpoint.note("7", None, environ)

    def test_a_full_disk_is_told(self) -> None:
        with pytest.raises(GangrunError, match="No space left on device"):
            checkpoint.note("1", None, self.environ(Path("/dev/full")))

    def test_many_ranks_may_call_it_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoints"
        code = "import os, sys; from gangrun.checkpoint import note\nfor step in range(200): note(str(step), '1')"
        ranks = [subprocess.Popen([sys.executable, "-c", code], env=self.environ(path)) for _ in range(4)]
        assert [rank.wait(60) for rank in ranks] == [0] * 4
        marks, skipped = goodput.read_marks(path.read_text())
        assert (len(marks), skipped) == (800, 0)

    def test_it_is_as_cheap_as_a_start_of_python_can_be(self, tmp_path: Path) -> None:
        """A script waits for it: nothing heavy is loaded."""
        code = (
            "import sys; from gangrun import cli\ntry: cli.cli(['checkpoint', '5'], standalone_mode=False)\n"
            "except SystemExit: pass\nprint(*sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environ(tmp_path / "f"), capture_output=True, text=True
        )
        heavy = {"jinja2", "yaml", "rich", "codegen", "dataclasses", "subprocess", "asyncio", "gangrun.report"}
        assert done.returncode == 0 and (tmp_path / "f").exists(), done.stderr
        assert set(done.stdout.split()) & heavy == set()

    def test_the_clock_of_a_script_that_is_off_a_little_loses_no_mark(self) -> None:
        story = two_attempts(1)
        story.marks = [f"{T0 + 102} 1"]
        assert math.isfinite(story.report().goodput.useful_s) and story.report().goodput.marks == 1


# --- what the driver writes


class TestRankEvents:
    """Records as ranks write them, from one look of the driver to the next."""

    def record(self, **fields: Any) -> dict[str, Any]:
        return {"node": "head", "host": "n1", "joined": 1.0, "started": None, "state": "waiting", **fields}

    def test_each_begin_and_each_end_is_told_once(self) -> None:
        events = RankEvents(lambda: 50.0)
        runs, done = (
            self.record(started=2.0, state="running"),
            self.record(started=2.0, state="done", code=0, ended=9.0),
        )
        assert events.news("run", [None, self.record()]) == []
        assert [(name, told["rank"]) for name, told in events.news("run", [runs, self.record()])] == [
            ("rank_started", 0)
        ]
        assert events.news("run", [runs, self.record()]) == []
        (told,) = events.news("run", [done, self.record()])
        assert told == ("rank_done", {"step": "run", "rank": 0, "state": "done", "exit_code": 0, "ended": 9.0})
        assert events.news("run", [done, self.record()]) == []

    def test_the_end_of_the_last_rank_is_left_to_the_end_of_the_attempt_but_not_in_setup(self) -> None:
        done = [self.record(started=2.0, state="done", code=0, ended=9.0)]
        assert [name for name, _ in RankEvents().news("run", done)] == ["rank_started"]
        assert [name for name, _ in RankEvents().news("setup", done)] == ["rank_started", "rank_done"]

    def test_a_rank_was_heard_when_its_record_changed_last(self) -> None:
        times = iter((10.0, 20.0))
        events = RankEvents(lambda: next(times))
        events.news("run", [self.record(beat=1)])
        events.news("run", [self.record(beat=1)])
        assert (events.heard(0), events.heard(1)) == (10.0, None)
        events.news("run", [self.record(beat=2)])
        assert events.heard(0) == 20.0


# --- docs/report.md

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "report.md").read_text()


class TestDocument:
    def test_its_pattern_finds_what_it_says(self) -> None:
        (pattern,) = re.findall(r"--checkpoint-pattern '(.+)'", DOCUMENT)
        lines = ["2027-01-15 08:01:00 INFO saved step 40 in 2.5 s", "2027-01-15 08:02:00 INFO saved step 80"]
        found = goodput.marks_in(lines, goodput.compiled(pattern), 0.0)
        assert found == [goodput.Mark(T0 + 60, 40, 2.5), goodput.Mark(T0 + 120, 80)]

    def test_the_line_that_a_script_may_append_is_a_mark(self, tmp_path: Path) -> None:
        (line,) = re.findall(r"^(echo .+?)  +#", DOCUMENT, re.M)
        path = tmp_path / "a file"
        environ = {"GANGRUN_CHECKPOINTS": str(path), "step": "70", "PATH": "/usr/bin:/bin"}
        subprocess.run(["bash", "-c", line], env=environ, check=True)
        marks, skipped = goodput.read_marks(path.read_text())
        assert ([mark.step for mark in marks], skipped) == ([70], 0) and abs(marks[0].time - time.time()) < 5

    def test_it_names_every_phase_and_every_row(self) -> None:
        rows = [
            name for name, _ in text.total_rows(goodput.Goodput(*[1.0] * 10, 1, 1, 1, 1, True)._replace(machine_s=99))
        ]
        assert [word for word in (*text.SHOWN, *rows) if word not in DOCUMENT] == []
