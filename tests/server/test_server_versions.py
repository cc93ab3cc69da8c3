"""The oldest server that is supported, and the first of each later minor release: scans, and every protocol they know.

The other tests run with the newest one; ``make test-servers`` runs those of scans and redrives with each of these too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.dead_letters import letter_records, make_terminated_letters
from testbed.face import consumer_info
from testbed.nats_binaries import OLDER_VERSIONS, NoSuchServerError, nats_server_of
from testbed.nats_server import NatsServer
from testbed.queues import make_dead_letters, make_queue, process_all, publish_jobs, pull_jobs, stored_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from testbed.face import NatsPyConnection

FIRST_WITH_RESETS = (2, 14, 0)
DEAD = [f"dead{number}" for number in range(5)]
TERMINATED = ["terminated0", "terminated1"]
# A pull request that isn't answered takes the connection's whole time limit.
# No scan may wait for an answer that a server never gives: it is longer than a test may take.
TIME_LIMIT = 300


@pytest.fixture(params=OLDER_VERSIONS)
def old_nats(request: pytest.FixtureRequest) -> Iterator[NatsServer]:
    """A server of each older version."""
    try:
        binary = nats_server_of(request.param)
    except NoSuchServerError as error:
        pytest.skip(str(error))
    with NatsServer(binary=binary) as server:
        assert server.version == request.param
        yield server


@pytest.fixture
async def old(old_nats: NatsServer) -> AsyncIterator[NatsPyConnection]:
    """An open connection to it."""
    async with connect(connection_settings({"servers": (old_nats.url,), "timeout": TIME_LIMIT})) as opened:
        yield opened


@pytest.mark.slow
async def test_dead_letters_of_every_kind_are_found_at_once_and_redriven_once(old: NatsPyConnection, name: str) -> None:
    queue = await make_queue(old, name, consumer={"max_deliver": 2})
    await make_dead_letters(old, queue, DEAD)
    await make_terminated_letters(old, queue, TERMINATED)
    live = await publish_jobs(old, queue, ["live0", "live1"])
    findings = await find_dead_letters(old, queue)
    assert sorted(letter.body.decode() for letter in findings.letters) == [*DEAD, *TERMINATED]
    assert findings.uncertain == 0
    report = await redrive_dead_letters(old, queue)
    report.raise_for_failures()
    assert report.protocol == Protocol.COPY
    assert len(report.redriven) == 7
    assert len(await letter_records(old, queue)) == 7
    assert min(report.redriven.values()) > max(live)
    assert await process_all(old, queue) == dict.fromkeys([*DEAD, *TERMINATED, "live0", "live1"], 1)
    assert (await redrive_dead_letters(old, queue)).redriven == {}
    assert await stored_count(old, name) == 0


async def test_a_consumer_at_its_max_ack_pending_delays_no_scan(old: NatsPyConnection, name: str) -> None:
    queue = await make_queue(old, name, consumer={"max_ack_pending": 1, "ack_wait": "1m"})
    (dead,) = await make_dead_letters(old, queue, ["dead"])
    await publish_jobs(old, queue, ["first", "second"])
    await pull_jobs(old, queue, 1)
    findings = await find_dead_letters(old, queue)
    assert [letter.sequence for letter in findings.letters] == [dead]


async def test_a_redrive_in_place_works_or_is_refused_by_the_servers_version(old: NatsPyConnection, name: str) -> None:
    queue = await make_queue(old, name)
    await make_dead_letters(old, queue, DEAD)
    request = RedriveRequest(protocol=Protocol.IN_PLACE)
    if old.server_version < FIRST_WITH_RESETS:
        with pytest.raises(RedriveRequestError, match=r"older than 2\.14"):
            await redrive_dead_letters(old, queue, request)
        assert await stored_count(old, name) == len(DEAD)
        return
    report = await redrive_dead_letters(old, queue, request)
    report.raise_for_failures()
    assert (report.protocol, len(report.redriven)) == (Protocol.IN_PLACE, len(DEAD))
    assert not (await consumer_info(old, name, "worker")).get("paused")
    assert await process_all(old, queue) == dict.fromkeys(DEAD, 1)


async def test_two_redrives_at_once_redrive_each_letter_once(old: NatsPyConnection, name: str) -> None:
    queue = await make_queue(old, name)
    await make_dead_letters(old, queue, DEAD)
    first, second = await asyncio.gather(redrive_dead_letters(old, queue), redrive_dead_letters(old, queue))
    assert len(first.redriven) + len(second.redriven) >= len(DEAD)
    assert await process_all(old, queue) == dict.fromkeys(DEAD, 1)
