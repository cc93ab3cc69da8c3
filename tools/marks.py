"""A pytest plugin: marks from fixtures, groups of tests that share what is slow to start, limits of time.

A test that uses the fixture ``airflow``, ``spark`` or ``browser`` has the mark of what the fixture starts. Tests with
the same of these marks run in one process, one after the other, and share it; so do tests of one ``group``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK_OF_FIXTURE = {"airflow": "airflow", "spark": "jvm", "browser": "browser"}
# What these start takes longer than a quick test may.
_SLOW_MARKS = ("airflow", "browser", "jvm", "registry", "nightly")
_GROUP_OF_MARK = {"browser": "page", "airflow": "Airflow", "jvm": "JVM"}
SHARED = frozenset(_GROUP_OF_MARK.values())

# Seconds after which a test is ended as failed, its fixtures included. They end a hang; they don't judge speed.
_LIMIT = 60
_LIMIT_OF_MARK = {"slow": 300, "jvm": 300, "browser": 600, "airflow": 600, "registry": 1200, "nightly": 3600}

# An unmarked test is part of `make test`, which has ten minutes for some six thousand.
_EXPECTED_SECONDS = 5
_NAMED_TESTS = 20

_TIME_USED = "not started: the time is used"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options with which continuous integration runs as many tests as fit its time."""
    group = parser.getgroup("project")
    group.addoption("--order", metavar="FILE", help="run tests in the order of the paths in this file, the others last")
    group.addoption("--start-within", metavar="SECONDS", type=float, help="skip the tests that haven't begun by then")


def pytest_configure(config: pytest.Config) -> None:
    """Set the time after which no test starts."""
    seconds = config.getoption("--start-within")
    config.stash[_LAST_START] = time.time() + seconds if seconds else None


_LAST_START = pytest.StashKey[float | None]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures and their places among the cases of one test, before ``-m`` chooses."""
    cases: Counter[str] = Counter()
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if mark := _MARK_OF_FIXTURE.get(fixture):
                item.add_marker(mark)
        if any(item.get_closest_marker(mark) for mark in _SLOW_MARKS):
            item.add_marker("slow")
        if after := item.get_closest_marker("slow_after"):
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if cases[function] > after.args[0]:
                item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Set limits and order."""
    config, items = session.config, session.items
    if order := config.getoption("--order"):
        prefixes = paths_in_order(Path(order).read_text(encoding="utf-8"))
        items.sort(key=lambda item: _place(item.nodeid, prefixes))
    if config.pluginmanager.hasplugin("timeout"):
        # A machine that others use too takes as many times longer as it has work.
        share = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(round(share * _limit(item))))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no test after the time, and end none."""
    last_start = item.config.stash[_LAST_START]
    if last_start is not None and time.time() > last_start:
        pytest.skip(_TIME_USED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that belong to ``make test`` and are slow, without which it wouldn't stay quick."""
    marks = _LIMIT_OF_MARK.keys() | {"smoke"}
    slow = sorted(
        (
            (report.duration, report.nodeid)
            for report in terminalreporter.stats.get("passed", ())
            if report.when == "call" and report.duration > _EXPECTED_SECONDS and not marks & report.keywords.keys()
        ),
        reverse=True,
    )
    if slow:
        terminalreporter.section(f"{len(slow)} tests without a mark took over {_EXPECTED_SECONDS} s")
        for duration, nodeid in slow[:_NAMED_TESTS]:
            terminalreporter.write_line(f"{duration:6.1f} s {nodeid}")


def paths_in_order(text: str) -> list[str]:
    """Return the paths of a file of an order: the first word of each line that is neither empty nor a comment."""
    return [line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _place(nodeid: str, prefixes: Sequence[str]) -> int:
    return next((place for place, prefix in enumerate(prefixes) if nodeid.startswith(prefix)), len(prefixes))


def _limit(item: pytest.Item) -> int:
    return max([_LIMIT, *(limit for mark, limit in _LIMIT_OF_MARK.items() if item.get_closest_marker(mark))])


def group_of(item: pytest.Item) -> str | None:
    """Return what a test shares with those that run in the same process."""
    if mark := item.get_closest_marker("group"):
        return str(mark.args[0])
    return next((group for name, group in _GROUP_OF_MARK.items() if item.get_closest_marker(name)), None)
