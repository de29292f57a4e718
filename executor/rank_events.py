"""What the driver learns of its ranks from one look to the next, as events. Pure: records go in, events come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from executor import protocol
from executor.verdict import has_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

Event = tuple[str, dict[str, Any]]


class RankEvents:
    """Each rank's begin and end of each step, told once."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._told: set[tuple[str, str, int]] = set()
        self._heard: dict[int, tuple[object, float]] = {}  # of a step's ranks: the last beat, and when it was new

    def news(self, step: str, records: Sequence[Record | None]) -> list[Event]:
        """What is new. The last end of a run step is left to the end of the attempt, which tells of all ranks."""
        known = [(rank, record) for rank, record in enumerate(records) if record]
        self._listen(known)
        begun = [(rank, record) for rank, record in known if record.get("started") is not None]
        found = [self._started(step, rank, record) for rank, record in begun if self._is_new("begin", step, rank)]
        if step == protocol.STEP_RUN and all(has_ended(record) for record in records):
            return found
        ended = [(rank, record) for rank, record in known if has_ended(record)]
        return found + [self._done(step, rank, record) for rank, record in ended if self._is_new("end", step, rank)]

    def heard(self, rank: int) -> float | None:
        """When a rank's last sign of life was seen, on the driver's clock."""
        return self._heard[rank][1] if rank in self._heard else None

    def _listen(self, known: Sequence[tuple[int, Record]]) -> None:
        for rank, record in known:
            beat = (record.get("step"), record.get("beat"), record.get("state"))
            if self._heard.get(rank, (None, 0.0))[0] != beat:
                self._heard[rank] = beat, round(self._clock(), 3)

    def _is_new(self, what: str, step: str, rank: int) -> bool:
        key = what, step, rank
        is_new = key not in self._told
        self._told.add(key)
        return is_new

    def _started(self, step: str, rank: int, record: Record) -> Event:
        told = {key: record.get(key) for key in ("node", "host", "joined", "started")}
        return protocol.EVENT_RANK_STARTED, {"step": step, "rank": rank, **told}

    def _done(self, step: str, rank: int, record: Record) -> Event:
        told = {"state": record.get("state"), "exit_code": record.get("code"), "ended": record.get("ended")}
        return protocol.EVENT_RANK_DONE, {"step": step, "rank": rank, **told}
