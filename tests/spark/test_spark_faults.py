"""Reads and writes whose workers or executors are killed process every row once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from driver_processes import driver_process, read_message, resume
from process_killer import kill_executor, kill_worker
from pyspark.sql import functions as f
from spark_streams import make_stream, publish, read_all

from testbed.spark_face import open_stream

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream

_COUNT = 20_000
_ROWS = 200_000


def _port(stream_options: dict[str, str]) -> int:
    return int(urlsplit(stream_options["servers"]).port or 0)


def _fill(stream: SourceStream, **config: Any) -> None:
    make_stream(stream, **config)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 5000) for _ in range(_COUNT)))


def _has_sent(nats: NatsServer, size: int) -> Callable[[], bool]:
    """Return a predicate: whether the server has sent so many bytes from now on."""
    before = nats.monitor("varz")["out_bytes"]
    return lambda: nats.monitor("varz")["out_bytes"] > before + size


def _has_stored(stream_options: dict[str, str], count: int) -> Callable[[], bool]:
    def has_stored() -> bool:
        with open_stream(stream_options) as stream:
            return stream.info().last > count

    return has_stored


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_every_row_is_read_once_where_a_worker_is_killed(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream, nats: NatsServer, retention: str
) -> None:
    _fill(stream, retention=retention)
    loaded = spark.read.format("jetstream").options(**stream_options, minPartitions="2", fetchBatch="100").load()
    summary = loaded.agg(f.count("*"), f.count_distinct("seq"), f.min("seq"), f.max("seq"), f.sum(f.length("value")))
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_worker, _port(stream_options), _has_sent(nats, 20_000_000))
        (row,) = summary.collect()
        assert killed.result() > 0
    assert tuple(row) == (_COUNT, _COUNT, 1, _COUNT, _COUNT * 5000)
    assert stream.api(f"CONSUMER.NAMES.{stream.name}")["total"] == 0 or retention == "limits"


@pytest.fixture
def driver(stream_options: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver with two executor processes."""
    with driver_process(
        "cluster_job.py", json.dumps(stream_options), str(_ROWS), log=tmp_path / "driver.log"
    ) as process:
        yield process


@pytest.mark.jvm
def test_every_row_is_read_and_written_once_where_executors_are_killed(
    stream_options: dict[str, str], stream: SourceStream, nats: NatsServer, driver: subprocess.Popen[str]
) -> None:
    _fill(stream)
    assert read_message(driver) == {"ready": True}
    has_sent = _has_sent(nats, 20_000_000)
    resume(driver)
    kill_executor(driver.pid, _port(stream_options), has_sent)
    assert read_message(driver) == {"found": [_COUNT, _COUNT, 1, _COUNT, _COUNT * 5000]}
    copies = {**stream_options, "stream": f"{stream.name}out"}
    with open_stream(copies) as out:
        make_stream(out)
    resume(driver)
    kill_executor(driver.pid, _port(stream_options), _has_stored(copies, _ROWS // 10))
    assert read_message(driver) == {"written": _ROWS}
    assert sorted(int(row["value"]) for row in read_all(copies, names=["value"])) == list(range(_ROWS))
