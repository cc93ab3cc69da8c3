"""Jobs for later: the server keeps a schedule as a message and makes the jobs of it itself.

Protocol: NATS ADR-51. A schedule is the job with ``Nats-Schedule`` and ``Nats-Schedule-Target`` added, on a subject of
its own that no consumer takes. There is one per subject; another one on it takes its place.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import get_message, next_message
from airflow_provider_jetstream.jetstream.contract import job_schedule_filters
from airflow_provider_jetstream.jetstream.errors import ApiError
from airflow_provider_jetstream.jetstream.publishing.cron import CRON_FIELDS, cron_problem
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, parse_duration

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

SCHEDULE = "Nats-Schedule"
TARGET = "Nats-Schedule-Target"
TIME_ZONE = "Nats-Schedule-Time-Zone"

# The API levels of nats-server 2.12 and 2.14: an older one stores a schedule as a message like any other.
ONCE_LEVEL = 2
REPEATED_LEVEL = 4


_WRONG_SEQUENCE = 10071
_NAMED = re.compile(r"@(yearly|annually|monthly|weekly|daily|midnight|hourly)")
_EVERY = "@every "


def schedule_headers(at: Any, delay: Any, every: Any, time_zone: Any, *, now: datetime) -> dict[str, str]:
    """Write when a job is to be made.

    :param at: the time; see :func:`schedule_once`
    :param delay: how long after ``now``
    :param every: how often; see :func:`schedule_repeated`
    :param time_zone: in which a cron expression is meant; UTC where ``None``
    :param now: the time by this machine's clock
    :return: the headers that make a schedule of it, without the target
    :raises ValueError: one of them can't be used
    """
    if every is not None:
        schedule = schedule_repeated(every)
        return {SCHEDULE: schedule} | ({} if time_zone is None else {TIME_ZONE: _time_zone(time_zone, schedule)})
    if time_zone is not None:
        raise ValueError(
            f"expected a time zone with a cron expression only, found {time_zone!r} without every: leave it out; at has"
            " a zone of its own"
        )
    return {SCHEDULE: schedule_once(at, delay, now)}


def schedule_once(at: Any, delay: Any, now: datetime) -> str:
    """Write when a job is to be made, once.

    :param at: the time, with its zone; or
    :param delay: how long after ``now``, as :func:`~airflow_provider_jetstream.jetstream.units.parse_duration` reads it
    :param now: the time by this machine's clock
    :return: the value of ``Nats-Schedule``
    :raises ValueError: it is no such time or delay
    """
    if delay is not None:
        nanoseconds = parse_duration(delay)
        if nanoseconds < 0:
            raise ValueError(f"expected a delay of at least 0, found {delay!r}")
        at = now + timedelta(microseconds=nanoseconds / 1_000)
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ValueError(f"expected a datetime with its time zone, found {at!r}: add one, such as tzinfo=UTC")
    return f"@at {at.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"


def schedule_repeated(every: Any) -> str:
    """Write when jobs are to be made, again and again.

    :param every: a duration of at least a second; or a cron expression of six fields, the first for seconds; or
        ``@hourly``, ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``
    :return: the value of ``Nats-Schedule``
    :raises ValueError: it is none of them
    """
    if isinstance(every, str):
        text = every.strip()
        fields = text.split()
        if _NAMED.fullmatch(text):
            return text
        if len(fields) == CRON_FIELDS and not text.startswith("@"):
            if problem := cron_problem(fields):
                raise ValueError(f"{problem}, in the cron expression {every!r}")
            return text
        if len(fields) == CRON_FIELDS - 1 and not text.startswith("@"):
            raise ValueError(
                f"expected a cron expression of six fields, found five in {every!r}: put one for seconds in front, as"
                f' in "0 {text}"'
            )
        every = text.removeprefix(_EVERY)
    try:
        nanoseconds = parse_duration(every)
    except ValueError:
        nanoseconds = 0
    if nanoseconds < NANOSECONDS:
        raise ValueError(
            'expected a duration of at least a second such as "30s", or a cron expression of six fields such as'
            f' "0 30 3 * * *", found {every!r}'
        )
    return f"{_EVERY}{_go_duration(nanoseconds)}"


async def remove_schedules(connection: Connection, queue: str, job_id: str) -> int:
    """Remove every schedule of jobs of an id; what they have made already stays.

    :param connection: the server
    :param queue: the work queue
    :param job_id: the jobs' id
    :return: how many there were
    :raises NotFoundError: the queue doesn't exist
    """
    removed = 0
    for subject in job_schedule_filters(queue, job_id):
        start = 1
        while message := await next_message(connection, queue, start, subject):
            start = message.sequence + 1
            if message.header(SCHEDULE):
                removed += await _remove(connection, queue, message)
    return removed


async def _remove(connection: Connection, queue: str, message: StoredMessage) -> bool:
    try:
        await connection.api(f"STREAM.MSG.DELETE.{queue}", {"seq": message.sequence})
    except ApiError:
        if await get_message(connection, queue, message.sequence) is None:
            # It has fired meanwhile.
            return False
        return await _overwrite(connection, message)
    return True


async def _overwrite(connection: Connection, message: StoredMessage) -> bool:
    """Put an empty message in place of a schedule in a stream that allows no deletes (``deny_delete``)."""
    own = [("Nats-Rollup", "sub"), ("Nats-Expected-Last-Subject-Sequence", str(message.sequence))]
    try:
        await store(connection, message.subject, b"", Headers(own))
    except ApiError as error:
        if error.err_code != _WRONG_SEQUENCE:
            raise
        return False
    return True


def _go_duration(nanoseconds: int) -> str:
    """Write a duration as the server reads it, which knows no days."""
    seconds, rest = divmod(nanoseconds, NANOSECONDS)
    return f"{nanoseconds}ns" if rest else f"{seconds}s"


def _time_zone(time_zone: Any, schedule: str) -> str:
    if schedule.startswith(_EVERY):
        raise ValueError(
            f"expected a time zone with a cron expression only, found {time_zone!r} with {schedule!r}: leave it out, or"
            ' say at what time, as in "0 30 8 * * *"'
        )
    # A ZoneInfo has its name there.
    name = getattr(time_zone, "key", time_zone)
    if not isinstance(name, str) or not _is_time_zone(name):
        raise ValueError(f'expected the name of a time zone, such as "Europe/Vienna", found {time_zone!r}')
    return name


def _is_time_zone(name: str) -> bool:
    from zoneinfo import ZoneInfo, available_timezones

    try:
        ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        # A machine that knows no time zones leaves it to the server, which refuses what it doesn't know.
        return bool(name) and not available_timezones()
    return True
