"""A queue whose jobs have died of every cause, for the tests of dead letters on Spark."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import (
    Death,
    Origin,
    Reason,
    connect,
    connection_settings,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import copy_subject
from testbed.dead_letters import publish_raw, request_for, store_task
from testbed.face import Headers, record_headers, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_queue,
    probe,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SCRIPT = "<script>alert('1')</script> & \"more\""
ORIGIN = {"Airflow-Dag-Id": "prints/nightly", "Airflow-Run-Id": "manual__2026-11-21T00:00:00+00:00"}
TASK = {"Airflow-Task-Id": "publish", "Airflow-Map-Index": "3"}
# The task whose jobs have only its key in their headers.
KEYED = Origin("prints/größe", "scheduled__2026-11-21T00:00:00+00:00", "publish_mapped", 7)
KEY = {"Airflow-Task": KEYED.key}


async def mixed_queue(server: NatsServer, name: str) -> WorkQueue:
    """Make a queue whose jobs die of every cause; some are completed, redriven or lost afterwards."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "1s"}, max_age="1h")
        await store_task(connection, queue, KEYED)
        await _orphans(connection, queue)
        await _used_up(connection, queue)
        await _completed(connection, queue)
        await publish_raw(
            server, f"{name}.jobs.latin", "Größe: Ü\r\n".encode() + b"Latin: Gr\xf6\xdfe\r\nTag: a\r\nTag: b", b"raw"
        )
        await exhaust_deliveries(connection, queue, 1)
        await _terminated_by_worker(connection, queue)
        await _deadline_exceeded(connection, queue)
        # Only the archive has the body of this job, and only the server the reason.
        await publish_jobs(connection, queue, ["archived"], headers={"Customer": "Ünal", **ORIGIN, **TASK})
        await _terminate(connection, queue, b"+TERM no such customer 17")
        await _redriven_and_parked(connection, queue)
        # Until the consumer has been quiet for its ack wait, an orphan's time of death is the time of each scan.
        await asyncio.sleep(1)
        return queue


async def _orphans(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await publish_jobs(connection, queue, ["orphan 1", "orphan 2"], headers=KEY)
    await exhaust_deliveries(connection, queue, 2)
    await connection.api(f"STREAM.PURGE.{queue.name}-dead")


async def _used_up(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await publish_jobs(
        connection, queue, [f"used {number}" for number in range(3)], headers=ORIGIN | TASK | {"Job-Id": "job-1"}
    )
    await publish_jobs(connection, queue, ["€"], kind="other", headers={"Redrive-Count": "2"})
    await exhaust_deliveries(connection, queue, 4)


async def _completed(connection: NatsPyConnection, queue: WorkQueue) -> None:
    sequence, *_ = await publish_jobs(connection, queue, ["completed"])
    await exhaust_deliveries(connection, queue, 1)
    await store_completion(connection, queue, sequence)


async def _record(connection: NatsPyConnection, queue: WorkQueue, sequence: int, death: Death) -> None:
    message = await get_message(connection, queue.name, sequence)
    if message is None:
        raise LookupError(f"{queue.name} doesn't hold {sequence}")
    headers = record_headers(
        death, subject=message.subject, time=message.time, headers=message.headers, writer="worker"
    )
    subject = copy_subject(queue.name, CONSUMER, sequence)
    await connection.client.request(subject, message.data, headers=Headers(headers.items()), timeout=5)


async def _death(connection: NatsPyConnection, queue: WorkQueue, sequence: int, reason: Reason, message: str) -> Death:
    info = await stream_info(connection, queue.name)
    stored = await get_message(connection, queue.name, sequence)
    if stored is None:
        raise LookupError(f"{queue.name} doesn't hold {sequence}")
    return Death(
        stream=queue.name,
        created=info["created"],
        sequence=sequence,
        consumer=CONSUMER,
        reason=reason,
        died_at=stored.stored_at,
        first_failed_at=stored.stored_at,
        deliveries=1,
        error_class="printing.PaperError",
        error_message=message,
        traceback_digest="2c61e0f5b7aa",
        error_place="printing:feed:12",
    )


async def _terminated_by_worker(connection: NatsPyConnection, queue: WorkQueue) -> None:
    (sequence,) = await publish_jobs(connection, queue, ["given up"], headers={"Customer": "Ünal", "Tag": "x"} | KEY)
    death = await _death(connection, queue, sequence, Reason.TERMINATED, f"no paper in tray 7 {SCRIPT}")
    await _record(connection, queue, sequence, death)
    await _terminate(connection, queue, b"+TERM")


async def _deadline_exceeded(connection: NatsPyConnection, queue: WorkQueue) -> None:
    (sequence,) = await publish_jobs(connection, queue, [json.dumps({"pages": 3})])
    death = await _death(connection, queue, sequence, Reason.DEADLINE, "too slow")
    await _record(connection, queue, sequence, death)
    await exhaust_deliveries(connection, queue, 1)


async def _terminate(connection: NatsPyConnection, queue: WorkQueue, answer: bytes) -> None:
    before = await stored_count(connection, f"{queue.name}-dead")
    (message,) = await pull_jobs(connection, queue, 1)
    await connection.request(message.reply, answer)

    async def has_entry() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, f"{queue.name}-dead") > before

    await eventually(has_entry)


async def _redriven_and_parked(connection: NatsPyConnection, queue: WorkQueue) -> None:
    again, parked = await publish_jobs(connection, queue, ["redriven", "parked"], headers=KEY)
    await exhaust_deliveries(connection, queue, 2)
    await asyncio.sleep(1.1)
    (await redrive_dead_letters(connection, queue, request_for([again]))).raise_for_failures()
    (message,) = await pull_jobs(connection, queue, 1)
    await message.ack_sync()
    (await redrive_dead_letters(connection, queue, request_for([parked], max_redrives=0))).raise_for_failures()
    (lost,) = await publish_jobs(connection, queue, ["lost"])
    await _terminate(connection, queue, b"+TERM gone for good")
    archive = await stream_info(connection, f"{queue.name}-archive")
    await connection.api(
        f"STREAM.MSG.DELETE.{queue.name}-archive", {"seq": archive["state"]["last_seq"], "no_erase": True}
    )
    if await get_message(connection, queue.name, lost) is not None:
        raise LookupError(f"{lost} is still there")
