"""What the benchmarks of the data source run on: a server, streams with messages, a session, and who uses the CPU."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from testbed.nats_server import NatsServer

_BURST = 1 << 18


def new_session() -> SparkSession:
    """Start Spark on two cores, with workers that find the package and these programs."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    register(session)
    return session


def read(frame: DataFrame) -> tuple[int, ...]:
    """Read a frame into nothing, and tell what came by: an aggregate would shuffle its results, and wait for that.

    :param frame: of messages
    :return: how many rows, how many bytes of bodies, the lowest, the highest and the sum of all sequences
    """
    seen, seq = Observation(), f.col("seq")
    counts = {
        "rows": f.count(f.lit(1)),
        "bytes": f.sum(f.length("value")),
        "lowest": f.min(seq),
        "highest": f.max(seq),
        "sum": f.sum(seq),
    }
    asked = [count.alias(name) for name, count in counts.items()]
    frame.observe(seen, *asked).write.format("noop").mode("overwrite").save()
    return tuple(seen.get[name] for name in counts)


class Bed:
    """A server with the server's default ``sync_interval``, and a session.

    :param server: the server
    :param session: Spark
    :param body: of every message
    """

    def __init__(self, server: NatsServer, session: SparkSession, body: bytes) -> None:
        self.server = server
        self.session = session
        self.body = body

    def open(self, name: str) -> SourceStream:
        """Open a stream over a connection of its own."""
        return SourceStream(NatsSocket(socket_settings({"servers": self.server.url})), name)

    def make(self, name: str, **config: object) -> None:
        """Make an empty stream on subjects that begin with its name."""
        stream = self.open(name)
        with closing(stream.socket):
            stream.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})

    def fill(self, name: str, retention: str, messages: int) -> None:
        """Make a stream and fill it."""
        self.make(name, retention=retention, allow_direct=True)
        stream = self.open(name)
        with closing(stream.socket):
            frame = b"PUB %b.a %d\r\n%b\r\n" % (name.encode(), len(self.body), self.body)
            sent = 0
            while sent < messages:
                now = min(_BURST // len(frame), messages - sent)
                stream.socket.send(frame * now)
                sent += now
                # The server drops what comes faster than it stores.
                while stream.info().last < sent:
                    time.sleep(0.001)

    def load(self, name: str, partitions: int, **options: str) -> DataFrame:
        """Load a stream."""
        given = {"servers": self.server.url, "stream": name, "minPartitions": str(partitions), **options}
        return self.session.read.format("jetstream").options(**given).load()

    def look(self, frame: DataFrame, messages: int, first: int = 1) -> None:
        """Read a frame, and fail unless it holds every message once and whole."""
        last = first + messages - 1
        expected = (messages, messages * len(self.body), first, last, (first + last) * messages // 2)
        if (found := read(frame)) != expected:
            raise AssertionError(f"expected {expected}, found {found}")

    def cpu(self) -> Mapping[str, float]:
        """Tell how many CPU seconds this process, the server, the JVM and its Python workers have used."""
        used = {"here": 0.0, "server": 0.0, "JVM": 0.0, "workers": 0.0}
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                name, times = process.name(), process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            kind = "here" if process == me else "JVM" if name == "java" else "workers"
            used["server" if process.pid == self.server.pid else kind] += times.user + times.system
        return used
