"""Answers requests about a queue's dead letters, and about jobs that were some.

Every method of the service returns JSON of the model that it names.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from airflow_provider_jetstream.jetstream.attempts import AttemptReader, find_attempts_stream
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, parse_record
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, readable_text
from airflow_provider_jetstream.jetstream.contract import letter_audit_subject
from airflow_provider_jetstream.jetstream.dead_letters.diagnose import diagnose_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterTable
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, DeadlineError, JetStreamProviderError
from airflow_provider_jetstream.plugins.monitor.letter_history import read_history
from airflow_provider_jetstream.plugins.monitor.letter_view import (
    dag_of,
    ended_detail,
    letter_detail,
    letter_line,
    recorded_line,
)
from airflow_provider_jetstream.plugins.monitor.models.letters import (
    DiagnosisView,
    FoundLetter,
    Group,
    Groups,
    LetterDetail,
    LetterPage,
    SearchEnd,
    SearchProgress,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence

    from pydantic import BaseModel

    from airflow_provider_jetstream.jetstream.attempts import AttemptReport
    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
    from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, Sort
    from airflow_provider_jetstream.plugins.monitor.background import Answers
    from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
    from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
    from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
    from airflow_provider_jetstream.plugins.monitor.server_poller import Pollers


_SHOWN_GROUPS = 500
# The fingerprint is made of these, so it selects a letter that lacks one of them too.
_IN_FINGERPRINT = frozenset({"error_class", "consumer"})


async def group_letters(
    table: LetterTable,
    query: LetterQuery,
    group_by: Sequence[GroupField],
    counted: Callable[[float], Figure],
    *,
    hidden: bool,
    hidden_of_unknown: bool,
) -> tuple[list[Group], int]:
    """Group the letters that a query includes; return the largest groups, and the number of the others.

    :param counted: gives a number of the table its age and certainty
    :param hidden: whether texts that may quote bodies are left out
    :param hidden_of_unknown: the same for jobs of tasks that aren't known
    """
    texts = None if hidden else not hidden_of_unknown
    groups, count, total = await table.largest_groups(query, group_by, _SHOWN_GROUPS, texts=texts)
    base = query.selection.model_dump(mode="json", exclude_defaults=True)
    return [
        Group(
            key=dict(zip(group_by, key, strict=True)),
            count=counted(group.count),
            first_seen=group.first,
            last_seen=group.last,
            example=group.example,
            share=round(group.count / total, 4),
            error_message=text,
            select=_group_selection(base, group_by, key),
        )
        for key, group, text in groups
    ], count - len(groups)


def _group_selection(
    base: dict[str, object], group_by: Sequence[GroupField], key: GroupKey
) -> dict[str, object] | None:
    """Return the selection of exactly one group's letters; ``None`` where a field can't be selected by its value."""
    select = dict(base)
    for name, value in zip(group_by, key, strict=True):
        if name == "reason":
            select["reasons"] = [value]
        elif name == "error_place" or (value is None and not (name in _IN_FINGERPRINT and "fingerprint" in group_by)):
            return None
        elif value is not None and readable_text(value) != value:
            # JSON can't hold it.
            return None
        elif value is not None:
            select[name] = value
    return select


Place: TypeAlias = Literal["job_id", "error", "body", "header"]
PLACES: tuple[Place, ...] = ("job_id", "error", "body", "header")
_AT_ONCE = 100
_PROGRESS_SECONDS = 0.5
# Proxies give up at 30 or 60 seconds; a search goes on where it stopped.
_SEARCH_SECONDS = 25.0


async def search_letters(
    scan: Scan,
    table: LetterTable,
    query: LetterQuery,
    hiding: Hiding,
    text: str,
    where: Collection[Place],
    after: int,
    limit: int,
    *,
    growing: bool,
) -> AsyncGenerator[BaseModel, None]:
    """Search a text, whatever its case; yield what is found, the progress, and at last how it ended.

    Letters in circulation or parked come first, each proved again; then, for job ids, what the audit knows of.

    :param after: only letters of higher sequences
    :param limit: how many to find at most
    :param growing: whether the letters are still being read for the first time; the search ends after the indexed
        letters, and goes on behind them
    """
    indexed = max(table.last, after)
    sequences = await table.page(query, after=after)
    started = reported = time.monotonic()
    read = found = 0
    yield SearchProgress(read=0, of=len(sequences))
    try:
        while read < len(sequences) and time.monotonic() - started <= _SEARCH_SECONDS:
            some, worked = sequences[read : read + _AT_ONCE], time.thread_time()
            for sequence, letter in zip(some, await scan.classify(some), strict=True):
                read += 1
                if line := _found(letter, query, hiding, text.casefold(), where):
                    found += 1
                    yield line
                if found >= limit:
                    yield SearchEnd(reason="limit", read=read, found=found, next_after=sequence)
                    return
            if time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                yield SearchProgress(read=read, of=len(sequences))
            # The other half of the core is the API server's.
            await asyncio.sleep(time.thread_time() - worked)
        if growing or read < len(sequences):
            last = sequences[read - 1] if read else after
            next_after = last if read < len(sequences) else max(last, indexed)
            yield SearchEnd(reason="time", read=read, found=found, next_after=next_after)
            return
        # The DAG of these letters isn't known any more.
        if "job_id" in where and not query.selection.parked and not hiding.of_unknown:
            async for record in _recorded(scan, table, text.casefold(), limit - found, hidden=hiding.all):
                found += 1
                yield record
    except JetStreamProviderError as error:
        yield SearchEnd(reason="error", read=read, found=found, problem=str(error))
        return
    yield SearchEnd(reason="all", read=read, found=found)


def _found(
    letter: DeadLetter | NotDead, query: LetterQuery, hiding: Hiding, text: str, where: Collection[Place]
) -> FoundLetter | None:
    if not isinstance(letter, DeadLetter) or not query.includes(letter):
        return None
    hidden = hiding.hides(letter)
    places = _places(letter, text, where, hidden=hidden)
    if not places:
        return None
    state: Literal["parked", "dead"] = "dead" if letter.parked is None else "parked"
    return FoundLetter(letter=letter_line(letter, hidden=hidden), state=state, where=places)


def _places(letter: DeadLetter, text: str, where: Collection[Place], *, hidden: bool) -> list[Place]:
    """Return which parts of a letter hold a text; parts that the user may not see aren't searched."""
    found: list[Place] = []
    if "job_id" in where and text in readable_text(letter.job_id).casefold():
        found.append("job_id")
    if hidden:
        return found
    if "error" in where and any(
        text in readable_text(part).casefold()
        for part in (letter.death.error_class, letter.death.error_message, letter.death.explanation)
        if part
    ):
        found.append("error")
    if "body" in where and text in decode_text(letter.body).casefold():
        found.append("body")
    if "header" in where and any(
        text in readable_text(f"{name}: {value}").casefold() for name, value in letter.headers
    ):
        found.append("header")
    return found


async def _recorded(
    scan: Scan, table: LetterTable, text: str, limit: int, *, hidden: bool
) -> AsyncGenerator[FoundLetter, None]:
    """Find former letters by the ids of their jobs."""
    if scan.audit is None:
        return
    subject = letter_audit_subject(scan.audit.queue, 0).removesuffix("0") + "*"
    async for message in read_range(scan.connection, scan.audit.stream, subject):
        record = parse_record(LetterRecord, message)
        if record is None or record.created != scan.audit.created or not record.job_id:
            continue
        if text in record.job_id.casefold() and not await table.known([record.sequence]):
            yield FoundLetter(letter=recorded_line(record, hidden=hidden), state=record.action, where=["job_id"])
            limit -= 1
            if limit <= 0:
                return


_DIAGNOSIS_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class LetterAnswer:
    """An answer about one letter, for users who may see its DAG.

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
            counted = partial(self._pollers.of(connection).of_letters, queue)
            groups, left_out = await group_letters(
                table, query, group_by, counted, hidden=hiding.all, hidden_of_unknown=hiding.of_unknown
            )
            total = await table.count(query)
            return Groups(
                scan=scan.state(),
                group_by=list(group_by),
                total=counted(total),
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
                *(found, history, scan.dead_letter_queue, self._settings.payload_bytes),
                tries=await _attempts(scan, found),
                hidden=hiding.hides(found),
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


async def _attempts(scan: Scan, letter: DeadLetter) -> list[AttemptReport]:
    """Return the attempts at a letter's job, as far as workers store them."""
    queue = scan.queue.name
    if not letter.time or not (stream := await find_attempts_stream(scan.connection, queue)):
        return []
    waits = {consumer.name: [consumer.max_ack_wait.total_seconds()] for consumer in scan.snapshot.consumers.values()}
    reader = AttemptReader(scan.connection, stream, queue, waits)
    return await reader.all_of(letter.sequence, datetime.fromisoformat(letter.time), letter.death.deliveries)
