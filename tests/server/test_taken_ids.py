"""Message ids that others have used up: what is sent under them is stored all the same.

Under exactly the policies of the roles, on subjects that these allow.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import nats as nats_py
import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Protocol,
    RedriveRequest,
    Repair,
    WorkQueue,
    cancel,
    connect,
    find_dead_letters,
    get_message,
    permissions,
    provision,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import end_id
from airflow_provider_jetstream.worker import GiveUpError, Worker
from testbed import seams
from testbed.dead_letters import acknowledge_jobs, request_for, stream_messages
from testbed.face import authorization, last_message, redrive_message_id, stream_info, summarise_dead_letters
from testbed.nats_server import NatsServer
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    publish_jobs,
    pull_jobs,
    running_worker,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection

_SECRET = "of-every-user"
_ADMIN = "admin"
_JOBS = 3
_NAMES = [f"q{number}" for number in range(10)]


def queue_of(name: str) -> WorkQueue:
    consumers = [
        {"name": "worker", "filter_subject": f"{name}.jobs.plain", "sample_freq": "0"},
        {"name": "other", "filter_subject": f"{name}.jobs.other", "sample_freq": "0"},
    ]
    return WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.*"],
        consumers=[consumer | {"max_deliver": 1, "ack_wait": "500ms"} for consumer in consumers],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
    )


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    policies = [permissions(queue_of(name), role) for name in _NAMES for role in ("publisher", "monitor")]
    policies += [
        permissions(queue_of(name), "worker", consumer=consumer) for name in _NAMES for consumer in ("other", "worker")
    ]
    users = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*policies))
    admin = f'users: [ {{ user: {_ADMIN}, password: "{_SECRET}" }}'
    with NatsServer(config=users.replace("users: [", admin, 1), user=_ADMIN, password=_SECRET) as running:
        yield running


@pytest.fixture
async def admin(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(ConnectionSettings(servers=(server.url,), user=_ADMIN, password=_SECRET)) as connection:
        yield connection


@pytest.fixture
async def queue(admin: NatsPyConnection) -> AsyncIterator[WorkQueue]:
    """One of the queues for which there are users."""
    name = _NAMES.pop()
    queue = queue_of(name)
    await provision(admin, queue)
    yield queue
    for stream in (name, *queue.companion_names()):
        await admin.api(f"STREAM.DELETE.{stream}")
    _NAMES.append(name)


@asynccontextmanager
async def mallory(server: NatsServer, user: str) -> AsyncIterator[Client]:
    client = await nats_py.connect(
        server.url, user=user, password=_SECRET, inbox_prefix=f"_INBOX_{user}".encode(), allow_reconnect=False
    )
    try:
        yield client
    finally:
        await client.close()


async def take_id(client: Client, subject: str, message_id: str, body: bytes = b"{}", **headers: str) -> None:
    answer = await client.request(subject, body, headers={"Nats-Msg-Id": message_id, **headers}, timeout=5)
    assert not any(text in answer.data for text in (b'"error"', b'"duplicate"')), answer.data


async def stored_at(admin: NatsPyConnection, queue: WorkQueue, sequence: int) -> tuple[str, int]:
    """Return when a job was stored, as text and in nanoseconds."""
    message = await get_message(admin, queue.name, sequence)
    assert message
    seconds, _, decimals = message.time.removesuffix("Z").partition(".")
    whole = int(datetime.fromisoformat(f"{seconds}+00:00").timestamp())
    return message.time, whole * 10**9 + int(decimals.ljust(9, "0"))


async def end_ids(admin: NatsPyConnection, queue: WorkQueue, sequences: list[int]) -> list[str]:
    times = [await stored_at(admin, queue, sequence) for sequence in sequences]
    return [end_id(queue.name, sequence, time) for sequence, (_, time) in zip(sequences, times, strict=True)]


def worker_of(server: NatsServer, queue: WorkQueue, handle: Any) -> Worker:
    user = f"{queue.name}-worker-worker"
    settings = ConnectionSettings(servers=(server.url,), user=user, password=_SECRET, inbox_prefix=f"_INBOX_{user}")
    return Worker(queue, "worker", handle, settings)


_FORGED = (
    b'{"type":"io.airflow.jetstream.v1.completion","timestamp":"2026-01-01T00:00:00Z","stream":"%b","consumer":"worker",'
    b'"stream_seq":%d,"deliveries":1,"result":"forged"}'
)


@pytest.mark.slow
@pytest.mark.parametrize("result", [None, {"ok": 1}], ids=["plain", "result"])
@pytest.mark.parametrize(
    ("user", "subject"),
    [("publisher", "published.{queue}.x"), ("worker-other", "completed.{queue}.other.{sequence}")],
)
async def test_completions_are_stored_whoever_has_taken_their_ids(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue, user: str, subject: str, result: object
) -> None:
    cursor = await take_cursor(admin, queue)
    sequences = await publish_jobs(admin, queue, map(str, range(_JOBS)))
    async with mallory(server, f"{queue.name}-{user}") as client:
        for sequence, message_id in zip(sequences, await end_ids(admin, queue, sequences), strict=True):
            body = _FORGED % (queue.name.encode(), sequence)
            await take_id(client, subject.format(queue=queue.name, sequence=sequence), message_id, body)
    ended = asyncio.create_task(wait(admin, cursor, sequences))
    async with running_worker(worker_of(server, queue, lambda _: result)):
        report = await asyncio.wait_for(ended, 20)
    assert report.completed == set(sequences)
    assert list(report.results.values()) == ([result] * _JOBS if result else [])
    stored = await stream_messages(admin, f"{queue.name}-events", f"completed.{queue.name}.worker.*")
    assert [message.subject.rpartition(".")[2] for message in stored] == [str(sequence) for sequence in sequences]


@pytest.mark.slow
async def test_the_end_of_a_cancelled_job_is_stored_whoever_has_taken_its_id(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue
) -> None:
    cursor = await take_cursor(admin, queue)
    sequences = await publish_jobs(admin, queue, ["a"], headers={"Job-Id": "a"})
    await cancel(admin, queue, "a", why="no longer wanted")
    async with mallory(server, f"{queue.name}-publisher") as client:
        await take_id(client, f"published.{queue.name}.x", (await end_ids(admin, queue, sequences))[0])
    async with running_worker(worker_of(server, queue, lambda _: None)):
        report = await asyncio.wait_for(wait(admin, cursor, sequences), 20)
    assert (
        report.cancelled == {sequences[0]: "no longer wanted"} or "no longer wanted" in report.cancelled[sequences[0]]
    )


@pytest.mark.slow
async def test_the_end_of_a_job_of_an_earlier_stream_is_none_of_the_new_one_also_under_another_id(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue
) -> None:
    (sequence,) = await publish_jobs(admin, queue, ["a"])
    (message_id,) = await end_ids(admin, queue, [sequence])
    async with mallory(server, f"{queue.name}-publisher") as client:
        await take_id(client, f"published.{queue.name}.x", message_id)
    began, ending = asyncio.Event(), asyncio.Event()

    async def handle(_: Delivery) -> str:
        began.set()
        await ending.wait()
        return "of the earlier job"

    async with running_worker(worker_of(server, queue, handle)):
        await asyncio.wait_for(began.wait(), 10)
        await admin.api(f"STREAM.DELETE.{queue.name}")
        await provision(admin, queue)
        cursor = await take_cursor(admin, queue)
        await publish_jobs(admin, queue, ["b"], kind="other")
        waiting = asyncio.create_task(wait(admin, cursor, [1]))
        ending.set()
        await eventually(lambda: last_message(admin, f"{queue.name}-events", f"completed.{queue.name}.worker.1"))
        # Stored after it, and read by the same reader.
        (job,) = await pull_jobs(admin, queue, 1, consumer="other")
        await asyncio.sleep(0.3)
        assert not waiting.done()
        waiting.cancel()
        await job.ack_sync()


@pytest.mark.slow
async def test_a_record_is_stored_before_its_job_is_terminated_whoever_has_taken_its_id(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue
) -> None:
    (sequence,) = await publish_jobs(admin, queue, ["a"])
    time, _ = await stored_at(admin, queue, sequence)
    subject, message_id = f"dead.{queue.name}.other.{sequence}", f"dead:worker:{queue.name}:{sequence}:{time}:1"
    record = {"Dead-Letter-Sequence": str(sequence), "Dead-Letter-Subject": f"{queue.name}.jobs.plain"}
    async with mallory(server, f"{queue.name}-worker-other") as client:
        await take_id(client, subject, message_id, b"a", **record)

    def handle(_: Delivery) -> None:
        raise GiveUpError("not wanted")

    async with running_worker(worker_of(server, queue, handle)):
        await until_stored(admin, queue.name, 0)
    stored = await last_message(admin, f"{queue.name}-dead", f"dead.{queue.name}.worker.{sequence}")
    assert stored
    assert stored.data == b"a"
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert (letter.body, letter.death.explanation) == (b"a", "not wanted")


async def test_a_scan_stores_its_copies_whoever_has_taken_their_ids(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue
) -> None:
    (sequence,) = await make_dead_letters(admin, queue, ["a"])
    time, _ = await stored_at(admin, queue, sequence)
    async with mallory(server, f"{queue.name}-worker-other") as client:
        message_id = f"dead:scan:{queue.name}:{sequence}:{time}:1"
        await take_id(client, f"dead.{queue.name}.other.999", message_id, b"a")
    await summarise_dead_letters(admin, queue)
    assert await last_message(admin, f"{queue.name}-dead", f"dead.{queue.name}._.{sequence}")


@pytest.mark.slow
async def test_a_redrive_is_recorded_whoever_has_taken_the_ids_of_its_records(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue
) -> None:
    sequences = await make_dead_letters(admin, queue, map(str, range(2)))
    created = (await stream_info(admin, queue.name))["created"]
    async with mallory(server, f"{queue.name}-monitor") as client:
        for number, sequence in enumerate(sequences):
            new = sequences[-1] + 1 + number
            message_id = f"audit:{created}:{sequence}:redriven:{new}"
            await take_id(client, f"audit.{queue.name}.redrive-controls.{uuid4().hex}", message_id)
    report = await redrive_dead_letters(admin, queue)
    assert list(report.redriven) == sequences
    assert len(await stream_messages(admin, f"{queue.name}-audit", f"audit.{queue.name}.letters.*")) == 2
    assert [job.data for job in await pull_jobs(admin, queue, 2)] == [b"0", b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same subject", "other subject", "done"])
async def test_no_letter_is_lost_to_a_message_under_the_id_of_its_copy(
    admin: NatsPyConnection, server: NatsServer, queue: WorkQueue, kind: str
) -> None:
    (sequence,) = await make_dead_letters(admin, queue, ["a"])
    time, _ = await stored_at(admin, queue, sequence)
    place = "plain" if kind == "same subject" else "other"
    async with mallory(server, f"{queue.name}-publisher") as client:
        message_id = redrive_message_id(queue.name, sequence, time, 1)
        await take_id(client, f"{queue.name}.jobs.{place}", message_id, b"a")
    (taken,) = await pull_jobs(admin, queue, 1, consumer="worker" if place == "plain" else "other")
    if kind == "done":
        await taken.ack_sync()
    copy = await get_message(admin, queue.name, (await redrive_dead_letters(admin, queue)).redriven[sequence])
    assert copy
    assert (copy.subject, copy.data, copy.header("Redrive-Count")) == (f"{queue.name}.jobs.plain", b"a", "1")


# Whoever has used the message id of a letter's new job delays no redrive, and is taken for no new job.


_COPY = RedriveRequest(protocol=Protocol.COPY)
_REQUESTS = {
    "copy": _COPY,
    "auto": RedriveRequest(),
}
# By what differs from the new job: kind of subject, body, and headers besides those that name the letter.
_FOREIGN: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "the body": ("plain", b"forged", {}),
    "the subject": ("other", b"true", {}),
    "a header more": ("plain", b"true", {"Job-Expires": "2020-01-01T00:00:00Z"}),
    "a header's value": ("plain", b"true", {"Kind": "two"}),
    "a task": ("plain", b"true", {"Kind": "one", "Airflow-Task": "0" * 22}),
    "an empty body": ("plain", b"", {"Kind": "one"}),
}
_QUICK = {"ack_wait": "200ms", "max_deliver": 1}


class _Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def _killed(monkeypatch: pytest.MonkeyPatch, *, after: bool, at_call: int = 1) -> Iterator[None]:
    """End a redrive just after it has stored new jobs for the given time, or in place of that."""
    store, calls = seams.current(seams.STEPS_STORE_JOBS), [0]

    async def store_and_end(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] < at_call:
            return await store(*args)
        if after:
            await store(*args)
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, store_and_end)
        with pytest.raises(_Killed):
            yield


async def _with_letter(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    queue = await make_queue(connection, name, consumer=_QUICK, **{"archive": True} | fields)
    await make_dead_letters(connection, queue, ["true"], headers={"Kind": "one"})
    return queue


async def _take_id(connection: NatsPyConnection, queue: WorkQueue, what: str) -> int:
    """Publish as any publisher can: with the id of the letter's new job, and what names the letter."""
    (letter,) = (await find_dead_letters(connection, queue)).letters
    kind, body, headers = _FOREIGN[what]
    named = {
        "Nats-Msg-Id": redrive_message_id(queue.name, letter.sequence, letter.time, 1),
        "Redrive-Count": "1",
        "Redrive-Stream": queue.name,
        "Redrive-Sequence": str(letter.sequence),
        "Redrive-Consumer": "worker",
    }
    jetstream = connection.client.jetstream()
    return (await jetstream.publish(f"{queue.name}.jobs.{kind}", body, headers=named | headers)).seq


async def _copies(connection: NatsPyConnection, queue: WorkQueue, foreign: int) -> list[tuple[bytes, str | None]]:
    """Return the stored jobs besides the foreign one: body and a header."""
    jobs = await stream_messages(connection, queue.name, f"{queue.name}.jobs.>")
    return [(job.data, job.header("Kind")) for job in jobs if job.sequence != foreign]


@pytest.mark.slow
@pytest.mark.parametrize("what", _FOREIGN)
async def test_a_letter_whose_new_id_is_taken_is_redriven_at_once(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, what)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", ["the body", "the subject", "an empty body"])
async def test_nor_is_one_that_came_and_was_done_after_the_redrive_began(
    connection: NatsPyConnection, name: str, what: str, monkeypatch: pytest.MonkeyPatch, *, archive: bool
) -> None:
    queue = await _with_letter(connection, name, archive=archive)
    store, foreign = seams.current(seams.STEPS_STORE_JOBS), list[int]()

    async def store_later(*args: Any) -> Any:
        if not foreign:
            foreign.append(await _take_id(connection, queue, what))
            assert await acknowledge_jobs(connection, queue, 1) == foreign
        return await store(*args)

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, store_later)
        report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign[0]) == [(b"true", "one")]


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_nor_is_one_that_came_and_was_done_after_the_redrive_was_killed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, *, archive: bool
) -> None:
    queue = await _with_letter(connection, name, archive=archive)
    with _killed(monkeypatch, after=False):
        await redrive_dead_letters(connection, queue, _COPY)
    foreign = await _take_id(connection, queue, "the body")
    assert await acknowledge_jobs(connection, queue, 1) == [foreign]
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


async def test_of_many_letters_the_one_whose_id_is_taken_comes_back_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, "the subject")
    await acknowledge_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, ["b", "c"])
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (len(report.redriven), report.failed) == (3, {})
    assert sorted(body for body, _ in await _copies(connection, queue, foreign)) == [b"b", b"c", b"true"]


@pytest.mark.slow
@pytest.mark.parametrize("what", _FOREIGN)
async def test_a_recovery_takes_no_foreign_job_for_the_new_one(
    connection: NatsPyConnection, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    with _killed(monkeypatch, after=False):
        await redrive_dead_letters(connection, queue, _COPY)
    foreign = await _take_id(connection, queue, what)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.resumed, report.failed) == ([1], 0, {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


@pytest.mark.slow
async def test_a_recovery_finds_the_new_job_under_its_other_id(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, "the body")
    with _killed(monkeypatch, after=True, at_call=2):
        await redrive_dead_letters(connection, queue, _COPY)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (report.resumed, report.failed) == (1, {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]
    intents = await stream_messages(connection, f"{name}-audit", f"audit.{name}.intents.*")
    ids = {letter[1] for intent in intents for letter in json.loads(intent.data)["letters"]}
    assert len(ids) == 2
    assert {len(message_id) for message_id in ids} == {len(ids.pop())}


@pytest.mark.slow
async def test_a_recovery_repeats_nothing_where_the_new_job_under_its_other_id_is_done(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name, archive=False)
    foreign = await _take_id(connection, queue, "the subject")
    with _killed(monkeypatch, after=True):
        await redrive_dead_letters(connection, queue, _COPY)
    assert await acknowledge_jobs(connection, queue, 2) == [foreign, foreign + 1]
    await redrive_dead_letters(connection, queue, _COPY)
    assert b"true" not in [job.data for job in await stream_messages(connection, name) if job.sequence > foreign]


@pytest.mark.slow
async def test_a_recovery_finds_a_repaired_job_whatever_the_request_says_now(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    repair = Repair(body=b"repaired", subject=f"{name}.jobs.other", headers={"Kind": " a  b "})
    with _killed(monkeypatch, after=True):
        await redrive_dead_letters(
            connection, queue, request_for([1], transform=lambda _: repair, protocol=Protocol.COPY)
        )
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (report.resumed, report.failed) == (1, {})
    assert [body for body, _ in await _copies(connection, queue, 0)] == [b"repaired"]
    await publish_jobs(connection, queue, ["later"])
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}
