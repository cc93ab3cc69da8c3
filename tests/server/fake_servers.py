"""Fake servers with misbehaviour that a real server can't be made to show."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class FakeServer:
    """A fake server's port, and what it has received."""

    port: int
    received: bytearray = field(default_factory=bytearray)
    connections: int = 0
    open: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def fake_server(
    *, banner: dict[str, object] | bytes | None = None, farewell: bytes = b"", port: int = 0
) -> AsyncIterator[FakeServer]:
    """Accept connections and record what arrives, without answering requests.

    :param banner: the content of the INFO line, or another first line; none is sent where absent
    :param farewell: sent at the first PING, before the connection is closed; where absent it stays open
    """
    fake = FakeServer(port)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        fake.open += 1
        fake.connected.set()
        if banner is not None:
            line = banner if isinstance(banner, bytes) else b"INFO " + json.dumps(banner).encode()
            writer.write(line + b"\r\n")
        # A client that gives up drops what it hasn't sent.
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                fake.received += data
                if farewell and b"PING" in data:
                    writer.write(farewell)
                    break
        fake.open -= 1
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, port)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
