"""A redrive beside a handler of the dead letter queue: each letter is taken once, whoever comes first."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    Status,
    connect,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    DeadlineError,
    RedriveRequestError,
    TransientError,
)
from testbed import seams
from testbed.crash_points import crash_at_every_call
from testbed.face import consumer_info
from testbed.foreign_programs import acknowledge, create_or_update_consumer, get_message, pull
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
    unhurried,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from nats.aio.client import Client

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

NAME = "unprocessed_order_handler"
# As in the orders document, with a second in place of its five.
HANDLER: dict[str, Any] = {"durable_name": NAME, "backoff": [1_000_000_000], "max_deliver": 2}


async def orders(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    letters = {
        "name": f"{name}-dead",
        "subjects": [f"{MAX_DELIVERIES}.{name}.*"],
        "retention": "workqueue",
        "discard": "new",
        "max_bytes": "256MB",
        "deny_delete": True,
    }
    # No worker can be working on a letter any more, so that a redrive doesn't wait for that.
    consumer = {"ack_wait": "300ms"}
    return await make_queue(
        connection, name, discard="new", deny_delete=True, dead_letters=letters, consumer=consumer, **fields
    )


class Handler:
    """The document's handler: gets each order by the sequence in its entry, handles it, acknowledges the entry."""

    def __init__(self, client: Client, queue: WorkQueue) -> None:
        self._client = client
        self._queue = queue.name
        self.handled: Counter[str] = Counter()
        self.missing: list[int] = []

    async def create(self) -> None:
        await create_or_update_consumer(self._client, f"{self._queue}-dead", HANDLER)

    async def run(self, batch: int, pause: float) -> None:
        while True:
            async for message in pull(self._client, f"{self._queue}-dead", NAME, batch=batch, expires=0.5):
                sequence = json.loads(message.data)["stream_seq"]
                order = await get_message(self._client, self._queue, sequence)
                if order is None:
                    # The document's program ends here.
                    self.missing.append(sequence)
                    continue
                await asyncio.sleep(pause)
                self.handled[order.decode()] += 1
                await acknowledge(self._client, message)


@asynccontextmanager
async def handling(
    settings: ConnectionSettings, queue: WorkQueue, batch: int = 1, pause: float = 0.0
) -> AsyncIterator[Handler]:
    """Run the document's handler on a connection of its own until the block ends."""
    async with connect(settings) as own:
        handler = Handler(own.client, queue)
        await handler.create()
        task = asyncio.create_task(handler.run(batch, pause))
        try:
            yield handler
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.parametrize("seed", range(3))
async def test_each_of_twenty_orders_is_done_once_by_the_handler_or_a_redrive(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - dice
    queue = await orders(connection, name)
    jobs = [f"order-{number}" for number in range(20)]
    await make_dead_letters(connection, queue, jobs)
    async with handling(settings, queue, batch=dice.choice([1, 4]), pause=dice.uniform(0.0, 0.02)) as handler:
        await asyncio.sleep(dice.uniform(0.0, 0.1))
        done: Counter[str] = Counter()

        async def all_done() -> bool:
            report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=dice.choice([None, 100.0])))
            assert report.failed == {}
            # A job that isn't acknowledged within its ack wait is a dead letter again, whether it is done or not.
            async with unhurried(connection, queue):
                done.update(await process_all(connection, queue))
            return handler.handled.total() + done.total() >= len(jobs)

        await eventually(all_done, within=30)
    assert handler.handled + done == dict.fromkeys(jobs, 1)
    assert handler.missing == []
    found = await find_dead_letters(connection, queue)
    assert found.letters == ()
    assert {job.status for job in found.dismissed} <= {Status.HANDLED}
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["handler", "redrive"])
async def test_a_redrive_killed_before_any_of_its_changes_leaves_each_letter_to_be_taken_once(
    nats: NatsServer,
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    first: str,
    tmp_path: Path,
) -> None:
    jobs = ["a", "b"]

    async def prepare(call: int) -> WorkQueue:
        queue = await orders(connection, f"{name}-{call}")
        await make_dead_letters(connection, queue, jobs)
        await create_or_update_consumer(connection.client, f"{queue.name}-dead", HANDLER)
        return queue

    deaths = await crash_at_every_call(
        (nats.url,),
        f"{redrive_dead_letters.__module__}:redrive_dead_letters",
        prepare,
        logs=tmp_path,
        counted="changes",
    )
    print(deaths.table())
    # For each letter: the entry, the new job, the audit, the original.
    assert len(deaths.killed_calls) >= 4 * len(jobs)

    async def go_on(queue: WorkQueue) -> None:
        async with handling(settings, queue) as handler:
            if first == "handler":
                # What the killed redrive holds comes to the handler after the ack wait.
                await asyncio.sleep(1.5)
            done: Counter[str] = Counter()

            async def all_done() -> bool:
                assert (await redrive_dead_letters(connection, queue)).failed == {}
                done.update(await process_all(connection, queue))
                return handler.handled.total() + done.total() >= len(jobs)

            await eventually(all_done, within=20)
        assert handler.handled + done == dict.fromkeys(jobs, 1), queue.name
        assert (await find_dead_letters(connection, queue)).letters == ()

    await asyncio.gather(*map(go_on, deaths.queues))


async def test_a_selection_gives_back_what_it_had_to_pull_and_takes_no_last_delivery(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    selection = Selection(sequences=frozenset({2, 3}))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(selection))
    assert report.redriven.keys() == {2, 3}
    info = await consumer_info(connection, f"{name}-dead", NAME)
    # The first entry stands before them; the last one was not pulled.
    assert (info["delivered"]["stream_seq"], info["num_pending"]) == (3, 1)
    async with handling(settings, queue) as handler:
        await eventually(lambda: handler.handled.total() == 2)
    assert handler.handled == {"a": 1, "d": 1}


@pytest.mark.slow
async def test_entries_that_the_handler_has_used_up_are_redriven(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abc")
    client, stream = connection.client, f"{name}-dead"
    await create_or_update_consumer(client, stream, HANDLER)
    # The handler dies on b twice, and handles the others.
    for _ in range(2):
        async for message in pull(client, stream, NAME, batch=3, expires=1.2):
            broken = json.loads(message.data)["stream_seq"] == 2
            await acknowledge(client, message, b"-NAK" if broken else b"+ACK")
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), list(report.gone)) == ({2}, [1, 3])
    assert await process_all(connection, queue) == {"b": 1}
    assert await stored_count(connection, stream) == 0


async def test_what_a_handler_that_died_has_not_handled_comes_to_the_redrive_after_the_ack_wait(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    jobs = [str(number) for number in range(30)]
    await make_dead_letters(connection, queue, jobs)
    client, stream = connection.client, f"{name}-dead"
    await create_or_update_consumer(client, stream, HANDLER)
    taken = [message async for message in pull(client, stream, NAME, batch=20, expires=2)]
    assert len(taken) == 20
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failed, list(report.gone)) == (30, {}, [])
    async with unhurried(connection, queue):
        assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)
    assert await stored_count(connection, stream) == 0


async def test_a_handler_that_may_have_one_entry_at_a_time_does_not_keep_a_redrive_from_all_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER | {"max_ack_pending": 1})
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), report.failed, list(report.gone)) == ({1, 2, 3, 4}, {}, [])
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.slow
async def test_letters_behind_what_may_not_be_pulled_twice_are_left_to_the_handler(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abc")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER | {"max_ack_pending": 1})
    selection = Selection(sequences=frozenset({2}))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(selection))
    assert (set(report.redriven), report.failed, list(report.left_to_handlers)) == (set(), {}, [2])
    async with handling(settings, queue) as handler:
        await eventually(lambda: handler.handled.total() == 3)
    assert handler.handled == {"a": 1, "b": 1, "c": 1}


@pytest.mark.slow
async def test_a_push_consumer_keeps_its_letters(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    subscription = await connection.client.subscribe(f"pushed.{name}")
    config = {"durable_name": "pushed", "deliver_subject": f"pushed.{name}", "ack_policy": "explicit", "max_deliver": 2}
    body = {"stream_name": f"{name}-dead", "config": config | {"ack_wait": 500_000_000}}
    await connection.api(f"CONSUMER.DURABLE.CREATE.{name}-dead.pushed", body)
    await acknowledge(connection.client, await subscription.next_msg())
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), set(report.gone), report.failed) == ({2}, {1}, {})


async def test_a_handled_letter_cannot_be_redriven_by_its_sequence(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "a")
    async with handling(settings, queue) as handler:
        await eventually(lambda: handler.handled.total() == 1)
    request = RedriveRequest(Selection(sequences=frozenset({1})))
    with pytest.raises(DeadLetterGoneError, match="1: a handler of the dead letter queue has acknowledged its entry"):
        await redrive_dead_letters(connection, queue, request)


async def test_a_letter_whose_entry_the_handler_has_is_left_to_it(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    async with handling(settings, queue, batch=1, pause=0.8) as handler:
        info = await consumer_info(connection, f"{name}-dead", NAME)
        while not info["num_ack_pending"]:
            info = await consumer_info(connection, f"{name}-dead", NAME)
        report = await redrive_dead_letters(connection, queue)
        await eventually(lambda: handler.handled.total() + len(report.redriven) == 2)
    assert (set(report.redriven), list(report.gone)) == ({2}, [1])
    assert handler.handled == {"a": 1}


@pytest.mark.slow
async def test_a_letter_that_a_handler_holds_for_long_is_neither_gone_nor_redriven(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    client, stream = connection.client, f"{name}-dead"
    await create_or_update_consumer(client, stream, HANDLER)
    (message,) = [message async for message in pull(client, stream, NAME, batch=1, expires=2)]

    async def work() -> None:
        while True:
            await acknowledge(client, message, b"+WPI")
            await asyncio.sleep(0.2)

    working = asyncio.create_task(work())
    report = await redrive_dead_letters(connection, queue)
    working.cancel()
    assert (set(report.redriven), list(report.gone), report.failed) == ({2}, [], {})
    assert (list(report.left_to_handlers), report.as_json()["left_to_handlers"]) == ([1], 1)
    # It is still the handler's.
    await acknowledge(client, message)
    assert (await find_dead_letters(connection, queue)).letters == ()


async def test_a_letter_whose_entry_may_still_be_the_handlers_is_not_redriven(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    request_many = connection.request_many
    lost: list[bytes] = []

    async def lose_one_termination(
        messages: Sequence[tuple[str, bytes]], *arguments: Any, **named: Any
    ) -> list[bytes | TransientError]:
        terminations = [body for _, body in messages if body.startswith(b"+TERM")]
        if not terminations or lost:
            return await request_many(messages, *arguments, **named)
        lost.append(terminations[0])
        return [DeadlineError("lost"), *await request_many(messages[1:], *arguments, **named)]

    monkeypatch.setattr(connection, "request_many", lose_one_termination)
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), set(report.failed)) == ({2}, {1})
    assert "couldn't be taken (lost)" in str(report.failed[1])
    # What wasn't redriven has no second job.
    assert await stored_count(connection, name) == 2
    monkeypatch.undo()
    assert set((await redrive_dead_letters(connection, queue)).redriven) == {1}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_a_redrive_that_is_cut_off_between_claim_and_copy_is_finished_by_the_next(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, ["a"])
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)

    async def fail(*_: object) -> list[object]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, fail)
        with pytest.raises(KeyboardInterrupt):
            await redrive_dead_letters(connection, queue)
    # The entry is gone, which isn't the work of the handler.
    assert await stored_count(connection, f"{name}-dead") == 0
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.body, letter.death.reason, letter.death.deliveries) == (b"a", "max_deliveries", 1)
    assert (await redrive_dead_letters(connection, queue)).redriven.keys() == {1}
    assert await process_all(connection, queue) == {"a": 1}


async def terminated_letters(connection: NatsPyConnection, name: str, bodies: str, **fields: Any) -> WorkQueue:
    """Make letters of which only the records in the dead letter queue hold the bodies, beside a handler of all entries.

    As the product's worker does: the record is stored, then the job is terminated.
    """
    letters = {"name": f"{name}-dead", "retention": "workqueue"}
    queue = await make_queue(connection, name, dead_letters=letters, consumer={"ack_wait": "300ms"}, **fields)
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    await publish_jobs(connection, queue, bodies)
    for sequence in range(1, len(bodies) + 1):
        job = await connection.client.jetstream().get_msg(name, sequence)
        assert job.subject
        headers = {"Dead-Letter-Subject": job.subject, "Dead-Letter-Reason": "terminated"}
        subject = f"dead.{name}.{CONSUMER}.{sequence}"
        await connection.client.jetstream().publish(subject, job.data or b"", headers=headers)
    # Within the ack wait, however loaded the machine: a later end isn't advised.
    for message in await pull_jobs(connection, queue, len(bodies)):
        await message.term()
    await until_stored(connection, f"{name}-dead", 2 * len(bodies))
    return queue


@pytest.mark.slow
async def test_a_letter_whose_job_is_gone_is_not_lost_by_a_redrive_that_is_killed_beside_a_handler(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path
) -> None:
    async def prepare(call: int) -> WorkQueue:
        return await terminated_letters(connection, f"{name}-{call}", "ab")

    deaths = await crash_at_every_call(
        (nats.url,),
        f"{redrive_dead_letters.__module__}:redrive_dead_letters",
        prepare,
        logs=tmp_path,
        counted="changes",
    )
    print(deaths.table())
    assert len(deaths.killed_calls) >= 6

    async def go_on(queue: WorkQueue) -> None:
        done: Counter[str] = Counter()

        async def all_done() -> bool:
            assert (await redrive_dead_letters(connection, queue)).failed == {}
            done.update(await process_all(connection, queue))
            return done.total() >= 2

        await eventually(all_done, within=20)
        assert done == {"a": 1, "b": 1}, queue.name
        found = await find_dead_letters(connection, queue)
        assert (found.letters, found.uncertain) == ((), 0)

    await asyncio.gather(*map(go_on, deaths.queues))


async def test_a_handler_that_admits_only_small_requests_does_not_keep_a_redrive_from_its_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abcdef")
    limits = {"max_batch": 2, "max_expires": 100_000_000}
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER | limits)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failed, list(report.left_to_handlers)) == (6, {}, [])
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_two_handlers_of_an_interest_stream_have_to_be_claimed_from_both(
    connection: NatsPyConnection, name: str
) -> None:
    letters = {"name": f"{name}-dead", "subjects": [f"{MAX_DELIVERIES}.{name}.*"], "retention": "interest"}
    queue = await make_queue(connection, name, dead_letters=letters, consumer={"ack_wait": "50ms"})
    client, stream = connection.client, f"{name}-dead"
    for handler in ("first", "second"):
        await create_or_update_consumer(client, stream, HANDLER | {"durable_name": handler})
    await make_dead_letters(connection, queue, "ab")
    # The second one is slow with what it has, and then done.
    (message,) = [message async for message in pull(client, stream, "second", batch=1, expires=2)]

    async def work() -> None:
        for _ in range(20):
            await acknowledge(client, message, b"+WPI")
            await asyncio.sleep(0.2)

    working = asyncio.create_task(work())
    report = await redrive_dead_letters(connection, queue)
    working.cancel()
    assert (set(report.redriven), list(report.left_to_handlers)) == ({2}, [1])
    # Neither of them gets what is redriven.
    for handler in ("first", "second"):
        rest = [message async for message in pull(client, stream, handler, batch=5, expires=1.5)]
        assert [json.loads(message.data)["stream_seq"] for message in rest] == [1]


async def test_beside_a_handler_nothing_is_redriven_while_the_copies_of_its_entries_are_away(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    async for message in pull(connection.client, f"{name}-dead", NAME, batch=1, expires=2):
        await acknowledge(connection.client, message)
    assert queue.audit is not None
    await connection.api(f"STREAM.DELETE.{queue.audit.name}")
    with pytest.raises(RedriveRequestError, match=f"expected an audit of {name}, found none"):
        await redrive_dead_letters(connection, queue)
    assert await stored_count(connection, name) == 2
