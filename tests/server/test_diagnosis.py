"""What a diagnosis says about dead letters: causes, places, times, whether the cause is still there, and advice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Reason, Selection, diagnose_dead_letters
from airflow_provider_jetstream.worker import Worker
from testbed.dead_letters import publish_raw
from testbed.face import stream_info
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    publish_jobs,
    pull_jobs,
    running_worker,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


class _Payments:
    """A handler that fails for one kind of jobs until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False

    def handle(self, job: Delivery) -> None:
        if job.body == b"stray":
            raise LookupError("no such account")
        if job.body.startswith(b"card") and not self.is_mended:
            self.charge(job.body)

    def charge(self, body: bytes) -> None:
        raise ConnectionError(f"the card provider refused {body.decode()}")


@pytest.mark.slow
async def test_a_diagnosis_says_what_broke_where_and_whether_it_still_does(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "5s"})
    payments = _Payments()
    before = await stream_info(connection, f"{name}-dead")

    async def died() -> bool:
        return (await diagnose_dead_letters(connection, queue)).dead == 10

    async with running_worker(Worker(queue, "worker", payments.handle, settings)):
        await publish_jobs(connection, queue, [f"card {n}" for n in range(9)], headers={"Job-Release": "2026.47"})
        await publish_jobs(connection, queue, ["stray"], kind="other")
        await eventually(died, within=30)
        failing = await diagnose_dead_letters(connection, queue)
        group = failing.groups[0]
        assert (failing.dead, group.letters.count, group.share) == (10, 9, 0.9)
        assert (failing.action, group.recommendation.cause) == ("wait", "still failing")
        assert "one place: ConnectionError in test_diagnosis:_Payments.charge:" in failing.headline
        assert f"90%, began {group.letters.first:%Y-%m-%d %H:%M} UTC, still failing: don't redrive" in failing.headline
        assert failing.as_json()["text"] == failing.text == str(failing)
        assert "for example: the card provider refused card " in failing.text
        assert all(evidence in failing.text for evidence in group.recommendation.evidence)
        shown = failing.as_json()["groups"][0]
        assert shown["releases"] == [{"release": "2026.47", "count": 9}]
        assert shown["subjects"] == [{"subject": f"{name}.jobs.plain", "count": 9}]
        assert shown["completed_since"] == 0
        # Its selection means just these letters.
        selected = await diagnose_dead_letters(connection, queue, Selection.of(shown["select"]))
        assert [group.letters.count for group in selected.groups] == [9]

        payments.is_mended = True
        await publish_jobs(connection, queue, [f"card {n}" for n in range(12)])

        async def completed() -> bool:
            now = await diagnose_dead_letters(connection, queue)
            return now.groups[0].recommendation.completed_since == 12

        await eventually(completed, within=30)
    mended = await diagnose_dead_letters(connection, queue)
    # Each job counts once, though its worker stored a completion and the server reported its acknowledgement.
    assert mended.groups[0].recommendation.cause == "not seen since"
    assert mended.groups[0].recommendation.action in ("try_a_few", "start_workers")
    assert "completed 12 jobs since the last one died" in str(mended)
    assert (await stream_info(connection, f"{name}-dead"))["config"] == before["config"]


async def test_letters_of_a_hostile_publisher_are_counted_and_shown_as_one_line(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, events=None)
    headers = b"Job-Release: \x1b[2Jrelease\xff\x00\r\nAirflow-Dag-Id: d\x1b]0;x\x07\r\nAirflow-Task-Id: t"
    await publish_raw(nats, f"{name}.jobs.b\udcff", headers, b"\xff\x00\x1b[31m" * 100)
    await publish_raw(nats, f"{name}.jobs.plain", b"Job-Release: " + b"x" * 50_000, b"{" * 10_000)
    await exhaust_deliveries(connection, queue, 2)
    diagnosis = await diagnose_dead_letters(connection, queue)
    text = json.dumps(diagnosis.as_json(), ensure_ascii=False) + str(diagnosis)
    assert diagnosis.dead == 2
    assert len(text) < 10_000
    assert all(character.isprintable() or character == "\n" for character in text)
    text.encode()
    assert "isn't recorded: the queue has no events" in text


async def test_a_queue_without_letters_or_without_a_consumer_is_diagnosed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    empty = await diagnose_dead_letters(connection, queue)
    assert (empty.action, empty.headline) == ("nothing", f"{name}: no dead letters")
    await make_dead_letters(connection, queue, ["a"])
    await connection.api(f"CONSUMER.DELETE.{name}.worker", {})
    dead = await diagnose_dead_letters(connection, queue)
    assert [group.recommendation.action for group in dead.groups] == ["add_consumer"]
    await publish_jobs(connection, queue, ["b"])
    undeliverable = await diagnose_dead_letters(connection, queue, Selection(reasons=frozenset({Reason.UNDELIVERABLE})))
    assert [group.recommendation.action for group in undeliverable.groups] == ["add_consumer"]


async def test_completions_are_read_from_the_last_events_only(connection: NatsPyConnection, name: str) -> None:
    """A letter whose end is a forged completion of another queue, or no event at all, doesn't count."""
    queue = await make_queue(connection, name, dead=["a"])
    jetstream = connection.client.jetstream()
    for body in (b"\xff", b"{}", json.dumps({"type": "io.airflow.jetstream.v1.completion"}).encode()):
        await jetstream.publish(f"completed.{name}.worker.9", body)
    (job,) = await publish_jobs(connection, queue, ["b"])
    (message,) = await pull_jobs(connection, queue, 1)
    await message.ack_sync()
    other = {"timestamp": "2026-01-01T00:00:00Z", "consumer": "worker", "stream_seq": job, "deliveries": 1}
    for stream in (f"{name}x", name):
        event = {"type": "io.airflow.jetstream.v1.completion", "stream": stream, **other}
        await jetstream.publish(f"completed.{name}.worker.{job}", json.dumps(event).encode())
    await probe(connection, queue)
    diagnosis = await diagnose_dead_letters(connection, queue)
    assert diagnosis.groups[0].recommendation.completed_since == 1
