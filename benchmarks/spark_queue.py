"""Reading a work queue with Spark's data source, by direct gets, while jobs are published and processed.

Fairness as in ``benchmarks.spark_read``. The floors send the same requests (256 messages each) over bare sockets, one
connection or two at once, and count the messages. Beside one more read, and beside nothing, a publisher and a worker in
a process of their own do 400 jobs of the same queue a second, each acknowledged.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from benchmarks.spark_read import read_as_a_task, read_from_memory
from benchmarks.spark_setup import (
    MemoryDataSource,
    SparkSetup,
    Variant,
    drain_directly,
    format_rounds,
    measure,
    new_session,
    with_earlier_rounds,
)
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

if TYPE_CHECKING:
    from types import TracebackType

WORKER = "worker"
_PULL = b'{"batch":10000,"expires":600000000000}'
_HUNDREDTHS = 100


@dataclass
class Waits:
    """Latencies in seconds, of acknowledgements and from publishing a job to its arrival, and jobs per second."""

    acks: list[float] = field(default_factory=list)
    jobs: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Return medians, 99th percentiles and maxima in milliseconds, and the median rate."""
        return (
            f"{len(self.acks):,}",
            *(f"{ms:.2f}" for waits in (self.acks, self.jobs) for ms in _percentiles(waits)),
            f"{statistics.median(self.rates):.0f} [{min(self.rates):.0f}-{max(self.rates):.0f}]",
        )


HEAD = ("jobs", "ack p50", "p99", "longest", "job p50", "p99", "longest", "jobs/s")


class Probe:
    """Publishes and processes jobs until the block ends, and adds its latencies to ``waits``."""

    def __init__(self, url: str, stream: str, waits: Waits) -> None:
        self._command = [sys.executable, "-m", "benchmarks.spark_queue", "--probe", url, stream]
        self._waits = waits

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdout is None or not self._process.stdout.readline():
            raise RuntimeError("the publisher ended before it began")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate()
        acks, jobs, duration = json.loads(output)
        if len(acks) != len(jobs):
            raise AssertionError(f"expected {len(acks)} jobs done, found {len(jobs)}")
        self._waits.acks += acks
        self._waits.jobs += jobs
        self._waits.rates.append(len(jobs) / duration)


def _percentiles(waits: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(waits, n=_HUNDREDTHS)
    return cuts[49] * 1000, cuts[98] * 1000, max(waits) * 1000


def _work(url: str, stream: str, latencies: list[float]) -> None:
    with closing(NatsSocket(socket_settings({"servers": url}))) as socket:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{WORKER}"
        socket.send(f"PUB {subject} {socket.new_reply_subject()} {len(_PULL)}\r\n".encode() + _PULL + b"\r\n")
        while not (latencies and latencies[-1] < 0):
            socket.receive(lambda _buffer, _filled: True, 600)
            position, acks = 0, b""
            while frame := socket.next_frame(position):
                position = frame.end
                _, _, reply, reply_end, _, body, end = frame.offsets
                if reply_end > reply:
                    latencies.append(time.perf_counter() - float(socket.buffer[body:end]))
                    acks += b"PUB %b 0\r\n\r\n" % bytes(socket.buffer[reply:reply_end])
            socket.consume(position)
            socket.send(acks)


def publish_and_work(arguments: list[str]) -> None:
    """Publish and process jobs until standard input is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("stream")
    parser.add_argument("--every", type=float, default=0.0025, help="seconds")
    options = parser.parse_args(arguments)
    acks: list[float] = []
    jobs: list[float] = []
    subject = f"{options.stream}.probe"
    with closing(NatsSocket(socket_settings({"servers": options.url}))) as socket:
        config = {"durable_name": WORKER, "ack_policy": "explicit", "filter_subject": subject}
        request = {"stream_name": options.stream, "config": config}
        SourceStream(socket, options.stream).api(f"CONSUMER.DURABLE.CREATE.{options.stream}.{WORKER}", request)
        worker = threading.Thread(target=_work, args=(options.url, options.stream, jobs), daemon=True)
        worker.start()
        print("ready", flush=True)
        started = due = time.perf_counter()
        while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
            due += options.every
            sent = time.perf_counter()
            socket.request(subject, f"{sent:020.9f}".encode())
            acks.append(time.perf_counter() - sent)
        duration = time.perf_counter() - started
        # A time in the future marks the last job.
        socket.request(subject, f"{time.perf_counter() + 3600:020.9f}".encode())
        worker.join(10)
    print(json.dumps([acks, [wait for wait in jobs if wait >= 0], duration]))


FLOOR = "bare socket (floor)"
_IDLE = 3.0


def _drain(setup: SparkSetup, messages: int, connections: int) -> None:
    edges = [messages * index // connections for index in range(connections + 1)]
    with ThreadPoolExecutor(connections) as pool:
        futures = [
            pool.submit(drain_directly, setup.open_stream("queue"), low + 1, high) for low, high in pairwise(edges)
        ]
        for future in futures:
            future.result()


def _read_queue(setup: SparkSetup, messages: int, partitions: int) -> None:
    setup.verify(setup.load("queue", partitions, endingOffsets=str(messages + 1)), messages)


class _ConcurrentJobs:
    """A publisher and a worker beside reads, and their latencies over all rounds."""

    def __init__(self, setup: SparkSetup, messages: int) -> None:
        self._bed, self._messages = setup, messages
        self.waits = {"beside nothing": Waits(), "beside Spark": Waits()}

    def beside(self, name: str) -> None:
        """Publish and process jobs during a read, and check that the read leaves no consumer behind."""
        with Probe(self._bed.server.url, "queue", self.waits[name]):
            if name == "beside Spark":
                _read_queue(self._bed, self._messages, 2)
            else:
                time.sleep(_IDLE)
        stream = self._bed.open_stream("queue")
        with closing(stream.socket):
            if (results := stream.api("CONSUMER.NAMES.queue")["consumers"]) != [WORKER]:
                raise AssertionError(f"expected no consumer besides the worker's, found {results}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    messages = options.messages
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    with NatsServer() as server:
        setup = SparkSetup(server, session, b"x" * options.size)
        setup.fill_stream("queue", "workqueue", messages)
        concurrent_jobs = _ConcurrentJobs(setup, messages)
        variants = [
            Variant(FLOOR, lambda: _drain(setup, messages, 1), messages, FLOOR),
            Variant("bare sockets, 2 connections", lambda: _drain(setup, messages, 2), messages, FLOOR),
            Variant("a task's read", lambda: read_as_a_task(setup, "queue", "direct", messages), messages, FLOOR),
            Variant("Spark, 1 task", lambda: _read_queue(setup, messages, 1), messages, FLOOR),
            Variant("Spark, 2 tasks", lambda: _read_queue(setup, messages, 2), messages, FLOOR),
            Variant("Spark from memory", lambda: read_from_memory(setup, messages), messages, FLOOR),
            Variant("Spark, 2 tasks, beside jobs", partial(concurrent_jobs.beside, "beside Spark"), messages, FLOOR),
            Variant("(jobs beside nothing)", partial(concurrent_jobs.beside, "beside nothing"), messages, FLOOR),
        ]
        results = measure(variants, options.rounds, setup.cpu)
    session.stop()
    print(f"{options.size} bytes\n{format_rounds(with_earlier_rounds(results, options.keep))}")
    rows = [(name, *waits.row()) for name, waits in concurrent_jobs.waits.items()]
    print(f"waits of the publisher and of jobs, in ms\n{text_table(('', *HEAD), rows)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        publish_and_work(sys.argv[2:])
    else:
        main()
