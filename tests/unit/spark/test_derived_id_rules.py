"""Ids that are made of rows need rows that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_provider_jetstream.spark.source.row_encoder import PublishBatch
from testbed.spark_face import RowEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    Row = Mapping[str, Any]


def _text(*values: bytes) -> pa.StringArray:
    """Return a column of text as Spark makes it of any bytes."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


def test_bytes_that_are_not_utf_8_are_a_body_and_nothing_else() -> None:
    pairs = pa.StructArray.from_arrays([_text(b"K", b"O\xff"), _text(b"\xfe", b"1")], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2, 2], pa.int32()), pairs)
    values, subjects = _text(b"a", b"b", b"\xfe", b"c"), _text(b"s.a", b"s.b", b"s.c", b"s.\xff")
    encoded = RowEncoder("s", None, "write:0").encode(
        pa.RecordBatch.from_arrays([values, subjects, headers], ["value", "subject", "headers"])
    )
    assert encoded.problems == {
        0: "its header 'K' can't be used: expected UTF-8",
        1: "its header 'O\\udcff' can't be used: expected UTF-8",
        3: "its subject b's.\\xff' can't be used: expected UTF-8",
    }
    assert encoded.rests[2].as_py().endswith(b"\r\n\r\n\xfe\r\n")
    batch = PublishBatch.from_rows(encoded, 0, b"inbox.")
    assert batch.row_name(3).startswith("s.\ufffd write:0:0:")
