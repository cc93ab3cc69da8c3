"""Streams that others made, those of the source documents included, as YAML files to adopt them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_provider_jetstream.jetstream import (
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    plan,
    provision,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from testbed import seams
from testbed.face import consumer_info, stream_info
from testbed.queues import make_queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SECOND = 10**9
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
    list_consumers = seams.current(seams.CONSUMER_PLAN_LIST_CONSUMERS)

    async def as_of_an_older_server(connection: NatsPyConnection, stream: str) -> Any:
        """Leave out the name, as nats-server 2.10 and 2.11 do."""
        infos = await list_consumers(connection, stream)
        for info in infos.values():
            del info["config"]["name"]
        return infos

    queue = await discover_queue(documents, "IMAGES")
    monkeypatch.setattr(seams.CONSUMER_PLAN_LIST_CONSUMERS, as_of_an_older_server)
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
