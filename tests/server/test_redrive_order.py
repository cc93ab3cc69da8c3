"""Redrives that keep the order of the letters of each key."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject, lease_subject
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, RedriveRequestError
from testbed import seams
from testbed.dead_letters import publish_raw, request_for
from testbed.face import last_message
from testbed.key_ledger import KeyLedger, make_keyed_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_queue,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
)
from testbed.sent_frames import sent_messages

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

BY_CUSTOMER = RedriveRequest(order_key="header:Customer")
SAMPLED = {"sample_freq": "100%"}


async def test_letters_of_a_key_come_back_one_after_the_other(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    rng = random.Random(17)  # noqa: S311 - dice
    bodies = await make_keyed_letters(connection, queue, rng.choices("abcd", [6, 2, 1, 3], k=24))
    ledger = KeyLedger(connection, queue)
    async with ledger.workers(rng):
        report = await redrive_dead_letters(connection, queue, BY_CUSTOMER)
    report.raise_for_failures()
    assert len(report.redriven) == 24
    assert ledger.violations(bodies) == {}
    assert ledger.most_at_once > 1
    assert (await stored_count(connection, name), (await find_dead_letters(connection, queue)).letters) == (0, ())


async def test_letters_without_a_key_wait_for_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="xyz")
    report = await redrive_dead_letters(connection, queue, BY_CUSTOMER)
    assert dict(report.redriven) == {1: 4, 2: 5, 3: 6}


@pytest.mark.slow
async def test_the_next_letter_stays_where_the_job_before_dies_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_keyed_letters(connection, queue, "aabab")
    ledger = KeyLedger(connection, queue, fails=["a2"])
    async with ledger.workers():
        report = await redrive_dead_letters(connection, queue, BY_CUSTOMER)
    assert (sorted(report.redriven), list(report.failed)) == ([1, 2, 3, 5], [4])
    assert report.failed[4] == (
        f"the job before it, {report.redriven[2]} of {name}, is dead again (1 deliveries to {CONSUMER}), and letters of"
        " the key a come back in order; original kept"
    )
    assert ledger.of("start").count("a3") == 0
    # The job that died again comes first next time, though its sequence is higher now, whoever redrove it last.
    await redrive_dead_letters(connection, queue, request_for([report.redriven[2]]))
    await exhaust_deliveries(connection, queue, 1)
    ledger = KeyLedger(connection, queue)
    async with ledger.workers():
        (await redrive_dead_letters(connection, queue, BY_CUSTOMER)).raise_for_failures()
    assert ledger.events == [("start", "a2"), ("end", "a2"), ("start", "a3"), ("end", "a3")]


async def test_a_parked_letter_holds_nothing_up(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_keyed_letters(connection, queue, "a")
    await redrive_dead_letters(connection, queue)
    await exhaust_deliveries(connection, queue, 1)
    await make_keyed_letters(connection, queue, "ab")
    request = RedriveRequest(order_key="header:Customer", max_redrives=1)
    ledger = KeyLedger(connection, queue)
    async with ledger.workers():
        report = await redrive_dead_letters(connection, queue, request)
    assert (list(report.parked), sorted(report.redriven)) == ([2], [3, 4])
    assert sorted(ledger.of("end")) == ["a1", "b1"]


@pytest.mark.slow
async def test_terminated_letters_and_those_without_an_entry_keep_the_order(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    for number, body in enumerate(["a1", "a2", "a3", "a4"], 1):
        await publish_jobs(connection, queue, [body], headers={"Customer": "a"})
        (message,) = await pull_jobs(connection, queue, 1)
        await (message.respond(b"+TERM no paper") if number % 2 else message.nak())

    async def all_seen() -> bool:
        return len((await find_dead_letters(connection, queue)).letters) == 4

    await eventually(all_seen)
    # Found by counting from now on.
    await connection.api(
        f"STREAM.PURGE.{name}-dead", {"filter": f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.*"}
    )
    ledger = KeyLedger(connection, queue)
    async with ledger.workers():
        (await redrive_dead_letters(connection, queue, BY_CUSTOMER)).raise_for_failures()
    assert ledger.violations(["a1", "a2", "a3", "a4"]) == {}


async def test_a_key_may_be_any_bytes(nats: NatsServer, connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    for body, key in (("a1", b"\xff"), ("a2", b"\xff"), ("b1", b"\xfe")):
        await publish_raw(nats, f"{name}.jobs.plain", b"Customer: " + key, body.encode())
    await exhaust_deliveries(connection, queue, 3)
    ledger = KeyLedger(connection, queue)
    async with ledger.workers():
        report = await redrive_dead_letters(connection, queue, BY_CUSTOMER)
    report.raise_for_failures()
    assert report.redriven[3] < report.redriven[2]
    assert ledger.violations(["a1", "a2", "b1"]) == {}


@pytest.mark.slow
async def test_the_next_letter_waits_for_the_job_in_another_queue(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queue(connection, name), await make_queue(connection, f"{name}-other", consumer=SAMPLED)
    await make_keyed_letters(connection, queue, "abaab")
    request = RedriveRequest(order_key="header:Customer", target=other, subject=f"{other.name}.jobs.x")
    ledger = KeyLedger(connection, other, fails=["b1"])
    async with ledger.workers():
        report = await redrive_dead_letters(connection, queue, request)
    assert (sorted(report.redriven), list(report.failed)) == ([1, 2, 3, 4], [5])
    assert ledger.violations(["a1", "a2", "a3"]) == {}
    # It is a letter of the other queue now: the next redrive waits for what becomes of it there.
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), list(report.failed)) == ({}, [5])
    await redrive_dead_letters(connection, other)
    ledger = KeyLedger(connection, other)
    async with ledger.workers():
        (await redrive_dead_letters(connection, queue, request)).raise_for_failures()
    assert ledger.events == [("start", "b1"), ("end", "b1"), ("start", "b2"), ("end", "b2")]


@pytest.mark.slow
async def test_a_cancelled_job_holds_nothing_up(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s"})
    await make_keyed_letters(connection, queue, "aa")
    redrive = asyncio.create_task(redrive_dead_letters(connection, queue, BY_CUSTOMER))
    (first,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, 3, type="io.airflow.jetstream.v1.cancelled", why="no longer wanted")
    await first.ack_sync()
    assert dict((await redrive).redriven) == {1: 3, 2: 4}


@pytest.mark.slow
async def test_what_becomes_of_a_letter_meanwhile_counts(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "2s"})
    await make_keyed_letters(connection, queue, "aaabbb")
    redrive = asyncio.create_task(redrive_dead_letters(connection, queue, BY_CUSTOMER))
    first, second = await pull_jobs(connection, queue, 2)
    # A slow worker has finished one after all, and nobody knows; the other one is known to be done.
    await connection.request(late_ack_subject(name, CONSUMER, 2), b"+ACK")
    await store_completion(connection, queue, 5)
    await first.ack_sync()
    await second.ack_sync()
    ledger = KeyLedger(connection, queue)
    async with ledger.workers():
        report = await redrive
    assert (sorted(report.redriven), list(report.failed)) == ([1, 4, 6], [3])
    assert report.failed[3].startswith("the job before it, 2, isn't known to have completed: its job is no longer")
    assert ledger.of("end") == ["b3"]


@pytest.mark.slow
async def test_the_lease_is_free_while_jobs_are_awaited(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "2s"})
    await make_keyed_letters(connection, queue, "aab")
    stop = False
    redrive = asyncio.create_task(redrive_dead_letters(connection, queue, BY_CUSTOMER, stopped=lambda: stop))
    (first, second) = await pull_jobs(connection, queue, 2)
    assert [first.data, second.data] == [b"a1", b"b1"]

    async def is_released() -> bool:
        lease = await last_message(connection, f"{name}-audit", lease_subject(name))
        return lease is not None and bool(json.loads(lease.data)["released"])

    await eventually(is_released)
    assert not redrive.done()
    stop = True
    report = await redrive
    assert (report.cancelled, sorted(report.redriven), report.failed) == (True, [1, 3], {})
    # The next one waits for the job that the first one has left.
    again = asyncio.create_task(redrive_dead_letters(connection, queue, BY_CUSTOMER))
    await asyncio.sleep(0.3)
    assert not again.done()
    assert len((await find_dead_letters(connection, queue)).letters) == 1
    await first.ack_sync()
    await second.ack_sync()
    assert sorted((await again).redriven) == [2]


async def test_two_redrives_at_once_keep_the_order_together(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    rng = random.Random(4)  # noqa: S311 - dice
    bodies = await make_keyed_letters(connection, queue, rng.choices("abc", k=18))
    ledger = KeyLedger(connection, queue)
    async with ledger.workers(rng), connect(settings) as other:
        reports = await asyncio.gather(
            redrive_dead_letters(connection, queue, BY_CUSTOMER), redrive_dead_letters(other, queue, BY_CUSTOMER)
        )
    assert sorted(sequence for report in reports for sequence in report.redriven) == list(range(1, 19))
    assert ledger.violations(bodies) == {}


@pytest.mark.slow
async def test_an_interrupted_redrive_is_run_again_in_order(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.LEASE_LEASE_SECONDS, 0.6)
    queue = await make_queue(connection, name, consumer=SAMPLED)
    rng = random.Random(11)  # noqa: S311 - dice
    bodies = await make_keyed_letters(connection, queue, rng.choices("ab", k=8))
    ledger = KeyLedger(connection, queue)
    cut_off = 0
    async with ledger.workers(rng, slow=0.2):
        # Later ones come further: servers before 2.11 need more requests for the same.
        while await cut_off_redrive(settings, queue, rng.randrange(30, 150) + 5 * cut_off):
            cut_off += 1
            assert cut_off < 60
    assert cut_off >= 2
    assert (await redrive_dead_letters(connection, queue, BY_CUSTOMER)).redriven == {}
    assert ledger.violations(bodies) == {}


async def cut_off_redrive(settings: ConnectionSettings, queue: WorkQueue, requests: int) -> bool:
    """Run a redrive that reaches the server no more after some requests; return whether it was cut off."""
    left = requests
    async with connect(settings.model_copy(update={"timeout": 0.2})) as connection:
        write = connection.write

        def write_some(frames: bytes, messages: int = 1) -> None:
            nonlocal left
            left -= messages
            sent = [message for _, message in sent_messages(frames)][: messages + min(left, 0)]
            write(b"".join(sent), len(sent))
            if left < 0:
                raise OSError("cut off")

        connection.write = write_some  # type: ignore[method-assign]
        with suppress(JetStreamProviderError, OSError):
            (await redrive_dead_letters(connection, queue, BY_CUSTOMER)).raise_for_failures()
            return left < 0
    return True


@pytest.mark.parametrize("order_key", ["customer", "header:", "subject:0", "subject:x", "subject:²", "Header:a", ""])
def test_what_states_no_key_is_refused(order_key: Any) -> None:
    with pytest.raises(RedriveRequestError, match=r"expected header:<name>, subject:.* as order_key, found"):
        RedriveRequest(order_key=order_key)


async def test_order_needs_events_and_copies(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None, dead="a")
    for work in (redrive_dead_letters, preview):
        with pytest.raises(RedriveRequestError, match=f"expected events of {name} for a redrive with order_key"):
            await work(connection, queue, BY_CUSTOMER)
    with pytest.raises(RedriveRequestError, match="found order_key: a redrive in place"):
        RedriveRequest(order_key="header:Customer", protocol=Protocol.IN_PLACE)
