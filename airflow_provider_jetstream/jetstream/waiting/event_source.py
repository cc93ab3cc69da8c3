"""One stream in which ends are stored: what was read of it lately, and what is still to be read."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.waiting.job_end import parse_end
from airflow_provider_jetstream.jetstream.waiting.stream_tail import StreamTail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.job_end import JobEnd
    from airflow_provider_jetstream.jetstream.waiting.stream_tail import TailedMessage

# Who joins is seconds behind its mark, or minutes after a restart; what is older is read again.
_KEPT = 50_000
_OTHERS_JOIN = 0.05


class EndSource:
    """The ends of a queue's jobs in one stream.

    :param connection: the server
    :param stream: the stream
    :param subjects: where the ends are
    :param mark: whose queue it is about
    :param start: the first sequence to read
    :param ended: is called with each end as it is read
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: tuple[str, ...],
        mark: Cursor,
        start: int,
        ended: Callable[[EndSource, JobEnd], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = subjects
        self._queue = mark.queue
        self._created = datetime.fromisoformat(mark.created)
        self._ended = ended
        # By the job's sequence, in the order in which they were read.
        self._recent: dict[int, JobEnd] = {}
        self._low = start
        self._wanted: int | None = None
        self._bell = asyncio.Event()
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._tail = StreamTail(connection, stream, subjects, start, self._take)

    async def follow(self) -> None:
        """Read what is stored from now on; see :meth:`Tail.run`."""
        await self._tail.run()

    async def read_backlog(self) -> None:
        """Read what :meth:`read_from` asks for, once for all who ask at the same time; see :meth:`Tail.run`."""
        while True:
            await self._bell.wait()
            await asyncio.sleep(_OTHERS_JOIN)
            self._bell.clear()
            start, stop, self._wanted = self._wanted, self._low - 1, None
            if start is not None and start <= stop:
                # Who joins from here on finds what was read before, and is told of the rest.
                self._low = start
                await StreamTail(self._connection, self._stream, self._subjects, start, self._take, stop=stop).run()
            if not self._bell.is_set():
                self._all_read.set()

    def request_backlog(self, start: int) -> None:
        """Have ends read that are stored from a sequence on.

        :param start: the sequence
        """
        if start >= self._low:
            return
        self._wanted = min(start, self._low if self._wanted is None else self._wanted)
        self._all_read.clear()
        self._bell.set()

    def recent_ends(self, sequences: Iterable[int], start: int) -> list[JobEnd]:
        """Give the ends of jobs, as far as they were read.

        :param sequences: the jobs' stream sequences
        :param start: the first sequence in this stream that counts
        :return: their ends
        """
        found = (self._recent.get(sequence) for sequence in sequences)
        return [end for end in found if end is not None and end.event_sequence >= start]

    async def wait_until_read(self) -> None:
        """Return once everything was read that has been stored by now."""
        await self._tail.caught_up.wait()
        await self._all_read.wait()

    def _take(self, message: TailedMessage) -> None:
        if message.stored_at < self._created:
            return
        end = parse_end(message.data, message.sequence, self._queue)
        if end is None:
            return
        known = self._recent.pop(end.sequence, end)
        # The acknowledgement of a completion adds nothing to it, and looking back finds older ends later.
        self._recent[end.sequence] = max(known, end, key=lambda each: (each.has_result, each.event_sequence))
        if len(self._recent) > _KEPT:
            oldest = self._recent.pop(next(iter(self._recent)))
            self._low = max(self._low, oldest.event_sequence + 1)
        self._ended(self, end)
