"""Adds to letters the task that published the job, where the job's headers hold only the task's key."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, task_key_of
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.origin import is_task_key
from airflow_provider_jetstream.jetstream.publishing.manifest_record import parse_manifest_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.origin import Origin

# Any publisher can write as many keys as it likes.
_MAX_KEYS = 100_000


class LetterOrigins:
    """The tasks that published a queue's jobs; each key is looked up once.

    :param queue: the work queue
    :param events: the stream of the tasks' records, if it exists
    """

    def __init__(self, connection: Connection, queue: str, events: str | None) -> None:
        self._connection = connection
        self._queue = queue
        self._events = events
        self._known: dict[str, Origin] = {}
        self._requested: set[str] = set()

    async def resolve(self, keys: Iterable[str]) -> Mapping[str, Origin]:
        """Return the tasks of keys; a key whose task isn't known is left out."""
        # What isn't a key could be as long as a message, and isn't to be remembered.
        requested = set(filter(is_task_key, keys))
        origins = {key: self._known[key] for key in requested & self._known.keys()}
        if missing := requested - self._requested:
            origins |= await resolve_origins(self._connection, self._queue, self._events, missing)
            if len(self._requested) > _MAX_KEYS:
                self._known, self._requested = {}, set()
            self._known |= origins
            self._requested |= requested
        return origins

    async def add_to(self, results: Sequence[DeadLetter | NotDead]) -> list[DeadLetter | NotDead]:
        """Return letters with their origins. Letters with an origin, and jobs that are no letters, stay as they are."""
        keys = [
            (task_key_of(result.headers) or "") if isinstance(result, DeadLetter) and result.origin is None else ""
            for result in results
        ]
        origins = await self.resolve(key for key in keys if key)
        return [
            replace(result, origin=origins[key]) if isinstance(result, DeadLetter) and key in origins else result
            for result, key in zip(results, keys, strict=True)
        ]


async def resolve_origins(
    connection: Connection, queue_name: str, events_stream: str | None, keys: Iterable[str]
) -> dict[str, Origin]:
    """Return the task of each key whose record is stored, by one request for each different key.

    A key is the digest of the task's four names, so a record that somebody else stored under it can't name another
    task.

    :param events_stream: the stream that stores the records of the queue, if there is one
    :param keys: values of the header ``Airflow-Task``, whatever their publishers wrote
    :raises ApiError: the server refused
    :raises TransientError: the server can't be reached
    """
    if events_stream is None:
        return {}
    # What isn't a key could be a wildcard, or no token at all.
    requested = sorted({key for key in keys if is_task_key(key)})

    async def resolve(key: str) -> Origin | None:
        try:
            message = await last_message(connection, events_stream, manifest_subject(queue_name, key))
        except NotFoundError:
            return None
        record = parse_manifest_record(message.data) if message else None
        origin = record.origin if record else None
        return origin if origin and origin.key == key else None

    origins = zip(requested, await map_concurrently(resolve, requested), strict=True)
    return {key: origin for key, origin in origins if origin}
