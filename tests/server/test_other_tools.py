"""What other tools set on a queue's stream and consumers is refused or named by all who work with the queue."""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    WorkQueue,
    diagnose_dead_letters,
    discover_queue,
    find_dead_letters,
    plan,
    provision,
    publish,
    running_warnings,
)
from airflow_provider_jetstream.jetstream.errors import DriftError, QueueDeclarationError
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed.dead_letters import change_stream
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection

SECOND = 10**9


async def set_consumer(connection: NatsPyConnection, queue: str, changes: dict[str, Any], name: str = CONSUMER) -> None:
    """Change a consumer as another tool does."""
    config = (await connection.api(f"CONSUMER.INFO.{queue}.{name}"))["config"]
    await connection.api(f"CONSUMER.CREATE.{queue}.{name}", {"stream_name": queue, "config": config | changes})


async def recreate_consumer(connection: NatsPyConnection, queue: str, changes: dict[str, Any]) -> None:
    """Create the consumer anew, with what no update can set."""
    config = (await connection.api(f"CONSUMER.INFO.{queue}.{CONSUMER}"))["config"]
    await connection.api(f"CONSUMER.DELETE.{queue}.{CONSUMER}")
    for field in ("max_waiting",) if "deliver_subject" in changes else ():
        config.pop(field)
    request = {"stream_name": queue, "config": config | changes}
    await connection.api(f"CONSUMER.CREATE.{queue}.{CONSUMER}", request)


async def start(queue: WorkQueue, settings: ConnectionSettings) -> None:
    """Start a worker, and stop it once it takes jobs."""
    worker = Worker(queue, CONSUMER, lambda job: None, settings)
    async with running_worker(worker) as running:
        await asyncio.wait([running], timeout=0.3)


REFUSED: dict[str, dict[str, Any]] = {
    "headers_only": {"headers_only": True},
    "deliver_subject": {"deliver_subject": "d"},
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_workers_would_do_wrong_is_refused_before_a_job_is_taken(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, field: str
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 3})
    await (set_consumer if field == "headers_only" else recreate_consumer)(connection, name, REFUSED[field])
    await publish(connection, queue, [Job(b"body", id="1")], subject=f"{name}.jobs.x")
    ran: list[Delivery] = []
    with pytest.raises(WorkerSetupError, match=field):
        await asyncio.wait_for(Worker(queue, CONSUMER, ran.append, settings).run(), 5)
    assert (ran, await stored_count(connection, name), await stored_count(connection, f"{name}-events")) == ([], 1, 0)
    blocked = (await plan(connection, queue)).blocked
    assert [field in step.blocked[0] for step in blocked] == [True]
    with pytest.raises(DriftError, match=field):
        await provision(connection, queue)
    for found in (
        await running_warnings(connection, queue),
        (await find_dead_letters(connection, queue)).risks,
        (await diagnose_dead_letters(connection, queue)).risks,
    ):
        assert any(field in sentence for sentence in found)


NAMED: dict[str, dict[str, Any]] = {
    "inactive_threshold": {"inactive_threshold": 3_600 * SECOND},
    "mem_storage": {"mem_storage": True},
    "replay_policy original": {"replay_policy": "original"},
    "max_waiting": {"max_waiting": 1},
    "max_expires": {"max_expires": SECOND // 2},
}
NOT_SCANNED = {"max_waiting", "max_expires"}


@pytest.mark.slow
@pytest.mark.parametrize("field", NAMED)
async def test_what_other_tools_set_on_a_consumer_is_named(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name)
    await recreate_consumer(connection, name, NAMED[field])
    caplog.set_level(logging.WARNING)
    await start(queue, settings)
    assert any(field in line for line in caplog.messages)
    assert any(field in str(warning) for warning in await running_warnings(connection, queue))
    if field != "replay_policy original":
        assert any(field in note for step in (await plan(connection, queue)).steps for note in step.notes)
    named = any(field in risk for risk in (await find_dead_letters(connection, queue)).risks)
    assert named is (field not in NOT_SCANNED)


STREAM: dict[str, dict[str, Any]] = {
    "allow_rollup_hdrs": {"allow_rollup_hdrs": True},
    "republishes headers only": {"republish": {"src": ">", "dest": "jobs.{name}.>", "headers_only": True}},
    "has no copy|have no copy": {"republish": {"src": "{name}.jobs.a.>", "dest": "jobs.{name}.>"}},
    "subject_delete_marker_ttl": {
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "subject_delete_marker_ttl": SECOND,
    },
    "persist_mode": {"persist_mode": "async"},
    "discard_new_per_subject": {"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 3},
    "takes jobs from": {"sources": [{"name": "up-{name}"}]},
}


def named_after(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: named_after(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [named_after(item, name) for item in value]
    return value.replace("{name}", name) if isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.parametrize("field", STREAM)
async def test_what_other_tools_set_on_a_stream_is_named(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = await make_queue(connection, name)
    words = field.split("|")
    if field == "persist_mode":
        config = (await connection.api(f"STREAM.INFO.{name}"))["config"]
        await connection.api(f"STREAM.DELETE.{name}")
        await connection.api(f"STREAM.CREATE.{name}", config | STREAM[field])
        await provision(connection, queue)
    else:
        await connection.api(f"STREAM.CREATE.up-{name}", {"name": f"up-{name}", "subjects": [f"up.{name}"]})
        await change_stream(connection, name, **named_after(STREAM[field], name))

    def says(sentences: Any) -> bool:
        return any(word in str(sentence) for sentence in sentences for word in words)

    caplog.set_level(logging.WARNING)
    await start(queue, settings)
    assert says(caplog.messages)
    assert says(await running_warnings(connection, queue))
    assert says((await find_dead_letters(connection, queue)).risks)
    planned = await plan(connection, queue)
    if field in ("allow_rollup_hdrs", "subject_delete_marker_ttl"):
        # Provisioning switches it off.
        assert any(difference.field == field for step in planned.changes for difference in step.differences)
    elif "republish" not in STREAM[field]:
        assert says(note for step in planned.steps for note in step.notes)


@pytest.mark.slow
async def test_a_marker_of_an_expired_job_is_no_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"max_deliver": 2})
    # The server keeps a marker for as long, and lets no job expire earlier.
    await change_stream(connection, name, allow_msg_ttl=True, allow_rollup_hdrs=True, subject_delete_marker_ttl=SECOND)
    await publish_jobs(connection, queue, ["gone"], kind="a", headers={"Nats-TTL": "1s"})

    async def marker() -> dict[str, Any] | None:
        state = (await connection.api(f"STREAM.INFO.{name}"))["state"]
        if state["first_seq"] != 2:
            return None
        message: dict[str, Any] = (await connection.api(f"STREAM.MSG.GET.{name}", {"seq": 2}))["message"]
        return message

    stored = await eventually(marker)
    assert "data" not in stored
    headers = dict(line.split(": ") for line in base64.b64decode(stored["hdrs"]).decode().strip().splitlines()[1:])
    # Once more, since the server's own may be gone before the worker has started.
    await publish_jobs(connection, queue, [""], kind="a", headers={"Nats-Marker-Reason": headers["Nats-Marker-Reason"]})
    # Whoever publishes a job may give it the header: its job is one.
    await publish_jobs(connection, queue, ["body"], kind="b", headers={"Nats-Marker-Reason": "MaxAge"})
    ran: list[bytes] = []

    async def handle(job: Delivery) -> None:
        ran.append(job.body)

    async def is_empty() -> bool:
        return not await stored_count(connection, name)

    caplog.set_level(logging.INFO)
    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await eventually(is_empty)
    assert ran == [b"body"]
    assert any("message 3 on" in line and "marker of an expired job" in line for line in caplog.messages)
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_a_queue_that_other_streams_feed_is_discovered_provisioned_and_worked(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    await connection.api(f"STREAM.CREATE.edge-{name}", {"name": f"edge-{name}", "subjects": [f"edge.{name}.>"]})
    source = {"name": name, "retention": "workqueue", "sources": [{"name": f"edge-{name}"}]}
    await connection.api(f"STREAM.CREATE.{name}", source)
    consumer = {"name": CONSUMER, "filter_subject": f"edge.{name}.jobs", "max_deliver": 2, "ack_wait": "30s"}
    queue = WorkQueue(
        name=name, subjects=[], consumers=[consumer], dead_letters=f"{name}-dead", events=f"{name}-events"
    )
    await provision(connection, queue)
    assert not (await plan(connection, queue)).changes
    discovered = await discover_queue(connection, name)
    assert (discovered.subjects, discovered.consumers[0].filter_subjects) == ((), (f"edge.{name}.jobs",))
    ran: list[bytes] = []

    async def handle(job: Delivery) -> None:
        ran.append(job.body)

    await connection.publish_acknowledged(f"edge.{name}.jobs", b"from the edge")
    async with running_worker(Worker(queue, CONSUMER, handle, settings)):
        await eventually(lambda: ran)
    assert ran == [b"from the edge"]
    # Its jobs come from elsewhere, so letters come back in place.
    assert "no-copies" in {risk.name for risk in (await find_dead_letters(connection, queue)).risks}


async def test_a_queue_without_subjects_that_nothing_feeds_is_refused(connection: NatsPyConnection, name: str) -> None:
    queue = WorkQueue(name=name, subjects=[], consumers=[{"name": CONSUMER, "max_deliver": 2}])
    with pytest.raises(DriftError, match="it has no subjects, and no sources or mirror"):
        await provision(connection, queue)
    with pytest.raises(QueueDeclarationError, match="has no subjects"):
        WorkQueue(name=name, consumers=[{"name": CONSUMER, "max_deliver": 2}])
    # Subjects of a queue that nothing else feeds aren't taken away.
    await make_queue(connection, name)
    with pytest.raises(DriftError, match="it has no subjects"):
        await provision(connection, queue)


@pytest.mark.parametrize(
    ("transform", "right", "wrong"),
    [
        ({"src": "{name}.jobs.>", "dest": "{name}.stored.>"}, "{name}.stored.a", "{name}.jobs.a"),
        (
            {"src": "{name}.jobs.*", "dest": "{name}.{{partition(2,1)}}.{{wildcard(1)}}"},
            "{name}.1.*",
            "{name}.jobs",
        ),
        ({"src": "{name}.jobs.*", "dest": "{name}.words.{{split(1,-)}}"}, "{name}.words.a.b", "{name}.other.a"),
    ],
)
async def test_filters_are_compared_with_what_is_stored(
    connection: NatsPyConnection, name: str, transform: dict[str, str], right: str, wrong: str
) -> None:
    queue = await make_queue(connection, name, consumers=[], dead_letters=None, archive=False)
    await change_stream(connection, name, subject_transform=named_after(transform, name))
    declared = {"name": name, "subjects": list(queue.subjects), "events": f"{name}-events"}

    def with_filter(subject: str) -> WorkQueue:
        return WorkQueue(
            **declared, consumers=[{"name": CONSUMER, "filter_subject": named_after(subject, name), "max_deliver": 2}]
        )

    with pytest.raises(DriftError, match="so it would never get a job"):
        await provision(connection, with_filter(wrong))
    await provision(connection, with_filter(right))
    assert not [
        warning.name
        for warning in await running_warnings(connection, with_filter(right))
        if warning.name == "filter-outside-subjects"
    ]


@pytest.mark.slow
async def test_a_filter_that_matches_nothing_is_named_by_lint_and_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    await set_consumer(connection, name, {"filter_subject": f"{name}.typo"})
    assert "filter-outside-subjects" in {warning.name for warning in await running_warnings(connection, queue)}
    await start(queue, settings)
    assert any("so it would never get a job" in line for line in caplog.messages)
    other = WorkQueue(name="q", subjects=["q.>"], consumers=[{"name": "w", "filter_subject": "z", "max_deliver": 1}])
    assert "filter-outside-subjects" in {warning.name for warning in other.warnings()}
