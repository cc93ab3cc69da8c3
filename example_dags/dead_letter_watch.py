r"""Invoices that died start the DAG that brings them back: a watcher of their dead letters, without a schedule.

The asset ``invoices_dead`` is updated when invoices die of a cause of which no dead letter has been reported, and when
more of a cause die. The watcher is rung by the dead letter queue and looks once a minute besides, for deaths of which
the server says nothing. Its event starts a run, which redrives all letters in circulation rather than those of the
event: letters that die while the run is being made need no event of their own. An invoice that dies a third time is
parked until a person inspects it.

Workers print the invoices, in Python or in any other language; with this package's own::

    jetstream-worker run --queue example_dags/queues/invoices.yaml --consumer printer \
        --handler example_workers.invoices:print_invoice
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, AssetWatcher, task

from airflow_provider_jetstream.assets.stream_asset import dead_letter_asset, queue_asset
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger

QUEUE = str(Path(__file__).parent / "queues" / "invoices.yaml")

INVOICES = queue_asset(QUEUE)
DIED = AssetWatcher(name="invoices_died", trigger=DeadLetterTrigger(work_queue=QUEUE, group_by=["error_class"]))
LETTERS = dead_letter_asset(QUEUE, name="invoices_dead", watchers=[DIED])

log = logging.getLogger(__name__)

with DAG("invoices", schedule=None, catchup=False, tags=["jetstream"], doc_md=__doc__) as invoices:
    provision = JetStreamProvisionOperator(task_id="provision", work_queue=QUEUE)
    publish = JetStreamPublishOperator(
        task_id="publish",
        work_queue=QUEUE,
        subject="invoices.new",
        jobs=[{"id": f"invoice-{number}"} for number in range(3)],
        outlets=[INVOICES],
    )
    provision >> publish

with DAG(
    "dead_letter_watch",
    schedule=[LETTERS],
    catchup=False,
    max_active_runs=1,
    dagrun_timeout=timedelta(hours=1),
    tags=["jetstream"],
    doc_md=__doc__,
) as dag:

    @task
    def causes(triggering_asset_events: Any = None) -> list[dict[str, Any]]:
        """Log what the events say, and return it."""
        events = [event.extra["payload"] for event in triggering_asset_events[LETTERS] if "payload" in event.extra]
        for event in events:
            log.info("%d invoices died, sequences %s: %s", event["arrived"], event["sequences"], event["groups"])
        return events

    redrive = JetStreamRedriveOperator(
        task_id="redrive",
        work_queue=QUEUE,
        max_redrives=2,
        rate=20,
        why="the watcher of dead letters",
        retries=2,
        inlets=[LETTERS],
        outlets=[INVOICES],
    )
    causes() >> redrive
