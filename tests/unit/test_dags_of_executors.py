"""What Celery's and Kubernetes' executors hand over, and a worker whose bundle of DAGs has another path.

Both hand over the ids of a task instance, and the worker parses the DAG's file in its own copy of the bundle: nothing
of an operator passes between the processes, and the DAG has to be the same one there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.executors.workloads import BundleInfo, ExecuteTask
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

DAGS = Path(__file__).parent.parent / "airflow" / "dags"
TEXT = """
from airflow.sdk import DAG
from airflow_provider_jetstream.jetstream import Job, RedriveRequest, Selection, WorkQueue
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor

QUEUE = "queues/made.yaml"


def jobs():
    yield Job({"n": 1}, subject="made.a")


with DAG("of_executors", schedule=None) as dag:
    JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    listed = [Job(b"\\xff", id="1"), "a"]
    sent = JetStreamPublishOperator(task_id="send", work_queue=QUEUE, subject="made.a", jobs=listed)
    JetStreamPublishOperator(task_id="yielded", work_queue=QUEUE, jobs=jobs)
    JetStreamPublishOperator.partial(task_id="mapped", work_queue=QUEUE, subject="made.a").expand(jobs=[["a"], ["b"]])
    JetStreamCancelOperator(task_id="cancel", work_queue=QUEUE, jobs=[Job("a", id="1")])
    JetStreamConsumeOperator(task_id="consume", work_queue=QUEUE, consumer="{{ params.consumer }}", handler=print)
    JetStreamRedriveOperator(task_id="redrive", work_queue=QUEUE, select=Selection(consumer="worker"), rate=5)
    JetStreamDeadLetterSensor(task_id="letters", work_queue=QUEUE, deferrable=True)
    JetStreamQueueDrainedSensor(task_id="drained", work_queue=QUEUE)
    JetStreamJobsSensor(task_id="wait", handle=sent.output)
"""


@pytest.fixture
def bundles(tmp_path: Path) -> Iterator[list[Path]]:
    """The same folder of DAGs as it is on two machines."""
    folders = [tmp_path / "scheduler" / "dags", tmp_path / "worker" / "opt" / "bundle"]
    for folder in folders:
        shutil.copytree(DAGS / "made" / "queues", folder / "queues")
        (folder / "of_executors.py").write_text(TEXT)
    yield folders
    sys.modules.pop("of_executors", None)


def _dag(folder: Path) -> Any:
    bag = DagBag(folder / "of_executors.py", safe_mode=False)
    assert not bag.import_errors
    return bag.dags["of_executors"]


def test_a_worker_with_the_bundle_elsewhere_parses_the_same_dag(bundles: list[Path]) -> None:
    stored = []
    for folder in bundles:
        dag = _dag(folder)
        stored.append(json.dumps(DagSerialization.to_dict(dag), sort_keys=True).replace(str(folder), "<bundle>"))
        assert load_queue(dag.task_dict["send"].work_queue, dag.task_dict["send"]).name == "made"
    assert stored[0] == stored[1]
    assert "0x" not in stored[0]
    read = DagSerialization.from_dict(json.loads(stored[0]))
    assert set(read.task_dict) == set(_dag(bundles[0]).task_dict)


def test_what_an_executor_hands_over_names_the_task_and_holds_nothing_of_the_operator() -> None:
    task = {
        "id": str(uuid4()),
        "dag_version_id": str(uuid4()),
        "task_id": "send",
        "dag_id": "of_executors",
        "run_id": "run",
        "try_number": 1,
        "map_index": -1,
        "pool_slots": 1,
        "queue": "default",
        "priority_weight": 1,
    }
    bundle = BundleInfo(name="dags-folder", version=None)
    workload = ExecuteTask.model_validate(
        {"ti": task, "dag_rel_path": "of_executors.py", "bundle_info": bundle, "token": "t", "log_path": None}
    )
    text = workload.model_dump_json()
    assert ExecuteTask.model_validate_json(text).ti.task_id == "send"
    assert "made" not in text
