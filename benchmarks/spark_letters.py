"""The pipeline over dead letters on Spark: seconds of each stage, beside bare pipelined gets and nats-py.

The queue holds jobs of 1 KiB that have used up their one delivery; the dead letter queue holds the server's advisory
of each, and for every other one a worker's record of its error, of a hundred kinds. Stages follow one another as in a
nightly run, each on the output of the one before: *scan* is the driver's part of the scan, *prove* the tasks' part
with the bodies, up to the snapshot on disk; *bulk redrive* redrives all of them, every tenth one repaired. The floor
gets as many jobs by their sequences over one bare connection, a thousand in flight, and doesn't parse the answers. The
naive loop gets advisories with nats-py, and each one's job, one by one; it does a part of the letters, and nothing of
the rest of *prove*. A round counts only if every letter is there once, and in the end every job waits once in its queue
and no entry is left. Each round has a queue of its own.
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
from benchmarks.spark_fill import BODY, DeadQueue
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

WINDOW = 1000
NAIVE = 2_000
MEBIBYTE = 2**20
# Seconds between two samples of the processes' memory.
POLL_SECONDS = 0.2


class Memory:
    """The maximum memory of this process, its JVM and its Python workers, sampled while it runs."""

    def __init__(self) -> None:
        self.driver = 0.0
        self.workers = 0.0
        self.jvm = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(POLL_SECONDS):
            self.driver = max(self.driver, me.memory_info().rss / MEBIBYTE)
            for child in me.children(recursive=True):
                try:
                    memory = child.memory_info().rss / MEBIBYTE
                    if "python" in child.name():
                        self.workers = max(self.workers, memory)
                    elif child.name() == "java":
                        self.jvm = max(self.jvm, memory)
                except psutil.Error:
                    continue

    def stop(self) -> None:
        """Stop sampling."""
        self._done.set()
        self._thread.join()


def get_all_jobs(url: str, queue: WorkQueue, letters: int, *, direct: bool = False) -> float:
    """Get all jobs by their sequences over a bare connection."""
    with closing(NatsSocket(socket_settings({"servers": url}))) as socket:
        subject = f"$JS.API.{'DIRECT.GET' if direct else 'STREAM.MSG.GET'}.{queue.name}"
        started, requested, answered = time.perf_counter(), 0, 0
        prefix, tail = socket.sid + b" ", b""
        while answered < letters:
            batch = range(requested + 1, min(requested + WINDOW - (requested - answered), letters) + 1)
            requests = []
            for sequence in batch:
                body = b'{"seq":%d}' % sequence
                requests.append(
                    b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), socket.new_reply_subject().encode(), len(body), body)
                )
            requested += len(batch)
            if requests:
                socket.send(b"".join(requests))
            socket.receive(lambda _buffer, _filled: True)
            data = tail + bytes(socket.buffer[: socket.filled])
            answered += data.count(prefix)
            # A prefix may be split between two reads.
            tail = data[-len(prefix) + 1 :]
            socket.consume(socket.filled)
        return time.perf_counter() - started


async def naive_loop(url: str, queue: WorkQueue, letters: int) -> float:
    """Get advisories and jobs with nats-py alone, one by one."""
    import nats

    client = await nats.connect(url)
    jetstream = client.jetstream()
    started, scanned, entry = time.perf_counter(), [], 0
    deaths = f"{MAX_DELIVERIES}.{queue.name}.*"
    for _ in range(letters):
        message = await jetstream.get_msg(f"{queue.name}-dead", entry + 1, subject=deaths, next=True)
        entry = message.seq or 0
        sequence = json.loads(message.data or b"")["stream_seq"]
        scanned.append((sequence, (await jetstream.get_msg(queue.name, sequence)).data))
    durations = time.perf_counter() - started
    await client.close()
    if len({sequence for sequence, _ in scanned}) != letters:
        raise AssertionError(f"expected {letters} letters, found {len(scanned)}")
    return durations


def repair_tenth(letters: DataFrame) -> DataFrame:
    """Repair every tenth letter."""
    body = f.when(f.col("sequence") % 10 == 0, f.lit("fixed").cast("binary")).otherwise(f.col("body"))
    return letters.withColumn("body", body)


def pipeline(session: SparkSession, url: str, queue: WorkQueue, letters: int, folder: Path) -> dict[str, float]:
    """Run every stage, and measure it."""
    durations: dict[str, float] = {}
    started = time.perf_counter()

    def ended(stage: str) -> None:
        nonlocal started
        now = time.perf_counter()
        durations[stage], started = now - started, now

    scanned = read_letters(session, queue, {"servers": url, "timeout": "30"})
    ended("scan")
    stored = snapshot(scanned, str(folder / "letters"))
    ended("prove, with bodies, to the snapshot")
    count, different, size = stored.agg(f.count("*"), f.count_distinct("sequence"), f.sum(f.length("body"))).collect()[
        0
    ]
    if (count, different, size) != (letters, letters, letters * len(BODY)):
        raise AssertionError(f"expected {letters} letters, found {count}, {different} of them different")
    started = time.perf_counter()
    groups = triage(stored).groups.count()
    ended("triage")
    summary = write_report(stored, str(folder / "report"), airflow_url="http://localhost:8080")
    ended("report")
    if summary.letters != letters or summary.causes != groups:
        raise AssertionError(f"expected {letters} letters of {groups} causes, found {summary}")
    started = time.perf_counter()
    repaired = repair(stored, repair_tenth, str(folder / "repaired"))
    ended("repair")
    if repaired.where("repaired").count() != letters // 10:
        raise AssertionError("expected every tenth letter to be repaired")
    started = time.perf_counter()
    report = redrive_letters(session, repaired, queue, RedriveRequest(run="bench"), {"servers": url, "timeout": "30"})
    ended("bulk redrive")
    report.raise_for_failures()
    if len(report.redriven) != letters:
        raise AssertionError(f"expected {letters} letters to be redriven, found {len(report.redriven)}")
    return durations


async def require_exact(url: str, queue: WorkQueue, letters: int) -> None:
    """Raise unless every job waits once and no entry is left; then delete the queue."""
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
        warm = asyncio.run(DeadQueue(server.url, "warm", NAIVE).run())
        pipeline(session, server.url, warm, NAIVE, Path(scratch) / "warm")
        timings: dict[str, list[float]] = {}
        memory = Memory()
        for number in range(arguments.rounds):
            queue = asyncio.run(DeadQueue(server.url, f"orders{number}", letters, allow_direct=arguments.direct).run())
            seconds = {
                "floor: pipelined single gets": get_all_jobs(server.url, queue, letters, direct=arguments.direct)
            }
            sample = min(NAIVE, letters)
            seconds["naive loop, get and get, for as many"] = (
                asyncio.run(naive_loop(server.url, queue, sample)) * letters / sample
            )
            seconds |= pipeline(session, server.url, queue, letters, Path(scratch) / str(number))
            asyncio.run(require_exact(server.url, queue, letters))
            shutil.rmtree(Path(scratch) / str(number))
            for stage, durations in seconds.items():
                timings.setdefault(stage, []).append(durations)
        memory.stop()
    session.stop()
    rows = [
        (stage, f"{statistics.median(values):.1f}", f"{letters / statistics.median(values):,.0f}")
        for stage, values in timings.items()
    ]
    print(text_table(("stage", "seconds", "letters/s"), rows), flush=True)
    print(f"peak MiB: driver {memory.driver:.0f}, its JVM {memory.jvm:.0f}, largest Python worker {memory.workers:.0f}")


if __name__ == "__main__":
    main()
