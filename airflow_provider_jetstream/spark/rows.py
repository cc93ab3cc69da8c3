"""Rows of a data frame as messages on the wire."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from airflow_provider_jetstream.jetstream.subjects import subject_problem
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.types import StructType

_TYPES = {
    "value": ("binary", "string"),
    "subject": ("string",),
    "headers": ("array<struct<key:string,value:string>>",),
    "msg_id": ("string",),
}
# The writer's own.
_RESERVED = {"nats-msg-id", "nats-expected-stream"}
_FORBIDDEN = ("\r", "\n")
_REMEMBERED = 100_000
_AROUND_ID = len(b"NATS/1.0\r\nNats-Msg-Id: \r\n")


class Message(NamedTuple):
    """A row that can be published, or why it can't.

    :param subject: its subject
    :param message_id: what the stream knows repeats by
    :param size: the bytes of header and body
    :param rest: what follows the reply subject on the wire: sizes, header, body
    :param problem: why it can't be published
    """

    subject: bytes
    message_id: bytes
    size: int = 0
    rest: bytes = b""
    problem: str | None = None


def check_schema(schema: StructType, subject: str | None) -> None:
    """Make sure that rows can become messages.

    :param schema: of the rows
    :param subject: of rows that have none of their own
    :raises SparkOptionError: a column is missing, unknown or of another type
    """
    for field in schema.fields:
        kinds = _TYPES.get(field.name)
        if kinds is None or field.dataType.simpleString() not in kinds:
            expected = ", ".join(f"{name} {' or '.join(types)}" for name, types in _TYPES.items())
            raise SparkOptionError(
                f"expected columns among {expected}, found {field.name} {field.dataType.simpleString()}: select or cast"
                " before writing"
            )
    if "value" not in schema.fieldNames():
        raise SparkOptionError("expected a column value with the messages' bodies, found none")
    if subject is None and "subject" not in schema.fieldNames():
        raise SparkOptionError("expected a column subject or the option subject, found neither")


class Encoder:
    """Makes messages of one partition's rows.

    A row without an id of its own gets one made of its place and its content: the same row at the same place gets the
    same id when a task is tried again, and another row at that place gets another, so that none is taken for a repeat.

    :param stream: the only stream that may store them
    :param subject: of rows that have none of their own
    :param identity: of the write and the partition
    """

    def __init__(self, stream: str, subject: str | None, identity: str) -> None:
        self._expected = f"\r\nNats-Expected-Stream: {stream}\r\n".encode()
        self._subject = subject.encode() if subject is not None else None
        self._identity = identity.encode()
        self._index = 0
        self._problems: dict[bytes | None, str | None] = {}

    def messages(self, batch: pa.RecordBatch) -> list[Message]:
        """Make messages of rows.

        :param batch: the rows, following those of the last call
        :return: a message for each
        """
        empty: list[None] = [None] * batch.num_rows
        names = set(batch.schema.names)
        values, subjects, ids = (
            # Text is bytes already, which Arrow gives away without a copy.
            batch.column(name).cast(pa.binary()).to_pylist() if name in names else empty
            for name in ("value", "subject", "msg_id")
        )
        headers = batch.column("headers").to_pylist() if "headers" in names else empty
        found = [
            self._message(index, value or b"", subject or self._subject, pairs, message_id)
            for index, (value, subject, pairs, message_id) in enumerate(
                zip(values, subjects, headers, ids, strict=True), self._index
            )
        ]
        self._index += len(found)
        return found

    def _message(
        self,
        index: int,
        body: bytes,
        subject: bytes | None,
        headers: Sequence[dict[str, str]] | None,
        message_id: bytes | None,
    ) -> Message:
        problem = self._problems.get(subject, "")
        if problem == "":
            problem = _subject_problem(subject)
            if len(self._problems) < _REMEMBERED:
                self._problems[subject] = problem
        lines = b""
        if headers and not problem:
            problem = next((found for header in headers if (found := _header_problem(header))), None)
            if not problem:
                lines = "".join(f"{header['key']}: {header['value'] or ''}\r\n" for header in headers).encode()
        if message_id is None:
            message_id = self._derived(index, subject or b"", lines, body)
        elif not message_id or b"\n" in message_id or b"\r" in message_id:
            problem = problem or "its msg_id is empty or has more than one line"
        if problem:
            return Message(subject or b"", message_id, problem=problem)
        header_size = _AROUND_ID + len(message_id) + len(self._expected) + len(lines)
        size = header_size + len(body)
        told = header_size, size, message_id, self._expected, lines, body
        rest = b" %d %d\r\nNATS/1.0\r\nNats-Msg-Id: %b%b%b\r\n%b\r\n" % told
        return Message(subject or b"", message_id, size, rest)

    def _derived(self, index: int, subject: bytes, lines: bytes, body: bytes) -> bytes:
        # No subject holds a line feed, and lines of headers end with an empty one: no two rows make the same content.
        content = b"%b\n%b\r\n%b" % (subject, lines, body)
        return b"%b:%d:%b" % (self._identity, index, blake2b(content, digest_size=8).hexdigest().encode())


def _subject_problem(given: bytes | None) -> str | None:
    if given is None:
        return "it has no subject, and there is no option subject"
    subject = given.decode()
    problem = subject_problem(subject, wildcards=False)
    return f"its subject {subject[:80]!r} can't be used: {problem}" if problem else None


def _header_problem(header: dict[str, str] | None) -> str | None:
    key, value = (header["key"] or "", header["value"] or "") if header else ("", "")
    if not key or ":" in key or any(character in key + value for character in _FORBIDDEN) or key != key.strip():
        return f"its header {key[:80]!r} can't be used: expected a name without colons, and one line"
    if key.lower() in _RESERVED:
        return f"its header {key} is the writer's own: use the column msg_id and the option stream"
    return None
