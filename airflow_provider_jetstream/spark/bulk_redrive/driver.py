"""Bulk redrives: the core's redrive (``redrive/redrive.py``) with Spark's tasks."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from airflow_provider_jetstream.jetstream.audit.intent import no_audit
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.redrive.operation import Operation
from airflow_provider_jetstream.jetstream.redrive.preview import Preview
from airflow_provider_jetstream.jetstream.redrive.redrive import rule_of, run_redrive, run_step
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.request import Protocol, RedriveRequest
from airflow_provider_jetstream.spark.bulk_redrive.step import (
    MOST_TASKS,
    SCANS,
    BulkFrame,
    BulkStep,
    Progress,
    partition_letters,
    read_server_info,
    run_watched,
    scanned_jobs,
)
from airflow_provider_jetstream.spark.bulk_redrive.task import used_columns
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.connections import relaxed_gc
from airflow_provider_jetstream.spark.dead_letters.scanned_jobs import load_queue
from airflow_provider_jetstream.spark.dead_letters.schema import LETTER_SCHEMA
from airflow_provider_jetstream.spark.errors import SparkOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_Result = TypeVar("_Result")


def checked_request(request: RedriveRequest, tasks: int | None) -> RedriveRequest:
    """Return a request for a frame's letters, with a run key.

    :raises SparkOptionError: it has what only a redrive without Spark takes
    :raises RedriveRequestError: as well
    """
    if request.transform is not None or request.patch is not None:
        name = "transform" if request.patch is None else "patch"
        raise SparkOptionError(f"expected repairs in the frame, found a {name} in the request: leave it out")
    if request.selection.sequences is not None:
        raise SparkOptionError("expected letters by the frame's rows, found sequences in the request: leave them out")
    if request.target is not None or request.order_key is not None:
        name = "order_key" if request.target is None else "target"
        raise SparkOptionError(
            f"expected a redrive to the letters' own queue in any order, found {name}: Spark's tasks redrive beside"
            " each other and check one queue only; redrive without Spark"
        )
    if request.discard or request.undo:
        raise SparkOptionError(
            "expected letters to be redriven or parked, found discard or undo: do that without Spark"
        )
    if request.count_under_pause:
        raise RedriveRequestError("expected no count under a pause of a bulk redrive, found one: redrive without Spark")
    if tasks is not None and not 1 <= tasks <= MOST_TASKS:
        raise SparkOptionError(f"expected from 1 to {MOST_TASKS} tasks, found tasks {tasks}")
    return request if request.run else replace(request, run=uuid4().hex)


class BulkRedrive:
    """One bulk redrive, or its preview.

    :param patience: for how many seconds jobs and people are awaited at one go; see :meth:`redrive`
    :param redriving: the other arguments of :func:`~airflow_provider_jetstream.spark.redrive_letters`
    """

    def __init__(
        self,
        session: SparkSession,
        letters: DataFrame,
        queue: Any,
        request: RedriveRequest | None,
        connection: Mapping[str, str] | str | None,
        progress: Callable[[Progress], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        tasks: int | None = None,
        patience: float = math.inf,
    ) -> None:
        columns = used_columns(letters.schema, frozenset(LETTER_SCHEMA.names))
        options = {"connection": connection} if isinstance(connection, str) else dict(connection or {})
        self._request = checked_request(request or RedriveRequest(), tasks)
        self._frame = BulkFrame(session, options, letters, columns, tasks, progress)
        self._queue = queue
        self._stopped = stopped
        self._patience = patience
        self._is_interrupted = False

    def redrive(self) -> RedriveReport:
        """Redrive until it is over, or jobs or people would have to be awaited for longer."""
        return self._run(self._redrive)

    def preview(self) -> Preview:
        """Return what :meth:`redrive` would do; change nothing."""
        return self._run(self._preview)

    def _run(self, function: Callable[[Connection, WorkQueue], Coroutine[Any, Any, _Result]]) -> _Result:
        async def run() -> _Result:
            async with connect(socket_settings(self._frame.options)) as connection:
                return await function(connection, await load_queue(connection, self._queue))

        # In a thread: a notebook's own thread already runs an event loop.
        with relaxed_gc(), ThreadPoolExecutor(1, "bulk redrive") as thread:
            running = thread.submit(asyncio.run, run())
            try:
                return running.result()
            except BaseException:
                self._is_interrupted = True
                raise

    async def _redrive(self, connection: Connection, queue: WorkQueue) -> RedriveReport:
        def report_progress(report: RedriveReport) -> None:
            # What tasks do is counted in the audit meanwhile.
            if report.protocol == Protocol.IN_PLACE:
                self._frame.report_progress(len(report.redriven), report.waiting)

        arguments = (connection, queue, self._request, RedriveReport())
        operation = Operation(*arguments, progress=report_progress, stopped=self._is_stopped, engine="spark")
        rule = rule_of(operation)

        async def step() -> None:
            # Before the scan: a server that restarts after this may forget deaths.
            info = await read_server_info(self._frame.options)
            await run_step(operation, rule, partial(BulkStep, self._frame, info))

        await run_redrive(operation, rule, step, self._patience)
        return operation.report

    def _is_stopped(self) -> bool:
        return self._is_interrupted or self._stopped()

    async def _preview(self, connection: Connection, queue: WorkQueue) -> Preview:
        frame, request = self._frame, self._request
        for _ in range(SCANS):
            info = await read_server_info(frame.options)
            scan = await Scan.begin(connection, queue, unaccounted=request.selection.unaccounted)
            if scan.audit is None:
                raise no_audit(queue.name)
            choice = await frame.choose(request, scan, connection.api_level)
            preview = Preview(
                choice.protocol,
                choice.guarantee,
                uncertain=scan.uncertain,
                undeliverable=scan.undeliverable,
                risks=scan.risks,
            )
            jobs = await scanned_jobs(scan, request, is_copied=choice.protocol != Protocol.IN_PLACE)
            task, tasks = await frame.task(scan, len(jobs), request, info, choice.protocol, dry_run=True)
            rows = await asyncio.to_thread(partition_letters, frame.letters, frame.columns, jobs, tasks)
            outcomes = await run_watched(rows, task)
            for outcome in outcomes:
                for sequence, why in outcome.report.failed.items():
                    preview.add_failure(sequence, why)
                if outcome.preview:
                    preview.add(outcome.preview)
            if not any(outcome.to_rescan for outcome in outcomes):
                return preview
        raise RedriveError(f"the queue, a consumer or the server changed at every one of {SCANS} scans")


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
    return BulkRedrive(session, letters, queue, request, connection, progress, patience=0).redrive()


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
    return BulkRedrive(session, letters, queue, request, connection, tasks=tasks).preview()
