"""Compares awaited jobs with the server, slowly, so that no wait lasts for ever for a job that nobody will end.

A server that is killed loses the ack metrics and advisories that it was about to publish. It publishes no advisory
while no pull request comes. A job may expire, be purged, or be acknowledged by a worker that publishes no completion.
And no consumer may deliver a job: none takes its subject, those that do are paused, or the queue doesn't exist.
"""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, QueueGoneError, TransientError
from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects, settled_sequence
from airflow_provider_jetstream.jetstream.units import NANOSECONDS
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind, JobEnd
from airflow_provider_jetstream.jetstream.waiting.policy import Stall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.consumers import QueueConsumers
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.waiter import AwaitedJobs

log = logging.getLogger(__name__)

INTERVAL = 15.0
# Per round and group of candidates: reading a job reads its body too.
_MAX_CANDIDATES = 64

_NO_ADVISORY = "used up its deliveries without an advisory"
# A scan that counts pauses a consumer for a few seconds at a time, and a redrive does so in place.
_BRIEF_PAUSE = 15 * NANOSECONDS


class Comparison:
    """Compares the awaited jobs of a queue with the stored ones.

    :param awaited: the awaited jobs, which change meanwhile; their waiters get the stalls
    :param consumers: looks at each comparison whether the ends of jobs are stored
    :param on_end: called with each end that is found
    :param wait_until_read: returns once every event stored so far has been read
    """

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
        self._suspected: dict[int, EndKind] = {}
        # The last candidate of each group, after which the next round continues.
        self._positions = [0, 0, 0]
        # The subjects of stored jobs that may be stalled, by sequence; those that are; that of the queue's stream.
        self._subjects: dict[int, str] = {}
        self._stalls: dict[int | None, Stall] = {}
        self._absence: Stall | None = None

    async def run(self) -> None:
        """Compare at each interval, without end.

        :raises QueueGoneError: the queue was deleted and created anew
        """
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self._compare()
            except (TransientError, ApiError, NotFoundError) as error:
                if self._connection.is_closed:
                    raise
                log.warning("Comparing awaited jobs with %s failed, trying again: %s", self._queue, error)
            self._awaited.record_stalls({None: self._absence} if self._absence else self._stalls)

    async def _compare(self) -> None:
        # An event that is stored and not read yet would look like an end without one.
        await self._wait_until_read()
        try:
            by_name = await probe_consumers(self._connection, self._queue)
            info = await stream_info(self._connection, self._queue)
        except NotFoundError:
            reason = f"stream {self._queue} doesn't exist any more"
            self._absence = self._absence or Stall(reason, time.monotonic())
            raise
        if info["created"] != self._cursor.created:
            # A waiter may have begun meanwhile whose jobs ended before.
            await self._wait_until_read()
            raise other_stream(self._cursor, info["created"])
        self._absence = None
        await self._consumers.check(by_name)
        consumers, first = by_name.values(), info["state"]["first_seq"]
        settled = max([first - 1, *(info["ack_floor"]["stream_seq"] for info in consumers)])
        delivered = max([settled, *(info["delivered"]["stream_seq"] for info in consumers)])
        suspected_before, self._suspected = self._suspected, {}
        candidates = await self._candidates(settled, delivered, suspected_before)

        async def read(sequence: int) -> StoredMessage | None:
            return await get_message(self._connection, self._queue, sequence)

        messages = dict(zip(candidates, await map_concurrently(read, candidates), strict=True))
        kinds: dict[int, EndKind] = {}
        for sequence, message in messages.items():
            if message is None:
                kinds[sequence] = EndKind.UNACCOUNTED
            elif _is_dead(message, consumers, by_name.held_above):
                kinds[sequence] = EndKind.DEAD
        # Those of earlier rounds until they are gone: others are read again in their turn.
        self._subjects |= {sequence: message.subject for sequence, message in messages.items() if message}
        left = {job: text for job, text in self._subjects.items() if job in self._awaited and job not in kinds}
        self._stalls = _stalled(left, by_name, self._stalls, time.monotonic())
        self._subjects = {sequence: subject for sequence, subject in left.items() if sequence in self._stalls}
        for sequence, kind in kinds.items():
            # Twice, since an event may be on its way, and an acknowledged job leaves the stream a moment later.
            if suspected_before.get(sequence) is kind:
                self._on_end(JobEnd(kind, sequence, note=_NO_ADVISORY if kind is EndKind.DEAD else ""))
            else:
                self._suspected[sequence] = kind

    async def _candidates(self, settled: int, delivered: int, suspected: Collection[int]) -> list[int]:
        """Choose the suspected jobs, and in turn some of those settled, delivered and not delivered yet."""
        # A job settled for one consumer may belong to another one, and a job may be gone before its delivery.
        bounds = [0, settled, delivered, SEQUENCE]
        chosen = [sequence for sequence in suspected if sequence in self._awaited]
        for group, (low, high) in enumerate(pairwise(bounds)):
            turn = await self._awaited.some(low, high, self._positions[group], _MAX_CANDIDATES, besides=suspected)
            self._positions[group] = turn[-1] if turn else 0
            chosen += turn
        return chosen


def _is_dead(message: StoredMessage, consumers: Collection[Mapping[str, Any]], held_above: int | None) -> bool:
    for info in consumers:
        if covered_by_any(filter_subjects(info["config"]), message.subject):
            return message.sequence <= settled_sequence(
                info["delivered"]["stream_seq"],
                info["ack_floor"]["stream_seq"],
                info["num_ack_pending"],
                held_above,
            )
    return False


def _stalled(
    subjects: Mapping[int, str],
    consumers: Mapping[str, Mapping[str, Any]],
    before: Mapping[int | None, Stall],
    now: float,
) -> dict[int | None, Stall]:
    """Return the stored jobs that no consumer delivers, since when they were found so first.

    :param subjects: those of the jobs by sequence
    :param consumers: CONSUMER.INFO by name, without the internal ones
    """
    reasons = {subject: _why_stalled(subject, consumers) for subject in set(subjects.values())}
    return {
        sequence: Stall(reason, before[sequence].since if sequence in before else now)
        for sequence, subject in subjects.items()
        if (reason := reasons[subject])
    }


def _why_stalled(subject: str, consumers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why a job of a subject isn't delivered; empty where a consumer takes it and isn't paused."""
    takers = {
        name: info for name, info in consumers.items() if covered_by_any(filter_subjects(info["config"]), subject)
    }
    if not takers:
        existing = ", ".join(sorted(consumers)) or "none"
        return f"no consumer takes its subject {subject} (consumers: {existing})"
    paused = {name: info for name, info in takers.items() if _is_paused(info)}
    if paused.keys() != takers.keys():
        return ""
    return f"{', '.join(map(_pause_clause, paused.values()))}, and no other consumer takes its subject {subject}"


def _is_paused(info: Mapping[str, Any]) -> bool:
    return bool(info.get("paused")) and int(info.get("pause_remaining", 0)) > _BRIEF_PAUSE


def _pause_clause(info: Mapping[str, Any]) -> str:
    until = info["config"].get("pause_until")
    return f"consumer {info['name']} is paused" + (f" until {until}" if until else "")


def other_stream(cursor: Cursor, created: str) -> QueueGoneError:
    """Return the error of a queue that isn't the stream in which the jobs of a wait were stored.

    A stream that is deleted and created anew starts its sequences again. The end of another job would then look like
    that of an awaited one, since events of the server name a job by its sequence only.

    :param created: when the stream was created that has the queue's name now
    """
    return QueueGoneError(
        f"expected stream {cursor.queue} to be the one that stored the awaited jobs, created at {cursor.created};"
        f" found that it was deleted and created anew at {created}: how jobs ended that were still awaited then"
        " can't be known; find out which of them are done before you publish any of them again"
    )
