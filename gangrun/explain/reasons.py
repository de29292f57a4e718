"""Slurm's reasons for a job that waits, in plain words: one table, and the grammar of its names for limits. Pure."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# https://slurm.schedmd.com/job_reason_codes.html, https://slurm.schedmd.com/resource_limits.html
CODES_URL = "https://slurm.schedmd.com/job_reason_codes.html"
LIMITS_URL = "https://slurm.schedmd.com/resource_limits.html"
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\\\)")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

# What is to be looked at besides the words.
TURN = "turn"  # the nodes and the line
HELD = "held"
LATER = "later"  # nothing but time, or another job
NEVER = "never"  # not as it was asked for
LIMIT = "limit"  # of an account or a QOS


class Explanation(NamedTuple):
    """An answer to "why?": each text is one plain line."""

    headline: str
    facts: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"headline": self.headline, "facts": list(self.facts), "advice": list(self.advice)}


def one_line(text: str) -> str:
    """Without colours, control characters and line breaks; of what a progress bar drew, the last."""
    return " ".join(UNPRINTABLE.sub(" ", ANSI.sub("", text.rstrip("\r\n").rpartition("\r")[2])).split())


class Reason(NamedTuple):
    words: str
    kind: str = LATER
    advice: str = ""
    page: str = CODES_URL


RELEASE = "scontrol release {job}"
LESS = "ask for less, or use another --qos or --account that allows it"
REASONS = {
    "None": Reason("Slurm has not looked at it yet", TURN),
    "Resources": Reason("what it asks for is not free", TURN),
    "Priority": Reason("jobs with a higher priority are before it", TURN),
    "ReqNodeNotAvail": Reason("nodes that it needs are down, drained or reserved", TURN),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "the nodes that it could have are down, drained, reserved or kept for jobs of partitions that come first", TURN
    ),
    "NodeDown": Reason("a node that it needs is down", TURN),
    "BadConstraints": Reason("no nodes can be what it asks for", TURN),
    "SchedDefer": Reason("it was to start at once or not at all, and Slurm puts that off", TURN),
    "FrontEndDown": Reason("the front end node is down"),
    "Cleaning": Reason("it was requeued, and its last attempt is still being cleaned up"),
    "FedJobLock": Reason("the clusters of the federation are agreeing on where it runs"),
    "JobHeldUser": Reason("its owner holds it", HELD, "let it go: " + RELEASE),
    "JobHeldAdmin": Reason(
        "an administrator holds it", HELD, "only an administrator can let it go: ask them to run `" + RELEASE + "`"
    ),
    "JobHoldMaxRequeue": Reason(
        "it was requeued as often as the site allows (MaxBatchRequeue) and is held",
        HELD,
        "see why its attempts failed, then let it go: " + RELEASE,
    ),
    "launch failed requeued held": Reason(
        "Slurm could not start it on a node (a prolog or a daemon failed there), and holds it",
        HELD,
        "let it go, elsewhere if that happens again (--exclude): " + RELEASE,
    ),
    "launch failure limit exceeded requeued held": Reason(
        "Slurm failed several times to start it, and holds it", HELD, "let it go: " + RELEASE
    ),
    "job requeued in held state": Reason("it was requeued to be held", HELD, "let it go: " + RELEASE),
    "job requeued in special exit state": Reason(
        "it ended with an exit code after which the site holds jobs", HELD, "see why it failed, then: " + RELEASE
    ),
    "RequeueExitHold": Reason("it ended with an exit code after which the site holds jobs", HELD, RELEASE),
    "user env retrieval failed requeued held": Reason(
        "its owner's environment could not be read on the node (--get-user-env), and it is held", HELD, RELEASE
    ),
    "JobLaunchFailure": Reason(
        "Slurm could not start it: a prolog failed, or its output file could not be made", HELD, RELEASE
    ),
    "Dependency": Reason("it waits for other jobs"),
    "DependencyNeverSatisfied": Reason("the job that it waits for did not end as it was to", NEVER),
    "BeginTime": Reason("it is not to start before a certain time"),
    "DeadLine": Reason("it cannot end before its deadline", NEVER, "a later --deadline, or a shorter --time"),
    "Licenses": Reason("licenses that it needs are in use"),
    "JobArrayTaskLimit": Reason(
        "as many tasks of its array run as its %limit allows",
        LATER,
        "raise the limit: scontrol update jobid={job} arraytaskthrottle=N",
    ),
    "Prolog": Reason("its prolog is running"),
    "BurstBufferResources": Reason("there is not enough room in the burst buffer"),
    "BurstBufferStageIn": Reason("its files are being copied into the burst buffer"),
    "BurstBufferOperation": Reason("a burst buffer operation failed", NEVER),
    "PowerNotAvail": Reason("the cluster has no power left for it"),
    "PowerReserved": Reason("the cluster's power is reserved"),
    "Reservation": Reason("its reservation has not begun, or is full", TURN),
    "ReservationDeleted": Reason("its reservation is gone", NEVER, "leave --reservation out"),
    "ReservationInvalid": Reason("its reservation cannot be used", NEVER, "leave --reservation out"),
    "RequiresReservation": Reason("the partition takes only jobs with a --reservation", NEVER),
    "PartitionDown": Reason("its partition takes no jobs from the queue (State=DOWN)"),
    "PartitionInactive": Reason("its partition is closed (State=INACTIVE)"),
    "PartitionNodeLimit": Reason("its partition does not allow this number of nodes, or has fewer", NEVER),
    "PartitionTimeLimit": Reason("its partition does not allow its time limit", NEVER),
    "PartitionConfig": Reason("the limits of its partition do not allow it", NEVER),
    "MaxMemPerLimit": Reason("it asks for more memory than one CPU or node may have here", NEVER, "a smaller --mem"),
    "AccountNotAllowed": Reason("its account may not use this partition", NEVER, "another --partition or --account"),
    "QOSNotAllowed": Reason("its QOS may not be used here", NEVER, "another --qos or --partition"),
    "InvalidAccount": Reason("its account does not exist", NEVER, "a right --account"),
    "InvalidQOS": Reason("its QOS does not exist", NEVER, "a right --qos"),
    "AccountingPolicy": Reason("a limit of accounting stands against it", LIMIT, page=LIMITS_URL),
    "AssociationJobLimit": Reason("your account has as many jobs as it may", LIMIT, page=LIMITS_URL),
    "AssociationResourceLimit": Reason("your account uses as much as it may", LIMIT, page=LIMITS_URL),
    "AssociationTimeLimit": Reason("your account has used up its time", LIMIT, page=LIMITS_URL),
    "QOSJobLimit": Reason("the QOS has as many jobs as it may", LIMIT, page=LIMITS_URL),
    "QOSResourceLimit": Reason("the QOS uses as much as it may", LIMIT, page=LIMITS_URL),
    "QOSTimeLimit": Reason("the QOS has used up its time", LIMIT, page=LIMITS_URL),
    "QOSUsageThreshold": Reason("your use of the cluster is above what the QOS allows", LIMIT, page=LIMITS_URL),
    "SystemFailure": Reason("something failed in Slurm, the file system or the network", NEVER, "tell the site"),
    # of jobs that have ended; a requeued one may still have it
    "NonZeroExitCode": Reason("its last attempt ended with an exit code other than 0"),
    "RaisedSignal": Reason("its last attempt was ended by a signal"),
    "TimeLimit": Reason("its last attempt reached its time limit"),
    "InactiveLimit": Reason("its last attempt was inactive for too long"),
    "OutOfMemory": Reason("its last attempt had not enough memory"),
}
PLAIN_WORDS = ("Job's account ", "Job's QOS ")  # slurmctld says more than the code: who is allowed
LIMIT_NAME = re.compile(
    r"(?P<owner>Assoc|QOS)?(?P<sort>Grp|Max|Min)"
    r"(?P<what>SubmitJobs?|Jobs|WallDuration|Wall|CPU|Cpu|Memory|Mem|Node|GRES|License|BB|Billing|Energy|Unknown)"
    r"(?P<window>RunMinutes|RunMins|Minutes)?(?P<per>Per(?:Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
OWNERS = {"Assoc": "your account", "QOS": "the QOS"}
RESOURCES = {
    "SubmitJob": "submitted jobs",
    "SubmitJobs": "submitted jobs",
    "Jobs": "running jobs",
    "Wall": "time",
    "WallDuration": "time",
    "CPU": "CPUs",
    "Cpu": "CPUs",
    "Memory": "memory",
    "Mem": "memory",
    "Node": "nodes",
    "GRES": "GPUs (or another generic resource)",
    "License": "licenses",
    "BB": "burst buffer",
    "Billing": "billing units",
    "Energy": "energy",
    "Unknown": "a resource",
}
WINDOWS = {"Minutes": "{} times minutes, past use included", "RunMinutes": "{} times minutes still to run"}


def normal(text: str) -> str:
    """scontrol writes blanks as underscores, squeue's default form puts parentheses around."""
    text = text.replace("_", " ").strip()
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def of(text: str) -> Reason | None:
    """What a reason means; None for one that is in no manual we know."""
    text = normal(text) or "None"
    if text.startswith(PLAIN_WORDS):
        return Reason(text[:1].lower() + text[1:], NEVER, "another --partition, --account or --qos")
    return REASONS.get(text) or REASONS.get(text.split(",")[0]) or _limit(text)


def _limit(text: str) -> Reason | None:
    name = LIMIT_NAME.fullmatch(text)
    if name is None:
        return None
    owner, what = OWNERS[name["owner"] or "QOS"], RESOURCES[name["what"]]
    window = (name["window"] or "").replace("RunMins", "RunMinutes")
    what = WINDOWS[window].format(what) if window else what
    words, waits = _limit_words(name["sort"], name["per"] or "", owner, what)
    if waits:
        return Reason(words, LIMIT, "it starts when other jobs end; " + LESS, LIMITS_URL)
    return Reason(words, NEVER, LESS, LIMITS_URL)


def _limit_words(sort: str, per: str, owner: str, what: str) -> tuple[str, bool]:
    """The words, and whether time helps."""
    if sort == "Min":
        return f"it asks for fewer {what} than {owner} wants a job to have", False
    if sort == "Grp":
        return f"all jobs of {owner} together have reached its limit of {what}", True
    if per in ("PerJob", "PerNode"):
        return f"it asks for more {what} than {owner} allows one {per[3:].lower()}", False
    if per == "PerAccount":
        return f"the jobs of your account have reached the limit of {what} that {owner} sets for one account", True
    if per == "PerUser":
        return f"your jobs have reached the limit of {what} that {owner} sets for one user", True
    return f"your jobs have reached the limit of {what} that {owner} sets", True
