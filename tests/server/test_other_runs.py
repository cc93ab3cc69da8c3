"""Another run of the same name: made again after it was deleted, or of another Airflow deployment with the same DAG."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import uuid6
from airflow.sdk.api.datamodels._generated import DagRun, DagRunState, DagRunType
from airflow.sdk.execution_time.context import set_current_context
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import DeadlineError, Job
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed.queues import make_queue, pull_jobs, stored_count

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

BEGAN = datetime(2026, 11, 27, 6, 0, tzinfo=UTC)
LATER = BEGAN + timedelta(minutes=7)
JOBS = [Job({"order": 1}), Job({"order": 2}, id="second")]


@pytest.fixture(autouse=True)
def _connection(settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"conn_type": "nats", "host": settings.servers[0], "extra": {"timeout": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(form))


@dataclass(frozen=True)
class Try:
    """A try of a task, as Airflow tells it; all of them have the same names."""

    started: datetime | None = BEGAN
    cleared: int = 0
    number: int = 1
    max_tries: int = 1
    map_index: int = -1
    version: str = "019ac000-0000-7000-8000-000000000001"

    def retried(self) -> Try:
        return replace(self, number=self.number + 1)

    def cleared_now(self, started: datetime | None = None) -> Try:
        number = self.number + 1
        return replace(self, started=started or self.started, cleared=self.cleared + 1, number=number, max_tries=number)

    def context(self) -> Context:
        names: dict[str, Any] = {"dag_id": "shop", "run_id": "scheduled__2026-11-27T00:00:00+00:00"}
        run = DagRun(
            **names,
            logical_date=BEGAN,
            data_interval_start=None,
            data_interval_end=None,
            run_after=BEGAN,
            start_date=self.started,
            end_date=None,
            clear_number=self.cleared,
            run_type=DagRunType.SCHEDULED,
            state=DagRunState.RUNNING,
            consumed_asset_events=[],
            partition_key=None,
        )
        instance = RuntimeTaskInstance.model_construct(
            **names,
            id=uuid6.uuid7(),
            task_id="orders",
            map_index=self.map_index,
            try_number=self.number,
            max_tries=self.max_tries,
            dag_version_id=self.version,
            start_date=datetime.now(UTC),
        )
        return cast("Context", {"ti": instance, "params": {}, "dag_run": run})


async def execute(queue: WorkQueue, of: Try, jobs: list[Any] | None = None, **arguments: Any) -> dict[str, Any]:
    operator = JetStreamPublishOperator(
        task_id="orders", work_queue=queue, subject=f"{queue.name}.jobs.x", jobs=jobs or JOBS, **arguments
    )
    result = await asyncio.to_thread(operator.execute, of.context())
    return cast("dict[str, Any]", result)


async def counts(queue: WorkQueue, of: Try, jobs: list[Any] | None = None, **arguments: Any) -> tuple[list[Any], int]:
    """Publish, and return the sequences of the task's jobs and how many of them were stored before."""
    result = await execute(queue, of, jobs, **arguments)
    assert "extra" not in result
    return result["sequences"], result["duplicates"]


async def do_all(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    for message in await pull_jobs(connection, queue, count):
        await message.ack_sync()


@pytest.mark.slow
@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("done", [True, False])
async def test_a_run_that_was_deleted_and_made_again_publishes_its_jobs(
    connection: NatsPyConnection, name: str, *, done: bool, events: bool
) -> None:
    fields: dict[str, Any] = {} if events else {"events": None}
    queue = await make_queue(connection, name, **fields)
    assert await counts(queue, Try()) == ([[1, 2]], 0)
    if done:
        await do_all(connection, queue, 2)
    assert await counts(queue, Try(started=LATER)) == ([[3, 4]], 0)
    assert await stored_count(connection, name) == (2 if done else 4)
    assert await counts(queue, Try(started=LATER).retried()) == ([[3, 4]], 2)


async def test_a_run_made_again_with_the_same_start_is_another_one_as_dag_test_makes_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    for number in range(3):
        first = 2 * number + 1
        assert await counts(queue, Try()) == ([[first, first + 1]], 0)
        assert await counts(queue, Try().retried()) == ([[first, first + 1]], 2)


@pytest.mark.slow
async def test_two_deployments_have_their_own_jobs_however_their_tries_alternate(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="100ms")
    tries = [Try(), Try(started=LATER, version="019ac000-0000-7000-8000-000000000002")]
    for number, of in enumerate(tries):
        assert await counts(queue, of) == ([[2 * number + 1, 2 * number + 2]], 0)
    for _ in range(2):
        await asyncio.sleep(0.15)
        tries = [of.retried() for of in tries]
        for number, of in enumerate(tries):
            assert await counts(queue, of) == ([[2 * number + 1, 2 * number + 2]], 2)
    assert await stored_count(connection, name) == 4


async def awaited(queue: WorkQueue, of: Try) -> str:
    """Publish, and return for which jobs the task waits until its time is over."""
    with pytest.raises(DeadlineError) as caught:
        await execute(queue, of, wait_for_completion=True, deferrable=False, wait_timeout=0.3)
    return str(caught.value).partition("(sequences ")[2].partition(")")[0]


@pytest.mark.slow
async def test_a_clear_while_jobs_run_waits_for_the_jobs_of_its_own_deployment(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    ours, theirs = Try(), Try(started=LATER, version="019ac000-0000-7000-8000-000000000002")
    assert [await awaited(queue, of) for of in (ours, theirs)] == ["1-2", "3-4"]
    cleared = [theirs.cleared_now(LATER + timedelta(hours=1)), ours.cleared_now(LATER + timedelta(hours=2))]
    assert [await awaited(queue, of) for of in cleared] == ["3-4", "1-2"]
    # A clear of a run that goes on leaves its start as it is.
    assert await awaited(queue, cleared[0].cleared_now().retried()) == "3-4"
    assert await stored_count(connection, name) == 4


async def test_a_clear_when_all_is_done_publishes_anew_and_its_retry_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    assert await counts(queue, Try()) == ([[1, 2]], 0)
    cleared = Try().cleared_now(LATER)
    assert await counts(queue, cleared) == ([[3, 4]], 0)
    assert await counts(queue, replace(cleared, number=3)) == ([[3, 4]], 2)
    # Made again after that, and cleared in its turn.
    again = Try(started=LATER + timedelta(hours=1))
    assert await counts(queue, again) == ([[5, 6]], 0)
    assert await counts(queue, again.cleared_now(LATER + timedelta(hours=2))) == ([[7, 8]], 0)


async def test_a_retry_after_a_full_queue_publishes_the_rest_although_another_run_came_between(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=3, duplicate_window="100ms")
    with pytest.raises(Exception, match="3 of 4 jobs are stored"):
        await execute(queue, Try(), list("abcd"))
    await do_all(connection, queue, 3)
    assert await counts(queue, Try(started=LATER), list("ab")) == ([[4, 5]], 0)
    await asyncio.sleep(0.15)
    assert await counts(queue, Try().retried(), list("dcba")) == ([[1, 3], [6, 6]], 3)


async def test_mapped_tasks_of_another_run_have_their_own_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    sequences = [
        (await counts(queue, Try(started=started, map_index=index), ["same"]))[0]
        for started in (BEGAN, LATER)
        for index in range(2)
    ]
    assert sequences == [[[1, 1]], [[2, 2]], [[3, 3]], [[4, 4]]]


@pytest.mark.parametrize("with_queue", [True, False])
async def test_calls_of_the_hook_in_another_run_publish_their_jobs(
    connection: NatsPyConnection, name: str, *, with_queue: bool
) -> None:
    queue = await make_queue(connection, name)
    given = queue if with_queue else None

    def calls(of: Try) -> list[tuple[list[int], int]]:
        with set_current_context(of.context()):
            reports = [JetStreamHook().publish(["a"], subject=f"{name}.jobs.x", queue=given) for _ in range(2)]
        return [(list(report.sequences), report.duplicates) for report in reports]

    assert await asyncio.to_thread(calls, Try()) == [([1], 0), ([2], 0)]
    assert await asyncio.to_thread(calls, Try(started=LATER)) == [([3], 0), ([4], 0)]
    assert await asyncio.to_thread(calls, Try().retried()) == [([1], 1), ([2], 1)]
    assert await asyncio.to_thread(calls, Try(started=LATER).retried()) == [([3], 1), ([4], 1)]
