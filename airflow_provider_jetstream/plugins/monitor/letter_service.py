"""Answers requests about a queue's dead letters, and about jobs that were some.

Every method returns JSON of the model that it names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.dead_letters.diagnose import diagnose_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, DeadlineError
from airflow_provider_jetstream.plugins.monitor.letter_groups import group_letters
from airflow_provider_jetstream.plugins.monitor.letter_history import read_history
from airflow_provider_jetstream.plugins.monitor.letter_search import search_letters
from airflow_provider_jetstream.plugins.monitor.letter_view import (
    dag_of,
    ended_detail,
    letter_detail,
    letter_line,
)
from airflow_provider_jetstream.plugins.monitor.models.diagnosis import DiagnosisView
from airflow_provider_jetstream.plugins.monitor.models.letters import Groups, LetterDetail, LetterPage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pydantic import BaseModel

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, Sort
    from airflow_provider_jetstream.plugins.monitor.answers import Answers
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.letter_search import Place
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.pollers import Pollers

_DIAGNOSIS_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class LetterAnswer:
    """Something about one letter, for those who may see its DAG.

    :param dag_id: the DAG that published its job, if that is known
    :param content: a :class:`LetterDetail` as JSON, or its body
    :param of_unknown: whether a DAG that isn't known published its job
    """

    dag_id: str | None
    content: bytes
    of_unknown: bool = False

    @property
    def dags(self) -> tuple[str | None, ...]:
        """The DAG whose data this is; ``None`` for one that isn't known; empty where no DAG has to do with it."""
        return (self.dag_id,) if self.dag_id is not None or self.of_unknown else ()


class LetterService:
    """What the page shows of dead letters."""

    def __init__(self, settings: MonitorSettings, pollers: Pollers, answers: Answers) -> None:
        self._settings = settings
        self._pollers = pollers
        self._answers = answers

    async def dags(self, connection: str, queue: str) -> frozenset[str]:
        """Return the DAGs that published jobs of a queue's dead letters."""

        async def find() -> frozenset[str]:
            scan = await self._pollers.requested_scan(connection, queue)
            return await scan.table.dags() if scan.table else frozenset()

        return await self._answers.run(find())

    async def groups(
        self, connection: str, queue: str, query: LetterQuery, group_by: Sequence[GroupField], hiding: Hiding
    ) -> bytes:
        """Return the :class:`Groups` of a queue's dead letters."""

        async def make() -> Groups:
            scan = await self._pollers.requested_scan(connection, queue)
            table = scan.table or LetterTable()
            groups, left_out = await group_letters(
                table, query, group_by, hidden=hiding.all, hidden_of_unknown=hiding.of_unknown
            )
            total = await table.count(query)
            return Groups(
                scan=scan.state(),
                group_by=list(group_by),
                total=self._pollers.of(connection).of_letters(queue, total),
                uncertain=self._pollers.of(connection).letters(queue).uncertain,
                groups=groups,
                groups_left_out=left_out,
                not_shown=await table.count(query.of_all_dags()) - total,
            )

        return await self._answers.now(("groups", connection, queue, query, tuple(group_by), hiding), make)

    async def page(
        self,
        connection: str,
        queue: str,
        query: LetterQuery,
        hiding: Hiding,
        *,
        sort: Sort = "sequence",
        offset: int = 0,
        after: int = 0,
        limit: int = 50,
    ) -> bytes:
        """Return a :class:`LetterPage` of dead letters, each proved again.

        :param offset: how many letters to leave out at the beginning
        :param after: only higher sequences, where letters are sorted by sequence; in place of ``offset``
        """

        async def make() -> LetterPage:
            scan = await self._pollers.requested_scan(connection, queue)
            table = scan.table or LetterTable()
            begin = await table.count_until(query, after) if after else offset
            sequences = await table.page(query, sort, after=after, offset=offset, limit=limit)
            matching = await table.count(query)
            proving = self._pollers.require_scan(connection, scan) if sequences else None
            # In order: a scan reads jobs that follow one another together.
            classified = await proving.classify(sorted(sequences)) if proving else []
            found = {letter.sequence: letter for letter in classified}
            proved = (found[sequence] for sequence in sequences)
            letters = [letter for letter in proved if isinstance(letter, DeadLetter) and query.includes(letter)]
            more = begin + len(sequences) < matching
            return LetterPage(
                scan=scan.state(),
                matching=self._pollers.of(connection).of_letters(queue, matching),
                letters=[letter_line(letter, hidden=hiding.hides(letter)) for letter in letters],
                next_after=sequences[-1] if more and sort == "sequence" else None,
                next_offset=begin + len(sequences) if more else None,
                gone=len(sequences) - len(letters),
            )

        key = ("letters", connection, queue, query, hiding, sort, offset, after, limit)
        return await self._answers.page(key, make)

    async def detail(
        self, connection: str, queue: str, sequence: int, hiding: Hiding, sees: Callable[[str], bool] | None = None
    ) -> LetterAnswer:
        """Return the :class:`LetterDetail` of a dead letter or of a job that was one, and the DAG that published it.

        :param sees: whether the user may see a DAG: who redrove a letter, and why, is that DAG's
        :raises DeadLetterGoneError: it is no dead letter, and the audit knows nothing of it
        """
        return await self._answers.run(self._detail(connection, queue, sequence, hiding, sees))

    async def body(self, connection: str, queue: str, sequence: int, hiding: Hiding) -> LetterAnswer:
        """Return the body of a dead letter as it is stored; empty where it is hidden from the user.

        :raises DeadLetterGoneError: it is no dead letter (any more)
        """

        async def read() -> LetterAnswer:
            letter = await self.proved(connection, queue, sequence)
            return LetterAnswer(dag_of(letter), b"" if hiding.hides(letter) else letter.body)

        return await self._answers.run(read())

    async def search(
        self,
        connection: str,
        queue: str,
        query: LetterQuery,
        hiding: Hiding,
        text: str,
        *,
        where: Sequence[Place],
        after: int,
        limit: int,
    ) -> AsyncGenerator[bytes, None]:
        """Search a text in letters; return lines of JSON as they come, see :func:`search_letters`.

        :raises LettersUnreadError: the letters are still being read
        """

        async def begin() -> AsyncGenerator[BaseModel, None]:
            scan = await self._pollers.finished_scan(connection, queue)
            proving, table = self._pollers.require_scan(connection, scan), scan.table or LetterTable()
            growing = not scan.completed_at
            return search_letters(proving, table, query, hiding, text, where, after, limit, growing=growing)

        return self._answers.stream(await self._answers.run(begin()))

    async def diagnosis(self, connection: str, queue: str, selection: Selection, *, hidden: bool) -> bytes:
        """Return the :class:`DiagnosisView` of the selected letters.

        :param hidden: whether texts that may quote bodies are left out
        :raises DeadlineError: it takes more than 25 seconds; it goes on, and the same request joins it
        """

        async def diagnose() -> DiagnosisView:
            declared = await self._pollers.declaration(connection, queue)
            async with self._pollers.of(connection).connection() as opened:
                found = await diagnose_dead_letters(opened, declared, selection)
            return DiagnosisView.of(found, hidden=hidden)

        async def wait() -> bytes:
            await self._pollers.of_queue(connection, queue)
            try:
                async with asyncio.timeout(_DIAGNOSIS_SECONDS):
                    key = ("diagnosis", connection, queue, selection, hidden)
                    return await self._answers.shared_page(key, diagnose)
            except TimeoutError:
                raise DeadlineError("the letters are still being read; try again in a few seconds") from None

        return await self._answers.run(wait())

    async def proved(self, connection: str, queue: str, sequence: int) -> DeadLetter:
        """Return a letter that is proved again; to be awaited in the thread.

        :raises DeadLetterGoneError: it is no dead letter (any more)
        """
        scan = self._pollers.require_scan(connection, await self._pollers.requested_scan(connection, queue))
        (letter,) = await scan.classify([sequence])
        if not isinstance(letter, DeadLetter):
            raise DeadLetterGoneError(
                f"expected job {sequence} of {queue} to be a dead letter, found otherwise: {letter.status.meaning}"
            )
        return letter

    async def _detail(
        self, connection: str, queue: str, sequence: int, hiding: Hiding, sees: Callable[[str], bool] | None
    ) -> LetterAnswer:
        scan = self._pollers.require_scan(connection, await self._pollers.requested_scan(connection, queue))
        (found,) = await scan.classify([sequence])
        history = await read_history(scan, found)
        if sees:
            await asyncio.to_thread(history.leave_out_unseen, sees)
        detail: LetterDetail
        if isinstance(found, DeadLetter):
            detail = letter_detail(
                *(found, history, scan.dead_letter_queue, self._settings.payload_bytes), hidden=hiding.hides(found)
            )
            return LetterAnswer(dag_of(found), detail.model_dump_json().encode())
        # Its job is gone, and with it the name of its task: it may be one of any DAG.
        if not history.own or hiding.of_unknown:
            raise DeadLetterGoneError(
                f"expected job {sequence} of {queue} to be a dead letter, or the audit to know of it, found otherwise:"
                f" {found.status.meaning}"
            )
        detail = ended_detail(history, scan.dead_letter_queue, self._settings.payload_bytes, hidden=hiding.all)
        return LetterAnswer(None, detail.model_dump_json().encode())
