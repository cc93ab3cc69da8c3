"""One task's share of a scan: the same judge as everywhere, with the jobs that a task was given for all there are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.dead_letters.classifier import Status
from airflow_provider_jetstream.jetstream.dead_letters.entry_merge import merge_entries
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, Source
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import Reconciliation
from airflow_provider_jetstream.jetstream.dead_letters.scan import PAGE, Page, Scan
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.spark.connections import blocking_connection
from airflow_provider_jetstream.spark.dead_letters.entry_table import index_from_batches
from airflow_provider_jetstream.spark.dead_letters.fast_path import FastPath
from airflow_provider_jetstream.spark.dead_letters.letter_rows import letter_batch
from airflow_provider_jetstream.spark.dead_letters.schema import SEQUENCE
from airflow_provider_jetstream.spark.gc_tuning import relaxed_gc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

_BYTES_AT_A_TIME = 16 << 20
# What a task gives to Spark at a time: the JVM takes a third of its time for each batch of 250 again.
_ROWS = 2000
# Failures in a row, without a page between them, after which the task gives up and Spark decides.
_ATTEMPTS = 5
_PAUSE = 0.5


@dataclass(frozen=True)
class ClassifyTask:
    """What every task of a scan does.

    :param given: where and as whom, as the data source's options say it
    :param premises: what the scan goes by
    :param doubted: consumers that hold more jobs than the advisories leave room for
    :param selection: which dead letters
    :param lost: whether jobs whose bodies nobody kept are given as well
    """

    options: Mapping[str, str]
    context: ScanContext
    inconsistent_consumers: frozenset[str]
    selection: Selection
    lost: bool

    def classify(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Judge jobs.

        :param batches: what is said about them, in order
        :return: the dead letters among them; the plain ones come first
        :raises TransientError: the server was away for too long
        """
        left = yield from self._plain(batches)
        if not any(jobs.num_rows for jobs in left):
            return
        index, untold = index_from_batches(left)
        reckoning = Reconciliation(untold, inconsistent_consumers=set(self.inconsistent_consumers))
        letters: list[DeadLetter] = []
        lost: list[Death] = []
        after = failures = 0
        while True:
            try:
                for page, gone in self._pages(index, reckoning, after):
                    failures = 0
                    letters += page.letters
                    lost += gone
                    given = [*(each.sequence for each in page.letters), *(each.sequence for each in gone)]
                    after = max(given, default=after)
                    if len(letters) + len(lost) >= _ROWS or sum(len(each.body) for each in letters) >= _BYTES_AT_A_TIME:
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

    def _plain(self, batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, list[pa.RecordBatch]]:
        """Give the plain letters, and leave the other jobs."""
        rest: list[pa.RecordBatch] = []
        # Which jobs are meant was said before; whatever else is selected takes a letter to tell.
        selected = self.selection.model_copy(update={"sequences": None, "vanished": False}).selects_all
        plain = FastPath(self.options, self.context, self.inconsistent_consumers)
        for jobs in batches:
            found = [pa.array([], pa.int64())]
            for letters in plain.find_letters(jobs) if selected else ():
                found.append(letters.column(SEQUENCE))
                yield letters
            rest.append(jobs.filter(pc.invert(pc.is_in(jobs.column(SEQUENCE), pa.concat_arrays(found)))))
        return rest

    def _pages(self, index: EntryIndex, reckoning: Reconciliation, after: int) -> Iterator[tuple[Page, list[Death]]]:
        with relaxed_gc(), blocking_connection(self.options) as connection:
            queue = self.context.queue
            connection.run(connection.discover_capabilities(stream.name for stream in (queue, *queue.companions())))
            scan = connection.run(Scan.for_partition(connection, self.context, index, reckoning))
            scan.page_size = _page_size(self.context)
            pages = scan.pages(self.selection, after)
            while page := connection.run(_following(pages)):
                yield page, connection.run(self._lost(scan, page))

    async def _lost(self, scan: Scan, page: Page) -> list[Death]:
        found: list[Death] = []
        for each in page.dismissed if self.lost else ():
            told = [one for one in scan.index.entries_of(each.sequence) if one.recorded_at >= scan.snapshot.created_at]
            if each.status != Status.LOST or not told:
                continue
            death = (
                await merge_entries(scan.connection, scan.dead_letter_queue, scan.snapshot, each.sequence, told)
            ).death
            letter = DeadLetter(
                death, "", b"", (), "", Source.COPY, each.entries, preserved=False, ready_at=death.died_at
            )
            if self.selection.matches(letter):
                found.append(death)
        return found


async def _following(pages: AsyncGenerator[Page, None]) -> Page | None:
    return await anext(pages, None)


def _page_size(premises: ScanContext) -> int:
    """Tell how many letters a task holds at once: fewer where they are large."""
    state = premises.snapshot.state
    each = state["bytes"] / max(1, state["messages"])
    return max(1, min(PAGE, int(_BYTES_AT_A_TIME / max(1.0, each))))
