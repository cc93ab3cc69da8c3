"""What a dead letter queue says about which jobs: an index of a few dozen bytes per entry, in the order of the jobs."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.advisories import DELETED_IN_FLIGHT, MaxDeliveries, Terminated, parse_advisory
from airflow_provider_jetstream.jetstream.client.message_reader import read_range
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, MSG_ID, TERMINATED, copy_filter, parked_filter
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind
from airflow_provider_jetstream.jetstream.dead_letters.record import SCAN, read_outline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# What an entry says may be anything; these are the server's own limits.
_LAST_SEQUENCE = 2**64 - 1
_MOST_DELIVERIES = 2**32 - 1


class EntryColumns(NamedTuple):
    """An index as columns, for whoever sends it elsewhere: an element for each entry, repeats of a job together.

    :param sequences: the jobs' stream sequences
    :param entries: sequences in the dead letter queue
    :param kinds: of entries
    :param consumers: places among ``names``
    :param told_at: microseconds since the epoch
    :param deliveries: how often jobs were delivered
    :param names: consumers
    """

    sequences: array[int]
    entries: array[int]
    kinds: array[int]
    consumers: array[int]
    recorded_at: array[int]
    deliveries: array[int]
    names: Sequence[str | None]


class EntryIndex:
    """Which entries are about which job.

    ``unreadable`` counts entries that don't say it, and ``read_to`` is the last sequence of the dead letter queue that
    was looked at.
    """

    def __init__(self) -> None:
        self.unreadable = 0
        self.read_to = 0
        self._sequences: array[int] = array("Q")
        self._entries: array[int] = array("Q")
        self._kinds: array[int] = array("B")
        self._consumers: array[int] = array("I")
        self._told_at: array[int] = array("q")
        self._deliveries: array[int] = array("I")
        self._names: list[str | None] = []
        self._numbers: dict[str | None, int] = {}
        self._order: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: int) -> bool:
        order = self._sorted()
        place = bisect_left(order, sequence, key=self._sequences.__getitem__)
        return place < len(order) and self._sequences[order[place]] == sequence

    def add(self, sequence: int, mention: Entry) -> None:
        """Take note of an entry; entries come in the order of the dead letter queue.

        :param sequence: the stream sequence of the job that it is about
        :param mention: the entry
        """
        if mention.consumer not in self._numbers:
            self._numbers[mention.consumer] = len(self._names)
            self._names.append(mention.consumer)
        self._sequences.append(sequence)
        self._entries.append(mention.sequence)
        self._kinds.append(mention.kind)
        self._consumers.append(self._numbers[mention.consumer])
        self._told_at.append((mention.recorded_at - _EPOCH) // _MICROSECOND)
        self._deliveries.append(mention.deliveries)

    def contains_kind(self, kind: EntryKind) -> bool:
        """Tell whether any entry is of a kind.

        :param kind: the kind
        :return: whether one is
        """
        return kind in self._kinds

    def entries_of(self, sequence: int) -> tuple[Entry, ...]:
        """Give what is said about one job.

        :param sequence: its stream sequence
        :return: the mentions, nothing where there are none
        """
        order = self._sorted()
        first = bisect_left(order, sequence, key=self._sequences.__getitem__)
        last = bisect_right(order, sequence, key=self._sequences.__getitem__)
        return tuple(self._mention(place) for place in order[first:last])

    def sequences(self, last: int) -> Iterator[int]:
        """Give the jobs of which anything is said.

        :param last: only jobs of sequences up to here
        :return: their stream sequences, in order
        """
        current = 0
        for place in self._sorted():
            sequence = self._sequences[place]
            if sequence > last:
                return
            if sequence != current:
                yield sequence
            current = sequence

    def jobs(self, after: int = 0) -> Iterator[tuple[int, tuple[Entry, ...]]]:
        """Give what is said about each job, repeats together.

        :param after: only jobs of higher sequences
        :return: stream sequence and mentions, in the order of the jobs
        """
        mentions: list[Entry] = []
        current = 0
        for place in self._sorted():
            sequence = self._sequences[place]
            if sequence <= after:
                continue
            if sequence != current and mentions:
                yield current, tuple(mentions)
                mentions = []
            current = sequence
            mentions.append(self._mention(place))
        if mentions:
            yield current, tuple(mentions)

    def columns(self) -> EntryColumns:
        """Give all of it, in the order of the jobs.

        :return: the columns
        """
        order = self._sorted()

        def ordered(column: array[int]) -> array[int]:
            return array(column.typecode, map(column.__getitem__, order))

        return EntryColumns(
            ordered(self._sequences),
            ordered(self._entries),
            ordered(self._kinds),
            ordered(self._consumers),
            ordered(self._told_at),
            ordered(self._deliveries),
            self._names,
        )

    def extend(self, columns: EntryColumns) -> None:
        """Take note of what is known about further jobs.

        :param columns: what another index gave
        """
        for name in columns.names:
            if name not in self._numbers:
                self._numbers[name] = len(self._names)
                self._names.append(name)
        numbers = [self._numbers[name] for name in columns.names]
        self._sequences.extend(columns.sequences)
        self._entries.extend(columns.entries)
        self._kinds.extend(columns.kinds)
        self._consumers.extend(map(numbers.__getitem__, columns.consumers))
        self._told_at.extend(columns.recorded_at)
        self._deliveries.extend(columns.deliveries)

    def _sorted(self) -> array[int]:
        if len(self._order) != len(self):
            # Stable, so that the mentions of a job keep their order.
            self._order = array("Q", sorted(range(len(self)), key=self._sequences.__getitem__))
        return self._order

    def _mention(self, place: int) -> Entry:
        return Entry(
            sequence=self._entries[place],
            kind=EntryKind(self._kinds[place]),
            consumer=self._names[self._consumers[place]],
            recorded_at=_EPOCH + timedelta(microseconds=self._told_at[place]),
            deliveries=self._deliveries[place],
        )


async def read_index(connection: Connection, letters: str, queue: str, created: str, start: int = 1) -> EntryIndex:
    """Read what a dead letter queue says about a work queue.

    :param connection: the server
    :param letters: the dead letter queue
    :param queue: the work queue
    :param created: when its stream was created, in the server's own text
    :param start: the first entry to read
    :return: the index
    :raises NotFoundError: the dead letter queue doesn't exist
    """
    index = EntryIndex()
    index.read_to = int((await stream_info(connection, letters))["state"]["last_seq"])
    # Each has a subject of its own, so that a prefix is cheaper than a filter whose answers are remembered.
    copies = (copy_filter(queue).removesuffix(">"), parked_filter(queue).removesuffix(">"))
    deaths = (f"{MAX_DELIVERIES}.{queue}.*", f"{TERMINATED}.{queue}.*")
    async for message in read_range(connection, letters, start=start, stop=index.read_to):
        if message.subject.startswith(copies):
            found = _read_copy(message, queue, created)
        elif covered_by_any(deaths, message.subject):
            found = _read_advisory(message, queue)
        else:
            continue
        if found is not None and 0 < found[0] <= _LAST_SEQUENCE:
            index.add(*found)
        else:
            index.unreadable += 1
    return index


def _read_copy(message: StoredMessage, queue: str, created: str) -> tuple[int, Entry] | None:
    if (told := read_outline(message, queue)) is None:
        return None
    if message.subject.startswith(parked_filter(queue).removesuffix(">")):
        kind, told_at = EntryKind.PARKED, message.stored_at
    elif (message.header(MSG_ID) or "").startswith(f"dead:{SCAN}:") and told.reason != Reason.UNDELIVERABLE:
        # A scan tells when the job died by the server's clock, a worker by its own.
        kind, told_at = EntryKind.PROVEN_COPY, min(told.died_at, message.stored_at)
    else:
        kind, told_at = EntryKind.COPY, message.stored_at
    if told.created not in ("", created):
        told_at = _EPOCH
    return told.sequence, Entry(message.sequence, kind, told.consumer, told_at, _count(told.deliveries))


def _read_advisory(message: StoredMessage, queue: str) -> tuple[int, Entry] | None:
    match advisory := parse_advisory(message.data):
        case MaxDeliveries():
            kind = EntryKind.DELIVERIES
        case Terminated():
            kind = EntryKind.DELETION if advisory.reason == DELETED_IN_FLIGHT else EntryKind.TERMINATION
        case _:
            return None
    if advisory.stream != queue or advisory.timestamp.tzinfo is None:
        return None
    told_at, deliveries = advisory.timestamp, _count(advisory.deliveries)
    return advisory.stream_seq, Entry(message.sequence, kind, advisory.consumer, told_at, deliveries)


def _count(deliveries: int | None) -> int:
    return min(max(deliveries or 0, 0), _MOST_DELIVERIES)
