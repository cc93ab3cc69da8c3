"""Reading a work queue with Spark's data source, by direct gets, while somebody publishes to it.

Fairness as in ``benchmarks.spark_read``. The floors send the same requests (256 messages each) over bare sockets, one
connection or two at once, and count what comes. Beside one more read, and beside nothing, a publisher and a worker in
a process of their own do 400 jobs of the same queue a second, each acknowledged.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.rounds import Way, kept, measure, shown
from benchmarks.spark_bed import Bed, new_session
from benchmarks.spark_floors import drain_directly
from benchmarks.spark_memory import MemoryDataSource
from benchmarks.spark_probe import HEAD, WORKER, Probe, Waits
from benchmarks.spark_read import read_as_a_task, read_from_memory
from testbed.nats_server import NatsServer
from testbed.text_table import text_table

FLOOR = "bare socket (floor)"
_IDLE = 3.0


def _drain(bed: Bed, messages: int, connections: int) -> None:
    edges = [messages * index // connections for index in range(connections + 1)]
    with ThreadPoolExecutor(connections) as pool:
        parts = [pool.submit(drain_directly, bed.open("queue"), low + 1, high) for low, high in pairwise(edges)]
        for part in parts:
            part.result()


def _look(bed: Bed, messages: int, partitions: int) -> None:
    bed.look(bed.load("queue", partitions, endingOffsets=str(messages + 1)), messages)


class _Working:
    """A publisher and a worker beside reads, and their waits over all rounds."""

    def __init__(self, bed: Bed, messages: int) -> None:
        self._bed, self._messages = bed, messages
        self.waits = {"beside nothing": Waits(), "beside Spark": Waits()}

    def beside(self, what: str) -> None:
        """Publish and work while something happens, and see that nobody else has a consumer."""
        with Probe(self._bed.server.url, "queue", self.waits[what]):
            if what == "beside Spark":
                _look(self._bed, self._messages, 2)
            else:
                time.sleep(_IDLE)
        stream = self._bed.open("queue")
        with closing(stream.socket):
            if (found := stream.api("CONSUMER.NAMES.queue")["consumers"]) != [WORKER]:
                raise AssertionError(f"expected no consumer besides the worker's, found {found}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    given = parser.parse_args()
    messages = given.messages
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    with NatsServer() as server:
        bed = Bed(server, session, b"x" * given.size)
        bed.fill("queue", "workqueue", messages)
        working = _Working(bed, messages)
        ways = [
            Way(FLOOR, lambda: _drain(bed, messages, 1), messages, FLOOR),
            Way("bare sockets, 2 connections", lambda: _drain(bed, messages, 2), messages, FLOOR),
            Way("a task's read", lambda: read_as_a_task(bed, "queue", "direct", messages), messages, FLOOR),
            Way("Spark, 1 task", lambda: _look(bed, messages, 1), messages, FLOOR),
            Way("Spark, 2 tasks", lambda: _look(bed, messages, 2), messages, FLOOR),
            Way("Spark from memory", lambda: read_from_memory(bed, messages), messages, FLOOR),
            Way("Spark, 2 tasks, beside jobs", partial(working.beside, "beside Spark"), messages, FLOOR),
            Way("(jobs beside nothing)", partial(working.beside, "beside nothing"), messages, FLOOR),
        ]
        found = measure(ways, given.rounds, bed.cpu)
    session.stop()
    print(f"{given.size} bytes\n{shown(kept(found, given.keep))}")
    rows = [(what, *waits.row()) for what, waits in working.waits.items()]
    print(f"waits of the publisher and of jobs, in ms\n{text_table(('', *HEAD), rows)}")


if __name__ == "__main__":
    main()
