"""Reading a work queue with Spark's data source, by direct gets, while jobs are published and processed.

Fairness as in ``benchmarks.spark_read``. The floors send the same requests (256 messages each) over bare sockets, one
connection or two at once, and count the messages. Beside one more read, and beside nothing, a publisher and a worker in
a process of their own do 400 jobs of the same queue a second, each acknowledged.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.rounds import Variant, format_rounds, measure, with_earlier_rounds
from benchmarks.spark_floors import drain_directly
from benchmarks.spark_memory import MemoryDataSource
from benchmarks.spark_probe import HEAD, WORKER, Probe, Waits
from benchmarks.spark_read import read_as_a_task, read_from_memory
from benchmarks.spark_setup import SparkSetup, new_session
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

FLOOR = "bare socket (floor)"
_IDLE = 3.0


def _drain(setup: SparkSetup, messages: int, connections: int) -> None:
    edges = [messages * index // connections for index in range(connections + 1)]
    with ThreadPoolExecutor(connections) as pool:
        futures = [
            pool.submit(drain_directly, setup.open_stream("queue"), low + 1, high) for low, high in pairwise(edges)
        ]
        for future in futures:
            future.result()


def _read_queue(setup: SparkSetup, messages: int, partitions: int) -> None:
    setup.verify(setup.load("queue", partitions, endingOffsets=str(messages + 1)), messages)


class _ConcurrentJobs:
    """A publisher and a worker beside reads, and their latencies over all rounds."""

    def __init__(self, setup: SparkSetup, messages: int) -> None:
        self._bed, self._messages = setup, messages
        self.waits = {"beside nothing": Waits(), "beside Spark": Waits()}

    def beside(self, name: str) -> None:
        """Publish and process jobs during a read, and check that the read leaves no consumer behind."""
        with Probe(self._bed.server.url, "queue", self.waits[name]):
            if name == "beside Spark":
                _read_queue(self._bed, self._messages, 2)
            else:
                time.sleep(_IDLE)
        stream = self._bed.open_stream("queue")
        with closing(stream.socket):
            if (results := stream.api("CONSUMER.NAMES.queue")["consumers"]) != [WORKER]:
                raise AssertionError(f"expected no consumer besides the worker's, found {results}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    messages = options.messages
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    with NatsServer() as server:
        setup = SparkSetup(server, session, b"x" * options.size)
        setup.fill_stream("queue", "workqueue", messages)
        concurrent_jobs = _ConcurrentJobs(setup, messages)
        variants = [
            Variant(FLOOR, lambda: _drain(setup, messages, 1), messages, FLOOR),
            Variant("bare sockets, 2 connections", lambda: _drain(setup, messages, 2), messages, FLOOR),
            Variant("a task's read", lambda: read_as_a_task(setup, "queue", "direct", messages), messages, FLOOR),
            Variant("Spark, 1 task", lambda: _read_queue(setup, messages, 1), messages, FLOOR),
            Variant("Spark, 2 tasks", lambda: _read_queue(setup, messages, 2), messages, FLOOR),
            Variant("Spark from memory", lambda: read_from_memory(setup, messages), messages, FLOOR),
            Variant("Spark, 2 tasks, beside jobs", partial(concurrent_jobs.beside, "beside Spark"), messages, FLOOR),
            Variant("(jobs beside nothing)", partial(concurrent_jobs.beside, "beside nothing"), messages, FLOOR),
        ]
        results = measure(variants, options.rounds, setup.cpu)
    session.stop()
    print(f"{options.size} bytes\n{format_rounds(with_earlier_rounds(results, options.keep))}")
    rows = [(name, *waits.row()) for name, waits in concurrent_jobs.waits.items()]
    print(f"waits of the publisher and of jobs, in ms\n{text_table(('', *HEAD), rows)}")


if __name__ == "__main__":
    main()
