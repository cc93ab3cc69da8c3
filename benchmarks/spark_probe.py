"""A publisher and a worker of a work queue, in a process of their own, and their latencies.

The publisher sends a job every few milliseconds and waits for its acknowledgement; after a longer wait it catches up.
The worker pulls jobs and acknowledges them at once.
"""

import argparse
import json
import select
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

WORKER = "worker"
_PULL = b'{"batch":10000,"expires":600000000000}'
_HUNDREDTHS = 100


@dataclass
class Waits:
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


HEAD = ("jobs", "ack p50", "p99", "longest", "job p50", "p99", "longest", "jobs/s")


class Probe:
    """Publishes and processes jobs until the block ends, and adds its latencies to ``waits``."""

    def __init__(self, url: str, stream: str, waits: Waits) -> None:
        self._command = [sys.executable, "-m", "benchmarks.spark_probe", url, stream]
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
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{WORKER}"
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


def main() -> None:
    """Publish and process jobs until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("stream")
    parser.add_argument("--every", type=float, default=0.0025, help="seconds")
    options = parser.parse_args()
    acks: list[float] = []
    jobs: list[float] = []
    subject = f"{options.stream}.probe"
    with closing(NatsSocket(socket_settings({"servers": options.url}))) as socket:
        config = {"durable_name": WORKER, "ack_policy": "explicit", "filter_subject": subject}
        request = {"stream_name": options.stream, "config": config}
        SourceStream(socket, options.stream).api(f"CONSUMER.DURABLE.CREATE.{options.stream}.{WORKER}", request)
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


if __name__ == "__main__":
    main()
