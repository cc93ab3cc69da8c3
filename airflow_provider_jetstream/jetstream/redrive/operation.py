"""One redrive as an object of the audit: its lease, its record, its progress, and what people ask of it.

The program that runs a redrive records it while it holds the queue's lease. What people ask is read twice a second by a
task beside it, and obeyed before the next letters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

from airflow_provider_jetstream.jetstream.audit.lease import LeaseRecord, lease_seconds, renewed, take_lease
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import (
    Redrive,
    RedriveOutcomes,
    RedriveState,
    new_redrive_id,
    read_controls,
    read_record,
    redrive_subject,
)
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import lease_subject
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    LeaseHeldError,
    LeaseLostError,
    NotFoundError,
    QueueGoneError,
    RedriveError,
    RedriveRequestError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.limits import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.audit.records import RunRecord
    from airflow_provider_jetstream.jetstream.audit.redrives import Engine, RedriveControl, Wave
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

log = logging.getLogger(__name__)

# How often what may stop a wait is read.
POLL_SECONDS: Final = 0.5
PROGRESS_SECONDS: Final = 5.0
_LONGEST_REASON = 500
# People are asked for twice a second; whether the queue is still the same one, every five seconds.
_POLLS_OF_QUEUE = 10
# Of the report, what the record has elsewhere.
_ELSEWHERE: Final = frozenset({"redrive", "state", "reason", "outcomes", "waves"})
_PLAIN = ("subject", "rate", "max_redrives", "order_key", "count_under_pause", "discard", "without_copy", "undo")


@asynccontextmanager
async def redrive_lease(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    stopped: Callable[[], bool] = lambda: False,
    title: str | None = None,
) -> AsyncIterator[Lease | None]:
    """Hold a queue's lease until the block ends; takes and raises what :func:`take_redrive_lease` does."""
    lease = await take_redrive_lease(connection, queue, request, title or request.operation, stopped)
    if lease is None:
        yield None
        return
    async with renewed(lease):
        yield lease


async def take_redrive_lease(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    operation: str,
    stopped: Callable[[], bool] = lambda: False,
) -> Lease | None:
    """Take a queue's lease, which is to be renewed and released; ``None`` where no audit could store it.

    :param operation: what the holder does, in words
    :param stopped: called a few times a second; once it returns true, the lease isn't waited for any longer
    :raises LeaseHeldError: another operation holds it still after the request's time limit
    :raises RedriveError: the audit refuses records, doesn't capture the lease's subject, or is away
    :raises TransientError: no answer in time
    """
    if queue.audit is None:
        return None
    record = LeaseRecord(
        operation=operation, run=request.run, who=request.who, why=request.why, seconds=lease_seconds(connection)
    )
    try:
        return await take_lease(connection, queue.audit.name, queue.name, record, request.lease_seconds, stopped)
    except NotFoundError:
        return None
    except (ApiError, UnreachableError) as error:
        raise RedriveError(
            f"expected {queue.audit.name} to record who redrives {queue.name} on {lease_subject(queue.name)}, found:"
            f" {error}; nothing was redriven: see to it that the audit takes records, then run it again"
        ) from None


class Operation:
    """One redrive, for the program that runs it; an async context manager, which watches what people ask.

    :param report: what the redrive has done so far
    :param progress: called with the report every five seconds
    :param stopped: whether the caller wants it to stop
    :param is_recorded: whether it is an object by itself, rather than a part of another redrive
    :param engine: what redrives the letters
    :ivar counted: how many letters are known to be redriven and parked, where the report learns of them only later
    :ivar record: the redrive as it was recorded last; ``None`` before it begins
    :ivar run_record: the record of the request's key, if it has one
    :ivar audit: the queue's audit, with the last step's lease
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
        *,
        progress: Callable[[RedriveReport], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        is_recorded: bool = True,
        engine: Engine = "python",
    ) -> None:
        self.connection = connection
        self.queue = queue
        self.is_recorded = is_recorded
        self.engine: Engine = engine
        self.counted: tuple[int, int] | None = None
        self.has_key = request.run is not None
        self.id = new_redrive_id()
        self.request = request if request.run or not is_recorded else replace(request, run=self.id)
        self.report = report
        self.audit: AuditLog | None = None
        self.record: Redrive | None = None
        self.run_record: RunRecord | None = None
        self.may_redrive = True
        self.letters_are_due = False
        self.is_queue_gone = False
        self._progress = progress
        self._caller_stops = stopped
        self._has_stopped = False
        self._controls: list[RedriveControl] = []
        self._watching: asyncio.Task[None] | None = None
        self._began = self._reported_at = time.monotonic()
        self._done_before = 0
        self._is_loaded = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    @property
    def title(self) -> str:
        """What the holder of the queue's lease does, in words."""
        return "bulk redrive" if self.engine == "spark" else self.request.operation

    @property
    def storing(self) -> WorkQueue:
        """The queue that gets the new jobs."""
        return self.request.target or self.queue

    @property
    def wave(self) -> Wave | None:
        """The wave that was recorded last."""
        return self.record.waves[-1] if self.record and self.record.waves else None

    # What people and the caller want.

    def stopped(self) -> bool:
        """Return whether no more letters may be redriven now, by the caller or by what a person asked."""
        return self.caller_stops or self.state in (RedriveState.PAUSED, RedriveState.ABORTED)

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
    def is_finished(self) -> bool:
        """Whether it is recorded as finished, or isn't recorded at all."""
        return self.record is None or self.record.state == RedriveState.FINISHED

    def last_control(self) -> RedriveControl | None:
        """Return what a person asked last that isn't obeyed yet."""
        pending = [control for control in self._controls if self.record and control.sequence > self.record.controls_to]
        return pending[-1] if pending else None

    @property
    def asked(self) -> str:
        """The last control that isn't obeyed yet, with who asked and why."""
        control = self.last_control()
        return control.summary if control else ""

    def gate_control(self) -> RedriveControl | None:
        """Return the first resume since the redrive stopped at its gate, which lets it pass."""
        since = self.record.revision if self.record else 0
        resumes = (control for control in self._controls if control.action == "resume" and control.sequence > since)
        return next(resumes, None)

    async def read_controls(self) -> None:
        """Read what people asked."""
        if self.audit:
            after = self._controls[-1].sequence if self._controls else 0
            self._controls += await read_controls(self.connection, self.audit, self.id, after)

    async def require_queue(self) -> None:
        """Raise unless the queue is the one of the redrive: another one's people can neither read nor steer it.

        :raises QueueGoneError: it was deleted, or deleted and created anew
        """
        if self.record is None:
            return
        try:
            found = str((await stream_info(self.connection, self.queue.name))["created"])
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
        polls = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            polls += 1
            try:
                await self.read_controls()
                if not polls % _POLLS_OF_QUEUE:
                    await self.require_queue()
            except JetStreamProviderError as error:
                log.info("What people ask of the redrive %s couldn't be read: %s", self.id, error)

    async def wait_while(self, state: RedriveState, until: float) -> bool:
        """Wait until a person asks for another state, or the queue is gone; return false where neither came in time.

        :param until: until when at most, in seconds of the monotonic clock
        """
        while self.state == state and time.monotonic() < until and not self.caller_stops:
            if self.is_queue_gone:
                return True
            # The caller's wish to stop is a function, which tells nobody.
            await asyncio.sleep(POLL_SECONDS / 2)
        return self.state != state

    # How it begins and goes on.

    async def open(self) -> None:
        """Read the redrive in waves of the request's key where one was cut off; without the lease."""
        if not (self.has_key and self.request.waves):
            return
        created = (await stream_info(self.connection, self.queue.name))["created"]
        if (audit := await AuditLog.open(self.connection, self.queue, created)) is None:
            return
        self.run_record = await audit.open_run(str(self.request.run))
        redrive = (self.run_record.redrive if self.run_record else None) or str(self.request.run)
        if (record := await read_record(self.connection, audit, redrive)) and not record.state.is_over:
            self.audit, self.id = audit, redrive
            await self._take(record)
            await self._load()

    async def begin(self, scan: Scan, audit: AuditLog, begin_step: Callable[[], Awaitable[None]]) -> None:
        """Begin the redrive, or go on with it; to be called with the lease.

        :param audit: with the lease
        :param begin_step: records that letters are about to be redriven
        :raises RedriveError: the audit takes no records
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        self.audit, request = audit, self.request
        if not self.is_recorded:
            return
        try:
            if self.has_key and self.run_record is None:
                self.run_record = await audit.begin_run(str(request.run), request.who, request.why, self.id)
            await self._begin(scan, audit)
            if self.may_redrive:
                await begin_step()
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            # A discard is undone by its id.
            if not (self.has_key or request.waves or request.order_key or request.discard):
                # Nothing is stored without an intent, so each letter fails for the same reason.
                log.warning("The redrive couldn't be recorded: %s", error)
                self.record = None
                return
            raise RedriveError(
                f"expected {audit.stream} to record the redrive, found: {error}; nothing was redriven: see to it"
                " that the audit takes records, then run it again"
            ) from None

    async def _begin(self, scan: Scan, audit: AuditLog) -> None:
        if self.record:
            await self.require_queue()
        request, run = self.request, self.run_record
        resumes = run is not None and run.redrive != self.id
        self.id = (run.redrive if run else None) or self.id
        if (found := await read_record(self.connection, audit, self.id)) is None:
            last = scan.context.audit["state"]["last_seq"] if scan.context.audit else 0
            # Of a frame, the scan doesn't know which letters it has.
            is_counted = request.selection.selects_all and self.engine == "python" and not request.undo
            found = Redrive(
                id=self.id,
                stream=self.queue.name,
                created=audit.created,
                run=str(request.run),
                engine=self.engine,
                who=request.who,
                why=request.why,
                selection=request.selection.model_dump(mode="json", exclude_defaults=True),
                plan=plan_of(request),
                until=scan.snapshot.state["last_seq"],
                letters=sum(1 for _ in scan.index.sequences(SEQUENCE)) if is_counted else None,
                began_at=scan.snapshot.taken_at,
                from_sequence=run.from_sequence if run else last + 1,
            )
        else:
            resumes = True
            if not found.state.is_over:
                found = found.model_copy(update={"plan": _plan_of_resumed(found.plan, request)})
        await self._take(found)
        if resumes:
            await self._load()
        self._is_loaded = True
        self._began, self._done_before = time.monotonic(), self.report.done

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

    async def _load(self) -> None:
        """Add to the report what the redrive did before it was cut off, once."""
        if self._is_loaded or self.audit is None or self.record is None:
            return
        self._is_loaded = True
        report = self.report
        async for letter in self.audit.letters_of_run(self.record.run, self.record.from_sequence):
            if letter.action == "parked":
                report.add_parked(letter.sequence)
            elif letter.action == "discarded":
                report.add_discarded(letter.sequence)
            else:
                report.add_redriven(letter.sequence, letter.new_sequence or letter.sequence, letter.new_stream)
            report.resumed += 1
        wave = self.wave
        if wave and wave.number >= len(self.request.waves) and self.record.state != RedriveState.FAILED:
            # Whoever redrove the last wave knew which letters of it failed, and no other wave tries them.
            named = self.record.report.get("failures", {})
            report.failed, report.failures = {int(sequence): why for sequence, why in named.items()}, self.record.failed
        if report.resumed:
            log.info("Continuing a redrive that has already handled %d letters", report.resumed)

    # How it is recorded.

    async def save(self, state: RedriveState, *, waves: tuple[Wave, ...] | None = None, reason: str = "") -> None:
        """Record the redrive.

        :param waves: its waves, where they have changed
        :raises LeaseLostError: the operation doesn't have its lease any more
        :raises ApiError: the audit refused it
        :raises TransientError: it isn't known to be recorded
        """
        record, report = self.record, self.report
        if self.audit is None or record is None:
            return
        # What people asked is obeyed once the state is the one that they asked for.
        obeyed = self._controls and record.with_controls(self._controls).state == state
        seconds = time.monotonic() - self._began
        redriven, parked = self.counted or (len(report.redriven), len(report.parked))
        done = redriven + parked + len(report.discarded) - self._done_before
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
                "discarded": len(report.discarded),
                "failed": report.failures,
                "gone": len(report.gone),
                "rate": round(done / seconds, 1) if done and seconds else record.rate,
                "report": {name: value for name, value in report.as_json().items() if name not in _ELSEWHERE},
                "controls_to": self._controls[-1].sequence if obeyed else record.controls_to,
            }
        )
        body = record.model_dump_json(exclude={"at"}).encode()
        ack = await self.audit.store(redrive_subject(self.audit.queue, self.id), body)
        self.record = record.model_copy(update={"revision": ack.sequence})

    async def save_later(self, state: RedriveState, *, waves: tuple[Wave, ...] | None = None, reason: str = "") -> bool:
        """Take the lease and record the redrive; return false where another program has recorded it since.

        :raises RedriveError: the audit takes no records
        """
        while True:
            try:
                async with redrive_lease(self.connection, self.queue, self.request, self._caller_stops) as lease:
                    if lease is None or self.audit is None or self.record is None:
                        return False
                    # What others have left open stays so.
                    if lease.open_since is not None:
                        lease.leave_open()
                    self.audit = self.audit.fenced(lease)
                    found = await read_record(self.connection, self.audit, self.id)
                    if found and found.revision != self.record.revision:
                        await self._take(found)
                        return False
                    await self.save(state, waves=waves, reason=reason)
                    return True
            except LeaseHeldError:
                if self.caller_stops:
                    raise
            except LeaseLostError:
                raise
            except (ApiError, TransientError) as error:
                raise RedriveError(f"the state of the redrive {self.id} couldn't be recorded: {error}") from None

    @property
    def final_state(self) -> RedriveState:
        """The state of a redrive that has handled all letters."""
        return RedriveState.FAILED if self.report.failures else RedriveState.FINISHED

    @property
    def final_reason(self) -> str:
        """Why it is in that state; empty where the state says it."""
        failures, request = self.report.failures, self.request
        if not failures:
            return ""
        if request.undo:
            return f"{failures} letters couldn't be brought back"
        verb = "discarded" if request.discard else "redriven"
        return f"{failures} letters couldn't be {verb} and stayed where they were"

    async def save_end(self) -> None:
        """Record that all letters are handled, without the lease; nothing is raised where that isn't possible."""
        try:
            self.audit = self.audit and self.audit.unfenced()
            await self.save(self.final_state, reason=self.final_reason)
        except (ApiError, TransientError) as error:
            log.warning("The end of the redrive %s couldn't be recorded: %s", self.id, error)
        if self.is_finished:
            await self.finish_run()

    async def fail(self, error: Exception) -> None:
        """Record that the redrive ended with an error, with the lease; nothing is raised where that isn't possible."""
        with suppress(JetStreamProviderError):
            await self.save(RedriveState.FAILED, reason=str(error)[:_LONGEST_REASON])

    async def finish_run(self) -> None:
        """Record that the next redrive of the same key is another one; nothing is raised where that isn't possible."""
        if self.audit is None or not self.has_key:
            return
        try:
            await self.audit.unfenced().finish_run(str(self.request.run))
            self.run_record = None
        except (ApiError, TransientError) as error:
            log.warning("The end of the redrive couldn't be recorded, so another one of its key would go on: %s", error)

    # Its progress.

    async def report_if_due(self) -> None:
        """Report the progress unless that was done a moment ago."""
        if time.monotonic() - self._reported_at > PROGRESS_SECONDS:
            await self.report_now()

    @contextmanager
    def waiting(self, until: datetime) -> Iterator[None]:
        """Say in the log and to the caller that slow workers are waited for, until the block ends.

        :param until: when none can have the job of a letter any more, by the server's clock
        """
        self.report.waiting = log_waiting(self.queue.name, until)
        self._progress(self.report)
        try:
            yield
        finally:
            self.report.waiting = ""

    async def report_now(self, end_step: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Report the progress, or how a step ended.

        :param end_step: records how a step ended, and returns whether the redrive is over
        :raises LeaseLostError: the operation doesn't have its lease any more
        """
        self._reported_at = time.monotonic()
        report, finished = self.report, False
        log.info(
            "Redriving %s: %d letters redriven, %d parked, %s%d failed, %d were no dead letters",
            *(self.queue.name, len(report.redriven), len(report.parked)),
            f"{len(report.discarded)} discarded, " if report.discarded else "",
            *(report.failures, len(report.gone)),
        )
        self._progress(report)
        try:
            if end_step:
                finished = await end_step()
            else:
                await self.save(RedriveState.RUNNING)
            if self.run_record and self.audit:
                update = {"report": report.as_json(), "finished": finished}
                await self.audit.record_progress(self.run_record.model_copy(update=update))
        except LeaseLostError:
            raise
        except (ApiError, TransientError) as error:
            log.warning("The progress of the redrive couldn't be recorded: %s", error)


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


async def finish_run(connection: Connection, queue: WorkQueue, run: str, outcomes: RedriveOutcomes) -> dict[str, Any]:
    """Record that a redrive is complete which was left open; nothing is raised where that isn't possible.

    :param run: its key
    :param outcomes: what became of its letters
    :return: state, reason and outcomes as the audit has them, under the names of :meth:`RedriveReport.as_json`
    """
    update: dict[str, Any] = {"state": RedriveState.FINISHED, "reason": "", "outcomes": outcomes}
    try:
        created = (await stream_info(connection, queue.name))["created"]
        if audit := await AuditLog.open(connection, queue, created):
            record = await audit.open_run(run)
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


def plan_of(request: RedriveRequest) -> dict[str, Any]:
    """Return how letters are brought back, as JSON, but for what the request leaves to its defaults."""
    plan = {name: value for name in _PLAIN if (value := getattr(request, name)) not in (None, False)}
    plan["protocol"] = request.protocol.value
    if request.target is not None:
        plan["target"] = request.target.name
    if (transform := request.transform) is not None:
        name = f"{getattr(transform, '__module__', '')}:{getattr(transform, '__qualname__', type(transform).__name__)}"
        plan["transform"] = str(getattr(transform, "description", None) or name)
    if request.body_patch is not None:
        plan["patch"] = request.body_patch.text
    if request.waves:
        plan |= {"waves": list(request.waves), "stop_when": asdict(request.stop_rule)}
    return plan


def _plan_of_resumed(plan: Mapping[str, Any], request: RedriveRequest) -> dict[str, Any]:
    """Return the plan of a redrive that goes on; a patch may be another one, which the letters that are left get.

    :raises RedriveRequestError: it had a patch, and the request would redrive the other letters as they are
    """
    if "patch" in plan and request.patch is None and request.transform is None and request.makes_jobs:
        raise RedriveRequestError(
            f"expected a patch for the letters that are left, as those before got {str(plan['patch'])[:200]}, found"
            " none: give it again, or begin another redrive with a run of its own"
        )
    return {name: value for name, value in plan.items() if name != "patch"} | (
        {} if request.body_patch is None else {"patch": request.body_patch.text}
    )


def total_outcomes(waves: Iterable[Wave]) -> RedriveOutcomes:
    """Return what became of the letters of all waves; a letter that was brought back once more counts once."""
    completed = died = running = unknown = 0
    for wave in waves:
        completed += wave.outcomes.completed
        died += wave.outcomes.died_again - wave.parked_again - wave.brought_again
        unknown += wave.outcomes.unknown
        # The jobs of a wave whose outcome isn't known yet are running.
        known = sum(wave.outcomes.model_dump().values())
        running += wave.outcomes.still_running + (wave.redriven if not known else 0)
    return RedriveOutcomes(completed=completed, died_again=max(0, died), still_running=running, unknown=unknown)
