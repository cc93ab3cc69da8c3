"""Records of tasks on a server where others publish too: garbage, forgeries, lost streams, and clocks that are off."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Origin,
    connect,
    connection_settings,
    find_dead_letters,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
)
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter_origins import LetterOrigins
from airflow_provider_jetstream.jetstream.publishing import manifest_record
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.manifest_record import (
    parse_manifest_head,
    remove_unneeded_manifests,
)
from testbed import seams
from testbed.dead_letters import publish_raw, stream_messages
from testbed.face import AskedForEach, prepare_jobs, publish_prepared, resolve_origins, stream_info
from testbed.queues import exhaust_deliveries, make_queue, process_all, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import PublishReport, WorkQueue
    from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestHead
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

ORIGIN = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "send")
OTHER = Origin("shop", "manual__2026-01-01T00:00:00+00:00", "other")


async def publish_as(connection: NatsPyConnection, queue: WorkQueue, origin: Origin, *jobs: object) -> PublishReport:
    return await publish(connection, queue, list(jobs), subject=f"{queue.name}.jobs.a", origin=origin)


async def resolved(connection: NatsPyConnection, queue: WorkQueue) -> set[Origin]:
    keys = (ORIGIN.key, OTHER.key)
    return set((await resolve_origins(connection, queue.name, f"{queue.name}-events", keys)).values())


async def store_raw(connection: NatsPyConnection, queue: WorkQueue, key: str, body: bytes) -> None:
    await connection.client.jetstream().publish(manifest_subject(queue.name, key), body)


async def begin(connection: NatsPyConnection, queue: WorkQueue) -> tuple[Manifest, ManifestHead, Any]:
    log = Manifest(connection, queue, ORIGIN)
    cursor = asdict(await take_cursor(connection, queue))
    begun = await log.begin(await stream_info(connection, queue.name), cursor)
    assert begun is not None
    return log, begun, log.known


async def publish_try(connection: NatsPyConnection, queue: WorkQueue, jobs: Iterable[object]) -> PublishReport:
    """Publish as a try of an operator that is killed before it records what it has stored."""
    log, record, _ = await begin(connection, queue)
    origin = replace(ORIGIN, round=record.round)
    prepared = prepare_jobs(jobs, subject=f"{queue.name}.jobs.a", origin=origin, batch="", queue=queue, by_key=True)
    return await publish_prepared(connection, prepared, known=AskedForEach(log.sequence_of))


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"*", b">", b"a b", b"a.b", b"", b"\xff", b"x" * 60_000])
async def test_a_redrive_of_jobs_with_other_keys_leaves_the_records_of_tasks_alone(
    nats: NatsServer, connection: NatsPyConnection, name: str, key: bytes
) -> None:
    queue = await make_queue(connection, name)
    for origin in (ORIGIN, OTHER):
        await publish_as(connection, queue, origin, b"a")
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
        await publish_as(connection, queue, OTHER, b"x")
        (forged,) = await stream_messages(connection, f"{name}-events", manifest_subject(name, OTHER.key))
        body = forged.data
    await store_raw(connection, queue, ORIGIN.key, body)
    log, record, _ = await begin(connection, queue)
    assert (record.round, record.origin) == (0, ORIGIN)
    report = await publish_as(connection, queue, ORIGIN, b"a")
    await store_raw(connection, queue, ORIGIN.key, body)
    await log.record_stored(report)
    assert ORIGIN in await resolved(connection, queue)
    await store_raw(connection, queue, ORIGIN.key, body)
    await log.close()
    assert ORIGIN in await resolved(connection, queue)


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
    assert parse_manifest_head(json.dumps(fields).encode()) is None
    await store_raw(connection, queue, ORIGIN.key, json.dumps(fields).encode())
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
        ORIGIN.key,
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
    report = await publish_as(connection, queue, ORIGIN, b"a")
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await log.record_stored(report)
    assert await resolved(connection, queue) == {ORIGIN}
    await connection.api(f"STREAM.PURGE.{name}-events")
    await log.close()
    assert await resolved(connection, queue) == {ORIGIN}
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.origin == ORIGIN


async def test_a_try_that_was_given_up_changes_nothing_of_a_cleared_task(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    given_up, *_ = await begin(connection, queue)
    other, *_ = await begin(connection, queue)
    report = await publish_as(connection, queue, ORIGIN, b"a", b"b")
    await other.close(report)
    _, cleared, _ = await begin(connection, queue)
    assert cleared.round == 1
    await given_up.record_stored(report)
    await given_up.close(report)
    _, resumed, stored = await begin(connection, queue)
    assert (resumed.round, resumed.closed, len(stored)) == (1, False, 0)


async def old_record(connection: NatsPyConnection, queue: WorkQueue, origin: Origin, **fields: Any) -> ManifestHead:
    """Publish a job as a task and finish it; return the task's record."""
    await publish_as(connection, queue, origin, b"a")
    await process_all(connection, queue)
    (message,) = await stream_messages(connection, f"{queue.name}-events", manifest_subject(queue.name, origin.key))
    record = parse_manifest_head(message.data)
    assert record is not None
    if fields:
        changed = record.model_copy(update=fields).model_dump_json(by_alias=True, exclude_none=True)
        subject, never = manifest_subject(queue.name, origin.key), {"Nats-TTL": "never"}
        await connection.client.jetstream().publish(subject, changed.encode(), headers=never)
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}-events", {"seq": message.sequence})
    return record


async def test_a_machine_whose_clock_is_ahead_removes_no_record(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateDatetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=400)

    queue = await make_queue(connection, name, archive=False)
    await old_record(connection, queue, ORIGIN)
    monkeypatch.setattr(manifest_record, "datetime", LateDatetime)
    assert await remove_unneeded_manifests(connection, queue) == 0
    assert await resolved(connection, queue) == {ORIGIN}


@pytest.fixture
def without_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.MANIFEST_REMOVAL_MARGIN, timedelta())


def forgetful(name: str, age: str = "100ms") -> dict[str, Any]:
    return {"events": {"name": f"{name}-events", "max_age": age, "duplicate_window": "100ms"}, "archive": False}


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_records_that_parked_letters_need_do_not_keep_all_later_ones(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **forgetful(name))
    for number in range(4):
        await old_record(connection, queue, replace(ORIGIN, map_index=number))
    headers = {"Dead-Letter-Version": "1", "Dead-Letter-Parked": "why"}
    for sequence in (1, 2):
        await connection.client.jetstream().publish(f"parked.{name}.worker.{sequence}", b"a", headers=headers)
    await asyncio.sleep(0.2)
    removed = 0
    for _ in range(50):
        removed += await remove_unneeded_manifests(connection, queue, at_most=2)
    assert removed == 2
    left = await stream_messages(connection, f"{name}-events", f"published.{name}.*")
    assert [json.loads(message.data)["map_index"] for message in left] == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("without_margin")
async def test_the_record_of_a_killed_task_stays_while_a_job_that_it_stored_later_waits(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **forgetful(name, "600ms"))
    await begin(connection, queue)
    await asyncio.sleep(0.3)
    # Stored by the killed task, a while after its record.
    await publish_jobs(connection, queue, ["a"], headers={"Airflow-Task": ORIGIN.key})
    await asyncio.sleep(0.5)
    assert await remove_unneeded_manifests(connection, queue) == 0
    await process_all(connection, queue)
    assert await remove_unneeded_manifests(connection, queue) == 1


@pytest.mark.usefixtures("without_margin")
async def test_a_record_that_is_replaced_meanwhile_still_names_its_schedules(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, **forgetful(name))
    await old_record(connection, queue, ORIGIN, scheduled=True)
    await asyncio.sleep(0.2)
    end_schedules = manifest_record._end_schedules  # noqa: SLF001

    async def publish_meanwhile(*args: Any) -> None:
        await publish_as(connection, queue, ORIGIN, b"more")
        await end_schedules(*args)

    monkeypatch.setattr(manifest_record, "_end_schedules", publish_meanwhile)
    await remove_unneeded_manifests(connection, queue)
    last = (await stream_messages(connection, f"{name}-events", f"published.{name}.*"))[-1]
    assert json.loads(last.data)["scheduled"] is True
