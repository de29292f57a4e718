"""What `gangrun top` promises: the worst is seen first, the host is asked politely, the terminal is given back."""

from __future__ import annotations

import fcntl
import glob
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from codegen.spec import SpecError
from executor import protocol
from gangrun import states, top
from gangrun.cluster import LEAST_INTERVAL_S, open_cluster
from gangrun.records import Records, Run
from gangrun.remote import NAMES, Host
from gangrun.top import Log, Look, Part, Rank, Voice, Watcher
from gangrun.verbs import top as verbs
from tests.bench import CHECKOUT, eventually
from tests.client_bench import LAPTOP, Laptop, Launched
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.fixtures import BootCluster
from tests.minislurm.login import Login

OLD_PYTHONS = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.[6-8]*/bin/python")))
NOW = 1e6  # the cluster's clock; this machine's says something else
TALKS = "while :; do echo step $((i += 1)); sleep 0.2; done"
HANGS = f'if [ "$SKYPILOT_NODE_RANK" = 1 ]; then echo waits for its peers; sleep 300; fi; {TALKS}'
# In their common directory: rank 0 has spoken before rank 1 fails.
ONE_FAILS = """
echo rank $SKYPILOT_NODE_RANK
[ $SKYPILOT_NODE_RANK = 1 ] || { touch spoken; exit 0; }
until [ -e spoken ]; do sleep 0.1; done; exit 7
"""


def a_run(**fields: Any) -> Run:
    values = {
        "host": "lab",
        "job": "7",
        "state": protocol.RUNNING,
        "submitted": NOW - 100,
        "started": NOW - 50,
        **fields,
    }
    return Run("train-aaaa2222", "train", root="~", **values)


def a_part(
    logs: Mapping[str, Log],
    ranks: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    task: str = "",
    step: str = protocol.STEP_RUN,
    **status: Any,
) -> Part:
    told = {"state": protocol.RUNNING, "attempt": 0, "num_nodes": len(ranks or {}), **status}
    record = states.parse_record(json.dumps(told))
    return Part(task, record, {step: ranks or {}}, logs, sum(log.bytes for log in logs.values()))


def a_look(*parts: Part, now: float = NOW) -> Look:
    return Look(now, {"train-aaaa2222": parts})


def gang(ages: Mapping[int, float], **status: Any) -> Part:
    """Ranks at work, by the seconds since each has spoken."""
    names = {rank: protocol.log_name(rank, rank, len(ages), False) for rank in ages}
    logs = {names[rank]: Log(100, NOW - age, f"said {age}") for rank, age in ages.items()}
    return a_part(logs, {rank: {"state": protocol.RANK_RUNNING, "host": f"n{rank}"} for rank in ages}, **status)


def order(look: Look, run: Run | None = None) -> list[int]:
    return [rank.rank for rank in top.ranks(look, None, run or a_run())]


def rank(age: float | None, number: int = 0, state: str = protocol.RANK_RUNNING, task: str = "") -> Rank:
    return Rank(task, number, f"n{number}", protocol.STEP_RUN, state, None, Voice(silent_s=age))


class TestRanks:
    def test_the_worst_come_first(self) -> None:
        told: dict[int, dict[str, Any]] = {
            0: {"state": protocol.RANK_DONE}, 1: {"state": protocol.RANK_RUNNING}, 2: {},
            3: {"state": protocol.RANK_RUNNING}, 4: {"state": protocol.RANK_FAILED, "code": 7},
        }  # fmt: skip
        ages = {0: 900.0, 1: 1.0, 3: 720.0, 4: 30.0}
        logs = {f"{rank}-{protocol.node_name(rank)}.log": Log(1, NOW - age, "") for rank, age in ages.items()}
        found = top.ranks(a_look(a_part(logs, told)), None, a_run())
        assert [one.rank for one in found] == [4, 3, 1, 2, 0]
        assert [one.state for one in found] == ["failed", "running", "running", "waiting", "done"]
        assert [one.exit_code for one in found] == [7, None, None, None, None]
        assert [one.voice.silent_s for one in found] == [30.0, 720.0, 1.0, None, 900.0]

    def test_ages_are_told_by_the_clusters_clock(self) -> None:
        (one,) = top.ranks(a_look(gang({0: 720.0})), None, a_run())
        assert one.voice.silent_s == 720.0
        (late,) = top.ranks(a_look(gang({0: -3.0})), None, a_run())  # a file server's clock is ahead
        assert late.voice.silent_s == 0.0

    def test_a_rank_that_never_spoke_is_silent_since_it_began(self) -> None:
        part = a_part({}, {0: {"state": protocol.RANK_RUNNING, "started": NOW - 90}})
        (one,) = top.ranks(a_look(part), None, a_run())
        assert one.voice == Voice(silent_s=90.0)

    def test_setup_is_watched_by_its_own_records_and_logs(self) -> None:
        logs = {protocol.log_name(rank, rank, 2, True): Log(5, NOW - rank, f"pip {rank}") for rank in (0, 1)}
        told = {rank: {"state": protocol.RANK_RUNNING} for rank in (0, 1)}
        part = a_part(logs, told, step=protocol.STEP_SETUP, state=protocol.SETTING_UP)
        found = top.ranks(a_look(part), None, a_run(state=protocol.SETTING_UP))
        assert [(one.phase, one.voice.line) for one in found] == [("setup", "pip 1"), ("setup", "pip 0")]

    def test_a_record_that_is_half_written_hides_no_rank(self) -> None:
        answer = {"status": json.dumps({"state": protocol.RUNNING, "attempt": 0, "num_nodes": 3}), "logs": {}}
        records = {"0": '{"state": "runn', "1": None, "2": '"odd"'}
        part = top._part("", {**answer, "bytes": 0, "ranks": {protocol.STEP_RUN: records}})
        assert [one.state for one in top.ranks(a_look(part), None, a_run())] == ["waiting"] * 3

    def test_a_requeued_job_that_waits_shows_nothing_of_its_last_attempt(self) -> None:
        assert order(a_look(gang({0: 1.0, 1: 1.0})), a_run(state=protocol.PENDING)) == []

    def test_ranks_whose_driver_is_gone_are_lost(self) -> None:
        (one,) = top.ranks(a_look(gang({0: 1.0})), None, a_run(state=states.LOST, is_final=True))
        assert (one.state, one.phase) == (protocol.RANK_LOST, "")

    def test_of_an_ended_run_the_drivers_verdict_counts(self) -> None:
        verdict = [{"rank": 0, "state": "failed", "exit_code": 3, "node": "n9", "log": protocol.SINGLE_LOG_NAME}]
        told = json.dumps({"state": protocol.FAILED, "attempt": 0, "num_nodes": 1, "ranks": verdict, "exit_code": 3})
        part = gang({0: 5.0})._replace(record=states.parse_record(told))
        (one,) = top.ranks(a_look(part), None, a_run(state=protocol.FAILED, is_final=True))
        assert (one.state, one.exit_code, one.node, one.voice.line) == ("failed", 3, "n9", "said 5.0")

    def test_a_groups_ranks_are_those_of_its_tasks(self) -> None:
        of_group = a_part({}, {}, num_nodes=3)
        web, client = gang({0: 3.0}, task="web"), gang({0: 9.0, 1: 1.0}, task="client")
        found = top.ranks(a_look(of_group, web, client), None, a_run(meta={"tasks": ["web", "client"]}))
        assert [(one.task, one.rank) for one in found] == [("client", 0), ("web", 0), ("client", 1)]


class TestSilence:
    @pytest.mark.parametrize(
        ("ages", "words"),
        [
            ([], ""),
            ([59.0, 1.0], ""),
            ([720.0], "rank 0 on n0 has been silent for 12m"),
            ([720.0, 4.0, 0.0], "rank 0 on n0 has been silent for 12m; the other 2 spoke within 4s"),
            (
                [720.0, 800.0, 4.0],
                "2 ranks have been silent for 1m or longer, rank 1 on n1 for 13m 20s; the other 1 spoke within 4s",
            ),
            ([720.0, 800.0], "all 2 ranks at work have been silent for 12m or longer"),
        ],
    )
    def test_it_is_told_in_a_sentence(self, ages: list[float], words: str) -> None:
        assert top.silence([rank(age, number) for number, age in enumerate(ages)]) == words

    def test_who_has_ended_or_waits_is_not_silent(self) -> None:
        assert top.silence([rank(900.0, 0, protocol.RANK_DONE), rank(900.0, 1, protocol.RANK_WAITING)]) == ""

    def test_the_task_of_a_group_is_named(self) -> None:
        assert top.silence([rank(720.0, 2, task="web")]) == "web: rank 2 on n2 has been silent for 12m"


class TestRates:
    def test_it_is_what_was_said_since_the_last_look(self) -> None:
        before = a_look(gang({0: 10.0}), now=NOW - 4)
        after = a_look(a_part({"run.log": Log(300, NOW, "x")}, {0: {"state": protocol.RANK_RUNNING}}))
        (one,) = top.ranks(after, before, a_run())
        assert one.voice.rate == 50.0 and top.voice_of(after, before, a_run()).rate == 50.0

    def test_at_the_first_look_it_is_what_was_said_since_the_begin(self) -> None:
        look = a_look(a_part({"run.log": Log(300, NOW, "x")}, {0: {"state": "running", "started": NOW - 10}}))
        assert top.ranks(look, None, a_run())[0].voice.rate == 30.0
        assert top.voice_of(look, None, a_run()).rate == 6.0

    def test_it_is_not_guessed(self) -> None:
        """A log that shrank, one that holds an earlier attempt's words, one whose run is over."""
        look = a_look(a_part({"run.log": Log(30, NOW, "x")}, {0: {"state": "running", "started": NOW - 10}}))
        assert top.ranks(look, a_look(gang({0: 1.0}), now=NOW - 2), a_run())[0].voice.rate is None
        assert top.ranks(look, None, a_run(attempt=1))[0].voice.rate is None
        assert top.voice_of(look, None, a_run(attempt=1)).rate is None
        assert top.voice_of(look, None, a_run(is_final=True)).rate is None


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;AAAA\x1b\\clip", "clip"),
        ("\x1b]8;;http://e/\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0\x1b\\sixel", "sixel"),
        ("\x9b2Jcleared", "cleared"),
        ("a\x1bcb", "ab"),
        ("a\x08\x00\x7f b\tc", "a b c"),
        ("abc\u202edef\u200b", "abc def"),
        ("\x1b[", ""),
        ("50%|█████     | 5/10 é ✓ 漢", "50%|█████ | 5/10 é ✓ 漢"),
        ("\udcff", ""),
    ],
)
def test_nothing_in_a_last_line_moves_the_cursor(line: str, shown: str) -> None:
    assert top.plain(line) == shown


class FakeWatcher:
    """What the views take."""

    def __init__(self, run: Run, look: Look) -> None:
        self.runs, self.look, self.before, self.run_id = [run], look, None, run.run
        self.cluster = SimpleNamespace(name="lab")


def lines_of(view: verbs.View, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(verbs._renderable(view, width))
    return console.export_text().splitlines()


class TestScreen:
    @pytest.mark.parametrize("width", [60, 80, 110, 200])
    @pytest.mark.parametrize("height", [10, 24, 60])
    def test_a_thousand_ranks_fit_in_it_and_the_rest_is_counted(self, height: int, width: int) -> None:
        ages = {**{number: number % 7 / 10 for number in range(1000)}, 613: 720.0}
        watcher: Any = FakeWatcher(a_run(num_nodes=1000), a_look(gang(ages)))
        lines = lines_of(verbs._view(watcher, height - verbs.FRAME_ROWS), width)
        assert len(lines) < height and max(map(len, lines)) <= width
        assert [line.split()[0] for line in lines if line.startswith("613")] == ["613"]
        text = "\n".join(lines)
        assert "rank 613 on n613 has been silent for 12m" in text
        shown = sum(line.split()[:1] in ([str(number)] for number in range(1000)) for line in lines)
        assert f"and {1000 - shown} more: {1000 - shown} running"[:width] in text

    @pytest.mark.parametrize("width", [40, 50])
    def test_on_the_narrowest_it_still_tells_which_rank_is_silent_where(self, width: int) -> None:
        watcher: Any = FakeWatcher(a_run(num_nodes=20), a_look(gang({**dict.fromkeys(range(20), 1.0), 13: 720.0})))
        lines = lines_of(verbs._view(watcher, 19), width)
        (row,) = [line.split() for line in lines if line.startswith("13")]
        assert row[:4] == ["13", "n13", "running", "12m"] and "RANK" in "\n".join(lines)

    def test_a_group_of_many_tasks_leaves_room_for_the_ranks(self) -> None:
        names = [f"task-{number}" for number in range(50)]
        tasks = [{"name": n, "state": "RUNNING", "nodes": ["n"], "is_primary": True, "restarts": 0} for n in names]
        parts = [gang({0: 1.0}, task=name) for name in names]
        watcher: Any = FakeWatcher(a_run(tasks=tasks, meta={"tasks": names, "primary": names}), a_look(*parts))
        lines = lines_of(verbs._view(watcher, 30 - verbs.FRAME_ROWS), 120)
        assert len(lines) < 30 and "more tasks" in "\n".join(lines) and "TASK" in "\n".join(lines)

    def test_the_last_line_is_cut_and_wraps_nowhere(self) -> None:
        part = a_part({"run.log": Log(1, NOW, "漢" * 400)}, {0: {"state": protocol.RANK_RUNNING, "host": "n1"}})
        watcher: Any = FakeWatcher(a_run(), a_look(part))
        assert len(lines_of(verbs._view(watcher, 19), 80)) == 5


# --- manners


class FakeCluster:
    """Answers with the next of some looks; None: it was asked a moment ago by somebody else."""

    name, least_interval_s = "lab", LEAST_INTERVAL_S

    def __init__(self, *looks: Look | None) -> None:
        self.looks = list(looks)
        self.records = SimpleNamespace(get=lambda run: a_run(), in_flight=lambda host: [a_run()])

    def refresh(self, watch: Any) -> list[Any]:
        look = self.looks.pop(0)
        return [] if look is None else [{"look": look}]


def watcher_of(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    monkeypatch.setattr(top, "parse", lambda answer: answer["look"])
    return Watcher(cast(Any, cluster), "train-aaaa2222")


class TestManners:
    def test_it_asks_less_and_less_often_while_nothing_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        still = [a_look(gang({0: 1.0}), now=NOW + number) for number in range(20)]
        watcher = watcher_of(FakeCluster(*still, a_look(a_part({"run.log": Log(101, NOW, "x")}))), monkeypatch)
        pauses = []
        for _ in still:
            assert watcher.ask()
            pauses.append(watcher.pause_s(0.01))
        assert pauses[0] == top.LOOK_FIRST_S and pauses == sorted(pauses) and pauses[-1] == top.LOOK_LONGEST_S
        watcher.ask()
        assert watcher.pause_s(0.01) == top.LOOK_FIRST_S

    def test_it_asks_no_more_often_than_the_host_wants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = FakeCluster(*[a_look(gang({0: 1.0}))] * 2)
        cluster.least_interval_s = 45.0
        watcher = watcher_of(cluster, monkeypatch)
        assert watcher.ask() and watcher.pause_s(0.01) == 45.0

    def test_looks_that_take_long_are_rare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thousand logs over NFS."""
        watcher = watcher_of(FakeCluster(a_look(gang({0: 1.0}))), monkeypatch)
        assert watcher.ask() and watcher.pause_s(4.0) == 4.0 * top.WORK_SHARE

    def test_what_others_asked_a_moment_ago_is_no_look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = a_look(gang({0: 1.0}))
        watcher = watcher_of(FakeCluster(first, None), monkeypatch)
        assert watcher.ask() and not watcher.ask()
        assert watcher.look == first and watcher.before is None


class TestWithoutAHost:
    """As `queue`, `top` needs none: the records tell where runs are."""

    @pytest.fixture(autouse=True)
    def nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.setenv(name, str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))

    def test_nothing_in_flight_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert verbs.top(None, None, once=True, rows=None, as_json=False) == 0
        assert capsys.readouterr().out == "no runs in flight; `gangrun queue -a` shows those that have ended\n"
        assert verbs.top(None, None, once=True, rows=None, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["runs"] == []

    def test_the_only_host_with_runs_is_meant(self) -> None:
        Records.of_user().put(a_run(host="lab"))
        watcher = verbs._watcher(None, None)
        assert watcher is not None and watcher.cluster.name == "lab"

    def test_of_several_hosts_one_must_be_named(self) -> None:
        for run, host in (("train-aaaa2222", "lab"), ("train-bbbb3333", "den")):
            Records.of_user().put(a_run(host=host)._replace(run=run))
        with pytest.raises(SpecError, match="host: runs are in flight on den and lab; use --host"):
            verbs.top(None, None, once=True, rows=None, as_json=False)


def test_a_job_on_ray_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Records.of_user().put(a_run(host="http://127.0.0.1:8265"))
    with pytest.raises(SpecError, match="job='train': is on Ray.*`gangrun logs train-aaaa2222 -f`"):
        verbs.top("train", None, once=True, rows=None, as_json=False)


def test_of_runs_on_ray_the_states_are_shown(tmp_path: Path) -> None:
    records, url = Records(tmp_path / "runs.db"), "http://127.0.0.1:8265"
    records.put(a_run(host=url, job="train-aaaa2222", evidence={"has_begun": True}))
    watcher = Watcher(open_cluster(url, records=records), None)
    job = {"submission_id": "train-aaaa2222", "status": "RUNNING", "start_time": 1000 * NOW}
    watcher.cluster.host.dashboard = SimpleNamespace(jobs=lambda: [job], placement_groups=list)  # type: ignore[attr-defined]
    assert watcher.ask()
    (_, row) = [line.split() for line in lines_of(verbs._view(watcher, 20), 120)]
    assert row[:3] == ["train-aaaa2222", "train-aaaa2222", protocol.RUNNING]


# --- the host's part


def lay_out(root: Path, run: str, ranks: int, *, task: str = "", job: str = "7") -> Path:
    """The files of a run that goes on; returns the folder of its logs."""
    home = root / NAMES["home"]
    own = home / job / (run + (f".{task}" if task else ""))
    logs = home / "runs" / run / "logs" / task
    records = own / protocol.attempt_name(0) / "ranks"
    records.mkdir(parents=True)
    logs.mkdir(parents=True)
    (own / protocol.STATUS_NAME).write_text(json.dumps({"state": protocol.RUNNING, "attempt": 0, "num_nodes": ranks}))
    for number in range(ranks):
        (records / str(number)).write_text(json.dumps({"state": protocol.RANK_RUNNING, "host": f"n{number}"}))
        (logs / protocol.log_name(number, number, ranks, False)).write_text(f"hello\nrank {number}\n")
    return logs


def watched(root: Path, run: str, every: bool = True, python: str = sys.executable, job: str | None = "7") -> Look:
    request = top.request([a_run()._replace(run=run, job=job)], every)
    return top.parse(Host(python).call("watch", root=str(root), **request))


class TestAgent:
    @pytest.mark.parametrize(
        "python", [sys.executable, *OLD_PYTHONS] if OLD_PYTHONS else [sys.executable], ids=os.path.realpath
    )
    def test_one_call_tells_of_every_rank(self, python: str, tmp_path: Path) -> None:
        logs = lay_out(tmp_path, "t-1", 3)
        os.utime(logs / "1-worker1.log", (time.time() - 720, time.time() - 720))
        look = watched(tmp_path, "t-1", python=python)
        found = top.ranks(look, None, a_run()._replace(run="t-1"))
        assert [(one.rank, one.state, one.node, one.voice.line) for one in found][0] == (1, "running", "n1", "rank 1")
        assert 719 < (found[0].voice.silent_s or 0) < 780 and found[0].voice.bytes == len("hello\nrank 1\n")
        assert len(found) == 3

    def test_a_thousand_ranks_are_one_short_answer(self, tmp_path: Path) -> None:
        lay_out(tmp_path, "t-1", 1000)
        look = watched(tmp_path, "t-1")
        assert len(top.ranks(look, None, a_run()._replace(run="t-1"))) == 1000
        few = watched(tmp_path, "t-1", every=False).parts("t-1")[0]
        assert len(few.logs) < 20 and few.bytes == look.parts("t-1")[0].bytes

    def test_of_a_long_log_only_the_end_is_read(self, tmp_path: Path) -> None:
        logs = lay_out(tmp_path, "t-1", 1)
        with open(logs / "run.log", "r+b") as file:
            file.truncate(1 << 40)  # sparse
            file.seek(0, os.SEEK_END)
            file.write("\n10%\r20%\r30% é\r\n\n \n".encode())
        (part,) = watched(tmp_path, "t-1").parts("t-1")
        assert part.logs["run.log"].line == "30% é" and part.bytes > 1 << 40

    def test_a_line_without_end_and_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        logs = lay_out(tmp_path, "t-1", 1)
        (logs / "run.log").write_bytes(b"\xff\x00\xfe" * 5000 + b"end")
        (part,) = watched(tmp_path, "t-1").parts("t-1")
        assert part.logs["run.log"].line.endswith("end") and len(part.logs["run.log"].line) <= 400

    def test_a_pipe_among_the_logs_is_waited_for_by_nobody(self, tmp_path: Path) -> None:
        logs = lay_out(tmp_path, "t-1", 1)
        os.mkfifo(logs / "0.log")
        (logs / "gone.log").symlink_to("/nonexistent")
        (logs / "folder.log").mkdir()
        assert list(watched(tmp_path, "t-1").parts("t-1")[0].logs) == ["run.log"]

    def test_the_newest_attempt_counts(self, tmp_path: Path) -> None:
        lay_out(tmp_path, "t-1", 2)
        own = tmp_path / NAMES["home"] / "7" / "t-1"
        old, new = own / protocol.attempt_name(0) / "ranks", own / protocol.attempt_name(1) / "ranks"
        new.mkdir(parents=True)
        (new / "0").write_text(json.dumps({"state": protocol.RANK_DONE}))
        os.utime(old, (1, 1))
        found = top.ranks(watched(tmp_path, "t-1"), None, a_run()._replace(run="t-1"))
        assert {one.rank: one.state for one in found} == {0: "done", 1: "waiting"}

    def test_a_group_is_told_task_by_task(self, tmp_path: Path) -> None:
        lay_out(tmp_path, "g-1", 2, task="web")
        lay_out(tmp_path, "g-1", 1, task="client")
        lay_out(tmp_path, "g-10", 1)  # another run, whose name begins alike
        look = watched(tmp_path, "g-1")
        assert [(part.task, len(part.logs)) for part in look.parts("g-1")] == [("", 0), ("client", 1), ("web", 2)]

    def test_a_run_of_which_nothing_is_there_yet(self, tmp_path: Path) -> None:
        assert watched(tmp_path, "t-1", job=None).parts("t-1") == []
        (part,) = watched(tmp_path, "t-1").parts("t-1")
        assert (part.record, part.logs, part.bytes) == (None, {}, 0)

    def test_runs_of_another_work_directory_are_told_by_its_own_call(self, tmp_path: Path) -> None:
        """A host's runs may lie in several; each is asked with the runs that it holds."""
        lay_out(tmp_path, "t-1", 1)
        both = top.request([a_run()._replace(run=run) for run in ("t-1", "elsewhere")], False)
        asked = {"run": "t-1", "job": "7", "cluster": None}
        answer = Host(sys.executable).call(
            "poll", root=str(tmp_path), runs=[asked], squeue=[], sacct=[], watch=both
        )  # without squeue, too
        assert list(top.parse(answer["watched"]).runs) == ["t-1"]


# --- on a terminal, without a cluster

WATCHED = """
import sys
from tests.test_top import NOW, FakeCluster, Watcher, a_look, gang
from gangrun import cli, top
from gangrun.verbs import top as verbs
looks = [a_look(gang({0: 1.0}), now=NOW + number) for number in range(99)]
top.parse = lambda answer: answer["look"]
verbs._watcher = lambda word, host: Watcher(FakeCluster(*looks), "train-aaaa2222")
sys.argv = ["gangrun", "top", "train"]
cli.main()
"""


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    argv, env = [sys.executable, "-c", WATCHED], {**os.environ, "TERM": "xterm-256color"}
    how: Any = {"stdin": slave, "stdout": slave, "stderr": slave, "env": env, "cwd": CHECKOUT}
    process = subprocess.Popen(argv, preexec_fn=os.setpgrp, **how)  # a group that can be stopped, as a shell makes it
    written = bytearray()

    def is_told(words: bytes, count: int) -> bool:
        while select.select([master], [], [], 0)[0]:
            written.extend(os.read(master, 65536))
        return written.count(words) >= count

    def is_stopped() -> bool:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    try:
        eventually(lambda: is_told(b"said 1.0", 1), 20)
        process.send_signal(signal.SIGTSTP)
        eventually(is_stopped, 20)
        assert is_told(b"\x1b[?1049l", 1) and is_told(b"\x1b[?25h", 1), "the shell has neither its screen nor a cursor"
        process.send_signal(signal.SIGCONT)
        eventually(lambda: is_told(b"\x1b[?1049h", 2), 20)
        os.write(master, b"q")
        assert process.wait(20) == 0
        assert is_told(b"\x1b[?1049l", 2) and written.count(b"\x1b[?1049h") == written.count(b"\x1b[?1049l")
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


# --- on a cluster


class Terminal:
    """A terminal on the laptop in which a command runs: what it wrote, and what is typed."""

    def __init__(self, laptop: Laptop, *args: str, rows: int = 24, columns: int = 110) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._slave, self._before = slave, termios.tcgetattr(slave)
        env = {**laptop.env, "TERM": "xterm-256color"}
        pipes: Any = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = laptop.cluster.popen(LAPTOP, ["gangrun", *args], env=env, cwd=laptop.home, **pipes)
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 65536)
            except OSError:
                return

    @property
    def raw(self) -> str:
        return bytes(self._written).decode("utf-8", "replace")

    @property
    def frames(self) -> list[str]:
        """Each picture, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw.replace("\x1b[H", "\f")).replace("\r", "").split("\f")

    def until(self, *words: str, timeout_s: float = 40) -> str:
        """The first picture that shows all of these words."""

        def found() -> str:
            return next((frame for frame in self.frames if all(word in frame for word in words)), "")

        return eventually(found, timeout_s, f"{words}; it shows {self.frames[-1]!r}")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Its code; the terminal is as it was."""
        try:
            code = self.process.wait(20)
            time.sleep(0.1)  # the reader has the last words
            assert termios.tcgetattr(self._slave) == self._before
            assert self.raw.count("\x1b[?1049h") == self.raw.count("\x1b[?1049l"), "the other screen is left on"
            assert self.raw.count("\x1b[?25l") == self.raw.count("\x1b[?25h"), "the cursor is left hidden"
            assert "Traceback" not in self.raw
            return code
        finally:
            self.process.kill()
            os.close(self._slave)
            os.close(self._master)


@pytest.fixture
def laptop(cluster: Cluster, login: Login) -> Iterator[Laptop]:
    laptop = Laptop(cluster)
    yield laptop
    laptop.close()


on_slurm = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]


class TestOnACluster:
    pytestmark = on_slurm

    def test_a_rank_that_hangs_is_seen_at_once(self, laptop: Laptop) -> None:
        job = laptop.launch(HANGS, num_nodes=3)
        job.until_output("waits for its peers")
        job.until_output("step 3")
        log = job.directory / "logs" / "1-worker1.log"
        os.utime(log, (time.time() - 720, time.time() - 720))
        shown = laptop.gangrun("top", job.name)  # no terminal: once
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.splitlines()[1].split()[:4] == [job.run, job.job, protocol.RUNNING, "3"]
        assert "rank 1 on n2 has been silent for 12m" in shown.stdout
        assert re.search(r"^1 +n2 +run +running +12m\S* .*waits for its peers$", shown.stdout, re.MULTILINE)
        assert re.search(r"^[02] +n[13] +run +running +\d+s +[\d.]+ B/s +step \d+$", shown.stdout, re.MULTILINE)

    def test_json_has_all_of_it(self, laptop: Laptop) -> None:
        job = laptop.launch(TALKS, num_nodes=2)
        job.until_output("step 5")
        answer = laptop.json("top", job.run)
        (run,) = answer["runs"]
        assert (answer["host"], run["run"], run["state"]) == ("head", job.run, protocol.RUNNING)
        assert abs(answer["now"] - time.time()) < 60 and run["bytes"] >= 2 * len("step 1\n") * 5
        ranks = sorted(run["ranks"], key=lambda one: int(one["rank"]))
        assert [(one["rank"], one["phase"], one["state"]) for one in ranks] == [
            (0, "run", "running"), (1, "run", "running"),
        ]  # fmt: skip
        assert len({one["node"] for one in ranks}) == 2  # Slurm picks them: another job may just end
        assert all(one["silent_s"] < 30 and one["rate"] > 0 and one["line"].startswith("step") for one in ranks)

    def test_all_runs_of_a_host_are_one_call(self, laptop: Laptop) -> None:
        jobs = [laptop.launch(TALKS) for _ in range(2)]
        waiting = laptop.launch("true", "--sbatch-arg=--hold")
        for job in jobs:
            job.until_output("step 2")
        code = """
            import json
            from gangrun import Cluster
            from gangrun.top import Watcher, voice_of
            watcher = Watcher(Cluster("head"), None)
            assert watcher.ask()
            lines = {run.run: voice_of(watcher.look, None, run).line for run in watcher.runs}
            print(json.dumps([watcher.cluster.host.calls, watcher.ask(), watcher.cluster.host.calls, lines]))
        """
        calls, again, calls_then, lines = laptop.python(code)
        assert (calls, again, calls_then) == (1, False, 1)
        assert lines.pop(waiting.run) == "" and [line[:5] for line in lines.values()] == ["step "] * 2
        shown = laptop.gangrun("top", "--host", "head", "--once")
        assert shown.stdout.splitlines()[0].split() == [*verbs.OF_QUEUE, "SILENT", "RATE", "LAST", "LINE"]
        assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == [waiting.run, jobs[1].run, jobs[0].run]

    def test_nothing_in_flight_is_told(self, laptop: Laptop) -> None:
        shown = laptop.gangrun("top", "--host", "head")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == "no runs in flight on head; `gangrun queue -a` shows those that have ended\n"
        assert laptop.json("top", "--host", "head")["runs"] == []
        assert laptop.gangrun("top", "nobody").returncode == states.EXIT_NOT_FOUND
        several = [laptop.launch("sleep 60") for _ in range(2)]
        refused = laptop.gangrun("top", "all")
        assert refused.returncode == protocol.EXIT_USAGE and "there are 2; name one" in refused.stderr, several

    def test_a_run_that_has_ended_shows_how_each_rank_did(self, laptop: Laptop) -> None:
        job = laptop.launch(ONE_FAILS, num_nodes=2)
        laptop.gangrun("wait", job.run)
        (run,) = laptop.json("top", job.run)["runs"]
        found = {one["rank"]: (one["state"], one["exit_code"], one["line"], one["phase"]) for one in run["ranks"]}
        assert found[1] == ("failed", 7, "rank 1", "") and found[0][2] == "rank 0"
        shown = Terminal(laptop, "top", job.run)
        assert shown.end() == 0 and "failed (7)" in shown.raw

    def test_a_group_shows_its_tasks_and_the_ranks_of_each(self, laptop: Laptop) -> None:
        path = laptop.home / "group.yaml"
        name = laptop.unique("g")
        tasks = [{"name": "web", "run": "echo up; sleep 300"}, {"name": "client", "num_nodes": 2, "run": TALKS}]
        path.write_text("\n---\n".join(json.dumps(one) for one in ({"name": name, "execution": "parallel"}, *tasks)))
        run = laptop.json("launch", str(path), "--host", "head")
        job = Launched(laptop, run["run"], run["job"], name)
        laptop._launched.append(job)
        for words in ("up", "step 4"):
            job.until_output(words)
        eventually(lambda: all(t["state"] == protocol.RUNNING for t in job.record()["tasks"]), 20)
        shown = laptop.gangrun("top", name).stdout
        assert re.search(r"^ ↳ client +RUNNING +2 ", shown, re.MULTILINE)
        assert re.search(r"^TASK +RANK +NODE", shown, re.MULTILINE)
        assert re.search(r"^web +0 +n\d +run +running .* up$", shown, re.MULTILINE)
        assert len(re.findall(r"^client +[01] +n\d +run +running .*step \d+$", shown, re.MULTILINE)) == 2
        jobs = laptop.gangrun("top").stdout
        assert re.search(r"^ ↳ web .*  up$", jobs, re.MULTILINE), jobs
        assert re.search(r"^ ↳ client .*  step \d+$", jobs, re.MULTILINE), jobs


class TestLive:
    pytestmark = on_slurm

    @pytest.mark.parametrize("way", ["q", "\x03", "TERM"])
    def test_it_ends_when_told_and_gives_the_terminal_back(self, way: str, laptop: Laptop) -> None:
        job = laptop.launch(TALKS)
        job.until_output("step 2")
        shown = Terminal(laptop, "top")
        first = shown.until(job.run, "next look in", "q or Ctrl-C ends")
        assert "step" in first and protocol.RUNNING in first
        if way == "q":
            shown.type(way)
        else:  # no terminal of its own: what the key would do
            shown.process.send_signal(signal.SIGTERM if way == "TERM" else signal.SIGINT)
        assert shown.end() == (protocol.EXIT_TERMINATED if way == "TERM" else 0)
        assert job.record()["state"] == protocol.RUNNING
        assert way == "TERM" or job.run in shown.raw.rpartition("\x1b[?1049l")[2], "the last view stays"

    def test_it_follows_one_job_to_its_end(self, laptop: Laptop) -> None:
        job = laptop.launch(
            "echo on; until [ -e go ]; do sleep 0.1; done; printf '\\033[2J\\033]0;x\\007bye\\n'; exit 3"
        )
        job.until_output("on")
        shown = Terminal(laptop, "top", job.run)
        shown.until("running", " on")
        laptop.remote("touch", str(job.directory / "work" / "go"))
        assert shown.end() == 0
        last = shown.raw.rpartition("\x1b[?1049l")[2]
        assert protocol.FAILED in last and "failed (3)" in last and "bye" in last
        assert "\x1b[2J\x1b]0" not in shown.raw and "\x07" not in shown.raw

    @pytest.mark.slow
    def test_a_host_that_is_away_for_a_while_is_told_and_asked_again(self, own_cluster: BootCluster) -> None:
        laptop = Laptop(own_cluster(nodes=1))
        try:
            job = laptop.launch(TALKS)
            job.until_output("step 2")
            shown = Terminal(laptop, "top", columns=200)
            shown.until(job.run, "next look in")
            laptop.login.stop()
            laptop.login.cut()
            away = shown.until("The jobs are not affected", job.run)
            assert "step" in away, "what was seen last stays"
            laptop.login.start()
            begun = len(shown.frames)
            eventually(lambda: any("0s ago" in f and "not affected" not in f for f in shown.frames[begun:]), 60)
            shown.type("q")
            assert shown.end() == 0
        finally:
            laptop.close()
