r"""The store's dead letters by the hundred thousand, every night: store them, report on them, repair, redrive, wait.

The report counts the causes of death, and stores the letters unchanged. Orders with a decimal comma are repaired and
redriven, orders whose bank was busy are redriven unchanged, and all other letters stay where they are. Spark runs where
the connection ``spark_default`` says, or on this machine without one. Workers process the orders::

    jetstream-worker run --queue example_dags/queues/store.yaml --consumer till \
        --handler example_workers.store:process
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUE = str(Path(__file__).parent / "queues" / "store.yaml")
# On a cluster, storage that driver and executors share, such as s3a://bucket/dead-letters.
DIRECTORY = os.environ.get("DEAD_LETTER_REPORTS", f"{tempfile.gettempdir()}/dead-letter-reports")

BUSY = "example_workers.store.BankBusyError"
MALFORMED = "example_workers.store.MalformedOrderError"


def with_decimal_point(letters: DataFrame) -> DataFrame:
    """Repair amounts such as ``"12,50"``; letters that aren't returned aren't redriven."""
    from pyspark.sql import functions as f

    text = f.col("body").cast("string")
    repaired = f.regexp_replace(text, r'"amount":\s*"(\d+),(\d+)"', r'"amount": $1.$2').cast("binary")
    body = f.when(f.col("error_class") == MALFORMED, repaired).otherwise(f.col("body"))
    return letters.where(f.col("error_class").isin(BUSY, MALFORMED)).withColumn("body", body)


with DAG(
    "dead_letter_pipeline",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    # Longer than all of its tasks may take; a run that hangs ends before the next night.
    dagrun_timeout=timedelta(hours=12),
    tags=["jetstream", "spark"],
    doc_md=__doc__,
) as dag:
    # Workers of other makes may have set their own configuration since.
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    scan = JetStreamDeadLetterSensor(
        task_id="scan",
        work_queue=QUEUE,
        deferrable=True,
        poke_interval=5,
        timeout=60,
        soft_fail=True,
    )

    report = JetStreamDeadLetterReportOperator(
        task_id="report", work_queue=QUEUE, directory=DIRECTORY, execution_timeout=timedelta(hours=4)
    )

    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=QUEUE,
        engine="spark",
        letters="{{ ti.xcom_pull('report')['kept'] }}",
        repair=with_decimal_point,
        directory=DIRECTORY,
        max_redrives=3,
        why="nightly",
        retries=2,
        wait_for_completion=True,
        max_dead=None,
        wait_timeout=timedelta(hours=4),
        deferrable=True,
    )

    provision >> scan >> report >> redrive
