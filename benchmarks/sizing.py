"""What a job costs in bytes, by stream and by what becomes of it, and what idle programs take.

Every size of body gets a queue with all companions on a server of its own. After each step the streams' bytes are
compared with those before it; a step counts only if all jobs became what they should. Memory is the proportional share
of a program and its children (PSS), since processes of one program share pages.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    WorkQueue,
    connection_settings,
    find_dead_letters,
    provision,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, stream_info
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.worker import Delivery, Worker
from benchmarks.dead_queue import open_connection
from testbed.nats_server import NatsServer
from testbed.queues import CONSUMER, eventually, exhaust_deliveries, running_worker
from testbed.text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

QUEUE = "sized"
STREAMS = {
    "queue": QUEUE,
    "archive": f"{QUEUE}-archive",
    "events": f"{QUEUE}-events",
    "dead letters": f"{QUEUE}-dead",
    "audit": f"{QUEUE}-audit",
}
_MEBIBYTE = 2**20
_START_SECONDS = 3.0
_IDLE_SECONDS = 10.0
# Below the server's default of jobs in flight.
_AT_ONCE = 500


def do_nothing(_: Delivery) -> None:
    """Do a job that takes time and nothing else."""
    time.sleep(0.2)


async def _complete(_: Delivery) -> dict[str, int]:
    return {"done": 1}


async def _fail(_: Delivery) -> None:
    raise ValueError("expected an amount, found none")


def _declared(sample_freq: str) -> WorkQueue:
    return WorkQueue(
        name=QUEUE,
        subjects=[f"{QUEUE}.jobs.>"],
        consumers=[{"name": CONSUMER, "max_deliver": 1, "ack_wait": "30s", "sample_freq": sample_freq}],
        dead_letters=f"{QUEUE}-dead",
        events=f"{QUEUE}-events",
    )


class _Sizes:
    """The bytes of all streams, and by how much each step changes them."""

    def __init__(self, connection: NatsPyConnection, jobs: int) -> None:
        self._connection = connection
        self._jobs = jobs
        self._before = dict.fromkeys(STREAMS, 0)
        self.rows: list[tuple[str, dict[str, float]]] = []

    async def note(self, step: str) -> None:
        """Note what a step, or all since the last one, costs for each job."""
        now = {name: await self._bytes(stream) for name, stream in STREAMS.items()}
        if step:
            self.rows.append((step, {name: (now[name] - self._before[name]) / self._jobs for name in STREAMS}))
        self._before = now

    async def _bytes(self, stream: str) -> int:
        # Advisories and copies of the archive are stored a moment after what they are about.
        seen = -1
        while seen != (found := int((await stream_info(self._connection, stream))["state"]["bytes"])):
            seen = found
            await asyncio.sleep(0.3)
        return found


async def measure_bytes(url: str, size: int, jobs: int, sample_freq: str) -> list[tuple[str, dict[str, float]]]:
    """Publish, complete, kill and redrive jobs; return what each step costs a job in each stream.

    :raises RuntimeError: not all jobs became what they should
    """
    queue, settings = _declared(sample_freq), connection_settings({"servers": (url,), "timeout": 60})
    async with open_connection(url) as connection:
        await provision(connection, queue)
        sizes = _Sizes(connection, jobs)
        await sizes.note("")

        async def store(task: str) -> None:
            origin = Origin("shop", f"scheduled__2026-11-23T02:00:00+00:00_{task}", "charge", max_tries=0)
            bodies = (Job(b"x" * size, id=f"order-{task}-{number}") for number in range(jobs))
            await publish(connection, queue, bodies, subject=f"{QUEUE}.jobs.eu", origin=origin)

        async def work(handler: Callable[[Delivery], Any]) -> None:
            async with running_worker(Worker(queue, CONSUMER, handler, settings, concurrency=100)):
                await eventually(lambda: _is_drained(connection), within=120)

        await store("a")
        await sizes.note("stored")
        await work(_complete)
        await sizes.note("completed")
        await store("b")
        await sizes.note("")
        await work(_fail)
        await sizes.note("dead, with the worker's record")
        await redrive_dead_letters(connection, queue)
        await sizes.note("redriven")
        await work(_complete)
        await store("c")
        await sizes.note("")
        for start in range(0, jobs, _AT_ONCE):
            await exhaust_deliveries(connection, queue, min(_AT_ONCE, jobs - start))
        await sizes.note("dead, advisory only")
        await summarise_dead_letters(connection, queue)
        await sizes.note("and its body copied by a scan")
        if len((await find_dead_letters(connection, queue)).letters) != jobs:
            raise RuntimeError("not all jobs of the last step are dead letters")
    return sizes.rows


async def _is_drained(connection: NatsPyConnection) -> bool:
    info = await consumer_info(connection, QUEUE, CONSUMER)
    return not info["num_pending"] and not info["num_ack_pending"]


@contextmanager
def _program(module: str, *arguments: str, url: str) -> Iterator[psutil.Process]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NATS_")}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env=clean | {"NATS_URL": url}, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)


def _family(program: psutil.Process) -> list[psutil.Process]:
    return [program, *program.children(recursive=True)]


async def measure_program(program: psutil.Process) -> tuple[float, float]:
    """Return the MiB of an idle program with its children, and its CPU in percent of a core."""
    await asyncio.sleep(_START_SECONDS)
    before = sum(sum(each.cpu_times()[:2]) for each in _family(program))
    await asyncio.sleep(_IDLE_SECONDS)
    cpu = sum(sum(each.cpu_times()[:2]) for each in _family(program)) - before
    memory = sum(each.memory_full_info().pss for each in _family(program))
    return memory / _MEBIBYTE, 100 * cpu / _IDLE_SECONDS


async def _do_some(url: str) -> None:
    """Let a worker do jobs, so that all of it is loaded and all its processes run."""
    async with open_connection(url) as connection:
        await publish(connection, _declared("100%"), [b"x"] * 20, subject=f"{QUEUE}.jobs.eu")
        await eventually(lambda: _is_drained(connection), within=60)


async def measure_programs(url: str) -> list[tuple[str, str, str]]:
    """Measure workers and an exporter that have nothing to do any more."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sized.yaml"
        file.write_text(_declared("100%").to_yaml(), encoding="utf-8")
        run = ["run", "--queue", str(file), "--consumer", CONSUMER, "--handler", "benchmarks.sizing:do_nothing"]
        worker, queues = "airflow_provider_jetstream.worker.cli", "airflow_provider_jetstream.command.program"
        programs: Mapping[str, tuple[str, ...]] = {
            "worker, 1 slot": (worker, *run),
            "worker, 100 slots, metrics": (worker, *run, "--concurrency", "100", "--metrics-port", "0"),
            "worker, 4 processes": (worker, *run, "--concurrency", "4", "--processes"),
            "exporter, every 15 s": (queues, "exporter", "--port", "0"),
        }
        for name, (module, *arguments) in programs.items():
            with _program(module, *arguments, url=url) as program:
                if module == worker:
                    await _do_some(url)
                memory, cpu = await measure_program(program)
            rows.append((name, f"{memory:.0f}", f"{cpu:.1f}"))
    return rows


async def _print_tables(sizes: list[int], jobs: int) -> None:
    for size in sizes:
        for sample_freq in ("100%", "0"):
            with NatsServer() as server:
                rows = await measure_bytes(server.url, size, jobs, sample_freq)
            print(f"\nbytes a job; bodies of {size} bytes, sample_freq {sample_freq}")
            table = [(step, *(f"{found[name]:,.0f}" for name in STREAMS)) for step, found in rows]
            print(text_table(("step", *STREAMS), table))
    with NatsServer() as server:
        async with open_connection(server.url) as connection:
            await provision(connection, _declared("100%"))
        print()
        print(text_table(("idle program", "MiB", "% of a core"), await measure_programs(server.url)))


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[200, 1_024])
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    asyncio.run(_print_tables(options.sizes, options.jobs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
