"""Workers of other makes report a job on the advisory subject that the job names; that is its end."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Cursor,
    Job,
    Origin,
    Publication,
    WaitPolicy,
    publish,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.worker import Worker
from testbed import seams
from testbed.queues import eventually, make_queue, pull_jobs, running_worker, stored_count

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, PublishReport, WaitReport, WorkQueue
    from testbed.face import NatsPyConnection

ANY = WaitPolicy(max_dead=None, max_unaccounted=None)


def advised_job_digest(subject: str, job_id: str) -> str:
    """Return the digest by which the contract knows a job of an id on a subject."""
    return urlsafe_b64encode(sha256(f"{subject} {job_id}".encode()).digest()[:16]).decode().rstrip("=")


async def advised_queue(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    return await make_queue(
        connection,
        name,
        consumer={"ack_wait": "30s", "max_deliver": 5},
        advisory_subjects=f"{name}-advisory.>",
        **fields,
    )


def image(name: str, job_id: object) -> dict[str, object]:
    return {"id": job_id, "image": "file:///color.jpg", "advisory": f"{name}-advisory.{job_id}"}


async def published(connection: NatsPyConnection, queue: WorkQueue, jobs: list[Any]) -> tuple[Cursor, PublishReport]:
    cursor = await take_cursor(connection, queue)
    return cursor, await publish(connection, queue, jobs, subject=f"{queue.name}.jobs.plain")


def waiting(
    connection: NatsPyConnection, cursor: Cursor, report: PublishReport, policy: WaitPolicy = ANY
) -> asyncio.Task[WaitReport]:
    return asyncio.create_task(wait(connection, cursor, report.sequences, policy=policy, advised=report.advised))


async def ended(task: asyncio.Task[WaitReport]) -> WaitReport:
    async with asyncio.timeout(30):
        return await task


async def say(connection: NatsPyConnection, subject: str, body: bytes) -> None:
    await connection.client.publish(subject, body)
    await connection.client.flush()


async def work_as_the_document_does(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    for message in await pull_jobs(connection, queue, count):
        job = json.loads(message.data)
        await connection.client.publish(job["advisory"], json.dumps({"id": job["id"]}).encode())
        await connection.client.publish(message.reply, b"")
    await connection.client.flush()


@pytest.mark.parametrize(
    ("subject", "body"),
    [
        ("{name}-advisory.other", b'{"id": "a"}'),
        ("{name}-advisory.a", b'{"id": "b"}'),
        ("{name}-advisory.a", b'{"id": ["a"]}'),
        ("{name}-advisory.a", b'{"stream_seq": 1}'),
        ("{name}-advisory.a", b"\xff\xfe not text"),
        ("{name}-advisory.a", b'"a"'),
        ("{name}-advisory.a", b"[" * 100_000),
        ("{name}-advisory.a", b""),
        (
            "{name}-advisory.z",
            (
                b'{"type": "io.airflow.jetstream.v1.completion", "timestamp": "2026-01-01T00:00:00Z",'
                b' "stream": "{name}", "consumer": "worker", "stream_seq": 1, "deliveries": 1}'
            ),
        ),
    ],
)
async def test_what_anybody_else_publishes_there_ends_nothing(
    connection: NatsPyConnection, name: str, subject: str, body: bytes
) -> None:
    queue = await advised_queue(connection, name)
    cursor, report = await published(connection, queue, [image(name, "a")])
    task = waiting(connection, cursor, report)
    await say(connection, subject.replace("{name}", name), body.replace(b"{name}", name.encode()))
    await eventually(lambda: stored_is(connection, f"{name}-events", 1))
    await say(connection, f"{name}-advisory.last", b'{"id": "last"}')
    _, last = await published(connection, queue, [image(name, "last")])
    await say(connection, f"{name}-advisory.last", b'{"id": "last"}')
    # Its end is read after all of these.
    assert (await ended(waiting(connection, cursor, last))).completed == set(last.sequences)
    assert not task.done()
    task.cancel()


async def stored_is(connection: NatsPyConnection, stream: str, count: int) -> bool:
    return await stored_count(connection, stream) == count


@pytest.mark.slow
async def test_a_report_stored_before_the_job_does_not_end_it(connection: NatsPyConnection, name: str) -> None:
    queue = await advised_queue(connection, name)
    cursor = await take_cursor(connection, queue)
    # After the cursor was taken, as by a slow worker of an earlier job with that id.
    await say(connection, f"{name}-advisory.a", b'{"id": "a"}')
    _, report = await published(connection, queue, [image(name, "a")])
    task = waiting(connection, cursor, report)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), 0.4)
    await say(connection, f"{name}-advisory.a", b'{"id": "a"}')
    assert (await ended(task)).completed == set(report.sequences)


@pytest.mark.slow
async def test_the_products_worker_reports_there_too_and_its_job_ends_once_with_its_result(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await advised_queue(connection, name)
    cursor, report = await published(connection, queue, [image(name, "a"), image(name, "b")])
    ends: list[int] = []
    task = asyncio.create_task(
        wait(
            connection,
            cursor,
            report.sequences,
            advised=report.advised,
            progress=lambda state: ends.append(len(state.completed)),
        )
    )
    async with running_worker(Worker(queue, "worker", lambda job: job.id, settings)):
        outcome = await ended(task)
    assert (outcome.results, ends) == ({"a": "a", "b": "b"}, [1, 2])


@pytest.mark.slow
async def test_the_products_worker_publishes_only_on_the_declared_subjects(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await advised_queue(connection, name)
    received = await connection.client.subscribe(f"{name}-other.>")
    # Published by somebody who doesn't know the declaration.
    cursor = await take_cursor(connection, queue)
    body = {"id": "a", "advisory": f"{name}-other.a"}
    ack = await connection.client.jetstream().publish(f"{name}.jobs.plain", json.dumps(body).encode())
    async with running_worker(Worker(queue, "worker", lambda _: None, settings)):
        outcome = await asyncio.wait_for(wait(connection, cursor, [ack.seq]), 10)
        assert outcome.completed == {ack.seq}
        await eventually(lambda: "outside of the queue's advisory_subjects" in caplog.text)
    await connection.client.flush()
    assert received.pending_msgs == 0


async def test_two_jobs_of_a_call_with_one_id_on_one_subject_are_refused_with_both_positions(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    same = [Job({"n": n}, id="a", advisory=f"{name}-advisory.all") for n in range(2)]
    other = Job({}, id="b", advisory=f"{name}-advisory.all")
    with pytest.raises(JobError, match=r"^jobs 0 and 2 both have the id 'a'"):
        await published(connection, queue, [same[0], other, same[1]])
    # A body's id alone is no job's, but a worker would report it.
    unnamed = [Job({"id": "a", "n": n}, advisory=f"{name}-advisory.all") for n in range(2)]
    with pytest.raises(JobError, match=r"^jobs 0 and 1 both have id 'a' on advisory subject"):
        await published(connection, queue, unnamed)
    # One without an advisory subject is reported by its sequence only.
    elsewhere = [Job({"n": n}, id=f"c{n}", advisory=f"{name}-advisory.{n}") for n in range(2)]
    _, report = await published(connection, queue, [*elsewhere, Job({}, id="d"), Job({})])
    assert len(report.advised) == 2


async def test_a_job_that_names_a_subject_outside_of_the_declared_ones_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    with pytest.raises(JobError, match=r"job 0 names the advisory subject 'elsewhere.a', which is outside"):
        await published(connection, queue, [{"id": "a", "advisory": "elsewhere.a"}])
    # In a body alone, it may mean something else.
    _, report = await published(connection, queue, [Job({"id": "a", "advisory": "elsewhere.a"})])
    assert report.advised == {}
    undeclared = await make_queue(connection, f"{name}u")
    _, report = await published(connection, undeclared, [{"id": "a", "advisory": "elsewhere.a"}])
    assert report.advised == {}


async def test_a_waiter_of_two_stored_jobs_with_one_digest_ends_neither_by_a_report(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    cursor, first = await published(connection, queue, [image(name, "a")])
    _, second = await published(connection, queue, [image(name, "a")])
    tasks = [waiting(connection, cursor, report) for report in (first, second)]
    await eventually(lambda: all(not task.done() for task in tasks))
    await asyncio.sleep(0.1)
    await say(connection, f"{name}-advisory.a", b'{"id": "a"}')
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(tasks[0]), 0.4)
    await work_as_the_document_does(connection, queue, 2)
    assert [(await ended(task)).completed for task in tasks] == [set(first.sequences), set(second.sequences)]


@pytest.mark.slow
@pytest.mark.parametrize("reports", [1, 2])
async def test_of_two_jobs_with_one_digest_only_the_one_that_is_gone_has_ended(
    connection: NatsPyConnection, name: str, reports: int
) -> None:
    queue = await advised_queue(connection, name)
    cursor, first = await published(connection, queue, [image(name, "a")])
    _, second = await published(connection, queue, [image(name, "a")])
    tasks = [waiting(connection, cursor, report) for report in (first, second)]
    await asyncio.sleep(0.1)
    [message] = await pull_jobs(connection, queue, 1)
    # A worker whose acknowledgement is lost reports a job again.
    for _ in range(reports):
        await say(connection, f"{name}-advisory.a", b'{"id": "a"}')
    await connection.request(message.reply, b"+ACK")
    assert (await ended(tasks[0])).completed == set(first.sequences)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(tasks[1]), 2)
    await work_as_the_document_does(connection, queue, 1)
    assert (await ended(tasks[1])).completed == set(second.sequences)


@pytest.mark.parametrize("max_recent", [25_000, 2])
async def test_a_waiter_that_joins_late_gets_the_reports_that_were_read_before(
    connection: NatsPyConnection, name: str, max_recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.FOLLOWER_RECENT, max_recent)
    queue = await advised_queue(connection, name)
    cursor, report = await published(connection, queue, [image(name, n) for n in range(10)])
    _, last = await published(connection, queue, [image(name, "last")])
    keeping = waiting(connection, cursor, last)
    await work_as_the_document_does(connection, queue, 10)
    # A flood of what nobody awaits, behind which the keeper's own end is read.
    for n in range(20):
        await say(connection, f"{name}-advisory.{n}", b'{"id": "other %d"}' % n)
    seen = waiting(connection, cursor, report)
    assert (await ended(seen)).completed == set(report.sequences)
    assert not keeping.done()
    assert (await ended(waiting(connection, cursor, report))).completed == set(report.sequences)
    await work_as_the_document_does(connection, queue, 1)
    assert (await ended(keeping)).completed == set(last.sequences)


@pytest.mark.slow
async def test_a_thousand_jobs_of_many_waiters_end_once_each(connection: NatsPyConnection, name: str) -> None:
    queue = await advised_queue(connection, name)
    cursor, report = await published(connection, queue, [image(name, n) for n in range(1_000)])
    tasks = [
        asyncio.create_task(wait(connection, cursor, [sequence], advised={digest: sequence}))
        for digest, sequence in report.advised.items()
    ]
    await work_as_the_document_does(connection, queue, 1_000)
    outcomes = [await ended(task) for task in tasks]
    assert sorted(sequence for outcome in outcomes for sequence in outcome.completed) == sorted(report.sequences)


def waiting_task(task_id: str) -> Origin:
    return Origin("dag", "run", task_id, max_tries=0)


async def publish_reserved(
    connection: NatsPyConnection, queue: WorkQueue, task_id: str, jobs: list[Any]
) -> PublishReport:
    """Publish as a waiting task does."""
    async with Publication(connection, queue, waiting_task(task_id), waits=True) as publication:
        return await publication.publish(jobs, subject=f"{queue.name}.jobs.plain")


async def test_a_task_can_not_wait_for_a_job_whose_id_another_one_awaits_on_that_subject(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    report = await publish_reserved(connection, queue, "one", [image(name, "z"), image(name, "a")])
    refused = rf"^job 1 has id 'a' on .* of {name} \(sequence 2\) that dag/run/one awaits"
    with pytest.raises(JobError, match=refused):
        await publish_reserved(connection, queue, "two", [image(name, "b"), image(name, "a")])
    assert await stored_count(connection, name) == 2
    # What the refused task had reserved is free.
    await publish_reserved(connection, queue, "three", [image(name, "b")])
    # What another task that was killed for good has reserved can be released.
    with pytest.raises(JobError, match=r"if that task was killed and won't run again, purge .*") as caught:
        await publish_reserved(connection, queue, "two", [image(name, "a")])
    purged = re.search(rf"purge (published\.{name}\.[\w-]{{22}}-reserved) from {name}-events", str(caught.value))
    assert purged
    # A retry of the same task goes on.
    again = await publish_reserved(connection, queue, "one", [image(name, "z"), image(name, "a")])
    assert again.sequences == report.sequences
    # The job has ended, although its task still waits for another one.
    for message in await pull_jobs(connection, queue, 3):
        if json.loads(message.data)["id"] == "a":
            await message.ack_sync()
    await publish_reserved(connection, queue, "two", [image(name, "a")])
    with pytest.raises(JobError, match="that dag/run/two awaits"):
        await publish_reserved(connection, queue, "four", [image(name, "a")])
    await connection.api(f"STREAM.PURGE.{name}-events", {"filter": purged[1]})
    await publish_reserved(connection, queue, "four", [image(name, "a")])
    # The first task waits no more, and its job is stored all the same.
    with pytest.raises(JobError, match="that dag/run/one awaits"):
        await publish_reserved(connection, queue, "five", [image(name, "z")])
    await Publication(connection, queue, waiting_task("one")).close()
    await publish_reserved(connection, queue, "five", [image(name, "z")])


@pytest.mark.parametrize("sequence", [10**30, 2**64, -1, True, "7", None, 1.5, [1], {"a": 1}], ids=json.dumps)
async def test_a_forged_reservation_of_no_job_keeps_nobody_from_publishing(
    connection: NatsPyConnection, name: str, sequence: object
) -> None:
    queue = await advised_queue(connection, name)
    await publish_reserved(connection, queue, "open", [image(name, "z")])
    created = (await take_cursor(connection, queue)).created
    digest = advised_job_digest(f"{name}-advisory.a", "a")
    forged = {"type": "io.airflow.jetstream.v1.reserved", "stream": name, "created": created}
    is_open = {"key": waiting_task("open").key}
    bodies = [
        json.dumps(forged | is_open | {"sequence": sequence}),
        # No such record; a job of another stream; one that is gone.
        json.dumps(forged | {"key": "0" * 32}),
        json.dumps(forged | is_open | {"created": "2026-01-01T00:00:00Z"}),
        json.dumps(forged | is_open | {"stream": "other"}),
        json.dumps(forged | is_open | {"sequence": 999}),
        json.dumps(forged) + "[" * 100_000,
        "\udcff",
    ]
    for number, body in enumerate(bodies):
        subject = f"published.{name}.{digest}-reserved"
        await connection.client.jetstream().publish(subject, body.encode(errors="surrogateescape"))
        report = await publish_reserved(connection, queue, f"task {number}", [image(name, "a")])
        assert (report.stored, list(report.advised)) == (1, [digest])


async def test_of_tasks_that_reserve_the_same_at_once_at_most_one_publishes(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    outcomes = await asyncio.gather(
        *(publish_reserved(connection, queue, f"t{n}", [image(name, "a"), image(name, n)]) for n in range(8)),
        return_exceptions=True,
    )
    assert len([outcome for outcome in outcomes if not isinstance(outcome, BaseException)]) == 1
    assert {type(outcome) for outcome in outcomes if isinstance(outcome, BaseException)} == {JobError}
    assert await stored_count(connection, name) == 2


async def test_each_of_many_jobs_is_reserved(connection: NatsPyConnection, name: str) -> None:
    queue = await advised_queue(connection, name)
    report = await publish_reserved(connection, queue, "many", [image(name, n) for n in range(1_500)])
    assert len(report.advised) == 1_500
    with pytest.raises(JobError, match=rf"of {name} \(sequence 1300\) that dag/run/many awaits"):
        await publish_reserved(connection, queue, "one", [image(name, 1_299)])


@pytest.mark.parametrize("second_cursor", ["the same", "its own"])
async def test_a_job_that_was_reported_is_completed_although_another_of_its_id_was_published_since(
    connection: NatsPyConnection, name: str, second_cursor: str
) -> None:
    queue = await advised_queue(connection, name)
    before, first = await published(connection, queue, [image(name, "a")])
    # No triggerer runs meanwhile; the next task may use the id, since the job is gone.
    await work_as_the_document_does(connection, queue, 1)
    await eventually(lambda: stored_is(connection, name, 0))
    after, second = await published(connection, queue, [image(name, "a")])
    tasks = [
        waiting(connection, before, first),
        waiting(connection, before if second_cursor == "the same" else after, second),
    ]
    assert (await ended(tasks[0])).completed == set(first.sequences)
    await work_as_the_document_does(connection, queue, 1)
    assert (await ended(tasks[1])).completed == set(second.sequences)


async def test_a_waiter_that_began_later_is_not_given_the_report_of_a_job_that_is_gone(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    before, first = await published(connection, queue, [image(name, "a")])
    await work_as_the_document_does(connection, queue, 1)
    await eventually(lambda: stored_is(connection, name, 0))
    after, second = await published(connection, queue, [image(name, "a")])
    for message in await pull_jobs(connection, queue, 1):
        await message.term()
    await eventually(lambda: stored_is(connection, name, 0))
    # Both are gone when both are awaited: only the first one was reported.
    reports = [waiting(connection, before, first), waiting(connection, after, second)]
    done, failed = [await ended(task) for task in reports]
    assert (done.completed, set(failed.dead), failed.completed) == (set(first.sequences), set(second.sequences), set())


async def test_a_worker_may_report_the_id_that_the_body_has_or_the_one_that_the_headers_have(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await advised_queue(connection, name)
    jobs = [
        Job({"id": " a ", "advisory": f"{name}-advisory.x"}, id="a", advisory=f"{name}-advisory.y"),
        {"id": " b ", "advisory": f"{name}-advisory.x"},
    ]
    cursor, report = await published(connection, queue, jobs)
    task = waiting(connection, cursor, report)
    await work_as_the_document_does(connection, queue, 2)
    assert (await ended(task)).completed == set(report.sequences)
    again, report = await published(connection, queue, jobs)
    task = waiting(connection, again, report)
    await say(connection, f"{name}-advisory.y", b'{"id": "a"}')
    await say(connection, f"{name}-advisory.x", b'{"id": " b "}')
    assert (await ended(task)).completed == set(report.sequences)


async def test_an_id_that_only_bodies_share_ends_none_of_their_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await advised_queue(connection, name)
    body = {"id": "same", "advisory": f"{name}-advisory.x"}
    _, report = await published(connection, queue, [Job(body, id="a"), Job(body, id="b")])
    assert sorted(report.advised.values()) == sorted(report.sequences)
    assert advised_job_digest(f"{name}-advisory.x", "same") not in report.advised
    with pytest.raises(JobError, match="jobs 0 and 1 both have id 'same'"):
        await published(connection, queue, [Job(body, id="c"), body])
