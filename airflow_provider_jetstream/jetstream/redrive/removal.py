"""Removes original jobs from the work queue, and finished entries from the dead letter queue."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer
from airflow_provider_jetstream.jetstream.client.stream_api import (
    consumer_info,
    list_consumers,
    priority_fields,
    pull_request,
    pull_subject,
    stored_sequences,
    stream_info,
)
from airflow_provider_jetstream.jetstream.client.streams import get_message, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects, late_ack_subject
from airflow_provider_jetstream.jetstream.dead_letters.handlers import own_consumer
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.work_queue import require_dead_letters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

RUN_AGAIN = "run it again soon"

# Requests for the next stored job, which skip removed jobs; more of them cost more than they save.
_NEXT_REQUESTS = 8


async def remove_originals(
    connection: Connection, queue: str, originals: Mapping[int, str | None]
) -> dict[int, JetStreamProviderError]:
    """Remove jobs that have been copied or completed.

    A late acknowledgement works on streams that deny deletes as well; a job that no consumer has delivered, or whose
    consumer is gone, is deleted, or delivered to a consumer of this package's own where deletes are denied. The answer
    to none of these says that the job is gone, so the queue is read afterwards.

    :param originals: the jobs' stream sequences, with the consumer that delivered each; ``None`` where none did, or
        where no consumer takes their subject any more
    :return: for each job that is still stored why
    :raises NotFoundError: the queue doesn't exist any more
    :raises TransientError: the queue couldn't be read
    """
    requests = [_removal(connection.api_prefix, queue, consumer, sequence) for sequence, consumer in originals.items()]
    answers: dict[int, bytes | JetStreamProviderError] = {}
    answers.update(zip(originals, await connection.request_many(requests), strict=True))
    stored = await _still_stored(connection, queue, sorted(originals)) if originals else []
    consumers = await list_consumers(connection, queue) if stored else {}
    if without := [sequence for sequence in stored if originals[sequence] not in consumers]:
        answers |= await _remove_without_consumer(connection, queue, without)
        stored = await _still_stored(connection, queue, stored)
    return {
        sequence: RedriveError(
            f"the original {sequence} could not be removed ({_cause(answers[sequence])}); {RUN_AGAIN}"
        )
        for sequence in stored
    }


def _removal(api_prefix: str, queue: str, consumer: str | None, sequence: int) -> tuple[str, bytes]:
    if consumer:
        return late_ack_subject(queue, consumer, sequence), b"+ACK"
    return f"{api_prefix}.STREAM.MSG.DELETE.{queue}", b'{"seq":%d,"no_erase":true}' % sequence


async def _remove_without_consumer(
    connection: Connection, queue: str, sequences: Sequence[int]
) -> Mapping[int, bytes | JetStreamProviderError]:
    """Delete jobs; where the stream denies that, have them delivered to a consumer that acknowledges them."""
    if not (await stream_info(connection, queue))["config"].get("deny_delete"):
        requests = [_removal(connection.api_prefix, queue, None, sequence) for sequence in sequences]
        return dict(zip(sequences, await connection.request_many(requests), strict=True))
    messages = await map_concurrently(partial(get_message, connection, queue), sequences)
    subjects = sorted({message.subject for message in messages if message})
    try:
        # It takes no job from workers: the server refuses consumers whose filters overlap.
        own = await _create_own_consumer(connection, queue, queue, subjects, _SHORT_THRESHOLD)
        try:
            await _acknowledge_through(connection, queue, own, sequences)
        finally:
            # What else it was delivered is delivered to the consumer that is created for these jobs.
            await connection.api(f"CONSUMER.DELETE.{queue}.{own}")
    except (ApiError, NotFoundError, PermissionDeniedError, TransientError) as error:
        return dict.fromkeys(sequences, error)
    return {}


def _cause(answer: bytes | JetStreamProviderError) -> object:
    if isinstance(answer, JetStreamProviderError):
        return answer
    try:
        decode_answer(answer or b"{}", "removal")
    except (ApiError, TransientError, ValueError) as error:
        return error
    return "the server kept it"


async def _still_stored(connection: Connection, queue: str, sequences: list[int]) -> list[int]:
    """Return which of these jobs are stored: by requests for the next stored job while few are, then one by one."""
    wanted, start, last = set(sequences), sequences[0], sequences[-1]
    remaining: list[int] = []
    for _ in range(_NEXT_REQUESTS + len(sequences) // _NEXT_REQUESTS):
        message = await next_message(connection, queue, start, ">") if start <= last else None
        if message is None or message.sequence > last:
            return remaining
        if message.sequence in wanted:
            remaining.append(message.sequence)
        start = message.sequence + 1

    async def is_stored(sequence: int) -> bool:
        return await get_message(connection, queue, sequence) is not None

    rest = [sequence for sequence in sequences if sequence >= start]
    stored = await map_concurrently(is_stored, rest)
    return [*remaining, *(sequence for sequence, is_there in zip(rest, stored, strict=True) if is_there)]


log = logging.getLogger(__name__)

_PULL_BATCH = 500
# Fewer entries are removed one by one.
_LEAST_PURGED = 64
_PULL_PAUSE = 0.05
_OWN_CONSUMER_THRESHOLD = 300 * 1_000_000_000
# One on the work queue is in the way of that which provisioning creates.
_SHORT_THRESHOLD = 30 * 1_000_000_000


async def remove_entries(
    connection: Connection, queue: WorkQueue, entries: Sequence[int], config: Mapping[str, Any] | None = None
) -> int:
    """Remove finished entries from the dead letter queue, and return how many stay, as far as is known.

    Nothing is raised: an entry that stays does no harm, since its job is gone and can't become a dead letter again.

    :param entries: sequences in the dead letter queue
    :param config: the dead letter queue's configuration, where it is known
    """
    if not entries:
        return 0
    dead_letter_queue = require_dead_letters(queue).name
    try:
        config = config or (await stream_info(connection, dead_letter_queue))["config"]
        if not config.get("deny_delete"):
            if len(entries) >= _LEAST_PURGED and not config.get("deny_purge"):
                entries = await _purge(connection, dead_letter_queue, entries)
            return await _delete(connection, dead_letter_queue, entries) if entries else 0
        if config["retention"] == "workqueue":
            return await _acknowledge(connection, dead_letter_queue, queue.name, entries)
    except (ApiError, NotFoundError, PermissionDeniedError, TransientError) as error:
        log.warning("%d finished entries stay in %s: %s", len(entries), dead_letter_queue, error)
    return len(entries)


async def _purge(connection: Connection, dead_letter_queue: str, entries: Sequence[int]) -> Sequence[int]:
    """Purge the first messages of the stream as far as all of them are among the entries; return the other entries.

    Nothing is stored in front of what a stream stores, so what is read here holds when the purge arrives.
    """
    stored, finished = await stored_sequences(connection, dead_letter_queue), frozenset(entries)
    end = first = max(1, stored.first)
    while end <= stored.last and (end in finished or end in stored.deleted):
        end += 1
    if not stored.exact or sum(first <= entry < end for entry in finished) < _LEAST_PURGED:
        return entries
    try:
        await connection.api(f"STREAM.PURGE.{dead_letter_queue}", {"seq": end})
    except (ApiError, PermissionDeniedError) as error:
        log.warning("Finished entries of %s are removed one by one: %s", dead_letter_queue, error)
        return entries
    return [entry for entry in entries if entry >= end]


async def _delete(connection: Connection, dead_letter_queue: str, entries: Sequence[int]) -> int:
    # The server's default overwrites the message on disk, at milliseconds each.
    subject = f"{connection.api_prefix}.STREAM.MSG.DELETE.{dead_letter_queue}"
    answers = await connection.request_many([(subject, b'{"seq":%d,"no_erase":true}' % entry) for entry in entries])
    unconfirmed = [
        entry
        for entry, answer in zip(entries, answers, strict=True)
        if isinstance(answer, TransientError) or b'"success":true' not in answer
    ]

    async def is_stored(sequence: int) -> bool:
        return await get_message(connection, dead_letter_queue, sequence) is not None

    return sum(await map_concurrently(is_stored, unconfirmed))


async def _acknowledge(connection: Connection, dead_letter_queue: str, queue: str, entries: Sequence[int]) -> int:
    async def subject_of(sequence: int) -> str | None:
        message = await get_message(connection, dead_letter_queue, sequence)
        return message.subject if message else None

    # The server never answers an acknowledgement of an entry that is already gone.
    subjects = {
        entry: subject
        for entry, subject in zip(entries, await map_concurrently(subject_of, entries), strict=True)
        if subject is not None
    }
    if not subjects:
        return 0
    left = 0
    for consumer, filters in (await _consumers(connection, dead_letter_queue, queue, set(subjects.values()))).items():
        matching = sorted(entry for entry, subject in subjects.items() if covered_by_any(filters, subject))
        if not matching:
            continue
        left += await _acknowledge_through(connection, dead_letter_queue, consumer, matching)
        for entry in matching:
            del subjects[entry]
    return left + len(subjects)


async def _acknowledge_through(
    connection: Connection, dead_letter_queue: str, consumer: str, entries: Sequence[int]
) -> int:
    async def acknowledge(sequence: int) -> None:
        with suppress(TransientError):
            await connection.request(late_ack_subject(dead_letter_queue, consumer, sequence), b"+ACK")

    async def is_stored(sequence: int) -> bool:
        return await get_message(connection, dead_letter_queue, sequence) is not None

    waiting = list(entries)
    deadline = time.monotonic() + connection.timeout
    async with _pulling(connection, dead_letter_queue, consumer) as pull:
        while waiting and time.monotonic() < deadline:
            delivered = (await consumer_info(connection, dead_letter_queue, consumer))["delivered"]["stream_seq"]
            if due := bisect_right(waiting, delivered):
                await map_concurrently(acknowledge, waiting[:due])
                del waiting[:due]
                deadline = time.monotonic() + connection.timeout
            if waiting:
                # No further than the last entry: each delivery of another entry counts towards its max_deliver.
                await pull(min(waiting[-1] - delivered, _PULL_BATCH))
                await sleep(_PULL_PAUSE)
    return sum(await map_concurrently(is_stored, entries))


async def _consumers(
    connection: Connection, dead_letter_queue: str, queue: str, subjects: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the dead letter queue's consumers with their filters; create one for entries that match none."""
    consumers = {
        name: filter_subjects(info["config"])
        for name, info in (await list_consumers(connection, dead_letter_queue)).items()
    }
    all_filters = [filter_ for filters in consumers.values() for filter_ in filters]
    if all(covered_by_any(all_filters, subject) for subject in subjects):
        return consumers
    own = own_consumer(queue)
    others = [filter_ for name, filters in consumers.items() if name != own for filter_ in filters]
    captured = (await stream_info(connection, dead_letter_queue))["config"].get("subjects") or []
    consumers[own] = tuple(
        subject
        for subject in dead_letter_subjects(queue)
        if any(overlaps(subject, other) for other in captured) and not any(overlaps(subject, other) for other in others)
    )
    if not consumers[own]:
        return consumers
    await _create_own_consumer(connection, dead_letter_queue, queue, consumers[own])
    return consumers


async def _create_own_consumer(
    connection: Connection,
    stream: str,
    queue: str,
    filters: Sequence[str],
    inactive_threshold: int = _OWN_CONSUMER_THRESHOLD,
) -> str:
    """Create the consumer through which messages of some subjects are acknowledged, and return its name."""
    own = own_consumer(queue)
    config = {
        "durable_name": own,
        "name": own,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "filter_subjects": filters,
        "max_ack_pending": -1,
        # As long as it exists, the server refuses other consumers of these messages.
        "inactive_threshold": inactive_threshold,
    }
    await connection.api(f"CONSUMER.CREATE.{stream}.{own}", {"stream_name": stream, "config": config})
    return own


@asynccontextmanager
async def _pulling(
    connection: Connection, dead_letter_queue: str, consumer: str
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Make the server deliver entries, since only a delivered entry can be acknowledged.

    The deliveries themselves are dropped: the entries are known from reading the stream, and those that aren't
    acknowledged are delivered again after the consumer's ack wait.
    """
    priority = priority_fields((await consumer_info(connection, dead_letter_queue, consumer))["config"])
    async with connection.discard_inbox() as inbox:

        async def pull(count: int) -> None:
            request = pull_request(count, no_wait=True, priority=priority)
            await connection.publish(
                pull_subject(dead_letter_queue, consumer, connection.api_prefix), request, reply=inbox
            )

        yield pull
