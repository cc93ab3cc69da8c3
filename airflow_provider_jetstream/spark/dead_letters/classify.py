"""One task of a scan: classifies the jobs of its partition with the core's classifier, as if they were all jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import Reconciliation
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import index_from_batches
from airflow_provider_jetstream.spark.dead_letters.fast_path import FastPath
from airflow_provider_jetstream.spark.dead_letters.letter_rows import letter_batch
from airflow_provider_jetstream.spark.dead_letters.schema import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.dead_letters.status import Page

_BYTES_PER_BATCH = 16 << 20
# Batches of 250 rows would cost a third more of the JVM's time.
_ROWS_PER_BATCH = 2000
# The task gives up, and Spark decides, after this many failures without a page between them.
_ATTEMPTS = 5
_PAUSE = 0.5


@dataclass(frozen=True)
class ClassifyTask:
    """What every task of a scan does; pickled and sent to executors.

    :param options: connection options of the data source
    :param inconsistent_consumers: consumers that hold more jobs than the advisories account for
    :param lost: whether to include jobs whose bodies weren't preserved
    """

    options: Mapping[str, str]
    context: ScanContext
    inconsistent_consumers: frozenset[str]
    selection: Selection
    lost: bool

    def classify(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Classify jobs.

        :param batches: the jobs' entries, in order
        :return: the dead letters; those of the fast path come first
        :raises TransientError: the server was away for too long
        """
        remaining = yield from self._fast_path(batches)
        if not any(jobs.num_rows for jobs in remaining):
            return
        index, orphans = index_from_batches(remaining)
        reconciliation = Reconciliation(orphans, inconsistent_consumers=set(self.inconsistent_consumers))
        letters: list[DeadLetter] = []
        lost: list[Death] = []
        after = failures = 0
        while True:
            try:
                for page, lost_deaths in self._pages(index, reconciliation, after):
                    failures = 0
                    letters += page.letters
                    lost += lost_deaths
                    sequences = [letter.sequence for letter in page.letters]
                    sequences += [death.sequence for death in lost_deaths]
                    after = max(sequences, default=after)
                    size = sum(len(letter.body) for letter in letters)
                    if len(letters) + len(lost) >= _ROWS_PER_BATCH or size >= _BYTES_PER_BATCH:
                        yield letter_batch(letters, lost)
                        letters, lost = [], []
            except TransientError:
                failures += 1
                if failures >= _ATTEMPTS:
                    raise
                time.sleep(_PAUSE * failures)
            else:
                break
        if letters or lost:
            yield letter_batch(letters, lost)

    def _fast_path(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, list[pa.RecordBatch]]:
        """Yield the letters of the fast path, and return the other jobs."""
        remaining: list[pa.RecordBatch] = []
        # The driver has already selected by sequence; any other condition needs the letter.
        applicable = self.selection.model_copy(update={"sequences": None, "unaccounted": False}).selects_all
        fast_path = FastPath(self.options, self.context, self.inconsistent_consumers)
        for jobs in batches:
            classified = [pa.array([], pa.int64())]
            for letters in fast_path.find_letters(jobs) if applicable else ():
                classified.append(letters.column(SEQUENCE))
                yield letters
            remaining.append(jobs.filter(pc.invert(pc.is_in(jobs.column(SEQUENCE), pa.concat_arrays(classified)))))
        return remaining

    def _pages(
        self, index: EntryIndex, reconciliation: Reconciliation, after: int
    ) -> Iterator[tuple[Page, list[Death]]]:
        with blocking_connection(self.options) as connection:
            queue = self.context.queue
            connection.run(connection.discover_capabilities(stream.name for stream in (queue, *queue.companions())))
            scan = connection.run(Scan.for_partition(connection, self.context, index, reconciliation))
            pages = scan.pages(self.selection, after)
            while page := connection.run(_next_page(pages)):
                yield page, self._lost_deaths(scan, page)

    def _lost_deaths(self, scan: Scan, page: Page) -> list[Death]:
        deaths: list[Death] = []
        for job in page.dismissed if self.lost else ():
            if death := job.death:
                letter = DeadLetter(
                    death, "", b"", (), "", BodySource.COPY, job.entries, preserved=False, ready_at=death.died_at
                )
                if self.selection.matches(letter, scan.now):
                    deaths.append(death)
        return deaths


async def _next_page(pages: AsyncGenerator[Page, None]) -> Page | None:
    # Not anext(pages, None): CPython 3.12 unpacks a tuple that is sent into it, and answers of the server are tuples.
    try:
        return await anext(pages)
    except StopAsyncIteration:
        return None
