"""The arguments of the sensor, without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue, chosen_consumers
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.triggers.queue import QueueDrainedTrigger
from testbed.deferral import TaskDeferred

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

QUEUE: dict[str, Any] = {"name": "queue", "subjects": ["queue"], "consumers": [{"name": "worker", "max_deliver": 1}]}


def sensor(**kwargs: Any) -> JetStreamQueueDrainedSensor:
    return JetStreamQueueDrainedSensor(**{"task_id": "sensor", "work_queue": QUEUE, "nats_conn_id": "absent", **kwargs})


@pytest.mark.parametrize(
    ("consumers", "names"),
    [(None, None), ("a", ("a",)), (["a"], ("a",)), (("b", "a", "b"), ("b", "a"))],
)
def test_consumers_are_a_list_or_one_name(consumers: Any, names: tuple[str, ...] | None) -> None:
    assert chosen_consumers(consumers) == names
    assert sensor(consumers=consumers).consumers == consumers


@pytest.mark.parametrize("rendered", ["", " ", "None", None, []])
def test_consumers_whose_template_renders_to_nothing_do_not_select_all(rendered: Any) -> None:
    waiting = sensor(consumers="{{ params.consumer }}")
    waiting.consumers = rendered
    with pytest.raises(AirflowFailException, match=r"^JS113 expected names of consumers to inspect, found "):
        waiting.poke({})


@pytest.mark.slow
def test_whether_it_defers_is_airflows_default() -> None:
    code = (
        "from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor as Sensor\n"
        "arguments = {'task_id': 'sensor', 'work_queue': '/srv/queue.yaml'}\n"
        "print(Sensor(**arguments).deferrable, Sensor(**arguments, deferrable=False).deferrable)"
    )
    env = {**os.environ, "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("queue", [QUEUE, WorkQueue(**QUEUE)])
def test_a_deferral_has_a_timeout_and_a_trigger_that_is_all_json(queue: Any, mocker: MockerFixture) -> None:
    waiting = sensor(work_queue=queue, consumers="worker", deferrable=True, poke_interval=7, timeout=90)
    # The result of a poll that finds jobs.
    mocker.patch.object(JetStreamQueueDrainedSensor, "poke").return_value.is_done = False
    with pytest.raises(TaskDeferred) as deferred:
        waiting.execute({})
    assert (deferred.value.timeout, deferred.value.method_name) == (timedelta(seconds=90), "execute_complete")
    assert isinstance(deferred.value.trigger, QueueDrainedTrigger)
    _, kwargs = deferred.value.trigger.serialize()
    assert kwargs.pop("deferred_at") > 0
    assert kwargs == {
        "nats_conn_id": "absent",
        "work_queue": QUEUE,
        "poll_interval": 7,
        "consumers": ["worker"],
        "nothing_dead": False,
    }


def test_a_trigger_that_ends_without_a_result_fails_the_task() -> None:
    with pytest.raises(AirflowFailException, match=r"^the trigger ended without an event$"):
        sensor().execute_complete({})
    with pytest.raises(AirflowFailException, match=r"^JS113 gone$"):
        sensor().execute_complete({}, {"status": "error", "message": "JS113 gone"})
    report = {"queue": "queue", "drained": True}
    assert sensor().execute_complete({}, {"status": "found", "found": report}, later="more") == report
