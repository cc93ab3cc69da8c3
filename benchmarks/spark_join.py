"""Dead letters with their jobs on Spark, beside bare gets of the same jobs.

The queue holds jobs of 1 KiB that have used up their one delivery, the dead letter queue an advisory of each; in the
second queue a worker has told of every other one as well. Spark's way is the tasks' part of ``read_letters``: every job
fetched, its death proved, all columns made. Its driver's look is a way of its own. The floors get as many jobs by
their sequences over one bare connection, a thousand on their way at a time, count the answers and look at nothing: by
JetStream's API, which answers for any stream, and by direct gets. A round counts only if every letter is there once,
with its whole body.
"""

import argparse
import asyncio
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.spark.dead_letters import read_letters
from benchmarks.rounds import Way, kept, measure, shown
from benchmarks.spark_bed import Bed, new_session
from benchmarks.spark_fill import BODY, Fill
from benchmarks.spark_letters import floor
from testbed.nats_server import NatsServer

API = "single gets by the API (floor)"
DIRECT = "single direct gets (floor)"


def evaluate(frame: DataFrame, letters: int) -> None:
    """Prove all letters of a frame, and fail unless each is there once."""
    size, place = f.sum(f.length("body")), f.col("sequence")
    found = tuple(frame.agg(f.count("*"), size, f.min(place), f.max(place), f.sum(place)).collect()[0])
    if found != (letters, letters * len(BODY), 1, letters, letters * (letters + 1) // 2):
        raise AssertionError(f"expected {letters} letters, found {found}")


def _ways(bed: Bed, told: WorkQueue, plain: WorkQueue, letters: int) -> list[Way]:
    url = bed.server.url
    frames = {queue.name: _look(bed, queue) for queue in (told, plain)}
    return [
        Way(API, lambda: floor(url, plain, letters), letters, API),
        Way(DIRECT, lambda: floor(url, plain, letters, direct=True), letters, API),
        Way("letters with their jobs", lambda: evaluate(frames[plain.name], letters), letters, API),
        Way("and with records", lambda: evaluate(frames[told.name], letters), letters, API),
        Way("look", lambda: _look(bed, plain), letters, API),
        Way("look, with records", lambda: _look(bed, told), letters, API),
    ]


def _look(bed: Bed, queue: WorkQueue) -> DataFrame:
    return read_letters(bed.session, queue, {"servers": bed.server.url, "timeout": "60"})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    given = parser.parse_args()
    session = new_session()
    with NatsServer() as server:
        bed = Bed(server, session, BODY)
        plain = asyncio.run(Fill(server.url, "plain", given.letters, told=False, allow_direct=True).run())
        told = asyncio.run(Fill(server.url, "told", given.letters, allow_direct=True).run())
        found = measure(_ways(bed, told, plain, given.letters), given.rounds, bed.cpu)
    session.stop()
    print(shown(kept(found, given.keep)))


if __name__ == "__main__":
    main()
