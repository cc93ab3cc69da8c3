"""Scheduled jobs that are due and not in their queue yet: how many, since when, and whether somebody moves them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.message_reader import next_message
from airflow_provider_jetstream.jetstream.client.server_clock import ServerClock
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info
from airflow_provider_jetstream.jetstream.contract import MOVER, due_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, NotFoundError

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection

log = logging.getLogger(__name__)

# Seconds within which a mover takes a job that is due.
_MOVED_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class DueJobs:
    """The scheduled jobs of a queue that are due and that it doesn't have yet.

    :param queue: its name
    :param count: how many they are
    :param since: when the first of them was due
    :param is_moved: whether a mover is there
    """

    queue: str
    count: int
    since: datetime | None
    is_moved: bool

    @property
    def problem(self) -> str:
        """What is wrong, and what to do; empty where nothing is."""
        if not self.since:
            return ""
        since = f"{self.count} jobs of {self.queue} are due since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        if self.is_moved:
            return f"{since}, and the queue doesn't take them: see whether it is full, and what their mover's log says"
        return f"{since}, and nobody moves them to the queue: run {self.command}"

    @property
    def command(self) -> str:
        """The command of a mover."""
        return f"jetstream-queue schedules run {self.queue}"


async def warn_unless_moved(connection: Connection, queue: str, schedules: str) -> None:
    """Log a warning where jobs were scheduled and no mover is there; what the user may not read isn't known."""
    try:
        due = await inspect_due_jobs(connection, queue, schedules)
    except (JetStreamProviderError, ApiError) as error:
        log.info("Whether a mover takes scheduled jobs of %s to it isn't known: %s", queue, error)
        return
    if not due.is_moved:
        log.warning("%s", due.problem or f"nobody moves scheduled jobs of {queue} once they are due: run {due.command}")


async def inspect_due_jobs(connection: Connection, queue: str, schedules: str) -> DueJobs:
    """Read which jobs are due, and whether a mover is there, by two or three requests.

    A job counts as due once it has been so for some seconds, in which a mover takes it.

    :param schedules: the queue's stream of schedules
    :raises ApiError: the server refused
    """
    try:
        info = await consumer_info(connection, schedules, MOVER)
    except NotFoundError:
        info = {}
    first = await next_message(connection, schedules, 1, due_subject(queue, ">"))
    clock = ServerClock.of(info) if info.get("ts") else await ServerClock.read(connection, schedules)
    if first is None or -clock.seconds_until(first.stored_at) < _MOVED_WITHIN:
        return DueJobs(queue, 0, None, is_moved=bool(info.get("num_waiting")))
    count = info.get("num_pending", 0) + info.get("num_ack_pending", 0)
    return DueJobs(queue, max(1, count), first.stored_at, is_moved=bool(info.get("num_waiting")))
