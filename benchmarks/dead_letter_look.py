"""Looks at dead letters: the first one, and one with ten new letters, at queues of very different sizes.

Every size gets a queue with all companions on a server of its own: jobs of 64 bytes, dead by one delivery, their
advisories captured. A look counts only if it found every letter. Requests are the messages that the server has
received, without the copies of new letters' bodies that a look stores; these are counted beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.scan_context import require_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.tracked_letters import TrackedLetters
from airflow_provider_jetstream.jetstream.waiting.letter_watch import LetterCriteria, wait_for_dead_letters
from benchmarks.dead_queue import open_connection, prepare
from benchmarks.report import Goal, Sample, Table, Way, Workload, server_cpu
from testbed.dead_letters import change_stream
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_NAME = "looked"
_NEW = 10
_WAITS = 200


@dataclass
class _Meter:
    """Measures a part of a run on one connection; ``lags`` holds how late the loop's timer was, in seconds."""

    server: NatsServer
    lags: list[float]

    async def watch_loop(self) -> None:
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            self.lags.append(time.perf_counter() - due)

    def begin(self) -> None:
        self.lags.clear()
        self._received, self._cpu = self.server.monitor("varz")["in_msgs"], server_cpu(self.server)
        self._started, self._own = time.perf_counter(), time.process_time()

    def end(self, count: int, copies: int = 0, slowest: float = 0.0) -> Sample:
        seconds, lags = time.perf_counter() - self._started, sorted(self.lags) or [0.0]
        extra: dict[str, float] = {
            "milliseconds": seconds * 1e3,
            "requests": self.server.monitor("varz")["in_msgs"] - self._received - copies,
            "copies": copies,
            "loop lag p99 ms": lags[int(len(lags) * 0.99)] * 1e3,
        }
        if slowest:
            extra["slowest"] = slowest
        return Sample(count, seconds, time.process_time() - self._own, server_cpu(self.server) - self._cpu, extra)


async def _entries(connection: NatsPyConnection, queue: WorkQueue) -> int:
    return int((await stream_info(connection, require_dead_letters(queue).name))["state"]["last_seq"])


async def _die(connection: NatsPyConnection, count: int) -> None:
    """Let new jobs die."""
    jetstream = connection.client.jetstream(timeout=60)
    for _ in range(count):
        await jetstream.publish(f"{_NAME}.jobs", b"x" * 64)
    worker = await jetstream.pull_subscribe_bind("worker", stream=_NAME)
    for message in await worker.fetch(count, timeout=60):
        await message.nak()
    await worker.unsubscribe()
    # As by the next pull of a worker: only then does the server publish that the deliveries are used up.
    await probe_consumer(connection, _NAME, "worker")


def _verify(found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"expected {expected} letters, found {found}")


async def _measure(server: NatsServer, letters: int, samples: dict[str, list[Sample]]) -> None:
    queue = await prepare(server.url, _NAME, letters, b"x" * 64, events=f"{_NAME}-events")
    async with open_connection(server.url) as connection:
        if not (await stream_info(connection, _NAME))["config"].get("allow_direct"):
            await change_stream(connection, _NAME, allow_direct=True)
        meter = _Meter(server, [])
        watching = asyncio.create_task(meter.watch_loop())
        meter.begin()
        scan = await Scan.begin(connection, queue, ahead=True)
        found = sum([len(page.letters) async for page in scan.pages(Selection())])
        _verify(found, letters)
        samples.setdefault(f"first look at {letters:,}", []).append(meter.end(letters))
        before = await _entries(connection, queue)
        meter.begin()
        tracked = await TrackedLetters.prove(connection, queue)
        proved = meter.end(letters, await _entries(connection, queue) - before)
        samples.setdefault(f"first look at {letters:,}, and a copy of each body", []).append(proved)
        _verify(await tracked.update(connection) and len(tracked.table), letters)
        await _die(connection, _NEW)
        meter.begin()
        _verify(await tracked.update(connection) and len(tracked.table), letters + _NEW)
        samples.setdefault(f"a look at {letters:,} with {_NEW} new ones", []).append(meter.end(_NEW, _NEW))
        watching.cancel()


async def _measure_waits(server: NatsServer, letters: int, samples: dict[str, list[Sample]]) -> None:
    """Wait in one event loop for letters of many consumers' groups, and let a letter die for which all wait."""
    queue = await prepare(server.url, _NAME, letters, b"x" * 64, events=f"{_NAME}-events")
    async with open_connection(server.url) as connection, open_connection(server.url) as publisher:
        await change_stream(connection, _NAME, allow_direct=True)
        meter = _Meter(server, [])
        watching = asyncio.create_task(meter.watch_loop())
        meter.begin()
        criteria = [LetterCriteria(Selection(), ("consumer",), count=letters + 1 + number) for number in range(_WAITS)]
        waits = [asyncio.create_task(wait_for_dead_letters(connection, queue, each, 60.0)) for each in criteria]
        quiet = server.monitor("varz")["in_msgs"]
        while True:
            await asyncio.sleep(3.0)
            received = server.monitor("varz")["in_msgs"]
            if received - quiet <= 3 * 5 and await _entries(publisher, queue) >= 2 * letters:
                break
            quiet = received
        samples.setdefault("the first look for all", []).append(meter.end(letters, letters))
        meter.begin()
        await asyncio.sleep(10.0)
        rest = meter.end(1)
        samples.setdefault("at rest for 10 s", []).append(rest)
        delays = []
        meter.begin()
        for wait in waits[:20]:
            await _die(publisher, 1)
            died = time.perf_counter()
            summary = await wait
            delays.append(time.perf_counter() - died)
            _verify(int(summary.dead >= letters), 1)
        fired = meter.end(len(delays), slowest=max(delays) * 1e3)
        samples.setdefault("each of 20 ends with its letter", []).append(fired)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        watching.cancel()


def measure(sizes: Sequence[int], waited: int, rounds: int) -> Workload:
    """Measure looks at queues of these sizes, and waits at one."""
    looks: dict[str, list[Sample]] = {}
    waits: dict[str, list[Sample]] = {}
    for _ in range(rounds):
        for letters in sizes:
            with NatsServer() as server:
                asyncio.run(_measure(server, letters, looks))
        with NatsServer() as server:
            asyncio.run(_measure_waits(server, waited, waits))
    of_looks = Table("looks", "letters", [Way(name, each) for name, each in looks.items()])
    of_waits = Table(
        f"{_WAITS} waits at {waited:,} letters", "letters", [Way(name, each) for name, each in waits.items()]
    )
    goals = [
        goal
        for letters in sizes
        for first, then in [
            (of_looks.way(f"first look at {letters:,}"), of_looks.way(f"a look at {letters:,} with {_NEW} new ones"))
        ]
        for goal in (
            Goal(f"letters a second of a first look at {letters:,}", first.rate, 10_000),
            Goal(
                f"requests a letter of a first look at {letters:,}", first.extra("requests") / letters, 1, at_most=True
            ),
            Goal(f"milliseconds of the next look at {letters:,}", then.extra("milliseconds"), 50, at_most=True),
            Goal(f"requests of the next look at {letters:,}", then.extra("requests"), 20, at_most=True),
        )
    ]
    rest, fired = of_waits.way("at rest for 10 s"), of_waits.way("each of 20 ends with its letter")
    goals += [
        Goal("requests a second at rest", rest.extra("requests") / 10, 5, at_most=True),
        Goal(
            "milliseconds from a letter to the end of its wait",
            fired.extra("slowest"),
            1_000,
            at_most=True,
        ),
        Goal("loop lag p99, milliseconds, at rest", rest.extra("loop lag p99 ms"), 20, at_most=True),
        Goal("loop lag p99, milliseconds, while waits end", fired.extra("loop lag p99 ms"), 20, at_most=True),
    ]
    return Workload(
        "W4",
        "Looking at dead letters",
        "dead_letter_look",
        " ".join((__doc__ or "").split()),
        [of_looks, of_waits],
        goals,
    )


def main() -> int:
    """Measure, print the section, and write it to the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--short", action="store_true", help="a few small queues, which aren't written to the page")
    parser.add_argument("--print-only", action="store_true", help="don't write docs/benchmarks.md")
    parser.add_argument("--letters", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    workload = measure([1_000], 1_000, 1) if options.short else measure(options.letters, 100_000, options.rounds)
    print("\n".join(workload.lines()))
    if not (options.short or options.print_only):
        workload.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
