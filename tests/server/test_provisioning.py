"""A queue is created as declared, drift is corrected, and what the server would refuse is refused first."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Plan, WorkQueue, apply, connect, connection_settings, plan, provision
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DriftError,
    ProvisioningError,
    TransientError,
)
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.queues import eventually, pull_jobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.face import NatsPyConnection


def _queue(name: str, **changes: Any) -> WorkQueue:
    values: dict[str, Any] = {
        "name": name,
        "subjects": [f"{name}.>"],
        "description": "a queue",
        "discard": "new",
        "max_msgs": 100,
        "max_bytes": "1MB",
        "max_msg_size": -1,
        "max_age": -1,
        "duplicate_window": "5m",
        "metadata": {"team": "a"},
        "consumers": [
            {"name": "high", "filter_subject": f"{name}.high.>", "max_deliver": 3, "ack_wait": "10s"},
            {
                "name": "low",
                "description": "slow ones",
                "filter_subjects": [f"{name}.low.>", f"{name}.lower.>"],
                "max_deliver": 3,
                "backoff": ["1s", "1m"],
                "max_ack_pending": 10,
                "sample_freq": "100%",
                "metadata": {"speed": "slow"},
            },
        ],
        "dead_letters": {"name": f"{name}_dead", "consumers": [{"name": "reader", "max_deliver": -1}]},
        "events": f"{name}_events",
    }
    return WorkQueue(**values | changes)


def _consumer(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": "w", "filter_subject": f"{name}.a", "max_deliver": 3} | changes


def _alone(name: str, **changes: Any) -> WorkQueue:
    return WorkQueue(**{"name": name, "subjects": [f"{name}.>"], "consumers": [_consumer(name)]} | changes)


async def _stream(connection: Connection, name: str) -> dict[str, Any]:
    return await connection.api(f"STREAM.INFO.{name}")


async def _consumer_config(connection: Connection, stream: str, name: str) -> dict[str, Any]:
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
    return config


async def _configs(connection: Connection, name: str) -> list[Any]:
    """Return the configurations of a queue's streams and of their consumers on the server."""
    configs: list[Any] = []
    for stream in (await connection.api("STREAM.NAMES"))["streams"] or []:
        if stream.startswith(name):
            configs.append((await _stream(connection, stream))["config"])
            consumers = (await connection.api(f"CONSUMER.LIST.{stream}"))["consumers"] or []
            configs += sorted((consumer["config"] for consumer in consumers), key=lambda config: str(config["name"]))
    return configs


async def test_the_streams_that_capture_the_ends_of_jobs_are_created_first(connection: Connection, name: str) -> None:
    done = await provision(connection, _queue(name))
    created = [
        (await connection.api(f"STREAM.INFO.{step.name}"))["created"]
        if step.kind == "stream"
        else (await connection.api(f"CONSUMER.INFO.{step.name.replace('/', '.')}"))["created"]
        for step in done.steps
    ]
    assert [str(step) for step in done.steps] == [
        f"create stream {name}_dead",
        f"create consumer {name}_dead/reader",
        f"create stream {name}_events",
        f"create stream {name}-archive",
        f"create stream {name}-audit",
        f"create stream {name}",
        f"create consumer {name}/high",
        f"create consumer {name}/low",
    ]
    times = [datetime.fromisoformat(time) for time in created]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


async def test_a_queue_is_stored_as_declared(connection: Connection, name: str) -> None:
    await provision(connection, _queue(name))
    queue = (await _stream(connection, name))["config"]
    assert queue["retention"] == "workqueue"
    assert (queue["max_msgs"], queue["max_bytes"], queue["discard"]) == (100, 1_048_576, "new")
    assert queue["duplicate_window"] == 300_000_000_000
    assert queue["metadata"]["team"] == "a"
    high = await _consumer_config(connection, name, "high")
    assert (high["ack_policy"], high["max_deliver"], high["ack_wait"]) == ("explicit", 3, 10_000_000_000)
    assert high["filter_subject"] == f"{name}.high.>"
    low = await _consumer_config(connection, name, "low")
    assert low["filter_subjects"] == [f"{name}.low.>", f"{name}.lower.>"]
    assert low["backoff"] == [1_000_000_000, 60_000_000_000]
    dead_letters = (await _stream(connection, f"{name}_dead"))["config"]
    assert (dead_letters["retention"], dead_letters["metadata"]["dead_letter_queue"]) == ("limits", "true")


async def test_provisioning_again_keeps_everything(connection: Connection, name: str) -> None:
    await provision(connection, _queue(name))
    before, created = await _configs(connection, name), (await _stream(connection, name))["created"]
    again = await provision(connection, _queue(name))
    assert [step.action for step in again.steps] == ["keep"] * 8
    assert again.changes == ()
    assert await _configs(connection, name) == before
    assert (await _stream(connection, name))["created"] == created


async def test_planning_changes_nothing(connection: Connection, name: str) -> None:
    await plan(connection, _queue(name))
    assert await _configs(connection, name) == []


async def test_drift_is_shown_as_a_difference_and_corrected(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name, max_msgs=100, max_age="1h"))
    consumer = _consumer(name, filter_subject=f"{name}.b", ack_wait="1m", max_deliver=5)
    changed = _alone(name, max_msgs=200, max_age=-1, consumers=[consumer])
    intended = await plan(connection, changed)
    *steps, marks = intended.steps
    assert "\n".join(map(str, steps)) == (
        f"update stream {name}\n    max_msgs: 100 → 200\n    max_age: 1h → 0\n"
        f"update consumer {name}/w\n    max_deliver: 3 → 5\n    filter_subject: {name}.a → {name}.b\n"
        "    ack_wait: 30s → 1m"
    )
    assert (marks.name, [difference.field for difference in marks.differences]) == (name, ["metadata"])
    await apply(connection, intended)
    assert (await _stream(connection, name))["config"]["max_msgs"] == 200
    stored = await _consumer_config(connection, name, "w")
    assert (stored["filter_subject"], stored["ack_wait"], stored["max_deliver"]) == (f"{name}.b", 60_000_000_000, 5)
    assert (await plan(connection, changed)).changes == ()


@pytest.mark.parametrize(
    ("existing", "declared", "reason"),
    [
        (
            {"storage": "memory"},
            {},
            (
                "storage: memory → file\n    not possible: storage of a stream is fixed when it is created; declare"
                " 'memory', or drain {0} and remove it by hand, then provision again"
            ),
        ),
        (
            {"retention": "limits"},
            {},
            "retention: limits → workqueue\n    not possible: retention of a stream is fixed when it is created;",
        ),
        (
            {"deny_delete": True},
            {"deny_delete": False},
            (
                "deny_delete: True → False\n    not possible: deny_delete can't be reset once it is set; declare"
                " true, or leave it out"
            ),
        ),
        ({"deny_purge": True}, {"deny_purge": False}, "not possible: deny_purge can't be reset once it is set"),
    ],
    ids=["storage", "retention", "deny_delete", "deny_purge"],
)
async def test_what_the_server_cannot_change_is_refused_and_nothing_is_changed(
    connection: Connection, name: str, existing: dict[str, Any], declared: dict[str, Any], reason: str
) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {**_alone(name).config(), **existing})
    before = await _configs(connection, name)
    queue = _alone(name, dead_letters=f"{name}_dead", events=f"{name}_events", archive=False, **declared)
    with pytest.raises(DriftError) as caught:
        await provision(connection, queue)
    assert str(caught.value).startswith(
        f"the server can't be made to match the declaration, so nothing was changed:\nupdate stream {name}\n"
    )
    assert reason.format(name) in str(caught.value)
    assert await _configs(connection, name) == before


async def test_a_consumer_with_another_ack_policy_is_refused(connection: Connection, name: str) -> None:
    stream = {"name": name, "subjects": [f"{name}.>"], "retention": "interest"}
    await connection.api(f"STREAM.CREATE.{name}", stream)
    subjects = [f"{name}.>", f"$JS.EVENT.ADVISORY.CONSUMER.*.{name}q.*"]
    consumers = [{"name": "r", "max_deliver": 3}]
    dead_letters = {"name": name, "subjects": subjects, "retention": "interest", "consumers": consumers}
    body = {"stream_name": name, "config": {"durable_name": "r", "ack_policy": "all", "max_deliver": 3}}
    await connection.api(f"CONSUMER.CREATE.{name}.r", body)
    before = await _configs(connection, name)
    with pytest.raises(DriftError, match=r"ack_policy: all → explicit\n.*ack_policy of a consumer is fixed when"):
        await provision(connection, _alone(f"{name}q", dead_letters=dead_letters))
    assert await _configs(connection, name) == before


@pytest.mark.slow
async def test_concurrent_provisioning_succeeds(settings: ConnectionSettings, name: str) -> None:
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connect(settings)) for _ in range(4)]
        for turn in range(5):
            queue = _queue(f"{name}{turn}")
            await asyncio.gather(*(provision(connection, queue) for connection in connections))
            assert (await plan(connections[0], queue)).changes == ()
        changed = _queue(f"{name}0", max_msgs=7)
        await asyncio.gather(*(provision(connection, changed) for connection in connections))
        assert (await _stream(connections[0], f"{name}0"))["config"]["max_msgs"] == 7


async def test_apply_says_where_the_server_refused_and_goes_on_when_it_is_run_again(name: str) -> None:
    # What the server's own disk may hold is no part of what it tells.
    with NatsServer(jetstream_config="max_file_store: 5MB") as server:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
            too_large = _queue(name, max_bytes="6MB", archive={"max_bytes": "1MB"})
            with pytest.raises(ProvisioningError) as caught:
                await provision(connection, too_large)
            assert str(caught.value) == (
                f"the server refused to create stream {name}: insufficient storage resources available (error 10047);"
                f" 5 of 8 steps are done, create stream {name}-audit the last; provision again to go on"
            )
            done = await provision(connection, _queue(name, max_bytes="3MB", archive={"max_bytes": "1MB"}))
            assert [step.action for step in done.steps] == ["keep"] * 5 + ["create"] * 3


@pytest.mark.parametrize("exists", [False, True], ids=["create", "update"])
async def test_a_subject_that_another_stream_captures_is_reported_with_the_name_of_that_stream(
    connection: Connection, name: str, *, exists: bool
) -> None:
    await connection.api(f"STREAM.CREATE.{name}_other", {"name": f"{name}_other", "subjects": [f"{name}.b.>"]})
    if exists:
        await provision(connection, _alone(name, subjects=[f"{name}.a"]))
    before = await _configs(connection, name)
    events = f"{name}_events"
    with pytest.raises(DriftError) as caught:
        await provision(connection, _alone(name, subjects=[f"{name}.a", f"{name}.b.*"], events=events))
    assert (
        f"not possible: stream {name}_other already captures {name}.b.*, and a subject has one stream (error 10065):"
        " declare that stream's name instead, or other subjects"
    ) in str(caught.value)
    assert await _configs(connection, name) == before


async def test_undeclared_consumers_are_not_changed(connection: Connection, name: str) -> None:
    await provision(connection, _alone(name))
    config = _alone(name, consumers=[_consumer(name) | {"name": "other", "filter_subject": f"{name}.z"}]).consumer(
        "other"
    )
    body = {"stream_name": name, "config": config.config(), "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{name}.other", body)
    before = await connection.api(f"CONSUMER.INFO.{name}.other")
    await provision(connection, _alone(name, max_msgs=9))
    after = await connection.api(f"CONSUMER.INFO.{name}.other")
    assert (after["created"], after["config"]) == (before["created"], before["config"])
    with pytest.raises(ApiError, match="10014"):
        await connection.api(f"CONSUMER.INFO.{name}.never")


def _other(name: str) -> dict[str, Any]:
    return _consumer(name) | {"name": "x", "filter_subject": f"{name}.b"}


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
    draining = asyncio.create_task(provision(connection, _alone(name, consumers=[_consumer(name), other]), drain=True))
    (job,) = await pull_jobs(connection, both, 1, consumer="w")
    await job.ack_sync()
    await draining
    await _jobs(connection, f"{name}.b")
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
        names = (await connection.api(f"CONSUMER.NAMES.{name}"))["consumers"] or ()
        return any(consumer.startswith("JS_SRC_") for consumer in names)

    if connection.server_version >= (2, 14, 0):
        await eventually(listed)
    await provision(connection, _alone(name))
    assert (await plan(connection, _alone(name))).changes == ()


# Several processes that provision one queue at the same time.


def declared(name: str, size: str = "2MB", wait: str = "2s") -> WorkQueue:
    consumer = {"name": "worker", "filter_subject": f"{name}.{{partition}}", "partitions": 3, "max_deliver": 3}
    companions = {"dead_letters": f"{name}-dead", "events": f"{name}-events"}
    return WorkQueue(
        name=name, subjects=[f"{name}.>"], max_bytes=size, consumers=[consumer | {"ack_wait": wait}], **companions
    )


@pytest.mark.parametrize("theirs", [{"size": "1MB"}, {"wait": "1s"}], ids=["stream", "consumer"])
async def test_what_another_process_has_changed_since_the_plan_was_made_is_planned_again(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str]
) -> None:
    ours, plans = declared(name), count(1)

    async def plan_while_another_provisions(*arguments: Any, **options: Any) -> Plan:
        planned = await plan(*arguments, **options)
        if next(plans) == 1:
            await apply(connection, await plan(connection, declared(name, **theirs)))
        return planned

    monkeypatch.setattr(seams.APPLY_PLAN, plan_while_another_provisions)
    await provision(connection, ours)
    assert next(plans) == 3
    assert (await plan(connection, ours)).changes == ()


async def test_a_plan_that_another_process_has_overtaken_can_be_tried_again(
    connection: NatsPyConnection, name: str
) -> None:
    planned = await plan(connection, declared(name))
    await provision(connection, declared(name, wait="1s"))
    with pytest.raises(TransientError) as caught:
        await apply(connection, planned)
    assert str(caught.value).startswith(
        f"consumer {name}/worker-0 was changed by another process after the plan was made: consumer already exists"
        " (error 10148)"
    )


async def test_different_declarations_at_once_leave_one_of_them(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with connect(settings) as other:
        queues = [declared(name), declared(name, "1MB", "1s")]
        await asyncio.gather(*map(provision, (connection, other), queues))
    for queue in queues:
        await provision(connection, queue)
        assert (await plan(connection, queue)).changes == ()
