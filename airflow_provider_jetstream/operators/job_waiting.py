"""The base class of operators that wait for jobs: first inline for a short time, then in a trigger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator, get_current_context

from airflow_provider_jetstream.airflow_compat import AirflowFailException, conf
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_stored
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.jetstream.publishing.report import sequence_ranges
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait
from airflow_provider_jetstream.links.monitor import QueueLink, RunJobsLink, RunLettersLink
from airflow_provider_jetstream.tasks.arguments import (
    check_counts,
    check_flags,
    check_text,
    check_timedelta,
    check_work_queue,
)
from airflow_provider_jetstream.tasks.outcome import json_result
from airflow_provider_jetstream.triggers.completion import WHY_KILLED, JobCompletionTrigger
from airflow_provider_jetstream.triggers.task_state import has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor

# Jobs that end at once are awaited without deferring, which costs seconds; see docs/decisions.md.
INLINE_SECONDS = 2.0
_NAMED_RANGES = 5
_BACKSTOP = timedelta(minutes=2)


class JobWaitingOperator(BaseOperator):
    """An operator that can wait until the jobs it published or redrove have ended.

    :param work_queue: the queue
    :param wait_for_completion: wait until every job ended
    :param max_dead: dead letters to tolerate; ``None`` for any number
    :param max_cancelled: cancelled jobs to tolerate; ``None`` for any number
    :param max_vanished: jobs to tolerate that are gone without evidence of how they ended; ``None`` for any number
    :param min_completed: how many jobs have to complete, 1 for any of them, however the others end; not together with
        the three above
    :param cancel_on_kill: cancel the jobs that haven't ended when a person ends the task
    :param wait_timeout: how long to wait
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    """

    operator_extra_links = (QueueLink(), RunJobsLink(), RunLettersLink())
    retry_resumes_waiting = True

    def __init__(
        self,
        *,
        work_queue: QueueSource,
        wait_for_completion: bool = False,
        max_dead: int | None = 0,
        max_cancelled: int | None = 0,
        max_vanished: int | None = 0,
        min_completed: int | None = None,
        cancel_on_kill: bool = False,
        wait_timeout: timedelta = timedelta(days=1),
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        nats_conn_id: str = JetStreamHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_work_queue(work_queue)
        check_text(nats_conn_id=nats_conn_id)
        check_flags(wait_for_completion=wait_for_completion, cancel_on_kill=cancel_on_kill, deferrable=deferrable)
        check_counts(0, max_dead=max_dead, max_cancelled=max_cancelled, max_vanished=max_vanished)
        check_counts(1, min_completed=min_completed)
        check_timedelta(wait_timeout=wait_timeout)
        self.work_queue = work_queue
        self.nats_conn_id = nats_conn_id
        self.wait_for_completion = wait_for_completion
        self.max_dead = max_dead
        self.max_cancelled = max_cancelled
        self.max_vanished = max_vanished
        self.min_completed = min_completed
        self.cancel_on_kill = cancel_on_kill
        if min_completed is not None and (max_dead, max_cancelled, max_vanished) != (0, 0, 0):
            raise ValueError(
                "expected min_completed alone, found it with max_dead, max_cancelled or max_vanished: how the other"
                " jobs end doesn't matter then"
            )
        self._signal_kill: Callable[[], object] = _do_nothing
        self.wait_timeout = wait_timeout
        self.deferrable = deferrable

    async def wait_inline(
        self,
        connection: Connection,
        cursor: Cursor,
        sequences: set[int],
        advised: Mapping[str, int] | None = None,
    ) -> WaitReport | None:
        """Wait in this process: for 2 seconds if a trigger can take over, else to the end.

        :param cursor: taken before publishing
        :param sequences: the jobs' stream sequences
        :param advised: the jobs that workers report on advisory subjects: stream sequences by digests
        :return: the report, or ``None`` if the trigger has to go on waiting
        :raises DeadlineError: ``wait_timeout`` is over and no trigger may go on waiting
        """
        report = WaitReport(set(sequences))
        seconds = self.wait_timeout.total_seconds()
        limit = asyncio.timeout(min(INLINE_SECONDS, seconds) if self.deferrable else seconds)
        killed, loop = asyncio.Event(), asyncio.get_running_loop()
        # Airflow calls on_kill from a signal handler, which doesn't wake the loop by itself.
        self._signal_kill = partial(loop.call_soon_threadsafe, killed.set)
        waiting = asyncio.create_task(wait(connection, cursor, report, policy=self._policy(), advised=advised))
        kill = asyncio.create_task(killed.wait())
        try:
            async with limit:
                while not waiting.done():
                    await asyncio.wait({waiting, kill}, return_when=asyncio.FIRST_COMPLETED)
                    if kill.done():
                        killed.clear()
                        kill = asyncio.create_task(killed.wait())
                        await self._cancel_jobs(connection, cursor, report)
                return await waiting
        except TimeoutError:
            if not limit.expired():
                raise
            if self.deferrable:
                return None
            raise self._overdue(cursor.queue, sequence_ranges(report.awaited)) from None
        finally:
            self._signal_kill = _do_nothing
            for task in (waiting, kill):
                task.cancel()
            await asyncio.gather(waiting, kill, return_exceptions=True)

    def on_kill(self) -> None:
        """Cancel the jobs that haven't ended if ``cancel_on_kill`` is set; called while :meth:`execute` runs."""
        self._signal_kill()

    async def _cancel_jobs(self, connection: Connection, cursor: Cursor, report: WaitReport) -> None:
        if not self.cancel_on_kill:
            return
        # Airflow also kills a task that was cleared, and one whose machine is shut down.
        if await has_ended(get_current_context()["ti"]):
            cancelled = await cancel_stored(connection, cursor.queue, cursor.events, report.awaited, WHY_KILLED)
            self.log.info("The task is being ended: %d jobs of %s are cancelled", cancelled, cursor.queue)
        else:
            self.log.info("The task goes on, so its jobs do too")

    def _policy(self) -> WaitPolicy:
        return WaitPolicy(self.max_dead, self.max_cancelled, self.max_vanished, self.min_completed)

    def defer_waiting(
        self, cursor: Cursor, sequences: set[int], summary: Mapping[str, Any], advised_by: str | None = None
    ) -> NoReturn:
        """Go on waiting in the triggerer.

        :param cursor: taken before publishing
        :param sequences: the jobs' stream sequences
        :param summary: becomes part of the task's result
        :param advised_by: the key of the task whose record says which jobs workers report on advisory subjects
        """
        now = time.time()
        self.log.info("Waiting in the triggerer for %d jobs of %s", len(sequences), cursor.queue)
        self.defer(
            trigger=JobCompletionTrigger(
                nats_conn_id=self.nats_conn_id,
                mark=asdict(cursor),
                sequences=sequence_ranges(sequences),
                tolerance=asdict(self._policy()),
                deadline=now + self.wait_timeout.total_seconds(),
                deferred_at=now,
                summary=summary,
                cancel_on_kill=self.cancel_on_kill,
                advised_by=advised_by,
            ),
            method_name="execute_complete",
            # The trigger itself fires at the deadline and names the missing jobs; this only ends one that can't run.
            timeout=self.wait_timeout + _BACKSTOP,
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        """Resume after the trigger.

        :raises AirflowFailException: more jobs died, were cancelled or vanished than tolerated, or waiting was
            impossible
        :raises DeadlineError: jobs are still running after ``wait_timeout``
        """
        if event is None:
            raise AirflowFailException("the trigger ended without an event; clear the task to go on waiting")
        if event["status"] == "error":
            raise AirflowFailException(event["message"])
        if event["status"] == "timeout":
            raise self._overdue(event["queue"], event["missing"])
        return self.finish(event["summary"], event["report"])

    def _overdue(self, queue: str, missing: Sequence[Sequence[int]]) -> Exception:
        count = sum(high - low + 1 for low, high in missing)
        named = ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in missing[:_NAMED_RANGES])
        message = (
            f"expected every job to end within {self.wait_timeout}, found {count} of {queue} that did not (sequences"
            f" {named}{', …' if len(missing) > _NAMED_RANGES else ''}): see whether workers take them, or raise"
            " wait_timeout"
        )
        if self.retry_resumes_waiting:
            return DeadlineError(f"{message}; a retry goes on waiting")
        return AirflowFailException(f"{DeadlineError.code} {message}; a retry would not know of them, so there is none")

    def finish(self, summary: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
        """Turn the ends of the jobs into the outcome of the task.

        :param summary: the result before waiting
        :param report: how the jobs ended, as JSON
        :return: both
        :raises AirflowFailException: more jobs died, were cancelled or vanished than tolerated
        """
        self.log.info(
            "%d jobs completed, %d became dead letters, %d were cancelled, %d vanished",
            report["completed"],
            report["dead"],
            report.get("cancelled", 0),
            report.get("vanished", 0),
        )
        if left_out := report.get("results_left_out"):
            self.log.warning("%d results are too large together for an XCom; the events stream has them", left_out)
        if error := self._policy().violation(report):
            raise AirflowFailException(f"{error.code} {error}")
        return json_result({**summary, **report})


def _do_nothing() -> None:
    pass
