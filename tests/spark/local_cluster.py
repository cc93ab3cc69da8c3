"""The sessions of drivers that are programs of their own, and what they tell the tests that start them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

_FAST_START = "-XX:TieredStopAtLevel=1"


def local_cluster(attempts: int = 4) -> SparkSession:
    """Start a session with two executors.

    :param attempts: of a task and of a stage; what ends with its executor, or with the shuffle files there, counts
    """
    builder = _builder("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    builder = builder.config("spark.task.maxFailures", str(attempts))
    builder = builder.config("spark.stage.maxConsecutiveAttempts", str(attempts))
    return builder.config("spark.executor.extraJavaOptions", _FAST_START).getOrCreate()


def two_hosts_session(master: str, partitions: int) -> SparkSession:
    """Start a session on a cluster of two hosts, each of which runs one attempt at most of a task.

    :param master: the cluster's
    :param partitions: after a shuffle
    """
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": _FAST_START,
        "spark.driver.extraJavaOptions": _FAST_START,
        # Before the first job, so that both hosts get tasks.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.cores.max": "2",
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
        # A few rows in a batch, so that a task's rows are stored one batch after another.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
        "spark.speculation": "true",
        "spark.speculation.interval": "200ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "500ms",
        "spark.excludeOnFailure.enabled": "true",
        "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "1",
    }
    # For one task only: the host still gets others.
    for level in ("stage", "application"):
        settings[f"spark.excludeOnFailure.{level}.maxFailedTasksPerExecutor"] = "1000"
        settings[f"spark.excludeOnFailure.{level}.maxFailedExecutorsPerNode"] = "1000"
    builder = _builder(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def local_session() -> SparkSession:
    """Start a session whose two tasks run in the driver's JVM."""
    return _builder("local[2]").config("spark.driver.extraJavaOptions", _FAST_START).getOrCreate()


def _builder(master: str) -> SparkSession.Builder:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    return builder.config("spark.sql.shuffle.partitions", "2")


def send_message(message: object) -> None:
    """Send a message to the test."""
    print(json.dumps(message), flush=True)
