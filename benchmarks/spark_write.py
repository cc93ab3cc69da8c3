"""Writing rows with Spark's data source, beside nats-py and beside a bare socket.

Fairness: every variant stores messages with ids in the same stream, which is emptied before, on one server with the
default ``sync_interval``, after warm-up rounds that don't count. Variants take turns; figures are medians, with the
range of the ratios *within a round* to the floor of that round. A round counts only if every row is stored once. The
floor has as many connections as Spark has tasks; each keeps a window of as many messages unanswered as a task of this
package does, and counts the acknowledgements without parsing them. A row is the same over one connection. The loop with
nats-py is slower and stores fewer messages.
"""

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

from pyspark.sql import functions as f

from benchmarks.spark_setup import (
    SparkSetup,
    Variant,
    format_rounds,
    measure,
    new_session,
    publish_one_by_one,
    publish_window,
    with_earlier_rounds,
)
from testbed.nats_server import NatsServer

_TASKS = 2
FLOOR = f"bare sockets, {_TASKS} connections (floor)"
_SUBJECT = "out.a"


def _recreate_stream(setup: SparkSetup) -> None:
    stream = setup.open_stream("out")
    with closing(stream.socket):
        # Recreated rather than purged, so that the message ids of the round before take no memory.
        stream.api("STREAM.DELETE.out")
    setup.create_stream("out")


def _require_stored(setup: SparkSetup, messages: int) -> None:
    stream = setup.open_stream("out")
    with closing(stream.socket):
        results = stream.api("STREAM.INFO.out")["state"]["messages"]
    if results != messages:
        raise AssertionError(f"expected {messages} messages stored, found {results}")


def _bare(setup: SparkSetup, messages: int, connections: int) -> None:
    _recreate_stream(setup)
    edges = [messages * index // connections for index in range(connections + 1)]
    with ThreadPoolExecutor(connections) as pool:
        futures = [
            pool.submit(publish_window, setup.open_stream("out"), _SUBJECT, high - low, setup.body)
            for low, high in pairwise(edges)
        ]
        for future in futures:
            future.result()
    _require_stored(setup, messages)


def _spark(setup: SparkSetup, messages: int, *, with_ids: bool) -> None:
    _recreate_stream(setup)
    frame = setup.session.range(0, messages, 1, _TASKS)
    columns = [f.lit(setup.body.decode()).alias("value"), f.lit(_SUBJECT).alias("subject")]
    if with_ids:
        columns.append(f.concat(f.lit(f"{uuid4().hex[:8]}:"), f.col("id").cast("string")).alias("msg_id"))
    options = {"servers": setup.server.url, "stream": "out"}
    frame.select(*columns).write.format("jetstream").options(**options).mode("append").save()
    _require_stored(setup, messages)


def _library(setup: SparkSetup, messages: int) -> None:
    _recreate_stream(setup)
    asyncio.run(publish_one_by_one(setup.server.url, _SUBJECT, messages, setup.body))
    _require_stored(setup, messages)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library", type=int, default=20_000, help="messages for nats-py; 0 leaves it out")
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    messages = options.messages
    session = new_session()
    with NatsServer() as server:
        setup = SparkSetup(server, session, b"x" * options.size)
        setup.create_stream("out")
        variants = [
            Variant(FLOOR, lambda: _bare(setup, messages, _TASKS), messages, FLOOR),
            Variant("bare socket, 1 connection", lambda: _bare(setup, messages, 1), messages, FLOOR),
            Variant("Spark, 2 tasks, column msg_id", lambda: _spark(setup, messages, with_ids=True), messages, FLOOR),
            Variant("Spark, 2 tasks, derived ids", lambda: _spark(setup, messages, with_ids=False), messages, FLOOR),
            Variant("await js.publish", lambda: _library(setup, options.library), options.library, FLOOR),
        ]
        results = measure([variant for variant in variants if variant.messages], options.rounds, setup.cpu)
    session.stop()
    print(f"{options.size} bytes\n{format_rounds(with_earlier_rounds(results, options.keep))}")


if __name__ == "__main__":
    main()
