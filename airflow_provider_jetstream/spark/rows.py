"""Rows of a data frame as messages on the wire."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.subjects import subject_problem
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
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


class Message(NamedTuple):
    """A row that can be published, or why it can't.

    :param subject: its subject
    :param message_id: what the stream knows repeats by
    :param header: its header as it is on the wire
    :param body: its body
    :param problem: why it can't be published
    """

    subject: str
    message_id: str
    header: bytes = b""
    body: bytes = b""
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
        self._subject = subject
        self._identity = identity
        self._index = 0
        self._problems: dict[str | None, str | None] = {}

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        """Make messages of rows.

        :param batch: the rows, following those of the last call
        :return: a message for each
        """
        empty: list[None] = [None] * batch.num_rows
        columns = {name: batch.column(at).to_pylist() for at, name in enumerate(batch.schema.names)}
        rows = zip(
            columns["value"],
            columns.get("subject", empty),
            columns.get("headers", empty),
            columns.get("msg_id", empty),
            strict=True,
        )
        for value, subject, headers, message_id in rows:
            body = value.encode() if isinstance(value, str) else value or b""
            yield self._message(body, subject or self._subject, headers, message_id)
            self._index += 1

    def _message(
        self, body: bytes, subject: str | None, headers: Sequence[dict[str, str]] | None, message_id: str | None
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
            message_id = self._derived(subject or "", lines, body)
        elif not message_id or any(character in message_id for character in _FORBIDDEN):
            problem = problem or "its msg_id is empty or has more than one line"
        if problem:
            return Message(subject or "", message_id, problem=problem)
        header = b"NATS/1.0\r\nNats-Msg-Id: " + message_id.encode() + self._expected + lines + b"\r\n"
        return Message(subject or "", message_id, header, body)

    def _derived(self, subject: str, lines: bytes, body: bytes) -> str:
        # No subject holds a line feed, and lines of headers end with an empty one: no two rows make the same content.
        content = b"%b\n%b\r\n%b" % (subject.encode(), lines, body)
        return f"{self._identity}:{self._index}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _subject_problem(subject: str | None) -> str | None:
    if subject is None:
        return "it has no subject, and there is no option subject"
    problem = subject_problem(subject, wildcards=False)
    return f"its subject {subject[:80]!r} can't be used: {problem}" if problem else None


def _header_problem(header: dict[str, str] | None) -> str | None:
    key, value = (header["key"] or "", header["value"] or "") if header else ("", "")
    if not key or ":" in key or any(character in key + value for character in _FORBIDDEN) or key != key.strip():
        return f"its header {key[:80]!r} can't be used: expected a name without colons, and one line"
    if key.lower() in _RESERVED:
        return f"its header {key} is the writer's own: use the column msg_id and the option stream"
    return None
