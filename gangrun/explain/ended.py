"""Why a job ended as it did: which rank failed first, where, with what code, what its log says, what to do. Pure.

The evidence: the driver's last status (`status.json`), what Slurm tells of the job (rows of sacct, or the words of
`scontrol show job`), and the ends of the ranks' logs. What a rank did by itself comes before what Slurm did to the job.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from executor import protocol
from gangrun.explain.reasons import Explanation, one_line

TAIL_LINES = 8
LONGEST_LINE = 400
LISTED = 5
# https://slurm.schedmd.com/job_state_codes.html: ends that say by themselves what happened
SLURM_ENDS = {
    "TIMEOUT": "reached its time limit",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "had to make room for a job that comes before it (preemption)",
    "DEADLINE": "reached its deadline",
    "BOOT_FAIL": "lost a node that did not boot",
    protocol.CANCELLED: "was cancelled",  # Slurm has the same word for it
    "LAUNCH_FAILED": "could not be started on its nodes",
    "RECONFIG_FAIL": "lost a node that could not be reconfigured",
    "REVOKED": "was taken by another cluster of the federation",
}
SLURM_ADVICE = {
    "TIMEOUT": "a longer --time, or checkpoints and --requeue; the last minutes may be used with `warn_signal`",
    "NODE_FAIL": "nothing of yours: launch it again, with --exclude=NODE if it is the same node again",
    "OUT_OF_MEMORY": "more memory per node (`memory` in the task, or --mem)",
    "PREEMPTED": "--requeue and checkpoints, or a partition or QOS that is not preempted",
    "DEADLINE": "a later --deadline",
    "BOOT_FAIL": "nothing of yours: launch it again",
}
MORE_MEMORY = (
    "more memory per node (`memory` in the task, or --mem), or less of it used: smaller batches, fewer loader workers"
)
# The first that is found in the end of the log, or in the verdict's reason.
SYMPTOMS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
        (
            r"(?:CUDA|HIP)(?: error:)? out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
            "the GPU's memory is full: smaller batches, activation checkpointing, more sharding, or larger GPUs",
        ),
        (
            r"oom[-_ ]kill|out of memory|\bMemoryError\b|std::bad_alloc|cannot allocate memory|exceeded.*memory limit",
            MORE_MEMORY,
        ),
        (
            r"DataLoader worker .*bus error|insufficient shared memory|\bshm\b.*(?:no space|full)",
            "/dev/shm is full: fewer loader workers, or a larger /dev/shm",
        ),
        (
            r"(?:ModuleNotFoundError|ImportError): (?:No module named )?(\S+)",
            "a Python package is missing ({0}): install it in `setup`, and see that `run` uses the same environment",
        ),
        (r"(\S+): command not found", "the shell does not find {0}: load its module or environment in the script"),
        (
            r"disk quota exceeded|\[Errno 122\]",
            "your disk quota is used up: make room, or write elsewhere (logs and caches count, too)",
        ),
        (r"no space left on device|\[Errno 28\]", "a disk is full: make room there, or write elsewhere"),
        (
            r"NCCL.*(?:timeout|timed out)|Watchdog caught collective operation timeout",
            "a collective did not end in time: one rank hangs, is slow or died; see the logs of the other ranks before "
            "the network (NCCL_DEBUG=INFO tells more)",
        ),
        (
            r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclRemoteError",
            "NCCL failed: NCCL_DEBUG=INFO tells where; often NCCL_SOCKET_IFNAME has to name the right interface",
        ),
        (
            r"address already in use|EADDRINUSE",
            "a port is taken, perhaps by another job on the node: choose it by the job's id",
        ),
        (
            r"CUDA driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver|CUDA unknown error",
            "the GPU cannot be used: were GPUs asked for, and does the CUDA version fit the node's driver?",
        ),
        (
            r"uncorrectable ECC|\bXid\b|GPU has fallen off the bus|CUDA error: unspecified launch failure",
            "perhaps a broken GPU: launch it again with --exclude=NODE, and tell the site",
        ),
        (r"GLIBC(?:XX)?_[\d.]+' not found", "a program was built for a newer system than the node's: build it there"),
        (
            r"error while loading shared libraries: ([^\s:]+)",
            "the library {0} is not found: load its module, or set LD_LIBRARY_PATH",
        ),
        (r"connection refused", "nothing listened there: did the head start its server, and before the others asked?"),
        (
            r"failure in name resolution|Name or service not known|Could not resolve host|Network is unreachable",
            "the node has no way to that host: many clusters have no internet on compute nodes; fetch it beforehand",
        ),
        (
            r"too many open files|\[Errno 24\]",
            "too many open files: `ulimit -n` in the script, or fewer files and loader workers",
        ),
        (r"stale file handle", "a file was removed or replaced on the server while it was in use: launch it again"),
        (
            r"permission denied|\[Errno 13\]",
            "a file may not be read, written or executed: see its mode, and whose it is",
        ),
        (
            r"no such file or directory",
            "a file is missing on the node: is it in the work directory or on a shared disk?",
        ),
    )
)
CODES = {
    2: "exit code 2 often means that a program did not understand its arguments",
    124: "exit code 124 is that of timeout(1): the script's own limit was reached",
    125: "exit code 125 is gangrun's own: the script did not run, or could not be watched to its end",
    126: "exit code 126: a file could be found but not executed; see its mode and its first line",
    127: "exit code 127: a command was not found; load its module or environment in the script",
    132: "signal 4 (illegal instruction): built for another CPU than the node's",
    134: "signal 6 (abort): a program gave up by itself; its last words say why",
    135: "signal 7 (bus error): /dev/shm or a disk was full, or a mapped file was cut short",
    136: "signal 8: an arithmetic error such as a division by zero",
    137: "signal 9: it was killed; if nobody did that, memory ran out: ask for more (`memory` in the task, or --mem)",
    139: "signal 11 (segmentation fault): a crash in compiled code; PYTHONFAULTHANDLER=1 shows where in Python",
    141: "signal 13 (broken pipe): a program wrote to one that had gone",
    143: "signal 15: it was told to stop",
}
LIMIT_WORDS = {"DUE TO TIME LIMIT": "TIMEOUT", "DUE TO PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}
OUTPUT_SIGNAL = "0:53"  # what slurmd says of a batch script whose output file it could not open


def why_ended(
    record: Mapping[str, Any] | None,
    account_rows: Sequence[Mapping[str, str]] = (),
    logs_tail: Mapping[int, str] | None = None,
) -> Explanation:
    """Why the job ended. `record` is its status.json, `logs_tail` the end of the logs by rank."""
    record, row, tails = record or {}, _job_row(account_rows), logs_tail or {}
    if not record and not row:
        return Explanation("why the job ended is unknown: neither its driver nor Slurm left a word")
    if record.get("state") == protocol.SUCCEEDED:
        return _succeeded(record, row)
    first = record.get("first_failure")
    if first and record.get("state") in protocol.TERMINAL_STATES:
        return _rank_failed(record, row, first, tails)
    state = _slurm_end(record, row)
    if state:
        return _ended_by_slurm(record, row, state, tails)
    if record.get("state") in protocol.TERMINAL_STATES:
        return _by_verdict(record, row, tails)
    return _by_slurm_alone(record, row, tails)


# --- what Slurm says


def _job_row(rows: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The job's own row, of the last attempt; those of its steps have a dot in their ids."""
    own = [row for row in rows if "." not in str(row.get("JobID") or row.get("JobId") or "")]
    return own[-1] if own else {}


def _word(row: Mapping[str, str], *names: str) -> str:
    return next((str(row[name]).strip() for name in names if row.get(name)), "")


def _state(row: Mapping[str, str]) -> str:
    """`CANCELLED by 1000` -> CANCELLED; a column that was too narrow cuts the word and ends it with a plus."""
    word = (_word(row, "State", "JobState").split() or [""])[0].rstrip("+")
    return next((state for state in SLURM_ENDS if len(word) >= 4 and state.startswith(word)), word)


def _slurm_end(record: Mapping[str, Any], row: Mapping[str, str]) -> str:
    """The state, if it says what happened; srun's words in the driver's verdict serve where accounting does not."""
    if _state(row) in SLURM_ENDS:
        return _state(row)
    reason = str(record.get("reason") or "").upper()
    return next((state for words, state in LIMIT_WORDS.items() if words in reason), "")


def _ended_by_slurm(
    record: Mapping[str, Any], row: Mapping[str, str], state: str, tails: Mapping[int, str]
) -> Explanation:
    headline = f"{_name(record, row)} {SLURM_ENDS[state]}"
    detail = {"TIMEOUT": _limit_detail, protocol.CANCELLED: _by_whom, "OUT_OF_MEMORY": _memory_detail}.get(state)
    headline += detail(row) if detail else ""
    advice = (SLURM_ADVICE[state],) if state in SLURM_ADVICE else ()
    return Explanation(one_line(headline), (*_facts(record, row), *_log_facts(record, tails)), advice)


def _limit_detail(row: Mapping[str, str]) -> str:
    limit = _word(row, "Timelimit", "TimeLimit")
    return f" of {limit}" if limit else ""


def _by_whom(row: Mapping[str, str]) -> str:
    match = re.search(r"CANCELLED by (\S+)", _word(row, "State"))
    return f" by user {match.group(1)}" if match else ""


def _memory_detail(row: Mapping[str, str]) -> str:
    asked = _word(row, "ReqMem")
    return f" (it had asked for {asked})" if asked else ""


def _by_slurm_alone(record: Mapping[str, Any], row: Mapping[str, str], tails: Mapping[int, str]) -> Explanation:
    """The driver has left no verdict: it never ran, or died."""
    state = _state(row)
    if not state:
        headline = (
            f"{_name(record, row)} has no verdict: its driver wrote {record.get('state')} last, and Slurm tells nothing"
        )
        return Explanation(headline, (*_facts(record, row), *_log_facts(record, tails)))
    code = _word(row, "ExitCode")
    lost = "its driver left no verdict" if record else "its driver left no word"
    headline = f"{_name(record, row)} is {state} for Slurm{f', exit code {code}' if code else ''}; {lost}"
    return Explanation(headline, (*_facts(record, row), *_log_facts(record, tails)), _slurm_code_advice(row))


def _slurm_code_advice(row: Mapping[str, str]) -> tuple[str, ...]:
    code, reason = _word(row, "ExitCode"), _word(row, "Reason")
    if code == OUTPUT_SIGNAL or reason == "JobLaunchFailure":
        return ("Slurm could not start the script: often the directory of its output file is missing on the node",)
    number, _, signal = code.partition(":")
    value = protocol.exit_code_of_signal(int(signal)) if signal.isdigit() and int(signal) else 0
    value = value or (int(number) if number.isdigit() else 0)
    return (CODES[value],) if value in CODES else ()


# --- what the driver says


def _succeeded(record: Mapping[str, Any], row: Mapping[str, str]) -> Explanation:
    headline = f"{_name(record, row)} succeeded"
    reason = str(record.get("reason") or "")
    advice = (MORE_MEMORY,) if "out of memory" in reason else ()
    return Explanation(headline, (*((one_line(reason),) if reason else ()), *_facts(record, row)), advice)


def _rank_failed(
    record: Mapping[str, Any], row: Mapping[str, str], first: Mapping[str, Any], tails: Mapping[int, str]
) -> Explanation:
    code = int(first.get("exit_code") or record.get("exit_code") or 0)
    phase = "setup failed" if record["state"] == protocol.FAILED_SETUP else "failed first"
    headline = f"{_who(first)} {phase}: {protocol.describe_code(code)}"
    if record["state"] == protocol.FAILED_DRIVER:
        headline = str(record.get("reason") or headline)
    words = "\n".join((tails.get(int(first.get("rank", 0)), ""), str(record.get("reason") or ""), _state(row)))
    symptom = _symptom(words.replace("OUT_OF_MEMORY", "out of memory"))
    facts = (
        *_reason_facts(record, headline),
        *_facts(record, row),
        *_others(record, first),
        *_log_facts(record, tails),
    )
    return Explanation(one_line(headline), facts, symptom or ((CODES[code],) if code in CODES else ()))


def _by_verdict(record: Mapping[str, Any], row: Mapping[str, str], tails: Mapping[int, str]) -> Explanation:
    """No rank is to blame."""
    state, reason = record["state"], str(record.get("reason") or "")
    verb = {protocol.CANCELLED: "was cancelled", protocol.FAILED_SETUP: "failed in setup"}.get(state, "failed")
    headline = f"{_name(record, row)} {verb}" + (f": {reason}" if reason else "")
    return Explanation(one_line(headline), (*_facts(record, row), *_log_facts(record, tails)), _symptom(reason))


def _symptom(words: str) -> tuple[str, ...]:
    for pattern, advice in SYMPTOMS:
        found = pattern.search(words)
        if found:
            return (advice.format(*(one_line(group).strip("'\"") for group in found.groups(""))),)
    return ()


# --- facts


def _name(record: Mapping[str, Any], row: Mapping[str, str]) -> str:
    engine_own = record.get("job_id") if record.get("engine") else None
    found = record.get("slurm_job_id") or engine_own or _word(row, "JobID", "JobId")
    return f"job {found or 'of an unknown id'}"


def _who(rank: Mapping[str, Any]) -> str:
    """`rank 2 on worker2 (n3)`."""
    node, host = rank.get("node"), rank.get("host")
    where = f"{node} ({host})" if node and host else node or host or "an unknown node"
    return f"rank {rank.get('rank')} on {where}"


def _reason_facts(record: Mapping[str, Any], headline: str) -> list[str]:
    """What the verdict says beyond the headline."""
    reason = one_line(str(record.get("reason") or ""))
    extra = reason.partition("; ")[2] if "failed first" in reason else reason
    return [extra] if extra and extra not in headline else []


def _facts(record: Mapping[str, Any], row: Mapping[str, str]) -> list[str]:
    facts = []
    if record.get("started") and record.get("ended"):
        attempt = f", attempt {record['attempt'] + 1}" if record.get("attempt") else ""
        facts.append(f"it ended after {_span(record['ended'] - record['started'])}{attempt}")
    if row:
        told = [(name, _word(row, name)) for name in ("ExitCode", "DerivedExitCode", "Reason", "Elapsed", "MaxRSS")]
        words = ", ".join(f"{name} {value}" for name, value in told if value and value not in ("None", "0:0"))
        facts.append(one_line(f"Slurm: {_word(row, 'State', 'JobState')}{f', {words}' if words else ''}"))
    return facts


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _others(record: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """How the other ranks ended, and which of them failed by themselves."""
    ranks = [rank for rank in record.get("ranks") or () if rank.get("rank") != first.get("rank")]
    if not ranks:
        return []
    counts = Counter(str(rank.get("state")) for rank in ranks)
    facts = ["the other ranks: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())]
    failed = [rank for rank in ranks if rank.get("state") in (protocol.RANK_FAILED, protocol.RANK_BROKEN)]
    told = [f"{_who(rank)} ({protocol.describe_code(int(rank.get('exit_code') or 0))})" for rank in failed[:LISTED]]
    return [*facts, *(["failed after it: " + ", ".join(told)] if told else [])]


def _log_facts(record: Mapping[str, Any], tails: Mapping[int, str]) -> list[str]:
    """The end of the first failed rank's log; where none is to blame, of the lowest rank that has one."""
    first = record.get("first_failure") or {}
    rank = first.get("rank", min(tails, default=None))
    if rank is None or rank not in tails:
        return []
    lines = [one_line(line)[:LONGEST_LINE] for line in tails[rank].split("\n")]
    shown = [line for line in lines if line][-TAIL_LINES:]
    reports = {report.get("rank"): report for report in record.get("ranks") or ()}
    name = reports.get(rank, {}).get("log") or f"the log of rank {rank}"
    return [f"the end of {name}:", *(f"| {line}" for line in shown)] if shown else []
