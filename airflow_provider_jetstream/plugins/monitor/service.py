"""Answers the page's requests about servers from data that all viewers share, in a thread of its own.

Every method returns JSON of the model that it names, since an encoded answer can be shared as it is.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.consumer_control import LONGEST_PAUSE
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.inspection.health import inspect_queue
from airflow_provider_jetstream.jetstream.inspection.samples import SAMPLE_SECONDS
from airflow_provider_jetstream.plugins.monitor.background import Answers, EventLoopThread, SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.history import HOUR, read_deaths
from airflow_provider_jetstream.plugins.monitor.jobs import job_detail, job_page, task_jobs
from airflow_provider_jetstream.plugins.monitor.letter_service import LetterAnswer, LetterService
from airflow_provider_jetstream.plugins.monitor.models.queues import History, QueueDetail, Snapshot
from airflow_provider_jetstream.plugins.monitor.queue_actions import QueueActions
from airflow_provider_jetstream.plugins.monitor.queue_view import consumer_numbers
from airflow_provider_jetstream.plugins.monitor.server_poller import Pollers, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from pydantic import BaseModel

    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.jobs import TaskQuery
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.models.letters import JobState
    from airflow_provider_jetstream.plugins.monitor.models.queues import Deaths
    from airflow_provider_jetstream.plugins.monitor.scanner import Owners


_DEATHS_SECONDS = 30.0


class MonitorService:
    """What the page shows and does, in a thread of its own.

    :ivar letters: dead letters, and jobs that were some
    :ivar actions: what people do
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._thread = EventLoopThread("jetstream-monitor")
        self._pollers = Pollers(settings)
        self._answers = Answers(self._thread, settings.refresh)
        self._dead: SingleFlightCache[tuple[list[Deaths], datetime | None]] = SingleFlightCache(64, _DEATHS_SECONDS)
        self.letters = LetterService(settings, self._pollers, self._answers)
        self.actions = QueueActions(self._pollers, self._answers, self.letters)

    def stop(self) -> None:
        """Stop polling."""
        self._thread.stop()
        self._pollers.clear()
        self._answers.clear()

    async def newest_dags(self, connections: tuple[str, ...]) -> frozenset[str]:
        """Return the DAGs of the newest dead letters of some connections, as far as their queues were scanned."""

        async def read() -> frozenset[str]:
            return frozenset().union(*(self._pollers.of(connection).newest_dags() for connection in connections))

        return await self._answers.run(read())

    async def snapshot(self, connections: tuple[str, ...], owners: Owners) -> bytes:
        """Return the :class:`Snapshot` of all queues of some connections.

        :param owners: of the DAGs of the newest dead letters, the ones that the user may see, with their teams
        :raises NotFoundError: a connection isn't shown
        """

        async def make() -> Snapshot:
            pollers = await self._pollers.refreshed(connections)
            return Snapshot(
                connections=[poller.connection_state(owners=owners) for poller in pollers],
                refresh_seconds=self._settings.refresh,
            )

        return await self._answers.now(("snapshot", connections, *sorted(owners)), make)

    async def queue(self, connection: str, queue: str) -> bytes:
        """Return the :class:`QueueDetail` of a queue.

        :raises NotFoundError: there is no such queue
        :raises UnreachableError: the server hasn't answered yet
        """

        async def make() -> QueueDetail:
            poller = await self._pollers.of_queue(connection, queue)
            overview, history = poller.overviews[queue], poller.histories[queue]
            scan, points = poller.scanner.scan_of(queue), poller.points(queue, HOUR)
            declared = await self._pollers.known_declaration(connection, queue)
            letters, reading = overview.dead_letter_queue, poller.reading()
            return QueueDetail(
                numbers=poller.numbers(queue),
                state=poller.state,
                problem=poller.problem,
                age_seconds=poller.age(),
                subjects=list(overview.config.get("subjects") or []),
                retention=overview.config["retention"],
                description=overview.config.get("description"),
                dead_letter_queue=letters["config"]["name"] if letters else None,
                events=declared.events.name if declared and declared.events else None,
                archive=declared.archive.name if declared and declared.archive else None,
                audit=declared.audit.name if declared and declared.audit else None,
                consumers=consumer_numbers(overview, history, reading),
                history=points,
                deaths=(await self._deaths(connection, queue, HOUR))[0],
                max_pause_seconds=LONGEST_PAUSE if poller.has_pauses else 0.0,
                risks=list(scan.risks),
            )

        return await self._answers.now(("queue", connection, queue), make)

    async def history(self, connection: str, queue: str, hours: int) -> bytes:
        """Return the :class:`History` of a queue.

        :raises NotFoundError: there is no such queue
        """

        async def make() -> History:
            poller = await self._pollers.of_queue(connection, queue)
            until, time = poller.now(queue), timedelta(hours=hours)
            if time <= HOUR or not poller.shared.is_stored:
                points = poller.points(queue, time)
            else:
                async with poller.connection() as opened:
                    points = await poller.shared.read_points(opened, queue, until - time, until)
            deaths, known_since = await self._deaths(connection, queue, time)
            return History(
                since=until - time,
                until=until,
                points=points,
                deaths=deaths,
                deaths_known_since=known_since,
                stored="stream" if poller.shared.is_stored else "memory",
                sampler=poller.shared.holder,
                problem=poller.shared.problem,
            )

        return await self._answers.page(("history", connection, queue, hours), make)

    async def _deaths(self, connection: str, queue: str, time: timedelta) -> tuple[list[Deaths], datetime | None]:
        poller = self._pollers.of(connection)
        overview = poller.overviews[queue]
        if overview.dead_letter_queue is None:
            # A queue without a dead letter queue knows of no deaths.
            return [], poller.now(queue)
        scan = poller.scanner.request_scan(overview)

        async def read() -> tuple[list[Deaths], datetime | None]:
            until = poller.now(queue)
            try:
                return await read_deaths(scan.table, scan.scan, until - time, until)
            except JetStreamProviderError:
                return [], until

        return await self._dead.get((connection, queue, time, scan.ended_at), read)

    async def job_page(
        self,
        connection: str,
        queue: str,
        state: JobState,
        consumer: str | None,
        after: int,
        limit: int,
        may_see: Callable[[str | None], bool],
        hiding: Hiding,
    ) -> bytes:
        """Return a :class:`JobPage` of a queue's jobs.

        :param consumer: only the jobs of this one
        :param may_see: whether the user may see the jobs of a DAG, and for ``None`` those of one that isn't known
        :raises NotFoundError: there is no such queue or consumer
        """

        async def read() -> bytes:
            poller = await self._pollers.of_queue(connection, queue)
            async with poller.connection() as opened:
                health = await inspect_queue(opened, queue)
                page = await job_page(opened, health, state, consumer, after, limit, may_see, hidden=hiding.all)
            return page.model_dump_json().encode()

        return await self._answers.run(read())

    async def job(self, connection: str, queue: str, sequence: int, hiding: Hiding) -> LetterAnswer:
        """Return the :class:`JobDetail` of a stored job, and the DAG that published it.

        :raises NotFoundError: it isn't stored
        """

        async def read() -> LetterAnswer:
            poller = await self._pollers.of_queue(connection, queue)
            async with poller.connection() as opened:
                health = await inspect_queue(opened, queue)
                detail, dags = await job_detail(
                    opened, health, sequence, self._settings.payload_bytes, hidden=hiding.all
                )
            return LetterAnswer(dags[0] if dags else None, detail.model_dump_json().encode(), of_unknown=dags == [None])

        return await self._answers.run(read())

    async def sample(self, seconds: float = SAMPLE_SECONDS) -> None:
        """Sample all queues of all servers, as long as no other API worker does, until this is cancelled.

        :param seconds: from one sample to the next
        """

        async def run() -> None:
            samplers = [Sampler(self._pollers.of(connection), seconds) for connection in self._settings.connections]
            await asyncio.gather(*(sampler.run() for sampler in samplers))

        await self._answers.run(run())

    async def jobs(self, query: TaskQuery, connections: tuple[str, ...]) -> bytes:
        """Return the :class:`TaskJobs` of a DAG run, or of one of its tasks, in the queues of some connections."""

        async def make() -> BaseModel:
            return await task_jobs(query, await self._pollers.refreshed(connections))

        return await self._answers.page(("jobs", query, connections), make)
