from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, connect, connection_settings, plan, provision
from testbed.dead_letters import change_stream
from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

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


async def test_undeclared_fields_keep_their_values(connection: NatsPyConnection, name: str) -> None:
    await _create(connection, _by_hand(name, f"{name}.>", max_msgs=50, discard="new", deny_purge=True))
    queue = WorkQueue(name=name, subjects=[f"{name}.>"], max_bytes="1MB")
    await provision(connection, queue)
    config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    assert (config["max_msgs"], config["discard"], config["deny_purge"]) == (50, "new", True)
    assert config["max_bytes"] == _MEGABYTE
