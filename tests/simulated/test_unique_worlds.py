"""Unique jobs in worlds of publishers, workers and redrives of which any is killed or cut off at any moment."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    RedriveRequest,
    WorkQueue,
    connection_settings,
    provision,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.worker import GiveUpError, Worker
from testbed.simulated.connection import SimulatedConnection, connecting_by_settings
from testbed.simulated.loop import run_simulated, simulated_loop
from testbed.simulated.server import SimulatedServer
from testbed.simulated.streams import header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from airflow_provider_jetstream.worker import Delivery

WORLDS = 12
SECONDS = 15.0
KEYS = ("ann", "bob")
# The archive has a copy a moment after the job is stored.
MOMENT = 0.5
QUEUE = WorkQueue(
    name="q",
    subjects=["q.jobs.>"],
    consumers=[{"name": "w", "max_deliver": 2, "ack_wait": "2s"}],
    dead_letters="q-dead",
    events="q-events",
)


class _World:
    def __init__(self) -> None:
        self.server = SimulatedServer((2, 15, 0), {})
        self.draws = simulated_loop().draws
        self.connections: dict[str, list[SimulatedConnection]] = defaultdict(list)
        self.problems: list[str] = []
        self.stored = 0
        self.held = 0
        # By body when its publishing began, when its worker gave it up, and whether it is over.
        self.begun: dict[str, float] = {}
        self.given_up: dict[str, float] = {}
        self.over: set[str] = set()

    @property
    def now(self) -> float:
        return simulated_loop().time()

    @asynccontextmanager
    async def connected(self, owner: str) -> AsyncIterator[SimulatedConnection]:
        connection = SimulatedConnection(self.server)
        self.connections[owner].append(connection)
        try:
            yield connection
        finally:
            connection.close()

    async def publisher(self, name: str) -> None:
        rng, number = self.draws.of(name), 0
        while True:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            key, number = rng.choice(KEYS), number + 1
            body = f"{key} {name} {number} {self.now:.6f}"
            self.begun[body] = self.now
            with suppress(JetStreamProviderError):
                async with self.connected(name) as connection:
                    report = await publish(connection, QUEUE, [Job(body, unique=key)], subject="q.jobs.sync")
                    self.stored, self.held = self.stored + report.stored, self.held + len(report.held)

    async def handle(self, delivery: Delivery) -> None:
        rng = self.draws.of("attempt", delivery.body.decode())
        body, chance = delivery.body.decode(), rng.random()
        await asyncio.sleep(rng.uniform(0.0, 0.8))
        if chance < 0.3:
            self.given_up[body] = self.now
            raise GiveUpError("no such customer")
        if chance < 0.6:
            raise ValueError("failed")
        self.over.add(body)

    async def worker(self, name: str) -> None:
        settings = connection_settings({"servers": ("nats://simulated:4222",), "timeout": 5})
        await Worker(QUEUE, "w", self.handle, settings, concurrency=2, name=name).run()

    async def redriver(self, name: str) -> None:
        rng = self.draws.of(name)
        while True:
            await asyncio.sleep(rng.uniform(2.0, 6.0))
            request = rng.choice([RedriveRequest(), RedriveRequest(discard=True, why="of nobody")])
            with suppress(JetStreamProviderError):
                async with self.connected(name) as connection:
                    await redrive_dead_letters(connection, QUEUE, request)

    def bodies(self) -> set[str]:
        return {message.data.decode() for message in self.server.streams["q"].messages.values()}

    def discarded(self) -> set[str]:
        prefix, streams = "audit.q.letters.", self.server.streams
        numbers = {
            message.subject.removeprefix(prefix)
            for message in streams["q-audit"].messages.values()
            if message.subject.startswith(prefix) and json.loads(message.data)["action"] == "discarded"
        }
        copies = streams["q-archive"].messages.values()
        return {copy.data.decode() for copy in copies if header(copy.headers, "Nats-Sequence") in numbers}

    async def judge(self, _: str) -> None:
        while True:
            await asyncio.sleep(0.05)
            by_key = defaultdict(set)
            over = self.over | self.discarded()
            for body in self.bodies():
                by_key[body.partition(" ")[0]].add(body)
            for key, bodies in by_key.items():
                # A letter that comes back may meet the job that was published while its worker gave it up.
                first = min(bodies, key=self.copies().index)
                if len(bodies) > 1 and first not in self.given_up:
                    self.problems.append(f"{self.now:.3f}: jobs of {key} are stored together: {sorted(bodies)}")
                for body in bodies:
                    self.problems += [
                        f"{self.now:.3f}: {body} was stored while {other} was a dead letter"
                        for other in self.given_up.keys() - over - bodies
                        if other.startswith(key) and self.is_seen(other, body)
                    ]

    def copies(self) -> list[str]:
        return [copy.data.decode() for copy in self.server.streams["q-archive"].messages.values()]

    def is_seen(self, letter: str, body: str) -> bool:
        """Whether a job had to find a letter.

        Where the job after the letter was published while the worker gave the letter up, the key is that job's.
        """
        copies = self.copies()
        key = body.partition(" ")[0]
        later = [copy for copy in copies[copies.index(letter) :] if copy.startswith(key) and copy != letter]
        return all(self.given_up[letter] + MOMENT < self.begun[copy] for copy in {body, *later[:1]})

    async def play(self) -> None:
        kinds: dict[str, Callable[[str], Awaitable[None]]] = {
            "publisher": self.publisher,
            "worker": self.worker,
            "redriver": self.redriver,
            "judge": self.judge,
        }
        names = ["publisher 1", "publisher 2", "publisher 3", "worker 1", "worker 2", "redriver 1", "judge"]
        loop, rng = simulated_loop(), self.draws.of("kills")
        tasks = {name: loop.create_task(_again(kinds[name.split(" ")[0]], name)) for name in names}
        while loop.time() < SECONDS:
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            name = rng.choice(names[:-1])
            for connection in self.connections.pop(name, []):
                connection.close()
            tasks[name].cancel()
            tasks[name] = loop.create_task(_again(kinds[name.split(" ")[0]], name))
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _again(act: Callable[[str], Awaitable[None]], name: str) -> None:
    while True:
        with suppress(JetStreamProviderError, TimeoutError):
            await act(name)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s > 0 else ()) for s in range(WORLDS)])
def test_no_two_jobs_of_a_key_wait_run_or_are_dead_whoever_is_killed(seed: int) -> None:
    async def play() -> _World:
        world = _World()

        async with world.connected("nobody") as connection:
            await provision(connection, QUEUE)
        with connecting_by_settings(lambda: world.connected("worker")):
            await world.play()
        return world

    world = run_simulated(play, seed)
    assert world.problems[:3] == []
    assert world.stored
    assert world.held
