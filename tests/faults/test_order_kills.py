"""Redrives that keep the order of keys: two at once, killed at random requests and instants, and run again.

The jobs of each key are done once and one after the other, whoever was killed where. The short form kills some six
redrives, ``FAULTS=full`` some sixty.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.key_ledger import KeyLedger, make_keyed_letters
from testbed.queues import make_queue, stored_count
from testbed.redrivers import redrivers

if TYPE_CHECKING:
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.nats_server import NatsServer
    from testbed.redrivers import RedriveOutcome, Redrivers

FULL = os.environ.get("FAULTS") == "full"
SEEDS = range(20 if FULL else 2)
LETTERS = 12
MOST_ROUNDS = 20
REQUEST = {"order_key": "header:Customer", "lease_timeout": 20}


@pytest.mark.parametrize("seed", SEEDS)
async def test_killed_redrives_keep_the_order_of_each_key(
    nats: NatsServer, tmp_path: Path, name: str, seed: int
) -> None:
    dice = random.Random(seed)  # noqa: S311 - dice
    killed = 0
    async with (
        connect(connection_settings({"servers": (nats.url,), "timeout": 5})) as connection,
        redrivers([nats.url], tmp_path) as processes,
    ):
        queue = await make_queue(connection, name, consumer={"sample_freq": "100%", "ack_wait": "2s"})
        bodies = await make_keyed_letters(connection, queue, dice.choices("abc", k=LETTERS))
        ledger = KeyLedger(connection, queue)
        async with ledger.workers(dice, slow=0.3):
            for number in range(MOST_ROUNDS):
                outcomes = await asyncio.gather(*(_redrive(processes, queue, dice, number) for _ in range(2)))
                killed += sum(outcome.killed for outcome in outcomes)
                if any(outcome.complete for outcome in outcomes):
                    break
        assert ledger.violations(bodies) == {}
        assert await stored_count(connection, name) == 0
    assert killed > 1


async def _redrive(processes: Redrivers, queue: WorkQueue, dice: random.Random, number: int) -> RedriveOutcome:
    # The later, the likelier one finishes before.
    when: dict[str, Any] = dice.choice(
        [{"kill_at": dice.randrange(1, 10 + 10 * number)}, {"kill_after": dice.uniform(0.1, 1.5 + number)}]
    )
    return await processes.redrive(queue, REQUEST, **when)
