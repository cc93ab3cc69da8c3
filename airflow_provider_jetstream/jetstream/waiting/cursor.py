"""Where the ends of jobs will be found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Cursor:
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

    def from_start(self) -> Cursor:
        """Give the mark for jobs that may have ended before it was taken.

        :return: a mark that reads everything stored
        """
        return replace(self, events_from=1, dead_letters_from=1)


async def take_cursor(connection: Connection, queue: WorkQueue) -> Cursor:
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
    return Cursor(
        queue=queue.name,
        created=created,
        events=queue.events.name,
        events_from=await _end(connection, queue.events.name),
        dead_letters=letters,
        dead_letters_from=await _end(connection, letters) if letters else 1,
    )


async def _end(connection: Connection, stream: str) -> int:
    return int((await stream_info(connection, stream))["state"]["last_seq"]) + 1
