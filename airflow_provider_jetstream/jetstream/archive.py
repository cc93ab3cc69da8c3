"""The archive: finding the server's copy of a job that is gone, and letting go of copies that nobody needs any more.

The archive has its own sequences. Its messages carry the job's stream sequence and time in the server's headers, and
both grow along the stream, so a job is found by halving; usually the first guess already hits, since an archive without
gaps differs from its queue by one number.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# The server adds these to what it republishes.
_SUBJECT = "Nats-Subject"
_SEQUENCE = "Nats-Sequence"
_TIME = "Nats-Time-Stamp"
_ADDED = frozenset({"Nats-Stream", _SUBJECT, _SEQUENCE, _TIME, "Nats-Last-Sequence"})


@dataclass(slots=True)
class ArchiveReader:
    """A queue's archive, as it is while a scan reads it.

    :param connection: the server
    :param stream: the archive's stream
    :param created: when the work queue was created; copies of an earlier one of the same name don't count
    :param first: the archive's first sequence
    :param last: the archive's last sequence
    """

    connection: Connection
    stream: str
    created: datetime
    first: int
    last: int
    _offset: int = 0

    @classmethod
    async def open(cls, connection: Connection, queue: WorkQueue, created: datetime) -> ArchiveReader | None:
        """Look at a queue's archive.

        :param connection: the server
        :param queue: the work queue
        :param created: when its stream was created
        :return: the archive; ``None`` where the queue declares none, or it doesn't exist (yet)
        """
        if queue.archive is None:
            return None
        try:
            state = (await stream_info(connection, queue.archive.name))["state"]
        except NotFoundError:
            return None
        return cls(connection, queue.archive.name, created, state["first_seq"], state["last_seq"])

    async def find(self, sequence: int) -> StoredMessage | None:
        """Give a job as it was stored.

        :param sequence: its stream sequence in the work queue
        :return: the job; ``None`` where the archive doesn't hold it
        """
        found = await self._copy(min(max(sequence + self._offset, self.first), self.last))
        if found is None or self._stored_at(found) < self.created or self._number(found) != sequence:
            found = await self._first(lambda copy: self._number(copy) >= sequence)
        if found is None or self._number(found) != sequence:
            return None
        self._offset = found.sequence - sequence
        # The original's own headers come first, so that names which the job used itself are kept.
        headers = list(found.headers)
        for name in _ADDED:
            places = [place for place, pair in enumerate(headers) if pair[0] == name]
            if places:
                del headers[places[-1]]
        return StoredMessage(
            subject=_added(found, _SUBJECT) or "",
            sequence=sequence,
            time=_added(found, _TIME) or "",
            headers=tuple(headers),
            data=found.data,
        )

    async def first_copy_from(self, sequence: int) -> int:
        """Return the archive's sequence of the first copy of a job at or after a stream sequence of the queue.

        One past the archive's last message where it holds no such copy.
        """
        copy = await self._first(lambda copy: self._number(copy) >= sequence)
        return copy.sequence if copy else self.last + 1

    async def holds(self, below: int, before: datetime) -> bool:
        """Tell whether there is anything to let go of.

        :param below: the first stream sequence in the work queue whose copy is still needed
        :param before: only copies of jobs stored before this
        :return: whether there is
        """
        copy = await self._copy(self.first) if self.first < self.last else None
        return copy is not None and not self._needed(copy, below, before)

    async def release(self, below: int, before: datetime) -> int:
        """Let go of the copies of jobs that have ended.

        :param below: the first stream sequence in the work queue whose copy is still needed
        :param before: only copies of jobs stored before this
        :return: how many copies were let go of
        """
        needed = await self._first(lambda copy: self._needed(copy, below, before))
        # Never the last one: there is nothing to gain, and its number tells where the archive stands.
        keep = needed.sequence if needed else self.last
        if keep <= self.first:
            return 0
        # A purge is harmful to a work queue that holds dead letters; the archive isn't one.
        answer = await self.connection.api(f"STREAM.PURGE.{self.stream}", {"seq": keep})
        self.first = keep
        return int(answer.get("purged", 0))

    def _needed(self, copy: StoredMessage, below: int, before: datetime) -> bool:
        return self._number(copy) >= below or self._stored_at(copy) >= before

    async def _first(self, matches: Callable[[StoredMessage], bool]) -> StoredMessage | None:
        """Find the first copy of this stream's jobs that matches, where all later ones do."""
        low, high = self.first, self.last
        best: StoredMessage | None = None
        while low <= high:
            middle = (low + high) // 2
            copy = await self._copy(middle)
            if copy is None or copy.sequence > high:
                high = middle - 1
            elif self._stored_at(copy) < self.created or not matches(copy):
                low = copy.sequence + 1
            else:
                best, high = copy, middle - 1
        return best

    async def _copy(self, start: int) -> StoredMessage | None:
        """Read the first copy from a place on; what somebody else stored in the archive is none."""
        while message := await next_message(self.connection, self.stream, start, ">"):
            if _added(message, _TIME) and _added(message, _SEQUENCE):
                return message
            start = message.sequence + 1
        return None

    @staticmethod
    def _stored_at(copy: StoredMessage) -> datetime:
        time = _added(copy, _TIME)
        return datetime.fromisoformat(time) if time else datetime.min.replace(tzinfo=UTC)

    @staticmethod
    def _number(copy: StoredMessage) -> int:
        return job_sequence(copy)


def job_sequence(copy: StoredMessage) -> int:
    """Tell of which job a message of an archive is the copy.

    :param copy: the message
    :return: the job's stream sequence in the work queue; 0 where it is no copy
    """
    text = _added(copy, _SEQUENCE) or ""
    return int(text) if text.isdecimal() else 0


def _added(copy: StoredMessage, name: str) -> str | None:
    """Give what the server added; the job may have a header of that name itself, which comes first."""
    values = [value for key, value in copy.headers if key == name]
    return values[-1] if values else None
