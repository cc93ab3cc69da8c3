"""A queue's health as numbers: what each number counts, and the requests of an inspection."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from airflow_provider_jetstream.jetstream import (
    Status,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    inspect_queue,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from testbed.code_blocks import code_blocks
from testbed.dead_letters import make_terminated_letters
from testbed.face import NatsPyConnection, consumer_info, inspect_all_queues
from testbed.prometheus import exporter, prometheus
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.nats_server import NatsServer


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
    )
    await make_dead_letters(connection, queue, "abc")
    for kind in ("x", "y", "y"):
        await publish(connection, f"{name}.other.{kind}")
    schedule = {"Nats-Schedule": "@at 2099-01-01T00:00:00Z", "Nats-Schedule-Target": f"due.{name}.{name}.jobs.later"}
    await publish(connection, f"scheduled.{name}.once.a.b", schedule)
    await publish_jobs(connection, queue, ["waiting"])
    health = await inspect_queue(connection, name)
    assert (health.stored, health.pending, health.left_over) == (7, 1, 6)
    (left_over,) = [found.left_over for found in await inspect_all_queues(connection) if found.name == name]
    assert left_over is not None
    assert list(left_over.undeliverable.items()) == [(f"{name}.other.y", 2), (f"{name}.other.x", 1)]
    assert (left_over.schedules, left_over.dead) == (1, 3)


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


# Which streams of a server are work queues, and which stream has their dead letters.


async def test_a_dead_letter_queue_is_no_work_queue_whatever_its_retention(connection: Connection, name: str) -> None:
    letters = f"{name}-dead"
    streams: dict[str, dict[str, Any]] = {
        name: {"subjects": [f"{name}.>"], "retention": "workqueue"},
        # As the source documents make it: only its subjects show what it is.
        letters: {"subjects": [f"{MAX_DELIVERIES}.{name}.*"], "retention": "workqueue"},
        f"{name}-marked": {
            "subjects": [f"dead.{name}.>"],
            "retention": "workqueue",
            "metadata": {"dead_letter_queue": "true"},
        },
        f"{name}-log": {"subjects": [f"log.{name}"], "retention": "limits"},
    }
    for stream, config in streams.items():
        await connection.api(f"STREAM.CREATE.{stream}", {"name": stream, "storage": "memory", **config})
    (look,) = [overview for overview in await inspect_all_queues(connection) if overview.name.startswith(name)]
    assert look.name == name
    assert look.dead_letter_queue is not None
    assert look.dead_letter_queue["config"]["name"] == letters


# Streams that source or mirror a queue have consumers on it, which are no worker's.


@pytest.mark.parametrize("copying", ["mirror", "sources"])
async def test_live_jobs_of_a_queue_that_another_stream_copies_are_not_dead(
    connection: NatsPyConnection, name: str, copying: str
) -> None:
    queue = await make_queue(connection, name, jobs="abc")
    config: dict[str, Any] = {"name": f"{name}-copy"}
    config[copying] = {"name": name} if copying == "mirror" else [{"name": name}]
    await connection.api(f"STREAM.CREATE.{name}-copy", config)

    async def is_copied() -> bool:
        return bool((await connection.api(f"STREAM.INFO.{name}-copy"))["state"]["messages"] == 3)

    await eventually(is_copied, within=10)
    listed = (await connection.api(f"CONSUMER.LIST.{name}"))["consumers"]
    assert any(info["delivered"]["stream_seq"] == 3 for info in listed), "the copying stream's consumer"
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)
    assert not (await redrive_dead_letters(connection, queue)).redriven
    assert [consumer.name for consumer in (await discover_queue(connection, name)).consumers] == [CONSUMER]
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_a_job_that_is_done_and_stays_stored_when_the_sourcing_stream_is_deleted_is_no_dead_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"})
    await connection.api(f"STREAM.CREATE.{name}-copy", {"name": f"{name}-copy", "sources": [{"name": name}]})

    async def sourcing_consumer() -> str | None:
        consumers = (await connection.api(f"CONSUMER.LIST.{name}"))["consumers"]
        return next((info["name"] for info in consumers if info["name"] != CONSUMER), None)

    source = await eventually(sourcing_consumer, within=10)
    # As a source that is away: it takes no job any more, so the jobs that are done stay stored.
    until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.{source}", {"pause_until": until})
    jobs = await publish_jobs(connection, queue, "abc")
    for message in await pull_jobs(connection, queue, 3):
        await message.ack_sync()
    await connection.api(f"STREAM.DELETE.{name}-copy")
    assert await stored_count(connection, name) == len(jobs)
    findings = await find_dead_letters(connection, queue)
    assert [(job.sequence, job.status) for job in findings.dismissed] == [(job, Status.COMPLETED) for job in jobs]
    assert (findings.letters, findings.uncertain) == ((), 0)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), list(report.gone)) == (0, jobs)
    assert await stored_count(connection, name) == 0


# The query of docs/kubernetes.md by which workers are scaled, in a real Prometheus: it counts live work only.


def query_for(name: str) -> str:
    """The page's query, about another queue and consumer."""
    (scaled,) = [
        found
        for block in code_blocks("yaml")
        if block.page == "docs/kubernetes.md" and (found := yaml.safe_load(block.code))["kind"] == "ScaledObject"
    ]
    query = str(scaled["spec"]["triggers"][0]["metadata"]["query"])
    return query.replace('"orders_stream"', f'"{name}"').replace('"processor"', f'"{CONSUMER}"')


def load_of_keda(server: NatsServer, stream: str, consumer: str) -> int:
    """What KEDA's scaler ``nats-jetstream`` computes of the monitoring port."""
    (account,) = server.monitor("jsz?acc=$G&consumers=true&config=true")["account_details"]
    (detail,) = [each for each in account["stream_detail"] if each["name"] == stream]
    for each in detail.get("consumer_detail") or []:
        if each["name"] == consumer:
            return int(each["num_pending"] + each["num_ack_pending"])
    return int(detail["state"]["last_seq"])


@pytest.mark.slow
async def test_live_work_counts_and_dead_letters_do_not(own_nats: NatsServer, name: str, tmp_path: Path) -> None:
    query = query_for(name)
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as admin:
        queue = await make_queue(admin, name, consumer={"ack_wait": "60s"})
        await make_dead_letters(admin, queue, ["a", "b"])
        await make_terminated_letters(admin, queue, ["c"])
        with exporter(own_nats.url) as port, prometheus(port, tmp_path / "prometheus") as server:
            await eventually(lambda: server.values(query) == [0], within=60)
            assert await stored_count(admin, name) == 2
            assert load_of_keda(own_nats, name, CONSUMER) == 0
            # A wrong name counts everything that was ever stored there; the query has no value, which is an error.
            assert load_of_keda(own_nats, name, "unknown") == 3
            assert server.values(query_for("unknown")) == []
            await publish_jobs(admin, queue, ["d", "e", "f"])
            await pull_jobs(admin, queue, 1)
            await eventually(lambda: server.values(query) == [3], within=30)
            assert load_of_keda(own_nats, name, CONSUMER) == 3
            await admin.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": "2099-01-01T00:00:00Z"})
            await eventually(lambda: server.values(query) == [0], within=30)
            assert load_of_keda(own_nats, name, CONSUMER) == 3


@pytest.mark.slow
async def test_a_death_that_nobody_pulls_for_counts_until_the_first_pull(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "100ms", "max_deliver": 2}, jobs=["a"])
    await pull_jobs(connection, queue, 1)
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.4)

    async def load() -> int:
        info = await consumer_info(connection, name, CONSUMER)
        return int(info["num_pending"] + info["num_ack_pending"])

    assert (await load(), await stored_count(connection, f"{name}-dead")) == (1, 0)
    # What a worker that is started for it does.
    await connection.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", b'{"batch":1,"expires":200000000}', reply="_INBOX.worker"
    )

    async def settled() -> bool:
        return await load() == 0

    await eventually(settled)
    assert (await stored_count(connection, name), await stored_count(connection, f"{name}-dead")) == (1, 1)
