"""The Spark provider's operators and this package's, one after the other on the same stream and the same connection."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, task

from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = os.environ["BESIDE_STREAM"]
FOLDER = Path(os.environ["BESIDE_FOLDER"])
QUEUE = {
    "name": STREAM,
    "subjects": [f"{STREAM}.jobs.*"],
    "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "30s"}],
    "dead_letters": f"{STREAM}-dead",
}

with DAG("beside", schedule=None) as dag:
    submit = SparkSubmitOperator(
        task_id="submit",
        application=str(Path(__file__).parent / "jobs" / "count.py"),
        py_files=str(FOLDER / "package.zip"),
        application_args=[STREAM, str(FOLDER / "counted")],
    )

    @task.pyspark(conn_id="spark_default")
    def count(spark: SparkSession) -> dict[str, Any]:
        from airflow_provider_jetstream.spark import register

        register(spark)
        letters = spark.read.format("jetstream").options(connection="beside", stream=STREAM).load()
        return {"messages": letters.count(), "spark": spark.version}

    report = JetStreamDeadLetterReportOperator(task_id="report", work_queue=QUEUE, directory=str(FOLDER / "reports"))

    # The decorator passes the session.
    submit >> count() >> report  # type: ignore[call-arg, misc]
