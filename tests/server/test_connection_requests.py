from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import ApiError, DeadlineError, UnreachableError

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


async def test_a_refused_request_keeps_the_servers_codes(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(ApiError, match=f"stream not found .status 404, error 10059. in answer to STREAM.INFO.{name}"):
        await connection.api(f"STREAM.INFO.{name}")


async def test_a_request_without_a_responder_is_reported(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(UnreachableError, match=f"nobody answers on {name}: .* is away; try again"):
        await connection.request(name)


async def test_a_request_without_an_answer_ends_in_time(connection: NatsPyConnection, name: str) -> None:
    await connection.client.subscribe(name)
    connection.timeout = 0.2
    with pytest.raises(DeadlineError, match=f"no answer on {name} within 0.2 s"):
        await connection.request(name)


async def test_a_permanent_refusal_with_status_503_is_terminal(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(ApiError, match=r"clustering support required \(status 503, error 10010\)"):
        await connection.api(f"STREAM.PEER.REMOVE.{name}", {"peer": "n1"})


async def test_a_request_on_a_closed_connection_is_refused(nats: NatsServer) -> None:
    async with connect(connection_settings({"servers": (nats.url,)})) as opened:
        pass
    with pytest.raises(UnreachableError, match=r"the connection failed during a request on \$JS\.API\.INFO: "):
        await opened.api("INFO")
    assert opened.client.is_closed


async def test_leaving_with_an_error_closes_the_connection_and_keeps_the_error(nats: NatsServer) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connect(connection_settings({"servers": (nats.url,)})) as opened:
            raise KeyError("mine")
    assert opened.client.is_closed
