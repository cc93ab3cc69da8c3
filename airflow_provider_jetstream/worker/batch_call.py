"""One call of a batch handler: several jobs, each with an outcome of its own."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.worker.handler import HandlerResult, as_exception, outcomes_of
from airflow_provider_jetstream.worker.runners import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.job_run import JobRun
    from airflow_provider_jetstream.worker.runners import HandlerRun, Supervisor


class BatchCall:
    """Watches over the call, and hands each job the outcome that is its own.

    :param runs: the jobs, in the order in which the handler gets them
    :param on_outcome: takes a job and its result
    :param on_end: is called when the handler isn't waited for any more
    """

    def __init__(
        self,
        supervisor: Supervisor,
        runs: Sequence[JobRun],
        on_outcome: Callable[[JobRun, HandlerResult], None],
        on_end: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._runs = runs
        self._on_outcome = on_outcome
        self._on_end = on_end
        self._began = runs[0].began
        limits = [run.seconds for run in runs if run.seconds is not None]
        self._seconds = min(limits, default=None)
        self._attempt: HandlerRun | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call the handler."""
        jobs: list[Delivery] = [run.job for run in self._runs]
        with HandlerResult() as refusal:
            self._attempt = self._supervisor.start(jobs)
        if self._attempt is None:
            self._end(refusal)
            return
        result = self._attempt.result
        if result.done():
            self._on_result(result)
            return
        first = self._runs[0]
        if self._seconds is not None:
            # The whole call ends with it, so one of its jobs is enough.
            first.deadline_at = self._began + self._seconds
            first.due = min(first.due, first.deadline_at)
        for run in self._runs:
            run.call = self
        result.add_done_callback(self._on_result)

    def supervise(self) -> None:
        """Look whether the call has to be ended: at its deadline, or with the worker."""
        if self._task is None and self._attempt and not self._attempt.result.done():
            self._task = asyncio.create_task(self._watch(self._attempt))

    async def _watch(self, attempt: HandlerRun) -> None:
        # One job of several can't be ended where it is cancelled.
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        first = self._runs[0].job
        self._end(await self._supervisor.supervise(first, attempt, self._seconds, never, began=self._began))

    def _on_result(self, future: asyncio.Future[Any]) -> None:
        if self._task is None:
            self._end(result_of(future))

    def _end(self, result: HandlerResult) -> None:
        self._runs[0].deadline_at = inf
        self._on_end()
        outcomes = result
        if result.error is None:
            with HandlerResult() as outcomes:
                outcomes.value = outcomes_of(result.value, len(self._runs))
        for position, run in enumerate(self._runs):
            run.call = None
            own = HandlerResult()
            if outcomes.error:
                own.error = outcomes.error
            elif isinstance(outcome := outcomes.value[position], BaseException):
                own.error = as_exception(outcome)
            else:
                own.value = outcome
            self._on_outcome(run, own)
