"""Workers that run the jobs of one consumer first and fall back to others, of the same stream and of another."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
import yaml

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import cancel, provision
from airflow_provider_jetstream.jetstream.contract import completion_filter, copy_subject
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.worker import Delivery, Worker
from airflow_provider_jetstream.worker.errors import WorkerSetupError
from testbed import seams
from testbed.face import last_message
from testbed.priority_consumers import (
    HIGH,
    LOW,
    QueueConsumer,
    count_deliveries,
    count_in_flight,
    make_priority_consumers,
    priority_queue,
    record_pull_requests,
)
from testbed.queues import completion_count, eventually, make_queue, publish_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

BOTH = pytest.mark.parametrize("streams", [1, 2], ids=["one stream", "two streams"])


def fallback(high: QueueConsumer, low: QueueConsumer) -> str | tuple[WorkQueue, str]:
    """Return the fallback in its shortest form."""
    return low.consumer.name if low.queue == high.queue else (low.queue, low.consumer.name)


async def publish_kind(
    connection: NatsPyConnection, ref: QueueConsumer, kind: str, count: int, *, job_id: str = ""
) -> list[int]:
    headers = {"Job-Id": job_id} if job_id else None
    return await publish_jobs(connection, ref.queue, [kind] * count, kind=kind, headers=headers)


def empty(connection: NatsPyConnection, *refs: QueueConsumer) -> Callable[[], object]:
    async def is_empty() -> bool:
        return not any([await stored_count(connection, ref.queue.name) for ref in refs])

    return is_empty


@pytest.mark.slow
@BOTH
async def test_urgent_jobs_run_first_and_others_when_there_are_none(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, streams: int
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=streams)
    await publish_kind(connection, low, LOW, 5)
    await publish_kind(connection, high, HIGH, 5)
    done: list[str] = []
    worker = Worker(
        high.queue,
        high.consumer.name,
        lambda job: done.append(job.body.decode()),
        settings,
        fallbacks=[fallback(high, low)],
    )
    async with running_worker(worker):
        await eventually(empty(connection, high, low))
        assert done == [HIGH] * 5 + [LOW] * 5
        await publish_kind(connection, low, LOW, 2)
        await eventually(lambda: len(done) == 12)
        await publish_kind(connection, high, HIGH, 2)
        await eventually(lambda: len(done) == 14)
    assert done[10:] == [LOW] * 2 + [HIGH] * 2
    assert (await count_deliveries(connection, high), await count_deliveries(connection, low)) == (7, 7)


@pytest.mark.slow
@BOTH
async def test_an_urgent_job_published_while_the_worker_is_full_is_the_next_one(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, streams: int
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=streams)
    await publish_kind(connection, low, LOW, 5)
    done: list[str] = []
    release = asyncio.Event()

    async def handle(job: Delivery) -> None:
        done.append(job.body.decode())
        if len(done) == 2:
            await publish_kind(connection, high, HIGH, 1)
            # Until the server has answered the probe.
            await asyncio.sleep(0.2)
        await release.wait()

    worker = Worker(high.queue, high.consumer.name, handle, settings, fallbacks=[fallback(high, low)])
    async with running_worker(worker):
        await eventually(lambda: done == [LOW])
        # Nothing else is pulled while several probes are answered or expire.
        for _ in range(30):
            assert await count_in_flight(connection, high, low) == 1
            await asyncio.sleep(0.05)
        release.set()
        await eventually(empty(connection, high, low))
    assert done == [LOW, LOW, HIGH, LOW, LOW, LOW]


@pytest.mark.slow
async def test_no_more_jobs_are_pulled_in_total_than_can_be_started(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    release = asyncio.Event()
    running: list[str] = []
    max_running = 0

    async def handle(job: Delivery) -> None:
        nonlocal max_running
        running.append(job.body.decode())
        max_running = max(max_running, len(running))
        await release.wait()
        running.remove(job.body.decode())

    async with running_worker(Worker(high.queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=5)):
        await publish_kind(connection, low, LOW, 2)
        await eventually(lambda: running == [LOW] * 2)
        await publish_kind(connection, high, HIGH, 20)
        await publish_kind(connection, low, LOW, 20)
        await eventually(lambda: len(running) == 5)
        for _ in range(30):
            assert await count_in_flight(connection, high, low) == 5
            await asyncio.sleep(0.05)
        release.set()
        await eventually(empty(connection, high, low))
    assert max_running == 5
    assert (await count_deliveries(connection, high), await count_deliveries(connection, low)) == (20, 22)


@pytest.mark.slow
@BOTH
async def test_a_job_of_any_consumer_starts_at_once_on_an_idle_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, streams: int
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=streams)
    started: list[float] = []
    worker = Worker(
        high.queue,
        high.consumer.name,
        lambda _: started.append(time.monotonic()),
        settings,
        fallbacks=[fallback(high, low)],
        concurrency=8,
    )
    async with running_worker(worker):
        for count in range(1, 11):
            published = time.monotonic()
            await publish_kind(connection, (high, low)[count % 2], (HIGH, LOW)[count % 2], 1)
            await eventually(lambda count=count: len(started) == count)  # type: ignore[misc]
            # Polling at the expiry of the requests would be late about half of the time.
            assert started[-1] - published < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 20])
@pytest.mark.parametrize("names", [(HIGH, LOW), (HIGH, "mid", LOW)], ids=["two consumers", "three consumers"])
async def test_of_ten_jobs_at_least_one_is_of_each_consumer_that_has_jobs(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, names: tuple[str, ...], slots: int
) -> None:
    queue = priority_queue(name, *names)
    await provision(connection, queue)
    for kind in names[1:]:
        await publish_jobs(connection, queue, [kind] * 12, kind=kind)
    await publish_jobs(connection, queue, [HIGH] * 100, kind=HIGH)
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())

    async with running_worker(Worker(queue, HIGH, handle, settings, fallbacks=names[1:], concurrency=slots)):
        await eventually(lambda: len(started) == 100 + 12 * (len(names) - 1), within=30)
    for start in range(90):
        assert set(started[start : start + 10]) == set(names)
    # And no more than its share while there are urgent jobs.
    assert started[:60].count(LOW) <= 7


@pytest.mark.slow
async def test_a_fallback_job_is_retried_given_up_and_copied_to_its_own_dead_letter_queue(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=2)
    attempts: list[tuple[str, int]] = []

    def handle(job: Delivery) -> None:
        attempts.append((job.body.decode(), job.attempt))
        if job.body == LOW.encode():
            raise ValueError("no such printer")

    worker = Worker(high.queue, "worker", handle, settings, fallbacks=[fallback(high, low)], name="w")
    await publish_kind(connection, low, LOW, 1)
    await publish_kind(connection, high, HIGH, 1)
    letters = f"{low.queue.name}-dead"
    async with running_worker(worker):
        copy = await eventually(lambda: last_message(connection, letters, copy_subject(low.queue.name, "worker", 1)))
        await eventually(empty(connection, high))
    assert copy is not None
    assert attempts == [(HIGH, 1), (LOW, 1), (LOW, 2), (LOW, 3)]
    assert (copy.data, copy.header("Dead-Letter-Consumer")) == (LOW.encode(), "worker")
    assert await stored_count(connection, f"{high.queue.name}-dead") == 0
    completion = await last_message(connection, f"{high.queue.name}-events", completion_filter(high.queue.name))
    assert completion is not None
    assert (completion.subject, json.loads(completion.data)["worker"]) == (f"completed.{high.queue.name}.worker.1", "w")
    assert await completion_count(connection, low.queue.name) == 0


@pytest.mark.slow
@BOTH
async def test_jobs_of_every_consumer_can_be_cancelled_before_and_while_they_run(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, streams: int
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=streams)
    started: list[str] = []
    ended: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.id)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(job.id)

    for ref, kind in ((high, HIGH), (low, LOW)):
        await publish_kind(connection, ref, kind, 1, job_id=f"{kind} queued")
        await cancel(connection, ref.queue, f"{kind} queued")
        await publish_kind(connection, ref, kind, 1, job_id=f"{kind} running")
    worker = Worker(high.queue, high.consumer.name, handle, settings, fallbacks=[fallback(high, low)], concurrency=2)
    async with running_worker(worker):
        await eventually(lambda: len(started) == 2)
        await cancel(connection, high.queue, "high running")
        await cancel(connection, low.queue, "low running")
        await eventually(empty(connection, high, low))
    assert (sorted(started), sorted(ended)) == (["high running", "low running"],) * 2


@pytest.mark.slow
async def test_a_stopped_worker_ends_promptly_without_pulling_more_jobs(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=2)
    jobs: list[Delivery] = []
    worker = Worker(high.queue, "worker", jobs.append, settings, fallbacks=[fallback(high, low)], concurrency=5)
    async with running_worker(worker):
        await publish_kind(connection, low, LOW, 1)
        await eventually(lambda: len(jobs) == 1)
        await eventually(empty(connection, low))
        worker.stop()
        await publish_kind(connection, low, LOW, 2)
        await publish_kind(connection, high, HIGH, 2)
    assert len(jobs) == 1
    # The pull request of a worker with one consumer may fetch jobs at that moment; a probe can't.
    assert (await count_deliveries(connection, high), await count_deliveries(connection, low)) == (0, 1)


@pytest.mark.slow
async def test_a_stopped_idle_worker_does_not_wait_for_its_probes(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test waits for the worker.
    monkeypatch.setattr(seams.FETCHING_PULL_EXPIRES, 60)
    high, low = await make_priority_consumers(connection, name)
    worker = Worker(high.queue, HIGH, print, settings, fallbacks=[LOW])
    async with record_pull_requests(connection, high, low) as requests, running_worker(worker):
        # The requests of the first fetches, and at least one probe for each consumer.
        await eventually(lambda: len(requests) > 6)


@pytest.mark.slow
async def test_a_job_cut_off_by_the_grace_time_is_handed_back_to_its_own_consumer(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=2)
    for ref, kind in ((high, HIGH), (low, LOW)):
        await publish_kind(connection, ref, kind, 1)
    started: list[str] = []

    async def hang(job: Delivery) -> None:
        started.append(job.body.decode())
        await asyncio.sleep(60)

    worker = Worker(high.queue, "worker", hang, settings, fallbacks=[fallback(high, low)], concurrency=2, grace=0.1)
    async with running_worker(worker):
        await eventually(lambda: len(started) == 2)
    redelivered: list[tuple[bytes, int]] = []
    for ref in (high, low):
        # Sooner than the ack wait of thirty seconds.
        other = Worker(ref.queue, "worker", lambda job: redelivered.append((job.body, job.attempt)), settings)
        async with running_worker(other):
            await eventually(empty(connection, ref), within=3)
    assert redelivered == [(HIGH.encode(), 2), (LOW.encode(), 2)]


async def test_metrics_and_log_lines_name_the_consumer_of_the_job(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jetstream.worker")
    high, low = await make_priority_consumers(connection, name)
    release = asyncio.Event()

    async def handle(job: Delivery) -> None:
        if job.body == b"wait":
            await release.wait()

    worker = Worker(high.queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=2, name="w", metrics_port=0)
    async with running_worker(worker):
        match = await eventually(lambda: re.search(r"metrics on port (\d+)", caplog.text))
        assert match is not None
        await publish_kind(connection, high, HIGH, 2)
        await publish_kind(connection, low, LOW, 1)
        await eventually(empty(connection, high))
        await publish_jobs(connection, low.queue, ["wait"], kind=LOW)
        await eventually(lambda: count_in_flight(connection, low))
        address = f"http://127.0.0.1:{match[1]}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=5).read())).decode()
        release.set()
    for consumer, jobs, running in ((HIGH, 2, 0), (LOW, 1, 1)):
        label = f'consumer="{consumer}"'
        assert f'jetstream_worker_jobs_total{{{label},outcome="completed",stream="{name}",worker="w"}} {jobs}.0' in text
        assert f'jetstream_worker_running_jobs{{{label},stream="{name}",worker="w"}} {running}.0' in text
        assert f'jetstream_worker_abandoned_jobs{{{label},stream="{name}",worker="w"}} 0.0' in text
    assert f"w takes jobs of {name}/high, then of {name}/low" in caplog.text
    ended = [record.__dict__["job"] for record in caplog.records if "job" in record.__dict__]
    # Two at a time may end in any order.
    assert sorted(job["consumer"] for job in ended) == [HIGH, HIGH, LOW, LOW]


@pytest.fixture
def queue_files(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Write the files of two queues, the first with two consumers."""
    files = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first = priority_queue(f"{name}-first").model_dump(mode="json", exclude_unset=True)
    second = priority_queue(f"{name}-second", LOW).model_dump(mode="json", exclude_unset=True)
    for file, declared in zip(files, (first, second), strict=True):
        file.write_text(yaml.safe_dump(declared))
    (tmp_path / "fallback_handlers.py").write_text("def echo(job):\n    return job.body.decode()\n")
    return files


@pytest.mark.slow
async def test_the_command_takes_fallbacks_of_the_same_queue_and_of_another_file(
    connection: NatsPyConnection, nats: NatsServer, name: str, queue_files: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = (priority_queue(f"{name}-first"), priority_queue(f"{name}-second", LOW))
    for queue in (first, second):
        await provision(connection, queue)
        await publish_jobs(connection, queue, ["job"], kind=LOW)
    await publish_jobs(connection, first, ["job"], kind=HIGH)
    environment = {**os.environ, "NATS_URL": nats.url, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = start_worker(
        "w",
        queue=queue_files[0],
        consumer=HIGH,
        fallbacks=(LOW, f"{queue_files[1]}:{LOW}"),
        handler="fallback_handlers:echo",
        env=environment,
        logs=tmp_path,
    )
    try:
        refs = [QueueConsumer(queue, queue.consumer(LOW)) for queue in (first, second)]
        await eventually(empty(connection, *refs), within=20)
    finally:
        await asyncio.to_thread(process.terminate)
    ends = re.findall(r"outcome=completed", process.output())
    places = re.findall(r"stream=(\S+) consumer=(\S+)", process.output())
    assert len(ends) == 3
    assert places == [(first.name, HIGH), (first.name, LOW), (second.name, LOW)]
    assert process.returncode == 0


async def test_invalid_fallbacks_are_refused_with_what_to_do(settings: ConnectionSettings, name: str) -> None:
    queue, other = priority_queue(name), priority_queue(f"{name}-other")
    cases: list[tuple[list[str | tuple[WorkQueue, str]], str]] = [
        (
            [HIGH],
            f"expected each consumer once, found {name}/high twice among the worker's own and its fallbacks: drop one",
        ),
        ([LOW, (queue, LOW)], f"expected each consumer once, found {name}/low twice"),
        ([(other, LOW), (other, LOW)], f"expected each consumer once, found {name}-other/low twice"),
        (
            [(priority_queue(name, max_deliver=7), LOW)],
            f"expected one declaration of work queue {name}, found two that differ",
        ),
    ]
    for fallbacks, text in cases:
        with pytest.raises(WorkerSetupError, match=re.escape(text)):
            Worker(queue, HIGH, print, settings, fallbacks=fallbacks)
    for unknown in ("mid", (other, "mid")):
        with pytest.raises(
            QueueDeclarationError, match=re.escape("expected one of its consumers (high, low), found 'mid'")
        ):
            Worker(queue, HIGH, print, settings, fallbacks=[unknown])
    many = priority_queue(f"{name}-many", *(str(number) for number in range(11)))
    assert (
        len(Worker(many, "0", print, settings, fallbacks=[str(number) for number in range(1, 10)]).consumer_refs) == 10
    )
    with pytest.raises(WorkerSetupError, match="expected at most 9 fallbacks, found 10: run another worker"):
        Worker(many, "0", print, settings, fallbacks=[str(number) for number in range(1, 11)])


async def test_a_missing_fallback_is_named_before_any_job_is_pulled(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, jobs=["a"])
    absent = priority_queue(f"{name}-absent")
    text = f"expected stream {name}-absent on the server, found none: provision the queue first"
    with pytest.raises(LookupError, match=text):
        await Worker(queue, "worker", print, settings, fallbacks=[(absent, LOW)]).run()
    assert await count_deliveries(connection, QueueConsumer(queue, queue.consumers[0])) == 0


# Workers with strict priorities: no job of a consumer is started while a more urgent one has any.


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 20])
async def test_every_urgent_job_is_started_before_any_other(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, slots: int
) -> None:
    names = (HIGH, "mid", LOW)
    queue = priority_queue(name, *names)
    await provision(connection, queue)
    for kind in reversed(names):
        await publish_jobs(connection, queue, [kind] * 100, kind=kind)
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())

    worker = Worker(queue, HIGH, handle, settings, fallbacks=names[1:], concurrency=slots, priorities="strict")
    async with running_worker(worker):
        await eventually(lambda: len(started) == 300, within=30)
    assert started == [kind for kind in names for _ in range(100)]


@pytest.mark.slow
async def test_urgent_jobs_that_keep_coming_starve_the_others(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name, streams=2)
    await publish_jobs(connection, low.queue, [LOW] * 5)
    await publish_jobs(connection, high.queue, [HIGH] * 5)
    started: list[str] = []

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())
        if job.body == HIGH.encode() and len(started) <= 50:
            # Another one before this one is done, so that there always are some.
            await publish_jobs(connection, high.queue, [HIGH])

    worker = Worker(
        high.queue, "worker", handle, settings, fallbacks=[(low.queue, "worker")], concurrency=2, priorities="strict"
    )
    async with running_worker(worker):
        await eventually(lambda: len(started) == 60, within=20)
    assert started == [HIGH] * 55 + [LOW] * 5


@pytest.mark.slow
async def test_a_job_of_any_consumer_starts_on_an_idle_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    high, low = await make_priority_consumers(connection, name)
    started: list[str] = []
    worker = Worker(
        high.queue, HIGH, lambda job: started.append(job.body.decode()), settings, fallbacks=[LOW], priorities="strict"
    )
    expected: list[str] = []
    async with running_worker(worker):
        for ref, kind in ((low, LOW), (high, HIGH), (low, LOW), (high, HIGH)):
            await publish_jobs(connection, ref.queue, [kind], kind=kind)
            expected.append(kind)
            await eventually(lambda: started == expected, within=2)


@pytest.mark.slow
async def test_a_consumer_that_has_all_its_jobs_in_flight_does_not_hold_up_the_others(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = priority_queue(name, max_ack_pending=1)
    await provision(connection, queue)
    await publish_jobs(connection, queue, [HIGH] * 3, kind=HIGH)
    await publish_jobs(connection, queue, [LOW] * 3, kind=LOW)
    started: list[str] = []
    release = asyncio.Event()

    async def handle(job: Delivery) -> None:
        started.append(job.body.decode())
        if job.body == HIGH.encode():
            await release.wait()

    worker = Worker(queue, HIGH, handle, settings, fallbacks=[LOW], concurrency=3, priorities="strict")
    async with running_worker(worker):
        await eventually(lambda: started == [HIGH, LOW, LOW, LOW])
        release.set()
        await eventually(lambda: len(started) == 6)


def test_an_unknown_order_is_refused(settings: ConnectionSettings, name: str) -> None:
    with pytest.raises(ValueError, match="expected priorities of fair or strict, found 'none'"):
        Worker(priority_queue(name), HIGH, print, settings, fallbacks=[LOW], priorities="none")  # type: ignore[arg-type]
