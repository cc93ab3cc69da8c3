"""W7: what one job more costs, from 1,000 to 1,000,000: publishing, working, looking at dead letters, redriving them.

Every number gets a server of its own, and each measurement a process of its own, whose CPU seconds are taken around the
call alone. A call also does what it does once, such as reading the streams' information: so the CPU of a further job is
the difference of two numbers' CPU by the difference of the numbers. The machine's own pace changes, by up to twice
within minutes, and rounds of a million last for minutes: so a process also takes the CPU seconds of a fixed piece of
work, before and after the call, and the CPU of a further job is stated at the median pace of all rounds. *Pace* is
that of the round beside the median. A round counts only if every job is stored, done, found or redriven.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.publication import publish
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from benchmarks.dead_queue import open_connection, use_up
from benchmarks.report import Goal, Sample, Table, Way, Workload, run_workload, server_cpu
from benchmarks.worker_ways import BATCH, CONSUMER, run_batches
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_QUEUE = "grown"
_SHORT = "1s"
_PUBLISH, _WORK, _LOOK, _REDRIVE = "publish", "work, batches of 100", "look", "redrive, `copy`"
_FURTHER = "µs of a further job"
# By size, how many rounds: the larger the number, the less do single events weigh.
_ROUNDS = {1_000: 5, 10_000: 5, 100_000: 3, 1_000_000: 1}
_MOST_LETTERS = 1_000_000
_PACE = "pace"
_LIMIT = "the pace is taken before and after a call, and changes while a million take minutes"


def _queue(ack_wait: str = "30s") -> WorkQueue:
    """Declare the queue; a redrive waits until letters have been dead for as long as their ack wait."""
    return WorkQueue(
        name=_QUEUE,
        subjects=[f"{_QUEUE}.jobs"],
        consumers=[
            {"name": CONSUMER, "max_deliver": 1, "ack_wait": ack_wait, "max_ack_pending": -1, "sample_freq": "0"}
        ],
        dead_letters=f"{_QUEUE}-dead",
        events=f"{_QUEUE}-events",
        archive=False,
    )


@asynccontextmanager
async def _open(url: str) -> AsyncIterator[NatsPyConnection]:
    async with open_connection(url) as connection:
        yield connection


class _Clock:
    """Seconds and CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def figures(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._began, "cpu": time.process_time() - self._cpu}


def _pace() -> float:
    """Return the CPU seconds that a fixed piece of work takes just now, about as varied as a call's."""
    began = time.process_time()
    for _ in range(40):
        texts = [json.dumps({"subject": _QUEUE, "sequence": number}) for number in range(1_000)]
        _ = {json.loads(text)["sequence"]: text.encode() for text in texts}
    return time.process_time() - began


async def _publish(connection: NatsPyConnection, count: int) -> dict[str, float]:
    bodies: Iterator[bytes] = (b"%0200d" % number for number in range(count))
    clock = _Clock()
    report = await publish(connection, _queue(), bodies, subject=f"{_QUEUE}.jobs")
    figures = clock.figures()
    _verify("stored", report.stored, count)
    return figures


async def _work(connection: NatsPyConnection, url: str, count: int) -> dict[str, float]:
    await _publish(connection, count)
    figures = await run_batches(url, _queue(), count, BATCH)
    done = (await stream_info(connection, f"{_QUEUE}-events"))["state"]["messages"]
    _verify("done", done, count)
    return figures


async def _look(connection: NatsPyConnection, count: int) -> dict[str, float]:
    clock = _Clock()
    scan = await Scan.begin(connection, _queue(_SHORT))
    found = 0
    async for _ in scan.letters():
        found += 1
    figures = clock.figures()
    _verify("found", found, count)
    return figures


async def _redrive(connection: NatsPyConnection, count: int) -> dict[str, float]:
    clock = _Clock()
    report = await redrive_dead_letters(connection, _queue(_SHORT), RedriveRequest(protocol=Protocol.COPY))
    figures = clock.figures()
    report.raise_for_failures()
    pending = (await connection.api(f"CONSUMER.INFO.{_QUEUE}.{CONSUMER}"))["num_pending"]
    _verify("redriven", pending, count)
    return figures


def _verify(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"expected {expected} jobs {what}, found {found}")


async def _measure_here(kind: str, url: str, count: int) -> dict[str, float]:
    before = _pace()
    figures = await _call(kind, url, count)
    return figures | {_PACE: (before + _pace()) / 2}


async def _call(kind: str, url: str, count: int) -> dict[str, float]:
    async with _open(url) as connection:
        if kind == _WORK:
            return await _work(connection, url, count)
        measured: dict[str, Callable[[NatsPyConnection, int], Awaitable[dict[str, float]]]] = {
            _PUBLISH: _publish,
            _LOOK: _look,
            _REDRIVE: _redrive,
        }
        return await measured[kind](connection, count)


async def _provision(url: str, dead: int) -> None:
    async with _open(url) as connection:
        queue = _queue(_SHORT) if dead else _queue()
        await provision(connection, queue)
        if dead:
            await _publish(connection, dead)
            await use_up(connection, queue, dead)


def _samples(kinds: Sequence[str], count: int, *, dead: bool) -> dict[str, Sample]:
    """Measure several calls after each other on one fresh server."""
    samples: dict[str, Sample] = {}
    with NatsServer() as server:
        asyncio.run(_provision(server.url, count if dead else 0))
        for kind in kinds:
            print(f"{count:,} jobs: {kind}", file=sys.stderr, flush=True)
            before = server_cpu(server)
            command = [sys.executable, "-m", "benchmarks.growth", "--measure", kind, server.url, str(count)]
            figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            used = server_cpu(server) - before
            samples[kind] = Sample(count, figures["seconds"], figures["cpu"], used, {_PACE: figures[_PACE]})
    return samples


def _table(kind: str, samples: dict[int, list[Sample]]) -> Table:
    usual = statistics.median(sample.extra[_PACE] for rounds in samples.values() for sample in rounds)
    ways: list[Way] = []
    smaller: tuple[int, float] | None = None
    for count, rounds in samples.items():
        cpu = statistics.median(sample.client_cpu * usual / sample.extra[_PACE] for sample in rounds)
        further = {_FURTHER: (cpu - smaller[1]) / (count - smaller[0]) * 1e6} if smaller else {}
        named = [replace(each, extra={_PACE: usual / each.extra[_PACE], **further}) for each in rounds]
        ways.append(Way(f"{count:,}", named))
        smaller = count, cpu
    # The first line has no figure of a further job, and its columns are the table's.
    return Table(kind, "jobs", ways)


def spread(figures: Sequence[float]) -> float:
    """Return by how many per cent the figure that differs most differs from the median."""
    middle = statistics.median(figures)
    return max(abs(figure - middle) for figure in figures) / middle * 100.0


def workload(short: bool, letters: int = _MOST_LETTERS) -> Workload:  # noqa: FBT001
    """Measure all calls with ever more jobs."""
    sizes = {1_000: 1, 4_000: 1, 16_000: 1} if short else _ROUNDS
    measured: dict[str, dict[int, list[Sample]]] = {kind: {} for kind in (_PUBLISH, _WORK, _LOOK, _REDRIVE)}
    for turn in range(max(sizes.values())):
        for count in (count for count, rounds in sizes.items() if turn < rounds):
            groups = [([_PUBLISH], False), ([_WORK], False)]
            if short or count <= letters:
                groups.append(([_LOOK, _REDRIVE], True))
            for kinds, dead in groups:
                for kind, sample in _samples(kinds, count, dead=dead).items():
                    measured[kind].setdefault(count, []).append(sample)
    tables = [_table(kind, samples) for kind, samples in measured.items()]
    goals = [
        Goal(
            f"{table.title}: most that a further job differs from their median, %",
            spread(further),
            20.0,
            at_most=True,
            limit=_LIMIT,
        )
        for table in tables
        if (further := [way.extra(_FURTHER) for way in table.ways if _FURTHER in way.samples[0].extra])
        and len(further) > 1
    ]
    return Workload("W7", "Growth", "growth", " ".join((__doc__ or "").split()), tables, goals)


def main() -> int:
    """Measure one call in this process, or all of them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--measure", nargs=3)
    parser.add_argument("--letters", type=int, default=_MOST_LETTERS)
    options, sys.argv[1:] = parser.parse_known_args()
    if options.measure:
        kind, url, count = options.measure
        print(json.dumps(asyncio.run(_measure_here(kind, url, int(count)))))
        return 0
    return run_workload(partial(workload, letters=options.letters), __doc__)


if __name__ == "__main__":
    sys.exit(main())
