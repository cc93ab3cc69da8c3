"""Discovery of queues made by hand, those of the source documents included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

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
    plan,
    provision,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed import seams
from testbed.dead_letters import change_stream
from testbed.face import consumer_info, inspect_all_queues, remove_entries, stream_info
from testbed.queues import eventually, make_queue, probe, publish_jobs, pull_jobs, small_queue, stored_count

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
    assert (queue.archive, queue.audit, queue.events) == (None, None, None)
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
    config = (await stream_info(alone, "jobs_dlq"))["config"]
    await alone.api("STREAM.UPDATE.jobs_dlq", config | {"metadata": {"dead_letter_queue": "true"}})
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
async def test_a_provisioned_queue_is_discovered_as_it_was_declared(
    connection: NatsPyConnection, name: str, *, schedules: bool
) -> None:
    declared = await make_queue(
        connection,
        name,
        consumer={"max_deliver": 4, "ack_wait": None, "backoff": ["1s", "5s"], "sample_freq": "100%"},
        schedules=schedules,
        max_age="2h",
        description="for tests",
    )
    discovered = await discover_queue(connection, name)
    assert (discovered.schedules is not None) == schedules
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
    for name in ("aa", "zz"):
        await stream(alone, name, f"{name}.>", retention="workqueue", storage="memory")
    assert [overview.name for overview in await inspect_all_queues(alone)] == ["aa", "zz"]


async def test_a_stream_of_all_advisories_is_a_dead_letter_queue_of_any_queue(alone: NatsPyConnection) -> None:
    await stream(alone, "all", "$JS.EVENT.ADVISORY.>")
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


# Streams that others made, those of the source documents included, as YAML files to adopt them by.


DAY = 86_400 * SECOND
QUARTER_GIGABYTE = 256 * 2**20

ORDERS: dict[str, Any] = {
    "retention": "workqueue",
    "storage": "file",
    "discard": "new",
    "max_bytes": QUARTER_GIGABYTE,
    "duplicate_window": 120 * SECOND,
    "deny_delete": True,
    "allow_direct": True,
}
TWICE = {"backoff": [5 * SECOND], "max_deliver": 2}
STREAMS: dict[str, dict[str, Any]] = {
    "jobs": {
        "subjects": ["jobs.*.*"],
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": 20_000,
        "max_bytes": QUARTER_GIGABYTE,
        "max_age": 7 * DAY,
        "duplicate_window": 120 * SECOND,
    },
    "jobs_dlq": {"subjects": [f"{MAX_DELIVERIES}.jobs.*"], "metadata": {"dead_letter_queue": "true"}},
    "TASKS": {"subjects": ["tasks.>"], "retention": "workqueue", "storage": "file"},
    "orders_stream": {"subjects": ["orders.*"], "max_msg_size": 2**20, **ORDERS},
    "orders_unprocessed": {"subjects": [f"{MAX_DELIVERIES}.orders_stream.*"], **ORDERS},
    "IMAGES": {
        "subjects": ["IMAGES.>"],
        "retention": "workqueue",
        "discard": "old",
        "max_msg_size": 512,
        "duplicate_window": 3_600 * SECOND,
    },
}
CONSUMERS: dict[tuple[str, str], dict[str, Any]] = {
    **{("jobs", name): {"filter_subject": f"jobs.{name}.*", "max_deliver": 3} for name in ("high", "low")},
    **{("TASKS", f"worker-{n}"): {"filter_subject": f"tasks.{n}.>", "max_deliver": 5} for n in range(11)},
    ("orders_stream", "processor"): {"description": "Orders processor", "filter_subject": "orders.*", **TWICE},
    ("orders_unprocessed", "unprocessed_order_handler"): {"description": "handle unprocessed jobs", **TWICE},
    ("IMAGES", "BW"): {"filter_subject": "IMAGES.blackandwhite", "max_deliver": 5, "ack_wait": 30 * SECOND},
}


@pytest.fixture
async def documents(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to a server with the streams and consumers of the source documents, made by hand."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as opened:
        for name, config in STREAMS.items():
            await opened.api(f"STREAM.CREATE.{name}", {"name": name, "num_replicas": 1, "storage": "file"} | config)
        for (stream, name), fields in CONSUMERS.items():
            config = {"durable_name": name, "ack_policy": "explicit", "deliver_policy": "all"} | fields
            await opened.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})
        yield opened


async def test_the_queues_of_the_documents_are_adopted_as_they_are_by_their_yaml(
    documents: NatsPyConnection, tmp_path: Path
) -> None:
    before = {name: (await stream_info(documents, name))["config"] for name in STREAMS}
    for name in ("jobs", "TASKS", "orders_stream", "IMAGES"):
        discovered = await discover_queue(documents, name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(discovered.to_yaml(), encoding="utf-8")
        adopted = WorkQueue.load(path)
        assert adopted == discovered
        assert (await plan(documents, adopted)).changes == ()
        await provision(documents, adopted)
    assert {name: (await stream_info(documents, name))["config"] for name in STREAMS} == before


async def test_a_consumer_made_with_a_durable_name_only_is_adopted_as_it_is(
    documents: NatsPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_consumers = seams.current(seams.CONSUMER_STEPS_LIST_CONSUMERS)

    async def as_of_an_older_server(connection: NatsPyConnection, stream: str) -> Any:
        """Leave out the name, as nats-server 2.10 and 2.11 do."""
        infos = await list_consumers(connection, stream)
        for info in infos.values():
            del info["config"]["name"]
        return infos

    queue = await discover_queue(documents, "IMAGES")
    monkeypatch.setattr(seams.CONSUMER_STEPS_LIST_CONSUMERS, as_of_an_older_server)
    assert (await plan(documents, queue)).changes == ()


async def test_the_yaml_has_the_values_of_the_article_and_its_handler(documents: NatsPyConnection) -> None:
    text = (await discover_queue(documents, "orders_stream")).to_yaml()
    for line in (
        "max_bytes: 256MB",
        "max_msg_size: 1MB",
        "duplicate_window: 2m",
        "deny_delete: true",
        "- name: processor\n  filter_subject: orders.*\n  description: Orders processor\n",
        "dead_letters:\n  name: orders_unprocessed\n",
        "  - name: unprocessed_order_handler\n    description: handle unprocessed jobs\n",
    ):
        assert line in text


async def test_an_adopted_file_can_be_extended_by_what_the_queue_lacks(documents: NatsPyConnection) -> None:
    images = (await discover_queue(documents, "IMAGES")).to_yaml()
    assert "archive: false\naudit: false\n" in images
    values = yaml.safe_load(images) | {"dead_letters": "images_dead", "archive": True, "audit": True}
    executed = await provision(documents, WorkQueue.load(values))
    assert {step.name for step in executed.changes} == {"images_dead", "IMAGES-archive", "IMAGES-audit", "IMAGES"}
    assert (await consumer_info(documents, "IMAGES", "BW"))["config"]["ack_wait"] == 30 * SECOND


async def test_partitions_beyond_ten_are_one_consumer_of_the_yaml(connection: NatsPyConnection, name: str) -> None:
    worker = {"name": "worker", "filter_subject": f"{name}.{{partition}}.>", "partitions": 12, "max_deliver": 2}
    declared = WorkQueue(name=name, subjects=[f"{name}.>"], consumers=[worker])
    await provision(connection, declared)
    discovered = await discover_queue(connection, name)
    assert [(consumer.name, consumer.filter_subjects, consumer.metadata) for consumer in discovered.consumers] == [
        (consumer.name, consumer.filter_subjects, None) for consumer in declared.consumers
    ]
    assert (await plan(connection, discovered)).changes == ()
    assert f"- name: worker\n  filter_subject: {name}.{{partition}}.>\n" in discovered.to_yaml()


async def test_consumers_of_a_dead_letter_queue_that_cannot_be_declared_are_left_out(
    connection: NatsPyConnection, name: str
) -> None:
    await make_queue(connection, name)
    for consumer, fields in {
        "all": {"ack_policy": "explicit", "deliver_policy": "all"},
        "none": {"ack_policy": "none", "deliver_policy": "all"},
        "new": {"ack_policy": "explicit", "deliver_policy": "new"},
        f"redrive-{name}": {"ack_policy": "explicit", "deliver_policy": "all"},
        "push": {"ack_policy": "explicit", "deliver_policy": "all", "deliver_subject": f"pushed.{name}"},
    }.items():
        body = {"stream_name": f"{name}-dead", "config": {"durable_name": consumer, **fields}}
        await connection.api(f"CONSUMER.DURABLE.CREATE.{name}-dead.{consumer}", body)
    discovered = await discover_queue(connection, name)
    assert discovered.dead_letters is not None
    assert [(consumer.name, consumer.max_deliver) for consumer in discovered.dead_letters.consumers] == [("all", -1)]
    assert (await plan(connection, discovered)).changes == ()


_ORDERS = Path(__file__).parents[2] / "example_dags" / "queues" / "orders.yaml"
_MAX = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
_SECOND = 1_000_000_000
_MEGABYTE = 1_048_576


@pytest.fixture
async def own(own_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """A connection to a server where the documents' own names are free."""
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as opened:
        yield opened


async def _create(connection: NatsPyConnection, stream: dict[str, Any], *consumers: dict[str, Any]) -> None:
    """Create a stream and its consumers as the command line and the clients of other languages do."""
    name = stream["name"]
    await connection.api(f"STREAM.CREATE.{name}", stream)
    for consumer in consumers:
        body = {"stream_name": name, "config": consumer, "action": ""}
        await connection.api(f"CONSUMER.CREATE.{name}.{consumer['name']}", body)


async def _created(connection: NatsPyConnection, stream: str) -> str:
    return str((await connection.api(f"STREAM.INFO.{stream}"))["created"])


def _by_hand(name: str, subject: str, retention: str = "workqueue", **limits: Any) -> dict[str, Any]:
    unlimited = {"max_consumers": -1, "max_msgs": -1, "max_msgs_per_subject": -1, "max_bytes": -1, "max_msg_size": -1}
    stream = {"name": name, "subjects": [subject], "retention": retention, "storage": "file", "num_replicas": 1}
    return {**stream, **unlimited, "max_age": 0, "duplicate_window": 120 * _SECOND, **limits}


def _processor(name: str, description: str | None, **more: Any) -> dict[str, Any]:
    retries = {"max_deliver": 2, "backoff": [5 * _SECOND], "ack_policy": "explicit", "deliver_policy": "all"}
    return {
        "name": name,
        "durable_name": name,
        "description": description,
        "replay_policy": "instant",
        **retries,
        **more,
    }


async def test_the_orders_streams_made_by_hand_are_adopted_with_copies_of_jobs_and_entries_and_no_other_change(
    own: NatsPyConnection,
) -> None:
    queue = WorkQueue.load(_ORDERS)
    limits: dict[str, Any] = {"discard": "new", "max_bytes": 256 * _MEGABYTE, "deny_delete": True, "allow_direct": True}
    await _create(
        own,
        _by_hand("orders_stream", "orders.*", max_msg_size=_MEGABYTE, **limits),
        _processor("processor", "Orders processor", filter_subject="orders.*"),
    )
    await _create(
        own,
        _by_hand("orders_unprocessed", f"{_MAX}.orders_stream.*", **limits),
        _processor("unprocessed_order_handler", "handle unprocessed jobs"),
    )
    created = await _created(own, "orders_stream")
    as_it_is = WorkQueue(**queue.model_dump(mode="json", exclude_unset=True) | {"archive": False, "audit": False})
    sampled = "update consumer orders_stream/processor\n    sample_freq: unset → 100%"
    assert [str(step) for step in (await plan(own, as_it_is)).changes] == ["create stream orders_events", sampled]
    done = await provision(own, queue)
    assert [str(step) for step in done.steps] == [
        "create stream orders_stream-audit",
        "update stream orders_unprocessed\n    republish: unset → > to entries.orders_stream.>",
        "keep consumer orders_unprocessed/unprocessed_order_handler",
        "create stream orders_events",
        "create stream orders_stream-archive",
        "update stream orders_stream\n    republish: unset → > to archive.orders_stream.>",
        sampled,
    ]
    assert await _created(own, "orders_stream") == created


async def test_the_jobs_streams_made_by_hand_are_adopted_and_the_dead_letter_queue_gets_its_mark(
    own: NatsPyConnection,
) -> None:
    limits: dict[str, Any] = {
        "discard": "new",
        "max_msgs": 20_000,
        "max_bytes": 256 * _MEGABYTE,
        "max_age": 7 * 86_400 * _SECOND,
    }
    await _create(own, _by_hand("jobs", "jobs.*.*", **limits))
    existing: dict[str, Any] = {"metadata": {"owner": "ops"}, "allow_direct": True}
    await _create(own, _by_hand("jobs_dlq", f"{_MAX}.jobs.*", "limits", **existing))
    queue = WorkQueue(
        name="jobs",
        subjects=["jobs.*.*"],
        discard="new",
        max_msgs=20_000,
        max_bytes="256MB",
        max_age="7d",
        duplicate_window="2m",
        consumers=[{"name": "high", "filter_subject": "jobs.high.*", "max_deliver": 3}],
        dead_letters={"name": "jobs_dlq", "subjects": [f"{_MAX}.jobs.*"]},
    )
    done = await provision(own, queue)
    assert str(done) == (
        "update stream jobs_dlq\n    metadata: {} → {'dead_letter_queue': 'true'}\n"
        "create stream jobs-archive\n"
        "create stream jobs-audit\n"
        "update stream jobs\n    republish: unset → > to archive.jobs.>\n"
        "create consumer jobs/high"
    )
    metadata = (await own.api("STREAM.INFO.jobs_dlq"))["config"]["metadata"]
    assert (metadata["owner"], metadata["dead_letter_queue"]) == ("ops", "true")


async def test_the_images_stream_made_by_hand_is_adopted_as_it_is(own: NatsPyConnection) -> None:
    stream = _by_hand("IMAGES", "IMAGES.>", discard="old", max_msg_size=512, duplicate_window=3_600 * _SECOND)
    consumer = _processor("BW", None, filter_subject="IMAGES.blackandwhite", max_deliver=5, ack_wait=30 * _SECOND)
    await _create(own, stream, {key: value for key, value in consumer.items() if key != "backoff"})
    queue = WorkQueue(
        name="IMAGES",
        subjects=["IMAGES.>"],
        discard="old",
        max_msg_size=512,
        duplicate_window="1h",
        consumers=[{"name": "BW", "filter_subject": "IMAGES.blackandwhite", "max_deliver": 5, "ack_wait": "30s"}],
    )
    assert (await plan(own, queue)).changes == ()


async def test_jobs_that_wait_survive_an_adoption_with_changes(connection: NatsPyConnection, name: str) -> None:
    await _create(connection, _by_hand(name, f"{name}.jobs.>"))
    queue = WorkQueue(name=name, subjects=[f"{name}.jobs.>"], max_msgs=5_000, discard="new")
    sequences = await publish_jobs(connection, queue, [f"job {number}" for number in range(10)])
    created = await _created(connection, name)
    assert [step.action for step in (await provision(connection, queue)).steps] == ["update"]
    info = await connection.api(f"STREAM.INFO.{name}")
    assert (info["created"], info["state"]["messages"], info["state"]["last_seq"]) == (created, 10, sequences[-1])


@pytest.mark.since_server("2.11", "messages with a time to live")
async def test_settings_that_the_package_does_not_know_survive_an_update(
    connection: NatsPyConnection, name: str
) -> None:
    stream_extras: dict[str, Any] = {
        "compression": "s2",
        "republish": {"src": f"{name}.>", "dest": f"archive.{name}.>"},
        "subject_transform": {"src": f"{name}.old.>", "dest": f"{name}.new.>"},
        "allow_msg_ttl": True,
        "metadata": {"owner": "ops", "team": "theirs"},
    }
    consumer_extras: dict[str, Any] = {
        "priority_groups": ["fast"],
        "priority_policy": "overflow",
        "max_batch": 7,
        "max_expires": 60 * _SECOND,
        "inactive_threshold": 3_600 * _SECOND,
        "metadata": {"owner": "ops"},
    }
    processor = _processor("w", None, filter_subject=f"{name}.a", **consumer_extras)
    await _create(connection, _by_hand(name, f"{name}.>", **stream_extras), processor)
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        max_msgs=77,
        metadata={"team": "ours"},
        consumers=[
            {
                "name": "w",
                "filter_subject": f"{name}.b",
                "max_deliver": 9,
                "metadata": {"speed": "slow"},
                "backoff": ["1s"],
            }
        ],
    )
    done = await provision(connection, queue)
    assert [step.action for step in done.steps] == ["update", "update"]
    stream = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    consumer = (await connection.api(f"CONSUMER.INFO.{name}.w"))["config"]
    for stored, extras in ((stream, stream_extras), (consumer, consumer_extras)):
        assert {field: stored.get(field) for field in extras if field != "metadata"} == {
            field: value for field, value in extras.items() if field != "metadata"
        }
    assert stream["max_msgs"] == 77
    assert (stream["metadata"]["owner"], stream["metadata"]["team"]) == ("ops", "ours")
    assert (consumer["filter_subject"], consumer["max_deliver"], consumer["backoff"]) == (f"{name}.b", 9, [_SECOND])
    assert (consumer["metadata"]["owner"], consumer["metadata"]["speed"]) == ("ops", "slow")
    assert (await plan(connection, queue)).changes == ()


async def test_an_audit_that_refuses_records_when_it_is_full_never_drops_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await change_stream(connection, f"{name}-audit", max_msgs=1_000, discard="new")
    await provision(connection, queue)
    config = (await connection.api(f"STREAM.INFO.{name}-audit"))["config"]
    assert (config["max_msgs"], config["discard"]) == (1_000, "new")
