"""One Spark for all tests, with workers that find the package, these modules and the shared server."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

from airflow_provider_jetstream.spark import register
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream

_FOLDER = Path(__file__).parent


@pytest.fixture
def connection_options(nats: NatsServer) -> dict[str, str]:
    """The data source's connection options for the shared server."""
    return {"servers": nats.url}


@pytest.fixture(scope="session")
def spark(nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session whose tasks have up to four attempts, and which writes an event log."""
    scratch = tmp_path_factory.mktemp("spark")
    events = scratch / "events"
    events.mkdir()
    # The workers inherit these from the JVM, which is started by the first session.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_FOLDER.parents[1]), str(_FOLDER)])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["NATS_SHARED_URL"] = nats.url
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": str(scratch / "local"),
    }
    builder = SparkSession.builder.master("local[2,4]").appName("tests")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    register(session)
    yield session
    session.stop()


@pytest.fixture
def stream_options(nats: NatsServer, name: str) -> dict[str, str]:
    """The data source's options for a stream of the test's own on the shared server."""
    return {"servers": nats.url, "stream": name}


@pytest.fixture
def stream(stream_options: dict[str, str]) -> Iterator[SourceStream]:
    """The stream of ``stream_options``, which the test creates."""
    with open_stream(stream_options) as source_stream:
        yield source_stream


@pytest.fixture
def pair(nats: NatsServer, name: str) -> Iterator[list[SourceStream]]:
    """Two streams, which the test creates; the names of both begin with the same text."""
    with ExitStack() as opened:
        yield [
            opened.enter_context(open_stream({"servers": nats.url, "stream": f"{name}-{letter}"})) for letter in "ab"
        ]


@pytest.fixture
def pair_options(nats: NatsServer, pair: list[SourceStream]) -> dict[str, str]:
    """The options that read both."""
    return {"servers": nats.url, "streams": ",".join(stream.name for stream in pair)}
