"""Looks at jobs that are no dead letters: pending ones, and those that were delivered and are still stored.

Protocol: which jobs are in flight, no request of the server tells. A job above the highest sequence that its consumer
delivered is pending; one between the consumer's ack floor and that was delivered and hasn't been acknowledged, or waits
for its next delivery; with ``max_deliver`` used up it is dead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.concurrency import in_thread
from airflow_provider_jetstream.jetstream.client.streams import get_message, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.letter import origin_of, task_key_of
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of, redrives_of
from airflow_provider_jetstream.plugins.monitor.letter_view import origin_view
from airflow_provider_jetstream.plugins.monitor.models.stored_jobs import JobDetail, JobLine, JobPage
from airflow_provider_jetstream.plugins.monitor.payload import payload_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.plugins.monitor.models.stored_jobs import JobState

# Messages that are read for one page: dead letters and other consumers' jobs lie in between.
_MOST_READ = 2_000


async def job_page(
    connection: Connection,
    health: QueueHealth,
    state: JobState,
    consumer: str | None,
    after: int,
    limit: int,
    may_see: Callable[[str | None], bool],
) -> JobPage:
    """Return a page of jobs.

    :param consumer: only the jobs of this one
    :param after: only higher sequences
    :param may_see: whether the user may see the jobs of a DAG, and for ``None`` those of one that isn't known
    :raises NotFoundError: there is no such consumer
    """
    if consumer is not None and consumer not in health.consumers:
        raise NotFoundError(f"expected a consumer of {health.queue}, found {consumer!r}: the queue's page lists them")
    chosen = [health.consumers[consumer]] if consumer else list(health.consumers.values())
    filters = [filter_ for found in chosen for filter_ in found.filters] if state != "unserved" else [">"]
    floors = {"pending": [found.delivered for found in chosen], "delivered": [found.ack_floor for found in chosen]}
    start = max(after, min(floors.get(state, []), default=0)) + 1
    stop = max((found.delivered for found in chosen), default=0) if state == "delivered" else health.last_sequence
    subject = filters[0] if len(filters) == 1 else ">"
    jobs: list[JobLine] = []
    seen: dict[str | None, bool] = {}
    not_shown = read = 0
    next_after: int | None = None
    while start <= stop:
        message = await next_message(connection, health.queue, start, subject)
        if message is None or message.sequence > stop:
            break
        start, read = message.sequence + 1, read + 1
        line = _line(health, message)
        if line.state == state and (consumer is None or line.consumer == consumer):
            dags = _dags_of(message)
            for dag_id in dags:
                if dag_id not in seen:
                    # Airflow may ask its database.
                    seen[dag_id] = await in_thread(partial(may_see, dag_id))
            if not all(seen[dag_id] for dag_id in dags):
                not_shown += 1
            else:
                jobs.append(line)
        if len(jobs) >= limit or read >= _MOST_READ:
            next_after = message.sequence
            break
    total = sum(found.pending if state == "pending" else found.in_flight for found in chosen)
    return JobPage(
        state=state,
        total=total if state != "unserved" else len(jobs),
        jobs=jobs,
        next_after=next_after,
        not_shown=not_shown,
    )


async def job_detail(
    connection: Connection, health: QueueHealth, sequence: int, max_bytes: int, *, hidden: bool
) -> tuple[JobDetail, list[str | None]]:
    """Return the details of a stored job, and the DAG that published it: ``None`` for one that isn't known.

    :raises NotFoundError: it isn't stored
    """
    message = await get_message(connection, health.queue, sequence)
    if message is None:
        raise NotFoundError(f"expected job {sequence} in {health.queue}, found none stored: it has ended, or never was")
    headers = [(readable_text(name), readable_text(value)) for name, value in message.headers]
    detail = JobDetail(
        job=_line(health, message),
        hidden=hidden,
        payload=None if hidden else payload_of(message.data, max_bytes),
        headers=[] if hidden else headers,
    )
    return detail, _dags_of(message)


def _dags_of(message: StoredMessage) -> list[str | None]:
    """Return the DAG that published a job; ``None`` for one that isn't known, nothing where no task published it."""
    if origin := origin_of(message.headers):
        return [origin.dag_id]
    return [] if task_key_of(message.headers) is None else [None]


def _line(health: QueueHealth, message: StoredMessage) -> JobLine:
    consumer = _consumer_of(health, message.subject)
    state: JobState = "unserved"
    if consumer is not None:
        state = "pending" if message.sequence > consumer.delivered else "delivered"
    origin = origin_of(message.headers)
    return JobLine(
        sequence=message.sequence,
        job_id=readable_text(job_id_of(message.headers, message.data, message.sequence)),
        subject=readable_text(message.subject),
        consumer=consumer.name if consumer else None,
        state=state,
        stored_at=message.stored_at,
        size=len(message.data),
        redrives=redrives_of(message.headers),
        origin=origin_view(origin),
    )


def _consumer_of(health: QueueHealth, subject: str) -> ConsumerHealth | None:
    return next((found for found in health.consumers.values() if covered_by_any(found.filters, subject)), None)
