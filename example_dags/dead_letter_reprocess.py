r"""The store's dead letters, every morning: group them by cause, treat each kind, and report the treatments.

Orders whose bank was busy are redriven slowly, and at most three times. Orders with a decimal comma are repaired and
redriven. A body that is no order is parked until a person inspects it. All other letters stay where they are, and the
report says so. Workers process the orders, in Python or in any other language; with this package's own::

    jetstream-worker run --queue example_dags/queues/store.yaml --consumer till \
        --handler example_workers.store:process
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, task

from airflow_provider_jetstream.jetstream import Repair
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter

QUEUE = str(Path(__file__).parent / "queues" / "store.yaml")

# The group fields of each kind of letters, by the task that treats them.
KINDS = {
    "redrive_busy": {"reason": "max_deliveries", "error_class": "example_workers.store.BankBusyError"},
    "repair_malformed": {"reason": "max_deliveries", "error_class": "example_workers.store.MalformedOrderError"},
    "park_poison": {"reason": "terminated"},
}

log = logging.getLogger(__name__)


def with_decimal_point(letter: DeadLetter) -> Repair | None:
    """Repair an amount such as ``"12,50"``."""
    order = json.loads(letter.body)
    return Repair(body={**order, "amount": float(order["amount"].replace(",", "."))})


def treatment_of(group: dict[str, str | None]) -> str | None:
    """Return the task that treats a group of letters, if one does."""
    return next((task_id for task_id, kind in KINDS.items() if kind.items() <= group.items()), None)


def treat(task_id: str, **arguments: Any) -> JetStreamRedriveOperator:
    """Redrive the letters of one kind."""
    select = {"reasons" if name == "reason" else name: value for name, value in KINDS[task_id].items()}
    return JetStreamRedriveOperator(task_id=task_id, work_queue=QUEUE, select=select, retries=2, **arguments)


with DAG(
    "dead_letter_reprocess",
    schedule="0 6 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=6),
    tags=["jetstream"],
    doc_md=__doc__,
) as dag:
    # Workers of other makes may have set their own configuration since.
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)

    sense = JetStreamDeadLetterSensor(
        task_id="sense",
        work_queue=QUEUE,
        group_by=["reason", "error_class"],
        deferrable=True,
        poke_interval=5,
        timeout=60,
        soft_fail=True,
    )

    @task.branch
    def choose(summary: Any) -> list[str]:
        """Return the tasks that have letters to treat."""
        chosen = {treatment_of(group["group"]) for group in summary["groups"]}
        return [*(task_id for task_id in KINDS if task_id in chosen), "report"]

    treatments = [
        treat("redrive_busy", rate=20, max_redrives=3, why="the bank was busy"),
        treat("repair_malformed", transform=with_decimal_point, max_redrives=1, why="decimal comma"),
        treat("park_poison", max_redrives=0, why="no order; a person has to inspect it"),
    ]

    @task(trigger_rule="none_failed")
    def report(summary: Any, results: Any) -> dict[str, Any]:
        """Log a line for each group of letters, and a line for each treatment."""
        groups = [
            {**group["group"], "found": group["count"], "treatment": treatment_of(group["group"]) or "none"}
            for group in summary["groups"]
        ]
        done = {
            task_id: {"redriven": result["redriven"], "parked": result["parked"]}
            for task_id, result in zip(KINDS, results, strict=True)
            if result
        }
        log.info("%-14s %-46s %5s  %s", "reason", "error class", "found", "treatment")
        for row in groups:
            log.info("%-14s %-46s %5d  %s", *row.values())
        for task_id, counts in done.items():
            log.info("%s: %d redriven, %d parked", task_id, counts["redriven"], counts["parked"])
        return {"groups": groups, "done": done}

    reported = report(sense.output, [treatment.output for treatment in treatments])
    provision >> sense
    choose(sense.output) >> [*treatments, reported]
