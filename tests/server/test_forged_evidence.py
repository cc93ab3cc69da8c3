"""What users with one role's permissions can make others believe of jobs: under exactly the generated policies."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import nats as nats_py
import pytest
from nats.js.errors import APIError

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Status,
    account_for_jobs,
    connect,
    find_dead_letters,
    permissions,
    provision,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import completion_subject, handled_subject, schedule_filter
from testbed.face import ROLES, authorization, redrive_message_id
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

_SECRET = "of-every-user"
_ADMIN = "admin"
# Where an answer to a publisher could be taken for evidence about job 1.
_TARGETS = {
    "completion": "completed.{queue}.worker.1",
    "report of a handler": "handled.{queue}.1",
    "copy": "dead.{queue}.worker.1",
    "parked letter": "parked.{queue}.worker.1",
    "audit record": "audit.{queue}.letters.1",
    "archived job": "archive.{queue}.{queue}.jobs.plain",
    "account": "audit.{queue}.account",
}
_QUEUES = {what: f"q{number}" for number, what in enumerate(_TARGETS)} | {"waiting": "waiting", "done": "done"}


def queue_of(name: str) -> WorkQueue:
    return small_queue(name, archive=True)


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server with a user of each role for each queue."""
    policies = [permissions(queue_of(name), role) for name in _QUEUES.values() for role in ROLES]
    users = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*policies))
    admin = f'users: [ {{ user: {_ADMIN}, password: "{_SECRET}" }}'
    with NatsServer(config=users.replace("users: [", admin, 1), user=_ADMIN, password=_SECRET) as running:
        yield running


@pytest.fixture
async def admin(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(ConnectionSettings(servers=(server.url,), user=_ADMIN, password=_SECRET)) as connection:
        yield connection


@asynccontextmanager
async def foreign(server: NatsServer, user: str, denied: list[str]) -> AsyncIterator[Client]:
    """Connect without this package; what the server denies is noted."""

    async def note(error: Exception) -> None:
        denied.append(str(error).lower())

    prefix = f"_INBOX_{user}"
    client = await nats_py.connect(server.url, user=user, password=_SECRET, inbox_prefix=prefix, error_cb=note)
    try:
        yield client
    finally:
        await client.close()


async def direct_an_answer(server: NatsServer, name: str, target: str) -> None:
    """As a publisher and nothing else, have the PubAck of a job stored somewhere."""
    denied: list[str] = []
    async with foreign(server, f"{name}-publisher", denied) as publisher:
        await publisher.publish(f"{name}.jobs.plain", b"a job", reply=target)
        await publisher.flush()
    assert denied == []


async def answer_on(admin: NatsPyConnection, target: str) -> bool:
    """Return whether a stream stores an answer of the server as the last message of a subject."""
    jetstream = admin.client.jetstream()
    stream = await jetstream.find_stream_name_by_subject(target)
    with suppress(nats_py.js.errors.NotFoundError):
        return (await jetstream.get_last_msg(stream, target)).data is not None
    return False


@pytest.mark.slow
@pytest.mark.parametrize("what", _TARGETS)
async def test_an_answer_that_a_publisher_directs_to_a_subject_proves_nothing(
    server: NatsServer, admin: NatsPyConnection, what: str
) -> None:
    name = _QUEUES[what]
    queue, target = queue_of(name), _TARGETS[what].format(queue=name)
    await provision(admin, queue)
    assert await make_dead_letters(admin, queue, ["the letter"]) == [1]
    await direct_an_answer(server, name, target)
    # The server doesn't apply permissions to what a publisher wants as the subject of its answer.
    await eventually(lambda: answer_on(admin, target), 30)
    findings = await find_dead_letters(admin, queue)
    assert [(letter.sequence, letter.body) for letter in findings.letters] == [(1, b"the letter")]
    assert (await account_for_jobs(admin, queue)).unaccounted == ()
    report = await redrive_dead_letters(admin, queue)
    assert report.failed == {}
    (job,) = report.redriven.values()
    message = await admin.client.jetstream().get_msg(name, job)
    assert message.data == b"the letter"


async def test_a_completion_stays_one_after_a_publisher_has_directed_an_answer_there(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    name = _QUEUES["done"]
    queue = queue_of(name)
    await provision(admin, queue)
    assert await make_dead_letters(admin, queue, ["done late", "reported"]) == [1, 2]
    subjects = [completion_subject(name, CONSUMER, 1), handled_subject(name, 2)]
    for subject, body in zip(subjects, (completion(name, 1), {"by": "ann"}), strict=True):
        await admin.client.jetstream().publish(subject, json.dumps(body).encode())
        await direct_an_answer(server, name, subject)
        await eventually(lambda subject=subject: answer_on(admin, subject), 30)  # type: ignore[misc]
    findings = await find_dead_letters(admin, queue)
    assert findings.letters == ()
    assert {job.sequence: job.status for job in findings.dismissed} == {1: Status.COMPLETED, 2: Status.HANDLED}


def completion(queue: str, sequence: int, consumer: str = CONSUMER) -> dict[str, Any]:
    """Return the body of a completion."""
    now = datetime.now(UTC).isoformat()
    kind = "io.airflow.jetstream.v1.completion"
    place = {"stream": queue, "consumer": consumer, "stream_seq": sequence}
    return {"type": kind, "timestamp": now, **place, "deliveries": 1}


async def test_who_waits_believes_only_what_permissions_let_the_workers_of_a_job_say(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    name = _QUEUES["waiting"]
    queue = queue_of(name)
    await provision(admin, queue)
    cursor = await take_cursor(admin, queue)
    (sequence,) = await publish_jobs(admin, queue, ["awaited"])
    waiting = asyncio.ensure_future(wait(admin, cursor, [sequence]))
    target = completion_subject(name, CONSUMER, sequence)
    await direct_an_answer(server, name, target)
    await eventually(lambda: answer_on(admin, target), 30)
    # A worker of another consumer may publish here, and names this one in the body.
    body = json.dumps(completion(name, sequence)).encode()
    await admin.client.jetstream().publish(completion_subject(name, "other", sequence), body)
    # An end that is stored later, and is believed, shows that the others have been read.
    for message in await pull_jobs(admin, queue, 2):
        if message.metadata.sequence.stream != sequence:
            later = message
    marked = completion(name, later.metadata.sequence.stream)
    second = asyncio.ensure_future(wait(admin, cursor, [later.metadata.sequence.stream]))
    await admin.client.jetstream().publish(
        completion_subject(name, CONSUMER, marked["stream_seq"]), json.dumps(marked).encode()
    )
    await asyncio.wait_for(second, 30)
    assert not waiting.done()
    await admin.client.jetstream().publish(target, body)
    await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize("role", ROLES)
async def test_no_other_role_publishes_ends_of_jobs(server: NatsServer, admin: NatsPyConnection, role: str) -> None:
    name = _QUEUES["done"]
    allowed = {
        "publisher": {f"published.{name}.a"},
        "worker": {f"completed.{name}.{CONSUMER}.1"},
        "redriver": {f"published.{name}.a", f"audit.{name}.lease"},
    }
    tried = [f"completed.{name}.{CONSUMER}.1", f"completed.{name}.other.1", f"handled.{name}.1", f"cancelled.{name}.1"]
    tried += [f"published.{name}.a", f"audit.{name}.lease", f"requeued.{name}.1", f"archive.{name}.1"]
    tried += [f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.{CONSUMER}", schedule_filter(name)[:-1] + "once.a"]
    denied: list[str] = []
    async with foreign(server, f"{name}-worker-{CONSUMER}" if role == "worker" else f"{name}-{role}", denied) as client:
        for subject in tried:
            await client.publish(subject, b"{}")
        await client.flush()
        refused = {subject for subject in tried if subject not in allowed.get(role, set())}
        await eventually(lambda: len(denied) >= len(refused), 30)
    found = {subject for subject in tried if any(f'"{subject.lower()}"' in error for error in denied)}
    assert found == refused


async def test_an_atomic_redrive_believes_only_markers_of_redrives(connection: NatsPyConnection, name: str) -> None:
    """Whoever may store schedules can't have the server store what it makes of one among the markers."""
    queue = small_queue(name, atomic_redrive=True, schedules=True)
    await provision(connection, queue)
    assert await make_dead_letters(connection, queue, ["answered", "scheduled"]) == [1, 2]
    await connection.client.publish(f"{name}.jobs.plain", b"a job", reply=f"requeued.{name}.1")
    at = (datetime.now(UTC) + timedelta(seconds=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for target in (f"requeued.{name}.2", f"due.{name}.requeued.{name}.2"):
        headers = {"Nats-Schedule": f"@at {at}", "Nats-Schedule-Target": target}
        with pytest.raises(APIError, match="target is invalid"):
            await connection.client.jetstream().publish(f"scheduled.{name}.once.a", b"", headers=headers)

    async def stored() -> bool:
        subjects = (await connection.api(f"STREAM.INFO.{name}", {"subjects_filter": f"requeued.{name}.*"}))["state"]
        return len(subjects.get("subjects") or {}) == 1

    await eventually(stored, 30)
    findings = await find_dead_letters(connection, queue)
    assert [(letter.sequence, letter.copy_sequence) for letter in findings.letters] == [(1, None), (2, None)]
    report = await redrive_dead_letters(connection, queue)
    assert report.failed == {}
    assert set(report.redriven) == {1, 2}
    jobs = [await connection.client.jetstream().get_msg(name, job) for job in report.redriven.values()]
    assert [job.data for job in jobs] == [b"answered", b"scheduled"]
    assert await stored_count(connection, name) >= 3


@pytest.mark.slow
async def test_a_job_under_the_id_of_a_copy_does_not_replace_the_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = small_queue(name, duplicate_window="1s")
    await provision(connection, queue)
    await make_dead_letters(connection, queue, ["the letter"])
    (letter,) = (await find_dead_letters(connection, queue)).letters
    message_id = redrive_message_id(name, letter.sequence, letter.time, 1)
    jetstream = connection.client.jetstream()
    forged = await jetstream.publish(f"{name}.jobs.plain", b"forged", headers={"Nats-Msg-Id": message_id})
    copies = (await redrive_dead_letters(connection, queue)).redriven
    assert copies[letter.sequence] > forged.seq
    assert (await jetstream.get_msg(name, copies[letter.sequence])).data == b"the letter"


@pytest.mark.slow
async def test_publishers_in_an_account_of_their_own_direct_no_answer_anywhere(name: str) -> None:
    """The remedy of SECURITY.md: an account that exports the queue's subjects as a service, and one that imports it."""
    subject = f"{name}.jobs.>"
    config = f"""accounts {{
      QUEUES: {{ jetstream: enabled, users: [{{user: {_ADMIN}, password: {_SECRET}}}],
        exports: [{{service: "{subject}"}}] }}
      PUBLISHERS: {{ users: [{{user: p, password: {_SECRET}}}],
        imports: [{{service: {{account: QUEUES, subject: "{subject}"}}}}] }}
    }}"""
    with NatsServer(config=config) as server:
        settings = ConnectionSettings(servers=(server.url,), user=_ADMIN, password=_SECRET)
        async with connect(settings) as admin:
            await provision(admin, queue_of(name))
            publisher = await nats_py.connect(server.url, user="p", password=_SECRET)
            await publisher.publish(f"{name}.jobs.a", b"directed", reply=f"completed.{name}.{CONSUMER}.1")
            await publisher.publish(f"{name}.jobs.a", b"directed", reply=f"$JS.API.STREAM.PURGE.{name}")
            # Other programs in the account publish as ever, with PubAcks.
            answer = await publisher.request(f"{name}.jobs.a", b"ordinary", timeout=30)
            assert json.loads(answer.data)["seq"] == 3
            await publisher.close()
            assert await stored_count(admin, f"{name}-events") == 0
            assert await stored_count(admin, name) == 3
