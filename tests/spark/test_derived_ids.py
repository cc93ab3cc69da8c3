"""Ids that are made of rows don't depend on the rows' order, which a shuffle doesn't keep; no JVM."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StructField, StructType
from spark_streams import make_stream, read_all

from airflow_provider_jetstream.spark.errors import RowsNotStoredError, SparkOptionError
from testbed.spark_face import JetStreamStreamWriter, Publisher, RowEncoder, write_options

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
_SUBJECT = "s.default"
# Few of each, so that rows often make the same message, or almost.
_VALUES = st.sampled_from([None, b"", b"a", b"\xff\xfe", b"a\r\n\r\na", b"One: 1\r\n"])
_SUBJECTS = st.sampled_from([None, _SUBJECT, "s.b", "not allowed"])
_NAMES = st.sampled_from(["One", "Two", "", "Nats-Msg-Id", "Nats-Expected-Last-Msg-Id"])
_PAIRS = st.fixed_dictionaries({"key": _NAMES, "value": st.sampled_from([None, "", "1", "ä", "\n"])})
_ROWS = st.fixed_dictionaries(
    {"value": _VALUES, "subject": _SUBJECTS, "headers": st.none() | st.lists(st.none() | _PAIRS, max_size=2)},
    optional={
        "msg_id": st.sampled_from([None, "", "mine"]),
        "ttl": st.sampled_from([None, "90s", "90", "soon"]),
        "expected_last_subject_sequence": st.sampled_from([None, 0, -1]),
    },
)

_OPTIONS = st.fixed_dictionaries({"null_is_empty": st.booleans(), "drop_nats_headers": st.booleans()})


def _encode(
    rows: Sequence[Row], sizes: Sequence[int] = (), identity: str = "write:0", **options: Any
) -> list[tuple[str, tuple[bytes, bytes] | str]]:
    """Encode rows; returns each row's id with its message, or with why there is none.

    :param sizes: of batches; the remaining rows are the last one
    """
    encoder = RowEncoder("s", _SUBJECT, identity, **options)
    edges = sorted({0, *(min(sum(sizes[: number + 1]), len(rows)) for number in range(len(sizes))), len(rows)})
    found: list[tuple[str, tuple[bytes, bytes] | str]] = []
    for first, end in pairwise(edges):
        encoded = encoder.encode(pa.RecordBatch.from_pylist([*map(dict, rows[first:end])], _SCHEMA))
        messages = zip(encoded.subjects.to_pylist(), encoded.rests.to_pylist(), strict=True)
        for number, (row_id, message) in enumerate(zip(encoded.ids.to_pylist(), messages, strict=True)):
            found.append((row_id.decode(), encoded.problems.get(number, message)))
    return found


@pytest.mark.slow
@given(st.lists(_ROWS, max_size=12), st.randoms(use_true_random=False), _OPTIONS)
def test_rows_in_any_order_have_the_same_ids(rows: list[Row], dice: random.Random, options: Mapping[str, Any]) -> None:
    other = dice.sample(rows, len(rows))
    first = _encode(rows, [dice.randint(0, 4) for _ in range(3)], **options)
    again = _encode(other, [dice.randint(0, 4) for _ in range(3)], **options)
    assert Counter(first) == Counter(again)
    derived = [row_id for row_id, _ in first if row_id.startswith("write:0:")]
    assert len(derived) == len({*derived}) == sum(row.get("msg_id") is None for row in rows)


def test_rows_that_differ_in_anything_that_is_stored_have_different_ids() -> None:
    pair = {"key": "One", "value": "1"}
    rows: list[Row] = [
        {"value": b"a", "subject": "s.a"},
        {"value": b"a", "subject": "s.b"},
        {"value": b"", "subject": "s.a"},
        {"value": b"a", "subject": "s.a", "headers": [pair]},
        {"value": b"a", "subject": "s.a", "headers": [pair, pair]},
        {"value": b"a", "subject": "s.a", "headers": [{"key": "One", "value": "2"}]},
        {"value": b"a", "subject": "s.a", "headers": [pair, {"key": "Two", "value": ""}]},
        {"value": b"a", "subject": "s.a", "headers": [{"key": "Two", "value": ""}, pair]},
        {"value": b"One: 1\r\n\r\na", "subject": "s.a"},
        {"value": b"a", "subject": "s.a", "ttl": "90s"},
    ]
    ids = [row_id for row_id, _ in _encode(rows)]
    # The first of its kind, each of them: none counts as equal to another.
    assert {row_id.split(":")[2] for row_id in ids} == {"0"}
    assert len({*ids}) == len(rows)
    assert not {*ids} & {row_id for row_id, _ in _encode(rows, identity="write:1")}


@pytest.mark.slow
def test_many_rows_in_another_order_and_in_other_batches_have_the_same_ids() -> None:
    rows: list[Row] = [{"value": str(number % 40_000).encode()} for number in range(60_000)]
    other = random.SystemRandom().sample(rows, len(rows))
    first, again = _encode(rows, [2000] * 30), _encode(other, [777] * 77)
    assert len({*first}) == len(rows)
    assert {*first} == {*again}


def _write(stream_options: Mapping[str, str], rows: Sequence[Row], identity: str = "write:0") -> Publisher:
    options = write_options(stream_options, "write")
    encoder = RowEncoder(options.stream, options.subject, identity)
    with closing(Publisher(stream_options, options, "partition 0")) as publisher:
        publisher.send(encoder.encode(pa.RecordBatch.from_pylist([*map(dict, rows)], _SCHEMA)))
        publisher.wait_for_all()
    return publisher


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
        writer = JetStreamStreamWriter(
            {**stream_options, "subject": f"{stream.name}.a", **options},
            StructType([StructField("value", BinaryType())]),
            overwrite=False,
        )
        with pytest.raises(SparkOptionError, match="equal rows of two batches would be stored once"):
            writer.write(iter([pa.RecordBatch.from_pylist([{"value": b"a"}])]))
    assert stream.info().last == 0
