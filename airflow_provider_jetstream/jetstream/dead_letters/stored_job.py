"""What entries and a consumer's numbers prove about a job that is stored; nothing is read here."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind, death_entries, valid_since
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter, origin_of
from airflow_provider_jetstream.jetstream.dead_letters.status import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.death import Death
    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.queue.consumer_state import ConsumerState

_NO_WAIT = timedelta()


def judge_stored_job(
    message: StoredMessage,
    consumer: ConsumerState,
    entries: Sequence[Entry],
    audited: LetterRecord | None,
    inconsistent_consumers: Collection[str],
) -> Status | tuple[datetime, list[Entry]]:
    """Return of a dead job since when entries count, and those that do; of any other job its status.

    :param message: the job
    :param consumer: the consumer that it is for
    :param entries: all entries about jobs of its sequence
    :param audited: the last action on the job that the audit has
    :param inconsistent_consumers: consumers that have fewer dead letters than entries state
    """
    since = valid_since(message, consumer, audited)
    valid = _valid_entries(entries, since)
    deaths, consistent = death_entries(valid), consumer.name not in inconsistent_consumers
    # What another consumer, which had the subject before, says of the job doesn't prove that this one is done with it.
    own = [entry for entry in deaths if entry.consumer in (None, consumer.name)]
    has_evidence = consistent and any(consumer.believes(entry.recorded_at) for entry in own)
    requeued_at = audited.at if audited and audited.in_place else None
    if consumer.proves_death(message.sequence, has_evidence=has_evidence, requeued_at=requeued_at):
        return since, valid
    if deaths and not has_evidence and (consistent or consumer.may_have_open(message.sequence)):
        return Status.UNCERTAIN
    return Status.ALIVE if valid or not entries else Status.STALE


def judge_job_without_consumer(
    message: StoredMessage,
    consumers: Mapping[str, ConsumerState],
    entries: Sequence[Entry],
    audited: LetterRecord | None,
) -> Status | tuple[datetime, list[Entry]] | None:
    """Return the same of a job whose subject no consumer takes; ``None`` where no entry states its death.

    Its entries prove the death by the consumer that was. One that exists and takes other subjects now may have
    forgotten the death as any other.

    :param consumers: the queue's consumers by name
    """
    since = valid_since(message, None, audited)
    valid = _valid_entries(entries, since)
    deaths = death_entries(valid)
    if not deaths:
        return None

    def still_holds(death: Entry) -> bool:
        by = consumers.get(death.consumer or "")
        if by is None or not by.in_flight:
            return True
        return death.recorded_at >= by.created and by.believes(death.recorded_at)

    if any(still_holds(death) for death in deaths):
        return since, valid
    return Status.UNCERTAIN


def _valid_entries(entries: Sequence[Entry], since: datetime) -> list[Entry]:
    # The job is stored, so an advisory that it was deleted is wrong.
    return [entry for entry in entries if entry.recorded_at >= since and entry.kind != EntryKind.DELETION]


def dead_letter_of(
    message: StoredMessage,
    source: BodySource,
    death: Death,
    consumer: ConsumerState | None,
    *,
    preserved: bool,
    parked: str | None = None,
    origin: Origin | None = None,
    entries: Sequence[Entry] = (),
) -> DeadLetter:
    """Return a dead job as a letter.

    :param message: the job, wherever it was found
    :param consumer: the consumer whose worker may still have it
    :param preserved: whether the dead letter queue has a copy of the body
    :param parked: why it is out of circulation, if it is
    :param origin: the task that published it, where a record names it
    """
    return DeadLetter(
        death=death,
        subject=message.subject,
        body=message.data,
        headers=message.headers,
        time=message.time,
        source=source,
        entries=tuple([entry.sequence for entry in entries]),
        preserved=preserved,
        ready_at=death.died_at + (consumer.max_ack_wait if consumer else _NO_WAIT),
        parked=parked,
        # A record's origin counts only where it is the one that the job's key names.
        origin=origin_of(message.headers, {origin.key: origin} if origin else {}),
        consumer_absent=consumer is None and source == BodySource.QUEUE,
    )
