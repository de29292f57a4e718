"""What the client makes of a Ray dashboard's answers, without Ray: states, packages, addresses, lines for people."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import socket
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from codegen.spec import Resources, SpecError
from executor import protocol
from gangrun import RayCluster, Slurm, Task, ray_api, ray_launch, ray_package, states
from gangrun.ray_api import Dashboard, NotRay, Refused, checked_address, is_private
from gangrun.ray_host import RayHost
from gangrun.ray_states import Evidence, Info, judge, last_words
from gangrun.records import SUBMITTING, Poll, Records, Run
from gangrun.remote import RemoteError, Unreachable
from gangrun.settings import Settings
from gangrun.snapshot import Snapshot
from tests.bench import CHECKOUT

VERSION = {"version": "4", "ray_version": "2.60.0", "session_name": "session_1"}
Answers = Mapping[str, Any]


class Fake:
    """A dashboard that gives canned answers, by the beginning of the request, and remembers what it was asked."""

    def __init__(self, answers: Answers) -> None:
        self.asked: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.asked.append(f"{self.command} {self.path}")
                fake.headers.append(dict(self.headers))
                found = next((answers[key] for key in answers if fake.asked[-1].startswith(key)), (404, "nothing"))
                status, body = found() if callable(found) else found
                text = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


FakeMaker = Callable[[Answers], Fake]


@pytest.fixture
def fake() -> Iterator[FakeMaker]:
    made: list[Fake] = []

    def make(answers: Answers) -> Fake:
        made.append(Fake(answers))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "runs.db")


def gangrun(home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(CHECKOUT), **environ}
    argv = [sys.executable, "-m", "gangrun", *words]
    return subprocess.run(argv, env=env, cwd=home, capture_output=True, text=True, timeout=60)


# --- addresses, and what is said where there is no Ray


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8265",
        "http://",
        "ftp://a",
        "http://a:b",
        "http://a:0",
        "http://a b",
        "http://a\n",
        "ray://a:10001",
        "",
    ],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="use the URL of a Ray dashboard such as http://127.0.0.1:8265"):
        checked_address(text)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(SpecError) as refused:
        checked_address("http://me:hunter2@ray:8265")
    assert "hunter2" not in str(refused.value)


def test_one_cluster_has_one_name() -> None:
    assert checked_address("http://Ray.Example:8265/") == checked_address("http://ray.example:8265")


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("http://127.0.0.1:8265", True),
        ("http://localhost:8265", True),
        ("http://[::1]:8265", True),
        ("https://ray.example", True),
        ("http://10.0.0.1:8265", False),
        ("http://127.0.0.1.example:8265", False),
        ("http://localhost.example:8265", False),
    ],
)
def test_secrets_go_only_where_nobody_can_listen(address: str, private: bool) -> None:
    assert is_private(address) == private


def task_file(home: Path, **fields: Any) -> str:
    (home / "t.yaml").write_text(json.dumps({"name": "t", "run": "true", **fields}))
    return "t.yaml"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--partition", "gpu"], "--partition"),
        (["--time", "1h"], "--time"),
        (["--sbatch-arg=--exclude=n1"], "--sbatch-arg"),
        (["--account", "a", "--qos", "q"], "--account, --qos"),
        (["--constraint", "c"], "--constraint"),
        (["--no-requeue"], "--no-requeue"),
        (["--host", "lab"], "--host"),
    ],
)
def test_flags_that_mean_nothing_on_ray_are_refused_by_name(tmp_path: Path, flags: list[str], named: str) -> None:
    done = gangrun(tmp_path, "launch", task_file(tmp_path), "--ray", "http://127.0.0.1:9", *flags)
    assert (done.returncode, len(done.stderr.splitlines())) == (protocol.EXIT_USAGE, 1), done.stderr
    assert named in done.stderr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resources": {"memory": 4}}, "memory=4"),
        ({"resources": {"ray": True}}, "resources.ray"),
    ],
)
def test_fields_that_mean_nothing_on_ray_are_refused(tmp_path: Path, fake: FakeMaker, fields: Any, words: str) -> None:
    server = fake({"GET /api/version": (200, VERSION)})
    done = gangrun(tmp_path, "launch", task_file(tmp_path, **fields), "--ray", server.url)
    assert (done.returncode, len(done.stderr.splitlines())) == (protocol.EXIT_USAGE, 1), done.stderr
    assert words in done.stderr


def test_a_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(
        "name: g\nexecution: parallel\n---\nname: a\nrun: 'true'\n---\nname: b\nrun: 'true'\n"
    )
    done = gangrun(tmp_path, "launch", "g.yaml", "--ray", "http://127.0.0.1:9")
    assert done.returncode == protocol.EXIT_USAGE and "g is a group of tasks" in done.stderr


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = gangrun(tmp_path, "launch", task_file(tmp_path), "--ray", url)
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE
    assert done.stderr == f"gangrun: {url}: cannot be asked: Connection refused\n"
    assert gangrun(tmp_path, "queue").stdout == "no runs in flight; `gangrun queue -a` shows those that have ended\n"


@pytest.mark.parametrize("answer", [(200, "<html>It works!</html>"), (404, "nothing here"), (200, {"version": "1"})])
def test_what_is_no_ray_dashboard_is_told_in_one_line(tmp_path: Path, fake: FakeMaker, answer: Any) -> None:
    url = fake({"GET /": answer}).url
    done = gangrun(tmp_path, "launch", task_file(tmp_path), "--ray", url)
    assert done.returncode == protocol.EXIT_INFRASTRUCTURE and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{url}: is no Ray dashboard: /api/version gave" in done.stderr


def test_where_one_must_show_a_token_the_line_says_how_and_never_the_token(tmp_path: Path, fake: FakeMaker) -> None:
    server = fake({"GET /": (401, "who are you?")})
    done = gangrun(tmp_path, "check", "--host", server.url, RAY_AUTH_TOKEN="hunter2")
    assert "RAY_AUTH_TOKEN or RAY_JOB_HEADERS" in done.stdout and "hunter2" not in done.stdout + done.stderr
    assert server.headers[0]["Authorization"] == "Bearer hunter2"
    wrong = gangrun(tmp_path, "check", "--host", server.url, RAY_JOB_HEADERS="hunter2")
    assert (wrong.returncode, "hunter2" in wrong.stderr) == (protocol.EXIT_USAGE, False)


@pytest.mark.parametrize("word", [b"", b"H"], ids=["mute", "a byte now and then"])
def test_every_call_ends_in_time(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    monkeypatch.setattr(ray_api, "CALL_TIMEOUT_S", 0.6)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        is_over = threading.Event()

        def dribble() -> None:
            client, _ = server.accept()
            with contextlib.suppress(OSError):
                while not is_over.wait(0.1):
                    client.sendall(word)
            client.close()

        thread = threading.Thread(target=dribble)
        thread.start()
        began = time.monotonic()
        with pytest.raises(Unreachable, match="no answer within"):
            Dashboard(f"http://127.0.0.1:{server.getsockname()[1]}").submit({})
        took_s = time.monotonic() - began
        is_over.set()
        thread.join()
    assert took_s < 3


# --- one look


def job(run: str, status: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    return {"submission_id": run, "status": status, "metadata": {}, **fields}


def run_of(url: str, run: str, **fields: Any) -> Run:
    return Run(
        run, "t", url, "~", run, state=protocol.PENDING, submitted=time.time(), meta={"session": "session_1"}, **fields
    )


def test_a_look_at_many_jobs_is_one_question(fake: FakeMaker, records: Records) -> None:
    runs = [f"t-{i}" for i in range(40)]
    server = fake({"GET /api/jobs/": (200, [job(run) for run in runs]), "GET /api/v0/placement": (200, {})})
    for run in runs:
        records.put(run_of(server.url, run, evidence={"has_begun": True}))
    RayCluster(server.url, config=settings(), records=records).refresh()
    assert server.asked == ["GET /api/jobs/"]
    assert {run.state for run in records.all()} == {protocol.RUNNING}


def test_a_job_that_sets_up_is_told_and_its_record_is_read_until_its_script_runs(
    fake: FakeMaker, records: Records
) -> None:
    told = [{"state": state, "attempt": 0, "num_nodes": 2} for state in (protocol.SETTING_UP, protocol.RUNNING)]
    group = {"name": "gangrun-t-1", "state": "CREATED"}
    server = fake({
        "GET /api/jobs/": (200, [job("t-1", driver_node_id="n1")]),
        "GET /api/v0/placement": (200, {"data": {"result": {"result": [group]}}}),
        "GET /api/v0/logs/file": lambda: (200, told.pop(0)),
    })  # fmt: skip
    records.put(run_of(server.url, "t-1"))
    seen = []
    for _ in range(3):
        records.polled(server.url, Poll())
        RayCluster(server.url, config=settings(), records=records).refresh()
        run = records.get("t-1")
        seen.append(run and (run.state, run.progress))
    assert seen == [("SETTING_UP", "setup on 2 nodes"), *[("RUNNING", "")] * 2]
    assert server.asked[-1] == "GET /api/jobs/" and told == []


def test_trouble_is_no_absence(fake: FakeMaker, records: Records) -> None:
    for answer in ((500, "Traceback:\nOops"), (503, "gateway"), (200, "<html>"), (200, {"jobs": []}), (200, ["t-1"])):
        server = fake({"GET /api/jobs/": answer})
        records.put(run_of(server.url, "t-1"))
        with pytest.raises(RemoteError) as trouble:
            RayCluster(server.url, config=settings(), records=records).refresh()
        assert "\n" not in str(trouble.value)
        assert records.get("t-1").state == protocol.PENDING  # type: ignore[union-attr]
        records.forget("t-1")


def test_a_head_that_was_started_anew_has_lost_the_job(fake: FakeMaker, records: Records) -> None:
    server = fake({"GET /api/jobs/": (200, []), "GET /api/version": (200, {**VERSION, "session_name": "session_2"})})
    records.put(run_of(server.url, "t-1"))
    RayCluster(server.url, config=settings(), records=records).refresh()
    seen = records.get("t-1")
    assert seen is not None and (seen.state, seen.is_final) == (states.LOST, True)
    assert seen.reason == "the cluster does not know it any more: Ray's head was started anew"


def settings() -> Settings:
    return Settings("/nonexistent", None, {})


def test_a_url_is_a_host_in_whatever_spelling_and_in_the_settings(tmp_path: Path, fake: FakeMaker) -> None:
    server = fake(
        {
            "GET /api/jobs/t-1": (200, job("t-1")),
            "GET /api/jobs/": (200, [job("t-1", metadata={"gangrun": META})]),
            "GET /api/version": (200, VERSION),
        }
    )
    (tmp_path / ".config" / "gangrun").mkdir(parents=True)
    (tmp_path / ".config" / "gangrun" / "config.yaml").write_text(f'default_host: "{server.url}/"\n')
    assert "1 run(s) found" in gangrun(tmp_path, "queue", "--adopt").stderr
    for words in (["queue"], ["queue", "--host", server.url + "/"], ["status", "t-1", "--host", server.url.upper()]):
        assert "t-1" in gangrun(tmp_path, *words).stdout, words
    assert gangrun(tmp_path, "queue", "--host", "ray://head:10001").returncode == protocol.EXIT_USAGE


META = json.dumps({"name": "t", "submitted": 1.0, "num_nodes": 1})


def test_a_large_log_may_take_longer_than_other_answers(fake: FakeMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_api, "CALL_TIMEOUT_S", 1.0)

    def slowly() -> tuple[int, str]:
        time.sleep(1.5)
        return 200, "the end"

    server = fake({
        "GET /api/jobs/t-1": (200, job("t-1", driver_node_id="n1")), "GET /api/v0/logs/file": slowly,
        "GET /api/v0/nodes": (200, {"data": {"result": {"result": []}}}),
    })  # fmt: skip
    archive = base64.b64decode(RayHost(server.url).call("tar", run="t-1", logs=["output"])["archive"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile("output")
        assert file and file.read() == b"the end"


# --- submitting once


def plan_of(task: Task, run: str = "t-1") -> ray_launch.Plan:
    request = ray_launch.checked_request({}, task, "http://127.0.0.1:8265", settings())
    return ray_launch.plan(task, run, None, request)


def test_an_answer_that_was_lost_is_looked_up_and_not_asked_for_again() -> None:
    class Losing(Dashboard):
        posted = 0

        def has_package(self, name: str) -> bool:
            return True

        def submit(self, request: Mapping[str, Any]) -> ray_api.Answer:
            self.posted += 1
            raise Unreachable("the answer was lost")

        def job(self, run: str) -> Mapping[str, Any] | None:
            return {"status": "PENDING"} if self.posted else None

    dashboard = Losing("http://127.0.0.1:8265")
    ray_launch.submit(dashboard, plan_of(Task(name="t", run="true")), print)
    assert dashboard.posted == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, "Traceback\nRuntimeError: Job t-1 already exists\n"), None),
        ((400, "Traceback\nValueError: the entrypoint is odd\n"), Refused),
        ((500, "no leader"), Unreachable),
    ],
)
def test_what_ray_says_to_a_submission(fake: FakeMaker, answer: Any, error: type[Exception] | None) -> None:
    server = fake({
        "GET /api/packages": (200, "true"), "POST /api/jobs/": answer, "GET /api/jobs/t-1": (404, "t-1 does not exist"),
    })  # fmt: skip
    with pytest.raises(error) if error else contextlib.nullcontext():
        ray_launch.submit(Dashboard(server.url), plan_of(Task(name="t", run="true")), print)


def test_a_dry_run_tells_whether_the_tree_is_there_already(tmp_path: Path, fake: FakeMaker) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data").write_text("1")
    task = task_file(tmp_path, workdir="code")
    for status, told in ((404, "to be uploaded"), (200, "on the host already")):
        server = fake({"GET /api/version": (200, VERSION), "GET /api/packages": (status, "true")})
        done = gangrun(tmp_path, "launch", task, "--ray", server.url, "--dry-run")
        assert told in done.stdout, done.stderr


def test_no_secret_and_no_value_is_in_what_is_listed() -> None:
    task = Task(name="t", run="true", envs={"A": "value-of-a"}, secrets={"TOKEN": "value-of-token"})
    plan = plan_of(task)
    shown = json.dumps([plan.body, plan.meta, plan.to_json(), plan.words(), plan.driver])
    assert "value-of-token" not in shown
    assert "value-of-a" not in json.dumps([plan.body, plan.meta])
    assert "TOKEN" in plan.meta["secrets"]


def test_gpus_and_cpus_become_the_bundle() -> None:
    needs = Resources(cpus=3, gpus=2, gpu_type="H100")
    driver = plan_of(Task(name="t", run="true", resources=needs)).driver
    bundle = next(
        one for one in ast.parse(driver).body if isinstance(one, ast.Assign) and one.targets[0].id == "BUNDLE"
    )
    assert ast.literal_eval(bundle.value) == {"CPU": 3, "H100": 2}


def test_the_ports_of_the_task_are_looked_at_on_ray_too() -> None:
    task = Task(name="t", run="true", ports=(8000, 8001))
    assert "ports=[8000,8001" in "".join(plan_of(task).driver.split()) and not ray_launch.ignored(task)


def test_the_grace_of_the_task_is_the_time_that_ray_leaves_its_driver() -> None:
    body = plan_of(Task(name="t", run="true", slurm=Slurm(grace=120))).body
    assert int(body["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 120


# --- what travels


def snapshot(folder: Path, files: Mapping[str, tuple[str, int] | str]) -> Snapshot:
    """`files`: content and mode, or where a link leads."""
    path = folder / "tree.tar"
    with tarfile.open(path, "w") as tar:
        for name, what in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(what, str):
                member.type, member.linkname = tarfile.SYMTYPE, what
                tar.addfile(member)
            else:
                member.size, member.mode = len(what[0]), what[1]
                tar.addfile(member, io.BytesIO(what[0].encode()))
    return Snapshot(str(path), "0" * 64, 1, len(files), None, None, False, "", ())


def test_links_become_files_programs_stay_programs_and_what_is_lost_is_said(tmp_path: Path) -> None:
    files: dict[str, tuple[str, int] | str] = {
        "a": ("A", 0o644), "bin/run": ("R", 0o755), "link": "bin/run", "bin/up": "../a", "dead": "nowhere",
        "loop": "loop", "back\\slash": ("B", 0o644), "fünf €": ("F", 0o644),
    }  # fmt: skip
    package = ray_package.tree_package(snapshot(tmp_path, files))
    with zipfile.ZipFile(io.BytesIO(package.content)) as archive:
        found = {one.filename: (archive.read(one), one.external_attr >> 16 & 0o777) for one in archive.infolist()}
    assert found == {
        "a": (b"A", 0o644), "bin/run": (b"R", 0o755), "link": (b"R", 0o755), "bin/up": (b"A", 0o644),
        "fünf €": (b"F", 0o644),
    }  # fmt: skip
    assert "left out (dead, loop, back\\\\slash)" in package.notes[0]


def test_an_equal_tree_has_an_equal_name_and_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = snapshot(tmp_path, {"a": ("A", 0o644)})
    first = ray_package.tree_package(tree)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert first == ray_package.tree_package(tree)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="this Python does not know its modules")
def test_a_module_that_would_keep_rays_workers_from_starting_is_told(tmp_path: Path) -> None:
    files = dict.fromkeys(("json.py", "train.py", "lib/queue.py", "random/__init__.py", "re/data"), ("", 420))
    notes = ray_package.tree_package(snapshot(tmp_path, files)).notes
    assert len(notes) == 1 and "(json, random)" in notes[0]


def test_more_than_ray_takes_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_package, "LARGEST_BYTES", 100)
    with pytest.raises(SpecError, match="workdir: .* MB when packed, and Ray's server takes less than"):
        ray_package.tree_package(snapshot(tmp_path, {"a": ("A", 0o644)}))


# --- states


def record(state: str, **fields: Any) -> states.Record:
    found = states.parse_record(json.dumps({"state": state, "attempt": 0, **fields}))
    assert found is not None
    return found


OURS = "JOB_ENTRYPOINT_COMMAND_ERROR"
FAILED_3 = Info("FAILED", "", OURS, 3)


@pytest.mark.parametrize(
    ("evidence", "state", "code"),
    [
        (Evidence("t", Info("PENDING")), protocol.PENDING, None),
        (Evidence("t", Info("RUNNING")), protocol.PENDING, None),
        (Evidence("t", Info("RUNNING"), group="PENDING"), protocol.PENDING, None),
        (Evidence("t", Info("RUNNING"), group="CREATED"), protocol.RUNNING, None),
        (Evidence("t", Info("RUNNING"), group="REMOVED"), protocol.RUNNING, None),
        (Evidence("t", Info("RUNNING"), record=record("PENDING"), group="REMOVED"), protocol.PENDING, None),
        (Evidence("t", Info("RUNNING"), record=record("SUCCEEDED"), group="REMOVED"), protocol.RUNNING, None),
        (Evidence("t", Info("RUNNING"), has_begun=True), protocol.RUNNING, None),
        (Evidence("t", Info("HIBERNATING")), protocol.RUNNING, None),
        (Evidence("t", Info("SUCCEEDED")), protocol.SUCCEEDED, 0),
        (Evidence("t", Info("STOPPED")), protocol.CANCELLED, 143),
        (Evidence("t", Info("STOPPED"), record=record("SUCCEEDED", exit_code=0)), protocol.CANCELLED, 143),
        (Evidence("t", Info("STOPPED"), record=record("CANCELLED", exit_code=143)), protocol.CANCELLED, 143),
        (Evidence("t", Info("FAILED", "", OURS, 7), record=record("FAILED", exit_code=7)), protocol.FAILED, 7),
        (Evidence("t", FAILED_3, record=record("FAILED_SETUP", exit_code=3)), protocol.FAILED_SETUP, 3),
        (Evidence("t", Info("FAILED", "", OURS, 7)), protocol.FAILED, 7),
        (Evidence("t", Info("FAILED", "", OURS, 125)), protocol.FAILED_DRIVER, 125),
        (Evidence("t", Info("FAILED", "", OURS, -9), record=record("RUNNING")), protocol.FAILED_DRIVER, 137),
        (Evidence("t", Info("FAILED", "", OURS, -9), cancel_asked=True), protocol.CANCELLED, 137),
        (Evidence("t", FAILED_3, record=record("FAILED", exit_code=3), cancel_asked=True), protocol.FAILED, 3),
        (Evidence("t", Info("FAILED", "no env", "RUNTIME_ENV_SETUP_FAILURE")), protocol.FAILED_DRIVER, 125),
        (Evidence("t", Info("FAILED", "", "JOB_SUPERVISOR_ACTOR_DIED"), cancel_asked=True), protocol.CANCELLED, None),
        (Evidence("t", None), states.LOST, None),
        (Evidence("t", None, is_new_cluster=True), states.LOST, None),
        (Evidence("t", None, cancel_asked=True), protocol.CANCELLED, None),
        (Evidence("t", None, was_known=False, age_s=5), SUBMITTING, None),
        (Evidence("t", None, was_known=False, age_s=500), protocol.FAILED_DRIVER, None),
    ],
)  # fmt: skip
def test_what_is_concluded(evidence: Evidence, state: str, code: int | None) -> None:
    verdict = judge(evidence)
    assert (verdict.state, verdict.exit_code) == (state, code), verdict
    assert verdict.is_final == (state in (*protocol.TERMINAL_STATES, states.LOST))


def test_a_job_that_ray_runs_as_its_driver_says() -> None:
    told = judge(Evidence("t", Info("RUNNING"), record=record("SETTING_UP"), has_begun=True))
    assert (told.state, told.is_final) == (protocol.SETTING_UP, False)


def test_the_last_words_of_a_driver_are_not_those_of_its_programs() -> None:
    fooling = "(head, rank=0, pid=1) gangrun: job t SUCCEEDED after 1.0 s\n"
    said = "gangrun: job t FAILED, exit code 3 after 1.0 s\ngangrun: rank 0 on head failed first (exit code 3)\n"
    assert last_words(fooling, "t") == (None, "")
    assert last_words(said + fooling, "t") == (protocol.FAILED, "rank 0 on head failed first (exit code 3)")
    assert last_words(said, "other") == (None, "")
    assert last_words("gangrun: job t SUCCEEDED after 1.0 s\ngangrun: logs are in /x\n", "t") == ("SUCCEEDED", "")


def test_not_ray_is_told_apart_from_a_call_that_failed() -> None:
    assert issubclass(NotRay, RemoteError) and not issubclass(NotRay, Unreachable)
