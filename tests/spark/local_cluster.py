"""The session of drivers with two executor processes; the drivers are programs that tests start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession


def local_cluster() -> SparkSession:
    """Start a session with two executors."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    builder = SparkSession.builder.master("local-cluster[2,1,512]").config("spark.executor.memory", "512m")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    return builder.config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1").getOrCreate()


def send_message(message: object) -> None:
    """Send a message to the test."""
    print(json.dumps(message), flush=True)
