"""Streams that drop messages between load and action: what left before the read began was nobody's to read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish, publish_numbers, purge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from testbed.spark_face import SourceStream

    Act = Callable[[SourceStream], None]


def _load(spark: SparkSession, options: dict[str, str], **more: str) -> DataFrame:
    return spark.read.format("jetstream").options(**options).options(**more).load()


def _sequences(frame: DataFrame) -> list[int]:
    return sorted(row.seq for row in frame.select("seq").collect())


def _publish_three(stream: SourceStream) -> None:
    publish(stream, ((f"{stream.name}.new", None, b"x" * 100) for _ in range(3)))


def _wait_until_the_first_expires(stream: SourceStream) -> None:
    while stream.info().first < 4:
        time.sleep(0.05)


# The stream's configuration, and by what its first messages leave it after they were loaded.
_LEAVING: dict[str, tuple[dict[str, Any], Act]] = {
    "max_msgs": ({"max_msgs": 10}, _publish_three),
    "max_bytes": ({"max_bytes": 1500}, _publish_three),
    "max_age": ({"max_age": 1_500_000_000, "duplicate_window": 1_500_000_000}, _wait_until_the_first_expires),
    "a purge": ({}, lambda stream: purge(stream, 4)),
}


@pytest.mark.parametrize(("config", "act"), _LEAVING.values(), ids=_LEAVING)
@pytest.mark.parametrize("more", [{}, {"minPartitions": "3"}], ids=["one task", "three tasks"])
def test_what_leaves_between_load_and_action_is_not_lost(
    spark: SparkSession,
    stream_options: dict[str, str],
    stream: SourceStream,
    config: dict[str, Any],
    act: Act,
    more: dict[str, str],
) -> None:
    make_stream(stream, **config)
    publish(stream, ((f"{stream.name}.old", None, b"x" * 100) for _ in range(10)))
    frame = _load(spark, stream_options, **more)
    act(stream)
    first = stream.info().first
    assert first > 1
    assert _sequences(frame) in [list(range(begin, 11)) for begin in range(first, 12)]


def test_each_of_several_streams_is_read_from_what_it_has(
    spark: SparkSession, pair: list[SourceStream], pair_options: dict[str, str]
) -> None:
    one, other = pair
    make_stream(one, max_msgs=5)
    make_stream(other)
    for stream in pair:
        publish_numbers(stream, 5)
    frame = _load(spark, pair_options)
    publish_numbers(one, 2)
    assert sorted((row.stream == one.name, row.seq) for row in frame.collect()) == [
        *((False, sequence) for sequence in range(1, 6)),
        *((True, sequence) for sequence in range(3, 6)),
    ]


def test_everything_may_have_left(spark: SparkSession, stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, max_msgs=2)
    publish_numbers(stream, 2)
    frame = _load(spark, stream_options)
    publish_numbers(stream, 2)
    assert _sequences(frame) == []


def test_what_leaves_after_the_first_action_is_lost(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, max_msgs=10)
    publish_numbers(stream, 10)
    frame = _load(spark, stream_options)
    publish_numbers(stream, 3)
    assert _sequences(frame) == list(range(4, 11))
    publish_numbers(stream, 2)
    with pytest.raises(PySparkException, match="begins at 6 now, and 4 was to be read: the messages 4 to 5 are lost"):
        frame.collect()


def test_a_stream_that_was_created_anew_since_it_was_loaded_is_named(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3)
    frame = _load(spark, stream_options)
    stream.api(f"STREAM.DELETE.{stream.name}")
    make_stream(stream)
    publish_numbers(stream, 3)
    with pytest.raises(PySparkException, match="deleted and recreated while it was read; read it again"):
        frame.collect()
