"""Encodes rows of a data frame as messages, and frames them for the wire.

A row without an id of its own gets one of its content, which does not depend on the order in which a partition's rows
come. Columns whose values the server acts on become headers.

Protocol: ``Nats-TTL`` in NATS ADR-43, ``Nats-Schedule`` in NATS ADR-51, the expected sequences in ADR-22.
"""

from __future__ import annotations

import math
import re
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_jetstream.jetstream.client.subjects import covers, subject_problem
from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE, TARGET
from airflow_provider_jetstream.jetstream.units import parse_seconds
from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.arrow_buffers import content_and_offsets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from pyspark.sql.types import StructType

    Problems = dict[int, str]


_NEVER = "never"


@dataclass(frozen=True)
class ServerColumn:
    """A column that becomes a header.

    :param header: the header
    :param types: of the column, as Spark names them
    :param encode: returns the header's values, null where a row has none, and adds problems by row
    :param needs: the stream's setting without which the server would ignore the header
    :param since: the first server with that setting
    """

    header: str
    types: tuple[str, ...]
    encode: Callable[[pa.Array, Problems], pa.BinaryArray]
    needs: str = ""
    since: str = ""


def require_settings(columns: Collection[str], stream: str, config: Mapping[str, Any]) -> None:
    """Require that a stream heeds the headers that columns become.

    An older server keeps no setting that it doesn't know, and stores the header like any other.

    :param config: the stream's, as the server returns it
    :raises SparkOptionError: a setting is off, or the server doesn't know it
    """
    for name in columns:
        column = SERVER_COLUMNS.get(name)
        if name in (SCHEDULE_COLUMN, TARGET_COLUMN) and config.get("retention") == "workqueue":
            raise SparkOptionError(
                f"expected no column {name} for the work queue {stream}: where a stream takes schedules, whoever may"
                " publish to it can purge it; publish such jobs as Job(body, at=…), which the queue's mover brings, or"
                " leave the column out"
            )
        if column and column.needs and not config.get(column.needs):
            raise SparkOptionError(
                f"expected {column.needs} on {stream} (nats-server {column.since} or later) for the column {name},"
                f" found it off: without it {column.header} has no effect; set it, or leave the column out"
            )


def add_server_headers(lines: pa.BinaryArray, batch: pa.RecordBatch, problems: Problems) -> pa.BinaryArray:
    """Add the headers of a batch's columns to its rows' header lines."""
    for name, column in SERVER_COLUMNS.items():
        if name in batch.schema.names:
            values = column.encode(batch.column(name), problems)
            line = pc.binary_join_element_wise(f"{column.header}: ".encode(), values, b"\r\n", b"")
            lines = pc.binary_join_element_wise(lines, pc.fill_null(line, b""), b"")
    if SCHEDULE_COLUMN in batch.schema.names or TARGET_COLUMN in batch.schema.names:
        _require_pairs(batch, problems)
    return lines


def _require_pairs(batch: pa.RecordBatch, problems: Problems) -> None:
    columns = [
        batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)
        for name in (SCHEDULE_COLUMN, TARGET_COLUMN)
    ]
    for row in _rows(pc.xor(*map(pc.is_valid, columns))):
        problems.setdefault(row, f"it has only one of {SCHEDULE_COLUMN} and {TARGET_COLUMN}: a schedule needs both")


def _encode_ttl(column: pa.Array, problems: Problems) -> pa.BinaryArray:
    values = pc.unique(column).to_pylist()
    encoded: list[bytes | None] = []
    for value in values:
        problem = None
        try:
            # The server counts whole seconds.
            encoded.append(value if value is None else _NEVER.encode() if value == _NEVER else _seconds(value))
        except ValueError as error:
            problem = f"its ttl can't be used: {error}"
            encoded.append(None)
        if problem:
            for row in _rows(pc.fill_null(pc.equal(column, value), fill_value=False)):
                problems.setdefault(row, problem)
    indexes = pc.index_in(column, pa.array(values, column.type))
    return pa.array(encoded, pa.binary()).take(indexes)


def _seconds(value: str | int) -> bytes:
    seconds = math.ceil(parse_seconds(value))
    if seconds < 1:
        raise ValueError(f'expected at least 1 s, or "never", found {value!r}')
    return b"%ds" % seconds


def _encode_schedule(column: pa.Array, problems: Problems) -> pa.BinaryArray:
    if pa.types.is_timestamp(column.type):
        column = pc.strftime(column.cast(pa.timestamp("us")), "@at %Y-%m-%dT%H:%M:%SZ")
    return _encode_text(SCHEDULE_COLUMN)(column, problems)


def _encode_text(name: str) -> Callable[[pa.Array, Problems], pa.BinaryArray]:
    def encode(column: pa.Array, problems: Problems) -> pa.BinaryArray:
        values = column.cast(pa.binary())
        wrong = pc.or_(pc.equal(pc.binary_length(values), 0), pc.match_substring_regex(values, "[\r\n]"))
        for row in _rows(pc.fill_null(wrong, fill_value=False)):
            problems.setdefault(row, f"its {name} is empty or has more than one line")
        return values

    return encode


def _encode_sequence(name: str) -> Callable[[pa.Array, Problems], pa.BinaryArray]:
    def encode(column: pa.Array, problems: Problems) -> pa.BinaryArray:
        for row in _rows(pc.fill_null(pc.less(column, 0), fill_value=False)):
            problems.setdefault(row, f"its {name} is {column[row]}: expected a sequence, or 0 for none")
        return column.cast(pa.string()).cast(pa.binary())

    return encode


def _rows(mask: pa.BooleanArray) -> list[int]:
    return np.flatnonzero(np.asarray(mask)).tolist()


SCHEDULE_COLUMN: Final = "schedule"
TARGET_COLUMN: Final = "schedule_target"
_LAST: Final = "expected_last_sequence"
_LAST_OF_SUBJECT: Final = "expected_last_subject_sequence"
_NUMBERS: Final = ("bigint", "int")

SERVER_COLUMNS: Final[Mapping[str, ServerColumn]] = {
    "ttl": ServerColumn("Nats-TTL", ("string", *_NUMBERS), _encode_ttl, "allow_msg_ttl", "2.11"),
    SCHEDULE_COLUMN: ServerColumn(SCHEDULE, ("string", "timestamp"), _encode_schedule, "allow_msg_schedules", "2.12"),
    TARGET_COLUMN: ServerColumn(TARGET, ("string",), _encode_text(TARGET_COLUMN), "allow_msg_schedules", "2.12"),
    _LAST: ServerColumn("Nats-Expected-Last-Sequence", _NUMBERS, _encode_sequence(_LAST)),
    _LAST_OF_SUBJECT: ServerColumn("Nats-Expected-Last-Subject-Sequence", _NUMBERS, _encode_sequence(_LAST_OF_SUBJECT)),
}

# A multiple of three, so that base64 needs no padding; too long for anybody to find two contents with one digest.
_DIGEST = 18
_KEY = 32
_FEWEST_BITS = 12
_MOST_FULL = 0.65
_MOVED_TOGETHER = 1 << 16


class DerivedIds:
    """The message ids of one partition's rows that have none of their own.

    An id is made of what identifies the partition, a digest of the content, and how many rows with that content came
    before. Whatever the order of the rows is, the same rows get the same ids.

    :param identity: of the write and the partition, with which the ids begin
    :param secret: a key of the digests, without which nobody can compute an id, however many others he sees; may be
        empty
    """

    def __init__(self, identity: bytes, secret: bytes = b"") -> None:
        self._identity = identity
        self._key = blake2b(identity, digest_size=_KEY, key=secret).digest() if secret else b""
        self._equal_rows = _EqualRows()

    def of(self, contents: Sequence[bytes]) -> pa.BinaryArray:
        """Return the ids of the rows that follow those of the last call.

        :param contents: of the rows; equal messages have equal ones
        """
        key = self._key
        digests = b"".join([blake2b(content, digest_size=_DIGEST, key=key).digest() for content in contents])
        # Two contents whose digests begin with the same eight bytes count as equal here, and have different ids: where
        # they change places in a retry, they may be stored twice, and neither is lost.
        keys = np.frombuffer(digests, np.uint8).reshape(-1, _DIGEST)[:, :8].copy().view(np.uint64).ravel()
        equal_before = self._equal_rows.count(keys)
        if key:
            digests = self._numbered(digests, equal_before)
        numbers = pa.array(equal_before).cast(pa.string()).cast(pa.binary())
        texts = pa.py_buffer(urlsafe_b64encode(digests))
        fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(_DIGEST * 4 // 3), len(contents), [None, texts])
        return pc.binary_join_element_wise(self._identity, numbers, fixed.cast(pa.binary()), b":")

    def _numbered(self, digests: bytes, numbers: NDArray[np.int64]) -> bytes:
        """Return digests that differ between equal rows: from a stored one nobody can compute the next."""
        found = bytearray(digests)
        for row in np.flatnonzero(numbers).tolist():
            place = slice(row * _DIGEST, (row + 1) * _DIGEST)
            content = b"%b%d" % (digests[place], numbers[row])
            found[place] = blake2b(content, digest_size=_DIGEST, key=self._key).digest()
        return bytes(found)


class _EqualRows:
    """Counts rows by key, in a hash table of 19 to 37 bytes for each distinct key, and 56 while the table grows."""

    def __init__(self) -> None:
        self._used = 0
        self._resize(_FEWEST_BITS)

    def count(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return, for each of these rows, how many rows before it have its key.

        :param keys: evenly distributed
        """
        # Zero marks a free slot.
        keys = np.maximum(keys, np.uint64(1))
        order = np.argsort(keys)
        ordered = keys[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=np.uint64(0)))
        distinct, counts = ordered[starts], np.diff(starts, append=len(keys))
        while self._used + len(distinct) > _MOST_FULL * len(self._keys):
            self._grow()
        slots = self._slots(distinct)
        earlier = self._counts[slots].astype(np.int64)
        self._used += len(distinct) - int(np.count_nonzero(earlier))
        # Four bytes are enough: no server can know as many ids.
        self._counts[slots] = earlier + counts
        numbers = np.empty(len(keys), np.int64)
        numbers[order] = np.arange(len(keys)) - np.repeat(starts - earlier, counts)
        return numbers

    def _slots(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the slots of distinct keys, which they take if they have none yet."""
        slots = (keys >> np.uint64(64 - self._bits)).astype(np.int64)
        searching = np.arange(len(keys))
        while len(searching):
            at, wanted = slots[searching], keys[searching]
            found = self._keys[at]
            # Of several keys that take the same slot, the last one has it.
            self._keys[at] = np.where(found == 0, wanted, found)
            searching = searching[self._keys[at] != wanted]
            slots[searching] = (slots[searching] + 1) & (len(self._keys) - 1)
        return slots

    def _grow(self) -> None:
        keys, counts = self._keys, self._counts
        self._resize(self._bits + 1)
        for start in range(0, len(keys), _MOVED_TOGETHER):
            part = slice(start, start + _MOVED_TOGETHER)
            taken = keys[part] != 0
            self._counts[self._slots(keys[part][taken])] = counts[part][taken]

    def _resize(self, bits: int) -> None:
        self._bits = bits
        self._keys, self._counts = np.zeros(1 << bits, np.uint64), np.zeros(1 << bits, np.uint32)


_TYPES = {
    "value": ("binary", "string"),
    "subject": ("string",),
    "headers": ("array<struct<key:string,value:string>>",),
    "msg_id": ("string",),
    **{name: column.types for name, column in SERVER_COLUMNS.items()},
}
# Headers that have a meaning to the server.
_NATS_PREFIX = "nats-"
# Headers that the writer sets itself.
_RESERVED = {"nats-msg-id", "nats-expected-stream"}
_FORBIDDEN = ("\r", "\n")
_BINARY_HEADERS = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
_NO_TEXT = re.compile("[\ud800-\udfff]")
_CHECKED_SUBJECTS = 100_000
_NULL = "its value is null: leave it out, or store a message without a body with nullValue=empty"
_AROUND_ID = len(b"NATS/1.0\r\nNats-Msg-Id: \r\n")


class EncodedRows(NamedTuple):
    """Rows as messages, in columns.

    :param subjects: their subjects
    :param ids: their message ids, by which the stream detects duplicates
    :param rests: what follows the reply subject on the wire: sizes, header, body
    :param sizes: the bytes of header and body
    :param problems: by row, why it can't be published
    :param guessable: which ids others can compute, such as ids of the column
    """

    subjects: pa.BinaryArray
    ids: pa.BinaryArray
    rests: pa.BinaryArray
    sizes: NDArray[np.int64]
    problems: dict[int, str]
    guessable: NDArray[np.bool_]


def check_schema(schema: StructType, subject: str | None) -> None:
    """Require that rows of a schema can become messages.

    :param subject: the default for rows without a subject
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

    A row without a message id gets one made of its message and of how many equal messages came before: a retried task
    makes the same ids although a shuffle hands it the rows in another order.

    :param stream: the only stream that may store the messages
    :param subject: the default for rows without a subject
    :param identity: of the write and the partition
    :param secret: a key of the ids that are made
    :param archived: filters of subjects whose messages don't name the stream: its archive would refuse the copies
    :param null_is_empty: whether a row without a value becomes a message without a body
    :param drop_nats_headers: whether headers that have a meaning to the server are left out
    """

    def __init__(
        self,
        stream: str,
        subject: str | None,
        identity: str,
        *,
        secret: bytes = b"",
        archived: Sequence[str] = (),
        null_is_empty: bool = False,
        drop_nats_headers: bool = False,
    ) -> None:
        self._expected = f"\r\nNats-Expected-Stream: {stream}\r\n".encode()
        self._subject = subject.encode() if subject is not None else None
        self._derived_ids = DerivedIds(identity.encode(), secret)
        self._has_secret = bool(secret)
        self._archived = archived
        self._null_is_empty = null_is_empty
        self._drop_nats_headers = drop_nats_headers
        self._subject_problems: dict[bytes | None, str | None] = {}

    def encode(self, batch: pa.RecordBatch) -> EncodedRows:
        """Encode the rows that follow those of the last call."""
        problems: dict[int, str] = {}
        bodies = self._bodies(_column(batch, "value"), problems)
        subjects = self._subjects(_column(batch, "subject"), problems)
        own_lines = _header_lines(batch, problems, drop_nats=self._drop_nats_headers)
        lines = add_server_headers(own_lines, batch, problems)
        ids = self._ids(batch, [subjects, b"\n", lines, b"\r\n", bodies], problems)
        middle = self._after_id(subjects) if self._archived else pa.scalar(self._expected, pa.binary())
        header_sizes = _AROUND_ID + _lengths(middle) + _lengths(ids) + _lengths(lines)
        sizes = header_sizes + _lengths(bodies)
        start, end = b"\r\nNATS/1.0\r\nNats-Msg-Id: ", b"\r\n"
        numbers = b" ", _digits(header_sizes), b" ", _digits(sizes)
        rests = _joined(*numbers, start, ids, middle, lines, end, bodies, end)
        given = np.asarray(pc.is_valid(_column(batch, "msg_id")))
        guessable = given if self._has_secret else np.ones(batch.num_rows, np.bool_)
        return EncodedRows(subjects, ids, rests, sizes, problems, guessable)

    def _bodies(self, bodies: pa.BinaryArray, problems: dict[int, str]) -> pa.BinaryArray:
        if bodies.null_count and not self._null_is_empty:
            problems.update(dict.fromkeys(_true_rows(pc.is_null(bodies)), _NULL))
        return _filled(bodies, b"")

    def _subjects(self, subjects: pa.BinaryArray, problems: dict[int, str]) -> pa.BinaryArray:
        if self._subject is not None:
            subjects = _filled(subjects, self._subject)
        for subject in pc.unique(subjects).to_pylist():
            problem = self._subject_problems.get(subject, "")
            if problem == "":
                problem = _subject_problem(subject)
                if len(self._subject_problems) < _CHECKED_SUBJECTS:
                    self._subject_problems[subject] = problem
            if problem:
                same = pc.is_null(subjects) if subject is None else pc.equal(subjects, subject)
                problems.update(dict.fromkeys(_true_rows(same), problem))
        return _filled(subjects, b"")

    def _after_id(self, subjects: pa.BinaryArray) -> pa.BinaryArray:
        """Return what follows each id: the name of the stream, unless it has an archive and captures the subject."""
        found = [subject for subject in pc.unique(subjects).to_pylist() if self._is_archived(subject)]
        is_archived = pc.is_in(subjects, value_set=pa.array(found, pa.binary()))
        return pc.if_else(is_archived, pa.scalar(b"\r\n", pa.binary()), pa.scalar(self._expected, pa.binary()))

    def _is_archived(self, subject: bytes) -> bool:
        return any(covers(wide, subject.decode(errors="replace")) for wide in self._archived)

    def _ids(self, batch: pa.RecordBatch, message: Sequence[Any], problems: dict[int, str]) -> pa.BinaryArray:
        ids = _column(batch, "msg_id")
        wrong = pc.or_(pc.equal(pc.binary_length(ids), 0), pc.match_substring_regex(ids, r"[\r\n]|^\s|\s$"))
        for row in _true_rows(pc.fill_null(wrong, fill_value=False)):
            problems.setdefault(row, "its msg_id is empty, or has white space at its ends or more than one line")
        if not ids.null_count:
            return ids
        # No subject contains a line feed, and header lines end with an empty one: no two messages have equal content.
        contents = _joined(*message).to_pylist()
        for row in problems:
            contents[row] = _refused_content(batch, row)
        if ids.null_count == len(ids):
            return self._derived_ids.of(contents)
        missing = pc.is_null(ids)
        derived = self._derived_ids.of([contents[row] for row in _true_rows(missing)])
        return pc.replace_with_mask(ids, missing, derived)


@dataclass(frozen=True)
class PublishBatch:
    """The frames of consecutive rows, held until each is acknowledged: to be sent again, or named in an error.

    :param start: the number of the first row
    :param end: the number after the last row
    :param subjects: the rows' subjects
    :param ids: the rows' message ids
    :param content: the frames, one after another
    :param bounds: the offset of each frame and of the end
    :param guessable: which of the ids others can compute
    """

    start: int
    end: int
    subjects: pa.BinaryArray
    ids: pa.BinaryArray
    content: memoryview
    bounds: NDArray[np.int32]
    guessable: NDArray[np.bool_]

    @classmethod
    def from_rows(cls, rows: EncodedRows, start: int, reply_prefix: bytes) -> PublishBatch:
        """Write the frames of rows; each row's reply subject is the prefix and the row's number."""
        end = start + len(rows.sizes)
        numbers = _digits(np.arange(start, end))
        frames = _joined(b"HPUB ", rows.subjects, b" " + reply_prefix, numbers, rows.rests)
        content, bounds = content_and_offsets(frames)
        return cls(start, end, rows.subjects, rows.ids, memoryview(content), bounds, rows.guessable)

    def frames(self, first: int, end: int) -> memoryview:
        """Return the frames of the rows from ``first`` to before ``end``."""
        return self.content[self.bounds[first - self.start] : self.bounds[end - self.start]]

    def subject(self, index: int) -> bytes:
        """Return a row's subject."""
        subject: bytes = self.subjects[index - self.start].as_py()
        return subject

    def message_id(self, index: int) -> str:
        """Return a row's message id."""
        msg_id: bytes = self.ids[index - self.start].as_py()
        return msg_id.decode(errors="replace")

    def has_guessable_id(self, index: int) -> bool:
        """Return whether others can compute a row's message id."""
        return bool(self.guessable[index - self.start])

    def row_name(self, index: int) -> str:
        """Return a row's subject and message id, for errors."""
        return f"{self.subject(index).decode(errors='replace')} {self.message_id(index)}"

    def chunks(self, without: Sequence[int], rows: int, size: int) -> Iterator[tuple[int, int]]:
        """Divide the rows into chunks that are sent together.

        :param without: rows that aren't sent, ascending
        :param rows: at most so many in a chunk
        :param size: bytes after which a chunk ends
        :return: for each chunk, the number of the first row and the one after the last
        """
        first = self.start
        for edge in [*without, self.end]:
            while first < edge:
                full = self.bounds[first - self.start] + size
                last = self.start + int(np.searchsorted(self.bounds, full, "right"))
                last = min(max(last - 1, first + 1), first + rows, edge)
                yield first, last
                first = last
            first = edge + 1


def _refused_content(batch: pa.RecordBatch, row: int) -> bytes:
    """Return content without a line feed: a row that isn't stored mustn't count as equal to a message."""
    return repr([_without_text(column)[0].as_py() for column in batch.slice(row, 1).columns]).encode()


def _without_text(column: pa.Array) -> pa.Array:
    """Return a column with bytes in place of text, which may not be UTF-8."""
    if pa.types.is_list(column.type):
        return column.cast(_BINARY_HEADERS)
    return column.cast(pa.binary()) if pa.types.is_string(column.type) else column


def _joined(*columns: pa.BinaryArray | bytes) -> pa.BinaryArray:
    """Concatenate columns and constants row by row."""
    return pc.binary_join_element_wise(*columns, b"")


def _digits(numbers: NDArray[np.int64]) -> pa.BinaryArray:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _column(batch: pa.RecordBatch, name: str) -> pa.BinaryArray:
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, pa.binary())
    return batch.column(name).cast(pa.binary())


def _filled(array: pa.BinaryArray, fill: bytes) -> pa.BinaryArray:
    return pc.fill_null(array, fill)


def _lengths(array: pa.BinaryArray) -> NDArray[np.int64]:
    return np.asarray(pc.binary_length(array)).astype(np.int64)


def _true_rows(mask: pa.BooleanArray) -> list[int]:
    return np.flatnonzero(np.asarray(mask)).tolist() if pc.any(mask).as_py() else []


def _header_lines(batch: pa.RecordBatch, problems: dict[int, str], *, drop_nats: bool) -> pa.BinaryArray:
    """Write each row's own headers, every line with its end.

    :param drop_nats: whether to leave out headers that have a meaning to the server
    """
    if "headers" not in batch.schema.names:
        return pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
    blocks: list[bytes] = []
    columns = SERVER_COLUMNS.items()
    reserved = {column.header.lower(): name for name, column in columns if name in batch.schema.names}
    for row, found in enumerate(_decoded_headers(batch.column("headers"))):
        headers = [header for header in found or () if not (drop_nats and _is_of_server(header))]
        problem = next((problem for header in headers if (problem := _header_problem(header, reserved))), None)
        if problem:
            problems.setdefault(row, problem)
            blocks.append(b"")
            continue
        blocks.append("".join(f"{header['key']}: {header['value'] or ''}\r\n" for header in headers).encode())
    return pa.array(blocks, pa.binary())


def _decoded_headers(column: pa.ListArray) -> list[Any]:
    """Return the rows' headers; bytes that aren't UTF-8 become surrogates, which no header may have."""
    try:
        rows: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        rows = _without_text(column).to_pylist()
    else:
        return rows

    def decoded(header: dict[str, bytes | None]) -> dict[str, str]:
        return {part: (text or b"").decode(errors="surrogateescape") for part, text in header.items()}

    return [[header and decoded(header) for header in found or ()] for found in rows]


def _is_of_server(header: dict[str, str] | None) -> bool:
    return bool(header and (header["key"] or "").lower().startswith(_NATS_PREFIX))


def _subject_problem(raw_subject: bytes | None) -> str | None:
    if raw_subject is None:
        return "it has no subject, and there is no option subject"
    try:
        subject = raw_subject.decode()
    except UnicodeDecodeError:
        return f"its subject {raw_subject[:80]!r} can't be used: expected UTF-8"
    problem = subject_problem(subject, wildcards=False)
    return f"its subject {subject[:80]!r} can't be used: {problem}" if problem else None


def _header_problem(header: dict[str, str] | None, columns: Mapping[str, str]) -> str | None:
    """Return why a header can't be used.

    :param columns: by header, the columns that set it
    """
    key, value = (header["key"] or "", header["value"] or "") if header else ("", "")
    if not (key + value).isascii() and _NO_TEXT.search(key + value):
        return f"its header {key[:80]!r} can't be used: expected UTF-8"
    if not key or ":" in key or any(character in key + value for character in _FORBIDDEN) or key != key.strip():
        return f"its header {key[:80]!r} can't be used: expected a name without colons, and one line"
    if key.lower() in _RESERVED:
        return (
            f"its header {key} is set by the writer: use the column msg_id and the option stream, or"
            " leave out what the server gave a meaning with natsHeaders=drop"
        )
    if column := columns.get(key.lower()):
        return f"its header {key} is set by the column {column}: leave out one of the two, or use natsHeaders=drop"
    return None
