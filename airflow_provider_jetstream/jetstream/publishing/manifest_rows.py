"""The rows of a manifest: for each stored job its message id, the digest of its body and its stream sequence.

A row is 32 bytes: the 16 of the message id, the first 8 of the SHA-256 of the body, and the sequence, big-endian. The
highest bit of the sequence is set where it isn't known whether the message of that sequence was the job, and the next
one where the sequence is that of a schedule, which another stream than the queue has. The manifest's head holds the
last rows; those before are in pages, messages of up to a few thousand rows each, which the head names by their
sequences in the events stream. Nobody else can add one.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message, last_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import manifest_page_subject, manifest_subject
from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.jetstream.origin import digest_of
from airflow_provider_jetstream.jetstream.publishing.digest_table import DIGEST_BYTES
from airflow_provider_jetstream.jetstream.publishing.job_keys import BODY_DIGEST_BYTES
from airflow_provider_jetstream.jetstream.publishing.manifest_head import ManifestHead, parse_manifest_head
from airflow_provider_jetstream.jetstream.publishing.outgoing_run import UniformRun
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.outgoing_run import OutgoingRun
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

ROW_BYTES: Final = 32
# In the sequence of a row: it isn't known whether the message that has the id of the job was the job.
UNVERIFIED: Final = 1 << 63
_KEY_BYTES: Final = DIGEST_BYTES + BODY_DIGEST_BYTES
_PAGE_ROWS: Final = 4_096
_INLINE_ROWS: Final = 256
# The headers of a page; the other fields of a head. Both with what the server adds to a message.
_PAGE_RESERVE: Final = 512
_HEAD_RESERVE: Final = 2_048
# A sequence in the text of a head, with its comma.
_NUMBER_BYTES: Final = 12
_READ_AT_ONCE: Final = 8


def unpacked_rows(rows: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield message id, body digest and sequence of each row."""
    for start in range(0, len(rows) - ROW_BYTES + 1, ROW_BYTES):
        row = rows[start : start + ROW_BYTES]
        yield row[:DIGEST_BYTES], row[DIGEST_BYTES:_KEY_BYTES], int.from_bytes(row[_KEY_BYTES:])


def inline_rows(head: ManifestHead) -> bytes:
    """Return the rows that a manifest's head holds itself."""
    try:
        rows = b64decode(head.rows, validate=True)
    except (Base64Error, ValueError):
        return b""
    return rows if len(rows) % ROW_BYTES == 0 else b""


class ManifestRows:
    """The rows that a try adds to a manifest: in pages, and the last of them in its head.

    :param key: the manifest's key, one token
    """

    def __init__(self, connection: Connection, queue: WorkQueue, key: str) -> None:
        self._connection = connection
        self._events = str(queue.events.name if queue.events else "")
        self._subject = manifest_page_subject(queue.name, key)
        limit = connection.max_payload
        if queue.events and (queue.events.max_msg_size or 0) > 0:
            limit = min(limit, queue.events.max_msg_size or limit)
        self._page_bytes = max(1, min(_PAGE_ROWS, (limit - _PAGE_RESERVE) // ROW_BYTES)) * ROW_BYTES
        self._head_bytes = max(0, limit - _HEAD_RESERVE)
        # Base64 makes four bytes of three, and a head may get the rows of two tries at once.
        self._inline_bytes = min(_INLINE_ROWS, self._head_bytes // ROW_BYTES // 4) * ROW_BYTES
        self._pages: list[int] = []
        self._replaced: set[int] = set()
        self._inline = bytearray()
        # Those of the head as this try stored it last.
        self._recorded: set[bytes] = set()
        # By position: message id and body digest of each job that isn't known to be stored yet.
        self._noted: dict[int, bytes] = {}
        self._runs: list[_NotedRun] = []
        self._fills_at = self._page_bytes // ROW_BYTES
        self.added = 0

    @property
    def overflows(self) -> bool:
        """Whether no head that the events stream takes can name the pages: its messages are too small."""
        return _NUMBER_BYTES * len(self._pages) + 2 * len(self._inline) > max(self._head_bytes, ROW_BYTES)

    @property
    def max_runs(self) -> int:
        """How many runs of jobs a head may name besides."""
        return self._head_bytes // (8 * _NUMBER_BYTES)

    @property
    def may_fill_page(self) -> bool:
        """Whether enough jobs were noted to fill a page once they are stored."""
        return self._noted_jobs >= self._fills_at

    def postpone(self) -> None:
        """Store no page until as many further jobs were noted."""
        self._fills_at = self._noted_jobs + self._page_bytes // ROW_BYTES

    @property
    def _noted_jobs(self) -> int:
        return len(self._noted) + sum([len(run.bodies) for run in self._runs])

    def resume(self, head: ManifestHead, *, renews_pages: bool = False) -> None:
        """Go on with the rows of an earlier try.

        :param renews_pages: whether its rows will be added again, so that their pages stay as long as the head
        """
        self._replaced = set(head.pages) if renews_pages else set()
        self._pages = [] if renews_pages else list(head.pages)
        rows = inline_rows(head)
        self._recorded = set(_split(rows))
        self._inline = bytearray() if renews_pages else bytearray(rows)

    def note_run(self, first: int, run: OutgoingRun) -> bool:
        """Note a run that is about to be sent, and return true."""
        if isinstance(run, UniformRun):
            self._runs.append(_NotedRun(first, *run.row_columns()))
        else:
            for offset in range(len(run)):
                self.note(first + offset, run.job(offset))
        return True

    def note(self, index: int, job: OutgoingJob) -> None:
        """Note a job that is about to be sent."""
        if digest := digest_of(job.message_id):
            self._noted[index] = digest + job.key.body_digest[:BODY_DIGEST_BYTES]

    def add(self, digest: bytes, body_digest: bytes, sequence: int) -> None:
        """Add a job that an earlier try has stored."""
        self._inline += digest + body_digest[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)

    async def take(self, report: PublishReport, *, only_full: bool = False) -> bool:
        """Add the noted jobs that are stored by now, and store pages of those that a head doesn't hold.

        :param only_full: whether to store full pages only
        :return: whether a page was stored
        """
        sequences = report.sequences
        self._take_runs(sequences, only_full=only_full)
        for index in [index for index in self._noted if index < len(sequences) and sequences[index]]:
            place = sequences[index] | (SCHEDULED if index in report.scheduled else 0)
            self._inline += self._noted.pop(index) + place.to_bytes(8)
            self.added += 1
        self.postpone()
        stored = False
        while len(self._inline) >= self._page_bytes or (not only_full and len(self._inline) > self._inline_bytes):
            page = bytes(self._inline[: self._page_bytes])
            ack = await store(self._connection, self._subject, page, {"Nats-Expected-Stream": self._events})
            self._pages.append(ack.sequence)
            del self._inline[: self._page_bytes]
            stored = True
        return stored

    def _take_runs(self, sequences: array[int], *, only_full: bool) -> None:
        waiting: list[_NotedRun] = []
        for run in self._runs:
            if rows := run.rows(sequences):
                self._inline += rows
                self.added += len(run.bodies)
            elif only_full:
                waiting.append(run)
            else:
                self._noted.update(run.unfinished())
        self._runs = waiting

    def recorded(self, head: ManifestHead) -> ManifestHead:
        """Return a head with the rows, and with those that another run of its idempotency key has added meanwhile."""
        for row in _split(inline_rows(head)):
            if row not in self._recorded:
                self._recorded.add(row)
                self._inline += row
        self._pages += sorted({*head.pages} - {*self._pages} - self._replaced)
        self._recorded = set(_split(self._inline))
        if self.overflows:
            # A retry searches for the jobs.
            return head.model_copy(update={"rows": "", "pages": [], "unrecorded_from": head.queue_from})
        return head.model_copy(update={"rows": b64encode(self._inline).decode(), "pages": sorted(self._pages)})


@dataclass(frozen=True, slots=True)
class _NotedRun:
    """Jobs that follow each other, none of which was known to be stored.

    :param ids: message ids, as two numbers each
    :param bodies: the beginnings of the digests of bodies
    """

    first: int
    ids: array[int]
    bodies: array[int]

    def rows(self, sequences: array[int]) -> bytes:
        """Return the rows of the jobs; nothing unless all of them are stored."""
        count = len(self.bodies)
        stored = sequences[self.first : self.first + count]
        if len(stored) < count or 0 in stored:
            return b""
        if sys.byteorder == "little":
            stored.byteswap()
        rows = array("Q", bytes(ROW_BYTES * count))
        rows[::4], rows[1::4], rows[2::4], rows[3::4] = self.ids[::2], self.ids[1::2], self.bodies, stored
        return rows.tobytes()

    def unfinished(self) -> Iterator[tuple[int, bytes]]:
        """Yield the index of each job, and its row without its sequence."""
        ids, bodies = self.ids.tobytes(), self.bodies.tobytes()
        for place in range(len(self.bodies)):
            digest = ids[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            yield self.first + place, digest + bodies[place * BODY_DIGEST_BYTES : (place + 1) * BODY_DIGEST_BYTES]


def _split(rows: bytes | bytearray) -> Iterator[bytes]:
    return (bytes(rows[start : start + ROW_BYTES]) for start in range(0, len(rows) - ROW_BYTES + 1, ROW_BYTES))


async def read_rows(
    connection: Connection, events: str, queue: str, key: str, head: ManifestHead
) -> AsyncGenerator[bytes | None, None]:
    """Yield the rows of a manifest, page by page, and at last those of its head; ``None`` for a page that is gone."""
    subject = manifest_page_subject(queue, key)

    async def read(sequence: int) -> bytes | None:
        message = await get_message(connection, events, sequence)
        if message is None or message.subject != subject or len(message.data) % ROW_BYTES:
            return None
        return message.data

    for start in range(0, len(head.pages), _READ_AT_ONCE):
        for rows in await map_concurrently(read, head.pages[start : start + _READ_AT_ONCE]):
            yield rows
    yield inline_rows(head)


async def read_manifest_sequences(connection: Connection, events: str, queue: str, key: str) -> array[int] | None:
    """Return the stream sequences of the jobs in a manifest; ``None`` where not all are known.

    Schedules are left out: they are in another stream.

    :param events: the events stream of the queue
    :param key: the manifest's key
    """
    try:
        message = await last_message(connection, events, manifest_subject(queue, key))
    except NotFoundError:
        return None
    head = parse_manifest_head(message.data) if message else None
    if head is None or not head.is_about(queue, key):
        return None
    if head.unrecorded_from is not None:
        # A try was cut off, or its jobs don't fit.
        return None
    sequences = array("Q")
    async for rows in read_rows(connection, events, queue, key, head):
        if rows is None:
            return None
        sequences.extend(sequence for _, _, sequence in unpacked_rows(rows) if 0 < sequence < SCHEDULED)
    return sequences
