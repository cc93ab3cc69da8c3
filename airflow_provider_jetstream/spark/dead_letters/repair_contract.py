"""Repairs letters with a user's function from frame to frame, and checks that it changed only what it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.repaired_letters import mark_checked, written_letters
from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    CHANGEABLE,
    HEADERS,
    LOST,
    PROBLEM,
    REPAIRED,
    SEQUENCE,
    STATE,
    STREAM_CREATED,
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
_EXAMPLES = 5


def repair(letters: DataFrame, function: Repairing, path: str) -> DataFrame:
    """Apply a function to letters, and require that it kept its contract.

    The function gets the letters that have a body, with all their columns. It returns those that are to be redriven,
    each once, with their ``sequence``; it may change ``subject``, ``body`` and ``headers``, and leave out any column
    that it doesn't change. A row that it drops isn't redriven. Its result is written before it is checked, so that
    what is checked is what is redriven, even if the function isn't deterministic. Any other driver can read it
    with :func:`read_repaired`.

    :param letters: a snapshot
    :param function: takes a data frame of letters and returns one of those to redrive
    :param path: where the function's result is written, as Parquet; overwritten
    :return: the columns ``sequence``, ``subject``, ``body``, ``headers``, ``repaired`` (whether the function changed
        any of the three) and ``stream_created``
    :raises RepairContractError: the function broke its contract
    """
    before = letters.where(f.col(STATE) != LOST)
    after = function(before)
    if not isinstance(after, DataFrame):
        raise RepairContractError(f"expected the repair to return a DataFrame, found {type(after).__name__}")
    _check_columns(before, after)
    original = before.select(*(f.col(name).alias(f"_{name}") for name in before.columns))
    joined = after.join(original, f.col(SEQUENCE) == f.col(f"_{SEQUENCE}"), "left")
    unchangeable = [name for name in after.columns if name not in (SEQUENCE, *CHANGEABLE)]
    result = {name: f.col(name if name in after.columns else f"_{name}") for name in CHANGEABLE}
    changed = [~result[name].eqNullSafe(f.col(f"_{name}")) for name in CHANGEABLE]
    checked = joined.select(
        SEQUENCE,
        *(column.alias(name) for name, column in result.items()),
        f.greatest(*changed).alias(REPAIRED),
        f.col(f"_{STREAM_CREATED}").alias(STREAM_CREATED),
        _problem(unchangeable, result).alias(PROBLEM),
    )
    checked.write.mode("overwrite").parquet(path)
    _check_rows(letters.sparkSession.read.parquet(path))
    mark_checked(letters.sparkSession, path)
    return written_letters(letters.sparkSession, path)


def _check_columns(before: DataFrame, after: DataFrame) -> None:
    problems: list[str] = []
    if SEQUENCE not in after.columns:
        problems.append(f"no column {SEQUENCE}, which identifies the letters")
    for name in sorted(set(after.columns)):
        kind = after.schema[name].dataType.simpleString()
        if name not in before.columns:
            problems.append(f"a new column {name}: drop it")
        elif name in _TYPES and kind != _TYPES[name]:
            problems.append(f"{name} of type {kind} in place of {_TYPES[name]}: cast it")
    if len(set(after.columns)) < len(after.columns):
        problems.append("a column twice")
    if problems:
        raise RepairContractError(
            f"expected the repair to keep {SEQUENCE} and to change {', '.join(CHANGEABLE)} only, found"
            f" {'; '.join(problems)}; nothing was redriven"
        )


def _problem(unchangeable: list[str], result: dict[str, Column]) -> Column:
    """Describe what is wrong with a row; null where nothing is."""
    pairs = result[HEADERS]
    missing = pairs.isNull() | f.exists(pairs, lambda pair: pair["key"].isNull() | pair["value"].isNull())
    problem = f.when(f.col(SEQUENCE).isNull(), f"a row without {SEQUENCE}")
    problem = problem.when(f.col(f"_{SEQUENCE}").isNull(), "a letter that it wasn't given")
    for name in (SUBJECT, BODY):
        problem = problem.when(result[name].isNull(), f"{name} set to null")
    problem = problem.when(missing, f"{HEADERS}, a key or a value set to null")
    for name in unchangeable:
        problem = problem.when(~f.col(name).eqNullSafe(f.col(f"_{name}")), f"a change of {name}")
    return problem


def _check_rows(repaired: DataFrame) -> None:
    first_problem = f.first(PROBLEM, ignorenulls=True).alias("problem")
    counted = repaired.groupBy(SEQUENCE).agg(f.count("*").alias("rows"), first_problem)
    problem = f.coalesce("problem", f.when(f.col("rows") > 1, "a letter more than once: was it joined or exploded?"))
    bad = counted.select(SEQUENCE, problem.alias("problem")).where("problem is not null").orderBy(SEQUENCE)
    examples = bad.limit(_EXAMPLES).collect()
    if examples:
        details = "; ".join(f"{row[SEQUENCE]}: {row['problem']}" for row in examples)
        raise RepairContractError(
            f"expected the repair to return letters that it was given, each once, and to change"
            f" {', '.join(CHANGEABLE)} only; found otherwise for {bad.count()} letters ({details}); nothing was"
            " redriven"
        )
