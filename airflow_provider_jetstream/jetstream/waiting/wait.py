"""Waiting until jobs have ended: by their sequences, by their handle, and in place while their ends are near."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.attempts import AttemptReader
from airflow_provider_jetstream.jetstream.cancellation.cancel import cancel_stored
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, list_consumers
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.errors import DeadlineError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.jetstream.waiting.comparison import read_jobs
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.handle import JobsHandle
from airflow_provider_jetstream.jetstream.waiting.job_reports import failed_jobs, portable_size
from airflow_provider_jetstream.jetstream.waiting.policy import FAIL, RECONCILE_SECONDS, StallPolicy, WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.attempts import AttemptReport
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.policy import OnStall

log = logging.getLogger(__name__)

WHY_FAILED = "the wait for it failed"
# With counts and sequences, an XCom stays below 64 KiB.
RESULTS_BYTES = 32 * 2**10
_BATCH = 64
# What a wait in place takes in any case; about what a deferral costs.
SHORTEST: Final = 2.0
LONGEST: Final = 12.0
_INTERVAL = 1.0
_ENDS_PER_SECOND = 1_000
_LEAST_READING = 30.0
# How often the log of a wait says how far jobs are, of how many jobs, where at most so many are awaited.
ATTEMPTS_SECONDS: Final = 10.0
_LOGGED, _LOOKED_AT, _MOST_LOOKED_AT = 5, 20, 10_000
# With more waits than that in a process, each logs more rarely.
_WAITS_AT_ONCE: Final = 20
_logging: set[asyncio.Task[None]] = set()


async def wait(
    connection: Connection,
    cursor: Cursor,
    sequences: Iterable[int] | WaitReport,
    *,
    policy: WaitPolicy | None = None,
    progress: Callable[[WaitReport], None] = lambda _: None,
    advised: Mapping[str, int] | None = None,
    reconcile: float = RECONCILE_SECONDS,
    on_stall: OnStall = FAIL,
) -> WaitReport:
    """Wait until every job ended, enough completed, or too many did otherwise.

    :param cursor: taken before the jobs were published
    :param sequences: the jobs' stream sequences, or the report of an earlier wait for them
    :param policy: which ends are acceptable; only completions where absent
    :param progress: called after each end
    :param advised: the jobs that workers of any make report on advisory subjects of the queue: ``advised`` of the
        :class:`~airflow_provider_jetstream.jetstream.PublishReport`
    :param reconcile: how many seconds the queue has to be gone, or a stored job without a consumer that delivers it,
        until that is reported; the jobs are compared with the server every 15 s
    :param on_stall: ``fail`` to end the wait with an error then, ``wait`` to go on with a warning
    :return: the report; its ``awaited`` is empty unless the policy ended the wait early
    :raises ArgumentError: ``reconcile`` or ``on_stall`` can't be used
    :raises QueueGoneError: the queue was deleted and created anew; or it is gone, and ``on_stall`` is ``fail``
    :raises JobsStalledError: no consumer delivers one of the jobs, and ``on_stall`` is ``fail``
    :raises NotFoundError: a stream that is read doesn't exist
    :raises ApiError: the server refuses to read a stream
    :raises UnreachableError: the connection was closed
    """
    report = sequences if isinstance(sequences, WaitReport) else WaitReport(set(sequences))
    began, stalls = time.monotonic(), StallPolicy(reconcile, on_stall)
    waiter = Waiter(cursor, report, policy or WaitPolicy(), progress, advised or {}, stalls)
    async with shared_follower(connection, cursor) as follower, _logged_attempts(connection, cursor, report):
        follower.add(waiter)
        try:
            await waiter.finished
            await follower.confirm(waiter)
        finally:
            follower.remove(waiter)
            report.unsampled_consumers = follower.unsampled_since(began) if report.unaccounted else {}
        if report.results_at:
            await _read_results(connection, cursor.events, report)
    return report


@asynccontextmanager
async def _logged_attempts(connection: Connection, cursor: Cursor, report: WaitReport) -> AsyncIterator[None]:
    """Log what workers say of the awaited jobs, until the block ends; nothing where the queue stores no attempts."""
    if cursor.attempts is None:
        yield
        return
    reader = AttemptReader(connection, cursor.attempts, cursor.queue, {})
    # In the context of the wait, by which Airflow gives the lines of a trigger to the log of its task.
    logging_ = asyncio.create_task(_log_attempts(connection, reader, datetime.fromisoformat(cursor.created), report))
    _logging.add(logging_)
    try:
        yield
    finally:
        _logging.discard(logging_)
        logging_.cancel()
        await asyncio.gather(logging_, return_exceptions=True)


async def _log_attempts(connection: Connection, reader: AttemptReader, created: datetime, report: WaitReport) -> None:
    logged: dict[int, AttemptReport] = {}
    while True:
        # The waits of a triggerer, of which there may be thousands, log a dozen lines a second together.
        await asyncio.sleep(ATTEMPTS_SECONDS * max(1.0, len(_logging) / _WAITS_AT_ONCE))
        awaited = report.awaited
        if len(awaited) > _MOST_LOOKED_AT:
            continue
        # Those of the lowest sequences run, or have been tried, before the others.
        first = sorted(awaited)[:_LOOKED_AT]
        try:
            found = zip(first, await map_concurrently(partial(reader.last_of, stored_at=created), first), strict=True)
            news = {job: attempt for job, attempt in found if attempt and attempt != logged.get(job)}
            now = (await ServerClock.read(connection, reader.queue)).now() if news else created
        except JetStreamProviderError as error:
            log.debug("how far jobs of %s are isn't known: %s", reader.queue, error)
            continue
        for job, attempt in list(news.items())[:_LOGGED]:
            log.info("job %d of %s, %s", job, reader.queue, attempt.describe(now))
        if len(news) > _LOGGED:
            log.info("%d other jobs of %s have news of their attempts", len(news) - _LOGGED, reader.queue)
        logged.update(news)


async def _read_results(connection: Connection, events: str, report: WaitReport) -> None:
    bytes_left, stored = RESULTS_BYTES, sorted(report.results_at)
    results = dict(report.results)
    report.results = results
    for start in range(0, len(stored), _BATCH):
        positions = [report.results_at[sequence] for sequence in stored[start : start + _BATCH]]
        for message in await read_jobs(connection, events, positions):
            event = parse_advisory(message.data) if message else None
            if not isinstance(event, Completion):
                continue
            if (size := portable_size(event.result)) is None:
                report.results_left_out += 1
                continue
            bytes_left -= size
            if bytes_left < 0:
                report.results_left_out = len(stored) - len(results)
                return
            job_id = event.job_id or str(event.stream_seq)
            # Two jobs may have the same id of the user's own.
            results[f"{job_id}#{event.stream_seq}" if job_id in results else job_id] = event.result


async def wait_by_handle(
    connection: Connection,
    handle: object,
    *,
    policy: WaitPolicy | None = None,
    time_limit: float | None = None,
    reconcile: float = RECONCILE_SECONDS,
    on_stall: OnStall = FAIL,
    cancel_on_failure: bool = False,
) -> WaitReport:
    """Wait for the jobs of a handle.

    :param handle: see :meth:`JobsHandle.of`
    :param policy: which ends are acceptable; only completions where absent
    :param time_limit: seconds; without end where absent
    :param reconcile: see :func:`wait`
    :param on_stall: likewise
    :param cancel_on_failure: cancel the jobs that haven't ended when the wait fails
    :raises TerminalError: more jobs became dead letters, were cancelled or are unaccounted for than the policy accepts
    :raises DeadlineError: jobs haven't ended within the time limit
    """
    parsed, policy = JobsHandle.of(handle), policy or WaitPolicy()
    cursor = await parsed.cursor_now(connection)
    report, advised = await parsed.report(connection)
    stalls = StallPolicy(reconcile, on_stall)
    try:
        async with asyncio.timeout(time_limit) as limit:
            await wait(
                *(connection, cursor, report),
                policy=policy,
                advised=advised,
                reconcile=stalls.reconcile,
                on_stall=stalls.on_stall,
            )
        ended = report.as_json()
        if policy.violation(ended) and (
            error := policy.violation(ended, (await failed_jobs(connection, cursor, ended)).describe)
        ):
            raise error
    except (TimeoutError, JetStreamProviderError) as error:
        if cancel_on_failure:
            await cancel_rest(connection, cursor, report.awaited)
        if isinstance(error, JetStreamProviderError) or not limit.expired():
            raise
        raise DeadlineError(
            f"expected every job of {cursor.queue} to end within {time_limit:g} s, found {len(report.awaited)} that did"
            " not: see whether workers take them, or wait longer"
        ) from None
    return report


async def cancel_rest(connection: Connection, cursor: Cursor, awaited: Iterable[int]) -> None:
    """Cancel the jobs of a failed wait that haven't ended; what prevents that is logged only.

    :param awaited: the jobs' stream sequences
    """
    queue = cursor.queue
    try:
        cancelled = await cancel_stored(connection, queue, cursor.events, awaited, WHY_FAILED, created=cursor.created)
    except JetStreamProviderError as error:
        log.warning("The jobs of %s that haven't ended couldn't be cancelled: %s", queue, error)
    else:
        log.info("%d jobs of %s that hadn't ended are cancelled, since %s", cancelled, queue, WHY_FAILED)


async def stored_ends_are_read(connection: Connection, cursor: Cursor, jobs: int) -> None:
    """Return once the waits of a queue have the ends that are stored by now, or when that takes far too long.

    :param jobs: how many are awaited
    """
    async with shared_follower(connection, cursor) as follower:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(_LEAST_READING, jobs / _ENDS_PER_SECOND)):
                await follower.read_stored()


async def while_ends_are_near(connection: Connection, cursor: Cursor, report: WaitReport) -> None:
    """Return when the jobs aren't about to end: after 2 to 12 seconds.

    An Airflow task that defers resumes ten seconds later at the earliest, and takes two starts of a worker process. So
    jobs that workers have begun, and that don't usually take long, are worth a slot for about as long. Nothing depends
    on being right: what says how long jobs take is a hint, which whoever may publish events can write.

    :param report: the state of the jobs, which changes meanwhile
    """
    loop = asyncio.get_running_loop()
    began, jobs = loop.time(), len(report.awaited)
    await asyncio.sleep(SHORTEST)
    try:
        if not jobs or await _usual_seconds(connection, cursor) > LONGEST:
            return
        while (elapsed := loop.time() - began) < LONGEST:
            consumers = await list_consumers(connection, cursor.queue)
            delivered = max((info["delivered"]["stream_seq"] for info in consumers.values()), default=0)
            if not _are_near(elapsed, delivered, jobs, report):
                return
            await asyncio.sleep(min(_INTERVAL, LONGEST - elapsed))
    except JetStreamProviderError:
        # The wait itself says what is wrong.
        return


def _are_near(elapsed: float, delivered: int, jobs: int, report: WaitReport) -> bool:
    awaited = report.awaited
    if not awaited or delivered >= max(awaited):
        return True
    if ended := jobs - len(awaited):
        return elapsed / ended * jobs <= LONGEST
    return delivered >= min(awaited)


async def _usual_seconds(connection: Connection, cursor: Cursor) -> float:
    """Return how long the queue's last acknowledged job took from its delivery; 0 where the server reports none."""
    message = await last_message(connection, cursor.events, ack_metric_filter(cursor.queue))
    event = event_of(message, cursor.queue, connection.domain) if message else None
    return event.ack_time / NANOSECONDS if isinstance(event, AckMetric) else 0.0
