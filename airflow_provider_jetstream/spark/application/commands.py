"""The commands of an application; their arguments and results are plain JSON."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive.report import problem_of
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive.driver import preview_letters, redrive_letters, redrive_next_letters
from airflow_provider_jetstream.spark.dead_letters.read import read_letters, read_snapshot, snapshot
from airflow_provider_jetstream.spark.dead_letters.repairs import repair
from airflow_provider_jetstream.spark.dead_letters.report import write_report
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
    STREAM_CREATED,
    TASK_ID,
    TRACEBACK_DIGEST,
)
from airflow_provider_jetstream.spark.errors import SparkSettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.spark.bulk_redrive.step import Progress
    from airflow_provider_jetstream.spark.dead_letters.repairs import Repairing

log = logging.getLogger(__name__)

_EQUAL = (ERROR_CLASS, FINGERPRINT, TRACEBACK_DIGEST, CONSUMER, DAG_ID, RUN_ID, TASK_ID)
_REASONS = "reasons"


def report(
    session: SparkSession, connection: Mapping[str, str], arguments: Mapping[str, Any], _: Repairing | None
) -> dict[str, Any]:
    """Take a snapshot of dead letters, and write a report.

    :param connection: connection options of the data source
    :param arguments: ``queue``, ``select``, ``directory``, ``page`` and ``airflow_url``
    :return: the summary, and the path of the snapshot
    """
    queue, directory = WorkQueue.load(arguments["queue"]), arguments["directory"]
    with _timed(session, "Taking the snapshot"):
        letters = read_letters(session, queue, connection, arguments["select"], lost=True)
        letters = snapshot(letters, f"{directory}/letters")
    with _timed(session, "Reporting"):
        summary = write_report(
            letters, f"{directory}/report", page=arguments["page"], airflow_url=arguments["airflow_url"]
        )
    return summary.as_dict() | {"kept": f"{directory}/letters"}


def redrive(
    session: SparkSession, connection: Mapping[str, str], arguments: Mapping[str, Any], function: Repairing | None
) -> dict[str, Any]:
    """Redrive dead letters; with waves, the letters of the next wave.

    :param connection: connection options of the data source
    :param arguments: ``queue``, ``letters``, ``directory``, ``request`` and ``dry_run``
    :param function: the repair
    :return: the preview of a dry run; otherwise the report, the jobs to wait for as ranges, and the problem, if any
    """
    queue, request = WorkQueue.load(arguments["queue"]), _redrive_request(arguments["request"])
    with _working_directory(session, arguments["directory"], request.run) as directory:
        if function and not directory:
            raise SparkSettingsError(
                "expected directory, where the result of a repair is stored, found none: executors are on other"
                " machines, so set a path or an address that they and this one share"
            )
        letters = _letters(session, queue, connection, arguments["letters"], request, function, directory)
        if arguments["dry_run"]:
            return preview_letters(session, letters, queue, request, connection).as_json()
        # The task awaits the jobs of a wave, and people, without executors.
        redrive_all = redrive_next_letters if request.waves else redrive_letters
        with _timed(session, "Redriving"):
            report = redrive_all(session, letters, queue, request, connection, progress=_log_progress)
    content = report.as_json() | {"guarantee": report.guarantee}
    return {
        "report": content,
        "awaited": sequence_ranges(sorted(report.awaited_sequences())),
        "problem": problem_of(report),
    }


COMMANDS: Final[Mapping[str, Callable[..., dict[str, Any]]]] = {"report": report, "redrive": redrive}


def _letters(
    session: SparkSession,
    queue: WorkQueue,
    connection: Mapping[str, str],
    snapshot_path: str | None,
    request: RedriveRequest,
    function: Repairing | None,
    directory: str,
) -> DataFrame:
    if snapshot_path:
        letters = select_letters(read_snapshot(session, snapshot_path), request.selection)
    else:
        letters = read_letters(session, queue, connection, request.selection)
        if function:
            # A repair may evaluate them more than once.
            letters = snapshot(letters, f"{directory}/letters")
    if function:
        with _timed(session, "Repairing"):
            return repair(letters, function, f"{directory}/repaired")
    # Bodies that don't change needn't be sent to the tasks.
    return letters.where(letters[STATE] != LOST).select(SEQUENCE, STREAM_CREATED)


@contextmanager
def _working_directory(session: SparkSession, directory: str | None, run: str | None) -> Iterator[str]:
    if directory:
        yield f"{directory.rstrip('/')}/{run}-{time.time_ns()}"
    elif str(session.sparkContext.master).startswith("local"):
        with tempfile.TemporaryDirectory() as temporary:
            yield temporary
    else:
        yield ""


def _redrive_request(fields: Mapping[str, Any]) -> RedriveRequest:
    request = RedriveRequest(**{**fields, "selection": Selection(), "protocol": Protocol(fields["protocol"])})
    return replace(request, selection=Selection.of(fields["selection"]))


def _log_progress(progress: Progress) -> None:
    rate = progress.done / progress.seconds if progress.seconds else 0.0
    log.info("About %d of %d letters done, %.0f a second", progress.done, progress.letters, rate)
    if progress.waiting:
        log.info("The tasks wait %s", progress.waiting)


@contextmanager
def _timed(session: SparkSession, step: str) -> Iterator[None]:
    start = time.monotonic()
    log.info("%s begins", step)
    # For Spark's pages.
    session.sparkContext.setJobDescription(step)
    yield
    log.info("%s took %.1f s", step, time.monotonic() - start)


def select_letters(letters: DataFrame, selection: Selection) -> DataFrame:
    """Apply a selection to a snapshot.

    :raises SelectionError: it selects by something that isn't a column of a snapshot
    """
    fields = selection.model_dump(mode="json", exclude_defaults=True)
    if others := sorted(fields.keys() - {*_EQUAL, _REASONS}):
        raise SelectionError(
            f"expected a selection of a report's letters by {', '.join((_REASONS, *_EQUAL))}, found"
            f" {', '.join(others)}: leave letters out, so that the queue is read, or filter in a repair"
        )
    for name in _EQUAL:
        if name in fields:
            letters = letters.where(letters[name] == fields[name])
    return letters.where(letters[REASON].isin(fields[_REASONS])) if _REASONS in fields else letters
