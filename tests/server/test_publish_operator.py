"""The publishing operator without an Airflow around it: idempotency keys, rates and kills."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Job, JobsHandle, Origin
from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.face import last_message
from testbed.queues import make_queue, pull_jobs, store_completion, stored_count, until_stored

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import PublishReport, WaitReport, WorkQueue
    from testbed.face import NatsPyConnection


def operator_of(queue: WorkQueue, **arguments: Any) -> JetStreamPublishOperator:
    return JetStreamPublishOperator(
        task_id="t", work_queue=queue, subject=f"{queue.name}.jobs.x", jobs=[], deferrable=False, **arguments
    )


async def execute(
    operator: JetStreamPublishOperator,
    connection: NatsPyConnection,
    queue: WorkQueue,
    jobs: list[Any],
    *,
    run_id: str = "run",
    key: str | None = None,
) -> tuple[PublishReport, WaitReport | None]:
    origin = Origin("dag", run_id, "t", idempotency_key=key, max_tries=0)
    report, ends = await operator._publish(connection, queue, jobs, origin)  # noqa: SLF001
    assert not isinstance(ends, JobsHandle)
    return report, ends


async def test_another_run_with_the_key_waits_for_the_jobs_of_the_first(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="100ms")
    operator = operator_of(queue, wait_for_completion=True)
    jobs = [Job(b"", id="a"), Job(b"", id="b")]
    first = asyncio.create_task(execute(operator, connection, queue, jobs, run_id="monday", key="k"))
    for message in await pull_jobs(connection, queue, 2):
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()
    report, ends = await first
    assert ends is not None
    assert (report.duplicates, len(ends.completed)) == (0, 2)
    await asyncio.sleep(0.2)
    again, ended = await execute(operator, connection, queue, jobs, run_id="tuesday", key="k")
    assert ended is not None
    assert (again.duplicates, list(again.sequences), len(ended.completed)) == (2, [1, 2], 2)
    # Each run is known by its own name, so that the page and its permissions find it.
    for run_id in ("monday", "tuesday"):
        key = Origin("dag", run_id, "t").key
        record = await last_message(connection, f"{name}-events", f"published.{name}.{key}")
        assert record is not None
        assert json.loads(record.data)["run_id"] == run_id


async def test_a_run_that_waits_finds_ends_of_jobs_for_which_the_first_did_not_wait(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await execute(operator_of(queue), connection, queue, [Job(b"", id="a")], run_id="monday", key="k")
    (message,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, 1)
    await message.ack_sync()
    waiting = operator_of(queue, wait_for_completion=True)
    report, ends = await execute(waiting, connection, queue, [Job(b"", id="a")], run_id="tuesday", key="k")
    assert ends is not None
    assert (report.duplicates, len(ends.completed)) == (1, 1)


async def test_without_events_a_key_holds_for_the_duplicate_window_and_the_task_says_so(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, events=None)
    operator, warnings = operator_of(queue, idempotency_key="k"), list[str]()
    monkeypatch.setattr(operator.log, "warning", lambda text, *values: warnings.append(text % values))
    for run_id, duplicates in (("monday", 0), ("tuesday", 1)):
        report, _ = await execute(operator, connection, queue, [Job(b"", id="a")], run_id=run_id, key="k")
        assert report.duplicates == duplicates
    assert [text for text in warnings if "so the idempotency_key holds only for its duplicate_window of 2m" in text]
    headers = [dict(message.headers) for message in await stream_messages(connection, name)]
    assert headers[0]["Airflow-Run-Id"] == "monday"


@pytest.mark.parametrize("ended_by_a_person", [True, False])
async def test_a_task_that_is_killed_while_it_publishes_sends_no_more_and_cancels_what_it_sent(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, *, ended_by_a_person: bool
) -> None:
    async def has_ended(_: object) -> bool:
        return ended_by_a_person

    monkeypatch.setattr(seams.JOB_WAITING_GET_CURRENT_CONTEXT, lambda: {"ti": None})
    monkeypatch.setattr(seams.JOB_WAITING_HAS_ENDED, has_ended)
    queue = await make_queue(connection, name)
    operator = operator_of(queue, rate=0.01, wait_for_completion=True, cancel_on_kill=True)
    jobs = [Job(b"", id=f"job-{number}") for number in range(5)]
    publishing = asyncio.create_task(execute(operator, connection, queue, jobs))
    await until_stored(connection, name, 1)
    operator.on_kill()
    with pytest.raises(TransientError, match="was ended while it published: 1 jobs are stored"):
        await asyncio.wait_for(publishing, 10)
    assert await stored_count(connection, name) == 1
    cancelled = [
        message.subject for message in await stream_messages(connection, f"{name}-events", f"cancelled.{name}.>")
    ]
    assert cancelled == [f"cancelled.{name}.1"] * ended_by_a_person
    # A task that was cleared publishes the rest.
    report, _ = await execute(operator_of(queue), connection, queue, jobs)
    assert (list(report.sequences), report.duplicates) == ([1, 2, 3, 4, 5], 1)


async def test_a_retry_of_a_task_whose_queue_stayed_full_publishes_the_rest(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=2, duplicate_window="100ms")
    operator = operator_of(queue, room_timeout=0.2)
    with pytest.raises(TransientError, match="2 of 4 jobs are stored"):
        await execute(operator, connection, queue, list("abcd"))
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()
    report, _ = await execute(operator, connection, queue, list("abcd"))
    assert (list(report.sequences), report.duplicates) == ([1, 2, 3, 4], 2)
