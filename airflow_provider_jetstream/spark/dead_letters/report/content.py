"""What the report says: which counts stand where, and how they are put in words."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.spark.dead_letters.report.html import MISSING, Link, Page, Table
from airflow_provider_jetstream.spark.dead_letters.triage import LETTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, Row

    from airflow_provider_jetstream.spark.dead_letters.triage import Triage

    Cells = Callable[[Row], Sequence[Any]]

_AT_A_TIME = 4
_MOST_COLUMNS = 96
_LONGEST_TEXT = 300
_HOUR, _DAY = 3_600, 86_400


@dataclass(frozen=True)
class Totals:
    """The most important numbers.

    :param letters: how many letters there are
    :param lost: how many of them have no body any more
    :param parked: how many of them are out of circulation
    :param redriven: how many of them were redriven before
    :param causes: how many causes they died of
    :param dags: how many DAGs published them
    :param queues: the work queues
    :param first_died_at: the first death
    :param last_died_at: the last death
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
    """The largest counts of one side of a triage.

    :param rows: they
    :param rest: how many more there are, and the letters that these count together
    """

    rows: Sequence[Row]
    rest: tuple[int, int]


def count_all(found: Triage, letters: int, top: int) -> dict[str, Counts]:
    """Evaluate all sides of a triage, several at a time: with few letters Spark mostly plans and waits.

    :param found: the triage
    :param letters: how many letters there are
    :param top: how many rows of each side are wanted; of the reasons all are
    :return: by the names of the triage's fields; of the hours all
    """

    def counted(name: str) -> tuple[str, Counts]:
        frame: DataFrame = getattr(found, name)
        if name == "hours":
            return name, Counts(frame.withColumn("hour", f.unix_seconds("hour")).collect(), (0, 0))
        rows = frame.limit(max(top, len(Reason)) if name == "reasons" else top).collect()
        rest = letters - sum(row[LETTERS] for row in rows)
        return name, Counts(rows, (frame.count() - len(rows), rest) if rest else (0, 0))

    with ThreadPoolExecutor(_AT_A_TIME) as threads:
        return dict(threads.map(counted, (field.name for field in fields(found))))


def report_page(
    found: Mapping[str, Counts],
    totals: Totals,
    *,
    title: str | None,
    airflow_url: str | None,
    written_at: datetime,
) -> Page:
    """Put the counts in words.

    :param found: the counts
    :param totals: the most important numbers
    :param title: the heading; names the queue where absent
    :param airflow_url: where Airflow's pages are
    :param written_at: when
    :return: the page
    """
    hours, unit = _buckets(found["hours"].rows)
    about = [f"Written {_shown(written_at)}. All times are UTC."]
    if totals.first_died_at and totals.last_died_at:
        about.insert(0, f"Deaths from {_shown(totals.first_died_at)} to {_shown(totals.last_died_at)}.")

    def counted(title: str, names: Sequence[str], side: str, cells: Cells, **more: Any) -> Table:
        counts = found[side]
        return Table(title, names, [(cells(row), row[LETTERS]) for row in counts.rows], counts.rest, **more)

    return Page(
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
        trend=(f"Deaths by {unit}", hours),
        series=[reason.value for reason in Reason if any(reason.value in counts for _, counts in hours)],
        tables=[
            counted(
                "Causes",
                ("reason", "error", "where", "first and last death", "fingerprint, digest, sample"),
                "groups",
                _cause,
                wide=True,
                note="Letters of one fingerprint, reason, error class and traceback digest.",
            ),
            counted("Reasons", ("reason",), "reasons", _values("reason")),
            counted("State and body", ("state", "body from"), "states", _values("state", "body_source")),
            counted("Fingerprints", ("fingerprint",), "fingerprints", _values("fingerprint")),
            counted("Error classes", ("error class",), "error_classes", _values("error_class")),
            counted("Traceback digests", ("digest", "place"), "digests", _values("traceback_digest", "error_place")),
            counted("Consumers", ("consumer",), "consumers", _values("consumer")),
            counted("Subjects", ("subject",), "subjects", _values("subject"), wide=True),
            counted(
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
    told = [row["error_class"], text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"]
    return [
        row["reason"],
        [each for each in told if each] or MISSING,
        [each for each in (row["error_place"], row["consumer"]) if each] or MISSING,
        [_shown(row[name]) for name in ("first_died_at", "last_died_at")],
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


def _buckets(rows: Sequence[Row]) -> tuple[list[tuple[str, Mapping[str, int]]], str]:
    """Give the trend by hour where the chart has room for that, else by day; what is older comes first, together."""
    if not rows:
        return [], "hour"
    first, last = min(row["hour"] for row in rows) // _HOUR, max(row["hour"] for row in rows) // _HOUR
    unit, step, form = ("hour", _HOUR, "%m-%d %H:00") if last - first < _MOST_COLUMNS else ("day", _DAY, "%Y-%m-%d")
    found: dict[int, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["hour"] // step, Counter())[row["reason"]] += row[LETTERS]
    start = max(min(found), max(found) - _MOST_COLUMNS + 1)

    def label(bucket: int) -> str:
        return format(datetime.fromtimestamp(bucket * step, UTC), form)

    buckets: list[tuple[str, Mapping[str, int]]]
    buckets = [(label(bucket), found.get(bucket, Counter())) for bucket in range(start, max(found) + 1)]
    if older := sum((counts for bucket, counts in found.items() if bucket < start), Counter[str]()):
        buckets.insert(0, ("before", older))
    return buckets, unit


def _shown(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"
