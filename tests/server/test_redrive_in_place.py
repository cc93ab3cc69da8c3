"""Redrives in place: consumers are reset to their first dead letter, without copies."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import RedriveError
from testbed import seams
from testbed.dead_letters import acknowledge_jobs, letter_records, make_terminated_letters, stream_messages
from testbed.face import consumer_info
from testbed.queues import (
    completion_body,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer
    from testbed.tcp_proxy import TcpProxy

IN_PLACE = RedriveRequest(protocol=Protocol.IN_PLACE)
KINDS = ("high", "low", "slow")


async def paused(connection: NatsPyConnection, queue: WorkQueue, consumer: str = "worker") -> bool:
    return bool((await consumer_info(connection, queue.name, consumer)).get("paused"))


async def pause(connection: NatsPyConnection, queue: WorkQueue, until: datetime) -> None:
    await connection.api(f"CONSUMER.PAUSE.{queue.name}.worker", {"pause_until": until.isoformat()})


async def three_kinds(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    """Make a queue with a consumer for each kind of job, and two dead letters of each kind in turns."""
    consumers = [
        {"name": kind, "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.{kind}"} for kind in KINDS
    ]
    queue = await make_queue(connection, name, consumers=consumers, **fields)
    for number in range(2):
        for kind in KINDS:
            await publish_jobs(connection, queue, [f"{kind}{number}"], kind=kind)
    for kind in KINDS:
        for message in await pull_jobs(connection, queue, 2, consumer=kind):
            await message.nak()

    async def dead() -> bool:
        return len((await find_dead_letters(connection, queue)).letters) == 6

    await eventually(dead)
    return queue


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize("fields", [{}, {"deny_delete": True}, {"discard": "new", "max_msgs": 6}])
async def test_all_letters_of_all_consumers_are_requeued_in_place(
    connection: NatsPyConnection, name: str, fields: dict[str, Any]
) -> None:
    queue = await three_kinds(connection, name, **fields)
    before = await stream_messages(connection, name)
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    report.raise_for_failures()
    assert report.redriven == {number: number for number in range(1, 7)}
    assert (list(report.gone), report.entries_left) == ([], 0)
    assert await stream_messages(connection, name) == before
    assert await stored_count(connection, f"{name}-dead") == 0
    assert {record.sequence: record.action for record in await letter_records(connection, queue)} == dict.fromkeys(
        range(1, 7), "requeued"
    )
    for place, kind in enumerate(KINDS, 1):
        assert not await paused(connection, queue, kind)
        messages = await pull_jobs(connection, queue, 2, consumer=kind)
        assert [message.metadata.sequence.stream for message in messages] == [place, place + 3]
        assert [message.metadata.num_delivered for message in messages] == [1, 1]
        for message in messages:
            await message.ack_sync()
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_no_dead_letter_is_reported_once_and_not_delivered_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await three_kinds(connection, name)
    # A worker stored the completion, and was stopped before it acknowledged.
    await connection.client.jetstream().publish(f"completed.{name}.low.2", completion_body(name, 2, "low"))
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert (sorted(report.redriven), list(report.gone)) == ([1, 3, 4, 5, 6], [2])
    for kind, sequences in zip(KINDS, ([1, 4], [5], [3, 6]), strict=True):
        assert await acknowledge_jobs(connection, queue, len(sequences), consumer=kind) == sequences


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_terminated_letters_of_the_same_run_come_back_by_copies(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await make_terminated_letters(connection, queue, "cd")
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert (dict(report.redriven), report.failed, list(report.gone)) == ({1: 1, 2: 2, 3: 5, 4: 6}, {}, [])
    assert [record.action for record in await letter_records(connection, queue)] == ["requeued"] * 2 + ["redriven"] * 2
    assert await process_all(connection, queue) == dict.fromkeys("abcd", 1)
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_jobs_in_flight_prevent_the_reset(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m"}, dead="ab")
    await publish_jobs(connection, queue, "cde")
    working = await pull_jobs(connection, queue, 3)
    monkeypatch.setattr(seams.IN_PLACE_MARGIN, timedelta(seconds=-59.5))
    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, at_once)
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    expected = (
        "expected no job of consumer worker in flight, found 3 still after its ack wait: a reset would deliver them a"
    )
    assert (dict(report.redriven), sorted(report.failed)) == ({}, [1, 2])
    assert report.failed[1].startswith(expected)
    assert not await paused(connection, queue)
    for message in working:
        await message.ack_sync()
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize("in_flight", [1, 3])
async def test_jobs_that_die_while_their_workers_are_waited_for_are_reported_and_recorded(
    connection: NatsPyConnection, name: str, in_flight: int
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "500ms", "max_deliver": 1}, dead="a")
    await publish_jobs(connection, queue, "bcd"[:in_flight])
    await pull_jobs(connection, queue, in_flight)
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    sequences = list(range(1, in_flight + 2))
    assert report.redriven == {number: number for number in sequences}
    assert {record.sequence: record.action for record in await letter_records(connection, queue)} == dict.fromkeys(
        sequences, "requeued"
    )
    assert (await stored_count(connection, f"{name}-dead"), report.entries_left) == (0, 0)
    assert await process_all(connection, queue) == dict.fromkeys("abcd"[: in_flight + 1], 1)
    findings = await find_dead_letters(connection, queue)
    assert (list(findings.letters), findings.uncertain) == ([], 0)


async def at_once(*_: object) -> bool:
    return False


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_no_letter_is_delivered_before_its_ack_wait_has_passed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s"}, dead="ab")
    ready_at = max(letter.ready_at for letter in (await find_dead_letters(connection, queue)).letters)
    assert ready_at > datetime.now(UTC)
    await redrive_dead_letters(connection, queue, IN_PLACE)
    assert datetime.now(UTC) >= ready_at
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize("moment", ["_wait_until_idle", "record"])
async def test_a_redrive_that_is_cancelled_in_the_middle_leaves_no_consumer_paused(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    reached = asyncio.Event()

    async def hang(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        if moment == "record":
            patch.setattr(seams.LETTER_RECORDS_WRITE_REQUEUED, hang)
        else:
            patch.setattr(f"{seams.IN_PLACE}.{moment}", hang)
        task = asyncio.create_task(redrive_dead_letters(connection, queue, IN_PLACE))
        await asyncio.wait([task, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done() or task.result()
        assert await paused(connection, queue)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert not await paused(connection, queue)
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize("minutes", [1, 60])
async def test_a_pause_that_was_set_before_is_restored(connection: NatsPyConnection, name: str, minutes: int) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await pause(connection, queue, datetime.now(UTC) + timedelta(minutes=minutes))
    before = (await consumer_info(connection, name, "worker"))["config"]["pause_until"]
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert (await consumer_info(connection, name, "worker"))["config"]["pause_until"] == before
    await pause(connection, queue, datetime.now(UTC))
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_pause_that_a_killed_redrive_left_is_not_restored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await pause(connection, queue, datetime.now(UTC) + timedelta(seconds=8))
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert not await paused(connection, queue)


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_stopped_redrive_ends_between_consumers(connection: NatsPyConnection, name: str) -> None:
    queue = await three_kinds(connection, name)
    done: list[bool] = []
    report = await redrive_dead_letters(
        *(connection, queue, IN_PLACE),
        progress=lambda so_far: done.append(bool(so_far.redriven)),
        stopped=lambda: True in done,
    )
    assert (dict(report.redriven), report.cancelled) == ({1: 1, 4: 4}, True)
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert (list(report.redriven), report.cancelled) == ([2, 5, 3, 6], False)
    for kind in KINDS:
        assert len(await acknowledge_jobs(connection, queue, 2, consumer=kind)) == 2


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_letter_whose_copy_is_stored_is_not_delivered_again(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")

    async def fail(*_: object) -> None:
        raise RedriveError("the original could not be removed")

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, fail)
        only_a = RedriveRequest(Selection(sequences=frozenset({1})))
        assert (await redrive_dead_letters(connection, queue, only_a)).failures == 1
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert report.redriven == {1: 3, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_letters_that_cannot_be_recorded_are_not_requeued(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit={"name": f"{name}-audit", "discard": "new", "max_msgs": 1})
    await make_dead_letters(connection, queue, "ab")
    report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert (dict(report.redriven), sorted(report.failed)) == ({}, [1, 2])
    expected = "nothing was requeued, since that couldn't be recorded (maximum messages exceeded"
    assert report.failed[1].startswith(expected)
    assert not await paused(connection, queue)
    assert await process_all(connection, queue) == {}
    await connection.api(f"STREAM.PURGE.{name}-audit")
    audit = (await connection.api(f"STREAM.INFO.{name}-audit"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}-audit", audit | {"max_msgs": -1})
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


# A reset arrives while its consumer is paused, or it isn't sent; one that isn't answered is looked up.


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that fails after a fraction of a second, and a pause that outlasts it by a little."""
    for name, seconds in (("_RESET_SECONDS", 0.3), ("_LATE_SECONDS", 3.0), ("_CHECK_SECONDS", 1.0)):
        monkeypatch.setattr(f"{seams.IN_PLACE}.{name}", seconds)


@asynccontextmanager
async def proxied(nats: NatsServer) -> AsyncIterator[tuple[TcpProxy, NatsPyConnection]]:
    async with (
        tcp_proxy(nats.port) as proxy,
        connect(connection_settings({"servers": (proxy.url,), "timeout": 5})) as connection,
    ):
        yield proxy, connection


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.usefixtures("short_times")
async def test_a_reset_whose_answer_is_late_is_found_to_be_done(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    async with proxied(nats) as (proxy, redriving):
        proxy.pause_at(b".CONSUMER.RESET.")
        redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, IN_PLACE))
        await asyncio.wait_for(proxy.found.wait(), 10)
        await asyncio.sleep(0.5)
        proxy.resume()
        report = await redrive
    assert (dict(report.redriven), report.failures) == ({1: 1, 2: 2}, 0)
    assert not (await consumer_info(connection, name, "worker")).get("paused")
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.usefixtures("short_times")
async def test_a_reset_that_never_arrives_leaves_the_consumer_paused_for_as_long_as_it_might(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    async with proxied(nats) as (proxy, redriving):
        proxy.pause_at(b".CONSUMER.RESET.")
        redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, IN_PLACE))
        await asyncio.wait_for(proxy.found.wait(), 10)
        proxy.cut()
        proxy.drop()
        proxy.mend()
        report = await redrive
        assert (dict(report.redriven), sorted(report.failed)) == ({}, [1, 2])
        expected = "consumer worker isn't known to be reset (no answer on $JS.API.CONSUMER.RESET."
        assert report.failed[1].startswith(expected)
        assert "it stays paused for at most 6.3 s" in report.failed[1]
    info = await consumer_info(connection, name, "worker")
    assert info["paused"]
    assert info["pause_remaining"] < 6.3e9
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_consumer_that_gets_another_subject_before_the_reset_is_not_reset(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    """A reset would deliver the other consumer's dead letters, too, which nobody has asked for or recorded."""
    consumers = [
        {"name": kind, "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.{kind}"}
        for kind in ("first", "second")
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    for kind in ("first", "second", "first"):
        await publish_jobs(connection, queue, [kind], kind=kind)
    for kind, count in (("first", 2), ("second", 1)):
        for message in await pull_jobs(connection, queue, count, consumer=kind):
            await message.nak()

    async def dead() -> bool:
        return len((await find_dead_letters(connection, queue)).letters) == len(consumers) + 1

    await eventually(dead)
    async with proxied(nats) as (proxy, redriving):
        proxy.pause_at(b'"action":"requeue')
        redrive = asyncio.create_task(redrive_dead_letters(redriving, queue, IN_PLACE))
        await asyncio.wait_for(proxy.found.wait(), 10)
        for kind, filters in (("second", ["nothing"]), ("first", ["first", "second"])):
            config = (await consumer_info(connection, name, kind))["config"]
            config.pop("filter_subject", None)
            config["filter_subjects"] = [f"{name}.jobs.{token}" for token in filters]
            request = {"stream_name": name, "config": config, "action": "update"}
            await connection.api(f"CONSUMER.CREATE.{name}.{kind}", request)
        proxy.resume()
        report = await redrive
    assert (dict(report.redriven), sorted(report.failed)) == ({}, [1, 3])
    assert f"found {name}.jobs.first, {name}.jobs.second: a reset would deliver jobs" in report.failed[1]
    assert (await consumer_info(connection, name, "first"))["num_pending"] == 0


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_nothing_is_reset_in_a_pause_that_is_too_short(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")

    async def leave_as_it_is(*_: object) -> None:
        return

    with monkeypatch.context() as patch:
        patch.setattr(seams.CONSUMER_PAUSE_PROLONG, leave_as_it_is)
        report = await redrive_dead_letters(connection, queue, IN_PLACE)
    assert re.match(r"expected consumer worker to be paused for \d+ s more, found \d", report.failed[1])
    assert await process_all(connection, queue) == {}
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_pause_of_somebody_else_is_never_shortened(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.worker", {"pause_until": until})
    before = (await consumer_info(connection, name, "worker"))["config"]["pause_until"]
    write, seen = seams.current(seams.LETTER_RECORDS_WRITE_REQUEUED), []

    async def look(*arguments: object) -> None:
        seen.append((await consumer_info(connection, name, "worker"))["config"]["pause_until"])
        await write(*arguments)

    monkeypatch.setattr(seams.LETTER_RECORDS_WRITE_REQUEUED, look)
    assert (await redrive_dead_letters(connection, queue, IN_PLACE)).redriven == {1: 1, 2: 2}
    assert seen == [before]
    assert (await consumer_info(connection, name, "worker"))["config"]["pause_until"] == before
