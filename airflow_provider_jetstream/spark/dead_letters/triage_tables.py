"""Counts dead letters by cause, time, subject and origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from airflow_provider_jetstream.jetstream.dead_letters.death import Reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
