"""The operator that brings dead letters back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.hooks.failing import terminal_errors_fail
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from airflow_provider_jetstream.hooks.results import plain
from airflow_provider_jetstream.jetstream.completions import Mark, WaitReport, take_mark
from airflow_provider_jetstream.jetstream.queue import WorkQueue
from airflow_provider_jetstream.jetstream.redrive import RedriveReport, redrive
from airflow_provider_jetstream.operators.waiting import JobWaitingOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.common.compat.sdk import Context

    from airflow_provider_jetstream.jetstream.connection import Connection


class JetStreamRedriveOperator(JobWaitingOperator):
    """Bring dead letters back as jobs with fresh deliveries; succeed when all are, or when the jobs have ended.

    Running it again at any time is safe: a letter whose copy is stored already isn't copied again inside the stream's
    duplicate window, and one that is gone is left alone.

    :param work_queue: a :class:`~airflow_provider_jetstream.jetstream.queue.WorkQueue`, its dict, or its YAML's path
    :param sequences: stream sequences of the dead letters to redrive; all where absent
    :param wait_for_completion: wait until every redriven job ended
    :param max_dead: redriven jobs that may die again; ``None`` for any number
    :param wait_timeout: how long to wait
    :param deferrable: wait in the triggerer rather than in a worker slot
    :param nats_conn_id: the Airflow connection
    :return: counts, and sequences as ranges
    """

    template_fields: Sequence[str] = ("work_queue", "sequences", "nats_conn_id")
    ui_color = "#f5e6d9"
    # It would find the letters gone and succeed, whatever became of the jobs.
    retry_goes_on_waiting = False

    def __init__(
        self,
        *,
        sequences: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sequences = sequences

    def execute(self, context: Context) -> dict[str, Any]:
        """Redrive, and wait if asked to.

        :param context: the task's context
        :return: the result of the task
        :raises AirflowFailException: a letter that was asked for is gone, or too many redriven jobs died
        :raises RedriveError: some letters stayed where they were
        """
        with terminal_errors_fail():
            queue = WorkQueue.load(self.work_queue)
            mark, report, ended = JetStreamHook(self.nats_conn_id).blocking(self._redrive, queue)
        summary = report.as_json()
        self.log.info("%d dead letters redriven, %d were gone", len(report.redriven), len(report.gone))
        if mark is None:
            return plain(summary)
        if ended is None:
            self.defer_waiting(mark, set(report.redriven.values()), summary)
        return self.conclude(summary, ended.as_json())

    async def _redrive(
        self, connection: Connection, queue: WorkQueue
    ) -> tuple[Mark | None, RedriveReport, WaitReport | None]:
        mark = await take_mark(connection, queue) if self.wait_for_completion else None
        report = await redrive(connection, queue, sequences=self.sequences)
        report.raise_for_failures()
        if mark is None:
            return None, report, None
        return mark, report, await self.wait_inline(connection, mark, set(report.redriven.values()))
