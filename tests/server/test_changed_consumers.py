"""Jobs that another tool's change of consumers makes indistinguishable from dead ones are uncertain and left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    WorkQueue,
    find_dead_letters,
    redrive_dead_letters,
)
from testbed.queues import CONSUMER, exhaust_deliveries, make_queue, probe, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection

OTHER = "other"


async def _two(connection: NatsPyConnection, name: str, own: Sequence[str], others: Sequence[str]) -> WorkQueue:
    """Provision a queue with two consumers, each with the jobs of some kinds."""
    consumers = [
        {
            "name": consumer,
            "max_deliver": 3,
            "ack_wait": "30s",
            "filter_subjects": [f"{name}.jobs.{kind}" for kind in kinds],
        }
        for consumer, kinds in ((CONSUMER, own), (OTHER, others))
    ]
    return await make_queue(connection, name, consumers=consumers)


async def _change(connection: NatsPyConnection, queue: str, consumer: str, kinds: Sequence[str], **fields: Any) -> None:
    """Update a consumer as other tools do."""
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{queue}.{consumer}"))["config"]
    without = {key: value for key, value in config.items() if not key.startswith("filter_subject")}
    filters = {"filter_subjects": [f"{queue}.jobs.{kind}" for kind in kinds]}
    request = {"stream_name": queue, "config": without | filters | fields, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{queue}.{consumer}", request)


async def _work(connection: NatsPyConnection, queue: WorkQueue, kind: str, count: int, consumer: str) -> None:
    await publish_jobs(connection, queue, [b"done"] * count, kind=kind)
    for message in await pull_jobs(connection, queue, count, consumer=consumer):
        await message.ack_sync()


async def _untouched(connection: NatsPyConnection, queue: WorkQueue, uncertain: int, held: Sequence[Msg]) -> None:
    """Check that no letter is found or redriven, and that the workers complete what they have."""
    findings = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in findings.letters], findings.uncertain) == ([], uncertain)
    assert "changed-consumer" in [risk.name for risk in findings.risks]
    for request in (
        RedriveRequest(),
        RedriveRequest(max_redrives=0),
        RedriveRequest(protocol=Protocol.COPY, waves=(1, "rest")),
    ):
        report = await redrive_dead_letters(connection, queue, request)
        assert (dict(report.redriven), list(report.parked)) == ({}, [])
    for message in held:
        await message.ack_sync()
    info = await connection.api(f"STREAM.INFO.{queue.name}")
    assert info["state"]["messages"] == uncertain - len(held)


@pytest.mark.slow
async def test_a_subject_moved_to_a_consumer_that_was_delivered_further(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "ac", "b")
    await publish_jobs(connection, queue, "1234", kind="a")
    await _work(connection, queue, "b", 1, OTHER)
    held = await pull_jobs(connection, queue, 2)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    await _untouched(connection, queue, 4, held)


@pytest.mark.slow
async def test_a_subject_moved_from_a_consumer_that_was_deleted_to_a_busy_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await _work(connection, queue, "b", 20, OTHER)
    await publish_jobs(connection, queue, "12", kind="a")
    await pull_jobs(connection, queue, 1)
    await _work(connection, queue, "b", 1, OTHER)
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await _change(connection, name, OTHER, "ab")
    await _untouched(connection, queue, 2, [])


@pytest.mark.slow
async def test_a_subject_moved_away_and_back(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "ac", "b")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    await publish_jobs(connection, queue, "12", kind="a")
    held = await pull_jobs(connection, queue, 1, consumer=OTHER)
    await _work(connection, queue, "c", 1, CONSUMER)
    await _change(connection, name, OTHER, "b")
    await _change(connection, name, CONSUMER, "ac")
    await _untouched(connection, queue, 2, held)


@pytest.mark.slow
async def test_a_filter_that_was_widened(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    await _untouched(connection, queue, 2, [])


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_consumer_that_was_reset_past_its_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "123", kind="a")
    held = await pull_jobs(connection, queue, 2)
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 4})
    await _untouched(connection, queue, 3, held)


@pytest.mark.slow
async def test_two_consumers_that_exchanged_their_subjects(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    for kind in "aab":
        await publish_jobs(connection, queue, [kind], kind=kind)
    held = await pull_jobs(connection, queue, 2)
    for message in await pull_jobs(connection, queue, 1, consumer=OTHER):
        await message.ack_sync()
    await _change(connection, name, OTHER, "x")
    await _change(connection, name, CONSUMER, "b")
    await _change(connection, name, OTHER, "a")
    await _untouched(connection, queue, 2, held)


@pytest.mark.slow
async def test_an_entry_of_the_consumer_before_proves_nothing_about_a_delivery_of_this_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await exhaust_deliveries(connection, queue, 2)
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    held = await pull_jobs(connection, queue, 2, consumer=OTHER)
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 2)
    assert dict((await redrive_dead_letters(connection, queue)).redriven) == {}
    for message in held:
        await message.ack_sync()
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_letters_with_entries_come_back_through_the_consumer_that_has_passed_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await exhaust_deliveries(connection, queue, 2)
    await _work(connection, queue, "b", 1, OTHER)
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await _change(connection, name, OTHER, "ab")
    report = await redrive_dead_letters(connection, queue)
    report.raise_for_failures()
    assert list(report.redriven) == [1, 2]
    assert [m.data for m in await pull_jobs(connection, queue, 2, consumer=OTHER)] == [b"1", b"2"]


@pytest.mark.slow
async def test_a_person_redrives_them_by_their_sequences(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({2}))))
    report.raise_for_failures()
    assert list(report.redriven) == [2]
    assert (await find_dead_letters(connection, queue)).uncertain == 1
    assert [m.data for m in await pull_jobs(connection, queue, 1)] == [b"2"]


async def test_provisioning_what_another_tool_has_made_counts_from_then_on(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    queue = await _two(connection, name, "ac", "b")
    await publish_jobs(connection, queue, "3", kind="c")
    await _lose_deaths(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"3"], 2)


async def _lose_deaths(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Have jobs die whose advisories nothing stores."""
    letters = f"{queue.name}-dead"
    config = (await connection.api(f"STREAM.INFO.{letters}"))["config"]
    await connection.api(f"STREAM.UPDATE.{letters}", config | {"subjects": [f"dead.{queue.name}.>"]})
    for _ in range(3):
        for message in await pull_jobs(connection, queue, count):
            await message.nak()
    await probe(connection, queue)
    await connection.api(f"STREAM.UPDATE.{letters}", config)


CHANGES: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "ack_wait": {"ack_wait": 20_000_000_000},
    "max_deliver": {"max_deliver": 9},
    "max_ack_pending": {"max_ack_pending": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_deaths_that_nothing_stored_are_found_while_no_filter_was_changed(
    connection: NatsPyConnection, name: str, change: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await _work(connection, queue, "b", 3, OTHER)
    await publish_jobs(connection, queue, "12", kind="a")
    await _lose_deaths(connection, queue, 2)
    if CHANGES[change]:
        await _change(connection, name, CONSUMER, "a", **CHANGES[change])
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"1", b"2"], 0)


@pytest.mark.slow
async def test_they_are_found_after_provisioning_has_widened_a_filter(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await _lose_deaths(connection, queue, 2)
    queue = await _two(connection, name, "ac", "b")
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"1", b"2"], 0)
