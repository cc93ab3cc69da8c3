"""Reading and writing streams with Spark's data source, beside nats-py and beside bare sockets: read, queue, write.

Fairness: every variant of a workload reads or stores the same messages on one server with the default
``sync_interval``, after warm-up rounds that don't count. Variants take turns; figures are medians, with the range of
the ratios *within a round* to the floor of that round. A round counts only if every message was read once and whole, or
every row stored once. The data source on nats-py, and the loop with it, are slower and take fewer messages.

``read``: a limits stream, bodies of one size without headers. The variants *with headers* read another stream, whose
messages have the same bodies and three headers each, beside a floor that receives these bytes. The floor receives from
a consumer and counts messages. ``Spark from memory`` returns the same columns without any server: the time that Spark
itself takes.

``queue``: a work queue by direct gets, while jobs are published and processed. The floors send the same requests (256
messages each) over bare sockets, one connection or two at once, and count the messages. Beside one more read, and
beside nothing, a publisher and a worker in a process of their own do 400 jobs of the same queue a second, each
acknowledged.

``write``: messages with ids into a stream that is emptied before. The floor has as many connections as Spark has tasks;
each keeps a window of as many messages unanswered as a task of this package does, and counts the acknowledgements
without parsing them. A row is the same over one connection.
"""

from __future__ import annotations

import argparse
import asyncio
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
from uuid import uuid4

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import plan_ranges
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from benchmarks.spark_setup import (
    LibraryDataSource,
    MemoryDataSource,
    SparkSetup,
    Variant,
    drain,
    drain_directly,
    format_rounds,
    measure,
    new_session,
    publish_one_by_one,
    publish_window,
    read_counts,
    with_earlier_rounds,
)
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

if TYPE_CHECKING:
    from types import TracebackType

_NAMES = ("value", "subject", "stream", "seq", "timestamp")
_FLOOR = "bare socket (floor)"
_HEADED_FLOOR = "bare socket, headers (floor)"
_HEADED = "headed"


def _read_as_a_task(setup: SparkSetup, name: str, method: str, messages: int, *, headers: bool = False) -> None:
    """Read as a task does, without Spark."""
    options = read_options({"stream": name, "includeHeaders": str(headers).lower()}, "read")
    stream = setup.open_stream(name)
    with closing(stream.socket):
        info = stream.info()
    (partition,) = plan_ranges(1, messages, options, info, method, ())
    connection = {"servers": setup.server.url}
    names = (*_NAMES, "headers") if headers else _NAMES
    columns = RequestedColumns(names, (True,) * len(names))
    results = sum(batch.num_rows for batch in read_range(connection, options, columns, partition))
    if results != messages:
        raise AssertionError(f"expected {messages} messages, found {results}")


def _read_from_memory(setup: SparkSetup, messages: int) -> None:
    """Read as many messages with Spark from the memory of a task."""
    options = {"messages": str(messages), "size": str(len(setup.body))}
    frame = setup.session.read.format("memory").options(**options).load()
    results = read_counts(frame)
    if results[:2] != (messages, messages * len(setup.body)):
        raise AssertionError(f"expected {messages} messages, found {results}")


def _read_variants(setup: SparkSetup, messages: int, library: int, shares: list[int]) -> list[Variant]:
    def spark(count: int, partitions: int) -> None:
        setup.verify(setup.load("limits", partitions, endingOffsets=str(count + 1)), count)

    def with_library() -> None:
        options = {"servers": setup.server.url, "stream": "limits", "messages": str(library)}
        setup.verify(setup.session.read.format("natspy").options(**options).load(), library)

    variants = [
        Variant(_FLOOR, lambda: drain(setup.open_stream("limits"), messages), messages, _FLOOR),
        Variant("a task's read", lambda: _read_as_a_task(setup, "limits", "consumer", messages), messages, _FLOOR),
        Variant("Spark, 1 task", lambda: spark(messages, 1), messages, _FLOOR),
        Variant("Spark, 2 tasks", lambda: spark(messages, 2), messages, _FLOOR),
        *(Variant(f"Spark, 1 task, {count:,}", partial(spark, count, 1), count, _FLOOR) for count in shares),
        Variant("Spark from memory", lambda: _read_from_memory(setup, messages), messages, _FLOOR),
        Variant("Spark on nats-py", with_library, library, _FLOOR),
    ]
    return [variant for variant in variants if variant.messages]


def _headed_variants(setup: SparkSetup, messages: int) -> list[Variant]:
    def spark(partitions: int) -> None:
        setup.verify(setup.load(_HEADED, partitions, includeHeaders="true"), messages)

    def task() -> None:
        _read_as_a_task(setup, _HEADED, "consumer", messages, headers=True)

    return [
        Variant(_HEADED_FLOOR, lambda: drain(setup.open_stream(_HEADED), messages), messages, _HEADED_FLOOR),
        Variant("a task's read, headers", task, messages, _HEADED_FLOOR),
        Variant("Spark, 1 task, headers", lambda: spark(1), messages, _HEADED_FLOOR),
        Variant("Spark, 2 tasks, headers", lambda: spark(2), messages, _HEADED_FLOOR),
    ]


_WORKER = "worker"
_PULL = b'{"batch":10000,"expires":600000000000}'
_HUNDREDTHS = 100


@dataclass
class _Waits:
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


_HEAD = ("jobs", "ack p50", "p99", "longest", "job p50", "p99", "longest", "jobs/s")


class _Probe:
    """Publishes and processes jobs until the block ends, and adds its latencies to ``waits``."""

    def __init__(self, url: str, stream: str, waits: _Waits) -> None:
        self._command = [sys.executable, "-m", "benchmarks.spark_streams", "--probe", url, stream]
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
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{_WORKER}"
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


def _publish_and_work(arguments: list[str]) -> None:
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
        config = {"durable_name": _WORKER, "ack_policy": "explicit", "filter_subject": subject}
        request = {"stream_name": options.stream, "config": config}
        SourceStream(socket, options.stream).api(f"CONSUMER.DURABLE.CREATE.{options.stream}.{_WORKER}", request)
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


_IDLE = 3.0


def _drain_queue(setup: SparkSetup, messages: int, connections: int) -> None:
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
        self._setup, self._messages = setup, messages
        self.waits = {"beside nothing": _Waits(), "beside Spark": _Waits()}

    def beside(self, name: str) -> None:
        """Publish and process jobs during a read, and check that the read leaves no consumer behind."""
        with _Probe(self._setup.server.url, "queue", self.waits[name]):
            if name == "beside Spark":
                _read_queue(self._setup, self._messages, 2)
            else:
                time.sleep(_IDLE)
        stream = self._setup.open_stream("queue")
        with closing(stream.socket):
            if (results := stream.api("CONSUMER.NAMES.queue")["consumers"]) != [_WORKER]:
                raise AssertionError(f"expected no consumer besides the worker's, found {results}")


_TASKS = 2
_WRITE_FLOOR = f"bare sockets, {_TASKS} connections (floor)"
_SUBJECT = "out.a"


def _recreate_stream(setup: SparkSetup) -> None:
    stream = setup.open_stream("out")
    with closing(stream.socket):
        # Recreated rather than purged, so that the message ids of the round before take no memory.
        stream.api("STREAM.DELETE.out")
    setup.create_stream("out")


def _require_stored(setup: SparkSetup, messages: int) -> None:
    stream = setup.open_stream("out")
    with closing(stream.socket):
        results = stream.api("STREAM.INFO.out")["state"]["messages"]
    if results != messages:
        raise AssertionError(f"expected {messages} messages stored, found {results}")


def _bare(setup: SparkSetup, messages: int, connections: int) -> None:
    _recreate_stream(setup)
    edges = [messages * index // connections for index in range(connections + 1)]
    with ThreadPoolExecutor(connections) as pool:
        futures = [
            pool.submit(publish_window, setup.open_stream("out"), _SUBJECT, high - low, setup.body)
            for low, high in pairwise(edges)
        ]
        for future in futures:
            future.result()
    _require_stored(setup, messages)


def _spark(setup: SparkSetup, messages: int, *, with_ids: bool) -> None:
    _recreate_stream(setup)
    frame = setup.session.range(0, messages, 1, _TASKS)
    columns = [f.lit(setup.body.decode()).alias("value"), f.lit(_SUBJECT).alias("subject")]
    if with_ids:
        columns.append(f.concat(f.lit(f"{uuid4().hex[:8]}:"), f.col("id").cast("string")).alias("msg_id"))
    options = {"servers": setup.server.url, "stream": "out"}
    frame.select(*columns).write.format("jetstream").options(**options).mode("append").save()
    _require_stored(setup, messages)


def _library(setup: SparkSetup, messages: int) -> None:
    _recreate_stream(setup)
    asyncio.run(publish_one_by_one(setup.server.url, _SUBJECT, messages, setup.body))
    _require_stored(setup, messages)


def _read(setup: SparkSetup, options: argparse.Namespace) -> list[Variant]:
    messages = options.messages or 1_000_000
    setup.session.dataSource.register(LibraryDataSource)
    setup.fill_stream("limits", "limits", messages)
    library = 200_000 if options.library is None else options.library
    variants = _read_variants(setup, messages, library, options.shares)
    if options.headed:
        setup.fill_stream(_HEADED, "limits", options.headed, headers=True)
        variants += _headed_variants(setup, options.headed)
    return variants


def _queue(setup: SparkSetup, messages: int, beside: _ConcurrentJobs) -> list[Variant]:
    setup.fill_stream("queue", "workqueue", messages)
    return [
        Variant(_FLOOR, lambda: _drain_queue(setup, messages, 1), messages, _FLOOR),
        Variant("bare sockets, 2 connections", lambda: _drain_queue(setup, messages, 2), messages, _FLOOR),
        Variant("a task's read", lambda: _read_as_a_task(setup, "queue", "direct", messages), messages, _FLOOR),
        Variant("Spark, 1 task", lambda: _read_queue(setup, messages, 1), messages, _FLOOR),
        Variant("Spark, 2 tasks", lambda: _read_queue(setup, messages, 2), messages, _FLOOR),
        Variant("Spark from memory", lambda: _read_from_memory(setup, messages), messages, _FLOOR),
        Variant("Spark, 2 tasks, beside jobs", partial(beside.beside, "beside Spark"), messages, _FLOOR),
        Variant("(jobs beside nothing)", partial(beside.beside, "beside nothing"), messages, _FLOOR),
    ]


def _write(setup: SparkSetup, options: argparse.Namespace) -> list[Variant]:
    messages, library = options.messages or 1_000_000, 20_000 if options.library is None else options.library
    setup.create_stream("out")
    variants = [
        Variant(_WRITE_FLOOR, lambda: _bare(setup, messages, _TASKS), messages, _WRITE_FLOOR),
        Variant("bare socket, 1 connection", lambda: _bare(setup, messages, 1), messages, _WRITE_FLOOR),
        Variant(
            "Spark, 2 tasks, column msg_id", lambda: _spark(setup, messages, with_ids=True), messages, _WRITE_FLOOR
        ),
        Variant("Spark, 2 tasks, derived ids", lambda: _spark(setup, messages, with_ids=False), messages, _WRITE_FLOOR),
        Variant("await js.publish", lambda: _library(setup, library), library, _WRITE_FLOOR),
    ]
    return [variant for variant in variants if variant.messages]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["read", "queue", "write"])
    parser.add_argument("--messages", type=int, help="1,000,000; of a queue 300,000")
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library", type=int, help="messages for nats-py; 0 leaves it out")
    parser.add_argument("--shares", type=int, nargs="*", default=[100_000], help="smaller reads of the same stream")
    parser.add_argument("--headed", type=int, default=1_000_000, help="read: messages with headers; 0 for none")
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    with NatsServer() as server:
        setup = SparkSetup(server, session, b"x" * options.size)
        queued = options.messages or 300_000
        beside = _ConcurrentJobs(setup, queued)
        if options.workload == "queue":
            variants = _queue(setup, queued, beside)
        else:
            variants = (_read if options.workload == "read" else _write)(setup, options)
        results = measure(variants, options.rounds, setup.cpu)
    session.stop()
    print(f"{options.size} bytes\n{format_rounds(with_earlier_rounds(results, options.keep))}")
    if options.workload == "queue":
        rows = [(name, *waits.row()) for name, waits in beside.waits.items()]
        print(f"waits of the publisher and of jobs, in ms\n{text_table(('', *_HEAD), rows)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        _publish_and_work(sys.argv[2:])
    else:
        main()
