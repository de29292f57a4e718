"""`RayCluster`: a Ray cluster, reached through its dashboard, as a place where tasks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from executor import protocol
from gangrun import launch, ray_launch, ray_states, settings, states
from gangrun.cluster import Cluster, Intent, Job
from gangrun.explain.reasons import Explanation
from gangrun.group import Group
from gangrun.ray_api import checked_address
from gangrun.ray_host import RayHost
from gangrun.ray_states import Evidence, Info, parse_info
from gangrun.records import Records, Run, refuse_selector
from gangrun.remote import RemoteError
from gangrun.task import Task

if TYPE_CHECKING:
    from gangrun.check import Finding

SESSION = "session"  # of the cluster, at the launch: every start of Ray's head makes another one
LAST_WORDS = 10
OUR_WORDS = "gangrun: "


class RayCluster(Cluster):
    """A Ray cluster at the URL of its dashboard, such as http://127.0.0.1:8265. Ray need not be installed here.

    Raises SpecError for what is no such URL.
    """

    scheduler = "Ray"
    host: RayHost

    def __init__(
        self, address: str, *, config: settings.Settings | None = None, records: Records | None = None
    ) -> None:
        super().__init__(checked_address(address), config=config, records=records)

    def _open(self) -> RayHost:
        return RayHost(self.name, self.host_settings.python)

    # --- launching

    def plan(
        self, work: Task | Group, *, dirty: bool = False, say: Callable[[str], None] = lambda words: None, **flags: Any
    ) -> Intent:
        """Everything that a launch would send, and nothing sent. Of flags, `gpus` and `grace` mean something on Ray."""
        refuse_selector(work.name)
        request = ray_launch.checked_request(flags, work, self.name, self.settings)
        assert isinstance(work, Task)
        ray_launch.check_secrets(work, self.name)
        if ignored := ray_launch.ignored(work):
            say(f"{', '.join(ignored)}: this counts on Slurm only")
        session = self.host.dashboard.version().get("session_name")
        taken = None if work.workdir is None else self._snapshot(work.workdir, dirty, say)
        plan = ray_launch.plan(work, launch.new_run_id(work.name), taken, request)
        for note in plan.tree.notes:
            say(note)
        snapshots = {taken.path: taken} if taken else {}
        missing = [taken] if taken and not self.host.dashboard.has_package(plan.tree.name) else []
        return Intent(plan._replace(meta={**plan.meta, SESSION: session}), request, snapshots, missing)

    def _upload(self, intent: Any, root: str, say: Callable[[str], None]) -> None:
        ray_launch.upload(self.host.dashboard, intent.plan, say)

    def _send(self, root: str, plan: Any, say: Callable[[str], None]) -> tuple[str, str | None]:
        launch.surely(lambda: ray_launch.submit(self.host.dashboard, plan, say), say)
        return plan.run, None

    # --- following

    def _take_in(self, runs: Sequence[Run], answer: Mapping[str, Any]) -> None:
        found = {run.run: parse_info(answer["jobs"].get(run.run)) for run in runs}
        groups = self._groups([run for run in runs if _is_waiting(run, found[run.run])])
        are_gone = any(found[run.run] is None and run.job for run in runs)
        session = self._session() if are_gone else None
        for run in runs:
            self.records.change(run.run, **self._news(run, found[run.run], groups.get(run.run), session, answer["now"]))

    def _groups(self, waiting: Sequence[Run]) -> Mapping[str, str]:
        """The states of the placement groups of the runs that have not begun: one call for all of them."""
        if not waiting:
            return {}
        try:
            named = {group.get("name"): str(group.get("state")) for group in self.host.dashboard.placement_groups()}
        except RemoteError:
            return {}
        names = {run.run: protocol.step_name(run.run, is_setup=False) for run in waiting}
        return {run: named[name] for run, name in names.items() if name in named}

    def _session(self) -> str | None:
        try:
            return str(self.host.dashboard.version().get("session_name"))
        except RemoteError:
            return None

    def _news(self, run: Run, info: Info | None, group: str | None, session: str | None, now: float) -> dict[str, Any]:
        is_new = info is not None and info.is_over and not run.is_final
        may_set_up = group in ray_states.PLACED_GROUPS or run.state == protocol.SETTING_UP
        record = states.parse_record(self.host.record(run.run, info)) if is_new or may_set_up else None
        has_begun = bool(run.evidence.get("has_begun")) or (record is not None and record.state == protocol.RUNNING)
        verdict = ray_states.judge(
            Evidence(
                run=run.run,
                info=info,
                was_known=run.job is not None,
                record=record,
                group=group,
                has_begun=has_begun,
                cancel_asked=run.cancel_asked,
                age_s=now - run.submitted,
                is_new_cluster=session is not None and run.meta.get(SESSION) not in (None, session),
            )
        )
        ended = (info.ended if info else None) or run.ended or now
        return {
            **verdict._asdict(),
            "job": run.job or (run.run if info else None),
            "progress": states.progress(record) if verdict.state == protocol.SETTING_UP else "",
            "started": info.started if info else run.started,
            "ended": ended if verdict.is_final else None,
            "seen": now,
            "evidence": {"has_begun": has_begun},
        }

    # --- why, and what is there

    def explain(self, job: Job, run: Run) -> Explanation:
        record = states.parse_record(self.host.call("describe", run=run.run)["record"])
        if run.is_final:
            return super().explain(job, run) if record and record.is_terminal else self._why_ended(job, run)
        facts = filter(None, (states.progress(record), run.reason))
        said = [line[len(OUR_WORDS) :] for line in self._last_lines(job) if line.startswith(OUR_WORDS)]
        return Explanation(f"it is {run.state}", (*facts, *said[-1:]))

    def _why_ended(self, job: Job, run: Run) -> Explanation:
        code = "" if run.exit_code is None else f", {protocol.describe_code(run.exit_code)}"
        said = [] if run.state == states.LOST else self._last_lines(job)
        end = ["the end of its output:", *(f"| {line}" for line in said)] if said else []
        return Explanation(f"it is {run.state}{code}", (*filter(None, [run.reason]), *end))

    def _last_lines(self, job: Job) -> list[str]:
        try:
            return b"".join(job.logs(lines=LAST_WORDS)).decode("utf-8", "replace").splitlines()
        except RemoteError:
            return []

    def check(self, deep: bool, say: Callable[[str], None]) -> list[Finding]:
        """Whether tasks can be launched here."""
        from gangrun.check import Finding

        try:
            version, nodes = self.host.dashboard.version(), self.host.dashboard.nodes()
        except RemoteError as error:
            return [Finding("connection", False, str(error), is_needed=True)]
        has = [", ".join(f"{count:g} {kind}" for kind, count in sorted(_resources(node).items())) for node in nodes]
        words = "; ".join(f"{node.get('node_ip')} ({what})" for node, what in zip(nodes, has))
        return [
            Finding("connection", True, f"{self.name} answers"),
            Finding("Ray", True, f"{version['ray_version']}, {version.get('session_name')}"),
            Finding("nodes", bool(nodes), words or "none", is_needed=True),
        ]


def _is_waiting(run: Run, info: Info | None) -> bool:
    return info is not None and info.status == ray_states.RAY_RUNNING and not run.evidence.get("has_begun")


def _resources(node: Mapping[str, Any]) -> dict[str, float]:
    found = node.get("resources_total") or {}
    return {kind: count for kind, count in found.items() if kind in ("CPU", "GPU")}
