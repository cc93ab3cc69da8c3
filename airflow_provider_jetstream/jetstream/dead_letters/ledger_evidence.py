"""Reads the evidence of how jobs ended, from the events stream and the audit, each message once over all scans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.advisories import AckMetric, parse_advisory
from airflow_provider_jetstream.jetstream.archive import republished_message, republishing_stream
from airflow_provider_jetstream.jetstream.audit.audited_letters import LetterRecord
from airflow_provider_jetstream.jetstream.audit.letter_ranges import letter_range_filter, parse_range
from airflow_provider_jetstream.jetstream.client.bulk_read import read_bulk
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.server_made import is_server_made
from airflow_provider_jetstream.jetstream.contract import (
    completion_filter,
    entry_copies_filter,
    handled_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# A scan reads no more events than these, and as many messages of the audit; the next one goes on.
MOST_MESSAGES = 200_000

_HIGHEST = 2**63
_DIGITS = 19


@dataclass(slots=True)
class EndEvidence:
    """Which jobs of a queue ended, as far as messages were read.

    Everything counts from the time on at which the queue's stream was created: the sequences of an earlier stream of
    its name are other jobs.

    :param snapshot: the queue
    :param dead_letter_queue: the dead letter queue's stream
    :param events_to: the last sequence of the events stream that was read
    :param audit_to: the last sequence of the audit that was read
    :param ended: the stream sequences of the jobs
    :param reopened: of those that were requeued in place, and so have yet to end
    :param completing: the consumers of which a completion is stored
    :param events_unread: how many events were left for the next scan
    :param audit_unread: how many messages of the audit were
    :param events_read: how many events were read
    :param audit_read: how many messages of the audit were read
    """

    connection: Connection
    snapshot: QueueSnapshot
    dead_letter_queue: str
    events_to: int = 0
    audit_to: int = 0
    ended: set[int] = field(default_factory=set)
    reopened: set[int] = field(default_factory=set)
    completing: set[str] = field(default_factory=set)
    events_unread: int = 0
    audit_unread: int = 0
    events_read: int = 0
    audit_read: int = 0
    _requeued_at: dict[int, datetime] = field(default_factory=dict)

    @property
    def unread(self) -> int:
        """How many messages were left for the next scan."""
        return self.events_unread + self.audit_unread

    async def read_events(self, info: Mapping[str, Any]) -> None:
        """Read the completions and ack metrics that were stored since the last look; after :meth:`read_audit`.

        :param info: the server's STREAM.INFO of the events stream
        """
        queue, last = self.snapshot.queue, int(info["state"]["last_seq"])
        completed, metrics = (completion_filter(queue).removesuffix(">"), ack_metric_filter(queue).removesuffix("*"))
        self.events_unread = 0
        async for message in read_bulk(self.connection, info, self.events_to + 1):
            if self.events_read >= MOST_MESSAGES:
                self.events_unread = last - self.events_to
                return
            self.events_to = message.sequence
            self.events_read += 1
            if message.stored_at < self.snapshot.created_at or is_server_made(message):
                continue
            if message.subject.startswith(completed):
                consumer, _, sequence = message.subject.removeprefix(completed).rpartition(".")
                self.completing.add(consumer)
                self._end(_number(sequence), message.stored_at)
            elif message.subject.startswith(metrics):
                metric = parse_advisory(message.data)
                if isinstance(metric, AckMetric) and metric.is_of_server(queue, self.connection.domain):
                    self._end(metric.stream_seq, message.stored_at)
        self.events_to = max(self.events_to, last)

    async def read_audit(self, info: Mapping[str, Any]) -> None:
        """Read what was done to letters, and what handlers of the dead letter queue reported, since the last look.

        :param info: the server's STREAM.INFO of the audit
        """
        queue, last = self.snapshot.queue, int(info["state"]["last_seq"])
        records = letter_audit_subject(queue, 0).removesuffix("0")
        ranges = letter_range_filter(queue).removesuffix("*.*")
        reports, copies = handled_filter(queue).removesuffix("*"), entry_copies_filter(queue).removesuffix(">")
        parser = self._parser()
        self.audit_unread = 0
        async for message in read_bulk(self.connection, info, self.audit_to + 1):
            if self.audit_read >= MOST_MESSAGES:
                self.audit_unread = last - self.audit_to
                return
            self.audit_to = message.sequence
            self.audit_read += 1
            if message.stored_at < self.snapshot.created_at or is_server_made(message):
                continue
            if message.subject.startswith(records):
                self._read_record(message)
            elif message.subject.startswith(ranges):
                self._read_letter_range(message)
            elif message.subject.startswith(reports):
                self._end(_number(message.subject.removeprefix(reports)))
            elif message.subject.startswith(copies):
                job = self._read_copy(parser, message)
                # A job that used up its deliveries stays stored: only when it is gone does its entry say how it ended.
                if job and job[1].kind in (EntryKind.TERMINATION, EntryKind.PARKED):
                    self._end(job[0])
        self.audit_to = max(self.audit_to, last)

    async def jobs_with_removed_entries(self, audit: str) -> set[int]:
        """Return the jobs of whose entries the audit has copies, by all copies: a handler may have removed the entries.

        :param audit: the audit's stream
        """
        parser, jobs = self._parser(), set[int]()
        async for message in read_range(self.connection, audit, entry_copies_filter(self.snapshot.queue)):
            job = self._read_copy(parser, message)
            if job and job[1].kind != EntryKind.DELETION and job[1].recorded_at >= self.snapshot.created_at:
                jobs.add(job[0])
        return jobs

    def _parser(self) -> EntryParser:
        return EntryParser(self.snapshot.queue, self.snapshot.created, self.connection.domain)

    def _read_record(self, message: StoredMessage) -> None:
        try:
            record = LetterRecord.model_validate_json(message.data)
        except ValidationError:
            return
        if record.created == self.snapshot.created:
            self._note_action(record.sequence, message.stored_at, in_place=record.in_place)

    def _read_letter_range(self, message: StoredMessage) -> None:
        record = parse_range(message)
        if record and record.created == self.snapshot.created:
            for sequence in record.sequences():
                self._note_action(sequence, message.stored_at, in_place=record.in_place)

    def _note_action(self, sequence: int, at: datetime, *, in_place: bool) -> None:
        if in_place:
            self.ended.discard(sequence)
            self.reopened.add(sequence)
            self._requeued_at[sequence] = at
        else:
            self._end(sequence)

    def _read_copy(self, parser: EntryParser, copy: StoredMessage) -> tuple[int, Entry] | None:
        message = republished_message(copy)
        if republishing_stream(copy) != self.dead_letter_queue or not parser.is_entry(message.subject):
            return None
        try:
            return parser.parse(message) if message.stored_at.tzinfo else None
        except ValueError:
            # The time of a copy that the server didn't make.
            return None

    def _end(self, sequence: int, at: datetime | None = None) -> None:
        requeued_at = self._requeued_at.get(sequence)
        if 0 < sequence < _HIGHEST and not (at and requeued_at and at <= requeued_at):
            self.ended.add(sequence)
            self.reopened.discard(sequence)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0
