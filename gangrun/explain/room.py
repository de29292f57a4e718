"""What room there is for a job that waits: partitions, nodes, reservations, the line, and what would find room. Pure.

"Room" and "free" mean now: other jobs may stand before this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from gangrun.explain import reasons
from gangrun.explain.nodes import (
    Fit,
    Job,
    Node,
    Partition,
    Request,
    Reservation,
    count_gpus,
    fit,
    has_features,
    holds_now,
    is_enough,
    number,
)
from gangrun.explain.phrases import (
    LISTED,
    asked_words,
    clock,
    counted,
    gpu_nodes_words,
    gpus_words,
    memory_words,
    some,
    sum_words,
    when_words,
)
from gangrun.explain.reasons import Explanation
from gangrun.requests import slurm_time

SMALL_MEMORY_MB = 1024  # what a site's default gives to one CPU is not worth a word


class Waiting(NamedTuple):
    """A job in the line."""

    id: int
    priority: int
    user: str
    nodes: str
    start: datetime | None
    reason: str


class View(NamedTuple):
    """All answers about one job, read; None for what was not answered."""

    job: Job
    now: datetime | None
    nodes: list[Node] | None
    partitions: Mapping[str, Partition] | None
    reservations: list[Reservation] | None
    start: datetime | None  # Slurm's estimate
    is_start_told: bool
    line: list[Waiting] | None
    mine: Mapping[int, tuple[str, str]] | None
    licenses: str
    limits: str
    qos: str
    unknown: tuple[str, ...]

    @property
    def own_reservation(self) -> Reservation | None:
        return next((one for one in self.reservations or () if one.name == self.job.reservation), None)


# --- what partitions allow


def own_problems(view: View) -> list[str]:
    """Why none of its partitions can take the job; empty if one can, or if that is not known."""
    if view.partitions is None:
        return []
    own = [view.partitions.get(name) for name in view.job.partitions]
    problems = [_problem(one, view.job, view.job.request) if one else None for one in own]
    return [problem for problem in problems if problem] if problems and all(problems) else []


def _problem(one: Partition, job: Job, request: Request) -> str | None:
    """The first thing in a partition's rules that stands against the job."""
    limit = job.time_limit_s
    checks = (
        (one.state not in ("UP", ""), f"partition {one.name} is {one.state}: it starts no jobs"),
        (
            limit is not None and one.max_time_s is not None and limit > one.max_time_s,
            f"you asked for {slurm_time(limit or 0)} in partition {one.name}, "
            f"which allows {slurm_time(one.max_time_s or 0)}",
        ),
        (
            one.max_nodes is not None and request.nodes > one.max_nodes,
            f"you asked for {request.nodes} nodes in partition {one.name}, which allows a job {one.max_nodes}",
        ),
        (
            0 < one.total_nodes < request.nodes,
            f"you asked for {request.nodes} nodes in partition {one.name}, which has {one.total_nodes}",
        ),
        (
            request.nodes < one.min_nodes,
            f"you asked for {counted(request.nodes, 'node')} in partition {one.name}, which wants {one.min_nodes}",
        ),
        (
            one.max_cpus_per_node is not None and request.cpus > one.max_cpus_per_node,
            f"you asked for {request.cpus} CPUs per node in partition {one.name}, which allows {one.max_cpus_per_node}",
        ),
        (not _is_listed(job.account, one.accounts, one.denied_accounts), _not_for(one, "account", job.account)),
        (not _is_listed(job.qos, one.qos, one.denied_qos), _not_for(one, "QOS", job.qos)),
    )
    return next((words for is_so, words in checks if is_so), None)


def _is_listed(name: str, allowed: Sequence[str], denied: Sequence[str]) -> bool:
    """True where it is not known, too: without accounting no job has an account."""
    return not name or (name not in denied and (not allowed or name in allowed))


def _not_for(one: Partition, what: str, name: str) -> str:
    allowed = one.accounts if what == "account" else one.qos
    return f"partition {one.name} is not for {what} {name}" + (f" but for {some(allowed)}" if allowed else "")


def not_allowed(view: View, problems: Sequence[str]) -> Explanation:
    own = [view.partitions[name] for name in view.job.partitions if view.partitions and name in view.partitions]
    longest = max((one.max_time_s for one in own if one.max_time_s), default=None)
    limit = view.job.time_limit_s
    advice = []
    if longest and limit and limit > longest:
        allowed = slurm_time(longest)
        advice.append(f"--time={allowed} or less: scontrol update jobid={view.job.id} timelimit={allowed}")
    return Explanation(problems[0], tuple(problems[1:]), (*advice, *_other_partitions(view)))


# --- nodes


def turn(view: View) -> Explanation:
    """The nodes decide, and the line before them."""
    reason = reasons.of(view.job.reason)
    words = f"job {view.job.id} waits: {reason.words if reason else view.job.reason}"
    own = tuple(own_problems(view))
    if view.nodes is None or (view.job.reservation and view.own_reservation is None):
        return Explanation(words, (*own, *_place_facts(view)))
    best = _best_fit(view, view.job.request, view.job.partitions)
    hidden = _hidden(view, best)
    facts = (*hidden, *own, _fit_fact(view, best), *_out_facts(view, best), *_place_facts(view))
    return Explanation(words, facts, _ways(view, best)) if hidden else _of_fit(view, best, words, facts)


def lacking(view: View) -> Explanation | None:
    """If it is not for others' jobs that it waits: too few nodes could ever hold it, or are in service."""
    if view.nodes is None or view.job.reservation:
        return None
    best = _best_fit(view, view.job.request, view.job.partitions)
    if _hidden(view, best) or is_enough(best.up, view.job.request, when_idle=True):
        return None
    return _of_fit(view, best, "", (_fit_fact(view, best), *_out_facts(view, best)))


def _of_fit(view: View, best: Fit, words: str, facts: tuple[str, ...]) -> Explanation:
    request = view.job.request
    if not is_enough(best.ever, request, when_idle=True):
        headline = _never_words(best, request)
    elif not is_enough(best.up, request, when_idle=True):
        headline = _out_words(view, best)
    elif not is_enough(_unreserved(view, best.up), request, when_idle=True):
        headline = _reserved_words(view, best.up)
    elif request.gpus and any(node.free_gpus is None for node in best.up):
        headline, facts = words, ("unknown: how many GPUs are in use; scontrol does not tell it here", *facts)
    elif not is_enough(best.now, request):
        headline = _busy_words(best, request)
    elif not is_enough(_unreserved(view, best.now), request):
        headline = _reserved_words(view, best.now)
    else:
        return _free_but_waiting(view, best, words, facts)
    return Explanation(headline, facts, _ways(view, best))


def _best_fit(view: View, request: Request, partitions: Sequence[str]) -> Fit:
    own = view.own_reservation.nodes if view.job.reservation and view.own_reservation else None
    fits = [fit(view.nodes or [], name, request, own) for name in partitions or ("",)]
    return max(fits, key=lambda one: (is_enough(one.now, request), *map(len, (one.now, one.up, one.ever, one.all))))


def _hidden(view: View, found: Fit) -> list[str]:
    """What cannot be seen must not be counted as missing."""
    facts = []
    own = (view.partitions or {}).get(found.partition)
    if own is not None and not view.job.reservation and len(found.all) < own.total_nodes:
        hidden = f"{own.total_nodes - len(found.all)} of the {own.total_nodes} nodes of partition {own.name}"
        facts.append(f"unknown: what {hidden} hold; you cannot see them")
    if has_features(view.job.request.features, ()) is None:
        facts.append(f"unknown: which nodes together are {view.job.request.features!r} (--constraint)")
    return facts


def _fit_fact(view: View, found: Fit) -> str:
    where = f"reservation {view.job.reservation}" if view.job.reservation else f"partition {found.partition}"
    able = f"able to hold one of yours if idle: {len(found.ever)}"
    return (
        f"{where} has {counted(len(found.all), 'node')}; {able}, "
        f"of these in service: {len(found.up)}, of these with room now: {len(found.now)}"
    )


def _out_facts(view: View, found: Fit) -> list[str]:
    """Which nodes that would do cannot be had, and the words somebody wrote there; equal words together."""
    out = [node for node in found.ever if node not in found.up]
    by_words: dict[str, list[str]] = {}
    for node in out:
        by_words.setdefault(_out_reason(view, node), []).append(node.name)
    return [f"not to be had: {some(names)}, {words}" for words, names in list(by_words.items())[:LISTED]]


def _out_reason(view: View, node: Node) -> str:
    """`mixed+drain: bad DIMM (root, ...)`, or which reservation has it."""
    reserved = [one for one in view.reservations or () if node.name in one.nodes and _is_active(view, one)]
    if reserved and not node.is_out:
        return f"in {_reservation_words(reserved[0])} until {clock(reserved[0].end)}"
    return node.state + (f": {node.reason}" if node.reason else "")


def _reservation_words(one: Reservation) -> str:
    return f"{'maintenance' if one.is_maintenance else 'reservation'} {one.name}"


def _is_active(view: View, one: Reservation) -> bool:
    return bool(view.now and one.start and one.end and one.start <= view.now < one.end)


def _never_words(found: Fit, request: Request) -> str:
    where, asked = f"of partition {found.partition}", f"you asked for {asked_words(request)}{_conditions(request)}"
    if not found.all:
        return f"no node {where} is known; {asked}"
    if not found.ever and fit(found.all, found.partition, request._replace(features="")).ever:
        return f"no node {where} that could hold it has the features {request.features!r} (--constraint)"
    if request.gpus and max(count_gpus(node.gpus, request.gpu_type) for node in found.all) < request.gpus:
        most = _best_gpus(found.all)
        return f"no node {where} has {gpus_words(request.gpus, request.gpu_type)}: {most}; {asked}"
    if len(found.ever) < request.nodes:
        able = f"only {counted(len(found.ever), 'node')}" if found.ever else "no node"
        return f"{able} {where} could hold it, even if idle; {asked}"
    return f"no {counted(request.nodes, 'node')} {where} have enough together; {asked}"


def _best_gpus(nodes: Sequence[Node]) -> str:
    best = max(nodes, key=lambda node: count_gpus(node.gpus))
    told = [gpus_words(count, kind) for kind, count in best.gpus.items()]
    return f"the most is {' and '.join(told)}" if told else "they have none"


def _conditions(request: Request) -> str:
    told = [f"on {some(sorted(request.only))}"] if request.only else []
    told += [f"not on {some(sorted(request.without))}"] if request.without else []
    told += [f"with the features {request.features!r}"] if request.features else []
    return f" ({', '.join(told)})" if told else ""


def _out_words(view: View, found: Fit) -> str:
    asked = f"{asked_words(view.job.request)}{_conditions(view.job.request)}"
    out = [node for node in found.ever if node not in found.up]
    told = "; ".join(f"{node.name} is {_out_reason(view, node)}" for node in out[:2])
    more = f"; and {len(out) - 2} more" if len(out) > 2 else ""
    have = f"only {len(found.up)} can be had now" if found.up else "none can be had now"
    return f"you asked for {asked}: {counted(len(found.ever), 'node')} could hold it, but {have} ({told}{more})"


# --- reservations


def _unreserved(view: View, nodes: Sequence[Node]) -> list[Node]:
    """Those that nobody else's reservation takes before the job would be over."""
    taken = {name for one in _in_the_way(view) for name in one.nodes}
    return [node for node in nodes if node.name not in taken]


def _in_the_way(view: View) -> list[Reservation]:
    """Reservations that begin before the job would end, first things first."""
    if view.now is None:
        return []
    limit, now = _time_limit(view), view.now
    others = [one for one in view.reservations or () if one.name != view.job.reservation and one.takes_whole_nodes]
    found = [(one.start, one) for one in others if one.start and one.end and one.end > now]
    found = [(start, one) for start, one in found if limit is None or start < now + timedelta(seconds=limit)]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _time_limit(view: View) -> int | None:
    """The job's own, else the longest that its partitions allow."""
    if view.job.time_limit_s is not None:
        return view.job.time_limit_s
    own = [view.partitions.get(name) for name in view.job.partitions] if view.partitions else []
    return max((one.max_time_s for one in own if one and one.max_time_s), default=None)


def _reserved_words(view: View, nodes: Sequence[Node]) -> str:
    names = {node.name for node in nodes}
    one = next(one for one in _in_the_way(view) if one.nodes & names)
    what, taken = _reservation_words(one), some(sorted(one.nodes & names))
    room = f"without that {counted(len(nodes), 'node')} could take it; you asked for {asked_words(view.job.request)}"
    if _is_active(view, one):
        return f"{what} has {taken} until {clock(one.end)}; {room}"
    limit = _time_limit(view)
    lasts = f"its {slurm_time(limit)} are over" if limit is not None else "a job without a time limit is over"
    return f"{what} begins {when_words(view.now, one.start)} on {taken}, before {lasts}; {room}"


# --- busy nodes


def _busy_words(found: Fit, request: Request) -> str:
    only_gpus = request._replace(cpus=0, total_cpus=0, memory_mb=0, is_exclusive=False)
    if request.gpus and not is_enough([node for node in found.up if holds_now(node, only_gpus)], only_gpus):
        return _free_gpu_words(found, request)
    if len(found.now) >= request.nodes:
        return _too_few_cpus_words(found, request)
    return _scarce_words(found, request)


def _free_gpu_words(found: Fit, request: Request) -> str:
    """`8 GPUs are free, but on 4 nodes (3+2+2+1); you asked for 2 nodes with 8 each: no node qualifies`."""
    counts = sorted((count_gpus(node.free_gpus, request.gpu_type) for node in found.up), reverse=True)
    counts, kind = [count for count in counts if count], gpus_words(1, request.gpu_type)[2:]
    asked, wanted = _short_words(request), request.total_gpus or request.gpus * request.nodes
    if not counts:
        return f"no {kind} of partition {found.partition} is free; you asked for {asked_words(request)}"
    where = f"on {counted(len(counts), 'node')} ({sum_words(counts)})" if len(counts) > 1 else "on 1 node"
    but = "but " if sum(counts) >= wanted else ""
    free = f"{gpus_words(sum(counts), request.gpu_type)} {'is' if sum(counts) == 1 else 'are'} free, {but}{where}"
    return f"{free}; you asked for {asked}: {_qualify(counts, request)}"


def _short_words(request: Request) -> str:
    """Short, for the GPUs have been named already."""
    nodes = counted(request.nodes, "whole node" if request.is_exclusive else "node")
    if request.total_gpus:
        return f"{request.total_gpus} on {nodes}"
    return f"{nodes} with {request.gpus}{' each' if request.nodes > 1 else ''}"


def _qualify(counts: Sequence[int], request: Request) -> str:
    if request.total_gpus:
        most = sum(counts[: request.nodes])
        return f"{counted(request.nodes, 'node')} {'has' if request.nodes == 1 else 'have'} at most {most} free"
    able = sum(count >= request.gpus for count in counts)
    if not able:
        return "no node qualifies"
    return f"only {counted(able, 'node')} {'qualifies' if able == 1 else 'qualify'}"


def _too_few_cpus_words(found: Fit, request: Request) -> str:
    free = sum(sorted((node.free_cpus for node in found.now), reverse=True)[: request.nodes])
    together = f"{counted(request.nodes, 'node')} of partition {found.partition} have at most {free} CPUs free together"
    return f"{together}; you asked for {request.total_cpus}"


def _scarce_words(found: Fit, request: Request) -> str:
    """On how many nodes each thing is free, and all of them."""
    gpus, memory = gpus_words(request.gpus, request.gpu_type), memory_words(request.memory_mb)
    cpus = counted(request.cpus, "CPU")
    nothing = Request(cpus=0, total_cpus=0)
    alone = (
        ("empty", request.is_exclusive, nothing._replace(is_exclusive=request.is_exclusive)),
        (f"with {gpus} free", request.gpus > 0, nothing._replace(gpus=request.gpus, gpu_type=request.gpu_type)),
        (f"with {cpus} free", not request.is_exclusive, nothing._replace(cpus=request.cpus)),
        (f"with {memory} free", request.memory_mb >= SMALL_MEMORY_MB, nothing._replace(memory_mb=request.memory_mb)),
    )
    told = [f"{words}: {sum(holds_now(node, one) for node in found.up)}" for words, is_asked, one in alone if is_asked]
    told += [f"with all of that: {len(found.now)}"] if len(told) > 1 else []
    nodes = f"of {counted(len(found.up), 'node')} of partition {found.partition} that could hold it"
    return f"{nodes}, {', '.join(told)}; you asked for {asked_words(request)}"


# --- the line


def _free_but_waiting(view: View, best: Fit, words: str, facts: tuple[str, ...]) -> Explanation:
    before, room = _before(view), f"{counted(len(best.now), 'node')} with room for it now"
    if before:
        stand = (
            f"{counted(len(before), 'job')} with more priority {'stands' if len(before) == 1 else 'stand'} before it"
        )
        headline = f"{_place(view)} of partition {best.partition}: {stand}"
        kept = f"{room}; Slurm keeps them for jobs before it, or is about to give them to it"
        return Explanation(headline, (kept, *facts), _gap_advice(view, before))
    is_all_known = None not in (view.line, view.reservations, view.now)
    if is_all_known and view.job.reason in ("", "Resources", "Priority"):
        words = f"job {view.job.id} is about to start: there {'is' if len(best.now) == 1 else 'are'} {room}"
    return Explanation(words, facts, _ways(view, best))


def _before(view: View) -> list[Waiting]:
    """Who is before it in its partitions, by priority; those that are held or not due are not."""
    line = view.line or []
    own = next((one for one in line if one.id == number(view.job.id)), None)
    return [] if own is None else [one for one in line[: line.index(own)] if _is_due(one)]


def _is_due(one: Waiting) -> bool:
    reason = reasons.of(one.reason)
    return reason is None or reason.kind == reasons.TURN or one.reason == "Licenses"


def _place(view: View) -> str:
    due = [one for one in view.line or () if _is_due(one)]
    return f"job {view.job.id} is number {len(_before(view)) + 1} of {len(due)} in the line"


def _place_facts(view: View) -> tuple[str, ...]:
    before = _before(view)
    if not any(one.id == number(view.job.id) and _is_due(one) for one in view.line or ()):
        return ()
    told = some(f"job {one.id} ({one.user}, {counted(number(one.nodes), 'node')})" for one in before)
    return (_place(view) + (f"; before it: {told}" if before else ""),)


def _gap_advice(view: View, before: Sequence[Waiting]) -> tuple[str, ...]:
    """A job that is over before those ahead begin may go first (backfill)."""
    starts = [one.start for one in before if one.start and view.now and one.start > view.now]
    if not starts or view.now is None:
        return ()
    gap, limit = _gap_s(view.now, min(starts)), _time_limit(view)
    if gap < 60 or (limit is not None and limit <= gap):
        return ()
    return (f"--time={slurm_time(gap)} or less would be over before they begin, by Slurm's estimate: it may go first",)


def _gap_s(now: datetime, start: datetime) -> int:
    """Whole minutes, and one for typing."""
    return (int((start - now).total_seconds()) // 60 - 1) * 60


# --- what would make it start sooner: each is tried on the nodes as they are


def _ways(view: View, best: Fit) -> tuple[str, ...]:
    return (*_less_per_node(view), *_without_a_wish(view), *_other_partitions(view), *_shorter(view, best))


def _room(view: View, request: Request, partitions: Sequence[str] | None = None) -> bool:
    """Whether such a job would find its nodes free now, in partitions that allow it."""
    own = view.job.partitions if partitions is None else partitions
    known = view.partitions or {}
    allowed = [name for name in own if name not in known or not _problem(known[name], view.job, request)]
    if not allowed:
        return False
    return is_enough(_unreserved(view, _best_fit(view, request, allowed).now), request)


def _less_per_node(view: View) -> list[str]:
    """As many GPUs on more nodes; else fewer GPUs."""
    asked = view.job.request
    if not asked.gpus or asked.total_gpus:
        return []
    wanted = asked.gpus * asked.nodes
    for gpus in range(asked.gpus - 1, 0, -1):
        more = _resized(asked, wanted // gpus, gpus)
        if wanted % gpus == 0 and _room(view, more):
            return [f"{gpu_nodes_words(more)} ({wanted} as before) would find room now"]
    fewer = (_resized(asked, asked.nodes, gpus) for gpus in range(asked.gpus - 1, 0, -1))
    return [f"{gpu_nodes_words(one)} would find room now" for one in fewer if _room(view, one)][:1]


def _resized(asked: Request, nodes: int, gpus: int) -> Request:
    cpus = max(asked.cpus * nodes, asked.total_cpus * nodes // asked.nodes)
    return asked._replace(nodes=nodes, gpus=gpus, total_cpus=cpus)


def _without_a_wish(view: View) -> list[str]:
    asked, none = view.job.request, frozenset[str]()
    wishes = (
        (asked.features, asked._replace(features=""), f"without --constraint={asked.features}"),
        (asked.only, asked._replace(only=none), f"without --nodelist={','.join(sorted(asked.only))}"),
        (asked.without, asked._replace(without=none), f"without --exclude={','.join(sorted(asked.without))}"),
        (asked.gpu_type, asked._replace(gpu_type=""), f"with GPUs of any type instead of {asked.gpu_type}"),
        (asked.is_exclusive, asked._replace(is_exclusive=False), "without --exclusive"),
    )
    return [f"{words} it would find room now" for wish, request, words in wishes if wish and _room(view, request)]


def _other_partitions(view: View) -> list[str]:
    """Open to everybody, allowing what the job asks for, and with room now."""
    others = [one for name, one in (view.partitions or {}).items() if name not in view.job.partitions]
    known = [one for one in others if (view.job.account or not one.accounts) and (view.job.qos or not one.qos)]
    is_open = [one for one in known if not one.groups and not one.is_special]
    able = [one.name for one in is_open if view.nodes is not None and _room(view, view.job.request, [one.name])]
    return [f"--partition={name} has room for it now" for name in able[:LISTED]]


def _shorter(view: View, best: Fit) -> list[str]:
    """Over before a reservation begins."""
    if not is_enough(best.now, view.job.request):
        return []
    for one in _in_the_way(view):
        gap = _gap_s(view.now, one.start) if one.start and view.now else 0
        job = view.job._replace(time_limit_s=gap)
        if gap >= 60 and _room(view._replace(job=job), job.request):
            return [f"--time={slurm_time(gap)} or less would be over before {one.name} begins"]
    return []
