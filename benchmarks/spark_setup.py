"""The setup of the data source benchmarks: a server, streams with messages, a session, and CPU time by process."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

import psutil
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from testbed.nats_server import NatsServer

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
