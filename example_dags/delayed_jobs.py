r"""Jobs that start later: after a delay or at a time, and one that is cancelled before its time.

The server keeps each job until it is due. No task and no worker waits for that, and a restart of any of them changes
nothing: ``publish`` ends as soon as the schedules are stored. A mover takes the surveys to their queue when they are
due, and workers send them::

    jetstream-queue schedules run example_dags/queues/surveys.yaml
    jetstream-worker run --queue example_dags/queues/surveys.yaml --consumer sender \
        --handler example_workers.surveys:send
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_jetstream.jetstream import Job
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

QUEUE = str(Path(__file__).parent / "queues" / "surveys.yaml")
DUE = "{{ (dag_run.run_after + macros.timedelta(seconds=params.delay)).isoformat() }}"
SURVEYS = [
    Job({"to": "ada"}, id="ada", delay="{{ params.delay }}s"),
    Job({"to": "alan"}, id="alan", at=DUE),
    Job({"to": "grace"}, id="grace", delay="1h"),
]

with DAG(
    "delayed_jobs",
    schedule=None,
    catchup=False,
    tags=["jetstream"],
    params={"delay": Param(10, type="integer", minimum=1, description="seconds until the surveys are sent")},
    doc_md=__doc__,
) as dag:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(task_id="publish", work_queue=QUEUE, subject="surveys.send", jobs=SURVEYS)
    withdraw = JetStreamCancelOperator(
        task_id="withdraw", work_queue=QUEUE, job_ids=["grace"], why="she wants no surveys"
    )
    provision >> publish >> withdraw
