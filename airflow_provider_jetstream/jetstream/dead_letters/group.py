"""Groups of dead letters: letters that share the values of some fields, with their number and times of death."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.errors import SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

GroupField: TypeAlias = Literal[
    "reason",
    "error_class",
    "fingerprint",
    "traceback_digest",
    "error_place",
    "subject",
    "consumer",
    "dag_id",
    "run_id",
    "task_id",
]

GroupKey: TypeAlias = "tuple[str | None, ...]"

# By what a dry run of a redrive groups letters.
BY_CAUSE: tuple[GroupField, ...] = ("reason", "error_class", "fingerprint")

# Functions, since a fingerprint is computed each time it is read, and most groupings don't use it.
_VALUES: Mapping[GroupField, Callable[[DeadLetter], str | None]] = {
    "reason": lambda letter: letter.death.reason.value,
    "error_class": lambda letter: letter.death.error_class,
    "fingerprint": lambda letter: letter.death.fingerprint,
    "traceback_digest": lambda letter: letter.death.traceback_digest,
    "error_place": lambda letter: letter.death.error_place,
    "subject": lambda letter: readable_text(letter.subject),
    "consumer": lambda letter: letter.death.consumer,
    "dag_id": lambda letter: letter.origin.dag_id if letter.origin else None,
    "run_id": lambda letter: letter.origin.run_id if letter.origin else None,
    "task_id": lambda letter: letter.origin.task_id if letter.origin else None,
}


@dataclass(slots=True)
class LetterGroup:
    """The dead letters of one group.

    :param count: how many letters there are
    :param first: when the first of them died
    :param last: when the last of them died
    :param example: the lowest stream sequence among them
    """

    count: int
    first: datetime
    last: datetime
    example: int

    def merge(self, other: LetterGroup) -> None:
        """Add the letters of another group."""
        self.count += other.count
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.example = min(self.example, other.example)


class LetterGroups(dict[GroupKey, LetterGroup]):
    """Groups by the values that their letters share."""

    def add(self, letter: DeadLetter, fields: Sequence[GroupField]) -> None:
        """Count a letter in its group."""
        died_at = letter.death.died_at
        self.merge(group_of(letter, fields), LetterGroup(1, died_at, died_at, letter.sequence))

    def merge(self, key: GroupKey, group: LetterGroup) -> None:
        """Add letters that are already counted, to the group of the same key if there is one.

        :param group: belongs to these groups afterwards
        """
        known = self.setdefault(key, group)
        if known is not group:
            known.merge(group)

    def largest(self) -> list[tuple[GroupKey, LetterGroup]]:
        """Return the groups in descending order of their size, groups of one size by their first sequence."""
        return sorted(self.items(), key=lambda item: (-item[1].count, item[1].example))


def group_of(letter: DeadLetter, fields: Sequence[GroupField]) -> GroupKey:
    """Return the values of some fields, which identify the letter's group."""
    return tuple(_VALUES[field](letter) for field in fields)


def group_fields(names: Iterable[str] | str) -> tuple[GroupField, ...]:
    """Check the names of fields to group letters by.

    :param names: field names, or one field name
    :raises SelectionError: one of the names is no field
    """
    fields: dict[str, GroupField] = {field: field for field in get_args(GroupField)}
    if not isinstance(names, Iterable):
        raise SelectionError(f"expected fields to group by among {', '.join(fields)}; found {names!r}")
    requested = (names,) if isinstance(names, str) else tuple(names)
    if unknown := [name for name in requested if not isinstance(name, str) or name not in fields]:
        raise SelectionError(f"expected fields to group by among {', '.join(fields)}; found {unknown[0]!r}")
    return tuple(fields[name] for name in requested)
