"""A driver with two executors, each a process of its own: reads a stream, and writes rows, each when it is told to."""

from __future__ import annotations

import json
import sys

from local_cluster import local_cluster, tell
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark import register


def main() -> None:
    given: dict[str, str] = json.loads(sys.argv[1])
    rows = int(sys.argv[2])
    spark = local_cluster()
    register(spark)
    tell({"ready": True})
    sys.stdin.readline()
    loaded = spark.read.format("jetstream").options(**given, minPartitions="2", fetchBatch="100").load()
    columns = (f.count("*"), f.count_distinct("seq"), f.min("seq"), f.max("seq"), f.sum(f.length("value")))
    (found,) = loaded.agg(*columns).collect()
    tell({"found": list(found)})
    sys.stdin.readline()
    options = {**given, "stream": f"{given['stream']}out", "subject": f"{given['stream']}out.a"}
    numbers = spark.range(0, rows, 1, 2).select(f.col("id").cast("string").alias("value"))
    numbers.write.format("jetstream").options(**options).mode("append").save()
    tell({"written": rows})
    spark.stop()


if __name__ == "__main__":
    main()
