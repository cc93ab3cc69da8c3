"""Learning that jobs ended, and how: from stored events first, then from new ones.

Nothing here depends on having listened at the right moment. A mark taken before publishing says from where to read; who
joins late, or again after a restart, reads the same events.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import (
    AnyAdvisory,
    Cancelled,
    Completion,
    MaxDeliveries,
    Terminated,
    parse_advisory,
)
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError, TransientError
from airflow_provider_jetstream.jetstream.names import completion_filter, completion_subject, death_filter
from airflow_provider_jetstream.jetstream.publishing import ranges
from airflow_provider_jetstream.jetstream.stored import StoredMessage, follow, last_message, stream_info

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import WorkQueue

log = logging.getLogger(__name__)

_RETRY_PAUSE = 1.0

DELETED_IN_FLIGHT = "Unacknowledged message was deleted"


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the ends of jobs that aren't published yet will be found.

    :param queue: the work queue
    :param created: when its stream was created; ends from before are about another stream of the same name
    :param events: the stream of completions
    :param events_from: the first sequence to read there
    :param dead_letters: the dead letter queue, if there is one
    :param dead_letters_from: the first sequence to read there
    """

    queue: str
    created: str
    events: str
    events_from: int
    dead_letters: str | None
    dead_letters_from: int

    def from_the_beginning(self) -> Mark:
        """Give the mark for jobs that may have ended before it was taken.

        :return: a mark that reads everything stored
        """
        return Mark(self.queue, self.created, self.events, 1, self.dead_letters, 1)


@dataclass(slots=True)
class WaitReport:
    """How far the awaited jobs are.

    :param awaited: stream sequences not ended yet
    :param completed: stream sequences that ended well
    :param dead: stream sequences that became dead letters, with what the server said
    :param cancelled: stream sequences of jobs that workers found cancelled, with the reason that was given
    """

    awaited: set[int]
    completed: set[int] = field(default_factory=set)
    dead: dict[int, str] = field(default_factory=dict)
    cancelled: dict[int, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Give the report in a form that fits an event or an XCom.

        :return: counts, and sequences as ranges
        """
        return {
            "awaited": len(self.awaited),
            "completed": len(self.completed),
            "dead": len(self.dead),
            "completed_sequences": ranges(self.completed),
            "dead_sequences": ranges(self.dead),
            "dead_reasons": dict(sorted(self.dead.items())[:20]),
            "cancelled": len(self.cancelled),
            "cancelled_sequences": ranges(self.cancelled),
            "cancelled_reasons": dict(sorted(self.cancelled.items())[:20]),
        }


async def take_mark(connection: Connection, queue: WorkQueue) -> Mark:
    """Remember where to read from; take it before publishing.

    :param connection: the server
    :param queue: the queue that will be published to
    :return: the mark
    :raises QueueDeclarationError: the queue declares no events, so that nobody can learn of completions
    :raises NotFoundError: one of its streams doesn't exist
    """
    if queue.events is None:
        raise QueueDeclarationError(
            queue.name, ["expected events, so that completions are stored and can be waited for: declare them"]
        )
    created = (await stream_info(connection, queue.name))["created"]
    letters = queue.dead_letters.name if queue.dead_letters else None
    return Mark(
        queue=queue.name,
        created=created,
        events=queue.events.name,
        events_from=await _end(connection, queue.events.name),
        dead_letters=letters,
        dead_letters_from=await _end(connection, letters) if letters else 1,
    )


async def wait_for_jobs(
    connection: Connection,
    mark: Mark,
    sequences: Iterable[int],
    *,
    max_dead: int | None = 0,
    max_cancelled: int | None = 0,
    progress: Callable[[WaitReport], None] = lambda _: None,
) -> WaitReport:
    """Wait until every job ended, or too many died or were cancelled.

    :param connection: the server
    :param mark: taken before the jobs were published
    :param sequences: the jobs' stream sequences
    :param max_dead: dead letters to put up with before giving up; ``None`` for any number
    :param max_cancelled: cancelled jobs to put up with before giving up; ``None`` for any number
    :param progress: called after each end
    :return: the report; without ``awaited`` unless too many died or were cancelled
    :raises NotFoundError: a stream that is read doesn't exist
    """
    report = WaitReport(set(sequences))
    sources = [follow(connection, mark.events, completion_filter(mark.queue), mark.events_from)]
    if mark.dead_letters:
        sources.append(follow(connection, mark.dead_letters, death_filter(mark.queue), mark.dead_letters_from))
    async with aclosing(_merged(sources, lambda: _over(report, max_dead, max_cancelled))) as messages:
        async for message in messages:
            if await _record(connection, report, mark, message):
                progress(report)
    return report


def _over(report: WaitReport, max_dead: int | None, max_cancelled: int | None) -> bool:
    dead = max_dead is not None and len(report.dead) > max_dead
    return not report.awaited or dead or (max_cancelled is not None and len(report.cancelled) > max_cancelled)


async def _record(connection: Connection, report: WaitReport, mark: Mark, message: StoredMessage) -> bool:
    event = parse_advisory(message.data)
    if event is None or event.stream != mark.queue or message.stored_at < datetime.fromisoformat(mark.created):
        return False
    sequence = event.stream_seq
    ended = isinstance(event, Completion | Cancelled)
    if not ended and sequence in report.awaited and await _completed(connection, mark, event):
        # Its end is stored, and the other source will bring it: who joins late must not give up over this.
        return False
    match event:
        case Completion() if sequence in report.awaited or sequence in report.dead:
            # A worker slower than its ack wait may finish a job that was already given up: it is done all the same.
            report.dead.pop(sequence, None)
            report.completed.add(sequence)
        case Cancelled() if sequence in report.awaited or sequence in report.dead:
            report.dead.pop(sequence, None)
            reason = event.why or "no reason given"
            report.cancelled[sequence] = f"{event.by}: {reason}" if event.by else reason
        case MaxDeliveries() if sequence in report.awaited:
            report.dead[sequence] = f"{event.deliveries} deliveries to {event.consumer}"
        case Terminated() if sequence in report.awaited and event.reason != DELETED_IN_FLIGHT:
            report.dead[sequence] = f"terminated by {event.consumer}: {event.reason or 'no reason given'}"
        case _:
            return False
    report.awaited.discard(sequence)
    return True


async def _completed(connection: Connection, mark: Mark, event: AnyAdvisory) -> bool:
    subject = completion_subject(mark.queue, event.consumer, event.stream_seq)
    while True:
        try:
            last = await last_message(connection, mark.events, subject)
        except TransientError as error:
            if connection.client.is_closed:
                raise
            log.warning("Reading %s failed, trying again: %s", mark.events, error)
            await asyncio.sleep(_RETRY_PAUSE)
        else:
            return last is not None and last.stored_at >= datetime.fromisoformat(mark.created)


async def _merged(
    sources: list[AsyncGenerator[StoredMessage, None]], over: Callable[[], bool]
) -> AsyncGenerator[StoredMessage, None]:
    messages: asyncio.Queue[StoredMessage] = asyncio.Queue(maxsize=256)

    async def pump(source: AsyncGenerator[StoredMessage, None]) -> None:
        async with aclosing(source):
            async for message in source:
                await messages.put(message)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        while not over():
            getter = asyncio.create_task(messages.get())
            done, _ = await asyncio.wait([getter, *pumps], return_when=asyncio.FIRST_COMPLETED)
            if getter in done:
                yield getter.result()
                continue
            getter.cancel()
            for task in done:
                task.result()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _end(connection: Connection, stream: str) -> int:
    return int((await stream_info(connection, stream))["state"]["last_seq"]) + 1
