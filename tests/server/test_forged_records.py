"""Letters with subjects that no tool makes, and letters about which somebody has stored a record that isn't theirs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Repair, find_dead_letters, redrive_dead_letters
from testbed.dead_letters import make_terminated_letters, publish_raw, request_for, stream_messages
from testbed.queues import CONSUMER, exhaust_deliveries, make_queue, publish_jobs

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_CONTROLS = ["a\x01b", "\x00", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1b[2Jb", "\x1f", "a\x7fb"]
# By what is forged: the header lines of the record; {queue} is the queue's name.
_FORGED = {
    "a subject elsewhere": "Dead-Letter-Subject: elsewhere.x",
    "the server's subject": "Dead-Letter-Subject: $JS.API.STREAM.DELETE.{queue}",
    "a part of a subject": "Dead-Letter-Subject: {queue}.jobs.\ufffd",
    "another job's subject": "Dead-Letter-Subject: {queue}.jobs.other",
    "a long subject": "Dead-Letter-Subject: {queue}.jobs." + "x" * 3_600,
    "headers": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Kept-Headers: " + json.dumps([["A", "\ud800"]]),
    "the body": "Dead-Letter-Subject: {queue}.jobs.plain",
    "redrives": "Dead-Letter-Subject: {queue}.jobs.plain\r\nRedrive-Count: 99",
    "the time": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Time: 2020-01-01T00:00:00Z",
    "the reason": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Reason: expired",
    "the writer": "Dead-Letter-Subject: {queue}.jobs.plain\r\nNats-Msg-Id: dead:scan:1",
    "the stream": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Stream-Created: 2020-01-01T00:00:00Z",
    "the sequence": "Dead-Letter-Sequence: 9",
}
# What is sent nowhere, with what the failure names.
_UNUSABLE = {
    "a subject elsewhere": "elsewhere.x",
    "the server's subject": "JS.API.STREAM.DELETE",
    "a part of a subject": "exact subject",
    "a long subject": "at most 3500 bytes",
    "headers": "headers that can be sent",
}


async def _forge(nats: NatsServer, queue: str, what: str) -> None:
    block = _FORGED[what].replace("{queue}", queue).encode()
    await publish_raw(nats, f"dead.{queue}.{CONSUMER}.1", b"Dead-Letter-Version: 1\r\n" + block, b"forged")


async def _jobs(connection: NatsPyConnection, queue: str) -> list[tuple[str, bytes]]:
    return [(job.subject, job.data) for job in await stream_messages(connection, queue)]


@pytest.mark.slow
async def test_letters_with_control_characters_in_their_subjects_are_redriven_there(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    subjects = [f"{name}.jobs.{part}" for part in _CONTROLS]
    for subject in subjects:
        await publish_raw(nats, subject, b"A: 1", b"one")
    await publish_jobs(connection, queue, ["two"])
    await exhaust_deliveries(connection, queue, len(subjects) + 1)
    first = {1: Repair(subject=f"{name}.jobs.plain")}
    repaired = await redrive_dead_letters(
        connection, queue, request_for([1], transform=lambda letter: first.get(letter.sequence))
    )
    assert (len(repaired.redriven), repaired.failed) == (1, {})
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failed) == (len(subjects), {})
    plain = f"{name}.jobs.plain"
    assert sorted(await _jobs(connection, name)) == sorted(
        [(subject, b"one") for subject in [plain, *subjects[1:]]] + [(plain, b"two")]
    )
    assert connection.reconnects == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", _FORGED)
async def test_an_archived_job_is_redriven_as_it_was_stored_whatever_a_record_states(
    connection: NatsPyConnection, nats: NatsServer, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_terminated_letters(connection, queue, ["true"])
    await _forge(nats, name, what)
    letter = (await find_dead_letters(connection, queue)).letters[0]
    assert (letter.body, letter.death.reason, letter.redrives) == (b"true", "terminated", 0)
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _jobs(connection, name) == [(f"{name}.jobs.plain", b"true")]


@pytest.mark.slow
@pytest.mark.parametrize("what", _UNUSABLE)
async def test_where_only_a_forged_record_is_left_its_letter_fails_alone_and_the_failure_names_the_record(
    connection: NatsPyConnection, nats: NatsServer, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await make_terminated_letters(connection, queue, ["true"])
    await _forge(nats, name, what)
    await publish_jobs(connection, queue, ["other"])
    await exhaust_deliveries(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), list(report.failed)) == ([2], [1])
    why = report.failed[1]
    assert _UNUSABLE[what] in why
    assert "its record states, one of the messages 1, 2 of the dead letter queue" in why
    repair = Repair(subject=f"{name}.jobs.plain", headers={"A": None})
    repaired = await redrive_dead_letters(connection, queue, request_for([1], transform=lambda _: repair))
    assert (list(repaired.redriven), repaired.failed) == ([1], {})


async def test_a_record_with_a_subject_of_the_queue_comes_before_a_later_one_without(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await make_terminated_letters(connection, queue, ["true"])
    true = f"Dead-Letter-Subject: {name}.jobs.plain".encode()
    await publish_raw(nats, f"dead.{name}.{CONSUMER}.1", true, b"true")
    await _forge(nats, name, "a subject elsewhere")
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _jobs(connection, name) == [(f"{name}.jobs.plain", b"true")]


@pytest.mark.slow
@pytest.mark.parametrize("time", ["2020-01-01T00:00:00Z", "now", "rounded"])
async def test_a_record_counts_whatever_time_its_worker_states(
    connection: NatsPyConnection, nats: NatsServer, name: str, time: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_terminated_letters(connection, queue, ["true"])
    stored = (await find_dead_letters(connection, queue)).letters[0].time
    text = {"now": datetime.now(UTC).isoformat(), "rounded": f"{stored.partition('.')[0]}Z"}.get(time, time)
    head = f"Dead-Letter-Subject: {name}.jobs.plain\r\nDead-Letter-Time: {text}\r\nDead-Letter-Error-Class: app.Busy"
    await publish_raw(nats, f"dead.{name}.{CONSUMER}.1", head.encode(), b"true")
    letter = (await find_dead_letters(connection, queue)).letters[0]
    assert letter.death.error_class == "app.Busy"
