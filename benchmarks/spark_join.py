"""Dead letters with their jobs on Spark, beside bare gets of the same jobs.

The queue holds jobs of 1 KiB that have used up their one delivery, the dead letter queue an advisory of each; in the
second queue every other one has a worker's record as well. Spark's variant is the tasks' part of ``read_letters``:
every job fetched, its death proved, all columns made. Its driver's scan is a variant of its own. The floors get as many
jobs by their sequences over one bare connection, a thousand in flight, and count the answers without parsing them: by
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
from benchmarks.rounds import Variant, format_rounds, measure, with_earlier_rounds
from benchmarks.spark_fill import BODY, DeadQueue
from benchmarks.spark_letters import get_all_jobs
from benchmarks.spark_setup import SparkSetup, new_session
from testbed.nats_server import NatsServer

API = "single gets by the API (floor)"
DIRECT = "single direct gets (floor)"


def evaluate(frame: DataFrame, letters: int) -> None:
    """Prove all letters of a frame, and raise unless each is there once."""
    size, sequence = f.sum(f.length("body")), f.col("sequence")
    results = tuple(frame.agg(f.count("*"), size, f.min(sequence), f.max(sequence), f.sum(sequence)).collect()[0])
    if results != (letters, letters * len(BODY), 1, letters, letters * (letters + 1) // 2):
        raise AssertionError(f"expected {letters} letters, found {results}")


def _variants(setup: SparkSetup, recorded: WorkQueue, plain: WorkQueue, letters: int) -> list[Variant]:
    url = setup.server.url
    frames = {queue.name: _read_letters(setup, queue) for queue in (recorded, plain)}
    return [
        Variant(API, lambda: get_all_jobs(url, plain, letters), letters, API),
        Variant(DIRECT, lambda: get_all_jobs(url, plain, letters, direct=True), letters, API),
        Variant("letters with their jobs", lambda: evaluate(frames[plain.name], letters), letters, API),
        Variant("and with records", lambda: evaluate(frames[recorded.name], letters), letters, API),
        Variant("driver scan", lambda: _read_letters(setup, plain), letters, API),
        Variant("driver scan, with records", lambda: _read_letters(setup, recorded), letters, API),
    ]


def _read_letters(setup: SparkSetup, queue: WorkQueue) -> DataFrame:
    return read_letters(setup.session, queue, {"servers": setup.server.url, "timeout": "60"})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a file to which rounds are added, and from which all are shown")
    options = parser.parse_args()
    session = new_session()
    with NatsServer() as server:
        setup = SparkSetup(server, session, BODY)
        plain = asyncio.run(
            DeadQueue(server.url, "plain", options.letters, with_records=False, allow_direct=True).run()
        )
        recorded = asyncio.run(DeadQueue(server.url, "recorded", options.letters, allow_direct=True).run())
        results = measure(_variants(setup, recorded, plain, options.letters), options.rounds, setup.cpu)
    session.stop()
    print(format_rounds(with_earlier_rounds(results, options.keep)))


if __name__ == "__main__":
    main()
