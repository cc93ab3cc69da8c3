"""What every judgement of a scan goes by: found once for the whole queue, and then plain values.

A scan that is split over processes finds its premises in one of them, and sends them to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TERMINATED
from airflow_provider_jetstream.jetstream.dead_letters.ack_metrics import AckMetrics
from airflow_provider_jetstream.jetstream.dead_letters.classifier import Classifier
from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryKind
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.archive import ArchiveReader
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue


@dataclass(frozen=True, slots=True)
class ScanContext:
    """What is known about the queue and the streams around it.

    :param queue: the work queue
    :param around: how its stream and consumers are
    :param letters: the dead letter queue, as the server describes it
    :param events: the stream of completions, if it exists
    :param vanished: whether a job that vanished counts as a dead letter
    """

    queue: WorkQueue
    snapshot: QueueSnapshot
    letters: Mapping[str, Any]
    events: str | None
    vanished: bool

    @classmethod
    async def load(
        cls, connection: Connection, queue: WorkQueue, around: QueueSnapshot, letters: str, *, vanished: bool
    ) -> ScanContext:
        """Look at the streams around a queue.

        :param connection: the server
        :param queue: the work queue
        :param around: how its stream and consumers are
        :param letters: the dead letter queue
        :param vanished: whether a job that vanished counts as a dead letter
        :return: what is known
        :raises NotFoundError: the dead letter queue doesn't exist
        """
        events = queue.events.name if queue.events and await _exists(connection, queue.events.name) else None
        return cls(queue, around, await stream_info(connection, letters), events, vanished)

    async def classifier(
        self,
        connection: Connection,
        index: EntryIndex,
        *,
        archive: ArchiveReader | None,
        audit: AuditLog | None,
        inconsistent_consumers: Collection[str],
        read_metrics: bool = False,
    ) -> Classifier:
        """Make the judge of some jobs.

        :param connection: the server
        :param index: what the dead letter queue says about them
        :param archive: the archive, if it exists
        :param audit: the audit, if it exists
        :param doubted: consumers that hold more jobs than the advisories leave room for
        :param ahead: whether to read the ack metrics now: without an event loop nobody can wait for who reads them
        :return: the judge
        """
        metrics = await self._metrics(connection, archive, index)
        if read_metrics:
            await metrics.acknowledged()
        config, terminations = self.letters["config"], f"{TERMINATED}.{self.snapshot.queue}.*"
        return Classifier(
            connection,
            self.snapshot,
            config["name"],
            metrics=metrics,
            captures_terminations=covered_by_any(config.get("subjects") or [], terminations),
            events=self.events,
            archive=archive,
            audit=audit,
            inconsistent_consumers=inconsistent_consumers,
            vanished=self.vanished,
        )

    async def _metrics(self, connection: Connection, archive: ArchiveReader | None, index: EntryIndex) -> AckMetrics:
        asked = {
            sequence
            for sequence, mentions in (index.jobs() if self.vanished or index.contains_kind(EntryKind.DELETION) else ())
            if self.vanished or all(each.kind == EntryKind.DELETION for each in mentions)
        }
        first = await archive.find(min(asked)) if archive and asked else None
        since = first.stored_at if first and first.time else self.snapshot.created_at
        return AckMetrics(connection, self.events, self.snapshot.queue, asked, since)


async def _exists(connection: Connection, stream: str) -> bool:
    try:
        await stream_info(connection, stream)
    except NotFoundError:
        return False
    return True
