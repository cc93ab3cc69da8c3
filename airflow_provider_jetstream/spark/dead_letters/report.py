"""Counts dead letters by cause, time, subject and origin, and writes the report: Parquet, and one HTML page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.spark.dead_letters.read import snapshot
from airflow_provider_jetstream.spark.dead_letters.schema import BODY, HEADERS, IS_PARKED, LOST, STATE
from airflow_provider_jetstream.spark.errors import SparkOptionError, SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, Row

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField


LETTERS: Final = "letters"
_HOUR, _DAY = 3_600, 86_400
# Equal parts of the time from the first death to the last one.
_PARTS = 24
_DIAGNOSES: Final = {
    Reason.MAX_DELIVERIES: "every delivery failed: mend the handler or what it needs, then redrive",
    Reason.TERMINATED: "a worker gave the job up: repair what it refuses, then redrive, or discard",
    Reason.DEADLINE: "the last delivery ran past its deadline: give more time or split the job, then redrive",
    Reason.EXPIRED: "its deadline passed before a worker had it or while one did: add workers, or discard",
    Reason.ORPHAN: "found by counting, its advisory is gone: look at the worker's log, then redrive",
    Reason.UNDELIVERABLE: "no consumer takes its subject: add a consumer, or redrive to another subject",
    Reason.UNACCOUNTED: "gone without evidence of its end: find out whether it was done before a redrive",
}
CAUSE: Final[tuple[GroupField, ...]] = ("fingerprint", "reason", "error_class", "traceback_digest")


@dataclass(frozen=True)
class Triage:
    """The same letters counted by different fields; each table's column ``letters`` adds up to their number.

    :param groups: by cause (fingerprint, reason, error class and traceback digest together), each with its first and
        last death, a sample, what it affected, ``trend`` (letters in equal parts of the time from the first death of
        all to the last one), ``examples`` (sequences) and ``diagnosis``; the largest first
    :param fingerprints: by fingerprint
    :param reasons: by reason
    :param error_classes: by error class
    :param digests: by traceback digest and the error's place in the code
    :param states: by state and source of the body
    :param hours: by hour of death and reason, in order
    :param days: by UTC day of death and reason, in order
    :param subjects: by subject
    :param consumers: by consumer
    :param origins: by DAG and run
    """

    groups: DataFrame
    fingerprints: DataFrame
    reasons: DataFrame
    error_classes: DataFrame
    digests: DataFrame
    states: DataFrame
    hours: DataFrame
    days: DataFrame
    subjects: DataFrame
    consumers: DataFrame
    origins: DataFrame


def triage(letters: DataFrame) -> Triage:
    """Count letters by what they have in common.

    :param letters: a snapshot
    :return: the counts, evaluated when they are used
    """
    message = f.coalesce("error_message", "explanation")
    ends = letters.agg(f.min("died_at").alias("_first"), f.max("died_at").alias("_last"))
    first, last = (f.unix_micros(name) for name in ("_first", "_last"))
    part = f.floor((f.unix_micros("died_at") - first) * _PARTS / (last - first + 1))
    placed = letters.crossJoin(f.broadcast(ends)).withColumn("_part", part)
    diagnoses = f.create_map(*(f.lit(text) for pair in _DIAGNOSES.items() for text in pair))
    groups = placed.groupBy(*CAUSE).agg(
        f.count("*").alias(LETTERS),
        f.min("died_at").alias("first_died_at"),
        f.max("died_at").alias("last_died_at"),
        f.min("sequence").alias("sample_sequence"),
        f.min_by(message, "sequence").alias("sample_message"),
        f.min_by("error_place", "sequence").alias("error_place"),
        f.min_by("consumer", "sequence").alias("consumer"),
        f.count_distinct("subject").alias("subjects"),
        f.count_distinct("dag_id").alias("dags"),
        f.max("redrive_count").alias("most_redrives"),
        f.array(*(f.count_if(f.col("_part") == number) for number in range(_PARTS))).alias("trend"),
        f.array_distinct(f.array(f.min("sequence"), f.max("sequence"))).alias("examples"),
    )
    groups = groups.withColumn("diagnosis", diagnoses[f.col("reason")])
    origins = letters.groupBy("dag_id", "run_id").agg(
        f.count("*").alias(LETTERS), f.count_distinct("task_id").alias("tasks")
    )
    return Triage(
        groups=_largest_first(groups, *CAUSE),
        fingerprints=_count_by(letters, "fingerprint"),
        reasons=_count_by(letters, "reason"),
        error_classes=_count_by(letters, "error_class"),
        digests=_count_by(letters, "traceback_digest", "error_place"),
        states=_count_by(letters, "state", "body_source"),
        hours=_count_by_time(letters, "hour", _HOUR),
        days=_count_by_time(letters, "day", _DAY),
        subjects=_count_by(letters, "subject"),
        consumers=_count_by(letters, "consumer"),
        origins=_largest_first(origins, "dag_id", "run_id"),
    )


def _count_by_time(letters: DataFrame, name: str, seconds: int) -> DataFrame:
    # Whatever the session's time zone is.
    start = f.timestamp_seconds(f.floor(f.unix_seconds("died_at") / seconds) * seconds)
    counts = letters.groupBy(start.alias(f"{name}_start"), "reason").agg(f.count("*").alias(LETTERS))
    return counts.withColumnRenamed(f"{name}_start", name).orderBy(name, "reason")


def _count_by(letters: DataFrame, *columns: str) -> DataFrame:
    return _largest_first(letters.groupBy(*columns).agg(f.count("*").alias(LETTERS)), *columns)


def _largest_first(counts: DataFrame, *columns: str) -> DataFrame:
    return counts.orderBy(f.desc(LETTERS), *(f.asc_nulls_last(column) for column in columns))


_PAGE = "report.html"
_BARS = "▁▂▃▄▅▆▇█"


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
    partitioned by day), ``groups`` (every cause, with examples, trend and diagnosis; Parquet) and, where it is on the
    driver, ``report.html``. All counts are of what was written, so they add up.

    :param letters: a snapshot
    :param directory: a directory that doesn't exist yet
    :param title: the page's heading; names the queue where absent
    :param airflow_url: the base URL for links to runs
    :param page: the path of the page on the driver, if not in the directory
    :param top: the most rows of a table
    :raises SparkOptionError: the URL is invalid, or ``page`` is missing for a remote directory
    :raises SparkSettingsError: Jinja2 isn't installed where the driver runs
    """
    try:
        from jinja2 import Environment
    except ImportError:
        raise SparkSettingsError(
            "expected Jinja2 where the driver runs, which makes the page, found none: install"
            " airflow-provider-jetstream[spark] there"
        ) from None
    if airflow_url is not None and urlsplit(airflow_url).scheme not in ("http", "https"):
        raise SparkOptionError(f"expected airflow_url to begin with https:// or http://, found {airflow_url!r}")
    file, directory = _page_path(page, directory), directory.rstrip("/")
    written = snapshot(letters.drop(BODY, HEADERS, "day"), f"{directory}/{LETTERS}")
    tables = triage(written)
    tables.groups.write.mode("error").parquet(f"{directory}/groups")
    totals = _totals(written)
    groups = _largest(letters.sparkSession.read.parquet(f"{directory}/groups"), totals.letters, top, CAUSE)
    reasons = {row["reason"]: row[LETTERS] for row in tables.reasons.collect()}
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        files(__package__).joinpath(_PAGE).read_text(encoding="utf-8")
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    text = template.render(
        title=title or f"Dead letters of {', '.join(totals.queues) or 'no queue'}",
        totals=totals,
        reasons=reasons,
        groups=groups,
        origins=_largest(tables.origins, totals.letters, top, ("dag_id", "run_id")),
        written_at=datetime.now(UTC).timestamp(),
        time=_time,
        bars=_bars,
        link=lambda *names: _link(airflow_url, *names),
    )
    # Bytes of subjects and texts that aren't UTF-8 are shown as U+FFFD.
    file.write_text(text, encoding="utf-8", errors="replace")
    first, last = (
        datetime.fromtimestamp(time, UTC).isoformat() if time else None for time in (totals.first, totals.last)
    )
    rows = groups[0]
    return ReportSummary(
        letters=totals.letters,
        lost=totals.lost,
        parked=totals.parked,
        causes=totals.causes,
        reasons=reasons,
        largest=(rows[0]["fingerprint"], rows[0][LETTERS]) if rows else None,
        first_died_at=first,
        last_died_at=last,
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


def _totals(letters: DataFrame) -> Row:
    return letters.agg(
        f.count("*").alias(LETTERS),
        f.count_if(f.col(STATE) == LOST).alias("lost"),
        f.count_if(f.col(STATE) == IS_PARKED).alias("parked"),
        f.count_distinct(f.struct(*CAUSE)).alias("causes"),
        f.count_distinct("dag_id").alias("dags"),
        f.count_if(f.col("redrive_count") > 0).alias("redriven"),
        f.sort_array(f.collect_set("stream")).alias("queues"),
        _seconds(f.min("died_at")).alias("first"),
        _seconds(f.max("died_at")).alias("last"),
    ).collect()[0]


def _largest(counts: DataFrame, letters: int, top: int, columns: Sequence[str]) -> tuple[list[Row], int, int]:
    """Return the largest rows of a table, how many more there are, and the sum of their counts."""
    times = {name: _seconds(f.col(name)) for name in counts.columns if name.endswith("_died_at")}
    ordered = counts.withColumns(times).orderBy(f.desc(LETTERS), *(f.asc_nulls_last(name) for name in columns))
    rows = ordered.limit(top).collect()
    rest = letters - sum(row[LETTERS] for row in rows)
    return rows, counts.count() - len(rows) if rest else 0, rest


def _seconds(time: Column) -> Column:
    # As a number, since Spark returns times without their time zone.
    return f.unix_micros(time) / 1_000_000


def _time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}" if seconds else ""


def _bars(counts: Sequence[int]) -> str:
    """Return counts as a line of bars, of which the largest count is the highest."""
    most = max(counts, default=0)
    return "".join(_BARS[count * (len(_BARS) - 1) // most] if count else "·" for count in counts)


def _link(airflow_url: str | None, dag_id: str, run_id: str | None = None) -> str:
    if airflow_url is None:
        return ""
    dag = f"{airflow_url.rstrip('/')}/dags/{quote(dag_id, safe='')}"
    return f"{dag}/runs/{quote(run_id, safe='')}" if run_id else dag
