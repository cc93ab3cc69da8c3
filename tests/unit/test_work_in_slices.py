"""Much work on an event loop lets other tasks run in between, wherever it comes from."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.server_link import ServerLink
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Coroutine

_COUNT = 20


def work(seconds: float = 0.005) -> None:
    """Use the thread's CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def turns_during(working: Coroutine[object, object, object]) -> int:
    """Return how often another task of the loop ran while a coroutine worked."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = turns
    await working
    during = turns - before
    counting.cancel()
    return during


async def test_a_burst_that_the_client_reads_without_a_pause() -> None:
    done = asyncio.Event()
    left = _COUNT

    def receive(*_: object) -> None:
        nonlocal left
        work()
        left -= 1
        if not left:
            done.set()

    link = ServerLink(receive, lambda *_: None, lambda *_: None, {"in_msgs": 0, "in_bytes": 0})
    writers: list[asyncio.StreamWriter] = []

    def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"MSG i 1 2\r\nok\r\n" * _COUNT)

    server = await asyncio.start_server(send, LOOPBACK, 0)
    loop, address = asyncio.get_running_loop(), server.sockets[0].getsockname()
    transport, _ = await loop.create_connection(lambda: link, *address)
    assert await turns_during(done.wait()) >= _COUNT / 5
    transport.abort()
    server.close()
    for writer in writers:
        # A writer that is collected while another test runs fails that one.
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_many_calls_that_wait_for_nothing() -> None:
    async def call(number: int) -> int:
        work(0.001)
        return number

    count = 200
    results: list[int] = []

    async def call_all() -> None:
        results.extend(await map_concurrently(call, range(count)))

    assert await turns_during(call_all()) >= count // 16 // 2
    assert results == list(range(count))


@pytest.mark.filterwarnings("error")
async def test_calls_that_are_cut_off_while_they_are_started() -> None:
    open_calls: set[int] = set()
    begun = asyncio.Event()

    async def call(number: int) -> None:
        work(0.001)
        open_calls.add(number)
        begun.set()
        try:
            await asyncio.sleep(3_600)
        finally:
            open_calls.discard(number)

    calling = asyncio.create_task(map_concurrently(call, range(200)))
    await begun.wait()
    calling.cancel()
    with suppress(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
    assert not open_calls
