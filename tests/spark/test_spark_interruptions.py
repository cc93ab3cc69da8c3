"""Jobs whose messages or server disappear while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish
from tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from testbed.spark_face import SourceStream

_COUNT, _FIRST_LEFT = 3000, 2900
_ATTEMPTS, _CONNECTIONS = 4, 5


@pytest.fixture
def large_stream(stream: SourceStream) -> SourceStream:
    """A stream with more messages than fit into the buffers between the server and a waiting step."""
    make_stream(stream)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 20_000) for _ in range(_COUNT)))
    return stream


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
