"""The progress of one redrive: in the log, for its caller, and in the audit."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState, read_record, redrive_subject
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, RedriveError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0


def log_waiting(queue: str, until: datetime) -> str:
    """Log that a redrive waits for slow workers; return until when and why, to go on after "waits".

    :param until: when none can have the job of a letter any more, by the server's clock
    """
    ends = until.astimezone(UTC) + timedelta(seconds=1)
    what = (
        f"until {ends:%Y-%m-%d %H:%M:%S} UTC, when the ack wait has passed since the last letters died: a slow"
        " worker may still have one of their jobs until then"
    )
    log.info("The redrive of %s waits %s", queue, what)
    return what


class RunProgress:
    """The progress of one step of a redrive, with the lease.

    :param audit: with the lease
    :param supervision: the redrive
    :param on_progress: called with its report
    """

    def __init__(self, audit: AuditLog, supervision: Supervision, on_progress: Callable[[RedriveReport], None]) -> None:
        self._audit = audit
        self._supervision = supervision
        self._on_progress = on_progress
        self._reported_at = time.monotonic()

    async def begin(self, scan: Scan) -> None:
        """Begin to record the progress, or go on with that of an earlier try, which is added to the report.

        :raises RedriveError: the audit takes no records
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        supervision, request, audit = self._supervision, self._supervision.request, self._audit
        if not supervision.is_recorded:
            return
        last = scan.context.audit["state"]["last_seq"] if scan.context.audit else 0
        redrive, start = supervision.id, last + 1
        try:
            if supervision.has_key and supervision.run_record is None:
                supervision.run_record = await audit.begin_run(
                    str(request.run), request.who, request.why, supervision.id
                )
            resumes = False
            if supervision.run_record:
                resumes = supervision.run_record.redrive != supervision.id
                start = supervision.run_record.from_sequence
                redrive = supervision.run_record.redrive or redrive
            await supervision.begin(audit, scan, redrive, start, resumes=resumes)
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            if not (supervision.has_key or request.waves):
                # Nothing is stored without an intent, so each letter fails for the same reason.
                log.warning("The redrive couldn't be recorded: %s", error)
                supervision.record = None
                return
            raise RedriveError(
                f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it"
                " that the audit takes records, then run it again"
            ) from None

    async def report_if_due(self) -> None:
        """Report the progress unless that was done a moment ago."""
        if time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            await self.report_now()

    @contextmanager
    def waiting(self, until: datetime) -> Iterator[None]:
        """Say in the log and to the caller that slow workers are waited for, until the block ends.

        :param until: when none can have the job of a letter any more, by the server's clock
        """
        report = self._supervision.report
        report.waiting = log_waiting(self._supervision.queue.name, until)
        self._on_progress(report)
        try:
            yield
        finally:
            report.waiting = ""

    async def report_now(self) -> None:
        """Report the progress.

        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        await self._report(ends=False, finished=False)

    async def end(self, *, finished: bool) -> None:
        """Report the end of the step.

        :param finished: whether a redrive without waves is complete
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        await self._report(ends=True, finished=finished)

    async def _report(self, *, ends: bool, finished: bool) -> None:
        self._reported_at = time.monotonic()
        supervision, report = self._supervision, self._supervision.report
        log.info(
            "Redriving %s: %d letters redriven, %d parked, %d failed, %d were no dead letters",
            *(supervision.queue.name, len(report.redriven), len(report.parked), report.failures, len(report.gone)),
        )
        self._on_progress(report)
        try:
            if ends:
                finished = await supervision.end_step(self._audit, finished=finished)
            else:
                await supervision.save(RedriveState.RUNNING, audit=self._audit)
            if supervision.run_record:
                update = {"report": report.as_json(), "finished": finished}
                await self._audit.record_progress(supervision.run_record.model_copy(update=update))
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            log.warning("The progress of the redrive couldn't be recorded: %s", error)


async def finish_run(
    connection: Connection,
    queue: WorkQueue,
    run: str,
    outcomes: RedriveOutcomes | None = None,
    state: RedriveState = RedriveState.FINISHED,
) -> dict[str, Any]:
    """Record that a redrive is complete which was left open; nothing is raised where that isn't possible.

    :param run: its key
    :param outcomes: what became of its letters, where they were awaited
    :param state: ``failed`` where another redrive of the key goes on
    :return: state, reason and outcomes as the audit has them, under the names of :meth:`RedriveReport.as_json`
    """
    update: dict[str, Any] = {"state": state, "reason": "", **({"outcomes": outcomes} if outcomes else {})}
    try:
        created = (await stream_info(connection, queue.name))["created"]
        if audit := await AuditLog.open(connection, queue, created):
            record = await audit.open_run(run)
            if state.is_over:
                await audit.finish_run(run)
            redrive = (record.redrive if record else None) or run
            found = await read_record(connection, audit, redrive)
            if found and not found.state.is_over:
                body = found.model_copy(update=update).model_dump_json(exclude={"at"}).encode()
                await audit.store(redrive_subject(audit.queue, redrive), body)
            elif found:
                update = {"state": found.state, "reason": found.reason, "outcomes": found.outcomes}
    except (ApiError, TransientError) as error:
        log.warning("The end of the redrive couldn't be recorded, so another one of its key would go on: %s", error)
    return {name: value.model_dump() if name == "outcomes" else str(value) for name, value in update.items()}
