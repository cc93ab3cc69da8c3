"""The order queue: load-balanced consumers that fail half of their deliveries, and a handler of dead letters."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from document_configurations import ORDERS as DOCUMENT

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    WorkQueue,
    find_dead_letters,
    provision,
    redrive_dead_letters,
)
from testbed.face import stream_info
from testbed.foreign_programs import start_program
from testbed.ledger import read_ledger
from testbed.queues import eventually, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.dev.process import Process
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

ROOT = Path(__file__).resolve().parent.parent.parent
ORDERS = 40
# The number that the document's publisher sends.
TWENTY = 20


@pytest.mark.slow
async def test_two_instances_share_the_orders_and_exactly_one_processes_each(
    nats: NatsServer, connection: NatsPyConnection, tmp_path: Path
) -> None:
    queue = WorkQueue.load(DOCUMENT.path)
    await provision(connection, queue)
    for number in range(ORDERS):
        ack = await connection.client.request("orders.new", f"order-{number}".encode())
        assert json.loads(ack.data)["stream"] == "orders_stream"
    ledger = tmp_path / "orders"
    workers = [
        start_worker(
            f"instance-{number}",
            queue=DOCUMENT.path,
            consumer="processor",
            handler="example_workers.orders:process",
            env=os.environ
            | {
                "NATS_URL": nats.url,
                "ORDERS_LEDGER": str(ledger),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)]),
            },
            logs=tmp_path,
        )
        for number in range(2)
    ]
    try:

        async def all_processed_or_dead() -> bool:
            dead = await stored_count(connection, "orders_unprocessed")
            return 0 < dead == await stored_count(connection, "orders_stream")

        await eventually(all_processed_or_dead, within=60)
        letters = (await find_dead_letters(connection, queue)).letters
        assert 0 < len(letters) < ORDERS
        assert len(read_ledger(ledger)) == ORDERS - len(letters)
        await redrive_dead_letters(connection, queue)
        await eventually(lambda: len(read_ledger(ledger)) == ORDERS, within=60)
    finally:
        for worker in workers:
            worker.terminate()
    lines = read_ledger(ledger)
    assert sorted(line["order"] for line in lines) == sorted(f"order-{number}" for number in range(ORDERS))
    assert len({line["process"] for line in lines}) == 2


def program(name: str, *arguments: str, env: dict[str, str], logs: Path) -> Process:
    return start_program(name, "foreign_orders", *arguments, env=env, logs=logs)


@pytest.mark.slow
async def test_the_documents_programs_handle_each_order_once_and_a_redrive_finds_nothing(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    queue = WorkQueue.load(DOCUMENT.path)
    await provision(connection, queue)
    programs = [
        *(
            program(
                f"consumer-{seed}", "process", "orders_stream", "orders.*", str(seed), env=program_env, logs=tmp_path
            )
            for seed in range(2)
        ),
        program("handler", "handle", "orders_unprocessed", "orders_stream", env=program_env, logs=tmp_path),
        program("publisher", "publish", "orders.new", str(TWENTY), "0.05", env=program_env, logs=tmp_path),
    ]
    try:
        await eventually(lambda: done(ledger) == once(TWENTY), within=60)
        assert all(started.alive for started in programs[:3])
    finally:
        for started in programs:
            started.terminate()
    handled = [line["handled"] for line in read_ledger(ledger) if "handled" in line]
    assert handled
    assert len({line["process"] for line in read_ledger(ledger) if "processed" in line}) == 2
    # The handler acknowledges the advisory; the order itself stays stored.
    assert await stored_count(connection, "orders_unprocessed") == 0
    assert await stored_count(connection, "orders_stream") == len(handled)
    assert not (await find_dead_letters(connection, queue)).letters
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures) == (0, 0)
    assert await stored_count(connection, "orders_stream") == len(handled)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_twenty_orders_are_done_once_each_with_the_handler_beside_a_redrive(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - dice
    queue = WorkQueue.load(DOCUMENT.path)
    await provision(connection, queue)
    consumer = program("consumer", "process", "orders_stream", "orders.*", str(seed), env=program_env, logs=tmp_path)
    publisher = program("publisher", "publish", "orders.new", str(TWENTY), "0.01", env=program_env, logs=tmp_path)
    running = [consumer, publisher]

    async def has_copies() -> bool:
        return int((await stream_info(connection, "orders_stream"))["state"]["last_seq"]) > TWENTY

    async def start_handler() -> None:
        # In the middle of a redrive.
        await eventually(has_copies, within=60)
        arguments = ("handle", "orders_unprocessed", "orders_stream")
        running.append(program("handler", *arguments, env=program_env, logs=tmp_path))

    redriven = 0
    starting = asyncio.create_task(start_handler())
    try:
        async with asyncio.timeout(120):
            while done(ledger) != once(TWENTY):
                report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=4))
                redriven += len(report.redriven)
                assert set(done(ledger).values()) <= {1}
                await asyncio.sleep(dice.random() / 2)
        await starting
        *_, handler = running
        assert handler.alive, handler.tail()
    finally:
        starting.cancel()
        for started in running:
            started.terminate()
    assert redriven
    assert not (await find_dead_letters(connection, queue)).letters


def done(ledger: Path) -> Counter[str]:
    """Count how often each order was done, whoever did it."""
    return Counter(str(line.get("processed") or line.get("handled")) for line in read_ledger(ledger))


def once(count: int) -> dict[str, int]:
    return {f"order-{number}": 1 for number in range(count)}
