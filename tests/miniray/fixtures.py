"""pytest fixtures `ray_bed` and `own_ray_bed`: load with `pytest_plugins = ["tests.miniray.fixtures"]`.

All workers of a session share one cluster of three nodes with two fake GPUs each, a dashboard and its job server. The
first that needs it boots it (12 s); the session takes it away. Tests take turns on it. Whatever uses these fixtures is
marked `ray`, and skipped with the reason where Ray is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pytest
from filelock import FileLock

from tests.miniray.bed import RayBed, missing
from tests.minislurm.fixtures import Session

SHARED_NODES = 3
SHARED_GPUS = 2
FIXTURES = {"ray_bed", "own_ray_bed", "shared_ray_bed"}


class BootRay(Protocol):
    """What `own_ray_bed` gives: boots a cluster that lives until the end of the test."""

    def __call__(self, **options: Any) -> RayBed: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ray: needs Ray; `make ray` installs it and runs these")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("ray")


@pytest.fixture(scope="session")
def shared_ray_bed(pytestconfig: pytest.Config) -> RayBed:
    """The session's cluster. Use `ray_bed`, which has it for one test alone."""
    if why := missing():
        pytest.skip(why)
    session = Session.of(pytestconfig)
    session.folder.mkdir(exist_ok=True)
    root = session.folder / "ray"
    with FileLock(str(session.folder / "ray-boot.lock")):
        if (root / "booted").exists():
            return RayBed.attach(root)
        bed = RayBed.boot(root, SHARED_NODES, gpus=SHARED_GPUS, dashboard=True)
        (root / "booted").touch()
        return bed


@pytest.fixture
def ray_bed(shared_ray_bed: RayBed, pytestconfig: pytest.Config) -> Iterator[RayBed]:
    """Three nodes with four CPUs and two fake GPUs each, for this test alone. Leave no job on it; a raylet that a test
    has killed is started again."""
    with FileLock(str(Session.of(pytestconfig).folder / "ray.lock")):
        shared_ray_bed.heal()
        yield shared_ray_bed


@pytest.fixture
def own_ray_bed(pytestconfig: pytest.Config) -> Iterator[BootRay]:
    """Boot a cluster for this test alone: `own_ray_bed(nodes=2, ...)` with what RayBed.boot takes."""
    if why := missing():
        pytest.skip(why)
    booted: list[RayBed] = []

    def boot(**options: Any) -> RayBed:
        booted.append(RayBed.boot(Session.of(pytestconfig).own_root(), **options))
        return booted[-1]

    yield boot
    for bed in booted:
        bed.down()
