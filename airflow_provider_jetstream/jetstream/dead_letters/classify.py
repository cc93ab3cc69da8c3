"""Decides what jobs with entries in a dead letter queue are: a pure function of the facts that it is given.

An advisory is a hint, not the truth: a slow worker may have finished the job since, its stream or consumer may have
been recreated with the same sequences, or the server may have repeated an advisory. A job is a dead letter only if its
entries are about the very message that is stored now, or about a message with a stored copy.

The rules are the functions ``by_…``. Each returns what a job is, or ``None`` where its evidence doesn't decide: then
the next rule is asked. Where a fact decides that wasn't read, :func:`classify` returns which it is: the caller reads it
and asks again (:mod:`~airflow_provider_jetstream.jetstream.dead_letters.facts`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.contract import MSG_ID, REDRIVE_SEQUENCE, ended_job_time
from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.end_order import (
    CLOCK_SKEW,
    FOREIGN_ENDS,
    GIVEN_AGAIN,
    NEW_JOB_LOST,
    UNCLEAR_ENDS,
    UNCLEAR_HANDLING,
    Order,
    ServerTimes,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry import (
    ADVISORIES,
    BY_WORKERS,
    CONTRADICTING,
    COPIES,
    Entry,
    EntryKind,
    believed_entries,
    death_entries,
    is_handled,
    last_consumer,
    parked_entries,
    stored_entries,
    valid_since,
)
from airflow_provider_jetstream.jetstream.dead_letters.job_facts import (
    RECORDS,
    JobFacts,
    MergedEntries,
    QueueFacts,
    Unread,
    contradicts,
    decide,
    merged_entries,
    required,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter, origin_of
from airflow_provider_jetstream.jetstream.dead_letters.record import Record, read_record
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead, Status
from airflow_provider_jetstream.jetstream.queue.end_evidence import sampled_percent
from airflow_provider_jetstream.jetstream.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState


# How long before its termination a job without a known time of storing may have been acknowledged.
_UNKNOWN_AGE = timedelta(hours=1)
_NO_WAIT: Final = timedelta()
# The status of a gone job without an entry that counts, by the audit's last action; redriven for any other action.
_AUDITED = {"handled": Status.HANDLED, "discarded": Status.DISCARDED, "": Status.UNCERTAIN}
_OF_TERMINATED = frozenset({EntryKind.TERMINATION, EntryKind.COPY})
_STATED = BY_WORKERS | {EntryKind.PROVEN_COPY, EntryKind.PARKED}


def classify(jobs: Iterable[JobFacts], queue: QueueFacts) -> list[DeadLetter | NotDead | Unread]:
    """Decide what jobs are: dead letters or not, or which fact has to be read for that."""
    return [decide(_classified, job, queue) for job in jobs]


def _classified(job: JobFacts, queue: QueueFacts) -> DeadLetter | NotDead:
    case = _Case(job, queue)
    rules = _RULES_OF_STORED if case.message else _RULES_OF_GONE
    return next(said for rule in rules if (said := rule(case)) is not None)


class _Case:
    """A job with what all rules see of it.

    ``message`` is the job as the queue stores it, ``archived`` as the archive does where that matters, ``believed`` are
    the entries of consumers that may have had it, ``current`` those of them that are as young as the stream. ``record``
    is the audit's last record, once :func:`by_record` has said that it is about this very job. ``since`` is when the
    job was certainly alive for the last time, ``valid`` are the entries that count from then on, and ``letter`` is what
    the job is unless a later rule knows better. ``is_later`` is whether the archive's copy may be an earlier job's.
    """

    __slots__ = (
        *("archived", "believed", "current", "entry_sequences", "job", "letter", "merged", "message"),
        *("is_given_again", "is_later", "may_be_handled", "queue", "record", "sequence", "since", "snapshot", "stated"),
        *("current_consumer", "valid"),
    )

    def __init__(self, job: JobFacts, queue: QueueFacts) -> None:
        snapshot = queue.snapshot
        self.job, self.queue, self.snapshot, self.sequence = job, queue, snapshot, job.sequence
        self.message = job.stored and _with_whole_subject(job.stored, job)
        created_at, entries = snapshot.created_at, job.entries
        self.stated = [entry for entry in entries if entry.recorded_at >= created_at]
        self.archived = None
        self.is_later = self.is_given_again = False
        if self.message is None and not _STATED.isdisjoint([entry.kind for entry in self.stated]):
            self.archived = required(job.archived)
            self.is_later = self.is_given_again = self._may_be_later(self.stated)
            self.archived = self.archived_copy()
            entries = self._since_stored(entries)
            self.stated = [entry for entry in entries if entry.recorded_at >= created_at]
        known = self.message or self.archived
        self.believed = believed_entries(snapshot, job.sequence, known, entries)
        self.current = self.stated
        if len(self.believed) < len(entries):
            self.current = [entry for entry in self.believed if entry.recorded_at >= created_at]
        if not self.current and self.is_named:
            # Whoever names the job knows that it died.
            self.believed, self.current = entries, self.stated
        self.current_consumer = snapshot.consumer_for(known.subject) if known else None
        # Entries about an earlier stream's job of the same number are removed together with this one's.
        earlier = [entry for entry in job.entries if entry.recorded_at < created_at and entry not in entries]
        self.entry_sequences = tuple([entry.sequence for entry in stored_entries((*earlier, *entries))])
        self.record = job.record
        self.since = snapshot.created_at
        self.valid: list[Entry] = []
        self.merged: MergedEntries | None = None
        self.letter: DeadLetter | None = None
        self.may_be_handled = False

    def _since_stored(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Leave out what is about an earlier job of the sequence; such a job that is parked stays a letter."""
        if self.archived is None or not self.archived.time:
            return entries
        since = self.archived.stored_at - ServerTimes.of(self.snapshot).skew
        return tuple([entry for entry in entries if entry.recorded_at >= since or entry.kind == EntryKind.PARKED])

    def archived_copy(self) -> StoredMessage | None:
        """Return the archive's copy of the job; ``None`` where it has none, or perhaps an earlier job's only."""
        archived = required(self.job.archived)
        return None if self.is_later else archived

    def _may_be_later(self, entries: Sequence[Entry]) -> bool:
        """Return whether the job may be a later one than the archive's copy, by a record of another job.

        The record states a later time, and the server was restarted since the copy: a loss of power may have taken the
        copy's job back. Of the later one the archive has no copy where nobody republished it.
        """
        if (archived := self.archived) is None or not archived.time:
            return False
        believed = believed_entries(self.snapshot, self.sequence, archived, entries)
        copies = [entry for entry in believed if entry.kind in RECORDS]
        messages = required(self.job.records) if copies else {}
        found = [read_record(message, self.snapshot.queue) for entry in copies if (message := messages[entry.sequence])]
        if not any(
            record
            and record.job.time
            and record.job.stored_at > archived.stored_at
            and contradicts(record.job, archived)
            for record in found
        ):
            return False
        times = ServerTimes.of(self.snapshot)
        up_since = times.up_since or (None if times.clustered else required(self.queue.up_since))
        return up_since is None or up_since > archived.stored_at

    @property
    def consumer(self) -> str | None:
        """The consumer that had the job: as the server says, before what a worker of another one may have stored."""
        by_server = [entry for entry in self.current if entry.kind in ADVISORIES]
        return last_consumer(by_server) or last_consumer(self.current)

    @property
    def is_named(self) -> bool:
        """Whether a request names the job's sequence."""
        return self.sequence in self.queue.named

    @property
    def requeued_at(self) -> datetime | None:
        """When the job was requeued in place, if that is the last thing that was done to it."""
        return self.record.at if self.record and self.record.in_place else None

    def not_dead(
        self,
        status: Status,
        *,
        ended_late: bool = False,
        why: str = "",
        reported: bool = False,
        handled: DeadLetter | None = None,
        death: Death | None = None,
    ) -> NotDead:
        """Return the job as one that is no dead letter."""
        consumer = self.consumer or (self.current_consumer.name if self.current_consumer else None)
        return NotDead(
            *(self.sequence, status, self.entry_sequences, consumer),
            stored=self.message is not None,
            reported=reported,
            ended_late=ended_late,
            why=why,
            handled=handled,
            death=death,
        )

    def dead(
        self,
        message: StoredMessage,
        source: BodySource,
        death: Death,
        *,
        preserved: bool,
        parked: str | None = None,
        origin: Origin | None = None,
    ) -> DeadLetter:
        """Return the job as a dead letter.

        :param message: the job, wherever it was found
        :param preserved: whether the dead letter queue has a copy of the body
        :param parked: why it is out of circulation, if it is
        :param origin: the task that published it, where a record names it
        """
        # The consumer whose worker may still have it.
        by = self.current_consumer if source is BodySource.QUEUE or death.reason is Reason.UNACCOUNTED else None
        return DeadLetter(
            death=death,
            subject=message.subject,
            body=message.data,
            headers=message.headers,
            time=message.time,
            source=source,
            entries=self.entry_sequences,
            preserved=preserved,
            ready_at=death.died_at + (by.max_ack_wait if by else _NO_WAIT),
            parked=parked,
            # A record's origin counts only where it is the one that the job's key names.
            origin=origin_of(message.headers, {origin.key: origin} if origin else {}),
            consumer_absent=by is None and source is BodySource.QUEUE,
            # A record states the time of a death by its writer's clock.
            kept_since=max([death.died_at, *[entry.recorded_at for entry in self.current]]),
        )

    def death_without_entry(self, message: StoredMessage, consumer: ConsumerState | None) -> Death:
        """Return the death of a job whose entries don't say when it died."""
        died_at = message.stored_at
        if consumer:
            # No later than this.
            died_at = min(consumer.last_active + consumer.max_ack_wait, consumer.taken_at)
        return Death(
            stream=self.snapshot.queue,
            created=self.snapshot.created,
            sequence=self.sequence,
            consumer=consumer.name if consumer else None,
            reason=Reason.ORPHAN if consumer else Reason.UNDELIVERABLE,
            died_at=died_at,
        )


def by_end(case: _Case) -> NotDead | None:
    """Call a job completed whose end is stored, unless something says that another job of its sequence died since.

    That its end may be an earlier job's, or that of a worker that didn't have it, makes it uncertain.
    """
    if case.job.ends is None:
        return None
    order, ended_at, is_foreign = _end(case)
    if order is Order.UNCLEAR and not case.is_named:
        return case.not_dead(Status.UNCERTAIN, why=FOREIGN_ENDS if is_foreign else UNCLEAR_ENDS)
    if order is not Order.AFTER:
        return None
    requeued_at = case.requeued_at
    reported = [entry.recorded_at for entry in case.current if entry.kind == EntryKind.DELIVERIES]
    # Only a completion tells that it ended after the server had reported its last delivery. That a job is gone doesn't:
    # it may have expired, or have been evicted, purged or deleted.
    late = ended_at is not None and any(ended_at > at for at in reported if requeued_at is None or at >= requeued_at)
    return case.not_dead(Status.COMPLETED, ended_late=late)


def by_record(case: _Case) -> NotDead | None:
    """Call a job redriven if it is gone and the audit says so. A stored job may have died since.

    A discarded one stays so unless it was parked since. After a loss of power a record may be about an earlier job of
    the sequence. It names when its job was stored, or the servers' times tell; what they leave unclear is uncertain.
    """
    record, message = case.record, case.message
    if record is None:
        return None
    is_latest = all(entry.recorded_at <= record.at for entry in case.current)
    if message is None and record.action == "discarded" and not is_latest and case.archived is None:
        # A server that was killed may announce a death once more.
        case.archived = case.archived_copy()
    names_job = case.archived is not None and case.archived.time and record.stored_at
    if message is None and ((is_latest and not names_job) or _is_parked_still(case, record)):
        order = Order.AFTER
    else:
        order = _order_of_record(case, record)
    if order is Order.UNCLEAR and not case.is_named:
        return case.not_dead(Status.UNCERTAIN, why=UNCLEAR_ENDS)
    if order is Order.BEFORE or (message and order is Order.UNCLEAR):
        case.record = None
    elif message is None and record.action == "redriven":
        return case.not_dead(Status.REDRIVEN)
    elif record.action == "discarded" and (message or _parked_copy(case) is None):
        return case.not_dead(Status.DISCARDED)
    return None


def by_absent_consumer(case: _Case) -> DeadLetter | NotDead | None:
    """Call a stored job that no consumer takes dead by its entries, or undeliverable.

    Its entries prove the death by the consumer that was. One that exists and takes other subjects now may have
    forgotten the death as any other.
    """
    message = case.message
    if message is None or case.current_consumer is not None:
        return None
    case.since = valid_since(message, None, case.record)
    case.valid = _valid_entries(case.believed, case.since)
    deaths = death_entries(case.valid)
    if not deaths:
        preserved = any(entry.kind in COPIES and entry.recorded_at >= message.stored_at for entry in case.believed)
        letter = case.dead(message, BodySource.QUEUE, case.death_without_entry(message, None), preserved=preserved)
        return _with_copy_sequence(case, letter)

    def still_holds(death: Entry) -> bool:
        by = case.snapshot.consumers.get(death.consumer or "")
        if by is None or not by.in_flight:
            return True
        return death.recorded_at >= by.created and by.believes(death.recorded_at)

    return None if any(map(still_holds, deaths)) else case.not_dead(Status.UNCERTAIN)


def by_numbers(case: _Case) -> NotDead | None:
    """Call a stored job alive, stale or uncertain that neither its consumer's numbers nor its entries prove dead."""
    message, consumer = case.message, case.current_consumer
    if message is None or consumer is None:
        return None
    case.since = since = valid_since(message, consumer, case.record)
    case.valid = valid = _valid_entries(case.believed, since)
    deaths, consistent = death_entries(valid), consumer.name not in case.queue.inconsistent_consumers
    # What another consumer, which had the subject before, says of the job doesn't prove that this one is done with it.
    own = [entry for entry in deaths if entry.consumer in (None, consumer.name)]
    has_evidence = consistent and bool([entry for entry in own if consumer.believes(entry.recorded_at)])
    if consumer.proves_death(case.sequence, has_evidence=has_evidence, requeued_at=case.requeued_at):
        return None
    is_idle = not consumer.in_flight and not consumer.pending and consumer.delivered < case.sequence
    is_passed = is_idle and case.sequence in case.queue.passed
    if case.is_named and (is_passed or (is_idle and deaths)):
        return None
    if is_passed:
        return case.not_dead(Status.UNCERTAIN)
    if deaths and not has_evidence and (consistent or consumer.may_have_open(case.sequence)):
        return case.not_dead(Status.UNCERTAIN)
    return case.not_dead(Status.ALIVE if valid or not case.believed else Status.STALE)


def by_missing_entry(case: _Case) -> NotDead | None:
    """Call a stored job uncertain that only the numbers call dead, where another consumer's worker may have it.

    It is completed where the server reported its acknowledgement: a stream that sourced the queue kept it, and was
    deleted before it took the job.
    """
    message = case.message
    if message is None or case.valid:
        return None
    if case.sequence in case.queue.disputed:
        return case.not_dead(Status.UNCERTAIN)
    if not (acknowledged_at := required(case.job.acknowledged_at)):
        return None
    moment = max(message.stored_at, case.requeued_at or message.stored_at)
    order = _times(case, acknowledged_at, moment).order(acknowledged_at, moment)
    if order is Order.AFTER:
        return case.not_dead(Status.COMPLETED)
    unclear = order is Order.UNCLEAR and not case.is_named
    return case.not_dead(Status.UNCERTAIN, why=UNCLEAR_ENDS) if unclear else None


def by_death(case: _Case) -> DeadLetter | NotDead | None:
    """Make a letter of a stored job: queue, audit and entries call it dead."""
    message = case.message
    if message is None:
        return None
    if case.valid:
        merged = merged_entries(case.job, case.queue, case.valid, message)
    else:
        merged = MergedEntries(case.death_without_entry(message, case.current_consumer))
    letter = case.dead(message, BodySource.QUEUE, merged.death, preserved=bool(merged.job), origin=merged.origin)
    decided = _with_copy_sequence(case, letter)
    case.letter = decided if isinstance(decided, DeadLetter) else None
    return None if case.letter else decided


def by_handler(case: _Case) -> NotDead | None:
    """Call a letter handled where a handler has reported so, or acknowledged an entry that counts.

    An entry that was removed since the entries were read leaves open whether by a handler: the next scan knows.
    """
    letter, job = case.letter, case.job
    # A redrive that was cut off has to be finished, whatever a handler did meanwhile.
    if letter is None or letter.copy_sequence is not None:
        return None
    # A record of a job that is gone is judged by itself.
    message, record = case.message, case.record
    recorded_at = record.at if message and record and record.action == "handled" else None
    if job.reported_at or recorded_at:
        orders = {at: _bearing(case, at, case.since) for at in (job.reported_at, recorded_at) if at}
        if message and record and recorded_at and record.stored_at == message.time and case.since == message.stored_at:
            orders[recorded_at] = Order.AFTER
        if Order.AFTER in orders.values():
            is_reported = job.reported_at is not None and orders[job.reported_at] is Order.AFTER
            return case.not_dead(Status.HANDLED, reported=is_reported)
        if Order.UNCLEAR in orders.values():
            return None if case.is_named else case.not_dead(Status.UNCERTAIN, why=UNCLEAR_ENDS)
    if is_handled(case.valid):
        return case.not_dead(Status.HANDLED, handled=letter if letter.source is BodySource.QUEUE else None)
    if case.queue.has_handlers and stored_entries(case.valid) and required(job.has_removed_entries):
        return case.not_dead(Status.ALIVE)
    return None


def by_unclear_handling(case: _Case) -> NotDead | None:
    """Call a letter uncertain whose job is gone, where a handler may have handled it or found nothing."""
    unclear = case.may_be_handled and not case.is_named
    return case.not_dead(Status.UNCERTAIN, why=UNCLEAR_HANDLING) if unclear else None


def by_letter(case: _Case) -> DeadLetter | None:
    """Return the letter that no rule objects to."""
    return case.letter


def by_request(case: _Case) -> NotDead | None:
    """Make a letter of an unaccounted job that a request names, where a copy is stored."""
    if case.sequence not in case.queue.unaccounted:
        return None
    record = case.record
    # A parked one is in the dead letter queue, unless a loss of power took its record from there.
    if record and record.action in ("redriven", "handled", "discarded"):
        return case.not_dead(_AUDITED.get(record.action, Status.REDRIVEN))
    message, source = case.archived_copy(), BodySource.ARCHIVE
    created_at = case.snapshot.created_at
    copies = [entry for entry in case.believed if entry.kind in COPIES and entry.recorded_at >= created_at]
    if message is None and copies:
        message, source = merged_entries(case.job, case.queue, copies).job, BodySource.COPY
    if message is None:
        return case.not_dead(Status.GONE)
    message = _with_whole_subject(message, case.job)
    consumer = case.current_consumer = case.snapshot.consumer_for(message.subject)
    if consumer and case.job.ends is not None and (end := _own_end(case, consumer.name)):
        stored_at = message.stored_at if message.time else end.stored_at
        job_time = ended_job_time(end.header(MSG_ID) or "", case.sequence)
        times = _times(case, end.stored_at, stored_at)
        if not message.time or times.bearing(end.stored_at, stored_at, job_time) is not Order.BEFORE:
            return case.not_dead(Status.COMPLETED)
    death = replace(case.death_without_entry(message, consumer), reason=Reason.UNACCOUNTED)
    letter = case.dead(message, source, death, preserved=source is BodySource.COPY)
    if source is BodySource.COPY:
        letter = replace(letter, foreign_subject=not _may_have_had(case, last_consumer(copies), letter))
    case.since = record.at if record else message.stored_at
    case.letter = letter
    return None


def by_age_of_entries(case: _Case) -> NotDead | None:
    """Call a job stale that is gone, where the stream is younger than all entries; a discarded one has none."""
    is_known = case.letter or case.stated or (case.record and case.record.action == "discarded")
    return None if is_known else case.not_dead(Status.STALE)


def by_parked_copy(case: _Case) -> DeadLetter | NotDead | None:
    """Make a parked letter of a job that is gone, where its record is stored and no requeueing came after that."""
    if case.letter is None and (found := _parked_copy(case)):
        entry, parked = found
        case.letter = case.dead(
            *(parked.job, BodySource.COPY, parked.death),
            preserved=True,
            parked=parked.parked or "no reason given",
            origin=parked.origin,
        )
        case.since = entry.recorded_at
    return None


def by_entries(case: _Case) -> NotDead | None:
    """Dismiss a job that is gone, where no entry counts from the audit's last record on, or a handler removed one."""
    if case.letter:
        return None
    record = case.record
    # A job that was requeued in place may have died again.
    case.valid = [entry for entry in case.current if record is None or _is_later_death(case, entry, record)]
    if not case.valid:
        status = _AUDITED.get(record.action if record else "", Status.REDRIVEN)
        return case.not_dead(status, why="" if record else FOREIGN_ENDS)
    if (case.is_given_again or case.job.is_given_again) and not case.is_named:
        # Of ends by subject there is the last one only, which is the later job's.
        return case.not_dead(Status.UNCERTAIN, why=GIVEN_AGAIN)
    if any(entry.kind == EntryKind.TERMINATION for entry in case.valid):
        # A terminated job leaves the queue: whoever took the advisory that its deliveries were used up may not have
        # found it there.
        told = [entry for entry in case.valid if entry.kind != EntryKind.HANDLED]
        case.may_be_handled = len(told) < len(case.valid)
        case.valid = told
    if is_handled(case.valid):
        return case.not_dead(Status.HANDLED)
    if record and record.action == "handled":
        # It died since, and may be one that was handled, and not delivered anew.
        consumer = case.snapshot.consumers.get(last_consumer(case.valid) or "")
        case.may_be_handled |= consumer is None or consumer.created < record.at
    if case.archived is None:
        case.archived = case.archived_copy()
    case.merged = merged_entries(case.job, case.queue, case.valid, case.archived)
    return None


def by_deletion(case: _Case) -> NotDead | None:
    """Dismiss a job that only the server reports as deleted in flight, unless the job had expired by then."""
    merged, kinds = case.merged, {entry.kind for entry in case.valid}
    # A worker that gives up an expired job terminates it. Where only the server reports the deletion, the report may be
    # wrong.
    if (
        merged is None
        or merged.death.reason is not Reason.EXPIRED
        or EntryKind.DELETION not in kinds
        or {EntryKind.PROVEN_COPY, EntryKind.TERMINATION} & kinds
    ):
        return None
    message = case.archived or merged.job
    if message:
        return None if _has_expired(case, message, merged.death) else case.not_dead(Status.SPURIOUS)
    lost = _may_have_expired(case, merged.death)
    return case.not_dead(Status.LOST, death=merged.death) if lost else case.not_dead(Status.SPURIOUS)


def by_copy(case: _Case) -> NotDead | None:
    """Make a letter of a job that is gone where its death is proved and a copy is stored; else it is lost or gone."""
    merged = case.merged
    if merged is None:
        return None
    kinds, death = {entry.kind for entry in case.valid}, merged.death
    message = case.archived or merged.job
    # A worker stores its record before it terminates the job, and may have been stopped in between: another one may
    # have finished the job since.
    is_proved = bool({EntryKind.TERMINATION, EntryKind.PROVEN_COPY} & kinds)
    expired = death.reason is Reason.EXPIRED and EntryKind.DELETION in kinds
    if not (is_proved and death.reason in (Reason.TERMINATED, Reason.EXPIRED)) and not expired:
        if message is None:
            return case.not_dead(Status.GONE)
        if not case.queue.with_unaccounted:
            return case.not_dead(Status.UNACCOUNTED)
        # A job that was acknowledged would run a second time.
        if required(case.job.acknowledged_at) is not None:
            return case.not_dead(Status.COMPLETED)
    if message is None:
        return case.not_dead(Status.LOST, death=death)
    # The server's copy before a worker's of the same body and subject, which may have other headers.
    source = BodySource.COPY if merged.job else BodySource.ARCHIVE
    message = _with_whole_subject(message, case.job)
    letter = case.dead(message, source, death, preserved=merged.job is not None, origin=merged.origin)
    if case.archived is None:
        letter = replace(letter, foreign_subject=not _may_have_had(case, death.consumer, letter))
    stored_at = message.stored_at if message.time else case.snapshot.created_at
    case.since = case.record.at if case.record else stored_at
    case.letter = letter
    return None


_Rules: TypeAlias = "tuple[Callable[[_Case], DeadLetter | NotDead | None], ...]"
_RULES_OF_STORED: Final[_Rules] = (
    *(by_end, by_record, by_absent_consumer, by_numbers, by_missing_entry),
    *(by_death, by_handler, by_letter),
)
_RULES_OF_GONE: Final[_Rules] = (
    *(by_end, by_request, by_age_of_entries, by_record, by_parked_copy, by_entries, by_deletion, by_copy),
    *(by_handler, by_unclear_handling, by_letter),
)


def _times(case: _Case, at: datetime, *moments: datetime | None) -> ServerTimes:
    """Return what is known of the server's clock; since when it has been up is asked for where that decides."""
    times = ServerTimes.of(case.snapshot)
    unclear = any(moment and times.order(at, moment) is Order.UNCLEAR for moment in moments)
    if not unclear or times.clustered or times.up_since:
        return times
    return replace(times, up_since=required(case.queue.up_since))


def _order_of_record(case: _Case, record: LetterRecord) -> Order:
    """Return whether a record is about the job (``AFTER``), or about an earlier one of its sequence (``BEFORE``)."""
    known = case.message or case.archived
    if known and known.time and record.stored_at:
        return Order.AFTER if record.stored_at == known.time else Order.BEFORE
    stored_at = known.stored_at if known and known.time else _stored_at(case.job, case.queue, case.current)
    return _bearing(case, record.at, stored_at) if stored_at else Order.AFTER


def _bearing(case: _Case, at: datetime, stored_at: datetime) -> Order:
    return _times(case, at, stored_at).bearing(at, stored_at)


def _own_end(case: _Case, consumer: str) -> StoredMessage | None:
    """Return the last end of the job that workers of a consumer stored."""
    ends = case.job.ends or {}
    end = required(ends.get(consumer, Unread.ENDS))
    return end if end and end.stored_at >= case.snapshot.created_at else None


def _end(case: _Case) -> tuple[Order, datetime | None, bool]:
    """Return whether the end of a job is stored, when it was, and whether it is another consumer's.

    It is that of the message that is stored now. Of a job that is gone an end tells, unless something says that another
    job of its sequence has died since.
    """
    job, message, archived = case.job, case.message, case.archived
    ends = [
        (end.stored_at, ended_job_time(end.header(MSG_ID) or "", case.sequence))
        for consumer in dict.fromkeys((case.consumer, case.current_consumer.name if case.current_consumer else None))
        if consumer and (end := _own_end(case, consumer))
    ]
    contradicted = not CONTRADICTING.isdisjoint([entry.kind for entry in case.stated])
    if message is None and contradicted and not ends and acknowledgement_window(job, case.queue):
        ends = [(at, None) for at in required(job.near_acknowledgements)]
    if not ends:
        # One of the two consumers didn't have the job, and without its subject it isn't known which.
        is_ambiguous = message is None and archived is None and contradicted and len(case.snapshot.consumers) > 1
        if is_ambiguous and (at := required(job.foreign_end)) and at >= case.snapshot.created_at:
            return Order.UNCLEAR, at, True
        return Order.BEFORE, None, False
    known = message or (archived if archived and archived.time else None)
    stored_at = known.stored_at if known else None
    if known is None and contradicted:
        stored_at = _stored_at(job, case.queue, case.believed)
    requeued_at = case.requeued_at
    orders: dict[Order, datetime] = {}
    for at, job_time in ends:
        times = _times(case, at, stored_at, requeued_at)
        if stored_at:
            order = times.bearing(at, stored_at, job_time)
            case.is_given_again |= order is Order.BEFORE and at > stored_at
        else:
            # Nothing says when the job was stored: another one may have got the sequence since a restart.
            order = _times(case, at, at).bearing(at, at) if contradicted else Order.AFTER
        # One that was requeued in place since has run again.
        if order is not Order.BEFORE and requeued_at and contradicted:
            after = times.order(at, requeued_at)
            order = after if Order.UNCLEAR not in (order, after) or after is Order.BEFORE else Order.UNCLEAR
        orders.setdefault(order, at)
    found = next(order for order in (Order.AFTER, Order.UNCLEAR, Order.BEFORE) if order in orders)
    return found, orders[found], False


def acknowledgement_window(job: JobFacts, queue: QueueFacts) -> tuple[datetime, datetime] | None:
    """Return when a terminated job may have been acknowledged: a slow worker terminates late.

    A job can't have been acknowledged before it was stored.

    :return: ``None`` where it wasn't terminated, or its consumer reports no acknowledgements
    """
    ends = [entry for entry in job.entries if entry.kind == EntryKind.TERMINATION]
    consumer = queue.snapshot.consumers.get(last_consumer(ends) or "")
    if not ends or (consumer and sampled_percent(consumer.sample_freq) <= 0):
        return None
    stop = max(entry.recorded_at for entry in ends)
    start = _stored_at(job, queue, job.entries) or stop - _UNKNOWN_AGE
    return start - CLOCK_SKEW, stop + CLOCK_SKEW


def _stored_at(job: JobFacts, queue: QueueFacts, entries: Sequence[Entry]) -> datetime | None:
    """Return when a job that is gone was stored, by its record or the archive; ``None`` where neither is there."""
    copies = [entry for entry in entries if entry.kind in RECORDS]
    message = merged_entries(job, queue, copies).job if copies else None
    if message is None or not message.time:
        message = required(job.archived)
    return message.stored_at if message and message.time else None


def _with_whole_subject(message: StoredMessage, job: JobFacts) -> StoredMessage:
    """Complete a subject that the server shows in part, where the archive has a copy of the job."""
    if UNKNOWN_BYTE not in message.subject:
        return message
    copy = required(job.archived)
    return replace(message, subject=copy.subject) if copy and copy.time == message.time else message


def _valid_entries(entries: Sequence[Entry], since: datetime) -> list[Entry]:
    # The job is stored, so an advisory that it was deleted is wrong.
    return [entry for entry in entries if entry.recorded_at >= since and entry.kind != EntryKind.DELETION]


def _is_later_death(case: _Case, entry: Entry, record: LetterRecord) -> bool:
    """Return whether an entry is about what became of a job after the audit's last record of it."""
    at = record.at
    if record.in_place and entry.kind in _OF_TERMINATED and ServerTimes.of(case.snapshot).clustered:
        # What is terminated leaves the queue, and the job was stored when it was requeued: the clock of the server that
        # stored the entry is behind that of the audit's. A worker's copy is kept, since no other may be left.
        at -= CLOCK_SKEW
    return record.leaves_job and entry.recorded_at >= at


def _may_have_had(case: _Case, consumer: str | None, letter: DeadLetter) -> bool:
    return case.snapshot.may_have_had(consumer, letter.sequence, letter.subject)


def _has_expired(case: _Case, message: StoredMessage, death: Death) -> bool:
    max_age = case.snapshot.max_age
    if case.snapshot.config.get("allow_msg_ttl") and (ttl := message.header("Nats-TTL")):
        with suppress(ValueError, OverflowError):
            nanoseconds = 0 if ttl == "never" else parse_duration(f"{ttl}s" if ttl.isdecimal() else ttl)
            max_age = timedelta(microseconds=nanoseconds / 1_000)
    # A difference: the sum may be later than any time.
    if not message.time or max_age <= timedelta() or death.died_at - message.stored_at < max_age:
        return False
    return required(case.job.acknowledged_at) is None


def _may_have_expired(case: _Case, death: Death) -> bool:
    """Return whether a job without a copy may have expired; its copy in the archive expires as well."""
    max_age = case.snapshot.max_age
    by_age = max_age > timedelta() and death.died_at - case.snapshot.created_at >= max_age
    return (by_age or bool(case.snapshot.config.get("allow_msg_ttl"))) and required(case.job.acknowledged_at) is None


def _with_copy_sequence(case: _Case, letter: DeadLetter) -> DeadLetter | NotDead:
    """Add the new job's sequence, where a redrive was cut off after it stored the new job."""
    record = case.record
    if record is None or record.action != "redriven":
        return letter
    if record.new_stream in (None, case.snapshot.queue) and record.new_sequence:
        # After a loss of power the queue may be older than the audit's record: what has, or had, that place tells.
        message, last, has_archive = required(case.job.new_job)
        stated = first(message.headers, REDRIVE_SEQUENCE) if message else str(case.sequence)
        if stated != str(case.sequence) or last < record.new_sequence:
            return letter
        if message is None and has_archive and _bearing(case, record.at, record.at) is not Order.AFTER:
            # Another job may have had that place since, whose copy is lost as well.
            return letter if case.is_named else case.not_dead(Status.UNCERTAIN, why=NEW_JOB_LOST)
    return replace(letter, copy_sequence=record.new_sequence, copy_stream=record.new_stream)


def _parked_copy(case: _Case) -> tuple[Entry, Record] | None:
    """Return the last record of a parked letter that counts, and its entry."""
    for entry in parked_entries(case.current, case.record):
        if parked := _parked_record(case, entry):
            return entry, parked
    return None


def _is_parked_still(case: _Case, record: LetterRecord) -> bool:
    """Return whether a job is what the audit says was parked: its parked record states when the job was stored.

    The server may announce a death once more after that, though the job is gone from its queue.
    """
    found, archived = _parked_copy(case) if record.action == "parked" else None, case.archived
    return found is not None and (archived is None or found[1].job.time == archived.time)


def _parked_record(case: _Case, entry: Entry) -> Record | None:
    """Return the record of a parked letter; ``None`` where the entry is gone, or is about another job.

    A later job of its sequence, which the archive has, contradicts no record.
    """
    message = required(case.job.records).get(entry.sequence)
    record = read_record(message, case.snapshot.queue) if message else None
    if record is None or not record.job.subject:
        return None
    archived = case.archived
    if archived and archived.time and archived.stored_at <= entry.recorded_at and contradicts(record.job, archived):
        return None
    return record
