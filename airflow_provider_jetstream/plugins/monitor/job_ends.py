"""How jobs ended that redrives have stored: read when somebody looks, since a redrive without waves awaits none."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrives import RedriveOutcomes
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.streams import next_message
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.waiting.comparison import read_jobs
from airflow_provider_jetstream.jetstream.waiting.cursor import take_cursor
from airflow_provider_jetstream.jetstream.waiting.follower import shared_follower
from airflow_provider_jetstream.jetstream.waiting.policy import WaitPolicy
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport
from airflow_provider_jetstream.jetstream.waiting.wait import wait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.audit.redrives import Redrive
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# Of a redrive of more letters, only what it recorded itself is known.
MOST_JOBS = 20_000
_READING_SECONDS = 15.0
_ANY_END = WaitPolicy(max_dead=None, max_cancelled=None, max_unaccounted=None)


async def read_outcomes(connection: Connection, queue: WorkQueue, redrive: Redrive) -> RedriveOutcomes:
    """Return what became of a redrive's letters by now; its own record of it, where it has one or is too large."""
    known = redrive.outcomes
    if redrive.waves or not redrive.redriven or redrive.redriven > MOST_JOBS or sum(known.model_dump().values()):
        return known
    info = await stream_info(connection, queue.name)
    audit = await AuditLog.open(connection, queue, info["created"])
    if audit is None or redrive.created != info["created"]:
        return known
    jobs: set[int] = set()
    elsewhere = 0
    async for letter in audit.letters_of_run(redrive.run, redrive.from_sequence):
        if letter.action == "requeued":
            jobs.add(letter.sequence)
        elif letter.action == "redriven" and letter.new_sequence and not letter.new_stream:
            jobs.add(letter.new_sequence)
        elif letter.action == "redriven":
            elsewhere += 1
    report = await read_ends(connection, queue, jobs, redrive.began_at)
    gone = await gone_among(connection, queue.name, report.awaited)
    return RedriveOutcomes(
        completed=len(report.completed) + len(report.cancelled),
        died_again=len(report.dead),
        still_running=len(report.awaited) - len(gone),
        unknown=len(report.unaccounted) + len(gone) + elsewhere,
    )


async def gone_among(connection: Connection, queue: str, jobs: Iterable[int]) -> set[int]:
    """Return which jobs aren't stored any more."""
    sequences = sorted(jobs)
    stored = await read_jobs(connection, queue, sequences)
    return {sequence for sequence, message in zip(sequences, stored, strict=True) if message is None}


async def read_ends(connection: Connection, queue: WorkQueue, jobs: Iterable[int], since: datetime) -> WaitReport:
    """Return which of some jobs have ended, as far as their ends are stored by now.

    :param since: from when on they may have ended
    """
    report = WaitReport(set(jobs))
    if queue.events is None or not report.awaited:
        return report
    cursor = await take_cursor(connection, queue)
    cursor = replace(
        cursor,
        events_from=await _start(connection, cursor.events, since),
        dead_letters_from=await _start(connection, cursor.dead_letters, since),
        audit_from=await _start(connection, cursor.audit, since),
    )
    async with shared_follower(connection, cursor) as follower:
        waiting = asyncio.create_task(wait(connection, cursor, report, policy=_ANY_END))
        # It waits from its first step on, so that what is read then is read for it.
        await asyncio.sleep(0)
        reading = asyncio.create_task(follower.read_stored())
        try:
            await asyncio.wait({reading, waiting}, timeout=_READING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, waiting):
                task.cancel()
                with suppress(asyncio.CancelledError, JetStreamProviderError):
                    await task
    return report


async def _start(connection: Connection, stream: str | None, since: datetime) -> int:
    return max(1, await first_since(connection, stream, since)) if stream else 1


async def first_since(connection: Connection, stream: str, since: datetime) -> int:
    """Return a sequence below which a stream stores nothing that is younger than a time."""
    state = (await stream_info(connection, stream))["state"]
    low, high = int(state["first_seq"]), int(state["last_seq"]) + 1
    if not state["messages"] or datetime.fromisoformat(state["first_ts"]) >= since:
        return low
    while low < high:
        middle = (low + high) // 2
        message = await next_message(connection, stream, middle, ">")
        if message is None or message.stored_at >= since - timedelta(seconds=1):
            high = middle
        else:
            low = message.sequence + 1
    return low
