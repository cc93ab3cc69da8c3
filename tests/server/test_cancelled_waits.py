"""A failed wait cancels the jobs that haven't ended: on the last try, after a final failure, and its own jobs only."""

from __future__ import annotations

import asyncio
import json
import pkgutil
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.context import set_current_context

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSensorTimeout, AirflowSkipException
from airflow_provider_jetstream.jetstream import (
    DeadlineError,
    Job,
    connect,
    connection_settings,
    publish,
    publish_with_handle,
)
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.nats_server import NatsServer
from testbed.queues import make_queue, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

DENIED = '{publish: {deny: ["$JS.API.CONSUMER.CREATE.>", "$JS.API.DIRECT.GET.>", "$JS.API.STREAM.MSG.GET.>"]}}'
USERS = f"{{user: all, password: p}}, {{user: few, password: p, permissions: {DENIED}}}"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer(config=f"authorization {{ users: [{USERS}] }}") as running:
        yield running


@pytest.fixture
async def connection(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    use(server, monkeypatch, "all")
    settings = connection_settings({"servers": (server.url,), "user": "all", "password": "p"})
    async with connect(settings) as opened:
        yield opened


@pytest.fixture(autouse=True)
def fires_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.0)
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_EXIT_NOTICE_SECONDS, lambda: 0.0)


def use(server: NatsServer, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    form = {"conn_type": "nats", "host": server.url, "login": user, "password": "p", "extra": {"timeout": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(form))


@contextmanager
def task_try(number: int, *, retries: int) -> Iterator[Any]:
    """Be a try of a task, as Airflow makes it known."""
    instance = SimpleNamespace(
        dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=number, max_tries=retries, xcom_push=_ignore
    )
    context: Any = {"ti": instance}
    with set_current_context(context):
        yield context


async def _is_cancelled(connection: NatsPyConnection, name: str) -> bool:
    """Return whether anything of a queue is cancelled, by id or by sequence."""
    return bool(await stream_messages(connection, f"{name}-events", f"cancelled.{name}.>"))


def _ignore(*_: Any, **__: Any) -> None:
    pass


def waiting_operator(queue: WorkQueue, **arguments: Any) -> JetStreamPublishOperator:
    return JetStreamPublishOperator(
        task_id="t",
        work_queue=queue,
        subject=f"{queue.name}.jobs.x",
        jobs=[Job("body", id="mine")],
        wait_for_completion=True,
        cancel_on_failure=True,
        **{"deferrable": False, "wait_timeout": 0.3, **arguments},
    )


async def test_a_wait_that_a_retry_continues_cancels_nothing_and_the_last_try_cancels(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    for number, cancelled in ((1, False), (2, False), (3, True)):
        with task_try(number, retries=2) as context, pytest.raises(DeadlineError):
            await asyncio.to_thread(waiting_operator(queue).execute, context)
        assert await _is_cancelled(connection, name) is cancelled


async def resumed(operator: JetStreamPublishOperator, deferred: TaskDeferred, context: Any) -> Any:
    """Run the trigger of a deferred task until it fires, then the task again."""
    path, arguments = deferred.trigger.serialize()
    trigger = pkgutil.resolve_name(path)(**json.loads(json.dumps(arguments)))
    fired = await asyncio.wait_for(anext(trigger.run()), 30)
    return lambda: operator.execute_complete(context, event=json.loads(json.dumps(fired.payload)))


async def test_a_failure_in_the_triggerer_that_no_retry_can_mend_cancels_at_once(
    server: NatsServer, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    operator = waiting_operator(queue, deferrable=True, defer_after=0, wait_timeout=600)
    with task_try(1, retries=5) as context:
        with pytest.raises(TaskDeferred) as deferred:
            await asyncio.to_thread(operator.execute, context)
        use(server, monkeypatch, "few")
        resume = await resumed(operator, deferred.value, context)
        use(server, monkeypatch, "all")
        with pytest.raises(AirflowFailException, match=r"permission"):
            await asyncio.to_thread(resume)
    assert await _is_cancelled(connection, name)


async def test_a_wait_whose_queue_was_created_anew_leaves_the_jobs_of_the_new_one_alone(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    operator = waiting_operator(queue, deferrable=True, defer_after=0, wait_timeout=600)
    with task_try(1, retries=0) as context:
        with pytest.raises(TaskDeferred) as deferred:
            await asyncio.to_thread(operator.execute, context)
        await connection.api(f"STREAM.DELETE.{name}")
        await make_queue(connection, name)
        # It has the sequence that the awaited job had.
        await publish(connection, queue, [Job("another", id="a-stranger's")], subject=f"{name}.jobs.x")
        await store_completion(connection, queue, 1)
        resume = await resumed(operator, deferred.value, context)
        with pytest.raises(AirflowFailException, match="to be the one that stored the awaited jobs"):
            await asyncio.to_thread(resume)
    assert not await _is_cancelled(connection, name)


@pytest.mark.slow
@pytest.mark.parametrize("soft_fail", [False, True])
async def test_a_sensor_whose_time_is_over_cancels_at_once_since_airflow_tries_none_again(
    connection: NatsPyConnection, name: str, *, soft_fail: bool
) -> None:
    queue = await make_queue(connection, name)
    published = await publish_with_handle(connection, queue, ["body"], subject=f"{name}.jobs.x")
    sensor = JetStreamJobsSensor(
        task_id="t", handle=published, timeout=0.3, deferrable=False, cancel_on_failure=True, soft_fail=soft_fail
    )
    expected = AirflowSkipException if soft_fail else AirflowSensorTimeout
    with task_try(1, retries=5) as context, pytest.raises(expected):
        await asyncio.to_thread(sensor.execute, context)
    assert await _is_cancelled(connection, name)
