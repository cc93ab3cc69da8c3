"""Jobs whose messages or server disappear while they run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish, purge
from tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream

_COUNT, _FIRST_LEFT = 3000, 2900
_ATTEMPTS, _CONNECTIONS = 4, 5


def _waiting_step(started: Path, resume: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a step of a job that takes its first rows, and waits for a file before it takes more."""

    def step(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            started.touch()
            while not resume.exists():
                time.sleep(0.01)
            yield batch.select(["seq"])

    return step


def _read_while_purging(
    spark: SparkSession, stream_options: Mapping[str, str], stream: SourceStream, folder: Path, *, fail: bool
) -> list[int]:
    started, resume = folder / "started", folder / "resume"
    # Small batches, so that the reader has to wait for the step.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    try:
        options = {**stream_options, "fetchBatch": "50", "failOnDataLoss": str(fail).lower()}
        loaded = spark.read.format("jetstream").options(**options).load().select("seq", "value")
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(loaded.mapInArrow(_waiting_step(started, resume), "seq bigint").collect)
            while not started.exists() and not job.done():
                time.sleep(0.01)
            try:
                purge(stream, _FIRST_LEFT)
            finally:
                # Otherwise the job would wait for ever.
                resume.touch()
            return [row.seq for row in job.result()]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.fixture
def large_stream(stream: SourceStream) -> SourceStream:
    """A stream with more messages than fit into the buffers between the server and a waiting step."""
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 20_000) for _ in range(_COUNT)))
    return stream


def test_a_job_fails_where_its_messages_are_purged_while_it_reads(
    spark: SparkSession, stream_options: dict[str, str], large_stream: SourceStream, tmp_path: Path
) -> None:
    with pytest.raises(PySparkException, match=f"every message to be there still.* begins at {_FIRST_LEFT} now"):
        _read_while_purging(spark, stream_options, large_stream, tmp_path, fail=True)


def test_a_job_that_may_lose_messages_reads_all_that_are_left(
    spark: SparkSession, stream_options: dict[str, str], large_stream: SourceStream, tmp_path: Path
) -> None:
    sequences = _read_while_purging(spark, stream_options, large_stream, tmp_path, fail=False)
    before = len([sequence for sequence in sequences if sequence < _FIRST_LEFT])
    assert 0 < before < _FIRST_LEFT - 1
    assert sequences == [*range(1, before + 1), *range(_FIRST_LEFT, _COUNT + 1)]


def test_a_job_whose_server_disappears_makes_few_connections(
    spark: SparkSession, stream_options: dict[str, str], large_stream: SourceStream
) -> None:
    context = spark.sparkContext
    with TcpProxy(urlsplit(stream_options["servers"]).port or 0, after=20_000_000) as proxy:
        options = {**stream_options, "servers": proxy.url, "timeout": "1"}
        loaded = spark.read.format("jetstream").options(**options).load()
        context.setJobGroup(large_stream.name, "a server that disappears")
        try:
            with pytest.raises(PySparkException, match="no NATS server reached"):
                loaded.select("value").foreach(lambda _row: None)
        finally:
            context.setLocalProperty("spark.jobGroup.id", "")
        refused = proxy.refused
    tracker = context.statusTracker()
    stages = [
        tracker.getStageInfo(stage)
        for job in tracker.getJobIdsForGroup(large_stream.name)
        if (info := tracker.getJobInfo(job))
        for stage in info.stageIds
    ]
    assert [stage.numFailedTasks for stage in stages if stage] == [_ATTEMPTS]
    # A task reconnects within the time limit of a connection, and no more than five times.
    assert _ATTEMPTS <= refused < _ATTEMPTS * _CONNECTIONS
