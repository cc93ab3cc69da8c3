"""Dead letters without an entry, and entries that the consumers' numbers contradict."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Findings,
    Reason,
    Selection,
    Status,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    provision,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from testbed.face import Scan, consumer_info
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_queue,
    probe,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    store_completion,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


def sequences(findings: Findings) -> list[int]:
    return [letter.sequence for letter in findings.letters]


async def delivered_for_the_last_time(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    for _ in range(queue.consumer(CONSUMER).max_deliver or 1):
        await pull_jobs(connection, queue, count, within=20)


async def idle(connection: NatsPyConnection, queue: WorkQueue, within: float = 10) -> None:
    """Wait until nothing is in flight, without a worker."""

    async def nothing_in_flight() -> bool:
        await probe(connection, queue)
        return bool((await consumer_info(connection, queue.name, CONSUMER))["num_ack_pending"] == 0)

    await eventually(nothing_in_flight, within)


async def forget(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}-dead")


@pytest.mark.slow
@pytest.mark.parametrize(
    "consumer",
    [
        {"max_deliver": 1, "ack_wait": "1500ms"},
        {"max_deliver": 2, "ack_wait": "1500ms"},
        {"max_deliver": 3, "ack_wait": None, "backoff": ["200ms", "400ms", "1500ms"]},
    ],
)
async def test_all_workers_died_before_the_last_ack_wait_was_over(
    connection: NatsPyConnection, name: str, consumer: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs=["done"])
    await process_all(connection, queue)
    queue = await make_queue(connection, name, consumer=consumer, jobs="abc")
    await delivered_for_the_last_time(connection, queue, 3)
    early = await find_dead_letters(connection, queue)
    await asyncio.sleep(1.7)
    looks = [await find_dead_letters(connection, queue) for _ in range(2)]
    assert sequences(early) == []
    assert sequences(looks[-1]) == [2, 3, 4]
    assert {letter.death.reason for letter in looks[-1].letters} == {Reason.MAX_DELIVERIES}
    assert [letter.body for letter in looks[-1].letters] == [b"a", b"b", b"c"]


async def test_the_dead_letter_queue_was_created_after_the_deaths(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead_letters=None, consumer={"max_deliver": 2}, jobs="abc")
    await delivered_for_the_last_time(connection, queue, 3)
    await asyncio.sleep(0.6)
    await idle(connection, queue)
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.uncertain) == ([1, 2, 3], 0)
    (first, *_) = findings.letters
    assert (first.death.reason, first.death.consumer, first.entries, first.preserved) == (
        Reason.ORPHAN,
        "worker",
        (),
        False,
    )
    # Later than its last failure, yet not in the future.
    assert datetime.fromisoformat(first.time) < first.death.died_at <= datetime.now(UTC)


async def test_the_dead_letter_queue_was_full(connection: NatsPyConnection, name: str) -> None:
    full = {"name": f"{name}-dead", "discard": "new", "max_msgs": 2}
    queue = await make_queue(connection, name, dead_letters=full, jobs="abcd")
    for message in await pull_jobs(connection, queue, 4):
        await message.nak()
    await idle(connection, queue)
    findings = await find_dead_letters(connection, queue)
    assert sequences(findings) == [1, 2, 3, 4]
    assert [letter.death.reason for letter in findings.letters].count(Reason.ORPHAN) == 2
    assert f"{name}-dead is full and refuses what is new: deaths are found by counting only; raise max_msgs" in (
        findings.risks
    )


@pytest.mark.smoke
@pytest.mark.slow
async def test_the_server_was_killed_while_jobs_died(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "300ms"})
        await publish_jobs(connection, queue, map(str, range(200)))
        await pull_jobs(connection, queue, 200)
        await pull_jobs(connection, queue, 200)
        # The server is killed while it publishes the advisories.
        asker = asyncio.ensure_future(probe(connection, queue))
        await asyncio.sleep(0.31)
        own_nats.kill()
        await asyncio.wait([asker], timeout=0.1)
        asker.cancel()
        await asyncio.gather(asker, return_exceptions=True)
    own_nats.start()
    async with connect(settings) as connection:
        # Jobs that the crash made alive again may be delivered once more.
        await asyncio.sleep(0.7)
        await idle(connection, queue)
        left = (await process_all(connection, queue)).total()
        findings = await find_dead_letters(connection, queue)
        assert len(findings.letters) + left == 200
        assert (findings.uncertain, findings.dismissed) == (0, ())
        untold = [letter for letter in findings.letters if letter.death.reason == Reason.ORPHAN]
        print(f"{len(findings.letters)} dead, {len(untold)} untold, {left} delivered again")


async def test_what_is_not_yet_certain_while_jobs_are_in_flight_is_counted(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs="abcde")
    alive, *others = await pull_jobs(connection, queue, 4)
    for message in others:
        await message.nak()

    async def is_stored() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, f"{name}-dead") == 3

    await eventually(is_stored)
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 1})
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 3})
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.uncertain) == ([3], 2)
    await alive.ack_sync()
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.uncertain) == ([2, 3, 4], 0)


async def test_orphans_below_the_jobs_in_flight_are_certain(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, dead="ab")
    await publish_jobs(connection, queue, ["done"])
    await process_all(connection, queue)
    await forget(connection, queue)
    await publish_jobs(connection, queue, ["alive"])
    await pull_jobs(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.uncertain) == ([1, 2], 0)


async def test_an_orphan_with_a_stale_entry_is_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await connection.api(f"STREAM.DELETE.{name}")
    await connection.api(f"STREAM.UPDATE.{name}-dead", {"name": f"{name}-dead", "subjects": [f"dead.{name}.>"]})
    queue = await make_queue(connection, name, dead_letters=None, jobs="cd")
    for message in await pull_jobs(connection, queue, 2):
        await message.nak()
    await idle(connection, queue)
    queue = small_queue(name)
    await provision(connection, queue)
    findings = await find_dead_letters(connection, queue)
    assert [(letter.sequence, letter.body, letter.death.reason) for letter in findings.letters] == [
        (1, b"c", Reason.ORPHAN),
        (2, b"d", Reason.ORPHAN),
    ]


async def test_an_orphan_whose_completion_is_stored_is_completed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await forget(connection, queue)
    await store_completion(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert sequences(findings) == [2]
    ((done),) = findings.dismissed
    assert (done.sequence, done.status, done.consumer, done.stored) == (1, Status.COMPLETED, "worker", True)


async def test_undeliverable_jobs_are_counted_and_returned_where_they_are_selected(
    connection: NatsPyConnection, name: str
) -> None:
    consumer = {"filter_subject": f"{name}.jobs.plain"}
    queue = await make_queue(connection, name, consumer=consumer, dead=["dead"])
    await publish_jobs(connection, queue, ["nobody's", "nobody's either"], kind="other")
    await publish_jobs(connection, queue, ["waiting"])
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.undeliverable, findings.uncertain) == ([1], 2, 0)
    named = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))
    findings = await find_dead_letters(connection, queue, named)
    assert [(letter.sequence, letter.body, letter.death.consumer) for letter in findings.letters] == [
        (2, b"nobody's", None),
        (3, b"nobody's either", None),
    ]
    both = Selection(reasons=frozenset({Reason.UNDELIVERABLE, Reason.MAX_DELIVERIES}))
    assert sequences(await find_dead_letters(connection, queue, both)) == [1, 2, 3]


async def test_jobs_of_a_deleted_consumer_that_it_had_not_delivered_are_undeliverable(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await publish_jobs(connection, queue, "c")
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.undeliverable, findings.dismissed) == ([1, 2], 3, ())
    named = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))
    scan = await Scan.begin(connection, queue)
    letters = [letter async for letter in scan.letters(named)]
    assert [(letter.sequence, letter.entries) for letter in letters] == [(3, ())]
    again = await scan.classify_again(letters)
    assert again == letters


async def test_a_death_that_the_server_forgot_in_a_crash_is_no_letter_while_the_job_is_alive(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s"}, dead=["dead"])
    (sequence,) = await publish_jobs(connection, queue, ["alive"])
    await pull_jobs(connection, queue, 1)
    # The advisory is stored although the job is in flight.
    advisory = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "timestamp": datetime.now(UTC).isoformat(),
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": sequence,
        "deliveries": 2,
    }
    await connection.client.jetstream().publish(f"{MAX_DELIVERIES}.{name}.{CONSUMER}", json.dumps(advisory).encode())
    scan = await Scan.begin(connection, queue)
    assert scan.reconciliation.inconsistent_consumers == {CONSUMER}
    assert [letter.sequence async for letter in scan.letters()] == []
    # By the numbers one of the two is dead, and by the entries both are.
    assert scan.dismissed == {Status.UNCERTAIN: 2}
    assert scan.uncertain == 1
    await connection.request(f"$JS.ACK.{name}.{CONSUMER}.1.{sequence}.1.0.0", b"+ACK")
    findings = await find_dead_letters(connection, queue)
    assert (sequences(findings), findings.dismissed[0].status) == ([1], Status.UNACCOUNTED)


@pytest.mark.slow
async def test_a_kill_right_after_a_death_never_makes_a_live_job_a_letter(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    alive_again = held_back = 0
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1s"})
    for _ in range(20):
        async with connect(settings) as connection:
            await publish_jobs(connection, queue, map(str, range(5)))
            entries = await stored_count(connection, f"{name}-dead")
            for _ in range(2):
                for message in await pull_jobs(connection, queue, 5):
                    await message.nak()
            await store_one_advisory(connection, queue, entries)
            own_nats.kill()
        own_nats.start()
        async with connect(settings) as connection:
            findings = await find_dead_letters(connection, queue)
            info = await consumer_info(connection, name, CONSUMER)
            alive = info["num_ack_pending"] + info["num_pending"]
            assert len(findings.letters) + findings.uncertain + alive <= await stored_count(connection, name)
            alive_again += alive
            held_back += sum(job.status == Status.ALIVE for job in findings.dismissed)
            await hand_back_until_dead(connection, queue)
            findings = await find_dead_letters(connection, queue)
            assert len(findings.letters) == await stored_count(connection, name)
    print(f"alive again after a kill: {alive_again}, letters held back: {held_back}")


async def store_one_advisory(connection: NatsPyConnection, queue: WorkQueue, entries: int) -> None:
    """Store one advisory without a probe, which would give the server time to persist its state."""
    inbox = connection.client.new_inbox()
    await connection.client.subscribe(inbox)
    ask = json.dumps({"batch": 1, "no_wait": True, "max_bytes": 1}).encode()

    async def more() -> bool:
        # A nacked job may be redelivered after the first one.
        await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.{CONSUMER}", ask, reply=inbox)
        return await stored_count(connection, f"{queue.name}-dead") > entries

    await eventually(more)


async def hand_back_until_dead(connection: NatsPyConnection, queue: WorkQueue) -> None:
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    while True:
        info = await consumer_info(connection, queue.name, CONSUMER)
        if not info["num_pending"] and not info["num_ack_pending"]:
            return
        with suppress(TimeoutError):
            for message in await pull.fetch(100, timeout=0.2):
                await message.nak()


@pytest.mark.slow
async def test_orphans_below_the_ack_floor_of_a_busy_queue_are_found(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, dead="abc")
    await forget(connection, queue)
    await publish_jobs(connection, queue, ["done"])
    await process_all(connection, queue)
    stopped = asyncio.Event()

    async def churn() -> None:
        while not stopped.is_set():
            await publish_jobs(connection, queue, map(str, range(5)))
            for message in await pull_jobs(connection, queue, 5):
                await message.ack()

    task = asyncio.create_task(churn())
    looks = [await find_dead_letters(connection, queue) for _ in range(5)]
    stopped.set()
    await task
    assert [sequences(look) for look in looks] == [[1, 2, 3]] * 5


async def test_a_requeued_job_that_dies_again_without_an_advisory_is_found(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    config = (await connection.api(f"CONSUMER.INFO.{name}.{CONSUMER}"))["config"]
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
    await exhaust_deliveries(connection, queue, 1)
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 2})
    assert await get_message(connection, f"{name}-dead", 1) is not None
    findings = await find_dead_letters(connection, queue)
    assert [(letter.sequence, letter.death.reason, letter.entries) for letter in findings.letters] == [
        (1, Reason.ORPHAN, (1,))
    ]


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_letters_are_counted_again_when_the_server_was_away_meanwhile(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, dead="ab")
        scan = await Scan.begin(connection, queue)
        letters = [letter async for letter in scan.letters()]
        assert [letter.sequence for letter in letters] == [1, 2]
        # A crash that makes the server forget the deaths.
        await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 1})
        await pull_jobs(connection, queue, 2)
        # Long enough for the server to persist it.
        await asyncio.sleep(0.3)
        own_nats.kill()
        own_nats.start()
        await eventually(lambda: connection.client.is_connected and connection.client.stats["reconnects"] > 0)
        jobs = await scan.classify_again(letters)
        assert [job.status for job in jobs if not isinstance(job, DeadLetter)] == [Status.UNCERTAIN] * 2


async def test_an_advisory_that_a_stored_job_was_deleted_is_ignored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    await forget(connection, queue)
    deletion = {
        "type": "io.nats.jetstream.advisory.v1.terminated",
        "timestamp": datetime.now(UTC).isoformat(),
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": 1,
        "deliveries": 1,
        "reason": "Unacknowledged message was deleted",
    }
    await connection.client.jetstream().publish(f"{TERMINATED}.{name}.{CONSUMER}", json.dumps(deletion).encode())
    findings = await find_dead_letters(connection, queue)
    assert [(letter.sequence, letter.death.reason) for letter in findings.letters] == [(1, Reason.ORPHAN)]


# The probe makes the server publish advisories that it withholds while no worker sends pull requests.


async def make_abandoned_queue(connection: NatsPyConnection, name: str, bodies: str) -> WorkQueue:
    """Deliver every job as often as the consumer allows, without a worker afterwards."""
    # Longer than the last pull request may stay open on a busy machine: an open one makes the server publish.
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1500ms"}, jobs=bodies)
    await pull_jobs(connection, queue, len(bodies))
    await pull_jobs(connection, queue, len(bodies))
    return queue


async def pass_ack_wait(queue: WorkQueue) -> None:
    """Sleep until the ack wait of the last deliveries has passed."""
    wait = queue.consumer(CONSUMER).ack_wait or 0
    await asyncio.sleep(1.2 * wait / 1e9)


@pytest.mark.slow
async def test_without_a_worker_the_server_publishes_no_advisory_of_the_last_deaths(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_abandoned_queue(connection, name, "abc")
    await pass_ack_wait(queue)
    assert await stored_count(connection, f"{name}-dead") == 0
    assert (await consumer_info(connection, name, CONSUMER))["num_ack_pending"] == 3


async def test_jobs_in_flight_and_undelivered_jobs_do_not_change(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "30s"}, jobs="abcd")
    first, second = await pull_jobs(connection, queue, 2)
    before = await consumer_info(connection, name, CONSUMER)
    for _ in range(5):
        await probe(connection, queue)
    after = await consumer_info(connection, name, CONSUMER)
    fields = ("num_pending", "num_ack_pending", "num_redelivered", "delivered", "ack_floor")
    assert {field: after[field] for field in fields} == {field: before[field] for field in fields}
    await first.ack_sync()
    await second.ack_sync()
    assert await process_all(connection, queue) == {"c": 1, "d": 1}


async def test_fifty_probes_use_up_no_delivery(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": "300ms"}, jobs="a")
    await pull_jobs(connection, queue, 1)
    await pass_ack_wait(queue)
    for _ in range(50):
        await probe(connection, queue)
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.metadata.num_delivered == 2
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("in_front", [3, 12])
async def test_deaths_behind_redeliverable_jobs_get_their_advisories_by_one_look(
    connection: NatsPyConnection, name: str, in_front: int
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "1s"})
    await publish_jobs(connection, queue, map(str, range(3 + in_front)))
    await pull_jobs(connection, queue, 3 + in_front)
    # Due before they are pulled: a pull request that ends unanswered could use up deliveries.
    await pass_ack_wait(queue)
    await pull_jobs(connection, queue, 3)
    await pass_ack_wait(queue)
    # The server may be late, and then a second look finds what the first one didn't; not as many as there are jobs.
    for _ in range(2):
        found = len((await find_dead_letters(connection, queue)).letters)
        if found == 3:
            break
    assert (found, (await consumer_info(connection, name, CONSUMER))["num_ack_pending"]) == (3, in_front)


async def test_a_consumer_that_does_not_exist_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(NotFoundError, match=f"expected consumer nobody of stream {name} on the server, found none"):
        await probe(connection, queue, consumer="nobody")
