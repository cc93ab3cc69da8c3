"""A stream tail skips no message, whatever is lost on the connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, take_cursor
from testbed.queues import eventually, make_queue, publish_jobs
from testbed.waiters import start_waiting, store_completions, wait_reports

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.jetstream.client.connection import OnMessage, Subscription
    from testbed.face import NatsPyConnection

TAIL = "airflow_provider_jetstream.jetstream.client.stream_tail"


async def consumer_names(connection: NatsPyConnection, stream: str) -> list[str]:
    return list((await connection.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or ())


@pytest.mark.slow
async def test_messages_that_are_lost_on_their_way_are_read_again(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{TAIL}._PULL", b'{"batch": 500, "expires": 30000000000, "idle_heartbeat": 100000000}')
    monkeypatch.setattr(f"{TAIL}._RETRY_PAUSE", 0.01)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(200)))
    lost: list[bytes] = []
    async with connect(settings) as lossy:
        subscribe = lossy.subscribe_raw

        async def subscribe_lossy(
            subject: str, on_message: OnMessage, on_denied: Any = None, form: Any = None
        ) -> Subscription:
            if form is not None:
                return await subscribe(subject, on_message, on_denied, form)
            seen = 0

            def pass_some(name: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
                nonlocal seen
                seen += bool(reply)
                # The last of a burst, too, of which only a heartbeat tells.
                if reply and ((seen % 90 == 0 and len(lost) < 2) or (len(lost) == 2 and reply.endswith(b".0"))):
                    lost.append(reply)
                    return
                on_message(name, reply, headers, payload)

            return await subscribe(subject, pass_some, on_denied)

        monkeypatch.setattr(lossy, "subscribe_raw", subscribe_lossy)
        waiter = start_waiting(lossy, cursor, jobs)
        await eventually(lambda: consumer_names(connection, f"{name}-events"))
        await store_completions(connection, queue, jobs)
        (report,) = await wait_reports([waiter], within=30)
    assert len(lost) == 3
    assert report.completed == set(jobs)
    assert waiter.remaining == list(range(200))[::-1]


@pytest.mark.slow
async def test_a_deleted_consumer_is_replaced_at_its_position(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(300)))
    waiter = start_waiting(connection, cursor, jobs)
    events = f"{name}-events"

    async def delete() -> None:
        seen: set[str] = set()
        while len(seen) < 3:
            for consumer in await consumer_names(connection, events):
                if consumer not in seen:
                    seen.add(consumer)
                    await connection.api(f"CONSUMER.DELETE.{events}.{consumer}")
            await asyncio.sleep(0.02)

    deleting = asyncio.create_task(delete())
    for start in range(0, 300, 10):
        await store_completions(connection, queue, jobs[start : start + 10])
        await asyncio.sleep(0.05)
    await deleting
    (report,) = await wait_reports([waiter])
    assert report.completed == set(jobs)
    assert waiter.remaining == list(range(300))[::-1]


@pytest.mark.slow
async def test_more_ends_than_fit_one_pull_request_are_read(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = list(range(1, 2_002))
    await store_completions(connection, queue, jobs[:1_000])
    waiter = start_waiting(connection, cursor, jobs)
    await eventually(lambda: len(waiter.remaining) == 1_000)
    await store_completions(connection, queue, jobs[1_000:])
    assert (await wait_reports([waiter]))[0].completed == set(jobs)
