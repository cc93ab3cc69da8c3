"""Whatever answers at an address: connecting ends within its limit, with an error of the tree, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TLSError
from testbed.certificates import make_tls
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import eventually
from testbed.spark_face import NatsSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings

    Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

TIMEOUT = 2.0
# Turns of the event loop's clock within twice the limit. They pass only while this process runs, so a loaded machine
# adds few; where each step of connecting had a limit of its own, the first of these took 7 s.
TURN, MOST_TURNS = 0.1, 40
INFO = {"server_id": "f", "version": "2.15.0", "max_payload": 1_048_576, "headers": True}
TLS_INFO = b"INFO " + json.dumps(INFO | {"tls_required": True}).encode() + b"\r\n"


async def _stay(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(65_536):
        pass


async def _never_shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(TLS_INFO)
    await _stay(reader, writer)


async def _drip(data: bytes, writer: asyncio.StreamWriter) -> None:
    while True:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.2)


async def _drip_info(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(TLS_INFO, writer)


async def _drip_handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(TLS_INFO)
    await reader.read(1)
    # The beginning of a long record of a handshake.
    await _drip(b"\x16\x03\x03\x3f\xff" + b"\x02" * 50, writer)


async def _garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(os.urandom(65_536))
        await writer.drain()


async def _only_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"INFO " + json.dumps(INFO).encode() + b"\r\n")
    await reader.read(1)
    while True:
        writer.write(b"PING\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await answer(reader, writer)

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def in_few_turns() -> AsyncIterator[None]:
    """Count the turns of a clock that the event loop moves until the block ends."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(TURN)
            turns += 1

    counting = asyncio.create_task(count())
    try:
        yield
    finally:
        counting.cancel()
    assert turns <= MOST_TURNS


async def _connect(url: str) -> None:
    async with connect(connection_settings({"servers": (url,), "timeout": TIMEOUT, "user": "u", "password": "p"})):
        pass


async def _connect_blocking(url: str) -> None:
    values = {"servers": (url,), "timeout": TIMEOUT, "user": "u", "password": "p"}
    await asyncio.to_thread(lambda: NatsSocket(connection_settings(values)).close())


CONNECTIONS = pytest.mark.parametrize("connecting", [_connect, _connect_blocking], ids=["event loop", "blocking"])


@pytest.mark.slow
@CONNECTIONS
@pytest.mark.parametrize(
    ("answer", "scheme"),
    [
        (_stay, "nats"),
        (_stay, "tls"),
        (_never_shake_hands, "tls"),
        (_drip_info, "nats"),
        (_drip_handshake, "tls"),
        (_garbage, "nats"),
        (_only_pings, "nats"),
    ],
    ids=["silence", "silence, TLS", "no handshake", "slow INFO", "slow handshake", "garbage", "only PING"],
)
async def test_connecting_ends_within_its_limit(
    connecting: Callable[[str], Awaitable[None]], answer: Answer, scheme: str
) -> None:
    async with answering(answer) as port, in_few_turns():
        with pytest.raises(JetStreamProviderError):
            await connecting(f"{scheme}://{LOOPBACK}:{port}")


@pytest.mark.slow
@CONNECTIONS
async def test_a_server_that_is_stopped_ends_connecting_too(connecting: Callable[[str], Awaitable[None]]) -> None:
    with NatsServer() as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with in_few_turns():
                with pytest.raises(JetStreamProviderError):
                    await connecting(server.url)
        finally:
            os.kill(server.pid, signal.SIGCONT)


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def _open(settings: ConnectionSettings) -> None:
    async with connect(settings):
        pass


async def _open_blocking(settings: ConnectionSettings) -> None:
    await asyncio.to_thread(lambda: NatsSocket(settings).close())


@pytest.mark.slow
@pytest.mark.parametrize("opening", [_open, _open_blocking], ids=["event loop", "blocking"])
async def test_connecting_often_leaves_no_file_thread_or_task(
    nats: NatsServer, tmp_path: Path, opening: Callable[[ConnectionSettings], Awaitable[None]]
) -> None:
    other = make_tls(tmp_path)
    good = connection_settings({"servers": (nats.url,), "timeout": 30})
    bad = connection_settings(
        {"servers": (f"tls://{LOOPBACK}:{nats.port}",), "timeout": 30, "tls_ca_file": str(other.ca)}
    )
    # The threads of the pool that runs the blocking connections stay.
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(40)))

    async def once() -> None:
        await opening(good)
        with pytest.raises(TLSError):
            await opening(bad)

    await once()
    files, threads, tasks = _files(), threading.active_count(), len(asyncio.all_tasks())
    # A thousand, of which half fail, in the faults' run; the figure per connection is the same.
    for _ in range(500 if os.environ.get("FAULTS") == "full" else 25):
        await once()
    await eventually(lambda: _files() <= files, 30)
    assert threading.active_count() <= threads
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, 30)
