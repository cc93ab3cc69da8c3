"""What the tests of the triggers do again and again: publish and wait, run a trigger, make it anew."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk.module_loading import import_string

from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from testbed.queues import publish_jobs

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.triggers.base import BaseTrigger

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

LONG_AGO = 3600.0


async def waiting(connection: Connection, queue: WorkQueue, count: int, **kwargs: Any) -> JobCompletionTrigger:
    """Publish jobs and give the trigger that waits for them."""
    mark = await take_cursor(connection, queue)
    sequences = [(await connection.client.jetstream().publish(queue.name, b"job")).seq for _ in range(count)]
    arguments = {
        "nats_conn_id": "nats_default",
        "mark": asdict(mark),
        "sequences": [[sequences[0], sequences[-1]]],
        "tolerance": {},
        "deadline": time.time() + 60,
        "deferred_at": time.time() - LONG_AGO,
        "summary": {"published": count},
    }
    return JobCompletionTrigger(**{**arguments, **kwargs})


async def fired(trigger: BaseTrigger) -> dict[str, Any]:
    """Give a trigger's only event, as it is after a journey through JSON."""
    async with asyncio.timeout(30):
        (event,) = [event async for event in trigger.run()]
    payload: dict[str, Any] = json.loads(json.dumps(event.payload, allow_nan=False))
    return payload


def recreated(trigger: BaseTrigger) -> BaseTrigger:
    """Give the trigger that another triggerer makes of what is stored."""
    path, kwargs = trigger.serialize()
    copy: BaseTrigger = import_string(path)(**json.loads(json.dumps(kwargs)))
    return copy


async def store_triggers(connection: Connection, queue: WorkQueue, stored: Path, count: int) -> list[int]:
    """Publish jobs, and write down triggers that wait for one each and for one they share, the first given."""
    mark = await take_cursor(connection, queue)
    shared, *jobs = await publish_jobs(connection, queue, map(str, range(count + 1)))
    triggers = [
        JobCompletionTrigger(
            nats_conn_id="nats_default",
            mark=asdict(mark),
            sequences=[[shared, shared], [job, job]],
            tolerance={},
            deadline=time.time() + 600,
            deferred_at=time.time() - LONG_AGO,
            summary={"job": job},
        )
        for job in jobs
    ]
    await asyncio.to_thread(stored.write_text, "\n".join(json.dumps(each.serialize()) for each in triggers))
    return [shared, *jobs]
