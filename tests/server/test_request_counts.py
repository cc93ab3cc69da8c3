"""How many requests and messages an operation sends to the server."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import Job, Origin, find_dead_letters, publish, redrive_dead_letters
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed import seams
from testbed.dead_letters import store_task
from testbed.queues import CONSUMER, exhaust_deliveries, make_queue, publish_jobs, pull_jobs
from testbed.sent_frames import sent_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.face import NatsPyConnection


@contextmanager
def published_subjects(connection: NatsPyConnection, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the subject of everything that the client publishes until the block ends, requests included."""
    subjects: list[str] = []
    write = connection.write

    def record_written(frames: bytes, messages: int = 1) -> None:
        sent = [subject for subject, _ in sent_messages(frames)]
        assert len(sent) == messages
        subjects.extend(sent)
        write(frames, messages)

    with monkeypatch.context() as patch:
        patch.setattr(connection, "write", record_written)
        yield subjects


async def test_publishing_one_job_takes_one_request(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    with published_subjects(connection, monkeypatch) as subjects:
        report = await publish(connection, queue, [Job(b"x")], subject=f"{name}.jobs.x")
    assert list(report.sequences) == [1]
    # What the hook's publish does, too.
    assert subjects == [f"{name}.jobs.x"]


async def test_publishing_one_job_as_a_task_takes_two_requests_and_two_for_its_manifest(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    operator = JetStreamPublishOperator(task_id="t", work_queue=queue, jobs=[])
    origin, jobs = Origin("dag", "run", "t", max_tries=0), [Job(b"x", f"{name}.jobs.x")]
    with published_subjects(connection, monkeypatch) as subjects:
        await operator._publish(connection, queue, jobs, origin)  # noqa: SLF001
    record = f"published.{name}.{origin.key}"
    # The two records make a retry, and a cleared task, publish what they should.
    assert subjects == [f"$JS.API.STREAM.INFO.{name}", record, f"{name}.jobs.x", record]


async def test_a_task_that_waits_for_one_job_reads_each_stream_once_before_it_publishes(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    operator = JetStreamPublishOperator(task_id="t", work_queue=queue, jobs=[], wait_for_completion=True)
    origin, job = Origin("dag", "run", "t", max_tries=0), f"{name}.jobs.x"

    async def wait_inline(*_: object) -> None:
        return None

    monkeypatch.setattr(operator, "wait_inline", wait_inline)
    with published_subjects(connection, monkeypatch) as subjects:
        await operator._publish(connection, queue, [Job(b"x", job)], origin)  # noqa: SLF001
    record = f"published.{name}.{origin.key}"
    infos = [f"$JS.API.STREAM.INFO.{stream}" for stream in (name, f"{name}-events", f"{name}-dead", f"{name}-audit")]
    assert subjects == [*infos, record, job, record]


def scan_requests(name: str) -> list[str]:
    """Return what finding the dead letters 1 and 2 sends, whose advisories are stored."""
    return [
        # The stored jobs are counted between two reads of the consumers that agree.
        f"$JS.API.CONSUMER.LIST.{name}",
        f"$JS.API.STREAM.INFO.{name}",
        f"$JS.API.CONSUMER.LIST.{name}",
        # All companions together.
        "$JS.API.STREAM.LIST",
        *[f"$JS.API.STREAM.MSG.GET.{name}-dead"] * 2,
        # Events and audit are still empty, so nothing is read from them.
        "$JS.API.STREAM.LIST",
        *[f"$JS.API.STREAM.MSG.GET.{name}"] * 2,
    ]


async def test_finding_two_dead_letters_takes_at_most_ten_requests(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.SCAN_FRESH_SECONDS, 30.0)
    queue = await make_queue(connection, name, dead=["a", "b"])
    with published_subjects(connection, monkeypatch) as subjects:
        found = await find_dead_letters(connection, queue)
    assert [letter.body for letter in found.letters] == [b"a", b"b"]
    assert subjects == scan_requests(name)
    assert len(subjects) <= 10


@pytest.mark.slow
async def test_jobs_in_flight_take_one_request_more_that_says_since_when_the_server_has_been_up(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.SCAN_FRESH_SECONDS, 30.0)
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"}, dead=["a", "b"])
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    with published_subjects(connection, monkeypatch) as subjects:
        found = await find_dead_letters(connection, queue)
    assert [letter.body for letter in found.letters] == [b"a", b"b"]
    uptime = f"$JS.API.CONSUMER.INFO.{name}-audit.uptime"
    # The probe, after which the consumers are read again, and what is stored up to the acknowledgement floor.
    rest = Counter(subjects) - Counter(scan_requests(name))
    assert rest[uptime] == 1
    assert [subject for subject in rest if f"{name}-audit" in subject] == [uptime]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 9])
async def test_the_letters_of_two_tasks_take_five_requests_and_three_for_each_letter_and_one_for_each_task(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(seams.SCAN_FRESH_SECONDS, 30.0)
    queue = await make_queue(connection, name)
    tasks = [Origin("dag", "run", "t", index) for index in range(2)]
    for number in range(count):
        await store_task(connection, queue, tasks[number % 2])
        await publish_jobs(connection, queue, ["x"], headers={"Airflow-Task": tasks[number % 2].key})
    await exhaust_deliveries(connection, queue, count)
    with published_subjects(connection, monkeypatch) as subjects:
        found = await find_dead_letters(connection, queue)
    assert [letter.origin for letter in found.letters] == [tasks[number % 2] for number in range(count)]
    assert Counter(subjects) == {
        f"$JS.API.CONSUMER.LIST.{name}": 2,
        f"$JS.API.STREAM.INFO.{name}": 1,
        "$JS.API.STREAM.LIST": 2,
        f"$JS.API.STREAM.MSG.GET.{name}-dead": count,
        f"$JS.API.STREAM.MSG.GET.{name}": count,
        # Whether each job is completed, and the record of each task.
        f"$JS.API.STREAM.MSG.GET.{name}-events": count + len(tasks),
    }


def leased_scan_requests(name: str) -> list[str]:
    """Return what a redrive of the dead letters 1 and 2 sends until they are proved."""
    return [
        # Whether somebody else has the lease.
        f"$JS.API.STREAM.MSG.GET.{name}-audit",
        f"audit.{name}.lease",
        *scan_requests(name),
        # The audit isn't empty any more: each letter's last record.
        *[f"$JS.API.STREAM.MSG.GET.{name}-audit"] * 2,
        # The redrive itself, which may have been begun, and what people asked of it.
        *[f"$JS.API.STREAM.MSG.GET.{name}-audit"] * 2,
        f"audit.{name}.redrives.*",
    ]


def without_operation(subjects: list[str]) -> list[str]:
    """Return subjects with ``*`` in place of the id of an operation."""
    return [re.sub(r"(?<=intents\.)[0-9a-f]{32}$|(?<=redrives\.)[0-9T]+-[0-9a-f]{8}$", "*", s) for s in subjects]


@pytest.mark.slow
async def test_redriving_two_dead_letters_takes_at_most_twenty_eight_requests(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.SCAN_FRESH_SECONDS, 30.0)
    queue = await make_queue(connection, name, consumer={"ack_wait": "50ms"}, dead=["a", "b"])
    # No worker can be working on the jobs any more, so that the redrive doesn't wait.
    await asyncio.sleep(0.05)
    with published_subjects(connection, monkeypatch) as subjects:
        report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {1: 3, 2: 4}
    steps = [
        # One intent for the batch.
        f"audit.{name}.intents.*",
        *[f"{name}.jobs.plain"] * 2,
        *[f"audit.{name}.letters.{job}" for job in (1, 2)],
        *[late_ack_subject(name, CONSUMER, job) for job in (1, 2)],
        # Whether an original is still stored.
        f"$JS.API.STREAM.MSG.GET.{name}",
        *[f"$JS.API.STREAM.MSG.DELETE.{name}-dead"] * 2,
        f"audit.{name}.redrives.*",
        f"audit.{name}.lease",
    ]
    assert Counter(without_operation(subjects[: -len(steps)])) == Counter(leased_scan_requests(name))
    assert without_operation(subjects[-len(steps) :]) == steps
    assert len(subjects) <= 28


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 20])
async def test_a_redrive_takes_one_message_for_the_intents_of_a_batch(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "50ms"}, dead=map(str, range(count)))
    with published_subjects(connection, monkeypatch) as subjects:
        report = await redrive_dead_letters(connection, queue)
    assert len(report.redriven) == count
    assert without_operation(subjects).count(f"audit.{name}.intents.*") == 1


@pytest.mark.slow
async def test_a_redrive_that_waits_for_workers_reads_the_consumers_and_proves_the_letters_once_more(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.SCAN_FRESH_SECONDS, 30.0)
    # After the ack wait nothing is waited for.
    queue = await make_queue(connection, name, consumer={"ack_wait": "3s"}, dead=["a", "b"])
    with published_subjects(connection, monkeypatch) as subjects:
        report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {1: 3, 2: 4}
    server_time, what_people_ask = f"$JS.API.STREAM.INFO.{name}", f"$JS.API.STREAM.MSG.GET.{name}-audit"
    again = [f"$JS.API.CONSUMER.LIST.{name}", "$JS.API.STREAM.LIST", *[f"$JS.API.STREAM.MSG.GET.{name}"] * 2]
    # While it waits, it reads each second whether a person stops it.
    requests, scan = (
        [subject for subject in listed if subject != what_people_ask]
        for listed in (subjects, leased_scan_requests(name))
    )
    expected = [*scan, server_time, *again]
    assert Counter(without_operation(requests[: len(expected)])) == Counter(expected)
    assert len(requests) == 28
