"""What a repair has written: letters that any driver can read, check and redrive.

The letters are Parquet files in a directory. After they were checked, a record of their number and of a digest of their
content is added to the directory as a file of its own; without it, or with other letters, nothing is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from py4j.protocol import Py4JError
from pydantic import BaseModel, ValidationError
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from airflow_provider_jetstream.spark.dead_letters.schema import (
    BODY,
    HEADERS,
    REPAIR_COLUMNS,
    REPAIRED,
    SEQUENCE,
    STREAM_CREATED,
    SUBJECT,
)
from airflow_provider_jetstream.spark.errors import RepairedLettersError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    :param repaired: those that the repair changed
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
