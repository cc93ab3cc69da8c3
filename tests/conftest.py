"""What every test may ask for: a real server, and an open connection to it."""

from __future__ import annotations

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
    """One server for all tests that don't stop it; they keep apart by their streams' names."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """A server that the test may kill, restart and reconfigure."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def settings(nats: NatsServer) -> ConnectionSettings:
    """Where the shared server is."""
    return connection_settings({"servers": (nats.url,), "timeout": 5})


@pytest.fixture
async def connection(settings: ConnectionSettings) -> AsyncIterator[Connection]:
    """An open connection to the shared server."""
    async with connect(settings) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    """A name that no other test uses, for streams and subjects."""
    return f"q{uuid4().hex[:12]}"
