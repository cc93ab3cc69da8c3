"""Reading and writing streams with Spark's data source, beside the client library and beside bare sockets.

Fairness: every way reads the same stream (200-byte bodies, no headers) or writes the same rows to an empty one, on
one server with its default ``sync_interval``, in one process, after a round that warms up and doesn't count. Ways
take turns; figures are medians, with the range of the ratios *within a round* to the floor of that round. A round
counts only if every message was seen, or is stored, exactly once. The floor of reading receives from a consumer
without looking at what comes; the floor of writing sends rows and waits for an acknowledgement of every five
hundredth. The client library reads and writes a tenth of the messages.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark import register
from airflow_provider_jetstream.spark.columns import Columns
from airflow_provider_jetstream.spark.connection_options import wire_settings
from airflow_provider_jetstream.spark.options import read_options
from airflow_provider_jetstream.spark.planning import ranges
from airflow_provider_jetstream.spark.reading import read_range
from airflow_provider_jetstream.spark.streams import Stream
from airflow_provider_jetstream.spark.wire import Wire
from testbed.nats_server import NatsServer
from testbed.table import table

BODY = b"x" * 200
PULL = 10_000
LIBRARY_SHARE = 10


class Bench:
    """A server, a session, and the streams that ways read and write.

    :param server: the server
    :param session: Spark
    :param messages: how many messages the ways that are fast read and write
    """

    def __init__(self, server: NatsServer, session: SparkSession, messages: int) -> None:
        self.server = server
        self.session = session
        self.messages = messages
        self.frame = session.range(0, messages, 1, 2).select(
            f.lit(BODY.decode()).alias("value"), f.lit("out.a").alias("subject")
        )

    def open(self, name: str) -> Stream:
        """Open a stream over a connection of its own."""
        return Stream(Wire(wire_settings({"servers": self.server.url})), name)

    def fill(self, name: str, retention: str) -> None:
        """Make a stream and fill it."""
        stream = self.open(name)
        with closing(stream.wire):
            config = {"name": name, "subjects": [f"{name}.>"], "retention": retention, "allow_direct": True}
            stream.api(f"STREAM.CREATE.{name}", config)
            frame = b"PUB %b.a %d\r\n%b\r\n" % (name.encode(), len(BODY), BODY)
            for _ in range(self.messages // 500):
                stream.wire.send(frame * 500)
                # One question for each burst keeps the server from falling behind.
                stream.facts()
            while stream.facts().last < self.messages:
                time.sleep(0.01)

    def load(self, name: str, partitions: int = 1) -> DataFrame:
        """Load a stream."""
        options = {"servers": self.server.url, "stream": name, "minPartitions": str(partitions)}
        return self.session.read.format("jetstream").options(**options).load()

    # Reading: each gives how many messages it saw.

    def read_floor(self) -> int:
        """Receive what a consumer sends and look at nothing."""
        stream = self.open("limits")
        with closing(stream.wire) as wire:
            config = {"name": f"floor{uuid4().hex}", "ack_policy": "none", "mem_storage": True}
            name = str(config["name"])
            stream.api(f"CONSUMER.CREATE.limits.{name}", {"stream_name": "limits", "config": config})
            pull = b'{"batch":%d,"expires":20000000000}' % PULL
            request = b"PUB $JS.API.CONSUMER.MSG.NEXT.limits.%b %b %d\r\n%b\r\n" % (
                name.encode(),
                wire.reply().encode(),
                len(pull),
                pull,
            )
            wire.send(request * 2)
            seen, asked = 0, 2
            while seen < self.messages:
                wire.receive(lambda _buffer, filled: filled >= 1 << 20)
                # The last line feed but one is before a body: messages are counted by their bodies' ends.
                end = wire.buffer.rfind(b"\r\n", 0, wire.filled) + 2
                seen += wire.buffer.count(b"x\r\n", 0, end)
                wire.consume(end)
                while asked * PULL - seen <= PULL:
                    wire.send(request)
                    asked += 1
            stream.api(f"CONSUMER.DELETE.limits.{name}")
        return seen

    def read_in_bulk(self) -> int:
        """Read as a task does, without Spark."""
        return self._read_range("limits", "consumer")

    def read_direct(self) -> int:
        """Read a work queue as a task does, without Spark."""
        return self._read_range("queue", "direct")

    def _read_range(self, name: str, method: str) -> int:
        options = read_options({"stream": name}, "read")
        stream = self.open(name)
        with closing(stream.wire):
            facts = stream.facts()
        (part,) = ranges(1, facts.last, options, facts, method, ())
        names = ("value", "subject", "stream", "seq", "timestamp")
        given = {"servers": self.server.url}
        return sum(batch.num_rows for batch in read_range(given, options, Columns(names, (True,) * len(names)), part))

    def read_with_spark(self) -> int:
        """Read a limits stream with Spark."""
        return self._summed(self.load("limits"))

    def read_queue_with_spark(self) -> int:
        """Read a work queue with Spark."""
        return self._summed(self.load("queue", 2))

    def _summed(self, frame: DataFrame) -> int:
        count, size, last = frame.agg(f.count("*"), f.sum(f.length("value")), f.max("seq")).collect()[0]
        if size != self.messages * len(BODY) or last != self.messages:
            raise AssertionError(f"expected {self.messages} messages whole, found {count}, the last of them {last}")
        return int(count)

    def read_with_library(self) -> int:
        """Fetch a tenth of the stream with the client library, a thousand at a time."""
        return asyncio.run(self._fetched(self.messages // LIBRARY_SHARE))

    async def _fetched(self, most: int) -> int:
        import nats
        from nats.js.api import AckPolicy, ConsumerConfig

        client = await nats.connect(self.server.url)
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True)
        reader = await client.jetstream().pull_subscribe("", stream="limits", config=config)
        seen = 0
        while seen < most:
            seen += len(await reader.fetch(min(1000, most - seen)))
        await client.close()
        return seen

    # Writing: each gives how many messages are stored.

    def _emptied(self) -> Stream:
        stream = self.open("out")
        stream.api("STREAM.PURGE.out", {})
        return stream

    def write_floor(self) -> int:
        """Send rows, and ask for an acknowledgement of every five hundredth."""
        stream = self._emptied()
        with closing(stream.wire) as wire:
            plain = b"PUB out.a %d\r\n%b\r\n" % (len(BODY), BODY)
            for _ in range(self.messages // 500):
                wire.send(plain * 499)
                wire.request("out.a", BODY)
        return self._stored()

    def write_with_spark(self) -> int:
        """Write rows with Spark."""
        self._emptied().wire.close()
        options = {"servers": self.server.url, "stream": "out"}
        self.frame.write.format("jetstream").options(**options).mode("append").save()
        return self._stored()

    def write_with_library(self) -> int:
        """Publish a tenth of the rows with the client library, a thousand on their way at a time."""
        self._emptied().wire.close()
        asyncio.run(self._published(self.messages // LIBRARY_SHARE))
        return self._stored()

    async def _published(self, count: int) -> None:
        import nats

        client = await nats.connect(self.server.url)
        jetstream = client.jetstream(publish_async_max_pending=1000)
        for _ in range(count):
            await jetstream.publish_async("out.a", BODY, wait_stall=10)
        await jetstream.publish_async_completed()
        await client.close()

    def _stored(self) -> int:
        stream = self.open("out")
        with closing(stream.wire):
            return int(stream.api("STREAM.INFO.out")["state"]["messages"])


Way = Callable[[Bench], int]
READS: dict[str, Way] = {
    "bare socket, limits (floor)": Bench.read_floor,
    "a task's read, limits": Bench.read_in_bulk,
    "Spark, limits": Bench.read_with_spark,
    "a task's read, work queue": Bench.read_direct,
    "Spark, work queue, 2 tasks": Bench.read_queue_with_spark,
    "nats-py fetch(1000), limits": Bench.read_with_library,
}
WRITES: dict[str, Way] = {
    "bare socket (floor)": Bench.write_floor,
    "Spark, ids and every row acknowledged, 2 tasks": Bench.write_with_spark,
    "nats-py publish_async, window 1000": Bench.write_with_library,
}


def _measure(bench: Bench, ways: dict[str, Way], rounds: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in ways}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            expected = bench.messages // (LIBRARY_SHARE if "nats-py" in name else 1)
            begun, cpu = time.perf_counter(), time.process_time()
            found = way(bench)
            took, used = time.perf_counter() - begun, time.process_time() - cpu
            if found != expected:
                raise AssertionError(f"{name}: expected {expected} messages, found {found}")
            if number:
                rates[name].append(expected / took)
                spent[name].append(used / expected * 1e6)
    floor = next(iter(rates.values()))
    rows: list[tuple[object, ...]] = []
    for name, found_rates in rates.items():
        ratios = sorted(rate / base for rate, base in zip(found_rates, floor, strict=True))
        cpu_shown = "" if "Spark" in name else f"{statistics.median(spent[name]):.2f}"
        rows.append(
            (
                name,
                f"{statistics.median(found_rates):,.0f}",
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                cpu_shown,
            )
        )
    print(table(("way", "messages/s", "of the floor", "CPU µs/message here"), rows), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    register(session)
    with NatsServer() as server:
        bench = Bench(server, session, arguments.messages // 500 * 500)
        bench.fill("limits", "limits")
        bench.fill("queue", "workqueue")
        stream = bench.open("out")
        stream.api("STREAM.CREATE.out", {"name": "out", "subjects": ["out.>"]})
        _measure(bench, READS, arguments.rounds)
        _measure(bench, WRITES, arguments.rounds)
    session.stop()


if __name__ == "__main__":
    main()
