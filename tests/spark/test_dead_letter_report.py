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

from airflow_provider_jetstream.jetstream import DeadLetter, Death, Reason
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource, origin_of
from airflow_provider_jetstream.spark import repair, snapshot, triage, write_report
from airflow_provider_jetstream.spark.dead_letters.schema import letter_batch
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
    origin, ready_at = origin_of(headers), death.died_at
    return DeadLetter(
        *(death, subject, body, headers, time, source, (number,)), preserved=True, ready_at=ready_at, origin=origin
    )


@pytest.fixture(scope="module")
def letters(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    circulating = [some_letter(number) for number in range(1, _COUNT + 1)]
    lost = [replace(some_letter(number).death) for number in (1001, 1002)]
    table = pa.Table.from_batches([letter_batch(circulating, lost)])
    return snapshot(spark.createDataFrame(table), str(tmp_path_factory.mktemp("letters") / "snapshot"))


class _PageParser(HTMLParser):
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


def test_an_empty_snapshot_can_be_read(spark: SparkSession, letters: DataFrame, tmp_path: Path) -> None:
    empty = snapshot(letters.where("sequence < 0").drop("day"), str(tmp_path / "empty"))
    assert empty.count() == 0
    summary = write_report(empty, str(tmp_path / "report"))
    assert (summary.letters, summary.reasons, summary.largest) == (0, {}, None)
    assert "No dead letters." in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.smoke
def test_every_table_of_the_triage_adds_up(letters: DataFrame) -> None:
    tables = triage(letters)
    frames = [frame.agg(f.sum("letters").alias("letters")) for frame in vars(tables).values()]
    assert {row.letters for row in reduce(DataFrame.union, frames).collect()} == {_COUNT + 2}
    groups = {row.reason: (row.letters, row.sample_sequence) for row in tables.groups.collect()}
    assert groups == {"terminated": (101, 3), "max_deliveries": (100, 1), "orphan": (101, 2)}
    assert {row.hour.minute for row in tables.hours.collect()} == {0}


@pytest.mark.smoke
def test_the_page_shows_all_letters_and_contains_nothing_that_runs(letters: DataFrame, tmp_path: Path) -> None:
    summary = write_report(letters, str(tmp_path / "report"), airflow_url="https://airflow.example/", top=7)
    assert (summary.letters, summary.lost, summary.parked, summary.causes) == (_COUNT + 2, 2, 0, 3)
    assert sum(summary.reasons.values()) == _COUNT + 2
    page = (tmp_path / "report" / "report.html").read_text()
    parsed = _PageParser()
    parsed.feed(page)
    assert not {"script", "img", "iframe", "link", "object"} & set(parsed.tags)
    assert not {name for name in parsed.attributes if name.startswith("on") or name in ("src", "style", "srcset")}
    assert any(SCRIPT in text for text in parsed.texts)
    run = "https://airflow.example/dags/prints%2Fnightly/runs/manual__2026-11-21T00%3A00%3A00%2B00%3A00"
    assert {run, "https://airflow.example/dags/prints%2Fnightly"} == set(parsed.links)
    # Every table counts all letters: its last row counts those without a row of their own.
    for table in page.split("<table>")[1:]:
        counts = re.findall(r'<td class="count">([\d,]+)</td>', table.split("</table>")[0])
        assert sum(int(count.replace(",", "")) for count in counts) == _COUNT + 2
    # Two letters died seven days after the first one, the others long before.
    assert "Deaths from 2026-11-18 22:40:00 to 2026-11-25 21:30:00." in page
    for name in ("terminated", "max_deliveries", "orphan"):
        assert f"{summary.reasons[name]} {name}" in page
    assert "every delivery failed: mend the handler or what it needs, then redrive" in page
    groups = {
        row.reason: row for row in letters.sparkSession.read.parquet(str(tmp_path / "report" / "groups")).collect()
    }
    assert groups["max_deliveries"].examples == [1, 298]
    assert {len(row.trend) for row in groups.values()} == {24}
    assert {reason: sum(row.trend) for reason, row in groups.items()} == summary.reasons
    assert sum(row.trend[-1] for row in groups.values()) == 2
    data = letters.sparkSession.read.parquet(summary.data)
    assert data.count() == _COUNT + 2
    assert not {"body", "headers"} & set(data.columns)


def test_a_link_that_could_run_code_is_refused(letters: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(SparkOptionError, match="airflow_url"):
        write_report(letters, str(tmp_path / "report"), airflow_url="javascript:alert(1)")
    with pytest.raises(SparkOptionError, match="page"):
        write_report(letters, "s3a://bucket/report")


def test_a_repair_may_change_bodies(letters: DataFrame, tmp_path: Path) -> None:
    def function(frame: DataFrame) -> DataFrame:
        fixed = f.when(f.col("sequence") == 5, f.lit("fixed").cast("binary")).otherwise(f.col("body"))
        return frame.where("sequence <= 10").select("sequence", fixed.alias("body"))

    repaired = repair(letters, function, str(tmp_path / "repaired"))
    assert repaired.columns == ["sequence", "subject", "body", "headers", "repaired", "stream_created"]
    rows = {row.sequence: row for row in repaired.collect()}
    assert sorted(rows) == list(range(1, 11))
    assert [sequence for sequence, row in rows.items() if row.repaired] == [5]
    assert (bytes(rows[5].body), rows[5].subject) == (b"fixed", some_letter(5).subject)
    assert [tuple(pair) for pair in rows[5].headers] == list(some_letter(5).headers)
    unchanged = repair(letters, lambda frame: frame, str(tmp_path / "repaired"))
    assert unchanged.groupBy("repaired").count().collect() == [(False, _COUNT)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda frame: frame.drop("sequence"), "no column sequence"),
        (lambda frame: frame.withColumn("note", f.lit(1)), "a new column note"),
        (lambda frame: frame.withColumn("body", f.col("body").cast("string")), "body of type string"),
        (lambda _: None, "found NoneType"),
        (
            lambda frame: frame.withColumn("reason", f.when(f.col("sequence") == 7, "x").otherwise(f.col("reason"))),
            "for 1 letters (7: a change of reason)",
        ),
        (lambda frame: frame.union(frame.where("sequence = 9")), "for 1 letters (9: a letter more than once"),
        (
            lambda frame: frame.withColumn("sequence", f.col("sequence") + _COUNT),
            "301: a letter that it wasn't given",
        ),
        (lambda frame: frame.withColumn("body", f.lit(None).cast("binary")), "body set to null"),
        (
            lambda frame: frame.withColumn("headers", f.lit(None).cast("array<struct<key:string,value:string>>")),
            "null",
        ),
    ],
)
def test_the_error_of_a_broken_contract_names_the_problem(
    letters: DataFrame, tmp_path: Path, function: Callable[[DataFrame], DataFrame], message: str
) -> None:
    with pytest.raises(RepairContractError, match=re.escape(message)):
        repair(letters, function, str(tmp_path / "repaired"))
