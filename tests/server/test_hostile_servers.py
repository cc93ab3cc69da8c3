"""Whoever answers at an address may send anything: connecting ends within its limit, with an error of the tree."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fake_servers import fake_server

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.ports import LOOPBACK
from testbed.spark_face import NatsSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_LIMIT = 3.0
_INFO = b'INFO {"version": "2.12.0", "max_payload": 1048576, "headers": true}'


def connect_blocking(port: int) -> None:
    NatsSocket(connection_settings({"servers": (f"nats://{LOOPBACK}:{port}",), "timeout": _LIMIT})).close()


async def connect_on_the_loop(port: int) -> None:
    async with connect(connection_settings({"servers": (f"nats://{LOOPBACK}:{port}",), "timeout": _LIMIT})):
        pass


async def failure(port: int, *, blocking: bool) -> JetStreamProviderError:
    with pytest.raises(JetStreamProviderError) as caught:
        await (asyncio.to_thread(connect_blocking, port) if blocking else connect_on_the_loop(port))
    return caught.value


@asynccontextmanager
async def endless_server(first: bytes, more: bytes, pause: float = 0.0) -> AsyncIterator[int]:
    """Send the first bytes, and others without an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(first)
            while True:
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(pause)
        except OSError:
            writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("blocking", [False, True], ids=["on the loop", "blocking"])
@pytest.mark.parametrize(
    "banner",
    [
        b"INFO []",
        b"INFO null",
        b"INFO 7",
        b'INFO "text"',
        b"INFO " + b"[" * 20_000,
        b"INFO {}",
        b'INFO {"version": null, "max_payload": 1}',
        b'INFO {"version": "two", "max_payload": 1}',
        b'INFO {"version": "2.12", "max_payload": 1}',
        b'INFO {"version": "2.12.0", "max_payload": "a"}',
        b'INFO {"version": "2.12.0", "max_payload": -1}',
        b'INFO {"version": "2.12.0", "max_payload": ' + b"9" * 5_000 + b"}",
        b'INFO {"version": "2.12.0", "max_payload": 1, "connect_urls": [null, 7]}',
        b'INFO {"version": "2.12.0", "max_payload": 1, "connect_urls": ["a:99999999"]}',
        b'INFO {"version": "2.12.0", "max_payload": 1, "nonce": 7, "auth_required": "yes"}',
        b'INFO {"version": "\xff"}',
        b"INFO",
        b"XINFO",
        b"HTTP/1.1 400 Bad Request",
        b"",
    ],
    ids=lambda banner: banner[:60].decode(errors="replace"),
)
async def test_what_no_server_would_send_first_is_refused(banner: bytes, *, blocking: bool) -> None:
    async with fake_server(banner=banner) as fake:
        error = await failure(fake.port, blocking=blocking)
        assert len(str(error)) < 2_000
        assert b"CONNECT" not in fake.received


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("blocking", [False, True], ids=["on the loop", "blocking"])
@pytest.mark.parametrize(
    ("first", "more", "pause"),
    [
        (b"INFO ", b"x" * 65_536, 0.0),
        (b"INFO ", b"x", 0.2),
        (_INFO + b"\r\n", b"+OK\r\n" * 1_000, 0.0),
        (_INFO + b"\r\n", b"PING\r\n" * 1_000, 0.0),
        (_INFO + b"\r\n", _INFO + b"\r\n", 0.0),
        (_INFO + b"\r\nPONG\r\nMSG a 1 999999999999\r\n", b"x" * 65_536, 0.0),
        (_INFO + b"\r\n-ERR\r\n", b"-ERR \r\n", 0.05),
    ],
    ids=["endless line", "a byte now and then", "+OK", "PING", "INFO", "endless message", "-ERR"],
)
async def test_a_server_without_an_end_does_not_hold_the_caller(
    first: bytes, more: bytes, pause: float, *, blocking: bool
) -> None:
    async with endless_server(first, more, pause) as port:
        if blocking and b"PONG" in first:
            # The blocking connection is open, and its next request ends.
            socket = await asyncio.to_thread(_open_socket, port)
            with pytest.raises(JetStreamProviderError):
                await asyncio.to_thread(_request(socket))
        else:
            await failure(port, blocking=blocking)


def _open_socket(port: int) -> NatsSocket:
    return NatsSocket(connection_settings({"servers": (f"nats://{LOOPBACK}:{port}",), "timeout": _LIMIT}))


def _request(socket: NatsSocket) -> Callable[[], object]:
    return lambda: socket.request("a")
