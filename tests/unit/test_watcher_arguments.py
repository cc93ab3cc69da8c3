"""What a watcher's trigger gives Airflow to store, and takes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.triggers.base import BaseEventTrigger

from airflow_provider_jetstream.jetstream import WorkQueue
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger

QUEUE = WorkQueue(
    name="orders",
    subjects=["orders.>"],
    consumers=[{"name": "a", "backoff": ["1s", "2s"], "max_deliver": 3}],
    dead_letters="orders_dead",
)
WATCHERS: dict[str, BaseEventTrigger] = {
    "doorbell": JetStreamMessageTrigger(work_queue=QUEUE, consumer="a"),
    "dead letters": DeadLetterTrigger(
        work_queue=QUEUE, select={"subject": "orders.new", "older_than": "10m"}, group_by=["fingerprint", "subject"]
    ),
}
# Airflow 3.3 or newer.
if hasattr(BaseEventTrigger, "create_shared_stream_producer"):
    WATCHERS["payload"] = JetStreamMessageTrigger(work_queue=QUEUE, consumer="a", mode="payload", body="json")


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float) or all(isinstance(part, str) for part in value)


@pytest.mark.parametrize("trigger", WATCHERS.values(), ids=WATCHERS.keys())
def test_no_argument_is_a_dict_whose_keys_airflow_could_change(trigger: BaseEventTrigger) -> None:
    _, arguments = trigger.serialize()
    assert [name for name, value in arguments.items() if isinstance(value, dict) or not is_plain(value)] == []
    assert type(trigger)(**json.loads(json.dumps(arguments))).serialize() == trigger.serialize()


@pytest.mark.parametrize("text", ["{", '{"name": 5}', "{}"])
def test_a_text_that_is_no_queue_is_refused(text: str) -> None:
    with pytest.raises(QueueDeclarationError):
        JetStreamMessageTrigger(work_queue=text, consumer="a")
