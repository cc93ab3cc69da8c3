"""Writing rows with Spark's data source, beside the client library and beside a bare socket.

Fairness: every way stores messages with ids in the same stream, which is emptied before, on one server with its
default ``sync_interval``, after rounds that warm up and don't count. Ways take turns; figures are medians, with
the range of the ratios *within a round* to the floor of that round. A round counts only if every row is stored once.
The floor keeps a window of as many messages unanswered as a task of ours does, and counts the acknowledgements without
looking at them. The loop with the client library is slower and stores fewer messages.
"""

import argparse
import asyncio
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from pyspark.sql import functions as f

from benchmarks.rounds import Way, kept, measure, shown
from benchmarks.spark_bed import Bed, new_session
from benchmarks.spark_floors import publish_window
from benchmarks.spark_peers import publish_one_by_one
from testbed.nats_server import NatsServer

FLOOR = "bare socket, window 1000 (floor)"
_SUBJECT = "out.a"


def _emptied(bed: Bed) -> None:
    stream = bed.open("out")
    with closing(stream.socket):
        # Made anew rather than purged, so that the ids of the round before take nobody's memory.
        stream.api("STREAM.DELETE.out")
    bed.make("out")


def _stored(bed: Bed, messages: int) -> None:
    stream = bed.open("out")
    with closing(stream.socket):
        found = stream.api("STREAM.INFO.out")["state"]["messages"]
    if found != messages:
        raise AssertionError(f"expected {messages} messages stored, found {found}")


def _bare(bed: Bed, messages: int) -> None:
    _emptied(bed)
    publish_window(bed.open("out"), _SUBJECT, messages, bed.body)
    _stored(bed, messages)


def _spark(bed: Bed, messages: int, partitions: int, *, with_ids: bool) -> None:
    _emptied(bed)
    frame = bed.session.range(0, messages, 1, partitions)
    columns = [f.lit(bed.body.decode()).alias("value"), f.lit(_SUBJECT).alias("subject")]
    if with_ids:
        columns.append(f.concat(f.lit(f"{uuid4().hex[:8]}:"), f.col("id").cast("string")).alias("msg_id"))
    options = {"servers": bed.server.url, "stream": "out"}
    frame.select(*columns).write.format("jetstream").options(**options).mode("append").save()
    _stored(bed, messages)


def _library(bed: Bed, messages: int) -> None:
    _emptied(bed)
    asyncio.run(publish_one_by_one(bed.server.url, _SUBJECT, messages, bed.body))
    _stored(bed, messages)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=200, help="of a body, in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--library", type=int, default=20_000, help="messages for nats-py; 0 leaves it out")
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    given = parser.parse_args()
    messages = given.messages
    session = new_session()
    with NatsServer() as server:
        bed = Bed(server, session, b"x" * given.size)
        bed.make("out")
        ways = [
            Way(FLOOR, lambda: _bare(bed, messages), messages, FLOOR),
            Way("Spark, 2 tasks, column msg_id", lambda: _spark(bed, messages, 2, with_ids=True), messages, FLOOR),
            Way("Spark, 2 tasks, derived ids", lambda: _spark(bed, messages, 2, with_ids=False), messages, FLOOR),
            Way("await js.publish", lambda: _library(bed, given.library), given.library, FLOOR),
        ]
        found = measure([way for way in ways if way.messages], given.rounds, bed.cpu)
    session.stop()
    print(f"{given.size} bytes\n{shown(kept(found, given.keep))}")


if __name__ == "__main__":
    main()
