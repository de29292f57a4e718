"""How a job ended, in a record for programs and in a few lines for a person. Pure words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from executor import protocol
from executor.verdict import Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

COPIED = ("node", "host", "address", "state", "started", "ended", "why")
TAIL_LINES = 5
LISTED_RANKS = 64
TAIL_BYTES = 8192


def rank_reports(records: Sequence[Record | None], verdict: Verdict, cluster_nodes: int) -> list[dict[str, Any]]:
    """One report per rank: what it recorded, its code, its log, and why it was stopped."""
    return [_rank_report(rank, record or {}, verdict, cluster_nodes) for rank, record in enumerate(records)]


def _rank_report(rank: int, record: Record, verdict: Verdict, cluster_nodes: int) -> dict[str, Any]:
    report: dict[str, Any] = {"rank": rank, **{key: record.get(key) for key in COPIED}}
    report["exit_code"] = verdict.codes[rank] if rank < len(verdict.codes) else None
    index = record.get("node_index")
    is_setup = verdict.state == protocol.FAILED_SETUP
    report["log"] = None if index is None else protocol.log_name(rank, index, cluster_nodes, is_setup)
    if report["state"] not in protocol.RANK_ENDED_STATES:
        report["state"] = protocol.RANK_LOST
    if verdict.first_failed not in (None, rank) and report["state"] in (protocol.RANK_STOPPED, protocol.RANK_LOST):
        report["why"] = f"stopped because rank {verdict.first_failed} failed"
    return report


def summary(
    job_id: str,
    verdict: Verdict,
    ranks: Sequence[dict[str, Any]],
    log_dir: str,
    age_s: float,
    tail: Sequence[str] = (),
) -> str:
    """State, reason, codes, the end of the first failed rank's log, where the logs are: a few lines.

    `tail` is the end of a log that cannot be read from here.
    """
    code = "" if verdict.state == protocol.SUCCEEDED else f", exit code {verdict.exit_code}"
    lines = [f"job {job_id} {verdict.state}{code} after {age_s:.1f} s"]
    lines += [verdict.reason] if verdict.reason else []
    if any(verdict.codes) and ranks:
        lines.append(f"exit codes by rank: {_codes(verdict.codes)}")
    log = None if verdict.first_failed is None else ranks[verdict.first_failed]["log"]
    tail = tail or (log_tail(os.path.join(log_dir, log)) if log else [])
    if tail:
        lines.append("\n    | ".join([f"the end of {log}:", *tail]))
    lines.append(f"logs are in {log_dir}")
    return "".join(f"gangrun: {line}\n" for line in lines)


def _codes(codes: Sequence[int]) -> str:
    """The list; of a large gang how many ranks had which."""
    if len(codes) <= LISTED_RANKS:
        return str(list(codes))
    return ", ".join(f"{code} ({codes.count(code)} ranks)" for code in sorted(set(codes)))


def log_tail(path: str) -> list[str]:
    """The last lines of a log, read from its end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "surrogateescape")
    except OSError:
        return []
    return text.rstrip("\n").split("\n")[-TAIL_LINES:] if text.strip() else []
