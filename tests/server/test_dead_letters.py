from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import DeadLetter, Findings, Reason, Status, find_dead_letters, get_message
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from testbed.face import BodySource, consumer_info, stream_info
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
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


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


async def wait_for_entries(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    async def there() -> bool:
        await probe(connection, queue)
        return await stored_count(connection, f"{queue.name}-dead") == count

    await eventually(there)


async def test_a_dead_letter_is_found_with_its_message_and_death(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    await publish_jobs(connection, queue, ["good"])
    await process_all(connection, queue)
    sequences = await make_dead_letters(
        connection, queue, ["größe"], kind="a", headers={"Job-Id": "order-7", "Customer": "Ünal"}
    )
    letter = await one_letter(connection, queue)
    death = letter.death
    assert (death.stream, [death.sequence], death.consumer) == (name, sequences, "worker")
    assert (death.deliveries, death.reason, death.explanation) == (2, Reason.MAX_DELIVERIES, None)
    assert death.created == (await stream_info(connection, name))["created"]
    assert (letter.subject, letter.body, letter.source) == (f"{name}.jobs.a", "größe".encode(), BodySource.QUEUE)
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
    queue = await make_queue(connection, name, consumer={"max_deliver": 1} | consumer)
    await make_dead_letters(connection, queue, ["a"])
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


async def test_letters_come_in_the_order_of_their_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await publish_jobs(connection, queue, "abc")
    for count, message in enumerate(reversed(await pull_jobs(connection, queue, 3)), 1):
        await message.nak()
        await wait_for_entries(connection, queue, count)
    assert (await find(connection, queue)) == ([1, 2, 3], {})


async def test_repeated_advisories_are_one_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await repeat_advisories(connection, queue)
    assert await stored_count(connection, f"{name}-dead") == 4
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.entries for letter in letters] == [(1, 3), (2, 4)]


async def test_entries_of_an_earlier_stream_never_count_for_a_job_of_the_same_sequence(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    assert await publish_jobs(connection, queue, ["new"]) == [1]
    assert await find(connection, queue) == ([], {1: Status.STALE, 2: Status.STALE})
    # A death of the new job counts, and its letter includes the stale entry of the same sequence.
    await exhaust_deliveries(connection, queue, 1)
    letter = await one_letter(connection, queue)
    assert (letter.body, letter.entries, letter.death.reason) == (b"new", (1, 3), Reason.MAX_DELIVERIES)


async def test_entries_of_a_recreated_consumer_are_stale(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"])
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
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abc")
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
