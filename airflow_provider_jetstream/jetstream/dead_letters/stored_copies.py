"""The copies of letters that a refresh has stored in the dead letter queue, so that the next one needn't read them.

A run of copies counts as read where the last one of it is stored as it was sent: a server that crashed loses what it
stored last, and gives those sequences to other messages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.concurrency import pause_if_due
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.entry_parser import EntryParser
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# A shorter run is read as fast as its last copy is.
_SHORT_RUN = 16
# Before other tasks of the event loop may run.
_COPIES_AT_ONCE = 32


class ReadEntry(NamedTuple):
    """A message of the dead letter queue.

    :param sequence: its sequence
    :param job: the job that it is about; 0 for none
    :param is_own_copy: whether it is a copy that was stored here
    """

    sequence: int
    job: int
    is_own_copy: bool


class StoredCopies:
    """Copies in the order in which they were stored, some thirty bytes each."""

    def __init__(self) -> None:
        self._entries: array[int] = array("Q")
        self._jobs: array[int] = array("Q")
        self._died_at: array[int] = array("q")
        self._deliveries: array[int] = array("I")
        self._consumers: array[int] = array("I")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> int:
        """The sequence of the last copy; 0 where there is none."""
        return self._entries[-1] if self._entries else 0

    def add(self, sequence: int, letter: DeadLetter) -> None:
        """Add a copy; one whose entry isn't known before it is read is left out.

        :param sequence: of the copy in the dead letter queue
        """
        death = letter.death
        name = death.consumer
        if name is None or not name.isascii() or death.reason == Reason.UNDELIVERABLE or sequence <= self.last:
            return
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        self._entries.append(sequence)
        self._jobs.append(letter.sequence)
        self._died_at.append((max(_EPOCH, death.died_at) - _EPOCH) // _MICROSECOND)
        self._deliveries.append(death.deliveries or 0)
        self._consumers.append(self._numbers[name])

    async def read_with(
        self, connection: Connection, index: EntryIndex, stream: str, parser: EntryParser, start: int, stop: int
    ) -> AsyncGenerator[ReadEntry, None]:
        """Read more entries into an index, without the copies.

        :param stream: the dead letter queue
        :param parser: of the entries about the jobs of the work queue
        :param start: the first entry to read
        :param stop: the last one
        """
        for first, last in self._runs(start, stop):
            if first > start:
                async for read in self._read(connection, index, stream, parser, start, first - 1):
                    yield read
            if await self._is_stored(connection, stream, parser, last):
                position = bisect_left(self._entries, first)
                for count in range(last - first + 1):
                    index.add(self._jobs[position + count], self._entry(position + count))
                    if count % _COPIES_AT_ONCE == _COPIES_AT_ONCE - 1:
                        await pause_if_due()
                    yield ReadEntry(first + count, self._jobs[position + count], is_own_copy=True)
                index.read_to = last
            else:
                async for read in self._read(connection, index, stream, parser, first, last):
                    yield read
            start = last + 1
        if start <= stop:
            async for read in self._read(connection, index, stream, parser, start, stop):
                yield read

    async def _read(
        self, connection: Connection, index: EntryIndex, stream: str, parser: EntryParser, start: int, stop: int
    ) -> AsyncGenerator[ReadEntry, None]:
        async for sequence, job in index.read(connection, stream, parser, start, stop):
            position = bisect_left(self._entries, sequence)
            is_own = position < len(self) and (self._entries[position], self._jobs[position]) == (sequence, job)
            yield ReadEntry(sequence, job, is_own)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the first and last sequence of each long run of copies within a range."""
        entries = self._entries
        position, end = bisect_left(entries, start), bisect_right(entries, stop)
        while position < end:
            offset = entries[position] - position
            # Within a run, sequence and position grow alike.
            behind = bisect_right(range(position, end), offset, key=lambda at: entries[at] - at) + position
            if behind - position >= _SHORT_RUN:
                yield entries[position], entries[behind - 1]
            position = behind

    async def _is_stored(self, connection: Connection, stream: str, parser: EntryParser, sequence: int) -> bool:
        """Return whether a copy is stored under its sequence as it was sent."""
        message = await get_message(connection, stream, sequence)
        position = bisect_left(self._entries, sequence)
        found = parser.parse(message) if message and parser.is_entry(message.subject) else None
        return found == (self._jobs[position], self._entry(position))

    def _entry(self, position: int) -> Entry:
        return Entry(
            sequence=self._entries[position],
            kind=EntryKind.PROVEN_COPY,
            consumer=self._names[self._consumers[position]],
            recorded_at=_EPOCH + timedelta(microseconds=self._died_at[position]),
            deliveries=self._deliveries[position],
        )
