"""What the fault suite shares: a cluster, and the table of what was tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from testbed.nats_cluster import NatsCluster
from testbed.table import table

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIED = pytest.StashKey[list[tuple[Any, ...]]]()


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    """Three servers that the test may kill and restart."""
    with NatsCluster() as servers:
        yield servers


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> list[tuple[Any, ...]]:
    """Rows of the table that the suite prints: protocol, circumstances, where it was killed, lost, repeated."""
    return request.config.stash.setdefault(TRIED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash.get(TRIED, []):
        terminalreporter.section("kill -9 during a redrive, then run again")
        headings = ("protocol", "run again", "workers", "killed instead of", "tries", "jobs lost", "jobs repeated")
        terminalreporter.write_line(table(headings, rows))
