"""A bulk redrive as an object of the audit: the driver records it, and obeys what people ask of it.

Its gates, pauses and waves are those of a redrive without Spark. They run on an event loop of their own, in another
thread; what needs Spark runs in the caller's thread, to which Spark's job groups and a notebook belong.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_provider_jetstream.jetstream.audit.redrives import RedriveState
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, TransientError
from airflow_provider_jetstream.jetstream.redrive.redrive import supervise
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.run_progress import RunProgress
from airflow_provider_jetstream.jetstream.redrive.supervision import Supervision
from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import audit_log
from airflow_provider_jetstream.spark.bulk_redrive.outcomes import CANCELLED
from airflow_provider_jetstream.spark.connection_options import socket_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
    from airflow_provider_jetstream.spark.bulk_redrive.driver_scan import DriverScan

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class DriverSupervision:
    """One bulk redrive, run step by step; its other methods are for the steps.

    :param options: connection options of the data source
    :param request: with the redrive's key
    :param stopped: called a few times a second, from two threads
    :ivar report: what it has done so far
    """

    def __init__(
        self, options: Mapping[str, str], queue: WorkQueue, request: RedriveRequest, stopped: Callable[[], bool]
    ) -> None:
        self.report = RedriveReport()
        self._options = options
        self._queue = queue
        self._request = request
        self._stopped = stopped
        self._is_interrupted = False
        # The steps that are to be run; None at the end.
        self._steps: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        self._connection: Connection
        self._supervision: Supervision
        self._audit: AuditLog
        self._progress: RunProgress
        self._read_to = 0
        self._redriven: set[int] = set()
        self._parked: set[int] = set()

    def run(self, step: Callable[[], None], patience: float = math.inf) -> None:
        """Run a redrive until it is over; each step in this thread.

        :param patience: for how many seconds jobs and people are awaited at one go
        :raises Exception: what a step raises
        """
        with ThreadPoolExecutor(1, "supervision of a redrive") as thread:
            running = thread.submit(asyncio.run, self._supervise(patience))
            try:
                while (ended := self._steps.get()) is not None:
                    try:
                        step()
                    except Exception as error:  # noqa: BLE001 - raised again below
                        ended.set_exception(error)
                    except BaseException:
                        ended.cancel()
                        raise
                    else:
                        ended.set_result(None)
            except BaseException:
                self._is_interrupted = True
                raise
            running.result()

    async def _supervise(self, patience: float) -> None:
        try:
            async with connect(socket_settings(self._options)) as connection:
                self._loop, self._connection = asyncio.get_running_loop(), connection
                self._supervision = Supervision(
                    *(connection, self._queue, self._request, self.report, self._caller_stops), engine="spark"
                )
                await supervise(connection, self._supervision, self._step, self._caller_stops, patience)
        finally:
            self._steps.put(None)

    async def _step(self) -> None:
        ended: Future[None] = Future()
        self._steps.put(ended)
        await asyncio.wrap_future(ended)

    def _caller_stops(self) -> bool:
        return self._is_interrupted or self._stopped()

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def stopped(self) -> bool:
        """Return whether no more letters may be redriven now, by the caller or by what a person asked."""
        return self._supervision.stopped()

    @property
    def may_redrive(self) -> bool:
        """Whether letters may be redriven now, rather than jobs or people awaited."""
        return self._supervision.may_redrive

    @property
    def wave(self) -> int | None:
        """The number of the wave that is redriven; ``None`` where there are no waves."""
        return self._supervision.wave.number if self._supervision.wave else None

    @property
    def remaining(self) -> int | None:
        """How many letters the wave still takes; ``None`` for all."""
        return self._supervision.remaining

    @property
    def until(self) -> int:
        """The last stream sequence that was stored when the redrive began."""
        return self._supervision.record.until if self._supervision.record else 0

    def brought_again(self) -> SequenceRanges:
        """Return the jobs that died again in waves after which a person let the redrive go on."""
        return self._supervision.brought_again()

    def begin(self, scan: DriverScan, token: int) -> None:
        """Begin the redrive, or go on with it; add to the report what earlier tries did.

        :param token: the token of the queue's lease
        :raises LeaseLostError: somebody else has the lease
        :raises RedriveError: it can't be recorded
        """
        self._call(self._begin(scan, token))

    async def _begin(self, scan: DriverScan, token: int) -> None:
        self._audit = audit_log(self._connection, scan, token)
        self._progress = RunProgress(self._audit, self._supervision, lambda _: None)
        await self._progress.begin(scan.scan)
        self._supervision.counted = None
        self._read_to = (await stream_info(self._connection, self._audit.stream))["state"]["last_seq"]
        self._redriven, self._parked = set(self.report.redriven), set(self.report.parked)
        await self._let_tasks_run(runs=True)

    def cancel_tasks(self) -> None:
        """Have the tasks stop before their next letters.

        :raises ApiError: the audit refused that
        :raises TransientError: it isn't known to be recorded
        """
        self._call(self._let_tasks_run(runs=False))

    async def _let_tasks_run(self, *, runs: bool) -> None:
        # Tasks read the record of the run before each window of letters.
        record = self._supervision.run_record
        if record and not (runs and CANCELLED not in record.report):
            report = {name: value for name, value in record.report.items() if name != CANCELLED}
            record = record.model_copy(update={"report": report if runs else {**report, CANCELLED: True}})
            await self._audit.record_progress(record)
            self._supervision.run_record = record

    def record_progress(self) -> int:
        """Record how many letters have been handled so far; return that."""
        return self._call(self._record_progress())

    async def _record_progress(self) -> int:
        try:
            last = (await stream_info(self._connection, self._audit.stream))["state"]["last_seq"]
            async for letter in self._audit.letters_of_run(str(self._request.run), self._read_to + 1):
                (self._parked if letter.action == "parked" else self._redriven).add(letter.sequence)
            self._read_to = last
            self._supervision.counted = len(self._redriven), len(self._parked)
            await self._supervision.save(RedriveState.RUNNING)
        except (ApiError, LeaseLostError, TransientError) as error:
            log.warning("The progress of the redrive couldn't be recorded: %s", error)
        return len(self._redriven) + len(self._parked)

    def end_step(self, *, finished: bool) -> None:
        """Record how the step ended.

        :param finished: whether a redrive without waves is complete
        :raises LeaseLostError: somebody else has the lease
        """
        self._call(self._end_step(finished=finished))

    async def _end_step(self, *, finished: bool) -> None:
        self._supervision.counted = None
        await self._progress.end(finished=finished)

    def fail(self, error: Exception) -> None:
        """Record that the redrive ended with an error; nothing is raised where that isn't possible."""
        self._call(self._supervision.fail(error))
