"""Looking for dead letters, so that none goes unseen and nothing else is taken for one.

In this order: have the server tell what it kept to itself, read the dead letter queue, compare with the consumers'
numbers, and prove every single letter.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from heapq import merge
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.dead_letters.classifier import Classifier, NotDead, Status
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex, read_index
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.reconciliation import Reconciliation, reconcile
from airflow_provider_jetstream.jetstream.dead_letters.risks import find_risks
from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot, take_snapshot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import DeadLetterQueue
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

PAGE = 250
_LOOK_AGAIN = timedelta(seconds=0.2)


@dataclass(frozen=True, slots=True)
class Page:
    """Some of what a scan found, in the order of the jobs.

    :param letters: dead letters that were selected
    :param dismissed: what the dead letter queue holds about other jobs
    """

    letters: tuple[DeadLetter, ...]
    dismissed: tuple[NotDead, ...]


@dataclass(slots=True)
class Scan:
    """One look at a queue's dead letters; make it with :meth:`begin`.

    :param connection: the server
    :param queue: the work queue
    :param premises: what every judgement goes by
    :param around: how its stream and consumers are; looked at again where time has passed
    :param index: what its dead letter queue says about which jobs
    :param reckoning: what doesn't agree with the consumers' numbers
    :param risks: what could be lost as things are, a sentence each
    :param audit: the record of redrives, if it exists
    :param archive: the archive, if it exists
    :param looked_at: when ``around`` was seen
    :param dismissed: how many jobs were no dead letters after all, by verdict
    :param unkept: jobs whose body the dead letter queue doesn't hold though it may be needed yet
    :param complete: whether every job was judged
    :param page_size: how many letters are held at once
    """

    connection: Connection
    queue: WorkQueue
    context: ScanContext
    snapshot: QueueSnapshot
    index: EntryIndex
    reconciliation: Reconciliation
    risks: tuple[str, ...]
    audit: AuditLog | None
    archive: ArchiveReader | None
    loaded_at: datetime
    _judge: Classifier
    _reconnects: int
    dismissed: Counter[Status] = field(default_factory=Counter)
    unpreserved: set[int] = field(default_factory=set)
    complete: bool = False
    page_size: int = PAGE

    @classmethod
    async def begin(cls, connection: Connection, queue: WorkQueue, *, vanished: bool = False) -> Scan:
        """Look at the queue as a whole.

        :param connection: the server
        :param queue: the work queue
        :param vanished: whether a job that vanished counts as a dead letter
        :return: the scan
        :raises QueueDeclarationError: the queue declares no dead letter queue
        :raises NotFoundError: the work queue or its dead letter queue doesn't exist
        """
        letters, looked_at = require_dead_letters(queue).name, datetime.now(UTC)
        reconnects = connection.reconnects
        around = await take_snapshot(connection, queue.name)
        index = await read_index(connection, letters, queue.name, around.created)
        audit = await AuditLog.open(connection, queue, around.created)
        reckoning = await reconcile(connection, around, index, audit)
        premises = await ScanContext.load(connection, queue, around, letters, vanished=vanished)
        return await cls._of(connection, premises, index, reckoning, audit, looked_at, reconnects)

    @classmethod
    async def for_partition(
        cls, connection: Connection, premises: ScanContext, index: EntryIndex, reckoning: Reconciliation
    ) -> Scan:
        """Go on with some jobs of a scan that was begun elsewhere; to :meth:`pages` they are all there are.

        :param connection: the server
        :param premises: what that scan goes by
        :param index: what the dead letter queue says about these jobs
        :param reckoning: its :meth:`untold` ones among them as orphans, and the doubted consumers
        :return: the part
        """
        looked_at, reconnects = datetime.now(UTC), connection.reconnects
        # Those that no consumer takes are among the orphans.
        premises = replace(premises, snapshot=replace(premises.snapshot, unconsumed={}))
        audit = await AuditLog.open(connection, premises.queue, premises.snapshot.created)
        return await cls._of(connection, premises, index, reckoning, audit, looked_at, reconnects, ahead=True)

    @classmethod
    async def _of(
        cls,
        connection: Connection,
        premises: ScanContext,
        index: EntryIndex,
        reckoning: Reconciliation,
        audit: AuditLog | None,
        looked_at: datetime,
        reconnects: int,
        *,
        ahead: bool = False,
    ) -> Scan:
        queue, around = premises.queue, premises.snapshot
        archive = await ArchiveReader.open(connection, queue, around.created_at)
        doubted = reckoning.inconsistent_consumers
        judge = await premises.classifier(
            connection, index, archive=archive, audit=audit, inconsistent_consumers=doubted, read_metrics=ahead
        )
        risks = find_risks(
            around, premises.letters, index.unreadable, archive=archive is not None, audit=audit is not None
        )
        return cls(
            connection, queue, premises, around, index, reckoning, risks, audit, archive, looked_at, judge, reconnects
        )

    @property
    def dead_letter_queue(self) -> str:
        """The dead letter queue's stream."""
        return require_dead_letters(self.queue).name

    @property
    def undeliverable(self) -> int:
        """How many jobs no consumer takes."""
        return sum(self.snapshot.unconsumed.values())

    async def pages(self, selection: Selection, after: int = 0) -> AsyncGenerator[Page, None]:
        """Give what was found, proved just before it is given.

        :param selection: which dead letters
        :param after: only jobs of higher stream sequences
        :return: pages in the order of the jobs
        """
        batch: list[tuple[int, tuple[Entry, ...]]] = []
        untold = [each for each in await self.without_entry(selection) if each > after]
        for job in _merged(self.index.jobs(after), untold):
            if selection.sequences is not None and job[0] not in selection.sequences:
                continue
            batch.append(job)
            if len(batch) >= self.page_size:
                yield await self._page(batch, selection)
                batch = []
        if batch:
            yield await self._page(batch, selection)
        self.complete |= selection.sequences is None and after == 0

    async def letters(self, selection: Selection | None = None, after: int = 0) -> AsyncGenerator[DeadLetter, None]:
        """Give the dead letters one by one.

        :param selection: which; all in circulation where absent
        :param after: only jobs of higher stream sequences
        :return: the letters in the order of the jobs
        """
        async for page in self.pages(selection or Selection(), after):
            for letter in page.letters:
                yield letter

    async def classify_again(
        self, letters: Sequence[DeadLetter], *, refresh: bool = False
    ) -> list[DeadLetter | NotDead]:
        """Judge letters once more, since time has passed.

        :param letters: what :meth:`pages` gave
        :param look_around_again: whether the queue and its consumers may have changed, however short the time
        :return: what each is now
        """
        return await self.classify([letter.sequence for letter in letters], refresh=refresh)

    async def classify(self, sequences: Sequence[int], *, refresh: bool = False) -> list[DeadLetter | NotDead]:
        """Judge jobs by their sequences.

        :param sequences: stream sequences, which something may be known about or not
        :param look_around_again: whether the queue and its consumers may have changed, however short the time
        :return: what each is now
        """
        crashed = self.connection.reconnects != self._reconnects
        if refresh or crashed or datetime.now(UTC) - self.loaded_at > _LOOK_AGAIN:
            self._reconnects, self.loaded_at = self.connection.reconnects, datetime.now(UTC)
            self.snapshot = self._judge.snapshot = await take_snapshot(self.connection, self.queue.name)
        if crashed:
            # The server may have forgotten deaths that it had told of.
            reckoning = await reconcile(self.connection, self.snapshot, self.index, self.audit)
            self._judge.inconsistent_consumers = reckoning.inconsistent_consumers
        return await self._judge.classify_all([(sequence, self.index.entries_of(sequence)) for sequence in sequences])

    async def _page(self, batch: list[tuple[int, tuple[Entry, ...]]], selection: Selection) -> Page:
        judged = await self._judge.classify_all(batch)
        letters: list[DeadLetter] = []
        dismissed: list[NotDead] = []
        for (_, mentions), found in zip(batch, judged, strict=True):
            self._note(mentions, found)
            if isinstance(found, NotDead):
                dismissed.append(found)
            elif found.death.reason == Reason.UNDELIVERABLE and not selection.selects_undeliverable:
                # Its consumer is gone, so that its death no longer counts.
                dismissed.append(NotDead(found.sequence, Status.STALE, found.entries, None, stored=True))
            else:
                letters.append(found)
        self.dismissed.update(each.status for each in dismissed)
        now = datetime.now(UTC)
        return Page(tuple(letter for letter in letters if selection.matches(letter, now)), tuple(dismissed))

    def _note(self, mentions: Sequence[Entry], found: DeadLetter | NotDead) -> None:
        if isinstance(found, DeadLetter):
            kept = found.preserved
        elif found.status == Status.VANISHED:
            kept = any(each.kind in (EntryKind.COPY, EntryKind.PROVEN_COPY) for each in mentions)
        else:
            kept = found.status == Status.COMPLETED or not found.stored
        if not kept:
            self.unpreserved.add(found.sequence)

    async def without_entry(self, selection: Selection) -> array[int]:
        """Find the jobs that may be meant though the dead letter queue says nothing about them.

        :param selection: which dead letters
        :return: stream sequences of the orphans, and of jobs that no consumer takes where those are selected
        """
        found = self.reconciliation.orphans[:]
        if selection.selects_undeliverable:
            for subject in self.snapshot.unconsumed:
                async for message in read_range(self.connection, self.queue.name, subject):
                    if message.sequence not in self.index:
                        found.append(message.sequence)
        return array("Q", sorted(found))


def require_dead_letters(queue: WorkQueue) -> DeadLetterQueue:
    """Give a queue's dead letter queue.

    :param queue: the work queue
    :return: its dead letter queue
    :raises QueueDeclarationError: if it declares none
    """
    if queue.dead_letters is None:
        raise QueueDeclarationError(
            queue.name, ["expected dead_letters, so that there is something to look at: declare a dead letter queue"]
        )
    return queue.dead_letters


def _merged(
    told: Iterator[tuple[int, tuple[Entry, ...]]], untold: list[int]
) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    yield from merge(told, ((sequence, ()) for sequence in untold), key=lambda job: job[0])
