"""Decides for each job with entries in a dead letter queue whether it is a dead letter.

An advisory is a hint, not the truth: a slow worker may have finished the job since, its stream or consumer may have
been recreated with the same sequences, or the server may have repeated an advisory. A job is a dead letter only if its
entries are about the very message that is stored now, or about one of which a copy is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import with_archived_subject
from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently, pause_if_due
from airflow_provider_jetstream.jetstream.client.connection import ReadPlan
from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.contract import (
    MSG_ID,
    REDRIVE_SEQUENCE,
    companion_filter,
    completion_subject,
    ended_job_time,
    job_completion_filter,
    letter_audit_subject,
)
from airflow_provider_jetstream.jetstream.dead_letters.believed_entries import believed_entries, need_archive
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.end_order import CLOCK_SKEW, Order, ServerTimes
from airflow_provider_jetstream.jetstream.dead_letters.entry import (
    ADVISORIES,
    CONTRADICTING,
    COPIES,
    Entry,
    EntryKind,
    death_entries,
    is_handled,
    last_consumer,
    parked_entries,
    stored_entries,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry_merge import merge_entries, read_parked
from airflow_provider_jetstream.jetstream.dead_letters.gone_jobs import GoneJobs
from airflow_provider_jetstream.jetstream.dead_letters.late_ends import (
    FOREIGN_ENDS,
    UNCLEAR_ENDS,
    UNCLEAR_HANDLING,
    ended_late,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.letters_by_advisory import LettersByAdvisory
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.dead_letters.stored_job import (
    dead_letter_of,
    judge_job_without_consumer,
    judge_stored_job,
)
from airflow_provider_jetstream.jetstream.queue.end_evidence import sampled_percent
from airflow_provider_jetstream.jetstream.queue.server_uptime import server_up_since

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.archive import ArchiveReader
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.connection import Announced, Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.ack_metrics import AckMetrics
    from airflow_provider_jetstream.jetstream.dead_letters.handled import HandledJobs
    from airflow_provider_jetstream.jetstream.dead_letters.letter_origins import LetterOrigins
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot


# For so long before its termination a job may have been acknowledged of which nothing says when it was stored.
_UNKNOWN_AGE = timedelta(hours=1)
_SEVERAL = 2
# What a job is of which no entry counts, by the audit's last action on it; redriven for any other action.
_AUDITED = {"handled": Status.HANDLED, "": Status.UNCERTAIN}
# Before other tasks of the event loop may run.
_JUDGED_AT_ONCE = 32


@dataclass(slots=True)
class Classifier:
    """Classifies the jobs of one queue.

    :param snapshot: the queue's stream and consumers
    :param dead_letter_queue: the dead letter queue's stream
    :param metrics: the ack metrics of jobs that are gone, or have no entry
    :param origins: the tasks that published jobs
    :param handled: the jobs that handlers of the dead letter queue have handled
    :param events: the stream of completions, if it exists
    :param archive: the archive, if it exists
    :param audit: the audit, if it exists
    :param inconsistent_consumers: consumers that have fewer dead letters than entries state: the server forgot a death
        in a crash
    :param vanished: whether a job that vanished counts as a dead letter
    :param disputed: jobs without an entry that another consumer's worker may have
    :param named_unaccounted: jobs that are gone without evidence of their end and whose sequences a request names
    :param named: jobs whose sequences a request names: what is uncertain of them is the request's to know
    """

    connection: Connection
    snapshot: QueueSnapshot
    dead_letter_queue: str
    metrics: AckMetrics
    origins: LetterOrigins
    handled: HandledJobs
    events: str | None = None
    archive: ArchiveReader | None = None
    audit: AuditLog | None = None
    inconsistent_consumers: Collection[str] = ()
    vanished: bool = False
    disputed: Collection[int] = ()
    named_unaccounted: frozenset[int] = frozenset()
    named: Collection[int] = frozenset()
    _up_since: datetime | None = None
    _why: dict[int, str] = field(default_factory=dict)
    _acknowledged: dict[int, list[datetime]] = field(default_factory=dict)

    async def classify_all(self, jobs: Sequence[tuple[int, tuple[Entry, ...]]]) -> list[DeadLetter | NotDead]:
        """Classify jobs.

        :param jobs: stream sequences in order, and the entries about each
        """
        classified: list[DeadLetter | NotDead] = []
        for start in range(0, len(jobs), MAX_CONCURRENT):
            batch = jobs[start : start + MAX_CONCURRENT]
            empty = await self._empty_streams()
            await self.handled.refresh(empty)
            async with self.connection.prefetch(self._read_plans(batch, empty)) as announced:
                audit = None if self.audit is None or self.audit.stream in empty else self.audit
                audit = audit and await audit.with_ranges_of(sequence for sequence, _ in batch)
                letters = await self._letters_by_advisory(batch, announced, empty, audit)
                remaining = [job for job, letter in zip(batch, letters, strict=True) if letter is None]
                self._acknowledged |= await self._acknowledgements(remaining)
                others = iter(await map_concurrently(partial(self._classify, empty, audit), remaining))
            classified += await self.origins.add_to([letter or next(others) for letter in letters])
        return classified

    async def _letters_by_advisory(
        self,
        jobs: Sequence[tuple[int, tuple[Entry, ...]]],
        announced: Announced,
        empty: Collection[str],
        audit: AuditLog | None,
    ) -> list[DeadLetter | None]:
        """Return the letters that need nothing more to be read; ``None`` for every other job."""
        if self.handled.may_have_any:
            return [None] * len(jobs)
        events = None if self.events in empty else self.events
        find = LettersByAdvisory(self.snapshot, self.inconsistent_consumers, announced, events, audit).find
        letters = []
        for start in range(0, len(jobs), _JUDGED_AT_ONCE):
            letters += [find(*job) for job in jobs[start : start + _JUDGED_AT_ONCE]]
            await pause_if_due()
        return letters

    async def _empty_streams(self) -> frozenset[str]:
        """Return which of the events stream and the audit hold no message now, so that nothing can be read from them.

        One request for a batch in place of two per job. Only streams that were empty in the snapshot are asked for:
        most never are. What the snapshot says is too old to rely on: another redrive may have recorded jobs since.
        """
        candidates = self.snapshot.empty_companions & {self.events, self.audit.stream if self.audit else None}
        if not candidates:
            return frozenset()
        infos = await list_streams(self.connection, companion_filter(self.snapshot.queue))
        empty = {info["config"]["name"] for info in infos if not info["state"]["messages"]}
        return frozenset(empty & candidates)

    def _read_plans(self, jobs: Sequence[tuple[int, tuple[Entry, ...]]], empty: Collection[str]) -> Iterator[ReadPlan]:
        """Return the messages that classifying the jobs reads, in the order in which it reads them."""
        queue, sequences = self.snapshot.queue, [sequence for sequence, _ in jobs]
        yield ReadPlan(queue, sequences)
        if self.events is not None and self.events not in empty:
            consumers = ((sequence, last_consumer(entries)) for sequence, entries in jobs)
            ends = [completion_subject(queue, consumer, sequence) for sequence, consumer in consumers if consumer]
            yield ReadPlan(self.events, subjects=ends)
        if self.audit and self.audit.stream not in empty:
            records = [letter_audit_subject(queue, job) for job in sequences]
            yield ReadPlan(self.audit.stream, subjects=[*records, *self.handled.report_subjects(sequences)])
        entries = (entry for _, entries in jobs for entry in stored_entries(entries))
        # Where a handler may have removed an entry, all are read.
        read = (entry.sequence for entry in entries if self.handled.has_handlers or entry.kind not in ADVISORIES)
        yield ReadPlan(self.dead_letter_queue, sorted(read))

    async def _classify(
        self, empty: Collection[str], audit: AuditLog | None, job: tuple[int, tuple[Entry, ...]]
    ) -> DeadLetter | NotDead:
        sequence, entries = job
        message = await get_message(self.connection, self.snapshot.queue, sequence)
        if message is None:
            # The job may have ended, and its end been stored, after the streams were found empty.
            empty, audit = (), audit or self.audit
        else:
            message = await with_archived_subject(self.archive, message)
        stated = [entry for entry in entries if entry.recorded_at >= self.snapshot.created_at]
        archived = None
        if message is None and self.archive and need_archive(stated):
            archived = await self.archive.find(sequence)
        known = message or archived
        believed = believed_entries(self.snapshot, sequence, known, entries)
        current = [entry for entry in believed if entry.recorded_at >= self.snapshot.created_at]
        if not current and sequence in self.named:
            # Whoever names the job knows that it died.
            believed, current = entries, stated
        taker = self.snapshot.consumer_for(known.subject) if known else None
        # What the server says, before what a worker of another consumer may have stored.
        named = last_consumer([entry for entry in current if entry.kind in ADVISORIES]) or last_consumer(current)
        result: DeadLetter | Status
        consumers = {named, taker.name if taker else None} - {None}
        order, ended_at = await self._end(sequence, message, archived, stated, believed, consumers, empty, audit)
        completed_at = ended_at if order is Order.AFTER else None
        if order is Order.AFTER:
            result = Status.COMPLETED
        elif order is Order.UNCLEAR and sequence not in self.named:
            result = Status.UNCERTAIN
        elif message is None and sequence in self.named_unaccounted:
            result = await self._classify_unaccounted(sequence, believed, audit)
        elif message is None:
            result = await self._classify_gone(sequence, current, audit, archived) if stated else Status.STALE
        else:
            result = await self._classify_stored(message, taker, believed, audit)
        entry_sequences = tuple(entry.sequence for entry in stored_entries(entries))
        if isinstance(result, Status):
            consumer, stored = named or (taker.name if taker else None), message is not None
            reported = result == Status.HANDLED and self.handled.is_reported(sequence)
            late = ended_late(current, completed_at)
            if late and audit and (audited := await audit.last_record(sequence)) and audited.in_place:
                late = ended_late([entry for entry in current if entry.recorded_at >= audited.at], completed_at)
            why = self._why.get(sequence, UNCLEAR_ENDS if order is Order.UNCLEAR else "")
            why = why if result == Status.UNCERTAIN else ""
            return NotDead(sequence, result, entry_sequences, consumer, stored, reported, late, why)
        # Entries about an earlier stream's job of the same number are removed together with this letter's.
        return result if result.entries == entry_sequences else replace(result, entries=entry_sequences)

    async def _classify_stored(
        self,
        message: StoredMessage,
        consumer: ConsumerState | None,
        entries: Sequence[Entry],
        audit: AuditLog | None,
    ) -> DeadLetter | Status:
        audited = await audit.last_record(message.sequence) if audit else None
        judged: Status | tuple[datetime, list[Entry]] | None
        if audited:
            order = await self._record_order(message, audited, entries)
            if order is Order.UNCLEAR and message.sequence not in self.named:
                self._why[message.sequence] = UNCLEAR_ENDS
                return Status.UNCERTAIN
            audited = audited if order is Order.AFTER else None
        if consumer is None:
            judged = judge_job_without_consumer(message, self.snapshot.consumers, entries, audited)
        else:
            judged = judge_stored_job(message, consumer, entries, audited, self.inconsistent_consumers)
        if judged is None:
            copies = [entry for entry in entries if entry.kind in COPIES]
            preserved = any(entry.recorded_at >= message.stored_at for entry in copies)
            death = self._death_without_entry(message, None)
            letter = dead_letter_of(message, BodySource.QUEUE, death, None, preserved=preserved, entries=entries)
            return await self._with_copy_sequence(letter, audited)
        if isinstance(judged, Status):
            return judged
        since, valid = judged
        requeued_at = audited.at if audited and audited.in_place else None
        preserved, origin = False, None
        if valid:
            merged = await merge_entries(
                self.connection, self.dead_letter_queue, self.snapshot, message.sequence, valid, message
            )
            death, preserved, origin = merged.death, merged.job is not None, merged.origin
        elif message.sequence in self.disputed:
            return Status.UNCERTAIN
        else:
            acknowledged_at = await self.metrics.acknowledged_at(message.sequence)
            moment = max(message.stored_at, requeued_at or message.stored_at)
            if acknowledged_at:
                order = (await self._times(acknowledged_at, moment)).order(acknowledged_at, moment)
                if order is not Order.BEFORE:
                    # A stream that sourced the queue kept it, and was deleted before it took the job.
                    return Status.COMPLETED if order is Order.AFTER else Status.UNCERTAIN
            death = self._death_without_entry(message, consumer)
        letter = dead_letter_of(
            message, BodySource.QUEUE, death, consumer, preserved=preserved, origin=origin, entries=entries
        )
        return await self._unless_handled(await self._with_copy_sequence(letter, audited), valid, since, audited)

    async def _unless_handled(
        self, letter: DeadLetter, entries: Sequence[Entry], since: datetime, audited: LetterRecord | None = None
    ) -> DeadLetter | Status:
        # A redrive that was cut off has to be finished, whatever a handler did meanwhile.
        if letter.copy_sequence is not None:
            return letter
        status = await self.handled.status(letter, entries, since, audited, self._order)
        if status is Status.UNCERTAIN:
            if letter.sequence in self.named:
                return letter
            self._why[letter.sequence] = UNCLEAR_ENDS
        return status or letter

    async def _order(self, at: datetime, stored_at: datetime) -> Order:
        return (await self._times(at, stored_at)).bearing(at, stored_at)

    async def _with_copy_sequence(self, letter: DeadLetter, audited: LetterRecord | None) -> DeadLetter:
        """Add the new job's sequence, where a redrive was cut off after it stored the new job."""
        if audited and audited.action == "redriven":
            if await self._has_lost_copy(letter, audited):
                return letter
            return replace(letter, copy_sequence=audited.new_sequence, copy_stream=audited.new_stream)
        return letter

    async def _has_lost_copy(self, letter: DeadLetter, audited: LetterRecord) -> bool:
        """Return whether the queue has lost the new job of a letter: after a loss of power the audit may be newer.

        A record is stored after its new job, so whatever the queue has in that place now tells.
        """
        sequence, queue = audited.new_sequence, self.snapshot.queue
        if audited.new_stream not in (None, queue) or not sequence:
            return False
        if message := await get_message(self.connection, queue, sequence):
            return first(message.headers, REDRIVE_SEQUENCE) != str(letter.sequence)
        return bool((await stream_info(self.connection, queue))["state"]["last_seq"] < sequence)

    def _death_without_entry(self, message: StoredMessage, consumer: ConsumerState | None) -> Death:
        died_at = message.stored_at
        if consumer:
            # When it died isn't known, but no later than this.
            died_at = min(consumer.last_active + consumer.max_ack_wait, consumer.taken_at)
        return Death(
            stream=self.snapshot.queue,
            created=self.snapshot.created,
            sequence=message.sequence,
            consumer=consumer.name if consumer else None,
            reason=Reason.ORPHAN if consumer else Reason.UNDELIVERABLE,
            died_at=died_at,
        )

    async def _classify_unaccounted(
        self, sequence: int, entries: Sequence[Entry], audit: AuditLog | None
    ) -> DeadLetter | Status:
        audited = await audit.last_record(sequence) if audit else None
        # A parked one is in the dead letter queue, unless a loss of power took its record from there.
        if audited and audited.action in ("redriven", "handled"):
            return Status.HANDLED if audited.action == "handled" else Status.REDRIVEN
        message, source = await self.archive.find(sequence) if self.archive else None, BodySource.ARCHIVE
        copies = [entry for entry in entries if entry.kind in COPIES and entry.recorded_at >= self.snapshot.created_at]
        if message is None and copies:
            merged = await merge_entries(self.connection, self.dead_letter_queue, self.snapshot, sequence, copies)
            message, source = merged.job, BodySource.COPY
        if message is None:
            return Status.GONE
        message = await with_archived_subject(self.archive, message)
        consumer = self.snapshot.consumer_for(message.subject)
        if consumer and await self._completions(sequence, consumer.name):
            return Status.COMPLETED
        death = replace(self._death_without_entry(message, consumer), reason=Reason.UNACCOUNTED)
        preserved = source == BodySource.COPY
        letter = dead_letter_of(message, source, death, consumer, preserved=preserved, entries=entries)
        if source == BodySource.COPY:
            writer = last_consumer(copies)
            letter = replace(letter, foreign_subject=not self._may_have_had(writer, letter))
        since = audited.at if audited else message.stored_at
        return await self._unless_handled(await self._with_copy_sequence(letter, None), [], since)

    async def _classify_gone(
        self, sequence: int, entries: Sequence[Entry], audit: AuditLog | None, archived: StoredMessage | None
    ) -> DeadLetter | Status:
        audited, unclear = await self._record_of_gone(sequence, entries, audit, archived)
        if unclear or (audited and audited.action == "redriven"):
            return Status.UNCERTAIN if unclear else Status.REDRIVEN
        for entry in parked_entries(entries, audited):
            if parked := await read_parked(self.connection, self.dead_letter_queue, self.snapshot, entry, archived):
                death, job, why, origin = parked
                letter = dead_letter_of(job, BodySource.COPY, death, None, preserved=True, parked=why, origin=origin)
                letter = await self._with_copy_sequence(letter, None)
                return await self._unless_handled(letter, [], entry.recorded_at)
        # A job that was requeued in place may have died again.
        valid = [entry for entry in entries if audited is None or self._is_later_death(entry, audited)]
        if not valid and audited is None:
            self._why[sequence] = FOREIGN_ENDS
        if not valid:
            return _AUDITED.get(audited.action if audited else "", Status.REDRIVEN)
        told = self._without_unclear_handling(valid)
        if is_handled(told):
            return Status.HANDLED
        result = await self._classify_dead_and_gone(sequence, told, audited, archived, entries)
        is_told = len(told) == len(valid) and not self._was_handled_before(told, audited)
        if isinstance(result, DeadLetter) and not is_told and sequence not in self.named:
            self._why[sequence] = UNCLEAR_HANDLING
            return Status.UNCERTAIN
        return result

    async def _classify_dead_and_gone(
        self,
        sequence: int,
        valid: Sequence[Entry],
        audited: LetterRecord | None,
        archived: StoredMessage | None,
        entries: Sequence[Entry],
    ) -> DeadLetter | Status:
        if archived is None and self.archive and not need_archive(entries):
            archived = await self.archive.find(sequence)
        merged = await merge_entries(self.connection, self.dead_letter_queue, self.snapshot, sequence, valid, archived)
        # The server's copy before a worker's of the same body and subject, which may have other headers.
        message, source = archived or merged.job, BodySource.COPY if merged.job else BodySource.ARCHIVE
        gone = GoneJobs(self.snapshot, self.metrics, self.vanished)
        status = await gone.status(message, merged.death, {entry.kind for entry in valid})
        if status is not None or message is None:
            return status or Status.GONE
        message = await with_archived_subject(self.archive, message)
        preserved = merged.job is not None
        letter = dead_letter_of(message, source, merged.death, None, preserved=preserved, origin=merged.origin)
        if archived is None:
            letter = replace(letter, foreign_subject=not self._may_have_had(letter.death.consumer, letter))
        since = audited.at if audited else message.stored_at if message.time else self.snapshot.created_at
        return await self._unless_handled(await self._with_copy_sequence(letter, None), valid, since)

    @staticmethod
    def _without_unclear_handling(entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries about a job that is gone without those that handlers may have taken in vain.

        A terminated job leaves the queue: whoever took the advisory that its deliveries were used up may not have found
        it there.
        """
        terminated = any(entry.kind == EntryKind.TERMINATION for entry in entries)
        return [entry for entry in entries if not (terminated and entry.kind == EntryKind.HANDLED)]

    def _was_handled_before(self, entries: Sequence[Entry], audited: LetterRecord | None) -> bool:
        """Return whether a job that has died since may be one that was handled, and not delivered anew."""
        consumer = self.snapshot.consumers.get(last_consumer(entries) or "")
        if audited is None or audited.action != "handled":
            return False
        return consumer is None or consumer.created < audited.at

    async def _record_of_gone(
        self, sequence: int, entries: Sequence[Entry], audit: AuditLog | None, archived: StoredMessage | None
    ) -> tuple[LetterRecord | None, bool]:
        """Return the audit's last record about a job that is gone, and whether it may be about an earlier job.

        After a loss of power the record may be about an earlier job of the sequence. Only where an entry is later than
        the record something has become of the sequence since.
        """
        audited = await audit.last_record(sequence) if audit else None
        if audited is None or all(entry.recorded_at <= audited.at for entry in entries):
            return audited, False
        stored_at = archived.stored_at if archived and archived.time else await self._stored_at(sequence, entries)
        order = await self._order(audited.at, stored_at) if stored_at else Order.AFTER
        if order is Order.UNCLEAR and sequence not in self.named:
            self._why[sequence] = UNCLEAR_ENDS
            return audited, True
        return (None if order is Order.BEFORE else audited), False

    def _is_later_death(self, entry: Entry, audited: LetterRecord) -> bool:
        """Return whether an entry is about what became of a job after the audit's last record of it."""
        at = audited.at
        if audited.in_place and entry.kind == EntryKind.TERMINATION and ServerTimes.of(self.snapshot).clustered:
            # What is terminated leaves the queue, and the job was stored when it was requeued: the clock of the queue's
            # server is behind that of the audit's.
            at -= CLOCK_SKEW
        return audited.leaves_job and entry.recorded_at >= at

    def _may_have_had(self, consumer: str | None, letter: DeadLetter) -> bool:
        return self.snapshot.may_have_had(consumer, letter.sequence, letter.subject)

    async def _acknowledgements(self, jobs: Sequence[tuple[int, tuple[Entry, ...]]]) -> dict[int, list[datetime]]:
        """Return when the server reported that terminated jobs were acknowledged: a slow worker terminates late.

        A job can't have been acknowledged before it was stored.
        """
        windows = {}
        for sequence, entries in jobs:
            ends = [entry for entry in entries if entry.kind == EntryKind.TERMINATION]
            consumer = self.snapshot.consumers.get(last_consumer(ends) or "")
            if ends and (consumer is None or sampled_percent(consumer.sample_freq) > 0):
                stop = max(entry.recorded_at for entry in ends)
                start = await self._stored_at(sequence, entries) or stop - _UNKNOWN_AGE
                windows[sequence] = (start - CLOCK_SKEW, stop + CLOCK_SKEW)
        return await self.metrics.acknowledged_within(windows)

    async def _end(
        self,
        sequence: int,
        message: StoredMessage | None,
        archived: StoredMessage | None,
        entries: Sequence[Entry],
        believed: Sequence[Entry],
        consumers: Collection[str | None],
        empty: Collection[str],
        audit: AuditLog | None,
    ) -> tuple[Order, datetime | None]:
        """Return whether the end of a job is stored, and when it was: that of the message that is stored now.

        Of a job that is gone an end tells, unless something says that another job of its sequence has died since.

        :param archived: a job that is gone, as the archive stores it
        :param believed: the entries of the consumer that had the job
        :param consumers: whose ends count
        """
        if self.events is None or self.events in empty:
            return Order.BEFORE, None
        ends = [
            (end.stored_at, ended_job_time(end.header(MSG_ID) or "", sequence))
            for consumer in consumers
            for end in await self._completions(sequence, str(consumer))
        ]
        contradicted = not CONTRADICTING.isdisjoint([entry.kind for entry in entries])
        if message is None and contradicted and not ends:
            ends = [(at, None) for at in self._acknowledged.get(sequence, ())]
        if not ends:
            if message is None and archived is None and contradicted and (at := await self._foreign_end(sequence)):
                return Order.UNCLEAR, at
            return Order.BEFORE, None
        stored_at = message.stored_at if message else None
        if message is None and contradicted:
            stored_at = archived.stored_at if archived and archived.time else None
            stored_at = stored_at or await self._stored_at(sequence, believed)
        audited = await audit.last_record(sequence) if audit else None
        requeued_at = audited.at if audited and audited.in_place else None
        orders: dict[Order, datetime] = {}
        for at, job_time in ends:
            times = await self._times(at, stored_at, requeued_at)
            order = times.bearing(at, stored_at, job_time) if stored_at else Order.AFTER
            # One that was requeued in place since has run again.
            if order is not Order.BEFORE and requeued_at and contradicted:
                after = times.order(at, requeued_at)
                order = after if Order.UNCLEAR not in (order, after) or after is Order.BEFORE else Order.UNCLEAR
            orders.setdefault(order, at)
        found = next(order for order in (Order.AFTER, Order.UNCLEAR, Order.BEFORE) if order in orders)
        return found, orders[found]

    async def _completions(self, sequence: int, consumer: str) -> list[StoredMessage]:
        """Return the ends of a job that workers of a consumer stored: the last one, or all where it isn't the only."""
        if self.events is None:
            return []
        subject = completion_subject(self.snapshot.queue, consumer, sequence)
        last = await last_message(self.connection, self.events, subject)
        if last is None or last.stored_at < self.snapshot.created_at:
            return []
        return [last]

    async def _foreign_end(self, sequence: int) -> datetime | None:
        """Return when a worker of another consumer than the one that entries name stored an end of a job.

        One of the two consumers didn't have the job, and without its subject it isn't known which.
        """
        if self.events is None or len(self.snapshot.consumers) < _SEVERAL:
            return None
        subject = job_completion_filter(self.snapshot.queue, sequence)
        end = await last_message(self.connection, self.events, subject)
        if end is None or end.stored_at < self.snapshot.created_at:
            return None
        self._why[sequence] = FOREIGN_ENDS
        return end.stored_at

    async def _stored_at(self, sequence: int, entries: Sequence[Entry]) -> datetime | None:
        """Return when a job that is gone was stored, by its record or the archive; ``None`` where neither is there."""
        copies = [entry for entry in entries if entry.kind in {*COPIES, EntryKind.PARKED}]
        job = None
        if copies:
            merged = await merge_entries(self.connection, self.dead_letter_queue, self.snapshot, sequence, copies)
            job = merged.job
        if (job is None or not job.time) and self.archive:
            job = await self.archive.find(sequence)
        return job.stored_at if job and job.time else None

    async def _record_order(self, message: StoredMessage, audited: LetterRecord, entries: Sequence[Entry]) -> Order:
        """Return whether the audit's last record about a sequence is about the message that is stored now."""
        # The death that a redrive recorded is that of an entry which is stored still.
        if audited.died_at and any(
            entry.recorded_at == audited.died_at >= message.stored_at for entry in death_entries(entries)
        ):
            return Order.AFTER
        return await self._order(audited.at, message.stored_at)

    async def _times(self, at: datetime, *moments: datetime | None) -> ServerTimes:
        """Return what is known of the server's clock; since when it has been up is read where that decides."""
        times = ServerTimes.of(self.snapshot)
        unclear = any(moment and times.order(at, moment) is Order.UNCLEAR for moment in moments)
        if not unclear or times.clustered or times.up_since or self.audit is None:
            return times
        if self._up_since is None:
            self._up_since = await server_up_since(self.connection, self.snapshot.companions[self.audit.stream])
        return replace(times, up_since=self._up_since)
