"""A redrive killed with SIGKILL before each of its calls to the server, then run again: no job is lost or repeated.

The short form has one dead letter of each kind in a queue. ``FAULTS=full`` has several, so that their steps interleave.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from contextlib import suppress
from operator import add
from typing import TYPE_CHECKING

import pytest
from faulty_redrive import discard, redrive_request, undo

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    list_redrives,
    redrive_dead_letters,
)
from testbed.crash_points import crash_at_every_call
from testbed.dead_letters import letter_records, make_terminated_letters
from testbed.face import KILL_POINTS
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

FULL = os.environ.get("FAULTS") == "full"
DEAD = ["a", "b", "c"] if FULL else ["a"]
TERMINATED = ["x", "y"] if FULL else ["x"]
WINDOW_SECONDS = 1.0
# The call of each kill point.
_CALLS = {
    "intent": "publish audit.<queue>.intents.*",
    "store": "publish jobs",
    "record": "publish audit.<queue>.letters.*",
    "remove": "$JS.ACK",
    "entries": "$JS.API.STREAM.MSG.DELETE",
    "pause": "$JS.API.CONSUMER.PAUSE",
    "reset": "$JS.API.CONSUMER.RESET",
}
_KINDS = {str(protocol): {_CALLS[point] for point in points} for protocol, points in KILL_POINTS.items()}
# An undo stores letters as parked.
_KINDS["undo"] = {_CALLS["intent"], "publish parked.<queue>.worker.*", _CALLS["record"]}

WHEN = ["inside the duplicate window", "after the duplicate window", "after a restart of the server"]
WORKERS = ["process the stored jobs first", "are away"]


async def prepare(connection: NatsPyConnection, name: str, protocol: str, when: str) -> WorkQueue:
    """Create a queue with dead letters of both kinds: still stored, and terminated but archived."""
    queue = await make_queue(
        connection,
        name,
        consumer={"ack_wait": "200ms"},
        duplicate_window=f"{WINDOW_SECONDS:g}s" if when == "after the duplicate window" else "2m",
    )
    await make_terminated_letters(connection, queue, TERMINATED, reason="poison")
    await make_dead_letters(connection, queue, DEAD)
    return queue


async def process_available(connection: NatsPyConnection, queue: WorkQueue) -> Counter[str]:
    """Process the jobs that the queue delivers now; unlike ``process_all`` it returns where the consumer is paused."""
    processed: Counter[str] = Counter()
    pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
    with suppress(TimeoutError):
        while messages := await pull.fetch(100, timeout=0.3):
            for message in messages:
                processed[message.data.decode()] += 1
                await message.ack_sync()
    await pull.unsubscribe()
    return processed


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("workers", WORKERS if FULL else WORKERS[:1])
@pytest.mark.parametrize(
    "protocol",
    ["copy", pytest.param("in_place", marks=pytest.mark.since_server("2.14", "the reset of a consumer"))],
)
async def test_nothing_is_lost_and_nothing_repeats(
    own_nats: NatsServer, protocol: str, when: str, workers: str, tmp_path: Path, add_row: Callable[..., None]
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        crashes = await crash_at_every_call(
            [own_nats.url],
            "faulty_redrive:redrive_by",
            lambda call: prepare(connection, f"q{call}", protocol, when),
            options={"protocol": protocol},
            counted="changes",
            kinds=_KINDS[protocol],
            logs=tmp_path,
        )
        queues = [run.queue for run in crashes.runs]
        before = [Counter[str]() for _ in queues]
        if workers == WORKERS[0]:
            before = await asyncio.gather(*(process_available(connection, queue) for queue in queues))
        if when == WHEN[1]:
            await asyncio.sleep(WINDOW_SECONDS + 0.5)
        if when == WHEN[2]:
            own_nats.kill()
            await asyncio.to_thread(own_nats.restart)
            await eventually(lambda: connection.client.is_connected)
        after = await asyncio.gather(*(redrive_again(connection, queue, protocol) for queue in queues))
    outcomes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run, processed in zip(crashes.runs, map(add, before, after), strict=True):
        lost, repeated = lost_and_repeated(processed)
        assert (lost, repeated) == (0, 0), (run, processed)
        outcomes[run.kind or "nothing"].append((lost, repeated))
    for kind, counts in outcomes.items():
        add_row(protocol, when, workers, kind, len(counts), *map(sum, zip(*counts, strict=True)))
    # A redrive was killed before each kind of change at least once.
    assert {run.kind for run in crashes.runs} >= _KINDS[protocol]


@pytest.mark.parametrize("killed", ["discard", "undo"])
@pytest.mark.parametrize("archive", ["{}-archive", None], ids=["archive", "no archive"])
async def test_what_is_discarded_stays_so_until_it_comes_back_once(
    own_nats: NatsServer, killed: str, archive: str | None, tmp_path: Path, add_row: Callable[..., None]
) -> None:
    async def prepared(connection: NatsPyConnection, name: str) -> WorkQueue:
        archive_name = archive and archive.format(name)
        queue = await make_queue(connection, name, consumer={"ack_wait": "200ms"}, archive=archive_name)
        if archive:
            await make_terminated_letters(connection, queue, TERMINATED)
        await make_dead_letters(connection, queue, DEAD)
        if killed == "undo":
            await discard(connection, queue)
        return queue

    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        crashes = await crash_at_every_call(
            [own_nats.url],
            f"faulty_redrive:{killed}",
            lambda call: prepared(connection, f"q{call}"),
            counted="changes",
            kinds=_KINDS[killed],
            logs=tmp_path,
        )
        jobs = [*(TERMINATED if archive else ()), *DEAD]
        for run in crashes.runs:
            discarded = {record.sequence for record in await letter_records(connection, run.queue)}
            # Whoever comes next finishes what was begun, and runs nothing that is discarded.
            await redrive_dead_letters(connection, run.queue)
            processed = await process_available(connection, run.queue)
            assert len(processed) == len(jobs) - len(discarded), run
            if await list_redrives(connection, run.queue) and discarded:
                await undo(connection, run.queue)
            await redrive_dead_letters(connection, run.queue, RedriveRequest(Selection(parked=True)))
            processed += await process_all(connection, run.queue, within=30)
            assert processed == Counter(jobs), run
            assert (await find_dead_letters(connection, run.queue)).letters == ()
            assert not (await redrive_dead_letters(connection, run.queue)).done
        add_row(killed, "undone", "process what is redriven", "each change", len(crashes.runs), 0, 0)
    assert {run.kind for run in crashes.runs} >= _KINDS[killed]


async def redrive_again(connection: NatsPyConnection, queue: WorkQueue, protocol: str) -> Counter[str]:
    """Redrive until nothing is uncertain, process all jobs, and require that no dead letter is left."""

    async def finished() -> bool:
        # A second redrive may not see yet what a restarted server has forgotten; a third one does.
        report = await redrive_dead_letters(connection, queue, redrive_request(protocol))
        return not report.failures and not report.uncertain

    await eventually(finished, within=30)
    processed = await process_all(connection, queue, within=30)
    assert (await find_dead_letters(connection, queue)).letters == (), queue.name
    return processed


def lost_and_repeated(processed: Counter[str]) -> tuple[int, int]:
    """Count the jobs that were never processed, and those that were processed more than once."""
    jobs = [*DEAD, *TERMINATED]
    return sum(processed[job] == 0 for job in jobs), sum(processed[job] > 1 for job in jobs)
