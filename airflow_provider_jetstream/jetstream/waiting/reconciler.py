"""Finds ends without an event, slowly, so that no waiter waits for ever for a job that is gone.

A server that is killed loses the ack metrics and advisories that it was about to publish. It publishes no advisory
while no pull request comes. A job may expire, be purged, or be acknowledged by a worker that publishes no completion.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumers
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, TransientError
from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects, settled_sequence
from airflow_provider_jetstream.jetstream.waiting.job_end import EndKind, JobEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from typing import Any

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.waiting.awaited_jobs import AwaitedJobs
    from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
    from airflow_provider_jetstream.jetstream.waiting.end_evidence_check import EndEvidenceCheck
    from airflow_provider_jetstream.jetstream.waiting.queue_identity import QueueIdentity
    from airflow_provider_jetstream.jetstream.waiting.stalls import Stalls

log = logging.getLogger(__name__)

INTERVAL = 15.0
# Per round and group of candidates: reading a job reads its body too.
_MAX_CANDIDATES = 64

_NO_ADVISORY = "used up its deliveries without an advisory"


class Reconciler:
    """Compares the awaited jobs with the stored ones.

    :param awaited: the awaited jobs, which change meanwhile
    :param on_end: called with each end that is found
    :param wait_until_read: returns once every event stored so far has been read
    :param evidence: looks at each comparison whether the ends of jobs are stored
    :param identity: compares the queue's stream with the one in which the jobs were stored
    :param stalls: gets the jobs that no consumer delivers
    :param on_stalls: called after each comparison
    """

    def __init__(
        self,
        connection: Connection,
        cursor: Cursor,
        awaited: AwaitedJobs,
        on_end: Callable[[JobEnd], None],
        wait_until_read: Callable[[], Awaitable[None]],
        evidence: EndEvidenceCheck,
        identity: QueueIdentity,
        stalls: Stalls,
        on_stalls: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._queue = cursor.queue
        self._awaited = awaited
        self._on_end = on_end
        self._wait_until_read = wait_until_read
        self._evidence = evidence
        self._identity = identity
        self._stalls = stalls
        self._on_stalls = on_stalls
        self._suspected: dict[int, EndKind] = {}
        # The last candidate of each group, after which the next round continues.
        self._positions = [0, 0, 0]

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
            self._on_stalls()

    async def _compare(self) -> None:
        # An event that is stored and not read yet would look like an end without one.
        await self._wait_until_read()
        try:
            by_name = await probe_consumers(self._connection, self._queue)
            info = await stream_info(self._connection, self._queue)
        except NotFoundError:
            self._stalls.note_absence()
            raise
        if not self._identity.is_same(info):
            # A waiter may have begun meanwhile whose jobs ended before.
            await self._wait_until_read()
            raise self._identity.another(info)
        await self._evidence.check(by_name)
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
                kinds[sequence] = EndKind.VANISHED
            elif _is_dead(message, consumers, by_name.held_above):
                kinds[sequence] = EndKind.DEAD
        stored = {sequence: message.subject for sequence, message in messages.items() if message}
        self._stalls.update(stored, kinds, self._awaited, by_name)
        for sequence, kind in kinds.items():
            # Twice, since an event may be on its way, and an acknowledged job leaves the stream a moment later.
            if suspected_before.get(sequence) is kind:
                self._on_end(JobEnd(kind, sequence, note=_NO_ADVISORY if kind is EndKind.DEAD else ""))
            else:
                self._suspected[sequence] = kind

    async def _candidates(self, settled: int, delivered: int, suspected: Collection[int]) -> list[int]:
        """Choose the suspected jobs, and in turn some of those settled, delivered and not delivered yet."""
        # A job settled for one consumer may belong to another one, and a job may vanish before its delivery.
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
