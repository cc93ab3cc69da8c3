"""Which dead letters a handler of the dead letter queue has handled, as far as that is known of single jobs.

A handler is a consumer of the dead letter queue, in a program of its own. One that knows this package publishes a
report on ``handled.<queue>.<sequence>``. Any other one only acknowledges the entry; what that proves is found by
:mod:`.removed_entries`, for as long as the handler's consumer exists. So what was found once is recorded in the audit:
a handler may be deleted, or created anew with other settings or another name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message, next_message
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import handled_filter, handled_subject
from airflow_provider_jetstream.jetstream.dead_letters.end_order import Order
from airflow_provider_jetstream.jetstream.dead_letters.entry import is_handled, stored_entries
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HandledJobs:
    """Looks up whether jobs are handled.

    :param queue: the work queue
    :param dead_letter_queue: the dead letter queue's stream
    :param reports: the stream of handlers' reports, if it exists
    :param has_handlers: whether consumers of the dead letter queue remove entries by acknowledging them
    """

    connection: Connection
    queue: str
    dead_letter_queue: str
    reports: str | None
    has_handlers: bool
    _any_report: bool = False
    _reported: set[int] = field(default_factory=set)
    _found: list[LetterRecord] = field(default_factory=list)

    async def refresh(self, empty: Collection[str]) -> None:
        """Read whether there is any report now: most queues never have one, and need no request per job then.

        :param empty: streams that store no message
        """
        self._any_report = (
            self.reports is not None
            and self.reports not in empty
            and await next_message(self.connection, self.reports, 1, handled_filter(self.queue)) is not None
        )

    @property
    def may_have_any(self) -> bool:
        """Whether there is a report, or a handler that removes entries: then :meth:`status` has to read them."""
        return self._any_report or self.has_handlers

    def report_subjects(self, sequences: Sequence[int]) -> list[str]:
        """Return the subjects of the reports that :meth:`status` reads."""
        return [handled_subject(self.queue, sequence) for sequence in sequences] if self._any_report else []

    async def status(
        self,
        letter: DeadLetter,
        entries: Sequence[Entry],
        since: datetime,
        audited: LetterRecord | None,
        order: Callable[[datetime, datetime], Awaitable[Order]],
    ) -> Status | None:
        """Return the status of a dead job that a handler has handled, or is handling; ``None`` for any other.

        It is uncertain where a report may be about an earlier job of its sequence.

        :param letter: the job as a dead letter
        :param entries: its entries that count
        :param since: when the job was certainly alive for the last time; older reports are about an earlier job
        :param audited: the last record about the job, while it is stored
        :param order: returns whether what was stored at the first time is about a job of the second
        """
        # Called for every dead letter, of which few queues have a report.
        reported_at = await self._reported_at(letter.sequence) if self._any_report else None
        recorded_at = audited.at if audited and audited.action == "handled" else None
        orders = {at: await order(at, since) for at in (reported_at, recorded_at) if at}
        if Order.AFTER in orders.values():
            if reported_at and orders[reported_at] is Order.AFTER:
                self._reported.add(letter.sequence)
            return Status.HANDLED
        if Order.UNCLEAR in orders.values():
            return Status.UNCERTAIN
        if is_handled(entries):
            if letter.source == BodySource.QUEUE:
                self._found.append(_record(letter))
            return Status.HANDLED
        # Removed since the index was read: the next scan reads whether by a handler.
        return Status.ALIVE if self.has_handlers and await self._any_removed(stored_entries(entries)) else None

    def take_found(self) -> list[LetterRecord]:
        """Return the records of the jobs that :meth:`status` has found since the last call, for the audit."""
        found, self._found = self._found, []
        return found

    def is_reported(self, sequence: int) -> bool:
        """Return whether :meth:`status` found a report about a job."""
        return sequence in self._reported

    async def _reported_at(self, sequence: int) -> datetime | None:
        if self.reports is None:
            return None
        # Anybody who may publish on the subject can say so, but not before the job exists.
        report = await last_message(self.connection, self.reports, handled_subject(self.queue, sequence))
        return report.stored_at if report else None

    async def _any_removed(self, entries: Sequence[Entry]) -> bool:
        async def is_removed(entry: Entry) -> bool:
            return await get_message(self.connection, self.dead_letter_queue, entry.sequence) is None

        return any(await map_concurrently(is_removed, entries))


async def record_handled(audit: AuditLog, records: Sequence[LetterRecord]) -> None:
    """Record in the audit that jobs are handled; where that isn't possible, the log says what it means."""
    error: JetStreamProviderError | None
    try:
        error = next((error for error in await audit.write(records) if error), None)
    except JetStreamProviderError as denial:
        error = denial
    if error:
        log.warning(
            "Which letters of %s are handled couldn't be recorded, and won't be known once the handler's consumer"
            " is deleted or created anew: %s",
            audit.queue,
            error,
        )


def _record(letter: DeadLetter) -> LetterRecord:
    death = letter.death
    return LetterRecord(
        stream=death.stream,
        created=death.created,
        sequence=letter.sequence,
        job_id=readable_text(letter.job_id)[:200],
        action="handled",
        subject=readable_text(letter.subject),
        consumer=death.consumer,
        redrives=letter.redrives,
        reason=death.reason.value,
        died_at=death.died_at,
        fingerprint=death.fingerprint,
    )
