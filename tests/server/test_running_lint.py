"""The look at a queue in use: what its workers, foreign ones on bare nats-py, show of best practices."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, provision, running_warnings
from testbed.queues import publish_jobs, pull_jobs, store_completion, until_stored

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


def good_queue(name: str, **consumer: Any) -> WorkQueue:
    """Declare a queue that violates no best practice, with other fields of its consumer."""
    values = {"name": "worker", "filter_subject": f"{name}.jobs.>", "max_deliver": 3, "backoff": ["30s"]} | consumer
    return WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=[{**values, "sample_freq": "100%"}],
        discard="new",
        max_bytes="1MB",
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
    )


async def provisioned(connection: NatsPyConnection, name: str, **consumer: Any) -> WorkQueue:
    queue = good_queue(name, **consumer)
    await provision(connection, queue)
    return queue


async def names(connection: NatsPyConnection, queue: WorkQueue) -> list[str]:
    return [warning.name for warning in await running_warnings(connection, queue)]


async def test_a_queue_that_works_as_declared_has_no_warnings(connection: NatsPyConnection, name: str) -> None:
    queue = await provisioned(connection, name)
    assert await names(connection, queue) == []
    await publish_jobs(connection, queue, map(str, range(30)))
    for message in await pull_jobs(connection, queue, 30):
        await message.ack_sync()
    await events_stored(connection, name, 30)
    assert await names(connection, queue) == []


async def events_stored(connection: NatsPyConnection, name: str, count: int) -> None:
    await until_stored(connection, f"{name}-events", count)


@pytest.mark.parametrize(
    ("ack_wait", "ack_time", "name_of_warning", "sentence"),
    [
        (
            "10m",
            2.0,
            "long-ack-wait",
            (
                "consumer worker has an ack_wait of 10m, and the longest of the last 25 jobs took 2 s: a crashed"
                " worker's jobs wait for that time; use a shorter one"
            ),
        ),
        (
            "30s",
            28.0,
            "short-ack-wait",
            (
                "consumer worker has an ack_wait of 30s, and the longest of the last 25 jobs took 28 s: the server"
                " delivers one that takes longer to a second worker; raise it, or let workers report progress"
            ),
        ),
    ],
)
async def test_the_ack_wait_is_compared_with_the_times_of_handlers(
    connection: NatsPyConnection, name: str, ack_wait: str, ack_time: float, name_of_warning: str, sentence: str
) -> None:
    queue = await provisioned(connection, name, backoff=[ack_wait])
    for sequence in range(1, 26):
        # The server's own metric, with the time of a slow handler.
        metric = {
            "type": "io.nats.jetstream.metric.v1.consumer_ack",
            "timestamp": "2026-01-01T00:00:00Z",
            "stream": name,
            "consumer": "worker",
            "stream_seq": sequence,
            "deliveries": 1,
            "ack_time": round(ack_time * 1e9 / (1 + sequence % 5)),
        }
        subject = f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.worker"
        await connection.client.jetstream().publish(subject, json.dumps(metric).encode())
    measured = [warning for warning in await running_warnings(connection, queue) if warning not in queue.warnings()]
    assert [(warning.name, str(warning)) for warning in measured] == [(name_of_warning, sentence)]


@pytest.mark.slow
async def test_a_worker_that_reports_progress_may_take_longer_than_the_ack_wait(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await provisioned(connection, name, backoff=["600ms"])
    await publish_jobs(connection, queue, ["slow"])
    (message,) = await pull_jobs(connection, queue, 1)
    for _ in range(6):
        await asyncio.sleep(0.15)
        await message.in_progress()
    await message.ack_sync()
    await events_stored(connection, name, 1)
    # The server measures from the last report.
    assert await names(connection, queue) == []


async def test_jobs_that_were_done_in_a_later_delivery_call_for_idempotent_handlers(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await provisioned(connection, name)
    await publish_jobs(connection, queue, map(str, range(10)))
    for message in (await pull_jobs(connection, queue, 10))[:3]:
        await message.nak()
    for message in await pull_jobs(connection, queue, 3):
        await message.ack_sync()
    await events_stored(connection, name, 3)
    (warning,) = await running_warnings(connection, queue)
    assert warning.name == "repeated-deliveries"
    assert warning.startswith("3 of the last 3 jobs that consumer worker delivered were done in a second delivery")


async def test_a_job_that_was_done_twice_with_different_results_is_named(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await provisioned(connection, name)
    for sequence, result in ((1, 5), (1, 5), (2, {"a": 1}), (2, {"a": 2}), (3, None)):
        await store_completion(connection, queue, sequence, result=result)
    (warning,) = await running_warnings(connection, queue)
    assert warning.name == "differing-results"
    assert warning.startswith("1 of the last 3 jobs were done more than once with different results, such as job 2 of")


async def test_a_consumer_at_its_limit_of_jobs_in_flight_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await provisioned(connection, name, max_ack_pending=2)
    await publish_jobs(connection, queue, ["a", "b", "c"])
    await pull_jobs(connection, queue, 2)
    (warning,) = await running_warnings(connection, queue)
    assert (warning.name, warning.split(",")[0]) == ("max-ack-pending", "consumer worker has 2 jobs in flight")


async def test_jobs_that_no_consumer_takes_are_counted(connection: NatsPyConnection, name: str) -> None:
    queue = await provisioned(connection, name)
    jetstream = connection.client.jetstream()
    for subject in ("other.a", "other.a", "b"):
        await jetstream.publish(f"{name}.{subject}", b"{}")
    (warning,) = await running_warnings(connection, queue)
    assert (warning.name, warning.split(":")[0]) == (
        "untaken-subjects",
        f"3 jobs match no consumer and stay for ever, such as 2 on {name}.other.a",
    )


async def test_consumers_that_others_made_are_looked_at_too(connection: NatsPyConnection, name: str) -> None:
    queue = await provisioned(connection, name)
    config = {"durable_name": "worker-2", "ack_policy": "explicit", "filter_subject": f"{name}.two", "max_deliver": 4}
    await connection.api(
        f"CONSUMER.CREATE.{name}.worker-2.{name}.two",
        {"stream_name": name, "config": config | {"ack_wait": 600_000_000_000}},
    )
    found = await running_warnings(connection, queue)
    assert {warning.name for warning in found if "consumer worker-2" in warning} >= {"long-ack-wait", "no-backoff"}


async def test_what_strangers_publish_is_no_measurement(connection: NatsPyConnection, name: str) -> None:
    queue = await provisioned(connection, name)
    jetstream = connection.client.jetstream()
    for body in (b"", b"\xff\xfe", b"[]", b'{"type": "io.nats.jetstream.metric.v1.consumer_ack"}', b"9" * 10_000):
        await jetstream.publish(f"completed.{name}.worker.1", body)
    # A metric that somebody puts where completions are.
    await store_completion(connection, queue, 7, type="io.nats.jetstream.metric.v1.consumer_ack", ack_time=10**18)
    # More than a float, and than the server's own numbers, can hold.
    metric = {"type": "io.nats.jetstream.metric.v1.consumer_ack", "timestamp": "2026-01-01T00:00:00Z", "stream": name}
    for time in (10**400, -1):
        body = json.dumps(metric | {"consumer": "worker", "stream_seq": 9, "deliveries": 1, "ack_time": time}).encode()
        await jetstream.publish(f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.worker", body)
    # Another queue's completion.
    await store_completion(connection, queue, 8, stream="other", deliveries=9)
    assert await names(connection, queue) == []
