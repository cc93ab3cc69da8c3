"""The state of awaited jobs, and the sets of their sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, MutableSet
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.task_values import TaskReport
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from collections.abc import Set as AbstractSet
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.waiting.ends import JobEnd

_MAX_REASONS = 20
_MAX_NOTES = 100
_MAX_NOTE = 500
_MAX_COPIES = 500
_ADDED_AT_ONCE = 20_000
# From so many jobs on a wait has a set that never stops the event loop, and each end asks it whether it has the job.
MANY: Final = 5_000
# A part is a bitmap of 1,024 sequences: about as large as a set of one, where sequences are far apart. A set of a
# million has 60 MB, and stops the event loop whenever it grows and whenever Python's collector looks at it.
_BITS: Final = 10
_LAST: Final = (1 << _BITS) - 1
_BYTES: Final = 1 << _BITS - 3
_FULL: Final = b"\xff" * _BYTES

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# Most reports are about one job, and a triggerer has ten thousand of them: a container is made when something is in it.
_NONE: Final[frozenset[int]] = frozenset()
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


def _nothing() -> Mapping[Any, Any]:
    return _NOTHING


class ManySequences(MutableSet[int]):
    """A set of stream sequences, for very many of them."""

    __slots__ = ("_count", "_parts")

    def __init__(self, sequences: Iterable[int] = ()) -> None:
        self._parts: dict[int, bytearray] = {}
        self._count = 0
        for sequence in sequences:
            self.add(sequence)

    def add_range(self, first: int, last: int) -> None:
        """Add all sequences from one to another."""
        while first <= last:
            end = min(last, first | _LAST)
            if end - first == _LAST:
                number = first >> _BITS
                self._count += (1 << _BITS) - _held(self._parts.get(number, b""))
                self._parts[number] = bytearray(_FULL)
            else:
                for sequence in range(first, end + 1):
                    self.add(sequence)
            first = end + 1

    def add(self, value: int) -> None:
        """Add a sequence."""
        part = self._parts.get(value >> _BITS)
        if part is None:
            part = self._parts[value >> _BITS] = bytearray(_BYTES)
        place, bit = (value & _LAST) >> 3, 1 << (value & 7)
        if not part[place] & bit:
            part[place] |= bit
            self._count += 1

    def discard(self, value: int) -> None:
        """Remove a sequence, if it is there."""
        part = self._parts.get(value >> _BITS)
        place, bit = (value & _LAST) >> 3, 1 << (value & 7)
        if part is not None and part[place] & bit:
            part[place] ^= bit
            self._count -= 1
            if not part[place] and not any(part):
                del self._parts[value >> _BITS]

    def ordered_parts(self) -> Iterator[list[int]]:
        """Yield all sequences in order, some at a time."""
        for number in sorted(self._parts):
            # It may be gone meanwhile.
            yield _sequences(number, self._parts.get(number, b""))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first and last sequence of each run of consecutive ones."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(self._parts):
            part, start = self._parts.get(number, b""), number << _BITS
            for first, last in [(start, start | _LAST)] if part == _FULL else sequence_ranges(_sequences(number, part)):
                if ranges and ranges[-1][1] == first - 1:
                    ranges[-1] = (ranges[-1][0], last)
                else:
                    ranges.append((first, last))
        return ranges

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        part = self._parts.get(value >> _BITS)
        return part is not None and bool(part[(value & _LAST) >> 3] & 1 << (value & 7))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ordered_parts())

    def __len__(self) -> int:
        return self._count


@dataclass(slots=True)
class WaitReport(TaskReport):
    """The state of awaited jobs, by their stream sequences.

    :param awaited: jobs that haven't ended
    :param completed: jobs that ended well
    :param dead: dead letters, with the advisory's reason
    :param cancelled: jobs that workers found cancelled, with the reason of the cancellation
    :param unaccounted: jobs that are gone without a stored end
    :param results_at: by job, the sequence in the events stream of the completion that holds its result
    :param results: what handlers returned, by the job's id
    :param results_left_out: how many results exceed the size limit
    :param unsampled_consumers: where jobs are unaccounted for, the consumers whose acknowledged jobs may leave no
        evidence, with the reason
    :param attempts: how often jobs were delivered that weren't delivered exactly once; 0 where their end doesn't say it
    :param copies: of redriven jobs, the stream sequences of the new jobs whose ends these are
    :param last_end_at: when the last event of an end was stored
    """

    awaited: MutableSet[int]
    completed: AbstractSet[int] = _NONE
    dead: Mapping[int, str] = field(default_factory=_nothing)
    cancelled: Mapping[int, str] = field(default_factory=_nothing)
    unaccounted: AbstractSet[int] = _NONE
    results_at: Mapping[int, int] = field(default_factory=_nothing)
    results: Mapping[str, Any] = field(default_factory=_nothing)
    results_left_out: int = 0
    unsampled_consumers: Mapping[str, str] = field(default_factory=_nothing)
    attempts: Mapping[int, int] = field(default_factory=_nothing)
    copies: Mapping[int, int] = field(default_factory=_nothing)
    last_end_at: datetime | None = None

    def record(self, end: JobEnd) -> bool:
        """Record an end and return whether it changes the state of a job."""
        sequence = end.sequence
        # A worker slower than its ack wait may complete a job after its death was reported: then it is completed.
        final = end.kind in (EndKind.COMPLETED, EndKind.CANCELLED)
        if sequence not in self.awaited and not (final and (sequence in self.dead or sequence in self.unaccounted)):
            return False
        self.last_end_at = max(self.last_end_at or end.stored_at, end.stored_at)
        self.awaited.discard(sequence)
        if sequence in self.dead:
            self.dead = _without(self.dead, sequence)
        if sequence in self.unaccounted:
            self.unaccounted = _changeable(self.unaccounted)
            self.unaccounted.discard(sequence)
        if sequence in self.attempts:
            self.attempts = _without(self.attempts, sequence)
        if end.attempts != 1 and end.kind is not EndKind.UNACCOUNTED:
            self.attempts = _with(self.attempts, sequence, end.attempts)
        if end.kind is EndKind.COMPLETED:
            self.completed = completed = _changeable(self.completed)
            completed.add(sequence)
            if end.has_result:
                self.results_at = _with(self.results_at, sequence, end.event_sequence)
        elif end.kind is EndKind.CANCELLED:
            self.cancelled = _with(self.cancelled, sequence, end.note)
        elif end.kind is EndKind.DEAD:
            self.dead = _with(self.dead, sequence, end.note)
        else:
            self.unaccounted = unaccounted = _changeable(self.unaccounted)
            unaccounted.add(sequence)
        return True

    def note_copy(self, sequence: int, copy: int) -> None:
        """Note the new job of a redriven one, in the same stream."""
        self.copies = _with(self.copies, sequence, copy)

    def is_unsettled(self, sequence: object) -> bool:
        """Return whether the state of a job may still change."""
        return sequence in self.awaited or sequence in self.dead or sequence in self.unaccounted

    @property
    def unsettled_count(self) -> int:
        """How many jobs there are whose state may still change."""
        return len(self.awaited) + len(self.dead) + len(self.unaccounted)

    def unsettled(self) -> list[int]:
        """Return the jobs whose state may still change: the awaited, and those that may yet turn out completed."""
        return [*self.awaited, *self.dead, *self.unaccounted]

    def as_json(self) -> dict[str, Any]:
        """Return counts, sequences as ranges, results by job id, and details of single jobs, for an event."""
        return {
            "awaited": len(self.awaited),
            "completed": len(self.completed),
            "dead": len(self.dead),
            "completed_sequences": ranges_of(self.completed),
            "dead_sequences": sequence_ranges(self.dead),
            "dead_reasons": dict(sorted(self.dead.items())[:_MAX_REASONS]),
            "cancelled": len(self.cancelled),
            "cancelled_sequences": sequence_ranges(self.cancelled),
            "cancelled_reasons": dict(sorted(self.cancelled.items())[:_MAX_REASONS]),
            "unaccounted": len(self.unaccounted),
            "unaccounted_sequences": sequence_ranges(self.unaccounted),
            "results": dict(self.results),
            "results_left_out": self.results_left_out,
            **({"unsampled_consumers": dict(self.unsampled_consumers)} if self.unsampled_consumers else {}),
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """Return what the reports of single jobs need: ranges by what they have in common."""
        notes = _grouped((sequence, note[:_MAX_NOTE]) for sequence, note in {**self.dead, **self.cancelled}.items())
        return {
            "awaited": ranges_of(self.awaited),
            "with_result": sequence_ranges(self.results_at),
            "copies": sorted(self.copies.items())[:_MAX_COPIES],
            "attempts": _grouped((sequence, str(count)) for sequence, count in self.attempts.items()),
            "notes": notes[:_MAX_NOTES],
        }


def _changeable(sequences: AbstractSet[int]) -> MutableSet[int]:
    return sequences if isinstance(sequences, MutableSet) else set(sequences)


def _with(values: Mapping[_Key, _Value], key: _Key, value: _Value) -> dict[_Key, _Value]:
    changed = values if isinstance(values, dict) else dict(values)
    changed[key] = value
    return changed


def _without(values: Mapping[_Key, _Value], key: _Key) -> dict[_Key, _Value]:
    changed = values if isinstance(values, dict) else dict(values)
    del changed[key]
    return changed


def _grouped(named: Iterable[tuple[int, str]]) -> list[tuple[str, list[tuple[int, int]]]]:
    groups: dict[str, list[int]] = {}
    for sequence, text in sorted(named):
        groups.setdefault(text, []).append(sequence)
    return [(text, sequence_ranges(sequences)) for text, sequences in groups.items()]


def ranges_of(sequences: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last sequence of each run of consecutive ones."""
    return sequences.ranges() if isinstance(sequences, ManySequences) else sequence_ranges(sequences)


async def report_on(ranges: Iterable[Sequence[int]]) -> WaitReport:
    """Return the report on jobs that haven't ended, and let others use the event loop meanwhile.

    :param ranges: their stream sequences, as first and last of each range
    """
    sequences = ManySequences()
    added = 0
    for first, last in ranges:
        for start in range(first, last + 1, _ADDED_AT_ONCE):
            end = min(start + _ADDED_AT_ONCE - 1, last)
            sequences.add_range(start, end)
            added += end - start + 1
            if added >= _ADDED_AT_ONCE:
                added = 0
                await asyncio.sleep(0)
    if len(sequences) < MANY:
        return WaitReport(set(sequences))
    return WaitReport(sequences, completed=ManySequences())


def _held(part: bytes | bytearray) -> int:
    return int.from_bytes(part).bit_count()


def _sequences(number: int, part: bytes | bytearray) -> list[int]:
    start = number << _BITS
    return [start + 8 * place + bit for place, byte in enumerate(part) if byte for bit in range(8) if byte & 1 << bit]
