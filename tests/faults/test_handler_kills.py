"""Redrives killed at random moments beside a handler of the dead letter queue that fails at random: each job once.

The short form has a few seeds, ``FAULTS=full`` thirty.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import connect, find_dead_letters
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from testbed.face import summarise_dead_letters
from testbed.foreign_programs import acknowledge, create_or_update_consumer, get_message, pull
from testbed.queues import make_dead_letters, make_queue, process_all

if TYPE_CHECKING:
    from typing import Any

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SEEDS = 30 if os.environ.get("FAULTS") == "full" else 4
ORDERS = 20
HANDLER = "unprocessed_order_handler"

REDRIVE = """
import asyncio, json, sys
from airflow_provider_jetstream.jetstream import WorkQueue, connect, connection_settings, redrive_dead_letters
from airflow_provider_jetstream.jetstream import RedriveRequest
from testbed.leases import shorten_leases
shorten_leases(1.0)
async def main(server, queue, request):
    async with connect(connection_settings({"servers": (server,)})) as connection:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        report = await redrive_dead_letters(connection, WorkQueue(**queue), RedriveRequest(**request))
        print(json.dumps(report.as_json()), flush=True)
asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])))
"""


async def make_orders(connection: NatsPyConnection, name: str, dice: random.Random) -> WorkQueue:
    letters = {
        "name": f"{name}-dead",
        "subjects": [f"{MAX_DELIVERIES}.{name}.*"],
        "retention": "workqueue",
        "discard": "new",
        "max_bytes": "256MB",
        "deny_delete": dice.random() < 0.5,
    }
    return await make_queue(
        connection,
        name,
        dead_letters=letters,
        consumer={"ack_wait": "50ms"},
        deny_delete=True,
    )


class FailingHandler:
    """The orders document's handler, which is also updated, answers late, declines orders and dies before it handles.

    It doesn't die between handling and acknowledging: then no queue could keep it from handling an order twice.
    """

    def __init__(self, client: Client, queue: str, dice: random.Random) -> None:
        self._client = client
        self._queue = queue
        self._dice = dice
        self._pause = dice.choice([0.2, 0.6, 1.5])
        self.handled: Counter[str] = Counter()

    async def configure(self) -> None:
        config: dict[str, Any] = {"durable_name": HANDLER, "backoff": [500_000_000], "max_deliver": 5}
        if self._dice.random() < 0.3:
            config["max_ack_pending"] = self._dice.choice([1, 3, 7])
        await create_or_update_consumer(self._client, f"{self._queue}-dead", config)

    async def run(self) -> None:
        while True:
            batch = self._dice.choice([1, 1, 3, 5])
            async for message in pull(self._client, f"{self._queue}-dead", HANDLER, batch=batch, expires=0.3):
                if not await self._handle(message):
                    break
            if self._dice.random() < 0.1:
                await self.configure()
            await asyncio.sleep(self._dice.uniform(0.0, self._pause))

    async def _handle(self, message: Msg) -> bool:
        fate = self._dice.random()
        if fate < 0.1:
            return False
        if fate < 0.2:
            await acknowledge(self._client, message, self._dice.choice([b"-NAK", b'-NAK {"delay": 200000000}']))
            return True
        order = await get_message(self._client, self._queue, json.loads(message.data)["stream_seq"])
        if order is None:
            await acknowledge(self._client, message, b"-NAK")
            return True
        self.handled[order.decode()] += 1
        await acknowledge(self._client, message)
        await asyncio.sleep(self._dice.uniform(0.0, 0.05))
        return True


async def redrive_in_a_process(
    server: str, queue: WorkQueue, request: dict[str, Any], kill_after: float | None
) -> dict[str, Any] | None:
    """Redrive, and kill the redrive after so many seconds; return its report if it finished."""
    values = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", REDRIVE, server, values, json.dumps(request)),
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("expected pipes")
    await process.stdout.readline()
    process.stdin.write(b"\n")
    with suppress(TimeoutError):
        async with asyncio.timeout(kill_after):
            line = await process.stdout.readline()
            await process.wait()
            return dict(json.loads(line))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    return None


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_each_order_is_done_once_whoever_is_killed_and_fails(
    nats: NatsServer, connection: NatsPyConnection, settings: ConnectionSettings, name: str, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - dice
    queue = await make_orders(connection, name, dice)
    orders = [f"order-{number}" for number in range(ORDERS)]
    await make_dead_letters(connection, queue, orders)
    done: Counter[str] = Counter()
    killed = 0
    async with connect(settings) as own:
        handler = FailingHandler(own.client, name, random.Random(f"handler {seed}"))  # noqa: S311 - dice
        await handler.configure()
        running = asyncio.create_task(handler.run())
        try:
            for _ in range(4):
                request = {"rate": dice.choice([None, 20.0, 100.0]), "run": dice.choice([None, "run"])}
                times = [
                    dice.choice([dice.uniform(0.0, 0.3), dice.uniform(0.0, 2.0), None])
                    for _ in range(dice.choice([1, 1, 2]))
                ]
                reports = await asyncio.gather(
                    *(redrive_in_a_process(nats.url, queue, request, kill_after) for kill_after in times)
                )
                killed += reports.count(None)
                if dice.random() < 0.5:
                    await summarise_dead_letters(connection, queue)
                done.update(await process_all(connection, queue))
            async with asyncio.timeout(30):
                while (handler.handled + done).total() < ORDERS:
                    report = await redrive_in_a_process(nats.url, queue, {}, None)
                    assert report is not None
                    assert report["failures"] == {}
                    done.update(await process_all(connection, queue))
        finally:
            running.cancel()
            await asyncio.wait([running])
    print(f"{killed} redrives were killed, {handler.handled.total()} orders handled, {done.total()} redriven")
    assert handler.handled + done == dict.fromkeys(orders, 1)
    await redrive_in_a_process(nats.url, queue, {}, None)
    assert await process_all(connection, queue) == {}
    found = await find_dead_letters(connection, queue)
    assert (found.letters, found.uncertain) == ((), 0)
