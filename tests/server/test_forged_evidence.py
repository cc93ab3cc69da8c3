"""What users with one role's permissions can make others believe of jobs: under exactly the generated policies."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import nats as nats_py
import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Consumer,
    Job,
    Repair,
    Status,
    WorkQueue,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    permissions,
    provision,
    publish,
    read_job_reports,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import completion_subject, handled_subject, schedule_filter
from testbed.dead_letters import make_terminated_letters, publish_raw, request_for, stream_messages
from testbed.face import ROLES, authorization, redrive_message_id
from testbed.foreign_programs import create_or_update_consumer, pull
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    completion_body,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from airflow_provider_jetstream.jetstream import Cursor, WaitReport
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


# Letters with subjects that no tool makes, and letters about which somebody has stored a record that isn't theirs.


_CONTROLS = ["a\x01b", "\x00", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1b[2Jb", "\x1f", "a\x7fb"]
# By what is forged: the header lines of the record; {queue} is the queue's name.
_FORGED = {
    "a subject elsewhere": "Dead-Letter-Subject: elsewhere.x",
    "the server's subject": "Dead-Letter-Subject: $JS.API.STREAM.DELETE.{queue}",
    "a part of a subject": "Dead-Letter-Subject: {queue}.jobs.\ufffd",
    "another job's subject": "Dead-Letter-Subject: {queue}.jobs.other",
    "a long subject": "Dead-Letter-Subject: {queue}.jobs." + "x" * 3_600,
    "headers": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Kept-Headers: " + json.dumps([["A", "\ud800"]]),
    "the body": "Dead-Letter-Subject: {queue}.jobs.plain",
    "redrives": "Dead-Letter-Subject: {queue}.jobs.plain\r\nRedrive-Count: 99",
    "the time": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Time: 2020-01-01T00:00:00Z",
    "the reason": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Reason: expired",
    "the writer": "Dead-Letter-Subject: {queue}.jobs.plain\r\nNats-Msg-Id: dead:scan:1",
    "the stream": "Dead-Letter-Subject: {queue}.jobs.plain\r\nDead-Letter-Stream-Created: 2020-01-01T00:00:00Z",
    "the sequence": "Dead-Letter-Sequence: 9",
}
# What is sent nowhere, with what the failure names.
_UNUSABLE = {
    "a subject elsewhere": "elsewhere.x",
    "the server's subject": "JS.API.STREAM.DELETE",
    "a part of a subject": "exact subject",
    "a long subject": "at most 3500 bytes",
    "headers": "headers that can be sent",
}


async def _forge(nats: NatsServer, queue: str, what: str) -> None:
    block = _FORGED[what].replace("{queue}", queue).encode()
    await publish_raw(nats, f"dead.{queue}.{CONSUMER}.1", b"Dead-Letter-Version: 1\r\n" + block, b"forged")


async def _jobs(connection: NatsPyConnection, queue: str) -> list[tuple[str, bytes]]:
    return [(job.subject, job.data) for job in await stream_messages(connection, queue)]


@pytest.mark.slow
async def test_letters_with_control_characters_in_their_subjects_are_redriven_there(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    subjects = [f"{name}.jobs.{part}" for part in _CONTROLS]
    for subject in subjects:
        await publish_raw(nats, subject, b"A: 1", b"one")
    await publish_jobs(connection, queue, ["two"])
    await exhaust_deliveries(connection, queue, len(subjects) + 1)
    first = {1: Repair(subject=f"{name}.jobs.plain")}
    repaired = await redrive_dead_letters(
        connection, queue, request_for([1], transform=lambda letter: first.get(letter.sequence))
    )
    assert (len(repaired.redriven), repaired.failed) == (1, {})
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failed) == (len(subjects), {})
    plain = f"{name}.jobs.plain"
    assert sorted(await _jobs(connection, name)) == sorted(
        [(subject, b"one") for subject in [plain, *subjects[1:]]] + [(plain, b"two")]
    )
    assert connection.reconnects == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", _FORGED)
async def test_an_archived_job_is_redriven_as_it_was_stored_whatever_a_record_states(
    connection: NatsPyConnection, nats: NatsServer, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_terminated_letters(connection, queue, ["true"])
    await _forge(nats, name, what)
    letter = (await find_dead_letters(connection, queue)).letters[0]
    assert (letter.body, letter.death.reason, letter.redrives) == (b"true", "terminated", 0)
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _jobs(connection, name) == [(f"{name}.jobs.plain", b"true")]


@pytest.mark.slow
@pytest.mark.parametrize("what", _UNUSABLE)
async def test_where_only_a_forged_record_is_left_its_letter_fails_alone_and_the_failure_names_the_record(
    connection: NatsPyConnection, nats: NatsServer, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await make_terminated_letters(connection, queue, ["true"])
    await _forge(nats, name, what)
    await publish_jobs(connection, queue, ["other"])
    await exhaust_deliveries(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), list(report.failed)) == ([2], [1])
    why = report.failed[1]
    assert _UNUSABLE[what] in why
    assert "its record states, one of the messages 1, 2 of the dead letter queue" in why
    repair = Repair(subject=f"{name}.jobs.plain", headers={"A": None})
    repaired = await redrive_dead_letters(connection, queue, request_for([1], transform=lambda _: repair))
    assert (list(repaired.redriven), repaired.failed) == ([1], {})


async def test_a_record_with_a_subject_of_the_queue_comes_before_a_later_one_without(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, archive=False)
    await make_terminated_letters(connection, queue, ["true"])
    true = f"Dead-Letter-Subject: {name}.jobs.plain".encode()
    await publish_raw(nats, f"dead.{name}.{CONSUMER}.1", true, b"true")
    await _forge(nats, name, "a subject elsewhere")
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _jobs(connection, name) == [(f"{name}.jobs.plain", b"true")]


@pytest.mark.slow
@pytest.mark.parametrize("time", ["2020-01-01T00:00:00Z", "now", "rounded"])
async def test_a_record_counts_whatever_time_its_worker_states(
    connection: NatsPyConnection, nats: NatsServer, name: str, time: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_terminated_letters(connection, queue, ["true"])
    stored = (await find_dead_letters(connection, queue)).letters[0].time
    text = {"now": datetime.now(UTC).isoformat(), "rounded": f"{stored.partition('.')[0]}Z"}.get(time, time)
    head = f"Dead-Letter-Subject: {name}.jobs.plain\r\nDead-Letter-Time: {text}\r\nDead-Letter-Error-Class: app.Busy"
    await publish_raw(nats, f"dead.{name}.{CONSUMER}.1", head.encode(), b"true")
    letter = (await find_dead_letters(connection, queue)).letters[0]
    assert letter.death.error_class == "app.Busy"


# What a worker of another consumer states of a job hides no dead letter and brings back no job that was done.


_HANDLER = "handler"


async def _queue(
    connection: NatsPyConnection, name: str, *, ack_wait: str = "500ms", archive: bool = True
) -> WorkQueue:
    """Make a queue of two consumers whose acknowledgements leave no evidence, and whose entries a handler may take."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            Consumer(name=one, filter_subject=f"{name}.jobs.{one}", max_deliver=1, ack_wait=ack_wait, sample_freq="0")
            for one in ("own", "other")
        ],
        dead_letters={"name": f"{name}-dead", "retention": "workqueue"},
        events=f"{name}-events",
        archive=archive,
        audit=True,
    )
    await provision(connection, queue)
    return queue


async def _terminate(connection: NatsPyConnection, name: str, sequence: int) -> None:
    """Terminate a job that the other consumer never had, as its workers can."""
    before = await stored_count(connection, f"{name}-dead")
    await connection.publish(f"$JS.ACK.{name}.other.1.{sequence}.1.0.0", b"+TERM forged")

    async def is_announced() -> bool:
        return await stored_count(connection, f"{name}-dead") > before

    await eventually(is_announced)


async def _complete(connection: NatsPyConnection, name: str, sequence: int, consumer: str) -> None:
    body = completion_body(name, sequence, consumer)
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.{sequence}", body, {})


async def _handle(connection: NatsPyConnection, name: str) -> None:
    """Have a handler take the announcements of terminations off the dead letter queue."""
    terminations = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{name}.*"
    config = {"durable_name": _HANDLER, "filter_subject": terminations}
    await create_or_update_consumer(connection.client, f"{name}-dead", config)
    async for message in pull(connection.client, f"{name}-dead", _HANDLER, batch=1, expires=2):
        await connection.client.request(message.reply, b"+ACK", timeout=5)


async def _die(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await pull_jobs(connection, queue, 1, consumer="own")
    before = await stored_count(connection, f"{queue.name}-dead")

    async def is_dead() -> bool:
        await find_dead_letters(connection, queue)
        return await stored_count(connection, f"{queue.name}-dead") > before

    await eventually(is_dead)


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("handled_first", [True, False])
async def test_a_handler_that_acknowledges_a_forged_termination_hides_no_letter(
    connection: NatsPyConnection, name: str, *, archive: bool, handled_first: bool
) -> None:
    queue = await _queue(connection, name, archive=archive)
    await publish_jobs(connection, queue, ["job"], kind="own")
    if not handled_first:
        await _die(connection, queue)
    await _terminate(connection, name, 1)
    await _handle(connection, name)
    if handled_first:
        findings = await find_dead_letters(connection, queue)
        assert (findings.letters, findings.uncertain) == ((), 0)
        await _die(connection, queue)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.sequence, letter.death.reason) == (1, "max_deliveries")
    assert list((await redrive_dead_letters(connection, queue)).redriven) == [1]


async def test_a_handler_that_acknowledges_a_forged_termination_accounts_for_no_deleted_job(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    for consumer in ("own", "other"):
        await publish_jobs(connection, queue, ["done", "deleted"], kind=consumer)
        # Both consumers leave evidence, so that what has none is unaccounted.
        (message,) = await pull_jobs(connection, queue, 1, consumer=consumer)
        await _complete(connection, name, message.metadata.sequence.stream, consumer)
        await message.ack_sync()
    await _terminate(connection, name, 2)
    await _handle(connection, name)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
    assert (await account_for_jobs(connection, queue)).unaccounted == ((2, 2),)


@pytest.mark.slow
async def test_a_done_job_is_not_run_again_where_the_consumer_that_states_its_death_is_gone(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    await publish_jobs(connection, queue, ["done"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await message.ack_sync()
    await _terminate(connection, name, 1)
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), ["uncertain"])
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unknown) == (0, ((1, 1),))


async def test_letters_of_a_consumer_that_gave_its_subject_to_another_one_stay(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    await publish_jobs(connection, queue, ["mine"], kind="other")
    (message,) = await pull_jobs(connection, queue, 1, consumer="other")
    await connection.request(message.reply, b"+TERM mine")
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    # The one that takes the subject now is younger than the job, or took other subjects then.
    config = (await connection.api(f"CONSUMER.INFO.{name}.own"))["config"] | {"filter_subject": f"{name}.jobs.*"}
    request = {"stream_name": name, "config": config, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.own.{name}.jobs.*", request)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.body, letter.death.consumer) == (b"mine", "other")
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unaccounted, account.unknown) == (1, (), ())


@pytest.mark.slow
async def test_a_worker_whose_consumer_is_gone_ends_no_wait(connection: NatsPyConnection, name: str) -> None:
    queue = await _queue(connection, name, ack_wait="30s")
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [Job(b"body", subject=f"{name}.jobs.own")])
    await connection.api(f"CONSUMER.DELETE.{name}.other")
    waiting = asyncio.create_task(wait(connection, cursor, report.awaited()))
    await _complete(connection, name, 1, "other")
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done()
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _complete(connection, name, 1, "own")
    await message.ack_sync()
    assert (await waiting).completed == {1}


# A worker of another consumer, with the right of that one alone, ends no wait for a job that isn't its own.


_SECONDS = 0.5


async def _published(connection: NatsPyConnection, name: str) -> tuple[WorkQueue, Cursor, asyncio.Task[WaitReport]]:
    """Publish a job of the consumer own, the first of its queue, and wait for it."""
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            {"name": consumer, "filter_subject": f"{name}.jobs.{consumer}", "max_deliver": 2, "ack_wait": "30s"}
            for consumer in ("own", "other")
        ],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
        archive=True,
        audit=True,
    )
    await provision(connection, queue)
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [Job(b"body", subject=f"{name}.jobs.own")])
    return queue, cursor, asyncio.create_task(wait(connection, cursor, report.awaited()))


async def _forge_waits(connection: NatsPyConnection, name: str, what: str) -> None:
    if what == "a termination":
        await connection.publish(f"$JS.ACK.{name}.other.1.1.1.0.0", b"+TERM forged")
        return
    kind = "cancelled" if what == "a cancelled job" else "completion"
    await _complete_waits(connection, name, "other", type=f"io.airflow.jetstream.v1.{kind}", result="forged")


async def _complete_waits(connection: NatsPyConnection, name: str, consumer: str, **fields: str) -> None:
    body = json.loads(completion_body(name, 1, consumer)) | fields
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.1", json.dumps(body).encode(), {})


@pytest.mark.parametrize("what", ["a completion", "a cancelled job", "a termination"])
async def test_another_consumers_worker_ends_no_wait(connection: NatsPyConnection, name: str, what: str) -> None:
    queue, cursor, waiting = await _published(connection, name)
    await _forge_waits(connection, name, what)
    await asyncio.wait([waiting], timeout=_SECONDS)
    assert not waiting.done()
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _complete_waits(connection, name, "own", result="true")
    await message.ack()
    report = await waiting
    assert (report.completed, report.results) == ({1}, {"1": "true"})
    # What is stated later is in no report of the job either.
    await _complete_waits(connection, name, "other", result="forged", id="later")
    ended = json.loads(json.dumps(report.as_json()))
    (job,) = [job async for job in read_job_reports(connection, cursor, ended)]
    assert (job.state, job.result) == ("completed", "true")


@pytest.mark.parametrize("what", ["a completion", "a cancelled job"])
async def test_a_job_that_its_own_worker_has_terminated_is_dead_whatever_another_one_states(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue, _, waiting = await _published(connection, name)
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await _forge_waits(connection, name, what)
    await message.term()
    report = await waiting
    assert (report.completed, list(report.dead)) == (set(), [1])


@pytest.mark.slow
async def test_another_consumers_worker_puts_no_later_job_in_the_place_of_a_letter(
    own_nats: NatsServer, name: str
) -> None:
    """The server was restarted since: a worker's record of a later time may be that of a job without a copy."""
    settings = connection_settings({"servers": (own_nats.url,)})
    async with connect(settings) as connection:
        queue = await _queue(connection, name, ack_wait="30s")
        await publish(connection, queue, [Job(b"true", subject=f"{name}.jobs.own")])
        (message,) = await pull_jobs(connection, queue, 1, consumer="own")
        await message.term()
        await eventually(lambda: _is_stored(connection, f"{name}-dead", 1))
    own_nats.restart()
    async with connect(settings) as connection:
        later = datetime.now(UTC).isoformat()
        head = f"Dead-Letter-Subject: {name}.jobs.other\r\nDead-Letter-Time: {later}"
        await publish_raw(own_nats, f"dead.{name}.other.1", head.encode(), b"forged")
        await _terminate(connection, name, 1)
        letters = (await find_dead_letters(connection, queue)).letters
        assert [(letter.body, letter.subject) for letter in letters] == [(b"true", f"{name}.jobs.own")]


async def _is_stored(connection: NatsPyConnection, stream: str, count: int) -> bool:
    return await stored_count(connection, stream) == count
