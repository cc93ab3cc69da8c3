"""Fixtures of the fault suite: a cluster, and the table of the redrives that were killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from testbed.nats_cluster import NatsCluster
from testbed.text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_FOLDER = f"{Path(__file__).parent}/"
_ROW = "killed redrive"
_MIX = "mix of killed redrives"


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """A cluster of three servers that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


@pytest.fixture
def add_row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that adds a row to the table which the suite prints at its end."""

    def add(*row: Any) -> None:
        request.node.user_properties.append((_ROW, row))

    return add


@pytest.fixture
def add_mix(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that adds a row to the table of mixes."""

    def add(*row: Any) -> None:
        request.node.user_properties.append((_MIX, row))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Taken from the reports, since a parallel run has its tests in other processes.
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    if rows := [row for report in reports for name, row in report.user_properties if name == _ROW]:
        terminalreporter.section("kill -9 during a redrive, then run again")
        headings = ("protocol", "run again", "workers", "killed instead of", "runs", "jobs lost", "jobs repeated")
        terminalreporter.write_line(text_table(headings, sorted(rows)))
    if rows := [row for report in reports for name, row in report.user_properties if name == _MIX]:
        terminalreporter.section("redrives of several kinds at once, killed and run again by others")
        columns = ("mix", "run again", "redrives", "killed", "jobs lost", "jobs repeated")
        terminalreporter.write_line(text_table(columns, sorted(rows)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(_FOLDER):
            item.add_marker("slow")
