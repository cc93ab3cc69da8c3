"""Jobs that can't be done: copies, terminations, and how the jobs are preserved where no copy can be stored."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import pytest
from process_handlers import raise_from_body, raise_from_body_async

from airflow_provider_jetstream.jetstream import (
    Death,
    Reason,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    preview,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed import seams
from testbed.dead_letters import dead_letter_records, stored_message
from testbed.face import Headers, consumer_info, stream_info, summarise_dead_letters
from testbed.queues import (
    completion_count,
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from datetime import tzinfo

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer

LONG_ACK_WAIT = {"ack_wait": "30s", "max_deliver": 3}
NO_ARCHIVE: dict[str, Any] = {"archive": None}


class PrinterError(Exception):
    """A failure of the printer."""


def give_up(_: Delivery) -> None:
    raise GiveUpError("bad printer")


async def entries(connection: NatsPyConnection, stream: str) -> list[StoredMessage]:
    last = (await stream_info(connection, stream))["state"]["last_seq"]
    messages = [await get_message(connection, stream, sequence) for sequence in range(1, last + 1)]
    return [message for message in messages if message]


async def copies(connection: NatsPyConnection, queue: WorkQueue) -> list[StoredMessage]:
    return [
        entry
        for entry in await entries(connection, f"{queue.name}-dead")
        if entry.subject.startswith(f"dead.{queue.name}.")
    ]


def dead(connection: NatsPyConnection, queue: WorkQueue, count: int = 1) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def all_captured() -> bool:
        captured = [entry.subject for entry in await entries(connection, f"{queue.name}-dead")]
        return captured.count(f"{MAX_DELIVERIES}.{queue.name}.worker") == count

    return all_captured


async def change(connection: NatsPyConnection, stream: str, **fields: Any) -> None:
    config = (await stream_info(connection, stream))["config"]
    await connection.api(f"STREAM.UPDATE.{stream}", config | fields)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_job_that_is_given_up_is_copied_completely_before_it_is_terminated(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    headers = (("Nats-Msg-Id", "order-1"), ("Tag", "b"), ("Tag", "zwölf"), ("Job-Id", "order-1"))
    body = bytes(range(256))
    before = datetime.now(UTC)
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=Headers(headers))
    original = await get_message(connection, name, 1)
    assert original is not None
    created = (await stream_info(connection, name))["created"]

    def fail(_: Delivery) -> None:
        raise GiveUpError("bad\nprinter: größe") from PrinterError("no paper in tray 7")

    async def fail_async(job: Delivery) -> None:
        fail(job)

    handler = fail if kind == "plain" else fail_async
    async with running_worker(Worker(queue, "worker", handler, settings, name="printer-1")):
        await until_stored(connection, queue.name, 0)
    copy, termination = await entries(connection, f"{name}-dead")
    assert copy.subject == f"dead.{name}.worker.1"
    assert termination.subject == f"{TERMINATED}.{name}.worker"
    assert json.loads(termination.data)["reason"] == "bad printer: größe"
    ((death, job),) = await dead_letter_records(connection, queue)
    assert death == Death(
        stream=name,
        created=created,
        sequence=1,
        consumer="worker",
        reason=Reason.TERMINATED,
        died_at=death.died_at,
        first_failed_at=death.died_at,
        deliveries=1,
        explanation="bad printer: größe",
        error_class=f"{__name__}.PrinterError",
        error_message="no paper in tray 7",
        traceback_digest=death.traceback_digest,
        error_place=f"{__name__}:{fail.__qualname__}:{fail.__code__.co_firstlineno + 1}",
        traceback=death.traceback,
        worker="printer-1",
        seconds=death.seconds,
    )
    # The cause was raised where its handler was called; a coroutine's own function comes before it.
    assert death.traceback[-1] == death.error_place
    assert death.seconds is not None
    assert re.fullmatch(r"[0-9a-f]{12}", death.traceback_digest or "")
    assert before <= original.stored_at <= death.died_at <= datetime.now(UTC)
    assert (job.subject, job.sequence, job.time, job.data) == (original.subject, 1, original.time, body)
    assert sorted(job.headers) == sorted(headers)
    assert [value for key, value in job.headers if key == "Tag"] == ["b", "zwölf"]
    assert copy.header("Nats-Msg-Id") == f"dead:worker:{name}:1:{original.time}:1"
    assert await completion_count(connection, name) == 0


async def test_an_empty_job_can_be_given_up_without_a_reason(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)

    def fail(_: Delivery) -> None:
        raise GiveUpError

    await publish_jobs(connection, queue, [""])
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await until_stored(connection, queue.name, 0)
    ((death, job),) = await dead_letter_records(connection, queue)
    assert (death.explanation, death.error_class, death.error_message) == (None, None, None)
    assert (job.data, job.headers) == (b"", ())


@pytest.mark.slow
async def test_the_first_failure_is_recorded_where_it_happened_in_this_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    failed_at: list[datetime] = []

    def fail(job: Delivery) -> None:
        failed_at.append(datetime.now(UTC))
        if job.attempt == 1:
            raise ValueError("not yet")
        raise GiveUpError("never")

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await until_stored(connection, queue.name, 0)
    ((death, _),) = await dead_letter_records(connection, queue)
    assert death.deliveries == 2
    assert death.first_failed_at is not None
    assert failed_at[0] <= death.first_failed_at <= failed_at[1] <= death.died_at


@pytest.mark.slow
async def test_the_first_failure_is_left_out_where_it_happened_in_another_worker(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    failed: list[int] = []

    async def fail(job: Delivery) -> None:
        failed.append(job.attempt)
        first_worker.stop()
        raise ValueError("not yet")

    first_worker = Worker(queue, "worker", fail, settings)
    await publish_jobs(connection, queue, ["a"])
    await first_worker.run()
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await until_stored(connection, queue.name, 0)
    ((death, _),) = await dead_letter_records(connection, queue)
    assert (failed, death.deliveries, death.first_failed_at) == ([1], 2, None)


@pytest.mark.slow
async def test_the_last_failure_leaves_a_copy_that_says_why_and_letters_with_one_cause_share_a_fingerprint(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 2})

    def fail(job: Delivery) -> None:
        if job.sequence == 3:
            raise KeyError("paper")
        raise PrinterError(f"order {job.sequence * 99} jammed\nat 0x{job.sequence:08x}, attempt {job.attempt}")

    await publish_jobs(connection, queue, "abc", headers={"Tag": "a"})
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(dead(connection, queue, 3))
    assert await stored_count(connection, name) == 3
    messages = {death.sequence: (death, job) for death, job in await dead_letter_records(connection, queue)}
    assert len(await copies(connection, queue)) == len(messages) == 3
    death, job = messages[1]
    assert (death.reason, death.deliveries, death.explanation) == (Reason.MAX_DELIVERIES, 2, None)
    assert death.error_class == f"{__name__}.PrinterError"
    assert death.error_message == "order 99 jammed at 0x00000001, attempt 2"
    assert death.first_failed_at is not None
    assert death.first_failed_at < death.died_at
    assert (job.data, job.headers) == (b"a", (("Tag", "a"),))
    assert messages[1][0].fingerprint == messages[2][0].fingerprint != messages[3][0].fingerprint
    assert (messages[3][0].error_class, messages[3][0].error_message) == ("KeyError", "'paper'")


async def test_a_death_is_never_dated_before_the_job_was_stored(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) - timedelta(minutes=1)

    monkeypatch.setattr(seams.DEAD_LETTERING_DATETIME, LateClock)
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, jobs=["a"])
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await until_stored(connection, queue.name, 0)
    ((death, job),) = await dead_letter_records(connection, queue)
    assert death.died_at == job.stored_at


async def test_an_error_without_usable_text_still_makes_a_dead_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fail(_: Delivery) -> None:
        raise SilentError

    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, jobs=["a"])
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(dead(connection, queue))
    ((death, _),) = await dead_letter_records(connection, queue)
    assert (death.error_class or "").endswith("SilentError")
    assert death.error_message is None


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["no subject", "interest retention", "none declared", "not provisioned"])
async def test_a_job_that_is_given_up_stays_in_the_queue_where_no_copy_can_be_stored(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    letters: dict[str, Any] = {
        "no subject": {"name": f"{name}-dead", "subjects": [f"{MAX_DELIVERIES}.{name}.*", f"{TERMINATED}.{name}.*"]},
        "interest retention": {"name": f"{name}-dead", "retention": "interest"},
    }
    declared = None if problem == "none declared" else letters.get(problem, f"{name}-dead")
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, dead_letters=declared, **NO_ARCHIVE)
    if problem == "not provisioned":
        await connection.api(f"STREAM.DELETE.{name}-dead")
    text = {
        "no subject": f'the dead letter queue {name}-dead captures no copies: add "dead.{name}.>" to its subjects',
        "interest retention": f"the dead letter queue {name}-dead has interest retention: recreate it with limits",
        "none declared": f"{name} declares no dead letter queue: declare dead_letters and provision it",
        "not provisioned": f"the dead letter queue {name}-dead doesn't exist: provision the queue",
    }[problem]
    attempts: list[int] = []

    def fail(job: Delivery) -> None:
        attempts.append(job.attempt)
        raise GiveUpError("bad printer")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(lambda: text in caplog.text)
        assert "since terminating them would destroy their bodies" in caplog.text
        caplog.clear()
        await publish_jobs(connection, queue, ["a"])
        await eventually(lambda: attempts == [1, 2, 3])
        await eventually(lambda: caplog.text.count("is handed back although its handler gave it up") == 3)
        assert text in caplog.text
    job = await get_message(connection, name, 1)
    assert job is not None
    assert job.data == b"a"


async def test_a_running_worker_notices_that_a_dead_letter_queue_now_captures_copies(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    advisories = [f"{MAX_DELIVERIES}.{name}.*", f"{TERMINATED}.{name}.*"]
    queue = await make_queue(
        connection, name, consumer=LONG_ACK_WAIT, dead_letters={"name": f"{name}-dead", "subjects": advisories}
    )
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await change(connection, f"{name}-dead", subjects=[*advisories, f"dead.{name}.>"])
        await publish_jobs(connection, queue, ["a"])
        await until_stored(connection, queue.name, 0)
    assert [death.explanation for death, _ in await dead_letter_records(connection, queue)] == ["bad printer"]


async def waiting_pulls(connection: NatsPyConnection, name: str) -> int:
    return int((await consumer_info(connection, name, "worker"))["num_waiting"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["deleted", "full", "narrowed"])
async def test_no_job_is_lost_when_the_dead_letter_queue_is_lost_while_the_worker_runs(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    loss: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(seams.DEAD_LETTERING_COPY_TIMEOUT, 0.7)
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 20}, **NO_ARCHIVE)
    lost = f"{name}-dead"
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        if loss == "deleted":
            await connection.api(f"STREAM.DELETE.{lost}")
        elif loss == "full":
            await change(connection, lost, discard="new", max_bytes=1)
        else:
            await change(connection, lost, subjects=[f"{MAX_DELIVERIES}.{name}.*"])
        await publish_jobs(connection, queue, ["a"])
        await eventually(lambda: "is handed back although its handler gave it up" in caplog.text)
        assert await stored_count(connection, name) == 1
        if loss == "full":
            await change(connection, lost, discard="old", max_bytes=-1)
        else:
            await provision(connection, queue)
        await until_stored(connection, queue.name, 0)
    assert [job.data for _, job in await dead_letter_records(connection, queue)] == [b"a"]


@pytest.mark.slow
async def test_a_copy_stored_in_another_stream_does_not_count(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, **NO_ARCHIVE)
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await change(connection, f"{name}-dead", subjects=[f"{MAX_DELIVERIES}.{name}.*"])
        await connection.api(f"STREAM.CREATE.{name}-other", {"name": f"{name}-other", "subjects": [f"dead.{name}.>"]})
        await publish_jobs(connection, queue, ["a"])
        text = f"expected {name}-dead to store dead.{name}.worker.1, found {name}-other"
        await eventually(lambda: caplog.text.count(text) == 3)
    assert await stored_count(connection, name) == 1


async def test_an_answer_from_another_subscriber_does_not_count_as_a_stored_copy(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(seams.DEAD_LETTERING_COPY_TIMEOUT, 0.7)
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, **NO_ARCHIVE)

    async def respond(message: Msg) -> None:
        await message.respond(b"not a PubAck")

    await connection.client.subscribe(f"dead.{name}.>", cb=respond)
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await change(connection, f"{name}-dead", subjects=[f"{MAX_DELIVERIES}.{name}.*"])
        await publish_jobs(connection, queue, ["a"])
        await eventually(lambda: "found another answer: something else subscribes to it" in caplog.text)
    assert await stored_count(connection, name) == 1


@pytest.mark.slow
async def test_a_last_failure_whose_copy_cannot_be_stored_does_not_delay_the_dead_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})

    def fail(_: Delivery) -> None:
        raise ValueError("no paper")

    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(lambda: waiting_pulls(connection, name))
        await change(connection, f"{name}-dead", subjects=[f"{MAX_DELIVERIES}.{name}.*"])
        await publish_jobs(connection, queue, ["a"])
        await eventually(dead(connection, queue), within=4)
    assert (
        f"the reason why job 1 of {name} is dead isn't stored: no stream captures dead.{name}.worker.1 just now"
        in caplog.text
    )
    assert await stored_count(connection, name) == 1


@pytest.mark.parametrize("reserve", [3_000, 1_200, 700, 630])
async def test_long_texts_are_shortened_for_large_jobs(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, reserve: int
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    body = b"x" * (connection.client.max_payload - reserve)

    def fail(_: Delivery) -> None:
        raise GiveUpError("é" * 2_000) from ValueError("ü" * 2_000)

    await connection.client.jetstream().publish(f"{name}.jobs.a", body)
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await until_stored(connection, queue.name, 0)
    ((death, job),) = await dead_letter_records(connection, queue)
    assert job.data == body
    assert death.error_class == "ValueError"
    texts = ("é" * 100, "ü" * 100) if reserve > 1_000 else (None, None)
    assert (death.explanation, death.error_message) == texts
    assert (death.error_place is not None, death.traceback_digest is not None) == (reserve == 3_000, reserve >= 700)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_payload", "max_msg_size"])
async def test_a_job_whose_copy_is_too_large_stays_and_the_connection_stays_open(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    letters: dict[str, Any] = {"name": f"{name}-dead"}
    if limit == "max_msg_size":
        letters["max_msg_size"] = 600
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, dead_letters=letters, **NO_ARCHIVE)
    largest = connection.client.max_payload if limit == "max_payload" else 600
    body = b"x" * (largest - 20)
    await connection.client.jetstream().publish(f"{name}.jobs.a", body)
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: caplog.text.count("is handed back although its handler gave it up") == 3)
    assert f"expected a copy of at most {largest} bytes, found" in caplog.text
    assert "isn't confirmed yet" not in caplog.text
    job = await get_message(connection, name, 1)
    assert job is not None
    assert job.data == body


@pytest.mark.parametrize("why", ["no subject", "too big"])
async def test_a_job_that_cannot_be_copied_is_terminated_where_the_archive_holds_it(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    letters: dict[str, Any] = {"name": f"{name}-dead"}
    if why == "no subject":
        letters["subjects"] = [f"{MAX_DELIVERIES}.{name}.*", f"{TERMINATED}.{name}.*"]
    else:
        letters["max_msg_size"] = 600
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT, dead_letters=letters)
    body = "x" * 590
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await publish_jobs(connection, queue, ["a", "b", body])
        await until_stored(connection, queue.name, 0)
    assert f"job 3 of {name} is terminated with its body in the archive only: " in caplog.text
    archived = [copy.data for copy in await entries(connection, str(queue.archive and queue.archive.name))]
    assert archived[-1] == body.encode()
    terminations = [
        entry for entry in await entries(connection, f"{name}-dead") if entry.subject.startswith(TERMINATED)
    ]
    assert [json.loads(entry.data)["reason"] for entry in terminations] == ["bad printer"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("lack", ["unheard", "archive deleted", "not archived", "headers only"])
async def test_a_job_stays_in_the_queue_where_the_archive_is_no_substitute_for_a_copy(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, lack: str, caplog: pytest.LogCaptureFixture
) -> None:
    subjects = [f"{MAX_DELIVERIES}.{name}.*"]
    if lack != "unheard":
        subjects.append(f"{TERMINATED}.{name}.*")
    queue = await make_queue(
        connection, name, consumer=LONG_ACK_WAIT, dead_letters={"name": f"{name}-dead", "subjects": subjects}
    )
    assert queue.archive is not None
    if lack == "headers only":
        await change(connection, name, republish={"src": ">", "dest": f"archive.{name}.>", "headers_only": True})
    await publish_jobs(connection, queue, ["a"])
    if lack == "archive deleted":
        await connection.api(f"STREAM.DELETE.{queue.archive.name}")
    if lack == "not archived":
        await connection.api(f"STREAM.PURGE.{queue.archive.name}")
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await eventually(lambda: caplog.text.count("is handed back although its handler gave it up") == 3)
    assert await stored_count(connection, name) == 1


async def test_a_job_that_another_client_acknowledged_meanwhile_is_no_dead_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)

    async def fail(job: Delivery) -> None:
        await connection.request(f"$JS.ACK.{name}.worker.1.{job.sequence}.1.0.0", b"+ACK")
        raise GiveUpError("bad printer")

    await publish_jobs(connection, queue, ["a"])
    async with running_worker(Worker(queue, "worker", fail, settings)):
        await eventually(lambda: f"job 1 of {name} is no longer stored" in caplog.text)
    assert await entries(connection, f"{name}-dead") == []


async def test_a_job_of_a_recreated_stream_is_not_mistaken_for_the_given_up_one(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, consumer=LONG_ACK_WAIT)
    first_one = asyncio.Event()

    async def fail(job: Delivery) -> None:
        if job.body == b"new":
            await asyncio.Event().wait()
        await connection.api(f"STREAM.DELETE.{name}")
        await make_queue(connection, name, consumer=LONG_ACK_WAIT)
        await publish_jobs(connection, queue, ["new"])
        first_one.set()
        raise GiveUpError("bad printer")

    await publish_jobs(connection, queue, ["old"])
    worker = Worker(queue, "worker", fail, settings, grace=0)
    async with running_worker(worker):
        await eventually(first_one.is_set)
        await eventually(lambda: f"job 1 of {name} is no longer stored" in caplog.text)
    job = await get_message(connection, name, 1)
    assert job is not None
    assert job.data == b"new"
    assert await copies(connection, queue) == []


@pytest.mark.slow
async def test_a_copy_is_stored_again_where_only_its_message_id_is_left(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 1}, jobs=["a"])
    stored = await get_message(connection, name, 1)
    assert stored is not None
    headers = {"Nats-Msg-Id": f"dead:worker:{name}:1:{stored.time}:1"}
    earlier = await connection.client.jetstream().publish(f"dead.{name}.worker.1", b"a", headers=headers)
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": earlier.seq})
    async with running_worker(Worker(queue, "worker", give_up, settings)):
        await until_stored(connection, queue.name, 0)
    assert [(death.sequence, job.data) for death, job in await dead_letter_records(connection, queue)] == [(1, b"a")]


@pytest.mark.slow
async def test_no_job_is_lost_when_the_server_is_killed_while_a_job_is_given_up(
    own_nats: NatsServer, name: str
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "2s", "max_deliver": 10})
        started, release = asyncio.Event(), asyncio.Event()

        async def fail(_: Delivery) -> None:
            started.set()
            await release.wait()
            raise GiveUpError("bad printer")

        await publish_jobs(connection, queue, ["a"])
        async with running_worker(Worker(queue, "worker", fail, settings)):
            await eventually(started.is_set)
            own_nats.kill()
            release.set()
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
            await until_stored(connection, queue.name, 0, within=20)
        messages = await dead_letter_records(connection, queue)
    assert {death.sequence for death, _ in messages} == {1}
    assert {job.data for _, job in messages} == {b"a"}


# The same fault has the same digest, whatever the message and wherever the handler ran.


ONCE = {"ack_wait": "1s", "max_deliver": 1}
FAULTS = ["feed one", "feed two words", "fold one", "give-up one", "give-up two words"]


async def deaths(
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    queue: WorkQueue,
    runner: str,
    faults: Sequence[str] = tuple(FAULTS),
) -> dict[str, Death]:
    await publish_jobs(connection, queue, faults)
    handler = raise_from_body_async if runner == "task" else raise_from_body

    async def all_recorded() -> bool:
        return len(await dead_letter_records(connection, queue)) == len(faults)

    async with running_worker(Worker(queue, "worker", handler, settings, processes=runner == "process")):
        await eventually(all_recorded, within=20)
    return {job.data.decode(): death for death, job in await dead_letter_records(connection, queue)}


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["task", "thread", "process"])
async def test_the_same_fault_has_the_same_digest_and_another_place_has_another(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, runner: str
) -> None:
    queue = await make_queue(connection, name, consumer=ONCE)
    records = await deaths(connection, settings, queue, runner)
    digests = {fault: death.traceback_digest or "" for fault, death in records.items()}
    assert all(re.fullmatch(r"[0-9a-f]{12}", digest) for digest in digests.values())
    assert digests["feed one"] == digests["feed two words"]
    assert digests["give-up one"] == digests["give-up two words"]
    assert len({digests["feed one"], digests["fold one"], digests["give-up one"]}) == 3
    places = {fault: (death.error_place or "").rpartition(":")[0] for fault, death in records.items()}
    assert places == {fault: f"process_handlers:{'_fold' if fault.startswith('fold') else '_feed'}" for fault in FAULTS}
    # Explanation and fingerprint still distinguish the messages.
    assert records["give-up one"].explanation == "never one"
    assert records["feed one"].fingerprint != records["feed two words"].fingerprint


@pytest.mark.slow
async def test_a_process_records_the_same_digest_as_a_thread(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    records = {}
    for runner in ("thread", "process"):
        queue = await make_queue(connection, f"{name}-{runner}", consumer=ONCE)
        records_of_runner = await deaths(connection, settings, queue, runner)
        records[runner] = {
            fault: (death.traceback_digest, death.error_place) for fault, death in records_of_runner.items()
        }
    assert records["thread"] == records["process"]


@pytest.mark.slow
async def test_letters_are_grouped_selected_and_parked_by_where_their_handler_failed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=ONCE)
    records = await deaths(connection, settings, queue, "thread", ["feed one", "feed two words", "fold one"])
    feed, fold = records["feed one"], records["fold one"]
    summary = await summarise_dead_letters(connection, queue, group_by=["traceback_digest", "error_place"])
    assert {key: group.count for key, group in summary.groups.items()} == {
        (feed.traceback_digest, feed.error_place): 2,
        (fold.traceback_digest, fold.error_place): 1,
    }
    same_fault = Selection(traceback_digest=feed.traceback_digest)
    shown = await preview(connection, queue, RedriveRequest(same_fault))
    assert [letter["error_place"] for letter in shown.sample] == [feed.error_place] * 2
    parked = await redrive_dead_letters(
        connection, queue, RedriveRequest(same_fault, max_redrives=0, why="to be repaired")
    )
    assert list(parked.parked) == [1, 2]
    letters = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    assert {letter.death.error_place for letter in letters} == {feed.error_place}
    back = await redrive_dead_letters(connection, queue, RedriveRequest(same_fault.model_copy(update={"parked": True})))
    assert list(back.redriven) == [1, 2]
    for sequence in back.redriven.values():
        job = await stored_message(connection, name, sequence)
        assert [header for header, _ in job.headers if header.startswith("Dead-Letter-")] == []
