"""The reports on a task's jobs: read when it has waited, and stored as its XCom however it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow.sdk import get_current_context

from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.context import task_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.documents import DocumentName, DocumentPart
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
    from airflow_provider_jetstream.jetstream.waiting.job_reports import JobIds, JobReports
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

# A dict of counts, or a list to map over: which of them, the argument ``returns`` says.
TaskResult: TypeAlias = Any
JOB_REPORTS = "job_reports"
# Of what a task returns: of all its jobs, which another task may cancel by it, and of those in one state.
_MAX_RANGES = {"sequences": 600, "extra": 200}
_MAX_RANGES_OF_A_STATE = 100

# Seconds between two lines in the log of a task that waits, and how many lines a second all waits of a process log.
PROGRESS_SECONDS: Final = 60.0
_LINES_A_SECOND: Final = 10.0

log = logging.getLogger(__name__)


class LoggedProgress:
    """Logs now and then what has become of awaited jobs, in a ``with`` around the wait.

    :param task_log: the log of the task
    :param report: the state of the jobs, which changes meanwhile
    :param waits: returns how many waits this process has
    """

    __slots__ = ("_log", "_report", "_timer", "_waits")

    def __init__(self, task_log: Any, report: WaitReport, waits: Callable[[], int] = lambda: 1) -> None:
        self._log = task_log
        self._report = report
        self._waits = waits

    def __enter__(self) -> None:
        """Begin the wait."""
        # A timer rather than a task: a triggerer has ten thousand waits.
        seconds = max(PROGRESS_SECONDS, self._waits() / _LINES_A_SECOND)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._log_progress)

    def __exit__(self, *_: object) -> None:
        """End the wait."""
        self._timer.cancel()

    def _log_progress(self) -> None:
        self._log.info("Waiting for jobs: %s", self._report.progress())
        self.__enter__()


async def job_reports(
    connection: Connection, cursor: Cursor, ended: Mapping[str, Any], names: JobIds | None
) -> JobReports:
    """Read what became of each job of a wait; where that is impossible, report what the wait itself found.

    :param ended: what :meth:`WaitReport.as_json` returns
    :param names: the ids under which the jobs were published, where they are known
    """
    names, place = names or runtime.JobIds(), {"queue": cursor.queue, "events": cursor.events}
    try:
        reports = runtime.read_job_reports(connection, cursor, ended, names)
        return await runtime.collect_job_reports(connection, reports, task=_current_task_key(), **place)
    except JetStreamProviderError as error:
        log.warning("The reports on jobs of %s hold only what the wait has found: %s", cursor.queue, error)
        return plain_reports(cursor.queue, ended, names, str(error))


def plain_reports(queue: str, ended: Mapping[str, Any], names: JobIds | None, why: str) -> JobReports:
    """Report what a wait itself found.

    :param why: why nothing else could be read or stored
    """
    problem = f"the reports on single jobs of {queue} couldn't be stored: {why}; the counts are right"
    return runtime.count_job_reports(
        runtime.plain_job_reports(ended, names or runtime.JobIds()), queue=queue, problem=problem
    )


async def deferred_wait(
    connection: Connection, handle: JobsHandle, names: JobIds | None
) -> tuple[JobsHandle, dict[str, Any]]:
    """Store what the trigger, and the process that resumes the task, need to know of jobs, where that is much.

    :return: the handle for the trigger, and what :func:`resumed_job_reports` needs
    """
    parts: list[DocumentPart] = []
    key, cursor = _current_task_key(), handle.cursor
    try:
        if names is not None:
            parts = await names.store(connection, _ids_name(cursor, key))
    except JetStreamProviderError as error:
        log.warning("Reports will lack ids of jobs of which only a worker's ack is known: %s", error)
    try:
        handle = await handle.stored(connection, key)
    except JetStreamProviderError as error:
        log.warning("The trigger gets all sequences of jobs of %s, since they can't be stored: %s", cursor.queue, error)
    return handle, {"key": key, "ids": [list(part) for part in parts]}


def _ids_name(cursor: Cursor, key: str) -> DocumentName:
    return runtime.DocumentName(cursor.events, cursor.queue, "ids", key, cursor.created)


def resumed_job_reports(
    hook: JetStreamHook, cursor: Cursor, wait: Mapping[str, Any] | None, ended: Mapping[str, Any]
) -> JobReports:
    """Read what became of each job, in the process that resumes the task.

    :param wait: what :func:`deferred_wait` returned
    :param ended: what :meth:`WaitReport.as_json` returns
    """

    async def read(connection: Connection) -> JobReports:
        names = runtime.JobIds()
        try:
            if wait:
                names = await runtime.JobIds.read(connection, _ids_name(cursor, wait["key"]), wait["ids"])
        except JetStreamProviderError as error:
            log.warning("The ids of jobs of %s can't be read: %s", cursor.queue, error)
        return await job_reports(connection, cursor, ended, names)

    try:
        return hook.blocking(read)
    except JetStreamProviderError as error:
        return plain_reports(cursor.queue, ended, None, str(error))


def push_job_reports(reports: JobReports) -> None:
    """Store reports as the task's XCom ``job_reports``, which stays when the task fails."""
    if not (task_instance := _current_task_instance()):
        return
    try:
        task_instance.xcom_push(JOB_REPORTS, reports.as_json())
    except Exception:
        # Not raised: the jobs have ended, and a retry might publish them again.
        log.exception("Airflow didn't store the reports on the jobs as an XCom: %s", dict(reports.states))


def bounded_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result that fits an XCom: of sequences that are scattered, the first ranges and how many others."""
    bounded = {name: value for name, value in result.items() if name != "details"}
    for name, value in result.items():
        most = _MAX_RANGES.get(name, _MAX_RANGES_OF_A_STATE if name.endswith("_sequences") else None)
        if most is not None and isinstance(value, list) and len(value) > most:
            bounded[name] = value[:most]
            bounded[f"{name}_left_out"] = len(value) - most
    return bounded


def _current_task_key() -> str:
    # Without a task there is no XCom either; the parts are then of nobody.
    return task_key(get_current_context()) if _current_task_instance() else "_"


def _current_task_instance() -> Any:
    try:
        return get_current_context().get("ti")
    except RuntimeError:
        return None
