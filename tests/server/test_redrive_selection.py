"""Which letters a redrive brings back, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    connect,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, RedriveRequestError
from testbed.dead_letters import letter_records, make_terminated_letters, request_for, stored_message, stream_messages
from testbed.queues import eventually, make_dead_letters, make_queue, process_all, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

ORIGIN = {"Airflow-Dag-Id": "shop", "Airflow-Run-Id": "r1", "Airflow-Task-Id": "send", "Airflow-Map-Index": "-1"}
ERROR = {"Dead-Letter-Error-Class": "PrinterError", "Dead-Letter-Error-Message": "no paper in tray 7"}


async def wait_for_letters(connection: NatsPyConnection, queue: WorkQueue, count: int, **selected: Any) -> None:
    async def are_found() -> bool:
        return len((await find_dead_letters(connection, queue, Selection(**selected))).letters) == count

    await eventually(are_found)


async def five_letters(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Make five dead letters of different causes.

    An Airflow task's, a terminated one, one with a worker's copy, one of another subject, and one of a second consumer.
    """
    consumers = [
        {"name": consumer, "max_deliver": 1, "ack_wait": "500ms", "filter_subjects": [f"{name}.jobs.{end}"]}
        for consumer, end in (("worker", "plain.*"), ("other", "else"))
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    await publish_jobs(connection, queue, ["from airflow"], kind="plain.a", headers=ORIGIN)
    await publish_jobs(connection, queue, ["terminated", "printer"], kind="plain.a")
    await publish_jobs(connection, queue, ["subject"], kind="plain.b")
    await publish_jobs(connection, queue, ["consumer"], kind="else")
    first, second, *others = [
        *await pull_jobs(connection, queue, 4),
        *await pull_jobs(connection, queue, 1, consumer="other"),
    ]
    headers = {"Dead-Letter-Version": "1", "Dead-Letter-Subject": second.subject, **ERROR}
    await connection.client.jetstream().publish(f"dead.{name}.worker.3", b"printer", headers=headers)
    await second.respond(b"+TERM no such customer")
    for message in (first, *others):
        await message.nak()
    await wait_for_letters(connection, queue, 5)
    return queue


@pytest.mark.slow
async def test_letters_are_selected_by_each_field(connection: NatsPyConnection, name: str) -> None:
    queue = await five_letters(connection, name)
    letters = {letter.sequence: letter for letter in (await find_dead_letters(connection, queue)).letters}
    selections: dict[int | None, dict[str, Any]] = {
        4: {"subject": f"{name}.jobs.*.b"},
        1: {"dag_id": "shop", "run_id": "r1", "task_id": "send"},
        2: {"reasons": [Reason.TERMINATED]},
        3: {"error_class": "PrinterError", "fingerprint": letters[3].death.fingerprint},
        5: {"consumer": "other", "younger_than": "1h", "subject": f"{name}.>"},
    }
    nothing: tuple[dict[str, Any], ...] = (
        {"subject": "elsewhere.>"},
        {"dag_id": "shop", "task_id": "other"},
        {"older_than": "1h"},
        {"consumer": "worker", "subject": f"{name}.jobs.else"},
        {"reasons": []},
    )
    before = [await stream_messages(connection, stream) for stream in (name, f"{name}-dead")]
    for selected in nothing:
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(**selected)))
        assert (dict(report.redriven), report.failed, list(report.gone), list(report.parked)) == ({}, {}, [], [])
    assert [await stream_messages(connection, stream) for stream in (name, f"{name}-dead")] == before
    assert await letter_records(connection, queue) == []
    for new, (sequence, selected) in enumerate(selections.items(), 6):
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(**selected)))
        assert (dict(report.redriven), report.failed) == ({sequence: new}, {})
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert sum([await drain_of(connection, queue, consumer) for consumer in ("worker", "other")]) == 5


async def drain_of(connection: NatsPyConnection, queue: WorkQueue, consumer: str) -> int:
    pending = (await connection.api(f"CONSUMER.INFO.{queue.name}.{consumer}"))["num_pending"]
    messages = await pull_jobs(connection, queue, pending, consumer=consumer) if pending else []
    for message in messages:
        await message.ack_sync()
    return len(messages)


@pytest.mark.slow
async def test_sequences_that_the_rest_of_the_selection_excludes_are_named(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await make_terminated_letters(connection, queue, "c")
    await redrive_dead_letters(connection, queue, request_for([2], max_redrives=0))
    terminated = Selection(sequences=frozenset({1, 2, 3}), reasons=frozenset({Reason.TERMINATED}))
    expected = (
        r"found otherwise for 2 of 3 sequences \(1: it is dead, but the rest of the selection excludes it; 2: it is"
        r" parked; select parked to bring it back\); nothing was redriven"
    )
    for work in (redrive_dead_letters, preview):
        with pytest.raises(DeadLetterGoneError, match=expected):
            await work(connection, queue, RedriveRequest(terminated))
    assert await stored_count(connection, name) == 1
    both = Selection(sequences=frozenset({3}), reasons=frozenset({Reason.TERMINATED}))
    assert (await redrive_dead_letters(connection, queue, RedriveRequest(both))).redriven == {3: 4}
    assert await process_all(connection, queue) == {"c": 1}


@pytest.mark.slow
async def test_vanished_letters_come_back_only_when_they_are_selected(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    # As if the server had lost it.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    selected = RedriveRequest(Selection(vanished=True))
    assert (await preview(connection, queue, RedriveRequest())).redriven == 1
    assert (await preview(connection, queue, selected)).redriven == 2
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({2: 3}, [1])
    report = await redrive_dead_letters(connection, queue, selected)
    assert report.redriven == {1: 4}
    assert (await redrive_dead_letters(connection, queue, selected)).redriven == {}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


UNDELIVERABLE = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))


async def with_undeliverable(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    consumers = [{"name": "worker", "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.plain"}]
    queue = await make_queue(connection, name, consumers=consumers, **fields)
    await make_dead_letters(connection, queue, "a")
    await publish_jobs(connection, queue, "bc", kind="typo")
    return queue


@pytest.mark.slow
async def test_selected_undeliverable_jobs_are_redriven_to_a_subject_with_a_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await with_undeliverable(connection, name)
    request = RedriveRequest(UNDELIVERABLE, subject=f"{name}.jobs.plain")
    shown = await preview(connection, queue, RedriveRequest())
    assert (shown.redriven, shown.undeliverable) == (1, 2)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.undeliverable) == ({1: 4}, 2)
    assert (await preview(connection, queue, request)).redriven == 2
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), report.failed) == ({2: 5, 3: 6}, {})
    copy = await stored_message(connection, name, 5)
    assert (copy.subject, copy.header("Redrive-Consumer")) == (f"{name}.jobs.plain", "")
    assert [record.reason for record in await letter_records(connection, queue)] == ["max_deliveries"] + [
        "undeliverable"
    ] * 2
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
async def test_undeliverable_jobs_can_be_parked(connection: NatsPyConnection, name: str) -> None:
    queue = await with_undeliverable(connection, name)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(UNDELIVERABLE, max_redrives=0))
    assert list(report.parked) == [2, 3]
    assert await stored_count(connection, name) == 1


async def test_undeliverable_jobs_that_cannot_be_removed_are_refused_and_stay(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await with_undeliverable(connection, name)
    expected = (
        f"^expected a subject that a consumer takes for undeliverable jobs, found none: .* \\({name}.jobs.typo\\); name"
    )
    with pytest.raises(RedriveRequestError, match=expected):
        await redrive_dead_letters(connection, queue, RedriveRequest(UNDELIVERABLE))
    queue = await with_undeliverable(connection, f"{name}d", deny_delete=True)
    request = RedriveRequest(UNDELIVERABLE, subject=f"{name}d.jobs.plain")
    expected = (
        f"^expected a queue that allows jobs to be deleted, found deny_delete on {name}d: those that no consumer takes"
    )
    with pytest.raises(RedriveRequestError, match=expected):
        await redrive_dead_letters(connection, queue, request)
    assert await stored_count(connection, f"{name}d") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "size"), [(Protocol.COPY, 1), (Protocol.ATOMIC, 1), (Protocol.ATOMIC, 40_000)])
async def test_copies_come_back_in_the_order_of_their_jobs_whatever_order_they_died_in(
    connection: NatsPyConnection, name: str, protocol: Protocol, size: int
) -> None:
    atomic: dict[str, Any] = {"atomic_redrive": protocol == Protocol.ATOMIC}
    queue = await make_queue(
        connection, name, consumer={"filter_subject": f"{name}.jobs.>", "ack_wait": "2s"}, **atomic
    )
    for number in range(300):
        subject = f"{name}.jobs.{number % 3}"
        await connection.client.publish(subject, str(number).encode().ljust(size))
    for message in reversed(await pull_jobs(connection, queue, 300)):
        await message.nak()
    await wait_for_letters(connection, queue, 300)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
    report.raise_for_failures()
    assert list(report.redriven) == [*range(1, 301)]
    for kind in range(3):
        copies = await stream_messages(connection, name, f"{name}.jobs.{kind}")
        assert [int(copy.data) for copy in copies] == [*range(kind, 300, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("death", ["dead", "terminated"])
@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
async def test_three_concurrent_redrives_lose_and_repeat_nothing_while_workers_drain(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, protocol: Protocol, death: str
) -> None:
    atomic: dict[str, Any] = {"atomic_redrive": protocol == Protocol.ATOMIC}
    queue = await make_queue(
        connection, name, consumer={"filter_subject": f"{name}.jobs.>", "ack_wait": "2s"}, **atomic
    )
    jobs = [str(number) for number in range(300)]
    await (make_dead_letters if death == "dead" else make_terminated_letters)(connection, queue, jobs)
    over = asyncio.Event()

    async def work() -> Counter[str]:
        done: Counter[str] = Counter()
        pull = await connection.client.jetstream().pull_subscribe_bind("worker", stream=name)
        while not over.is_set() or (await pull.consumer_info()).num_pending:
            with suppress(TimeoutError):
                # Few at a time, so that none waits longer for its turn than the ack wait.
                for message in await pull.fetch(10, timeout=0.2):
                    done[message.data.decode()] += 1
                    await message.ack_sync()
        await pull.unsubscribe()
        return done

    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connect(settings)) for _ in range(3)]
        working = asyncio.create_task(work())
        request = RedriveRequest(protocol=protocol)
        reports = await asyncio.gather(*(redrive_dead_letters(client, queue, request) for client in connections))
        over.set()
        assert await working == dict.fromkeys(jobs, 1)
    assert all(report.failed == {} for report in reports)
    # One after the other: whoever had the lease first redrove all.
    assert sorted(sequence for report in reports for sequence in report.redriven) == list(range(1, 301))
    assert len(await letter_records(connection, queue)) == 300
    assert await stored_count(connection, f"{name}-dead") == 0
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
