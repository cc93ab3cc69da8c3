"""Reads and writes whose workers and executors are killed: every row once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from drivers import driver_of, go, told_by
from dying import kill_executor, kill_worker
from pyspark.sql import functions as f
from spark_streams import make_stream, opened, publish, read_all

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from airflow_provider_jetstream.spark.source.source_stream import SourceStream
    from testbed.nats_server import NatsServer

_COUNT = 20_000
_ROWS = 200_000


def _port(given: dict[str, str]) -> int:
    return int(urlsplit(given["servers"]).port or 0)


def _fill(stream: SourceStream, **config: Any) -> None:
    make_stream(stream, **config)
    publish(stream, ((f"{stream.name}.a", None, b"x" * 5000) for _ in range(_COUNT)))


def _sent(nats: NatsServer, beyond: int) -> Callable[[], bool]:
    """Make a question: whether the server has sent so many bytes from now on."""
    before = nats.monitor("varz")["out_bytes"]
    return lambda: nats.monitor("varz")["out_bytes"] > before + beyond


def _filled(given: dict[str, str], beyond: int) -> Callable[[], bool]:
    def asked() -> bool:
        with opened(given) as stream:
            return stream.info().last > beyond

    return asked


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_a_worker_that_is_killed_while_it_reads_costs_and_repeats_nothing(
    spark: SparkSession, given: dict[str, str], stream: SourceStream, nats: NatsServer, retention: str
) -> None:
    _fill(stream, retention=retention)
    loaded = spark.read.format("jetstream").options(**given, minPartitions="2", fetchBatch="100").load()
    counted = loaded.agg(f.count("*"), f.count_distinct("seq"), f.min("seq"), f.max("seq"), f.sum(f.length("value")))
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_worker, _port(given), _sent(nats, 20_000_000))
        (found,) = counted.collect()
        assert killed.result() > 0
    assert tuple(found) == (_COUNT, _COUNT, 1, _COUNT, _COUNT * 5000)
    assert stream.api(f"CONSUMER.NAMES.{stream.name}")["total"] == 0 or retention == "limits"


def test_a_worker_that_is_killed_while_it_writes_costs_and_repeats_nothing(
    spark: SparkSession, given: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream)
    rows = spark.range(0, _ROWS, 1, 2).select(f.col("id").cast("string").alias("value"))
    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill_worker, _port(given), _filled(given, _ROWS // 10))
        rows.write.format("jetstream").options(**given, subject=f"{stream.name}.a").mode("append").save()
        assert killed.result() > 0
    found = sorted(int(row["value"]) for row in read_all(given, names=["value"]))
    assert found == list(range(_ROWS))


@pytest.fixture
def driver(given: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver of its own with two executors, each a process of its own."""
    with driver_of("cluster_job.py", json.dumps(given), str(_ROWS), log=tmp_path / "driver.log") as process:
        yield process


def test_executors_that_are_killed_cost_and_repeat_nothing(
    given: dict[str, str], stream: SourceStream, nats: NatsServer, driver: subprocess.Popen[str]
) -> None:
    _fill(stream)
    assert told_by(driver) == {"ready": True}
    ripe = _sent(nats, 20_000_000)
    go(driver)
    kill_executor(driver.pid, _port(given), ripe)
    assert told_by(driver) == {"found": [_COUNT, _COUNT, 1, _COUNT, _COUNT * 5000]}
    copies = {**given, "stream": f"{stream.name}out"}
    with opened(copies) as out:
        make_stream(out)
    go(driver)
    kill_executor(driver.pid, _port(given), _filled(copies, _ROWS // 10))
    assert told_by(driver) == {"written": _ROWS}
    assert sorted(int(row["value"]) for row in read_all(copies, names=["value"])) == list(range(_ROWS))
