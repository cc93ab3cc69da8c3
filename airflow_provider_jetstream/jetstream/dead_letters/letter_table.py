"""The dead letters of a queue without their bodies: some forty bytes a letter, and one group for all that are alike."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.death_times import DeathTimes
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, GroupKey, group_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

_ALL_FIELDS: Final[tuple[GroupField, ...]] = get_args(GroupField)
_EXACT: Final[tuple[GroupField, ...]] = (
    *("error_class", "fingerprint", "traceback_digest", "consumer"),
    *("dag_id", "run_id", "task_id"),
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class AlikeLetters(NamedTuple):
    """What alike letters share.

    :param parked: whether they are out of circulation
    :param taker: the consumer of the stored jobs; ``None`` for letters whose job is gone
    :param values: the values of the table's fields, in their order
    """

    parked: bool
    taker: str | None
    values: GroupKey


class LettersOfKind:
    """Letters that are alike, in the order of their sequences.

    :ivar died_at: when each died, in microseconds since 1970
    :ivar times: the same in their own order
    """

    __slots__ = ("died_at", "sequences", "times")

    def __init__(self) -> None:
        self.sequences: array[int] = array("Q")
        self.died_at: array[int] = array("q")
        self.times = DeathTimes()


class LetterTable:
    """Dead letters by the sequences of their jobs.

    ``changes`` counts what was added and removed.

    :param fields: the fields by which letters can be selected and grouped
    """

    def __init__(self, fields: Sequence[GroupField] = ()) -> None:
        self.changes = 0
        self.fields = tuple(field for field in _ALL_FIELDS if field in fields or field == "reason")
        self._positions: Mapping[str, int] = {field: position for position, field in enumerate(self.fields)}
        self._kinds: dict[AlikeLetters, LettersOfKind] = {}
        self._numbers: dict[AlikeLetters, int] = {}
        self._by_number: list[AlikeLetters] = []
        self._sequences: array[int] = array("Q")
        self._kind_of: array[int] = array("I")

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        return self._find(sequence) is not None

    def put(self, letter: DeadLetter, taker: str | None) -> None:
        """Add a letter, in place of what is known of its job.

        :param taker: the consumer that its job is for, where the job is stored
        """
        kind = AlikeLetters(letter.parked is not None, taker, group_of(letter, self.fields))
        self.remove(letter.sequence)
        letters = self._kinds.get(kind)
        if letters is None:
            letters = self._kinds[kind] = LettersOfKind()
            if kind not in self._numbers:
                self._numbers[kind] = len(self._by_number)
                self._by_number.append(kind)
        _insert(self._sequences, self._kind_of, letter.sequence, self._numbers[kind])
        died_at = (letter.death.died_at - _EPOCH) // _MICROSECOND
        _insert(letters.sequences, letters.died_at, letter.sequence, died_at)
        letters.times.add(died_at)
        self.changes += 1

    def remove(self, sequence: int) -> None:
        """Forget a letter; without effect where there is none of this sequence."""
        if (position := self._find(sequence)) is None:
            return
        kind = self._by_number[self._kind_of[position]]
        letters = self._kinds[kind]
        within = bisect_left(letters.sequences, sequence)
        letters.times.remove(letters.died_at[within])
        del letters.sequences[within], letters.died_at[within]
        del self._sequences[position], self._kind_of[position]
        if not letters.sequences:
            del self._kinds[kind]
        self.changes += 1

    def stored_below(self, sequence: int) -> Iterator[int]:
        """Return the sequences below a sequence of the letters whose jobs are stored."""
        for kind, letters in self._kinds.items():
            if kind.taker is not None:
                yield from letters.sequences[: bisect_left(letters.sequences, sequence)]

    def is_stored(self, sequence: int) -> bool:
        """Return whether it is a letter whose job is stored."""
        position = self._find(sequence)
        return position is not None and self._by_number[self._kind_of[position]].taker is not None

    def count_taken(self, taker: str, above: int = 0) -> int:
        """Count the letters whose jobs are stored for a consumer.

        :param above: only those of higher sequences
        """
        return sum(
            len(letters.sequences) - (bisect_right(letters.sequences, above) if above else 0)
            for kind, letters in self._kinds.items()
            if kind.taker == taker
        )

    @property
    def kinds(self) -> Sequence[AlikeLetters]:
        """Every kind that any letter was of so far; later ones come behind these."""
        return self._by_number

    def letters_of(self, kind: AlikeLetters) -> LettersOfKind | None:
        """Return the letters of a kind."""
        return self._kinds.get(kind)

    def all_sequences(self) -> array[int]:
        """Return the sequences of all letters in order."""
        return self._sequences

    def values_of(self, kind: AlikeLetters, fields: Sequence[GroupField]) -> GroupKey:
        """Return the values of some of the table's fields."""
        return tuple(kind.values[self._positions[field]] for field in fields)

    def matches(self, selection: Selection, kind: AlikeLetters) -> bool:
        """Return whether a selection without sequences matches the letters of a kind, whatever their age."""

        def value(field: GroupField) -> str | None:
            return kind.values[self._positions[field]]

        reason = value("reason")
        return (
            kind.parked == selection.parked
            and (reason in selection.reasons if selection.reasons is not None else reason != Reason.UNDELIVERABLE)
            and all(getattr(selection, field) in (None, value(field)) for field in _EXACT if field in self._positions)
            and (selection.subject is None or covers(readable_text(selection.subject), str(value("subject"))))
        )

    def _find(self, sequence: int) -> int | None:
        position = bisect_left(self._sequences, sequence)
        return position if position < len(self) and self._sequences[position] == sequence else None


def selection_fields(selection: Selection) -> tuple[GroupField, ...]:
    """Return the fields that a table needs to select by."""
    return tuple(field for field in (*_EXACT, "subject") if getattr(selection, field) is not None)


def _insert(keys: array[int], values: array[int], key: int, value: int) -> None:
    if not keys or key > keys[-1]:
        keys.append(key)
        values.append(value)
        return
    position = bisect_left(keys, key)
    keys.insert(position, key)
    values.insert(position, value)
