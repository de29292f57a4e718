"""The ranks of setup, or of the run: a relay each, a thread each that listens, one queue to which all speak."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from executor import protocol
from executor.loop import Loop
from executor.ray_cluster import Node, one_line, quiet
from executor.ray_relay import LOST, RECORD, Relay
from executor.shared import Watch
from executor.verdict import has_ended

TYPE_CHECKING = False
if TYPE_CHECKING:
    from executor.shared import Record

OVER = "over"
QUEUED = 64  # messages of at most 64 KiB, of all ranks
AHEAD = 4  # messages that a relay may be ahead of us
THREADS_OF_A_RELAY = 4
FAILING = (protocol.RANK_FAILED, protocol.RANK_BROKEN)


class Message(NamedTuple):
    """What one rank of a crew, or some other thread of the driver's, has to say."""

    source: object
    rank: int
    kind: str
    content: Any


class Mailbox:
    """From many threads to the one loop. It is bounded: who speaks too fast waits."""

    def __init__(self, loop: Loop, on_message: Callable[[Message], None]) -> None:
        self._loop = loop
        self._on_message = on_message
        self._queue: queue.Queue[Message] = queue.Queue(QUEUED)
        self._bell, self._button = os.pipe()
        self.open()

    def open(self) -> None:
        self._loop.watch(self._bell, self._take_one)

    def close(self) -> None:
        """Take nothing for now."""
        self._loop.forget(self._bell)

    def put(self, message: Message) -> None:
        """From any thread."""
        self._queue.put(message)
        os.write(self._button, b"!")

    def _take_one(self) -> None:
        os.read(self._bell, 1)
        self._on_message(self._queue.get())


def speaks(target: Callable[[], None]) -> None:
    """Run it in a thread that does not keep the driver from ending, nor print a traceback as all ends."""
    threading.Thread(target=quiet(target), daemon=True).start()


def hire(archive: Any, **options: Any) -> Any:
    """A relay on the node that these options of Ray's choose."""
    import ray
    from ray import cloudpickle

    from executor import interfaces, ray_relay

    for module in (ray_relay, interfaces, protocol):  # there is no module of ours on the nodes
        cloudpickle.register_pickle_by_value(module)
    fixed = {"max_concurrency": THREADS_OF_A_RELAY, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(Relay).options(**fixed, **options).remote(archive)


def _first_record(identity: dict[str, Any]) -> Record:
    """Of a rank that has not said anything yet."""
    known = {key: identity[key] for key in ("node_index", "host", "address")}
    return {"state": protocol.RANK_WAITING, "node": protocol.node_name(identity["node_index"]), **known}


class Crew:
    """Owns what is known of its ranks. Only the loop calls it."""

    def __init__(self, nodes: Sequence[Node], relays: Sequence[Any], mailbox: Mailbox, limit_s: float) -> None:
        """A rank that says nothing for `limit_s` is lost."""
        self.nodes = nodes
        self.records: list[Record | None] = [None] * len(relays)
        self.lost: dict[int, str] = {}
        self.open = set(range(len(relays)))
        self.is_stopping = False
        self._relays = relays
        self._mailbox = mailbox
        self._words = [0] * len(relays)
        self._watches = [Watch(limit_s) for _ in relays]
        self._was_dismissed = False

    def begin(self, descriptions: Sequence[dict[str, Any]]) -> None:
        self.records = [_first_record(description["rank"]["identity"]) for description in descriptions]
        for rank, (relay, description) in enumerate(zip(self._relays, descriptions)):
            how = {"num_returns": "streaming", "_generator_backpressure_num_objects": AHEAD}
            self._listen(rank, relay.run.options(**how).remote(description))

    def _listen(self, rank: int, stream: Any) -> None:
        import ray

        def listen() -> None:
            try:
                for answer in stream:
                    self._mailbox.put(Message(self, rank, *ray.get(answer)))
            except Exception as error:
                self._mailbox.put(Message(self, rank, LOST, one_line(error)))
            self._mailbox.put(Message(self, rank, OVER, None))

        speaks(listen)

    def hear(self, message: Message) -> None:
        """Take note of what a rank said about itself."""
        rank = message.rank
        self._words[rank] += 1
        if message.kind == RECORD:
            self.records[rank] = {**(self.records[rank] or {}), **message.content}
        elif message.kind == LOST and not self._has_ended(rank):
            self.lost.setdefault(rank, message.content)
        elif message.kind == OVER:
            self.open.discard(rank)

    @property
    def has_failed(self) -> bool:
        return bool(self.lost) or any(record and record.get("state") in FAILING for record in self.records)

    def _has_ended(self, rank: int) -> bool:
        return has_ended(self.records[rank])

    def give_up_silent(self) -> None:
        """Take those for lost that have said nothing for too long. Ray itself notices nodes and workers that end."""
        for rank in self.open - set(self.lost):
            if not self._watches[rank].is_silent(self._words[rank]):
                continue
            if self._has_ended(rank):
                self.open.discard(rank)
            else:
                self.lost[rank] = "it has not been heard of for %.0f s" % self._watches[rank].silent_s

    def dismiss(self) -> None:
        """Let the ranks go once all have ended: until then, what early ones left running serves the others."""
        if not self._was_dismissed and all(map(has_ended, self.records)):
            self._was_dismissed = True
            self.signal(protocol.SIGTERM)

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks that have not ended."""
        for rank in self.open:
            self._relays[rank].signal.remote(number)

    def stop(self, number: int = protocol.SIGTERM) -> None:
        """Ask all to end, once: each has its grace period."""
        if not self.is_stopping:
            self.is_stopping = True
            self.signal(number)

    def abandon(self) -> None:
        """Ray ends the workers of who has not ended in time; what they started ends by itself."""
        import ray

        for rank in self.open:
            ray.kill(self._relays[rank])

    @property
    def loss(self) -> str:
        """Who was lost, in one line."""
        rank = min(self.lost, default=None)
        if rank is None:
            return ""
        node = self.nodes[rank]
        return f"rank {rank} on {node.host} ({node.address}) was lost: {self.lost[rank]}"
