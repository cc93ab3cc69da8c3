"""What a scan knows about its queue before it classifies single jobs: plain values that another process can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import handled_filter
from airflow_provider_jetstream.jetstream.dead_letters.facts import Acknowledgements, FactReader
from airflow_provider_jetstream.jetstream.dead_letters.job_facts import QueueFacts
from airflow_provider_jetstream.jetstream.dead_letters.letter_origins import LetterOrigins
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.queue.finding import Risk
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.handlers import DeadLetterHandler
    from airflow_provider_jetstream.jetstream.queue.finding import Finding
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class ScanContext:
    """A queue as a scan found it.

    :param queue: the work queue
    :param snapshot: its stream, companions and consumers
    :param with_unaccounted: whether an unaccounted job with a copy counts as a dead letter
    :param handlers: the consumers of the dead letter queue that remove entries by acknowledging them
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the dead letter queue doesn't exist
    """

    queue: WorkQueue
    snapshot: QueueSnapshot
    with_unaccounted: bool
    handlers: tuple[DeadLetterHandler, ...] = ()

    def __post_init__(self) -> None:
        name = require_dead_letters(self.queue).name
        if name not in self.snapshot.companions:
            raise NotFoundError(
                f"expected stream {name} on the server, found none: provision the queue first, or check the name"
            )

    @property
    def dead_letter_queue(self) -> Mapping[str, Any]:
        """The server's STREAM.INFO of the dead letter queue."""
        return self.snapshot.companions[require_dead_letters(self.queue).name]

    @property
    def handler_names(self) -> tuple[str, ...]:
        """The names of the handlers."""
        return tuple(handler.name for handler in self.handlers)

    @property
    def audit(self) -> Mapping[str, Any] | None:
        """The server's STREAM.INFO of the audit, if it exists."""
        audit = self.queue.audit
        return self.snapshot.companions.get(audit.name) if audit else None

    @property
    def events(self) -> str | None:
        """The stream of completions, if it exists."""
        events = self.queue.events
        return events.name if events and events.name in self.snapshot.companions else None

    def archive_reader(self, connection: Connection, snapshot: QueueSnapshot) -> ArchiveReader | None:
        """Return a reader of the archive as a snapshot found it; ``None`` where there is none."""
        archive = self.queue.archive
        info = snapshot.companions.get(archive.name) if archive else None
        return ArchiveReader.from_info(connection, info, snapshot.info) if info else None

    def findings(
        self, index: EntryIndex, *, perhaps_handled: int = 0, uncertain: Sequence[Finding] = ()
    ) -> tuple[Finding, ...]:
        """Return what is to be known of the queue.

        :param index: the entries of the dead letter queue
        :param perhaps_handled: how many dead jobs a handler may have handled
        :param uncertain: why dead letters are uncertain
        """
        findings = queue_findings(
            self.snapshot,
            self.queue,
            handlers=self.handler_names,
            unreadable=index.unreadable,
            other_domain=index.of_other_domain,
        )
        if perhaps_handled:
            name = self.dead_letter_queue["config"]["name"]
            text = (
                f"whether {perhaps_handled} dead jobs without an entry are handled isn't known, since entries of"
                f" {name} were removed while nothing stored copies of them: they count as uncertain; find out, and"
                " redrive by their sequences those that aren't"
            )
            findings += (Risk("perhaps-handled", text),)
        return (*findings, *uncertain)

    async def reader(
        self,
        connection: Connection,
        index: EntryIndex,
        *,
        archive: ArchiveReader | None,
        audit: AuditLog | None,
        inconsistent_consumers: Collection[str] = (),
        orphans: Collection[int] = (),
        acknowledged: Mapping[int, datetime] | None = None,
    ) -> FactReader:
        """Return what reads the facts about some jobs, and has them decided.

        :param index: the entries about these jobs
        :param orphans: jobs without entries that may be dead letters
        :param acknowledged: when the jobs' last ack metrics were stored, where that was read before
        """
        name, letters = self.snapshot.queue, self.dead_letter_queue["config"]["name"]
        subjects = (self.audit["config"].get("subjects") or []) if self.audit else []
        return FactReader(
            connection,
            QueueFacts(
                self.snapshot,
                connection.domain,
                inconsistent_consumers,
                with_unaccounted=self.with_unaccounted,
                has_handlers=bool(self.handlers),
            ),
            letters,
            acknowledgements=await self._acknowledgements(connection, archive, index, orphans, acknowledged),
            origins=LetterOrigins(connection, name, self.events),
            events=self.events,
            archive=archive,
            audit=audit,
            reports=self.audit["config"]["name"]
            if self.audit and covered_by_any(subjects, handled_filter(name))
            else None,
        )

    async def _acknowledgements(
        self,
        connection: Connection,
        archive: ArchiveReader | None,
        index: EntryIndex,
        orphans: Collection[int],
        known: Mapping[int, datetime] | None,
    ) -> Acknowledgements:
        sequences = (
            {sequence for sequence, _ in index.jobs()} if self.with_unaccounted else {*index.deleted_in_flight()}
        )
        sequences.update(orphans)
        first = await archive.find(min(sequences)) if archive and sequences and known is None else None
        since = first.stored_at if first and first.time else self.snapshot.created_at
        return Acknowledgements(connection, self.events, self.snapshot.queue, sequences, since, known)
