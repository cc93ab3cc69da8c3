"""The markers of atomic redrives: the queue captures them, and no consumer gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import PropertyMock

import pytest

from airflow_provider_jetstream.jetstream import WorkQueue, plan, provision
from airflow_provider_jetstream.jetstream.errors import DriftError, ServerTooOldError
from testbed.queues import publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from pytest_mock import MockerFixture

    from testbed.face import NatsPyConnection


def _queue(name: str, **changes: Any) -> WorkQueue:
    values = {
        "name": name,
        "subjects": [f"{name}.jobs.>", f"{name}.more.*"],
        "consumers": [{"name": "worker", "max_deliver": 2}],
        "dead_letters": f"{name}-dead",
    }
    return WorkQueue(**values | changes)


async def _config(connection: NatsPyConnection, subject: str) -> dict[str, Any]:
    config: dict[str, Any] = (await connection.api(subject))["config"]
    return config


async def _mark(connection: NatsPyConnection, name: str, sequence: int) -> None:
    await connection.client.jetstream().publish(f"requeued.{name}.{sequence}", b"")


@pytest.mark.parametrize("subjects", [["{}.jobs.>"], ["{}.jobs.>", "{}.more.*"]], ids=["one subject", "two"])
async def test_a_consumer_without_a_filter_gets_jobs_and_no_markers(
    connection: NatsPyConnection, name: str, subjects: list[str]
) -> None:
    subjects = [subject.format(name) for subject in subjects]
    queue = _queue(name, subjects=subjects, atomic_redrive=True)
    await provision(connection, queue)
    assert (await _config(connection, f"STREAM.INFO.{name}"))["subjects"] == [*subjects, f"requeued.{name}.*"]
    consumer = await _config(connection, f"CONSUMER.INFO.{name}.worker")
    assert (consumer.get("filter_subjects") or [consumer["filter_subject"]]) == subjects
    assert (await plan(connection, queue)).changes == ()
    await _mark(connection, name, 1)
    await publish_jobs(connection, queue, ["job"])
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.data == b"job"
    info = await connection.api(f"CONSUMER.INFO.{name}.worker")
    assert (info["num_pending"], await stored_count(connection, name)) == (0, 2)


async def test_a_queue_that_exists_is_upgraded_and_keeps_its_jobs_and_deliveries(
    connection: NatsPyConnection, name: str
) -> None:
    await provision(connection, _queue(name))
    await publish_jobs(connection, _queue(name), ["job", "other"])
    (first,) = await pull_jobs(connection, _queue(name), 1)
    done = await provision(connection, _queue(name, atomic_redrive=True))
    jobs, more, markers = f"{name}.jobs.>", f"{name}.more.*", f"requeued.{name}.*"
    *changes, marks = done.changes
    assert str(marks).startswith(f"update stream {name}\n    metadata: {{'filters.worker'")
    assert [str(step) for step in changes] == [
        (
            f"update stream {name}\n    subjects: {[jobs, more]} → {[jobs, more, markers]}\n"
            "    allow_atomic: unset → True\n    allow_msg_ttl: False → True"
        ),
        f"update consumer {name}/worker\n    filter_subjects: unset → {[jobs, more]}",
    ]
    await first.ack_sync()
    (second,) = await pull_jobs(connection, _queue(name), 1)
    assert (second.data, second.metadata.num_delivered) == (b"other", 1)


async def test_a_queue_that_drops_the_flag_keeps_its_markers_and_no_consumer_gets_them(
    connection: NatsPyConnection, name: str
) -> None:
    atomic, plain = _queue(name, atomic_redrive=True), _queue(name)
    await provision(connection, atomic)
    await _mark(connection, name, 1)
    before = await _config(connection, f"STREAM.INFO.{name}"), await _config(connection, f"CONSUMER.INFO.{name}.worker")
    assert (await provision(connection, plain)).changes == ()
    await provision(connection, _queue(name, max_msgs=77, consumers=[{"name": "worker", "max_deliver": 3}]))
    stream = await _config(connection, f"STREAM.INFO.{name}")
    consumer = await _config(connection, f"CONSUMER.INFO.{name}.worker")
    assert (stream["max_msgs"], consumer["max_deliver"]) == (77, 3)
    assert stream["subjects"] == before[0]["subjects"]
    assert consumer["filter_subjects"] == before[1]["filter_subjects"]
    assert await stored_count(connection, name) == 1


async def test_a_filter_that_includes_stored_markers_is_refused(connection: NatsPyConnection, name: str) -> None:
    await provision(connection, _queue(name, atomic_redrive=True))
    wide = [{"name": "worker", "filter_subject": "*.*.>", "max_deliver": 2}]
    with pytest.raises(
        DriftError,
        match=rf"its filter \*\.\*\.> includes the markers of atomic redrives \(requeued\.{name}\.\*\): give it a",
    ):
        await provision(connection, _queue(name, consumers=wide))


@pytest.mark.parametrize("filters", [{}, {"filter_subjects": ["*.*.>"]}], ids=["no filter", "a wide one"])
async def test_an_undeclared_consumer_whose_filter_includes_markers_is_refused(
    connection: NatsPyConnection, name: str, filters: dict[str, Any]
) -> None:
    await provision(connection, _queue(name, consumers=[]))
    config = {"name": "theirs", "durable_name": "theirs", "ack_policy": "explicit", **filters}
    body = {"stream_name": name, "config": config, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{name}.theirs", body)
    before = await _config(connection, f"STREAM.INFO.{name}")
    with pytest.raises(DriftError, match=rf"keep consumer {name}/theirs\n    not possible: its filter "):
        await provision(connection, _queue(name, consumers=[], atomic_redrive=True))
    assert await _config(connection, f"STREAM.INFO.{name}") == before


async def test_an_undeclared_consumer_of_other_jobs_is_not_changed(connection: NatsPyConnection, name: str) -> None:
    consumers = [{"name": "worker", "filter_subject": f"{name}.more.*", "max_deliver": 2}]
    await provision(connection, _queue(name, consumers=consumers))
    config = {"durable_name": "theirs", "ack_policy": "explicit", "filter_subject": f"{name}.jobs.>"}
    body = {"stream_name": name, "config": config, "action": "create"}
    await connection.api(f"CONSUMER.CREATE.{name}.theirs", body)
    done = await provision(connection, _queue(name, consumers=consumers, atomic_redrive=True))
    assert [step.name for step in done.changes] == [name]


@pytest.mark.parametrize(
    ("level", "version", "server"),
    [(1, (2, 11, 9), "2.11.9 (API level 1)"), (2, (2, 12, 0), "2.12.0 (API level 2)")],
)
async def test_an_older_server_is_refused_before_anything_is_changed(
    connection: NatsPyConnection,
    name: str,
    mocker: MockerFixture,
    level: int,
    version: tuple[int, int, int],
    server: str,
) -> None:
    connection.api_level = level
    mocker.patch.object(type(connection), "server_version", PropertyMock(return_value=version))
    with pytest.raises(ServerTooOldError) as caught:
        await provision(connection, _queue(name, atomic_redrive=True))
    assert str(caught.value) == (
        f"atomic_redrive of work queue {name}: expected nats-server 2.12.1 or later (API level 2), found {server},"
        " which would store the messages of a batch one by one: upgrade every server, or leave the flag out; nothing"
        " was changed"
    )
    streams = (await connection.api("STREAM.NAMES"))["streams"] or []
    assert [stream for stream in streams if stream.startswith(name)] == []
    await provision(connection, _queue(name))
