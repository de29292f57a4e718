"""A group's host names in its scripts: who resolves them, on which nodes, as whom; and that nothing of it is left."""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from codegen.archive import executor_archive
from executor import protocol
from executor.hostnames import NAMESPACE, NONE, NSS_WRAPPER
from executor.options import parse
from executor.protocol import UsageError
from executor.shared import write_in_place
from tests.bench import eventually
from tests.minislurm.cluster import Cluster
from tests.minislurm.login import Login
from tests.solo import Solo

PYTHON = "/usr/bin/python3"  # one that every user may run
LIBRARIES = glob.glob("/usr/lib/*/libnss_wrapper.so") + glob.glob("/usr/lib64/libnss_wrapper.so")
needs_library = pytest.mark.skipif(not LIBRARIES, reason="missing: apt-get install libnss-wrapper")
MEANS = [NAMESPACE, pytest.param(NSS_WRAPPER, marks=needs_library)]
WHO = ["root", "user"]
LOOKED_UP = "python3 -c \"import socket; print(socket.gethostbyname('peer-0.team'))\""
STATIC_C = """
#include <netdb.h>
#include <stdio.h>
#include <arpa/inet.h>
int main(void) {
    struct hostent *found = gethostbyname("peer-0.team");
    if (!found) return 1;
    puts(inet_ntoa(*(struct in_addr *) found->h_addr_list[0]));
}
"""
# As root of a user namespace that may make no other, and without any capability to mount.
FORBIDDEN = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"),
    'for file in HIDDEN; do mount --bind /dev/null "$file"; done; echo 0 >/proc/sys/user/max_user_namespaces; '
    'exec setpriv --bounding-set=-all --inh-caps=-all "$@"',
    "sh",
)


class Place:
    """A directory that all nodes and one user share, with the executor's archive in it."""

    def __init__(self, cluster: Cluster, directory: Path, user: str | None) -> None:
        self.cluster, self.directory, self.user = cluster, directory, user
        self.nodes = cluster.nodes[:2]
        self.addresses = [cluster.addresses[node] for node in self.nodes]
        (directory / protocol.ARCHIVE_NAME).write_bytes(executor_archive())
        directory.chmod(0o777)

    def hosts(self, *addresses: str, name: str = "hosts") -> str:
        """The group's file: peer-0, peer-1, ..."""
        path = str(self.directory / name)
        write_in_place(path, "".join(f"{each} peer-{i}.team\n" for i, each in enumerate(addresses)).encode())
        os.chmod(path, 0o644)
        return path

    def submit(self, script: str, hosts: str, means: str, *, logs: str = "logs", nodes: int = 1, srun: str = "") -> int:
        text = self.directory / f"script-{logs}"
        text.write_text(script)
        flags = [f"--script-path={text}", f"--log-dir={self.directory}/{logs}", f"--cluster-num-nodes={nodes}"]
        flags += [f"--cluster-ips={','.join(self.addresses[:nodes])}", "--cluster-home-dir=" + str(self.directory)]
        flags += [f"--hosts-file={hosts}", f"--hosts-means={means}", "--no-color", "--grace-s=5"]
        command = shlex.join([PYTHON, "-I", "-S", str(self.directory / protocol.ARCHIVE_NAME), *flags])
        where = ["--nodes=%d" % nodes, "--ntasks-per-node=1", "--nodelist=" + ",".join(self.nodes[:nodes])]
        options = [*where, f"--output={self.directory}/{logs}.out", "--oversubscribe"]
        body = f"#!/bin/bash\nsrun {srun} --kill-on-bad-exit=1 {command}\n"
        return self.cluster.sbatch(body, *options, cwd=self.directory, user=self.user)

    def log(self, name: str = "run.log", logs: str = "logs") -> str:
        path = self.directory / logs / name
        return path.read_text() if path.exists() else ""

    def end(self, job: int, code: int = 0, logs: str = "logs") -> str:
        """Wait for a job's end; what it printed."""
        end = self.cluster.wait_job(job)
        said = (self.directory / f"{logs}.out").read_text()
        assert end.exit_code == code, said
        return said

    def run(self, script: str, hosts: str, means: str, **how: Any) -> list[str]:
        """The lines of a script that ends well on one node."""
        self.end(self.submit(script, hosts, means, **how))
        return self.log().splitlines()

    def own_hosts(self, node: str) -> str:
        return self.cluster.run(node, ["cat", "/etc/hosts"], cwd="/").stdout

    def is_as_before(self, node: str) -> bool:
        """No mount, no file, no process of ours on a node."""
        seen = self.cluster.run(node, ["sh", "-c", "cat /proc/mounts; ls /dev/shm /tmp"], cwd="/").stdout
        running = [p.cmdline for p in self.cluster.processes(node) if str(self.directory) in p.cmdline]
        return "gangrun-hosts" not in seen and "peer-0.team" not in self.own_hosts(node) and not running


def whole(cluster: Cluster) -> Cluster:
    """A cluster whose nodes have the programs that are to resolve the names."""
    has_all = f"{PYTHON} -c 'import ctypes, http.server' && command -v curl"
    if cluster.run(cluster.nodes[0], ["sh", "-c", has_all], cwd="/", check=False).returncode:
        pytest.skip("the nodes have no curl, or not all of Python")
    return cluster


@pytest.fixture(params=WHO)
def place(request: pytest.FixtureRequest, cluster: Cluster, shared_dir: Path) -> Place:
    whole(cluster)
    if request.param == "root":
        return Place(cluster, shared_dir, None)
    login: Login = request.getfixturevalue("login")
    return Place(cluster, shared_dir, login.user("head"))


@pytest.fixture
def users_place(cluster: Cluster, shared_dir: Path, login: Login) -> Place:
    return Place(whole(cluster), shared_dir, login.user("head"))


# --- who resolves them


@pytest.mark.parametrize("means", MEANS)
def test_every_program_on_every_node_reaches_its_peers_by_name(place: Place, means: str) -> None:
    port = 20000 + os.getpid() % 20000
    script = f"""
    cd $(mktemp -d /tmp/gangrun-www-XXXXXX); echo "I am $SKYPILOT_NODE_RANK" >index.html
    python3 -m http.server {port} >/dev/null 2>&1 &
    peer=peer-$((1 - SKYPILOT_NODE_RANK)).team
    until (exec 3<>/dev/tcp/$peer/{port}) 2>/dev/null; do sleep 0.1; done; echo tcp
    getent hosts $peer | tr -s ' '
    python3 -c "import socket; print(socket.gethostbyname('$peer'))"
    curl -fsS http://$peer:{port}/
    touch $OLDPWD/done-$SKYPILOT_NODE_RANK
    until [ -e $OLDPWD/done-0 ] && [ -e $OLDPWD/done-1 ]; do sleep 0.1; done
    kill %1; rm -r $PWD
    """
    place.end(place.submit(script, place.hosts(*place.addresses), means, nodes=2))
    for rank, log in enumerate(("0-head.log", "1-worker1.log")):
        peer = place.addresses[1 - rank]
        asked = ["tcp", f"{peer} peer-{1 - rank}.team", peer, f"I am {1 - rank}"]
        assert place.log(log).splitlines() == asked
    eventually(lambda: all(place.is_as_before(node) for node in place.nodes))


def test_programs_that_read_the_file_themselves_see_them_in_a_namespace(place: Place) -> None:
    script = f"awk '$2 == \"peer-0.team\" {{ print $1 }}' /etc/hosts; {static_program(place.directory)}"
    assert place.run(script, place.hosts("10.9.8.7"), NAMESPACE) == ["10.9.8.7"] * 2


def static_program(directory: Path) -> str:
    """A program without any shared library that asks its own copy of the C library."""
    (directory / "static.c").write_text(STATIC_C)
    argv = ["gcc", "-static", "-o", str(directory / "static"), str(directory / "static.c")]
    if shutil.which("gcc") is None or subprocess.run(argv, capture_output=True).returncode:
        return "echo 10.9.8.7 # no static programs can be made here"
    return str(directory / "static")


def test_the_nodes_own_names_are_still_there(place: Place) -> None:
    own = place.own_hosts(place.nodes[0])
    assert own and place.run("cat /etc/hosts", place.hosts("10.9.8.7"), NAMESPACE) == [
        *own.splitlines(),
        "10.9.8.7 peer-0.team",
    ]


@pytest.mark.parametrize("means", MEANS)
def test_two_groups_with_the_same_names_on_one_node_see_their_own(place: Place, means: str) -> None:
    script = f"touch $PWD/at-work-$1; until [ -e at-work-a ] && [ -e at-work-b ]; do sleep 0.1; done; {LOOKED_UP}"
    jobs = {}
    for name, address in (("a", "10.9.8.1"), ("b", "10.9.8.2")):
        hosts = place.hosts(address, name=f"hosts-{name}")
        jobs[name] = place.submit(script.replace("$1", name), hosts, means, logs=name)
    for name, job in jobs.items():
        place.end(job, logs=name)
    assert [place.log(logs=name).split() for name in "ab"] == [["10.9.8.1"], ["10.9.8.2"]]


@pytest.mark.parametrize("means", MEANS)
def test_a_new_address_reaches_a_running_script(place: Place, means: str) -> None:
    look = LOOKED_UP.replace("print(", "import time\nwhile True: time.sleep(0.2); print(").replace(
        ')"', ', flush=True)"'
    )
    job = place.submit(look, place.hosts("10.9.8.1", "10.9.8.1"), means)
    eventually(lambda: "10.9.8.1" in place.log())
    place.hosts("10.9.8.222")
    eventually(lambda: "10.9.8.222" in place.log())
    place.hosts("10.9.8.3")
    eventually(lambda: place.log().endswith("10.9.8.3\n"))
    place.cluster.run("ctl", ["scancel", str(job)], cwd="/")
    place.cluster.wait_job(job)
    eventually(lambda: place.is_as_before(place.nodes[0]))


# --- as whom, and how it ends


def test_in_a_namespace_the_script_is_who_it_was(users_place: Place) -> None:
    place = users_place
    uid, gid = (
        place.cluster.run("n1", ["id", flag, place.user or ""], cwd="/").stdout.strip() for flag in ("-u", "-g")
    )
    script = """
    id -un; id -u; id -g; touch mine; stat -c '%u %g' mine; grep CapEff /proc/self/status | tr -s '\\t' ' '
    echo $$; bash -c 'echo $PPID'; cat "$0" | wc -l; yes | head -1 >/dev/null; echo ${PIPESTATUS[0]}
    squeue -h -j $SLURM_JOB_ID -o %u; srun --overlap -n1 id -un
    """
    name, *ids, owner, rights, pid, parent, lines, pipe, squeue, step = place.run(
        script, place.hosts("10.9.8.7"), NAMESPACE
    )
    assert ([name, *ids], owner) == ([place.user, uid, gid], f"{uid} {gid}")
    assert rights == "CapEff: 0000000000000000" and pid == parent and int(lines) > 3 and pipe == "141"
    assert (squeue, step) == (place.user, place.user)
    made = (place.directory / "mine").stat()
    assert (made.st_uid, made.st_gid) == (int(uid), int(gid))


@pytest.mark.parametrize("means", MEANS)
def test_signals_and_codes_pass_as_ever_and_nothing_stays(place: Place, means: str) -> None:
    script = "trap 'echo told; exit 9' TERM; (trap 'echo told too; exit' TERM; while :; do sleep 0.1; done) & wait"
    job = place.submit(f"echo pid=$$; {script}; exit 1", place.hosts("10.9.8.7"), means)
    eventually(lambda: "pid=" in place.log())
    place.cluster.run("ctl", ["scancel", "-s", "TERM", f"{job}.0"], cwd="/")
    said = place.end(job, 9)
    lines = place.log().splitlines()
    assert lines.count("told") == lines.count("told too") == 1
    assert place.log().split()[0] in said.split(")")[0].replace(" ", "").replace("(task,", ""), "the prefix has its pid"
    eventually(lambda: place.is_as_before(place.nodes[0]))


@pytest.mark.parametrize("means", MEANS)
def test_a_rank_that_is_killed_leaves_nothing(place: Place, means: str) -> None:
    job = place.submit("setsid sleep 4329 & echo ready; wait", place.hosts("10.9.8.7"), means)
    eventually(lambda: "ready" in place.log())
    programs = [p for p in place.cluster.processes("n1") if p.cmdline.startswith(f"{PYTHON} -I -S {place.directory}")]
    place.cluster.run("n1", ["kill", "-KILL", *(str(p.inner_pid) for p in programs)], cwd="/")
    place.cluster.wait_job(job)
    eventually(lambda: place.is_as_before(place.nodes[0]))


# --- which means


class Forbidding(NamedTuple):
    """One rank where nobody may make a namespace, perhaps without the library either."""

    solo: Solo
    hidden: tuple[str, ...] = ()

    def run(self, script: str, means: str) -> subprocess.CompletedProcess[str]:
        (self.solo.directory / "hosts").write_text("10.9.8.7 peer-0.team\n")
        argv = self.solo.argv(script, f"--hosts-file={self.solo.directory}/hosts", f"--hosts-means={means}")
        around = [word.replace("HIDDEN", shlex.join(self.hidden)) for word in FORBIDDEN]
        apart = ["unshare", "--net"]  # a name that nobody knows must not go to a name server
        how: dict[str, Any] = {"env": self.solo.environ(), "cwd": self.solo.directory}
        return subprocess.run([*apart, *around, *argv], capture_output=True, text=True, timeout=60, **how)


@pytest.fixture
def forbidding(solo: Solo) -> Forbidding:
    try_it = [word.replace("HIDDEN", "") for word in FORBIDDEN]
    if os.geteuid() or subprocess.run([*try_it, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here in which to forbid them")
    return Forbidding(solo)


@needs_library
def test_where_namespaces_are_forbidden_the_library_serves(forbidding: Forbidding) -> None:
    done = forbidding.run(f"{LOOKED_UP}; echo $LD_PRELOAD", "auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert forbidding.solo.log().decode().split() == ["10.9.8.7", "libnss_wrapper.so"]


@needs_library
def test_the_library_comes_after_the_users_own(solo: Solo) -> None:
    (solo.directory / "hosts").write_text("10.9.8.7 peer-0.team\n")
    own = LIBRARIES[0]
    flags = (f"--hosts-file={solo.directory}/hosts", f"--hosts-means={NSS_WRAPPER}")
    assert solo.run("echo $LD_PRELOAD", *flags, env={"LD_PRELOAD": own}).returncode == 0
    assert solo.log().decode() == f"{own}:libnss_wrapper.so\n"


def test_where_nothing_works_the_script_runs_and_one_line_says_so(forbidding: Forbidding) -> None:
    without = forbidding._replace(hidden=tuple(LIBRARIES))
    done = without.run("echo I run; env | grep -c NSS_WRAPPER", "auto")
    assert done.returncode == 1 and without.solo.log() == b"I run\n0\n"
    assert len(done.stderr.splitlines()) == 1
    assert "the group's host names do not resolve here: unshare(2) is not allowed" in done.stderr
    assert "libnss_wrapper.so is not installed; use the addresses instead" in done.stderr


@pytest.mark.parametrize("means", ["required", NAMESPACE, NSS_WRAPPER])
def test_where_they_are_required_the_script_does_not_run_without_them(forbidding: Forbidding, means: str) -> None:
    without = forbidding._replace(hidden=tuple(LIBRARIES))
    done = without.run("echo I run", means)
    assert (done.returncode, done.stdout) == (protocol.EXIT_INFRASTRUCTURE, "")
    assert len(done.stderr.splitlines()) == 1 and "host names do not resolve here" in done.stderr


def test_none_is_not_to_try(solo: Solo) -> None:
    (solo.directory / "hosts").write_text("10.9.8.7 peer-0.team\n")
    done = solo.run("grep -c peer-0 /etc/hosts", f"--hosts-file={solo.directory}/hosts", f"--hosts-means={NONE}")
    assert (done.returncode, done.stderr, solo.log()) == (1, b"", b"0\n")


def test_a_file_that_comes_late_is_seen_when_it_comes(solo: Solo) -> None:
    process = solo.start(
        "until grep peer-0 /etc/hosts; do sleep 0.1; done", f"--hosts-file={solo.directory}/hosts", "--hosts-means=auto"
    )
    eventually(lambda: (solo.directory / "logs" / "run.log").exists())
    write_in_place(str(solo.directory / "hosts"), b"10.9.8.7 peer-0.team\n")
    process.communicate(timeout=20)
    assert (process.returncode, solo.log()) == (0, b"10.9.8.7 peer-0.team\n")


def test_a_name_cache_does_not_answer_from_the_nodes_own_file(solo: Solo) -> None:
    """nscd's socket: the C library would ask it first, and believe that there is no such name."""
    if os.geteuid():
        pytest.skip("not root")
    (solo.directory / "hosts").write_text("10.9.8.7 peer-0.team\n")
    listen = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    before = f"mount -t tmpfs none /run; mkdir /run/nscd; {sys.executable} -c '{listen}' /run/nscd/socket; exec \"$@\""
    script = f"test -S /run/nscd/socket && echo asked; {LOOKED_UP}"
    argv = solo.argv(script, f"--hosts-file={solo.directory}/hosts", f"--hosts-means={NAMESPACE}")
    around = ["unshare", "--mount", "--net", "sh", "-ec", before, "sh"]
    done = subprocess.run([*around, *argv], env=solo.environ(), cwd=solo.directory, capture_output=True, timeout=60)
    assert (done.returncode, solo.log()) == (0, b"10.9.8.7\n"), done.stderr


# --- flags, and what others pay


def test_a_means_that_does_not_exist_is_one_clear_line() -> None:
    flags = ["--log-dir=/l", "--cluster-num-nodes=1", "--cluster-ips=n1", "--script=true", "--hosts-means=dns"]
    with pytest.raises(UsageError, match="--hosts-means='dns' is none of auto, required, namespace, nss_wrapper, none"):
        parse(flags)


@pytest.mark.parametrize("flags", [(), ("--hosts-file=/nonexistent",)], ids=["without", "with"])
def test_who_has_no_peers_loads_nothing_for_them(solo: Solo, flags: tuple[str, ...]) -> None:
    argv = solo.argv("true", *flags)
    argv[1:1] = ["-X", "importtime"]
    done = subprocess.run(argv, env=solo.environ(), cwd=solo.directory, capture_output=True, text=True, timeout=60)
    loaded = [line.split("|")[-1].strip() for line in done.stderr.splitlines()]
    assert ("executor.hostnames" in loaded) == ("ctypes" in loaded) == bool(flags), loaded
