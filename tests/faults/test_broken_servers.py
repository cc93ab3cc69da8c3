"""Whatever happens to the connection, before or during any public call: it ends soon, with an error of the tree."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from faulty_proxy import FAULTS, Fault, faulty_proxy
from pyspark.sql.types import LongType, StructField, StructType

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import (
    JetStreamProviderError,
    RedriveRequest,
    cancel,
    check_drained,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    get_message,
    inspect_queue,
    plan,
    preview,
    provision,
    publish,
    publish_with_handle,
    redrive_dead_letters,
    running_warnings,
    wait_by_handle,
)
from airflow_provider_jetstream.worker import Worker
from testbed.face import inspect_all_queues, summarise_dead_letters
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, make_queue, small_queue
from testbed.spark_face import JetStreamDataSource, run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from airflow_provider_jetstream.jetstream import Connection

NAME = "orders"
QUEUE = small_queue(NAME, archive=True)
SUBJECT = f"{NAME}.jobs.plain"
TIMEOUT = 1
# A call makes several requests one after the other, each with its own limit, and a publication that was cut off is
# tried again for 15 s; seen on a machine with nothing else to do: 16 s. Without limits they would take for ever.
MOST_SECONDS = 90.0
# As many calls at once as there are.
_THREADS = ThreadPoolExecutor(500)
# Chunks of the server before the fault: none, those of connecting, and some of the call's own requests.
AFTER = range(20) if os.environ.get("FAULTS") == "full" else (0, 3, 7)


async def publish_and_wait(connection: Connection) -> None:
    report = await publish_with_handle(connection, QUEUE, ["job"], subject=SUBJECT)
    await wait_by_handle(connection, report.handle, time_limit=TIMEOUT)


# Each gets an open connection.
OPERATIONS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "publish": lambda connection: publish(connection, QUEUE, map(str, range(50)), subject=SUBJECT),
    "wait": publish_and_wait,
    "find": lambda connection: find_dead_letters(connection, QUEUE),
    "summarise": lambda connection: summarise_dead_letters(connection, QUEUE),
    "redrive": lambda connection: redrive_dead_letters(connection, QUEUE, RedriveRequest()),
    "preview": lambda connection: preview(connection, QUEUE, RedriveRequest()),
    "plan": lambda connection: plan(connection, QUEUE),
    "provision": lambda connection: provision(connection, QUEUE),
    "cancel": lambda connection: cancel(connection, QUEUE, "a"),
    "check_drained": lambda connection: check_drained(connection, QUEUE, nothing_dead=True),
    "inspect_queue": lambda connection: inspect_queue(connection, NAME),
    "inspect_all_queues": inspect_all_queues,
    "running_warnings": lambda connection: running_warnings(connection, QUEUE),
    "discover_queue": lambda connection: discover_queue(connection, NAME),
    "get_message": lambda connection: get_message(connection, NAME, 1),
}


def on_the_loop(operation: Callable[[Any], Awaitable[object]]) -> Callable[[str], Awaitable[object]]:
    async def call(url: str) -> object:
        async with connect(connection_settings({"servers": (url,), "timeout": TIMEOUT})) as connection:
            return await operation(connection)

    return call


def in_a_thread(call: Callable[[str], object]) -> Callable[[str], Awaitable[object]]:
    return lambda url: asyncio.get_running_loop().run_in_executor(_THREADS, call, url)


def options_of(url: str) -> dict[str, str]:
    return {"servers": url, "stream": NAME, "timeout": str(TIMEOUT)}


def read_with_spark(url: str) -> object:
    # What the driver does, and then what its tasks do, without Spark between them.
    source = JetStreamDataSource(options_of(url))
    source.schema()
    reader = source.reader(StructType([StructField("seq", LongType())]))
    return [list(reader.read(partition)) for partition in reader.partitions()]


async def _find(connection: Any) -> object:
    return await find_dead_letters(connection, QUEUE)


async def run_a_worker(url: str) -> None:
    worker = Worker(
        QUEUE, "worker", lambda _: None, connection_settings({"servers": (url,), "timeout": TIMEOUT}), grace=1
    )
    asyncio.get_running_loop().call_later(3 * TIMEOUT, worker.stop)
    await worker.run()


def use_hook(method: Callable[[JetStreamHook], object]) -> Callable[[str], Awaitable[object]]:
    def call(url: str) -> object:
        connection_id = f"nats_{url.rpartition(':')[2]}"
        os.environ[f"AIRFLOW_CONN_{connection_id.upper()}"] = f"{url}?timeout={TIMEOUT}"
        try:
            return method(JetStreamHook(connection_id))
        finally:
            del os.environ[f"AIRFLOW_CONN_{connection_id.upper()}"]

    return in_a_thread(call)


def try_connection(hook: JetStreamHook) -> None:
    works, text = hook.test_connection()
    if not works:
        raise JetStreamProviderError(text)


CALLS: dict[str, Callable[[str], Awaitable[object]]] = {
    **{name: on_the_loop(operation) for name, operation in OPERATIONS.items()},
    "read with Spark": in_a_thread(read_with_spark),
    "find with Spark": in_a_thread(lambda url: run_on_own_connection(options_of(url), _find)),
    "run a worker": run_a_worker,
    "hook, publish": use_hook(lambda hook: hook.publish(["job"], queue=QUEUE, subject=SUBJECT)),
    "hook, find": use_hook(lambda hook: hook.find_dead_letters(QUEUE)),
    "hook, redrive": use_hook(lambda hook: hook.redrive(QUEUE, RedriveRequest())),
    "hook, provision": use_hook(lambda hook: hook.provision(QUEUE)),
    "hook, check_drained": use_hook(lambda hook: hook.check_drained(QUEUE)),
    "hook, cancel": use_hook(lambda hook: hook.cancel(QUEUE, "a")),
    "hook, test_connection": use_hook(try_connection),
}
# A worker that was connected goes on until it is stopped: the server may come back.
GOES_ON = {"run a worker"}


async def prepare(url: str) -> None:
    async with connect(connection_settings({"servers": (url,), "timeout": 30})) as connection:
        await make_queue(connection, NAME, archive=True)
        await make_dead_letters(connection, QUEUE, ["one", "two", "three"])


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        asyncio.run(prepare(running.url))
        yield running


async def outcome(
    port: int, name: str, fault: Fault | None, after: int, begin: Callable[[], object] = lambda: None
) -> str:
    """Call something while a fault begins, and return what is wrong with the outcome."""
    async with faulty_proxy(port, fault, after, begin) as proxy:
        problem = ""
        try:
            async with asyncio.timeout(MOST_SECONDS):
                await CALLS[name](proxy.url)
        except JetStreamProviderError as error:
            if len(str(error).encode()) > 4_000:
                problem = f"an error of {len(str(error))} characters"
        except TimeoutError:
            problem = "no end"
        except Exception as error:  # noqa: BLE001
            problem = repr(error)[:500]
        else:
            if after == 0 and fault and name not in GOES_ON:
                problem = "success without a server"
        return f"{name}, {fault or 'stopped'} after {after} chunks: {problem}" if problem else ""


async def test_a_call_ends_whatever_becomes_of_its_connection(server: NatsServer) -> None:
    outcomes = await asyncio.gather(
        calls_of_a_stopped_server(),
        *(outcome(server.port, name, fault, after) for fault in FAULTS for name in CALLS for after in AFTER),
    )
    assert "".join(f"{problem}\n" for problem in outcomes if problem) == ""


async def calls_of_a_stopped_server() -> str:
    """Call everything on a server whose process is stopped when half of the calls have come as far as they should."""
    with NatsServer() as stopped:
        pid = stopped.pid
        assert pid is not None
        await prepare(stopped.url)
        calls = [(name, after) for name in CALLS for after in AFTER if after]
        reached = 0

        def stop_in_the_middle() -> None:
            nonlocal reached
            reached += 1
            if reached == len(calls) // 2:
                os.kill(pid, signal.SIGSTOP)

        try:
            outcomes = await asyncio.gather(
                *(outcome(stopped.port, name, None, after, stop_in_the_middle) for name, after in calls)
            )
        finally:
            os.kill(pid, signal.SIGCONT)
        assert reached >= len(calls) // 2
        return "\n".join(problem for problem in outcomes if problem)
