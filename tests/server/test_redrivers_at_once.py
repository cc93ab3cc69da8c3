"""Redrives of different kinds at the same time, in processes of their own: each job is done once, or parked."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError

from airflow_provider_jetstream.jetstream import Selection, find_dead_letters
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue
from testbed.redrivers import redrivers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

LETTERS = 40
RESET_LEVEL = 4
COPY = {"protocol": "copy"}
IN_PLACE = {"protocol": "in_place"}
PARK = {"max_redrives": 0}
# What happens to the first redrive of each queue: it is killed in place of one of its calls that change something
# (early, while it stores, while it records), or stopped for longer than its lease lasts after so many seconds.
FATES: tuple[dict[str, dict[str, Any]], ...] = (
    {"": {}, "killed": {"kill_at": 3}, "stopped": {"stop_after": 0.05}},
    {"": {}, "killed": {"kill_at": 30}, "stopped": {"stop_after": 0.12}},
    {"": {}, "killed": {"kill_at": 60}, "stopped": {"stop_after": 0.25}},
)
# How a redrive ends that was stopped: somebody else has the lease, or the server has closed its connection.
CUT_OFF = ("LeaseLostError", "LeaseHeldError", "UnreachableError", "DeadlineError")


class Worker:
    """A foreign worker that does jobs as they come, and notes which."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue) -> None:
        self._connection = connection
        self._queue = queue
        self.done: Counter[str] = Counter()
        self.idle = 0

    async def run(self) -> None:
        pull = await self._connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=self._queue.name)
        while True:
            try:
                messages = await pull.fetch(10, timeout=0.3)
            except (TimeoutError, NatsTimeoutError):
                self.idle += 1
                continue
            for message in messages:
                self.done[message.data.decode()] += 1
                await message.ack_sync()

    async def wait_for(self, jobs: int) -> None:
        """Wait until as many jobs are done, which takes until a killed redrive's pause is over, and no more come."""
        await eventually(lambda: self.done.total() >= jobs, within=20)
        idle = self.idle
        await eventually(lambda: self.idle >= idle + 2, within=20)


async def parked_jobs(connection: NatsPyConnection, queue: WorkQueue) -> Counter[str]:
    found = await find_dead_letters(connection, queue, Selection(parked=True))
    return Counter(letter.body.decode() for letter in found.letters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "fate"),
    [
        ((IN_PLACE, COPY), ""),
        ((IN_PLACE, PARK), ""),
        ((COPY, PARK), ""),
        ((COPY, IN_PLACE, PARK), ""),
        ((COPY, IN_PLACE, PARK), "killed"),
        ((COPY, IN_PLACE, PARK), "stopped"),
    ],
    ids=["in place and copy", "in place and park", "copy and park", "all three", "killed", "stopped"],
)
async def test_each_job_is_done_once_or_parked_whoever_redrives_beside_whom(
    nats: NatsServer,
    connection: NatsPyConnection,
    name: str,
    tmp_path: Path,
    requests: Sequence[dict[str, Any]],
    fate: str,
) -> None:
    if IN_PLACE in requests and connection.api_level < RESET_LEVEL:
        pytest.skip("nats-server can't reset a consumer before 2.14")
    queues = [
        await make_queue(connection, f"{name}-{number}", consumer={"ack_wait": "2s"}, duplicate_window="500ms")
        for number in range(3)
    ]
    bodies = [f"job-{number}" for number in range(LETTERS)]
    for queue in queues:
        await make_dead_letters(connection, queue, bodies)
    workers = [Worker(connection, queue) for queue in queues]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        async with redrivers([nats.url], tmp_path) as starter:
            outcomes = await asyncio.gather(
                *(
                    starter.redrive(queue, request, **(fates[fate] if number == 0 else {}))
                    for queue, fates in zip(queues, FATES, strict=True)
                    for number, request in enumerate(requests)
                )
            )
            errors = [outcome.error for outcome in outcomes if outcome.error]
            assert [error for error in errors if not (fate == "stopped" and error.startswith(CUT_OFF))] == []
            for queue in queues:
                # What came back while the next operation already looked is found by one more.
                assert (await starter.redrive(queue, COPY)).complete
        parked = [await parked_jobs(connection, queue) for queue in queues]
        for worker, apart in zip(workers, parked, strict=True):
            await worker.wait_for(LETTERS - apart.total())
    finally:
        for task in running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    for queue, worker, apart in zip(queues, workers, parked, strict=True):
        assert worker.done + apart == dict.fromkeys(bodies, 1)
        assert (await find_dead_letters(connection, queue)).letters == ()
