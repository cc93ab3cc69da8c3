"""Proving what the dead letter queue says about a job.

An advisory is a hint, not the truth. The job may have been finished by a slow worker since, its stream or consumer may
have been recreated with the same sequences, or the server may have repeated itself. Only what is said about the very
message that is stored now, or of which a copy was kept, is a dead letter.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently
from airflow_provider_jetstream.jetstream.client.connection import ReadPlan
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.contract import completion_subject, letter_audit_subject, marker_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import (
    Entry,
    EntryKind,
    death_entries,
    last_consumer,
    valid_since,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry_merge import ADVISORIES, merge_entries, read_parked
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, Source
from airflow_provider_jetstream.jetstream.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.archive import ArchiveReader
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog, LetterRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.ack_metrics import AckMetrics
    from airflow_provider_jetstream.jetstream.queue.snapshot import ConsumerState, QueueSnapshot


@dataclass(slots=True)
class Classifier:
    """Judges what is said about single jobs.

    :param connection: the server
    :param around: how the queue is
    :param letters: the dead letter queue
    :param metrics: the ack metrics of jobs that are gone
    :param hears_terminations: whether the dead letter queue captures what the server tells of terminated jobs
    :param events: the stream of completions, if it exists
    :param archive: the archive, if it exists
    :param audit: the audit, if it exists
    :param doubted: consumers that hold more jobs than the advisories leave room for: a death was forgotten in a crash
    :param vanished: whether a job that vanished counts as a dead letter
    """

    connection: Connection
    snapshot: QueueSnapshot
    dead_letter_queue: str
    metrics: AckMetrics
    captures_terminations: bool
    events: str | None = None
    archive: ArchiveReader | None = None
    audit: AuditLog | None = None
    inconsistent_consumers: Collection[str] = ()
    vanished: bool = False

    async def classify_all(self, jobs: Sequence[tuple[int, tuple[Entry, ...]]]) -> list[DeadLetter | NotDead]:
        """Find out what became of some jobs.

        :param jobs: stream sequences in order, and what the dead letter queue says about each
        :return: for each the dead letter, or why it is none
        """
        judged: list[DeadLetter | NotDead] = []
        for start in range(0, len(jobs), MAX_CONCURRENT):
            some = jobs[start : start + MAX_CONCURRENT]
            async with self.connection.prefetch(self._wanted(some)):
                judged += await map_concurrently(lambda job: self.classify(*job), some)
        return judged

    def _wanted(self, jobs: Sequence[tuple[int, tuple[Entry, ...]]]) -> Iterator[ReadPlan]:
        """Say what judging some jobs takes, in the order in which single ones are asked for it."""
        queue, sequences = self.snapshot.queue, [sequence for sequence, _ in jobs]
        markers = [marker_subject(queue, each) for each in sequences] if self.snapshot.captures_markers else []
        yield ReadPlan(queue, sequences, markers)
        if self.events is not None:
            told = ((sequence, last_consumer(mentions)) for sequence, mentions in jobs)
            ends = [completion_subject(queue, consumer, sequence) for sequence, consumer in told if consumer]
            yield ReadPlan(self.events, subjects=ends)
        if self.audit:
            yield ReadPlan(self.audit.stream, subjects=[letter_audit_subject(queue, each) for each in sequences])
        records = (each.sequence for _, mentions in jobs for each in mentions if each.kind not in ADVISORIES)
        yield ReadPlan(self.dead_letter_queue, sorted(records))

    async def classify(self, sequence: int, mentions: tuple[Entry, ...]) -> DeadLetter | NotDead:
        """Find out what became of a job.

        :param sequence: its stream sequence
        :param mentions: what the dead letter queue says about it; nothing for an orphan
        :return: the dead letter, or why it is none
        """
        message = await get_message(self.connection, self.snapshot.queue, sequence)
        current = [each for each in mentions if each.recorded_at >= self.snapshot.created_at]
        consumer, taker = last_consumer(current), self.snapshot.consumer_for(message.subject) if message else None
        if await self._completed(sequence, {consumer, taker.name if taker else None}):
            found: DeadLetter | Status = Status.COMPLETED
        elif message is None:
            found = await self._classify_gone(sequence, current) if current else Status.STALE
        else:
            found = await self._classify_stored(message, taker, mentions)
        entries = tuple(each.sequence for each in mentions)
        if isinstance(found, Status):
            consumer = consumer or (taker.name if taker else None)
            return NotDead(sequence, found, entries, consumer, stored=message is not None)
        # What is left about an earlier stream's job of that number goes with it.
        return found if found.entries == entries else replace(found, entries=entries)

    async def _classify_stored(
        self, message: StoredMessage, taker: ConsumerState | None, mentions: Sequence[Entry]
    ) -> DeadLetter | Status:
        done = await self.audit.last_record(message.sequence) if self.audit else None
        if taker is None:
            copies = [each for each in mentions if each.kind in (EntryKind.COPY, EntryKind.PROVEN_COPY)]
            kept = any(each.recorded_at >= message.stored_at for each in copies)
            letter = self._letter(message, Source.QUEUE, self._untold(message, None), None, kept=kept, told=mentions)
            return await self._begun(letter, done)
        since = valid_since(message, taker, done)
        # It is stored, so whoever said that it was deleted was wrong.
        told = [each for each in mentions if each.recorded_at >= since and each.kind != EntryKind.DELETION]
        dead = (
            message.sequence <= taker.delivered
            and death_entries(told)
            and taker.name not in self.inconsistent_consumers
        )
        if message.sequence > taker.settled and not dead:
            return Status.ALIVE if told or not mentions else Status.STALE
        kept = False
        if told:
            testimony = await merge_entries(
                self.connection, self.dead_letter_queue, self.snapshot, message.sequence, told
            )
            death, kept = testimony.death, testimony.job is not None
        else:
            death = self._untold(message, taker)
        letter = self._letter(message, Source.QUEUE, death, taker, kept=kept, told=mentions)
        return await self._begun(letter, done)

    async def _begun(self, letter: DeadLetter, done: LetterRecord | None) -> DeadLetter:
        """Take note of the new job, where a redrive was cut off after it was stored."""
        if done and done.action == "redriven":
            return replace(letter, copy_sequence=done.new_sequence)
        queue = self.snapshot.queue
        if self.snapshot.captures_markers:
            marker = await last_message(self.connection, queue, marker_subject(queue, letter.sequence))
            # An atomic redrive stores the new job right behind its marker.
            return replace(letter, copy_sequence=marker.sequence + 1) if marker else letter
        return letter

    def _untold(self, message: StoredMessage, taker: ConsumerState | None) -> Death:
        return Death(
            stream=self.snapshot.queue,
            created=self.snapshot.created,
            sequence=message.sequence,
            consumer=taker.name if taker else None,
            reason=Reason.ORPHAN if taker else Reason.UNDELIVERABLE,
            # Nobody knows when, but not later than this.
            died_at=min(taker.last_active + taker.max_ack_wait, taker.taken_at) if taker else message.stored_at,
        )

    async def _classify_gone(self, sequence: int, mentions: Sequence[Entry]) -> DeadLetter | Status:
        done = await self.audit.last_record(sequence) if self.audit else None
        if done and done.action == "redriven":
            return Status.REDRIVEN
        for mention in reversed([each for each in mentions if each.kind == EntryKind.PARKED]):
            if parked := await read_parked(self.connection, self.dead_letter_queue, self.snapshot, mention):
                death, job, why = parked
                return await self._begun(self._letter(job, Source.COPY, death, None, kept=True, parked=why), None)
        # What was requeued in its place may have died again.
        told = [each for each in mentions if done is None or (done.in_place and each.recorded_at >= done.at)]
        if not told:
            return Status.REDRIVEN
        testimony = await merge_entries(self.connection, self.dead_letter_queue, self.snapshot, sequence, told)
        message, source = testimony.job, Source.COPY
        if message is None and self.archive:
            message, source = await self.archive.find(sequence), Source.ARCHIVE
        fate = await self._fate(message, testimony.death, {each.kind for each in told})
        if fate is not None or message is None:
            return fate or Status.GONE
        return await self._begun(self._letter(message, source, testimony.death, None, kept=source == Source.COPY), None)

    async def _fate(self, message: StoredMessage | None, death: Death, kinds: Collection[EntryKind]) -> Status | None:
        """Say what became of a job that is gone, where it isn't a dead letter."""
        # A worker that gave up an expired job terminated it; what is left is the server's word, which may be wrong.
        if (
            death.reason == Reason.EXPIRED
            and EntryKind.DELETION in kinds
            and not {EntryKind.PROVEN_COPY, EntryKind.TERMINATION} & set(kinds)
        ):
            if message is None:
                return Status.LOST if await self._may_have_expired(death) else Status.SPURIOUS
            return None if await self._expired(message, death) else Status.SPURIOUS
        certain = EntryKind.TERMINATION in kinds or EntryKind.PROVEN_COPY in kinds or not self.captures_terminations
        if death.reason in (Reason.TERMINATED, Reason.EXPIRED) and certain:
            return Status.LOST if message is None else None
        if message is None:
            return Status.GONE
        if not self.vanished:
            return Status.VANISHED
        # It would run a second time.
        return Status.COMPLETED if await self.metrics.is_acknowledged(death.sequence) else None

    def _letter(
        self,
        message: StoredMessage,
        source: Source,
        death: Death,
        taker: ConsumerState | None,
        *,
        kept: bool,
        parked: str | None = None,
        told: Sequence[Entry] = (),
    ) -> DeadLetter:
        return DeadLetter(
            death=death,
            subject=message.subject,
            body=message.data,
            headers=message.headers,
            time=message.time,
            source=source,
            entries=tuple(each.sequence for each in told),
            preserved=kept,
            ready_at=death.died_at + (taker.max_ack_wait if taker else timedelta()),
            parked=parked,
        )

    async def _completed(self, sequence: int, consumers: Collection[str | None]) -> bool:
        for consumer in consumers if self.events is not None else ():
            if self.events is not None and consumer is not None:
                subject = completion_subject(self.snapshot.queue, consumer, sequence)
                last = await last_message(self.connection, self.events, subject)
                if last is not None and last.stored_at >= self.snapshot.created_at:
                    return True
        return False

    async def _expired(self, message: StoredMessage, death: Death) -> bool:
        life = self.snapshot.max_age
        if self.snapshot.config.get("allow_msg_ttl") and (text := message.header("Nats-TTL")):
            with suppress(ValueError):
                own = 0 if text == "never" else parse_duration(f"{text}s" if text.isdecimal() else text)
                life = timedelta(microseconds=own / 1_000)
        if not message.time or life <= timedelta() or death.died_at < message.stored_at + life:
            return False
        return not await self.metrics.is_acknowledged(death.sequence)

    async def _may_have_expired(self, death: Death) -> bool:
        """Tell whether a job of which nothing is left may have reached its age limit; then its copy has, too."""
        life = self.snapshot.max_age
        by_age = life > timedelta() and death.died_at >= self.snapshot.created_at + life
        return (by_age or bool(self.snapshot.config.get("allow_msg_ttl"))) and not await self.metrics.is_acknowledged(
            death.sequence
        )


class Status(StrEnum):
    """What the dead letter queue's word about a job turned out to be, where it is no dead letter."""

    COMPLETED = "completed"
    """Its completion is stored."""
    REDRIVEN = "redriven"
    """The audit says that it was redriven, requeued or parked since."""
    ALIVE = "alive"
    """The consumer is about to deliver it again, or a worker has it."""
    STALE = "stale"
    """Stream, consumer or message is younger: it was about another job."""
    GONE = "gone"
    """No longer stored, and nothing was kept: finished late, redriven before, or deleted."""
    VANISHED = "vanished"
    """No longer stored, though its body was kept: finished late by a slow worker, or lost by the server."""
    LOST = "lost"
    """Terminated, or perhaps expired in a worker's hands, and nobody kept its body."""
    SPURIOUS = "spurious"
    """Said to be deleted in flight without having expired: the server says so in error after a crash."""

    @property
    def meaning(self) -> str:
        """What to tell a person."""
        return _MEANINGS[self]


_MEANINGS = {
    Status.COMPLETED: "its completion is stored",
    Status.REDRIVEN: "it was redriven, requeued or parked since",
    Status.ALIVE: "its consumer is about to deliver it again, or a worker has it",
    Status.STALE: "its entry is about an earlier stream, consumer or message of the same name and number",
    Status.GONE: "its job is no longer stored (finished late, redriven before, or deleted)",
    Status.VANISHED: "its job is no longer stored, though its body was kept (finished late by a slow worker, or lost"
    " by the server); select vanished to bring it back all the same",
    Status.LOST: "it was terminated, or its time was over while a worker had it, and nobody kept its body",
    Status.SPURIOUS: "it was said to be deleted in flight, but had not expired",
}

# Nothing more is to be done about jobs of these.
ENDED = frozenset({Status.COMPLETED, Status.REDRIVEN, Status.GONE, Status.SPURIOUS})


@dataclass(frozen=True, slots=True)
class NotDead:
    """A job about which the dead letter queue holds something, though it is no dead letter.

    :param sequence: its stream sequence
    :param verdict: what it is
    :param entries: where the dead letter queue holds something about it
    :param consumer: who delivered it
    :param stored: whether it is still stored in the work queue
    """

    sequence: int
    status: Status
    entries: tuple[int, ...]
    consumer: str | None
    stored: bool = False
