"""Redrives of different kinds, one to three at once, killed at random requests and instants, and run again by others.

Every job is done once, whoever was killed where: nothing is lost and nothing is done twice. The short form kills about
a dozen redrives, ``FAULTS=full`` three hundred; the table at the end of the suite has the figures of each mix.

What repeats by the exceptions of the table of guarantees in docs/redrive.md that aren't the redrives' isn't counted: a
worker measures whether the machine let it acknowledge within the ack wait, and where the server is killed, no worker is
at work in the second before.
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

from airflow_provider_jetstream.jetstream import Selection, connect, connection_settings, find_dead_letters
from testbed.foreign_programs import pull
from testbed.queues import CONSUMER, eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries
from testbed.redrivers import RedriveOutcome, redrivers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer
    from testbed.redrivers import Redrivers

FULL = os.environ.get("FAULTS") == "full"
# How often redrives are killed, for each of WHEN.
KILLS = 100 if FULL else 4
# Queues that are redriven beside each other, mostly waiting for a paused consumer or another redrive.
AT_ONCE = 6
LETTERS = 24 if FULL else 10
WINDOW_SECONDS = 0.5
ACK_WAIT_SECONDS = 3.0
PROTOCOLS: dict[str, dict[str, Any]] = {
    "copy": {"protocol": "copy"},
    "in place": {"protocol": "in_place"},
    "park": {"max_redrives": 0},
}
MIXES = (
    ("copy", "in place"),
    ("in place", "park"),
    ("copy", "park", "in place"),
    ("copy", "park"),
    ("copy",),
    ("in place",),
    ("copy", "copy", "copy"),
    ("park",),
    ("in place", "in place"),
)
WHEN = ("inside the duplicate window", "after the duplicate window", "after a kill of the server")


class Worker:
    """A foreign worker that fails some jobs before it does them, and a ledger of what it has done.

    :param failures: how often each job fails yet
    """

    def __init__(self, connection: NatsPyConnection, queue: str, failures: Counter[str]) -> None:
        self._connection = connection
        self._queue = queue
        self._failures = failures
        self._stopped = False
        self.done: Counter[str] = Counter()
        self.late: set[str] = set()
        """Jobs whose acknowledgement took longer than the ack wait: the server may have delivered them again."""

    async def run(self) -> None:
        self._stopped = False
        while not self._stopped:
            with suppress(nats_errors.Error):
                requested = time.monotonic()
                async for message in pull(self._connection.client, self._queue, CONSUMER, batch=5, expires=0.3):
                    job = message.data.decode()
                    if self._failures[job]:
                        self._failures[job] -= 1
                        await message.nak()
                        continue
                    self.done[job] += 1
                    await message.ack_sync(timeout=10)
                    if time.monotonic() - requested > ACK_WAIT_SECONDS:
                        self.late.add(job)
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run until the block ends; every job that was delivered is answered."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self._stopped = True
            await task


@dataclass(slots=True)
class Case:
    """One queue, its dead letters, and the mix of redrives that work on it.

    :param outcomes: how the redrives ended
    """

    dice: random.Random
    mix: Sequence[str]
    queue: WorkQueue
    worker: Worker
    jobs: Sequence[str]
    outcomes: list[RedriveOutcome] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many redrives were killed."""
        return sum(outcome.killed for outcome in self.outcomes)

    def request(self, kind: str) -> dict[str, Any]:
        """Return a random request of a kind."""
        request: dict[str, Any] = {**PROTOCOLS[kind], "who": {"task_id": kind}}
        if kind != "in place" and self.dice.random() < 0.3:
            request["selection"] = {"subject": f"{self.queue.name}.jobs.{self.dice.choice('ab')}"}
        if self.dice.random() < 0.3:
            request["run"] = kind.replace(" ", "-")
        return request

    def killing(self) -> dict[str, Any]:
        """Return when a redrive is to be killed: at one of its changes, at an instant, or never."""
        chance = self.dice.random()
        if chance < 0.6:
            return {"kill_at": self.dice.choice([self.dice.randint(1, 12), self.dice.randint(1, 4 * LETTERS)])}
        return {"kill_after": self.dice.uniform(0.0, 0.4)} if chance < 0.9 else {}


async def make_case(connection: NatsPyConnection, name: str, seed: int, when: str) -> Case:
    """Create a queue with dead letters of both kinds on two subjects: still stored, and terminated but archived."""
    dice, mix = random.Random(f"{seed} {when}"), MIXES[seed % len(MIXES)]  # noqa: S311 - dice
    queue = await make_queue(
        connection,
        name,
        consumer={"ack_wait": f"{ACK_WAIT_SECONDS:g}s", "sample_freq": "100%"},
        duplicate_window=f"{WINDOW_SECONDS:g}s" if when == WHEN[1] else "2m",
    )
    jobs = [f"job-{number}" for number in range(LETTERS)]
    for job in jobs:
        await publish_jobs(connection, queue, [job], kind=dice.choice("ab"))
    for message in await pull_jobs(connection, queue, len(jobs)):
        if dice.random() < 0.3:
            await connection.request(message.reply, b"+TERM poison")
        else:
            await message.nak()
    await wait_for_entries(connection, queue, len(jobs))
    failures = Counter({job: dice.choice([1, 2]) for job in jobs if dice.random() < 0.2})
    return Case(dice, mix, queue, Worker(connection, name, failures), jobs)


async def redrive_at_once(case: Case, forking: Redrivers, *, worker_away: bool) -> None:
    """Run the redrives of the mix at once, each killed or not, beside a worker or without one."""
    kinds = case.dice.sample(case.mix, len(case.mix))

    async def redrive(kind: str) -> None:
        await asyncio.sleep(case.dice.choice([0.0, 0.0, 0.05, 0.2]))
        case.outcomes.append(await forking.redrive(case.queue, case.request(kind), **case.killing()))

    if worker_away or case.dice.random() < 0.3:
        await asyncio.gather(*map(redrive, kinds))
        return
    async with case.worker.running():
        await asyncio.gather(*map(redrive, kinds))


async def finish(connection: NatsPyConnection, case: Case, forking: Redrivers) -> None:
    """Redrive by any kind, bring back what is parked, and let the worker run until nothing is left."""

    async def nothing_left() -> bool:
        request = case.request(case.dice.choice(case.mix)) | {"run": None}
        if "max_redrives" in request:
            request = case.dice.choice([{"selection": {"parked": True}}, {}])
        outcome = await forking.redrive(case.queue, request)
        case.outcomes.append(outcome)
        if outcome.error:
            await asyncio.sleep(0.3)
        found = await find_dead_letters(connection, case.queue)
        parked = await find_dead_letters(connection, case.queue, Selection(parked=True))
        is_done = set(case.jobs) <= set(case.worker.done)
        # A late acknowledgement has no metric, so such a job is gone without evidence.
        uncertain = max(0, found.uncertain - len(case.worker.late))
        return not (found.letters or uncertain or parked.letters) and is_done

    async with case.worker.running():
        await eventually(nothing_left, within=90)


def lost_and_repeated(case: Case) -> tuple[int, int]:
    """Count the jobs that were never done, and those that were done more than once though acknowledged in time."""
    done, late = case.worker.done, case.worker.late
    return sum(done[job] == 0 for job in case.jobs), sum(done[job] > 1 and job not in late for job in case.jobs)


@pytest.mark.parametrize("when", WHEN)
async def test_each_job_is_done_once_whatever_redrives_are_killed_at_once(
    own_nats: NatsServer, tmp_path: Path, when: str, add_mix: Callable[..., None]
) -> None:
    totals: dict[Sequence[str], Counter[str]] = {}
    problems: list[object] = []
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    seed = kills = 0
    async with connect(settings) as connection, redrivers([own_nats.url], tmp_path) as forking:
        while kills < KILLS:
            names = [f"q{number}" for number in range(seed, seed + AT_ONCE)]
            cases = await asyncio.gather(*(make_case(connection, name, int(name[1:]), when) for name in names))
            seed += AT_ONCE
            for _ in range(2):
                await asyncio.gather(*(redrive_at_once(case, forking, worker_away=when == WHEN[2]) for case in cases))
                if when == WHEN[1]:
                    await asyncio.sleep(WINDOW_SECONDS + 0.2)
                if when == WHEN[2]:
                    # What the server hasn't written for a second would be forgotten: a matter of the server's.
                    await asyncio.sleep(1.5)
                    own_nats.kill()
                    await asyncio.to_thread(own_nats.restart)
                    await eventually(lambda: connection.client.is_connected)
            results = await asyncio.gather(
                *(finish(connection, case, forking) for case in cases), return_exceptions=True
            )
            for case, result in zip(cases, results, strict=True):
                kills += case.kills
                lost, repeated = lost_and_repeated(case)
                count = {"redrives": len(case.outcomes), "kills": case.kills, "lost": lost, "repeated": repeated}
                totals.setdefault(case.mix, Counter()).update(count)
                if lost or repeated or result is not None:
                    problems.append((case.mix, case.queue.name, result, case.outcomes, case.worker.done))
    for mix, total in totals.items():
        add_mix(" + ".join(mix), when, *(total[name] for name in ("redrives", "kills", "lost", "repeated")))
    assert not problems, "\n".join(map(repr, problems))
