"""What became of the jobs of a DAG run, or of one of its tasks, as far as anything is written down about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import publish_log_filter, publish_log_subject
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.publish_log import PublishRecord
from airflow_provider_jetstream.plugins.monitor.models import TaskJobs, TaskQueue
from airflow_provider_jetstream.tasks.identity import instance_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.inspection.overview import QueueOverview
    from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller

_Place: TypeAlias = "tuple[str | None, int | None]"

_RECEIPTS_BEGIN = frozenset(publish_log_filter("")[0] + "*>")
# Each is a request.
_MOST_RECEIPTS = 2_000
_MOST_JOBS = 500


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """Whose jobs are asked about.

    :param dag_id: the DAG
    :param run_id: the run
    :param task_id: the task; ``None`` for all of the run's
    :param map_index: the mapped instance; ``None`` for all of them
    :param instances: task ids and map indexes of the instances that are meant, as Airflow knows them
    """

    dag_id: str
    run_id: str
    task_id: str | None
    map_index: int | None
    instances: tuple[tuple[str, int], ...]

    def means(self, task_id: str | None, map_index: int | None) -> bool:
        """Tell whether an instance is meant.

        :param task_id: its task
        :param map_index: its index
        :return: whether it is
        """
        return self.task_id in (None, task_id) and self.map_index in (None, map_index)


@dataclass(frozen=True, slots=True)
class _Told:
    receipt: PublishRecord
    published: int | None
    stored: int | None


async def jobs_of(question: TaskQuestion, watches: Sequence[ServerPoller]) -> TaskJobs:
    """Tell what is known.

    :param question: whose jobs
    :param watches: the servers
    :return: a line for each queue and task instance that anything is known of
    """
    lines: list[TaskQueue] = []
    scanning: list[str] = []
    for watch in watches:
        found = await _receipts(question, watch) if watch.state == "up" else {}
        for name, look in watch.looks.items():
            scan = watch.scanner.ask(look) if look.dead_letter_queue else watch.scanner.known(name)
            if look.dead_letter_queue and scan.counts is None and scan.error is None:
                scanning.append(f"{watch.conn_id}/{name}")
            letters = scan.index.of_origin(question.dag_id, question.run_id) if scan.index else {}
            receipts = found.get(name, {})
            lines += [
                _line(watch.conn_id, name, place, receipts.get(place), letters.get(place, (0, 0)), question)
                for place in sorted({*receipts, *letters}, key=str)
                if question.means(*place)
            ]
    return TaskJobs(
        dag_id=question.dag_id,
        run_id=question.run_id,
        task_id=question.task_id,
        map_index=question.map_index,
        queues=lines,
        connections=[watch.told(queues=False) for watch in watches],
        scanning=scanning,
    )


async def _receipts(question: TaskQuestion, watch: ServerPoller) -> dict[str, dict[_Place, _Told]]:
    try:
        async with watch.shared() as connection:
            streams = await _receiving(connection, watch.looks)
            asked = [(queue, place) for queue in streams for place in question.instances][:_MOST_RECEIPTS]

            async def read(item: tuple[str, tuple[str, int]]) -> tuple[str, _Place, _Told] | None:
                queue, (task_id, map_index) = item
                origin = Origin(question.dag_id, question.run_id, task_id, map_index)
                told = await _told(connection, streams[queue], watch.looks[queue], instance_key(origin))
                return (queue, (task_id, map_index), told) if told else None

            found: dict[str, dict[_Place, _Told]] = {}
            for each in await map_concurrently(read, asked):
                if each is not None:
                    found.setdefault(each[0], {})[each[1]] = each[2]
            return found
    except JetStreamProviderError:
        # The state of the connection is told of beside.
        return {}


async def _receiving(connection: Connection, queues: Iterable[str]) -> dict[str, str]:
    """Name the stream that keeps the receipts of each queue that has one."""
    wanted = {name: publish_log_filter(name) for name in queues}
    found: dict[str, str] = {}
    for info in await list_streams(connection):
        subjects = [each for each in info["config"].get("subjects") or [] if each[0] in _RECEIPTS_BEGIN]
        if subjects:
            found |= {name: info["config"]["name"] for name, each in wanted.items() if covered_by_any(subjects, each)}
    return found


async def _told(connection: Connection, stream: str, look: QueueOverview, key: str) -> _Told | None:
    message = await last_message(connection, stream, publish_log_subject(look.name, key))
    if message is None or look.health is None:
        return None
    try:
        receipt = PublishRecord.model_validate_json(message.data)
    except ValidationError:
        return None
    if receipt.created != look.health.created:
        return None
    if receipt.runs is None:
        return _Told(receipt, receipt.published, None)
    first = look.state["first_seq"]
    counts = [(max(low, first), low + count) for _, low, count in receipt.runs]
    published = sum(count for *_, count in receipt.runs)
    asked = [sequence for low, end in counts if low < end for sequence in range(low, min(end, low + _MOST_JOBS + 1))]
    if len(asked) > _MOST_JOBS:
        return _Told(receipt, published, None)

    async def stored(sequence: int) -> bool:
        return await get_message(connection, look.name, sequence) is not None

    return _Told(receipt, published, sum(await map_concurrently(stored, asked)))


def _line(
    connection: str,
    queue: str,
    place: _Place,
    told: _Told | None,
    letters: tuple[int, int],
    question: TaskQuestion,
) -> TaskQueue:
    task_id, map_index = place
    ended = None if told is None or told.published is None or told.stored is None else told.published - told.stored
    select = {"dag_id": question.dag_id, "run_id": question.run_id, "task_id": task_id}
    return TaskQueue(
        connection=connection,
        queue=queue,
        task_id=task_id,
        map_index=map_index,
        published_at=told.receipt.began_at if told else None,
        published=told.published if told else None,
        ended=ended,
        stored=told.stored if told else None,
        closed=told.receipt.closed if told else None,
        letters=letters[0],
        parked=letters[1],
        select={name: value for name, value in select.items() if value is not None},
    )
