"""How much a batch of a query reads, by the readers themselves."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from queries import ReaderQuery
from spark_streams import METHODS, delete, make_stream, publish, publish_numbers

from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed import seams

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from testbed.spark_face import SourceStream


def _publish_sizes(stream: SourceStream, *sizes: int, key: str = "a") -> None:
    publish(stream, ((f"{stream.name}.{key}", None, b"\xff" * size) for size in sizes))


def _size(stream: SourceStream, body: int) -> int:
    return len(f"{stream.name}.a") + body


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("headers", [None, {"Name": "\u00e9", "Nats-Msg-Size": "1"}])
def test_a_batch_has_no_more_bytes_than_the_limit(
    stream_options: dict[str, str], stream: SourceStream, method: str, headers: dict[str, str] | None
) -> None:
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", headers, bytes([number % 256]) * 1000) for number in range(100)))
    block = len("NATS/1.0\r\nName: \u00e9\r\nNats-Msg-Size: 1\r\n\r\n".encode()) if headers else 0
    each = _size(stream, 1000) + block
    with closing(ReaderQuery(stream_options, maxBytesPerTrigger=str(30 * each), fetchMethod=method)) as query:
        assert [len(query.batch()) for _ in range(5)] == [30, 30, 30, 10, 0]
    with closing(ReaderQuery(stream_options, maxBytesPerTrigger=str(30 * each - 1), fetchMethod=method)) as query:
        assert [len(query.batch()) for _ in range(5)] == [29, 29, 29, 13, 0]


@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_other_subjects_and_of_gaps_do_not_count(
    stream_options: dict[str, str], stream: SourceStream, method: str
) -> None:
    make_stream(stream)
    for _ in range(4):
        _publish_sizes(stream, 1000, key="a")
        _publish_sizes(stream, 1000, 9000, key="b")
        _publish_sizes(stream, 1000, key="c")
    delete(stream, [4, 5, 6, 7])
    filters = {"filterSubjects": f"{stream.name}.a,{stream.name}.c", "fetchMethod": method}
    with closing(ReaderQuery(stream_options, maxBytesPerTrigger=str(2 * _size(stream, 1000)), **filters)) as query:
        assert [query.batch() for _ in range(5)] == [[1, 8], [9, 12], [13, 16], [], []]


@pytest.mark.slow
def test_a_batch_waits_for_enough_sequences_and_no_longer_than_the_delay(
    stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    publish_numbers(stream, 3)
    with closing(ReaderQuery(stream_options, minOffsetsPerTrigger="10", maxTriggerDelay="2s")) as query:
        # The first batch after a start doesn't wait.
        assert query.batch() == [1, 2, 3]
        began = time.monotonic()
        publish_numbers(stream, 9)
        before = query.offset
        assert query.batch() == []
        # Spark takes an offset that didn't change for "nothing new".
        assert query.offset is before
        publish_numbers(stream, 1)
        assert query.batch() == list(range(4, 14))
        publish_numbers(stream, 1)
        waits = 0
        while not (read := query.batch()):
            waits += 1
            time.sleep(0.05)
        assert (read, waits > 0) == ([14], True)
        assert time.monotonic() - began >= 2


def test_what_is_available_now_is_not_waited_for(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    publish_numbers(stream, 3)
    with closing(ReaderQuery(stream_options, minOffsetsPerTrigger="10")) as query:
        assert query.batch() == [1, 2, 3]
        publish_numbers(stream, 3)
        assert query.batch() == []
        query.reader.prepareForTriggerAvailableNow()
        publish_numbers(stream, 1)
        assert query.batch() == [4, 5, 6]
        assert query.batch() == []


def test_a_restart_continues_with_other_limits(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream)
    _publish_sizes(stream, *[1000] * 20)
    with closing(ReaderQuery(stream_options, maxOffsetsPerTrigger="5")) as query:
        assert len(query.batch()) == 5
        query.restart(stream_options, maxBytesPerTrigger=str(3 * _size(stream, 1000)))
        assert query.batch() == [6, 7, 8]
        query.restart(stream_options)
        assert query.batch() == list(range(9, 21))


@pytest.mark.parametrize("option", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"])
def test_an_earlier_spark_refuses_limits(stream_options: dict[str, str], mocker: MockerFixture, option: str) -> None:
    mocker.patch(seams.STREAM_READER_STREAMING, object())
    with pytest.raises(SparkOptionError, match=f"{option}: expected Spark 4.2 or later"):
        ReaderQuery(stream_options, **{option: "5"})
