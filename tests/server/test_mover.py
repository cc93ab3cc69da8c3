"""Movers: scheduled jobs that are due reach their queue once, whoever is killed, stopped, cancelled or hostile."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import nats
import pytest

from airflow_provider_jetstream.dev.process import Process
from airflow_provider_jetstream.jetstream import (
    Job,
    NotFoundError,
    PermissionDeniedError,
    QueueDeclarationError,
    cancel,
    connect,
    connection_settings,
    move_due_jobs,
    permissions,
    provision,
    publish,
    running_warnings,
)
from testbed.dead_letters import stream_messages
from testbed.face import authorization, consumer_info, find_cancellation, inspect_all_queues
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, running_mover, small_queue, stored_count
from testbed.seams import DUE_JOBS_MOVED_WITHIN, MOVER_KEEP, MOVER_STORE_EACH, current
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from pathlib import Path

    from nats.aio.msg import Msg
    from pytest_mock import MockerFixture

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Policy, WorkQueue
    from testbed.face import NatsPyConnection

_SECRET = "of-every-user"


async def _schedule(connection: NatsPyConnection, queue: WorkQueue, *jobs: Job) -> None:
    (await publish(connection, queue, jobs, subject=f"{queue.name}.jobs.a")).raise_for_failures()


async def _due(connection: NatsPyConnection, name: str) -> int:
    return len(await stream_messages(connection, f"{name}-schedules", f"due.{name}.>"))


async def _are_due(connection: NatsPyConnection, name: str, count: int) -> bool:
    return await _due(connection, name) == count


async def _bodies(connection: NatsPyConnection, stream: str) -> Counter[bytes]:
    return Counter([message.data for message in await stream_messages(connection, stream)])


async def _is_moved(connection: NatsPyConnection, name: str) -> bool:
    return await _due(connection, name) == 0


@pytest.mark.slow
async def test_two_movers_move_each_job_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, schedules=True)
    async with running_mover(connection, queue) as one, running_mover(connection, queue) as other:
        await _schedule(connection, queue, *[Job(b"%d" % number, delay="300ms") for number in range(300)])
        await eventually(lambda: _stored(connection, name, 300))
        await eventually(lambda: _is_moved(connection, name))
    assert one.result() + other.result() == 300
    assert set((await _bodies(connection, name)).values()) == {1}
    assert await stored_count(connection, f"{name}-archive") == 300


async def _stored(connection: NatsPyConnection, name: str, count: int) -> bool:
    return await stored_count(connection, name) >= count


async def _store_as_mover(connection: NatsPyConnection, name: str) -> None:
    """Store the jobs that are due as a mover does that is killed right afterwards."""
    for message in await stream_messages(connection, f"{name}-schedules", f"due.{name}.>"):
        own = [pair for pair in message.headers if not pair[0].startswith(("Nats-", "Scheduled-"))]
        headers = dict(own) | {"Nats-Msg-Id": message.header("Scheduled-Msg-Id") or ""}
        subject = message.subject.removeprefix(f"due.{name}.")
        await connection.client.jetstream().publish(subject, message.data, headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("window", ["100ms", "2m"])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("archive", [True, False])
async def test_a_job_that_a_killed_mover_had_stored_is_not_stored_again(
    connection: NatsPyConnection, name: str, window: str, *, is_done: bool, archive: bool
) -> None:
    if is_done and not archive and window != "2m":
        # Nothing remembers such a job: it may be done once more, as the guarantees say.
        return
    consumer = {} if archive else {"sample_freq": "100%"}
    queue = await make_queue(
        *(connection, name), consumer=consumer, schedules=True, duplicate_window=window, archive=archive
    )
    await _schedule(connection, queue, Job(b"a", id="1", delay="100ms"), Job(b"b", delay="100ms"))
    await eventually(lambda: _are_due(connection, name, 2))
    await _store_as_mover(connection, name)
    if is_done:
        for message in await pull_jobs(connection, queue, 2):
            await message.ack_sync()
    # The server stores copies, and what it says of acknowledgements, a moment later.
    await asyncio.sleep(0.2)
    before = await stored_count(connection, name)
    async with running_mover(connection, queue):
        await eventually(lambda: _is_moved(connection, name))
    assert (before, await stored_count(connection, name)) == ((0, 0) if is_done else (2, 2))


@pytest.mark.parametrize("when", ["in time", "long after"])
@pytest.mark.parametrize(
    ("subject", "body", "headers"),
    [
        ("x", b"mine", {}),
        ("a", b"mine", {}),
        ("a", b"job", {"Airflow-Task": "x"}),
        ("x", b"job", {}),
        ("a", b"", {}),
    ],
)
async def test_a_job_whose_message_id_somebody_took_is_moved_all_the_same(
    connection: NatsPyConnection, name: str, subject: str, body: bytes, headers: dict[str, str], when: str
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    await _schedule(connection, queue, Job(b"job", id="1", delay="100ms"))
    await eventually(lambda: _are_due(connection, name, 1))
    (due,) = await stream_messages(connection, f"{name}-schedules", f"due.{name}.>")
    taken = headers | {"Nats-Msg-Id": due.header("Scheduled-Msg-Id") or "", "Job-Id": "1"}
    await connection.client.jetstream().publish(f"{name}.jobs.{subject}", body, headers=taken)
    if when == "long after":
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
    async with running_mover(connection, queue):
        await eventually(lambda: _is_moved(connection, name))
    found = await stream_messages(connection, name)
    assert [message.data for message in found][-1:] == [b"job"]
    assert found[-1].header("Scheduled-Msg-Id") == due.header("Scheduled-Msg-Id")
    # Another mover, which knows nothing of it, stores it no third time.
    count = len(found)
    again = {"Job-Id": "1", "Scheduled-Msg-Id": due.header("Scheduled-Msg-Id") or ""}
    await _make_due(connection, name, f"{name}.jobs.a", due.data, again)
    await eventually(lambda: _are_due(connection, name, 1))
    async with running_mover(connection, queue):
        await eventually(lambda: _is_moved(connection, name))
    assert await stored_count(connection, name) == count


async def _make_due(
    connection: NatsPyConnection, name: str, subject: str, body: bytes, headers: dict[str, str] | None = None
) -> None:
    """Have the server make a job of a schedule that a program of any make has stored."""
    schedule = {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": f"due.{name}.{subject}"}
    own = f"scheduled.{name}.once.{uuid4().hex}"
    await connection.client.jetstream().publish(own, body, headers=schedule | (headers or {}))


async def test_what_is_due_for_subjects_that_the_queue_lacks_stays_and_is_named(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Of a stream that takes more than provisioning declares; the server refuses such schedules otherwise.
    queue = await make_queue(connection, name, schedules={"subjects": [f"scheduled.{name}.>", f"due.{name}.>"]})
    elsewhere = {"name": f"{name}x", "subjects": [f"{name}x.>", f"completed.{name}x.>"]}
    await connection.api(f"STREAM.CREATE.{name}x", elsewhere)
    for subject in (f"{name}x.a", f"requeued.{name}.1", f"completed.{name}.worker.1", "$JS.API.INFO"):
        await _make_due(connection, name, subject, b"x")
    await _make_due(connection, name, f"{name}.jobs.{'a' * 3_500}", b"x")
    await eventually(lambda: _are_due(connection, name, 5))
    async with running_mover(connection, queue):
        await _make_due(connection, name, f"{name}.jobs.a", b"good")
        await eventually(lambda: _stored(connection, name, 1))
        await eventually(lambda: _are_due(connection, name, 5))
    assert await _bodies(connection, name) == {b"good": 1}
    assert [await stored_count(connection, f"{name}{end}") for end in ("x", "-events")] == [0, 0]
    assert len([record for record in caplog.records if "has no such subject" in record.message]) == 4
    assert len([record for record in caplog.records if "a subject of at most 3500 bytes" in record.message]) == 1


async def test_no_answer_that_a_client_directs_among_the_jobs_that_are_due_is_a_job(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions don't apply to reply subjects: here those of one who publishes to another queue."""
    queue, other = await make_queue(connection, name, schedules=True), await make_queue(connection, f"{name}x")
    await _schedule(connection, queue, Job(b"stays", id="1", delay="1h"))
    await _make_due(connection, name, f"{name}.jobs.a", b"job")
    await eventually(lambda: _are_due(connection, name, 1))
    (due,) = await stream_messages(connection, f"{name}-schedules", f"due.{name}.>")
    await publish_jobs(connection, other, ["body"])
    batch = {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1"}
    by_sequence = json.dumps({"seq": due.sequence}).encode()
    requests: list[tuple[str, bytes, dict[str, str] | None]] = [
        (f"{other.name}.jobs.a", b"job", None),
        (f"{other.name}.jobs.a", b"job", {"Nats-Expected-Stream": "none"}),
        (f"{other.name}.jobs.a", b"job", batch),
        (f"{other.name}.jobs.a", b"job", batch | {"Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}),
        ("$JS.API.INFO", b"", None),
        (f"$JS.API.STREAM.INFO.{other.name}", b"", None),
        (f"$JS.API.STREAM.MSG.GET.{other.name}", b'{"seq": 1}', None),
        (f"$JS.API.DIRECT.GET.{name}-archive", b'{"seq": 1}', None),
        (f"$JS.API.DIRECT.GET.{name}-schedules", by_sequence, None),
        (f"$JS.API.DIRECT.GET.{name}-schedules", b'{"seq": 1}', None),
        (f"$JS.API.CONSUMER.MSG.NEXT.{name}-schedules.none", b"", None),
    ]
    address = connection.client.connected_url
    assert address is not None
    foreign = await nats.connect(address.netloc)
    for subject, body, headers in requests:
        await foreign.publish(subject, body, reply=f"due.{name}.{name}.jobs.b", headers=headers)
    await foreign.flush()
    await foreign.close()
    await eventually(lambda: _have_come(connection, name))
    async with running_mover(connection, queue) as mover:
        await eventually(lambda: _is_moved(connection, name))
    assert mover.result() == 1
    assert [(message.subject, message.data) for message in await stream_messages(connection, name)] == [
        (f"{name}.jobs.a", b"job")
    ]
    assert await _bodies(connection, f"{name}-schedules") == {b"stays": 1}
    assert "weren't made of a schedule: they are no jobs, and are removed" in caplog.text


@pytest.mark.since_server("2.14", "repeated schedules")
async def test_no_answer_that_a_client_directs_to_a_schedule_keeps_its_jobs_from_coming(
    own_nats: NatsServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue, other = await make_queue(connection, name, schedules=True), await make_queue(connection, f"{name}x")
        jobs = [
            Job(b"once", id="1", delay="1s", headers={"A": "b"}),
            Job(b"later", id="2", delay="1h"),
            Job(b"untouched", id="3", delay="1h"),
            Job(b"every", id="4", every="0 0 3 * * *", time_zone="Europe/Vienna"),
            Job(b"often", id="5", every="1s"),
        ]
        await _schedule(connection, queue, *jobs)
        before = await _schedules(connection, name)
        foreign = await nats.connect(own_nats.url)
        for subject, (body, _) in before.items():
            if body != b"untouched":
                for _ in range(2):
                    await foreign.publish(f"{other.name}.jobs.a", b"", reply=subject)
        await foreign.publish(f"{other.name}.jobs.a", b"", reply=f"scheduled.{name}.once.none.none")
        await foreign.flush()
        await foreign.close()
        await eventually(lambda: _stored(connection, other.name, 9))
        async with running_mover(connection, queue):
            await eventually(lambda: _has_each(connection, name, {b"once", b"often"}))
        once = [message for message in await stream_messages(connection, name) if message.data == b"once"]
        assert [message.header("A") for message in once] == ["b"]
        after = {subject: own for subject, own in (await _schedules(connection, name)).items() if own[1]}
        assert after == {subject: own for subject, own in before.items() if own[0] != b"once"}
    assert "4 schedules of" in caplog.text


async def _schedules(connection: NatsPyConnection, name: str) -> dict[str, tuple[bytes, str | None]]:
    found = await stream_messages(connection, f"{name}-schedules", f"scheduled.{name}.>")
    return {message.subject: (message.data, message.header("Nats-Schedule")) for message in found}


async def _has_each(connection: NatsPyConnection, name: str, bodies: set[bytes]) -> bool:
    return bodies <= set(await _bodies(connection, name))


async def _have_come(connection: NatsPyConnection, name: str) -> bool:
    return await _due(connection, name) > 8


@pytest.mark.parametrize(
    "edit",
    [
        {"headers_only": True},
        {"max_deliver": 3},
        {"filter_subject": "", "filter_subjects": ["due.>", "scheduled.>"]},
        {"backoff": [1_000_000, 2_000_000], "max_deliver": 5},
    ],
)
async def test_a_mover_refuses_a_consumer_that_another_tool_has_edited(
    connection: NatsPyConnection, name: str, edit: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    stream = f"{name}-schedules"
    config = (await consumer_info(connection, stream, "mover"))["config"]
    edited = {"stream_name": stream, "config": config | edit, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{stream}.mover", edited)
    await _make_due(connection, name, f"{name}.jobs.a", b"job")
    with pytest.raises(
        QueueDeclarationError, match=f"expected the consumer mover of {stream} as it was provisioned"
    ) as e:
        await move_due_jobs(connection, queue)
    assert all(field in str(e.value) for field in edit)
    assert await stored_count(connection, name) == 0
    if "headers_only" in edit:
        # What no declaration sets, provisioning names only.
        await connection.api(f"CONSUMER.CREATE.{stream}.mover", edited | {"config": config})
    await provision(connection, queue)
    async with running_mover(connection, queue):
        await eventually(lambda: _stored(connection, name, 1))
    assert await _bodies(connection, name) == {b"job": 1}


@pytest.mark.slow
async def test_a_mover_stores_no_job_that_it_gets_without_its_body(connection: NatsPyConnection, name: str) -> None:
    """Another tool edits the consumer while the mover runs."""
    queue = await make_queue(connection, name, schedules=True)
    stream = f"{name}-schedules"
    config = (await consumer_info(connection, stream, "mover"))["config"]
    async with running_mover(connection, queue):
        await _make_due(connection, name, f"{name}.jobs.a", b"first")
        await eventually(lambda: _stored(connection, name, 1))
        edited = {"stream_name": stream, "config": config | {"headers_only": True}, "action": "update"}
        await connection.api(f"CONSUMER.CREATE.{stream}.mover", edited)
        await _make_due(connection, name, f"{name}.jobs.a", b"second")
        await eventually(lambda: _is_held(connection, stream))
        await eventually(lambda: _are_due(connection, name, 1))
    assert await _bodies(connection, name) == {b"first": 1}
    assert await _due(connection, name) == 1


async def test_jobs_that_nobody_moves_are_named(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    await _schedule(connection, queue, *[Job(b"%d" % number, delay="100ms") for number in range(3)])
    assert f"nobody moves scheduled jobs of {name} once they are due: run jetstream-queue schedules run {name}" in (
        caplog.text
    )
    await eventually(lambda: _are_due(connection, name, 3))
    # Otherwise the test would wait for it.
    monkeypatch.setattr(DUE_JOBS_MOVED_WITHIN, 0.0)
    (warning,) = [found for found in await running_warnings(connection, queue) if found.name == "due-jobs"]
    assert str(warning).startswith(f"3 jobs of {name} are due since ")
    assert str(warning).endswith(f" UTC, and nobody moves them to the queue: run jetstream-queue schedules run {name}")
    assert await _due_count(connection, name) == 3
    caplog.clear()
    async with running_mover(connection, queue):
        await eventually(lambda: _is_moved(connection, name))
        await eventually(lambda: _is_waiting(connection, name))
        await _schedule(connection, queue, Job(b"later", delay="1h"))
        assert "nobody moves" not in caplog.text
        assert await _due_count(connection, name) == 0
    assert not [found for found in await running_warnings(connection, queue) if found.name == "due-jobs"]


async def _is_waiting(connection: NatsPyConnection, name: str) -> bool:
    return bool((await consumer_info(connection, f"{name}-schedules", "mover"))["num_waiting"])


async def _due_count(connection: NatsPyConnection, name: str) -> int:
    (due,) = [found.due for found in await inspect_all_queues(connection) if found.name == name]
    return due.count if due else 0


async def test_a_mover_waits_while_the_queue_is_full_and_leaves_the_rest_to_others(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, schedules=True, discard="new", max_msgs=2)
    async with running_mover(connection, queue):
        await _schedule(connection, queue, *[Job(b"%d" % number, delay="100ms") for number in range(5)])
        await eventually(lambda: _stored(connection, name, 2))
        await eventually(lambda: _are_due(connection, name, 3))
    # The first one has told the server that it has them no more.
    done: list[bytes] = []
    async with running_mover(connection, queue):
        while len(done) < 5:
            for message in await pull_jobs(connection, queue, 1, within=20):
                done.append(message.data)
                await message.ack_sync()
    assert sorted(done) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_mover_that_was_stopped_for_long_stores_nothing_of_what_it_had(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name, schedules=True, duplicate_window="100ms", discard="new", max_msgs=1)
    stream = f"{name}-schedules"
    config = (await consumer_info(connection, stream, "mover"))["config"] | {"ack_wait": 1_000_000_000}
    await connection.api(f"CONSUMER.CREATE.{stream}.mover", {"stream_name": stream, "config": config})
    await _schedule(connection, queue, Job(b"in the way"), Job(b"job", delay="100ms"))

    # As if the process had been suspended: it sends no sign of progress, and its clock goes on.
    async def nothing(*_: object) -> None:
        pass

    mocker.patch(MOVER_KEEP, nothing)
    async with running_mover(connection, queue) as first:
        await eventually(lambda: _is_held(connection, stream))
        mocker.stopall()
        async with running_mover(connection, queue) as second:
            await eventually(lambda: _deliveries(connection, stream, 2))
            done = []
            for _ in range(2):
                (message,) = await pull_jobs(connection, queue, 1)
                done.append(message.data)
                await message.ack_sync()
            await eventually(lambda: _is_moved(connection, name))
            with pytest.raises(TimeoutError):
                await pull_jobs(connection, queue, 1, within=2)
    assert (done, first.result() + second.result()) == ([b"in the way", b"job"], 1)


async def test_a_job_that_was_cancelled_on_its_way_is_cancelled_in_the_queue(
    connection: NatsPyConnection, name: str, mocker: MockerFixture
) -> None:
    queue = await make_queue(connection, name, schedules=True)
    await _schedule(connection, queue, Job(b"job", id="1", delay="100ms"))
    await eventually(lambda: _are_due(connection, name, 1))

    store_each = current(MOVER_STORE_EACH)

    async def cancel_first(*arguments: Any) -> Any:
        # At the last moment: the mover has looked for cancellations, and the job is about to be stored.
        await cancel(connection, queue, "1", "wrong price", "ann")
        return await store_each(*arguments)

    mocker.patch(MOVER_STORE_EACH, cancel_first)
    async with running_mover(connection, queue):
        (message,) = await pull_jobs(connection, queue, 1)
        await eventually(lambda: find_cancellation(connection, queue, "1", message.metadata.timestamp))
    found = await find_cancellation(connection, queue, "1")
    assert found is not None
    assert (found.why, found.by) == ("wrong price", "ann")


async def _is_held(connection: NatsPyConnection, stream: str) -> bool:
    return bool((await consumer_info(connection, stream, "mover"))["num_ack_pending"])


async def _deliveries(connection: NatsPyConnection, stream: str, count: int) -> bool:
    return bool((await consumer_info(connection, stream, "mover"))["delivered"]["consumer_seq"] >= count)


async def test_what_a_mover_needs_is_refused_with_what_to_do(connection: NatsPyConnection, name: str) -> None:
    with pytest.raises(QueueDeclarationError, match="expected schedules, found none"):
        await move_due_jobs(connection, small_queue(name))
    with pytest.raises(NotFoundError, match=f"{name}-schedules"):
        await move_due_jobs(connection, small_queue(name, schedules=True))


@pytest.mark.slow
async def test_only_the_role_mover_takes_jobs_that_are_due() -> None:
    queue = small_queue("orders", schedules=True)
    policies = [permissions(queue, role) for role in ("publisher", "scheduler", "worker", "mover")]
    text = re.sub(r"password: \S+", f'password: "{_SECRET}"', authorization(*policies))
    text = text.replace("users: [", f'users: [\n    {{ user: "admin", password: "{_SECRET}" }}', 1)
    with NatsServer(config=text, user="admin", password=_SECRET) as server:
        admin = connection_settings({"servers": (server.url,), "user": "admin", "password": _SECRET})
        async with connect(admin) as connection:
            await provision(connection, queue)
            await _schedule(connection, queue, Job(b"job", id="1", delay="100ms"))
            await eventually(lambda: _are_due(connection, "orders", 1))
            for policy in policies[:-1]:
                async with connect(_settings_of(server, policy)) as own:
                    with pytest.raises(PermissionDeniedError):
                        await move_due_jobs(own, queue)
            assert await _due(connection, "orders") == 1
            async with connect(_settings_of(server, policies[-1])) as own, running_mover(own, queue):
                await eventually(lambda: _is_moved(connection, "orders"))
            assert await _bodies(connection, "orders") == {b"job": 1}


def _settings_of(server: NatsServer, policy: Policy) -> ConnectionSettings:
    user = {"user": policy.user, "password": _SECRET, "inbox_prefix": policy.inbox_prefix}
    return connection_settings({"servers": (server.url,), "timeout": 5, **user})


@pytest.mark.slow
async def test_the_command_moves_jobs_and_ends_cleanly(own_nats: NatsServer, name: str, tmp_path: Path) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queues = [await make_queue(connection, f"{name}{end}", schedules=True) for end in "ab"]
        command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "schedules", "run"]
        process = Process.start(
            [*command, *(queue.name for queue in queues), "--server", own_nats.url], log_file=tmp_path / "mover.log"
        )
        for queue in queues:
            await _schedule(connection, queue, Job(b"job", delay="100ms"))
            (message,) = await pull_jobs(connection, queue, 1, within=60)
            assert message.data == b"job"
            await eventually(partial(_is_moved, connection, queue.name))
        process.signal(signal.SIGTERM)
        await eventually(lambda: not process.alive)
        assert process.returncode == 0, process.output()
        assert [f"{queue.name}: 1 jobs moved" in process.output() for queue in queues] == [True, True]


@pytest.mark.slow
async def test_the_command_waits_for_a_connection_that_is_lost_while_it_starts(
    own_nats: NatsServer, name: str, tmp_path: Path
) -> None:
    async with (
        connect(connection_settings({"servers": (own_nats.url,)})) as connection,
        tcp_proxy(own_nats.port) as proxy,
    ):
        queue = await make_queue(connection, name, schedules=True)
        await _schedule(connection, queue, Job(b"job", delay="100ms"))
        proxy.pause_at(b"STREAM.LIST")
        command = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "schedules", "run", name]
        process = Process.start([*command, "--server", proxy.url], log_file=tmp_path / "mover.log")
        async with asyncio.timeout(60):
            await proxy.found.wait()
        proxy.cut()
        proxy.drop()
        proxy.mend()
        (message,) = await pull_jobs(connection, queue, 1, within=60)
        assert message.data == b"job"
        process.signal(signal.SIGTERM)
        await eventually(lambda: not process.alive)
        assert process.returncode == 0, process.output()


async def test_nobody_but_the_server_decides_when_a_message_is_due(own_nats: NatsServer, name: str) -> None:
    """The times in a reply subject are the server's; what else a client sends to the mover's inbox is ignored."""
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = await make_queue(connection, name, schedules=True)
        inboxes: list[str] = []
        foreign = await nats.connect(own_nats.url)

        async def note(message: Msg) -> None:
            inboxes.append(message.reply)

        await foreign.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}-schedules.mover", cb=note)
        await foreign.flush()
        async with running_mover(connection, queue):
            await eventually(lambda: len(inboxes))
            for subject, reply in ((inboxes[0], "x.y"), (inboxes[0], "$JS.ACK.a.b.1.x.1.1.1"), (inboxes[0], "")):
                await foreign.publish(subject, b"", reply=reply, headers={"Status": "408"})
            await foreign.flush()
            await _schedule(connection, queue, Job(b"job", delay="100ms"))
            await eventually(lambda: _stored(connection, name, 1))
        await foreign.close()
        assert await _bodies(connection, name) == {b"job": 1}
