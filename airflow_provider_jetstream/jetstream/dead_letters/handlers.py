"""The handlers of a dead letter queue, and which entries they have taken off it, by the server's copies of all entries.

A handler is a consumer of another program, which removes an entry by acknowledging it. The dead letter queue
republishes each entry to the audit stream. An entry of which a copy is stored and that is no longer stored itself was
removed: by a handler's acknowledgement, by a redrive, by a limit of the stream, or by hand. A redrive terminates what
it removes, which the server reports to the audit. What could have been removed by a limit, and what no handler can have
received, doesn't count as handled.

Where entries are gone of which no copy is stored, since nothing copied them yet, or the audit was full or away, nobody
knows which: then a dead job without an entry may be handled or not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.jetstream.advisories import Terminated
from airflow_provider_jetstream.jetstream.archive import job_sequence, republished_message, republishing_stream
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stored_sequences
from airflow_provider_jetstream.jetstream.client.streams import last_message, next_message, read_range
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    dead_letter_subjects,
    entry_copies_filter,
    entry_terminations,
    redrive_consumer,
)
from airflow_provider_jetstream.jetstream.dead_letters.entry import Entry, EntryKind, EntryParser
from airflow_provider_jetstream.jetstream.evidence import event_of, proves_nothing
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects, settled_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.dead_letters.entry_index import EntryIndex
    from airflow_provider_jetstream.jetstream.queue.snapshot import QueueSnapshot

# A stream of any other retention keeps an entry that is acknowledged.
_REMOVING = frozenset({"workqueue", "interest"})
_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class DeadLetterHandler:
    """A consumer of a dead letter queue as of one moment.

    :param config: its configuration, as the server returns it
    :param created: when it was created
    :param delivered: the highest sequence of an entry that it delivered
    :param deliveries: how often it delivered an entry, repeats included
    :param ack_floor: the sequence up to which every delivery ended
    :param in_flight: deliveries that haven't ended
    """

    name: str
    config: Mapping[str, Any]
    created: datetime
    delivered: int
    deliveries: int
    ack_floor: int
    in_flight: int

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> DeadLetterHandler:
        """Read a consumer from the server's CONSUMER.INFO."""
        return cls(
            name=info["name"],
            config=info["config"],
            created=datetime.fromisoformat(info["created"]),
            delivered=info["delivered"]["stream_seq"],
            deliveries=info["delivered"]["consumer_seq"],
            ack_floor=info["ack_floor"]["stream_seq"],
            in_flight=info["num_ack_pending"],
        )

    @property
    def can_be_pulled(self) -> bool:
        """Whether it delivers entries by pull requests."""
        return "deliver_subject" not in self.config

    @property
    def room(self) -> int:
        """How many entries it delivers to one request at most; none, or fewer, where too many are in flight."""
        room = [_UNLIMITED]
        if (max_ack_pending := self.config.get("max_ack_pending", -1)) > 0:
            room.append(max_ack_pending - self.in_flight)
        # The server refuses a larger request.
        if (max_batch := self.config.get("max_batch", 0)) > 0:
            room.append(max_batch)
        return min(room)

    @property
    def waits(self) -> list[timedelta]:
        """How long the server waits for an acknowledgement, by delivery."""
        waits = self.config.get("backoff") or [self.config.get("ack_wait", 0)]
        return [timedelta(microseconds=wait / 1_000) for wait in waits]

    def has_used_up(self, entry: int, *, others: int) -> bool:
        """Return whether it will never deliver an entry again that is still stored.

        :param entry: the entry's sequence
        :param others: deliveries in flight that may be of this entry
        """
        return entry <= settled_sequence(self.delivered, self.ack_floor, max(0, others))

    def takes(self, subject: str) -> bool:
        """Return whether it delivers entries of a subject."""
        return covered_by_any(filter_subjects(self.config), subject)


def own_consumer(queue: str) -> str:
    """Return the name of the consumer through which redrives acknowledge entries that no other consumer delivers."""
    return redrive_consumer(queue)


def removes_acknowledged(config: Mapping[str, Any]) -> bool:
    """Return whether an acknowledgement removes a message from a stream.

    :param config: the stream's configuration, as the server returns it
    """
    return config["retention"] in _REMOVING


async def read_handlers(connection: Connection, config: Mapping[str, Any], queue: str) -> tuple[DeadLetterHandler, ...]:
    """Read the handlers of a dead letter queue that get entries about jobs of a work queue.

    :param config: the dead letter queue's configuration, as the server returns it
    :raises NotFoundError: the dead letter queue doesn't exist
    :raises UnreachableError: the server of a consumer is away or elects a leader
    """
    if not removes_acknowledged(config):
        return ()
    subjects = dead_letter_subjects(queue)
    return tuple(
        DeadLetterHandler.from_info(info)
        for name, info in (await list_consumers(connection, config["name"])).items()
        if name != own_consumer(queue)
        and any(overlaps(filter_, subject) for filter_ in filter_subjects(info["config"]) for subject in subjects)
    )


log = logging.getLogger(__name__)

# The reason with which a redrive terminates an entry.
CLAIMED = "claimed by a redrive"
# What an entry is once a handler has acknowledged it, where a worker didn't bring it about.
_HANDLED_KINDS = {EntryKind.DELIVERIES: EntryKind.HANDLED, EntryKind.PROVEN_COPY: EntryKind.HANDLED_COPY}


class Traced(NamedTuple):
    """The copies of entries that a scan has read.

    :param first: the lowest sequence of an entry with a stored copy; 0 without any
    :param removed: of how many removed entries there is one
    """

    first: int
    removed: int


@dataclass(frozen=True, slots=True)
class RemovedEntry:
    """An entry that is no longer stored, as its copy shows it.

    :param job: the stream sequence of the job that it is about
    :param entry: the entry, of its own kind
    :param subject: its subject
    :param stored_at: when the dead letter queue stored it
    """

    job: int
    entry: Entry
    subject: str
    stored_at: datetime


async def add_removed_entries(
    connection: Connection,
    snapshot: QueueSnapshot,
    letters: Mapping[str, Any],
    audit: Mapping[str, Any] | None,
    handlers: Sequence[DeadLetterHandler],
    index: EntryIndex,
) -> int:
    """Add to an index what is known of removed entries about jobs that are stored, or have other entries.

    :param letters: the server's STREAM.INFO of the dead letter queue
    :param audit: the server's STREAM.INFO of the audit, if it exists
    :param handlers: read after the index, so that they delivered every entry that was acknowledged before
    :param index: read after the snapshot
    :return: the sequence below which a job may have had entries that were removed without a trace; 0 where none may
    """
    if not handlers or not (snapshot.state["messages"] or len(index)):
        return 0
    all_jobs = int(snapshot.state["last_seq"]) + 1 if index.read_to > letters["state"]["messages"] else 0
    if audit is None or not _captures_copies(audit, snapshot.queue):
        return all_jobs
    removed, traced = await _read_removed(connection, snapshot, letters, audit, index)
    unknown = await _unknown_below(connection, snapshot, letters, audit, index, traced) if all_jobs else 0
    if not removed:
        return unknown
    terminated = await _read_terminated(connection, letters, audit)
    for copy in removed:
        if terminated.get(copy.entry.sequence) == CLAIMED and copy.entry.kind == EntryKind.DELIVERIES:
            index.add(copy.job, copy.entry._replace(kind=EntryKind.CLAIMED))
    acknowledged = [copy for copy in removed if copy.entry.sequence not in terminated]
    _add_handled(acknowledged, handlers, letters["config"], snapshot.taken_at, index)
    return unknown


def _captures_copies(audit: Mapping[str, Any], queue: str) -> bool:
    return covered_by_any(audit["config"].get("subjects") or [], entry_copies_filter(queue))


async def _unknown_below(
    connection: Connection,
    snapshot: QueueSnapshot,
    letters: Mapping[str, Any],
    audit: Mapping[str, Any],
    index: EntryIndex,
    traced: Traced,
) -> int:
    """Return the sequence below which a job may have had entries that were removed without a copy.

    :param traced: the copies that were read
    """
    all_jobs = int(snapshot.state["last_seq"]) + 1
    stream, subject = audit["config"]["name"], entry_copies_filter(snapshot.queue)
    begun = await _first_since(connection, audit, datetime.fromisoformat(letters["created"]))
    first = await next_message(connection, stream, begun, subject)
    if first is None:
        return all_jobs
    # Where no copy is recent enough to matter, what follows the last one may still be unknown.
    start = traced.first or job_sequence(await last_message(connection, stream, subject) or first) + 1
    stored = int(letters["state"]["messages"]) - sum(entry < start for entry in index.entry_sequences())
    if index.read_to - start + 1 > stored + traced.removed:
        return all_jobs
    if job_sequence(first) <= 1:
        return 0
    jobs = {"config": {"name": snapshot.queue}, "state": snapshot.state}
    return await _first_since(connection, jobs, first.stored_at)


def _add_handled(
    removed: Sequence[RemovedEntry],
    handlers: Sequence[DeadLetterHandler],
    config: Mapping[str, Any],
    now: datetime,
    index: EntryIndex,
) -> None:
    """Add the entries that handlers have acknowledged.

    :param removed: entries that were not terminated
    :param config: the dead letter queue's configuration
    """
    by_handler: dict[str, list[RemovedEntry]] = defaultdict(list)
    for copy in removed:
        if handler := _handler_of(copy, handlers, config, now):
            by_handler[handler.name].append(copy)
    for handler in handlers:
        handled = by_handler[handler.name]
        if len(handled) > handler.deliveries:
            log.warning(
                "%d entries of %s were removed, more than its consumer %s has delivered: somebody purged or deleted"
                " them, so their jobs count as dead letters",
                *(len(handled), config["name"], handler.name),
            )
            continue
        for copy in handled:
            kind = _HANDLED_KINDS.get(copy.entry.kind, EntryKind.HANDLED_CLAIM)
            index.add(copy.job, copy.entry._replace(kind=kind))


async def _read_removed(
    connection: Connection,
    snapshot: QueueSnapshot,
    letters: Mapping[str, Any],
    audit: Mapping[str, Any],
    index: EntryIndex,
) -> tuple[list[RemovedEntry], Traced]:
    """Return in order the removed entries about jobs that are stored, or have other entries; and all copies' extent."""
    name, created = letters["config"]["name"], datetime.fromisoformat(letters["created"])
    parser, known = EntryParser(snapshot.queue, snapshot.created, connection.domain), index.entry_sequences()
    stored = await stored_sequences(connection, snapshot.queue, snapshot.state)
    found: dict[int, RemovedEntry | None] = {}
    traced: set[int] = set()
    lowest = 0
    start = await _first_since(connection, audit, _oldest(snapshot, index))
    stream, subject = audit["config"]["name"], entry_copies_filter(snapshot.queue)
    async for copy in read_range(connection, stream, subject, start):
        message = republished_message(copy)
        if proves_nothing(copy) or republishing_stream(copy) != name or copy.stored_at < created:
            continue
        if not parser.is_entry(message.subject):
            continue
        # Entries after those that were read belong to the next scan.
        if not 0 < message.sequence <= index.read_to:
            continue
        lowest = min(lowest or message.sequence, message.sequence)
        if message.sequence in known:
            continue
        traced.add(message.sequence)
        job = _parse(parser, message)
        if job is None or (job[0] not in stored and job[0] not in index):
            continue
        removed = RemovedEntry(*job, message.subject, message.stored_at)
        # Two copies of one entry that differ: one of them is a forgery, and neither counts.
        if message.sequence in found and found[message.sequence] != removed:
            found[message.sequence] = None
        else:
            found.setdefault(message.sequence, removed)
    return [removed for _, removed in sorted(found.items()) if removed], Traced(lowest, len(traced))


def _parse(parser: EntryParser, message: StoredMessage) -> tuple[int, Entry] | None:
    try:
        return parser.parse(message) if message.stored_at.tzinfo else None
    except ValueError:
        # The time of a copy that the server didn't make.
        return None


def _oldest(snapshot: QueueSnapshot, index: EntryIndex) -> datetime:
    """Return a time before which no entry about a job that matters can have been stored."""
    if len(index) or not snapshot.state["messages"]:
        return snapshot.created_at
    return max(snapshot.created_at, datetime.fromisoformat(snapshot.state["first_ts"]))


async def _first_since(connection: Connection, info: Mapping[str, Any], moment: datetime) -> int:
    """Return a sequence of a stream before which everything was stored before a moment, by binary search."""
    low, high = max(1, int(info["state"]["first_seq"])), int(info["state"]["last_seq"])
    while low < high:
        middle = (low + high) // 2
        message = await next_message(connection, info["config"]["name"], middle, ">")
        if message is not None and message.stored_at < moment:
            low = message.sequence + 1
        else:
            high = middle
    return low


async def _read_terminated(
    connection: Connection, letters: Mapping[str, Any], audit: Mapping[str, Any]
) -> dict[int, str]:
    """Return the reasons of the entries that were terminated, by their sequences."""
    name, created = letters["config"]["name"], datetime.fromisoformat(letters["created"])
    reasons: dict[int, str] = {}
    if not covered_by_any(audit["config"].get("subjects") or [], entry_terminations(name)):
        return reasons
    async for message in read_range(connection, audit["config"]["name"], entry_terminations(name)):
        advisory = event_of(message, name, connection.domain)
        if isinstance(advisory, Terminated) and message.stored_at >= created:
            reasons[advisory.stream_seq] = advisory.reason
    return reasons


def _handler_of(
    copy: RemovedEntry, handlers: Sequence[DeadLetterHandler], config: Mapping[str, Any], now: datetime
) -> DeadLetterHandler | None:
    """Return the handler that can have acknowledged an entry; ``None`` where anything else can have removed it."""
    if _may_be_evicted(copy, config, now):
        return None
    interested = config["retention"] == "interest"
    for handler in handlers:
        delivered = handler.delivered >= copy.entry.sequence and handler.takes(copy.subject)
        # With interest retention, an entry that no consumer matched was never stored.
        if delivered and not (interested and handler.created > copy.stored_at):
            return handler
    return None


def _may_be_evicted(copy: RemovedEntry, config: Mapping[str, Any], now: datetime) -> bool:
    """Return whether a limit of the dead letter queue can have removed an entry."""
    limits = ["max_msgs_per_subject", *(["max_msgs", "max_bytes"] if config.get("discard") != "new" else [])]
    if config.get("allow_rollup_hdrs") or any(config.get(limit, -1) > 0 for limit in limits):
        return True
    max_age = timedelta(microseconds=config.get("max_age", 0) / 1_000)
    if max_age > timedelta() and now - copy.stored_at >= max_age:
        return True
    # The server's advisories have no headers, and so no age limit of their own.
    advisories = (EntryKind.DELIVERIES, EntryKind.TERMINATION, EntryKind.DELETION)
    return bool(config.get("allow_msg_ttl")) and copy.entry.kind not in advisories
