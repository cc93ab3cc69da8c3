"""Records of the audit about many letters each: what was done to a range of them, where little is known of each one.

A redrive of many letters would store as many records as jobs. So what all letters of a record have in common is stored
once, and what differs as columns: sequences as runs, times as differences. A record is about letters of one
:data:`RANGE_WIDTH`, so that a reader finds those that may be about a letter by the letter's sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
    if proves_nothing(message):
        return None
    try:
        record = LetterRange.model_validate_json(message.data)
    except ValidationError:
        return None
    # Advisories have the server's time; records are compared with them.
    is_of_subject = message.subject == letter_range_subject(
        record.stream, record.number * RANGE_WIDTH, message.subject.rpartition(".")[2]
    )
    return record.model_copy(update={"at": message.stored_at}) if is_of_subject else None


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
