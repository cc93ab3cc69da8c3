"""The lease of a queue: one operation at a time changes dead letters, and the server refuses what others record."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.audit.lease import (
    Lease,
    LeaseRecord,
    SharedLease,
    read_lease,
    renewed,
    take_lease,
)
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock
from airflow_provider_jetstream.jetstream.contract import lease_subject
from airflow_provider_jetstream.jetstream.errors import (
    LeaseHeldError,
    LeaseLostError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from testbed import seams
from testbed.face import LetterRecord, last_message, open_audit, stream_info
from testbed.queues import eventually, make_dead_letters, make_queue, process_all, stored_count
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream import ConnectionSettings, DeadLetter, WorkQueue
    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


RESET_LEVEL = 4


def holder(*, seconds: float = 30.0, run: str = "first") -> LeaseRecord:
    return LeaseRecord(operation="redrive", run=run, who={"dag_id": "nightly", "map_index": -1}, seconds=seconds)


async def take(
    connection: NatsPyConnection, queue: WorkQueue, record: LeaseRecord | None = None, *, wait: float = 0.0
) -> Lease:
    assert queue.audit is not None
    return await take_lease(connection, queue.audit.name, queue.name, record or holder(), wait)


def letter_record(audit: AuditLog, sequence: int) -> LetterRecord:
    return LetterRecord(
        stream=audit.queue,
        created=audit.created,
        sequence=sequence,
        action="redriven",
        new_sequence=sequence + 100,
        subject="any",
        reason="max_deliveries",
        fingerprint="0",
    )


async def test_a_second_holder_is_refused_and_told_who_has_the_lease(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await take(connection, queue)
    with pytest.raises(LeaseHeldError, match=r"held by redrive first of dag_id nightly, since \S+Z, until \S+Z"):
        await take(connection, queue, holder(run="second"))


async def test_a_released_lease_can_be_taken_at_once_and_a_waiter_gets_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    first = await take(connection, queue)
    waiting = asyncio.create_task(take(connection, queue, holder(run="second"), wait=10))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await first.release()
    second = await waiting
    assert second.token > first.token
    # A clean end leaves no intent open.
    assert second.open_since is None


async def test_the_lease_of_a_killed_holder_is_taken_over_once_it_has_run_out(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    began = time.monotonic()
    first = await take(connection, queue, holder(seconds=1.5))
    second = await take(connection, queue, holder(run="second"), wait=10)
    assert time.monotonic() - began >= 1.5
    assert second.open_since == first.token


async def test_a_lease_runs_out_although_the_clock_of_the_server_was_set_back(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await take(connection, queue, holder(seconds=1.0))

    def an_hour_ago(info: Mapping[str, Any]) -> ServerClock:
        return ServerClock(datetime.fromisoformat(info["ts"]) - timedelta(hours=1), time.monotonic())

    monkeypatch.setattr(ServerClock, "of", an_hour_ago)
    began = time.monotonic()
    await take(connection, queue, wait=10)
    assert time.monotonic() - began >= 1.0


async def test_what_is_open_is_passed_on_until_an_operation_leaves_nothing_open(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    first = await take(connection, queue)
    first.leave_open()
    await first.release()
    second = await take(connection, queue)
    assert second.open_since == first.token
    second.leave_open()
    await second.release()
    third = await take(connection, queue)
    assert third.open_since == first.token
    await third.release()
    assert (await take(connection, queue)).open_since is None


@pytest.mark.slow
async def test_a_renewed_lease_keeps_its_token_and_is_held_beyond_its_time(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    lease = await take(connection, queue, holder(seconds=1.5))
    token = lease.token
    async with renewed(lease):
        with pytest.raises(LeaseHeldError):
            await take(connection, queue, holder(run="second"), wait=3)
        assert lease.token == token
        await lease.require()
    await take(connection, queue)


async def test_of_many_that_take_a_lease_at_once_one_gets_it(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    async with connect(settings) as other:
        connections = [connection, other] * 10
        results = await asyncio.gather(*(take(each_, queue) for each_ in connections), return_exceptions=True)
    assert sum(isinstance(result, Lease) for result in results) == 1
    assert sum(isinstance(result, LeaseHeldError) for result in results) == 19


@pytest.mark.parametrize("api_level", [None, 0])
async def test_the_audit_takes_no_records_of_a_holder_whose_lease_was_taken_over(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, api_level: int | None
) -> None:
    if api_level is not None:
        # A server before 2.11 ignores the condition.
        monkeypatch.setattr(connection, "api_level", api_level)
    queue = await make_queue(connection, name)
    audit = await open_audit(connection, queue)
    first = await take(connection, queue, holder(seconds=0.5))
    fenced = audit.fenced(first)
    assert await fenced.write([letter_record(audit, 1)]) == [None]
    await take(connection, queue, holder(run="second"), wait=5)
    with pytest.raises(LeaseLostError, match="redrive second"):
        await fenced.write([letter_record(audit, 2), letter_record(audit, 3)])
    with pytest.raises(LeaseLostError, match="redrive second"):
        await fenced.begin_run("first", {}, None)
    with pytest.raises(LeaseLostError, match="redrive second"):
        await fenced.require_lease()
    assert [await audit.last_record(sequence) is not None for sequence in (1, 2, 3)] == [True, False, False]


async def test_a_holder_that_comes_back_just_before_its_lease_runs_out_takes_it_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    lease = await take(connection, queue, holder(seconds=0.54))
    first = lease.token
    # Somebody may be about to take it, whom a renewal wouldn't stop.
    await asyncio.sleep(0.46)
    await lease.renew()
    assert lease.token > first


async def test_a_record_that_a_cluster_refuses_while_it_stores_another_one_is_stored_afterwards(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    audit = await open_audit(connection, queue)
    fenced = audit.fenced(await take(connection, queue))
    refusal = json.dumps({"error": {"code": 400, "err_code": 10164, "description": "wrong last sequence: 0"}}).encode()
    refused: list[str] = []
    store = connection.publish_acknowledged

    async def refuse_all(messages: Sequence[tuple[str, bytes]], *_: Any) -> list[bytes]:
        return [refusal for _ in messages]

    async def refuse_three(subject: str, *arguments: Any, **named: Any) -> bytes:
        refused.append(subject)
        return refusal if len(refused) <= 3 else await store(subject, *arguments, **named)

    monkeypatch.setattr(connection, "request_many", refuse_all)
    monkeypatch.setattr(connection, "publish_acknowledged", refuse_three)
    assert await fenced.write([letter_record(audit, 1), letter_record(audit, 5)]) == [None, None]
    assert len(refused) == 5
    assert [await audit.last_record(sequence) is not None for sequence in (1, 5)] == [True, True]


async def test_a_holder_that_was_stopped_for_a_while_goes_on_if_nobody_took_the_lease(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    lease = await take(connection, queue, holder(seconds=0.5))
    token = lease.token
    await asyncio.sleep(0.6)
    await lease.require()
    assert lease.token > token
    with pytest.raises(LeaseHeldError):
        await take(connection, queue, holder(run="second"))
    # Only a new token keeps out somebody who has seen that the lease ran out.
    state = await read_lease(connection, f"{name}-audit", name)
    assert state is not None
    assert state.token == lease.token
    assert state.open_since == token


@pytest.mark.slow
async def test_a_lease_that_cannot_be_read_holds_others_up_for_a_while_only(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    monkeypatch.setattr(seams.LEASE_RECORD_UNREADABLE_SECONDS, 0.3)
    later = b'{"version": 2, "operation": "redrive", "seconds": 30}'
    for body in (b"", b"\xff", b"{}", b"[1]", b'{"operation": "x", "seconds": 1e300}', later):
        await connection.client.jetstream().publish(lease_subject(name), body)
        with pytest.raises(LeaseHeldError, match="held by an operation that isn't understood"):
            await take(connection, queue)
        await (await take(connection, queue, wait=5)).release()


async def test_a_task_shares_the_lease_of_its_driver_as_long_as_that_is_renewed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    audit = await open_audit(connection, queue)
    lease = await take(connection, queue)
    async with connect(settings) as other:
        shared = SharedLease(other, audit.stream, name, lease.token)
        await shared.require()
        assert await audit.fenced(shared).write([letter_record(audit, 1)]) == [None]
        await lease.release()
        with pytest.raises(LeaseLostError):
            await audit.fenced(shared).write([letter_record(audit, 2)])
        with pytest.raises(LeaseLostError):
            await SharedLease(other, audit.stream, name, lease.token).require()
    killed = await take(connection, queue, holder(seconds=0.5))
    await asyncio.sleep(0.5)
    with pytest.raises(LeaseLostError):
        await SharedLease(connection, audit.stream, name, killed.token).require()


async def test_a_redrive_holds_the_lease_and_releases_it(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    held: list[bool] = []
    redrive = Steps.redrive

    async def look_at_the_lease(self: Steps, letters: Sequence[DeadLetter]) -> None:
        state = await read_lease(connection, f"{name}-audit", name)
        assert state is not None
        held.append(not state.record.released)
        await redrive(self, letters)

    monkeypatch.setattr(Steps, "redrive", look_at_the_lease)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(run="once"))
    assert (len(report.redriven), held) == (1, [True])
    last = await last_message(connection, f"{name}-audit", lease_subject(name))
    assert last is not None
    assert b'"released": true' in last.data


@pytest.mark.parametrize("other", ["park", "in_place"])
async def test_a_redrive_waits_for_another_one_and_says_who_it_is(
    connection: NatsPyConnection, name: str, other: str
) -> None:
    if other == "in_place" and connection.api_level < RESET_LEVEL:
        pytest.skip("nats-server can't reset a consumer before 2.14")
    queue = await make_queue(connection, name, dead=["a", "b"])
    lease = await take(connection, queue)
    request = RedriveRequest(max_redrives=0, lease_timeout=0.2)
    if other == "in_place":
        request = RedriveRequest(protocol=Protocol.IN_PLACE, lease_timeout=0.2)
    with pytest.raises(LeaseHeldError, match="redrive first of dag_id nightly"):
        await redrive_dead_letters(connection, queue, request)
    await lease.release()
    report = await redrive_dead_letters(connection, queue, request)
    assert len(report.redriven) + len(report.parked) == 2


async def test_a_redrive_whose_lease_is_taken_over_stops_and_another_one_goes_on(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead=[str(number) for number in range(6)])
    monkeypatch.setattr(seams.LEASE_SECONDS_OF, lambda _: 30.0)
    redrive = Steps.redrive
    batches = 0

    async def cut_off(self: Steps, letters: Sequence[DeadLetter]) -> None:
        nonlocal batches
        batches += 1
        if batches == 2:
            # As if the holder had been away for longer than its lease lasts.
            state = await read_lease(connection, f"{name}-audit", name)
            assert state is not None
            await connection.client.jetstream().publish(
                lease_subject(name), b'{"operation": "redrive", "run": "other", "seconds": 0.1}'
            )
        await redrive(self, letters)

    monkeypatch.setattr(Steps, "redrive", cut_off)
    with pytest.raises(LeaseLostError, match=r"redrive other.*redriven and 0 parked before"):
        await redrive_dead_letters(connection, queue, RedriveRequest(rate=3.0))
    monkeypatch.undo()
    await redrive_dead_letters(connection, queue)
    assert sorted(await process_all(connection, queue)) == [str(number) for number in range(6)]


@pytest.mark.slow
async def test_a_redrive_that_was_cut_off_for_longer_than_its_lease_changes_nothing_afterwards(
    nats: NatsServer, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, duplicate_window="500ms")
    bodies = [str(number) for number in range(40)]
    await make_dead_letters(connection, queue, bodies)
    monkeypatch.setattr(seams.LEASE_LEASE_SECONDS, 1.5)
    monkeypatch.setattr(seams.LEASE_TIME_LIMITS, 0.0)
    async with tcp_proxy(nats.port) as proxy:
        settings = connection_settings({"servers": (proxy.url,), "timeout": 1})
        async with connect(settings) as away:
            cut_off = asyncio.create_task(redrive_dead_letters(away, queue, RedriveRequest(rate=20.0)))

            async def some_are_back() -> bool:
                return await stored_count(connection, f"{name}-audit") > 12

            await eventually(some_are_back)
            proxy.cut()
            report = await redrive_dead_letters(connection, queue)
            report.raise_for_failures()
            done = await process_all(connection, queue)
            proxy.mend()
            # Where it finds no letter any more, it ends as usual.
            with suppress(TransientError):
                await cut_off
    done += await process_all(connection, queue)
    assert done == dict.fromkeys(bodies, 1)


async def test_a_redrive_is_refused_where_the_audit_takes_no_record(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit={"name": f"{name}-audit", "max_msgs": 1, "discard": "new"})
    await make_dead_letters(connection, queue, ["a"])
    await connection.client.jetstream().publish(f"audit.{name}.any", b"")
    with pytest.raises(RedriveError, match="nothing was redriven"):
        await redrive_dead_letters(connection, queue)
    assert (await stream_info(connection, name))["state"]["messages"] == 1


async def test_a_redrive_is_refused_where_the_lease_is_not_captured(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    config = (await stream_info(connection, f"{name}-audit"))["config"]
    # As somebody may declare it who knows an earlier version only.
    subjects = [f"audit.{name}.letters.*", f"audit.{name}.runs.*"]
    await connection.api(f"STREAM.UPDATE.{name}-audit", {**config, "subjects": subjects})
    with pytest.raises(RedriveError, match=f"on audit.{name}.lease, found: .*nothing was redriven"):
        await redrive_dead_letters(connection, queue)
    jetstream = connection.client.jetstream()
    await jetstream.add_stream(name=f"{name}-other", subjects=[f"audit.{name}.lease"])
    with pytest.raises(RedriveError, match=f"found that {name}-other does"):
        await redrive_dead_letters(connection, queue)
    assert (await stream_info(connection, name))["state"]["last_seq"] == 1


async def test_a_take_without_an_answer_is_not_believed_where_another_redrive_has_the_lease(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="abcdef")
    async with tcp_proxy(nats.port) as proxy, connect(connection_settings(_through(proxy.url))) as unlucky:
        proxy.pause_at(b"PUB " + lease_subject(name).encode() + b" ")
        refused = asyncio.create_task(redrive_dead_letters(unlucky, queue))
        await asyncio.wait_for(proxy.found.wait(), 30)
        other = asyncio.create_task(redrive_dead_letters(connection, queue, RedriveRequest(rate=2)))

        async def other_has_it() -> bool:
            return await last_message(connection, f"{name}-audit", lease_subject(name)) is not None

        await eventually(other_has_it)
        # What was held back never arrives.
        proxy.drop()
        with pytest.raises(TransientError):
            await refused
        assert len((await other).redriven) == 6
    assert await process_all(connection, queue) == dict.fromkeys("abcdef", 1)


def _through(url: str) -> dict[str, Any]:
    return {"servers": (url,), "timeout": 1}
