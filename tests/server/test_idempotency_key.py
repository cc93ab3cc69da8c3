"""Runs with the same idempotency key publish each job once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Job, JobError, Origin, PublishReport, publish
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.publishing.manifest_record import TaskRecord, remove_unneeded_manifests
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.face import PreparedJobs, publish_prepared, publish_until_killed, stream_info
from testbed.queues import make_queue, pull_jobs, stored_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

# A repeat after it isn't recognised by the server.
WINDOW: dict[str, Any] = {"duplicate_window": "200ms"}
AFTER_WINDOW = 0.4


def named(letters: str) -> list[Job]:
    return [Job(letter.encode(), id=letter) for letter in letters]


async def run(
    connection: NatsPyConnection,
    queue: WorkQueue,
    run_id: str,
    jobs: Iterable[object],
    *,
    key: str = "2026-01-01",
    killed: bool = False,
) -> PublishReport:
    """Publish as a run's task does; one that is killed stores its jobs and records nothing afterwards."""
    origin, subject = Origin("dag", run_id, "task", idempotency_key=key), f"{queue.name}.jobs.x"
    if killed:
        await publish_until_killed(connection, queue, list(jobs), origin, subject=subject)
        return PublishReport()
    return await publish(connection, queue, list(jobs), origin=origin, subject=subject)


async def finish_all(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    for job in await pull_jobs(connection, queue, count):
        await job.ack_sync()


@pytest.mark.slow
async def test_another_run_publishes_nothing_however_late_it_comes(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    first = await run(connection, queue, "monday", named("abc"))
    await finish_all(connection, queue, 3)
    for run_id in ("tuesday", "wednesday"):
        await asyncio.sleep(AFTER_WINDOW)
        again = await run(connection, queue, run_id, named("abc"))
        assert (list(again.sequences), again.duplicates) == (list(first.sequences), 3)
    assert (await stream_info(connection, name))["state"]["last_seq"] == 3


async def test_another_key_another_task_and_a_run_of_that_name_are_others(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    assert (await run(connection, queue, "r", named("ab"), key="k")).duplicates == 0
    assert (await run(connection, queue, "r", named("ab"), key="l")).duplicates == 0
    origin = Origin("dag", "k", "task")
    same_text = PreparedJobs(named("ab"), subject=f"{name}.jobs.x", origin=origin, batch="", queue=queue)
    assert (await publish_prepared(connection, same_text)).duplicates == 0
    other = replace(origin, task_id="other", idempotency_key="k")
    others = PreparedJobs(named("ab"), subject=f"{name}.jobs.x", origin=other, batch="", queue=queue)
    assert (await publish_prepared(connection, others)).duplicates == 0
    assert (
        len({origin.manifest_key, other.manifest_key, replace(origin, idempotency_key="k").manifest_key, origin.key})
        == 3
    )


@pytest.mark.slow
@pytest.mark.parametrize("killed_run", ["first", "second"])
async def test_what_a_killed_run_has_stored_is_not_published_by_the_next(
    connection: NatsPyConnection, name: str, killed_run: str
) -> None:
    queue = await make_queue(connection, name, **WINDOW)
    await run(connection, queue, "monday", named("ab"), killed=killed_run == "first")
    if killed_run == "second":
        await asyncio.sleep(AFTER_WINDOW)
        await run(connection, queue, "tuesday", named("abc"), killed=True)
    await finish_all(connection, queue, 2 if killed_run == "first" else 3)
    # Longer than the margin by which an id counts as forgotten.
    queue_info = await stream_info(connection, name)
    await asyncio.sleep(AFTER_WINDOW)
    last = await run(connection, queue, "wednesday", named("dcba"))
    stored = queue_info["state"]["last_seq"]
    assert sorted(last.sequences) == list(range(1, 5))
    assert last.duplicates == stored


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_changed_job_is_refused_that_a_killed_run_has_stored(
    connection: NatsPyConnection, name: str, *, is_done: bool
) -> None:
    queue = await make_queue(connection, name, archive=is_done, **WINDOW)
    await run(connection, queue, "monday", named("ab"), killed=True)
    if is_done:
        await finish_all(connection, queue, 2)
    await asyncio.sleep(AFTER_WINDOW)
    with pytest.raises(JobError, match="job 0 has the id 'a', under which"):
        await run(connection, queue, "tuesday", [Job(b"changed", id="a"), *named("bc")])
    # The refused run hasn't recorded what it found, and doesn't say that all is recorded.
    again = await run(connection, queue, "wednesday", named("cba"))
    assert (list(again.sequences), again.duplicates) == ([3, 2, 1], 2)


def _broken(jobs: Iterable[Job]) -> Iterable[Job]:
    yield from jobs
    raise OSError("the source")


@pytest.mark.parametrize(
    ("second", "origin"),
    [
        ("another list", Origin.of_key("k")),
        ("a source that fails", Origin.of_key("k")),
        ("a source that fails", Origin("dag", "run", "task", operation="second call", max_tries=1)),
        ("a source that fails", Origin("dag", "run", "task", max_tries=1)),
    ],
    ids=["key", "key, source fails", "one of several calls", "task"],
)
async def test_what_a_try_found_and_did_not_list_is_found_again(
    connection: NatsPyConnection, name: str, second: str, origin: Origin
) -> None:
    queue, subject = await make_queue(connection, name, **WINDOW), f"{name}.jobs.x"
    await publish_until_killed(connection, queue, named("ab"), origin, subject=subject)
    await asyncio.sleep(AFTER_WINDOW)
    if second == "another list":
        await publish(connection, queue, named("c"), origin=origin, subject=subject)
    else:
        with pytest.raises(OSError, match="the source"):
            await publish(connection, queue, _broken(named("c")), origin=origin, subject=subject)
    await asyncio.sleep(AFTER_WINDOW)
    last = await publish(connection, queue, named("abc"), origin=origin, subject=subject)
    assert (list(last.sequences), last.duplicates) == ([1, 2, 3], 3)
    assert await stored_count(connection, name) == 3


async def test_a_program_that_was_killed_is_refused_a_changed_job_as_well(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    key = "daily import"

    def stopping() -> Iterable[Job]:
        yield Job({"id": "in the body", "n": 1}, id="a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await publish(connection, queue, stopping(), idempotency_key=key, subject=f"{name}.jobs.x")
    await asyncio.sleep(AFTER_WINDOW)
    before = (await stream_info(connection, name))["state"]["last_seq"]
    with pytest.raises(JobError, match="under which"):
        await publish(connection, queue, [Job({"n": 2}, id="a")], idempotency_key=key, subject=f"{name}.jobs.x")
    # Another job of another program under the same id isn't the key's.
    again = await publish(connection, queue, [Job({"n": 2}, id="a")], idempotency_key="other", subject=f"{name}.jobs.x")
    assert again.duplicates == 0
    assert (await stream_info(connection, name))["state"]["last_seq"] == before + 1


async def test_two_runs_at_once_store_each_job_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    reports = await asyncio.gather(*(run(connection, queue, f"run-{n}", named("abcdefgh")) for n in range(4)))
    assert len({tuple(report.sequences) for report in reports}) == 1
    assert await stored_count(connection, name) == 8
    again = await run(connection, queue, "later", named("hgfedcba"))
    assert again.duplicates == 8


async def test_the_record_of_a_key_expires_with_the_events_and_is_not_removed_before(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    queue = await make_queue(connection, name, archive=False)
    await run(connection, queue, "monday", named("a"))
    await finish_all(connection, queue, 1)
    monkeypatch.setattr(seams.MANIFEST_REMOVAL_MARGIN, timedelta(0))
    await remove_unneeded_manifests(connection, queue)
    key = Origin("dag", "monday", "task", idempotency_key="2026-01-01").manifest_key
    assert await TaskRecord(connection, name, f"{name}-events", key).read() is not None
    stored = await stream_messages(connection, f"{name}-events", manifest_subject(name, key))
    assert {message.header("Nats-TTL") for message in stored} == {None}


async def test_a_queue_made_anew_gets_the_jobs_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await run(connection, queue, "monday", named("ab"))
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name)
    again = await run(connection, queue, "tuesday", named("ab"))
    assert (list(again.sequences), again.duplicates) == ([1, 2], 0)


@pytest.mark.slow
async def test_each_run_renews_the_parts_of_its_key(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_PART_ROWS", "_INLINE_ROWS"):
        monkeypatch.setattr(f"airflow_provider_jetstream.jetstream.publishing.manifest.{limit}", 2)
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    key = Origin("dag", "monday", "task", idempotency_key="2026-01-01").manifest_key
    pages = {"filter": f"published.{name}.{key}-jobs"}
    await run(connection, queue, "monday", named("abcde"))
    await finish_all(connection, queue, 5)
    for run_id in ("tuesday", "wednesday"):
        await asyncio.sleep(AFTER_WINDOW)
        before = (await stream_info(connection, f"{name}-events"))["state"]["last_seq"]
        again = await run(connection, queue, run_id, named("edcba"))
        assert (list(again.sequences), again.duplicates) == ([5, 4, 3, 2, 1], 5)
        # What the events stream would remove by its max_age.
        await connection.api(f"STREAM.PURGE.{name}-events", pages | {"seq": before + 1})
