"""Ids that are made of rows: the same in any order, other ones for other rows, none for rows that can't be sent."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.spark.source.row_encoder import PublishBatch, RowEncoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
