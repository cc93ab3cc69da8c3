"""Several streams in one query, by the readers themselves."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType
from queries import ReaderQuery
from spark_streams import make_stream, publish, publish_numbers, purge

from airflow_provider_jetstream.jetstream.errors import NotFoundError
from airflow_provider_jetstream.spark.errors import DataLossError, SparkOptionError
from testbed import seams
from testbed.spark_face import JetStreamDataSource

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from testbed.spark_face import SourceStream


@pytest.fixture
def matching(pair_options: dict[str, str], name: str) -> dict[str, str]:
    """The options that read both streams of a pair by a pattern."""
    return {"servers": pair_options["servers"], "streamPattern": f"{name}-*"}


def _numbers(stream: SourceStream, first: int, last: int) -> list[tuple[str, int]]:
    return [(stream.name, sequence) for sequence in range(first, last + 1)]


def _make(*streams: SourceStream, count: int) -> None:
    for stream in streams:
        make_stream(stream)
        publish_numbers(stream, count)


def _delete(stream: SourceStream) -> None:
    stream.api(f"STREAM.DELETE.{stream.name}")


def test_a_batch_has_what_is_new_of_each_stream(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=3)
    with closing(ReaderQuery(pair_options)) as query:
        assert query.offset["streams"][one.name]["seq"] == 0
        assert query.places() == [*_numbers(one, 1, 3), *_numbers(other, 1, 3)]
        assert {name: entry["seq"] for name, entry in query.offset["streams"].items()} == {one.name: 3, other.name: 3}
        before = query.offset
        assert query.places() == []
        assert query.offset is before
        publish_numbers(other, 2)
        assert query.places() == _numbers(other, 4, 5)
        query.restart(pair_options)
        publish_numbers(one, 1)
        assert query.places() == _numbers(one, 4, 4)
        latest = query.reader.reportLatestOffset()["streams"]
        assert {name: entry["seq"] for name, entry in latest.items()} == {one.name: 4, other.name: 5}
        assert "start" not in query.offset["streams"][other.name]


def test_a_limit_of_bytes_is_divided_by_the_bytes_of_each_stream(
    pair: list[SourceStream], pair_options: dict[str, str]
) -> None:
    sizes = dict(zip((stream.name for stream in pair), (1000, 10), strict=True))
    for stream in pair:
        make_stream(stream)
        publish(stream, ((f"{stream.name}.a", None, b"\xff" * sizes[stream.name]) for _ in range(40)))
    subject = len(f"{pair[0].name}.a")
    limit = 10 * (1000 + subject) + 10 * (10 + subject)
    batches = []
    with closing(ReaderQuery(pair_options, maxBytesPerTrigger=str(limit))) as query:
        while batch := query.places():
            batches.append(batch)
    for batch in batches:
        assert sum(sizes[name] + subject for name, _ in batch) <= limit
    assert len(batches) <= 6
    # Each of them goes on in each batch until it has no more.
    assert {name for name, _ in batches[0]} == {name for name, _ in batches[2]} == set(sizes)
    assert sorted(place for batch in batches for place in batch) == [
        place for stream in pair for place in _numbers(stream, 1, 40)
    ]
    with closing(ReaderQuery(pair_options, maxBytesPerTrigger="1")) as query:
        assert query.places() == [*_numbers(pair[0], 1, 1), *_numbers(pair[1], 1, 1)]


def test_filters_hold_for_every_stream_of_a_query(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=8)
    filters = {"filterSubjects": f"{one.name}.0,{other.name}.1", "maxOffsetsPerTrigger": "3"}
    read: list[tuple[str, int]] = []
    with closing(ReaderQuery(pair_options, **filters)) as query:
        for _ in range(8):
            read += query.places()
    assert sorted(read) == [(one.name, 1), (one.name, 8), (other.name, 2)]


def test_a_stream_that_appears_is_read_from_its_first_message(
    pair: list[SourceStream], matching: dict[str, str]
) -> None:
    one, other = pair
    with closing(ReaderQuery(matching, startingOffsets="latest")) as query:
        assert query.offset == {"streams": {}}
        assert query.places() == []
        _make(one, count=3)
        assert query.places() == _numbers(one, 1, 3)
        _make(other, count=5)
        purge(other, 3)
        publish_numbers(one, 1)
        assert query.places() == [*_numbers(one, 4, 4), *_numbers(other, 3, 5)]
        # An empty one is known from then on.
        _delete(other)
        query.restart(matching, failOnDataLoss="false")
        assert query.places() == []
        make_stream(other)
        assert query.places() == []
        assert set(query.offset["streams"]) == {one.name, other.name}
        publish_numbers(other, 1)
        assert query.places() == _numbers(other, 1, 1)


def test_the_messages_of_a_stream_that_appears_are_protected(
    pair: list[SourceStream], matching: dict[str, str]
) -> None:
    one, other = pair
    _make(one, count=1)
    with closing(ReaderQuery(matching)) as query:
        query.places()
        _make(other, count=5)
        purge(other, 2)
        start, end = query.offset, query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
        purge(other, 4)
        with pytest.raises(DataLossError, match=f"{other.name} begins at 4, and 2 wasn't read") as caught:
            query.reader.partitions(start, end)
        assert json.dumps({other.name: "2-3"}) in str(caught.value)
        # Each offset has the beginning of its own batch.
        assert "start" in end["streams"][other.name]
        publish_numbers(other, 1)
        following = query.reader.latestOffset(end, query.reader.getDefaultReadLimit())
        assert following["streams"][other.name]["start"]["seq"] == 5


def test_a_deleted_stream_is_a_loss_under_a_pattern(pair: list[SourceStream], matching: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=3)
    with closing(ReaderQuery(matching)) as query:
        query.places()
        publish_numbers(one, 1)
        _delete(other)
        with pytest.raises(DataLossError, match=f"{other.name} was deleted after sequence 3 was read"):
            query.places()
        query.restart(matching, failOnDataLoss="false")
        assert query.places() == _numbers(one, 4, 4)
        query.restart(matching)
        _make(other, count=2)
        assert query.places() == _numbers(other, 1, 2)


def test_a_named_stream_that_is_deleted_ends_the_query(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    _make(*pair, count=3)
    with closing(ReaderQuery(pair_options, failOnDataLoss="false")) as query:
        query.places()
        _delete(pair[1])
        with pytest.raises(NotFoundError, match=pair[1].name):
            query.places()


def test_a_recreated_stream_is_told_apart(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=3)
    with closing(ReaderQuery(pair_options)) as query:
        query.places()
        publish_numbers(one, 1)
        _delete(other)
        _make(other, count=8)
        with pytest.raises(DataLossError, match=f"{other.name} was deleted and recreated after sequence 3 was read"):
            query.places()
        query.restart(pair_options, failOnDataLoss="false")
        assert query.places() == [*_numbers(one, 4, 4), *_numbers(other, 1, 8)]


def test_a_query_of_one_stream_goes_on_with_several(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=3)
    single = {"servers": pair_options["servers"], "stream": other.name}
    with closing(ReaderQuery(single)) as query:
        assert query.places() == _numbers(other, 1, 3)
        publish_numbers(other, 1)
        query.restart(pair_options)
        assert query.places() == [*_numbers(one, 1, 3), *_numbers(other, 4, 4)]
        assert query.places() == []


def test_an_offset_of_no_selected_stream_is_refused(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    one, other = pair
    _make(one, other, count=3)
    with closing(ReaderQuery({"servers": pair_options["servers"], "stream": other.name})) as query:
        query.places()
        _delete(other)
        _make(other, count=1)
        for again in (pair_options, {"servers": pair_options["servers"], "streams": other.name}):
            query.restart(again)
            with pytest.raises(DataLossError, match="deleted and recreated"):
                query.places()
        for elsewhere in ({"stream": one.name}, {"streams": one.name}, {"streamPattern": f"{one.name}*"}):
            query.restart({"servers": pair_options["servers"], **elsewhere})
            with pytest.raises(
                SparkOptionError,
                match=f"expected a checkpoint of .*{one.name}.*, found one of {other.name}: use another",
            ):
                query.places()
    with closing(ReaderQuery(pair_options)) as query:
        query.places()
        query.restart({"servers": pair_options["servers"], "streamPattern": "others-*"})
        with pytest.raises(
            SparkOptionError, match=f"streams that match others-\\*, found one of {one.name}, {other.name}"
        ):
            query.places()


def test_an_offset_of_another_source_is_refused(pair: list[SourceStream], pair_options: dict[str, str]) -> None:
    _make(*pair, count=1)
    for offset in ({"orders": {"0": 17}}, {"streams": {"0": 17}}):
        with closing(ReaderQuery(pair_options)) as query:
            query.places()
            query.offset = offset
            with pytest.raises(SparkOptionError, match="found one of another source or of another version"):
                query.places()


def test_streams_may_be_added_and_removed_at_a_restart(
    pair: list[SourceStream], pair_options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    _make(one, other, count=3)
    servers = {"servers": pair_options["servers"]}
    with closing(ReaderQuery({**servers, "streams": one.name})) as query:
        assert query.places() == _numbers(one, 1, 3)
        query.restart(pair_options, startingOffsets="latest")
        # It is new to the query, whatever startingOffsets is, which only holds for a query that begins.
        assert query.places() == _numbers(other, 1, 3)
        for stream in pair:
            publish_numbers(stream, 1)
        query.restart({**servers, "stream": other.name})
        assert query.places() == _numbers(other, 4, 4)
        assert f"{one.name} isn't read after sequence 3" in caplog.text
        assert set(query.offset["streams"]) == {other.name}
        caplog.clear()
        publish_numbers(other, 1)
        assert query.places() == _numbers(other, 5, 5)
        assert not caplog.text


def test_a_stream_that_a_list_leaves_out_is_not_gone(
    pair: list[SourceStream], matching: dict[str, str], mocker: MockerFixture
) -> None:
    one, other = pair
    _make(one, other, count=3)
    with closing(ReaderQuery(matching)) as query:
        query.places()
        publish_numbers(one, 1)
        # As where another stream was deleted between two pages of the list.
        mocker.patch(seams.QUERY_NAMES_OF_STREAMS, return_value=[other.name])
        assert query.places() == _numbers(one, 4, 4)
        publish_numbers(one, 1)
        publish_numbers(other, 1)
        query.reader.prepareForTriggerAvailableNow()
        assert query.places() == _numbers(other, 4, 4)
        assert query.places() == []


def test_an_earlier_spark_reads_several_streams(
    pair: list[SourceStream], matching: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.STREAM_READER_STREAMING, object())
    one, other = pair
    _make(one, count=3)
    schema = StructType([StructField("seq", LongType())])
    reader: Any = JetStreamDataSource({**matching, "startingOffsets": "earliest"}).streamReader(schema)
    with closing(_Stopping(reader)):
        start, end = reader.initialOffset(), reader.latestOffset()
        assert [partition.task.last for partition in reader.partitions(start, end)] == [3]
        _make(other, count=2)
        start, end = end, reader.latestOffset()
        (partition,) = reader.partitions(start, end)
        assert (partition.task.stream, partition.task.first, partition.task.last) == (other.name, 1, 2)
        _delete(other)
        start, end = end, reader.latestOffset()
        with pytest.raises(DataLossError, match=f"{other.name} was deleted after sequence 2 was read"):
            reader.partitions(start, end)


class _Stopping:
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def close(self) -> None:
        self._reader.stop()
