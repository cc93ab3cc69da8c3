"""The progress of one redrive: in the log, for its caller, and in the audit where the request has a key."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, RedriveError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.audit.log import RunRecord
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0


class RunProgress:
    """The progress of one redrive.

    :param report: what it has done so far
    :param on_progress: called with the report
    """

    def __init__(
        self,
        audit: AuditLog | None,
        queue: str,
        request: RedriveRequest,
        report: RedriveReport,
        on_progress: Callable[[RedriveReport], None],
    ) -> None:
        self._audit = audit
        self._queue = queue
        self._request = request
        self._report = report
        self._on_progress = on_progress
        self._record: RunRecord | None = None
        self._reported_at = time.monotonic()

    async def begin(self, *, resumes: bool = True) -> None:
        """Begin to record the progress, or go on with that of an earlier try.

        :param resumes: whether what the earlier try has done is added to the report
        :raises RedriveError: the audit takes no records
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        run = self._request.run
        if run is None or self._audit is None:
            return
        try:
            self._record = await self._audit.begin_run(run, self._request.who, self._request.why)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            raise RedriveError(
                f"expected {self._audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it"
                " that the audit takes records, then run it again"
            ) from None
        if not resumes:
            return
        report = self._report
        async for letter in self._audit.letters_of_run(self._record):
            if letter.action == "parked":
                report.add_parked(letter.sequence)
            else:
                report.add_redriven(letter.sequence, letter.new_sequence or letter.sequence, letter.new_stream)
            report.resumed += 1
        if report.resumed:
            log.info("Continuing a redrive that has already handled %d letters", report.resumed)

    async def report_if_due(self) -> None:
        """Report the progress unless that was done a moment ago."""
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            await self.report_now()

    async def report_now(self, *, finished: bool = False) -> None:
        """Report the progress.

        :param finished: whether the redrive is complete
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        self._reported_at = time.monotonic()
        report = self._report
        log.info(
            "Redriving %s: %d letters redriven, %d parked, %d failed, %d were no dead letters",
            *(self._queue, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        self._on_progress(report)
        if self._record and self._audit:
            update = {"report": report.as_json(), "finished": finished}
            try:
                await self._audit.record_progress(self._record.model_copy(update=update))
            except LeaseLostError:
                raise
            except (ApiError, TransientError) as error:
                log.warning("The progress of the redrive couldn't be recorded: %s", error)


async def finish_run(connection: Connection, queue: WorkQueue, run: str) -> None:
    """Record that a redrive is complete which was left open; nothing is raised where that isn't possible."""
    try:
        if audit := await AuditLog.open(connection, queue, (await stream_info(connection, queue.name))["created"]):
            await audit.finish_run(run)
    except (ApiError, TransientError) as error:
        log.warning("The end of the redrive couldn't be recorded, so another one of its key would go on: %s", error)
