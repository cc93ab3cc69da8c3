"""An in-memory index of a queue's dead letters: some thirty bytes a letter, and one group for all that are alike."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey, group_of
from airflow_provider_jetstream.jetstream.dead_letters.group import LetterGroup as LetterGroup
from airflow_provider_jetstream.jetstream.dead_letters.group import LetterGroups as LetterGroups
from airflow_provider_jetstream.plugins.monitor.models.letters import Group

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

MAX_LETTERS = 1_000_000
MAX_KINDS = 50_000
_SHOWN_GROUPS = 500
_FIELDS: Final[tuple[GroupField, ...]] = get_args(GroupField)
_POSITIONS: Final = {field: position for position, field in enumerate(_FIELDS)}
_EXACT_FIELDS: Final[tuple[GroupField, ...]] = (
    "error_class",
    "fingerprint",
    "traceback_digest",
    "consumer",
    "dag_id",
    "run_id",
    "task_id",
)
# The fingerprint is made of these, so it selects a letter that lacks one of them too.
_IN_FINGERPRINT = frozenset({"error_class", "consumer"})


class LetterKind(NamedTuple):
    """The fields by which letters are selected and grouped.

    :param values: the values of all group fields, in their order
    """

    parked: bool
    map_index: int | None
    values: GroupKey

    def value(self, field: GroupField) -> str | None:
        """Return the value of a group field."""
        return self.values[_POSITIONS[field]]


class IndexedLetter(NamedTuple):
    """The indexed fields of a letter.

    :param entry: the last entry of the dead letter queue about it; 0 where there is none
    """

    kind: LetterKind
    died_at: datetime
    entry: int

    @classmethod
    def of(cls, letter: DeadLetter) -> IndexedLetter:
        """Return the indexed fields of a letter."""
        map_index = letter.origin.map_index if letter.origin else None
        kind = LetterKind(letter.parked is not None, map_index, group_of(letter, _FIELDS))
        return cls(kind, letter.death.died_at, max(letter.entries, default=0))


class LetterIndex:
    """The letters of a queue in the order of their sequences, without their bodies.

    It stops growing at :data:`MAX_LETTERS` or :data:`MAX_KINDS`; then ``complete`` is false.
    """

    def __init__(self) -> None:
        self._sequences: array[int] = array("Q")
        self._kind_numbers: array[int] = array("I")
        self._died_at: array[float] = array("d")
        self._entries: array[int] = array("Q")
        self._kinds: list[LetterKind] = []
        self._groups: dict[LetterKind, tuple[int, LetterGroup]] = {}
        self._dags: set[str] = set()
        self.complete = True

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: int, letter: IndexedLetter) -> None:
        """Add a letter whose sequence is higher than those of all letters before."""
        kind, died_at, entry = letter
        known = self._groups.get(kind)
        if len(self) >= MAX_LETTERS or (known is None and len(self._groups) >= MAX_KINDS):
            self.complete = False
        if not self.complete:
            return
        added = LetterGroup(1, died_at, died_at, sequence)
        if known is None:
            known = self._groups[kind] = (len(self._kinds), added)
            self._kinds.append(kind)
            if (dag_id := kind.value("dag_id")) is not None:
                self._dags.add(dag_id)
        else:
            known[1].merge(added)
        self._sequences.append(sequence)
        self._kind_numbers.append(known[0])
        self._died_at.append(died_at.timestamp())
        self._entries.append(entry)

    def find(self, sequence: int, entry: int) -> IndexedLetter | None:
        """Find a letter.

        :param entry: the last entry of the dead letter queue about it
        :return: ``None`` where the letter isn't indexed, or was indexed when another entry was the last one
        """
        position = bisect_left(self._sequences, sequence)
        if position == len(self) or self._sequences[position] != sequence or self._entries[position] != entry:
            return None
        kind = self._kinds[self._kind_numbers[position]]
        return IndexedLetter(kind, datetime.fromtimestamp(self._died_at[position], UTC), entry)

    def dags(self) -> frozenset[str]:
        """Return the DAGs that published jobs of these letters."""
        return frozenset(self._dags)

    def count(self, selection: Selection, dags: Collection[str] | None = None) -> int:
        """Count the letters that match a selection.

        :param dags: without the letters of all other DAGs; ``None`` for every letter
        """
        return sum(group.count for _, _, group in self._matching(selection, dags))

    def page(
        self, selection: Selection, after: int, limit: int, dags: Collection[str] | None = None
    ) -> tuple[list[int], bool]:
        """Return the sequences of up to ``limit`` matching letters above ``after``, and whether there are more."""
        numbers = {number for _, number, _ in self._matching(selection, dags)}
        sequences: list[int] = []
        for position in range(bisect_right(self._sequences, after), len(self)):
            if self._kind_numbers[position] in numbers:
                if len(sequences) == limit:
                    return sequences, True
                sequences.append(self._sequences[position])
        return sequences, False

    def groups(
        self, selection: Selection, group_by: Sequence[GroupField], dags: Collection[str] | None = None
    ) -> tuple[list[Group], int]:
        """Group the matching letters by some fields; return the largest groups, and the number of the others."""
        merged = LetterGroups()
        for kind, _, group in self._matching(selection, dags):
            merged.merge(tuple(kind.value(field) for field in group_by), replace(group))
        largest = merged.largest()
        base = selection.model_dump(mode="json", exclude_defaults=True)
        return [
            Group(
                key=dict(zip(group_by, key, strict=True)),
                count=group.count,
                first_seen=group.first,
                last_seen=group.last,
                example=group.example,
                select=_group_selection(base, group_by, key),
            )
            for key, group in largest[:_SHOWN_GROUPS]
        ], len(largest[_SHOWN_GROUPS:])

    def count_by_task(self, dag_id: str, run_id: str) -> dict[tuple[str | None, int | None], tuple[int, int]]:
        """Count the letters whose jobs a DAG run published.

        :return: letters in circulation and parked ones, by task and map index
        """
        counts: dict[tuple[str | None, int | None], tuple[int, int]] = {}
        for kind, (_, group) in self._groups.items():
            if kind.value("dag_id") == dag_id and kind.value("run_id") == run_id:
                task = (kind.value("task_id"), kind.map_index)
                circulating, parked = counts.get(task, (0, 0))
                counts[task] = (
                    (circulating, parked + group.count) if kind.parked else (circulating + group.count, parked)
                )
        return counts

    def _matching(
        self, selection: Selection, dags: Collection[str] | None
    ) -> Iterator[tuple[LetterKind, int, LetterGroup]]:
        return (
            (kind, number, group)
            for kind, (number, group) in self._groups.items()
            if _matches(selection, kind) and is_of(kind.value("dag_id"), dags)
        )


def is_of(dag_id: str | None, dags: Collection[str] | None) -> bool:
    """Return whether a letter belongs to no DAG or to one of these; to any DAG for ``None``."""
    return dag_id is None or dags is None or dag_id in dags


def _matches(selection: Selection, kind: LetterKind) -> bool:
    return (
        kind.parked == selection.parked
        and (selection.reasons is None or kind.value("reason") in selection.reasons)
        and all(getattr(selection, field) in (None, kind.value(field)) for field in _EXACT_FIELDS)
        and (selection.subject is None or covers(selection.subject, str(kind.value("subject"))))
    )


def _group_selection(
    base: dict[str, object], group_by: Sequence[GroupField], key: GroupKey
) -> dict[str, object] | None:
    """Return the selection of exactly one group's letters; ``None`` where a field can't be selected by its value."""
    select = dict(base)
    for field, value in zip(group_by, key, strict=True):
        if field == "reason":
            select["reasons"] = [value]
        elif field == "error_place" or (value is None and not (field in _IN_FINGERPRINT and "fingerprint" in group_by)):
            return None
        elif value is not None and readable_text(value) != value:
            # JSON can't hold it.
            return None
        elif value is not None:
            select[field] = value
    return select
