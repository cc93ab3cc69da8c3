"""A columnar classifier for the common case: jobs whose only entry is the advisory about used-up deliveries.

A few numbers then decide whether the job is dead, by the same comparison as the core's rule ``by_numbers``. The core's
rules decide on every other letter.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.headers import parse_headers
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams
from airflow_provider_jetstream.jetstream.contract import (
    completion_subject,
    handled_subject,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, origin_of, task_key_of
from airflow_provider_jetstream.jetstream.dead_letters.letter_origins import LetterOrigins
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.queue.consumer_state import are_dead
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.dead_letters import schema
from airflow_provider_jetstream.spark.dead_letters.letter_rows import as_valid_text, header_values
from airflow_provider_jetstream.spark.source.columns import OWN_HEADERS, TIME_TEXT, RequestedColumns
from airflow_provider_jetstream.spark.source.fetch_direct import DirectFetch
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from airflow_provider_jetstream.spark.wire.arrow_buffers import constant_column, integer_column, timestamp_column

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.client.headers import Pairs
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

# Reading everything between the requested sequences pays where at least one in this many is requested.
_SPARSE = 2
_NAMES = ("value", "subject", "seq", "timestamp", TIME_TEXT, OWN_HEADERS)
_COLUMNS = RequestedColumns(_NAMES, (True,) * len(_NAMES))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Stands for bytes of a subject that aren't UTF-8.
_REPLACEMENT = "\ufffd"
# The length of a header block without headers.
_FIRST_LINE = len(b"NATS/1.0\r\n")
_HEADER_COLUMNS = (
    schema.HEADERS,
    schema.JOB_ID,
    schema.DAG_ID,
    schema.RUN_ID,
    schema.TASK_ID,
    schema.MAP_INDEX,
    schema.REDRIVE_COUNT,
)


@dataclass(frozen=True, slots=True)
class FastPathRows:
    """Stored jobs, each with its only entry.

    :param ack_wait: microseconds for which a worker may still have the job
    """

    jobs: pa.RecordBatch
    entries: pa.RecordBatch
    ack_wait: Integers

    def __len__(self) -> int:
        return len(self.ack_wait)

    @property
    def sequences(self) -> Integers:
        """The jobs' stream sequences."""
        sequences: Integers = self.jobs.column("seq").to_numpy()
        return sequences

    @property
    def stored_at(self) -> Integers:
        """When the jobs were stored, in microseconds since 1970."""
        times: Integers = self.jobs.column("timestamp").cast(pa.int64()).to_numpy()
        return times

    @property
    def died_at(self) -> Integers:
        """When the jobs died, in microseconds since 1970."""
        times: Integers = self.entries.column("recorded_at").to_numpy()
        return times

    def where(self, chosen: Mask) -> FastPathRows:
        """Select rows."""
        if chosen.all():
            return self
        indexes = pa.array(np.flatnonzero(chosen))
        return FastPathRows(self.jobs.take(indexes), self.entries.take(indexes), self.ack_wait[chosen])


class FastPath:
    """Finds the letters among a task's jobs that the few numbers prove to be dead.

    :param options: connection options of the data source
    :param inconsistent_consumers: consumers that hold more jobs than the advisories account for
    """

    def __init__(
        self, options: Mapping[str, str], context: ScanContext, inconsistent_consumers: Collection[str]
    ) -> None:
        self._options = options
        self._context = context
        self._inconsistent_consumers = inconsistent_consumers
        self._snapshot = context.snapshot

    def find_letters(self, jobs: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Return the letters in order; the other jobs are left out, and so are those that an interruption prevents.

        :param jobs: the jobs' entries, in order
        """
        if self._context.handlers:
            # They may remove entries at any moment, which the classifier reads again.
            return
        entries = self._single_advisories(jobs)
        sequences = entries.column("sequence").to_numpy()
        if not len(sequences) or sequences[-1] - sequences[0] >= _SPARSE * len(sequences):
            return
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(blocking_connection(self._options))
                queue = self._context.queue
                connection.run(connection.discover_capabilities(stream.name for stream in (queue, *queue.companions())))
                if queue.name not in connection.exact_streams:
                    return
                socket = stack.enter_context(closing(NatsSocket(socket_settings(self._options))))
                options = read_options({"stream": queue.name}, "read")
                fetch = DirectFetch(SourceStream(socket, queue.name), ">", _COLUMNS, options)
                origins = LetterOrigins(connection, queue.name, self._context.events)
                for fetched in fetch.fetch(int(sequences[0]), int(sequences[-1])):
                    rows = self._dead_rows(_stored_rows(entries, fetched.batch))
                    if len(rows):
                        rows = rows.where(~self._has_other_evidence(connection, rows))
                    if len(rows):
                        headers = _own_headers(rows)
                        keys = {key for pairs in headers if (key := task_key_of(pairs))}
                        yield _letter_batch(rows, headers, connection.run(origins.resolve(keys)), self._snapshot)
            except TransientError:
                # The classifier tries again.
                return

    def _single_advisories(self, jobs: pa.RecordBatch) -> pa.RecordBatch:
        """Select the jobs whose only entry is the advisory about used-up deliveries, with a column per field of it."""
        offsets = jobs.column("entries").offsets.to_numpy()
        single = np.flatnonzero(np.diff(offsets) == 1)
        flat = {name: jobs.column(name).flatten() for name in jobs.schema.names[1:]}
        # Flattened lists begin with the first list's first element.
        first = offsets[single] - offsets[:1]
        advisory = flat["kinds"].to_numpy()[first] == EntryKind.DELIVERIES
        columns = {"sequence": jobs.column("sequence").take(pa.array(single[advisory]))}
        return pa.record_batch(
            columns | {name: values.take(pa.array(first[advisory])) for name, values in flat.items()}
        )

    def _dead_rows(self, rows: FastPathRows) -> FastPathRows:
        """Select the jobs that are dead by the consumers' numbers and the advisory."""
        if not len(rows):
            return rows
        subjects = rows.jobs.column("subject").dictionary_encode()
        consumers = [
            None if _REPLACEMENT in subject else self._snapshot.consumer_for(subject)
            for subject in subjects.dictionary.to_pylist()
        ]
        by_subject = subjects.indices.to_numpy()

        def per_row(value: Callable[[ConsumerState], int]) -> Integers:
            values = np.array([value(consumer) if consumer else 0 for consumer in consumers], np.int64)
            values_by_row: Integers = values[by_subject]
            return values_by_row

        trusted = np.array(
            [bool(consumer and consumer.name not in self._inconsistent_consumers) for consumer in consumers]
        )[by_subject]
        names = pa.array([consumer and consumer.name for consumer in consumers], pa.string()).take(subjects.indices)
        same = pc.fill_null(pc.equal(names, rows.entries.column("consumers")), fill_value=False)
        since = np.maximum(per_row(lambda consumer: _to_microseconds(consumer.created)), rows.stored_at)
        has_evidence = trusted & same.to_numpy(zero_copy_only=False) & (rows.died_at >= since)
        up_since = per_row(lambda consumer: _to_microseconds(consumer.up_since) if consumer.up_since else 0)
        dead = has_evidence & are_dead(
            rows.sequences,
            settled=per_row(lambda consumer: consumer.settled),
            delivered=per_row(lambda consumer: consumer.delivered),
            has_evidence=has_evidence & (rows.died_at >= up_since),
        )
        ack_wait = per_row(lambda consumer: consumer.max_ack_wait // _MICROSECOND)
        return FastPathRows(rows.jobs, rows.entries, ack_wait).where(dead)

    def _has_other_evidence(self, connection: BlockingConnection, rows: FastPathRows) -> Mask:
        """Return which jobs have a completion or an audit record."""
        queue, sequences = self._snapshot.queue, rows.sequences.tolist()
        has_evidence = np.zeros(len(sequences), np.bool_)

        def look_up(stream: str, subjects: list[str]) -> None:
            last = connection.run(Streams(connection).last_many(stream, subjects))
            has_evidence[:] |= np.array([last[subject] is not None for subject in subjects])

        if (events := self._context.events) is not None and _has_messages(connection, events):
            pairs = zip(rows.entries.column("consumers").to_pylist(), sequences, strict=True)
            look_up(events, [completion_subject(queue, *pair) for pair in pairs])
        # Without redrives the audit is empty.
        audit = self._context.queue.audit
        if audit and audit.name in self._snapshot.companions and _has_messages(connection, audit.name):
            look_up(audit.name, [letter_audit_subject(queue, sequence) for sequence in sequences])
            look_up(audit.name, [handled_subject(queue, sequence) for sequence in sequences])
        return has_evidence


def _has_messages(connection: BlockingConnection, stream: str) -> bool:
    return bool(connection.run(stream_info(connection, stream))["state"]["messages"])


def _stored_rows(entries: pa.RecordBatch, jobs: pa.RecordBatch) -> FastPathRows:
    """Pair the entries with the jobs that are stored."""
    sequences, stored = entries.column("sequence").to_numpy(), jobs.column("seq").to_numpy()
    indexes = np.minimum(np.searchsorted(sequences, stored), len(sequences) - 1)
    both = sequences[indexes] == stored
    entries = entries.take(pa.array(indexes[both]))
    jobs = jobs if both.all() else jobs.take(pa.array(np.flatnonzero(both)))
    return FastPathRows(jobs, entries, np.zeros(jobs.num_rows, np.int64))


def _to_microseconds(time: datetime) -> int:
    return int((time - _EPOCH) // _MICROSECOND)


def _letter_batch(
    rows: FastPathRows, headers: Sequence[Pairs], origins: Mapping[str, Origin], snapshot: QueueSnapshot
) -> pa.RecordBatch:
    """Convert rows, at least one, to letters in the schema of :func:`~.letter_rows.letter_batch`.

    :param headers: of each row; none at all where no row has any
    :param origins: tasks by their keys
    """
    count, jobs, entries = len(rows), rows.jobs, rows.entries
    consumers = entries.column("consumers").dictionary_encode()
    names = consumers.dictionary.to_pylist()
    deliveries = entries.column("deliveries").to_numpy()
    columns: dict[str, Any] = {
        schema.SEQUENCE: jobs.column("seq"),
        schema.SUBJECT: jobs.column("subject"),
        schema.BODY: jobs.column("value"),
        schema.REASON: constant_column(Reason.MAX_DELIVERIES.value, count),
        schema.CONSUMER: pa.array([as_valid_text(name) for name in names]).take(consumers.indices),
        schema.DELIVERIES: pa.array(deliveries, mask=deliveries == 0),
        schema.FINGERPRINT: pa.array([_fingerprint(name, snapshot) for name in names]).take(consumers.indices),
        schema.FIRST_STORED: jobs.column("timestamp"),
        schema.DIED_AT: timestamp_column(rows.died_at),
        schema.BODY_SOURCE: constant_column(BodySource.QUEUE.value, count),
        schema.STATE: constant_column(schema.CIRCULATING, count),
        schema.STREAM: constant_column(snapshot.queue, count),
        schema.STREAM_CREATED: constant_column(snapshot.created, count),
        schema.TIME: jobs.column(TIME_TEXT),
        schema.ENTRIES: pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), entries.column("entries")),
        schema.KEPT: pa.array(np.zeros(count, np.bool_)),
        schema.READY_AT: timestamp_column(rows.died_at + rows.ack_wait),
        **_header_columns(rows, headers, origins),
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in schema.LETTER_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.LETTER_SCHEMA)


def _own_headers(rows: FastPathRows) -> list[Pairs]:
    """Return the headers of each row; none at all where no row has any."""
    own = rows.jobs.column(OWN_HEADERS)
    sizes = np.diff(np.frombuffer(own.buffers()[1], np.int32)[own.offset : own.offset + len(own) + 1])
    if (sizes <= _FIRST_LINE).all():
        return []
    return [parse_headers(block) if len(block) > _FIRST_LINE else () for block in own.to_pylist()]


def _header_columns(rows: FastPathRows, headers: Sequence[Pairs], origins: Mapping[str, Origin]) -> dict[str, pa.Array]:
    """Return the columns that are read from the jobs' headers."""
    bodies, count = rows.jobs.column("value"), len(rows)
    # A body may state the job's id.
    if not headers and not pc.any(pc.match_substring(bodies, '"id"')).as_py():
        field = schema.LETTER_SCHEMA.field(schema.HEADERS)
        empty = pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], field.type.value_type))
        job_ids, redrives = rows.jobs.column("seq").cast(pa.string()), integer_column(np.zeros(count, np.int64))
        return {schema.HEADERS: empty, schema.JOB_ID: job_ids, schema.REDRIVE_COUNT: redrives}
    parsed = [
        header_values(pairs, body, sequence, origin_of(pairs, origins))
        for pairs, body, sequence in zip(
            headers or [()] * count, bodies.to_pylist(), rows.sequences.tolist(), strict=True
        )
    ]
    return {
        name: pa.array(values, schema.LETTER_SCHEMA.field(name).type)
        for name, values in zip(_HEADER_COLUMNS, zip(*parsed, strict=True), strict=True)
    }


def _fingerprint(consumer: str, snapshot: QueueSnapshot) -> str:
    death = Death(snapshot.queue, snapshot.created, 0, consumer, Reason.MAX_DELIVERIES, snapshot.created_at)
    return death.fingerprint
