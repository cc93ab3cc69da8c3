"""Reading a limits stream with Spark's data source, beside nats-py and beside a bare socket.

Fairness: every variant reads the same stream (bodies of one size, no headers) on one server with the default
``sync_interval``, after warm-up rounds that don't count. The variants *with headers* read another stream, whose
messages have the same bodies and three headers each, beside a floor that receives these bytes. Variants take turns;
figures are medians, with the range of the ratios *within a round* to the floor of that round. A round counts only if
every message was read once and whole. The floor receives from a consumer and counts messages. ``Spark from memory``
returns the same columns without any server: the time that Spark itself takes. The data source on nats-py is slower and
reads fewer messages.
"""

import argparse
from contextlib import closing
from functools import partial
from pathlib import Path

from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.options import read_options
from airflow_provider_jetstream.spark.source.partition_planner import plan_ranges
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from benchmarks.spark_setup import (
    LibraryDataSource,
    MemoryDataSource,
    SparkSetup,
    Variant,
    drain,
    format_rounds,
    measure,
    new_session,
    read_counts,
    with_earlier_rounds,
)
from testbed.nats_server import NatsServer

NAMES = ("value", "subject", "stream", "seq", "timestamp")
FLOOR = "bare socket (floor)"
HEADED_FLOOR = "bare socket, headers (floor)"
_HEADED = "headed"


def read_as_a_task(setup: SparkSetup, name: str, method: str, messages: int, *, headers: bool = False) -> None:
    """Read as a task does, without Spark."""
    options = read_options({"stream": name, "includeHeaders": str(headers).lower()}, "read")
    stream = setup.open_stream(name)
    with closing(stream.socket):
        info = stream.info()
    (partition,) = plan_ranges(1, messages, options, info, method, ())
    connection = {"servers": setup.server.url}
    names = (*NAMES, "headers") if headers else NAMES
    columns = RequestedColumns(names, (True,) * len(names))
    results = sum(batch.num_rows for batch in read_range(connection, options, columns, partition))
    if results != messages:
        raise AssertionError(f"expected {messages} messages, found {results}")


def read_from_memory(setup: SparkSetup, messages: int) -> None:
    """Read as many messages with Spark from the memory of a task."""
    options = {"messages": str(messages), "size": str(len(setup.body))}
    frame = setup.session.read.format("memory").options(**options).load()
    results = read_counts(frame)
    if results[:2] != (messages, messages * len(setup.body)):
        raise AssertionError(f"expected {messages} messages, found {results}")


def _variants(setup: SparkSetup, messages: int, library: int, shares: list[int]) -> list[Variant]:
    def spark(count: int, partitions: int) -> None:
        setup.verify(setup.load("limits", partitions, endingOffsets=str(count + 1)), count)

    def with_library() -> None:
        options = {"servers": setup.server.url, "stream": "limits", "messages": str(library)}
        setup.verify(setup.session.read.format("natspy").options(**options).load(), library)

    variants = [
        Variant(FLOOR, lambda: drain(setup.open_stream("limits"), messages), messages, FLOOR),
        Variant("a task's read", lambda: read_as_a_task(setup, "limits", "consumer", messages), messages, FLOOR),
        Variant("Spark, 1 task", lambda: spark(messages, 1), messages, FLOOR),
        Variant("Spark, 2 tasks", lambda: spark(messages, 2), messages, FLOOR),
        *(Variant(f"Spark, 1 task, {count:,}", partial(spark, count, 1), count, FLOOR) for count in shares),
        Variant("Spark from memory", lambda: read_from_memory(setup, messages), messages, FLOOR),
        Variant("Spark on nats-py", with_library, library, FLOOR),
    ]
    return [variant for variant in variants if variant.messages]


def _variants_with_headers(setup: SparkSetup, messages: int) -> list[Variant]:
    def spark(partitions: int) -> None:
        setup.verify(setup.load(_HEADED, partitions, includeHeaders="true"), messages)

    def task() -> None:
        read_as_a_task(setup, _HEADED, "consumer", messages, headers=True)

    return [
        Variant(HEADED_FLOOR, lambda: drain(setup.open_stream(_HEADED), messages), messages, HEADED_FLOOR),
        Variant("a task's read, headers", task, messages, HEADED_FLOOR),
        Variant("Spark, 1 task, headers", lambda: spark(1), messages, HEADED_FLOOR),
        Variant("Spark, 2 tasks, headers", lambda: spark(2), messages, HEADED_FLOOR),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library", type=int, default=200_000, help="messages for nats-py; 0 leaves it out")
    parser.add_argument("--shares", type=int, nargs="*", default=[100_000], help="smaller reads of the same stream")
    parser.add_argument("--headed", type=int, default=1_000_000, help="messages with headers; 0 leaves them out")
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    session = new_session()
    session.dataSource.register(MemoryDataSource)
    session.dataSource.register(LibraryDataSource)
    with NatsServer() as server:
        setup = SparkSetup(server, session, b"x" * options.size)
        setup.fill_stream("limits", "limits", options.messages)
        variants = _variants(setup, options.messages, options.library, options.shares)
        if options.headed:
            setup.fill_stream(_HEADED, "limits", options.headed, headers=True)
            variants += _variants_with_headers(setup, options.headed)
        results = measure(variants, options.rounds, setup.cpu)
    session.stop()
    print(f"{options.size} bytes\n{format_rounds(with_earlier_rounds(results, options.keep))}")


if __name__ == "__main__":
    main()
