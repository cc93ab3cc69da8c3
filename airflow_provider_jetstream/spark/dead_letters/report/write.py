"""Writes the report about dead letters: the letters and their causes as Parquet, and an HTML page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.read import snapshot
from airflow_provider_jetstream.spark.dead_letters.report.content import Totals, count_all, report_page
from airflow_provider_jetstream.spark.dead_letters.schema import BODY, HEADERS, IS_PARKED, LOST, STATE
from airflow_provider_jetstream.spark.dead_letters.triage_tables import CAUSE, LETTERS, triage
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PAGE = "report.html"


@dataclass(frozen=True)
class ReportSummary:
    """The most important numbers of a report, and its files.

    :param letters: the number of letters
    :param lost: letters without a body
    :param parked: letters out of circulation
    :param causes: distinct causes of death
    :param reasons: letters by reason
    :param largest: the fingerprint of the most frequent cause, and its letters
    :param first_died_at: the first death, in ISO 8601
    :param last_died_at: the last death, in ISO 8601
    :param page: the path of the page
    :param data: the path of the Parquet files
    """

    letters: int
    lost: int
    parked: int
    causes: int
    reasons: dict[str, int]
    largest: tuple[str, int] | None
    first_died_at: str | None
    last_died_at: str | None
    page: str
    data: str

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values, such as an XCom takes."""
        return asdict(self)


def write_report(
    letters: DataFrame,
    directory: str,
    *,
    title: str | None = None,
    airflow_url: str | None = None,
    page: Path | str | None = None,
    top: int = 20,
) -> ReportSummary:
    """Write a report about dead letters.

    ``directory`` gets ``letters`` (every letter without body and headers, which the snapshot holds; Parquet,
    partitioned by day), ``groups`` (every cause; Parquet) and, where it is on the driver, ``report.html``.
    All counts are of what was written, so they add up.

    :param letters: a snapshot
    :param directory: a directory that doesn't exist yet
    :param title: the page's heading; names the queue where absent
    :param airflow_url: the base URL for links to runs
    :param page: the path of the page on the driver, if not in the directory
    :param top: the most rows of a table
    :raises SparkOptionError: the URL is invalid, or ``page`` is missing for a remote directory
    """
    if airflow_url is not None and urlsplit(airflow_url).scheme not in ("http", "https"):
        raise SparkOptionError(f"expected airflow_url to begin with https:// or http://, found {airflow_url!r}")
    file, directory = _page_path(page, directory), directory.rstrip("/")
    written = snapshot(letters.drop(BODY, HEADERS, "day"), f"{directory}/{LETTERS}")
    tables = triage(written)
    tables.groups.write.mode("error").parquet(f"{directory}/groups")
    totals = _totals(written)
    counts = count_all(tables, totals.letters, top)
    content = report_page(counts, totals, title=title, airflow_url=airflow_url, written_at=datetime.now(UTC))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content.html(), encoding="utf-8")
    largest = next(iter(counts["groups"].rows), None)
    return ReportSummary(
        letters=totals.letters,
        lost=totals.lost,
        parked=totals.parked,
        causes=totals.causes,
        reasons={row["reason"]: row[LETTERS] for row in counts["reasons"].rows},
        largest=(largest["fingerprint"], largest[LETTERS]) if largest else None,
        first_died_at=totals.first_died_at.isoformat() if totals.first_died_at else None,
        last_died_at=totals.last_died_at.isoformat() if totals.last_died_at else None,
        page=str(file),
        data=f"{directory}/{LETTERS}",
    )


def _page_path(page: Path | str | None, directory: str) -> Path:
    if page is not None:
        return Path(page)
    parts = urlsplit(directory)
    if parts.scheme not in ("", "file"):
        raise SparkOptionError(
            f"expected page, a path on the driver, because {directory} isn't on the driver; found none: set page"
        )
    return Path(unquote(parts.path)) / _PAGE if parts.scheme else Path(directory) / _PAGE


def _totals(letters: DataFrame) -> Totals:
    def seconds(time: Any) -> Any:
        # As a number, since Spark returns times without their time zone.
        return f.unix_micros(time) / 1_000_000

    row = letters.agg(
        f.count("*").alias("letters"),
        f.count_if(f.col(STATE) == LOST).alias("lost"),
        f.count_if(f.col(STATE) == IS_PARKED).alias("parked"),
        f.count_distinct(f.struct(*CAUSE)).alias("causes"),
        f.count_distinct("dag_id").alias("dags"),
        f.count_if(f.col("redrive_count") > 0).alias("redriven"),
        f.sort_array(f.collect_set("stream")).alias("queues"),
        seconds(f.min("died_at")).alias("first"),
        seconds(f.max("died_at")).alias("last"),
    ).collect()[0]
    first, last = (None if row[name] is None else datetime.fromtimestamp(row[name], UTC) for name in ("first", "last"))
    return Totals(
        letters=row["letters"],
        lost=row["lost"],
        parked=row["parked"],
        redriven=row["redriven"],
        causes=row["causes"],
        dags=row["dags"],
        queues=tuple(row["queues"]),
        first_died_at=first,
        last_died_at=last,
    )
