"""Repairs letters with a user's function, checks that it changed only what it may, and reads what was repaired.

The letters are Parquet files in a directory. After they were checked, a record of their number and of a digest of their
content is added to the directory as a file of its own; without it, or with other letters, nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from py4j.protocol import Py4JError
from pydantic import BaseModel, ValidationError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    CHANGEABLE,
    HEADERS,
    LOST,
    PROBLEM,
    REPAIR_COLUMNS,
    REPAIRED,
    SEQUENCE,
    STATE,
    STREAM_CREATED,
    SUBJECT,
)
from airflow_provider_jetstream.spark.errors import RepairContractError, RepairedLettersError

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

# Spark doesn't take a folder of such a name for data of the folder around it.
_CHECKED: Final = "_checked"
_TYPES: Final = {
    SEQUENCE: "bigint",
    SUBJECT: "string",
    BODY: "binary",
    HEADERS: "array<struct<key:string,value:string>>",
    REPAIRED: "boolean",
    STREAM_CREATED: "string",
}
_DDL: Final = ", ".join(f"{name} {_TYPES[name]}" for name in REPAIR_COLUMNS)
_HINT: Final = "repair the snapshot again"


class CheckedLetters(BaseModel):
    """The record of checked letters.

    :param format: of the letters' files and of this record
    :param letters: how many
    :param repaired: the letters that the repair changed
    :param digest: the sum of the letters' hashes; their order doesn't matter
    """

    format: Literal[1] = 1
    letters: int
    repaired: int
    digest: str


def written_letters(session: SparkSession, path: str) -> DataFrame:
    """Return the letters that a repair has written, unchecked."""
    # Without letters there are no files from which Spark could infer the columns.
    return session.read.schema(_DDL).parquet(path)


def mark_checked(session: SparkSession, path: str) -> None:
    """Record that the written letters are complete and were checked."""
    record = _checked_letters(written_letters(session, path)).model_dump_json()
    session.createDataFrame([(record,)], "value string").coalesce(1).write.text(f"{path.rstrip('/')}/{_CHECKED}")


def read_repaired(session: SparkSession, path: str) -> DataFrame:
    """Read what :func:`repair` has written, by whichever driver, for a redrive.

    All letters are read once to make sure that none is missing, added or changed.

    :param path: of the repair
    :return: the same columns as those of :func:`repair`
    :raises RepairedLettersError: there is no finished repair, or its letters are not those that were checked
    """
    recorded = _read_record(session, path)
    letters = written_letters(session, path)
    try:
        found = _checked_letters(letters)
    except (PySparkException, Py4JError) as error:
        # Which of the two it is depends on how Spark collects the result.
        raise RepairedLettersError(
            f"expected the {recorded.letters} letters of the repair at {path}, found files that can't be read"
            f" ({_cause(error)}): restore them, or {_HINT}"
        ) from error
    if found != recorded:
        raise RepairedLettersError(
            f"expected the {recorded.letters} letters that were checked ({recorded.repaired} of them repaired, digest"
            f" {recorded.digest}) at {path}, found {found.letters} ({found.repaired}, {found.digest}): the files were"
            f" changed since; restore them, or {_HINT}"
        )
    return letters


def _read_record(session: SparkSession, path: str) -> CheckedLetters:
    try:
        lines = session.read.text(f"{path.rstrip('/')}/{_CHECKED}").collect()
    except (PySparkException, Py4JError) as error:
        if isinstance(error, PySparkException) and error.getCondition() == "PATH_NOT_FOUND":
            raise RepairedLettersError(
                f"expected a finished repair at {path}, found no record that its letters were checked: none was written"
                " there, its driver ended before, the repair broke its contract, or it is of a version before this"
                f" record; {_HINT}"
            ) from None
        raise RepairedLettersError(
            f"expected a finished repair at {path}, found that the record of its letters can't be read"
            f" ({_cause(error)}): restore it, or {_HINT}"
        ) from error
    try:
        return CheckedLetters.model_validate_json("\n".join(line[0] for line in lines))
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise RepairedLettersError(
            f"expected a record of the checked letters at {path}, found another text ({problem}): it was cut off, or a"
            f" later version wrote it; read it with that version, or {_HINT}"
        ) from None


def _checked_letters(letters: DataFrame) -> CheckedLetters:
    # Added up, the hashes of 2**31 letters have a sum of 29 digits.
    digest = f.sum(f.xxhash64(*REPAIR_COLUMNS).cast("decimal(19, 0)"))
    counts = letters.agg(f.count("*"), f.count_if(REPAIRED), digest.cast("string")).collect()[0]
    return CheckedLetters(letters=counts[0], repaired=counts[1], digest=counts[2] or "0")


def _cause(error: Exception) -> str:
    return str(error).partition("\n\tat ")[0].strip().rpartition("\n")[2]


Repairing: TypeAlias = Callable[[DataFrame], DataFrame]

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
