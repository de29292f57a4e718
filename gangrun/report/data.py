"""A report as plain data, for programs. Times in seconds since 1970, on the head node's clock; lengths in seconds."""

from __future__ import annotations

from typing import Any

from gangrun.report.goodput import Goodput
from gangrun.report.model import Attempt, Stay
from gangrun.report.sentences import sentences
from gangrun.report.source import Chapter, Report


def to_json(report: Report) -> dict[str, Any]:
    """All of it: `tasks` has one entry, or one for each task of a group."""
    return {
        "run": report.name, "job": report.job, "state": report.state, "exit_code": report.exit_code,
        "reason": report.reason, "has_ended": report.has_ended, "num_nodes": report.num_nodes,
        "begin": report.begin, "end": report.end, "clock": report.clock, "skipped_lines": report.skipped,
        "goodput": goodput_json(report.goodput), "sentences": sentences(report),
        "tasks": [_chapter(chapter) for chapter in report.chapters],
    }  # fmt: skip


def goodput_json(goodput: Goodput) -> dict[str, Any]:
    """The sums, and the shares that follow from them."""
    sums = {name: _rounded(value) for name, value in goodput._asdict().items()}
    share, most = goodput.share, goodput.most_share
    return {**sums, "idle_s": _rounded(goodput.idle_s), "useful_share": share, "most_useful_share": most}


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _chapter(chapter: Chapter) -> dict[str, Any]:
    return {
        "task": chapter.label or chapter.timeline.task, "state": chapter.timeline.state,
        "exit_code": chapter.timeline.exit_code, "num_nodes": chapter.timeline.num_nodes,
        "goodput": goodput_json(chapter.goodput),
        "checkpoints": [{"time": mark.time, "step": mark.step, "cost_s": mark.cost_s} for mark in chapter.marks],
        "attempts": [_attempt(attempt) for attempt in chapter.timeline.attempts],
    }  # fmt: skip


def _attempt(attempt: Attempt) -> dict[str, Any]:
    told = {name: value for name, value in attempt._asdict().items() if name != "stays"}
    return {**told, "was_interrupted": attempt.was_interrupted, "ranks": [_stay(stay) for stay in attempt.stays]}


def _stay(stay: Stay) -> dict[str, Any]:
    spans = [{"phase": span.phase, "begin": span.begin, "end": span.end} for span in stay.spans]
    told = ("rank", "host", "state", "exit_code", "log", "why", "clock_s")
    return {**{name: getattr(stay, name) for name in told}, "spans": spans}
