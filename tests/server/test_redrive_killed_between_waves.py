"""Redrivers that are killed with SIGKILL between waves, and at any call, while page and command line steer at once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from test_command_line import as_json
from test_redrive_command import ended, start

from airflow_provider_jetstream.jetstream import (
    connect,
    find_dead_letters,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.dead_letters import letter_records
from testbed.queues import eventually, make_queue
from testbed.redrivers import redrivers
from testbed.shop import shop_with_letters

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, Redrive, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

LETTERS = 40
WITHIN = 60.0
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

    async with shop_with_letters(connection, settings, queue, LETTERS, WITHIN) as shop:
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
        shop_with_letters(connection, settings, queue, LETTERS, WITHIN) as shop,
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
