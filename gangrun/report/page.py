"""A report as one page of HTML: no network, nothing of the run's own words is markup. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from codegen.render import render_page, template_text
from executor import protocol
from gangrun.explain.phrases import counted
from gangrun.report.goodput import Goodput
from gangrun.report.model import Attempt, Span, Stay
from gangrun.report.sentences import sentences
from gangrun.report.source import Chapter, Report
from gangrun.report.text import QUEUE_ROW, REDONE, SHOWN, each_node, shown_spans, starts, total_rows, worst_first
from gangrun.report.words import duration, percent, plain_lines, printable, ticks

UNITS = 10000  # the width of the whole time
MOST_TICKS = 10
LAST_TICK = 0.93  # the words of one after it stand on its left
MANY_RANKS = 40  # of which the worst come first
MOST_WORST = 12
MOODS = {protocol.SUCCEEDED: "good", protocol.RUNNING: "", protocol.PENDING: "", protocol.SETTING_UP: ""}
UNWELL = (protocol.RANK_FAILED, protocol.RANK_BROKEN, protocol.RANK_LOST)
SLUGS = {
    f"{REDONE}, if nothing was saved": "work-lost",
    "waiting to start": "waiting",
    QUEUE_ROW: "queued",
}


def page(report: Report) -> str:
    """The whole text of the file."""
    style, script = template_text("report.css"), template_text("report.js")
    frame = _Frame(report)
    chapters = [_chapter(chapter, report, frame) for chapter in report.chapters]
    return render_page(
        "report.html.j2",
        page=_words(report, chapters, frame),
        data=_as_script(frame.data()),
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script),
    )  # fmt: skip


def _hash(text: str) -> str:
    """As the page's own policy names what it trusts (https://www.w3.org/TR/CSP3/#grammardef-hash-source)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_script(value: object) -> str:
    """JSON that cannot end the script element it stands in, whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Frame:
    """Where times are on the page; collects what the script needs of each row."""

    def __init__(self, report: Report) -> None:
        self.begin = report.begin
        self.length_s = max(report.end - report.begin, 1e-3)
        self.rows: list[dict[str, Any]] = []

    def at(self, moment: float) -> float:
        return round(min(1.0, max(0.0, (moment - self.begin) / self.length_s)) * UNITS, 2)

    def add(self, label: str, note: str, spans: Sequence[tuple[Span, int | str]]) -> int:
        told = [
            (SHOWN.index(span.phase), round(span.begin - self.begin, 3), round(span.end - self.begin, 3), attempt)
            for span, attempt in spans
        ]
        self.rows.append({"label": label, "note": note, "spans": told})
        return len(self.rows) - 1

    def data(self) -> dict[str, Any]:
        offset_s = time.localtime(self.begin).tm_gmtoff
        return {
            "begin": self.begin, "length": self.length_s, "units": UNITS, "utc_offset_s": offset_s,
            "phases": SHOWN, "rows": self.rows,
        }  # fmt: skip


def _words(report: Report, chapters: Sequence[Mapping[str, Any]], frame: _Frame) -> dict[str, Any]:
    goodput = report.goodput
    job = f"job {printable(report.job)}, " if report.job else ""
    tasks = f"{counted(len(report.chapters), 'task')}, " if report.is_group else ""
    code = f", {protocol.describe_code(report.exit_code)}" if report.has_ended and report.exit_code else ""
    length = duration(report.end - report.begin) + ("" if report.has_ended else " so far")
    begin = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(report.begin))
    nodes, attempts = counted(report.num_nodes, "node"), starts(goodput)
    return {
        "name": printable(report.name), "state": printable(report.state), "mood": MOODS.get(report.state, "bad"),
        "subtitle": f"{job}{tasks}{nodes}, {attempts}, {length}{code}; submitted {begin}",
        "reason": printable(report.reason), "sentences": sentences(report), "units": UNITS,
        "phases": [{"name": name, "slug": _slug(name)} for name in SHOWN if name in _used(frame)],
        "has_marks": any(chapter.marks for chapter in report.chapters),
        "ticks": [_tick(tick, frame.length_s) for tick in ticks(frame.length_s, MOST_TICKS)],
        "chapters": chapters, "machine": _machine(goodput), "shares": _shares(goodput),
        "totals": [_total(name, seconds, goodput) for name, seconds in total_rows(goodput)],
        "attempts": _attempts(report), "tails": [tail for one in report.chapters for tail in _tails(one)],
        "footnote": _footnote(report),
    }  # fmt: skip


def _used(frame: _Frame) -> set[str]:
    return {SHOWN[span[0]] for row in frame.rows for span in row["spans"]}


def _slug(name: str) -> str:
    return SLUGS.get(name, name).replace(" ", "-")


def _tick(seconds: float, length_s: float) -> dict[str, Any]:
    share = seconds / length_s
    label = duration(seconds) if seconds else "0"
    return {"at": f"{share * 100:.3f}", "label": label, "is_last": share > LAST_TICK}


# --- the timeline


def _chapter(chapter: Chapter, report: Report, frame: _Frame) -> dict[str, Any]:
    title = f"{printable(chapter.label)}: {chapter.timeline.state}" if report.is_group else ""
    worst, others = _ordered(chapter, report)
    return {
        "title": title,
        "marks": [frame.at(mark.time) for mark in chapter.marks],
        "worst": [_row(chapter, rank, title, frame) for rank in worst],
        "rows": [_row(chapter, rank, title, frame) for rank in others],
    }


def _ordered(chapter: Chapter, report: Report) -> tuple[list[int], list[int]]:
    """Of many ranks those that stand out, then the others; few need no order."""
    ranks = chapter.timeline.ranks
    worst = worst_first(chapter, report)[:MOST_WORST] if len(ranks) > MANY_RANKS else []
    return worst, [rank for rank in ranks if rank not in worst]


def _row(chapter: Chapter, rank: int, title: str, frame: _Frame) -> dict[str, Any]:
    stays = chapter.timeline.stays_of(rank)
    hosts = ", ".join(dict.fromkeys(printable(stay.host) for stay in stays if stay.host))
    last = stays[-1]
    task = f"{printable(chapter.label)} " if title else ""
    label = f"{task}rank {rank}" + (f" on {hosts}" if hosts else "")
    spans = [(span, _attempt_at(chapter.timeline.attempts, span)) for span in shown_spans(chapter, rank)]
    return {
        "rank": rank, "host": hosts, "how": _how(last), "mood": "bad" if last.state in UNWELL else "",
        "index": frame.add(label, printable(last.why), spans), "rects": [_rect(span, frame) for span, _ in spans],
    }  # fmt: skip


def _attempt_at(attempts: Sequence[Attempt], span: Span) -> int | str:
    """Its label; as a number, which takes less room, where that is all."""
    found = next(one for one in attempts if span.end <= one.ended or one is attempts[-1])
    return found.label if found.restart else found.number


def _how(stay: Stay) -> str:
    code = f", code {stay.exit_code}" if stay.exit_code else ""
    return printable(stay.state) + code


def _rect(span: Span, frame: _Frame) -> dict[str, Any]:
    x = frame.at(span.begin)
    return {"slug": _slug(span.phase), "x": x, "width": round(frame.at(span.end) - x, 2)}


# --- the sums


def _machine(goodput: Goodput) -> str:
    if goodput.share is None or goodput.most_share is None:
        return "None yet: the job has not begun."
    share = percent(goodput.share)
    if goodput.is_range:
        share = f"{share} to {percent(goodput.most_share)}"
    return f"{duration(goodput.machine_s)} on {each_node(goodput)}, of which useful: {share}"


def _shares(goodput: Goodput) -> list[dict[str, Any]]:
    found, at = [], 0.0
    for name, seconds in total_rows(goodput):
        if name != QUEUE_ROW and goodput.machine_s > 0:
            width = min(seconds / goodput.machine_s * 1000, 1000 - at)
            found.append({"slug": _slug(name), "x": round(at, 2), "width": round(width, 2)})
            at += width
    return found


def _total(name: str, seconds: float, goodput: Goodput) -> dict[str, str]:
    is_part = name != QUEUE_ROW and goodput.machine_s > 0
    share = percent(seconds / goodput.machine_s) if is_part else ""
    return {"name": name, "slug": _slug(name), "time": duration(seconds), "share": share}


def _attempts(report: Report) -> list[dict[str, str]]:
    found = []
    days = {time.localtime(moment)[:3] for moment in (report.begin, report.end)}
    clock = "%H:%M:%S" if len(days) == 1 else "%Y-%m-%d %H:%M:%S"
    for chapter in report.chapters:
        for attempt in chapter.timeline.attempts:
            task = f"{printable(chapter.label)} " if chapter.label else ""
            found.append(
                {
                    "number": f"{task}{attempt.label}",
                    "began": time.strftime(clock, time.localtime(attempt.begun)),
                    "queued": duration(attempt.queue_s),
                    "ran": duration(attempt.machine_s),
                    "state": _ending(attempt),
                }
            )
    return found


def _ending(attempt: Attempt) -> str:
    if attempt.was_lost:
        return "lost with its head node"
    return "interrupted" if attempt.was_interrupted else printable(attempt.state)


def _tails(chapter: Chapter) -> list[dict[str, str]]:
    by_log = {stay.log: stay for attempt in chapter.timeline.attempts for stay in attempt.stays if stay.log}
    found = []
    for name, text in chapter.tails.items():
        stay = by_log.get(name)
        task = f"{printable(chapter.label)}: " if chapter.label else ""
        who = f": rank {stay.rank} on {printable(stay.host)}, {_how(stay)}" if stay else ""
        found.append({"title": f"{task}{printable(name)}{who}", "text": "\n".join(plain_lines(text))})
    return found


def _footnote(report: Report) -> str:
    clock = f"Times are on the clock of {printable(report.clock)}, the head node. " if report.clock else ""
    skipped = f"{counted(report.skipped, 'line')} of the records could not be read. " if report.skipped else ""
    return f"{clock}{skipped}Made by gangrun {protocol.VERSION}."
