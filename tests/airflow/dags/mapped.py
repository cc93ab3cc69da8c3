"""Many mapped tasks that each publish a job and wait for it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUES = Path(__file__).parent / "queues"
TASKS = int(os.environ.get("MAPPED_TASKS", "24"))

# Inline: the jobs end while the operator still waits itself; late: just after it deferred itself.
for variant in ("inline", "late"):
    with DAG(f"mapped_{variant}", schedule=None, max_active_tasks=TASKS):
        queue = str(QUEUES / f"mapped_{variant}.yaml")
        provision = JetStreamProvisionOperator(task_id="provision", work_queue=queue)
        publish = JetStreamPublishOperator.partial(
            task_id="publish",
            work_queue=queue,
            subject=f"mapped.{variant}",
            wait_for_completion=True,
            wait_timeout=timedelta(minutes=5),
            defer_after=0 if variant == "late" else None,
            deferrable=True,
            retries=0,
        ).expand(jobs=[[f"job-{number}"] for number in range(TASKS)])
        provision >> publish
