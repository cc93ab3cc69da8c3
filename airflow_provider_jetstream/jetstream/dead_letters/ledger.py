"""The ledger of a queue: which of its jobs are gone without evidence of how they ended.

A work queue removes a job whatever happened to it. A job that is gone is accounted for by its completion, its ack
metric, an entry that says that it was terminated or parked, a record of the audit, or the report of a handler;
otherwise it is *unaccounted*: a worker may have done it while the server was about to crash, or terminated it while the
dead letter queue was full, or somebody may have purged it. Absence proves nothing, so such a job is never redriven by
itself.

The audit stores how far a scan has come, so that the next one reads only what was stored since.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.ledger_checkpoint import read_checkpoint
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.dead_letters.ledger_findings import LedgerFacts, ledger_findings

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_provider_jetstream.jetstream.archive import ArchiveReader
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan_context import ScanContext
    from airflow_provider_jetstream.jetstream.queue.finding import Finding


@dataclass(frozen=True, slots=True)
class Ledger:
    """The jobs of a queue that are gone and not accounted for.

    :param unaccounted: jobs without evidence of their end, though there would be some
    :param unknown: jobs whose end nothing can prove
    :param unread: jobs without evidence, of which it isn't known yet whether there would be some
    :param last: the last sequence of the queue that was looked at
    :param findings: what is to be known of them, a sentence each
    """

    unaccounted: SequenceRanges = field(default_factory=SequenceRanges)
    unknown: SequenceRanges = field(default_factory=SequenceRanges)
    unread: SequenceRanges = field(default_factory=SequenceRanges)
    last: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def needed(self) -> SequenceRanges:
        """The jobs whose copies in the archive may still be needed."""
        return self.unaccounted | self.unknown | self.unread

    @property
    def uncertain(self) -> int:
        """How many jobs may be lost that nothing accounts for."""
        return (self.unaccounted | self.unread).count


async def with_findings(
    ledger: Ledger,
    archive: ArchiveReader,
    context: ScanContext,
    unproved: Collection[str] = (),
    unread_messages: int = 0,
    copied: SequenceRanges | None = None,
) -> Ledger:
    """Add to a ledger what is to be known of it.

    :param unproved: the consumers whose jobs leave no evidence of their end
    :param unread_messages: how many messages were left for the next scan
    :param copied: the jobs of which the dead letter queue has copies
    """
    dropped = await jobs_without_copy(archive, ledger.last) if ledger.unaccounted else SequenceRanges()
    facts = LedgerFacts(
        *(context.snapshot.queue, ledger.unaccounted, ledger.unknown, ledger.unread, unread_messages),
        unproved=unproved,
        without_copy=(ledger.unaccounted & dropped) - (copied or SequenceRanges()),
        events=context.events,
        archive=archive.stream,
    )
    return replace(ledger, findings=ledger_findings(facts))


async def jobs_without_copy(archive: ArchiveReader, last: int) -> SequenceRanges:
    """Return the sequences below that of the first job of which an archive has a copy.

    :param last: the queue's last sequence
    """
    first = await archive.first_job() or last + 1
    return SequenceRanges.between(1, first - 1)


async def last_ledger(connection: Connection, context: ScanContext, archive: ArchiveReader | None) -> Ledger:
    """Return a queue's ledger as the last sensor or redrive left it; one request, and nothing is stored."""
    snapshot, audit = context.snapshot, context.audit
    last = int(snapshot.state["last_seq"])
    if archive is None or audit is None or audit["config"]["name"] in snapshot.empty_companions:
        return Ledger(last=last)
    checkpoint = await read_checkpoint(connection, audit["config"]["name"], snapshot.queue, snapshot.created)
    if checkpoint is None:
        return Ledger(last=last)
    return await with_findings(Ledger(checkpoint.unaccounted, last=last), archive, context)
