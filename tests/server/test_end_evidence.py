"""Where jobs are waited for, the server stores evidence of the ends for any worker, or the wait says what it lacks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    WaitPolicy,
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    plan,
    provision,
    take_cursor,
)
from testbed import seams
from testbed.face import consumer_info
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, store_completion, stored_count
from testbed.waiters import start_waiting, wait_reports

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

METRICS = "$JS.EVENT.METRIC.CONSUMER.ACK"
ANY = WaitPolicy(max_vanished=None)
INTERVAL = seams.COMPARISON_INTERVAL


def declared(name: str, **consumer: Any) -> WorkQueue:
    """Declare a queue that leaves the sampling to the default."""
    return WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[{"name": CONSUMER, "max_deliver": 5, "ack_wait": "30s", **consumer}],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
    )


async def provisioned(connection: NatsPyConnection, name: str, **consumer: Any) -> WorkQueue:
    queue = declared(name, **consumer)
    await provision(connection, queue)
    return queue


async def create_or_update(connection: NatsPyConnection, name: str) -> None:
    """Create or update the consumer as a worker of another make does at its start: with its own fields only."""
    config = {"name": CONSUMER, "durable_name": CONSUMER, "ack_policy": "explicit", "max_deliver": 5}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config, "action": ""})


async def reset(connection: NatsPyConnection, name: str) -> None:
    """Leave the consumer as a worker of another make does, and the server as it is after its next start."""
    config = (await consumer_info(connection, name, CONSUMER))["config"]
    off = {"stream_name": name, "config": config | {"sample_freq": "0"}, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", off)
    await create_or_update(connection, name)


async def acknowledge(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Do jobs as a worker does that knows nothing of this package: acknowledge each by an empty answer."""
    for message in await pull_jobs(connection, queue, count):
        await connection.client.publish(message.reply, b"")
    await connection.client.flush()


async def test_provisioning_sets_sampling_again_where_a_worker_has_reset_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await provisioned(connection, name)
    await create_or_update(connection, name)
    assert "sample_freq" not in (await consumer_info(connection, name, CONSUMER))["config"]
    assert "sample_freq: unset → 100%" in str(await provision(connection, queue))
    assert (await consumer_info(connection, name, CONSUMER))["config"]["sample_freq"] == "100%"
    assert not (await plan(connection, queue)).changes


@pytest.mark.parametrize("share", ["0", "0%", "50%"])
async def test_a_declared_share_is_respected_and_warned_of(connection: NatsPyConnection, name: str, share: str) -> None:
    queue = await provisioned(connection, name, sample_freq=share)
    assert not (await plan(connection, queue)).changes
    await create_or_update(connection, name)
    # Without any, and with a share of 0, the server reports nothing.
    assert len((await plan(connection, queue)).changes) == (share == "50%")
    (warning,) = [text for text in queue.warnings() if "sample_freq" in text]
    assert f"consumer {CONSUMER} has sample_freq {share}:" in warning


async def test_a_wait_names_sample_freq_where_a_worker_has_reset_it_and_does_not_advise_to_publish_again(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    caplog.set_level(logging.WARNING)
    queue = await provisioned(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await reset(connection, name)
    waiter = start_waiting(connection, cursor, jobs, ANY)
    warning = f"The ends of jobs of consumer {CONSUMER} of {name} may go unseen: its sample_freq is unset"
    # At once, not only when a job is missing.
    await eventually(lambda: warning in caplog.text, within=2)
    await acknowledge(connection, queue, 2)
    (report,) = await wait_reports([waiter])
    assert report.vanished == set(jobs)
    assert report.as_json()["unsampled_consumers"] == {CONSUMER: "its sample_freq is unset"}
    for policy in (WaitPolicy(), WaitPolicy(min_completed=1)):
        error = str(policy.violation(report.as_json()))
        assert "they may well be done, and publishing them again would run them twice" in error
        assert f"({CONSUMER}: its sample_freq is unset)" in error
        assert "sets sample_freq to 100%" in error
        assert "or publish them again" not in error
        assert "or publish again" not in error
    assert caplog.text.count(warning) == 1


@pytest.mark.slow
async def test_a_reset_ends_the_sampling_with_the_servers_next_start_at_the_latest(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await provisioned(connection, name)
        await create_or_update(connection, name)
        await publish_jobs(connection, queue, "ab")
        await acknowledge(connection, queue, 1)
        await eventually(lambda: stored_is(connection, name, 1))
        # Server 2.11.0 stops at once, 2.12.1 and 2.15 only with a restart.
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected)
        await acknowledge(connection, queue, 1)
        await eventually(lambda: stored_is(connection, name, 0))
        assert await stored_count(connection, f"{name}-events") <= 1


async def stored_is(connection: NatsPyConnection, stream: str, count: int) -> bool:
    """Return whether a stream stores so many messages."""
    return await stored_count(connection, stream) == count


async def test_sampling_that_is_reset_during_a_wait_is_noticed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    queue = await provisioned(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    waiter = start_waiting(connection, cursor, jobs, ANY)
    await acknowledge(connection, queue, 1)
    await eventually(lambda: waiter.remaining == [1])
    await reset(connection, name)
    await acknowledge(connection, queue, 1)
    (report,) = await wait_reports([waiter])
    assert (report.completed, report.vanished) == ({jobs[0]}, {jobs[1]})
    assert report.unsampled_consumers == {CONSUMER: "its sample_freq is unset"}


@pytest.mark.parametrize("afterwards", ["provisioned", "deleted"])
async def test_what_was_acknowledged_while_a_consumer_was_not_sampled_is_not_to_be_published_again(
    connection: NatsPyConnection,
    name: str,
    afterwards: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(INTERVAL, 0.5)
    queue = await provisioned(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await reset(connection, name)
    waiter = start_waiting(connection, cursor, jobs, ANY)
    await eventually(lambda: "may go unseen" in caplog.text, within=2)
    await acknowledge(connection, queue, 2)
    await eventually(lambda: stored_is(connection, name, 0))
    # As the warning advises; or as a worker does at its end.
    if afterwards == "provisioned":
        await provision(connection, queue)
    else:
        await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    (report,) = await wait_reports([waiter])
    assert report.vanished == set(jobs)
    assert "publishing them again would run them twice" in str(WaitPolicy().violation(report.as_json()))


async def test_where_workers_store_completions_no_sampling_is_missed_until_a_job_vanishes(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    queue = await make_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await store_completion(connection, queue, jobs[0])
    waiter = start_waiting(connection, cursor, jobs, ANY)
    await acknowledge(connection, queue, 2)
    (report,) = await wait_reports([waiter])
    assert (report.completed, report.vanished) == ({jobs[0]}, {jobs[1]})
    assert report.unsampled_consumers == {CONSUMER: "its sample_freq is 0"}
    assert "may go unseen" not in caplog.text


async def test_a_job_that_vanishes_although_every_acknowledgement_is_reported_may_be_done_all_the_same(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    queue = await provisioned(connection, name)
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "a")
    await connection.api(f"STREAM.PURGE.{name}")
    (report,) = await wait_reports([start_waiting(connection, cursor, jobs, ANY)])
    assert "unsampled_consumers" not in report.as_json()
    for policy in (WaitPolicy(), WaitPolicy(min_completed=1)):
        error = str(policy.violation(report.as_json()))
        assert "Find out which of them are done before you publish any of them again" in error
        assert "the sample_freq of its consumer isn't 100%" in error
        assert "or publish" not in error


async def test_metrics_that_no_stream_captures_are_missed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    subjects = [f"completed.{name}.>", f"cancelled.{name}.>", f"published.{name}.*"]
    values = declared(name).model_dump(include={"name", "subjects"})
    consumer = {"name": CONSUMER, "max_deliver": 5, "ack_wait": "30s"}
    queue = WorkQueue(**values, consumers=[consumer], events={"name": f"{name}-events", "subjects": subjects})
    assert queue.consumer(CONSUMER).sample_freq is None
    assert [text for text in queue.warnings() if f"{name}-events doesn't capture {METRICS}.{name}.*" in text]
    await provision(connection, queue)
    sampled = WorkQueue(
        **values, consumers=[consumer | {"sample_freq": "100%"}], events=queue.events and queue.events.model_dump()
    )
    await provision(connection, sampled)
    cursor = await take_cursor(connection, sampled)
    jobs = await publish_jobs(connection, sampled, "a")
    waiter = start_waiting(connection, cursor, jobs, ANY)
    await acknowledge(connection, sampled, 1)
    (report,) = await wait_reports([waiter])
    assert report.unsampled_consumers == {CONSUMER: f"{name}-events doesn't capture {METRICS}.{name}.*"}
    assert "may go unseen" in caplog.text


async def test_a_discovered_queue_says_that_its_consumer_is_not_sampled(
    connection: NatsPyConnection, name: str
) -> None:
    await provisioned(connection, name)
    await create_or_update(connection, name)
    discovered = await discover_queue(connection, name)
    assert discovered.consumer(CONSUMER).sample_freq == "0"
    assert not (await plan(connection, discovered)).changes
