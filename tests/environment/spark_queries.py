"""The main capabilities of the format ``jetstream``: one text for each PySpark and Python, classic and Spark Connect.

Run in an environment of its own, it prints a line of JSON for each query: what failed, or null.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from spark_setting import Setting, raises

from airflow_provider_jetstream.jetstream import (
    Consumer,
    Job,
    WaitPolicy,
    WorkQueue,
    connect,
    provision,
    publish,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.spark import (
    read_letters,
    read_repaired,
    redrive_letters,
    register,
    repair,
    snapshot,
    write_rows,
)
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

_ORDERS: Final = [
    ("created", '{"customer": "ann", "amount": 12.50}'),
    ("cancelled", '{"customer": "ann"}'),
    ("created", '{"customer": "bob", "amount": 7}'),
    ("created", '{"customer": "ann", "amount": 0.25}'),
]
_SPARK: Final = tuple(map(int, importlib.metadata.version("pyspark").split(".")[:2]))


def batch_is_filtered_and_decoded(setting: Setting) -> None:
    options = setting.make_stream(_ORDERS)
    frame = setting.load(options, filterSubjects=f"{setting.name}.created", startingOffsets="2", minPartitions="2")
    setting.publish([("created", '{"customer": "late", "amount": 1}')], f"{setting.name}.")
    order = f.from_json(f.col("value").cast("string"), "customer STRING, amount DECIMAL(10, 2)").alias("order")
    sums = frame.select(order).groupBy("order.customer").agg(f.sum("order.amount").alias("amount"))
    expected = [("ann", "0.25"), ("bob", "7.00")]
    if setting.remote:
        # There, loading is a part of each action.
        expected.append(("late", "1.00"))
    assert setting.rows(sums, "customer", "string(amount)") == expected


def several_streams_are_read_together(setting: Setting) -> None:
    for suffix, count in (("-a", 3), ("-b", 2)):
        setting.make_stream([("x", str(number)) for number in range(count)], suffix)
    names = [f"{setting.name}-a", f"{setting.name}-b"]
    bounds = json.dumps({names[0]: 2, names[1]: "earliest"})
    frame = setting.load(setting.options, streams=",".join(names), startingOffsets=bounds)
    expected = [(names[0], 2), (names[0], 3), (names[1], 1), (names[1], 2)]
    assert setting.rows(frame, "stream", "seq") == expected
    assert setting.load(setting.options, streamPattern=f"{setting.name}-?").count() == 5


def headers_are_read_and_copied(setting: Setting) -> None:
    source = setting.make_stream([("a", "1", {"Customer": "ann", "Nats-Msg-Id": "first"})], "-from")
    target = setting.make_stream([], "-to")
    frame = setting.load(source, includeHeaders="true").selectExpr(
        "value", f"'{target['stream']}.a' subject", "headers"
    )
    frame.write.format("jetstream").options(**target, natsHeaders="drop").mode("append").save()
    (row,) = setting.load(target, includeHeaders="true").collect()
    headers = {header["key"]: header["value"] for header in row.headers}
    assert (bytes(row.value), headers["Customer"], headers["Nats-Msg-Id"] != "first") == (b"1", "ann", True)


def query_goes_on_from_its_checkpoint(setting: Setting) -> None:
    options = setting.make_stream(_ORDERS)
    assert setting.follow(options) == [4]
    assert setting.follow(options) == []
    setting.publish(_ORDERS[:2], f"{setting.name}.")
    assert setting.follow(options) == [2]
    rows = setting.rows(setting.spark.read.parquet(str(setting.folder / "rows")), "seq", "string(value)")
    assert rows == [(number + 1, body) for number, (_, body) in enumerate([*_ORDERS, *_ORDERS[:2]])]


def batches_are_bounded(setting: Setting) -> None:
    options = setting.make_stream([("x", str(number)) for number in range(5)])
    if _SPARK < (4, 2):
        with raises("maxOffsetsPerTrigger: expected Spark 4.2 or later"):
            setting.follow(options, maxOffsetsPerTrigger="2")
    else:
        assert setting.follow(options, maxOffsetsPerTrigger="2") == [2, 2, 1]


def query_of_several_streams_takes_one_that_appears(setting: Setting) -> None:
    setting.make_stream([("x", "1")], "-a")
    pattern = {**setting.options, "streamPattern": f"{setting.name}-*"}
    assert setting.follow(pattern) == [1]
    setting.make_stream([("x", "2"), ("x", "3")], "-b")
    assert setting.follow(pattern) == [2]
    rows = setting.rows(setting.spark.read.parquet(str(setting.folder / "rows")), "stream", "seq")
    assert rows == [(f"{setting.name}-a", 1), (f"{setting.name}-b", 1), (f"{setting.name}-b", 2)]


def for_each_batch_gets_its_rows(setting: Setting) -> None:
    options, path = setting.make_stream(_ORDERS), str(setting.folder / "batches")

    def keep(batch: DataFrame, number: int) -> None:
        batch.selectExpr("seq", f"{number} AS batch").write.mode("append").parquet(path)

    setting.follow(options, keep)
    setting.publish(_ORDERS[:1], f"{setting.name}.")
    setting.follow(options, keep)
    expected = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1)]
    assert setting.rows(setting.spark.read.parquet(path), "seq", "batch") == expected


def query_writes_each_row_once(setting: Setting) -> None:
    source, target = setting.make_stream(_ORDERS, "-from"), setting.make_stream([], "-to")
    for attempt in range(2):
        frame = setting.spark.readStream.format("jetstream").options(**source, startingOffsets="earliest").load()
        writer = frame.selectExpr("value", f"'{target['stream']}.x' AS subject").writeStream.format("jetstream")
        # The second query has lost its checkpoint: only the ids tell that its rows are stored.
        writer = writer.options(**target, msgIdPrefix="once").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(setting.folder / str(attempt))).start()
        assert query.awaitTermination(120)
        assert setting.stored(target) == len(_ORDERS)


def rows_with_ids_are_stored_once(setting: Setting) -> None:
    options = setting.make_stream([])
    rows = setting.spark.createDataFrame([("ann", 12), ("bob", 7)], "customer STRING, amount INT").select(
        f.to_json(f.struct("customer", "amount")).alias("value"),
        f.lit(f"{setting.name}.new").alias("subject"),
        f.concat(f.lit("order-"), "customer").alias("msg_id"),
    )
    for _ in range(2):
        rows.write.format("jetstream").options(**options).mode("append").save()
    bodies = [('{"customer":"ann","amount":12}',), ('{"customer":"bob","amount":7}',)]
    assert setting.rows(setting.load(options), "string(value)") == bodies


def sql_reads_and_inserts(setting: Setting) -> None:
    options, sql = setting.make_stream(_ORDERS), setting.spark.sql
    listed = ", ".join(f"{name} '{value}'" for name, value in options.items())
    view = setting.name.replace("-", "_")
    sql(f"CREATE TEMPORARY VIEW {view} USING jetstream OPTIONS ({listed})")
    sql(f"CREATE TEMPORARY VIEW new_{view} (value BINARY, subject STRING) USING jetstream OPTIONS ({listed})")
    sql(f"INSERT INTO new_{view} SELECT value, '{setting.name}.again' FROM {view} WHERE seq = 3").collect()
    counts = sql(f"SELECT subject, count(*) AS messages FROM {view} GROUP BY subject")
    # A view reads what was stored when it was made.
    assert setting.rows(counts, "*") == [(f"{setting.name}.cancelled", 1), (f"{setting.name}.created", 3)]
    sql(f"CREATE TABLE table_{view} (value BINARY, subject STRING) USING jetstream")
    try:
        sql(f"INSERT INTO table_{view} WITH ({listed}) VALUES (CAST('5' AS BINARY), '{setting.name}.sql')").collect()
        table = sql(f"SELECT * FROM table_{view} WITH ({listed})")
        assert setting.rows(table.where("subject NOT LIKE '%c%ed'"), "subject", "string(value)") == [
            (f"{setting.name}.again", _ORDERS[2][1]),
            (f"{setting.name}.sql", "5"),
        ]
    finally:
        sql(f"DROP TABLE table_{view}")


def bucket_is_read_by_key(setting: Setting) -> None:
    stream = {"name": f"KV_{setting.name}", "subjects": [f"$KV.{setting.name}.>"], "max_msgs_per_subject": 5}
    setting.api(f"STREAM.CREATE.{stream['name']}", {**stream, "allow_direct": True, "allow_rollup_hdrs": True})
    deleted = {"KV-Operation": "DEL"}
    setting.publish([("apple", "1"), ("pear", "2"), ("apple", "3"), ("pear", "", deleted)], f"$KV.{setting.name}.")
    bucket = {**setting.options, "bucket": setting.name}
    latest = [("apple", "put", "3", 3), ("pear", "delete", "", 4)]
    columns = ("key", "rowKind", "string(value)", "seq")
    assert setting.rows(setting.load(bucket, latestPerSubject="true"), *columns) == latest
    assert setting.rows(setting.load(bucket, startingOffsets="3"), *columns) == latest
    assert setting.load(bucket).count() == 4


def refused_rows_are_kept_with_their_reasons(setting: Setting) -> None:
    options, path = setting.make_stream([], max_msg_size=300), str(setting.folder / "refused")
    number = f.col("id")
    rows = setting.spark.range(0, 8, 1, 2).select(
        f.when(number == 3, f.repeat(f.lit("x"), 400)).when(number != 4, number.cast("string")).alias("value"),
        f.when(number == 5, "a b").otherwise(f.lit(f"{setting.name}.a")).alias("subject"),
        f.concat(f.lit("row-"), number).alias("msg_id"),
    )
    for _ in range(2):
        kept = write_rows(rows, options, path)
        assert setting.rows(kept, "message_id", "substr(reason, 1, 12)") == [
            ("row-3", "message size"),
            ("row-4", "its value is"),
            ("row-5", "its subject "),
        ]
        assert setting.stored(options) == 5
    assert setting.spark.read.parquet(path).count() == 6
    assert setting.rows(setting.load(options), "string(value)") == [("0",), ("1",), ("2",), ("6",), ("7",)]


def repaired_letters_are_redriven(setting: Setting) -> None:
    queue = WorkQueue(
        name=setting.name,
        subjects=[f"{setting.name}.jobs.>"],
        dead_letters=f"{setting.name}_dead",
        events=f"{setting.name}_events",
        consumers=[Consumer(name="worker", filter_subject=f"{setting.name}.jobs.>", max_deliver=2)],
    )
    runs: list[str] = []

    def work(job: Delivery) -> None:
        runs.append(job.body.decode())
        if job.body.startswith(b"bad"):
            raise GiveUpError("bad")

    async def run_jobs(*bodies: str) -> None:
        async with connect(setting.settings) as connection:
            await provision(connection, queue)
            worker = Worker(queue, "worker", work, setting.settings)
            working, cursor = asyncio.create_task(worker.run()), await take_cursor(connection, queue)
            jobs = [Job(body.encode(), id=body) for body in bodies]
            published = await publish(connection, queue, jobs, subject=f"{setting.name}.jobs.x")
            await wait(connection, cursor, published.sequences, policy=WaitPolicy(max_dead=None))
            worker.stop()
            await working

    def mend(letters: DataFrame) -> DataFrame:
        fixed = f.regexp_replace(f.col("body").cast("string"), "bad", "good").cast("binary")
        return letters.where("string(body) <> 'bad 3'").withColumn("body", fixed)

    asyncio.run(run_jobs("fine 1", "bad 2", "bad 3", "fine 4", "bad 5"))
    letters = read_letters(setting.spark, queue, setting.options)
    assert setting.rows(letters, "sequence", "string(body)") == [(2, "bad 2"), (3, "bad 3"), (5, "bad 5")]
    repair(snapshot(letters, str(setting.folder / "letters")), mend, str(setting.folder / "repaired"))
    repaired = read_repaired(setting.spark, str(setting.folder / "repaired"))
    assert setting.rows(repaired, "sequence", "string(body)", "repaired") == [(2, "good 2", True), (5, "good 5", True)]
    report = redrive_letters(setting.spark, repaired, queue, None, setting.options)
    assert (sorted(report.redriven), report.failed) == ([2, 5], {})
    runs.clear()
    asyncio.run(run_jobs("last"))
    assert sorted(runs) == ["good 2", "good 5", "last"]


def lost_messages_fail_a_read(setting: Setting) -> None:
    options = setting.make_stream([("x", str(number)) for number in range(6)])
    frames = []
    for number, more in enumerate(({}, {"failOnDataLoss": "false"}, {"acceptedLoss": "1-3"})):
        # Unlike a data frame of Spark Connect, a view is loaded when it is made.
        view = f"{setting.name}_{number}"
        listed = ", ".join(f"{name} '{value}'" for name, value in {**options, **more}.items())
        setting.spark.sql(f"CREATE TEMPORARY VIEW {view} USING jetstream OPTIONS ({listed})")
        frames.append(setting.spark.table(view))
    setting.api(f"STREAM.PURGE.{setting.name}", {"seq": 4})
    with raises("the messages 1 to 3", "acceptedLoss=1-3"):
        frames[0].collect()
    for frame in frames[1:]:
        assert setting.rows(frame, "seq") == [(4,), (5,), (6,)]


# Through Spark Connect they need nothing on the server.
BATCHES: Final[tuple[Callable[[Setting], None], ...]] = (
    batch_is_filtered_and_decoded,
    several_streams_are_read_together,
    headers_are_read_and_copied,
    rows_with_ids_are_stored_once,
    refused_rows_are_kept_with_their_reasons,
    sql_reads_and_inserts,
    bucket_is_read_by_key,
    lost_messages_fail_a_read,
    repaired_letters_are_redriven,
)
# Spark plans them in processes that get no artifacts: through Connect, the server needs this package.
STREAMING: Final[tuple[Callable[[Setting], None], ...]] = (
    query_goes_on_from_its_checkpoint,
    batches_are_bounded,
    query_of_several_streams_takes_one_that_appears,
    for_each_batch_gets_its_rows,
    query_writes_each_row_once,
)
PARTS: Final = {"all": (*BATCHES, *STREAMING), "batches": BATCHES, "streaming": STREAMING}


def make_session(folder: Path, remote: str | None, package: str | None) -> SparkSession:
    """Start Spark, or connect to one that lacks this package and gets it as a zip."""
    if remote:
        session = SparkSession.builder.remote(remote).getOrCreate()
        if package:
            session.addArtifact(package, pyfile=True)
        return session
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("queries")
    for name, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
        "spark.sql.shuffle.partitions": "2",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main() -> None:
    """Run queries, each with streams and a folder of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--remote")
    parser.add_argument("--package")
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--only", help="the name of one query")
    arguments = parser.parse_args()
    session = make_session(arguments.folder, arguments.remote, arguments.package)
    register(session)
    print(json.dumps({"spark": session.version, "python": platform.python_version()}), flush=True)
    for query in PARTS[arguments.part]:
        if arguments.only not in (None, query.__name__):
            continue
        folder = arguments.folder / query.__name__
        folder.mkdir()
        setting = Setting(session, arguments.url, f"q{uuid4().hex[:8]}", folder, bool(arguments.remote))
        problem = None
        try:
            query(setting)
        except Exception:  # noqa: BLE001 (the next query runs all the same, and the test reads what failed)
            problem = traceback.format_exc()
        print(json.dumps({"query": query.__name__, "problem": problem}), flush=True)
    session.stop()


if __name__ == "__main__":
    main()
