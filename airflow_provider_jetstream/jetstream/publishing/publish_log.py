"""What a task has published, stored beside the ends of its jobs, so that a later try publishes nothing twice.

The server forgets the ids of jobs after the stream's ``duplicate_window``, which Airflow's default ``retry_delay``
exceeds. A receipt is written before a task publishes and again when it has; it is closed once the task has nothing more
to do, so that a task that is cleared afterwards publishes anew, and one that is tried again doesn't.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import last_message, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import publish_log_filter, publish_log_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.publishing.recovery import PublishedBefore, find_published
from airflow_provider_jetstream.jetstream.publishing.report import index_runs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Many publishers at once scatter a task's jobs; what it published is then looked for instead.
_MOST_RUNS = 5_000
# Ids are forgotten a little early rather than late.
_MARGIN = timedelta(seconds=2)


class PublishRecord(BaseModel):
    """What one task has published.

    :param stream: the work queue
    :param created: when it was created, in the server's own text
    :param round: how often all of the task's jobs have ended before
    :param began_at: when the task began to publish in this round
    :param queue_from: the queue's first sequence that its jobs may have
    :param archive_from: the archive's first sequence that their copies may have
    :param mark: where the ends of its jobs are found, as a dict
    :param runs: its jobs as index, sequence and count of each run; ``None`` where that isn't known
    :param published: how many they are, where that is known; kept when it is closed
    :param closed: whether the task has nothing more to do
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.published"] = "io.airflow.jetstream.v1.published"
    stream: str
    created: str
    round: int = 0
    began_at: datetime
    queue_from: int
    archive_from: int = 1
    mark: dict[str, Any] = Field(default_factory=dict)
    runs: list[tuple[int, int, int]] | None = None
    published: int | None = None
    closed: bool = False


class PublishLog:
    """The receipt of one task; make it with :meth:`open`.

    :param connection: the server
    :param queue: the work queue
    :param key: the task's key, one token, the same for all its tries
    :param info: the work queue's stream, as the server tells of it
    """

    def __init__(self, connection: Connection, queue: WorkQueue, key: str, info: Mapping[str, Any]) -> None:
        self._connection = connection
        self._queue = queue
        self._subject = publish_log_subject(queue.name, key)
        self._info = info
        self._receipt: PublishRecord | None = None

    @classmethod
    async def open(cls, connection: Connection, queue: WorkQueue, key: str) -> PublishLog | None:
        """Look whether a queue's events take receipts.

        :param connection: the server
        :param queue: the work queue
        :param key: the task's key, one token, the same for all its tries
        :return: the receipts; ``None`` where nobody would store them
        :raises NotFoundError: the work queue doesn't exist
        """
        if queue.events is None:
            return None
        try:
            subjects = (await stream_info(connection, queue.events.name))["config"].get("subjects") or []
        except NotFoundError:
            return None
        if not covered_by_any(subjects, publish_log_filter(queue.name)):
            return None
        return cls(connection, queue, key, await stream_info(connection, queue.name))

    async def begin(self, mark: Mapping[str, Any]) -> tuple[PublishRecord, PublishedBefore]:
        """Begin to publish, or go on where a try before stopped.

        :param mark: where the ends of jobs that are published from now on will be found
        :return: the receipt, and which jobs are stored
        """
        found = await self._last()
        if found and not found.closed:
            self._receipt = found
            return found, await self._known(found)
        now = datetime.now(UTC)
        receipt = PublishRecord(
            stream=self._queue.name,
            created=self._info["created"],
            round=found.round + 1 if found else 0,
            began_at=now,
            queue_from=self._info["state"]["last_seq"] + 1,
            archive_from=await self._archive_end(),
            mark=dict(mark),
        )
        await self._write(receipt)
        return receipt, PublishedBefore()

    async def keep(self, report: PublishReport) -> None:
        """Record what is stored now.

        :param report: what became of the task's jobs
        """
        runs = index_runs(report.sequences)
        receipt = await self._current()
        if receipt:
            known = {"runs": runs if len(runs) <= _MOST_RUNS else None, "published": sum(count for *_, count in runs)}
            await self._write(receipt.model_copy(update=known))

    async def close(self) -> None:
        """Record that the task has nothing more to do."""
        receipt = await self._current()
        if receipt and not receipt.closed:
            await self._write(receipt.model_copy(update={"closed": True, "runs": None}))

    async def _current(self) -> PublishRecord | None:
        return self._receipt or await self._last()

    async def _last(self) -> PublishRecord | None:
        message = await last_message(self._connection, self._events, self._subject)
        if message is None:
            return None
        try:
            receipt = PublishRecord.model_validate_json(message.data)
        except ValidationError:
            return None
        return receipt if receipt.created == self._info["created"] else None

    async def _write(self, receipt: PublishRecord) -> None:
        await store(self._connection, self._subject, receipt.model_dump_json(exclude_none=True).encode())
        self._receipt = receipt

    async def _known(self, receipt: PublishRecord) -> PublishedBefore:
        if receipt.runs is not None:
            return PublishedBefore(runs=tuple(receipt.runs))
        window = timedelta(microseconds=self._info["config"]["duplicate_window"] / 1_000)
        if datetime.now(UTC) - receipt.began_at < window - _MARGIN:
            # The server still knows the id of every job that this task may have stored.
            return PublishedBefore()
        return await find_published(
            self._connection,
            self._queue,
            queue_from=receipt.queue_from,
            archive_from=receipt.archive_from,
            events_from=int(receipt.mark.get("events_from", 1)),
        )

    async def _archive_end(self) -> int:
        if self._queue.archive is None:
            return 1
        try:
            return int((await stream_info(self._connection, self._queue.archive.name))["state"]["last_seq"]) + 1
        except NotFoundError:
            return 1

    @property
    def _events(self) -> str:
        return self._queue.events.name if self._queue.events else ""
