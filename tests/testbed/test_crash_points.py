"""Runs that are killed at their n-th call: every call is covered, and the calls before it were made."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from airflow_provider_jetstream.jetstream import get_message
from testbed.crash_points import call_kind, changes_state, crash_at_every_call
from testbed.face import stream_info
from testbed.queues import make_queue, publish_jobs, pull_jobs, small_queue, store_completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SIGKILL_STATUS = -signal.SIGKILL


async def work(connection: NatsPyConnection, queue: WorkQueue, *, body: str) -> None:
    """Read, and change state with each kind of call."""
    await stream_info(connection, queue.name)
    first, second = await publish_jobs(connection, queue, [body, "deleted"])
    await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": second})
    await get_message(connection, queue.name, first)
    (message,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, first)
    await message.ack_sync()
    # In nats-py's old style of requests.
    request = f"$JS.API.CONSUMER.MSG.NEXT.{queue.name}.worker"
    await connection.client.request(request, b'{"batch": 1, "no_wait": true}', old_style=True, timeout=5)


WORK = [
    "$JS.API.STREAM.INFO",
    "publish jobs",
    "publish jobs",
    "$JS.API.STREAM.MSG.DELETE",
    "$JS.API.STREAM.MSG.GET",
    "$JS.API.CONSUMER.MSG.NEXT",
    "publish completed.<queue>.worker.*",
    "$JS.ACK",
    "$JS.API.CONSUMER.MSG.NEXT",
]


async def fail(_connection: NatsPyConnection, _queue: WorkQueue) -> None:
    raise KeyError("mine")


def children() -> list[str]:
    running = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return [line for child in running if "testbed.crash_points" in (line := " ".join(child.cmdline()))]


@pytest.fixture
def prepare(connection: NatsPyConnection, name: str) -> Callable[[int], Awaitable[WorkQueue]]:
    """Return a function that creates the queue of a run."""

    def create_queue(call: int) -> Awaitable[WorkQueue]:
        # A job whose only delivery outlasts the ack wait stays in the queue.
        return make_queue(connection, f"{name}-{call}", consumer={"ack_wait": "60s"})

    return create_queue


@pytest.mark.slow
async def test_each_run_is_killed_in_place_of_its_own_call(
    nats: NatsServer, connection: NatsPyConnection, prepare: Callable[[int], Awaitable[WorkQueue]], tmp_path: Path
) -> None:
    report = await crash_at_every_call((nats.url,), f"{__name__}:work", prepare, logs=tmp_path, options={"body": "x"})
    assert report.killed_calls == WORK
    assert report.statuses == [SIGKILL_STATUS] * len(WORK) + [0]
    assert [run.call for run in report.runs] == list(range(1, len(WORK) + 2))
    assert report.runs[2].subject == f"{report.queues[2].name}.jobs.plain"
    lines = report.table().splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [*WORK, "nothing: it finished"]
    assert children() == []


@pytest.mark.slow
async def test_a_run_that_fails_by_itself_raises_its_error(
    nats: NatsServer, prepare: Callable[[int], Awaitable[WorkQueue]], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)a run ended with 1 by itself:.*KeyError: 'mine'"):
        await crash_at_every_call((nats.url,), f"{__name__}:fail", prepare, logs=tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)the forking process ended with 1:.*has no attribute 'absent'"):
        await crash_at_every_call((nats.url,), f"{__name__}:absent", prepare, logs=tmp_path)


@pytest.mark.parametrize(
    ("subject", "kind", "change"),
    [
        ("$JS.API.INFO", "$JS.API.INFO", False),
        ("$JS.API.STREAM.NAMES", "$JS.API.STREAM.NAMES", False),
        ("$JS.API.DIRECT.GET.INFO.a.b", "$JS.API.DIRECT.GET", False),
        ("$JS.API.STREAM.MSG.GET.CREATE", "$JS.API.STREAM.MSG.GET", False),
        ("$JS.API.CONSUMER.CREATE.q.w.q.jobs.>", "$JS.API.CONSUMER.CREATE", True),
        ("$JS.API.CONSUMER.DURABLE.CREATE.q.w", "$JS.API.CONSUMER.DURABLE.CREATE", True),
        ("$JS.API.CONSUMER.PAUSE.INFO.NAMES", "$JS.API.CONSUMER.PAUSE", True),
        ("$JS.API.CONSUMER.RESET.q.w", "$JS.API.CONSUMER.RESET", True),
        ("$JS.API.SOMETHING.NEW", "$JS.API.SOMETHING.NEW", True),
        ("$JS.ACK.q.w.1.7.1.0.0", "$JS.ACK", True),
        ("q.jobs.plain", "publish jobs", True),
        ("requeued.q.17", "publish requeued.<queue>.*", True),
    ],
)
def test_call_kinds_and_changes(subject: str, kind: str, *, change: bool) -> None:
    assert call_kind(subject, small_queue("q")) == kind
    assert changes_state(subject) is change
