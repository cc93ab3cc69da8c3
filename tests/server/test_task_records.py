"""The records that name the tasks which published jobs: who can store them, and how long they are kept."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    PublishError,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
)
from airflow_provider_jetstream.jetstream.contract import manifest_filter, manifest_subject
from airflow_provider_jetstream.jetstream.dead_letters.facts import LetterOrigins, resolve_origins
from airflow_provider_jetstream.jetstream.origin import TaskTry
from airflow_provider_jetstream.jetstream.publishing import manifest_record
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.manifest_record import (
    TaskRecord,
    parse_manifest_record,
    remove_unneeded_manifests,
)
from testbed import seams
from testbed.dead_letters import change_stream, publish_raw, stream_messages
from testbed.face import PreparedJobs, publish_prepared, stream_info, summarise_dead_letters
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    running_mover,
    small_queue,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import PublishReport, WorkQueue
    from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

ORIGIN = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "send", 3)
OTHER = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "other")


@pytest.fixture
def without_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.MANIFEST_REMOVAL_MARGIN, timedelta())


def forgetful(name: str) -> dict[str, Any]:
    """The events of a queue, which forget within a tenth of a second."""
    return {"events": {"name": f"{name}-events", "max_age": "100ms", "duplicate_window": "100ms"}}


async def resolved(connection: NatsPyConnection, queue: WorkQueue, *keys: str) -> dict[str, Origin]:
    return await resolve_origins(connection, queue.name, f"{queue.name}-events", keys or (ORIGIN.key, OTHER.key))


async def publish_as(connection: NatsPyConnection, queue: WorkQueue, origin: Origin, *jobs: object) -> list[int]:
    report = await publish(connection, queue, list(jobs), subject=f"{queue.name}.jobs.a", origin=origin)
    return list(report.sequences)


async def record_of(connection: NatsPyConnection, queue: WorkQueue, origin: Origin = ORIGIN) -> ManifestRecord:
    stored = await TaskRecord(connection, queue.name, f"{queue.name}-events", origin.key).read()
    assert stored is not None
    return stored.record


async def removable(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Remove records once they are old enough."""
    await asyncio.sleep(0.15)
    return await remove_unneeded_manifests(connection, queue)


@pytest.mark.slow
async def test_a_record_outlives_the_events_and_is_stored_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, **forgetful(name))
    await connection.client.jetstream().publish(f"completed.{name}.worker.1", b"an end")
    await publish_as(connection, queue, ORIGIN, {"id": "a"})
    await publish_as(connection, queue, ORIGIN, {"id": "b"}, {"id": "c"})
    await until_stored(connection, f"{name}-events", 1)
    await asyncio.sleep(0.3)
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}
    record = await record_of(connection, queue)
    assert (record.first_job, record.last_job, record.closed, record.published) == (1, 3, True, 2)
    (message,) = await stream_messages(connection, f"{name}-events")
    assert message.header("Nats-TTL") == "never"


async def test_only_a_record_whose_names_give_the_key_is_believed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish_as(connection, queue, ORIGIN, b"a")
    genuine = (await record_of(connection, queue)).model_dump_json(by_alias=True, exclude_none=True).encode()
    jetstream = connection.client.jetstream()
    subject = manifest_subject(name, OTHER.key)
    bodies = [genuine, b"", b"\xff", b"{}", b"[" * 100_000, genuine.replace(b'"other"', b'"other\\ud800"')]
    for body in bodies:
        await jetstream.publish(subject, body)
        assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}
    # Values of a header that anybody may write.
    keys = ["*", ">", "", "a.b", "x" * 5_000, ORIGIN.key.upper(), f"{ORIGIN.key} ", "\udcff", f"{ORIGIN.key}\n"]
    assert await resolved(connection, queue, *keys) == {}
    assert await resolve_origins(connection, name, f"{name}-nowhere", [ORIGIN.key]) == {}
    assert await resolve_origins(connection, name, None, [ORIGIN.key]) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_a_record_is_removed_once_no_job_letter_or_copy_names_the_task(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, **forgetful(name))
    await publish_as(connection, queue, ORIGIN, b"a")
    # A job that waits.
    assert await removable(connection, queue) == 0
    await exhaust_deliveries(connection, queue, 1)
    # A letter.
    assert await removable(connection, queue) == 0
    await redrive_dead_letters(connection, queue)
    # A copy.
    assert await removable(connection, queue) == 0
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}
    (message,) = await pull_jobs(connection, queue, 1)
    await store_worker_record(connection, queue, 2)
    await message.term()
    await until_stored(connection, name, 0)
    # A letter whose body is only in the dead letter queue.
    assert await removable(connection, queue) == 0
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.origin) == (2, ORIGIN)
    await redrive_dead_letters(connection, queue)
    assert await removable(connection, queue) == 0
    await process_all(connection, queue)
    assert await removable(connection, queue) == 1
    assert await resolved(connection, queue) == {}


async def store_worker_record(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> None:
    """Store the record of a job that a foreign worker gives up."""
    (job,) = await stream_messages(connection, queue.name)
    headers = {
        "Airflow-Task": ORIGIN.key,
        "Dead-Letter-Version": "1",
        "Dead-Letter-Subject": job.subject,
        "Dead-Letter-Time": job.time,
        "Dead-Letter-Stream-Created": (await stream_info(connection, queue.name))["created"],
        "Dead-Letter-Reason": "terminated",
    }
    subject = f"dead.{queue.name}.worker.{sequence}"
    await connection.client.jetstream().publish(subject, b"a", headers=headers)


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_a_record_is_kept_while_the_archive_names_the_task(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=True, **forgetful(name))
    await publish_as(connection, queue, ORIGIN, b"a")
    await process_all(connection, queue)
    assert await removable(connection, queue) == 0
    await connection.api(f"STREAM.PURGE.{name}-archive")
    assert await removable(connection, queue) == 1


@pytest.mark.usefixtures("without_margin")
async def test_letters_of_an_earlier_round_keep_the_record_of_a_cleared_task(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, **forgetful(name))
    await publish_as(connection, queue, ORIGIN, b"a")
    (message,) = await pull_jobs(connection, queue, 1)
    await store_worker_record(connection, queue, 1)
    await message.term()
    log = Manifest(connection, queue, ORIGIN)
    await log.begin(await stream_info(connection, name))
    await log.close()
    assert await removable(connection, queue) == 0
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(dag_id="shop")))
    await process_all(connection, queue)
    assert await removable(connection, queue) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_a_record_is_kept_while_the_server_may_make_jobs_of_schedules(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, schedules=True, **forgetful(name))
    await publish_as(connection, queue, ORIGIN, Job(b"a", delay="600ms"))
    assert (await record_of(connection, queue)).scheduled
    assert await removable(connection, queue) == 0
    async with running_mover(connection, queue):
        await eventually(lambda: has_job(connection, queue))
    # Nothing waits any more, but the record is older than the job that the server has made.
    assert await removable(connection, queue) == 0
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.origin == ORIGIN
    await redrive_dead_letters(connection, queue)
    await process_all(connection, queue)

    async def forgotten() -> bool:
        await removable(connection, queue)
        return await resolved(connection, queue) == {}

    await eventually(forgotten)


async def has_job(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    return bool(await stream_messages(connection, queue.name, f"{queue.name}.jobs.>"))


@pytest.mark.usefixtures("without_margin")
async def test_tasks_remove_the_records_of_others_that_nothing_needs(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MANIFEST_REMOVAL_INTERVAL, 1)
    queue = await make_queue(connection, name, archive=False, **forgetful(name))
    await publish_as(connection, queue, ORIGIN, b"a")
    await process_all(connection, queue)
    await asyncio.sleep(0.15)
    await publish_as(connection, queue, OTHER, b"b")
    assert await resolved(connection, queue) == {OTHER.key: OTHER}


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_provisioning_removes_the_records_that_nothing_needs(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, **forgetful(name))
    for number in range(30):
        await publish_as(connection, queue, replace(ORIGIN, map_index=number), b"a")
    await process_all(connection, queue)
    await asyncio.sleep(0.15)
    await provision(connection, queue)
    assert await stream_messages(connection, f"{name}-events", manifest_filter(name)) == []


@pytest.mark.slow
async def test_a_redrive_leaves_the_log_of_a_task_that_waits_as_it_is(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    log = Manifest(connection, queue, ORIGIN)
    assert await log.begin(await stream_info(connection, name)) is not None
    jobs = PreparedJobs([b"a"], subject=f"{name}.jobs.a", origin=ORIGIN, batch="", by_key=True)
    report = await publish_prepared(connection, jobs)
    await log.record_stored(report)
    await exhaust_deliveries(connection, queue, 1)
    await redrive_dead_letters(connection, queue)
    record = await record_of(connection, queue)
    assert (record.closed, record.runs, record.last_job) == (False, [(0, 1, 1)], 2)
    # Its own view is older than the record that the redrive has stored.
    await log.close()
    record = await record_of(connection, queue)
    assert (record.closed, record.published, record.first_job, record.last_job) == (True, 1, 1, 2)


async def test_a_record_that_is_gone_is_stored_again_with_what_the_letter_says(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_as(connection, queue, ORIGIN, b"a")
    await exhaust_deliveries(connection, queue, 1)
    # It preserves the letter together with the task.
    await summarise_dead_letters(connection, queue)
    await connection.api(f"STREAM.PURGE.{name}-events")
    await redrive_dead_letters(connection, queue)
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}


async def test_events_that_allow_no_time_to_live_store_the_record_with_a_warning(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    config = (await stream_info(connection, f"{name}-events"))["config"]
    await connection.api(f"STREAM.DELETE.{name}-events")
    del config["allow_msg_ttl"]
    await connection.api(f"STREAM.CREATE.{name}-events", config)
    with caplog.at_level(logging.WARNING):
        await publish_as(connection, queue, ORIGIN, b"a")
    assert f"{name}-events doesn't allow messages a time to live of their own" in caplog.text
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}
    # Provisioning puts that right, from nats-server 2.12 on.
    await provision(connection, queue)
    changed = (await stream_info(connection, f"{name}-events"))["config"].get("allow_msg_ttl", False)
    assert changed is (connection.api_level >= 2)


async def test_an_older_server_is_warned_of(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "api_level", 0)
    with caplog.at_level(logging.WARNING):
        await provision(connection, queue := small_queue(name))
    assert f"The server is older than 2.11, so {name}-events forgets after 7d which tasks published" in caplog.text
    await publish_as(connection, queue, ORIGIN, b"a")
    messages = await stream_messages(connection, f"{name}-events")
    assert {message.header("Nats-TTL") for message in messages} == {None}
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"deny_delete": True}, {"deny_purge": True}])
async def test_events_that_allow_no_removal_are_no_error(
    connection: NatsPyConnection, name: str, change: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name)
    await change_stream(connection, f"{name}-events", **change)
    await publish_as(connection, queue, ORIGIN, b"a")
    await publish_as(connection, queue, ORIGIN, b"b")
    assert await resolved(connection, queue) == {ORIGIN.key: ORIGIN}


@pytest.mark.slow
async def test_a_job_is_never_stored_before_its_task_is_known(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    seen: list[bool] = []

    async def look() -> None:
        seen.append(ORIGIN.key in await resolved(connection, queue))

    tasks: list[asyncio.Task[None]] = []

    subscription = await connection.subscribe_raw(
        f"{name}.jobs.>", lambda *_: tasks.append(asyncio.ensure_future(look()))
    )
    await publish_as(connection, queue, ORIGIN, *(b"x" for _ in range(10)))
    await eventually(lambda: len(tasks) == 10)
    await asyncio.gather(*tasks)
    await subscription.unsubscribe()
    assert seen == [True] * 10


async def test_a_publication_that_fails_leaves_an_open_record(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    with suppress(PublishError):
        await publish(connection, queue, [b"a", object()], subject=f"{name}.jobs.a", origin=ORIGIN)
    assert (await record_of(connection, queue)).published == 1


async def test_publishing_as_the_task_of_an_operator_leaves_its_log_open(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    log = Manifest(connection, queue, ORIGIN)
    await log.begin(await stream_info(connection, name))
    await publish_as(connection, queue, ORIGIN, b"a")
    record = await record_of(connection, queue)
    assert (record.closed, record.first_job, record.last_job) == (False, 1, 1)
    again = await Manifest(connection, queue, ORIGIN).begin(await stream_info(connection, name))
    assert again is not None
    assert again.round == 0


async def test_events_that_take_no_record_keep_no_job_from_being_published(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    await change_stream(connection, f"{name}-events", discard="new", max_msgs=1)
    await connection.client.jetstream().publish(f"completed.{name}.worker.1", b"full")
    with caplog.at_level(logging.WARNING):
        await publish_as(connection, queue, ORIGIN, b"a")
    assert "The task's record couldn't be stored, so its jobs name the task as far as it fits" in caplog.text
    (job,) = await stream_messages(connection, name)
    assert (job.header("Airflow-Task"), job.header("Airflow-Dag-Id")) == (None, "shop")
    # One message fits, and what the call has published doesn't.
    await change_stream(connection, f"{name}-events", max_msgs=2)
    assert await publish_as(connection, queue, OTHER, b"b") == [2]
    assert "What the task has published couldn't be recorded" in caplog.text
    assert await resolved(connection, queue) == {OTHER.key: OTHER}


async def test_a_task_that_is_killed_while_it_removes_the_records_of_others_has_not_closed_its_own(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.MANIFEST_REMOVAL_INTERVAL, 1)
    queue = await make_queue(connection, name)
    log = Manifest(connection, queue, ORIGIN)
    begun = await log.begin(await stream_info(connection, name))
    assert begun is not None
    await publish_as(connection, queue, ORIGIN, b"a")

    async def killed(*_: object) -> int:
        raise asyncio.CancelledError

    monkeypatch.setattr(seams.MANIFEST_REMOVE_UNNEEDED_MANIFESTS, killed)
    with pytest.raises(asyncio.CancelledError):
        await log.close()
    again = await Manifest(connection, queue, ORIGIN).begin(await stream_info(connection, name))
    assert again is not None
    assert again.round == 0


# Records of tasks on a server where others publish too: garbage, forgeries, lost streams, and clocks that are off.


RECORDS_ORIGIN = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "send")


async def publish_as_records(
    connection: NatsPyConnection, queue: WorkQueue, origin: Origin, *jobs: object
) -> PublishReport:
    return await publish(connection, queue, list(jobs), subject=f"{queue.name}.jobs.a", origin=origin)


async def resolved_records(connection: NatsPyConnection, queue: WorkQueue) -> set[Origin]:
    keys = (RECORDS_ORIGIN.key, OTHER.key)
    return set((await resolve_origins(connection, queue.name, f"{queue.name}-events", keys)).values())


async def store_raw(connection: NatsPyConnection, queue: WorkQueue, key: str, body: bytes) -> None:
    await connection.client.jetstream().publish(manifest_subject(queue.name, key), body)


async def begin(connection: NatsPyConnection, queue: WorkQueue) -> tuple[Manifest, ManifestRecord, Any]:
    log = Manifest(connection, queue, RECORDS_ORIGIN)
    cursor = asdict(await take_cursor(connection, queue))
    begun = await log.begin(await stream_info(connection, queue.name), cursor)
    assert begun is not None
    return log, begun, log.known


async def publish_try(connection: NatsPyConnection, queue: WorkQueue, jobs: Iterable[object]) -> PublishReport:
    """Publish as a try of an operator that is killed before it records what it has stored."""
    log, record, _ = await begin(connection, queue)
    origin = replace(RECORDS_ORIGIN, round=record.round)
    prepared = PreparedJobs(jobs, subject=f"{queue.name}.jobs.a", origin=origin, batch="", queue=queue, by_key=True)
    return await publish_prepared(connection, prepared, known=log.sequence_of)


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"*", b">", b"a b", b"a.b", b"", b"\xff", b"x" * 60_000])
async def test_a_redrive_of_jobs_with_other_keys_leaves_the_records_of_tasks_alone(
    nats: NatsServer, connection: NatsPyConnection, name: str, key: bytes
) -> None:
    queue = await make_queue(connection, name)
    for origin in (RECORDS_ORIGIN, OTHER):
        await publish_as_records(connection, queue, origin, b"a")
    await process_all(connection, queue)
    records = await stream_messages(connection, f"{name}-events", f"published.{name}.*")
    await publish_raw(nats, f"{name}.jobs.a", b"Airflow-Task: " + key, b"foreign")
    await publish_jobs(connection, queue, ["other"])
    await exhaust_deliveries(connection, queue, 2)
    assert 4 in (await redrive_dead_letters(connection, queue)).redriven
    assert await stream_messages(connection, f"{name}-events", f"published.{name}.*") == records


async def test_keys_that_no_task_has_are_not_remembered(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    origins = LetterOrigins(connection, name, f"{name}-events")
    assert await origins.resolve(["x" * 1_000_000, "*"]) == {}
    assert origins._requested == set()  # noqa: SLF001


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"{}", b"[" * 100_000, b'{"type":"io.airflow.jetstream.v1.published"}', b"forged"]
)
async def test_garbage_in_the_place_of_a_record_keeps_no_task_from_publishing(
    connection: NatsPyConnection, name: str, body: bytes
) -> None:
    queue = await make_queue(connection, name)
    if body == b"forged":
        await publish_as_records(connection, queue, OTHER, b"x")
        *_, forged = await stream_messages(connection, f"{name}-events", manifest_subject(name, OTHER.key))
        body = forged.data
    await store_raw(connection, queue, RECORDS_ORIGIN.key, body)
    log, record, _ = await begin(connection, queue)
    assert (record.round, record.origin) == (0, RECORDS_ORIGIN)
    report = await publish_as_records(connection, queue, RECORDS_ORIGIN, b"a")
    await store_raw(connection, queue, RECORDS_ORIGIN.key, body)
    await log.record_stored(report)
    assert RECORDS_ORIGIN in await resolved_records(connection, queue)
    await store_raw(connection, queue, RECORDS_ORIGIN.key, body)
    await log.close()
    assert RECORDS_ORIGIN in await resolved_records(connection, queue)


@pytest.mark.slow
@pytest.mark.parametrize(
    "forged",
    [
        {"began_at": "2026-01-01T00:00:00"},
        {"round": -1},
        {"round": 10**30},
        {"queue_from": -5},
        {"last_job": -1},
        {"runs": [[0, 1, -3]]},
        {"map_index": [1]},
        {"parts": [[-1, 1, "0" * 32]]},
        {"parts": [[2**70, 1, "0" * 32]]},
        {"parts": [7]},
        {"rows": 7},
    ],
)
async def test_a_record_of_impossible_numbers_is_no_record(
    connection: NatsPyConnection, name: str, forged: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name)
    _, record, _ = await begin(connection, queue)
    fields = json.loads(record.model_dump_json(by_alias=True)) | forged
    assert parse_manifest_record(json.dumps(fields).encode()) is None
    await store_raw(connection, queue, RECORDS_ORIGIN.key, json.dumps(fields).encode())
    _, again, stored = await begin(connection, queue)
    assert (again.round, again.queue_from, len(stored)) == (0, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mark", [{"events_from": "x"}, {"events_from": 10**30}, {"stream": "other"}, {"events_from": -1}, {}]
)
async def test_a_cursor_that_somebody_stored_is_not_believed(
    connection: NatsPyConnection, name: str, mark: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name)
    _, record, _ = await begin(connection, queue)
    await store_raw(
        connection,
        queue,
        RECORDS_ORIGIN.key,
        record.model_copy(update={"cursor": mark}).model_dump_json(by_alias=True).encode(),
    )
    _, again, _ = await begin(connection, queue)
    cursor = await take_cursor(connection, queue)
    position = again.position("events_from")
    resumed = cursor.resumed(position or 1, again.position("dead_letters_from") or 1)
    assert resumed == replace(cursor, events_from=1, dead_letters_from=1)


async def test_a_recreated_events_stream_is_read_from_its_start(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for _ in range(20):
        await connection.client.jetstream().publish(f"completed.{name}.worker.1", b"an end")
    earlier = await take_cursor(connection, queue)
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await connection.client.jetstream().publish(f"completed.{name}.worker.1", b"an end")
    now = await take_cursor(connection, queue)
    assert now.resumed(earlier.events_from, earlier.dead_letters_from).events_from == 1


async def test_a_retry_within_the_duplicate_window_finds_jobs_that_the_restarted_server_forgot(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name)
        await publish_try(connection, queue, [b"a", b"b", b"c"])
        await process_all(connection, queue)
    own_nats.kill()
    own_nats.restart()
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        again = await publish_try(connection, queue, [b"a", b"b", b"c"])
        assert (list(again.sequences), again.duplicates) == ([1, 2, 3], 3)
        assert (await stream_info(connection, name))["state"]["last_seq"] == 3


@pytest.mark.slow
async def test_a_record_that_is_lost_while_its_task_publishes_is_stored_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    log, *_ = await begin(connection, queue)
    report = await publish_as_records(connection, queue, RECORDS_ORIGIN, b"a")
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await log.record_stored(report)
    assert await resolved_records(connection, queue) == {RECORDS_ORIGIN}
    await connection.api(f"STREAM.PURGE.{name}-events")
    await log.close()
    assert await resolved_records(connection, queue) == {RECORDS_ORIGIN}
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.origin == RECORDS_ORIGIN


async def test_a_try_that_was_given_up_changes_nothing_of_a_cleared_task(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    given_up, *_ = await begin(connection, queue)
    other, *_ = await begin(connection, queue)
    report = await publish_as_records(connection, queue, RECORDS_ORIGIN, b"a", b"b")
    await other.close(report)
    _, cleared, _ = await begin(connection, queue)
    assert cleared.round == 1
    await given_up.record_stored(report)
    await given_up.close(report)
    _, resumed, stored = await begin(connection, queue)
    assert (resumed.round, resumed.closed, len(stored)) == (1, False, 0)


async def old_record(connection: NatsPyConnection, queue: WorkQueue, origin: Origin, **fields: Any) -> ManifestRecord:
    """Publish a job as a task and finish it; return the task's record."""
    await publish_as_records(connection, queue, origin, b"a")
    await process_all(connection, queue)
    begun, message = await stream_messages(connection, f"{queue.name}-events", manifest_subject(queue.name, origin.key))
    assert begun.header("Nats-TTL") == message.header("Nats-TTL") == "never"
    record = parse_manifest_record(message.data)
    assert record is not None
    if fields:
        changed = record.model_copy(update=fields).model_dump_json(by_alias=True, exclude_none=True)
        subject, never = manifest_subject(queue.name, origin.key), {"Nats-TTL": "never"}
        await connection.client.jetstream().publish(subject, changed.encode(), headers=never)
        await connection.api(f"STREAM.PURGE.{queue.name}-events", {"filter": subject, "keep": 1})
    return record


async def test_a_machine_whose_clock_is_ahead_removes_no_record(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateDatetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=400)

    queue = await make_queue(connection, name, archive=False)
    await old_record(connection, queue, RECORDS_ORIGIN)
    monkeypatch.setattr(manifest_record, "datetime", LateDatetime)
    assert await remove_unneeded_manifests(connection, queue) == 0
    assert await resolved_records(connection, queue) == {RECORDS_ORIGIN}


def forgetful_records(name: str, age: str = "100ms") -> dict[str, Any]:
    return {"events": {"name": f"{name}-events", "max_age": age, "duplicate_window": "100ms"}, "archive": False}


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_records_that_parked_letters_need_do_not_keep_all_later_ones(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **forgetful_records(name))
    for number in range(4):
        await old_record(connection, queue, replace(RECORDS_ORIGIN, map_index=number))
    headers = {"Dead-Letter-Version": "1", "Dead-Letter-Parked": "why"}
    for sequence in (1, 2):
        await connection.client.jetstream().publish(f"parked.{name}.worker.{sequence}", b"a", headers=headers)
    await asyncio.sleep(0.2)
    for _ in range(50):
        await remove_unneeded_manifests(connection, queue, at_most=2)
    left = await stream_messages(connection, f"{name}-events", f"published.{name}.*")
    assert {json.loads(message.data)["map_index"] for message in left} == {0, 1}


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_the_record_of_a_killed_task_stays_while_a_job_that_it_stored_later_waits(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **forgetful_records(name, "600ms"))
    await begin(connection, queue)
    await asyncio.sleep(0.3)
    # Stored by the killed task, a while after its record.
    await publish_jobs(connection, queue, ["a"], headers={"Airflow-Task": RECORDS_ORIGIN.key})
    await asyncio.sleep(0.5)
    assert await remove_unneeded_manifests(connection, queue) == 0
    await process_all(connection, queue)
    assert await remove_unneeded_manifests(connection, queue) == 1


@pytest.mark.usefixtures("without_margin")
async def test_a_record_that_is_replaced_meanwhile_still_names_its_schedules(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, **forgetful_records(name))
    await old_record(connection, queue, RECORDS_ORIGIN, scheduled=True)
    await asyncio.sleep(0.2)
    end_schedules = manifest_record._end_schedules  # noqa: SLF001

    async def publish_meanwhile(*args: Any) -> None:
        await publish_as_records(connection, queue, RECORDS_ORIGIN, b"more")
        await end_schedules(*args)

    monkeypatch.setattr(manifest_record, "_end_schedules", publish_meanwhile)
    await remove_unneeded_manifests(connection, queue)
    last = (await stream_messages(connection, f"{name}-events", f"published.{name}.*"))[-1]
    assert json.loads(last.data)["scheduled"] is True


@pytest.mark.usefixtures("without_margin")
async def test_the_record_of_the_beginning_stays_beside_the_last_one_and_goes_with_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **forgetful_records(name, "600ms"))
    subject, task = manifest_subject(name, ORIGIN.key), replace(ORIGIN, max_tries=0)

    async def records() -> list[bool]:
        return [
            json.loads(message.data)["closed"]
            for message in await stream_messages(connection, f"{name}-events", subject)
        ]

    assert await publish_as(connection, queue, task, b"a") == [1]
    assert await records() == [False, True]
    # A retry stores nothing again, and leaves one record; a clear publishes anew.
    assert await publish_as(connection, queue, task, b"a") == [1]
    assert await records() == [True]
    assert await publish_as(connection, queue, replace(task, max_tries=1), b"a") == [2]
    # A run of the same name that was made again has records of its own.
    again = replace(task, max_tries=0, attempt=TaskTry(run_started="later", number=1))
    earlier = replace(OTHER, max_tries=0, attempt=TaskTry(run_started="before", number=1))
    assert await publish_as(connection, queue, earlier, b"a") == [3]
    assert await publish_as(connection, queue, replace(earlier, attempt=again.attempt), b"a") == [4]
    await process_all(connection, queue)

    async def are_gone() -> bool:
        await remove_unneeded_manifests(connection, queue)
        left = await stream_messages(connection, f"{name}-events", f"published.{name}.*")
        return not {subject, manifest_subject(name, OTHER.key)} & {message.subject for message in left}

    await eventually(are_gone)
