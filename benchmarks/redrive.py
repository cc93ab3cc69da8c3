"""Redriving dead letters: letters a second and CPU for each, beside programs written with nats-py alone.

Fairness: every way gets a queue of its own on a server with the default ``sync_interval``, the same letters (1 KiB
each, dead by one delivery for longer than their ack wait, their advisories captured), and a process of its own. Ways
take turns; figures are medians. A round counts only if every job is in the queue exactly once afterwards and no letter
is left. The peers store a copy before they delete the original, as this package does, but none of them looks for dead
jobs without an advisory, proves an entry, records anything, or survives being killed without a repeat. The naive one
deletes as nats-py does by default, which overwrites the message on disk; the others don't.

"From proved letters" is the copy alone: the clock stops while letters are looked for and proved.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import psutil

from airflow_provider_jetstream.jetstream.audit.intent import IntentLog
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.status import Page
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.operation import redrive_lease
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.redrive.steps import Steps
from benchmarks.dead_queue import measure_apart, open_connection, peak_memory, prepare
from benchmarks.report import ROUNDS, Goal, Sample, Table, Workload, measure_in_turns, run_workload
from testbed.nats_server import NatsServer

BODY = b"x" * 1024
COPY, IN_PLACE = "copy", "in_place"
PROVED = "copy, from proved letters"
PROVE = "only the proof: scan and every letter"
GATHERED = "nats-py, gather of 100, `no_erase`"
NAIVE = "nats-py, one by one"
# So long after its last delivery no worker can have a job of the queue's consumer, whose ack wait is a second.
_SETTLED_SECONDS = 2.5
# So many pages of 250 letters are proved before they are copied, where only the copy is measured.
_PROVED_PAGES = 40
_TEXT = """
Letters of 1 KiB that died after one delivery are redriven: `copy` finds and proves every letter, records the intent,
stores the new job, records it in the audit, removes the original and removes the entry; `in_place` proves and records
each letter and resets the consumer. `copy, from proved letters` is the same `copy` with the clock stopped
while letters are found and proved, 10,000 at a time. Each way runs in a process of its own. A round counts only if
every job is pending exactly once afterwards and no entry is left. The peers store a copy before they delete, but find
no deaths without an entry, prove nothing, record nothing, and repeat jobs when they are killed.
"""


@dataclass
class Clock:
    """What a way has taken, as far as the clock was running.

    :param server: the server's process
    """

    server: psutil.Process
    seconds: float = 0.0
    cpu: float = 0.0
    server_cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure a block."""
        before = self._read()
        yield
        seconds, cpu, server_cpu = (now - then for now, then in zip(self._read(), before, strict=True))
        self.seconds, self.cpu, self.server_cpu = self.seconds + seconds, self.cpu + cpu, self.server_cpu + server_cpu

    def _read(self) -> tuple[float, float, float]:
        own, server = resource.getrusage(resource.RUSAGE_SELF), self.server.cpu_times()
        return time.perf_counter(), own.ru_utime + own.ru_stime, server.user + server.system


Way: TypeAlias = Callable[[NatsPyConnection, WorkQueue, Clock], Awaitable[None]]


def ours(protocol: Protocol) -> Way:
    """Redrive as a caller of this package does."""

    async def redrive(connection: NatsPyConnection, queue: WorkQueue, clock: Clock) -> None:
        with clock.running():
            report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=protocol))
        report.raise_for_failures()

    return redrive


async def copy_proved(connection: NatsPyConnection, queue: WorkQueue, clock: Clock) -> None:
    """Redrive by copies with the steps of a redrive; only what comes after the proof is measured."""
    request, report = RedriveRequest(protocol=Protocol.COPY), RedriveReport()
    async with redrive_lease(connection, queue, request) as lease:
        scan = await Scan.begin(connection, queue)
        if lease is None or scan.audit is None:
            raise SystemExit(f"{queue.name} has no audit")
        intents = IntentLog(connection, scan.audit.fenced(lease), lease.operation)
        steps = Steps(
            *(connection, queue, scan.snapshot, request, intents, report),
            unchanged=scan.unchanged,
        )
        pages = scan.pages(Selection())
        while proved := await _next_pages(pages):
            with clock.running():
                async with steps.overlapping():
                    for page in proved:
                        await steps.redrive(page.letters)
                await steps.remove_entries()
    report.raise_for_failures()


async def _next_pages(pages: AsyncIterator[Page]) -> list[Page]:
    proved: list[Page] = []
    while len(proved) < _PROVED_PAGES and (page := await anext(pages, None)):
        proved.append(page)
    return proved


async def prove(connection: NatsPyConnection, queue: WorkQueue, clock: Clock) -> None:
    """Find and prove all letters, and change nothing."""
    with clock.running():
        scan = await Scan.begin(connection, queue)
        async for _ in scan.letters():
            pass


def peer(redrive: Callable[[NatsPyConnection, WorkQueue], Awaitable[None]]) -> Way:
    """Measure the whole of a program that is written with nats-py."""

    async def run(connection: NatsPyConnection, queue: WorkQueue, clock: Clock) -> None:
        with clock.running():
            await redrive(connection, queue)

    return run


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


VARIANTS: dict[str, Way] = {
    COPY: ours(Protocol.COPY),
    PROVED: copy_proved,
    IN_PLACE: ours(Protocol.IN_PLACE),
    PROVE: prove,
    GATHERED: peer(batched),
    NAIVE: peer(one_by_one),
}


async def measure(url: str, what: str, declaration: str) -> dict[str, float]:
    """Redrive in this process, and return what it took and the peak memory in MiB.

    :param what: the number of the server's process, and the way
    """
    pid, _, variant = what.partition(" ")
    queue, clock = WorkQueue(**json.loads(declaration)), Clock(psutil.Process(int(pid)))
    async with open_connection(url) as connection:
        letters = (await stream_info(connection, queue.name))["state"]["messages"]
        await VARIANTS[variant](connection, queue, clock)
        peak = peak_memory()
        consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
        jobs = (await stream_info(connection, queue.name))["state"]["messages"]
    expected = (0, letters, letters) if variant == PROVE else (letters, letters, 0)
    if (consumer["num_pending"], jobs, entries) != expected:
        raise SystemExit(
            f"{variant}: {consumer['num_pending']} of {letters} jobs wait, {jobs} messages and {entries} entries are"
            " stored"
        )
    return {"seconds": clock.seconds, "cpu": clock.cpu, "server": clock.server_cpu, "peak": peak}


def _way(variant: str, letters: int) -> Callable[[NatsServer], Sample]:
    def run(server: NatsServer) -> Sample:
        queue = asyncio.run(prepare(server.url, "letters", letters, BODY, archive=False))
        # Otherwise the first thing would be to wait until the ack wait is over.
        time.sleep(_SETTLED_SECONDS)
        measured = measure_apart("benchmarks.redrive", server.url, f"{server.pid} {variant}", queue)
        extra = {"peak MiB": measured["peak"]}
        return Sample(letters, measured["seconds"], measured["cpu"], measured["server"], extra)

    return run


def workload(short: bool) -> Workload:  # noqa: FBT001
    """Measure all ways with 10,000 letters, and those of this package with 100,000."""
    few, many, rounds = (1_000, 3_000, 1) if short else (10_000, 100_000, ROUNDS)
    few_ways = {name: _way(name, few) for name in VARIANTS if name != NAIVE}
    table = Table(f"{few:,} letters", "letters", measure_in_turns(few_ways, rounds), floor=GATHERED)
    naive = measure_in_turns({NAIVE: _way(NAIVE, min(few, 1_000))}, rounds)
    slow = Table(f"{min(few, 1_000):,} letters", "letters", naive)
    many_ways = {name: _way(name, many) for name in (COPY, PROVED, IN_PLACE)}
    large = Table(f"{many:,} letters", "letters", measure_in_turns(many_ways, rounds))
    return Workload("W3", "Redriving", "redrive", _TEXT, (table, slow, large), _goals(table, large))


def _goals(table: Table, large: Table) -> tuple[Goal, ...]:
    """Compare both counts with the goals, and name what limits each figure."""
    proof = table.way(PROVE).client_microseconds
    copied, placed = table.way(PROVED), table.way(IN_PLACE)
    looks = f"the proof of each letter takes {proof:.0f} µs of the one process's Python before anything is done with it"
    copies = (
        f"{copied.client_microseconds:.0f} µs of Python a letter from the proof on, for its intent, its copy and the"
        " copy's answer, its record, the late ack, and the look that the original is gone; each pays for a kill that"
        " neither loses nor repeats the job"
    )
    places = (
        f"{proof:.0f} of {placed.client_microseconds:.0f} µs of Python a letter prove it: without the proof a reset"
        " would run a job that has ended, or that has a new job, once more"
    )
    whole = f"{looks}; {copies}"
    goals = []
    for found in (table, large):
        of = found.title
        goals += [
            Goal(f"{of}: `copy` from proved letters, letters/s", found.way(PROVED).rate, 10_000, limit=copies),
            Goal(f"{of}: `copy`, its scan and proof included, letters/s", found.way(COPY).rate, 10_000, limit=whole),
            Goal(
                *(f"{of}: `in_place`, its scan and proof included, letters/s", found.way(IN_PLACE).rate, 20_000),
                limit=places,
            ),
        ]
    goals[1:1] = [
        Goal("`copy` from proved letters beside the gathered loop of nats-py", table.share(PROVED), 3, limit=copies),
        Goal("`copy` with its proof beside the gathered loop, which proves nothing", table.share(COPY), 3, limit=whole),
    ]
    return tuple(goals)


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
