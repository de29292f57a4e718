"""Jobs of any size as their drivers would have written them, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from executor import protocol
from gangrun.report.model import Part
from gangrun.report.source import Report, compose

T0 = 1_800_000_000.0
HOSTILE = "n1</script><script>alert(1)</script>\x1b[31m\u202e'\"&{{7*7}}"


class Story:
    """Events of one job, written down in order. Times are seconds after T0."""

    def __init__(self, nodes: int, name: str = "train-abcd2345") -> None:
        self.nodes, self.name, self.attempt = nodes, name, 0
        self.lines: list[str] = []
        self.marks: list[str] = []
        self.ranks: list[dict[str, Any]] = []
        self.hosts: dict[int, str] = {}

    def say(self, at: float, event: str, **fields: Any) -> None:
        self.lines.append(json.dumps({"time": T0 + at, "attempt": self.attempt, "event": event, **fields}))

    def state(self, at: float, state: str, **fields: Any) -> None:
        self.say(at, protocol.EVENT_STATE, state=state, **fields)

    def begin(self, at: float, queued_since: float | None = None) -> None:
        self.state(at, protocol.PENDING)
        if queued_since is not None:
            times = {"submitted": T0 + queued_since, "granted": T0 + at}
            self.say(at, protocol.EVENT_QUEUED, **times)

    def setup(self, at: float, lengths: Mapping[int, float]) -> float:
        """Setup on all nodes from `at` on; returns when the last ends."""
        self.state(at, protocol.SETTING_UP)
        self.say(at, protocol.EVENT_STEP_STARTED, step="setup", pid=1)
        for rank, length in lengths.items():
            self.rank(protocol.EVENT_RANK_STARTED, at + length, "setup", rank, started=T0 + at)
            done = {"state": "done", "exit_code": 0, "ended": T0 + at + length}
            self.rank(protocol.EVENT_RANK_DONE, at + length, "setup", rank, **done)
        end = at + max(lengths.values())
        self.say(end, protocol.EVENT_STEP_ENDED, step="setup", code=0)
        return end

    def go(self, at: float, skew: Mapping[int, float] | None = None) -> None:
        self.state(at, protocol.RUNNING)
        for rank in range(self.nodes):
            started = T0 + at + (skew or {}).get(rank, 0.0)
            self.rank(protocol.EVENT_RANK_STARTED, at, "run", rank, started=started)

    def end(
        self,
        at: float,
        state: str,
        code: int,
        ends: Mapping[int, float] | None = None,
        begun: float = 0.0,
        states: Mapping[int, tuple[str, int]] | None = None,
        **fields: Any,
    ) -> None:
        """The end of an attempt; `ends` are those of the ranks' scripts, `states` how they ended where not well."""
        self.say(at, protocol.EVENT_STEP_ENDED, step="run", code=code)
        self.ranks = []
        usual = (protocol.RANK_DONE, 0) if state == protocol.SUCCEEDED else (protocol.RANK_STOPPED, 143)
        for rank in range(self.nodes):
            how, own_code = (states or {}).get(rank, usual)
            told = {
                "rank": rank, "host": self.host(rank), "node": "head", "state": how, "exit_code": own_code,
                "started": T0 + begun, "ended": None if how == "lost" else T0 + (ends or {}).get(rank, at),
                "log": protocol.log_name(rank, rank, self.nodes, False), "why": "",
            }  # fmt: skip
            self.ranks.append(told)
            heard = {"heard": T0 + (ends or {}).get(rank, at)} if how == "lost" else {}
            self.say(at, protocol.EVENT_RANK_ENDED, step="run", **told, **heard)
        self.state(at, state, exit_code=code, reason=fields.get("reason", ""))

    def rank(self, event: str, at: float, step: str, rank: int, **fields: Any) -> None:
        self.say(at, event, step=step, rank=rank, host=self.host(rank), **fields)

    def host(self, rank: int) -> str:
        return self.hosts.get(rank, f"n{rank + 1}")

    def mark(self, at: float, step: float, cost_s: float = 0.0) -> None:
        self.marks.append(f"{T0 + at} {step} {cost_s}")

    def part(self, now: float = 0.0, tails: Mapping[str, str] | None = None, **status: Any) -> Part:
        told = {
            "task_name": "train", "slurm_job_id": "4711", "num_nodes": self.nodes, "driver": {"host": "n1"}, **status,
        }  # fmt: skip
        return Part(
            self.name, json.dumps(told), "".join(line + "\n" for line in self.lines),
            "".join(line + "\n" for line in self.marks), T0 + now if now else 0.0, tails or {},
        )  # fmt: skip

    def report(self, **how: Any) -> Report:
        return report_of([self.part(**how)])


def report_of(parts: Iterable[Part]) -> Report:
    return compose(list(parts), None, 0.0, None)


def two_attempts(nodes: int, slow: int = 0, name: str = "train-abcd2345") -> Story:
    """Requeued once, with checkpoints; rank `slow` sets up slowly; the last ranks wait for the first."""
    story = Story(nodes, name)
    for attempt, begin in enumerate((40.0, 900.0)):
        story.attempt = attempt
        story.begin(begin, queued_since=0.0 if attempt == 0 else 640.0)
        lengths = {rank: 20.0 + rank % 7 * 0.9 for rank in range(nodes)}
        lengths[slow] = 64.0
        at = story.setup(begin + 2, lengths) + 0.3
        story.go(at)
        for number in (1, 2, 3, 4):
            story.mark(at + number * 110, attempt * 400 + number * 100, 6.0)
        if attempt == 0:
            story.end(640.0, protocol.PENDING, 143, begun=at, reason="Slurm runs the job again")
        else:
            ends = {rank: at + 520 - rank % 13 * 4.0 for rank in range(nodes)}
            story.end(at + 520.2, protocol.SUCCEEDED, 0, ends=ends, begun=at)
    return story


def failed(nodes: int, rank: int, host: str = "", name: str = "train-abcd2345") -> Story:
    """One attempt, in which one rank, on `host`, fails after 300 s."""
    story = Story(nodes, name)
    story.hosts = {rank: host} if host else {}
    story.begin(5.0, queued_since=0.0)
    at = story.setup(6.0, dict.fromkeys(range(nodes), 30.0)) + 0.1
    story.go(at)
    ends = dict.fromkeys(range(nodes), at + 301.0)
    ends[rank] = at + 300.0
    states = {rank: (protocol.RANK_FAILED, 7)}
    reason = f"rank {rank} on {story.host(rank)} failed first (exit code 7)"
    story.end(at + 301.5, protocol.FAILED, 7, ends=ends, begun=at, states=states, reason=reason)
    return story
