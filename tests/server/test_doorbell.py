"""The mode doorbell of the message trigger: it says that messages wait, and takes none."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import re
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, permissions, provision
from airflow_provider_jetstream.jetstream.errors import ArgumentError, QueueDeclarationError, UnreachableError
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
from airflow_provider_jetstream.worker import Delivery, GiveUpError
from testbed import seams
from testbed.face import authorization, consumer_info
from testbed.foreign_programs import pull
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, small_queue

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

INTERVAL = 0.2


class Rings:
    """The events of a trigger that runs in the background, with their times."""

    def __init__(self, trigger: JetStreamMessageTrigger) -> None:
        self.payloads: list[dict[str, Any]] = []
        self.times: list[float] = []
        self._trigger = trigger
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        is_running = not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert is_running, self._task

    async def _run(self) -> None:
        async for event in self._trigger.run():
            self.payloads.append(json.loads(json.dumps(event.payload, allow_nan=False)))
            self.times.append(time.monotonic())


@pytest.fixture
def nats_connection(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_airflow_to(nats, monkeypatch)


def connect_airflow_to(server: NatsServer, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    connection = {"conn_type": "nats", "host": server.url, "extra": {"timeout": 2}} | fields
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(connection))


def doorbell(queue: WorkQueue, interval: float = INTERVAL) -> JetStreamMessageTrigger:
    trigger = JetStreamMessageTrigger(work_queue=queue, consumer=CONSUMER, interval=interval)
    path, kwargs = trigger.serialize()
    recreated: JetStreamMessageTrigger = pkgutil.resolve_name(path)(**json.loads(json.dumps(kwargs)))
    assert recreated.serialize() == (path, kwargs)
    assert recreated.shared_stream_key() is None
    return recreated


@pytest.mark.usefixtures("nats_connection")
async def test_it_says_how_many_messages_wait_and_takes_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, jobs="abc")
    async with Rings(doorbell(queue)) as rings:
        await eventually(lambda: rings.payloads)
    assert rings.payloads[0] == {"stream": name, "consumer": CONSUMER, "waiting": 3, "in_flight": 0}
    info = await consumer_info(connection, name, CONSUMER)
    assert (info["num_pending"], info["num_ack_pending"], info["delivered"]["consumer_seq"]) == (3, 0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_it_rings_again_while_messages_wait_ever_more_rarely_and_at_once_when_all_was_done(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs="ab")
    async with Rings(doorbell(queue, interval=0.5)) as rings:
        # Nobody pulls: an event that Airflow has lost is followed by others.
        await eventually(lambda: len(rings.times) == 4)
        gaps = [later - earlier for earlier, later in pairwise(rings.times)]
        assert [gap >= 0.5 * 2**number for number, gap in enumerate(gaps)] == [True] * 3
        for message in await pull_jobs(connection, queue, 2):
            await message.ack_sync()
        # The next would be due after four seconds, had messages waited without a break.
        await asyncio.sleep(0.5)
        await publish_jobs(connection, queue, "c")
        await eventually(lambda: len(rings.times) > 4 and rings.payloads[-1]["waiting"] == 1)


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_messages_that_wait_after_those_that_rang_were_taken_ring_as_soon_as_the_first(
    connection: NatsPyConnection, name: str
) -> None:
    """At each look messages wait, but others than before: the runs do theirs."""
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs="ab")
    async with Rings(doorbell(queue, interval=1)) as rings:
        for number in range(1, 6):
            await eventually(lambda number=number: len(rings.times) == number)  # type: ignore[misc]
            await publish_jobs(connection, queue, "cd")
            for message in await pull_jobs(connection, queue, 2):
                await message.ack_sync()
        await eventually(lambda: len(rings.times) == 6)
    # With doubled intervals, the last one would be 16 seconds.
    assert max(later - earlier for earlier, later in pairwise(rings.times)) < 12


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_a_message_that_is_being_done_rings_no_bell_until_its_worker_has_died(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s", "max_deliver": 5}, jobs="a")
    (message,) = await pull_jobs(connection, queue, 1)
    async with Rings(doorbell(queue)) as rings:
        for _ in range(4):
            await asyncio.sleep(0.5)
            await message.in_progress()
        assert rings.payloads == []
        await eventually(lambda: rings.payloads)
    assert rings.payloads[0] == {"stream": name, "consumer": CONSUMER, "waiting": 1, "in_flight": 1}
    info = await consumer_info(connection, name, CONSUMER)
    assert info["delivered"]["consumer_seq"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_a_message_that_a_waiting_worker_takes_rings_no_bell(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    async with Rings(doorbell(queue)) as rings:
        for body in "abc":
            # One request that stays open: between two, a message waits.
            pulling = asyncio.create_task(_pull_one(connection, name))
            await eventually(lambda: _has_open_requests(connection, name, 2))
            await publish_jobs(connection, queue, body)
            await (await pulling).ack_sync()
        assert rings.payloads == []


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_an_idle_bell_asks_about_once_in_half_its_time_limit(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    requests: list[str] = []

    async def note(message: Msg) -> None:
        requests.append(message.subject)

    await connection.client.subscribe(f"$JS.API.CONSUMER.*.{name}.{CONSUMER}", cb=note)
    await connection.client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", cb=note)
    async with Rings(doorbell(queue)):
        await eventually(lambda: len(requests) >= 4)
        began, before = time.monotonic(), len(requests)
        await eventually(lambda: len(requests) >= before + 6)
        # A pair of requests, the second open for a second: half of the time limit of the connection.
        assert time.monotonic() - began >= 1.9


async def _pull_one(connection: NatsPyConnection, stream: str) -> Msg:
    (message,) = [message async for message in pull(connection.client, stream, CONSUMER, batch=1, expires=20)]
    return message


async def _has_open_requests(connection: NatsPyConnection, stream: str, count: int) -> bool:
    return bool((await consumer_info(connection, stream, CONSUMER))["num_waiting"] >= count)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that triggers log, and short pauses between their tries."""
    logged: list[str] = []
    log = SimpleNamespace(info=_log(logged), warning=_log(logged), error=_log(logged))
    monkeypatch.setattr(JetStreamMessageTrigger, "log", log)
    monkeypatch.setattr(seams.MESSAGE_DOORBELL_PAUSES, (0.02, 0.1))
    return logged


def _log(lines: list[str]) -> Callable[..., None]:
    return lambda text, *values: lines.append(text % values)


@pytest.mark.slow
async def test_while_the_server_is_away_it_logs_once_and_then_goes_on(
    own_nats: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    connect_airflow_to(own_nats, monkeypatch)
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name)
        tries = _count_tries(monkeypatch)
        async with Rings(doorbell(queue)) as rings:
            await eventually(lambda: tries)
            failures = _count_failures(monkeypatch)
            own_nats.kill()
            await eventually(lambda: len(failures) >= 4, within=60)
            assert len(lines) == 1
            await asyncio.to_thread(own_nats.start)
            await eventually(lambda: connection.is_connected)
            await publish_jobs(connection, queue, "a")
            await eventually(lambda: rings.payloads, within=60)
    assert len(lines) == 2
    assert "can't be seen, trying again: JS" in lines[0]
    assert lines[1].endswith("can be seen again")


@pytest.mark.slow
@pytest.mark.usefixtures("nats_connection")
async def test_a_consumer_that_is_gone_is_logged_once_and_its_successor_rings(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    queue = await make_queue(connection, name)
    tries = _count_tries(monkeypatch)
    async with Rings(doorbell(queue)) as rings:
        await eventually(lambda: tries)
        await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
        await eventually(lambda: len(tries) >= 20)
        (line,) = lines
        assert f"consumer {CONSUMER} of stream {name}" in line
        await provision(connection, queue)
        await publish_jobs(connection, queue, "a")
        await eventually(lambda: rings.payloads)


@pytest.mark.slow
async def test_a_connection_that_airflow_does_not_know_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    trigger = JetStreamMessageTrigger(work_queue=small_queue("orders"), consumer=CONSUMER, nats_conn_id="nowhere")
    failures = _count_failures(monkeypatch)
    async with Rings(trigger):
        await eventually(lambda: len(failures) >= 5)
    (line,) = lines
    assert "nowhere" in line


@pytest.mark.since_server("2.11.0", "priority groups")
@pytest.mark.usefixtures("nats_connection")
async def test_a_consumer_with_a_pinned_client_is_not_asked(
    connection: NatsPyConnection, name: str, lines: list[str]
) -> None:
    pinned = {"priority_policy": "pinned_client", "priority_groups": ["all"], "ack_wait": "30s"}
    queue = await make_queue(connection, name, consumer=pinned)
    async with Rings(doorbell(queue)):
        await eventually(lambda: lines)
    assert "has the priority policy pinned_client" in lines[0]
    assert (await consumer_info(connection, name, CONSUMER))["num_waiting"] == 0


async def test_a_permission_that_is_withdrawn_is_logged_once_with_the_subject(
    name: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    def users(policy: str) -> str:
        return (
            "authorization { users: [{user: admin, password: p}, {user: bell, password: p, permissions: "
            f"{policy}}}] }}"
        )

    with NatsServer(config=users("{}")) as server:
        connect_airflow_to(server, monkeypatch, login="bell", password="p")
        settings = connection_settings({"servers": (server.url,), "user": "admin", "password": "p", "timeout": 5})
        async with connect(settings) as connection:
            queue = await make_queue(connection, name)
            tries = _count_tries(monkeypatch)
            async with Rings(doorbell(queue)) as rings:
                await eventually(lambda: tries)
                server.config = users('{publish: {deny: ["$JS.API.CONSUMER.MSG.NEXT.>"]}}')
                server.reload()
                await eventually(lambda: any("JS106" in line for line in lines))
                seen = len(tries)
                await eventually(lambda: len(tries) >= seen + 10)
                denied = [line for line in lines if "JS106" in line]
                assert len(denied) == 1
                assert f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}" in denied[0]
                assert len(lines) <= 3
                server.config = users("{}")
                server.reload()
                await publish_jobs(connection, queue, "a")
                await eventually(lambda: rings.payloads)


@pytest.mark.slow
async def test_the_role_of_a_worker_is_enough_for_bell_and_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = small_queue(name)
    policy = permissions(queue, "worker")
    config = re.sub(r"password: \S+", 'password: "p"', authorization(policy))
    config = config.replace("users: [", 'users: [\n    { user: "admin", password: "p" }', 1)
    # Its own requests need a user, too.
    with NatsServer(config=config, user="admin", password="p") as server:
        settings = connection_settings({"servers": (server.url,), "user": "admin", "password": "p", "timeout": 5})
        extra = {"timeout": 2, "inbox_prefix": policy.inbox_prefix}
        connect_airflow_to(server, monkeypatch, login=policy.user, password="p", extra=extra)
        async with connect(settings) as connection:
            await provision(connection, queue)
            await publish_jobs(connection, queue, "ab")
            async with Rings(doorbell(queue)) as rings:
                await eventually(lambda: rings.payloads)
            operator = JetStreamConsumeOperator(
                task_id="t", work_queue=queue, consumer=CONSUMER, handler=_give_up_one, deferrable=False
            )
            instance = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1)
            context: Any = {"ti": instance}
            result = await asyncio.to_thread(operator.execute, context)
    assert result["counts"] == {"completed": 1, "given_up": 1}


def _give_up_one(job: Delivery) -> None:
    if job.body == b"b":
        raise GiveUpError("no")


def _count_tries(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times of the trigger's looks at its consumer, failed ones too."""
    tries: list[float] = []
    original = seams.current(seams.MESSAGE_DOORBELL_WAIT_FOR_MESSAGES)

    async def counted(*arguments: Any) -> Any:
        tries.append(time.monotonic())
        return await original(*arguments)

    monkeypatch.setattr(seams.MESSAGE_DOORBELL_WAIT_FOR_MESSAGES, counted)
    return tries


def _count_failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    failures: list[str] = []
    original = seams.current(seams.MESSAGE_DOORBELL_PROBLEMS).note

    def counted(problems: Any, error: Any) -> Any:
        failures.append(str(error))
        return original(problems, error)

    monkeypatch.setattr(f"{seams.MESSAGE_DOORBELL_PROBLEMS}.note", counted)
    return failures


def test_the_pauses_after_failures_grow_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams.MESSAGE_DOORBELL_JITTER, 0.0)
    logged: list[str] = []
    problems = seams.current(seams.MESSAGE_DOORBELL_PROBLEMS)(
        "q/c", SimpleNamespace(warning=_log(logged), info=_log(logged))
    )
    assert [problems.note(UnreachableError("away")) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert len(logged) == 1


def test_arguments_of_the_other_mode_are_refused() -> None:
    queue = small_queue("orders")
    with pytest.raises(ArgumentError, match="expected none of longest_wait in the mode doorbell"):
        JetStreamMessageTrigger(work_queue=queue, consumer=CONSUMER, longest_wait=3)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="expected doorbell or payload as mode, found 'push'"):
        JetStreamMessageTrigger(work_queue=queue, consumer=CONSUMER, mode="push")  # type: ignore[call-overload]
    with pytest.raises(QueueDeclarationError, match="expected one of its consumers"):
        JetStreamMessageTrigger(work_queue=queue, consumer="other")


def test_airflows_own_trigger_makes_one_of_the_scheme() -> None:
    from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger

    queue = small_queue("orders")
    trigger = MessageQueueTrigger(scheme="jetstream", work_queue=queue, consumer=CONSUMER, interval=7)
    path, kwargs = trigger.serialize()
    assert path == "airflow_provider_jetstream.triggers.message.JetStreamMessageTrigger"
    assert kwargs == JetStreamMessageTrigger(work_queue=queue, consumer=CONSUMER, interval=7).serialize()[1]
