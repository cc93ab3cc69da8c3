"""Looks for the new jobs that a redrive may have stored, among all that a stream has stored since.

A new job is known by its message id and its content: the id can be computed, so any publisher may have used it.

Whatever the stream no longer holds is looked for in its archive. Only where stream and archive together show every
message is a copy that wasn't found certain not to be stored.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.archive import ArchiveReader, job_sequence, republished_message
from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.redrive.copy_content import content_of_copy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow_provider_jetstream.jetstream.audit.intent import Target
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# The archive stores a copy a moment after the stream has stored the message.
_ARCHIVE_DELAY = 0.2


@dataclass(slots=True)
class CopySearch:
    """The new jobs of some letters, by message id and content.

    :param now: the time of the target's server
    :param duplicate_window: how long the target's server drops a message of an id that it has stored
    :param found: the messages that were found
    :param complete: whether every message that could be one of them was seen
    """

    now: datetime | None = None
    duplicate_window: timedelta = timedelta()
    found: dict[tuple[str, str], StoredMessage] = field(default_factory=dict)
    complete: bool = False

    @property
    def ids(self) -> set[str]:
        """The message ids of what was found."""
        return {message_id for message_id, _ in self.found}


async def find_copies(
    connection: Connection, target: Target, copies: Mapping[str, Collection[str]], until: datetime
) -> CopySearch:
    """Look for new jobs in the stream that was to store them.

    :param target: the stream, and what it had stored before
    :param copies: by message id the contents, any of which it may be stored with
    :param until: no copy was stored later than this
    """
    search = CopySearch()
    try:
        info = await stream_info(connection, target.stream)
    except NotFoundError:
        return search
    if info["created"] != target.created:
        return search
    search.now = datetime.fromisoformat(info["ts"])
    search.duplicate_window = timedelta(microseconds=info["config"].get("duplicate_window", 0) / 1_000)
    missing = _Missing(target.last + 1)
    async for message in read_range(connection, target.stream, ">", target.last + 1, info["state"]["last_seq"]):
        missing.add_before(message.sequence)
        if message.stored_at > until:
            break
        _note(search, message, copies)
    else:
        missing.add_before(info["state"]["last_seq"] + 1)
    for pause in (0.0, _ARCHIVE_DELAY):
        if search.ids == copies.keys() or not missing.count:
            break
        await sleep(pause)
        # A message that left the stream while it was read is in the archive.
        await _search_archive(connection, target, search, missing, copies, until)
    search.complete = search.ids == copies.keys() or not missing.count
    return search


async def _search_archive(
    connection: Connection,
    target: Target,
    search: CopySearch,
    missing: _Missing,
    copies: Mapping[str, Collection[str]],
    until: datetime,
) -> None:
    if target.archive is None:
        return
    try:
        info = await stream_info(connection, target.archive)
    except NotFoundError:
        return
    archive = ArchiveReader.from_info(connection, info, datetime.fromisoformat(target.created))
    missing.start_over()
    start = await archive.first_copy_from(target.last + 1)
    async for copy in read_range(connection, archive.stream, ">", start, archive.last):
        if not (sequence := job_sequence(copy)) or not missing.take(sequence):
            continue
        message = republished_message(copy)
        if message.time and message.stored_at > until:
            missing.end_at(sequence)
            return
        _note(search, message, copies)


def _note(search: CopySearch, message: StoredMessage, copies: Mapping[str, Collection[str]]) -> None:
    message_id = message.header(MSG_ID)
    if message_id is not None and (contents := copies.get(message_id)) is not None:
        content = content_of_copy(message.subject, message.headers, message.data)
        if content in contents:
            search.found.setdefault((message_id, content), message)


class _Missing:
    """The sequences that a stream no longer holds, of which some turn up in its archive.

    :param start: the first sequence that may be missing
    """

    def __init__(self, start: int) -> None:
        self._next = start
        # Ranges of missing sequences: their bounds, low and one past the high one.
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._taken = 0
        self._last = 0

    @property
    def count(self) -> int:
        """How many sequences were seen nowhere."""
        return sum(self._highs) - sum(self._lows) - self._taken

    def add_before(self, sequence: int) -> None:
        """Note that the stream's next message has a sequence."""
        if sequence > self._next:
            self._lows.append(self._next)
            self._highs.append(sequence)
        self._next = sequence + 1

    def start_over(self) -> None:
        """Forget what turned up in the archive."""
        self._taken = self._last = 0

    def take(self, sequence: int) -> bool:
        """Note that a message turned up; return whether it was missing."""
        index = bisect_right(self._lows, sequence) - 1
        # In the archive, sequences increase; anybody may have stored something else there.
        if sequence <= self._last or index < 0 or sequence >= self._highs[index]:
            return False
        self._last = sequence
        self._taken += 1
        return True

    def end_at(self, sequence: int) -> None:
        """Leave out a sequence that was taken last, and all after it."""
        self._taken -= 1
        index = bisect_right(self._lows, sequence) - 1
        del self._lows[index + 1 :], self._highs[index + 1 :]
        self._highs[index] = sequence
