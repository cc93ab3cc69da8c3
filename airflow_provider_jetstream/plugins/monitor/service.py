"""Everything the page asks about servers, answered from what all viewers share, in a thread of its own."""

from __future__ import annotations

import asyncio
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
from airflow_provider_jetstream.plugins.monitor.dry_run import dry_run
from airflow_provider_jetstream.plugins.monitor.event_loop_thread import LoopThread
from airflow_provider_jetstream.plugins.monitor.letter_view import letter_detail, letter_line, lives_of
from airflow_provider_jetstream.plugins.monitor.models import Groups, LetterDetail, LetterPage, QueueDetail, Snapshot
from airflow_provider_jetstream.plugins.monitor.queue_view import consumer_numbers, queue_numbers
from airflow_provider_jetstream.plugins.monitor.request_cache import SingleFlightCache
from airflow_provider_jetstream.plugins.monitor.server_poller import ServerPoller
from airflow_provider_jetstream.plugins.monitor.task_jobs import jobs_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence

    from pydantic import BaseModel

    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField, Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.models import Act
    from airflow_provider_jetstream.plugins.monitor.queue_scan import QueueScan
    from airflow_provider_jetstream.plugins.monitor.task_jobs import TaskQuestion

_KEPT_ANSWERS = 256
_KEPT_PAGES = 32
_DECLARATION_SECONDS = 30.0
# Small queues are scanned by then; who asks about a large one is told how far the scan is.
_FIRST_SCAN_SECONDS = 0.4
# Proxies give up at half a minute or a minute; who asks again finds the count that went on meanwhile.
_COUNT_SECONDS = 25.0


class MonitorService:
    """The watches over all servers that are shown.

    :param settings: what is set about the page
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._thread = LoopThread("jetstream-monitor")
        self._watches: dict[str, ServerPoller] = {}
        # As long as between two looks nothing new is known.
        self._answers: SingleFlightCache[bytes] = SingleFlightCache(_KEPT_ANSWERS, min(0.5, settings.refresh / 2))
        self._pages: SingleFlightCache[bytes] = SingleFlightCache(_KEPT_PAGES, settings.refresh)
        self._declarations: SingleFlightCache[WorkQueue] = SingleFlightCache(_KEPT_ANSWERS, _DECLARATION_SECONDS)

    def stop(self) -> None:
        """End all watches."""
        self._thread.stop()
        self._watches.clear()
        self._answers.clear()
        self._pages.clear()

    async def snapshot(self, connection: str | None) -> bytes:
        """Tell of all queues.

        :param connection: only of this connection
        :return: a :class:`Snapshot` as JSON
        :raises NotFoundError: it isn't shown
        """

        async def make() -> Snapshot:
            watches = [self._watch(each) for each in ([connection] if connection else self._settings.connections)]
            await asyncio.gather(*(watch.fresh() for watch in watches))
            return Snapshot(connections=[watch.told() for watch in watches], refresh_seconds=self._settings.refresh)

        return await self._answer(self._answers, ("snapshot", connection), make)

    async def queue(self, connection: str, queue: str) -> bytes:
        """Tell of one queue.

        :param connection: the Airflow connection's id
        :param queue: the queue
        :return: a :class:`QueueDetail` as JSON
        :raises NotFoundError: there is no such queue
        :raises UnreachableError: nothing is known of it
        """

        async def make() -> QueueDetail:
            watch = await self._watched(connection, queue)
            look, history = watch.looks[queue], watch.histories[queue]
            scan = watch.scanner.known(queue)
            declared = await self._declared(watch, queue)
            return QueueDetail(
                numbers=queue_numbers(connection, look, history, scan.counts),
                state=watch.state,
                problem=watch.problem,
                age_seconds=watch.age(),
                subjects=list(look.config.get("subjects") or []),
                retention=look.config["retention"],
                description=look.config.get("description"),
                dead_letter_queue=look.dead_letter_queue["config"]["name"] if look.dead_letter_queue else None,
                events=declared.events.name if declared and declared.events else None,
                archive=declared.archive.name if declared and declared.archive else None,
                audit=declared.audit.name if declared and declared.audit else None,
                consumers=consumer_numbers(look, history.rates),
                history=history.points(),
                risks=list(scan.risks),
            )

        return await self._answer(self._answers, ("queue", connection, queue), make)

    async def groups(self, connection: str, queue: str, selection: Selection, group_by: Sequence[GroupField]) -> bytes:
        """Tell of a queue's dead letters, put together.

        :param connection: the Airflow connection's id
        :param queue: the queue
        :param selection: which letters
        :param group_by: what letters of a group share
        :return: :class:`Groups` as JSON
        """

        async def make() -> Groups:
            _, scan = await self._scanned(connection, queue)
            groups, left_out = scan.index.groups(selection, group_by) if scan.index else ([], 0)
            return Groups(
                scan=scan.state(),
                group_by=list(group_by),
                total=scan.index.count(selection) if scan.index else 0,
                uncertain=scan.counts.uncertain if scan.counts else 0,
                groups=groups,
                groups_left_out=left_out,
            )

        return await self._answer(self._answers, ("groups", connection, queue, selection, tuple(group_by)), make)

    async def letters(
        self, connection: str, queue: str, selection: Selection, after: int, limit: int, *, hidden: bool
    ) -> bytes:
        """Tell of some of a queue's dead letters, each proved again.

        :param connection: the Airflow connection's id
        :param queue: the queue
        :param selection: which letters
        :param after: only higher sequences
        :param limit: how many
        :param hidden: whether texts that may quote bodies are left out
        :return: a :class:`LetterPage` as JSON
        """

        async def make() -> LetterPage:
            _, scan = await self._scanned(connection, queue)
            sequences, more = scan.index.page(selection, after, limit) if scan.index else ([], False)
            if sequences and scan.scan is None:
                raise UnreachableError(_LOST)
            proved = await scan.scan.classify(sequences) if scan.scan and sequences else []
            letters = [each for each in proved if isinstance(each, DeadLetter) and selection.matches(each)]
            return LetterPage(
                scan=scan.state(),
                matching=scan.index.count(selection) if scan.index else 0,
                letters=[letter_line(each, hidden=hidden) for each in letters],
                next_after=sequences[-1] if more else None,
                gone=len(sequences) - len(letters),
            )

        key = ("letters", connection, queue, selection, after, limit, hidden)
        return await self._answer(self._pages, key, make)

    async def letter(self, connection: str, queue: str, sequence: int, *, hidden: bool) -> bytes:
        """Tell all of one dead letter.

        :param connection: the Airflow connection's id
        :param queue: the queue
        :param sequence: its stream sequence
        :param hidden: whether its body, its headers and texts that may quote them are left out
        :return: a :class:`LetterDetail` as JSON
        :raises DeadLetterGoneError: it is no dead letter (any more)
        """

        async def make() -> LetterDetail:
            _, scan = await self._scanned(connection, queue)
            if scan.scan is None:
                raise UnreachableError(_LOST if scan.counts else "the first scan of the queue still runs; ask again")
            (found,) = await scan.scan.classify([sequence])
            if not isinstance(found, DeadLetter):
                raise DeadLetterGoneError(
                    f"expected job {sequence} of {queue} to be a dead letter, found otherwise: {found.status.meaning}"
                )
            records = await lives_of(found, scan.scan.audit)
            most = self._settings.payload_bytes
            return letter_detail(found, records, scan.scan.dead_letter_queue, most, hidden=hidden)

        key = ("letter", connection, queue, sequence, hidden)
        return await self._answer(self._pages, key, make)

    async def dry_run(self, connection: str, queue: str, selection: Selection, action: Act) -> bytes:
        """Count what would be done.

        :param connection: the Airflow connection's id
        :param queue: the queue
        :param selection: which letters
        :param action: what with them
        :return: a :class:`DryRun` as JSON
        :raises DeadlineError: it takes longer than anybody waits; it goes on, so that who asks again soon finds it
        """
        key = ("dry-run", connection, queue, selection, action)

        async def count() -> bytes:
            self._watch(connection)
            return (await dry_run(connection, queue, selection, action)).model_dump_json().encode()

        async def wait() -> bytes:
            try:
                async with asyncio.timeout(_COUNT_SECONDS):
                    return await self._pages.get(key, count)
            except TimeoutError:
                raise DeadlineError("the letters are still being counted; ask again in a few seconds") from None

        return await self._thread.run(wait())

    async def jobs(self, question: TaskQuestion) -> bytes:
        """Tell of the jobs of a DAG run, or of one of its tasks.

        :param question: which
        :return: :class:`TaskJobs` as JSON
        """

        async def make() -> BaseModel:
            watches = [self._watch(each) for each in self._settings.connections]
            await asyncio.gather(*(watch.fresh() for watch in watches))
            return await jobs_of(question, watches)

        return await self._answer(self._pages, ("jobs", question), make)

    async def _answer(
        self, once: SingleFlightCache[bytes], key: Hashable, make: Callable[[], Awaitable[BaseModel]]
    ) -> bytes:
        async def made() -> bytes:
            return (await make()).model_dump_json().encode()

        return await self._thread.run(once.get(key, made))

    def _watch(self, connection: str) -> ServerPoller:
        if connection not in self._settings.connections:
            raise NotFoundError(
                f"expected a connection among {', '.join(self._settings.connections)}, found {connection!r}: name it in"
                " [jetstream] monitor_connections to have it shown"
            )
        if connection not in self._watches:
            self._watches[connection] = ServerPoller(connection, self._settings.refresh)
        return self._watches[connection]

    async def _watched(self, connection: str, queue: str) -> ServerPoller:
        watch = self._watch(connection)
        await watch.fresh()
        if queue in watch.looks:
            return watch
        if watch.problem:
            raise UnreachableError(watch.problem.message)
        if watch.state == "starting":
            raise UnreachableError(f"the first look at {connection} isn't done yet; ask again")
        raise NotFoundError(
            f"expected a work queue {queue!r} on the server of {connection}, found none: see api/snapshot for those"
            " that there are"
        )

    async def _scanned(self, connection: str, queue: str) -> tuple[ServerPoller, QueueScan]:
        watch = await self._watched(connection, queue)
        scan = watch.scanner.ask(watch.looks[queue])
        await watch.scanner.wait(scan, _FIRST_SCAN_SECONDS)
        if isinstance(scan.error, QueueDeclarationError):
            raise scan.error.with_traceback(None)
        return watch, scan

    async def _declared(self, watch: ServerPoller, queue: str) -> WorkQueue | None:
        async def discover() -> WorkQueue:
            async with watch.shared() as connection:
                return await discover_queue(connection, queue)

        try:
            return await self._declarations.get((watch.conn_id, queue), discover)
        except JetStreamProviderError:
            # The page shows its numbers all the same.
            return None


_LOST = "expected the server to answer, found the connection lost since the scan; ask again in a few seconds"
