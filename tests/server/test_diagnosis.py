"""What a diagnosis says about dead letters: causes, places, times, whether the cause is still there, and advice."""

from __future__ import annotations

import json
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import DeadLetter, Death, Origin, Reason, Selection, diagnose_dead_letters
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.cause_group import CauseGroup, CauseGroups
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.recent_completions import RecentCompletions
from airflow_provider_jetstream.jetstream.dead_letters.recommendation import (
    Action,
    Cause,
    ConsumerActivity,
    recommend,
)
from airflow_provider_jetstream.worker import Worker
from testbed.dead_letters import publish_raw
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
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.worker import Delivery
    from testbed.nats_server import NatsServer

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
BUSY = ConsumerActivity(pending=0, in_flight=0, pulls=1, paused=False)


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
        assert (failing.action, group.recommendation.cause) == (Action.WAIT, Cause.STILL_FAILING)
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
    assert mended.groups[0].recommendation.cause == Cause.NOT_SEEN_SINCE
    assert mended.groups[0].recommendation.action in (Action.TRY_A_FEW, Action.START_WORKERS)
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
    assert (empty.action, empty.headline) == (Action.NOTHING, f"{name}: no dead letters")
    await make_dead_letters(connection, queue, ["a"])
    await connection.api(f"CONSUMER.DELETE.{name}.worker", {})
    dead = await diagnose_dead_letters(connection, queue)
    assert [group.recommendation.action for group in dead.groups] == [Action.ADD_CONSUMER]
    await publish_jobs(connection, queue, ["b"])
    undeliverable = await diagnose_dead_letters(connection, queue, Selection(reasons=frozenset({Reason.UNDELIVERABLE})))
    assert [group.recommendation.action for group in undeliverable.groups] == [Action.ADD_CONSUMER]


async def test_letters_that_died_again_are_to_be_repaired(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None)
    await make_dead_letters(connection, queue, ["a", "b"], headers={"Redrive-Count": "2"})
    diagnosis = await diagnose_dead_letters(connection, queue)
    assert diagnosis.groups[0].letters.redriven == 2
    assert "2 of 2 were redriven before and died again" in str(diagnosis)


def _letter(sequence: int, **fields: Any) -> DeadLetter:
    death = Death("queue", "", sequence, "worker", Reason.MAX_DELIVERIES, NOW, **fields)
    origin = Origin(f"dag{sequence}", "run", f"task{sequence}", -1)
    headers = (("Job-Release", str(sequence)),)
    return DeadLetter(
        *(death, f"jobs.{sequence}", b"", headers, "", BodySource.QUEUE, ()),
        preserved=True,
        ready_at=NOW,
        origin=origin,
    )


def test_a_hundred_thousand_letters_of_different_errors_take_little_memory_and_hide_no_large_group() -> None:
    groups = CauseGroups()
    tracemalloc.start()
    for number in range(20_000):
        # Digits alone would be masked.
        text = "".join(chr(ord("g") + int(digit)) for digit in str(number))
        groups.add(_letter(number, error_class="Random", error_message=text * 100))
        if number % 20 == 0:
            groups.add(_letter(number, error_class="Real", error_message="the one cause", traceback_digest="0" * 12))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20
    largest = groups.largest()[0]
    assert (largest.error_class, largest.count) == ("Real", 1_000)
    assert groups.letters == 21_000 == groups.left_out + sum(group.count for group in groups.largest())
    subjects, left_out = largest.subjects.largest(5)
    assert sum(count for _, count in subjects) + left_out == 1_000


def _group(
    count: int,
    first: timedelta,
    last: timedelta,
    *,
    reason: Reason = Reason.MAX_DELIVERIES,
    redriven: int = 0,
) -> CauseGroup:
    group = CauseGroup(reason, "worker", {}, NOW - first, NOW - last, 1, "Error", "text", "module:f:1")
    group.count, group.redriven = count, redriven
    return group


def _completions(since: timedelta, *spans: tuple[timedelta, int]) -> RecentCompletions:
    completions = RecentCompletions(NOW - since)
    for ago, count in spans:
        for _ in range(count):
            completions.add("worker", NOW - ago)
    return completions


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.mark.parametrize(
    ("group", "completions", "activity", "expected"),
    [
        # It died a minute ago, and so did everything.
        (_group(100, HOUR, MINUTE), _completions(HOUR * 2), BUSY, (Cause.STILL_FAILING, Action.WAIT)),
        # Every second job dies, and five were completed since: that isn't enough to tell.
        (
            _group(100, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 100), (MINUTE / 2, 5)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # Of a hundred one dies: a hundred completed ones since prove nothing.
        (
            _group(10, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 990), (MINUTE / 2, 100)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # Every second one dies, and fifty were completed since.
        (
            _group(100, HOUR, MINUTE),
            _completions(HOUR * 2, (HOUR / 2, 100), (MINUTE / 2, 50)),
            BUSY,
            (Cause.NOT_SEEN_SINCE, Action.TRY_A_FEW),
        ),
        # The events reach back to half of the time only: the rate of the other half counts for it.
        (
            _group(10, HOUR, MINUTE),
            _completions(HOUR / 4, (MINUTE * 10, 500), (MINUTE / 2, 100)),
            BUSY,
            (Cause.STILL_FAILING, Action.WAIT),
        ),
        # A night ago, and nothing was tried since.
        (_group(100, HOUR * 9, HOUR * 8), _completions(HOUR * 20), BUSY, (Cause.UNKNOWN, Action.TRY_A_FEW)),
        # One dies every hour, the last half an hour ago.
        (_group(24, HOUR * 24, HOUR / 2), None, BUSY, (Cause.STILL_FAILING, Action.WAIT)),
        (_group(9, HOUR * 9, HOUR * 8, redriven=8), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (_group(9, HOUR * 9, HOUR * 8, reason=Reason.EXPIRED), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (_group(9, HOUR * 9, HOUR * 8, reason=Reason.TERMINATED), None, BUSY, (Cause.UNKNOWN, Action.REPAIR)),
        (
            _group(9, HOUR * 9, HOUR * 8),
            None,
            ConsumerActivity(3, 0, 0, paused=False),
            (Cause.UNKNOWN, Action.START_WORKERS),
        ),
        (_group(9, HOUR, MINUTE), None, ConsumerActivity(3, 0, 1, paused=True), (Cause.STILL_FAILING, "start_workers")),
        (_group(9, HOUR, MINUTE), None, None, (Cause.STILL_FAILING, Action.ADD_CONSUMER)),
    ],
)
def test_the_recommendation_follows_from_what_was_tried_since(
    group: CauseGroup,
    completions: RecentCompletions | None,
    activity: ConsumerActivity | None,
    expected: tuple[Cause, Action],
) -> None:
    found = recommend(group, completions, activity, NOW)
    assert (found.cause, found.action) == expected
    assert found.evidence


@pytest.mark.parametrize(
    ("count", "advice"),
    [
        (1, "redrive it"),
        (4, "redrive 1 of them first, then the others if none dies again"),
        (11, "redrive 10 of them first, then the others if none dies again"),
    ],
)
def test_no_more_letters_are_tried_first_than_there_are(count: int, advice: str) -> None:
    found = recommend(_group(count, HOUR * 8, HOUR * 8), None, BUSY, NOW)
    assert found.text == f"nothing has been tried since: {advice}"


async def test_completions_are_read_from_the_last_events_only(connection: NatsPyConnection, name: str) -> None:
    """A letter whose end is a forged completion of another queue, or no event at all, doesn't count."""
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"])
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
