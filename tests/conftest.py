"""Fixtures of all tests: a real server, and an open connection to it."""

from __future__ import annotations

import functools
import os
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import hypothesis
import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server, nats_server_version
from airflow_provider_jetstream.jetstream import ConnectionSettings, connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, ServerTooOldError
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator

    from testbed.face import NatsPyConnection

pytest_plugins = ["tools.marks", "tools.processes", "tools.line_record"]

# No test asserts a time: the first text that a process draws makes a table of all characters, which takes 3 s where two
# slow cores are shared by eight.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# Examples are new ones in each run. ``make test`` has few of many properties; the long forms have many.
for _profile, _examples in {"quick": 25, "thorough": 400, "fuzz": 5_000}.items():
    hypothesis.settings.register_profile(_profile, hypothesis.settings.get_profile("tests"), max_examples=_examples)
hypothesis.settings.load_profile("tests")

# What says that the server lacks what a test is about.
_TOO_OLD = re.compile(
    r"the server is older than|older servers|(?:expected|needs) nats-server 2\.1\d"
    r"|no answer on \$JS\.API\.CONSUMER\.(?:PAUSE|RESET)"
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is about something that the server of these tests lacks, with the reason."""
    for marker in item.iter_markers("since_server"):
        version, reason = marker.args
        if _numbers(_server_version()) < _numbers(version):
            pytest.skip(f"nats-server {_server_version()}: {reason} since {version}")

    for marker in item.iter_markers("since_airflow"):
        needed, reason = marker.args
        if _numbers(found := metadata.version("apache-airflow-core")) < _numbers(needed):
            pytest.skip(f"Airflow {found}: {reason} since {needed}")


@functools.cache
def _server_version() -> str:
    return nats_server_version(find_nats_server())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that needs what an older server lacks, with the reason, where make test-servers runs one of them."""
    try:
        return (yield)
    except JetStreamProviderError as error:
        if "OLDER_SERVER" in os.environ and (isinstance(error, ServerTooOldError) or _TOO_OLD.search(str(error))):
            pytest.skip(f"nats-server {os.environ['OLDER_SERVER']}: {error}")
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Name what failed once more, a line each, at the end: an assertion's comparison may fill all lines before it."""
    yield
    for outcome in ("failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            terminalreporter.write_line(f"{outcome}: {report.nodeid}")


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    """The server shared by all tests that don't stop it; each test has streams of its own, see ``name``."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A server that the test may kill, restart and reconfigure."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def settings(nats: NatsServer) -> ConnectionSettings:
    """The settings of a connection to the shared server, which answers late where many tests share the machine."""
    return connection_settings({"servers": (nats.url,), "timeout": 20})


@pytest.fixture
async def connection(settings: ConnectionSettings) -> AsyncIterator[NatsPyConnection]:
    """An open connection to the shared server."""
    async with connect(settings) as opened:
        yield opened


@pytest.fixture(scope="session")
def migrated_databases(pytestconfig: pytest.Config) -> Path:
    """The folder of the metadata databases from which Airflows start; it outlives the test run."""
    cache = pytestconfig.cache
    assert cache is not None
    return Path(cache.mkdir("airflow-databases"))


@pytest.fixture
def name() -> str:
    """A name for streams and subjects that no other test uses."""
    return f"q{uuid4().hex[:12]}"
