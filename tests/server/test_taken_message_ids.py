"""Message ids that somebody else has taken: whoever may publish to a subject of the queue can compute them.

The task's jobs are stored, or the task says which one isn't known to be; it is never green without them.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    Publication,
    PublishIncompleteError,
    PublishRefusedError,
    publish,
)
from airflow_provider_jetstream.jetstream.publishing.manifest import Manifest
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import salted_id
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from testbed.dead_letters import stream_messages
from testbed.face import publish_until_killed, stream_info
from testbed.queues import make_queue, pull_jobs, store_completion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from testbed.face import NatsPyConnection, StoredMessage

ORIGIN = Origin("billing", "scheduled__2026-11-28T00:00:00+00:00", "send", max_tries=0)
JOBS = [Job(b"pay 1", id="p1"), b"pay 2", Job({"pay": 3}, headers={"Tenant": "a"}), b"\xff\x00"]
BODIES = [b"pay 1", b"pay 2", b'{"pay":3}', b"\xff\x00"]


def prepared_jobs(queue: WorkQueue, jobs: Iterable[object], origin: Origin) -> list[OutgoingJob]:
    """Return the jobs that a task is going to store on the queue's first subject, as anybody can compute them."""
    by_key = queue.events is not None
    return list(PreparedJobs(jobs, subject=f"{queue.name}.jobs.x", origin=origin, batch="", queue=queue, by_key=by_key))


async def prepared(
    connection: NatsPyConnection, queue: WorkQueue, jobs: Sequence[Any], origin: Origin = ORIGIN
) -> list[OutgoingJob]:
    """Return the jobs that a task is going to store, as anybody can compute them who knows its names."""
    return prepared_jobs(queue, jobs, origin)


async def take(
    connection: NatsPyConnection,
    job: OutgoingJob,
    body: bytes | None = None,
    *,
    subject: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Store a message under the message id of a job that isn't stored yet."""
    values = {**job.headers, **(headers or {}), "Nats-Msg-Id": job.message_id}
    data = (job.body or b"") if body is None else body
    stored = {name: value for name, value in values.items() if value}
    assert not (await connection.client.jetstream().publish(subject or job.subject, data, headers=stored)).duplicate


async def messages(connection: NatsPyConnection, queue: WorkQueue) -> list[StoredMessage]:
    return await stream_messages(connection, queue.name)


async def send(connection: NatsPyConnection, queue: WorkQueue, jobs: Sequence[Any], origin: Origin = ORIGIN) -> Any:
    return await publish(connection, queue, jobs, subject=f"{queue.name}.jobs.x", origin=origin)


async def do_all(connection: NatsPyConnection, queue: WorkQueue, count: int, *, completed: bool = False) -> None:
    for message in await pull_jobs(connection, queue, count):
        if completed:
            await store_completion(connection, queue, message.metadata.sequence.stream)
        await message.ack_sync()


OTHERS: dict[str, dict[str, Any]] = {
    "another body": {"body": b"EVIL"},
    "a body of bytes that aren't UTF-8": {"body": b"\xff\xfe"},
    "no body": {"body": b""},
    "another subject": {"subject": "{}.jobs.other"},
    "no task": {"headers": {"Airflow-Task": ""}},
    "another task": {"headers": {"Airflow-Task": "0" * 32}},
    "another id": {"headers": {"Job-Id": "p9"}},
    "a header more": {"headers": {"Job-Expires": "2020-01-01T00:00:00Z"}},
    "another advisory subject": {"headers": {"Job-Advisory": "told"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("archive", [False, True])
async def test_jobs_whose_message_ids_are_taken_are_stored(
    connection: NatsPyConnection, name: str, other: str, *, done: bool, archive: bool
) -> None:
    queue = await make_queue(connection, name, archive=archive)
    values = {key: value.format(name) if key == "subject" else value for key, value in OTHERS[other].items()}
    # Half of the list.
    for job in (await prepared(connection, queue, JOBS))[::2]:
        await take(connection, job, **values)
    if done:
        await do_all(connection, queue, 2, completed=True)
    for duplicates in (0, 4):
        report = await send(connection, queue, JOBS)
        assert (sorted(report.sequences), report.duplicates, list(report.extra)) == ([3, 4, 5, 6], duplicates, [])
        own = {message.sequence: message for message in await messages(connection, queue)}
        assert [own[sequence].data for sequence in report.sequences] == BODIES
        assert {own[sequence].subject for sequence in report.sequences} == {f"{name}.jobs.x"}
        assert {own[sequence].header("Airflow-Task") for sequence in report.sequences} == {ORIGIN.key}
    assert own[report.sequences[0]].header("Job-Id") == "p1"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["acknowledged", "purged", "deleted", "expired"])
async def test_a_message_that_took_an_id_before_the_task_began_and_is_gone_is_nobody_s_job(
    connection: NatsPyConnection, name: str, how: str
) -> None:
    limits: dict[str, Any] = {"max_age": "200ms"} if how == "expired" else {}
    queue = await make_queue(connection, name, archive=False, **limits)
    (job,) = await prepared(connection, queue, [b"pay"])
    await take(connection, job)
    if how == "acknowledged":
        await do_all(connection, queue, 1)
    elif how == "purged":
        await connection.api(f"STREAM.PURGE.{name}")
    elif how == "deleted":
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    else:
        while await messages(connection, queue):
            pass
    report = await send(connection, queue, [b"pay"])
    assert (list(report.sequences), report.duplicates) == ([2], 0)


async def test_the_very_job_under_its_id_is_believed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for job in await prepared(connection, queue, JOBS):
        await take(connection, job, headers={"traceparent": "00-another"})
    report = await send(connection, queue, JOBS)
    assert (list(report.sequences), report.duplicates) == ([1, 2, 3, 4], 4)


async def cut_off(connection: NatsPyConnection, queue: WorkQueue, jobs: Sequence[Any], count: int) -> None:
    """Publish as a try that is killed after some jobs, and records nothing afterwards."""
    await publish_until_killed(connection, queue, jobs[:count], ORIGIN, subject=f"{queue.name}.jobs.x")


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("window", ["2m", "100ms"])
async def test_ids_that_are_taken_between_two_tries_are_no_jobs_of_the_first(
    connection: NatsPyConnection, name: str, window: str, *, done: bool
) -> None:
    queue = await make_queue(connection, name, archive=True, duplicate_window=window)
    await cut_off(connection, queue, JOBS, 2)
    for job in (await prepared(connection, queue, JOBS))[2:]:
        await take(connection, job, b"EVIL")
    if done:
        await do_all(connection, queue, 4, completed=True)
    report = await send(connection, queue, JOBS)
    assert (list(report.sequences), report.duplicates, list(report.extra)) == ([1, 2, 5, 6], 2, [])
    own = {message.sequence: message.data for message in await messages(connection, queue)}
    assert [own[sequence] for sequence in report.sequences if sequence in own] == BODIES[2 if done else 0 :]


async def test_a_retry_of_a_try_that_was_killed_finds_the_jobs_under_their_new_ids(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    for job in await prepared(connection, queue, JOBS):
        await take(connection, job, b"EVIL")
    async with Publication(connection, queue, ORIGIN) as publication:

        async def killed(*_: object, **__: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(publication, "_record", killed)
        with pytest.raises(asyncio.CancelledError):
            await publication.publish(JOBS, subject=f"{name}.jobs.x")
    for _ in range(2):
        report = await send(connection, queue, JOBS)
        assert (list(report.sequences), report.duplicates, list(report.extra)) == ([5, 6, 7, 8], 4, [])


async def test_new_ids_that_are_taken_too_are_made_again(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    (job,) = await prepared(connection, queue, [b"pay"])
    await take(connection, job, b"EVIL")
    subject = f"{name}.jobs.x"
    manifest = Manifest(connection, queue, ORIGIN)
    assert await manifest.begin(await stream_info(connection, name)) is not None
    salt = await manifest.add_salt()
    headers = {"Nats-Msg-Id": salted_id(salt, job.message_id)}
    await connection.client.jetstream().publish(subject, b"EVIL", headers=headers)
    report = await send(connection, queue, [b"pay"])
    assert (list(report.sequences), report.duplicates) == ([3], 0)
    assert [message.data for message in await messages(connection, queue)] == [b"EVIL", b"EVIL", b"pay"]


async def gone_unseen(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Let a killed try store a job that is done before the next one, with nothing that tells what it was."""
    await cut_off(connection, queue, [b"pay"], 1)
    await do_all(connection, queue, 1)


async def test_a_job_of_which_nothing_tells_what_became_is_not_verified_and_never_sent_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, duplicate_window="500ms", consumer={"sample_freq": "0"})
    await gone_unseen(connection, queue)
    with pytest.raises(PublishIncompleteError, match=r"job 1 .* may be stored: not verified.*\(sequence 1\)"):
        await send(connection, queue, [b"new", b"pay"])
    await do_all(connection, queue, 1)
    # The server forgets the id.
    await asyncio.sleep(0.5)
    with pytest.raises(PublishIncompleteError, match=r"not verified"):
        await send(connection, queue, [b"new", b"pay"])
    assert await messages(connection, queue) == []
    # What a worker says later counts.
    await store_completion(connection, queue, 1)
    report = await send(connection, queue, [b"new", b"pay"])
    assert (list(report.sequences), report.duplicates) == ([2, 1], 2)


@pytest.mark.slow
async def test_a_completion_makes_a_job_that_is_gone_the_tasks_own(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False, consumer={"sample_freq": "0"})
    await cut_off(connection, queue, [b"pay", Job(b"named", id="n")], 2)
    await do_all(connection, queue, 2, completed=True)
    report = await send(connection, queue, [b"pay", Job(b"named", id="n")])
    assert (list(report.sequences), report.duplicates) == ([1, 2], 2)


async def test_an_ack_metric_of_the_server_makes_a_job_that_is_gone_the_tasks_own(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False, consumer={"sample_freq": "100%"})
    await gone_unseen(connection, queue)
    report = await send(connection, queue, [b"pay"])
    assert (list(report.sequences), report.duplicates) == ([1], 1)


async def test_without_events_a_job_whose_id_is_taken_fails_by_its_index(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, events=None)
    origin = Origin("billing", "run", "send")
    first, second = prepared_jobs(queue, [b"a", b"b"], origin)
    await take(connection, second, b"EVIL")
    with pytest.raises(PublishIncompleteError, match=r"job 1 .* is not stored: .*another one there \(sequence 1\)"):
        await send(connection, queue, [b"a", b"b"], origin)
    assert [message.data for message in await messages(connection, queue)] == [b"EVIL", first.body]


async def test_a_program_s_jobs_with_ids_are_stored_once_in_the_duplicate_window(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    subject = f"{name}.jobs.x"
    lists: list[list[Any]] = [
        [Job({"n": number}, id=f"order-{number}") for number in range(3)],
        # One by one, as these have headers; the first is known, the others aren't.
        [Job({"n": number}, id=f"order-{number}", headers={"X": "y"} if number > 2 else {}) for number in (2, 3, 4)],
    ]
    found = [await publish(connection, queue, jobs, subject=subject) for jobs in [*lists, *lists]]
    assert [(list(report.sequences), report.duplicates) for report in found] == [
        ([1, 2, 3], 0),
        ([3, 4, 5], 1),
        ([1, 2, 3], 3),
        ([3, 4, 5], 3),
    ]
    with pytest.raises(
        PublishRefusedError, match=r"under its id 'order-0', found .* another one there .* another body"
    ):
        await publish(connection, queue, [Job({"n": 9}, id="order-0")], subject=subject)
    # By a field, and without a queue; another subject is another job.
    report = await publish(connection, None, [{"n": "order-5"}], subject=subject, job_id="n")
    again = await publish(connection, None, [{"n": "order-5"}], subject=subject, job_id="n")
    assert (list(report.sequences), again.duplicates) == (list(again.sequences), 1)
    with pytest.raises(PublishRefusedError, match="with another subject or other headers"):
        await publish(connection, queue, [Job({"n": 0}, f"{name}.jobs.y", id="order-0")])


async def test_jobs_without_ids_of_a_program_are_new_ones_at_each_call(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for number in (1, 2):
        report = await publish(connection, queue, [{"id": 1}, Job("x")], subject=f"{name}.jobs.x")
        assert (list(report.sequences), report.duplicates) == ([2 * number - 1, 2 * number], 0)


@pytest.mark.slow
async def test_hook_and_operator_store_jobs_whose_ids_are_taken(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"conn_type": "nats", "host": settings.servers[0], "extra": {"timeout": 5}}
    monkeypatch.setenv("AIRFLOW_CONN_NATS_DEFAULT", json.dumps(form))
    queue, subject = await make_queue(connection, name), f"{name}.jobs.x"
    for job in await prepared(connection, queue, JOBS):
        await take(connection, job, b"EVIL")
    report = await JetStreamHook().apublish(JOBS, subject=subject, queue=queue, origin=ORIGIN)
    assert (list(report.sequences), report.duplicates) == ([5, 6, 7, 8], 0)

    origin = Origin("billing", "run", "task", max_tries=0)
    for job in await prepared(connection, queue, JOBS, origin):
        await take(connection, job, b"EVIL")
    operator = JetStreamPublishOperator(task_id="task", work_queue=queue, subject=subject, jobs=JOBS)
    instance = SimpleNamespace(dag_id="billing", run_id="run", task_id="task", map_index=-1, try_number=1, max_tries=0)
    result = await asyncio.to_thread(operator.execute, {"ti": instance, "params": {}})  # type: ignore[typeddict-item]
    assert (result["sequences"], result["duplicates"], result["published"]) == ([[13, 16]], 0, 4)


@pytest.mark.parametrize("limit", [{"max_msgs": 3}, {"max_bytes": "2KB"}])
async def test_done_jobs_are_not_sent_again_where_the_events_limits_have_dropped_the_manifest(
    connection: NatsPyConnection, name: str, limit: dict[str, Any]
) -> None:
    """Their ids look as if somebody else had taken them before the task began; it is the task's own earlier try."""
    events = {"name": f"{name}-events", "discard": "old", **limit}
    queue = await make_queue(connection, name, archive=False, events=events)
    first = await send(connection, queue, JOBS)
    await do_all(connection, queue, len(JOBS))
    others = [Origin("billing", ORIGIN.run_id, f"other{number}", max_tries=0) for number in range(6)]
    for origin in others:
        await send(connection, queue, [b"other"], origin)
    for _ in range(2):
        with pytest.raises(PublishIncompleteError) as raised:
            await send(connection, queue, JOBS)
        report = raised.value.report
        assert [failure.index for failure in report.failures] == [0, 1, 2, 3]
        assert not any(failure.certain for failure in report.failures)
    stored = [message.sequence for message in await messages(connection, queue)]
    assert stored == [max(first.sequences) + number + 1 for number in range(len(others))]
