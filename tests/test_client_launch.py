"""What launching over ssh promises, on a real sshd and a real Slurm: from a laptop to a job, once, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from executor import protocol
from tests.bench import CHECKOUT, eventually
from tests.client_bench import Laptop, Typed, without_colour
from tests.minislurm import Cluster, preflight
from tests.minislurm.fixtures import BootCluster
from tests.minislurm.login import Login
from tests.minislurm.options import CONTROLLER, LAPTOP

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]
GIT = "git -c user.name=a -c user.email=a@example.org"
# What the settings call the host's python: the login environment as a test wants it, and not in the job.
INTERPRETER = '#!/bin/sh\n[ "$SLURMD_NODENAME" ] || {{\n:\n{exports}\n}}\nexec /usr/bin/python3 "$@"\n'
SHELLS = ["head", "head-tcsh", "head-fish", "head-noisy", "head-longhome"]
HELD = "--sbatch-arg=--hold"
TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
HOSTILE = {"QUOTES": 'it\'s "so" `here` $HOME \\', "LINES": "one\ntwo\n\n  three", "ODD": "é ✓ %j {x} #"}


class Desk(Laptop):
    """A laptop with a project in git, and a folder `site` of the cluster for what this test alone changes there."""

    def __init__(self, cluster: Cluster, directory: Path, host: str = "head") -> None:
        directory.chmod(0o755)
        self.directory, self.site, self.project = directory, directory / "site", directory / "home" / "project"
        self.project.mkdir(parents=True)
        self.site.mkdir()
        (self.site / "bin").mkdir()
        self.site.chmod(0o777)
        super().__init__(cluster, host, directory / "home")
        self._exports: dict[str, str] = {}

    def popen(self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Typed:
        return super().popen(*args, env=env, cwd=cwd or self.project)

    def close(self) -> None:
        if runs := self.runs():
            for how in (["--full", "--signal=KILL"], []):
                self.cluster.run(CONTROLLER, ["scancel", *how, "--name=" + ",".join(runs)], cwd="/", check=False)
        super().close()

    # -- what a person does

    def task(self, run: str = "echo done", file: str = "t.yaml", **fields: Any) -> str:
        """A task file in the project, with a name that no other test has; returns its path."""
        path = self.project / file
        path.write_text(yaml.safe_dump({"name": self.unique("t"), "run": run, **fields}))
        return str(path)

    def send(self, task: str, *args: str, **how: Any) -> dict[str, Any]:
        """Launch without following; the run as --json shows it."""
        run: dict[str, Any] = self.json("launch", task, "--host", self.host, "-d", *args, **how)
        return run

    def commit(self, files: Mapping[str, str]) -> None:
        """Write files into the project and commit them."""
        self.project.mkdir(exist_ok=True)
        for name, text in files.items():
            (self.project / name).parent.mkdir(parents=True, exist_ok=True)
            (self.project / name).write_text(text)
        self.git(f"init -q . && git add -- {shlex.join(files)} && {GIT} commit -qm x")

    def git(self, words: str) -> None:
        subprocess.run("git " + words, shell=True, cwd=self.project, check=True)

    def settings(self, default_host: str | None = None, **host: Any) -> None:
        """Write config.yaml: these settings go for this host."""
        self.config_path.parent.mkdir(parents=True, exist_ok=True)
        top = {"default_host": default_host} if default_host else {}
        self.config_path.write_text(yaml.safe_dump({**top, "hosts": {self.host: host}}))

    @property
    def config_path(self) -> Path:
        return self.home / ".config" / "gangrun" / "config.yaml"

    @property
    def database(self) -> Path:
        return self.home / ".local" / "state" / "gangrun" / "runs.db"

    def runs(self) -> list[str]:
        """All runs that this person's records have, newest first, without asking gangrun."""
        if not self.database.exists():
            return []
        with contextlib.closing(sqlite3.connect(self.database)) as database:
            try:
                return [row[0] for row in database.execute("SELECT run FROM runs ORDER BY submitted DESC")]
            except sqlite3.OperationalError:  # the file is there before its tables
                return []

    # -- what a site does

    def put_before(self, name: str, script: str) -> None:
        """A program that comes before the login node's own: a /bin/sh script in which $real is the other one."""
        real = self.slurm("sh", "-c", f"command -v {name}").strip()
        path = self.site / "bin" / name
        path.write_text(f"#!/bin/sh\nreal={real} site={self.site}\n{script}\n")
        path.chmod(0o755)
        self.remote_env(PATH=f"{self.site}/bin:$PATH")

    def remote_env(self, **variables: str) -> None:
        """Variables of the login environment there."""
        self._exports.update(variables)
        exports = "\n".join(f'export {name}="{value}"' for name, value in self._exports.items())
        wrapper = self.site / "python3"
        wrapper.write_text(INTERPRETER.format(exports=exports))
        wrapper.chmod(0o755)
        self.settings(python=str(wrapper))

    def note(self, name: str) -> Path:
        """A file of the site that everybody may write."""
        path = self.site / name
        path.touch()
        path.chmod(0o666)
        return path

    # -- what there is on the cluster

    @property
    def remote_state(self) -> Path:
        return self.remote_home / protocol.HOME_DIRECTORY

    def run_directory(self, run: str) -> Path:
        return self.remote_state / "runs" / run

    def output(self, run: str) -> str:
        path = self.run_directory(run) / "output"
        return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""

    def slurm(self, *argv: str) -> str:
        """What a command says on the login node."""
        return self.cluster.run(CONTROLLER, argv, cwd="/").stdout

    def jobs_named(self, name: str) -> list[str]:
        """The ids of all jobs of a name that Slurm remembers."""
        return self.slurm("squeue", "--noheader", "--states=all", "--format=%A", f"--name={name}").split()

    def job_field(self, job: str, name: str) -> str:
        """One field of `scontrol show job`."""
        words = self.slurm("scontrol", "show", "job", "-dd", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(name + "=")), "")

    def wait_end(self, job: str, timeout_s: float = 60) -> str:
        """Slurm's word for how a job ended."""
        return self.cluster.wait_job(int(job), timeout_s=timeout_s).state


@pytest.fixture
def laptop(cluster: Cluster, login: Login, shared_dir: Path) -> Iterator[Desk]:
    with contextlib.closing(Desk(cluster, shared_dir)) as desk:
        yield desk


@pytest.fixture
def own_laptop(own_cluster: BootCluster, shared_dir: Path) -> Iterator[Desk]:
    """On a cluster of the test's own, where connections can be counted and broken."""
    with contextlib.closing(Desk(own_cluster(nodes=1, gpus=0), shared_dir)) as desk:
        yield desk


def one_line(done: subprocess.CompletedProcess[str], *words: str) -> str:
    """The only line of an error message. Fails for a traceback, a second line, and if one of the words is missing."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    return lines[0]


def files_with(directory: Path, value: str) -> list[Path]:
    """Files below a directory that hold a value."""
    found = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    return [path for path in found if path.is_file() and value.encode() in path.read_bytes()]


def plan_of(laptop: Desk, task: str, *args: str) -> dict[str, Any]:
    """What --dry-run would send."""
    return dict(laptop.json("launch", task, "--host", laptop.host, "--dry-run", *args))


def option(plan: dict[str, Any], name: str) -> str | None:
    return next((one.partition("=")[2] for one in plan["sbatch"] if one.partition("=")[0] == name), None)


class TestLaunching:
    @pytest.mark.parametrize("alias", SHELLS)
    def test_it_is_the_same_from_every_login_shell(
        self, cluster: Cluster, login: Login, shared_dir: Path, alias: str
    ) -> None:
        """Banners and noisy rc files: SSCHAcode/python-sscha#197, BSC-ES/autosubmit#3024,
        ArthurHeymans/emacs-tramp-rpc#57, tudo-r/BatchJobs#44."""
        if alias not in login.aliases:
            pytest.skip(f"no shell for {alias}")
        with contextlib.closing(Desk(cluster, shared_dir, alias)) as laptop:
            laptop.commit({"hello.txt": "hello\n"})
            task = laptop.task(
                "cat hello.txt made; echo rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES",
                setup="echo made > made; echo setup here", num_nodes=2, workdir=".",
            )  # fmt: skip
            done = laptop.gangrun("launch", task, "--host", alias)
        assert done.returncode == 0, done.stderr
        said = [line.rpartition(") ")[2] for line in without_colour(done.stdout).splitlines() if "pid=" in line]
        ranks = ["rank 0 of 2", "rank 1 of 2"]
        assert sorted(said) == sorted([*2 * ["hello", "made", "setup here"], *ranks])
        assert "SUCCEEDED" in done.stderr and "NEWS" not in done.stdout

    def test_the_programs_failure_is_the_exit_code_100_and_explain_is_named(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task("echo last words; exit 3"), "--host", "head")
        assert done.returncode == 100
        assert "last words" in done.stdout and "FAILED" in done.stderr and "gangrun explain" in done.stderr

    def test_a_cancel_from_elsewhere_is_the_exit_code_103(self, laptop: Desk) -> None:
        task = laptop.task("echo up; sleep 300")
        watching = laptop.popen("launch", task, "--host", "head")
        (run,) = eventually(laptop.runs, 30)
        eventually(lambda: "up" in laptop.output(run), 30)
        assert laptop.gangrun("cancel", run).returncode == 0
        assert watching.wait(30) == 103

    def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(self, laptop: Desk) -> None:
        watching = laptop.popen("launch", laptop.task("echo up; sleep 300"), "--host", "head")
        (run,) = eventually(laptop.runs, 30)
        eventually(lambda: "up" in laptop.output(run), 30)
        watching.interrupt()
        code, said = watching.wait(20), watching.err
        assert code == 101 and f"gangrun logs {run} --host head -f" in said and "Traceback" not in said, said
        (job,) = laptop.jobs_named(run)
        assert laptop.cluster.job_state(int(job)) == "RUNNING"

    def test_detached_it_prints_what_to_type_next(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task(), "--host", "head", "-d", HELD)
        (run,) = laptop.runs()
        (job,) = laptop.jobs_named(run)
        assert done.returncode == 0 and done.stdout == "" and f"run {run} is job {job} on head" in done.stderr
        for words in (f"logs {run} --host head -f", f"wait {run}", f"cancel {run}", f"explain {run}"):
            assert f"  gangrun {words}" in done.stderr

    def test_name_and_values_arrive_as_they_were_given(self, laptop: Desk) -> None:
        show = "import os; print(repr({k: os.environ[k] for k in ('QUOTES', 'LINES', 'ODD', 'TWICE')}))"
        task = laptop.task(f"/usr/bin/python3 -c {shlex.quote(show)} > seen", envs={**HOSTILE, "TWICE": "file"})
        name = laptop.unique("other")
        run = laptop.send(task, "--name", name, "--env", "TWICE=flag=1")
        assert run["name"] == name and run["run"].startswith(name) and laptop.wait_end(run["job"]) == "COMPLETED"
        seen = laptop.run_directory(run["run"]) / "work" / "seen"
        assert seen.read_text() == repr({**HOSTILE, "TWICE": "flag=1"}) + "\n"

    def test_a_task_without_a_work_directory_runs_in_an_empty_one_of_its_own(self, laptop: Desk) -> None:
        run = laptop.send(laptop.task("ls -A | wc -l > count; pwd > where"))
        assert laptop.wait_end(run["job"]) == "COMPLETED"
        directory = laptop.run_directory(run["run"])
        assert (directory / "work" / "where").read_text() == f"{directory}/work\n"
        assert directory.stat().st_mode & 0o777 == 0o700 and directory.parent.parent.stat().st_mode & 0o777 == 0o700

    def test_without_a_host_on_the_login_node_there_is_no_ssh(self, laptop: Desk) -> None:
        ssh = laptop.site / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\necho "$@" >> {laptop.site}/ssh-was-called\nexit 255\n')
        ssh.chmod(0o755)
        env = {**laptop.env, "PATH": f"{laptop.site}/bin:{laptop.env['PATH']}"}
        task = laptop.task("echo rank $SKYPILOT_NODE_RANK", num_nodes=2)
        done = laptop.cluster.run(CONTROLLER, ["gangrun", "launch", task], env=env, cwd=laptop.home, check=False)
        assert done.returncode == 0, done.stderr
        assert "rank 0" in done.stdout and "rank 1" in done.stdout and "on local" in done.stderr
        assert not (laptop.site / "ssh-was-called").exists() and laptop.masters() == []

    def test_without_a_host_where_no_slurm_is_it_says_what_to_do(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task())
        assert done.returncode == 2
        one_line(done, "--host ALIAS", "default_host", "no sbatch")


class TestRequests:
    def test_a_dry_run_sends_nothing_and_shows_where_each_value_comes_from(self, laptop: Desk) -> None:
        laptop.settings(partition="main", time="3h")
        laptop.commit({"a.txt": laptop.unique("content")})
        task = laptop.task(workdir=".", slurm={"constraint": "h100"})
        home = laptop.remote_state
        done = laptop.gangrun("launch", task, "--host", "head", "--dry-run", "--time", "30m")
        assert done.returncode == 0, done.stderr
        rows = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in done.stdout.splitlines() if "  " in line}
        assert rows["time"] == ["00:30:00", "--time"]
        assert rows["partition"] == ["main", "config.yaml: hosts.head.partition"]
        assert rows["constraint"][0] == "h100" and re.fullmatch(r".*t\.yaml:\d+", rows["constraint"][1])
        assert rows["qos"] == ["-", "default"] and "to be uploaded" in done.stdout
        run = re.search(r"--job-name=(\S+)", done.stdout)
        assert run and not (home / "runs" / run[1]).exists() and laptop.jobs_named(run[1]) == []
        digest = re.search(r"snapshot ([0-9a-f]{12}):", done.stdout)
        assert digest and not list((home / "snapshots").glob(digest[1] + "*")) and laptop.runs() == []

    def test_what_is_asked_for_reaches_slurm(self, laptop: Desk) -> None:
        """Memory is asked for once: bessagroup/f3dasm#352, dask/dask-jobqueue#698."""
        task = laptop.task(num_nodes=2, resources={"cpus": 3, "memory": 8})
        flags = ["--time=1-02:00:00", "--partition=main", "--account=physics", "--no-requeue", "--warn-signal=USR1@90"]
        extra = [HELD, "--sbatch-arg=--mem-per-cpu=111M", "--sbatch-arg=--nice=7"]
        run = laptop.send(task, *flags, *extra)
        assert not any(one.startswith("--mem=") for one in plan_of(laptop, task, "--force", *extra)["sbatch"])
        wanted = {
            "JobName": run["run"], "TimeLimit": "1-02:00:00", "Partition": "main", "Account": "physics",
            "Requeue": "0", "Nice": "7", "MinMemoryCPU": "111M", "NumNodes": "2-2", "CPUs/Task": "3",
        }  # fmt: skip
        assert {name: laptop.job_field(run["job"], name) for name in wanted} == wanted

    def test_what_is_not_asked_for_is_left_to_the_cluster(self, laptop: Desk) -> None:
        plan = plan_of(laptop, laptop.task())
        asked = {one.partition("=")[0] for one in plan["sbatch"]}
        assert not asked & {"--time", "--partition", "--account", "--qos", "--constraint", "--mem", "--gres"}
        assert "--requeue" in asked

    @pytest.mark.parametrize(
        ("flag", "words"),
        [
            ("--gpus=cpu", "leave it out"),
            ("--gpus=0", "leave it out"),
            ("--gpus=h100:2:3", "use gpu, 2, h100"),
            ("--time=12:00", "write one of them"),
            ("--sbatch-arg=--array=1-3", "arrays are not supported"),
            ("--sbatch-arg=--output=x", "gangrun sets it itself"),
            ("--warn-signal=KILL@3", "USR1@120"),
            ("--secret=NOT_SET_ANYWHERE", "no such variable"),
            ("--name=two\nlines", "printable"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_is_sent(self, laptop: Desk, flag: str, words: str) -> None:
        done = laptop.gangrun("launch", laptop.task(), "--host", "no-such-host", flag)
        assert done.returncode == 2 and laptop.runs() == []
        one_line(done, flag.partition("=")[0], words)

    def test_gpus_that_the_cluster_does_not_have_are_refused(self, laptop: Desk) -> None:
        task = laptop.task()
        done = laptop.gangrun("launch", task, "--host", "head", "--gpus", "h100:2")
        assert done.returncode == 2 and laptop.runs() == []
        one_line(done, "h100:2")

    def test_every_form_of_a_gpu_request_is_the_clusters_own(self, own_cluster: BootCluster, shared_dir: Path) -> None:
        with contextlib.closing(Desk(own_cluster(nodes=2, gpus=2, gres_type="a100"), shared_dir)) as laptop:
            task = laptop.task("echo gpus=$SKYPILOT_NUM_GPUS_PER_NODE", num_nodes=2)
            forms = {
                "gpu": "gpu:1",
                "2": "gpu:2",
                "a100": "gpu:a100:1",
                "A100:2": "gpu:a100:2",
                "gpu:a100:2": "gpu:a100:2",
            }
            assert {form: option(plan_of(laptop, task, "--gpus", form), "--gres") for form in forms} == forms
            assert option(plan_of(laptop, task), "--gres") is None
            one_line(laptop.gangrun("launch", task, "--host", "head", "--gpus", "h200"), "h200", "a100")
            run = laptop.send(task, "--gpus", "A100:2")
            assert laptop.wait_end(run["job"]) == "COMPLETED" and "gpus=2" in laptop.output(run["run"])
            assert "a100:2" in laptop.job_field(run["job"], "TresPerNode")

    def test_account_qos_partition_and_constraint_reach_slurm(self, own_cluster: BootCluster, shared_dir: Path) -> None:
        partitions = "\n".join(f"PartitionName={name} Nodes=ALL State=UP" for name in ("main", "short"))
        cluster = own_cluster(nodes=1, gpus=0, accounting=True, partitions=partitions)
        cluster.run(CONTROLLER, ["scontrol", "update", "nodename=n1", "availablefeatures=fast"], cwd="/")
        with contextlib.closing(Desk(cluster, shared_dir)) as laptop:
            user = ["where", f"name={laptop.user}"]
            cluster.run(CONTROLLER, ["sacctmgr", "-i", "add", "qos", "urgent"], cwd="/")
            cluster.run(CONTROLLER, ["sacctmgr", "-i", "modify", "user", *user, "set", "qos+=urgent"], cwd="/")
            account = laptop.slurm("sacctmgr", "-nP", "show", "assoc", f"user={laptop.user}", "format=account").split()[
                0
            ]
            flags = ["--partition=short", f"--account={account}", "--qos=urgent", "--constraint=fast"]
            run = laptop.send(laptop.task(), *flags, HELD)
            wanted = {"Partition": "short", "Account": account, "QOS": "urgent", "Features": "fast"}
            assert {name: laptop.job_field(run["job"], name) for name in wanted} == wanted

    @pytest.mark.slow
    def test_the_warning_before_the_limit_reaches_every_node(self, laptop: Desk) -> None:
        """Slurm looks at limits every 30 seconds, and counts them in minutes."""
        warned = "trap 'echo warned $(( GANGRUN_DEADLINE - $(date +%s) )) s before; exit 0' USR1"
        task = laptop.task(f"{warned}; echo up; while :; do sleep 0.2; done", num_nodes=2)
        run = laptop.send(task, "--time", "1m", "--warn-signal", "USR1@30")
        assert laptop.wait_end(run["job"], timeout_s=120) == "COMPLETED"
        left = [int(one) for one in re.findall(r"warned (-?\d+) s before", laptop.output(run["run"]))]
        assert len(left) == 2 and all(0 < seconds <= 65 for seconds in left), left

    def test_a_program_knows_when_its_time_is_up(self, laptop: Desk) -> None:
        """And nothing of what the client asks for itself is in its environment."""
        run = laptop.send(laptop.task("echo $GANGRUN_DEADLINE > told; env > env"), "--time", "1h")
        assert laptop.wait_end(run["job"]) == "COMPLETED"
        work = laptop.run_directory(run["run"]) / "work"
        assert 3000 < int((work / "told").read_text()) - time.time() < 3700
        assert "SLURM_TIME_FORMAT" not in (work / "env").read_text()


class TestSecrets:
    def test_a_secrets_value_is_nowhere_but_in_the_program(self, laptop: Desk) -> None:
        value = laptop.unique("hush")
        script = f"echo ${{#TOKEN}} letters; while [ ! -e {laptop.site}/go ]; do sleep 0.2; done"
        task = laptop.task(script, num_nodes=2, setup="echo setup")
        how: dict[str, Any] = {"env": {"TOKEN": value}}
        shown = laptop.gangrun("launch", task, "--host", "head", "--secret", "TOKEN", "--dry-run", **how)
        assert shown.returncode == 0 and value not in shown.stdout + shown.stderr and "sbatch" in shown.stdout
        run = laptop.send(task, "--secret", "TOKEN", **how)
        eventually(lambda: laptop.output(run["run"]).count(f"{len(value)} letters") == 2, 30)
        everywhere = [CONTROLLER, LAPTOP, *laptop.cluster.nodes]
        shown_there = [one.cmdline for node in everywhere for one in laptop.cluster.processes(node)]
        assert [line for line in shown_there if value in line] == [] and any(
            "sleep 0.2" in line for line in shown_there
        )
        told = laptop.slurm("scontrol", "show", "job", "-dd", run["job"])
        told += laptop.slurm("scontrol", "write", "batch_script", run["job"], "-")
        told += laptop.gangrun("status", run["run"], "--json").stdout + laptop.gangrun("logs", run["run"]).stdout
        assert value not in told and run["run"] in told
        home = laptop.remote_state
        held = [Path(path) for path in files_with(home, value)]
        assert [path.stat().st_mode & 0o077 for path in held] == [0], "one file, for its owner alone, while it runs"
        (laptop.site / "go").touch()
        assert laptop.wait_end(run["job"]) == "COMPLETED"
        assert files_with(home, value) == [] and files_with(laptop.home, value) == []
        assert files_with(laptop.cluster.layout.state, value) == []

    def test_what_a_refused_launch_brought_along_is_not_left_there(self, laptop: Desk) -> None:
        value = laptop.unique("hush")
        flags = ["--secret", "TOKEN", "--partition", "nowhere"]
        done = laptop.gangrun("launch", laptop.task(), "--host", "head", *flags, env={"TOKEN": value})
        assert done.returncode == 2 and value not in done.stderr
        assert files_with(laptop.remote_state, value) == []


class TestTwins:
    def test_a_second_run_of_a_name_is_refused_with_the_ways_out(self, laptop: Desk) -> None:
        task = laptop.task()
        first = laptop.send(task, HELD)
        done = laptop.gangrun("launch", task, "--host", "head", "-d")
        assert done.returncode == 2
        ways = (f"gangrun wait {first['run']}", f"gangrun cancel {first['run']}", "--force")
        one_line(done, first["run"], first["job"], "PENDING", *ways)
        second = laptop.send(task, HELD, "--force")
        assert second["run"] != first["run"] and len(laptop.runs()) == 2

    def test_a_name_is_free_again_when_its_run_has_ended(self, laptop: Desk) -> None:
        task = laptop.task()
        first = laptop.send(task)
        laptop.wait_end(first["job"])
        assert laptop.send(task, HELD)["run"] != first["run"]

    def test_of_two_launches_at_the_same_moment_exactly_one_wins(self, laptop: Desk) -> None:
        task = laptop.task()
        both = [laptop.popen("launch", task, "--host", "head", "-d", HELD) for _ in range(2)]
        codes = [typed.wait() for typed in both]
        said = [typed.out + typed.err for typed in both]
        assert sorted(codes) == [0, 2], said
        (run,) = laptop.runs()
        assert len(laptop.jobs_named(run)) == 1 and all(run in words for words in said)


class TestOddNames:
    def test_any_printable_name_is_sanitised_and_found_again(self, laptop: Desk) -> None:
        """PySlurm/pyslurm#33, OSC/ood_core#838."""
        trap = laptop.site / "executed"
        laptop.site.chmod(0o777)
        end = laptop.unique("")
        names = [
            f"dédé job{end}",
            f'a"b{end}',
            f"{'n' * 190}{end}",
            f"$(touch {trap}) `touch {trap}`; touch {trap}{end}",
        ]
        task = laptop.task("echo name=$SKYPILOT_TASK_ID")
        for name in [*names, f"-dash{end}"]:
            run = laptop.send(task, f"--name={name}")
            assert re.fullmatch(r"[A-Za-z0-9._+-]{1,60}", run["run"]) and run["run"][0] not in "-."
            assert laptop.jobs_named(run["run"]) == [run["job"]]
            assert laptop.wait_end(run["job"]) == "COMPLETED", laptop.output(run["run"])
            assert run["name"] == name
        (found,) = laptop.json("status", names[1])
        assert found["name"] == names[1] and found["state"] == "SUCCEEDED" and not trap.exists()

    def test_a_name_that_is_too_long_is_refused(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task(), "--host", "head", "--name", "n" * 300)
        assert done.returncode == 2
        one_line(done, "--name", "1 to 200 printable characters")

    def test_paths_with_blanks_and_quotes_work(self, laptop: Desk) -> None:
        laptop.project = laptop.home / "my 'own' $(project) é"
        laptop.commit({"a file é.txt": "inside\n", "sub dir/it's.txt": "deep\n"})
        task = laptop.task("cat 'a file é.txt' sub*/it*", file="my task.yaml", workdir=str(laptop.project))
        done = laptop.gangrun("launch", task, "--host", "head")
        assert done.returncode == 0 and "inside" in done.stdout and "deep" in done.stdout, done.stderr


class TestLoginEnvironment:
    """What a login there brings along, and commands of Slurm that a site has changed."""

    FOREIGN = {
        "SBATCH_PARTITION": "nowhere", "SBATCH_ACCOUNT": "nobody", "SBATCH_OUTPUT": "/nowhere/out",
        "SBATCH_TIMELIMIT": "1", "SLURM_CLUSTERS": "elsewhere", "SBATCH_CLUSTERS": "elsewhere",
        "SBATCH_ARRAY_INX": "1-9", "SBATCH_WAIT": "1",
        "SQUEUE_FORMAT": "%u %q", "SQUEUE_STATES": "FAILED", "SQUEUE_USERS": "nobody", "SQUEUE_SORT": "x",
        "SACCT_FORMAT": "user", "SLURM_TIME_FORMAT": "%H o'clock", "SINFO_FORMAT": "%h", "SLURM_JOB_NAME": "theirs",
    }  # fmt: skip

    @pytest.mark.parametrize("where", ["interpreter", "bashrc"])
    def test_what_it_says_to_slurm_does_not_win(self, where: str, request: pytest.FixtureRequest) -> None:
        """omnivector-solutions/jobbergate#637, Parsl/parsl#2293, llnl/maestrowf#431."""
        laptop: Desk = request.getfixturevalue("laptop" if where == "interpreter" else "own_laptop")
        if where == "bashrc":
            lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.FOREIGN.items())
            (laptop.remote_home / ".bashrc").write_text(lines)
        else:
            laptop.remote_env(**self.FOREIGN)
            gpus = laptop.gangrun("launch", laptop.task(), "--host", "head", "--gpus=gpu", "--dry-run")
            assert gpus.returncode == 0, "sinfo was understood: " + gpus.stderr
        done = laptop.gangrun("launch", laptop.task("echo ran"), "--host", "head")
        (run,) = laptop.runs()
        assert done.returncode == 0 and "ran" in done.stdout, done.stderr
        (job,) = laptop.jobs_named(run)
        found = {name: laptop.job_field(job, name) for name in ("Partition", "TimeLimit", "Account")}
        assert found.pop("TimeLimit") in ("365-00:00:00", "UNLIMITED")  # before its start, and after
        assert found == {"Partition": "main", "Account": "(null)"}

    def test_options_that_this_squeue_lacks_are_not_needed(self, laptop: Desk) -> None:
        """skypilot-org/skypilot#8907, skypilot-org/skypilot#10307."""
        new = "--json|--yaml|--me|--only-job-state|--notme|--autocomplete*"
        laptop.put_before(
            "squeue",
            f'for a in "$@"; do case $a in {new}) echo "squeue: unrecognized option $a" >&2; exit 1;; esac; done\n'
            'exec $real "$@"',
        )
        done = laptop.gangrun("launch", laptop.task("sleep 1; echo ran"), "--host", "head")
        assert done.returncode == 0 and "ran" in done.stdout, done.stderr

    def test_a_wrapper_of_sacct_that_refuses_lists_fails_no_job(self, laptop: Desk) -> None:
        """BSC-ES/autosubmit#657."""
        laptop.put_before("squeue", "exit 0")
        box = "echo '+------------------------------+'; echo '| please ask for ONE job only  |'; exit $code"
        laptop.put_before(
            "sacct", f'echo "$@" >> $site/asked; case "$*" in *jobs=*,*) code=$(cat $site/code); {box};; esac'
        )
        tasks = [laptop.send(laptop.task(), HELD) for _ in range(2)]
        asked_there = laptop.note("asked")
        for code in ("0", "1"):
            (laptop.site / "code").write_text(code)
            asked_there.write_text("")
            time.sleep(1.1)
            rows = {row["run"]: row for row in laptop.json("queue")}
            assert all(not rows[run["run"]]["is_final"] for run in tasks), rows
            asked = asked_there.read_text()
            assert all(re.search(rf"--jobs={run['job']}$", asked, re.MULTILINE) for run in tasks), asked


class TestSubmission:
    """Whatever happens to sbatch's answer: one job, and its id is known."""

    def expect_one_job(self, laptop: Desk, *args: str) -> str:
        run = laptop.send(laptop.task(), *args)
        assert laptop.jobs_named(run["run"]) == [run["job"]]
        return str(run["job"])

    @pytest.mark.parametrize(
        "sbatch",
        [
            pytest.param('$real "$@" >/dev/null; sleep 0.5; ' + TIMED_OUT, id="it is queued at once"),
            pytest.param('(sleep 1.5; exec $real "$@") >/dev/null 2>&1 & ' + TIMED_OUT, id="it is queued later"),
            pytest.param(f'mkdir $site/once 2>/dev/null || exec $real "$@"; {TIMED_OUT}', id="it is never queued"),
            pytest.param('$real "$@" >/dev/null; echo thank you', id="success without an id"),
        ],
    )
    def test_an_answer_that_says_nothing_makes_no_second_job(self, laptop: Desk, sbatch: str) -> None:
        """facebookincubator/submitit#1659, nextflow-io/nextflow#970."""
        laptop.put_before("sbatch", sbatch)
        self.expect_one_job(laptop, HELD)

    def test_a_refusal_for_good_is_told_in_sbatchs_words_and_leaves_nothing(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task(), "--host", "head", "--partition", "nowhere")
        assert done.returncode == 2 and laptop.runs() == []
        one_line(done, "head", "invalid partition specified: nowhere")

    def test_the_cluster_that_sbatch_names_is_kept_and_used(self, laptop: Desk) -> None:
        """sampsyo/clusterfutures#24, snakemake/snakemake-executor-plugin-slurm#121, Parsl/parsl#2636,
        amq92/simple_slurm#4, USCbiostats/slurmR#41."""
        news = "echo '*** 70000 hours left ***'; echo \"$($real \"$@\");alpha\"; echo 'See you: 4711 users'"
        laptop.put_before("sbatch", news)
        drop = 'echo "$0 $*" >> $site/said; for a; do shift; [ "$a" = --clusters=alpha ] || set -- "$@" "$a"; done'
        for name in ("squeue", "scancel"):
            laptop.put_before(name, f'{drop}; exec $real "$@"')
        said = laptop.note("said")
        run = laptop.send(laptop.task(), HELD)
        assert (run["cluster"], [run["job"]]) == ("alpha", laptop.jobs_named(run["run"]))
        assert laptop.gangrun("cancel", f"{run['job']};alpha").returncode == 0
        used = [line.split() for line in said.read_text().splitlines() if "--user" in line or "scancel" in line]
        assert used and all("--clusters=alpha" in words for words in used)

    def test_an_agent_that_is_killed_makes_no_second_job(self, laptop: Desk) -> None:
        laptop.put_before("sbatch", '$real "$@" > /dev/null; kill -9 $PPID')
        self.expect_one_job(laptop, HELD)

    def test_a_client_that_is_killed_while_sbatch_works_finds_its_job(self, laptop: Desk) -> None:
        laptop.put_before("sbatch", 'touch $site/reached; while [ ! -e $site/go ]; do sleep 0.1; done; exec $real "$@"')
        run = self.kill_at(laptop, laptop.site / "reached")
        (row,) = laptop.json("queue")
        assert (row["run"], row["state"], row["job"]) == (run, "SUBMITTING", None)
        (laptop.site / "go").touch()
        (job,) = eventually(lambda: laptop.jobs_named(run), 20)
        eventually((laptop.run_directory(run) / "job").exists)
        time.sleep(1)
        (row,) = laptop.json("queue")
        assert (row["job"], row["state"]) == (job, "PENDING")

    @pytest.mark.parametrize("is_queued", [True, False], ids=["queued", "never submitted"])
    def test_a_client_and_a_login_node_that_die_while_sbatch_works_are_sorted_out(
        self, laptop: Desk, is_queued: bool
    ) -> None:
        submit = '$real "$@" >/dev/null' if is_queued else ":"
        laptop.put_before(
            "sbatch", f"touch $site/reached; while [ ! -e $site/go ]; do sleep 0.1; done; {submit}; kill -9 $PPID"
        )
        run = self.kill_at(laptop, laptop.site / "reached")
        (laptop.site / "go").touch()
        if is_queued:
            (job,) = eventually(lambda: laptop.jobs_named(run), 20)
            (row,) = eventually(lambda: [row for row in laptop.json("queue") if row["job"]], 20)
            assert (row["job"], row["state"]) == (job, "PENDING")
            return
        self.backdate(laptop, 600)
        assert laptop.json("queue") == []
        (row,) = laptop.json("queue", "-a", "--host", "head")
        assert row["is_final"] and "never reached Slurm" in row["reason"]

    def test_ctrl_c_while_sbatch_works_leaves_a_run_that_is_found(self, laptop: Desk) -> None:
        laptop.put_before("sbatch", 'touch $site/reached; sleep 1; exec $real "$@"')
        launching = laptop.popen("launch", laptop.task(), "--host", "head", HELD)
        eventually((laptop.site / "reached").exists, 30)
        launching.interrupt()
        (run,) = laptop.runs()
        assert launching.wait(20) == 130 and run in launching.err and "gangrun queue" in launching.err
        (job,) = eventually(lambda: laptop.jobs_named(run), 20)
        (row,) = eventually(lambda: [row for row in laptop.json("queue") if row["job"]], 20)
        assert (row["job"], row["state"]) == (job, "PENDING")

    @pytest.mark.slow
    def test_a_controller_that_never_says_makes_a_run_that_is_found(self, laptop: Desk) -> None:
        laptop.put_before("sbatch", '$real "$@" >/dev/null; ' + TIMED_OUT)
        laptop.put_before("squeue", 'if [ -e $site/mended ]; then exec $real "$@"; else sleep 0.1; exit 1; fi')
        done = laptop.gangrun("launch", laptop.task(), "--host", "head", "-d", HELD, timeout_s=120)
        (run,) = laptop.runs()
        assert done.returncode == 125 and f"not known whether run {run} was submitted" in done.stderr
        (laptop.site / "mended").touch()
        (row,) = laptop.json("queue")
        assert [row["job"]] == laptop.jobs_named(run) and row["state"] == "PENDING"

    def test_a_connection_that_only_a_person_can_open_again_loses_no_run(self, own_laptop: Desk) -> None:
        laptop = own_laptop
        laptop.put_before("sbatch", 'job=$($real "$@"); touch $site/reached; sleep 2; echo $job')
        launching = laptop.popen("launch", laptop.task(), "--host", "head", "-d", HELD)
        eventually((laptop.site / "reached").exists, 30)
        keys = laptop.remote_home / ".ssh" / "authorized_keys"
        keys.rename(keys.with_name("away"))
        laptop.login.cut()
        (run,) = laptop.runs()
        assert launching.wait() == 125 and "wants a login" in launching.err and run in launching.err
        keys.with_name("away").rename(keys)
        (row,) = eventually(lambda: [row for row in laptop.json("queue") if row["job"]], 20)
        assert [row["job"]] == laptop.jobs_named(run)

    def test_a_connection_cut_while_sbatch_works_makes_no_second_job(self, own_laptop: Desk) -> None:
        """And where the answer is lost, the job's id is not."""
        laptop = own_laptop
        laptop.put_before("sbatch", 'job=$($real "$@"); touch $site/reached; sleep 2; echo $job')
        launching = laptop.popen("launch", laptop.task(), "--host", "head", "-d", HELD)
        eventually((laptop.site / "reached").exists, 30)
        laptop.login.cut()
        code, said = launching.wait(), launching.err
        (run,) = laptop.runs()
        (job,) = laptop.jobs_named(run)
        assert code == 0 and f"run {run} is job {job}" in said, said
        assert laptop.login.sessions() == 2

    def kill_at(self, laptop: Desk, reached: Path) -> str:
        """Kill a launch -9 when a file appears; returns its run."""
        launching = laptop.popen("launch", laptop.task(), "--host", "head", "-d", HELD)
        eventually(reached.exists, 30)
        launching.kill()
        (run,) = laptop.runs()
        return run

    def backdate(self, laptop: Desk, seconds: float) -> None:
        with sqlite3.connect(laptop.database) as database:
            database.execute("UPDATE runs SET submitted = submitted - ?", (seconds,))
        database.close()


class TestSnapshots:
    def upload_lines(self, laptop: Desk, task: str) -> tuple[str, str]:
        """What a launch says of uploading, and its run."""
        done = laptop.gangrun("launch", task, "--host", "head", "-d", "--json", "--force", HELD)
        assert done.returncode == 0, done.stderr
        return "\n".join(line for line in done.stderr.splitlines() if "upload" in line), json.loads(done.stdout)["run"]

    def test_an_equal_tree_is_uploaded_once_and_a_damaged_copy_is_noticed(self, laptop: Desk) -> None:
        laptop.commit({"a.txt": laptop.unique("content")})
        task = laptop.task(workdir=".")
        said, run = self.upload_lines(laptop, task)
        assert "uploading 1 files" in said
        subprocess.run(f"{GIT} commit -q --allow-empty -m other", shell=True, cwd=laptop.project, check=True)
        said, _ = self.upload_lines(laptop, task)
        assert said == "", "another commit of an equal tree"
        meta = json.loads((laptop.run_directory(run) / "meta.json").read_text())
        copy = laptop.remote_state / "snapshots" / f"{meta['digests'][0]}.tar"
        content = copy.read_bytes()
        copy.write_bytes(content[:600] + b"X" + content[601:])
        said, _ = self.upload_lines(laptop, task)
        assert "uploading" in said and copy.read_bytes() == content

    def test_code_edited_after_the_launch_does_not_reach_the_job(self, laptop: Desk) -> None:
        """janosh/matbench-discovery#140."""
        laptop.commit({"main.py": "import part\nprint(part.word)\n", "part.py": "word = 'old'\n"})
        (laptop.project / "link.py").symlink_to("part.py")
        laptop.commit({"link.py": "word = 'old'\n"})
        (laptop.project / "untracked.py").write_text("")
        task = laptop.task("/usr/bin/python3 main.py; cat link.py; ls untracked.py || echo none", workdir=".")
        run = laptop.send(task, HELD)
        laptop.commit({"part.py": "word = 'new'\n", "main.py": "print('new')\n"})
        Path(task).write_text("run: echo new\n")
        laptop.slurm("scontrol", "release", run["job"])
        laptop.wait_end(run["job"])
        said = laptop.output(run["run"])
        assert "old" in said and "word = 'old'" in said and "new" not in said and "none" in said

    @pytest.mark.slow
    def test_an_upload_that_is_cut_leaves_nothing_that_is_believed(self, own_laptop: Desk) -> None:
        laptop = own_laptop
        laptop.commit({"hello.txt": "hello\n"})
        with open(laptop.project / "large", "wb") as file:
            for _ in range(150):
                file.write(os.urandom(1 << 20))
        laptop.commit({"more.txt": ""})
        subprocess.run(f"git add large && {GIT} commit -qm large", shell=True, cwd=laptop.project, check=True)
        task = laptop.task("cat hello.txt; wc -c < large", workdir=".")
        snapshots = laptop.remote_state / "snapshots"
        launching = laptop.popen("launch", task, "--host", "head", "-d", HELD)
        eventually(lambda: any(path.stat().st_size > 1 << 20 for path in snapshots.glob(".tmp-*")), 60)
        laptop.login.stop()
        laptop.login.cut()
        code, said = launching.wait(), launching.err
        assert code == 125 and "head" in said and "Traceback" not in said
        eventually(lambda: os.listdir(snapshots) == [], 10)
        laptop.login.start()
        done = laptop.gangrun("launch", task, "--host", "head")
        assert done.returncode == 0 and "hello" in done.stdout and str(150 << 20) in done.stdout, done.stderr


class TestHosts:
    """Each trouble is one line and a code; nothing is recorded as in flight."""

    def refused(self, laptop: Desk, host: str, *words: str) -> str:
        done = laptop.gangrun("launch", laptop.task(), "--host", host)
        assert done.returncode == 125, done.stderr
        assert laptop.runs() == []
        return one_line(done, host, *words)

    def config(self, laptop: Desk, text: str) -> None:
        """Add to ~/.ssh/config. What stands first wins there."""
        path = laptop.home / ".ssh" / "config"
        path.write_text(text + "\n" + path.read_text())

    def alias(self, laptop: Desk, name: str, options: str) -> None:
        address = laptop.cluster.addresses[CONTROLLER]
        keys = f"IdentityFile {laptop.login.config.parent}/client\nIdentitiesOnly yes"
        known = f"UserKnownHostsFile {laptop.login.config.parent}/known_hosts\nGlobalKnownHostsFile /dev/null"
        fixed = f"User {laptop.user}\nHostName {address}\nStrictHostKeyChecking yes"
        self.config(laptop, f"Host {name}\n{options}\n{fixed}\n{keys}\n{known}\nHost *")

    def test_an_alias_that_nobody_knows(self, laptop: Desk) -> None:
        self.refused(laptop, "no-such-host", "Could not resolve hostname")

    def test_a_host_that_is_no_alias_at_all(self, laptop: Desk) -> None:
        done = laptop.gangrun("launch", laptop.task(), "--host=-oProxyCommand=touch /tmp/x")
        assert done.returncode == 2
        one_line(done, "alias of ~/.ssh/config")

    def test_nobody_listens_there(self, laptop: Desk) -> None:
        self.alias(laptop, "deaf", "Port 9")
        self.refused(laptop, "deaf", "Connection refused")

    def test_a_wrong_key(self, laptop: Desk) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(laptop.home / "wrong")], check=True)
        self.alias(laptop, "stranger", "")
        path = laptop.home / ".ssh" / "config"
        path.write_text(path.read_text().replace(f"{laptop.login.config.parent}/client", f"{laptop.home}/wrong"))
        said = self.refused(laptop, "stranger", "wants a login", "Permission denied", "Log in once with: ssh -S")
        assert said.endswith("stranger")

    def test_a_host_key_that_has_changed(self, laptop: Desk) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(laptop.home / "other")], check=True)
        known = laptop.home / "known"
        known.write_text(f"{laptop.cluster.addresses[CONTROLLER]} {(laptop.home / 'other.pub').read_text()}")
        self.alias(laptop, "changed", f"UserKnownHostsFile {known}")
        self.refused(laptop, "changed", "Host key verification failed")

    def test_a_host_without_slurm_or_python(self, laptop: Desk) -> None:
        laptop.settings(python="/nowhere/python3")
        self.refused(laptop, "head", "no python found", "/nowhere/python3", "python:")

    def test_ones_own_shared_connection_is_used(self, laptop: Desk) -> None:
        own = f"ControlPath {laptop.home}/run/mine\nControlMaster auto\nControlPersist 60"
        self.alias(laptop, "mine", own)
        laptop.cluster.run(LAPTOP, ["ssh", "mine", "true"], env=laptop.env, cwd="/")
        run = json.loads(laptop.gangrun("launch", laptop.task(), "--host", "mine", "-d", "--json", HELD).stdout)
        assert laptop.jobs_named(run["run"]) == [run["job"]]
        assert laptop.masters() == [], "no login of ours"
        laptop.cluster.run(LAPTOP, ["ssh", "-O", "exit", "mine"], env=laptop.env, cwd="/")

    def test_the_path_of_a_home_may_be_too_long_for_a_socket(self, laptop: Desk) -> None:
        """berrym/btrfs-backup-ng#89, NousResearch/hermes-agent#12958."""
        home = laptop.directory / ("h" * 90)
        env = {**laptop.login.environ(home), "XDG_RUNTIME_DIR": str(home / "run")}
        (home / "run").mkdir()
        alias = laptop.unique("long")  # the socket lies in /tmp, where others may have one for the same alias
        (home / ".ssh" / "config").write_text(f"Host {alias}\nHostName {laptop.cluster.addresses[CONTROLLER]}\n" + (
            f"User {laptop.user}\nIdentityFile {laptop.login.config.parent}/client\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {laptop.login.config.parent}/known_hosts\n"
        ))  # fmt: skip
        task = laptop.task("echo ran")
        done = laptop.gangrun("launch", task, "--host", alias, env=env)
        code = """
            import json, sys
            from gangrun.remote import open_host
            host = open_host(sys.argv[1])
            host.connect()
            host.disconnect()
            print(json.dumps([host.logins, host._socket]))
        """
        logins, socket = laptop.python(code, alias, env=env)
        Path(socket + ".lock").unlink()
        assert logins == 0 and len(socket) < 90 and not Path(socket).exists()
        assert done.returncode == 0 and "ran" in done.stdout, done.stderr

    def test_one_login_carries_everything_and_a_dead_connection_makes_one_more(self, own_laptop: Desk) -> None:
        """ascii-supply-networks/dagster-slurm#187."""
        laptop = own_laptop
        run = laptop.send(laptop.task(), HELD)
        assert self.polls(laptop, 20).wait() == 0
        assert laptop.gangrun("status", run["run"]).returncode == 101 and laptop.login.sessions() == 1
        (master,) = [one for one in laptop.cluster.processes(LAPTOP) if "ControlMaster=yes" in one.cmdline]
        polling = self.polls(laptop, 20)
        polling.until_out("5\n")
        os.kill(master.pid, signal.SIGKILL)
        assert polling.wait() == 0, polling.err
        assert laptop.login.sessions() == 2

    def test_many_processes_make_one_login_and_one_more_when_it_is_lost(self, own_laptop: Desk) -> None:
        laptop = own_laptop
        first = [self.polls(laptop, 2) for _ in range(4)]
        assert [polling.wait() for polling in first] == [0] * 4, [polling.err for polling in first]
        assert laptop.login.sessions() == 1
        (master,) = [one for one in laptop.cluster.processes(LAPTOP) if "ControlMaster=yes" in one.cmdline]
        again = [self.polls(laptop, 8) for _ in range(4)]
        for polling in again:
            polling.until_out("2\n")
        os.kill(master.pid, signal.SIGKILL)
        assert [polling.wait() for polling in again] == [0] * 4, [polling.err for polling in again]
        assert laptop.login.sessions() == 2

    def test_a_connection_that_ends_while_it_is_asked_for_is_no_reason_to_log_in_twice(self, own_laptop: Desk) -> None:
        """ssh -O check goes on and logs in by itself if the other end takes it and says nothing."""
        code = """
            import json, os, socket, threading, time
            from gangrun.remote import open_host
            host = open_host("head")
            host.connect()
            host.disconnect()
            while os.path.exists(host._socket):
                time.sleep(0.01)
            dying = socket.socket(socket.AF_UNIX)
            dying.bind(host._socket)
            dying.listen(9)
            def end_each():
                while True:
                    dying.accept()[0].close()
            threading.Thread(target=end_each, daemon=True).start()
            answer = host.call("commands", commands={"hello": ["echo", "hello"]}, limit_s=20)
            print(json.dumps([host.logins, answer["hello"]["stdout"]]))
        """
        assert own_laptop.python(code) == [2, "hello\n"]
        assert own_laptop.login.sessions() == 2

    @pytest.mark.parametrize("options", ["ControlMaster yes", "ControlMaster yes\nControlPath {home}/run/their%%s-%C"])
    def test_settings_of_ones_own_for_sharing_are_no_reason_to_log_in_twice(
        self, own_laptop: Desk, options: str
    ) -> None:
        """With them ssh never asks a shared connection, but opens one."""
        laptop = own_laptop
        self.alias(laptop, "sharing", options.format(home=laptop.home))
        code = """
            import json
            from gangrun.remote import open_host
            host = open_host("sharing")
            for _ in range(3):
                answer = host.call("commands", commands={"hello": ["echo", "hello"]}, limit_s=20)
            print(json.dumps([host.logins, answer["hello"]["stdout"]]))
        """
        for logins in (1, 0):
            assert laptop.python(code) == [logins, "hello\n"]
        assert laptop.login.sessions() == 1
        if "ControlPath" in options:  # and once they have one, it is used
            laptop.disconnect()
            theirs = laptop.start("ssh", "-fN", "sharing")
            assert theirs.wait() == 0, theirs.err
            assert laptop.python(code) == [0, "hello\n"] and laptop.login.sessions() == 2
            assert laptop.masters() == []

    @pytest.mark.slow
    def test_a_host_that_does_not_answer_for_a_while_fails_no_wait(self, own_laptop: Desk) -> None:
        """AgnostiqHQ/covalent-slurm-plugin#64, dstackai/dstack#2627."""
        laptop = own_laptop
        run = laptop.send(laptop.task(f"while [ ! -e {laptop.site}/go ]; do sleep 0.2; done"))
        waiting = laptop.popen("wait", run["run"])
        time.sleep(3)
        laptop.login.stop()
        laptop.login.cut()
        time.sleep(10)
        (laptop.site / "go").touch()
        laptop.wait_end(run["job"])
        laptop.login.start()
        code = waiting.wait(90)
        assert (code, "not affected" in waiting.err, "SUCCEEDED" in waiting.out) == (0, True, True), waiting.err

    def polls(self, laptop: Desk, count: int) -> Typed:
        code = f"""
from gangrun import Cluster
cluster = Cluster("head")
for number in range({count}):
    print(number, flush=True)
    cluster.host.call("commands", commands={{"squeue": ["squeue"]}}, limit_s=20)
"""
        return laptop.start("python", "-c", code, env={"PYTHONPATH": str(CHECKOUT)})


class TestSettings:
    def test_a_default_host_and_its_settings_are_honoured(self, laptop: Desk) -> None:
        scratch = laptop.directory / "scratch"
        laptop.directory.chmod(0o777)
        laptop.cluster.run(CONTROLLER, ["mkdir", scratch], cwd="/", user=laptop.user)
        laptop.settings(
            default_host="head", partition="main", workdir=str(scratch), time="2h", python="/usr/bin/python3"
        )
        laptop.commit({"hello.txt": "hello\n"})
        done = laptop.gangrun("launch", laptop.task("cat hello.txt; pwd", workdir="."))
        assert done.returncode == 0 and "hello" in done.stdout and " on head" in done.stderr, done.stderr
        (run,) = laptop.runs()
        directory = scratch / ".gangrun" / "runs" / run
        assert f"{directory}/work" in done.stdout and not laptop.run_directory(run).exists()
        (job,) = laptop.jobs_named(run)
        assert laptop.job_field(job, "TimeLimit") == "02:00:00" and laptop.job_field(job, "Partition") == "main"
        assert (scratch / ".gangrun" / job / run / "status.json").exists()

    def test_a_host_is_not_asked_more_often_than_its_poll_interval(self, laptop: Desk) -> None:
        laptop.put_before("squeue", 'echo "$*" >> $site/asked; exec $real "$@"')
        asked = laptop.note("asked")
        laptop.settings(python=str(laptop.site / "python3"), poll_interval="1h")
        run = laptop.send(laptop.task(), HELD)
        for _ in range(3):
            (row,) = laptop.json("queue")
            assert (row["run"], row["state"]) == (run["run"], "PENDING")
        assert asked.read_text().count("--user=") == 1

    def test_a_broken_file_is_told_with_its_line_and_how_to_mend_it(self, laptop: Desk) -> None:
        laptop.settings(partition="main")
        path = laptop.config_path
        for text, words in (
            ("hosts:\n  head: {partition: main\n", "mend that line"),
            ("hosts:\n  head:\n    tiem: 4h\n", "tiem"),
        ):
            path.write_text(text)
            done = laptop.gangrun("launch", laptop.task(), "--host", "head")
            assert done.returncode == 2
            one_line(done, str(path), ":3", words)
