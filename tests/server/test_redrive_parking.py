"""Parked letters, and their redrive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects, parked_filter, parked_subject
from airflow_provider_jetstream.jetstream.errors import RedriveError
from testbed import seams
from testbed.dead_letters import letter_records, make_terminated_letters, request_for, stored_message, stream_messages
from testbed.face import Headers, record_headers
from testbed.queues import exhaust_deliveries, make_dead_letters, make_queue, process_all, publish_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection

ALL = RedriveRequest(max_redrives=0, why="the customer is gone")
PARKED = RedriveRequest(Selection(parked=True))


async def parked_letters(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, DeadLetter]:
    findings = await find_dead_letters(connection, queue, PARKED.selection)
    return {letter.sequence: letter for letter in findings.letters}


async def test_a_letter_is_parked_when_it_has_been_redriven_often_enough(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    request = RedriveRequest(max_redrives=2)
    for sequence in (1, 2):
        report = await redrive_dead_letters(connection, queue, request)
        assert (dict(report.redriven), list(report.parked)) == ({sequence: sequence + 1}, [])
        await exhaust_deliveries(connection, queue, 1)
    shown = await preview(connection, queue, request)
    assert (shown.redriven, shown.parked) == (0, 1)
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), list(report.parked), report.failed) == ({}, [3], {})
    assert await stored_count(connection, name) == 0
    letter = (await parked_letters(connection, queue))[3]
    assert (letter.redrives, letter.parked) == (2, "dead again after 2 redrives")
    assert [(record.action, record.redrives) for record in await letter_records(connection, queue)] == [
        ("redriven", 1),
        ("redriven", 2),
        ("parked", 2),
    ]


async def test_parked_letters_have_complete_records_and_no_scan_counts_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    pairs = (("Tag", "one"), ("Tag", "zwölf"), ("Job-Id", "order-7"), ("Nats-Msg-Id", "first"))
    body = bytes(range(256))
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=Headers(pairs))
    await exhaust_deliveries(connection, queue, 1)
    await make_terminated_letters(connection, queue, "b", reason="no such customer")
    before = {letter.sequence: letter for letter in (await find_dead_letters(connection, queue)).letters}
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (dict(report.redriven), list(report.parked), report.failed, report.entries_left) == ({}, [1, 2], {}, 0)
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.dismissed, findings.uncertain) == ((), (), 0)
    assert [message.subject for message in await stream_messages(connection, f"{name}-dead")] == [
        parked_subject(name, "worker", 1),
        parked_subject(name, "worker", 2),
    ]
    letters = await parked_letters(connection, queue)
    for sequence, letter in letters.items():
        assert (letter.body, letter.subject, letter.time, letter.death) == (
            before[sequence].body,
            before[sequence].subject,
            before[sequence].time,
            before[sequence].death,
        )
        assert sorted(letter.headers) == sorted(before[sequence].headers)
        assert letter.parked == "the customer is gone"
    assert [value for key, value in letters[1].headers if key == "Tag"] == ["one", "zwölf"]
    assert (letters[2].death.reason, letters[2].death.explanation) == (Reason.TERMINATED, "no such customer")


@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
async def test_parked_letters_come_back_when_they_are_selected_and_leave_nothing(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    atomic: dict[str, Any] = {
        "atomic_redrive": protocol == Protocol.ATOMIC,
        "consumer": {"filter_subject": f"{name}.jobs.>"},
    }
    queue = await make_queue(connection, name, **atomic)
    await make_dead_letters(connection, queue, "ab", headers={"Customer": "x"})
    await redrive_dead_letters(connection, queue, ALL)
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    one = RedriveRequest(Selection(parked=True, sequences=frozenset({2})), subject=f"{name}.jobs.slow")
    report = await redrive_dead_letters(connection, queue, one)
    assert (report.protocol, list(report.redriven), report.entries_left) == (protocol, [2], 0)
    copy = await stored_message(connection, name, report.redriven[2])
    assert (copy.header("Customer"), copy.header("Redrive-Count")) == ("x", "1")
    assert [key for key, _ in copy.headers if key.startswith("Dead-Letter-")] == []
    assert set(await parked_letters(connection, queue)) == {1}
    assert list((await redrive_dead_letters(connection, queue, PARKED)).redriven) == [1]
    assert await stored_count(connection, f"{name}-dead") == 0
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
async def test_three_concurrent_redrives_of_parked_letters_redrive_each_once(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(60)]
    await make_dead_letters(connection, queue, jobs)
    reports = await asyncio.gather(*(redrive_dead_letters(connection, queue, ALL) for _ in range(3)))
    assert all(report.failed == {} for report in reports)
    assert len(await parked_letters(connection, queue)) == 60
    assert await stored_count(connection, f"{name}-dead") == 60
    reports = await asyncio.gather(*(redrive_dead_letters(connection, queue, PARKED) for _ in range(3)))
    assert all(report.failed == {} for report in reports)
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)
    assert await stored_count(connection, f"{name}-dead") == 0


async def test_a_dead_letter_queue_without_the_parked_subject_keeps_the_letter_and_the_failure_says_what_to_do(
    connection: NatsPyConnection, name: str
) -> None:
    *others, parked = dead_letter_subjects(name)
    assert parked == parked_filter(name)
    queue = await make_queue(connection, name, dead_letters={"name": f"{name}-dead", "subjects": others})
    await make_dead_letters(connection, queue, "ab")
    report = await redrive_dead_letters(connection, queue, ALL)
    expected = (
        f"expected {name}-dead to capture parked.{name}.>, found that no stream does: add that subject to be able to"
    )
    assert (list(report.parked), report.failures) == ([], 2)
    assert report.failed[1] == f"{expected} park letters"
    assert any(f"doesn't capture parked.{name}.>" in risk for risk in report.risks)
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 3, 2: 4}


async def test_a_full_dead_letter_queue_keeps_the_letter(connection: NatsPyConnection, name: str) -> None:
    letters = {"name": f"{name}-dead", "discard": "new", "max_msgs": 2}
    queue = await make_queue(connection, name, dead_letters=letters)
    await make_dead_letters(connection, queue, "ab")
    report = await redrive_dead_letters(connection, queue, ALL)
    assert report.failed == {
        sequence: f"{name}-dead refused to park {sequence}: maximum messages exceeded" for sequence in (1, 2)
    }
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 3, 2: 4}


async def test_parking_makes_room_in_a_queue_that_is_full_of_dead_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=3)
    await make_dead_letters(connection, queue, "abc")
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (list(report.parked), report.failed) == ([1, 2, 3], {})
    await publish_jobs(connection, queue, "def")
    assert await process_all(connection, queue) == {"d": 1, "e": 1, "f": 1}
    assert (await redrive_dead_letters(connection, queue, PARKED)).redriven == {1: 7, 2: 8, 3: 9}
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_parking_that_was_cut_off_before_the_original_was_removed_is_finished(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")

    async def fail(*_: object) -> None:
        raise RedriveError("the original could not be removed")

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, fail)
        report = await redrive_dead_letters(connection, queue, ALL)
    assert report.failed == dict.fromkeys((1, 2), "it is parked, but the original could not be removed")
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    report = await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    assert list(report.parked) == [1]
    assert set(await parked_letters(connection, queue)) == {1}
    # The other letter may also be redriven.
    assert (await redrive_dead_letters(connection, queue)).redriven == {2: 3}
    assert set(await parked_letters(connection, queue)) == {1}
    assert await process_all(connection, queue) == {"b": 1}


async def test_a_letter_whose_copy_is_stored_already_is_not_parked(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")

    async def fail(*_: object) -> None:
        raise RedriveError("the original could not be removed")

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, fail)
        assert (await redrive_dead_letters(connection, queue)).failures == 1
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (dict(report.redriven), list(report.parked)) == ({1: 2}, [])
    assert await parked_letters(connection, queue) == {}
    assert await process_all(connection, queue) == {"a": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [1, 2])
async def test_letters_that_were_parked_and_requeued_before_are_parked_again(
    connection: NatsPyConnection, name: str, cut_off: int
) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(10)]
    await make_dead_letters(connection, queue, jobs)
    for _ in range(cut_off):
        # A redrive that parks is killed before it records anything.
        for letter in (await find_dead_letters(connection, queue)).letters:
            await seams.current(seams.STEPS_STORE_PARKED)(connection, letter, f"{name}-dead", "the customer is gone")
        report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
        assert len(report.redriven) == 10
        await exhaust_deliveries(connection, queue, 10)
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (len(report.parked), report.failed) == (10, {})
    assert {letter.body.decode() for letter in (await parked_letters(connection, queue)).values()} == set(jobs)
    assert len((await redrive_dead_letters(connection, queue, PARKED)).redriven) == 10
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)


async def test_a_forged_parked_letter_does_not_take_the_place_of_a_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    (letter,) = (await find_dead_letters(connection, queue)).letters
    forged = record_headers(letter.death, subject="x", time=letter.time, headers=(), writer="park", parked="x")
    await connection.client.jetstream().publish(parked_subject(name, "worker", 1), b"forged", headers=forged)
    assert list((await redrive_dead_letters(connection, queue, ALL)).parked) == [1]
    assert (await parked_letters(connection, queue))[1].body == b"a"
