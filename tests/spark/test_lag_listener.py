from __future__ import annotations

import json
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from pyspark.sql.streaming.listener import QueryProgressEvent, StreamingQueryProgress
from spark_streams import make_stream, publish_numbers, purge

from airflow_provider_jetstream.spark import LagListener, QueryLag, StreamLag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream

_LOGGER = "airflow_provider_jetstream"


@pytest.fixture
def published(spark: SparkSession) -> Iterator[list[QueryLag]]:
    """What the listener publishes about the test's queries, which are idle after a fifth of a second."""
    lags: list[QueryLag] = []
    listener = LagListener(spark, lags.append)
    spark.streams.addListener(listener)
    interval = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(interval, "200")
    yield lags
    spark.conf.unset(interval)
    spark.streams.removeListener(listener)


@contextmanager
def _running(spark: SparkSession, checkpoint: Path, options: Mapping[str, str], **more: str) -> Iterator[None]:
    frame = spark.readStream.format("jetstream").options(**{"startingOffsets": "earliest", **options, **more}).load()
    writer = frame.writeStream.format("noop").queryName("watched").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(processingTime="100 milliseconds").start()
    try:
        yield
    finally:
        query.stop()


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _changes(published: list[QueryLag]) -> list[tuple[StreamLag, ...]]:
    """Return what was published of the streams, without repetitions while the query was idle."""
    found: list[tuple[StreamLag, ...]] = []
    for query in published:
        if not found or found[-1] != query.streams:
            found.append(query.streams)
    return found


def test_a_querys_lag_is_published_while_it_runs_and_while_it_waits(
    spark: SparkSession,
    stream_options: dict[str, str],
    stream: SourceStream,
    published: list[QueryLag],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, _LOGGER)
    make_stream(stream)
    publish_numbers(stream, 35)
    with _running(spark, tmp_path, stream_options, maxOffsetsPerTrigger="10"):
        _wait(lambda: bool(published) and published[-1].streams[0].lag == 0)
    expected = [StreamLag(stream.name, read, 35, 35 - read) for read in (10, 20, 30, 35)]
    assert _changes(published) == [(lag,) for lag in expected]
    assert {query.name for query in published} == {"watched"}
    assert f"Query watched, batch 1: {stream.name} to 20 of 35 (lag 15)" in caplog.messages
    published.clear()
    publish_numbers(stream, 1, 35)
    with _running(spark, tmp_path, stream_options, minOffsetsPerTrigger="100", maxTriggerDelay="1h"):
        # The first batch after a start waits for nothing, the next one for a hundred.
        _wait(lambda: bool(published) and published[-1].streams[0].read == 36)
        publish_numbers(stream, 30, 36)
        _wait(lambda: published[-1].streams[0].lag == 30)
        assert published[-1].streams[0].read == 36
        publish_numbers(stream, 70, 66)
        _wait(lambda: published[-1].streams[0].lag == 0 and published[-1].streams[0].read == 136)


def test_what_each_stream_has_lost_is_published_once(
    spark: SparkSession,
    pair: list[SourceStream],
    pair_options: dict[str, str],
    published: list[QueryLag],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, _LOGGER)
    one, other = pair
    for stream in pair:
        make_stream(stream)
        publish_numbers(stream, 10)
    with _running(spark, tmp_path, pair_options):
        _wait(lambda: bool(published) and published[-1].streams[0].lag == 0)
    publish_numbers(one, 90, 10)
    purge(one, 51)
    other.api(f"STREAM.DELETE.{other.name}")
    make_stream(other)
    publish_numbers(other, 3)
    published.clear()
    with _running(spark, tmp_path, pair_options, failOnDataLoss="false"):
        _wait(lambda: bool(published))
        publish_numbers(other, 4, 3)
        _wait(lambda: published[-1].streams[1].read == 7)
        # The query is idle once more.
        seen = len(published)
        _wait(lambda: len(published) > seen)
    assert [lags for lags in _changes(published) if lags[0].lost or lags[1].recreated] == [
        (StreamLag(one.name, 100, 100, 0, lost=(11, 50)), StreamLag(other.name, 3, 3, 0, recreated=True))
    ]
    assert published[-1].streams == (StreamLag(one.name, 100, 100, 0), StreamLag(other.name, 7, 7, 0))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        f"Query watched lost {one.name}: sequences 11 to 50 are gone.",
        f"Query watched: {other.name} was deleted and created again; its old messages are gone.",
    ]


_POSITION = {"seq": 7, "created": "2026-11-24T00:00:00Z", "time": 0}


@pytest.mark.parametrize(
    ("offset", "lags"),
    [
        ({"streams": {"orders": _POSITION}}, [("orders", 7, None)]),
        ({"streams": {"a": _POSITION, "b": {**_POSITION, "lost": [1, 1]}}}, [("a", 7, None), ("b", 7, (1, 1))]),
        # As other formats write theirs.
        (_POSITION, []),
        ({"orders": {"0": 17}}, []),
        ({"streams": {"0": 17}}, []),
        ({"streams": [1]}, []),
        (17, []),
        (None, []),
    ],
)
def test_only_offsets_of_this_format_are_read(offset: Any, lags: list[tuple[str, int, Any]]) -> None:
    published: list[QueryLag] = []
    text = json.dumps(offset)
    rates: dict[str, Any] = {"numInputRows": 0, "inputRowsPerSecond": 0.0, "processedRowsPerSecond": 0.0}
    source = {"description": "x", "startOffset": text, "endOffset": text, "latestOffset": None, "metrics": {}, **rates}
    progress = {
        "id": "3b5e8d0e-0000-0000-0000-000000000001",
        "runId": "3b5e8d0e-0000-0000-0000-000000000002",
        "name": None,
        "timestamp": "2026-11-24T00:00:00.000Z",
        "batchId": 3,
        "batchDuration": 1,
        "durationMs": {},
        "eventTime": {},
        "stateOperators": [],
        "sources": [source],
        "sink": {"description": "x", "numOutputRows": 0, "metrics": {}},
        "observedMetrics": {},
        **rates,
    }
    # Progress has all; a session is only asked while a query is idle.
    LagListener(Mock(), published.append).onQueryProgress(QueryProgressEvent(StreamingQueryProgress.fromJson(progress)))
    found = [(lag.stream, lag.read, lag.lost) for query in published for lag in query.streams]
    assert found == lags
