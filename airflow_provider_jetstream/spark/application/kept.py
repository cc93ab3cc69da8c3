"""Choosing among letters that a report has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.spark.dead_letters.columns import (
    CONSUMER,
    DAG_ID,
    ERROR_CLASS,
    FINGERPRINT,
    REASON,
    RUN_ID,
    TASK_ID,
    TRACEBACK_DIGEST,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

_EQUAL = (ERROR_CLASS, FINGERPRINT, TRACEBACK_DIGEST, CONSUMER, DAG_ID, RUN_ID, TASK_ID)
_REASONS = "reasons"


def chosen(letters: DataFrame, selection: Selection) -> DataFrame:
    """Leave out what a selection doesn't mean.

    :param letters: a snapshot
    :param selection: by what columns say
    :return: the others
    :raises SelectionError: it selects by something else
    """
    asked = selection.model_dump(mode="json", exclude_defaults=True)
    if others := sorted(asked.keys() - {*_EQUAL, _REASONS}):
        raise SelectionError(
            f"expected letters that a report kept to be selected by {', '.join((_REASONS, *_EQUAL))}, found"
            f" {', '.join(others)}: leave letters out, so that they are looked for, or filter in a repair"
        )
    for name in _EQUAL:
        if name in asked:
            letters = letters.where(letters[name] == asked[name])
    return letters.where(letters[REASON].isin(asked[_REASONS])) if _REASONS in asked else letters
