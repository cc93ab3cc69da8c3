"""Finds the letters that a query includes, column by column, in steps between which other tasks run."""

from __future__ import annotations

from array import array
from itertools import compress
from typing import TYPE_CHECKING, TypeAlias

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.indexed_letter import digest_of
from airflow_provider_jetstream.plugins.monitor.letter_columns import STEP, in_steps, microseconds, values_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.packed_column import PackedColumn
    from airflow_provider_jetstream.plugins.monitor.letter_columns import IndexedColumns
    from airflow_provider_jetstream.plugins.monitor.letter_query import LetterQuery
    from airflow_provider_jetstream.plugins.monitor.text_table import TextTable

# A column, and which of some of its values are wanted.
_Test: TypeAlias = "tuple[PackedColumn, Callable[[list[int]], Iterable[object]]]"


async def included_letters(
    columns: IndexedColumns, subjects: TextTable, query: LetterQuery, kinds: Sequence[int]
) -> Sequence[int]:
    """Return the positions of the letters that a query includes, in order.

    :param kinds: those that it may include
    """
    candidates: Sequence[int] = range(len(columns))
    of_all_kinds = sum(columns.kinds.count[number] for number in kinds) >= len(candidates)
    if query.selection.sequences is not None:
        known = (columns.position(sequence) for sequence in sorted(query.selection.sequences))
        candidates = array("I", (position for position in known if position is not None))
    elif query.is_of_kinds and of_all_kinds:
        return candidates
    if query.job_id is not None:
        candidates = await _of_job(columns, candidates, digest_of(query.job_id))
    tests = _time_tests(columns, query)
    if query.selection.subject is not None:
        tests.append((columns.subject, await _subject_test(subjects, readable_text(query.selection.subject))))
    if not of_all_kinds:
        wanted = frozenset(kinds)
        tests.append((columns.kind, lambda values: map(wanted.__contains__, values)))
    if not tests:
        return candidates
    found = array("I")
    async for part in in_steps(candidates):
        left = part
        for column, test in tests:
            left = array("I", compress(left, test(values_at(column, left))))
        found.extend(left)
    return found


async def ordered_by_death(columns: IndexedColumns, positions: Sequence[int]) -> Sequence[int]:
    """Return positions, which are in order, in the order of the letters' times of death."""
    if len(positions) < STEP:
        return array("I", sorted(positions, key=columns.died_at.__getitem__))
    wanted, ordered = bytearray(len(columns)), array("I")
    async for part in in_steps(positions):
        for position in part:
            wanted[position] = 1
    # Copied, since letters may be added meanwhile; those are beyond the ones that are wanted.
    async for part in in_steps(columns.by_death()[:]):
        ordered.extend(position for position in part if position < len(wanted) and wanted[position])
    return ordered


def _time_tests(columns: IndexedColumns, query: LetterQuery) -> list[_Test]:
    tests: list[_Test] = []
    if query.died_from is not None:
        first = microseconds(query.died_from)
        tests.append((columns.died_at, lambda values: [value >= first for value in values]))
    if query.died_to is not None:
        end = microseconds(query.died_to)
        tests.append((columns.died_at, lambda values: [value < end for value in values]))
    return tests


async def _of_job(columns: IndexedColumns, candidates: Sequence[int], job: int) -> Sequence[int]:
    if not isinstance(candidates, range):
        return array("I", (position for position in candidates if columns.job[position] == job))
    found = array("I")
    async for part in in_steps(candidates):
        digests = columns.job[part[0] : part[-1] + 1]
        if job in digests:
            found.extend(position for position, digest in zip(part, digests, strict=True) if digest == job)
    return found


async def _subject_test(subjects: TextTable, subject: str) -> Callable[[list[int]], Iterable[object]]:
    if not {"*", ">"} & set(subject.split(".")):
        number = subjects.find(subject)
        return lambda values: [value == number for value in values]
    covered = bytearray(len(subjects))
    async for part in in_steps(range(len(subjects))):
        for number in subjects.matching(subject, part):  # type: ignore[arg-type]
            covered[number] = 1
    return lambda values: map(covered.__getitem__, values)
