"""What the fault suite shares: a cluster, and the table of what was tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from testbed.nats_cluster import NatsCluster
from testbed.text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """Three servers that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes rows of the table that the suite prints: what was tried, and what was lost and repeated."""

    def add(*row: Any) -> None:
        request.node.user_properties.append(("tried", row))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # From the reports, since in a parallel run the tests are in other processes.
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    if rows := [row for report in reports for name, row in report.user_properties if name == "tried"]:
        terminalreporter.section("kill -9 during a redrive, then run again")
        headings = ("protocol", "run again", "workers", "killed instead of", "tries", "jobs lost", "jobs repeated")
        terminalreporter.write_line(text_table(headings, sorted(rows)))
