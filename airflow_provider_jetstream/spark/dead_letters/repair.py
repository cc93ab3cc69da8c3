"""Repairing letters with a function from frame to frame, and holding it to what it may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    CHANGEABLE,
    HEADERS,
    LOST,
    REPAIR_COLUMNS,
    REPAIRED,
    SEQUENCE,
    STATE,
    SUBJECT,
)
from airflow_provider_jetstream.spark.errors import RepairContractError

if TYPE_CHECKING:
    from pyspark.sql import Column

Repairing: TypeAlias = Callable[[DataFrame], DataFrame]

_TYPES = {
    SEQUENCE: "bigint",
    SUBJECT: "string",
    BODY: "binary",
    HEADERS: "array<struct<key:string,value:string>>",
}
_NAMED = 5


def repair(letters: DataFrame, function: Repairing, path: str) -> DataFrame:
    """Have a function repair letters, and make sure that it kept to its contract.

    The function gets the letters that have a body, with all their columns. It gives back those that are to be redriven,
    each once, with their ``sequence``; it may change ``subject``, ``body`` and ``headers``, and leave out any column
    that it doesn't change. A row that it drops isn't redriven. What it gives back is written before it is looked
    at, so that what is checked is what is redriven, even if the function isn't deterministic.

    :param letters: a snapshot
    :param function: the repair
    :param path: where to keep what it gave back, as Parquet; overwritten
    :return: the columns ``sequence``, ``subject``, ``body``, ``headers`` and ``repaired`` (whether the function changed
        any of the three)
    :raises RepairContractError: the function broke its contract; says how
    """
    before = letters.where(f.col(STATE) != LOST)
    after = function(before)
    if not isinstance(after, DataFrame):
        raise RepairContractError(f"expected the repair to return a DataFrame, found {type(after).__name__}")
    _check_columns(before, after)
    original = before.select(*(f.col(name).alias(f"_{name}") for name in before.columns))
    joined = after.join(original, f.col(SEQUENCE) == f.col(f"_{SEQUENCE}"), "left")
    kept = [name for name in after.columns if name not in (SEQUENCE, *CHANGEABLE)]
    result = {name: f.col(name if name in after.columns else f"_{name}") for name in CHANGEABLE}
    changed = [~result[name].eqNullSafe(f.col(f"_{name}")) for name in CHANGEABLE]
    written = joined.select(
        SEQUENCE,
        *(column.alias(name) for name, column in result.items()),
        f.greatest(*changed).alias(REPAIRED),
        _problem(kept, result).alias("_problem"),
    )
    written.write.mode("overwrite").parquet(path)
    repaired = letters.sparkSession.read.parquet(path)
    _check_rows(repaired)
    return repaired.select(*REPAIR_COLUMNS)


def _check_columns(before: DataFrame, after: DataFrame) -> None:
    problems: list[str] = []
    if SEQUENCE not in after.columns:
        problems.append(f"no column {SEQUENCE}, which tells the letters apart")
    for name in sorted(set(after.columns)):
        found = after.schema[name].dataType.simpleString()
        if name not in before.columns:
            problems.append(f"a new column {name}: drop it")
        elif name in _TYPES and found != _TYPES[name]:
            problems.append(f"{name} of type {found} in place of {_TYPES[name]}: cast it")
    if len(set(after.columns)) < len(after.columns):
        problems.append("a column twice")
    if problems:
        raise RepairContractError(
            f"expected the repair to keep {SEQUENCE} and to change {', '.join(CHANGEABLE)} only, found"
            f" {'; '.join(problems)}; nothing was redriven"
        )


def _problem(kept: list[str], result: dict[str, Column]) -> Column:
    """Name what is wrong with a row; null where nothing is."""
    pairs = result[HEADERS]
    missing = pairs.isNull() | f.exists(pairs, lambda pair: pair["key"].isNull() | pair["value"].isNull())
    told = f.when(f.col(SEQUENCE).isNull(), f"a row without {SEQUENCE}")
    told = told.when(f.col(f"_{SEQUENCE}").isNull(), "a letter that it wasn't given")
    for name in (SUBJECT, BODY):
        told = told.when(result[name].isNull(), f"{name} set to null")
    told = told.when(missing, f"{HEADERS}, a key or a value set to null")
    for name in kept:
        told = told.when(~f.col(name).eqNullSafe(f.col(f"_{name}")), f"a change of {name}")
    return told


def _check_rows(repaired: DataFrame) -> None:
    problem = f.first("_problem", ignorenulls=True).alias("problem")
    counted = repaired.groupBy(SEQUENCE).agg(f.count("*").alias("rows"), problem)
    told = f.coalesce("problem", f.when(f.col("rows") > 1, "a letter more than once: was it joined or exploded?"))
    bad = counted.select(SEQUENCE, told.alias("problem")).where("problem is not null").orderBy(SEQUENCE)
    found = bad.limit(_NAMED).collect()
    if found:
        named = "; ".join(f"{row[SEQUENCE]}: {row['problem']}" for row in found)
        raise RepairContractError(
            f"expected the repair to give back letters that it was given, each once, and to change"
            f" {', '.join(CHANGEABLE)} only; found otherwise for {bad.count()} letters ({named}); nothing was redriven"
        )
