"""The record of one redrive in the audit, as the program that runs it keeps it, and what people ask of it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from airflow_provider_jetstream.jetstream.audit.redrives import (
    RedriveState,
    new_redrive_id,
    read_controls,
    read_record,
    redrive_subject,
)
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    LeaseHeldError,
    LeaseLostError,
    NotFoundError,
    QueueGoneError,
    RedriveError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.redrive.redrive_lease import redrive_lease
from airflow_provider_jetstream.jetstream.redrive.redrive_plan import total_outcomes
from airflow_provider_jetstream.jetstream.redrive.wave_outcome import LOOK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.audit.log import AuditLog
    from airflow_provider_jetstream.jetstream.audit.records import RunRecord
    from airflow_provider_jetstream.jetstream.audit.redrives import Engine, Redrive, RedriveControl, Wave
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

log = logging.getLogger(__name__)

_LONGEST_REASON = 500
# People are asked for twice a second; whether the queue is still the same one, every five seconds.
_LOOKS_AT_QUEUE = 10
# Of the report, what the record has elsewhere.
_ELSEWHERE: Final = frozenset({"redrive", "state", "reason", "outcomes", "waves"})


class SupervisedRecord:
    """The record of one redrive; an async context manager.

    :param report: what the redrive has done so far
    :param stopped: whether the caller wants it to stop
    :param is_recorded: whether it is an object by itself, rather than a part of another redrive
    :param engine: what redrives the letters
    :ivar counted: how many letters are known to be redriven and parked, where the report learns of them only later
    :ivar record: the redrive as it was recorded last; ``None`` before it begins
    :ivar run_record: the record of the request's key, if it has one
    :ivar is_queue_gone: whether the queue was deleted, or created anew, since the redrive began
    :ivar may_redrive: whether letters may be redriven now, rather than jobs or people awaited
    :ivar letters_are_due: whether another program is to redrive letters next
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        request: RedriveRequest,
        report: RedriveReport,
        stopped: Callable[[], bool],
        *,
        is_recorded: bool = True,
        engine: Engine = "python",
    ) -> None:
        self._connection = connection
        self.queue = queue
        self.is_recorded = is_recorded
        self.engine: Engine = engine
        self.counted: tuple[int, int] | None = None
        self.has_key = request.run is not None
        self.id = new_redrive_id()
        self.request = request if request.run or not is_recorded else replace(request, run=self.id)
        self.report = report
        self._caller_stops = stopped
        self._has_stopped = False
        self._controls: list[RedriveControl] = []
        self._watching: asyncio.Task[None] | None = None
        self._audit: AuditLog | None = None
        self._began = time.monotonic()
        self._done_before = 0
        self.record: Redrive | None = None
        self.run_record: RunRecord | None = None
        self.may_redrive = True
        self.letters_are_due = False
        self.is_queue_gone = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def stopped(self) -> bool:
        """Return whether no more letters may be redriven now, by the caller or by what a person asked."""
        return self.caller_stops or self.state in (RedriveState.PAUSED, RedriveState.ABORTED)

    @property
    def is_finished(self) -> bool:
        """Whether it is recorded as finished, or isn't recorded at all."""
        return self.record is None or self.record.state == RedriveState.FINISHED

    @property
    def caller_stops(self) -> bool:
        """Whether the caller wants it to stop, or wanted it before."""
        self._has_stopped = self._has_stopped or self._caller_stops()
        return self._has_stopped

    @property
    def state(self) -> RedriveState:
        """The state that people asked for, as far as it is known here."""
        return self.record.with_controls(self._controls).state if self.record else RedriveState.PLANNED

    @property
    def wave(self) -> Wave | None:
        """The wave that was recorded last."""
        return self.record.waves[-1] if self.record and self.record.waves else None

    @property
    def _done(self) -> int:
        return len(self.report.redriven) + len(self.report.parked)

    async def _take(self, record: Redrive) -> None:
        self.record = record
        # One that begins has none.
        if record.revision:
            await self.read_controls()
        self.report.redrive, self.report.state, self.report.reason = self.id, record.state, record.reason
        self.report.waves, self.report.outcomes = record.waves, record.outcomes
        state, wave = self.state, self.wave
        waits = state in (RedriveState.PAUSED, RedriveState.AT_GATE) or state.is_over
        self.may_redrive = not waits and record.state != RedriveState.AT_GATE
        self.may_redrive &= wave is None or wave.state != "awaiting"
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def save(
        self,
        state: RedriveState,
        *,
        audit: AuditLog | None = None,
        waves: tuple[Wave, ...] | None = None,
        reason: str = "",
    ) -> None:
        """Record the redrive.

        :param audit: with the lease; that of the last step where absent
        :param waves: its waves, where they have changed
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit refused it
        :raises TransientError: it isn't known to be recorded
        """
        audit, record = audit or self._audit, self.record
        if audit is None or record is None:
            return
        # What people asked is obeyed once the state is the one that they asked for.
        obeyed = self._controls and record.with_controls(self._controls).state == state
        seconds = time.monotonic() - self._began
        report = self.report
        redriven, parked = self.counted or (len(report.redriven), len(report.parked))
        done = redriven + parked - self._done_before
        waves = record.waves if waves is None else waves
        outcomes = total_outcomes(waves) if waves else record.outcomes
        report.redrive, report.state, report.reason = self.id, state, reason
        report.waves, report.outcomes = waves, outcomes
        record = record.model_copy(
            update={
                "state": state,
                "reason": reason,
                "waves": waves,
                "outcomes": outcomes,
                "redriven": redriven,
                "parked": parked,
                "failed": report.failures,
                "gone": len(report.gone),
                "rate": round(done / seconds, 1) if done and seconds else record.rate,
                "report": {name: value for name, value in report.as_json().items() if name not in _ELSEWHERE},
                "controls_to": self._controls[-1].sequence if obeyed else record.controls_to,
            }
        )
        ack = await audit.store(redrive_subject(audit.queue, self.id), record.model_dump_json(exclude={"at"}).encode())
        self.record = record.model_copy(update={"revision": ack.sequence})

    async def save_later(self, state: RedriveState, *, waves: tuple[Wave, ...] | None = None, reason: str = "") -> bool:
        """Take the lease and record the redrive; return false where another program has recorded it since.

        :raises RedriveError: the audit takes no records
        """
        while True:
            try:
                async with redrive_lease(self._connection, self.queue, self.request, self._caller_stops) as lease:
                    if lease is None or self._audit is None or self.record is None:
                        return False
                    # What others have left open stays so.
                    if lease.open_since is not None:
                        lease.leave_open()
                    audit = self._audit.fenced(lease)
                    found = await read_record(self._connection, audit, self.id)
                    if found and found.revision != self.record.revision:
                        await self._take(found)
                        return False
                    await self.save(state, audit=audit, waves=waves, reason=reason)
                    return True
            except LeaseHeldError:
                if self.caller_stops:
                    raise
            except LeaseLostError:
                raise
            except (ApiError, TransientError) as error:
                raise RedriveError(f"the state of the redrive {self.id} couldn't be recorded: {error}") from None

    async def read_controls(self) -> None:
        """Read what people asked."""
        if self._audit:
            after = self._controls[-1].sequence if self._controls else 0
            self._controls += await read_controls(self._connection, self._audit, self.id, after)

    async def require_queue(self) -> None:
        """Raise unless the queue is the one of the redrive: another one's people can neither read nor steer it.

        :raises QueueGoneError: it was deleted, or deleted and created anew
        """
        if self.record is None:
            return
        try:
            found = str((await stream_info(self._connection, self.queue.name))["created"])
        except NotFoundError:
            found = ""
        self.is_queue_gone = found != self.record.created
        if self.is_queue_gone:
            since = f"that it was deleted and created anew at {found}" if found else "that it was deleted"
            raise QueueGoneError(
                f"expected stream {self.queue.name} to be the one of the redrive {self.id}, created at"
                f" {self.record.created}; found {since}: its other letters are gone; begin another one"
            )

    async def _watch(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            looks += 1
            try:
                await self.read_controls()
                if not looks % _LOOKS_AT_QUEUE:
                    await self.require_queue()
            except JetStreamProviderError as error:
                log.info("What people ask of the redrive %s couldn't be read: %s", self.id, error)

    def last_control(self) -> RedriveControl | None:
        """Return what a person asked last that isn't obeyed yet."""
        pending = [control for control in self._controls if self.record and control.sequence > self.record.controls_to]
        return pending[-1] if pending else None

    def gate_control(self) -> RedriveControl | None:
        """Return the first resume since the redrive stopped at its gate, which lets it pass."""
        since = self.record.revision if self.record else 0
        resumes = (control for control in self._controls if control.action == "resume" and control.sequence > since)
        return next(resumes, None)

    @property
    def final_state(self) -> RedriveState:
        """The state of a redrive that has handled all letters."""
        return RedriveState.FAILED if self.report.failures else RedriveState.FINISHED

    @property
    def final_reason(self) -> str:
        """Why it is in that state; empty where the state says it."""
        failures = self.report.failures
        return f"{failures} letters couldn't be redriven and stayed where they were" if failures else ""

    async def fail(self, error: Exception) -> None:
        """Record that the redrive ended with an error, with the lease; nothing is raised where that isn't possible."""
        with suppress(JetStreamProviderError):
            await self.save(RedriveState.FAILED, reason=str(error)[:_LONGEST_REASON])

    async def finish_run(self) -> None:
        """Record that the next redrive of the same key is another one; nothing is raised where that isn't possible."""
        if self._audit is None or not self.has_key:
            return
        try:
            await self._audit.unfenced().finish_run(str(self.request.run))
            self.run_record = None
        except (ApiError, TransientError) as error:
            log.warning("The end of the redrive couldn't be recorded, so another one of its key would go on: %s", error)
