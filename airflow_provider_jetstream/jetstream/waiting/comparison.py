"""Compares awaited jobs with the server, slowly, so that no wait lasts for ever for a job that nobody will end.

A server that is killed loses the ack metrics and advisories that it was about to publish. It publishes no advisory
while no pull request comes. A job may expire, be purged, or be acknowledged by a worker that publishes no completion.
And no consumer may deliver a job: none takes its subject, those that do are paused, or the queue doesn't exist.

The consumers say more. A worker may name the job of any consumer (``queue/filter_marks.py``), so an end counts where
the consumer's filters match the job's subject. And a worker that creates or updates its consumer without a
``sample_freq`` resets it on the server: then a job that is only acknowledged is gone without a trace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.client.streams import Streams, next_message
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import consumer_completion_filter
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    JetStreamProviderError,
    NotFoundError,
    PermissionDeniedError,
    QueueGoneError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects, settled_sequence
from airflow_provider_jetstream.jetstream.queue.end_evidence import ALL_SAMPLED, ack_metric_filter, sampled_percent
from airflow_provider_jetstream.jetstream.queue.filter_marks import may_have_had
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    log_changes,
    provisioned_declaration,
    undeclared_changes,
)
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind, JobEnd
from airflow_provider_jetstream.jetstream.waiting.policy import Stall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.waiter import AwaitedJobs

    # CONSUMER.INFO by name, without the internal ones.
    _Consumers: TypeAlias = Mapping[str, Mapping[str, Any]]

log = logging.getLogger(__name__)

INTERVAL = 15.0
# Many waits that start together look at the consumers once.
_PAUSE = 1.0
# Per comparison and group of candidates: reading a job reads its body too.
_MAX_CANDIDATES = 64
_NO_ADVISORY = "used up its deliveries without an advisory"
# A scan that counts pauses a consumer for a few seconds at a time, and a redrive does so in place.
_BRIEF_PAUSE = 15 * NANOSECONDS


class _Consumer(NamedTuple):
    filters: tuple[str, ...]
    created: datetime


class QueueConsumers:
    """The consumers of a queue, as they were last read."""

    def __init__(self, connection: Connection, cursor: Cursor) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._events = cursor.events
        self._consumers: dict[str, _Consumer] = {}
        # Many ends that are judged together ask once.
        self._asking = asyncio.Lock()
        self._completing: set[str] = set()
        self._warned: set[str] = set()
        # By consumer, why the server didn't report each acknowledgement, and when that was seen last.
        self._unsampled: dict[str, tuple[str, float]] = {}

    def is_only(self, consumer: str) -> bool:
        """Return whether the queue is known to have this consumer and no other."""
        return self._consumers.keys() == {consumer}

    async def may_have_had(self, pairs: Sequence[tuple[str, int]]) -> list[bool]:
        """Return for each consumer and job whether it may have had that; true where that can't be known."""
        try:
            async with self._asking:
                named = {consumer for consumer, _ in pairs}
                if not self._consumers.keys() >= named:
                    self._note(await list_consumers(self._connection, self._queue))
            if len(self._consumers.keys() | named) <= 1:
                return [True] * len(pairs)
            info = await stream_info(self._connection, self._queue)
            sequences = sorted({sequence for _, sequence in pairs})
            jobs = dict(zip(sequences, await self._read_jobs(sequences, info), strict=True))
        except (NotFoundError, PermissionDeniedError, ApiError) as error:
            log.debug("Which consumers had jobs of %s can't be seen: %s", self._queue, error)
            return [True] * len(pairs)
        return [
            job is None or may_have_had(info["config"], self._consumers, *pair, job.subject, job.stored_at)
            for pair in pairs
            for job in [jobs[pair[1]]]
        ]

    async def _read_jobs(self, sequences: Sequence[int], info: Mapping[str, Any]) -> list[StoredMessage | None]:
        """Return jobs as the queue or the archive stores them; ``None`` where neither does."""
        jobs = await read_jobs(self._connection, self._queue, sequences)
        if None in jobs:
            events = await stream_info(self._connection, self._events)
            queue, _ = provisioned_declaration(self._queue, [events])
            if queue and (archive := await ArchiveReader.open(self._connection, queue, info)):
                jobs = [job or await archive.find(sequence) for job, sequence in zip(jobs, sequences, strict=True)]
        return jobs

    def unsampled_since(self, moment: float) -> dict[str, str]:
        """Return by consumer why the server didn't report each of its acknowledgements at any time since a moment.

        Also where it does so now, or the consumer is gone: what was acknowledged before left no evidence.
        """
        return {name: reason for name, (reason, seen_at) in self._unsampled.items() if seen_at >= moment}

    def _note(self, consumers: _Consumers) -> None:
        self._consumers = {
            name: _Consumer(filter_subjects(info["config"]), datetime.fromisoformat(info["created"]))
            for name, info in consumers.items()
        }

    async def check(self, consumers: _Consumers | None = None) -> None:
        """Look at the consumers and at the events stream, and warn of consumers whose jobs end unseen."""
        if consumers is None:
            consumers = await list_consumers(self._connection, self._queue)
        self._note(consumers)
        events = await stream_info(self._connection, self._events)
        provisioned, _ = provisioned_declaration(self._queue, [events])
        if provisioned is not None:
            log_changes(self._queue, undeclared_changes(provisioned, {self._events: events}, consumers))
        reasons = _unsampled(consumers, events["config"], ack_metric_filter(self._queue))
        self._unsampled |= {name: (reason, time.monotonic()) for name, reason in reasons.items()}
        for name in reasons.keys() - self._completing:
            completions = consumer_completion_filter(self._queue, name)
            if await next_message(self._connection, self._events, 1, completions) is not None:
                self._completing.add(name)
        unseen = reasons.keys() - self._completing
        for name in unseen - self._warned:
            log.warning(
                "The ends of jobs of consumer %s of %s may go unseen: %s, and no worker has stored a completion there,"
                " so a job that a worker only acknowledges counts as unaccounted; provision the queue again, which sets"
                " sample_freq to %s (a worker that creates the consumer itself without it resets it: let it bind to the"
                " one that exists), or run workers that store completions",
                *(name, self._queue, reasons[name], ALL_SAMPLED),
            )
        self._warned = unseen


async def read_jobs(connection: Connection, queue: str, sequences: Sequence[int]) -> list[StoredMessage | None]:
    """Return the stored jobs of some sequences; ``None`` for a sequence without a stored job."""
    stored = await Streams(connection).get_many(queue, sequences)
    return [stored[sequence] for sequence in sequences]


def _unsampled(consumers: _Consumers, events: Mapping[str, Any], metrics: str) -> dict[str, str]:
    """Return by consumer why the server doesn't report each of its acknowledgements to the events stream."""
    reasons: dict[str, str] = {}
    is_captured = covered_by_any(events.get("subjects") or [], metrics)
    for name, info in consumers.items():
        share = info["config"].get("sample_freq")
        # One without acknowledgements is internal: it copies messages to another stream.
        if info["config"].get("ack_policy") == "none":
            continue
        if sampled_percent(share) < sampled_percent(ALL_SAMPLED):
            reasons[name] = f"its sample_freq is {share or 'unset'}"
        elif not is_captured:
            reasons[name] = f"{events['name']} doesn't capture {metrics}"
    return reasons


def ends_of(jobs: Mapping[int, StoredMessage | None], consumers: _Consumers, held: int | None) -> dict[int, EndKind]:
    """Return which awaited jobs seem to have ended, and how.

    :param jobs: as the queue stores them, by sequence
    :param held: the sequence above which jobs that are done may be stored still, if there is one
    """
    return {
        sequence: EndKind.DEAD if job else EndKind.UNACCOUNTED
        for sequence, job in jobs.items()
        if job is None or _is_dead(job, consumers, held)
    }


def stall_reasons(subjects: Mapping[int, str], consumers: _Consumers) -> dict[int, str]:
    """Return of each stored job that no consumer delivers, why.

    :param subjects: the subjects of stored jobs, by sequence
    """
    reasons = {subject: _why_stalled(subject, consumers) for subject in set(subjects.values())}
    return {job: reasons[subject] for job, subject in subjects.items() if reasons[subject]}


def _is_dead(job: StoredMessage, consumers: _Consumers, held: int | None) -> bool:
    for info in consumers.values():
        if covered_by_any(filter_subjects(info["config"]), job.subject):
            numbers = (info["delivered"]["stream_seq"], info["ack_floor"]["stream_seq"], info["num_ack_pending"])
            return job.sequence <= settled_sequence(*numbers, held)
    return False


def _why_stalled(subject: str, consumers: _Consumers) -> str:
    """Return why a job of a subject isn't delivered; empty where a consumer takes it and isn't paused."""
    matching = [info for info in consumers.values() if covered_by_any(filter_subjects(info["config"]), subject)]
    if not matching:
        existing = ", ".join(sorted(consumers)) or "none"
        return f"no consumer takes its subject {subject} (consumers: {existing})"
    if not all(info.get("paused") and int(info.get("pause_remaining", 0)) > _BRIEF_PAUSE for info in matching):
        return ""
    untils = [(info["name"], info["config"].get("pause_until")) for info in matching]
    paused = ", ".join(f"consumer {name} is paused" + (f" until {until}" if until else "") for name, until in untils)
    return f"{paused}, and no other consumer takes its subject {subject}"


class Comparison:
    """Compares the awaited jobs of a queue with the stored ones, and looks whether the ends of jobs are stored."""

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        awaited: AwaitedJobs,
        consumers: QueueConsumers,
        on_end: Callable[[JobEnd], None],
        wait_until_read: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._cursor = cursor
        self._queue = cursor.queue
        self._awaited = awaited
        self._consumers = consumers
        self._on_end = on_end
        self._wait_until_read = wait_until_read
        self._requested = asyncio.Event()
        self._suspected: dict[int, EndKind] = {}
        # The last candidate of each group, after which the next comparison continues.
        self._positions = [0, 0, 0]
        # The subjects of the stored jobs that are stalled; the stalls of jobs, and with None that of the stream.
        self._subjects: dict[int, str] = {}
        self._stalls: dict[int | None, Stall] = {}

    def request_check(self) -> None:
        """Have the consumers looked at soon, since a wait begins whose jobs need the evidence of these."""
        self._requested.set()

    async def check_on_request(self) -> None:
        """Look at the consumers after each request, without end."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self._consumers.check()
            except JetStreamProviderError as error:
                if self._connection.is_closed:
                    raise
                # Nor for a lack of permission: a wait needs no evidence about its evidence.
                log.debug("Whether the ends of jobs of %s are stored can't be seen now: %s", self._queue, error)
            await asyncio.sleep(_PAUSE)

    async def run(self) -> None:
        """Compare at each interval, without end."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._compare()
            except (TransientError, ApiError, NotFoundError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Comparing awaited jobs with %s failed, trying again: %s", self._queue, error)
            self._awaited.record_stalls({None: self._stalls[None]} if None in self._stalls else self._stalls)

    async def _compare(self) -> None:
        # An event that is stored and not read yet would look like an end without one.
        await self._wait_until_read()
        try:
            consumers = await probe_consumers(self._connection, self._queue)
            info = await stream_info(self._connection, self._queue)
        except NotFoundError:
            self._stalls.setdefault(None, Stall(f"stream {self._queue} doesn't exist any more", time.monotonic()))
            raise
        if info["created"] != self._cursor.created:
            # A waiter may have begun meanwhile whose jobs ended before.
            await self._wait_until_read()
            raise other_stream(self._cursor, info["created"])
        self._stalls.pop(None, None)
        await self._consumers.check(consumers)
        floors, settled = consumers.values(), info["state"]["first_seq"] - 1
        settled = max([settled, *(each["ack_floor"]["stream_seq"] for each in floors)])
        candidates = self._candidates(settled, max([settled, *(each["delivered"]["stream_seq"] for each in floors)]))
        jobs = dict(zip(candidates, await read_jobs(self._connection, self._queue, candidates), strict=True))
        ends, suspected = ends_of(jobs, consumers, consumers.held_above), self._suspected
        subjects = self._subjects | {sequence: job.subject for sequence, job in jobs.items() if job}
        left = {job: subject for job, subject in subjects.items() if job in self._awaited and job not in ends}
        reasons, before, now = stall_reasons(left, consumers), self._stalls, time.monotonic()
        self._subjects = {job: left[job] for job in reasons}
        self._stalls = {job: Stall(why, before[job].since if job in before else now) for job, why in reasons.items()}
        # Twice, since an event may be on its way, and an acknowledged job leaves the stream a moment later.
        self._suspected = {job: kind for job, kind in ends.items() if suspected.get(job) is not kind}
        for sequence, kind in ends.items():
            if sequence not in self._suspected:
                self._on_end(JobEnd(kind, sequence, note=_NO_ADVISORY if kind is EndKind.DEAD else ""))

    def _candidates(self, settled: int, delivered: int) -> list[int]:
        """Choose the suspected jobs, and in turn some of those settled, delivered and not delivered yet."""
        # A job settled for one consumer may belong to another one, and a job may be gone before its delivery.
        chosen = [sequence for sequence in self._suspected if sequence in self._awaited]
        for group, (low, high) in enumerate(pairwise([0, settled, delivered, SEQUENCE])):
            after = max(low, self._positions[group])
            turn = self._awaited.some(after, high, _MAX_CANDIDATES, self._suspected) or self._awaited.some(
                low, high, _MAX_CANDIDATES, self._suspected
            )
            self._positions[group] = turn[-1] if turn else 0
            chosen += turn
        return chosen


def other_stream(cursor: Cursor, created: str) -> QueueGoneError:
    """Return the error for a queue whose stream was created anew since the wait's jobs were stored.

    A stream that is deleted and created anew starts its sequences again. The end of another job would then look like
    that of an awaited one, since events of the server name a job by its sequence only.

    :param created: when the stream was created that has the queue's name now
    """
    return QueueGoneError(
        f"expected stream {cursor.queue} to be the one that stored the awaited jobs, created at {cursor.created};"
        f" found that it was deleted and created anew at {created}: how jobs ended that were still awaited then"
        " can't be known; find out which of them are done before you publish any of them again"
    )
