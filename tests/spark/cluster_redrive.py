"""A driver with two executor processes that redrives a frame's letters after a line from the test."""

from __future__ import annotations

import json
import sys

from local_cluster import local_cluster, send_message

from airflow_provider_jetstream.jetstream import RedriveRequest, WorkQueue
from airflow_provider_jetstream.spark import redrive_letters


def main() -> None:
    stream_options: dict[str, str] = json.loads(sys.argv[1])
    queue, count = WorkQueue.load(json.loads(sys.argv[2])), int(sys.argv[4])
    request = RedriveRequest(run="cluster", **json.loads(sys.argv[3]))
    # Tests kill executors more often than the default of four attempts would allow.
    spark = local_cluster(attempts=8)
    send_message({"ready": spark.range(10).count()})
    sys.stdin.readline()
    rows = spark.range(1, count + 1).withColumnRenamed("id", "sequence")
    report = redrive_letters(spark, rows, queue, request, stream_options, tasks=2)
    send_message({"redriven": len(report.redriven), "gone": len(report.gone), "failed": dict(report.failed)})
    spark.stop()


if __name__ == "__main__":
    main()
