"""Ids that are made of rows don't depend on the rows' order, which a shuffle doesn't keep; no JVM."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType
from spark_streams import make_stream, read_all

from airflow_provider_jetstream.spark.errors import RowsNotStoredError, SparkOptionError
from testbed.spark_face import JetStreamDataSource, RowWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from testbed.spark_face import SourceStream

    Row = Mapping[str, Any]

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
_SCHEMA = pa.schema(
    [
        *(("value", pa.binary()), ("subject", pa.string()), ("headers", _HEADERS), ("msg_id", pa.string())),
        *(("ttl", pa.string()), ("expected_last_subject_sequence", pa.int64())),
    ]
)


def _write(stream_options: Mapping[str, str], rows: Sequence[Row], identity: str = "write:0") -> RowWriter:
    with RowWriter(stream_options, identity) as writer:
        writer.send(pa.RecordBatch.from_pylist([*map(dict, rows)], _SCHEMA))
        writer.wait_for_all()
    return writer


def test_a_retry_in_another_order_stores_what_is_missing(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    # Three of each, and rows without a value among those with an empty one.
    rows: list[Row] = [
        {"value": str(number % 300).encode() if number % 300 else b"", "subject": f"{stream.name}.a"}
        for number in range(900)
    ]
    refused: list[Row] = [{"value": None, "subject": f"{stream.name}.a"}] * 3
    dice = random.SystemRandom()
    for stored in (0, 400, 650):
        left = [*dice.sample(rows, 900)[stored:], *refused]
        with pytest.raises(RowsNotStoredError, match="its value is null"):
            _write(stream_options, dice.sample(left, len(left)))
    assert _write(stream_options, dice.sample(rows, 900)).duplicates == 900
    assert Counter(row["value"] for row in read_all(stream_options)) == Counter(row["value"] for row in rows)
    # Another write of the same rows is meant.
    assert _write(stream_options, rows, identity="write:1").duplicates == 0
    assert stream.info().last == 1800


def test_a_streaming_task_that_does_not_know_its_batch_writes_nothing(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    for options in ({}, {"msgIdPrefix": "mine"}):
        source = JetStreamDataSource({**stream_options, "subject": f"{stream.name}.a", **options})
        writer: Any = source.streamWriter(StructType([StructField("value", BinaryType())]), overwrite=False)
        with pytest.raises(SparkOptionError, match="equal rows of two batches would be stored once"):
            writer.write(iter([pa.RecordBatch.from_pylist([{"value": b"a"}])]))
    assert stream.info().last == 0
