"""An in-memory index of a queue's dead letters: columns of what is searched and sorted by, and one kind for all alike.

A question that has to look at each letter does so in steps, between which other tasks of the event loop run. What it
found is kept until letters are added or removed.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.plugins.monitor.included_letters import included_letters, ordered_by_death
from airflow_provider_jetstream.plugins.monitor.letter_columns import (
    IndexedColumns,
    KindCounts,
    LetterRow,
    in_steps,
    microseconds,
    values_at,
)
from airflow_provider_jetstream.plugins.monitor.text_table import TextTable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from airflow_provider_jetstream.plugins.monitor.indexed_letter import IndexedLetter
    from airflow_provider_jetstream.plugins.monitor.letter_query import LetterKind, LetterQuery, Sort

_Result = TypeVar("_Result")

MAX_LETTERS = 1_000_000
MAX_KINDS = 100_000
_MAX_TEXTS = 5_000
_MAX_RESULTS = 24
_KINDS_AT_ONCE = 1_000
# In microseconds.
_FOREVER = 2**62


class LetterIndex:
    """The letters of a queue in the order of their sequences, without their bodies.

    Beyond :data:`MAX_LETTERS` or :data:`MAX_KINDS`, letters are only counted; then ``complete`` is false.

    :ivar counted: how many letters there are, parked or not
    """

    def __init__(self) -> None:
        # Replaced as a whole where letters change: a question in progress goes on with those that it began with.
        self.columns = IndexedColumns()
        self.subjects = TextTable()
        self.counted: Counter[bool] = Counter()
        self.complete = True
        self._kinds: list[LetterKind] = []
        self._numbers: dict[LetterKind, int] = {}
        self._texts: dict[int, str] = {}
        self._dags: set[str] = set()
        self._results: OrderedDict[tuple[object, ...], asyncio.Future[Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def last(self) -> int:
        """The highest sequence; 0 where there is none."""
        return self.columns.sequence[-1] if len(self) else 0

    def add(self, sequence: int, letter: IndexedLetter) -> None:
        """Add a letter whose sequence is higher than those of all letters before."""
        self.counted[letter.kind.parked] += 1
        if len(self) < MAX_LETTERS and (row := self._row(sequence, letter)) is not None:
            self.columns.append(row)
            self._results.clear()
        else:
            self.complete = False

    async def change(self, letters: Mapping[int, IndexedLetter | None]) -> None:
        """Add, replace and remove letters by their sequences.

        :param letters: ``None`` for one that isn't a letter any more
        """
        before, rows = self.columns, list[tuple[int, LetterRow | None]]()
        for sequence, letter in sorted(letters.items(), key=lambda item: item[0]):
            position = before.position(sequence)
            if position is None if letter is None else not self.differs(sequence, letter):
                continue
            if position is not None:
                self.counted[self._kinds[before.kind[position]].parked] -= 1
            row = self._row(sequence, letter) if letter else None
            if letter:
                self.counted[letter.kind.parked] += 1
                self.complete &= row is not None
            rows.append((sequence, row))
        last = self.last
        if not rows:
            return
        if all(sequence > last for sequence, _ in rows) and len(self) + len(rows) <= MAX_LETTERS:
            for _, row in rows:
                if row is not None:
                    before.append(row)
        else:
            self.columns = await before.changed(rows)
        self._results.clear()

    def has(self, sequence: int, entry: int) -> bool:
        """Return whether a letter is indexed, with this last entry of the dead letter queue about it."""
        position = self.columns.position(sequence)
        return position is not None and self.columns.entry[position] == entry

    def differs(self, sequence: int, letter: IndexedLetter) -> bool:
        """Return whether a letter isn't indexed as it is."""
        columns, position = self.columns, self.columns.position(sequence)
        return position is None or (
            self._kinds[columns.kind[position]] != letter.kind
            or columns.entry[position] != letter.entry
            or columns.died_at[position] != microseconds(letter.died_at)
            or columns.job[position] != letter.job
            or self.subjects[columns.subject[position]] != letter.subject
        )

    def dags(self) -> frozenset[str]:
        """Return the DAGs that published jobs of these letters."""
        return frozenset(self._dags)

    async def count(self, query: LetterQuery) -> int:
        """Count the letters that a query includes."""
        columns = self.columns
        if not query.is_of_kinds and not (query.is_of_times and columns.has_few_kinds):
            return len(await self.positions(query, columns))
        count = (await self.kind_counts(query, columns)).count
        return sum(count[number] for number in await self.kinds(query, columns) if number < len(count))

    async def page(self, query: LetterQuery, sort: Sort, offset: int, limit: int) -> list[int]:
        """Return the sequences of a page of letters."""
        columns = self.columns
        found = await self.positions(query, columns)
        if sort.endswith("died_at"):
            every = len(found) == len(columns)
            found = columns.by_death() if every else await self.positions(query, columns, by_death=True)
        sequence = columns.sequence
        if sort.startswith("-"):
            end = max(0, len(found) - offset)
            return [sequence[position] for position in reversed(found[max(0, end - limit) : end])]
        return [sequence[position] for position in found[offset : offset + limit]]

    async def offset_after(self, query: LetterQuery, sequence: int) -> int:
        """Return how many of the letters have no higher sequence than this one."""
        position = self.columns.sequence.bisect_left(sequence + 1)
        return bisect_left(await self.positions(query), position)

    async def sequences(self, query: LetterQuery, after: int = 0) -> Sequence[int]:
        """Return the sequences of the letters that a query includes, from the one after another on."""
        columns, sequences = self.columns, array("Q")
        found = await self.positions(query, columns)
        begin = bisect_left(found, columns.sequence.bisect_left(after + 1))
        async for part in in_steps(found[begin:]):
            sequences.extend(values_at(columns.sequence, part))
        return sequences

    async def kinds(self, query: LetterQuery, columns: IndexedColumns | None = None) -> Sequence[int]:
        """Return the numbers of the kinds that a query may include, of those that have letters.

        :param columns: the letters of the index now or before, in place of those of now
        """
        columns, of_kinds = columns or self.columns, query.of_kinds()
        return await self.shared((columns, "kinds", of_kinds), lambda: self._included_kinds(columns, of_kinds))

    async def kind_counts(self, query: LetterQuery, columns: IndexedColumns) -> KindCounts:
        """Count letters by kind, of the kinds that a query includes those letters that it includes."""
        if query.is_of_kinds:
            return columns.kinds
        if query.is_of_times and columns.has_few_kinds:
            begin = microseconds(query.died_from) if query.died_from else -_FOREVER
            return await columns.kinds_of_time(begin, microseconds(query.died_to) if query.died_to else _FOREVER)
        return await columns.kinds_of(await self.positions(query, columns))

    async def positions(
        self, query: LetterQuery, columns: IndexedColumns | None = None, *, by_death: bool = False
    ) -> Sequence[int]:
        """Return where in the columns the letters are that a query includes.

        :param columns: the letters of the index now or before, in place of those of now
        :param by_death: whether in the order of their times of death, in place of their sequences
        """
        columns = columns or self.columns
        kinds = await self.kinds(query, columns)
        if query.dags is not None and kinds == await self.kinds(query.of_all_dags(), columns):
            # One answer for those who may see all letters and those who see all that there are.
            query = query.of_all_dags()

        async def find() -> Sequence[int]:
            if by_death:
                return await ordered_by_death(columns, await self.positions(query, columns))
            return await included_letters(columns, self.subjects, query, kinds)

        return await self.shared((columns, by_death, query), find)

    def kind(self, number: int) -> LetterKind:
        """Return a kind."""
        return self._kinds[number]

    def text_of(self, number: int) -> str | None:
        """Return the error's text of one letter of a kind."""
        return self._texts.get(number)

    def died_before(self, at: float) -> int:
        """Return how many letters died before a time.

        :param at: seconds since 1970
        """
        return bisect_left(self.columns.by_death(), at * 1e6, key=self.columns.died_at.__getitem__)

    def died_at(self, sequence: int) -> float | None:
        """Return when a letter died, as seconds since 1970; ``None`` where it isn't indexed."""
        position = self.columns.position(sequence)
        return None if position is None else self.columns.died_at[position] / 1e6

    def count_by_task(self, dag_id: str, run_id: str) -> dict[tuple[str | None, int | None], tuple[int, int]]:
        """Count the letters whose jobs a DAG run published.

        :return: letters in circulation and parked ones, by task and map index
        """
        counts: dict[tuple[str | None, int | None], tuple[int, int]] = {}
        for kind, count in zip(self._kinds, self.columns.kinds.count, strict=False):
            if count and kind.value("dag_id") == dag_id and kind.value("run_id") == run_id:
                task = (kind.value("task_id"), kind.map_index)
                circulating, parked = counts.get(task, (0, 0))
                counts[task] = (circulating, parked + count) if kind.parked else (circulating + count, parked)
        return counts

    def _row(self, sequence: int, letter: IndexedLetter) -> LetterRow | None:
        """Return a letter's row; ``None`` where its kind is one too many."""
        number = self._numbers.get(letter.kind)
        if number is None:
            if len(self._kinds) >= MAX_KINDS:
                return None
            number = self._numbers[letter.kind] = len(self._kinds)
            self._kinds.append(letter.kind)
            if (dag_id := letter.kind.value("dag_id")) is not None:
                self._dags.add(dag_id)
        if letter.text and len(self._texts) < _MAX_TEXTS:
            self._texts.setdefault(number, letter.text)
        subject = self.subjects.number_of(letter.subject)
        return LetterRow(sequence, letter.entry, number, subject, letter.job, microseconds(letter.died_at))

    async def shared(self, key: tuple[object, ...], find: Callable[[], Coroutine[None, None, _Result]]) -> _Result:
        """Return what was found since the letters last changed; all who ask for the same wait for one search."""
        found = self._results.get(key)
        if found is None or (found.done() and (found.cancelled() or found.exception())):
            found = self._results[key] = asyncio.ensure_future(find())
            self._drop_results()
        else:
            self._results.move_to_end(key)
        result: _Result = await asyncio.shield(found)
        return result

    def _drop_results(self) -> None:
        """Drop results that were used longest ago, so that all hold no more positions than there are letters."""
        sizes = {key: _size(result) for key, result in self._results.items()}
        total = sum(sizes.values())
        for key in list(self._results)[:-1]:
            if total <= len(self) and len(self._results) <= _MAX_RESULTS:
                return
            total -= sizes[key]
            del self._results[key]

    async def _included_kinds(self, columns: IndexedColumns, query: LetterQuery) -> Sequence[int]:
        numbers, count = array("I"), columns.kinds.count
        async for part in in_steps(range(len(count)), _KINDS_AT_ONCE):
            numbers.extend(number for number in part if count[number] and query.includes_kind(self._kinds[number]))
        return numbers


def _size(result: asyncio.Future[Any]) -> int:
    """Return how many positions a result holds."""
    if not result.done() or result.cancelled() or result.exception() or not isinstance(result.result(), array):
        return 0
    return len(result.result())
