"""A companion belongs to one queue: another queue that declares it is refused, and nothing is taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    plan,
    provision,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from airflow_provider_jetstream.jetstream.errors import DriftError
from testbed.queues import make_dead_letters, make_queue, small_queue, stored_count

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_KINDS = ("dead_letters", "events", "archive", "audit")


async def _configs(connection: NatsPyConnection) -> dict[str, Any]:
    """Return the configurations of all streams, of which the server lists 256 at a time."""
    found: dict[str, Any] = {}
    while True:
        listed = await connection.api("STREAM.LIST", {"offset": len(found)})
        found |= {info["config"]["name"]: info["config"] for info in listed["streams"]}
        if not listed["streams"] or len(found) >= listed["total"]:
            return found


async def _refused(connection: NatsPyConnection, queue: WorkQueue, *named: str) -> None:
    """Check that a plan and provisioning are refused with some texts, and that nothing was changed."""
    before = await _configs(connection)
    blocked = "\n".join(map(str, (await plan(connection, queue)).blocked))
    with pytest.raises(DriftError) as caught:
        await provision(connection, queue)
    for text in named:
        assert text in blocked
        assert text in str(caught.value)
    assert await _configs(connection) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
async def test_a_second_queue_that_names_a_companion_of_the_first_is_refused(
    connection: NatsPyConnection, name: str, kind: str
) -> None:
    first = await make_queue(connection, name, archive=f"{name}-archive", audit=f"{name}-audit")
    second = small_queue(f"{name}2", **{kind: getattr(first, kind).name})
    await _refused(connection, second, f"belongs to work queue {name} (", f"name another stream for {name}2")
    await make_dead_letters(connection, first, ["a"])
    assert len((await find_dead_letters(connection, first)).letters) == 1
    # What the first one is without it stays as it is.
    assert (await plan(connection, first)).changes == ()


async def test_a_companion_of_another_kind_is_refused_too(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    await _refused(connection, small_queue(f"{name}2", events=f"{name}-dead"), f"belongs to work queue {name} (")


async def test_a_work_queue_may_not_become_another_ones_companion(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    letters = {"name": name, "retention": "workqueue"}
    await _refused(connection, small_queue(f"{name}2", dead_letters=letters), f"belongs to work queue {name} (")


async def test_a_dead_letter_queue_may_not_become_a_work_queue(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name, dead_letters={"name": f"{name}-dead", "retention": "workqueue"})
    queue = WorkQueue(name=f"{name}-dead", subjects=[f"{name}2.>"], consumers=[{"name": "w", "max_deliver": 1}])
    await _refused(connection, queue, f"belongs to work queue {name} (")


async def test_an_unrelated_stream_may_not_become_a_companion(connection: NatsPyConnection, name: str) -> None:
    await connection.api(f"STREAM.CREATE.{name}-metrics", {"name": f"{name}-metrics", "subjects": [f"{name}m.>"]})
    await _refused(connection, small_queue(name, events=f"{name}-metrics"), f"it captures {name}m.>")


async def test_a_queue_under_a_new_name_gets_companions_of_its_own(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name)
    await connection.api(f"STREAM.DELETE.{name}")
    renamed = small_queue(f"{name}2", subjects=[f"{name}.jobs.>"], dead_letters=f"{name}-dead")
    await _refused(connection, renamed, f"If {name}2 is {name} under a new name", "remove both by hand")


async def test_a_queue_that_is_declared_again_keeps_its_companions(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    entries = await stored_count(connection, f"{name}-dead")
    await connection.api(f"STREAM.DELETE.{name}")
    done = await provision(connection, queue)
    assert [step.name for step in done.changes] == [name, f"{name}/worker"]
    assert await stored_count(connection, f"{name}-dead") == entries


async def test_its_companions_subjects_can_be_changed(connection: NatsPyConnection, name: str) -> None:
    await make_queue(connection, name, advisory_subjects=[f"{name}.done.>", f"completed.{name}2"])
    await make_queue(connection, name, advisory_subjects=[f"{name}.ended.>"])
    subjects = (await _configs(connection))[f"{name}-events"]["subjects"]
    assert [subject for subject in subjects if "ended" in subject or "done" in subject] == [f"{name}.ended.>"]


async def test_a_dead_letter_queue_that_was_made_by_hand_is_adopted(connection: NatsPyConnection, name: str) -> None:
    config = {
        "name": f"{name}_dlq",
        "subjects": [f"{MAX_DELIVERIES}.{name}.*"],
        "metadata": {"dead_letter_queue": "true"},
    }
    await connection.api(f"STREAM.CREATE.{name}_dlq", config)
    queue = await make_queue(connection, name, dead_letters=f"{name}_dlq", dead=["a"])
    assert len((await find_dead_letters(connection, queue)).letters) == 1


async def test_one_that_another_tool_made_for_two_queues_is_shared_and_neither_takes_it(
    connection: NatsPyConnection, name: str
) -> None:
    subjects = [f"{kind}.{queue}.*" for kind in (MAX_DELIVERIES, TERMINATED) for queue in (name, f"{name}2")]
    await connection.api(f"STREAM.CREATE.{name}-dlq", {"name": f"{name}-dlq", "subjects": subjects})
    for queue in (name, f"{name}2"):
        stream = {"name": queue, "subjects": [f"{queue}.>"], "retention": "workqueue"}
        await connection.api(f"STREAM.CREATE.{queue}", stream)
        assert (await plan(connection, await discover_queue(connection, queue))).changes == ()
    shared = {"name": f"{name}-dlq", "subjects": [*subjects, f"dead.{name}.>"]}
    first = small_queue(name, subjects=[f"{name}.>"], dead_letters=shared)
    await provision(connection, first)
    second = small_queue(f"{name}2", subjects=[f"{name}2.>"], dead_letters=f"{name}-dlq")
    await _refused(connection, second, f"belongs to work queue {name} (")


async def test_one_that_captures_the_advisories_of_every_queue_is_kept_or_refused(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 10})) as connection:
        every = {"name": f"{name}-dlq", "subjects": [f"{MAX_DELIVERIES}.>", "dead.>"]}
        await connection.api(f"STREAM.CREATE.{name}-dlq", every)
        await _refused(
            connection, small_queue(name, dead_letters=f"{name}-dlq"), f"it captures {MAX_DELIVERIES}.>, dead"
        )
        queue = small_queue(name, dead_letters=every)
        await provision(connection, queue)
        await make_dead_letters(connection, queue, ["a"])
        assert len((await find_dead_letters(connection, queue)).letters) == 1
