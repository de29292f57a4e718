"""What a rendered Ray driver calls, on the head node of a Ray cluster: `python driver.py`, or as a Ray job.

It reserves one bundle on each of as many nodes as the job wants, all or none, runs setup on every node of the cluster
and then the script on the reserved ones, and says how it ended as the Slurm driver does: in status.json, events.jsonl,
exit_code, and its own exit code. Whatever way it ends, Ray takes the reservation and the relays away with it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from executor import protocol, ray_cluster
from executor.driving import HEARTBEAT_S, WAITING_WORDS_S, Attempt, Ended, read_secrets, run_driver, setup_verdict
from executor.identity import is_address
from executor.job import Job
from executor.loop import WARNINGS, Arrival, Timer
from executor.output import Stream, tell
from executor.protocol import GangrunError
from executor.ray_cluster import PULSE_S, Amounts, Node, Pulse
from executor.ray_crew import Crew, Mailbox, Message, hire, speaks
from executor.ray_rank import TAIL
from executor.ray_relay import OUTPUT, WORDS
from executor.report import rank_reports, summary
from executor.shared import read_bytes
from executor.verdict import Verdict, judge

__all__ = ["Job", "RayDriver", "main"]

ASK_S = 0.2
PROBE_PATIENCE_S = 60.0
WAITING_WORDS_LONGEST_S = 600.0
STOP_MARGIN_S = 10.0  # a rank gives up on a script that not even KILL ends 5 s after that
ABANDONED_S = 5.0
AGAIN_S = 1.0  # some tell us twice at once, and mean it once
STUCK_OUTPUT_S = 1.0
FAREWELL_S = 5.0
HEAD_PATIENCE_S = 60.0  # as the raylets have: then they end, and with them the relays
JOIN_PATIENCE_S = 60.0
JOINED, PLACED, REFUSED, LACKING = "joined", "placed", "refused", "lacking"
NEWS_S = 0.1  # between two looks at what the ranks have said, for those who read of it


class RayDriver(Attempt):
    """One attempt of one job, its reservation and its ranks."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._mailbox = Mailbox(self._loop, self._on_message)
        self._stream = Stream()
        self._secrets: dict[str, str] = {}
        self._cluster_ips: Sequence[str] = job.cluster_ips
        self._nodes: list[Node] = []
        self._places: dict[str, int] = {}
        self._bundle: Amounts = {}
        self._group: Any = None
        self._gang: list[Node] = []
        self._relays: dict[str, Any] = {}
        self._archive: Any = None
        self._directory_of_scripts: str | None = None
        self._setup: Crew | None = None
        self._run: Crew | None = None
        self._pulse: Pulse | None = None
        self._head_patience_s = min(HEAD_PATIENCE_S, job.liveness_timeout_s)
        self._is_headless = False
        self._stopped_at: float | None = None
        self._news: Timer | None = None
        self._blocked_at: float | None = None
        self._is_deaf = False

    # --- the calls of a driver, in their order

    def connect(self) -> None:
        """Join the cluster that runs here. Ends the job in one line if there is none."""
        job = self._job
        self._secrets = read_secrets(job)
        ray = ray_cluster.load()
        speaks(self._join)
        if self._loop.run_for(JOIN_PATIENCE_S) is None:
            raise GangrunError(ray_cluster.no_cluster("nobody has answered within %.0f s" % JOIN_PATIENCE_S))
        look_s = min(PULSE_S, self._head_patience_s / 4)
        self._pulse = Pulse(look_s)
        self._loop.every(look_s, look_s, self._feel_pulse)
        self._nodes = ray_cluster.alive_nodes()
        self._cluster_ips = job.cluster_ips or [node.address for node in self._nodes]
        has_archive = job.archive is not None and os.path.exists(job.archive)
        self._archive = ray.put(read_bytes(str(job.archive))) if has_archive else None
        self._directory_of_scripts = None if ray_cluster.has_job_directory() else os.getcwd()

    def reserve(self, wish: Amounts) -> None:
        """Wait until as many nodes as the job wants have room, each for one bundle, and take all at once."""
        from ray.util import placement_group

        self._bundle = ray_cluster.needs(wish, self._nodes)
        ray_cluster.refuse_impossible(self._bundle, self._nodes)
        bundles = [dict(self._bundle) for _ in range(self._job.num_nodes)]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=f"gangrun-{self._job.job_id}")
        speaks(self._wait_for_group)
        words = self._loop.every(WAITING_WORDS_S, WAITING_WORDS_LONGEST_S, lambda: speaks(self._find_waiting_words))
        self._loop.run()
        self._loop.cancel(words)
        self._nodes = ray_cluster.alive_nodes()
        if not self._job.cluster_ips:  # some may have joined while the job waited
            self._cluster_ips = [node.address for node in self._nodes]
        self._settle()

    def run_setup(self, script: str) -> None:
        """Run setup on every node of the cluster; the job ends as FAILED_SETUP if it fails."""
        self._directory.enter(protocol.SETTING_UP)
        if not self._places:
            self._places = self._places_of_all()
        nodes = self._in_order(node for node in self._nodes if node.node_id in self._places)
        verdict = self._work(self._crew(nodes), script, is_setup=True)
        if verdict.state != protocol.SUCCEEDED:
            raise Ended(setup_verdict(verdict))

    def run(self, script: str) -> None:
        """Run the script on the reserved nodes, to its end."""
        self._directory.enter(protocol.RUNNING)
        raise Ended(self._work(self._crew(self._gang), script, is_setup=False))

    # --- who is where

    def _join(self) -> None:
        """Ray asks for many minutes where nothing listens, and hears no signal meanwhile."""
        try:
            ray_cluster.join(f"gangrun-{self._job.job_id}")
        except Exception as error:
            words = ray_cluster.no_cluster(ray_cluster.one_line(error))
            self._mailbox.put(Message(None, 0, REFUSED, words))
        self._mailbox.put(Message(None, 0, JOINED, None))

    def _wait_for_group(self) -> None:
        try:
            while not self._group.wait(3600):
                pass
        except Exception as error:
            words = f"Ray does not reserve the nodes: {ray_cluster.one_line(error)}"
            self._mailbox.put(Message(None, 0, REFUSED, words))
        self._mailbox.put(Message(None, 0, PLACED, None))

    def _find_waiting_words(self) -> None:
        nodes = ray_cluster.alive_nodes()
        words = ray_cluster.waiting_words(self._bundle, self._job.num_nodes, nodes, ray_cluster.free_amounts())
        self._mailbox.put(Message(None, 0, LACKING, words))

    def _settle(self) -> None:
        """Put a relay into each bundle, and the nodes of the bundles in the order of the job's list."""
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        by_id = {node.node_id: node for node in self._nodes}
        where: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        others = {name: count for name, count in self._bundle.items() if name not in ("CPU", "GPU")}
        for index, node_id in where.items():
            if node_id not in by_id:
                raise GangrunError(f"the Ray node {node_id} was lost before the job began")
            self._relays[node_id] = hire(
                self._archive,
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
        self._places = self._places_of_all()
        for node_id in where.values():
            self._refuse_stranger(by_id[node_id])
        self._gang = self._in_order(by_id[node_id] for node_id in where.values())
        self._directory.tell_nodes(self._addresses(self._gang))

    def _refuse_stranger(self, node: Node) -> None:
        if node.node_id not in self._places:
            known = ", ".join(self._cluster_ips)
            raise GangrunError(f"Ray chose the node {node.address} ({node.host}), which is not in cluster_ips: {known}")

    def _places_of_all(self) -> dict[str, int]:
        """The place of each node in the job's list; a node whose Ray address is not there is asked for its others."""
        found = ray_cluster.places(self._nodes, self._cluster_ips, {})
        strangers = [node for node in self._nodes if node.node_id not in found]
        if not strangers or len(found) == len(self._cluster_ips):
            return found
        asked = {node.node_id: self._relay(node).addresses.remote() for node in strangers}
        return ray_cluster.places(self._nodes, self._cluster_ips, self._answers(asked))

    def _answers(self, asked: dict[str, Any]) -> dict[str, list[str]]:
        """What the nodes say within a minute. Signals are heard meanwhile."""
        import ray

        deadline, waiting = time.monotonic() + PROBE_PATIENCE_S, list(asked.values())
        while waiting and time.monotonic() < deadline:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=ASK_S)
            self._loop.run_for(0)
        try:
            return {node_id: ray.get(answer) for node_id, answer in asked.items() if answer not in waiting}
        except ray.exceptions.RayError as error:
            raise GangrunError(f"a node was lost: {ray_cluster.one_line(error)}") from error

    def _in_order(self, nodes: Any) -> list[Node]:
        return sorted(nodes, key=lambda node: self._places[node.node_id])

    def _addresses(self, nodes: Sequence[Node]) -> list[str]:
        """As the job's list has them; of a node that it has by name, Ray's address."""
        entries = [(self._cluster_ips[self._places[node.node_id]], node.address) for node in nodes]
        return [entry if is_address(entry) else address for entry, address in entries]

    def _relay(self, node: Node) -> Any:
        """The node's relay; one outside of the reservation holds no resources, so it starts on a node that is full."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node.node_id not in self._relays:
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            self._relays[node.node_id] = hire(self._archive, num_cpus=0, scheduling_strategy=strategy)
        return self._relays[node.node_id]

    # --- ranks at work

    def _crew(self, nodes: Sequence[Node]) -> Crew:
        return Crew(nodes, [self._relay(node) for node in nodes], self._mailbox, self._job.liveness_timeout_s)

    def _work(self, crew: Crew, script: str, is_setup: bool) -> Verdict:
        """Run a script on all nodes of a crew; returns how it ended."""
        if is_setup:
            self._setup = crew
        else:
            self._run = crew
        step = protocol.STEP_SETUP if is_setup else protocol.STEP_RUN
        self._directory.note(protocol.EVENT_STEP_STARTED, step=step, pid=os.getpid())
        crew.begin([self._description(crew.nodes, rank, script, is_setup) for rank in range(len(crew.nodes))])
        look_s = protocol.beat_interval_s(self._job.liveness_timeout_s, HEARTBEAT_S)
        look = self._loop.every(look_s, look_s, lambda: self._look_for_silent(crew))
        while crew.open and not crew.is_stopping:
            self._loop.run()
        self._loop.cancel(look)
        self._wait_for_stopping(crew)
        self._tell_news(crew)
        verdict = judge(crew.records, "", was_cancelled=False, loss=crew.loss)
        if is_setup:
            self._directory.note(protocol.EVENT_STEP_ENDED, step=step, code=verdict.exit_code)
        return verdict

    def _description(self, nodes: Sequence[Node], rank: int, script: str, is_setup: bool) -> dict[str, Any]:
        """All that a relay and its rank must know."""
        job, node, ips = self._job, nodes[rank], self._addresses(nodes)
        identity = {
            "rank": rank,
            "num_ranks": len(nodes),
            "node_index": self._places[node.node_id],
            "address": ips[rank],
            "host": node.host,
            "hosts": [peer.host for peer in nodes],
        }
        options = {
            "log_dir": _on_any_node(job.log_dir),
            "cluster_num_nodes": len(self._cluster_ips),
            "cluster_ips": list(self._cluster_ips),
            "task_name": job.task_name,
            "is_setup": is_setup,
            "workdir": job.workdir and _on_any_node(job.workdir),
            "grace_s": job.grace_s,
            "liveness_timeout_s": job.liveness_timeout_s,
            "no_color": bool(os.environ.get("NO_COLOR")),
            "ports": () if is_setup else job.ports,
        }
        variables = {**(job.setup_env_vars if is_setup else job.env_vars), **self._secrets}
        told = {"script": script, "variables": variables, "ips": ips, "attempt": self._directory.attempt}
        return {
            "node_id": node.node_id,
            "python": job.python,
            "directory": self._directory_of_scripts,
            "sees_all_gpus": is_setup,
            "has_gpus": bool(self._bundle.get("GPU")),
            "rank": {"identity": identity, "options": options, **told},
        }

    def _on_message(self, message: Message) -> None:
        if isinstance(message.source, Crew):
            self._on_word(message.source, message)
        elif message.kind == REFUSED:
            raise GangrunError(message.content)
        elif message.kind in (JOINED, PLACED):
            self._loop.stop(message.kind)
        elif not self._gang:  # else it comes too late
            self._stream.write(f"gangrun: {message.content}\n".encode())

    def _on_word(self, crew: Crew, message: Message) -> None:
        """What a rank has to say. The first failure ends the others."""
        if message.kind == OUTPUT:
            self._show(message.content)
        elif message.kind == WORDS:
            tell(2, message.content)
        crew.hear(message)
        if message.kind not in (OUTPUT, WORDS):
            self._on_change(crew)

    def _on_change(self, crew: Crew) -> None:
        if self._news is None:
            self._news = self._loop.after(NEWS_S, lambda: self._tell_news(crew))
        if crew.has_failed:
            crew.stop()
        if crew is self._run:
            crew.dismiss()
        if crew.is_stopping or not crew.open:
            self._loop.stop()

    def _tell_news(self, crew: Crew) -> None:
        self._loop.cancel(self._news)
        self._news = None
        self._directory.progress(protocol.STEP_SETUP if crew is self._setup else protocol.STEP_RUN, crew.records)

    def _look_for_silent(self, crew: Crew) -> None:
        if self._blocked_at is None:  # else we do not listen
            crew.give_up_silent()
            self._on_change(crew)

    def _wait_for_stopping(self, crew: Crew) -> None:
        """Until all that were told to stop have, and are let go if they do not. Bounded."""
        for patience_s, escalate in (
            (self._job.grace_s + STOP_MARGIN_S, crew.abandon),
            (ABANDONED_S, lambda: None),
        ):
            deadline = time.monotonic() + patience_s
            while crew.open and time.monotonic() < deadline:
                self._loop.run_for(deadline - time.monotonic())
            if crew.open and not self._is_headless:
                escalate()

    # --- output

    def _show(self, text: bytes) -> None:
        """Pass whole lines on; while nobody takes them, nothing more is read: in the end the script waits."""
        if self._is_deaf:
            return
        self._stream.write(text)
        if self._stream.is_backed_up:
            self._blocked_at = time.monotonic()
            self._mailbox.close()
            self._stream.wait_for_room(self._loop, self._listen_again)

    def _listen_again(self) -> None:
        self._blocked_at = None
        self._loop.forget(self._stream.fd)
        self._mailbox.open()

    def _leave_stuck_reader(self) -> None:
        """Whoever takes nothing must not keep a cancelled job from ending: the logs have it all."""
        if self._blocked_at is not None and time.monotonic() - self._blocked_at > STUCK_OUTPUT_S:
            self._is_deaf = True
            self._listen_again()

    # --- the end

    def _fail(self, error: BaseException) -> Verdict:
        crew = self._run or self._setup
        if crew is not None:
            crew.stop()
            self._wait_for_stopping(crew)
        return super()._fail(error)

    def _cancel(self, number: int) -> Verdict:
        self._loop.every(STUCK_OUTPUT_S, STUCK_OUTPUT_S, self._leave_stuck_reader)
        crew, code = self._run or self._setup, protocol.exit_code_of_signal(number)
        why = "cancelled by signal %d" % number
        if crew is None:
            return Verdict(protocol.CANCELLED, code, [], None, why)
        crew.stop()
        self._wait_for_stopping(crew)
        verdict = judge(crew.records, "", was_cancelled=True, loss="")
        if verdict.state == protocol.CANCELLED:
            return verdict._replace(exit_code=code, reason=why)
        return verdict if crew is self._run else setup_verdict(verdict)

    def _give_back(self) -> None:
        """The reservation and the relays, so that the next job starts at once."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized() or self._is_headless:  # there is nobody to take it back
            return
        # Ray's own trouble must not hide how the job ended; with us ends what is ours
        if not ray_cluster.is_done_within(FAREWELL_S, self._free):
            tell(2, f"gangrun: Ray has not taken the reservation back within {FAREWELL_S:.0f} s\n")

    def _free(self) -> None:
        import ray
        from ray.util import remove_placement_group

        try:
            for relay in self._relays.values():
                ray.kill(relay)
            if self._group is not None:
                remove_placement_group(self._group)
        except Exception as error:
            tell(2, f"gangrun: Ray did not take the reservation back: {ray_cluster.one_line(error)}\n")

    def _finish(self, verdict: Verdict) -> None:
        self.exit_code = verdict.exit_code
        is_setup = self._run is None
        crew = self._run or self._setup
        records = crew.records if crew else []
        ranks = rank_reports(records, verdict, len(self._cluster_ips))
        for rank, words in (crew.lost if crew else {}).items():
            ranks[rank]["why"] = words
        self._directory.end(verdict, ranks, protocol.STEP_SETUP if is_setup else protocol.STEP_RUN)
        first = None if verdict.first_failed is None else records[verdict.first_failed]
        tail = (first or {}).get(TAIL) or []
        words = summary(self._job.job_id, verdict, ranks, self._job.log_dir, self._directory.age_s, tail)
        self._stream.write(words.encode("utf-8", "surrogateescape"))
        self._flush(STUCK_OUTPUT_S if verdict.state == protocol.CANCELLED else None)

    def _flush(self, patience_s: float | None) -> None:
        """Let a slow reader have the last of the output. A signal ends that, and so do `patience_s` without a move."""

        def push() -> None:
            self._stream.push()
            self._loop.stop(True)

        self._loop.watch(self._stream.fd, push, select.POLLOUT)
        while self._stream.is_backed_up and self._loop.run_for(patience_s):
            pass

    # --- signals

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number in WARNINGS:
            if self._run is not None:
                self._run.signal(arrival.number)
        elif arrival.number not in (signal.SIGCONT, signal.SIGCHLD):
            self._on_stop(arrival.number)

    def _on_stop(self, number: int) -> None:
        """The first leaves the programs their grace; who asks again has no patience for it."""
        crew, now = self._run or self._setup, time.monotonic()
        self._stopped_at = self._stopped_at or now
        if crew is not None and now - self._stopped_at > AGAIN_S:
            crew.signal(signal.SIGKILL)
        super()._on_stop(number)

    def _feel_pulse(self) -> None:
        """Nobody tells a driver of the end of the head."""
        silent_s = self._pulse.silent_s if self._pulse else 0.0
        if silent_s > self._head_patience_s and not self._is_headless:
            self._is_headless = True
            if not self._is_cancelling:
                words = "the head of the Ray cluster (gcs_server) has not answered for %.0f s" % silent_s
                raise GangrunError(words)


def _on_any_node(path: str) -> str:
    """A path under ~ is in the home of each node; a relative one is where the driver was started."""
    return path if path.startswith("~") else os.path.abspath(path)


def main(body: Any, job: Job) -> NoReturn:
    """Run a driver's body; every error ends in one line and an exit code."""
    code = run_driver(RayDriver, body, job)
    sys.stdout.flush()
    ray_cluster.leave(FAREWELL_S)
    os._exit(code)  # a thread may still listen to a node that is lost
