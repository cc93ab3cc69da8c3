"""A redrive brings back each letter once, and the audit says which, when and why."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    connect,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    NotFoundError,
    QueueDeclarationError,
    RedriveError,
)
from testbed import seams
from testbed.dead_letters import (
    change_stream,
    letter_records,
    make_terminated_letters,
    publish_raw,
    run_records,
    stream_messages,
)
from testbed.face import open_audit, redrive_message_id, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
)
from testbed.rates import most_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, RedriveReport, WorkQueue
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer


async def stored(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> StoredMessage:
    message = await get_message(connection, queue.name, sequence)
    assert message is not None
    return message


def only(*sequences: int) -> RedriveRequest:
    return RedriveRequest(Selection(sequences=frozenset(sequences)))


async def test_a_copy_carries_its_origin_and_none_of_the_servers_headers(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    headers = {"Nats-Msg-Id": "first", "Nats-Expected-Stream": name, "Job-Id": "order-1", "Customer": "Ünal"}
    await make_dead_letters(connection, queue, ["größe"], headers=headers)
    original = await stored(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.failed, list(report.gone), report.entries_left) == ({1: 2}, {}, [], 0)
    copy = await stored(connection, queue, 2)
    assert (copy.subject, copy.data) == (original.subject, original.data)
    assert dict(copy.headers) == {
        "Job-Id": "order-1",
        "Customer": "Ünal",
        "Redrive-Count": "1",
        "Redrive-Stream": name,
        "Redrive-Sequence": "1",
        "Redrive-Consumer": "worker",
        "Nats-Msg-Id": redrive_message_id(name, 1, original.time, 1),
    }


@pytest.mark.parametrize("deny_delete", [True, False], ids=["deny_delete", "plain"])
async def test_the_original_is_gone_and_the_copy_has_fresh_deliveries(
    connection: NatsPyConnection, name: str, *, deny_delete: bool
) -> None:
    queue = await make_queue(connection, name, deny_delete=deny_delete, consumer={"max_deliver": 3}, dead=["a"])
    await redrive_dead_letters(connection, queue)
    assert await get_message(connection, name, 1) is None
    (message,) = await pull_jobs(connection, queue, 1)
    assert (message.metadata.num_delivered, message.metadata.sequence.stream) == (1, 2)
    await message.ack_sync()
    assert await stored_count(connection, name) == 0
    assert (await find_dead_letters(connection, queue)).letters == ()


async def test_the_count_grows_with_every_redrive(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    for round_ in (1, 2, 3):
        assert (await redrive_dead_letters(connection, queue)).redriven == {round_: round_ + 1}
        copy = await stored(connection, queue, round_ + 1)
        assert (copy.header("Redrive-Count"), copy.header("Redrive-Sequence")) == (str(round_), str(round_))
        assert len([key for key, _ in copy.headers if key.startswith("Redrive-")]) == 4
        await exhaust_deliveries(connection, queue, 1)
    assert await stored_count(connection, name) == 1


async def test_a_job_with_an_id_inside_the_duplicate_window_is_not_swallowed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="2m")
    await make_dead_letters(connection, queue, ["a"], headers={"Nats-Msg-Id": "dag/run/task/-1/0"})
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    assert await process_all(connection, queue) == {"a": 1}


async def test_a_job_finished_while_the_redrive_waits_for_its_worker_is_gone(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")

    async def finish_late(*_: object) -> bool:
        await connection.request(late_ack_subject(name, "worker", 1), b"+ACK")
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, finish_late)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({2: 3}, [1])
    assert await process_all(connection, queue) == {"b": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_alive_again_after_the_redrive_waited_is_not_copied(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")

    async def forget_the_deaths(*_: object) -> bool:
        await connection.api(f"CONSUMER.RESET.{name}.worker", {"seq": 2})
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, forget_the_deaths)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({1: 3}, [2])
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
async def test_a_request_with_sequences_that_are_no_dead_letters_redrives_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="abc")
    await connection.request(late_ack_subject(name, "worker", 2), b"+ACK")
    expected = (
        f"expected dead letters of {name}, found otherwise for 2 of 3 sequences (2: its job is no longer stored,"
        " though a copy is stored (finished late by a slow worker, or lost by the server); select unaccounted to bring"
        " it back all the same; 99: no entry in the dead letter queue); nothing was redriven:"
        " leave them out, or redrive all"
    )
    with pytest.raises(DeadLetterGoneError, match=f"^{re.escape(expected)}$"):
        await redrive_dead_letters(connection, queue, only(1, 2, 99))
    assert await process_all(connection, queue) == {}
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({1: 4, 3: 5}, [2])


async def test_a_requested_sequence_of_an_earlier_stream_is_named_as_such(
    connection: NatsPyConnection, name: str
) -> None:
    await make_dead_letters(connection, await make_queue(connection, name), ["old"])
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name, jobs=["new"])
    cause = r"\(1: its entry is about an earlier stream, consumer or message of the same name and number\)"
    with pytest.raises(DeadLetterGoneError, match=cause):
        await redrive_dead_letters(connection, queue, only(1))
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    assert await process_all(connection, queue) == {"new": 1}


async def test_a_full_stream_keeps_its_letters_and_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=2, dead="ab")
    by_copy = RedriveRequest(protocol=Protocol.COPY)
    report = await redrive_dead_letters(connection, queue, by_copy)
    refusal = f"{name} refused the copy of 1: maximum messages exceeded"
    assert (dict(report.redriven), report.failed[1], sorted(report.failed)) == ({}, refusal, [1, 2])
    with pytest.raises(
        RedriveError, match=f"0 dead letters were redriven, 2 stayed where they were: 1: {refusal}; 2: .*again is safe"
    ):
        report.raise_for_failures()
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    await make_queue(connection, name, discard="new", max_msgs=4)
    report = await redrive_dead_letters(connection, queue, by_copy)
    report.raise_for_failures()
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_a_letter_that_cannot_be_copied_stays_and_does_not_stop_the_others(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=None, allow_direct=False)
    await publish_raw(nats, f"{name}.jobs.a\udcff", b"City: Bonn", b"unknown subject")
    await publish_jobs(connection, queue, ["x" * (connection.client.max_payload - 20), "good"])
    await exhaust_deliveries(connection, queue, 3)
    report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {3: 4}
    assert report.failed[1].startswith(
        f"expected the exact subject of job 1, found {name}.jobs.a\ufffd: its bytes that"
    )
    assert re.match(
        r"expected a copy of at most 1048576 bytes \(the server's max_payload\), found 10486\d\d", report.failed[2]
    )
    assert (await stored(connection, queue, 1)).data == b"unknown subject"
    assert await process_all(connection, queue) == {"good": 1}


async def test_a_copy_that_another_subscriber_answers_leaves_the_original(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    # The stream stops capturing the subject, and a service answers there.
    config: dict[str, Any] = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"subjects": [f"{name}.elsewhere"]})
    report = await redrive_dead_letters(connection, queue)
    assert report.failed[1].startswith(f"expected a subject of {name} ({name}.elsewhere), found {name}.jobs.plain: ")
    # It may do so just after the scan.
    monkeypatch.setattr(seams.REDRIVE_TARGET_CHECK_SUBJECT, lambda *_: None)

    async def respond(answer: bytes, message: Msg) -> None:
        await message.respond(answer)

    answers = [b"not JSON", b'"text"', json.dumps({"stream": "other", "seq": 7}).encode()]
    strange = (
        f"expected a stream's acknowledgement on {name}.jobs.plain, found another answer: something else subscribes to"
        " it"
    )
    other = f"expected {name} to store the copy of 1, found an answer of other: original kept"
    for answer, expected in zip(answers, [strange, strange, other], strict=True):
        service = await connection.client.subscribe(f"{name}.jobs.>", cb=partial(respond, answer))
        report = await redrive_dead_letters(connection, queue)
        await service.unsubscribe()
        assert (dict(report.redriven), report.failed) == ({}, {1: expected})
    assert (await redrive_dead_letters(connection, queue)).failed == {
        1: f"no stream captures {name}.jobs.plain just now"
    }
    assert (await stored(connection, queue, 1)).data == b"a"


async def test_a_queue_without_a_dead_letter_queue_or_without_its_streams_raises(
    connection: NatsPyConnection, name: str
) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name} on the server, found none: provision the queue"):
        await redrive_dead_letters(connection, small_queue(name))
    queue = await make_queue(connection, name, dead_letters=None)
    with pytest.raises(QueueDeclarationError, match="expected dead_letters, which the scan reads"):
        await redrive_dead_letters(connection, queue)


# The audit of redrives, and how a redrive that was cut off continues by it.


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
            "stored_at": letter.time,
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
            "error_class": None,
            "error_message": letter.death.explanation,
            "why": "the printer is back",
            "who": WHO,
            "run": "orders-1",
            "wave": None,
            "changes": None,
            "kept": None,
        }
        assert started <= record.at <= datetime.now(UTC)


async def test_a_run_is_recorded_from_its_beginning_to_its_end(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="abc")
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


async def test_concurrent_redrives_record_each_letter_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(80)))
    async with connect(settings) as second, connect(settings) as third:
        reports = await asyncio.gather(*(redrive_dead_letters(client, queue) for client in (connection, second, third)))
    assert {report.protocol for report in reports} == {Protocol.COPY}
    assert [record.sequence for record in await letter_records(connection, queue)] == [*range(1, 81)]


async def test_a_stopped_run_continues_under_its_key_and_its_report_covers_both_tries(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="abcdef")
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


async def test_a_finished_run_with_the_same_key_starts_afresh(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    assert (await redrive_dead_letters(connection, queue, RUN)).redriven == {1: 3, 2: 4}
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RUN)
    assert (dict(report.redriven), report.resumed) == ({3: 5, 4: 6}, 0)
    report = await redrive_dead_letters(connection, queue, RUN)
    assert (dict(report.redriven), report.resumed) == ({}, 0)


async def test_a_run_that_stays_open_continues_until_it_is_finished(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="a")
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
    queue = await make_queue(connection, name, audit=audit, dead="a")
    expected = (
        f"^expected {name}-audit to record the redrive, found: maximum messages exceeded .*; nothing was redriven: see"
    )
    with pytest.raises(RedriveError, match=expected):
        await redrive_dead_letters(connection, queue, RUN)
    assert len(await stream_messages(connection, name)) == 1


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_letter_requeued_twice_is_recorded_twice(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="a")
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


# Redrives of many letters take few requests, and remove nothing but the letters' entries.


LETTERS = 550


async def api_requests(connection: NatsPyConnection) -> int:
    return int((await connection.api("INFO"))["api"]["total"])


@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.IN_PLACE])
async def test_many_letters_take_few_api_requests_and_entries_of_others_stay(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, archive=None)
    letters = [str(number) for number in range(LETTERS)]
    await make_dead_letters(connection, queue, letters)
    foreign = f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.other"
    await connection.client.jetstream().publish(foreign, b"what nobody can read")
    await publish_jobs(connection, queue, ["alive"])
    before = await api_requests(connection)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
    report.raise_for_failures()
    used = await api_requests(connection) - before
    assert len(report.redriven) == LETTERS
    assert report.entries_left == 0
    # The entries behind the first one of others are removed one by one, and these are none.
    assert used < 100
    assert [message.data for message in await stream_messages(connection, f"{name}-dead")] == [b"what nobody can read"]


async def test_the_next_batch_is_stored_while_the_one_before_is_finished(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    monkeypatch.setattr(seams.STEPS_LEAST_OVERLAPPED, 1)
    queue = await make_queue(connection, name, dead="abcdef")
    store_jobs, remove_originals = map(seams.current, (seams.STEPS_STORE_JOBS, seams.STORED_LETTERS_REMOVE_ORIGINALS))
    begun = [asyncio.Event() for _ in range(3)]
    batches, removed = iter(begun), 0

    async def store(*arguments: Any) -> Any:
        next(batches).set()
        return await store_jobs(*arguments)

    async def remove_once_the_next_is_stored(*arguments: Any) -> Any:
        nonlocal removed
        removed += 1
        await asyncio.wait_for(begun[min(removed, 2)].wait(), 10)
        return await remove_originals(*arguments)

    monkeypatch.setattr(seams.STEPS_STORE_JOBS, store)
    monkeypatch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, remove_once_the_next_is_stored)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures, removed) == (6, 0, 3)


# The rate of a redrive, its progress and its cancellation.


_CORE = "airflow_provider_jetstream.jetstream."


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "letters", "most"), [(0.2, 3, 2), (1, 12, 10), (20, 230, 200)])
async def test_ten_seconds_have_no_more_letters_than_the_rate_allows(
    connection: NatsPyConnection, name: str, rate: float, letters: int, most: int
) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(letters)))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=rate))
    report.raise_for_failures()
    # The server's own timestamps.
    moments = [copy.stored_at.timestamp() for copy in await stream_messages(connection, name)]
    assert len(moments) == letters
    assert most_within(moments, 10.0) <= most


@pytest.mark.slow
async def test_a_high_rate_has_no_bursts(connection: NatsPyConnection, name: str) -> None:
    rate, letters = 400, 1_200
    queue = await make_queue(connection, name, dead=map(str, range(letters)))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=rate))
    report.raise_for_failures()
    moments = [copy.stored_at.timestamp() for copy in await stream_messages(connection, name)]
    for period in (1.0, 2.0):
        # 0.18 s for what comes early or is stored late, as the limiter documents.
        assert most_within(moments, period) <= rate * (period + 0.18) + 1


@pytest.mark.parametrize("minutes", [-5, 5])
async def test_a_clock_that_is_off_neither_delays_a_redrive_nor_makes_it_early(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    class WrongClock(datetime):
        """A machine's clock that is off."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(minutes=minutes)

    queue = await make_queue(connection, name, consumer={"ack_wait": "1s"}, dead="ab")
    letters = (await find_dead_letters(connection, queue)).letters
    # Wherever the package reads this machine's clock.
    for module in [module for name, module in sys.modules.items() if name.startswith(_CORE)]:
        if getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", WrongClock)
    async with asyncio.timeout(20):
        report = await redrive_dead_letters(connection, queue)
    began = datetime.strptime(f"{report.redrive[:15]}Z", "%Y%m%dT%H%M%S%z")
    assert abs((began - datetime.now(UTC)).total_seconds() - 60 * minutes) < 30, "expected the clock to be off"
    assert report.redriven == {1: 3, 2: 4}
    copies = {copy.sequence: copy for copy in await stream_messages(connection, name)}
    for letter in letters:
        assert copies[report.redriven[letter.sequence]].stored_at >= letter.ready_at


async def test_progress_is_reported_and_logged(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, dead="abcd")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    monkeypatch.setattr(seams.RUN_PROGRESS_PROGRESS_SECONDS, 0)
    reports: list[tuple[int, bool]] = []

    def progress(report: RedriveReport) -> None:
        reports.append((len(report.redriven), report.cancelled))

    with caplog.at_level(logging.INFO, logger="airflow_provider_jetstream"):
        await redrive_dead_letters(connection, queue, progress=progress)
    assert reports == [(2, False), (4, False), (4, False)]
    first, *others = [record.getMessage() for record in caplog.records if ".redrive." in record.name]
    assert re.match(rf"Redriving {name} by copy \(the queue has room for copies\): nothing is lost", first)
    assert others == [
        f"Redriving {name}: {number} letters redriven, 0 parked, 0 failed, 0 were no dead letters"
        for number in (2, 4, 4)
    ]


async def test_a_stopped_redrive_ends_between_batches(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="abcde")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    calls = count(1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: next(calls) == 3)
    assert (dict(report.redriven), report.cancelled) == ({1: 6, 2: 7, 3: 8, 4: 9}, True)
    assert await process_all(connection, queue) == dict.fromkeys("abcd", 1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: True)
    assert (dict(report.redriven), report.cancelled) == ({}, True)
    assert (await redrive_dead_letters(connection, queue)).redriven == {5: 10}
