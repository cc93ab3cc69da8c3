"""Progress and errors of attempts in worlds of workers of which any is killed or cut off at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    WorkQueue,
    connection_settings,
    find_dead_letters,
    provision,
    publish,
    read_attempts,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.worker import Worker
from testbed.simulated.connection import OWNER, SimulatedConnection, connecting_by_settings
from testbed.simulated.loop import run_simulated, simulated_loop
from testbed.simulated.server import SimulatedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.jetstream import AttemptReport
    from airflow_provider_jetstream.worker import Delivery

WORLDS = 12
SECONDS = 12.0
JOBS = 20
WORKERS = ("worker 1", "worker 2", "worker 3")
QUEUE = WorkQueue(
    name="q",
    subjects=["q.jobs"],
    consumers=[{"name": "w", "max_deliver": 4, "ack_wait": "1s"}],
    dead_letters="q-dead",
    events="q-events",
    attempts=True,
)


class _World:
    def __init__(self) -> None:
        self.server = SimulatedServer((2, 15, 0), {})
        self.draws = simulated_loop().draws
        self.connections: dict[str, list[SimulatedConnection]] = defaultdict(list)
        # The errors that handlers have raised, and what they have done, by job.
        self.raised: dict[int, set[str]] = defaultdict(set)
        self.done: set[int] = set()
        self.states = Counter[str]()

    @asynccontextmanager
    async def connected(self, owner: str) -> AsyncIterator[SimulatedConnection]:
        connection = SimulatedConnection(self.server)
        self.connections[owner].append(connection)
        try:
            yield connection
        finally:
            connection.close()

    async def handle(self, job: Delivery) -> None:
        rng = self.draws.of("attempt", f"{job.sequence} {job.attempt}")
        for step in range(1, 4):
            job.progress(step / 3, f"step {step} of attempt {job.attempt}")
            await asyncio.sleep(rng.uniform(0.0, 0.8))
        if rng.random() < 0.5:
            error = f"failed at attempt {job.attempt}"
            self.raised[job.sequence].add(error)
            raise ValueError(error)
        self.done.add(job.sequence)

    async def worker(self, name: str) -> None:
        OWNER.set(name)
        settings = connection_settings({"servers": ("nats://simulated:4222",), "timeout": 5})
        while True:
            with suppress(JetStreamProviderError, TimeoutError):
                await Worker(QUEUE, "w", self.handle, settings, concurrency=2, name=name).run()
            await asyncio.sleep(0.1)

    async def play(self) -> None:
        loop, rng = simulated_loop(), self.draws.of("kills")
        tasks = {name: loop.create_task(self.worker(name)) for name in WORKERS}
        until = loop.time() + SECONDS
        while loop.time() < until:
            await asyncio.sleep(rng.uniform(0.3, 1.5))
            name = rng.choice(WORKERS)
            for connection in self.connections.pop(name, []):
                connection.close()
            if rng.random() < 0.5:
                tasks[name].cancel()
                tasks[name] = loop.create_task(self.worker(name))
        # Nobody is killed any more: each job is done, or dies.
        async with self.connected("judge") as connection:
            letters = (await find_dead_letters(connection, QUEUE)).letters
            while self.server.streams["q"].messages.keys() - {letter.sequence for letter in letters}:
                await asyncio.sleep(1.0)
                letters = (await find_dead_letters(connection, QUEUE)).letters
            for sequence in range(1, JOBS + 1):
                deliveries = next((one.death.deliveries for one in letters if one.sequence == sequence), None)
                self.judge(sequence, await read_attempts(connection, QUEUE, sequence, deliveries=deliveries))
            assert {letter.sequence for letter in letters} | self.done == {*range(1, JOBS + 1)}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def judge(self, sequence: int, attempts: list[AttemptReport]) -> None:
        """Each attempt but a last one stands there with an error that its handler raised, or without an answer."""
        assert [attempt.number for attempt in attempts] == list(range(1, len(attempts) + 1))
        for attempt in attempts:
            self.states[attempt.state] += 1
            if attempt.state == "failed":
                assert attempt.error_message == f"failed at attempt {attempt.number}"
                assert attempt.error_message in self.raised[sequence]
            if attempt.state == "unanswered":
                assert attempt.error_message == "no answer within 1 s"
            assert attempt.text in (None, *(f"step {step} of attempt {attempt.number}" for step in range(1, 4)))
        assert all(attempt.state != "running" for attempt in attempts[:-1])


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s > 0 else ()) for s in range(WORLDS)])
def test_each_attempt_is_there_with_its_error_or_without_an_answer_whoever_is_killed(seed: int) -> None:
    async def play() -> _World:
        world = _World()

        async with world.connected("publisher") as connection:
            await provision(connection, QUEUE)
            await publish(connection, QUEUE, [str(number) for number in range(JOBS)], subject="q.jobs")
        with connecting_by_settings(lambda: world.connected(OWNER.get())):
            await world.play()
        return world

    world = run_simulated(play, seed)
    assert world.states["failed"]
    assert world.states["unanswered"]
