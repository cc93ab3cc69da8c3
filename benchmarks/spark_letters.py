"""The pipeline over dead letters on Spark: seconds of each stage, beside bare pipelined gets and the client library.

The queue holds jobs of 1 KiB that have used up their one delivery; the dead letter queue holds the server's advisory
of each, and for every other one a worker's record of its error, of a hundred kinds. Stages follow one another as in a
nightly run, each on what the one before it wrote: *look* is the driver's part of the scan, *prove* the tasks' part
with the bodies, up to the snapshot on disk; *bulk redrive* brings all of them back, every tenth one repaired. The
floor gets as many jobs by their sequences over one bare connection, a thousand on their way at a time, and looks at
nothing. The naive loop gets advisories with the client library, and each one's job, one by one; it does a part of the
letters, and nothing of the rest of *prove*. A round counts only if every letter is there once, and in the end every
job waits once in its queue and no entry is left. Each round has a queue of its own.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.dead_letters import read_letters, repair, snapshot, triage, write_report
from benchmarks.spark_fill import BODY, Fill
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

WINDOW = 1000
NAIVE = 2_000
MEBIBYTE = 2**20
# Seconds between two looks at the memory of the processes.
LOOK = 0.2


class Memory:
    """The most memory that a process and its Python children have held together, looked at while it runs."""

    def __init__(self) -> None:
        self.driver = 0.0
        self.workers = 0.0
        self.jvm = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(LOOK):
            self.driver = max(self.driver, me.memory_info().rss / MEBIBYTE)
            for child in me.children(recursive=True):
                try:
                    held = child.memory_info().rss / MEBIBYTE
                    if "python" in child.name():
                        self.workers = max(self.workers, held)
                    elif child.name() == "java":
                        self.jvm = max(self.jvm, held)
                except psutil.Error:
                    continue

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join()


def floor(url: str, queue: WorkQueue, letters: int, *, direct: bool = False) -> float:
    """Get all jobs by their sequences over a bare connection."""
    with closing(NatsSocket(socket_settings({"servers": url}))) as wire:
        topic = f"$JS.API.{'DIRECT.GET' if direct else 'STREAM.MSG.GET'}.{queue.name}"
        begun, asked, answered = time.perf_counter(), 0, 0
        mark, tail = wire.sid + b" ", b""
        while answered < letters:
            batch = range(asked + 1, min(asked + WINDOW - (asked - answered), letters) + 1)
            requests = []
            for sequence in batch:
                body = b'{"seq":%d}' % sequence
                requests.append(
                    b"PUB %b %b %d\r\n%b\r\n" % (topic.encode(), wire.new_reply_subject().encode(), len(body), body)
                )
            asked += len(batch)
            if requests:
                wire.send(b"".join(requests))
            wire.receive(lambda _buffer, _filled: True)
            data = tail + bytes(wire.buffer[: wire.filled])
            answered += data.count(mark)
            # A mark may be cut in two.
            tail = data[-len(mark) + 1 :]
            wire.consume(wire.filled)
        return time.perf_counter() - begun


async def naive(url: str, queue: WorkQueue, letters: int) -> float:
    """Get advisories and jobs as people do with the client library alone, one by one."""
    import nats

    client = await nats.connect(url)
    jetstream = client.jetstream()
    begun, found, entry = time.perf_counter(), [], 0
    deaths = f"{MAX_DELIVERIES}.{queue.name}.*"
    for _ in range(letters):
        message = await jetstream.get_msg(f"{queue.name}-dead", entry + 1, subject=deaths, next=True)
        entry = message.seq or 0
        sequence = json.loads(message.data or b"")["stream_seq"]
        found.append((sequence, (await jetstream.get_msg(queue.name, sequence)).data))
    took = time.perf_counter() - begun
    await client.close()
    if len({sequence for sequence, _ in found}) != letters:
        raise AssertionError(f"expected {letters} letters, found {len(found)}")
    return took


def fixed(letters: DataFrame) -> DataFrame:
    """Repair every tenth letter."""
    body = f.when(f.col("sequence") % 10 == 0, f.lit("fixed").cast("binary")).otherwise(f.col("body"))
    return letters.withColumn("body", body)


def pipeline(session: SparkSession, url: str, queue: WorkQueue, letters: int, folder: Path) -> dict[str, float]:
    """Run every stage, and measure it."""
    took: dict[str, float] = {}
    begun = time.perf_counter()

    def ended(stage: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        took[stage], begun = now - begun, now

    found = read_letters(session, queue, {"servers": url, "timeout": "30"})
    ended("look")
    kept = snapshot(found, str(folder / "letters"))
    ended("prove, with bodies, to the snapshot")
    count, different, size = kept.agg(f.count("*"), f.count_distinct("sequence"), f.sum(f.length("body"))).collect()[0]
    if (count, different, size) != (letters, letters, letters * len(BODY)):
        raise AssertionError(f"expected {letters} letters, found {count}, {different} of them different")
    begun = time.perf_counter()
    groups = triage(kept).groups.count()
    ended("triage")
    summary = write_report(kept, str(folder / "report"), airflow_url="http://localhost:8080")
    ended("report")
    if summary.letters != letters or summary.causes != groups:
        raise AssertionError(f"expected {letters} letters of {groups} causes, found {summary}")
    begun = time.perf_counter()
    repaired = repair(kept, fixed, str(folder / "repaired"))
    ended("repair")
    if repaired.where("repaired").count() != letters // 10:
        raise AssertionError("expected every tenth letter to be repaired")
    begun = time.perf_counter()
    report = redrive_letters(session, repaired, queue, RedriveRequest(run="bench"), {"servers": url, "timeout": "30"})
    ended("bulk redrive")
    report.raise_for_failures()
    if len(report.redriven) != letters:
        raise AssertionError(f"expected {letters} letters to be redriven, found {len(report.redriven)}")
    return took


async def require_exact(url: str, queue: WorkQueue, letters: int) -> None:
    """Make sure that every job waits once and nothing is left; then let go of it all."""
    async with connect(connection_settings({"servers": (url,), "timeout": 60})) as connection:
        waiting = (await connection.api(f"CONSUMER.INFO.{queue.name}.worker"))["num_pending"]
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
        if waiting != letters or entries:
            raise AssertionError(f"{waiting} of {letters} jobs wait, {entries} entries are left")
        for stream in (queue, *queue.companions()):
            await connection.api(f"STREAM.DELETE.{stream.name}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--direct", action="store_true", help="let the queue allow direct gets, and the floor use them")
    arguments = parser.parse_args()
    letters = arguments.letters
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.sql.shuffle.partitions", "4").config("spark.driver.memory", "1g")
    session = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    with NatsServer() as server, tempfile.TemporaryDirectory() as scratch:
        warm = asyncio.run(Fill(server.url, "warm", NAIVE).run())
        pipeline(session, server.url, warm, NAIVE, Path(scratch) / "warm")
        taken: dict[str, list[float]] = {}
        memory = Memory()
        for number in range(arguments.rounds):
            queue = asyncio.run(Fill(server.url, f"orders{number}", letters, allow_direct=arguments.direct).run())
            seconds = {"floor: pipelined single gets": floor(server.url, queue, letters, direct=arguments.direct)}
            some = min(NAIVE, letters)
            seconds["naive loop, get and get, for as many"] = (
                asyncio.run(naive(server.url, queue, some)) * letters / some
            )
            seconds |= pipeline(session, server.url, queue, letters, Path(scratch) / str(number))
            asyncio.run(require_exact(server.url, queue, letters))
            shutil.rmtree(Path(scratch) / str(number))
            for stage, took in seconds.items():
                taken.setdefault(stage, []).append(took)
        memory.stop()
    session.stop()
    rows = [
        (stage, f"{statistics.median(each):.1f}", f"{letters / statistics.median(each):,.0f}")
        for stage, each in taken.items()
    ]
    print(text_table(("stage", "seconds", "letters/s"), rows), flush=True)
    print(f"peak MiB: driver {memory.driver:.0f}, its JVM {memory.jvm:.0f}, largest Python worker {memory.workers:.0f}")


if __name__ == "__main__":
    main()
