"""What a worker of another consumer, with its generated role and nothing else, can state of jobs that it never had."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import nats as nats_py
import pytest

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Consumer,
    RedriveRequest,
    Repair,
    Selection,
    WorkQueue,
    connect,
    find_dead_letters,
    permissions,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from testbed.dead_letters import acknowledge_jobs, make_terminated_letters, request_for, stream_messages
from testbed.face import authorization
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    completion_body,
    make_dead_letters,
    publish_jobs,
    pull_jobs,
    small_queue,
    store_completion,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nats.aio.client import Client

    from testbed.face import NatsPyConnection

_SECRET = "of-every-user"
_ADMIN = "admin"
_OTHER = "other"
_KINDS = ("kept", "bare")
_QUEUES = {f"{test}{kind}": kind for test in ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j") for kind in _KINDS}
_FORGED = {"Dead-Letter-Version": "1", "Dead-Letter-Reason": "terminated"}
_SCANS_ID = {"Nats-Msg-Id": "dead:scan:forged"}


def _queue(name: str) -> WorkQueue:
    """Declare a queue of two consumers; ``kept`` ones have an archive."""
    mine, other = (
        {"name": consumer, "filter_subject": f"{name}.jobs.{kind}", "max_deliver": 1, "sample_freq": "0"}
        for consumer, kind in ((CONSUMER, "plain"), (_OTHER, "other"))
    )
    # Where jobs die by deliveries, a redrive waits as long.
    long = {"ack_wait": "1s" if name == "fkept" else "30s"}
    return small_queue(name, consumers=[mine | long, other | long], archive=_QUEUES[name] == "kept")


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server with a user for the other consumer's workers of each queue."""
    policies = [permissions(_queue(name), "worker", consumer=_OTHER) for name in _QUEUES]
    users = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*policies))
    admin = f'users: [ {{ user: {_ADMIN}, password: "{_SECRET}" }}'
    with NatsServer(config=users.replace("users: [", admin, 1), user=_ADMIN, password=_SECRET) as running:
        yield running


@pytest.fixture
async def admin(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(ConnectionSettings(servers=(server.url,), user=_ADMIN, password=_SECRET)) as connection:
        yield connection


class _Worker:
    """A worker of the other consumer, with its role."""

    def __init__(self, client: Client, queue: str) -> None:
        self._client = client
        self._queue = queue

    async def terminate(self, sequence: int) -> None:
        """Have the server announce that the other consumer's worker terminated a job; there is no answer."""
        await self._client.publish(f"$JS.ACK.{self._queue}.{_OTHER}.1.{sequence}.1.0.0", b"+TERM mine")
        await self._client.flush()

    async def store_record(self, sequence: int, body: bytes, kind: str = "other", **headers: str) -> None:
        """Store a record that states what it likes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        fields = _FORGED | {"Dead-Letter-Subject": f"{self._queue}.jobs.{kind}"} | named
        await self._client.jetstream().publish(f"dead.{self._queue}.{_OTHER}.{sequence}", body, headers=fields)

    async def complete(self, sequence: int) -> None:
        """Store a completion of a job by the other consumer."""
        body = completion_body(self._queue, sequence, _OTHER)
        await self._client.jetstream().publish(f"completed.{self._queue}.{_OTHER}.{sequence}", body)


@asynccontextmanager
async def _foreign_worker(server: NatsServer, queue: WorkQueue) -> AsyncIterator[_Worker]:
    policy = permissions(queue, "worker", consumer=_OTHER)
    client = await nats_py.connect(
        server.url, user=policy.user, password=_SECRET, inbox_prefix=f"_INBOX_{policy.user}", connect_timeout=10
    )
    try:
        yield _Worker(client, queue.name)
    finally:
        await client.close()


async def _made(admin: NatsPyConnection, name: str) -> WorkQueue:
    queue = _queue(name)
    await provision(admin, queue)
    return queue


async def _entries(admin: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    await until_stored(admin, f"{queue.name}-dead", count)


async def _jobs(admin: NatsPyConnection, queue: WorkQueue) -> list[tuple[str, bytes]]:
    return [
        (job.subject.removeprefix(f"{queue.name}.jobs."), job.data) for job in await stream_messages(admin, queue.name)
    ]


async def _redriven(admin: NatsPyConnection, queue: WorkQueue, **selection: Any) -> list[tuple[str, bytes]]:
    """Redrive what a scan finds, and return the jobs that are stored then."""
    await redrive_dead_letters(admin, queue, RedriveRequest(Selection(**selection)))
    return await _jobs(admin, queue)


@pytest.mark.parametrize(
    ("name", "with_completion", "status"),
    [("akept", True, "completed"), ("bkept", False, "uncertain"), ("abare", True, "uncertain")],
)
async def test_a_done_job_that_another_consumers_worker_terminates_is_not_run_again(
    server: NatsServer, admin: NatsPyConnection, name: str, status: str, *, with_completion: bool
) -> None:
    queue = await _made(admin, name)
    await publish_jobs(admin, queue, ["done"])
    await acknowledge_jobs(admin, queue, 1)
    if with_completion:
        await store_completion(admin, queue, 1)
    async with _foreign_worker(server, queue) as worker:
        await worker.terminate(1)
        await worker.store_record(1, b"forged")
        await worker.store_record(1, b"done", "plain", **_SCANS_ID)
    await _entries(admin, queue, 3)
    findings = await find_dead_letters(admin, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), [status])
    assert ("foreign-ends" in [risk.name for risk in findings.risks]) == (status == "uncertain")
    assert await _redriven(admin, queue) == []
    assert await _redriven(admin, queue, unaccounted=True) == []


async def test_whoever_names_such_a_job_brings_back_what_the_archive_has(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    queue = await _made(admin, "ckept")
    await publish_jobs(admin, queue, ["job"])
    await acknowledge_jobs(admin, queue, 1)
    async with _foreign_worker(server, queue) as worker:
        await worker.terminate(1)
        await worker.store_record(1, b"forged")
    await _entries(admin, queue, 2)
    assert await _redriven(admin, queue, sequences=frozenset({1})) == [("plain", b"job")]


@pytest.mark.parametrize("kind", _KINDS)
async def test_a_record_with_the_id_of_a_scans_proves_no_death(
    server: NatsServer, admin: NatsPyConnection, kind: str
) -> None:
    queue = await _made(admin, f"d{kind}")
    await publish_jobs(admin, queue, ["done"])
    await acknowledge_jobs(admin, queue, 1)
    async with _foreign_worker(server, queue) as worker:
        await worker.store_record(1, b"forged", **_SCANS_ID)
    assert (await find_dead_letters(admin, queue)).letters == ()
    assert await _redriven(admin, queue) == []


@pytest.mark.parametrize("has_record", [True, False])
async def test_of_a_job_that_two_consumers_terminated_and_nothing_else_has_it_is_not_known_whose_it_was(
    server: NatsServer, admin: NatsPyConnection, *, has_record: bool
) -> None:
    queue = await _made(admin, "ebare" if has_record else "fbare")
    await make_terminated_letters(admin, queue, ["true"])
    if has_record:
        subject, headers = f"dead.{queue.name}.{CONSUMER}.1", {"Dead-Letter-Subject": f"{queue.name}.jobs.plain"}
        await admin.client.jetstream().publish(subject, b"true", headers=_FORGED | headers)
    async with _foreign_worker(server, queue) as worker:
        await worker.store_record(1, b"forged", "plain", Dead_Letter_Error_Class="Forged")
        await worker.store_record(1, b"forged", **_SCANS_ID)
        await worker.terminate(1)
    await _entries(admin, queue, 5 if has_record else 4)
    findings = await find_dead_letters(admin, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), ["uncertain"])
    assert await _redriven(admin, queue) == []


@pytest.mark.parametrize("has_record", [True, False])
async def test_a_record_of_another_consumer_than_the_servers_advisory_names_does_not_count(
    server: NatsServer, admin: NatsPyConnection, *, has_record: bool
) -> None:
    queue = await _made(admin, "gbare" if has_record else "hbare")
    await make_terminated_letters(admin, queue, ["true"])
    if has_record:
        subject, headers = f"dead.{queue.name}.{CONSUMER}.1", {"Dead-Letter-Subject": f"{queue.name}.jobs.plain"}
        await admin.client.jetstream().publish(subject, b"true", headers=_FORGED | headers)
    async with _foreign_worker(server, queue) as worker:
        await worker.store_record(1, b"forged", "plain", Dead_Letter_Error_Class="Forged")
        await worker.store_record(1, b"forged", **_SCANS_ID)
    letters = (await find_dead_letters(admin, queue)).letters
    assert [(letter.body, letter.death.consumer, letter.death.error_class) for letter in letters] == (
        [(b"true", CONSUMER, None)] if has_record else []
    )
    assert await _redriven(admin, queue) == ([("plain", b"true")] if has_record else [])


async def test_with_an_archive_the_consumer_that_takes_the_jobs_subject_is_believed(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    queue = await _made(admin, "ekept")
    await make_terminated_letters(admin, queue, ["true"])
    async with _foreign_worker(server, queue) as worker:
        await worker.store_record(1, b"true", "plain", Dead_Letter_Error_Class="Forged")
        await worker.terminate(1)
        await worker.complete(1)
    await _entries(admin, queue, 3)
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert (letter.death.consumer, letter.death.error_class) == (CONSUMER, None)
    assert await _redriven(admin, queue) == [("plain", b"true")]


async def test_a_completion_by_another_consumers_worker_hides_no_letter(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    queue = await _made(admin, "ibare")
    await make_terminated_letters(admin, queue, ["true"])
    subject, headers = f"dead.{queue.name}.{CONSUMER}.1", {"Dead-Letter-Subject": f"{queue.name}.jobs.plain"}
    await admin.client.jetstream().publish(subject, b"true", headers=_FORGED | headers)
    async with _foreign_worker(server, queue) as worker:
        await worker.complete(1)
    findings = await find_dead_letters(admin, queue)
    assert (findings.letters, [job.status for job in findings.dismissed]) == ((), ["uncertain"])
    assert await _redriven(admin, queue) == []
    assert await _redriven(admin, queue, sequences=frozenset({1})) == [("plain", b"true")]


async def test_a_job_that_a_worker_has_stays_alive(server: NatsServer, admin: NatsPyConnection) -> None:
    queue = await _made(admin, "jkept")
    await publish_jobs(admin, queue, ["alive", "waits"])
    (message,) = await pull_jobs(admin, queue, 1)
    async with _foreign_worker(server, queue) as worker:
        for sequence in (1, 2):
            await worker.terminate(sequence)
            await worker.store_record(sequence, b"forged", Nats_Msg_Id=f"dead:scan:{sequence}")
    await _entries(admin, queue, 4)
    findings = await find_dead_letters(admin, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)
    assert await _redriven(admin, queue) == [("plain", b"alive"), ("plain", b"waits")]
    await message.ack_sync()


async def test_a_worker_makes_no_job_of_another_consumer_of_the_jobs_that_it_had(
    server: NatsServer, admin: NatsPyConnection
) -> None:
    queue = await _made(admin, "jbare")
    await publish_jobs(admin, queue, ["mine"], kind="other")
    (message,) = await pull_jobs(admin, queue, 1, consumer=_OTHER)
    async with _foreign_worker(server, queue) as worker:
        await worker.store_record(1, b"forged", "plain")
        await message.respond(b"+TERM mine")
        await _entries(admin, queue, 2)
        report = await redrive_dead_letters(admin, queue)
        assert (dict(report.redriven), list(report.failed)) == ({}, [1])
        assert f"expected a subject that consumer {_OTHER} takes, found {queue.name}.jobs.plain" in report.failed[1]
        repair = Repair(subject=f"{queue.name}.jobs.other")
        await redrive_dead_letters(admin, queue, request_for([1], transform=lambda _: repair))
    assert await _jobs(admin, queue) == [("other", b"forged")]


@pytest.mark.parametrize("kind", _KINDS)
async def test_a_parked_record_that_contradicts_the_archive_does_not_count(admin: NatsPyConnection, kind: str) -> None:
    queue = await _made(admin, f"i{kind}" if kind == "kept" else "cbare")
    await publish_jobs(admin, queue, ["done"])
    await acknowledge_jobs(admin, queue, 1)
    headers = _FORGED | {"Dead-Letter-Subject": f"{queue.name}.jobs.other", "Dead-Letter-Parked": "for later"}
    await admin.client.jetstream().publish(f"parked.{queue.name}.{CONSUMER}.1", b"forged", headers=headers)
    expected = [] if kind == "kept" else [b"forged"]
    letters = (await find_dead_letters(admin, queue, Selection(parked=True))).letters
    assert [letter.body for letter in letters] == expected
    assert [body for _, body in await _redriven(admin, queue, parked=True)] == expected


@pytest.mark.slow
async def test_a_parked_record_beside_a_stored_letter_changes_nothing(admin: NatsPyConnection) -> None:
    queue = await _made(admin, "fkept")
    await make_dead_letters(admin, queue, ["true"])
    headers = _FORGED | {"Dead-Letter-Subject": f"{queue.name}.jobs.plain", "Dead-Letter-Parked": "for later"}
    await admin.client.jetstream().publish(f"parked.{queue.name}.{CONSUMER}.1", b"forged", headers=headers)
    (letter,) = (await find_dead_letters(admin, queue)).letters
    assert (letter.body, letter.parked, letter.death.reason) == (b"true", None, "max_deliveries")
    assert await _redriven(admin, queue) == [("plain", b"true")]


def test_no_consumer_has_the_name_under_which_scans_store_records() -> None:
    with pytest.raises(QueueDeclarationError, match="'_' can't name a consumer"):
        WorkQueue(name="q", subjects=["q.jobs.>"], consumers=[Consumer(name="_", max_deliver=1)])
