"""Many dead letters fast: what a test or a benchmark of a hundred thousand of them needs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import WorkQueue, provision
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters
from testbed.queues import CONSUMER, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_IN_FLIGHT = 5_000
NAK = b"-NAK"


@dataclass(frozen=True)
class ManyJob:
    """A job that is to die.

    :param job_id: its ``Job-Id``
    :param answer: what its worker answers: with :data:`NAK`, its only delivery is used up
    """

    subject: str
    body: bytes
    job_id: str
    answer: bytes = NAK


async def make_dead_queue(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Provision a queue whose jobs, on ``<name>.jobs.>``, are delivered once."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[{"name": CONSUMER, "max_deliver": 1, "ack_wait": "30s", "max_ack_pending": -1}],
        dead_letters=f"{name}-dead",
    )
    await provision(connection, queue)
    return queue


async def let_die(connection: NatsPyConnection, queue: WorkQueue, jobs: Iterable[ManyJob]) -> int:
    """Publish jobs to a queue whose other jobs are dead, and let them die; return how many there were."""
    letters = require_dead_letters(queue).name
    remaining, count, before = iter(jobs), 0, await stored_count(connection, letters)
    while some := [job for _, job in zip(range(_IN_FLIGHT), remaining, strict=False)]:
        jetstream = connection.client.jetstream(timeout=60)
        for job in some[:-1]:
            await connection.client.publish(job.subject, job.body, headers={"Job-Id": job.job_id})
        # The acknowledgement of the last one says that those before it are stored: they are read in order.
        last = some[-1]
        await jetstream.publish(last.subject, last.body, headers={"Job-Id": last.job_id})
        await _deliver(connection, queue, some)
        count += len(some)
    while await stored_count(connection, letters) < before + count:
        # The server publishes that deliveries are used up only where somebody pulls.
        await probe_consumer(connection, queue.name, CONSUMER)
        await asyncio.sleep(0.05)
    return count


async def _deliver(connection: NatsPyConnection, queue: WorkQueue, jobs: list[ManyJob]) -> None:
    """Take each job once, and answer as it says."""
    client, inbox, taken, all_taken = connection.client, connection.new_inbox(), 0, asyncio.Event()

    async def answer(message: Msg) -> None:
        nonlocal taken
        if message.reply:
            await client.publish(message.reply, jobs[taken].answer)
            taken += 1
            if taken == len(jobs):
                all_taken.set()

    subscription = await client.subscribe(inbox, cb=answer)
    pull = json.dumps({"batch": len(jobs), "expires": 60 * 10**9}).encode()
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{CONSUMER}", pull, reply=inbox)
    await all_taken.wait()
    await subscription.unsubscribe()
    await client.flush(60)
