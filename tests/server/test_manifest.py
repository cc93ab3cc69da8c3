"""The publish log outlives the server's duplicate window."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Cursor,
    Job,
    Origin,
    Publication,
    PublishError,
    PublishReport,
    connect,
    publish,
    take_cursor,
)
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest, read_manifest_sequences
from testbed import seams
from testbed.face import last_message, publish_until_killed, stream_info
from testbed.queues import eventually, make_queue, pull_jobs, store_completion
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import WorkQueue
    from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

ORIGIN = Origin("dag", "run", "task")
KEY = ORIGIN.key
WINDOW = "300ms"
AFTER_WINDOW = 0.5


async def publish_as_task(
    connection: NatsPyConnection,
    queue: WorkQueue,
    jobs: Iterable[object],
    *,
    interrupted: bool = False,
    max_tries: int = 1,
) -> PublishReport:
    """Publish as one try of a task does that waits; an interrupted one stores its jobs and records nothing afterwards.

    :param max_tries: a clear raises it
    """
    origin, subject = replace(ORIGIN, max_tries=max_tries), f"{queue.name}.jobs.x"
    if interrupted:
        await publish_until_killed(connection, queue, list(jobs), origin, subject=subject, waits=True)
        return PublishReport()
    async with Publication(connection, queue, origin, waits=True) as publication:
        with suppress(PublishError):
            await publication.publish(list(jobs), subject=subject)
    assert publication.report is not None
    return publication.report


async def close(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Close the manifest as the process does that resumes a deferred task."""
    await Publication(connection, queue, replace(ORIGIN, max_tries=1)).close()


async def begin(connection: NatsPyConnection, queue: WorkQueue) -> ManifestRecord:
    cursor = await take_cursor(connection, queue)
    begun = await Manifest(connection, queue, ORIGIN).begin(await stream_info(connection, queue.name), asdict(cursor))
    assert begun is not None
    return begun


async def last_sequence(connection: NatsPyConnection, queue: WorkQueue) -> int:
    return int((await stream_info(connection, queue.name))["state"]["last_seq"])


async def test_a_retry_after_the_duplicate_window_publishes_no_finished_job_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW)
    first = await publish_as_task(connection, queue, "abc")
    for job in await pull_jobs(connection, queue, 3):
        await job.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    again = await publish_as_task(connection, queue, "abc")
    assert (list(again.sequences), again.duplicates, again.stored) == (list(first.sequences), 3, 3)
    assert await last_sequence(connection, queue) == 3


async def test_a_retry_after_the_duplicate_window_publishes_the_jobs_that_are_missing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, discard="new", max_msgs=3)
    first = await publish_as_task(connection, queue, "abcde")
    assert [failure.index for failure in first.failures] == [3, 4]
    for job in await pull_jobs(connection, queue, 3):
        await job.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    again = await publish_as_task(connection, queue, "abcde")
    assert (list(again.sequences), again.duplicates) == ([1, 2, 3, 4, 5], 3)
    assert [job.data for job in await pull_jobs(connection, queue, 2)] == [b"d", b"e"]


@pytest.mark.parametrize("archive", [True, False])
async def test_jobs_of_an_interrupted_try_are_found(connection: NatsPyConnection, name: str, *, archive: bool) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, archive=archive, consumer={"ack_wait": "30s"})
    await connection.client.jetstream().publish(f"{name}.jobs.other", b"another publisher's")
    await publish_as_task(connection, queue, "abc", interrupted=True)
    await pull_jobs(connection, queue, 1)
    (job,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, job.metadata.sequence.stream, job_id=(job.headers or {})["Nats-Msg-Id"])
    await job.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    again = await publish_as_task(connection, queue, "abcd")
    assert (list(again.sequences), again.duplicates) == ([2, 3, 4, 5], 3)


async def test_a_job_id_of_another_publisher_does_not_count(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, duplicate_window=WINDOW, archive=False)
    await publish_as_task(connection, queue, [], interrupted=True)
    jetstream = connection.client.jetstream()
    await jetstream.publish(f"{name}.jobs.other", b"another's", headers={"Job-Id": "same"})
    (job,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, 1, job_id="same")
    await job.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    report = await publish_as_task(connection, queue, [Job(b"mine", id="same")])
    assert (list(report.sequences), report.duplicates) == ([2], 0)


async def test_a_cleared_task_whose_record_is_closed_publishes_new_jobs(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_as_task(connection, queue, "ab")
    await close(connection, queue)
    # Inside the duplicate window, so that only another id makes another job.
    for max_tries, sequences in ((2, [3, 4]), (2, [3, 4]), (3, [5, 6])):
        report = await publish_as_task(connection, queue, "ab", max_tries=max_tries)
        assert list(report.sequences) == sequences
        await close(connection, queue)


async def test_the_record_holds_the_cursor_of_the_first_try(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    first = await begin(connection, queue)
    await store_completion(connection, queue, 1)
    second = await begin(connection, queue)
    assert Cursor(**first.cursor) == Cursor(**second.cursor)
    assert first.cursor["events"] == f"{name}-events"


async def test_the_cursor_of_a_record_is_stored_under_its_old_name(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    record = await begin(connection, queue)
    message = await last_message(connection, f"{name}-events", f"published.{name}.{KEY}")
    assert message is not None
    assert Cursor(**json.loads(message.data)["mark"]) == Cursor(**record.cursor)


async def test_a_record_about_an_earlier_stream_of_the_same_name_does_not_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_as_task(connection, queue, "ab")
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name)
    report = await publish_as_task(connection, queue, "ab")
    assert (list(report.sequences), report.duplicates) == ([1, 2], 0)


async def test_jobs_scattered_among_others_are_searched_for(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MANIFEST_MAX_RUNS, 1)
    queue = await make_queue(connection, name, duplicate_window=WINDOW)
    await publish_as_task(connection, queue, "a", interrupted=True)
    await connection.client.jetstream().publish(f"{name}.jobs.other", b"between")
    first = await publish_as_task(connection, queue, "ab")
    assert list(first.sequences) == [1, 3]
    await asyncio.sleep(AFTER_WINDOW)
    again = await publish_as_task(connection, queue, "abc")
    assert (list(again.sequences), again.duplicates) == ([1, 3, 4], 2)


async def test_an_events_stream_that_captures_no_records_gets_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events={"name": f"{name}-events", "subjects": [f"completed.{name}.>"]})
    assert await Manifest(connection, queue, ORIGIN).begin(await stream_info(connection, name)) is None
    await close(connection, queue)
    assert await last_sequence(connection, queue) == 0


async def test_a_stream_of_another_purpose_that_captures_the_records_subject_gets_none(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, events={"name": f"{name}-events", "subjects": [f"completed.{name}.>"]})
    await connection.api(f"STREAM.CREATE.{name}-other", {"name": f"{name}-other", "subjects": [f"published.{name}.>"]})
    assert await Manifest(connection, queue, ORIGIN).begin(await stream_info(connection, name)) is None
    assert (await stream_info(connection, f"{name}-other"))["state"]["last_seq"] == 0


async def test_a_record_that_cannot_be_stored_just_now_is_an_error(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    log = Manifest(connection, queue, ORIGIN)
    info = await stream_info(connection, name)
    events = await stream_info(connection, f"{name}-events")
    await connection.api(f"STREAM.UPDATE.{name}-events", events["config"] | {"sealed": True})
    with pytest.raises(ApiError, match="sealed"):
        await log.begin(info)


async def test_jobs_are_sent_while_others_are_recorded(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than fit on one page of the manifest.
    queue, jobs, saved = await make_queue(connection, name), [f"{number}" for number in range(9_000)], list[int]()
    save_progress = Manifest.save_progress

    async def save_once_all_are_stored(manifest: Manifest, report: PublishReport) -> None:
        async def are_stored() -> bool:
            return await last_sequence(connection, queue) == len(jobs)

        await eventually(are_stored)
        await save_progress(manifest, report)
        saved.append(report.stored)

    monkeypatch.setattr(Manifest, "save_progress", save_once_all_are_stored)
    subject, origin = f"{name}.jobs.x", replace(ORIGIN, max_tries=1)
    first = await publish(connection, queue, jobs, subject=subject, origin=origin)
    assert (first.stored, saved) == (len(jobs), [len(jobs)])
    # Each is in the manifest once.
    recorded = await read_manifest_sequences(connection, f"{name}-events", name, origin.manifest_key)
    assert recorded is not None
    assert sorted(recorded) == list(first.sequences)


@pytest.mark.slow
async def test_a_record_that_a_lost_connection_took_along_is_stored_once_it_is_back(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs, subject = [Job("a", id="a")], f"{name}.jobs.x"
    async with tcp_proxy(nats.port) as proxy, connect(ConnectionSettings(servers=(proxy.url,))) as unlucky:
        proxy.pause_at(b'"closed":true')
        publishing = asyncio.create_task(
            publish(unlucky, queue, jobs, subject=subject, origin=replace(ORIGIN, max_tries=0))
        )
        await proxy.found.wait()
        proxy.drop()
        proxy.cut()
        proxy.mend()
        assert list((await publishing).sequences) == [1]
    # Nothing is waited for, so a task that is cleared publishes anew.
    cleared = await publish(connection, queue, jobs, subject=subject, origin=replace(ORIGIN, max_tries=1))
    assert list(cleared.sequences) == [2]
