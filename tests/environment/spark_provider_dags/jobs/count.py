"""A job as people write it for spark-submit; it finds the package in the archive that came with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import airflow_provider_jetstream
from airflow_provider_jetstream.spark import register

if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    register(session)
    stream, result = sys.argv[1:]
    count = session.read.format("jetstream").options(connection="beside", stream=stream).load().count()
    Path(result).write_text(json.dumps({"messages": count, "package": airflow_provider_jetstream.__file__}))
    session.stop()
