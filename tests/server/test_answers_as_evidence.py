"""Answers of the server that a client directs to the subjects of evidence, under exactly the rights of each role."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import nats as nats_py
import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    connect,
    find_dead_letters,
    permissions,
    provision,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from testbed.dead_letters import stream_messages
from testbed.face import authorization
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, make_dead_letters, publish_jobs, pull_jobs, small_queue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

_SECRET = "of-every-user"
_ADMIN = "admin"
_NAMES = ("shop", "attacker", "awaited")
# Subjects of evidence about jobs 1 and 2.
_TARGETS = (
    "handled.shop.{n}",
    "completed.shop.worker.{n}",
    "completed.shop.other.{n}",
    "dead.shop.worker.{n}",
    "dead.shop._.{n}",
    "parked.shop.worker.{n}",
    "parked.shop._.{n}",
    "audit.shop.letters.{n}",
    "audit.shop.intents.x{n}",
    "audit.shop.runs.x{n}",
    "audit.shop.ledger",
    "audit.shop.lease-renewal",
    "entries.shop.dead.shop.worker.{n}",
    "entries.shop.parked.shop.worker.{n}",
    "entries.shop.$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.shop.worker",
    "archive.shop.shop.jobs.plain",
    "published.shop.x{n}",
    "cancelled.shop.x{n}",
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.shop.worker",
    "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.shop.worker",
    "$JS.EVENT.METRIC.CONSUMER.ACK.shop.worker",
)


def queue_of(name: str) -> WorkQueue:
    consumer = {"max_deliver": 1, "ack_wait": "400ms", "sample_freq": "100%"}
    consumers = [{"name": part, "filter_subject": f"{name}.{part}.>", **consumer} for part in ("other",)]
    return small_queue(
        name,
        subjects=[f"{name}.jobs.>", f"{name}.other.>"],
        consumers=[{"name": CONSUMER, "filter_subject": f"{name}.jobs.>", **consumer}, *consumers],
        # So that the audit captures copies of entries.
        dead_letters={"name": f"{name}-dead", "retention": "workqueue"},
        archive=True,
    )


@pytest.fixture(scope="module", params=["2.15.0", "2.12.8"])
def server(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server with two queues in one account, and users of their roles."""
    policies = [permissions(queue_of(name), role) for name in _NAMES for role in ("publisher", "waiter", "monitor")]
    policies += [
        permissions(queue_of(name), "worker", consumer=part) for name in _NAMES for part in ("worker", "other")
    ]
    users = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*policies))
    config = users.replace("users: [", f'users: [ {{ user: {_ADMIN}, password: "{_SECRET}" }}', 1)
    binary = find_nats_server() if request.param == "2.15.0" else nats_server_of(request.param)
    with NatsServer(config=config, user=_ADMIN, password=_SECRET, binary=binary) as running:
        yield running


@pytest.fixture
async def admin(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(ConnectionSettings(servers=(server.url,), user=_ADMIN, password=_SECRET)) as connection:
        yield connection


@asynccontextmanager
async def user(server: NatsServer, name: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """Connect without this package; what the server denies is noted."""
    denied: list[str] = []

    async def note(error: Exception) -> None:
        denied.append(str(error))

    client = await nats_py.connect(
        server.url, user=name, password=_SECRET, inbox_prefix=f"_INBOX_{name}", error_cb=note
    )
    try:
        yield client, denied
        await client.flush()
    finally:
        await client.close()


async def direct_publishers_answers(server: NatsServer, queue: str, targets: list[str]) -> None:
    """As a publisher: PubAcks, empty answers of batches, PubAcks of batches, refusals."""
    job = f"{queue}.jobs.own"
    async with user(server, f"{queue}-publisher") as (client, denied):
        for number, target in enumerate(targets):
            await client.publish(job, b"{}", reply=target)
            await client.publish(job, b"{}", reply=target, headers={"Nats-Expected-Last-Sequence": "99999"})
            batch = {"Nats-Batch-Id": f"b{number}", "Nats-Batch-Sequence": "1"}
            await client.publish(job, b"{}", reply=target, headers=batch)
            commit = batch | {"Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
            await client.publish(job, b"{}", reply=target, headers=commit)
        await client.flush()
        assert denied == []


async def direct_workers_answers(server: NatsServer, queue: str, consumer: str, targets: list[str]) -> None:
    """As a worker: jobs and statuses of pull requests, answers to acknowledgements and of the API."""
    async with user(server, f"{queue}-worker-{consumer}") as (client, denied):
        pull = f"$JS.API.CONSUMER.MSG.NEXT.{queue}.{consumer}"
        for number, target in enumerate(targets):
            await client.publish(pull, b'{"batch":1,"no_wait":true}', reply=target)
            await client.publish(pull, b'{"batch":1,"expires":100000000,"max_bytes":1}', reply=target)
            await client.publish(pull, b'{"batch":-1}', reply=target)
            await client.publish(f"$JS.API.CONSUMER.INFO.{queue}.{consumer}", b"", reply=target)
            await client.publish(f"$JS.API.STREAM.MSG.GET.{queue}-events", b'{"seq":1}', reply=target)
            await client.publish(f"$JS.ACK.{queue}.{consumer}.1.{5000 + number}.1.0.0", b"+ACK", reply=target)
        await client.flush()
        assert denied == []


async def direct_readers_answers(server: NatsServer, queue: str, role: str, targets: list[str]) -> None:
    """As a waiter or a monitor: answers of the API, and stored messages of companions."""
    async with user(server, f"{queue}-{role}") as (client, denied):
        for target in targets:
            await client.publish(f"$JS.API.STREAM.INFO.{queue}", b"", reply=target)
            await client.publish(f"$JS.API.STREAM.MSG.GET.{queue}-events", b'{"seq":1}', reply=target)
            if role == "monitor":
                for stream in ("", "-dead", "-audit", "-archive"):
                    await client.publish(f"$JS.API.DIRECT.GET.{queue}{stream}", b'{"seq":1}', reply=target)
        await client.flush()
        assert denied == []


@pytest.mark.slow
async def test_no_answer_that_a_role_directs_anywhere_hides_loses_or_repeats_a_letter(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    shop, attacker = queue_of("shop"), queue_of("attacker")
    for queue in (shop, attacker):
        await provision(admin, queue)
    assert await make_dead_letters(admin, shop, ["first", "second"]) == [1, 2]
    # Jobs whose bodies would be evidence, could they be stored elsewhere.
    await publish_jobs(admin, attacker, ['{"by": "mallory"}', '{"stream": "shop", "sequence": 1}'])
    targets = [target.format(n=n) for target in _TARGETS for n in (1, 2)]
    for name in ("shop", "attacker"):
        await direct_publishers_answers(server, name, targets)
    await direct_workers_answers(server, "shop", "other", targets)
    await direct_workers_answers(server, "attacker", CONSUMER, targets)
    for role in ("waiter", "monitor"):
        await direct_readers_answers(server, "attacker", role, targets)
    reached = {target for target in targets if not target.startswith("audit.shop.lease")}

    async def stored() -> bool:
        streams = ("shop", "shop-events", "shop-dead", "shop-audit", "shop-archive")
        subjects = [await subjects_of(admin, stream) for stream in streams]
        return reached <= set().union(*subjects)

    await eventually(stored)
    findings = await find_dead_letters(admin, shop)
    letters = {letter.sequence: letter.body for letter in findings.letters if letter.sequence in (1, 2)}
    assert letters == {1: b"first", 2: b"second"}
    assert not {1, 2} & {job.sequence for job in findings.dismissed}
    assert all(letter.copy_sequence is None and letter.parked is None for letter in findings.letters)
    report = await redrive_dead_letters(admin, shop)
    assert report.failed == {}
    assert {1, 2} <= report.redriven.keys()
    bodies = [message.data for message in await stream_messages(admin, "shop", "shop.jobs.>")]
    assert (bodies.count(b"first"), bodies.count(b"second")) == (1, 1)


async def subjects_of(admin: NatsPyConnection, stream: str) -> set[str]:
    info = await admin.api(f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return set(info["state"].get("subjects") or {})


async def test_no_answer_ends_a_wait(server: NatsServer, admin: NatsPyConnection) -> None:
    queue = queue_of("awaited")
    await provision(admin, queue)
    cursor = await take_cursor(admin, queue)
    (sequence,) = await publish_jobs(admin, queue, ["job"])
    waiting = asyncio.ensure_future(wait(admin, cursor, [sequence]))
    targets = [f"completed.awaited.worker.{sequence}", "$JS.EVENT.METRIC.CONSUMER.ACK.awaited.worker"]
    targets += [f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.awaited.{CONSUMER}"]
    await direct_publishers_answers(server, "awaited", targets)
    await direct_workers_answers(server, "awaited", "other", targets)
    # A worker of the other consumer tells of this one's job on a subject of its own.
    async with user(server, "awaited-worker-other") as (client, _):
        place = {"stream": "awaited", "consumer": CONSUMER, "stream_seq": sequence, "deliveries": 1}
        kind, now = "io.airflow.jetstream.v1.completion", "2026-11-27T00:00:00Z"
        body = json.dumps({"type": kind, "timestamp": now, **place}).encode()
        await client.publish(f"completed.awaited.other.{sequence}", body)
        await client.flush()

    async def told() -> bool:
        return f"completed.awaited.other.{sequence}" in await subjects_of(admin, "awaited-events")

    await eventually(told)
    (message, *_) = await pull_jobs(admin, queue, 1)
    assert message.metadata.sequence.stream == sequence
    assert not waiting.done()
    await admin.client.jetstream().publish(f"completed.awaited.{CONSUMER}.{sequence}", body)
    report = await asyncio.wait_for(waiting, 30)
    assert report.completed == {sequence}
