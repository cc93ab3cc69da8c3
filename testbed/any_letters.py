"""A queue whose jobs have any headers, bodies and evidence, for tests that compare two ways of classifying its jobs.

Jobs, completions and the audit are on a real server; entries and the consumers' numbers are made up by the
tests.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, NamedTuple

from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream import Origin, WorkQueue, connect, connection_settings, get_message, provision
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.facts import ScanContext
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from testbed.dead_letters import publish_raw, store_task
from testbed.nats_server import NatsServer
from testbed.queues import completion_body, small_queue

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
DELETED, COMPLETED, REDRIVEN, REQUEUED, PARKED = (range(first, JOBS + 1, 10) for first in (1, 2, 3, 4, 7))
# Nothing but their entries is known about the other jobs.
TOUCHED = frozenset(chain(DELETED, COMPLETED, REDRIVEN, REQUEUED, PARKED))
MICROSECOND = timedelta(microseconds=1)


class ScannedQueue(NamedTuple):
    """A queue's scan context, and the times from which validity is computed."""

    options: dict[str, str]
    context: ScanContext
    times: list[datetime]


async def make_queue(server: NatsServer, name: str) -> ScannedQueue:
    """Make a queue some of whose jobs are deleted, completed, redriven, requeued or parked."""
    consumers = [{"name": consumer, "filter_subject": f"{name}.jobs.{consumer}.>"} for consumer in ("till", "press")]
    queue = small_queue(
        name,
        consumers=[{"max_deliver": 1, "ack_wait": "7s"} | consumer for consumer in consumers],
        allow_direct=True,
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
            if (message := await get_message(connection, name, sequence)) is None:
                raise LookupError(f"{name} doesn't hold {sequence}")
            times.append(message.stored_at)
        return ScannedQueue({"servers": server.url, "timeout": "10"}, scan.context, times)


async def _add_evidence(scan: Scan, queue: WorkQueue) -> None:
    connection = scan.connection
    if queue.audit is None:
        raise LookupError(f"{queue.name} has no audit")
    for sequence in DELETED:
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence, "no_erase": True})
    for sequence in COMPLETED:
        for consumer in ("till", "press"):
            body = completion_body(queue.name, sequence, consumer)
            await store(connection, completion_subject(queue.name, consumer, sequence), body)
    common: dict[str, Any] = {"subject": "x", "reason": "max_deliveries", "fingerprint": "x", "stream": queue.name}
    common["created"] = scan.snapshot.created
    records = [
        LetterRecord(sequence=sequence, action="redriven", new_sequence=1000 + sequence, **common)
        for sequence in REDRIVEN
    ]
    records += [LetterRecord(sequence=sequence, action="requeued", **common) for sequence in REQUEUED]
    records += [LetterRecord(sequence=sequence, action="parked", **common) for sequence in PARKED]
    audit = AuditLog(connection, queue.audit.name, queue.name, scan.snapshot.created)
    if any(refusals := await audit.write(records)):
        raise ValueError(f"records were refused: {refusals}")


async def publish_raw_subject(server: NatsServer, subject: bytes) -> None:
    """Publish to a subject that isn't UTF-8."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false}\r\nPUB ' + subject + b" 1\r\nx\r\nPING\r\n")
    if (answer := await reader.readline()) != b"PONG\r\n":
        raise ConnectionError(answer.decode())
    writer.close()


def advisory(job: int, recorded_at: datetime, consumer: str | None = None, **fields: Any) -> tuple[int, Entry]:
    """Return a job and an entry about it: by default an advisory about used-up deliveries by its own consumer."""
    values = {"sequence": 500 + job, "kind": EntryKind.DELIVERIES, "deliveries": 1} | fields
    return job, Entry(consumer=consumer or consumer_of(job), recorded_at=recorded_at, **values)


def consumer_of(sequence: int) -> str:
    """Return the consumer that a job's subject names, which exists for all but the last subject."""
    return SUBJECTS[(sequence - 1) % len(SUBJECTS)].split(".")[0]


def with_consumers(context: ScanContext, **fields: Any) -> ScanContext:
    """Replace fields of all consumers; by default every job is delivered and three are in flight."""
    values = {"delivered": JOBS + 10, "ack_floor": 0, "in_flight": 3} | fields
    consumers = {name: replace(consumer, **values) for name, consumer in context.snapshot.consumers.items()}
    return replace(context, snapshot=replace(context.snapshot, consumers=consumers))


@st.composite
def any_entries(draw: st.DrawFn, queue: ScannedQueue) -> list[tuple[int, Entry]]:
    """Draw entries about the queue's jobs, of any kind and time: several about a job, or one about each of most."""
    late = datetime.now(UTC) + timedelta(hours=1)

    @st.composite
    def entries(draw: st.DrawFn, jobs: st.SearchStrategy[int] = sequences) -> tuple[int, Entry]:
        job = draw(jobs)
        consumer = draw(st.sampled_from([*[consumer_of(job)] * 5, "till", "other"]))
        recorded_at = draw(st.one_of(st.just(late), any_times(queue)))
        sequence, deliveries = draw(st.integers(1, 2**40)), draw(st.sampled_from([0, 1, 5]))
        return advisory(job, recorded_at, consumer, kind=draw(kinds), sequence=sequence, deliveries=deliveries)

    several = st.lists(entries(st.integers(7, 20)), max_size=40)
    one_per_job = st.lists(entries(), min_size=20, max_size=JOBS, unique_by=lambda entry: entry[0])
    return draw(st.one_of(several, one_per_job))


@st.composite
def any_context(draw: st.DrawFn, queue: ScannedQueue) -> ScanContext:
    """Draw what a scan knows: how far the consumers have come, what was created anew, and whether events exist."""
    delivered, in_flight = draw(st.sampled_from([0, JOBS // 2, JOBS + 10])), draw(st.sampled_from([3, 0]))
    context = with_consumers(queue.context, delivered=delivered, in_flight=in_flight)
    if draw(st.booleans()):
        context = replace(context, snapshot=replace(context.snapshot, created=draw(any_times(queue)).isoformat()))
    if draw(st.booleans()):
        context = with_consumers(context, created=draw(any_times(queue)))
    if draw(st.booleans()):
        companions = {name: info for name, info in context.snapshot.companions.items() if name != context.events}
        context = replace(context, snapshot=replace(context.snapshot, companions=companions))
    return context


def any_times(queue: ScannedQueue) -> st.SearchStrategy[datetime]:
    """Return times around those from which validity is computed."""
    shifts = st.sampled_from([-MICROSECOND, timedelta(), MICROSECOND, timedelta(seconds=1), timedelta(hours=1)])
    return st.builds(lambda time, shift: time + shift, st.sampled_from(queue.times), shifts)


sequences = st.integers(1, JOBS + 3)
kinds = st.sampled_from([*[EntryKind.DELIVERIES] * 6, *EntryKind])
