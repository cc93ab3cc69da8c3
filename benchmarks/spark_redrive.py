"""Redriving in bulk on Spark, beside the engine without Spark and beside what people write with nats-py alone.

Fairness: as in ``benchmarks.redrive``, whose queues these are: each way gets a server with its default
``sync_interval`` of its own and the same letters (1 KiB, dead by one delivery, their advisories captured); queues allow
direct gets, as ``docs/spark-redrive.md`` says queues of that size should. Ways take
turns; figures are medians. A round counts only if every job waits in the queue exactly once afterwards and no entry is
left. Spark's session is warm, as it is in a pipeline; its time is all that ``redrive_letters`` takes, the look at the
queue included. CPU of clients is that of this process and of Spark's Python workers, without the JVM; that of the
server tells how near it is to being the limit. The floor sends the requests of a copy and looks at nothing, see
``benchmarks.spark_redrive_floor``. The engine without Spark gets a fifth of the letters, the naive loop a fortieth.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters
from benchmarks.spark_fill import Fill
from benchmarks.spark_redrive_floor import Bare
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

FLOOR = "floor: the same requests, bare"
PATIENCE = 1.0
NAIVE = "nats-py, one by one"
ENGINES = ("copy", "atomic", NAIVE)
WAYS = (FLOOR, "spark copy", "spark atomic", *ENGINES)
# Of how many letters a slow way gets one.
SHARES = {"copy": 5, "atomic": 5, NAIVE: 40}


def spark(slots: int) -> SparkSession:
    """Start a session whose workers find the package."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{slots},4]").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


async def require_exact(server: NatsServer, queue: WorkQueue, letters: int) -> None:
    """Make sure that every job waits once and nothing is left."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        waiting = (await connection.api(f"CONSUMER.INFO.{queue.name}.worker"))["num_pending"]
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
    if waiting != letters or entries:
        raise SystemExit(f"{waiting} of {letters} jobs wait, {entries} entries are left")


def python_cpu() -> float:
    """Add up the CPU seconds of this process and of the Python processes below it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [each.cpu_times() for each in processes if "python" in each.name()]
    return sum(each.user + each.system for each in times)


def on_spark(session: SparkSession, server: NatsServer, queue: WorkQueue, protocol: str, letters: int) -> float:
    """Redrive on Spark, and give the seconds."""
    rows = session.range(1, letters + 1).withColumnRenamed("id", "sequence")
    order = RedriveRequest(protocol=Protocol(protocol))
    started = time.perf_counter()
    redrive_letters(session, rows, queue, order, {"servers": server.url}).raise_for_failures()
    return time.perf_counter() - started


def measure(session: SparkSession, way: str, letters: int, turn: int) -> dict[str, float]:
    """Measure one way once."""
    letters = letters // SHARES.get(way, 1)
    protocol = way.removeprefix("spark ")
    with NatsServer() as server:
        atomic = protocol == "atomic"
        fill = Fill(server.url, f"q{turn}", letters, told=False, atomic_redrive=atomic, allow_direct=True)
        queue = asyncio.run(fill.run())
        # Nobody can be still at a job when its consumer's patience is over.
        time.sleep(PATIENCE)
        served = psutil.Process(server.pid)
        used = ended_cpu if way in ENGINES else python_cpu
        server_before, before = sum(served.cpu_times()[:2]), used()
        if way == FLOOR:
            seconds = Bare(server.url, queue, letters).run()
        elif way in ENGINES:
            seconds = elsewhere(server, way, queue)
        else:
            seconds = on_spark(session, server, queue, protocol, letters)
        client = used() - before
        asyncio.run(require_exact(server, queue, letters))
        server_cpu = sum(served.cpu_times()[:2]) - server_before
    return {"rate": letters / seconds, "client": client / letters * 1e6, "server": server_cpu / letters * 1e6}


def elsewhere(server: NatsServer, way: str, queue: WorkQueue) -> float:
    """Redrive in a process of its own, and give the seconds."""
    declared = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [sys.executable, "-m", "benchmarks.redrive", "--measure", server.url, way, declared]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(ended.stdout)["seconds"])


def ended_cpu() -> float:
    """Add up the CPU seconds of processes that have ended, their start included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--letters", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2, help="how many tasks run at a time")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    asked = parser.parse_args()
    session = spark(asked.slots)
    measure(session, "spark copy", 1_000, 0)
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(asked.rounds):
        for way in asked.ways:
            found.setdefault(way, []).append(measure(session, way, asked.letters, turn))
    rows = []
    for way, rounds in found.items():
        ratios = [each["rate"] / one["rate"] for each, one in zip(rounds, found.get(FLOOR, rounds), strict=True)]
        medians = (statistics.median(each[key] for each in rounds) for key in ("rate", "client", "server"))
        rows.append((way, *(f"{each:,.0f}" for each in medians), f"{statistics.median(ratios):.2f}"))
    head = ("way", "letters/s", "client CPU us/letter", "server CPU us/letter", "of the floor")
    print(text_table(head, rows))
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
