"""The `fault` fixture: names the row of a test, and publishes it when the test has passed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.rows import Row, publish
from tests.minislurm.cluster import Cluster

Fault = Callable[[str], Row]


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """`row = fault("driver killed with -9")`; its kind is the module's `KIND`."""
    rows: list[Row] = []

    def name(words: str) -> Row:
        rows.append(Row(request.module.KIND, words))
        return rows[-1]

    yield name
    report = request.node.stash.get(REPORT_KEY, None)
    if report is not None and report.passed:
        for row in rows:
            assert row.seen, f"the row of {request.node.nodeid} was never filled"
            publish(row, request.node.nodeid, _short(row.version) or _version(request))


REPORT_KEY: pytest.StashKey[pytest.TestReport] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[REPORT_KEY] = report
    return report


def _version(request: pytest.FixtureRequest) -> str:
    for name in ("bench", "cluster"):
        if name in request.fixturenames:
            found = request.getfixturevalue(name)
            cluster: Cluster = getattr(found, "cluster", found)
            return _short(cluster.slurm_version)
    return "none"


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
