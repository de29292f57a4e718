"""What the test bed promises about ssh: a laptop, an sshd on the head node, accounts with all sorts of shells."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.minislurm import BadInput, BedError, Cluster, preflight
from tests.minislurm.accounts import ACCOUNTS
from tests.minislurm.fixtures import BootCluster, Session
from tests.minislurm.login import BANNER, Login
from tests.minislurm.proc import processes_of
from tests.minislurm.room import NodePopen
from tests.minislurm.test_sessions import prefix_of, remains
from tests.test_minislurm import until

pytestmark = [
    pytest.mark.skipif(preflight.missing() is not None, reason=str(preflight.missing())),
    pytest.mark.skipif(preflight.missing_login() is not None, reason=str(preflight.missing_login())),
]
ALIASES = [account.alias for account in ACCOUNTS]
WHERE = "#!/bin/sh\nsrun sh -c 'echo $(hostname) $(id -un) $HOME $(cd; pwd)'\n"


class Laptop:
    """Somebody who sits there, with a home folder of their own."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster, self.login = cluster, cluster.login()
        self.env = self.login.environ(home)

    def ssh(self, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.cluster.run("laptop", ["ssh", *words], cwd="/", env=self.env, **how)

    def start(self, *words: str) -> NodePopen:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.cluster.popen("laptop", ["ssh", *words], cwd="/", env=self.env, **pipes)


@pytest.fixture
def laptop(cluster: Cluster, login: Login, tmp_path: Path) -> Laptop:
    return Laptop(cluster, tmp_path / "home")


@pytest.fixture
def own_laptop(own_cluster: BootCluster, tmp_path: Path) -> Laptop:
    """On a cluster of the test's own, where logins can be counted and broken."""
    return Laptop(own_cluster(nodes=1, gpus=0), tmp_path / "home")


def needs(laptop: Laptop, alias: str) -> None:
    if alias not in laptop.login.aliases:
        pytest.skip(f"no shell for {alias}")


class TestAccounts:
    @pytest.mark.parametrize("alias", ALIASES)
    def test_every_alias_is_an_account_with_a_home_and_slurm(self, laptop: Laptop, alias: str) -> None:
        needs(laptop, alias)
        text = "id -un; pwd; printenv HOME; printenv SLURM_CONF; hostname; sinfo -h -o %R"
        said = laptop.ssh(alias, text).stdout.splitlines()
        home = str(laptop.login.home(alias))
        assert said[-6:] == [laptop.login.user(alias), home, home, str(laptop.cluster.slurm_conf), "ctl", "main"]

    @pytest.mark.parametrize("alias", ["head", "head-tcsh", "head-fish"])
    def test_login_shells_are_what_they_are_called(self, laptop: Laptop, alias: str) -> None:
        needs(laptop, alias)
        shell = {"head": "bash", "head-tcsh": "tcsh", "head-fish": "fish"}[alias]
        pid = "$fish_pid" if shell == "fish" else "$$"
        said = laptop.ssh(alias, f"readlink /proc/{pid}/exe; true").stdout
        assert shell in said

    @pytest.mark.parametrize("alias", ["head", "head-longhome"])
    def test_a_job_runs_as_its_user_at_home_on_every_node(self, laptop: Laptop, alias: str) -> None:
        job_id = int(laptop.ssh(alias, "sbatch --parsable -N2 -o out", input=WHERE).stdout)
        assert laptop.cluster.wait_job(job_id).state == "COMPLETED"
        user, home = laptop.login.user(alias), laptop.login.home(alias)
        lines = sorted(line.split() for line in (home / "out").read_text().splitlines())
        assert [line[1:] for line in lines] == 2 * [[user, str(home), str(home)]]
        assert len({line[0] for line in lines}) == 2 and (home / "out").stat().st_uid >= 50000

    def test_the_noisy_one_is_noisy_on_both_streams(self, laptop: Laptop) -> None:
        done = laptop.ssh("head-noisy", "echo data")
        assert done.stdout.endswith("data\n") and "NEWS" in done.stdout
        assert BANNER in done.stderr and "password is old" in done.stderr
        assert laptop.ssh("head", "echo data").stdout == "data\n"

    def test_a_path_for_sockets_is_too_long_there(self, laptop: Laptop) -> None:
        assert len(str(laptop.login.home("head-longhome"))) > 107

    def test_a_home_is_private_and_an_account_no_one_knows_is_refused(self, laptop: Laptop) -> None:
        assert laptop.ssh("head", f"ls {laptop.login.home('head-noisy')}", check=False).returncode
        with pytest.raises(BadInput, match=r"head-tcsh|head-noisy"):
            laptop.login.user("nobody")

    def test_the_machine_knows_none_of_them(self, laptop: Laptop) -> None:
        assert not [entry for entry in pwd.getpwall() if entry.pw_name.startswith("gangrun-")]
        user = laptop.login.user("head")
        for node in ("ctl", "n4"):
            assert laptop.cluster.run(node, ["id", "-un"], user=user, cwd="/").stdout == f"{user}\n"

    def test_a_node_that_was_off_knows_them_again(self, own_laptop: Laptop) -> None:
        user = own_laptop.login.user("head")
        for node in ("n1", "ctl"):
            own_laptop.cluster.power_off(node)
            own_laptop.cluster.power_on(node)
            assert own_laptop.cluster.run(node, ["id", "-un", user], cwd="/").stdout == f"{user}\n"
        assert own_laptop.ssh("head", "hostname").stdout == "ctl\n", "its sshd came back, too"


class TestLaptop:
    def test_it_has_no_slurm_and_does_not_see_the_homes(self, laptop: Laptop) -> None:
        text = (
            f"hostname; command -v sbatch srun squeue sacct; ls -A {laptop.cluster.layout.homes}; printenv SLURM_CONF"
        )
        done = laptop.cluster.run("laptop", ["sh", "-c", text], env=laptop.env, cwd="/", check=False)
        assert done.stdout == "laptop\n"

    def test_only_the_given_environment_is_there(self, laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", "/nowhere")
        said = laptop.cluster.run("laptop", ["env"], env=laptop.env, cwd="/").stdout
        assert {line.split("=")[0] for line in said.splitlines()} == set(laptop.env)
        assert f"HOME={laptop.env['HOME']}\n" in said

    def test_this_checkouts_python_is_on_the_path(self, laptop: Laptop) -> None:
        argv = ["python", "-c", "import pytest, sys; print(sys.prefix)"]
        assert laptop.cluster.run("laptop", argv, env=laptop.env, cwd="/").stdout

    def test_without_login_there_is_no_laptop(self, own_cluster: BootCluster) -> None:
        with pytest.raises(BedError, match=r"login\(\)"):
            own_cluster(nodes=1).run("laptop", ["true"])

    def test_a_users_own_settings_are_kept(self, cluster: Cluster, login: Login, tmp_path: Path) -> None:
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "config").write_text("Host mine\n    HostName ctl\n")
        for _ in range(2):
            env = login.environ(tmp_path)
        said = [cluster.run("laptop", ["ssh", "-G", alias], env=env, cwd="/").stdout for alias in ("mine", "head")]
        assert "hostname ctl\n" in said[0] and "user gangrun-bash\n" in said[1]


class TestConnections:
    def test_logins_are_counted_and_a_shared_connection_is_one(self, own_laptop: Laptop, shared_dir: Path) -> None:
        before = own_laptop.login.sessions()
        shared = ["-o", "ControlMaster=auto", "-o", f"ControlPath={shared_dir}/%C", "-o", "ControlPersist=30", "head"]
        for _ in range(4):
            assert own_laptop.ssh(*shared, "id -un").stdout == "gangrun-bash\n"
        assert own_laptop.login.sessions() == before + 1
        own_laptop.ssh(*shared[:4], "-O", "exit", "head")
        own_laptop.ssh("head", "true")
        assert own_laptop.login.sessions() == before + 2

    def test_a_cut_ends_every_session_at_once_and_new_ones_are_welcome(self, own_laptop: Laptop) -> None:
        for _ in range(3):  # also a client that loses its connections is not locked out
            with own_laptop.start("head", "echo ready; sleep 60") as first, own_laptop.start("head", "sleep 60"):
                assert first.stdout and first.stdout.readline() == "ready\n"
                began = time.monotonic()
                own_laptop.login.cut()
                assert first.wait(5) == 255 and time.monotonic() - began < 2
            assert own_laptop.ssh("head", "echo again").stdout == "again\n"

    def test_stopped_it_refuses_but_lets_be_who_is_in(self, own_laptop: Laptop) -> None:
        with own_laptop.start("head", "echo ready; sleep 0.5; echo done") as inside:
            assert inside.stdout and inside.stdout.readline() == "ready\n"
            own_laptop.login.stop()
            refused = own_laptop.ssh("head", "true", check=False)
            assert refused.returncode == 255 and "refused" in refused.stderr
            assert (inside.stdout.read(), inside.wait(5)) == ("done\n", 0)
        own_laptop.login.start()
        assert own_laptop.ssh("head", "true").returncode == 0

    def test_a_pulled_cable_is_noticed_by_the_client(self, own_laptop: Laptop) -> None:
        alive = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=1"]
        with own_laptop.start(*alive, "head", "echo ready; sleep 60") as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            own_laptop.cluster.cut_link("laptop")
            assert process.wait(10) == 255
        own_laptop.cluster.mend_link("laptop")

    def test_files_are_copied(self, laptop: Laptop, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")
        laptop.cluster.run("laptop", ["scp", "-q", tmp_path / "file", "head:copied"], env=laptop.env, cwd="/")
        assert (laptop.login.home("head") / "copied").read_text() == "text"


class TestLife:
    @pytest.fixture
    def root(self, pytestconfig: pytest.Config) -> Iterator[Path]:
        path = Session.of(pytestconfig).own_root()
        yield path
        Cluster.clean_leftovers(path)

    def test_a_second_call_and_another_process_get_the_same(self, laptop: Laptop) -> None:
        def sshd() -> set[int]:
            inside = processes_of(laptop.cluster._room.init("ctl"))
            return {one.pid for one in inside if "[listener]" in one.cmdline}

        before = sshd()
        other = Cluster.attach(laptop.cluster.root).login()
        assert (other.config, other.home("head")) == (laptop.login.config, laptop.login.home("head"))
        assert len(before) == 1 and sshd() == before

    def test_its_daemons_are_nobodys_program(self, own_laptop: Laptop) -> None:
        assert own_laptop.cluster.processes("ctl") == []

    def test_down_leaves_no_process_mount_or_account(self, root: Path, tmp_path: Path) -> None:
        names = ("/etc/passwd", "/etc/group", "/run/utmp", "/var/log/wtmp", "/var/log/lastlog")
        watched = [path for name in names if (path := Path(name)).exists()]
        before = [path.read_bytes() for path in watched]
        cluster = Cluster.boot(root, nodes=2)
        prefix, laptop = prefix_of(root), Laptop(cluster, tmp_path / "home")
        shared = ["-o", "ControlMaster=yes", "-o", f"ControlPath={root}/mux", "-o", "ControlPersist=yes", "head"]
        laptop.ssh(*shared, "true")
        with laptop.start("-tt", "head", "sleep 1000") as running:
            until(lambda: any("sleep 1000" in one.cmdline for one in cluster.processes("ctl")))
            cluster.down()
            assert running.wait(5)
        assert remains(root, prefix) == []
        assert [path.read_bytes() for path in watched] == before, "nobody has ever been here"
        assert "minislurm" not in os.listdir("/run")
