"""Stores the records of tasks, one for each task.

The server would remove a record after the ``max_age`` of the events stream, while the task's jobs, dead letters and
their copies may stay for longer. So records are stored with ``Nats-TTL: never``; ``manifest_removal`` removes them.
Others than tasks may be allowed to publish there, so a record counts only where its names give the key.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import last_with_position
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import manifest_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.origin import is_task_key
from airflow_provider_jetstream.jetstream.publishing.manifest_head import (
    ManifestHead,
    new_head,
    parse_manifest_head,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.origin import Origin

log = logging.getLogger(__name__)

# The API level that knows Nats-TTL: an older server stores it as a header like any other.
TTL_LEVEL: Final = 1
_NO_TTL: Final = 10166
# A server answers with the second one while the cluster still replicates another record on the subject.
CONFLICTS: Final = frozenset({10071, 10164})
_ATTEMPTS = 5
# Multiplied by the number of failed attempts but one: a cluster may still replicate the other record.
_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A record as it is stored.

    :param sequence: its sequence in the events stream
    """

    record: ManifestHead
    sequence: int


class ManifestStore:
    """The records of a queue's tasks.

    :param queue: the work queue's name
    :param events: the name of the events stream, which stores the records
    """

    def __init__(self, connection: Connection, queue: str, events: str) -> None:
        self._connection = connection
        self._queue = queue
        self._events = events
        self._never_expires = connection.api_level >= TTL_LEVEL

    async def read(self, key: str) -> StoredHead | None:
        """Read the record of a task.

        :param key: the task's key, one token
        """
        record, sequence = await self._last(key)
        return StoredHead(record, sequence) if record else None

    async def _last(self, key: str) -> tuple[ManifestHead | None, int]:
        """Return a task's record, if its subject has one, and the sequence of the subject's last message."""
        try:
            message, position = await last_with_position(
                self._connection, self._events, manifest_subject(self._queue, key)
            )
        except NotFoundError:
            return None, 0
        record = parse_manifest_head(message.data) if message else None
        return record if record and record.is_about(self._queue, key) else None, position

    async def store(self, key: str, record: ManifestHead, *, after: int) -> StoredHead:
        """Store a record if nobody has stored another one meanwhile.

        :param after: the sequence of the last message on the record's subject; 0 where there is none
        :raises ApiError: somebody has, or the server refused
        """
        # Some other stream may capture the subject of a queue whose events stream is older than these records.
        headers = [("Nats-Expected-Stream", self._events), ("Nats-Expected-Last-Subject-Sequence", str(after))]
        body = record.model_dump_json(by_alias=True, exclude_none=True).encode()
        subject = manifest_subject(self._queue, key)
        # No job names the record of an idempotency key, of one of several calls or of a further run; after the stream's
        # max_age its jobs may be published again. Without names, nothing would ever remove it.
        if self._never_expires and (origin := record.manifest_origin) and origin.is_key_of_manifest:
            try:
                kept = Headers([*headers, ("Nats-TTL", "never")])
                return StoredHead(record, (await store(self._connection, subject, body, kept)).sequence)
            except ApiError as error:
                if error.err_code != _NO_TTL:
                    raise
                self._never_expires = False
                log.warning(
                    "%s doesn't allow messages a time to live of their own, so after its max_age the tasks that"
                    " published jobs of %s aren't known any more: provision the queue again, with nats-server 2.12 or"
                    " later where the stream exists",
                    *(self._events, self._queue),
                )
        return StoredHead(record, (await store(self._connection, subject, body, Headers(headers))).sequence)

    async def update(
        self,
        key: str,
        change: Callable[[ManifestHead | None], ManifestHead | None],
        known: StoredHead | None = None,
    ) -> StoredHead | None:
        """Replace a record by a changed one; again if somebody has replaced it meanwhile.

        :param change: returns the new record; ``None`` for no change
        :param known: the record as it was last seen
        :return: the record as it is stored now
        """
        for attempt in range(_ATTEMPTS):
            stored, after = (known.record, known.sequence) if known and not attempt else await self._last(key)
            if (record := change(stored)) is None:
                return StoredHead(stored, after) if stored else None
            try:
                return await self.store(key, record, after=after)
            except ApiError as error:
                if error.err_code not in CONFLICTS or attempt == _ATTEMPTS - 1:
                    raise
            await sleep(_PAUSE * attempt)
        return None

    async def remove_older(self, key: str, sequence: int) -> None:
        """Remove what a task's record has replaced.

        :param sequence: of the record: the subject's last message may be somebody else's
        """
        request = {"filter": manifest_subject(self._queue, key), "seq": sequence}
        # Where the server refuses, the task is known all the same.
        with suppress(ApiError):
            await self._connection.api(f"STREAM.PURGE.{self._events}", request)


async def renew_manifests(
    connection: Connection,
    queue: str,
    events: str,
    created: str,
    copies: Mapping[str, tuple[int, Origin | None]],
) -> None:
    """Store the records of tasks again, behind the redriven copies of their jobs.

    :param created: when the queue's stream was created, in the server's own text
    :param copies: by the tasks' keys, the highest sequence of a copy, and the task where it is known otherwise
    """
    records = ManifestStore(connection, queue, events)

    async def renew(key: str) -> None:
        sequence, origin = copies[key]
        named = origin if origin and origin.key == key else None

        def extended(record: ManifestHead | None) -> ManifestHead | None:
            if record:
                return record.covering([sequence])
            if named is None:
                return None
            info = {"created": created, "state": {"last_seq": sequence - 1}}
            return new_head(queue, info, named).covering([sequence]).model_copy(update={"closed": True})

        try:
            if stored := await records.update(key, extended):
                await records.remove_older(key, stored.sequence)
        except (ApiError, TransientError) as error:
            log.warning("The task that published redriven jobs of %s may not be known for long: %s", queue, error)

    # Publishers write what they like into the header.
    await map_concurrently(renew, filter(is_task_key, copies))
