"""A streaming query at a steady rate for half an hour, its lag, and the memory of each of its processes.

A publisher in a process of its own stores messages of 200 bytes, each with its number, and each acknowledged. A query
of the format `jetstream` (trigger of a second, two tasks) gives every batch to `foreachBatch`, which writes sequences
and bodies as Parquet, by the number of the batch. *Lag* is the stream's last sequence less the last one of the batches
that are written. Every ten seconds lag and memory are sampled. Afterwards the files are read: the run counts only if
every message is there once, at its sequence, and whole.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from benchmarks.report import Goal, Sample, Table, Way, Workload
from benchmarks.spark_setup import SparkSetup, new_session
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# Digits at the start of each body: the message's number, from 1 on.
NUMBER_DIGITS = 12
# Seconds between two bursts.
_BURST_SECONDS = 0.02


class SteadyPublisher:
    """A running publisher.

    :ivar stored: how many messages are stored, once it has stopped
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.stored = 0
        self._process = process

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def stop(self) -> None:
        """Publish no more, and wait until all is stored."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise SystemExit("the publisher failed")
        self.stored = json.loads(output)


@contextmanager
def steady_publisher(url: str, subject: str, rate: int, size: int) -> Iterator[SteadyPublisher]:
    """Publish messages of one size until the publisher is stopped or the block ends."""
    command = [sys.executable, "-m", "benchmarks.spark_soak", "--publish", url, subject, str(rate), str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield SteadyPublisher(process)
    finally:
        process.kill()
        process.wait()


def _await_acknowledgements(socket: NatsSocket, expected: int) -> None:
    while expected:
        socket.receive(lambda _buffer, _filled: True)
        position = 0
        while frame := socket.next_frame(position):
            position = frame.end
            if not frame.sid:
                socket.handle_control(frame)
                continue
            answer = json.loads(socket.buffer[frame.offsets[5] : frame.offsets[6]])
            if "seq" not in answer:
                raise SystemExit(f"a message isn't stored: {answer}")
            expected -= 1
        socket.consume(position)


def _publish(url: str, subject: str, rate: int, size: int) -> int:
    """Publish until standard input is closed; returns how many messages are stored."""
    filler = b"x" * (size - NUMBER_DIGITS)
    stored = 0
    with closing(NatsSocket(socket_settings({"servers": url}))) as socket:
        line = f"PUB {subject} {socket.new_reply_subject()} {size}\r\n".encode()
        began = time.monotonic()
        while not select.select([sys.stdin], [], [], _BURST_SECONDS)[0]:
            due = int((time.monotonic() - began) * rate)
            socket.send(b"".join(b"%b%012d%b\r\n" % (line, number, filler) for number in range(stored + 1, due + 1)))
            _await_acknowledgements(socket, due - stored)
            stored = due
    return stored


def publish_steadily(arguments: list[str]) -> None:
    """Publish, and print how many messages are stored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("subject")
    parser.add_argument("rate", type=int)
    parser.add_argument("size", type=int)
    options = parser.parse_args(arguments)
    print(_publish(options.url, options.subject, options.rate, options.size))


STREAM = "soak"
SIZE = 200
_EVERY = 10.0
_WINDOW_MINUTES = 5
# The JVM compiles hot code and fills its first collections meanwhile; these samples don't count.
_WARM_UP_SECONDS = 60.0
_DRAIN_SECONDS = 120.0
_MEBIBYTE = 2**20
_LAG, _BATCH = "lag, messages", "batch s"
_HEAP = "JVM heap in use, least MiB"
_PROCESSES = {"driver": "driver MiB", "JVM": "JVM MiB", "planner": "planner MiB", "workers": "workers MiB"}
# A third against the first one. A JVM takes what its heap may have before it collects, so its memory gets more room.
_MOST_LAG, _MOST_MEMORY, _MOST_JVM = 1.5, 1.1, 1.25


@dataclass(frozen=True)
class SoakSample:
    """What was seen at one time.

    :param at: seconds since the samples began
    :param written: the last sequence of the batches that are written
    :param lag: the stream's last sequence less that one
    :param batch: seconds of the last batch
    :param heap: MiB of the JVM's heap in use
    :param memory: resident MiB by kind of process
    """

    at: float
    written: int
    lag: int
    batch: float
    heap: float
    memory: dict[str, float]


def memory_by_kind(publisher: int) -> dict[str, float]:
    """Return resident MiB of this process, its JVM, Spark's planner of the query and its workers, and of the server."""
    kinds = dict.fromkeys([*_PROCESSES, "server"], 0.0)
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            command, resident = " ".join(process.cmdline()), process.memory_info().rss / _MEBIBYTE
            # The JVM's copy of itself, until it executes Python, has the JVM's memory.
            is_copy = process.name() != "java" and "/bin/java" in command
            if is_copy or process.pid == publisher:
                continue
            if process == me:
                kind = "driver"
            elif "nats-server" in process.name():
                kind = "server"
            elif process.name() == "java":
                kind = "JVM"
            else:
                kind = "planner" if "streaming_source_runner" in command else "workers"
        except psutil.NoSuchProcess:
            continue
        kinds[kind] += resident
    return kinds


class Soak:
    """A query that follows a stream into files."""

    def __init__(self, setup: SparkSetup, folder: Path) -> None:
        self._setup = setup
        self._rows = folder / "rows"
        loaded = setup.session.readStream.format("jetstream").option("startingOffsets", "earliest")
        options = {"servers": setup.server.url, "stream": STREAM, "minPartitions": "2"}
        written = loaded.options(**options).load().writeStream.foreachBatch(self._write_batch)
        written = written.option("checkpointLocation", str(folder / "checkpoint"))
        self._query: StreamingQuery = written.trigger(processingTime="1 second").start()

    def _write_batch(self, batch: DataFrame, number: int) -> None:
        # A batch that runs again replaces its files.
        batch.select("seq", "value").write.mode("overwrite").parquet(str(self._rows / f"batch={number}"))

    def sample(self, at: float, publisher: int) -> SoakSample:
        """Look at the query, the stream and the processes."""
        if error := self._query.exception():
            raise SystemExit(f"the query failed: {error}")
        stream = self._setup.open_stream(STREAM)
        with closing(stream.socket):
            last = stream.info().last
        progress = self._query.lastProgress
        written = self._last_written()
        jvm: Any = self._setup.session.sparkContext._jvm  # noqa: SLF001
        runtime = jvm.java.lang.Runtime.getRuntime()
        heap = (runtime.totalMemory() - runtime.freeMemory()) / _MEBIBYTE
        batch = progress.batchDuration / 1000 if progress else 0.0
        return SoakSample(at, written, last - written, batch, heap, memory_by_kind(publisher))

    def close(self) -> None:
        """End the query."""
        self._query.stop()

    def _last_written(self) -> int:
        progress = self._query.lastProgress
        end = progress.sources[0].endOffset if progress else ""
        positions = json.loads(end)["streams"].values() if end else ()
        return max((int(position["seq"]) for position in positions), default=0)

    def finish(self, messages: int) -> None:
        """Wait until all is written, end the query, and raise unless every message was written once and whole."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._last_written() < messages and time.monotonic() < deadline:
            self._query.awaitTermination(1)
        self.close()
        rows = self._setup.session.read.parquet(str(self._rows))
        number = f.substring("value", 1, NUMBER_DIGITS).cast("string").cast("bigint")
        counts = (
            *(f.count(f.lit(1)), f.count_distinct("seq"), f.min("seq"), f.max("seq")),
            *(f.sum(f.length("value")), f.count_if(number != f.col("seq"))),
        )
        found = tuple(rows.agg(*counts).collect()[0])
        if found != (expected := (messages, messages, 1, messages, messages * SIZE, 0)):
            raise SystemExit(f"expected {expected}, found {found}")


def run_soak(session: SparkSession, minutes: float, rate: int, kept: Path | None) -> tuple[list[SoakSample], int]:
    """Run for so many minutes after the warm-up; returns the samples, and how many messages were written."""
    samples: list[SoakSample] = []
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="soak-") as folder:
        setup = SparkSetup(server, session, b"")
        setup.create_stream(STREAM)
        with (
            closing(Soak(setup, Path(folder))) as soak,
            steady_publisher(server.url, f"{STREAM}.a", rate, SIZE) as publisher,
        ):
            due = began = time.monotonic() + _WARM_UP_SECONDS
            while due <= began + minutes * 60:
                time.sleep(max(0.0, due - time.monotonic()))
                samples.append(soak.sample(time.monotonic() - began, publisher.pid))
                print(json.dumps(asdict(samples[-1])), file=sys.stderr, flush=True)
                if kept:
                    kept.write_text(json.dumps([asdict(sample) for sample in samples]))
                due += _EVERY
            publisher.stop()
            soak.finish(publisher.stored)
    return samples, publisher.stored


def _third(samples: list[SoakSample], number: int) -> list[SoakSample]:
    size = len(samples) // 3
    return samples[number * size : (number + 1) * size]


def _growth(samples: list[SoakSample], figure: str) -> float:
    """Return a figure's median in the last third as a part of that in the first; of the heap the least, not the median.

    The least heap in use is what a collection has left, the rest is garbage of before the next one.
    """
    thirds = [
        min(sample.heap for sample in third)
        if figure == _HEAP
        else statistics.median(sample.lag if figure == _LAG else sample.memory[figure] for sample in third)
        for third in (_third(samples, 0), _third(samples, 2))
    ]
    return thirds[1] / thirds[0]


def _windows(samples: list[SoakSample]) -> list[Way]:
    ways: list[Way] = []
    size = int(_WINDOW_MINUTES * 60 / _EVERY)
    for start in range(0, len(samples) - 1, size):
        window = samples[start : start + size + 1]
        least = min(sample.heap for sample in window)
        measured = [
            Sample(
                after.written - before.written,
                after.at - before.at,
                extra={
                    _LAG: after.lag,
                    _BATCH: after.batch,
                    **{text: after.memory[kind] for kind, text in _PROCESSES.items()},
                    _HEAP: least,
                    "server MiB": after.memory["server"],
                },
            )
            for before, after in pairwise(window)
        ]
        minute = start * _EVERY / 60
        ways.append(Way(f"{minute:g} to {minute + len(measured) * _EVERY / 60:g} min", measured))
    return ways


def workload(samples: list[SoakSample], messages: int, rate: int) -> Workload:
    """Make the section of samples."""
    table = Table(f"{rate:,} messages/s", "messages", _windows(samples))
    seconds = samples[-1].at - samples[0].at
    of = "last third beside the first"
    goals = [
        Goal("messages/s read", (samples[-1].written - samples[0].written) / seconds, rate * 0.99),
        Goal(f"median lag, {of}", _growth(samples, _LAG), _MOST_LAG, at_most=True),
        *(
            Goal(f"median memory of {kind}, {of}", _growth(samples, kind), most, at_most=True)
            for kind, most in zip(_PROCESSES, (_MOST_MEMORY, _MOST_JVM, _MOST_MEMORY, _MOST_MEMORY), strict=True)
        ),
        Goal(f"least heap in use of the JVM, {of}", _growth(samples, _HEAP), _MOST_JVM, at_most=True),
    ]
    text = f"{' '.join((__doc__ or '').split())} Written once and whole: {messages:,} messages."
    text += " The *planner* is the Python process in which Spark asks the source for offsets; memory is resident."
    return Workload("spark soak", "Streaming for half an hour", "spark_soak", text, [table], goals, "samples")


def main() -> int:
    """Run and print the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=int, default=5000, help="messages a second")
    parser.add_argument("--keep", type=Path, help="a file to which the samples are written as they come")
    options = parser.parse_args()
    session = new_session()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    samples, messages = run_soak(session, options.minutes, options.rate, options.keep)
    session.stop()
    section = workload(samples, messages, options.rate)
    print("\n".join(section.lines()))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--publish"]:
        publish_steadily(sys.argv[2:])
    else:
        sys.exit(main())
