"""Counts dead letters by cause, time, subject and origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField

LETTERS: Final = "letters"
_HOUR, _DAY = 3_600, 86_400
CAUSE: Final[tuple[GroupField, ...]] = ("fingerprint", "reason", "error_class", "traceback_digest")


@dataclass(frozen=True)
class Triage:
    """The same letters counted by different fields; each table's column ``letters`` adds up to their number.

    :param groups: by cause (fingerprint, reason, error class and traceback digest together), each with its first and
        last death, a sample and what it affected; the largest first
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
    groups = letters.groupBy(*CAUSE).agg(
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
