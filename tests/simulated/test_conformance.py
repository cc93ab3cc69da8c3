"""The simulated server answers as a nats-server does: the same scripts are played on both.

Each script is some thirty requests about a work queue with two consumers, a dead letter queue and an archive, drawn
from its number: publishing with ids and conditions, pull requests of each form, acknowledgements of each kind, ack
waits that pass, deletes, purges, reads, and changes of consumers. ``SCRIPTS=0:300`` plays more of them.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed.nats_binaries import nats_server_of
from testbed.nats_server import NatsServer
from testbed.simulated.connection import SimulatedConnection
from testbed.simulated.loop import run_simulated
from testbed.simulated.scripts import play
from testbed.simulated.server import SimulatedServer

FIRST, LAST = map(int, os.environ.get("SCRIPTS", "0:24").split(":"))
VERSIONS = ("2.15.1", "2.12.8", "2.10.27")


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_simulated_server_answers_as_a_real_one(version: str) -> None:
    numbers = tuple(int(number) for number in version.split("."))
    with NatsServer(binary=nats_server_of(version)) as server:
        async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
            real = await asyncio.gather(*[play(connection, f"s{seed}", seed) for seed in range(FIRST, LAST)])
    simulated = await asyncio.to_thread(_simulated, (numbers[0], numbers[1], numbers[2]))
    differing = [
        (seed, *next(pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]))
        for seed, one, other in zip(range(FIRST, LAST), simulated, real, strict=True)
        if one != other
    ]
    assert not differing, f"{len(differing)} of {LAST - FIRST}: {differing[:3]}"


def _simulated(version: tuple[int, int, int]) -> list[list[Any]]:
    def played(seed: int) -> list[Any]:
        async def script() -> list[Any]:
            return await play(SimulatedConnection(SimulatedServer(version)), f"s{seed}", seed)

        return run_simulated(script, seed)

    return [played(seed) for seed in range(FIRST, LAST)]
