"""What a rank minds on a node that it shares: whose GPUs its setup sees, and which ports are taken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from executor import protocol, sharing
from executor.shared import write_record
from tests.solo import Solo


def launch(tmp_path: Path, *records: tuple[str, str]) -> str:
    """A launch whose run step has these ranks: host and GPUs."""
    paths = protocol.Launch(str(tmp_path))
    Path(paths.records(is_setup=False)).mkdir()
    for rank, (host, gpus) in enumerate(records):
        write_record(paths.record(rank), {"host": host, "gpus": gpus})
    return str(tmp_path)


def seen(tmp_path: Path, step: str, visible: str, rank: int = 0, host: str = "n1") -> dict[str, str] | None:
    directory = launch(tmp_path, ("n1", "2,3"), ("n2", "0"))
    environ = {protocol.SLURM_STEP_GPUS: step, "CUDA_VISIBLE_DEVICES": visible, "ROCR_VISIBLE_DEVICES": visible}
    return sharing.own_gpus(environ, directory, 2, rank, host)


@pytest.mark.parametrize(
    "step, visible, expected",
    [
        ("0,1,2,3", "0,1,2,3", "2,3"),
        ("1,2,3", "0,1,2", "1,2"),  # numbered anew in each step
        ("0,1", "0,1", ""),  # of none of a peer's
        ("0,1,2", "0,1,2", "2"),
    ],
)
def test_setup_sees_the_gpus_of_the_run_step_by_its_own_numbers(
    tmp_path: Path, step: str, visible: str, expected: str
) -> None:
    assert seen(tmp_path, step, visible) == {"CUDA_VISIBLE_DEVICES": expected, "ROCR_VISIBLE_DEVICES": expected}


def test_a_rank_of_another_place_in_the_run_step_is_found_by_its_node(tmp_path: Path) -> None:
    assert seen(tmp_path, "0,1", "0,1", rank=0, host="n2") == {
        "CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0",
    }  # fmt: skip


def test_a_step_without_gpus_asks_nobody() -> None:
    assert sharing.own_gpus({"CUDA_VISIBLE_DEVICES": ""}, "/nowhere", 1, 0, "n1") == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_run_step_that_does_not_tell_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    environ = {protocol.SLURM_STEP_GPUS: "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert sharing.own_gpus(environ, launch(tmp_path), 1, 0, "n1", patience_s=0.2) is None
    assert sharing.no_gpus(environ) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "option, expected",
    [
        ("--gpus-per-node=2", "--gpus-per-node=8"),
        ("--gpus-per-node=h100:2", "--gpus-per-node=h100:8"),
        ("--gpus-per-node=0", "--gpus-per-node=0"),
        ("--nodes=2", "--nodes=2"),
    ],
)
def test_a_step_that_asks_for_some_gpus_gets_the_jobs_of_the_node(option: str, expected: str) -> None:
    assert sharing.whole_node(["srun", option], "8") == ["srun", expected]
    assert sharing.whole_node(["srun", option], "") == ["srun", option]


@pytest.mark.parametrize("family, host", [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_that_is_listened_on_is_taken_and_no_other(family: int, host: str) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as server, socket.socket(family, socket.SOCK_STREAM) as bound:
        server.bind((host, 0))
        server.listen()
        bound.bind((host, 0))
        port, other = server.getsockname()[1], bound.getsockname()[1]
        assert sharing.taken_ports([other, port]) == [port]
    assert sharing.taken_ports([port]) == []


def test_a_taken_port_is_told_before_the_script_starts(solo: Solo) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        done = solo.run("echo ran", f"--ports=1,{port}", "--task-name=server")
    said = (done.stdout + done.stderr).decode()
    assert f"warning: port {port} of server is taken on" in said and "ran" in said and "port 1 " not in said


@pytest.mark.parametrize("text", ["x", "0", "65536", "8000,", "8000-8001"])
def test_what_is_no_port_is_refused(solo: Solo, text: str) -> None:
    done = solo.run("echo ran", f"--ports={text}")
    assert done.returncode == protocol.EXIT_USAGE and "use 1 to 65535, with commas" in done.stderr.decode()
