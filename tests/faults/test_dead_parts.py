"""Parts that die or get stuck."""

from __future__ import annotations

from tests.bench import Bench, eventually
from tests.faults.conftest import Fault
from tests.faults.rows import kill

KIND = "Dead and stuck parts"


def test_the_drivers_srun_is_killed(bench: Bench, fault: Fault) -> None:
    row = fault("the driver's srun is killed with -9 while the scripts run")
    job = bench.submit(run="echo up; sleep 4401", grace_s=2.0)
    eventually(lambda: job.log("0-head.log") and job.log("2-worker2.log"))
    row.injected()
    kill(job, "srun")
    outcome = job.wait()
    assert outcome.status["state"] == "FAILED_DRIVER" and "srun was killed by signal 9" in outcome.status["reason"]
    row.ended(outcome, bench, "sleep 4401")
