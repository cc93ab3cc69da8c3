"""The setup of the data source benchmarks: a server, streams with messages, a session, and CPU time by process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import nats
import psutil
import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from testbed.text_table import text_table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from testbed.nats_server import NatsServer

# The JVM compiles hot code, on the same cores, for about as many rounds.
_WARM_UP = 8

Cpu = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Variant:
    """One variant of an operation on ``messages`` messages; ``run`` raises where a count is wrong.

    ``floor`` is the name of the variant that it is compared with.
    """

    name: str
    run: Callable[[], object]
    messages: int
    floor: str


@dataclass(frozen=True)
class Measured:
    """The measurement of one variant in one round; ``cpu`` holds CPU seconds by kind of process."""

    variant: str
    floor: str
    messages: int
    seconds: float
    cpu: dict[str, float]


Round = dict[str, Measured]


def measure(variants: Sequence[Variant], rounds: int, cpu: Cpu) -> list[Round]:
    """Run all variants in turns, after warm-up rounds that don't count; ``cpu`` returns the CPU seconds used so far."""
    results: list[Round] = []
    for number in range(-_WARM_UP, rounds):
        round_results: Round = {}
        for variant in variants:
            before, started = cpu(), time.perf_counter()
            variant.run()
            seconds, after = time.perf_counter() - started, cpu()
            cpu_seconds = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
            round_results[variant.name] = Measured(variant.name, variant.floor, variant.messages, seconds, cpu_seconds)
        if number >= 0:
            results.append(round_results)
    return results


def with_earlier_rounds(rounds: list[Round], file: Path | None) -> list[Round]:
    """Append rounds to a file, one a line, and return them with those of earlier runs."""
    if file is None:
        return rounds
    with file.open("a") as lines:
        for round_results in rounds:
            lines.write(json.dumps([vars(measured) for measured in round_results.values()]) + "\n")
    stored_rounds = [[Measured(**fields) for fields in json.loads(line)] for line in file.read_text().splitlines()]
    return [{measured.variant: measured for measured in round_results} for round_results in stored_rounds]


def format_rounds(rounds: list[Round]) -> str:
    """Format a table of medians, and of the ratios to the floor within a round with their range."""
    kinds = list(next(iter(rounds[0].values())).cpu)
    rows: list[tuple[object, ...]] = []
    for name in rounds[0]:
        measurements = [round_results[name] for round_results in rounds]
        rates = [measured.messages / measured.seconds for measured in measurements]
        floors = [round_results[round_results[name].floor] for round_results in rounds]
        ratios = sorted(rate / (floor.messages / floor.seconds) for rate, floor in zip(rates, floors, strict=True))
        costs = [
            statistics.median(measured.cpu[kind] / measured.messages * 1e6 for measured in measurements)
            for kind in kinds
        ]
        rows.append(
            (
                name,
                f"{measurements[0].messages:,}",
                f"{statistics.median(measured.seconds for measured in measurements):.2f}",
                f"{statistics.median(rates):,.0f}",
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                *(f"{cost:.2f}" for cost in costs),
            )
        )
    head = ("variant", "messages", "s", "messages/s", "of the floor", *(f"µs {kind}" for kind in kinds))
    return f"{len(rounds)} rounds; µs of CPU per message\n{text_table(head, rows)}"


_PULL = 10_000
_MEGABYTE = 1 << 20


def drain(stream: SourceStream, messages: int) -> None:
    """Receive a limits stream from a consumer without acknowledgements, and count the first lines of messages."""
    with closing(stream.socket) as socket:
        config = {"name": f"floor{uuid4().hex}", "ack_policy": "none", "mem_storage": True}
        subject = f"{stream.name}.{config['name']}"
        stream.api(f"CONSUMER.CREATE.{subject}", {"stream_name": stream.name, "config": config})
        pull = b'{"batch":%d,"expires":20000000000}' % _PULL
        request = (
            f"PUB $JS.API.CONSUMER.MSG.NEXT.{subject} {socket.new_reply_subject()} {len(pull)}\r\n".encode()
            + pull
            + b"\r\n"
        )
        socket.send(request * 2)
        # No body contains these bytes, so that the search skips bodies quickly.
        prefix = b"MSG %b." % stream.name.encode()
        received, requested = 0, 2
        while received < messages:
            socket.receive(lambda _buffer, filled: filled >= _MEGABYTE)
            end = socket.buffer.rfind(b"\r\n", 0, socket.filled) + 2
            received += socket.buffer.count(prefix, 0, end)
            socket.consume(end)
            while requested * _PULL - received <= _PULL:
                socket.send(request)
                requested += 1
        stream.api(f"CONSUMER.DELETE.{subject}")
    if received != messages:
        raise AssertionError(f"expected {messages} messages, found {received}")


_LAST = re.compile(rb"NATS/1\.0 204 EOB\r\n.*?Nats-Last-Sequence: (\d+)\r\n", re.DOTALL)


def drain_directly(stream: SourceStream, first: int, last: int, batch: int = 256) -> None:
    """Receive messages of any stream by direct gets, each batch requested when the one before has ended."""
    with closing(stream.socket) as socket:
        subject, received, next_sequence = f"$JS.API.DIRECT.GET.{stream.name}", 0, first
        while next_sequence <= last:
            request = {"seq": next_sequence, "next_by_subj": ">", "batch": min(batch, last - next_sequence + 1)}
            pull = json.dumps(request).encode()
            socket.send(f"PUB {subject} {socket.new_reply_subject()} {len(pull)}\r\n".encode() + pull + b"\r\n")
            last_answer = None
            while not last_answer:
                socket.receive(lambda buffer, filled: buffer.rfind(b"204 EOB", max(0, filled - 400), filled) >= 0)
                last_answer = _LAST.search(socket.buffer, max(0, socket.filled - 400), socket.filled)
            received += socket.buffer.count(b"\r\nNats-Sequence: ", 0, socket.filled)
            next_sequence = int(last_answer[1]) + 1
            socket.consume(socket.filled)
    if received != last - first + 1:
        raise AssertionError(f"expected {last - first + 1} messages, found {received}")


def publish_window(stream: SourceStream, subject: str, messages: int, body: bytes, window: int = 1000) -> None:
    """Publish messages with ids, with a window of unanswered ones, and count the acknowledgements."""
    with closing(stream.socket) as socket:
        run = uuid4().hex[:8].encode()
        # Only the ids and the reply subjects differ from message to message.
        head = b"NATS/1.0\r\nNats-Msg-Id: %b:%%08d\r\n\r\n" % run
        size = len(head % 0)
        line = b"HPUB %b %b.%%d %d %d\r\n" % (subject.encode(), socket.inbox.encode(), size, size + len(body))
        frame = line + head + body.replace(b"%", b"%%") + b"\r\n"
        prefix = b'{"stream":"%b"' % stream.name.encode()
        sent = answered = 0
        while answered < messages:
            count = min(window - (sent - answered), messages - sent)
            if count >= window // 4 or (count and sent + count == messages):
                socket.send(b"".join([frame % (at, at) for at in range(sent, sent + count)]))
                sent += count
            socket.receive(lambda _buffer, _filled: True)
            end = socket.buffer.rfind(b"\r\n", 0, socket.filled) + 2
            answered += socket.buffer.count(prefix, 0, end)
            socket.consume(end)


_ROWS = 10_000


class MemoryDataSource(DataSource):
    """Returns the requested number of messages, all from one batch that is made beforehand."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "memory"

    def schema(self) -> str:
        """Return the columns, those of the ``jetstream`` format."""
        return "value binary, subject string, stream string, seq bigint, timestamp timestamp"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader."""
        return _MemoryReader(int(self.options["messages"]), int(self.options["size"]))


class _MemoryReader(DataSourceReader):
    def __init__(self, messages: int, size: int) -> None:
        self._messages, self._size = messages, size

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        columns = {
            "value": pa.array([b"x" * self._size] * _ROWS, pa.binary()),
            "subject": pa.array(["limits.a"] * _ROWS),
            "stream": pa.array(["limits"] * _ROWS),
            "seq": pa.array(range(_ROWS), pa.int64()),
            "timestamp": pa.array([datetime.now(UTC)] * _ROWS, pa.timestamp("us", "UTC")),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        for start in range(0, self._messages, _ROWS):
            yield batch.slice(0, min(_ROWS, self._messages - start))


_FETCH = 1000
_Row = tuple[bytes, str, str, int, datetime]


class LibraryDataSource(DataSource):
    """Reads a limits stream with nats-py, a thousand messages at a time, and yields tuples."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "natspy"

    def schema(self) -> str:
        """Return the columns, those of the ``jetstream`` format."""
        return "value binary, subject string, stream string, seq bigint, timestamp timestamp"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Create a reader."""
        return _LibraryReader(dict(self.options))


class _LibraryReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[_Row]:
        with asyncio.Runner() as runner:
            client = runner.run(nats.connect(self._options["servers"]))
            stream, remaining = self._options["stream"], int(self._options["messages"])
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, mem_storage=True)
            reader = runner.run(client.jetstream().pull_subscribe("", stream=stream, config=config))
            while remaining:
                fetched = runner.run(reader.fetch(min(_FETCH, remaining)))
                remaining -= len(fetched)
                for message in fetched:
                    metadata = message.metadata
                    yield message.data, message.subject, stream, metadata.sequence.stream, metadata.timestamp
            runner.run(client.close())


async def publish_one_by_one(url: str, subject: str, messages: int, body: bytes) -> None:
    """Publish messages with ids, each awaited before the next."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    run = client.new_inbox()
    for number in range(messages):
        await jetstream.publish(subject, body, headers={"Nats-Msg-Id": f"{run}:{number}"})
    await client.close()


_BURST = 1 << 18
# As a publisher of JSON with traces sends them; no two messages have the same.
_HEADERS = (
    b"NATS/1.0\r\nContent-Type: application/json\r\nOrder-Id: order-%012d\r\n"
    b"traceparent: 00-0af7651916cd43dd%016x-b7ad6b7169203331-01\r\n\r\n"
)
_HEADERS_EACH = 3


def new_session() -> SparkSession:
    """Start Spark on two cores, with Python workers that can import the package and the benchmarks.

    Java's parallel collector is the one for throughput; the usual one, G1, costs the JVM a sixth more for each message.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.driver.extraJavaOptions", "-XX:+UseParallelGC")
    session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    register(session)
    return session


@cache
def _counts() -> dict[str, Column]:
    counts = {"rows": f.count(f.lit(1)), "bytes": f.sum(f.length("value")), "sum": f.sum("seq")}
    headers = {"headers": f.sum(f.size("headers"))}
    return {name: count.alias(name) for name, count in (counts | headers).items()}


def read_counts(frame: DataFrame) -> tuple[int, ...]:
    """Read a frame without storing it; returns rows, bytes of bodies, and the sum of sequences.

    Where it has headers, their number follows.

    Observed rather than aggregated: an aggregate would shuffle its results, and wait for that. Few, since Spark takes
    its time for them too; that each message is the right one is what tests compare.
    """
    observation = Observation()
    counts = [count for name, count in _counts().items() if name != "headers" or name in frame.columns]
    frame.observe(observation, *counts).write.format("noop").mode("overwrite").save()
    return tuple(observation.get.values())


class SparkSetup:
    """A server with the default ``sync_interval``, a Spark session, and the body of every message."""

    def __init__(self, server: NatsServer, session: SparkSession, body: bytes) -> None:
        self.server = server
        self.session = session
        self.body = body

    def open_stream(self, name: str) -> SourceStream:
        """Open a stream over a connection of its own."""
        return SourceStream(NatsSocket(socket_settings({"servers": self.server.url})), name)

    def create_stream(self, name: str, **config: object) -> None:
        """Create an empty stream on subjects that begin with its name."""
        stream = self.open_stream(name)
        with closing(stream.socket):
            stream.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})

    def fill_stream(self, name: str, retention: str, messages: int, *, headers: bool = False) -> None:
        """Create a stream and fill it."""
        self.create_stream(name, retention=retention, allow_direct=True)
        stream = self.open_stream(name)
        with closing(stream.socket):
            sent = 0
            while sent < messages:
                count = min(_BURST // len(self._frame(name, sent, headers=headers)), messages - sent)
                stream.socket.send(
                    b"".join(self._frame(name, number, headers=headers) for number in range(sent, sent + count))
                )
                sent += count
                # The server drops messages that arrive faster than it stores them.
                while stream.info().last < sent:
                    time.sleep(0.001)

    def _frame(self, name: str, number: int, *, headers: bool) -> bytes:
        if not headers:
            return b"PUB %b.a %d\r\n%b\r\n" % (name.encode(), len(self.body), self.body)
        block = _HEADERS % (number, number)
        sizes = (len(block), len(block) + len(self.body))
        return b"HPUB %b.a %d %d\r\n%b%b\r\n" % (name.encode(), *sizes, block, self.body)

    def load(self, name: str, partitions: int, **options: str) -> DataFrame:
        """Load a stream as a frame."""
        all_options = {"servers": self.server.url, "stream": name, "minPartitions": str(partitions), **options}
        return self.session.read.format("jetstream").options(**all_options).load()

    def verify(self, frame: DataFrame, messages: int, first: int = 1) -> None:
        """Read a frame, and raise unless it holds every message once and whole."""
        last = first + messages - 1
        expected: tuple[int, ...] = (messages, messages * len(self.body), (first + last) * messages // 2)
        if "headers" in frame.columns:
            expected += (messages * _HEADERS_EACH,)
        if (actual := read_counts(frame)) != expected:
            raise AssertionError(f"expected {expected}, found {actual}")

    def cpu(self) -> Mapping[str, float]:
        """Return the CPU seconds used by this process, the server, the JVM and its Python workers."""
        seconds = {"here": 0.0, "server": 0.0, "JVM": 0.0, "workers": 0.0}
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                name, times = process.name(), process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            kind = "here" if process == me else "JVM" if name == "java" else "workers"
            seconds["server" if process.pid == self.server.pid else kind] += times.user + times.system
        return seconds
