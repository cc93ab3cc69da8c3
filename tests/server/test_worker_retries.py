"""When a failed job comes back: after its backoff and a little more, or after the delay that its handler requests."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.worker import Delivery, RetryLaterError, Worker
from testbed.face import consumer_info
from testbed.queues import eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

BACKOFF: dict[str, Any] = {"ack_wait": None, "backoff": ["200ms", "1s", "3s"]}


class FailingHandler:
    """A handler that always fails and records the times of its calls."""

    def __init__(self, *errors: Exception) -> None:
        self.calls: list[float] = []
        self._errors = errors

    async def fail(self, job: Delivery) -> None:
        self.calls.append(time.monotonic())
        raise self._errors[min(job.attempt, len(self._errors)) - 1]

    @property
    def waits(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.calls, self.calls[1:], strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consumer", "delays"),
    [
        # Longer than the backoff, shorter than it, and exactly what the server would take for no delay.
        ({"max_deliver": 4} | BACKOFF, ("500ms", 0.3, timedelta(milliseconds=2_800))),
        ({"ack_wait": "30s", "max_deliver": 3}, ("600ms", 0.2)),
        ({"max_deliver": 2} | BACKOFF, (0,)),
    ],
    ids=["backoff", "none", "at once"],
)
async def test_a_job_comes_back_after_the_delay_that_its_handler_requests(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    consumer: dict[str, Any],
    delays: tuple[Any, ...],
) -> None:
    if delays == (0,):
        # Longer than the job is awaited.
        consumer = consumer | {"backoff": ["2m", "2m"]}
    queue = await make_queue(connection, name, consumer=consumer)
    handler = FailingHandler(*(RetryLaterError(delay, "busy") for delay in delays))
    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await eventually(lambda: len(handler.calls) == len(delays) + 1)
    for wait, error in zip(handler.waits, (RetryLaterError(delay) for delay in delays), strict=True):
        assert error.seconds <= wait


@pytest.mark.slow
async def test_jobs_that_failed_together_do_not_come_back_together_nor_before_their_backoff(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(
        connection, name, consumer={"ack_wait": None, "backoff": ["100ms", "1500ms"], "max_deliver": 3}
    )
    calls: dict[int, list[float]] = {}

    async def fail(job: Delivery) -> None:
        calls.setdefault(job.sequence, []).append(time.monotonic())
        raise ValueError("no paper")

    await publish_jobs(connection, queue, map(str, range(20)))
    async with running_worker(Worker(queue, "worker", fail, settings, concurrency=20)):
        await eventually(lambda: sum(map(len, calls.values())) == 60)
    waits = sorted(times[2] - times[1] for times in calls.values())
    assert waits[0] >= 1.5
    assert waits[-1] < 1.5 * 1.2 + 0.4
    assert waits[-1] - waits[0] > 0.1


async def test_retry_later_on_the_last_attempt_makes_a_dead_letter_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1})
    handler = FailingHandler(RetryLaterError("1h", "busy"))
    await publish_jobs(connection, queue, ["a"])

    async def dead() -> bool:
        # The worker's copy and the server's advisory.
        return await stored_count(connection, f"{name}-dead") == 2

    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await eventually(dead, within=4)
    assert (await consumer_info(connection, name, "worker"))["num_ack_pending"] == 0


@pytest.mark.slow
async def test_attempts_of_a_consumer_without_backoff_do_not_burn_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    # The consumer of the images document, whose own worker takes its ack wait between two attempts.
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 3})
    handler = FailingHandler(ValueError("no such image"))
    await publish_jobs(connection, queue, ["{}"])
    async with running_worker(Worker(queue, "worker", handler.fail, settings)):
        await eventually(lambda: len(handler.calls) == 3)
    for wait, least in zip(handler.waits, [1, 2], strict=True):
        assert least <= wait < least * 1.2 + 0.4
