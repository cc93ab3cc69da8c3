"""Adds to letters the task that published the job, where the job's headers hold only the task's key."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, task_key_of
from airflow_provider_jetstream.jetstream.origin import is_task_key
from airflow_provider_jetstream.jetstream.publishing.origins import resolve_origins

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
        """Return letters with their origins; those that have one already, and other jobs, stay as they are."""
        keys = [
            (task_key_of(result.headers) or "") if isinstance(result, DeadLetter) and result.origin is None else ""
            for result in results
        ]
        origins = await self.resolve(key for key in keys if key)
        return [
            replace(result, origin=origins[key]) if isinstance(result, DeadLetter) and key in origins else result
            for result, key in zip(results, keys, strict=True)
        ]
