"""What operators share that wait for jobs: a little here, for long in a trigger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.common.compat.sdk import AirflowFailException, BaseOperator, conf

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.hooks.results import plain
from airflow_provider_jetstream.jetstream.completions import Mark, WaitReport, wait_for_jobs
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JobsCancelledError, JobsDeadError
from airflow_provider_jetstream.jetstream.publishing import ranges
from airflow_provider_jetstream.triggers.completion import JobCompletionTrigger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import QueueSource

# Jobs that end at once are answered without deferring, which costs seconds; see docs/decisions.md.
INLINE_SECONDS = 2.0
_NAMED_RANGES = 5
_BACKSTOP = timedelta(minutes=2)


class JobWaitingOperator(BaseOperator):
    """An operator that can wait until the jobs it made have ended.

    :param work_queue: the queue
    :param wait_for_completion: wait until every job ended
    :param max_dead: dead letters to put up with; ``None`` for any number
    :param max_cancelled: cancelled jobs to put up with; ``None`` for any number
    :param wait_timeout: how long to wait
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    retry_goes_on_waiting = True

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        wait_for_completion: bool = False,
        max_dead: int | None = 0,
        max_cancelled: int | None = 0,
        wait_timeout: timedelta = timedelta(days=1),
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.work_queue = work_queue
        self.nats_conn_id = nats_conn_id
        self.wait_for_completion = wait_for_completion
        self.max_dead = max_dead
        self.max_cancelled = max_cancelled
        self.wait_timeout = wait_timeout
        self.deferrable = deferrable

    async def wait_inline(self, connection: Connection, mark: Mark, sequences: set[int]) -> WaitReport | None:
        """Wait as long as this process should: shortly if a trigger can take over, else to the end.

        :param connection: an open connection
        :param mark: taken before publishing
        :param sequences: the jobs' stream sequences
        :return: the report, or ``None`` if the trigger has to go on
        :raises DeadlineError: the time is over and no trigger may go on
        """
        reports = [WaitReport(set(sequences))]
        seconds = self.wait_timeout.total_seconds()
        limit = asyncio.timeout(min(INLINE_SECONDS, seconds) if self.deferrable else seconds)
        try:
            async with limit:
                return await wait_for_jobs(
                    connection,
                    mark,
                    sequences,
                    max_dead=self.max_dead,
                    max_cancelled=self.max_cancelled,
                    progress=reports.append,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            if self.deferrable:
                return None
            raise self._too_late(mark.queue, ranges(reports[-1].awaited)) from None

    def defer_waiting(self, mark: Mark, sequences: set[int], summary: Mapping[str, Any]) -> NoReturn:
        """Go on waiting in the triggerer.

        :param mark: taken before publishing
        :param sequences: the jobs' stream sequences
        :param summary: becomes part of the task's result
        """
        now = time.time()
        self.log.info("Waiting in the triggerer for %d jobs of %s", len(sequences), mark.queue)
        self.defer(
            trigger=JobCompletionTrigger(
                nats_conn_id=self.nats_conn_id,
                mark=asdict(mark),
                sequences=ranges(sequences),
                max_dead=self.max_dead,
                max_cancelled=self.max_cancelled,
                deadline=now + self.wait_timeout.total_seconds(),
                deferred_at=now,
                summary=summary,
            ),
            method_name="execute_complete",
            # The trigger keeps the deadline and can tell what is missing; this only ends one that can't run.
            timeout=self.wait_timeout + _BACKSTOP,
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Go on after the trigger.

        :param context: the task's context
        :param event: what the trigger found
        :return: the result of the task
        :raises AirflowFailException: too many jobs died or were cancelled, or waiting was impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event is None:
            raise AirflowFailException("the trigger ended without an event; clear the task to go on waiting")
        if event["status"] == "error":
            raise AirflowFailException(event["message"])
        if event["status"] == "timeout":
            raise self._too_late(event["queue"], event["missing"])
        return self.conclude(event["summary"], event["report"])

    def _too_late(self, queue: str, missing: Sequence[Sequence[int]]) -> Exception:
        count = sum(high - low + 1 for low, high in missing)
        shown = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in missing[:_NAMED_RANGES])
        what = (
            f"expected every job to end within {self.wait_timeout}, found {count} of {queue} that did not (sequences"
            f" {shown}{', …' if len(missing) > _NAMED_RANGES else ''}): see whether workers take them, or raise"
            " wait_timeout"
        )
        if self.retry_goes_on_waiting:
            return DeadlineError(f"{what}; a retry goes on waiting")
        return AirflowFailException(f"{DeadlineError.code} {what}; a retry would not know of them, so there is none")

    def conclude(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
        """Turn the ends of the jobs into the end of the task.

        :param summary: what was done before waiting
        :param report: how the jobs ended, as JSON
        :return: both
        :raises AirflowFailException: too many jobs died or were cancelled
        """
        # A task that was deferred before this package knew of cancellations has a report without them.
        cancelled = report.get("cancelled", 0)
        self.log.info(
            "%d jobs completed, %d became dead letters, %d were cancelled",
            report["completed"],
            report["dead"],
            cancelled,
        )
        if self.max_dead is not None and report["dead"] > self.max_dead:
            error = JobsDeadError(
                f"expected at most {self.max_dead} dead letters, found {report['dead']}: {report['dead_reasons']};"
                " see the dead letter queue, mend the cause, then redrive"
            )
            raise AirflowFailException(f"{error.code} {error}")
        if self.max_cancelled is not None and cancelled > self.max_cancelled:
            why = JobsCancelledError(
                f"expected at most {self.max_cancelled} cancelled jobs, found {cancelled}:"
                f" {report['cancelled_reasons']}; allow them with max_cancelled, or publish again what is to be"
                " done all the same"
            )
            raise AirflowFailException(f"{why.code} {why}")
        return plain({**summary, **report})
