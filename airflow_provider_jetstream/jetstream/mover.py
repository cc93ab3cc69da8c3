"""Moves jobs that are due from a queue's stream of schedules to the queue.

The server stores a job that is due beside its schedule, and takes nothing from there to another stream of its own
accord. A mover pulls it, stores it in the queue on its own subject, under the message id that its schedule states, and
acknowledges it once the queue has confirmed it. Several movers share the jobs. What is believed, and why:

- *A message in the place of jobs that are due is one*: if the server made it of a schedule, which a header says that no
  client can have stored there. A client chooses the subject of the server's answers, and permissions don't apply to
  them; such a message is no job, and removed.
- *The server makes the jobs of each stored schedule*: until another message is stored on its subject, be it such an
  answer; then it makes none. A mover looks for that, and stores the schedule once more.
- *The consumer gives each job, with its body, until it is acknowledged*: checked where a connection begins.
- *The queue refused the job*: it isn't stored. A mover keeps it in its hands, and tries again, while the queue is full.
- *The queue calls it a duplicate*: a message with its id was stored. It is the job if its content is the job's
  (:mod:`.publishing.stored_jobs`); otherwise somebody else took the id, and the job is stored under another one.
- *No other mover had it, and the queue remembers each id since it was due*: it isn't stored yet. Otherwise a mover may
  have been killed between the queue's confirmation and its own acknowledgement, or the server, which forgets the ids of
  jobs that are done: so it is looked for in queue and archive before it is stored.
- *Nobody else gets it while it is in a mover's hands*: within the ack wait, which is renewed while it waits. A mover
  that was stopped for longer stores nothing of what it had.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from airflow_provider_jetstream.jetstream.archive import job_sequence, republished_message
from airflow_provider_jetstream.jetstream.cancellation.cancel import (
    Cancellation,
    find_cancellation,
    repeat_cancellation,
)
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.headers import STATUS_LINE, Headers, parse_headers
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck, store, store_each
from airflow_provider_jetstream.jetstream.client.stream_api import (
    ServerClock,
    consumer_info,
    pull_request,
    pull_subject,
    stream_info,
    subject_counts,
)
from airflow_provider_jetstream.jetstream.client.streams import last_message, msg_get, read_range
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.client.wire import DELIVERY_REPLY
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.contract import (
    MOVER,
    MSG_ID,
    SCHEDULED_MSG_ID,
    archive_filter,
    cancellation_filter,
    due_message_id,
    due_subject,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    NotFoundError,
    QueueDeclarationError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.limits import PUBLISHED_SUBJECT
from airflow_provider_jetstream.jetstream.line_text import shown_value
from airflow_provider_jetstream.jetstream.publishing.refusals import full_text, is_full, is_passing
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from airflow_provider_jetstream.jetstream.publishing.schedules import SCHEDULE, id_of_due, moved_headers
from airflow_provider_jetstream.jetstream.publishing.stored_jobs import (
    content_of_message,
    ended_jobs,
    read_messages,
)
from airflow_provider_jetstream.jetstream.queue.declaration import mover_consumer
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

# Jobs that are pulled, looked for and stored together.
_BATCH: Final = 250
# Seconds for which a pull request is open; another one follows.
_PULL_SECONDS: Final = 5.0
# Seconds between tries to store a job in a full queue, and until a mover tries again after an error.
_PAUSE: Final = 1.0
# Seconds after which a job comes again that the queue won't take until somebody changes something.
_SET_ASIDE: Final = 60
# The clocks of a cluster's servers differ by less.
_SKEW: Final = timedelta(seconds=5)
# What a consumer that another tool has edited mustn't differ in.
_PROVISIONED: Final = (
    *("ack_policy", "backoff", "deliver_policy", "deliver_subject", "filter_subject", "filter_subjects"),
    *("headers_only", "max_deliver", "replay_policy"),
)
# The server adds the first to what it makes of a schedule, the second to answers to direct gets, the third to a message
# without its body.
_SCHEDULER: Final = "Nats-Scheduler"
_ANSWERED: Final = "Nats-Stream"
_BODILESS: Final = "Nats-Msg-Size"
# Seconds between searches for schedules that another message hides.
_LOOK_EVERY: Final = 10.0
# How a pull request ends without a message, or with all that it asked for.
_ENDED: Final = ("404", "408", "409 Batch Completed")
_STOP_WITHIN: Final = 10.0
_MOST_TOPICS: Final = 1_000


@dataclass(slots=True, eq=False)
class _Due:
    """A job in the mover's hands.

    :param reply: where it is acknowledged
    :param message: the message that is due
    :param deliveries: how often it was delivered
    :param subject: its own subject
    :param headers: those with which the queue gets it
    """

    reply: str
    message: StoredMessage
    deliveries: int
    subject: str
    headers: Headers

    @property
    def is_made(self) -> bool:
        """Whether the server made it of a schedule."""
        return self.message.header(_SCHEDULER) is not None and self.message.header(_ANSWERED) is None

    @property
    def content(self) -> bytes:
        """The job's subject, headers and body, by which it is told from other jobs."""
        return content_of_message(replace(self.message, subject=self.subject, headers=self.headers.items()))


@dataclass(slots=True, eq=False)
class _Batch:
    """Jobs that were pulled together.

    :param jobs: those that the mover still has
    :param reconnects: how often the connection had been lost
    :param held_until: until when nobody else gets them, by this process's monotonic clock
    """

    jobs: list[_Due]
    reconnects: int
    held_until: float


async def move_due_jobs(connection: Connection, queue: WorkQueue, *, stop: asyncio.Event | None = None) -> int:
    """Move jobs that are due to their queue, as soon as they are, until the mover is told to stop.

    A lost connection is waited for. Several movers of a queue may run.

    :param stop: ends it; what is in its hands and not in the queue yet is left for others
    :return: how many jobs it has moved
    :raises QueueDeclarationError: the queue declares no schedules, or the mover's consumer isn't as it was provisioned
    :raises NotFoundError: the queue, its stream of schedules or the mover's consumer doesn't exist: provision it again
    :raises PermissionDeniedError: the user lacks a right of the role ``mover``
    """
    if queue.schedules is None:
        raise QueueDeclarationError(queue.name, ["expected schedules, found none: declare schedules: true"])
    return await _Mover(connection, queue, queue.schedules.name, stop or asyncio.Event()).run()


class _Mover:
    def __init__(self, connection: Connection, queue: WorkQueue, stream: str, stop: asyncio.Event) -> None:
        self._connection = connection
        self._queue = queue
        self._stream = stream
        self._stop = stop
        self._moved = 0
        self._prefix = due_subject(queue.name, "")
        self._pull_subject = pull_subject(stream, MOVER, connection.api_prefix)
        self._inbox = ""
        self._arrived: list[_Due] = []
        self._wakeup = asyncio.Event()
        # How many jobs the open pull request still gets, and why the server has ended it.
        self._requested = 0
        self._refusal = ""
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # What is stored and not yet acknowledged for certain: by sequence and time, since a sequence may come again.
        self._unconfirmed: set[tuple[int, str]] = set()
        # When something was last said, by what it is about.
        self._said: dict[str, float] = {}

    async def run(self) -> int:
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: self._wakeup.set())
        try:
            while not self._stop.is_set():
                try:
                    await self._follow()
                except TransientError as error:
                    if self._connection.is_closed:
                        raise
                    log.warning("Moving jobs of %s was interrupted, trying again: %s", self._queue.name, error)
                    await self._wait(_PAUSE)
        finally:
            stopping.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_STOP_WITHIN)
            for task in self._tasks:
                task.cancel()
        return self._moved

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _follow(self) -> None:
        """Pull and move until the mover is stopped, or the connection is lost."""
        connection = self._connection
        await connection.wait_until_connected(connection.timeout)
        reconnects = connection.reconnects
        await self._read_settings()
        # One inbox for each connection: what was asked on an earlier one is answered no more.
        self._inbox, self._requested, self._refusal = connection.new_inbox(), 0, ""
        subscription = await connection.subscribe_raw(self._inbox, self._on_message, self._on_denied)
        requested_at = looked_at = -_PULL_SECONDS
        try:
            while not self._stop.is_set():
                if self._failure:
                    raise self._failure
                if connection.reconnects != reconnects or not connection.is_connected:
                    raise UnreachableError("the connection was lost")
                if self._refusal:
                    raise UnreachableError(f"the pull request on {self._pull_subject} was refused: {self._refusal}")
                if time.monotonic() - looked_at > _LOOK_EVERY:
                    looked_at = time.monotonic()
                    await self._restore_schedules()
                if self._requested <= 0 or time.monotonic() - requested_at > 2 * _PULL_SECONDS:
                    self._requested, requested_at = _BATCH, time.monotonic()
                    request = pull_request(_BATCH, expires=_PULL_SECONDS)
                    await connection.publish(self._pull_subject, request, reply=self._inbox)
                self._wakeup.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE):
                        await self._wakeup.wait()
        finally:
            with suppress(TransientError):
                await subscription.unsubscribe()

    async def _read_settings(self) -> None:
        """Read what the streams are like, and since when this connection lasts, by the server's clock."""
        consumer = await consumer_info(self._connection, self._stream, MOVER)
        declared, found = mover_consumer(self._queue.name).config(), consumer["config"]
        if edited := [field for field in _PROVISIONED if (found.get(field) or None) != (declared.get(field) or None)]:
            shown = ", ".join(f"{field} {json.dumps(found.get(field))}" for field in edited)
            problem = f"expected the consumer {MOVER} of {self._stream} as it was provisioned, found {shown}"
            raise QueueDeclarationError(
                self._queue.name, [f"{problem}: set it back with the tool that set it, or provision again"]
            )
        info = await stream_info(self._connection, self._stream)
        queue = await stream_info(self._connection, self._queue.name)
        self._clock = ServerClock.of(queue)
        self._created, self._subjects = info["created"], tuple(queue["config"].get("subjects") or ())
        self._destination = Destination.of(self._queue.name, queue)
        # Well within the window: the server counts it from when the job was stored.
        self._window = timedelta(seconds=queue["config"].get("duplicate_window", 0) / NANOSECONDS / 2)
        # Before the server gives a job to somebody else; all that is sent by then has arrived, or never does.
        ack_wait = consumer["config"]["ack_wait"] / NANOSECONDS
        self._hold = max(ack_wait / 3, ack_wait - 2 * self._connection.timeout)

    async def _restore_schedules(self) -> None:
        """Store schedules once more that another message hides from the server."""
        state = (await stream_info(self._connection, self._stream))["state"]
        if state["messages"] <= state.get("num_subjects", 0):
            return
        hidden = 0
        async for subject, count in subject_counts(self._connection, self._stream, schedule_filter(self._queue.name)):
            schedule = newest = None
            if count > 1:
                async for newest in read_range(self._connection, self._stream, subject):
                    schedule = newest if newest.header(SCHEDULE) else schedule
            if newest and schedule and schedule is not newest:
                kept = [pair for pair in schedule.headers if pair[0] not in (MSG_ID, "Nats-Rollup")]
                condition = ("Nats-Expected-Last-Subject-Sequence", str(newest.sequence))
                try:
                    await store(self._connection, subject, schedule.data, Headers([*kept, condition]))
                except ApiError as error:
                    # Another mover has restored it, or somebody has removed it, or the next search finds it again.
                    log.info("A schedule on %s wasn't restored: %s", shown_value(subject), error)
                else:
                    hidden += 1
        if hidden:
            text = (
                "%d schedules of %s were hidden by messages that are none, and are restored: see who has answers sent"
            )
            self._say("hidden", f"{text} to their subjects", hidden, self._stream)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        if denial.subject in (self._inbox, self._pull_subject):
            self._fail(denial)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._wakeup.set()

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        if subject == self._inbox.encode():
            self._requested = 0
            status = decode_text(headers or b"").partition("\r\n")[0].removeprefix(STATUS_LINE.decode())
            if not status.startswith(_ENDED):
                self._refusal = status or "no answer"
            self._wakeup.set()
            return
        self._requested -= 1
        if self._requested <= 0:
            self._wakeup.set()
        if (match := DELIVERY_REPLY.fullmatch(reply)) is None:
            return
        _, _, deliveries, sequence, stored = match.groups()
        time_text = datetime.fromtimestamp(int(stored) / NANOSECONDS, UTC).isoformat()
        pairs = parse_headers(headers) if headers else ()
        message = StoredMessage(decode_text(subject), int(sequence), time_text, pairs, payload)
        moved = moved_headers(Headers(pairs), due_message_id(self._created, message.sequence))
        own = message.subject.removeprefix(self._prefix)
        if not self._arrived:
            # With all that has arrived in the same turn of the loop.
            asyncio.get_running_loop().call_soon(self._begin)
        self._arrived.append(_Due(reply.decode(), message, int(deliveries), own, moved))

    def _begin(self) -> None:
        jobs, self._arrived = self._arrived, []
        batch = _Batch(jobs, self._connection.reconnects, time.monotonic() + self._hold)
        task = asyncio.create_task(self._move(batch))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _move(self, batch: _Batch) -> None:
        holding = asyncio.create_task(self._keep(batch))
        try:
            jobs = await self._placed(batch)
            known = [job for job in jobs if (job.message.sequence, job.message.time) in self._unconfirmed]
            unsure = [job for job in jobs if job not in known and self._may_be_stored(job)]
            found = [*known, *await self._found(unsure)]
            await self._acknowledge(batch, found)
            cancelled = await self._cancelled([job for job in jobs if job not in found])
            await self._acknowledge(batch, list(cancelled))
            await self._store(batch, [job for job in jobs if job not in found and job not in cancelled])
        except (TransientError, ApiError) as error:
            self._say("again", "%d jobs of %s come again: %s", len(batch.jobs), self._queue.name, error)
            await self._give_back(batch, _PAUSE)
        finally:
            holding.cancel()

    async def _keep(self, batch: _Batch) -> None:
        """Tell the server that a batch is in progress, as long as the mover can be sure to have it."""
        while True:
            await asyncio.sleep(self._hold / 3)
            if not self._holds(batch):
                return
            until = time.monotonic() + self._hold
            with suppress(TransientError):
                for job in batch.jobs:
                    await self._connection.publish(job.reply, b"+WPI")
                batch.held_until = until

    def _holds(self, batch: _Batch) -> bool:
        return time.monotonic() < batch.held_until and self._connection.reconnects == batch.reconnects

    def _may_be_stored(self, job: _Due) -> bool:
        """Return whether an earlier mover may have stored the job although the server may have forgotten its id."""
        due_at, clock = job.message.stored_at, self._clock
        is_new = due_at > clock.answered_at + _SKEW and clock.now() - due_at < self._window
        return job.deliveries > 1 or not is_new

    async def _placed(self, batch: _Batch) -> list[_Due]:
        """Return the jobs that the queue can take; set others aside, and remove what is no job."""
        if foreign := [job for job in batch.jobs if not job.is_made]:
            self._say(
                "foreign",
                "%d messages of %s, such as that of sequence %d on %s, weren't made of a schedule: they are no jobs,"
                " and are removed; see who has answers sent there",
                *(len(foreign), self._stream, foreign[0].message.sequence, shown_value(foreign[0].message.subject)),
            )
            await self._acknowledge(batch, foreign)
        if not all(map(self._is_queues, batch.jobs)):
            info = await stream_info(self._connection, self._queue.name)
            self._subjects = tuple(info["config"].get("subjects") or ())
        for job in list(batch.jobs):
            if problem := self._problem(job):
                await self._set_aside(batch, job, problem)
        return list(batch.jobs)

    def _problem(self, job: _Due) -> str | None:
        if job.message.header(_BODILESS) is not None:
            return f"the consumer {MOVER} delivers it without its body (headers_only)"
        if len(job.subject.encode(errors="surrogateescape")) > PUBLISHED_SUBJECT:
            return f"expected a subject of at most {PUBLISHED_SUBJECT} bytes"
        return None if self._is_queues(job) else f"{self._queue.name} has no such subject"

    def _is_queues(self, job: _Due) -> bool:
        return job.message.subject.startswith(self._prefix) and covered_by_any(self._subjects, job.subject)

    async def _found(self, jobs: Sequence[_Due]) -> list[_Due]:
        """Return the jobs that are stored already, or were: in the queue, or in the archive."""
        if not jobs:
            return []
        wanted: defaultdict[str, list[_Due]] = defaultdict(list)
        for job in jobs:
            wanted[job.headers[MSG_ID]].append(job)
        found: dict[_Due, None] = {}
        since = min(job.message.stored_at for job in jobs) - _SKEW
        async for stored in _jobs_since(self._connection, self._queue, since):
            message_id = stored.header(SCHEDULED_MSG_ID) or stored.header(MSG_ID) or ""
            for job in wanted.get(message_id, ()):
                if stored.stored_at >= job.message.stored_at - _SKEW and content_of_message(stored) == job.content:
                    found[job] = None
        return list(found)

    async def _cancelled(self, jobs: Iterable[_Due]) -> dict[_Due, Cancellation]:
        """Return the jobs that were cancelled after they were due, and their cancellations."""
        jobs = list(jobs)
        if self._queue.events is None or not jobs:
            return {}
        events, first = self._queue.events.name, min(job.message.stored_at for job in jobs)
        latest = await last_message(self._connection, events, cancellation_filter(self._queue.name))
        if latest is None or latest.stored_at < first:
            return {}

        async def find(job: _Due) -> Cancellation | None:
            job_id, due_at = id_of_due(job.message), job.message.stored_at
            return await find_cancellation(self._connection, self._queue, job_id, due_at) if job_id else None

        return {job: one for job, one in zip(jobs, await map_concurrently(find, jobs), strict=True) if one}

    async def _store(self, batch: _Batch, waiting: list[_Due]) -> None:
        """Store jobs, as soon as the queue takes them."""
        count = len(waiting)
        while waiting and not self._stop.is_set():
            part, rest = waiting[:count], waiting[count:]
            if not self._holds(batch):
                raise UnreachableError("they were in nobody's hands for too long")
            messages = [(job.subject, job.message.data) for job in part]
            acks = await store_each(self._connection, messages, [job.headers for job in part])
            stored, refused, taken = await self._sorted(batch, part, acks)
            await self._finish(batch, stored)
            waiting = [*taken, *rest, *refused]
            if refused:
                # One job finds out whether there is room again.
                count = max(1, 2 * len(stored))
                await self._wait(0 if stored else _PAUSE)
                cancelled = list(await self._cancelled(waiting))
                await self._acknowledge(batch, cancelled)
                waiting = [job for job in waiting if job not in cancelled]
            else:
                count = len(waiting)
        await self._give_back(batch, 0)

    async def _sorted(
        self, batch: _Batch, jobs: Sequence[_Due], acks: Sequence[PubAck | ApiError | TransientError]
    ) -> tuple[list[_Due], list[_Due], list[_Due]]:
        """Return three lists of jobs: stored, without room, and with an id that somebody else has used."""
        stored: list[_Due] = []
        refused: list[_Due] = []
        repeated: list[tuple[_Due, PubAck]] = []
        unknown: TransientError | None = None
        for job, ack in zip(jobs, acks, strict=True):
            if isinstance(ack, TransientError):
                unknown = ack
            elif isinstance(ack, PubAck):
                if problem := self._destination.problem(ack):
                    raise problem
                if ack.duplicate:
                    repeated.append((job, ack))
                else:
                    stored.append(job)
            elif is_full(ack):
                self._say("full", "%s: jobs that are due wait", full_text(ack))
                refused.append(job)
            elif is_passing(ack):
                unknown = TransientError(str(ack))
            else:
                await self._set_aside(batch, job, str(ack))
        own = await self._own(repeated)
        if unknown:
            await self._finish(batch, [*stored, *own])
            raise unknown
        return [*stored, *own], refused, [_under_another_id(job) for job, _ in repeated if job not in own]

    async def _own(self, repeated: Sequence[tuple[_Due, PubAck]]) -> list[_Due]:
        """Return the jobs for which the message is their own that has their id."""
        if not repeated:
            return []
        connection, queue, created = self._connection, self._queue, self._destination.created
        messages = await read_messages(connection, queue, created, [ack for _, ack in repeated])
        pairs = list(zip(repeated, messages, strict=True))
        gone = {ack.sequence for (_, ack), message in pairs if message is None}
        ended: Collection[int] = ()
        if gone and queue.events:
            since = min(job.message.stored_at for job, _ in repeated) - _SKEW
            events_from = await _first_since(connection, queue.events.name, ">", since)
            ended = await ended_jobs(connection, queue, created, gone, events_from) if events_from else ()
        return [
            job
            for (job, ack), message in pairs
            if (ack.sequence in ended if message is None else content_of_message(message) == job.content)
        ]

    async def _finish(self, batch: _Batch, stored: list[_Due]) -> None:
        """Acknowledge jobs that are stored."""
        self._moved += len(stored)
        self._unconfirmed.update((job.message.sequence, job.message.time) for job in stored)
        # One may have been cancelled while it was on its way, so that the cancellation is older than the job.
        for cancellation in (await self._cancelled(stored)).values():
            await repeat_cancellation(self._connection, self._queue, cancellation)
        await self._acknowledge(batch, stored)

    async def _acknowledge(self, batch: _Batch, jobs: Sequence[_Due]) -> None:
        self._drop(batch, jobs)
        places = [(job.message.sequence, job.message.time) for job in jobs]
        self._unconfirmed.update(places)
        answers = await self._connection.request_many([(job.reply, b"+ACK") for job in jobs]) if jobs else []
        confirmed = [place for place, answer in zip(places, answers, strict=True) if isinstance(answer, bytes)]
        self._unconfirmed.difference_update(confirmed)

    async def _set_aside(self, batch: _Batch, job: _Due, problem: str) -> None:
        """Name a job that can't be moved as the queue is; it stays, and comes again."""
        self._say(
            f"{job.subject} {problem}",
            "the job of sequence %d of %s, for %s, isn't moved: %s; it stays there, and is tried again",
            *(job.message.sequence, self._stream, shown_value(job.subject), problem),
        )
        await self._connection.publish(job.reply, _nak(_SET_ASIDE))
        self._drop(batch, [job])

    async def _give_back(self, batch: _Batch, seconds: float) -> None:
        """Give the rest of a batch back: the next pull gets it."""
        if self._holds(batch):
            with suppress(TransientError):
                for job in batch.jobs:
                    await self._connection.publish(job.reply, _nak(seconds))
        batch.jobs.clear()

    def _drop(self, batch: _Batch, jobs: Sequence[_Due]) -> None:
        gone = set(jobs)
        batch.jobs[:] = [job for job in batch.jobs if job not in gone]

    def _say(self, topic: str, text: str, *values: object) -> None:
        """Log a warning, once a minute for each topic."""
        now = time.monotonic()
        if now - self._said.get(topic, -_SET_ASIDE) < _SET_ASIDE:
            return
        if len(self._said) >= _MOST_TOPICS:
            self._said.clear()
        self._said[topic] = now
        log.warning(text, *values)


def _under_another_id(job: _Due) -> _Due:
    """Return the job under an id that nobody else can have used, and the id that a later search looks for."""
    log.warning("the message id of a job for %s was taken by somebody else: see who publishes there", job.subject)
    others = [pair for pair in job.headers.items() if pair[0] not in (MSG_ID, SCHEDULED_MSG_ID)]
    first_id = job.headers.get(SCHEDULED_MSG_ID) or job.headers[MSG_ID]
    job.headers = Headers([*others, (SCHEDULED_MSG_ID, first_id), (MSG_ID, f"{first_id}:{uuid4().hex}")])
    return job


def _nak(seconds: float) -> bytes:
    return b'-NAK {"delay": %d}' % round(seconds * NANOSECONDS) if seconds else b"-NAK"


async def _jobs_since(
    connection: Connection, queue: WorkQueue, moment: datetime
) -> AsyncGenerator[StoredMessage, None]:
    """Yield the jobs that a queue has stored since a moment, as the archive has them and as it stores them."""
    created = datetime.fromisoformat((await stream_info(connection, queue.name))["created"])
    if queue.archive:
        async for copy in _read_since(connection, queue.archive.name, archive_filter(queue.name), moment):
            if job_sequence(copy) and (job := republished_message(copy)).stored_at >= created:
                yield job
    async for job in _read_since(connection, queue.name, ">", moment):
        yield job


async def _read_since(
    connection: Connection, stream: str, subject: str, moment: datetime
) -> AsyncGenerator[StoredMessage, None]:
    # A stream that doesn't exist holds none of the jobs.
    with suppress(NotFoundError):
        if start := await _first_since(connection, stream, subject, moment):
            async for message in read_range(connection, stream, subject, start):
                yield message


async def _first_since(connection: Connection, stream: str, subject: str, moment: datetime) -> int | None:
    """Return the sequence of the first message that was stored since a moment by the server's clock, if there is one.

    Needs nats-server 2.11.
    """
    since = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    try:
        first = await msg_get(connection, stream, {"next_by_subj": subject, "start_time": since})
    except NotFoundError:
        return None
    return first.sequence if first else None
