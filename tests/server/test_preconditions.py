"""The preconditions of every scan, wait and redrive: what is refused, what is restricted, and the risks."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    find_dead_letters,
    preview,
    redrive_dead_letters,
    take_cursor,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, UnsuitableQueueError
from testbed.dead_letters import change_stream
from testbed.face import consumer_info, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


async def make_unsuitable_queue(connection: NatsPyConnection, name: str, retention: str) -> WorkQueue:
    """Declare a queue whose stream somebody has made with another retention."""
    queue = await make_queue(connection, name)
    await connection.api(f"STREAM.DELETE.{name}")
    config = {"name": name, "subjects": list(queue.subjects), "retention": retention}
    await connection.api(f"STREAM.CREATE.{name}", config)
    consumer = {"durable_name": CONSUMER, "ack_policy": "explicit", "max_deliver": 1, "ack_wait": 500_000_000}
    await connection.api(
        f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": consumer | {"name": CONSUMER}}
    )
    return queue


@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_a_stream_that_keeps_acknowledged_jobs_is_neither_scanned_nor_awaited_nor_redriven(
    connection: NatsPyConnection, name: str, retention: str
) -> None:
    queue = await make_unsuitable_queue(connection, name, retention)
    await publish_jobs(connection, queue, "abcdefghij")
    for message in await pull_jobs(connection, queue, 10):
        await message.ack_sync()
    # In the audit, the redrive stores that it takes the lease.
    unchanged = {name, *queue.companion_names()} - {f"{name}-audit"}
    before = [await stored_count(connection, stream) for stream in unchanged]
    expected = f"^{name} can't be used as a work queue: expected workqueue retention of {name}, found {retention}: "
    for use in (find_dead_letters, summarise_dead_letters, take_cursor, redrive_dead_letters):
        with pytest.raises(UnsuitableQueueError, match=expected):
            await use(connection, queue)
    with pytest.raises(UnsuitableQueueError, match=expected):
        await preview(connection, queue, RedriveRequest())
    assert [await stored_count(connection, stream) for stream in unchanged] == before


async def test_a_stream_of_events_that_drops_what_it_acknowledges_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    config = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    await connection.api(f"STREAM.DELETE.{name}-events")
    await connection.api(f"STREAM.CREATE.{name}-events", config | {"retention": "interest"})
    expected = f"expected limits retention of {name}-events, found interest: "
    for use in (find_dead_letters, take_cursor, redrive_dead_letters):
        with pytest.raises(UnsuitableQueueError, match=expected):
            await use(connection, queue)


@pytest.mark.slow
async def test_the_open_deliveries_of_a_paused_consumer_count_as_uncertain(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "200ms"}, jobs="abcdefghij")
    for _ in range(2):
        assert len(await pull_jobs(connection, queue, 10)) == 10
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": until})
    await asyncio.sleep(0.3)
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.uncertain) == (0, 10)
    (risk,) = (risk for risk in summary.risks if risk.name == "stalled-consumer")
    assert f"consumer worker of {name} is paused until " in risk
    assert "10 open deliveries" in risk
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {})
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.uncertain) == (10, 0)
    assert "stalled-consumer" not in {risk.name for risk in summary.risks}


@pytest.mark.since_server("2.11", "pauses of consumers")
async def test_the_open_deliveries_of_a_consumer_that_is_paused_for_a_moment_are_not_uncertain(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s"}, jobs="abc")
    until = (datetime.now(UTC) + timedelta(seconds=40)).isoformat()
    for _ in range(2):
        for message in await pull_jobs(connection, queue, 3):
            await message.nak()
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {"pause_until": until})
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.uncertain) == (0, 0)
    (risk,) = (risk for risk in summary.risks if risk.name == "briefly-paused-consumer")
    assert re.search(rf"consumer worker of {name} is paused for \d\d s more, as by .* its 3 open", risk)
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", {})
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.uncertain, [risk.name for risk in summary.risks]) == (3, 0, [])


@pytest.mark.since_server("2.14", "requeueing in place")
async def test_a_scan_beside_a_redrive_in_place_that_waits_for_a_worker_finds_nothing_uncertain(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1, "ack_wait": "2s"}, dead="a")
    await publish_jobs(connection, queue, ["running"])
    (running,) = await pull_jobs(connection, queue, 1)
    redrive = asyncio.create_task(redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE)))

    async def is_paused() -> bool:
        await running.in_progress()
        return bool((await consumer_info(connection, name, CONSUMER)).get("paused"))

    await eventually(is_paused)
    found = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([1], 0)
    assert "briefly-paused-consumer" in [risk.name for risk in found.risks]
    await running.ack_sync()
    assert list((await redrive).redriven) == [1]


@pytest.mark.slow
async def test_the_open_deliveries_of_a_push_consumer_without_a_subscriber_count_as_uncertain(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    config = {"durable_name": CONSUMER, "ack_policy": "explicit", "max_deliver": 2, "ack_wait": 200_000_000}
    config |= {"name": CONSUMER, "deliver_subject": f"{name}.push"}
    received: list[bytes] = []

    async def receive(message: Any) -> None:
        received.append(message.data)

    subscription = await connection.client.subscribe(f"{name}.push", cb=receive)
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
    await publish_jobs(connection, queue, "abc")
    await eventually(lambda: len(received) == 6)
    await subscription.unsubscribe()
    await asyncio.sleep(0.4)
    findings = await find_dead_letters(connection, queue)
    assert len(findings.letters) + findings.uncertain == 3
    assert findings.uncertain == 0 or f"delivers to {name}.push, to which nobody subscribes" in "".join(findings.risks)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"retention": "interest"}, ["dead-letter-interest"]),
        ({"max_msgs_per_subject": 1}, ["dead-letter-limit-per-subject"]),
        ({"discard": "old", "max_msgs": 100}, ["dead-letter-eviction"]),
        ({"discard": "old", "max_bytes": 100_000}, ["dead-letter-eviction"]),
        ({"max_age": 86_400_000_000_000}, ["dead-letter-age"]),
        ({}, []),
    ],
)
async def test_a_dead_letter_queue_that_drops_entries_is_warned_of_with_figures(
    connection: NatsPyConnection, name: str, limits: dict[str, Any], expected: list[str]
) -> None:
    queue = await make_queue(connection, name)
    config = (await connection.api(f"STREAM.INFO.{name}-dead"))["config"]
    await connection.api(f"STREAM.DELETE.{name}-dead")
    await connection.api(f"STREAM.CREATE.{name}-dead", config | limits)
    risks = (await find_dead_letters(connection, queue)).risks
    assert [risk.name for risk in risks if risk.name.startswith("dead-letter-")] == expected


@pytest.mark.slow
async def test_nothing_is_parked_where_it_would_not_be_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    config = (await connection.api(f"STREAM.INFO.{name}-dead"))["config"]
    await connection.api(f"STREAM.DELETE.{name}-dead")
    await connection.api(f"STREAM.CREATE.{name}-dead", config | {"retention": "interest"})
    await publish_jobs(connection, queue, "ab")
    for message in await pull_jobs(connection, queue, 2):
        await message.nak()

    async def are_found() -> bool:
        return len((await find_dead_letters(connection, queue)).letters) == 2

    await eventually(are_found)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    assert (len(report.parked), report.failures, await stored_count(connection, name)) == (0, 2, 2)
    assert report.failed[1].startswith(f"expected limits or workqueue retention of {name}-dead for a parked letter")
    assert len((await find_dead_letters(connection, queue)).letters) == 2


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"no_ack": True}, "acknowledges no message"),
        (
            {"subject_transform": {"src": "q.jobs.>", "dest": "q.jobs.moved.>"}},
            "expected a subject that q stores as it is",
        ),
    ],
)
async def test_copies_are_stored_only_where_they_arrive_as_they_are(
    connection: NatsPyConnection, name: str, change: dict[str, Any], expected: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    change = {
        key: {part: text.replace("q.", f"{name}.") for part, text in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in change.items()
    }
    await change_stream(connection, name, **change)
    request = RedriveRequest(protocol=Protocol.COPY)
    if "no_ack" in change:
        with pytest.raises(RedriveRequestError, match=expected):
            await redrive_dead_letters(connection, queue, request)
    else:
        report = await redrive_dead_letters(connection, queue, request)
        assert (report.failures, len(report.redriven)) == (2, 0)
        assert expected.replace(" q ", f" {name} ") in report.failed[1]
    assert await stored_count(connection, name) == 2
    assert (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))).redriven == {
        1: 1,
        2: 2,
    }
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_an_audit_that_drops_records_is_a_risk(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit={"name": f"{name}-audit", "max_msgs": 1000})
    found = await find_dead_letters(connection, queue)
    assert [finding.name for finding in found.risks] == ["audit-eviction"]
    assert str(found.risks[0]).startswith(
        f"{name}-audit drops its oldest records for new ones (max_msgs): what a redrive"
    )
