"""The limits of an archive: those of its queue where it is new, its own where it existed before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, plan, provision, running_warnings
from testbed.face import stream_info
from testbed.queues import eventually, process_all, publish_jobs

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

_DAY = 86_400 * 1_000_000_000
_LIMITS = ("max_bytes", "max_msgs", "max_age")


def jobs_queue(name: str, **changes: Any) -> WorkQueue:
    """Declare the queue of the jobs document, with smaller limits."""
    values: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.jobs.>"],
        "discard": "new",
        "max_msgs": 20,
        "max_bytes": "1MB",
        "max_age": "7d",
        "consumers": [{"name": "worker", "max_deliver": 2, "ack_wait": "30s"}],
        "dead_letters": f"{name}-dead",
    }
    return WorkQueue(**values | changes)


async def limits_of(connection: NatsPyConnection, name: str) -> tuple[int, ...]:
    config = (await stream_info(connection, f"{name}-archive"))["config"]
    return tuple(config[field] for field in _LIMITS)


@pytest.mark.slow
async def test_done_jobs_leave_no_more_copies_than_the_queue_may_hold(connection: NatsPyConnection, name: str) -> None:
    queue = jobs_queue(name)
    await provision(connection, queue)
    assert await limits_of(connection, name) == (1 << 20, 20, 14 * _DAY)
    assert (await plan(connection, queue)).changes == ()
    for start in range(0, 100, 20):
        await publish_jobs(connection, queue, map(str, range(start, start + 20)))
        await process_all(connection, queue)

    async def copied() -> Any:
        state = (await stream_info(connection, f"{name}-archive"))["state"]
        return state if state["last_seq"] == 100 else None

    state = await eventually(copied)
    assert (state["messages"], state["first_seq"]) == (20, 81)
    assert state["bytes"] <= 1 << 20


async def test_an_existing_archive_keeps_the_limits_that_are_not_declared_for_it(
    connection: NatsPyConnection, name: str
) -> None:
    own = {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"], "max_age": 30 * _DAY}
    await connection.api(f"STREAM.CREATE.{name}-archive", own | {"duplicate_window": 100_000_000})
    await provision(connection, jobs_queue(name))
    assert await limits_of(connection, name) == (-1, -1, 30 * _DAY)
    await provision(connection, jobs_queue(name, archive={"max_bytes": "2MB"}))
    assert await limits_of(connection, name) == (2 << 20, -1, 30 * _DAY)
    await provision(connection, jobs_queue(name, archive={"max_bytes": "2MB", "max_age": "1d"}))
    assert await limits_of(connection, name) == (2 << 20, -1, _DAY)


async def test_an_archive_from_before_that_has_no_limit_of_size_is_warned_of(
    connection: NatsPyConnection, name: str
) -> None:
    await connection.api(
        f"STREAM.CREATE.{name}-archive", {"name": f"{name}-archive", "subjects": [f"archive.{name}.>"]}
    )
    queue = jobs_queue(name)
    await provision(connection, queue)
    assert "unbounded-archive" not in {warning.name for warning in queue.warnings()}
    unbounded = [
        warning for warning in await running_warnings(connection, queue) if warning.name == "unbounded-archive"
    ]
    assert [warning.split(" and holds")[0] for warning in unbounded] == [f"{name}-archive has no limit of size"]
