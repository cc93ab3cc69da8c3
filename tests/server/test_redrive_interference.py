"""Redrives in waves beside others: people who steer in any order, foreign entries, letters and queues that change."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from test_command_line import as_json, ended, start
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
from testbed.face import advance_redrive
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue
from testbed.redrivers import redrivers
from testbed.shop import shop_with_letters as workers_with_letters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Redrive, WorkQueue
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


async def died_again(connection: NatsPyConnection, queue: WorkQueue) -> list[int]:
    """Return the sequences of redriven jobs that are dead letters again."""
    return [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters if letter.redrives]


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
            returned = await died_again(connection, queue)
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
        returned = await died_again(connection, queue)
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
        returned = await died_again(connection, queue)
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
    queue = await make_queue(connection, name, dead="abcdef")
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
    queue = await make_queue(connection, name, dead="abcdef")
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
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, dead=[b'{"a": 1}', b"no JSON"])
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
            subject = f"audit.{name}.redrive-controls.{stopped.id}"
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

    queue = await make_queue(connection, name, dead="abcd")
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


# Redrivers that are killed with SIGKILL between waves, and at any call, while page and command line steer at once.


LETTERS = 40
SEEDS = 12 if os.environ.get("FAULTS") == "full" else 1


async def at_wave(connection: NatsPyConnection, queue: WorkQueue, number: int, state: str) -> Redrive:
    """Wait until a wave of the only redrive is recorded in a state."""

    async def found() -> Redrive | None:
        redrives = await list_redrives(connection, queue)
        waves = redrives[0].waves if redrives else ()
        return redrives[0] if len(waves) == number and waves[-1].state == state else None

    return await eventually(found, WITHIN)


async def check_end(connection: NatsPyConnection, queue: WorkQueue, done: Counter[int], redrive: Redrive) -> None:
    """Check that there is one redrive, that nothing is lost, and that nothing was done twice."""
    assert [found.id for found in await list_redrives(connection, queue)] == [redrive.id]
    left = len((await find_dead_letters(connection, queue)).letters)
    assert (sum(done.values()) + left, set(done.values())) == (LETTERS, {1})
    outcomes = redrive.outcomes
    assert (outcomes.completed, outcomes.died_again) == (LETTERS - left, left)
    assert outcomes.still_running == outcomes.unknown == 0
    records = await letter_records(connection, queue)
    assert set(Counter(record.sequence for record in records).values()) == {1}
    assert redrive.redriven == len(records)


@pytest.mark.smoke
@pytest.mark.slow
async def test_killed_while_a_wave_is_awaited_and_at_its_gate(
    nats: NatsServer, connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s"})
    arguments = (name, "--waves", "5,10,rest", "--run", "night")

    async def both(page: Any, action: str, redrive: str) -> None:
        _, found = await asyncio.gather(
            page(connection, queue, redrive, who="on the page"), as_json(nats, "redrive", action, name, redrive)
        )
        assert found["id"] == redrive

    async with workers_with_letters(connection, settings, queue, LETTERS, WITHIN) as shop:
        shop.fails = lambda number: "no currency" if number < 3 else ""
        shop.is_open.clear()
        process = start(nats, *arguments)
        try:
            begun = await at_wave(connection, queue, 1, "awaiting")
            process.kill()
            await both(pause_redrive, "pause", begun.id)
            assert (await read_redrive(connection, queue, begun.id)).state == "paused"
            await both(resume_redrive, "resume", begun.id)
            # They end while nobody awaits them.
            shop.is_open.set()
            await eventually(lambda: sum(shop.done.values()) == 2, WITHIN)
            process = start(nats, *arguments)
            stopped = await at_wave(connection, queue, 1, "at_gate")
            process.kill()
            assert (stopped.outcomes.completed, stopped.outcomes.died_again) == (2, 3)
            shop.fails = lambda _: ""
            shop.is_open.clear()
            await both(resume_redrive, "resume", begun.id)
            process = start(nats, *arguments)
            await at_wave(connection, queue, 2, "awaiting")
            process.kill()
            shop.is_open.set()
            process = start(nats, *arguments)
            code, report, _ = await ended(process)
        finally:
            process.kill()
        assert (code, report["state"], report["redrive"], report["redriven"]) == (0, "finished", begun.id, LETTERS + 3)
        finished = await read_redrive(connection, queue, begun.id)
        assert [(wave.redriven, wave.outcomes.completed) for wave in finished.waves] == [(5, 2), (10, 10), (28, 28)]
        assert finished.waves[0].passed_by not in ("", "rule")
        await check_end(connection, queue, shop.done, finished)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_killed_at_any_call_while_two_sides_steer(
    nats: NatsServer,
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    tmp_path: Path,
    seed: int,
) -> None:
    rng = random.Random(seed)  # noqa: S311 - dice
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s"})
    request = {"waves": [5, 10, 15, "rest"], "run": "night"}
    async with (
        workers_with_letters(connection, settings, queue, LETTERS, WITHIN) as shop,
        connect(settings) as other,
        redrivers([nats.url], tmp_path) as starter,
    ):
        shop.fails = lambda number: "no currency" if number % 10 < 3 else ""
        kills = 0

        async def run_until_over() -> None:
            nonlocal kills
            while True:
                # The waves' starts and ends, their gates and what people asked take some twenty calls each.
                outcome = await starter.redrive(queue, request, kill_at=rng.randint(1, 60) if kills < 8 else None)
                kills += outcome.killed
                if outcome.report:
                    return

        running = asyncio.create_task(run_until_over())
        begun = (await eventually(lambda: list_redrives(connection, queue), WITHIN))[0]
        try:
            for _ in range(10):
                step = rng.choice((pause_redrive, resume_redrive, resume_redrive))
                with suppress(RedriveRequestError):
                    await asyncio.gather(
                        step(connection, queue, begun.id, who="page"), step(other, queue, begun.id, who="command line")
                    )
                await asyncio.sleep(rng.random() / 4)
            shop.fails = lambda _: ""

            async def over() -> Redrive | None:
                found = await read_redrive(connection, queue, begun.id)
                if found.state in ("paused", "at_gate"):
                    await resume_redrive(connection, queue, found.id, who="page")
                return found if found.state == "finished" else None

            finished = await eventually(over, 3 * WITHIN)
            await asyncio.wait_for(running, WITHIN)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert kills > 0
        await eventually(lambda: sum(shop.done.values()) >= LETTERS - finished.outcomes.died_again, WITHIN)
        await check_end(connection, queue, shop.done, finished)


# Redrives of different kinds at the same time, in processes of their own: each job is done once, or parked.


RESET_LEVEL = 4
COPY = {"protocol": "copy"}
IN_PLACE = {"protocol": "in_place"}
PARK = {"max_redrives": 0}
# What happens to the first redrive of each queue: it is killed in place of one of its calls that change something
# (early, while it stores, while it records), or stopped for longer than its lease lasts after so many seconds.
FATES: tuple[dict[str, dict[str, Any]], ...] = (
    {"": {}, "killed": {"kill_at": 3}, "stopped": {"stop_after": 0.05}},
    {"": {}, "killed": {"kill_at": 30}, "stopped": {"stop_after": 0.12}},
    {"": {}, "killed": {"kill_at": 60}, "stopped": {"stop_after": 0.25}},
)
# How a redrive ends that was stopped: somebody else has the lease, or the server has closed its connection.
CUT_OFF = ("LeaseLostError", "LeaseHeldError", "UnreachableError", "DeadlineError")


class Worker:
    """A foreign worker that does jobs as they come, and notes which."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue) -> None:
        self._connection = connection
        self._queue = queue
        self.done: Counter[str] = Counter()
        self.idle = 0

    async def run(self) -> None:
        pull = await self._connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=self._queue.name)
        while True:
            try:
                messages = await pull.fetch(10, timeout=0.3)
            except (TimeoutError, NatsTimeoutError):
                messages = []
            # Where the server says first that the time is over, nats-py returns none.
            self.idle += not messages
            for message in messages:
                self.done[message.data.decode()] += 1
                await message.ack_sync()

    async def wait_for(self, jobs: int) -> None:
        """Wait until as many jobs are done, which takes until a killed redrive's pause is over, and no more come."""
        await eventually(lambda: self.done.total() >= jobs, within=20)
        idle = self.idle
        await eventually(lambda: self.idle >= idle + 2, within=20)


async def parked_jobs(connection: NatsPyConnection, queue: WorkQueue) -> Counter[str]:
    found = await find_dead_letters(connection, queue, Selection(parked=True))
    return Counter(letter.body.decode() for letter in found.letters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "fate"),
    [
        ((IN_PLACE, COPY), ""),
        ((IN_PLACE, PARK), ""),
        ((COPY, PARK), ""),
        ((COPY, IN_PLACE, PARK), ""),
        ((COPY, IN_PLACE, PARK), "killed"),
        ((COPY, IN_PLACE, PARK), "stopped"),
    ],
    ids=["in place and copy", "in place and park", "copy and park", "all three", "killed", "stopped"],
)
async def test_each_job_is_done_once_or_parked_whoever_redrives_beside_whom(
    nats: NatsServer,
    connection: NatsPyConnection,
    name: str,
    tmp_path: Path,
    requests: Sequence[dict[str, Any]],
    fate: str,
) -> None:
    if IN_PLACE in requests and connection.api_level < RESET_LEVEL:
        pytest.skip("nats-server can't reset a consumer before 2.14")
    queues = [
        await make_queue(connection, f"{name}-{number}", consumer={"ack_wait": "2s"}, duplicate_window="500ms")
        for number in range(3)
    ]
    bodies = [f"job-{number}" for number in range(LETTERS)]
    for queue in queues:
        await make_dead_letters(connection, queue, bodies)
    workers = [Worker(connection, queue) for queue in queues]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        async with redrivers([nats.url], tmp_path) as starter:
            outcomes = await asyncio.gather(
                *(
                    starter.redrive(queue, request, **(fates[fate] if number == 0 else {}))
                    for queue, fates in zip(queues, FATES, strict=True)
                    for number, request in enumerate(requests)
                )
            )
            errors = [outcome.error for outcome in outcomes if outcome.error]
            assert [error for error in errors if not (fate == "stopped" and error.startswith(CUT_OFF))] == []
            for queue in queues:
                # What came back while the next operation already looked is found by one more.
                assert (await starter.redrive(queue, COPY)).complete
        parked = [await parked_jobs(connection, queue) for queue in queues]
        for worker, apart in zip(workers, parked, strict=True):
            await worker.wait_for(LETTERS - apart.total())
    finally:
        for task in running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    for queue, worker, apart in zip(queues, workers, parked, strict=True):
        assert worker.done + apart == dict.fromkeys(bodies, 1)
        assert (await find_dead_letters(connection, queue)).letters == ()
