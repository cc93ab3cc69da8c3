"""Spark reads the same messages as nats-py, by their digests: mixed sizes, subjects and headers, with gaps.

The short form has 20,000 messages and 6,000 jobs, ``FAULTS=full`` a million and 300,000.
"""

from __future__ import annotations

import os
import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from row_digests import nats_py_digests, spark_digests, total
from spark_streams import delete, make_stream, publish, purge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream

_MESSAGES, _JOBS = (1_000_000, 300_000) if os.environ.get("FAULTS") == "full" else (20_000, 6_000)
_PUBLISHED_AT_ONCE = 5_000
# Mean of the sizes: 200 bytes.
_LARGEST = 400
_DELETED_EVERY = 97
# What could be taken for the protocol's own lines is in some bodies.
_LINES = b"\r\nMSG a.b 1 2\r\nHMSG a.b 1 12 14\r\nNATS/1.0\r\n\r\nNats-Sequence: 7\r\n"


def _messages(name: str, count: int) -> Iterator[tuple[str, Mapping[str, str] | None, bytes]]:
    """Make messages: each third one has headers, and a twentieth of all, in the middle, is on a subject of its own."""
    dice = random.Random(count)  # noqa: S311 - dice
    noise = b"".join(dice.randbytes(50) + _LINES[: dice.randrange(len(_LINES))] for _ in range(1000))
    for number in range(count):
        start = dice.randrange(len(noise) - _LARGEST)
        body = noise[start : start + dice.randint(0, _LARGEST)]
        subject = f"{name}.{'orders.eu.' if number % 3 else ''}{number % 1000}"
        if count // 2 <= number < count // 2 + count // 20:
            subject = f"{name}.gone"
        headers = {"Kind": f"größe {number % 11}", "Number": str(number)} if number % 3 == 1 else None
        yield subject, headers, body


def _fill(stream: SourceStream, retention: str, count: int) -> int:
    """Fill a stream and make gaps; returns how many messages are left."""
    make_stream(stream, retention=retention)
    messages = _messages(stream.name, count)
    while part := list(islice(messages, _PUBLISHED_AT_ONCE)):
        publish(stream, part)
    assert stream.info().last == count
    # The head, single messages, a run of them, and the tail.
    purge(stream, count // 100)
    stream.api(f"STREAM.PURGE.{stream.name}", {"filter": f"{stream.name}.gone"})
    single = range(count // 100 + 5, count // 2, _DELETED_EVERY)
    tail = range(count - 10, count + 1)
    delete(stream, [*single, *tail])
    return count - (count // 100 - 1) - count // 20 - len(single) - len(tail)


@pytest.mark.parametrize(("retention", "count"), [("limits", _MESSAGES), ("workqueue", _JOBS)])
def test_spark_reads_what_nats_py_reads(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, retention: str, count: int
) -> None:
    left = _fill(stream, retention, count)
    options = {**stream_options, "minPartitions": "2"}
    reader = spark.read.format("jetstream").options(**options)
    without = spark_digests(reader.load())
    first = count * 7 // 10
    complete = spark_digests(reader.options(includeHeaders="true", startingOffsets=str(first)).load())
    expected_without, expected = nats_py_digests(stream_options["servers"], stream.name, left)
    assert len(without) == left
    assert without == expected_without
    assert complete == {sequence: found for sequence, found in expected.items() if sequence >= first}
    print(f"{retention}: {left:,} of {count:,} messages, {total(without)}")
    print(f"{retention}, with headers: {len(complete):,} messages from {first:,} on, {total(complete)}")
