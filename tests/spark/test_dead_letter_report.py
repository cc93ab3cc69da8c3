from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from letter_queue import ORIGIN, SCRIPT, TASK
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.death import Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, DeadLetter
from airflow_provider_jetstream.spark.dead_letters import read_snapshot, repair, snapshot, triage, write_report
from airflow_provider_jetstream.spark.dead_letters.letter_rows import letter_batch
from airflow_provider_jetstream.spark.errors import RepairContractError, SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

_COUNT = 300
_START = datetime(2026, 11, 18, 22, 30, tzinfo=UTC)


def some_letter(number: int) -> DeadLetter:
    kind = number % 3
    death = Death(
        stream="orders",
        created="2026-11-01T00:00:00Z",
        sequence=number,
        consumer="printer",
        reason=(Reason.TERMINATED, Reason.MAX_DELIVERIES, Reason.ORPHAN)[kind],
        died_at=_START + timedelta(minutes=10 * number),
        deliveries=3,
        error_class=(f"printing.{SCRIPT}", "TimeoutError", None)[kind],
        error_message=(f"no paper {number} {SCRIPT}", f"waited {number} s", None)[kind],
        traceback_digest=("2c61e0f5b7aa", None, None)[kind],
    )
    headers = tuple((ORIGIN | TASK).items()) if number % 2 else ()
    subject, body, time = f"orders.{number % 40}.{SCRIPT.replace(' ', '')}", b"%d" % number, "2026-11-18T00:00:00Z"
    source = BodySource.QUEUE if kind else BodySource.COPY
    return DeadLetter(death, subject, body, headers, time, source, (number,), preserved=True, ready_at=death.died_at)


@pytest.fixture(scope="module")
def kept(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    letters = [some_letter(number) for number in range(1, _COUNT + 1)]
    lost = [replace(some_letter(number).death) for number in (1001, 1002)]
    table = pa.Table.from_batches([letter_batch(letters, lost)])
    return snapshot(spark.createDataFrame(table), str(tmp_path_factory.mktemp("letters") / "kept"))


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href" and value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_snapshot_is_by_the_day_of_death_and_reads_back_whole(spark: SparkSession, kept: DataFrame) -> None:
    (path,) = {file.split("/day=")[0] for file in kept.inputFiles()}
    days = {re.findall(r"day=([0-9-]+)", file)[0] for file in kept.inputFiles()}
    assert days == {"2026-11-18", "2026-11-19", "2026-11-20", "2026-11-21", "2026-11-25"}
    again = read_snapshot(spark, path)
    assert again.count() == _COUNT + 2
    assert again.where(f.to_date("died_at") != f.col("day")).count() == 0
    row = again.where("sequence = 3").collect()[0]
    assert (bytes(row.body), row.job_id, row.map_index, row.state) == (b"3", "3", 3, "circulating")


def test_a_snapshot_of_nothing_can_be_read(spark: SparkSession, kept: DataFrame, tmp_path: Path) -> None:
    empty = snapshot(kept.where("sequence < 0").drop("day"), str(tmp_path / "empty"))
    assert empty.count() == 0
    summary = write_report(empty, str(tmp_path / "report"))
    assert (summary.letters, summary.reasons, summary.largest) == (0, {}, None)
    assert "No dead letters." in (tmp_path / "report" / "report.html").read_text()


def test_every_side_of_the_triage_adds_up(kept: DataFrame) -> None:
    found = triage(kept)
    frames = [frame.agg(f.sum("letters").alias("letters")) for frame in vars(found).values()]
    assert {row.letters for row in reduce(DataFrame.union, frames).collect()} == {_COUNT + 2}
    groups = {row.reason: (row.letters, row.sample_sequence) for row in found.groups.collect()}
    assert groups == {"terminated": (101, 3), "max_deliveries": (100, 1), "orphan": (101, 2)}
    assert {row.hour.minute for row in found.hours.collect()} == {0}


def test_the_page_holds_what_the_frame_holds_and_nothing_runs_in_it(kept: DataFrame, tmp_path: Path) -> None:
    summary = write_report(kept, str(tmp_path / "report"), airflow_url="https://airflow.example/", top=7)
    assert (summary.letters, summary.lost, summary.parked, summary.causes) == (_COUNT + 2, 2, 0, 3)
    assert sum(summary.reasons.values()) == _COUNT + 2
    page = (tmp_path / "report" / "report.html").read_text()
    parsed = _Texts()
    parsed.feed(page)
    assert not {"script", "img", "iframe", "link", "object"} & set(parsed.tags)
    assert not {name for name in parsed.attributes if name.startswith("on") or name in ("src", "style", "srcset")}
    assert any(SCRIPT in text for text in parsed.texts)
    run = "https://airflow.example/dags/prints%2Fnightly/runs/manual__2026-11-21T00%3A00%3A00%2B00%3A00"
    assert {run, "https://airflow.example/dags/prints%2Fnightly"} == set(parsed.links)
    # Every table shows all letters, those that it has no row for in its last one.
    for table in page.split("<table>")[1:]:
        counts = re.findall(r'<td class="count">([\d,]+)</td>', table.split("</table>")[0])
        assert sum(int(count.replace(",", "")) for count in counts) == _COUNT + 2
    bars = re.findall(r"<title>[^<]*: (\d+) [a-z_]+</title>", page)
    assert sum(map(int, bars)) == _COUNT + 2
    data = kept.sparkSession.read.parquet(summary.data)
    assert data.count() == _COUNT + 2
    assert not {"body", "headers"} & set(data.columns)


def test_a_link_that_would_run_something_is_refused(kept: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(SparkOptionError, match="airflow_url"):
        write_report(kept, str(tmp_path / "report"), airflow_url="javascript:alert(1)")
    with pytest.raises(SparkOptionError, match="page"):
        write_report(kept, "s3a://bucket/report")


def test_a_repair_changes_what_it_may(kept: DataFrame, tmp_path: Path) -> None:
    def function(letters: DataFrame) -> DataFrame:
        fixed = f.when(f.col("sequence") == 5, f.lit("fixed").cast("binary")).otherwise(f.col("body"))
        return letters.where("sequence <= 10").select("sequence", fixed.alias("body"))

    repaired = repair(kept, function, str(tmp_path / "repaired"))
    assert repaired.columns == ["sequence", "subject", "body", "headers", "repaired"]
    rows = {row.sequence: row for row in repaired.collect()}
    assert sorted(rows) == list(range(1, 11))
    assert [sequence for sequence, row in rows.items() if row.repaired] == [5]
    assert (bytes(rows[5].body), rows[5].subject) == (b"fixed", some_letter(5).subject)
    assert [tuple(pair) for pair in rows[5].headers] == list(some_letter(5).headers)
    unchanged = repair(kept, lambda letters: letters, str(tmp_path / "repaired"))
    assert unchanged.groupBy("repaired").count().collect() == [(False, _COUNT)]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda letters: letters.drop("sequence"), "no column sequence"),
        (lambda letters: letters.withColumn("note", f.lit(1)), "a new column note"),
        (lambda letters: letters.withColumn("body", f.col("body").cast("string")), "body of type string"),
        (lambda _: None, "found NoneType"),
        (
            lambda letters: letters.withColumn(
                "reason", f.when(f.col("sequence") == 7, "x").otherwise(f.col("reason"))
            ),
            "for 1 letters (7: a change of reason)",
        ),
        (lambda letters: letters.union(letters.where("sequence = 9")), "for 1 letters (9: a letter more than once"),
        (
            lambda letters: letters.withColumn("sequence", f.col("sequence") + _COUNT),
            "301: a letter that it wasn't given",
        ),
        (lambda letters: letters.withColumn("body", f.lit(None).cast("binary")), "body set to null"),
        (
            lambda letters: letters.withColumn("headers", f.lit(None).cast("array<struct<key:string,value:string>>")),
            "null",
        ),
    ],
)
def test_a_repair_that_breaks_its_contract_is_told_how(
    kept: DataFrame, tmp_path: Path, function: Callable[[DataFrame], DataFrame], told: str
) -> None:
    with pytest.raises(RepairContractError, match=re.escape(told)):
        repair(kept, function, str(tmp_path / "repaired"))
