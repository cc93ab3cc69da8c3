"""Scans dead letters: the first one, and one with ten new letters, at queues of very different sizes.

Every size gets a queue with events, archive and audit: jobs of 64 bytes, dead by one delivery, their advisories
captured, and a few jobs that are done. Each round is a process with a server of its own, on a copy of the prepared
store. A scan counts only if it found every letter. Requests are the messages that the server has received, without the
copies of bodies that a scan stores; these are counted beside them. The first scan of a follower copies each body into
the dead letter queue, and from then on scans read what has changed. A hold is how long the event loop's thread worked
on one callback, by its own CPU time, without the full passes of Python's garbage collector: these take as long as all
objects of the process ask for. Five rounds of 1,000 letters, three of 100,000, one of 1,000,000. Bytes a letter are the
growth of the process by a follower that knows all letters.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue, require_dead_letters
from benchmarks.dead_queue import open_connection, prepared_store, server_with
from benchmarks.loop_lag import Holds
from benchmarks.report import Goal, Sample, Table, Way, Workload, server_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from testbed.nats_server import NatsServer

NAME = "scanned"
BODY = b"x" * 64
_NEW = 10
# By size, how many rounds; and the size from which the growth of the process is more than noise.
_ROUNDS = {1_000: 5, 100_000: 3, 1_000_000: 1}
_MANY = 50_000
_FIRST, _COPYING, _NEXT, _IDLE = (
    "first scan",
    "first scan of a follower",
    "scan with ten new letters",
    "scan, nothing new",
)


@dataclass
class _Meter:
    """Measures the parts of a run on one connection."""

    server: NatsServer
    holds: Holds

    def begin(self) -> None:
        gc.collect()
        self._memory = psutil.Process().memory_info().rss
        self.holds.longest = 0.0
        self._received, self._cpu = self.server.monitor("varz")["in_msgs"], server_cpu(self.server)
        self._started, self._own = time.perf_counter(), time.process_time()

    def end(self, count: int, copies: int = 0, *, with_memory: bool = False) -> Sample:
        seconds, own = time.perf_counter() - self._started, time.process_time() - self._own
        extra: dict[str, float] = {
            "milliseconds": seconds * 1e3,
            "requests": self.server.monitor("varz")["in_msgs"] - self._received - copies,
            "copies": copies,
            "longest hold ms": self.holds.longest * 1e3,
        }
        if with_memory:
            gc.collect()
            growth = psutil.Process().memory_info().rss - self._memory
            extra["bytes a letter"] = growth / count if count >= _MANY else 0.0
        return Sample(count, seconds, own, server_cpu(self.server) - self._cpu, extra)


async def entries_of(connection: NatsPyConnection, queue: WorkQueue) -> int:
    """Return the last sequence of a queue's dead letter queue."""
    return int((await stream_info(connection, require_dead_letters(queue).name))["state"]["last_seq"])


async def die(connection: NatsPyConnection, queue: WorkQueue, *subjects: str) -> float:
    """Let new jobs of these subjects die; return when the request was sent by which the server publishes that."""
    jetstream = connection.client.jetstream(timeout=60)
    for subject in subjects:
        await jetstream.publish(subject, BODY)
    worker = await jetstream.pull_subscribe_bind("worker", stream=queue.name)
    for message in await worker.fetch(len(subjects), timeout=60):
        await message.nak()
    await worker.unsubscribe()
    # As by the next pull of a worker: only then does the server publish that the deliveries are used up.
    sent_at = time.time()
    await probe_consumer(connection, queue.name, "worker")
    return sent_at


async def _be_done(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Let jobs be done, which the ledger of a queue with an archive accounts for."""
    jetstream = connection.client.jetstream(timeout=60)
    for _ in range(count):
        await jetstream.publish(f"{NAME}.jobs", BODY)
    worker = await jetstream.pull_subscribe_bind("worker", stream=queue.name)
    for message in await worker.fetch(count, timeout=60):
        await message.ack_sync()
    await worker.unsubscribe()


def verify(found: int, expected: int) -> None:
    """Exit where a scan didn't find what is there."""
    if found != expected:
        raise SystemExit(f"expected {expected} letters, found {found}")


async def _first_scan(server: NatsServer, queue: WorkQueue, letters: int, holds: Holds) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        meter = _Meter(server, holds)
        meter.begin()
        scan = await Scan.begin(connection, queue)
        verify(sum([len(page.letters) async for page in scan.pages(Selection())]), letters)
        return {_FIRST: meter.end(letters)}


async def _follow(server: NatsServer, queue: WorkQueue, letters: int, holds: Holds) -> dict[str, Sample]:
    async with open_connection(server.url) as connection:
        await _be_done(connection, queue, _NEW)
        meter, before = _Meter(server, holds), await entries_of(connection, queue)
        meter.begin()
        tracked = await TrackedLetters.prove(connection, queue)
        copies = await entries_of(connection, queue) - before
        samples = {_COPYING: meter.end(letters, copies, with_memory=True)}
        verify(len(tracked.table), letters)
        verify(copies, letters)
        meter.begin()
        verify(await tracked.refresh(connection) and len(tracked.table), letters)
        samples[_IDLE] = meter.end(1)
        await _be_done(connection, queue, _NEW)
        await die(connection, queue, *[f"{NAME}.jobs"] * _NEW)
        meter.begin()
        verify(await tracked.refresh(connection) and len(tracked.table), letters + _NEW)
        samples[_NEXT] = meter.end(_NEW, _NEW)
        summary = await tracked.summary(Selection(), ())
        verify(summary.dead, letters + _NEW)
        verify(sum(last - first + 1 for first, last in summary.ranges), letters + _NEW)
        return samples


def _measure_here(store: str, letters: int, part: str, declaration: str) -> dict[str, Any]:
    """Measure in this process."""
    from pathlib import Path

    holds = Holds()
    holds.install()
    # As this package's triggers do in a triggerer.
    gc.freeze()
    measure = {"first": _first_scan, "follow": _follow}[part]
    with server_with(Path(store)) as server:
        samples = asyncio.run(measure(server, WorkQueue(**json.loads(declaration)), letters, holds))
    return {name: asdict(sample) for name, sample in samples.items()}


def _measure_apart(store: Path, queue: WorkQueue, letters: int, part: str) -> Iterator[tuple[str, Sample]]:
    declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", "benchmarks.dead_letter_scan"]
    command += ["--measure", str(store), str(letters), part, declaration]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for name, sample in json.loads(ended.stdout.splitlines()[-1]).items():
        yield name, Sample(**sample)


def measure(sizes: Mapping[int, int]) -> Workload:
    """Measure scans of queues.

    :param sizes: how many letters, and how many rounds
    """
    scans: dict[str, list[Sample]] = {}
    for letters, rounds in sizes.items():
        print(f"a queue of {letters:,} dead letters", file=sys.stderr, flush=True)
        with prepared_store(NAME, letters, BODY, events=f"{NAME}-events") as (store, queue):
            for turn in range(1, rounds + 1):
                for part in ("first", "follow"):
                    print(f"round {turn} of {rounds}: {part}", file=sys.stderr, flush=True)
                    for name, sample in _measure_apart(store, queue, letters, part):
                        scans.setdefault(f"{name}, {letters:,}", []).append(sample)
    table = Table("scans", "letters", [Way(name, each) for name, each in scans.items()])
    return Workload(
        "W4",
        "Looking at dead letters",
        "dead_letter_scan",
        " ".join((__doc__ or "").split()),
        [table],
        _goals(table, sizes),
    )


def _goals(table: Table, sizes: Mapping[int, int]) -> list[Goal]:
    goals: list[Goal] = []
    for letters in sizes:
        first, copying, following = (table.way(f"{name}, {letters:,}") for name in (_FIRST, _COPYING, _NEXT))
        spent = (
            f"{first.client_microseconds:.0f} µs of the client's one thread and {first.server_microseconds:.0f} µs of"
            " the server, one after the other: two messages a letter are parsed, the advisory is validated, and job,"
            " entries, completion, audit and handlers are judged one by one"
        )
        goals += [
            Goal(f"letters a second of a first scan of {letters:,}", first.rate, 10_000, limit=spent),
            Goal("requests a letter of it", first.extra("requests") / letters, 1, at_most=True),
            Goal(f"milliseconds of the next scan of {letters:,}", following.extra("milliseconds"), 50, at_most=True),
            Goal("requests of it", following.extra("requests"), 20, at_most=True),
            Goal("longest hold of the loop by a first scan, ms", copying.extra("longest hold ms"), 20, at_most=True),
        ]
    return goals


def main() -> int:
    """Measure and print the section."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--short", action="store_true", help="a small queue")
    parser.add_argument("--letters", type=int, nargs="+", default=list(_ROUNDS))
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        store, letters, part, declaration = options.measure
        print(json.dumps(_measure_here(store, int(letters), part, declaration)))
        return 0
    sizes = [1_000] if options.short else options.letters
    workload = measure({letters: 1 if options.short else _ROUNDS.get(letters, 1) for letters in sizes})
    print("\n".join(workload.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
