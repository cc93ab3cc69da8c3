"""One entry of a dead letter queue in short: what it says about which job, and when."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.log import LetterRecord
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.snapshot import ConsumerState


class EntryKind(IntEnum):
    """What an entry of the dead letter queue is."""

    DELIVERIES = 1
    """The server's advisory that a job used up its deliveries."""
    TERMINATION = 2
    """The server's advisory that a worker terminated it."""
    DELETION = 3
    """The server's advisory that it went away while a worker had it; also sent in error after a crash."""
    COPY = 4
    """A copy that a worker made, who may have been stopped before it gave the job up; or that a scan made of a job that
    nobody takes."""
    PARKED = 5
    """A copy taken out of circulation."""
    PROVEN_COPY = 6
    """A copy that a scan made of a death that it had proved."""


class Entry(NamedTuple):
    """One entry, as the index keeps it.

    :param entry: its sequence in the dead letter queue
    :param kind: what it is
    :param consumer: who delivered the job, as far as it says
    :param told_at: by the server's clock: when the job died, or for a worker's copy when it was stored; the epoch for a
        copy from an earlier stream of the same name
    :param deliveries: how often the job was delivered; 0 where it doesn't say
    """

    sequence: int
    kind: EntryKind
    consumer: str | None
    recorded_at: datetime
    deliveries: int


_DEATHS = frozenset({EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.PROVEN_COPY})


def death_entries(mentions: Iterable[Entry]) -> list[Entry]:
    """Give those by which a job that is still stored was dead at that time.

    :param mentions: what is said about a job
    :return: some of them
    """
    return [each for each in mentions if each.kind in _DEATHS]


def valid_since(message: StoredMessage, taker: ConsumerState, done: LetterRecord | None) -> datetime:
    """Tell when a stored job was certainly alive for the last time; what was said before that no longer counts.

    :param message: the job
    :param taker: the consumer that takes it; a recreated one delivers every stored job again
    :param done: what the audit says was last done with it
    :return: the time
    """
    times = [message.stored_at, taker.created]
    if done and done.in_place:
        times.append(done.at)
    return max(times)


def last_consumer(mentions: Iterable[Entry]) -> str | None:
    """Give the consumer of which the last word speaks.

    :param mentions: what is said about a job
    :return: its name, where any of them says
    """
    names = [each.consumer for each in mentions if each.consumer]
    return names[-1] if names else None
