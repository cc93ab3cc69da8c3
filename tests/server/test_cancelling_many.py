"""Cancelling jobs of many ids, and jobs by their sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream import Job, publish
from testbed.face import cancel_jobs, cancel_stored, find_cancellation, stream_info, subject_counts
from testbed.queues import make_queue, pull_jobs

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


async def test_many_ids_are_cancelled_once_each_with_their_schedules(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    jobs = [Job(b"", id="later", delay="1h"), *(Job(b"", id=f"job-{number}") for number in range(300))]
    await publish(connection, queue, jobs, subject=f"{name}.jobs.a")
    ids = [*(f"job-{number}" for number in range(300)), "later", "job-7", "unknown"]
    reports = await cancel_jobs(connection, queue, ids, "wrong price", "ann")
    assert [report.cancellation.job_id for report in reports] == [*ids[:301], "unknown"]
    assert [report.schedules for report in reports] == [0] * 300 + [1, 0]
    for job_id in ("job-0", "job-299", "later"):
        cancellation = await find_cancellation(connection, queue, job_id)
        assert cancellation is not None
        assert (cancellation.why, cancellation.by) == ("wrong price", "ann")
    events = await stream_info(connection, f"{name}-events")
    request = {"subjects_filter": f"cancelled.{name}.>"}
    subjects = (await connection.api(f"STREAM.INFO.{name}-events", request))["state"]["subjects"]
    assert sum(subjects.values()) == 302
    assert events["config"]["name"] == f"{name}-events"


async def test_jobs_are_cancelled_by_sequence_while_they_are_stored(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1m"})
    report = await publish(connection, queue, ["a", "b", "c"], subject=f"{name}.jobs.a")
    (first,) = await pull_jobs(connection, queue, 1)
    await first.ack_sync()
    assert await cancel_stored(connection, name, f"{name}-events", [*report.sequences, 99], "why", "ann") == 2
    cancelled = await subject_counts(connection, f"{name}-events", f"cancelled.{name}.*")
    assert cancelled == {f"cancelled.{name}.{sequence}": 1 for sequence in (2, 3)}
