"""The columns of a message, and Arrow batches of the requested ones.

Protocol: for buckets, ADR-8 "JetStream based Key-Value Stores"; ADR-43 for the markers that the server stores.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.arrow_buffers import TIMESTAMP
from airflow_provider_jetstream.spark.source.bulk_parser import HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


# A bucket that mirrors another one has the subjects of that one.
_BEFORE_KEY = r"^\$KV\.[^.]*\."
_OPERATION, _MARKER = "KV-Operation", "Nats-Marker-Reason"
_KINDS = {
    (_OPERATION, "DEL"): "delete",
    (_OPERATION, "PURGE"): "purge",
    (_MARKER, "Remove"): "delete",
    (_MARKER, "MaxAge"): "purge",
    (_MARKER, "Purge"): "purge",
}


def key_column(subjects: pa.StringArray) -> pa.StringArray:
    """Return the keys of subjects."""
    return pc.replace_substring_regex(subjects, _BEFORE_KEY, "")


def row_kind_column(headers: pa.ListArray) -> pa.StringArray:
    """Return ``put``, ``delete`` or ``purge`` for the headers of each message."""
    kinds = np.full(len(headers), "put", object)
    pairs, rows = headers.flatten(), np.asarray(pc.list_parent_indices(headers))
    names = pairs.field("key")
    for index in np.flatnonzero(np.asarray(pc.is_in(names, pa.array([_OPERATION, _MARKER])))).tolist():
        kind = _KINDS.get((names[index].as_py(), pairs.field("value")[index].as_py()))
        if kind:
            kinds[rows[index]] = kind
    return pa.array(kinds, pa.string())


_PAIR = StructType(
    [StructField("key", StringType(), nullable=False), StructField("value", StringType(), nullable=False)]
)
_TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "value": (BinaryType(), pa.binary()),
    "subject": (StringType(), pa.string()),
    "stream": (StringType(), pa.string()),
    "seq": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), TIMESTAMP),
    "headers": (ArrayType(_PAIR, containsNull=False), HEADERS),
    "key": (StringType(), pa.string()),
    "rowKind": (StringType(), pa.string()),
}
_OF_BUCKETS = ("key", "rowKind")
# An internal column: the bytes of subject, headers and body. To fill it, a consumer sends messages without bodies.
SIZE: Final = "size"
_ARROW = {name: arrow for name, (_, arrow) in _TYPES.items()} | {SIZE: pa.int64()}

# Detects zlib's own format and gzip by their first bytes.
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
# A body of a megabyte may decompress to a gigabyte of zeros.
_MOST_DECOMPRESSED = 16 << 20
_DECOMPRESSED_TOGETHER = 4 << 20
_BODY = "value"


def read_schema(*, with_headers: bool, of_bucket: bool = False) -> StructType:
    """Return the columns that can be read.

    None is ever null, and neither is any part of the headers: Spark then leaves out its own checks, which take a
    seventh of its time for a message.
    """
    absent = [*([] if with_headers else ["headers"]), *([] if of_bucket else _OF_BUCKETS)]
    fields = [StructField(name, kind, nullable=False) for name, (kind, _) in _TYPES.items() if name not in absent]
    return StructType(fields)


def _ddl(schema: StructType) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema.fields)


def _headers_type(kind: ArrayType) -> pa.ListType:
    """Return the Arrow type of headers, with nulls where Spark lets them be: it wants the two to be equal."""
    pair = kind.elementType
    fields = [pa.field(field.name, pa.string(), field.nullable) for field in cast("StructType", pair).fields]
    return pa.list_(pa.field("element", pa.struct(fields), kind.containsNull))


@dataclass(frozen=True)
class RequestedColumns:
    """The requested columns, in order.

    :param names: their names
    :param nullable: whether Spark lets each be null
    :param decompress: whether bodies are decompressed
    :param headers: the type of the column ``headers``
    """

    names: tuple[str, ...]
    nullable: tuple[bool, ...]
    decompress: bool = False
    headers: pa.ListType = HEADERS

    @classmethod
    def of(
        cls, schema: StructType, *, with_headers: bool, decompress: bool = False, of_bucket: bool = False
    ) -> RequestedColumns:
        """Take the columns of a schema, which may be fewer than there are and in another order.

        :raises SparkOptionError: one of them can't be read
        """
        readable = read_schema(with_headers=True, of_bucket=True)
        kinds = {field.name: field.dataType.simpleString() for field in readable.fields}
        headers = HEADERS
        for field in schema.fields:
            if field.dataType.simpleString() != kinds.get(field.name):
                raise SparkOptionError(
                    f"expected columns of {_ddl(read_schema(with_headers=True, of_bucket=of_bucket))}, found"
                    f" {_ddl(StructType([field]))}: choose among them, and decode bodies with"
                    ' from_json(col("value").cast("string"), …)'
                )
            if field.name in _OF_BUCKETS and not of_bucket:
                raise SparkOptionError(
                    f"expected the option bucket for the column {field.name}, found none: name the bucket instead of"
                    " the stream"
                )
            if field.name == "headers" and not with_headers:
                raise SparkOptionError("expected includeHeaders true for the column headers, found it false: set it")
            if isinstance(field.dataType, ArrayType):
                headers = _headers_type(field.dataType)
        return cls(tuple(schema.fieldNames()), tuple(field.nullable for field in schema.fields), decompress, headers)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def batch(self, count: int, makers: Mapping[str, Callable[[], Any]]) -> pa.RecordBatch:
        """Make a batch of ``count`` rows; only the makers of requested columns are called."""
        types = _ARROW | {"headers": self.headers}
        fields = [
            pa.field(name, types[name], nullable) for name, nullable in zip(self.names, self.nullable, strict=True)
        ]
        if not fields:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        derived: dict[str, Callable[[], Any]] = {
            "key": lambda: key_column(makers["subject"]()),
            "rowKind": lambda: row_kind_column(makers["headers"]()),
        }
        columns = {name: (derived.get(name) or makers[name])() for name in self.names}
        if "headers" in columns:
            columns["headers"] = columns["headers"].cast(self.headers)
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))

    def decoded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the rows of batches as Spark gets them: with bodies decompressed where the options want that.

        What isn't one whole stream of zlib, or exceeds 16 MiB, stays as it is. A few kilobytes may decompress to
        gigabytes, so a batch ends where its bodies have 4 MiB, whatever it was read with.
        """
        if not self.decompress or _BODY not in self.names:
            yield from batches
            return
        place = self.names.index(_BODY)
        for batch in batches:
            first, bodies, size = 0, [], 0
            for row, body in enumerate(batch.column(place), 1):
                bodies.append(_decompress(body.as_py()))
                size += len(bodies[-1])
                if size >= _DECOMPRESSED_TOGETHER or row == batch.num_rows:
                    column = pa.array(bodies, pa.binary())
                    yield batch.slice(first, row - first).set_column(place, batch.schema.field(place), column)
                    first, bodies, size = row, [], 0


def _decompress(body: bytes) -> bytes:
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = stream.decompress(body, _MOST_DECOMPRESSED)
    except zlib.error:
        return body
    return content if stream.eof and not stream.unused_data else body
