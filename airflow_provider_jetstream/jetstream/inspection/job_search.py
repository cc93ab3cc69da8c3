"""Finds stored jobs of a queue by their id, subject, headers or text; it reads the queue and takes no job away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import read_bulk
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, covers
from airflow_provider_jetstream.jetstream.client.wire_text import encode_text
from airflow_provider_jetstream.jetstream.inspection.health import inspect_consumers
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from typing import Literal

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.inspection.health import QueueHealth

_MESSAGES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class JobSearch:
    """The stored jobs that match every field which is set.

    :param job_id: the job's id
    :param subject: a subject or filter
    :param text: in the body, as UTF-8
    :param headers: values of headers; an empty one for any value
    """

    job_id: str | None = None
    subject: str | None = None
    text: str | None = None
    headers: Mapping[str, str] | None = None

    def matches(self, message: StoredMessage) -> bool:
        """Return whether a stored job is meant."""
        return (
            (self.subject is None or covers(self.subject, message.subject))
            and (self.text is None or encode_text(self.text) in message.data)
            and all(self._has_header(message, name, value) for name, value in (self.headers or {}).items())
            and self.job_id in (None, job_id_of(message.headers, message.data, message.sequence))
        )

    @staticmethod
    def _has_header(message: StoredMessage, name: str, value: str) -> bool:
        return any(key == name and value in ("", found) for key, found in message.headers)


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A stored job.

    :param consumer: the consumer that takes its subject, if one does
    :param state: ``pending`` where no consumer has delivered it yet; ``delivered`` where a worker has it, it waits to
        be delivered again, or it is dead; ``undeliverable`` where no consumer takes its subject
    """

    message: StoredMessage
    job_id: str
    consumer: str | None
    state: Literal["pending", "delivered", "undeliverable"]


async def search_jobs(
    connection: Connection, queue: str, search: JobSearch, on_progress: Callable[[int, int], None] | None = None
) -> AsyncGenerator[FoundJob, None]:
    """Read a queue's stored jobs in order, and yield the jobs that match.

    :param queue: the work queue's name
    :param on_progress: called now and then with the number of messages that were read and that are stored
    :raises NotFoundError: the queue doesn't exist
    """
    info = await stream_info(connection, queue)
    health = await inspect_consumers(connection, info)
    count = 0
    async for message in read_bulk(connection, info, 1):
        count += 1
        if count % _MESSAGES_AT_ONCE == 0:
            if on_progress:
                on_progress(count, health.stored)
            await sleep(0)
        if search.matches(message):
            yield _found(message, health)


def _found(message: StoredMessage, health: QueueHealth) -> FoundJob:
    job_id = job_id_of(message.headers, message.data, message.sequence)
    for consumer in health.consumers.values():
        if covered_by_any(consumer.filters, message.subject):
            is_delivered = message.sequence <= consumer.delivered
            return FoundJob(message, job_id, consumer.name, "delivered" if is_delivered else "pending")
    return FoundJob(message, job_id, None, "undeliverable")
