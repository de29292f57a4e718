"""A group's file and its Python form: what they may say, and where exactly they are wrong."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from codegen import Resources, SpecError
from codegen.yamlfile import read_all
from executor.ready import Probe
from gangrun.group import Group, Member, Ready, is_group_file
from gangrun.task import Slurm, Task

RL = """
# SkyPilot's files begin with a comment
---
# and mark the header
name: rlhf-math
execution: parallel
primary_tasks: [trainer]
termination_delay: {default: 30s, replay-buffer: 1m}
inter_connection: true
---
name: data-server
resources:
  cpus: 4
  memory: 16+
  infra: slurm
setup: |
  echo "---"
run: python data_server.py --port 8000
---
name: rollout-server
num_nodes: 2
resources:
  accelerators: H100:1
envs:
  MODEL_NAME: small
run: |
  python server.py --name rollout-server-0.${SKYPILOT_JOBGROUP_NAME}:30000

---
name: reward-server
resources:
  cpus: 8+
run: python reward_server.py
---
name: replay-buffer
resources:
  cpus: 4+
  memory: 32+
run: python replay_buffer.py
---
name: trainer
resources:
  accelerators: H100:8
num_nodes: 2
run: python trainer.py
"""
PARALLEL = "name: g\nexecution: parallel\n"


def group(directory: Path, text: str, **overrides: str) -> Group:
    (directory / "group.yaml").write_text(textwrap.dedent(text))
    return Group.from_file(str(directory / "group.yaml"), overrides)


def complaint(directory: Path, text: str, **overrides: str) -> str:
    """What is said about a group's file, after the file's name."""
    with pytest.raises(SpecError) as error:
        group(directory, text, **overrides)
    path, said = str(directory / "group.yaml:"), str(error.value)
    assert said.startswith(path) and "\n" not in said
    return said[len(path) :]


def file(header: str, *tasks: str) -> str:
    """A parallel group; the header's own two lines are 1 and 2."""
    return "\n---\n".join([(PARALLEL + header).rstrip(), *(tasks or ("name: a",))])


def refusal(**arguments: Any) -> str:
    """What is said to a program."""
    with pytest.raises(SpecError) as error:
        Group(**{"name": "g", "tasks": [Task("a"), Task("b")], **arguments})
    return str(error.value)


# --- what a file may say


def test_skypilots_shape_of_a_group_is_read_unchanged(tmp_path: Path) -> None:
    found = group(tmp_path, RL)
    assert (found.name, found.is_parallel, found.inter_connection, found.num_nodes) == ("rlhf-math", True, True, 7)
    assert [(member.name, member.task.num_nodes, member.is_primary) for member in found.members] == [
        ("data-server", 1, False),
        ("rollout-server", 2, False),
        ("reward-server", 1, False),
        ("replay-buffer", 1, False),
        ("trainer", 2, True),
    ]
    assert [member.termination_delay_s for member in found.members] == [30, 30, 30, 60, None]
    assert found.member("trainer").task.resources == Resources(gpus=8, gpu_type="H100")
    assert found.member("data-server").task.setup == 'echo "---"\n'
    assert found.member("rollout-server").task.envs == {"MODEL_NAME": "small"}
    assert (found.stops_on_primary_failure, found.placement, found.is_homogeneous) == (True, "separate", False)


FULL = """
name: g
execution: parallel
primary_tasks: [client]
termination_delay: 10
inter_connection: false
on_primary_failure: continue
placement: shared
slurm:
  time: 4h
  partition: gpu
  requeue: false
  constraint: h100
  grace: 20s
---
name: server
ready: {http: ":8000/health", timeout: 5m}
max_restarts: 3
slurm: {grace: 1m}
---
name: client
after: [server, server]
slurm: {constraint: h200}
"""


def test_a_full_file_is_read(tmp_path: Path) -> None:
    found = group(tmp_path, FULL)
    server, client = found.members
    assert (found.inter_connection, found.stops_on_primary_failure, found.placement) == (False, False, "shared")
    assert server.ready == Ready(http=":8000/health", timeout_s=300) and server.max_restarts == 3
    assert (server.is_primary, server.termination_delay_s, server.after) == (False, 10, ())
    assert (client.is_primary, client.termination_delay_s, client.after) == (True, None, ("server",))
    assert (client.ready, client.max_restarts) == (None, 0)
    assert found.slurm == Slurm(time=4 * 3600, partition="gpu", requeue=False, constraint="h100", grace=20)


def test_each_task_asks_for_what_the_header_asks_for_unless_it_says_its_own(tmp_path: Path) -> None:
    found = group(tmp_path, FULL)
    server, client = (member.task for member in found.members)
    assert server.slurm == dataclasses.replace(found.slurm, grace=60)
    assert client.slurm == dataclasses.replace(found.slurm, constraint="h200")


def test_a_task_knows_whether_it_or_the_header_asked(tmp_path: Path) -> None:
    sources, path = group(tmp_path, FULL).member("server").task.sources, tmp_path / "group.yaml"
    assert (sources["time"], sources["grace"]) == (f"{path}:10", f"{path}:19")


def test_everything_has_a_default(tmp_path: Path) -> None:
    found = group(tmp_path, file(""))
    assert found.members == (Member(Task("a")),)
    assert (found.inter_connection, found.stops_on_primary_failure, found.placement) == (None, True, "separate")


@pytest.mark.parametrize("header", ["", "primary_tasks:\n", "primary_tasks: []\n", "termination_delay: 30s\n"])
def test_without_primaries_all_are(tmp_path: Path, header: str) -> None:
    found = group(tmp_path, file(header, "name: a", "name: b"))
    assert [(member.is_primary, member.termination_delay_s) for member in found.members] == [(True, None)] * 2


@pytest.mark.parametrize("header", ["name: g", "name: g\nexecution: serial", "name: g\nexecution:"])
def test_without_execution_a_group_is_a_pipeline(tmp_path: Path, header: str) -> None:
    found = group(tmp_path, header + "\n---\nname: a\nnum_nodes: 3\n---\nname: b\nnum_nodes: 2\nmax_restarts: 1\n")
    assert not found.is_parallel and [member.name for member in found.members] == ["a", "b"]
    assert found.num_nodes == 3


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("30s", 30), ("30", 30), ("'30'", 30), ("0", 0), ("0s", 0), ("5m", 300), ("5M", 300), ("1h", 3600),
        ("1d", 86400), ("1w", 604800), ("1m30s", 90), ("{default: 1m}", 60), ("{aux: 1m}", 60),
        ("{aux: 1m, default: 5}", 60),
        ("{prim: 1m}", None), ("{}", None), ("", None),
    ],
)  # fmt: skip
def test_a_delay_is_what_skypilot_or_we_take_for_a_time(tmp_path: Path, text: str, seconds: int | None) -> None:
    header = f"primary_tasks: [prim]\ntermination_delay: {text}"
    found = group(tmp_path, file(header, "name: aux", "name: prim"))
    assert found.member("aux").termination_delay_s == seconds


def test_a_primary_has_a_delay_only_where_it_is_named(tmp_path: Path) -> None:
    header = "primary_tasks: [a, b]\ntermination_delay: {a: 10s, default: 20s}"
    found = group(tmp_path, file(header, "name: a", "name: b", "name: c"))
    assert [member.termination_delay_s for member in found.members] == [10, None, 20]


@pytest.mark.parametrize(
    "text, probe",
    [
        ("{port: 8000}", ("port", 8000)),
        ("{http: ':8000'}", ("http", ":8000")),
        ("\n  http: :8000/health?a=1", ("http", ":8000/health?a=1")),
        ("{http: 'http://n1.lab:8000'}", ("http", "http://n1.lab:8000")),
        ("{http: 'http://n1:80/'}", ("http", "http://n1:80/")),
        ("{log: 'listening on (.*)', port: }", ("log", "listening on (.*)")),
        ("{command: test -e up}", ("command", "test -e up")),
    ],
)
def test_a_task_is_ready_by_one_probe(tmp_path: Path, text: str, probe: tuple[str, object]) -> None:
    ready = group(tmp_path, file("", f"name: a\nready: {text}")).members[0].ready
    assert ready is not None and (ready.probe, ready.timeout_s) == (probe, 600)
    assert ready.to_dict() == {probe[0]: probe[1], "timeout_s": 600}
    Probe(ready.to_dict(), "a", ["127.0.0.1"], "output").close()  # whoever asks takes it


def test_after_takes_one_name_or_several(tmp_path: Path) -> None:
    tasks = ["name: %s\nready: {port: 1}\nafter: %s" % pair for pair in (("a", "c"), ("b", "[a, c]"), ("c", "[]"))]
    assert [member.after for member in group(tmp_path, file("", *tasks)).members] == [("c",), ("a", "c"), ()]


def test_variables_given_with_the_command_go_to_every_task(tmp_path: Path) -> None:
    found = group(tmp_path, file("", "name: a\nenvs: {X: 1, Y: }", "name: b"), X="2", Y="3")
    assert [member.task.envs for member in found.members] == [{"X": "2", "Y": "3"}] * 2


def test_secrets_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t")
    found = group(tmp_path, file("", "name: a\nsecrets: {TOKEN: }", "name: b"))
    assert [member.task.secrets for member in found.members] == [{"TOKEN": "s3cr3t"}, {}]


def test_tasks_on_shared_nodes_need_the_nodes_of_the_largest(tmp_path: Path) -> None:
    tasks = ("name: a\nnum_nodes: 3", "name: b\nnum_nodes: 2")
    assert group(tmp_path, file("placement: shared", *tasks)).num_nodes == 3
    assert group(tmp_path, file("placement: separate", *tasks)).num_nodes == 5


@pytest.mark.parametrize(
    "text, is_homogeneous",
    [
        ("", True),
        ("num_nodes: 2\nslurm: {grace: 1m}", True),
        ("resources: {cpus: 2}", False),
        ("resources: {memory: 2}", False),
        ("resources: {accelerators: H100}", False),
        ("slurm: {constraint: h100}", False),
        ("slurm: {constraint: ib}", True),
    ],
)
def test_tasks_are_alike_when_their_nodes_are(tmp_path: Path, text: str, is_homogeneous: bool) -> None:
    found = group(tmp_path, file("slurm: {constraint: ib}", "name: a", f"name: b\n{text}"))
    assert found.is_homogeneous == is_homogeneous


def test_a_task_is_found_by_name_and_by_index(tmp_path: Path) -> None:
    found = group(tmp_path, RL)
    assert found.member("trainer") is found.member(4) is found.member("4") is found.members[4]
    for which in ("Trainer", 5, -1, "-1", ""):
        with pytest.raises(SpecError, match="in group rlhf-math; its tasks are 0 data-server, 1 rollout-server, 2 rew"):
            found.member(which)


@pytest.mark.parametrize("name", ["a", "A", "7b", "1-2", "x" * 61, "a--b"])
def test_a_name_is_a_part_of_a_host_name(tmp_path: Path, name: str) -> None:
    assert group(tmp_path, file("", f"name: {name}")).members[0].name == name
    assert group(tmp_path, f"name: {name}\n---\nname: a\n").name == name


def test_a_hundred_tasks_are_not_too_many(tmp_path: Path) -> None:
    assert len(group(tmp_path, file("", *(f"name: t{number}" for number in range(100)))).members) == 100


# --- where a file is wrong: line, key, value, what is allowed


HEADER = (
    "name, execution, primary_tasks, termination_delay, inter_connection, on_primary_failure, placement, node, "
    "spare_nodes, slurm"
)
SERIAL = ": execution is serial, as without it, so tasks run one after the other; use parallel, or leave this out"
NAME = "letters, digits and hyphens, no hyphen first or last, not digits alone (it is a part of host names)"
QUOTED = "use a text, in quotes where YAML takes it for something else: " + NAME
ONE_JOB = ": a group is one Slurm job; say it in the group's own slurm (of a file: the header's)"
TIMES = "use a number of seconds, or 30s, 5m, 1h, 1d"
SLURM_KEYS = "time, partition, account, qos, constraint, sbatch_args, requeue, warn_signal, grace"
PROBE = "use exactly one of port, http, log, command; found "
URLS = "use ':8000/health' or 'http://host:8000/health'"


@pytest.mark.parametrize(
    "text, said",
    [
        ("execution: parallel\n---\nname: a", "1: a group's header needs a name"),
        ("\n# x\nname:\n---\nname: a", "3: a group's header needs a name"),
        ("name: g\nexecution: Parallel\n---\nname: a", "2: execution='Parallel': use parallel or serial"),
        ("name: g\nexecution: true\n---\nname: a", "2: execution=True: use parallel or serial"),
        ("name: g\nnodes: 2\n---\nname: a", f"2: unknown key 'nodes' in group's header; allowed are {HEADER}"),
        (
            "name: a\nrun: x\n---\nname: b",
            f"2: run belongs to a task; a group's file begins with a header, which has {HEADER}",
        ),
        (
            "name: g\nready: {port: 1}\n---\nname: b",
            f"2: ready belongs to a task; a group's file begins with a header, which has {HEADER}",
        ),
        (PARALLEL, "1: tasks: a group has 1 to 100 tasks, found 0"),
        ("", "1: the file is empty; a group is a header and its tasks, with --- between them"),
        ("name: g\n---\n---\nname: a", "3: document 2 is empty; a task is a mapping of keys to values"),
        ("name: g\n---\n# only a comment\n", "4: document 2 is empty; a task is a mapping of keys to values"),
        ("---\n---\nname: g", "2: document 1 is empty; a group's header is a mapping of keys to values"),
        ("name: g\n---\nname: a\n---\n- b", "5: document 3 is no mapping; a task is a mapping of keys to values"),
        ("name: g\n---\nname: a\n---\nname: [", "5: not valid YAML"),
        ("name: g\n---\nname: a\nname: b", "4: key 'name' stands here again (first in line 3)"),
        ("name: g\nname: h\n---\nname: a", "2: key 'name' stands here again (first in line 1)"),
        (
            "\nname: g\n---\nname: h\nexecution: parallel\n---\nname: a",
            "5: execution belongs to the header, the first document (line 2); this one is a task",
        ),
        ("name: g\n---\n# nobody\nrun: x\nsetup: y", "4: a task of a group needs a name"),
        ("name: g\n---\nname: a\n---\nsetup: y\nname:", "6: a task of a group needs a name"),
        ("name: g\n---\nname: a\nnum_node: 2", "4: unknown key 'num_node' in task; allowed are name, num_nodes, reso"),
        (
            "name: g\nexecution: parallel\nspare_nodes: 4294967296\n---\nname: a\nrun: b",
            "3: spare_nodes=4294967296: no Slurm has more than 65536 nodes",
        ),
        ("name: g\n---\nname: a\nnum_nodes: 0", "4: num_nodes=0: use a whole number of 1 or more"),
        ("name: g\n---\nname: a\n---\nname: b\nenvs:\n  X:", "7: envs: X has no value; give one here or with --env X="),
    ],
)
def test_a_complaint_about_documents_names_the_line(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, text).startswith(said)


@pytest.mark.parametrize(
    "header, said",
    [
        ("primary_tasks: trainer", "3: primary_tasks='trainer': use a list of task names"),
        ("primary_tasks: [1]", "3: primary_tasks=[1]: use a list of task names"),
        ("primary_tasks: {a: b}", "3: primary_tasks={'a': 'b'}: use a list of task names"),
        ("primary_tasks: [a, x]", "3: primary_tasks: there is no task 'x'; use a, b"),
        ("primary_tasks: [A]", "3: primary_tasks: there is no task 'A'; use a, b"),
        ("termination_delay: soon", f"3: termination_delay='soon': {TIMES}"),
        ("termination_delay: -1", f"3: termination_delay=-1: {TIMES}"),
        ("termination_delay: 1.5", f"3: termination_delay=1.5: {TIMES}"),
        ("termination_delay: true", f"3: termination_delay=True: {TIMES}"),
        ("termination_delay: [30s]", f"3: termination_delay=['30s']: {TIMES}"),
        ("termination_delay: 4000d", f"3: termination_delay='4000d': {TIMES}"),
        ("termination_delay:\n  default: 1m\n  a: 5y", f"5: termination_delay.a='5y': {TIMES}"),
        ("termination_delay:\n  a:", f"4: termination_delay.a=None: {TIMES}"),
        (
            "termination_delay:\n  a: 1m\n  x: 5s",
            "5: termination_delay.x: there is no task 'x'; use a, b, or default for all others",
        ),
        (
            "termination_delay: {7: 5s}",
            "3: termination_delay.7: there is no task 7; use a, b, or default for all others",
        ),
        ("inter_connection: 'yes'", "3: inter_connection='yes': use true or false"),
        ("inter_connection: 1", "3: inter_connection=1: use true or false"),
        ("on_primary_failure: ignore", "3: on_primary_failure='ignore': use stop or continue"),
        ("on_primary_failure: [stop]", "3: on_primary_failure=['stop']: use stop or continue"),
        ("placement: SAME_INFRA", "3: placement='SAME_INFRA': use separate or shared"),
        ("slurm: gpu", "3: slurm='gpu': use a mapping"),
        ("slurm:\n  time: 90", "4: time=90: a number has no unit; use 90s or 90m"),
        ("slurm:\n  walltime: 4h", f"4: unknown key 'walltime' in slurm; allowed are {SLURM_KEYS}"),
    ],
)
def test_a_complaint_about_the_header_names_line_key_value_and_what_is_allowed(
    tmp_path: Path, header: str, said: str
) -> None:
    assert complaint(tmp_path, file(header, "name: a", "name: b")) == said


@pytest.mark.parametrize(
    "name, said",
    [
        ("my_group", f"'my_group': use {NAME}"),
        ("-a", f"'-a': use {NAME}"),
        ("a-", f"'a-': use {NAME}"),
        ("a.b", f"'a.b': use {NAME}"),
        ("'a b'", f"'a b': use {NAME}"),
        ("训练组", f"'训练组': use {NAME}"),
        ("'2024'", f"'2024': use {NAME}"),
        ("'0'", f"'0': use {NAME}"),
    ],
)
def test_a_name_that_no_host_can_have_is_refused(tmp_path: Path, name: str, said: str) -> None:
    assert complaint(tmp_path, f"\nname: {name}\n---\nname: a") == f"2: name={said}"
    assert complaint(tmp_path, f"name: g\n---\nname: {name}") == f"3: name={said}"


@pytest.mark.parametrize(
    "text, said",
    [
        ("name: 2024\n---\nname: a", f"1: name=2024: {QUOTED}"),
        ("name: on\n---\nname: a", f"1: name=True: {QUOTED}"),
        ("name: 2024-01-01\n---\nname: a", f"1: name=datetime.date(2024, 1, 1): {QUOTED}"),
        ("name: g\n---\nname: 7", f"3: name='7': use {NAME}"),
        ("name: ''\n---\nname: a", f"1: name='': use {NAME}"),
        ('name: "a\\n"\n---\nname: a', f"1: name='a\\n': use {NAME}"),
        ("name: Localhost\n---\nname: a", "1: name='Localhost': all host names in it would be this machine's own"),
        (
            f"name: {'x' * 64}\n---\nname: a",
            f"1: name='{'x' * 64}': use at most 63 characters (it is a part of host nam",
        ),
        (
            f"name: g\n---\nname: {'x' * 62}",
            f"3: name='{'x' * 62}': use at most 61 characters (it is a part of host nam",
        ),
        (
            f"name: g\n---\nname: {'x' * 61}\nnum_nodes: 11",
            f"3: name='{'x' * 61}': use at most 60 characters (it is a p",
        ),
        ("name: g\n---\nname: a\n---\nrun: x\nname: a", "6: name='a': two tasks have this name"),
        ("name: g\n---\nname: a\n---\nname: A", "5: name='A': a is the same in host names, which have no capitals"),
    ],
)
def test_names_are_text_short_enough_and_one_of_a_kind(tmp_path: Path, text: str, said: str) -> None:
    assert complaint(tmp_path, text).startswith(said)


@pytest.mark.parametrize(
    "task, said",
    [
        ("ready: 8000", "5: ready=8000: use a mapping such as {port: 8000}"),
        ("ready: {}", f"5: ready: {PROBE}none"),
        ("ready:\n  timeout: 5m", f"5: ready: {PROBE}none"),
        ("ready: {port: 1, log: x}", f"5: ready: {PROBE}port and log"),
        ("ready:\n  prt: 1", "6: unknown key 'prt' in ready; allowed are port, http, log, command, timeout"),
        ("ready:\n  port: 0", "6: ready.port=0: use a port, 1 to 65535"),
        ("ready:\n  port: 65536", "6: ready.port=65536: use a port, 1 to 65535"),
        ("ready:\n  port: '80'", "6: ready.port='80': use a port, 1 to 65535"),
        ("ready:\n  port: yes", "6: ready.port=True: use a port, 1 to 65535"),
        ("ready:\n  http: /health", f"6: ready.http='/health': {URLS}"),
        ("ready:\n  http: ':0/health'", f"6: ready.http=':0/health': {URLS}"),
        ("ready:\n  http: https://n1:8000", f"6: ready.http='https://n1:8000': {URLS}"),
        ("ready:\n  http: ':80/a b'", f"6: ready.http=':80/a b': {URLS}"),
        ("ready:\n  http: http://n1/health", f"6: ready.http='http://n1/health': {URLS}"),
        ("ready:\n  http: ':80/a#b'", f"6: ready.http=':80/a#b': {URLS}"),
        ("ready:\n  http: 8000", f"6: ready.http=8000: {URLS}"),
        ("ready:\n  log: '('", "6: ready.log='(': use a regular expression (missing ), unterminated subpattern at pos"),
        (
            "ready:\n  log: (?u)x",
            "6: ready.log='(?u)x': use a regular expression (bad inline flags",
        ),
        ("ready:\n  log: ''", "6: ready.log='': use a regular expression"),
        ("ready:\n  log: 7", "6: ready.log=7: use a regular expression"),
        ("ready:\n  command: ' '", "6: ready.command=' ': use a bash script"),
        ("ready:\n  command: [curl, x]", "6: ready.command=['curl', 'x']: use a bash script"),
        ("ready:\n  port: 1\n  timeout: 0", f"7: ready.timeout=0: {TIMES}, more than 0"),
        ("ready:\n  port: 1\n  timeout: never", f"7: ready.timeout='never': {TIMES}, more than 0"),
        ("max_restarts: -1", "5: max_restarts=-1: use a whole number, 0 or more"),
        ("max_restarts: many", "5: max_restarts='many': use a whole number, 0 or more"),
        ("max_restarts: true", "5: max_restarts=True: use a whole number, 0 or more"),
        ("after: 7", "5: after=7: use a list of task names"),
        ("after: [[b]]", "5: after=[['b']]: use a list of task names"),
        ("after: [x]", "5: after: there is no task 'x'; use a, b"),
        ("after: a", "5: after: a cannot wait for itself"),
        ("after: [b]", "5: after: b does not say when it is ready; give it `ready`, such as {port: 8000}"),
        (
            "primary: true",
            "5: unknown key 'primary' in task; allowed are name, num_nodes, resources, envs, secrets, wo",
        ),
        ("slurm:\n  time: 4h", f"6: slurm.time{ONE_JOB}"),
        ("slurm:\n  grace: 4s\n  partition: gpu", f"7: slurm.partition{ONE_JOB}"),
        ("slurm: {account: a}", f"5: slurm.account{ONE_JOB}"),
        ("slurm: {qos: a}", f"5: slurm.qos{ONE_JOB}"),
        ("slurm: {sbatch_args: [--exclusive]}", f"5: slurm.sbatch_args{ONE_JOB}"),
        ("slurm: {warn_signal: USR1@60}", f"5: slurm.warn_signal{ONE_JOB}"),
        ("slurm: {requeue: false}", f"5: slurm.requeue{ONE_JOB}"),
        ("slurm: {requeue: true}", f"5: slurm.requeue{ONE_JOB}"),
    ],
)
def test_a_complaint_about_a_task_names_line_key_value_and_what_is_allowed(
    tmp_path: Path, task: str, said: str
) -> None:
    assert complaint(tmp_path, file("", f"name: a\n{task}", "name: b")).startswith(said)


@pytest.mark.parametrize(
    "after, said",
    [
        ({"a": "b", "b": "a"}, "a -> b -> a"),
        ({"b": "c", "c": "d", "d": "b"}, "b -> c -> d -> b"),
        ({"a": "b", "b": "c", "c": "b"}, "b -> c -> b"),
        ({"a": "b, c", "c": "a"}, "a -> c -> a"),
    ],
)
def test_tasks_that_wait_for_one_another_are_told_as_a_circle(tmp_path: Path, after: dict[str, str], said: str) -> None:
    tasks = [f"name: {name}\nready: {{port: 1}}\nafter: [{after.get(name, '')}]" for name in "abcd"]
    line = 6 + 4 * "abcd".index(said[0])
    assert complaint(tmp_path, file("", *tasks)) == f"{line}: after: {said} is a circle; none of them could start"


@pytest.mark.parametrize(
    "key, text",
    [
        ("primary_tasks", "[a]"),
        ("termination_delay", "30s"),
        ("inter_connection", "false"),
        ("on_primary_failure", "continue"),
        ("placement", "shared"),
    ],
)
def test_a_pipeline_has_nothing_of_a_parallel_group(tmp_path: Path, key: str, text: str) -> None:
    assert complaint(tmp_path, f"name: g\n{key}: {text}\n---\nname: a") == f"2: {key}{SERIAL}"


def test_tasks_of_a_pipeline_do_not_wait_for_one_another(tmp_path: Path) -> None:
    start = "name: g\nexecution: serial\n---\nname: a\n---\nname: b\n"
    assert complaint(tmp_path, start + "after: [a]") == f"7: after{SERIAL}"
    assert complaint(tmp_path, start + "ready: {port: 80}") == f"7: ready{SERIAL}"


def test_a_hundred_and_one_tasks_are_too_many(tmp_path: Path) -> None:
    text = file("", *(f"name: t{number}" for number in range(101)))
    assert complaint(tmp_path, text) == "1: tasks: a group has 1 to 100 tasks, found 101"


def test_a_task_called_default_and_a_default_delay_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    said = "3: termination_delay.default: a task is called so, too; give it another name"
    assert complaint(tmp_path, file("termination_delay: {default: 1m}", "name: default")) == said
    assert group(tmp_path, file("termination_delay: 1m", "name: default")).members[0].name == "default"


def test_a_secrets_value_is_in_no_complaint(tmp_path: Path) -> None:
    for text in ("secrets:\n  A B: s3cr3t", "secrets: s3cr3t", "secrets: {A: s3cr3t}\nmax_restarts: -1"):
        assert "s3cr3t" not in complaint(tmp_path, file("", f"name: a\n{text}"))
    assert "s3cr3t" not in refusal(tasks=(task for task in [Task("a", secrets={"A": "s3cr3t"})]))
    assert "s3cr3t" not in refusal(tasks=[Task("a", secrets={"A": "s3cr3t"}), "b"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing.yaml: No such file or directory"):
        Group.from_file(str(tmp_path / "nothing.yaml"))


# --- which files are groups


@pytest.mark.parametrize(
    "text",
    [
        "", "\n",
        "name: a\n", "---\nname: a\n", "# x\n---\nname: a\n", "\n---\n\nname: a\n", "%YAML 1.1\n---\nname: a\n",
        "name: a\n---\n", "name: a\n---", "---\nname: g\n---\nname: a\n", "# x\n--- # y\nname: g\n--- # z\nname: a\n",
        "---\n---\nname: a\n", "name: a\nrun: |\n  x\n  ---\n  y\n", "run: 'a --- b'\n", "---\nname: a\n...\n",
        "name: g\n...\n---\nname: a\n", "name: a\n---b: c\n", "\ufeff---\nname: a\n", "\ufeffname: g\n---\nname: a\n",
        "name: g\r\n---\r\nname: a\r\n",
    ],
)  # fmt: skip
def test_a_file_of_more_than_one_document_is_a_group(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.yaml").write_bytes(text.encode())
    assert is_group_file(str(tmp_path / "file.yaml")) == (len(list(yaml.compose_all(text))) > 1)


def test_what_cannot_be_read_is_no_group(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\x00")
    assert not any(is_group_file(str(tmp_path / name)) for name in ("nothing.yaml", "bytes.yaml", ""))


def test_each_document_knows_its_own_lines(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("# x\n---\na: 1\n---\n\nb:\n  c: 2\n")
    first, second = read_all(str(tmp_path / "file.yaml"), "first", "other")
    assert [(first.name, first.line, first.lines), (second.name, second.line, second.lines)] == [
        ("first", 3, {"a": 3}),
        ("other", 6, {"b": 6}),
    ]
    assert (second.nested["b"].line, second.nested["b"].lines) == (7, {"c": 7})


# --- groups made by a program


def test_a_program_says_the_same_as_a_file(tmp_path: Path) -> None:
    made = Group(
        "g",
        tasks=[Task("server", slurm=Slurm(grace=60)), Task("client", slurm=Slurm(constraint="h200"))],
        primary=["client"],
        termination_delay=10,
        inter_connection=False,
        on_primary_failure="continue",
        placement="shared",
        slurm=Slurm(time=4 * 3600, partition="gpu", requeue=False, constraint="h100", grace=20),
        ready={"server": Ready(http=":8000/health", timeout_s=300)},
        after={"client": "server"},
        max_restarts={"server": 3},
    )
    assert made.members == group(tmp_path, FULL).members


def test_a_program_s_group_is_parallel_unless_it_says_otherwise() -> None:
    assert Group("g", [Task("a")]).is_parallel and not Group("g", [Task("a")], execution="serial").is_parallel


def test_a_group_made_of_another_is_checked_anew() -> None:
    made = Group("g", [Task("a"), Task("b")], primary=("a",))
    again = dataclasses.replace(made, primary=["b"])
    assert [member.is_primary for member in again.members] == [False, True]
    with pytest.raises(SpecError, match="primary: there is no task 'c'; use a, b"):
        dataclasses.replace(made, primary=["c"])


def test_a_program_may_give_a_timeout_as_text() -> None:
    assert Ready(port=80, timeout_s="10m") == Ready(port=80)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"name": 7}, f"name=7: {QUOTED}"),
        ({"name": None}, f"name=None: {QUOTED}"),
        ({"tasks": []}, "tasks: a group has 1 to 100 tasks, found 0"),
        ({"tasks": Task("a")}, "tasks: use a list of tasks"),
        ({"tasks": ["a"]}, "tasks: use a list of tasks"),
        ({"tasks": [Task("a b")]}, f"task 'a b': name='a b': use {NAME}"),
        ({"tasks": [Task()] * 2}, "task 'task': name='task': two tasks have this name"),
        ({"tasks": [Task("a", slurm=Slurm(time=60))]}, f"task 'a': slurm.time{ONE_JOB}"),
        ({"tasks": [Task("a", slurm=Slurm(requeue=False))]}, f"task 'a': slurm.requeue{ONE_JOB}"),
        ({"primary": "a"}, "primary='a': use a list of task names"),
        ({"primary": None}, "primary=None: use a list of task names"),
        ({"primary": ["c"]}, "primary: there is no task 'c'; use a, b"),
        ({"termination_delay": "soon"}, f"termination_delay='soon': {TIMES}"),
        ({"execution": None}, "execution=None: use parallel or serial"),
        ({"execution": "serial", "primary": ["a"]}, f"primary{SERIAL}"),
        ({"inter_connection": 0}, "inter_connection=0: use true or false"),
        ({"slurm": {"time": 60}}, "slurm={'time': 60}: use a Slurm"),
        ({"ready": Ready(port=1)}, "ready=Ready(port=1, "),
        ({"ready": {"c": Ready(port=1)}}, "ready: there is no task 'c'; use a, b"),
        ({"ready": {"a": {"port": 1}}}, "task 'a': ready={'port': 1}: use a Ready"),
        ({"after": {"c": ["a"]}}, "after: there is no task 'c'; use a, b"),
        ({"after": {"a": ["c"]}}, "task 'a': after: there is no task 'c'; use a, b"),
        ({"max_restarts": 3}, "max_restarts=3: use a mapping of task names"),
        ({"max_restarts": {"a": 0.5}}, "task 'a': max_restarts=0.5: use a whole number, 0 or more"),
    ],
)
def test_a_program_is_told_the_argument_and_the_task(arguments: dict[str, Any], said: str) -> None:
    assert refusal(**arguments).startswith(said)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({}, f"ready: {PROBE}none"),
        ({"port": 1, "command": "x"}, f"ready: {PROBE}port and command"),
        ({"port": 1.0}, "ready.port=1.0: use a port, 1 to 65535"),
        ({"log": b"x"}, "ready.log=b'x': use a regular expression"),
        ({"command": "a\0b"}, "ready.command='a\\x00b': use a bash script"),
        ({"port": 1, "timeout_s": None}, f"ready.timeout_s=None: {TIMES}, more than 0"),
    ],
)
def test_a_probe_that_cannot_be_made_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        Ready(**arguments)
    assert str(error.value) == said
