"""Rows of a data frame as messages on the wire."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
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
_DIGEST = 8
_AROUND_ID = len(b"NATS/1.0\r\nNats-Msg-Id: \r\n")


class EncodedRows(NamedTuple):
    """Rows that can be published, in columns, or why they can't.

    :param subjects: their subjects
    :param ids: what the stream knows repeats by
    :param rests: what follows the reply subject on the wire: sizes, header, body
    :param sizes: the bytes of header and body
    :param problems: by row, why it can't be published
    """

    subjects: pa.BinaryArray
    ids: pa.BinaryArray
    rests: pa.BinaryArray
    sizes: NDArray[np.int64]
    problems: dict[int, str]


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


class RowEncoder:
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
        self._identity = f"{identity}:".encode()
        self._index = 0
        self._known: dict[bytes | None, str | None] = {}

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """Make messages of rows.

        :param batch: the rows, following those of the last call
        :return: the messages
        """
        count, problems = batch.num_rows, dict[int, str]()
        bodies = _filled(_column(batch, "value"), b"")
        subjects = self._subjects(_column(batch, "subject"), problems)
        lines = _lines(batch, problems)
        ids = self._ids(_column(batch, "msg_id"), [subjects, b"\n", lines, b"\r\n", bodies], problems)
        self._index += count
        before = _AROUND_ID + len(self._expected) + _lengths(ids) + _lengths(lines)
        sizes = before + _lengths(bodies)
        start, middle, end = b"\r\nNATS/1.0\r\nNats-Msg-Id: ", self._expected, b"\r\n"
        numbers = b" ", digits(before), b" ", digits(sizes)
        rests = joined(*numbers, start, ids, middle, lines, end, bodies, end)
        return EncodedRows(subjects, ids, rests, sizes, problems)

    def _subjects(self, given: pa.BinaryArray, problems: dict[int, str]) -> pa.BinaryArray:
        if self._subject is not None:
            given = _filled(given, self._subject)
        for subject in pc.unique(given).to_pylist():
            problem = self._known.get(subject, "")
            if problem == "":
                problem = _subject_problem(subject)
                if len(self._known) < _REMEMBERED:
                    self._known[subject] = problem
            if problem:
                same = pc.is_null(given) if subject is None else pc.equal(given, subject)
                problems.update(dict.fromkeys(_places(same), problem))
        return _filled(given, b"")

    def _ids(self, given: pa.BinaryArray, content: Sequence[Any], problems: dict[int, str]) -> pa.BinaryArray:
        wrong = pc.or_(pc.equal(pc.binary_length(given), 0), pc.match_substring_regex(given, "[\r\n]"))
        for place in _places(pc.fill_null(wrong, fill_value=False)):
            problems.setdefault(place, "its msg_id is empty or has more than one line")
        if not given.null_count:
            return given
        # No subject holds a line feed, and lines of headers end with an empty one: no two rows make the same content.
        contents = joined(*content).to_pylist()
        digests = b"".join([blake2b(each, digest_size=_DIGEST).digest() for each in contents]).hex().encode()
        array = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(2 * _DIGEST), len(given), [None, pa.py_buffer(digests)]
        ).cast(pa.binary())
        numbers = digits(np.arange(self._index, self._index + len(given)))
        return pc.coalesce(given, joined(self._identity, numbers, b":", array))


def joined(*parts: pa.BinaryArray | bytes) -> pa.BinaryArray:
    """Join columns and constants row by row.

    :param parts: from left to right
    :return: a column
    """
    return pc.binary_join_element_wise(*parts, b"")


def digits(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    """Write numbers.

    :param numbers: the numbers
    :return: their decimal digits
    """
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _column(batch: pa.RecordBatch, name: str) -> pa.BinaryArray:
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, pa.binary())
    return batch.column(name).cast(pa.binary())


def _filled(array: pa.BinaryArray, fill: bytes) -> pa.BinaryArray:
    return pc.fill_null(array, fill)


def _lengths(array: pa.BinaryArray) -> NDArray[np.int64]:
    return np.asarray(pc.binary_length(array)).astype(np.int64)


def _places(mask: pa.BooleanArray) -> list[int]:
    return np.flatnonzero(np.asarray(mask)).tolist() if pc.any(mask).as_py() else []


def _lines(batch: pa.RecordBatch, problems: dict[int, str]) -> pa.BinaryArray:
    """Write the rows' own headers, each line with its end."""
    if "headers" not in batch.schema.names:
        return pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
    found: list[bytes] = []
    for place, headers in enumerate(batch.column("headers").to_pylist()):
        problem = next((problem for header in headers or () if (problem := _header_problem(header))), None)
        if problem:
            problems.setdefault(place, problem)
            found.append(b"")
            continue
        found.append("".join(f"{header['key']}: {header['value'] or ''}\r\n" for header in headers or ()).encode())
    return pa.array(found, pa.binary())


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
