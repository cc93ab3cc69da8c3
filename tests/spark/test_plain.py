"""Plain letters are those that the judge finds, column by column, whatever else is said and stored.

The judge is asked about all jobs, and then about those that were left to it. Jobs, completions, the audit and markers
are on a real server; what is said about jobs, and how the consumers were at the look, is made up.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from bulk_letters import make_letters
from gateway import Gateway
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.audit.log import AuditLog, LetterRecord
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
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.dead_letters.classify import ClassifyTask
from airflow_provider_jetstream.spark.dead_letters.entry_table import job_table
from airflow_provider_jetstream.spark.dead_letters.fast_path import FastPath
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA
from testbed.dead_letters import publish_raw
from testbed.queues import small_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from testbed.nats_server import NatsServer

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
]
PLACES = ("till.a", "till.b", "press.a", "nobody.a")
JOBS = 60
DELETED, COMPLETED, REDRIVEN, REQUEUED, MARKED = (range(first, JOBS + 1, 10) for first in range(1, 6))
MICROSECOND = timedelta(microseconds=1)


class Bed(NamedTuple):
    """A queue, and a look at it."""

    where: dict[str, str]
    premises: ScanContext
    moments: list[datetime]


async def make(server: NatsServer, name: str) -> Bed:
    """Make a queue on whose jobs everything has been done."""
    consumers = [{"name": each, "filter_subject": f"{name}.jobs.{each}.>"} for each in ("till", "press")]
    queue = small_queue(
        name,
        consumers=[{"max_deliver": 1, "ack_wait": "7s"} | each for each in consumers],
        allow_direct=True,
        atomic_redrive=True,
    )
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        await provision(connection, queue)
        for number in range(JOBS):
            subject = f"{name}.jobs.{PLACES[number % len(PLACES)]}"
            headers = HEADERS[number % len(HEADERS)]
            if headers:
                await publish_raw(server, subject, headers, str(number).encode())
            else:
                await store(connection, subject, str(number).encode())
        await publish_raw_subject(server, f"{name}.jobs.till.".encode() + b"gr\xf6\xdfe")
        scan = await Scan.begin(connection, queue)
        await _ends(scan, queue)
        moments = [scan.snapshot.created_at, *(each.created for each in scan.snapshot.consumers.values())]
        for sequence in (2, JOBS):
            message = await get_message(connection, name, sequence)
            assert message
            moments.append(message.stored_at)
        return Bed({"servers": server.url, "timeout": "10"}, scan.context, moments)


async def _ends(scan: Scan, queue: WorkQueue) -> None:
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
    done = [LetterRecord(sequence=each, action="redriven", new_sequence=1000 + each, **common) for each in REDRIVEN]
    done += [LetterRecord(sequence=each, action="requeued", **common) for each in REQUEUED]
    assert not any(await AuditLog(connection, queue.audit.name, queue.name, scan.snapshot.created).write(done))


async def publish_raw_subject(server: NatsServer, subject: bytes) -> None:
    """Publish to a subject that isn't text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false}\r\nPUB ' + subject + b" 1\r\nx\r\nPING\r\n")
    assert await reader.readline() == b"PONG\r\n"
    writer.close()


@pytest.fixture(scope="module")
def bed(nats: NatsServer) -> Bed:
    return asyncio.run(make(nats, "plainletters"))


def jobs_of(told: list[tuple[int, Entry]], others: set[int]) -> list[pa.RecordBatch]:
    index = EntryIndex()
    for sequence, mention in told:
        index.add(sequence, mention)
    untold = array("Q", sorted(others - {sequence for sequence, _ in told}))
    batches: list[pa.RecordBatch] = job_table(index, untold).to_batches()
    return batches


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        assert batch.schema == LETTER_SCHEMA
        batch.validate(full=True)
        rows += batch.to_pylist()
    return sorted(rows, key=lambda row: int(row["sequence"]))


def by_the_judge_alone(proving: ClassifyTask, jobs: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    # The same letters, said in a way that takes a letter to tell.
    selection = proving.selection.model_copy(update={"reasons": frozenset(Reason) - {Reason.UNDELIVERABLE}})
    return rows_of(replace(proving, selection=selection).classify(iter(jobs)))


def advisory(sequence: int, told_at: datetime, consumer: str | None = None, **fields: Any) -> tuple[int, Entry]:
    said = {"entry": 500 + sequence, "kind": EntryKind.DELIVERIES, "deliveries": 1} | fields
    return sequence, Entry(consumer=consumer or taker_of(sequence), recorded_at=told_at, **said)


def taker_of(sequence: int) -> str:
    return PLACES[(sequence - 1) % len(PLACES)].split(".")[0]


def delivered(premises: ScanContext, **fields: Any) -> ScanContext:
    """Say that everything was delivered, and whatever else."""
    consumers = {
        name: replace(each, **({"delivered": JOBS + 10, "ack_floor": 0, "in_flight": 3} | fields))
        for name, each in premises.snapshot.consumers.items()
    }
    return replace(premises, snapshot=replace(premises.snapshot, consumers=consumers))


def test_only_what_is_plain_is_taken_from_the_judge(bed: Bed) -> None:
    now = datetime.now(UTC)
    jobs = jobs_of([advisory(each, now) for each in range(1, JOBS + 2)], set())
    premises = delivered(bed.premises)
    plain = rows_of(FastPath(bed.where, premises, ()).find_letters(jobs[0]))
    touched = {*DELETED, *COMPLETED, *REDRIVEN, *REQUEUED, *MARKED}
    expected = [each for each in range(1, JOBS + 1) if each not in touched and taker_of(each) != "nobody"]
    assert [row["sequence"] for row in plain] == expected
    assert len(expected) > JOBS // 4
    proving = ClassifyTask(bed.where, premises, frozenset(), Selection(), lost=False)
    judged = by_the_judge_alone(proving, jobs)
    assert rows_of(proving.classify(iter(jobs))) == judged
    assert len(judged) > len(expected)
    some = replace(proving, selection=Selection(consumer="press"))
    assert rows_of(some.classify(iter(jobs))) == [row for row in judged if row["consumer"] == "press"]


def test_few_among_many_others_are_left_to_the_judge(bed: Bed) -> None:
    now = datetime.now(UTC)
    few = jobs_of([advisory(6, now), advisory(58, now)], set())
    assert not list(FastPath(bed.where, delivered(bed.premises), ()).find_letters(few[0]))
    proving = ClassifyTask(bed.where, delivered(bed.premises), frozenset(), Selection(), lost=False)
    judged = by_the_judge_alone(proving, few)
    assert [row["sequence"] for row in judged] == [6, 58]
    assert rows_of(proving.classify(iter(few))) == judged


def test_the_judge_goes_on_where_the_server_went_away(nats: NatsServer) -> None:
    where, count = {"servers": nats.url, "timeout": "10"}, 12_000
    queue = make_letters(where, "cutoff", count, allow_direct=True)
    scan = run_on_own_connection(where, lambda connection: Scan.begin(connection, queue))
    jobs = job_table(scan.index, array("Q")).to_batches()
    # The first batch of plain letters is through, and the second one on its way.
    with Gateway(nats.port, after=3_000_000, until=2) as gateway:
        proving = ClassifyTask(where | {"servers": gateway.url}, scan.context, frozenset(), Selection(), lost=False)
        batches = proving.classify(iter(jobs))
        first = next(batches)
        assert 0 < first.num_rows < count
        rest = rows_of(batches)
        assert gateway.refused == 2
    assert [*first.column("sequence").to_pylist(), *(row["sequence"] for row in rest)] == list(range(1, count + 1))


@pytest.mark.parametrize(
    ("consumer", "said", "created", "begun"),
    [
        ("other", 1, timedelta(days=-1), timedelta(days=-1)),
        (None, 2, timedelta(days=-1), timedelta(days=-1)),
        (None, 1, timedelta(seconds=1), timedelta(days=-1)),
        (None, 1, timedelta(days=-1), timedelta(seconds=1)),
        (None, 1, timedelta(), timedelta()),
    ],
)
def test_the_judge_finds_the_same_of_what_all_jobs_have_in_common(
    bed: Bed, consumer: str | None, said: int, created: timedelta, begun: timedelta
) -> None:
    now = datetime.now(UTC)
    told = [
        advisory(each, now, consumer, entry=500 * number + each)
        for number in range(1, said + 1)
        for each in range(1, JOBS + 1)
    ]
    premises = delivered(bed.premises, created=now + created)
    premises = replace(premises, snapshot=replace(premises.snapshot, created=(now + begun).isoformat()))
    proving = ClassifyTask(bed.where, premises, frozenset(), Selection(), lost=True)
    jobs = jobs_of(told, set())
    assert rows_of(proving.classify(iter(jobs))) == by_the_judge_alone(proving, jobs)


sequences = st.integers(1, JOBS + 3)
kinds = st.sampled_from([*[EntryKind.DELIVERIES] * 6, *EntryKind])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_judge_finds_the_same(bed: Bed, data: st.DataObject) -> None:
    shifts = st.sampled_from([-MICROSECOND, timedelta(), MICROSECOND, timedelta(seconds=1), timedelta(hours=1)])
    moments = st.builds(lambda moment, shift: moment + shift, st.sampled_from(bed.moments), shifts)
    late = datetime.now(UTC) + timedelta(hours=1)

    @st.composite
    def mentions(draw: st.DrawFn) -> tuple[int, Entry]:
        sequence = draw(sequences)
        consumer = draw(st.sampled_from([*[taker_of(sequence)] * 5, "till", "other"]))
        told_at = draw(st.one_of(st.just(late), moments))
        entry, deliveries = draw(st.integers(1, 2**40)), draw(st.sampled_from([0, 1, 5]))
        return advisory(sequence, told_at, consumer, kind=draw(kinds), entry=entry, deliveries=deliveries)

    several = st.lists(mentions(), max_size=40)
    one_each = st.lists(mentions(), min_size=20, max_size=JOBS, unique_by=lambda each: each[0])
    jobs = jobs_of(data.draw(st.one_of(several, one_each)), data.draw(st.sets(sequences, max_size=5)))
    premises = delivered(bed.premises, delivered=data.draw(st.sampled_from([0, JOBS // 2, JOBS + 10])))
    if data.draw(st.booleans()):
        around = replace(premises.snapshot, created=data.draw(moments).isoformat())
        premises = replace(premises, snapshot=around)
    if data.draw(st.booleans()):
        premises = delivered(premises, created=data.draw(moments))
    premises = replace(premises, events=data.draw(st.sampled_from([premises.events, None])))
    doubted = frozenset(data.draw(st.sets(st.sampled_from(["till", "press"]))))
    selection = data.draw(st.sampled_from([Selection(), Selection(consumer="press"), Selection(vanished=True)]))
    proving = ClassifyTask(bed.where, premises, doubted, selection, lost=data.draw(st.booleans()))
    judged = by_the_judge_alone(proving, jobs)
    assert rows_of(proving.classify(iter(jobs))) == judged
