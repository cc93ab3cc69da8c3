from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.dead_letters import (
    DeadLetter,
    Findings,
    Verdict,
    find_dead_letters,
    read_entries,
    require_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.names import MAX_DELIVERIES, late_ack_subject
from airflow_provider_jetstream.jetstream.redrive import redrive
from airflow_provider_jetstream.jetstream.stored import get_message, stream_info
from testbed.queues import drain, eventually, let_die, make_queue, pump, put, small_queue, stored_count, take, use_up

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import WorkQueue


async def find(connection: Connection, queue: WorkQueue) -> tuple[list[int], dict[int, Verdict]]:
    findings = await find_dead_letters(connection, queue)
    return shown(findings)


def shown(findings: Findings) -> tuple[list[int], dict[int, Verdict]]:
    dismissed = {entry.sequence: verdict for entry, verdict in findings.dismissed}
    assert len(dismissed) == len(findings.dismissed)
    return [letter.entry.sequence for letter in findings.letters], dismissed


async def one_letter(connection: Connection, queue: WorkQueue) -> DeadLetter:
    (letter,) = (await find_dead_letters(connection, queue)).letters
    return letter


async def repeat_advisories(connection: Connection, queue: WorkQueue) -> None:
    """Say again what the dead letter queue holds, as a server does after a crash."""
    letters = require_dead_letters(queue).name
    for sequence in range(1, (await stream_info(connection, letters))["state"]["last_seq"] + 1):
        message = await get_message(connection, letters, sequence)
        assert message is not None
        await connection.client.jetstream().publish(message.subject, message.data)


async def wait_for_entries(connection: Connection, queue: WorkQueue, count: int) -> None:
    async def there() -> bool:
        await pump(connection, queue)
        return await stored_count(connection, require_dead_letters(queue).name) == count

    await eventually(there)


async def test_a_dead_letter_is_found_with_its_message_and_death(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    await put(connection, queue, ["good"])
    await drain(connection, queue)
    sequences = await let_die(connection, queue, ["größe"], kind="a", headers={"Job-Id": "order-7", "Customer": "Ünal"})
    letter = await one_letter(connection, queue)
    assert (letter.entry.stream, letter.entry.sequence, letter.entry.consumer) == (name, *sequences, "worker")
    assert (letter.entry.deliveries, letter.entry.reason, letter.entry.entry_sequences) == (2, None, (1,))
    assert (letter.message.subject, letter.message.data) == (f"{name}.jobs.a", "größe".encode())
    assert dict(letter.message.headers) == {"Job-Id": "order-7", "Customer": "Ünal"}
    assert (letter.job_id, letter.redrives) == ("order-7", 0)
    assert letter.stream_created == (await stream_info(connection, name))["created"]
    assert letter.message.stored_at < letter.entry.died_at


@pytest.mark.parametrize(
    ("consumer", "patience"),
    [({"ack_wait": "700ms"}, 0.7), ({"ack_wait": None, "backoff": ["500ms", "3s"], "max_deliver": 2}, 3.0)],
)
async def test_a_letter_is_ready_when_its_worker_has_lost_the_job_for_sure(
    connection: Connection, name: str, consumer: dict[str, object], patience: float
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1} | consumer)
    await let_die(connection, queue, ["a"])
    letter = await one_letter(connection, queue)
    assert letter.ready_at - letter.entry.died_at == timedelta(seconds=patience)


@pytest.mark.parametrize(("count", "redrives"), [("3", 3), ("many", 0), ("-1", 0)])
async def test_the_count_of_redrives_is_read_from_the_job_and_nonsense_counts_as_none(
    connection: Connection, name: str, count: str, redrives: int
) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, ["a"], headers={"Redrive-Count": count})
    letter = await one_letter(connection, queue)
    assert (letter.redrives, letter.job_id) == (redrives, "1")


async def test_letters_come_in_the_order_of_their_deaths(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await put(connection, queue, "abc")
    for count, message in enumerate(reversed(await take(connection, queue, 3)), 1):
        await message.nak()
        await wait_for_entries(connection, queue, count)
    assert (await find(connection, queue)) == ([3, 2, 1], {})


async def test_repeated_advisories_are_one_letter(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, "ab")
    await repeat_advisories(connection, queue)
    assert await stored_count(connection, f"{name}-dead") == 4
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.entry.entry_sequences for letter in letters] == [(1, 3), (2, 4)]


async def test_a_job_that_a_slow_worker_finished_late_is_gone(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, "ab")
    await connection.request(late_ack_subject(name, "worker", 1), b"+ACK")
    assert await find(connection, queue) == ([2], {1: Verdict.GONE})


async def test_a_terminated_job_is_gone_and_its_reason_is_kept(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await put(connection, queue, ["a"])
    (message,) = await take(connection, queue, 1)
    await connection.request(message.reply, b"+TERM no such printer")
    await wait_for_entries(connection, queue, 1)
    ((entry, verdict),) = (await find_dead_letters(connection, queue)).dismissed
    assert (entry.reason, entry.deliveries, verdict) == ("no such printer", 1, Verdict.GONE)


async def test_a_job_deleted_in_flight_is_no_entry(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await put(connection, queue, ["a"])
    await take(connection, queue, 1)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    await wait_for_entries(connection, queue, 1)
    assert await read_entries(connection, queue) == []


async def test_entries_of_an_earlier_stream_never_hit_a_job_of_the_same_sequence(
    connection: Connection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, "ab")
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    assert await put(connection, queue, ["new"]) == [1]
    assert await find(connection, queue) == ([], {1: Verdict.STALE, 2: Verdict.STALE})
    # A death of the new job counts, and takes the stale entry of its sequence along.
    await use_up(connection, queue, 1)
    letter = await one_letter(connection, queue)
    assert (letter.message.data, letter.entry.entry_sequences) == (b"new", (1, 3))


async def test_entries_of_a_recreated_or_deleted_consumer_are_stale(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, ["a"])
    await connection.api(f"CONSUMER.DELETE.{name}.worker")
    assert await find(connection, queue) == ([], {1: Verdict.STALE})
    await make_queue(connection, name)
    assert await find(connection, queue) == ([], {1: Verdict.STALE})
    # The new consumer delivers it again, and only that death counts.
    await use_up(connection, queue, 1)
    assert await find(connection, queue) == ([1], {})


async def test_a_letter_whose_consumer_will_deliver_it_again_is_alive(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    await let_die(connection, queue, "abc")
    # A crash of the server right after the deaths does the same.
    await connection.api(f"CONSUMER.RESET.{name}.worker", {"seq": 2})
    assert await find(connection, queue) == ([1], {2: Verdict.ALIVE, 3: Verdict.ALIVE})
    told = r"\(3: its consumer is about to deliver it again\)"
    with pytest.raises(DeadLetterGoneError, match=told):
        await redrive(connection, queue, sequences=[1, 3])
    assert (await redrive(connection, queue)).redriven == {1: 4}
    assert await drain(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_what_else_a_shared_dead_letter_queue_holds_is_left_alone(connection: Connection, name: str) -> None:
    shared = {"name": f"{name}-shared", "subjects": [f"{MAX_DELIVERIES}.{name}x.*", f"{MAX_DELIVERIES}.{name}.*"]}
    queue = await make_queue(connection, name, dead_letters=shared)
    other = await make_queue(connection, f"{name}x", dead_letters=shared)
    await let_die(connection, other, ["theirs", "theirs too"])
    await let_die(connection, queue, ["ours"])
    lies = f'{{"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": "{name}x"}}'
    for body in (b"not JSON", b"{}", lies.encode()):
        await connection.client.jetstream().publish(f"{MAX_DELIVERIES}.{name}.worker", body)
    letter = await one_letter(connection, queue)
    assert (letter.message.data, letter.entry.entry_sequences) == (b"ours", (3,))
    assert (await find(connection, other))[0] == [1, 2]


async def test_letters_behind_gaps_are_found_in_a_long_dead_letter_queue(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name)
    sequences = await let_die(connection, queue, map(str, range(300)))
    for sequence in (1, 2, 150, 300):
        await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": sequence})
    entries = [
        entry_sequence for entry in await read_entries(connection, queue) for entry_sequence in entry.entry_sequences
    ]
    assert entries == [sequence for sequence in sequences if sequence not in (1, 2, 150, 300)]


async def test_a_queue_without_dead_letters_is_told_what_to_declare(connection: Connection, name: str) -> None:
    queue = await make_queue(connection, name, dead_letters=None)
    with pytest.raises(
        QueueDeclarationError, match="expected dead_letters, so that there is something to look at: declare a dead"
    ):
        await find_dead_letters(connection, queue)


@pytest.mark.parametrize("missing", ["", "-dead"])
async def test_a_missing_stream_is_named(connection: Connection, name: str, missing: str) -> None:
    await make_queue(connection, name)
    await connection.api(f"STREAM.DELETE.{name}{missing}")
    with pytest.raises(NotFoundError, match=f"expected stream {name}{missing} on the server, found none: provision"):
        await find_dead_letters(connection, small_queue(name))
