"""Plain dead letters, judged together as columns.

A letter is plain if all that is said about it is the server's advisory that it used up its deliveries. Whether it is
dead then follows from a few numbers, by which :mod:`airflow_provider_jetstream.jetstream.dead_letters.proof` goes as
well. Everything else is left to the judge there: that is never wrong, and costs nothing but time.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.audit import Audit
from airflow_provider_jetstream.jetstream.dead_letters.mentions import Kind
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.names import completion_subject, letter_audit_subject, marker_subject
from airflow_provider_jetstream.jetstream.stored import stream_info
from airflow_provider_jetstream.spark.columns import OWN_HEADERS, TIME_TEXT, Columns
from airflow_provider_jetstream.spark.connection_options import wire_settings
from airflow_provider_jetstream.spark.dead_letters.plain_rows import PlainRows, plain_batch
from airflow_provider_jetstream.spark.direct_fetch import DirectFetch
from airflow_provider_jetstream.spark.driven import driven
from airflow_provider_jetstream.spark.options import read_options
from airflow_provider_jetstream.spark.streams import Stream
from airflow_provider_jetstream.spark.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from airflow_provider_jetstream.jetstream.dead_letters.premises import Premises
    from airflow_provider_jetstream.spark.driven import DrivenConnection

    Integers = NDArray[np.int64]

# Of at most so many sequences one is wanted, where it pays to take what lies between.
_SPARSE = 2
_NAMES = ("value", "subject", "seq", "timestamp", TIME_TEXT, OWN_HEADERS)
_COLUMNS = Columns(_NAMES, (True,) * len(_NAMES))
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# In place of bytes of a subject that aren't text.
_REPLACED = "\ufffd"


class Plain:
    """Finds the plain letters among a task's jobs.

    :param given: where and as whom, as the data source's options say it
    :param premises: what the scan goes by
    :param doubted: consumers that hold more jobs than the advisories leave room for
    """

    def __init__(self, given: Mapping[str, str], premises: Premises, doubted: Collection[str]) -> None:
        self._given = given
        self._premises = premises
        self._doubted = doubted
        self._around = premises.around

    def find(self, jobs: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
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
                connection = stack.enter_context(driven(self._given))
                queue = self._premises.queue
                connection.run(connection.learn(stream.name for stream in (queue, *queue.companions())))
                if queue.name not in connection.runs:
                    return
                audit = connection.run(Audit.open(connection, queue, self._around.created))
                audited = audit.stream if audit else None
                wire = stack.enter_context(closing(Wire(wire_settings(self._given))))
                options = read_options({"stream": queue.name}, "read")
                fetch = DirectFetch(Stream(wire, queue.name), ">", _COLUMNS, options)
                for fetched in fetch.fetch(int(sequences[0]), int(sequences[-1])):
                    rows = self._dead(_beside(told, fetched.batch))
                    if len(rows):
                        rows = rows.where(~self._spoken_of(connection, rows, audited))
                    if len(rows):
                        yield plain_batch(rows, self._around)
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
        plain = told["kinds"].to_numpy()[first] == Kind.DELIVERIES
        columns = {"sequence": jobs.column("sequence").take(pa.array(alone[plain]))}
        return pa.record_batch(columns | {name: each.take(pa.array(first[plain])) for name, each in told.items()})

    def _dead(self, rows: PlainRows) -> PlainRows:
        """Keep those that are dead by the numbers."""
        if not len(rows):
            return rows
        subjects, consumers = rows.jobs.column("subject").dictionary_encode(), rows.told.column("consumers")
        takers = [
            None if _REPLACED in subject else self._around.taker(subject) for subject in subjects.dictionary.to_pylist()
        ]
        names = pa.array([each and each.name for each in takers], pa.string()).take(subjects.indices)
        by_taker = subjects.indices.to_numpy()
        delivered = np.array([each.delivered if each else 0 for each in takers], np.int64)[by_taker]
        trusted = np.array([bool(each and each.name not in self._doubted) for each in takers])[by_taker]
        since = np.array([_micros(each.created) if each else 0 for each in takers], np.int64)[by_taker]
        patience = np.array([each.patience // _MICROSECOND if each else 0 for each in takers], np.int64)[by_taker]
        since = np.maximum(since, rows.stored)
        same = pc.fill_null(pc.equal(names, consumers), fill_value=False).to_numpy(zero_copy_only=False)
        dead = trusted & same & (rows.sequences <= delivered) & (rows.told_at >= since)
        return PlainRows(rows.jobs, rows.told, patience).where(dead)

    def _spoken_of(self, connection: DrivenConnection, rows: PlainRows, audit: str | None) -> NDArray[np.bool_]:
        """Tell of which of them anything else is stored: an end, what a redrive did, or the marker that it left."""
        queue, sequences = self._around.queue, rows.sequences.tolist()
        spoken_of = np.zeros(len(sequences), np.bool_)

        def ask(stream: str, subjects: list[str]) -> None:
            if found := {each.subject for each in connection.run(connection.last_of(stream, subjects))}:
                spoken_of[:] |= np.array([each in found for each in subjects])

        if self._around.marks:
            ask(queue, [marker_subject(queue, each) for each in sequences])
        if (events := self._premises.events) is not None and self._holds_any(connection, events):
            pairs = zip(rows.told.column("consumers").to_pylist(), sequences, strict=True)
            ask(events, [completion_subject(queue, *pair) for pair in pairs])
        if audit is not None and self._holds_any(connection, audit):
            ask(audit, [letter_audit_subject(queue, each) for each in sequences])
        return spoken_of

    def _holds_any(self, connection: DrivenConnection, stream: str) -> bool:
        """Tell whether a stream needs to be asked: where nobody redrives, the audit is empty."""
        return bool(connection.run(stream_info(connection, stream))["state"]["messages"])


def _beside(told: pa.RecordBatch, jobs: pa.RecordBatch) -> PlainRows:
    """Put what is said about jobs beside those that are stored."""
    sequences, stored = told.column("sequence").to_numpy(), jobs.column("seq").to_numpy()
    at = np.minimum(np.searchsorted(sequences, stored), len(sequences) - 1)
    both = sequences[at] == stored
    told = told.take(pa.array(at[both]))
    jobs = jobs if both.all() else jobs.take(pa.array(np.flatnonzero(both)))
    return PlainRows(jobs, told, np.zeros(jobs.num_rows, np.int64))


def _micros(moment: Any) -> int:
    return int((moment - _EPOCH) // _MICROSECOND)
