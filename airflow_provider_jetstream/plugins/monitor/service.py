"""Answers the page's requests about servers from data that all viewers share, in a thread of its own.

Every method returns JSON of the model that it names, since an encoded answer can be shared as it is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    DeadlineError,
    JetStreamProviderError,
    NotFoundError,
    QueueDeclarationError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.plugins.monitor.background import EventLoopThread, SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.dry_run import dry_run
from airflow_provider_jetstream.plugins.monitor.letter_index import LetterIndex, is_of
from airflow_provider_jetstream.plugins.monitor.letter_view import (
    dag_of,
    is_of_unknown_task,
    letter_detail,
    letter_line,
    read_records,
)
from airflow_provider_jetstream.plugins.monitor.models.letters import Groups, LetterPage
from airflow_provider_jetstream.plugins.monitor.models.queues import QueueDetail, Snapshot
from airflow_provider_jetstream.plugins.monitor.queue_view import consumer_numbers, queue_numbers
from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller
from airflow_provider_jetstream.plugins.monitor.task_jobs import task_jobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    from pydantic import BaseModel

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.models.actions import Act
    from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan
    from airflow_provider_jetstream.plugins.monitor.task_jobs import TaskQuery

_MAX_ANSWERS = 256
_MAX_PAGES = 32
_DECLARATION_SECONDS = 30.0
# Small queues are scanned by then; of a large one, the page shows the progress of the scan.
_FIRST_SCAN_SECONDS = 0.4
# Proxies give up at 30 or 60 seconds; a repeated request joins the count, which goes on.
_COUNT_SECONDS = 25.0
_CONNECTION_LOST = "expected the server to answer, found the connection lost since the scan; try again in a few seconds"


@dataclass(frozen=True, slots=True)
class LetterAnswer:
    """The details of a dead letter, for those who may see its DAG.

    :param dag_id: the DAG that published its job, if that is known
    :param detail: a :class:`LetterDetail` as JSON
    """

    dag_id: str | None
    detail: bytes


class MonitorService:
    """The pollers of all servers that are shown, and the answers made from their data."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._thread = EventLoopThread("jetstream-monitor")
        self._pollers: dict[str, ServerPoller] = {}
        # Nothing new is known before the next poll.
        self._answers: SingleFlightCache[bytes] = SingleFlightCache(_MAX_ANSWERS, min(0.5, settings.refresh / 2))
        self._pages: SingleFlightCache[bytes] = SingleFlightCache(_MAX_PAGES, settings.refresh)
        self._letters: SingleFlightCache[LetterAnswer] = SingleFlightCache(_MAX_PAGES, settings.refresh)
        self._declarations: SingleFlightCache[WorkQueue] = SingleFlightCache(_MAX_ANSWERS, _DECLARATION_SECONDS)

    def stop(self) -> None:
        """Stop polling."""
        self._thread.stop()
        self._pollers.clear()
        self._answers.clear()
        self._pages.clear()
        self._letters.clear()

    async def snapshot(self, connections: tuple[str, ...]) -> bytes:
        """Return the :class:`Snapshot` of all queues of some connections.

        :raises NotFoundError: a connection isn't shown
        """

        async def make() -> Snapshot:
            pollers = await self._refreshed(connections)
            return Snapshot(
                connections=[poller.connection_state() for poller in pollers], refresh_seconds=self._settings.refresh
            )

        return await self._cached(self._answers, ("snapshot", connections), make)

    async def queue(self, connection: str, queue: str) -> bytes:
        """Return the :class:`QueueDetail` of a queue.

        :raises NotFoundError: there is no such queue
        :raises UnreachableError: the server hasn't answered yet
        """

        async def make() -> QueueDetail:
            poller = await self._poller_of(connection, queue)
            overview, history = poller.overviews[queue], poller.histories[queue]
            scan = poller.scanner.scan_of(queue)
            declared = await self._declaration(poller, queue)
            letters = overview.dead_letter_queue
            return QueueDetail(
                numbers=queue_numbers(connection, overview, history, scan.counts),
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
                consumers=consumer_numbers(overview, history.rates),
                history=history.points(),
                risks=list(scan.risks),
            )

        return await self._cached(self._answers, ("queue", connection, queue), make)

    async def dags(self, connection: str, queue: str) -> frozenset[str]:
        """Return the DAGs that published jobs of a queue's dead letters."""

        async def find() -> frozenset[str]:
            scan = await self._requested_scan(connection, queue)
            return scan.index.dags() if scan.index else frozenset()

        return await self._thread.run(find())

    async def groups(
        self,
        connection: str,
        queue: str,
        selection: Selection,
        group_by: Sequence[GroupField],
        *,
        dags: frozenset[str] | None,
    ) -> bytes:
        """Return the :class:`Groups` of a queue's dead letters.

        :param dags: without the letters of all other DAGs; ``None`` for every letter
        """

        async def make() -> Groups:
            scan = await self._requested_scan(connection, queue)
            index = scan.index or LetterIndex()
            groups, left_out = index.groups(selection, group_by, dags)
            total = index.count(selection, dags)
            return Groups(
                scan=scan.state(),
                group_by=list(group_by),
                total=total,
                uncertain=scan.counts.uncertain if scan.counts else 0,
                groups=groups,
                groups_left_out=left_out,
                not_shown=index.count(selection) - total,
            )

        return await self._cached(self._answers, ("groups", connection, queue, selection, tuple(group_by), dags), make)

    async def letters(
        self,
        connection: str,
        queue: str,
        selection: Selection,
        after: int,
        limit: int,
        *,
        hidden: bool,
        hidden_of_unknown: bool = False,
        dags: frozenset[str] | None,
    ) -> bytes:
        """Return a :class:`LetterPage` of dead letters, each proved again.

        :param after: only higher sequences
        :param hidden: whether texts that may quote bodies are left out
        :param hidden_of_unknown: the same for jobs of tasks that aren't known, whose DAG may be anybody's
        :param dags: without the letters of all other DAGs; ``None`` for every letter
        """

        async def make() -> LetterPage:
            scan = await self._requested_scan(connection, queue)
            sequences, more = scan.index.page(selection, after, limit, dags) if scan.index else ([], False)
            if sequences and scan.scan is None:
                raise UnreachableError(_CONNECTION_LOST)
            classified = await scan.scan.classify(sequences) if scan.scan and sequences else []
            letters = [
                letter
                for letter in classified
                if isinstance(letter, DeadLetter) and selection.matches(letter) and is_of(dag_of(letter), dags)
            ]
            return LetterPage(
                scan=scan.state(),
                matching=scan.index.count(selection, dags) if scan.index else 0,
                letters=[
                    letter_line(letter, hidden=hidden or (hidden_of_unknown and is_of_unknown_task(letter)))
                    for letter in letters
                ],
                next_after=sequences[-1] if more else None,
                gone=len(sequences) - len(letters),
            )

        key = ("letters", connection, queue, selection, after, limit, hidden, hidden_of_unknown, dags)
        return await self._cached(self._pages, key, make)

    async def letter(
        self, connection: str, queue: str, sequence: int, *, hidden: bool, hidden_of_unknown: bool = False
    ) -> LetterAnswer:
        """Return the :class:`LetterDetail` of a dead letter, and the DAG that published its job.

        :param hidden: whether its body, its headers and texts that may quote them are left out
        :param hidden_of_unknown: the same for a job of a task that isn't known
        :raises DeadLetterGoneError: it is no dead letter (any more)
        """

        async def make() -> LetterAnswer:
            scan = await self._requested_scan(connection, queue)
            if scan.scan is None:
                raise UnreachableError(
                    _CONNECTION_LOST if scan.counts else "the first scan of the queue is still running; try again"
                )
            (letter,) = await scan.scan.classify([sequence])
            if not isinstance(letter, DeadLetter):
                raise DeadLetterGoneError(
                    f"expected job {sequence} of {queue} to be a dead letter, found otherwise: {letter.status.meaning}"
                )
            records = await read_records(letter, scan.scan.audit)
            max_bytes = self._settings.payload_bytes
            left_out = hidden or (hidden_of_unknown and is_of_unknown_task(letter))
            detail = letter_detail(letter, records, scan.scan.dead_letter_queue, max_bytes, hidden=left_out)
            return LetterAnswer(dag_of(letter), detail.model_dump_json().encode())

        return await self._thread.run(self._letters.get((connection, queue, sequence, hidden, hidden_of_unknown), make))

    async def dry_run(self, connection: str, queue: str, selection: Selection, action: Act) -> bytes:
        """Return the :class:`DryRun` of an action.

        :raises DeadlineError: counting takes more than 25 seconds; it goes on, and the same request joins it
        :raises RedriveRequestError: the action isn't possible for this queue and selection
        """
        key = ("dry-run", connection, queue, selection, action)

        async def count() -> bytes:
            poller = self._poller(connection)
            return (await dry_run(poller, queue, selection, action)).model_dump_json().encode()

        async def wait() -> bytes:
            try:
                async with asyncio.timeout(_COUNT_SECONDS):
                    return await self._pages.get(key, count)
            except TimeoutError:
                raise DeadlineError("the letters are still being counted; try again in a few seconds") from None

        return await self._thread.run(wait())

    async def jobs(self, query: TaskQuery, connections: tuple[str, ...]) -> bytes:
        """Return the :class:`TaskJobs` of a DAG run, or of one of its tasks, in the queues of some connections."""

        async def make() -> BaseModel:
            return await task_jobs(query, await self._refreshed(connections))

        return await self._cached(self._pages, ("jobs", query, connections), make)

    async def _cached(
        self, cache: SingleFlightCache[bytes], key: Hashable, make: Callable[[], Awaitable[BaseModel]]
    ) -> bytes:
        async def encode() -> bytes:
            return (await make()).model_dump_json().encode()

        return await self._thread.run(cache.get(key, encode))

    async def _refreshed(self, connections: Sequence[str]) -> list[ServerPoller]:
        pollers = [self._poller(connection) for connection in connections]
        await asyncio.gather(*(poller.refresh() for poller in pollers))
        return pollers

    def _poller(self, connection: str) -> ServerPoller:
        if connection not in self._settings.connections:
            raise NotFoundError(
                f"expected a connection among {', '.join(self._settings.connections)}, found {connection!r}: name it in"
                " [jetstream] monitor_connections to have it shown"
            )
        if connection not in self._pollers:
            self._pollers[connection] = ServerPoller(connection, self._settings.refresh)
        return self._pollers[connection]

    async def _poller_of(self, connection: str, queue: str) -> ServerPoller:
        (poller,) = await self._refreshed([connection])
        if queue in poller.overviews:
            return poller
        if poller.problem:
            raise UnreachableError(poller.problem.message)
        if poller.state == "starting":
            raise UnreachableError(f"the first poll of {connection} is still running; try again")
        raise NotFoundError(
            f"expected a work queue {queue!r} on the server of {connection}, found none: api/snapshot lists the queues"
        )

    async def _requested_scan(self, connection: str, queue: str) -> QueueScan:
        poller = await self._poller_of(connection, queue)
        scan = poller.scanner.request_scan(poller.overviews[queue])
        await poller.scanner.wait_for_result(scan, _FIRST_SCAN_SECONDS)
        if isinstance(scan.error, QueueDeclarationError):
            raise scan.error.with_traceback(None)
        return scan

    async def _declaration(self, poller: ServerPoller, queue: str) -> WorkQueue | None:
        async def discover() -> WorkQueue:
            async with poller.connection() as connection:
                return await discover_queue(connection, queue)

        try:
            return await self._declarations.get((poller.conn_id, queue), discover)
        except JetStreamProviderError:
            # The page shows the queue's numbers all the same.
            return None
