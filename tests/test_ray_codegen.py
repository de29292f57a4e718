"""From the calls of an orchestrator to a driver for a Ray cluster; what it asks of the cluster, in pure words."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codegen import Bundle, CallOrderError, Job, RayCodeGen, Resources, SpecError, render_ray_driver
from codegen.ray import wish
from executor.protocol import GangrunError
from executor.ray_cluster import Node, needs, one_line, places, refuse_impossible, waiting_words
from tests.bench import eventually
from tests.test_codegen import ALL, FULL, GOLDEN, MINIMAL, calls, facts

RAY_FULL = dataclasses.replace(
    FULL,
    cluster_ips=("10.77.0.11", "10.77.0.12", "10.77.0.13"),
    slurm_job_id=None,
    resources=Resources(cpus=2, gpus=1),
)
NOBODY = "127.0.0.1:1"
RAY_DRIVERS = {"ray.py": RAY_FULL, "ray_minimal.py": Job(**MINIMAL, run="echo hello")}


# --- the calls


def test_the_four_calls_are_those_of_slurm() -> None:
    gen = calls(RayCodeGen(), *ALL)
    driver = gen.build()
    assert driver.startswith("#!/usr/bin/env python3\n") and "launch.reserve(BUNDLE)" in driver
    assert driver == gen.bundle().driver == calls(RayCodeGen(), *ALL).build()
    with pytest.raises(CallOrderError, match="add_setup"):
        calls(RayCodeGen(), "add_prologue", "add_task")


@pytest.mark.parametrize(
    "field, value",
    [
        ("slurm_job_id", "4711"),
        ("container_name", "sky"),
        ("warn_signal", "USR1@60"),
        ("launcher", "local"),
    ],
)
def test_what_only_slurm_has_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}='{value}': Ray has nothing like it"):
        render_ray_driver(Job(**MINIMAL, run="true", **{field: value}))


def test_a_ray_cluster_within_a_ray_cluster_is_refused() -> None:
    with pytest.raises(SpecError, match="^resources.ray: the job runs on a Ray cluster already"):
        render_ray_driver(Job(**MINIMAL, run="true", resources=Resources(ray=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("run, setup", [(None, None), ("", " \n\t"), ("true", None), (None, "true"), ("true", "true")])
def test_only_what_is_asked_for_is_started(tmp_path: Path, run: str | None, setup: str | None) -> None:
    known = facts(render_ray_driver(Job(**MINIMAL, run=run, setup=setup)), tmp_path)
    assert ("RUN_SCRIPT" in known, "SETUP_SCRIPT" in known) == (run == "true", setup == "true")


@pytest.mark.parametrize("name", RAY_DRIVERS)
def test_the_ray_drivers_text_is_as_it_was(name: str) -> None:
    text = (GOLDEN / name).read_text()
    assert render_ray_driver(RAY_DRIVERS[name]) == text, "run: python -m tests.test_ray_codegen"


# --- where there is no Ray, or no cluster


def written_driver(tmp_path: Path) -> tuple[str, dict[str, str]]:
    driver = Bundle(Job(**MINIMAL, run="true"), render_ray_driver(Job(**MINIMAL, run="true"))).write(str(tmp_path))
    return driver, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}


def fails_in_one_line(tmp_path: Path, *python: str, **variables: str) -> str:
    driver, environ = written_driver(tmp_path)
    environ.update(variables)
    done = subprocess.run([*python, driver], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=120)
    assert done.returncode == 125 and not done.stderr, done
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"gangrun: job 7 FAILED_DRIVER, exit code 125 after .* s", lines[0]) and len(lines) == 3
    return lines[1].removeprefix("gangrun: ")


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    words = fails_in_one_line(tmp_path, sys.executable, "-S")
    assert re.fullmatch(r"the driver failed: Ray is not installed in \S+ \(.*\): pip install 'ray\[default\]'", words)


def test_without_a_cluster_one_line_says_how_to_start_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make ray")
    alone = 'mkdir -p /tmp/ray; mount -t tmpfs none /tmp/ray; exec "$@"'
    words = fails_in_one_line(tmp_path, *"unshare -nmpf --mount-proc sh -c".split(), alone, "sh", sys.executable)
    assert words.startswith("the driver failed: no Ray cluster is running here; this runs on its head node, after `ray")


@pytest.mark.slow
def test_where_nothing_listens_the_driver_gives_up_after_a_minute(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make ray")
    words = fails_in_one_line(tmp_path, sys.executable, RAY_ADDRESS=NOBODY)
    assert words.startswith(f"the driver failed: no Ray cluster answers at RAY_ADDRESS={NOBODY}; this runs on")


def test_a_driver_that_looks_for_its_cluster_can_be_cancelled(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make ray")
    driver, environ = written_driver(tmp_path)
    argv, pipe = [sys.executable, driver], subprocess.PIPE
    environ["RAY_ADDRESS"] = NOBODY
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environ, cwd=tmp_path)
    eventually(lambda: "_raylet" in Path(f"/proc/{process.pid}/maps").read_text(), 30)
    time.sleep(1.0)  # for it to ask
    process.terminate()
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 143 and not errors, (output, errors)
    assert output.startswith("gangrun: job 7 CANCELLED, exit code 143 after ")


# --- what a node must have


def node(number: int, **total: float) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", f"host{number}", {"CPU": 4.0, **total})


@pytest.mark.parametrize(
    "resources, total, bundle",
    [
        ({"CPU": 2}, {}, {"CPU": 2}),
        ({"CPU": 2, "GPU": 1}, {"GPU": 8}, {"CPU": 2, "GPU": 1}),
        ({"H100": 2}, {"GPU": 8, "H100": 8}, {"CPU": 1, "H100": 2, "GPU": 2}),
        ({"H100": 2}, {"GPU": 8, "accelerator_type:H100": 1}, {"CPU": 1, "GPU": 2, "accelerator_type:H100": 0.001}),
        ({"h100": 2}, {"GPU": 8, "accelerator_type:H100": 1}, {"CPU": 1, "GPU": 2, "accelerator_type:H100": 0.001}),
        ({"TPU": 4}, {"TPU": 4}, {"CPU": 1, "TPU": 4}),
        ({"A100": 1}, {"GPU": 8}, {"CPU": 1, "A100": 1}),
    ],
    ids=["cpus", "gpus", "custom with gpus", "typed", "any case", "custom", "nobody has it"],
)
def test_an_accelerator_is_what_the_nodes_call_it(
    resources: dict[str, float], total: dict[str, float], bundle: dict[str, float]
) -> None:
    assert needs(wish(Resources.from_dict(resources)), [node(1), node(2, **total)]) == bundle


def test_what_no_node_can_ever_hold_is_told_with_what_the_nodes_have() -> None:
    nodes = [node(number, GPU=2) for number in (1, 2)]
    refuse_impossible({"CPU": 4, "GPU": 2}, nodes)
    words = (
        "no node of the Ray cluster can ever hold CPU 1, GPU 3: 10.0.0.1 has CPU 4, GPU 2; 10.0.0.2 has CPU 4, GPU 2"
    )
    with pytest.raises(GangrunError) as error:
        refuse_impossible({"CPU": 1, "GPU": 3}, nodes)
    assert str(error.value) == words
    with pytest.raises(GangrunError, match=r"; and 992 more$"):
        refuse_impossible({"CPU": 5}, [node(number) for number in range(1000)])


def test_a_waiting_job_says_which_nodes_lack_what() -> None:
    nodes = [node(1), node(2)]
    free = {"id1": {"CPU": 4.0}, "id2": {"CPU": 1.5}}
    assert waiting_words({"CPU": 2}, 2, nodes, free) == (
        "waiting for 2 nodes with CPU 2 each: 10.0.0.2 has CPU 1.5 free"
    )
    assert waiting_words({"CPU": 2}, 3, nodes, {}) == "waiting for 3 nodes with CPU 2 each: 2 nodes are alive"


# --- which node is which


def test_nodes_have_the_places_of_their_addresses_or_names(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(number) for number in (1, 2, 3)]
    assert places(nodes, ["10.0.0.3", "host1", "192.168.0.2"], {}) == {"id1": 1, "id3": 0}
    more = {"id2": ["10.0.0.2", "192.168.0.2"]}
    assert places(nodes, ["10.0.0.3", "host1", "192.168.0.2"], more) == {"id1": 1, "id2": 2, "id3": 0}
    with pytest.raises(GangrunError, match=r"two nodes answer to '10\.0\.0\.1' of cluster_ips; 10\.0\.0\.2 is one"):
        places(nodes, ["10.0.0.1"], {"id2": ["10.0.0.1"]})


def test_rays_words_become_one_line() -> None:
    text = "The actor died:\n\tclass_name: Relay\n\tactor_id: 12\n\nits node was  lost.\n"
    assert one_line(RuntimeError(text)) == "The actor died: its node was lost."
    assert len(one_line(RuntimeError("x" * 9999))) == 400


def _rewrite() -> None:
    for name, job in RAY_DRIVERS.items():
        (GOLDEN / name).write_text(render_ray_driver(job))


if __name__ == "__main__":
    _rewrite()
