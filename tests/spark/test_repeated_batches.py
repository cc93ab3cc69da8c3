"""A batch of a query that runs again gives each task the same sequences, whatever became of its messages meanwhile."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from queries import ReaderQuery, places
from spark_streams import make_stream, publish_numbers, purge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from testbed.spark_face import SourceStream

_Tasks = list[list[tuple[str, int]]]


def _read(reader: Any, start: object, end: object) -> _Tasks:
    """Plan a batch between offsets as Spark's checkpoint gives them back, and read each of its tasks."""
    partitions = reader.partitions(*json.loads(json.dumps([start, end])))
    return [list(places(reader, [partition])) for partition in partitions]


def _twice(
    options: Mapping[str, str], change: Callable[[], object], *, before: Callable[[], object] = lambda: None
) -> tuple[_Tasks, _Tasks]:
    """Read a query's first batch, and read it again after a change and a restart.

    :param before: happens between the query's first position and the end of the batch
    """
    with closing(ReaderQuery(options)) as query:
        before()
        end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
        first = _read(query.reader, query.offset, end)
        change()
        query.restart({"startingOffsets": "earliest", **options})
        # Spark's checkpoint doesn't have it, so Spark asks for it anew.
        return first, _read(query.reader, query.reader.initialOffset(), end)


def _assert_same_tasks(first: _Tasks, again: _Tasks) -> None:
    assert len(again) == len(first)
    assert all(set(rows) <= set(before) for rows, before in zip(again, first, strict=True))


@pytest.mark.parametrize("retention", ["workqueue", "interest", "limits"])
def test_tasks_keep_their_sequences_where_the_first_ones_are_gone(
    stream: SourceStream, stream_options: dict[str, str], retention: str
) -> None:
    make_stream(stream, retention=retention)
    if retention == "interest":
        consumer = {"stream_name": stream.name, "config": {"durable_name": "w", "ack_policy": "explicit"}}
        stream.api(f"CONSUMER.DURABLE.CREATE.{stream.name}.w", consumer)
    publish_numbers(stream, 30)
    options = {**stream_options, "minPartitions": "3", "failOnDataLoss": "false"}
    first, again = _twice(options, lambda: purge(stream, 14))
    assert [len(rows) for rows in first] == [10, 10, 10]
    _assert_same_tasks(first, again)
    assert [len(rows) for rows in again] == [0, 7, 10]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_the_tasks_of_other_streams_keep_their_places(
    pair: list[SourceStream], pair_options: dict[str, str], name: str, *, is_deleted: bool
) -> None:
    one, _ = pair
    for stream in pair:
        make_stream(stream, retention="workqueue")
        publish_numbers(stream, 20)
    options = {"servers": pair_options["servers"], "streamPattern": f"{name}-*", "minPartitions": "4"}

    def change() -> None:
        one.api(f"STREAM.DELETE.{one.name}") if is_deleted else purge(one, 16)

    first, again = _twice({**options, "failOnDataLoss": "false"}, change)
    _assert_same_tasks(first, again)
    assert [len(rows) for rows in first] == [10, 10, 10, 10]
    assert [len(rows) for rows in again] == [0, 0 if is_deleted else 5, 10, 10]


def test_the_tasks_of_a_stream_that_was_created_again_are_empty(
    pair: list[SourceStream], pair_options: dict[str, str]
) -> None:
    one, _ = pair
    for stream in pair:
        make_stream(stream)
        publish_numbers(stream, 20)

    def change() -> None:
        one.api(f"STREAM.DELETE.{one.name}")
        make_stream(one)
        publish_numbers(one, 20)

    first, again = _twice({**pair_options, "minPartitions": "4", "failOnDataLoss": "false"}, change)
    _assert_same_tasks(first, again)
    assert [len(rows) for rows in again] == [0, 0, 10, 10]
