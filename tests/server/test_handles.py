"""Jobs are published here and awaited there, by a handle."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from airflow_provider_jetstream.jetstream import (
    Cursor,
    Job,
    JobReport,
    JobsHandle,
    Origin,
    PublishReport,
    WaitPolicy,
    WaitReport,
    connect,
    provision,
    publish,
    publish_with_handle,
    read_job_reports,
    take_cursor,
    wait,
    wait_by_handle,
)
from airflow_provider_jetstream.jetstream.contract import MSG_ID, copy_subject
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    DeadlineError,
    JobReportsGoneError,
    JobsDeadError,
    PermissionDeniedError,
    QueueGoneError,
)
from airflow_provider_jetstream.jetstream.waiting.job_ids import JobIds
from airflow_provider_jetstream.jetstream.waiting.stored_reports import JobReports, JobReportSource, collect_job_reports
from airflow_provider_jetstream.tasks import job_reports
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.face import DocumentName, DocumentPart, DocumentWriter, subject_counts
from testbed.queues import exhaust_deliveries, make_queue, publish_jobs, pull_jobs, running_worker, store_completion
from testbed.waiters import store_completions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

LONG = 30.0
CURSOR = {
    "queue": "q",
    "created": "2026-01-01T00:00:00Z",
    "events": "e",
    "events_from": 1,
    "dead_letters": None,
    "dead_letters_from": 1,
}


async def published(connection: NatsPyConnection, queue: WorkQueue, count: int) -> dict[str, Any]:
    """Publish jobs with ids, and return their handle as an XCom holds it."""
    jobs = [Job(str(number), f"{queue.name}.jobs.x", id=f"{queue.name}-{number}") for number in range(count)]
    report = await publish_with_handle(connection, queue, jobs)
    handle: dict[str, Any] = json.loads(json.dumps(report.handle))
    return handle


async def test_the_jobs_of_a_handle_are_awaited_over_another_connection(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["of somebody else"])
    handle = await published(connection, queue, 3)
    assert handle["sequences"] == [[2, 4]]
    await publish_jobs(connection, queue, ["of somebody else"])
    for sequence in (2, 3, 4):
        await store_completion(connection, queue, sequence, result=sequence)
    async with connect(settings) as other:
        for value in (handle, {"published": 3, "handle": handle}, json.dumps(handle), str({"handle": handle})):
            report = await wait_by_handle(other, value, time_limit=LONG)
            assert (report.completed, report.awaited) == ({2, 3, 4}, set())
            assert report.results == {"2": 2, "3": 3, "4": 4}


@pytest.mark.slow
async def test_a_handle_stays_small_where_the_sequences_of_its_jobs_are_scattered(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    sequences = list(range(1, 200_000, 2))
    report = PublishReport()
    report.sequences.extend(sequences)
    report.advised = {f"digest-{number:015}": number for number in sequences[:500]}
    report.handle = (await JobsHandle.take(connection, cursor, report, "key")).as_json()
    assert report.handle is not None
    assert len(json.dumps(report.handle)) < 2_000
    jobs, advised = await JobsHandle.of(report.handle).jobs(connection)
    assert jobs == set(sequences)
    assert advised == report.advised
    await connection.api(f"STREAM.PURGE.{name}-events")
    with pytest.raises(QueueGoneError, match="isn't stored any more: wait before the events' max_age is over"):
        await JobsHandle.of(report.handle).jobs(connection)


async def test_jobs_that_ended_before_a_retry_published_them_again_have_ended(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    assert await published(connection, queue, 2)
    await store_completions(connection, queue, [1, 2])
    jobs = [Job(str(number), f"{name}.jobs.x", id=f"{name}-{number}") for number in range(2)]
    first = await publish(connection, queue, jobs)
    again = replace(first, duplicates=2, handle=None)
    again.handle = (await JobsHandle.take(connection, await take_cursor(connection, queue), again, "key")).as_json()
    handle = JobsHandle.of(again)
    assert handle.position().events_from == 1


async def test_the_wait_for_a_handle_of_a_queue_that_was_created_anew_fails(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    handle = await published(connection, await make_queue(connection, name), 2)
    await connection.api(f"STREAM.DELETE.{name}")
    await publish_jobs(connection, await make_queue(connection, name), "ab")
    with pytest.raises(QueueGoneError, match="deleted and created anew"):
        await wait_by_handle(connection, handle, time_limit=LONG)


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_failed_wait_cancels_what_still_waits_if_it_is_to(
    connection: NatsPyConnection, name: str, *, cancels: bool
) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 4)
    waiting = asyncio.create_task(
        wait_by_handle(connection, handle, time_limit=LONG, cancel_on_failure=cancels, policy=WaitPolicy(max_dead=0))
    )
    await exhaust_deliveries(connection, queue, 1)
    with pytest.raises(JobsDeadError):
        await waiting
    cancelled = await subject_counts(connection, f"{name}-events", f"cancelled.{name}.*")
    assert sorted(cancelled) == ([f"cancelled.{name}.{sequence}" for sequence in (2, 3, 4)] if cancels else [])


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_wait_that_is_over_in_time_cancels_too(
    connection: NatsPyConnection, name: str, *, cancels: bool
) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 2)
    with pytest.raises(DeadlineError, match=f"expected every job of {name} to end within 0.5 s, found 2 that did not"):
        await wait_by_handle(connection, handle, time_limit=0.5, cancel_on_failure=cancels)
    cancelled = await subject_counts(connection, f"{name}-events", f"cancelled.{name}.*")
    assert sorted(cancelled) == ([f"cancelled.{name}.{sequence}" for sequence in (1, 2)] if cancels else [])


async def test_a_queue_whose_jobs_nobody_can_await_gives_no_handle(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None)
    report = await publish_with_handle(connection, queue, [Job("a", f"{name}.jobs.x")])
    assert (report.stored, report.handle) == (1, None)
    with pytest.raises(ArgumentError, match="whose queue has to declare events"):
        await wait_by_handle(connection, report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "",
        "handle",
        "[" * 100_000,
        {},
        [],
        {"type": "io.airflow.jetstream.v1.jobs"},
        {"handle": None},
        {"cursor": {"queue": "q"}, "sequences": [[1, 2]]},
        {"cursor": {"queue": 7, "created": 1, "events": 1, "events_from": "x", "dead_letters": 1}},
        {"cursor": CURSOR | {"queue": "a.b"}},
        {"cursor": CURSOR | {"events": ">"}},
        {"cursor": CURSOR | {"dead_letters": "a b\r\n"}},
        {"cursor": CURSOR | {"created": "yesterday"}},
        {"cursor": CURSOR | {"created": "2026-01-01T00:00:00"}},
        {"cursor": CURSOR | {"events_from": -1}},
        {"cursor": CURSOR | {"events_from": True}},
        {"cursor": CURSOR | {"dead_letters_from": 10**30}},
        {"cursor": CURSOR | {"advisory_subjects": ["a..b"]}},
        {"cursor": CURSOR | {"advisory_subjects": 7}},
        {"cursor": CURSOR, "sequences": [[0, 1]]},
        {"cursor": CURSOR, "sequences": [["1", None]]},
        {"cursor": CURSOR, "sequences": [[9, 1]] * 100_000},
        {"cursor": CURSOR, "parts": [[-1, 1, "0" * 32]]},
        {"cursor": CURSOR, "parts": [[7, 1, "0" * 32]] * 100_000},
        {"cursor": CURSOR, "parts": [[7, 1]]},
        {"cursor": CURSOR, "key": 7},
        {"cursor": CURSOR, "advised": {"digest": 0}},
    ],
)
def test_what_is_no_handle_is_refused(value: object) -> None:
    assert JobsHandle.of({"cursor": CURSOR}).position().queue == "q"
    with pytest.raises(ArgumentError, match="expected the handle of published jobs"):
        JobsHandle.of(value)


async def test_a_handle_that_claims_too_many_jobs_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    handle = await published(connection, queue, 1) | {"sequences": [[1, 10**18]]}
    with pytest.raises(ArgumentError, match="expected a handle on at most 20,000,000 jobs, found 1,000"):
        await wait_by_handle(connection, handle)


async def test_the_jobs_of_a_handle_are_counted_before_its_next_part_is_read(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = PublishReport()
    report.sequences.extend(range(1, 20_000, 2))
    report.handle = (await JobsHandle.take(connection, cursor, report, "key")).as_json()
    assert report.handle is not None
    handle = JobsHandle.of(report.handle)
    writer = DocumentWriter(connection, DocumentName(cursor.events, name, "handle", "key", cursor.created), part_rows=2)
    await writer.add([(1, 19_999_999), (1, 19_999_999)])
    # No such part: it isn't asked for.
    forged = [*await writer.finish(), DocumentPart(10**6, 1, "0" * 32)]
    with pytest.raises(ArgumentError, match="expected a handle on at most 20,000,000 jobs, found 39,999,998"):
        await JobsHandle.of(handle.as_json() | {"parts": forged}).jobs(connection)
    # The parts of another handle, and of this one where its key or its queue is another's.
    for changed in ({"key": "other"}, {"cursor": handle.cursor | {"created": "2026-01-01T00:00:00Z"}}):
        with pytest.raises(QueueGoneError, match="isn't stored any more"):
            await JobsHandle.of(handle.as_json() | changed).jobs(connection)


@pytest.mark.parametrize("by_task", [False, True])
async def test_the_ends_of_a_handles_jobs_are_read_from_where_the_events_were_before_them(
    connection: NatsPyConnection, name: str, *, by_task: bool
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, "abc")
    await store_completions(connection, queue, [1, 2, 3])
    origin = Origin("dag", "run", "task") if by_task else None
    jobs = [Job(str(number), f"{name}.jobs.x") for number in range(2)]
    report = await publish_with_handle(connection, queue, jobs, origin=origin)
    assert JobsHandle.of(report).position().events_from == 4
    await store_completions(connection, queue, [4, 5])
    assert (await wait_by_handle(connection, report, time_limit=LONG)).completed == {4, 5}
    # The positions belong to a stream that is gone.
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await store_completions(connection, queue, [4, 5])
    assert (await wait_by_handle(connection, report, time_limit=LONG)).completed == {4, 5}


# One report per job: id, state, attempts, error and result, whoever did the job, and however many there are.


ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_vanished=None)


class AddressError(Exception):
    pass


def send(job: Any) -> dict[str, int]:
    if job.body == b"bad":
        raise AddressError("no such address: x@")
    return {"sent": 1}


def names(ids: dict[int, str]) -> JobIds:
    known = JobIds()
    for job_id in ids.values():
        known._append(job_id)  # noqa: SLF001
    known.locate(list(ids))
    return known


async def reports_of(
    connection: NatsPyConnection, cursor: Cursor, report: WaitReport, ids: JobIds | None = None
) -> dict[int, JobReport]:
    # As a trigger's event, it goes through JSON.
    ended = json.loads(json.dumps(report.as_json()))
    return {job.sequence: job async for job in read_job_reports(connection, cursor, ended, ids)}


@pytest.mark.slow
async def test_each_job_is_reported_with_its_id_attempts_error_and_result(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "5s"})
    cursor = await take_cursor(connection, queue)
    jobs = [Job(b"fine", id="ada"), Job(b"bad", id="alan")]
    published = await publish(connection, queue, jobs, subject=f"{name}.jobs.x")
    async with running_worker(Worker(queue, "worker", send, settings)):
        report = await wait(connection, cursor, published.sequences, policy=ANY_END)
    reports = await reports_of(connection, cursor, report)
    assert reports == {
        1: JobReport("ada", 1, "completed", 1, result={"sent": 1}),
        2: JobReport("alan", 2, "dead", 2, f"{__name__}.AddressError", "no such address: x@"),
    }
    assert reports[2].describe() == f"job alan (sequence 2): {__name__}.AddressError: no such address: x@"


@pytest.mark.slow
async def test_a_failed_wait_for_a_handle_names_jobs_and_errors(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = [Job(b"fine", id="ada"), Job(b"bad", id="alan")]
    published = await publish_with_handle(connection, queue, jobs, subject=f"{name}.jobs.x")
    async with running_worker(Worker(queue, "worker", send, settings)):
        with pytest.raises(JobsDeadError) as failed:
            await wait_by_handle(connection, published, policy=WaitPolicy(max_dead=0))
    assert f"found 1: job alan (sequence 2): {__name__}.AddressError: no such address: x@; see the" in str(failed.value)


async def test_a_job_that_a_worker_only_acknowledged_is_reported_by_the_id_of_its_publisher(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "max_deliver": 3})
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a", "b"])
    first, second = await pull_jobs(connection, queue, 2)
    await first.nak()
    await second.ack_sync()
    (again,) = await pull_jobs(connection, queue, 1)
    await again.ack_sync()
    report = await wait(connection, cursor, [1, 2])
    known = names({1: "ada", 2: "alan"})
    document = DocumentName(cursor.events, name, "ids", "0" * 32, cursor.created)
    parts = json.loads(json.dumps(await known.store(connection, document)))
    stored = await JobIds.read(connection, document, parts)
    reports = await reports_of(connection, cursor, report, stored)
    assert reports == {1: JobReport("ada", 1, "completed", 2), 2: JobReport("alan", 2, "completed", 1)}
    # Those of another queue of this name aren't this one's.
    other = await JobIds.read(connection, replace(document, created="2020-01-01T00:00:00Z"), parts)
    assert other.get(1) is None
    for wrong in (None, 7, [[1, 2]], [*parts, parts[0]]):
        assert (await JobIds.read(connection, document, wrong)).get(1) is None


async def test_jobs_that_havent_ended_are_reported_as_awaited_with_the_id_that_they_are_stored_with(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    await publish_jobs(connection, queue, ["a"], headers={MSG_ID: "ada"})
    reports = await reports_of(connection, cursor, WaitReport({1}))
    assert reports == {1: JobReport("ada", 1, "awaited")}


async def test_cancelled_and_vanished_jobs_are_reported_with_the_reason(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = WaitReport(set(), cancelled={1: "ann: wrong price"}, vanished={2}, attempts={1: 0})
    await store_completion(
        connection, queue, 1, type="io.airflow.jetstream.v1.cancelled", job_id="ada", why="wrong price", by="ann"
    )
    assert await reports_of(connection, cursor, report) == {
        1: JobReport("ada", 1, "cancelled", None, None, "ann: wrong price"),
        2: JobReport(None, 2, "vanished", None, None, "it is gone without a stored end"),
    }


async def test_what_was_stored_about_an_earlier_queue_of_the_name_isnt_reported(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await store_completion(connection, queue, 1, job_id="stranger", result=7)
    await connection.client.jetstream().publish(
        copy_subject(name, "worker", 2),
        b"body",
        headers={"Dead-Letter-Version": "1", "Dead-Letter-Sequence": "2", "Dead-Letter-Error-Class": "StrangerError"},
    )
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = WaitReport(set(), completed={1}, results_at={1: 1}, dead={2: "1 deliveries to worker"})
    assert await reports_of(connection, cursor, report) == {
        1: JobReport(None, 1, "completed", 1),
        2: JobReport(None, 2, "dead", 1, None, "1 deliveries to worker"),
    }


@pytest.mark.parametrize("result", ["NaN", "1e999", "9" * 40, "[" * 190 + "]" * 190])
async def test_whatever_a_worker_returns_the_report_fits_an_xcom(
    connection: NatsPyConnection, name: str, result: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    completion = {
        "type": "io.airflow.jetstream.v1.completion",
        "timestamp": "2026-01-01T00:00:00Z",
        "stream": name,
        "consumer": "worker",
        "stream_seq": 1,
        "deliveries": 1,
    }
    body = f'{json.dumps(completion)[:-1]}, "result": {result}}}'.encode()
    await connection.client.jetstream().publish(f"completed.{name}.worker.1", body)
    report = await wait(connection, cursor, [1])
    reports = await reports_of(connection, cursor, report)
    for value in (report.as_json(), reports[1].as_json()):
        # As Airflow encodes what a task pushes.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(json.loads(json.dumps(value, allow_nan=False))))
    if not result.startswith("["):
        assert (report.results, report.results_left_out) == ({}, 1)
        assert (reports[1].result, reports[1].result_at) == (None, report.results_at[1])


async def test_a_task_that_may_not_store_reports_ends_as_its_jobs_did(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(*_: object, **__: object) -> None:
        raise PermissionDeniedError("publish", "published.q.x-reports", "user airflow")

    monkeypatch.setattr(seams.DOCUMENTS_STORE, denied)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = WaitReport(set(), completed=set(range(1, 700)))
    reports = await job_reports.job_reports(connection, cursor, json.loads(json.dumps(report.as_json())), None)
    assert reports.as_json()["states"] == {"completed": 699}
    assert "the server doesn't let user airflow publish to" in str(reports.problem)


async def stream(reports: Iterable[JobReport]) -> AsyncIterator[JobReport]:
    for report in reports:
        yield report


def many(count: int) -> list[JobReport]:
    """Return reports of which every third is about a dead letter."""
    return [
        JobReport(f"job-{number}", number, "dead", 3, "shop.BankError", f"busy {number}")
        if number % 3 == 0
        else JobReport(f"job-{number}", number, "completed", 1, result={"row": number})
        for number in range(1, count + 1)
    ]


async def collected(connection: NatsPyConnection, queue: WorkQueue, reports: list[JobReport]) -> JobReports:
    return await collect_job_reports(
        connection, stream(reports), queue=queue.name, task="0" * 32, events=f"{queue.name}-events"
    )


async def read(connection: NatsPyConnection, source: object, **wanted: Any) -> list[JobReport]:
    # As an XCom, it goes through JSON.
    parsed = JobReportSource(json.loads(json.dumps(source)))
    return [report async for report in parsed.read(connection, **wanted)]


@pytest.mark.slow
async def test_few_reports_are_a_list_and_many_are_parts_in_the_events_stream(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    few, lots = many(7), many(5_000)
    small = await collected(connection, queue, few)
    assert small.as_json()["reports"] == small.items() == [report.as_json() for report in few]
    assert await read(connection, small.as_json()) == few
    large = await collected(connection, queue, lots)
    document = large.as_json()
    assert len(json.dumps(document)) < 16_000
    assert (document["jobs"], document["states"]) == (5_000, {"completed": 3_334, "dead": 1_666})
    assert [report["id"] for report in document["first_failures"][:2]] == ["job-3", "job-6"]
    assert await read(connection, document) == lots
    items = large.items()
    assert 1 < len(items) < 10
    assert [report for item in items for report in await read(connection, item)] == lots
    dead = await read(connection, [items[0], items[1]], states=["dead"])
    assert [report.id for report in dead[:3]] == ["job-3", "job-6", "job-9"]
    assert {report.state for report in dead} == {"dead"}
    assert large.describe("dead").startswith(
        "job job-3 (sequence 3): shop.BankError: busy 3; job job-6 (sequence 6): shop.BankError: busy 6;"
    )
    assert large.describe("dead").endswith("(sequence 15): shop.BankError: busy 15; and 1661 more")
    assert large.describe("vanished") == ""


async def test_a_part_that_is_gone_or_isnt_one_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    item = (await collected(connection, queue, many(600))).items()[0]
    with pytest.raises(
        JobReportsGoneError, match=r"expected a part with \d+ reports at sequence 999 of .*, found none"
    ):
        await read(connection, item | {"parts": [[999, *item["parts"][0][1:]]]})
    with pytest.raises(JobReportsGoneError, match="found none"):
        await read(connection, item | {"task": "1" * 32})
    with pytest.raises(JobReportsGoneError, match="found none"):
        await read(connection, item | {"events": f"{name}-none"})
    for stream in ("a.b", "a b\r\nPUB x 0\r\n", "*", ""):
        with pytest.raises(ArgumentError, match="expected the reports on a task's jobs"):
            await read(connection, item | {"events": stream})
    await connection.api(f"STREAM.PURGE.{name}-events")
    with pytest.raises(JobReportsGoneError, match="found none"):
        await read(connection, item)
