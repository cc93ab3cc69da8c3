"""Steps of the triggers' tests: make a trigger, run it, recreate it from its stored form."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import time
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream import JobsHandle, take_cursor
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger
from testbed.queues import publish_jobs

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.triggers.base import BaseTrigger

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

LONG_AGO = 3600.0


async def completion_trigger(
    connection: NatsPyConnection, queue: WorkQueue, count: int, **kwargs: Any
) -> JobCompletionTrigger:
    """Publish jobs and return the trigger that waits for them."""
    cursor = await take_cursor(connection, queue)
    sequences = [(await connection.client.jetstream().publish(queue.name, b"job")).seq for _ in range(count)]
    arguments = {
        "nats_conn_id": "nats_default",
        "handle": JobsHandle(cursor=cursor, sequences=[(sequences[0], sequences[-1])]),
        "tolerance": {},
        "deadline": time.time() + 60,
        "deferred_at": time.time() - LONG_AGO,
        "summary": {"published": count},
    }
    return JobCompletionTrigger(**{**arguments, **kwargs})


async def event_of(trigger: BaseTrigger) -> dict[str, Any]:
    """Run a trigger, and return its only event as it is after encoding and decoding."""
    async with asyncio.timeout(30):
        (event,) = [event async for event in trigger.run()]
    payload: dict[str, Any] = json.loads(json.dumps(event.payload, allow_nan=False))
    return payload


def recreated(trigger: BaseTrigger) -> BaseTrigger:
    """Return the trigger that another triggerer makes of the stored one."""
    path, kwargs = trigger.serialize()
    copy: BaseTrigger = pkgutil.resolve_name(path)(**json.loads(json.dumps(kwargs)))
    return copy


async def store_triggers(connection: NatsPyConnection, queue: WorkQueue, stored: Path, count: int) -> list[int]:
    """Publish jobs, and store triggers that each wait for one job and for the first one, which all share."""
    cursor = await take_cursor(connection, queue)
    shared, *jobs = await publish_jobs(connection, queue, map(str, range(count + 1)))
    triggers = [
        JobCompletionTrigger(
            nats_conn_id="nats_default",
            handle=JobsHandle(cursor=cursor, sequences=[(shared, shared), (job, job)]),
            tolerance={},
            deadline=time.time() + 600,
            deferred_at=time.time() - LONG_AGO,
            summary={"job": job},
        )
        for job in jobs
    ]
    await asyncio.to_thread(stored.write_text, "\n".join(json.dumps(trigger.serialize()) for trigger in triggers))
    return [shared, *jobs]
