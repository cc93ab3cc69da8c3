"""What a user isn't allowed to do: the request, the publication or the pull fails at once, and names the subject."""

from __future__ import annotations

import asyncio
import gc
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import nats
import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    PublishError,
    connect,
    connection_settings,
    publish,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError, TransientError
from airflow_provider_jetstream.worker import Worker
from testbed.face import PreparedJobs, publish_prepared, stream_info
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, make_queue, pull_jobs, stored_count
from testbed.spark_face import BlockingConnection, NatsSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

NAME = "orders"
# Nothing here may wait for it, which is longer than a test may take: a denial comes with the server's report.
LIMIT = 300.0
USERS = {
    "all": "{}",
    "no_info": '{publish: {deny: ["$JS.API.STREAM.INFO.>"]}}',
    "no_inbox": '{subscribe: "elsewhere.>"}',
    "one_subject": f'{{publish: {{deny: ["{NAME}.jobs.b"]}}}}',
    "no_pull": '{publish: {deny: ["$JS.API.CONSUMER.MSG.NEXT.>"]}}',
    "no_completion": f'{{publish: {{deny: ["completed.{NAME}.>"]}}}}',
    "no_ack": '{publish: {deny: ["$JS.ACK.>"]}}',
    "no_consumer": '{publish: {deny: ["$JS.API.CONSUMER.CREATE.>"]}}',
    "own_inbox": '{subscribe: "_INBOX_orders.>"}',
}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    users = ", ".join(f"{{user: {name}, password: p, permissions: {policy}}}" for name, policy in USERS.items())
    with NatsServer(config=f"authorization {{ users: [{users}] }}") as running:
        yield running


def values_of(server: NatsServer, user: str, **values: Any) -> dict[str, Any]:
    return {"servers": (server.url,), "user": user, "password": "p", "timeout": LIMIT, **values}


@asynccontextmanager
async def connected(server: NatsServer, user: str, **values: Any) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings(values_of(server, user, **values))) as connection:
        yield connection


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """The connection of a user who may do everything."""
    async with connected(server, "all") as opened:
        yield opened


@pytest.fixture
async def queue(connection: NatsPyConnection) -> AsyncIterator[WorkQueue]:
    yield await make_queue(connection, NAME, consumer={"ack_wait": "30s", "max_deliver": 3})
    for stream in (NAME, f"{NAME}-dead", f"{NAME}-events", f"{NAME}-audit"):
        await connection.client.request(f"$JS.API.STREAM.DELETE.{stream}", timeout=LIMIT)


@contextmanager
def denied(action: str, subject: str) -> Iterator[pytest.ExceptionInfo[PermissionDeniedError]]:
    with pytest.raises(PermissionDeniedError) as caught:
        yield caught
    assert caught.value.action == action
    assert caught.value.subject.startswith(subject), caught.value
    assert subject in str(caught.value)
    assert caught.value.code == "JS106"


async def test_a_denied_request_fails_at_once_and_others_go_on(server: NatsServer, queue: WorkQueue) -> None:
    async with connected(server, "no_info") as user:
        names = asyncio.create_task(user.api("STREAM.NAMES"))
        with denied("publish", f"$JS.API.STREAM.INFO.{NAME}") as caught:
            await stream_info(user, queue.name)
        assert caught.value.user == "user 'no_info'"
        assert NAME in (await names)["streams"]
        with denied("publish", f"$JS.API.STREAM.INFO.{NAME}"):
            await user.ask(f"$JS.API.STREAM.INFO.{NAME}")
        assert user.reconnects == 0


async def test_an_inbox_that_is_denied_fails_the_first_request(server: NatsServer) -> None:
    with denied("subscribe", "_INBOX."):
        async with connected(server, "no_inbox"):
            pass


@pytest.mark.parametrize("user", ["no_info", "no_inbox"])
def test_a_blocking_connection_names_what_is_denied(server: NatsServer, user: str) -> None:
    settings = connection_settings(values_of(server, user))
    with ExitStack() as stack:
        action, subject = ("publish", "$JS.API.STREAM.INFO.x") if user == "no_info" else ("subscribe", "_INBOX.")
        stack.enter_context(denied(action, subject))
        socket = NatsSocket(settings)
        stack.callback(socket.close)
        blocking = BlockingConnection(socket)
        # Other requests go on.
        with denied(action, subject):
            blocking.run(blocking.api("STREAM.INFO.x"))
        assert "streams" in blocking.run(blocking.api("STREAM.NAMES"))
        blocking.run(blocking.api("STREAM.INFO.x"))


async def test_jobs_on_a_denied_subject_fail_and_the_others_are_stored(server: NatsServer, queue: WorkQueue) -> None:
    jobs = [Job(b"", subject=f"{NAME}.jobs.{'ab'[number % 2]}") for number in range(6)]
    async with connected(server, "one_subject") as user:
        with pytest.raises(PublishError) as caught:
            await publish(user, queue, jobs)
        failures = caught.value.report.failures
        assert [failure.index for failure in failures] == [1, 3, 5]
        assert {type(failure.error) for failure in failures} == {PermissionDeniedError}
        assert await stored_count(user, NAME) == 3


@pytest.mark.parametrize(
    ("denied", "ack_timeout"), [("publish: {deny: ['lost.*']}", 0.5), ("subscribe: {deny: ['_INBOX.>']}", 20.0)]
)
async def test_a_job_that_had_no_answer_when_something_was_denied_may_be_stored(
    denied: str, ack_timeout: float
) -> None:
    def config(permissions: str) -> str:
        return (
            "authorization { users: [{user: all, password: p},"
            f" {{user: publisher, password: p, permissions: {{{permissions}}}}}] }}"
        )

    with NatsServer(config=config("publish: '>'")) as own:
        async with connected(own, "all") as other, connected(own, "publisher") as user:

            async def stay_silent(_: Msg) -> None:
                if own.config != config(denied):
                    own.config = config(denied)
                    own.reload()

            await other.client.subscribe("lost.*", cb=stay_silent)
            await other.client.flush()
            jobs = PreparedJobs(["a"], subject="lost.a", origin=None, batch="b")
            report = await publish_prepared(user, jobs, ack_timeout=ack_timeout, attempts=20)
    (failure,) = report.failures
    assert isinstance(failure.error, PermissionDeniedError)
    assert not failure.certain


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("no_pull", f"$JS.API.CONSUMER.MSG.NEXT.{NAME}.{CONSUMER}"),
        ("no_completion", f"completed.{NAME}."),
        ("no_ack", f"$JS.ACK.{NAME}."),
    ],
)
async def test_a_worker_ends_with_the_permission_that_it_lacks(
    server: NatsServer, connection: NatsPyConnection, queue: WorkQueue, user: str, subject: str
) -> None:
    await connection.publish_acknowledged(f"{NAME}.jobs.a", b"")
    worker = Worker(queue, CONSUMER, lambda _: None, connection_settings(values_of(server, user)), deadline=None)
    with denied("publish", subject):
        await worker.run()


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("no_consumer", f"$JS.API.CONSUMER.CREATE.{NAME}-"),
        ("no_pull", f"$JS.API.CONSUMER.MSG.NEXT.{NAME}-"),
    ],
)
async def test_a_wait_ends_with_the_permission_that_it_lacks(
    server: NatsServer, connection: NatsPyConnection, queue: WorkQueue, user: str, subject: str
) -> None:
    cursor = await take_cursor(connection, queue)
    await connection.publish_acknowledged(f"{NAME}.jobs.a", b"")
    async with connected(server, user) as waiting:
        with denied("publish", subject):
            await wait(waiting, cursor, [1])


async def test_answers_in_an_inbox_of_ones_own_are_seen_by_nobody_else(
    server: NatsServer, connection: NatsPyConnection, queue: WorkQueue
) -> None:
    seen: list[str] = []

    async def note(message: Msg) -> None:
        seen.append(message.subject)

    spy = await nats.connect(server.url, user="all", password="p")
    await spy.subscribe("_INBOX.>", cb=note)
    await spy.flush()
    values = values_of(server, "own_inbox", inbox_prefix="_INBOX_orders")
    async with connected(server, "own_inbox", inbox_prefix="_INBOX_orders") as user:
        await publish(user, queue, [b"job"], subject=f"{NAME}.jobs.a")
        # As nats-py's own pull subscription does.
        (message,) = await pull_jobs(user, queue, 1)
        await message.ack_sync()

    def read() -> Any:
        socket = NatsSocket(connection_settings(values))
        try:
            blocking = BlockingConnection(socket)
            return blocking.run(blocking.api("STREAM.NAMES"))
        finally:
            socket.close()

    assert NAME in (await asyncio.to_thread(read))["streams"]
    await spy.flush()
    assert seen == []
    await spy.close()
    with denied("subscribe", "_INBOX."):
        async with connected(server, "own_inbox"):
            pass


async def test_no_report_of_the_server_closes_the_connection_for_good(connection: NatsPyConnection) -> None:
    with pytest.raises(TransientError):
        await connection.request("x" * 5_000, time_limit=5)
    assert await connection.wait_until_connected(LIMIT)
    assert not connection.is_closed
    assert (await connection.api("INFO"))["api"]


@pytest.mark.parametrize("user", ["no_inbox", "own_inbox"])
async def test_a_denied_inbox_leaves_no_task_behind(server: NatsServer, user: str) -> None:
    """Neither asyncio's log nor the event loop has a task of the inbox."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    before = asyncio.all_tasks()
    for _ in range(3):
        with denied("subscribe", "_INBOX."):
            async with connected(server, user):
                pass
    gc.collect()
    assert reported == []
    await eventually(lambda: asyncio.all_tasks() <= before)
