"""Waiting until jobs have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.advisories import Completion, parse_advisory
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.waiting.dispatcher import shared_dispatcher
from airflow_provider_jetstream.jetstream.waiting.job_report import portable_size
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.stalls import FAIL, RECONCILE_SECONDS, StallPolicy
from airflow_provider_jetstream.jetstream.waiting.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.stalls import OnStall

# With counts and sequences, an XCom stays below 64 KiB.
RESULTS_BYTES = 32 * 2**10
_BATCH = 64


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
    :raises QueueGoneError: the queue was deleted and created anew; or it is gone, and ``on_stall`` is ``fail``
    :raises JobsStalledError: no consumer delivers one of the jobs, and ``on_stall`` is ``fail``
    :raises NotFoundError: a stream that is read doesn't exist
    :raises ApiError: the server refuses to read a stream
    :raises UnreachableError: the connection was closed
    """
    report = sequences if isinstance(sequences, WaitReport) else WaitReport(set(sequences))
    began = time.monotonic()
    stall_policy = StallPolicy(reconcile, on_stall)
    waiter = Waiter(cursor, report, policy or WaitPolicy(), progress, advised or {}, stall_policy)
    async with shared_dispatcher(connection, cursor) as dispatcher:
        dispatcher.add(waiter)
        try:
            await waiter.finished
            await dispatcher.confirm(waiter)
        finally:
            dispatcher.remove(waiter)
            report.unsampled_consumers = dispatcher.unsampled_since(began) if report.vanished else {}
        if report.results_at:
            await _read_results(connection, cursor.events, report)
    return report


async def _read_results(connection: Connection, events: str, report: WaitReport) -> None:
    async def read(sequence: int) -> StoredMessage | None:
        return await get_message(connection, events, sequence)

    bytes_left, stored = RESULTS_BYTES, sorted(report.results_at)
    results = dict(report.results)
    report.results = results
    for start in range(0, len(stored), _BATCH):
        batch = stored[start : start + _BATCH]
        for message in await map_concurrently(read, (report.results_at[sequence] for sequence in batch)):
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
