"""`gangrun estimate`: figures known beforehand, simulations of what is modelled, bad input, the document."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import pty
import random
import re
import shlex
import statistics
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from codegen.spec import SpecError
from executor import protocol
from gangrun import cli
from gangrun import estimate as arithmetic
from gangrun.estimate import Measured, Plan, Pool

CHECKOUT = Path(__file__).resolve().parent.parent
DOCUMENT = CHECKOUT / "docs" / "estimate.md"
MINUTE, HOUR = 60.0, 3600.0
EXAMPLE = "--work 8h --checkpoint-every 30m --checkpoint-cost 2m --preemptions 3 --requeue-wait 40m"
POOL = "--pool 16 --phase rollout=160 --phase train=80"
PLAN = Plan(8 * HOUR, 30 * MINUTE, 2 * MINUTE, 40 * MINUTE)


MEASURED = Measured("2026-01-02", "here", 16, {"rollout": 160, "train": 80}, 3, 0.4, 31.2, 16.5)


CHANGES: list[dict[str, Any]] = [{"split_units": "1"}, {"turns_units": math.nan}, {"where": "\x1b[2J"}, {"x": 1}]


def estimate(words: str) -> Any:
    return CliRunner().invoke(cli.cli, ["estimate", *shlex.split(words)], standalone_mode=False)


def said(words: str) -> str:
    done = estimate(words)
    assert done.exit_code == 0, done
    return str(done.output)


def on_terminal(words: str, width: int) -> str:
    """What stands on a terminal of this width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    argv = [sys.executable, "-m", "gangrun", "estimate", *shlex.split(words)]
    how: Any = {"stdin": slave, "stdout": slave, "stderr": slave, "cwd": CHECKOUT}
    process = subprocess.Popen(argv, env={**environ, "TERM": "xterm", "NO_COLOR": "1"}, **how)
    os.close(slave)
    text = bytearray()
    with contextlib.suppress(OSError), open(master, "rb", buffering=0) as file:  # EIO at its end
        while piece := file.read(65536):
            text += piece
    assert process.wait(30) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r", "")


def found(words: str) -> Any:
    return json.loads(said(words + " --json"))


def agrees(expected: float, draw: Callable[[], float], count: int) -> None:
    """The mean of so many draws is within four of its standard errors; which are small enough to tell models apart."""
    draws = [draw() for _ in range(count)]
    error = statistics.stdev(draws) / math.sqrt(count)
    assert abs(statistics.fmean(draws) - expected) < 4 * error, (expected, statistics.fmean(draws), error)
    assert error < 0.02 * expected


class TestACountOfPreemptions:
    def test_the_example_comes_out(self) -> None:
        text = said(EXAMPLE)
        assert text.startswith(
            "16 checkpoints (32 min), 3 x (15 + 40) min lost and waiting: 677 min in all,\n"
            "1.41 times the work, 86.2 % of machine time useful.\n"
        )

    def test_machine_time_is_all_but_the_queue(self) -> None:
        outcome = arithmetic.with_count(PLAN, 3)
        assert (outcome.total_s, outcome.machine_s, outcome.wait_s) == (677 * MINUTE, 557 * MINUTE, 120 * MINUTE)
        assert outcome.useful == 480 / 557

    @pytest.mark.parametrize("every_s", [30 * MINUTE, 25 * MINUTE, 7 * HOUR, 9 * HOUR, None], ids=str)
    def test_what_is_lost_is_what_a_simulation_loses(self, every_s: float | None) -> None:
        plan, rng = Plan(8 * HOUR, every_s, 2 * MINUTE, 40 * MINUTE, 3 * MINUTE), random.Random(1)
        outcome = arithmetic.with_count(plan, 3)
        agrees(outcome.total_s, lambda: simulated_count(plan, 3, rng), 4000)

    def test_without_checkpoints_the_rate_counts_and_is_told(self) -> None:
        without = found(EXAMPLE)["without"]
        assert without["same_count"]["total_s"] == (480 + 3 * (240 + 40)) * MINUTE
        rate_s = 557 / 3 * MINUTE  # of the plan: three in its machine time
        expected = rate_s * math.expm1(480 * MINUTE / rate_s)
        assert without["same_rate"]["machine_s"] == pytest.approx(expected)
        assert without["same_rate"]["interruptions"] == pytest.approx(expected / rate_s)
        assert "12.3 come before 8h pass without one" in said(EXAMPLE)

    def test_times_and_minutes_are_rounded_alike(self) -> None:
        words = said("--work 8h --checkpoint-every 7h --checkpoint-cost 2m --preemptions 1")
        assert "1 x 188 min lost" in words and words.splitlines()[4].split()[4:6] == ["3h", "8m"]

    @pytest.mark.parametrize("width", [36, 40, 60, 77, 80, 200])
    def test_on_a_narrow_terminal_columns_are_left_out_and_no_figure_is_cut(self, width: int) -> None:
        """On one of the usual width all have room."""
        shown = on_terminal(EXAMPLE, width)
        assert "…" not in shown and max(map(len, shown.splitlines())) <= width
        row = next(line for line in shown.splitlines() if line.startswith("every 30m"))
        assert set(row.split()[2:]) <= set("3 16 45m 2h 11h 17m 1.41 86.2 %".split()) and "86.2 %" in row
        assert (len(row.split()) == 11) == (width >= 78)
        assert "677 min in all" in " ".join(shown.split())

    def test_one_is_no_plural(self) -> None:
        assert ", 1 comes before" in said("--work 8h --checkpoint-every 7h --checkpoint-cost 2m --preemptions 1")
        assert "1 preemption is to be expected" in said("--work 4h --checkpoint-every 1m --mtbp 4h")

    def test_a_restart_and_a_missing_wait_are_told_as_they_are(self) -> None:
        text = said("--work 1h --checkpoint-every 20m --preemptions 1 --restart-cost 5m --requeue-wait 0")
        assert text.startswith("3 checkpoints (0 min), 1 x (10 + 5) min lost and restarting: 75 min in all,")
        assert said("--work 1h --preemptions 1").startswith("1 x 30 min lost: 90 min in all,")
        assert said("--work 1h --preemptions 0").startswith("no preemptions: 60 min in all,")


def simulated_count(plan: Plan, count: int, rng: random.Random) -> float:
    """A run minute by minute of its work: each preemption strikes when the work first gets to its moment."""
    every_s = plan.every_s or plan.work_s
    total_s, done_s = 0.0, 0.0
    for strike_s in sorted(rng.uniform(0, plan.work_s) for _ in range(count)):
        saved_s = strike_s // every_s * every_s if plan.every_s else 0.0
        total_s += strike_s - done_s  # work on to the strike, and back to what is saved
        total_s += plan.restart_s + plan.wait_s
        done_s = saved_s
    saves = len(list(itertools.takewhile(lambda n: n * every_s < plan.work_s, itertools.count())))
    return total_s + plan.work_s - done_s + (saves * plan.cost_s if plan.every_s else 0.0)


class TestAMeanTimeBetweenPreemptions:
    @pytest.mark.parametrize("every_s", [30 * MINUTE, 50 * MINUTE, 3 * HOUR, None], ids=str)
    @pytest.mark.parametrize("restart_s", [0.0, 20 * MINUTE])
    def test_the_expected_time_is_a_simulations(self, every_s: float | None, restart_s: float) -> None:
        plan, rng = Plan(8 * HOUR, every_s, 5 * MINUTE, 40 * MINUTE, restart_s), random.Random(2)
        outcome = arithmetic.with_rate(plan, 4 * HOUR)
        runs = [simulated_rate(plan, 4 * HOUR, rng) for _ in range(20000)]
        for expected, index in ((outcome.machine_s, 0), (outcome.interruptions, 1)):
            draws = iter(run[index] for run in runs)
            agrees(expected, lambda draws=draws: next(draws), len(runs))  # type: ignore[misc]
        assert outcome.wait_s == pytest.approx(outcome.interruptions * 40 * MINUTE)

    def test_the_best_interval_is_where_the_expected_time_is_least(self) -> None:
        for cost_s, mtbp_s in ((120, 14400), (1, 86400 * 30), (3600, 7200), (600, 60)):
            best_s = arithmetic.best_s(cost_s, mtbp_s)

            def rate(length_s: float, cost_s: float = cost_s, mtbp_s: float = mtbp_s) -> float:
                return math.expm1((length_s + cost_s) / mtbp_s) / length_s

            assert rate(best_s) <= min(rate(best_s * 0.99), rate(best_s * 1.01)), (cost_s, mtbp_s)

    def test_young_and_daly_are_near_it_where_checkpoints_are_cheap(self) -> None:
        assert arithmetic.young_s(2 * MINUTE, 4 * HOUR) == pytest.approx(math.sqrt(2 * 120 * 14400))
        for cost_s in (1.0, 30.0, 120.0):
            exact = arithmetic.best_s(cost_s, 4 * HOUR)
            assert arithmetic.young_s(cost_s, 4 * HOUR) == pytest.approx(exact, rel=0.06)
            assert arithmetic.daly_s(cost_s, 4 * HOUR) == pytest.approx(exact, rel=0.001)
        assert arithmetic.daly_s(9 * HOUR, 4 * HOUR) == 4 * HOUR

    def test_no_number_of_equal_parts_is_better_than_the_best_one(self) -> None:
        best = arithmetic.best_plan(PLAN, 4 * HOUR)
        least = min(
            arithmetic.with_rate(arithmetic.every(PLAN, PLAN.work_s / n), 4 * HOUR).total_s for n in range(1, 99)
        )
        assert arithmetic.with_rate(best, 4 * HOUR).total_s == pytest.approx(least)

    def test_the_table_shows_the_best_the_asked_one_and_none(self) -> None:
        answer = found("--work 8h --checkpoint-every 1h40m --checkpoint-cost 2m --mtbp 4h")
        intervals = [row["every_s"] for row in answer["table"]]
        assert intervals == [450, 900, 1800, 3600, 6000, 7200, None]
        assert min(answer["table"], key=lambda row: row["total_s"])["every_s"] == answer["best"]["every_s"] == 1800
        assert answer["plan"] == answer["table"][4]

    def test_short_work_is_best_without_checkpoints(self) -> None:
        assert "it is best to make no checkpoint" in said("--work 5m --checkpoint-cost 2m --mtbp 4h")

    def test_what_never_ends_says_so(self) -> None:
        text = said("--work 3650d --mtbp 1s")
        assert "takes more than 10 years" in text and "inf" not in text and "nan" not in text
        answer = found("--work 3650d --checkpoint-every 30d --checkpoint-cost 1s --mtbp 1s --requeue-wait 0")
        assert answer["table"][-1]["total_s"] is None
        assert "> 10 years" in said("--work 3650d --checkpoint-every 30d --checkpoint-cost 1s --mtbp 1s")


def simulated_rate(plan: Plan, mtbp_s: float, rng: random.Random) -> tuple[float, int]:
    """Machine time and interruptions of one run."""
    every_s, cost_s = plan.every_s or plan.work_s, plan.cost_s if plan.every_s else 0.0
    machine_s, interruptions, done_s = 0.0, 0, 0.0
    while done_s < plan.work_s:
        length_s = min(every_s, plan.work_s - done_s)
        needed_s = length_s + cost_s
        while (lasts_s := rng.expovariate(1 / mtbp_s)) < needed_s:
            machine_s, interruptions = machine_s + lasts_s, interruptions + 1
            needed_s = plan.restart_s + length_s + cost_s
        machine_s, done_s = machine_s + needed_s, done_s + length_s
    return machine_s, interruptions


class TestAPool:
    def test_the_example_comes_out(self) -> None:
        uses = {use["name"]: use for use in found(POOL)["uses"]}
        even, turns = uses["even split"], uses["taking turns"]
        assert (even["gpus"], even["iteration_s"], even["used"]) == ([8, 8], 30 * MINUTE, 0.5)
        assert (turns["gpus"], turns["iteration_s"], turns["used"]) == ([16], 15 * MINUTE, 1.0)

    @pytest.mark.parametrize(
        "pool", [Pool(16, {"a": 160, "b": 80}), Pool(11, {"a": 1, "b": 7, "c": 90}), Pool(3, {"a": 1, "b": 1, "c": 9})]
    )
    def test_no_split_is_better_than_the_best_one(self, pool: Pool) -> None:
        count = len(pool.phases)
        splits = [gpus for gpus in itertools.product(range(1, pool.gpus), repeat=count) if sum(gpus) == pool.gpus]
        in_turn = min(pool.split(gpus).iteration_s for gpus in splits)
        overlapped = min(max(work / n for work, n in zip(pool.work, gpus)) for gpus in splits)
        assert pool.best_split().iteration_s == pytest.approx(in_turn)
        assert pool.overlapped().iteration_s == pytest.approx(overlapped)
        assert sum(pool.even_split().gpus) == sum(pool.best_split().gpus) == pool.gpus

    def test_beginning_a_turn_costs_and_there_is_a_limit_to_it(self) -> None:
        pool = Pool(16, {"rollout": 160 * MINUTE, "train": 80 * MINUTE}, turn_s=30)
        assert pool.turns().iteration_s == 16 * MINUTE and pool.turns().used == 15 / 16
        assert pool.turns(pool.break_even_s()).iteration_s == pytest.approx(pool.best_split().iteration_s)
        assert "taking turns, 30s to begin each" in said(POOL + " --turn-cost 30s")

    def test_work_is_in_gpu_minutes_or_in_any_duration(self) -> None:
        assert found(POOL)["uses"] == found("--pool 16 --phase rollout=2h40m --phase train=4800s")["uses"]

    def test_a_large_pool_is_quick(self) -> None:
        assert found("--pool 100000 --phase a=1 --phase b=2.5")["uses"][0]["gpus"] == [50000, 50000]

    def test_the_measured_pair_stands_beside_its_rows(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        lines = said(f"{POOL} --measured {path}").splitlines()
        rows = {re.split(r"\s{2,}", line)[0]: line for line in lines}
        assert rows["even split"].endswith("31.2 min") and rows["taking turns"].endswith("16.5 min")
        assert not rows["best split"].endswith("min")
        assert lines[-1] == (
            "Measured on 2026-01-02, here: 3 iterations with minutes of 0.4 s; a turn took 0.3 s to begin."
        )
        assert found(f"{POOL} --measured {path}")["measured"]["split_units"] == 31.2

    def test_a_measurement_of_another_pool_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="use it with --pool 16 --phase rollout=160 --phase train=80"):
            raise estimate(f"--pool 8 --phase rollout=160 --phase train=80 --measured {saved(tmp_path)}").exception

    @pytest.mark.parametrize(
        "change", [{"split_units": "1"}, {"turns_units": math.nan}, {"where": "\x1b[2J"}, {"x": 1}]
    )
    def test_a_file_that_is_no_measurement_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        with pytest.raises(SpecError, match="python -m benchmarks elastic --save FILE"):
            raise estimate(f"{POOL} --measured {saved(tmp_path, **change)}").exception


def saved(directory: Path, **change: Any) -> Path:
    path = directory / "measured.json"
    path.write_text(json.dumps({Measured.NAME: {**MEASURED.to_json(), **change}}))
    return path


WORK = "--work 8h "


@pytest.mark.parametrize(
    "words, told",
    [
        ("", "use --work for one run"),
        (WORK, "--preemptions, --mtbp"),
        (WORK + "--pool 16", "--work, --pool"),
        (WORK + "--preemptions 3 --mtbp 4h", "use one of them"),
        ("--preemptions 3", "--work: none given"),
        ("--work -8h --mtbp 4h", "--work='-8h'"),
        ("--work nan --mtbp 4h", "--work='nan'"),
        ("--work 0 --mtbp 4h", "--work='0'"),
        ("--work 99999999999999d --mtbp 4h", "1s to 3650d"),
        (WORK + "--mtbp 0s", "--mtbp='0s'"),
        (WORK + "--preemptions -1", "--preemptions=-1"),
        (WORK + "--preemptions 1e3", "--preemptions"),
        (WORK + "--preemptions 9999999999999999999999", "use 0 to 1000000"),
        (WORK + "--checkpoint-every 0 --preemptions 1", "--checkpoint-every='0'"),
        (WORK + "--checkpoint-every 2m --checkpoint-cost 2m --mtbp 4h", "less than --checkpoint-every (2m)"),
        (WORK + "--checkpoint-cost 2m --preemptions 3", "use --checkpoint-every with it"),
        (WORK + "--requeue-wait inf --preemptions 3", "--requeue-wait='inf'"),
        ("--pool 16", "there are 0"),
        ("--pool 16 --phase a=1", "there are 1"),
        ("--phase a=1 --phase b=1", "--pool: none given"),
        ("--pool 0 --phase a=1 --phase b=1", "--pool=0"),
        ("--pool 1 --phase a=1 --phase b=1", "use a GPU for each"),
        ("--pool 999999999 --phase a=1 --phase b=1", "1 to 100000"),
        ("--pool 16 --phase a=1 --phase a=1", "a is given twice"),
        ("--pool 16 --phase a --phase b=1", "NAME=GPU-MINUTES"),
        ("--pool 16 --phase '\x1b[2J=1' --phase b=1", "NAME=GPU-MINUTES"),
        ("--pool 16 --phase a=nan --phase b=1", "--phase a='nan'"),
        ("--pool 16 --phase a=0 --phase b=1", "more than 0"),
        ("--pool 16 --phase a=-1 --phase b=1", "--phase a='-1'"),
        ("--pool 16 --phase a=1e300 --phase b=1", "--phase a='1e300'"),
        ("--pool 16 --phase a=1e3 --phase b=1", "or GPU-minutes such as 160"),
        ("--pool 16 --phase a=1 --phase b=1 --turn-cost -1s", "--turn-cost='-1s'"),
        ("--pool 16 --phase a=1 --phase b=1 --measured /nonexistent", "No such file"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(words: str, told: str) -> None:
    done = estimate(words)
    message = str(done.exception) if isinstance(done.exception, SpecError) else done.exception.format_message()
    assert getattr(done.exception, "exit_code", None) == protocol.EXIT_USAGE
    assert told in message and "\x1b" not in message and len(message.splitlines()) == 1, message


def test_nothing_heavy_is_loaded_and_errors_are_one_line() -> None:
    code = (
        "import sys; from gangrun import cli; sys.argv[1:] = ['estimate', '--work', '8h', '--mtbp', '0s']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT, timeout=30)
    assert (done.returncode, done.stdout) == (protocol.EXIT_USAGE, "")
    assert done.stderr == "gangrun: --mtbp='0s': use a time of 1s to 3650d\n"


def documented() -> list[tuple[str, str]]:
    """Each command of the document, and what it shows below it."""
    blocks = re.findall(r"^```\n\$ gangrun estimate (.*?)\n```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    joined = [block.replace(" \\\n", " ") for block in blocks]
    return [(block.partition("\n")[0], block.partition("\n")[2]) for block in joined]


@pytest.mark.parametrize("command, shown", documented(), ids=[command for command, _ in documented()])
def test_the_document_shows_what_the_command_says(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    assert said(command).strip() == shown.strip()


def test_the_document_has_an_example_of_each_form() -> None:
    for word in ("--preemptions", "--mtbp", "--pool", "--measured"):
        assert any(word in command for command, _ in documented()), word
