"""What every judgement of a scan goes by: found once for the whole queue, and then plain values.

A scan that is split over processes finds its premises in one of them, and sends them to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.mentions import Kind
from airflow_provider_jetstream.jetstream.dead_letters.metrics import AckMetrics
from airflow_provider_jetstream.jetstream.dead_letters.proof import Judge
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.names import TERMINATED
from airflow_provider_jetstream.jetstream.stored import stream_info
from airflow_provider_jetstream.jetstream.subjects import covered_by_any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.archive import Archive
    from airflow_provider_jetstream.jetstream.audit import Audit
    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.circumstances import Circumstances
    from airflow_provider_jetstream.jetstream.dead_letters.entries import Index
    from airflow_provider_jetstream.jetstream.queue import WorkQueue


@dataclass(frozen=True, slots=True)
class Premises:
    """What is known about the queue and the streams around it.

    :param queue: the work queue
    :param around: how its stream and consumers are
    :param letters: the dead letter queue, as the server describes it
    :param events: the stream of completions, if it exists
    :param vanished: whether a job that vanished counts as a dead letter
    """

    queue: WorkQueue
    around: Circumstances
    letters: Mapping[str, Any]
    events: str | None
    vanished: bool

    @classmethod
    async def find(
        cls, connection: Connection, queue: WorkQueue, around: Circumstances, letters: str, *, vanished: bool
    ) -> Premises:
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

    async def judge(
        self,
        connection: Connection,
        index: Index,
        *,
        archive: Archive | None,
        audit: Audit | None,
        doubted: Collection[str],
        ahead: bool = False,
    ) -> Judge:
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
        if ahead:
            await metrics.acknowledged()
        config, terminations = self.letters["config"], f"{TERMINATED}.{self.around.queue}.*"
        return Judge(
            connection,
            self.around,
            config["name"],
            metrics=metrics,
            hears_terminations=covered_by_any(config.get("subjects") or [], terminations),
            events=self.events,
            archive=archive,
            audit=audit,
            doubted=doubted,
            vanished=self.vanished,
        )

    async def _metrics(self, connection: Connection, archive: Archive | None, index: Index) -> AckMetrics:
        asked = {
            sequence
            for sequence, mentions in (index.jobs() if self.vanished or index.tells(Kind.DELETION) else ())
            if self.vanished or all(each.kind == Kind.DELETION for each in mentions)
        }
        first = await archive.find(min(asked)) if archive and asked else None
        since = first.stored_at if first and first.time else self.around.created_at
        return AckMetrics(connection, self.events, self.around.queue, asked, since)


async def _exists(connection: Connection, stream: str) -> bool:
    try:
        await stream_info(connection, stream)
    except NotFoundError:
        return False
    return True
