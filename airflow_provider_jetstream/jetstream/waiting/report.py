"""The state of awaited jobs, and the sets of their sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSet
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from airflow_provider_jetstream.jetstream.client.concurrency import pause_if_due
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
# From so many jobs on a wait has a set that never stops the event loop, and each end asks it whether it has the job.
MANY: Final = 5_000
# A part is a bitmap of 1,024 sequences: about as large as a set of one, where sequences are far apart. A set of a
# million has 60 MB, and stops the event loop whenever it grows and whenever Python's collector looks at it.
_BITS: Final = 10
_LAST: Final = (1 << _BITS) - 1

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
        self._parts: dict[int, int] = {}
        self._count = 0
        for sequence in sequences:
            self.add(sequence)

    def add(self, value: int) -> None:
        """Add a sequence."""
        number, bit = value >> _BITS, 1 << (value & _LAST)
        part = self._parts.get(number, 0)
        if not part & bit:
            self._parts[number] = part | bit
            self._count += 1

    def add_range(self, first: int, last: int) -> None:
        """Add all sequences from one to another."""
        while first <= last:
            number, end = first >> _BITS, min(last, first | _LAST)
            part, new = self._parts.get(number, 0), ((1 << (end - first + 1)) - 1) << (first & _LAST)
            self._count += (new & ~part).bit_count()
            self._parts[number] = part | new
            first = end + 1

    def discard(self, value: int) -> None:
        """Remove a sequence, if it is there."""
        number, bit = value >> _BITS, 1 << (value & _LAST)
        part = self._parts.get(number, 0)
        if part & bit:
            self._count -= 1
            self._parts[number] = part ^ bit
            if part == bit:
                del self._parts[number]

    def ranges(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the first and last sequence of each run of consecutive ones, from a sequence on; few at a time."""
        first = last = -1
        for number in sorted(number for number in self._parts if number >= start >> _BITS):
            # It may be gone meanwhile.
            part, offset = self._parts.get(number, 0), number << _BITS
            if offset < start:
                part = part >> (start - offset) << (start - offset)
            while part:
                zeros = (part & -part).bit_length() - 1
                part >>= zeros
                ones = (~part & (part + 1)).bit_length() - 1
                part >>= ones
                low, offset = offset + zeros, offset + zeros + ones
                if low == last + 1 and last >= 0:
                    last = offset - 1
                    continue
                if last >= 0:
                    yield first, last
                first, last = low, offset - 1
        if last >= 0:
            yield first, last

    def from_(self, start: int) -> Iterator[int]:
        """Yield the sequences from one on, in order."""
        return chain.from_iterable(range(first, last + 1) for first, last in self.ranges(start))

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int):
            return False
        return bool(self._parts.get(value >> _BITS, 0) >> (value & _LAST) & 1)

    def __iter__(self) -> Iterator[int]:
        return self.from_(0)

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
        sequence, kind = end.sequence, end.kind
        if sequence not in self.awaited and not (end.is_final and self.is_unsettled(sequence)):
            return False
        self.last_end_at = max(self.last_end_at or end.stored_at, end.stored_at)
        self.awaited.discard(sequence)
        self.dead, self.attempts = _without(self.dead, sequence), _without(self.attempts, sequence)
        if sequence in self.unaccounted:
            self.unaccounted = unaccounted = _and(self.unaccounted, sequence)
            unaccounted.discard(sequence)
        if end.attempts != 1 and kind is not EndKind.UNACCOUNTED:
            self.attempts = _with(self.attempts, sequence, end.attempts)
        if kind is EndKind.COMPLETED:
            self.completed = _and(self.completed, sequence)
            if end.has_result:
                self.results_at = _with(self.results_at, sequence, end.event_sequence)
        elif kind is EndKind.CANCELLED:
            self.cancelled = _with(self.cancelled, sequence, end.note)
        elif kind is EndKind.DEAD:
            self.dead = _with(self.dead, sequence, end.note)
        else:
            self.unaccounted = _and(self.unaccounted, sequence)
        return True

    def progress(self) -> str:
        """Return how many jobs have ended in which way, and how many haven't, in words."""
        ended = (
            f"{len(found)} {state}"
            for found, state in (
                (self.completed, "completed"),
                (self.dead, "dead"),
                (self.cancelled, "cancelled"),
                (self.unaccounted, "unaccounted for"),
            )
        )
        return f"{', '.join(ended)}, {len(self.awaited)} to go"

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
        """Return the jobs whose state may still change: awaited ones, and dead ones that may yet complete."""
        return [*self.awaited, *self.dead, *self.unaccounted]

    def as_json(self) -> dict[str, Any]:
        """Return counts, sequences as ranges, results by job id, and details of single jobs, for an event."""
        unsampled = {"unsampled_consumers": dict(self.unsampled_consumers)} if self.unsampled_consumers else {}
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
            **unsampled,
            # What the reports of single jobs need: ranges by what they have in common.
            "details": {
                "awaited": ranges_of(self.awaited),
                "with_result": sequence_ranges(self.results_at),
                "copies": sorted(self.copies.items())[:_MAX_COPIES],
                "attempts": _grouped((sequence, str(count)) for sequence, count in self.attempts.items()),
                "notes": _grouped(
                    (sequence, note[:_MAX_NOTE]) for sequence, note in {**self.dead, **self.cancelled}.items()
                )[:_MAX_NOTES],
            },
        }


def _and(sequences: AbstractSet[int], sequence: int) -> MutableSet[int]:
    changed = sequences if isinstance(sequences, MutableSet) else set(sequences)
    changed.add(sequence)
    return changed


def _with(values: Mapping[_Key, _Value], key: _Key, value: _Value) -> dict[_Key, _Value]:
    changed = values if isinstance(values, dict) else dict(values)
    changed[key] = value
    return changed


def _without(values: Mapping[_Key, _Value], key: _Key) -> Mapping[_Key, _Value]:
    if key in values:
        values = values if isinstance(values, dict) else dict(values)
        del values[key]
    return values


def _grouped(named: Iterable[tuple[int, str]]) -> list[tuple[str, list[tuple[int, int]]]]:
    groups: dict[str, list[int]] = {}
    for sequence, text in sorted(named):
        groups.setdefault(text, []).append(sequence)
    return [(text, sequence_ranges(sequences)) for text, sequences in groups.items()]


def ranges_of(sequences: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last sequence of each run of consecutive ones."""
    return list(sequences.ranges()) if isinstance(sequences, ManySequences) else sequence_ranges(sequences)


async def report_on(ranges: Iterable[Sequence[int]]) -> WaitReport:
    """Return the report on jobs that haven't ended, and let others use the event loop meanwhile.

    :param ranges: their stream sequences, as first and last of each range
    """
    sequences = ManySequences()
    for first, last in ranges:
        sequences.add_range(first, last)
        await pause_if_due()
    if len(sequences) < MANY:
        return WaitReport(set(sequences))
    return WaitReport(sequences, completed=ManySequences())
