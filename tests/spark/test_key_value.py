"""Buckets, written by nats-py, as tables: their latest values, their changes, and deletes as rows."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import nats as nats_py
import pytest
from pyspark.errors import PySparkException
from spark_streams import make_stream, publish, publish_numbers

from airflow_provider_jetstream.spark.source.batch_reader import read_latest
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.options import read_options
from testbed.spark_face import open_stream

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from testbed.nats_server import NatsServer
    from testbed.spark_face import SourceStream


def _load(spark: SparkSession, **options: str) -> DataFrame:
    return spark.read.format("jetstream").options(**options).load()


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.selectExpr("key", "rowKind", "string(value)", "seq").orderBy("seq").collect()]


async def _fill(url: str, bucket: str) -> None:
    client = await nats_py.connect(url)
    store = await client.jetstream().create_key_value(bucket=bucket, history=5, direct=True)
    for key, value in (("a.b", b"1"), ("c", b"2"), ("d", b"3"), ("a.b", b"4")):
        await store.put(key, value)
    await store.delete("c")
    await store.purge("d")
    await store.put("e", b"5")
    await client.close()


def test_a_bucket_is_read_by_key(spark: SparkSession, nats: NatsServer, name: str, tmp_path: Path) -> None:
    asyncio.run(_fill(nats.url, name))
    bucket = {"servers": nats.url, "bucket": name}
    latest = [("a.b", "put", "4", 4), ("c", "delete", "", 5), ("d", "purge", "", 6), ("e", "put", "5", 7)]
    assert _rows(_load(spark, **bucket, latestPerSubject="true")) == latest
    assert _load(spark, **bucket, latestPerSubject="true").where("rowKind = 'put'").count() == 2
    # The purge has removed the earlier value of d.
    changes = [("a.b", "put", "1", 1), ("c", "put", "2", 2), *latest]
    assert _rows(_load(spark, **bucket)) == changes
    for method in ("direct", "api"):
        assert _rows(_load(spark, **bucket, startingOffsets="3", fetchMethod=method)) == changes[2:]
    narrow = spark.read.format("jetstream").options(**bucket, latestPerSubject="true").schema("rowKind string")
    assert sorted(row.rowKind for row in narrow.load().collect()) == ["delete", "purge", "put", "put"]
    query = (
        spark.readStream.format("jetstream")
        .options(**bucket, startingOffsets="3")
        .load()
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert _rows(spark.read.parquet(str(tmp_path / "out"))) == changes[2:]


def test_each_subject_comes_once_while_all_are_updated(stream_options: dict[str, str], stream: SourceStream) -> None:
    make_stream(stream, max_msgs_per_subject=1)
    subjects = [f"{stream.name}.{number}" for number in range(20_000)]
    publish(stream, ((subject, None, b"x" * 200) for subject in subjects))
    options = read_options({**stream_options, "latestPerSubject": "true", "fetchBatch": "500"}, "read")
    done = threading.Event()

    def update() -> None:
        with open_stream(stream_options) as updated:
            publish(updated, ((subject, None, b"y" * 200) for subject in [*subjects, *subjects]))
        done.set()

    thread = threading.Thread(target=update)
    batches = read_latest(stream_options, options, RequestedColumns(("subject", "seq"), (True, True)), ())
    first = next(batches)
    thread.start()
    assert done.wait(60)
    thread.join()
    found = [row["subject"] for batch in [first, *batches] for row in batch.to_pylist()]
    assert len(found) == 20_000
    assert set(found) == set(subjects)


def test_a_work_queue_has_no_latest_messages_and_a_stream_no_keys(
    spark: SparkSession, stream_options: dict[str, str], stream: SourceStream
) -> None:
    make_stream(stream, retention="workqueue")
    publish_numbers(stream, 3)
    with pytest.raises(PySparkException, match="expected a stream with limits retention"):
        _load(spark, **stream_options, latestPerSubject="true").collect()
    with pytest.raises(PySparkException, match="expected the option bucket for the column key"):
        spark.read.format("jetstream").options(**stream_options).schema("key string").load().collect()
