"""Which ranks of the run step are still heard of: srun waits for ever for one that is lost without a word."""

from __future__ import annotations

from collections.abc import Sequence

from executor import protocol
from executor.shared import Watch
from executor.verdict import Verdict, has_ended, judge, lost_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record
    from executor.step import Step

STEP_END_S = 5.0
SRUN_PATIENCE_S = 20.0  # from the last rank's end to the end of srun; a lost slurmstepd tells it nothing


class Attendance:
    """Looks at the ranks' records again and again; one object for one run step."""

    def __init__(self, liveness_timeout_s: float) -> None:
        # The ranks in the barrier give a silent peer up first, and the step ends well: that is the better verdict.
        sweep_s = protocol.beat_interval_s(liveness_timeout_s)
        self._limit_s = liveness_timeout_s + sweep_s + STEP_END_S
        self._watches: dict[int, Watch] = {}
        self._since_all_ended = Watch(SRUN_PATIENCE_S)

    def verdict_if_stuck(self, records: Sequence[Record | None], run: Step) -> Verdict | None:
        """How the job has ended where srun will not say so: nobody open is heard of, or all have ended long ago."""
        still_open = [rank for rank, record in enumerate(records) if not has_ended(record)]
        silent = [rank for rank in still_open if self._is_silent(rank, records[rank])]
        if still_open:
            self._since_all_ended = Watch(SRUN_PATIENCE_S)
            if silent != still_open:
                return None
            silent_s = self._watches[silent[0]].silent_s
            return lost_rank(records, silent[0], f"has not been heard of for {silent_s:.0f} s")
        if self._since_all_ended.is_silent(counter=0):
            return judge(records, run.words, was_cancelled=False)
        return None

    def _is_silent(self, rank: int, record: Record | None) -> bool:
        watch = self._watches.setdefault(rank, Watch(self._limit_s))
        return watch.is_silent(record.get("beat") if record else None)
