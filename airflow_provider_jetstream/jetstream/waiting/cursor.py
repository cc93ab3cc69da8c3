"""Where the ends of jobs will be stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Cursor:
    """The stream positions from which the ends of jobs that aren't published yet can be read.

    :param created: when the queue's stream was created; earlier ends are about another stream of the same name
    :param events: the events stream
    :param events_from: the first sequence to read there
    :param dead_letters: the dead letter queue, if there is one
    :param dead_letters_from: the first sequence to read there
    :param advisory_subjects: where workers of any make report jobs, as the queue declares it
    """

    queue: str
    created: str
    events: str
    events_from: int
    dead_letters: str | None
    dead_letters_from: int
    advisory_subjects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # It comes back from JSON as a list.
        object.__setattr__(self, "advisory_subjects", tuple(self.advisory_subjects))

    def from_start(self) -> Cursor:
        """Return a cursor that reads everything stored, for jobs that may have ended before this one was taken."""
        return replace(self, events_from=1, dead_letters_from=1)


async def take_cursor(connection: Connection, queue: WorkQueue, info: Mapping[str, Any] | None = None) -> Cursor:
    """Record the current stream positions; do this before publishing.

    :param info: the queue's STREAM.INFO, where it has been read already
    :raises QueueDeclarationError: the queue declares no events, so no completion is stored
    :raises NotFoundError: one of its streams doesn't exist
    """
    if queue.events is None:
        raise QueueDeclarationError(
            queue.name, ["expected events, so that completions are stored and can be waited for: declare them"]
        )
    info = info or await stream_info(connection, queue.name)
    dead_letters = queue.dead_letters.name if queue.dead_letters else None
    return Cursor(
        queue=queue.name,
        created=info["created"],
        events=queue.events.name,
        events_from=await _next_sequence(connection, queue.events.name),
        dead_letters=dead_letters,
        dead_letters_from=await _next_sequence(connection, dead_letters) if dead_letters else 1,
        advisory_subjects=queue.advisory_subjects,
    )


async def _next_sequence(connection: Connection, stream: str) -> int:
    return int((await stream_info(connection, stream))["state"]["last_seq"]) + 1
