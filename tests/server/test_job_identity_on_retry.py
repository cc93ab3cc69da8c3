"""A retry of a task recognises its jobs by their identity, whatever became of the list and of the try before it."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_taken_message_ids import prepared_jobs

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    Publication,
    PublishRefusedError,
    connect,
    connection_settings,
    publish,
)
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
from airflow_provider_jetstream.jetstream.errors import JobError, WrongStreamError
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest, read_manifest_sequences
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from testbed import seams
from testbed.dead_letters import change_stream, stream_messages
from testbed.face import last_message, publish_until_killed, stream_info
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, pull_jobs, running_mover, store_completion, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from airflow_provider_jetstream.jetstream import PublishReport, WorkQueue
    from testbed.face import NatsPyConnection, StoredMessage

WINDOW: dict[str, Any] = {"duplicate_window": "100ms"}
AFTER_WINDOW = 0.25
ORIGIN = Origin("dag", "run", "task", max_tries=1)


async def run_try(
    connection: NatsPyConnection,
    queue: WorkQueue,
    jobs: Iterable[object],
    *,
    origin: Origin = ORIGIN,
    killed_after: int | None = None,
) -> PublishReport | None:
    """Publish as a try of a task does; one that is killed stores some of its jobs and records nothing afterwards.

    :param killed_after: how many of the jobs it has stored by then
    """
    subject = f"{queue.name}.jobs.x"
    if killed_after is not None:
        await publish_until_killed(connection, queue, list(jobs)[:killed_after], origin, subject=subject)
        return None
    return await publish(connection, queue, jobs, subject=subject, origin=origin)


async def bodies_of(connection: NatsPyConnection, name: str) -> list[bytes]:
    return [message.data for message in await stream_messages(connection, name)]


@pytest.mark.slow
async def test_a_retry_of_a_recorded_try_in_another_order_stores_what_is_missing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=3, archive=False, **WINDOW)
    with pytest.raises(Exception, match="3 of 6 jobs are stored"):
        await run_try(connection, queue, "abcdef")
    for message in await pull_jobs(connection, queue, 3):
        await message.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    report = await run_try(connection, queue, "fdbeca")
    assert report is not None
    assert sorted(await bodies_of(connection, name)) == [b"d", b"e", b"f"]
    assert report.duplicates == 3


async def test_a_changed_body_under_a_known_id_is_refused_and_nothing_is_sent(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **WINDOW)
    await run_try(connection, queue, [Job(b"charge", id="7")])
    with pytest.raises(JobError, match=r"job 1 has the id '7', under which this task has stored another body \(seq"):
        await run_try(connection, queue, [Job(b"new", id="8"), Job(b"refund", id="7")])
    assert await bodies_of(connection, name) == [b"charge"]
    report = await run_try(connection, queue, [Job(b"new", id="8"), Job(b"charge", id="7")])
    assert report is not None
    assert list(report.sequences) == [2, 1]


async def test_a_changed_body_is_refused_where_the_try_before_was_killed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=True, **WINDOW)
    await run_try(connection, queue, [Job(b"charge", id="7")], killed_after=1)
    for message in await pull_jobs(connection, queue, 1):
        await message.ack_sync()
    with pytest.raises(JobError, match="job 0 has the id '7', under which this task has stored another body"):
        await run_try(connection, queue, [Job(b"refund", id="7")])


async def test_what_the_server_has_under_a_message_id_is_compared(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None)
    subject = f"{name}.jobs.x"
    (job,) = prepared_jobs(queue, [Job(b"charge", id="7")], ORIGIN)
    # Somebody else, or a try that recorded nothing.
    stranger = connection.client.jetstream()
    await stranger.publish(subject, b"refund", headers={"Nats-Msg-Id": job.message_id})
    with pytest.raises(PublishRefusedError, match=r"another one there \(sequence 1\)"):
        await publish(connection, queue, [Job(b"charge", id="7"), b"b"], subject=subject, origin=ORIGIN)
    assert await bodies_of(connection, name) == [b"refund", b"b"]
    report = await publish(connection, queue, [b"b"], subject=subject, origin=ORIGIN)
    assert (list(report.sequences), report.duplicates, report.repeated) == ([2], 1, [])


async def test_two_jobs_with_one_id_are_refused_with_both_positions(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    twins = [Job(b"a", id="7"), b"b", Job(b"c", id="7")]
    with pytest.raises(JobError, match="jobs 0 and 2 both have the id '7'"):
        await publish(connection, queue, twins, subject=f"{name}.jobs.x")
    assert await stored_count(connection, name) == 0
    # What an iterator gives is refused at that point, and those before it are reported.
    with pytest.raises(JobError, match="jobs 0 and 2 both have the id '7'") as caught:
        await publish(connection, queue, iter(twins), subject=f"{name}.jobs.x", origin=ORIGIN)
    assert any("2 jobs before are stored" in note for note in caught.value.__notes__)
    assert await bodies_of(connection, name) == [b"a", b"b"]


async def test_the_id_in_a_body_identifies_nothing_unless_it_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [{"id": 7, "do": "charge"}, {"id": 7, "do": "refund"}]
    report = await publish(connection, queue, jobs, subject=f"{name}.jobs.x", origin=ORIGIN)
    assert list(report.sequences) == [1, 2]
    for job_id in ("id", lambda job: job["id"]):
        with pytest.raises(JobError, match="jobs 0 and 1 both have the id '7'"):
            await publish(connection, queue, jobs, subject=f"{name}.jobs.x", job_id=job_id)
    report = await publish(connection, queue, jobs, subject=f"{name}.jobs.x", job_id="do")
    stored = (await stream_messages(connection, name))[2:]
    assert [message.header("Job-Id") for message in stored] == ["charge", "refund"]


@pytest.mark.parametrize(
    ("job_id", "job", "found"),
    [
        ("id", b"text", "another body"),
        ("id", {"no": 1}, "found None"),
        ("id", {"id": 1.5}, "found 1.5"),
        ("id", {"id": True}, "found True"),
        ("id", {"id": " "}, "found ' '"),
        (lambda job: job["x"], {"id": 1}, "found KeyError: 'x'"),
        (lambda _: None, {"id": 1}, "found None"),
    ],
)
async def test_an_id_that_its_source_does_not_give_is_refused(
    connection: NatsPyConnection, name: str, job_id: Any, job: object, found: str
) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(JobError, match="job 1: expected") as caught:
        await publish(connection, queue, [Job(b"x", id="1"), job], subject=f"{name}.jobs.x", job_id=job_id)
    assert found in str(caught.value)
    assert await stored_count(connection, name) == 0


async def test_only_the_documented_form_takes_its_id_from_the_body(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, advisory_subjects=[f"{name}-advisory.>"])
    image = {"id": 7, "advisory": f"{name}-advisory.7"}
    report = await publish(connection, queue, [image], subject=f"{name}.jobs.x", origin=ORIGIN)
    assert list(report.sequences) == [1]
    with pytest.raises(JobError, match="job 0 has the id '7', under which this task has stored another body"):
        await publish(connection, queue, [image | {"size": 1}], subject=f"{name}.jobs.x", origin=ORIGIN)


async def test_stored_jobs_that_a_retry_no_longer_lists_are_extra(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, **WINDOW)
    await run_try(connection, queue, "abc", killed_after=2)
    first = await run_try(connection, queue, "bx")
    assert first is not None
    assert (list(first.sequences), list(first.extra), first.awaited()) == ([2, 3], [1], {1, 2, 3})
    again = await run_try(connection, queue, "c")
    assert again is not None
    assert (list(again.sequences), sorted(again.extra)) == ([4], [1, 2, 3])
    sequences = await read_manifest_sequences(connection, f"{name}-events", name, ORIGIN.manifest_key)
    assert sequences is not None
    assert sorted(sequences) == [1, 2, 3, 4]


@pytest.mark.slow
async def test_a_retry_after_success_publishes_nothing_and_a_clear_everything(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    await run_try(connection, queue, "ab")
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    # The worker of Airflow was lost after the last job was stored.
    retry = await run_try(connection, queue, "ba")
    assert retry is not None
    assert (list(retry.sequences), retry.duplicates) == ([2, 1], 2)
    cleared = replace(ORIGIN, max_tries=3)
    for duplicates in (0, 2):
        report = await run_try(connection, queue, "ab", origin=cleared)
        assert report is not None
        assert (list(report.sequences), report.duplicates) == ([3, 4], duplicates)


@pytest.mark.slow
async def test_two_calls_of_a_task_have_jobs_of_their_own(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, **WINDOW)
    calls = [ORIGIN, replace(ORIGIN, operation="second")]
    for duplicates in (0, 1):
        for number, origin in enumerate(calls, 1):
            report = await publish(connection, queue, ["same"], subject=f"{name}.jobs.x", origin=origin)
            assert (list(report.sequences), report.duplicates, list(report.extra)) == ([number], duplicates, [])
        for message in await pull_jobs(connection, queue, 2) if not duplicates else []:
            await message.ack_sync()
        await asyncio.sleep(AFTER_WINDOW)


async def test_a_job_that_another_stream_would_store_is_not_sent(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    other = await make_queue(connection, f"{name}2")
    with pytest.raises(JobError, match=f"job 1 can't be published to '{name}2.jobs.x': expected a subject of {name}"):
        await publish(connection, queue, [b"a", Job(b"b", f"{name}2.jobs.x")], subject=f"{name}.jobs.x", origin=ORIGIN)
    assert [await stored_count(connection, stream) for stream in (name, other.name)] == [0, 0]


async def test_a_job_that_another_stream_has_stored_fails_and_ends_publishing(
    connection: NatsPyConnection, name: str
) -> None:
    queue, other = await make_queue(connection, name), f"{name}2"
    async with Publication(connection, queue, ORIGIN) as publication:
        # Somebody changes the streams' subjects meanwhile.
        await change_stream(connection, name, subjects=[f"{name}.gone"])
        await connection.api(f"STREAM.CREATE.{other}", {"name": other, "subjects": [f"{name}.jobs.>"]})
        endless = (f"{number}" for number in count())
        with pytest.raises(PublishRefusedError) as caught:
            await publication.publish(endless, subject=f"{name}.jobs.x")
    report = caught.value.report
    assert f"expected {name} to store it, found that {other} did, as sequence 1" in str(caught.value)
    assert {type(failure.error) for failure in report.failures} == {WrongStreamError}
    assert (report.is_cut, len(report.failures)) == (True, len(report.sequences))
    assert await stored_count(connection, other) < len(report.sequences)


async def test_parts_that_the_events_have_forgotten_are_made_up_for_by_a_search(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_PART_ROWS", "_INLINE_ROWS"):
        monkeypatch.setattr(f"{seams.MANIFEST}.{limit}", 2)
    queue = await make_queue(connection, name, archive=True, **WINDOW)
    await run_try(connection, queue, "abcdefg")
    for message in await pull_jobs(connection, queue, 7):
        await message.ack_sync()
    await connection.api(f"STREAM.PURGE.{name}-events", {"filter": f"published.{name}.{ORIGIN.key}-jobs"})
    assert await read_manifest_sequences(connection, f"{name}-events", name, ORIGIN.key) is None
    await asyncio.sleep(AFTER_WINDOW)
    report = await run_try(connection, queue, "gfedcbah")
    assert report is not None
    assert list(report.sequences) == [7, 6, 5, 4, 3, 2, 1, 8]


VARIANTS = [
    Job("same", headers={"Kind": "a"}),
    Job("same", headers={"Kind": "b"}),
    Job("same", delay="1h"),
    Job("same", delay=timedelta(hours=2)),
    Job("same", at="2126-01-01T00:00:00Z"),
    Job("same", advisory="advisory.a"),
    Job("same"),
    Job("same"),
]


def variant_of(message: StoredMessage) -> tuple[str | None, ...]:
    names = ("Kind", "Job-Advisory", "Nats-Schedule")
    # The time that a delay gives counts from the try.
    return tuple((message.header(name) or "")[:17] for name in names)


@pytest.mark.since_server("2.14", "schedules")
async def test_jobs_of_one_body_that_differ_in_headers_or_schedule_are_not_exchanged(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, schedules=True, advisory_subjects=["advisory.>"], **WINDOW)
    await run_try(connection, queue, VARIANTS, killed_after=4)
    await asyncio.sleep(AFTER_WINDOW)
    report = await run_try(connection, queue, VARIANTS[::-1])
    assert report is not None
    assert (report.stored, report.duplicates, list(report.extra)) == (8, 4, [])
    streams = (name, f"{name}-schedules")
    stored = [variant_of(message) for stream in streams for message in await stream_messages(connection, stream)]
    assert len(stored) == 8
    assert len(set(stored)) == 7, "two of them are equal, and no other is twice"


@pytest.mark.slow
@pytest.mark.since_server("2.14", "schedules")
@pytest.mark.parametrize("found", ["in the queue", "done", "due, and not taken by a full queue"])
@pytest.mark.parametrize("job_id", [None, "7"])
async def test_a_schedule_that_has_fired_is_not_stored_again(
    connection: NatsPyConnection, name: str, found: str, job_id: str | None
) -> None:
    limits: dict[str, Any] = {"discard": "new", "max_msgs": 1} if found.startswith("due") else {}
    queue = await make_queue(connection, name, schedules=True, **limits, **WINDOW)
    if limits:
        await publish(connection, queue, [b"before"], subject=f"{name}.jobs.x")
    jobs = [Job("a", delay="100ms", id=job_id), Job("b", delay="1h", id="8")]
    async with running_mover(connection, queue):
        await run_try(connection, queue, jobs, killed_after=2)

        async def has_fired() -> bool:
            in_queue = await stream_messages(connection, name)
            due = await stream_messages(connection, f"{name}-schedules", f"due.{name}.>")
            return bool(due if limits else in_queue)

        await eventually(has_fired)
        if found == "done":
            # By a worker of any make, which only acknowledges: no completion has the message id.
            (message,) = await pull_jobs(connection, queue, 1)
            await message.ack_sync()
    await asyncio.sleep(AFTER_WINDOW)
    for _ in range(2):
        report = await run_try(connection, queue, jobs[::-1])
        assert report is not None
        assert (report.stored, report.duplicates, list(report.extra)) == (2, 2, [])
        assert report.scheduled == ({0, 1} if limits else {0})
        assert report.awaited() == (set() if limits else {1})
        await asyncio.sleep(AFTER_WINDOW)
    assert await bodies_of(connection, f"{name}-schedules") in ([b"b"], [b"b", b"a"])


@pytest.mark.slow
@pytest.mark.since_server("2.14", "schedules")
@pytest.mark.parametrize("killed_after", [2, None])
async def test_sequences_of_schedules_are_never_taken_for_those_of_the_queue(
    connection: NatsPyConnection, name: str, killed_after: int | None
) -> None:
    queue = await make_queue(connection, name, schedules=True, **WINDOW)
    await publish(connection, queue, [b"x", b"y", b"z"], subject=f"{name}.jobs.x")
    jobs = [Job("a", delay="1h"), Job("b")]
    await run_try(connection, queue, jobs, killed_after=killed_after)
    await asyncio.sleep(AFTER_WINDOW)
    # The list has neither any more.
    report = await run_try(connection, queue, ["d"])
    assert report is not None
    assert (list(report.sequences), list(report.extra), report.awaited()) == ([5], [4], {4, 5})
    await asyncio.sleep(AFTER_WINDOW)
    sequences = await read_manifest_sequences(connection, f"{name}-events", name, ORIGIN.key)
    assert sorted(sequences or []) == [4, 5]
    report = await run_try(connection, queue, [*jobs, "d"])
    assert report is not None
    assert (list(report.sequences), report.scheduled, report.duplicates) == ([1, 4, 5], {0}, 3)


@pytest.mark.slow
@pytest.mark.since_server("2.14", "schedules")
@pytest.mark.parametrize("window", ["100ms", "1m"])
@pytest.mark.parametrize("killed", [True, False])
async def test_a_schedule_with_another_body_under_a_known_id_is_refused(
    connection: NatsPyConnection, name: str, window: str, *, killed: bool
) -> None:
    queue = await make_queue(connection, name, schedules=True, duplicate_window=window)
    await run_try(connection, queue, [Job(b"charge", id="7", delay="1h")], killed_after=1 if killed else None)
    await asyncio.sleep(AFTER_WINDOW)
    with pytest.raises(JobError, match="job 0 has the id '7', under which this task has stored another body"):
        await run_try(connection, queue, [Job(b"refund", id="7", delay="1h")])
    assert await bodies_of(connection, f"{name}-schedules") == [b"charge"]


@pytest.mark.since_server("2.14", "schedules")
async def test_a_schedule_with_another_body_that_nothing_records_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    subject, origin = f"{name}.jobs.x", replace(ORIGIN, idempotency_key="key")
    await publish(connection, queue, [b"a", b"b"], subject=subject)
    await run_try(connection, queue, [Job(b"charge", id="7", delay="1h")], origin=origin, killed_after=1)
    await connection.api(f"STREAM.PURGE.{name}-events", {})
    with pytest.raises(PublishRefusedError, match=r"under its id '7'.*another one there.*with another body"):
        await run_try(connection, queue, [Job(b"refund", id="7", delay="1h")], origin=origin)
    assert await bodies_of(connection, f"{name}-schedules") == [b"charge"]


@pytest.mark.slow
@pytest.mark.since_server("2.14", "schedules")
async def test_a_trace_or_another_time_of_the_try_is_no_other_job(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True, **WINDOW)
    for number, (stored, duplicates) in enumerate([(2, 0), (2, 2)]):
        headers = {"traceparent": f"00-{number}", "Tracestate": f"{number}", "Baggage": f"try={number}"}
        jobs = [Job("a", headers=headers), Job("b", delay="1h", headers=headers)]
        report = await run_try(connection, queue, jobs)
        assert report is not None
        assert (report.stored, report.duplicates, list(report.extra)) == (stored, duplicates, [])
        await asyncio.sleep(AFTER_WINDOW)


async def test_what_somebody_stores_among_the_parts_is_not_read(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_PART_ROWS", "_INLINE_ROWS"):
        monkeypatch.setattr(f"{seams.MANIFEST}.{limit}", 2)
    queue = await make_queue(connection, name)
    await run_try(connection, queue, "abcd", killed_after=3)
    for body in (b"\x00" * 64, b"", b"x" * 33, json.dumps({"type": "io.airflow.jetstream.v1.published"}).encode()):
        await connection.client.jetstream().publish(f"published.{name}.{ORIGIN.key}-jobs", body)
    report = await run_try(connection, queue, "dcba")
    assert report is not None
    assert (list(report.sequences), list(report.extra)) == ([4, 3, 2, 1], [])


@dataclass(frozen=True)
class Listed:
    """A job of the model: its given id, if any, its body, and a header, if any."""

    job_id: str | None
    body: str
    header: str | None = None

    def job(self) -> Job:
        # Each try has a trace of its own.
        headers = {"traceparent": uuid4().hex} | ({"Kind": self.header} if self.header else {})
        return Job(self.body, id=self.job_id, headers=headers)


_named = st.dictionaries(st.sampled_from("123456"), st.sampled_from("xyz"), max_size=5)
_unnamed = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "x", "y"])), max_size=6)


@st.composite
def _lists_of_tries(draw: st.DrawFn) -> list[tuple[list[Listed], int | None, bool]]:
    """Return for each try its list, after how many jobs it is killed, and whether workers do the stored jobs then."""
    tries = []
    for _ in range(draw(st.integers(2, 4))):
        jobs = [Listed(job_id, body) for job_id, body in draw(_named).items()]
        jobs += [Listed(None, body, header) for body, header in draw(_unnamed)]
        jobs = draw(st.permutations(jobs))
        tries.append((jobs, draw(st.none() | st.integers(0, len(jobs))), draw(st.booleans())))
    return tries


class _Task:
    """What a task has to have stored: each job of each list once, whatever became of its tries."""

    def __init__(self) -> None:
        self.stored: Counter[Listed] = Counter()
        self.bodies: dict[str, str] = {}

    def refuses(self, jobs: list[Listed]) -> bool:
        return any(job.job_id in self.bodies and self.bodies[job.job_id] != job.body for job in jobs if job.job_id)

    def store(self, jobs: list[Listed]) -> None:
        self.stored |= Counter(jobs)
        self.bodies |= {job.job_id: job.body for job in jobs if job.job_id}


@pytest.fixture
def numbers() -> Iterator[int]:
    return iter(range(100_000))


@pytest.mark.slow
@settings(
    max_examples=400 if os.environ.get("FAULTS") == "full" else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tries=_lists_of_tries(), pages=st.sampled_from([1, 2, 4_096]))
async def test_what_is_stored_is_what_was_asked_once_or_the_task_says_what_is_wrong(
    connection: NatsPyConnection,
    name: str,
    numbers: Iterator[int],
    tries: list[tuple[list[Listed], int | None, bool]],
    pages: int,
) -> None:
    queue = await make_queue(connection, f"{name}-{next(numbers)}", archive=True, **WINDOW)
    task = _Task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{seams.MANIFEST}._PART_ROWS", pages)
        patch.setattr(f"{seams.MANIFEST}._INLINE_ROWS", pages)
        for jobs, killed_after, done in tries:
            listed = [job.job() for job in jobs]
            if task.refuses(jobs):
                with pytest.raises(JobError, match="under which this task has stored another body"):
                    await run_try(connection, queue, listed)
            else:
                report = await run_try(connection, queue, listed, killed_after=killed_after)
                task.store(jobs if killed_after is None else jobs[:killed_after])
                if report is not None:
                    assert len(report.awaited()) == task.stored.total()
                    assert len(set(report.sequences)) == len(jobs)
            await check_stored(connection, queue, task)
            if done:
                await do_all(connection, queue)
    await connection.api(f"STREAM.DELETE.{queue.name}")


async def check_stored(connection: NatsPyConnection, queue: WorkQueue, task: _Task) -> None:
    async def all_are_archived() -> bool:
        return await stored_count(connection, f"{queue.name}-archive") >= task.stored.total()

    # The server stores the copies after the jobs.
    await eventually(all_are_archived)
    stored = Counter([message async for message in archived(connection, queue)])
    assert stored == Counter((job.job_id, job.body.encode(), job.header) for job in task.stored.elements())
    assert (await stream_info(connection, queue.name))["state"]["last_seq"] == task.stored.total()


async def archived(
    connection: NatsPyConnection, queue: WorkQueue
) -> AsyncIterator[tuple[str | None, bytes, str | None]]:
    for message in await stream_messages(connection, f"{queue.name}-archive"):
        yield message.header("Job-Id"), message.data, message.header("Kind")


async def do_all(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for message in await pull_jobs(connection, queue, await stored_count(connection, queue.name)):
        await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()


async def test_a_manifest_whose_waiting_is_over_is_continued_by_a_clear_until_its_jobs_have_ended(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await run_try(connection, queue, "ab")
    manifest = Manifest(connection, queue, ORIGIN)
    info = await stream_info(connection, name)
    await manifest.begin(info)
    await manifest.mark_over()
    cleared, ended = replace(ORIGIN, max_tries=3), False

    async def have_ended(_: object) -> bool:
        return ended

    manifest = Manifest(connection, queue, cleared)
    begun = await manifest.begin(info, have_ended=have_ended)
    assert begun is not None
    assert (begun.round, len(manifest.known)) == (0, 2)
    again = Manifest(connection, queue, cleared)
    await again.begin(info)
    await again.mark_over()
    ended = True
    # A retry goes on with its jobs, and only a clear publishes new ones.
    for max_tries, number in ((3, 0), (5, 1)):
        last = Manifest(connection, queue, replace(ORIGIN, max_tries=max_tries))
        begun = await last.begin(info, have_ended=have_ended)
        assert begun is not None
        assert begun.round == number
        await last.mark_over()


@pytest.mark.slow
async def test_a_try_that_was_given_up_does_not_say_that_the_manifest_of_the_next_one_is_complete(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, **WINDOW)
    info = await stream_info(connection, name)
    given_up = Manifest(connection, queue, ORIGIN)
    await given_up.begin(info)
    await run_try(connection, queue, "abc", killed_after=3)
    # Its process goes on, although Airflow has begun another try, and ends after that one was killed.
    await given_up.record_stored(await publish(connection, None, [], subject=f"{name}.jobs.x"))
    await asyncio.sleep(AFTER_WINDOW)
    report = await run_try(connection, queue, "cba")
    assert report is not None
    assert (list(report.sequences), report.duplicates) == ([3, 2, 1], 3)


async def test_a_duplicate_in_a_domain_is_stored_in_the_queue(name: str) -> None:
    with NatsServer(jetstream_config="domain: edge") as server:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
            queue = await make_queue(connection, name)
            for duplicates in (0, 2):
                origin = Origin("dag", "run", "task")
                report = await publish(connection, queue, ["a", "b"], subject=f"{name}.jobs.x", origin=origin)
                assert report.duplicates == duplicates
                assert report.destination is not None
                assert report.destination.domain == "edge"
            elsewhere = Destination(name, domain="other")
            problem = str(elsewhere.problem(PubAck(name, 7, domain="edge")))
            assert f"{name} in the domain other to store it, found that {name} in the domain edge did" in problem


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_500, 2_500, 6_000])
async def test_events_of_small_messages_record_what_fits_and_a_retry_finds_the_rest(
    connection: NatsPyConnection, name: str, limit: int
) -> None:
    events = {"name": f"{name}-events", "max_msg_size": limit}
    queue = await make_queue(connection, name, archive=True, events=events, **WINDOW)
    jobs = [f"{number}" for number in range(2_000)]
    first = await run_try(connection, queue, jobs)
    await asyncio.sleep(AFTER_WINDOW)
    again = await run_try(connection, queue, reversed(jobs))
    assert first is not None
    assert again is not None
    assert (list(again.sequences), again.duplicates) == (list(first.sequences)[::-1], 2_000)
    known = await read_manifest_sequences(connection, f"{name}-events", name, ORIGIN.manifest_key)
    assert known is None or sorted(known) == list(first.sequences)


async def test_a_row_of_no_job_is_none(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await run_try(connection, queue, "a")
    message = await last_message(connection, f"{name}-events", f"published.{name}.{ORIGIN.key}")
    assert message is not None
    subject, forged = message.subject, json.loads(message.data) | {"rows": "AAAA" * 32}
    await connection.client.jetstream().publish(subject, json.dumps(forged).encode())
    report = await run_try(connection, queue, "b")
    assert report is not None
    assert (list(report.sequences), list(report.extra)) == ([2], [])
