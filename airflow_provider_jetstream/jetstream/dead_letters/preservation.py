"""Copies the bodies of dead letters into the dead letter queue, since the server may still lose them.

The copies that a refresh has stored are remembered, so that the next one needn't read them. A run of copies counts as
read where the last one of it is stored as it was sent: a server that crashed loses what it stored last, and gives those
sequences to other messages.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, pause_if_due
from airflow_provider_jetstream.jetstream.client.headers import Headers, wire_size
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, confirmed_once, store, store_each
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import copy_filter, copy_subject
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.record import SCAN, is_copy_of, record_headers
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError
from airflow_provider_jetstream.jetstream.queue.stream_config import StreamRoom, eviction_limits, stored_size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.entry import EntryParser
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan

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


log = logging.getLogger(__name__)

# Before other tasks of the event loop may run.
_MADE_AT_ONCE = 16


class BodyPreserver:
    """Copies the bodies of dead letters into the dead letter queue.

    :param scan: the scan that finds the letters
    """

    def __init__(self, connection: Connection, scan: Scan) -> None:
        self._connection = connection
        self._scan = scan
        config = scan.context.dead_letter_queue["config"]
        captured = covered_by_any(config.get("subjects") or [], copy_filter(scan.queue.name))
        # Interest retention deletes at once a message that no consumer takes.
        self._is_possible = captured and config["retention"] != "interest"
        largest = config.get("max_msg_size", -1)
        self._max_size = min(connection.max_payload, largest) if largest > 0 else connection.max_payload
        self.preserved = 0
        self.copies = StoredCopies()
        self.not_preserved = 0

    def continue_with(self, scan: Scan) -> None:
        """Go on with a later scan of the same queue."""
        self._scan = scan

    async def preserve(self, letters: Sequence[DeadLetter]) -> None:
        """Copy the bodies that have no copy yet.

        :param letters: letters of the scan
        """
        all_new = [letter for letter in letters if not letter.preserved]
        new = await self._with_room(all_new) if self._is_possible else []
        self.not_preserved += len(all_new) - len(new)
        copied = sum(
            [await self._copy(new[start : start + MAX_CONCURRENT]) for start in range(0, len(new), MAX_CONCURRENT)]
        )
        self.preserved += copied
        self.not_preserved += len(new) - copied

    async def _with_room(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Return the letters whose copies fit: the dead letter queue drops no entry for them."""
        if not letters or not eviction_limits(self._scan.context.dead_letter_queue["config"]):
            return list(letters)
        room = StreamRoom.of(await stream_info(self._connection, self._scan.dead_letter_queue))
        fitting: list[DeadLetter] = []
        for letter in letters:
            subject = copy_subject(letter.death.stream, None, letter.death.sequence)
            size = stored_size(subject, self._fitting_headers(letter) or {}, letter.body)
            if not room.problem(1, size):
                room.take(1, size)
                fitting.append(letter)
        return fitting

    async def _copy(self, letters: Sequence[DeadLetter]) -> int:
        """Copy letters at once; return how many copies the dead letter queue has stored."""
        messages: list[tuple[str, bytes]] = []
        fitting: list[tuple[DeadLetter, Headers]] = []
        for number, letter in enumerate(letters):
            if number % _MADE_AT_ONCE == 0:
                await pause_if_due()
            if (headers := self._fitting_headers(letter)) is None:
                log.warning("%s is too large to be stored with the headers that describe its death", letter.job_id)
                continue
            death = letter.death
            messages.append((copy_subject(death.stream, None, death.sequence), letter.body))
            fitting.append((letter, headers))
        copied = 0
        acks = await store_each(self._connection, messages, [headers for _, headers in fitting]) if messages else []
        for (letter, headers), (subject, _), ack in zip(fitting, messages, acks, strict=True):
            stored = await self._stored_anew(letter, subject, headers, ack)
            if isinstance(stored, PubAck):
                copied += stored.stream == self._scan.dead_letter_queue
                self._note(letter, stored)
            else:
                log.warning("The body of dead letter %s couldn't be copied: %s", letter.job_id, stored)
        return copied

    def _note(self, letter: DeadLetter, ack: PubAck) -> None:
        if ack.stream == self._scan.dead_letter_queue and not ack.duplicate:
            self.copies.add(ack.sequence, letter)

    async def _stored_anew(
        self, letter: DeadLetter, subject: str, headers: Headers, ack: PubAck | ApiError | TransientError
    ) -> PubAck | ApiError | TransientError:
        """Return the acknowledgement of a copy, stored once more where another message of its id was stored before."""
        if not isinstance(ack, PubAck):
            return ack
        is_own = partial(is_copy_of, letter.death, letter.body)
        send = partial(store, self._connection, subject, letter.body)
        try:
            return await confirmed_once(self._connection, ack, subject, headers, is_own, send)
        except (ApiError, TransientError) as error:
            return error

    def _fitting_headers(self, letter: DeadLetter) -> Headers | None:
        """Return the headers of a letter's record, without the origin where only that fits; ``None`` where none fit."""
        for origin in dict.fromkeys((letter.origin, None)):
            headers = record_headers(
                letter.death,
                subject=letter.subject,
                time=letter.time,
                headers=letter.headers,
                writer=SCAN,
                origin=origin,
            )
            if len(letter.body) + wire_size(headers) <= self._max_size:
                return headers
        return None
