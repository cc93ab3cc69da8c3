"""Redriving dead letters: letters a second and CPU for each, beside programs written with nats-py alone.

Fairness: every way gets a queue of its own on a server with the default ``sync_interval``, the same letters (1 KiB
each, dead by one delivery, their advisories captured), and a process of its own. Ways take turns; figures are medians.
A round counts only if every job is in the queue exactly once afterwards and no letter is left. The peers store a copy
before they delete the original, as this package does, but none of them looks for dead jobs without an advisory, proves
an entry, records anything, or survives being killed without a repeat. The naive one deletes as nats-py does by default,
which overwrites the message on disk; the others don't.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from benchmarks.dead_queue import measure_apart, open_connection, peak_memory, prepare
from benchmarks.report import Goal, Sample, Table, Workload, measure_in_turns, run_workload, server_cpu
from testbed.nats_server import NatsServer

BODY = b"x" * 1024
COPY, ATOMIC, IN_PLACE = "copy", "atomic", "in_place"
PROVE = "only the proof: scan and every letter"
GATHERED = "nats-py, gather of 100, `no_erase`"
NAIVE = "nats-py, one by one"
_TEXT = """
Letters of 1 KiB that died after one delivery are redriven: `copy` and `atomic` find and prove every letter, record the
intent, store the new job, record it in the audit, remove the original and remove the entry; `in_place` proves and
records each letter and resets the consumer. Each way runs in a process of its own. A round counts only if every job
is pending exactly once afterwards and no entry is left. The peers store a copy before they delete, but find no deaths
without an entry, prove nothing, record nothing, and repeat jobs when they are killed.
"""


async def ours(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive by copies."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))).raise_for_failures()


async def ours_atomic(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive by atomic batches."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.ATOMIC))).raise_for_failures()


async def ours_in_place(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Redrive in place."""
    (await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))).raise_for_failures()


async def prove(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Find and prove all letters, and change nothing."""
    scan = await Scan.begin(connection, queue)
    async for _ in scan.letters():
        pass


async def one_by_one(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Do what the article's processor does: read an entry, get the job, publish it again, delete it."""
    async for sequence, entry in _entries(connection, queue):
        await _redrive_one(connection, queue, sequence)
        await connection.client.jetstream().delete_msg(queue.name, sequence)
        await connection.client.jetstream().delete_msg(f"{queue.name}-dead", entry)


async def batched(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Do the same for a hundred letters concurrently, with deletes that overwrite nothing."""
    entries = [entry async for entry in _entries(connection, queue)]
    for start in range(0, len(entries), 100):
        batch = entries[start : start + 100]
        await asyncio.gather(*(_redrive_one(connection, queue, sequence) for sequence, _ in batch))
        await asyncio.gather(*(_delete(connection, queue.name, sequence) for sequence, _ in batch))
        await asyncio.gather(*(_delete(connection, f"{queue.name}-dead", entry) for _, entry in batch))


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


async def _delete(connection: NatsPyConnection, stream: str, sequence: int) -> None:
    request = json.dumps({"seq": sequence, "no_erase": True}).encode()
    answer = await connection.client.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", request, timeout=60)
    if not json.loads(answer.data).get("success"):
        raise SystemExit(f"{stream} kept {sequence}: {answer.data!r}")


VARIANTS: dict[str, Callable[[NatsPyConnection, WorkQueue], Awaitable[None]]] = {
    COPY: ours,
    ATOMIC: ours_atomic,
    IN_PLACE: ours_in_place,
    PROVE: prove,
    GATHERED: batched,
    NAIVE: one_by_one,
}


async def measure(url: str, variant: str, declaration: str) -> dict[str, float]:
    """Redrive in this process, and return seconds, CPU seconds, letters and peak memory in MiB."""
    queue = WorkQueue(**json.loads(declaration))
    async with open_connection(url) as connection:
        letters = (await stream_info(connection, queue.name))["state"]["messages"]
        started, used = time.perf_counter(), _cpu()
        await VARIANTS[variant](connection, queue)
        seconds, used = time.perf_counter() - started, _cpu() - used
        peak = peak_memory()
        consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
    expected = (0, letters) if variant == PROVE else (letters, 0)
    if (consumer["num_pending"], entries) != expected:
        raise SystemExit(f"{variant}: {consumer['num_pending']} of {letters} jobs wait, {entries} entries are left")
    return {"seconds": seconds, "cpu": used, "letters": letters, "peak": peak}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _way(variant: str, letters: int) -> Callable[[NatsServer], Sample]:
    def run(server: NatsServer) -> Sample:
        declared = {"archive": False, "atomic_redrive": variant == ATOMIC}
        queue = asyncio.run(prepare(server.url, "letters", letters, BODY, **declared))
        before = server_cpu(server)
        measured = measure_apart("benchmarks.redrive", server.url, variant, queue)
        used = server_cpu(server) - before
        return Sample(letters, measured["seconds"], measured["cpu"], used, {"peak MiB": measured["peak"]})

    return run


def workload(short: bool) -> Workload:  # noqa: FBT001
    """Measure all ways with 10,000 letters, and those of this package with 100,000."""
    few, many, rounds = (1_000, 3_000, 1) if short else (10_000, 100_000, 5)
    few_ways = {name: _way(name, few) for name in VARIANTS if name != NAIVE}
    table = Table(f"{few:,} letters", "letters", measure_in_turns(few_ways, rounds), floor=GATHERED)
    naive = measure_in_turns({NAIVE: _way(NAIVE, min(few, 1_000))}, rounds)
    slow = Table(f"{min(few, 1_000):,} letters", "letters", naive)
    many_ways = {name: _way(name, many) for name in (COPY, IN_PLACE)}
    large = Table(f"{many:,} letters", "letters", measure_in_turns(many_ways, max(1, rounds // 2)))
    limit = "the Python of one process: about a third proves letters, a third builds and sends what is stored"
    return Workload(
        "W3",
        "Redriving",
        "redrive",
        _TEXT,
        (table, slow, large),
        (
            Goal("`copy`, its scan and proof included, letters/s", table.way(COPY).rate, 10_000, limit=limit),
            Goal("`copy` beside the gathered loop of nats-py", table.share(COPY), 3, limit=limit),
            Goal("`in_place`, its scan and proof included, letters/s", table.way(IN_PLACE).rate, 20_000, limit=limit),
        ),
    )


def main() -> int:
    """Measure one way in this process, or all of them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--measure", nargs=3)
    options, _ = parser.parse_known_args()
    if options.measure:
        print(json.dumps(asyncio.run(measure(*options.measure))))
        return 0
    return run_workload(workload, __doc__)


if __name__ == "__main__":
    sys.exit(main())
