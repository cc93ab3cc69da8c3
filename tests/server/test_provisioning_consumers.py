from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Plan, WorkQueue, apply, plan, provision
from airflow_provider_jetstream.jetstream.errors import DriftError
from testbed.face import consumer_names
from testbed.queues import eventually, pull_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream import Connection
    from testbed.face import NatsPyConnection


def _consumer(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": "w", "filter_subject": f"{name}.a", "max_deliver": 3} | changes


def _other(name: str) -> dict[str, Any]:
    return _consumer(name) | {"name": "x", "filter_subject": f"{name}.b"}


def _alone(name: str, **changes: Any) -> WorkQueue:
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [_consumer(name)]} | changes)


async def _consumer_config(connection: Connection, stream: str, name: str) -> dict[str, Any]:
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
    return config


_FILTERS: dict[str, Mapping[str, Any]] = {
    "one": {"filter_subject": "{}.a"},
    "another": {"filter_subject": "{}.b"},
    "a list": {"filter_subjects": ["{}.a", "{}.c"]},
    "none": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("after", _FILTERS)
@pytest.mark.parametrize("before", _FILTERS)
async def test_a_filter_is_changed_into_any_other_kind(
    connection: Connection, name: str, before: str, after: str
) -> None:
    def queue(kind: str) -> WorkQueue:
        filters = {
            field: [one.format(name) for one in value] if isinstance(value, list) else value.format(name)
            for field, value in _FILTERS[kind].items()
        }
        return _alone(name, consumers=[{"name": "w", "max_deliver": 3, **filters}])

    await provision(connection, queue(before))
    done = await provision(connection, queue(after))
    assert bool(done.changes) == (before != after)
    stored = await _consumer_config(connection, name, "w")
    expected = queue(after).consumer("w").config()
    for field in ("filter_subject", "filter_subjects"):
        assert stored.get(field) == expected.get(field)
    assert (await plan(connection, queue(after))).changes == ()


async def test_a_filter_written_as_a_list_of_one_is_the_same_filter(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[]))
    config = _alone(name).consumer("w").config()
    config["filter_subjects"] = [config.pop("filter_subject")]
    await connection.api(f"CONSUMER.CREATE.{name}.w", {"stream_name": name, "config": config, "action": "create"})
    assert (await plan(connection, _alone(name))).changes == ()


async def test_an_ack_wait_replaces_the_backoff_that_would_override_it(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[_consumer(name, backoff=["1s", "2s"])]))
    waiting = _alone(name, consumers=[_consumer(name, ack_wait="1m")])
    done = await provision(connection, waiting)
    assert "ack_wait: 1s → 1m\n    backoff: [1s, 2s] → unset" in str(done)
    stored = await _consumer_config(connection, name, "w")
    assert (stored["ack_wait"], stored.get("backoff")) == (60_000_000_000, None)
    assert (await plan(connection, waiting)).changes == ()


async def _jobs(connection: Connection, *subjects: str) -> None:
    for subject in subjects:
        await connection.publish_acknowledged(subject, b"job")


async def _pending(connection: Connection, stream: str, consumer: str) -> int:
    return int((await connection.api(f"CONSUMER.INFO.{stream}.{consumer}"))["num_pending"])


@pytest.mark.parametrize("pulled", [True, False])
async def test_stored_jobs_that_a_consumer_has_passed_keep_their_subject_from_it(
    connection: NatsPyConnection, name: str, *, pulled: bool
) -> None:
    await provision(connection, _alone(name))
    await _jobs(connection, f"{name}.b", f"{name}.b", f"{name}.a")
    if pulled:
        (message,) = await pull_jobs(connection, _alone(name), 1, consumer="w")
        await message.ack_sync()
    wider = _alone(name, consumers=[_consumer(name, filter_subject=f"{name}.*")])
    with pytest.raises(DriftError) as caught:
        await provision(connection, wider)
    assert (
        f"not possible: 2 jobs on {name}.b would never be delivered: w has passed what it had no filter for; declare a"
        " consumer of another name for these subjects"
    ) in str(caught.value)
    if pulled:
        # Belief: the server accepts the update and doesn't deliver them.
        unchecked = [replace(step, blocked=()) for step in (await plan(connection, wider)).steps]
        await apply(connection, Plan(tuple(unchecked)))
        assert await _pending(connection, name, "w") == 0


async def test_a_filter_is_not_dropped_while_jobs_are_stored_that_only_it_matches(
    connection: NatsPyConnection, name: str
) -> None:
    both = _alone(name, consumers=[{"name": "w", "filter_subjects": [f"{name}.a", f"{name}.b"], "max_deliver": 3}])
    await provision(connection, both)
    await _jobs(connection, f"{name}.b")
    with pytest.raises(DriftError, match=rf"1 job on {name}.b would have no consumer: keep that filter until they are"):
        await provision(connection, _alone(name))
    assert (await _consumer_config(connection, name, "w"))["filter_subjects"] == [f"{name}.a", f"{name}.b"]
    other = _other(name)
    await provision(connection, _alone(name, consumers=[_consumer(name), other]), migrate=True)
    assert await _pending(connection, name, "x") == 1


async def test_a_consumer_is_not_left_without_a_filter_beside_others(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[_consumer(name), _other(name)]))
    everything = _alone(name, consumers=[{"name": "w", "max_deliver": 3}])
    with pytest.raises(DriftError, match=r"its filter q\w+\.b overlaps with those declared for w, .*\(error 10099\)"):
        await provision(connection, everything)
    # Belief: the server accepts the update, and then both consumers deliver the jobs of one.
    unfiltered = await _consumer_config(connection, name, "w")
    del unfiltered["filter_subject"]
    body = {"stream_name": name, "config": unfiltered, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.w", body)
    await _jobs(connection, f"{name}.b")
    for consumer in ("w", "x"):
        assert len(await pull_jobs(connection, everything, 1, consumer=consumer)) == 1
    with pytest.raises(DriftError, match="its filter > overlaps with those declared for x"):
        await provision(connection, _alone(name, consumers=[_other(name)]))


async def test_a_push_consumer_is_not_taken_for_the_declared_one(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[]))
    config = _consumer(name, durable_name="w", ack_policy="explicit", deliver_subject=f"to.{name}")
    await connection.api(f"CONSUMER.DURABLE.CREATE.{name}.w", {"stream_name": name, "config": config})
    with pytest.raises(DriftError, match=r"it is a push consumer, from which no worker can pull.*\(error 10012\)"):
        await provision(connection, _alone(name))


async def test_the_consumer_of_a_source_is_in_nobody_s_way(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _alone(name, consumers=[]))
    sourced = {"name": f"{name}_copy", "sources": [{"name": name}], "num_replicas": 1}
    await connection.api(f"STREAM.CREATE.{name}_copy", sourced)

    async def listed() -> bool:
        return any(consumer.startswith("JS_SRC_") for consumer in await consumer_names(connection, name))

    if connection.server_version >= (2, 14, 0):
        await eventually(listed)
    await provision(connection, _alone(name))
    assert (await plan(connection, _alone(name))).changes == ()
