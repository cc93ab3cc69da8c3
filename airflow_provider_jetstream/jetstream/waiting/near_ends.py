"""Whether awaited jobs are about to end, so that a short wait in place costs less than handing it over.

An Airflow task that defers resumes ten seconds later at the earliest, and takes two starts of a worker process. So jobs
that workers have begun, and that don't usually take long, are worth a slot for about as long. Nothing depends on being
right: what says how long jobs take is a hint, which whoever may publish events can write.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.advisories import AckMetric
from airflow_provider_jetstream.jetstream.client.message_reader import last_message
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.queue.end_evidence import ack_metric_filter
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.report import WaitReport

# What a wait in place takes in any case.
SHORTEST: Final = 2.0
# About what a deferral costs.
LONGEST: Final = 12.0
_INTERVAL = 1.0


async def while_ends_are_near(connection: Connection, cursor: Cursor, report: WaitReport) -> None:
    """Return when the jobs aren't about to end: after 2 to 12 seconds.

    :param report: the state of the jobs, which changes meanwhile
    """
    loop = asyncio.get_running_loop()
    began, jobs = loop.time(), frozenset(report.awaited)
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


def _are_near(elapsed: float, delivered: int, jobs: frozenset[int], report: WaitReport) -> bool:
    awaited = report.awaited
    if not awaited or delivered >= max(awaited):
        return True
    if ended := len(jobs) - len(awaited):
        return elapsed / ended * len(jobs) <= LONGEST
    return delivered >= min(awaited)


async def _usual_seconds(connection: Connection, cursor: Cursor) -> float:
    """Return how long the queue's last acknowledged job took from its delivery; 0 where the server reports none."""
    message = await last_message(connection, cursor.events, ack_metric_filter(cursor.queue))
    event = event_of(message, cursor.queue, connection.domain) if message else None
    if not isinstance(event, AckMetric):
        return 0.0
    return event.ack_time / NANOSECONDS
