"""A queue on which everything happens at once: publishers, workers, scans, accounts and redrives, all at random.

Workers and redrives are killed at random instants, and so is the server. Beside it the test keeps its own account:
what each handler has really done, and which acknowledgements the server has confirmed. No scan and no account may
contradict that, whenever it is made:

- no job is lost: at the end each one is done;
- none is done twice, but where a kill came between the work and the confirmation of its acknowledgement;
- none that is done is called a dead letter, or gone without evidence.

Left out of the last two is what a server forgets that is killed within two seconds (what it hadn't written), and what a
worker acknowledged only after the ack wait, on a machine that is too slow: the server stores no evidence of that.

The short form takes some ten seconds; ``FAULTS=full`` five minutes with each of two servers. The seed is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from nats import errors as nats_errors

from airflow_provider_jetstream.jetstream import (
    Job,
    RedriveRequest,
    Selection,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, LeaseHeldError
from testbed.foreign_programs import pull
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, make_queue, stored_count
from testbed.redrivers import redrivers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.redrivers import Redrivers

FULL = os.environ.get("FAULTS") == "full"
VERSIONS = (None, "2.12.8") if FULL else (None,)
SECONDS = float(os.environ.get("FAULTS_SECONDS", "300")) if FULL else 6.0
SEED = int(os.environ.get("FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
ACK_WAIT = 2.0
# What a server that is killed may not have written yet, and what a redrive's answer may take.
FORGOTTEN = 2.0
SETTLED_WITHIN = 120.0
REDRIVES: tuple[dict[str, Any], ...] = (
    {},
    {"protocol": "copy"},
    {"protocol": "copy", "rate": 50},
    {"protocol": "in_place"},
    {"max_redrives": 0},
    {"selection": {"parked": True}},
    {"selection": {"reasons": ["terminated"]}},
)


@dataclass
class OwnAccount:
    """What really happened, as the programs of the test know it.

    :param published: the bodies of the jobs that the server has confirmed
    :param done: how often a handler has done each of them
    :param excused: those of which a kill may make another delivery
    :param confirmed: when the acknowledgement of a stored message was confirmed, by stream sequence
    :param unproved: the stored messages of whose end the server may have no evidence, or none any more
    """

    published: set[str] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    excused: set[str] = field(default_factory=set)
    confirmed: dict[int, float] = field(default_factory=dict)
    unproved: set[int] = field(default_factory=set)
    bodies: dict[int, str] = field(default_factory=dict)
    _recent: list[tuple[float, int]] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)

    def note_done(self, sequence: int, body: str) -> None:
        self.done[body] += 1
        self._recent.append((time.monotonic(), sequence))

    def note_confirmed(self, sequence: int) -> None:
        self.confirmed[sequence] = time.monotonic()

    def server_killed(self) -> None:
        """Excuse what the server may have forgotten."""
        since = time.monotonic() - FORGOTTEN
        self._recent = [(at, sequence) for at, sequence in self._recent if at >= since]
        for sequence in {*self.in_flight, *(sequence for _, sequence in self._recent)}:
            self.unproved.add(sequence)
            self.excused.add(self.bodies[sequence])

    def proved_before(self, moment: float) -> set[int]:
        """Return the stored messages that were certainly done before a moment, with evidence."""
        return {sequence for sequence, at in self.confirmed.items() if at < moment} - self.unproved

    def problems(self) -> list[str]:
        """Return what is wrong once all is settled."""
        lost = sorted(body for body in self.published if not self.done[body])
        twice = sorted(body for body, count in self.done.items() if count > 1 and body not in self.excused)
        return [f"lost {body}" for body in lost] + [f"done {self.done[body]} times {body}" for body in twice]


@dataclass
class BusyQueue:
    """One queue with all that happens to it."""

    server: NatsServer
    connection: NatsPyConnection
    queue: WorkQueue
    forking: Redrivers
    dice: random.Random
    account: OwnAccount = field(default_factory=OwnAccount)
    settling: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _number: int = 0

    @asynccontextmanager
    async def running(self, *programs: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run programs again and again, whatever errors they meet, until the block ends."""

        async def repeat(program: Callable[[], Awaitable[None]]) -> None:
            while True:
                with suppress(JetStreamProviderError, nats_errors.Error, TimeoutError, OSError):
                    await program()
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(repeat(program)) for program in programs]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def publish(self) -> None:
        """Publish some jobs, each until the server has confirmed it."""
        count = self.dice.randint(1, 20)
        jobs = [f"job-{self._number + offset}" for offset in range(count)]
        self._number += count
        subject = f"{self.queue.name}.jobs.{self.dice.choice('ab')}"
        while True:
            with suppress(JetStreamProviderError):
                await publish(self.connection, self.queue, [Job(body, id=body) for body in jobs], subject=subject)
                break
            await asyncio.sleep(0.2)
        self.account.published.update(jobs)
        await asyncio.sleep(self.dice.uniform(0.0, 0.4))

    async def work(self) -> None:
        """Pull some jobs and do something with each."""
        requested = time.monotonic()
        batch = self.dice.randint(1, 10)
        async for message in pull(self.connection.client, self.queue.name, CONSUMER, batch=batch, expires=0.3):
            await self._handle(message, requested)

    async def _handle(self, message: Msg, requested: float) -> None:
        sequence, body = message.metadata.sequence.stream, message.data.decode()
        self.account.bodies[sequence] = body
        chance = 1.0 if self.settling else self.dice.random()
        if chance < 0.05:
            # Killed before the work.
            self.counts["workers killed"] += 1
            return
        if chance < 0.08:
            # Killed between the work and its acknowledgement.
            self.counts["workers killed"] += 1
            self.account.note_done(sequence, body)
            self.account.excused.add(body)
            self.account.unproved.add(sequence)
            return
        if chance < 0.25:
            await message.nak()
            return
        if chance < 0.32:
            await message.term()
            return
        self.account.note_done(sequence, body)
        self.account.in_flight.add(sequence)
        try:
            await message.ack_sync(timeout=10)
        except (nats_errors.Error, TimeoutError):
            self.account.excused.add(body)
            self.account.unproved.add(sequence)
            raise
        finally:
            self.account.in_flight.discard(sequence)
        if time.monotonic() - requested > ACK_WAIT * 0.9:
            # The server may have given the job to another worker, or up: then it stores no evidence.
            self.counts["late acknowledgements"] += 1
            self.account.excused.add(body)
            self.account.unproved.add(sequence)
        self.account.note_confirmed(sequence)

    async def scan(self) -> None:
        """Find the dead letters; none of them is done."""
        began = time.monotonic()
        found = await find_dead_letters(self.connection, self.queue)
        self.counts["scans"] += 1
        wrong = {letter.sequence for letter in found.letters} & self.account.proved_before(began)
        self.problems += [f"{sequence} is called a dead letter, and was done" for sequence in sorted(wrong)]
        await asyncio.sleep(self.dice.uniform(0.0, 0.5))

    async def redrive(self) -> None:
        """Redrive in a process of its own, which may be killed."""
        chance = self.dice.random()
        killing: dict[str, Any] = {}
        if chance < 0.4:
            killing = {"kill_at": self.dice.choice([self.dice.randint(1, 12), self.dice.randint(1, 60)])}
        elif chance < 0.6:
            killing = {"kill_after": self.dice.uniform(0.0, 1.0)}
        outcome = await self.forking.redrive(self.queue, self.dice.choice(REDRIVES), **killing)
        self.counts["redrives killed" if outcome.killed else "redrives"] += 1
        await asyncio.sleep(self.dice.uniform(0.0, 0.5))

    async def kill_server(self) -> None:
        """Kill the server, and start it again."""
        self.account.server_killed()
        self.server.kill()
        self.counts["servers killed"] += 1
        await asyncio.to_thread(self.server.restart)
        await eventually(lambda: self.connection.client.is_connected, within=30)
        # What was on its way when the server was killed.
        self.account.server_killed()

    async def settle(self) -> None:
        """Redrive until each job is done, naming those that are gone without evidence, as people do."""
        self.settling = True

        async def settled() -> bool:
            # A redrive that goes on meanwhile and is killed keeps the lease for half a minute.
            with suppress(LeaseHeldError):
                await redrive_dead_letters(self.connection, self.queue)
                await redrive_dead_letters(self.connection, self.queue, RedriveRequest(Selection(parked=True)))
            gone = await self.unaccounted()
            if undone := [
                sequence for sequence in gone if not self.account.done[self.account.bodies.get(sequence, "")]
            ]:
                await redrive_dead_letters(
                    self.connection, self.queue, RedriveRequest(Selection(sequences=frozenset(undone)))
                )
            found = await find_dead_letters(self.connection, self.queue)
            parked = await find_dead_letters(self.connection, self.queue, Selection(parked=True))
            is_empty = not await stored_count(self.connection, self.queue.name)
            return is_empty and not (found.letters or parked.letters) and not self.account.problems()

        with suppress(TimeoutError):
            await eventually(settled, within=SETTLED_WITHIN)

    async def make_account(self) -> None:
        """Make an account, which calls no job gone without evidence that is done."""
        await self.unaccounted()
        await asyncio.sleep(self.dice.uniform(0.0, 0.5))

    async def unaccounted(self) -> list[int]:
        """Make an account, check it, and return the stored messages that it calls gone without evidence."""
        began = time.monotonic()
        account = await account_for_jobs(self.connection, self.queue)
        self.counts["accounts"] += 1
        unaccounted = [sequence for low, high in account.unaccounted for sequence in range(low, high + 1)]
        wrong = self.account.proved_before(began).intersection(unaccounted)
        self.problems += [f"{sequence} is called gone without evidence, and was done" for sequence in sorted(wrong)]
        return unaccounted


@pytest.mark.parametrize("version", VERSIONS)
async def test_whatever_happens_at_once_each_job_is_done_and_no_done_job_is_missed(
    tmp_path: Path, version: str | None
) -> None:
    dice = random.Random(SEED)  # noqa: S311 - dice
    binary = nats_server_of(version) if version else None
    with NatsServer(binary=binary) as server:
        settings = connection_settings({"servers": (server.url,), "timeout": 5})
        async with connect(settings) as connection, redrivers([server.url], tmp_path) as forking:
            consumer = {"ack_wait": f"{ACK_WAIT:g}s", "max_deliver": 2, "sample_freq": "100%"}
            queue = await make_queue(connection, "busy", consumer=consumer)
            busy = BusyQueue(server, connection, queue, forking, dice)
            began = time.monotonic()
            async with busy.running(busy.work, busy.work):
                others = (
                    busy.publish,
                    busy.publish,
                    busy.scan,
                    busy.make_account,
                    busy.make_account,
                    busy.redrive,
                    busy.redrive,
                )
                async with busy.running(*others):
                    while (left := SECONDS - (time.monotonic() - began)) > 0:
                        await asyncio.sleep(min(left, dice.uniform(3.0, 30.0)))
                        await busy.kill_server()
                await busy.settle()
            problems = [*dict.fromkeys(busy.problems), *busy.account.problems()]
    print(f"seed {SEED}, {len(busy.account.published)} jobs, {dict(busy.counts)}")
    assert not problems, f"seed {SEED}: {len(problems)} problems, {problems[:20]}; {dict(busy.counts)}"
