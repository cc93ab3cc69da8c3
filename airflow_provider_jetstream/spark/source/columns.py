"""The columns of a message, and Arrow batches of those that are asked for."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from airflow_provider_jetstream.spark.errors import SparkOptionError
from airflow_provider_jetstream.spark.wire.bulk_headers import HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from pyspark.sql.types import StructType

_HEADERS_TYPE = "array<struct<key:string,value:string>>"
_TYPES = {
    "value": ("binary", pa.binary()),
    "subject": ("string", pa.string()),
    "stream": ("string", pa.string()),
    "seq": ("bigint", pa.int64()),
    "timestamp": ("timestamp", pa.timestamp("us", "UTC")),
    "headers": (_HEADERS_TYPE, HEADERS),
}
# What the data source doesn't give, but this package reads: the time in the server's own text, and headers as they are
# on the wire, with their first line.
TIME_TEXT: Final = "time_text"
OWN_HEADERS: Final = "own_headers"
_ARROW = {name: kind for name, (_, kind) in _TYPES.items()} | {TIME_TEXT: pa.string(), OWN_HEADERS: pa.binary()}


def read_schema(*, with_headers: bool) -> str:
    """Write the schema of what is read.

    :param with_headers: whether there is a column for headers
    :return: in Spark's language
    """
    return ", ".join(f"{name} {kind}" for name, (kind, _) in _TYPES.items() if with_headers or name != "headers")


@dataclass(frozen=True)
class Columns:
    """The columns that are asked for, in order.

    :param names: their names
    :param nullable: whether Spark lets each be null
    :param decompress: whether bodies are decompressed
    """

    names: tuple[str, ...]
    nullable: tuple[bool, ...]
    decompress: bool = False

    @classmethod
    def of(cls, schema: StructType, *, with_headers: bool, decompress: bool = False) -> Columns:
        """Take the columns of a schema, which may be fewer than there are and in another order.

        :param schema: Spark's
        :param with_headers: whether headers are read
        :param decompress: whether bodies are decompressed
        :return: the columns
        :raises SparkOptionError: one of them isn't there
        """
        for field in schema.fields:
            kind = _TYPES.get(field.name, ("", None))[0]
            if field.dataType.simpleString() != kind:
                raise SparkOptionError(
                    f"expected columns of {read_schema(with_headers=True)}, found"
                    f" {field.name} {field.dataType.simpleString()}: choose among them, and decode bodies with"
                    ' from_json(col("value").cast("string"), …)'
                )
            if field.name == "headers" and not with_headers:
                raise SparkOptionError("expected includeHeaders true for the column headers, found it false: set it")
        return cls(tuple(schema.fieldNames()), tuple(field.nullable for field in schema.fields), decompress)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def batch(self, count: int, makers: Mapping[str, Callable[[], Any]]) -> pa.RecordBatch:
        """Make a batch.

        :param count: of its rows
        :param makers: called for those columns that are asked for
        :return: the batch
        """
        fields = [
            pa.field(name, _ARROW[name], nullable) for name, nullable in zip(self.names, self.nullable, strict=True)
        ]
        if not fields:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
        columns = {name: makers[name]() for name in self.names}
        if self.decompress and "value" in columns:
            columns["value"] = decompressed(columns["value"])
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


def constant(text: str, count: int) -> pa.StringArray:
    """Make a column of one value.

    :param text: the value
    :param count: how often
    :return: the column
    """
    return pa.repeat(pa.scalar(text, pa.string()), count)


def integers(values: NDArray[np.int64]) -> pa.Int64Array:
    """Make a column of whole numbers.

    :param values: the numbers, which aren't copied
    :return: the column
    """
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def microseconds(values: NDArray[np.int64]) -> pa.TimestampArray:
    """Make a column of times.

    :param values: microseconds since 1970, which aren't copied
    :return: the column
    """
    return pa.Array.from_buffers(_TYPES["timestamp"][1], len(values), [None, pa.py_buffer(values)])


# Zlib's own format and that of gzip, told by their first bytes.
_EITHER = 32 + zlib.MAX_WBITS
# A body of a megabyte may be a gigabyte of zeros.
_MOST = 16 << 20


def decompressed(bodies: pa.BinaryArray) -> pa.BinaryArray:
    """Decompress bodies.

    :param bodies: some of which may not be compressed
    :return: them decompressed, or as they are where they aren't whole streams of zlib, or larger than 16 MiB
    """
    return pa.array([_decompressed(body) for body in bodies.to_pylist()], pa.binary())


def _decompressed(body: bytes) -> bytes:
    stream = zlib.decompressobj(_EITHER)
    try:
        content = stream.decompress(body, _MOST)
    except zlib.error:
        return body
    return content if stream.eof and not stream.unused_data else body
