"""Plain dead letters as rows: most columns are the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.dead_letters.letter import Source
from airflow_provider_jetstream.jetstream.death import Death, Reason
from airflow_provider_jetstream.jetstream.stored import parse_headers
from airflow_provider_jetstream.spark.columns import OWN_HEADERS, TIME_TEXT, integers, microseconds
from airflow_provider_jetstream.spark.dead_letters import columns as named
from airflow_provider_jetstream.spark.dead_letters.records import of_headers, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.dead_letters.circumstances import Circumstances

    Integers = NDArray[np.int64]

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
class PlainRows:
    """Jobs, and what an advisory says about each.

    :param jobs: as they are stored
    :param told: what the advisory says
    :param patience: microseconds for which a worker may still be at it
    """

    jobs: pa.RecordBatch
    told: pa.RecordBatch
    patience: Integers

    def __len__(self) -> int:
        return len(self.patience)

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
        found: Integers = self.told.column("told_at").to_numpy()
        return found

    def where(self, chosen: NDArray[np.bool_]) -> PlainRows:
        """Choose some.

        :param chosen: which ones
        :return: those
        """
        if chosen.all():
            return self
        at = pa.array(np.flatnonzero(chosen))
        return PlainRows(self.jobs.take(at), self.told.take(at), self.patience[chosen])


def plain_batch(rows: PlainRows, around: Circumstances) -> pa.RecordBatch:
    """Write plain letters as :func:`~.records.batch_of` writes letters.

    :param rows: at least one
    :param around: how their queue is
    :return: a row each
    """
    count, jobs, told = len(rows), rows.jobs, rows.told
    consumers = told.column("consumers").dictionary_encode()
    names = consumers.dictionary.to_pylist()
    deliveries = told.column("deliveries").to_numpy()
    told_by_headers = _headers(rows)
    columns: dict[str, Any] = {
        named.SEQUENCE: jobs.column("seq"),
        named.SUBJECT: jobs.column("subject"),
        named.BODY: jobs.column("value"),
        named.REASON: _same(Reason.MAX_DELIVERIES.value, count),
        named.CONSUMER: pa.array([shown(name) for name in names]).take(consumers.indices),
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
        named.READY_AT: microseconds(rows.told_at + rows.patience),
        **told_by_headers,
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in named.LETTER_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=named.LETTER_SCHEMA)


def _headers(rows: PlainRows) -> dict[str, pa.Array]:
    """Give the columns that headers tell."""
    own = rows.jobs.column(OWN_HEADERS)
    sizes = np.diff(np.frombuffer(own.buffers()[1], np.int32)[own.offset : own.offset + len(own) + 1])
    if (sizes <= _FIRST_LINE).all():
        count, field = len(own), named.LETTER_SCHEMA.field(named.HEADERS)
        empty = pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], field.type.value_type))
        job_ids, redrives = rows.jobs.column("seq").cast(pa.string()), integers(np.zeros(count, np.int64))
        return {named.HEADERS: empty, named.JOB_ID: job_ids, named.REDRIVE_COUNT: redrives}
    parsed = [
        of_headers(parse_headers(block) if len(block) > _FIRST_LINE else (), sequence)
        for block, sequence in zip(own.to_pylist(), rows.sequences.tolist(), strict=True)
    ]
    return {
        name: pa.array(values, named.LETTER_SCHEMA.field(name).type)
        for name, values in zip(_OF_HEADERS, zip(*parsed, strict=True), strict=True)
    }


def _fingerprint(consumer: str, around: Circumstances) -> str:
    death = Death(around.queue, around.created, 0, consumer, Reason.MAX_DELIVERIES, around.created_at)
    return death.fingerprint


def _same(text: str, count: int) -> pa.StringArray:
    return pa.repeat(pa.scalar(text), count)
