"""Finds the tasks that published jobs, by the keys that the jobs' headers hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.origin import is_task_key
from airflow_provider_jetstream.jetstream.publishing.manifest_head import parse_manifest_head

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin


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
        record = parse_manifest_head(message.data) if message else None
        origin = record.origin if record else None
        return origin if origin and origin.key == key else None

    origins = zip(requested, await map_concurrently(resolve, requested), strict=True)
    return {key: origin for key, origin in origins if origin}
