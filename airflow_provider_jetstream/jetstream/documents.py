"""Documents of a queue in its events stream: lines of JSON in messages, the *parts*, which are never changed.

Handles, ids and reports of many jobs are documents. A part is one message on ``published.<queue>.<key>-<kind>``:
a first line that names the document, then a line of JSON for each row. Who has a document keeps the references to its
parts, which have the position, the number of rows and the digest of each::

    name = DocumentName("orders_events", "orders", "reports", key)
    writer = DocumentWriter(connection, name)
    await writer.add(rows)
    parts = await writer.finish()
    async for rows in read_parts(connection, name, parts, TypeAdapter(list[Row])): ...

What anybody may do: publish on a document's subject, delete messages, create the stream anew, name other messages in a
reference. So a part is read only if its digest is the reference's: then it is the message that the writer has stored.
And only if its subject and its first line are those of the document: then a reference leads to no other queue, key or
kind. Any other message is a missing part, for which the reader gets ``None`` in its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, pause_if_due
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.streams import get_message
from airflow_provider_jetstream.jetstream.contract import document_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

_Row = TypeVar("_Row")

# Nothing else runs in the event loop while a part is parsed: for some 8 ms.
PART_BYTES: Final = 256 * 2**10
# The first line and the headers of a part, and what the server adds to a message.
_RESERVE: Final = 2 * 2**10
_READ_AT_ONCE: Final = 8
# Before other tasks of the event loop may run.
_ENCODED_AT_ONCE: Final = 256
_DIGEST_DIGITS: Final = 32
# The stream's max_msg_size is smaller.
_TOO_LARGE: Final = 10054

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class DocumentPart(NamedTuple):
    """A reference to a part.

    :param sequence: its sequence in the events stream
    :param rows: how many rows it has
    :param digest: the first 32 hexadecimal digits of the SHA-256 of its body
    """

    sequence: Annotated[int, Field(strict=True, ge=1, lt=2**64)]
    rows: Annotated[int, Field(strict=True, ge=1, le=PART_BYTES)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def _named_once(parts: list[DocumentPart]) -> list[DocumentPart]:
    if len({part.sequence for part in parts}) < len(parts):
        raise ValueError("expected each part once")
    return parts


# References to parts in a model: they come back from JSON, which anybody may have written.
DocumentParts: TypeAlias = Annotated[list[DocumentPart], AfterValidator(_named_once)]


@dataclass(frozen=True, slots=True)
class DocumentName:
    """Which document it is.

    :param stream: the events stream
    :param queue: the work queue
    :param kind: what it holds, one word
    :param key: one token that distinguishes it from the others of its kind
    :param created: when the queue's stream was created, in the server's own text, where its rows have sequences of it
    """

    stream: str
    queue: str
    kind: str
    key: str
    created: str = ""

    @property
    def subject(self) -> str:
        """The subject of its parts."""
        return document_subject(self.queue, self.key, self.kind)

    @property
    def heading(self) -> bytes:
        """The first line of each part."""
        kind = f"io.airflow.jetstream.v1.{self.kind}"
        fields = {"type": kind, "stream": self.queue, "created": self.created, "key": self.key}
        return _encode(fields).encode() + b"\n"


class DocumentWriter:
    """Stores a document, part by part as its rows come.

    :param name: the document
    :param part_rows: how many rows a part has at most
    """

    def __init__(self, connection: Connection, name: DocumentName, *, part_rows: int = PART_BYTES) -> None:
        self._connection = connection
        self._name = name
        self._subject, self._heading = name.subject, name.heading
        self._part_rows = part_rows
        self._room = min(PART_BYTES, connection.max_payload) - _RESERVE
        self._lines: list[bytes] = []
        self._size = 0
        self.parts: list[DocumentPart] = []

    async def add(self, rows: Iterable[object]) -> None:
        """Add rows, which JSON can hold, and store the parts that are full.

        :raises ArgumentError: no part can hold a row
        :raises ApiError: the stream refuses a part
        :raises TransientError: it isn't known whether a part is stored
        """
        for number, row in enumerate(rows, 1):
            line = _encode(row).encode()
            if len(line) > PART_BYTES - _RESERVE:
                raise ArgumentError(
                    f"expected rows of at most {PART_BYTES - _RESERVE:,} bytes of JSON for {self._subject}, found one"
                    f" of {len(line):,}: shorten ids and results of jobs"
                )
            if self._lines and (self._size + len(line) >= self._room or len(self._lines) >= self._part_rows):
                await self._store_lines()
            self._lines.append(line)
            self._size += len(line) + 1
            if number % _ENCODED_AT_ONCE == 0:
                await pause_if_due()

    async def finish(self) -> list[DocumentPart]:
        """Store the rest, and return the references to all parts; see :meth:`add`."""
        if self._lines:
            await self._store_lines()
        return self.parts

    async def _store_lines(self) -> None:
        lines, self._lines, self._size = self._lines, [], 0
        await self._store(lines)

    async def _store(self, lines: Sequence[bytes]) -> None:
        body = self._heading + b"\n".join(lines)
        try:
            # Another stream may capture the subject of a queue whose events stream is older than its documents.
            ack = await store(self._connection, self._subject, body, {"Nats-Expected-Stream": self._name.stream})
        except ApiError as error:
            if error.err_code != _TOO_LARGE or len(lines) == 1:
                raise
            middle = len(lines) // 2
            self._room = max(1, min(self._room, len(body) // 2))
            await self._store(lines[:middle])
            await self._store(lines[middle:])
            return
        self.parts.append(DocumentPart(ack.sequence, len(lines), _digest(body)))


async def read_parts(
    connection: Connection,
    name: DocumentName,
    parts: Sequence[DocumentPart],
    rows: TypeAdapter[list[_Row]],
) -> AsyncGenerator[list[_Row] | None, None]:
    """Yield the rows of each part, in order; ``None`` for a part that isn't stored any more as it was written.

    Few parts are in memory at a time.

    :param parts: references that somebody has kept; they may come from anybody
    :param rows: what the rows of a part have to be
    :raises TransientError: a part can't be read just now
    """

    async def read(part: DocumentPart) -> StoredMessage | None:
        try:
            return await get_message(connection, name.stream, part.sequence)
        except NotFoundError:
            return None

    for start in range(0, len(parts), _READ_AT_ONCE):
        some = parts[start : start + _READ_AT_ONCE]
        for part, message in zip(some, await map_concurrently(read, some), strict=True):
            yield _rows(name, part, message, rows)
            await pause_if_due()


def _rows(
    name: DocumentName, part: DocumentPart, message: StoredMessage | None, rows: TypeAdapter[list[_Row]]
) -> list[_Row] | None:
    heading = name.heading
    if message is None or message.subject != name.subject or len(message.data) > PART_BYTES:
        return None
    if _digest(message.data) != part.digest or not message.data.startswith(heading):
        return None
    try:
        values = json.loads(_as_list(message.data[len(heading) :]), parse_constant=_refuse)
        return rows.validate_python(values) if len(values) == part.rows else None
    except (ValueError, RecursionError, ValidationError):
        # Whoever may publish here and edit a reference makes both match.
        return None


def _as_list(lines: bytes) -> bytes:
    # A text in JSON has no line feed, so each separates two values; parsed together they take a third of the time.
    return b"[%b]" % lines.replace(b"\n", b",")


def _digest(body: bytes) -> str:
    return sha256(body).hexdigest()[:_DIGEST_DIGITS]


def _refuse(text: str) -> Any:
    raise ValueError(f"expected a number, found {text}")
