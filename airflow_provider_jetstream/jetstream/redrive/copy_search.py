"""Looks for the new jobs that a redrive may have stored, among all that a stream has stored since.

A new job is known by its message id and its content: the id can be computed, so any publisher may have used it.

Whatever the stream no longer holds is looked for in its archive. Only where stream and archive together show every
message is a copy that wasn't found certain not to be stored.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

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
        _note(search.found, message, copies)
    else:
        missing.add_before(info["state"]["last_seq"] + 1)
    for pause in (0.0, _ARCHIVE_DELAY):
        if search.ids == copies.keys() or not missing.count:
            break
        await sleep(pause)
        # A message that left the stream while it was read is in the archive.
        search.found |= await _search_archive(connection, target, info, missing, copies, until)
    search.complete = search.ids == copies.keys() or not missing.count
    return search


async def _search_archive(
    connection: Connection,
    target: Target,
    stored: Mapping[str, Any],
    missing: _Missing,
    copies: Mapping[str, Collection[str]],
    until: datetime,
) -> dict[tuple[str, str], StoredMessage]:
    """Return the new jobs that only the archive has.

    :param stored: the STREAM.INFO of the target
    """
    found: dict[tuple[str, str], StoredMessage] = {}
    if target.archive is None:
        return found
    try:
        info = await stream_info(connection, target.archive)
    except NotFoundError:
        return found
    archive = ArchiveReader.from_info(connection, info, stored)
    missing.start_over()
    start = await archive.first_copy_from(target.last + 1)
    async for copy in read_range(connection, archive.stream, ">", start, archive.last):
        if not (sequence := job_sequence(copy)) or not missing.is_missing(sequence):
            continue
        if sequence <= missing.last_taken:
            # A loss of power took jobs from the stream, which has given their sequences to others.
            missing.untake_from(sequence)
            found = {key: message for key, message in found.items() if message.sequence < sequence}
        missing.take(sequence)
        message = republished_message(copy)
        if message.time and message.stored_at > until:
            missing.end_at(sequence)
            break
        _note(found, message, copies)
    return found


def _note(
    found: dict[tuple[str, str], StoredMessage], message: StoredMessage, copies: Mapping[str, Collection[str]]
) -> None:
    message_id = message.header(MSG_ID)
    if message_id is not None and (contents := copies.get(message_id)) is not None:
        content = content_of_copy(message.subject, message.headers, message.data)
        if content in contents:
            found.setdefault((message_id, content), message)


class _Missing:
    """The sequences that a stream no longer holds, of which some turn up in its archive.

    :param start: the first sequence that may be missing
    """

    def __init__(self, start: int) -> None:
        self._next = start
        # Ranges of missing sequences: their bounds, low and one past the high one.
        self._lows: list[int] = []
        self._highs: list[int] = []
        # Those of them that turned up, as runs of first and last.
        self._taken: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """How many sequences were seen nowhere."""
        return sum(self._highs) - sum(self._lows) - sum(last - first + 1 for first, last in self._taken)

    @property
    def last_taken(self) -> int:
        """The highest sequence that turned up; 0 where none did."""
        return self._taken[-1][1] if self._taken else 0

    def add_before(self, sequence: int) -> None:
        """Note that the stream's next message has a sequence."""
        if sequence > self._next:
            self._lows.append(self._next)
            self._highs.append(sequence)
        self._next = sequence + 1

    def start_over(self) -> None:
        """Forget what turned up in the archive."""
        self._taken = []

    def is_missing(self, sequence: int) -> bool:
        """Return whether the stream lacks a sequence."""
        index = bisect_right(self._lows, sequence) - 1
        return index >= 0 and sequence < self._highs[index]

    def take(self, sequence: int) -> None:
        """Note that a missing message turned up, of a higher sequence than all that did before."""
        first = self._taken.pop()[0] if self.last_taken == sequence - 1 and self._taken else sequence
        self._taken.append((first, sequence))

    def untake_from(self, sequence: int) -> None:
        """Forget that a sequence and higher ones turned up."""
        self._taken = [(first, min(last, sequence - 1)) for first, last in self._taken if first < sequence]

    def end_at(self, sequence: int) -> None:
        """Leave out a sequence and all after it."""
        self.untake_from(sequence)
        index = bisect_right(self._lows, sequence) - 1
        del self._lows[index + 1 :], self._highs[index + 1 :]
        self._highs[index] = sequence
