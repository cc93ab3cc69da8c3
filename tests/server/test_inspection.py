"""A queue's health as numbers: what each number counts, and the requests of an inspection."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import inspect_queue
from airflow_provider_jetstream.jetstream.contract import marker_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError, UnreachableError
from testbed.face import LeftOver, NatsPyConnection, count_left_over
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pytest_mock import MockerFixture


async def publish(connection: NatsPyConnection, subject: str, headers: dict[str, str] | None = None) -> None:
    await connection.client.jetstream().publish(subject, b"job", headers=headers)


async def test_jobs_are_pending_or_in_flight_until_they_end(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "30s"})
    empty = await inspect_queue(connection, name)
    assert (empty.stored, empty.pending, empty.in_flight, empty.oldest) == (0, 0, 0, None)
    before = datetime.now(UTC) - timedelta(seconds=1)
    await publish_jobs(connection, queue, "abc")
    done, working, delayed = await pull_jobs(connection, queue, 3)
    await done.ack_sync()
    await delayed.nak(delay=30)
    await working.nak()
    (again,) = await pull_jobs(connection, queue, 1)
    assert again.metadata.sequence.stream == working.metadata.sequence.stream
    await publish_jobs(connection, queue, "de")

    async def counted() -> bool:
        health = await inspect_queue(connection, name)
        return (health.stored, health.pending, health.in_flight, health.redelivered) == (4, 2, 2, 1)

    await eventually(counted)
    health = await inspect_queue(connection, name)
    assert (health.last_sequence, health.left_over) == (5, 0)
    assert before < (health.oldest or before) <= health.taken_at
    (consumer,) = health.consumers.values()
    assert (consumer.name, consumer.filters, consumer.paused) == (CONSUMER, (">",), False)
    assert (consumer.deliveries, consumer.delivered, consumer.ack_floor) == (4, 3, 1)


async def test_a_pause_and_open_pull_requests_are_reported(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    inbox = connection.client.new_inbox()
    pull = await connection.client.subscribe(inbox)
    request = b'{"batch": 1, "expires": 5000000000}'
    await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", request, reply=inbox)

    async def has_pull_requests() -> bool:
        return (await inspect_queue(connection, name)).consumers[CONSUMER].pulls == 1

    await eventually(has_pull_requests)
    until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": until})
    consumer = (await inspect_queue(connection, name)).consumers[CONSUMER]
    assert consumer.paused
    assert str(consumer) == "worker: 0 pending, 0 in flight, paused"
    await pull.unsubscribe()


async def test_thousands_of_jobs_cost_two_requests(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    consumers = [
        {"name": kind, "filter_subject": f"{name}.jobs.{kind}.*", "max_deliver": 2, "ack_wait": "30s"} for kind in "ab"
    ]
    queue = await make_queue(connection, name, consumers=consumers, archive=False)
    for number in range(5_000):
        await connection.client.publish(f"{name}.jobs.{'ab'[number % 2]}.{number}", b"job")
    await connection.client.flush()
    taken = await pull_jobs(connection, queue, 100, consumer="b")

    async def stored() -> bool:
        return (await inspect_queue(connection, name)).stored == 5_000

    await eventually(stored)
    spy = mocker.spy(NatsPyConnection, "api")
    health = await inspect_queue(connection, name)
    assert await count_left_over(connection, health) == LeftOver({}, 0, 0)
    assert [call.args[1] for call in spy.call_args_list] == [f"STREAM.INFO.{name}", f"CONSUMER.LIST.{name}"]
    numbers = {consumer.name: (consumer.pending, consumer.in_flight) for consumer in health.consumers.values()}
    assert numbers == {"a": (2_500, 0), "b": (2_400, len(taken))}


@pytest.mark.slow
async def test_more_consumers_than_a_page_has_are_all_counted(connection: NatsPyConnection, name: str) -> None:
    consumers = [{"name": f"c{number}", "filter_subject": f"{name}.jobs.{number}"} for number in range(300)]
    await make_queue(connection, name, consumers=[{**consumer, "max_deliver": 1} for consumer in consumers])
    for number in range(300):
        await connection.client.publish(f"{name}.jobs.{number}", b"job")
    await connection.client.flush()

    async def counted() -> bool:
        health = await inspect_queue(connection, name)
        return [consumer.pending for consumer in health.consumers.values()] == [1] * 300

    await eventually(counted)


async def test_left_over_messages_are_counted_by_kind(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(
        connection,
        name,
        subjects=[f"{name}.jobs.>", f"{name}.other.*"],
        consumer={"filter_subject": f"{name}.jobs.>"},
        schedules=True,
        atomic_redrive=True,
    )
    await make_dead_letters(connection, queue, "abc")
    for kind in ("x", "y", "y"):
        await publish(connection, f"{name}.other.{kind}")
    await publish(connection, marker_subject(name, 1))
    schedule = {"Nats-Schedule": "@at 2099-01-01T00:00:00Z", "Nats-Schedule-Target": f"due.{name}.{name}.jobs.later"}
    await publish(connection, f"scheduled.{name}.once.a.b", schedule)
    await publish_jobs(connection, queue, ["waiting"])
    health = await inspect_queue(connection, name)
    assert (health.stored, health.pending, health.left_over) == (8, 1, 7)
    left_over = await count_left_over(connection, health, f"{name}-schedules")
    assert left_over == LeftOver({f"{name}.other.y": 2, f"{name}.other.x": 1}, schedules=1, dead=3)


async def test_jobs_of_a_deleted_consumer_are_undeliverable(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, "ab", kind="x")
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    health = await inspect_queue(connection, name)
    assert (dict(health.consumers), health.pending, health.left_over) == ({}, 0, 2)
    assert await count_left_over(connection, health) == LeftOver({f"{name}.jobs.x": 2}, 0, 0)


async def test_missing_numbers_of_a_cluster_raise_and_never_count_as_zero(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    await make_queue(connection, name)
    api = NatsPyConnection.api

    async def without_a_leader(self: NatsPyConnection, subject: str, request: Mapping[str, Any] | None = None) -> Any:
        # What a cluster answers while a consumer has no leader, which one server never does.
        answer = await api(self, subject, request)
        return json.loads(json.dumps(answer)) | (
            {"consumers": [], "missing": [CONSUMER]} if "CONSUMER.LIST" in subject else {}
        )

    mocker.patch.object(NatsPyConnection, "api", without_a_leader)
    with pytest.raises(UnreachableError, match=rf"^expected the state of every consumer of {name}, found none of w"):
        await inspect_queue(connection, name)


async def test_a_queue_that_is_not_there_is_named(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name} on the server, found none"):
        await inspect_queue(connection, name)
