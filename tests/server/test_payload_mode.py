"""The mode payload of the message trigger: an event for each message, which is acknowledged once Airflow has stored it.

The triggers run in Airflow's own manager of shared streams, without a database.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import get_message
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.triggers import message_producer
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
from testbed.dead_letters import dead_letter_records
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

pytest.importorskip("airflow.triggers.shared_stream", reason="the mode payload needs Airflow 3.3")

from stream_watchers import StreamWatchers, connect_airflow_to, is_empty, payload_trigger

PATIENT = {"ack_wait": "30s", "max_deliver": 5}


@pytest.fixture(autouse=True)
def nats_connection(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_airflow_to(nats, monkeypatch)
    monkeypatch.setattr(message_producer, "HOLD", 0.2)


async def in_flight(connection: NatsPyConnection, queue: WorkQueue) -> int:
    return int((await consumer_info(connection, queue.name, CONSUMER))["num_ack_pending"])


async def test_a_message_is_acknowledged_after_its_event_is_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    (sequence,) = await publish_jobs(connection, queue, ["größe"], headers={"Job-Id": "j", "Tag": "a"})
    async with StreamWatchers(payload_trigger(queue)) as watchers:
        watchers.stores = False
        await eventually(lambda: watchers.fired)
        await asyncio.sleep(0.5)
        assert await in_flight(connection, queue) == 1
        watchers.stores = True
        await eventually(lambda: is_empty(connection, queue))
        ((_, event),) = watchers.stored
    stored_at = event.pop("stored_at")
    assert stored_at.endswith("+00:00")
    assert event == {
        "stream": name,
        "sequence": sequence,
        "consumer": CONSUMER,
        "attempt": 1,
        "subject": f"{name}.jobs.plain",
        "job_id": "j",
        "size": 7 + len("Job-IdjTaga"),
        "headers": {"Job-Id": "j", "Tag": "a"},
        "encoding": "utf-8",
        "body": "größe",
    }


@pytest.mark.slow
async def test_watchers_of_one_consumer_share_one_pull_and_each_gets_every_message(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    text, parsed = payload_trigger(queue), payload_trigger(queue, body="json")
    assert text.shared_stream_key() == parsed.shared_stream_key()
    async with StreamWatchers(text, parsed) as watchers:
        await eventually(lambda: _pulls(connection, queue, 1))
        await publish_jobs(connection, queue, [json.dumps({"n": number}) for number in range(50)])
        await eventually(lambda: len(watchers.stored) == 100)
        assert await _pulls(connection, queue, 1)
        await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences(0)) == sorted(watchers.sequences(1)) == list(range(1, 51))
    assert {payload["encoding"] for number, payload in watchers.stored if number} == {"json"}


@pytest.mark.slow
async def test_full_batches_follow_each_other_without_a_pause(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends a request that names bytes by a status, "Batch Completed", once all its messages came."""
    queue = await make_queue(connection, name, consumer=PATIENT | {"max_ack_pending": 500})
    await publish_jobs(connection, queue, [str(number) for number in range(400)])
    with caplog.at_level(logging.WARNING):
        async with StreamWatchers(payload_trigger(queue, batch_size=5)) as watchers:
            await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences()) == list(range(1, 401))
    assert "are pulled, trying again" not in caplog.text


async def _pulls(connection: NatsPyConnection, queue: WorkQueue, count: int) -> bool:
    return bool((await consumer_info(connection, queue.name, CONSUMER))["num_waiting"] == count)


@pytest.mark.parametrize(
    "other", [{"batch_size": 7}, {"max_wait": 3}, {"max_size": "1KB"}, {"nats_conn_id": "other"}, {"consumer": "b"}]
)
async def test_all_that_the_pull_uses_is_in_its_key(other: dict[str, Any]) -> None:
    queue = {"name": "q", "subjects": ["q.>"], "consumers": [_consumer("a"), _consumer("b")]}
    arguments: dict[str, Any] = {"work_queue": queue, "consumer": "a", "mode": "payload"}
    first = JetStreamMessageTrigger(**arguments)
    assert first.shared_stream_key() == JetStreamMessageTrigger(**arguments).shared_stream_key()
    assert first.shared_stream_key() != JetStreamMessageTrigger(**arguments | other).shared_stream_key()
    changed = queue | {"dead_letters": "other-letters"}
    assert (
        first.shared_stream_key() != JetStreamMessageTrigger(**arguments | {"work_queue": changed}).shared_stream_key()
    )


def _consumer(name: str) -> dict[str, Any]:
    return {"name": name, "filter_subject": f"q.{name}", "max_deliver": 3}


@pytest.mark.slow
async def test_a_message_is_in_progress_while_airflow_is_slow(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s", "max_deliver": 5}, jobs=["a"])
    async with StreamWatchers(payload_trigger(queue)) as watchers:
        watchers.stores = False
        await eventually(lambda: watchers.fired)
        await asyncio.sleep(2.5)
        assert (await consumer_info(connection, name, CONSUMER))["num_redelivered"] == 0
        watchers.stores = True
        await eventually(lambda: is_empty(connection, queue))
    assert watchers.sequences() == [1]


async def test_a_message_that_is_delivered_again_meanwhile_has_one_event(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a triggerer's event loop was blocked for longer than the ack wait."""
    monkeypatch.setattr(message_producer, "_SIGNALS_PER_ACK_WAIT", 0.01)
    queue = await make_queue(connection, name, consumer={"ack_wait": "500ms", "max_deliver": 20}, jobs=["a", "b"])
    async with StreamWatchers(payload_trigger(queue)) as watchers:
        watchers.stores = False

        async def redelivered() -> bool:
            return bool((await consumer_info(connection, name, CONSUMER))["num_redelivered"] == 2)

        await eventually(redelivered)
        assert len(watchers.fired) == 2
        watchers.stores = True
        await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences()) == [1, 2]


@pytest.mark.slow
async def test_an_event_that_is_not_stored_in_time_is_repeated_after_the_backoff(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 5, "backoff": ["1s", "2s"], "ack_wait": "1s"})
    await publish_jobs(connection, queue, ["a"])
    trigger = payload_trigger(queue)
    async with StreamWatchers(trigger, ack_timeout=1) as watchers:
        watchers.stores = False
        await eventually(lambda: watchers.errors)
        assert "did not finish processing" in str(watchers.errors[0])
        watchers.fired.clear()
        watchers.stores = True
        watchers.start(1, trigger)
        await eventually(lambda: is_empty(connection, queue))
    ((number, event),) = watchers.stored
    assert (number, event["attempt"]) == (1, 2)


async def test_the_last_failure_is_a_dead_letter_with_its_reason(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 1, "ack_wait": "5s"}, jobs=["a"])
    async with StreamWatchers(payload_trigger(queue), ack_timeout=0.5) as watchers:
        watchers.stores = False
        ((death, job),) = await eventually(lambda: dead_letter_records(connection, queue))
    assert "watchers didn't get its event stored in time" in str(death.error_message)
    assert job.data == b"a"


@pytest.mark.slow
async def test_a_watcher_that_ends_hands_its_messages_back(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An event may be stored for nobody: Airflow confirms those of a trigger that it has just deleted."""
    queue = await make_queue(connection, name, consumer=PATIENT, jobs=["a", "b"])
    trigger = payload_trigger(queue)
    async with StreamWatchers(trigger) as watchers:
        taken_messages_hold(60)
        await eventually(lambda: len(watchers.stored) == 2)
        await watchers.stop(0)
        taken_messages_hold(0.2)
        assert await stored_count(connection, name) == 2
        assert caplog.text.count("handed back") == caplog.text.count(f"2 messages of {name}/{CONSUMER}") == 1
        watchers.start(1, trigger)
        await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences(1)) == [1, 2]


def taken_messages_hold(seconds: float) -> None:
    message_producer.HOLD = seconds  # type: ignore[misc]


LEVELS = 1_000
HOSTILE: dict[str, bytes] = {
    "invalid UTF-8": bytes(range(256)),
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": 1e999}',
    "levels": b"[" * LEVELS + b"]" * LEVELS,
    "many levels": b"[" * 200_000,
    "empty": b"",
    "NUL": b'"\\u0000"',
    "raw NUL": b"\0",
    "half a pair": b'"\\ud800"',
    "digits": b"9" * 5_000,
    "wide number": b"18446744073709551616",
}
BENIGN: dict[str, bytes] = {
    "Airflow's own form": b'{"__type": "datetime", "__var": 0, "__classname__": "x"}',
    "text": '"größe"'.encode(),
}


@pytest.mark.slow
async def test_hostile_messages_are_passed_on_as_text(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    bodies = HOSTILE | BENIGN
    await publish_jobs(connection, queue, bodies.values())
    async with StreamWatchers(payload_trigger(queue, max_size="1MB")) as watchers:
        await eventually(lambda: is_empty(connection, queue))
    events = sorted((event for _, event in watchers.stored), key=lambda event: event["sequence"])
    passed = [b64decode(event["body"]) if event["encoding"] == "base64" else event["body"].encode() for event in events]
    assert passed == list(bodies.values())
    assert not watchers.errors


async def test_what_is_no_json_is_a_dead_letter_where_json_is_expected(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    bodies = HOSTILE | BENIGN
    sequences = dict(zip(bodies, await publish_jobs(connection, queue, bodies.values()), strict=True))
    async with StreamWatchers(payload_trigger(queue, max_size="1MB", body="json")) as watchers:
        await eventually(lambda: is_empty(connection, queue))
    assert sorted(watchers.sequences()) == [sequences[name] for name in BENIGN]
    assert not watchers.errors
    records = {death.sequence: (death, job) for death, job in await dead_letter_records(connection, queue)}
    assert {name: records[sequences[name]][1].data for name in HOSTILE} == HOSTILE
    reasons = {name: str(records[sequences[name]][0].explanation) for name in HOSTILE}
    assert "NaN is no JSON" in reasons["NaN"]
    assert "32 levels" in reasons["levels"]
    assert all(reason.startswith("expected ") for reason in reasons.values()), reasons


async def test_a_large_message_is_named_by_its_copy_in_the_archive(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT)
    body = b"x" * (900 << 10)
    await publish_jobs(connection, queue, ["small"])
    await publish_jobs(connection, queue, [body], headers={"Tag": "large"})
    await publish_jobs(connection, queue, ["bomb"], headers={f"H{number}": "v" * 1_000 for number in range(60)})
    async with StreamWatchers(payload_trigger(queue, max_size="32KB")) as watchers:
        await eventually(lambda: is_empty(connection, queue))
    by_sequence = {event["sequence"]: event for _, event in watchers.stored}
    assert [by_sequence[number]["encoding"] for number in (1, 2, 3)] == ["utf-8", "stored", "stored"]
    assert max(len(json.dumps(event)) for event in by_sequence.values()) < 1_000
    for number, expected in ((2, body), (3, b"bomb")):
        stored = by_sequence[number]["stored"]
        copy = await get_message(connection, stored["stream"], stored["sequence"])
        assert copy is not None
        assert copy.data == expected


async def test_a_large_message_without_a_copy_is_a_dead_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT, archive=False)
    body = b"x" * (900 << 10)
    await publish_jobs(connection, queue, [body, b"small"])
    async with StreamWatchers(payload_trigger(queue)) as watchers:
        await eventually(lambda: is_empty(connection, queue))
    assert watchers.sequences() == [2]
    ((death, job),) = await dead_letter_records(connection, queue)
    assert job.data == body
    assert "raise max_size, or declare an archive" in str(death.explanation)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [-1, 1_024, 5_000])
async def test_a_consumer_that_could_overflow_a_watcher_is_refused_until_it_is_corrected(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture, in_flight: int
) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT | {"max_ack_pending": in_flight}, jobs=["a"])
    with caplog.at_level(logging.WARNING):
        async with StreamWatchers(payload_trigger(queue)) as watchers:
            refusal = "max_ack_pending below 1024, which is Airflow's [triggerer] shared_stream_subscriber_queue_size"
            await eventually(lambda: refusal in caplog.text)
            assert not watchers.stored
            config = (await consumer_info(connection, name, CONSUMER))["config"] | {"max_ack_pending": 1_000}
            await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
            await eventually(lambda: is_empty(connection, queue))
    assert watchers.sequences() == [1]


def test_an_older_airflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.triggers.base import BaseEventTrigger

    monkeypatch.delattr(BaseEventTrigger, "create_shared_stream_producer")
    queue = {"name": "q", "subjects": ["q.>"], "consumers": [_consumer("a")]}
    with pytest.raises(ArgumentError, match=r"expected Airflow 3\.3 or newer for mode='payload'.* use mode='doorbell'"):
        JetStreamMessageTrigger(work_queue=queue, consumer="a", mode="payload")
    assert JetStreamMessageTrigger(work_queue=queue, consumer="a").mode == "doorbell"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"max_wait": 0}, "max_wait"),
        ({"max_wait": "1h"}, "max_wait"),
        ({"max_size": -1}, "max_size"),
        ({"max_size": "large"}, "max_size"),
        ({"body": "yaml"}, "body"),
        ({"bodi": "json"}, "bodi"),
    ],
)
def test_options_are_checked_when_the_dag_is_parsed(options: dict[str, Any], problem: str) -> None:
    queue = {"name": "q", "subjects": ["q.>"], "consumers": [_consumer("a")]}
    with pytest.raises(ArgumentError, match=problem):
        JetStreamMessageTrigger(work_queue=queue, consumer="a", mode="payload", **options)


async def test_a_trigger_that_runs_alone_is_refused() -> None:
    queue = {"name": "q", "subjects": ["q.>"], "consumers": [_consumer("a")]}
    trigger = JetStreamMessageTrigger(work_queue=queue, consumer="a", mode="payload")
    with pytest.raises(ArgumentError, match=r"dag\.test\(\)"):
        await anext(trigger.run())
