"""A driver with two executor processes: reads a stream, then writes rows, each after a line from the test."""

from __future__ import annotations

import json
import sys

from local_cluster import local_cluster, send_message
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark import register


def main() -> None:
    stream_options: dict[str, str] = json.loads(sys.argv[1])
    rows = int(sys.argv[2])
    spark = local_cluster()
    register(spark)
    send_message({"ready": True})
    sys.stdin.readline()
    loaded = spark.read.format("jetstream").options(**stream_options, minPartitions="2", fetchBatch="100").load()
    columns = (f.count("*"), f.count_distinct("seq"), f.min("seq"), f.max("seq"), f.sum(f.length("value")))
    (counts,) = loaded.agg(*columns).collect()
    send_message({"found": list(counts)})
    sys.stdin.readline()
    options = {
        **stream_options,
        "stream": f"{stream_options['stream']}out",
        "subject": f"{stream_options['stream']}out.a",
    }
    numbers = spark.range(0, rows, 1, 2).select(f.col("id").cast("string").alias("value"))
    numbers.write.format("jetstream").options(**options).mode("append").save()
    send_message({"written": rows})
    spark.stop()


if __name__ == "__main__":
    main()
