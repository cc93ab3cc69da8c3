"""What a repair has written is read, checked and redriven by another driver than the one that wrote it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from bulk_letters import exhaust_deliveries, letter_records, make_letters, stored_messages
from driver_processes import driver_process, read_message
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.spark import (
    RepairedLettersError,
    SparkOptionError,
    preview_letters,
    read_letters,
    read_repaired,
    redrive_letters,
    repair,
    snapshot,
)
from testbed.dead_letters import publish_raw
from testbed.queues import eventually
from testbed.spark_face import run_on_own_connection

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.nats_server import NatsServer
    from testbed.spark_face import BlockingConnection

COUNT = 20
# Header lines, and the last token of the subject; U+DCFF stands for the byte ff.
RAW = [
    (b"Latin: Gr\xf6\xdfe\r\nTag: a", "latin"),
    (b"Tag: Gr\xf6\xdfe\r\nTag: wrong\r\nTag: Gr\xfc\xdfe", "tags"),
    (b"Gr\xf6\xdfe: one\r\nGr\xfc\xdfe: two\r\nTag: wrong", "names"),
    (b"Tag: wrong\r\nLatin: \xff", "gr\udcf6\udcdfe"),
    (b"Latin: \xff\xfe", "gr\udcfc\udcdfe"),
]


def raw_letters(server: NatsServer, options: dict[str, str], queue: WorkQueue) -> None:
    for number, (lines, token) in enumerate(RAW):
        asyncio.run(publish_raw(server, f"{queue.name}.jobs.{token}", lines, b"raw %d" % number))
    exhaust_deliveries(options, queue, len(RAW))


def test_another_driver_redrives_what_a_killed_one_has_repaired(
    spark: SparkSession, nats: NatsServer, connection_options: dict[str, str], name: str, tmp_path: Path
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    raw_letters(nats, connection_options, queue)
    arguments = json.dumps(connection_options), queue.model_dump_json(exclude_defaults=True), str(tmp_path)
    with driver_process("repair_driver.py", *arguments, log=tmp_path / "driver.log") as driver:
        assert read_message(driver) == {"letters": COUNT + len(RAW)}
        asyncio.run(eventually(lambda: asyncio.sleep(0, (tmp_path / "half").exists()), 60))
    with pytest.raises(RepairedLettersError, match="its driver ended before"):
        read_repaired(spark, str(tmp_path / "unfinished"))
    before = {message.sequence: message for message in stored_messages(connection_options, name)}
    letters = read_repaired(spark, str(tmp_path / "repaired"))
    preview = preview_letters(spark, letters, queue, None, connection_options)
    assert (preview.redriven, preview.failures) == (COUNT + len(RAW), 0)
    report = redrive_letters(spark, letters, queue, RedriveRequest(run="repaired"), connection_options)
    assert (len(report.redriven), dict(report.failed), list(report.gone)) == (COUNT + len(RAW), {}, [])
    after = {
        dict(message.headers)["Redrive-Sequence"]: message for message in stored_messages(connection_options, name)
    }
    assert {int(sequence) for sequence in after} == set(before)
    for sequence, original in before.items():
        copy = after[str(sequence)]
        assert copy.subject == original.subject
        assert copy.data == (b"mended " + original.data if sequence % 2 == 0 else original.data)
        own = [pair for pair in copy.headers if not pair[0].startswith(("Redrive-", "Nats-"))]
        right = [(key, "right" if value == "wrong" else value) for key, value in original.headers]
        assert sorted(own) == sorted(right)
    records = letter_records(connection_options, queue)
    assert Counter(record.sequence for record in records) == Counter(range(1, COUNT + len(RAW) + 1))
    assert stored_messages(connection_options, f"{name}-dead") == []


def test_letters_that_were_changed_after_their_check_are_not_read(
    spark: SparkSession, connection_options: dict[str, str], name: str, tmp_path: Path
) -> None:
    queue = make_letters(connection_options, name, 6)
    letters = snapshot(read_letters(spark, queue, connection_options, tasks=2), str(tmp_path / "letters"))
    path = tmp_path / "repaired"
    repair(letters, lambda frame: frame, str(path))
    assert read_repaired(spark, str(path)).columns == [
        *("sequence", "subject", "body", "headers", "repaired", "stream_created")
    ]
    with pytest.raises(SparkOptionError, match="read_repaired"):
        redrive_letters(spark, spark.read.parquet(str(path)), queue, None, connection_options)

    def copy(to: str) -> Path:
        return shutil.copytree(path, tmp_path / to)

    def problem(folder: Path) -> str:
        with pytest.raises(RepairedLettersError) as caught:
            read_repaired(spark, str(folder))
        return str(caught.value)

    (changed := copy("changed")).joinpath("note.txt").write_text("no Parquet")
    assert "files that can't be read" in problem(changed)
    missing = copy("missing")
    next(missing.glob("*.parquet")).unlink()
    assert "6 letters that were checked (0 of them repaired" in problem(missing)
    twice = copy("twice")
    file = next(twice.glob("*.parquet"))
    shutil.copy(file, file.with_name("more.parquet"))
    assert "the files were changed since" in problem(twice)
    edited = tmp_path / "edited"
    other = spark.read.parquet(str(path)).withColumn(
        "body", f.reverse(f.concat(f.col("body").cast("string"), f.lit("x")))
    )
    other.withColumn("body", f.col("body").cast("binary")).write.parquet(str(edited))
    assert "no record that its letters were checked" in problem(edited)
    shutil.copytree(path / "_checked", edited / "_checked")
    assert "found 6 (0, " in problem(edited)
    cut = copy("cut")
    file = next(cut.glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-200])
    for checksum in cut.glob(".*.crc"):
        checksum.unlink()
    assert "files that can't be read" in problem(cut)
    record = copy("record")
    for file in (*record.glob("_checked/*.txt"), *record.glob("_checked/.*.crc")):
        file.unlink()
    (record / "_checked" / "part.txt").write_text('{"format": 2, "letters": 6}')
    assert "a later version wrote it" in problem(record)
    assert "none was written there" in problem(tmp_path / "nowhere")
    moved = path.rename(tmp_path / "moved")
    assert read_repaired(spark, str(moved)).count() == 6


def test_letters_of_a_stream_that_was_created_anew_are_not_redriven(
    spark: SparkSession, connection_options: dict[str, str], name: str, tmp_path: Path
) -> None:
    queue = make_letters(connection_options, name, 3)
    letters = snapshot(read_letters(spark, queue, connection_options), str(tmp_path / "letters"))
    repair(letters, lambda frame: frame, str(tmp_path / "repaired"))

    async def delete(connection: BlockingConnection) -> None:
        await connection.api(f"STREAM.DELETE.{name}")

    run_on_own_connection(connection_options, delete)
    # The same subjects and sequences, other jobs.
    make_letters(connection_options, name, 3)
    repaired = read_repaired(spark, str(tmp_path / "repaired"))
    report = redrive_letters(spark, repaired, queue, None, connection_options)
    assert (sorted(report.failed), list(report.redriven)) == ([1, 2, 3], [])
    assert "the queue was created anew" in report.failed[1]
    assert len(stored_messages(connection_options, name)) == 3
    in_place = RedriveRequest(protocol=Protocol.IN_PLACE)
    with pytest.raises(RedriveRequestError, match="letters of another stream"):
        redrive_letters(spark, repaired, queue, in_place, connection_options)


def test_a_row_that_cannot_be_sent_fails_only_its_letter(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, 8)
    letters = read_letters(spark, queue, connection_options)
    number, subject = f.col("sequence"), f.col("subject")
    odd = f.when(number == 1, f.concat(subject, f.lit(".*"))).when(number == 2, f.concat(subject, f.lit("\r\nPUB")))
    odd = odd.when(number == 3, f.lit("")).when(number == 4, f.concat(subject, f.lit("\a"))).otherwise(subject)
    value = f.when(number == 5, "x\r\nNats-Msg-Id: y").otherwise("x")
    headers = f.array(f.struct(f.lit("Tag").alias("key"), value.alias("value")))
    repaired = letters.select("sequence", odd.alias("subject"), "body", headers.alias("headers"))
    preview = preview_letters(spark, repaired, queue, None, connection_options)
    report = redrive_letters(spark, repaired, queue, None, connection_options)
    assert sorted(report.redriven) == [6, 7, 8]
    assert dict(report.failed) == preview.failed
    for sequence, cause in enumerate(("wildcards", "control characters", "it is empty", "control characters"), 1):
        assert cause in report.failed[sequence]
    assert "expected text without line breaks" in report.failed[5]
