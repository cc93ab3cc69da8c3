"""A scan finds each dead letter once, with its message and death, whatever else the queue and its entries are."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Findings,
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    Status,
    account_for_jobs,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed.dead_letters import make_terminated_letters, publish_raw, stream_messages
from testbed.face import consumer_info, stream_info, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
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


async def find(connection: NatsPyConnection, queue: WorkQueue) -> tuple[list[int], dict[int, Status]]:
    findings = await find_dead_letters(connection, queue)
    return shown(findings)


def shown(findings: Findings) -> tuple[list[int], dict[int, Status]]:
    dismissed = {job.sequence: job.status for job in findings.dismissed}
    assert len(dismissed) == len(findings.dismissed)
    return [letter.sequence for letter in findings.letters], dismissed


async def one_letter(connection: NatsPyConnection, queue: WorkQueue) -> DeadLetter:
    (letter,) = (await find_dead_letters(connection, queue)).letters
    return letter


async def repeat_advisories(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Publish the stored advisories once more, as a server does after a crash."""
    letters = f"{queue.name}-dead"
    for sequence in range(1, (await stream_info(connection, letters))["state"]["last_seq"] + 1):
        message = await get_message(connection, letters, sequence)
        assert message is not None
        await connection.client.jetstream().publish(message.subject, message.data)


async def wait_until_idle(connection: NatsPyConnection, queue: WorkQueue) -> None:
    async def idle() -> bool:
        await probe(connection, queue)
        return bool((await consumer_info(connection, queue.name, CONSUMER))["num_ack_pending"] == 0)

    await eventually(idle)


async def test_a_dead_letter_is_found_with_its_message_and_death(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2}, jobs=["good"])
    await process_all(connection, queue)
    sequences = await make_dead_letters(
        connection, queue, ["größe"], kind="a", headers={"Job-Id": "order-7", "Customer": "Ünal"}
    )
    letter = await one_letter(connection, queue)
    death = letter.death
    assert (death.stream, [death.sequence], death.consumer) == (name, sequences, "worker")
    assert (death.deliveries, death.reason, death.explanation) == (2, Reason.MAX_DELIVERIES, None)
    assert death.created == (await stream_info(connection, name))["created"]
    assert (letter.subject, letter.body, letter.source) == (f"{name}.jobs.a", "größe".encode(), "queue")
    assert dict(letter.headers) == {"Job-Id": "order-7", "Customer": "Ünal"}
    assert (letter.job_id, letter.redrives, letter.entries, letter.preserved) == ("order-7", 0, (1,), False)
    assert datetime.fromisoformat(letter.time) < death.died_at


@pytest.mark.parametrize(
    ("consumer", "patience"),
    [({"ack_wait": "700ms"}, 0.7), ({"ack_wait": None, "backoff": ["500ms", "3s"], "max_deliver": 2}, 3.0)],
)
async def test_a_letter_is_ready_once_its_ack_wait_has_passed(
    connection: NatsPyConnection, name: str, consumer: dict[str, object], patience: float
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1} | consumer, dead=["a"])
    letter = await one_letter(connection, queue)
    assert letter.ready_at - letter.death.died_at == timedelta(seconds=patience)


@pytest.mark.parametrize(("count", "redrives"), [("3", 3), ("many", 0), ("-1", 0)])
async def test_the_redrive_count_is_read_from_the_job_and_an_invalid_one_is_zero(
    connection: NatsPyConnection, name: str, count: str, redrives: int
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"], headers={"Redrive-Count": count})
    letter = await one_letter(connection, queue)
    assert (letter.redrives, letter.job_id) == (redrives, "1")


async def test_repeated_advisories_are_one_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await repeat_advisories(connection, queue)
    assert await stored_count(connection, f"{name}-dead") == 4
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.entries for letter in letters] == [(1, 3), (2, 4)]


async def test_entries_of_an_earlier_stream_never_count_for_a_job_of_the_same_sequence(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    assert await publish_jobs(connection, queue, ["new"]) == [1]
    assert await find(connection, queue) == ([], {1: Status.STALE, 2: Status.STALE})
    # A death of the new job counts, and its letter includes the stale entry of the same sequence.
    await exhaust_deliveries(connection, queue, 1)
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.entries, letter.death.reason) == (b"new", (1, 3), Reason.MAX_DELIVERIES)


async def test_entries_of_a_recreated_consumer_are_stale(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    config = (await connection.api(f"CONSUMER.INFO.{name}.worker"))["config"]
    await connection.api(f"CONSUMER.DELETE.{name}.worker")
    assert await find(connection, queue) == ([1], {})
    await connection.api(f"CONSUMER.CREATE.{name}.worker", {"stream_name": name, "config": config})
    assert await find(connection, queue) == ([], {1: Status.STALE})
    # The new consumer delivers it again, and only that death counts.
    await exhaust_deliveries(connection, queue, 1)
    assert await find(connection, queue) == ([1], {})


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_letter_whose_consumer_will_deliver_it_again_is_alive(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="abc")
    # A crash of the server right after the deaths does the same.
    await connection.api(f"CONSUMER.RESET.{name}.worker", {"seq": 2})
    assert await find(connection, queue) == ([1], {2: Status.ALIVE, 3: Status.ALIVE})
    # A job in flight has been delivered, as the dead ones have: which of them it is no number tells.
    await pull_jobs(connection, queue, 1)
    assert await find(connection, queue) == ([1], {2: Status.UNCERTAIN, 3: Status.ALIVE})
    assert await process_all(connection, queue) == {"c": 1}
    await wait_until_idle(connection, queue)
    findings = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in findings.letters], findings.uncertain) == ([1, 2], 0)


async def test_other_messages_of_a_shared_dead_letter_queue_are_ignored(
    connection: NatsPyConnection, name: str
) -> None:
    shared = {"name": f"{name}-shared", "subjects": [f"{MAX_DELIVERIES}.{name}x.*", f"{MAX_DELIVERIES}.{name}.*"]}
    queue = await make_queue(connection, name, dead_letters=shared)
    other = await make_queue(connection, f"{name}x", dead_letters=shared)
    await make_dead_letters(connection, other, ["theirs", "theirs too"])
    await make_dead_letters(connection, queue, ["ours"])
    lies = f'{{"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "{name}x"}}'
    for body in (b"not JSON", b"{}", lies.encode()):
        await connection.client.jetstream().publish(f"{MAX_DELIVERIES}.{name}.worker", body)
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.entries) == (b"ours", (3,))
    risks = (await find_dead_letters(connection, queue)).risks
    assert f"3 entries of {name}-shared don't state which job they are about: check them by hand" in risks
    assert (await find(connection, other))[0] == [1, 2]


async def test_the_error_for_a_queue_without_a_dead_letter_queue_says_what_to_declare(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead_letters=None)
    with pytest.raises(QueueDeclarationError, match="expected dead_letters, which the scan reads: declare a dead"):
        await find_dead_letters(connection, queue)


@pytest.mark.parametrize("missing", ["", "-dead"])
async def test_a_missing_stream_is_named(connection: NatsPyConnection, name: str, missing: str) -> None:
    await make_queue(connection, name)
    await connection.api(f"STREAM.DELETE.{name}{missing}")
    with pytest.raises(NotFoundError, match=f"expected stream {name}{missing} on the server, found none: provision"):
        await find_dead_letters(connection, small_queue(name))


# Summaries of dead letters: counts, ranges, groups and ages; and the bodies that a summary preserves.


async def test_every_letter_is_preserved_and_the_selected_ones_are_counted(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["one", "two"], kind="a")
    await make_dead_letters(connection, queue, ["three"], kind="b")
    await make_dead_letters(connection, queue, ["late"], kind="a")
    await store_completion(connection, queue, 4)
    summary = await summarise_dead_letters(connection, queue, Selection(subject=f"{name}.jobs.a"), ["subject"])
    assert (summary.dead, summary.ranges, summary.preserved) == (2, [(1, 2)], 3)
    assert (summary.dismissed, summary.uncertain, summary.undeliverable) == ({"completed": 1}, 0, 0)
    assert str(summary) == "2 dead letters, 1 entries about other jobs (1 completed)"
    assert (await summarise_dead_letters(connection, queue)).preserved == 0


async def test_parked_letters_are_counted_when_they_are_selected(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["one", "two"])
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({1})), max_redrives=0))
    assert (await summarise_dead_letters(connection, queue, Selection(parked=True))).ranges == [(1, 1)]
    assert (await summarise_dead_letters(connection, queue)).ranges == [(2, 2)]


# What anybody may store in a dead letter queue, an events stream or an audit: scan and redrive pass it by.


_DIGITS = "9" * 5_000
_BLOCKS = [
    f"Dead-Letter-Sequence: {_DIGITS}",
    "Dead-Letter-Sequence: 99\r\nDead-Letter-Time: 9999-12-31T23:59:59-23:59\r\nDead-Letter-Stream-Created: \x0b",
    "Dead-Letter-Sequence: 99\r\nDead-Letter-Last-Failure: 0001-01-01T00:00:00+23:59\r\nDead-Letter-Reason: \x1b[2K",
    f"Dead-Letter-Kept-Headers: {'[' * 50_000}",
    f"Dead-Letter-Origin: {'{' * 50_000}",
    'Dead-Letter-Kept-Headers: [["\\ud800", "\\udfff"]]\r\nDead-Letter-Subject: a b',
    f"Dead-Letter-Error-Message: {'x' * 50_000}\r\n{'  y' * 100}",
    "no colon\r\n: nameless\r\n\udcff: \udcff",
]
_VALUES: dict[str, list[Any]] = {
    "stream_seq": [-1, 0, 2**64, 10**400, "x", None, 1e999],
    "deliveries": [-1, 2**63, 10**400],
    "timestamp": ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", -1e300, "2026-01-01T00:00:00"],
    "consumer": ["x" * 5_000, "", ">", "\x0b"],
    "reason": ["a\nb" * 5_000],
}


@pytest.mark.slow
async def test_a_scan_and_a_redrive_pass_by_what_somebody_hostile_has_stored(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"])
    created = (await connection.api(f"STREAM.INFO.{name}"))["created"]
    advisory = {
        "type": "io.nats.jetstream.advisory.v1.max_deliver",
        "id": "x",
        "timestamp": created,
        "stream": name,
        "consumer": CONSUMER,
        "stream_seq": 77,
        "deliveries": 1,
    }
    bodies = [json.dumps(advisory | {field: value}).encode() for field, values in _VALUES.items() for value in values]
    bodies += [b"", b"\xff", b"[" * 50_000, b'{"type": "\\ud800"}', b"null", b"9" * 50_000]
    for number, block in enumerate(_BLOCKS):
        for place in (f"dead.{name}.{CONSUMER}.{number}", f"parked.{name}.{CONSUMER}.{_DIGITS[:30]}"):
            await publish_raw(nats, place, block.encode("utf-8", "surrogateescape"), b"forged")
    for part in ("\x0b", "\x0c.\x1c", "\udcff", "x" * 3_000, "worker.-1", "worker.\u0663"):
        await publish_raw(nats, f"dead.{name}.{part}", b"A: 1", b"forged")
    for body in bodies:
        for kind in (MAX_DELIVERIES, TERMINATED):
            await publish_raw(nats, f"{kind}.{name}.{CONSUMER}", b"A: 1", body)
        for place in (
            *(
                f"completed.{name}.{CONSUMER}.99",
                f"handled.{name}.99",
                f"audit.{name}.letters.1",
                f"audit.{name}.account",
            ),
            *(f"audit.{name}.intents.x", f"audit.{name}.runs.x", f"cancelled.{name}.x", f"published.{name}.x"),
        ):
            await publish_raw(nats, place, b"A: 1", body)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [(letter.sequence, letter.body) for letter in letters] == [(1, b"a"), (2, b"b")]
    report = await redrive_dead_letters(connection, queue)
    assert sorted(report.redriven) == [1, 2]
    assert not (await find_dead_letters(connection, queue)).letters
    assert connection.reconnects == 0


# Terminations and records that come late, or of jobs that were redriven or requeued before.


_COPY = RedriveRequest(protocol=Protocol.COPY)


async def _terminate(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Terminate the next job, and return its sequence once the server has announced that."""
    letters = f"{queue.name}-dead"
    before = await stored_count(connection, letters)
    (message,) = await pull_jobs(connection, queue, 1, within=30)
    await message.respond(b"+TERM not wanted")

    async def announced() -> bool:
        return await stored_count(connection, letters) > before

    await eventually(announced)
    return message.metadata.sequence.stream


async def _store_record(connection: NatsPyConnection, queue: WorkQueue, sequence: int, body: bytes) -> None:
    headers = {"Dead-Letter-Subject": f"{queue.name}.jobs.plain", "Dead-Letter-Error-Class": "app.Late"}
    await connection.client.jetstream().publish(f"dead.{queue.name}.{CONSUMER}.{sequence}", body, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_a_record_that_is_stored_after_the_redrive_makes_no_second_letter(
    connection: NatsPyConnection, name: str, *, archive: bool
) -> None:
    queue = await make_queue(connection, name, archive=archive)
    await make_terminated_letters(connection, queue, ["a"])
    if not archive:
        await _store_record(connection, queue, 1, b"a")
    assert list((await redrive_dead_letters(connection, queue, _COPY)).redriven) == [1]
    await _store_record(connection, queue, 1, b"a")
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}
    assert [job.data for job in await stream_messages(connection, name)] == [b"a"]


@pytest.mark.slow
@pytest.mark.since_server("2.14", "consumers that can be reset")
async def test_a_job_that_was_requeued_in_place_and_then_terminated_is_a_letter_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=True, dead=["a"])
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert list(report.redriven) == [1]
    assert await _terminate(connection, queue) == 1
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.body, letter.death.reason) == (1, b"a", "terminated")
    assert list((await redrive_dead_letters(connection, queue, _COPY)).redriven) == [1]
    assert [job.data for job in await stream_messages(connection, name)] == [b"a"]


# Bodies with more levels than a JSON parser follows end nothing, wherever a client stores them.


_LEVELS = 100_000
_DEEP = {
    "lists": b"[" * _LEVELS,
    "objects": b'{"a":' * _LEVELS + b"1" + b"}" * _LEVELS,
    "an id": b'{"id":' + b"[" * _LEVELS + b"]" * _LEVELS + b', "advisory": "x"}',
    "an event": b'{"type":"io.nats.jetstream.advisory.v1.max_deliver","stream":'
    + b"[" * _LEVELS
    + b"]" * _LEVELS
    + b"}",
}
# Each is read by another reader.
_SUBJECTS = (
    "completed.{queue}.worker.1",
    "cancelled.{queue}.0",
    "$JS.EVENT.METRIC.CONSUMER.ACK.{queue}.worker",
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{queue}.worker",
    "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{queue}.worker",
    "dead.{queue}.worker.1",
    "parked.{queue}.worker.1",
    "handled.{queue}.1",
    "audit.{queue}.letters.1",
    "audit.{queue}.intents.x",
    "audit.{queue}.account",
)


@pytest.mark.slow
@pytest.mark.parametrize("what", _DEEP)
async def test_deep_bodies_hide_no_letter_and_come_back_unchanged(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=True, dead=[_DEEP[what]])
    jetstream = connection.client.jetstream()
    for subject in _SUBJECTS:
        await connection.client.publish(subject.format(queue=name), _DEEP[what])
    await connection.client.flush()
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.body == _DEEP[what]
    assert (await account_for_jobs(connection, queue)).unaccounted == ()
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert (await jetstream.get_msg(name, report.redriven[1])).data == _DEEP[what]
