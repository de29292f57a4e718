"""What a run's state is, from Slurm's words, the driver's record, and what nobody said."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from executor import protocol
from gangrun import states
from gangrun.states import AccountRow, Evidence, Kind, QueueRow, Record, Verdict, judge
from tests.bench import eventually
from tests.minislurm import preflight
from tests.minislurm.cluster import Cluster
from tests.minislurm.fixtures import BootCluster

RUN, JOB = "train-1a2b3c4d", "4711"
START, END = 1000.0, 2000.0  # of attempt 0
SLURM_WORDS = sorted(states.KINDS)


def row(state: str, reason: str = "None", **more: Any) -> QueueRow:
    nodes = "" if states.kind_of(state) is Kind.WAITING else "n1"
    fields = {
        "job": JOB, "start": START, "end": END, "submitted": START - 10, "nodes": nodes, "num_nodes": 1,
        "used": "0:00", "limit": "1:00:00", "partition": "main", "name": RUN,
    }  # fmt: skip
    return QueueRow(state=state, reason=reason, **{**fields, **more})


def account(state: str, code: str = "0:0", **more: Any) -> AccountRow:
    exit_code, signal = map(int, code.split(":"))
    fields = {"job": JOB, "name": RUN, "submitted": START - 10, "start": START, "end": END, "reason": "None"}
    return AccountRow(state=state, exit_code=exit_code, signal=signal, **{"words": state, **fields, **more})


def record(state: str, **more: Any) -> Record:
    ended = END if state in protocol.TERMINAL_STATES else None
    code = {"SUCCEEDED": 0, "CANCELLED": 143}.get(state, 7) if ended else None
    fields = {"attempt": 0, "exit_code": code, "started": START + 1, "ended": ended, "num_nodes": 4}
    return Record(state, **{**fields, **more})


def evidence(*rows: QueueRow, absent_s: float | None = None, **more: Any) -> Evidence:
    """Nothing has answered but what is given."""
    fields: dict[str, Any] = {
        "run": RUN, "job": JOB, "record": None, "rows": rows, "is_absent": absent_s is not None, "account": (),
        "accounting": True if more.get("account") else None, "absent_s": absent_s or 0.0, "cancel_asked": False,
        "age_s": 90000.0,
    }  # fmt: skip
    return Evidence(**{**fields, **more})


def of(verdict: Verdict) -> tuple[str, bool]:
    return verdict.state, verdict.is_final


LIVE, SUCCEEDED, FAILED = record("RUNNING"), record("SUCCEEDED"), record("FAILED", reason="rank 1 failed first")
OPEN_PENDING, OPEN_RUNNING = ("PENDING", False), ("RUNNING", False)


# --- what squeue and sacct print

REAL_SQUEUE = """\
10|CANCELLED|1795972304|1795972304|1795972304|1|0:00|UNLIMITED|main||JobHeldUser|canc
6_1|COMPLETED|1795972306|1795972306|1795972304|1|0:00|365-00:00:00|main|n1|None|arr
8|FAILED|1795972306|1795972306|1795972304|1|0:00|365-00:00:00|main|n1|NonZeroExitCode|fail
3|PENDING|1827508305|NONE|1795972304|2|0:00|UNLIMITED|main||Resources|pend
6_[2-9%2]|PENDING|N/A|N/A|1795972304|1|0:00|UNLIMITED|main||JobArrayTaskLimit|arr
1|RUNNING|1795972305|1827508305|1795972304|1|0:01|365-00:00:00|main|n1|None|we|ird näme
x
4+0|RUNNING|1795972305|NONE|1795972304|1K|0:01|UNLIMITED|main,low|n[1-9],m2|None|het
4+1|RUNNING|1795972305|NONE|1795972304|1|0:01|UNLIMITED|main|n2|None|het
"""
REAL_JOBS = ["10", "6_1", "8", "3", "6_[2-9%2]", "1", "4+0", "4+1"]


def test_every_kind_of_row_is_read() -> None:
    rows = states.parse_squeue(REAL_SQUEUE)
    assert [found.job for found in rows] == REAL_JOBS
    assert rows[3] == QueueRow(
        "3", "PENDING", "Resources", 1827508305.0, None, 1795972304.0, "", 2, "0:00", "UNLIMITED", "main", "pend"
    )
    assert (rows[4].start, rows[4].end) == (None, None)
    assert (rows[6].num_nodes, rows[6].nodes, rows[6].partition) == (1024, "n[1-9],m2", "main,low")


def test_a_name_may_hold_the_separator() -> None:
    assert states.parse_squeue(REAL_SQUEUE)[5].name == "we|ird näme"
    line = "7|FAILED|3:0|100|100|101|None|a|b|c\n"
    assert states.parse_sacct(line)[0].name == "a|b|c"


BOX = "+-----------+\n| usage: squeue [-j ID] | one id only |\n+-----------+\n"
HEADER = "JOBID|STATE|START_TIME|END_TIME|SUBMIT_TIME|NODES|TIME|TIME_LIMIT|PARTITION|NODELIST|REASON|NAME\n"
NOISE = [
    "",
    "\n\n",
    "Welcome to alpha!\n",
    "CLUSTER: alpha\n",
    HEADER,
    BOX,
    "slurm_load_jobs error: Unable to contact\n",
]


@pytest.mark.parametrize("noise", NOISE)
def test_banners_headers_and_help_are_no_rows_k3_k16(noise: str) -> None:
    assert states.parse_squeue(noise) == [] == states.parse_sacct(noise)
    noisy = noise + REAL_SQUEUE.replace("\n", "\r\n") + noise
    assert [found.job for found in states.parse_squeue(noisy)] == REAL_JOBS


@pytest.mark.parametrize("printed", ["CANCELLED", "CANCELLED by 1000", "CANCELLED+", "CANCELLED by 1000+"])
def test_every_form_of_a_cancel_is_one_l6(printed: str) -> None:
    (found,) = states.parse_sacct(f"4711|{printed}|0:15|100|Unknown|None|None|{RUN}\n")
    assert (found.state, found.words, found.start, found.end) == ("CANCELLED", printed, None, None)
    assert of(judge(evidence(account=(found,), absent_s=60))) == ("CANCELLED", True)


def test_codes_and_times_of_sacct_are_numbers() -> None:
    (found,) = states.parse_sacct("4711|OUT_OF_MEMORY|0:125|100|110|120|None|x\n")
    assert found == AccountRow("4711", "x", "OUT_OF_MEMORY", 0, 125, 100.0, 110.0, 120.0, "None", "OUT_OF_MEMORY")


def test_steps_are_no_rows() -> None:
    lines = "4711|FAILED|1:0|1|1|1|None|x\n4711.batch|FAILED|1:0|1|1|1||batch\n4711.0|CANCELLED|0:9|1|1|1||x\n"
    assert [found.job for found in states.parse_sacct(lines)] == ["4711"]


def printed_by(cluster: Cluster, command: str) -> str:
    environ = "SLURM_TIME_FORMAT=%s SQUEUE_FORMAT=%i SACCT_FORMAT=JobID"
    return cluster.run("ctl", ["sh", "-c", f"{environ} {command}"], cwd="/").stdout


def test_a_real_squeue_prints_what_we_read_l10(cluster: Cluster) -> None:
    held = cluster.sbatch("#!/bin/sh\n", "--hold", "-N2", "--job-name=a|b c", "--output=/dev/null")
    done = cluster.sbatch("#!/bin/sh\nexit 3\n", "--job-name=done", "--output=/dev/null")
    try:
        cluster.wait_job(done)
        text = printed_by(cluster, f"squeue --states=all -h -o '{states.SQUEUE_FORMAT}'")
    finally:
        cluster.run("ctl", ["scancel", str(held)])
    rows = {found.job: found for found in states.parse_squeue(text)}
    waits, ended = rows[str(held)], rows[str(done)]
    assert (waits.state, waits.reason, waits.num_nodes, waits.name) == ("PENDING", "JobHeldUser", 2, "a|b c")
    assert (ended.state, ended.reason, ended.num_nodes) == ("FAILED", "NonZeroExitCode", 1)
    assert waits.submitted and ended.start and ended.end and 0 <= ended.end - ended.start < 60


@pytest.mark.slow
@pytest.mark.skipif(preflight.missing_accounting() is not None, reason=str(preflight.missing_accounting()))
def test_a_real_sacct_prints_what_we_read(own_cluster: BootCluster) -> None:
    cluster = own_cluster(nodes=1, accounting=True)
    done = cluster.sbatch("#!/bin/sh\nexit 3\n", "--job-name=a|b", "--output=/dev/null")
    waits = cluster.sbatch("#!/bin/sh\n", "--hold", "--job-name=x", "--output=/dev/null")
    cluster.wait_job(done)
    cluster.run("ctl", ["scancel", str(waits)])
    wanted = [(str(done), "a|b", "FAILED", 3, 0), (str(waits), "x", "CANCELLED", 0, 0)]
    # A job that was held to its end is listed by its id alone.
    command = f"sacct -X -P -n -D -j {done},{waits} -o {states.SACCT_FIELDS}"

    def ended() -> list[AccountRow] | None:
        rows = states.parse_sacct(printed_by(cluster, command))
        found = [(one.job, one.name, one.state, one.exit_code, one.signal) for one in rows]
        return rows if found == wanted else None

    rows = eventually(ended, what=f"{wanted} from {command}")
    assert all(one.submitted and one.end for one in rows)
    assert rows[1].words.startswith("CANCELLED by ")


def test_an_id_that_was_used_again_is_somebody_elses_job() -> None:
    other, mine = row("RUNNING", name="other"), row("PENDING")
    assert states.own_rows([other, mine, row("RUNNING", job="47110")], JOB, RUN) == (mine,)
    years_ago = account("COMPLETED", name="other", submitted=5.0)
    assert states.own_rows([years_ago], JOB, RUN) == ()
    assert of(judge(evidence(other, record=LIVE))) == OPEN_RUNNING
    assert of(judge(evidence(absent_s=61, account=(years_ago,)))) == OPEN_PENDING


# --- every word

WAITS, MAYBE, UNSETTLED = (OPEN_PENDING, OPEN_PENDING), (OPEN_PENDING, OPEN_PENDING), (OPEN_RUNNING, OPEN_RUNNING)
RUNS = (OPEN_RUNNING, OPEN_RUNNING)
# word: what it says of a run without a record and with a live one, in the queue
IN_QUEUE = {
    **dict.fromkeys("PENDING CONFIGURING POWER_UP_NODE EXPEDITING REQUEUED REQUEUE_FED".split(), WAITS),
    **dict.fromkeys("REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD".split(), WAITS),
    **dict.fromkeys("RUNNING SUSPENDED STOPPED SIGNALING RESIZING UPDATE_DB COMPLETING STAGE_OUT".split(), RUNS),
    **dict.fromkeys("PREEMPTED NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL REVOKED".split(), MAYBE),
    **dict.fromkeys("COMPLETED FAILED CANCELLED TIMEOUT DEADLINE OUT_OF_MEMORY".split(), UNSETTLED),
}
BY_WORD = {
    **dict.fromkeys("TIMEOUT DEADLINE OUT_OF_MEMORY".split(), "FAILED"),
    **dict.fromkeys("PREEMPTED NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL".split(), "FAILED"),
    "CANCELLED": "CANCELLED",
    "FAILED": "FAILED_DRIVER",
}
# what it becomes once the job is gone for long: without a record, and with a live one
GONE = {
    **{word: (state, state) for word, state in BY_WORD.items()},
    "COMPLETED": ("LOST", "FAILED_DRIVER"),
}


def test_the_table_holds_every_word_of_the_manual() -> None:
    assert set(IN_QUEUE) == set(SLURM_WORDS)
    assert len(SLURM_WORDS) == sum(len(words.split()) for words in states.WORDS.values())


@pytest.mark.parametrize("word", [*SLURM_WORDS, "BRAND_NEW"])
def test_a_word_of_squeue_without_a_terminal_record_ends_nothing_at_once(word: str) -> None:
    without, live = IN_QUEUE.get(word, RUNS)
    assert of(judge(evidence(row(word)))) == without
    assert of(judge(evidence(row(word), record=LIVE))) == live
    assert of(judge(evidence(row(word), record=record("SETTING_UP"))))[1] is False


@pytest.mark.parametrize("word", [*SLURM_WORDS, "BRAND_NEW"])
@pytest.mark.parametrize("state", protocol.TERMINAL_STATES)
def test_a_terminal_record_stands_unless_the_job_waits_again(word: str, state: str) -> None:
    verdict = judge(evidence(row(word), record=record(state)))
    is_requeued = states.KINDS.get(word) is Kind.WAITING
    assert of(verdict) == (OPEN_PENDING if is_requeued else (state, True))
    assert verdict.attempt == (1 if is_requeued else 0)


@pytest.mark.parametrize("word", [*SLURM_WORDS, "BRAND_NEW"])
@pytest.mark.parametrize("state", protocol.TERMINAL_STATES)
def test_a_terminal_record_of_an_attempt_before_this_one_says_nothing(word: str, state: str) -> None:
    verdict = judge(evidence(row(word, start=END + 7), record=record(state)))
    assert (verdict.is_final, verdict.attempt) == (False, 1)


@pytest.mark.parametrize("word", [*SLURM_WORDS, "BRAND_NEW"])
@pytest.mark.parametrize("which, found", [(0, None), (1, LIVE)])
def test_a_word_of_sacct_ends_a_run_that_is_gone_for_long(word: str, which: int, found: Record | None) -> None:
    wait_s = states.SETTLE_S if states.KINDS.get(word) in states.OVER else states.REQUEUE_S
    before = judge(evidence(absent_s=wait_s - 1, record=found, account=(account(word),)))
    after = judge(evidence(absent_s=wait_s, record=found, account=(account(word),)))
    assert not before.is_final and before.state in states.LIVE_STATES
    assert of(after) == (GONE.get(word, ("LOST", "LOST"))[which], True)
    assert word in after.detail


@pytest.mark.parametrize("word", SLURM_WORDS)
@pytest.mark.parametrize("state", protocol.TERMINAL_STATES)
def test_a_terminal_record_stands_whatever_sacct_says(word: str, state: str) -> None:
    verdict = judge(evidence(absent_s=1, record=record(state), account=(account(word, "0:9"),)))
    assert of(verdict) == (state, True)


@pytest.mark.parametrize("word", SLURM_WORDS)
def test_sacct_alone_ends_nothing(word: str) -> None:
    for found in (None, LIVE):
        assert not judge(evidence(record=found, account=(account(word),))).is_final


def test_a_word_of_a_slurm_to_come_is_no_end_and_is_told() -> None:
    verdict = judge(evidence(row("BRAND_NEW", "Why"), record=LIVE))
    assert of(verdict) == OPEN_RUNNING
    assert verdict.detail == "BRAND_NEW (Why): this is no word that gangrun knows"


# --- the end


def test_sacct_says_completed_though_the_step_failed_h7() -> None:
    verdict = judge(evidence(absent_s=1, record=FAILED, account=(account("COMPLETED"),)))
    assert verdict == Verdict("FAILED", True, 7, "rank 1 failed first", 0, "COMPLETED (0:0)")


@pytest.mark.parametrize("case", ["a child, and the script went on (h8)", "nothing that mattered (h9)"])
def test_out_of_memory_beside_a_success_is_a_warning_with_both_numbers(case: str) -> None:
    verdict = judge(evidence(absent_s=1, record=SUCCEEDED, account=(account("OUT_OF_MEMORY", "0:125"),)))
    assert (of(verdict), verdict.exit_code) == (("SUCCEEDED", True), 0)
    assert verdict.reason == "warning: Slurm says OUT_OF_MEMORY (0:125): a process ran out of memory"
    assert verdict.detail == "OUT_OF_MEMORY (0:125)"


def test_out_of_memory_explains_a_failure_h8() -> None:
    verdict = judge(evidence(absent_s=1, record=FAILED, account=(account("OUT_OF_MEMORY", "0:125"),)))
    assert verdict.reason == "rank 1 failed first; Slurm says OUT_OF_MEMORY (0:125): a process ran out of memory"
    killed = judge(evidence(absent_s=60, record=LIVE, account=(account("OUT_OF_MEMORY", "0:125"),)))
    assert of(killed) == ("FAILED", True)
    assert killed.reason.startswith("out of memory (Slurm says OUT_OF_MEMORY (0:125)); the driver was killed")


def test_a_driver_that_told_of_memory_itself_is_not_repeated() -> None:
    told = record("FAILED", reason="rank 0 failed first; a process of rank 0 on n1 was killed, out of memory")
    assert judge(evidence(row("OUT_OF_MEMORY"), record=told)).reason == told.reason


def test_the_time_limit_is_a_failure_though_the_driver_heard_of_a_cancel() -> None:
    words = "cancelled by signal 15 (slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***)"
    verdict = judge(evidence(row("COMPLETING", "TimeLimit"), record=record("CANCELLED", reason=words)))
    assert verdict == Verdict("FAILED", True, 143, "time limit", 0, "completing")


def test_the_time_limit_of_a_driver_that_was_killed_is_told() -> None:
    verdict = judge(evidence(absent_s=60, record=LIVE, account=(account("TIMEOUT", "0:9"),)))
    assert (of(verdict), verdict.exit_code) == (("FAILED", True), 137)
    assert verdict.reason == "time limit; the driver was killed before it could record the end"


def test_preempted_and_never_run_again_fails_after_a_while_of_absence_i4() -> None:
    preempted = account("PREEMPTED")
    assert of(judge(evidence(row("PREEMPTED"), record=LIVE))) == OPEN_PENDING
    assert not judge(evidence(absent_s=299, record=LIVE, account=(preempted,))).is_final
    verdict = judge(evidence(absent_s=300, record=LIVE, account=(preempted,)))
    assert of(verdict) == ("FAILED", True) and verdict.reason.startswith("preempted, and Slurm did not run the job")


def test_preempted_and_never_run_again_without_accounting_i4() -> None:
    last = {"last_rows": (row("PREEMPTED"),), "accounting": False, "record": LIVE}
    assert not judge(evidence(absent_s=299, **last)).is_final
    assert of(judge(evidence(absent_s=300, **last))) == ("FAILED", True)


def test_preempted_pending_running_goes_on_i4() -> None:
    for again, state in (("PENDING", "PENDING"), ("RUNNING", "RUNNING")):
        assert of(judge(evidence(row(again, start=END + 9), record=LIVE))) == (state, False)


def test_the_latest_attempt_decides_whatever_the_order_of_rows_i3() -> None:
    rows = [account("PREEMPTED"), account("FAILED", "3:0", submitted=END + 1, start=END + 8, end=END + 20)]
    for order in (rows, rows[::-1]):
        verdict = judge(evidence(absent_s=60, account=tuple(order)))
        assert (verdict.state, verdict.is_final, verdict.exit_code, verdict.attempt) == ("FAILED_DRIVER", True, 3, 1)
    again = record("SUCCEEDED", attempt=1, ended=END + 20)
    assert of(judge(evidence(absent_s=1, account=tuple(rows), record=again))) == ("SUCCEEDED", True)


def test_an_old_attempts_failure_is_not_the_end_of_a_run_whose_last_attempt_was_killed() -> None:
    rows = (account("FAILED", "7:0"), account("TIMEOUT", "0:9", submitted=END + 1, start=END + 8, end=END + 99))
    verdict = judge(evidence(absent_s=60, record=FAILED, account=rows))
    assert (verdict.state, verdict.reason, verdict.attempt) == ("FAILED", "time limit", 1)


def test_a_clock_that_is_late_does_not_hide_the_record_of_a_short_run() -> None:
    early = record("SUCCEEDED", ended=START - 3)
    one = (account("COMPLETED"),)
    assert of(judge(evidence(absent_s=1, record=early, account=one))) == ("SUCCEEDED", True)
    assert of(judge(evidence(row("COMPLETING"), record=early))) == ("SUCCEEDED", True)


def test_a_job_that_runs_again_right_after_its_record_has_not_ended() -> None:
    assert of(judge(evidence(row("RUNNING", start=END + 2), record=FAILED))) == OPEN_RUNNING


def test_a_driver_that_was_not_told_of_its_attempt_is_believed() -> None:
    rows = (account("NODE_FAIL", submitted=1.0, start=2.0), account("FAILED"))
    assert of(judge(evidence(absent_s=1, record=FAILED, account=rows))) == ("FAILED", True)


def test_sacct_that_is_an_attempt_behind_says_nothing() -> None:
    last = (row("RUNNING", submitted=END + 1, start=END + 8),)
    assert not judge(evidence(absent_s=60, account=(account("FAILED"),), last_rows=last)).is_final
    ended_long_ago = evidence(absent_s=1, account=(account("FAILED"),), now=END + 9999)
    assert not judge(ended_long_ago).is_final


def test_a_requeue_that_never_came_is_lost_and_no_killed_driver() -> None:
    promised = record("PENDING", ended=END, reason="Slurm runs the job again")
    verdict = judge(evidence(absent_s=60, record=promised, accounting=False))
    assert of(verdict) == ("LOST", True) and "killed" not in verdict.reason


def test_a_row_that_a_resize_added_is_no_attempt() -> None:
    rows = (account("RESIZING"), account("COMPLETED", submitted=START, start=END + 1))
    assert of(judge(evidence(absent_s=1, record=FAILED, account=rows))) == ("FAILED", True)


def test_completing_for_long_does_not_keep_a_run_that_has_ended_n4_l8() -> None:
    verdict = judge(evidence(row("COMPLETING"), record=SUCCEEDED))
    assert (of(verdict), verdict.detail) == (("SUCCEEDED", True), "completing")
    assert of(judge(evidence(row("COMPLETING"), record=LIVE))) == OPEN_RUNNING


def test_completed_in_the_queue_waits_for_the_record_l8_l15() -> None:
    ended = row("COMPLETED")
    assert of(judge(evidence(ended, record=LIVE, now=END + 59))) == OPEN_RUNNING
    assert of(judge(evidence(ended, record=LIVE, now=END + 60))) == ("FAILED_DRIVER", True)
    assert of(judge(evidence(ended, now=END + 60))) == ("LOST", True)
    assert of(judge(evidence(ended, record=SUCCEEDED, now=END))) == ("SUCCEEDED", True)


def test_gone_from_the_queue_waits_for_the_record_l15() -> None:
    for found, state in ((None, "LOST"), (LIVE, "FAILED_DRIVER")):
        assert not judge(evidence(absent_s=59, record=found, accounting=False)).is_final
        assert of(judge(evidence(absent_s=60, record=found, accounting=False))) == (state, True)


def test_a_lost_run_is_found_when_its_record_appears() -> None:
    assert of(judge(evidence(absent_s=900, accounting=False))) == ("LOST", True)
    assert of(judge(evidence(absent_s=999, accounting=False, record=SUCCEEDED))) == ("SUCCEEDED", True)


def test_a_run_that_was_never_seen_in_the_queue_l1_l16() -> None:
    assert of(judge(evidence(absent_s=1e-3, record=SUCCEEDED, accounting=False))) == ("SUCCEEDED", True)


def test_without_accounting_a_killed_run_ends_in_bounded_time_l2() -> None:
    verdict = judge(evidence(absent_s=60, record=LIVE, accounting=False))
    assert verdict.reason == "it is gone from the queue; the driver was killed before it could record the end"
    assert not verdict.detail


def test_what_squeue_said_last_serves_where_there_is_no_accounting_l2() -> None:
    verdict = judge(evidence(absent_s=60, record=LIVE, accounting=False, last_rows=(row("TIMEOUT", "TimeLimit"),)))
    assert (of(verdict), verdict.detail) == (("FAILED", True), "TIMEOUT (TimeLimit)")


@pytest.mark.parametrize("told", [(), (account("TIMEOUT", "0:9"),)])
def test_an_end_that_was_seen_in_the_queue_does_not_open_again_when_the_row_goes(told: tuple[AccountRow, ...]) -> None:
    facts = {"record": LIVE, "accounting": bool(told), "account": told, "now": END + 301}
    verdict = judge(evidence(absent_s=1, last_rows=(row("TIMEOUT"),), **facts))
    assert of(verdict) == ("FAILED", True)


@pytest.mark.parametrize("accounting", [None, True])
def test_where_sacct_may_still_tell_absence_takes_longer_l4(accounting: bool | None) -> None:
    assert not judge(evidence(absent_s=299, record=LIVE, accounting=accounting)).is_final
    assert judge(evidence(absent_s=300, record=LIVE, accounting=accounting)).is_final


def test_a_database_that_never_answered_leaves_the_end_open_for_its_word_l4() -> None:
    assert of(judge(evidence(absent_s=300, record=LIVE, accounting=None))) == ("LOST", True)


def test_one_miss_ends_nothing_l9() -> None:
    last = (row("PENDING", "Priority"),)
    assert of(judge(evidence(absent_s=1e-3, accounting=False, last_rows=last))) == OPEN_PENDING
    assert of(judge(evidence(absent_s=1e-3, accounting=False, record=LIVE))) == OPEN_RUNNING


def test_a_job_cannot_be_absent_for_longer_than_it_exists() -> None:
    assert not judge(evidence(absent_s=500, age_s=5, accounting=False)).is_final


@pytest.mark.parametrize("found", [None, LIVE, FAILED, record("FAILED_DRIVER"), record("CANCELLED")])
@pytest.mark.parametrize("absent_s", [0.0, 1e9])
def test_a_controller_that_does_not_answer_ends_nothing_n1_l4(found: Record | None, absent_s: float) -> None:
    verdict = judge(evidence(record=found)._replace(absent_s=absent_s))
    assert not verdict.is_final and "has not answered" in verdict.reason


def test_a_success_needs_no_controller_n1() -> None:
    assert of(judge(evidence(record=SUCCEEDED))) == ("SUCCEEDED", True)


def test_an_outage_does_not_turn_a_requeue_into_a_failure() -> None:
    waits = row("PENDING", "BeginTime", submitted=END)
    assert of(judge(evidence(waits, record=FAILED))) == OPEN_PENDING
    assert not judge(evidence(record=FAILED, last_rows=(waits,))).is_final
    done = record("SUCCEEDED", attempt=1, ended=END + 50)
    assert of(judge(evidence(record=done, last_rows=(waits,)))) == ("SUCCEEDED", True)


def test_a_job_whose_script_never_began_fails_with_a_reason_n3() -> None:
    verdict = judge(evidence(absent_s=60, account=(account("FAILED", "127:0"),)))
    assert (of(verdict), verdict.exit_code) == (("FAILED_DRIVER", True), 127)
    assert verdict.reason == "Slurm says FAILED (127:0); it left no record of how it ended"


def test_completed_without_a_record_is_no_success() -> None:
    verdict = judge(evidence(absent_s=60, account=(account("COMPLETED"),)))
    assert (of(verdict), verdict.exit_code) == (("LOST", True), None)
    assert verdict.reason == "Slurm says COMPLETED (0:0); it left no record of how it ended"


# --- cancel


def test_a_pending_job_that_was_cancelled_is_at_once_g9() -> None:
    assert of(judge(evidence(row("CANCELLED", nodes="")))) == ("CANCELLED", True)
    assert of(judge(evidence(row("CANCELLED")))) == OPEN_RUNNING
    assert of(judge(evidence(row("CANCELLED", nodes=""), record=LIVE))) == OPEN_RUNNING  # its record may be late


@pytest.mark.parametrize("word", ["COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "NODE_FAIL"])
@pytest.mark.parametrize("found", [None, LIVE])
def test_what_ended_after_a_cancel_is_cancelled_whatever_slurm_calls_it_l17(word: str, found: Record | None) -> None:
    verdict = judge(evidence(absent_s=60, record=found, account=(account(word),), cancel_asked=True))
    assert of(verdict) == ("CANCELLED", True)


@pytest.mark.parametrize("accounting", [None, False, True])
def test_a_cancelled_run_that_is_gone_is_cancelled_whoever_answers(accounting: bool | None) -> None:
    assert of(judge(evidence(absent_s=60, accounting=accounting, cancel_asked=True))) == ("CANCELLED", True)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "cancelled before it left a record"),
        (LIVE, "cancelled"),
        (record("PENDING", ended=END), "cancelled before it ran again"),
    ],
)
def test_a_cancel_tells_whether_the_run_had_begun(found: Record | None, words: str) -> None:
    assert judge(evidence(absent_s=60, record=found, cancel_asked=True)).reason == words


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER"])
def test_an_end_that_was_recorded_stands_against_a_later_cancel_g9(state: str) -> None:
    facts = {"record": record(state), "account": (account("CANCELLED", "0:15"),), "cancel_asked": True}
    assert of(judge(evidence(absent_s=60, **facts))) == (state, True)


def test_a_cancel_that_was_only_asked_for_is_no_end() -> None:
    assert of(judge(evidence(row("RUNNING"), record=LIVE, cancel_asked=True))) == OPEN_RUNNING
    assert of(judge(evidence(row("COMPLETING"), record=LIVE, cancel_asked=True))) == OPEN_RUNNING


# --- waiting

HELD = ["JobHeldUser", "launch failed requeued held", "job requeued in held state"]


@pytest.mark.parametrize("reason", HELD)
def test_a_held_job_says_so_and_how_to_go_on_i8(reason: str) -> None:
    verdict = judge(evidence(row("PENDING", reason), record=LIVE))
    assert of(verdict) == OPEN_PENDING
    assert verdict.reason.startswith(f"held ({reason}): ") and "scontrol release 4711" in verdict.reason


@pytest.mark.parametrize("word", ["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"])
@pytest.mark.parametrize("job", [JOB, JOB + "+0"])
def test_a_job_that_was_requeued_to_be_held_says_so_and_how_to_go_on(word: str, job: str) -> None:
    verdict = judge(evidence(row(word, job=job), record=FAILED))
    assert of(verdict) == OPEN_PENDING
    assert verdict.reason.startswith(f"held ({word}): ") and verdict.reason.endswith("scontrol release 4711")


@pytest.mark.parametrize(
    "reason",
    ["DependencyNeverSatisfied", "PartitionTimeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS"]
    + ["QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMinGRES"],
)
def test_a_request_that_can_never_be_met_stays_pending_and_says_so(reason: str) -> None:
    verdict = judge(evidence(row("PENDING", reason)))
    assert (of(verdict), verdict.reason) == (OPEN_PENDING, reason)
    assert verdict.detail == f"PENDING ({reason}): it will not start by itself"


@pytest.mark.parametrize(
    "reason", ["Resources", "Priority", "AssocMaxJobsLimit", "QOSMaxJobsPerUserLimit", "Dependency"]
)
def test_a_job_whose_turn_will_come_gives_slurms_reason(reason: str) -> None:
    verdict = judge(evidence(row("PENDING", reason)))
    assert (verdict.reason, verdict.detail) == (reason, f"PENDING ({reason})")


# --- jobs of several components


def het(*words: str, name: str = RUN) -> tuple[QueueRow, ...]:
    return tuple(row(word, job=f"{JOB}+{index}", name=name) for index, word in enumerate(words))


@pytest.mark.parametrize(
    "words, state",
    [
        (("RUNNING", "RUNNING"), "RUNNING"),
        (("COMPLETED", "RUNNING"), "RUNNING"),
        (("PENDING", "PENDING"), "PENDING"),
        (("PENDING", "CANCELLED"), "PENDING"),
        (("CONFIGURING", "RUNNING"), "RUNNING"),
    ],
)
def test_components_give_one_answer_l11(words: tuple[str, ...], state: str) -> None:
    assert of(judge(evidence(*het(*words)))) == (state, False)
    assert of(judge(evidence(*het(*words[::-1])))) == (state, False)


def test_the_worst_end_of_the_components_counts_l11() -> None:
    rows = (account("COMPLETED", job="4711+0"), account("TIMEOUT", job="4711+1", name="other"))
    assert of(judge(evidence(absent_s=60, account=rows))) == ("FAILED", True)


def test_components_are_no_attempts_l11() -> None:
    rows = (account("COMPLETED", job="4711+0"), account("COMPLETED", job="4711+1", start=END + 9))
    assert of(judge(evidence(absent_s=1, account=rows, record=FAILED))) == ("FAILED", True)


def test_components_with_a_name_of_their_own_belong_to_the_job() -> None:
    first, second = het("RUNNING")[0], het("RUNNING", "RUNNING", name="other")[1]
    assert states.own_rows([first, second], JOB, RUN) == (first, second)


# --- the driver's record


def status(**more: Any) -> str:
    return json.dumps({"state": "RUNNING", "attempt": 0, "num_nodes": 4, "slurm_job_id": "4711", **more})


@pytest.mark.parametrize(
    "text",
    [None, "", "\n", "{", status()[:-1], "[]", "7", "null", "{}", '{"state": "RUNNING"}', '{"state": [], "attempt": 0}']
    + [status(state=None), status(state="running"), status(attempt="0"), status(attempt=True), "[" * 100000],
)  # fmt: skip
def test_half_a_record_or_somebody_elses_is_none_e9(text: str | None) -> None:
    assert states.parse_record(text) is None


def test_a_record_is_read_whole() -> None:
    first = {"rank": 1, "state": "failed", "exit_code": 7}
    ends = {"exit_code": 7, "reason": "rank 1", "started": 5, "ended": 9.5, "ranks": [first], "first_failure": first}
    found = states.parse_record(status(state="FAILED", **ends))
    assert found is not None and found.is_terminal
    assert (found.exit_code, found.reason, found.started, found.ended, found.job) == (7, "rank 1", 5.0, 9.5, "4711")
    assert (found.first_failure, found.ranks, found.num_nodes) == (first, (first,), 4)


def test_fields_of_the_wrong_kind_are_as_if_they_were_not_there() -> None:
    wrong = {
        "exit_code": "0",
        "reason": 5,
        "ended": "now",
        "ranks": {},
        "first_failure": [],
        "progress": [],
        "times": 1,
    }
    assert states.parse_record(status(**wrong)) == Record("RUNNING", 0, num_nodes=4, job="4711")


def shown(state: str, **more: Any) -> str:
    return states.progress(states.parse_record(status(state=state, **more)))


def counted(step: str, **ranks: int) -> dict[str, Any]:
    return {"progress": {"step": step, "ranks": ranks}}


def test_progress_is_told_in_ranks() -> None:
    assert shown("SETTING_UP", **counted("setup", done=3, running=1)) == "setup 3/4 nodes"
    assert shown("RUNNING", **counted("run", done=2, running=2)) == "2/4 ranks done"
    assert shown("RUNNING", **counted("run", running=2, failed=1, broken=1)) == "0/4 ranks done, 2 failed"


def test_progress_of_setup_is_not_that_of_the_run_that_follows() -> None:
    assert shown("RUNNING", **counted("setup", done=4)) == "running on 4 nodes"


def test_progress_of_a_driver_that_does_not_count_says_what_runs() -> None:
    assert (shown("SETTING_UP"), shown("RUNNING", num_nodes=1)) == ("setup on 4 nodes", "running on 1 node")
    assert (shown("PENDING"), states.progress(None), shown("RUNNING", num_nodes=None)) == ("", "", "")


def test_progress_of_a_run_that_has_ended_counts_its_ranks() -> None:
    ranks = [{"state": state} for state in ("done", "failed", "stopped", "stopped")]
    assert shown("FAILED", ranks=ranks) == "1/4 ranks done, 1 failed"
    assert shown("FAILED_SETUP", ranks=ranks) == "setup 1/4 nodes, 1 failed"


@pytest.mark.parametrize(
    "verdict, code",
    [
        (Verdict("SUCCEEDED", True), 0),
        (Verdict("FAILED", True), 100),
        (Verdict("FAILED_SETUP", True), 100),
        (Verdict("FAILED_DRIVER", True), 100),
        (Verdict("LOST", True), 100),
        (Verdict("CANCELLED", True), 103),
        (Verdict("RUNNING", False), 101),
        (Verdict("PENDING", False), 101),
    ],
)
def test_exit_codes_for_scripts(verdict: Verdict, code: int) -> None:
    assert states.exit_code_of(verdict) == code


# --- lives of jobs, seen through outages


class Attempt(NamedTuple):
    submitted: float
    start: float
    end: float
    word: str
    recorded: str | None  # the driver's last state
    has_driver: bool = True

    @property
    def times(self) -> dict[str, Any]:
        """As Slurm prints them."""
        return {name: float(int(getattr(self, name))) for name in ("submitted", "start", "end")}


class Life:
    """A job from its first attempt to its end, and what each witness says of it at any moment."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.attempts: list[Attempt] = []
        self.has_accounting = dice.random() < 0.6
        self.nfs_lag_s, self.sacct_lag_s = dice.uniform(0, 45), dice.uniform(0, 30)
        self.min_job_age_s = dice.choice([2, 300])
        # Between a preemption and the job's return to the queue; without accounting, nobody could tell it from an end.
        self.gap_s = dice.choice([0, 0, 200]) if self.has_accounting else 0
        moment = 0.0
        for _ in range(dice.choice([0, 0, 1, 2])):
            # A site may run a job again after an exit code; then its driver has recorded a failure.
            word, recorded = dice.choice([("PREEMPTED", None), ("NODE_FAIL", "PENDING"), ("FAILED", "FAILED")])
            moment = self._attempt(moment, word, recorded)
        self.cancelled_at: float | None = None
        self.ended = self._attempt(moment, *dice.choice(ENDS))
        if self.attempts[-1].word == "CANCELLED" and dice.random() < 0.7:
            self.cancelled_at = self.ended - 1
        # While an attempt with a recorded failure completes, nobody can tell whether Slurm will run the job again.
        self.completing_s = 0 if self.is_rerun_after_a_failure else dice.choice([0, 5, 400])

    def _attempt(self, moment: float, word: str, recorded: str | None) -> float:
        start = moment + self.dice.uniform(6, 90)
        end = start + self.dice.uniform(4, 400)
        has_driver = recorded is not None or word == "PREEMPTED" or self.dice.random() < 0.7
        self.attempts.append(Attempt(moment, start, end, word, recorded, has_driver))
        return end

    @property
    def truths(self) -> set[str]:
        """What may be said of the end by those who could not see all of it."""
        last = self.attempts[-1]
        if last.recorded in protocol.TERMINAL_STATES:
            return {str(last.recorded)}
        if self.cancelled_at is not None:
            return {"CANCELLED"}
        told = BY_WORD.get(last.word, "FAILED_DRIVER")
        return {told, "LOST"} if self.has_accounting else {told, "LOST", "FAILED_DRIVER"}

    @property
    def is_rerun_after_a_failure(self) -> bool:
        return any(one.word == "FAILED" for one in self.attempts[:-1])

    def _at(self, moment: float) -> tuple[int, Attempt]:
        begun = [(index, one) for index, one in enumerate(self.attempts) if one.submitted <= moment]
        return begun[-1]

    def queue(self, moment: float) -> tuple[QueueRow, ...]:
        index, one = self._at(moment)
        is_last = index == len(self.attempts) - 1
        times = one.times
        if index and self.attempts[index - 1].word != "FAILED" and moment < min(one.submitted + self.gap_s, one.start):
            return ()
        if moment < one.start:
            return (row("PENDING", "BeginTime", **{**times, "start": None, "end": None}),)
        if moment < one.end:
            return (row("RUNNING", **times),)
        if moment < one.end + self.completing_s:
            return (row("COMPLETING", **times),)
        if is_last and moment < one.end + self.completing_s + self.min_job_age_s:
            return (row(one.word, **times),)
        return ()

    def accounts(self, moment: float) -> tuple[AccountRow, ...]:
        moment -= self.sacct_lag_s
        begun = [one for one in self.attempts if one.submitted <= moment]
        return tuple(self._account(one, moment) for one in begun)

    @staticmethod
    def _account(one: Attempt, moment: float) -> AccountRow:
        times = one.times
        if moment < one.start:
            return account("PENDING", **{**times, "start": None, "end": None})
        return account("RUNNING" if moment < one.end else one.word, "0:9", **times)

    def record(self, moment: float) -> Record | None:
        moment, found = moment - self.nfs_lag_s, None
        for index, one in enumerate(self.attempts):
            if one.has_driver and one.start + 1 <= moment:
                found = record("RUNNING", attempt=index, started=one.start + 1)
            if one.recorded is not None and one.end <= moment:
                found = record(one.recorded, attempt=index, started=one.start + 1, ended=one.end - 0.1)
        return found

    def looks(self) -> Iterator[tuple[float, bool, Evidence]]:
        """What a client sees, with outages of the controller and of the database, until long after the end."""
        dice, moment, absent_s, seen = self.dice, 1.0, 0.0, None
        last_rows: tuple[QueueRow, ...] = ()
        told: tuple[AccountRow, ...] = ()
        accounting = None if self.has_accounting else False
        # Of an attempt after a recorded failure that was never seen in the queue, nobody can know.
        noticed = [one.start + 1 for one in self.attempts[1:]] if self.is_rerun_after_a_failure else []
        while moment < self.ended + 3000:
            is_calm = moment > self.ended + 1500
            has_answered = is_calm or moment in noticed or dice.random() < 0.7
            rows = self.queue(moment) if has_answered else ()
            last_rows = rows or last_rows
            if has_answered:
                absent_s = 0.0 if rows else absent_s + (moment - seen if absent_s and seen else 1e-3)
                if not rows and self.has_accounting and (is_calm or dice.random() < 0.5):
                    told, accounting = self.accounts(moment), True
            seen = moment if has_answered else None
            was_cancelled = self.cancelled_at is not None and moment >= self.cancelled_at
            yield moment, has_answered, Evidence(
                RUN, JOB, self.record(moment), rows, has_answered and not rows, told, accounting,
                absent_s, was_cancelled, moment, last_rows, moment,
            )  # fmt: skip
            later = moment + dice.uniform(3, 60)
            moment = min([one for one in noticed if moment < one < later], default=later)


ENDS = [
    ("COMPLETED", "SUCCEEDED"),
    ("FAILED", "FAILED"),
    ("CANCELLED", "CANCELLED"),
    ("OUT_OF_MEMORY", "SUCCEEDED"),
    ("NODE_FAIL", "FAILED_DRIVER"),
    *((word, None) for word in "COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED".split()),
]


@pytest.mark.parametrize("block", range(8))
def test_through_outages_no_end_is_said_too_early_or_wrongly_or_taken_back_for_another(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        follow(Life(seed), f"seed {seed}")


def follow(life: Life, name: str) -> None:
    """Judge at every look; what is said of the end must be true from the first time on."""
    said: set[str] = set()
    verdict = Verdict("PENDING", False)
    for moment, has_answered, look in life.looks():
        was_final, verdict = verdict.is_final, judge(look)
        told = f"{name}, at {moment:.0f} of {life.ended:.0f}: {verdict}, {life.attempts}, {look}"
        assert (verdict.state in states.FINAL_STATES) == verdict.is_final, told
        if verdict.is_final and verdict.state != states.LOST:
            said.add(verdict.state)
            assert moment >= life.ended, told
            assert said <= life.truths and len(said) == 1, told
        if verdict.is_final and not was_final and not has_answered:
            assert verdict.state == protocol.SUCCEEDED or look.account, told
    assert verdict.is_final and verdict.state in life.truths, told


def any_rows(dice: random.Random, make: Any) -> tuple[Any, ...]:
    starts = (None, START, END + 9)
    return tuple(make(dice.choice(SLURM_WORDS), start=dice.choice(starts)) for _ in range(dice.choice([0, 0, 1, 2])))


def test_any_mixture_however_foolish_has_a_verdict_and_nothing_ends_in_silence() -> None:
    dice = random.Random(1)
    records = [None, LIVE, *(record(state) for state in protocol.TERMINAL_STATES)]
    for _ in range(20000):
        rows, told = any_rows(dice, row), any_rows(dice, account)
        look = Evidence(
            RUN, dice.choice([JOB, None]), dice.choice(records), rows, dice.random() < 0.3, told,
            dice.choice([True, False, None]), dice.choice([0, 61, 301]), dice.random() < 0.2, 1000,
            any_rows(dice, row), dice.choice([None, END + 99]),
        )  # fmt: skip
        verdict = judge(look)
        assert (verdict.state in states.FINAL_STATES) == verdict.is_final
        if not rows and not look.is_absent and not told:
            assert not verdict.is_final or verdict.state == protocol.SUCCEEDED
