"""The driver of a job group: one ordinary driver per task as a child, and what lies between the tasks.

It runs on the head node, owns who starts when and who is told to end, and says what the whole is called. A task's
ranks, grace, exit codes and records are its own driver's.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from executor import protocol, slurm_commands
from executor.group_facts import Group, Placement, Requests, Task, dynamic_task
from executor.group_life import Ended, Standing, is_over, verdict_of
from executor.group_pack import names_of
from executor.job import Job, addresses_of, cluster_home, this_slurm_job
from executor.launchdir import JobDirectory
from executor.loop import WARNINGS, Arrival, Loop
from executor.options import HOSTS_MEANS
from executor.output import Framer, Log, Stream, tell
from executor.process import exit_code, reap, spawn
from executor.protocol import GangrunError, UsageError
from executor.ready import Probe
from executor.shared import remove_quietly, write_in_place
from executor.verdict import Verdict

__all__ = ["Group", "Task", "main", "this_slurm_job"]

LOOK_S = 0.1
NAMES_IF_ANY, NAMES_REQUIRED, *_, NO_NAMES = HOSTS_MEANS  # a node may lack what this one has
TAIL_LINES = 10
STOPPED_CODES = [protocol.exit_code_of_signal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
ENDED_BY_ITSELF = (protocol.SUCCEEDED, protocol.FAILED, protocol.FAILED_SETUP)
NEEDS_ROOM = "waits for free CPUs, GPUs and nodes of its group"
ENDED_WITH_GROUP, CANCELLED_ALONE, NEVER_STARTED = "ended with its group", "cancelled alone", "never started"
NO_MEANS = "host names need user namespaces or libnss_wrapper, and neither is here"
READ_BYTES = 1 << 16
RECORD_S, BACKED_UP_S = 1.0, 0.05
KILL_MARGIN_S = 30.0  # a task's driver ends its own programs; it is killed itself only if it hangs


class Member:
    """A task at work: its driver's process, what it prints, and how it stands."""

    def __init__(self, task: Task, nodes: Sequence[str]) -> None:
        self.task, self.nodes = task, list(nodes)
        self.pid: int | None = None
        self.code: int | None = None
        self.restarts = 0
        self.why_told = ""  # to end
        self.is_ready = False
        self.record: dict[str, Any] = {}
        self.looked = 0.0  # when its record may be read again
        self.pipes: set[int] = set()
        self.ended: float | None = None
        self.framer = Framer(b"[%s] " % task.name.encode())

    @property
    def is_running(self) -> bool:
        return self.pid is not None

    @property
    def is_placed(self) -> bool:
        """Its ranks have nodes, or it has ended: the next in the line may ask."""
        return self.has_ended or self.state != protocol.PENDING

    @property
    def state(self) -> str:
        state = str(self.record.get("state") or protocol.PENDING)
        if self.code is not None and state not in protocol.TERMINAL_STATES:
            # Slurm tells the drivers of the tasks as well as us, and one that has just begun dies of it.
            return protocol.CANCELLED if self.why_told or self.code in STOPPED_CODES else protocol.FAILED_DRIVER
        return state

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    def standing(self) -> Standing:
        ended = Ended(self.state, self.code or 0, self.ended or 0.0, str(self.record.get("reason") or ""))
        return Standing(self.task.name, self.task.is_primary, ended if self.has_ended else None)

    def report(self) -> dict[str, Any]:
        reason = self.record.get("reason") or ""
        if self.why_told and self.state == protocol.CANCELLED:
            reason = self.why_told
        return {
            "name": self.task.name, "is_primary": self.task.is_primary, "state": self.state, "exit_code": self.code,
            "reason": reason, "nodes": self.nodes, "restarts": self.restarts,
            "started": self.record.get("started"), "ended": self.ended, "progress": self.record.get("progress"),
 "is_dynamic": self.task.is_dynamic, "num_nodes": self.task.num_nodes,
        }  # fmt: skip


class GroupDriver:
    """Owns the loop, the tasks and their state."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._loop = Loop(self._on_signal)
        self._placement = Placement(group)
        self._members = [Member(task, nodes) for task, nodes in zip(group.tasks, self._placement.nodes())]
        self._requests = Requests(group.directory)
        everyone = sorted({node for member in self._members for node in member.nodes})
        self._home = cluster_home(_as_job(group, everyone))
        path = protocol.job_directory(self._home, group.slurm_job_id, group.job_id)
        self._directory = JobDirectory(path, _as_job(group, everyone))
        self._addresses = addresses_of(everyone)
        self._hosts_means = NO_NAMES
        self._probes: dict[str, Probe] = {}
        self._logs: dict[str, Log] = {}
        self._stream = Stream()
        self._cancelled_by: int | None = None
        self._failure = ""  # of the group itself
        self._has_begun = self._is_ending = False
        self._told: object = None

    def run(self) -> int:
        """Until the group is over; returns its exit code."""
        self._loop.take_signals()
        try:
            self._launch = self._directory.new_attempt(lambda: None)
            self._hosts_file = self._launch.hosts
            self._write_hosts()
            self._requests.open()
        except OSError as error:
            self._directory.clean()
            words = f"cannot write the group's directory {self._directory.path}: {error.strerror}"
            raise GangrunError(words) from error
        self._directory.enter(protocol.PENDING)
        self._directory.tell_queue(slurm_commands.queue_times(self._group.slurm_job_id))
        try:
            self._tell_nodes()
            self._choose_names()
            self._look()
            self._has_begun = True
            self._directory.enter(protocol.RUNNING)
            self._loop.every(LOOK_S, LOOK_S, self._look)
            self._loop.run()
            return self._finish()
        except Exception as error:  # whatever it is: somebody waits for the group's record
            return self._fail(error)
        finally:
            for member in self._members:
                self._kill(member)
            for name in list(self._probes):
                self._close_probe(name)
            self._directory.clean()

    # --- who starts, who ends

    def _look(self) -> None:
        for said in self._requests.new():
            self._obey(said)
        for member in self._members:
            self._read_record(member)
            if not self._is_ending and not member.is_running and not member.has_ended and self._may_start(member):
                self._begin(member)
        standings = [member.standing() for member in self._members]
        if not self._is_ending and (is_over(standings, self._group.stops_on_primary_failure) or self._is_stuck()):
            self._end_all()
        if self._is_ending and not any(member.is_running for member in self._members):
            self._loop.stop()
        self._publish()

    def _obey(self, said: dict[str, Any]) -> None:
        """Another task, which waits for free nodes after those that came before it; or the end of one such task."""
        try:
            if "cancel" in said:
                self._cancel_dynamic(str(said["cancel"]))
                return
            task = dynamic_task(said)
        except (ValueError, KeyError, TypeError):
            tell(1, "gangrun: a request could not be read\n")
            return
        self._directory.note("task_joined", task=task.name)
        self._members.append(Member(task, self._placement.nodes_for_more(task)))

    def _cancel_dynamic(self, name: str) -> None:
        for member in self._members:
            if member.task.name == name and member.task.is_dynamic and not member.has_ended:
                self._tell_to_end(member, CANCELLED_ALONE)
                if not member.is_running:
                    member.code, member.ended = protocol.EXIT_TERMINATED, time.time()
                    member.record = {"state": protocol.CANCELLED}

    def _may_start(self, member: Member) -> bool:
        if member.task.is_dynamic:
            before = self._members[: self._members.index(member)]
            return all(one.is_placed for one in before if one.task.is_dynamic)
        if not self._group.is_parallel:
            before = self._members[: self._members.index(member)]  # joined ones come after all of these
            return all(one.has_ended and one.state == protocol.SUCCEEDED for one in before)
        return all(self._is_ready(self._member(name)) for name in member.task.after)

    def _is_stuck(self) -> bool:
        """A pipeline, one of whose tasks did not do its part, whatever the reason."""
        declared = [one for one in self._members if not one.task.is_dynamic]
        unwell = [one for one in declared if one.has_ended and one.state != protocol.SUCCEEDED]
        return not self._group.is_parallel and bool(unwell)

    def _member(self, name: str) -> Member:
        return next(member for member in self._members if member.task.name == name)

    def _is_ready(self, member: Member) -> bool:
        """A task without a probe is ready when its scripts run."""
        probe = self._probes.get(member.task.name)
        if member.is_ready or self._is_ending or not (member.is_running or member.has_ended):
            return member.is_ready
        if probe is None:
            member.is_ready = member.state == protocol.RUNNING or member.has_ended
            return member.is_ready
        member.is_ready = probe.look()
        if member.is_ready:
            self._directory.note("task_ready", task=member.task.name)
        elif member.has_ended:
            code = protocol.describe_code(member.code or 0)
            self._give_up(probe, f"{member.task.name} ended before it was ready ({code}): {probe.describe()}")
        elif probe.is_late:
            self._give_up(probe, probe.failure())
        return member.is_ready

    def _give_up(self, probe: Probe, failure: str) -> None:
        """A task that others wait for in vain has failed, whatever it is still doing."""
        self._failure = failure
        lines = "".join(f"    | {line}\n" for line in probe.last_lines(TAIL_LINES))
        tell(1, f"gangrun: {self._failure}\ngangrun: the end of its output:\n{lines}")
        self._end_all()

    def _begin(self, member: Member) -> None:
        """A task that waited for another may find that its nodes are gone."""
        if self._has_nodes(member):
            return self._start(member)
        member.code, member.ended = protocol.EXIT_INFRASTRUCTURE, time.time()
        self._tell_failure(member)

    def _has_nodes(self, member: Member) -> bool:
        """Free nodes of the group take the place of lost ones (sbatch --no-kill); its record says if there are none."""
        lost = slurm_commands.lost_nodes(self._group.slurm_job_id, member.nodes if self._has_begun else [])
        if not lost:
            return True
        declared = (one for one in self._members if one is not member and not one.task.is_dynamic)
        others = [(one.task, one.nodes) for one in declared if not one.has_ended]
        try:
            self._move(member, self._placement.instead(member.task, member.nodes, lost, others))
        except UsageError as error:
            reason = f"{error} ({member.record['reason']})" if member.record.get("reason") else str(error)
            member.record = {**member.record, "state": protocol.FAILED_DRIVER, "reason": reason}
            return False
        tell(1, f"gangrun: {member.task.name} has lost {names_of(lost)}; it gets {names_of(member.nodes)}\n")
        return True

    def _move(self, member: Member, nodes: list[str]) -> None:
        """Its peers learn of it by their hosts files."""
        member.nodes = nodes
        self._addresses.update(addresses_of(nodes))
        self._write_hosts()
        self._directory.tell_nodes(sorted({node for one in self._members for node in one.nodes}))
        self._directory.note("task_moved", task=member.task.name, nodes=nodes)

    def _start(self, member: Member) -> None:
        group, task = self._group, member.task
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        driver = os.path.join(group.directory, task.driver)
        argv = [group.python or sys.executable, "-I", "-X", "utf8", driver]
        try:
            member.pid = spawn(argv, self._environ(member), stdout=write_end, stderr=write_end)
        finally:
            os.close(write_end)
        member.pipes.add(read_end)
        self._loop.watch(read_end, lambda: self._on_output(member, read_end))
        if task.ready is not None:
            self._close_probe(task.name)
            self._probes[task.name] = self._probe(member)
        self._directory.note(protocol.EVENT_TASK_STARTED, task=task.name, nodes=member.nodes, restarts=member.restarts)

    def _probe(self, member: Member) -> Probe:
        first = self._addresses.get(member.nodes[0], member.nodes[0])
        path = self._log(member).path
        size = os.path.getsize(path) if os.path.exists(path) else 0
        wanted = {kind: value for kind, value in (member.task.ready or {}).items() if value is not None}
        return Probe(wanted, member.task.name, [first], path, log_from=size, environ=self._environ(member))

    def _close_probe(self, name: str) -> None:
        probe = self._probes.pop(name, None)
        if probe is not None:
            probe.close()

    def _tell_nodes(self) -> None:
        """Who is where is worth a line where nodes are shared; else each task has its own."""
        if self._group.is_shared:
            where = (f"{member.task.name} on {names_of(member.nodes)}" for member in self._members)
            tell(1, f"gangrun: {', '.join(where)}\n")

    def _choose_names(self) -> None:
        """Raises UsageError if the group needs names and there can be none."""
        if self._group.inter_connection is False:
            return
        from executor.hostnames import means

        self._hosts_means = means(self._hosts_file)
        if self._hosts_means != NO_NAMES:
            tell(1, f"gangrun: host names <task>-<index>.{self._group.name} by {self._hosts_means}\n")
        elif self._group.inter_connection:
            raise UsageError(f"inter_connection=True: {NO_MEANS}")
        else:
            tell(1, f"gangrun: warning: {NO_MEANS}; use the addresses in {protocol.ENV_ADDRESS_PREFIX}*\n")

    def _environ(self, member: Member) -> dict[str, str]:
        own = {
            protocol.ENV_MEMBER_ENV: json.dumps(self._for_scripts(member)),
            protocol.ENV_GROUP_DRIVER: str(os.getpid()),
        }
        if member.nodes:
            own[protocol.ENV_MEMBER_NODES] = ",".join(member.nodes)
        if self._hosts_means != NO_NAMES:
            means = NAMES_REQUIRED if self._group.inter_connection else NAMES_IF_ANY
            own.update({protocol.ENV_HOSTS_FILE: self._hosts_file, protocol.ENV_HOSTS_MEANS: means})
        node_gpus = self._placement.node_gpus(member.task, member.nodes)
        if node_gpus:
            own[protocol.ENV_NODE_GPUS] = str(node_gpus)
        if member.task.component is not None:
            own[protocol.ENV_HET_GROUP] = str(member.task.component)
        return {**os.environ, **own}

    def _for_scripts(self, member: Member) -> dict[str, str]:
        declared = [one for one in self._members if not one.task.is_dynamic]
        heads = {one.task.name: self._addresses.get(one.nodes[0], one.nodes[0]) for one in declared}
        return {
            protocol.ENV_GROUP_NAME: self._group.name,
            protocol.ENV_GROUP_DIRECTORY: self._group.directory,
            protocol.ENV_TASK_NAME: member.task.name,
            protocol.ENV_RESTARTS: str(member.restarts),
            **({protocol.ENV_COMPONENT: str(member.task.component)} if member.task.component is not None else {}),
            **{protocol.address_variable(name): address for name, address in heads.items()},
            **self._own_part(member),
            **({protocol.SLURM_GPUS_PER_NODE: "0"} if self._placement.sees_others(member.task, member.nodes) else {}),
        }

    def _own_part(self, member: Member) -> dict[str, str]:
        """A nested srun and `scontrol show hostnames` see the task's own nodes, not its peers'."""
        if not member.nodes:
            return {}
        nodes, count = ",".join(member.nodes), str(len(member.nodes))
        return {
            protocol.SLURM_JOB_NODELIST: nodes,
            protocol.SLURM_NODELIST: nodes,
            protocol.SLURM_JOB_NUM_NODES: count,
            protocol.SLURM_NNODES: count,
        }

    def _end_all(self) -> None:
        """Everybody is told at once; each has its own time."""
        self._is_ending = True
        self._requests.close()
        for member in self._members:
            self._tell_to_end(member)

    def _tell_to_end(self, member: Member, why: str = ENDED_WITH_GROUP) -> None:
        if member.why_told or member.has_ended:
            return
        member.why_told = why
        if member.pid is not None:
            os.kill(member.pid, signal.SIGTERM)
            self._loop.after(member.task.grace_s + KILL_MARGIN_S, lambda: self._kill(member))

    def _kill(self, member: Member) -> None:
        if member.pid is not None:
            os.kill(member.pid, signal.SIGKILL)

    # --- what happens

    def _on_signal(self, arrival: Arrival) -> None:
        if arrival.number == signal.SIGCHLD:
            for pid, status in list(reap()):  # before anybody is told anything: who is reaped cannot be signalled
                self._on_end(pid, exit_code(status))
            self._look()
        elif arrival.number in WARNINGS:
            for member in self._members:
                if member.pid is not None:
                    os.kill(member.pid, arrival.number)
        elif arrival.number != signal.SIGCONT and self._cancelled_by is None:
            self._directory.note("cancel", signal=arrival.number)
            if not self._is_ending:  # else all are told already, and what the group is called is settled
                self._cancelled_by = arrival.number
                self._end_all()

    def _on_end(self, pid: int, code: int) -> None:
        member = next((one for one in self._members if one.pid == pid), None)
        if member is None:
            return
        for pipe in list(member.pipes):  # what it said last
            while self._take_output(member, pipe):
                self._stream.push_out()
        member.looked = 0.0
        self._read_record(member)
        member.pid, member.code = None, code
        member.ended = float(member.record.get("ended") or time.time())
        self._directory.note(protocol.EVENT_TASK_ENDED, task=member.task.name, state=member.state, exit_code=code)
        if self._may_restart(member):
            self._restart(member)
        elif member.state != protocol.SUCCEEDED and not member.why_told:
            self._tell_failure(member)

    def _tell_failure(self, member: Member) -> None:
        words = protocol.describe_code(member.code or 0)
        tell(1, f"gangrun: task {member.task.name} is {member.state}, {words}\n")

    def _may_restart(self, member: Member) -> bool:
        is_wanted = member.state != protocol.SUCCEEDED and member.restarts < member.task.max_restarts
        if self._is_ending or not is_wanted or slurm_commands.is_ending(self._group.slurm_job_id):
            return False
        return self._has_nodes(member)

    def _restart(self, member: Member) -> None:
        words = (member.task.name, member.state, protocol.describe_code(member.code or 0))
        tell(1, "gangrun: task %s is %s, %s; starting it again\n" % words)
        member.restarts += 1
        member.code, member.ended, member.record, member.is_ready = None, None, {}, False
        self._start(member)

    def _on_output(self, member: Member, pipe: int) -> None:
        self._take_output(member, pipe)

    def _take_output(self, member: Member, pipe: int) -> bool:
        """True if there was some, and there may be more. A task that was started again has a pipe of its own."""
        try:
            chunk = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._log(member).write(chunk)
        else:
            self._loop.forget(pipe)
            os.close(pipe)
            member.pipes.discard(pipe)
            self._log(member).close()
        self._stream.write(member.framer.feed(chunk) if chunk else member.framer.flush())
        if self._stream.is_backed_up and chunk:  # the pipe fills, and the task waits, as it would without us
            self._loop.forget(pipe)
            self._loop.after(BACKED_UP_S, lambda: self._read_on(member, pipe))
        return bool(chunk)

    def _read_on(self, member: Member, pipe: int) -> None:
        self._stream.push()
        if pipe not in member.pipes:
            return
        if self._stream.is_backed_up:
            self._loop.after(BACKED_UP_S, lambda: self._read_on(member, pipe))
        else:
            self._loop.watch(pipe, lambda: self._on_output(member, pipe))

    def _log(self, member: Member) -> Log:
        name = member.task.name
        if name not in self._logs:
            path = os.path.join(self._group.directory, protocol.task_output(name))
            self._logs[name] = Log(path, lambda text: tell(2, f"gangrun: {text}\n"))
            self._logs[name].begin(os.environ.get(protocol.SLURM_RESTART_COUNT) or "0")
        return self._logs[name]

    # --- what is known and told

    def _read_record(self, member: Member) -> None:
        if not member.is_running or time.monotonic() < member.looked:
            return
        # Soon while it is about to begin, as others may wait for that; then seldom: the shared file system is asked.
        member.looked = time.monotonic() + (RECORD_S if member.is_placed else 0.0)
        name = protocol.member_job_id(self._group.job_id, member.task.name)
        path = protocol.job_directory(self._home, self._group.slurm_job_id, name)
        try:
            with open(os.path.join(path, protocol.STATUS_NAME), encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, ValueError):
            return
        if record.get("driver", {}).get("pid") == member.pid:
            member.record = record

    def _why_waiting(self, member: Member) -> dict[str, str]:
        """What a task that has not begun waits for."""
        if member.task.is_dynamic and not member.is_placed and not member.why_told:
            return {"reason": NEEDS_ROOM}
        if member.is_running or member.has_ended or self._is_ending:
            return {}
        awaited = [self._member(name) for name in member.task.after if not self._member(name).is_ready]
        probe = self._probes.get(awaited[0].task.name) if awaited else None
        if probe is not None:
            return {"reason": f"waits for {probe.describe()}: {probe.last_problem}"}
        return {"reason": f"waits for {awaited[0].task.name}"} if awaited else {}

    def _publish(self) -> None:
        reports = [{**member.report(), **self._why_waiting(member)} for member in self._members]
        if reports != self._told:
            self._told = reports
            self._directory.tell_tasks(reports)

    def _write_hosts(self) -> None:
        """`<task>-<index>.<group>` for every node of every task."""
        lines = [
            f"{self._addresses[node]} {member.task.name}-{index}.{self._group.name}\n"
            for member in self._members
            for index, node in enumerate(member.nodes)
            if node in self._addresses
        ]
        write_in_place(self._hosts_file, "".join(lines).encode())

    def _finish(self) -> int:
        for member in self._members:
            if not member.has_ended:
                member.record, member.why_told = {"state": protocol.CANCELLED}, NEVER_STARTED
        standings = [member.standing() for member in self._members]
        verdict = verdict_of(standings, self._cancelled_by is not None, self._cancelled_by or signal.SIGTERM)
        if self._failure and verdict.state == protocol.CANCELLED:
            verdict = Verdict(protocol.FAILED_DRIVER, protocol.EXIT_INFRASTRUCTURE, [], None, self._failure)
        if verdict.state not in ENDED_BY_ITSELF and slurm_commands.fate(self._group.slurm_job_id).is_requeued:
            verdict = Verdict(protocol.PENDING, verdict.exit_code, [], None, "Slurm runs the job again")
        elif verdict.state == protocol.FAILED_DRIVER:
            verdict = verdict._replace(reason=self._with_lost_nodes(verdict.reason))
        self._publish()
        return self._end(verdict)

    def _fail(self, error: Exception) -> int:
        kind = "" if isinstance(error, GangrunError) else f"the group's driver failed: {type(error).__name__}: "
        code = error.exit_code if isinstance(error, GangrunError) else protocol.EXIT_INFRASTRUCTURE
        return self._end(Verdict(protocol.FAILED_DRIVER, code, [], None, kind + " ".join(str(error).split())))

    def _end(self, verdict: Verdict) -> int:
        code = verdict.exit_code
        try:
            self._directory.end(verdict, [])
        except OSError as trouble:
            code = code or protocol.EXIT_INFRASTRUCTURE
            tell(1, f"gangrun: cannot record how the group ended ({verdict.state}): {trouble}\n")
        if verdict.state in protocol.TERMINAL_STATES:
            for path in glob.glob(os.path.join(glob.escape(self._group.directory), protocol.member_secrets_name("*"))):
                remove_quietly(path)
        tell(1, self._summary(verdict))
        return code

    def _with_lost_nodes(self, reason: str) -> str:
        """Slurm's own words may name the wrong node (24.11), or none."""
        down = slurm_commands.down_nodes(sorted({node for member in self._members for node in member.nodes}))
        theirs = [member.task.name for member in self._members if {*member.nodes} & {*down}]
        return f"lost {', '.join(down)}, of {', '.join(theirs)} ({reason})" if down else reason

    def _summary(self, verdict: Verdict) -> str:
        code = "" if verdict.exit_code == 0 else ", " + protocol.describe_code(verdict.exit_code)
        lines = [f"gangrun: group {self._group.name} {verdict.state}{code} after {self._directory.age_s:.1f} s"]
        lines += [f"gangrun: {verdict.reason}"] if verdict.reason else []
        for member in self._members:
            how = member.state if member.has_ended else "never started"
            lines.append(f"gangrun:   {member.task.name}{_mark(member, self._members)}: {how}")
        return "\n".join(lines) + "\n"


def _mark(member: Member, members: Sequence[Member]) -> str:
    has_others = any(not one.task.is_primary and not one.task.is_dynamic for one in members)
    return " [P]" if member.task.is_primary and has_others else ""


def _as_job(group: Group, nodes: Sequence[str]) -> Job:
    """What a job directory wants to know of a job."""
    return Job(
        slurm_job_id=group.slurm_job_id,
        job_id=group.job_id,
        task_name=group.name,
        num_nodes=len(nodes),
        cluster_ips=nodes,
        log_dir=os.path.join(group.directory, "logs"),
        cluster_home=group.cluster_home,
    )


def main(group: Group) -> int:
    """Run a group; every error ends in one line and an exit code."""
    try:
        return GroupDriver(group).run()
    except GangrunError as error:
        print(f"gangrun: {error}", file=sys.stderr)
        return error.exit_code
