"""What scontrol prints about a job, its partitions, nodes and reservations, as records; which nodes a job fits. Pure.

Read from the one-line form (`scontrol -o`, `show node -d`), which is alike in Slurm 22.05 and 24.11 but for a few keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import hostlist

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
NOTHING = ("", "(null)", "None", "N/A", "NONE", "n/a")
UNLIMITED = ("UNLIMITED", "INFINITE")
# https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES: what stands behind a state, and its short forms
FLAG_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWERING_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
SHORT_STATES = {
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "COMP": "COMPLETING",
    "DRNG": "DRAINING",
    "MAINT": "MAINTENANCE",
    "RESV": "RESERVED",
    "PLND": "PLANNED",
    "FAILG": "FAILING",
    "NO_RESPOND": "NOT_RESPONDING",
    "INVAL": "INVALID_REG",
    "UNK": "UNKNOWN",
}
OUT_OF_SERVICE = frozenset(
    "DOWN DRAIN DRAINED DRAINING FAIL FAILING ERROR UNKNOWN FUTURE NOT_RESPONDING INVALID_REG".split()
)
SET_ASIDE = frozenset(("MAINTENANCE", "RESERVED"))
NOT_JUST_NOW = frozenset("POWERING_DOWN POWERING_UP REBOOT_ISSUED REBOOT_REQUESTED REBOOT COMPLETING BLOCKED".split())
GRES = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:/]([^:=,(]+))?[:=](\d+)(?=[,(]|$)", re.IGNORECASE)
GRES_WITHOUT_COUNT = re.compile(r"(?:^|,)(?:gres[:/])?gpu(?:[:/]([A-Za-z][^:=,(]*))?(?=[,(]|$)", re.IGNORECASE)
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)", re.IGNORECASE)
MEGABYTES = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
JOB_HEAD = re.compile(r"\bJobName=.* UserId=(?=\S+\(\d+\) GroupId=)")
NODE_REASON = re.compile(r"\sReason=(.*?)(?: \[([^\]\s]+)@([^\]\s]+)\])?(?=\s+(?:Comment|Extra|ReservationName)=|\s*$)")
INNERMOST = re.compile(r"\(([^()]*)\)")


def fields(line: str) -> dict[str, str]:
    """`Key=Value Key=Value with blanks ...` -> a mapping; of a key that comes twice the first counts."""
    found: dict[str, str] = {}
    key = ""
    for word in line.split():
        name, separator, value = word.partition("=")
        if separator and name[:1].isupper():
            key = name if name not in found else ""
            if key:
                found[key] = value
        elif key:
            found[key] += " " + word
    return {key: "" if value in NOTHING else value for key, value in found.items()}


def records(text: str, first_key: str) -> list[str]:
    """The lines that begin a record; sites' banners are not among them."""
    return [line.strip() for line in text.splitlines() if line.lstrip().startswith(first_key + "=")]


def seconds(text: str) -> int | None:
    """`1-02:00:00`, `02:00:00`, `10:00` -> seconds; None for no limit, and for what is no time."""
    match = TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def moment(text: str) -> datetime | None:
    """A point in time as Slurm prints it; None for Unknown, N/A and the like."""
    try:
        return datetime.strptime(text.strip(), TIME_FORMAT)
    except ValueError:
        return None


def megabytes(text: str) -> int:
    match = AMOUNT.fullmatch(text)
    return int(float(match.group(1)) * MEGABYTES[match.group(2).upper()]) if match else 0


def number(text: str) -> int:
    """The whole number that a value begins with (`2-4` -> 2), else 0."""
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0


def gpus_in(text: str) -> dict[str, int]:
    """GPUs by type from any of Slurm's forms (`gpu:h100:8(S:0-1)`, `gres/gpu:a100=2`); the key "" where none is named.

    AllocTRES counts the same GPUs twice, with and without type: the typed ones win.
    """
    found: dict[str, int] = {}
    for kind, count in GRES.findall(text) + [(kind, "1") for kind in GRES_WITHOUT_COUNT.findall(text)]:
        found[kind.lower()] = found.get(kind.lower(), 0) + int(count)
    typed = {kind: count for kind, count in found.items() if kind}
    return typed if typed and "=" in text else found


def hosts_in(text: str) -> frozenset[str]:
    """`n[1-3],m1` -> its hosts; none where it is no such list."""
    try:
        return frozenset(hostlist.expand_hostlist(text)) if text not in NOTHING else frozenset()
    except hostlist.BadHostlist:
        return frozenset()


class Request(NamedTuple):
    """What a job asks for; per node it is the least that every one of its nodes must have."""

    nodes: int = 1
    cpus: int = 1
    total_cpus: int = 1
    memory_mb: int = 0
    gpus: int = 0
    total_gpus: int = 0  # where Slurm may spread them over the nodes (--gpus)
    gpu_type: str = ""
    features: str = ""
    is_exclusive: bool = False
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


class Job(NamedTuple):
    """A job as `scontrol show job` tells of it. `start` is an estimate while the job waits."""

    id: str
    state: str
    reason: str
    partitions: tuple[str, ...]
    user: str
    account: str
    qos: str
    reservation: str
    time_limit_s: int | None
    dependency: str
    licenses: str
    array_throttle: int
    restarts: int
    eligible: datetime | None
    start: datetime | None
    deadline: datetime | None
    request: Request


class Node(NamedTuple):
    """A node now. `free_gpus` is None where nothing tells how many are in use."""

    name: str
    states: frozenset[str]
    cpus: int
    free_cpus: int
    memory_mb: int
    free_memory_mb: int
    gpus: Mapping[str, int]
    free_gpus: Mapping[str, int] | None
    features: frozenset[str]
    partitions: tuple[str, ...]
    reason: str

    @property
    def is_out(self) -> bool:
        """Out of service until somebody mends it."""
        return bool(self.states & OUT_OF_SERVICE)

    @property
    def is_set_aside(self) -> bool:
        return bool(self.states & SET_ASIDE)

    @property
    def is_ready(self) -> bool:
        return not self.states & NOT_JUST_NOW

    @property
    def is_untouched(self) -> bool:
        return self.free_cpus == self.cpus and self.free_gpus in (None, self.gpus)

    @property
    def state(self) -> str:
        """`mixed+drain`, for people."""
        return "+".join(sorted(self.states, key=lambda word: (word in OUT_OF_SERVICE, word))).lower()


class Partition(NamedTuple):
    """What a partition allows; None is no limit, an empty list is everybody."""

    name: str
    state: str
    max_time_s: int | None
    max_nodes: int | None
    min_nodes: int
    max_cpus_per_node: int | None
    total_nodes: int
    accounts: tuple[str, ...]
    denied_accounts: tuple[str, ...]
    groups: tuple[str, ...]
    qos: tuple[str, ...]
    denied_qos: tuple[str, ...]
    is_special: bool  # for root, or for reservations alone


class Reservation(NamedTuple):
    name: str
    start: datetime | None
    end: datetime | None
    nodes: frozenset[str]
    takes_whole_nodes: bool
    is_maintenance: bool


def parse_jobs(text: str) -> list[Job]:
    return [_job(fields(JOB_HEAD.sub("UserId=", line))) for line in records(text, "JobId")]


def _job(words: Mapping[str, str]) -> Job:
    return Job(
        id=words.get("JobId", ""),
        state=words.get("JobState", ""),
        reason=words.get("Reason", "").replace("_", " "),
        partitions=_names(words.get("Partition", "")),
        user=words.get("UserId", "").partition("(")[0],
        account=words.get("Account", ""),
        qos=words.get("QOS", ""),
        reservation=words.get("Reservation", ""),
        time_limit_s=seconds(words.get("TimeLimit", "")),
        dependency=words.get("Dependency", ""),
        licenses=words.get("Licenses", ""),
        array_throttle=number(words.get("ArrayTaskThrottle", "")),
        restarts=number(words.get("Restarts", "")),
        eligible=moment(words.get("EligibleTime", "")),
        start=moment(words.get("StartTime", "")),
        deadline=moment(words.get("Deadline", "")),
        request=_request(words),
    )


def _request(words: Mapping[str, str]) -> Request:
    nodes = max(1, number(words.get("NumNodes", "")))
    cpus = max(1, number(words.get("MinCPUsNode", "")))
    kind, per_node, total = _gpu_request(words, nodes)
    per_cpu = megabytes(words.get("MinMemoryCPU", ""))
    return Request(
        nodes=nodes,
        cpus=cpus,
        total_cpus=max(cpus, number(words.get("NumCPUs", ""))),
        memory_mb=megabytes(words.get("MinMemoryNode", "")) or per_cpu * cpus,
        gpus=per_node,
        total_gpus=total,
        gpu_type=kind,
        features=words.get("Features", ""),
        is_exclusive=words.get("OverSubscribe") in ("NO", "EXCLUSIVE"),
        only=hosts_in(words.get("ReqNodeList", "")),
        without=hosts_in(words.get("ExcNodeList", "")),
    )


def _gpu_request(words: Mapping[str, str], nodes: int) -> tuple[str, int, int]:
    """The type, the GPUs of each node, and those of the job where the nodes may have unequal shares."""
    for key, factor in (("TresPerNode", 1), ("TresPerTask", _tasks_per_node(words, nodes))):
        for kind, count in gpus_in(words.get(key, "")).items():
            return kind, count * factor, 0
    for kind, count in gpus_in(words.get("TresPerJob", "")).items():
        return kind, 1, count
    return "", 0, 0


def _tasks_per_node(words: Mapping[str, str], nodes: int) -> int:
    told = number(words.get("NtasksPerN:B:S:C", ""))
    return told or max(1, number(words.get("NumTasks", "")) // nodes)


def parse_nodes(text: str) -> list[Node]:
    return [_node(line) for line in records(text, "NodeName")]


def _node(line: str) -> Node:
    told = NODE_REASON.search(line)
    words = fields(line[: told.start()] if told else line)
    cpus, memory = number(words.get("CPUEfctv") or words.get("CPUTot", "")), number(words.get("RealMemory", ""))
    gpus = gpus_in(words.get("Gres", ""))
    return Node(
        name=words.get("NodeName", ""),
        states=states_in(words.get("State", "")),
        cpus=cpus,
        free_cpus=max(0, cpus - number(words.get("CPUAlloc", ""))),
        memory_mb=memory,
        free_memory_mb=max(0, memory - number(words.get("AllocMem", ""))),
        gpus=gpus,
        free_gpus=_free_gpus(words, gpus),
        features=frozenset(_names(words.get("ActiveFeatures", ""))),
        partitions=_names(words.get("Partitions", "")),
        reason=_reason(told) if told else "",
    )


def _free_gpus(words: Mapping[str, str], gpus: Mapping[str, int]) -> Mapping[str, int] | None:
    """GresUsed is there with `show node -d`; AllocTRES counts GPUs only where accounting does."""
    if "GresUsed" not in words and "gres/gpu" not in words.get("CfgTRES", "") and gpus:
        return None
    used = gpus_in(words["GresUsed"] if "GresUsed" in words else words.get("AllocTRES", ""))
    if set(used) <= set(gpus):
        return {kind: max(0, count - used.get(kind, 0)) for kind, count in gpus.items()}
    total = sum(used.values())  # the two name no common types: only the sum is known
    return {kind: max(0, count - total) for kind, count in gpus.items()} if len(gpus) == 1 else None


def _reason(told: re.Match[str]) -> str:
    text, who, when = told.groups()
    return f"{text} ({who}, {when[:16].replace('T', ' ')})" if who else text.strip()


def states_in(text: str) -> frozenset[str]:
    """`MIXED+DRAIN`, `idle*`, `down$` -> the state and its flags, in their long names."""
    found: set[str] = set()
    for word in text.upper().split("+"):
        while word and word[-1] in FLAG_MARKS:
            found.add(FLAG_MARKS[word[-1]])
            word = word[:-1]
        found.add(SHORT_STATES.get(word, word))
    return frozenset(found - {""})


def parse_partitions(text: str) -> dict[str, Partition]:
    found = [_partition(fields(line)) for line in records(text, "PartitionName")]
    return {partition.name: partition for partition in found}


def _partition(words: Mapping[str, str]) -> Partition:
    return Partition(
        name=words.get("PartitionName", ""),
        state=words.get("State", ""),
        max_time_s=seconds(words.get("MaxTime", "")),
        max_nodes=_limit(words.get("MaxNodes", "")),
        min_nodes=number(words.get("MinNodes", "")),
        max_cpus_per_node=_limit(words.get("MaxCPUsPerNode", "")),
        total_nodes=number(words.get("TotalNodes", "")),
        accounts=_allowed(words.get("AllowAccounts", "")),
        denied_accounts=_names(words.get("DenyAccounts", "")),
        groups=_allowed(words.get("AllowGroups", "")),
        qos=_allowed(words.get("AllowQos", "")),
        denied_qos=_names(words.get("DenyQos", "")),
        is_special="YES" in (words.get("RootOnly"), words.get("ReqResv")),
    )


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _allowed(text: str) -> tuple[str, ...]:
    return () if text.upper() == "ALL" else _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def parse_reservations(text: str, nodes: Sequence[Node] = ()) -> list[Reservation]:
    """With the nodes it is known which reservations leave a part of theirs to others."""
    cpus = {node.name: node.cpus for node in nodes}
    return [_reservation(fields(line), cpus) for line in records(text, "ReservationName")]


def _reservation(words: Mapping[str, str], cpus: Mapping[str, int]) -> Reservation:
    nodes, reserved = hosts_in(words.get("Nodes", "")), re.search(r"\bcpu=(\d+)", words.get("TRES", ""))
    return Reservation(
        name=words.get("ReservationName", ""),
        start=moment(words.get("StartTime", "")),
        end=moment(words.get("EndTime", "")),
        nodes=nodes,
        takes_whole_nodes=reserved is None or int(reserved.group(1)) >= sum(cpus.get(name, 0) for name in nodes),
        is_maintenance="MAINT" in words.get("Flags", "").split(","),
    )


# --- who fits where


def count_gpus(gpus: Mapping[str, int] | None, kind: str = "") -> int:
    """All of them, or those of a type; 0 where it is not known."""
    gpus = gpus or {}
    return gpus.get(kind, 0) if kind else sum(gpus.values())


def has_features(expression: str, features: Iterable[str]) -> bool | None:
    """Whether a node meets `a&b`, `a|b`, `(a|b)&c`; None for forms that are about all nodes (`[a*2&b]`)."""
    if any(mark in expression for mark in "[]*:"):
        return None
    has = set(features)
    while (inner := INNERMOST.search(expression)) is not None:
        verdict = "+" if _holds(inner.group(1), has) else "-"
        expression = expression[: inner.start()] + verdict + expression[inner.end() :]
    return _holds(expression, has)


def _holds(expression: str, has: set[str]) -> bool:
    """Without parentheses; from the left to the right, as Slurm does."""
    result, operator = True, "&"
    for word in re.split(r"([&|,])", expression):
        if word in ("&", "|", ","):
            operator = word
            continue
        holds = word in ("", "+") or word in has
        result = (result or holds) if operator == "|" else (result and holds)
    return result


def can_hold(node: Node, request: Request) -> bool:
    """Whether one of the job's nodes could be this one, were it idle and in service."""
    return (
        node.cpus >= request.cpus
        and node.memory_mb >= request.memory_mb
        and count_gpus(node.gpus, request.gpu_type) >= request.gpus
        and has_features(request.features, node.features) is not False
        and node.name not in request.without
        and (node.name in request.only or len(request.only) < request.nodes)
    )


def holds_now(node: Node, request: Request) -> bool:
    """Whether it could be this one with what is free on it now."""
    return (
        node.is_ready
        and node.free_cpus >= request.cpus
        and node.free_memory_mb >= request.memory_mb
        and count_gpus(node.free_gpus, request.gpu_type) >= request.gpus
        and (node.is_untouched or not request.is_exclusive)
    )


def is_enough(nodes: Sequence[Node], request: Request, when_idle: bool = False) -> bool:
    """Whether the job could have its nodes among these, each of which fits."""
    if len(nodes) < request.nodes or not request.only <= {node.name for node in nodes}:
        return False
    gpus = [count_gpus(node.gpus if when_idle else node.free_gpus, request.gpu_type) for node in nodes]
    cpus = [node.cpus if when_idle else node.free_cpus for node in nodes]
    return _largest(gpus, request.nodes) >= request.total_gpus and _largest(cpus, request.nodes) >= request.total_cpus


def _largest(counts: Sequence[int], number_of: int) -> int:
    return sum(sorted(counts, reverse=True)[:number_of])


class Fit(NamedTuple):
    """A partition's nodes, each list a part of the one before it."""

    partition: str
    all: list[Node]
    ever: list[Node]  # could hold the job's share, idle and in service
    up: list[Node]  # and are in service, and not set aside for others
    now: list[Node]  # and have it free


def fit(nodes: Sequence[Node], partition: str, request: Request, own: frozenset[str] | None = None) -> Fit:
    """`own` are the nodes of the job's reservation: those and no others are for it."""
    inside = [node for node in nodes if partition in node.partitions and (own is None or node.name in own)]
    ever = [node for node in inside if can_hold(node, request)]
    up = [node for node in ever if not node.is_out and (own is not None or not node.is_set_aside)]
    return Fit(partition, inside, ever, up, [node for node in up if holds_now(node, request)])
