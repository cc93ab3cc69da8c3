"""A columnar classifier for plain dead letters.

A letter is plain if the server's advisory that the job used up its deliveries is all that the dead letter queue holds
about it. A few numbers then decide whether the job is dead: the same ones as in
:mod:`~airflow_provider_jetstream.jetstream.dead_letters.classifier`, which classifies every other letter.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.message import parse_headers
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import completion_subject, letter_audit_subject, marker_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.letter import Source
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.dead_letters import schema as named
from airflow_provider_jetstream.spark.dead_letters.letter_rows import as_valid_text, header_values
from airflow_provider_jetstream.spark.source.columns import OWN_HEADERS, TIME_TEXT, Columns, integers, microseconds
from airflow_provider_jetstream.spark.source.fetch_direct import DirectFetch
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

    Integers = NDArray[np.int64]

# Of at most so many sequences one is wanted, where it pays to take what lies between.
_SPARSE = 2
_NAMES = ("value", "subject", "seq", "timestamp", TIME_TEXT, OWN_HEADERS)
_COLUMNS = Columns(_NAMES, (True,) * len(_NAMES))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# In place of bytes of a subject that aren't text.
_REPLACED = "\ufffd"


class FastPath:
    """Finds the plain letters among a task's jobs.

    :param given: where and as whom, as the data source's options say it
    :param premises: what the scan goes by
    :param doubted: consumers that hold more jobs than the advisories leave room for
    """

    def __init__(self, given: Mapping[str, str], premises: ScanContext, doubted: Collection[str]) -> None:
        self._given = given
        self._premises = premises
        self._doubted = doubted
        self._around = premises.snapshot

    def find_letters(self, jobs: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Find them.

        :param jobs: what is said about jobs, in order
        :return: the letters in order; the others are left, and so are those that the server was away for
        """
        told = self._told(jobs)
        sequences = told.column("sequence").to_numpy()
        if not len(sequences) or sequences[-1] - sequences[0] >= _SPARSE * len(sequences):
            return
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(blocking_connection(self._given))
                queue = self._premises.queue
                connection.run(connection.discover_capabilities(stream.name for stream in (queue, *queue.companions())))
                if queue.name not in connection.batch_readers:
                    return
                audit = connection.run(AuditLog.open(connection, queue, self._around.created))
                audited = audit.stream if audit else None
                wire = stack.enter_context(closing(NatsSocket(socket_settings(self._given))))
                options = read_options({"stream": queue.name}, "read")
                fetch = DirectFetch(SourceStream(wire, queue.name), ">", _COLUMNS, options)
                for fetched in fetch.fetch(int(sequences[0]), int(sequences[-1])):
                    rows = self._dead(_beside(told, fetched.batch))
                    if len(rows):
                        rows = rows.where(~self._spoken_of(connection, rows, audited))
                    if len(rows):
                        yield fast_path_batch(rows, self._around)
            except TransientError:
                # The judge tries again.
                return

    def _told(self, jobs: pa.RecordBatch) -> pa.RecordBatch:
        """Choose the jobs of which an advisory is the only entry; one column for each thing that it says."""
        offsets = jobs.column("entries").offsets.to_numpy()
        alone = np.flatnonzero(np.diff(offsets) == 1)
        told = {name: jobs.column(name).flatten() for name in jobs.schema.names[1:]}
        # Flattened lists begin with the first list's first element.
        first = offsets[alone] - offsets[:1]
        plain = told["kinds"].to_numpy()[first] == EntryKind.DELIVERIES
        columns = {"sequence": jobs.column("sequence").take(pa.array(alone[plain]))}
        return pa.record_batch(columns | {name: each.take(pa.array(first[plain])) for name, each in told.items()})

    def _dead(self, rows: FastPathRows) -> FastPathRows:
        """Keep those that are dead by the numbers."""
        if not len(rows):
            return rows
        subjects, consumers = rows.jobs.column("subject").dictionary_encode(), rows.entries.column("consumers")
        takers = [
            None if _REPLACED in subject else self._around.consumer_for(subject)
            for subject in subjects.dictionary.to_pylist()
        ]
        names = pa.array([each and each.name for each in takers], pa.string()).take(subjects.indices)
        by_taker = subjects.indices.to_numpy()
        delivered = np.array([each.delivered if each else 0 for each in takers], np.int64)[by_taker]
        trusted = np.array([bool(each and each.name not in self._doubted) for each in takers])[by_taker]
        since = np.array([_micros(each.created) if each else 0 for each in takers], np.int64)[by_taker]
        patience = np.array([each.max_ack_wait // _MICROSECOND if each else 0 for each in takers], np.int64)[by_taker]
        since = np.maximum(since, rows.stored)
        same = pc.fill_null(pc.equal(names, consumers), fill_value=False).to_numpy(zero_copy_only=False)
        dead = trusted & same & (rows.sequences <= delivered) & (rows.told_at >= since)
        return FastPathRows(rows.jobs, rows.entries, patience).where(dead)

    def _spoken_of(self, connection: BlockingConnection, rows: FastPathRows, audit: str | None) -> NDArray[np.bool_]:
        """Tell of which of them anything else is stored: an end, what a redrive did, or the marker that it left."""
        queue, sequences = self._around.queue, rows.sequences.tolist()
        spoken_of = np.zeros(len(sequences), np.bool_)

        def ask(stream: str, subjects: list[str]) -> None:
            if found := {each.subject for each in connection.run(connection.last_messages(stream, subjects))}:
                spoken_of[:] |= np.array([each in found for each in subjects])

        if self._around.captures_markers:
            ask(queue, [marker_subject(queue, each) for each in sequences])
        if (events := self._premises.events) is not None and self._holds_any(connection, events):
            pairs = zip(rows.entries.column("consumers").to_pylist(), sequences, strict=True)
            ask(events, [completion_subject(queue, *pair) for pair in pairs])
        if audit is not None and self._holds_any(connection, audit):
            ask(audit, [letter_audit_subject(queue, each) for each in sequences])
        return spoken_of

    def _holds_any(self, connection: BlockingConnection, stream: str) -> bool:
        """Tell whether a stream needs to be asked: where nobody redrives, the audit is empty."""
        return bool(connection.run(stream_info(connection, stream))["state"]["messages"])


def _beside(told: pa.RecordBatch, jobs: pa.RecordBatch) -> FastPathRows:
    """Put what is said about jobs beside those that are stored."""
    sequences, stored = told.column("sequence").to_numpy(), jobs.column("seq").to_numpy()
    at = np.minimum(np.searchsorted(sequences, stored), len(sequences) - 1)
    both = sequences[at] == stored
    told = told.take(pa.array(at[both]))
    jobs = jobs if both.all() else jobs.take(pa.array(np.flatnonzero(both)))
    return FastPathRows(jobs, told, np.zeros(jobs.num_rows, np.int64))


def _micros(moment: Any) -> int:
    return int((moment - _EPOCH) // _MICROSECOND)


# Of headers that are none.
_FIRST_LINE = len(b"NATS/1.0\r\n")
_OF_HEADERS = (
    named.HEADERS,
    named.JOB_ID,
    named.DAG_ID,
    named.RUN_ID,
    named.TASK_ID,
    named.MAP_INDEX,
    named.REDRIVE_COUNT,
)


@dataclass(frozen=True, slots=True)
class FastPathRows:
    """Jobs, and what an advisory says about each.

    :param jobs: as they are stored
    :param told: what the advisory says
    :param patience: microseconds for which a worker may still be at it
    """

    jobs: pa.RecordBatch
    entries: pa.RecordBatch
    ack_wait: Integers

    def __len__(self) -> int:
        return len(self.ack_wait)

    @property
    def sequences(self) -> Integers:
        """Their stream sequences."""
        found: Integers = self.jobs.column("seq").to_numpy()
        return found

    @property
    def stored(self) -> Integers:
        """When they were stored, in microseconds since 1970."""
        found: Integers = self.jobs.column("timestamp").cast(pa.int64()).to_numpy()
        return found

    @property
    def told_at(self) -> Integers:
        """When they died, in microseconds since 1970."""
        found: Integers = self.entries.column("told_at").to_numpy()
        return found

    def where(self, chosen: NDArray[np.bool_]) -> FastPathRows:
        """Choose some.

        :param chosen: which ones
        :return: those
        """
        if chosen.all():
            return self
        at = pa.array(np.flatnonzero(chosen))
        return FastPathRows(self.jobs.take(at), self.entries.take(at), self.ack_wait[chosen])


def fast_path_batch(rows: FastPathRows, around: QueueSnapshot) -> pa.RecordBatch:
    """Write plain letters as :func:`~.records.batch_of` writes letters.

    :param rows: at least one
    :param around: how their queue is
    :return: a row each
    """
    count, jobs, told = len(rows), rows.jobs, rows.entries
    consumers = told.column("consumers").dictionary_encode()
    names = consumers.dictionary.to_pylist()
    deliveries = told.column("deliveries").to_numpy()
    told_by_headers = _headers(rows)
    columns: dict[str, Any] = {
        named.SEQUENCE: jobs.column("seq"),
        named.SUBJECT: jobs.column("subject"),
        named.BODY: jobs.column("value"),
        named.REASON: _same(Reason.MAX_DELIVERIES.value, count),
        named.CONSUMER: pa.array([as_valid_text(name) for name in names]).take(consumers.indices),
        named.DELIVERIES: pa.array(deliveries, mask=deliveries == 0),
        named.FINGERPRINT: pa.array([_fingerprint(name, around) for name in names]).take(consumers.indices),
        named.FIRST_STORED: jobs.column("timestamp"),
        named.DIED_AT: microseconds(rows.told_at),
        named.BODY_SOURCE: _same(Source.QUEUE.value, count),
        named.STATE: _same(named.CIRCULATING, count),
        named.STREAM: _same(around.queue, count),
        named.STREAM_CREATED: _same(around.created, count),
        named.TIME: jobs.column(TIME_TEXT),
        named.ENTRIES: pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), told.column("entries")),
        named.KEPT: pa.array(np.zeros(count, np.bool_)),
        named.READY_AT: microseconds(rows.told_at + rows.ack_wait),
        **told_by_headers,
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in named.LETTER_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=named.LETTER_SCHEMA)


def _headers(rows: FastPathRows) -> dict[str, pa.Array]:
    """Give the columns that headers tell."""
    own = rows.jobs.column(OWN_HEADERS)
    sizes = np.diff(np.frombuffer(own.buffers()[1], np.int32)[own.offset : own.offset + len(own) + 1])
    if (sizes <= _FIRST_LINE).all():
        count, field = len(own), named.LETTER_SCHEMA.field(named.HEADERS)
        empty = pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], field.type.value_type))
        job_ids, redrives = rows.jobs.column("seq").cast(pa.string()), integers(np.zeros(count, np.int64))
        return {named.HEADERS: empty, named.JOB_ID: job_ids, named.REDRIVE_COUNT: redrives}
    parsed = [
        header_values(parse_headers(block) if len(block) > _FIRST_LINE else (), sequence)
        for block, sequence in zip(own.to_pylist(), rows.sequences.tolist(), strict=True)
    ]
    return {
        name: pa.array(values, named.LETTER_SCHEMA.field(name).type)
        for name, values in zip(_OF_HEADERS, zip(*parsed, strict=True), strict=True)
    }


def _fingerprint(consumer: str, around: QueueSnapshot) -> str:
    death = Death(around.queue, around.created, 0, consumer, Reason.MAX_DELIVERIES, around.created_at)
    return death.fingerprint


def _same(text: str, count: int) -> pa.StringArray:
    return pa.repeat(pa.scalar(text), count)
