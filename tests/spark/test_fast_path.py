"""The fast path finds the same letters as the classifier, column by column, whatever the entries and streams contain.

Each test classifies all jobs with the classifier alone, then with the fast path before it. Jobs, completions, the audit
and markers are on a real server; entries and the consumers' numbers are made up.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from bulk_letters import make_letters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tcp_proxy import TcpProxy

from airflow_provider_jetstream.jetstream.audit.audited_letters import LetterRecord
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.contract import completion_subject, marker_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.classify import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import job_table
from airflow_provider_jetstream.spark.dead_letters.fast_path import FastPath, are_dead
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA
from testbed.dead_letters import publish_raw, store_task
from testbed.queues import small_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_server import NatsServer

TASK = Origin("prints/größe", "manual__2026-11-21T00:00:00+00:00", "publish", 2**40)
HEADERS = [
    b"",
    b"Job-Id: job-17\r\nAirflow-Dag-Id: prints\r\nAirflow-Run-Id: r\r\nAirflow-Task-Id: t\r\nAirflow-Map-Index: 3",
    b"Airflow-Dag-Id: prints\r\nAirflow-Map-Index: 99999999999",
    b"Redrive-Count: 2\r\nTag: a\r\nTag: b",
    b"Redrive-Count: -2\r\nJob-Id: ",
    b"Redrive-Count: 99999999999999999999999",
    b"Latin: Gr\xf6\xdfe\r\nJob-Id: Gr\xf6\xdfe",
    "Größe: Ü".encode(),
    b"no colon\r\nspaces :  around  ",
    b"Nats-Sequence: 3\r\nNats-Subject: other\r\nNats-Stream: other",
    b"",
    b"Airflow-Task: " + TASK.key.encode(),
    b"Airflow-Task: " + b"0" * 32 + b"\r\nAirflow-Dag-Id: prints",
    b"Airflow-Task: *",
]
BODIES = [
    b"17",
    b'{"id": "job-18"}',
    b'{"id": "gr\xf6\xdfe"}',
    b'{"n": {"id": "inner"}}',
    b'{"id": 19}',
    b'["id"]',
    b"",
]
# No consumer's filter matches the last one.
SUBJECTS = ("till.a", "till.b", "press.a", "unmatched.a")
JOBS = 60
DELETED, COMPLETED, REDRIVEN, REQUEUED, MARKED = (range(first, JOBS + 1, 10) for first in range(1, 6))
MICROSECOND = timedelta(microseconds=1)


class ScannedQueue(NamedTuple):
    """A queue's scan context, and the times from which validity is computed."""

    options: dict[str, str]
    context: ScanContext
    times: list[datetime]


async def make_queue(server: NatsServer, name: str) -> ScannedQueue:
    """Make a queue some of whose jobs are deleted, completed, redriven, requeued or marked."""
    consumers = [{"name": consumer, "filter_subject": f"{name}.jobs.{consumer}.>"} for consumer in ("till", "press")]
    queue = small_queue(
        name,
        consumers=[{"max_deliver": 1, "ack_wait": "7s"} | consumer for consumer in consumers],
        allow_direct=True,
        atomic_redrive=True,
    )
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        await provision(connection, queue)
        for number in range(JOBS):
            subject = f"{name}.jobs.{SUBJECTS[number % len(SUBJECTS)]}"
            headers, body = HEADERS[number % len(HEADERS)], BODIES[number % len(BODIES)]
            if headers:
                await publish_raw(server, subject, headers, body)
            else:
                await store(connection, subject, body)
        await publish_raw_subject(server, f"{name}.jobs.till.".encode() + b"gr\xf6\xdfe")
        await store_task(connection, queue, TASK)
        scan = await Scan.begin(connection, queue)
        await _add_evidence(scan, queue)
        times = [scan.snapshot.created_at, *(consumer.created for consumer in scan.snapshot.consumers.values())]
        for sequence in (2, JOBS):
            message = await get_message(connection, name, sequence)
            assert message
            times.append(message.stored_at)
        return ScannedQueue({"servers": server.url, "timeout": "10"}, scan.context, times)


async def _add_evidence(scan: Scan, queue: WorkQueue) -> None:
    connection = scan.connection
    assert queue.events
    assert queue.audit
    for sequence in DELETED:
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence, "no_erase": True})
    for sequence in COMPLETED:
        await store(connection, completion_subject(queue.name, "till", sequence), b"{}")
        await store(connection, completion_subject(queue.name, "press", sequence), b"{}")
    for sequence in MARKED:
        await store(connection, marker_subject(queue.name, sequence), b"")
    common: dict[str, Any] = {"subject": "x", "reason": "max_deliveries", "fingerprint": "x", "stream": queue.name}
    common["created"] = scan.snapshot.created
    records = [
        LetterRecord(sequence=sequence, action="redriven", new_sequence=1000 + sequence, **common)
        for sequence in REDRIVEN
    ]
    records += [LetterRecord(sequence=sequence, action="requeued", **common) for sequence in REQUEUED]
    assert not any(await AuditLog(connection, queue.audit.name, queue.name, scan.snapshot.created).write(records))


async def publish_raw_subject(server: NatsServer, subject: bytes) -> None:
    """Publish to a subject that isn't UTF-8."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false}\r\nPUB ' + subject + b" 1\r\nx\r\nPING\r\n")
    assert await reader.readline() == b"PONG\r\n"
    writer.close()


@pytest.fixture(scope="module")
def queue(nats: NatsServer) -> ScannedQueue:
    return asyncio.run(make_queue(nats, "fastpath"))


def job_batches(entries: list[tuple[int, Entry]], orphans: set[int]) -> list[pa.RecordBatch]:
    index = EntryIndex()
    for sequence, entry in entries:
        index.add(sequence, entry)
    without_entry = array("Q", sorted(orphans - {sequence for sequence, _ in entries}))
    batches: list[pa.RecordBatch] = job_table(index, without_entry).to_batches()
    return batches


def letter_rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        assert batch.schema == LETTER_SCHEMA
        batch.validate(full=True)
        rows += batch.to_pylist()
    return sorted(rows, key=lambda row: int(row["sequence"]))


def by_classifier_alone(task: ClassifyTask, jobs: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    # Selects the same letters by a condition that only the classifier can check.
    selection = task.selection.model_copy(update={"reasons": frozenset(Reason) - {Reason.UNDELIVERABLE}})
    return letter_rows(replace(task, selection=selection).classify(iter(jobs)))


def advisory(job: int, recorded_at: datetime, consumer: str | None = None, **fields: Any) -> tuple[int, Entry]:
    values = {"sequence": 500 + job, "kind": EntryKind.DELIVERIES, "deliveries": 1} | fields
    return job, Entry(consumer=consumer or consumer_of(job), recorded_at=recorded_at, **values)


def consumer_of(sequence: int) -> str:
    return SUBJECTS[(sequence - 1) % len(SUBJECTS)].split(".")[0]


def with_consumers(context: ScanContext, **fields: Any) -> ScanContext:
    """Replace fields of all consumers; by default every job is delivered and three are in flight."""
    values = {"delivered": JOBS + 10, "ack_floor": 0, "in_flight": 3} | fields
    consumers = {name: replace(consumer, **values) for name, consumer in context.snapshot.consumers.items()}
    return replace(context, snapshot=replace(context.snapshot, consumers=consumers))


numbers = st.integers(0, 12)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.integers(0, 2), st.booleans()), min_size=1, max_size=30))
def test_the_columnar_predicate_equals_the_scalar_one(jobs: list[tuple[int, int, int, int, bool]]) -> None:
    sequences, delivered, _, _, has_evidence = (np.array(column) for column in zip(*jobs, strict=True))
    consumers = [consumer_with(delivered=job[1], ack_floor=job[2], in_flight=job[3]) for job in jobs]
    settled = np.array([consumer.settled for consumer in consumers])
    columnar = are_dead(sequences, settled=settled, delivered=delivered, has_evidence=has_evidence)
    assert columnar.tolist() == [
        consumer.proves_death(job[0], has_evidence=job[4]) for job, consumer in zip(jobs, consumers, strict=True)
    ]


def consumer_with(*, delivered: int, ack_floor: int, in_flight: int) -> ConsumerState:
    now = datetime.now(UTC)
    return ConsumerState(
        *("worker", now, (">",), timedelta(seconds=1)),
        delivered=delivered,
        ack_floor=ack_floor,
        pending=0,
        in_flight=in_flight,
        stored=0,
        dead=0,
        last_active=now,
        taken_at=now,
    )


def test_the_fast_path_takes_only_jobs_whose_one_entry_decides(queue: ScannedQueue) -> None:
    now = datetime.now(UTC)
    jobs = job_batches([advisory(sequence, now) for sequence in range(1, JOBS + 2)], set())
    context = with_consumers(queue.context)
    fast = letter_rows(FastPath(queue.options, context, ()).find_letters(jobs[0]))
    touched = {*DELETED, *COMPLETED, *REDRIVEN, *REQUEUED, *MARKED}
    expected = [
        sequence for sequence in range(1, JOBS + 1) if sequence not in touched and consumer_of(sequence) != "unmatched"
    ]
    assert [row["sequence"] for row in fast] == expected
    assert len(expected) > JOBS // 4
    keyed = [row for row in fast if row["headers"] == [{"key": "Airflow-Task", "value": TASK.key}]]
    origins = {(row["dag_id"], row["run_id"], row["task_id"], row["map_index"]) for row in keyed}
    assert origins == {(TASK.dag_id, TASK.run_id, TASK.task_id, 2**31 - 1)}
    assert {row["dag_id"] for row in fast if row not in keyed} == {None, "prints"}
    # While jobs are in flight, deaths from before the server's last restart prove nothing.
    restarted = with_consumers(queue.context, up_since=now + timedelta(minutes=1))
    assert letter_rows(FastPath(queue.options, restarted, ()).find_letters(jobs[0])) == []
    idle = with_consumers(queue.context, up_since=now + timedelta(minutes=1), in_flight=0)
    assert letter_rows(FastPath(queue.options, idle, ()).find_letters(jobs[0])) == fast
    task = ClassifyTask(queue.options, context, frozenset(), Selection(), lost=False)
    classified = by_classifier_alone(task, jobs)
    assert letter_rows(task.classify(iter(jobs))) == classified
    assert len(classified) > len(expected)
    selecting = replace(task, selection=Selection(consumer="press"))
    assert letter_rows(selecting.classify(iter(jobs))) == [row for row in classified if row["consumer"] == "press"]


def test_few_letters_among_many_jobs_are_left_to_the_classifier(queue: ScannedQueue) -> None:
    now = datetime.now(UTC)
    few = job_batches([advisory(6, now), advisory(58, now)], set())
    context = with_consumers(queue.context)
    assert not list(FastPath(queue.options, context, ()).find_letters(few[0]))
    task = ClassifyTask(queue.options, context, frozenset(), Selection(), lost=False)
    classified = by_classifier_alone(task, few)
    assert [row["sequence"] for row in classified] == [6, 58]
    assert letter_rows(task.classify(iter(few))) == classified


def test_the_classifier_continues_after_an_interruption_of_the_fast_path(nats: NatsServer) -> None:
    options, count = {"servers": nats.url, "timeout": "10"}, 12_000
    queue = make_letters(options, "cutoff", count, allow_direct=True)
    scan = run_on_own_connection(options, lambda connection: Scan.begin(connection, queue))
    jobs = job_table(scan.index, array("Q")).to_batches()
    # The first batch of letters has arrived, and the second one is on its way.
    with TcpProxy(nats.port, after=3_000_000, until=2) as proxy:
        task = ClassifyTask(options | {"servers": proxy.url}, scan.context, frozenset(), Selection(), lost=False)
        batches = task.classify(iter(jobs))
        first = next(batches)
        assert 0 < first.num_rows < count
        rest = letter_rows(batches)
        assert proxy.refused == 2
    assert [*first.column("sequence").to_pylist(), *(row["sequence"] for row in rest)] == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("consumer", "entries", "consumer_age", "stream_age"),
    [
        ("other", 1, timedelta(days=-1), timedelta(days=-1)),
        (None, 2, timedelta(days=-1), timedelta(days=-1)),
        (None, 1, timedelta(seconds=1), timedelta(days=-1)),
        (None, 1, timedelta(days=-1), timedelta(seconds=1)),
        (None, 1, timedelta(), timedelta()),
    ],
)
def test_both_agree_on_properties_that_all_jobs_share(
    queue: ScannedQueue, consumer: str | None, entries: int, consumer_age: timedelta, stream_age: timedelta
) -> None:
    now = datetime.now(UTC)
    advisories = [
        advisory(job, now, consumer, sequence=500 * number + job)
        for number in range(1, entries + 1)
        for job in range(1, JOBS + 1)
    ]
    context = with_consumers(queue.context, created=now + consumer_age)
    context = replace(context, snapshot=replace(context.snapshot, created=(now + stream_age).isoformat()))
    task = ClassifyTask(queue.options, context, frozenset(), Selection(), lost=True)
    jobs = job_batches(advisories, set())
    assert letter_rows(task.classify(iter(jobs))) == by_classifier_alone(task, jobs)


sequences = st.integers(1, JOBS + 3)
kinds = st.sampled_from([*[EntryKind.DELIVERIES] * 6, *EntryKind])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_both_agree_on_any_entries(queue: ScannedQueue, data: st.DataObject) -> None:
    shifts = st.sampled_from([-MICROSECOND, timedelta(), MICROSECOND, timedelta(seconds=1), timedelta(hours=1)])
    times = st.builds(lambda time, shift: time + shift, st.sampled_from(queue.times), shifts)
    late = datetime.now(UTC) + timedelta(hours=1)

    @st.composite
    def entries(draw: st.DrawFn) -> tuple[int, Entry]:
        job = draw(sequences)
        consumer = draw(st.sampled_from([*[consumer_of(job)] * 5, "till", "other"]))
        recorded_at = draw(st.one_of(st.just(late), times))
        sequence, deliveries = draw(st.integers(1, 2**40)), draw(st.sampled_from([0, 1, 5]))
        return advisory(job, recorded_at, consumer, kind=draw(kinds), sequence=sequence, deliveries=deliveries)

    several = st.lists(entries(), max_size=40)
    one_per_job = st.lists(entries(), min_size=20, max_size=JOBS, unique_by=lambda entry: entry[0])
    jobs = job_batches(data.draw(st.one_of(several, one_per_job)), data.draw(st.sets(sequences, max_size=5)))
    context = with_consumers(queue.context, delivered=data.draw(st.sampled_from([0, JOBS // 2, JOBS + 10])))
    if data.draw(st.booleans()):
        context = replace(context, snapshot=replace(context.snapshot, created=data.draw(times).isoformat()))
    if data.draw(st.booleans()):
        context = with_consumers(context, created=data.draw(times))
    if data.draw(st.booleans()):
        companions = {name: info for name, info in context.snapshot.companions.items() if name != context.events}
        context = replace(context, snapshot=replace(context.snapshot, companions=companions))
    inconsistent = frozenset(data.draw(st.sets(st.sampled_from(["till", "press"]))))
    selection = data.draw(st.sampled_from([Selection(), Selection(consumer="press"), Selection(vanished=True)]))
    task = ClassifyTask(queue.options, context, inconsistent, selection, lost=data.draw(st.booleans()))
    classified = by_classifier_alone(task, jobs)
    assert letter_rows(task.classify(iter(jobs))) == classified
