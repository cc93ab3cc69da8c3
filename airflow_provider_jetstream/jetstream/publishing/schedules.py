"""Scheduled jobs: a stream of their own stores each schedule as a message, and the server makes the jobs itself.

Protocol: NATS ADR-51. A schedule is the job with ``Nats-Schedule`` and ``Nats-Schedule-Target`` added. A subject holds
one schedule; a later one replaces it. The server stores a job that is due in the same stream, and a mover
(:mod:`..mover`) stores it in the work queue. Cron expressions have six fields, the first for seconds. They are checked
before anything is sent: the server reports only that a pattern is invalid.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.jetstream.client.headers import Headers, first, is_servers
from airflow_provider_jetstream.jetstream.client.stream_api import ServerClock, consumer_info, list_streams
from airflow_provider_jetstream.jetstream.client.streams import get_message, next_message, read_range
from airflow_provider_jetstream.jetstream.contract import (
    MOVER,
    MSG_ID,
    SCHEDULED_MSG_ID,
    due_subject,
    job_schedule_filters,
    schedule_filter,
    schedule_once_subject,
    schedule_repeated_subject,
    schedules_stream,
)
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, JobError, NotFoundError
from airflow_provider_jetstream.jetstream.publishing.job import stated_job_id
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, parse_duration, parse_time

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

SCHEDULE = "Nats-Schedule"
TARGET = "Nats-Schedule-Target"
TIME_ZONE = "Nats-Schedule-Time-Zone"

# The API levels of nats-server 2.12 and 2.14: an older one stores a schedule as a message like any other.
ONCE_LEVEL = 2
REPEATED_LEVEL = 4

# Seconds within which a mover takes a job that is due.
_MOVED_WITHIN = 10.0
_SHORTHAND = re.compile(r"@(yearly|annually|monthly|weekly|daily|midnight|hourly)")
_EVERY = "@every "


class _CronField(NamedTuple):
    name: str
    least: int
    most: int
    words: tuple[str, ...] = ()


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_CRON_FIELDS = (
    _CronField("seconds", 0, 59),
    _CronField("minutes", 0, 59),
    _CronField("hours", 0, 23),
    _CronField("days of the month", 1, 31),
    _CronField("months", 1, 12, _MONTHS),
    _CronField("weekdays", 0, 6, _WEEKDAYS),
)
_DAY, _MONTH, _WEEKDAY = 3, 4, 5
_DAYS_OF_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ANY = frozenset({"*", "?"})
_CRON_ITEM = re.compile(r"(?:[*?]|(?P<first>[0-9]+|[a-z]+)(?:-(?P<last>[0-9]+|[a-z]+))?)(?P<step>/0*[1-9][0-9]*)?")


def schedule_headers(at: Any, delay: Any, every: Any, time_zone: Any, *, now: datetime) -> dict[str, str]:
    """Return the headers that make a job a schedule, without the target.

    :param now: the time by this machine's clock
    :raises ValueError: one of the fields can't be used
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
    """Return the value of ``Nats-Schedule`` for a job that is published once.

    :raises ValueError: it is no time with its zone, also as text, and no delay after ``now``
    """
    if delay is not None:
        nanoseconds = parse_duration(delay)
        if nanoseconds < 0:
            raise ValueError(f"expected a delay of at least 0, found {delay!r}")
        at = now + timedelta(microseconds=nanoseconds / 1_000)
    if isinstance(at, str):
        at = parse_time(at)
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise ValueError(f"expected a datetime with its time zone, found {at!r}: add one, such as tzinfo=UTC")
    return f"@at {at.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"


def schedule_repeated(every: Any) -> str:
    """Return the value of ``Nats-Schedule`` for a job that is published repeatedly.

    :raises ValueError: it is no duration of at least a second, no cron expression of six fields, the first for seconds,
        and none of ``@hourly``, ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``
    """
    if isinstance(every, str):
        text = every.strip()
        fields = text.split()
        if _SHORTHAND.fullmatch(text):
            return text
        if len(fields) == len(_CRON_FIELDS) and not text.startswith("@"):
            if problem := cron_problem(fields):
                raise ValueError(f"{problem}, in the cron expression {every!r}")
            return text
        if len(fields) == len(_CRON_FIELDS) - 1 and not text.startswith("@"):
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
    # The server reads durations as Go does, which has no unit for days.
    seconds, rest = divmod(nanoseconds, NANOSECONDS)
    return f"{_EVERY}{nanoseconds}ns" if rest else f"{_EVERY}{seconds}s"


async def scheduled_subjects(connection: Connection, queue: str) -> Counter[str]:
    """Return the subjects on which a queue will get jobs that are scheduled or due, with their numbers."""
    stream = await find_schedules(connection, queue)
    if stream is None:
        return Counter()
    own = due_subject(queue, "")
    targets = [
        message.header(TARGET) if message.header(SCHEDULE) else message.subject
        async for message in read_range(connection, stream, ">")
    ]
    return Counter([target.removeprefix(own) for target in targets if target and target.startswith(own)])


async def find_schedules(connection: Connection, queue: str) -> str | None:
    """Return the name of the stream that stores the schedules of a queue; ``None`` where there is none."""
    configs = [info["config"] for info in await list_streams(connection, schedule_filter(queue))]
    found = schedules_stream(configs, queue)
    return str(found["name"]) if found else None


async def remove_schedules(connection: Connection, queue: str, stream: str, job_ids: Collection[str]) -> Counter[str]:
    """Remove every schedule of jobs with some ids, and those of their jobs that are due and not in the queue yet.

    :param stream: the queue's stream of schedules
    :return: how many were removed of each id
    """
    removed: Counter[str] = Counter()
    for job_id in job_ids:
        for subject in job_schedule_filters(queue, job_id):
            start = 1
            while message := await next_message(connection, stream, start, subject):
                start = message.sequence + 1
                removed[job_id] += await _remove(connection, stream, message.sequence)
    # After the schedules, which make no more of them.
    async for message in read_range(connection, stream, due_subject(queue, ">")):
        job_id = id_of_due(message)
        if job_id in job_ids:
            removed[job_id] += await _remove(connection, stream, message.sequence)
    return removed


def id_of_due(message: StoredMessage) -> str:
    """Return the id by which a job that is due is known; empty where it has none."""
    return stated_job_id(message.headers, message.data) or message.header(SCHEDULED_MSG_ID) or ""


async def _remove(connection: Connection, stream: str, sequence: int) -> bool:
    try:
        await connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    except ApiError:
        if await get_message(connection, stream, sequence) is not None:
            raise
        # It fired, or was moved, before it could be deleted.
        return False
    return True


def _time_zone(time_zone: Any, schedule: str) -> str:
    if schedule.startswith(_EVERY):
        raise ValueError(
            f"expected a time zone with a cron expression only, found {time_zone!r} with {schedule!r}: leave it out, or"
            ' write a cron expression, such as "0 30 8 * * *"'
        )
    # The name of a ZoneInfo.
    name = getattr(time_zone, "key", time_zone)
    from zoneinfo import ZoneInfo, available_timezones

    try:
        ZoneInfo(name)
    except (LookupError, ValueError, OSError, TypeError, AttributeError):
        # A machine without a time zone database can't check the name; the server refuses an unknown one.
        if not isinstance(name, str) or not name or available_timezones():
            raise ValueError(
                f'expected the name of a time zone, such as "Europe/Vienna", found {time_zone!r}'
            ) from None
    return str(name)


def cron_problem(fields: Sequence[str]) -> str | None:
    """Return what was expected and what was found in a cron expression; ``None`` where the server accepts it."""
    values: list[frozenset[int]] = []
    for field, text in zip(_CRON_FIELDS, fields, strict=True):
        if (matching := _cron_values(field, text)) is None:
            words = f" or {field.words[0]} to {field.words[-1]}" if field.words else ""
            return (
                f"expected {field.name} of {field.least} to {field.most}{words}, ranges such as"
                f" {field.least}-{field.least + 1}, steps such as */2, or lists of these, found {text!r}"
            )
        values.append(matching)
    # Where weekdays are restricted too, the server fires on either.
    if fields[_WEEKDAY] in _ANY and min(values[_DAY]) > max(_DAYS_OF_MONTHS[month - 1] for month in values[_MONTH]):
        return f"expected a date that exists, found day {fields[_DAY]} of month {fields[_MONTH]}, which never comes"
    return None


def _cron_values(field: _CronField, text: str) -> frozenset[int] | None:
    values: set[int] = set()
    for item in text.lower().split(","):
        match = _CRON_ITEM.fullmatch(item)
        if match is None:
            return None
        step = int((match["step"] or "/1").removeprefix("/"))
        if match["first"] is None:
            first, last = field.least, field.most
        else:
            first = _cron_number(field, match["first"])
            # With a step, a single number is the first value of the range.
            last = _cron_number(field, match["last"] or (str(field.most) if match["step"] else match["first"]))
        if not field.least <= first <= last <= field.most:
            return None
        values.update(range(first, last + 1, step))
    return frozenset(values)


def _cron_number(field: _CronField, text: str) -> int:
    if text in field.words:
        return field.least + field.words.index(text)
    return int(text) if text.isdecimal() else -1


def scheduled_job(index: int, job: OutgoingJob, queue: WorkQueue | None) -> OutgoingJob:
    """Return the message from which the server makes a job.

    :raises JobError: its schedule isn't one, or the queue has none
    """
    at, delay, every = job.job.at, job.job.delay, job.job.every
    if sum(value is not None for value in (at, delay, every)) > 1:
        raise JobError(f"job {index} has several of at, delay and every: keep one")
    if queue is None:
        raise JobError(f"job {index} has a schedule: pass the queue too, which declares the stream of schedules")
    if not queue.schedules:
        raise JobError(f"job {index} has a schedule, and {queue.name} takes none: declare schedules: true")
    job_id, headers = job.job_id, dict(job.headers)
    try:
        schedule = schedule_headers(at, delay, every, job.job.time_zone, now=datetime.now(UTC))
    except (ValueError, OverflowError) as error:
        raise JobError(f"job {index}: {error}") from None
    if every is None:
        subject, level = schedule_once_subject(queue.name, job_id, job.message_id), ONCE_LEVEL
        headers[SCHEDULED_MSG_ID] = job.message_id
    else:
        if job.given_id is None:
            raise JobError(
                f"job {index} has a repeating schedule: give it an id, by which it can be replaced or cancelled"
            )
        subject, level = schedule_repeated_subject(queue.name, job_id), REPEATED_LEVEL
        # Its subject identifies it. With a message id, the server would drop a changed schedule as a duplicate.
        del headers[MSG_ID]
    scheduled = headers | schedule | {TARGET: due_subject(queue.name, job.subject)}
    return replace(job, subject=subject, headers=scheduled, api_level=level, schedules=queue.schedules.name)


def moved_headers(due: Headers, made_id: str) -> Headers:
    """Return the headers with which a job that is due is stored in its queue.

    :param due: those of the message that is due, or of its schedule
    :param made_id: its message id where its schedule states none
    """
    own = [(name, value) for name, value in due.items() if not is_servers(name) and name != SCHEDULED_MSG_ID]
    return Headers([*own, (MSG_ID, first(due.items(), SCHEDULED_MSG_ID) or made_id)])


@dataclass(frozen=True, slots=True)
class DueJobs:
    """The scheduled jobs that are due and not stored in the queue yet.

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
