"""One report per job: id, state, attempts, error and result, whoever did the job, and however many there are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from airflow_provider_jetstream.jetstream import (
    Cursor,
    Job,
    JobReport,
    WaitPolicy,
    WaitReport,
    publish,
    publish_with_handle,
    read_job_reports,
    take_cursor,
    wait,
    wait_by_handle,
)
from airflow_provider_jetstream.jetstream.contract import MSG_ID, copy_subject
from airflow_provider_jetstream.jetstream.documents import DocumentName
from airflow_provider_jetstream.jetstream.errors import (
    ArgumentError,
    JobReportsGoneError,
    JobsDeadError,
    PermissionDeniedError,
)
from airflow_provider_jetstream.jetstream.waiting.job_reports import (
    JobIds,
    JobReports,
    JobReportSource,
    collect_job_reports,
)
from airflow_provider_jetstream.tasks import job_reports
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.queues import make_queue, publish_jobs, pull_jobs, running_worker, store_completion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)


class AddressError(Exception):
    pass


def send(job: Any) -> dict[str, int]:
    if job.body == b"bad":
        raise AddressError("no such address: x@")
    return {"sent": 1}


def names(ids: dict[int, str]) -> JobIds:
    known = JobIds()
    known._extend([job_id.encode() for job_id in ids.values()])  # noqa: SLF001
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


async def test_cancelled_and_unaccounted_jobs_are_reported_with_the_reason(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    report = WaitReport(set(), cancelled={1: "ann: wrong price"}, unaccounted={2}, attempts={1: 0})
    await store_completion(
        connection, queue, 1, type="io.airflow.jetstream.v1.cancelled", job_id="ada", why="wrong price", by="ann"
    )
    assert await reports_of(connection, cursor, report) == {
        1: JobReport("ada", 1, "cancelled", None, None, "ann: wrong price"),
        2: JobReport(None, 2, "unaccounted", None, None, "it is gone without a stored end"),
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
    assert large.describe("unaccounted") == ""


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
