"""Finds out whether what a stream holds under a row's message id is that row.

The server drops a message whose ``Nats-Msg-Id`` it remembers, whatever that id was used for before. An id of a column
can be computed by others, and so can one that is made with ``msgIdPrefix``; whoever may publish to the stream can use
it first. So a duplicate is believed only if what is stored has the row's subject, headers and body.

nats-server 2.15.0 compares the expected sequence before the message id (2.10.27 doesn't): what a task, or a connection
that broke, has stored itself is refused when it is sent again, and not acknowledged as a duplicate. Then the next
message is compared with the row.
"""

from __future__ import annotations

import logging
import re
from base64 import urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import parse_headers
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams, next_message
from airflow_provider_jetstream.jetstream.client.wire import encode_message
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.contract import MSG_ID, archive_filter
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, PermissionDeniedError, TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
    from typing import Any, TypeVar

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

    _Result = TypeVar("_Result")

log = logging.getLogger(__name__)

WRONG_LAST_SEQUENCE: Final = 10071

_EXPECTED = re.compile(rb"\r\nNats-Expected-Last-(?:Subject-)?Sequence:[ \t]*(\d{1,19})[ \t]*(?=\r\n)", re.IGNORECASE)
_ID_LINE = b"\r\n" + MSG_ID.encode() + b": "
# Answers of so many bytes at most arrive together; more than so many requests at a time aren't faster.
_BYTES_TOGETHER = 64 << 20
_TOGETHER = 64
# The archive stores a copy a moment after the stream has stored the message.
_ARCHIVE_DELAYS = (0.0, 0.2)
# After so many taken ids, one is made at random, which a retry can't make again.
_MOST_IDS = 8
_DIGEST = 18
_SCHEDULE, _ROLLUP, _TRACE, _STREAM = "Nats-Schedule", ("Nats-Rollup", "sub"), "ats-trace-dest", "ats-expected-stream"


class Row:
    """A row's message as it is on the wire.

    :param frame: the frame that publishes it
    """

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        line, _, self._message = frame.partition(b"\r\n")
        _, self.subject, _, size, _ = line.split(b" ")
        self._header_size = int(size)

    @property
    def size(self) -> int:
        """The bytes of its headers and its body."""
        return len(self._message) - 2

    @property
    def header(self) -> bytes:
        """Its headers, with their first line."""
        return self._message[: self._header_size]

    @property
    def body(self) -> bytes:
        """Its body."""
        return self._message[self._header_size : -2]

    def is_stored_as(self, message: StoredMessage, *, is_transformed: bool) -> bool:
        """Return whether a stored message is this row.

        :param is_transformed: whether the stream stores messages under other subjects
        """
        if message.data != self.body or not (is_transformed or message.subject == decode_text(self.subject)):
            return False
        # As nearly all are, at a fifth of the cost of parsing them.
        lines = "".join([f"{name}: {value}\r\n" for name, value in message.headers])
        if encode_text(f"NATS/1.0\r\n{lines}\r\n") == self.header:
            return True
        own, stored = _compared(parse_headers(self.header)), _compared(message.headers)
        # The server adds to a schedule that it replaces another one on its subject.
        is_schedule = any(name == _SCHEDULE for name, _ in own) and _ROLLUP not in own
        return own == ([pair for pair in stored if pair != _ROLLUP] if is_schedule else stored)

    def with_other_id(self, reply: bytes, tries: int) -> Row:
        """Return the row with another message id, which is the same whenever the row is written.

        :param reply: the subject for the answer
        :param tries: how many ids were taken
        """
        start = self.header.index(_ID_LINE) + len(_ID_LINE)
        message_id, _, rest = self.header[start:].partition(b"\r\n")
        digest = blake2b(b"\n".join([self.subject, self._message]), digest_size=_DIGEST).digest()
        suffix = urlsafe_b64encode(digest) if tries <= _MOST_IDS else uuid4().hex.encode()
        # In place of the last one, so that ids don't grow.
        first = message_id if tries == 1 else message_id.rpartition(b":")[0]
        header = b"%b%b:%b\r\n%b" % (self.header[:start], first, suffix, rest)
        return Row(encode_message(self.subject, self.body, header, reply))


def _compared(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    # The server disables the trace of what it stores, by this header's first letter or by its value. The stream isn't
    # named where it has an archive.
    return [pair for pair in headers if pair[0].lower()[1:] not in (_TRACE, _STREAM)]


class StoredRows:
    """Looks rows up in their stream, over a connection of its own that is opened when the first one is.

    :param raw_options: the data source's options, from which the connection is made
    """

    def __init__(self, raw_options: Mapping[str, str], stream: str) -> None:
        self._raw_options = raw_options
        self._name = stream
        self._connection: BlockingConnection | None = None
        self._info: dict[str, Any] = {}
        self._is_denied = False

    def close(self) -> None:
        """Close the connection; the next row opens another one."""
        if self._connection:
            self._connection.socket.close()
            self._connection = None

    def is_stored(self, row: Row, message: StoredMessage) -> bool:
        """Return whether a message of the stream is a row."""
        return row.is_stored_as(message, is_transformed="subject_transform" in self._info.get("config", {}))

    def finds(self, row: Row) -> bool:
        """Return whether the message that follows the sequences which a row expects is that row.

        :raises TransientError: there is no answer at the moment
        """
        expected = [int(number) for number in _EXPECTED.findall(row.header)]
        if not expected:
            return False

        async def find(connection: BlockingConnection) -> StoredMessage | None:
            return await next_message(connection, self._name, max(expected) + 1, decode_text(row.subject))

        message = self._run(find)
        return message is not None and self.is_stored(row, message)

    def messages(self, sequences: Collection[int]) -> dict[int, StoredMessage]:
        """Read messages by their sequences; omits those that are gone, or that the user may not read.

        :raises TransientError: there is no answer at the moment
        """
        found: dict[int, StoredMessage] = {}
        wanted = sorted({*sequences})

        async def read_all(connection: BlockingConnection) -> None:
            step = max(1, min(_TOGETHER, _BYTES_TOGETHER // connection.max_payload))
            for start in range(0, len(wanted), step):
                read = await Streams(connection).get_many(self._name, wanted[start : start + step])
                found.update({sequence: message for sequence, message in read.items() if message})

        self._run(read_all)
        return found

    def archived(self, sequences: Collection[int]) -> dict[int, StoredMessage]:
        """Read messages that are gone from the stream's archive, if it has one; omits those without a copy.

        :raises TransientError: there is no answer at the moment
        """
        found: dict[int, StoredMessage] = {}

        async def read(connection: BlockingConnection) -> None:
            subjects = archive_filter(self._name)
            if (self._info["config"].get("republish") or {}).get("dest") != subjects:
                return
            for delay in _ARCHIVE_DELAYS:
                await sleep(delay)
                missing = sorted({*sequences} - {*found})
                for info in await list_streams(connection, subjects) if missing else ():
                    archive = ArchiveReader.from_info(connection, info, self._info)
                    copies = await map_concurrently(archive.find, missing)
                    found.update({copy.sequence: copy for copy in copies if copy})

        if sequences:
            self._run(read)
        return found

    def _run(self, read: Callable[[BlockingConnection], Coroutine[Any, Any, _Result]]) -> _Result | None:
        async def run(connection: BlockingConnection) -> _Result:
            self._info = self._info or await stream_info(connection, self._name)
            return await read(connection)

        if self._is_denied:
            return None
        try:
            self._connection = self._connection or BlockingConnection(NatsSocket(socket_settings(self._raw_options)))
            return self._connection.run(run(self._connection))
        except TransientError:
            raise
        except JetStreamProviderError as error:
            # What the user may not read isn't known.
            self._is_denied |= isinstance(error, PermissionDeniedError)
            log.warning("What %s holds under the message ids of rows isn't known: %s", self._name, error)
            return None
