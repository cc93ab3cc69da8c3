"""The audit of redrives, and how a redrive that was cut off continues by it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import RedriveError
from testbed import seams
from testbed.dead_letters import change_stream, letter_records, make_terminated_letters, run_records, stream_messages
from testbed.face import open_audit, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

WHO = {"dag_id": "orders", "run_id": "manual__1", "task_id": "redrive", "map_index": -1, "try_number": 1}
RUN = RedriveRequest(run="orders-1", who=WHO, why="the printer is back")


def after(batches: int) -> Callable[[], bool]:
    """Return a predicate that stops a redrive after so many batches."""
    calls = count()
    return lambda: next(calls) >= batches


async def test_each_letter_has_one_complete_record(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    started = datetime.now(UTC)
    await make_dead_letters(connection, queue, "a")
    await make_terminated_letters(connection, queue, "b")
    letters = (await find_dead_letters(connection, queue)).letters
    report = await redrive_dead_letters(connection, queue, RUN)
    records = await letter_records(connection, queue)
    created = (await stream_info(connection, name))["created"]
    for record, letter in zip(records, letters, strict=True):
        assert record.model_dump(exclude={"at", "version", "job_id"}) == {
            "stream": name,
            "created": created,
            "sequence": letter.sequence,
            "action": "redriven",
            "new_sequence": report.redriven[letter.sequence],
            "new_stream": None,
            "copy_of": None,
            "subject": f"{name}.jobs.plain",
            "consumer": "worker",
            "left_out": None,
            "redrives": 1,
            "reason": letter.death.reason.value,
            "died_at": letter.death.died_at,
            "fingerprint": letter.death.fingerprint,
            "why": "the printer is back",
            "who": WHO,
            "run": "orders-1",
            "wave": None,
            "changes": None,
        }
        assert started <= record.at <= datetime.now(UTC)


async def test_a_run_is_recorded_from_its_beginning_to_its_end(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abc")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 1)
    monkeypatch.setattr(seams.RUN_PROGRESS_PROGRESS_SECONDS, 0)
    redriven: list[int] = []
    await redrive_dead_letters(connection, queue, RUN, progress=lambda report: redriven.append(len(report.redriven)))
    assert redriven == [1, 2, 3, 3]
    records = await run_records(connection, queue, "orders-1")
    assert [(record.report.get("redriven"), record.finished) for record in records] == [
        (None, False),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
    ]
    assert all((record.who, record.why) == (WHO, RUN.why) for record in records)
    assert records[-1].report["to_sequences"] == [[4, 6]]


@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
async def test_concurrent_redrives_record_each_letter_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, protocol: Protocol
) -> None:
    atomic: dict[str, Any] = {"atomic_redrive": protocol == Protocol.ATOMIC}
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"}, **atomic)
    await make_dead_letters(connection, queue, map(str, range(80)))
    async with connect(settings) as second, connect(settings) as third:
        reports = await asyncio.gather(*(redrive_dead_letters(client, queue) for client in (connection, second, third)))
    assert {report.protocol for report in reports} == {protocol}
    assert [record.sequence for record in await letter_records(connection, queue)] == [*range(1, 81)]


async def test_a_stopped_run_continues_under_its_key_and_its_report_covers_both_tries(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcdef")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    await redrive_dead_letters(connection, queue, RedriveRequest(run="other"), stopped=after(0))
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    first = await redrive_dead_letters(connection, queue, RUN, stopped=after(1))
    assert (dict(first.redriven), first.cancelled, first.resumed) == ({1: 7, 2: 8}, True, 0)
    assert not (await run_records(connection, queue, "orders-1"))[-1].finished
    second = await redrive_dead_letters(connection, queue, RUN, stopped=after(1))
    assert (dict(second.redriven), second.resumed) == ({1: 7, 2: 8, 3: 9, 4: 10}, 2)
    third = await redrive_dead_letters(connection, queue, RUN)
    assert (dict(third.redriven), third.resumed) == ({number: number + 6 for number in range(1, 7)}, 4)
    assert (third.cancelled, list(third.gone), third.as_json()["to_sequences"]) == (False, [], [(7, 12)])
    assert (await run_records(connection, queue, "orders-1"))[-1].finished
    assert await process_all(connection, queue) == dict.fromkeys("abcdef", 1)


@pytest.mark.slow
async def test_a_cancelled_run_continues_under_its_key(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(1_000)]
    await make_dead_letters(connection, queue, jobs)
    first = asyncio.create_task(redrive_dead_letters(connection, queue, RUN))

    async def begun() -> bool:
        return len(await letter_records(connection, queue)) >= 100

    await eventually(begun)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    report = await redrive_dead_letters(connection, queue, RUN)
    assert report.resumed >= 100
    assert (len(report.redriven), report.failures) == (1_000, 0)
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)


async def test_a_finished_run_with_the_same_key_starts_afresh(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    assert (await redrive_dead_letters(connection, queue, RUN)).redriven == {1: 3, 2: 4}
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RUN)
    assert (dict(report.redriven), report.resumed) == ({3: 5, 4: 6}, 0)
    report = await redrive_dead_letters(connection, queue, RUN)
    assert (dict(report.redriven), report.resumed) == ({}, 0)


async def test_a_run_that_stays_open_continues_until_it_is_finished(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    request = RedriveRequest(run="waits", keep_open=True)
    assert (await redrive_dead_letters(connection, queue, request)).redriven == {1: 2}
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), report.resumed) == ({1: 2}, 1)
    audit = await open_audit(connection, queue)
    assert audit is not None
    await audit.finish_run("waits")
    await audit.finish_run("waits")
    assert [record.finished for record in await run_records(connection, queue, "waits")][-2:] == [False, True]
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), report.resumed) == ({}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["dead", "terminated"])
async def test_an_audit_that_is_full_fails_the_letters_and_the_next_try_stores_no_second_copy(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    # The lease, the redrive, the intent, and the record of one letter: it can't be released then.
    audit = {"name": f"{name}-audit", "discard": "new", "max_msgs": 4}
    queue = await make_queue(connection, name, audit=audit, consumer={"ack_wait": "50ms"})
    monkeypatch.setattr(seams.LEASE_LEASE_SECONDS, 4.0)
    monkeypatch.setattr(seams.LEASE_TIME_LIMITS, 0.0)
    await (make_dead_letters if gone == "dead" else make_terminated_letters)(connection, queue, "abc")
    report = await redrive_dead_letters(connection, queue)
    assert report.failures in (2, 3)
    for cause in report.failed.values():
        assert cause.startswith("it is redriven, but that couldn't be recorded (maximum messages exceeded")
        assert cause.endswith("run it again soon")
    # As long as it is full, nothing more is stored.
    with pytest.raises(RedriveError, match=f"^expected {name}-audit to record who redrives .* found: maximum messages"):
        await redrive_dead_letters(connection, queue)
    assert (await stream_info(connection, name))["state"]["last_seq"] == 6
    await change_stream(connection, f"{name}-audit", max_msgs=-1)
    again = await redrive_dead_letters(connection, queue)
    again.raise_for_failures()
    assert set(again.redriven) == set(report.failed)
    assert [record.sequence for record in await letter_records(connection, queue)] == [
        *report.redriven,
        *sorted(again.redriven),
    ]
    assert await process_all(connection, queue) == dict.fromkeys("abc", 1)


async def test_a_run_that_cannot_be_recorded_does_nothing(connection: NatsPyConnection, name: str) -> None:
    # The lease fills it.
    audit = {"name": f"{name}-audit", "discard": "new", "max_msgs": 1}
    queue = await make_queue(connection, name, audit=audit)
    await make_dead_letters(connection, queue, "a")
    expected = (
        f"^expected {name}-audit to record the redrive, found: maximum messages exceeded .*; nothing was redriven: see"
    )
    with pytest.raises(RedriveError, match=expected):
        await redrive_dead_letters(connection, queue, RUN)
    assert len(await stream_messages(connection, name)) == 1


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_letter_requeued_twice_is_recorded_twice(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    for _ in range(2):
        assert (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))).redriven == {
            1: 1
        }
        for message in await pull_jobs(connection, queue, 1, consumer=CONSUMER):
            await message.nak()

        async def dead() -> bool:
            return [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1]

        await eventually(dead)
    assert [record.action for record in await letter_records(connection, queue)] == ["requeued", "requeued"]
    await publish_jobs(connection, queue, "b")
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 3}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}
