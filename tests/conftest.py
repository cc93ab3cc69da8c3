"""Fixtures of all tests: a real server, and an open connection to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings, connection_settings
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection


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
    """The settings of a connection to the shared server."""
    return connection_settings({"servers": (nats.url,), "timeout": 5})


@pytest.fixture
async def connection(settings: ConnectionSettings) -> AsyncIterator[Connection]:
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
