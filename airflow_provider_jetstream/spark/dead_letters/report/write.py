"""The report about dead letters: what they were as Parquet, and what they have in common on one page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.report.content import Totals, count_all, report_page
from airflow_provider_jetstream.spark.dead_letters.schema import BODY, HEADERS, IS_PARKED, LOST, STATE
from airflow_provider_jetstream.spark.dead_letters.snapshots import snapshot
from airflow_provider_jetstream.spark.dead_letters.triage import LETTERS, triage
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PAGE = "report.html"


@dataclass(frozen=True)
class ReportSummary:
    """A report in short.

    :param letters: how many it is about
    :param lost: how many of them have no body any more
    :param parked: how many of them are out of circulation
    :param causes: how many causes they died of
    :param reasons: how many died for each reason
    :param largest: the fingerprint of the cause with most letters, and how many
    :param first_died_at: the first death, in ISO 8601
    :param last_died_at: the last death
    :param page: where the page is
    :param data: where the Parquet files are
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
        """Give it as plain values, such as an XCom takes.

        :return: by field
        """
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
    """Write what dead letters were and what they have in common.

    ``directory`` gets ``letters`` (every letter but for body and headers, which the snapshot holds; Parquet,
    partitioned by day), ``groups`` (every cause; Parquet) and, where it is one of the driver's, ``report.html``.
    All counts are of what was written, so they add up.

    :param letters: a snapshot
    :param directory: a directory that doesn't exist yet
    :param title: the page's heading; names the queue where absent
    :param airflow_url: where Airflow's pages are, so that runs can be linked to
    :param page: where the driver writes the page, if not into the directory
    :param top: how many rows each table shows at most
    :return: the report in short
    :raises SparkOptionError: the URL isn't one, or the page has no place
    """
    if airflow_url is not None and urlsplit(airflow_url).scheme not in ("http", "https"):
        raise SparkOptionError(f"expected airflow_url to begin with https:// or http://, found {airflow_url!r}")
    file, directory = _file(page, directory), directory.rstrip("/")
    told = snapshot(letters.drop(BODY, HEADERS, "day"), f"{directory}/{LETTERS}")
    found = triage(told)
    found.groups.write.mode("error").parquet(f"{directory}/groups")
    totals = _totals(told)
    counts = count_all(found, totals.letters, top)
    shown = report_page(counts, totals, title=title, airflow_url=airflow_url, written_at=datetime.now(UTC))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(shown.html(), encoding="utf-8")
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


def _file(page: Path | str | None, directory: str) -> Path:
    if page is not None:
        return Path(page)
    parts = urlsplit(directory)
    if parts.scheme not in ("", "file"):
        raise SparkOptionError(
            f"expected page, a path on the driver, since {directory} is none; found none: say where the page goes"
        )
    return Path(unquote(parts.path)) / _PAGE if parts.scheme else Path(directory) / _PAGE


def _totals(told: DataFrame) -> Totals:
    def seconds(moment: Any) -> Any:
        # As a number, since Spark gives times in a time zone of its own without saying which.
        return f.unix_micros(moment) / 1_000_000

    row = told.agg(
        f.count("*").alias("letters"),
        f.count_if(f.col(STATE) == LOST).alias("lost"),
        f.count_if(f.col(STATE) == IS_PARKED).alias("parked"),
        f.count_distinct(f.struct("fingerprint", "reason", "error_class", "traceback_digest")).alias("causes"),
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
