"""What a host's answer to one poll means for each run: from its words to the fields that change. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from executor import protocol
from gangrun import states
from gangrun.records import SUBMITTING, Run

LONGEST_GAP_S = 120.0  # a longer silence between two answers says nothing about what was between them
SUBMIT_PATIENCE_S = 120.0  # a run without a job for this long was never submitted


def poll_request(root: str, runs: Sequence[Run]) -> dict[str, Any]:
    asked = [{"run": run.run, "job": run.job, "cluster": run.cluster} for run in runs]
    # By the cluster's own clock: "today" and a client's date have both been wrong (reframe-hpc/reframe#1083).
    days = 2 + int((time.time() - min(run.submitted for run in runs)) // 86400)
    return {
        "root": root,
        "runs": asked,
        "squeue": ["--noheader", "--array", "--states=all", "--format=" + states.SQUEUE_FORMAT],
        "sacct": ["-X", "-P", "-n", "-D", "--starttime=now-%ddays" % days, "--format=" + states.SACCT_FIELDS],
    }


class Seen(NamedTuple):
    """One answer of a host, parsed once for all its runs; rows by the id of their job."""

    now: float
    answer: Mapping[str, Any]
    rows: Mapping[str, list[states.QueueRow]]
    accounts: Mapping[str, list[states.AccountRow]]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Seen:
        rows: dict[str, list[states.QueueRow]] = {}
        accounts: dict[str, list[states.AccountRow]] = {}
        for one in answer["squeue"].values():
            for row in states.parse_squeue(one["stdout"]):
                rows.setdefault(states.base_of(row.job), []).append(row)
        for one in (part for parts in answer["sacct"].values() for part in parts):
            for account in states.parse_sacct(one["stdout"]):
                accounts.setdefault(states.base_of(account.job), []).append(account)
        return cls(float(answer["now"]), answer, rows, accounts)

    def evidence(self, run: Run, job: str, cluster: str | None) -> states.Evidence:
        """With what squeue and sacct last said of the run, where they say nothing now."""
        rows = states.own_rows(self.rows.get(job, ()), job, run.run)
        has_answered = self.has_answered(cluster)
        is_absent = has_answered and not rows
        before = [states.AccountRow(*fields) for fields in run.evidence.get("account", ())]
        return states.Evidence(
            run=run.run,
            job=job,
            record=states.parse_record(self.answer["records"].get(run.run)),
            rows=rows,
            is_absent=is_absent,
            account=states.own_rows(self.accounts.get(job, ()), job, run.run) or tuple(before),
            accounting=_accounting(self.answer["sacct"].get(cluster or "", []), bool(before)),
            absent_s=_absent_s(run, self.now) if is_absent else 0.0 if has_answered else run.absent_s,
            cancel_asked=run.cancel_asked or run.run in self.answer["cancelled"],
            age_s=self.now - run.submitted,
            last_rows=rows or tuple(states.QueueRow(*fields) for fields in run.evidence.get("rows", ())),
            may_requeue=run.meta.get("request", {}).get("requeue") != "false",
            now=self.now,
        )

    def tasks(self, run: Run) -> Sequence[Mapping[str, Any]]:
        """Of a group, as its driver tells them now, or told them last."""
        return states.mapping_of(self.answer["records"].get(run.run)).get("tasks") or run.tasks

    def job_of(self, run: Run) -> tuple[str | None, str | None]:
        """The job of a run whose launch was interrupted: as the host noted it, or by its name in the queue."""
        noted: tuple[str, str | None] | None = self.answer["jobs"].get(run.run)
        queued = [job for job, rows in self.rows.items() if any(row.name == run.run for row in rows)]
        return noted or ((min(queued, key=int), run.cluster) if queued else (None, None))

    def has_ended_by_itself(self, run: Run) -> bool:
        """Its driver recorded the end, and took its secrets along."""
        record = states.parse_record(self.answer["records"].get(run.run))
        return record is not None and record.is_terminal

    def has_answered(self, cluster: str | None) -> bool:
        queue = self.answer["squeue"].get(cluster or "")
        return queue is not None and queue["rc"] == 0


def news_of(run: Run, seen: Seen) -> dict[str, Any]:
    """What one answer says about one run, as fields to change."""
    job, cluster = (run.job, run.cluster) if run.job else seen.job_of(run)
    if job is None:
        return _never_submitted(run, seen)
    evidence = seen.evidence(run, job, cluster)
    verdict, record = states.judge(evidence), evidence.record
    waits_until = evidence.rows[0].start if evidence.rows and verdict.state == protocol.PENDING else None
    return {
        **verdict._asdict(),
        "job": job,
        "cluster": cluster,
        "progress": "" if verdict.is_final else states.progress(record),
        "estimate": waits_until,
        "started": record.started if record else run.started,
        "ended": (record.ended if record else None) or (run.ended or seen.now if verdict.is_final else None),
        "absent_s": evidence.absent_s,
        "seen": seen.now if seen.has_answered(cluster) else run.seen,
        "tasks": _not_begun(seen.tasks(run)) if verdict.state == protocol.PENDING else seen.tasks(run),
        "evidence": {"rows": evidence.last_rows, "account": evidence.account},
    }


def _not_begun(tasks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of a group in the queue: all are to run, of a requeued one as well; what joined an attempt ended with it."""
    nothing = dict.fromkeys(("exit_code", "started", "ended", "progress"))
    fresh = {**nothing, "state": protocol.PENDING, "reason": "", "restarts": 0}
    return [{**task, **fresh} for task in tasks if not task["is_dynamic"]]


def _absent_s(run: Run, now: float) -> float:
    """Only the time between two answers that both lacked the job counts."""
    if run.absent_s == 0.0 or run.seen is None:
        return 1e-3
    return run.absent_s + min(max(now - run.seen, 0.0), LONGEST_GAP_S)


def _accounting(answers: Sequence[Mapping[str, Any]], has_answered: bool) -> bool | None:
    if any("isabled" in one["stderr"] for one in answers):
        return False
    return True if has_answered or (answers and all(one["rc"] == 0 for one in answers)) else None


def _never_submitted(run: Run, seen: Seen) -> dict[str, Any]:
    if seen.answer["submitting"].get(run.run):
        return {"state": SUBMITTING}
    if run.cancel_asked:  # the mark on the host stops a submission that is still on its way
        return _final(protocol.CANCELLED, "cancelled before it reached Slurm", seen)
    if time.time() - run.submitted < SUBMIT_PATIENCE_S:  # both on this machine's clock
        return {"state": SUBMITTING}
    return _final(protocol.FAILED_DRIVER, "it never reached Slurm: the launch was interrupted", seen)


def _final(state: str, reason: str, seen: Seen) -> dict[str, Any]:
    return {"state": state, "is_final": True, "reason": reason, "ended": seen.now}


def adopted(found: Mapping[str, Any], host: str, root: str) -> Run | None:
    try:
        meta = json.loads(found["meta"])
        job, cluster = found["job"] or (None, None)
        meta.pop("diff", None)
        return Run(
            found["run"], meta["name"], host, root, job, cluster,
            submitted=meta["submitted"], num_nodes=meta["num_nodes"], meta=meta,
        )  # fmt: skip
    except (TypeError, ValueError, KeyError):
        return None
