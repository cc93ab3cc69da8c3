"""Removing from the work queue what has been brought back, parked, or done."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, next_message
from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields, pull_request, pull_subject
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, consumer_names, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects, late_ack_subject
from airflow_provider_jetstream.jetstream.dead_letters.scan import require_dead_letters
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    RedriveError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

RUN_AGAIN = "run it again soon"

# Looks beyond those at single jobs cost more than they save.
_LOOKS = 8


async def remove_originals(
    connection: Connection, queue: str, originals: Mapping[int, str | None]
) -> dict[int, JetStreamProviderError]:
    """Remove jobs that have been replaced or done.

    The late acknowledgement works on streams that deny deletes too; a job that no consumer has delivered can only be
    deleted. Neither's answer says that the job is gone, so the queue is looked at.

    :param connection: the server
    :param queue: the work queue
    :param originals: their stream sequences, and who delivered each; ``None`` where nobody did
    :return: for those that are still there why
    :raises NotFoundError: the queue doesn't exist any more
    :raises TransientError: the queue couldn't be looked at
    """
    asked = [_removal(queue, consumer, sequence) for sequence, consumer in originals.items()]
    answers = dict(zip(originals, await connection.request_many(asked), strict=True))
    stored = await _still_stored(connection, queue, sorted(originals)) if originals else []
    return {
        sequence: RedriveError(
            f"the original {sequence} could not be removed ({_cause(answers[sequence])}); {RUN_AGAIN}"
        )
        for sequence in stored
    }


def _removal(queue: str, consumer: str | None, sequence: int) -> tuple[str, bytes]:
    if consumer:
        return late_ack_subject(queue, consumer, sequence), b"+ACK"
    return f"$JS.API.STREAM.MSG.DELETE.{queue}", b'{"seq":%d,"no_erase":true}' % sequence


def _cause(answer: bytes | TransientError) -> object:
    if isinstance(answer, TransientError):
        return answer
    try:
        decode_answer(answer or b"{}", "removal")
    except (ApiError, TransientError, ValueError) as error:
        return error
    return "the server kept it"


async def _still_stored(connection: Connection, queue: str, sequences: list[int]) -> list[int]:
    """Look which jobs of some are stored: by those between the first and the last, while there are few."""
    wanted, at, last = set(sequences), sequences[0], sequences[-1]
    found: list[int] = []
    for _ in range(_LOOKS + len(sequences) // _LOOKS):
        message = await next_message(connection, queue, at, ">") if at <= last else None
        if message is None or message.sequence > last:
            return found
        if message.sequence in wanted:
            found.append(message.sequence)
        at = message.sequence + 1

    async def stored(sequence: int) -> bool:
        return await get_message(connection, queue, sequence) is not None

    rest = [each for each in sequences if each >= at]
    return [*found, *(each for each, there in zip(rest, await map_concurrently(stored, rest), strict=True) if there)]


log = logging.getLogger(__name__)

_PULL_BATCH = 500
_PULL_PAUSE = 0.05
_OWN_CONSUMER_STAYS = 300 * 1_000_000_000


async def remove_entries(connection: Connection, queue: WorkQueue, entries: Sequence[int]) -> int:
    """Remove entries that were acted on.

    Entries that can't be removed do no harm: their job is gone, so they are never taken for dead letters again. That is
    why nothing is raised.

    :param connection: the server
    :param queue: the work queue
    :param entries: sequences in its dead letter queue
    :return: how many had to stay, as far as is known
    """
    if not entries:
        return 0
    letters = require_dead_letters(queue).name
    try:
        config = (await stream_info(connection, letters))["config"]
        if not config.get("deny_delete"):
            return await _delete(connection, letters, entries)
        if config["retention"] == "workqueue":
            return await _acknowledge(connection, letters, queue.name, entries)
    except (ApiError, NotFoundError, TransientError) as error:
        log.warning("%d finished entries stay in %s: %s", len(entries), letters, error)
    return len(entries)


async def _delete(connection: Connection, letters: str, entries: Sequence[int]) -> int:
    # The server's default overwrites the message on disk, at milliseconds each.
    asked = [(f"$JS.API.STREAM.MSG.DELETE.{letters}", b'{"seq":%d,"no_erase":true}' % each) for each in entries]
    answers = await connection.request_many(asked)
    doubtful = [
        entry
        for entry, answer in zip(entries, answers, strict=True)
        if isinstance(answer, TransientError) or b'"success":true' not in answer
    ]

    async def stays(sequence: int) -> bool:
        return await get_message(connection, letters, sequence) is not None

    return sum(await map_concurrently(stays, doubtful))


async def _acknowledge(connection: Connection, letters: str, queue: str, entries: Sequence[int]) -> int:
    async def subject_of(sequence: int) -> str | None:
        message = await get_message(connection, letters, sequence)
        return message.subject if message else None

    # What is gone already is never answered.
    subjects = {
        entry: subject
        for entry, subject in zip(entries, await map_concurrently(subject_of, entries), strict=True)
        if subject is not None
    }
    if not subjects:
        return 0
    left = 0
    for consumer, filters in (await _consumers(connection, letters, queue, set(subjects.values()))).items():
        taken = sorted(entry for entry, subject in subjects.items() if covered_by_any(filters, subject))
        if not taken:
            continue
        left += await _acknowledge_through(connection, letters, consumer, taken)
        for entry in taken:
            del subjects[entry]
    return left + len(subjects)


async def _acknowledge_through(connection: Connection, letters: str, consumer: str, entries: Sequence[int]) -> int:
    async def acknowledge(sequence: int) -> None:
        with suppress(TransientError):
            await connection.request(late_ack_subject(letters, consumer, sequence), b"+ACK")

    async def stays(sequence: int) -> bool:
        return await get_message(connection, letters, sequence) is not None

    waiting = list(entries)
    given_up = time.monotonic() + connection.timeout
    async with _pulling(connection, letters, consumer) as pull:
        while waiting and time.monotonic() < given_up:
            delivered = (await consumer_info(connection, letters, consumer))["delivered"]["stream_seq"]
            if due := bisect_right(waiting, delivered):
                await map_concurrently(acknowledge, waiting[:due])
                del waiting[:due]
                given_up = time.monotonic() + connection.timeout
            if waiting:
                # Not beyond the last one: a delivery is one less for whoever processes the others.
                await pull(min(waiting[-1] - delivered, _PULL_BATCH))
                await sleep(_PULL_PAUSE)
    return sum(await map_concurrently(stays, entries))


async def _consumers(
    connection: Connection, letters: str, queue: str, subjects: Collection[str]
) -> dict[str, list[str]]:
    """Find who takes entries of these subjects, and add a consumer for those that nobody takes."""
    taken: dict[str, list[str]] = {}
    for name in await consumer_names(connection, letters):
        config = (await consumer_info(connection, letters, name))["config"]
        taken[name] = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    everyone = [each for filters in taken.values() for each in filters]
    if all(covered_by_any(everyone, subject) for subject in subjects):
        return taken
    own = f"redrive-{queue}"
    others = [each for name, filters in taken.items() if name != own for each in filters]
    captured = (await stream_info(connection, letters))["config"].get("subjects") or []
    taken[own] = [
        each
        for each in dead_letter_subjects(queue)
        if any(overlaps(each, other) for other in captured) and not any(overlaps(each, other) for other in others)
    ]
    if not taken[own]:
        return taken
    config = {
        "durable_name": own,
        "name": own,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "filter_subjects": taken[own],
        "max_ack_pending": -1,
        # As long as it exists, the server refuses other consumers of these entries.
        "inactive_threshold": _OWN_CONSUMER_STAYS,
    }
    await connection.api(f"CONSUMER.CREATE.{letters}.{own}", {"stream_name": letters, "config": config})
    return taken


@asynccontextmanager
async def _pulling(
    connection: Connection, letters: str, consumer: str
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Have the server deliver entries, since only a delivered one can be acknowledged.

    What arrives isn't looked at: entries are known from reading the stream, and those that stay come back after the
    consumer's ack wait.
    """
    priority = priority_fields((await consumer_info(connection, letters, consumer))["config"])
    async with connection.discard_inbox() as inbox:

        async def pull(count: int) -> None:
            request = pull_request(count, no_wait=True, priority=priority)
            await connection.publish(pull_subject(letters, consumer), request, reply=inbox)

        yield pull
