"""Where jobs are waited for, the server stores evidence of the ends for any worker, or the wait says what it lacks."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from nats import errors

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    WaitPolicy,
    WorkQueue,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    get_message,
    plan,
    preview,
    provision,
    redrive_dead_letters,
    take_cursor,
)
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.face import consumer_info, stream_info, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    store_completion,
    stored_count,
    until_stored,
    wait_for_entries,
)
from testbed.waiters import start_waiting, wait_reports

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

METRICS = "$JS.EVENT.METRIC.CONSUMER.ACK"
ANY = WaitPolicy(max_unaccounted=None)
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
    assert report.unaccounted == set(jobs)
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
    assert (report.completed, report.unaccounted) == ({jobs[0]}, {jobs[1]})
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
    assert report.unaccounted == set(jobs)
    assert "publishing them again would run them twice" in str(WaitPolicy().violation(report.as_json()))


async def test_where_workers_store_completions_no_sampling_is_missed_until_a_job_is_unaccounted(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(INTERVAL, 0.3)
    queue = await make_queue(connection, name, consumer={"sample_freq": "0"})
    cursor = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "ab")
    await store_completion(connection, queue, jobs[0])
    waiter = start_waiting(connection, cursor, jobs, ANY)
    await acknowledge(connection, queue, 2)
    (report,) = await wait_reports([waiter])
    assert (report.completed, report.unaccounted) == ({jobs[0]}, {jobs[1]})
    assert report.unsampled_consumers == {CONSUMER: "its sample_freq is 0"}
    assert "may go unseen" not in caplog.text


async def test_a_job_that_is_unaccounted_although_every_acknowledgement_is_reported_may_be_done_all_the_same(
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


# Workers in any language that only acknowledge: the server's ack metrics are the evidence of their jobs' ends.


JOBS = 600
FIRST = 50


async def measured(connection: NatsPyConnection, name: str, **consumer: Any) -> WorkQueue:
    """Return a queue whose consumer samples every acknowledgement, and whose workers have time on a loaded machine."""
    return await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "1m", **consumer})


@pytest.mark.slow
async def test_a_completion_and_a_metric_of_one_job_count_once_with_the_result(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await measured(connection, name)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(50)))
    last = await publish_jobs(connection, queue, ["last"], kind="by-hand")
    during = start_waiting(connection, mark, [*jobs, *last], WaitPolicy(min_completed=51))
    async with running_worker(Worker(queue, "worker", lambda job: job.sequence, settings)):
        await until_stored(connection, f"{name}-events", 102)
    (report,) = await wait_reports([during])
    assert during.remaining == list(range(51))[::-1]
    assert sorted(report.results.values()) == [*jobs, *last]
    # The metrics were read before, and hide no result from a waiter that joins late.
    keeping = start_waiting(connection, await take_cursor(connection, queue), [999])
    for _ in range(2):
        (late,) = await wait_reports([start_waiting(connection, mark, jobs)])
        assert sorted(late.results.values()) == jobs
    keeping.task.cancel()


async def test_a_terminated_or_nacked_job_has_no_metric(connection: NatsPyConnection, name: str) -> None:
    queue = await measured(connection, name, max_deliver=2)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, "abc")
    waiter = start_waiting(connection, mark, jobs, WaitPolicy(max_dead=None))
    first, second, third = await pull_jobs(connection, queue, 3)
    await first.term()
    await second.nak()
    await third.in_progress()
    (again,) = await pull_jobs(connection, queue, 1)
    assert waiter.remaining in ([], [2])
    await again.ack()
    await third.ack()
    (report,) = await wait_reports([waiter])
    assert (report.completed, set(report.dead)) == (set(jobs[1:]), {jobs[0]})


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 0.001, 0.003])
async def test_a_server_killed_during_many_acknowledgements_leaves_no_waiter_behind(
    own_nats: NatsServer, name: str, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.5)
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection, connect(settings) as worker:
        queue = await measured(connection, name, ack_wait="2s", max_deliver=20, max_ack_pending=JOBS)
        mark = await take_cursor(connection, queue)
        jobs = await publish_jobs(connection, queue, map(str, range(JOBS)))
        waiters = [start_waiting(connection, mark, [job], WaitPolicy(max_unaccounted=None)) for job in jobs]
        messages = await pull_jobs(worker, queue, JOBS)

        for message in messages[:FIRST]:
            await message.ack()
        await eventually(lambda: sum(waiter.task.done() for waiter in waiters) == FIRST)
        for message in messages[FIRST:]:
            await message.ack()
        # The client sends its buffer as soon as it runs, and the server is killed meanwhile.
        await asyncio.sleep(after)
        assert own_nats.pid
        os.kill(own_nats.pid, signal.SIGKILL)
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected and worker.client.is_connected)
        # Jobs whose acknowledgement the crash lost are delivered again, and done.
        working = asyncio.create_task(acknowledge_all(worker, queue))
        reports = await wait_reports(waiters, within=30)
        again = await working
        unaccounted = set().union(*(report.unaccounted for report in reports))
        completed = set().union(*(report.completed for report in reports))
        # Depending on the moment of the kill: 0 to 550 whose metrics were lost, and 0 to 360 to be done again.
        print(f"of {JOBS} jobs {len(unaccounted)} lost their metric with the server, {again} were done again")
        assert completed | unaccounted == set(jobs)
        assert all(not report.awaited and not report.dead for report in reports)
        assert len(completed) >= FIRST
        assert await stored_count(connection, name) == 0


async def acknowledge_all(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Do the jobs that the queue still delivers, and count them."""
    done = 0
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    while True:
        with suppress(TimeoutError, errors.Error):
            for message in await pull.fetch(100, timeout=0.5):
                await message.ack_sync()
                done += 1
        info = await consumer_info(connection, queue.name, CONSUMER)
        # A server before 2.12 that was killed may keep deliveries of jobs that are gone open for good.
        if not await stored_count(connection, queue.name) or not (info["num_pending"] or info["num_ack_pending"]):
            return done


@pytest.mark.slow
async def test_metrics_that_were_lost_leave_jobs_unaccounted_not_awaited(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COMPARISON_INTERVAL, 0.2)
    queue = await measured(connection, name)
    mark = await take_cursor(connection, queue)
    jobs = await publish_jobs(connection, queue, map(str, range(400)))
    waiter = start_waiting(connection, mark, jobs, WaitPolicy(max_unaccounted=None))
    messages = await pull_jobs(connection, queue, 400)
    for message in messages[:100]:
        await message.ack_sync()
    await eventually(lambda: len(waiter.remaining) == 100)
    # As with a server that is killed between an acknowledgement and its metric: no stream stores it.
    config = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    only_completions = {"subjects": [subject for subject in config["subjects"] if not subject.startswith("$JS")]}
    await connection.api(f"STREAM.UPDATE.{name}-events", config | only_completions)
    for message in messages[100:200]:
        await message.ack_sync()
    await connection.api(f"STREAM.UPDATE.{name}-events", config)
    for message in messages[200:300]:
        await message.ack_sync()
    for job in jobs[300:]:
        await store_completion(connection, queue, job)
    (report,) = await wait_reports([waiter])
    assert report.unaccounted == {message.metadata.sequence.stream for message in messages[100:200]}
    assert report.completed == set(jobs) - report.unaccounted


# Workers that outrun their ack wait run jobs twice, which nobody can prevent: everybody who looks is warned.


ENDS_JOBS = 50
SENTENCE = (
    "ended after the server had reported that their deliveries were used up: workers take longer than its ack wait of"
    " 500ms and report no progress"
)


def late(risks: Iterable[str]) -> list[str]:
    return [str(risk) for risk in risks if SENTENCE in risk]


async def slow_workers(connection: NatsPyConnection, name: str) -> tuple[WorkQueue, Sequence[Msg]]:
    """Have two slow workers after each other get all jobs, until the server has given up on each job."""
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "500ms"})
    await publish_jobs(connection, queue, map(str, range(ENDS_JOBS)))
    working = await pull_jobs(connection, queue, ENDS_JOBS)
    await pull_jobs(connection, queue, ENDS_JOBS)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, ENDS_JOBS)
    return queue, working


@pytest.mark.slow
async def test_jobs_that_slow_workers_end_late_are_warned_of(connection: NatsPyConnection, name: str) -> None:
    queue, working = await slow_workers(connection, name)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.letters), late(findings.risks)) == (ENDS_JOBS, [])
    for message in working:
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()
    findings = await find_dead_letters(connection, queue)
    (risk,) = late(findings.risks)
    assert risk.startswith(f"jobs of consumer worker of {name} {SENTENCE}")
    assert (findings.letters, len(findings.dismissed)) == ((), ENDS_JOBS)
    assert late((await summarise_dead_letters(connection, queue)).risks) == [risk]
    report = await redrive_dead_letters(connection, queue)
    assert late(report.risks) == [risk]
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
async def test_jobs_that_run_beside_their_copies_are_warned_of_when_they_end(
    connection: NatsPyConnection, name: str
) -> None:
    queue, _ = await slow_workers(connection, name)
    assert len((await redrive_dead_letters(connection, queue)).redriven) == ENDS_JOBS
    # The copies are as slow as the originals.
    working = await pull_jobs(connection, queue, ENDS_JOBS)
    await pull_jobs(connection, queue, ENDS_JOBS)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, ENDS_JOBS)
    for message in working:
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()
    assert len(late((await find_dead_letters(connection, queue)).risks)) == 1


@pytest.mark.slow
async def test_a_completion_after_the_last_delivery_has_run_out_is_warned_of(
    connection: NatsPyConnection, name: str
) -> None:
    queue, _ = await slow_workers(connection, name)
    await store_completion(connection, queue, 7)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.letters), len(late(findings.risks))) == (ENDS_JOBS - 1, 1)
    assert len(late((await preview(connection, queue, RedriveRequest())).risks)) == 1


@pytest.mark.slow
async def test_a_worker_that_is_stopped_between_completion_and_acknowledgement_is_not_late(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, sequence)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.dismissed), late(findings.risks)) == (1, [])


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_done_after_it_was_requeued_in_place_is_not_late(
    connection: NatsPyConnection, name: str
) -> None:
    # The entry stays.
    letters = {"name": f"{name}-dead", "deny_delete": True, "deny_purge": True}
    queue = await make_queue(connection, name, dead_letters=letters)
    (sequence,) = await publish_jobs(connection, queue, ["a"])
    await pull_jobs(connection, queue, 1)
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert list(report.redriven) == [sequence]
    (message,) = await pull_jobs(connection, queue, 1)
    await store_completion(connection, queue, sequence)
    await message.ack_sync()
    findings = await find_dead_letters(connection, queue)
    assert (len(findings.dismissed), late(findings.risks)) == (1, [])


async def evict(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await publish_jobs(connection, queue, map(str, range(ENDS_JOBS)))


async def expire(connection: NatsPyConnection, queue: WorkQueue) -> None:
    config = (await stream_info(connection, queue.name))["config"]
    await connection.api(f"STREAM.UPDATE.{queue.name}", config | {"max_age": 10**8, "duplicate_window": 10**8})


async def purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}")


async def roll_up(connection: NatsPyConnection, queue: WorkQueue) -> None:
    config = (await stream_info(connection, queue.name))["config"]
    await connection.api(f"STREAM.UPDATE.{queue.name}", config | {"allow_rollup_hdrs": True})
    await publish_jobs(connection, queue, ["rolled up"], headers={"Nats-Rollup": "all"})


async def delete(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in range(2, ENDS_JOBS + 1):
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence})


async def remove_the_consumer_and_purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"CONSUMER.DELETE.{queue.name}.worker")
    await purge(connection, queue)


@pytest.mark.slow
@pytest.mark.parametrize("remove", [evict, expire, purge, roll_up, delete, remove_the_consumer_and_purge])
async def test_nobody_is_blamed_for_jobs_that_no_worker_ended(
    connection: NatsPyConnection,
    name: str,
    remove: Callable[[NatsPyConnection, WorkQueue], Awaitable[None]],
) -> None:
    limits: dict[str, Any] = {"max_msgs": ENDS_JOBS, "discard": "old"}
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, **limits)
    # Of an earlier job, which a worker acknowledged in time.
    await publish_jobs(connection, queue, ["done", *map(str, range(ENDS_JOBS - 1))])
    done, *_ = await pull_jobs(connection, queue, ENDS_JOBS)
    await done.ack_sync()
    await asyncio.sleep(0.5)
    await wait_for_entries(connection, queue, ENDS_JOBS - 1)
    await remove(connection, queue)
    await eventually(lambda: _is_gone(connection, queue, ENDS_JOBS))
    findings = await find_dead_letters(connection, queue)
    assert len(findings.dismissed) == ENDS_JOBS - 1
    assert late(findings.risks) == late((await summarise_dead_letters(connection, queue)).risks) == []


async def _is_gone(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> bool:
    return await get_message(connection, queue.name, sequence) is None
