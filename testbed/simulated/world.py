"""Worlds: actors that use one queue of a simulated server at once, and an independent account that judges them.

The actors run the package's own code: publishers with retries, workers, scans, accounts, waits and redrives. A world is
drawn from its seed. What really happened is noted where it happens: by the handlers, and by the server where it removes
a message for an acknowledgement.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    RedriveRequest,
    Selection,
    WorkQueue,
    account_for_jobs,
    connection_settings,
    find_dead_letters,
    provision,
    publish_with_handle,
    redrive_dead_letters,
)
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.simulated.actors import ERRORS, Actors
from testbed.simulated.connection import OWNER, SimulatedConnection
from testbed.simulated.loop import run_simulated, simulated_loop
from testbed.simulated.server import SimulatedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

QUEUE = "q"
CONSUMER = "worker"
_SETTLED_WITHIN = 600.0
_BATCHES = (2, 12)
_WAITS_END_WITHIN = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a world is like.

    :param jobs: how many jobs each publisher publishes
    :param fails: the share of attempts that fail
    :param terminates: the share of attempts that give the job up
    :param outlasts: the share of a foreign worker's attempts that take longer than the ack wait
    :param waits: how many waits there are
    :param watchers: how many watch dead letters
    :param people: how many cancel jobs and park letters
    :param atomic: whether the queue allows atomic batches
    :param faults: the share of seconds in which something is killed or cut off; 0 in a calm world
    """

    version: tuple[int, int, int]
    jobs: tuple[int, ...]
    workers: int
    foreign: int
    max_deliver: int
    ack_wait: float
    fails: float
    terminates: float
    outlasts: float
    waits: int
    watchers: int
    people: int
    atomic: bool
    faults: float
    seconds: float

    @classmethod
    def draw(cls, rng: random.Random, *, calm: bool = False) -> Plan:
        """Draw a plan."""
        return cls(
            version=rng.choice([(2, 15, 0), (2, 15, 0), (2, 12, 8)]),
            jobs=tuple(rng.randint(1, 12) for _ in range(rng.randint(1, 3))),
            workers=rng.randint(1, 3),
            foreign=rng.choice([0, 1, 2]),
            max_deliver=rng.choice([1, 1, 2, 2, 3]),
            ack_wait=rng.choice([1.0, 2.0, 5.0]),
            fails=rng.choice([0.0, 0.2, 0.5]),
            terminates=rng.choice([0.0, 0.1, 0.3]),
            outlasts=0.0 if calm else rng.choice([0.0, 0.0, 0.3]),
            waits=rng.choice([0, 2, 4]),
            watchers=rng.choice([0, 1]),
            people=rng.choice([0, 0, 1]),
            atomic=rng.choice([True, False]),
            faults=0.0 if calm else rng.choice([0.1, 0.3, 0.6]),
            seconds=rng.uniform(3.0, 20.0),
        )


@dataclass
class Account:
    """What really happened.

    :param stored: the bodies that a publisher's report calls stored
    :param done: how often a handler has finished each body
    :param again: the bodies that may be delivered once more after they were done: whoever had them was killed, cut off,
        or outlasted the ack wait
    :param unproved: the bodies of whose end the server may have no evidence
    """

    stored: set[str] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    again: set[str] = field(default_factory=set)
    unproved: set[str] = field(default_factory=set)
    running: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def excuse(self, bodies: set[str]) -> None:
        """Excuse another delivery of some bodies: whoever had them was killed or cut off."""
        self.again |= bodies
        self.unproved |= bodies


@dataclass
class World:
    """One world."""

    plan: Plan
    rng: random.Random
    server: SimulatedServer
    queue: WorkQueue
    account: Account = field(default_factory=Account)
    connections: list[SimulatedConnection] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    settling: bool = False
    story: list[str] = field(default_factory=list)
    actors: Actors = field(init=False)

    def __post_init__(self) -> None:
        self.actors = Actors(self)
        self.server.on_reset = self._check_reset

    def tell(self, what: str) -> None:
        """Add to the story of the world."""
        self.story.append(f"{self.server.loop.time():9.4f} {what}")

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[SimulatedConnection]:
        """Open a connection, which a fault may cut."""
        connection = SimulatedConnection(self.server)
        if not self.server.is_up:
            connection.lose()
        self.connections.append(connection)
        try:
            yield connection
        finally:
            connection.close()
            self.connections.remove(connection)

    # Actors.

    async def publisher(self, name: str, count: int) -> None:
        """Publish a task's jobs, try by try, in another order each time."""
        bodies = [f"{name}-{number}" for number in range(count)]
        origin = Origin("dag", "run", name, max_tries=9)
        await asyncio.sleep(self.rng.uniform(0.0, self.plan.seconds / 2))
        while True:
            jobs = [Job(body.encode(), id=body) for body in self.rng.sample(bodies, count)]
            with suppress(*ERRORS):
                async with self.connected() as connection:
                    report = await publish_with_handle(
                        connection, self.queue, jobs, subject=f"{QUEUE}.jobs.{name}", origin=origin
                    )
                stored = dict(zip([job.id for job in jobs], report.sequences, strict=True))
                self.tell(f"{name} stored {stored}")
                self.account.stored.update(bodies)
                self.actors.note_published(
                    name, report.handle, {sequence: body for body, sequence in stored.items() if body and sequence}
                )
                return
            await asyncio.sleep(0.2)

    async def worker(self, name: str) -> None:
        """Run the package's worker."""

        async def handle(delivery: Delivery) -> None:
            await self._handle(name, delivery)

        settings = connection_settings({"servers": ("nats://simulated:4222",), "timeout": 5})
        await Worker(self.queue, CONSUMER, handle, settings, concurrency=self.rng.randint(1, 3), name=name).run()

    async def _handle(self, worker: str, delivery: Delivery) -> None:
        body = delivery.body.decode()
        self.account.running[body] += 1
        chance = 1.0 if self.settling else self.rng.random()
        try:
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            if chance < self.plan.terminates + self.plan.fails:
                self.actors.note_failed(body)
            if chance < self.plan.terminates:
                self.tell(f"{worker} gives {body} up, {delivery.sequence}, attempt {delivery.attempt}")
                raise GiveUpError("broken")
            if chance < self.plan.terminates + self.plan.fails:
                self.tell(f"{worker} fails with {body}, {delivery.sequence}, attempt {delivery.attempt}")
                raise ValueError("failed")
            self.account.done[body] += 1
            self.actors.note_done(body)
            self.tell(f"{worker} does {body}, {delivery.sequence}, attempt {delivery.attempt}")
        finally:
            self.account.running[body] -= 1

    async def foreign(self, name: str) -> None:
        """Do jobs as a program in another language does: without completions, and at times longer than it may."""
        while True:
            async with self.connected() as connection:
                while True:
                    await self._pull_one(connection, name)

    async def _pull_one(self, connection: SimulatedConnection, name: str) -> None:
        arrived: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

        def receive(_subject: bytes, reply: bytes, _headers: bytes | None, body: bytes) -> None:
            arrived.put_nowait((reply.decode(), body.decode()))

        inbox = connection.new_inbox()
        subscription = await connection.subscribe_raw(inbox, receive)
        try:
            request = b'{"batch":1,"expires":1000000000}'
            await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{QUEUE}.{CONSUMER}", request, reply=inbox)
            async with asyncio.timeout(2):
                reply, body = await arrived.get()
        finally:
            await subscription.unsubscribe()
        if reply:
            await self._do_as_foreign(connection, name, reply, body)

    async def _do_as_foreign(self, connection: SimulatedConnection, name: str, reply: str, body: str) -> None:
        self.account.running[body] += 1
        try:
            outlasts = not self.settling and self.rng.random() < self.plan.outlasts
            await asyncio.sleep(self.rng.uniform(0.0, 0.2) + (self.plan.ack_wait * 1.5 if outlasts else 0.0))
            chance = 1.0 if self.settling else self.rng.random()
            if outlasts or chance < self.plan.terminates + self.plan.fails:
                self.actors.note_failed(body)
            answer = b"+ACK"
            if chance < self.plan.terminates:
                answer = b"+TERM broken"
            elif chance < self.plan.terminates + self.plan.fails:
                answer = b"-NAK"
            else:
                self.account.done[body] += 1
                self.actors.note_done(body)
                if outlasts:
                    self.account.again.add(body)
                    self.account.unproved.add(body)
            self.tell(f"{name} answers {answer.decode()} to {body}, {reply}{', too late' if outlasts else ''}")
            await connection.request(reply, answer)
        finally:
            self.account.running[body] -= 1

    async def scanner(self, name: str) -> None:
        """Look for dead letters again and again: none of them is done."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            done = self._surely_done()
            with suppress(*ERRORS):
                async with self.connected() as connection:
                    found = await find_dead_letters(connection, self.queue)
                self.account.counts["scans"] += 1
                self.tell(f"{name} finds {[letter.sequence for letter in found.letters]}, {found.uncertain} uncertain")
                for letter in found.letters:
                    if letter.body.decode() in done:
                        self.problem(f"{letter.sequence} ({letter.body.decode()}) is called dead, and was done")
                if found.uncertain and not self.plan.faults and not self.plan.outlasts:
                    self.problem(f"{found.uncertain} jobs are uncertain in a calm world")

    async def accountant(self, name: str) -> None:
        """Make accounts again and again: no job is gone without evidence."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            await self.make_account(name)

    async def make_account(self, name: str) -> None:
        """Make an account, and compare it."""
        with suppress(*ERRORS):
            async with self.connected() as connection:
                account = await account_for_jobs(connection, self.queue)
            self.account.counts["accounts"] += 1
            self.tell(f"{name} accounts {account.unaccounted} {account.unknown}")
            if (account.unaccounted or account.unknown) and not self.plan.faults:
                self.problem(f"{account.unaccounted} {account.unknown} are unaccounted in a world without faults")

    async def redriver(self, name: str) -> None:
        """Redrive again and again."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, self.plan.seconds / 2))
            with suppress(*ERRORS):
                await self.redrive(name, self.actors.redrive_request())

    async def redrive(self, name: str, request: RedriveRequest | None = None) -> None:
        """Redrive once."""
        async with self.connected() as connection:
            report = await redrive_dead_letters(connection, self.queue, request or RedriveRequest())
        self.account.counts["redrives"] += 1
        self.tell(
            f"{name} redrives {dict(report.redriven)}, parked {list(report.parked)}, failed {report.failed}, by"
            f" {report.protocol.value}"
        )

    async def faults(self) -> None:
        """Kill actors, and cut connections off."""
        while self.plan.faults:
            await asyncio.sleep(self.rng.expovariate(self.plan.faults))
            self.account.counts["faults"] += 1
            match self.rng.choice(["actor", "actor", "connection", "connection", "server"]):
                case "actor":
                    name = self.rng.choice(sorted(self.tasks))
                    self.tell(f"{name} is killed")
                    self.kill(name)
                case "connection" if self.connections:
                    connection = self.rng.choice(self.connections)
                    self.tell("a connection is lost")
                    self._excuse_running()
                    connection.lose()
                    self.server.loop.call_later(self.rng.uniform(0.01, 3.0), self._restore, connection)
                case "server":
                    self.tell("the server is killed")
                    self._excuse_running()
                    self._excuse_recent()
                    self.server.kill()
                    for connection in self.connections:
                        connection.lose()
                    await asyncio.sleep(self.rng.uniform(0.1, 2.0))
                    self.server.start()
                    for connection in self.connections:
                        self._restore(connection)

    def _restore(self, connection: SimulatedConnection) -> None:
        if not connection.is_closed and not connection.is_connected and self.server.is_up:
            connection.restore()

    def _excuse_running(self) -> None:
        self.account.excuse({body for body, count in self.account.running.items() if count > 0})
        # What was done and whose acknowledgement may be on its way.
        self._excuse_recent()

    def _excuse_recent(self) -> None:
        stored = {message.data.decode() for message in self.server.streams[QUEUE].messages.values()}
        self.account.excuse({body for body in stored if self.account.done[body]})

    def kill(self, name: str) -> None:
        """Kill an actor and run it anew: what it was about to send is never sent."""
        self._excuse_running()
        # Its connections die with it, before anything that it does when it is cancelled.
        for connection in list(self.connections):
            if connection.owner == name:
                connection.close()
        self.tasks.pop(name).cancel()
        self._start(name)

    def _start(self, name: str) -> None:
        kind, _, number = name.partition(" ")
        actors: dict[str, Callable[[], Awaitable[None]]] = {
            "worker": lambda: self.worker(name),
            "foreign": lambda: self.foreign(name),
            "scanner": lambda: self.scanner(name),
            "accountant": lambda: self.accountant(name),
            "redriver": lambda: self.redriver(name),
            "waiter": lambda: self.actors.waiter(name, f"p{int(number) % len(self.plan.jobs)}"),
            "watcher": lambda: self.actors.watcher(name),
            "operator": lambda: self.actors.operator(name),
            "publisher": lambda: self.publisher(f"p{number}", self.plan.jobs[int(number)]),
        }

        async def run() -> None:
            OWNER.set(name)
            while True:
                with suppress(*ERRORS):
                    await actors[kind]()
                    if kind in ("publisher", "waiter"):
                        return
                await asyncio.sleep(0.5)

        self.tasks[name] = self.server.loop.create_task(run(), name=name)

    # The judge.

    def _surely_done(self) -> set[str]:
        stored = {message.data.decode() for message in self.server.streams[QUEUE].messages.values()}
        return {
            body for body, count in self.account.done.items() if count and body not in stored
        } - self.account.unproved

    def _check_reset(self, sequences: list[int]) -> None:
        """Check that what a reset delivers again is recorded before."""
        audit = self.server.streams[f"{QUEUE}-audit"]
        for sequence in sequences:
            record = audit.last_of(f"audit.{QUEUE}.letters.{sequence}")
            if record is None or b'"action":"requeue' not in record.data:
                self.problem(f"{sequence} is delivered again by a reset, which no record says")

    def problem(self, text: str) -> None:
        """Note what must not be."""
        self.tell(f"PROBLEM: {text}")
        self.account.problems.append(text)

    async def live(self) -> None:
        """Run the actors, then settle, and judge."""
        names = [f"worker {number}" for number in range(self.plan.workers)]
        names += [f"foreign {number}" for number in range(self.plan.foreign)]
        names += ["scanner", "accountant", "redriver", "redriver 2"]
        names += [f"publisher {number}" for number in range(len(self.plan.jobs))]
        waits = [f"waiter {number}" for number in range(self.plan.waits)]
        names += [*waits, *(f"watcher {number}" for number in range(self.plan.watchers))]
        names += [f"operator {number}" for number in range(self.plan.people)]
        for name in names:
            self._start(name)
        faults = asyncio.create_task(self.faults())
        await asyncio.sleep(self.plan.seconds)
        await self._end(faults)
        for name in [name for name in names if name.startswith("publisher")]:
            if name in self.tasks:
                await self.tasks[name]
        await self._end(*[self.tasks.pop(name) for name in names if name.startswith(("redriver", "operator"))])
        await self._settle()
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAITS_END_WITHIN):
                await asyncio.gather(*[self.tasks[name] for name in waits])
        await self._end(*self.tasks.values())
        self._judge()
        self.actors.judge(waits)

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _settle(self) -> None:
        if not self.server.is_up:
            self.server.start()
        for connection in self.connections:
            self._restore(connection)
        self.settling = True
        self.tell("settling")
        await self.actors.compare_watchers()
        until = self.server.loop.time() + _SETTLED_WITHIN
        while self.server.loop.time() < until:
            for selection in (Selection(), Selection(parked=True)):
                with suppress(*ERRORS):
                    await self.redrive("settling", RedriveRequest(selection))
            await asyncio.sleep(2 * self.plan.ack_wait)
            if not self._jobs_left() and self._all_done():
                break
        await self.make_account("settled")

    def _all_done(self) -> bool:
        return all(self.account.done[body] for body in self.account.stored - self.actors.cancelled)

    @property
    def is_calm(self) -> bool:
        """Whether nothing is killed or cut off, and nobody is slower than the ack wait."""
        return not self.plan.faults and not self.plan.outlasts

    def _judge(self) -> None:
        for body in sorted(self.account.stored - self.actors.cancelled):
            count = self.account.done[body]
            if not count:
                self.problem(f"{body} was lost")
            elif count > 1 and body not in self.account.again:
                self.problem(f"{body} was done {count} times")
        if left := self._jobs_left():
            self.problem(f"{left} are still stored")

    def _jobs_left(self) -> list[int]:
        messages = self.server.streams[QUEUE].messages.values()
        return [message.sequence for message in messages if message.subject.startswith(f"{QUEUE}.jobs.")]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    seed: int
    plan: Plan
    problems: tuple[str, ...]
    counts: Counter[str]
    story: tuple[str, ...]


def drawn_plan(seed: int, *, calm: bool = False) -> Plan:
    """Return the plan that a seed makes."""
    return Plan.draw(random.Random(f"plan {seed}"), calm=calm)  # noqa: S311


def play_world(seed: int, *, calm: bool = False, plan: Plan | None = None) -> Outcome:
    """Play one world.

    :param plan: the one that the seed makes where absent
    """
    plan = plan or drawn_plan(seed, calm=calm)

    async def play() -> Outcome:
        server = SimulatedServer(plan.version)
        queue = WorkQueue(
            name=QUEUE,
            subjects=[f"{QUEUE}.jobs.>"],
            consumers=[
                {
                    "name": CONSUMER,
                    "max_deliver": plan.max_deliver,
                    "ack_wait": f"{plan.ack_wait:g}s",
                    "sample_freq": "100%",
                }
            ],
            dead_letters=f"{QUEUE}-dead",
            events=f"{QUEUE}-events",
            archive=True,
            audit=True,
            atomic_redrive=plan.atomic and plan.version >= _BATCHES,
        )
        world = World(plan, simulated_loop().rng, server, queue)
        async with world.connected() as connection:
            await provision(connection, queue)
        with _workers_connect_to(world):
            await world.live()
        counts = world.account.counts
        counts["jobs"] = len(world.account.stored)
        return Outcome(seed, plan, tuple(world.account.problems), counts, (str(plan), *world.story))

    level = logging.root.level
    logging.disable(logging.CRITICAL)
    try:
        return run_simulated(play, seed)
    finally:
        logging.disable(logging.NOTSET)
        logging.root.setLevel(level)


def _workers_connect_to(world: World) -> Any:
    """Have what connects by settings, as a worker does, connect to the world's server."""

    @asynccontextmanager
    async def connect(*_: object) -> AsyncIterator[SimulatedConnection]:
        async with world.connected() as connection:
            yield connection

    return patch("airflow_provider_jetstream.jetstream.client.connect.connect", connect)
