"""Read-ahead finds the same letters as single reads, with far fewer requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Selection,
    connect,
    connection_settings,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, next_message
from airflow_provider_jetstream.jetstream.client.readahead import read_ahead
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.dead_letters import change_stream, make_terminated_letters, publish_raw, request_for
from testbed.face import Scan
from testbed.queues import make_dead_letters, make_queue, publish_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Connection, DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection, NotDead
    from testbed.nats_server import NatsServer

QUEUE = {"consumer": {"ack_wait": "1s"}}


async def scan_all(connection: Connection, queue: WorkQueue) -> tuple[list[DeadLetter], list[NotDead], list[int]]:
    """Scan all letters, parked ones too."""
    scan = await Scan.begin(connection, queue)
    letters: list[DeadLetter] = []
    dismissed: list[NotDead] = []
    for parked in (False, True):
        async for page in scan.pages(Selection(parked=parked)):
            letters += page.letters
            dismissed += page.dismissed
    return letters, dismissed, sorted(scan.reconciliation.orphans)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
async def test_the_same_letters_are_found(
    connection: NatsPyConnection, nats: NatsServer, name: str, *, direct: bool
) -> None:
    queue = await make_queue(connection, name, allow_direct=direct, max_age="1h", **QUEUE)
    await make_dead_letters(connection, queue, map(str, range(300)))
    await make_terminated_letters(connection, queue, map(str, range(30)))
    await publish_raw(nats, f"{name}.jobs.odd", b"Twice: 1\r\nAirflow-Dag-Id: a\xff\r\nTwice: 2", b"odd")
    await make_dead_letters(connection, queue, [])
    await redrive_dead_letters(connection, queue, request_for([1, 2, 301]))
    await redrive_dead_letters(connection, queue, request_for([3, 302], max_redrives=0))
    plain = await scan_all(connection, queue)
    ahead = await scan_all(await read_ahead(connection, queue.name, queue.companion_names()), queue)
    assert len(plain[0]) == 327
    assert ahead[0] == plain[0]
    assert ahead[1:] == plain[1:]


@pytest.mark.slow
async def test_far_fewer_requests_are_sent(own_nats: NatsServer, name: str) -> None:
    requests = []
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
        await make_dead_letters(connection, queue, map(str, range(400)))
        for reader in (connection, await read_ahead(connection, queue.name, queue.companion_names())):
            before = own_nats.monitor("varz")["in_msgs"]
            assert len((await scan_all(reader, queue))[0]) == 400
            requests.append(own_nats.monitor("varz")["in_msgs"] - before)
    # Without reading ahead, an entry, a job and a completion are read for each of as few letters as these; the audit is
    # known to be empty.
    assert requests[0] > 1_200
    assert requests[1] < 120


async def test_single_reads_equal_those_of_the_api(connection: NatsPyConnection, nats: NatsServer, name: str) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["first"])
    await publish_raw(nats, f"{name}.jobs.odd", b"Nats-Stream: mine\r\nNats-Sequence: 7\r\nA: 1\r\nA: 2", b"\0\xff")
    await publish_raw(nats, f"{name}.jobs.bare", b"", b"")
    await publish_jobs(connection, queue, ["last"] * 3)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 4, "no_erase": True})
    assert await stored_count(connection, name) == 5
    ahead = await read_ahead(connection, queue.name, queue.companion_names())
    for sequence in (1, 2, 3, 4, 5, 6, 7, 2**63):
        assert await get_message(ahead, name, sequence) == await get_message(connection, name, sequence)
        for subject in (">", f"{name}.jobs.odd"):
            expected = await next_message(connection, name, sequence, subject)
            assert await next_message(ahead, name, sequence, subject) == expected
    subjects = [f"{name}.jobs.{kind}" for kind in ("plain", "odd", "bare", "none")]
    last = await asyncio.gather(*(last_message(ahead, name, subject) for subject in [*subjects, *subjects]))
    expected_last = [await last_message(connection, name, subject) for subject in subjects]
    assert last == [*expected_last, *expected_last]
    # A job without a body, and one with the header of a server's answer, would be evidence of nothing.
    assert [message.sequence if message else None for message in expected_last] == [6, None, None, None]


@pytest.mark.slow
async def test_a_message_is_read_again_after_two_seconds(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["job"])
    ahead = await read_ahead(connection, queue.name, queue.companion_names())
    assert await get_message(ahead, name, 1)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1, "no_erase": True})
    # It was read less than two seconds before.
    assert await get_message(ahead, name, 1)
    await asyncio.sleep(2.1)
    assert await get_message(ahead, name, 1) is None


async def test_a_cancelled_read_does_not_cancel_the_others(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["job"])
    ahead = await read_ahead(connection, queue.name, queue.companion_names())
    reads = [asyncio.create_task(get_message(ahead, name, 1)) for _ in range(2)]
    lasts = [asyncio.create_task(last_message(ahead, name, f"{name}.jobs.plain")) for _ in range(2)]
    await asyncio.sleep(0)
    reads[0].cancel()
    lasts[0].cancel()
    assert (await reads[1], await lasts[1]) == (await get_message(connection, name, 1),) * 2


@pytest.mark.slow
async def test_a_stream_that_allows_no_direct_gets_any_more_is_still_read(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, allow_direct=True, **QUEUE)
    await publish_jobs(connection, queue, ["job"])
    ahead = await read_ahead(connection, queue.name, queue.companion_names())
    await change_stream(connection, name, allow_direct=False)
    assert await get_message(ahead, name, 1)
    assert await last_message(ahead, name, f"{name}.jobs.plain")
    await connection.api(f"STREAM.DELETE.{name}")
    with pytest.raises(NotFoundError):
        await get_message(ahead, name, 1)
