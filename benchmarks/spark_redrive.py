"""Redriving in bulk on Spark, beside the engine without Spark and beside a program written with nats-py alone.

Fairness: as in ``benchmarks.redrive``, whose queues these are: each variant gets a server with the default
``sync_interval`` of its own and the same letters (1 KiB, dead by one delivery, their advisories captured); queues allow
direct gets, as ``docs/spark-redrive.md`` recommends for queues of that size. Variants take turns; figures are medians.
A round counts only if every job waits in the queue exactly once afterwards and no entry is left. Spark's session is
warm, as it is in a pipeline; its time is that of ``redrive_letters``, its scan of the queue included. CPU of clients is
that of this process and of Spark's Python workers, without the JVM; that of the server shows how near it is to being
the limit. The floor sends the requests of a copy without parsing the answers, see ``benchmarks.spark_redrive_floor``.
The peers on nats-py are those of ``benchmarks.redrive``: one handles a hundred letters at a time and deletes without
overwriting, the naive one a letter at a time with deletes that overwrite. The engine without Spark and the first peer
get a fifth of the letters, the naive loop a fortieth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from pyspark.sql import SparkSession

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import late_ack_subject, letter_audit_subject
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import redrive_letters
from airflow_provider_jetstream.spark.connection_options import socket_settings
from benchmarks.redrive import COPY, GATHERED, NAIVE
from benchmarks.spark_fill import BODY, DeadQueue
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_BATCH = 250
_RECORD = b'{"version":1,"action":"redriven","padding":"%b"}' % (b"x" * 400)


class BareRedrive:
    """Redrives without parsing answers; jobs and entries are numbered from 1 on."""

    def __init__(self, url: str, queue: WorkQueue, letters: int) -> None:
        self._url = url
        self._letters = letters
        self._queue = queue

    def run(self) -> float:
        """Redrive, and return the seconds."""
        with closing(NatsSocket(socket_settings({"servers": self._url, "timeout": "60"}))) as socket:
            reply = f"{socket.inbox}.1".encode()
            steps = [
                self._steps(make, reply) for make in (self._get, self._copy, self._record, self._ack, self._delete)
            ]
            started, turn = time.perf_counter(), 0
            while True:
                batches = [frames for delay, step in enumerate(steps) if turn >= delay and (frames := next(step, None))]
                if not batches:
                    return time.perf_counter() - started
                socket.send(b"".join(frame for frames in batches for frame in frames))
                self._count(socket, sum(map(len, batches)))
                turn += 1

    def _steps(self, make: Callable[[int, bytes], bytes], reply: bytes) -> Iterator[list[bytes]]:
        for start in range(1, self._letters + 1, _BATCH):
            yield [make(sequence, reply) for sequence in range(start, min(start + _BATCH, self._letters + 1))]

    def _count(self, socket: NatsSocket, expected: int) -> None:
        prefix, tail, answered = socket.sid + b" ", b"", 0
        while answered < expected:
            socket.receive(lambda _buffer, _filled: True)
            data = tail + bytes(socket.buffer[: socket.filled])
            answered += data.count(prefix)
            # A prefix may be split between two reads.
            tail = data[-len(prefix) + 1 :]
            socket.consume(socket.filled)

    def _get(self, sequence: int, reply: bytes) -> bytes:
        return _request(f"$JS.API.DIRECT.GET.{self._queue.name}", reply, b'{"seq":%d}' % sequence)

    def _copy(self, sequence: int, reply: bytes) -> bytes:
        headers = {"Redrive-Count": 1, "Redrive-Stream": self._queue.name, "Redrive-Sequence": sequence}
        headers |= {"Redrive-Consumer": "worker", "Nats-Msg-Id": f"redrive:{self._queue.name}:{sequence}:{'t' * 30}"}
        return _publication(f"{self._queue.name}.jobs.{sequence % 7}", reply, headers, BODY)

    def _record(self, sequence: int, reply: bytes) -> bytes:
        headers = {"Nats-Msg-Id": f"audit:{'t' * 30}:{sequence}:redriven:{sequence}"}
        return _publication(letter_audit_subject(self._queue.name, sequence), reply, headers, _RECORD)

    def _ack(self, sequence: int, reply: bytes) -> bytes:
        return _request(late_ack_subject(self._queue.name, "worker", sequence), reply, b"+ACK")

    def _delete(self, sequence: int, reply: bytes) -> bytes:
        entry = b'{"seq":%d,"no_erase":true}' % sequence
        return _request(f"$JS.API.STREAM.MSG.DELETE.{self._queue.name}-dead", reply, entry)


def _request(subject: str, reply: bytes, body: bytes) -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body)


def _publication(subject: str, reply: bytes, headers: Mapping[str, object], body: bytes) -> bytes:
    block = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    header = f"NATS/1.0\r\n{block}\r\n".encode()
    sizes = (len(header), len(header) + len(body))
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply, *sizes, header, body)


FLOOR = "floor: the same requests, bare"
ACK_WAIT_SECONDS = 1.0
ENGINES = (COPY, GATHERED, NAIVE)
VARIANTS = (FLOOR, "spark copy", *ENGINES)
# A slow variant gets one of so many letters.
SHARES = {COPY: 5, GATHERED: 5, NAIVE: 40}


def spark(slots: int) -> SparkSession:
    """Start a session whose Python workers can import the package."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{slots},4]").config("spark.ui.enabled", "false")
    return builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()


async def require_exact(server: NatsServer, queue: WorkQueue, letters: int) -> None:
    """Raise unless every job waits once and no entry is left."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        waiting = (await connection.api(f"CONSUMER.INFO.{queue.name}.worker"))["num_pending"]
        entries = (await stream_info(connection, f"{queue.name}-dead"))["state"]["messages"]
    if waiting != letters or entries:
        raise SystemExit(f"{waiting} of {letters} jobs wait, {entries} entries are left")


def python_cpu() -> float:
    """Return the CPU seconds of this process and of the Python processes below it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [measured.cpu_times() for measured in processes if "python" in measured.name()]
    return sum(measured.user + measured.system for measured in times)


def on_spark(session: SparkSession, server: NatsServer, queue: WorkQueue, protocol: str, letters: int) -> float:
    """Redrive on Spark, and return the seconds."""
    rows = session.range(1, letters + 1).withColumnRenamed("id", "sequence")
    request = RedriveRequest(protocol=Protocol(protocol))
    started = time.perf_counter()
    redrive_letters(session, rows, queue, request, {"servers": server.url}).raise_for_failures()
    return time.perf_counter() - started


def measure(session: SparkSession, variant: str, letters: int, turn: int) -> dict[str, float]:
    """Measure one variant once."""
    letters = letters // SHARES.get(variant, 1)
    protocol = variant.removeprefix("spark ")
    with NatsServer() as server:
        queue_setup = DeadQueue(server.url, f"q{turn}", letters, with_records=False, allow_direct=True)
        queue = asyncio.run(queue_setup.run())
        # After the consumer's ack wait no job can still be in progress.
        time.sleep(ACK_WAIT_SECONDS)
        server_process = psutil.Process(server.pid)
        cpu_used = children_cpu if variant in ENGINES else python_cpu
        server_before, before = sum(server_process.cpu_times()[:2]), cpu_used()
        if variant == FLOOR:
            seconds = BareRedrive(server.url, queue, letters).run()
        elif variant in ENGINES:
            seconds = redrive_in_process(server, variant, queue)
        else:
            seconds = on_spark(session, server, queue, protocol, letters)
        client = cpu_used() - before
        asyncio.run(require_exact(server, queue, letters))
        server_cpu = sum(server_process.cpu_times()[:2]) - server_before
    return {"rate": letters / seconds, "client": client / letters * 1e6, "server": server_cpu / letters * 1e6}


def redrive_in_process(server: NatsServer, variant: str, queue: WorkQueue) -> float:
    """Redrive in a process of its own, and return the seconds."""
    declaration = json.dumps(queue.model_dump(mode="json", exclude_unset=True))
    command = [
        sys.executable,
        "-m",
        "benchmarks.redrive",
        "--measure",
        server.url,
        f"{server.pid} {variant}",
        declaration,
    ]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(process.stdout)["seconds"])


def children_cpu() -> float:
    """Return the CPU seconds of child processes that have ended, their start included."""
    cpu_used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_used.ru_utime + cpu_used.ru_stime


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--letters", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2, help="how many tasks run at a time")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    options = parser.parse_args()
    session = spark(options.slots)
    measure(session, "spark copy", 1_000, 0)
    results: dict[str, list[dict[str, float]]] = {}
    for turn in range(options.rounds):
        for variant in options.variants:
            results.setdefault(variant, []).append(measure(session, variant, options.letters, turn))
    rows = []
    for variant, rounds in results.items():
        ratios = [
            measured["rate"] / one["rate"] for measured, one in zip(rounds, results.get(FLOOR, rounds), strict=True)
        ]
        medians = (statistics.median(measured[key] for measured in rounds) for key in ("rate", "client", "server"))
        rows.append((variant, *(f"{measured:,.0f}" for measured in medians), f"{statistics.median(ratios):.2f}"))
    head = ("variant", "letters/s", "client CPU us/letter", "server CPU us/letter", "of the floor")
    print(text_table(head, rows))
    session.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
