"""Sends prepared jobs with a bounded number in flight, and reports the fate of each by its index.

At least once with deduplication: a job counts as stored only when the server has acknowledged it. A job without an
answer is sent again under the same id, and reported by its index if it stays unanswered. Nothing is raised for a job.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.diagnostics import last_report
from airflow_provider_jetstream.jetstream.client.headers import first
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.client.wire import PublishAckForm
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    JobNotSerializableError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    TransientError,
    UnreachableError,
    WrongStreamError,
)
from airflow_provider_jetstream.jetstream.publishing.job_reader import JobReader
from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter, check_rate
from airflow_provider_jetstream.jetstream.publishing.refusals import (
    UnansweredSubjects,
    full_text,
    is_full,
    is_full_subject,
    is_passing,
    job_error,
    too_large,
    too_old,
)
from airflow_provider_jetstream.jetstream.publishing.report import PublishFailure, PublishReport, RepeatedJob
from airflow_provider_jetstream.jetstream.publishing.unique import holder, is_held

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck
    from airflow_provider_jetstream.jetstream.publishing.batch import Batch
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
    from airflow_provider_jetstream.jetstream.publishing.report import Destination

# Of jobs that are looked at one by one, so many are sent before other tasks of the event loop run.
SINGLE_JOBS: Final = 64
# Of others.
BATCH_SIZE: Final = 512
# Of all jobs in flight together: they are kept until they are stored.
_MAX_BYTES = 16 << 20
# Seconds until a full queue is tried again; doubled for as long as it stays full.
_FIRST_PAUSE = 0.05
# Also the longest time until a stop is noticed.
_LONGEST_PAUSE = 1.0
# Seconds until a job is sent again that the server can't store just now.
_PASSING_PAUSE = 0.25
# How often no stream answers before JetStream is asked why.
_UNANSWERED = 2
# So many failures are reported; they are held in memory.
_MAX_FAILURES = 10_000
# After so many jobs, bytes or seconds, other tasks of the event loop run.
_YIELD_JOBS = 64
_YIELD_BYTES = 256 << 10
_YIELD_SECONDS = 0.005
# How often a job is sent whose unique key was in use, and is free when it is looked for.
_HELD_ATTEMPTS = 3


class KnownJobs:
    """Knows which jobs are stored; by itself, none.

    :cvar verifies: whether it finds out itself what the messages are that the server calls duplicates of jobs
    """

    verifies: bool = False

    @property
    def batch_size(self) -> int:
        """How many jobs are sent together at most."""
        return BATCH_SIZE

    def are_new(self, first: int, batch: Batch) -> bool:
        """Note jobs that are about to be sent; return ``False``, with nothing noted, where one may be stored.

        :param first: the index of its first job
        """
        return True

    async def letters_with_keys(self, jobs: Mapping[int, OutgoingJob]) -> Mapping[int, int]:
        """Return by index the jobs whose unique keys belong to dead letters that have left the queue.

        :return: the letters' sequences
        """
        return {}

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job that is about to be sent; ``None`` where it isn't known to be stored."""
        return None


async def _no_progress(_: PublishReport) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Outbox:
    """Sends jobs of one queue, as window, rate and queue allow.

    A job that a full queue refuses is held back, and all jobs after it with it, until the queue has room: the first of
    them is sent alone, and after each success twice as many.

    :param window: the largest number of unacknowledged jobs
    :param ack_timeout: seconds to wait for an acknowledgement before a job is sent again
    :param attempts: the largest number of times that a job is sent for want of an answer
    :param rate: jobs per second at most; as fast as possible where absent
    :param room_timeout: how many seconds a full queue may store no job before the jobs that it refuses are given up
    :param away_timeout: how many seconds the server may say that it can't store a job just now, as while the stream's
        cluster elects a leader
    :param destination: the queue's stream; a job that another one stores is a failure, and ends publishing
    :param stopped: returns whether to stop; the jobs that aren't sent by then are missing in the report
    :raises JobError: the rate isn't above 0
    """

    connection: Connection
    _: KW_ONLY
    window: int = 1024
    ack_timeout: float = 5.0
    attempts: int = 3
    rate: float | None = None
    room_timeout: float = 0.0
    away_timeout: float = 60.0
    destination: Destination | None = None
    stopped: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        check_rate(self.rate)

    async def send(
        self,
        jobs: PreparedJobs | Iterable[Batch],
        known: KnownJobs | None = None,
        progress: Callable[[PublishReport], Awaitable[None]] = _no_progress,
    ) -> PublishReport:
        """Send jobs, and return the fate of each, those included that failed, and what their source raised.

        :param jobs: read in a thread of their own, since their source may block, and about a window ahead at most
        :param known: the jobs that are known to be stored, and aren't sent again; unless it verifies them, what the
            server calls duplicates is believed
        :param progress: awaited after the jobs that were sent together
        :raises UnreachableError: the connection was closed before anything was sent
        """
        # After a lost connection, all jobs in flight arrive at once: no more than those of a second.
        window = self.window if self.rate is None else min(self.window, max(2, ceil(self.rate)))
        known = known or KnownJobs()
        sending = _Sending(self, window)
        subscription = await sending.subscribe()
        try:
            async with JobReader(jobs, window) as reader:
                await sending.send_each(reader, known, progress)
            await sending.settle_held()
        finally:
            await subscription.unsubscribe()
        report = sending.report
        if not known.verifies:
            for repeated in report.repeated:
                report.add_verified(repeated)
            report.repeated = []
        return report


@dataclass(slots=True, eq=False)
class _SentBatch:
    """Jobs that were sent together.

    For the jobs of a larger one nothing but PubAcks has come: a job of which more is known has a batch of its own.
    """

    first: int
    jobs: Batch
    # How many of its jobs have no answer, when they are sent again, and how often they were for want of an answer.
    waiting: int = field(init=False)
    deadline: float = 0.0
    attempts: int = 1
    # Something answered that is no stream; an attempt had no answer, so that the job may be stored.
    foreign_answer: bool = False
    answer_lost: bool = False
    # Since when the server can't store it just now, how often that was the answer, whether it was the last one, and why
    # the server can't: ``None`` where no stream answers.
    passing_since: float = 0.0
    passing: int = 0
    is_passing: bool = False
    refusal: JetStreamProviderError | None = None

    def __post_init__(self) -> None:
        self.waiting = len(self.jobs)

    def singles(self) -> Iterator[_SentBatch]:
        """Yield a batch for each of its jobs."""
        for offset in range(len(self.jobs)):
            yield _SentBatch(self.first + offset, self.jobs.part(offset, offset + 1), self.deadline)


class _Sending:
    """One call: what is in flight, what a full queue has refused, and why nothing more is sent."""

    def __init__(self, outbox: Outbox, window: int) -> None:
        self.report = PublishReport(destination=outbox.destination)
        # By index, the jobs that a full queue refused, while there is time to wait for room; since when it stores none.
        self.refused: dict[int, _SentBatch] = {}
        self.refusal: ApiError | None = None
        self.full_since: float | None = None
        # Why nothing more is sent: no answer for too long; no job stored just now for too long; another stream than the
        # queue's has stored one; no more time to wait for room.
        self.silent = False
        self.away: JetStreamProviderError | None = None
        self.misplaced: JetStreamProviderError | None = None
        self.gave_up: str | None = None
        self._outbox = outbox
        self._connection = outbox.connection
        self._stream = outbox.destination.stream if outbox.destination else ""
        self._stopped = outbox.stopped
        self._window = window
        self._limiter = RateLimiter(outbox.rate)
        self._unanswered = UnansweredSubjects(outbox.connection)
        self._denied: dict[str, PermissionDeniedError] = {}
        # By the index of each job that has no answer; and by those of their first jobs.
        self._waiting: dict[int, _SentBatch] = {}
        self._batches: dict[int, _SentBatch] = {}
        # The jobs whose unique keys are in use, with the sequences of the jobs that have them.
        self._held: list[tuple[_SentBatch, int]] = []
        self._bytes = 0
        self._answered = asyncio.Event()
        self._last_answer = time.monotonic()
        self._useless_since: float | None = None
        self._yielded_at, self._jobs_since, self._bytes_since = time.monotonic(), 0, 0
        self._inbox = outbox.connection.new_inbox()
        self._reply_prefix = f"{self._inbox}.".encode()

    async def subscribe(self) -> Subscription:
        """Subscribe to the answers.

        :raises UnreachableError: the connection is closed
        """
        target, form = self._outbox.destination, None
        if target:
            form = PublishAckForm(self._reply_prefix, target.stream, target.domain or "", self._on_acknowledged)
        try:
            return await self._connection.subscribe_raw(f"{self._inbox}.*", self._on_answer, self._on_denied, form)
        except UnreachableError as error:
            raise UnreachableError(f"nothing was published: {error}") from None

    async def send_each(
        self, jobs: JobReader, known: KnownJobs, progress: Callable[[PublishReport], Awaitable[None]]
    ) -> None:
        """Send jobs as they come, until they end or publishing is stopped, and wait until the fate of each is known."""
        while not self._stopped():
            if self._is_over():
                self.report.is_cut = not jobs.ended
                break
            at_once = self._sends_at_once()
            if at_once and (len(self._waiting) >= self._window or self._bytes > _MAX_BYTES):
                await self._wait_until_at_most(self._window - 1)
                continue
            room = min(self._window - len(self._waiting), known.batch_size) if at_once else 1
            if ready := jobs.take_ready(room, _YIELD_BYTES):
                await self._send_ready(ready, known, at_once=at_once)
                await self._yield(_YIELD_JOBS if at_once else 1, sum(batch.size for batch in ready))
            elif isinstance(jobs.error, Exception):
                self.report.source_error = jobs.error
                break
            elif jobs.error:
                raise jobs.error
            elif jobs.ended:
                break
            else:
                if self.refused:
                    await self._send_refused()
                await jobs.wait(min(self._seconds_left(), _LONGEST_PAUSE))
                await self._send_late()
            await progress(self.report)
        await self._send_refused()

    async def _send_ready(self, ready: Sequence[Batch], known: KnownJobs, *, at_once: bool) -> None:
        """Send jobs that aren't stored yet: at once in one write, or each in its turn."""
        sequences, batches = self.report.sequences, list[_SentBatch]()
        kept = await self._kept_by_letters(ready, known)
        try:
            for jobs in ready:
                first = len(sequences)
                if first in kept:
                    sequences.append(0)
                    if isinstance(letter := kept[first], JetStreamProviderError):
                        self._fail(_SentBatch(first, jobs), letter)
                    else:
                        self.report.held[first] = letter
                    continue
                if at_once and known.are_new(first, jobs):
                    sequences.frombytes(bytes(len(jobs) * sequences.itemsize))
                    batches.append(_SentBatch(first, jobs))
                    continue
                for offset in range(len(jobs)):
                    if sequence := known.sequence_of(first + offset, jobs.job(offset)):
                        self.report.add_stored(sequence)
                        continue
                    sequences.append(0)
                    batches.append(_SentBatch(first + offset, jobs.part(offset, offset + 1)))
        finally:
            admitted = self._admitted(batches)
            if at_once:
                self._write(admitted)
        for batch in [] if at_once else admitted:
            await self._wait_for_turn()
            if problem := self._not_sent():
                self._fail(batch, problem)
            else:
                self._write([batch])

    async def _kept_by_letters(
        self, ready: Sequence[Batch], known: KnownJobs
    ) -> Mapping[int, int | JetStreamProviderError]:
        """Return by index which of the next jobs have the key of a dead letter that has left the queue.

        Where the letters can't be read, why, for each job with a key: the jobs before it may be stored already.
        """
        unique: dict[int, OutgoingJob] = {}
        index = len(self.report.sequences)
        for jobs in ready:
            if job := jobs.unique_job:
                unique[index] = job
            index += len(jobs)
        try:
            return await known.letters_with_keys(unique) if unique else {}
        except JetStreamProviderError as error:
            return dict.fromkeys(unique, error)

    def _admitted(self, batches: Iterable[_SentBatch]) -> list[_SentBatch]:
        """Return the sendable batches; a job that may be wrong, or may have failed, gets a batch of its own."""
        admitted: list[_SentBatch] = []
        for batch in batches:
            jobs, largest = batch.jobs, self._connection.max_payload
            if jobs.is_plain and jobs.largest <= largest and not self._refusal_of(jobs.subject):
                admitted.append(batch)
                continue
            for single in [batch] if len(jobs) == 1 else batch.singles():
                if problem := self._problem_of(single):
                    self._fail(single, problem)
                else:
                    admitted.append(single)
        return admitted

    def _problem_of(self, batch: _SentBatch) -> JetStreamProviderError | None:
        """Return why a job can't be sent."""
        job = batch.jobs.job(0)
        try:
            if job.body is None:
                job.job.payload()
        except JobNotSerializableError as error:
            return error
        if job.api_level > self._connection.api_level:
            # An older server stores a schedule as a message like any other and never makes a job of it.
            return too_old(job, self._connection)
        if (limit := self._connection.max_payload) < batch.jobs.largest:
            return too_large(f"the server's limit of {limit} bytes")
        return self._refusal_of(job.subject)

    def _refusal_of(self, subject: str) -> JetStreamProviderError | None:
        """Return why nothing is sent on a subject, as far as the server has said so already."""
        return self._denied.get(subject) or self._unanswered.missing(subject)

    def _write(self, batches: Sequence[_SentBatch]) -> None:
        """Send jobs in one write; while the connection is lost, they are sent after their deadline."""
        if not batches:
            return
        frames = [batch.jobs.encode(self._reply_prefix, batch.first) for batch in batches]
        deadline = time.monotonic() + self._outbox.ack_timeout
        for batch in batches:
            batch.deadline, batch.is_passing = deadline, False
            self._add(batch)
        try:
            self._connection.write(b"".join(frames), sum(len(batch.jobs) for batch in batches))
        except UnreachableError as error:
            if self._connection.is_connected or self._connection.is_closed:
                for batch in batches:
                    for single in self._apart(batch):
                        self._fail(single, error)

    def _add(self, batch: _SentBatch) -> None:
        self._batches[batch.first] = batch
        self._waiting.update(dict.fromkeys(range(batch.first, batch.first + len(batch.jobs)), batch))
        self._bytes += batch.jobs.size

    def _remove(self, batch: _SentBatch) -> None:
        """Forget a batch, with the jobs that wait for nothing any more."""
        del self._batches[batch.first]
        for index in range(batch.first, batch.first + len(batch.jobs)):
            if self._waiting.get(index) is batch:
                del self._waiting[index]
        self._bytes -= batch.jobs.size

    def _apart(self, batch: _SentBatch) -> list[_SentBatch]:
        """Give each job of a batch that has no answer a batch of its own."""
        if len(batch.jobs) == 1:
            return [batch]
        waiting = [single for single in batch.singles() if self._waiting.get(single.first) is batch]
        self._remove(batch)
        for single in waiting:
            self._add(single)
        return waiting

    def _alone(self, index: int) -> _SentBatch | None:
        """Return the batch that a job has by itself; ``None`` where it isn't in batch."""
        if batch := self._waiting.get(index):
            self._apart(batch)
        return self._waiting.get(index)

    def _fail(self, batch: _SentBatch, error: JetStreamProviderError, *, certain: bool = True) -> None:
        """Report a job as not known to be stored."""
        if self._waiting.get(batch.first) is batch:
            self._remove(batch)
        certain = certain and not batch.answer_lost
        self.report.failures.append(PublishFailure(batch.first, batch.jobs.job(0).job_id, error, certain))

    # What decides when the next jobs are sent.

    def _is_over(self) -> bool:
        """Return whether there is no point in reading more jobs: too many failed, or none is sent any more."""
        if len(self.report.failures) >= _MAX_FAILURES:
            return True
        if self._not_sent() is None:
            self._useless_since = None
            return False
        self._useless_since = self._useless_since or time.monotonic()
        return time.monotonic() - self._useless_since >= _LONGEST_PAUSE

    def _not_sent(self) -> JetStreamProviderError | None:
        """Return why no more jobs are sent."""
        if self.silent:
            reason = "it was not sent: the jobs before it got no answer"
            return UnreachableError(reason + last_report(self._connection.last_error))
        if self.away:
            return UnreachableError(f"it was not sent: {self.away}")
        if self.misplaced:
            return WrongStreamError(f"it was not sent: {self.misplaced}")
        if self.gave_up:
            return QueueFullError(f"it was not sent: {self.gave_up}")
        if self._stopped():
            return TransientError("it was not sent: publishing was stopped")
        return None

    def _sends_at_once(self) -> bool:
        """Return whether nothing but the window decides when the next jobs are sent."""
        if self._limiter.is_limited or self.refused or not self._connection.is_connected:
            return False
        return self._not_sent() is None

    async def _yield(self, count: int, size: int) -> None:
        """Let other tasks run, such as the one that writes to the connection."""
        self._jobs_since += count
        self._bytes_since += size
        if (
            self._jobs_since >= _YIELD_JOBS
            or self._bytes_since >= _YIELD_BYTES
            or time.monotonic() - self._yielded_at >= _YIELD_SECONDS
        ):
            await asyncio.sleep(0)
            self._yielded_at, self._jobs_since, self._bytes_since = time.monotonic(), 0, 0

    async def _wait_for_turn(self) -> None:
        """Wait until window, connection, queue and rate allow one more job."""
        while True:
            await self._wait_until_at_most(self._window - 1)
            while self._waiting and not (
                self._connection.is_connected or self._connection.is_closed or self._not_sent()
            ):
                await self._connection.wait_until_connected(self._seconds_left())
                await self._send_late()
            if self.refused:
                await self._send_refused()
            if self._not_sent() or (seconds := self._limiter.delay(1)) <= 0:
                break
            await self._sleep(seconds)
        self._limiter.consume(1)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but no longer than until a job in flight or a stop needs attention."""
        await asyncio.sleep(min(seconds, self._seconds_left(), _LONGEST_PAUSE))
        await self._send_late()

    # Jobs that have no answer in time, or one that passes.

    async def _wait_until_at_most(self, count: int) -> None:
        """Wait until no more jobs than these are in batch."""
        while len(self._waiting) > count or self._bytes > _MAX_BYTES:
            self._answered.clear()
            try:
                async with asyncio.timeout(self._seconds_left()):
                    await self._answered.wait()
            except TimeoutError:
                await self._send_late()

    def _seconds_left(self) -> float:
        """Return the seconds until a job has to be sent again; endless without jobs."""
        deadline = min((batch.deadline for batch in self._batches.values()), default=float("inf"))
        return max(0.0, deadline - time.monotonic())

    async def _send_late(self) -> None:
        """Send the jobs again that have no answer in time, or whose pause is over."""
        now = time.monotonic()
        for late in [batch for batch in self._batches.values() if batch.deadline <= now]:
            self._apart(late)
        late_ones = sorted(index for index, batch in self._batches.items() if batch.deadline <= now)
        for batch in [self._batches[index] for index in late_ones]:
            # Its answer may have come while another job was sent.
            if self._waiting.get(batch.first) is not batch or batch.deadline > time.monotonic():
                continue
            error = await self._passing_error(batch) if batch.is_passing else self._silence(batch)
            if self._waiting.get(batch.first) is not batch:
                continue
            if error:
                self._fail(batch, error)
                continue
            self._remove(batch)
            self._write([batch])

    def _silence(self, batch: _SentBatch) -> UnreachableError | None:
        """Return the error of a job that had no answer, unless it is to be sent again."""
        batch.answer_lost = True
        attempts, seconds = self._outbox.attempts, self._outbox.ack_timeout
        if batch.attempts < attempts:
            batch.attempts += 1
            return None
        self.silent = self._last_answer < batch.deadline - seconds
        reason = f"no acknowledgement after {attempts} attempts of {seconds:g} s"
        if batch.foreign_answer:
            reason += f": what answers on {batch.jobs.job(0).subject} isn't a stream; provision the queue first"
        return UnreachableError(reason + last_report(self._connection.last_error))

    async def _passing_error(self, batch: _SentBatch) -> JetStreamProviderError | None:
        """Return the error of a job that the server can't store, unless it can only not just now."""
        stream = self._outbox.destination.stream if self._outbox.destination else None
        error = batch.refusal
        if error is None and batch.passing >= _UNANSWERED:
            error = await self._unanswered.reason(batch.jobs.job(0).subject, stream)
        if isinstance(error, NotFoundError):
            return error
        is_over = time.monotonic() - batch.passing_since >= self._outbox.away_timeout
        if is_over or self._stopped():
            self.away = error or await self._unanswered.reason(batch.jobs.job(0).subject, stream)
            return self.away
        return None

    # A full queue.

    async def _send_refused(self) -> None:
        """Wait for all answers, and send the jobs that a full queue refused again.

        Until they are stored, or there is no room for too long.
        """
        count, pause = 1, _FIRST_PAUSE
        while True:
            await self._wait_until_at_most(0)
            if not self.refused:
                return
            now = time.monotonic()
            left = (now if self.full_since is None else self.full_since) + self._outbox.room_timeout - now
            if self.silent or self.away or self._stopped() or left <= 0:
                self._give_up_refused()
                return
            await asyncio.sleep(min(pause, left))
            waiting = len(self.refused)
            sent = self._first_refused(count)
            for index in sent:
                while (seconds := self._limiter.delay(1)) > 0 and not self._stopped():
                    await self._sleep(seconds)
                self._limiter.consume(1)
                batch = self.refused.pop(index)
                batch.attempts = 1
                self._write(self._admitted([batch]))
            await self._wait_until_at_most(0)
            stored = waiting - len(self.refused)
            count = min(2 * count, self._window) if stored == len(sent) else 1
            pause = 0.0 if stored else min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def _first_refused(self, count: int) -> list[int]:
        """Return in their order the jobs to be sent again: the first of them alone finds out whether there is room."""
        refused = sorted(self.refused)
        if count == 1 and self.refusal and is_full_subject(self.refusal):
            # There may be room on the subjects of others.
            firsts = {self.refused[index].jobs.subject: index for index in reversed(refused)}
            return sorted(firsts.values())
        return refused[:count]

    def _give_up_refused(self) -> None:
        problem = self._not_sent()
        if problem is None and self.refusal:
            self.gave_up = full_text(self.refusal, f" and stored nothing for {self._outbox.room_timeout:g} s")
            problem = QueueFullError(self.gave_up)
        for _, batch in sorted(self.refused.items()):
            self._fail(batch, problem or TransientError("it was not sent"))
        self.refused.clear()

    # Answers.

    def _on_acknowledged(self, indexes: Sequence[int], sequences: Sequence[int]) -> None:
        """Record jobs that the queue's stream has stored and didn't have: nearly all answers."""
        self._last_answer, self.silent = time.monotonic(), False
        stored = self._record_stored(indexes, sequences)
        if stored and self._outbox.destination:
            self._note_stored(stored, self._outbox.destination.stream)
        self._answered.set()

    def _record_stored(self, indexes: Sequence[int], sequences: Sequence[int]) -> int:
        """Record the sequences of jobs, and return how many of them were waited for."""
        known, stored = self.report.sequences, 0
        for index, sequence in zip(indexes, sequences, strict=True):
            if batch := self._waiting.pop(index, None):
                known[index] = sequence
                stored += 1
                batch.waiting -= 1
                if not batch.waiting:
                    del self._batches[batch.first]
                    self._bytes -= batch.jobs.size
        return stored

    def _note_stored(self, count: int, stream: str) -> None:
        self.away = self.full_since = None
        self.report.stream = stream
        self._limiter.record_stored(count + len(self._waiting))

    def _on_answer(self, subject: bytes, _reply: bytes, _headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._reply_prefix) :]
        if number.isdigit():
            self._take_answer(int(number), payload)

    def _take_answer(self, index: int, payload: bytes) -> None:
        ack = refusal = None
        try:
            # An empty answer is the server's own: no stream answers on the subject.
            ack = parse_publish_ack("", payload) if payload else None
        except ApiError as error:
            refusal = error
        except UnreachableError:
            # From a subscriber to the subject that is no stream; the stream's own answer may still come.
            if batch := self._alone(index):
                batch.foreign_answer = True
            return
        self._last_answer, self.silent = time.monotonic(), False
        self._answered.set()
        if ack and self._record_among(index, ack):
            return
        if (batch := self._alone(index)) is None:
            return
        if ack:
            self._remove(batch)
            self._record(batch, ack)
        elif refusal is None or is_passing(refusal):
            now = time.monotonic()
            batch.passing_since = batch.passing_since or now
            batch.passing, batch.is_passing = batch.passing + 1, True
            batch.refusal = job_error(refusal) if refusal else None
            batch.deadline = now + _PASSING_PAUSE
        elif batch.jobs.unique_job and is_held(refusal):
            self._remove(batch)
            self._held.append((batch, holder(refusal)))
        elif is_full(refusal) and self._outbox.room_timeout > 0 and not self.gave_up:
            self._remove(batch)
            self.full_since, batch.answer_lost = self.full_since or time.monotonic(), False
            self.refused[index], self.refusal = batch, refusal
        else:
            # An attempt whose answer was lost and that was stored would make this one a duplicate.
            batch.answer_lost = False
            self._fail(batch, job_error(refusal))

    async def settle_held(self) -> None:
        """Find out of the jobs whose unique keys are in use what has the keys, and send those again whose are free."""
        for _ in range(_HELD_ATTEMPTS):
            held, self._held = self._held, []
            free: list[_SentBatch] = []
            holders = await map_concurrently(self._holder_of, [batch for batch, _ in held])
            for (batch, _), message in zip(held, holders, strict=True):
                job = batch.jobs.job(0)
                if isinstance(message, JetStreamProviderError):
                    self._fail(batch, message)
                elif message and first(message.headers, MSG_ID) == job.message_id:
                    self.report.repeated.append(RepeatedJob(batch.first, job, self._stream, message.sequence))
                elif message:
                    self.report.held[batch.first] = message.sequence
                elif batch.answer_lost:
                    key = job.job.unique
                    reason = f"the unique key {key!r} was in use, perhaps by this job: an attempt at it had no answer"
                    self._fail(batch, UnreachableError(f"{reason}; try again"))
                elif problem := self._not_sent():
                    self._fail(batch, problem)
                else:
                    free.append(batch)
            if not free:
                return
            self._write(self._admitted(free))
            await self._send_refused()
        self.report.held |= {batch.first: sequence for batch, sequence in self._held}

    async def _holder_of(self, batch: _SentBatch) -> StoredMessage | JetStreamProviderError | None:
        """Return the job that has a unique key now, or what prevents that it is read."""
        try:
            return await last_message(self._connection, self._stream, batch.jobs.subject)
        except JetStreamProviderError as error:
            return error

    def _record_among(self, index: int, ack: PubAck) -> bool:
        """Record a job of a larger batch as stored, if nothing but that is to be said; return whether it was."""
        batch, target = self._waiting.get(index), self._outbox.destination
        if batch is None or len(batch.jobs) == 1 or ack.duplicate or (target and target.problem(ack)):
            return False
        self._record_stored([index], [ack.sequence])
        self._note_stored(1, ack.stream)
        return True

    def _record(self, batch: _SentBatch, ack: PubAck) -> None:
        target, job, index = self._outbox.destination, batch.jobs.job(0), batch.first
        self.away, batch.answer_lost = None, False
        if target and (problem := target.problem(ack, job.schedules)):
            self.misplaced = problem
            self._fail(batch, problem)
            return
        self._limiter.record_stored(1 + len(self._waiting))
        if ack.duplicate:
            if not job.scheduled:
                self.report.stream = ack.stream
            self.report.repeated.append(RepeatedJob(index, job, ack.stream, ack.sequence))
            return
        self.full_since = None
        self.report.add_acknowledged(index, ack, scheduled=job.scheduled)

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        unheard = denial.subject == f"{self._inbox}.*"
        if unheard:
            self.away = denial
        elif denial.action == "publish":
            self._denied[denial.subject] = denial
        for batch in list(self._batches.values()):
            if unheard or denial.subject == batch.jobs.subject:
                for single in self._apart(batch):
                    self._fail(single, denial, certain=not unheard)
                self._answered.set()
