"""Redriving dead letters: letters a second and peak memory, beside programs written with nats-py alone.

Fairness: every variant gets a queue of its own on a server with the default ``sync_interval``, the same letters (1 KiB
each, dead by one delivery, their advisories captured), and a process of its own whose peak memory is measured. Variants
take turns; figures are medians. A round counts only if every job is in the queue exactly once afterwards and no letter
is left. The peers store a copy before they delete the original, as this package does, but none of them looks for dead
jobs without an advisory, proves an entry, records anything, or survives being killed without a repeat.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from benchmarks.dead_queue import measure_apart, open_connection, peak_memory, prepare
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

BODY = b"x" * 1024


async def ours(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive by copies."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))).raise_for_failures()


async def ours_atomic(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive by atomic batches."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.ATOMIC))).raise_for_failures()


async def ours_in_place(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive in place."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))).raise_for_failures()


async def one_by_one(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Do what the article's processor does: read an entry, get the job, publish it again, delete it."""
    async for sequence, entry in _entries(connection, queue):
        await _redrive_one(connection, queue, sequence)
        await connection.client.jetstream().delete_msg(f"{queue.name}-dead", entry)


async def batched(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Do the same for a hundred letters concurrently."""
    jetstream = connection.client.jetstream()
    entries = [entry async for entry in _entries(connection, queue)]
    for start in range(0, len(entries), 100):
        batch = entries[start : start + 100]
        await asyncio.gather(*(_redrive_one(connection, queue, sequence) for sequence, _ in batch))
        await asyncio.gather(*(jetstream.delete_msg(f"{queue.name}-dead", entry) for _, entry in batch))


async def _entries(connection: NatsPyConnection, queue: WorkQueue) -> AsyncIterator[tuple[int, int]]:
    jetstream = connection.client.jetstream()
    reader = await jetstream.pull_subscribe("", stream=f"{queue.name}-dead")
    left = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
    while left:
        for message in await reader.fetch(min(left, 500)):
            left -= 1
            yield json.loads(message.data)["stream_seq"], message.metadata.sequence.stream
            await message.ack()


async def _redrive_one(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> None:
    jetstream = connection.client.jetstream()
    job = await jetstream.get_msg(queue.name, sequence)
    await jetstream.publish(job.subject or "", job.data or b"", headers={"Nats-Msg-Id": f"again-{sequence}"})
    await jetstream.delete_msg(queue.name, sequence)


VARIANTS: dict[str, Callable[[NatsPyConnection, WorkQueue], Awaitable[None]]] = {
    "copy": ours,
    "atomic": ours_atomic,
    "in_place": ours_in_place,
    "nats-py, one by one": one_by_one,
    "nats-py, gather of 100": batched,
}


async def measure(url: str, variant: str, declaration: str) -> dict[str, float]:
    """Redrive in this process, and return seconds, letters and peak memory in MiB."""
    queue = WorkQueue(**json.loads(declaration))
    async with open_connection(url) as connection:
        letters = (await stream_info(connection, queue.name))["state"]["messages"]
        started = time.perf_counter()
        await VARIANTS[variant](connection, queue)
        seconds = time.perf_counter() - started
        peak = peak_memory()
        consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
    if consumer["num_pending"] != letters or entries:
        raise SystemExit(f"{variant}: {consumer['num_pending']} of {letters} jobs wait, {entries} entries are left")
    return {"seconds": seconds, "letters": letters, "peak": peak}


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--letters", type=int, nargs="+", default=[10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asyncio.run(measure(*options.measure))))
        return 0
    results: dict[tuple[int, str], list[dict[str, float]]] = {}
    for turn in range(options.rounds):
        for letters in options.letters:
            for number, variant in enumerate(options.variants):
                with NatsServer() as server:
                    declared = {"archive": False, "atomic_redrive": variant == "atomic"}
                    queue = asyncio.run(prepare(server.url, f"q{turn}{number}", letters, BODY, **declared))
                    measured = measure_apart("benchmarks.redrive", server.url, variant, queue)
                results.setdefault((letters, variant), []).append(measured)
    rows = [
        (
            f"{letters:,}",
            variant,
            f"{statistics.median(measured['letters'] / measured['seconds'] for measured in rounds):,.0f}",
            f"{statistics.median(measured['peak'] for measured in rounds):.0f}",
        )
        for (letters, variant), rounds in results.items()
    ]
    print(text_table(("letters", "variant", "letters/s", "peak MiB"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
