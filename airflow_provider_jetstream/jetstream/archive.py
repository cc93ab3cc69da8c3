"""The archive: reads the server's copy of a job that is gone.

An archive has its own sequences. The server adds the job's stream sequence and time to the headers of each copy, and
both increase along the archive, so a copy is found by binary search. Usually the first guess is right, since the
sequences of an archive without gaps differ from those of its work queue by a constant.

A loss of power may take back the queue's last jobs and not their copies. Then other jobs get their sequences, and the
archive has two copies of one sequence, of which the later counts; another loss may take that one. So a copy counts only
where every later one is of a later job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import next_message
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# The headers that the server adds to a message that it republishes.
_STREAM = "Nats-Stream"
_SUBJECT = "Nats-Subject"
_SEQUENCE = "Nats-Sequence"
_TIME = "Nats-Time-Stamp"
# How the server writes them; anybody who may publish to the archive can write anything.
_WHOLE = re.compile(r"[0-9]{1,20}")
_TIME_TEXT = re.compile(r"[0-9T:.-]+Z")
# The clocks of a cluster's servers differ by less.
_CLOCK_DIFFERENCE = timedelta(minutes=5)
_ADDED = frozenset({_STREAM, _SUBJECT, _SEQUENCE, _TIME, "Nats-Last-Sequence"})
# An archive of which more was looked at has too many gaps for looking behind each.
_MOST_PLACES: Final = 256


class _Place(NamedTuple):
    """Where a copy is in the archive, and the stream sequence of its job."""

    at: int
    job: int


@dataclass(slots=True)
class ArchiveReader:
    """Reads the copies in a queue's archive, as of the time when it was opened.

    :param created: when the work queue was created; copies of an earlier queue of the same name don't count
    :param first: the archive's first sequence
    :param last: the archive's last sequence
    """

    connection: Connection
    stream: str
    created: datetime
    first: int
    last: int
    _offset: int
    _places: dict[int, _Place | None] = field(default_factory=dict)

    @classmethod
    async def open(cls, connection: Connection, queue: WorkQueue, stored: Mapping[str, Any]) -> ArchiveReader | None:
        """Open a queue's archive; ``None`` where the queue declares none, or its stream doesn't exist.

        :param stored: the work queue's own STREAM.INFO: its end tells which of two copies of a sequence counts
        """
        if queue.archive is None:
            return None
        try:
            info = await stream_info(connection, queue.archive.name)
        except NotFoundError:
            return None
        return cls.from_info(connection, info, stored)

    @classmethod
    def from_info(cls, connection: Connection, info: Mapping[str, Any], stored: Mapping[str, Any]) -> ArchiveReader:
        """Open the archive whose STREAM.INFO is at hand.

        :param stored: the work queue's own STREAM.INFO
        """
        state, created = info["state"], datetime.fromisoformat(stored["created"])
        offset = int(state["last_seq"]) - int(stored["state"]["last_seq"])
        return cls(connection, info["config"]["name"], created, state["first_seq"], state["last_seq"], offset)

    async def find(self, sequence: int, until: datetime | None = None) -> StoredMessage | None:
        """Return a job as it was stored; ``None`` where the archive has no copy of it.

        :param sequence: its stream sequence in the work queue
        :param until: a moment at which the job was stored, by the server's clock: copies of later jobs, which got its
            sequence after a loss of power, don't count
        """
        copy = await self.find_copy(sequence, until)
        return republished_message(copy) if copy else None

    async def find_copy(self, sequence: int, until: datetime | None = None) -> StoredMessage | None:
        """Return the copy of a job as the archive stores it; ``None`` where it has none.

        :param sequence: the job's stream sequence in the work queue
        :param until: as of :meth:`find`
        """
        if sequence <= 0 or self.first > self.last:
            return None
        # Nearly always no copy is missing between it and the ends of both streams.
        copy = await self._next_copy(min(max(sequence + self._offset, self.first), self.last))
        if copy is None or copy.sequence - self._offset != sequence or self._job_of(copy) != sequence:
            copy = await self._last_copy(sequence, self.last)
        if until is not None and (copy is None or _stored_at(copy) > until):
            later = await self._first_copy(lambda copy: _stored_at(copy) > until)
            copy = await self._last_copy(sequence, later.sequence - 1) if later else copy
        return copy

    async def _last_copy(self, sequence: int, end: int) -> StoredMessage | None:
        """Return the copy of a job among those up to a sequence of the archive.

        It counts if it is the last one of all jobs up to its sequence. Where two copies are as many places apart as
        their jobs, those between are in order. Everywhere else both halves are looked at, as long as these aren't many.
        """
        ranges = [(self.first, end)]
        while ranges:
            low, high = ranges.pop()
            first, last = await self._place(low), await self._place(high)
            if first is None or first.at > high:
                continue
            low = first.at
            if last is not None and last.at <= high:
                high = last.at
                if last.job <= sequence:
                    return await self._next_copy(high) if last.job == sequence else None
                is_whole = first.job > 0 and last.job - first.job == high - low
                if is_whole and high == self.last:
                    self._offset = high - last.job
                if low == high or (first.job > sequence and (is_whole or len(self._places) > _MOST_PLACES)):
                    continue
                copy = await self._next_copy(low + sequence - first.job) if is_whole else None
                if copy and self._job_of(copy) == sequence:
                    return copy
            middle = (low + high) // 2
            ranges += [(low, middle), (middle + 1, high)]
        return None

    async def _place(self, start: int) -> _Place | None:
        """Return the archive's first copy at or after a sequence: its sequence, and that of its job."""
        if start not in self._places:
            copy = await self._next_copy(start)
            place = _Place(copy.sequence, self._job_of(copy)) if copy else None
            if len(self._places) > _MOST_PLACES:
                return place
            self._places[start] = place
        return self._places[start]

    def _job_of(self, copy: StoredMessage) -> int:
        """Return the stream sequence of a copy's job; 0 where it is of an earlier queue."""
        return job_sequence(copy) if _stored_at(copy) >= self.created else 0

    async def first_copy_from(self, sequence: int) -> int:
        """Return the archive's sequence of the first copy of a job at or after a stream sequence of the work queue.

        One past the archive's last message where it holds no such copy.
        """
        copy = await self._first_copy(lambda copy: job_sequence(copy) >= sequence)
        return copy.sequence if copy else self.last + 1

    async def first_job(self) -> int | None:
        """Return the stream sequence of the first job with a copy; ``None`` for an archive without copies."""
        copy = await self._next_copy(self.first)
        if copy is not None and _stored_at(copy) < self.created:
            copy = await self._first_copy(lambda _: True)
        return job_sequence(copy) if copy else None

    async def first_job_since(self, moment: datetime) -> int | None:
        """Return the stream sequence of the first job that was stored since a moment, if there is a copy of one."""
        copy = await self._first_copy(lambda copy: _stored_at(copy) >= moment)
        return job_sequence(copy) if copy else None

    async def _first_copy(self, matches: Callable[[StoredMessage], bool]) -> StoredMessage | None:
        """Find the first copy of this queue's jobs that matches, where all later copies match too."""
        low, high = self.first, self.last
        best: StoredMessage | None = None
        while low <= high:
            middle = (low + high) // 2
            copy = await self._next_copy(middle)
            if copy is None or copy.sequence > high:
                high = middle - 1
            elif _stored_at(copy) < self.created or not matches(copy):
                low = copy.sequence + 1
            else:
                best, high = copy, middle - 1
        return best

    async def _next_copy(self, start: int) -> StoredMessage | None:
        """Read the first copy from a sequence on; other messages in the archive are skipped."""
        while message := await next_message(self.connection, self.stream, start, ">"):
            if not proves_nothing(message) and _time_of(message) and job_sequence(message):
                return message
            start = message.sequence + 1
        return None


def republished_message(copy: StoredMessage) -> StoredMessage:
    """Return a message as its own stream stored it, from the copy that the server republished to another stream.

    Where the message is no such copy, the result has the sequence 0 and no subject.
    """
    # The server's headers come last; a header of such a name that the message had itself stays.
    headers = list(copy.headers)
    for name in _ADDED:
        indexes = [index for index, pair in enumerate(headers) if pair[0] == name]
        if indexes:
            del headers[indexes[-1]]
    return StoredMessage(
        subject=_added(copy, _SUBJECT) or "",
        sequence=job_sequence(copy),
        time=_time_of(copy),
        headers=tuple(headers),
        data=copy.data,
    )


def republishing_stream(copy: StoredMessage) -> str | None:
    """Return the stream that a copy says it is from."""
    return _added(copy, _STREAM)


def job_sequence(copy: StoredMessage) -> int:
    """Return the stream sequence of the job that a message of an archive is a copy of; 0 where it is no copy."""
    text = _added(copy, _SEQUENCE) or ""
    return int(text) if _WHOLE.fullmatch(text) else 0


def _stored_at(copy: StoredMessage) -> datetime:
    time = _time_of(copy)
    return datetime.fromisoformat(time) if time else datetime.min.replace(tzinfo=UTC)


def _time_of(copy: StoredMessage) -> str:
    """Return the server's own text of when a job was stored; empty where no server can have written it."""
    time = _added(copy, _TIME) or ""
    try:
        is_possible = _TIME_TEXT.fullmatch(time) and datetime.fromisoformat(time) < copy.stored_at + _CLOCK_DIFFERENCE
    except ValueError:
        return ""
    return time if is_possible else ""


def _added(copy: StoredMessage, name: str) -> str | None:
    """Return a header that the server added; the job's own header of that name, if any, comes before it."""
    values = [value for key, value in copy.headers if key == name]
    return values[-1] if values else None
