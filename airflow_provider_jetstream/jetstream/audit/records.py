"""The audit's records: one action on one dead letter, or on many of them, and the progress of a redrive.

A redrive of many letters would store as many records as jobs. So what all letters of a record about a range have in
common is stored once, and what differs as columns: sequences as runs, times as differences. Such a record is about
letters of one :data:`RANGE_WIDTH`, so that a reader finds those that may be about a letter by the letter's sequence.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticSerializationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.evidence import proves_nothing
from airflow_provider_jetstream.jetstream.limits import INTEGER, SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# One record of the audit is about letters whose stream sequences give the same number when they are divided by this.
RANGE_WIDTH: Final = 1_024

Action = Literal["redriven", "requeued", "parked", "handled"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Nothing died later: year 9999.
_LATEST = 253_402_300_799_000_000

_Sequence: TypeAlias = Annotated[int, Field(ge=0, le=SEQUENCE)]
# First value, how many there are, and the step from one to the next.
_Run: TypeAlias = tuple[_Sequence, Annotated[int, Field(ge=1, le=RANGE_WIDTH)], Annotated[int, Field(ge=0, le=INTEGER)]]
_Runs: TypeAlias = Annotated[tuple[_Run, ...], Field(max_length=RANGE_WIDTH)]
# The first time in microseconds since 1970, then the difference of each to the one before.
_Times: TypeAlias = Annotated[tuple[Annotated[int, Field(ge=-_LATEST, le=_LATEST)], ...], Field(max_length=RANGE_WIDTH)]


def letter_range_subject(queue: str, sequence: int, record: str) -> str:
    """Return the subject on which the audit records what was done to many letters; ``record`` is unique, one token.

    :param sequence: the stream sequence of any of the letters, which are all of one :data:`RANGE_WIDTH`
    """
    return f"audit.{queue}.ranges.{sequence // RANGE_WIDTH}.{record}"


def letter_range_filter(queue: object, sequence: int | None = None) -> str:
    """Return the filter of the records about many letters; of those that may be about one letter, by its sequence."""
    return f"audit.{queue}.ranges.{'*' if sequence is None else sequence // RANGE_WIDTH}.*"


class SimilarLetters(BaseModel):
    """Letters of a record that have more in common.

    :param subject: the new jobs' subject
    :param consumer: the consumer that delivered the jobs, if any did
    :param redrives: how often the jobs have been redriven now
    :param reason: why the jobs were dead
    :param fingerprint: the fingerprint of their deaths
    :param sequences: the letters' stream sequences
    :param new_sequences: those of what was stored for each of them; the letters' own where absent
    :param copy_of: the letters of which the jobs were copies, where they were
    :param died_at: when each died, where that is known
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    subject: str
    consumer: str | None = None
    redrives: int = 0
    reason: str
    fingerprint: str
    sequences: _Runs
    new_sequences: _Runs | None = None
    copy_of: _Runs | None = None
    died_at: _Times | None = None

    @model_validator(mode="after")
    def _require_one_value_each(self) -> Self:
        letters = _count(self.sequences)
        columns = [_count(runs) for runs in (self.new_sequences, self.copy_of) if runs is not None]
        if self.died_at is not None:
            columns.append(len(self.died_at))
        if letters > RANGE_WIDTH or any(count != letters for count in columns):
            raise ValueError(f"expected the same number of values for each letter, found {letters} and {columns}")
        times = list(accumulate(self.died_at or (0,)))
        if min(times, default=0) < 0 or max(times, default=0) > _LATEST:
            raise ValueError("expected times from 1970 to 9999")
        all_runs = (*self.sequences, *(self.new_sequences or ()), *(self.copy_of or ()))
        if any(first + (count - 1) * step > SEQUENCE for first, count, step in all_runs):
            raise ValueError(f"expected sequences up to {SEQUENCE}")
        return self


class LetterRange(BaseModel):
    """One action on many dead letters.

    :param stream: the letters' stream
    :param created: when it was created, in the server's own text
    :param action: what was done, as a record about one letter says it
    :param new_stream: the new jobs' stream, where it isn't the letters' own
    :param why: the reason given for it
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param run: the key of the redrive
    :param wave: the wave of the redrive, where it has waves
    :param groups: the letters
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str
    action: Action
    new_stream: str | None = None
    why: str | None = None
    who: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    wave: int | None = None
    groups: Annotated[tuple[SimilarLetters, ...], Field(max_length=RANGE_WIDTH)]

    @model_validator(mode="after")
    def _require_one_width(self) -> Self:
        runs = [run for group in self.groups for run in group.sequences]
        numbers = {
            sequence // RANGE_WIDTH for first, count, step in runs for sequence in (first, first + (count - 1) * step)
        }
        if len(numbers) != 1 or _count(runs) > RANGE_WIDTH:
            raise ValueError(f"expected letters of one range of {RANGE_WIDTH} sequences, found {sorted(numbers)[:3]}")
        return self

    @property
    def in_place(self) -> bool:
        """Whether the stored jobs themselves are delivered again, rather than copies."""
        return self.action == "requeued"

    @property
    def number(self) -> int:
        """The number of the range of which the letters are."""
        return self.groups[0].sequences[0][0] // RANGE_WIDTH

    def sequences(self) -> Iterator[int]:
        """Return the stream sequences of all letters."""
        for group in self.groups:
            yield from _values(group.sequences)

    def letters(self) -> Iterator[dict[str, Any]]:
        """Return for each letter the fields of the record that would be about it alone."""
        common = self.model_dump(exclude={"groups"})
        for group in self.groups:
            fields = group.model_dump(include={"subject", "consumer", "redrives", "reason", "fingerprint"})
            times = accumulate(group.died_at) if group.died_at is not None else repeat(None)
            columns = zip(
                _values(group.sequences),
                _values(group.sequences if group.new_sequences is None else group.new_sequences),
                repeat(None) if group.copy_of is None else _values(group.copy_of),
                times,
                strict=False,
            )
            for sequence, new_sequence, copy_of, time in columns:
                died_at = None if time is None else _EPOCH + time * _MICROSECOND
                yield {
                    **common,
                    **fields,
                    "sequence": sequence,
                    "new_sequence": new_sequence,
                    "copy_of": copy_of,
                    "died_at": died_at,
                }


@dataclass(slots=True)
class LetterColumns:
    """Collects the letters of a group for :class:`LetterRange`; their times are microseconds since 1970."""

    sequences: list[int] = field(default_factory=list)
    new_sequences: list[int] = field(default_factory=list)
    copy_of: list[int] = field(default_factory=list)
    died_at: list[int] = field(default_factory=list)

    def group(self, **fields: Any) -> SimilarLetters:
        """Return the group.

        :param fields: what its letters have in common
        """
        times = self.died_at
        return SimilarLetters(
            **fields,
            sequences=_runs(self.sequences),
            new_sequences=None if self.new_sequences == self.sequences else _runs(self.new_sequences),
            copy_of=_runs(self.copy_of) if self.copy_of else None,
            died_at=tuple(time - before for before, time in zip([0, *times], times, strict=False)) or None,
        )


class RangesOfLetters:
    """The records about ranges that may be about some letters, as they were read at one moment.

    :param widths: by number of the range: the records in the order of the audit, each with its sequence there and when
        it was stored
    """

    def __init__(self, widths: dict[int, list[tuple[int, datetime, LetterRange]]]) -> None:
        self._widths = widths
        # By letter: the last record about it.
        self._last: dict[int, tuple[int, datetime, LetterRange]] = {}
        for records in widths.values():
            for record in records:
                self._last.update(zip(record[2].sequences(), repeat(record), strict=False))

    def covers(self, sequence: int) -> bool:
        """Return whether these are all records about a letter."""
        return sequence // RANGE_WIDTH in self._widths

    def last(self, sequence: int) -> tuple[int, datetime, LetterRange] | None:
        """Return the last record about a letter, with its sequence in the audit and when it was stored."""
        return self._last.get(sequence)

    def letters(self) -> set[int]:
        """Return the stream sequences of all letters that have a record."""
        return set(self._last)

    def about(self, sequence: int) -> Iterator[tuple[int, datetime, LetterRange]]:
        """Return all records about a letter, oldest first."""
        for record in self._widths.get(sequence // RANGE_WIDTH, ()):
            if sequence in record[2].sequences():
                yield record


async def read_ranges(
    connection: Connection, audit: str, queue: str, created: str, sequences: Iterable[int]
) -> RangesOfLetters:
    """Read the records about ranges that may be about letters.

    :param audit: the audit's stream
    :param queue: the work queue
    :param created: when it was created, in the server's own text
    :param sequences: the letters' stream sequences
    """
    numbers = sorted({sequence // RANGE_WIDTH for sequence in sequences})

    async def read(number: int) -> list[StoredMessage]:
        return await _read_width(connection, audit, letter_range_filter(queue, number * RANGE_WIDTH))

    widths: dict[int, list[tuple[int, datetime, LetterRange]]] = {}
    for number, messages in zip(numbers, await map_concurrently(read, numbers), strict=True):
        records = ((message, parse_range(message)) for message in messages)
        widths[number] = [
            (message.sequence, message.stored_at, record)
            for message, record in records
            if record and record.created == created
        ]
    return RangesOfLetters(widths)


async def _read_width(connection: Connection, audit: str, subject: str) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    start = 1
    while True:
        if read := connection.batch_readers.get(audit):
            messages = await read(start, subject)
        else:
            message = await next_message(connection, audit, start, subject)
            messages = [message] if message else []
        if not messages:
            return found
        found += messages
        start = messages[-1].sequence + 1


def parse_range(message: StoredMessage) -> LetterRange | None:
    """Parse a record about a range; ``None`` where the message isn't one."""
    if (record := parse_record(LetterRange, message)) is None:
        return None
    token = message.subject.rpartition(".")[2]
    is_of_subject = message.subject == letter_range_subject(record.stream, record.number * RANGE_WIDTH, token)
    return record if is_of_subject else None


def _count(runs: Sequence[_Run]) -> int:
    return sum(count for _, count, _ in runs)


def _values(runs: Sequence[_Run]) -> Iterator[int]:
    for first, count, step in runs:
        yield from range(first, first + count * step, step) if step else repeat(first, count)


def _runs(values: Sequence[int]) -> tuple[_Run, ...]:
    """Return values as runs; a value smaller than the one before begins another run."""
    if values == list(range(values[0], values[0] + len(values))):
        return ((values[0], len(values), 1),)
    runs: list[_Run] = []
    first, count, step = values[0], 1, 1
    for value in values[1:]:
        difference = value - first - (count - 1) * step
        if difference == step:
            count += 1
        elif count == 1 and difference > 0:
            count, step = 2, difference
        else:
            runs.append((first, count, step))
            first, count, step = value, 1, 1
    return (*runs, (first, count, step))


# The actions after which the stored job stays, so that it may have died once more since.
LEAVING_JOB: Final[frozenset[Action]] = frozenset({"requeued", "handled"})


class AuditRecord(BaseModel):
    """What records of the audit have in common."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    stream: str
    created: str


class LetterRecord(AuditRecord):
    """One action on one dead letter.

    :param sequence: the job's stream sequence; with ``stream`` and ``created`` the letter's identity
    :param job_id: the job's own id, shortened; records about ranges of letters don't hold it
    :param action: ``redriven`` as a new job, ``requeued`` in place, ``parked``, or found to be ``handled`` by a handler
        of the dead letter queue
    :param new_sequence: the new job's stream sequence, or the sequence of the parked letter in the dead letter queue
    :param new_stream: the new job's stream, where it isn't the letter's own
    :param copy_of: the letter of this queue of which the job was a copy, if it was one
    :param subject: the new job's subject
    :param consumer: the consumer that delivered the job, if any did
    :param left_out: headers for which the new job had no room
    :param redrives: how often the job has been redriven now
    :param reason: why the job was dead
    :param died_at: when it died
    :param fingerprint: the fingerprint of its death
    :param why: the reason given for the redrive
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param run: the key of the redrive
    :param wave: the wave of the redrive, where it has waves
    :param changes: what a transform changed
    """

    sequence: int
    job_id: str | None = None
    action: Action
    new_sequence: int | None = None
    new_stream: str | None = None
    copy_of: int | None = None
    subject: str
    consumer: str | None = None
    left_out: dict[str, str] | None = None
    redrives: int = 0
    reason: str
    died_at: datetime | None = None
    fingerprint: str
    why: str | None = None
    who: dict[str, Any] = Field(default_factory=dict)
    run: str | None = None
    wave: int | None = None
    changes: dict[str, Any] | None = None

    @property
    def in_place(self) -> bool:
        """Whether the stored job itself is delivered again, rather than a copy."""
        return self.action == "requeued"

    @property
    def leaves_job(self) -> bool:
        """Whether the stored job stays, so that it may have died once more since."""
        return self.action in LEAVING_JOB


class RunRecord(AuditRecord):
    """The progress of one redrive.

    :param run: its key
    :param from_sequence: the first sequence of the audit that may hold one of its letters
    :param who: the Airflow task, as its identifying fields, or whatever the caller passed
    :param why: the reason given for it
    :param report: counts so far
    :param finished: whether the redrive is complete
    :param redrive: the redrive's id
    """

    run: str
    from_sequence: int
    who: dict[str, Any] = Field(default_factory=dict)
    why: str | None = None
    report: dict[str, Any] = Field(default_factory=dict)
    finished: bool = False
    redrive: str | None = None


_Model = TypeVar("_Model", bound=BaseModel)


def encode_record(record: AuditRecord | LetterRange) -> bytes:
    """Encode a record; what isn't UTF-8 in it, as in a header that was left out, is replaced."""
    try:
        return record.model_dump_json(exclude_none=True).encode()
    except PydanticSerializationError:
        values = record.model_dump(mode="json", exclude_none=True)
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")


def parse_record(model: type[_Model], message: StoredMessage | None, created: str | None = None) -> _Model | None:
    """Parse a record of any kind, with the server's time of when it was stored; ``None`` where the message isn't one.

    :param created: when the work queue was created, in the server's own text; records of another one don't count
    """
    if message is None or proves_nothing(message):
        return None
    try:
        record = model.model_validate_json(message.data)
    except ValidationError:
        return None
    if created is not None and getattr(record, "created", None) != created:
        return None
    # Advisories have the server's time; records are compared with them.
    return record.model_copy(update={"at": message.stored_at}) if "at" in model.model_fields else record


def letter_of(record: LetterRange, sequence: int) -> LetterRecord:
    """Return what a record about a range says about one of its letters."""
    fields = next(fields for fields in record.letters() if fields["sequence"] == sequence)
    return LetterRecord.model_construct(**fields)


# Fewer letters of one range have a record each.
LEAST_IN_RANGE: Final = 8


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
