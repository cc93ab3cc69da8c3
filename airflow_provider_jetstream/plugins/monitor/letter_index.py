"""What a scan found of a queue's dead letters: some thirty bytes a letter, and what kinds of them there are."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.plugins.monitor.models import Group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField, Selection

MOST_LETTERS = 1_000_000
MOST_KINDS = 50_000
_SHOWN_GROUPS = 500
# Letters are told from others by these even where a field is missing, since the fingerprint is made of it.
_IN_FINGERPRINT = frozenset({"error_class", "consumer"})


class Kind(NamedTuple):
    """What letters have in common that are told apart only by their sequence."""

    parked: bool
    reason: str
    error_class: str | None
    fingerprint: str
    traceback_digest: str | None
    error_place: str | None
    subject: str
    consumer: str | None
    dag_id: str | None
    run_id: str | None
    task_id: str | None
    map_index: int | None


class DeadLetterNote(NamedTuple):
    """What is kept of a letter.

    :param kind: what it has in common with others
    :param died: when it died, as a timestamp
    :param entry: the last entry of the dead letter queue about it; 0 where there is none
    """

    kind: Kind
    died: float
    entry: int


@dataclass(slots=True)
class _Tally:
    number: int
    count: int
    first: float
    last: float
    example: int


class LetterIndex:
    """The letters of a queue by sequence, without their bodies."""

    def __init__(self) -> None:
        self._sequences: array[int] = array("Q")
        self._numbers: array[int] = array("I")
        self._died: array[float] = array("d")
        self._entries: array[int] = array("Q")
        self._by_number: list[Kind] = []
        self._kinds: dict[Kind, _Tally] = {}
        self.complete = True

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, letter: DeadLetter) -> None:
        """Note a letter.

        :param letter: the letter, of a higher sequence than all before
        """
        self.note(letter.sequence, note_of(letter))

    def note(self, sequence: int, note: DeadLetterNote) -> None:
        """Note a letter of which only this is kept.

        :param sequence: its sequence, higher than that of all before
        :param note: what is kept
        """
        kind, died, entry = note
        tally = self._kinds.get(kind)
        if len(self) >= MOST_LETTERS or (tally is None and len(self._kinds) >= MOST_KINDS):
            self.complete = False
        if not self.complete:
            return
        if tally is None:
            tally = self._kinds[kind] = _Tally(len(self._kinds), 0, died, died, sequence)
            self._by_number.append(kind)
        tally.count += 1
        tally.first, tally.last = min(tally.first, died), max(tally.last, died)
        self._sequences.append(sequence)
        self._numbers.append(tally.number)
        self._died.append(died)
        self._entries.append(entry)

    def take(self, before: LetterIndex, sequence: int, entry: int) -> bool:
        """Note a letter as it was noted before, if nothing was said about it since.

        :param before: where it was noted
        :param sequence: its sequence, higher than that of all before
        :param entry: the last entry of the dead letter queue about it
        :return: whether that could be done
        """
        place = before.place_of(sequence, entry)
        if place is None:
            return False
        self.note(sequence, before.at(place))
        return True

    def place_of(self, sequence: int, entry: int) -> int | None:
        """Find a letter.

        :param sequence: its sequence
        :param entry: the last entry of the dead letter queue about it
        :return: its place; ``None`` where it isn't noted, or another entry was the last one then
        """
        place = bisect_left(self._sequences, sequence)
        if place == len(self) or self._sequences[place] != sequence or self._entries[place] != entry:
            return None
        return place

    def at(self, place: int) -> DeadLetterNote:
        """Give what is noted of a letter.

        :param place: its place
        :return: the note
        """
        return DeadLetterNote(self._by_number[self._numbers[place]], self._died[place], self._entries[place])

    def count(self, selection: Selection) -> int:
        """Count the letters that are meant.

        :param selection: which
        :return: how many there are
        """
        return sum(tally.count for _, tally in self._meant(selection))

    def page(self, selection: Selection, after: int, limit: int) -> tuple[list[int], bool]:
        """Give the sequences of some of the letters that are meant.

        :param selection: which
        :param after: only higher sequences
        :param limit: how many
        :return: the sequences in order, and whether there are more behind them
        """
        numbers = {tally.number for _, tally in self._meant(selection)}
        found: list[int] = []
        for place in range(bisect_right(self._sequences, after), len(self)):
            if self._numbers[place] in numbers:
                if len(found) == limit:
                    return found, True
                found.append(self._sequences[place])
        return found, False

    def groups(self, selection: Selection, group_by: Sequence[GroupField]) -> tuple[list[Group], int]:
        """Put letters together that are alike.

        :param selection: which letters
        :param group_by: what letters of a group share
        :return: the largest groups, and how many more there are
        """
        merged: dict[tuple[str | None, ...], _Tally] = {}
        for kind, tally in self._meant(selection):
            key = tuple(getattr(kind, name) for name in group_by)
            group = merged.get(key)
            if group is None:
                merged[key] = _Tally(0, tally.count, tally.first, tally.last, tally.example)
            else:
                group.count += tally.count
                group.first, group.last = min(group.first, tally.first), max(group.last, tally.last)
                group.example = min(group.example, tally.example)
        largest = sorted(merged.items(), key=lambda item: (-item[1].count, item[1].example))
        base = selection.model_dump(mode="json", exclude_defaults=True)
        return [
            Group(
                key=dict(zip(group_by, key, strict=True)),
                count=group.count,
                first_seen=datetime.fromtimestamp(group.first, UTC),
                last_seen=datetime.fromtimestamp(group.last, UTC),
                example=group.example,
                select=_select(base, group_by, key),
            )
            for key, group in largest[:_SHOWN_GROUPS]
        ], len(largest[_SHOWN_GROUPS:])

    def of_origin(self, dag_id: str, run_id: str) -> dict[tuple[str | None, int | None], tuple[int, int]]:
        """Count the letters that a DAG run published.

        :param dag_id: the DAG
        :param run_id: the run
        :return: letters in circulation and parked ones, by task and map index
        """
        found: dict[tuple[str | None, int | None], tuple[int, int]] = {}
        for kind, tally in self._kinds.items():
            if kind.dag_id == dag_id and kind.run_id == run_id:
                place = (kind.task_id, kind.map_index)
                dead, parked = found.get(place, (0, 0))
                found[place] = (dead, parked + tally.count) if kind.parked else (dead + tally.count, parked)
        return found

    def _meant(self, selection: Selection) -> Iterable[tuple[Kind, _Tally]]:
        return ((kind, tally) for kind, tally in self._kinds.items() if _matches(selection, kind))


def note_of(letter: DeadLetter) -> DeadLetterNote:
    """Take down what is kept of a letter.

    :param letter: the letter
    :return: the note
    """
    return DeadLetterNote(_kind_of(letter), letter.death.died_at.timestamp(), max(letter.entries, default=0))


def _kind_of(letter: DeadLetter) -> Kind:
    death, origin = letter.death, letter.origin
    return Kind(
        parked=letter.parked is not None,
        reason=death.reason.value,
        error_class=death.error_class,
        fingerprint=death.fingerprint,
        traceback_digest=death.traceback_digest,
        error_place=death.error_place,
        subject=letter.subject,
        consumer=death.consumer,
        dag_id=origin.dag_id if origin else None,
        run_id=origin.run_id if origin else None,
        task_id=origin.task_id if origin else None,
        map_index=origin.map_index if origin else None,
    )


def _matches(selection: Selection, kind: Kind) -> bool:
    same = ("error_class", "fingerprint", "traceback_digest", "consumer", "dag_id", "run_id", "task_id")
    return (
        kind.parked == selection.parked
        and (selection.reasons is None or kind.reason in selection.reasons)
        and all(getattr(selection, name) in (None, getattr(kind, name)) for name in same)
        and (selection.subject is None or covers(selection.subject, kind.subject))
    )


def _select(
    base: dict[str, object], group_by: Sequence[GroupField], key: tuple[str | None, ...]
) -> dict[str, object] | None:
    chosen = dict(base)
    for name, value in zip(group_by, key, strict=True):
        if name == "reason":
            chosen["reasons"] = [value]
        elif name == "error_place" or (value is None and not (name in _IN_FINGERPRINT and "fingerprint" in group_by)):
            return None
        elif value is not None:
            chosen[name] = value
    return chosen
