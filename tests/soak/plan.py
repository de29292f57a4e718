"""What a short job is and what is done to it, and which verdicts that allows. Pure functions of the seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from executor import protocol
from tests.bench import Outcome

DONE = "; echo end >$SOAK_DIR/end-$SOAK_CYCLE-$SKYPILOT_NODE_RANK"
SCRIPTS = {
    "plain": "sleep %g" + DONE,
    "rank 0 fails": "sleep %g; [ $SKYPILOT_NODE_RANK != 0 ] || exit 3" + DONE,
    "leaves with 0 on TERM": "trap 'exit 0' TERM INT; sleep %g & wait $!" + DONE,
    "ignores TERM": "trap '' TERM INT; sleep %g" + DONE,
    "leaves daemons": "setsid sleep 600 & nohup sleep 600 & sleep %g" + DONE,
}
SETUPS = {None: 3, "sleep 0.1": 6, "sleep 0.2; exit 4": 1}
# Where SIGKILL or TERM may hit, and what a job may say then beside what it says by itself.
KILLED, TERMED, BROKEN = protocol.EXIT_KILLED, protocol.EXIT_TERMINATED, protocol.EXIT_INFRASTRUCTURE
CANCELLED = {(protocol.CANCELLED, TERMED), (None, TERMED)}  # None: before the driver could handle a signal
DIED = {(protocol.FAILED, KILLED), (protocol.FAILED_SETUP, KILLED)}
UNDECIDED = {(state, None) for state in (None, protocol.PENDING, protocol.SETTING_UP, protocol.RUNNING)}
KILLS: dict[str, set[tuple[Any, Any]]] = {
    "nothing": set(),
    "driver": UNDECIDED,
    "driver TERM": CANCELLED,
    "srun": {(protocol.FAILED_DRIVER, BROKEN)},
    "executor": {*DIED, (protocol.FAILED_DRIVER, BROKEN)},
    "script": DIED,
    "scancel job": CANCELLED,
    "scancel step": {(protocol.CANCELLED, TERMED), (protocol.FAILED_SETUP, TERMED)},
}


class Plan(NamedTuple):
    """One short job, decided by the seed and its number alone."""

    number: int
    nodes: int
    setup: str | None
    script: str
    seconds: float
    kill: str
    after_s: float

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        chance = random.Random("%d %d" % (seed, number))
        setup = chance.choices(list(SETUPS), list(SETUPS.values()))[0]
        script, kill, seconds = chance.choice(list(SCRIPTS)), chance.choice(list(KILLS)), chance.uniform(0.1, 1.5)
        return cls(number, chance.randint(1, 3), setup, script, seconds, kill, chance.uniform(0, seconds + 0.7))

    @property
    def own_verdict(self) -> tuple[Any, Any]:
        if self.setup and "exit 4" in self.setup:
            return protocol.FAILED_SETUP, 4
        return (protocol.FAILED, 3) if self.script == "rank 0 fails" else (protocol.SUCCEEDED, 0)


def judge(plan: Plan, outcome: Outcome, all_ended: bool, hit: bool) -> list[str]:
    state, code = outcome.status.get("state"), outcome.status.get("exit_code")
    allowed = set(KILLS[plan.kill]) if hit else {plan.own_verdict}
    if all_ended or plan.own_verdict[1]:  # the kill came too late, or after the script had failed by itself
        allowed.add(plan.own_verdict)
    problems = []
    if (state, code) not in allowed and not (state is None and (None, outcome.code) in allowed):
        problems.append("%s %s after %s%s" % (state, code, plan.kill, "" if hit else " that hit nothing"))
    if (state == protocol.SUCCEEDED or outcome.code == 0) and not all_ended:
        problems.append("%s, exit code %d, but not all scripts came to their end" % (state, outcome.code))
    if outcome.code != code and not (hit and plan.kill in ("driver", "driver TERM", "scancel job")):
        problems.append("the status says %s, Slurm says %d" % (code, outcome.code))
    return problems
