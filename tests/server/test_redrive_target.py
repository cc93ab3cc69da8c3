"""Redrives to another work queue, which fulfils the same preconditions as the letters' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    Protocol,
    RedriveRequest,
    Repair,
    WorkQueue,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    preview,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError, RedriveRequestError, UnsuitableQueueError
from testbed import seams
from testbed.dead_letters import letter_records, make_terminated_letters, request_for
from testbed.face import redrive_message_id, stream_info
from testbed.page import running_page
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    store_completion,
    stored_count,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


def to(target: WorkQueue, token: str = "slow", **fields: Any) -> RedriveRequest:
    return RedriveRequest(target=target, subject=f"{target.name}.jobs.{token}", **fields)


async def make_queues(connection: NatsPyConnection, name: str, **fields: Any) -> tuple[WorkQueue, WorkQueue]:
    """Make a queue and another one, which has the given fields."""
    return await make_queue(connection, name), await make_queue(connection, f"{name}-other", **fields)


@pytest.mark.slow
async def test_letters_become_jobs_of_another_queue_and_keep_their_identity(
    connection: NatsPyConnection, name: str
) -> None:
    queue, other = await make_queues(connection, name)
    await make_dead_letters(connection, queue, ["a"], headers={"Nats-Msg-Id": "order-1", "Customer": "Ünal"})
    await make_terminated_letters(connection, queue, ["b"])
    original = await get_message(connection, name, 1)
    assert original is not None
    report = await redrive_dead_letters(connection, queue, to(other))
    report.raise_for_failures()
    assert (dict(report.redriven), report.target, report.protocol) == ({1: 1, 2: 2}, other.name, Protocol.COPY)
    assert report.as_json()["target"] == other.name
    copy = await get_message(connection, other.name, 1)
    assert copy is not None
    assert (copy.subject, copy.data) == (f"{other.name}.jobs.slow", b"a")
    assert dict(copy.headers) == {
        "Job-Id": "order-1",
        "Customer": "Ünal",
        "Redrive-Count": "1",
        "Redrive-Stream": name,
        "Redrive-Sequence": "1",
        "Redrive-Consumer": "worker",
        "Nats-Msg-Id": redrive_message_id(name, 1, original.time, 1),
    }
    assert [
        (record.sequence, record.new_stream, record.new_sequence) for record in await letter_records(connection, queue)
    ] == [
        (1, other.name, 1),
        (2, other.name, 2),
    ]
    assert await stored_count(connection, name) == 0
    assert (await find_dead_letters(connection, queue)).letters == ()
    # It dies again, as a letter of that queue, and goes on counting.
    await exhaust_deliveries(connection, other, 2)
    assert [(letter.job_id, letter.redrives) for letter in (await find_dead_letters(connection, other)).letters] == [
        ("order-1", 1),
        ("2", 1),
    ]
    back = RedriveRequest(target=queue, subject=f"{name}.jobs.again")
    assert dict((await redrive_dead_letters(connection, other, back)).redriven) == {1: 3, 2: 4}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_the_same_sequence_in_the_target_is_not_taken_for_the_original(
    connection: NatsPyConnection, name: str
) -> None:
    # With one message a subject, a copy may drop its own original: not a live job that has the same number elsewhere.
    queue, other = await make_queues(connection, name, max_msgs_per_subject=1, discard="old")
    await make_dead_letters(connection, queue, ["dead"])
    await publish_jobs(connection, other, ["live"], kind="slow")
    report = await redrive_dead_letters(connection, queue, to(other))
    assert "max_msgs_per_subject 1, 1 on" in report.failed[1]
    assert dict((await redrive_dead_letters(connection, queue, to(other, "free"))).redriven) == {1: 2}
    assert await process_all(connection, other) == {"live": 1, "dead": 1}


async def test_the_room_of_the_target_counts(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name, max_msgs=3, discard="old")
    await make_dead_letters(connection, queue, "abcd")
    await publish_jobs(connection, other, ["live"])
    shown = await preview(connection, queue, to(other))
    assert (shown.target, shown.redriven, shown.failures) == (other.name, 2, 2)
    report = await redrive_dead_letters(connection, queue, to(other))
    assert (dict(report.redriven), sorted(report.failed)) == ({1: 2, 2: 3}, [3, 4])
    assert report.failed[3].startswith(f"{other.name} has no room for the copy of 3 (max_msgs 3, 3 used, 1 needed)")
    with pytest.raises(RedriveRequestError, match=f"{other.name} has no room for copies"):
        await redrive_dead_letters(connection, queue, to(other))
    assert await process_all(connection, other) == {"live": 1, "a": 1, "b": 1}
    assert dict((await redrive_dead_letters(connection, queue, to(other))).redriven) == {3: 4, 4: 5}


@pytest.mark.slow
async def test_copies_have_the_size_that_the_target_takes(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name, max_msg_size=300)
    await make_dead_letters(connection, queue, ["a" * 290, "b"])
    report = await redrive_dead_letters(connection, queue, to(other))
    assert (dict(report.redriven), list(report.failed)) == ({2: 1}, [1])
    assert f"max_msg_size of {other.name}" in report.failed[1]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"protocol": Protocol.IN_PLACE}, "expected nothing but the protocol, found subject, target"),
        ({"protocol": "atomic"}, "expected a protocol among auto, copy, in_place, found 'atomic': choose one"),
        ({"subject": None}, "expected a subject of other for the new jobs, found none"),
        ({"target": "other"}, "expected a WorkQueue as target, found str"),
    ],
)
def test_what_is_impossible_with_a_target_is_refused_by_the_request(fields: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"target": small_queue("other"), "subject": "other.jobs.a"} | fields
    with pytest.raises(RedriveRequestError, match=problem):
        RedriveRequest(**given)


async def test_the_target_passes_the_gate_before_anything_is_stored(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name, consumer={"filter_subject": f"{name}-other.jobs.>"})
    await make_dead_letters(connection, queue, ["a"])
    limits = small_queue(f"{name}-limits")
    await connection.api(f"STREAM.CREATE.{limits.name}", {"name": limits.name, "subjects": [f"{limits.name}.>"]})
    refused: list[tuple[RedriveRequest, type[Exception], str]] = [
        (to(limits), UnsuitableQueueError, f"expected workqueue retention of {limits.name}, found limits"),
        (to(small_queue(f"{name}-missing")), NotFoundError, f"{name}-missing"),
        (
            RedriveRequest(target=other, subject=f"{name}.jobs.a"),
            RedriveRequestError,
            f"a subject of {other.name} .*found",
        ),
        (
            RedriveRequest(target=WorkQueue(name=f"{name}-dead", subjects=["x"]), subject="x"),
            RedriveRequestError,
            f"expected another work queue as target, found {name}-dead, which belongs to {name}",
        ),
    ]
    config: dict[str, Any] = (await stream_info(connection, other.name))["config"]
    await connection.api(f"STREAM.UPDATE.{other.name}", config | {"subjects": [*config["subjects"], f"{name}-odd"]})
    odd = RedriveRequest(target=other, subject=f"{name}-odd")
    refused.append((odd, RedriveRequestError, f"a consumer of {other.name} takes, found {name}-odd: no worker"))
    for request, error, problem in refused:
        for work in (redrive_dead_letters, preview):
            with pytest.raises(error, match=problem):
                await work(connection, queue, request)
    assert (await stored_count(connection, name), await stored_count(connection, other.name)) == (1, 0)
    assert await stored_count(connection, limits.name) == 0


async def test_a_target_that_changes_subjects_or_only_mirrors_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue, other = await make_queues(connection, name)
    await make_dead_letters(connection, queue, ["a"])
    config: dict[str, Any] = (await stream_info(connection, other.name))["config"]
    transform = {"src": f"{other.name}.jobs.slow", "dest": f"{other.name}.jobs.other"}
    await connection.api(f"STREAM.UPDATE.{other.name}", config | {"subject_transform": transform})
    with pytest.raises(RedriveRequestError, match=r"it would store the copy as .*; name another target"):
        await redrive_dead_letters(connection, queue, to(other))
    assert dict((await redrive_dead_letters(connection, queue, to(other, "fast"))).redriven) == {1: 1}


@pytest.mark.slow
async def test_a_repair_names_subjects_of_the_target(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name)
    await make_dead_letters(connection, queue, "abc")
    subjects = {b"a": f"{other.name}.jobs.x", b"b": f"{name}.jobs.x", b"c": None}
    request = RedriveRequest(target=other, transform=lambda letter: Repair(subject=subjects[letter.body]))
    shown = await preview(connection, queue, request)
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), sorted(report.failed)) == ({1: 1}, [2, 3])
    assert (shown.redriven, shown.failed) == (1, report.failed)
    assert "name one in the request, or in each repair; the letter is untouched" in report.failed[3]
    assert await process_all(connection, other) == {"a": 1}


@pytest.mark.slow
async def test_the_ends_of_the_new_jobs_are_awaited_in_the_target(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name)
    await publish_jobs(connection, other, ["live"])
    await make_dead_letters(connection, queue, "ab")
    cursor = await take_cursor(connection, other)
    report = await redrive_dead_letters(connection, queue, to(other))
    # The new job 2 isn't the letter 2, which has a new job, too.
    assert report.awaited_sequences() == {2, 3}
    for message in await pull_jobs(connection, other, 3):
        await store_completion(connection, other, message.metadata.sequence.stream)
        await message.ack_sync()
    assert (await wait(connection, cursor, report.awaited_sequences())).completed == {2, 3}


@pytest.mark.slow
async def test_an_interrupted_redrive_to_a_target_goes_on(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = await make_queues(connection, name)
    await make_dead_letters(connection, queue, "ab")

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, die)
    with pytest.raises(KeyboardInterrupt):
        await redrive_dead_letters(connection, queue, to(other, run="r1"))
    monkeypatch.undo()
    assert await stored_count(connection, other.name) == 2
    # Whatever the next request says: the jobs exist already, in the other queue.
    report = await redrive_dead_letters(connection, queue, request_for([1]))
    assert (dict(report.redriven), report.awaited_sequences(), report.failed) == ({1: 0}, set(), {})
    report = await redrive_dead_letters(connection, queue, to(other, run="r1"))
    assert (dict(report.redriven), report.awaited_sequences()) == ({1: 1, 2: 2}, {1, 2})
    assert await process_all(connection, other) == {"a": 1, "b": 1}
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
@pytest.mark.parametrize("again", ["own queue", "target", "parked"])
async def test_a_new_job_that_was_stored_but_not_recorded_is_found_in_the_target(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    queue, other = await make_queues(connection, name, duplicate_window="100ms")
    await make_dead_letters(connection, queue, "ab")

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seams.AUDIT_LOG_WRITE, die)
    with pytest.raises(KeyboardInterrupt):
        await redrive_dead_letters(connection, queue, to(other))
    monkeypatch.undo()
    assert await process_all(connection, other) == {"a": 1, "b": 1}
    request = {"own queue": RedriveRequest(), "target": to(other), "parked": RedriveRequest(max_redrives=0)}[again]
    report = await redrive_dead_letters(connection, queue, request)
    assert (list(report.parked), report.failed) == ([], {})
    assert await process_all(connection, other) == await process_all(connection, queue) == {}
    assert {record.new_stream for record in await letter_records(connection, queue)} == {other.name}
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
async def test_the_page_shows_no_record_of_a_letter_of_another_queue(own_nats: NatsServer, name: str) -> None:
    values = {"servers": (own_nats.url,), "timeout": 10}
    async with connect(connection_settings(values)) as connection, running_page(["target"], own_nats) as page:
        queue, other = await make_queues(connection, name)
        await make_dead_letters(connection, other, "x")
        await redrive_dead_letters(connection, other, RedriveRequest(why="theirs"))
        await process_all(connection, other)
        await make_dead_letters(connection, queue, "a")
        await redrive_dead_letters(connection, queue, to(other))
        await exhaust_deliveries(connection, other, 1)
        (letter,) = (await find_dead_letters(connection, other)).letters

        async def shown() -> dict[str, Any] | None:
            answer = await page.get(f"queues/target/{other.name}/letters/{letter.sequence}")
            return dict(answer.json()) if answer.status_code == 200 else None

        assert (await eventually(shown, 60))["audit"] == []


@pytest.mark.slow
async def test_the_task_that_published_a_job_is_known_in_the_target(connection: NatsPyConnection, name: str) -> None:
    queue, other = await make_queues(connection, name)
    origin = Origin("dag", "run", "task", 3)
    await publish(connection, queue, [Job("a")], subject=f"{name}.jobs.a", origin=origin)
    await exhaust_deliveries(connection, queue, 1)
    await redrive_dead_letters(connection, queue, to(other))
    events = f"{other.name}-events"
    assert (await stream_info(connection, events))["state"]["messages"] == 1
    assert manifest_subject(other.name, origin.key) == f"published.{other.name}.{origin.key}"
    await exhaust_deliveries(connection, other, 1)
    assert [letter.origin for letter in (await find_dead_letters(connection, other)).letters] == [origin]


@pytest.mark.slow
async def test_the_letters_own_queue_as_the_target_is_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    report = await redrive_dead_letters(connection, queue, to(queue))
    assert (report.target, dict(report.redriven)) == (None, {1: 2})
    assert [record.new_stream for record in await letter_records(connection, queue)] == [None]
