"""Whatever a native template makes of an argument, the task's error is one of this package or of Airflow.

No server is there: what can be used ends with the error that the server can't be reached.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from airflow.sdk import DAG

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSensorTimeout
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from airflow.sdk import Context

QUEUE: dict[str, Any] = {
    "name": "native",
    "subjects": ["native.>"],
    "dead_letters": "native_dead",
    "events": "native_events",
    "consumers": [{"name": "w", "max_deliver": 3}],
}
POLLING: dict[str, Any] = {"work_queue": QUEUE, "deferrable": False, "timeout": 0, "poke_interval": 0.01}
WAITING: dict[str, Any] = {"wait_for_completion": True}
MADE: dict[str, tuple[Any, dict[str, Any]]] = {
    "publish": (JetStreamPublishOperator, {"work_queue": QUEUE, "subject": "native.a", "jobs": ["a"], **WAITING}),
    "provision": (JetStreamProvisionOperator, {"work_queue": QUEUE}),
    "redrive": (JetStreamRedriveOperator, {"work_queue": QUEUE, **WAITING}),
    "waves": (JetStreamRedriveOperator, {"work_queue": QUEUE, "waves": [1]}),
    "consume": (JetStreamConsumeOperator, {"work_queue": QUEUE, "consumer": "w", "handler": print}),
    "cancel": (JetStreamCancelOperator, {"work_queue": QUEUE, "job_ids": ["a"]}),
    "letters": (JetStreamDeadLetterSensor, POLLING),
    "drained": (JetStreamQueueDrainedSensor, POLLING),
    "jobs": (JetStreamJobsSensor, {"handle": "{{ handle }}", "deferrable": False, "timeout": 0}),
}
WRONG: tuple[object, ...] = ([], ["native.a"], {"native.a": 1}, 3, True, b"native.a", [[None]])
# Of another connection, Airflow says that it has none.
LEFT_OUT = {"nats_conn_id"}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = {"conn_type": "nats", "host": LOOPBACK, "port": free_port(), "extra": {"timeout": 0.05}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(nobody))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MADE)
def test_the_error_is_one_of_this_package(name: str) -> None:
    kind, arguments = MADE[name]
    fields = [field for field in kind.template_fields if field not in LEFT_OUT]
    problems = [
        problem
        for field in fields
        for value in WRONG
        if (problem := _problem(kind, {**arguments, field: "{{ found }}"}, value))
    ]
    assert problems == []


@pytest.mark.parametrize("text", ["{'name': 'native'}", '{"name": "native"}', "name: native\nsubjects: [native.>]"])
def test_a_template_that_makes_the_text_of_a_declaration_says_what_to_give(text: str) -> None:
    publish = JetStreamPublishOperator(task_id="t", work_queue="{{ found }}", subject="native.a", jobs=["a"])
    publish.work_queue = text
    with pytest.raises(AirflowFailException, match="found the text of a declaration: give the other task's output"):
        publish.execute(cast("Context", {"ti": None}))


def _problem(kind: Any, arguments: dict[str, Any], value: object) -> str | None:
    instance = SimpleNamespace(
        dag_id="native", run_id="run", task_id="task", map_index=-1, try_number=1, max_tries=0, start_date=None
    )
    cursor = {"queue": "native", "events": "native_events", "position": 1}
    values = {"ti": instance, "found": value, "handle": {"cursor": cursor, "sequences": [[1, 1]]}}
    try:
        # Some arguments exclude each other already here.
        with DAG("native", schedule=None, render_template_as_native_obj=True):
            operator = kind(task_id="task", **arguments)
        operator.render_template_fields(values)
        operator.execute(cast("Context", values))
    except (JetStreamProviderError, AirflowFailException, AirflowSensorTimeout):
        return None
    except Exception as error:  # noqa: BLE001 - any other is what this test looks for
        return f"{arguments} {value!r}: {type(error).__name__}: {error}"
    return None
