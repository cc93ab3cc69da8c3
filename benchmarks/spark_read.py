"""Reading a limits stream with Spark's data source, beside the client library and beside a bare socket.

Fairness: every way reads the same stream (bodies of one size, no headers) on one server with its default
``sync_interval``, after rounds that warm up and don't count. Ways take turns; figures are medians, with the range
of the ratios *within a round* to the floor of that round. A round counts only if every message was seen once and whole.
The floor receives from a consumer and counts what comes. ``Spark from memory`` gives the same columns without any
server: what Spark itself takes. The data source on nats-py is slower and reads fewer messages.
"""

import argparse
from contextlib import closing
from functools import partial
from pathlib import Path

from airflow_provider_jetstream.spark.source.columns import Columns
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import plan_ranges
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from benchmarks.rounds import Way, kept, measure, shown
from benchmarks.spark_bed import Bed, new_session, read
from benchmarks.spark_floors import drain
from benchmarks.spark_memory import MemoryDataSource
from benchmarks.spark_peers import LibraryDataSource
from testbed.nats_server import NatsServer

NAMES = ("value", "subject", "stream", "seq", "timestamp")
FLOOR = "bare socket (floor)"


def read_as_a_task(bed: Bed, name: str, method: str, messages: int) -> None:
    """Read as a task does, without Spark."""
    options = read_options({"stream": name}, "read")
    stream = bed.open(name)
    with closing(stream.socket):
        facts = stream.info()
    (part,) = plan_ranges(1, messages, options, facts, method, ())
    given = {"servers": bed.server.url}
    columns = Columns(NAMES, (True,) * len(NAMES))
    found = sum(batch.num_rows for batch in read_range(given, options, columns, part))
    if found != messages:
        raise AssertionError(f"expected {messages} messages, found {found}")


def read_from_memory(bed: Bed, messages: int) -> None:
    """Read as many messages with Spark from the memory of a task."""
    options = {"messages": str(messages), "size": str(len(bed.body))}
    frame = bed.session.read.format("memory").options(**options).load()
    found = read(frame)
    if found[:2] != (messages, messages * len(bed.body)):
        raise AssertionError(f"expected {messages} messages, found {found}")


def _ways(bed: Bed, messages: int, library: int, shares: list[int]) -> list[Way]:
    def spark(count: int, partitions: int) -> None:
        bed.look(bed.load("limits", partitions, endingOffsets=str(count + 1)), count)

    def with_library() -> None:
        options = {"servers": bed.server.url, "stream": "limits", "messages": str(library)}
        bed.look(bed.session.read.format("natspy").options(**options).load(), library)

    ways = [
        Way(FLOOR, lambda: drain(bed.open("limits"), messages), messages, FLOOR),
        Way("a task's read", lambda: read_as_a_task(bed, "limits", "consumer", messages), messages, FLOOR),
        Way("Spark, 1 task", lambda: spark(messages, 1), messages, FLOOR),
        Way("Spark, 2 tasks", lambda: spark(messages, 2), messages, FLOOR),
        *(Way(f"Spark, 1 task, {count:,}", partial(spark, count, 1), count, FLOOR) for count in shares),
        Way("Spark from memory", lambda: read_from_memory(bed, messages), messages, FLOOR),
        Way("Spark on nats-py", with_library, library, FLOOR),
    ]
    return [way for way in ways if way.messages]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library", type=int, default=200_000, help="messages for nats-py; 0 leaves it out")
    parser.add_argument("--shares", type=int, nargs="*", default=[100_000], help="smaller reads of the same stream")
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    given = parser.parse_args()
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    session.dataSource.register(LibraryDataSource)
    with NatsServer() as server:
        bed = Bed(server, session, b"x" * given.size)
        bed.fill("limits", "limits", given.messages)
        found = measure(_ways(bed, given.messages, given.library, given.shares), given.rounds, bed.cpu)
    session.stop()
    print(f"{given.size} bytes\n{shown(kept(found, given.keep))}")


if __name__ == "__main__":
    main()
