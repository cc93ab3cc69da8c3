"""The columns of a message, and Arrow batches of the requested ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.source.key_columns import key_column, row_kind_column
from airflow_provider_jetstream.spark.wire.arrow_buffers import TIMESTAMP
from airflow_provider_jetstream.spark.wire.bulk_headers import HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from pyspark.sql.types import StructType

_HEADERS_TYPE = "array<struct<key:string,value:string>>"
_TYPES = {
    "value": ("binary", pa.binary()),
    "subject": ("string", pa.string()),
    "stream": ("string", pa.string()),
    "seq": ("bigint", pa.int64()),
    "timestamp": ("timestamp", TIMESTAMP),
    "headers": (_HEADERS_TYPE, HEADERS),
    "key": ("string", pa.string()),
    "rowKind": ("string", pa.string()),
}
_OF_BUCKETS = ("key", "rowKind")
# Columns that this package reads and the data source doesn't offer: the time as the server's text, the header block as
# it is on the wire, with its first line, and how many bytes subject, headers and body have, for which a consumer sends
# no bodies.
TIME_TEXT: Final = "time_text"
OWN_HEADERS: Final = "own_headers"
SIZE: Final = "size"
_ARROW = {name: arrow for name, (_, arrow) in _TYPES.items()} | {
    TIME_TEXT: pa.string(),
    OWN_HEADERS: pa.binary(),
    SIZE: pa.int64(),
}

# Detects zlib's own format and gzip by their first bytes.
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
# A body of a megabyte may decompress to a gigabyte of zeros.
_MOST_DECOMPRESSED = 16 << 20


def read_schema(*, with_headers: bool, of_bucket: bool = False) -> str:
    """Return the DDL of the columns that can be read."""
    absent = [*([] if with_headers else ["headers"]), *([] if of_bucket else _OF_BUCKETS)]
    return ", ".join(f"{name} {kind}" for name, (kind, _) in _TYPES.items() if name not in absent)


@dataclass(frozen=True)
class RequestedColumns:
    """The requested columns, in order.

    :param names: their names
    :param nullable: whether Spark lets each be null
    :param decompress: whether bodies are decompressed
    """

    names: tuple[str, ...]
    nullable: tuple[bool, ...]
    decompress: bool = False

    @classmethod
    def of(
        cls, schema: StructType, *, with_headers: bool, decompress: bool = False, of_bucket: bool = False
    ) -> RequestedColumns:
        """Take the columns of a schema, which may be fewer than there are and in another order.

        :raises SparkOptionError: one of them can't be read
        """
        for field in schema.fields:
            kind = _TYPES.get(field.name, ("", None))[0]
            if field.dataType.simpleString() != kind:
                raise SparkOptionError(
                    f"expected columns of {read_schema(with_headers=True, of_bucket=of_bucket)}, found"
                    f" {field.name} {field.dataType.simpleString()}: choose among them, and decode bodies with"
                    ' from_json(col("value").cast("string"), …)'
                )
            if field.name in _OF_BUCKETS and not of_bucket:
                raise SparkOptionError(
                    f"expected the option bucket for the column {field.name}, found none: name the bucket instead of"
                    " the stream"
                )
            if field.name == "headers" and not with_headers:
                raise SparkOptionError("expected includeHeaders true for the column headers, found it false: set it")
        return cls(tuple(schema.fieldNames()), tuple(field.nullable for field in schema.fields), decompress)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def batch(self, count: int, makers: Mapping[str, Callable[[], Any]]) -> pa.RecordBatch:
        """Make a batch of ``count`` rows; only the makers of requested columns are called."""
        fields = [
            pa.field(name, _ARROW[name], nullable) for name, nullable in zip(self.names, self.nullable, strict=True)
        ]
        if not fields:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        derived: dict[str, Callable[[], Any]] = {
            "key": lambda: key_column(makers["subject"]()),
            "rowKind": lambda: row_kind_column(makers["headers"]()),
        }
        columns = {name: (derived.get(name) or makers[name])() for name in self.names}
        if self.decompress and "value" in columns:
            columns["value"] = decompress_bodies(columns["value"])
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


class FetchedBatch(NamedTuple):
    """Messages of a range.

    :param batch: the messages
    :param next_sequence: the sequence at which reading continues
    :param missing: the first sequence before that of which there was no message
    """

    batch: pa.RecordBatch
    next_sequence: int
    missing: int | None


def first_missing(expected: int, sequences: NDArray[np.int64]) -> int | None:
    """Return the first gap in ascending sequences of which the first should be ``expected``."""
    count = len(sequences)
    if sequences[0] == expected and sequences[-1] == expected + count - 1:
        return None
    return expected + int(np.argmax(sequences != np.arange(expected, expected + count)))


def decompress_bodies(bodies: pa.BinaryArray) -> pa.BinaryArray:
    """Decompress bodies; what isn't one whole stream of zlib, or exceeds 16 MiB, stays as it is."""
    return pa.array([_decompress(body) for body in bodies.to_pylist()], pa.binary())


def _decompress(body: bytes) -> bytes:
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = stream.decompress(body, _MOST_DECOMPRESSED)
    except zlib.error:
        return body
    return content if stream.eof and not stream.unused_data else body
