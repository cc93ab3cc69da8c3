"""Jobs that are no dead letters: of a queue, and of a DAG run.

Protocol: which jobs are in flight, no request of the server tells. A job above the highest sequence that its consumer
delivered is pending; one between the consumer's ack floor and that was delivered and hasn't been acknowledged, or waits
for its next delivery; with ``max_deliver`` used up it is dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.attempts import AttemptReader, find_attempts_stream
from airflow_provider_jetstream.jetstream.client.concurrency import in_thread, map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.contract import manifest_filter, manifest_subject
from airflow_provider_jetstream.jetstream.dead_letters.letter import origin_of, task_key_of
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, NotFoundError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.job import job_id_of, redrives_of
from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord, parse_manifest_record
from airflow_provider_jetstream.plugins.monitor.letter_view import attempt_view, origin_view, payload_of
from airflow_provider_jetstream.plugins.monitor.models.actions import TaskJobs, TaskQueue
from airflow_provider_jetstream.plugins.monitor.models.figure import figure
from airflow_provider_jetstream.plugins.monitor.models.letters import JobDetail, JobLine, JobPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.inspection.health import ConsumerHealth, QueueHealth
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
    from airflow_provider_jetstream.plugins.monitor.models.letters import JobState
    from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller


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
    *,
    hidden: bool,
) -> JobPage:
    """Return a page of jobs.

    :param consumer: only the jobs of this one
    :param after: only higher sequences
    :param may_see: whether the user may see the jobs of a DAG, and for ``None`` those of one that isn't known
    :param hidden: whether texts that may quote bodies are left out
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
        line = _job_line(health, message)
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
    if state == "delivered":
        jobs = await _with_attempts(connection, health, jobs, hidden=hidden)
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
    reader = await _attempt_reader(connection, health)
    attempts = await reader.all_of(sequence, message.stored_at) if reader else []
    detail = JobDetail(
        job=_job_line(health, message),
        hidden=hidden,
        payload=None if hidden else payload_of(message.data, max_bytes),
        headers=[] if hidden else headers,
        attempts=[attempt_view(attempt, hidden=hidden) for attempt in attempts],
    )
    return detail, _dags_of(message)


async def _with_attempts(
    connection: Connection, health: QueueHealth, jobs: list[JobLine], *, hidden: bool
) -> list[JobLine]:
    if not jobs or not (reader := await _attempt_reader(connection, health)):
        return jobs

    async def complete(line: JobLine) -> JobLine:
        last = await reader.last_of(line.sequence, line.stored_at)
        return line.model_copy(update={"attempt": attempt_view(last, hidden=hidden)}) if last else line

    return list(await map_concurrently(complete, jobs))


async def _attempt_reader(connection: Connection, health: QueueHealth) -> AttemptReader | None:
    stream = await find_attempts_stream(connection, health.queue)
    waits = {name: [consumer.ack_wait] for name, consumer in health.consumers.items()}
    return AttemptReader(connection, stream, health.queue, waits) if stream else None


def _dags_of(message: StoredMessage) -> list[str | None]:
    """Return the DAG that published a job; ``None`` for one that isn't known, nothing where no task published it."""
    if origin := origin_of(message.headers):
        return [origin.dag_id]
    return [] if task_key_of(message.headers) is None else [None]


def _job_line(health: QueueHealth, message: StoredMessage) -> JobLine:
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


_Task: TypeAlias = "tuple[str | None, int | None]"

# A subject that begins with another character can't cover manifests.
_LOG_SUBJECTS_BEGIN = frozenset(manifest_filter("")[0] + "*>")
# Each record, and each stored job that is counted, is a request.
_MAX_RECORDS = 2_000
_MAX_COUNTED_JOBS = 500


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """A query for jobs by their origin.

    :param task_id: ``None`` for all tasks of the run
    :param map_index: the mapped instance; ``None`` for all of them
    :param instances: task ids and map indexes of the matching instances, as Airflow knows them
    """

    dag_id: str
    run_id: str
    task_id: str | None
    map_index: int | None
    instances: tuple[tuple[str, int], ...]

    def matches(self, task_id: str | None, map_index: int | None) -> bool:
        """Return whether a task instance matches."""
        return self.task_id in (None, task_id) and self.map_index in (None, map_index)


@dataclass(frozen=True, slots=True)
class _Published:
    record: ManifestRecord
    published: int | None
    stored: int | None


async def task_jobs(query: TaskQuery, pollers: Sequence[ServerPoller]) -> TaskJobs:
    """Return a line for each queue and task instance with a manifest or a dead letter."""
    lines: list[TaskQueue] = []
    scanning: list[str] = []
    for poller in pollers:
        published = await _read_publish_logs(query, poller) if poller.state == "up" else {}
        for name, overview in poller.overviews.items():
            has_letters = overview.dead_letter_queue is not None
            scan = poller.scanner.request_scan(overview) if has_letters else poller.scanner.scan_of(name)
            if has_letters and scan.counts is None and scan.error is None:
                scanning.append(f"{poller.conn_id}/{name}")
            letters = await scan.table.count_by_task(query.dag_id, query.run_id) if scan.table else {}
            tasks = published.get(name, {})
            lines += [
                _task_line(
                    poller.conn_id,
                    name,
                    task,
                    tasks.get(task),
                    _of_scan(poller, name, letters.get(task, (0, 0))),
                    query,
                )
                for task in sorted({*tasks, *letters}, key=str)
                if query.matches(*task)
            ]
    return TaskJobs(
        dag_id=query.dag_id,
        run_id=query.run_id,
        task_id=query.task_id,
        map_index=query.map_index,
        queues=lines,
        connections=[poller.connection_state(with_queues=False) for poller in pollers],
        scanning=scanning,
    )


def _of_scan(poller: ServerPoller, queue: str, counts: tuple[int, int]) -> tuple[Figure, Figure]:
    circulating, parked = counts
    return poller.of_letters(queue, circulating), poller.of_letters(queue, parked)


async def _read_publish_logs(query: TaskQuery, poller: ServerPoller) -> dict[str, dict[_Task, _Published]]:
    try:
        async with poller.connection() as connection:
            streams = await _publish_log_streams(connection, poller.overviews)
            requests = [(queue, instance) for queue in streams for instance in query.instances][:_MAX_RECORDS]

            async def read(request: tuple[str, tuple[str, int]]) -> _Published | None:
                queue, (task_id, map_index) = request
                task = Origin(query.dag_id, query.run_id, task_id, map_index)
                return await _read_published(connection, streams[queue], poller.overviews[queue], task)

            published: dict[str, dict[_Task, _Published]] = {}
            for (queue, instance), record in zip(requests, await map_concurrently(read, requests), strict=True):
                if record is not None:
                    published.setdefault(queue, {})[instance] = record
            return published
    except JetStreamProviderError:
        # The answer shows the state of the connection too.
        return {}


async def _publish_log_streams(connection: Connection, queues: Iterable[str]) -> dict[str, str]:
    """Return the stream that stores the manifests of each queue that has them."""
    filters = {name: manifest_filter(name) for name in queues}
    streams: dict[str, str] = {}
    for info in await list_streams(connection):
        subjects = [subject for subject in info["config"].get("subjects") or [] if subject[0] in _LOG_SUBJECTS_BEGIN]
        if subjects:
            streams |= {name: info["config"]["name"] for name, log in filters.items() if covered_by_any(subjects, log)}
    return streams


async def _read_published(
    connection: Connection, stream: str, overview: QueueOverview, task: Origin
) -> _Published | None:
    message = await last_message(connection, stream, manifest_subject(overview.name, task.key))
    if message is None or overview.health is None:
        return None
    record = parse_manifest_record(message.data)
    if record is None or record.created != overview.health.created:
        return None
    if record.origin and record.origin.key != task.key:
        return None
    if record.runs is None:
        return _Published(record, record.published, None)
    first = overview.state["first_seq"]
    spans = [(max(low, first), low + count) for _, low, count in record.runs]
    published = sum(count for *_, count in record.runs)
    sequences = [
        sequence for low, end in spans if low < end for sequence in range(low, min(end, low + _MAX_COUNTED_JOBS + 1))
    ]
    if len(sequences) > _MAX_COUNTED_JOBS:
        return _Published(record, published, None)

    async def is_stored(sequence: int) -> bool:
        return await get_message(connection, overview.name, sequence) is not None

    return _Published(record, published, sum(await map_concurrently(is_stored, sequences)))


def _task_line(
    connection: str,
    queue: str,
    task: _Task,
    jobs: _Published | None,
    letters: tuple[Figure, Figure],
    query: TaskQuery,
) -> TaskQueue:
    task_id, map_index = task
    published, stored = (jobs.published, jobs.stored) if jobs else (None, None)
    ended = None if published is None or stored is None else published - stored
    select = {"dag_id": query.dag_id, "run_id": query.run_id, "task_id": task_id}
    return TaskQueue(
        connection=connection,
        queue=queue,
        task_id=task_id,
        map_index=map_index,
        published_at=jobs.record.began_at if jobs else None,
        published=figure(published, 0.0),
        ended=figure(ended, 0.0),
        stored=figure(stored, 0.0),
        closed=jobs.record.closed if jobs else None,
        letters=letters[0],
        parked=letters[1],
        select={name: value for name, value in select.items() if value is not None},
    )
