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
