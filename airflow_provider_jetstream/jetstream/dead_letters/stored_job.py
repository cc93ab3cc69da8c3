"""What entries and a consumer's numbers prove about a job that is stored; nothing is read here."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind, death_entries, valid_since
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter, origin_of
from airflow_provider_jetstream.jetstream.dead_letters.status import Status

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.audited_letters import LetterRecord
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
    # The job is stored, so an advisory that it was deleted is wrong.
    valid = [entry for entry in entries if entry.recorded_at >= since and entry.kind != EntryKind.DELETION]
    deaths, consistent = death_entries(valid), consumer.name not in inconsistent_consumers
    has_evidence = consistent and any(consumer.believes(entry.recorded_at) for entry in deaths)
    requeued_at = audited.at if audited and audited.in_place else None
    if consumer.proves_death(message.sequence, has_evidence=has_evidence, requeued_at=requeued_at):
        return since, valid
    if deaths and not has_evidence and (consistent or consumer.may_have_open(message.sequence)):
        return Status.UNCERTAIN
    return Status.ALIVE if valid or not entries else Status.STALE


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
    )
