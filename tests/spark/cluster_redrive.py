"""A driver with two executors, each a process of its own, that redrives a frame's letters when it is told to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive import Protocol, RedriveOrder
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters


def main() -> None:
    given: dict[str, str] = json.loads(sys.argv[1])
    queue, protocol, count = WorkQueue.load(json.loads(sys.argv[2])), Protocol(sys.argv[3]), int(sys.argv[4])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    spark = builder.config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()
    _tell({"ready": spark.range(10).count()})
    sys.stdin.readline()
    rows = spark.range(1, count + 1).withColumnRenamed("id", "sequence")
    order = RedriveOrder(protocol=protocol, run="cluster")
    report = redrive_letters(spark, rows, queue, order, given, tasks=2)
    _tell({"redriven": len(report.redriven), "gone": len(report.gone), "failed": dict(report.failed)})
    spark.stop()


def _tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
