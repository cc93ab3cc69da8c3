"""A driver that writes shuffled rows on a cluster of two hosts, by tasks whose first attempts end early.

A partition's next attempt runs on the other host, and reads the blocks of the shuffle in another order: those of its
own host come first.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from local_cluster import send_message, two_hosts_session
from pyspark.sql import functions as f
from shuffled_rows import FirstAttempt, on_its_host

from airflow_provider_jetstream.spark import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

ROWS = 3000
_PARTITIONS = 3
_EARLY = 300
# So long that tasks don't read much further than they are asked to.
_VALUE = "rpad(string(id), 2000, '.') value"
_SCHEMA = "value string"


def _rows(spark: SparkSession) -> DataFrame:
    rows = spark.range(0, ROWS, 1, 4)
    return rows.mapInArrow(on_its_host, rows.schema).selectExpr("id", _VALUE)


def _save(rows: DataFrame, step: FirstAttempt) -> None:
    messages = rows.mapInArrow(step.run, _SCHEMA)
    messages.write.format("jetstream").options(**step.options).mode("append").save()


def fail_once(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """Write after a repartition; each task fails once."""
    step = FirstAttempt(folder, options, _EARLY, range(_PARTITIONS), fails=True)
    _save(_rows(spark).repartition(_PARTITIONS, "id").select("value"), step)


def speculate(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """Write after an aggregation; one task lasts until another attempt has overtaken it."""
    step = FirstAttempt(folder, options, _EARLY, [0], fails=False)
    _save(_rows(spark).groupBy("value").agg(f.max("id")).select("value"), step)


def cut_off(spark: SparkSession, folder: Path, options: Mapping[str, str]) -> None:
    """Write a batch of a query that is stopped in the middle of it, and started again."""
    # The two that the two hosts run first.
    step = FirstAttempt(folder, options, _EARLY, [0, 1], fails=False)
    source = str(folder / "source")
    _rows(spark).write.parquet(source)
    loaded = spark.readStream.schema("id bigint, value string").option("maxFilesPerTrigger", 10).parquet(source)
    rows = loaded.mapInArrow(on_its_host, loaded.schema).repartition(_PARTITIONS, "id").select("value")
    messages = rows.mapInArrow(step.run, _SCHEMA)
    writer = messages.writeStream.format("jetstream").options(**options).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.start()
    while not (folder / "early").exists():
        assert query.isActive
        time.sleep(0.1)
    query.stop()
    writer.start().awaitTermination()


def main() -> None:
    master, stream_options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    spark = two_hosts_session(master, _PARTITIONS)
    register(spark)
    for write in (fail_once, speculate, cut_off):
        name = write.__name__
        (folder / name).mkdir()
        stream = f"{stream_options['stream']}-{name}"
        write(spark, folder / name, {**stream_options, "stream": stream, "subject": f"{stream}.a"})
        send_message({"written": name})
    spark.stop()


if __name__ == "__main__":
    main()
