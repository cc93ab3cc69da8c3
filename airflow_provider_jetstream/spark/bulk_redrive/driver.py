"""What a program calls for a bulk redrive: redrive the letters of a frame, or preview that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.spark.bulk_redrive.bulk_run import BulkRedrive, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.preview import Preview
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


def redrive_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    request: RedriveRequest | None = None,
    connection: Mapping[str, str] | str | None = None,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    tasks: int | None = None,
) -> RedriveReport:
    """Redrive the dead letters of a frame.

    :param letters: which ones, by the column ``sequence``; with ``subject``, ``body`` and ``headers`` for what they
        become, unless ``repaired`` is false
    :param queue: the work queue, with its dead letter queue; a name is looked up on the server
    :param request: how; the frame selects and repairs, so sequences and a transform are refused
    :param connection: connection options of the data source, or the value of its option ``connection``; the environment
        where absent
    :param progress: called every five seconds
    :param stopped: called a few times a second; once it returns true, the remaining letters stay where they are
    :param tasks: the number of tasks, up to 32; at a rate, no more than run at the same time
    :return: the report, which includes the letters that failed; nothing is raised for them
    :raises SparkOptionError: the frame or the request is invalid; nothing was done
    :raises RedriveRequestError: the queue doesn't allow what is requested; nothing was done
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    :raises LeaseHeldError: another operation changes the queue's letters; nothing was done
    :raises RedriveError: Spark gave up; the letters done so far are done, and the redrive can be run again
    """
    return BulkRedrive(session, letters, queue, request, connection, progress, stopped, tasks).redrive()


def redrive_next_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue,
    request: RedriveRequest,
    connection: Mapping[str, str],
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> RedriveReport:
    """Redrive a request's next wave as :func:`redrive_letters` does, and return before its jobs have ended.

    :param request: with waves, and with a ``run`` under which it goes on
    :return: the report so far
    """
    arguments = (session, letters, queue, request, connection, progress, lambda: False, None)
    return BulkRedrive(*arguments, patience=0).redrive()


def preview_letters(
    session: SparkSession,
    letters: DataFrame,
    queue: WorkQueue | Mapping[str, Any] | Path | str,
    request: RedriveRequest | None = None,
    connection: Mapping[str, str] | str | None = None,
    *,
    tasks: int | None = None,
) -> Preview:
    """Return what :func:`redrive_letters` would do with the same arguments; change nothing.

    :param letters: which ones, by the column ``sequence``
    :param queue: the work queue, with its dead letter queue; a name is looked up on the server
    :param request: how; the frame selects and repairs, so sequences and a transform are refused
    :param connection: connection options of the data source, or the value of its option ``connection``; the environment
        where absent
    :param tasks: the number of tasks, up to 32
    :raises SparkOptionError: and the other errors of :func:`redrive_letters`
    """
    return BulkRedrive(session, letters, queue, request, connection, lambda _: None, lambda: False, tasks).preview()
