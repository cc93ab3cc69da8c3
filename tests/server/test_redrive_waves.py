"""Redrives in waves: the canary, the gate after each wave, and what people decide there."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from airflow_provider_jetstream.jetstream import (
    Redrive,
    RedriveRequest,
    RedriveState,
    StopWhen,
    abort_redrive,
    connect,
    find_dead_letters,
    list_redrives,
    pause_redrive,
    read_redrive,
    redrive_dead_letters,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError, NotFoundError, RedriveRequestError
from testbed.dead_letters import letter_records
from testbed.face import advance_redrive, consumer_info, stream_info, take_redrive_lease
from testbed.queues import CONSUMER, eventually, make_queue, pull_jobs, wait_for_entries
from testbed.shop import Shop
from testbed.shop import shop_with_letters as workers_with_letters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from airflow_provider_jetstream.jetstream import ConnectionSettings, RedriveReport, Wave, WorkQueue
    from testbed.face import NatsPyConnection

MANY = 5_000 if os.environ.get("FAULTS") == "full" else 500
WITHIN = 60.0
WAVES: Sequence[Any] = (10, 100, "rest")


@asynccontextmanager
async def shop_with_letters(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, count: int
) -> AsyncIterator[tuple[WorkQueue, Shop]]:
    """Make a queue, and have a worker make dead letters of its jobs 0, 1, …."""
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s"})
    async with workers_with_letters(connection, settings, queue, count, WITHIN) as shop:
        yield queue, shop


@asynccontextmanager
async def running(
    connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest
) -> AsyncIterator[asyncio.Task[RedriveReport]]:
    """Run a redrive until the block ends."""
    task = asyncio.create_task(redrive_dead_letters(connection, queue, request))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def reached(connection: NatsPyConnection, queue: WorkQueue, state: str) -> Redrive:
    """Wait until the only redrive of a queue is recorded in a state."""

    async def found() -> Redrive | None:
        redrives = await list_redrives(connection, queue)
        return next((redrive for redrive in redrives if redrive.state == state and not redrive.pending), None)

    return await eventually(found, WITHIN)


def counts(redrive: Redrive | RedriveReport | Wave) -> tuple[int, int, int, int]:
    outcomes = redrive.outcomes
    return outcomes.completed, outcomes.died_again, outcomes.still_running, outcomes.unknown


@pytest.mark.slow
async def test_the_canary_stops_and_after_the_mend_all_waves_complete(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, MANY) as (queue, shop):
        shop.fails = lambda number: "no currency" if number % 10 < 6 else ""
        request = RedriveRequest(waves=WAVES, why="ticket 4711", who={"user": "Ann Lee"}, run="night")
        async with running(connection, queue, request) as task:
            stopped = await reached(connection, queue, "at_gate")
            assert (stopped.redriven, len(stopped.waves), counts(stopped)) == (10, 1, (4, 6, 0, 0))
            (wave,) = stopped.waves
            assert [(cause.count, cause.as_before, cause.error) for cause in wave.died_of] == [
                (6, 6, "ValueError: no currency")
            ]
            assert stopped.reason == (
                "of 10 jobs of wave 1, 4 completed and 6 died again (6 of ValueError: no currency, fingerprint"
                f" {wave.died_of[0].fingerprint}): more than 20%"
            )
            assert (stopped.who, stopped.why, stopped.letters) == ({"user": "Ann Lee"}, "ticket 4711", MANY)
            assert sum(shop.done.values()) == 4
            shop.fails = lambda _: ""
            await resume_redrive(connection, queue, stopped.id, who="Ann Lee", why="mended")
            report = await asyncio.wait_for(task, WITHIN)
        finished = await read_redrive(connection, queue, stopped.id)
        assert (report.redrive, report.state, finished.state) == (stopped.id, "finished", "finished")
        assert counts(report) == counts(finished) == (MANY, 0, 0, 0)
        assert [(wave.redriven, wave.outcomes.completed, wave.passed_by) for wave in finished.waves] == [
            (10, 4, "Ann Lee"),
            (100, 100, "rule"),
            (MANY - 104, MANY - 104, "rule"),
        ]
        assert report.as_json()["outcomes"] == {"completed": MANY, "died_again": 0, "still_running": 0, "unknown": 0}
        assert Counter(shop.done.values()) == {1: MANY}
        assert (await find_dead_letters(connection, queue)).letters == ()
        assert Counter(record.wave for record in await letter_records(connection, queue)) == {
            1: 10,
            2: 100,
            3: MANY - 104,
        }
        assert [redrive.id for redrive in await list_redrives(connection, queue)] == [stopped.id]


@pytest.mark.slow
async def test_what_dies_again_is_not_selected_again_by_itself(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 20) as (queue, shop):
        shop.fails = lambda number: "no currency" if number == 3 else ""
        report = await redrive_dead_letters(connection, queue, RedriveRequest(waves=[10, "rest"]))
        assert (report.state, counts(report), len(report.redriven)) == ("finished", (19, 1, 0, 0), 20)
        assert len((await find_dead_letters(connection, queue)).letters) == 1


@pytest.mark.slow
async def test_a_rule_goes_on_or_parks_what_returns_with_the_same_cause(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 30) as (queue, shop):
        shop.fails = lambda number: "no currency" if number < 10 else ""
        rule = StopWhen(then="go_on")
        report = await redrive_dead_letters(connection, queue, RedriveRequest(waves=[5, 5], stop_when=rule))
        assert (report.state, counts(report)) == ("finished", (0, 10, 0, 0))
        rule = StopWhen(then="park")
        request = RedriveRequest(waves=[20, "rest"], stop_when=rule)
        report = await redrive_dead_letters(connection, queue, request)
        assert report.state == "finished"
        assert [(wave.outcomes.completed, wave.outcomes.died_again, wave.parked_again) for wave in report.waves] == [
            (20, 0, 0),
            (0, 10, 10),
        ]
        assert counts(report) == (20, 0, 0, 0)
        assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_another_cause_stops_where_the_same_one_is_parked(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 20) as (queue, shop):
        shop.fails = lambda number: "" if number < 4 else "no currency" if number < 7 else "out of stock"
        request = RedriveRequest(waves=[10, "rest"], stop_when={"died_again": 0.2, "then": "park"})
        async with running(connection, queue, request):
            stopped = await reached(connection, queue, "at_gate")
            (wave,) = stopped.waves
            assert (wave.outcomes.died_again, wave.parked_again) == (6, 3)
            assert [(cause.count, cause.as_before) for cause in wave.died_of] == [(3, 3), (3, 0)]
            await resume_redrive(connection, queue, stopped.id, who="Ann Lee", park_returned=True)
            finished = await reached(connection, queue, "finished")
        assert [wave.parked_again for wave in finished.waves] == [6, 0]
        assert counts(finished) == (4, 10, 0, 0)


async def test_without_evidence_of_ends_a_person_decides(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, events=None, dead="abc")
    async with running(connection, queue, RedriveRequest(waves=[1, "rest"])) as task:
        stopped = await reached(connection, queue, "at_gate")
        assert counts(stopped) == (0, 0, 0, 1)
        assert stopped.reason.endswith(f"{name} declares no events, so nothing tells how its jobs end")
        await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
        report = await asyncio.wait_for(task, WITHIN)
    assert (report.state, counts(report)) == ("finished", (0, 0, 0, 3))


async def test_a_wave_that_nobody_ends_stops_at_the_gate_after_its_time(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="abc")
    async with running(connection, queue, RedriveRequest(waves=[1, "rest"], stop_when={"within": 0.5})):
        stopped = await reached(connection, queue, "at_gate")
        assert counts(stopped) == (0, 0, 1, 0)
        assert stopped.reason.endswith("not all jobs ended within 0.5 seconds")


async def server_time(connection: NatsPyConnection, name: str) -> datetime:
    return datetime.fromisoformat((await stream_info(connection, name))["ts"])


@pytest.mark.slow
async def test_a_wave_is_awaited_from_its_last_letter_on(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead="abcde")
    # At this rate it takes longer to redrive than its first jobs take to end.
    request = RedriveRequest(waves=[4, "rest"], stop_when={"within": 100}, rate=2)
    report, wait = await advance_redrive(connection, queue, request, patience=0)
    now, (wave,) = await server_time(connection, name), report.waves
    assert wait is not None
    assert wait.within is not None
    assert wave.awaited_from is not None
    assert (wave.awaited_from - wave.began_at).total_seconds() >= 1
    assert 100 - (now - wave.awaited_from).total_seconds() <= wait.within <= 100


@pytest.mark.slow
async def test_what_ended_in_time_counts_however_late_somebody_looks(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "3s", "sample_freq": "100%"}, dead="abcdef")
    request = RedriveRequest(waves=[4, 1], stop_when={"within": 1}, run="night")
    await advance_redrive(connection, queue, request, patience=0)
    for message in await pull_jobs(connection, queue, 4, within=WITHIN):
        await message.ack_sync()
    (begun,) = await list_redrives(connection, queue)

    async def is_over() -> bool:
        return await server_time(connection, name) > begun.at + timedelta(seconds=2)

    await eventually(is_over)
    report, _ = await advance_redrive(connection, queue, request)
    assert [(wave.outcomes.completed, wave.outcomes.still_running) for wave in report.waves] == [(4, 0), (0, 1)]
    # The last wave has no gate.
    assert (report.state, report.waves[1].reason) == (
        *("finished", "of 1 job of wave 2, 0 completed and 0 died again; not all jobs ended within 1 seconds"),
    )


@pytest.mark.slow
async def test_what_ends_at_the_gate_is_known_when_a_person_lets_it_pass(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "3s", "sample_freq": "100%"}, dead="abcdef")
    request = RedriveRequest(waves=[4, "rest"], stop_when={"within": 0.1})
    async with running(connection, queue, request) as task:
        stopped = await reached(connection, queue, "at_gate")
        assert counts(stopped) == (0, 0, 4, 0)
        for number, message in enumerate(await pull_jobs(connection, queue, 4, within=WITHIN)):
            await (message.ack_sync() if number % 2 else message.term())
        await wait_for_entries(connection, queue, 4)
        await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
        report = await asyncio.wait_for(task, WITHIN)
    # Those that died there came back with the rest, whose jobs nobody takes.
    assert [(wave.redriven, counts(wave)) for wave in report.waves] == [(4, (2, 2, 0, 0)), (4, (0, 0, 4, 0))]
    assert (report.state, counts(report)) == ("finished", (2, 0, 4, 0))


@pytest.mark.slow
async def test_a_paused_redrive_goes_on_where_it_was(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 300) as (queue, shop):
        shop.fails = lambda _: ""
        async with running(connection, queue, RedriveRequest(rate=100)) as task:
            begun = await reached(connection, queue, "running")
            await pause_redrive(connection, queue, begun.id, who="Ann Lee", why="a deployment")
            paused = await reached(connection, queue, "paused")
            assert 0 <= paused.redriven < 300
            assert paused.reason == "pause by Ann Lee: a deployment"
            await resume_redrive(connection, queue, begun.id, who="Ben Ray")
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, len(report.redriven), report.cancelled) == ("finished", 300, False)

        async def all_done() -> bool:
            return Counter(shop.done.values()) == {1: 300}

        await eventually(all_done, WITHIN)
        assert (await read_redrive(connection, queue, begun.id)).state == "finished"


@pytest.mark.parametrize("order_key", [None, "header:Customer"])
async def test_a_redrive_that_is_run_again_while_it_is_paused_goes_on_once_it_is_resumed(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, order_key: str | None
) -> None:
    request = RedriveRequest(run="orders", order_key=order_key, rate=20)
    async with shop_with_letters(connection, settings, name, 40) as (queue, shop):
        shop.fails = lambda _: ""
        async with running(connection, queue, request):
            begun = await reached(connection, queue, "running")
            await pause_redrive(connection, queue, begun.id, who="Ann Lee")
            await reached(connection, queue, "paused")
        async with running(connection, queue, request) as task:
            # Until it has begun, and found itself paused.
            done, _ = await asyncio.wait({task}, timeout=0.5)
            assert not done
            await resume_redrive(connection, queue, begun.id, who="Ben Ray")
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, len(report.redriven), report.cancelled) == ("finished", 40, False)


@pytest.mark.slow
async def test_a_redrive_that_is_paused_and_resumed_while_a_wave_is_awaited_obeys_at_once(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 20) as (queue, shop):
        shop.fails = lambda _: ""
        shop.is_open.clear()
        async with running(connection, queue, RedriveRequest(waves=[5, "rest"])) as task:
            await eventually(lambda: in_flight(connection, queue, 5), WITHIN)
            begun = await reached(connection, queue, "running")
            await pause_redrive(connection, queue, begun.id, who="Ann Lee")
            paused = await reached(connection, queue, "paused")
            assert (paused.redriven, counts(paused)) == (5, (0, 0, 5, 0))
            await resume_redrive(connection, queue, begun.id, who="Ben Ray")
            resumed = await reached(connection, queue, "running")
            assert (resumed.redriven, counts(resumed), sum(shop.done.values())) == (5, (0, 0, 5, 0), 0)
            shop.is_open.set()
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, counts(report)) == ("finished", (20, 0, 0, 0))


@pytest.mark.slow
async def test_a_redrive_that_is_paused_while_it_awaits_the_lease_stays_paused(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 200) as (queue, shop):
        shop.fails = lambda _: ""
        async with running(connection, queue, RedriveRequest(rate=100)) as task:
            begun = await reached(connection, queue, "running")
            await pause_redrive(connection, queue, begun.id, who="Ann Lee")
            await reached(connection, queue, "paused")
            lease = await take_redrive_lease(connection, queue, RedriveRequest(run="other"), "redrive")
            assert lease is not None
            await resume_redrive(connection, queue, begun.id, who="Ann Lee")
            # Until it looks for what was asked, and finds the lease held.
            done, _ = await asyncio.wait({task}, timeout=2)
            assert not done
            await pause_redrive(connection, queue, begun.id, who="Ann Lee")
            done, _ = await asyncio.wait({task}, timeout=2)
            assert not done
            await lease.release()
            await reached(connection, queue, "paused")
            await resume_redrive(connection, queue, begun.id, who="Ben Ray")
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, len(report.redriven), report.cancelled) == ("finished", 200, False)


@pytest.mark.slow
async def test_a_wave_whose_jobs_have_ended_is_decided_however_long_its_ends_take_to_read(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "3s"}, dead="abcdef")
    request = RedriveRequest(waves=[3, "rest"], run="night")
    for number in (1, 2):
        report, wait = await advance_redrive(connection, queue, request, patience=0, ended=number == 2)
        assert wait is not None
        assert (len(report.waves), len(wait.sequences), report.outcomes.completed) == (number, 3, 3 * (number - 1))
        for message in await pull_jobs(connection, queue, 3, within=WITHIN):
            await message.ack_sync()
    report, wait = await advance_redrive(connection, queue, request, patience=0, ended=True)
    assert (report.state, counts(report), wait) == ("finished", (6, 0, 0, 0), None)


async def in_flight(connection: NatsPyConnection, queue: WorkQueue, count: int) -> bool:
    return bool((await consumer_info(connection, queue.name, CONSUMER))["num_ack_pending"] == count)


@pytest.mark.slow
async def test_an_aborted_redrive_leaves_the_others_where_they_are(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 200) as (queue, shop):
        shop.fails = lambda _: ""
        async with running(connection, queue, RedriveRequest(rate=40, run="key")) as task:
            begun = await reached(connection, queue, "running")
            await abort_redrive(connection, queue, begun.id, who="Ann Lee", why="enough")
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, report.cancelled, report.reason) == ("aborted", True, "abort by Ann Lee: enough")
        left = len((await find_dead_letters(connection, queue)).letters)
        assert left == 200 - len(report.redriven) > 0
        again = await redrive_dead_letters(connection, queue, RedriveRequest(run="key"))
        assert (len(again.redriven), again.resumed, again.redrive != begun.id) == (left, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30 if os.environ.get("FAULTS") == "full" else 3))
async def test_kills_and_controls_from_two_sides_leave_one_redrive(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311 - dice
    async with shop_with_letters(connection, settings, name, 60) as (queue, shop):
        shop.fails = lambda number: "no currency" if number % 10 < 3 else ""
        request = RedriveRequest(waves=[5, 10, 20, "rest"], run="night", rate=200)
        page, command = (f"{side} {seed}" for side in ("page", "command line"))
        async with connect(settings) as other, AsyncExitStack() as stack:

            async def redrive() -> RedriveReport:
                # Its own connection, as that of a process that is killed.
                async with connect(settings) as own:
                    return await redrive_dead_letters(own, queue, request)

            tasks = [asyncio.create_task(redrive())]
            stack.callback(lambda: [task.cancel() for task in tasks])
            begun = await eventually(lambda: list_redrives(connection, queue), WITHIN)
            for _ in range(12):
                step = rng.choice((pause_redrive, resume_redrive, resume_redrive, "kill", "another"))
                if step == "kill":
                    tasks.pop().cancel()
                    tasks.append(asyncio.create_task(redrive()))
                elif step == "another" and len(tasks) < 3:
                    tasks.append(asyncio.create_task(redrive()))
                elif not isinstance(step, str):
                    with suppress(RedriveRequestError):
                        await asyncio.gather(
                            step(connection, queue, begun[0].id, who=page),
                            step(other, queue, begun[0].id, who=command),
                        )
                await asyncio.sleep(rng.random() / 4)
            shop.fails = lambda _: ""

            async def over() -> Redrive | None:
                found = await read_redrive(connection, queue, begun[0].id)
                if found.state in ("paused", "at_gate"):
                    await resume_redrive(connection, queue, found.id, who=page)
                return found if found.state == "finished" else None

            finished = await eventually(over, WITHIN)
        assert len({redrive.id for redrive in await list_redrives(connection, queue)}) == 1

        async def nothing_waits() -> bool:
            return sum(shop.done.values()) + len((await find_dead_letters(connection, queue)).letters) == 60

        await eventually(nothing_waits, WITHIN)
        assert set(shop.done.values()) == {1}
        # What died again in a wave that the rule let pass stays a dead letter.
        left = len((await find_dead_letters(connection, queue)).letters)
        assert (finished.outcomes.completed, finished.outcomes.died_again) == (60 - left, left)
        assert finished.outcomes.still_running == finished.outcomes.unknown == 0
        assert [control.who for control in finished.controls if control.who not in (page, command)] == []
        records = Counter(record.sequence for record in await letter_records(connection, queue))
        assert set(records.values()) == {1}


# Redrives as objects of the audit: read, paused, resumed and aborted by several at once.


async def record(connection: NatsPyConnection, queue: WorkQueue, state: RedriveState, **fields: Any) -> str:
    """Store a redrive as its holder does, and return its id."""
    created = (await stream_info(connection, queue.name))["created"]
    redrive = fields.pop("id", None) or f"20260101T000000-{uuid4().hex[:8]}"
    values = {"id": redrive, "stream": queue.name, "created": created, "run": "r", "began_at": datetime.now(UTC)}
    body = Redrive(**{**values, "state": state, **fields}).model_dump_json().encode()
    await connection.client.jetstream().publish(f"audit.{queue.name}.redrives.{redrive}", body)
    return redrive


async def test_controls_are_kept_with_who_and_why(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    paused = await pause_redrive(connection, queue, redrive, who="Ann Lee", why="a deployment")
    assert (paused.state, paused.reason) == ("paused", "pause by Ann Lee: a deployment")
    assert (await pause_redrive(connection, queue, redrive, who="Ben Ray")).controls == paused.controls
    assert (await resume_redrive(connection, queue, redrive, who="Ben Ray")).state == "running"
    assert (await abort_redrive(connection, queue, redrive, who="Ann Lee")).state == "aborted"
    found = await read_redrive(connection, queue, redrive)
    assert [(control.action, control.who) for control in found.controls] == [
        ("pause", "Ann Lee"),
        ("resume", "Ben Ray"),
        ("abort", "Ann Lee"),
    ]
    assert found.pending == found.controls


@pytest.mark.parametrize("state", [RedriveState.FINISHED, RedriveState.ABORTED, RedriveState.FAILED])
async def test_a_control_of_a_redrive_that_is_over_is_refused(
    connection: NatsPyConnection, name: str, state: RedriveState
) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, state)
    for control in (pause_redrive, resume_redrive):
        with pytest.raises(RedriveRequestError, match=f"found {redrive} {state.value} since"):
            await control(connection, queue, redrive, who="Ann Lee")
    assert (await read_redrive(connection, queue, redrive)).controls == ()


async def test_a_resume_from_before_a_gate_does_not_pass_it(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    await pause_redrive(connection, queue, redrive, who="Ann Lee")
    await resume_redrive(connection, queue, redrive, who="Ann Lee")
    # As a holder that has read neither when it comes to the gate.
    await record(connection, queue, RedriveState.AT_GATE, id=redrive)
    assert (await read_redrive(connection, queue, redrive)).state == "at_gate"
    assert (await pause_redrive(connection, queue, redrive, who="Ann Lee")).state == "at_gate"
    assert (await resume_redrive(connection, queue, redrive, who="Ben Ray")).state == "running"


async def test_of_controls_at_once_the_last_one_by_the_servers_order_counts(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    steps = [pause_redrive, resume_redrive] * 10
    await asyncio.gather(*(step(connection, queue, redrive, who=f"p{i}") for i, step in enumerate(steps)))
    found = await read_redrive(connection, queue, redrive)
    assert found.state == {"pause": "paused", "resume": "running"}[found.controls[-1].action]
    assert [control.sequence for control in found.controls] == sorted(control.sequence for control in found.controls)


async def test_only_redrives_of_this_queue_are_listed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    assert await list_redrives(connection, queue) == []
    first = await record(connection, queue, RedriveState.FINISHED, id="20260101T000000-a")
    second = await record(connection, queue, RedriveState.RUNNING, id="20260102T000000-a")
    await record(connection, queue, RedriveState.RUNNING, id="20260103T000000-a", created="another stream's")
    jetstream = connection.client.jetstream()
    # What a foreign program may store there.
    await jetstream.publish(f"audit.{name}.redrives.x", b"\xff{")
    await jetstream.publish(f"audit.{name}.redrives.y", json.dumps({"id": "z", "version": 1}).encode())
    for body in (b"[]", b'{"action": "destroy", "who": "x"}', b'{"action": "pause"}', b"\xff"):
        await jetstream.publish(f"audit.{name}.redrive-controls.{second}", body)
    # 16 characters stand for more sequences than any memory holds.
    endless = {"number": 1, "from_sequence": 1, "began_at": str(datetime.now(UTC)), "returned": ""}
    endless["returned"] = "eJxj/A8F9QAsZwh5"
    forged = await read_redrive(connection, queue, first)
    values = forged.model_dump(mode="json") | {"id": "w", "waves": [endless]}
    await jetstream.publish(f"audit.{name}.redrives.w", json.dumps(values).encode())
    assert [found.id for found in await list_redrives(connection, queue)] == [second, first]
    endless["returned"] = "eJxjTAEAAGgAZg=="
    await jetstream.publish(f"audit.{name}.redrives.w", json.dumps(values).encode())
    assert {found.id for found in await list_redrives(connection, queue)} == {second, first, "w"}
    assert (await read_redrive(connection, queue, second)).controls == ()


@pytest.mark.parametrize("redrive", ["unknown", "*", "a.b", ">", "", "a b"])
async def test_an_unknown_id_is_named(connection: NatsPyConnection, name: str, redrive: str) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(NotFoundError, match="expected a redrive of"):
        await pause_redrive(connection, queue, redrive, who="Ann Lee")


@pytest.mark.parametrize("who", ["", "  ", None, "x" * 201])
async def test_who_asks_has_to_have_a_name(connection: NatsPyConnection, name: str, who: Any) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    with pytest.raises(ArgumentError, match="expected the name of the person"):
        await abort_redrive(connection, queue, redrive, who=who)


async def test_a_queue_without_an_audit_has_no_redrives(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit=None)
    with pytest.raises(NotFoundError, match=f"expected an audit of {name}"):
        await list_redrives(connection, queue)
