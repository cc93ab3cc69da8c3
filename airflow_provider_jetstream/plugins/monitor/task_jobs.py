"""The jobs of a DAG run or of one of its tasks, from manifests and from scans of dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.client.streams import get_message, last_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import manifest_filter, manifest_subject
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.manifest_record import ManifestRecord, parse_manifest_record
from airflow_provider_jetstream.plugins.monitor.models.actions import TaskJobs, TaskQueue
from airflow_provider_jetstream.plugins.monitor.models.figure import figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
    from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller

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
                _line(
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


def _line(
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
