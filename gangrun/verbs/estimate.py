"""`gangrun estimate`: the arithmetic of `gangrun.estimate` for what a person typed."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from codegen.spec import SpecError
from gangrun import estimate as arithmetic
from gangrun import show
from gangrun.estimate import Measured, Outcome, Plan, Pool, Use
from gangrun.explain.phrases import counted
from gangrun.requests import LONGEST_S, parse_duration

MINUTE_S = 60.0
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
PHASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
MOST_PREEMPTIONS = 1_000_000
ENDLESS = "> 10 years"
COLUMNS = ("CHECKPOINT", "PREEMPTED", "SAVES", "LOST", "QUEUE", "IN ALL", "x WORK", "USEFUL")
LEFT_OUT = ("SAVES", "PREEMPTED", "QUEUE", "LOST", "IN ALL")  # in this order, where a terminal has no room for all


class Words(NamedTuple):
    """The options as they were typed."""

    work: str | None
    checkpoint_every: str | None
    checkpoint_cost: str | None
    preemptions: int | None
    mtbp: str | None
    requeue_wait: str | None
    restart_cost: str | None
    pool: int | None
    phase: Sequence[str]
    turn_cost: str | None
    measured: str | None

    def given(self, names: Sequence[str]) -> list[str]:
        return ["--" + name.replace("_", "-") for name in names if getattr(self, name) not in (None, ())]


OF_WORK = Words._fields[: Words._fields.index("pool")]
OF_POOL = Words._fields[len(OF_WORK) :]


def estimate(as_json: bool, **options: Any) -> int:
    words = Words(**options)
    of_work, of_pool = words.given(OF_WORK), words.given(OF_POOL)
    if bool(of_work) == bool(of_pool):
        both = ", ".join(of_work[:1] + of_pool[:1])
        _refuse(both or "estimate", "use --work for one run, or --pool and --phase for a pool of GPUs")
    (_estimate_pool if of_pool else _estimate_work)(words, as_json)
    return 0


def _refuse(what: str, remedy: str) -> NoReturn:
    raise SpecError(f"{what}: {remedy}")


def _required(text: str | None, where: str) -> float:
    if text is None:
        _refuse(where, f"none given; use {where} 8h, for one")
    if text == "0":
        _refuse(f"{where}='0'", "use a time of 1s to 3650d")
    return float(parse_duration(text, where))


def _span(text: str | None, where: str) -> float:
    """A duration that may be nothing, in seconds."""
    return 0.0 if text is None or text == "0" else float(parse_duration(text, where))


# --- one run


def _estimate_work(words: Words, as_json: bool) -> None:
    plan = _plan(words)
    if (words.preemptions is None) == (words.mtbp is None):
        _refuse("--preemptions, --mtbp", "use one of them: how many interruptions, or the mean time between them")
    if words.preemptions is not None:
        _with_count(plan, words.preemptions, as_json)
    else:
        _with_rate(plan, _required(words.mtbp, "--mtbp"), as_json)


def _plan(words: Words) -> Plan:
    work_s, cost_s = _required(words.work, "--work"), _span(words.checkpoint_cost, "--checkpoint-cost")
    every_s = None if words.checkpoint_every is None else _required(words.checkpoint_every, "--checkpoint-every")
    if every_s is not None and cost_s >= every_s:
        limit = f"use less than --checkpoint-every ({show.age(every_s)})"
        _refuse(f"--checkpoint-cost={words.checkpoint_cost!r}", limit)
    if every_s is None and cost_s and words.mtbp is None:
        _refuse(f"--checkpoint-cost={words.checkpoint_cost!r}", "use --checkpoint-every with it")
    waits = _span(words.requeue_wait, "--requeue-wait"), _span(words.restart_cost, "--restart-cost")
    return Plan(work_s, every_s, cost_s, *waits)


def _with_count(plan: Plan, count: int, as_json: bool) -> None:
    if not 0 <= count <= MOST_PREEMPTIONS:
        _refuse(f"--preemptions={count}", f"use 0 to {MOST_PREEMPTIONS}")
    mine, bare = arithmetic.with_count(plan, count), plan.without_checkpoints()
    same_count = arithmetic.with_count(bare, count)
    mtbp_s = arithmetic.rate_of(mine) if plan.every_s else None
    same_rate = arithmetic.with_rate(bare, mtbp_s) if mtbp_s else None
    if as_json:
        without = {"same_count": same_count.to_json(), "same_rate": same_rate and same_rate.to_json()}
        own = mine.to_json() if plan.every_s else None
        show.print_json({**_asked(plan), "preemptions": count, "plan": own, "without": without, "mtbp_s": mtbp_s})
        return
    show.paragraph(_sum(mine))
    click.echo()
    name = f"none, {count} all the same" if same_rate else "none"
    named = [(name, same_count)] + ([("none, as often", same_rate)] if same_rate else [])
    _show_outcomes([*([(_when(mine), mine)] if plan.every_s else []), *named])
    if mtbp_s and same_rate:
        click.echo()
        show.paragraph(_without(plan, count, mtbp_s, same_rate))


def _without(plan: Plan, count: int, mtbp_s: float, same_rate: Outcome) -> str:
    number = _number(same_rate.interruptions) if _is_finite(same_rate) else "far too many"
    come = f"{number} comes" if number == "1" else f"{number} come"
    return (
        f"Without checkpoints a preemption takes all that was done: half of the work, if only {count} came. At the\n"
        f"rate of this plan, one in {_age(mtbp_s)} of machine time, {come} before {show.age(plan.work_s)} pass"
        " without one."
    )


def _with_rate(plan: Plan, mtbp_s: float, as_json: bool) -> None:
    mine, bare = arithmetic.with_rate(plan, mtbp_s), plan.without_checkpoints()
    has_best = plan.cost_s > 0
    table = arithmetic.around(plan, mtbp_s) if has_best else [mine, arithmetic.with_rate(bare, mtbp_s)]
    if not has_best and plan.every_s is None:
        table = table[1:]
    best = _best(plan, mtbp_s) if has_best else None
    if as_json:
        own = mine.to_json() if plan.every_s else None
        found = {"plan": own, "best": best, "table": [one.to_json() for one in table]}
        show.print_json({**_asked(plan), "mtbp_s": mtbp_s, **found})
        return
    if plan.every_s or not has_best:
        show.paragraph(_expected(mine, mtbp_s))
    if best:
        show.paragraph(_best_words(best, table))
    click.echo()
    _show_outcomes([(_when(one, best), one) for one in table])


def _best(plan: Plan, mtbp_s: float) -> dict[str, Any]:
    own = arithmetic.best_plan(plan, mtbp_s)
    return {
        **arithmetic.with_rate(own, mtbp_s).to_json(),
        "endless_s": arithmetic.best_s(plan.cost_s, mtbp_s),
        "young_s": arithmetic.young_s(plan.cost_s, mtbp_s),
        "daly_s": arithmetic.daly_s(plan.cost_s, mtbp_s),
    }


def _best_words(best: Mapping[str, Any], table: Sequence[Outcome]) -> str:
    exact, young, daly = (show.age(best[name]) for name in ("endless_s", "young_s", "daly_s"))
    words = f"The best interval is {exact} (Young 1974: {young}, Daly 2006: {daly})"
    if best["total_s"] is None or table[-1].total_s <= best["total_s"]:
        return words + ";\nfor this little work it is best to make no checkpoint."
    return words + f"; this work in equal parts: {show.age(best['every_s'])}."


def _asked(plan: Plan) -> dict[str, Any]:
    return {
        "work_s": plan.work_s, "checkpoint_cost_s": plan.cost_s, "requeue_wait_s": plan.wait_s,
        "restart_cost_s": plan.restart_s,
    }  # fmt: skip


def _sum(outcome: Outcome) -> str:
    """`16 checkpoints (32 min), 3 x (15 + 40) min lost and waiting: 677 min in all, ...`."""
    plan = outcome.plan
    saved = f"{counted(plan.checkpoints, 'checkpoint')} ({_minutes(plan.checkpoint_s)} min), " if plan.every_s else ""
    return f"{saved}{_interrupted(outcome)}: {_result(outcome)}"


def _interrupted(outcome: Outcome) -> str:
    plan = outcome.plan
    if not outcome.interruptions:
        return "no preemptions"
    each = [(arithmetic.lost_each_s(plan), "lost"), (plan.restart_s, "restarting"), (plan.wait_s, "waiting")]
    minutes, names = zip(*((_minutes(seconds), name) for seconds, name in each if seconds))
    spent = f"({' + '.join(minutes)})" if len(minutes) > 1 else minutes[0]
    doing = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{_number(outcome.interruptions)} x {spent} min {doing}"


def _expected(outcome: Outcome, mtbp_s: float) -> str:
    plan = outcome.plan
    if not _is_finite(outcome):
        return f"With a preemption every {show.age(mtbp_s)} of machine time on average, this takes more than 10 years."
    saved = f"a checkpoint every {show.age(plan.every_s)}" if plan.every_s else "no checkpoints"
    count = _number(outcome.interruptions)
    are = "preemption is" if count == "1" else "preemptions are"
    return f"With {saved}, {count} {are} to be expected: {_result(outcome)}"


def _result(outcome: Outcome) -> str:
    used = f"{_percent(outcome.useful)} of machine time useful"
    return f"{_minutes(outcome.total_s)} min in all,\n{outcome.slowdown:.2f} times the work, {used}."


def _show_outcomes(named: Sequence[tuple[str, Outcome]]) -> None:
    rows = [[name, *_cells(one)] for name, one in named]
    kept = _kept(COLUMNS, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    columns = [COLUMNS[index] for index in kept]
    show.table(columns, _right([[row[index] for index in kept] for row in rows], columns))


def _kept(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The columns for which there is room; figures that are cut off would be others."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    kept = list(range(len(columns)))
    for name in LEFT_OUT:
        if width is None or sum(widths[index] + 2 for index in kept) - 2 <= width:
            break
        kept.remove(columns.index(name))
    return kept


def _when(outcome: Outcome, best: Mapping[str, Any] | None = None) -> str:
    every_s = outcome.plan.every_s
    if every_s is None:
        return "none"
    return f"every {show.age(every_s)}" + (" (best)" if best and every_s == best["every_s"] else "")


def _cells(outcome: Outcome) -> list[str]:
    saves = str(outcome.plan.checkpoints)
    if not _is_finite(outcome):
        return ["", saves, "", "", ENDLESS, "", ""]
    spent = (outcome.lost_s, outcome.wait_s, outcome.total_s)
    shares = f"{outcome.slowdown:.2f}", _percent(outcome.useful)
    return [_number(outcome.interruptions), saves, *map(_age, spent), *shares]


def _is_finite(outcome: Outcome) -> bool:
    return outcome.total_s <= LONGEST_S


# --- a pool


def _estimate_pool(words: Words, as_json: bool) -> None:
    if words.pool is None:
        _refuse("--pool", "none given; use --pool 16, for one")
    pool = Pool(words.pool, _phases(words.phase), _span(words.turn_cost, "--turn-cost"))
    measured = _measured(words.measured, pool) if words.measured is not None else None
    uses = _uses(pool)
    if as_json:
        found = {"uses": [{"name": name, **use._asdict()} for name, use in uses]}
        asked = {"pool": pool.gpus, "phases_gpu_s": pool.phases, "turn_cost_s": pool.turn_s}
        told = {"break_even_s": pool.break_even_s(), "measured": measured and measured.to_json()}
        show.print_json({**asked, **found, **told})
        return
    parts = " + ".join(f"{name} {_minutes(work)}" for name, work in pool.phases.items())
    show.paragraph(f"{pool.gpus} GPUs; an iteration is {parts} GPU-minutes, one phase after the other.")
    click.echo()
    _show_uses(uses, measured)
    limit = show.age(pool.break_even_s())
    click.echo()
    show.paragraph(f"Turns are faster than the best split if each begins within {limit}.")
    show.paragraph(
        "Phases can overlap where each works on results of the iteration before. Twice the GPUs halve a phase."
    )
    if measured:
        show.paragraph(_measured_words(measured))


def _uses(pool: Pool) -> list[tuple[str, Use]]:
    uses = [
        ("even split", pool.even_split()), ("best split", pool.best_split()),
        ("best split, phases overlap", pool.overlapped()), ("taking turns", pool.turns(0.0)),
    ]  # fmt: skip
    if pool.turn_s:
        uses.append((f"taking turns, {show.age(pool.turn_s)} to begin each", pool.turns()))
    return uses


def _show_uses(uses: Sequence[tuple[str, Use]], measured: Measured | None) -> None:
    columns = ["", "GPUS", "ITERATION", "USED", *(["MEASURED"] if measured else [])]
    found = {uses[0][0]: measured.split_units, "taking turns": measured.turns_units} if measured else {}
    rows = []
    for name, use in uses:
        cells = [name, " + ".join(map(str, use.gpus)), _minutes(use.iteration_s) + " min", _percent(use.used)]
        rows.append(cells + ([f"{_number(found[name])} min" if name in found else ""] if measured else []))
    show.table(columns, _right(rows, columns))


def _measured_words(measured: Measured) -> str:
    begin = f"a turn took {_number(measured.turn_s)} s to begin"
    scale = f"{measured.iterations} iterations with minutes of {_number(measured.unit_s)} s"
    return f"Measured on {measured.when}, {measured.where}: {scale}; {begin}."


def _phases(words: Sequence[str]) -> dict[str, float]:
    phases: dict[str, float] = {}
    for word in words:
        name, sign, work = word.partition("=")
        if not sign or PHASE_NAME.fullmatch(name) is None:
            _refuse(f"--phase={word!r}", "use NAME=GPU-MINUTES, such as rollout=160")
        if name in phases:
            _refuse(f"--phase={word!r}", f"{name} is given twice")
        phases[name] = _gpu_s(work, word)
    return phases


def _gpu_s(text: str, word: str) -> float:
    """`160` are minutes; `2h40m` is the same."""
    if NUMBER.fullmatch(text) and 0 < float(text) * MINUTE_S <= LONGEST_S:
        return float(text) * MINUTE_S
    if NUMBER.fullmatch(text):
        _refuse(f"--phase={word!r}", f"use more than 0 and at most {LONGEST_S // 60} GPU-minutes")
    try:
        return float(parse_duration(text, f"--phase {word.partition('=')[0]}"))
    except SpecError as error:
        raise SpecError(f"{error}, or GPU-minutes such as 160") from error


def _measured(path: str, pool: Pool) -> Measured:
    measured = arithmetic.read_measured(path)
    own = {name: gpu_s / MINUTE_S for name, gpu_s in pool.phases.items()}
    if (measured.pool, dict(measured.phases)) != (pool.gpus, own):
        phases = " ".join(f"--phase {name}={work:g}" for name, work in measured.phases.items())
        _refuse(f"--measured={path!r}", f"it is of another pool; use it with --pool {measured.pool} {phases}")
    return measured


# --- figures


def _number(value: float) -> str:
    """Three digits or so: `677`, `29.2`, `0.37`."""
    digits = 0 if value >= 100 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def _minutes(seconds: float) -> str:
    return _number(seconds / MINUTE_S)


def _age(seconds: float) -> str:
    """As `show.age`, but to the nearest of the smaller unit, as the other figures are."""
    unit = 3600 if seconds >= 86400 else MINUTE_S if seconds >= 3600 else 1
    return show.age(round(seconds / unit) * unit)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _right(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> list[list[str]]:
    """All but the first column end at the same place."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    return [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows]
