"""What dead letters have in common: how many died of what, when, on which subjects, and published by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LETTERS = "letters"

_CAUSE = ("fingerprint", "reason", "error_class", "traceback_digest")


@dataclass(frozen=True)
class Triage:
    """Counts of the same letters from different sides; each adds up to their number, in its column ``letters``.

    :param groups: by cause (fingerprint, reason, error class and traceback digest together), each with its first and
        last death, a sample and what it hit; the largest first
    :param fingerprints: by fingerprint
    :param reasons: by reason
    :param error_classes: by error class
    :param digests: by traceback digest, with the place
    :param states: by state and where the body is
    :param hours: by the hour of death and the reason; in order
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
    subjects: DataFrame
    consumers: DataFrame
    origins: DataFrame


def triage(letters: DataFrame) -> Triage:
    """Put letters together that belong together.

    :param letters: a snapshot
    :return: the counts, evaluated when they are looked at
    """
    message = f.coalesce("error_message", "explanation")
    groups = letters.groupBy(*_CAUSE).agg(
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
    )
    hour = f.timestamp_seconds(f.floor(f.unix_seconds("died_at") / 3600) * 3600)
    hours = letters.groupBy(hour.alias("hour"), "reason").agg(f.count("*").alias(LETTERS))
    origins = letters.groupBy("dag_id", "run_id").agg(
        f.count("*").alias(LETTERS), f.count_distinct("task_id").alias("tasks")
    )
    return Triage(
        groups=_largest_first(groups, *_CAUSE),
        fingerprints=_counted(letters, "fingerprint"),
        reasons=_counted(letters, "reason"),
        error_classes=_counted(letters, "error_class"),
        digests=_counted(letters, "traceback_digest", "error_place"),
        states=_counted(letters, "state", "body_source"),
        hours=hours.orderBy("hour", "reason"),
        subjects=_counted(letters, "subject"),
        consumers=_counted(letters, "consumer"),
        origins=_largest_first(origins, "dag_id", "run_id"),
    )


def _counted(letters: DataFrame, *columns: str) -> DataFrame:
    return _largest_first(letters.groupBy(*columns).agg(f.count("*").alias(LETTERS)), *columns)


def _largest_first(counts: DataFrame, *columns: str) -> DataFrame:
    return counts.orderBy(f.desc(LETTERS), *(f.asc_nulls_last(column) for column in columns))
