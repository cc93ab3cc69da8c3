"""A scan's entries as an Arrow table, packed into one row of a data frame per task.

As rows of their own, jobs would be serialised by the JVM for every action, sampled for their ranges and shuffled, which
took more of its time than the letters that come back.
"""

from __future__ import annotations

from array import array
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.utils import is_remote

from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryColumns, EntryIndex
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

# A row per job; the lists are empty for a job without an entry.
JOB_SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("entries", pa.list_(pa.int64())),
        pa.field("kinds", pa.list_(pa.int8())),
        pa.field("consumers", pa.list_(pa.string())),
        pa.field("recorded_at", pa.list_(pa.int64())),
        pa.field("deliveries", pa.list_(pa.int64())),
    ]
)

# Some seconds of work, which is lost where a task is retried.
ROWS_PER_TASK = 20_000

# No server assigns larger sequences, but an entry may contain any number.
_LAST_SEQUENCE = 2**63 - 1


async def load_queue(connection: BlockingConnection, queue: Any) -> WorkQueue:
    """Return a queue's declaration; a name is looked up on the server.

    :raises NotFoundError: there is no such queue
    """
    if isinstance(queue, str) and not queue.endswith((".yaml", ".yml")):
        return await discover_queue(connection, queue)
    return WorkQueue.load(queue)


async def scanned_jobs(scan: Scan, selection: Selection) -> pa.Table:
    """Return the entries of the jobs that may be selected, a row per job in their order."""
    return job_table(scan.index, await scan.without_entry(selection), selection.sequences)


def job_table(index: EntryIndex, without_entry: array[int], selected: Collection[int] | None = None) -> pa.Table:
    """Convert an index to a row per job, in the order of the jobs.

    :param without_entry: jobs that have no entry
    :param selected: the only jobs to include
    """
    columns = index.columns()
    sequences, bare = np.frombuffer(columns.sequences, np.uint64), np.frombuffer(without_entry, np.uint64)
    included = sequences <= _LAST_SEQUENCE
    if selected is not None:
        chosen = np.fromiter(selected, np.uint64)
        included &= np.isin(sequences, chosen)
        bare = bare[np.isin(bare, chosen)]
    sequences = sequences[included]
    jobs, counts = np.unique(sequences, return_counts=True)
    # Jobs without entries are sorted in between; the entries of a job stay in their order.
    order = np.argsort(np.concatenate([jobs, bare]), kind="stable")
    jobs = np.concatenate([jobs, bare])[order]
    counts = np.concatenate([counts, np.zeros(len(bare), counts.dtype)])[order]
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    names = pa.array(columns.names, pa.string()).take(pa.array(np.frombuffer(columns.consumers, np.uint32)[included]))
    flat = {
        "entries": _filtered(columns.entries, np.uint64, included),
        "kinds": _filtered(columns.kinds, np.uint8, included),
        "consumers": names,
        "recorded_at": _filtered(columns.recorded_at, np.int64, included),
        "deliveries": _filtered(columns.deliveries, np.uint32, included),
    }
    lists = [
        pa.ListArray.from_arrays(offsets, flat[field.name].cast(field.type.value_type))
        for field in list(JOB_SCHEMA)[1:]
    ]
    return pa.Table.from_arrays([pa.array(jobs.astype(np.int64)), *lists], schema=JOB_SCHEMA)


def index_from_batches(batches: Iterable[pa.RecordBatch]) -> tuple[EntryIndex, array[int]]:
    """Convert rows of :func:`job_table` back to an index and the jobs without an entry."""
    index, without_entry = EntryIndex(), array("Q")
    for batch in batches:
        sequences = batch.column(0).to_numpy()
        counts = np.diff(batch.column(1).offsets.to_numpy())
        without_entry.extend(sequences[counts == 0].tolist())
        entries, kinds, consumers, recorded_at, deliveries = (column.flatten() for column in batch.columns[1:])
        names, name_indexes = _dictionary(consumers)
        index.extend(
            EntryColumns(
                array("Q", np.repeat(sequences, counts).tolist()),
                array("Q", _python_numbers(entries)),
                array("B", _python_numbers(kinds)),
                array("I", name_indexes),
                array("q", _python_numbers(recorded_at)),
                array("I", _python_numbers(deliveries)),
                names,
            )
        )
    return index, array("Q", sorted(without_entry))


def _dictionary(texts: pa.Array) -> tuple[list[str | None], list[int]]:
    """Return the distinct texts, the last of which is ``None``, and each text's index among them."""
    encoded = texts.dictionary_encode()
    names = [*encoded.dictionary.to_pylist(), None]
    return names, _python_numbers(encoded.indices.fill_null(len(names) - 1))


def _python_numbers(numbers: pa.Array) -> list[int]:
    """Convert to Python's numbers, in a tenth of the time of ``to_pylist``."""
    converted: list[int] = numbers.to_numpy(zero_copy_only=False).tolist()
    return converted


def _filtered(values: array[int], kind: type[np.generic], included: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.frombuffer(values, kind)[included])


def parallel_tasks(session: SparkSession) -> int:
    """Return how many tasks run at a time; two with Spark Connect, which doesn't report it."""
    # Fewer tasks than could run at a time do no harm.
    return 2 if is_remote() else max(1, session.sparkContext.defaultParallelism)


def task_count(session: SparkSession, jobs: int) -> int:
    """Return among how many tasks jobs are divided: a multiple of those that run at a time, so that no slot idles."""
    at_a_time = parallel_tasks(session)
    return at_a_time * max(1, ceil(jobs / ROWS_PER_TASK / at_a_time))


def partition_jobs(session: SparkSession, jobs: pa.Table, tasks: int) -> DataFrame:
    """Divide jobs, which are in order, into a partition per task; :func:`unpack_jobs` reads a partition."""
    size = max(1, ceil(jobs.num_rows / tasks))
    packed = [pack_table(jobs.slice(start, size)) for start in range(0, jobs.num_rows, size)]
    table = pa.table({"task": pa.array(range(len(packed)), pa.int32()), "jobs": pa.array(packed, pa.binary())})
    return session.createDataFrame(table).repartitionById(max(1, len(packed)), "task")


def unpack_jobs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the jobs of a partition that :func:`partition_jobs` made, in order."""
    for batch in batches:
        for value in batch.column("jobs"):
            yield from unpack_table(value)


def unpack_table(value: pa.BinaryScalar) -> pa.RecordBatchReader:
    """Read a value that :func:`pack_table` made."""
    return pa.ipc.open_stream(value.as_buffer())


def pack_table(jobs: pa.Table) -> bytes:
    """Serialise a table into one compressed value."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, jobs.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(jobs.combine_chunks())
    value: bytes = sink.getvalue().to_pybytes()
    return value
