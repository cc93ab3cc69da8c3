"""A driver with two executors, each a process of its own: reads a stream, and writes rows, each when it is told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark import register


def main() -> None:
    given: dict[str, str] = json.loads(sys.argv[1])
    rows = int(sys.argv[2])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    spark = builder.config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()
    register(spark)
    _tell({"ready": True})
    sys.stdin.readline()
    loaded = spark.read.format("jetstream").options(**given, minPartitions="2", fetchBatch="100").load()
    columns = (f.count("*"), f.count_distinct("seq"), f.min("seq"), f.max("seq"), f.sum(f.length("value")))
    (found,) = loaded.agg(*columns).collect()
    _tell({"found": list(found)})
    sys.stdin.readline()
    options = {**given, "stream": f"{given['stream']}out", "subject": f"{given['stream']}out.a"}
    numbers = spark.range(0, rows, 1, 2).select(f.col("id").cast("string").alias("value"))
    numbers.write.format("jetstream").options(**options).mode("append").save()
    _tell({"written": rows})
    spark.stop()


def _tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
