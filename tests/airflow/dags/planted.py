"""Tasks whose connections have a planted secret in every field."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, BaseOperator, task

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

QUEUE = WorkQueue(
    name="planted",
    subjects=["planted"],
    consumers=[{"name": "worker", "max_deliver": 1, "ack_wait": "5s"}],
    dead_letters="planted_dead",
    events="planted_events",
)
WAYS = ("nkey", "credentials", "file")


class DefersAtOnce(BaseOperator):
    """Defers without connecting, so that it is the triggerer that fails."""

    def __init__(self, conn_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id

    def execute(self, context: Context) -> None:
        """Defer."""
        declared = QUEUE.model_dump(mode="json", exclude_unset=True)
        trigger = QueueDrainedTrigger(
            nats_conn_id=self.conn_id, work_queue=declared, poll_interval=5.0, deferred_at=time.time()
        )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=60))

    def execute_complete(self, context: Context, event: Any = None) -> None:
        """Log the event and fail."""
        self.log.error("%s", event)
        raise RuntimeError(str(event))


with DAG("planted", schedule=None, max_active_tasks=3):
    for way in WAYS:
        conn_id = f"planted_{way}"
        publish = JetStreamPublishOperator(
            task_id=f"publish_{way}",
            nats_conn_id=conn_id,
            work_queue=QUEUE,
            subject="planted",
            jobs=["good", "bad"],
            wait_for_completion=True,
            max_dead=1,
            wait_timeout=timedelta(minutes=5),
            deferrable=True,
        )
        if way == "credentials":
            publish >> JetStreamRedriveOperator(task_id="redrive", nats_conn_id=conn_id, work_queue=QUEUE)

with DAG("planted_failing", schedule=None, max_active_tasks=3):

    @task
    def every_failure() -> list[str]:
        """Connect in each way that fails, blocking and awaited, and log errors as a task that fails with them."""
        log = logging.getLogger("airflow.task")
        answers = []
        for conn_id in os.environ["PLANTED_FAILING"].split(","):
            hook = JetStreamHook(conn_id)
            answers.append(f"{conn_id}: {hook.test_connection()[1]}")
            for attempt in (lambda hook=hook: hook.check_drained(QUEUE), lambda h=hook: asyncio.run(_awaited(h))):
                try:
                    attempt()
                except Exception:
                    log.exception("%s failed", conn_id)
                else:
                    raise AssertionError(f"expected {conn_id} to fail")
        return answers

    async def _awaited(hook: JetStreamHook) -> None:
        await hook.acheck_drained(QUEUE)

    every_failure()
    for failing in ("wrong_credentials", "without_at"):
        JetStreamPublishOperator(
            task_id=f"publish_{failing}",
            nats_conn_id=f"planted_{failing}",
            work_queue=QUEUE,
            subject="planted",
            jobs=["a"],
            retries=0,
        )
        DefersAtOnce(task_id=f"defer_{failing}", conn_id=f"planted_{failing}", retries=0)
