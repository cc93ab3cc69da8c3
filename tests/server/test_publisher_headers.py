"""What a publisher's headers say removes, replaces and places no other message."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import nats
import pytest
from nats.js.errors import APIError

from airflow_provider_jetstream.jetstream import (
    Job,
    connect,
    connection_settings,
    find_dead_letters,
    permissions,
    plan,
    provision,
    publish,
    running_warnings,
)
from testbed.face import authorization, read_range, stream_info
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_dead_letters, publish_jobs, running_mover, small_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.face import NatsPyConnection

QUEUE = small_queue("orders", schedules=True, atomic_redrive=True)
OTHER = small_queue("bills", schedules=True)
STREAMS = tuple(stream.name for queue in (QUEUE, OTHER) for stream in (queue, *queue.companions()))
_SECRET = "of-every-user"
SOON = (datetime.now(UTC) + timedelta(milliseconds=500)).isoformat().replace("+00:00", "Z")


def _scheduled(target: str, **headers: str) -> dict[str, str]:
    return {"Nats-Schedule": f"@at {SOON}", "Nats-Schedule-Target": target} | headers


HEADERS = [
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"nats-rollup": "all"},
    _scheduled("orders.jobs.b"),
    _scheduled("completed.orders.worker.1"),
    _scheduled("requeued.orders.1"),
    _scheduled("bills.jobs.a"),
    _scheduled("due.orders.orders.jobs.b"),
    {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "orders.jobs.a"},
    {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "archive.orders.orders.jobs.a"},
    {"Nats-Stream-Source": "orders-schedules 99 due.orders.> > due.orders.orders.jobs.a"},
    {"Scheduled-Msg-Id": "of-another-job"},
    {"KV-Operation": "PURGE"},
    {"KV-Operation": "DEL", "Nats-Rollup": "sub"},
    {"Nats-Incr": "+1"},
    {"Nats-Marker-Reason": "Purge"},
    {"Nats-TTL": "1s"},
    {"Nats-Expected-Last-Sequence": "0"},
    {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-Expected-Last-Subject-Sequence-Subject": "orders.jobs.b"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", "Nats-Rollup": "all"},
    {"Nats-Batch-Id": "c", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", "Nats-Rollup": "sub"},
]


@pytest.fixture
def server() -> Iterator[NatsServer]:
    roles = [permissions(QUEUE, role) for role in ("publisher", "scheduler")]
    config = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*roles))
    admin = f'users: [\n    {{ user: "admin", password: "{_SECRET}" }}'
    with NatsServer(config=config.replace("users: [", admin, 1), user="admin", password=_SECRET) as running:
        yield running


async def _stored(connection: NatsPyConnection) -> dict[str, int]:
    return {name: await stored_count(connection, name) for name in STREAMS}


@pytest.mark.slow
async def test_no_header_of_a_publisher_removes_or_places_anything_else(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "user": "admin", "password": _SECRET})
    async with connect(settings) as connection:
        for queue in (QUEUE, OTHER):
            await provision(connection, queue)
            await make_dead_letters(connection, queue, ["dead"])
            await publish_jobs(connection, queue, ["a", "b"])
            await publish(connection, queue, [Job(b"later", f"{queue.name}.jobs.a", delay="1h")])
        await eventually(lambda: _copied(connection))
        before = await _stored(connection)
        denied: list[str] = []

        async def note(error: Exception) -> None:
            denied.append(str(error))

        user = permissions(QUEUE, "publisher")
        prefix = user.inbox_prefix.encode()
        publisher = await nats.connect(server.url, user=user.user, password=_SECRET, inbox_prefix=prefix, error_cb=note)
        accepted = 0
        for headers in HEADERS:
            try:
                await publisher.jetstream().publish("orders.jobs.a", b"x", headers=headers, timeout=5)
                accepted += 1
            except APIError:
                pass
        for subject in ("scheduled.orders.once.a", "due.orders.orders.jobs.a", "archive.orders.orders.jobs.a"):
            await publisher.publish(subject, b"x", headers=_scheduled("due.orders.orders.jobs.b"))
        await publisher.flush()
        await eventually(lambda: len(denied) == 3)
        await asyncio.sleep(0.5)
        after = await _stored(connection)
        await publisher.close()
        lost = {name: count for name, count in after.items() if count < before[name]}
        assert lost == {}
        grown = {name: count - before[name] for name, count in after.items() if count > before[name]}
        # What is no header of the server's is a job like others, with its copy; a copy with one may be refused.
        assert grown.pop("orders") == accepted < len(HEADERS) / 2
        assert grown.pop("orders-archive", 0) <= accepted
        assert grown == {}


async def _copied(connection: NatsPyConnection) -> bool:
    return [await stored_count(connection, f"{queue.name}-archive") for queue in (QUEUE, OTHER)] == [3, 3]


@pytest.mark.slow
async def test_who_may_schedule_places_jobs_on_the_subjects_of_the_queue_only(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "user": "admin", "password": _SECRET})
    async with connect(settings) as connection:
        for queue in (QUEUE, OTHER):
            await provision(connection, queue)
        before = await _stored(connection)
        placed: list[bytes] = []
        user = permissions(QUEUE, "scheduler")
        scheduler = await nats.connect(
            server.url, user=user.user, password=_SECRET, inbox_prefix=user.inbox_prefix.encode()
        )
        js, own = scheduler.jetstream(), "scheduled.orders.once.a"
        for target in ("completed.orders.worker.1", "requeued.orders.1", "bills.jobs.a", "due.bills.bills.jobs.a"):
            with pytest.raises(APIError, match="target is invalid"):
                await js.publish(own, b"x", headers=_scheduled(target))
        async with running_mover(connection, QUEUE):
            for body, more in (
                (b"x", {"Nats-Schedule-Rollup": "sub"}),
                # Nothing of the server's reaches the queue but the message id.
                (b"y", {"Nats-Schedule-TTL": "1s", "Nats-Expected-Last-Sequence": "0", "Nats-Rollup": "sub"}),
                (b"z", {"Nats-Marker-Reason": "Purge", "KV-Operation": "PURGE"}),
            ):
                with suppress(APIError):
                    await js.publish(own, body, headers=_scheduled("due.orders.orders.jobs.b", **more))
                    placed.append(body)
                    await eventually(lambda: _jobs(connection, len(placed)))
        await scheduler.close()
        after = await _stored(connection)
        changed = {name for name in STREAMS if after[name] != before[name]}
        assert changed == {"orders", "orders-archive"}
        async for message in read_range(connection, "orders"):
            assert [name for name, _ in message.headers if name.startswith("Nats-")] == ["Nats-Msg-Id"]
        assert len(placed) >= 2


async def _jobs(connection: NatsPyConnection, count: int) -> bool:
    return await stored_count(connection, "orders") == count


@pytest.mark.parametrize("flag", ["allow_msg_schedules", "allow_rollup_hdrs"])
async def test_a_queue_whose_publishers_can_purge_it_is_named_with_the_way_out(
    connection: NatsPyConnection, name: str, flag: str
) -> None:
    queue = small_queue(name)
    own = {"name": name, "subjects": [f"{name}.jobs.>"], "retention": "workqueue", flag: True}
    await connection.api(f"STREAM.CREATE.{name}", own)
    forever = flag == "allow_msg_schedules"
    planned = str(await plan(connection, queue))
    assert ("remove it by hand, and provision it again" if forever else "allow_rollup_hdrs: True → False") in planned
    await provision(connection, queue)
    await provision(connection, queue)
    assert (await stream_info(connection, name))["config"]["allow_rollup_hdrs"] is forever
    for found in ((await find_dead_letters(connection, queue)).risks, await running_warnings(connection, queue)):
        assert any("Nats-Rollup" in str(text) for text in found) is forever
    blocked = (await plan(connection, small_queue(name, schedules=True))).blocked
    assert [step.name for step in blocked] == ([name] if forever else [])
