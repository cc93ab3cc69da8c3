"""What the audit records of awaited jobs: that they died and were redriven, parked, or handled by somebody else.

A redrive stores a copy under another stream sequence, and removes job and entry: without the audit, a wait that begins
after it finds neither an end nor the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.audit.records import (
    LetterRecord,
    letter_range_filter,
    parse_range,
    parse_record,
)
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.contract import handled_subject, letter_audit_subject
from airflow_provider_jetstream.jetstream.evidence import handled_sequence
from airflow_provider_jetstream.jetstream.waiting.event_source import EndSource
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind, JobEnd, Successor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.stream_tail import TailedMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

# What a handler says of a job; whether that job is dead at all, others say.
REPORTED: Final = "a handler of the dead letter queue reports that it has handled it"
_ACTIONS: Final = {
    "parked": "it died and was parked",
    "handled": "it died, and a handler of the dead letter queue has handled it",
}


class AuditSource(EndSource):
    """What the audit records of a queue's dead letters, as ends of jobs.

    :param stream: the audit
    :param on_end: called with each record as it is read
    """

    def __init__(
        self, connection: Connection, stream: str, cursor: Cursor, on_end: Callable[[EndSource, JobEnd], None]
    ) -> None:
        self._letters = letter_audit_subject(cursor.queue, 0)[:-1]
        self._reports = handled_subject(cursor.queue, 0)[:-1]
        subjects = (f"{self._letters}*", letter_range_filter(cursor.queue), f"{self._reports}*")
        super().__init__(connection, stream, subjects, cursor, cursor.audit_from, cursor.audit_created, on_end)
        self._created_text = cursor.created

    def latest(self, sequence: int) -> JobEnd | None:
        """Return what was recorded last of a job, where it was read lately."""
        return self._recent.get(sequence)

    def _take(self, message: TailedMessage) -> None:
        if message.stored_at >= self._created and not message.is_from_elsewhere:
            for end in self._ends(message):
                self._note(end)

    def _ends(self, message: TailedMessage) -> Iterator[JobEnd]:
        time = message.stored_at.isoformat()
        stored = StoredMessage(message.subject, message.sequence, time, (), message.data)
        if message.subject.startswith(self._reports):
            if sequence := handled_sequence(stored, self._queue):
                yield JobEnd(EndKind.DEAD, sequence, message.sequence, note=REPORTED, stored_at=message.stored_at)
        elif message.subject.startswith(self._letters):
            record = parse_record(LetterRecord, stored)
            if record and self._is_of_queue(record) and message.subject == f"{self._letters}{record.sequence}":
                fields = {name: getattr(record, name) for name in ("sequence", "new_sequence", "consumer", "reason")}
                yield from self._end(record, fields, message)
        elif (found := parse_range(stored)) and self._is_of_queue(found):
            for fields in found.letters():
                yield from self._end(found, fields, message)

    def _is_of_queue(self, record: Any) -> bool:
        return (record.stream, record.created) == (self._queue, self._created_text)

    def _end(self, record: Any, fields: dict[str, Any], message: TailedMessage) -> Iterator[JobEnd]:
        action, new, successor = record.action, fields["new_sequence"], None
        if action == "redriven":
            stream = record.new_stream or self._queue
            note = f"it died and was redriven as job {new} of {stream}"
            # Of one stream, a copy is stored later than its job: others would lead in a circle.
            if not new or (stream == self._queue and new <= fields["sequence"]):
                return
            successor = Successor(stream, new)
        else:
            note = _ACTIONS.get(action, f"it died and was {action}") + (f": {record.why}" if record.why else "")
        yield JobEnd(
            EndKind.DEAD,
            fields["sequence"],
            message.sequence,
            fields["consumer"] or "",
            note,
            stored_at=message.stored_at,
            successor=successor,
            is_alive=action == "requeued",
        )
