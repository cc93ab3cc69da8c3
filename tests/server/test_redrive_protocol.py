"""The choice of a redrive's protocol, and the requests that are refused before anything is done."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Repair,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import marker_subject
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.dead_letters import change_stream, letter_records, publish_raw, stored_message, stream_messages
from testbed.face import GUARANTEES, consumer_info
from testbed.queues import exhaust_deliveries, make_dead_letters, make_queue, process_all, publish_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_RESETS = pytest.mark.since_server("2.14", "the reset of a consumer")
FULL: dict[str, Any] = {"discard": "new", "max_msgs": 2}


async def assert_refused(
    connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest, expected: str
) -> None:
    before = [await stream_messages(connection, stream) for stream in (queue.name, f"{queue.name}-dead")]
    for work in (redrive_dead_letters, preview):
        with pytest.raises(RedriveRequestError, match=expected):
            await work(connection, queue, request)
    assert [await stream_messages(connection, stream) for stream in (queue.name, f"{queue.name}-dead")] == before
    assert await letter_records(connection, queue) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "requested", "protocol"),
    [
        ({}, {}, Protocol.COPY),
        ({}, {"protocol": Protocol.IN_PLACE}, Protocol.IN_PLACE),
        ({"atomic_redrive": True}, {}, Protocol.ATOMIC),
        ({"atomic_redrive": True}, {"protocol": Protocol.COPY}, Protocol.COPY),
        pytest.param(FULL, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "old", "max_msgs": 2}, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "new", "max_bytes": 200}, {}, Protocol.IN_PLACE, marks=_RESETS),
        pytest.param({"discard": "new", "max_msgs": 3}, {}, Protocol.IN_PLACE, marks=_RESETS),
        ({"discard": "new", "max_msgs": 4}, {}, Protocol.COPY),
        pytest.param({"discard": "new", "max_msgs": 7, "atomic_redrive": True}, {}, Protocol.IN_PLACE, marks=_RESETS),
        ({"discard": "new", "max_msgs": 8, "atomic_redrive": True}, {}, Protocol.ATOMIC),
    ],
)
async def test_the_queue_decides_how_letters_come_back(
    connection: NatsPyConnection, name: str, fields: dict[str, Any], requested: dict[str, Any], protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"}, **fields)
    await make_dead_letters(connection, queue, "ab")
    shown = await preview(connection, queue, RedriveRequest(**requested))
    assert (shown.protocol, shown.guarantee) == (protocol, GUARANTEES[protocol])
    report = await redrive_dead_letters(connection, queue, RedriveRequest(**requested))
    report.raise_for_failures()
    assert (report.protocol, report.guarantee) == (protocol, GUARANTEES[protocol])
    assert report.as_json()["protocol"] == protocol.value
    assert len(report.redriven) == 2
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
async def test_an_atomic_redrive_leaves_a_marker_that_is_no_job(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, atomic_redrive=True, consumer={"filter_subject": f"{name}.jobs.>"})
    await make_dead_letters(connection, queue, "ab")
    report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {1: 4, 2: 6}
    assert [message.subject for message in await stream_messages(connection, name, f"requeued.{name}.*")] == [
        marker_subject(name, 1),
        marker_subject(name, 2),
    ]
    copy = await stored_message(connection, name, 4)
    assert (copy.data, copy.header("Redrive-Sequence")) == (b"a", "1")
    assert await process_all(connection, queue) == {"a": 1, "b": 1}
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.undeliverable) == ((), 0)


@pytest.mark.slow
async def test_letters_that_cannot_be_stored_do_not_stop_the_others_of_their_batch(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(
        connection,
        name,
        atomic_redrive=True,
        max_msg_size=2_000,
        consumer={"filter_subject": f"{name}.jobs.>"},
        archive=None,
        allow_direct=False,
    )
    await publish_raw(nats, f"{name}.jobs.\udcff", b"A: 1", b"unknown subject")
    await publish_jobs(connection, queue, "abc")
    await exhaust_deliveries(connection, queue, 4)
    large = {b"b": Repair(body="x" * 3_000)}
    report = await redrive_dead_letters(
        connection, queue, RedriveRequest(transform=lambda letter: large.get(letter.body))
    )
    assert set(report.redriven) == {2, 4}
    assert report.failed == {
        1: f"expected the exact subject of job 1, found {name}.jobs.\ufffd: its bytes that aren't UTF-8 are shown by"
        " direct gets and by the archive only: set allow_direct on the queue (nats-server 2.11 or newer), give the"
        " redrive a subject, or redrive all letters in place; original kept",
        3: f"expected a copy of at most 2000 bytes (max_msg_size of {name}), found 3059 for job 3, 3000 of them its"
        " body: raise that limit, repair the body, or redrive all letters in place; original kept",
    }
    assert await process_all(connection, queue) == {"a": 1, "c": 1}
    report = await redrive_dead_letters(
        connection, queue, RedriveRequest(transform=lambda _: Repair(subject=f"{name}.jobs.plain"))
    )
    assert set(report.redriven) == {1, 3}
    assert await process_all(connection, queue) == {"unknown subject": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "protocol", "expected"),
    [
        (
            1,
            Protocol.ATOMIC,
            "expected a queue that allows atomic batches, found otherwise: the server is older than 2.12",
        ),
        (
            2,
            Protocol.IN_PLACE,
            "expected a server that can reset a consumer, found otherwise: the server is older than 2.14",
        ),
    ],
)
async def test_a_protocol_that_the_server_is_too_old_for_is_refused(
    connection: NatsPyConnection, name: str, level: int, protocol: Protocol, expected: str
) -> None:
    queue = await make_queue(connection, name, atomic_redrive=True, consumer={"filter_subject": f"{name}.jobs.>"})
    await make_dead_letters(connection, queue, "a")
    connection.api_level = level
    await assert_refused(connection, queue, RedriveRequest(protocol=protocol), expected)
    report = await redrive_dead_letters(connection, queue)
    assert report.protocol == (Protocol.ATOMIC if level >= 2 else Protocol.COPY)
    assert await process_all(connection, queue) == {"a": 1}


@pytest.mark.slow
@pytest.mark.since_server("2.12", "atomic batches")
async def test_a_full_queue_on_a_server_that_cannot_reset_keeps_its_letters_and_says_why(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **FULL)
    await make_dead_letters(connection, queue, "ab")
    connection.api_level = 2
    report = await redrive_dead_letters(connection, queue)
    assert (report.protocol, report.failures) == (Protocol.COPY, 2)
    assert report.failed[1] == f"{name} refused the copy of 1: maximum messages exceeded"


@pytest.mark.since_server("2.12", "atomic batches")
async def test_atomic_batches_have_to_be_allowed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"})
    await make_dead_letters(connection, queue, "a")
    atomic = RedriveRequest(protocol=Protocol.ATOMIC)
    expected = (
        f"^expected a queue that allows atomic batches, found otherwise: {name} doesn't allow atomic batches; provision"
    )
    await assert_refused(connection, queue, atomic, f"{expected} it with atomic_redrive$")
    await change_stream(connection, name, allow_atomic=True, allow_msg_ttl=True)
    expected = f"found otherwise: {name} doesn't capture requeued.{name}.*; provision it with atomic_redrive"
    await assert_refused(connection, queue, atomic, re.escape(expected))
    await change_stream(connection, name, subjects=[*queue.subjects, f"requeued.{name}.*"])
    assert (await preview(connection, queue, atomic)).protocol == Protocol.ATOMIC


@pytest.mark.since_server("2.12", "atomic batches")
async def test_a_consumer_whose_filter_matches_the_markers_excludes_batches(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "a")
    subjects = [*queue.subjects, f"requeued.{name}.*"]
    await change_stream(connection, name, allow_atomic=True, allow_msg_ttl=True, subjects=subjects)
    config = (await consumer_info(connection, name, "worker"))["config"] | {"filter_subject": ""}
    request = {"stream_name": name, "config": config, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.worker", request)
    expected = f"consumer worker of {name} would take the markers as jobs; give it a filter"
    await assert_refused(connection, queue, RedriveRequest(protocol=Protocol.ATOMIC), expected)


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_full_queue_that_discards_its_oldest_jobs_is_not_given_copies(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=3)
    await make_dead_letters(connection, queue, "ab")
    await publish_jobs(connection, queue, "c")
    expected = f"^expected room for copies, found otherwise: {name} has no room for copies .*discards its oldest jobs"
    await assert_refused(connection, queue, RedriveRequest(Selection(consumer="worker")), expected)
    await assert_refused(connection, queue, RedriveRequest(protocol=Protocol.COPY), expected)
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 1, 2: 2}
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.slow
async def test_letters_go_to_another_subject_of_their_queue(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(subject=f"{name}.jobs.slow"))
    assert report.redriven == {1: 3, 2: 4}
    assert {message.subject for message in await stream_messages(connection, name)} == {f"{name}.jobs.slow"}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Protocol.AUTO, Protocol.COPY])
async def test_a_subject_without_a_consumer_is_refused(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    consumers = [{"name": "worker", "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.plain"}]
    queue = await make_queue(connection, name, consumers=consumers)
    await make_dead_letters(connection, queue, "a")
    expected = (
        f"^expected a subject of {name} \\({name}.jobs.>\\), found elsewhere.a: a dead letter comes back as a job of"
    )
    await assert_refused(connection, queue, RedriveRequest(subject="elsewhere.a", protocol=protocol), expected)
    expected = (
        f"^expected a subject that a consumer of {name} takes, found {name}.jobs.b: no worker would get the jobs$"
    )
    await assert_refused(connection, queue, RedriveRequest(subject=f"{name}.jobs.b", protocol=protocol), expected)
