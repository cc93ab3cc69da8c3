"""Actions on dead letters as a redrive makes them, and how many of them become one record of the audit.

A redrive acts on thousands of letters a second, and what it knows of one is mostly what it knows of the others: that is
held once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.audit.audited_letters import LEAVING_JOB, LetterRecord
from airflow_provider_jetstream.jetstream.audit.letter_ranges import RANGE_WIDTH, LetterColumns, LetterRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.audit.letter_ranges import Action

# Fewer letters of one range have a record each.
LEAST_IN_RANGE: Final = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, eq=False)
class CommonFields:
    """What the actions on many letters have in common; the fields are those of :class:`LetterRecord`."""

    stream: str
    created: str
    action: Action
    new_stream: str | None
    subject: str
    consumer: str | None
    redrives: int
    reason: str
    fingerprint: str
    why: str | None
    who: dict[str, Any]
    run: str | None
    wave: int | None


@dataclass(slots=True, eq=False)
class LetterAction:
    """One action on one dead letter; the fields are those of :class:`LetterRecord`."""

    common: CommonFields
    sequence: int
    new_sequence: int | None
    copy_of: int | None = None
    died_at: datetime | None = None
    changes: dict[str, Any] | None = None
    left_out: dict[str, str] | None = None

    @property
    def action(self) -> Action:
        """What was done."""
        return self.common.action

    @property
    def new_stream(self) -> str | None:
        """The new job's stream, where it isn't the letter's own."""
        return self.common.new_stream

    @property
    def job_id(self) -> str | None:
        """The job's own id, shortened, where it is known."""
        return None

    def record(self) -> LetterRecord:
        """Return the record that is about this action alone."""
        common = {name: getattr(self.common, name) for name in CommonFields.__slots__}
        return LetterRecord(
            **common,
            sequence=self.sequence,
            job_id=self.job_id,
            new_sequence=self.new_sequence,
            copy_of=self.copy_of,
            died_at=self.died_at,
            changes=self.changes,
            left_out=self.left_out,
        )


class RecordedAction(LetterAction):
    """An action of which there is a record.

    :param record: the record
    """

    __slots__ = ("_record",)

    def __init__(self, record: LetterRecord) -> None:
        common = CommonFields(**{name: getattr(record, name) for name in CommonFields.__slots__})
        super().__init__(
            *(common, record.sequence, record.new_sequence, record.copy_of, record.died_at),
            *(record.changes, record.left_out),
        )
        self._record = record

    def record(self) -> LetterRecord:
        """Return the record."""
        return self._record


# What the groups of a record about many letters differ in.
_GroupKey: TypeAlias = tuple[str, str | None, int, str, str, bool, bool]


def sorted_by_range(actions: Sequence[LetterAction]) -> tuple[list[int], list[list[int]]]:
    """Return the positions of the actions that are recorded alone, and those of the actions that share a record."""
    alone: list[int] = []
    ranges: dict[tuple[int, int], list[int]] = {}
    # Actions with equal fields of a record share it; most have the very same ones.
    numbers: dict[int, int] = {}
    kinds: list[tuple[Any, ...]] = []
    for position, action in enumerate(actions):
        if action.changes or action.left_out or action.new_sequence is None:
            alone.append(position)
            continue
        common = action.common
        if (number := numbers.get(id(common))) is None:
            kind = common.action, common.new_stream, common.why, common.run, common.wave, common.who
            if kind not in kinds:
                kinds.append(kind)
            number = numbers[id(common)] = kinds.index(kind)
        key = action.sequence // RANGE_WIDTH, number
        if (positions := ranges.get(key)) is None:
            positions = ranges[key] = []
        positions.append(position)
    for positions in ranges.values():
        if len(positions) < LEAST_IN_RANGE:
            alone += positions
    return sorted(alone), [positions for positions in ranges.values() if len(positions) >= LEAST_IN_RANGE]


def range_of(actions: Sequence[LetterAction]) -> LetterRange:
    """Return one record for letters to which the same was done."""
    groups: dict[_GroupKey, LetterColumns] = {}
    known: dict[tuple[int, bool, bool], LetterColumns] = {}
    for action in actions:
        copy_of, died_at = action.copy_of, action.died_at
        like = id(action.common), copy_of is not None, died_at is not None
        if (columns := known.get(like)) is None:
            common = action.common
            key = common.subject, common.consumer, common.redrives, common.reason, common.fingerprint, *like[1:]
            columns = known[like] = groups.setdefault(key, LetterColumns())
        columns.sequences.append(action.sequence)
        columns.new_sequences.append(action.new_sequence or 0)
        if copy_of is not None:
            columns.copy_of.append(copy_of)
        if died_at is not None:
            columns.died_at.append(_microseconds(died_at))
    common = actions[0].common
    return LetterRange(
        stream=common.stream,
        created=common.created,
        action=common.action,
        new_stream=common.new_stream,
        why=common.why,
        who=common.who,
        run=common.run,
        wave=common.wave,
        groups=tuple(
            columns.group(subject=subject, consumer=consumer, redrives=redrives, reason=reason, fingerprint=fingerprint)
            for (subject, consumer, redrives, reason, fingerprint, *_), columns in groups.items()
        ),
    )


def range_digest(actions: Sequence[LetterAction]) -> str:
    """Return a digest that the same actions of concurrent redrives have, to store the record of them once."""
    common = actions[0].common
    digest = blake2b(f"{common.created}\n{common.action}\n{common.new_stream}\n".encode(), digest_size=16)
    digest.update(array("Q", [action.sequence for action in actions]))
    if common.action not in LEAVING_JOB:
        digest.update(array("Q", [action.new_sequence or 0 for action in actions]))
        return digest.hexdigest()
    # A job that was requeued keeps its sequence: only the time of its death tells one requeue from the next.
    times = [_microseconds(action.died_at or datetime.now(UTC)) for action in actions]
    digest.update(array("q", times))
    return digest.hexdigest()


def _microseconds(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND
