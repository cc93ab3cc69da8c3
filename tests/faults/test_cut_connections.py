"""The connection of a redrive is cut for 15 s at its reset, its copies and its acknowledgements, beside live workers.

What was sent is held back and arrives at the end of the cut, or the connection is lost; either way every job, live or
dead, is done once when the redrive has been run again. ``FAULTS=full`` cuts at every moment in both ways.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, publish_jobs, stored_count
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer
    from testbed.tcp_proxy import TcpProxy

CUT_SECONDS = 15.0
WORK_SECONDS = 2.0
LETTERS = [f"dead{number}" for number in range(20)]
MOMENTS = {
    "reset": (Protocol.IN_PLACE, b".CONSUMER.RESET."),
    "copy": (Protocol.COPY, b"Nats-Msg-Id: redrive:"),
    "acknowledgement": (Protocol.COPY, b"$JS.ACK."),
}
_RESETS = pytest.mark.since_server("2.14", "the reset of a consumer")
CUTS = [
    pytest.param("reset", "held", marks=_RESETS),
    pytest.param("reset", "lost", marks=_RESETS),
    ("copy", "lost"),
    ("acknowledgement", "lost"),
]
if os.environ.get("FAULTS") == "full":
    CUTS = list(itertools.product(MOMENTS, ["held", "lost"]))


async def finish(message: Msg) -> None:
    await asyncio.sleep(WORK_SECONDS)
    await message.ack_sync(timeout=5)


@asynccontextmanager
async def live_work(connection: NatsPyConnection, queue: WorkQueue) -> AsyncIterator[Counter[str]]:
    """Publish jobs and do them, each for seconds, until the block ends and nothing is left; count how often each is."""
    done: Counter[str] = Counter()
    working: set[asyncio.Task[None]] = set()
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)

    async def publish() -> None:
        for number in range(10_000):
            await publish_jobs(connection, queue, [f"live{number}"])
            await asyncio.sleep(0.2)

    async def work() -> None:
        while True:
            with suppress(TimeoutError):
                for message in await pull.fetch(5, timeout=0.5):
                    done[message.data.decode()] += 1
                    task = asyncio.create_task(finish(message))
                    working.add(task)
                    task.add_done_callback(working.discard)

    async def drained() -> bool:
        info = await consumer_info(connection, queue.name, CONSUMER)
        return not info["num_pending"] and not info["num_ack_pending"]

    publishing, pulling = asyncio.create_task(publish()), asyncio.create_task(work())
    try:
        yield done
        publishing.cancel()
        await eventually(drained, within=70)
    finally:
        publishing.cancel()
        pulling.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def cut(proxy: TcpProxy, *, held: bool) -> None:
    """Hold back what is sent from now on for a while, or close the connection and refuse others meanwhile."""
    if not held:
        proxy.cut()
        proxy.drop()
    await asyncio.sleep(CUT_SECONDS)
    proxy.mend()
    proxy.resume()


@pytest.mark.parametrize(("moment", "sent"), CUTS)
async def test_a_cut_repeats_no_job_and_loses_none(own_nats: NatsServer, name: str, moment: str, sent: str) -> None:
    protocol, text = MOMENTS[moment]
    async with (
        connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as direct,
        tcp_proxy(own_nats.port) as proxy,
        connect(connection_settings({"servers": (proxy.url,), "timeout": 5})) as redriving,
    ):
        queue = await make_queue(direct, name, consumer={"ack_wait": "5s"})
        await make_dead_letters(direct, queue, LETTERS)
        request = RedriveRequest(protocol=protocol)
        async with live_work(direct, queue) as done:
            proxy.pause_at(text)
            redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, request))
            await asyncio.wait_for(proxy.found.wait(), 30)
            await cut(proxy, held=sent == "held")
            with suppress(JetStreamProviderError):
                await redrive

            async def finished() -> bool:
                with suppress(JetStreamProviderError):
                    return (await redrive_dead_letters(direct, queue, request)).failures == 0
                return False

            await eventually(finished, within=120)
        published = max(int(body.removeprefix("live")) for body in done if body.startswith("live"))
        expected = Counter([*LETTERS, *(f"live{number}" for number in range(published + 1))])
        # Each letter was delivered once before, by what made it one.
        assert done == expected
        assert await stored_count(direct, name) == 0
