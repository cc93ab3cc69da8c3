"""Waits for jobs that died and were redriven, parked or handled, before the wait begins or while it lasts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    JobsDeadError,
    JobsUnaccountedError,
    Protocol,
    RedriveRequest,
    Selection,
    WaitPolicy,
    find_dead_letters,
    provision,
    publish_with_handle,
    read_job_reports,
    redrive_dead_letters,
    take_cursor,
    wait,
    wait_by_handle,
)
from airflow_provider_jetstream.jetstream.contract import handled_subject
from testbed import seams
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    small_queue,
    store_completion,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import Cursor, WaitReport, WorkQueue
    from testbed.face import NatsPyConnection

SOON = 10.0


async def ended(
    connection: NatsPyConnection, cursor: Cursor, sequences: list[int], policy: WaitPolicy | None = None
) -> WaitReport:
    """Return the report of a wait that ends long before jobs that are gone count as unaccounted."""
    return await asyncio.wait_for(wait(connection, cursor, sequences, policy=policy), SOON)


async def finish(connection: NatsPyConnection, queue: WorkQueue, count: int, result: Any = None) -> None:
    """Do some jobs as a worker does that stores completions."""
    for message in await pull_jobs(connection, queue, count):
        sequence = message.metadata.sequence.stream
        await store_completion(connection, queue, sequence, **({} if result is None else {"result": result}))
        await message.ack_sync()


async def redrive(connection: NatsPyConnection, queue: WorkQueue, **fields: Any) -> None:
    report = await redrive_dead_letters(connection, queue, RedriveRequest(**fields))
    assert report.redriven or report.parked


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20], ids=["record", "range"])
async def test_jobs_that_were_redriven_and_done_before_the_wait_are_completed_with_their_results(
    connection: NatsPyConnection, name: str, count: int
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, map(str, range(count)))
    await redrive(connection, queue)
    await finish(connection, queue, count, result={"done": 1})
    report = await ended(connection, cursor, sequences)
    assert report.completed == set(sequences)
    assert len(report.results) == count
    reports = [job async for job in read_job_reports(connection, cursor, json.loads(json.dumps(report.as_json())))]
    assert [(job.sequence, job.state, job.result) for job in reports] == [
        (sequence, "completed", {"done": 1}) for sequence in sequences
    ]


async def test_a_job_that_dies_and_is_redriven_while_others_are_awaited_is_completed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    progress: list[tuple[int, int]] = []
    sequences = await make_dead_letters(connection, queue, ["a"])
    sequences += await publish_jobs(connection, queue, ["b"])
    waiting = asyncio.create_task(
        wait(
            *(connection, cursor, sequences),
            policy=WaitPolicy(max_dead=None),
            progress=lambda report: progress.append((len(report.dead), len(report.completed))),
        )
    )
    await eventually(lambda: (1, 0) in progress)
    (other,) = await pull_jobs(connection, queue, 1)
    await redrive(connection, queue)
    await finish(connection, queue, 1)
    await eventually(lambda: (0, 1) in progress)
    await store_completion(connection, queue, other.metadata.sequence.stream)
    report = await asyncio.wait_for(waiting, SOON)
    assert report.completed == set(sequences)


@pytest.mark.slow
@pytest.mark.parametrize("died_again", ["", "died again"])
async def test_a_job_that_was_redriven_twice_ends_as_its_last_copy(
    connection: NatsPyConnection, name: str, died_again: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    for _ in range(2):
        await redrive(connection, queue)
        await (finish if _ and not died_again else exhaust_deliveries)(connection, queue, 1)
    report = await ended(connection, cursor, sequences)
    if not died_again:
        assert report.completed == set(sequences)
        return
    assert list(report.dead) == sequences
    assert (
        f"it died and was redriven as job 2 of {name}: it died and was redriven as job 3 of {name}: 1 del"
        in (report.dead[1])
    )
    (job,) = [job async for job in read_job_reports(connection, cursor, report.as_json())]
    assert (job.state, job.attempts) == ("dead", 1)


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_was_requeued_in_place_is_awaited_although_its_entry_is_kept(
    connection: NatsPyConnection, name: str
) -> None:
    letters = {"name": f"{name}-dead", "deny_delete": True, "deny_purge": True}
    queue = await make_queue(connection, name, dead_letters=letters)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    await redrive(connection, queue, protocol=Protocol.IN_PLACE)
    waiting = asyncio.create_task(ended(connection, cursor, sequences))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await finish(connection, queue, 1)
    assert (await waiting).completed == set(sequences)


@pytest.mark.slow
async def test_a_job_whose_entry_is_kept_after_its_redrive_is_awaited_as_its_copy(
    connection: NatsPyConnection, name: str
) -> None:
    letters = {"name": f"{name}-dead", "deny_delete": True, "deny_purge": True}
    queue = await make_queue(connection, name, dead_letters=letters)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    await redrive(connection, queue)
    await finish(connection, queue, 1)
    assert (await ended(connection, cursor, sequences)).completed == set(sequences)


async def test_a_parked_job_is_dead_at_once_with_the_reason_and_completed_when_it_comes_back(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    await redrive(connection, queue, max_redrives=0, why="a wrong address")
    report = await ended(connection, cursor, sequences)
    assert report.dead == {1: "it died and was parked: a wrong address"}
    await redrive(connection, queue, selection=Selection(parked=True))
    await finish(connection, queue, 1)
    assert (await ended(connection, cursor, sequences)).completed == set(sequences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retention", "note"),
    [
        ("limits", "a handler of the dead letter queue reports that it has handled it"),
        ("workqueue", "it died, and a handler of the dead letter queue has handled it"),
    ],
)
async def test_a_handled_job_is_dead_and_the_note_says_so(
    connection: NatsPyConnection, name: str, retention: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.3)
    queue = await make_queue(connection, name, dead_letters={"name": f"{name}-dead", "retention": retention})
    config = {"name": "handler", "durable_name": "handler", "ack_policy": "explicit"}
    body = {"stream_name": f"{name}-dead", "config": config}
    await connection.api(f"CONSUMER.CREATE.{name}-dead.handler", body)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    (entry,) = await pull_jobs(connection, small_queue(f"{name}-dead"), 1, consumer="handler")
    await entry.ack_sync()
    if retention == "limits":
        await connection.client.jetstream().publish(handled_subject(name, 1), b'{"by": "ann"}')
    await redrive_dead_letters(connection, queue)
    report = await ended(connection, cursor, sequences)
    assert report.dead == {1: note}


async def test_a_job_that_was_redriven_into_another_queue_ends_as_its_job_there(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    other = await make_queue(connection, f"{name}-o", subjects=[f"{name}.other"])
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a", "b"])
    await redrive(connection, queue, target=other, subject=f"{name}.other")
    first, second = await pull_jobs(connection, other, 2)
    await store_completion(connection, other, first.metadata.sequence.stream, result=1)
    await first.ack_sync()
    waiting = asyncio.create_task(ended(connection, cursor, sequences, WaitPolicy(max_dead=None)))
    await second.nak()
    await eventually(lambda: _dead(connection, other))
    report = await waiting
    assert (report.completed, list(report.dead)) == ({1}, [2])
    assert f"it died and was redriven as job 2 of {other.name}: 1 deliveries" in report.dead[2]


async def test_a_job_that_was_redriven_into_a_queue_without_events_is_dead_and_the_note_names_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    other = await make_queue(connection, f"{name}-o", subjects=[f"{name}.other"], events=None)
    cursor = await take_cursor(connection, queue)
    sequences = await make_dead_letters(connection, queue, ["a"])
    await redrive(connection, queue, target=other, subject=f"{name}.other")
    report = await ended(connection, cursor, sequences)
    assert f"redriven as job 1 of {other.name}, whose end can't be known: " in report.dead[1]
    assert "expected events" in report.dead[1]


@pytest.mark.slow
async def test_a_handle_leads_to_the_copies_of_its_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    published = await publish_with_handle(connection, queue, ["a", "b"], subject=f"{name}.jobs.plain")
    await exhaust_deliveries(connection, queue, 2)
    await redrive(connection, queue, selection=Selection(sequences=[1]))
    await finish(connection, queue, 1)
    with pytest.raises(JobsDeadError, match="expected at most 0 dead letters, found 1"):
        await asyncio.wait_for(wait_by_handle(connection, json.loads(json.dumps(published.handle))), SOON)
    report = await wait_by_handle(connection, published.handle, policy=WaitPolicy(max_dead=1))
    assert (report.completed, list(report.dead)) == ({1}, [2])


@pytest.mark.slow
async def test_without_an_audit_a_redriven_job_is_gone_as_before(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.3)
    queue = await make_queue(connection, name)
    published = await publish_with_handle(connection, queue, ["a"], subject=f"{name}.jobs.plain")
    await exhaust_deliveries(connection, queue, 1)
    await redrive(connection, queue)
    await connection.api(f"STREAM.DELETE.{name}-audit")
    with pytest.raises(JobsUnaccountedError):
        await asyncio.wait_for(wait_by_handle(connection, published.handle), SOON)
    assert f"Whether jobs of {name} were redriven isn't known" in caplog.text


@pytest.mark.slow
async def test_a_job_is_not_taken_for_one_of_an_earlier_queue_that_was_redriven(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    await redrive(connection, queue)
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    cursor = (await take_cursor(connection, queue)).from_start()
    sequences = await publish_jobs(connection, queue, ["b"])
    waiting = asyncio.create_task(ended(connection, cursor, sequences))
    await asyncio.sleep(0.3)
    await finish(connection, queue, 1)
    report = await waiting
    assert (report.completed, report.copies) == ({1}, {})


async def test_records_that_lead_in_a_circle_or_nowhere_end_no_wait(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = await publish_jobs(connection, queue, "abc")
    record = {"action": "redriven", "stream": name, "created": cursor.created, "reason": "max-deliveries"}
    record |= {"subject": "x", "fingerprint": "x", "at": "2026-01-01T00:00:00Z"}
    jetstream = connection.client.jetstream()
    for letter, new in ((1, 1), (2, 1), (3, 2**63)):
        body = json.dumps(record | {"sequence": letter, "new_sequence": new}).encode()
        await jetstream.publish(f"audit.{name}.letters.{letter}", body)
        await jetstream.publish(f"handled.{name}.{'9' * 30}", b"{}")
    waiting = asyncio.create_task(ended(connection, cursor, sequences))
    await finish(connection, queue, 3)
    assert (await waiting).completed == {1, 2, 3}
    assert "Traceback" not in caplog.text


async def _dead(connection: NatsPyConnection, queue: WorkQueue) -> int:
    return len((await find_dead_letters(connection, queue)).letters)
