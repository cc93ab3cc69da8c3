"""Discovery of queues made by hand, those of the source documents included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Reason,
    Selection,
    Status,
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    get_message,
    provision,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed.face import DeadLetterQueueInfo, consumer_info, find_dead_letter_queues, remove_entries, stream_info
from testbed.queues import eventually, make_queue, probe, pull_jobs, small_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SECOND = 10**9
MEGABYTE = 2**20


@pytest.fixture
async def alone(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to a server without other streams."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as opened:
        yield opened


async def stream(connection: NatsPyConnection, name: str, *subjects: str, **fields: Any) -> None:
    config = {"name": name, "subjects": list(subjects), "storage": "file", "num_replicas": 1} | fields
    await connection.api(f"STREAM.CREATE.{name}", config)


async def consumer(connection: NatsPyConnection, stream: str, name: str, **fields: Any) -> None:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", "deliver_policy": "all"} | fields
    await connection.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


async def publish(connection: NatsPyConnection, subject: str, body: str) -> int:
    answer = await connection.request(subject, body.encode())
    return int(json.loads(answer)["seq"])


async def wait_for_advisories(
    connection: NatsPyConnection, queue: WorkQueue, consumer: str, count: int, within: float = 10
) -> None:
    dead_letters = queue.dead_letters.name if queue.dead_letters else ""

    async def all_stored() -> bool:
        await probe(connection, queue, consumer=consumer)
        return await stored_count(connection, dead_letters) == count

    await eventually(all_stored, within)


@pytest.mark.slow
async def test_the_orders_of_the_article(alone: NatsPyConnection) -> None:
    limits = {
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_bytes": 256 * MEGABYTE,
        "max_age": 0,
        "duplicate_window": 120 * SECOND,
        "deny_delete": True,
        "deny_purge": False,
        "allow_direct": True,
    }
    deaths = f"{MAX_DELIVERIES}.orders_stream.*"
    await stream(alone, "orders_stream", "orders.*", max_msg_size=MEGABYTE, **limits)
    await stream(alone, "orders_unprocessed", deaths, max_msg_size=-1, **limits)
    backoff = {"backoff": [5 * SECOND], "max_deliver": 2}
    await consumer(
        alone, "orders_stream", "processor", description="Orders processor", filter_subject="orders.*", **backoff
    )
    await consumer(
        alone, "orders_unprocessed", "unprocessed_order_handler", description="handle unprocessed jobs", **backoff
    )
    queue = await discover_queue(alone, "orders_stream")
    assert queue.dead_letters is not None
    assert (queue.dead_letters.name, queue.dead_letters.retention) == ("orders_unprocessed", "workqueue")
    assert (queue.archive, queue.audit, queue.events, queue.atomic_redrive) == (None, None, None, False)
    assert (queue.subjects, queue.deny_delete, queue.max_bytes) == (("orders.*",), True, 256 * MEGABYTE)
    assert queue.consumer("processor").backoff == (5 * SECOND,)

    for number in range(20):
        await publish(alone, "orders.new", f"order-{number}")
    for count in (20, 10):
        # Every other order fails: it isn't acknowledged.
        for message in await pull_jobs(alone, queue, count, consumer="processor", within=15):
            if message.metadata.sequence.stream % 2 == 0:
                await message.ack_sync()
    await wait_for_advisories(alone, queue, "processor", 10, within=15)
    findings = await find_dead_letters(alone, queue)
    assert [(letter.sequence, letter.body.decode()) for letter in findings.letters] == [
        (number + 1, f"order-{number}") for number in range(0, 20, 2)
    ]
    assert {letter.death.reason for letter in findings.letters} == {Reason.MAX_DELIVERIES}
    risks = "\n".join(findings.risks)
    for risk in ("no archive", "doesn't capture $JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED", "dead.orders_stream.>"):
        assert risk in risks
    # With deny_delete, entries are removed through the document's own processor.
    entries = [entry for letter in findings.letters for entry in letter.entries]
    assert await remove_entries(alone, queue, entries[:3]) == 0
    assert await stored_count(alone, "orders_unprocessed") == 7
    # Without an audit nothing says who removed the other entries: the document's handler may have handled their jobs.
    again = await find_dead_letters(alone, queue)
    assert [letter.sequence for letter in again.letters] == [letter.sequence for letter in findings.letters][3:]
    assert again.uncertain == 3


@pytest.mark.slow
async def test_the_jobs_of_the_workqueue_stream(alone: NatsPyConnection) -> None:
    await stream(
        alone,
        "jobs",
        "jobs.*.*",
        retention="workqueue",
        discard="new",
        max_msgs=20_000,
        max_bytes=256 * MEGABYTE,
        max_age=7 * 86_400 * SECOND,
        duplicate_window=120 * SECOND,
    )
    for priority in ("high", "low"):
        await consumer(alone, "jobs", priority, filter_subject=f"jobs.{priority}.*", max_deliver=3, ack_wait=SECOND)
    with pytest.raises(QueueDeclarationError, match="expected dead_letters"):
        await find_dead_letters(alone, await discover_queue(alone, "jobs"))
    await stream(alone, "jobs_dlq", f"{MAX_DELIVERIES}.jobs.*")
    (discovered,) = await find_dead_letter_queues(alone)
    assert discovered == DeadLetterQueueInfo("jobs_dlq", ("jobs",), marked=False, messages=0)
    config = (await stream_info(alone, "jobs_dlq"))["config"]
    await alone.api("STREAM.UPDATE.jobs_dlq", config | {"metadata": {"dead_letter_queue": "true"}})
    (discovered,) = await find_dead_letter_queues(alone)
    assert discovered.marked
    queue = await discover_queue(alone, "jobs")
    assert queue.dead_letters is not None
    assert (queue.dead_letters.name, queue.dead_letters.metadata) == ("jobs_dlq", {"dead_letter_queue": "true"})
    assert [(consumer.name, consumer.max_deliver) for consumer in queue.consumers] == [("high", 3), ("low", 3)]
    for priority in ("high", "low"):
        await publish(alone, f"jobs.{priority}.my_job_id", f"{priority} job")
        for _ in range(3):
            (message,) = await pull_jobs(alone, queue, 1, consumer=priority)
            await message.nak()
    await wait_for_advisories(alone, queue, "high", 1)
    await wait_for_advisories(alone, queue, "low", 2)
    findings = await find_dead_letters(alone, queue, Selection(consumer="low"))
    assert [(letter.body, letter.subject, letter.death.deliveries) for letter in findings.letters] == [
        (b"low job", "jobs.low.my_job_id", 3)
    ]
    assert len((await find_dead_letters(alone, queue)).letters) == 2


@pytest.mark.slow
async def test_the_poison_job_of_the_image_queue(alone: NatsPyConnection) -> None:
    await stream(
        alone,
        "IMAGES",
        "IMAGES.>",
        retention="workqueue",
        discard="old",
        max_msgs=-1,
        max_bytes=-1,
        max_age=0,
        max_msg_size=512,
        duplicate_window=3600 * SECOND,
    )
    await consumer(
        alone,
        "IMAGES",
        "BW",
        max_deliver=5,
        ack_wait=30 * SECOND,
        replay_policy="instant",
        filter_subject="IMAGES.blackandwhite",
    )
    discovered = await discover_queue(alone, "IMAGES")
    assert (discovered.dead_letters, discovered.max_msg_size, discovered.consumer("BW").max_deliver) == (None, 512, 5)
    sequence = await publish(alone, "IMAGES.blackandwhite", "{}")
    await publish(alone, "IMAGES.resize", '{"id": "1"}')
    for _ in range(5):
        # Where the document's worker crashes, this one naks at once.
        (message,) = await pull_jobs(alone, discovered, 1, consumer="BW")
        await message.nak()
    await probe(alone, discovered, consumer="BW")
    queue = WorkQueue(name="IMAGES", subjects="IMAGES.>", dead_letters="images-dead", consumers=discovered.consumers)
    await provision(alone, queue)
    # No stream captured the advisory when it was published.
    assert await stored_count(alone, "images-dead") == 0
    findings = await find_dead_letters(alone, queue, Selection(sequences=frozenset({sequence})))
    (letter,) = findings.letters
    assert (letter.sequence, letter.body, letter.subject, letter.death.reason) == (
        sequence,
        b"{}",
        "IMAGES.blackandwhite",
        Reason.ORPHAN,
    )
    assert findings.undeliverable == 1
    stored = await get_message(alone, "IMAGES", sequence)
    assert stored is not None
    assert stored.time == letter.time
    adopted = await discover_queue(alone, "IMAGES")
    assert adopted.archive is not None
    assert adopted.audit is not None
    assert (adopted.archive.name, adopted.audit.name) == ("IMAGES-archive", "IMAGES-audit")


async def test_partitions_are_discovered_as_such(connection: NatsPyConnection, name: str) -> None:
    worker = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": 3, "max_deliver": 2}
    declared = WorkQueue(name=name, subjects=[f"{name}.>"], consumers=[worker])
    await provision(connection, declared)
    discovered = await discover_queue(connection, name)
    assert [(consumer.partitions, consumer.partition) for consumer in discovered.consumers] == [(3, 0), (3, 1), (3, 2)]
    assert (await provision(connection, discovered)).changes == ()


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [False, True])
@pytest.mark.parametrize("atomic", [False, True])
async def test_a_provisioned_queue_is_discovered_as_it_was_declared(
    connection: NatsPyConnection, name: str, *, atomic: bool, schedules: bool
) -> None:
    declared = await make_queue(
        connection,
        name,
        consumer={"max_deliver": 4, "ack_wait": None, "backoff": ["1s", "5s"], "sample_freq": "100%"},
        atomic_redrive=atomic,
        schedules=schedules,
        max_age="2h",
        description="for tests",
    )
    discovered = await discover_queue(connection, name)
    assert (discovered.atomic_redrive, discovered.schedules is not None) == (atomic, schedules)
    assert (discovered.subjects, discovered.description, discovered.max_age) == (
        declared.subjects,
        "for tests",
        declared.max_age,
    )
    assert discovered.companion_names() == declared.companion_names()
    assert discovered.consumer("worker").backoff == declared.consumer("worker").backoff
    assert discovered.consumer("worker").sample_freq == "100%"
    # Provisioning what was discovered changes nothing.
    before = [await stream_info(connection, stream.name) for stream in (discovered, *discovered.companions())]
    worker = (await consumer_info(connection, name, "worker"))["config"]
    await provision(connection, discovered)
    after = [await stream_info(connection, stream.name) for stream in (discovered, *discovered.companions())]
    assert [info["config"] for info in after] == [info["config"] for info in before]
    assert (await consumer_info(connection, name, "worker"))["config"] == worker
    assert (await find_dead_letters(connection, discovered)).letters == ()


@pytest.mark.slow
async def test_streams_are_found_on_all_pages(alone: NatsPyConnection) -> None:
    for number in range(300):
        await stream(alone, f"other-{number:03}", f"other.{number}", storage="memory")
    await stream(alone, "zz", f"{MAX_DELIVERIES}.a.*", f"{MAX_DELIVERIES}.b.worker", "dead.a.>", storage="memory")
    await stream(alone, "marked", "graves.>", metadata={"dead_letter_queue": "TRUE"}, storage="memory")
    await stream(alone, "terminated", "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>", storage="memory")
    assert await find_dead_letter_queues(alone) == [
        DeadLetterQueueInfo("marked", (), marked=True, messages=0),
        DeadLetterQueueInfo("zz", ("a", "b"), marked=False, messages=0),
    ]


async def test_a_stream_of_all_advisories_is_a_dead_letter_queue_of_any_queue(alone: NatsPyConnection) -> None:
    await stream(alone, "all", "$JS.EVENT.ADVISORY.>")
    (stored,) = await find_dead_letter_queues(alone)
    assert (stored.name, stored.queues, stored.marked) == ("all", ("*",), False)
    await stream(alone, "work", "work.>", retention="workqueue")
    await consumer(alone, "work", "worker", max_deliver=1)
    queue = await discover_queue(alone, "work")
    assert queue.dead_letters is not None
    assert queue.dead_letters.name == "all"
    await publish(alone, "work.a", "a")
    (message,) = await pull_jobs(alone, queue, 1)
    await message.nak()

    async def is_dead() -> bool:
        return len((await find_dead_letters(alone, queue)).letters) == 1

    await eventually(is_dead)
    assert (await find_dead_letters(alone, queue)).dismissed == ()


async def test_a_stream_that_cannot_be_discovered_is_refused_with_the_reason(
    connection: NatsPyConnection, name: str
) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name}"):
        await discover_queue(connection, name)
    queue = await make_queue(connection, name)
    with pytest.raises(QueueDeclarationError, match="expected a stream of work-queue retention, found limits: name"):
        await discover_queue(connection, f"{name}-dead")
    endless = (await consumer_info(connection, name, "worker"))["config"] | {"max_deliver": -1}
    await connection.api(f"CONSUMER.DURABLE.CREATE.{name}.worker", {"stream_name": name, "config": endless})
    with pytest.raises(QueueDeclarationError, match="set max_deliver, or drop dead_letters"):
        await discover_queue(connection, name)
    assert queue == small_queue(name)


async def test_dead_letters_of_a_discovered_queue_with_stale_entries(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    body = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "timestamp": "2020-01-01T00:00:00Z",
        "stream": name,
        "consumer": "worker",
        "stream_seq": 1,
        "deliveries": 1,
    }
    await connection.client.jetstream().publish(f"{MAX_DELIVERIES}.{name}.worker", json.dumps(body).encode())
    findings = await find_dead_letters(connection, await discover_queue(connection, name))
    assert [dismissed.status for dismissed in findings.dismissed] == [Status.STALE]
