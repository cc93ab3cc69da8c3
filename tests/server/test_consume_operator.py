"""The consuming operator without an Airflow around it: what becomes of each message, and when it ends."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream import connect, connection_settings, find_dead_letters
from airflow_provider_jetstream.jetstream.errors import ArgumentError, DeadlineError
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.worker import Delivery, GiveUpError, RetryLaterError
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, small_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

CONTEXT: Any = {"ti": SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, max_tries=0)}


@pytest.fixture(autouse=True)
def nats_connection(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "nats", "host": nats.url, "extra": {"timeout": 2}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(connection))


def operator_of(queue: WorkQueue, handler: Callable[..., Any], **arguments: Any) -> JetStreamConsumeOperator:
    return JetStreamConsumeOperator(
        task_id="t", work_queue=queue, consumer=CONSUMER, handler=handler, deferrable=False, **arguments
    )


async def consume(queue: WorkQueue, handler: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    operator = operator_of(queue, handler, **arguments)
    return await asyncio.to_thread(operator.execute, CONTEXT)


@pytest.mark.slow
async def test_it_does_every_message_once_and_ends_when_none_waits(connection: NatsPyConnection, name: str) -> None:
    queue, done = await make_queue(connection, name), list[bytes]()
    await publish_jobs(connection, queue, [str(number) for number in range(50)])
    result = await consume(queue, lambda job: done.append(job.body))
    assert done == [str(number).encode() for number in range(50)]
    assert (result["deliveries"], result["counts"]) == (50, {"completed": 50})
    assert result["sequences"] == {"completed": [[1, 50]]}
    assert len(result["ids"]["completed"]) == 50
    assert await stored_count(connection, name) == 0
    # Nothing of what the messages contain.
    assert set(result) == {"stream", "consumer", "deliveries", "counts", "ids", "sequences"}


@pytest.mark.slow
async def test_each_outcome_is_the_messages_own(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3, "ack_wait": None, "backoff": ["30s", "60s"]})
    await publish_jobs(connection, queue, ["good", "bad", "later", "broken"])

    def handle(job: Delivery) -> None:
        match job.body:
            case b"bad":
                raise GiveUpError("no such order")
            case b"later":
                raise RetryLaterError(3600, "busy")
            case b"broken":
                raise ValueError("a defect")

    result = await consume(queue, handle)
    assert result["counts"] == {"completed": 1, "given_up": 1, "retried": 2}
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.death.explanation) == (2, "no such order")
    info = await consumer_info(connection, name, CONSUMER)
    assert (info["num_pending"], info["num_ack_pending"]) == (0, 2)


@pytest.mark.slow
async def test_a_batch_has_an_outcome_for_each_message(connection: NatsPyConnection, name: str) -> None:
    queue, sizes = await make_queue(connection, name, consumer={"ack_wait": "30s"}), list[int]()
    await publish_jobs(connection, queue, [str(number) for number in range(20)])

    def handle(jobs: list[Delivery]) -> list[object]:
        sizes.append(len(jobs))
        return [GiveUpError("odd") if int(job.body) % 2 else None for job in jobs]

    result = await consume(queue, handle, batch=8)
    assert result["counts"] == {"completed": 10, "given_up": 10}
    assert (sum(sizes), max(sizes) <= 8) == (20, True)


async def test_it_pulls_no_more_messages_than_the_most(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, jobs=[str(number) for number in range(10)])
    for batch, left in ((None, 6), (100, 2)):
        result = await consume(queue, lambda _: None, max_messages=4, batch=batch)
        assert (result["deliveries"], await stored_count(connection, name)) == (4, left)
    info = await consumer_info(connection, name, CONSUMER)
    assert (info["num_pending"], info["num_ack_pending"]) == (2, 0)


@pytest.mark.slow
async def test_it_waits_for_the_first_message_and_then_until_none_is_left(
    connection: NatsPyConnection, name: str
) -> None:
    queue, begun = await make_queue(connection, name), threading.Event()
    running = asyncio.create_task(consume(queue, lambda _: begun.set(), wait_timeout=60))
    await eventually(lambda: _has_open_request(connection, name))
    await publish_jobs(connection, queue, "a")
    result = await asyncio.wait_for(running, 30)
    assert (begun.is_set(), result["counts"]) == (True, {"completed": 1})


@pytest.mark.slow
async def test_without_messages_it_ends_after_its_wait(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    result = await consume(queue, print, wait_timeout="1s")
    assert (result["deliveries"], result["counts"], result["ids"]) == (0, {}, {})


async def _has_open_request(connection: NatsPyConnection, stream: str) -> bool:
    return bool((await consumer_info(connection, stream, CONSUMER))["num_waiting"])


async def test_a_consumer_that_is_deleted_meanwhile_ends_the_task_with_the_reason(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    running = asyncio.create_task(consume(queue, print, wait_timeout=600))
    await eventually(lambda: _has_open_request(connection, name))
    caplog.clear()
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    with pytest.raises(AirflowFailException, match=rf"JS\d+ .*consumer {CONSUMER} of stream {name}"):
        await asyncio.wait_for(running, 30)
    assert len(caplog.messages) < 5


@pytest.mark.slow
async def test_a_server_that_stays_away_ends_the_task_so_that_airflow_tries_again(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps({"conn_type": "nats", "host": own_nats.url}))
    monkeypatch.setattr(seams.BOUNDED_RUN_LONGEST_SILENCE, 3.0)
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = await make_queue(connection, name)
        running = asyncio.create_task(consume(queue, print, wait_timeout=600))
        await eventually(lambda: _has_open_request(connection, name))
    own_nats.kill()
    with pytest.raises(DeadlineError, match=f"for {name}/{CONSUMER} within 3 s, found a lost connection"):
        await asyncio.wait_for(running, 60)


@pytest.mark.slow
async def test_a_deferrable_task_defers_until_a_message_can_be_delivered(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_LONGEST_MARGIN, 0.0)
    monkeypatch.setattr(seams.EARLY_FIRE_GUARD_EXIT_NOTICE_SECONDS, lambda: 0.0)
    queue, done = await make_queue(connection, name), list[bytes]()
    operator = operator_of(queue, lambda job: done.append(job.body), wait_timeout="1h")
    operator.deferrable = True
    with pytest.raises(TaskDeferred) as deferred:
        await asyncio.to_thread(operator.execute, CONTEXT)
    path, kwargs = deferred.value.trigger.serialize()
    trigger = pkgutil.resolve_name(path)(**json.loads(json.dumps(kwargs)))
    firing = asyncio.create_task(anext(trigger.run()))
    await eventually(lambda: _has_open_request(connection, name))
    await publish_jobs(connection, queue, "a")
    event = (await asyncio.wait_for(firing, 30)).payload
    assert event["found"]["waiting"] == 1
    result = await asyncio.to_thread(operator.execute_complete, CONTEXT, event)
    assert (done, result["counts"]) == ([b"a"], {"completed": 1})
    # A message that another worker has taken meanwhile: there is time left to wait for the next.
    with pytest.raises(TaskDeferred):
        await asyncio.to_thread(operator.execute_complete, CONTEXT, event)
    over = {"status": "found", "found": {"waiting": 0, "deadline": time.time()}}
    assert (await asyncio.to_thread(operator.execute_complete, CONTEXT, over))["deliveries"] == 0


async def test_a_task_that_is_ended_hands_back_what_it_has_not_begun(connection: NatsPyConnection, name: str) -> None:
    queue, begun = await make_queue(connection, name, consumer={"ack_wait": "30s"}), threading.Event()
    await publish_jobs(connection, queue, "abcd")
    release = threading.Event()

    def handle(_: Delivery) -> None:
        begun.set()
        release.wait(30)

    operator = operator_of(queue, handle)
    running = asyncio.create_task(asyncio.to_thread(operator.execute, CONTEXT))
    await asyncio.to_thread(begun.wait, 30)
    operator.on_kill()
    release.set()
    end = await asyncio.wait_for(running, 30)
    assert end["counts"]["completed"] + await stored_count(connection, name) == 4
    assert end["counts"]["completed"] < 4


def test_a_handler_that_takes_something_else_is_refused_when_the_dag_is_parsed() -> None:
    queue = small_queue("orders")
    with pytest.raises(WorkerSetupError, match="expected a handler that takes a job"):
        operator_of(queue, lambda: None)
    with pytest.raises(WorkerSetupError, match="expected a handler that takes a list of jobs"):
        operator_of(queue, lambda: None, batch=3)
    with pytest.raises(ArgumentError, match="expected a whole number of at least 1 as max_messages"):
        operator_of(queue, print, max_messages=0)


async def test_the_decorator_makes_the_function_the_handler(connection: NatsPyConnection, name: str) -> None:
    queue, done = await make_queue(connection, name), list[tuple[bytes, str]]()
    await publish_jobs(connection, queue, "ab")
    with DAG("d", schedule=None):

        @task.jetstream_consume(work_queue=queue, consumer=CONSUMER)
        def fulfil(order: Delivery, warehouse: str = "") -> None:
            done.append((order.body, warehouse))

        called: Any = fulfil
        output = called(warehouse="north")
        with pytest.raises(ArgumentError, match="expected arguments by name in the call of fulfil"):
            called("north")
    operator = output.operator
    assert (operator.task_id, "op_kwargs" in operator.template_fields) == ("fulfil", True)
    result = await asyncio.to_thread(operator.execute, CONTEXT)
    assert sorted(done) == [(b"a", "north"), (b"b", "north")]
    assert result["counts"] == {"completed": 2}


@pytest.mark.slow
async def test_hostile_ids_and_bodies_become_json(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    client = connection.client.jetstream()
    for body in (b"\xff\xfe", b'{"id": "\\ud800 \\n\\u0007"}', b'{"id": "' + b"x" * 50_000 + b'"}', b"", b"NaN"):
        await client.publish(f"{name}.jobs.x", body)
    result = await consume(queue, lambda _: None)
    assert result["counts"] == {"completed": 5}
    text = json.dumps(result, allow_nan=False)
    assert len(text.encode()) < 2_000
