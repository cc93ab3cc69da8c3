"""The content of the report: evaluates the counts of a triage and lays them out as tables."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.spark.dead_letters.report.html import MISSING, Link, ReportPage, Table
from airflow_provider_jetstream.spark.dead_letters.triage_tables import LETTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, Row

    from airflow_provider_jetstream.spark.dead_letters.triage_tables import Triage

    Cells = Callable[[Row], Sequence[Any]]
    Bucket = tuple[str, Mapping[str, int]]

_AT_A_TIME = 4
_MOST_COLUMNS = 96
_MOST_HOURS = 72
_LONGEST_TEXT = 300
_HOUR, _DAY = 3_600, 86_400
# The column of the time in the tables that count by it.
_TIMES = {"hours": "hour", "days": "day"}


@dataclass(frozen=True)
class Totals:
    """The most important numbers of letters.

    :param lost: letters without a body
    :param redriven: letters that were redriven before
    :param causes: distinct causes of death
    """

    letters: int
    lost: int
    parked: int
    redriven: int
    causes: int
    dags: int
    queues: tuple[str, ...]
    first_died_at: datetime | None
    last_died_at: datetime | None


class Counts(NamedTuple):
    """The largest counts of one table of a triage.

    :param rest: how many more rows there are, and the sum of their counts
    """

    rows: Sequence[Row]
    rest: tuple[int, int]


def count_all(triage: Triage, letters: int, top: int) -> dict[str, Counts]:
    """Evaluate all tables of a triage, several at a time: with few letters Spark mostly plans and waits.

    :param letters: the number of letters
    :param top: rows per table; reasons, hours and days are complete
    :return: the counts by the triage's fields
    """

    def count(name: str) -> tuple[str, Counts]:
        frame: DataFrame = getattr(triage, name)
        if start := _TIMES.get(name):
            return name, Counts(frame.withColumn(start, f.unix_seconds(start)).collect(), (0, 0))
        rows = frame.limit(max(top, len(Reason)) if name == "reasons" else top).collect()
        rest = letters - sum(row[LETTERS] for row in rows)
        return name, Counts(rows, (frame.count() - len(rows), rest) if rest else (0, 0))

    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        return dict(threads.map(count, (field.name for field in fields(triage))))


def report_page(
    counts: Mapping[str, Counts],
    totals: Totals,
    *,
    title: str | None,
    airflow_url: str | None,
    written_at: datetime,
) -> ReportPage:
    """Lay out the counts.

    :param title: the heading; names the queue where absent
    :param airflow_url: the base URL for links to runs
    """
    about = [f"Written {_format_time(written_at)}. All times are UTC."]
    if totals.first_died_at and totals.last_died_at:
        about.insert(0, f"Deaths from {_format_time(totals.first_died_at)} to {_format_time(totals.last_died_at)}.")

    def table(title: str, names: Sequence[str], field: str, cells: Cells, **more: Any) -> Table:
        rows, rest = counts[field]
        return Table(title, names, [(cells(row), row[LETTERS]) for row in rows], rest, **more)

    return ReportPage(
        title=title or f"Dead letters of {', '.join(totals.queues) or 'no queue'}",
        about=about,
        figures={
            "dead letters": f"{totals.letters:,}",
            "causes": f"{totals.causes:,}",
            "DAGs": f"{totals.dags:,}",
            "redriven before": f"{totals.redriven:,}",
            "parked": f"{totals.parked:,}",
            "lost, without a body": f"{totals.lost:,}",
        },
        trends=_trends(counts["days"].rows, counts["hours"].rows),
        series=[reason.value for reason in Reason if any(reason.value == row["reason"] for row in counts["days"].rows)],
        tables=[
            table(
                "Causes",
                ("reason", "error", "where", "first and last death", "fingerprint, digest, sample"),
                "groups",
                _cause,
                wide=True,
                note="Letters of one fingerprint, reason, error class and traceback digest.",
            ),
            table("Reasons", ("reason",), "reasons", _values("reason")),
            table("State and body", ("state", "body from"), "states", _values("state", "body_source")),
            table("Error classes", ("error class",), "error_classes", _values("error_class")),
            table("Traceback digests", ("digest", "place"), "digests", _values("traceback_digest", "error_place")),
            table("Consumers", ("consumer",), "consumers", _values("consumer")),
            table("Subjects", ("subject",), "subjects", _values("subject"), wide=True),
            table(
                "Published by",
                ("DAG", "run", "tasks"),
                "origins",
                lambda row: _origin(row, airflow_url),
                wide=True,
                note="Runs of Airflow; letters without one were published by others.",
            ),
        ],
    )


def _values(*names: str) -> Cells:
    def cells(row: Row) -> list[Any]:
        return [row[name] for name in names]

    return cells


def _cause(row: Row) -> list[Any]:
    text = row["sample_message"] or ""
    error = [row["error_class"], text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"]
    return [
        row["reason"],
        [value for value in error if value] or MISSING,
        [value for value in (row["error_place"], row["consumer"]) if value] or MISSING,
        [_format_time(row[name]) for name in ("first_died_at", "last_died_at")],
        [row["fingerprint"], row["traceback_digest"] or "no digest", f"sequence {row['sample_sequence']}"],
    ]


def _origin(row: Row, airflow_url: str | None) -> list[Any]:
    dag_id, run_id = row["dag_id"], row["run_id"]
    if dag_id is None:
        return ["not Airflow", None, None]
    tasks = f"{row['tasks']:,}"
    if airflow_url is None:
        return [dag_id, run_id or None, tasks]
    dag = f"{airflow_url.rstrip('/')}/dags/{quote(dag_id, safe='')}"
    run = Link(run_id, f"{dag}/runs/{quote(run_id, safe='')}") if run_id else None
    return [Link(dag_id, dag), run, tasks]


def _trends(days: Sequence[Row], hours: Sequence[Row]) -> list[tuple[str, list[Bucket]]]:
    """Lay out the deaths by day, the older ones together, and those of the last days by hour."""
    if not days:
        return [("Deaths", [])]
    by_day, by_hour = _buckets(days, "day", _DAY), _buckets(hours, "hour", _HOUR)
    first = max(min(by_hour), max(by_hour) - _MOST_HOURS + 1)
    title = "Deaths by hour" if first == min(by_hour) else f"Deaths by hour, the last {_MOST_HOURS} hours"
    charts = [(title, _columns(by_hour, first, _HOUR, "%m-%d %H:00"))]
    if len(by_day) > 1:
        start = max(min(by_day), max(by_day) - _MOST_COLUMNS + 1)
        columns = _columns(by_day, start, _DAY, "%Y-%m-%d")
        if older := sum((counts for day, counts in by_day.items() if day < start), Counter[str]()):
            columns.insert(0, ("before", older))
        charts.insert(0, ("Deaths by day", columns))
    return charts


def _buckets(rows: Sequence[Row], name: str, seconds: int) -> dict[int, Counter[str]]:
    buckets: dict[int, Counter[str]] = {}
    for row in rows:
        buckets.setdefault(row[name] // seconds, Counter())[row["reason"]] += row[LETTERS]
    return buckets


def _columns(buckets: Mapping[int, Counter[str]], first: int, seconds: int, form: str) -> list[Bucket]:
    """Return a column for each bucket from the first one on, empty ones included."""
    return [
        (format(datetime.fromtimestamp(bucket * seconds, UTC), form), buckets.get(bucket, Counter()))
        for bucket in range(first, max(buckets) + 1)
    ]


def _format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}"
