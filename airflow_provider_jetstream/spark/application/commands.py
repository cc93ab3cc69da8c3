"""What an application can be asked to do, in terms of JSON."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import RedriveError, SelectionError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive import preview_letters, redrive_letters
from airflow_provider_jetstream.spark.dead_letters import read_letters, read_snapshot, repair, snapshot, write_report
from airflow_provider_jetstream.spark.dead_letters.schema import (
    CONSUMER,
    DAG_ID,
    ERROR_CLASS,
    FINGERPRINT,
    LOST,
    REASON,
    RUN_ID,
    SEQUENCE,
    STATE,
    TASK_ID,
    TRACEBACK_DIGEST,
)
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.spark.bulk_redrive import Progress
    from airflow_provider_jetstream.spark.dead_letters import Repairing

log = logging.getLogger(__name__)


def report(
    session: SparkSession, connection: Mapping[str, str], orders: Mapping[str, Any], _: Repairing | None
) -> dict[str, Any]:
    """Keep dead letters, and report on them.

    :param session: Spark
    :param connection: how everybody finds NATS
    :param orders: ``queue``, ``select``, ``directory``, ``page`` and ``airflow_url``
    :return: the summary, and where the letters are
    """
    queue, folder = WorkQueue.load(orders["queue"]), orders["directory"]
    with _timed(session, "Keeping the letters"):
        kept = snapshot(read_letters(session, queue, connection, orders["select"], lost=True), f"{folder}/letters")
    with _timed(session, "Reporting"):
        summary = write_report(kept, f"{folder}/report", page=orders["page"], airflow_url=orders["airflow_url"])
    return summary.as_dict() | {"kept": f"{folder}/letters"}


def redrive(
    session: SparkSession, connection: Mapping[str, str], orders: Mapping[str, Any], function: Repairing | None
) -> dict[str, Any]:
    """Bring dead letters back.

    :param session: Spark
    :param connection: how everybody finds NATS
    :param orders: ``queue``, ``letters``, ``directory``, ``order`` and ``dry_run``
    :param function: the repair
    :return: the preview of a dry run; else the report, the jobs to wait for as ranges, and what is wrong, if anything
    """
    queue, order = WorkQueue.load(orders["queue"]), _order(orders["order"])
    with _folder(session, orders["directory"], order.run) as folder:
        if function and not folder:
            raise SparkSettingsError(
                "expected directory, where what a repair gives back is kept, found none: executors are on other"
                " machines, so give a path or an address that they and this one share"
            )
        letters = _letters(session, queue, connection, orders, order, function, folder)
        if orders["dry_run"]:
            return preview_letters(session, letters, queue, order, connection).as_json()
        with _timed(session, "Redriving"):
            done = redrive_letters(session, letters, queue, order, connection, progress=_tell)
    problem = ""
    try:
        done.raise_for_failures()
    except RedriveError as error:
        problem = str(error)
    told = done.as_json() | {"guarantee": done.guarantee}
    return {"report": told, "awaited": sequence_ranges(sorted(done.awaited_sequences())), "problem": problem}


def _letters(
    session: SparkSession,
    queue: WorkQueue,
    connection: Mapping[str, str],
    orders: Mapping[str, Any],
    order: RedriveRequest,
    function: Repairing | None,
    folder: str,
) -> DataFrame:
    if orders["letters"]:
        letters = chosen(read_snapshot(session, orders["letters"]), order.selection)
    else:
        letters = read_letters(session, queue, connection, order.selection)
        if function:
            # A repair may look at them more than once.
            letters = snapshot(letters, f"{folder}/letters")
    if function:
        with _timed(session, "Repairing"):
            return repair(letters, function, f"{folder}/repaired")
    # Bodies that don't change needn't travel.
    return letters.where(letters[STATE] != LOST).select(SEQUENCE)


@contextmanager
def _folder(session: SparkSession, directory: str | None, run: str | None) -> Iterator[str]:
    if directory:
        yield f"{directory.rstrip('/')}/{run}-{time.time_ns()}"
    elif str(session.sparkContext.master).startswith("local"):
        with tempfile.TemporaryDirectory() as folder:
            yield folder
    else:
        yield ""


def _order(given: Mapping[str, Any]) -> RedriveRequest:
    order = RedriveRequest(**{**given, "selection": Selection(), "protocol": Protocol(given["protocol"])})
    return replace(order, selection=Selection.of(given["selection"]))


def _tell(now: Progress) -> None:
    rate = now.done / now.seconds if now.seconds else 0.0
    log.info("About %d of %d letters done, %.0f a second", now.done, now.letters, rate)


@contextmanager
def _timed(session: SparkSession, what: str) -> Iterator[None]:
    began = time.monotonic()
    log.info("%s begins", what)
    # For Spark's pages.
    session.sparkContext.setJobDescription(what)
    yield
    log.info("%s took %.1f s", what, time.monotonic() - began)


WORK: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"report": report, "redrive": redrive}


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
