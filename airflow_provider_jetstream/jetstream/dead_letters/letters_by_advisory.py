"""Finds the letters of whose deaths one advisory tells, and nothing else: nearly all letters of most queues.

What is to be known of them was read at once for many jobs, so that nothing is awaited. Any other job is left to the
classifier, which reads what it needs job by job; the rule by which both judge is in :mod:`.stored_job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.contract import completion_subject, letter_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_merge import death_by_advisory
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.status import Status
from airflow_provider_jetstream.jetstream.dead_letters.stored_job import dead_letter_of, judge_stored_job

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Announced
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# Stands for a message that wasn't read, beside ``None`` for one that isn't stored.
_UNREAD: Final = object()


class LettersByAdvisory:
    """Finds such letters among jobs about which everything was read.

    :param inconsistent_consumers: consumers that have fewer dead letters than entries state
    :param announced: what was read
    :param events: the stream of completions, unless it is empty
    :param audit: the audit with its records about ranges, unless it is empty
    """

    def __init__(
        self,
        snapshot: QueueSnapshot,
        inconsistent_consumers: Collection[str],
        announced: Announced,
        events: str | None,
        audit: AuditLog | None,
    ) -> None:
        self._snapshot = snapshot
        self._inconsistent_consumers = inconsistent_consumers
        self._stored = announced.get(snapshot.queue, {})
        self._completions = None if events is None else announced.get(events, {})
        self._audit = audit
        self._records = {} if audit is None else announced.get(audit.stream, {})

    def find(self, sequence: int, entries: Sequence[Entry]) -> DeadLetter | None:
        """Return a job as a letter; ``None`` for a job that is none, or about which more is to be known."""
        message = self._stored.get(sequence)
        if message is None or len(entries) != 1 or entries[0].kind != EntryKind.DELIVERIES:
            return None
        # The archive may have the whole of a subject of which the server shows only a part.
        consumer = None if UNKNOWN_BYTE in message.subject else self._snapshot.consumer_for(message.subject)
        if consumer is None or self._has_other_evidence(sequence, consumer.name):
            return None
        judged = judge_stored_job(message, consumer, entries, None, self._inconsistent_consumers)
        # The numbers may prove a death that this entry, an old one, isn't about.
        if isinstance(judged, Status) or not judged[1]:
            return None
        death = death_by_advisory(self._snapshot, sequence, entries[0])
        return dead_letter_of(message, BodySource.QUEUE, death, consumer, preserved=False, entries=entries)

    def _has_other_evidence(self, sequence: int, consumer: str) -> bool:
        """Return whether a completion or a record of the audit is stored, or isn't known not to be."""
        queue = self._snapshot.queue
        if self._completions is not None and (
            self._completions.get(completion_subject(queue, consumer, sequence), _UNREAD) is not None
        ):
            return True
        return self._audit is not None and not (
            self._records.get(letter_audit_subject(queue, sequence), _UNREAD) is None
            and self._audit.has_no_range_of(sequence)
        )
