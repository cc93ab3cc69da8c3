"""Counts the dead letters among jobs that match no consumer: those of consumers that are gone or take other subjects.

An advisory about used-up deliveries that was stored after such a job proves its death, as for a scan.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.advisories import MaxDeliveries
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, read_range
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stored_sequences, subject_counts
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError
from airflow_provider_jetstream.jetstream.evidence import event_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# An overview is made every few seconds.
_MOST_ENTRIES: Final = 10_000
_MOST_JOBS: Final = 2_000


async def count_absent_letters(
    connection: Connection, queue: str, consumers: Collection[str], undeliverable: Mapping[str, int]
) -> Counter[str]:
    """Return by subject how many of the jobs that match no consumer are dead letters.

    10,000 advisories are read, first those of absent consumers, and 2,000 jobs that they are about. Whoever may not
    read the dead letter queue or the jobs finds none.

    :param consumers: those that exist
    :param undeliverable: subjects that match no consumer, with their number of jobs
    :raises ApiError: the server refused
    """

    async def dead_on(sequence: int) -> str | None:
        message = await get_message(connection, queue, sequence)
        return message.subject if message and message.stored_at <= died_at[sequence] else None

    try:
        died_at = await _deaths(connection, queue, consumers)
        stored = await stored_sequences(connection, queue) if died_at else ()
        jobs = [sequence for sequence in sorted(died_at) if sequence in stored][:_MOST_JOBS]
        subjects = await map_concurrently(dead_on, jobs)
    except (NotFoundError, PermissionDeniedError):
        return Counter()
    return Counter(subject for subject in subjects if subject is not None and subject in undeliverable)


async def _deaths(connection: Connection, queue: str, consumers: Collection[str]) -> dict[int, datetime]:
    """Return by stream sequence when the last advisory about a job that used up its deliveries was stored."""
    prefix, died_at = f"{MAX_DELIVERIES}.{queue}.", dict[int, "datetime"]()
    for info in await list_streams(connection, f"{prefix}*"):
        name = info["config"]["name"]
        subjects = [subject async for subject, _ in subject_counts(connection, name, f"{prefix}*")]
        for subject in sorted(subjects, key=lambda subject: subject.removeprefix(prefix) in consumers):
            async for message in read_range(connection, name, subject):
                if len(died_at) == _MOST_ENTRIES:
                    return died_at
                event = event_of(message, queue, connection.domain)
                if isinstance(event, MaxDeliveries):
                    died_at[event.stream_seq] = message.stored_at
    return died_at
