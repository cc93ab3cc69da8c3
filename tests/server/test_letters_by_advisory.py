"""Letters that are found by what was read at once are those that the classifier finds job by job.

Each test classifies all jobs over a connection that announces nothing, so that each job is read by itself, and over one
that reads them at once.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream import connect, connection_settings
from airflow_provider_jetstream.jetstream.client.announced_reads import read_announced
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.letters_by_advisory import LettersByAdvisory
from testbed.any_letters import (
    JOBS,
    TOUCHED,
    ScannedQueue,
    advisory,
    any_context,
    any_entries,
    consumer_of,
    make_queue,
    with_consumers,
)
from testbed.face import AuditLog

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import Connection, DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from testbed.face import NotDead
    from testbed.nats_server import NatsServer


@pytest.fixture(scope="module")
def queue(nats: NatsServer) -> ScannedQueue:
    return asyncio.run(make_queue(nats, "byadvisory"))


async def classify(
    connection: Connection,
    context: ScanContext,
    entries: list[tuple[int, Entry]],
    orphans: Collection[int] = (),
    inconsistent: Collection[str] = (),
) -> list[DeadLetter | NotDead]:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    classifier = await context.classifier(
        *(connection, index),
        archive=None,
        audit=AuditLog.from_snapshot(connection, context.queue, context.snapshot),
        inconsistent_consumers=inconsistent,
        orphans=orphans,
    )
    jobs = dict.fromkeys(orphans, ()) | dict(index.jobs())
    return await classifier.classify_all(sorted(jobs.items()))


async def classify_twice(
    queue: ScannedQueue,
    context: ScanContext,
    entries: list[tuple[int, Entry]],
    orphans: Collection[int] = (),
    inconsistent: Collection[str] = (),
) -> tuple[list[DeadLetter | NotDead], list[DeadLetter | NotDead]]:
    """Classify jobs one by one, and with what was read at once."""
    streams = {context.snapshot.queue, *context.snapshot.companions}
    async with connect(connection_settings({"servers": (queue.options["servers"],), "timeout": 10})) as connection:
        at_once = await read_announced(connection, streams, batches=True)
        alone = await classify(connection, context, entries, orphans, inconsistent)
        return alone, await classify(at_once, context, entries, orphans, inconsistent)


@pytest.mark.slow
async def test_jobs_of_which_nothing_but_one_advisory_tells_are_found_without_the_classifier(
    queue: ScannedQueue, mocker: MockerFixture
) -> None:
    found = mocker.spy(LettersByAdvisory, "find")
    now = datetime.now(UTC)
    entries = [advisory(sequence, now) for sequence in range(1, JOBS + 2)]
    # Markers are read where there may be some, and so are completions and records.
    expected = [
        sequence for sequence in range(1, JOBS + 2) if sequence not in TOUCHED and consumer_of(sequence) != "unmatched"
    ]
    alone, at_once = await classify_twice(queue, with_consumers(queue.context), entries)
    assert at_once == alone
    letters = [letter for letter in found.spy_return_list if letter]
    assert [letter.sequence for letter in letters] == expected
    assert len(expected) > JOBS // 5
    # While jobs are in flight, deaths from before the server's last restart prove nothing.
    found.spy_return_list.clear()
    restarted = with_consumers(queue.context, up_since=now + timedelta(minutes=1))
    alone, at_once = await classify_twice(queue, restarted, entries)
    assert at_once == alone
    assert not any(found.spy_return_list)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_both_agree_on_any_entries(queue: ScannedQueue, data: st.DataObject) -> None:
    entries, context = data.draw(any_entries(queue)), data.draw(any_context(queue))
    orphans = data.draw(st.sets(st.integers(1, JOBS + 3), max_size=5)) - {job for job, _ in entries}
    inconsistent = frozenset(data.draw(st.sets(st.sampled_from(["till", "press"]))))
    alone, at_once = asyncio.run(classify_twice(queue, context, entries, orphans, inconsistent))
    assert at_once == alone
