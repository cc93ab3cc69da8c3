"""What a dead letter queue says about which jobs, as rows on their way from the driver to tasks."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryColumns, EntryIndex
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

# A row for each job: nothing more than its sequence where nobody told of it.
JOB_SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("entries", pa.list_(pa.int64())),
        pa.field("kinds", pa.list_(pa.int8())),
        pa.field("consumers", pa.list_(pa.string())),
        pa.field("told_at", pa.list_(pa.int64())),
        pa.field("deliveries", pa.list_(pa.int64())),
    ]
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS = {int(each): each for each in EntryKind}
# Sequences beyond are no server's, but an entry may say anything.
_LAST_SEQUENCE = 2**63 - 1


async def load_queue(connection: BlockingConnection, queue: Any) -> WorkQueue:
    """Give a queue's declaration.

    :param connection: the server
    :param queue: the declaration in any form, or a name, which is looked up
    :return: the declaration
    :raises NotFoundError: there is no such queue
    """
    if isinstance(queue, str) and not queue.endswith((".yaml", ".yml")):
        return await discover_queue(connection, queue)
    return WorkQueue.load(queue)


async def scanned_jobs(scan: Scan, selection: Selection) -> pa.Table:
    """Give what is known about the jobs that may be meant.

    :param scan: the look at the queue
    :param selection: which letters
    :return: a row for each job, in their order
    """
    return job_table(scan.index, await scan.without_entry(selection), selection.sequences)


def job_table(index: EntryIndex, others: array[int], wanted: Collection[int] | None = None) -> pa.Table:
    """Write an index as rows.

    :param index: what is said about jobs
    :param others: jobs of which nothing is said
    :param wanted: the only jobs that are meant
    :return: a row for each job, in their order
    """
    columns = index.columns()
    sequences, untold = np.frombuffer(columns.sequences, np.uint64), np.frombuffer(others, np.uint64)
    meant = sequences <= _LAST_SEQUENCE
    if wanted is not None:
        some = np.fromiter(wanted, np.uint64)
        meant &= np.isin(sequences, some)
        untold = untold[np.isin(untold, some)]
    sequences = sequences[meant]
    jobs, counts = np.unique(sequences, return_counts=True)
    # Jobs without entries come between those with some, whose entries stay in their order.
    order = np.argsort(np.concatenate([jobs, untold]), kind="stable")
    jobs = np.concatenate([jobs, untold])[order]
    counts = np.concatenate([counts, np.zeros(len(untold), counts.dtype)])[order]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    names = pa.array(columns.names, pa.string()).take(pa.array(np.frombuffer(columns.consumers, np.uint32)[meant]))
    told = {
        "entries": _of(columns.entries, np.uint64, meant),
        "kinds": _of(columns.kinds, np.uint8, meant),
        "consumers": names,
        "told_at": _of(columns.recorded_at, np.int64, meant),
        "deliveries": _of(columns.deliveries, np.uint32, meant),
    }
    lists = [
        pa.ListArray.from_arrays(offsets, told[field.name].cast(field.type.value_type))
        for field in list(JOB_SCHEMA)[1:]
    ]
    return pa.Table.from_arrays([pa.array(jobs.astype(np.int64)), *lists], schema=JOB_SCHEMA)


def index_from_batches(batches: Iterable[pa.RecordBatch]) -> tuple[EntryIndex, array[int]]:
    """Take such rows.

    :param batches: of rows
    :return: what is said about jobs, and the jobs of which nothing is said
    """
    index, untold = EntryIndex(), array("Q")
    for batch in batches:
        sequences = batch.column(0).to_numpy()
        counts = np.diff(batch.column(1).offsets.to_numpy())
        untold.extend(sequences[counts == 0].tolist())
        entries, kinds, consumers, told_at, deliveries = (column.flatten() for column in batch.columns[1:])
        names, places = _encoded(consumers)
        index.extend(
            EntryColumns(
                array("Q", np.repeat(sequences, counts).tolist()),
                array("Q", _plain(entries)),
                array("B", _plain(kinds)),
                array("I", places),
                array("q", _plain(told_at)),
                array("I", _plain(deliveries)),
                names,
            )
        )
    return index, array("Q", sorted(untold))


def entries_from_columns(columns: Sequence[pa.ListArray]) -> list[tuple[Entry, ...]]:
    """Take the columns of such rows but the first; lists may be null.

    :param columns: in the order of the schema
    :return: what is said about the job of each row
    """
    counts = _plain(columns[0].value_lengths().fill_null(0))
    entries, kinds, consumers, told_at, deliveries = (column.flatten() for column in columns)
    names, places = _encoded(consumers)
    flat = zip(_plain(entries), _plain(kinds), places, _plain(told_at), _plain(deliveries), strict=True)
    mentions = iter(
        [
            Entry(entry, _KINDS[kind], names[place], _EPOCH + timedelta(microseconds=told), count)
            for entry, kind, place, told, count in flat
        ]
    )
    return [tuple(islice(mentions, count)) for count in counts]


def _encoded(texts: pa.Array) -> tuple[list[str | None], list[int]]:
    """Give different texts, the last of which is none, and the place of each among them."""
    encoded = texts.dictionary_encode()
    names = [*encoded.dictionary.to_pylist(), None]
    return names, _plain(encoded.indices.fill_null(len(names) - 1))


def _plain(numbers: pa.Array) -> list[int]:
    """Give Python's numbers, at a tenth of the price of Arrow's own way."""
    plain: list[int] = numbers.to_numpy(zero_copy_only=False).tolist()
    return plain


def _of(values: array[int], kind: type[np.generic], meant: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.frombuffer(values, kind)[meant])
