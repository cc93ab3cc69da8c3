"""Redrives in waves beside others: people who steer in any order, foreign entries, letters and queues that change."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from test_command_line import command as run_command
from test_redrive_waves import counts, reached, running, shop_with_letters

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    abort_redrive,
    connect,
    find_dead_letters,
    list_redrives,
    pause_redrive,
    provision,
    read_redrive,
    redrive_dead_letters,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueGoneError, RedriveRequestError
from testbed import seams
from testbed.dead_letters import letter_records, request_for
from testbed.face import SequenceRanges, advance_redrive, redrive_control_subject
from testbed.queues import eventually, make_dead_letters, make_queue

if TYPE_CHECKING:
    from datetime import tzinfo

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

WITHIN = 60.0
NOT_CONTROLS = (
    b"",
    b"\xff\xfe",
    b"[]",
    b"1e999",
    b'{"action": "resume"}',
    b'{"action": "abort", "who": 5}',
    b'{"version": 2, "action": "abort", "who": "x"}',
    json.dumps({"action": "resume", "who": "x" * 201}).encode(),
    json.dumps({"action": "abort", "who": "x", "why": "y" * 2_001}).encode(),
    b'{"action": "resume", "who": "x", "park_returned": "maybe"}',
)


def fails_first_three(number: int) -> str:
    return "no currency" if number < 3 else ""


@pytest.mark.slow
async def test_letters_that_somebody_brought_back_at_the_gate_are_left_alone(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, shop):
        shop.fails = fails_first_three
        async with running(connection, queue, RedriveRequest(waves=[5, "rest"])) as task:
            stopped = await reached(connection, queue, "at_gate")
            returned = list(SequenceRanges.decode(stopped.waves[0].returned))
            assert len(returned) == 3
            shop.fails = lambda _: ""
            other = await redrive_dead_letters(connection, queue, request_for(returned[:1]))
            assert list(other.redriven) == returned[:1]
            await resume_redrive(connection, queue, stopped.id, who="Ann Lee", park_returned=True)
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, [wave.parked_again for wave in report.waves]) == ("finished", [2, 0])


@pytest.mark.slow
async def test_what_a_killed_redriver_had_parked_at_the_gate_counts(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, shop):
        shop.fails = fails_first_three
        request = RedriveRequest(waves=[5, "rest"], run="night")
        async with running(connection, queue, request):
            stopped = await reached(connection, queue, "at_gate")
        # As one that was killed before it could record that the gate is passed.
        returned = SequenceRanges.decode(stopped.waves[0].returned)
        parking = RedriveRequest(Selection(sequences=frozenset(returned)), max_redrives=0)
        assert len((await redrive_dead_letters(connection, queue, parking)).parked) == 3
        await resume_redrive(connection, queue, stopped.id, who="Ann Lee", park_returned=True)
        report = await asyncio.wait_for(redrive_dead_letters(connection, queue, request), WITHIN)
        assert (report.state, [wave.parked_again for wave in report.waves]) == ("finished", [3, 0])
        assert counts(report) == (9, 0, 0, 0)


@pytest.mark.slow
async def test_named_letters_of_which_others_brought_some_back_between_waves(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, shop):
        shop.fails = fails_first_three
        request = request_for(range(1, 13), waves=[5, "rest"], run="night")
        async with running(connection, queue, request):
            stopped = await reached(connection, queue, "at_gate")
        returned = list(SequenceRanges.decode(stopped.waves[0].returned))
        shop.fails = lambda _: ""
        await redrive_dead_letters(connection, queue, request_for([returned[0], 9]))
        await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
        report = await asyncio.wait_for(redrive_dead_letters(connection, queue, request), WITHIN)
        assert (report.state, len(report.redriven)) == ("finished", 13)

        async def all_done() -> bool:
            return Counter(shop.done.values()) == {1: 12}

        await eventually(all_done, WITHIN)


async def recreated(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Delete a queue, and create it anew, with three dead letters."""
    await connection.client.jetstream().delete_stream(queue.name)
    await provision(connection, queue)
    await make_dead_letters(connection, queue, "xyz")


@pytest.mark.slow
async def test_a_redrive_whose_queue_is_created_anew_at_its_gate_ends(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcdef")
    request = RedriveRequest(waves=[2, "rest"], stop_when={"within": 0.5}, run="night")
    async with running(connection, queue, request) as task:
        stopped = await reached(connection, queue, "at_gate")
        await recreated(connection, queue)
        # Nobody can read or steer it any more, so it mustn't wait for anybody.
        with pytest.raises(NotFoundError, match="expected a redrive of"):
            await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
        with pytest.raises(QueueGoneError, match="begin another one"):
            await asyncio.wait_for(task, WITHIN)
    assert [letter.body for letter in (await find_dead_letters(connection, queue)).letters] == [b"x", b"y", b"z"]
    report, _ = await advance_redrive(connection, queue, request, patience=0)
    assert (report.redrive != stopped.id, len(report.redriven)) == (True, 2)


@pytest.mark.slow
async def test_a_redrive_whose_queue_is_created_anew_while_a_wave_is_awaited_ends(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcdef")
    async with running(connection, queue, RedriveRequest(waves=[2, "rest"])) as task:

        async def is_awaited() -> bool:
            found = await list_redrives(connection, queue)
            return bool(found and found[0].waves and found[0].waves[0].state == "awaiting")

        await eventually(is_awaited, WITHIN)
        await recreated(connection, queue)
        with pytest.raises(QueueGoneError, match="begin another one"):
            await asyncio.wait_for(task, WITHIN)
    assert len((await find_dead_letters(connection, queue)).letters) == 3


@pytest.mark.slow
async def test_a_purge_of_the_dead_letter_queue_between_waves_loses_no_letter(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, shop):
        shop.fails = fails_first_three
        async with running(connection, queue, RedriveRequest(waves=[5, "rest"])) as task:
            stopped = await reached(connection, queue, "at_gate")
            await connection.client.jetstream().purge_stream(f"{name}-dead")
            shop.fails = lambda _: ""
            await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
            report = await asyncio.wait_for(task, WITHIN)
        assert (report.state, counts(report)) == ("finished", (12, 0, 0, 0))


@pytest.mark.slow
async def test_waves_larger_than_the_selection_and_a_selection_of_nothing(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 5) as (queue, shop):
        shop.fails = lambda _: ""
        nothing = RedriveRequest(Selection(error_class="NoSuchError"), waves=[5, "rest"])
        report = await asyncio.wait_for(redrive_dead_letters(connection, queue, nothing), WITHIN)
        assert (report.state, counts(report), report.waves) == ("finished", (0, 0, 0, 0), ())
        larger = RedriveRequest(waves=[100, 1000, "rest"])
        report = await asyncio.wait_for(redrive_dead_letters(connection, queue, larger), WITHIN)
        assert (report.state, counts(report), len(report.waves)) == ("finished", (5, 0, 0, 0), 1)


async def test_letters_that_fail_in_the_last_wave_are_known_to_whoever_decides_about_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"})
    await make_dead_letters(connection, queue, [b'{"a": 1}', b"no JSON"])
    patch = [{"op": "replace", "path": "/a", "value": 2}]
    request = RedriveRequest(waves=["rest"], patch=patch, run="night", stop_when={"within": 0.1})
    report, _ = await advance_redrive(connection, queue, request, patience=0)
    assert (len(report.redriven), report.failures) == (1, 1)
    # Another process, as after a task was deferred.
    report, wait = await advance_redrive(connection, queue, request)
    assert (report.state, report.failures, list(report.failed), wait) == ("failed", 1, [2], None)
    assert "expected JSON" in report.failed[2]


@pytest.mark.slow
async def test_entries_that_are_no_controls_steer_nothing(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, shop):
        shop.fails = fails_first_three
        publish = connection.client.jetstream().publish
        async with running(connection, queue, RedriveRequest(waves=[5, "rest"])) as task:
            stopped = await reached(connection, queue, "at_gate")
            subject = redrive_control_subject(name, stopped.id)
            for body in NOT_CONTROLS:
                await publish(subject, body)
            done, _ = await asyncio.wait({task}, timeout=1.5)
            found = await read_redrive(connection, queue, stopped.id)
            assert (done, found.state, found.controls) == (set(), "at_gate", ())
            # Its place and time in the audit are the server's, whatever it says.
            later = {"action": "resume", "who": "x", "sequence": 99_999_999, "at": "2099-01-01T00:00:00Z"}
            await publish(subject, json.dumps(later).encode())
            assert (await asyncio.wait_for(task, WITHIN)).state == "finished"
        with pytest.raises(RedriveRequestError, match="that can abort"):
            await abort_redrive(connection, queue, stopped.id, who="Ben Ray")
        await publish(subject, b'{"action": "abort", "who": "x"}')
        found = await read_redrive(connection, queue, stopped.id)
        assert (found.state, found.controls[0].sequence < 99_999_999) == ("finished", True)


@pytest.mark.slow
async def test_one_that_was_aborted_while_nobody_ran_it_stays_so(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    async with shop_with_letters(connection, settings, name, 12) as (queue, _):
        request = RedriveRequest(waves=[5, "rest"], run="night")
        async with running(connection, queue, request):
            stopped = await reached(connection, queue, "at_gate")
        await abort_redrive(connection, queue, stopped.id, who="Ann Lee")
        with pytest.raises(RedriveRequestError, match="that can resume"):
            await resume_redrive(connection, queue, stopped.id, who="Ben Ray")
        report = await asyncio.wait_for(redrive_dead_letters(connection, queue, request), WITHIN)
        found = await read_redrive(connection, queue, stopped.id)
        assert (report.redrive, report.state, found.state, found.pending) == (stopped.id, "aborted", "aborted", ())
        report, _ = await advance_redrive(connection, queue, request, patience=0)
        assert (report.redrive != stopped.id, report.resumed) == (True, 0)


async def test_a_clock_that_is_an_hour_behind_changes_neither_order_nor_times(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    first = await redrive_dead_letters(connection, queue, request_for([1]))
    for clock in (seams.REDRIVE_RECORD_DATETIME, seams.SUPERVISION_DATETIME):
        monkeypatch.setattr(clock, Behind)
    request = RedriveRequest(waves=[1, "rest"], stop_when={"within": 0.1})
    async with running(connection, queue, request) as task:
        stopped = await reached(connection, queue, "at_gate")
        monkeypatch.undo()
        assert stopped.id < first.redrive
        assert [redrive.id for redrive in await list_redrives(connection, queue)] == [stopped.id, first.redrive]
        assert 0 <= (stopped.at - stopped.began_at).total_seconds() < 1_800
        # Who steers has another clock.
        resumed = await resume_redrive(connection, queue, stopped.id, who="Ann Lee")
        assert (resumed.state, resumed.controls[0].at > stopped.at) == ("running", True)
        assert (await asyncio.wait_for(task, WITHIN)).state == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_three_steer_in_any_order_and_two_abort(
    nats: NatsServer, connection: NatsPyConnection, settings: ConnectionSettings, name: str, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311 - dice
    async with shop_with_letters(connection, settings, name, 40) as (queue, shop), connect(settings) as other:
        shop.fails = lambda number: "no currency" if number % 10 < 3 else ""
        request = RedriveRequest(waves=[5, 10, "rest"], rate=100, run="night")
        async with running(connection, queue, request) as task:
            begun = (await eventually(lambda: list_redrives(connection, queue), WITHIN))[0]

            async def steer(own: NatsPyConnection, who: str) -> None:
                for _ in range(8):
                    step = rng.choice((pause_redrive, resume_redrive))
                    await step(own, queue, begun.id, who=who)
                    await asyncio.sleep(rng.random() / 10)

            async def command() -> None:
                for action in ("pause", "resume", "pause"):
                    await run_command(nats, "redrive", action, name, begun.id)

            await asyncio.gather(steer(connection, "page"), steer(other, "operator"), command())
            with suppress(RedriveRequestError):
                await asyncio.gather(
                    *(abort_redrive(each, queue, begun.id, who="Ann Lee") for each in (connection, other)),
                    resume_redrive(other, queue, begun.id, who="Ben Ray"),
                )
            report = await asyncio.wait_for(task, WITHIN)
        found = await read_redrive(connection, queue, begun.id)
        assert (report.state, found.state) == ("aborted", "aborted")
        assert [each.id for each in await list_redrives(connection, queue)] == [begun.id]

        async def nothing_waits() -> bool:
            return sum(shop.done.values()) + len((await find_dead_letters(connection, queue)).letters) == 40

        await eventually(nothing_waits, WITHIN)
        assert set(shop.done.values()) <= {1}
        records = Counter(record.sequence for record in await letter_records(connection, queue))
        assert set(records.values()) <= {1}
        assert found.redriven == len(records)
