"""The jobs that a scan has found, divided among tasks: each task gets the part of the entry index about its jobs.

A part is one value of a data frame. As rows of their own, jobs would be serialised by the JVM for every action, sampled
for their ranges and shuffled, which took more of its time than the letters that come back.
"""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyspark.sql.utils import is_remote

from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

# Some seconds of work, which is lost where a task is retried.
ROWS_PER_TASK = 20_000


async def load_queue(connection: Connection, queue: Any) -> WorkQueue:
    """Return a queue's declaration; a name is looked up on the server.

    :raises NotFoundError: there is no such queue
    """
    if isinstance(queue, str) and not queue.endswith((".yaml", ".yml")):
        return await discover_queue(connection, queue)
    return WorkQueue.load(queue)


@dataclass(frozen=True, slots=True)
class ScannedJobs:
    """Some jobs of a scan, in order.

    :param sequences: their stream sequences
    :param index: the entries about them, and perhaps about others
    :param without_entry: those of them that have no entry, in order
    """

    sequences: array[int]
    index: EntryIndex
    without_entry: array[int]

    @classmethod
    async def of_scan(cls, scan: Scan, selection: Selection) -> Self:
        """Return the jobs that may be selected."""
        without_entry = await scan.without_entry(selection)
        jobs = cls(array("Q", sorted({*scan.index.sequences(SEQUENCE), *without_entry})), scan.index, without_entry)
        return jobs if selection.sequences is None else jobs.among(selection.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def among(self, sequences: Collection[int]) -> Self:
        """Return those that are among some sequences."""
        without_entry = array("Q", (sequence for sequence in self.without_entry if sequence in sequences))
        some = array("Q", (sequence for sequence in self.sequences if sequence in sequences))
        return type(self)(some, self.index, without_entry)

    def part(self, start: int, stop: int) -> bytes:
        """Return the entries about the jobs of some positions, for :func:`unpack_part`."""
        some = self.sequences[start:stop]
        low, high = bisect_left(self.without_entry, some[0]), bisect_right(self.without_entry, some[-1])
        return pickle.dumps((self.index.part(some), self.without_entry[low:high]))


def unpack_part(value: bytes) -> tuple[EntryIndex, array[int]]:
    """Return what :meth:`ScannedJobs.part` has packed: an index, and the jobs without an entry."""
    # The driver has made it, as it has made the code that runs here.
    part: tuple[EntryIndex, array[int]] = pickle.loads(value)  # noqa: S301
    return part


def parallel_tasks(session: SparkSession) -> int:
    """Return how many tasks run at a time; two with Spark Connect, which doesn't report it."""
    # Fewer tasks than could run at a time do no harm.
    return 2 if is_remote() else max(1, session.sparkContext.defaultParallelism)


def task_count(session: SparkSession, jobs: int) -> int:
    """Return among how many tasks jobs are divided: a multiple of those that run at a time, so that no slot idles."""
    at_a_time = parallel_tasks(session)
    return at_a_time * max(1, ceil(jobs / ROWS_PER_TASK / at_a_time))


def partition_jobs(session: SparkSession, jobs: ScannedJobs, tasks: int) -> DataFrame:
    """Divide jobs into a partition per task; :func:`unpack_jobs` reads a partition."""
    size = max(1, ceil(len(jobs) / tasks))
    packed = [jobs.part(start, start + size) for start in range(0, len(jobs), size)]
    table = pa.table({"task": pa.array(range(len(packed)), pa.int32()), "jobs": pa.array(packed, pa.binary())})
    return session.createDataFrame(table).repartitionById(max(1, len(packed)), "task")


def unpack_jobs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[EntryIndex, array[int]]]:
    """Return the parts of a partition that :func:`partition_jobs` made: one, or none of an empty partition."""
    for batch in batches:
        yield from map(unpack_part, batch.column("jobs").to_pylist())
